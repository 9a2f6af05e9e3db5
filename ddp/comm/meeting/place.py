"""Finds this process's rank, the world size, and where the ranks meet, from the environment that its launcher has set.

| launcher              | rank, world size               | of its host                          | they meet at       |
|-----------------------|--------------------------------|--------------------------------------|--------------------|
| torch.distributed     | as it has begun already        | as below, if that agrees             | its store          |
| torchrun, Ray Train   | RANK, WORLD_SIZE               | LOCAL_RANK, LOCAL_WORLD_SIZE         | MASTER_ADDR, _PORT |
| Open MPI, MVAPICH     | …_COMM_WORLD_RANK, …_SIZE      | …_LOCAL_RANK, …_LOCAL_SIZE           | note "meeting"     |
| submitit, on one host | SUBMITIT_LOCAL_GLOBALID, …     | SUBMITIT_LOCAL_LOCALID, …            | note "meeting"     |
| srun, submitit        | SLURM_PROCID, …_STEP_NUM_TASKS | SLURM_LOCALID, …_STEP_TASKS_PER_NODE | rank 0's host      |
| Flux                  | FLUX_TASK_RANK, FLUX_JOB_SIZE  | FLUX_TASK_LOCAL_ID                   | MASTER_ADDR, _PORT |
| MPICH, Intel MPI      | PMI_RANK, PMI_SIZE             | MPI_LOCALRANKID, MPI_LOCALNRANKS     | note "meeting"     |
| none, TensorFlow's    | cluster.spec, TF_CONFIG        | the same                             | rank 0's address   |
| Spark, barrier stage  | BarrierTaskContext             |                                      | rank 0's host      |

In a run with parameter servers, the role of a process (`role.py`) decides its place: a server is a rank among the
servers, and a worker is alone, whatever the variables say. Otherwise the first row that is set counts. Without any,
this process is a world of one. If variables show several processes, but not which of them this one is, each would train
alone, so that is an error. One row may say that this process is alone while another one shows more: independent
programs in one Slurm step set RANK=0 and WORLD_SIZE=1, and so does a surviving rank of torchrun, whose LOCAL_RANK is
still set. Then the first row counts, and a warning says so.

A description of the whole cluster (`cluster_spec.py`) needs no launcher. On the command line, `cluster.spec` overrides
every launcher that says that this process is alone, and is an error next to any other launcher.

PyTorchJob sets only RANK and WORLD_SIZE. If the host's columns are missing, the ranks of a host count each other
(`rendezvous.py::on_this_host`).

Note "two launchers". One may start the other: srun starts torchrun or a Ray worker on each node, and these number their
ranks differently. But if RANK was set by hand, and another launcher gives this process a different rank in the same
world size, one of them is wrong, so that is an error.

Slurm's variables are those of a job *step*, because a batch script, which is one process, has SLURM_NTASKS as well.

Note "meeting". MASTER_ADDR and MASTER_PORT override all else. MPI gives its ranks no address before MPI_Init. On one
host its ranks meet at a port derived from the process that has started them all.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import socket
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ddp.comm.meeting import cluster_spec
from ddp.comm.meeting.cluster_spec import ClusterTask
from ddp.comm.meeting.role import ROLE, current_role, role_from_env, store_address
from ddp.comm.meeting.secret import FOLDER
from ddp.errors import ConfigError
from ddp.process.terminal import log

LOOPBACK = "127.0.0.1"
FIRST_PORT, NUM_PORTS = 15_000, 15_000
"""Ports derived from a job's name: below the kernel's ephemeral ports."""

HOW_TO_START = "start it with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process"


class RankPlace(NamedTuple):
    """One rank among others.

    Attributes:
        launcher: name of the launcher that started the ranks.
        local_rank, local_world_size: its number among the ranks of its host, and their number; None: unknown.
        address, port: where rank 0 serves the store; "" and 0 if torch.distributed has one, or none is needed.
        tasks: by rank, its task in the description of a cluster; empty without one.
        part: the role of this process in a run with parameter servers, as "worker 1"; "" elsewhere.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    address: str = ""
    port: int = 0
    tasks: tuple[ClusterTask, ...] = ()
    part: str = ""

    @property
    def role(self) -> str:
        """The task of this process, as "worker:1", or its part; "" without a description of the cluster."""
        return str(self.tasks[self.rank]) if self.tasks else self.part

    @property
    def on_host(self) -> tuple[int, int] | None:
        """Its number among the ranks of its host, and their number; None if the ranks must count each other."""
        if self.world_size == 1:
            return self.local_rank or 0, 1
        if self.local_rank is None or self.local_world_size is None:
            return None
        return self.local_rank, self.local_world_size


