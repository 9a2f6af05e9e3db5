"""Says which rank this process is, of how many, and where they meet, from what its launcher put into the environment.

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

A process with a part in a run with parameter servers (`cast.py`) has its place by that: a server is a rank among the
servers, and a worker is alone, whatever the variables say. Otherwise the first row that is set counts. Without any,
this process is a world of its own. If variables show several processes and yet not which of them this one is, each
would train alone, so that is refused. One row may say that this process is alone where another one shows more:
independent programs in one step of Slurm's say so by RANK=0 and WORLD_SIZE=1, and so does what is left of torchrun's
ranks, and keeps its LOCAL_RANK. It counts, and one sentence tells.

A description of the whole cluster (`cluster_spec.py`) needs no launcher. On the command line, `cluster.spec` counts
before every launcher that says that this process is alone, and beside any other one it is refused.

PyTorchJob sets RANK and WORLD_SIZE alone. Where a row lacks what is said of the host, the ranks count
(`rendezvous.py::on_this_host`).

Note "two launchers". One may start the other: srun starts torchrun or a worker of Ray on each node, and these number
their ranks in their own way. But if RANK was set by hand, and another launcher says that this process has another rank
among as many, one of both is wrong, so that is refused.

Slurm's variables are those of a job *step*, because a batch script, which is one process, has SLURM_NTASKS as well.

Note "meeting". MASTER_ADDR and MASTER_PORT count before all else, if they are set. MPI itself tells its ranks no
address before MPI_Init. On one host its ranks meet at a port that follows from the process which has started them all.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ddp.comm.meeting import cluster_spec
from ddp.comm.meeting.cast import ROLE, cast, told
from ddp.comm.meeting.cluster_spec import Cluster, Task
from ddp.comm.meeting.secret import FOLDER
from ddp.errors import ConfigError
from ddp.process.arguments import program
from ddp.process.log import log

LOOPBACK = "127.0.0.1"
FIRST_PORT, NUM_PORTS = 15_000, 15_000
"""Ports that follow from a job's name: below those that kernels give away."""

HOW_TO_START = "start it with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process"


