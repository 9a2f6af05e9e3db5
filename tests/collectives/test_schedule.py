"""The checker: what it proves, what it counts, and what it rejects."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

import pytest

from ddp.collectives import ring
from ddp.collectives.catalog import SCHEDULES
from ddp.collectives.schedule import (
    Algorithm,
    Expression,
    Goal,
    Proof,
    Recv,
    Round,
    Schedule,
    ScheduleError,
    Send,
    around,
    canonical,
    offsets,
    one_per_rank,
)


def check(algorithm: Algorithm, num_ranks: int, *, goal: Goal = Goal.ALL_REDUCE) -> Proof:
    """Proves a schedule with a chunk per rank."""
    return Schedule(algorithm, goal, one_per_rank).check(num_ranks)


def leaves(expression: Expression) -> list[int]:
    """Returns the contributions that an expression adds up."""
    if isinstance(expression, int):
        return [expression]
    return leaves(expression[0]) + leaves(expression[1])


def test_the_canonical_tree_splits_at_the_largest_power_of_two() -> None:
    assert canonical(1) == 0
    assert canonical(3) == ((0, 1), 2)
    assert canonical(5) == (((0, 1), (2, 3)), 4)
    assert canonical(6) == (((0, 1), (2, 3)), (4, 5))
    assert canonical(7) == (((0, 1), (2, 3)), ((4, 5), 6))
    assert all(leaves(canonical(num_ranks)) == list(range(num_ranks)) for num_ranks in range(1, 65))


def test_ring_adds_each_chunk_in_the_order_of_the_ranks() -> None:
    """The expression is known: chunk c travels to the right from rank c+1, each rank adding what arrives to its own."""
    for chunk, expression in enumerate(check(ring.all_reduce, 5).expressions):
        travelling: Expression = (chunk + 1) % 5
        for k in range(2, 6):
            own = (chunk + k) % 5
            smaller_first = sorted((travelling, own), key=lambda e: min(leaves(e)))
            travelling = (smaller_first[0], smaller_first[1])
        assert expression == travelling


def test_a_proof_counts() -> None:
    proof = check(ring.all_reduce, 4)
    assert (proof.num_rounds, proof.num_chunks) == (6, 4)
    assert proof.messages_sent == proof.chunks_sent == (6, 6, 6, 6)
    assert proof.busiest == Fraction(3, 2)


# --- what it rejects ---------------------------------------------------------------------------------------------


def rejects(algorithm: Algorithm, message: str, num_ranks: int = 2, *, goal: Goal = Goal.ALL_REDUCE) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(algorithm, num_ranks, goal=goal)


BOTH = range(2)


def test_deadlock_is_named() -> None:
    def everyone_receives_first(rank: int, num_ranks: int) -> Iterator[Round]:
        yield (Recv(1 - rank, BOTH, add=True),)
        yield (Send(1 - rank, BOTH),)

    rejects(everyone_receives_first, "2 ranks, rank 0 in round 1: deadlock: rank 1 sends no chunks 0-1 in this round")


def test_send_before_receive_on_both_sides_is_a_deadlock() -> None:
    """It would pass on a transport that buffers, and hang on NCCL."""

    def send_then_receive(rank: int, num_ranks: int) -> Iterator[Round]:
        yield (Send(1 - rank, BOTH),)
        yield (Recv(1 - rank, BOTH, add=True),)

    rejects(send_then_receive, "deadlock: rank 1 receives no chunks 0-1 in this round")


def test_overwriting_what_is_being_sent_is_a_race() -> None:
    def race(rank: int, num_ranks: int) -> Iterator[Round]:
        yield Send(1 - rank, BOTH), Recv(1 - rank, BOTH, add=False)

    rejects(race, "overwritten while in use")


def test_overwriting_twice_in_a_round_is_a_race() -> None:
    def race(rank: int, num_ranks: int) -> Iterator[Round]:
        if rank == 0:
            yield tuple(Recv(peer, BOTH, add=False) for peer in (1, 2))
        else:
            yield (Send(0, BOTH),)

    rejects(race, "rank 0 in round 1: a chunk is overwritten while in use", 3)


def test_a_round_may_send_a_chunk_and_add_to_it() -> None:
    def exchange(rank: int, num_ranks: int) -> Iterator[Round]:
        yield Send(1 - rank, BOTH), Recv(1 - rank, BOTH, add=True)

    assert check(exchange, 2).expressions == ((0, 1), (0, 1))


def test_additions_stand_in_the_order_listed() -> None:
    def master_of_three(rank: int, num_ranks: int) -> Iterator[Round]:
        if rank == 0:
            yield Recv(2, range(3), add=True), Recv(1, range(3), add=True)
        else:
            yield (Send(0, range(3)),)

    assert check(master_of_three, 3, goal=Goal.REDUCE).expressions == (((0, 2), 1),) * 3


def everyone_to_everyone(*, before: bool) -> Algorithm:
    """Returns the exchange that a reader writes first; `before`: whether lower ranks come first in every rank's sum."""

    def algorithm(rank: int, num_ranks: int) -> Iterator[Round]:
        others = [peer for peer in range(num_ranks) if peer != rank]
        everything = range(num_ranks)
        yield (
            *(Send(peer, everything) for peer in others),
            *(Recv(peer, everything, add=True, before=before and peer < rank) for peer in others),
        )

    return algorithm


