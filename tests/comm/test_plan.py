"""Selection: a pure function of agreed numbers that ranks every way as the network makes it pay, and trials."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ddp.comm.plan as selection
from ddp.collectives.catalog import ALL_REDUCE, all_reduce_schedules
from ddp.collectives.placed import Hosts
from ddp.collectives.simulate import Link, Network, equal_hosts, simulate
from ddp.comm.calibrate import Curve, Measured
from ddp.comm.flat_collectives import FlatCollectives, Route, possible_routes
from ddp.comm.host_links import CROSSING_BYTES
from ddp.comm.plan import TRIAL_S, Choice, Plan, affordable, fastest, in_columns, ranked, size_of_trial, table
from ddp.comm.settings import Settings
from ddp.errors import ConfigError

FAST, SLOW = Link(2e-6, 1e-10), Link(1e-3, 1e-8)
ORDINARY, ALLOCATED = Curve((1 << 10, 1 << 20), (1e-5, 1e-3)), Curve((1 << 10, 1 << 20), (1e-5, 2e-4))
ONE_HOST, TWO_HOSTS = equal_hosts(4, 4), equal_hosts(4, 2)


def measured(hosts: Hosts) -> Measured:
    network = Network(hosts, FAST, SLOW, 1e-10)
    return Measured(network, ORDINARY, ALLOCATED) if any(len(host) > 1 for host in hosts) else Measured(network)


def routes(hosts: Hosts) -> Mapping[str, Route]:
    return possible_routes(hosts, shared_memory=True)


def predictions(nbytes: int, hosts: Hosts) -> list[Choice]:
    return ranked(routes(hosts).values(), nbytes, measured(hosts))


def names(nbytes: int, hosts: Hosts) -> list[str]:
    return [choice.route.name for choice in predictions(nbytes, hosts)]


def found(choices: list[Choice], name: str) -> Choice:
    return next(choice for choice in choices if choice.route.name == name)


# --- predictions -----------------------------------------------------------------------------------------------------


def test_every_way_is_ranked_by_its_time() -> None:
    for hosts in (ONE_HOST, TWO_HOSTS, ((0, 1, 2), (3,))):
        choices = predictions(1 << 16, hosts)
        assert {choice.route.name for choice in choices} == set(routes(hosts))
        times = [choice.predicted_s for choice in choices]
        assert times == sorted(times)
        assert times[0] > 0


def test_the_order_of_the_ways_does_not_matter() -> None:
    """Equal costs too come out alike: by name."""
    these = list(routes(TWO_HOSTS).values())
    expected = ranked(these, 0, measured(TWO_HOSTS))
    for seed in range(5):
        random.Random(seed).shuffle(these)
        assert ranked(these, 0, measured(TWO_HOSTS)) == expected
    over_transport = [choice for choice in expected if not choice.route.in_memory]
    assert [choice.predicted_s for choice in over_transport] == [0.0] * len(over_transport)
    assert [choice.route.name for choice in over_transport] == sorted(choice.route.name for choice in over_transport)


def test_memory_is_looked_up_and_allocated_memory_is_faster() -> None:
    for allocated, expected in ((False, 1e-3), (True, 2e-4)):
        choices = ranked(routes(ONE_HOST).values(), 1 << 20, measured(ONE_HOST), allocated=allocated)
        assert found(choices, "shared_memory").predicted_s == expected


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


def test_a_slice_for_every_place_all_at_once_over_the_hosts_link() -> None:
    """Three hosts of two: two rings of three, each with half of the buffer, share the links."""
    hosts = equal_hosts(6, 2)
    network = Network(hosts, FAST, Link(0, 1e-8), 0.0)
    timeline = simulate(in_columns(ALL_REDUCE["ring"], hosts), network, 1200, segment_bytes=1 << 30)
    assert timeline.num_rounds == 4
    assert timeline.host_bytes_sent == (6400, 6400, 6400)  # 4/3 of 4800
    assert timeline.bytes_sent == (3200,) * 6
    assert timeline.makespan_s == pytest.approx(6400e-8)


def test_hosts_of_different_size_carry_as_many_slices_as_the_smallest_has_ranks() -> None:
    choice = found(predictions(4096, ((0, 1, 2), (3, 4))), "shared_memory+ring")
    assert choice.crossing is not None
    assert choice.crossing.network.hosts == ((0, 1), (2, 3))
    assert choice.predicted_s == pytest.approx(choice.memory_s + choice.crossing.cost_s)


def test_memory_works_while_the_wire_does() -> None:
    """Ten pieces: of what memory takes, a tenth is seen, unless it is the slower one."""
    nbytes = 10 * CROSSING_BYTES
    for memory_s in (1e-3, 10.0):
        memory = Curve((1 << 10, nbytes), (0.0, memory_s))
        figures = Measured(Network(TWO_HOSTS, FAST, SLOW), memory, memory)
        choice = found(ranked(routes(TWO_HOSTS).values(), nbytes, figures), "shared_memory+ring")
        assert choice.crossing is not None
        assert choice.crossing.num_times == 10
        crossing_s, piece_s = choice.crossing.cost_s, memory.at(CROSSING_BYTES)
        expected_s = piece_s + 10 * crossing_s if memory_s == 1e-3 else 10 * piece_s + crossing_s
        assert choice.predicted_s == pytest.approx(expected_s)


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
    """Returns rank 0's in a world where nothing is measured.

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
    made._measured = measured(hosts)
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
    """16 MB at 10 ns a byte: the model has the last word, and a ring costs as much as anything with fewer rounds."""
    ran: list[str] = []
    chooser = auto(FAR, by_rank=[{"tree": 1e-3}], ran=ran)
    assert names(1 << 24, FAR)[0] != "ring"
    assert chooser.choose(1 << 24) == "ring"
    assert not ran
    ranking = predictions(1 << 10, FAR)
    few = affordable([choice for choice in ranking for _ in range(100)])
    assert 1 < len(few) < 100 * len(ranking)
    assert sum(map(selection.trial_s, few)) <= TRIAL_S


