"""Trains two models with every wire format, hook and precision, to see what sending less costs in the end.

    digits    the default CNN on 8 × 8 images of digits                     accuracy
    gpt       a small GPT on the source text of Python's standard library   bits per byte

Every run takes the same samples in the same number of steps, with the settings that plain float32 was given. Only the
hook differs. Two workers stand for two hosts: they send messages, though they could share memory. Each run that has
ended is a line of results.jsonl, so a study that was stopped goes on with the next run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ddp.comm.setup import init, shutdown
from ddp.data.sets import digits, standard_library
from ddp.errors import Diverged
from ddp.gradients import DenseStart, ErrorFeedback, PowerSGD, RandomK, Sign, TopK
from ddp.models.cnn import CNN
from ddp.models.gpt import GPT
from ddp.optim import cosine, parameter_groups, with_warmup
from ddp.process.clock import now_s
from ddp.process.files import json_object, to_append, write_whole
from ddp.train.callbacks import Callback
from ddp.train.fit import fit
from ddp.train.state import TrainState
from ddp.train.tasks.classification import Classification
from ddp.train.tasks.language_model import ByteModel
from ddp.train.tasks.task import Task

SEEDS = (0, 1, 2, 3, 4)
RATE = 4e-3
NUM_EVALUATIONS = 10
CONTEXT, NUM_JUDGED = 64, 2048  # bytes of a text, and texts

PLAIN = "plain"


def ways(num_steps: int) -> dict[str, dict[str, Any]]:
    """Returns, by the name of a way, keywords of `fit` for a run of so many steps."""
    fifth, half = num_steps // 5, num_steps // 2
    return {
        PLAIN: {},
        **{f"wire {name}": {"wire": name} for name in ("bf16", "fp16", "int8", "int8_stochastic")},
        "sign": {"hook": ErrorFeedback(Sign())},
        "sign, dense start": {"hook": DenseStart(ErrorFeedback(Sign()), fifth)},
        "top-k, 1 %": {"hook": ErrorFeedback(TopK(0.01))},
        "top-k, 10 %, warm-up": {"hook": ErrorFeedback(TopK(0.1, warmup_steps=half))},
        "random-k, 10 %": {"hook": ErrorFeedback(RandomK(0.1))},
        "PowerSGD, rank 4": {"hook": ErrorFeedback(PowerSGD(4))},
        "PowerSGD, rank 8": {"hook": ErrorFeedback(PowerSGD(8))},
        **{f"precision {name}": {"precision": name} for name in ("bf16", "fp16", "bf16_pure")},
    }


WAYS = tuple(ways(1))
DRAWN = (
    PLAIN,
    "wire int8",
    "sign, dense start",
    "top-k, 1 %",
    "top-k, 10 %, warm-up",
    "random-k, 10 %",
    "PowerSGD, rank 8",
)


class Job(NamedTuple):
    """Describes what is trained.

    Attributes:
        data: returns the samples to train on and those to judge by.
        metric: by which a run is judged.
        decay: weight decay of matrices, for AdamW.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Any, Any]]
    task: Task
    metric: str
    global_batch: int
    num_steps: int
    decay: float = 0.01
    beta2: float = 0.999


def _digits() -> tuple[Any, Any]:
    splits = digits.load()
    return splits.train, splits.test


