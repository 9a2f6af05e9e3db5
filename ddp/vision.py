"""Imports torchvision beside any build of torch.

torchvision's package for Linux is built for CUDA. Beside a CPU build of torch its C++ library cannot be loaded, so the
operators that it would define do not exist, and the import fails where shape functions are registered for two of them:
`operator torchvision::nms does not exist`. Only detection models ever call these operators. Declaring the two schemas
is enough for everything used here: models, data sets and transforms.

torchvision's own import tells whether they are missing: it is tried first, and only its failure leads to the remedy.

Read before: `data/digits.py`. Read next: `data/image_sets.py`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType

import torch

from ddp.errors import ConfigError

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[torch.library.Library] = []  # the declarations live as long as the object that made them


@functools.cache
def torchvision() -> ModuleType:
    """Returns the imported `torchvision` package.

    Raises:
        ConfigError: torchvision is not installed, or does not fit the installed torch.
    """
    try:
        return _import()
    except RuntimeError as error:  # torch raises it for a shape function of an operator that does not exist
        if "torchvision::" not in str(error):
            raise _unfit(error) from error
    _declare_missing_operators()
    try:
        return _import()
    except RuntimeError as error:
        raise _unfit(error) from error


def _import() -> ModuleType:
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"torchvision is needed for this data set or model ({error}); pip install torchvision"
        ) from error
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # half imported: the next attempt starts afresh
        raise


def _declare_missing_operators() -> None:
    missing = [schema for name, schema in _SCHEMAS.items() if not hasattr(torch.ops.torchvision, name)]
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in missing:
        library.define(schema)
    _declared.append(library)


def _unfit(error: RuntimeError) -> ConfigError:
    return ConfigError(
        f"torchvision does not fit torch {torch.__version__}: {error}; install the torchvision of the same release"
    )