def test_on_one_host_memory_is_taken_at_once() -> None:
    ran: list[str] = []
    assert auto(ONE_HOST, ran=ran).choose(1 << 20) == "shared_memory"
    assert not ran


def test_a_name_that_leaves_something_open_is_the_cheapest_that_answers_to_it() -> None:
    flat = torch.zeros(1 << 20)
    chooser = auto(TWO_HOSTS)
    expected = next(name for name in names(1 << 22, TWO_HOSTS) if name.startswith("shared_memory+"))
    assert chooser.route(flat, "shared_memory").name == expected
    assert chooser.route(flat, "tree").name == "tree"
    assert auto(TWO_HOSTS, algorithm="tree").route(flat, "auto").name == "tree"
    with pytest.raises(ConfigError, match=r"algorithm='abacus' is not possible here\. Choose one of auto, ring, tree"):
        chooser.check("abacus")


def test_a_tensor_elsewhere_is_not_reduced_in_memory() -> None:
    elsewhere = torch.zeros(10, device="meta")
    with pytest.raises(ConfigError, match="a tensor on meta: this communicator's are on the CPU; move it there"):
        auto(ONE_HOST).route(elsewhere, "auto")
    assert auto(ONE_HOST).route(elsewhere, "ring").name == "ring"


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
    left = {choice.route.name for choice in auto(hosts, order="canonical").ranking(1 << 16)}
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
    with pytest.raises(ConfigError, match="no way 'shared_memory' adds in canonical order here"):
        auto(hosts, order="canonical").route(torch.zeros(10), "shared_memory")


def test_a_way_is_charged_for_each_time_that_a_wire_format_rounds() -> None:
    """Recursive doubling sends all numbers twice, and rounds them twice; all-to-all rounds half as many."""
    chooser = auto(FAR)
    cheap, dear = ({"int8": seconds} for seconds in (0.0, 1e-6))
    chooser._adding = cheap
    assert [choice.route.name for choice in chooser.ranking(1 << 16, wire="int8")][2] == "recursive_doubling"
    chooser._adding = dear
    ranking = chooser.ranking(1 << 16, wire="int8")
    assert "recursive_doubling" not in [choice.route.name for choice in ranking][:4]
    crossing = ranking[0].crossing
    assert crossing is not None and crossing.nbytes == (1 << 14) + 4 * 64  # whole numbers, and a scale for each 256


def test_plain_and_narrow_tensors_of_a_size_have_their_own_choices() -> None:
    ran: list[str] = []
    chooser = auto(FAR, by_rank=[{"tree": 1e-3}], ran=ran)
    chooser._adding = {"bf16": 0.0}
    assert chooser.choose(1000) == "tree"
    num_ran = len(ran)
    assert chooser.choose(1000, "bf16") == "tree"
    assert len(ran) > num_ran
    assert chooser.choices == {"1000": "tree", "1000 bf16": "tree"}


# --- what a user reads -----------------------------------------------------------------------------------------------


def test_explain_is_a_table_that_says_how_far_predictions_were_off() -> None:
    predicted = {choice.route.name: choice.predicted_s for choice in predictions(1 << 22, ONE_HOST)}
    timed = [{name: seconds * (2.0 if name == "ring" else 1.5) for name, seconds in predicted.items()}]
    title, header, *rows, last = auto(ONE_HOST, by_rank=timed).explain(4_000_000).splitlines()
    assert title == "all-reduce of 4,000,000 bytes; auto takes shared_memory"
    assert header.split()[:3] == ["way", "predicted", "rounds"]
    assert header.endswith("4 MiB timed")
    assert len(rows) == len(routes(ONE_HOST))
    memory = next(row for row in rows if " shared_memory " in row)
    assert "memory 100 %" in memory
    ring = next(row for row in rows if " ring " in row)
    assert " 5.72 MiB" in ring  # 2(p−1)/p
    assert "bytes" in ring
    assert [row.split()[0] for row in rows] == [str(number) for number in range(1, len(rows) + 1)]
    assert last == "what was timed took 1.50 to 2.00 times what was predicted"


def test_explain_times_the_cheapest_way_whatever_it_takes() -> None:
    ran: list[str] = []
    text = auto(FAR, by_rank=[{}], ran=ran).explain(1 << 24)
    assert set(ran) == {names(1 << 24, FAR)[0]}
    assert text.splitlines()[2].endswith(" 1.00 s")
    assert text.splitlines()[-1].startswith("what was timed took ")


def test_a_table_of_nothing_and_of_tiny_times() -> None:
    ring = routes(FAR)["ring"]
    assert len(table([], 4, {})) == 1
    assert "0.25 µs" in table([Choice(ring, 2.5e-7, 0.0, None)], 4, {})[1]
    assert "1.50 s" in table([Choice(ring, 1.5, 0.0, None)], 4, {})[1]


def test_headlines() -> None:
    assert auto(ONE_HOST).describe() == "shared memory"
    assert auto(ONE_HOST, algorithm="ring").describe() == "ring"
    assert auto(TWO_HOSTS).describe() == "auto over shared memory and transport, hosts of 2+2"
    assert auto(FAR, order="canonical").describe() == "auto over transport, hosts of 1+1+1+1, canonical"
