"""Every collective on a flat tensor, by the fastest means that connect this rank with the others.

    memory          all ranks share a host's memory                      `host_reduce.py`
    cross host      memory inside each host, links between the hosts     `cross_host.py`
    links           a schedule over the transport                        `host_links.py`

Note "host partition". Where gradients are encoded on the way, a rank carries a part of each tensor from its host to the
others:

    2 hosts of 2 ranks          place 0 carries the first half of each tensor, place 1 the second half
    ranks without a memory      each is a host of its own, and carries all
      that they share

The ranks of a host add up in memory first (`sum_in_host`). Then each encodes what it carries, and no other rank of its
host does. So the ranks share the work of encoding and the memory for what it leaves behind, and a host sends as much as
if it were one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ddp.collectives.chunks import offsets
from ddp.collectives.placed import Hosts
from ddp.comm.cross_host import CrossHost
from ddp.comm.host_links import HostLinks, by_size
from ddp.comm.host_reduce import HostGroup
from ddp.comm.reduction import SUM, Reduction
from ddp.comm.routes import Route


@dataclass(frozen=True)
class HostPartition:
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


@dataclass(frozen=True)
class FlatCollectives:
    """The connections of one rank to the others.

    Attributes:
        wire: edges to all ranks.
        hosts: the ranks of every host.
        ways: every way that an all-reduce can go here, by name.
        group: this host's ranks in memory, if it has several and they share it.
        across: connects the memories of several hosts, where ranks of a host share memory.
    """

    links: HostLinks
    hosts: Hosts
    routes: Mapping[str, Route]
    group: HostGroup | None = None
    cross_host: CrossHost | None = None

    def memory_of(self, flat: Tensor) -> HostGroup | None:
        """Returns the memory in which all ranks reach such a tensor, if they share any."""
        return self.group if self.cross_host is None and flat.is_cpu else None

    def offers(self, algorithm: str) -> bool:
        """Returns True for "auto", and for any name that a way here answers to."""
        return algorithm == "auto" or any(route.answers_to(algorithm) for route in self.routes.values())

    def all_reduce(self, flat: Tensor, route: Route, reduction: Reduction = SUM, *, sequence: int = 0) -> None:
        """Combines `flat` over all ranks in the given way, in place."""
        if route.schedule is None:
            assert self.group is not None  # `Plan.route` refuses a tensor that this memory cannot reach
            self.group.all_reduce(flat, reduction.op, divide_by=int(reduction.divide_by), sequence=sequence)
        elif route.in_memory:
            assert self.cross_host is not None
            self.cross_host.all_reduce(flat, route.schedule, reduction, sequence=sequence)
        else:
            self.links.run(route.schedule, flat, reduction=reduction)

    @cached_property
    def slices(self) -> list[int]:
        """By rank, the number of its slice in `reduce_scatter` and `all_gather`."""
        return (self.cross_host.slices if self.cross_host is not None else None) or list(range(self.links.world_size))

    @cached_property
    def host_partition(self) -> HostPartition:
        """The part of each tensor that every rank carries from its host to the others."""
        shares_memory = self.group is not None or self.cross_host is not None
        hosts = self.hosts if shares_memory else [[rank] for rank in range(self.links.world_size)]
        at = {rank: (number, place) for number, host in enumerate(hosts) for place, rank in enumerate(host)}
        numbers, places = zip(*(at[rank] for rank in range(self.links.world_size)), strict=True)
        return HostPartition(numbers, places, min(map(len, hosts)))

    def sum_in_host(self, flat: Tensor, reduction: Reduction = SUM, *, sequence: int = 0) -> None:
        """Combines `flat` over the ranks that share this host's memory, in place."""
        if self.group is not None and flat.is_cpu:
            self.group.all_reduce(flat, reduction.op, divide_by=int(reduction.divide_by), sequence=sequence)
        elif reduction.divide_by != 1:
            flat.div_(reduction.divide_by)

    def reduce_scatter(
        self, flat: Tensor, bounds: Sequence[int], reduction: Reduction = SUM, *, sequence: int = 0
    ) -> None:
        """Combines each rank's slice of `flat` over all ranks, in place; the rest of `flat` is undefined then."""
        if memory := self.memory_of(flat):
            memory.reduce_scatter(flat, bounds, reduction.op, divide_by=int(reduction.divide_by), sequence=sequence)
            return
        undivided = reduction._replace(divide_by=1)  # a schedule takes partial sums that it passes on for complete ones
        if cross_host := self._slicing(flat):
            cross_host.reduce_scatter(flat, bounds, undivided, sequence=sequence)
        else:
            self.links.run(by_size("reduce_scatter", flat.nbytes, self.links.world_size), flat, bounds, undivided)
        if reduction.divide_by != 1:
            number = self.slices[self.links.rank]
            flat[bounds[number] : bounds[number + 1]].div_(reduction.divide_by)

    def all_gather(self, flat: Tensor, bounds: Sequence[int], *, sequence: int = 0) -> None:
        """Gives everyone each rank's slice of `flat`, in place."""
        if memory := self.memory_of(flat):
            memory.all_gather(flat, bounds, sequence=sequence)
        elif cross_host := self._slicing(flat):
            cross_host.all_gather(flat, bounds, sequence=sequence)
        else:
            self.links.run(by_size("all_gather", flat.nbytes, self.links.world_size), flat, bounds)

    def _slicing(self, flat: Tensor) -> CrossHost | None:
        """Returns what connects the hosts' memories, if such a tensor goes through it in slices."""
        return self.cross_host if self.cross_host is not None and self.cross_host.slices and flat.is_cpu else None

    def close(self) -> None:
        """Gives the memory back."""
        if self.cross_host is not None:
            self.cross_host.close()
        if self.group is not None:
            self.group.close()
