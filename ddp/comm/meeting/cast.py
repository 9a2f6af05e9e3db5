"""The part of this process in a run with parameter servers: a server, or a worker.

    servers   are the ranks of the run: a communicator of their own, of `num_servers` ranks
    workers   are no ranks: each is a world of one, and meets the servers in the store

Without a cast a process is a rank as its launcher says (`place.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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
    """

    job: Job
    index: int
    num_workers: int
    num_servers: int
    store: Store
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.job} {self.index}"


_mine: Cast | None = None


def cast() -> Cast | None:
    """Returns the part of this process; None where a run has no parameter servers."""
    return _mine


def take_part(part: Cast | None) -> None:
    """Gives this process its part, before it joins the others."""
    global _mine
    _mine = part


# --- what whoever has started the processes tells of them, in the store ----------------------------------------------


def tell_start(of: Cast) -> None:
    """Publishes that a process is being started."""
    of.store.set(f"incarnation/{of}", str(of.incarnation))


def tell_end(of: Cast, how: str) -> None:
    """Publishes how a process has ended, such as "was killed by SIGKILL"."""
    of.store.set(f"ended/{of}/{of.incarnation}", how)


def last_incarnation(store: Store, job: Job, index: int = 0) -> int | None:
    """Returns the number of the last start of a process; None before the first one."""
    key = f"incarnation/{job} {index}"
    return int(store.get(key)) if store.check([key]) else None


def how_ended(store: Store, job: Job, index: int, incarnation: int = 0) -> str:
    """Returns how that process has ended, such as "was killed by SIGKILL"; "" while it runs."""
    key = f"ended/{job} {index}/{incarnation}"
    return store.get(key).decode() if store.check([key]) else ""
