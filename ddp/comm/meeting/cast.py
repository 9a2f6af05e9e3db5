"""The part of this process in a run with parameter servers: a server, or a worker.

    servers   are the ranks of the run: a communicator of their own, of `num_servers` ranks
    workers   are no ranks: each is a world of one, and meets the servers in the store

Without a cast a process is a rank as its launcher says (`place.py`). A launcher of this package gives each process its
part. Elsewhere these variables say it, and `by_arrival.py` reads them when the process joins the others:

    DDP_ROLE      server or worker: a process that is started by hand, whose index is that of its arrival
    DDP_SERVERS   number of servers; below a launcher, and without DDP_ROLE, they are its last ranks
    DDP_WORKERS   number of workers that server 0 reckons with: a step of mode=sync has as many parts
    TF_CONFIG     the tasks of a cluster: those of the job ps are its servers (`cluster_spec.py`)

On the command line of `train`, `cluster.role`, `cluster.servers` and `cluster.workers` are their other names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from ddp.comm.meeting.cluster_spec import server_of_sparse
from ddp.comm.meeting.secret import FOLDER
from ddp.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # at run time this module stays without torch

Job = Literal["server", "worker"]
STORE = "run"  # where they meet, in the private folder of a launch on one host


@dataclass(frozen=True)
class Cast:
    """The part of one process.

    Attributes:
        job, index: "server" or "worker", and its number among those of its job.
        num_workers, num_servers: of the run; more workers may come, and some may be lost.
        store: where the servers and workers of the run meet.
        incarnation: how often it has been started before; the servers are only started together.
        served: the store of all, if this process serves it.
    """

    job: Job
    index: int
    num_workers: int
    num_servers: int
    store: Store
    incarnation: int = 0
    served: Store | None = None

    def __str__(self) -> str:
        return f"{self.job} {self.index}"


def numbered(
    number: int, *, workers: int, servers: int, store: Store, incarnation: int = 0, served: Store | None = None
) -> Cast:
    """Returns the part of a process by its number in a launch, in which the servers have the first ones."""
    job: Job = "server" if number < servers else "worker"
    index = number if job == "server" else number - servers
    return Cast(job, index, workers, servers, store, incarnation, served)


_mine: Cast | None = None


def cast() -> Cast | None:
    """Returns the part of this process; None where a run has no parameter servers."""
    return _mine


def take_part(part: Cast | None) -> None:
    """Gives this process its part, before it joins the others."""
    global _mine
    _mine = part


# --- what the variables tell ------------------------------------------------------------------------------------------

ROLE, SERVERS, WORKERS = "DDP_ROLE", "DDP_SERVERS", "DDP_WORKERS"


class Told(NamedTuple):
    """Holds what a process is told before it joins the others.

    Attributes:
        job: None: its rank says it.
        num_servers, num_workers: of the run; None: it is not told.
        address, port: where server 0 serves the store; "" and 0 without a job.
    """

    job: Job | None
    num_servers: int | None
    num_workers: int | None = None
    address: str = ""
    port: int = 0


def told(environment: Mapping[str, str] | None = None) -> Told | None:
    """Returns what the variables tell; None if that is nothing, or a launcher of this package has started the process.

    Args:
        environment: that of this process, unless given.

    Raises:
        ConfigError: they are malformed, or contradict those of a launcher.
    """
    env = {name: value for name, value in (os.environ if environment is None else environment).items() if value}
    job = env.get(ROLE)
    if FOLDER in env:
        return None
    servers, workers = _count(env, SERVERS), _count(env, WORKERS)
    if job is None and (sparse := server_of_sparse(env.get("TF_CONFIG", ""))) is not None:
        task, server = sparse
        return Told("server" if task.job == "ps" else "worker", servers, workers, server.host, server.port)
    if not (job or servers):
        return None
    if job is None:
        return Told(None, servers, workers)
    if job not in get_args(Job):
        raise ConfigError(f"{ROLE}={job}: must be {' or '.join(get_args(Job))}")
    is_rank = "RANK" in env and env.get("WORLD_SIZE", "1") != "1"
    if is_rank or "TORCHELASTIC_RUN_ID" in env:
        by = f"RANK={env.get('RANK')} and WORLD_SIZE={env.get('WORLD_SIZE')}"
        raise ConfigError(
            f"{ROLE}={job}: a launcher has placed this process already ({by}): leave the role out, and say "
            f"cluster.servers=1, or {SERVERS}=1 to a program, for which the last rank is a server"
        )
    if "TF_CONFIG" in env:
        raise ConfigError(f"{ROLE}={job}: TF_CONFIG says which task this process is; leave one of the two out")
    port = env.get("MASTER_PORT", "")
    if "MASTER_ADDR" not in env or not port:
        missing = "MASTER_PORT" if "MASTER_ADDR" in env else "MASTER_ADDR"
        raise ConfigError(
            f"{ROLE}={job}, but {missing} is not set: give all servers and workers MASTER_ADDR, the host of server 0, "
            "and MASTER_PORT, a free port there"
        )
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"MASTER_PORT={port}: must be from 1 to 65535, the same for all servers and workers")
    return Told("server" if job == "server" else "worker", servers, workers, env["MASTER_ADDR"], int(port))


def _count(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name)
    if value is not None and (not value.isdigit() or not int(value)):
        raise ConfigError(f"{name}={value}: must be a whole number from 1 up; leave it out without parameter servers")
    return None if value is None else int(value)


# --- what whoever has started the processes tells of them, in the store ----------------------------------------------


def tell_end(of: Cast, how: str) -> None:
    """Publishes how a process has ended, such as "was killed by SIGKILL"; "" if it has done its work."""
    of.store.set(f"ended/{of}/{of.incarnation}" if how else f"done/{of}", how)


def is_done(store: Store, part: str) -> bool:
    """Returns True if a process, such as "worker 1", has done its work: of a launch, or of the fit of this store."""
    return bool(store.check([f"done/{part}"]))


def how_ended(store: Store, job: Job, index: int, incarnation: int = 0) -> str:
    """Returns how that process has ended, such as "was killed by SIGKILL"; "" while it runs."""
    key = f"ended/{job} {index}/{incarnation}"
    return store.get(key).decode() if store.check([key]) else ""