ALONE = RankPlace("", 0, 1)

# --- the table of launchers ------------------------------------------------------------------------------------------

Env = Mapping[str, str]  # without empty values
Store = tuple[str, int]  # its address and port; "" and 0: unknown


class _Launcher(NamedTuple):
    """The variables of one launcher; "" where it has none.

    Attributes:
        store: returns where the ranks meet without MASTER_ADDR and MASTER_PORT; also given the name of `rank`.
        places: False: its variables only show that there are other processes.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    store: Callable[[Env, RankPlace, str], Store]
    places: bool

    def is_whole(self, env: Env) -> bool:
        """Returns True if rank and world size are given."""
        return self.places and self.rank in env and self.world_size in env

    def sign(self, env: Env) -> str:
        """Returns "NAME=VALUE" of a variable that shows several processes; "" if none does."""
        counts = (self.world_size, 2), (self.local_world_size, 2), (self.rank, 1), (self.local_rank, 1)
        for name, least in counts:
            if _number(env, name) >= least:
                return f"{name}={env[name]}"
        return f"{_TASKS}={env[_TASKS]}" if self is _SLURM and sum(_tasks_of_nodes(env)) > 1 else ""


def _unknown(env: Env, found: RankPlace, variable: str) -> Store:
    return "", 0


def _on_one_host(env: Env, found: RankPlace, variable: str) -> Store:
    """Returns where ranks meet if all are on this host (note "meeting")."""
    if found.local_world_size != found.world_size:
        return "", 0
    return LOOPBACK, _port_of(f"{os.getuid()} {_starter(variable)}")


def _on_first_node(env: Env, found: RankPlace, variable: str) -> Store:
    job = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
    return first_host(env.get("SLURM_STEP_NODELIST", LOOPBACK)), _port_of(job)


def _row(
    name: str,
    prefix: str,
    variables: str = "RANK SIZE LOCAL_RANK LOCAL_SIZE",
    store: Callable[[Env, RankPlace, str], Store] = _unknown,
    *,
    places: bool = True,
) -> _Launcher:
    rank, world_size, local_rank, local_world_size = [*(prefix + each for each in variables.split()), "", "", ""][:4]
    return _Launcher(name, rank, world_size, local_rank, local_world_size, store, places)


_TASKS = "SLURM_STEP_TASKS_PER_NODE"
_LAUNCHERS = (  # in this order
    _TORCHRUN := _row("torchrun", "", "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"),
    _row("Open MPI", "OMPI_COMM_WORLD_", store=_on_one_host),
    _row("MVAPICH", "MV2_COMM_WORLD_", store=_on_one_host),
    _row("submitit", "SUBMITIT_LOCAL_", "GLOBALID NTASKS LOCALID NTASKS", _on_one_host),
    _SLURM := _row("srun", "SLURM_", "PROCID STEP_NUM_TASKS LOCALID", _on_first_node),
    _row("Flux", "FLUX_", "TASK_RANK JOB_SIZE TASK_LOCAL_ID"),
    _PMI := _row("mpiexec", "", "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS", _on_one_host),
    _row("horovodrun", "HOROVOD_", places=False),
    _row("jsrun", "JSM_NAMESPACE_", places=False),
    _row("PMIx", "PMIX_", "RANK", places=False),
)
_NESTED = ("TORCHELASTIC_RUN_ID", "RAY_JOB_ID")  # set by launchers that set RANK and may be started by another launcher


# --- reading it ------------------------------------------------------------------------------------------------------


def place(environment: Env | None = None) -> RankPlace | None:
    """Returns this process's place among the ranks of its launcher, or None if it is alone.

    Args:
        environment: the environment; that of this process unless given.

    Raises:
        ConfigError: the variables contradict each other, are malformed, or do not say which of several processes this
            is.
    """
    if environment is None:
        return _of_role() or _in_group() or _by_variables(os.environ) or _in_barrier_stage()
    return _by_variables(environment)


def all_have_one_launcher() -> bool:
    """Returns True if one launcher of this project has started all ranks, and so ends the others if one fails."""
    found = place()
    if found is None or found.world_size == 1:
        return True
    return FOLDER in os.environ and found.local_world_size == found.world_size


def _of_role() -> RankPlace | None:
    """Returns the place of a server or a worker of a run with parameter servers."""
    if (mine := current_role()) is None:
        return None
    if mine.job == "server":
        return RankPlace("ddp", mine.index, mine.num_servers, part=str(mine))
    return RankPlace("ddp", 0, 1, local_rank=mine.index, part=str(mine))


def _in_group() -> RankPlace | None:
    """Returns this process's place if torch.distributed is already initialized, by whatever code."""
    dist, session = sys.modules.get("torch.distributed"), sys.modules.get("ddp.comm.session")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    if session is not None and session.has_failed():
        return None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with contextlib.suppress(ConfigError):
        found = _by_variables(os.environ)
        if found is not None and (found.rank, found.world_size) == (rank, world_size):
            return found._replace(address="", port=0)
    return RankPlace("torch.distributed", rank, world_size)