def test_what_comes_before_a_rank_s_own_part_is_added_up_first() -> None:
    in_order: Expression = 0
    for num_ranks in range(1, 9):
        assert set(check(everyone_to_everyone(before=True), num_ranks).expressions) == {in_order}
        in_order = in_order, num_ranks
    says = r"rank 2 at the end: chunk 0 ends as \(\(0, 2\), 1\), but as \(\(0, 1\), 2\) on rank 0: the same .*before="
    rejects(everyone_to_everyone(before=False), says, 3)


def test_before_goes_with_add_and_with_equal_runs() -> None:
    def overwriting(rank: int, num_ranks: int) -> Iterator[Round]:
        yield (Send(1, BOTH),) if rank == 0 else (Recv(0, BOTH, add=False, before=True),)

    def overlapping(rank: int, num_ranks: int) -> Iterator[Round]:
        runs = range(2), range(1, 3)
        yield (
            tuple(Recv(peer, runs[peer], add=True, before=True) for peer in range(2))
            if rank == 2
            else (Send(2, runs[rank]),)
        )

    rejects(overwriting, "rank 1 in round 1: overwrites chunks 0-1 with before=True, which needs add=True")
    rejects(overlapping, "rank 2 in round 1: runs of chunks that are added before what is there overlap", 3)


def test_a_chunk_that_nobody_sends_is_named_with_the_whole_buffer() -> None:
    def as_one_chunk(rank: int, num_ranks: int) -> Iterator[Round]:
        yield Send(1 - rank, range(1)), Recv(1 - rank, range(1), add=True)

    rejects(as_one_chunk, r"chunk 1 ends as 0: .* missing; no rank sends this chunk: the whole buffer is range\(2\), a")


def test_a_contribution_twice() -> None:
    def twice(rank: int, num_ranks: int) -> Iterator[Round]:
        yield Send(1 - rank, BOTH), Recv(1 - rank, BOTH, add=True)
        yield Send(1 - rank, BOTH), Recv(1 - rank, BOTH, add=False)  # what is there already
        yield Send(1 - rank, BOTH), Recv(1 - rank, BOTH, add=True)

    rejects(twice, "rank 0 in round 2: a chunk is overwritten while in use")

    def again(rank: int, num_ranks: int) -> Iterator[Round]:
        for _ in range(2):
            yield (Send(1, BOTH),) if rank == 0 else (Recv(0, BOTH, add=True),)

    rejects(again, "rank 1 in round 2: adds the contribution of rank 0 to chunk 0 twice")


def test_a_missing_contribution() -> None:
    rejects(lambda rank, num_ranks: iter(()), "0: not each contribution once, that of rank 1 is missing")
    rejects(lambda rank, num_ranks: iter(()), "that of ranks 1, 2 is missing", 3)


def test_ranks_that_disagree() -> None:
    def only_rank_0_knows(rank: int, num_ranks: int) -> Iterator[Round]:
        yield (Recv(1, BOTH, add=True),) if rank == 0 else (Send(0, BOTH),)

    rejects(only_rank_0_knows, r"rank 1 at the end: chunk 0 ends as 1, but as \(0, 1\) on rank 0")


