"""Models for images: a multilayer perceptron, a small convolutional network, and torchvision's residual networks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from ddp.vision import torchvision

# --- A multilayer perceptron -----------------------------------------------------------------------------------------
#
#     [n, …] → flatten → [linear → ReLU] for each hidden width → linear → [n, num_classes]
#
# It has Σ (fan_in + 1) · fan_out parameters: 51 k for 8×8 images, 235 k for 28×28.


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


# --- A convolutional network for small images ------------------------------------------------------------------------
#
# Digits of 8×8 or 28×28, CIFAR's 32×32.
#
#     [n, channels, s, s]
#       │  3×3 convolution to `width` channels, ReLU
#       │  while s ≥ 8:  3×3 convolution to twice the channels (4 · width at most), ReLU, 2×2 max-pooling, s → s/2
#       ▼
#     [n, c, s, s], s of 4 … 7  →  dropout → linear → ReLU → dropout → linear → [n, num_classes]
#
# No BatchNorm: its statistics would depend on how a batch is split among workers, so that training on several workers
# would not equal training on one. At width 32 and 8×8 images it has 151 k parameters.


_SMALLEST_POOLED = 8
_HEAD_WIDTH = 128


class CNN(nn.Module):
    """Computes class scores from square images.

    Initialisation is torch's for `nn.Conv2d` and `nn.Linear` (uniform within ±1/√fan_in), drawn from torch's global
    generator.

    Args:
        in_channels: 1 for grey, 3 for colour.
        image_size: height and width of the images, in pixels.
        num_classes: number of scores.
        width: channels of the first convolution.
        dropout: probability with which an input of the two last layers is dropped.
    """

    def __init__(
        self, *, in_channels: int, image_size: int, num_classes: int, width: int = 32, dropout: float = 0.1
    ) -> None:
        super().__init__()
        layers = [*_convolution(in_channels, width)]
        channels, size = width, image_size
        while size >= _SMALLEST_POOLED:
            wider = min(2 * channels, 4 * width)
            layers += [*_convolution(channels, wider), nn.MaxPool2d(2)]
            channels, size = wider, size // 2
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(channels * size * size, _HEAD_WIDTH),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(_HEAD_WIDTH, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Returns scores [n, num_classes] for images [n, in_channels, image_size, image_size]."""
        scores: Tensor = self.head(self.features(images))
        return scores


def _convolution(in_channels: int, out_channels: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1), nn.ReLU()


# --- torchvision's residual networks ---------------------------------------------------------------------------------
#
#     stem for photographs         7×7 convolution, stride 2 → 3×3 max-pooling, stride 2       224 px → 56 px
#     stem for small images        3×3 convolution, stride 1                                    32 px → 32 px
#
# The first would leave one pixel of a 32-pixel image after the last stage; the second is the CIFAR stem of the paper
# (He et al. 2015, section 4.2) on the ImageNet network's stages. Parameters: 11.2 M, 21.3 M and 23.5 M for ten classes.
#
# These networks have BatchNorm. Under data parallelism each replica normalises by its own share of the batch, so
# results depend (slightly) on the number of workers; statistics are synchronised before evaluation and checkpoints.


def resnet(name: str = "resnet18", *, num_classes: int, small_images: bool, in_channels: int = 3) -> nn.Module:
    """Returns a residual network with fresh weights: images [n, in_channels, h, w] to scores [n, num_classes].

    Initialisation is torchvision's (Kaiming normal by fan-out for convolutions), drawn from torch's global generator.

    Args:
        name: "resnet18", "resnet34" or "resnet50".
        num_classes: number of scores.
        small_images: use the stem for images of some 32 pixels.
        in_channels: 1 for grey, 3 for colour.

    Raises:
        ConfigError: torchvision is missing.
    """
    model: nn.Module = getattr(torchvision().models, name)(weights=None, num_classes=num_classes)
    if small_images:
        stem = nn.Conv2d(in_channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
        model.maxpool = nn.Identity()
    else:
        stem = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    model.conv1 = stem
    return model
