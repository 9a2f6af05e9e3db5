"""Binomial tree: the number of ranks that know the news doubles in every round.

    broadcast from rank 0, 8 ranks      round 0: 0→4      round 1: 0→2 4→6      round 2: 0→1 2→3 4→5 6→7

    rounds ⌈log₂ p⌉  ·  bytes sent by the root ⌈log₂ p⌉·N  ·  time ⌈log₂ p⌉(α + Nβ)

Right for what happens once, such as giving every replica rank 0's parameters. The buffer is one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddp.collectives.schedule import Recv, Round, Send

WHOLE = range(1)


def broadcast(rank: int, num_ranks: int) -> Iterator[Round]:
    """Every rank ends with what rank 0 had."""
    distance = 1 << max(num_ranks - 1, 0).bit_length()
    while distance > 1:
        reach, distance = distance, distance // 2
        if rank % reach == 0 and rank + distance < num_ranks:
            yield (Send(rank + distance, WHOLE),)
        elif rank % reach == distance:
            yield (Recv(rank - distance, WHOLE, add=False),)
        else:
            yield ()


def rotated(rank: int, num_ranks: int, *, root: int) -> Iterator[Round]:
    """The same broadcast from any root: all ranks renamed so that the root is number 0."""
    for ops in broadcast((rank - root) % num_ranks, num_ranks):
        yield tuple(_renamed(op, (op.peer + root) % num_ranks) for op in ops)


def _renamed(op: Send | Recv, peer: int) -> Send | Recv:
    return Send(peer, op.chunks) if isinstance(op, Send) else Recv(peer, op.chunks, op.add)
