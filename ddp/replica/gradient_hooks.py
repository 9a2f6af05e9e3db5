"""Observers of parameters, torch's hooks, by which autograd tells a replica of every gradient that is ready.

Parameters hold their observers, and may live longer than the replica: the model may be used by itself, or in another
replica. So observers hold the replica weakly, and are removed when it is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor, nn

from ddp.gradients.bucket import LARGE_BYTES
from ddp.replica.uncompiled import uncompiled

Observer = Callable[[Tensor], None]


class Listener(Protocol):
    """The methods of a replica that observers call."""

    def on_gradient(self, parameter: Tensor) -> None:
        """Notes that autograd has added to the parameter's gradient."""

    def on_large_gradient(self, parameter: Tensor) -> None:
        """Notes the same of a large gradient, which is worth a copy of its own."""


def listen(replica: Listener, parameters: Iterable[nn.Parameter]) -> None:
    """Lets autograd call the replica whenever it has added to the gradient of one of these parameters."""
    of_replica = weakref.ref(replica)

    @uncompiled
    def on_gradient(parameter: Tensor) -> None:
        if (listener := of_replica()) is not None:
            listener.on_gradient(parameter)

    @uncompiled
    def on_large_gradient(parameter: Tensor) -> None:
        if (listener := of_replica()) is not None:
            listener.on_large_gradient(parameter)

    handles = [
        _register(parameter, on_large_gradient if parameter.nbytes >= LARGE_BYTES else on_gradient)
        for parameter in parameters
        if _can_need_gradient(parameter)
    ]
    when_gone = weakref.finalize(replica, _remove, handles)
    when_gone.atexit = False  # at exit parameters go, too


def _register(parameter: nn.Parameter, observer: Observer) -> Any:
    """Lets autograd call the observer after it has added to the parameter's gradient. Returns the handle.

    torch refuses a parameter that is frozen at the moment, but it may be unfrozen later.
    """
    needs_gradient = parameter.requires_grad
    try:
        return parameter.requires_grad_(True).register_post_accumulate_grad_hook(observer)
    finally:
        parameter.requires_grad_(needs_gradient)


def _can_need_gradient(parameter: nn.Parameter) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
