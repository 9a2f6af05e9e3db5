"""Fetches a batch of samples by index, with separate random numbers for each, in any process.

    (seed, epoch, indices)  →  for each: seed by (seed, epoch, index), read  →  seed by (seed, epoch, first), collate

The key of the random numbers travels with the indices. So a transform (torchvision's draw from the process's
generators) gives a sample the same crop in whichever process fetches it, while no two samples of an epoch share one.
Where an epoch has a sample several times, positions take the place of indices in the keys. The generators are restored
after each batch: loading leaves no trace in the randomness of the rest of the program.

Seeding takes 12 us, more than reading a small sample. Data that draw nothing are not seeded if they have a true
attribute `may_read_ahead`; lists, TensorDatasets and `WholeBatches` need none. Others cannot be detected, because a
sample may read a generator and leave no trace there, as with `torch.initial_seed()` or `fork_rng()`.

`WholeBatches` return a micro-batch at once, unless the samples are to be collated in another way.

Generators that belong to a data set are no part of the process's. They are found once, and seeded for each sample, too.

Where it pays, a thread fetches the next batches while this one trains (`ReadAhead`), and copies them to the GPU
(`DeviceCopies`).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from inspect import ismemberdescriptor
from itertools import islice
from pathlib import PurePath
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, TensorDataset, default_collate, get_worker_info

from ddp.data.loading.processes import packed
from ddp.data.samples import Collate, WholeBatches, as_it_is
from ddp.errors import UnreadableSample
from ddp.process import gpu
from ddp.process.clock import HelperThread
from ddp.process.streams import preserved, seed_generators, stream_seed

UNREADABLE = (UnreadableSample, OSError)
"""Errors of a data set that mean that one sample cannot be read."""


class Request(NamedTuple):
    """A batch to fetch. It is complete, so that loader processes hold no state."""

    seed: int
    epoch: int
    indices: tuple[int, ...]
    keys: Sequence[int]  # of the random numbers of each sample


class Fetched(NamedTuple):
    """A batch, or None, without the samples that could not be read, and why, for each of those."""

    batch: Any
    errors: list[tuple[int, str]]


class KeyedBatches(Dataset[Any]):
    """The data set as DataLoader sees it: it takes requests instead of indices, and returns finished batches.

    Args:
        dataset, collate: as in `TrainLoader`.
        tolerated: errors for which a sample is left out.

    Attributes:
        samples_draw, collate_draws, draws: they, or one of them, may draw from the process's generators, which are
            seeded for each.
        may_read_ahead: a thread may fetch batches during the training, and that may save time.
    """

    def __init__(self, dataset: Any, collate: Collate | None, *, tolerated: tuple[type[Exception], ...] = ()) -> None:
        self.dataset, self.collate, self.tolerated = dataset, collate or default_collate, tolerated
        self.at_once = isinstance(dataset, WholeBatches) and collate is None
        says_so, is_in_memory = getattr(dataset, "may_read_ahead", False), type(dataset) in (list, tuple, TensorDataset)
        self.samples_draw = not (says_so or is_in_memory or isinstance(dataset, WholeBatches))
        self.collate_draws = self.collate is not default_collate
        self.draws = self.samples_draw or self.collate_draws
        self.may_read_ahead = says_so and not self.draws
        self._generators: Generators | None = None  # of this process, once it has begun

    def __getitem__(self, request: Request) -> Any:
        """Returns a finished batch; in a loader process, packed."""
        if get_worker_info() is None:
            return self._finished(request)
        return packed(partial(self._finished, request), ((each, self.dataset[each]) for each in request.indices))

    def _finished(self, request: Request) -> Fetched:
        """Returns a finished batch; None of no samples."""
        if not request.indices:
            return Fetched(None, [])
        if self.at_once:
            with suppress(*self.tolerated):  # else sample by sample, to find the one that fails
                return Fetched(self.dataset.batch(request.indices), [])
        if not self.draws:
            return self._fetch(request, Generators())
        if self._generators is None:
            self._generators = Generators(*[self.dataset] * self.samples_draw, *[self.collate] * self.collate_draws)
        with self._generators.preserved():
            return self._fetch(request, self._generators)

    def _fetch(self, request: Request, generators: Generators) -> Fetched:
        samples, errors = [], []
        for index, key in zip(request.indices, request.keys, strict=True):
            if self.samples_draw:
                generators.seed(request.seed, "augmentation", request.epoch, key)
            try:
                samples.append(self.dataset[index])
            except self.tolerated as error:
                errors.append((index, " ".join(str(error).split())))
        if self.collate_draws:
            generators.seed(request.seed, "collation", request.epoch, request.keys[0])
        return Fetched(self.collate(samples) if samples else None, errors)


# --- Generators that belong to a data set: found, and seeded for each sample -----------------------------------------
#
#     self.rng = np.random.default_rng(0)       a generator of NumPy, `random` or torch, as an attribute, in a closure,
#                                               or as a global of the module that uses it
#     A.Compose([…], seed=0)                    an object with a method `set_random_seed`, as albumentations has
#
# Every rank and every loader process has a copy of such a generator, which continues from where the copy was made. So
# all of them would draw the same numbers for different samples, and a resumed run others. Seeded by (seed, epoch,
# sample), a sample draws the same wherever it is read.
#
# Data sets are searched once in each process, before its first batch, and only in what user code can have made. Those
# without such generators pay nothing for a sample. What is hidden in an extension's own memory is not found;
# `source.py::fingerprint` notices it.


_MOST, _MANY, _FEW = 50_000, 1_000, 8  # objects that are searched; elements of a long container; and of those
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
        restorers = [_restorer(each) for each in self._found if isinstance(each, _KINDS)]
        with preserved():
            try:
                yield
            finally:
                for restore in restorers:
                    restore()


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


def _restorer(each: Any) -> Callable[[], None]:
    """Returns a function that sets a generator back to its present state."""
    if isinstance(each, np.random.Generator):
        return partial(setattr, each.bit_generator, "state", each.bit_generator.state)
    if isinstance(each, random.Random):
        return partial(each.setstate, each.getstate())
    return partial(each.set_state, each.get_state())


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
    """Yields the objects that an object holds, and those that its functions use."""
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
    return values if length <= _MANY else islice(values, _FEW)  # a long container has samples, of one kind


def _of_class(kind: type) -> Iterator[Any]:
    """Yields the attributes and functions of a class of the user's own."""
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] not in _LIBRARIES:
            yield from (getattr(value, "__func__", value) for value in vars(each).values())