def test_ranks_that_add_in_another_order() -> None:
    """The same sum, but not the same bits: (0 + 1) + 2 on rank 0, and 0 + (1 + 2) on the others."""

    def everyone_in_turn(rank: int, num_ranks: int) -> Iterator[Round]:
        others = [peer for peer in range(3) if peer != rank]
        if rank == 2:
            others.reverse()
        yield (
            *(Send(peer, range(3)) for peer in others),
            *(Recv(peer, range(3), add=True) for peer in others),
        )

    rejects(everyone_in_turn, r"chunk 0 ends as \(0, \(1, 2\)\), but as \(\(0, 1\), 2\) on rank 0|but as", 3)


def test_other_chunks_than_expected() -> None:
    def crossed(rank: int, num_ranks: int) -> Iterator[Round]:
        yield Send(1 - rank, range(1)), Recv(1 - rank, range(1, 2), add=True)

    rejects(crossed, "rank 0 in round 1: expects chunk 1, rank 1 sends chunk 0")


def test_sending_what_one_has_not() -> None:
    def too_early(rank: int, num_ranks: int) -> Iterator[Round]:
        yield (Send(0, BOTH),) if rank == 1 else (Recv(1, BOTH, add=False),)

    rejects(too_early, "rank 1 in round 1: sends chunk 0, which is undefined there", goal=Goal.BROADCAST)


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_peers_that_do_not_exist(peer: int) -> None:
    rejects(lambda rank, num_ranks: iter([(Send(peer, BOTH),)]), f"names rank {peer} as its peer")


@pytest.mark.parametrize("chunks", [range(3), range(-1, 1), range(0), range(0, 2, 2)])
def test_chunks_that_do_not_exist(chunks: range) -> None:
    rejects(lambda rank, num_ranks: iter([(Send(1 - rank, chunks),)]), "is not a run of the chunks 0 to 1")


def test_ranks_with_unequal_numbers_of_rounds() -> None:
    def idle(rank: int, num_ranks: int) -> Iterator[Round]:
        yield from [()] * rank

    rejects(idle, "rank 0 in round 1: its schedule has ended, while that of another rank continues")


@pytest.mark.parametrize("goal", Goal)
def test_no_schedule_reaches_another_goal(goal: Goal) -> None:
    """Each goal tells its own schedules from the others', but for what is a part of more than was asked."""
    more_than_asked = {
        (Goal.ALL_REDUCE, Goal.REDUCE),
        (Goal.ALL_REDUCE, Goal.REDUCE_SCATTER),
        (Goal.ALL_GATHER, Goal.GATHER),
    }
    reached = set()
    for schedule in SCHEDULES.values():
        try:
            schedule._replace(goal=goal).check(4)
        except ScheduleError:
            continue
        reached.add(schedule.goal)
    assert reached - {goal} <= {strong for strong, weak in more_than_asked if weak is goal}
    assert goal in reached


# --- chunks, and the package -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_chunks", range(1, 9))
@pytest.mark.parametrize("numel", [0, 1, 2, 7, 8, 9, 100])
def test_chunks_cover_everything_and_differ_by_one(numel: int, num_chunks: int) -> None:
    bounds = offsets(numel, num_chunks)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(sizes)) == (0, numel, num_chunks)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_chunks", range(1, 9))
def test_runs_around_the_circle(num_chunks: int) -> None:
    for first in range(3 * num_chunks):
        for count in range(1, num_chunks + 1):
            runs = around(first, count, num_chunks)
            chunks = [chunk for run in runs for chunk in run]
            assert chunks == [(first + step) % num_chunks for step in range(count)]
            assert 1 <= len(runs) <= 2


def test_schedules_need_neither_torch_nor_numpy() -> None:
    program = """
import importlib, pkgutil, sys
import ddp.collectives
modules = [module.name for module in pkgutil.iter_modules(ddp.collectives.__path__) if module.name != "compiled"]
for module in modules:
    importlib.import_module("ddp.collectives." + module)
assert len(modules) > 10 and not {"torch", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
