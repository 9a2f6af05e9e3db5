"""Buckets: gradients that are reduced together, in one flat piece of memory.

One message per parameter would pay the network's latency hundreds of times; one message for all of them could only
start when backward has ended. Buckets are the compromise (Li et al., "PyTorch Distributed", arXiv 2006.15704,
section 3.2.3):

    parameters, in the order in which their gradients appear (last layer first)
    ┌─── bucket 0, small ───────┬────────┐┌───── bucket 1, closed at its limit ─────┐┌─ … ─┐┌─ last ───────┬──────┐
    │ fc.bias │fc.weight        │ totals ││ conv4.weight │ conv3.bias │ conv3.weight ││     ││ conv1.weight │unused│
    └───────────────────────────┴────────┘└─────────────────────────────────────────┘└─────┘└──────────────┴──────┘

The first bucket is small so that the wire is busy early. Every parameter's span starts on a 64-byte boundary;
padding is zero and stays zero. The *tails* carry what a step must agree on (`totals.py`): no message of their own.
The layout is a function of the parameters, their order and the limits alone, never of the world size.

A gradient gets into its bucket by one copy: after `zero_grad(set_to_none=True)` autograd installs a new tensor as
`p.grad`, and copying it once is cheaper than zeroing the bucket and adding to it. Large gradients are copied as soon as
they are there, so that their memory is free again; small ones together when the bucket is complete, in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ddp.gradients.totals import NUM_LANES, NUM_UNUSED
from ddp.transport.shared_memory import copy_bytes

ALIGNMENT_BYTES = 64
LARGE_BYTES = 64 << 10  # a gradient of so much is worth a call of its own
PAST_CACHES_BYTES = 16 << 20
NOWHERE = torch.empty(0, device="cpu")
Allocate = Callable[[int, torch.dtype, torch.device], Tensor]


@dataclass(eq=False, slots=True)
class Slot:
    """A parameter, and its gradient's place.

    Attributes:
        index: its number in the order of registration.
        is_sparse: the gradient is a sparse tensor, and lives in no bucket.
        view: the gradient in its bucket, from `Bucket.allocate` on; shaped and strided like the parameter.
    """

    index: int
    name: str
    parameter: nn.Parameter
    is_sparse: bool = False
    view: Tensor = field(default=NOWHERE, repr=False)

    @property
    def is_large(self) -> bool:
        """True if the gradient is worth a copy of its own."""
        return self.parameter.nbytes >= LARGE_BYTES

    def move_in(self, *, keep: bool = False) -> None:
        """Copies the gradient to its place, unless it lives there already; zeros if there is none.

        Args:
            keep: leave `parameter.grad` what it is; else it is the view afterwards.
        """
        gradient = self.parameter.grad
        if gradient is self.view:
            return
        if gradient is None:
            self.view.zero_()
        else:
            check_fits(self, gradient)
            _copy(self.view, gradient.detach())
        if not keep:
            self.parameter.grad = self.view


@dataclass(eq=False, slots=True, weakref_slot=True)
class Bucket:
    """Gradients of one dtype and device, side by side.

    Who has come is kept as a list of parameters, which costs one `append` per gradient; what it means is worked out
    when it is long enough.

    Attributes:
        index: position in the order of reduction.
        has_totals, has_unused: it carries that tail.
        flat: [numel], all spans, the padding between them, and the tails; from `allocate` on, like the next three.
        gradients: `flat` without its tails.
        totals: [NUM_LANES], the first bucket's tail.
        unused: [NUM_UNUSED], the last bucket's tail.
        arrivals: parameters that got a gradient since the last reduction, in that order.
        num_before: of these, those that came before this step's backward (in `no_sync`).
        expected, num_expected: ids of the parameters that every step's backward comes to; how many gradients they get.
        awaited: ids of those that this step's will come to.
        full_at: length of `arrivals` from which on all may be here.
        is_full: all are here.
        undefined: slots that had no gradient when the bucket was filled: autograd has reached the parameter with an
            undefined one, or not at all.
        ready_s, launched_s, done_s: when the last step had all of its gradients, sent it off, and had its mean.
    """

    index: int
    slots: list[Slot]
    has_totals: bool = False
    has_unused: bool = False
    flat: Tensor = field(init=False, repr=False)
    gradients: Tensor = field(init=False, repr=False)
    totals: Tensor = field(init=False, repr=False)
    unused: Tensor = field(init=False, repr=False)
    arrivals: list[Tensor] = field(default_factory=list, repr=False)
    num_before: int = 0
    expected: frozenset[int] = field(init=False, repr=False)
    num_expected: int = field(init=False)
    awaited: frozenset[int] = frozenset()
    full_at: int = 0
    is_full: bool = False
    undefined: list[Slot] = field(default_factory=list, repr=False)
    ready_s: float = 0.0
    launched_s: float = 0.0
    done_s: float = 0.0
    label: str = field(init=False)

    def __post_init__(self) -> None:
        names = [slot.name for slot in self.slots]
        what = f"{names[0]} … {names[-1]}" if len(names) > 1 else "".join(names) or "totals"
        self.label = f"bucket {self.index} ({len(names)} gradients: {what})"
        self.expect()

    @property
    def num_bytes(self) -> int:
        """Returns the number of bytes that a reduction sends, tails and padding included."""
        item = self.slots[0].parameter.element_size() if self.slots else 4
        tails = NUM_LANES * self.has_totals + NUM_UNUSED * self.has_unused
        return item * (sum(_span(slot.parameter) for slot in self.slots) + tails)

    def allocate(self, allocate: Allocate, device: torch.device) -> None:
        """Makes the memory, zeros, and gives every slot its place in it.

        Args:
            allocate: gives [numel] zeros of a dtype on a device, where reductions reach them best.
            device: of a bucket without gradients.
        """
        numel = sum(_span(slot.parameter) for slot in self.slots)
        like = self.slots[0].parameter if self.slots else torch.empty(0, dtype=torch.float32, device=device)
        num_totals, num_unused = NUM_LANES * self.has_totals, NUM_UNUSED * self.has_unused
        self.flat = allocate(numel + num_totals + num_unused, like.dtype, like.device)
        self.gradients, self.totals, self.unused = self.flat.split([numel, num_totals, num_unused])
        for slot, view in zip(self.slots, self.views_of(self.flat), strict=True):
            slot.view = view

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Returns every gradient's part of memory that is laid out like `flat`, of any type."""
        views, start = [], 0
        for slot in self.slots:
            views.append(_view(flat, start, slot.parameter))
            start += _span(slot.parameter)
        return views

    def begin(self, coming: frozenset[int] | None = None) -> None:
        """A backward begins.

        Args:
            coming: ids of the parameters that it will come to, if that is known.
        """
        self.awaited = self.expected if coming is None else self.expected & coming
        self.num_before = len(self.arrivals)
        self.full_at = self.num_before + (self.num_expected if coming is None else len(self.awaited))
        self.is_full = not self.awaited

    def expect(self, times: Mapping[int, int] | None = None) -> None:
        """Notes which gradients every step brings.

        Args:
            times: how often each, by the parameter's id; None: once each.
        """
        by_id = {id(slot.parameter): 1 for slot in self.slots} if times is None else times
        self.expected = frozenset(each for each, number in by_id.items() if number)
        self.num_expected = sum(by_id.values())

    def look(self, *, at_s: float) -> bool:
        """Returns True if all gradients are ready; if not, the next one may be the last."""
        self.is_full = self.awaited <= set(map(id, self.arrivals[self.num_before :]))
        if self.is_full:
            self.ready_s = at_s
        self.full_at = len(self.arrivals) + 1
        return self.is_full

    def without_gradient(self) -> list[Slot]:
        """Slots whose parameter got none since the last reduction."""
        arrived = set(map(id, self.arrivals))
        return (
            [slot for slot in self.slots if id(slot.parameter) not in arrived] if len(arrived) < len(self.slots) else []
        )

    def fill(self, *, keep: bool = False) -> None:
        """Moves in every gradient that is not in its place yet, zeros if there is none, and notes who has none.

        Args:
            keep: leave `parameter.grad` what it is; else it is the view afterwards.
        """
        if keep:
            self.undefined += [slot for slot in self.slots if slot.parameter.grad is None]
            for slot in self.slots:
                slot.move_in(keep=True)
            return
        here: list[Tensor] = []
        there: list[Tensor] = []
        try:
            for slot in self.slots:
                parameter, view = slot.parameter, slot.view
                gradient = parameter.grad
                if gradient is view:
                    continue
                if gradient is None:
                    self.undefined.append(slot)
                    view.zero_()
                else:
                    here.append(view)
                    there.append(gradient)
                parameter.grad = view
            if here:
                torch._foreach_copy_(here, there)
        except RuntimeError:
            slots = {id(slot.view): slot for slot in self.slots}
            for view, gradient in zip(here, there, strict=True):
                check_fits(slots[id(view)], gradient)
            raise


