"""Slice owners: proven for every number of shards and ranks; counted; and the same bits on real tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddp.collectives import all_to_all, shards
from ddp.collectives.all_to_all import schedule_over_shards
from ddp.collectives.catalog import ALL_REDUCE, OVER_SHARDS, SCHEDULES, SHIPPED, all_reduce_schedules
from ddp.collectives.cost import Link, Network, equal_hosts, textbook, volume
from ddp.collectives.placed import placed, rooted
from ddp.collectives.schedule import Add, Goal, Recv, Round, Schedule, ScheduleError, Send, canonical, draw, offsets
from ddp.collectives.shards import halves, nodes_by_rank, shards_of_rank
from ddp.collectives.simulate import cost_s, repeats, simulate
from ddp.comm.host_links import HostLinks, Settings
from ddp.comm.reduction import SUM, Reduction
from ddp.comm.transport.edge import Transport
from ddp.comm.watch.watchdog import Watchdog
from ddp.errors import ConfigError
from recipes.tutorial.simulated import SimulatedNetwork

GOALS = Goal.ALL_REDUCE, Goal.REDUCE_SCATTER


def over_shards(num_shards: int) -> Schedule:
    return schedule_over_shards(num_shards, Goal.ALL_REDUCE)


# --- the proof -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("num_shards", range(1, 33))
def test_the_sum_is_the_tree_over_the_shards_on_any_number_of_ranks(num_shards: int, goal: Goal) -> None:
    for num_ranks in range(1, min(num_shards, 9) + 1):
        proof = schedule_over_shards(num_shards, goal).check(num_ranks)
        assert set(proof.expressions) == {canonical(num_shards)}
        assert proof.canonical
        assert proof.num_rounds == (2 if goal is Goal.ALL_REDUCE else 1)
        assert proof.num_chunks == num_ranks


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_ranks_send_what_the_table_says(num_ranks: int) -> None:
    """k + 1 chunks to everyone else, where k is the number of the rank's nodes."""
    proof = over_shards(8).check(num_ranks)
    nodes = [len(of_rank) for of_rank in nodes_by_rank(num_ranks, 8)]
    assert proof.messages_sent == proof.chunks_sent == tuple((k + 1) * (num_ranks - 1) for k in nodes)
    total = sum(proof.chunks_sent) / num_ranks
    assert sum(nodes) == [1, 2, 5, 4, 6, 6, 7, 8][num_ranks - 1]
    assert total == pytest.approx([0, 2, 16 / 3, 6, 8.8, 10, 12, 14][num_ranks - 1])


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_a_shard_per_rank_is_an_all_reduce_over_ranks(num_ranks: int) -> None:
    over_ranks = over_shards(num_ranks)._replace(num_shards=None).check(num_ranks)
    assert set(over_ranks.expressions) == {canonical(num_ranks)}
    assert over_ranks.chunks_sent == ALL_REDUCE["all_to_all"].check(num_ranks).chunks_sent


def test_the_total_ends_in_buffer_0_whichever_side_that_is() -> None:
    (round_1, _) = all_to_all.all_reduce_over_shards(1, 3, num_shards=8)
    additions = [(op.into, op.other) for op in round_1 if isinstance(op, Add)]
    assert additions == [(0, 2), (1, 3), (1, 4), (0, 1)]  # as in the docstring
    (round_1, _) = all_to_all.all_reduce_over_shards(2, 3, num_shards=8)
    assert [(op.into, op.other) for op in round_1 if isinstance(op, Add)][-1][0] == 0


def test_a_rank_without_a_shard_is_refused() -> None:
    with pytest.raises(ScheduleError, match="9 ranks, 8 shards: a rank would have none"):
        over_shards(8).check(9)


# --- mutants by hand: what the checker must find ---------------------------------------------------------------------


def changed(change: Callable[[list[Add]], list[Add]]) -> Schedule:
    """Returns the all-reduce of 8 shards after something has happened to the additions of rank 1."""

    def algorithm(rank: int, num_ranks: int) -> Iterator[Round]:
        for ops in all_to_all.all_reduce_over_shards(rank, num_ranks, num_shards=8):
            additions = [op for op in ops if isinstance(op, Add)]
            others = [op for op in ops if not isinstance(op, Add)]
            yield (*others, *(change(additions) if rank == 1 and additions else additions))

    return over_shards(8)._replace(algorithm=algorithm)


