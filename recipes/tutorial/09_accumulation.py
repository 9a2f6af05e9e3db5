"""09 · Accumulation, no_sync, the global batch

A rank's share of the batch does not fit its memory. Can it take the share in parts, and what do the others notice?

    rank 0   forward, backward │ forward, backward │ forward, backward ─┐
             samples 0 1       │ samples 2 3       │ samples 4 5        ├─▶ all-reduce ─▶ optimizer step
    rank 1   forward, backward │ forward, backward │ forward, backward ─┘
             └──── no_sync: gradients add up ──────┘ └ this one sends the sums
"""

from contextlib import nullcontext

import torch
from problem import NUM_SAMPLES, answer, as_threads, batch, flat_gradient, net
from torch import Tensor
from torch.nn import functional as F

import ddp

# ## The global batch
#
# A program is told the *global* batch: the samples of an optimizer step, of all ranks together. How many samples a rank
# takes, and in how many *micro-batches*, follows from the number of ranks and their memory. So two ranks with three
# micro-batches each train exactly as six ranks with one, and nobody changes the learning rate.
#
# Autograd adds each new gradient to `p.grad`. So a rank that has several micro-batches only has to keep quiet until the
# last one: `no_sync` is a replica that does not average yet. It must be around the forward, too, because the forward
# prepares what backward will do.


def gradient(comm: ddp.Communicator, micro_size: int | None, *, sync_each: bool = False) -> tuple[Tensor, int, int]:
    """Returns the gradient of the batch, and the numbers of micro-batches and all-reduces that this rank needs."""
    model, (inputs, classes) = net(), batch()
    replica = ddp.BucketedDataParallel(model, comm=comm)
    sampler = ddp.TrainSampler(
        NUM_SAMPLES, global_batch=NUM_SAMPLES, rank=comm.rank, world_size=comm.world_size, micro_size=micro_size
    )
    for plan in (next(sampler.plans()), next(sampler.plans())):  # the first backward also learns the order of gradients
        replica.zero_grad()
        num_calls, loss_of_rank, num_samples = comm.num_calls, 0.0, 0
        for micro in plan.micros:
            indices, is_last = list(micro.indices), micro is plan.micros[-1]
            with nullcontext() if is_last or sync_each else replica.no_sync():
                loss_sum = F.cross_entropy(replica(inputs[indices]), classes[indices], reduction="sum")
                loss_of_rank, num_samples = loss_of_rank + loss_sum.detach(), num_samples + len(indices)
                if is_last or sync_each:
                    replica.ride_along(ddp.Totals(loss_of_rank, num_samples))
                loss_sum.backward()
    return flat_gradient(model), len(plan.micros), comm.num_calls - num_calls


# ## By hand
#
# Without a replica there is nothing to switch off. Gradients add up in every backward, and one all-reduce follows.


def gradient_by_hand(comm: ddp.Communicator, micro_size: int | None) -> Tensor:
    """Returns the gradient of the batch."""
    model, (inputs, classes) = net(), batch()
    mine = range(comm.rank * NUM_SAMPLES // comm.world_size, (comm.rank + 1) * NUM_SAMPLES // comm.world_size)
    most = micro_size or len(mine)
    for first in range(mine.start, mine.stop, most):
        micro = slice(first, min(first + most, mine.stop))
        F.cross_entropy(model(inputs[micro]), classes[micro], reduction="sum").backward()
    return comm.all_reduce(flat_gradient(model)) / NUM_SAMPLES


def off_by(found: Tensor) -> float:
    """Returns the distance from the answer, relative to its length."""
    return ((found - answer()).norm() / answer().norm()).item()


if __name__ == "__main__":
    print("ranks × micro-batches of a rank: all-reduces and error, if only the last one is sent | if each is sent")
    for p in (1, 2, 3, 4, 6):
        for micro_size in (1, 2, 4, None):  # None: the whole share at once
            results = as_threads(lambda comm, n=micro_size: gradient(comm, n), p)
            each = as_threads(lambda comm, n=micro_size: gradient(comm, n, sync_each=True), p)
            found, num_micros, num_reduced = results[0]
            early, _, num_early = each[0]
            print(f"{p} × {num_micros:2}:  {num_reduced}, {off_by(found):.0e}  |  {num_early:2}, {off_by(early):.0e}")
            assert num_reduced == 1 and num_early == num_micros
            assert all(torch.equal(found, other) and torch.allclose(other, answer()) for other, *_ in results)
            assert off_by(early) > 0.1 or num_micros <= 2
            by_hand = as_threads(lambda comm, n=micro_size: gradient_by_hand(comm, n), p)
            assert all(torch.allclose(other, answer()) for other in by_hand)

# ## What to look at
#
# The left column: one all-reduce per step, however many micro-batches, and the answer in every row. `ddp.fit` and
# `scripts/ddp train batch.micro_size=8` do this by themselves: `ddp.TrainSampler` has made the micro-batches above,
# none larger than `micro_size`, from whatever share a rank has.
#
# ## The number that surprised
#
# The right column. To send after each micro-batch costs not only messages. Here it also gives another gradient: what
# was divided by the number of samples so far stays in `p.grad`, and is divided once more after the next micro-batch.
#
# ## Exercises
#
# 1. Put only `backward` inside of `no_sync`, and the forward outside. What happens, and who notices?
# 2. In a row or two, the right column is right by luck. Why there?
#
# ## Next
#
# `10_a_worker_dies.py`: what if one of the ranks is not there for the all-reduce?