def check_fits(slot: Slot, gradient: Tensor) -> None:
    """Raises RuntimeError for a gradient that its bucket cannot hold."""
    if gradient.layout is not torch.strided:
        raise RuntimeError(
            f"{slot.name} got a sparse gradient, which nothing had announced; ranks must know beforehand which "
            "gradients are sparse: use nn.Embedding(…, sparse=True) or nn.EmbeddingBag(…, sparse=True), or a dense one"
        )
    if (gradient.dtype, gradient.device) != (slot.view.dtype, slot.view.device):
        raise RuntimeError(
            f"{slot.name} got a gradient of {gradient.dtype} on {gradient.device}; its bucket holds {slot.view.dtype} "
            f"on {slot.view.device}. Convert or move the model first, then wrap it"
        )


def _copy(view: Tensor, gradient: Tensor) -> None:
    """Very large ones by the C library, which writes past the caches: it need not read first what it overwrites.

    That is if it is told to (`ddp/engine.py` does); then 64 MB take 7 ms instead of 12.
    """
    past_caches = gradient.nbytes >= PAST_CACHES_BYTES and gradient.device.type == "cpu"
    is_as_it_lies = gradient.is_contiguous() and not (gradient.is_conj() or gradient.is_neg())
    if past_caches and is_as_it_lies and view.is_contiguous():
        copy_bytes(view.data_ptr(), gradient.data_ptr(), gradient.nbytes)
    else:
        view.copy_(gradient)


