"""The supply of a run's steps, which `train_loop` makes one after another, wherever their samples come from.

    for step in supply:
        step.make()

    LoadedSteps      of data with a length: the sampler plans steps, or rounds of them, and a loader has their batches
    StreamedSteps    of a stream, on whose end all ranks agree
    ServedSteps      of a parameter server: updates from workers' gradients        (`train/parameter_server.py`)
    LeasedSteps      of one of its workers: parts of steps                         (`train/parameter_server.py`)
    Supervision      wraps loaded steps: it audits them, and recovers from a bad one  (`supervision.py`)

Each step is made before the next one is requested. So a supply reads from the state whether the run is over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from ddp.comm.objects import all_gather_object
from ddp.data.loading.iterable import IterableLoader, IterableSampler
from ddp.data.loading.loader import TrainLoader
from ddp.data.loading.source import Source
from ddp.data.orders.sampler import Micro, StepPlan
from ddp.errors import ConfigError
from ddp.process.terminal import log
from ddp.setting import Uneven
from ddp.train.steps.state import StepReport, TrainState, loading
from ddp.train.steps.step import Check, StepRules, train_step, unchecked
from ddp.units import counted


class Step(NamedTuple):
    """A step that can be made now.

    Attributes:
        plan: its samples.
        make: makes it, and returns its report; None if the run continues without it.
    """

    plan: StepPlan
    make: Callable[[], StepReport | None]


class EpochSupply(ABC):
    """Yields the steps that are left of a run, epoch by epoch. Collective.

    Args:
        epochs, num_steps: of the whole run, whichever is reached first.

    Attributes:
        check: called with each step that all ranks have computed; it raises an error if the update is not to be made.
    """

    def __init__(self, state: TrainState, rules: StepRules, *, epochs: int | None, num_steps: int) -> None:
        self._state, self._rules, self._epochs, self._num_steps = state, rules, epochs, num_steps
        self._is_moved = False
        self.check: Check = unchecked

    def __iter__(self) -> Iterator[Step]:
        while not self._is_over():
            self._is_moved = False
            for plan, given in self._epoch():
                yield Step(plan, partial(self._made, plan, given))
                if self._is_moved or self._is_over():
                    break

    def moved(self) -> None:
        """Records that the state was moved to another step, so that the epoch is supplied again from there."""
        self._is_moved = True

    def _is_over(self) -> bool:
        state, epochs = self._state, self._epochs
        return state.step >= self._num_steps or bool(state.stopped_by) or not (epochs is None or state.epoch < epochs)

    @abstractmethod
    def _epoch(self) -> Iterator[tuple[StepPlan, Any]]:
        """Yields each plan from the state to the end of its epoch, with the batches that its step is computed from."""

    @abstractmethod
    def _made(self, plan: StepPlan, given: Any) -> StepReport:
        """Makes a step of the epoch."""

    @abstractmethod
    def close(self) -> None:
        """Ends the loader."""


class LoadedSteps(EpochSupply):
    """Yields the steps of data with a length. Collective.

    Args:
        max_unreadable: as in `TrainLoader`.
    """

    def __init__(
        self, state: TrainState, rules: StepRules, source: Source, *, max_unreadable: int, **until: Any
    ) -> None:
        super().__init__(state, rules, **until)
        choices = loading(source, state.comm, state.stop_flag)
        choices |= {"max_unreadable": max_unreadable, "known_unreadable": state.unreadable}
        self._loader = TrainLoader(source.samples, state.sampler, **choices)
        self._leaves_out, state.unreadable = max_unreadable > 0, self._loader.unreadable

    def __iter__(self) -> Iterator[Step]:
        yield from super().__iter__()
        if self._leaves_out:
            everyone = all_gather_object(self._state.comm, self._state.unreadable)
            self._state.unreadable = set[int]().union(*everyone)

    def _epoch(self) -> Iterator[tuple[StepPlan, Iterator[Any]]]:
        return self._loader.epoch()

    def _made(self, plan: StepPlan, given: Iterator[Any]) -> StepReport:
        return train_step(self._state, self._rules, plan, given, self.check)

    def read(self, plan: StepPlan, micro: Micro) -> Any:
        """Returns a batch of a step once more, as `TrainLoader.read` does."""
        return self._loader.read(plan, micro)

    def close(self) -> None:
        self._loader.close()


# --- A stream, whose end no rank knows -------------------------------------------------------------------------------
#
# a pass begins      one message: whether each rank has a batch, and all (or no two) ranks begin with the same samples
# each step          nothing: the totals count the ranks whose stream ends with it
# a pass ends        one message: how many samples it had


class StreamedSteps(EpochSupply):
    """Yields the steps of passes over a stream, on whose end all ranks agree. Collective.

    Args:
        sampler: that of the state.
        uneven: the policy where the stream of one rank ends before that of another.

    Raises:
        ConfigError: the streams are empty, or not as `sharding` says, or uneven where that is an error.
    """

    def __init__(
        self,
        state: TrainState,
        rules: StepRules,
        source: Source,
        *,
        sampler: IterableSampler,
        uneven: Uneven,
        **until: Any,
    ) -> None:
        super().__init__(state, rules, **until)
        self._comm, self._sampler, self._uneven = state.comm, sampler, uneven
        self._loader = IterableLoader(source.samples, sampler, **loading(source, state.comm, state.stop_flag))
        self._is_pass_over, self._is_last = False, False
        state.unreadable = set()  # a stream leaves samples out itself

    def _epoch(self) -> Iterator[tuple[StepPlan, Iterator[Any]]]:
        self._is_pass_over, self._consumed = False, self._sampler.state.consumed
        firsts = all_gather_object(self._comm, self._loader.begin())
        self._check_firsts(firsts)
        self._is_last = firsts[self._comm.rank] is None
        if num_ending := firsts.count(None):
            self._ended(num_ending)
        for plan, batches in self._loader.steps():
            if self._is_pass_over:
                return
            self._is_last = plan.is_last
            yield plan, batches

    def _made(self, plan: StepPlan, given: Iterator[Any]) -> StepReport:
        report = train_step(self._state, self._rules, plan, given)
        if report.num_ending:
            self._ended(report.num_ending)
        return report

    def _ended(self, num_ending: int) -> None:
        """Ends the pass if it is time, once the streams of this number of ranks are at their end."""
        world_size, sampler = self._comm.world_size, self._sampler
        if num_ending < world_size and self._uneven == "raise" and sampler.shares_itself:
            ended = [rank for rank, is_last in enumerate(all_gather_object(self._comm, self._is_last)) if is_last]
            raise ConfigError(
                f"the stream of rank {', '.join(map(str, ended))} has ended, and others have not: give all ranks as "
                "many samples, or take uneven='join' or 'stop_all'"
            )
        if num_ending == world_size or self._uneven == "stop_all":
            num_samples = sum(all_gather_object(self._comm, self._loader.num_samples))
            if not num_samples and not self._consumed:
                raise ConfigError("the data have given no sample: give an iterable that can be read again")
            had = self._consumed + num_samples
            if sampler.stated_length not in (None, had) and sampler.state.epoch == self._comm.rank == 0:
                log.warning(
                    "the schedule goes by the length of the data, %d, and the first pass had %d samples: let __len__ "
                    "say what a pass has, or give max_steps",
                    *(sampler.stated_length, had),
                )
            sampler.end_pass(had)
            self._is_pass_over = True

    def _check_firsts(self, firsts: list[tuple[str, ...] | None]) -> None:
        """Raises ConfigError if ranks should share one stream and do not; warns if they should not and seem to."""
        known = {rank: first for rank, first in enumerate(firsts) if first is not None}
        num_compared = min(map(len, known.values()), default=0)
        if len(known) < 2 or not num_compared:
            return
        found = {rank: first[:num_compared] for rank, first in known.items()}
        most = Counter(found.values()).most_common(1)[0][0]
        if self._sampler.shares_itself and len(set(found.values())) < len(found) and self._comm.rank == 0:
            twice = [rank for rank, first in found.items() if first == most]
            log.warning(
                "sharding='off': ranks %s begin with %s; if they read the same stream, leave sharding out, or let the "
                "data share themselves out by rank",
                *(", ".join(map(str, twice)), f"the same {counted(num_compared, 'sample')}"),
            )
        if not self._sampler.shares_itself and len(set(found.values())) > 1:
            raise ConfigError(
                f"the streams of {counted(len(found), 'rank')} do not begin with the same samples: if the data share "
                "themselves out by rank, take ddp.Batches(sharding='off'), and each rank trains on all that its own "
                "stream gives; if they are shuffled, that needs a seed"
            )

    def close(self) -> None:
        self._loader.close()
