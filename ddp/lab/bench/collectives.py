"""Times collectives: ours and torch.distributed's on Gloo, in the same processes and the same run.

A *cell* is one case at one size; its rivals take turns (ddp/lab/bench/turns.py). One repetition is:

    clear the buffer,  barrier,  start the clock,  call,  stop the clock,  barrier      the slowest rank counts

With a core for every rank, all ranks leave the barrier together. Where ranks outnumber cores they leave it one after
another, as cores become free; so a repetition then makes as many calls as fit into `CROWDED_S`, and its time is divided
by their number. The second barrier keeps a rank that is done from clearing its buffer on the core of a rank that is
still inside the call. Strangers (`--beside`) change nothing of this: as in a training step, a rank has then used its
share of a core before it calls.

Before and after the turns, all ranks reduce random numbers: the sum must be Gloo's but for rounding, and must have the
same bits on every rank.

| case           | what it times                                                               |
|----------------|-----------------------------------------------------------------------------|
| allocated      | an all-reduce of memory from `comm.allocate`                                |
| ordinary       | an all-reduce of any tensor                                                 |
| barrier        | a barrier                                                                   |
| transport      | an all-reduce of any tensor with shared memory off                          |
| ring, tree, …  | an all-reduce by that algorithm, in the memory that the algorithm is for    |

`CollectiveCell.legend` explains the figures.

    python -m ddp bench collectives                                    2 and 4 ranks on this host, 1 KB to 64 MB
    python -m ddp bench collectives --workers 2 --sizes 1MB,25MB --cases ring,shared_memory --plot mine.png
    python -m ddp bench collectives --beside 1                         beside a process that keeps a core busy
    python -m ddp bench collectives --netbed 2x2@1gbit --sizes 25MB    on hosts made for it (root, iproute2)
    python -m ddp bench collectives --netbed 4x1@5ms --sizes 4KB       the same with a delay of 5 ms from host to host
    torchrun … -m ddp bench collectives --sizes 25MB                   on ranks that are there already

Every rank has one thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.comm.session import init, shutdown
from ddp.commands.registry import parser_of, respond
from ddp.errors import ConfigError
from ddp.lab.bench.command import HERE, BenchSite, add_options, place_of, refuse_unknown, run_jobs, split
from ddp.lab.bench.turns import (
    ABORT_S,
    OVER_TURNS,
    TimedCell,
    announce,
    num_repetitions,
    paired,
    session,
    slowest,
    torch_alone,
)
from ddp.process.clock import now_s
from ddp.process.memory import available_cores
from ddp.run.settings.checks import WAYS
from ddp.units import format_bandwidth, format_size, format_time, parse_size, three_digits, written

CROWDED_S, MAX_CALLS = 0.005, 64


def main(words: Sequence[str]) -> int:
    """Times the collectives that the words ask for."""
    parser = parser_of("bench collectives", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, workers="2,4", least=2, turns=5, plots=True)
    sizes, cases = "1KB,64KB,1MB,4MB,25MB,64MB", ",".join(CASES)
    parser.add_argument("--sizes", default=sizes, metavar="SIZE,SIZE,…", help="of each tensor (default: %(default)s)")
    parser.add_argument("--cases", default=cases, metavar="CASE,CASE,…", help="what to time (default: %(default)s)")
    return respond(parser, parser.parse_args(words), run)


def run(options: argparse.Namespace) -> str:
    """Times them; the report is printed."""
    where, names = place_of(options), split("--cases", options.cases)
    refuse_unknown("case", names, (*CASES, *WAYS))
    cases, sizes = tuple(map(Case.named, names)), tuple(map(parse_size, split("--sizes", options.sizes)))
    if options.plot and all(case.is_barrier for case in cases):
        raise ConfigError("--plot has nothing to draw, since a barrier has no size: add an all-reduce to --cases")
    run_jobs(options, [TimeCollectives(cases, sizes, options.turns, where)], CollectiveCell, where)
    return ""


# --- The barrier between two timings ---------------------------------------------------------------------------------
#
# Lets ranks wait for each other between repetitions, without touching either of the rivals.
#
# A barrier of one rival would warm that rival's sockets and caches, and its ranks would leave one after another. This
# one uses neither rival: all ranks of one machine map the same small file, whatever network namespace they are in.
# Each rank counts its calls in a cache line of its own and waits until the other counters have reached its own.
#
#     a core for every rank        A waiting rank spins. All ranks leave within some 2 µs of each other.
#     more ranks than cores        A waiting rank sleeps between two polls, because a spinning rank takes the core that
#                                  another one needs, and the scheduler makes it pay for that afterwards: behind a
#                                  spinning barrier of 4 ranks on 2 cores, Gloo's all-reduce of 1 KB took twice as long.
#     ranks on several machines    A barrier of torch.distributed, because there is nothing else.
#
# A rank that died is waited for until the launcher, which sees every death, ends the others.


NAP_S = 50e-6
NAME_BYTES = 4096

Barrier = Callable[[], None]
"""Returns once every rank has called it as many times as this one."""


@contextmanager
def open_barrier(rank: int, world_size: int, *, is_crowded: bool) -> Iterator[Barrier]:
    """Yields the best barrier for these ranks. Collective, inside an initialised torch.distributed."""
    name = torch.zeros(NAME_BYTES, dtype=torch.uint8)  # as a tensor, because torch would unpickle an object
    if rank == 0:
        descriptor, made = tempfile.mkstemp(prefix="ddp-barrier-")
        with os.fdopen(descriptor, "wb") as file:
            file.write(bytes(64 * world_size))
        name[: len(os.fsencode(made))] = torch.tensor(list(os.fsencode(made)), dtype=torch.uint8)
    dist.broadcast(name, src=0)
    path = Path(os.fsdecode(bytes(name.tolist()).rstrip(b"\0")))
    is_shared = torch.tensor([path.exists()], dtype=torch.uint8)
    dist.all_reduce(is_shared, dist.ReduceOp.MIN)
    counters = np.memmap(path, np.int64, "r+", shape=(world_size, 8)) if is_shared else np.zeros((world_size, 8))
    dist.barrier()
    if rank == 0:
        path.unlink()  # all ranks have mapped it; so nothing is left, however this ends

    def wait() -> None:
        # One aligned word, written by one rank alone: a reader finds the old count or the new one.
        counters[rank, 0] += 1
        for other in range(world_size):
            while counters[other, 0] < counters[rank, 0]:
                if is_crowded:
                    time.sleep(NAP_S)
                else:
                    os.sched_yield()

    yield wait if is_shared else dist.barrier


@dataclass(frozen=True)
class Case:
    """A collective that is timed against Gloo's.

    Attributes:
        algorithm: of an all-reduce; "auto" leaves the choice to the communicator.
        shared_memory: whether the communicator may use it.
        is_allocated: the tensor is the communicator's own (`allocate`), else an ordinary one.
        is_barrier: a barrier instead of an all-reduce.
    """

    name: str
    algorithm: str = "auto"
    shared_memory: bool = True
    is_allocated: bool = False
    is_barrier: bool = False

    @classmethod
    def named(cls, name: str) -> Case:
        """Returns one of `CASES`, or the case of the algorithm with that name."""
        return CASES.get(name) or cls(name, algorithm=name, is_allocated=name.startswith("shared_memory"))


CASES = {
    "allocated": Case("allocated", is_allocated=True),
    "ordinary": Case("ordinary"),
    "barrier": Case("barrier", is_barrier=True),
    "transport": Case("transport", shared_memory=False),
}


@dataclass(frozen=True, kw_only=True)
class CollectiveCell(TimedCell):
    """The figures of one case at one size.

    Attributes:
        algorithm: the one that ran; with the case "auto", the communicator's choice.
        nbytes: of the tensor; 0 for a barrier.
        wire_s: the least time that the links of a bed allow.
        delay_s: from host to host, one way.
    """

    rival: ClassVar[str] = "Gloo"
    legend: ClassVar[Mapping[str, str]] = {
        "case": "what was timed (--help lists the cases)",
        "algorithm": "how it ran",
        "size": "of the tensor; 1 KB is 1024 bytes",
        "time": "of one call, median over turns, on the slowest rank",
        "GB/s": "bus bandwidth, busbw of nccl-tests: algbw × 2(n−1)/n for n ranks, algbw = size ÷ time; GB: 10⁹ bytes",
        "of wire": "least time that the hosts' links allow ÷ time",
        "delays": "time ÷ one-way delay between hosts: how many messages cross the links one after another",
        "Gloo": "time of torch.distributed on Gloo, which takes turns with ours",
        "Gloo ÷ ours": "median over turns; above 1, ours is faster",
        "over turns": OVER_TURNS,
    }
    case: str
    algorithm: str
    nbytes: int
    world_size: int
    wire_s: float | None
    delay_s: float | None

    @property
    def bus_bytes_s(self) -> float:
        """Returns the bytes per second that each link carries if no byte crosses it twice."""
        return self.nbytes * 2 * (self.world_size - 1) / self.world_size / self.time_s

    @property
    def time_s(self) -> float:
        """Returns the time of ours."""
        return statistics.median(self.turns_s["ours"])

    def columns(self) -> dict[str, str]:
        """Returns the line by titles of columns."""
        return {
            "case": self.case,
            "algorithm": self.algorithm,
            "size": format_size(self.nbytes) if self.nbytes else "",
            "time": format_time(self.time_s),
            "GB/s": format_bandwidth(self.bus_bytes_s) if self.nbytes else "",
            "of wire": written("{:.0%}".format, self.wire_s, 1 / self.time_s),
            "delays": three_digits(self.time_s / self.delay_s) if self.delay_s else "",
            "Gloo": written(format_time, self.median_s("Gloo")),
            "Gloo ÷ ours": written(three_digits, self.speedup),
            "over turns": self.spread(self.rival, "ours"),
        }


class WrongSum(RuntimeError):
    """The error of a timed all-reduce that gives a wrong result."""


@dataclass(frozen=True)
class TimeCollectives:
    """Times every case at every size. A call runs on every rank, in the environment of torchrun or `ddp.launch`.

    Attributes:
        sizes: bytes of each all-reduce.
        num_turns: turns of each rival in a cell.
    """

    cases: tuple[Case, ...]
    sizes: tuple[int, ...]
    num_turns: int = 5
    place: BenchSite = HERE

    def __call__(self) -> list[CollectiveCell]:
        """Returns the cells, the same on all ranks; those without shared memory come last.

        Raises:
            ConfigError: an algorithm is not possible here.
            WrongSum: ours is not Gloo's sum, or not the same on all ranks.
        """
        with session(torch_alone):
            return self._of_all_cases()

    def _of_all_cases(self) -> list[CollectiveCell]:
        is_crowded = dist.get_world_size() > available_cores()
        cells = []
        with open_barrier(dist.get_rank(), dist.get_world_size(), is_crowded=is_crowded) as barrier:
            for shared_memory in (True, False):
                cases = [case for case in self.cases if case.shared_memory == shared_memory]
                if not cases:
                    continue
                comm = init(shared_memory=shared_memory, abort_s=ABORT_S)
                for case in cases:
                    comm.all_reduce(torch.zeros(1), algorithm=case.algorithm)  # is refused if it is not possible here
                for case in cases:
                    for nbytes in (0,) if case.is_barrier else self.sizes:
                        cells.append(self._measure(comm, barrier, case, nbytes, is_crowded=is_crowded))
                        announce(cells[-1])
                shutdown()
        return cells

    def _measure(
        self, comm: Communicator, barrier: Barrier, case: Case, nbytes: int, *, is_crowded: bool
    ) -> CollectiveCell:
        name = f"{case.name} {format_size(nbytes)}" if nbytes else case.name
        ours, gloo = _rivals(comm, barrier, case, nbytes)
        ours.is_crowded = gloo.is_crowded = is_crowded
        check(comm, ours, gloo, name)
        turns_s = paired({"ours": ours, "Gloo": gloo}, self.num_turns)
        check(comm, ours, gloo, name)
        if case.is_allocated and ours.buffer is not None:
            comm.free(ours.buffer)
        algorithm = "" if case.is_barrier else case.algorithm
        if algorithm == "auto":
            algorithm = comm.plan.choose(nbytes)
        bed = self.place.bed
        return CollectiveCell(
            place=self.place.title(comm.world_size, len(comm.hosts)),
            name=name,
            turns_s=turns_s,
            case=case.name,
            algorithm=algorithm,
            nbytes=nbytes,
            world_size=comm.world_size,
            wire_s=self.place.wire_s(nbytes) if nbytes else None,
            delay_s=bed.delay_s or None if bed else None,
        )


@dataclass
class TimedCall:
    """One of the two: a call, and the buffer that it sums over the ranks, in place (None for a barrier)."""

    barrier: Barrier
    call: Callable[[], object]
    buffer: Tensor | None
    num_repetitions: int = 3  # of a turn; until the pace is found, of the warm-up
    num_calls: int = 1  # of a repetition
    is_crowded: bool = False  # ranks outnumber cores

    def find_pace(self) -> None:
        """Warms up, and chooses how many repetitions fill a turn."""
        call_s = self.turn_s()
        if self.is_crowded:
            self.num_calls = int(min(max(CROWDED_S / call_s, 1), MAX_CALLS))
        self.num_repetitions = num_repetitions(call_s * self.num_calls, least=5)

    def turn_s(self) -> float:
        """Returns the median over repetitions of the seconds per call on the slowest rank. Collective."""
        times_s = []
        for _ in range(self.num_repetitions + 1):
            if self.buffer is not None:
                self.buffer.zero_()  # whose sum stays zero, however often it is taken
            self.barrier()
            start_s = now_s()
            for _ in range(self.num_calls):
                self.call()
            times_s.append((now_s() - start_s) / self.num_calls)
            self.barrier()
        return statistics.median(slowest(times_s[1:]))  # the other rival ran before the first one


def _rivals(comm: Communicator, barrier: Barrier, case: Case, nbytes: int) -> tuple[TimedCall, TimedCall]:
    if case.is_barrier:
        return TimedCall(barrier, comm.barrier, None), TimedCall(barrier, dist.barrier, None)
    numel = nbytes // 4
    mine = comm.allocate(numel, torch.float32) if case.is_allocated else torch.zeros(numel)
    theirs = torch.zeros(numel)
    return (
        TimedCall(barrier, lambda: comm.all_reduce(mine, "sum", algorithm=case.algorithm), mine),
        TimedCall(barrier, lambda: dist.all_reduce(theirs), theirs),
    )


def check(comm: Communicator, ours: TimedCall, gloo: TimedCall, name: str) -> None:
    """Raises WrongSum unless a sum of random numbers is Gloo's but for rounding, with equal bits on all ranks."""
    if ours.buffer is None or gloo.buffer is None:
        return
    where = f"{name}, {comm.world_size} ranks, rank {comm.rank}"
    ours.buffer.normal_(generator=torch.Generator().manual_seed(comm.rank))
    gloo.buffer.copy_(ours.buffer)
    magnitude = ours.buffer.abs()
    dist.all_reduce(magnitude)
    ours.call()
    gloo.call()
    # Each rival is within (n−1)·eps·Σ|x| of the exact sum, to first order.
    bound = 4 * (comm.world_size - 1) * torch.finfo(torch.float32).eps * magnitude
    if not bool(((ours.buffer - gloo.buffer).abs() <= bound).all()):
        raise WrongSum(f"{where}: the sum is not Gloo's, by more than rounding")
    bits = torch.tensor([zlib.crc32(ours.buffer.numpy().data)] * 2) * torch.tensor([1, -1])
    dist.all_reduce(bits, dist.ReduceOp.MAX)
    if bits[0] != -bits[1]:
        raise WrongSum(f"{where}: the ranks hold different bits")
