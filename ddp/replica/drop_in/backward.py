"""The bucketed backward with everything else that torch's class offers. Each feature changes it at named moments.

    moment              changed by
    begin               `create_graph=True`: gradients stay out of their buckets (`higher_order.py`)
    _awaited            `find_unused_parameters`: the graph says which parameters backward will reach;
                        `static_graph`: the first backward has shown how many gradients there are
    _move_into, move_in `create_graph=True`
    _reduce, _wait      a communication hook (`comm_hook.py`)
    _complete           the optimizer inside backward (`in_backward.py`)
    _settle             sparse gradients (`sparse.py`), optimizers of others inside backward
    widen               a forward that unfreezes parameters, or one backward through several forwards

Note "static graph". Under re-entrant checkpointing a parameter that is used twice gets two gradients, in two backwards
inside the real one, and nothing in the graph announces that. If the graph is the same in every step, the first step
shows how many there are: it launches all buckets at its end, and later steps know how many gradients to wait for.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsInt

import torch
from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.errors import UnusedParameters
from ddp.gradients.bucket import Bucket, Slot
from ddp.gradients.layout import Layout
from ddp.gradients.totals import Totals, Verdicts
from ddp.process.clock import now_s
from ddp.replica.backward import Backward, BucketReduction
from ddp.replica.drop_in.comm_hook import CommHook
from ddp.replica.drop_in.in_backward import StepInBackward, StepsOfOthers, refusal
from ddp.replica.drop_in.sparse import reduce_sparse
from ddp.replica.sink import is_in_backward, will_accumulate
from ddp.replica.unused import Use, greatest_uses


@dataclass
class StaticGraph:
    """Remembers the gradients of the first backward over a graph that never changes.

    Attributes:
        times: by the parameter's id, how many gradients every backward computes; None before the first one.
        never: names of the parameters that no rank has used; None as long as none was missing.
    """

    times: Counter[int] | None = None
    never: frozenset[str] | None = None

    def learn_never(self, names: Iterable[str]) -> None:
        """Notes which parameters no rank has used."""
        self.never = frozenset(names)


@dataclass
class Wishes:
    """Holds the features that the user has asked for, for all backwards of a replica.

    Attributes:
        finds_unused: each backward asks autograd's graph which parameters it will reach.
        static_graphs: every step that trains the same parameters uses them equally often; one graph for each set of
            parameters, by their ids. None: no such promise.
        hook: takes the place of the all-reduce.
        stepper: steps each bucket's parameters when their mean is complete.
        others: finds optimizers inside backward that are not ours.
    """

    finds_unused: bool = False
    static_graphs: dict[frozenset[int], StaticGraph] | None = None
    hook: CommHook | None = None
    stepper: StepInBackward | None = None
    others: StepsOfOthers = field(default_factory=StepsOfOthers)

    def static_graph_of(self, layout: Layout) -> StaticGraph | None:
        """Returns the graph of the layout's parameters, if it is static."""
        if self.static_graphs is None:
            return None
        return self.static_graphs.setdefault(frozenset(layout.slot_of), StaticGraph())


