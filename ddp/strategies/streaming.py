"""Local SGD whose workers go on while differences are under way: Streaming DiLoCo.

    fragments     the buckets are cut into groups, each of which is exchanged at another moment of a round
    inner step    a fragment's turn: the difference to its common parameters is launched, as a copy
    delay later   the mean difference makes the outer step of this fragment; its parameters become
                  new common ones + what this worker has changed since the launch

                  inner step   1   2   3   4   5   6   7   8 │ 1   2   3 …         every=8, fragments=2, delay=2
                  fragment 0               ▒▒▒▒▒▒▒▒╳         │                     launched after 4, applied after 6
                  fragment 1                               ▒▒│▒▒▒▒▒▒╳              launched after 8, applied after 2

So no worker waits for a link that carries a fragment within the delay, and at no moment all of the parameters are on
the wire (Douillard et al., arXiv 2501.18512; overlapped application without a mixing factor).

Between rounds the workers' parameters differ. The end of the run *settles* them: what is under way is applied, what was
changed since is exchanged at once, and all workers have the common parameters. An evaluation and a checkpoint do so for
a moment; then training resumes from where it was, which a checkpoint has, too. BatchNorm's running statistics are a
worker's own. The totals of a round travel by their own communicator, because on the other they would wait behind
the differences.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp.comm.communicator import Communicator
from ddp.errors import ConfigError, Diverged
from ddp.gradients.bucket import Bucket
from ddp.gradients.layout import Layout
from ddp.gradients.reducer import InFlight
from ddp.gradients.totals import NUM_TOTALS, Totals, global_count
from ddp.policies import Rounds
from ddp.replica.bucketed import BucketedDataParallel
from ddp.strategies.local_sgd import LocalSteps
from ddp.strategies.strategy import Agreement, diverged


class Fragment:
    """Some buckets, whose parameters are exchanged together.

    Attributes:
        parameters, names: of the gradients in these buckets, in the same order.
        num_steps, num_items: inner steps, and items of this rank, since it was launched.
        launched: the parameters as they were then; none if nothing is under way.
    """

    def __init__(self, model: BucketedDataParallel, buckets: Sequence[Bucket]) -> None:
        self._model, self._buckets = model, buckets
        slots = [slot for bucket in buckets for slot in bucket.slots]
        self.parameters, self.names = [slot.parameter for slot in slots], [slot.name for slot in slots]
        self._common = [parameter.detach().clone() for parameter in self.parameters]
        self.num_steps, self.num_items = 0, 0.0
        self.launched: list[Tensor] = []
        self._works: list[InFlight] = []
        self._count = torch.zeros(NUM_TOTALS, dtype=torch.float64, device=model.comm.device)
        self._divisor = global_count(model.comm, self._count)

    def launch(self, label: str) -> None:
        """Sends the differences to the common parameters, weighted by items, in the background. Collective."""
        self.launched = [parameter.detach().clone() for parameter in self.parameters]
        Totals(num_items=self.num_items).write(self._count)
        work = self._model.comm.all_reduce(self._count, async_op=True, label=f"{label}, count")
        self._works = [work]
        index = 0
        for bucket in self._buckets:
            for view in bucket.views_of(bucket.flat):
                torch.sub(self._common[index], self.launched[index], out=view)
                view.mul_(self.num_items)
                index += 1
            if bucket.num_tail:
                bucket.tail.zero_()
            given: dict[str, Any] = {"divide_by": self._divisor, "async_op": True, "label": f"{label}, {bucket.label}"}
            if (reduction := self._model.collective.reduce(bucket, **given)) is not None:
                self._works.append(reduction)
        self.num_steps, self.num_items = 0, 0.0

    def apply(self, outer: Optimizer) -> Tensor:
        """Makes the outer step, and returns the sum of squares of the mean difference. Collective.

        If that is not finite, there is no step: the parameters are the common ones.
        """
        self.wait()
        correction = self._divisor.fraction_correction
        for bucket in self._buckets:
            if correction != 1.0:
                bucket.gradients.mul_(correction)
        progress = [now - then for now, then in zip(self.parameters, self.launched, strict=True)]
        self.take_back()
        square = torch.stack([bucket.square() for bucket in self._buckets]).sum()
        if not math.isfinite(float(square)):
            return square
        views = [view for bucket in self._buckets for view in bucket.views_of(bucket.flat)]
        for parameter, mean in zip(self.parameters, views, strict=True):
            parameter.grad = mean
        outer.step()
        torch._foreach_copy_(self._common, list(self.parameters))
        torch._foreach_add_(list(self.parameters), progress)
        for parameter in self.parameters:
            parameter.grad = None
        return square

    def wait(self) -> None:
        """Returns once nothing of it is under way."""
        for work in self._works:
            work.wait()
        self._works = []

    def take_back(self) -> None:
        """Gives the parameters the common values."""
        torch._foreach_copy_(list(self.parameters), self._common)
        self.launched = []

    # --- at one moment -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of what training resumes from, once nothing is under way."""
        self.wait()
        tensors, numbers = [each.detach().clone() for each in self._tensors()], (self.num_steps, self.num_items)
        return {"names": self.names, "is_launched": bool(self.launched), "tensors": tensors, "numbers": numbers}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` has returned."""
        self.launched = [torch.empty_like(each) for each in self.parameters if state["is_launched"]]
        torch._foreach_copy_(self._tensors(), state["tensors"])
        self.num_steps, self.num_items = state["numbers"]

    def _tensors(self) -> list[Tensor]:
        arrived = [bucket.flat for bucket in self._buckets if self.launched]
        return [*self.parameters, *self._common, *self.launched, *arrived, self._count]


class Streaming(LocalSteps):
    """Makes inner steps while differences are under way. Collective to make.

    Args:
        model, optimizer, how: as in `LocalSteps`.
        rounds: with a delay.

    Raises:
        ConfigError: as `LocalSteps`, but for the delay; or a hook, which keeps what it has not sent until an exchange
            is complete.
    """

    _may_be_late = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, rounds: Rounds, **how: Any) -> None:
        super().__init__(model, optimizer, rounds, **how)
        if self.model.compression is not None:
            raise ConfigError("delay with a hook: take wire='int8', or delay=0")
        comm = self.model.comm
        apart = comm.subgroup(range(comm.world_size))
        assert apart is not None
        self._apart: Communicator = apart
        self._layout: Layout | None = None
        self._fragments: list[Fragment] = []
        self._number = 0  # of inner steps in the running round
        self._square = torch.zeros((), device=comm.device)  # of the differences that this round has applied
        self._totals, self._is_finite_everywhere = Totals(), True  # of the last round, over all ranks
        self.model.settled = self._settled
        self._resumed: dict[str, Any] | None = None  # what the next round resumes from

    def _begin(self) -> None:
        self.model.prepare()
        layout = self.model.layout
        layout.allocate()
        super()._begin()
        self._common = []  # fragments have them
        self._number, self._square = 0, torch.zeros_like(self._square)
        if layout is not self._layout:
            self.settle()
            num_buckets, number = len(layout.buckets), self.rounds.fragments
            if num_buckets < number:
                raise ConfigError(
                    f"fragments={number}: the parameters are in {num_buckets} bucket(s); lower bucket_cap_mb "
                    "(replica.bucket_cap_mb), or take fewer fragments"
                )
            cuts = [part * num_buckets // number for part in range(number + 1)]
            groups = (layout.buckets[begin:end] for begin, end in pairwise(cuts))
            self._layout, self._fragments = layout, [Fragment(self.model, group) for group in groups]
            before, self._resumed = self._resumed, None
            if before and [each["names"] for each in before["fragments"]] == [each.names for each in self._fragments]:
                self._go_on_from(before)

    @torch.no_grad()
    def _stepped(self, *, is_last: bool) -> None:
        self._number += 1
        for fragment in self._fragments:
            fragment.num_steps += 1
            fragment.num_items += self._num_items_of_step
            if fragment.launched and fragment.num_steps >= self.rounds.delay:
                self._apply(fragment)
        if is_last:
            self._end_round()
        else:
            self._launch(self._due(self._number))

    def _due(self, number: int) -> list[Fragment]:
        """Returns the fragments whose turn is after this inner step of a round."""
        every, num = self.rounds.every, len(self._fragments)
        return [each for index, each in enumerate(self._fragments) if (index + 1) * every // num == number]

    def _launch(self, fragments: Sequence[Fragment]) -> None:
        for fragment in fragments:
            if fragment.launched:  # the last round was a short one
                self._apply(fragment)
            fragment.launch(f"round {self.model.num_steps + 1}, fragment {self._fragments.index(fragment)}")

    def _apply(self, fragment: Fragment) -> None:
        self._square = self._square + fragment.apply(self._outer)

    def _end_round(self) -> None:
        """Finds out what all ranks have counted."""
        told, self._inner = self.model.riding, []
        if told is not None and self._num_items and not self._has_gradient:
            return  # the loss was not computed from what the model returned, which the loop tells
        found = torch.zeros(NUM_TOTALS + 1, dtype=torch.float64, device=self._apart.device)
        (told or Totals()).write(found[:NUM_TOTALS])
        found[NUM_TOTALS] = float(not self._is_finite)
        self._apart.all_reduce(found, label=f"round {self.model.num_steps + 1}, totals")
        *totals, num_not_finite = found.tolist()
        self._totals, self._is_finite_everywhere = Totals.read(totals), not num_not_finite
        self.model.end_step(self._totals)

    def agree(self, step: int) -> Agreement:
        if not self._is_round:
            return super().agree(step)
        totals, norm = self._totals, self._square.sqrt()
        try:
            if not math.isfinite(totals.mean_loss):
                raise Diverged(diverged(step, "loss", totals.mean_loss))
            if not self._is_finite_everywhere or not math.isfinite(float(norm)):
                raise Diverged(diverged(step, "gradient norm", math.nan))
        except Diverged:
            self._take_back()
            raise
        return Agreement(totals, norm, float(norm))

    @torch.no_grad()
    def update(self, agreement: Agreement) -> None:
        if not self._is_round:
            super().update(agreement)
            return
        late = {each for number in range(self._number, self.rounds.every + 1) for each in self._due(number)}
        self._launch([each for each in self._fragments if each in late])

    @torch.no_grad()
    def settle(self) -> None:
        """Makes the parameters of all ranks equal, as at the end of a round without delay. Collective.

        Raises:
            Diverged: a difference is not finite. On every rank; the parameters are the last common ones.
        """
        for fragment in self._fragments:
            if fragment.launched:
                self._apply(fragment)
        late = [fragment for fragment in self._fragments if fragment.num_steps]
        self._launch(late)
        for fragment in late:
            self._apply(fragment)
        if not math.isfinite(norm := float(self._square.sqrt())):
            raise Diverged(diverged(self.model.num_steps, "gradient norm", norm))

    @torch.no_grad()
    def _take_back(self) -> None:
        """Gives the module the last common parameters of each fragment; what is under way is dropped. Collective."""
        super()._take_back()
        if self._is_round:
            for fragment in self._fragments:
                fragment.wait()
                fragment.take_back()
            self._forget()

    def _forget(self) -> None:
        """Begins with the parameters as they are then, in the next round."""
        self._layout, self._fragments, self._inner = None, [], []
        self._square = torch.zeros_like(self._square)

    @contextmanager
    def _settled(self) -> Iterator[dict[str, Any]]:
        """Settles for a block. Yields what training resumes from then."""
        fragments = [fragment.state_dict() for fragment in self._fragments]
        before = {"outer": copy.deepcopy(self._outer.state_dict()), "fragments": fragments}
        try:
            self.settle()
            yield before
        finally:
            self._go_on_from(before)

    def _go_on_from(self, before: Mapping[str, Any]) -> None:
        self._outer.load_state_dict(before["outer"])
        for fragment, state in zip(self._fragments, before["fragments"], strict=True):
            fragment.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        with self._settled() as before:
            self._saved = self._resumed or before
            return super().state_dict()

    def _own_state(self) -> dict[str, Any]:
        return super()._own_state() | ({"under_way": self._saved} if self._is_round else {})

    def _load_own_state(self, own: Mapping[str, Any]) -> None:
        super()._load_own_state(own)
        self._forget()
        self._resumed = own.get("under_way")

    def finish(self, *, alone: bool = False) -> None:
        if alone:
            with torch.no_grad():
                for fragment in self._fragments:
                    fragment.take_back()
        else:
            self.settle()
            self._apart.close()
        self._forget()
        super().finish(alone=alone)
