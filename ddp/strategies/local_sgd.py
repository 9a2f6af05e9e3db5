"""Local SGD: every worker trains by itself for a round of steps; then the workers agree on common parameters.

    micro_batch   forward, backward, clip, and a step of the worker's own optimizer: an inner step, without
    communication
    round's end   each worker's difference to the last common parameters, weighted by its samples, is averaged, in
                  buckets, through wires or hooks. Until `update` the module holds the last common parameters
    agree         loss, count and norm of the mean difference, once a round
    update        the outer step: common ← common − outer_lr · (mean difference, with Nesterov momentum)

With outer_lr=1 and outer_momentum=0 the common parameters become the workers' mean, weighted by samples: local SGD
(Stich, arXiv 1805.09767). DiLoCo has AdamW inside, and 0.7 and 0.9 outside (Douillard et al., arXiv 2311.08105). One
round of H steps sends as much as one synchronous step, an H-th for each sample.

With every=1, SGD makes the synchronous step, because it is linear: the mean of p − lr · gᵣ is p − lr · the mean of gᵣ.
With momentum that holds as long as each worker has the same share of all samples: then the mean of the workers'
velocities is the velocity of the mean. Clipping and Adam are not linear: with them, every=1 is another algorithm.

The optimizer's state and buffers are not averaged; a checkpoint has those of every worker. An evaluation uses the
buffers of rank 0. BatchNorm's running statistics become those over the items of all workers. A round that is not finite
restores parameters and buffers, and leaves no gradient.

With island="host" the workers of a host add up their gradients in memory in every inner step, and make the same one.
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
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import SGD, Optimizer

from ddp.comm.communicator import Communicator
from ddp.comm.objects import broadcast_object
from ddp.errors import ConfigError, Diverged
from ddp.gradients.bucket import Bucket
from ddp.gradients.layout import Layout
from ddp.gradients.reducer import InFlight
from ddp.gradients.totals import NUM_TOTALS, Totals, global_count
from ddp.optim.layerwise import clipped_step
from ddp.optim.norms import gradient_norm
from ddp.policies import LocalSGD, Rounds
from ddp.replica.broadcast import BufferSnapshot
from ddp.replica.bucketed import BucketedDataParallel
from ddp.setting import Setup, refuse
from ddp.strategies.strategy import Agreement, Replicated, diverged


class LocalSteps(Replicated):
    """Makes inner steps on this rank alone, and outer steps on all. Collective to make.

    Args:
        model: a module, or a replica of it; in buckets, by an all-reduce.
        optimizer: over its parameters: this rank's own, for inner steps.
        rounds: how the common parameters follow, without a delay; the loop ends a round by `is_last`.
        how: as in `Replicated`, but not with precision="fp16" or "bf16_pure".

    Raises:
        ConfigError: the model, the precision, the hosts or a delay are not supported.
    """

    model: BucketedDataParallel
    word = "local_sgd"
    needs_buckets = unties = True
    _may_be_late = False

    def __init__(self, model: nn.Module, optimizer: Optimizer, rounds: Rounds | None = None, **how: Any) -> None:
        rounds = rounds or LocalSGD()
        if bool(rounds.delay) is not self._may_be_late:
            instead = "LocalSteps, or delay=1" if self._may_be_late else "Streaming, or delay=0"
            raise ConfigError(f"{type(self).__name__} with delay={rounds.delay}: take ddp.strategies.{instead}")
        super().__init__(model, optimizer, **how)
        self.rounds = rounds
        momentum = rounds.outer_momentum
        whole = list(self.model.module.parameters())
        self._outer = SGD(whole, lr=rounds.outer_lr, momentum=momentum, nesterov=momentum > 0)
        self._island = island_of(self.model.comm) if rounds.island == "host" else None
        self._is_round = False  # the last step was a round
        self._inner: list[nn.Parameter] = []  # trained in the running round; none between rounds
        self._common: list[Tensor] = []  # theirs, as the round began
        self._num_items = self._num_items_of_step = 0.0  # of this rank, in the round so far, and in its last step
        self._has_gradient = self._is_finite = True  # in the round so far

    # --- a round -----------------------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, *, is_last: bool = True, synchronous: bool = False) -> Iterator[int]:
        model = self.model
        if model.compression is not None:
            model.compression.change_to("gradients" if synchronous else "differences")
        self._is_round = not synchronous
        if synchronous:
            with super().micro_batch(is_last=is_last) as scale:
                yield scale
            return
        if not self._inner:
            self._begin()
        with model.no_sync(), model.without_buffer_sync():
            yield 1
        self._inner_step()
        self._stepped(is_last=is_last)

    @torch.no_grad()
    def _begin(self) -> None:
        self._inner = [parameter for parameter in self.model.module.parameters() if parameter.requires_grad]
        self._common = [parameter.detach().clone() for parameter in self._inner]
        self._num_items, self._has_gradient, self._is_finite = 0.0, False, True
        self._buffers = BufferSnapshot(self.model.module)
        self.model.zero_grad(set_to_none=True)  # of the mean difference

    def _inner_step(self) -> None:
        """Makes this rank's own step, with the mean gradient of the items of a micro-batch."""
        riding = self.model.riding
        num_items = 1 if riding is None else riding.items_on_host - self._num_items
        self._num_items += num_items
        self._num_items_of_step = num_items
        gradients = [each.grad for each in self._inner if each.grad is not None]
        self._has_gradient |= bool(gradients)
        if self._island is not None:
            gradients, num_items = self._of_island(self._island, num_items)
        if not num_items or not gradients:
            return
        torch._foreach_div_(gradients, float(num_items))
        norm = gradient_norm(self._inner)
        if math.isfinite(float(norm)):
            clipped_step(self.optimizer, self._inner, norm, self._clip_norm)
        else:
            self._is_finite = False
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _of_island(self, island: Communicator, num_items: float) -> tuple[list[Tensor], float]:
        """Adds up gradients and items of the ranks of this host."""
        for parameter in self._inner:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = [parameter.grad for parameter in self._inner if parameter.grad is not None]
        count = torch.tensor([num_items], dtype=torch.float64, device=island.device)
        label = f"round {self.model.num_steps + 1}, gradients of a host"
        island.all_reduce([*gradients, count], label=label)
        return gradients, float(count)

    @torch.no_grad()
    def _stepped(self, *, is_last: bool) -> None:
        """Averages the differences to the common parameters at the end of a round, and restores these in the module."""
        if not is_last:
            return
        inner, common, riding = self._inner, self._common, self.model.riding
        self._inner, self._common = [], []
        if riding is not None and self._num_items and not self._has_gradient:
            return  # the loss was not computed from what the model returned, which the loop tells
        differences = [start - now for start, now in zip(common, inner, strict=True)]
        if riding is not None:
            torch._foreach_mul_(differences, float(self._num_items))
        if not self._is_finite:
            for difference in differences:
                difference.fill_(torch.nan)  # so that all ranks see it
        torch._foreach_copy_([*inner], common)
        for parameter, difference in zip(inner, differences, strict=True):
            parameter.grad = difference
        self.model.average_gradients()

    def _take_back(self) -> None:
        super()._take_back()
        if self._is_round:
            self._buffers.restore()
            self.model.zero_grad(set_to_none=True)

    def update(self, agreement: Agreement) -> None:
        if self._is_round:
            self._outer_update(agreement)
        else:
            super().update(agreement)

    def _outer_update(self, agreement: Agreement) -> None:
        """Ends a round: the common parameters change."""
        self._average_statistics(agreement)
        self._outer.step()

    @torch.no_grad()
    def _average_statistics(self, agreement: Agreement) -> None:
        """Gives all ranks BatchNorm's running statistics over the items of all, which have a share w on each rank.

        With means m and variances v the mean is M = Σ w·m, and the variance Σ w·(v + (m − M)²): the mean of the
        variances, and the variance of the means.
        """
        comm, modules = self.model.comm, self.model.modules()
        layers = [each for each in modules if isinstance(each, _NormBase) and each.training]  # others keep theirs
        means = [each.running_mean for each in layers if each.running_mean is not None]
        variances = [each.running_var for each in layers if each.running_var is not None]
        if not means or comm.world_size == 1:
            return
        everyone, label = agreement.totals.items_on_host, f"round {self.model.num_steps}, statistics"
        share = self._num_items / everyone if everyone else 1 / comm.world_size
        mean = share * (own := torch.cat(means))
        comm.all_reduce(mean, label=label)
        variance = share * (torch.cat(variances) + (own - mean).square())
        comm.all_reduce(variance, label=label)
        sizes = list(map(len, means))
        torch._foreach_copy_([*means, *variances], [*mean.split(sizes), *variance.split(sizes)])

    def _leave_round(self) -> None:
        """Restores the common parameters, because an error has ended a round."""
        if self._inner:
            with torch.no_grad():
                torch._foreach_copy_([*self._inner], self._common)
            self._buffers.restore()
            self._inner, self._common = [], []

    def finish(self, *, alone: bool = False) -> None:
        self._leave_round()
        if self._island is not None and not alone:
            self._island.close()
        super().finish(alone=alone)

    # --- in a checkpoint ---------------------------------------------------------------------------------------------
    #
    #     model, optimizer   the common parameters, and rank 0's optimizer, from which every strategy can resume
    #     local_sgd          the outer momentum
    #     own                by rank its optimizer and its buffers, for the same number of ranks. Any other number of
    #                        ranks drops them, and all begin with those of rank 0

    def state_dict(self) -> dict[str, Any]:
        common = {"outer": self._outer.state_dict()["state"], "is_round": self._is_round}
        return {**super().state_dict(), "local_sgd": common}

    def kept(self) -> dict[str, Any] | None:
        self._leave_round()  # of the inner optimizer, each rank keeps its own
        common = {"outer": self._outer.state_dict()["state"], "is_round": self._is_round}
        return {**(super().kept() or {}), "local_sgd": common}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({**state, "local_sgd": None})
        if (known := broadcast_object(self.model.comm, state.get("local_sgd"))) is None:
            return  # from another strategy
        self._outer.load_state_dict({**self._outer.state_dict(), "state": known["outer"]})
        self._is_round = known["is_round"]
        if self.model.compression is not None and self._is_round:
            self.model.compression.change_to("differences")

    @property
    def _keeps_own_buffers(self) -> bool:
        return True

    def _own_state(self) -> dict[str, Any]:
        has_own = self._is_round and self.model.comm.rank
        return super()._own_state() | ({"optimizer": self.optimizer.state_dict()["state"]} if has_own else {})

    def _load_own_state(self, own: Mapping[str, Any]) -> None:
        super()._load_own_state(own)
        if "optimizer" in own:
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": own["optimizer"]})


