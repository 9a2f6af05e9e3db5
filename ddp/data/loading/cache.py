"""A cache of samples: each is read once per host, and then comes from memory that its processes share.

    table      int64 [n]               where sample i lies, + 1;  0: nowhere yet
    filled     int64 [arenas]          bytes that are used in each arena
    arena 0    length, checksum, bytes │ length, checksum, bytes │ …        written by one process alone
    arena 1    …

Every process looks into the table first. If a sample is not there, the process reads it from the data set, and writes
it into its own arena. So there is no lock that a killed process could hold. The order of writing makes a half sample
impossible to see: `filled` first, so that nobody writes there again; then the bytes; then the table. Two processes that
read the same sample at once write it twice, which does no harm. Where a processor may show stores to others in another
order (all but x86-64), readers compare the checksum.

The memory comes from `allocate`. It should be nameless, so that a crash leaves nothing behind, and the same in all
ranks of a host (`comm/host_share.py`). Only what is used takes real memory. A sample costs 6 µs and its copy.

A sample must be the same each time that it is read. Random transforms go behind the cache: `Transformed`. Samples that
cannot be pickled, or not be made again of their bytes, are read each time.
"""

from __future__ import annotations

import io
import pickle
import platform
import threading
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from ddp.data.loading.read_ahead import THREAD
from ddp.data.samples import Transformed, Wrapped, behind_transforms
from ddp.errors import ConfigError, one_line
from ddp.process.log import log
from ddp.streams import GeneratorStates

Allocate = Callable[[int], Tensor]
"""Returns [number of bytes] zeros, uint8, the same memory in all processes of a host."""

_HEADER_BYTES = 16  # length and checksum
_IS_ORDERED = platform.machine() in ("x86_64", "AMD64")  # stores are seen in the order in which they were made


