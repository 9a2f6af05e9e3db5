"""Trains two models with every wire format, hook and precision, to see what sending less costs in the end.

    python recipes/studies/less_traffic.py                            150 runs; a second call goes on where one stopped
    python recipes/studies/less_traffic.py --jobs digits --seeds 1    a shorter study
    python recipes/studies/less_traffic.py --folder FOLDER            for results.jsonl and less_traffic.png

    digits    the default CNN on 8 × 8 images of digits                     accuracy
    gpt       a small GPT on the source text of Python's standard library   bits per byte

Every run takes the same samples in the same number of steps, with the settings that plain float32 was given. Only the
hook differs. Two workers stand for two hosts: they send messages, though they could share memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from study import Result, Study, carry_out, parser_of, trained
from torch import nn

import ddp
from ddp.data.sets.image_sets import load_digits
from ddp.data.sets.text_sets import ByteWindows, load_standard_library
from ddp.gradients import DenseStart, ErrorFeedback, PowerSGD, RandomK, Sign, TopK
from ddp.models import CNN, GPT
from ddp.optim import cosine, parameter_groups, with_warmup
from ddp.process.arguments import whole
from ddp.train.steps.task import ByteModel, Classification, Task

SEEDS = (0, 1, 2, 3, 4)
RATE = 4e-3
NUM_EVALUATIONS = 10
CONTEXT, NUM_JUDGED = 64, 2048  # bytes of a text, and texts

PLAIN = "plain"
TITLES = {"digits": "digits: accuracy, %", "gpt": "GPT: bits per byte"}


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
    splits = load_digits()
    return splits.train, splits.test


def _texts() -> tuple[Any, Any]:
    splits = load_standard_library(context=CONTEXT)
    num = len(splits.test)
    some = list(range(0, num, max(1, num // NUM_JUDGED)))[:NUM_JUDGED]
    return splits.train, ByteWindows.batch(splits.test, some)  # type: ignore[arg-type]


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


class LessTraffic(Study):
    """Trains each job in each way with each seed."""

    kind = Trial
    communication: ClassVar = {"shared_memory": False, "algorithm": "ring"}

    def __init__(self, jobs: Sequence[str] = tuple(JOBS), seeds: Sequence[int] = SEEDS) -> None:
        # seed by seed, so that a study that was stopped has some of each way
        self.planned = [Trial(job, way, seed) for job in jobs for seed in seeds for way in WAYS]
        self.num_trials = len(self.planned)

    def trials(self, results: Mapping[Any, Result]) -> Iterator[Trial]:
        """Yields all runs."""
        yield from self.planned

    def run(self, trial: Trial) -> Result | None:
        """Trains the trial's job in its way."""
        job = JOBS[trial.job]
        torch.manual_seed(trial.seed)
        module, (train, judged) = job.model(), job.data()
        groups = parameter_groups(module, weight_decay=job.decay)
        return trained(
            trial,
            module,
            train,
            torch.optim.AdamW(groups, lr=RATE, betas=(0.9, job.beta2)),
            metric=f"test_{job.metric}",
            progress=lambda state: state.step,
            loss=job.task,
            global_batch=job.global_batch,
            max_steps=job.num_steps,
            test_data=judged,
            evaluation=ddp.Evaluation(every_epochs=None, every_steps=max(1, job.num_steps // NUM_EVALUATIONS)),
            schedule=with_warmup(cosine(), fraction=0.05),
            folder=ddp.Folder(None, noise_scale_every=0, progress=False),
            strategy=ddp.Averaging(**ways(job.num_steps)[trial.way]),
        )

    def in_words(self, result: Result) -> str:
        """Returns one run in one line."""
        trial = result.trial
        reached = "diverged" if result.score is None else f"{JOBS[trial.job].metric} {result.score:.4g}"
        return f"{trial.job}, {trial.way}, seed {trial.seed}: {reached}"

    def show(self, results: Sequence[Result]) -> None:
        """Prints the mean score of each way, and its difference to plain."""
        found = points(results)
        title = "mean over seeds, and the mean difference to plain of the same seed ± its standard error"
        table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("way", no_wrap=True)
        jobs = [job for job in JOBS if any((job, way) in found for way in WAYS)]
        for job in jobs:
            table.add_column(TITLES[job], justify="right")
            table.add_column("÷ plain, %" if job == "gpt" else "− plain, points", justify="right", no_wrap=True)
        for way in WAYS:
            table.add_row(way, *(cell for job in jobs for cell in _cells(found, job, way)))
        Console().print(table)

    def draw(self, results: Sequence[Result], figure: Figure) -> None:
        """Draws the mean curves: on the left those of digits, as errors, and on the right those of the GPT."""
        found = points(results)
        for axes, job in zip(figure.subplots(1, 2), JOBS, strict=True):
            for number, way in enumerate(DRAWN):
                if (point := found.get((job, way))) and point.curve:
                    steps, scores = zip(*point.curve, strict=True)
                    heights = [100 * (1 - score) for score in scores] if job == "digits" else scores
                    how = {"color": "black", "lw": 2.5} if way == PLAIN else {"color": f"C{number - 1}"}
                    axes.plot(steps, heights, label=way, **how)
            axes.set(title=TITLES[job], xlabel="steps")
            if job == "digits":
                axes.set(title="digits: errors, %", yscale="log")
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter("{x:g}")
            axes.grid(alpha=0.3, which="both")
            if axes.lines:
                axes.legend(fontsize=8)


class Point(NamedTuple):
    """Holds the runs of one way of one job.

    Attributes:
        scores: by seed; none of a run that diverged.
        differences: to the plain run of the same seed, where both have ended.
        curve: (steps, mean score) of the evaluations that all runs have reached.
    """

    scores: list[float]
    differences: list[float]
    curve: list[tuple[int, float]]


def points(results: Sequence[Result]) -> dict[tuple[str, str], Point]:
    """Returns what was found, by job and way."""
    by_trial = {result.trial: result for result in results}
    found = {}
    for job, way in dict.fromkeys((result.trial.job, result.trial.way) for result in results):
        mine = [result for result in results if (result.trial.job, result.trial.way) == (job, way)]
        differences = []
        for result in mine:
            plain = by_trial.get(Trial(job, PLAIN, result.trial.seed))
            if plain is not None and None not in (plain.score, result.score):
                differences.append(result.score - plain.score)  # type: ignore[operator]
        moments = zip(*(result.curve for result in mine), strict=False)
        curve = [(at_once[0][0], statistics.fmean(score for _, score in at_once)) for at_once in moments]
        found[job, way] = Point([each.score for each in mine if each.score is not None], differences, curve)
    return found


def _cells(found: Mapping[tuple[str, str], Point], job: str, way: str) -> tuple[str, str]:
    point, plain = found.get((job, way)), found.get((job, PLAIN))
    if point is None:
        return "", ""
    if not point.scores:
        return "diverged", ""
    score, percent = statistics.fmean(point.scores), job == "digits"
    shown = f"{100 * score:.2f}" if percent else f"{score:.3f}"
    if way == PLAIN or plain is None or not point.differences:
        return shown, ""
    scale = 100 if percent else 100 / statistics.fmean(plain.scores)
    differences = [scale * difference for difference in point.differences]
    error = f" ± {statistics.stdev(differences) / len(differences) ** 0.5:.2f}" if len(differences) > 1 else ""
    return shown, f"{statistics.fmean(differences):+.2f}{error}"


def main() -> None:
    parser = parser_of("less_traffic", __doc__)
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS), help="(default: all)")
    parser.add_argument("--seeds", type=whole(1, len(SEEDS)), default=len(SEEDS), metavar="N", help="(default: 5)")
    options = parser.parse_args()
    carry_out(LessTraffic(options.jobs, SEEDS[: options.seeds]), "less_traffic", options.folder)


if __name__ == "__main__":
    main()