C = range(1, 2)
MUTANTS = {
    "another bracket": (  # (((0,1) + (2,3)) + (4,5)) + (6,7)
        lambda adds: [Add(0, 2, C), Add(1, 3, C), Add(0, 1, C), Add(0, 4, C)],
        r"chunk 1 ends as \(\(\(\(0, 1\), \(2, 3\)\), \(4, 5\)\), \(6, 7\)\), not as the canonical",
    ),
    "another order": (
        lambda adds: [Add(1, 4, C), Add(1, 3, C), Add(0, 2, C), Add(0, 1, C)],
        "not as the canonical tree over the shards: its bits would depend on the number of ranks",
    ),
    "reversed": (lambda adds: adds[::-1], "not each contribution once, that of shards 5, 6, 7 is missing"),
    "a skipped node": (
        lambda adds: [op for op in adds if op.other != 4],
        "chunk 1 ends as .*: not each contribution once, that of shards 6, 7 is missing",
    ),
    "a node twice": (
        lambda adds: [*adds, Add(0, 3, C)],
        "rank 1 in round 1: adds the contribution of shard 5 to chunk 1 twice",
    ),
    "the total elsewhere": (
        lambda adds: [*adds[:-1], Add(1, 0, C)],
        "not each contribution once, that of shards 4, 5, 6, 7 is missing",
    ),
    "to itself": (lambda adds: [*adds, Add(0, 0, C)], "chunk 1 is there already"),
    "of an empty buffer": (
        lambda adds: [*adds, Add(0, 5, C)],
        "rank 1 in round 1: adds chunk 1 of buffer 5, which is undefined",
    ),
    "to an empty buffer": (lambda adds: [*adds, Add(5, 0, C)], "adds to chunk 1, which is undefined"),
    "of a chunk that does not exist": (
        lambda adds: [*adds, Add(0, 1, range(3, 4))],
        "is not a run of the chunks 0 to 2",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_checker_finds_wrong_additions(name: str) -> None:
    change, message = MUTANTS[name]
    with pytest.raises(ScheduleError, match=message):
        changed(change).check(3)


def test_a_round_adds_last_and_sends_what_was() -> None:
    """Wherever an Add is listed: after all receives of its round, and too late for what the round sends."""

    def algorithm(rank: int, num_ranks: int) -> Iterator[Round]:
        peer, everything = 1 - rank, range(2)
        yield Add(0, 1, everything), Send(peer, everything), Recv(peer, everything, add=False, buffer=1)

    proof = Schedule(algorithm, Goal.ALL_REDUCE, lambda num_ranks: 2).check(2)
    assert proof.expressions == ((0, 1), (0, 1))
    text = draw(algorithm, 2)
    assert "then in chunks 0-1: buffer 0 += 1" in text
    within = partial(placed, Schedule(algorithm, Goal.ALL_REDUCE, lambda num_ranks: 2), ranks=[0, 1], chunks=range(4))
    assert [op for ops in within(1) for op in ops if isinstance(op, Add)] == [Add(0, 1, range(4))]
    from_rank_1 = rooted(Schedule(algorithm, Goal.ALL_REDUCE, lambda num_ranks: 2), 1)
    assert from_rank_1.check(2, root=1).expressions == proof.expressions


# --- the catalog, time, and pictures ---------------------------------------------------------------------------------


def test_it_is_known_by_name_and_not_offered_as_an_all_reduce_over_ranks() -> None:
    assert "slice_owners" in SHIPPED
    assert OVER_SHARDS["slice_owners"](8) is over_shards(8)
    assert "slice_owners" not in {**SCHEDULES, **ALL_REDUCE, **all_reduce_schedules(((0, 1), (2, 3)))}


def test_a_schedule_over_shards_cannot_be_registered() -> None:
    from ddp.collectives.catalog import own_all_reduce, prove, register

    with pytest.raises(ConfigError, match="own: adds up shards, but an all-reduce adds up ranks: leave num_shards"):
        prove(own_all_reduce(over_shards(8)), 2, what="own")
    with pytest.raises(ConfigError, match=r"rank 0 in round 1: yields .* which is not a tuple of Send and Recv"):
        register("own", partial(all_to_all.all_reduce_over_shards, num_shards=8))


LINK = Link(alpha_s=3e-6, beta_s=2e-9, gap_s=1e-6)


def network(num_ranks: int) -> Network:
    return Network(equal_hosts(num_ranks, num_ranks), LINK, LINK, gamma_s=5e-10)


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_simulated_counts_are_those_of_the_proof(num_ranks: int) -> None:
    schedule = over_shards(8)
    proof = schedule.check(num_ranks)
    timeline = simulate(schedule, network(num_ranks), 3 * num_ranks)
    assert timeline.num_rounds == proof.num_rounds == volume(schedule, 100, num_ranks).num_rounds
    assert timeline.num_messages == sum(proof.messages_sent)
    assert timeline.bytes_sent == tuple(12 * chunks for chunks in proof.chunks_sent)
    assert volume(schedule, 100, num_ranks).bytes_sent == pytest.approx(100 * float(proof.busiest))


def test_an_addition_takes_as_long_as_on_arrival() -> None:
    """With a node per rank it is the all-to-all all-reduce, of which there is a formula."""
    for num_ranks in (2, 4, 6, 7, 8):
        nbytes = 480 * num_ranks
        formula_s = textbook("all_to_all", nbytes, network(num_ranks))
        assert cost_s("slice_owners", over_shards(8), nbytes, network(num_ranks)) == pytest.approx(formula_s)
        assert repeats(over_shards(8), equal_hosts(num_ranks, 1))
    for num_ranks in (3, 5):
        assert not repeats(over_shards(8), equal_hosts(num_ranks, 1))
    assert textbook("slice_owners", 1000, network(4)) is None
    # 3 ranks: 4 additions of a third on each, which end after the last message of round 1
    one_third = Network(network(3).hosts, Link(0, 0), Link(0, 0), gamma_s=1e-9)
    assert simulate(over_shards(8), one_third, 300).makespan_s == pytest.approx(4 * 400 * 1e-9)


def test_drawings_show_the_additions() -> None:
    text = draw(over_shards(8).algorithm, 3)
    assert "           then in chunk 1: buffer 0 += 2, buffer 1 += 3, buffer 1 += 4, buffer 0 += 1" in text
    assert text.count("then in") == 3


# --- on tensors ------------------------------------------------------------------------------------------------------


def gradients(num_shards: int, numel: int) -> Tensor:
    """Returns [num_shards, numel]: numbers of very different sizes, so that every order of additions has other bits."""
    generator = torch.Generator().manual_seed(numel)
    numbers = torch.randn(num_shards, numel, generator=generator)
    return numbers * 10 ** torch.randint(-3, 4, (num_shards, numel), generator=generator)


def added_up(parts: Tensor, node: range) -> Tensor:
    """Returns the sum of a node, as the tree says: the oracle."""
    if len(node) == 1:
        return parts[node.start].clone()
    left, right = halves(node)
    return added_up(parts, left) + added_up(parts, right)


def rows_of(parts: Tensor, rank: int, num_ranks: int) -> list[Tensor]:
    """Returns what a rank adds up by itself."""
    return [added_up(parts, node) for node in nodes_by_rank(num_ranks, len(parts))[rank]]


def links_over(transport: Transport, *, segment_numel: int = 1 << 20) -> HostLinks:
    watchdog = Watchdog(HashStore(), transport.rank, 1, generation=0, warn_s=math.inf, abort_s=20)
    return HostLinks(transport, watchdog, Settings(abort_s=20, segment_bytes=4 * segment_numel))


def reduced(
    parts: Tensor, num_ranks: int, *, goal: Goal = Goal.ALL_REDUCE, segment_numel: int, reduction: Reduction = SUM
) -> list[Tensor]:
    """Returns buffer 0 of each rank after the reduction."""

    def program(transport: Transport) -> Tensor:
        rows = rows_of(parts, transport.rank, num_ranks)
        links = links_over(transport, segment_numel=segment_numel)
        links.run_over_shards(schedule_over_shards(len(parts), goal), rows, reduction=reduction)
        return rows[0]

    return SimulatedNetwork(num_ranks).run(program)


CASES = [(8, 1), (8, 2), (8, 3), (8, 5), (8, 8), (6, 4), (7, 5), (4, 3), (32, 5)]


@pytest.mark.parametrize(("num_shards", "num_ranks"), CASES)
@pytest.mark.quick(2)
def test_every_rank_ends_with_the_bits_of_the_tree(num_shards: int, num_ranks: int) -> None:
    for numel in (0, 1, num_ranks - 1, num_ranks, num_ranks + 1, 1000):
        parts = gradients(num_shards, numel)
        total = added_up(parts, range(num_shards))
        torch.testing.assert_close(total.double(), parts.double().sum(0), rtol=1e-4, atol=1e-2)
        for segment_numel in (1 << 20, 37, 7):
            for mine in reduced(parts, num_ranks, segment_numel=segment_numel):
                assert torch.equal(mine, total), (numel, segment_numel)


@pytest.mark.parametrize(("num_shards", "num_ranks"), CASES)
def test_the_owner_divides_once(num_shards: int, num_ranks: int) -> None:
    """Only what ends in buffer 0 is divided: 3 has no exact reciprocal, so dividing parts would change bits."""
    parts = gradients(num_shards, 101)
    mean = added_up(parts, range(num_shards)) / 3
    for segment_numel in (1 << 20, 5):
        for mine in reduced(parts, num_ranks, segment_numel=segment_numel, reduction=Reduction(divide_by=3)):
            assert torch.equal(mine, mean)


@pytest.mark.parametrize(("num_shards", "num_ranks"), CASES)
def test_a_reduce_scatter_leaves_each_owner_its_slice(num_shards: int, num_ranks: int) -> None:
    parts, bounds = gradients(num_shards, 101), offsets(101, num_ranks)
    mean = added_up(parts, range(num_shards)) / 3
    divided = Reduction(divide_by=3)
    for segment_numel in (1 << 20, 5):
        results = reduced(parts, num_ranks, goal=Goal.REDUCE_SCATTER, segment_numel=segment_numel, reduction=divided)
        for rank, mine in enumerate(results):
            own = slice(bounds[rank], bounds[rank + 1])
            assert torch.equal(mine[own], mean[own])


def test_other_operations_and_bounds() -> None:
    parts, bounds = gradients(6, 40), (0, 25, 25, 31, 40)

    def program(transport: Transport) -> Tensor:
        nodes = nodes_by_rank(4, 6)[transport.rank]
        rows = [parts[node.start : node.stop].amax(0) for node in nodes]
        links = links_over(transport, segment_numel=9)
        links.run_over_shards(schedule_over_shards(6, Goal.ALL_REDUCE), rows, bounds, Reduction("max"))
        return rows[0]

    for mine in SimulatedNetwork(4).run(program):
        assert torch.equal(mine, parts.amax(0))


def several_over_gloo() -> list[Tensor]:
    """Returns what several reductions by the same links have left, whose landings need more and less memory."""
    import ddp

    comm = ddp.init(device="cpu")
    links, totals = comm._collectives.links, []
    for numel in (10, 5000, 100):
        rows = rows_of(gradients(8, numel), comm.rank, comm.world_size)
        links.run_over_shards(schedule_over_shards(8, Goal.ALL_REDUCE), rows)
        totals.append(rows[0])
    ddp.shutdown()
    return totals


def test_over_gloo() -> None:
    for totals in run_ranks(several_over_gloo, 3):
        for total, numel in zip(totals, (10, 5000, 100), strict=True):
            assert torch.equal(total, added_up(gradients(8, numel), range(8)))


# --- the tree --------------------------------------------------------------------------------------------------------


def test_nodes_are_the_largest_within_a_rank_s_shards() -> None:
    for num_shards in range(1, 33):
        for num_ranks in range(1, num_shards + 1):
            for rank, nodes in enumerate(nodes_by_rank(num_ranks, num_shards)):
                mine = shards_of_rank(rank, num_ranks, num_shards)
                assert [shard for node in nodes for shard in node] == list(mine)
                assert all(shards.largest_nodes(node, num_shards) == [node] for node in nodes)
    assert nodes_by_rank(3, 8) == ((range(2),), (range(2, 4), range(4, 5)), (range(5, 6), range(6, 8)))
