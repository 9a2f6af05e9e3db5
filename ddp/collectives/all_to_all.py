"""All-to-all: every rank talks to every other one, in one round.

    reduce-scatter   every rank sends chunk r to its owner r; the owner adds the p−1 copies to its own
    all-gather       every rank sends the chunk it owns to all others
    exchange         rank s has a chunk for every rank d: the transpose of the matrix "chunk d of rank s"

    exchange of 3 ranks      rank 0: 00 01 02  →  00 10 20        chunk d of rank s leaves buffer 0 of rank s
                             rank 1: 10 11 12  →  01 11 21        for buffer 1 of rank d, as chunk s
                             rank 2: 20 21 22  →  02 12 22

                       chunks   rounds   messages and bytes sent per rank   time, on one port
    reduce-scatter     p        1        p−1,     (p−1)/p·N                 (p−1)α + (p−1)/p·N(β + γ)
    all-gather         p        1        p−1,     (p−1)/p·N                 (p−1)α + (p−1)/p·Nβ
    all-reduce         p        2        2(p−1),  2(p−1)/p·N                2(p−1)α + 2(p−1)/p·Nβ + (p−1)/p·Nγ
    exchange           p        1        p−1,     (p−1)/p·N                 (p−1)α + (p−1)/p·Nβ

Each half sends (p−1)/p·N bytes, as a ring does, and both halves take two rounds instead of 2(p−1). If all p−1 messages
of a round travel at the same time (a full crossbar, shared memory, few ranks), the α term is 2α. With many ranks the
network has p² flows at once, and switches begin to drop packets: then a ring is faster.

Every rank begins with its right neighbour, because otherwise all would send to rank 0 first. Rank r adds up chunk r,
starting with its own part and continuing to the right: the same bits everywhere, but not canonical beyond two ranks.

Note "naive". Every rank sends everything to all others, and each rank adds it all up itself.

    0 ◀─▶ 1        every rank ends its single round with all p vectors
    ▲ ╲ ╱ ▲
    │  ╳  │        0 + 1 + 2 + 3 on each of them, in the order of the ranks
    ▼ ╱ ╲ ▼
    2 ◀─▶ 3

    chunks 1  ·  rounds 1  ·  sent per rank p−1 messages, (p−1)N; by all ranks p(p−1)N
    time (p−1)(α + Nβ + Nγ), on one port

No all-reduce takes fewer rounds, and none moves more bytes or adds more often, because every rank computes the same
sums. So it suits few ranks and messages of a few bytes. The all-reduce above lets each rank add up one chunk for all,
which takes a second round, and sends p/2 times less.

Each rank already has its own contribution. If it simply added the others to it, rank 0 would compute (0 + 1) + 2 and
rank 2 (2 + 0) + 1, which have different bits. So contributions of lower ranks are added up `before` the rank's own. The
order is then that of the ranks everywhere: canonical up to 3 ranks.

Note "slice owners". It adds up the shards of a batch in the order of their tree, on any number of ranks.

A rank holds the sums of its own shards: its nodes of the tree (`shards.py`), each in its own buffer. Chunk s has
an owner, rank s. The owner collects chunk s of every node of every rank, adds them up as the tree says, and sends the
total to everyone. So the bits of the total depend on the number of shards alone.

    8 shards, 3 ranks    nodes: (0,1) on rank 0      (2,3) and 4 on rank 1      5 and (6,7) on rank 2

    round 1    Every rank sends chunk s of each node to rank s, which adds them up. On rank 1:

               chunk 1 of buffer   0: (2,3)   1: 4   its own   2: (0,1)  of rank 0   3: 5   4: (6,7)  of rank 2

               0 += 2              (0,1) + (2,3)
               1 += 3              4 + 5
               1 += 4              (4,5) + (6,7)
               0 += 1              (0,1,2,3) + (4,5,6,7)

    round 2    Chunk s of buffer 0 goes from rank s to all others: an all-gather.

The total ends in buffer 0. So an addition that involves buffer 0 changes buffer 0, and any other addition changes its
left side. The bits are the same, because a + b has those of b + a.

For p ranks, k nodes on this rank, K on all of them, buffers of N bytes:

                      chunks   rounds   messages and bytes sent by this rank   bytes received    bytes added
    reduce-scatter    p        1        k(p−1),      k(p−1)/p·N                (K−k)/p·N         (K−1)/p·N
    all-gather        p        1        p−1,         (p−1)/p·N                 (p−1)/p·N         0
    all-reduce        p        2        (k+1)(p−1),  (k+1)(p−1)/p·N            (K−k+p−1)/p·N     (K−1)/p·N

All ranks send (K+p)(p−1)/p·N bytes in total. With one node per rank (K = p), `all_to_all` and a ring send as much. The
nodes of other ranks take another (K−k)/p·N bytes of memory. For 8 shards:

    ranks                      1      2      3      4      5      6      7      8
    nodes of all ranks, K      1      2      5      4      6      6      7      8
    sent by all, times N       0      2      5.33   6      8.8    10     12     14

Source: the owners are those of the reduce-scatter above. That one adds in the order of the ranks, beginning with the
owner; this one in the order of the tree over the shards, which is the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from ddp.collectives.schedule import Add, Algorithm, Goal, Recv, Round, Schedule, Send, one_per_rank
from ddp.collectives.shards import Addition, additions_between, nodes_by_rank


def reduce_scatter(rank: int, num_ranks: int) -> Iterator[Round]:
    """Rank r ends with the sum of chunk r."""
    others = _others(rank, num_ranks)
    yield (
        *(Send(peer, _one(peer)) for peer in others),
        *(Recv(peer, _one(rank), add=True) for peer in others),
    )


def all_gather(rank: int, num_ranks: int) -> Iterator[Round]:
    """Rank r starts with chunk r; every rank ends with all."""
    others = _others(rank, num_ranks)
    yield (
        *(Send(peer, _one(rank)) for peer in others),
        *(Recv(peer, _one(peer), add=False) for peer in others),
    )


def all_reduce(rank: int, num_ranks: int) -> Iterator[Round]:
    """Every rank ends with the sum of every chunk."""
    yield from reduce_scatter(rank, num_ranks)
    yield from all_gather(rank, num_ranks)


def naive(rank: int, num_ranks: int) -> Iterator[Round]:
    """Every rank ends with the sum: see the note "naive"."""
    whole = range(1)
    yield (
        *(Send(peer, whole) for peer in _others(rank, num_ranks)),
        *(Recv(peer, whole, add=True, before=peer < rank) for peer in range(num_ranks) if peer != rank),
    )


def exchange(rank: int, num_ranks: int) -> Iterator[Round]:
    """Chunk d of rank s, in buffer 0, ends as chunk s of rank d, in buffer 1; a rank's own chunk is there already."""
    others = _others(rank, num_ranks)
    yield (
        *(Send(peer, _one(peer)) for peer in others),
        *(Recv(peer, _one(peer), add=False, buffer=1) for peer in others),
    )