def _used_by(function: FunctionType) -> Iterator[Any]:
    """Yields a function's bound values; and of the globals that it names, generators and functions of its module."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell: its variable is not bound yet, or no longer
            yield cell.cell_contents
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        is_neighbour = isinstance(value, FunctionType) and value.__module__ == function.__module__
        if value is not None and (is_neighbour or _is_generator(value)):
            yield value


# --- Read ahead: a thread fetches the next batches while this one trains ----------------------------------------------
#
#     without     read ░░░░ compute ▓▓▓▓▓ read ░░░░ compute ▓▓▓▓▓ read ░░░░ …
#     with        read ░░░░ compute ▓▓▓▓▓ compute ▓▓▓▓▓ compute ▓▓▓▓▓ …
#                           read ░░░░     read ░░░░     read ░░░░            in the thread, two batches ahead at most
#
# Batches, their order and their random numbers are the same with and without the thread. `loader.py` says which data it
# may read.


Result = TypeVar("Result")

THREAD = "ddp-read-ahead"  # its name
AHEAD = 2  # batches
_GRACE_S = 60.0  # for the last read of an abandoned epoch
_END: Any = object()


class ReadAhead:
    """Yields batches that a thread fetches."""

    def __init__(self) -> None:
        self._pending: deque[Future[Any]] = deque()  # of the running thread
        self._thread: HelperThread | None = None  # while it runs

    def of(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of an iterator, which fetches one at each step. An earlier one must have ended."""
        fetch = partial(next, batches, _END)
        # Not in the thread, because loader processes, which it may start, are ended with the thread that starts them.
        first = fetch()
        if first is _END:
            return
        thread = self._thread = HelperThread(THREAD)
        pending = self._pending = deque(thread.submit(fetch) for _ in range(AHEAD))
        try:
            yield first
            while (batch := pending[0].result()) is not _END:
                pending.append(thread.submit(fetch))
                pending.popleft()
                yield batch
        finally:
            self._thread = None
            _cancel(pending)
            thread.end()

    def between(self, read: Callable[[], Result]) -> Result:
        """Reads something else between two batches, because data need not support two readers."""
        return read() if self._thread is None else self._thread.submit(read).result()

    def end(self, *, wait_s: float = _GRACE_S) -> None:
        """Ends reading ahead, and waits for the read that has begun, but not forever."""
        wait(_cancel(self._pending), timeout=wait_s)