class Place(NamedTuple):
    """One rank among others.

    Attributes:
        launcher: name of the launcher that started the ranks.
        local_rank, local_world_size: its number among the ranks of its host, and how many these are; None: unknown.
        address, port: where rank 0 keeps the store; "" and 0 if torch.distributed has one, or nobody needs one.
        tasks: by rank, the task that the description of a cluster has for it; empty without one.
        part: what this process is in a run with parameter servers, as "worker 1"; "" elsewhere.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    address: str = ""
    port: int = 0
    tasks: tuple[Task, ...] = ()
    part: str = ""

    @property
    def role(self) -> str:
        """The task that this process is, as "worker:1", or its part; "" without a description of the cluster."""
        return str(self.tasks[self.rank]) if self.tasks else self.part

    @property
    def on_host(self) -> tuple[int, int] | None:
        """Its number among the ranks of its host, and how many these are; None if only all ranks together know."""
        if self.world_size == 1:
            return self.local_rank or 0, 1
        known = self.local_rank is not None and self.local_world_size is not None
        return (self.local_rank, self.local_world_size) if known else None  # type: ignore[return-value]


# --- the table: what each launcher says ------------------------------------------------------------------------------


class _Launcher(NamedTuple):
    """The variables of one launcher; "" where it has none."""

    name: str
    rank: str
    world_size: str = ""
    local_rank: str = ""
    local_world_size: str = ""

    @classmethod
    def with_prefix(cls, name: str, prefix: str) -> _Launcher:
        return cls(name, *(prefix + each for each in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))

    def is_whole(self, env: Mapping[str, str]) -> bool:
        """Returns True if rank and world size are told."""
        return self.rank in env and self.world_size in env

    def sign(self, env: Mapping[str, str]) -> str:
        """Returns "NAME=VALUE" of a variable that shows several processes; "" if none does."""
        fields = ((self.world_size, 2), (self.local_world_size, 2), (self.rank, 1), (self.local_rank, 1))
        for name, least in fields:
            if _number(env, name) >= least:
                return f"{name}={env[name]}"
        return f"{_TASKS}={env[_TASKS]}" if self is _SLURM and sum(_tasks_of_nodes(env)) > 1 else ""


_TORCHRUN = _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SUBMITIT = _Launcher("submitit", *(f"SUBMITIT_LOCAL_{name}" for name in ("GLOBALID", "NTASKS", "LOCALID", "NTASKS")))
_SLURM = _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
_PMI = _Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_UNDERSTOOD = (  # in this order
    _TORCHRUN,
    _Launcher.with_prefix("Open MPI", "OMPI_COMM_WORLD_"),
    _Launcher.with_prefix("MVAPICH", "MV2_COMM_WORLD_"),
    _SUBMITIT,
    _SLURM,
    _Launcher("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    _PMI,
)
_SEEN = (  # they only show that there are other processes
    *_UNDERSTOOD,
    _Launcher.with_prefix("horovodrun", "HOROVOD_"),
    _Launcher.with_prefix("jsrun", "JSM_NAMESPACE_"),
    _Launcher("PMIx", "PMIX_RANK"),
)
_TASKS = "SLURM_STEP_TASKS_PER_NODE"
_NESTED = ("TORCHELASTIC_RUN_ID", "RAY_JOB_ID")  # of those that set RANK, and may be started by another launcher


# --- the code: how it is read ----------------------------------------------------------------------------------------


def place(environment: Mapping[str, str] | None = None) -> Place | None:
    """Returns this process's place among the ranks that a launcher has started, or None if it is alone.

    Args:
        environment: that of this process, unless given.

    Raises:
        ConfigError: the variables contradict, are malformed, or show several processes but not which one this is.
    """
    if environment is None:
        return _of_part() or _in_group() or _told_by(os.environ) or _in_barrier_stage()
    return _told_by(environment)


def _of_part() -> Place | None:
    """Returns the place of a server or a worker of a run with parameter servers."""
    if (mine := cast()) is None:
        return None
    if mine.job == "server":
        return Place("ddp", mine.index, mine.num_servers, part=str(mine))
    return Place("ddp", 0, 1, local_rank=mine.index, part=str(mine))


def _in_group() -> Place | None:
    """Returns this process's place in a torch.distributed that has begun already, whatever has begun it."""
    dist, session = sys.modules.get("torch.distributed"), sys.modules.get("ddp.comm.session")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    if session is not None and session.has_failed():
        return None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with contextlib.suppress(ConfigError):
        told = _told_by(os.environ)
        if told is not None and (told.rank, told.world_size) == (rank, world_size):
            return told._replace(address="", port=0)
    return Place("torch.distributed", rank, world_size)


def _in_barrier_stage() -> Place | None:
    """Returns the place of this task among those of a stage that Spark starts together, or not at all."""
    spark = sys.modules.get("pyspark")
    task = None if spark is None else spark.TaskContext.get()
    if spark is None or not isinstance(task, spark.BarrierTaskContext):
        return None
    addresses = [info.address for info in task.getTaskInfos()]  # HOST:PORT of each task's executor
    port = _port_of(f"{task.stageId()} {addresses}")
    return Place("Spark", task.partitionId(), len(addresses), address=addresses[0].rpartition(":")[0], port=port)


def _told_by(environment: Mapping[str, str]) -> Place | None:
    env = {name: value for name, value in environment.items() if value}
    launcher = _launcher(env)
    if launcher is not None and _own is not None:
        _refuse_launcher(launcher, env)
        launcher = None
    found = _described(env) if launcher is None else _placed(launcher, env)
    if launcher is not _TORCHRUN and (found is None or found.world_size == 1):
        _refuse_half_a_place(env, is_placed=found is not None)
    if found is None:
        return None
    for name, other, mine in (("RANK", "WORLD_SIZE", found.rank), ("WORLD_SIZE", "RANK", found.world_size)):
        if _number(env, name, mine) != mine:
            raise ConfigError(f"{name}={env[name]}: {found.launcher} says {mine}; leave it out, or set {other}, too")
    if found.world_size == 1:
        _tell_of_others(env)
    elif launcher is _TORCHRUN:
        _refuse_two_launchers(env, found)
    return found


