"""Makes the runs of a study one after the other, and keeps what each has reached; then a table and a picture.

    trials of a study ── run, on every worker ── a line of results.jsonl ── table, picture

A study that was stopped goes on with the next run. `large_batch.py` and `few_agreements.py` are studies.
"""

from __future__ import annotations

import argparse
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.optim import Optimizer

import ddp
from ddp.errors import Diverged
from ddp.process.arguments import Parser
from ddp.process.clock import now_s
from ddp.process.files import to_append, write_whole
from ddp.process.records import json_object
from ddp.train.reports.meters import Estimate, NoiseScale
from ddp.train.steps.state import TrainState

Trial = Any
"""One run of a study, before it is made: a frozen dataclass of the study's own, with a seed."""


@dataclass(frozen=True)
class Result:
    """What a run has reached.

    Attributes:
        score: on the samples to judge by; None if the run diverged.
        curve: (progress, score) of all evaluations; each study counts progress in its own way.
        noise_scale: where it was measured.
    """

    trial: Trial
    score: float | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    noise_scale: Estimate | None = None


class Study(ABC):
    """A plan of runs, and what their results are shown as.

    Attributes:
        kind: the class of its trials.
        communication: keywords of `ddp.init`.
        workers: how many train.
        num_trials: how many there are.
    """

    kind: ClassVar[type]
    communication: ClassVar[Mapping[str, Any]] = {}
    workers: ClassVar[int] = 2
    num_trials: int

    @abstractmethod
    def trials(self, results: Mapping[Trial, Result]) -> Iterator[Trial]:
        """Yields the runs in their order; later ones may depend on the results of earlier ones."""

    @abstractmethod
    def run(self, trial: Trial) -> Result | None:
        """Makes a run. Collective. Returns None if a signal has stopped it."""

    @abstractmethod
    def in_words(self, result: Result) -> str:
        """Returns one run in one line."""

    @abstractmethod
    def show(self, results: Sequence[Result]) -> None:
        """Prints a table of the study's own results, however few there are yet."""

    @abstractmethod
    def draw(self, results: Sequence[Result], figure: Figure) -> None:
        """Draws the same."""

    def own(self, results: Sequence[Result]) -> list[Result]:
        """Returns the results of the study's own runs, in their order, without those of other plans."""
        known, found = {result.trial: result for result in results}, []
        for trial in self.trials(known):
            if trial in known:
                found.append(known[trial])
        return found


def make_runs(study: Study, path: Path) -> None:
    """Makes the runs that the file has no results of yet. Collective."""
    torch.set_num_threads(1)
    comm = ddp.init(device="cpu", **study.communication)
    known = {result.trial: result for result in read(path, study.kind)}
    comm.barrier()  # before rank 0 writes
    if comm.rank == 0:  # without a line that was cut off, which the next one would join
        write_whole(path, "".join(f"{json.dumps(asdict(result))}\n" for result in known.values()))
    for number, trial in enumerate(study.trials(known), start=1):
        if trial in known:
            continue
        result = study.run(trial)
        if result is None:
            break
        known[trial] = result
        if comm.rank == 0:
            with to_append(path) as file:
                file.write(json.dumps(asdict(result)) + "\n")
            words = f"{study.in_words(result)} in {result.seconds:.0f} s"
            print(f"run {number} of {study.num_trials}: {words}", flush=True)
    ddp.shutdown()


def read(path: Path, kind: type) -> list[Result]:
    """Returns the results that a study has written, without a last line that was cut off."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            plain = json_object(line)
        except ValueError:
            continue
        noise = plain.pop("noise_scale")
        trial, curve = kind(**plain.pop("trial")), [(progress, score) for progress, score in plain.pop("curve")]
        found.append(Result(trial, **plain, curve=curve, noise_scale=noise and Estimate(*noise)))
    return found


def trained(
    trial: Trial,
    module: nn.Module,
    train: Any,
    optimizer: Optimizer,
    *,
    metric: str,
    progress: Callable[[TrainState], int],
    noise: NoiseScale | None = None,
    **settings: Any,
) -> Result | None:
    """Returns what a run reaches, by `ddp.fit` with these settings; None if it was stopped. Collective.

    Args:
        metric: the score, as the evaluation calls it.
        progress: counts how far a run has come, for its curve.
        noise: measures the noise scale meanwhile.
    """
    curve, start_s = Curve(metric, progress), now_s()
    try:
        state = ddp.fit(
            module,
            train,
            optimizer,
            batches=ddp.Batches(seed=trial.seed),
            callbacks=[curve, *([noise] if noise else [])],
            **settings,
        )
    except Diverged:
        return Result(trial, None, curve.points, now_s() - start_s)
    if state.stopped_by:
        return None
    estimate = noise.estimate() if noise else None
    return Result(trial, state.evaluation[metric], curve.points, now_s() - start_s, estimate)


class Curve(ddp.Callback):
    """Notes the score of each evaluation."""

    def __init__(self, metric: str, progress: Callable[[TrainState], int]) -> None:
        self.metric, self.progress = metric, progress
        self.points: list[tuple[int, float]] = []

    def evaluated(self, state: TrainState) -> None:
        self.points.append((self.progress(state), state.evaluation[self.metric]))


def parser_of(name: str, text: str | None) -> Parser:
    """Returns the parser of a study's command line, which has the folder of its results."""
    parser = Parser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs") / name, help="(default: %(default)s)")
    return parser


def carry_out(study: Study, name: str, folder: Path) -> None:
    """Makes the runs that are missing in a folder, prints the table, and draws NAME.png beside the results."""
    folder.mkdir(parents=True, exist_ok=True)
    path, picture = folder.absolute() / "results.jsonl", folder / f"{name}.png"
    try:
        ddp.launch(make_runs, study, path, workers=study.workers)
    except KeyboardInterrupt:
        print(f"{name}: stopped; the same command goes on with the next run", file=sys.stderr)
        sys.exit(130)
    results = study.own(read(path, study.kind))
    study.show(results)
    figure = Figure(figsize=(10, 4), layout="constrained")
    study.draw(results, figure)
    figure.savefig(picture, dpi=120)
    print(f"{len(results)} runs, {sum(result.seconds for result in results) / 60:.0f} minutes; picture: {picture}")