def island_of(comm: Communicator) -> Communicator:
    """Returns the ranks of this host. Collective.

    Raises:
        ConfigError: there is one host.
    """
    refuse(Setup(island="host", num_hosts=len(comm.hosts)))
    groups = [comm.subgroup(ranks) for ranks in comm.hosts]
    return next(group for group in groups if group is not None)


# --- Streaming -------------------------------------------------------------------------------------------------------
#
# Local SGD whose workers continue while differences are in flight (Streaming DiLoCo):
#
#     fragments     groups of buckets, each of which is exchanged at a different inner step of a round
#     inner step    a fragment's turn: the difference to its common parameters is launched, as a copy
#     delay later   the mean difference makes the outer step of this fragment; its parameters become
#                   new common ones + this worker's changes since the launch
#
#                   inner step   1   2   3   4   5   6   7   8 │ 1   2   3 …         every=8, fragments=2, delay=2
#                   fragment 0               ▒▒▒▒▒▒▒▒╳         │                     launched after 4, applied after 6
#                   fragment 1                               ▒▒│▒▒▒▒▒▒╳              launched after 8, applied after 2
#
# So no worker waits for a link that carries a fragment within the delay, and all of the parameters are never on the
# wire at once (Douillard et al., arXiv 2501.18512; overlapped application without a mixing factor).
#
# Between rounds the workers' parameters differ. The end of the run *settles* them: differences in flight are applied,
# later changes are exchanged at once, and all workers have the common parameters. An evaluation and a checkpoint settle
# temporarily; then training resumes from its former state, which a checkpoint includes. BatchNorm's running statistics
# stay local to a worker. The totals of a round travel by their own communicator, because they would wait behind the
# differences on the other one.


