"""Buckets: gradients that are reduced together, in one flat piece of memory.

One message per parameter would pay the network's latency hundreds of times. One message for all of them could start
only when backward has ended. Buckets are the compromise (Li et al., "PyTorch Distributed", arXiv 2006.15704,
section 3.2.3):

    parameters, in the order in which their gradients become ready (last layer first)
    ┌─── bucket 0, small ───────┬────────┐┌───── bucket 1, closed at its limit ─────┐┌─ … ─┐┌─ last ───────┬────────┐
    │ fc.bias │fc.weight        │ totals ││ conv4.weight │ conv3.bias │ conv3.weight ││     ││ conv1.weight │verdicts│
    └───────────────────────────┴────────┘└─────────────────────────────────────────┘└─────┘└──────────────┴────────┘

The first bucket is small so that the wire is busy early. Every parameter's span starts on a 64-byte boundary; padding
is zero and stays zero. The *tails* carry what a step must agree on (`totals.py`).

A gradient gets into its bucket by one copy: after `zero_grad(set_to_none=True)` autograd installs a new tensor as
`p.grad`, and copying it once is cheaper than zeroing the bucket and adding to it. A large gradient is copied as soon as
it is ready, so that its memory is free again. Small ones are copied together once their bucket is full.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ddp.comm.transport.shared_memory import copy_bytes
from ddp.optim.norms import block_norms, total_norm
from ddp.process.memory import is_dense

ALIGNMENT_BYTES = 64
LARGE_BYTES = 64 << 10  # a gradient of this size is worth a copy of its own
PAST_CACHES_BYTES = 16 << 20


class Slot:
    """A parameter and its gradient's place in a bucket.

    Attributes:
        index: the parameter's number in the order of registration.
        strides: of the gradient in its bucket: the parameter's, as they were when the layout was planned. So they stay
            those of the other ranks.
        view: the gradient in its bucket, shaped like the parameter; none before `Bucket.allocate`.
        rows: the same place in each row of the bucket; `view` is the first.
    """

    __slots__ = ("index", "name", "parameter", "rows", "strides", "view")

    def __init__(self, index: int, name: str, parameter: nn.Parameter) -> None:
        self.index, self.name, self.parameter = index, name, parameter
        self.strides = strides_in_bucket(parameter)
        self.view: Tensor | None = None
        self.rows: list[Tensor] = []

    def move_in(self) -> None:
        """Copies the gradient, which there must be, to its place, and makes that `parameter.grad`."""
        gradient, view = self.parameter.grad, self.view
        assert gradient is not None and view is not None
        if gradient is not view:
            copy_gradient(self, view, gradient.detach())
            self.parameter.grad = view


class Bucket:
    """Gradients of one dtype and device, side by side.

    Args:
        slots: in the order in which their gradients become ready.
        num_tail: elements behind the gradients, for totals and verdicts.
        is_last: it is reduced last.

    Attributes:
        index: position in the order of reduction.
        ids: ids of the parameters.
        label: its name in messages and profiles.
        rows: [number of rows, numel]. Exists from `allocate` on, like the next three.
        flat: [numel], all spans, the padding between them, and the tail; row 0.
        gradients: `flat` without its tail.
        tail: [num_tail].
    """

    rows: Tensor
    flat: Tensor
    gradients: Tensor
    tail: Tensor

    def __init__(self, index: int, slots: list[Slot], num_tail: int = 0, *, is_last: bool = True) -> None:
        self.index, self.slots, self.num_tail, self.is_last = index, slots, num_tail, is_last
        self._addresses: list[int] = []
        self.ids = frozenset(id(slot.parameter) for slot in slots)
        names = [slot.name for slot in slots]
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
        self.rows = memory.view(num_rows, self.numel)
        self.flat = flat = memory[: self.numel] if num_rows > 1 else memory
        self.gradients, self.tail = flat.split([len(flat) - self.num_tail, self.num_tail])
        for slot, *rows in zip(self.slots, *map(self.views_of, self.rows), strict=True):
            slot.view, slot.rows = rows[0], rows
        self._addresses = [view.data_ptr() for view in self.views_of(self.flat)]
        is_padding = torch.ones(len(self.gradients), dtype=torch.bool, device=flat.device)
        for view in self.views_of(is_padding):
            view.fill_(False)
        self._padding = is_padding.nonzero().flatten()

    def clear_padding(self) -> None:
        """Writes zeros to the padding, where a wire format may have left what was not finite in its neighbours."""
        if len(self._padding):
            self.flat.index_fill_(0, self._padding, 0)

    def mend(self) -> None:
        """Makes new views in the place of those whose memory somebody has exchanged, as `p.grad.data = …` does.

        Before that, the gradient was the view itself. Now it is an ordinary gradient, and is copied to its place.
        """
        if [slot.view.data_ptr() for slot in self.slots if slot.view is not None] != self._addresses:
            for slot, view, address in zip(self.slots, self.views_of(self.flat), self._addresses, strict=True):
                if slot.view is None or slot.view.data_ptr() != address:
                    slot.view = slot.rows[0] = view

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

    def fill(self, *, moves: bool = True) -> list[Slot]:
        """Copies every gradient that is not in its place yet to it; returns the slots without one, which hold zeros.

        Args:
            moves: `p.grad` is the place in the bucket from then on. Otherwise it stays as it is.
        """
        empty: list[Slot] = []
        self.mend()
        filled: list[Slot] = []
        here: list[Tensor] = []
        there: list[Tensor] = []
        for slot in self.slots:
            parameter, view = slot.parameter, slot.view
            gradient = parameter.grad
            if gradient is view:
                continue
            if gradient is None:
                empty.append(slot)
                view.zero_()  # type: ignore[union-attr]
            else:
                filled.append(slot)
                here.append(view)  # type: ignore[arg-type]
                there.append(gradient if moves else gradient.detach())
            if moves:
                parameter.grad = view
        if here:
            move(filled, here, there)
        return empty


def move(slots: Sequence[Slot], here: list[Tensor], there: list[Tensor]) -> None:
    """Copies gradients of slots from `there` to their places in a bucket, `here`.

    Raises:
        RuntimeError: the bucket cannot hold one.
    """
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
            "nn.Embedding(…, sparse=True) or nn.EmbeddingBag(…, sparse=True) in a ddp.DistributedDataParallel, or a "
            "dense one"
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


def copy_gradient(slot: Slot, view: Tensor, gradient: Tensor) -> None:
    """Copies a gradient of a slot; a very large one by the C library, which need not read what it overwrites.

    The library writes past the caches if it is told to (`process/memory.py`); then 64 MB take 7 ms instead of 12.
    """
    check_fits(slot, gradient)
    past_caches = gradient.nbytes >= PAST_CACHES_BYTES and gradient.device.type == "cpu"
    is_as_it_lies = gradient.is_contiguous() and not (gradient.is_conj() or gradient.is_neg())
    if past_caches and is_as_it_lies and view.is_contiguous():
        copy_bytes(view.data_ptr(), gradient.data_ptr(), gradient.nbytes)
    else:
        view.copy_(gradient)


def strides_in_bucket(parameter: Tensor) -> tuple[int, ...]:
    """Returns the parameter's own strides if it has no gaps: autograd adds in place only where layouts agree."""
    is_as_it_lies = parameter.is_contiguous() or is_dense(parameter)
    return (parameter if is_as_it_lies else torch.empty(parameter.shape, device="meta")).stride()
