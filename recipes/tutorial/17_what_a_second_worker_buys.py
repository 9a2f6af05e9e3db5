"""17 · What a second worker buys

There is one worker. How long will a step take on two or four, and from when on is one more worth nothing?

    1 worker     │ forward ▓▓▓▓▓▓ │ backward ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ │ update ░ │
    2 workers    │ ▓▓▓ │ ▓▓▓▓▓▓▓▓▓ │         │ update ░ │
    the wire         ├0┤├── bucket 1 ──┤├─ 2 ─┤          a bucket waits until it is full, and until the wire is free
                     hidden      │ exposed     │
"""

from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, sleep

import torch
from problem import NUM_SAMPLES, QUICK, answer, flat_gradient, net, share
from torch import Tensor, nn

import ddp
from ddp.process.memory import available_cores

WORKERS, BATCH, NUM_STEPS = (1, 2) if QUICK else (1, 2, 4), 512, 5 if QUICK else 30
SIZES = [10 * 512 * 4, *[512 * 512 * 4] * 5]  # bytes of the buckets, the last layer's first

# ## A step, and when each bucket is full
#
# Each tensor is a bucket. The ranks are on one host, so a thread plays the wire: it sleeps as long as a ring would take
# at 2.5 Gbit/s (chapter 04). Then they add up in shared memory, which is quick.


def ring_s(num_bytes: int, num_ranks: int) -> float:
    """Returns the seconds of an all-reduce on the wire."""
    return 2 * (num_ranks - 1) * (50e-6 + num_bytes / num_ranks / (2.5e9 / 8))


def step(comm: ddp.Communicator, model: nn.Module, inputs: Tensor, classes: Tensor, batch: int) -> list[float]:
    """Computes all ranks' gradient. Returns when forward began and ended, buckets were full, backward and wire end."""
    moments = [perf_counter()]

    def full(tensor: Tensor) -> None:
        moments.append(perf_counter())
        wire.submit(sleep, ring_s(tensor.grad.nbytes, comm.world_size))

    hooks = [parameter.register_post_accumulate_grad_hook(full) for parameter in model.parameters()]
    with ThreadPoolExecutor(1) as wire:  # one bucket after another, and then the time at which it is free
        loss = nn.functional.cross_entropy(model(inputs), classes, reduction="sum") / batch
        moments.append(perf_counter())
        loss.backward()
        moments += [perf_counter(), wire.submit(perf_counter).result()]
    _ = [(hook.remove(), comm.all_reduce(each.grad)) for each, hook in zip(model.parameters(), hooks, strict=True)]
    return moments


def on_each_rank() -> list[float]:
    """Returns these moments and the update's end, since forward has ended, as medians of some steps."""
    comm = ddp.init()
    step(comm, small := net(), *share(comm.rank, comm.world_size), NUM_SAMPLES)
    assert torch.allclose(flat_gradient(small), answer())
    model, rows = nn.Sequential(*(nn.Linear(512, each // 2048, bias=False) for each in SIZES[::-1])), []
    data, optimizer = torch.randn(BATCH // comm.world_size, 512), torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2 + NUM_STEPS):  # two that warm up
        optimizer.zero_grad()
        moments = step(comm, model, data, torch.arange(len(data)) % 10, BATCH)
        optimizer.step()
        rows.append([moment - moments[1] for moment in [*moments, perf_counter()]])
    return torch.tensor(rows[2:]).median(0).values.tolist()


# ## The forecast of a step, and the number of steps
#
# A forecast replays one worker's step with less to compute. The update is not divided: each rank updates all weights.


def forecast(one: list[float], k: int, work: float) -> tuple[float, float]:
    """Returns the seconds of a step of k workers that compute this share of one worker's work, and what is exposed."""
    begin, _, *full, backward, free, end = one
    clock = 0.0
    for full_s, num_bytes in zip(full, SIZES, strict=True):
        clock = max(clock, full_s * work) + ring_s(num_bytes, k)
    exposed = max(0.0, clock - backward * work)
    return (backward - begin) * work + exposed + end - free, exposed


def num_steps(batch: int) -> int:
    """Returns the fewest steps to a twentieth of the loss ½ Σ h w², whose gradients are noisy, at any constant rate."""
    h, rates, count = torch.logspace(-2, 0, 200), 1.9 / 1.3 ** torch.arange(26)[:, None], 0
    squares = torch.ones(26, 200)  # of w: the mean over all that the noise may be
    while (squares @ h).min() > h.sum() / 20:
        squares, count = (1 - rates * h) ** 2 * squares + rates**2 * h * 128 / batch, count + 1
    return count


if __name__ == "__main__":
    times = {k: ddp.launch(on_each_rank, workers=k, threads_per_worker=1)[0] for k in WORKERS}
    for k, (begin, _, full, *_, backward, free, end) in times.items():
        step_s, exposed_s = forecast(times[1], k, 1 / min(k, available_cores()))
        print(f"workers: {k}, forecast {1e3 * step_s:5.1f} ms, measured {1e3 * (end - begin):5.1f} ms", end=", ")
        print(f"of it exposed {1e3 * exposed_s:4.1f} ms, measured {1e3 * (free - backward):4.1f} ms")
        assert free - full >= sum(ring_s(size, k) for size in SIZES)  # the wire has one bucket at a time
    for k in (1, 2, 4, 8, 16):  # each with a core of its own, and a batch that grows along
        alone_s, all_s = (num_steps(each * BATCH) * forecast(times[1], each, 1)[0] for each in (1, k))
        print(f"batch {k * BATCH:4}, steps to the loss: {num_steps(k * BATCH):2}, {alone_s / all_s:4.1f} times as fast")
    assert num_steps(BATCH) > 1.9 * num_steps(2 * BATCH) and num_steps(8 * BATCH) < 1.7 * num_steps(16 * BATCH)

# ## What to look at
#
# Workers stop paying for two reasons: less computing hides less of the wire, and a larger batch saves fewer steps. What
# is measured beyond the forecast: ranks wait for each other, share memory, and four of them take turns on two cores.
#
# ## The number that surprised
#
# The last row: 16 workers make 9 steps instead of 77, on 1.9 times the samples: nearly half of them say nothing new.
#
# ## Exercises
#
# 1. Make one bucket of all gradients. Which of the two forecasts becomes worse, and by how much?
# 2. Which rate of the wire hides all but the first layer's bucket? Compute it first, and then try.
#
# ## Next
#
# `18_servers_and_staleness.py`: one worker is slow. `scripts/ddp scale` and `forecast` ask this one of your own run.
