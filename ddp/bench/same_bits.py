"""Holds `same_bits` against its promise: runs of it end with the same bits at any number of workers.

    a case       a model, an optimizer and a strategy; all strategies of a model and an optimizer have one hash, too
    a run        all steps of a case on W workers; or resized: 1 → 4 → 3 → 8 → 2, each of which goes on from the
                 checkpoint of the one before
    a hash       of parameters, buffers, the last step's loss, and the metrics on held-out samples, on all ranks

`scripts/ddp bench_same_bits` is the command; what same bits cost is measured by `shard_costs.py`.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ddp.bench.step import session
from ddp.bench.turns import PROGRESS, Cell
from ddp.bench.workloads import Batch
from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.data.orders.steps import Batches
from ddp.errors import ConfigError
from ddp.models.gpt import GPT
from ddp.models.images import MLP, resnet
from ddp.optim.lamb import LAMB
from ddp.policies import NUM_SHARDS, Evaluation, Folder
from ddp.replica.broadcast import tensor_hash
from ddp.run.launch.from_python import launch
from ddp.setting import StrategyName
from ddp.train.callbacks import Callback
from ddp.train.fit import fit
from ddp.train.state import TrainState
from ddp.train.tasks.cross_entropy import Classification, LanguageModel
from ddp.train.tasks.task import Task
from ddp.units import counted

# --- The cases -------------------------------------------------------------------------------------------------------
#
# The sizes are awkward. A batch of 30 makes shards of 3 or 4 samples; an epoch of 80 ends with a batch of 20; 45
# held-out samples divide by no number of workers but 1, 3 and 5. No shard has a single sample, of which BatchNorm has
# no statistics in ResNet's last stage, where an image of 32 pixels is one pixel.

GLOBAL_BATCH, NUM_SAMPLES, NUM_HELD_OUT = 30, 80, 45
DIGITS = 8
RESIZES = (1, 4, 3, 8, 2)
RESIZED = "resized"


class Subject(NamedTuple):
    """Makes a model whose runs are compared, and random samples for it, which its task is about."""

    make: Callable[[], nn.Module]
    samples: Callable[[int], Batch]
    task: Task


def _images(*shape: int) -> Callable[[int], Batch]:
    return lambda n: (torch.randn(n, *shape), torch.randint(0, 10, (n,)))


def _tokens(n: int) -> Batch:
    return torch.randint(0, 64, (n, 32)), torch.randint(0, 64, (n, 32))


SUBJECTS: dict[str, Subject] = {
    "mlp": Subject(lambda: MLP(in_features=64, hidden=(256, 128), num_classes=10), _images(1, 8, 8), Classification()),
    "resnet18": Subject(
        lambda: resnet("resnet18", num_classes=10, small_images=False), _images(3, 32, 32), Classification()
    ),
    "gpt": Subject(
        lambda: GPT(vocab_size=64, context=32, width=64, depth=2, heads=4, dropout=0.1), _tokens, LanguageModel()
    ),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "lamb": partial(LAMB, lr=1e-3),
}
KINDS: dict[str, StrategyName] = {"whole": "auto", "sharded": "sharded", "central_storage": "central_storage"}


class Case(NamedTuple):
    """Names what is trained, by which optimizer, and who holds it: by `SUBJECTS`, `OPTIMIZERS` and `KINDS`."""

    model: str
    optimizer: str
    strategy: str


Ending = Mapping[str, str]
"""By part of a run's result, its hash; of ranks that have ended with different ones, all, with "/" between them."""


# --- One launch makes the runs of all cases --------------------------------------------------------------------------