def _cancel(pending: deque[Future[Any]]) -> list[Future[Any]]:
    """Cancels reads that have not begun; returns the others."""
    return [each for each in pending if not each.cancel()]


# --- Copies to the GPU, while the step before them computes ----------------------------------------------------------
#
#     copying stream     copy 1 ░░   copy 2 ░░   copy 3 ░░
#     step's stream      step 0 ▓▓▓▓▓▓▓▓▓▓▓▓▓ │ step 1 ▓▓▓▓▓▓▓▓▓▓▓▓▓ │ step 2 ▓▓▓
#                                             └ waits for copy 1      └ waits for copy 2
#
# A copy on the step's own stream would begin once the kernels of the step before have ended. Two rules of CUDA follow
# from the second stream:
#
# - Streams run in no order. So each copy records an event, and the step's stream waits for it.
# - The allocator gives freed memory to the next copy at once, because both are on the copying stream. `record_stream`
#   makes it wait until the step's stream has read the batch.
#
# The host's memory must be page-locked; a copy from other memory keeps the processor waiting.
#
# Tensors are copied, at any depth of tuples, lists and dicts. All other objects are left as they are: one with a method
# `to` moves itself when the step calls that.


class Copy(NamedTuple):
    """A batch whose tensors are on the device, or will be once the event has happened."""

    batch: Any
    event: torch.cuda.Event


class DeviceCopies:
    """Copies to one GPU. `begin` and `finish` may be called by two threads.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = gpu.cuda.Stream(device)
        self._device = self._stream.device  # with its number, because another thread may have another current device

    def begin(self, batch: Any) -> Copy:
        """Starts the copies of a batch's tensors, without waiting for them."""
        with gpu.cuda.stream(self._stream):  # also makes the device this thread's
            moved = _with_tensors(batch, lambda each: each.to(self._device, non_blocking=True))
            return Copy(moved, self._stream.record_event())

    def finish(self, copy: Copy) -> Any:
        """Returns the batch, for use on the current stream of the caller."""
        current = gpu.cuda.current_stream(self._device)
        current.wait_event(copy.event)
        _with_tensors(copy.batch, lambda each: each.record_stream(current))
        return copy.batch


class NoCopies:
    """Leaves batches in the host's memory, where they are needed."""

    begin = finish = staticmethod(as_it_is)


def copies_to(device: torch.device) -> DeviceCopies | NoCopies:
    """Returns what brings batches to a device."""
    return DeviceCopies(device) if device.type == gpu.KIND else NoCopies()


def _with_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """Returns a batch with each tensor replaced by a function of it."""
    return tree_map_only(Tensor, function, batch, is_leaf=lambda each: hasattr(each, "to"))
