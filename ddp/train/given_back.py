"""Gives back what a fit changes of its process, so that the program around it goes on as if there had been no fit.

    generators       torch's for the CPU and each GPU, Python's and NumPy's: every step seeds them (`streams.py`)
    modes            training or evaluation, of each layer

All else that a fit changes for a while has a block of its own, which gives it back: the handlers of signals
(`stopping.py`), the factor of a schedule in learning rates (`optim/schedules.py`), the modes during an evaluation
(`evaluate.py`), warnings and compilation during the first look (`first_look.py`). An evaluation draws nothing itself.
What a user's model or task draws there, it draws as in a loop by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ddp.streams import preserved


@contextmanager
def given_back(model: nn.Module) -> Iterator[None]:
    """Gives back at the end of the block what a fit of the model changes, also after an error."""
    with _generators_kept(), modes_kept(model):
        yield


@contextmanager
def _generators_kept() -> Iterator[None]:
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    with preserved():
        try:
            yield
        finally:
            if on_gpus:
                torch.cuda.set_rng_state_all(on_gpus)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restores the mode of every layer at the end of the block."""
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