def launcher_serves(env: Mapping[str, str] = os.environ) -> bool:
    """Returns True if torchrun's agent serves the store of its ranks, and not rank 0."""
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_rank() -> bool:
    """Returns True in a process that is to work as one rank.

    A world of one is none unless torchrun's variables or `cluster.spec` say so: a single task of srun may start workers
    of its own.
    """
    found = place()
    says_so = (_TORCHRUN.name, cluster_spec.SETTING)
    return found is not None and (found.world_size > 1 or found.launcher in says_so or bool(found.part))


def refuse_workers(what: str, *, instead: str) -> None:
    """Raises ConfigError in a rank that has others beside it, because `what` would start workers in each of them."""
    if (mine := cast()) is not None:
        raise ConfigError(f"{what}: this process is {mine} already: {instead}")
    if (me := told()) is not None and me.job:
        raise ConfigError(f"{what}: this process is a {me.job} already, as {ROLE} says: {instead}")
    if (found := place()) is not None and found.world_size > 1:
        by = "RANK" if found.launcher == _TORCHRUN.name else found.launcher  # which many others set as well
        rank = f"rank {found.rank} of {found.world_size} already, as {by} says"
        raise ConfigError(f"{what}: this process is {rank}: {instead}")


# --- the description of a cluster, whose tasks are started by hand ---------------------------------------------------


_own: Cluster | None = None
"""That of this process's command line."""


def take_cluster(spec: Mapping[str, Any], task: str | None) -> None:
    """Makes this process the task of a cluster that its command line describes: see `cluster_spec.from_settings`."""
    global _own
    _own = cluster_spec.from_settings(spec, task, os.environ.get(cluster_spec.VARIABLE, ""))


_may_have_servers = False


def allow_servers() -> None:
    """Lets the description of a cluster have parameter servers, because this process will have a part (`cast.py`)."""
    global _may_have_servers
    _may_have_servers = True


def described_servers() -> int:
    """Returns how many tasks of the described cluster are servers, if it may have some, and this process is a rank."""
    cluster = _cluster(os.environ) if _may_have_servers else None
    return 0 if cluster is None or cluster.rank is None else sum(task.job == "ps" for task in cluster.ranks)


def number_of(here: Place, servers: int) -> int:
    """Returns a rank's number where servers have the first ones: they are a launcher's last ranks, or tasks ps."""
    return here.rank if here.tasks else (here.rank + servers) % here.world_size


def refuse_no_worker(setting: str, servers: int, world_size: int) -> None:
    """Raises ConfigError if all processes would be servers."""
    if servers >= world_size:
        raise ConfigError(
            f"{setting}={servers}: of the {world_size} that were started, one at least must be a worker: start more "
            "processes, or take fewer servers"
        )


def evaluator() -> str:
    """Returns "evaluator:0, as TF_CONFIG says" in the evaluator of a cluster, which is no rank; "" elsewhere."""
    described = None
    with contextlib.suppress(ConfigError):  # whoever needs the place hears why
        described = _cluster(os.environ)
    if described is None or described.rank is not None:
        return ""
    return f"{described.task}, as {described.source} says"


def refuse_evaluator(what: str) -> None:
    """Raises ConfigError in the evaluator of a cluster, because `what` trains."""
    if me := evaluator():
        raise ConfigError(
            f"{what}: this process is {me}, which trains nothing; run here what follows the others' training: "
            f"{program()} sidecar RUN, or {program()} evaluate region=NAME"
        )


def roles() -> list[str]:
    """Returns the tasks that the ranks are, such as "worker:1", by rank; empty without a description of the cluster."""
    return [str(task) for task in _place_if_clear().tasks]


def host_name() -> str:
    """Returns the name of this host, and which task of a cluster this process is, if it is one: "node7 as worker:1"."""
    role = _place_if_clear().role
    return f"{socket.gethostname()} as {role}" if role else socket.gethostname()


def _place_if_clear() -> Place:
    """Returns the place of this process, or one alone if that cannot be told: whoever needs it hears why."""
    with contextlib.suppress(ConfigError):
        return place() or Place("", 0, 1)
    return Place("", 0, 1)


def _cluster(env: Mapping[str, str]) -> Cluster | None:
    if _own is not None:
        return _own
    text = env.get(cluster_spec.VARIABLE, "")
    return cluster_spec.from_variable(text) if text else None


