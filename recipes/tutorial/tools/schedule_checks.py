"""Checks a reader's schedules: proven for every small world, no dearer than the library's, and run on numbers.

`Schedule.check` says what is wrong: rank, round and chunk. The first transfer that differs from the library's says why:
a wrong neighbour, a chunk beside the right one, an addition in place of a copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from types import ModuleType

import torch

from ddp.collectives import butterfly as solved
from ddp.collectives.catalog import SCHEDULES, own_all_reduce
from ddp.collectives.chunks import offsets, one_per_rank
from ddp.collectives.schedule import Goal, Recv, Round, Schedule, ScheduleError, Send
from ddp.comm.execute import Scratch, execute, program
from ddp.comm.transport.simulated import SimulatedNetwork, SimulatedTransport
from ddp.units import counted
from recipes.tutorial.tools.mistake import Mistake, raised

SILENCE_S = 5.0  # longest wait for a rank that runs in a thread beside


def ring(module: ModuleType, sizes: Sequence[int] = range(1, 9)) -> Iterator[str]:
    """Checks exercise 02."""
    yield prove(module, "reduce_scatter", SCHEDULES["ring_reduce_scatter"], sizes)
    yield prove(module, "all_gather", SCHEDULES["ring_all_gather"], sizes)
    yield prove(module, "all_reduce", SCHEDULES["ring"], sizes)
    yield run(module, "all_reduce", SCHEDULES["ring"], num_ranks=4)


def butterfly(module: ModuleType, sizes: Sequence[int] = range(1, 9)) -> Iterator[str]:
    """Checks exercise 03."""
    solution = Schedule(solved.halving_doubling, Goal.ALL_REDUCE, one_per_rank)
    yield prove(module, "halving_doubling", solution, (1, 2, 4, 8, 16))
    yield prove(module, "all_reduce", SCHEDULES["butterfly"], sizes)
    yield run(module, "all_reduce", SCHEDULES["butterfly"], num_ranks=6)


def prove(module: ModuleType, name: str, solution: Schedule, sizes: Sequence[int]) -> str:
    """Proves one schedule of the reader's file for these numbers of ranks.

    Raises:
        Mistake: it is wrong, or dearer than the library's.
    """
    algorithm = getattr(module, name)
    if not inspect.isgeneratorfunction(algorithm):
        raise Mistake(name, "is no generator", "a schedule yields its rounds, one tuple of Send and Recv after another")
    written = own_all_reduce(solution._replace(algorithm=algorithm))
    for num_ranks in sizes:
        step = f"{name} with {counted(num_ranks, 'rank')}"
        try:
            proof = written.check(num_ranks)
        except ScheduleError as error:
            if mistake := raised(step, error, module):
                raise mistake from None
            says = str(error).removeprefix(f"{num_ranks} ranks, ")
            raise Mistake(step, says, first_difference(written, solution, num_ranks)) from None
        best = solution.check(num_ranks)
        for what, here, enough in (
            ("rounds", proof.num_rounds, best.num_rounds),
            ("messages of a rank", max(proof.messages_sent), max(best.messages_sent)),
            ("chunks sent by a rank", max(proof.chunks_sent), max(best.chunks_sent)),
        ):
            if here > enough:
                hint = first_difference(written, solution, num_ranks)
                raise Mistake(step, f"the sums are right, but {what}: {here}, where {enough} is enough", hint)
        if best.canonical and not proof.canonical:
            raise Mistake(
                step,
                f"the sums are right, but added in another order: chunk 0 = {proof.expressions[0]}",
                'farthest first: begin with the partner at distance 1 (the note "nearest first" says why)',
            )
    return f"{name}: proven for {_listed(sizes)} ranks, and no dearer than the library's"


def first_difference(written: Schedule, solution: Schedule, num_ranks: int) -> str:
    """Returns a name for the first transfer in which a schedule differs from the library's, and says where it is."""
    nobody: tuple[Round | None, ...] = (None,) * num_ranks
    try:
        both = zip_longest(_rounds(written, num_ranks), _rounds(solution, num_ranks), fillvalue=nobody)
        for number, (here, there) in enumerate(both, start=1):
            for rank in range(num_ranks):
                if what := _difference(here[rank], there[rank], num_ranks):
                    return f"{what} (rank {rank} in round {number})"
    except ScheduleError:  # the reader's generator goes wrong further on
        pass
    return ""


