"""A multilayer perceptron: the smallest model that shows everything, and the first one to debug with.

    [n, …] → flatten → [linear → ReLU] for each hidden width → linear → [n, num_classes]

It has Σ (fan_in + 1) · fan_out parameters: 51 k for 8×8 images, 235 k for 28×28.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Computes class scores from inputs of any shape.

    Initialisation is torch's for `nn.Linear` (uniform within ±1/√fan_in), drawn from torch's global generator.

    Args:
        in_features: numbers per sample, whatever their shape.
        hidden: widths of the hidden layers; empty makes a linear classifier.
        num_classes: number of scores.
    """

    def __init__(self, *, in_features: int, hidden: Sequence[int] = (256, 128), num_classes: int) -> None:
        super().__init__()
        widths = [in_features, *hidden]
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        self.layers = nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Returns scores [n, num_classes] for x [n, …] with `in_features` numbers per sample."""
        scores: Tensor = self.layers(x)
        return scores
