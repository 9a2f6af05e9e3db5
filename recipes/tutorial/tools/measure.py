"""Measures what the pictures of the read-along show, in the ranks that are there.

    overlap    the timeline of a step, with reductions in the background of backward, and in the foreground
    costs      α, β and γ of the link between two ranks, in seconds, as `ddp/comm/plan.py` measures them
    scaling    samples per second of a training with a global batch of 240 images

`torchrun --standalone --nproc-per-node 2 -m recipes.tutorial.tools.measure costs` prints one of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from ddp.comm.communicator import Communicator
from ddp.comm.session import init, shutdown
from ddp.lab.bench.workloads import WORKLOADS
from ddp.lab.draw_overlap import overlap
from ddp.process.clock import now_s
from ddp.replica.bucketed import BucketedDataParallel

WARM_UP = 3
GLOBAL_BATCH, NUM_TURNS, TURN_S = 240, 3, 0.7


def costs(comm: Communicator) -> dict[str, float]:
    """Returns the figures of the cost model. The communicator must not use shared memory. Collective."""
    network = comm.plan.network()
    link = network.inside
    return {
        "alpha_s": link.alpha_s,
        "beta_s": link.beta_s,
        "gap_s": link.gap_s,
        "gamma_s": network.gamma_s,
    }


def scaling(comm: Communicator) -> float:
    """Returns the samples per second of all ranks together, the median of some turns. Collective."""
    workload, share = WORKLOADS["cnn-b64"], GLOBAL_BATCH // comm.world_size
    model = BucketedDataParallel(workload.make(), comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, classes = torch.randn(share, 1, 28, 28), torch.randint(0, 10, (share,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), classes).backward()
        optimizer.step()

    def steps_s(num_steps: int) -> float:
        comm.barrier()
        start_s = now_s()
        for _ in range(num_steps):
            step()
        comm.barrier()
        return now_s() - start_s

    steps_s(WARM_UP)
    a_step_s = torch.tensor(steps_s(WARM_UP) / WARM_UP)
    num_steps = max(1, int(TURN_S / float(comm.broadcast(a_step_s, 0))))
    return num_steps * share * comm.world_size / median(steps_s(num_steps) for _ in range(NUM_TURNS))


MEASUREMENTS: dict[str, Callable[[Communicator], Any]] = {"overlap": overlap, "costs": costs, "scaling": scaling}


def main(argv: Sequence[str]) -> None:
    """Measures what is named, under torchrun; rank 0 prints it as JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    comm = init(device="cpu", shared_memory=argv[0] != "costs")
    measured = MEASUREMENTS[argv[0]](comm)
    if comm.rank == 0:
        print(json.dumps(measured), flush=True)
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
