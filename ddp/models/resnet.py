"""torchvision's residual networks, with a stem for small images.

    stem for photographs         7×7 convolution, stride 2 → 3×3 max-pooling, stride 2       224 px → 56 px
    stem for small images        3×3 convolution, stride 1                                    32 px → 32 px

The first would leave one pixel of a 32-pixel image after the last stage; the second is the CIFAR stem of the paper
(He et al. 2015, section 4.2) on the ImageNet network's stages. Parameters: 11.2 M, 21.3 M and 23.5 M for ten classes.

These networks have BatchNorm. Under data parallelism each replica normalises by its own share of the batch, so results
depend (slightly) on the number of workers; statistics are synchronised before evaluation and checkpoints.
"""

from __future__ import annotations

from torch import nn

from ddp.vision import torchvision


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
