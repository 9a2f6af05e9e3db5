"""The ways of an all-reduce: which are possible on a layout, what they are called, and in what order they add."""

from __future__ import annotations

import pytest

from ddp.collectives.catalog import ALL_REDUCE, all_reduce_schedules
from ddp.collectives.cost import equal_hosts
from ddp.collectives.placed import Hosts
from ddp.comm.flat_collectives import Route, possible_routes


@pytest.mark.parametrize(
    ("hosts", "through_memory"),
    [
        (((0,),), []),
        (((0,), (1,), (2,)), []),
        (((0, 1, 2),), ["shared_memory"]),
        (((0, 1), (2,)), [f"shared_memory+{name}" for name in ALL_REDUCE]),
    ],
)
def test_memory_adds_ways_where_ranks_share_a_host(hosts: Hosts, through_memory: list[str]) -> None:
    over_transport = list(all_reduce_schedules(hosts))
    assert list(possible_routes(hosts, shared_memory=False)) == over_transport
    found = possible_routes(hosts, shared_memory=True)
    assert list(found) == over_transport + through_memory
    assert all(name == route.name for name, route in found.items())
    assert [name for name, route in found.items() if route.in_memory] == through_memory
    assert [name for name, route in found.items() if route.matches("shared_memory")] == through_memory
    assert [name for name, route in found.items() if route.matches("ring")] == ["ring"]


def test_memory_is_canonical_where_its_ranks_are_a_branch_of_the_tree() -> None:
    def is_canonical(algorithm: str, hosts: Hosts) -> bool:
        return Route(algorithm, ALL_REDUCE[algorithm] if algorithm else None, True, hosts).is_canonical

    assert is_canonical("", equal_hosts(7, 7))
    assert is_canonical("ring", ((0, 1), (2, 3)))  # a + b is b + a
    assert is_canonical("tree", equal_hosts(12, 4))
    assert is_canonical("tree", ((0, 1), (2,)))
    assert not is_canonical("ring", equal_hosts(6, 2))
    assert not is_canonical("tree", equal_hosts(6, 3))  # ((0, 1), 2) is no branch of it
    assert not is_canonical("tree", ((0, 2), (1, 3)))
    assert not is_canonical("tree", ((0,), (1, 2)))


def test_over_the_transport_the_schedule_decides() -> None:
    for hosts in (equal_hosts(4, 4), equal_hosts(6, 2), ((0, 1), (2,))):
        for name, route in possible_routes(hosts, shared_memory=False).items():
            assert route.is_canonical == all_reduce_schedules(hosts)[name].check(sum(map(len, hosts))).canonical
