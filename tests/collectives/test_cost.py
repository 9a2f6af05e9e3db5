"""Costs: the textbook's formulas against the simulator, and counts of messages and bytes."""

from __future__ import annotations

import itertools

import pytest

from ddp.collectives.catalog import ALL_REDUCE, all_reduce_schedules
from ddp.collectives.cost import (
    FLAT,
    HIERARCHICAL,
    Link,
    Network,
    bus_bandwidth,
    bus_factor,
    equal_hosts,
    formula_s,
    textbook,
    volume,
)
from ddp.collectives.schedule import Goal
from ddp.collectives.simulate import cost_s, simulate

LINK = Link(alpha_s=3e-6, beta_s=2e-9)
WITH_GAP = Link(alpha_s=3e-6, beta_s=2e-9, gap_s=1e-6)
GAMMA = 5e-10
ANY = 1 << 40  # a segment that is never reached: one lane

EXACT = {"ring", "butterfly", "recursive_doubling", "circulant", "all_to_all", "master_worker", "two_dimensional"}
EXACT |= {"naive_all_to_all"}
EXACT_FOR_POWERS_OF_TWO = {"tree"}
EXACT_WITHOUT_GAP = {"circulant"}


def homogeneous(num_ranks: int, link: Link) -> Network:
    return Network(equal_hosts(num_ranks, num_ranks), link, link, GAMMA)