def _texts() -> tuple[Any, Any]:
    splits = standard_library.load(context=CONTEXT)
    num = len(splits.test)
    some = list(range(0, num, max(1, num // NUM_JUDGED)))[:NUM_JUDGED]
    return splits.train, standard_library.ByteWindows.batch(splits.test, some)  # type: ignore[arg-type]


JOBS = {
    "digits": Job(
        model=partial(CNN, in_channels=1, image_size=8, num_classes=10),
        data=_digits,
        task=Classification(),
        metric="accuracy",
        global_batch=64,
        num_steps=345,
    ),
    "gpt": Job(
        model=partial(GPT, context=CONTEXT, width=64, depth=2, heads=2),
        data=_texts,
        task=ByteModel(),
        metric="bits_per_byte",
        global_batch=16,
        num_steps=1500,
        decay=0.1,
        beta2=0.99,
    ),
}


@dataclass(frozen=True)
class Trial:
    """One run of the study."""

    job: str
    way: str
    seed: int


@dataclass(frozen=True)
class Result:
    """Holds what a run has reached.

    Attributes:
        score: on the samples to judge by; None if the run diverged.
        curve: (steps, score) of all evaluations.
    """

    trial: Trial
    score: float | None
    curve: list[tuple[int, float]]
    seconds: float


def trials(jobs: Sequence[str] = tuple(JOBS), seeds: Sequence[int] = SEEDS) -> Iterator[Trial]:
    """Yields all runs, seed by seed, so that a study that was stopped has some of each way."""
    for job in jobs:
        for seed in seeds:
            for way in WAYS:
                yield Trial(job, way, seed)


# ------------------------------------------------------------------------------------------------------- on every rank


def study(folder: str, wanted: Sequence[Trial]) -> None:
    """Makes the runs that `folder` has no results of yet. Collective."""
    torch.set_num_threads(1)
    comm = init(device="cpu", shared_memory=False, algorithm="ring")
    path = Path(folder) / "results.jsonl"
    known = {result.trial: result for result in read(path)}
    comm.barrier()  # before rank 0 writes
    if comm.rank == 0:  # without a line that was cut off, which the next one would join
        write_whole(path, "".join(f"{json.dumps(asdict(result))}\n" for result in known.values()))
    for number, trial in enumerate(wanted, start=1):
        if trial in known:
            continue
        result = run(trial)
        if result is None:  # stopped by a signal
            break
        if comm.rank == 0:
            with to_append(path) as file:
                file.write(json.dumps(asdict(result)) + "\n")
            reached = "diverged" if result.score is None else f"{JOBS[trial.job].metric} {result.score:.4g}"
            about = f"run {number} of {len(wanted)}: {trial.job}, {trial.way}, seed {trial.seed}"
            print(f"{about}: {reached} in {result.seconds:.0f} s", flush=True)
    shutdown()


def run(trial: Trial) -> Result | None:
    """Returns what a run reaches; None if it was stopped. Collective."""
    job, curve, start_s = JOBS[trial.job], Curve(f"test_{JOBS[trial.job].metric}"), now_s()
    torch.manual_seed(trial.seed)
    module, (train, judged) = job.model(), job.data()
    groups = parameter_groups(module, weight_decay=job.decay)
    try:
        state = fit(
            module,
            train,
            torch.optim.AdamW(groups, lr=RATE, betas=(0.9, job.beta2)),
            loss=job.task,
            global_batch=job.global_batch,
            max_steps=job.num_steps,
            test_data=judged,
            evaluate_every_epochs=None,
            evaluate_every_steps=max(1, job.num_steps // NUM_EVALUATIONS),
            schedule=with_warmup(cosine(), fraction=0.05),
            seed=trial.seed,
            noise_scale_every=0,
            checkpoint_dir=None,
            progress=False,
            callbacks=[curve],
            **ways(job.num_steps)[trial.way],
        )
    except Diverged:
        return Result(trial, None, curve.points, now_s() - start_s)
    if state.stopped_by:
        return None
    return Result(trial, state.evaluation[curve.metric], curve.points, now_s() - start_s)


class Curve(Callback):
    """Notes the score of each evaluation."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.points: list[tuple[int, float]] = []

    def evaluated(self, state: TrainState) -> None:
        self.points.append((state.step, state.evaluation[self.metric]))


def read(path: Path) -> list[Result]:
    """Returns the results that a study has written, without a last line that was cut off."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            plain = json_object(line)
        except ValueError:
            continue
        trial, curve = Trial(**plain.pop("trial")), [(step, score) for step, score in plain.pop("curve")]
        found.append(Result(trial, **plain, curve=curve))
    return found
