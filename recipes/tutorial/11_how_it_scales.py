"""11 · How it scales

Twice as many workers: is a step twice as fast? And if not, what stands in the way?

    1 worker    │ compute ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ │ update ░░ │
    2 workers   │ compute ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ │ all-reduce ░░ │ update ░░ │
    4 workers   │ compute ▓▓▓▓▓▓▓▓ │ all-reduce ░░░ │ update ░░ │         only ▓ is divided by the number of workers,
                                                                         and only if each worker has a core of its own
"""

import os
import time

import torch
from problem import NUM_SAMPLES, QUICK, answer, gradient_of_sum, share
from torch import nn
from torch.nn import functional as F

import ddp

MOST_WORKERS, BATCHES, NUM_STEPS = 2 if QUICK else 4, (16, 256), 8
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

# ## One measurement
#
# The global batch stays the same, so each worker computes less: this is *strong scaling*. A step ends when the slowest
# worker ends it. Beside the time on the clock, each worker counts its CPU time. `subgroup` makes a communicator of some
# of the ranks, and `all_gather` gives every rank a list of all ranks' tensors.


def measure(comm: ddp.Communicator, global_batch: int) -> tuple[float, float, float]:
    """Returns, per step, seconds on the clock, of CPU time of all ranks, and of waiting for all-reduces on a rank."""
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    replica = ddp.BucketedDataParallel(model, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mine = global_batch * (comm.rank + 1) // comm.world_size - global_batch * comm.rank // comm.world_size
    inputs, classes = torch.randn(mine, 256), torch.randint(0, 10, (mine,))
    for step in range(NUM_STEPS + 2):
        if step == 2:  # the first steps allocate memory and learn the order of gradients
            comm.barrier()
            start, cpu_start, waited = time.perf_counter(), time.process_time(), replica.waited.total_s
        optimizer.zero_grad()
        loss_sum = F.cross_entropy(replica(inputs), classes, reduction="sum")
        replica.ride_along(ddp.Totals(loss_sum.detach(), mine))
        loss_sum.backward()
        optimizer.step()
    own = [time.perf_counter() - start, time.process_time() - cpu_start, replica.waited.total_s - waited]
    everyones = torch.stack(comm.all_gather(torch.tensor(own, dtype=torch.float64))) / NUM_STEPS
    return everyones[:, 0].max().item(), everyones[:, 1].sum().item(), everyones[:, 2].mean().item()


def on_each_rank() -> dict[tuple[int, int], tuple[float, float, float]]:
    """Measures with 1, 2, 3 and 4 of the workers; the others wait meanwhile."""
    world, found = ddp.init(), {}
    for p in range(1, world.world_size + 1):
        comm = world.subgroup(range(p))
        if comm is not None:
            gradient = comm.all_reduce(gradient_of_sum(*share(comm.rank, p))) / NUM_SAMPLES
            assert torch.allclose(gradient, answer())
            found |= {(global_batch, p): measure(comm, global_batch) for global_batch in BATCHES}
        world.barrier()
    return found


if __name__ == "__main__":
    found = ddp.launch(on_each_rank, workers=MOST_WORKERS, threads_per_worker=1)[0]
    print(f"{CORES} core{'s' if CORES > 1 else ''} for up to {MOST_WORKERS} workers")
    for global_batch in BATCHES:
        alone_s, work_s, _ = found[global_batch, 1]
        for p in range(1, MOST_WORKERS + 1):
            clock_s, cores_s, waited_s = found[global_batch, p]
            speed_up = alone_s / clock_s
            times = f"{1e3 * clock_s:5.1f} ms a step, {speed_up:.2f} times as fast, efficiency {speed_up / p:4.0%}"
            work = f"waiting {waited_s / clock_s:3.0%}, work {cores_s / work_s:.2f} times"
            print(f"batch {global_batch:3}, workers: {p}, {times}, {work}")
            assert clock_s > 0.9 * cores_s / CORES  # no core can give more than one second in a second
    assert found[16, MOST_WORKERS][1] > found[16, 1][1]  # all workers together have more to do than one

# ## What to look at
#
# The first three columns are results; *efficiency* is the speed-up divided by the number of workers. The other two say
# why. *Waiting* is the share of a step that a rank spends on all-reduces, and waiting for others in them. It grows with
# the workers, while what each of them computes shrinks. *Work* is the CPU time of all workers, as a multiple of that of
# one worker alone. It grows because every rank updates all parameters, and adds up what arrives. Once there are as many
# workers as cores, a further one adds work, but no core to do it. Where other programs run, too, these figures vary
# twofold from run to run: look at the trend.
#
# ![Samples per second over workers](pictures/scaling.svg)
#
# ## The number that surprised
#
# The efficiency with a batch of 16. On two cores, two workers are *slower* than one: what a step costs anyway outweighs
# the work on 16 samples. So more workers need a larger batch, and a larger batch needs another learning rate.
#
# ## Exercises
#
# 1. Let the batch grow with the workers, 256 samples each (*weak scaling*), and multiply the speed-up by their number.
#    Which of the limits is gone, and which stays?
# 2. `scripts/ddp train -m cluster.workers=1,2` runs real trainings, a minute or more each, and compares them. Why is
#    the efficiency lower than the share of a step that the workers compute?
#
# ## Next
#
# `12_large_batches.py`: what a larger batch breaks, and what mends it.
