"""Master and workers: everyone sends everything to rank 0, which adds it up and sends the sum back.

        1   2   3                 1   2   3
         ╲  │  ╱                   ╲  │  ╱         p−1 messages each way, all of them over rank 0's link
            0   adds 1, 2, 3          0

                  chunks   rounds   sent by the master     by a worker   time
    reduce        1        1        0                      N             (p−1)(α + Nβ + Nγ)
    broadcast     1        1        (p−1) messages, ·N     0             (p−1)(α + Nβ)
    all-reduce    1        2        (p−1) messages, ·N     N             2(p−1)(α + Nβ) + (p−1)Nγ

The parameter server's pattern. Its two rounds suit few ranks and small messages.
Beyond that the master's link is the bottleneck while all others idle; `round_robin.py` and `all_to_all.py` give every
rank a turn, or a share, of the master's work. The sum runs from rank 0 up, one by one: canonical to 3 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddp.collectives.schedule import Recv, Round, Send

WHOLE = range(1)


def reduce(rank: int, num_ranks: int) -> Iterator[Round]:
    """Rank 0 ends with the sum."""
    if rank == 0:
        yield tuple(Recv(worker, WHOLE, add=True) for worker in range(1, num_ranks))
    else:
        yield (Send(0, WHOLE),)


def broadcast(rank: int, num_ranks: int) -> Iterator[Round]:
    """Every rank ends with rank 0's buffer."""
    if rank == 0:
        yield tuple(Send(worker, WHOLE) for worker in range(1, num_ranks))
    else:
        yield (Recv(0, WHOLE, add=False),)


def all_reduce(rank: int, num_ranks: int) -> Iterator[Round]:
    """Every rank ends with the sum."""
    yield from reduce(rank, num_ranks)
    yield from broadcast(rank, num_ranks)
