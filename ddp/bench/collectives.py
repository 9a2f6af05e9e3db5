"""How long collectives take: ours and torch.distributed's on Gloo, in the same processes and the same run.

A *cell* is one case at one size. Both sides take turns, in alternating order, and ratios are taken turn by turn, so
that a machine whose speed drifts is the same machine for both:

    turn 1    ours ▓▓▓▓▓   Gloo ▓▓▓▓▓
    turn 2    Gloo ▓▓▓▓▓   ours ▓▓▓▓▓
    …
    ▓         one repetition: refill the buffer, meet, call, take the time, meet again; the slowest rank counts
    a turn    median of its repetitions
    a cell    median over turns of Gloo's turn ÷ our turn

With a core for every rank they leave the meeting together. Where ranks outnumber cores they leave it one after another,
as cores come free; so a repetition is then as many calls as fit into `CROWDED_S`, and its time is divided by that. They
meet again so that nobody's refill takes the core of a rank that is still on its way out of the call.

The sum of each turn is checked, and before the first turn so are rounding and the equality of all ranks' bits, on
random numbers.

| figure              | meaning                                                                                       |
|---------------------|-----------------------------------------------------------------------------------------------|
| algorithm bandwidth | bytes of the tensor ÷ time                                                                    |
| bus bandwidth       | that × 2(n−1)/n: what each link carries if nothing crosses it twice (nccl-tests, PERFORMANCE) |
| of copy             | time of `copy_` of as many bytes by one core that has the machine for itself ÷ time           |
| of optimum          | between h hosts each link carries 2(h−1)/h of the tensor at least; that ÷ rate ÷ time         |
| delays              | time ÷ one-way delay: how often a message crosses the link after another one                  |

`scripts/bench_collectives` is the command line. Read next: ddp/bench/meeting.py, ddp/bench/collectives_report.py.
"""

from __future__ import annotations

import os
import re
import statistics
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.bench.bystanders import Watch, running
from ddp.bench.meeting import Meeting, open_meeting
from ddp.bench.units import format_delay, format_rate, format_size, parse_delay, parse_rate
from ddp.clock import now_s
from ddp.comm.communicator import Communicator
from ddp.comm.setup import init, shutdown
from ddp.errors import ConfigError

CROWDED_S, MAX_CALLS = 0.005, 64
MIN_REPETITIONS, MAX_REPETITIONS = 5, 200
ABORT_S = 60.0

# ------------------------------------------------------------------------------------------------------ what is asked


@dataclass(frozen=True)
class Case:
    """Something to time against Gloo.

    Attributes:
        algorithm: for an all-reduce; "auto" leaves the choice to the communicator.
        shared_memory: whether the communicator may use it.
        is_allocated: the tensor is the communicator's own (`allocate`), else an ordinary one.
        is_barrier: no all-reduce at all, but a barrier against a barrier.
    """

    name: str
    algorithm: str = "auto"
    shared_memory: bool = True
    is_allocated: bool = False
    is_barrier: bool = False


CASES = {
    case.name: case
    for case in (
        Case("allocated", is_allocated=True),
        Case("ordinary"),
        Case("transport", shared_memory=False),
        Case("barrier", is_barrier=True),
    )
}


def named(algorithm: str) -> Case:
    """The case of one algorithm by name, in the memory that it is made for."""
    return Case(algorithm, algorithm=algorithm, is_allocated=algorithm.startswith("shared_memory"))


@dataclass(frozen=True)
class Bed:
    """Hosts made of network namespaces, and what joins them.

    Attributes:
        rate_bit_s: of each host's link, each way; None: unlimited.
        delay_s: one way, host to host.
    """

    num_hosts: int
    ranks_per_host: int
    rate_bit_s: float | None = None
    delay_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Bed:
        """From HOSTSxRANKS[@RATE][@DELAY], as in "2x2@1gbit", "4x1@5ms", "2x2@100mbit@1ms".

        Raises:
            ConfigError: something else.
        """
        shape, *links = text.lower().split("@")
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", shape)
        rates = [rate for rate in map(parse_rate, links) if rate is not None]
        delays = [delay for delay in map(parse_delay, links) if delay is not None]
        if not match or len(rates) > 1 or len(delays) > 1 or len(rates) + len(delays) < len(links):
            raise ConfigError(f"netbed {text!r}: want HOSTSxRANKS@RATE@DELAY, e.g. 2x2@1gbit, 4x1@5ms, 2x2@100mbit@1ms")
        if int(match[1]) * int(match[2]) < 2:
            raise ConfigError(f"netbed {text!r}: a collective needs at least two ranks")
        return cls(int(match[1]), int(match[2]), rates[0] if rates else None, delays[0] if delays else 0.0)

    def __str__(self) -> str:
        rate = [] if self.rate_bit_s is None else [format_rate(self.rate_bit_s)]
        delay = [format_delay(self.delay_s)] if self.delay_s else []
        return "@".join([f"{self.num_hosts}x{self.ranks_per_host}", *rate, *delay])


