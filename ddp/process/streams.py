"""Named random streams: a random number depends on its purpose, never on a rank or a loader worker.

    stream           keyed by                      draws
    "init"           (seed)                        the model's first weights, equal on every rank
    "order"          (seed, epoch)                 the epoch's order (`data/orders/order.py`)
    "augmentation"   (seed, epoch, sample index)   a sample's random transforms, in any process
    "collation"      (seed, epoch, first index)    a collate function's draws for a batch, such as masks
    "dropout"        (seed, step, shard, part)     the noise of one micro-batch's forward and backward

So samples and shards never share their noise by accident, and a run that is resumed, or continued at another world
size, draws the same numbers as the uninterrupted run.

A key becomes a seed through BLAKE2b (RFC 7693) of its unambiguous text, cut to 63 bits. The number is the same in every
process and version, and unrelated for neighbouring keys (seed + epoch + index would collide). That takes about 3 us,
seeding the generators another 8 us. `torch.manual_seed` would take 160 us, because it also visits every other backend.
"""

from __future__ import annotations

import operator
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch

from ddp.process import gpu


def stream_seed(seed: int, *keys: int | str) -> int:
    """Returns the seed, in [0, 2**63), of the stream that `keys` name in a run with `seed`.

    Whole numbers of any type (`numpy.int64` too) count by their value; 1 and "1" are different keys.

    Raises:
        TypeError: a key is neither a whole number nor a string.
    """
    text = "".join(_text(key) for key in (seed, *keys))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _text(key: int | str) -> str:
    # The length of a string is included, so that no two lists of keys give the same text.
    return f"s{len(key)}:{key};" if isinstance(key, str) else f"i{operator.index(key)};"


# --------------------------------------------------------------------------------------------- the process's generators


def seed_generators(value: int, *, device: torch.device | str) -> None:
    """Seeds the generators of library code: torch's for the CPU and for `device`, `random`, and NumPy's.

    Args:
        value: any result of `stream_seed`.
        device: the device on which random operations run.
    """
    torch.default_generator.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFF_FFFF)  # its legacy generator takes 32 bits
    if (device := torch.device(device)).type == gpu.KIND:
        gpu.cuda.init()  # `default_generators` is empty before
        index = gpu.cuda.current_device() if device.index is None else device.index
        gpu.cuda.default_generators[index].manual_seed(value)


class GeneratorStates(NamedTuple):
    """The states of the CPU generators of `seed_generators`, as comparable values."""

    torch: bytes
    python: Any
    numpy: bytes

    @classmethod
    def now(cls) -> GeneratorStates:
        """Returns the present states. That takes 40 us, most of it in NumPy."""
        of_torch, of_numpy = torch.default_generator.get_state().numpy().tobytes(), pickle.dumps(np.random.get_state())
        return cls(of_torch, random.getstate(), of_numpy)

    def restore(self) -> None:
        """Sets the generators to these states."""
        torch.default_generator.set_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        random.setstate(self.python)
        np.random.set_state(pickle.loads(self.numpy))


@contextmanager
def preserved() -> Iterator[None]:
    """Restores the CPU generators of `seed_generators` at the end of the block."""
    states = GeneratorStates.now()
    try:
        yield
    finally:
        states.restore()


# ------------------------------------------------------------------------------------------------------- the streams


def init_stream(seed: int, *, device: torch.device | str) -> None:
    """Seeds the generators for building a model, so that every rank draws the same weights."""
    seed_generators(stream_seed(seed, "init"), device=device)


def dropout_stream(seed: int, step: int, shard: int, part: int, device: torch.device | str) -> None:
    """Seeds the generators for forward and backward of one micro-batch: part `part` of shard `shard` of a step."""
    seed_generators(stream_seed(seed, "dropout", step, shard, part), device=device)