class StopAfter(Callback):
    """Ends a fit after this step, with a checkpoint."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step_start(self, state: TrainState) -> None:
        if state.step == self._step - 1:
            state.stop(RESIZED)


@dataclass(frozen=True)
class MakeRuns:
    """Makes the runs of all cases. A call runs on every rank, in the environment of torchrun or `ddp.launch`.

    Attributes:
        folder: of a run that is resized: it goes on from there, and is saved there; None: a run begins, and ends.
        until: the step after which it is saved; None: it ends.
    """

    cases: tuple[Case, ...]
    num_steps: int
    folder: Path | None = None
    until: int | None = None

    def __call__(self) -> list[Ending]:
        """Returns what each run has come to, the same on all ranks."""
        with session() as comm:
            return [self._made(case, comm) for case in self.cases]

    def _made(self, case: Case, comm: Communicator) -> Ending:
        subject = SUBJECTS[case.model]
        torch.manual_seed(0)
        module, data, held_out = subject.make(), subject.samples(NUM_SAMPLES), subject.samples(NUM_HELD_OUT)
        quiet: dict[str, Any] = {"progress": False, "curves": False}
        folder = Folder(None, **quiet)
        if self.folder is not None:
            quiet |= {"every_steps": self.num_steps, "keep_last": 1}  # a checkpoint at the end alone
            folder = Folder(self.folder / "-".join(case), resume="auto", **quiet)
        state = fit(
            module,
            data,
            OPTIMIZERS[case.optimizer](module.parameters()),
            loss=subject.task,
            global_batch=GLOBAL_BATCH,
            max_steps=self.num_steps,
            test_data=held_out,
            evaluation=Evaluation(every_epochs=None),
            batches=Batches(num_shards=NUM_SHARDS),
            clip_norm=1.0,
            strategy=KINDS[case.strategy],
            folder=folder,
            same_bits=True,
            callbacks=[] if self.until is None else [StopAfter(self.until)],
        )
        everyone = all_gather_object(comm, _ending(module, state))
        return {part: "/".join(dict.fromkeys(each[part] for each in everyone)) for part in everyone[0]}


def _ending(module: nn.Module, state: TrainState) -> dict[str, str]:
    assert state.train_loss is not None
    return {
        "parameters": _hash(f"{name} {tensor_hash(each)}" for name, each in module.named_parameters()),
        "buffers": _hash(f"{name} {tensor_hash(each)}" for name, each in module.named_buffers()),
        "loss": _hash([float(state.train_loss).hex()]),
        "metrics": _hash(f"{name} {float(value).hex()}" for name, value in sorted(state.evaluation.items())),
    }


def _hash(lines: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=DIGITS // 2).hexdigest()


# --- All runs, and what is said of them ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BitsCell(Cell):
    """Holds what the runs of one case have ended with.

    Attributes:
        endings: by run ("W=3", or "resized").
        expected: what a run of the same model and optimizer has ended with, the first of all.
    """

    legend: ClassVar[Mapping[str, str]] = {
        "job": "what is trained, and the optimizer; gpt has dropout, resnet18 BatchNorm, and gradients are clipped",
        "strategy": "whole: every worker holds parameters and optimizer state; or ddp.fit's word for who holds them",
        **{f"W={number}": f"that hash, on {number} workers" for number in range(1, NUM_SHARDS + 1)},
        "W=1": "hash of all that the run on one worker ends with: parameters, buffers, loss, metrics",
        RESIZED: "that hash, of a run that goes on from checkpoints on other numbers of workers",
        "bits": "equal; or the first run whose bits differ from those of the first run of this job, and what differs",
    }
    model: str
    optimizer: str
    strategy: str
    endings: Mapping[str, Ending]
    expected: Ending

    @property
    def differs(self) -> str:
        """Returns the first run that differs, and in what; "": none does."""
        for run, ending in self.endings.items():
            if parts := [part for part, found in ending.items() if found != self.expected[part]]:
                return f"{run}: {', '.join(parts)}"
        return ""

    def columns(self) -> dict[str, str]:
        """Returns the line by titles of columns."""
        hashes = {title: "" for title in self.legend if title.startswith("W=")} | {RESIZED: ""}
        hashes |= {run: _hash(f"{part} {found}" for part, found in each.items()) for run, each in self.endings.items()}
        job = f"{self.model}, {self.optimizer}"
        return {"job": job, "strategy": self.strategy, **hashes, "bits": self.differs or "equal"}


def compare_bits(
    cases: Sequence[Case], *, workers: Sequence[int], resizes: Sequence[int], num_steps: int
) -> list[BitsCell]:
    """Makes the runs of all cases, a launch for each number of workers, and one for each part of the resized runs.

    Args:
        resizes: numbers of workers; none: no run is resized.

    Raises:
        ConfigError: there are fewer steps than parts of a resized run, or more workers than shards.
    """
    if num_steps < len(resizes):
        raise ConfigError(f"--steps {num_steps}: a run of {len(resizes)} sizes makes a step of each; make more steps")
    if (most := max([*workers, *resizes])) > NUM_SHARDS:
        raise ConfigError(f"--workers {most}: a batch has {NUM_SHARDS} shards, and each worker needs one")
    make_runs = MakeRuns(tuple(cases), num_steps)
    endings = {f"W={number}": _launched(make_runs, number) for number in workers}
    if resizes:
        endings[RESIZED] = _resized(make_runs, resizes)
    runs = list(endings)
    by_case = {case: {run: endings[run][at] for run in runs} for at, case in enumerate(cases)}
    expected: dict[tuple[str, str], Ending] = {}
    for case, ending in by_case.items():
        expected.setdefault(case[:2], ending[runs[0]])
    title = f"{NUM_SHARDS} shards of a batch of {GLOBAL_BATCH}, {counted(num_steps, 'step')}"
    if resizes:
        title += f"; resized: {' → '.join(map(str, resizes))} workers"
    return [
        BitsCell(place=title, name=", ".join(case), **case._asdict(), endings=each, expected=expected[case[:2]])
        for case, each in by_case.items()
    ]


def _launched(make_runs: MakeRuns, workers: int) -> list[Ending]:
    """Returns what all runs have come to on this number of workers."""
    found: list[Ending] = launch(make_runs, workers=workers, threads_per_worker=1)[0]
    until = "" if make_runs.until is None else f", up to step {make_runs.until}"
    num_runs = counted(len(make_runs.cases), "run")
    print(f"{PROGRESS}{num_runs} on {counted(workers, 'worker')}{until}", file=sys.stderr, flush=True)
    return found


def _resized(make_runs: MakeRuns, resizes: Sequence[int]) -> list[Ending]:
    """Returns what all runs end with that go on from one number of workers to the next."""
    found: list[Ending] = []
    with tempfile.TemporaryDirectory(prefix="ddp-bench-") as folder:
        for part, workers in enumerate(resizes, 1):
            until = make_runs.num_steps * part // len(resizes) if part < len(resizes) else None
            found = _launched(replace(make_runs, folder=Path(folder), until=until), workers)
    return found


def verdict(cells: Sequence[BitsCell]) -> str:
    """Returns what all cells say together."""
    if different := [f"{cell.name} at {cell.differs}" for cell in cells if cell.differs]:
        return f"different, first of each: {'; '.join(different)}"
    num_runs = sum(len(cell.endings) for cell in cells)
    return f"equal: {counted(num_runs, 'run')} of {counted(len(cells), 'case')}, bit by bit"
