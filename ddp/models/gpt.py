"""A GPT: a decoder that reads tokens from left to right and predicts the next one at every position.

    tokens [n, time]
       │  token embedding
       ▼
    x [n, time, width] ──┬──────────────────┬─►  x + attention(norm(x))     looks at this position and earlier ones
                         └─ depth times ────┴─►  x + mlp(norm(x))           thinks about each position alone
       │  norm, then the token embedding once more, transposed
       ▼
    logits [n, time, vocabulary]

Positions enter by rotation: in each head, query and key of position t are turned by angles proportional to t, so that
their product depends on how far apart two positions are, not on where they are. This takes no weights.

Parameters: 12 · depth · width² + vocabulary · width. Forward and backward cost some 6 floating-point operations per
parameter and token, and 6 · depth · width · time more for attention.

Source: Radford et al. 2019 (GPT-2), whose blocks and whose smaller projections into the stream these are; Press & Wolf
2016 for the tied embedding; Su et al. 2021 for the rotation; no biases, as in PaLM (Chowdhery et al. 2022).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp.errors import ConfigError

_LONGEST_WAVE = 10_000.0  # positions, about: the slowest angle's period over 2π


class GPT(nn.Module):
    """Computes next-token logits for a batch of token sequences.

    Initialisation, by torch's global generator. Matrices are normal with standard deviation 1 / √fan_in, which keeps
    the size of activations at any width. A block's two projections back into the stream have a √(2 · depth) times
    smaller one, so that the stream does not grow with depth. The embedding has 0.05: large enough to matter beside the
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
        temperature: below 1 the likely tokens are drawn more often still.
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
