"""Selection: links are measured alike on all ranks, formulas order the routes, and the fastest of a trial is taken."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from faulty import Faulty
from torch import Tensor
from torch.distributed import HashStore

import ddp.comm.plan as selection
from ddp.collectives.catalog import ALL_REDUCE, all_reduce_schedules
from ddp.collectives.cost import Link, Network, equal_hosts, formula_s, textbook
from ddp.collectives.placed import Hosts
from ddp.comm.flat_collectives import FlatCollectives, Route, possible_routes
from ddp.comm.host_links import HostLinks, Settings
from ddp.comm.plan import (
    BULK_BYTES,
    TRIAL_S,
    Candidate,
    Plan,
    affordable,
    agreed,
    fastest,
    measured_network,
    network_of,
    ranked,
    size_of_trial,
    table,
)
from ddp.comm.transport.edge import Transport, TransportError
from ddp.comm.watch.watchdog import Watchdog
from ddp.errors import ConfigError
from recipes.tutorial.simulated import SimulatedNetwork, SimulatedTransport

FAST, SLOW = Link(2e-6, 1e-10), Link(1e-3, 1e-8)
ONE_HOST, TWO_HOSTS = equal_hosts(4, 4), equal_hosts(4, 2)


def network(hosts: Hosts) -> Network:
    return Network(hosts, FAST, SLOW, 1e-10)


def routes(hosts: Hosts) -> Mapping[str, Route]:
    return possible_routes(hosts, shared_memory=True)


def by_formula(nbytes: int, hosts: Hosts) -> list[Candidate]:
    return ranked(routes(hosts).values(), nbytes, network(hosts))


def names(nbytes: int, hosts: Hosts) -> list[str]:
    return [candidate.route.name for candidate in by_formula(nbytes, hosts)]


# --- links -----------------------------------------------------------------------------------------------------------


def links_of(transport: Transport, settings: Settings) -> HostLinks:
    """Returns edges that no watchdog looks after."""
    watchdog = Watchdog(HashStore(), transport.rank, 1, generation=0, warn_s=math.inf, abort_s=settings.abort_s)
    return HostLinks(transport, watchdog, settings)


def on_threads(hosts: Hosts) -> list[Network]:
    patient = Settings(abort_s=20)
    simulated = SimulatedNetwork(sum(map(len, hosts)))
    return simulated.run(lambda transport: measured_network(links_of(transport, patient), hosts, patient.device))


@pytest.mark.parametrize(
    "hosts", [((0, 1),), ((0,), (1,), (2,)), ((0, 1), (2, 3)), ((0, 2, 4), (1, 3)), ((0, 1), (2,))], ids=str
)
def test_all_ranks_agree_on_sane_figures(hosts: Hosts) -> None:
    first, *others = on_threads(hosts)
    links = (first.inside, first.between)
    figures = [figure for link in links for figure in (link.alpha_s, link.beta_s, link.gap_s)]
    assert all(math.isfinite(f) and f >= 0 for f in figures)
    assert first.gamma_s > 0 and min(link.alpha_s for link in links) > 0
    assert first.hosts == hosts
    assert all(other == first for other in others)


def test_links_that_do_not_exist_are_the_others() -> None:
    one_host, hosts_of_one = on_threads(((0, 1),))[0], on_threads(((0,), (1,)))[0]
    assert one_host.between == one_host.inside
    assert hosts_of_one.inside == hosts_of_one.between


def test_one_rank_has_nothing_to_measure() -> None:
    (alone,) = on_threads(((0,),))
    assert alone.inside.alpha_s == alone.between.beta_s == 0.0


def test_a_rank_that_fails_ends_it_within_the_deadline() -> None:
    impatient = Settings(abort_s=0.2)

    def program(transport: SimulatedTransport) -> str:
        faulty = Faulty(transport, fail_at={1: 3}, how="silent")
        try:
            measured_network(links_of(faulty, impatient), ((0,), (1,), (2,)), impatient.device)
        except TransportError as error:
            return str(error)
        return "no error"

    assert all("timed out" in text for text in SimulatedNetwork(3).run(program))


def test_what_the_times_become() -> None:
    times = {"adding": BULK_BYTES * 1e-11}
    times |= {"inside alpha": 4e-6, "inside gap": 11e-6, "inside beta": 4e-6 + BULK_BYTES * 1e-10}
    times |= {"between alpha": 1e-3, "between gap": 1e-3, "between beta": 1e-3 + BULK_BYTES * 1e-9}
    found = network_of(times, ((0, 1), (2, 3)))
    assert (found.inside.alpha_s, found.inside.beta_s, found.inside.gap_s) == pytest.approx((4e-6, 1e-10, 1e-6))
    assert (found.between.alpha_s, found.between.beta_s, found.between.gap_s) == pytest.approx((1e-3, 1e-9, 0))
    assert found.gamma_s == pytest.approx(1e-11)


def test_of_ranks_the_slowest_counts_and_of_repetitions_the_median() -> None:
    """Rank 1 had no part in the first measurement."""
    everyone = [{"a": [1.0, 9.0, 1.0], "b": [5.0]}, {"b": [4.0]}, {"a": [2.0, 1.0, 3.0], "b": [1.0]}]
    assert agreed({}, lambda mine: everyone) == {"a": 3.0, "b": 5.0}


# --- formulas --------------------------------------------------------------------------------------------------------


def test_every_way_is_ranked_by_its_formula() -> None:
    for hosts in (ONE_HOST, TWO_HOSTS, ((0, 1, 2), (3,))):
        candidates = by_formula(1 << 16, hosts)
        assert {each.route.name for each in candidates} == set(routes(hosts))
        times = [each.formula_s for each in candidates]
        assert times == sorted(times)
        for route, seconds in candidates:
            if not route.in_memory:
                assert seconds == textbook(route.algorithm, 1 << 16, network(hosts))


def test_the_order_of_the_ways_does_not_matter() -> None:
    """Equal costs too come out alike: by name."""
    these, free = list(routes(TWO_HOSTS).values()), Network(TWO_HOSTS, Link(0.0, 0.0), Link(0.0, 0.0))
    expected = ranked(these, 0, free)
    for seed in range(5):
        random.Random(seed).shuffle(these)
        assert ranked(these, 0, free) == expected
    assert [each.route.name for each in expected] == sorted(each.route.name for each in expected)


def test_in_memory_a_host_counts_as_one_rank() -> None:
    across = Network(equal_hosts(3, 1), FAST, SLOW, 1e-10)
    hosts = ((0, 1, 2), (3, 4), (5,))
    found = {each.route.name: each.formula_s for each in by_formula(4096, hosts)}
    for name, schedule in ALL_REDUCE.items():
        assert found[f"shared_memory+{name}"] == formula_s(name, schedule, 4096, across)
    assert by_formula(1 << 20, ONE_HOST)[0].route.name == "shared_memory"


def test_on_slow_links_memory_pays_and_few_rounds_do() -> None:
    for nbytes in (4096, 1 << 22):
        ranking = names(nbytes, TWO_HOSTS)
        across = [name for name in ranking if name.startswith("shared_memory+")]
        if nbytes == 4096:  # one exchange each
            one_exchange = ("ring", "recursive_doubling", "naive_all_to_all")
            assert set(across[:3]) == {f"shared_memory+{name}" for name in one_exchange}
        assert all(ranking.index(across[0]) < ranking.index(flat) for flat in ("ring", "tree", "recursive_doubling"))
    alone = equal_hosts(8, 1)
    assert names(64, alone)[0] == "naive_all_to_all"
    assert names(1 << 24, alone)[0] in ("ring", "butterfly", "circulant", "all_to_all")


# --- the choice ------------------------------------------------------------------------------------------------------


class Rest(NamedTuple):
    """The edges of rank 0. The times of all ranks in a trial are given."""

    by_rank: list[dict[str, float]]
    rank: int = 0
    world_size: int = 1

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        names = json.loads(mine)
        return [json.dumps({name: [times.get(name, 1.0)] for name in names}).encode() for times in self.by_rank]


class AtOnce:
    """The queue of rank 0: each call has its turn at once."""

    def number(self, operation: str, how: tuple[int, ...]) -> None: ...

    def run(self, call: None, collective: Callable[[], Any]) -> Any:
        return collective()


def auto(
    hosts: Hosts, *, by_rank: Sequence[dict[str, float]] = ({},), ran: list[str] | None = None, **settings: Any
) -> Plan:
    """Returns rank 0's in a world where no link is measured.

    Args:
        by_rank: what a trial takes on every rank, by way; ways that are not in it take 1 s.
        ran: gets the names of the ways that run.
    """

    class Timed(FlatCollectives):
        def all_reduce(self, flat: Tensor, route: Route, *_: Any, **__: Any) -> None:
            if ran is not None:
                ran.append(route.name)

    links: Any = Rest(list(by_rank))
    queue: Any = AtOnce()
    made = Plan(Timed(links, hosts, routes(hosts)), Settings(**settings), queue)
    made._network = network(hosts)
    return made


FAR = equal_hosts(4, 1)  # on SLOW links a small all-reduce takes 2 ms and more


def test_the_fastest_of_what_was_timed_is_taken_and_the_slowest_rank_counts() -> None:
    ran: list[str] = []
    chooser = auto(FAR, by_rank=[{"tree": 1e-3, "all_to_all": 2e-3}, {"tree": 3e-3, "all_to_all": 2e-3}], ran=ran)
    assert chooser.choose(1000) == "all_to_all"
    assert set(ran) >= {"tree", "all_to_all", "recursive_doubling"}
    assert chooser.choices == {"1000": "all_to_all"}


def test_of_nearly_equal_times_memory_goes_first_and_then_the_ring() -> None:
    times = {"tree": 1.0, "butterfly": 1.02, "ring": 1.09, "shared_memory+tree": 1.2}
    assert fastest(routes(TWO_HOSTS), times) == "ring"
    assert fastest(routes(TWO_HOSTS), times | {"ring": 1.2}) == "tree"
    assert fastest(routes(TWO_HOSTS), times | {"shared_memory+tree": 1.09}) == "shared_memory+tree"


def test_sizes_up_to_the_same_power_of_two_share_a_trial() -> None:
    ran: list[str] = []
    chooser = auto(FAR, by_rank=[{"tree": 1e-3}], ran=ran)
    assert [size_of_trial(nbytes) for nbytes in (0, 1, 4, 5, 1000, 1024, 1025)] == [4, 4, 4, 8, 1024, 1024, 2048]
    first = chooser.choose(1000), len(ran)
    assert first == (chooser.choose(600), len(ran)) == ("tree", len(ran))
    chooser.choose(1025)
    assert len(ran) > first[1]
    assert chooser.choices == {"1000": "tree", "600": "tree", "1025": "tree"}


def test_what_takes_long_is_not_timed() -> None:
    """16 MB at 10 ns a byte: formulas have the last word, and a ring costs as much as anything with fewer rounds."""
    ran: list[str] = []
    chooser = auto(FAR, by_rank=[{"tree": 1e-3}], ran=ran)
    assert names(1 << 24, FAR)[0] != "ring"
    assert chooser.choose(1 << 24) == "ring"
    assert not ran
    ranking = by_formula(1 << 10, FAR)
    few = affordable([each for each in ranking for _ in range(100)])
    assert 1 < len(few) < 100 * len(ranking)
    assert sum(map(selection.trial_s, few)) <= TRIAL_S


def test_on_one_host_memory_is_taken_at_once() -> None:
    ran: list[str] = []
    assert auto(ONE_HOST, ran=ran).choose(1 << 20) == "shared_memory"
    assert not ran


def test_a_name_that_leaves_something_open_is_the_cheapest_that_matches() -> None:
    flat = torch.zeros(1 << 20)
    chooser = auto(TWO_HOSTS)
    expected = next(name for name in names(1 << 22, TWO_HOSTS) if name.startswith("shared_memory+"))
    assert chooser.route(flat, "shared_memory").name == expected
    assert chooser.route(flat, "tree").name == "tree"
    assert auto(TWO_HOSTS, algorithm="tree").route(flat, "auto").name == "tree"
    with pytest.raises(ConfigError, match=r"algorithm='abacus' is not possible here\. Choose one of auto, ring, tree"):
        chooser.check("abacus")


def test_pinned_choices_are_taken() -> None:
    ran: list[str] = []
    chooser = auto(FAR, ran=ran)
    chooser.pin({"4000": "tree"})
    assert chooser.route(torch.zeros(1000), "auto").name == "tree"
    assert not ran


@pytest.mark.parametrize(
    "hosts", [ONE_HOST, TWO_HOSTS, equal_hosts(6, 2), equal_hosts(6, 3), ((0, 2), (1, 3)), ((0, 1), (2,))]
)
def test_canonical_leaves_only_those(hosts: Hosts) -> None:
    num_ranks = sum(map(len, hosts))
    left = {each.route.name for each in auto(hosts, order="canonical").ranking(1 << 16)}
    for name, schedule in all_reduce_schedules(hosts).items():
        assert (name in left) == schedule.check(num_ranks).canonical
    assert "tree" in left
    assert left <= set(routes(hosts))


def test_a_trial_times_canonical_ways_only_if_asked_to() -> None:
    ran: list[str] = []
    chooser = auto(FAR, by_rank=[{"ring": 1e-3, "tree": 2e-3}], ran=ran, order="canonical")
    assert chooser.choose(1000) == "tree"
    assert all(routes(FAR)[name].is_canonical for name in ran)
    hosts = equal_hosts(6, 3)
    with pytest.raises(ConfigError, match="no route 'shared_memory' adds in canonical order here"):
        auto(hosts, order="canonical").route(torch.zeros(10), "shared_memory")


def test_a_sum_over_shards_adds_in_canonical_order_whatever_was_timed_or_pinned_before() -> None:
    chooser = auto(FAR, by_rank=[{"ring": 1e-3, "tree": 2e-3}])
    assert chooser.choose(1000) == "ring"
    route = chooser.route_over_shards(torch.zeros(250), 4)
    assert route is not None and route.name == "tree"
    assert "auto takes tree" in chooser.explain(1000, num_shards=4)
    chooser.pin({"4000 canonical": "ring"})
    route = chooser.route_over_shards(torch.zeros(1000), 4)
    assert route is not None and route.is_canonical


def test_a_wire_format_moves_fewer_bytes() -> None:
    nbytes = (1 << 14) + 4 * 64  # whole numbers, and a scale for each 256
    ranking = auto(FAR).ranking(1 << 16, wire="int8")
    assert [(each.route.name, each.formula_s) for each in ranking] == [
        (each.route.name, each.formula_s) for each in by_formula(nbytes, FAR)
    ]


def test_plain_and_narrow_tensors_of_a_size_have_their_own_choices() -> None:
    ran: list[str] = []
    chooser = auto(FAR, by_rank=[{"tree": 1e-3}], ran=ran)
    assert chooser.choose(1000) == "tree"
    num_ran = len(ran)
    assert chooser.choose(1000, "bf16") == "tree"
    assert len(ran) > num_ran
    assert chooser.choices == {"1000": "tree", "1000 bf16": "tree"}


# --- what a user reads -----------------------------------------------------------------------------------------------


def test_explain_is_a_table_of_formulas_and_times() -> None:
    timed = [{each.route.name: 2 * each.formula_s for each in by_formula(1 << 22, ONE_HOST)}]
    title, header, *rows = auto(ONE_HOST, by_rank=timed).explain(4_000_000).splitlines()
    assert title == "all-reduce of 4,000,000 bytes; auto takes shared_memory"
    assert header.split()[:3] == ["way", "formula", "rounds"]
    assert header.endswith("4 MiB timed")
    assert len(rows) == len(routes(ONE_HOST))
    assert rows[0].split()[1:5] == ["shared_memory", "-", "-", "-"]
    ring = next(row for row in rows if " ring " in row)
    assert " 5.72 MiB" in ring  # 2(p−1)/p
    assert [row.split()[0] for row in rows] == [str(number) for number in range(1, len(rows) + 1)]


def test_explain_times_the_cheapest_way_whatever_it_takes() -> None:
    ran: list[str] = []
    text = auto(FAR, by_rank=[{}], ran=ran).explain(1 << 24)
    assert set(ran) == {names(1 << 24, FAR)[0]}
    assert text.splitlines()[2].endswith(" 1.00 s")


def test_a_table_of_nothing_and_of_tiny_times() -> None:
    ring = routes(FAR)["ring"]
    assert len(table([], 4, 4, {})) == 1
    assert "0.25 µs" in table([Candidate(ring, 2.5e-7)], 4, 4, {})[1]
    assert "1.50 s" in table([Candidate(ring, 1.5)], 4, 4, {})[1]


def test_headlines() -> None:
    assert auto(ONE_HOST).describe() == "shared memory"
    assert auto(ONE_HOST, algorithm="ring").describe() == "ring"
    assert auto(TWO_HOSTS).describe() == "auto over shared memory and transport, hosts of 2+2"
    assert auto(FAR, order="canonical").describe() == "auto over transport, hosts of 1+1+1+1, canonical"
