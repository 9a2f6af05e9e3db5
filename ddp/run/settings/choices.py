"""All choices of the groups of settings: what each is, its settings, and how it is made of them (`groups.py`).

    optim       a function of `groups`, which makes parameter groups        → torch.optim.Optimizer

Nothing here imports torch before a component is made, so that `--help` is there at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from ddp.errors import ConfigError
from ddp.run.settings.groups import choice
from ddp.setting import Bounds

if TYPE_CHECKING:
    from torch.optim import Optimizer

POSITIVE = Bounds(above=0)
SHARE = Bounds(at_least=0, below=1)
NO_ARGS: dict[str, Any] = {}

# ------------------------------------------------------------------------------------------------------- optimizers

Groups = Callable[..., Any]
"""`ddp/optim/groups.py::parameter_groups` of the model: takes the weight decay, and what else the excluded have."""


@choice("optim", "sgd", "stochastic gradient descent with momentum", lr=0.05, weight_decay=5e-4)
def sgd(
    groups: Groups,
    *,
    lr: float,
    weight_decay: float | None,
    momentum: Annotated[float, SHARE, "share of the last update that is carried on"] = 0.9,
    nesterov: Annotated[bool, "take the gradient's step from where momentum leads to (Nesterov)"] = True,
) -> Optimizer:
    from torch.optim import SGD

    return SGD(groups(weight_decay=weight_decay), lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)


@choice("optim", "adamw", "Adam with weight decay apart from the gradient", lr=4e-3, weight_decay=0.01)
@choice("optim", "adam", "Adam; weight decay is added to the gradient", lr=1e-3, weight_decay=0.0)
def adam(
    groups: Groups,
    *,
    name: str,
    lr: float,
    weight_decay: float | None,
    beta1: Annotated[float, SHARE, "decay of the running mean of gradients, per step"] = 0.9,
    beta2: Annotated[float, SHARE, "decay of the running mean of squared gradients, per step"] = 0.999,
    eps: Annotated[float, POSITIVE, "added to the root of the mean squared gradient before the division by it"] = 1e-8,
) -> Optimizer:
    from torch.optim import Adam, AdamW

    kind = AdamW if name == "adamw" else Adam
    return kind(groups(weight_decay=weight_decay), lr=lr, betas=(beta1, beta2), eps=eps)


@choice("optim", "lamb", "Adam whose rate follows the size of each tensor, for large batches", lr=0.01)
@choice("optim", "larc", "LARS whose rate is never above lr", lr=0.2, preset="apex")
@choice("optim", "lars", "momentum whose rate follows the size of each tensor, for large batches", lr=4.0)
def layerwise(
    groups: Groups,
    *,
    name: str,
    lr: float,
    weight_decay: float | None = None,
    preset: Annotated[str, "paper or program whose choices hold: docs/large-batches.md"] = "paper",
    args: Annotated[
        dict[str, Any], "choices other than the preset's, such as optim.args.bias_correction=false"
    ] = NO_ARGS,
) -> Optimizer:
    from ddp.optim import LAMB, LARC, LARS

    kinds: dict[str, Callable[..., Optimizer]] = {"lars": LARS, "larc": LARC, "lamb": LAMB}
    parameters = groups(weight_decay=weight_decay, **({} if preset == "nvlamb" else {"adapt": "never"}))
    for key in ("lr", "weight_decay", "preset"):
        if key in args:
            raise ConfigError(f"optim.args.{key}={args[key]}: is a setting of its own; set optim.{key}")
    try:
        return kinds[name](parameters, lr, preset=preset, **args)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"optim={name}: {error}") from error
