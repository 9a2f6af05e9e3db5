"""Steps: where one begins and how many samples it takes is a function of the run's position alone.

The position is the number of samples that all ranks together have trained on since the run began. An epoch ends with a
smaller step if the batch does not divide it. A *batch warm-up* begins with smaller batches: early gradients differ so
little from their mean that large batches would be wasted on them (arXiv 1812.06162). Since nothing but the
position counts, a loader may plan ahead, and a resumed run continues exactly.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from ddp.data.orders.order import Order
from ddp.data.orders.sharding import OwnSharding
from ddp.data.samples import Collate
from ddp.errors import ConfigError
from ddp.setting import Natural, Uneven, Whole, check_values, setting
from ddp.units import counted

# --- `ddp.Batches`, an argument of `ddp.fit` -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The cut of samples into steps: in which order, in which parts of a batch, in which forwards.

    Attributes:
        order: which sample an epoch has where, such as `ddp.data.Weighted(weights)`; None: each once, at random.
        sharding: "sample", "file", "full_shuffle", "off", or a function (shard, number of shards) → its samples:
            `ddp/data/orders/sharding.py`. "auto": by file, if the data have `file_sizes` and as many files as shards.
        num_shards: parts of a batch; None: those of the run to be resumed, or one for each rank.
        micro_size: most samples of one forward; larger shares are accumulated. None: no limit.
        skip_steps: first and last of the steps whose samples are left out, counted from 1.
        uneven: what happens if an iterable ends on one rank before another: "join", "stop_all" or "raise".
        seed: of the samples' order and of dropout. The program's own generators are afterwards as before.
        collate: makes a batch of a list of samples, in any nested form; None for the DataLoader's, or torch's default.

    Raises:
        ConfigError: a field is of another type, or out of its bounds.
    """

    order: Order | None = None
    sharding: str | OwnSharding = "auto"
    num_shards: Natural | None = setting(None, "parts of a batch")
    micro_size: Natural | None = setting(None, "most samples of one forward")
    skip_steps: tuple[int, int] | None = None
    uneven: Uneven = "join"
    seed: Whole = setting(0, "of all random numbers")
    collate: Collate | None = None

    def __post_init__(self) -> None:
        check_values(self)
        if not (self.order is None or isinstance(self.order, Order)):
            raise ConfigError(
                f"order={self.order!r:.60}: give an order of ddp.data, such as ddp.data.Fixed(len(data)), or None"
            )
        if self.skip_steps is not None:
            object.__setattr__(self, "skip_steps", checked_range(self.skip_steps))

    @property
    def sampler_arguments(self) -> dict[str, Any]:
        """Returns the fields that say which rank gets which sample, as arguments of `sampler_of`."""
        names = ("order", "sharding", "num_shards", "micro_size", "skip_steps", "seed")
        return {name: getattr(self, name) for name in names}


class BatchWarmup(NamedTuple):
    """A global batch that grows from `first` to `last` samples, in multiples of `first` but for the last.

    Attributes:
        num_samples: position from which on it is `last`.
    """

    first: int
    last: int
    num_samples: int

    def size_at(self, position: int) -> int:
        """Returns the global batch after `position` samples of the run."""
        if position >= self.num_samples:
            return self.last
        wanted = self.first + (self.last - self.first) * position // self.num_samples
        return wanted // self.first * self.first


class Steps(ABC):
    """The steps of a run.

    Attributes:
        length: positions of an epoch.
    """

    length: int

    @abstractmethod
    def size_at(self, position: int) -> int:
        """Returns the size of the step that begins after `position` samples of the run."""

    @abstractmethod
    def num_steps(self, begin: int, end: int) -> int:
        """Returns the number of steps that lead from one position to another, or just beyond it."""

    @abstractmethod
    def after(self, begin: int, num_steps: int) -> int:
        """Returns the position after some steps."""

    @abstractmethod
    def all(self) -> set[int]:
        """Returns the sizes that the steps of a run may have."""

    @abstractmethod
    def in_words(self) -> str:
        """Returns how large a step is."""

    @property
    @abstractmethod
    def usual(self) -> int:
        """Returns the samples of a step, but for exceptions: the global batch."""

    @property
    def num_steps_per_epoch(self) -> int:
        """Returns the number of steps of a whole epoch, once the batch has grown."""
        return math.ceil(self.length / self.usual)

    @property
    @abstractmethod
    def setting(self) -> Any:
        """Returns the settings that the sizes follow from, as JSON can hold it."""


