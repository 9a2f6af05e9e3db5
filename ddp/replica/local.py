"""The replica of a worker that trains by itself for a round: what is exchanged then is given to it as gradients.

    synchronous step     that of a `BucketedDataParallel`
    inner step           a backward in `no_sync`; the strategy takes the gradients (`strategies/local_sgd.py`)
    end of a round       `exchange`: `p.grad` holds the difference of p, and becomes its mean over all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ddp.gradients.layout import Layout
from ddp.gradients.reducer import Reducer
from ddp.gradients.totals import Totals
from ddp.replica.bucketed import BucketedDataParallel


class LocalDataParallel(BucketedDataParallel):
    """Averages gradients in synchronous steps, and what it is given at the end of a round.

    Attributes:
        settled: makes the ranks' parameters equal for a block. Collective.
    """

    gradient_as_bucket_view = True
    settled: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def told(self) -> Totals | None:
        """The totals that ride along with the next exchange, so far; None if there is no count."""
        return self._mine

    @property
    def measures_parts(self) -> bool:
        return False

    def reduce_without_backward(self) -> None:
        """Takes part in a synchronous step without samples. In a round there is nothing to take part in."""
        if self.require_backward_grad_sync:
            super().reduce_without_backward()

    def exchange(self) -> None:
        """Makes gradients their mean over ranks, as at the end of a backward, whatever has written them. Collective."""
        self.prepare()
        layout = self._layouts.current
        for parameter in layout.parameters:
            self.backward.note_other(parameter)
        self._begin_step(layout)
        self._finish()

    def end_round(self, totals: Totals) -> None:
        """Ends a round whose differences are exchanged by other means.

        Args:
            totals: of all ranks.
        """
        self._mine = None
        self.backward.early.clear()  # inner steps have taken these gradients
        self._end_step(totals)

    def layout(self) -> Layout:
        """Returns the buckets of the parameters that need a gradient now, with their memory. Collective."""
        self.prepare()
        layout = self._layouts.current
        if not layout.has_memory:
            layout.allocate()
        return layout

    @property
    def reducer(self) -> Reducer:
        """Averages a bucket."""
        return self._reducer

    @property
    def keeps_own_buffers(self) -> bool:
        return True

    @contextmanager
    def for_evaluation(self) -> Iterator[None]:
        with self.settled(), self.buffers_of_rank_zero():
            yield
