"""Builds a model of the user's own, for the command line and for the benchmark of training steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ddp.errors import ConfigError
from ddp.run.settings.address import called, from_address


def own_model(address: str, arguments: Mapping[str, Any], *, key: str, folder: str | Path) -> nn.Module:
    """Returns what the class or function MODULE:NAME makes of the arguments.

    Args:
        key: the setting that holds the address, for errors.
        folder: searched after everything else on `sys.path`.

    Raises:
        ConfigError: it cannot be imported or called, or what it returns is no model, or has parameters without a size.
    """
    found = from_address(address, key=key, folder=folder)
    model = called(found, arguments, address=address, key=key)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ConfigError(f"{key}={address}: returned an object of type {kind}; return a torch.nn.Module")
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise ConfigError(f"{key}={address}: {lazy[0]} has no size yet; give it one, because replicas begin equal")
    return model
