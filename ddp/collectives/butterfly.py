"""Butterfly: in every round, each rank talks to the rank whose number differs in one bit, another bit per round.

    distance   1              2              4                  rank 5 of 8 talks to 4, then to 7, then to 1
    ranks      0─1 2─3 4─5    0─2 1─3 4─6    0─4 1─5 2─6 3─7

Two all-reduces, for p ranks, p a power of two, and a buffer of N bytes:

    recursive doubling    Both partners exchange their whole buffers and add. After round k, groups of 2^k ranks hold
                          their sum.
    halving-doubling      Halving: each partner sends the half that the other one keeps, adds, and continues with its
                          own half; after log₂ p rounds a rank has the sum of N/p. Doubling: the same way back, the
                          finished parts grow by exchange. (Rabenseifner, "Optimization of collective reduction
                          operations", 2004)

schedule                  chunks   rounds     messages and bytes sent per rank   time
    recursive doubling    1        log₂ p     log₂ p,    log₂ p·N                log₂ p·(α + Nβ + Nγ)
    halving-doubling      p        2 log₂ p   2 log₂ p,  2(p−1)/p·N              2 log₂ p·α + 2(p−1)/p·Nβ + (p−1)/p·Nγ

Recursive doubling has the fewest rounds that are possible, so it suits small messages. Halving-doubling sends the
ring's bytes in far fewer rounds, but each rank has another partner in every round.

Note "nearest first". Textbooks halve with the farthest partner first. Here the nearest comes first, so that the largest
messages stay between neighbours (on one host) and every chunk is summed in the canonical order.

Note "any number". With p' ranks beyond the largest power of two p, 2p' ranks begin as pairs of neighbours: the odd one
of each pair sends its whole buffer to the even one, waits, and gets the result, as in MPICH (Thakur, Rabenseifner &
Gropp, "Optimization of collective communication operations in MPICH", 2005). That takes two more rounds, and the
busiest rank sends N more. Since pairs of neighbours come first, the sum stays canonical where possible (3, 6, 7, 12,
14, …). `circulant.py` avoids the extra bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddp.collectives.placed import placed
from ddp.collectives.schedule import Goal, Recv, Round, Schedule, Send, one_chunk, one_per_rank


def all_reduce(rank: int, num_ranks: int) -> Iterator[Round]:
    """Every rank ends with the sum of every chunk; there are `largest_power_of_two(num_ranks)` chunks."""
    yield from folded(Schedule(halving_doubling, Goal.ALL_REDUCE, one_per_rank), rank, num_ranks)


def recursive_doubling(rank: int, num_ranks: int) -> Iterator[Round]:
    """Every rank ends with the sum; the buffer is one chunk."""
    yield from folded(Schedule(doubling, Goal.ALL_REDUCE, one_chunk), rank, num_ranks)


def halving_doubling(rank: int, num_ranks: int) -> Iterator[Round]:
    """All-reduces a chunk per rank among a power of two of ranks."""
    # exercise 03: halve what is yours with partners at distance 1, 2, 4, …; then go back, exchanging finished parts
    mine, exchanges, distance = range(num_ranks), [], 1
    while distance < num_ranks:
        peer, half = rank ^ distance, len(mine) // 2
        keep, give = (mine[:half], mine[half:]) if rank < peer else (mine[half:], mine[:half])
        yield Send(peer, give), Recv(peer, keep, add=True)
        exchanges.append((peer, keep, give))
        mine, distance = keep, 2 * distance
    for peer, keep, give in reversed(exchanges):
        yield Send(peer, keep), Recv(peer, give, add=False)


def doubling(rank: int, num_ranks: int) -> Iterator[Round]:
    """All-reduces one chunk among a power of two of ranks."""
    distance = 1
    while distance < num_ranks:
        yield Send(rank ^ distance, range(1)), Recv(rank ^ distance, range(1), add=True)
        distance *= 2


def folded(schedule: Schedule, rank: int, num_ranks: int) -> Iterator[Round]:
    """Runs an all-reduce for a power of two of ranks on any number of ranks: see the note "any number"."""
    power = largest_power_of_two(num_ranks)
    paired = 2 * (num_ranks - power)  # ranks 0 … paired−1 are pairs of neighbours
    players = [*range(0, paired, 2), *range(paired, num_ranks)]
    everything = range(schedule.num_chunks(power))
    if paired:
        yield _between_pair(rank, paired, send=rank % 2 == 1, chunks=everything, add=True)
    yield from placed(schedule, rank, ranks=players, chunks=everything)
    if paired:
        yield _between_pair(rank, paired, send=rank % 2 == 0, chunks=everything, add=False)


def _between_pair(rank: int, paired: int, *, send: bool, chunks: range, add: bool) -> Round:
    if rank >= paired:
        return ()
    return (Send(rank ^ 1, chunks),) if send else (Recv(rank ^ 1, chunks, add),)


def largest_power_of_two(num_ranks: int) -> int:
    """Returns the largest power of two up to `num_ranks`: the number of chunks of the all-reduce."""
    return 1 << num_ranks.bit_length() - 1
