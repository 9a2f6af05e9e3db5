"""Every collective on a flat tensor, by the fastest route between this rank and the others.

    memory          all ranks share a host's memory                      `host_reduce.py`
    cross host      memory inside each host, links between the hosts     `host_links.py`
    links           a schedule over the transport                        `host_links.py`

An all-reduce has several routes:

    name                    possible with           what happens
    "ring", "tree", …       everywhere              the algorithm's schedule runs over the transport
    "shared_memory"         all ranks on one host   each rank adds up its slice of all buffers, in memory
    "shared_memory+ring"    several hosts           each host adds up in its memory; rank i of each host carries slice i
                                                    across, by a ring; each host hands the slices out in its memory

The third kind sends only what must cross a host's link: each byte leaves a host as often as if the host were one rank.
A long buffer crosses piece by piece, so that additions in memory overlap with transfers.

Note "host partition". If gradients are encoded on the way, each rank carries a part of each tensor from its host to the
others:

    2 hosts of 2 ranks          place 0 carries the first half of each tensor, place 1 the second half
    ranks without a memory      each is a host of its own, and carries all
      that they share

The ranks of a host add up in memory first (`sum_in_host`). Then each encodes only the part that it carries. So the
ranks share the work of encoding and the memory for residuals, and a host sends as much as if it were one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from ddp.collectives.all_to_all import schedule_over_shards
from ddp.collectives.catalog import ALL_REDUCE, all_reduce_schedules
from ddp.collectives.placed import Hosts
from ddp.collectives.schedule import Expression, Goal, Schedule, canonical, offsets
from ddp.collectives.shards import is_canonical_over_ranks, nodes_by_rank
from ddp.comm.host_links import CrossHost, HostLinks, by_size
from ddp.comm.host_memory import NoSharedMemory
from ddp.comm.host_reduce import HostGroup
from ddp.comm.reduction import SUM, Reduction, bounds_of, by_rank, divided_, dtype_name, scaled_, with_rows
from ddp.comm.transport.edge import gathered
from ddp.errors import ConfigError
from ddp.process.terminal import log

IN_MEMORY = "shared_memory"


@dataclass(frozen=True)
class Route:
    """One route by which an all-reduce can run on these ranks.

    Attributes:
        algorithm: name of the algorithm that runs over the transport; "" if everything happens in memory.
        schedule: its schedule; None if everything happens in memory.
        in_memory: the ranks of a host add up in its memory.
        hosts: the ranks of every host.
    """

    algorithm: str
    schedule: Schedule | None
    in_memory: bool
    hosts: Hosts

    @cached_property
    def name(self) -> str:
        """The name that `algorithm=` accepts."""
        return "+".join(filter(None, [IN_MEMORY if self.in_memory else "", self.algorithm]))

    def matches(self, name: str) -> bool:
        """Returns True if this route fits the user's `algorithm=name`. "shared_memory" stands for all that use it."""
        return name == self.name or (self.in_memory and name == IN_MEMORY)

    @cached_property
    def is_canonical(self) -> bool:
        """Returns True if this route adds up every element in the order of the canonical binary tree over the ranks."""
        num_ranks = sum(map(len, self.hosts))
        if not self.in_memory:
            return self.schedule is not None and self.schedule.check(num_ranks).canonical
        inside = [_renamed(canonical(len(host)), host) for host in self.hosts]  # the order of `host_reduce.py`
        if self.schedule is None:
            return inside == [canonical(num_ranks)]
        between = self.schedule.check(len(self.hosts)).expressions
        return {_renamed(expression, inside) for expression in between} == {canonical(num_ranks)}


def possible_routes(hosts: Hosts, *, shared_memory: bool) -> dict[str, Route]:
    """Returns every route that is possible on these hosts, by name.

    Args:
        shared_memory: the ranks of each host can reach each other's memory.
    """
    routes = [Route(name, schedule, False, hosts) for name, schedule in all_reduce_schedules(hosts).items()]
    if shared_memory and len(hosts) == 1 < len(hosts[0]):
        routes += [Route("", None, True, hosts)]
    elif shared_memory and any(len(host) > 1 for host in hosts):
        routes += [Route(name, schedule, True, hosts) for name, schedule in ALL_REDUCE.items()]
    return {route.name: route for route in routes}


