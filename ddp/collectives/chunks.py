"""Where chunks begin and end: `numel` elements cut into `num_chunks` runs that differ by at most one element.

offsets(10, 4) = [0, 2, 5, 7, 10]        offsets(2, 4) = [0, 0, 1, 1, 2]: fewer elements than ranks is fine
"""

from __future__ import annotations


def offsets(numel: int, num_chunks: int) -> list[int]:
    """Boundaries of the chunks, in elements: `num_chunks + 1` numbers from 0 to `numel`."""
    return [index * numel // num_chunks for index in range(num_chunks + 1)]
