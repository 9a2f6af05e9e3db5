"""Buckets: gradients that are reduced together, in one flat piece of memory.

One message per parameter would pay the network's latency hundreds of times. One message for all of them could start
only when backward has ended. Buckets are the compromise (Li et al., "PyTorch Distributed", arXiv 2006.15704,
section 3.2.3):

    parameters, in the order in which their gradients become ready (last layer first)
    ┌─── bucket 0, small ───────┬────────┐┌───── bucket 1, closed at its limit ─────┐┌─ … ─┐┌─ last ───────┬────────┐
    │ fc.bias │fc.weight        │ totals ││ conv4.weight │ conv3.bias │ conv3.weight ││     ││ conv1.weight │ flags  │
    └───────────────────────────┴────────┘└─────────────────────────────────────────┘└─────┘└──────────────┴────────┘

The first bucket is small so that the wire is busy early. Every parameter's span starts on a 64-byte boundary; padding
is zero and stays zero. The *tails* carry what a step must agree on (`totals.py`).

A gradient gets into its bucket by one copy: after `zero_grad(set_to_none=True)` autograd installs a new tensor as
`p.grad`, and copying it once is cheaper than zeroing the bucket and adding to it. The gradients of a bucket are copied
together once it is full. Until the bucket holds the mean, `p.grad` stays that tensor, because hooks on other parameters
may read it or write to it. Then `p.grad` becomes the gradient's place in the bucket. Gradients of large weights are
computed in their places, if they are matrix products (`replica/direct.py`).

Note "kept". A program may keep a gradient, or anything that shares its memory, and drop `p.grad`: to compare the
gradients of two tasks, say. So each place has its own storage, and its users are counted before a backward writes to
it. If the program is one of them, the bucket changes to other memory for this step, out of which the ranks of a host
have to copy. From then on this parameter gets its mean in its own memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import chain, compress
from operator import attrgetter, gt

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from ddp.comm.transport.shared_memory import copy_bytes
from ddp.optim.norms import block_norms, total_norm
from ddp.process import gpu
from ddp.process.memory import is_dense

ALIGNMENT_BYTES = 64
PAST_CACHES_BYTES = 16 << 20
_VIEW = attrgetter("view")
_NUM_USERS: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)  # of a storage, by its number


class Slot:
    """A parameter and its gradient's place in a bucket.

    Attributes:
        index: the parameter's number in the order of registration.
        strides: of the gradient in its bucket: those of the parameter when the layout was planned. So they stay equal
            on all ranks.
        view: the gradient in its bucket, shaped like the parameter; none before `Bucket.allocate`.
        rows: the same place in each row of the bucket; `view` is the first.
        is_kept: the program may have kept a gradient (note "kept").
    """

    __slots__ = ("index", "is_kept", "name", "parameter", "rows", "strides", "view")

    def __init__(self, index: int, name: str, parameter: nn.Parameter) -> None:
        self.index, self.name, self.parameter = index, name, parameter
        self.strides = strides_in_bucket(parameter)
        self.view: Tensor | None = None
        self.rows: list[Tensor] = []
        self.is_kept = _NUM_USERS is None


class Bucket:
    """Gradients of one dtype and device, adjacent in memory.

    Args:
        slots: in the order in which their gradients become ready.
        num_tail: elements behind the gradients, for totals and step flags.
        is_last: the bucket is reduced last.

    Attributes:
        index: position in the order of reduction.
        ids: ids of the parameters.
        direct: slots in whose places gradients have been computed (`replica/direct.py`).
        is_lent: other values than gradients lie here between backwards, so no gradient is computed in its place.
        label: its name in messages and profiles.
        rows: [number of rows, numel]; set by `allocate`, like the next three.
        flat: [numel], all spans, the padding between them, and the tail; row 0.
        gradients: `flat` without its tail.
        tail: [num_tail].
    """

    rows: Tensor
    flat: Tensor
    gradients: Tensor
    tail: Tensor
    _unused: tuple[int, ...]  # the counts of `_users` for a place that the program does not use

    def __init__(self, index: int, slots: list[Slot], num_tail: int = 0, *, is_last: bool = True) -> None:
        self.slots, self.num_tail = slots, num_tail
        self.ids = frozenset(id(slot.parameter) for slot in slots)
        self.direct: list[Slot] = []
        self.is_lent = False
        self.number(index, is_last=is_last)

    def number(self, index: int, *, is_last: bool) -> None:
        """Gives the bucket its place in the order of reduction."""
        self.index, self.is_last, names = index, is_last, [slot.name for slot in self.slots]
        what = f"{names[0]} … {names[-1]}" if len(names) > 1 else names[0]
        self.label = f"bucket {index} ({len(names)} gradients: {what})"

    @property
    def num_bytes(self) -> int:
        """Returns the number of bytes that a reduction sends, tail and padding included."""
        return self.slots[0].parameter.element_size() * self.numel

    @property
    def numel(self) -> int:
        """Returns the number of elements, tail and padding included."""
        return sum(span(slot.parameter) for slot in self.slots) + self.num_tail

    def allocate(self, memory: Tensor, *, num_rows: int = 1) -> None:
        """Takes zeros, [num_rows · numel], as memory, and gives every slot its places in it."""
        self._first_memory, self._users_of_first = memory, num_users(memory)
        self._place(memory.view(num_rows, self.numel))
        is_padding = torch.ones(len(self.gradients), dtype=torch.bool, device=memory.device)
        for view in self.views_of(is_padding):
            view.fill_(False)
        self._padding = is_padding.nonzero().flatten()

    def _place(self, rows: Tensor) -> None:
        self.rows, self.flat = rows, rows[0]
        self.gradients, self.tail = self.flat.split([self.numel - self.num_tail, self.num_tail])
        for slot, *places in zip(self.slots, *map(self.views_of, rows), strict=True):
            slot.view, slot.rows = None, places
        self._aliases = [slot.rows[0] for slot in self.slots]
        self._addresses = [alias.data_ptr() for alias in self._aliases]
        self.restore_views()

    def borrow(self, memory: Tensor) -> None:
        """Takes uninitialized memory, [numel], until the next call of this or of `give_back`."""
        self.rows, self.flat, self.gradients, self.tail = memory.view(1, -1), memory, memory, memory.new_empty(0)
        self._padding, start = memory.new_empty(0, dtype=torch.int64), 0
        for slot, view in zip(self.slots, self.views_of(memory), strict=True):
            slot.view, slot.rows, start = view, [view], start + span(slot.parameter)
            memory[start - span(slot.parameter) + slot.parameter.numel() : start].zero_()

    def give_back(self, mean: Tensor) -> None:
        """Gives back borrowed memory, of which `mean` is all that is kept, until the next call."""
        self.rows, self.flat, self.gradients = mean.view(1, -1), mean, mean
        for slot in self.slots:
            slot.view, slot.rows = None, []

    def clear_padding(self) -> None:
        """Writes zeros to the padding, where a wire format may have left non-finite values of its neighbours."""
        if len(self._padding):
            self.flat.index_fill_(0, self._padding, 0)

    def restore_views(self) -> list[Slot]:
        """Replaces views whose memory the program has exchanged, as `p.grad.data = …` does.

        Such a gradient is an ordinary one from then on, and is copied to its place.

        Returns:
            The slots whose former view's memory the program still uses.
        """
        if [slot.view.data_ptr() for slot in self.slots if slot.view is not None] == self._addresses:
            return []
        counts, kept = map(num_users, self._aliases), list[Slot]()
        for slot, view, address, count in zip(
            self.slots, self.views_of(self.flat), self._addresses, counts, strict=True
        ):
            if slot.view is None or slot.view.data_ptr() != address:
                if slot.view is not None and count >= self._unused[-1]:  # though the view is gone
                    kept.append(slot)
                slot.view = slot.rows[0] = with_own_storage(view)
                slot.is_kept |= slot.view._is_view()
        self._aliases = [slot.rows[0].detach() for slot in self.slots]  # which the user cannot exchange
        self._storages = [alias.untyped_storage() for alias in self._aliases]
        self._numbers = [storage._cdata for storage in self._storages]
        self._unused = tuple(map(min, self._users()))
        return kept

    def spare_kept(self) -> bool:
        """Leaves this memory to a program that has kept a gradient in it; returns to the first memory once it is free.

        Returns:
            True if the bucket has changed to other memory.
        """
        kept = [*self.restore_views(), *self._kept()]
        for slot in kept:
            slot.is_kept = True
        is_away = self.flat.data_ptr() != self._first_memory.data_ptr()
        if is_away and num_users(self._first_memory) <= self._users_of_first:
            memory = self._first_memory
        elif kept:
            memory = torch.zeros_like(self._first_memory)
        else:
            return False
        tail = self.tail
        self._place(memory.view(1, -1))
        self.tail.copy_(tail)
        return True

    def _kept(self) -> list[Slot]:
        """Returns the slots whose places the program still uses, though `p.grad` no longer refers to them."""
        counts = self._users()
        if all(max(each) <= unused for each, unused in zip(counts, self._unused, strict=True)):
            return []
        used = [any(map(gt, each, self._unused)) for each in zip(*counts, strict=True)]
        return [slot for slot in compress(self.slots, used) if slot.parameter.grad is not slot.view]

    def _users(self, which: slice = slice(None)) -> tuple[list[int], ...]:
        """Returns the references to each place, those to its storage, and the tensors in that storage."""
        if _NUM_USERS is None:
            return ([0],)
        count, views = sys.getrefcount, map(_VIEW, self.slots[which])
        storages, numbers = self._storages[which], self._numbers[which]
        return list(map(count, views)), list(map(count, storages)), list(map(_NUM_USERS, numbers))

    def place_for(self, slot: Slot) -> Tensor | None:
        """Returns an alias of a slot's place, where its gradient may be computed; None if anything else uses it."""
        number = self.slots.index(slot)
        is_used = any(map(gt, chain(*self._users(slice(number, number + 1))), self._unused))
        if self.is_lent or slot.is_kept or is_used or self._addresses[number] % ALIGNMENT_BYTES:
            return None
        if slot not in self.direct:
            self.direct.append(slot)
        return self._aliases[number].detach()

    def adopt(self) -> None:
        """Makes each gradient that was computed in its place that place, so that `fill` finds it there."""
        for slot in self.direct:
            gradient = slot.parameter.grad
            if gradient is not None and gradient.layout is torch.strided and gradient.is_set_to(slot.rows[0]):
                slot.parameter.grad = slot.view

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Returns every gradient's part of memory that is laid out like `flat`, of any type."""
        views, start = [], 0
        for slot in self.slots:
            views.append(flat.as_strided(slot.parameter.shape, slot.strides, flat.storage_offset() + start))
            start += span(slot.parameter)
        return views

    def square(self) -> Tensor:
        """Returns the sum of squares of all gradients."""
        return total_norm(block_norms([self.gradients])).square()

    def fill(self) -> list[Slot]:
        """Copies gradients to their places, if they are elsewhere; returns the slots without one, filled with zeros."""
        self.restore_views()
        return self.copy_in()

    def copy_in(self) -> list[Slot]:
        """Copies gradients to places that no program can have exchanged; returns what `fill` does."""
        empty: list[Slot] = []
        filled: list[Slot] = []
        here: list[Tensor] = []
        there: list[Tensor] = []
        for slot in self.slots:
            view, gradient = slot.view, slot.parameter.grad
            if gradient is view:
                continue
            if gradient is None:
                empty.append(slot)
                view.zero_()  # type: ignore[union-attr]
            else:
                filled.append(slot)
                here.append(view)  # type: ignore[arg-type]
                there.append(gradient.detach() if gradient.requires_grad else gradient)
        copy_into(filled, here, there)
        return empty

    def hand_out(self) -> None:
        """Makes every parameter's gradient its place in the bucket."""
        for slot in self.slots:
            slot.parameter.grad = slot.view


