"""Selection: a pure function of agreed numbers that ranks every way as the network makes it pay."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise

import pytest

from ddp.collectives.catalog import ALL_REDUCE, all_reduce_schedules
from ddp.collectives.placed import Hosts
from ddp.collectives.schedule import Schedule
from ddp.collectives.simulate import Link, Network, equal_hosts, simulate
from ddp.comm.calibrate import Curve, Measured, SharedMemory
from ddp.comm.carrier import CROSSING_BYTES
from ddp.comm.select import Choice, explain, in_columns, is_canonical, rank_choices

FAST, SLOW = Link(2e-6, 1e-10), Link(1e-3, 1e-8)
MEMORY = SharedMemory(
    ordinary=Curve((1 << 10, 1 << 20), (1e-5, 1e-3)), allocated=Curve((1 << 10, 1 << 20), (1e-5, 2e-4))
)
ONE_HOST, TWO_HOSTS = equal_hosts(4, 4), equal_hosts(4, 2)


def measured(hosts: Hosts, between: Link = SLOW) -> Measured:
    return Measured(Network(hosts, FAST, between, 1e-10), MEMORY if any(len(host) > 1 for host in hosts) else None)


def ways(hosts: Hosts) -> Mapping[str, Schedule | None]:
    found: dict[str, Schedule | None] = {**all_reduce_schedules(hosts)}
    if len(hosts) == 1:
        return found | {"shared_memory": None}
    return found | {f"shared_memory+{name}": schedule for name, schedule in ALL_REDUCE.items()}


def names(nbytes: int, hosts: Hosts, **more: object) -> list[str]:
    return [c.name for c in rank_choices(nbytes, ways(hosts), measured(hosts), hosts=hosts, **more)]  # type: ignore[arg-type]


def test_every_way_is_ranked_by_its_time() -> None:
    for hosts in (ONE_HOST, TWO_HOSTS, ((0, 1, 2), (3,))):
        choices = rank_choices(1 << 16, ways(hosts), measured(hosts), hosts=hosts)
        assert {choice.name for choice in choices} == set(ways(hosts))
        times = [choice.predicted_s for choice in choices]
        assert all(earlier < 1.2 * later for earlier, later in pairwise(times))  # or nearly equal
        assert times[0] > 0


def test_the_order_of_the_ways_does_not_matter() -> None:
    """Equal prices too come out alike: by name."""
    items = list(ways(TWO_HOSTS).items())
    expected = rank_choices(0, dict(items), measured(TWO_HOSTS), hosts=TWO_HOSTS)
    for seed in range(5):
        random.Random(seed).shuffle(items)
        assert rank_choices(0, dict(items), measured(TWO_HOSTS), hosts=TWO_HOSTS) == expected
    over_transport = [choice for choice in expected if not choice.in_memory_s]
    assert [choice.predicted_s for choice in over_transport] == [0.0] * len(over_transport)
    assert [choice.name for choice in over_transport] == sorted(choice.name for choice in over_transport)


def test_memory_is_looked_up_and_allocated_memory_is_faster() -> None:
    for allocated, expected in ((False, 1e-3), (True, 2e-4)):
        choices = rank_choices(1 << 20, ways(ONE_HOST), measured(ONE_HOST), hosts=ONE_HOST, allocated=allocated)
        assert next(choice for choice in choices if choice.name == "shared_memory").predicted_s == expected


def test_on_slow_links_memory_pays_and_few_rounds_do() -> None:
    for nbytes in (4096, 1 << 22):
        ranking = names(nbytes, TWO_HOSTS)
        across = [name for name in ranking if name.startswith("shared_memory+")]
        if nbytes == 4096:  # one exchange each
            assert set(across[:2]) == {"shared_memory+ring", "shared_memory+recursive_doubling"}
        assert all(ranking.index(across[0]) < ranking.index(flat) for flat in ("ring", "tree", "recursive_doubling"))
    alone = equal_hosts(8, 1)
    assert names(64, alone)[0] in ("recursive_doubling", "all_to_all", "master_worker")
    assert names(1 << 24, alone)[0] in ("ring", "butterfly", "circulant", "all_to_all")


def test_a_slice_for_every_place_all_at_once_over_the_hosts_link() -> None:
    """Three hosts of two: two rings of three, each with half of the buffer, share the links."""
    hosts = equal_hosts(6, 2)
    network = Network(hosts, FAST, Link(0, 1e-8), 0.0)
    timeline = simulate(in_columns(ALL_REDUCE["ring"], hosts), network, 1200, segment_bytes=1 << 30)
    assert timeline.num_rounds == 4
    assert timeline.host_bytes_sent == (6400, 6400, 6400)  # 4/3 of 4800
    assert timeline.bytes_sent == (3200,) * 6
    assert timeline.makespan_s == pytest.approx(6400e-8)


def test_of_equal_prices_the_ranks_share_the_burden() -> None:
    """Bytes go one after another through what the host shares: master-worker is as cheap as what spreads them."""
    hosts = ((0, 1, 2, 3),)
    network = Network(hosts, Link(1e-6, 1e-9, shared_s=1e-9), Link(1e-6, 1e-9))
    both = {name: ALL_REDUCE[name] for name in ("master_worker", "all_to_all")}
    choices = rank_choices(16 << 20, both, Measured(network, None), hosts=hosts)
    assert choices[0].predicted_s == pytest.approx(choices[1].predicted_s, rel=0.05)
    assert choices[0].name == "all_to_all"


def test_hosts_of_different_size_carry_as_many_slices_as_the_smallest_has_ranks() -> None:
    hosts = ((0, 1, 2), (3, 4))
    (choice,) = rank_choices(4096, {"shared_memory+ring": ALL_REDUCE["ring"]}, measured(hosts), hosts=hosts)
    assert choice.over_transport is not None
    assert choice.over_transport.network.hosts == ((0, 1), (2, 3))
    assert choice.predicted_s == pytest.approx(choice.in_memory_s + choice.over_transport.price_s())


def test_memory_works_while_the_wire_does() -> None:
    """Ten pieces: of what memory takes, a tenth is seen, unless it is the slower one."""
    nbytes = 10 * CROSSING_BYTES
    for memory_s in (1e-3, 10.0):
        memory = Curve((1 << 10, nbytes), (0.0, memory_s))
        figures = Measured(Network(TWO_HOSTS, FAST, SLOW), SharedMemory(memory, memory), 5e-3, mixed_call_s=3e-3)
        ring = {"shared_memory+ring": ALL_REDUCE["ring"]}
        (choice,) = rank_choices(nbytes, ring, figures, hosts=TWO_HOSTS)
        assert choice.num_crossings == 10
        assert choice.over_transport is not None
        crossing_s = choice.over_transport.price_s()
        piece_s = memory.at(CROSSING_BYTES)
        expected_s = piece_s + 10 * crossing_s if memory_s == 1e-3 else 10 * piece_s + crossing_s
        assert choice.predicted_s == pytest.approx(3e-3 + expected_s)


def test_a_call_has_its_price() -> None:
    figures = Measured(Network(ONE_HOST, FAST, SLOW), None, call_s=1e-3)
    (choice,) = rank_choices(0, {"ring": ALL_REDUCE["ring"]}, figures, hosts=ONE_HOST)
    assert choice.predicted_s == choice.call_s == 1e-3


# --- the canonical order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hosts", [ONE_HOST, TWO_HOSTS, equal_hosts(6, 2), equal_hosts(6, 3), ((0, 2), (1, 3)), ((0, 1), (2,))]
)
def test_canonical_leaves_only_those(hosts: Hosts) -> None:
    num_ranks = sum(map(len, hosts))
    left = set(names(1 << 16, hosts, order="canonical"))
    for name, schedule in all_reduce_schedules(hosts).items():
        assert (name in left) == schedule.check(num_ranks).canonical
    assert "tree" in left
    assert left <= set(ways(hosts))


def test_memory_is_canonical_where_its_ranks_are_a_branch_of_the_tree() -> None:
    ring, tree = ALL_REDUCE["ring"], ALL_REDUCE["tree"]
    assert is_canonical("shared_memory", None, equal_hosts(7, 7))
    assert is_canonical("shared_memory+ring", ring, TWO_HOSTS)  # a + b is b + a
    assert is_canonical("shared_memory+tree", tree, equal_hosts(12, 4))
    assert is_canonical("shared_memory+tree", tree, ((0, 1), (2,)))
    assert not is_canonical("shared_memory+ring", ring, equal_hosts(6, 2))
    assert not is_canonical("shared_memory+tree", tree, equal_hosts(6, 3))  # ((0, 1), 2) is no branch of it
    assert not is_canonical("shared_memory+tree", tree, ((0, 2), (1, 3)))
    assert not is_canonical("shared_memory+tree", tree, ((0,), (1, 2)))


# --- what a user reads -----------------------------------------------------------------------------------------------


def test_explain_is_a_table() -> None:
    text = explain(1 << 22, rank_choices(1 << 22, ways(ONE_HOST), measured(ONE_HOST), hosts=ONE_HOST))
    title, header, *rows = text.splitlines()
    assert title.startswith("all-reduce of 4,194,304 bytes")
    assert header.split()[:3] == ["way", "predicted", "rounds"]
    assert len(rows) == len(ways(ONE_HOST))
    memory = next(row for row in rows if " shared_memory " in row)
    assert memory.endswith("memory 100 %")
    ring = next(row for row in rows if " ring " in row)
    assert " 6 MB" in ring  # 2(p−1)/p
    assert "bytes" in ring
    assert [row.split()[0] for row in rows] == [str(number) for number in range(1, len(rows) + 1)]


def test_explain_of_nothing_and_of_tiny_times() -> None:
    assert explain(0, []).count("\n") == 1
    assert "0.250 µs" in explain(4, [Choice("ring", 2.5e-7)])
    assert "1.50 s" in explain(4, [Choice("ring", 1.5)])
