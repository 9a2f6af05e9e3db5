"""Says which rank this process is, of how many, and where they meet, from what its launcher put into the environment.

| launcher              | rank, world size               | of its host                          | they meet at       |
|-----------------------|--------------------------------|--------------------------------------|--------------------|
| torchrun, PyTorchJob  | RANK, WORLD_SIZE               | LOCAL_RANK, LOCAL_WORLD_SIZE         | MASTER_ADDR, _PORT |
| Open MPI, MVAPICH     | …_COMM_WORLD_RANK, …_SIZE      | …_LOCAL_RANK, …_LOCAL_SIZE           | note "meeting"     |
| srun, submitit        | SLURM_PROCID, …_STEP_NUM_TASKS | SLURM_LOCALID, …_STEP_TASKS_PER_NODE | rank 0's host      |
| MPICH, Intel MPI      | PMI_RANK, PMI_SIZE             | MPI_LOCALRANKID, MPI_LOCALNRANKS     | note "meeting"     |
| TensorFlow's          | TF_CONFIG                      | TF_CONFIG                            | rank 0's address   |

The first row that is set counts. Without any, this process is a world of its own. If variables show several processes
and yet not which of them this one is, each would train alone, so that is refused. One row may say that this process is
alone where another one shows more: independent programs in one step of Slurm's say so by RANK=0 and WORLD_SIZE=1, and
so does what is left of torchrun's ranks, and keeps its LOCAL_RANK. It counts, and one sentence tells.

Slurm's variables are those of a job *step*, because a batch script, which is one process, has SLURM_NTASKS as well.

Note "meeting". MASTER_ADDR and MASTER_PORT count before all else, if they are set. MPI itself tells its ranks no
address before MPI_Init. On one host its ranks meet at a port that follows from the process which has started them all.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ddp.comm.meeting.secret import FOLDER
from ddp.errors import ConfigError
from ddp.process.log import log

LOOPBACK = "127.0.0.1"
FIRST_PORT, NUM_PORTS = 15_000, 15_000
"""Ports that follow from a job's name: below those that kernels give away."""

HOW_TO_START = "start it with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process"


class Place(NamedTuple):
    """One rank among others.

    Attributes:
        launcher: who started the ranks, in words.
        local_rank, local_world_size: its number among the ranks of its host, and how many these are; None: unknown.
        address, port: where rank 0 keeps the store; "" and 0 in a world of one that needs none.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    address: str = ""
    port: int = 0


class _Names(NamedTuple):
    """The variables of one launcher; "" where it has none."""

    launcher: str
    rank: str
    world_size: str = ""
    local_rank: str = ""
    local_world_size: str = ""

    def are_whole(self, env: Mapping[str, str]) -> bool:
        """Returns True if rank and world size are told."""
        return self.rank in env and self.world_size in env

    def sign(self, env: Mapping[str, str]) -> str:
        """Returns "NAME=VALUE" of a variable that shows several processes; "" if none does."""
        for name in (self.world_size, self.local_world_size, self.rank, self.local_rank):
            least = 1 if name in (self.rank, self.local_rank) else 2
            if _number(env, name, 0) >= least:
                return f"{name}={env[name]}"
        if self is _SLURM and sum(_tasks_of_nodes(env)) > 1:
            return f"{_TASKS}={env[_TASKS]}"
        return ""


_TORCHRUN = _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = _Names("Open MPI", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
_MVAPICH = _Names("MVAPICH", *(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
_SLURM = _Names("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
_PMI = _Names("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_HOROVOD = _Names("horovodrun", *(f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
_JSM = _Names("jsrun", *(f"JSM_NAMESPACE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
_PMIX = _Names("PMIx", "PMIX_RANK")
_TASKS = "SLURM_STEP_TASKS_PER_NODE"
_UNDERSTOOD = (_TORCHRUN, _OPEN_MPI, _MVAPICH, _SLURM, _PMI)


def place(environment: Mapping[str, str] | None = None) -> Place | None:
    """Returns this process's place among the ranks that a launcher has started, or None if it is alone.

    Args:
        environment: os.environ, unless given.

    Raises:
        ConfigError: the variables contradict, are malformed, or show several processes but not which one this is.
    """
    env = {name: value for name, value in (os.environ if environment is None else environment).items() if value}
    found = _placed(_TORCHRUN, env) if _TORCHRUN.are_whole(env) else _from_another(env)
    if found is not None and found.world_size == 1:
        _tell_of_others(env)
    return found


def on_this_host(rank: int, world_size: int) -> tuple[int, int]:
    """Returns the number of a rank on its host, and how many ranks are there; unless known, as if all were.

    Args:
        rank, world_size: as torch.distributed has them, whatever the variables say.
    """
    try:
        found = place()
    except ConfigError:
        found = None
    if found is None or (found.rank, found.world_size) != (rank, world_size):
        return rank, world_size
    local_rank = rank if found.local_rank is None else found.local_rank
    return local_rank, found.local_world_size or world_size


def launcher_serves() -> bool:
    """Returns True if torchrun's agent serves the store of its ranks, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_rank() -> bool:
    """Returns True in a process that is to work as one rank.

    A world of one is none unless torchrun's variables say so: a single task of srun may start workers of its own.
    """
    found = place()
    return found is not None and (found.world_size > 1 or found.launcher == _TORCHRUN.launcher)


