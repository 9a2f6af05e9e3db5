"""Schedules: proven for every world size; a schedule with any one thing wrong is rejected."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise

import pytest

from ddp.collectives import ring, tree
from ddp.collectives.catalog import SCHEDULES
from ddp.collectives.chunks import offsets
from ddp.collectives.draw import draw
from ddp.collectives.schedule import Algorithm, Expression, Goal, Recv, Round, ScheduleError, Send, check, leaves

SIZES = range(1, 18)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", SIZES)
def test_every_schedule_is_proven(name: str, num_ranks: int) -> None:
    schedule = SCHEDULES[name]
    proof = check(schedule.algorithm, num_ranks, goal=schedule.goal, num_chunks=schedule.num_chunks(num_ranks))
    assert (
        proof.num_rounds
        == {
            "ring": 1 if num_ranks == 2 else 2 * (num_ranks - 1),
            "ring_reduce_scatter": num_ranks - 1,
            "ring_all_gather": num_ranks - 1,
            "tree_broadcast": (num_ranks - 1).bit_length(),
        }[name]
    )


@pytest.mark.parametrize("num_ranks", SIZES)
def test_ring_sends_the_bytes_of_the_textbook(num_ranks: int) -> None:
    """Every rank sends 2(p-1)/p of the buffer: p-1 chunks in each half."""
    for rank in range(num_ranks):
        sends = [op for ops in ring.all_reduce(rank, num_ranks) for op in ops if isinstance(op, Send)]
        assert sum(len(op.chunks) for op in sends) == 2 * (num_ranks - 1)


def test_ring_adds_each_chunk_in_the_order_of_the_ranks() -> None:
    """The expression is known: chunk c travels to the right from rank c+1, each rank adding what arrives to its own."""
    for chunk, expression in enumerate(check(ring.all_reduce, 5).expressions):
        travelling: Expression = (chunk + 1) % 5
        for k in range(2, 6):
            own = (chunk + k) % 5
            smaller_first = sorted((travelling, own), key=lambda e: min(leaves(e)))
            travelling = (smaller_first[0], smaller_first[1])
        assert expression == travelling


@pytest.mark.parametrize("root", range(5))
def test_broadcast_from_any_root(root: int) -> None:
    received = {rank for rank in range(5) for ops in tree.rotated(rank, 5, root=root) for op in ops if type(op) is Recv}
    assert received == set(range(5)) - {root}


def mutants(function: Algorithm, goal: Goal) -> Iterator[tuple[str, Algorithm]]:
    """The function with one constant, operator, flag or name changed."""
    source = inspect.getsource(function)
    spots = [node for node in ast.walk(ast.parse(source)) if _changes(node)]
    for index in range(len(spots)):
        for choice in range(len(_changes(spots[index]))):
            parsed = ast.parse(source)
            node = [node for node in ast.walk(parsed) if _changes(node)][index]
            before = ast.unparse(parsed)
            _changes(node)[choice]()
            after = ast.unparse(parsed)
            scope = {"Send": Send, "Recv": Recv, "range": range, "Iterator": Iterator, "Round": Round, **vars(ring)}
            exec(compile(ast.parse(after), "mutant", "exec"), scope)
            changed = next(b for a, b in zip(before.splitlines(), after.splitlines(), strict=True) if a != b)
            yield changed.strip(), scope[function.__name__]


def _changes(node: ast.AST) -> list[object]:
    """Functions that change this node in place, one thing each."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return [lambda: setattr(node, "value", not node.value)]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return [lambda: setattr(node, "value", node.value + 1), lambda: setattr(node, "value", node.value - 1)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        return [lambda: setattr(node, "op", other)]
    if isinstance(node, ast.Name) and node.id in ("right", "left") and isinstance(node.ctx, ast.Load):
        return [lambda: setattr(node, "id", "left" if node.id == "right" else "right")]
    if isinstance(node, ast.Name) and node.id in ("outgoing", "incoming") and isinstance(node.ctx, ast.Load):
        return [lambda: setattr(node, "id", "incoming" if node.id == "outgoing" else "outgoing")]
    return []


@pytest.mark.parametrize(
    ("function", "goal", "num_mutants"),
    [
        (ring.reduce_scatter, Goal.REDUCE_SCATTER, 15),
        (ring.all_gather, Goal.ALL_GATHER, 15),
        (ring.all_reduce, Goal.ALL_REDUCE, 7),
    ],
)
def test_every_one_line_mutant_is_rejected(function: Algorithm, goal: Goal, num_mutants: int) -> None:
    survivors, count = [], 0
    for line, mutant in mutants(function, goal):
        count += 1
        if all(_passes(mutant, num_ranks, goal) for num_ranks in range(1, 7)):
            survivors.append(line)
    assert count >= num_mutants
    assert not survivors


def _passes(algorithm: Algorithm, num_ranks: int, goal: Goal) -> bool:
    try:
        check(algorithm, num_ranks, goal=goal)
    except (ScheduleError, IndexError):
        return False
    return True


def test_deadlock_is_named() -> None:
    def everyone_receives_first(rank: int, num_ranks: int) -> Iterator[Round]:
        yield (Recv(1 - rank, range(2), add=True),)
        yield (Send(1 - rank, range(2)),)

    with pytest.raises(ScheduleError, match="deadlock with 2 ranks: rank 0 in round 0"):
        check(everyone_receives_first, 2)


def test_send_before_receive_on_both_sides_is_a_deadlock() -> None:
    """It would pass on a transport that buffers, and hang on NCCL."""

    def send_then_receive(rank: int, num_ranks: int) -> Iterator[Round]:
        yield (Send(1 - rank, range(2)),)
        yield (Recv(1 - rank, range(2), add=True),)

    with pytest.raises(ScheduleError, match="deadlock"):
        check(send_then_receive, 2)


def test_overwriting_what_is_being_sent_is_a_race() -> None:
    def race(rank: int, num_ranks: int) -> Iterator[Round]:
        yield Send(1 - rank, range(2)), Recv(1 - rank, range(2), add=False)

    with pytest.raises(ScheduleError, match="overwritten while in use"):
        check(race, 2)


@pytest.mark.parametrize("num_chunks", range(1, 9))
@pytest.mark.parametrize("numel", [0, 1, 2, 7, 8, 9, 100])
def test_chunks_cover_everything_and_differ_by_one(numel: int, num_chunks: int) -> None:
    bounds = offsets(numel, num_chunks)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(sizes)) == (0, numel, num_chunks)
    assert max(sizes) - min(sizes) <= 1


def test_drawing_shows_every_transfer() -> None:
    text = draw(ring.all_reduce, 3)
    assert text.count("→") == 12
    assert text.count("+=") == 6
    assert text.count("←") == 6
    assert "  rank 0   chunk 2 → rank 1      chunk 1 += rank 2" in text
    assert "nothing to do" in draw(ring.all_reduce, 1)
