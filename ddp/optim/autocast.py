"""Mixed precision: matrix products in bfloat16 or float16, everything that adds up in float32.

With bf16 and fp16, parameters, gradients, their sum over ranks and the optimizer stay float32. bfloat16 has float32's
range, so the loss needs no scaling (Kalamkar et al., arXiv 1905.12322). float16 has more digits and a small range, so
it does (`loss_scale.py`). With bf16_pure, parameters and gradients are bfloat16, too (`master.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ddp.setting import Precision

NARROW = {"bf16": torch.bfloat16, "bf16_pure": torch.bfloat16, "fp16": torch.float16}


def forward_precision(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Returns the context for forward and loss; backward runs outside it, in the types that forward chose."""
    if precision in NARROW:
        return torch.autocast(device.type, dtype=NARROW[precision])
    return nullcontext()
