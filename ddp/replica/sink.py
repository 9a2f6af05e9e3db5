"""The end of backward, found from the outputs.

A hook on a parameter says that one gradient is there. It cannot say that backward is over: a callback that it
queues with the autograd engine belongs to the innermost running backward, and under re-entrant activation
checkpointing that is a small backward inside the real one. Hooks on the *outputs* of forward run first and in the
outermost backward; a callback queued there runs when the whole of it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def watch_backward(outputs: Any, begin: Callable[[], bool], end: Callable[[], None]) -> None:
    """Calls `begin` when a backward reaches any of the outputs; `end` after that backward, if `begin` returned True.

    Args:
        outputs: what forward returned (see `tensors_in`).
        begin: called once per output tensor that backward reaches.
        end: called once per `begin` that returned True.
    """

    def hook(_gradient: Tensor) -> None:
        if begin():
            torch.autograd.Variable._execution_engine.queue_callback(end)

    for tensor in tensors_in(outputs):
        if tensor.grad_fn is not None:  # a hook on a leaf would stay for ever
            tensor.register_hook(hook)


def tensors_in(value: Any, *, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor inside: in mappings, sequences, dataclasses, and the attributes of other objects."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        for part in _parts(value):
            yield from tensors_in(part, seen=seen)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    return [*slots, *getattr(value, "__dict__", {}).values()]
