"""The end of backward, found from the outputs.

A hook on a parameter says that one gradient is there. It cannot say that backward is over: a callback that it
queues with the autograd engine belongs to the innermost running backward, and under re-entrant activation
checkpointing that is a small backward inside the real one. Hooks on the *outputs* of forward run first and in the
outermost backward; a callback queued there runs when the whole of it has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


def watch_backward(outputs: Any, begin: Callable[[], bool], end: Callable[[], None]) -> None:
    """Calls `begin` when a backward reaches any of the outputs; `end` after that backward, if `begin` returned True.

    Args:
        outputs: what forward returned: a tensor, or tensors anywhere in tuples, lists, dicts, dataclasses.
        begin: called once per output tensor that backward reaches.
        end: called once per `begin` that returned True.
    """

    def hook(_gradient: Tensor) -> None:
        if begin():
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def attach(tensor: Tensor) -> Tensor:
        if tensor.grad_fn is not None:  # a hook on a leaf would stay for ever
            tensor.register_hook(hook)
        return tensor

    if isinstance(outputs, Tensor):
        attach(outputs)
    else:
        apply_to_collection(outputs, Tensor, attach)