def refuse_workers(what: str, *, instead: str) -> None:
    """Raises ConfigError in a rank that has others beside it, where `what` would start workers in each of them."""
    if (found := place()) is not None and found.world_size > 1:
        raise ConfigError(
            f"{what} would start workers in each of the {found.world_size} processes that {found.launcher} has started "
            f"already, of which this is rank {found.rank}: start it once, without {found.launcher}, or {instead}"
        )


def _from_another(env: Mapping[str, str]) -> Place | None:
    """Returns the place that another launcher than torchrun has told, if it contradicts nothing else."""
    found = _from_mpi_or_slurm(env) or _from_tensorflow(env)
    if found is None or found.world_size == 1:
        _refuse_half_a_place(env, is_placed=found is not None)
    if found is None:
        return None
    for name, other, mine in (("RANK", "WORLD_SIZE", found.rank), ("WORLD_SIZE", "RANK", found.world_size)):
        if _number(env, name, mine) != mine:
            raise ConfigError(f"{name}={env[name]}: {found.launcher} says {mine}; leave it out, or set {other}, too")
    return found


def _refuse_half_a_place(env: Mapping[str, str], *, is_placed: bool) -> None:
    """Raises ConfigError if there seem to be other processes like this one, of which it does not know its rank.

    Args:
        is_placed: one launcher has told that this process is alone.
    """
    for name in ("PET_NNODES", "PET_NPROC_PER_NODE"):
        if env.get(name, "1") not in ("1", "1:1"):
            raise ConfigError(f"{name}={env[name]} is for torchrun, which reads it: start this with torchrun PROGRAM")
    for names in (*_UNDERSTOOD, _HOROVOD, _JSM, _PMIX):
        is_half = names.rank in env and names.world_size not in env
        # A batch script of Slurm's is one process, and has the rank 0. PMIx has no size, and is beside other launchers.
        if is_half and not is_placed and names is not _SLURM:
            size = names.world_size or _TORCHRUN.world_size
            raise ConfigError(f"{names.rank}={env[names.rank]}, but {size} is not set: {HOW_TO_START}")
        sign = names.sign(env)
        if sign and not (names in _UNDERSTOOD and names.are_whole(env)):
            raise ConfigError(f"{sign} shows several processes, but RANK is not set: {HOW_TO_START}")


def _tell_of_others(env: Mapping[str, str]) -> None:
    """Says so, once, if a process that is told to be alone has others beside it; a worker's launcher has said it."""
    signs = (names.sign(env) for names in (*_UNDERSTOOD, _HOROVOD, _JSM, _PMIX))
    if FOLDER not in env and (sign := next(filter(None, signs), "")):
        _say_once(
            f"this process trains alone, because it was started as rank 0 of 1, though {sign} shows others beside it: "
            "if all of them are to train one model, start them with one launcher, and leave RANK and WORLD_SIZE to it"
        )


@functools.cache
def _say_once(sentence: str) -> None:
    log.warning("%s", sentence)


def _from_mpi_or_slurm(env: Mapping[str, str]) -> Place | None:
    for names in (_OPEN_MPI, _MVAPICH):
        if names.rank in env and names.world_size in env:
            return _placed(names, env)
    is_pmi, is_step = (names.rank in env and names.world_size in env for names in (_PMI, _SLURM))
    # mpiexec inside of a step of one task; srun --mpi=pmi2 sets both alike.
    if is_step and not (is_pmi and env["PMI_SIZE"] != env["SLURM_STEP_NUM_TASKS"]):
        return _placed(_SLURM, env)
    return _placed(_PMI, env) if is_pmi else None


