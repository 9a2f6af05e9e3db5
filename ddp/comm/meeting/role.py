"""The role of this process in a run with parameter servers: a server, or a worker.

    servers   are the ranks of the run: they have a communicator of `num_servers` ranks
    workers   are not ranks: each is a world of one, and meets the servers in the store

Without a role, a process is a rank of its launcher (`place.py`). A launcher of this package gives each process its
role. Elsewhere these variables set it, and `rendezvous.py` reads them when the process joins the others:

    DDP_ROLE      server or worker: a process that is started by hand; its index counts the arrivals
    DDP_SERVERS   number of servers; under a launcher, without DDP_ROLE, they are its last ranks
    DDP_WORKERS   number of workers that server 0 expects: a step of mode=sync has as many parts
    TF_CONFIG     the tasks of a cluster; those of the job ps are its servers (`cluster_spec.py`)

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
class Role:
    """The role of one process.

    Attributes:
        job, index: "server" or "worker", and its number within the job.
        num_workers, num_servers: of the run; workers may join and be lost later.
        store: where the servers and workers of the run meet.
        incarnation: number of its restarts; the servers are only restarted together.
        served: the store of all processes, if this one serves it.
    """

    job: Job
    index: int
    num_workers: int
    num_servers: int
    store: Store
    incarnation: int = 0
    served: Store | None = None

    @classmethod
    def of_number(
        cls, number: int, *, workers: int, servers: int, store: Store, incarnation: int = 0, served: Store | None = None
    ) -> Role:
        """Returns the role of a process by its number in a launch, in which the servers come first."""
        job: Job = "server" if number < servers else "worker"
        index = number if job == "server" else number - servers
        return cls(job, index, workers, servers, store, incarnation, served)

    def __str__(self) -> str:
        return f"{self.job} {self.index}"


_current: Role | None = None


def current_role() -> Role | None:
    """Returns the role of this process; None in a run without parameter servers."""
    return _current


def set_role(role: Role | None) -> None:
    """Gives this process its role, before it joins the others."""
    global _current
    _current = role


# --- the variables ----------------------------------------------------------------------------------------------------

ROLE, SERVERS, WORKERS = "DDP_ROLE", "DDP_SERVERS", "DDP_WORKERS"


class RoleSettings(NamedTuple):
    """Settings of a process's role from its environment, before it joins the others.

    Attributes:
        job: None: its rank decides.
        num_servers, num_workers: of the run; None: not given.
        address, port: where server 0 serves the store; "" and 0 without a job.
    """

    job: Job | None
    num_servers: int | None
    num_workers: int | None = None
    address: str = ""
    port: int = 0


def role_from_env(environment: Mapping[str, str] | None = None) -> RoleSettings | None:
    """Returns the settings in the variables; None without any, or if a launcher of this package started the process.

    Args:
        environment: the environment; that of this process unless given.

    Raises:
        ConfigError: the variables are malformed, or contradict those of a launcher.
    """
    env = {name: value for name, value in (os.environ if environment is None else environment).items() if value}
    job = env.get(ROLE)
    if FOLDER in env:
        return None
    servers, workers = _count(env, SERVERS), _count(env, WORKERS)
    if job is None and (sparse := server_of_sparse(env.get("TF_CONFIG", ""))) is not None:
        task, server = sparse
        return RoleSettings("server" if task.job == "ps" else "worker", servers, workers, server.host, server.port)
    if job is None:
        return RoleSettings(None, servers, workers) if servers else None
    if job not in get_args(Job):
        raise ConfigError(f"{ROLE}={job}: must be {' or '.join(get_args(Job))}")
    if ("RANK" in env and env.get("WORLD_SIZE", "1") != "1") or "TORCHELASTIC_RUN_ID" in env:
        by = f"RANK={env.get('RANK')} and WORLD_SIZE={env.get('WORLD_SIZE')}"
        raise ConfigError(
            f"{ROLE}={job}: a launcher has placed this process already ({by}): leave the role out, and say "
            f"cluster.servers=1, or {SERVERS}=1 to a program, for which the last rank is a server"
        )
    if "TF_CONFIG" in env:
        raise ConfigError(f"{ROLE}={job}: TF_CONFIG sets the task of this process, too; leave one of the two out")
    address, port = store_address(env, because=f"{ROLE}={job}", all_of_them="servers and workers", keeper="server 0")
    return RoleSettings("server" if job == "server" else "worker", servers, workers, address, port)


def store_address(
    env: Mapping[str, str], default: tuple[str, int] = ("", 0), *, because: str, all_of_them: str, keeper: str
) -> tuple[str, int]:
    """Returns the address and port at which the processes meet: MASTER_ADDR and MASTER_PORT, or the default of each.

    Args:
        because: the variable, with its value, that shows several processes.
        all_of_them, keeper: names of the processes, and of the one that serves the store, for errors.

    Raises:
        ConfigError: one is malformed, or is neither set nor has a default.
    """
    address = env.get("MASTER_ADDR", "").strip("[]") or default[0]  # an IPv6 address as in a URL
    port = env.get("MASTER_PORT", str(default[1] or "")).strip()
    if port and not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"MASTER_PORT={port}: must be from 1 to 65535, the same for all {all_of_them}")
    if not address or not port:
        raise ConfigError(
            f"{because}, but {'MASTER_PORT' if address else 'MASTER_ADDR'} is not set: give all {all_of_them} "
            f"MASTER_ADDR, the host of {keeper}, and MASTER_PORT, a free port there"
        )
    return address, int(port)


def _count(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name)
    if value is not None and (not value.isdigit() or not int(value)):
        raise ConfigError(f"{name}={value}: must be a whole number from 1 up; leave it out without parameter servers")
    return None if value is None else int(value)


# --- the end of a process, which its launcher writes into the store ---------------------------------------------------


def publish_end(of: Role, how: str) -> None:
    """Publishes how a process has ended, such as "was killed by SIGKILL"; "" if it is done."""
    of.store.set(f"ended/{of}/{of.incarnation}" if how else f"done/{of}", how)


def is_done(store: Store, role: str) -> bool:
    """Returns True if a process, such as "worker 1", is done: in the launch or the fit of this store."""
    return bool(store.check([f"done/{role}"]))


def how_ended(store: Store, job: Job, index: int, incarnation: int = 0) -> str:
    """Returns how a process has ended, such as "was killed by SIGKILL"; "" while it runs."""
    key = f"ended/{job} {index}/{incarnation}"
    return store.get(key).decode() if store.check([key]) else ""
