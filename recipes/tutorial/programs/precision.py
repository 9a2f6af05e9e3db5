"""Exercise precision: train in mixed precision what trains in full precision here.

    scripts/ddp exercise precision        says what is wrong with it

`train` is right if `precision` is "fp32", and does the same whatever it is. Let it take two more words:

    "bf16"    layers compute in bfloat16, and weights, loss, gradients, their sums over ranks, and updates stay float32
    "fp16"    layers compute in float16, which has no room for small gradients: the loss is scaled, and a step whose
              gradients are not finite is left out, after which the scale is smaller

The ranks are threads on the CPU. On a GPU the same lines hold, with the device "cuda".
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ddp

NUM_STEPS, BATCH, MOST_NORM = 12, 24, 0.3


def net() -> nn.Sequential:
    """Returns the network, with the same first weights at every call."""
    model, seeded = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3)), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=seeded)
    return model


def batches(rank: int, num_ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields this rank's samples of each step, and their classes."""
    seeded = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        inputs = torch.randn(BATCH, 4, generator=seeded)
        classes = (inputs[:, :3] + 0.1 * torch.randn(BATCH, 3, generator=seeded)).argmax(1)
        yield inputs[rank::num_ranks], classes[rank::num_ranks]


def train(comm: ddp.Communicator, precision: str) -> list[float]:
    """Trains as one of several ranks, and returns the loss of its samples in each step."""
    replica = ddp.BucketedDataParallel(net(), comm=comm)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for inputs, classes in batches(comm.rank, comm.world_size):
        optimizer.zero_grad()
        loss = F.cross_entropy(replica(inputs), classes)
        loss.backward()
        nn.utils.clip_grad_norm_(replica.parameters(), MOST_NORM)
        optimizer.step()
        losses.append(loss.item())
    return losses
