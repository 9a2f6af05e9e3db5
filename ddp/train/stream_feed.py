"""Feeds the loop from a stream: what the ranks must agree on, because nobody knows where a stream ends.

a pass begins      one message: has everyone a batch, and have all (or no two) ranks begun with the same samples?
each step          nothing: the totals count the ranks whose stream ends with it
a pass ends        one message: how many samples it had
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.data.loading.iterable import IterableLoader
from ddp.data.orders.sampler import StepPlan
from ddp.errors import ConfigError
from ddp.process.log import log
from ddp.setting import Uneven
from ddp.units import counted


class StreamFeed:
    """Yields the steps of a pass over a stream until its end, on which all ranks agree.

    Args:
        uneven: what happens where the stream of one rank ends before that of another.
    """

    def __init__(self, comm: Communicator, loader: IterableLoader, *, uneven: Uneven) -> None:
        self._comm, self._loader, self._uneven = comm, loader, uneven
        self._is_over, self._is_last = False, False
        self.unreadable: set[int] = set()  # nothing can be left out of a stream from outside

    def epoch(self) -> Iterator[tuple[StepPlan, Iterator[Any]]]:
        """Yields each plan with an iterator over this rank's batches. Collective.

        Raises:
            ConfigError: the streams are empty, or not as `sharding` says, or uneven where that is an error.
        """
        self._is_over, self._consumed = False, self._loader.sampler.state.consumed
        firsts = all_gather_object(self._comm, self._loader.begin())
        self._check(firsts)
        self._is_last = firsts[self._comm.rank] is None
        if num_ending := firsts.count(None):
            self.ended(num_ending)
        for plan, batches in self._loader.steps():
            if self._is_over:
                return
            self._is_last = plan.is_last
            yield plan, batches

    def ended(self, num_ending: int) -> None:
        """Ends the pass if it is time, once the streams of this number of ranks are at their end. Collective.

        Raises:
            ConfigError: some ranks have more samples than others, and that is an error.
        """
        world_size, sampler = self._comm.world_size, self._loader.sampler
        if num_ending < world_size and self._uneven == "raise" and sampler.shares_itself:
            ended = [rank for rank, is_last in enumerate(all_gather_object(self._comm, self._is_last)) if is_last]
            raise ConfigError(
                f"the stream of rank {', '.join(map(str, ended))} has ended, and others have not: give all ranks as "
                "many samples, or take uneven='join' or 'stop_all'"
            )
        if num_ending == world_size or self._uneven == "stop_all":
            num_samples = sum(all_gather_object(self._comm, self._loader.num_samples))
            if not num_samples and not self._consumed:
                raise ConfigError("the data have given no sample: is the iterable used up? It must be read again")
            sampler.end_pass(self._consumed + num_samples)
            self._is_over = True

    def _check(self, firsts: list[tuple[str, ...] | None]) -> None:
        """Raises ConfigError if ranks should share one stream and do not; warns if they should not and seem to."""
        known = {rank: first for rank, first in enumerate(firsts) if first is not None}
        num_compared = min(map(len, known.values()), default=0)
        if len(known) < 2 or not num_compared:
            return
        found = {rank: first[:num_compared] for rank, first in known.items()}
        most = Counter(found.values()).most_common(1)[0][0]
        if self._loader.sampler.shares_itself and len(set(found.values())) < len(found) and self._comm.rank == 0:
            twice = [rank for rank, first in found.items() if first == most]
            log.warning(
                "sharding='off': ranks %s begin with %s; if they read the same stream, leave sharding out, or let the "
                "data share themselves out by rank",
                *(", ".join(map(str, twice)), f"the same {counted(num_compared, 'sample')}"),
            )
        if not self._loader.sampler.shares_itself and len(set(found.values())) > 1:
            raise ConfigError(
                f"the streams of {counted(len(found), 'rank')} do not begin with the same samples: if the data share "
                "themselves out by rank, take sharding='off'; if they are shuffled, that needs a seed"
            )

    def close(self) -> None:
        """Ends the loader processes."""
        self._loader.close()
