"""A GPT: a decoder that reads tokens from left to right and guesses the next one at every position.

    tokens [n, time]
       │  token embedding + position embedding
       ▼
    x [n, time, width] ──┬──────────────────┬─►  x + attention(norm(x))     looks at earlier positions
                         └─ depth times ────┴─►  x + mlp(norm(x))           thinks about each position alone
       │  norm, then the token embedding once more, transposed
       ▼
    logits [n, time, vocabulary]

Parameters: about 12 · depth · width², and (vocabulary + context) · width for the embeddings. Forward and backward cost
some 6 floating-point operations per parameter and token, plus 12 · depth · width · time for attention.

Source: Radford et al. 2019 (GPT-2), whose pre-norm blocks and initialisation these are; Press & Wolf 2016 for the tied
embedding. Biases are left out of all linear layers and norms: they cost kernels and bring nothing measurable.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from ddp.errors import ConfigError


class GPT(nn.Module):
    """Next-token logits for a batch of token sequences.

    Initialisation, by torch's global generator: every matrix and embedding is normal with standard deviation 0.02, but
    the two projections back into the residual stream have 0.02 / √(2 · depth), so that the stream's variance does not
    grow with depth. Norm gains are 1.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        context: the longest sequence, in tokens.
        width: length of a position's vector; a multiple of `heads`.
        depth: number of blocks.
        heads: number of attention heads.
        dropout: probability with which an entry of the embedding, of the attention weights and of what a block adds
            is dropped.

    Raises:
        ConfigError: `width` is not a multiple of `heads`.
    """

    def __init__(
        self, *, vocab_size: int = 256, context: int, width: int, depth: int, heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"width={width} is not a multiple of heads={heads}; choose one that is")
        self.context = context
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width=width, heads=heads, dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)
        self._initialise(depth)

    def _initialise(self, depth: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_stream = name.endswith("project.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if into_stream else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [n, time, vocabulary] for tokens [n, time], time ≤ context.

        Raises:
            ValueError: the sequences are longer than the context.
        """
        time = tokens.shape[1]
        if time > self.context:
            raise ValueError(f"sequences of {time} tokens, but this GPT was built with context={self.context}")
        x = self.tokens(tokens) + self.positions.weight[:time]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)  # the head is the embedding, so both learn from each token


class Block(nn.Module):
    """One layer: attention, then an MLP, each normalised on the way in and added to the stream on the way out."""

    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width=width, heads=heads, dropout=dropout)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp = FeedForward(width=width, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal self-attention: each position takes a weighted mean over itself and the positions before it, per head."""

    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        n, time, width = x.shape
        qkv = self.query_key_value(x).view(n, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [n, heads, time, width / heads]
        weights_dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=weights_dropout)
        return self.dropout(self.project(mixed.transpose(1, 2).reshape(n, time, width)))


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, *, width: int, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.project = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.project(F.gelu(self.expand(x))))
