"""Master and workers: every rank sends its buffer to rank 0, which adds them up and sends the sum back.

        1   2   3                 1   2   3
         ╲  │  ╱                   ╲  │  ╱         p−1 messages each way, all of them over rank 0's link
            0   adds 1, 2, 3          0

                  chunks   rounds   sent by the master     by a worker   time
    reduce        1        1        0                      N             (p−1)(α + Nβ + Nγ)
    broadcast     1        1        (p−1) messages, ·N     0             (p−1)(α + Nβ)
    all-reduce    1        2        (p−1) messages, ·N     N             2(p−1)(α + Nβ) + (p−1)Nγ

This is the parameter server's pattern. Its two rounds suit few ranks and small messages. Beyond that the master's link
is the bottleneck while all others idle; round-robin and `all_to_all.py` give every rank a turn, or a share, of the
master's work. Rank 0 adds in the order of the ranks: canonical up to 3 ranks.

Note "round-robin". Ranks take turns as the master: rank i is the master of chunk i, one after another.

    chunk 0: everyone → rank 0 → everyone      chunk 1: everyone → rank 1 → everyone      chunk 2: …

    chunks p  ·  rounds 2p  ·  messages sent per rank 2(p−1), bytes 2(p−1)/p·N
    time 2p(p−1)(α + N/p·β) + (p−1)Nγ, on one port: a round lasts as long as its master's p−1 messages

Over the whole collective every rank sends as much as in a ring, and no rank stays the bottleneck. That is better than
one master for all chunks, whose link carries (p−1)N each way. But only one master works at a time. If all masters work
at once, the same messages take two rounds, as in `all_to_all.py`.
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


def round_robin(rank: int, num_ranks: int) -> Iterator[Round]:
    """Every rank ends with the sum of every chunk."""
    for master in range(num_ranks):
        chunk = range(master, master + 1)
        if rank == master:
            workers = [worker for worker in range(num_ranks) if worker != master]
            yield tuple(Recv(worker, chunk, add=True) for worker in workers)
            yield tuple(Send(worker, chunk) for worker in workers)
        else:
            yield (Send(master, chunk),)
            yield (Recv(master, chunk, add=False),)
