"""Measures what `same_bits` costs: in time, and in memory.

Steps: a worker computes its part of a batch in one of these modes, and then its optimizer steps.

| mode        | what a step is                                                                                       |
|-------------|------------------------------------------------------------------------------------------------------|
| same_bits   | `ddp.BucketedDataParallel(num_shards=8)`: a forward and a backward for each of the worker's shards    |
| ordinary    | the same forwards and backwards by ranks: all but the last in `no_sync`                              |
| torch       | the same of torch's `DistributedDataParallel` on Gloo, with gradient_as_bucket_view=True             |
| one_forward | `ddp.BucketedDataParallel`, and one forward and backward for all samples of the worker               |

All train with the same samples, and find the same mean but for rounding. They take turns in one launch
(ddp/lab/bench/step.py, where a repetition is one step).

Memory is measured in a launch of its own for each mode, so that no other's counts for it:

    import everything, join torch.distributed               ── before
    build the model, wrap it, make its batch, some steps    ── peak − before, of the worker where that is highest

The peak is the kernel's high-water mark of the resident set, because samples (`counts.py`) miss short peaks on a busy
machine, and the difference of two modes would be one of misses. Memory that workers share counts in full for each.

Note "free blocks". A worker keeps large blocks that are free (`process/memory.py`). What it keeps depends on the order
in which blocks of several sizes became free, and differs from run to run by more than the modes do. So here each block
goes back to the kernel as soon as it is free, and the peak is what the mode needs.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn

from ddp.collectives.shards import owned
from ddp.comm.communicator import Communicator
from ddp.comm.session import init
from ddp.errors import ConfigError
from ddp.lab.bench.place import HERE, Place
from ddp.lab.bench.step import Training, make, session, timed, without_communicator
from ddp.lab.bench.turns import OVER_TURNS, STEP, TimedCell, announce, slowest
from ddp.lab.bench.workloads import Batch, loss_of
from ddp.policies import NUM_SHARDS
from ddp.process.memory import resident_bytes
from ddp.replica.bucketed import BucketedDataParallel
from ddp.units import counted, three_digits, written


@dataclass(frozen=True, kw_only=True)
class ShardsCell(TimedCell):
    """Holds the figures of one model, by mode.

    Attributes:
        gradient_bytes: of all gradients of the model.
        peak: bytes above "before", of the worker where that is most.
    """

    rival: ClassVar[str] = "torch"
    legend: ClassVar[Mapping[str, str]] = {
        "model": "what is trained (ddp/lab/bench/workloads.py); a worker's batch is cut into its shards",
        "same_bits": f"a forward for each shard, added up by shards: {STEP}",
        "ordinary": "the same forwards, added up by ranks: all but the last in no_sync",
        "torch": "the same of torch's DistributedDataParallel on Gloo",
        "one_forward": "added up by ranks, one forward for all samples of a worker",
        "÷ ordinary": "same_bits ÷ ordinary, median over turns: what the same bits cost",
        "over turns": OVER_TURNS,
        "÷ torch": "same_bits ÷ torch; below 1, it is faster than torch's class",
        "over these": OVER_TURNS,
        "÷ one_forward": "same_bits ÷ one_forward: what shards and same bits cost, where a large forward would do",
        "ordinary ÷": "ordinary ÷ one_forward: of that, what several small forwards cost in any mode",
        "peak": "MiB that a worker of same_bits needs above what it had before the model, where that is most",
        "of ordinary": "the same of ordinary",
        "more": "peak of same_bits − that of ordinary, in sizes of all gradients of the model",
    }
    gradient_bytes: int
    peak: Mapping[str, int] = field(default_factory=dict)

    @property
    def more_gradients(self) -> float | None:
        """Returns how much more memory same bits take, in sizes of all gradients; None if that was not measured."""
        if not {"same_bits", "ordinary"} <= self.peak.keys():
            return None
        return (self.peak["same_bits"] - self.peak["ordinary"]) / self.gradient_bytes

    def columns(self) -> dict[str, str]:
        """Returns the line by titles of columns."""
        return {
            "model": self.name,
            **{mode: written(three_digits, self.median_s(mode), 1e3) for mode in MODES},
            "÷ ordinary": written("{:.3f}".format, self.ratio("same_bits", "ordinary")),
            "over turns": _spread(self.ratios("same_bits", "ordinary")),
            "÷ torch": written("{:.3f}".format, self.ratio("same_bits", "torch")),
            "over these": _spread(self.ratios("same_bits", "torch")),
            "÷ one_forward": written("{:.3f}".format, self.ratio("same_bits", "one_forward")),
            "ordinary ÷": written("{:.3f}".format, self.ratio("ordinary", "one_forward")),
            "peak": written("{:.1f}".format, self.peak.get("same_bits"), 1 / MIB),
            "of ordinary": written("{:.1f}".format, self.peak.get("ordinary"), 1 / MIB),
            "more": written("{:+.2f}".format, self.more_gradients),
        }


MIB = 1 << 20


def _spread(ratios: Sequence[float]) -> str:
    return f"{three_digits(min(ratios))} – {three_digits(max(ratios))}" if ratios else ""


def merged(cells: Iterable[ShardsCell]) -> list[ShardsCell]:
    """Returns one cell for each model and place, with all that is known of it."""
    found: dict[tuple[str, str], ShardsCell] = {}
    for cell in cells:
        known = found.setdefault((cell.place, cell.name), cell)
        turns_s, peak = {**known.turns_s, **cell.turns_s}, {**known.peak, **cell.peak}
        found[cell.place, cell.name] = replace(known, turns_s=turns_s, peak=peak)
    return list(found.values())


MODES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "same_bits": partial(BucketedDataParallel, num_shards=NUM_SHARDS),
    "ordinary": BucketedDataParallel,
    "torch": partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True),
    "one_forward": BucketedDataParallel,
}
IN_MEMORY = ("same_bits", "ordinary")
NUM_STEPS = 6  # of which the first makes the state, and the second has the layout of buckets that stays


class ShardTraining(Training):
    """Trains a module in one mode. The constructor is collective.

    Raises:
        ConfigError: the worker's batch has fewer samples than it has shards.
    """

    def __init__(self, mode: str, module: nn.Module, batch: Batch) -> None:
        self._set_up(MODES[mode](module), batch)
        rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._shards, self._mode = owned(rank, self._num_ranks, NUM_SHARDS), mode
        if len(batch[0]) < len(self._shards):
            raise ConfigError(
                f"a worker's batch of {counted(len(batch[0]), 'sample')} cannot be cut into {len(self._shards)} "
                "shards: take more workers, or another model"
            )
        inputs, targets = (part.tensor_split(len(self._shards)) for part in batch)
        self._parts = list(zip(inputs, targets, strict=True))

    def step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        if self._mode == "one_forward":
            self._backward(self._batch, 1.0)
        elif self._mode == "same_bits":
            replica: Any = self.replica
            for shard, part in zip(self._shards, self._parts, strict=True):
                with replica.shard(shard):
                    self._backward(part, 1.0)
        else:
            self._accumulate()
        self._update()

    def _accumulate(self) -> None:
        """Adds up this rank's parts; the last backward averages the sums over ranks."""
        replica: Any = self.replica
        for number, part in enumerate(self._parts, 1):
            with contextlib.nullcontext() if number == len(self._parts) else replica.no_sync():
                self._backward(part, self._num_ranks / NUM_SHARDS)

    def _backward(self, batch: Batch, scale: float) -> None:
        inputs, targets = batch
        loss: Tensor = loss_of(self.replica(inputs), targets)
        (loss if scale == 1.0 else loss * scale).backward()
        self.loss = loss.detach()


