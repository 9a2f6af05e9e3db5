"""The algorithms: each proven for 1 to 64 ranks; rounds, messages and bytes as in the textbook; which are canonical.

Tests: ddp/collectives/butterfly.py, ddp/collectives/catalog.py, ddp/collectives/circulant.py,
ddp/collectives/master_worker.py, ddp/collectives/placed.py, ddp/collectives/ring.py, ddp/collectives/tree.py.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial

import pytest

from ddp.collectives import placed
from ddp.collectives.catalog import ALL_REDUCE, BETWEEN_HOSTS, SCHEDULES, Hosts, Schedule, all_reduce_schedules
from ddp.collectives.placed import rooted
from ddp.collectives.schedule import Goal, Recv, Send
from ddp.collectives.tree import node

SIZES = range(1, 65)
HALVES = [  # with very many transfers; each is a part, word for word, of an all-reduce that is proven for all SIZES
    f"{whole}_{half}" for whole in ("ring", "circulant", "all_to_all") for half in ("reduce_scatter", "all_gather")
]
HALF_SIZES = [*range(1, 33), 47, 63, 64]
LAYOUTS: list[Hosts] = [
    ((0, 1), (2, 3)),
    ((0, 1, 2), (3, 4, 5)),
    ((0, 1), (2, 3), (4, 5)),
    ((0, 2), (1, 3)),
    ((0, 1, 2, 3), (4, 5, 6, 7)),
    ((0, 1, 2), (3,), (4, 5)),
    ((3,), (0, 5), (1, 2, 4, 6, 7)),
    tuple(tuple(range(start, start + 8)) for start in range(0, 40, 8)),
    tuple(tuple(range(start, min(start + 6, 64))) for start in range(0, 64, 6)),
]


def ceil_log2(number: int) -> int:
    return (number - 1).bit_length()


def floor_log2(number: int) -> int:
    return number.bit_length() - 1


def folds(p: int) -> int:
    """1 where the butterfly must fold ranks beyond a power of two."""
    return int(p != 1 << floor_log2(p))


def share(p: int) -> Fraction:
    """(p−1)/p"""
    return Fraction(p - 1, p)


# --- proven, and counted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.quick(3)
def test_every_schedule_is_proven_and_keeps_to_the_textbook(name: str) -> None:
    """Rounds; messages and share of the buffer that the busiest rank sends; the order of additions."""
    for num_ranks in HALF_SIZES if name in HALVES else SIZES:
        proof = SCHEDULES[name].check(num_ranks)
        assert proof.num_rounds == ROUNDS[name](num_ranks)
        assert proof.canonical == CANONICAL.get(name, always)(num_ranks)
        if num_ranks > 1:
            assert proof.busiest == BUSIEST[name](num_ranks)
            assert name not in MESSAGES or max(proof.messages_sent) == MESSAGES[name](num_ranks)


Formula = Callable[[int], int]
ROUNDS: dict[str, Formula] = {
    "ring": lambda p: 1 if p == 2 else 2 * (p - 1),
    "tree": lambda p: 2 * ceil_log2(p),
    "double_tree": lambda p: 2 * (ceil_log2(p) if p % 2 == 0 else floor_log2(p)),
    "butterfly": lambda p: 2 * floor_log2(p) + 2 * folds(p),
    "recursive_doubling": lambda p: floor_log2(p) + 2 * folds(p),
    "circulant": lambda p: 2 * ceil_log2(p),
    "all_to_all": lambda p: 2,
    "master_worker": lambda p: 2,
    "round_robin": lambda p: 2 * p,
    "naive_all_to_all": lambda p: 1,
    "ring_reduce_scatter": lambda p: p - 1,
    "ring_all_gather": lambda p: p - 1,
    "circulant_reduce_scatter": ceil_log2,
    "circulant_all_gather": ceil_log2,
    "all_to_all_reduce_scatter": lambda p: 1,
    "all_to_all_all_gather": lambda p: 1,
    "all_to_all_exchange": lambda p: 1,
    "tree_broadcast": ceil_log2,
    "tree_reduce": ceil_log2,
    "tree_gather": ceil_log2,
    "tree_scatter": ceil_log2,
    "master_worker_reduce": lambda p: 1,
    "master_worker_broadcast": lambda p: 1,
}
MESSAGES: dict[str, Formula] = {  # circulant: one or two a round, see below
    "ring": ROUNDS["ring"],
    "tree": ceil_log2,
    "double_tree": lambda p: {2: 2, 3: 3, 4: 4}.get(p, 4),
    "butterfly": lambda p: 2 * floor_log2(p) + folds(p),
    "recursive_doubling": lambda p: floor_log2(p) + folds(p),
    "all_to_all": lambda p: 2 * (p - 1),
    "master_worker": lambda p: p - 1,
    "round_robin": lambda p: 2 * (p - 1),
    "naive_all_to_all": lambda p: p - 1,
    "ring_reduce_scatter": lambda p: p - 1,
    "ring_all_gather": lambda p: p - 1,
    "all_to_all_reduce_scatter": lambda p: p - 1,
    "all_to_all_all_gather": lambda p: p - 1,
    "all_to_all_exchange": lambda p: p - 1,
    "tree_broadcast": ceil_log2,
    "tree_reduce": lambda p: 1,
    "tree_gather": lambda p: 1,
    "tree_scatter": ceil_log2,
    "master_worker_reduce": lambda p: 1,
    "master_worker_broadcast": lambda p: p - 1,
}
BUSIEST: dict[str, Callable[[int], Fraction]] = {
    "ring": lambda p: 2 * share(p),
    "tree": lambda p: Fraction(ceil_log2(p)),
    "double_tree": lambda p: Fraction(MESSAGES["double_tree"](p), 2),
    "butterfly": lambda p: 2 * share(1 << floor_log2(p)) + folds(p),
    "recursive_doubling": lambda p: Fraction(floor_log2(p) + folds(p)),
    "circulant": lambda p: 2 * share(p),
    "all_to_all": lambda p: 2 * share(p),
    "master_worker": lambda p: Fraction(p - 1),
    "round_robin": lambda p: 2 * share(p),
    "naive_all_to_all": lambda p: Fraction(p - 1),
    "ring_reduce_scatter": share,
    "ring_all_gather": share,
    "circulant_reduce_scatter": share,
    "circulant_all_gather": share,
    "all_to_all_reduce_scatter": share,
    "all_to_all_all_gather": share,
    "all_to_all_exchange": share,
    "tree_broadcast": lambda p: Fraction(ceil_log2(p)),
    "tree_reduce": lambda p: Fraction(1),
    "tree_gather": lambda p: Fraction(largest_subtree(p), p),
    "tree_scatter": share,
    "master_worker_reduce": lambda p: Fraction(1),
    "master_worker_broadcast": lambda p: Fraction(p - 1),
}


def largest_subtree(p: int) -> int:
    """Of the binomial tree, below the root: half of the ranks, or what there is of the second half."""
    half = 1 << ceil_log2(p) - 1
    return max(p - half, half // 2)


def always(p: int) -> bool:
    return True


def to_2(p: int) -> bool:
    return p <= 2


def ones_then_zeros(p: int) -> bool:
    """In binary: then folding by pairs and halving the rest is the canonical tree."""
    above = p + (p & -p)
    return above & (above - 1) == 0


CANONICAL: dict[str, Callable[[int], bool]] = {  # tree, and all that adds nothing: always
    "ring": to_2,
    "double_tree": to_2,
    "butterfly": ones_then_zeros,
    "recursive_doubling": ones_then_zeros,
    "circulant": to_2,
    "all_to_all": to_2,
    "master_worker": lambda p: p <= 3,
    "round_robin": to_2,
    "naive_all_to_all": lambda p: p <= 3,
    "ring_reduce_scatter": to_2,
    "circulant_reduce_scatter": to_2,
    "all_to_all_reduce_scatter": to_2,
    "master_worker_reduce": lambda p: p <= 3,
}


@pytest.mark.parametrize("name", ["ring", "all_to_all", "round_robin", "circulant"])
def test_every_rank_sends_the_same_bytes(name: str) -> None:
    for num_ranks in range(2, 18):
        proof = SCHEDULES[name].check(num_ranks)
        assert set(proof.chunks_sent) == {2 * (num_ranks - 1)}
        assert proof.num_chunks == num_ranks


@pytest.mark.parametrize("name", ["tree_broadcast", "tree_reduce", "tree_gather", "tree_scatter"])
def test_a_tree_has_one_message_an_edge(name: str) -> None:
    for num_ranks in range(2, 34):
        assert sum(SCHEDULES[name].check(num_ranks).messages_sent) == num_ranks - 1


@pytest.mark.parametrize("name", ["circulant_reduce_scatter", "circulant_all_gather"])
def test_a_circulant_round_is_one_message_or_two(name: str) -> None:
    for num_ranks in range(2, 34):
        for messages in SCHEDULES[name].check(num_ranks).messages_sent:
            assert ceil_log2(num_ranks) <= messages <= 2 * ceil_log2(num_ranks)


def test_nobody_is_an_inner_node_of_both_trees() -> None:
    for num_ranks in SIZES:
        for rank in range(num_ranks):
            first, second = (node(rank, num_ranks, tree=tree) for tree in (0, 1))
            assert not (first.children and second.children)
            assert max(len(first.children), len(second.children)) <= 2


# --- any root, any layout ----------------------------------------------------------------------------------------


ROOTED = [name for name in SCHEDULES if name.endswith(("_broadcast", "_reduce", "_gather", "_scatter"))]
ROOTED = [name for name in ROOTED if name.startswith(("tree_", "master_worker_"))]


@pytest.mark.parametrize("name", ROOTED)
def test_any_root(name: str) -> None:
    for num_ranks in range(1, 9):
        costs = SCHEDULES[name].check(num_ranks)
        for root in range(num_ranks):
            proof = rooted(SCHEDULES[name], root).check(num_ranks, root=root)
            assert (proof.num_rounds, sum(proof.chunks_sent)) == (costs.num_rounds, sum(costs.chunks_sent))


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
def test_every_layout(hosts: Hosts) -> None:
    num_ranks = sum(len(host) for host in hosts)
    schedules = all_reduce_schedules(hosts)
    assert schedules.keys() == ALL_REDUCE.keys() | BETWEEN_HOSTS.keys() | {"two_dimensional"}
    for name in BETWEEN_HOSTS.keys() | {"two_dimensional"}:
        schedules[name].check(num_ranks)


@pytest.mark.parametrize("per_host", [1, 2, 3, 4])
@pytest.mark.parametrize("num_hosts", range(1, 6))
def test_hierarchical_is_counted(num_hosts: int, per_host: int) -> None:
    hosts = equal_hosts(num_hosts, per_host)
    schedules = all_reduce_schedules(hosts)
    if num_hosts == 1 or per_host == 1:
        assert not BETWEEN_HOSTS.keys() & schedules.keys()
        return
    for name, between in BETWEEN_HOSTS.items():
        proof = schedules[name].check(num_hosts * per_host)
        among_leaders = ALL_REDUCE[between].check(num_hosts)
        assert proof.num_rounds == 2 * ceil_log2(per_host) + among_leaders.num_rounds
        assert proof.num_chunks == among_leaders.num_chunks
        assert sent_to_other_hosts(schedules[name], hosts) == {
            host[0]: sent for host, sent in zip(hosts, among_leaders.chunks_sent, strict=True) if sent
        }


def test_hierarchical_with_any_schedule_between() -> None:
    hosts = ((0, 1, 2), (3,), (4, 5))
    for between in ALL_REDUCE.values():
        num_chunks = between.num_chunks(len(hosts))
        algorithm = partial(placed.hierarchical, hosts=hosts, between=between)
        Schedule(algorithm, Goal.ALL_REDUCE, lambda num_ranks, num_chunks=num_chunks: num_chunks).check(6)


@pytest.mark.parametrize("num_rows", range(2, 6))
@pytest.mark.parametrize("num_columns", range(2, 6))
def test_two_dimensional_is_counted(num_rows: int, num_columns: int) -> None:
    hosts = equal_hosts(num_rows, num_columns)
    num_ranks = num_rows * num_columns
    schedule = all_reduce_schedules(hosts)["two_dimensional"]
    proof = schedule.check(num_ranks)
    assert proof.num_rounds == 2 * (num_columns - 1) + ROUNDS["ring"](num_rows)
    assert proof.busiest == 2 * share(num_ranks)
    assert len(set(proof.chunks_sent)) == 1
    across = sent_to_other_hosts(schedule, hosts)
    assert len(across) == num_ranks, "every rank carries its own slice to the other hosts"
    assert Fraction(max(across.values()), proof.num_chunks) == 2 * share(num_rows) / num_columns


def test_rows_are_hosts_or_near_a_square() -> None:
    assert placed.rows_of(((0, 2), (1, 3))) == ((0, 2), (1, 3))
    assert placed.rows_of((tuple(range(6)),)) == ((0, 1, 2), (3, 4, 5))
    assert placed.rows_of(((3,), (0, 1, 2))) == ((3, 0), (1, 2))
    assert placed.rows_of(((0,), (1,), (2,), (3,))) == ((0, 1), (2, 3))
    assert placed.rows_of((tuple(range(7)),)) == (tuple(range(7)),)
    assert "two_dimensional" not in all_reduce_schedules((tuple(range(7)),))


def test_trees_over_hosts_that_are_powers_of_two_are_canonical() -> None:
    hosts = equal_hosts(4, 4)
    for name in BETWEEN_HOSTS:
        assert all_reduce_schedules(hosts)[name].check(16).canonical == (name != "hierarchical")


@pytest.mark.parametrize("hosts", [(), ((),), ((0, 1), ()), ((0, 1), (1, 2)), ((1, 2),), ((0, 2),)])
def test_hosts_must_hold_each_rank_once(hosts: Hosts) -> None:
    with pytest.raises(ValueError, match="each of 0, 1, 2, … exactly once"):
        all_reduce_schedules(hosts)


def equal_hosts(num_hosts: int, per_host: int) -> Hosts:
    return tuple(tuple(range(host * per_host, (host + 1) * per_host)) for host in range(num_hosts))


def sent_to_other_hosts(schedule: Schedule, hosts: Hosts) -> dict[int, int]:
    """Chunks, by rank that sends them."""
    host_of = {rank: host for host in hosts for rank in host}
    sent: dict[int, int] = {}
    for rank, host in host_of.items():
        for ops in schedule.algorithm(rank, len(host_of)):
            for op in ops:
                if isinstance(op, Send) and op.peer not in host:
                    sent[rank] = sent.get(rank, 0) + len(op.chunks)
    return sent


# --- the oracle: numbers instead of symbols, every rank at its own pace ------------------------------------------


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_numbers_come_out_right_at_any_pace(num_ranks: int) -> None:
    """Ranks are advanced in random order, as on a real network; the results are those of a closed formula."""
    hosts: Hosts = (tuple(range(num_ranks // 2)), tuple(range(num_ranks // 2, num_ranks)))
    with_layout = all_reduce_schedules(hosts) if num_ranks > 1 else {}
    for schedule in (SCHEDULES | with_layout).values():
        compute(schedule, num_ranks)


def compute(schedule: Schedule, num_ranks: int) -> None:
    """Runs it on random numbers and compares."""
    num_chunks = schedule.num_chunks(num_ranks)
    dice = random.Random(num_ranks)
    given = [[dice.randrange(1000) for _ in range(num_chunks)] for _ in range(num_ranks)]
    buffers = [{(0, chunk): given[rank][chunk] for chunk in range(num_chunks)} for rank in range(num_ranks)]
    if schedule.goal is Goal.ALL_TO_ALL:
        for rank, buffer in enumerate(buffers):
            buffer[1, rank] = given[rank][rank]
    run(schedule, buffers, dice)
    for rank, chunk, buffer, want in expected(schedule.goal, given):
        assert buffers[rank][buffer, chunk] == want


def run(schedule: Schedule, buffers: list[dict[tuple[int, int], int]], dice: random.Random) -> None:
    """A few lines of network: what is sent waits in a queue until its receiver takes it."""
    num_ranks = len(buffers)
    wires: dict[tuple[int, int], deque[list[int]]] = {}

    def one_rank(rank: int) -> Iterator[None]:
        for ops in schedule.algorithm(rank, num_ranks):
            for op in ops:
                if isinstance(op, Send):
                    message = [buffers[rank][op.buffer, chunk] for chunk in op.chunks]
                    wires.setdefault((rank, op.peer), deque()).append(message)
            yield
            for op in ops:
                if isinstance(op, Recv):
                    while not wires.get((op.peer, rank)):
                        yield
                    message = wires[op.peer, rank].popleft()
                    for chunk, number in zip(op.chunks, message, strict=True):
                        here = buffers[rank].get((op.buffer, chunk), 0) if op.add else 0
                        buffers[rank][op.buffer, chunk] = here + number

    programs = [one_rank(rank) for rank in range(num_ranks)]
    for _ in range(100_000):
        if not programs:
            return
        program = dice.choice(programs)
        if next(program, "ended") == "ended":
            programs.remove(program)
    raise AssertionError("the ranks wait for each other")


def expected(goal: Goal, given: list[list[int]]) -> Iterator[tuple[int, int, int, int]]:
    """(rank, chunk, buffer, number) of everything that the goal promises."""
    num_ranks, num_chunks = len(given), len(given[0])
    for rank in range(num_ranks):
        for chunk in range(num_chunks):
            total = sum(row[chunk] for row in given)
            match goal:
                case Goal.ALL_REDUCE:
                    yield rank, chunk, 0, total
                case Goal.REDUCE if rank == 0:
                    yield rank, chunk, 0, total
                case Goal.REDUCE_SCATTER if rank == chunk:
                    yield rank, chunk, 0, total
                case Goal.BROADCAST:
                    yield rank, chunk, 0, given[0][chunk]
                case Goal.SCATTER if rank == chunk:
                    yield rank, chunk, 0, given[0][chunk]
                case Goal.ALL_GATHER:
                    yield rank, chunk, 0, given[chunk][chunk]
                case Goal.GATHER if rank == 0:
                    yield rank, chunk, 0, given[chunk][chunk]
                case Goal.ALL_TO_ALL:
                    yield rank, chunk, 1, given[chunk][rank]
