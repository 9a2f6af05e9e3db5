"""Checks a reader's schedules: proven for every small world, and no dearer than the library's.

`Schedule.check`, which the library's tests call, says what is wrong: rank, round and chunk.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import ModuleType

from ddp.collectives import butterfly as solved
from ddp.collectives.catalog import SCHEDULES, own_all_reduce
from ddp.collectives.schedule import Goal, Schedule, ScheduleError, one_per_rank
from ddp.process.arguments import program
from ddp.units import counted
from recipes.tutorial.tools.mistake import Mistake, raised


def ring(module: ModuleType, sizes: Sequence[int] = range(1, 9)) -> Iterator[str]:
    """Checks exercise 02."""
    for name, like in (
        ("reduce_scatter", "ring_reduce_scatter"),
        ("all_gather", "ring_all_gather"),
        ("all_reduce", "ring"),
    ):
        yield prove(module, name, SCHEDULES[like], sizes, drawn=like)


def butterfly(module: ModuleType, sizes: Sequence[int] = range(1, 9)) -> Iterator[str]:
    """Checks exercise 03."""
    solution = Schedule(solved.halving_doubling, Goal.ALL_REDUCE, one_per_rank)
    yield prove(module, "halving_doubling", solution, (1, 2, 4, 8, 16), drawn="butterfly")
    yield prove(module, "all_reduce", SCHEDULES["butterfly"], sizes, drawn="butterfly")


def prove(module: ModuleType, name: str, solution: Schedule, sizes: Sequence[int], *, drawn: str) -> str:
    """Proves one schedule of the reader's file for these numbers of ranks.

    Args:
        drawn: the name by which `draw` knows the solution.

    Raises:
        Mistake: it is wrong, or dearer than the library's.
    """
    algorithm = getattr(module, name)
    if not inspect.isgeneratorfunction(algorithm):
        raise Mistake(name, "is no generator", "a schedule yields its rounds, one tuple of Send and Recv after another")
    written = own_all_reduce(solution._replace(algorithm=algorithm))
    for num_ranks in sizes:
        step = f"{name} with {counted(num_ranks, 'rank')}"
        hint = f"`{program()} draw {drawn} {num_ranks}` shows every round of the library's"
        try:
            proof = written.check(num_ranks)
        except ScheduleError as error:
            says = str(error).removeprefix(f"{num_ranks} ranks, ")
            raise raised(step, error, module) or Mistake(step, says, hint) from None
        best = solution.check(num_ranks)
        for what, here, enough in (
            ("rounds", proof.num_rounds, best.num_rounds),
            ("messages of a rank", max(proof.messages_sent), max(best.messages_sent)),
            ("chunks sent by a rank", max(proof.chunks_sent), max(best.chunks_sent)),
        ):
            if here > enough:
                raise Mistake(step, f"the sums are right, but {what}: {here}, where {enough} is enough", hint)
        if best.canonical and not proof.canonical:
            raise Mistake(
                step,
                f"the sums are right, but added in another order: chunk 0 = {proof.expressions[0]}",
                'farthest first: begin with the partner at distance 1 (the note "nearest first" says why)',
            )
    return f"{name}: proven for {', '.join(map(str, sizes))} ranks, and no dearer than the library's"
