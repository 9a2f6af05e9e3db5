"""An all-reduce has several routes: by an algorithm over the transport, in the memory of the host, or by both.

    name                    where it is possible    what happens
    "ring", "tree", …       everywhere              the algorithm's schedule runs over the transport
    "shared_memory"         all ranks on one host   each rank adds up its slice of everyone's buffer, in memory
    "shared_memory+ring"    several hosts           each host adds up in its memory; rank i of each host carries slice i
                                                    across, by a ring; each host hands the slices out in its memory

The third kind sends over a host's link only what must cross it: each byte leaves a host as often as if the host were
one rank. A long buffer crosses piece by piece, so that additions in memory overlap with the transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ddp.collectives.catalog import ALL_REDUCE, all_reduce_schedules
from ddp.collectives.placed import Hosts
from ddp.collectives.schedule import Expression, Schedule, canonical

"""The order of the additions: any, or that of the canonical binary tree over the ranks."""

IN_MEMORY = "shared_memory"
CROSSING_BYTES = 2 << 20  # the part of a buffer that crosses between hosts while the next part is added up inside them


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

    def answers_to(self, name: str) -> bool:
        """Returns True if a user who asks for `name` accepts this route. "shared_memory" stands for all that use it."""
        return name == self.name or (self.in_memory and name == IN_MEMORY)

    @cached_property
    def is_canonical(self) -> bool:
        """Returns True if this route adds up every element as the canonical binary tree over the ranks."""
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


def num_pieces(nbytes: int) -> int:
    """Returns the number of pieces in which a buffer of this size crosses between hosts."""
    return max(1, nbytes // CROSSING_BYTES)


def _renamed(expression: Expression, names: Sequence[Expression]) -> Expression:
    """Returns the expression with another one in the place of each leaf."""
    if isinstance(expression, int):
        return names[expression]
    return _renamed(expression[0], names), _renamed(expression[1], names)
