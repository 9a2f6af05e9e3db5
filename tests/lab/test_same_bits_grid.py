"""Runs of same_bits end with the same bits at any number of workers: a grid of models, optimizers and strategies.

    a case       a model, an optimizer and a strategy; all strategies of a model and an optimizer have one ending, too
    a run        all steps of a case on W ranks; or resized: each part goes on from the checkpoint of the one before
    an ending    hashes of parameters and buffers, the last step's loss, and the metrics on held-out samples

The sizes are awkward. A batch of 30 makes shards of 3 or 4 samples; an epoch of 80 ends with a batch of 20; 45 held-out
samples divide by no number of ranks but 1, 3 and 5. No shard has a single sample, of which BatchNorm has no statistics
in ResNet's last stage, where an image of 32 pixels is one pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import Optimizer

import ddp
from ddp.models import GPT, MLP, resnet
from ddp.replica.broadcast import tensor_hash
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import TrainState
from ddp.train.steps.task import Classification, LanguageModel, Task

GLOBAL_BATCH, NUM_SAMPLES, NUM_HELD_OUT = 30, 80, 45


class Subject(NamedTuple):
    """Makes a model whose runs are compared, and random samples for it, which its task is about."""

    make: Callable[[], nn.Module]
    samples: Callable[[int], tuple[Tensor, Tensor]]
    task: Task


def images(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, *shape), torch.randint(0, 10, (n,)))


def tokens(n: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 64, (n, 32)), torch.randint(0, 64, (n, 32))


SUBJECTS = {
    "mlp": Subject(lambda: MLP(in_features=64, hidden=(256, 128), num_classes=10), images(1, 8, 8), Classification()),
    "resnet18": Subject(
        lambda: resnet("resnet18", num_classes=10, small_images=False), images(3, 32, 32), Classification()
    ),
    "gpt": Subject(
        lambda: GPT(vocab_size=64, context=32, width=64, depth=2, heads=4, dropout=0.1), tokens, LanguageModel()
    ),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "lamb": partial(ddp.optim.LAMB, lr=1e-3),
}
STRATEGIES = ("auto", "sharded", "central_storage", "fully_sharded")

Case = tuple[str, str, str]
"""A model of `SUBJECTS`, an optimizer of `OPTIMIZERS`, and a strategy."""
Ending = dict[str, Any]


class StopAfter(Callback):
    """Ends a fit after this step, with a checkpoint."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step_start(self, state: TrainState) -> None:
        if state.step == self._step - 1:
            state.stop("resized")


def make_runs(
    cases: Sequence[Case], num_steps: int, folder: Path | None = None, until: int | None = None
) -> list[Ending]:
    """Returns the ending of each case. Collective.

    Args:
        folder: of a run that is resized: it goes on from there, and is saved there; None: a run begins, and ends.
        until: the step after which it is saved; None: it ends.
    """
    ddp.init(device="cpu")
    return [made(case, num_steps, folder, until) for case in cases]


def made(case: Case, num_steps: int, parent: Path | None, until: int | None) -> Ending:
    model, optimizer, strategy = case
    subject = SUBJECTS[model]
    torch.manual_seed(0)
    module, data, held_out = subject.make(), subject.samples(NUM_SAMPLES), subject.samples(NUM_HELD_OUT)
    quiet: dict[str, Any] = {"progress": False, "curves": False}
    folder = ddp.Folder(None, **quiet)
    if parent is not None:
        quiet |= {"every_steps": num_steps, "keep_last": 1}  # a checkpoint at the end alone
        folder = ddp.Folder(parent / "-".join(case), resume="auto", **quiet)
    state = ddp.fit(
        module,
        data,
        OPTIMIZERS[optimizer](module.parameters()),
        loss=subject.task,
        global_batch=GLOBAL_BATCH,
        max_steps=num_steps,
        test_data=held_out,
        evaluation=ddp.Evaluation(every_epochs=None),
        clip_norm=1.0,
        strategy=strategy,
        folder=folder,
        same_bits=True,
        callbacks=[] if until is None else [StopAfter(until)],
    )
    with state.model.whole():
        hashes = {name: tensor_hash(each) for name, each in (*module.named_parameters(), *module.named_buffers())}
    return {
        **hashes,
        "loss": float(state.train_loss).hex(),
        **{name: float(value).hex() for name, value in state.evaluation.items()},
    }


def compare(
    cases: Sequence[Case], *, workers: Sequence[int], resizes: Sequence[int], num_steps: int, folder: Path
) -> None:
    """Asserts that all runs of a case end with the bits of the first run of its model and optimizer, on all ranks."""
    endings = {f"W={each}": run_ranks(make_runs, each, cases, num_steps, timeout_s=300.0) for each in workers}
    for part, each in enumerate(resizes, 1):
        until = num_steps * part // len(resizes) if part < len(resizes) else None
        endings["resized"] = run_ranks(make_runs, each, cases, num_steps, folder, until, timeout_s=300.0)
    expected: dict[tuple[str, str], Ending] = {}
    for run, of_ranks in endings.items():
        for rank, of_cases in enumerate(of_ranks):
            for case, ending in zip(cases, of_cases, strict=True):
                first = expected.setdefault(case[:2], ending)
                differ = [part for part in first if ending[part] != first[part]]
                assert ending.keys() == first.keys() and not differ, f"{case}, {run}, rank {rank}: {differ}"


def test_a_small_grid_has_the_same_bits(tmp_path: Path) -> None:
    cases = [("mlp", "adamw", strategy) for strategy in ("auto", "fully_sharded")]
    compare(cases, workers=(1, 3), resizes=(2, 1), num_steps=2, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "optimizer"), list(zip(SUBJECTS, OPTIMIZERS, strict=True)))
def test_all_strategies_have_the_same_bits(model: str, optimizer: str, tmp_path: Path) -> None:
    cases = [(model, optimizer, strategy) for strategy in STRATEGIES]
    compare(cases, workers=(1, 3), resizes=(4, 8, 3), num_steps=3, folder=tmp_path)
