"""Numbers that users give for each sample or each file: weights, lengths, classes, sizes.

They come as lists, arrays, tensors or columns of a table, and one wrong number would put samples in the wrong place
without an error. So each is checked when an order is made, and named with its place.
"""

from __future__ import annotations

import operator
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ddp.errors import ConfigError

LARGEST = 1 << 56  # of whole numbers, so that sums and small multiples are exact


def numbers_of(values: Any, *, what: str, kind: Literal["whole", "real"]) -> NDArray[Any]:
    """Returns one number for each sample or file, [n], int64 or float64.

    Args:
        what: the name of the values, for errors.

    Raises:
        ConfigError: they are not one number each, or some are negative, too large, or not of this kind.
    """
    found = _array(values)
    if found is None or found.ndim != 1 or not len(found) or found.dtype.kind not in "iufb":
        raise ConfigError(f"{what} {_in_words(values, found)}: give one number for each, as a list, array or tensor")
    is_bad = ~np.isfinite(found) | (found < 0) | (found > LARGEST if kind == "whole" else np.bool_(False))
    if kind == "whole" and found.dtype.kind == "f":
        is_bad |= found != np.floor(found)
    if is_bad.any():
        where = int(is_bad.argmax())
        wanted = f"a whole number from 0 to {LARGEST}" if kind == "whole" else "a finite number, at least 0"
        raise ConfigError(f"{what}[{where}]={found[where].item():g}: must be {wanted}")
    return found.astype(np.int64 if kind == "whole" else np.float64)


def labels_of(values: Any, *, what: str) -> NDArray[np.int64]:
    """Returns the number of each sample's class, [n], where classes are anything that NumPy can sort.

    Raises:
        ConfigError: they are not one class for each sample.
    """
    found = _array(values)
    if found is not None and found.ndim == 1 and len(found):
        with suppress(TypeError):  # some cannot be compared with others
            return np.unique(found, return_inverse=True)[1].astype(np.int64)
    raise ConfigError(f"{what} {_in_words(values, found)}: give one class for each, all of them numbers or all texts")


def length_of(value: Any, *, what: str) -> int:
    """Returns a number of samples.

    Raises:
        ConfigError: it is none.
    """
    try:
        length = operator.index(value)
    except TypeError:
        length = -1
    if length < 0:
        raise ConfigError(f"{what}={value!r}: must be a whole number, at least 0")
    return length


def digest_of_numbers(*arrays: NDArray[Any]) -> str:
    """Returns a few letters that tell arrays apart."""
    digest = blake2b(digest_size=4)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _array(values: Any) -> NDArray[Any] | None:
    """Returns values as an array; None if they are none."""
    if np.ma.is_masked(values):
        return None
    try:
        if isinstance(values, Tensor):
            plain = values.detach().cpu()
            values = (plain.double() if plain.is_floating_point() else plain).numpy()
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError):  # lists of unequal lengths, or sparse tensors, say
        return None


def _in_words(values: Any, found: NDArray[Any] | None) -> str:
    if found is None or found.ndim == 0:
        return f"is a {type(values).__name__}"
    return f"has the shape {list(found.shape)}" if found.ndim != 1 or not len(found) else f"holds {found.dtype.name}"