def plan_buckets(slots: Iterable[Slot], *, limits: Sequence[int]) -> list[list[Slot]]:
    """Which gradients share a bucket.

    Buckets of each dtype and device fill side by side, and stand in the order in which they will be complete.

    Args:
        slots: in the order in which gradients are expected.
        limits: bytes at which bucket 0, 1, 2, … is closed; the last one holds for all that follow.
    """
    groups: list[list[Slot]] = []
    completed_by: list[int] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[int, int]] = {}  # kind → which, and bytes in it
    for position, slot in enumerate(slots):
        kind = slot.parameter.dtype, slot.parameter.device
        if kind not in open_groups:
            open_groups[kind] = len(groups), 0
            groups.append([])
            completed_by.append(0)
        number, num_bytes = open_groups[kind]
        groups[number].append(slot)
        completed_by[number] = position
        num_bytes += _span(slot.parameter) * slot.parameter.element_size()
        open_groups[kind] = number, num_bytes
        if num_bytes >= limits[min(number, len(limits) - 1)]:
            del open_groups[kind]
    return [group for _, group in sorted(zip(completed_by, groups, strict=True), key=lambda pair: pair[0])]


def make_buckets(groups: Sequence[list[Slot]], *, device: torch.device, tails_apart: bool = False) -> list[Bucket]:
    """Buckets of these gradients; without memory yet.

    The tails need a wide type, since sums of counts are not exact in a narrow one: where the first or last bucket has
    none on `device`, a bucket without gradients carries them.

    Args:
        tails_apart: both tails get a bucket of their own, the last one.
    """
    plan = list(groups)
    if tails_apart or not plan or not _is_wide(plan[-1], device):
        plan.append([])
    if not tails_apart and not _is_wide(plan[0], device):
        plan.insert(0, [])
    last = len(plan) - 1
    with_totals = last if tails_apart else 0
    return [
        Bucket(index, group, has_totals=index == with_totals, has_unused=index == last)
        for index, group in enumerate(plan)
    ]


def _is_wide(group: list[Slot], device: torch.device) -> bool:
    """Returns True if a bucket of these could carry a tail; one without gradients can."""
    return not group or (
        group[0].parameter.dtype in (torch.float32, torch.float64) and group[0].parameter.device == device
    )


def _span(parameter: Tensor) -> int:
    """Elements that the parameter takes up, padding included."""
    step = max(1, ALIGNMENT_BYTES // parameter.element_size())
    return -(-parameter.numel() // step) * step


def _view(flat: Tensor, start: int, parameter: Tensor) -> Tensor:
    """The parameter's span, shaped and strided like it: autograd adds in place only where layouts agree."""
    if parameter.is_contiguous() or _is_permuted_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + start)
    return flat[start : start + parameter.numel()].view(parameter.shape)


def _is_permuted_dense(tensor: Tensor) -> bool:
    """True if its elements fill its memory without gaps or overlap, in whatever order (channels_last, say)."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True