class TorchBackward(Backward):
    """One synchronised backward with all that torch's class can do.

    Attributes:
        is_differentiable: gradients stay out of their buckets, and can be differentiated (create_graph).
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        former: Backward | None,
        wishes: Wishes,
        **how: Any,
    ) -> None:
        super().__init__(comm, former=former, **how)
        self._wishes, self.is_differentiable = wishes, False
        self._static: StaticGraph | None = None
        self._coming: frozenset[int] | None = None  # ids of the parameters that backward will reach, if that is known
        self._sparse_ready: set[int] = set()
        self._is_first, self._changed = False, list[str]()  # of a static graph: it is learned now; what is not as then

    def begin(
        self, layout: Layout, step: int, *, totals: Totals | None, divide_by: SupportsInt, has_samples: bool = True
    ) -> None:
        """Starts, and finds out what this backward is going to do.

        Raises:
            ConfigError: it creates a graph, but an optimizer inside backward would change the parameters meanwhile.
        """
        if self._wishes.hook is not None and not layout.is_for_hook:
            layout = layout.for_hooks()  # of a forward from before the hook was registered
        self._static = self._wishes.static_graph_of(layout)
        in_backward = is_in_backward()
        self.is_differentiable = in_backward and torch.is_grad_enabled()
        if self.is_differentiable and self._wishes.stepper is not None:
            raise refusal("create_graph=True")
        if self._wishes.finds_unused and in_backward:
            self._coming = frozenset(map(id, will_accumulate(layout.parameters)))
        self._wishes.others.begin(layout.slots)
        super().begin(layout, step, totals=totals, divide_by=divide_by, has_samples=has_samples)

    def _awaited(self, bucket: Bucket) -> tuple[frozenset[int], int]:
        static = self._static
        if static is not None:
            if static.times is None:
                return bucket.ids, sys.maxsize  # note "static graph"
            awaited = frozenset(each for each in bucket.ids if static.times[each])
            num_awaited = sum(static.times[each] for each in bucket.ids)
        elif self._coming is not None:
            awaited = bucket.ids & self._coming
            num_awaited = len(awaited)
        else:
            return super()._awaited(bucket)
        for slot in bucket.slots:
            if id(slot.parameter) not in awaited:
                self._keep(slot)  # the bucket may be sent before backward has ended
        return awaited, num_awaited

    def widen(self, layout: Layout) -> None:
        """Goes on with more parameters, because backward has reached a forward that needs them.

        Raises:
            RuntimeError: the layouts are for other parameters, or buckets have been sent.
        """
        if self.layout.slot_of.keys() >= layout.slot_of.keys():
            return
        if self._num_launched or not layout.slot_of.keys() >= self.layout.slot_of.keys():
            raise RuntimeError(
                "one backward goes through two forwards, between which other parameters were frozen or unfrozen, "
                "or through one that unfreezes: run a backward for each of them, or freeze after the backward and "
                "unfreeze before the forward"
            )
        ready, began_s = self._ready_so_far(), self.began_s
        self.reductions, self.index_of, self._seen = [], {}, []
        self.begin(layout, self.step, totals=self._totals, divide_by=self._divide_by)
        self.began_s = began_s
        for parameter in ready:
            _ = self.note(parameter) or self.note_other(parameter)

    def _ready_so_far(self) -> list[Tensor]:
        """Returns the parameters in buckets whose gradients this backward has computed, once for each gradient."""
        return self._seen + [each for reduction in self.reductions for each in reduction.ready[reduction.num_early :]]

    def note_other(self, parameter: Tensor) -> bool:
        if super().note_other(parameter):
            return True
        self._sparse_ready.add(id(parameter))
        return id(parameter) in self.layout.slot_of

    def _missing(self) -> list[Slot]:
        ready = self._sparse_ready.union(self.early)
        sparse = [slot for slot in self.layout.sparse if id(slot.parameter) not in ready]
        return sorted(super()._missing() + sparse, key=lambda slot: slot.index)

    def _move_into(self, bucket: Bucket) -> None:
        if not self.is_differentiable:
            super()._move_into(bucket)
            return
        bucket.mend()
        for slot in bucket.slots:
            if slot.parameter.grad is None:
                self._note_undefined(slot)
            slot.copy_in()

    def move_in(self, parameter: Tensor) -> None:
        if not self.is_differentiable:
            super().move_in(parameter)

    def _reduce(self, reduction: BucketReduction, *, in_background: bool) -> None:
        if self._wishes.hook is None:
            super()._reduce(reduction, in_background=in_background)
        else:
            self._wishes.hook.launch(reduction.bucket, self.layout.buckets, self.step)

    def _wait(self) -> None:
        super()._wait()
        if self._wishes.hook is not None:
            with self._waited.running():
                self._wishes.hook.finish()
            for reduction in self.reductions:
                self._complete(reduction, now_s())

    def _complete(self, reduction: BucketReduction, done_s: float) -> None:
        super()._complete(reduction, done_s)
        if self._wishes.stepper is not None and self.layout.is_learned:  # before that, buckets are not final
            self._wishes.stepper.step(reduction.bucket)

    def finish(self) -> Totals:
        static = self._static
        if static is not None and self._has_samples:
            times = Counter(self._sparse_ready) + Counter(map(id, self._ready_so_far()))
            if static.times is None:
                static.times, self._is_first = times, True
            self._changed = [
                f"{slot.name} ({slot.index}) got {times[each]} gradients, and {static.times[each]} in the first step"
                for each, slot in self.layout.slot_of.items()
                if times[each] != static.times[each]
            ]
        return super().finish()

    def _has_unused(self, missing: Sequence[Slot]) -> bool:
        if self._static is None or self._is_first:
            return super()._has_unused(missing)
        return bool(self._changed)  # what is missing as in the first step is known

    def _settle_totals(self) -> Totals:
        """Hooks have taken means over the ranks; where totals ride along, they become means over the global count."""
        totals = super()._settle_totals()
        self._sparse_divisor = int(self._divide_by) / totals.rest
        if self._wishes.hook is not None and self._totals is not None:
            for bucket in self.layout.buckets:
                bucket.gradients.mul_(self.comm.world_size / int(self._divide_by))
        return totals

    def _settle(self, missing: Sequence[Slot], undefined: Collection[Slot], verdicts: Verdicts) -> None:
        if self._wishes.stepper is None:
            gone = [slot for slot in self.layout.sparse if slot.parameter.grad is None]
            self._wishes.others.check([*undefined, *gone])
        if self.is_differentiable:
            for slot in self.layout.slots:
                if slot.parameter.grad is None and slot.view is not None:
                    slot.parameter.grad = slot.view
        super()._settle(missing, undefined, verdicts)
        if self._static is not None and not (verdicts.has_unused or verdicts.has_undefined):
            self._give_back(self._never())
        for slot in self.layout.sparse:
            reduce_sparse(self.comm, slot, divide_by=self._sparse_divisor)

    def _used_by_none(self, missing: Sequence[Slot], undefined: Collection[Slot], verdicts: Verdicts) -> Iterable[Slot]:
        static = self._static
        if static is None:
            return super()._used_by_none(missing, undefined, verdicts)
        slots, uses = self.layout.slots, list[Use]()
        if static.never is None or verdicts.has_undefined:
            uses = greatest_uses(self.comm, slots, missing, undefined)
            if static.never is None:
                static.learn_never(slot.name for slot in slots if uses[slot.index] is Use.NONE)
        return [slot for slot in slots if uses[slot.index] is not Use.GRADIENT] if uses else self._never()

    def _never(self) -> list[Slot]:
        """Returns the slots of a static graph that no rank uses."""
        never = None if self._static is None else self._static.never
        return [slot for slot in self.layout.slots if slot.name in never and slot in self._kept] if never else []

    def _complain(self, missing: Sequence[Slot] | None) -> None:
        """Records the error about unused parameters, or raises the one about a static graph that has changed."""
        if self._static is not None:
            check_static(self.comm, self._changed)
        elif not self._wishes.finds_unused:
            super()._complain(missing)


def check_static(comm: Communicator, changed: Sequence[str]) -> None:
    """Raises UnusedParameters, on every rank, if the graph of any rank is another one than in the first step.

    Args:
        changed: this rank's parameters whose gradients are, in words.
    """
    everyone = all_gather_object(comm, list(changed))
    if any(everyone):
        lines = [f"  rank {rank}: {', '.join(each) or 'none'}" for rank, each in enumerate(everyone)]
        raise UnusedParameters(
            "Your training graph has changed in this iteration. With static_graph=True every step must use the same "
            "parameters equally often:\n" + "\n".join(lines) + "\nPass find_unused_parameters=True instead"
        )
