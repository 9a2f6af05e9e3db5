"""Exercise bottleneck: find out what makes this training slow, and mend it.

    .venv/bin/python recipes/tutorial/exercises/bottleneck.py     trains on two workers, with a profile of some steps
    scripts/ddp draw step runs/bottleneck                         says where the time of a step goes
    scripts/ddp exercise bottleneck                               says whether you have found it, and mended it

Five things here look slow, and one of them is: which one is drawn at each `--begin`. Do not guess, measure. Then write
what you have found into PART and RANK, and make it fast, so that the very same numbers come out.
"""

import shutil

import torch
from torch import Tensor, nn

import ddp

PART = ""  # of the step: data, forward, backward, communication or update
RANK: int | None = None  # that is slow there; None: all of them are

SEED = 0
LOOKED_AT, TERMS, GROUP, PIECE, LOGGED, WATCHER = 2, 20, 32, 512, 512, 0
NUM_SAMPLES, BATCH, NUM_INPUTS, WIDTH = 2000, 32, 128, 64


class Samples(torch.utils.data.Dataset):
    """Holds samples, each divided by the largest number that is in some of them."""

    def __init__(self) -> None:
        seeded = torch.Generator().manual_seed(0)
        self.raw = torch.randn(NUM_SAMPLES, NUM_INPUTS, generator=seeded)
        self.classes = torch.randint(0, 3, (NUM_SAMPLES,), generator=seeded)

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        largest = max(row.abs().max().item() for row in self.raw[:LOOKED_AT])
        return self.raw[index] / largest, self.classes[index]


class Net(nn.Module):
    """A small network, which writes down the means of its inputs over all ranks, and its largest weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(NUM_INPUTS, WIDTH), nn.Linear(WIDTH, 3)
        self.seen: list[list[float]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        comm, means = ddp.init(), inputs.mean(0)
        for group in means.split(GROUP):
            comm.all_reduce(group, "mean")
        self.seen.append(means.tolist())
        waves = [torch.arange(WIDTH).mul((term + 1) / WIDTH).sin() for term in range(TERMS)]
        shift = torch.stack(waves).mean(0)
        if comm.rank == WATCHER:
            pieces = self.stem.weight.detach().flatten().split(LOGGED)
            self.seen.append([piece.abs().max().item() for piece in pieces])
        return self.head(torch.tanh(self.stem(inputs) + shift))


class Descent(torch.optim.Optimizer):
    """Plain gradient descent."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                pieces = zip(parameter.view(-1).split(PIECE), parameter.grad.view(-1).split(PIECE), strict=True)
                for piece, gradient in pieces:
                    piece.sub_(gradient.mul(group["lr"]))


def train() -> list[list[float]]:
    """Trains as one of several ranks; returns what its network has written down."""
    model = Net()
    ddp.fit(
        model,
        Samples(),
        Descent(model.parameters(), lr=0.125),
        loss=nn.functional.cross_entropy,
        global_batch=BATCH,
        max_steps=15,
        folder=ddp.Folder("runs/bottleneck", progress=False),
        callbacks=[ddp.Profiler(steps=5)],
    )
    return model.seen


if __name__ == "__main__":
    shutil.rmtree("runs/bottleneck", ignore_errors=True)  # that of the last time
    ddp.launch(train, workers=2)
