"""Optimizers for large batches, and learning-rate schedules; each is imported where it is first named."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp.optim.layerwise import parameter_groups as parameter_groups
    from ddp.optim.schedules import TorchSchedule as TorchSchedule
    from ddp.optim.schedules import constant as constant
    from ddp.optim.schedules import cosine as cosine
    from ddp.optim.schedules import polynomial as polynomial
    from ddp.optim.schedules import scaled_rate as scaled_rate
    from ddp.optim.schedules import step as step
    from ddp.optim.schedules import with_warmup as with_warmup
    from ddp.optim.schedules import wsd as wsd
    from ddp.optim.trust_ratio import LAMB as LAMB
    from ddp.optim.trust_ratio import LARC as LARC
    from ddp.optim.trust_ratio import LARS as LARS

_NAMES = {
    "layerwise": "parameter_groups",
    "schedules": "TorchSchedule constant cosine polynomial scaled_rate step with_warmup wsd",
    "trust_ratio": "LAMB LARC LARS",
}
_MODULES = {name: f"ddp.optim.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ddp.optim' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
