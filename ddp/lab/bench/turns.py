"""Begins, pairs and ends a measurement: rivals take turns in one run, while memory and bytes are counted.

    turn 1    ours ▓▓▓▓▓    torch ▓▓▓▓▓    alone ▓▓▓▓▓
    turn 2    alone ▓▓▓▓▓   torch ▓▓▓▓▓    ours ▓▓▓▓▓
    …
    ▓         one repetition: an all-reduce, or a training step
    a turn    the median of its repetitions, on the slowest rank
    a ratio   the median, over turns, of turn ÷ turn

Ratios are taken turn by turn: a machine whose speed drifts is the same machine for all rivals, because they run within
the same second.

Note "replicas first". torch's replica holds the process group. If the replica is the last to hold it, the replica's
destructor ends the group with the interpreter lock held, and waits there for Gloo's thread; that thread may be waiting
for the lock, to free a tensor of the last broadcast. Then the rank hangs (torch 2.13, one run in ten of the shortest).
So replicas end before the group does: they are local variables of a function that is called inside of `session`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.comm.session import init, shutdown
from ddp.process.terminal import say
from ddp.units import three_digits

Joined = TypeVar("Joined")
TURN_S, MOST_REPETITIONS = 0.2, 200
ABORT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Cell(ABC):
    """One line of a report, or a few: the case that ran (`name`), and where (`place`, the title of its table).

    Attributes:
        legend: explanations by title of column.
    """

    legend: ClassVar[Mapping[str, str]]
    place: str
    name: str

    @abstractmethod
    def columns(self) -> dict[str, str]:
        """Returns the line by titles of columns; "" for a figure that was not measured."""

    def meaning(self, title: str) -> str:
        """Returns the explanation of a column."""
        return self.legend[title]

    def rows(self) -> list[dict[str, str]]:
        """Returns all lines of the cell."""
        return [self.columns()]

    @classmethod
    def summary(cls, cells: Sequence[Self]) -> list[str]:
        """Returns the summary of the cells of a place."""
        return []


STEP = "ms per step, median over turns, on the slowest rank"
OVER_TURNS = "least and greatest such ratio of a turn"


@dataclass(frozen=True, kw_only=True)
class TimedCell(Cell):
    """One line of a report on rivals that took turns.

    Attributes:
        rival: the name of the rival that "ours" has to beat.
        turns_s: by rival, the time of each turn.
    """

    rival: ClassVar[str]
    turns_s: Mapping[str, Sequence[float]]

    def median_s(self, one: str) -> float | None:
        """Returns the median over turns, or None if that rival took no part."""
        return statistics.median(self.turns_s[one]) if one in self.turns_s else None

    def ratios(self, one: str, other: str) -> list[float]:
        """Returns one rival ÷ another, turn by turn; nothing if either took no part."""
        both = one in self.turns_s and other in self.turns_s
        return [a / b for a, b in zip(self.turns_s[one], self.turns_s[other], strict=True)] if both else []

    def ratio(self, one: str, other: str) -> float | None:
        """Returns the median of `ratios`, or None."""
        return statistics.median(ratios) if (ratios := self.ratios(one, other)) else None

    def spread(self, one: str, other: str) -> str:
        """Returns the least and the greatest of `ratios`, for a table."""
        ratios = self.ratios(one, other)
        return f"{three_digits(min(ratios))} – {three_digits(max(ratios))}" if ratios else ""

    @property
    def speedup(self) -> float | None:
        """Returns the rival ÷ ours: above 1, ours is faster."""
        return self.ratio(self.rival, "ours")

    @classmethod
    def summary(cls, cells: Sequence[Self]) -> list[str]:
        """Returns in which cells ours was slower than its rival."""
        speedups = [(cell.name, cell.speedup) for cell in cells if cell.speedup is not None]
        slower = [f"{name} ({speedup:.2f}×)" for name, speedup in speedups if speedup < 1]
        where = f"in {len(slower)} of {len(speedups)} cells: {', '.join(slower)}" if slower else "nowhere"
        return [f"slower than {cls.rival}: {where}"] if speedups else []


def with_ours() -> Communicator:
    """Returns our communicator of all ranks, on the CPU."""
    return init(device="cpu")


def torch_alone() -> None:
    """Joins torch.distributed on Gloo, where a communicator of ours is made later. Once in a process."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=ABORT_S))


@contextmanager
def session(join: Callable[[], Joined]) -> Iterator[Joined]:
    """Joins the other ranks, each with one thread; ends ours and torch.distributed (note "replicas first")."""
    torch.set_num_threads(1)
    yield join()
    gc.collect()
    shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


class Rival(Protocol):
    """One of those that take turns: it warms up, chooses the length of a turn, and then runs turns. Collective."""

    def find_pace(self) -> None: ...
    def turn_s(self) -> float: ...


def paired(rivals: Mapping[str, Rival], num_turns: int) -> dict[str, list[float]]:
    """Returns the times of each rival's turns, once each has found its pace."""
    for rival in rivals.values():
        rival.find_pace()
    return take_turns({name: rival.turn_s for name, rival in rivals.items()}, num_turns)


