"""A small convolutional network for small images: digits of 8×8 or 28×28, CIFAR's 32×32.

    [n, channels, s, s]
      │  3×3 convolution to `width` channels, ReLU
      │  while s ≥ 8:  3×3 convolution to twice the channels (4 · width at most), ReLU, 2×2 max-pooling, s → s/2
      ▼
    [n, c, s, s], s of 4 … 7  →  dropout → linear → ReLU → dropout → linear → [n, num_classes]

No BatchNorm: its statistics would depend on how a batch is split among workers, so that training on several workers
would not equal training on one. At width 32 and 8×8 images it has 151 k parameters.
"""

from __future__ import annotations

from torch import Tensor, nn

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