def copy_into(slots: Sequence[Slot], here: list[Tensor], there: list[Tensor]) -> None:
    """Copies gradients of slots from `there` to their places in a bucket, `here`.

    The C library copies very large ones, because it need not read what it overwrites: `process/memory.py` makes it
    write past the caches. Then 64 MB take 7 ms instead of 12.

    Raises:
        RuntimeError: the bucket cannot hold a gradient.
    """
    if large := {n for n, place in enumerate(here) if place.nbytes >= PAST_CACHES_BYTES}:
        large = {n for n in large if _copied_past_caches(slots[n], here[n], there[n])}
        rest = [n for n in range(len(here)) if n not in large]
        slots, here, there = [slots[n] for n in rest], [here[n] for n in rest], [there[n] for n in rest]
    if here:
        try:
            torch._foreach_copy_(here, there)
        except RuntimeError:
            for slot, gradient in zip(slots, there, strict=True):
                check_fits(slot, gradient)
            raise


def check_fits(slot: Slot, gradient: Tensor) -> None:
    """Raises RuntimeError for a gradient that its bucket cannot hold."""
    assert slot.view is not None
    if gradient.layout is not torch.strided:
        raise RuntimeError(
            f"{slot.name} got a sparse gradient; ranks must know beforehand which gradients are sparse: use "
            "nn.Embedding(…, sparse=True) or nn.EmbeddingBag(…, sparse=True), or a dense one"
        )
    if (gradient.dtype, gradient.device) != (slot.view.dtype, slot.view.device):
        raise RuntimeError(
            f"{slot.name} got a gradient of {gradient.dtype} on {gradient.device}; its bucket holds {slot.view.dtype} "
            f"on {slot.view.device}. Convert or move the model first, then wrap it"
        )


