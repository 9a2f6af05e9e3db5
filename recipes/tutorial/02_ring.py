"""02 · Ring all-reduce

How do p ranks add up their gradients, if none may be busier than the others?

    Each rank cuts its gradient into p chunks. 4 ranks, 4 chunks, all ranks send to the right at the same time:

              rank 0 → 1    rank 1 → 2    rank 2 → 3    rank 3 → 0
    round 1    chunk 3       chunk 0       chunk 1       chunk 2      reduce-scatter: each rank adds what arrives to
    round 2    chunk 2       chunk 3       chunk 0       chunk 1      its own copy, and passes the sum on. After
    round 3    chunk 1       chunk 2       chunk 3       chunk 0      p − 1 rounds, rank r has the whole sum of chunk r
    ┄┄┄┄┄┄┄
    round 4    chunk 0       chunk 1       chunk 2       chunk 3      all-gather: the finished chunks travel on in the
    round 5    chunk 3       chunk 0       chunk 1       chunk 2      same way, and replace what is there. After p − 1
    round 6    chunk 2       chunk 3       chunk 0       chunk 1      more rounds, every rank has all of them
"""

from itertools import pairwise

import torch
from problem import NUM_PARAMETERS, NUM_SAMPLES, answer, as_threads, gradient_of_sum, share

import ddp
from ddp.collectives.catalog import SCHEDULES

# ## The ring
#
# A *collective* is an operation that all ranks call together. An *all-reduce* is one: it gives every rank the sum of
# all ranks' tensors. This one follows the drawing line by line. A *chunk* is a part of the tensor, and a *round* is the
# set of messages that are on their way at the same time. In round 1, rank r sends chunk r − 1; in each later round it
# sends what it has received and added in the round before. Indices run around a circle, hence `% p`.


def ring_all_reduce(comm: ddp.Communicator, tensor: torch.Tensor) -> int:
    """Makes `tensor`, [n], the sum over all ranks, in place. Returns how many numbers this rank has sent."""
    rank, p = comm.rank, comm.world_size
    right, left = (rank + 1) % p, (rank - 1) % p
    bounds = [k * len(tensor) // p for k in range(p + 1)]
    chunks = [tensor[first:last] for first, last in pairwise(bounds)]
    num_sent = 0
    for step in range(p - 1):  # reduce-scatter
        outgoing, incoming = chunks[(rank - 1 - step) % p], chunks[(rank - 2 - step) % p]
        sending = comm.send(outgoing, right, async_op=True)
        incoming += comm.recv(torch.empty_like(incoming), left)
        sending.wait()
        num_sent += len(outgoing)
    for step in range(p - 1):  # all-gather
        outgoing, incoming = chunks[(rank - step) % p], chunks[(rank - 1 - step) % p]
        sending = comm.send(outgoing, right, async_op=True)
        comm.recv(incoming, left)
        sending.wait()
        num_sent += len(outgoing)
    return num_sent


# ## The same in the library
#
# `ddp/collectives/ring.py` has the same two loops, with `yield Send(…), Recv(…)` in the place of the messages. It does
# not send anything: it is a *schedule*, which says what every rank would do, as data. That is why it can be drawn,
# proven and priced, and run on any network. `check` plays it for all ranks, with symbols for numbers. It proves that
# every contribution arrives exactly once, that there is no deadlock, and that all ranks end with the same sum, added in
# the same order.


def on_each_rank(comm: ddp.Communicator) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns the gradient by the ring above and by the library's, and how many numbers this rank has sent."""
    mine = gradient_of_sum(*share(comm.rank, comm.world_size))
    by_library = comm.all_reduce(mine.clone(), algorithm="ring")
    num_sent = ring_all_reduce(comm, mine)
    return mine / NUM_SAMPLES, by_library / NUM_SAMPLES, num_sent


if __name__ == "__main__":
    for p in range(1, 9):
        results = as_threads(on_each_rank, p)
        proof = SCHEDULES["ring"].check(p)
        first, _, num_sent = results[0]
        print(f"ranks: {p}, rank 0 has sent {num_sent} numbers, {num_sent / NUM_PARAMETERS:.2f} times the gradient")
        for ours, by_library, num_sent in results:
            assert torch.allclose(ours, answer()) and num_sent <= 2 * NUM_PARAMETERS
            assert torch.equal(ours, first)  # all ranks have the same bits
            assert torch.equal(ours, by_library)  # and they are those of the library's ring
        assert proof.num_rounds == (1 if p == 2 else 2 * (p - 1))  # two ranks exchange all they have, in one round
        assert sum(num_sent for *_, num_sent in results) == 2 * (p - 1) * NUM_PARAMETERS
    print("4 ranks add chunk 0 up in the order", SCHEDULES["ring"].check(4).expressions[0])

# ## What to look at
#
# `torch.equal`: not one bit differs between this ring and the library's, because both add in the same order. The last
# line shows it, with a pair for each addition: rank 2 adds its number to that of rank 1, then rank 3 adds, then rank 0.
# Floating point addition is not associative, so another order would give other bits. `scripts/ddp draw ring 4` prints
# all rounds, and with `--svg ring.svg` it draws this:
#
# ![A ring all-reduce of four ranks](pictures/ring.svg)
#
# ## The number that surprised
#
# Never more than 2: a rank sends 2(p − 1)/p times its gradient, 1.5 times with 4 ranks (a little more here, because
# chunks of 67 numbers are unequal), and 1.9998 times with 10,000. No all-reduce by messages can make its busiest rank
# send less: each number takes p − 1 sends until some rank has its whole sum, and p − 1 more until all have it. Only the
# number of rounds grows.
#
# ## Exercises
#
# 1. Pass the whole gradient around, p − 1 times, without chunks. How much does a rank send now? Assertions fail. Some
#    of them count numbers; why do those about bits fail, too, although every sum is right?
# 2. `scripts/ddp exercise 02 --begin` writes a file in which to write the ring as a schedule. `scripts/ddp exercise 02`
#    checks it, and names the rank, the round and the chunk that are wrong.
#
# ## Next
#
# `03_trees.py`: fewer rounds, and which algorithm adds in which order.
