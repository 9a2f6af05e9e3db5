"""Prints a schedule for a reader, with a block per round and a line per rank.

python -m ddp draw ring 3

round 1
  rank 0   chunk 2 → rank 1      chunk 1 += rank 2
  rank 1   chunk 0 → rank 2      chunk 2 += rank 0
  rank 2   chunk 1 → rank 0      chunk 0 += rank 1
"""

from __future__ import annotations

from itertools import zip_longest

from ddp.collectives.schedule import Algorithm, Recv, Round, Send


def draw(algorithm: Algorithm, num_ranks: int) -> str:
    """Returns the rounds of all ranks as text."""
    programs = [list(algorithm(rank, num_ranks)) for rank in range(num_ranks)]
    width = max((len(_phrase(op)) for program in programs for ops in program for op in ops), default=0)
    blocks = [
        "\n".join(
            [f"round {number}", *(_line(rank, ops, max(width + 2, 21)) for rank, ops in enumerate(rounds) if ops)]
        )
        for number, rounds in enumerate(zip_longest(*programs, fillvalue=()), start=1)
        if any(rounds)
    ]
    return "\n\n".join(blocks) or "nothing to do: one rank has every contribution already"


def _line(rank: int, ops: Round, width: int) -> str:
    return f"  rank {rank:<3}" + "".join(f" {_phrase(op):<{width}}" for op in ops).rstrip()


def _phrase(op: Send | Recv) -> str:
    first, last = op.chunks[0], op.chunks[-1]
    name = f"chunk {first}" if first == last else f"chunks {first}-{last}"
    name += f" of buffer {op.buffer}" if op.buffer else ""
    if isinstance(op, Send):
        return f"{name} → rank {op.peer}"
    return f"{name} {'+=' if op.add else '←'} rank {op.peer}{' (before)' if op.before else ''}"
