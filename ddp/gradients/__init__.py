"""Gradients: the buckets that they live in, what a step must agree on, and hooks that send less than all of them.

A hook is imported where it is first named, because most programs need none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp.gradients.hook import DenseStart as DenseStart
    from ddp.gradients.hook import ErrorFeedback as ErrorFeedback
    from ddp.gradients.hook import Hook as Hook
    from ddp.gradients.hooks import PowerSGD as PowerSGD
    from ddp.gradients.hooks import RandomK as RandomK
    from ddp.gradients.hooks import Sign as Sign
    from ddp.gradients.hooks import TopK as TopK

_NAMES = {"hook": "DenseStart ErrorFeedback Hook", "hooks": "PowerSGD RandomK Sign TopK"}
_MODULES = {name: f"ddp.gradients.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ddp.gradients' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
