"""Buckets: gradients that are reduced together, in one flat piece of memory.

One message per parameter would pay the network's latency hundreds of times; one message for all of them could only
start when backward has ended. Buckets are the compromise (Li et al., "PyTorch Distributed", arXiv 2006.15704,
section 3.2.3):

    parameters, in the order in which their gradients appear (last layer first)
    ┌─ bucket 0, small ─┐┌────────── bucket 1, at most bucket_bytes ──────────┐┌─ … ─┐┌─ last ───────┬─ tail ─┐
    │ fc.bias │fc.weight││ conv4.weight │ conv3.bias │ conv3.weight │ …        ││     ││ conv1.weight │ totals │
    └───────────────────┘└────────────────────────────────────────────────────┘└─────┘└──────────────┴────────┘

The first bucket is small so that the wire is busy early. Every parameter's span starts on a 64-byte boundary;
padding is zero and stays zero. The *tail* carries what a step must agree on (`totals.py`): no message of its own.
The layout is a function of the parameters and the two sizes alone, never of the world size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ddp.gradients.totals import NUM_LANES

ALIGNMENT_BYTES = 64
Allocate = Callable[[int, torch.dtype], Tensor]


@dataclass(eq=False)
class Bucket:
    """Gradients of one dtype and device, side by side.

    Attributes:
        index: position in the order of reduction.
        flat: [numel], all spans and the padding between them; parameter i's gradient is `views[i]`.
        tail: [NUM_LANES] at the end of the last bucket, else None.
    """

    index: int
    names: list[str]
    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    tail: Tensor | None = None
    label: str = field(init=False)

    def __post_init__(self) -> None:
        what = f"{self.names[0]} … {self.names[-1]}" if len(self.names) > 1 else "".join(self.names) or "totals"
        self.label = f"bucket {self.index} ({len(self.names)} gradients: {what})"


def make_buckets(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    first_bucket_bytes: int,
    bucket_bytes: int,
    allocate: Allocate,
) -> list[Bucket]:
    """Lays the parameters' gradients out in buckets, in the order given.

    Args:
        named_parameters: what needs a gradient, in the order in which gradients are expected.
        first_bucket_bytes, bucket_bytes: a bucket is closed once it holds at least so many bytes.
        allocate: gives [numel] zeros of a dtype, where reductions reach them best.
    """
    groups: list[list[tuple[str, nn.Parameter]]] = []
    sizes: list[int] = []
    for name, parameter in named_parameters:
        limit = first_bucket_bytes if len(groups) <= 1 else bucket_bytes
        if not groups or sizes[-1] >= limit or not _alike(groups[-1][0][1], parameter):
            groups.append([])
            sizes.append(0)
        groups[-1].append((name, parameter))
        sizes[-1] += _span(parameter) * parameter.element_size()
    carries_tail = bool(groups) and groups[-1][0][1].dtype in (torch.float32, torch.float64)
    buckets = [
        _lay_out(index, group, allocate, with_tail=carries_tail and index == len(groups) - 1)
        for index, group in enumerate(groups)
    ]
    if not carries_tail:  # sums of counts are not exact in a narrow type
        tail = allocate(NUM_LANES, torch.float32)
        buckets.append(Bucket(len(buckets), [], [], tail, [], tail))
    return buckets


def layout_of(buckets: Sequence[Bucket]) -> list[list[str]]:
    """The names in each bucket: what a checkpoint keeps, since a ring's bits depend on it."""
    return [list(bucket.names) for bucket in buckets]


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device


def _span(parameter: Tensor) -> int:
    """Elements that the parameter takes up, padding included."""
    step = max(1, ALIGNMENT_BYTES // parameter.element_size())
    return -(-parameter.numel() // step) * step


def _lay_out(index: int, group: list[tuple[str, nn.Parameter]], allocate: Allocate, *, with_tail: bool) -> Bucket:
    names, parameters = [name for name, _ in group], [parameter for _, parameter in group]
    numel = sum(_span(parameter) for parameter in parameters)
    flat = allocate(numel + (NUM_LANES if with_tail else 0), parameters[0].dtype)
    views, start = [], 0
    for parameter in parameters:
        views.append(_view(flat, start, parameter))
        start += _span(parameter)
    return Bucket(index, names, parameters, flat, views, flat[numel:] if with_tail else None)


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