@pytest.mark.parametrize("name", [*FLAT, "two_dimensional"])
def test_the_textbook_is_what_the_simulator_says(name: str) -> None:
    """At powers of two and their neighbours, on which folded ranks and the depth of trees depend."""
    for num_ranks, link in itertools.product((2, 3, 4, 5, 7, 8, 12, 16, 17), (LINK, WITH_GAP)):
        network = homogeneous(num_ranks, link)
        schedule = all_reduce_schedules(network.hosts).get(name)
        if schedule is None:
            continue  # no grid of so many ranks
        nbytes = schedule.num_chunks(num_ranks) * 480
        simulated_s = simulate(schedule, network, nbytes // 4, segment_bytes=ANY).makespan_s
        expected_s = textbook(name, nbytes, network)
        assert expected_s is not None
        exact = name in EXACT and not (link.gap_s and name in EXACT_WITHOUT_GAP)
        if exact or (name in EXACT_FOR_POWERS_OF_TWO and num_ranks & (num_ranks - 1) == 0):
            assert simulated_s == pytest.approx(expected_s, rel=1e-9), (num_ranks, link)
        else:
            assert expected_s / 2 <= simulated_s * (1 + 1e-9) <= expected_s * (1 + 2e-9), (num_ranks, link)


@pytest.mark.parametrize(("num_hosts", "per_host"), [(2, 2), (4, 2), (2, 4), (4, 4), (3, 3), (5, 2)])
def test_hierarchical_formulas_and_bounds_on_several_hosts(num_hosts: int, per_host: int) -> None:
    network = Network(equal_hosts(num_hosts * per_host, per_host), LINK, Link(2e-5, 8e-9), GAMMA)
    for name, schedule in all_reduce_schedules(network.hosts).items():
        nbytes = schedule.num_chunks(network.num_ranks) * 480
        simulated_s = simulate(schedule, network, nbytes // 4, segment_bytes=ANY).makespan_s
        expected_s = textbook(name, nbytes, network)
        assert expected_s is not None
        assert simulated_s <= expected_s * (1 + 1e-9)
        if name == "ring" or (name in HIERARCHICAL and num_hosts in (2, 4) and per_host in (2, 4)):
            assert simulated_s == pytest.approx(expected_s, rel=1e-9)


def test_unknown_names_have_no_formula() -> None:
    assert textbook("star", 1000, homogeneous(4, LINK)) is None


def test_without_a_formula_rounds_and_the_busiest_rank_s_bytes_count() -> None:
    """For a ring that is nearly its formula, which adds in half of the rounds."""
    network, ring = homogeneous(4, LINK), ALL_REDUCE["ring"]
    assert formula_s("ring", ring, 1 << 20, network) == textbook("ring", 1 << 20, network)
    expected_s = 6 * LINK.alpha_s + 1.5 * (1 << 20) * (LINK.beta_s + GAMMA)
    assert formula_s("mine", ring, 1 << 20, network) == pytest.approx(expected_s)


# --- costs ----------------------------------------------------------------------------------------------------------


def test_a_cost_grows_with_the_bytes_and_small_ones_want_few_rounds() -> None:
    network = homogeneous(8, LINK)
    for name, schedule in ALL_REDUCE.items():
        costs = [cost_s(name, schedule, nbytes, network) for nbytes in (0, 4, 1 << 10, 1 << 16, 1 << 20, 1 << 24)]
        assert costs == sorted(costs)
        assert costs[0] == 0.0  # nothing to send is nothing sent
    small, large = ({name: cost_s(name, s, n, network) for name, s in ALL_REDUCE.items()} for n in (64, 1 << 24))
    assert small["recursive_doubling"] < small["butterfly"] < small["ring"]
    assert large["ring"] < large["recursive_doubling"] < large["tree"] < large["master_worker"]


def test_one_rank_costs_nothing() -> None:
    assert cost_s("ring", ALL_REDUCE["ring"], 1 << 20, homogeneous(1, LINK)) == 0.0


def test_too_many_messages_are_predicted_by_the_formula() -> None:
    """A round-robin of 400 ranks has 319,200 messages, a ring as many: but there one host stands for all."""
    network = Network(equal_hosts(400, 4), LINK, Link(2e-5, 8e-9), GAMMA)
    round_robin, ring = ALL_REDUCE["round_robin"], ALL_REDUCE["ring"]
    assert cost_s("round_robin", round_robin, 1 << 20, network) == textbook("round_robin", 1 << 20, network)
    assert cost_s("ring", ring, 400 * 400, network) == simulate(ring, network, 400 * 100).makespan_s


def test_a_buffer_of_fewer_elements_than_chunks_is_not_simulated_for_ten_thousand_ranks() -> None:
    """A ring's ranks have different chunks then, so one of them cannot stand for all."""
    network = Network(equal_hosts(10_000, 1), LINK, LINK, GAMMA)
    assert cost_s("ring", ALL_REDUCE["ring"], 4096, network) == textbook("ring", 4096, network)


# --- counts and bandwidths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("name", ALL_REDUCE)
def test_volume_is_what_the_proof_counts(name: str, num_ranks: int) -> None:
    proof = ALL_REDUCE[name].check(num_ranks)
    counted = volume(ALL_REDUCE[name], 1_000_000, num_ranks)
    assert counted.num_rounds == proof.num_rounds
    assert counted.bytes_sent == pytest.approx(1_000_000 * float(proof.busiest))


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """A ring at full speed: the bus bandwidth is the link's, at any number of ranks."""
    for num_ranks in (2, 3, 8, 64):
        network = Network(equal_hosts(num_ranks, 1), Link(0, 1e-9), Link(0, 1e-9))
        nbytes = num_ranks * 4000
        seconds = cost_s("ring", ALL_REDUCE["ring"], nbytes, network)
        assert bus_bandwidth(Goal.ALL_REDUCE, num_ranks, nbytes, seconds) == pytest.approx(1e9)
        assert nbytes / seconds == pytest.approx(1e9 / bus_factor(Goal.ALL_REDUCE, num_ranks))
    assert (
        bus_factor(Goal.ALL_GATHER, 4) == bus_factor(Goal.REDUCE_SCATTER, 4) == bus_factor(Goal.ALL_TO_ALL, 4) == 0.75
    )
    assert bus_factor(Goal.BROADCAST, 4) == bus_factor(Goal.REDUCE, 4) == 1.0
