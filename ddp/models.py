"""Models to train: a multilayer perceptron, a small convolutional network, torchvision's residual networks, a GPT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp.errors import ConfigError
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


# --- A GPT: a decoder that reads tokens from left to right and predicts the next one at every position ----------------
#
#     tokens [n, time]
#        │  token embedding
#        ▼
#     x [n, time, width] ──┬──────────────────┬─►  x + attention(norm(x))     looks at this position and earlier ones
#                          └─ depth times ────┴─►  x + mlp(norm(x))           thinks about each position alone
#        │  norm, then the token embedding once more, transposed
#        ▼
#     logits [n, time, vocabulary]
#
# Positions enter by rotation: in each head, query and key of position t are turned by angles proportional to t, so that
# their product depends on how far apart two positions are, not on where they are. This takes no weights.
#
# Parameters: 12 · depth · width² + vocabulary · width. Forward and backward cost some 6 floating-point operations per
# parameter and token, and 6 · depth · width · time more for attention.
#
# Source: Radford et al. 2019 (GPT-2), whose blocks and whose smaller projections into the stream these are; Press &
# Wolf 2016 for the tied embedding; Su et al. 2021 for the rotation; no biases, as in PaLM (Chowdhery et al. 2022).


_LONGEST_WAVE = 10_000.0  # positions, about: the slowest angle's period over 2π


class GPT(nn.Module):
    """Computes next-token logits for a batch of token sequences.

    Initialisation, by torch's global generator. Matrices are normal with standard deviation 1 / √fan_in, which keeps
    the size of activations at any width. A block's two projections back into the stream have a √(2 · depth) times
    smaller one, so that the stream does not grow with depth. The embedding has 0.05: large enough to matter next to the
    blocks, small enough for all tokens to begin about equally likely. Norm gains are 1.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        context: the longest sequence, in tokens.
        width: length of a position's vector; `heads` times an even number.
        depth: number of blocks.
        heads: number of attention heads.
        dropout: probability with which an entry of the embedding, of the attention weights and of a block's output
            is dropped.

    Raises:
        ConfigError: `width` is not `heads` times an even number.
    """

    def __init__(
        self, *, vocab_size: int = 256, context: int, width: int, depth: int, heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ConfigError(f"width={width} cannot be shared by heads={heads}; choose a multiple of {2 * heads}")
        self.context = context
        self.head_width = width // heads
        self.embedding = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width=width, heads=heads, dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)
        self._initialise(depth)

    def _initialise(self, depth: int) -> None:
        nn.init.normal_(self.embedding.weight, std=0.05)
        for name, module in self.blocks.named_modules():
            if isinstance(module, nn.Linear):
                into_stream = name.endswith("project")
                shrink = math.sqrt(2 * depth) if into_stream else 1.0
                nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features) / shrink)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits [n, time, vocabulary] for tokens [n, time], time ≤ context.

        Raises:
            ValueError: the sequences are longer than the context.
        """
        time = tokens.shape[1]
        if time > self.context:
            raise ValueError(f"sequences of {time} tokens, but this GPT was built with context={self.context}")
        x = self.dropout(self.embedding(tokens))
        angles = rotary_angles(time, self.head_width, device=x.device)
        for block in self.blocks:
            x = block(x, angles)
        return F.linear(self.norm(x), self.embedding.weight)  # tied: the matrix that reads tokens also predicts them


@torch.no_grad()
def generate(model: GPT, prompt: Tensor, *, num_tokens: int, temperature: float = 1.0, seed: int = 0) -> Tensor:
    """Returns `num_tokens` tokens that continue a prompt, each drawn from the model's prediction after the last ones.

    Args:
        model: in evaluation mode.
        prompt: [time], one token or more.
        temperature: below 1, likely tokens are drawn even more often.
        seed: of the draws.
    """
    random = torch.Generator(prompt.device).manual_seed(seed)
    tokens = prompt
    for _ in range(num_tokens):
        logits = model(tokens[None, -model.context :])[0, -1]
        drawn = torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=random)
        tokens = torch.cat([tokens, drawn])
    return tokens[len(prompt) :]


class Block(nn.Module):
    """One layer: attention, then an MLP, each normalised on the way in and added to the stream on the way out."""

    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width=width, heads=heads, dropout=dropout)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp = FeedForward(width=width, dropout=dropout)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        seen: Tensor = self.attention(self.attention_norm(x), angles)
        x = x + seen
        thought: Tensor = self.mlp(self.mlp_norm(x))
        return x + thought


class Attention(nn.Module):
    """Causal self-attention: each position takes a weighted mean over itself and the positions before it, per head."""

    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        n, time, width = x.shape
        qkv: Tensor = self.query_key_value(x).view(n, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [n, heads, time, width / heads]
        query, key = rotate(query, angles), rotate(key, angles)
        weights_dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=weights_dropout)
        added: Tensor = self.dropout(self.project(mixed.transpose(1, 2).reshape(n, time, width)))
        return added


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, *, width: int, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.project = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.dropout(self.project(F.gelu(self.expand(x))))
        return added


def rotary_angles(time: int, head_width: int, *, device: torch.device | None = None) -> Tensor:
    """Returns the angle by which pair i of a head's numbers is turned at position t, [time, pairs].

    The angle is t / 10000^(2i / head_width). It is computed in each forward (some microseconds) and in float64, so that
    there is no buffer to synchronise.
    """
    pair = torch.arange(head_width // 2, dtype=torch.float64, device=device)
    position = torch.arange(time, dtype=torch.float64, device=device)
    return torch.outer(position, _LONGEST_WAVE ** (-2 * pair / head_width))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + head_width / 2]) of x [n, heads, time, head_width] by its angle."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
