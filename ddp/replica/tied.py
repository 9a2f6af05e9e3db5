"""Finds tensors that lie in one memory, as after `b.weight.data = a.weight.data`.

torch updates such memory once for each parameter that lies in it, and so does a strategy that leaves parameters where
they are. One that moves them would untie them, and one that adds up differences would count each of them twice: it
refuses the model. A parameter that is registered under several names is one parameter everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp.errors import ConfigError


def check_untied(module: nn.Module, what: str, *, instead: str, buffers_alone: bool = False) -> None:
    """Raises ConfigError if a parameter of a module lies in the memory of another one, or a buffer in that of one.

    Args:
        what: the choice that would untie them.
        instead: the choice that keeps them tied.
        buffers_alone: parameters may be tied to parameters.
    """
    parameters, buffers = dict(module.named_parameters()), module.named_buffers()
    num_most = 1 if buffers_alone else 2
    for name, earlier in in_memory_of([*parameters.items(), *buffers]).items():
        if 1 <= (name in parameters) + (earlier in parameters) <= num_most:
            raise ConfigError(
                f"{what}: {name} lies in the memory of {earlier}, and would no longer follow it. Register one "
                f"nn.Parameter under both names, or clone() one of them; or take {instead}"
            )


def move(module: nn.Module, device: torch.device) -> nn.Module:
    """Returns a module that was moved to a device in place, so that an optimizer's parameters are still the module's.

    Raises:
        ConfigError: torch moves each tensor by itself, and some share memory.
    """
    if any(tensor.device != device for tensor in (*module.parameters(), *module.buffers())):
        check_untied(module, f"a model that moves to {device}", instead=f"a model that is on {device} already")
    return module.to(device)


def in_memory_of(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Returns, by the name of each tensor that has bytes in common with an earlier one, the name of that one.

    Addresses decide, because tensors of one storage may lie side by side, and two storages in one memory. An object
    that occurs twice counts once.
    """
    objects = {id(tensor): (name, tensor) for name, tensor in reversed(list(named)) if _has_address(tensor)}
    names, tensors = zip(*reversed(objects.values()), strict=True) if objects else ((), ())
    places = [_place(tensor) for tensor in tensors]
    found, reaching = dict[int, int](), list[int]()  # those that may reach to where the next one begins
    for number in sorted(range(len(places)), key=lambda number: tensors[number].data_ptr()):
        reaching = [each for each in reaching if np.may_share_memory(places[each], places[number])]
        for other in reaching:
            if tensors[other].device == tensors[number].device and np.shares_memory(places[other], places[number]):
                first, later = sorted((other, number))
                found[later] = min(first, found.get(later, first))
        reaching.append(number)
    return {names[later]: names[first] for later, first in sorted(found.items())}


def _has_address(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _place(tensor: Tensor) -> Any:
    """Returns an array where the tensor is, of which NumPy compares the addresses and reads nothing."""
    size = tensor.element_size()
    strides = tuple(stride * size for stride in tensor.stride())
    interface = {"version": 3, "data": (tensor.data_ptr(), True), "shape": tuple(tensor.shape), "strides": strides}
    return np.asarray(SimpleNamespace(__array_interface__={**interface, "typestr": f"|V{size}"}))
