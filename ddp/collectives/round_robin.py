"""Round-robin: ranks take turns as the master. Rank i is the master of chunk i, one after another.

    chunk 0: everyone → rank 0 → everyone      chunk 1: everyone → rank 1 → everyone      chunk 2: …

    chunks p  ·  rounds 2p  ·  messages sent per rank 2(p−1), bytes 2(p−1)/p·N
    time 2p(p−1)(α + N/p·β) + (p−1)Nγ, on one port: a round lasts as long as its master's p−1 messages

Over the whole collective every rank sends as much as in a ring, and no rank is a bottleneck for ever. That is better
than one master for all chunks, whose link carries (p−1)N each way. But only one master works at a time. If all masters
work at once, the same messages take two rounds: that is `all_to_all.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddp.collectives.schedule import Recv, Round, Send


def all_reduce(rank: int, num_ranks: int) -> Iterator[Round]:
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
