"""The boundaries of chunks: `numel` elements cut into `num_chunks` runs that differ by at most one element.

offsets(10, 4) = [0, 2, 5, 7, 10]        offsets(2, 4) = [0, 0, 1, 1, 2]: fewer elements than ranks is fine
"""

from __future__ import annotations


def offsets(numel: int, num_chunks: int, unit: int = 1) -> list[int]:
    """Returns the boundaries of the chunks, in elements: `num_chunks + 1` numbers from 0 to `numel`.

    Args:
        unit: all boundaries but the last one are multiples of it; then chunks differ by at most so many elements.
    """
    num_units = -(-numel // unit)
    return [min(numel, index * num_units // num_chunks * unit) for index in range(num_chunks + 1)]


def around(first: int, count: int, num_chunks: int) -> tuple[range, ...]:
    """Returns `count` chunks from `first` on, on a circle of `num_chunks`, as one run, or two if they pass the end."""
    first %= num_chunks
    passed = first + count - num_chunks
    if passed <= 0:
        return (range(first, first + count),)
    return range(first, num_chunks), range(passed)


# The number of chunks into which a schedule cuts its buffer, by number of ranks. Most schedules take one of these.


def one_per_rank(num_ranks: int) -> int:
    """Returns the number of ranks: every rank has a chunk of its own."""
    return num_ranks


def whole(num_ranks: int) -> int:
    """Returns 1: the buffer is one chunk."""
    return 1