def _in_barrier_stage() -> RankPlace | None:
    """Returns the place of this task in a barrier stage of Spark."""
    spark = sys.modules.get("pyspark")
    task = None if spark is None else spark.TaskContext.get()
    if spark is None or not isinstance(task, spark.BarrierTaskContext):
        return None
    addresses = [info.address for info in task.getTaskInfos()]  # HOST:PORT of each task's executor
    port = _port_of(f"{task.stageId()} {addresses}")
    return RankPlace("Spark", task.partitionId(), len(addresses), address=addresses[0].rpartition(":")[0], port=port)


def _by_variables(environment: Env) -> RankPlace | None:
    """Returns the place that a launcher's variables, or the description of a cluster, give this process."""
    env = {name: value for name, value in environment.items() if value}
    launcher = launched_by = _launcher(env)
    if cluster_spec.is_on_command_line():
        launcher = None  # its world size is 1, or `_problems` refuses it
    found = _described(env) if launcher is None else _placed(launcher, env)
    for problem in _problems(env, launched_by, found):
        raise ConfigError(problem)
    # A worker's launcher has warned already.
    if found is not None and found.world_size == 1 and FOLDER not in env and (
        sign := next(filter(None, (each.sign(env) for each in _LAUNCHERS)), "")
    ):
        _warn_once(
            f"this process trains alone, because it was started as rank 0 of 1, though {sign} shows other processes: "
            "if all of them are to train one model, start them with one launcher, and leave RANK and WORLD_SIZE to it"
        )
    return found


def _launcher(env: Env) -> _Launcher | None:
    whole = [each for each in _LAUNCHERS if each.is_whole(env)]
    if whole == [_SLURM, _PMI] and env[_PMI.world_size] != env[_SLURM.world_size]:
        return _PMI  # mpiexec inside a step of one task; srun --mpi=pmi2 sets both to the same
    return whole[0] if whole else None