class Cached(Wrapped):
    """A data set that reads each sample once per host.

    Args:
        samples: map-style; a sample is the same each time.
        allocate: is called once, by all processes of the host alike.
        max_bytes: of all samples together; what does not fit is read each time.
        place, num_places: number of this rank on its host, and of these ranks.
        num_loaders: loader processes of each rank.
    """

    def __init__(
        self, samples: Any, allocate: Allocate, *, max_bytes: int, place: int, num_places: int, num_loaders: int = 0
    ) -> None:
        super().__init__(samples)
        self._place, self._num_loaders, self._keeps = place, num_loaders, True
        num_arenas = num_places * max(1, num_loaders)
        self._capacity = max_bytes // num_arenas // 8 * 8
        length, head = len(samples), 8 * (len(samples) + num_arenas)
        region = allocate(head + num_arenas * self._capacity).numpy()
        self._table = region[: 8 * length].view(np.int64)
        self._filled = region[8 * length : head].view(np.int64)
        self._bytes = region[head:]

    def __getitem__(self, index: int) -> Any:
        found = self._find(index)
        if found is not None:
            try:
                return pickle.loads(found)
            except Exception as error:  # of the sample's class
                if self._keeps:
                    cause = one_line(error)
                    log.warning("the cache keeps no more: sample %d cannot be made of its bytes (%s)", index, cause)
                self._keeps = False
        sample = self._read(index)
        if self._keeps:
            self._keep(index, sample)
        return sample

    @property
    def num_cached(self) -> int:
        """Returns how many samples are in memory."""
        return int(np.count_nonzero(self._table))

    @property
    def num_bytes(self) -> int:
        """Returns how many bytes they take."""
        return int(self._filled.sum())

    def _find(self, index: int) -> bytearray | None:
        """Returns a copy of a sample's bytes, so that nobody can change those in the cache."""
        start = int(self._table[index]) - 1
        if start < 0:
            return None
        length, checksum = self._bytes[start : start + _HEADER_BYTES].view(np.int64).tolist()
        if not 0 < length <= self._capacity:
            return None
        found = bytearray(self._bytes[start + _HEADER_BYTES : start + _HEADER_BYTES + length])
        return found if _IS_ORDERED or zlib.crc32(found) == checksum else None

    def _read(self, index: int) -> Any:
        """Returns a sample from the data set.

        Raises:
            ConfigError: it was drawn at random, so it must not stay the same.
        """
        if threading.current_thread().name == THREAD:  # others draw meanwhile, and what it reads draws nothing
            return self.samples[index]
        before = GeneratorStates.now()
        sample = self.samples[index]
        if GeneratorStates.now() != before:
            raise ConfigError(
                f"cache: reading sample {index} draws at random, and the cache would repeat one draw for ever; put "
                "random transforms behind it, as in ddp.data.Transformed(samples, transform), or leave the cache out"
            )
        return sample

    def _keep(self, index: int, sample: Any) -> None:
        """Writes a sample into this process's arena, if it has room there."""
        arena = self._arena()
        data = None if arena is None else _dumped(sample)
        if arena is None or data is None:
            return
        used, size = int(self._filled[arena]), _HEADER_BYTES + -(-len(data) // 8) * 8
        if used + size > self._capacity:
            return
        self._filled[arena] = used + size
        start = arena * self._capacity + used
        self._bytes[start : start + _HEADER_BYTES].view(np.int64)[:] = len(data), zlib.crc32(data)
        self._bytes[start + _HEADER_BYTES : start + _HEADER_BYTES + len(data)] = np.frombuffer(data, dtype=np.uint8)
        self._table[index] = start + 1

    def _arena(self) -> int | None:
        """Returns the number of the arena that only this process writes; None if it has none."""
        loader = get_worker_info()
        if not self._num_loaders:
            return self._place
        return None if loader is None else self._place * self._num_loaders + loader.id

    def __reduce__(self) -> Any:
        raise ConfigError("cache: cannot be sent to another process; loader processes must be forked")


def cached(samples: Any, allocate: Allocate, **choices: Any) -> Any:
    """Returns a data set with a cache, behind which its transforms are."""
    if isinstance(samples, Transformed):
        return Transformed(cached(samples.samples, allocate, **choices), samples.transform)
    return Cached(samples, allocate, **choices)


def cache_of(samples: Any) -> Cached | None:
    """Returns the cache of a data set, if it has one."""
    inner = behind_transforms(samples)
    return inner if isinstance(inner, Cached) else None


# ------------------------------------------------------------------------------------------------- samples as bytes


class _Pickler(pickle.Pickler):
    """Pickles a tensor as its bytes; torch's own way takes a hundred times as long."""

    def reducer_override(self, each: Any) -> Any:
        if not isinstance(each, Tensor) or each.device.type != "cpu" or each.layout != torch.strided:
            return NotImplemented
        if type(each) is not Tensor or each.is_quantized or each.__dict__:
            alone = _alone(each)
            return NotImplemented if alone is each else alone.__reduce_ex__(5)
        flat = each.detach().contiguous().view(-1).view(torch.uint8) if each.numel() else torch.empty(0)
        return _tensor, (flat.numpy().tobytes(), each.dtype, tuple(each.shape), each.requires_grad)


def _alone(each: Tensor) -> Tensor:
    """Returns a tensor whose storage has nothing else, because torch pickles all of a storage."""
    if each.untyped_storage().nbytes() <= each.numel() * each.element_size():
        return each
    copy = each.detach().clone().requires_grad_(each.requires_grad)
    copy.__dict__.update(each.__dict__)
    return copy if type(copy) is type(each) else each


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return flat.view(dtype).view(shape).requires_grad_(requires_grad)


def _dumped(sample: Any) -> bytes | None:
    """Returns a sample as bytes; None if it cannot be pickled."""
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5).dump(sample)
    except Exception:  # of the sample's class, or of torch, or RecursionError
        return None
    return stream.getvalue()