def _placed(names: _Names, env: Mapping[str, str]) -> Place:
    """Returns the place that the variables of one launcher tell."""
    rank, world_size = _number(env, names.rank), _number(env, names.world_size)
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"{names.rank}={rank} with {names.world_size}={world_size}: ranks are 0 to {names.world_size} - 1"
        )
    local_rank = _number(env, names.local_rank) if names.local_rank in env else None
    local_world_size = _number(env, names.local_world_size) if names.local_world_size in env else None
    most = world_size if world_size > 1 else math.inf  # whoever trains alone may have others beside it, as said above
    for name, number, size in (
        (names.local_rank, local_rank, local_world_size or most),
        (names.local_world_size, None if local_world_size is None else local_world_size - 1, most),
    ):
        if number is not None and not 0 <= number < size:
            raise ConfigError(f"{name}={env[name]} contradicts {_told(names, env)}: leave it out, or mend it")
    if names is _SLURM:
        local_world_size = _tasks_on_this_node(env)
    local_world_size = local_world_size and min(local_world_size, world_size)
    return _with_meeting(Place(names.launcher, rank, world_size, local_rank, local_world_size), names, env)


def _told(names: _Names, env: Mapping[str, str]) -> str:
    """Returns what a launcher's variables say, in words."""
    told = (names.rank, names.world_size, names.local_world_size)
    return ", ".join(f"{name}={env[name]}" for name in told if name in env)


def _with_meeting(found: Place, names: _Names, env: Mapping[str, str]) -> Place:
    """Returns the place with where the ranks meet (note "meeting")."""
    if found.world_size == 1 and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        return found
    address, port = env.get("MASTER_ADDR", ""), _number(env, "MASTER_PORT", 0)
    if "MASTER_PORT" in env and not 0 < port < 1 << 16:
        raise ConfigError(f"MASTER_PORT={port}: must be from 1 to 65535, the same for all ranks")
    if names is _SLURM:
        job = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
        address, port = address or first_host(env.get("SLURM_STEP_NODELIST", LOOPBACK)), port or _port_of(job)
    elif names is not _TORCHRUN and found.local_world_size == found.world_size:
        address, port = address or LOOPBACK, port or _port_of(f"{os.getuid()} {_starter(names.rank)}")
    missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if not value]
    if missing:
        raise ConfigError(
            f"{names.launcher} has started {found.world_size} ranks, but {missing[0]} is not set: give all of them "
            "MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free port there"
        )
    return found._replace(address=address, port=port)


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
    node = _number(env, "SLURM_NODEID", 0)
    return counts[node] if 0 <= node < len(counts) else None


def _from_tensorflow(env: Mapping[str, str]) -> Place | None:
    """Returns the place of a worker of `tf.distribute.MultiWorkerMirroredStrategy`; the chief is rank 0."""
    if "TF_CONFIG" not in env:
        return None
    try:
        told = json.loads(env["TF_CONFIG"])
        cluster, task = told.get("cluster", {}), told.get("task", {})
        workers = [(kind, i, each) for kind in ("chief", "worker") for i, each in enumerate(cluster.get(kind, []))]
        others = [kind for kind in cluster if kind not in ("chief", "worker") and cluster[kind]]
        hosts = [address.rpartition(":")[0] for *_, address in workers]
        ports = [int(address.rpartition(":")[2]) for *_, address in workers]
        mine = (task.get("type"), int(task.get("index", -1)))
        if not all(hosts) or not all(0 < port < 1 << 16 for port in ports):
            raise ValueError("a worker has an address HOST:PORT")
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"TF_CONFIG={env['TF_CONFIG']}: cannot be read ({error}); {HOW_TO_START}") from error
    if len(workers) + len(others) < 2:
        return None
    ranks = [rank for rank, (*each, _) in enumerate(workers) if tuple(each) == mine]
    if not ranks:
        raise ConfigError(f"TF_CONFIG: its task {mine[0]} {mine[1]} is no worker of its cluster; {HOW_TO_START}")
    rank = ranks[0]
    before, on_host = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    return Place("TF_CONFIG", rank, len(workers), before, on_host, hosts[0], ports[0])


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and name not in env:
        return default
    try:
        return int(env[name])
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