def _placed(launcher: _Launcher, env: Env) -> RankPlace:
    """Returns the place by the variables of one launcher."""
    numbers = [_number(env, name) if name in env else None for name in launcher[1:5]]
    (rank, world_size), (local_rank, local_size) = [number or 0 for number in numbers[:2]], numbers[2:]
    if not 0 <= rank < world_size:
        size = launcher.world_size
        raise ConfigError(f"{launcher.rank}={rank} with {size}={world_size}: ranks are 0 to {size} - 1")
    most = world_size if world_size > 1 else math.inf  # a process that trains alone may share its host
    for name, is_wrong in (
        (launcher.local_rank, local_rank is not None and not 0 <= local_rank < (local_size or most)),
        (launcher.local_world_size, local_size is not None and not 0 < local_size <= most),
    ):
        if is_wrong:
            others = (launcher.rank, launcher.world_size, launcher.local_world_size)
            words = ", ".join(f"{each}={env[each]}" for each in others if each in env)
            raise ConfigError(f"{name}={env[name]} contradicts {words}: leave it out, or fix it")
    if launcher is _SLURM:
        local_size = _tasks_on_this_node(env)
    found = RankPlace(launcher.name, rank, world_size, local_rank, local_size and min(local_size, world_size))
    if world_size == 1 and not launcher_serves(env):  # a world of one needs no store
        return found
    because, default = f"{launcher.world_size}={world_size}", launcher.store(env, found, launcher.rank)
    address, port = store_address(env, default, because=because, all_of_them="ranks", keeper="rank 0")
    return found._replace(address=address, port=port)


def _described(env: Env) -> RankPlace | None:
    """Returns the place of this process in the described cluster: first servers, then the chief, then other workers."""
    cluster = cluster_spec.described_ranks(env)
    if cluster is None or (rank := cluster.rank) is None:
        return None
    if (world_size := len(cluster.ranks)) == 1:
        is_own = cluster.source == cluster_spec.SETTING
        return RankPlace(cluster.source, 0, 1, tasks=cluster.ranks) if is_own else None
    hosts = [task.host for task in cluster.ranks]
    on_host = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    return RankPlace(cluster.source, rank, world_size, *on_host, hosts[0], cluster.ranks[0].port, cluster.ranks)


def _problems(env: Env, launcher: _Launcher | None, found: RankPlace | None) -> Iterator[str]:
    """Yields each contradiction between the variables and the place found, with its remedy.

    Args:
        launcher: the first one whose variables are complete; None without one.
    """
    by_torchrun, spec = launcher is _TORCHRUN, cluster_spec.SETTING if cluster_spec.is_on_command_line() else ""
    if spec and launcher is not None and (by_torchrun or _number(env, launcher.world_size) != 1):
        both = f"{launcher.rank}={env[launcher.rank]} and {launcher.world_size}={env[launcher.world_size]}"
        yield (
            f"{spec}: {launcher.name} has placed this process already ({both}): leave {spec} out, or start each task "
            "by itself"
        )
    if not by_torchrun and (found is None or found.world_size == 1):
        for name in ("PET_NNODES", "PET_NPROC_PER_NODE"):
            if env.get(name, "1") not in ("1", "1:1"):
                yield f"{name}={env[name]} is for torchrun, which reads it: start this with torchrun PROGRAM"
        for each in _LAUNCHERS:
            # A Slurm batch script is one process with rank 0. PMIx sets no size, and occurs next to others.
            if found is None and each is not _SLURM and each.rank in env and each.world_size not in env:
                size = each.world_size or _TORCHRUN.world_size
                yield f"{each.rank}={env[each.rank]}, but {size} is not set: {HOW_TO_START}"
            if not each.is_whole(env) and (sign := each.sign(env)):
                yield f"{sign} shows several processes, but RANK is not set: {HOW_TO_START}"
    if found is None:
        return
    for name, other, mine in (("RANK", "WORLD_SIZE", found.rank), ("WORLD_SIZE", "RANK", found.world_size)):
        if _number(env, name, mine) != mine:
            yield f"{name}={env[name]}: {found.launcher} says {mine}; leave it out, or set {other}, too"
    if by_torchrun and found.world_size > 1 and not any(name in env for name in _NESTED):  # note "two launchers"
        for each in _LAUNCHERS[1:]:
            is_as_many = each.is_whole(env) and _number(env, each.world_size) == found.world_size
            if is_as_many and _number(env, each.rank) != found.rank:
                yield (
                    f"RANK={found.rank}, but {each.rank}={env[each.rank]}, of WORLD_SIZE={found.world_size} both: "
                    f"leave RANK and WORLD_SIZE out, because {each.name} says the same, or set RANK to the same number"
                )


