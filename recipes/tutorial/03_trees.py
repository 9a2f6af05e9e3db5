"""03 · Tree, butterfly, master and workers

A ring of p ranks takes 2(p − 1) rounds. What takes fewer, and does everybody add in the same order?

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

# ## Three ways by hand


def master_worker(comm: ddp.Communicator, tensor: torch.Tensor) -> None:
    """Rank 0 adds all tensors up and sends the sum to everyone: two rounds, but 2(p − 1) messages over its one link."""
    if comm.rank > 0:
        comm.send(tensor, 0)
        comm.recv(tensor, 0)
        return
    for worker in range(1, comm.world_size):
        tensor += comm.recv(torch.empty_like(tensor), worker)
    for worker in range(1, comm.world_size):
        comm.send(tensor, worker)


def tree(comm: ddp.Communicator, tensor: torch.Tensor) -> None:
    """Half of the ranks that are left send to their neighbour and are out, until rank 0 is left; then all goes back."""
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
# contribution, and a pair is a sum. `add_up` computes it. If it has the bits of the real run, that was the order.


def add_up(expression: Expression, parts: list[torch.Tensor]) -> torch.Tensor:
    """Adds the ranks' tensors in the order of an expression."""
    if isinstance(expression, int):
        return parts[expression]
    first, second = expression
    return add_up(first, parts) + add_up(second, parts)


def on_each_rank(comm: ddp.Communicator) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns, by the library's names, the sums by hand and by the library."""
    mine, sums = gradient_of_sum(*share(comm.rank, comm.world_size)), {}
    for name, by_hand in {"master_worker": master_worker, "tree": tree, "recursive_doubling": butterfly}.items():
        by_hand(comm, total := mine.clone())
        sums[name] = total, comm.all_reduce(mine.clone(), algorithm=name)
    return sums


if __name__ == "__main__":
    results, parts = as_threads(on_each_rank, 8), [gradient_of_sum(*share(rank, 8)) for rank in range(8)]
    for name in results[0]:
        proof = SCHEDULES[name].check(8)
        wanted = add_up(proof.expressions[0], parts)
        differs = int((wanted != add_up(SCHEDULES["tree"].check(8).expressions[0], parts)).sum())
        print(f"{name}: {proof.num_rounds} rounds, the busiest rank sends {float(proof.busiest):g} times the gradient")
        print(f"  adds as {proof.expressions[0]}; {differs} of {len(wanted)} sums have other bits than the tree's")
        assert all(torch.equal(wanted, total) for sums in results for total in sums[name])
        assert torch.allclose(wanted / NUM_SAMPLES, answer())
        assert (differs == 0) is proof.canonical

# ## What to look at
#
# Tree and butterfly add alike, nearest neighbours first. Their results are equal bit by bit, on all ranks, whoever sent
# what to whom. Each is one order of additions that all ranks share, and so copies of a model can stay equal for ever.
#
# ![An all-reduce by a tree of eight ranks](pictures/tree.svg)
#
# ## The number that surprised
#
# 32 of 67. By so many numbers, the same eight gradients have another sum if the master adds them one by one. Each is
# right to the last digits; but if two ranks of one run added in two orders, their models would drift apart.
#
# ## Exercises
#
# 1. Run `master_worker` and `tree` on 5 ranks. Why does the butterfly need another idea there? See "any number" in
#    `ddp/collectives/butterfly.py`.
# 2. Write the butterfly that exchanges halves, and sends no more than a ring: `python -m ddp exercise 03` judges it.
#
# ## Next
#
# `04_costs.py`: the ring sends least, the butterfly has the fewest rounds. Which one is faster?