@dataclass(frozen=True)
class Plan:
    """What to measure, and how long.

    Attributes:
        sizes: bytes of each all-reduce.
        num_turns: pairs of turns per cell.
        turn_s: how long each side's turn should take, within `MIN_REPETITIONS` and `MAX_REPETITIONS`.
        bed: where the ranks stand, if on a bed.
    """

    cases: tuple[Case, ...]
    sizes: tuple[int, ...]
    num_turns: int = 5
    turn_s: float = 0.2
    bed: Bed | None = None


# ----------------------------------------------------------------------------------------------------- what is learned


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One cell.

    Attributes:
        algorithm: what ran; where the case says "auto", what the communicator chose.
        nbytes: 0 for a barrier.
        ranks_per_host: as the communicator found them.
        num_cores: of this machine.
        time_s, gloo_s: medians over turns.
        speedup: median over turns of Gloo's turn ÷ ours; above 1 we are faster.
        predicted_s: by the cost model; None where it makes no prediction.
        copy_s: `copy_` of as many bytes, by one core alone.
        others_cores, greediest: what other processes took meanwhile, in cores, and who took most.
    """

    case: str
    algorithm: str
    nbytes: int
    ranks_per_host: tuple[int, ...]
    num_cores: int
    bed: Bed | None
    time_s: float
    gloo_s: float
    speedup: float
    predicted_s: float | None
    copy_s: float | None
    others_cores: float
    greediest: str

    @property
    def world_size(self) -> int:
        return sum(self.ranks_per_host)

    @property
    def algorithm_bytes_s(self) -> float:
        return self.nbytes / self.time_s

    @property
    def bus_bytes_s(self) -> float:
        return self.algorithm_bytes_s * bus_factor(self.world_size)

    @property
    def over_predicted(self) -> float | None:
        """Predicted ÷ measured."""
        return None if self.predicted_s is None else self.predicted_s / self.time_s

    @property
    def share_of_copy(self) -> float | None:
        return None if self.copy_s is None else self.copy_s / self.time_s

    @property
    def share_of_optimum(self) -> float | None:
        if self.bed is None or self.bed.rate_bit_s is None or not self.nbytes:
            return None
        return optimum_s(self.nbytes, self.bed.num_hosts, self.bed.rate_bit_s) / self.time_s

    @property
    def num_delays(self) -> float | None:
        return self.time_s / self.bed.delay_s if self.bed and self.bed.delay_s else None


def bus_factor(world_size: int) -> float:
    """Bus bandwidth ÷ algorithm bandwidth of an all-reduce."""
    return 2 * (world_size - 1) / world_size


def optimum_s(nbytes: int, num_hosts: int, rate_bit_s: float) -> float:
    """The least time of an all-reduce between hosts whose links carry `rate_bit_s` each way, whatever is in them."""
    return bus_factor(num_hosts) * nbytes * 8 / rate_bit_s


# --------------------------------------------------------------------------------------------------------- measuring


class WrongSum(RuntimeError):
    """An all-reduce that was being timed gave a wrong result."""


def measure(plan: Plan, *, say: Callable[[str], None] | None = None) -> list[Figures]:
    """Runs on every rank, in the environment that torchrun or `ddp.launch` gives; the same figures on all of them.

    Args:
        say: told a line for each cell, on rank 0.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=ABORT_S))
    figures: dict[tuple[Case, int], Figures] = {}
    cells = [(case, nbytes) for case in plan.cases for nbytes in ((0,) if case.is_barrier else plan.sizes)]
    with open_meeting(dist.get_rank(), dist.get_world_size(), num_cores=available_cores()) as meet:
        for shared_memory in dict.fromkeys(case.shared_memory for case in plan.cases):
            comm = init(algorithm="auto", shared_memory=shared_memory, abort_s=ABORT_S)
            for case in plan.cases:
                if case.shared_memory == shared_memory:
                    _refuse_unknown(comm, case.algorithm)
            for case, nbytes in cells:
                if case.shared_memory == shared_memory:
                    figures[case, nbytes] = _Cell(comm, meet, case, nbytes).measure(plan)
                    if say is not None and comm.rank == 0:
                        say(_line(figures[case, nbytes]))
            shutdown()
    dist.destroy_process_group()
    return [figures[cell] for cell in cells]


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _refuse_unknown(comm: Communicator, algorithm: str) -> None:
    if algorithm not in ("auto", *comm.ways()):
        raise ConfigError(f"algorithm {algorithm!r} is not possible here; choose among {', '.join(comm.ways())}")


