"""Imports torchvision, beside any build of torch."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

from ddp import torchvision_operators
from ddp.errors import ConfigError


@functools.cache
def torchvision() -> ModuleType:
    """Returns the imported `torchvision` package.

    Raises:
        ConfigError: torchvision is not installed, or does not fit the installed torch.
    """
    torchvision_operators.install()
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"torchvision is needed for this data set or model ({error}); pip install torchvision"
        ) from error
    except RuntimeError as error:
        raise ConfigError(
            f"torchvision does not fit torch {torch.__version__}: {error}; install the torchvision of the same release"
        ) from error