def _rounds(schedule: Schedule, num_ranks: int) -> Iterator[tuple[Round | None, ...]]:
    """Yields the rounds of all ranks; None for a rank that has ended."""
    return zip_longest(*(schedule.algorithm(rank, num_ranks) for rank in range(num_ranks)))


def _difference(here: Round | None, there: Round | None, num_ranks: int) -> str:
    """Returns a name for the first difference of two rounds of a rank, the reader's and the library's; "" if equal."""
    if here is None:
        return "a round too few" if there is not None else ""
    if there is None:
        return "a round too many"
    for kind, word in ((Send, "send"), (Recv, "receive")):
        mine, right = ([op for op in ops if isinstance(op, kind)] for ops in (here, there))
        for op, wanted in zip_longest(mine, right):
            if op is None:
                return f"a missing {word}: expected “{_shown(wanted)}”"
            if wanted is None:
                return f"a {word} too many: found “{_shown(op)}”"
            if name := _name_of_mistake(op, wanted, num_ranks):
                return f"{name}: found “{_shown(op)}”, expected “{_shown(wanted)}”"
    return ""


def _name_of_mistake(op: Send | Recv, wanted: Send | Recv, num_ranks: int) -> str:
    """Returns what is wrong with a transfer, or ""."""
    if op.peer != wanted.peer:
        return "wrong neighbour"
    if op.chunks != wanted.chunks:
        is_near = len(op.chunks) == len(wanted.chunks) == 1
        apart = (op.chunks.start - wanted.chunks.start) % num_ranks
        return "off by one chunk" if is_near and apart in (1, num_ranks - 1) else "wrong chunks"
    if isinstance(op, Recv) and isinstance(wanted, Recv) and op.add != wanted.add:
        return "adds in place of overwriting" if op.add else "overwrites in place of adding"
    return ""


def _shown(op: Send | Recv) -> str:
    chunks = f"chunk {op.chunks.start}" if len(op.chunks) == 1 else f"chunks {op.chunks.start}-{op.chunks.stop - 1}"
    if isinstance(op, Send):
        return f"send {chunks} to rank {op.peer}"
    return f"{'add' if op.add else 'write'} {chunks} from rank {op.peer}"


def run(module: ModuleType, name: str, solution: Schedule, *, num_ranks: int) -> str:
    """Runs an all-reduce of the reader's file on numbers, with the library's executor; ranks are threads.

    Raises:
        Mistake: a sum is wrong.
    """
    step = f"{name} of 10 numbers, with {counted(num_ranks, 'rank')}"
    bounds = tuple(offsets(10, solution.num_chunks(num_ranks)))
    contributions = [torch.arange(10, dtype=torch.float64) * (rank + 1) for rank in range(num_ranks)]

    def reduced(transport: SimulatedTransport) -> torch.Tensor:
        flat = contributions[transport.rank].clone()
        steps = program(getattr(module, name), transport.rank, num_ranks, (bounds,), segment_numel=10)
        execute(steps, [flat], transport, scratch=Scratch(), timeout_s=SILENCE_S)
        return flat

    expected = torch.stack(contributions).sum(0)
    for rank, found in enumerate(SimulatedNetwork(num_ranks).run(reduced)):
        if not torch.equal(found, expected):
            raise Mistake(step, f"rank {rank} ends with {found.tolist()}, not with {expected.tolist()}")
    return f"{step}: {', '.join(f'{number:g}' for number in expected[:4].tolist())}, … on every rank"


def _listed(sizes: Sequence[int]) -> str:
    if list(sizes) == list(range(sizes[0], sizes[-1] + 1)):
        return f"{sizes[0]} to {sizes[-1]}"
    return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
