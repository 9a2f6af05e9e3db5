"""09 · Accumulation, no_sync, the global batch

A rank's share of the batch does not fit into its memory. Can it take the share in parts, and what do the others notice?

             two samples       │ two samples       │ two samples
    rank 0   forward, backward │ forward, backward │ forward, backward ─┐
                               │                   │                    ├─▶ all-reduce ─▶ optimizer step
    rank 1   forward, backward │ forward, backward │ forward, backward ─┘
             └──── no_sync: gradients add up ──────┘ └ this one sends the sums
"""

from contextlib import nullcontext

import torch
from problem import NUM_SAMPLES, answer, as_threads, batch, flat_gradient, net, share
from torch import Tensor
from torch.nn import functional as F

import ddp

# ## The global batch
#
# The user sets the *global* batch: the samples of an optimizer step, of all ranks together. How many samples a rank
# takes follows from the number of ranks; in how many *micro-batches*, from `micro_size`, the most samples that a rank
# has memory for at once. So two ranks with three micro-batches each compute the gradient of six ranks with one, up to
# rounding, and the learning rate stays as it is.
#
# Autograd adds each new gradient to `p.grad`. So a rank that has several micro-batches sends nothing before the last
# one: inside of `no_sync`, backward only adds. The forward must be inside, too, because it is there that the library's
# replica decides whether the backward will average.


def gradient(comm: ddp.Communicator, micro_size: int | None, *, sync_each: bool = False) -> tuple[Tensor, int, int]:
    """Returns the gradient of the batch, and the numbers of micro-batches and all-reduces that this rank needs."""
    model, (inputs, classes) = net(), batch()
    replica = ddp.BucketedDataParallel(model, comm=comm)
    sampler = ddp.TrainSampler(
        NUM_SAMPLES, global_batch=NUM_SAMPLES, rank=comm.rank, world_size=comm.world_size, micro_size=micro_size
    )
    plan = next(sampler.plans())
    for _ in range(2):  # the same step twice, because the first backward also learns the order of gradients
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
    model, (inputs, classes) = net(), share(comm.rank, comm.world_size)
    size = micro_size or len(inputs)
    for micro in zip(inputs.split(size), classes.split(size), strict=True):
        F.cross_entropy(model(micro[0]), micro[1], reduction="sum").backward()
    return comm.all_reduce(flat_gradient(model)) / NUM_SAMPLES


def off_by(found: Tensor) -> float:
    """Returns the distance from the answer, relative to its length."""
    return ((found - answer()).norm() / answer().norm()).item()


if __name__ == "__main__":
    print("ranks × micro_size: all-reduces and error, if only the last micro-batch is sent | if each is sent")
    for p in (1, 2, 3, 4, 6):
        for micro_size in (1, 2, 4, None):  # None: the whole share at once
            results = as_threads(lambda comm, n=micro_size: gradient(comm, n), p)
            each = as_threads(lambda comm, n=micro_size: gradient(comm, n, sync_each=True), p)
            found, num_micros, num_reduced = results[0]
            early, _, num_early = each[0]
            size = "all" if micro_size is None else micro_size
            print(f"{p} × {size:>3}:  {num_reduced}, {off_by(found):.0e}  |  {num_early:2}, {off_by(early):.0e}")
            assert num_reduced == 1 and num_early == num_micros
            assert all(torch.equal(found, other) and torch.allclose(other, answer()) for other, *_ in results)
            assert off_by(early) > 0.1 or num_micros <= 2
            by_hand = as_threads(lambda comm, n=micro_size: gradient_by_hand(comm, n), p)
            assert all(torch.allclose(other, answer()) for other in by_hand)

# ## What to look at
#
# The left column: one all-reduce per step, whatever the number of micro-batches, and the right gradient in every row.
# `ddp.fit` and `scripts/ddp train batch.micro_size=8` do all of this by themselves.
#
# ## The number that surprised
#
# The right column. To send after each micro-batch costs messages, and with a division by samples it is also wrong.
# After the first one, `p.grad` is a mean, the same on all p ranks. The next all-reduce adds these p means to the new
# gradients, and divides everything by the samples so far. (Divided by the number of ranks, as in torch, the p means
# come out whole again, and only the messages are wasted.)
#
# Two rows are right by chance, 4 × 2 and 6 × 1. Their first micro-batch has one sample on each rank, so the p means add
# up to the very sum that they were made from, and no third micro-batch follows.
#
# ## Exercises
#
# 1. Put only `backward` inside of `no_sync`, and the forward outside. Take away the assertion that fails: what else has
#    changed, and what has not?
# 2. Try 5 ranks. Which of them have more micro-batches than others? `PeerLost` ends the program: which of the two
#    columns has done that, and why? Leave that column out: does the other one give the right gradient?
#
# ## Next
#
# `10_a_worker_dies.py`: what if one of the ranks is not there for the all-reduce?
