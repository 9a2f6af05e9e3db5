"""Where a replica's gradients live: its buckets, their order, their memory, and the hooks that tell who has come.

Buckets are first laid out in the reverse order of registration, since backward comes to the last layers first. The
first backward shows in which order gradients really come; at its end rank 0's order becomes everyone's, and if it needs
other buckets, they are planned anew.

Memory is made then, and not before: never are two generations of buckets there at a time, and a replica can be made,
copied and loaded without meeting the other ranks.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp.comm.communicator import Communicator
from ddp.gradients.bucket import Bucket, Slot, make_buckets, plan_buckets

Hook = Callable[[Tensor], None]


class Arrangement:
    """The buckets of one replica.

    Args:
        slots: its dense parameters, in the order of registration.
        limits: bytes at which bucket 0, 1, 2, … is closed; the last one holds for all that follow.
        hooks_of: what autograd is to call for each of a bucket's gradients.
        strangers: parameters without a place in a bucket, because they are frozen.
        on_stranger: what autograd is to call if one of them has got a gradient all the same.

    Attributes:
        buckets: in the order of reduction.
        is_learned: the order is one that a backward has shown.
        in_ordinary_memory: buckets are not the communicator's, and hold gradients and nothing else.
        totals, unused: the tails, wherever they are.
    """

    def __init__(
        self,
        comm: Communicator,
        slots: Sequence[Slot],
        *,
        limits: Sequence[int],
        hooks_of: Callable[[Bucket], Iterable[Hook]],
        strangers: Iterable[nn.Parameter],
        on_stranger: Hook,
    ) -> None:
        self._strangers, self._on_stranger = [each for each in strangers if _can_need_gradient(each)], on_stranger
        self._comm, self._limits, self._hooks_of = comm, limits, hooks_of
        self._order = list(reversed(slots))
        self._times: Counter[int] | None = None
        self._has_memory = False
        self._allocated: list[Tensor] = []  # what of it is the communicator's
        self._views: list[Tensor] = []
        self._addresses: list[int] = []
        self._handles: list[Any] = []
        self.is_learned = self.in_ordinary_memory = False
        self.totals = self.unused = torch.empty(0, device="cpu")
        self.buckets: list[Bucket] = []
        self._release = weakref.finalize(self, _release, comm, self._handles, self._allocated)
        self._release.atexit = False
        self.lay_out()

    @property
    def layout(self) -> list[list[str]]:
        """Names of the gradients that are reduced together."""
        return [[slot.name for slot in bucket.slots] for bucket in self.buckets if bucket.slots]

    @property
    def slots(self) -> list[Slot]:
        """In the order in which gradients are expected."""
        return self._order

    def adopt_order(self, names: Sequence[str]) -> None:
        """Expects gradients in this order from now on. Every rank calls it alike; collective once there is memory."""
        slots = {slot.name: slot for slot in self._order}
        self._order = list(dict.fromkeys([*(slots[name] for name in names if name in slots), *self._order]))
        self.is_learned = True
        if [[slot.name for slot in group] for group in self._plan()] != self.layout:
            self.lay_out()

    def expect(self, times: Counter[int]) -> None:
        """Expects so many gradients per step, by the parameter's id, from now on."""
        self._times = times
        for bucket in self.buckets:
            bucket.expect({id(slot.parameter): times[id(slot.parameter)] for slot in bucket.slots})

    def lay_out(self) -> None:
        """Makes the buckets, and hooks into autograd. Every rank calls it alike; collective once there is memory."""
        held = [(slot, slot.view) for slot in self._order if self._has_memory and slot.parameter.grad is slot.view]
        arrived = [parameter for bucket in self.buckets for parameter in bucket.arrivals]
        self.buckets = make_buckets(self._plan(), device=self._comm.device, tails_apart=self.in_ordinary_memory)
        if self._times is not None:
            self.expect(self._times)
        self.take_over(arrived)
        self.hook()
        if self._has_memory:
            self._has_memory = False
            self.allocate()
        for slot, gradient in held:
            slot.parameter.grad = slot.view.copy_(gradient)

    def take_over(self, arrived: Iterable[Tensor]) -> list[Tensor]:
        """Notes parameters that got a gradient while others kept watch (in `no_sync`). Returns those it has not."""
        home = {id(slot.parameter): bucket for bucket in self.buckets for slot in bucket.slots}
        strangers = []
        for parameter in arrived:
            if id(parameter) in home:
                home[id(parameter)].arrivals.append(parameter)
            else:
                strangers.append(parameter)
        return strangers

    def hook(self) -> None:
        """Lets autograd tell who has come."""
        self.unhook()
        for bucket in self.buckets:
            for slot, hook in zip(bucket.slots, self._hooks_of(bucket), strict=True):
                self._handles.append(register_hook(slot.parameter, hook))
        for parameter in self._strangers:
            self._handles.append(register_hook(parameter, self._on_stranger))

    def unhook(self) -> None:
        """Autograd tells nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def allocate(self) -> None:
        """Gives the buckets their memory, if they have none, and that of others back. Collective."""
        if self._has_memory:
            return
        former = self._allocated.copy()
        self._allocated.clear()
        for bucket in self.buckets:
            bucket.allocate(self._memory_for, self._comm.device)
        self.totals = next(bucket.totals for bucket in self.buckets if bucket.has_totals)
        self.unused = self.buckets[-1].unused
        self._has_memory = True
        self._remember_views()
        for flat in former:
            self._comm.free(flat)

    def mend_views(self) -> None:
        """Makes those views anew that someone has put elsewhere: `p.grad.data = …`, or a conversion of the model.

        The gradient is the view itself, so it would be reduced no more.
        """
        if list(map(Tensor.data_ptr, self._views)) != self._addresses:
            for bucket in self.buckets:
                for slot, view in zip(bucket.slots, bucket.views_of(bucket.flat), strict=True):
                    if slot.view.data_ptr() != view.data_ptr():
                        slot.view = view
            self._remember_views()

    def _remember_views(self) -> None:
        self._views = [slot.view for bucket in self.buckets for slot in bucket.slots]
        self._addresses = list(map(Tensor.data_ptr, self._views))

    def _plan(self) -> list[list[Slot]]:
        return plan_buckets(self._order, limits=self._limits)

    def _memory_for(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device != self._comm.device or self.in_ordinary_memory:
            return torch.zeros(numel, dtype=dtype, device=device)
        self._allocated.append(self._comm.allocate(numel, dtype))
        return self._allocated[-1]


def register_hook(parameter: nn.Parameter, hook: Hook) -> Any:
    """Lets autograd call the hook after it has accumulated the parameter's gradient. Returns the handle.

    torch refuses a parameter that is frozen at the moment. But a backward may belong to a forward in which it was not.
    """
    needs_gradient = parameter.requires_grad
    try:
        return parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(needs_gradient)


def _can_need_gradient(parameter: nn.Parameter) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference()


def _release(comm: Communicator, handles: list[Any], allocated: list[Tensor]) -> None:
    """When an arrangement ends, also by being forgotten: its model may live on, under another replica."""
    for handle in handles:
        handle.remove()
    for flat in allocated:
        comm.free(flat)
    handles.clear()
    allocated.clear()
