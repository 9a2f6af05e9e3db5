"""Gradients: the buckets that they live in, what a step must agree on, and hooks that send less than all of them.

A hook is imported where it is first named, because most programs need none.
"""

from typing import TYPE_CHECKING

from ddp import imported_on_use

if TYPE_CHECKING:
    from ddp.gradients.hook import DenseStart as DenseStart
    from ddp.gradients.hook import ErrorFeedback as ErrorFeedback
    from ddp.gradients.hook import Hook as Hook
    from ddp.gradients.hooks import PowerSGD as PowerSGD
    from ddp.gradients.hooks import RandomK as RandomK
    from ddp.gradients.hooks import Sign as Sign
    from ddp.gradients.hooks import TopK as TopK

_MODULES, __getattr__, __dir__ = imported_on_use(__name__, __file__)
__all__ = list(_MODULES)