class Fragment:
    """Some buckets, whose parameters are exchanged together.

    Attributes:
        parameters, names: of the gradients in these buckets, in the same order.
        num_steps, num_items: inner steps, and items of this rank, since it was launched.
        launched: the parameters at that time; empty if nothing is in flight.
    """

    def __init__(self, model: BucketedDataParallel, buckets: Sequence[Bucket]) -> None:
        self._model, self._buckets = model, buckets
        slots = [slot for bucket in buckets for slot in bucket.slots]
        self.parameters, self.names = [slot.parameter for slot in slots], [slot.name for slot in slots]
        self._common = [parameter.detach().clone() for parameter in self.parameters]
        self.num_steps, self.num_items = 0, 0.0
        self.launched: list[Tensor] = []
        self._works: list[InFlight] = []
        for bucket in buckets:
            bucket.is_lent = True  # inner steps run while differences are in flight
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
        """Waits until no part of the fragment is in flight."""
        for work in self._works:
            work.wait()
        self._works = []

    def take_back(self) -> None:
        """Sets the parameters to the common values."""
        torch._foreach_copy_(list(self.parameters), self._common)
        self.launched = []

    # --- in a checkpoint ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the state from which training resumes, once nothing is in flight."""
        self.wait()
        tensors, numbers = [each.detach().clone() for each in self._tensors()], (self.num_steps, self.num_items)
        return {"names": self.names, "is_launched": bool(self.launched), "tensors": tensors, "numbers": numbers}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a state that `state_dict` has returned."""
        self.launched = [torch.empty_like(each) for each in self.parameters if state["is_launched"]]
        torch._foreach_copy_(self._tensors(), state["tensors"])
        self.num_steps, self.num_items = state["numbers"]

    def _tensors(self) -> list[Tensor]:
        arrived = [bucket.flat for bucket in self._buckets if self.launched]
        return [*self.parameters, *self._common, *self.launched, *arrived, self._count]


class Streaming(LocalSteps):
    """Makes inner steps while differences are in flight. Collective to make.

    Args:
        model, optimizer, how: as in `LocalSteps`.
        rounds: with a delay.

    Raises:
        ConfigError: as `LocalSteps`; there is no delay; or a hook, which keeps what it has not sent until an exchange
            is complete.
    """

    _may_be_late = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, rounds: Rounds, **how: Any) -> None:
        super().__init__(model, optimizer, rounds, **how)
        if self.model.compression is not None:
            refuse(Setup(delay=rounds.delay, hook=self.model.compression.hook))
        comm = self.model.comm
        totals_comm = comm.subgroup(range(comm.world_size))
        assert totals_comm is not None
        self._totals_comm: Communicator = totals_comm
        self._layout: Layout | None = None
        self._fragments: list[Fragment] = []
        self._number = 0  # inner steps in the running round so far
        self._square = torch.zeros((), device=comm.device)  # of the differences that this round has applied
        self.model.settled = self._settled
        self._resumed: dict[str, Any] | None = None  # the state from which the next round resumes

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
                self._resume_from(before)

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
        """Adds up the totals of all ranks, and ends the step. Collective."""
        riding, self._inner = self.model.riding, []
        if riding is not None and self._num_items and not self._has_gradient:
            return  # the loss was not computed from what the model returned, which the loop tells
        found = torch.zeros(NUM_TOTALS + 1, dtype=torch.float64, device=self._totals_comm.device)
        (riding or Totals()).write(found[:NUM_TOTALS])
        found[NUM_TOTALS] = float(not self._is_finite)
        self._totals_comm.all_reduce(found, label=f"round {self.model.num_steps + 1}, totals")
        *totals, num_not_finite = found.tolist()
        if num_not_finite:
            self._square = torch.full_like(self._square, torch.nan)
        self.model.end_step(Totals.read(totals))

    def _gradient_norm(self) -> Tensor:
        return self._square.sqrt() if self._is_round else super()._gradient_norm()

    @torch.no_grad()
    def _outer_update(self, agreement: Agreement) -> None:
        """Ends a round: launches the fragments whose turn has come, or would have come in a longer round."""
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
        """Gives the module the last common parameters of each fragment, and drops those in flight. Collective."""
        super()._take_back()
        if self._is_round:
            for fragment in self._fragments:
                fragment.wait()
                fragment.take_back()
            self._forget()

    def _forget(self) -> None:
        """Drops the fragments; the next round begins with the parameters as they are then."""
        self._layout, self._fragments, self._inner = None, [], []
        self._square = torch.zeros_like(self._square)

    @contextmanager
    def _settled(self) -> Iterator[dict[str, Any]]:
        """Settles for a block. Yields the state from which training resumes afterwards."""
        fragments = [fragment.state_dict() for fragment in self._fragments]
        before = {"outer": copy.deepcopy(self._outer.state_dict()), "fragments": fragments}
        try:
            self.settle()
            yield before
        finally:
            self._resume_from(before)

    def _resume_from(self, before: Mapping[str, Any]) -> None:
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
            if self._inner:  # an error has ended a round
                self._buffers.restore()
        else:
            self.settle()
            self._totals_comm.close()
        self._forget()
        super().finish(alone=alone)
