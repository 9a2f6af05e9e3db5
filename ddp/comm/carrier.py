"""The part of a tensor that a rank carries from its host to the others, where gradients are encoded on the way.

    2 hosts of 2 ranks          place 0 carries the first half of each tensor, place 1 the second half
    ranks without a memory      each is a host of its own, and carries all
      that they share

The ranks of a host add up in memory first (`Communicator.sum_in_host`). Then each encodes what it carries, and no other
rank of its host does. So the ranks share the work of encoding and the memory for what it leaves behind, and a host
sends as much as if it were one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp.collectives.chunks import offsets


@dataclass(frozen=True)
class Carriers:
    """The places of all ranks on their hosts.

    Args:
        hosts: by rank, the number of its host.
        places: by rank, its number among the ranks of its host.
        num_places: so many ranks of every host carry something: those of the smallest one.
    """

    hosts: Sequence[int]
    places: Sequence[int]
    num_places: int

    @property
    def num_hosts(self) -> int:
        """The number of hosts; with one, nothing has to travel."""
        return max(self.hosts) + 1

    def part_of(self, numel: int, rank: int) -> slice:
        """Returns what this rank carries of a tensor of so many elements."""
        place = self.places[rank]
        if place >= self.num_places:
            return slice(numel, numel)
        bounds = offsets(numel, self.num_places)
        return slice(bounds[place], bounds[place + 1])