@dataclass(frozen=True)
class TimeModes:
    """Times a step of each mode. A call runs on every rank, in the environment of torchrun or `ddp.launch`."""

    model: str
    num_turns: int = 9
    place: Place = HERE

    def __call__(self) -> list[ShardsCell]:
        """Returns one cell, the same on all ranks."""
        with session() as comm:
            cell = self._measure(comm)
            announce(cell)
        return [cell]

    def _measure(self, comm: Communicator) -> ShardsCell:
        """Has all replicas in local variables, so that they end here (`step.py`, note "replicas first")."""
        module, batch = make(self.model, rank=comm.rank)
        trainings = {mode: ShardTraining(mode, copy.deepcopy(module), batch) for mode in MODES}
        turns_s = timed(self.model, trainings, comm, self.num_turns)
        place = self.place.title(comm.world_size, len(comm.hosts))
        return _cell(place, self.model, module, turns_s=turns_s)


@dataclass(frozen=True)
class MeasureMode:
    """Measures the memory of one mode. A call runs on every rank of one host, as that of `TimeModes`."""

    model: str
    mode: str
    place: Place = HERE

    def __call__(self) -> list[ShardsCell]:
        """Returns one cell, the same on all ranks."""
        with without_communicator(self.model):
            cell = self._measure()
        return [cell]

    def _measure(self) -> ShardsCell:
        before = resident_bytes()
        if self.mode != "torch":
            init(device="cpu")
        _give_back_blocks()
        module, batch = make(self.model, rank=dist.get_rank())
        training = ShardTraining(self.mode, module, batch)
        for _ in range(NUM_STEPS):
            training.step()
        peak = int(slowest([_most_resident_bytes() - before])[0])
        place = self.place.title(dist.get_world_size())
        return _cell(place, self.model, module, turns_s={}, peak={self.mode: peak})


def _give_back_blocks() -> None:
    """Lets the C library give each large block back when it is free (note "free blocks")."""
    M_MMAP_THRESHOLD = -3
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # the GNU C library's
        mallopt(M_MMAP_THRESHOLD, 1 << 20)


def _most_resident_bytes() -> int:
    """Returns the most bytes of this process that were in memory at any moment, shared ones included."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) << 10


def _cell(place: str, model: str, module: nn.Module, **measured: Any) -> ShardsCell:
    gradients = sum(each.nbytes for each in module.parameters() if each.requires_grad)
    return ShardsCell(place=f"{place}; {NUM_SHARDS} shards", name=model, gradient_bytes=gradients, **measured)
