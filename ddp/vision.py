"""Imports torchvision beside any build of torch, also where its C++ library cannot be loaded.

torchvision's package for Linux is built for CUDA. Beside a CPU build of torch its library cannot be loaded, so the
operators that it would define do not exist, and the import fails where shape functions are registered for two of them:
`operator torchvision::nms does not exist`. Only detection models ever call these operators. Declaring the two schemas
is enough for everything else: models, data sets and transforms.

torchvision tries to load its library before it imports the module that registers shape functions. A finder sees that
module's turn, and declares what is still missing.

`scripts/_setup.sh` puts this file into its environment, where every interpreter calls `install` as it starts: a plain
`import torchvision` works there, in any program. So nothing is imported here before it is needed.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType

REGISTERS_SHAPES = "torchvision._meta_registrations"
SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
declared: list[object] = []  # the declarations live as long as the object that made them


class Finder:
    """Finds no module itself. Python asks it before every import, and so it learns what is imported next."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Declares the missing operators before the module that needs them is found by another finder."""
        if name == REGISTERS_SHAPES:
            declare_missing()


def install() -> None:
    """Lets every later `import torchvision` of this process succeed."""
    sys.meta_path.insert(0, Finder)


def declare_missing() -> None:
    """Declares those operators that are not declared yet."""
    import torch

    missing = [schema for name, schema in SCHEMAS.items() if not hasattr(torch.ops.torchvision, name)]
    if missing:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in missing:
            library.define(schema)
        declared.append(library)


@functools.cache
def torchvision() -> ModuleType:
    """Returns the imported `torchvision` package.

    Raises:
        ConfigError: torchvision is not installed, or does not fit the installed torch.
    """
    import torch

    from ddp.errors import ConfigError

    install()
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
