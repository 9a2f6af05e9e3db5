"""Optimizers for large batches, and learning-rate schedules; each is imported where it is first named."""

from typing import TYPE_CHECKING

from ddp import imported_on_use

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

_MODULES, __getattr__, __dir__ = imported_on_use(__name__, __file__)
__all__ = list(_MODULES)
