"""Measures what a pipeline promises: the bits of one rank, what a stage holds, the bubble, and a step beside torch's.

| row    | what is measured                                                                                          |
|--------|-----------------------------------------------------------------------------------------------------------|
| bits   | tensors of the state after three steps, with dropout, that differ from those of the stages on one rank    |
| held   | the largest number of activations that each stage holds                                                   |
| bubble | 1 − time in stages ÷ (stages × time of a step); stages sleep, as there may be fewer cores than stages     |
| step   | step ÷ that of torch.distributed.pipelining on Gloo; both take turns in one run                           |

    python recipes/studies/pipelines.py                       some minutes
    python recipes/studies/pipelines.py --turns 15            more turns, whose medians are shown

A stage of the last row is an MLP of width 512 with four linear layers, and a micro-batch has 16 samples. There is a
thread for each process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import truediv
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

import ddp
from ddp.collectives.pipelines import PIPELINES, bubble
from ddp.lab.bench.turns import session, slowest, take_turns
from ddp.process.arguments import Parser, whole
from ddp.process.clock import now_s

TORCH = {"gpipe": ScheduleGPipe, "one_forward_one_backward": Schedule1F1B}
STAGES, MICRO_BATCHES = (2, 4), (4, 8)
WIDTH, DEPTH, MICRO = 512, 4, 16


class Sizes(NamedTuple):
    """Says how much is measured; a first look takes less."""

    forward_s: float = 0.05  # of a stage that sleeps; its backward takes twice as long
    num_sleeping: int = 3  # steps, of which the median counts
    num_steps: int = 8  # of a turn


class Row(NamedTuple):
    """What is measured, what was found, and what it should be."""

    name: str
    found: str
    target: str


# -------------------------------------------------------------------------------------------------- stages that sleep


class Sleep(torch.autograd.Function):
    """Sleeps in forward, and twice as long in backward."""

    busy_s = 0.0  # on this rank

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        Sleep.for_(seconds)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        Sleep.for_(2 * ctx.seconds)
        return gradient, None

    @staticmethod
    def for_(seconds: float) -> None:
        begin_s = now_s()
        time.sleep(seconds)
        Sleep.busy_s += now_s() - begin_s


class Sleeping(nn.Linear):
    """A small layer that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(8, 8)
        self.seconds = seconds

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns what the layer does, later."""
        outputs: Tensor = Sleep.apply(super().forward(inputs), self.seconds)
        return outputs


def given(pipe: ddp.Pipeline, inputs: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Returns inputs on the first stage, and targets on the last one."""
    rank, last = pipe.comm.rank, pipe.comm.world_size - 1
    return inputs if rank == 0 else None, targets if rank == last else None


def sleeping(sizes: Sizes, num_micro: int, schedule: str) -> float:
    """Returns the bubble of a step: the median of some."""
    comm, found = ddp.init(), list[float]()
    pipe = ddp.Pipeline([partial(Sleeping, sizes.forward_s)] * comm.world_size, schedule=schedule)
    inputs, targets = torch.randn(2, num_micro, 8)
    for _ in range(sizes.num_sleeping + 1):  # the first one warms up
        comm.barrier()
        Sleep.busy_s, begin_s = 0.0, now_s()
        pipe.step(*given(pipe, inputs, targets), F.mse_loss, micro_size=1)
        [took_s] = slowest([now_s() - begin_s])
        busy_s = float(comm.all_reduce(torch.tensor([Sleep.busy_s], dtype=torch.float64)))
        found.append(1 - busy_s / (comm.world_size * took_s))
    return statistics.median(found[1:])


# ------------------------------------------------------------------------------------------------------ bits and held


def stage(number: int) -> nn.Module:
    """Returns a stage with dropout."""
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2))