def _line(figures: Figures) -> str:
    size = format_size(figures.nbytes) if figures.nbytes else ""
    return f"{figures.world_size} ranks {figures.case} {size}: {figures.speedup:.2f}x".replace(" :", ":")


@dataclass(frozen=True, eq=False)
class _Side:
    """One of the two rivals: what to time, and the buffer that it sums over the ranks, in place."""

    call: Callable[[], object]
    buffer: Tensor | None


class _Pace(NamedTuple):
    """How much of a side a turn measures."""

    num_repetitions: int
    num_calls: int  # of each


class _Cell:
    """One case at one size, on one rank."""

    def __init__(self, comm: Communicator, meet: Meeting, case: Case, nbytes: int) -> None:
        self._comm, self._meet, self._case, self._nbytes = comm, meet, case, nbytes
        self._is_crowded = comm.world_size > available_cores()

    def measure(self, plan: Plan) -> Figures:
        watch = Watch([*processes(), *(running("hosts.py") if plan.bed else ())])  # a bed's cable is its own
        ours, gloo = self._sides()
        if ours.buffer is not None and gloo.buffer is not None:
            self._check(ours, gloo)
        pace = {side: self._pace(side, plan.turn_s) for side in (ours, gloo)}
        turns: dict[_Side, list[float]] = {ours: [], gloo: []}
        for turn in range(plan.num_turns):
            for side in (ours, gloo) if turn % 2 == 0 else (gloo, ours):
                turns[side].append(statistics.median(self._repetitions(side, pace[side])))
                self._expect_sum(side, pace[side])
        copy_s = self._copy_s(plan.turn_s / 4) if self._nbytes else None
        chosen, predicted_s = self._prediction()
        if self._case.is_allocated and ours.buffer is not None:
            self._comm.free(ours.buffer)
        others = watch.so_far()
        ratios = [theirs / mine for mine, theirs in zip(turns[ours], turns[gloo], strict=True)]
        return Figures(
            case=self._case.name,
            algorithm=chosen,
            nbytes=self._nbytes,
            ranks_per_host=tuple(len(host) for host in self._comm.hosts),
            num_cores=available_cores(),
            bed=plan.bed,
            time_s=statistics.median(turns[ours]),
            gloo_s=statistics.median(turns[gloo]),
            speedup=statistics.median(ratios),
            predicted_s=predicted_s,
            copy_s=copy_s,
            others_cores=others.num_cores,
            greediest=others.greediest,
        )

    def _sides(self) -> tuple[_Side, _Side]:
        comm, case, numel = self._comm, self._case, self._nbytes // 4
        if case.is_barrier:
            return _Side(comm.barrier, None), _Side(dist.barrier, None)
        mine = comm.allocate(numel, torch.float32) if case.is_allocated else torch.zeros(numel)
        theirs = torch.zeros(numel)
        return (
            _Side(lambda: comm.all_reduce(mine, "sum", algorithm=case.algorithm), mine),
            _Side(lambda: dist.all_reduce(theirs), theirs),
        )

    def _prediction(self) -> tuple[str, float | None]:
        case = self._case
        if case.is_barrier:
            return "", None
        chosen = self._comm.choose(self._nbytes) if case.algorithm == "auto" else case.algorithm
        return chosen, self._comm.predict(self._nbytes, algorithm=case.algorithm, allocated=case.is_allocated)

    # --- time --------------------------------------------------------------------------------------------------------

    def _pace(self, side: _Side, turn_s: float) -> _Pace:
        """How often it takes to fill a turn; found by the warm-up."""
        warm_up = _Pace(num_repetitions=3, num_calls=1)
        call_s = max(statistics.median(self._repetitions(side, warm_up)), 1e-7)
        num_calls = 1
        if self._is_crowded:
            num_calls = int(min(max(CROWDED_S / call_s, 1), MAX_CALLS, _exact_sums(self._comm.world_size)))
        num_repetitions = turn_s / (call_s * num_calls)
        return _Pace(int(min(max(num_repetitions, MIN_REPETITIONS), MAX_REPETITIONS)), num_calls)

    def _repetitions(self, side: _Side, pace: _Pace) -> list[float]:
        """Seconds per call of the slowest rank, by repetition; without the first one, since the rival ran before it."""
        times = []
        for _ in range(pace.num_repetitions + 1):
            if side.buffer is not None:
                side.buffer.fill_(1.0)
            self._meet()
            start_s = now_s()
            for _ in range(pace.num_calls):
                side.call()
            times.append((now_s() - start_s) / pace.num_calls)
            self._meet()
        slowest = torch.tensor(times[1:], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.tolist()

    def _copy_s(self, limit_s: float) -> float:
        """`copy_` of as many bytes by rank 0, while the others wait; its median, on all ranks."""
        source, target = torch.ones(self._nbytes // 4), torch.ones(self._nbytes // 4)  # their pages are there
        median = torch.zeros(1, dtype=torch.float64)
        self._meet()
        if self._comm.rank == 0:
            times: list[float] = []
            begin_s = now_s()
            while len(times) < MIN_REPETITIONS or (now_s() - begin_s < limit_s and len(times) < MAX_REPETITIONS):
                start_s = now_s()
                target.copy_(source)
                times.append(now_s() - start_s)
            median[0] = statistics.median(times)
        self._meet()
        dist.broadcast(median, 0)
        return median.item()

    # --- correctness -------------------------------------------------------------------------------------------------

    def _check(self, ours: _Side, gloo: _Side) -> None:
        """On random numbers: as near to Gloo's sum as rounding allows, and the same bits on every rank."""
        assert ours.buffer is not None and gloo.buffer is not None
        generator = torch.Generator().manual_seed(self._comm.rank)
        ours.buffer.normal_(generator=generator)
        gloo.buffer.copy_(ours.buffer)
        magnitude = ours.buffer.abs()
        dist.all_reduce(magnitude)
        ours.call()
        gloo.call()
        # Each side is within (n−1)·eps·Σ|x| of the exact sum, to first order.
        bound = 4 * (self._comm.world_size - 1) * torch.finfo(torch.float32).eps * magnitude
        if not bool(((ours.buffer - gloo.buffer).abs() <= bound).all()):
            raise WrongSum(f"{self._what()}: the sum is not Gloo's, by more than rounding")
        bits = torch.tensor([zlib.crc32(ours.buffer.numpy().data)] * 2) * torch.tensor([1, -1])
        dist.all_reduce(bits, dist.ReduceOp.MAX)
        if bits[0] != -bits[1]:
            raise WrongSum(f"{self._what()}: the ranks hold different bits")

    def _expect_sum(self, side: _Side, pace: _Pace) -> None:
        """After a turn: ones, summed over the ranks as many times as a repetition has calls."""
        if side.buffer is not None:
            least, most = torch.aminmax(side.buffer)
            if not least == most == float(self._comm.world_size) ** pace.num_calls:
                raise WrongSum(f"{self._what()}: a sum of ones came out between {least} and {most}")

    def _what(self) -> str:
        return f"{self._case.name}, {format_size(self._nbytes)}, {self._comm.world_size} ranks, rank {self._comm.rank}"


def _exact_sums(world_size: int) -> int:
    """How often ones can be summed over n ranks, growing to n, n², …, with all partial sums exact in float32."""
    odd = world_size // (world_size & -world_size)
    return max(k for k in range(1, 64) if odd**k * world_size <= 1 << 24 and world_size**k < 1 << 127)


def processes() -> Sequence[int]:
    """The ranks, and what started them. Collective."""
    mine = (os.getpid(), os.getppid())
    found: list[tuple[int, int]] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return [pid for pair in found for pid in pair]