def _described(env: Mapping[str, str]) -> Place | None:
    """Returns the place of this process in the cluster that is described: servers, the chief, the other workers."""
    cluster = _cluster(env)
    if cluster is None or (rank := cluster.rank) is None:
        return None
    if not _may_have_servers:
        cluster.refuse_servers()
    if (world_size := len(cluster.ranks)) == 1:
        return Place(cluster.source, 0, 1, tasks=cluster.ranks) if cluster is _own else None
    hosts = [task.host for task in cluster.ranks]
    on_host = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    return Place(cluster.source, rank, world_size, *on_host, hosts[0], cluster.ranks[0].port, cluster.ranks)


def _refuse_launcher(launcher: _Launcher, env: Mapping[str, str]) -> None:
    """Raises ConfigError if a launcher has given a place to a process whose command line describes the cluster."""
    if launcher is _TORCHRUN or _number(env, launcher.world_size) != 1:
        told = f"{launcher.rank}={env[launcher.rank]} and {launcher.world_size}={env[launcher.world_size]}"
        raise ConfigError(
            f"{cluster_spec.SETTING}: {launcher.name} has placed this process already ({told}): leave "
            f"{cluster_spec.SETTING} out, or start each task by itself"
        )


# --- the variables of a launcher -------------------------------------------------------------------------------------


def _launcher(env: Mapping[str, str]) -> _Launcher | None:
    whole = [each for each in _UNDERSTOOD if each.is_whole(env)]
    if whole == [_SLURM, _PMI] and env[_PMI.world_size] != env[_SLURM.world_size]:
        return _PMI  # mpiexec inside of a step of one task; srun --mpi=pmi2 sets both alike
    return whole[0] if whole else None


def _placed(launcher: _Launcher, env: Mapping[str, str]) -> Place:
    """Returns the place that the variables of one launcher tell."""
    rank, world_size = _number(env, launcher.rank), _number(env, launcher.world_size)
    if not 0 <= rank < world_size:
        numbers = f"{launcher.rank}={rank} with {launcher.world_size}={world_size}"
        raise ConfigError(f"{numbers}: ranks are 0 to {launcher.world_size} - 1")
    local = [_number(env, name) if name in env else None for name in (launcher.local_rank, launcher.local_world_size)]
    local_rank, local_world_size = local
    most = world_size if world_size > 1 else math.inf  # whoever trains alone may have others beside it, as said above
    last = None if local_world_size is None else local_world_size - 1
    for name, number, size in (
        (launcher.local_rank, local_rank, local_world_size or most),
        (launcher.local_world_size, last, most),
    ):
        if number is not None and not 0 <= number < size:
            told = (launcher.rank, launcher.world_size, launcher.local_world_size)
            words = ", ".join(f"{each}={env[each]}" for each in told if each in env)
            raise ConfigError(f"{name}={env[name]} contradicts {words}: leave it out, or mend it")
    if launcher is _SLURM:
        local_world_size = _tasks_on_this_node(env)
    local_world_size = local_world_size and min(local_world_size, world_size)
    address, port = _meeting(launcher, env, world_size, local_world_size)
    return Place(launcher.name, rank, world_size, local_rank, local_world_size, address, port)


def _meeting(
    launcher: _Launcher, env: Mapping[str, str], world_size: int, local_world_size: int | None
) -> tuple[str, int]:
    """Returns where the ranks meet: address and port (note "meeting"); "" and 0 for one that has no store to share."""
    if world_size == 1 and not launcher_serves(env):
        return "", 0
    address = env.get("MASTER_ADDR", "").strip("[]")  # as a URL has an IPv6 address
    port = _number(env, "MASTER_PORT")
    if "MASTER_PORT" in env and not 0 < port < 1 << 16:
        raise ConfigError(f"MASTER_PORT={port}: must be from 1 to 65535, the same for all ranks")
    if launcher is _SLURM:
        job = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
        address, port = address or first_host(env.get("SLURM_STEP_NODELIST", LOOPBACK)), port or _port_of(job)
    elif launcher is not _TORCHRUN and local_world_size == world_size:
        address, port = address or LOOPBACK, port or _port_of(f"{os.getuid()} {_starter(launcher.rank)}")
    if not address or not port:
        raise ConfigError(
            f"{launcher.world_size}={world_size}, but {'MASTER_PORT' if address else 'MASTER_ADDR'} is not set: give "
            "all ranks MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free port there"
        )
    return address, port