def trained(num_stages: int, num_micro: int, schedule: str) -> tuple[dict[str, Tensor], list[int]]:
    """Returns the weights after three steps, and what this rank's stage has held."""
    ddp.init()
    pipe = ddp.Pipeline([partial(stage, number) for number in range(num_stages)], schedule=schedule)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = torch.randn(2, 8 * num_micro, 16, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        optimizer.zero_grad()
        pipe.step(*given(pipe, inputs, targets), F.mse_loss, micro_size=8)
        optimizer.step()
    return pipe.state_dict(), pipe.most_held


# ---------------------------------------------------------------------------------------------------------- steps


def mlp() -> nn.Module:
    """Returns a stage that computes."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def beside_torch(sizes: Sizes, num_micro: int, schedule: str, num_turns: int) -> dict[str, list[float]]:
    """Returns the seconds of a step in each turn, by ours and by torch's."""
    with session(ddp.init) as comm:  # it ends torch's group last (`ddp/lab/bench/turns.py`, note "replicas first")
        return turns(comm, sizes, num_micro, schedule, num_turns)


def turns(
    comm: ddp.Communicator, sizes: Sizes, num_micro: int, schedule: str, num_turns: int
) -> dict[str, list[float]]:
    """Returns what `beside_torch` does, from inside of its session."""
    rank, last = comm.rank, comm.world_size - 1
    inputs, targets = torch.randn(2, num_micro * MICRO, WIDTH, generator=torch.Generator().manual_seed(0))
    pipe = ddp.Pipeline([mlp] * comm.world_size, schedule=schedule)
    module = mlp()
    theirs = TORCH[schedule](
        PipelineStage(module, rank, comm.world_size, torch.device("cpu")), num_micro, loss_fn=F.mse_loss
    )

    def ours_step() -> None:
        pipe.module.zero_grad()
        pipe.step(*given(pipe, inputs, targets), F.mse_loss, micro_size=MICRO)

    def torch_step() -> None:
        module.zero_grad()
        how: dict[str, Any] = {"target": targets, "losses": []} if rank == last else {}
        theirs.step(*([inputs] if rank == 0 else []), return_outputs=False, **how)

    def turn(step: Callable[[], None]) -> float:
        comm.barrier()
        begin_s = now_s()
        for _ in range(sizes.num_steps):
            step()
        return slowest([(now_s() - begin_s) / sizes.num_steps])[0]

    rivals = {"ours": partial(turn, ours_step), "torch": partial(turn, torch_step)}
    for warm_up in rivals.values():
        warm_up()
    ours, same = (torch.cat([p.grad.flatten() for p in each.parameters()]) for each in (pipe.module, module))
    assert torch.allclose(ours, same, atol=1e-6), "both compute the same gradients"
    return take_turns(rivals, num_turns)


# ------------------------------------------------------------------------------------------------------------ the rows


def rows(num_turns: int, sizes: Sizes) -> Iterator[Row]:
    """Yields each row as soon as it is known."""
    launched = partial(ddp.launch, threads_per_worker=1)
    for name in PIPELINES:
        for p, m in ((p, m) for p in STAGES for m in MICRO_BATCHES):
            what = f"{name}, {p} stages, {m} micro-batches"
            [(alone, _)] = launched(trained, p, m, name, workers=1)
            ranks = launched(trained, p, m, name, workers=p)
            differing = sum(not torch.equal(state[key], alone[key]) for state, _ in ranks for key in alone)
            yield Row(f"{what}: tensors that differ from those of one rank", str(differing), "0")
            held = [number for _, each in ranks for number in each]
            wanted = [m if name == "gpipe" else min(m, p - s) for s in range(p)]
            yield Row(f"{what}: activations held, by stage", str(held), str(wanted))
            share, limit = launched(sleeping, sizes, m, name, workers=p)[0], float(bubble(p, m))
            yield Row(f"{what}: bubble", f"{share:.1%}, {share / limit:.2f} of {limit:.1%}", "0.9 … 1.1")
            times = launched(beside_torch, sizes, m, name, num_turns, workers=p)[0]
            ours, theirs = (1e3 * statistics.median(times[each]) for each in ("ours", "torch"))
            ratio = statistics.median(map(truediv, times["ours"], times["torch"]))
            yield Row(f"{what}: step ÷ torch's", f"{ours:.1f} and {theirs:.1f} ms: {ratio:.2f}", "≤ 1.0")


def show(num_turns: int, sizes: Sizes) -> None:
    """Measures everything, and prints each row as soon as it is known."""
    print(f"pipelines: medians of {num_turns} turns", flush=True)
    for row in rows(num_turns, sizes):
        print(f"- {row.name}: {row.found} (goal {row.target})", flush=True)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=whole(1), default=7, metavar="N", help="turns (default: %(default)s)")
    show(parser.parse_args().turns, Sizes())


if __name__ == "__main__":
    main()