def _others(rank: int, num_ranks: int) -> list[int]:
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def _one(chunk: int) -> range:
    return range(chunk, chunk + 1)


# --- slice owners ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)  # one object each, because callers cache what they derive from a schedule
def schedule_over_shards(num_shards: int, goal: Goal, slices: tuple[int, ...] = ()) -> Schedule:
    """Returns the all-reduce, or the reduce-scatter, that adds up this number of shards.

    Args:
        slices: by rank, the number of the chunk that it owns; its own number unless given.
    """
    algorithm = {Goal.ALL_REDUCE: all_reduce_over_shards, Goal.REDUCE_SCATTER: reduce_scatter_over_shards}[goal]
    over_shards: Algorithm = partial(algorithm, num_shards=num_shards)
    if any(chunk != rank for rank, chunk in enumerate(slices)):
        over_shards = partial(_with_slices, over_shards, slices)
    return Schedule(over_shards, goal, one_per_rank, num_shards)


def reduce_scatter_over_shards(rank: int, num_ranks: int, *, num_shards: int) -> Iterator[Round]:
    """Rank r ends with the sum of chunk r, over all shards, in buffer 0."""
    buffers = _buffers(rank, num_ranks, num_shards)
    others, mine = _others(rank, num_ranks), _one(rank)
    yield (
        *(Send(peer, _one(peer), buffer) for peer in others for buffer in buffers[rank]),
        *(Recv(peer, mine, add=False, buffer=buffer) for peer in others for buffer in buffers[peer]),
        *_added(buffers, additions_between(num_ranks, num_shards), mine),
    )


def all_reduce_over_shards(rank: int, num_ranks: int, *, num_shards: int) -> Iterator[Round]:
    """Every rank ends with the sum of every chunk, over all shards, in buffer 0."""
    yield from reduce_scatter_over_shards(rank, num_ranks, num_shards=num_shards)
    yield from all_gather(rank, num_ranks)


def _with_slices(algorithm: Algorithm, slices: Sequence[int], rank: int, num_ranks: int) -> Iterator[Round]:
    """Yields rounds of one-chunk transfers, with each chunk replaced by its entry in `slices`."""
    for ops in algorithm(rank, num_ranks):
        yield tuple(replace(op, chunks=range(slices[op.chunks.start], slices[op.chunks.start] + 1)) for op in ops)


def _buffers(rank: int, num_ranks: int, num_shards: int) -> list[range]:
    """Returns, by rank, the numbers of the buffers that hold its nodes on this rank; this rank's own come first."""
    nodes, buffers, free = nodes_by_rank(num_ranks, num_shards), dict[int, range](), 0
    for peer in sorted(range(num_ranks), key=lambda peer: peer != rank):
        buffers[peer] = range(free, free + len(nodes[peer]))
        free += len(nodes[peer])
    return [buffers[peer] for peer in range(num_ranks)]


def _added(buffers: Sequence[range], additions: Iterable[Addition], chunks: range) -> Iterator[Add]:
    """Yields the additions of all nodes, so that their sum ends in buffer 0."""
    where = [buffer for of_rank in buffers for buffer in of_rank]  # by node: the buffer of the sum that now contains it
    for left, right in additions:
        into, other = where[left], where[right]
        if other == 0:
            into, other = other, into
        yield Add(into, other, chunks)
        where[left] = into
