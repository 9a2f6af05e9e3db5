"""Random generators that belong to a data set, not to the process: found, and seeded for each sample like the others.

    self.rng = np.random.default_rng(0)         a generator of NumPy, `random` or torch, as an attribute, in a closure,
                                                or as a global of the module that uses it
    A.Compose([…], seed=0)                      an object with a method `set_random_seed`, as albumentations has

Every rank and every loader process has a copy of such a generator, which goes on from where the copy was made. So all
of them would draw the same numbers for different samples, and a resumed run others. Seeded by (seed, epoch, sample), a
sample draws the same wherever it is read.

Data sets are searched once in each process, before its first batch, and only in what user code can have made. Those
without such generators pay nothing for a sample. What is hidden in an extension's own memory is not found;
`source.py::fingerprint` notices it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from inspect import ismemberdescriptor
from itertools import islice
from pathlib import PurePath
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp.streams import preserved, seed_generators, stream_seed

_MOST, _MANY, _FEW = 50_000, 1_000, 8  # objects that are looked at; elements of a long container; and of those
_PLAIN = (str, bytes, bytearray, int, float, complex, type(None), Tensor, np.ndarray, np.generic, PurePath, ModuleType)
_KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_OF_THE_PROCESS = (torch.default_generator, random._inst, np.random.mtrand._rand)
_LIBRARIES = ("builtins", "abc", "typing", "collections", "functools", "torch", "torchvision", "numpy", "PIL", "ddp")
_32_BITS = 0xFFFF_FFFF


class Generators:
    """The process's generators, and those that can be reached from some objects.

    Args:
        roots: a data set and a collate function, say.
    """

    def __init__(self, *roots: Any) -> None:
        self._found = _found(roots)

    def seed(self, seed: int, *keys: int | str) -> None:
        """Seeds all of them by the seed of the run and these keys."""
        seed_generators(stream_seed(seed, *keys), device="cpu")
        for place, each in enumerate(self._found):
            _seed(each, stream_seed(seed, "own", place, *keys))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restores them at the end of the block, but for objects that can only be seeded."""
        states = [(each, _state(each)) for each in self._found if isinstance(each, _KINDS)]
        with preserved():
            try:
                yield
            finally:
                for each, state in states:
                    _restore(each, state)


def _seed(each: Any, value: int) -> None:
    if isinstance(each, np.random.Generator):
        each.bit_generator.state = type(each.bit_generator)(value).state
    elif isinstance(each, np.random.RandomState):
        each.seed(value & _32_BITS)
    elif isinstance(each, random.Random):
        each.seed(value)
    elif isinstance(each, torch.Generator):
        each.manual_seed(value)
    else:
        each.set_random_seed(value & _32_BITS)


def _state(each: Any) -> Any:
    if isinstance(each, np.random.Generator):
        return each.bit_generator.state
    if isinstance(each, random.Random):
        return each.getstate()
    return each.get_state()


def _restore(each: Any, state: Any) -> None:
    if isinstance(each, np.random.Generator):
        each.bit_generator.state = state
    elif isinstance(each, random.Random):
        each.setstate(state)
    else:
        each.set_state(state)


# -------------------------------------------------------------------------------------------------------- the search


def _found(roots: Iterable[Any]) -> list[Any]:
    """Returns the generators, in an order that is the same in every process."""
    found: list[Any] = []
    seen: dict[int, Any] = {}  # with the objects, so that no address is used twice
    ahead = deque(roots)
    while ahead and len(seen) < _MOST:
        each = ahead.popleft()
        if isinstance(each, (*_PLAIN, type)) or id(each) in seen:
            continue
        seen[id(each)] = each
        if _is_generator(each):
            found.append(each)
        else:
            with suppress(Exception):  # of an object that does not show what it has
                ahead.extend(_parts(each))
    return found


def _is_generator(each: Any) -> bool:
    if isinstance(each, _KINDS):
        return not isinstance(each, random.SystemRandom) and not any(each is other for other in _OF_THE_PROCESS)
    return callable(getattr(type(each), "set_random_seed", None))


def _parts(each: Any) -> Iterator[Any]:
    """Yields what an object holds, and what its functions use."""
    if isinstance(each, Mapping):
        yield from _some(each.values(), len(each))
    elif isinstance(each, (list, tuple, deque)):  # the order of a set differs between processes
        yield from _some(each, len(each))
    elif isinstance(each, partial):
        yield from (each.func, *each.args, *each.keywords.values())
    elif isinstance(each, (MethodType, BuiltinMethodType)):
        yield from (each.__self__, getattr(each, "__func__", None))
    elif isinstance(each, property):
        yield each.fget
    elif isinstance(each, FunctionType):
        yield from _used_by(each)
    else:
        yield from _of_class(type(each))
        yield from getattr(each, "__dict__", {}).values()
        slots = (slot for kind in type(each).__mro__ for slot in vars(kind).values() if ismemberdescriptor(slot))
        yield from (getattr(each, slot.__name__, None) for slot in slots)


def _some(values: Iterable[Any], length: int) -> Iterable[Any]:
    return values if length <= _MANY else islice(values, _FEW)  # a long container has samples, which are alike


def _of_class(kind: type) -> Iterator[Any]:
    """Yields the attributes and functions of a class of the user's own."""
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] not in _LIBRARIES:
            yield from (getattr(value, "__func__", value) for value in vars(each).values())


def _used_by(function: FunctionType) -> Iterator[Any]:
    """Yields what a function has bound; and of the globals that it names, generators and functions of its module."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty one: what it names is not bound yet, or not any more
            yield cell.cell_contents
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        is_neighbour = isinstance(value, FunctionType) and value.__module__ == function.__module__
        if value is not None and (is_neighbour or _is_generator(value)):
            yield value