class BatchSizes(Steps):
    """Steps of a number of samples.

    Args:
        length: positions of an epoch.
        batch: samples of a step, but for the last one of an epoch.

    Raises:
        ConfigError: a batch warm-up that does not grow.
    """

    def __init__(self, length: int, batch: int | BatchWarmup) -> None:
        self.length = length
        if isinstance(batch, BatchWarmup):
            self._check(batch)
        self.batch = batch if isinstance(batch, BatchWarmup) else BatchWarmup(batch, batch, 0)

    def _check(self, batch: BatchWarmup) -> None:
        are_whole = all(isinstance(each, int) and not isinstance(each, bool) for each in batch)
        if not are_whole or not (0 < batch.first < batch.last and batch.num_samples > 0):
            raise ConfigError(
                f"{batch}: takes whole numbers; first must be at least 1 and less than last, num_samples at least 1"
            )

    def size_at(self, position: int) -> int:
        """Returns the size of the step that begins after `position` samples of the run."""
        return min(self.batch.size_at(position), self.length - position % self.length)

    @property
    def usual(self) -> int:
        """Returns the global batch, once it has grown."""
        return self.batch.last

    @property
    def setting(self) -> int | list[int]:
        """Returns the global batch, or how it grows."""
        return list(self.batch) if self.batch.num_samples else self.batch.last

    def in_words(self) -> str:
        """Returns the global batch, and how it grows."""
        first, last, num_samples = self.batch
        return f"{last}" if first == last else f"{first}, growing to {last} over {num_samples:,} samples,"

    def num_steps(self, begin: int, end: int) -> int:
        """Returns the number of steps that lead from one position to another, or just beyond it."""
        steps = 0
        while not self._is_steady(begin):
            num_steps, samples, size = self._stretch(begin)
            if begin + samples >= end:
                return steps + max(0, math.ceil((end - begin) / size))
            begin, steps = begin + samples, steps + num_steps
        epochs, rest = divmod(max(0, end - begin), self.length)
        return steps + epochs * math.ceil(self.length / self.batch.last) + math.ceil(rest / self.batch.last)

    def after(self, begin: int, num_steps: int) -> int:
        """Returns the position after some steps."""
        while not self._is_steady(begin):
            steps, samples, size = self._stretch(begin)
            if steps >= num_steps:
                return begin + min(samples, num_steps * size)
            begin, num_steps = begin + samples, num_steps - steps
        epochs, rest = divmod(num_steps, math.ceil(self.length / self.batch.last))
        return begin + epochs * self.length + rest * self.batch.last

    def all(self) -> set[int]:
        """Returns the sizes that the steps of a run may have."""
        found, position = set[int](), 0
        while position < self.batch.num_samples + self.length:
            num_steps, samples, size = self._stretch(position)
            found |= {size} if num_steps > 1 else set()
            found.add(samples - (num_steps - 1) * size)
            position += samples
        return found

    def _is_steady(self, position: int) -> bool:
        """Returns True if this and all further epochs are equal."""
        return position >= self.batch.num_samples and position % self.length == 0

    def _stretch(self, position: int) -> tuple[int, int, int]:
        """Returns (steps, samples, size): of one step while the batch grows, else of all that is left of an epoch."""
        left, size = self.length - position % self.length, self.batch.size_at(position)
        samples = left if position >= self.batch.num_samples else min(left, size)
        return math.ceil(samples / size), samples, size


def joined(ranges: Sequence[range], more: range) -> list[range]:
    """Returns ranges of positions and one more, in rising order; those that touch become one."""
    found: list[range] = []
    for each in sorted([*ranges, more], key=lambda each: each.start):
        if found and found[-1].stop == each.start:
            found[-1] = range(found[-1].start, each.stop)
        else:
            found.append(each)
    return found


def gaps(ranges: Sequence[range], within: range) -> list[range]:
    """Returns what is left of a range without others, in rising order."""
    found, begin = list[range](), within.start
    for each in sorted(ranges, key=lambda each: each.start):
        found.append(range(begin, min(each.start, within.stop)))
        begin = max(begin, each.stop)
    return [each for each in [*found, range(begin, within.stop)] if len(each)]


# --- Rounds, each of several steps of every worker alone -------------------------------------------------------------


class RoundLength(NamedTuple):
    """The steps that are rounds: after `warmup_samples` samples, each of `every` batches."""

    every: int
    warmup_samples: int


class RoundBatch(BatchWarmup):
    """The samples of a round: several times a batch; until `num_samples` it is one batch."""

    def size_at(self, position: int) -> int:
        """Returns the samples of the step that begins after `position` samples of the run."""
        return self.first if position < self.num_samples else self.last


