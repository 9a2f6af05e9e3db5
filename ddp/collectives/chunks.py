"""Where chunks begin and end: `numel` elements cut into `num_chunks` runs that differ by at most one element.

offsets(10, 4) = [0, 2, 5, 7, 10]        offsets(2, 4) = [0, 0, 1, 1, 2]: fewer elements than ranks is fine
"""

from __future__ import annotations


def offsets(numel: int, num_chunks: int) -> list[int]:
    """Boundaries of the chunks, in elements: `num_chunks + 1` numbers from 0 to `numel`."""
    return [index * numel // num_chunks for index in range(num_chunks + 1)]


def around(first: int, count: int, num_chunks: int) -> tuple[range, ...]:
    """The `count` chunks from `first` on, on a circle of `num_chunks`: two runs where they pass the end, else one."""
    first %= num_chunks
    passed = first + count - num_chunks
    if passed <= 0:
        return (range(first, first + count),)
    return range(first, num_chunks), range(passed)


# How many chunks a schedule cuts its buffer into, by number of ranks: two answers that most of them give.


def one_per_rank(num_ranks: int) -> int:
    """Every rank has a chunk of its own."""
    return num_ranks


def whole(num_ranks: int) -> int:
    """The buffer is one chunk."""
    return 1
