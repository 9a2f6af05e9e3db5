"""The reducer: sums gradients over all ranks while backward is still running.

In the order of time, for every step that synchronises:

    begin      backward has reached the outputs (`sink.py`)
    ready      a gradient is there: move it into its bucket's span. Send bucket k once it and all before it are full:
               buckets start in one fixed order on every rank, or the ranks would wait for different ones
    finish     backward has ended: fill what is still empty, send the rest, wait, divide once, hand out the views

                 backward   ▓▓▓ fc ▓▓▓▓▓▓▓ conv4 ▓▓▓▓▓▓▓ conv3 ▓▓▓▓▓ conv2 ▓▓▓ conv1 ▓│ finish
                 wire              ░░ bucket 0 ░░░░░░░░░░░░░░ bucket 1 ░░░░░░░░░░░░░░░│░ last ░

The last bucket is reduced by the main thread itself, which would only wait for it: one thread switch less, and for
a model of one bucket none at all. Its tail carries the step's totals (`gradients/totals.py`).

Note "fresh gradients". After `zero_grad(set_to_none=True)` autograd installs a new tensor as `p.grad`; copying it
into the bucket once is cheaper than zeroing the bucket and adding to it. From `finish` on, `p.grad` is the bucket's
view.

Note "unused parameters". A parameter without a gradient contributes zeros (or what it had accumulated), so that no
rank ever waits for it. How many ranks had such parameters rides in the tail; only if any did, the ranks compare
which. With `find_unused_parameters` that is fine: a parameter that no rank used keeps the gradient that it had.
Without it, it is an error, raised on all ranks together by the next forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor, nn

from ddp.clock import Stopwatch
from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.comm.work import Work
from ddp.errors import UnusedParameters
from ddp.gradients.bucket import Bucket, layout_of, make_buckets
from ddp.gradients.totals import StepTotals


class Phase(Enum):
    """Where in a step the reducer is."""

    IDLE = auto()  # gradients accumulate locally, nothing is sent
    BACKWARD = auto()  # between begin and finish: full buckets are sent


class Reducer:
    """Sums the gradients of one replica, bucket by bucket.

    Args:
        named_parameters: those that need a gradient, in registration order, the same on every rank.
        first_bucket_bytes, bucket_bytes: a bucket is closed once it holds so much.
        find_unused_parameters: parameters may go without a gradient.

    Attributes:
        totals: what all ranks' totals added up to in the last step.
        waited: time that this rank's main thread spent waiting for reductions.
    """

    def __init__(
        self,
        comm: Communicator,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        first_bucket_bytes: int = 1 << 20,
        bucket_bytes: int = 25 << 20,
        find_unused_parameters: bool = False,
    ) -> None:
        self.comm, self.find_unused_parameters = comm, find_unused_parameters
        self.buckets = make_buckets(
            reversed(list(named_parameters)),  # backward comes to the last layers first
            first_bucket_bytes=first_bucket_bytes,
            bucket_bytes=bucket_bytes,
            allocate=comm.allocate,
        )
        self.totals = StepTotals()
        self.waited = Stopwatch()
        self._phase = Phase.IDLE
        self._mine: StepTotals | None = None
        self._num_missing = [len(bucket.parameters) for bucket in self.buckets]
        self._ready = [[False] * len(bucket.parameters) for bucket in self.buckets]
        self._used = [[False] * len(bucket.parameters) for bucket in self.buckets]
        self._works: list[Work] = []
        self._unused_error: UnusedParameters | None = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket.index, position))
            for bucket in self.buckets
            for position, parameter in enumerate(bucket.parameters)
        ]

    # --- the step, in the order of time ------------------------------------------------------------------------------

    def raise_pending(self) -> None:
        """Raises what the last step left behind.

        Raises:
            UnusedParameters: some parameters got no gradient, and `find_unused_parameters` is off.
            RuntimeError: the last backward broke off half-way, so that the ranks are out of step.
        """
        if self._unused_error is not None:
            raise self._unused_error
        if self._phase is Phase.BACKWARD:
            raise RuntimeError(
                "the last backward through this replica broke off; the ranks are out of step: start anew"
            )

    def ride_along(self, totals: StepTotals) -> None:
        """Sends this rank's part of the step's totals with the gradients; they are divided by the global count then."""
        self._mine = totals

    def begin(self) -> bool:
        """Backward has reached an output. True for the first one."""
        if self._phase is Phase.BACKWARD:
            return False
        self._phase = Phase.BACKWARD
        for bucket in self.buckets:
            self._num_missing[bucket.index] = len(bucket.parameters)
            self._ready[bucket.index] = [False] * len(bucket.parameters)
        return True

    def _on_gradient(self, index: int, position: int, parameter: Tensor) -> None:
        """Autograd has accumulated this parameter's gradient."""
        self._used[index][position] = True
        if self._phase is Phase.IDLE:
            return
        bucket, ready = self.buckets[index], self._ready[index]
        if index < len(self._works):
            raise RuntimeError(
                f"{bucket.names[position]} got a second gradient in one backward after its bucket had been sent. "
                "Re-entrant checkpointing of a module that is used twice does this: pass use_reentrant=False to it"
            )
        self._move_in(bucket, position)
        if not ready[position]:
            ready[position] = True
            self._num_missing[index] -= 1
            self._launch_full_buckets()

    def _move_in(self, bucket: Bucket, position: int) -> None:
        """Puts the gradient into its span, unless it lives there already (note "fresh gradients")."""
        parameter, view = bucket.parameters[position], bucket.views[position]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient is not view:
            view.copy_(gradient)
            parameter.grad = view

    def _launch_full_buckets(self) -> None:
        """Sends off every bucket whose turn it is, except the last."""
        while len(self._works) < len(self.buckets) - 1 and self._num_missing[len(self._works)] == 0:
            bucket = self.buckets[len(self._works)]
            self._works.append(self.comm.all_reduce(bucket.flat, async_op=True, label=bucket.label))

    @torch.no_grad()
    def finish(self, *, had_backward: bool = True) -> None:
        """Backward has ended: reduces what is left, divides, and hands out the views.

        Args:
            had_backward: False on a rank that had nothing to compute; that is no error about unused parameters.
        """
        kept = self._fill_empty_spans()
        self._launch_full_buckets()
        last = self.buckets[-1]
        assert last.tail is not None
        mine = self._mine or StepTotals()
        mine._replace(num_unused=int(bool(kept) and had_backward)).write(last.tail)
        with self.waited.running():
            for work in self._works:
                work.wait()
            self.comm.all_reduce(last.flat, label=last.label)
        self.totals = StepTotals.read(last.tail)
        divisor = self.comm.world_size if self._mine is None else max(1, self.totals.num_items)
        for bucket in self.buckets:
            bucket.flat.div_(divisor)
        self._works, self._mine, self._phase = [], None, Phase.IDLE
        if self.totals.num_unused:
            self._settle_unused(kept, had_backward=had_backward)
        elif kept:
            self._hand_out_views()
        self._used = [[False] * len(bucket.parameters) for bucket in self.buckets]

    @property
    def layout(self) -> list[list[str]]:
        """Names of the gradients in each bucket."""
        return layout_of(self.buckets)

    # --- unused parameters -------------------------------------------------------------------------------------------

    def _fill_empty_spans(self) -> dict[str, Tensor | None]:
        """Makes every span ready. Returns what parameters unused since the last step had as gradient, by name."""
        kept: dict[str, Tensor | None] = {}
        for bucket in self.buckets:
            for position, parameter in enumerate(bucket.parameters):
                if not self._ready[bucket.index][position]:
                    if not self._used[bucket.index][position]:
                        had = parameter.grad
                        kept[bucket.names[position]] = None if had is None else had.clone()
                    self._move_in(bucket, position)
            self._num_missing[bucket.index] = 0
        return kept

    def _hand_out_views(self) -> None:
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view

    def _settle_unused(self, kept: dict[str, Tensor | None], *, had_backward: bool) -> None:
        """Gives parameters that some rank used their mean, and those that none used what they had."""
        unused_by_rank = [set(names) for names in all_gather_object(self.comm, sorted(kept))]
        computing = all_gather_object(self.comm, had_backward)
        self._hand_out_views()
        nobody_used = set.intersection(*unused_by_rank)
        for bucket in self.buckets:
            for name, parameter, view in zip(bucket.names, bucket.parameters, bucket.views, strict=True):
                if name in nobody_used:
                    had = kept[name]
                    parameter.grad = None if had is None else view.copy_(had)
        if not self.find_unused_parameters:
            complaints = {rank: names for rank, names in enumerate(unused_by_rank) if computing[rank]}
            self._unused_error = UnusedParameters(_unused_message(complaints))


def _unused_message(by_rank: dict[int, set[str]]) -> str:
    lines = [f"  rank {rank}: {', '.join(sorted(names)) or 'none'}" for rank, names in by_rank.items()]
    return (
        "these parameters got no gradient in the last step:\n" + "\n".join(lines) + "\n"
        "Let every parameter take part in the loss, set requires_grad=False on those that do not, "
        "or pass find_unused_parameters=True"
    )
