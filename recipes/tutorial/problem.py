"""The problem that every chapter solves: the gradient of one small network on one batch of twelve samples.

`answer()` is the gradient as one process computes it. Every chapter computes it in another way, on several ranks, and
compares. Numbers are float64, so that a wrong algorithm and a rounding error cannot be confused.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from simulated import SimulatedNetwork, SimulatedTransport
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.comm.host_links import Settings

NUM_SAMPLES, NUM_PARAMETERS = 12, 67
QUICK = "QUICK" in os.environ  # chapters measure less, for those who only want to know whether they run


def net() -> nn.Sequential:
    """Returns the network, with the same first weights at every call."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    numbers = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=numbers)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Returns inputs [12, 4] and their classes [12], the same at every call."""
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 4, generator=numbers, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (NUM_SAMPLES,), generator=numbers)


def share(rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Returns a rank's samples of the batch; the shares of two ranks differ by one sample at most."""
    first, last = rank * NUM_SAMPLES // num_ranks, (rank + 1) * NUM_SAMPLES // num_ranks
    inputs, classes = batch()
    return inputs[first:last], classes[first:last]


def flat_gradient(model: nn.Module) -> Tensor:
    """Returns the gradients of all parameters, one after another, [67]."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def gradient_of_sum(inputs: Tensor, classes: Tensor) -> Tensor:
    """Returns the gradient of the *sum* of the losses of these samples, [67]."""
    model = net()
    F.cross_entropy(model(inputs), classes, reduction="sum").backward()
    return flat_gradient(model)


def answer() -> Tensor:
    """Returns the gradient of the mean loss of the whole batch, [67]."""
    return gradient_of_sum(*batch()) / NUM_SAMPLES


def as_threads(program: Callable[[ddp.Communicator], Any], num_ranks: int) -> list[Any]:
    """Runs `program(comm)` on ranks that are threads of this process, and returns its results by rank.

    `ddp.launch` runs ranks that are processes, which takes some seconds to start. Threads start at once, and the
    library's collectives cannot tell the difference, so they are good for experiments. Threads share what a process has
    only one of, above all torch's global random numbers. So every random number here comes from a generator of its own.
    """
    settings = Settings(shared_memory=False, algorithm="ring", abort_s=5)  # by messages, as between hosts

    def run(transport: SimulatedTransport) -> Any:
        comm = ddp.Communicator(transport, settings, hosts=(tuple(range(num_ranks)),))
        try:
            return program(comm)
        finally:
            comm.close()

    return SimulatedNetwork(num_ranks).run(run)


def seconds_of(comm: ddp.Communicator, action: Callable[[], object]) -> float:
    """Returns the seconds of what all ranks do together, and all of them must call this: the best of some tries.

    A try takes as long as it takes the slowest rank.
    """
    times = []
    for _ in range(2 if QUICK else 10):
        start = time.perf_counter()
        for _ in range(5):
            action()
        times.append((time.perf_counter() - start) / 5)
    slowest = comm.all_reduce(torch.tensor(times, dtype=torch.float64), "max")
    return slowest.min().item()