class RoundSizes(BatchSizes):
    """Rounds of several inner steps of a batch each, instead of steps; before them, steps of a batch.

    Args:
        length, batch: as in `BatchSizes`, of an inner step; it does not grow.
    """

    def __init__(self, length: int, batch: int | BatchWarmup, rounds: RoundLength) -> None:
        assert isinstance(batch, int)
        super().__init__(length, RoundBatch(batch, batch * rounds.every, rounds.warmup_samples))

    def _check(self, batch: BatchWarmup) -> None:
        """Takes a round of one batch, too, and none before it."""

    def _stretch(self, position: int) -> tuple[int, int, int]:
        if position >= self.batch.num_samples:
            return super()._stretch(position)
        left, size = self.length - position % self.length, self.batch.first
        num_steps = math.ceil(min(left, self.batch.num_samples - position) / size)
        return num_steps, min(left, num_steps * size), size

    def all(self) -> set[int]:
        """Returns the sizes that the steps of a run may have; epochs before rounds are like the first."""
        first, last, num_samples = self.batch
        spared = max(0, num_samples // self.length - 1) * self.length
        rest = RoundLength(last // first, num_samples - spared)
        return RoundSizes(self.length, first, rest).all() if spared else super().all()

    @property
    def setting(self) -> int:
        """Returns the samples of an inner step."""
        return self.batch.first

    def in_words(self) -> str:
        """Returns the samples of an inner step, and how many such make a round."""
        first, last, num_samples = self.batch
        later = f" after {num_samples:,} samples" if num_samples else ""
        return f"{first} in rounds of {counted(last // first, 'inner step')}{later},"

    def num_inner(self, size: int, world_size: int) -> int:
        """Returns the inner steps of a round of this size; fewer where a rank would have no sample in one."""
        return max(1, min(math.ceil(size / self.batch.first), size // world_size))


# --- The remaining steps: without those that are left out, and those that were made before their turn ----------------
#
#     steps        1  2  3  4  5 …       skip_steps=(3, 4)
#     positions    0  8 16 ──→ 32 …      a range of steps is a range of positions, and all other steps stay as they are
#
#     positions    0     8    16    24    32    40 …      steps that workers lease are made in any order: a state at
#     made         ✓           ✓     ✓                    position 8 has [16, 32) ahead, and steps 1 and 2 come next
#     to come            1                 2     3
#
# The settings name one range to be left out, which lies ahead of where a run begins or resumes. Those of earlier starts
# lie behind it. With another batch than then, a step ends where those that were made begin.


class Skipped(NamedTuple):
    """A range of steps that is left out, as steps and as positions of the run."""

    first: int  # steps, counted from 1
    last: int
    start: int  # positions
    stop: int


class StepsLeft:
    """The steps of a run without some ranges of positions.

    Args:
        sizes: of all steps.
        skipped: ranges that are left out, in rising order.
        made: ranges that were made before their turn, in rising order.
    """

    def __init__(self, sizes: Steps, skipped: Sequence[Skipped] = (), made: Sequence[range] = ()) -> None:
        self.sizes, self.skipped, self.made = sizes, skipped, made
        gaps = [*made, *(range(each.start, each.stop) for each in skipped)]
        self._gaps = sorted(gaps, key=lambda each: each.start)

    def with_range(self, steps: tuple[int, int], *, num_steps: int, position: int) -> StepsLeft:
        """Returns these steps without another range, unless that is left out already.

        Args:
            num_steps, position: steps that the run has made, and where it resumes.

        Raises:
            ConfigError: the range has begun already.
        """
        if steps in [each[:2] for each in self.skipped]:
            return self
        first, last = steps
        if first <= num_steps:
            raise ConfigError(
                f"skip_steps=[{first},{last}]: the run resumes after step {num_steps}, so that it is too late for "
                f"step {first}; name later steps, or go back to a checkpoint before them"
            )
        start, stop = (self.past(self.after(position, step - num_steps)) for step in (first - 1, last))
        if self.made and start < self.made[-1].stop:
            least = num_steps + self.num_steps(position, self.made[-1].stop) + 1
            raise ConfigError(
                f"skip_steps=[{first},{last}]: the run resumes after step {num_steps}, of which some were made before "
                f"their turn; name steps from {least} on, or go back to an earlier checkpoint"
            )
        return StepsLeft(self.sizes, [*self.skipped, Skipped(first, last, start, stop)], self.made)

    def past(self, position: int) -> int:
        """Returns where the next step begins, from a position on."""
        for gap in self._gaps:
            position = gap.stop if position in gap else position
        return position

    def size_at(self, position: int) -> int:
        """Returns the size of the step that begins after `position` samples of the run."""
        rooms = [gap.start - position for gap in self._gaps if gap.start > position]
        return min([self.sizes.size_at(position), *rooms])

    def of_epoch(self, position: int) -> Iterator[range]:
        """Yields the steps from a position on to the end of its epoch, as positions in the epoch."""
        epoch, length = position // self.sizes.length, self.sizes.length
        while position // length == epoch:
            start, size = position % length, self.size_at(position)
            yield range(start, start + size)
            position = self.past(position + size)

    def num_steps(self, begin: int, end: int) -> int:
        """Returns the number of steps that lead from one position to another, or just beyond it."""
        begin, num_steps = self.past(begin), 0
        for gap in self._gaps:
            if begin <= gap.start < end:
                num_steps += self.sizes.num_steps(begin, gap.start)
                begin = self.past(gap.start)
        return num_steps + self.sizes.num_steps(begin, end)

    def after(self, begin: int, num_steps: int) -> int:
        """Returns the position after some steps."""
        begin = self.past(begin)
        for gap in self._gaps:
            if begin <= gap.start:
                if (before := self.sizes.num_steps(begin, gap.start)) >= num_steps:
                    break
                num_steps, begin = num_steps - before, self.past(gap.start)
        return self.sizes.after(begin, num_steps)

    def end(self, begin: int, *, epochs: int | None, num_steps: int | None) -> tuple[int, int]:
        """Returns the steps that are left after `begin` samples, and the position after them.

        Args:
            epochs: of the whole run; None for no limit.
            num_steps: most steps from now on; None for no limit.
        """
        if epochs is not None:
            left, end = self.num_steps(begin, epochs * self.sizes.length), epochs * self.sizes.length
            if num_steps is None or left <= num_steps:
                return left, max(begin, end)
        assert num_steps is not None
        return num_steps, self.after(begin, max(0, num_steps))

    def within(self, begin: int, end: int) -> Iterator[range]:
        """Yields the positions that are left out, range by range."""
        for each in self.skipped:
            yield range(max(begin, each.start), min(end, each.stop))


def checked_range(steps: Any) -> tuple[int, int]:
    """Returns the first and the last of a range of steps.

    Raises:
        ConfigError: it is none.
    """
    try:
        first, last = (operator.index(step) for step in steps)
        is_range = 1 <= first <= last
    except (TypeError, ValueError):
        is_range = False
    if not is_range:
        raise ConfigError(f"skip_steps={steps!r}: takes the first and the last step, counted from 1, as (4700, 4710)")
    return first, last


# --- The position of a run in its data, and the number of ranks that share them --------------------------------------


class SamplerState(NamedTuple):
    """The position of a run in its data."""

    seed: int
    epoch: int
    consumed: int  # samples of this epoch that all ranks together have trained on


def replicas(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Returns number of ranks and rank, from `torch.distributed` where they are None.

    Raises:
        ConfigError: `rank` outside [0, num_replicas), or no default for them.
    """
    if num_replicas is None or rank is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                f"num_replicas={num_replicas} and rank={rank} have no default, as torch.distributed is not "
                "initialised: call ddp.init() first, or pass both"
            )
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
    if num_replicas < 1:
        raise ConfigError(f"the number of workers must be at least 1, got {num_replicas}")
    if not 0 <= rank < num_replicas:
        raise ConfigError(f"invalid rank {rank}: with {num_replicas} workers it must lie in [0, {num_replicas - 1}]")
    return num_replicas, rank


def read_state(state: Mapping[str, Any], *, length: int) -> SamplerState:
    """Returns the position that a sampler saved, or the next epoch's beginning if that epoch was over.

    Raises:
        ConfigError: a field is missing, or the position lies outside this data set.
    """
    missing = [name for name in SamplerState._fields if name not in state]
    if missing:
        raise ConfigError(f"a sampler's state needs {', '.join(SamplerState._fields)}; missing: {', '.join(missing)}")
    loaded = SamplerState(*(int(state[name]) for name in SamplerState._fields))
    if loaded.epoch < 0 or not 0 <= loaded.consumed <= length:
        raise ConfigError(
            f"{loaded} is no position in a data set of {length} samples: "
            "it was saved with another data set; give that one, or start without the sampler's state"
        )
    return loaded if loaded.consumed < length else SamplerState(loaded.seed, loaded.epoch + 1, 0)