def _renamed(expression: Expression, names: Sequence[Expression]) -> Expression:
    """Returns the expression with each leaf replaced by another expression."""
    if isinstance(expression, int):
        return names[expression]
    return _renamed(expression[0], names), _renamed(expression[1], names)


@dataclass(frozen=True)
class HostPartition:
    """The part of each tensor that every rank carries between hosts.

    Args:
        hosts: by rank, the number of its host.
        places: by rank, its number among the ranks of its host.
        num_places: number of ranks that carry a part on each host: the size of the smallest host.
    """

    hosts: Sequence[int]
    places: Sequence[int]
    num_places: int

    @property
    def num_hosts(self) -> int:
        """The number of hosts; with one, nothing travels."""
        return max(self.hosts) + 1

    def part_of(self, numel: int, rank: int) -> slice:
        """Returns the slice that a rank carries of a tensor of `numel` elements."""
        place = self.places[rank]
        if place >= self.num_places:
            return slice(numel, numel)
        bounds = offsets(numel, self.num_places)
        return slice(bounds[place], bounds[place + 1])


class FlatCollectives:
    """The collectives of one rank on flat tensors: contiguous, of one length and type on all ranks.

    Args and attributes:
        links: edges to all ranks.
        hosts: the ranks of every host.
        group: this host's ranks in memory, if it has several and they share it.
        cross_host: connects several hosts whose ranks share memory.

    Attributes:
        routes: every route that an all-reduce can take here, by name.
        slices: by rank, the number of its slice in `reduce_scatter` and `all_gather`, unless those go by rank.
    """

    def __init__(
        self,
        links: HostLinks,
        hosts: Hosts,
        group: HostGroup | None = None,
        cross_host: CrossHost | None = None,
    ) -> None:
        self.rank, self.world_size = links.rank, links.world_size
        self.links, self.hosts, self.group, self.cross_host = links, hosts, group, cross_host
        self._shares_memory = group is not None or cross_host is not None
        self.routes = possible_routes(hosts, shared_memory=self._shares_memory)
        self._memory = group if cross_host is None else None  # shared by all ranks
        self._slicing = cross_host if cross_host is not None and cross_host.slices is not None else None
        self._by_rank = self._memory or links  # slices in the order of ranks; below, in that of `slices`
        self._by_slices = self._slicing or self._by_rank
        self.slices = list(range(self.world_size))
        if self._slicing is not None and self._slicing.slices is not None:
            self.slices = self._slicing.slices
        self._unshared: set[int] = set()  # addresses from `allocate` that are not in shared memory

    # --- what is reachable here --------------------------------------------------------------------------------------

    def offers(self, algorithm: str) -> bool:
        """Returns True for "auto", and for any name that fits a route here."""
        return algorithm == "auto" or any(route.matches(algorithm) for route in self.routes.values())

    @property
    def host_partition(self) -> HostPartition:
        """The part of each tensor that every rank carries from its host to the others."""
        hosts = self.hosts if self._shares_memory else [[rank] for rank in range(self.world_size)]
        at = {rank: (number, place) for number, host in enumerate(hosts) for place, rank in enumerate(host)}
        numbers, places = zip(*(at[rank] for rank in range(self.world_size)), strict=True)
        return HostPartition(numbers, places, min(map(len, hosts)))

    # --- reductions --------------------------------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, route: Route, reduction: Reduction = SUM) -> None:
        """Reduces `flat` over all ranks by the given route, in place."""
        scaled_(flat, reduction.before)
        if route.schedule is None:
            assert self._memory is not None
            self._memory.all_reduce(flat, reduction.op, divide_by=int(reduction.divide_by))
        elif route.in_memory:
            assert self.cross_host is not None
            self.cross_host.all_reduce(flat, route.schedule, reduction)
        else:
            self.links.run(route.schedule, flat, reduction=reduction)
        scaled_(flat, reduction.after)

    def reduce_shards(
        self,
        rows: Tensor,
        num_shards: int,
        route: Route | None,
        reduction: Reduction,
        bounds: Sequence[int] | None = None,
    ) -> Tensor:
        """Adds up the nodes of all ranks (`collectives/shards.py`) into row 0, in place; zeros of the sum are positive.

        Args:
            rows: [largest number of nodes of a rank, numel]; all rows but row 0 are undefined afterwards.
            route: of an all-reduce over the ranks that adds in the same order; None: by the owners of slices.
            bounds: the starts of slices in the order of `slices`, as in `reduce_scatter`; None: every rank gets all.

        Returns:
            This rank's part of row 0.
        """
        number = self.slices[self.rank]
        total = rows[0] if bounds is None else rows[0, bounds[number] : bounds[number + 1]]
        memory = self._memory
        if memory is not None and memory.reduce_shards(rows, num_shards, bounds, divide_by=int(reduction.divide_by)):
            return scaled_(total, reduction.after).add_(0.0)
        if bounds is None and route is not None:
            self.all_reduce(total, route, reduction)
            return total.add_(0.0)
        if bounds is not None and self._is_canonical_in_slices and is_canonical_over_ranks(self.world_size, num_shards):
            return self.reduce_scatter(rows[0], bounds, reduction).add_(0.0)
        nodes = rows[: len(nodes_by_rank(self.world_size, num_shards)[self.rank])].unbind()
        if bounds is None:
            self.links.run_over_shards(schedule_over_shards(num_shards, Goal.ALL_REDUCE), nodes, None, reduction)
        else:
            schedule = schedule_over_shards(num_shards, Goal.REDUCE_SCATTER, tuple(self.slices))
            self.links.run_over_shards(schedule, nodes, bounds, reduction, chunk=number)
        return scaled_(total, reduction.after).add_(0.0)

    def reduce_scatter(
        self, flat: Tensor, bounds: Sequence[int], reduction: Reduction, *, by_rank: bool = False
    ) -> Tensor:
        """Reduces and returns this rank's slice of `flat`, in place; the other slices are undefined afterwards.

        Args:
            by_rank: slices are in the order of ranks, not of `slices`.
        """
        number = self.rank if by_rank else self.slices[self.rank]
        mine = flat[bounds[number] : bounds[number + 1]]
        scaled_(flat, reduction.before)
        if self._memory is not None:
            self._memory.reduce_scatter(flat, bounds, reduction.op, divide_by=int(reduction.divide_by))
            return _finished(mine, reduction._replace(divide_by=1))
        undivided = reduction._replace(divide_by=1)  # a schedule would divide partial sums, too
        if not by_rank and self._slicing is not None:
            self._slicing.reduce_scatter(flat, bounds, undivided)
        else:
            self.links.run(by_size("reduce_scatter", flat.nbytes, self.world_size), flat, bounds, undivided)
        return _finished(mine, reduction)

    def gather_on_hosts(self, flat: Tensor, bounds: Sequence[int]) -> None:
        """Copies to each rank the slices of its counterparts on the other hosts, in place."""
        if self._slicing is not None:
            self._slicing.gather_across(flat, bounds)
        elif len(self.hosts) > 1:  # of one rank each
            self.all_gather(flat, bounds)

    def reduce(self, flat: Tensor, root: int, reduction: Reduction) -> None:
        """Reduces `flat` over all ranks into the root's; that of the others is undefined afterwards."""
        scaled_(flat, reduction.before)
        self.links.along_tree("reduce", flat, root, reduction=reduction._replace(divide_by=1))
        if self.rank == root:
            _finished(flat, reduction)

    def sum_in_host(self, flat: Tensor, reduction: Reduction) -> None:
        """Reduces `flat` over the ranks that share this host's memory, in place."""
        scaled_(flat, reduction.before)
        if self.group is not None:
            self.group.all_reduce(flat, reduction.op, divide_by=int(reduction.divide_by))
            reduction = reduction._replace(divide_by=1)
        _finished(flat, reduction)

    # --- what moves without being combined ---------------------------------------------------------------------------

    def all_gather(self, flat: Tensor, bounds: Sequence[int]) -> None:
        """Copies each rank's slice of `flat` to every rank, in place."""
        self._by_slices.all_gather(flat, bounds)

    def broadcast(self, flat: Tensor, root: int) -> None:
        """Copies the root's values to every rank, in place."""
        self._by_rank.broadcast(flat, root)

    def gather_numbers(self, numbers: list[int], device: torch.device) -> list[list[int]]:
        """Returns every rank's numbers, by rank; all ranks have equally many."""
        count = len(numbers)
        table = torch.zeros(self.world_size, count, dtype=torch.int64, device=device)
        table[self.rank] = torch.tensor(numbers, device=device)
        self._by_rank.all_gather(table.view(-1), range(0, self.world_size * count + 1, count))
        rows: list[list[int]] = self.links.on_host(table).tolist()
        return rows

    def gather_rows(self, mine: Tensor, root: int | None = None) -> list[Tensor]:
        """Returns every rank's [n, ...], by rank; n may differ. With a root, other ranks get an empty list."""
        rows = [num_rows for (num_rows,) in self.gather_numbers([len(mine)], mine.device)]
        bounds = bounds_of(rows, mine)
        flat = mine.new_empty(bounds[-1])
        flat[bounds[self.rank] : bounds[self.rank + 1]] = mine.reshape(-1)
        if root is None:
            self._by_rank.all_gather(flat, bounds)
        else:
            self.links.along_tree("gather", flat, root, bounds)
        return by_rank(flat, rows, mine) if root in (None, self.rank) else []

    def scatter(self, pieces: Sequence[Tensor], root: int, device: torch.device) -> Tensor:
        """Returns this rank's tensor from the root's list; shapes may differ. The other ranks pass no tensors."""
        about = [[list(piece.shape) for piece in pieces], dtype_name(pieces[0].dtype)] if pieces else ""
        shapes, dtype = gathered(self.links.gather_bytes, about)[root]
        bounds = [0, *accumulate(map(math.prod, shapes))]
        flat = torch.empty(bounds[-1], dtype=getattr(torch, dtype), device=device)
        if pieces:
            torch.cat([with_rows(piece).reshape(-1) for piece in pieces], out=flat)
        self.links.along_tree("scatter", flat, root, bounds)
        return flat[bounds[self.rank] : bounds[self.rank + 1]].clone().view(shapes[self.rank])

    def all_to_all(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Sends pieces[r], [n, ...], to rank r; returns what rank 0, 1, … sent here."""
        table = self.gather_numbers([len(piece) for piece in pieces], pieces[0].device)  # [from][to], in rows
        rows = [row[self.rank] for row in table]
        bounds_out, bounds_in = bounds_of(table[self.rank], pieces[0]), bounds_of(rows, pieces[0])
        outgoing = torch.cat([piece.reshape(-1) for piece in pieces])
        incoming = outgoing.new_empty(bounds_in[-1])
        longest = max(map(max, table)) * pieces[0].shape[1:].numel()
        self.links.exchange(outgoing, bounds_out, incoming, bounds_in, longest=longest)
        return by_rank(incoming, rows, pieces[0])

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        (self.cross_host or self.group or self.links).barrier()

    # --- memory and the end ------------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns [numel] zeros, in the host's memory if its ranks share it."""
        if self.group is not None:
            try:
                return self.group.allocate(numel, dtype)
            except NoSharedMemory as error:  # on all ranks of the host
                log.warning("a buffer of %d %s is not shared with the host's other ranks: %s", numel, dtype, error)
        try:
            with torch.inference_mode(False):
                tensor = torch.zeros(numel, dtype=dtype, device=device)
        except RuntimeError as error:
            raise ConfigError(f"numel={numel} of {dtype}: there is no memory for it ({error})") from error
        self._unshared.add(tensor.data_ptr())
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Frees memory from `allocate`, from any thread and at any time."""
        if tensor.data_ptr() in self._unshared:
            self._unshared.discard(tensor.data_ptr())
        elif self.group is not None:
            self.group.free(tensor)

    def close(self) -> None:
        """Frees the memory."""
        if self.cross_host is not None:
            self.cross_host.close()
        if self.group is not None:
            self.group.close()

    @cached_property
    def _is_canonical_in_slices(self) -> bool:
        """Returns True if `reduce_scatter` adds up in the order of the canonical tree over the ranks."""
        if self.cross_host is None or self.cross_host.slices is None or len(self.hosts) != 2:
            return False
        inside = [_renamed(canonical(len(host)), host) for host in self.hosts]  # the order of `host_reduce.py`
        return (inside[0], inside[1]) == canonical(self.world_size)


def _finished(result: Tensor, reduction: Reduction) -> Tensor:
    """Divides a result that is not divided yet, and scales it back if its terms were scaled down."""
    return scaled_(divided_(result, reduction.divide_by), reduction.after)
