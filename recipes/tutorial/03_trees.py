"""03 · Tree, butterfly, master and workers

A ring of p ranks takes 2(p − 1) rounds. What takes fewer, and do all ranks add in the same order?

    master and workers        tree of 8 ranks                    butterfly of 4 ranks
                                                                  round 1    round 2
      1   2   3               round 1   0←1  2←3  4←5  6←7        0 ◀─▶ 1    0 ◀─▶ 2
       ╲  │  ╱                round 2   0←2       4←6             2 ◀─▶ 3    1 ◀─▶ 3
          0   adds 1, 2, 3    round 3   0←4                       each pair exchanges
       ╱  │  ╲                and the sum goes back the           all that both have,
      1   2   3               same way, in three more             and both add
"""

import torch
from problem import NUM_SAMPLES, answer, as_threads, gradient_of_sum, share

import ddp
from ddp.collectives.catalog import SCHEDULES
from ddp.collectives.schedule import Expression

P = 8  # ranks

# ## Three ways by hand


def master_worker(comm: ddp.Communicator, tensor: torch.Tensor) -> None:
    """Rank 0 adds all tensors up and sends the sum to everyone: 2(p − 1) messages, all of them over its one link."""
    if comm.rank > 0:
        comm.send(tensor, 0)
        comm.recv(tensor, 0)
        return
    for worker in range(1, comm.world_size):
        tensor += comm.recv(torch.empty_like(tensor), worker)
    for worker in range(1, comm.world_size):
        comm.send(tensor, worker)


def tree(comm: ddp.Communicator, tensor: torch.Tensor) -> None:
    """In every round, half of the ranks send to a neighbour and drop out. Then the sum goes back the same way."""
    rank, p = comm.rank, comm.world_size
    distances = [1 << k for k in range((p - 1).bit_length())]  # 1, 2, 4, … below p
    for distance in distances:
        if rank % (2 * distance) == distance:
            comm.send(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < p:
            tensor += comm.recv(torch.empty_like(tensor), rank + distance)
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            comm.recv(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < p:
            comm.send(tensor, rank + distance)


def butterfly(comm: ddp.Communicator, tensor: torch.Tensor) -> None:
    """Exchanges with the rank whose number differs in one bit, bit by bit: "recursive doubling" in the library."""
    distance = 1
    while distance < comm.world_size:
        sending = comm.send(tensor, comm.rank ^ distance, async_op=True)
        theirs = comm.recv(torch.empty_like(tensor), comm.rank ^ distance)
        sending.wait()  # `tensor` is on its way until then, and must not change
        tensor += theirs
        distance *= 2


# ## Who adds in which order
#
# The library's checker says what each chunk becomes: a nested pair such as ((0, 1), (2, 3)). A number is that rank's
# contribution, and a pair is a sum. If `add_up` finds the bits of the real run, the ranks have added in that order.
# (Which rank of a pair adds does not matter: a + b and b + a have the same bits.)


def add_up(expression: Expression, parts: list[torch.Tensor]) -> torch.Tensor:
    """Adds the ranks' tensors in the order of an expression."""
    if isinstance(expression, int):
        return parts[expression]
    first, second = expression
    return add_up(first, parts) + add_up(second, parts)


def on_each_rank(comm: ddp.Communicator) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns, by the library's names, the sums by hand and by the library."""
    mine, sums = gradient_of_sum(*share(comm.rank, P)), {}
    for name, by_hand in {"master_worker": master_worker, "tree": tree, "recursive_doubling": butterfly}.items():
        total = mine.clone()
        by_hand(comm, total)
        sums[name] = total, comm.all_reduce(mine.clone(), algorithm=name)
    return sums


if __name__ == "__main__":
    results, parts = as_threads(on_each_rank, P), [gradient_of_sum(*share(rank, P)) for rank in range(P)]
    for name in results[0]:
        proof = SCHEDULES[name].check(P)
        wanted = add_up(proof.expressions[0], parts)
        differs = int((wanted != add_up(SCHEDULES["tree"].check(P).expressions[0], parts)).sum())
        print(f"{name}: {proof.num_rounds} rounds, the busiest rank sends {float(proof.busiest):g} times the gradient")
        print(f"  order of additions {proof.expressions[0]}; {differs} of {len(wanted)} sums differ from the tree's")
        assert all(torch.equal(wanted, total) for sums in results for total in sums[name])
        assert torch.allclose(wanted / NUM_SAMPLES, answer()) and (differs == 0) is proof.canonical

# ## What to look at
#
# Tree and butterfly add alike, nearest neighbours first, so their results are equal bit by bit. (The library calls this
# order *canonical*.) The master has the fewest rounds, but in each of them seven gradients share its one link.
#
# ![An all-reduce by a tree of eight ranks](pictures/tree.svg)
#
# ## The number that surprised
#
# About half of the 67 numbers have different bits if the master adds the same eight gradients one by one (32 or 37, by
# the kind of processor). Both sums are right up to rounding, but two ranks that add in two orders are no longer equal.
#
# ## Exercises
#
# 1. Set `P = 5`. What goes wrong in `butterfly`? See the note "any number" in `ddp/collectives/butterfly.py`.
# 2. Write the butterfly that exchanges halves, and sends no more than a ring: `scripts/ddp exercise 03` judges it.
#
# ## Next
#
# `04_costs.py`: the ring sends least, the butterfly takes few rounds. Which one is faster?