def span(parameter: Tensor) -> int:
    """Returns the number of elements that a parameter takes up in a bucket, padding included."""
    step = max(1, ALIGNMENT_BYTES // parameter.element_size())
    return -(-parameter.numel() // step) * step


def _copied_past_caches(slot: Slot, place: Tensor, gradient: Tensor) -> bool:
    """Copies a gradient on the CPU whose layout is that of its place. Returns True if it did."""
    check_fits(slot, gradient)
    has_same_layout = (
        place.is_contiguous() and gradient.is_contiguous() and not (gradient.is_conj() or gradient.is_neg())
    )
    if gradient.device.type != "cpu" or not has_same_layout:
        return False
    copy_bytes(place.data_ptr(), gradient.data_ptr(), gradient.nbytes)
    return True


def strides_in_bucket(parameter: Tensor) -> tuple[int, ...]:
    """Returns the parameter's own strides if it has no gaps: autograd adds in place only where layouts agree."""
    has_no_gaps = parameter.is_contiguous() or is_dense(parameter)
    return (parameter if has_no_gaps else torch.empty(parameter.shape, device="meta")).stride()


def with_own_storage(view: Tensor) -> Tensor:
    """Returns a view as a tensor with its own storage, whose users can be counted, and which is saved alone.

    If the device is neither a CPU nor a GPU, returns the view itself.
    """
    return from_dlpack(to_dlpack(view)) if view.device.type in ("cpu", gpu.KIND) else view


def num_users(memory: Tensor) -> int:
    """Returns the number of tensors and other users of a tensor's storage."""
    return _NUM_USERS(memory.untyped_storage()._cdata) if _NUM_USERS else 0