def _refuse_half_a_place(env: Mapping[str, str], *, is_placed: bool) -> None:
    """Raises ConfigError if there seem to be other processes like this one, of which it does not know its rank.

    Args:
        is_placed: one launcher has told that this process is alone.
    """
    for name in ("PET_NNODES", "PET_NPROC_PER_NODE"):
        if env.get(name, "1") not in ("1", "1:1"):
            raise ConfigError(f"{name}={env[name]} is for torchrun, which reads it: start this with torchrun PROGRAM")
    for each in _SEEN:
        is_half = each.rank in env and each.world_size not in env
        # A batch script of Slurm's is one process, and has the rank 0. PMIx has no size, and is beside other launchers.
        if is_half and not is_placed and each is not _SLURM:
            size = each.world_size or _TORCHRUN.world_size
            raise ConfigError(f"{each.rank}={env[each.rank]}, but {size} is not set: {HOW_TO_START}")
        sign = each.sign(env)
        if sign and not (each in _UNDERSTOOD and each.is_whole(env)):
            raise ConfigError(f"{sign} shows several processes, but RANK is not set: {HOW_TO_START}")


def _refuse_two_launchers(env: Mapping[str, str], found: Place) -> None:
    """Raises ConfigError if another launcher gives this process another rank among as many (note "two launchers")."""
    if any(name in env for name in _NESTED):
        return
    for each in _UNDERSTOOD[1:]:
        is_as_many = each.is_whole(env) and _number(env, each.world_size) == found.world_size
        if is_as_many and _number(env, each.rank) != found.rank:
            raise ConfigError(
                f"RANK={found.rank}, but {each.rank}={env[each.rank]}, of WORLD_SIZE={found.world_size} both: leave "
                f"RANK and WORLD_SIZE out, because {each.name} says the same, or set RANK to the same number"
            )


def _tell_of_others(env: Mapping[str, str]) -> None:
    """Says so, once, if a process that is told to be alone has others beside it; a worker's launcher has said it."""
    signs = (each.sign(env) for each in _SEEN)
    if FOLDER not in env and (sign := next(filter(None, signs), "")):
        _say_once(
            f"this process trains alone, because it was started as rank 0 of 1, though {sign} shows others beside it: "
            "if all of them are to train one model, start them with one launcher, and leave RANK and WORLD_SIZE to it"
        )


@functools.cache
def _say_once(sentence: str) -> None:
    log.warning("%s", sentence)


def first_host(nodes: str) -> str:
    """Returns the first host of a list as Slurm writes it: "node[007-012,15],gpu3" → "node007"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else nodes)


def _tasks_of_nodes(env: Mapping[str, str]) -> list[int]:
    """Returns Slurm's number of tasks of each node, which it writes as "2(x3),1"."""
    counts: list[int] = []
    for part in env.get(_TASKS, "").split(","):
        if read := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [int(read[1])] * int(read[2] or 1)
    return counts


def _tasks_on_this_node(env: Mapping[str, str]) -> int | None:
    counts = _tasks_of_nodes(env)
    node = _number(env, "SLURM_NODEID")
    return counts[node] if 0 <= node < len(counts) else None


def _number(env: Mapping[str, str], name: str, default: int = 0) -> int:
    try:
        return int(env.get(name, default))
    except ValueError:
        raise ConfigError(f"{name}={env[name]!r}: must be a whole number") from None


def _port_of(job: str) -> int:
    return FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS


def _starter(variable: str) -> str:
    """Returns the name of the process that has started all ranks of this host: the nearest one that is no rank itself.

    A rank may be the child of a shell that the launcher has started in its place.
    """
    process = os.getppid()
    try:
        while f"\0{variable}=".encode() in b"\0" + Path(f"/proc/{process}/environ").read_bytes():
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # another system than Linux, or another user's process
        return str(process)
    return str(process)
