"""Mixed precision: matrix products in bfloat16 or float16, everything that adds up in float32.

With bf16 and fp16, parameters, gradients, their sum over ranks and the optimizer stay float32. bfloat16 has float32's
range, so the loss needs no scaling (Kalamkar et al., arXiv 1905.12322). float16 has more digits and a small range, so
it does (`precision.py`). With bf16_pure, parameters and gradients are bfloat16, too (`master.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from ddp.setting import Precision

NARROW = {"bf16": torch.bfloat16, "bf16_pure": torch.bfloat16, "fp16": torch.float16}


def forward_precision(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Returns the context for forward and loss; backward runs outside it, in the types that forward chose."""
    if precision in NARROW:
        return torch.autocast(device.type, dtype=NARROW[precision])
    return nullcontext()


# --- Loss scale ------------------------------------------------------------------------------------------------------
#
# Dynamic loss scale: keeps small gradients in float16's range.
#
# float16 has no number below 6e-8, and gradients are often smaller. So the loss is multiplied by a scale before
# backward, and gradients are divided by it together with the global count, in one division (`gradients/totals.py`).
#
#     a gradient is not finite     too large a scale: it is halved, and the step is repeated
#     GROW_AFTER good steps        it is doubled, to find the largest that works
#
# The scale is a power of two, so multiplying and dividing by it changes no digit. All ranks see the norm of the same
# mean gradient, so they change their scales alike, without a message.
#
# Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, sections 3.2 and 4.1.


FIRST, LARGEST, LEAST = 1 << 16, 1 << 24, 1
GROW_AFTER = 2000  # steps


class LossScale:
    """The factor on the loss.

    Attributes:
        value: a power of two.
        num_good: steps since it was changed.
    """

    def __init__(self) -> None:
        self.value, self.num_good = FIRST, 0

    def grow(self) -> None:
        """Notes a step whose gradients were finite."""
        self.num_good += 1
        if self.num_good >= GROW_AFTER:
            self.value, self.num_good = min(2 * self.value, LARGEST), 0

    def shrink(self) -> bool:
        """Notes gradients that were not finite. Returns False if the scale is as small as it gets."""
        if self.value <= LEAST:
            return False
        self.value, self.num_good = self.value // 2, 0
        return True

    def state_dict(self) -> dict[str, int]:
        """Returns the state for a checkpoint."""
        return {"value": self.value, "num_good": self.num_good}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from what `state_dict` returned."""
        self.value, self.num_good = state["value"], state["num_good"]