def take_turns(rivals: Mapping[str, Callable[[], float]], num_turns: int) -> dict[str, list[float]]:
    """Lets each rival run its turn, `num_turns` times, in alternating order; returns the seconds of their turns."""
    turns_s: dict[str, list[float]] = {name: [] for name in rivals}
    for number in range(num_turns):
        for name in list(rivals) if number % 2 == 0 else reversed(list(rivals)):
            turns_s[name].append(rivals[name]())
    return turns_s


def num_repetitions(repetition_s: float, *, least: int) -> int:
    """Returns how many repetitions fill a turn."""
    return int(min(max(TURN_S / max(repetition_s, 1e-9), least), MOST_REPETITIONS))


def slowest(times_s: Sequence[float]) -> list[float]:
    """Returns each entry's maximum over the ranks. Collective."""
    longest = torch.tensor(times_s, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.tolist()


PROGRESS = "cell: "


def announce(cell: TimedCell) -> None:
    """Tells the waiting user, on rank 0, that a cell is done."""
    if dist.get_rank() == 0:
        speedup = "" if cell.speedup is None else f": {cell.speedup:.2f}x"
        say(f"{PROGRESS}{cell.place}: {cell.name}{speedup}", to=sys.stderr)


# --- Counts of what training uses: memory, bytes of tensors, and bytes that leave a host ------------------------------
#
#     peak       bytes that processes hold at one moment: a thread samples them all while they train
#     held       the bytes of tensors: memory that several ranks have mapped counts once
#     sent       bytes that the kernel has counted at the interfaces of the host
#
# Memory is the proportional set size (PSS): memory that k processes have mapped counts 1/k for each, where RSS would
# count a neighbour's gradients in full. So the sum over the ranks of a host counts shared memory once. Pages of files
# (libraries) are left out, because they count less for a rank whenever a stranger maps them, too.


REST_S = 0.001
COUNTED = ("Pss_Anon:", "Pss_Shmem:")


def can_count_memory() -> bool:
    """Returns True where the kernel counts proportional set sizes: on Linux."""
    return _rollup("self").exists()


def memory_of(pids: Sequence[int]) -> int:
    """Returns the bytes that processes hold together."""
    found = 0
    for pid in pids:
        with _rollup(pid).open() as lines:
            found += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(COUNTED))
    return found


def _rollup(pid: int | str) -> Path:
    return Path("/proc") / str(pid) / "smaps_rollup"


@contextlib.contextmanager
def sampling(*pids: int) -> Iterator[Callable[[], int]]:
    """Samples the memory of processes while the block runs: of this one unless others are named.

    A thread does it every few milliseconds, while torch computes without the interpreter's lock. A shorter peak can
    hide between two samples.

    Yields:
        a function that returns the most bytes that a sample found since its last call, that moment included.
    """
    watched, is_over, peak = pids or (os.getpid(),), threading.Event(), 0

    def sample() -> None:
        nonlocal peak
        while not is_over.wait(REST_S):
            peak = max(peak, memory_of(watched))

    def take() -> int:
        nonlocal peak
        taken, peak = max(peak, memory_of(watched)), 0
        return taken

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield take
    finally:
        is_over.set()
        thread.join()


# --- Bytes of tensors ------------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """Memory of a tensor: its owner (a file that processes share, or a process), and from which byte to which."""

    of: tuple[str, int]
    start: int
    stop: int


def spans_of(tensors: Iterable[Tensor]) -> list[Span]:
    """Returns where tensors on the CPU lie, the same for all processes of a host that have mapped the same memory."""
    shared = _shared_mappings()
    found = []
    for tensor in tensors:
        address = tensor.data_ptr()
        for start, stop, offset, file in shared:
            if start <= address < stop:
                found.append(Span(file, offset + address - start, offset + address - start + tensor.nbytes))
                break
        else:
            found.append(Span(("", os.getpid()), address, address + tensor.nbytes))
    return found


def bytes_in(spans: Iterable[Span]) -> int:
    """Returns the bytes of spans; where some overlap, each byte counts once."""
    found, reached = 0, (("", 0), 0)
    for of, start, stop in sorted(spans):
        begin = max(start, reached[1]) if of == reached[0] else start
        if stop > begin:
            found, reached = found + stop - begin, (of, stop)
    return found


def _shared_mappings() -> list[tuple[int, int, int, tuple[str, int]]]:
    """Returns addresses, offset and file, by device and inode, of the memory that this process shares with others."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, permissions, offset, device, inode, *_ = line.split()
            if permissions.endswith("s"):
                start, stop = (int(address, 16) for address in addresses.split("-"))
                found.append((start, stop, int(offset, 16), (device, int(inode))))
    return found


# --- Bytes that leave the host ---------------------------------------------------------------------------------------


def bytes_sent() -> int:
    """Returns the bytes that have left this host so far, by all interfaces but the loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counts = {name.strip(): counters.split() for name, counters in (line.split(":", 1) for line in lines)}
    return sum(int(of_one[8]) for name, of_one in counts.items() if name != "lo")
