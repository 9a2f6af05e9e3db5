"""Parameter groups: which parameters decay, and which get a trust ratio.

Biases and the weights of normalisation layers are left out of both. To decay them towards zero makes no function
smoother; and their norms say little about the step that they can take, so that ratios made of them hurt (LARS at batch
8,192: 74.3 % with, 76.1 % without them, PaddlePaddle/Paddle#26733). They are found by their shape: they have one
dimension. What else is to be left out, such as position embeddings, is given by name.

Only names and shapes are read, so it works for a model on the meta device.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ddp.errors import ConfigError


def parameter_groups(
    module: nn.Module, *, weight_decay: float | None, exclude: Sequence[str] = (), **of_excluded: Any
) -> list[dict[str, Any]]:
    """Returns the parameters that need a gradient as groups for an optimizer: those that decay, then those left out.

    Args:
        weight_decay: of the first group; None: the optimizer's own.
        exclude: names of parameters to be left out, too, such as "position.weight" or "encoder.embed.*".
        of_excluded: further settings of the group that is left out.

    Raises:
        ConfigError: a name in `exclude` is no parameter's.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            some = ", ".join(name for name, _ in named[:5])
            raise ConfigError(
                f"optim.exclude: no trained parameter is called {pattern!r}; names are like {some}, and * stands for "
                "any characters"
            )
    is_out = [p.dim() <= 1 or any(fnmatchcase(name, pattern) for pattern in exclude) for name, p in named]
    decaying = [parameter for (_, parameter), out in zip(named, is_out, strict=True) if not out]
    excluded = [parameter for (_, parameter), out in zip(named, is_out, strict=True) if out]
    of_decaying = {} if weight_decay is None else {"weight_decay": weight_decay}
    groups = [
        {"params": decaying, **of_decaying},
        {"params": excluded, "weight_decay": 0.0, **of_excluded},
    ]
    return [group for group in groups if group["params"]]
