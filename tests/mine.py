"""Parts of a user's own, in a file that lies in the folder where a command is given.

    scripts/ddp train model=mine:Net data=mine:make loss=mine:my_loss comm.algorithm=mine:chain
    scripts/ddp train data.transform=mine:augment

Everything else is as with what `ddp` ships: settings, checks, sweeps, checkpoints, resume.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ddp.collectives import Recv, Round, Send


class Net(nn.Module):
    """A model; its keyword arguments are the settings `model.args`."""

    def __init__(self, *, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs

    def example_batch(self) -> tuple[Tensor, Tensor]:
        """Returns one worker's inputs and targets, for `scripts/ddp bench step --models mine:Net`."""
        return torch.randn(32, 4), torch.randn(32, 1)


def make(*, n: int = 240) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns the data, (train, test); `data.args` are its settings. Every worker calls it, and draws the same."""
    inputs = torch.randn(n, 4)
    targets = inputs.sum(dim=1, keepdim=True)
    num_test = n // 4
    return (inputs[num_test:], targets[num_test:]), (inputs[:num_test], targets[:num_test])


def augment(image: Tensor) -> Tensor:
    """Returns a training image of data=digits, shifted by up to a pixel. Held-out images are left as they are."""
    down, right = torch.randint(-1, 2, (2,)).tolist()
    return image.roll((down, right), dims=(-2, -1))


def my_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean loss of a batch."""
    return (outputs - targets).square().mean()


def chain(rank: int, num_ranks: int) -> Iterator[Round]:
    """An all-reduce: the sum grows from rank to rank up to the last one, and then travels back to the first."""
    everything, last = range(num_ranks), num_ranks - 1  # one chunk per rank
    for step in range(last):
        if rank == step:
            yield (Send(rank + 1, everything),)
        elif rank == step + 1:
            yield (Recv(rank - 1, everything, add=True),)
        else:
            yield ()
    for step in range(last, 0, -1):
        if rank == step:
            yield (Send(rank - 1, everything),)
        elif rank == step - 1:
            yield (Recv(rank + 1, everything, add=False),)
        else:
            yield ()
