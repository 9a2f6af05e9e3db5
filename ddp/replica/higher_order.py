"""Gradients of gradients: `loss.backward(create_graph=True)`.

Then `p.grad` is part of a graph, and must stay out of its bucket: an all-reduce in place would change what the graph
has saved. Its value becomes the mean over ranks; its derivative stays this rank's own,

    mean gradient  ḡ = ¹⁄w Σ gᵣ(θ)          a loss f(ḡ), the same on every rank
    ∂f/∂θ = ¹⁄w Σ f′(ḡ) ∂gᵣ/∂θ              rank r computes f′(ḡ) ∂gᵣ/∂θ; the next backward's reduction averages them

so a second backward, through the gradients, is watched like one through the outputs, and its result is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ddp.gradients.bucket import Slot
from ddp.replica.autograd import watch_backward


class _WithValue(torch.autograd.Function):
    """Puts another value in the same place of the graph."""

    @staticmethod
    def forward(_context: Any, _gradient: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def hand_out_differentiable(slots: Iterable[Slot], begin: Callable[[], bool], end: Callable[[], None]) -> None:
    """Gives every gradient the mean's value, out of place, and watches backwards that go through them."""
    for slot in slots:
        gradient = slot.parameter.grad
        if gradient is not None and slot.view is not None and gradient is not slot.view:
            with torch.enable_grad():
                slot.parameter.grad = _WithValue.apply(gradient, slot.view)  # type: ignore[no-untyped-call]
            watch_backward(slot.parameter.grad, begin, end)
