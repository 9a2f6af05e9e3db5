"""Tells whether a tensor's elements lie densely in memory, so that they can be taken as one row of numbers."""

from __future__ import annotations

from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Returns True if the elements fill their memory without gaps or overlap, in any order."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True