def launcher_serves(env: Env = os.environ) -> bool:
    """Returns True if torchrun's agent serves the store of its ranks, and not rank 0."""
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


# --- this process ----------------------------------------------------------------------------------------------------


def is_rank() -> bool:
    """Returns True if this process is to work as one rank.

    A world of one is not a rank unless torchrun's variables or `cluster.spec` say so: a single task of srun may start
    its own workers.
    """
    found = place()
    says_so = (_TORCHRUN.name, cluster_spec.SETTING)
    return found is not None and (found.world_size > 1 or found.launcher in says_so or bool(found.part))


def refuse_workers(what: str, *, instead: str) -> None:
    """Raises ConfigError in a rank that is not alone, because `what` would start workers in every rank."""
    who = ""
    if (mine := current_role()) is not None:
        who = f"{mine} already"
    elif (me := role_from_env()) is not None and me.job:
        who = f"a {me.job} already, as {ROLE} says"
    elif (found := place()) is not None and found.world_size > 1:
        by = "RANK" if found.launcher == _TORCHRUN.name else found.launcher  # because many other launchers set it, too
        who = f"rank {found.rank} of {found.world_size} already, as {by} says"
    if who:
        raise ConfigError(f"{what}: this process is {who}: {instead}")


def number_of(here: RankPlace, servers: int, *, setting: str) -> int:
    """Returns a rank's number if servers have the first numbers: they are a launcher's last ranks, or tasks ps.

    Raises:
        ConfigError: all processes would be servers; `setting` names the setting with their number.
    """
    if servers >= here.world_size:
        raise ConfigError(
            f"{setting}={servers}: of the {here.world_size} started processes, at least one must be a worker: start "
            "more processes, or take fewer servers"
        )
    return here.rank if here.tasks else (here.rank + servers) % here.world_size


def roles() -> list[str]:
    """Returns the task of each rank, such as "worker:1"; empty without a description of the cluster."""
    return [str(task) for task in _place_if_clear().tasks]


def host_name() -> str:
    """Returns the name of this host, with this process's task in a cluster, if any: "node7 as worker:1"."""
    role = _place_if_clear().role
    return f"{socket.gethostname()} as {role}" if role else socket.gethostname()


def is_on_loopback(address: str) -> bool:
    """Returns True for an address that only processes of the same host can reach."""
    return address == "localhost" or address.startswith("127.0.0.") or address == "::1"


def _place_if_clear() -> RankPlace:
    """Returns this process's place, or that of a world of one if the variables contradict each other."""
    with contextlib.suppress(ConfigError):
        return place() or ALONE
    return ALONE


# --- reading values --------------------------------------------------------------------------------------------------


@functools.cache
def _warn_once(sentence: str) -> None:
    log.warning("%s", sentence)


def first_host(nodes: str) -> str:
    """Returns the first host of a Slurm node list: "node[007-012,15],gpu3" → "node007"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else nodes)


def _tasks_of_nodes(env: Env) -> list[int]:
    """Returns the number of tasks on each node, which Slurm writes as "2(x3),1"."""
    counts: list[int] = []
    for part in env.get(_TASKS, "").split(","):
        if read := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [int(read[1])] * int(read[2] or 1)
    return counts


def _tasks_on_this_node(env: Env) -> int | None:
    counts = _tasks_of_nodes(env)
    node = _number(env, "SLURM_NODEID")
    return counts[node] if 0 <= node < len(counts) else None


def _number(env: Env, name: str, default: int = 0) -> int:
    try:
        return int(env.get(name, default))
    except ValueError:
        raise ConfigError(f"{name}={env[name]!r}: must be a whole number") from None


def _port_of(job: str) -> int:
    return FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS


def _starter(variable: str) -> str:
    """Returns the name of the process that has started all ranks of this host: the nearest one that is not a rank.

    The launcher may have started a shell for each rank, whose child the rank is.
    """
    process = os.getppid()
    try:
        while f"\0{variable}=".encode() in b"\0" + Path(f"/proc/{process}/environ").read_bytes():
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # not Linux, or another user's process
        return str(process)
    return str(process)
