"""Trains one model at batch 64, 1,024 and 8,192 with SGD, AdamW, LARS and LAMB, to see what a large batch costs.

    python recipes/studies/large_batch.py                        84 runs; a second call goes on where the first stopped
    python recipes/studies/large_batch.py --num-train 60000      a shorter study
    python recipes/studies/large_batch.py --folder FOLDER        where results.jsonl and large_batch.png are written

    tune     for each optimizer and batch: four rates, one run each, judged on the tuning samples
    test     the best rate again with three seeds, judged on the test samples, which tuning has never seen

Every run takes the same number of samples, so a batch 128 times larger makes 128 times fewer steps. Every optimizer has
the same budget for tuning, because an untuned rival proves nothing (arXiv 2102.06356). The rates are those of the
smallest batch, scaled by the optimizer's usual rule.

The model predicts a byte of Python's standard library from the eight bytes before it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from study import Result, Study, carry_out, parser_of, trained
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import ddp
from ddp.data.sets import text_sets
from ddp.optim import LAMB, LARS, cosine, parameter_groups, scaled_rate, with_warmup
from ddp.process.arguments import whole
from ddp.setting import Scaling
from ddp.train.reports.meters import Estimate, NoiseScale
from ddp.train.steps.task import Classification
from ddp.units import counted

CONTEXT = 8  # bytes before the one that is predicted
EPOCHS, BATCHES, SEEDS = 2, (64, 1024, 8192), (0, 1, 2)
NUM_TRAIN, NUM_JUDGED = 800_000, 20_000
WARMUP = 0.1  # of the run
NUM_EVALUATIONS = 16


@dataclass(frozen=True)
class Rival:
    """An optimizer with the rates that it is tried with.

    Attributes:
        rates: for a batch of `BATCHES[0]` samples.
        rule: by which they follow the batch.
    """

    make: Callable[..., Optimizer]
    rates: tuple[float, ...]
    rule: Scaling
    weight_decay: float


RIVALS = {
    "SGD": Rival(partial(SGD, momentum=0.9, nesterov=True), (0.0005, 0.004, 0.03, 0.2), "linear", 1e-4),
    "AdamW": Rival(AdamW, (3e-4, 1e-3, 3e-3, 1e-2), "sqrt", 0.01),
    "LARS": Rival(LARS, (0.1, 0.3, 1.0, 3.0), "sqrt", 1e-4),
    "LAMB": Rival(LAMB, (1e-3, 3e-3, 1e-2, 3e-2), "sqrt", 0.01),
}


@dataclass(frozen=True)
class Trial:
    """One run of the study.

    Attributes:
        rate: for a batch of `BATCHES[0]` samples.
        is_test: judged on the test samples, else on the tuning samples.
    """

    rival: str
    batch: int
    rate: float
    seed: int
    is_test: bool
    num_train: int


class NextByte(nn.Module):
    """Predicts a byte from the `CONTEXT` bytes before it, [n, CONTEXT] uint8 → [n, 256] logits."""

    def __init__(self, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width // CONTEXT)
        blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(depth)]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, 256)

    def forward(self, context: Tensor) -> Tensor:
        """Returns the logits."""
        scores: Tensor = self.head(self.blocks(self.embedding(context.int()).flatten(1)))
        return scores


class LargeBatch(Study):
    """Tunes each optimizer at each batch, and tests it with the rate that was best."""

    kind = Trial

    def __init__(self, num_train: int = NUM_TRAIN) -> None:
        self.num_train = num_train
        self.tuning = [
            Trial(name, batch, rate, SEEDS[0], is_test=False, num_train=num_train)
            for batch in reversed(BATCHES)  # the quick ones first
            for name, rival in RIVALS.items()
            for rate in rival.rates
        ]
        self.num_trials = len(self.tuning) + len(RIVALS) * len(BATCHES) * len(SEEDS)
        self._samples: tuple[tuple[Tensor, Tensor], ...] = ()

    def trials(self, results: Mapping[Any, Result]) -> Iterator[Trial]:
        """Yields the runs for tuning, and, once `results` has them, the runs with the best rates and all seeds."""
        yield from self.tuning
        if all(trial in results for trial in self.tuning):
            for best in best_of(self.tuning, results):
                for seed in SEEDS:
                    yield Trial(best.rival, best.batch, best.rate, seed, is_test=True, num_train=best.num_train)

    def run(self, trial: Trial) -> Result | None:
        """Trains with the rate as the trial's batch scales it."""
        self._samples = self._samples or samples(self.num_train)
        train, tuning, test = self._samples
        rival = RIVALS[trial.rival]
        torch.manual_seed(trial.seed)
        module = NextByte()
        adapts = {"adapt": "never"} if trial.rival in ("LARS", "LAMB") else {}
        rate = scaled_rate(trial.rate, global_batch=trial.batch, base_batch=BATCHES[0], rule=rival.rule)
        every = max(1, EPOCHS * len(train[0]) // trial.batch // NUM_EVALUATIONS)
        return trained(
            trial,
            module,
            train,
            rival.make(parameter_groups(module, weight_decay=rival.weight_decay, **adapts), lr=rate),
            metric="test_accuracy",
            progress=lambda state: state.sampler.position,
            noise=NoiseScale(),
            loss=Classification(),
            global_batch=trial.batch,
            epochs=EPOCHS,
            test_data=test if trial.is_test else tuning,
            evaluation=ddp.Evaluation(every_epochs=None, every_steps=every, batch=4096),
            schedule=with_warmup(cosine(), fraction=WARMUP),
            folder=ddp.Folder(None, noise_scale_every=4, progress=False),
        )

    def in_words(self, result: Result) -> str:
        """Returns one run in one line."""
        trial, kind = result.trial, "test" if result.trial.is_test else "tune"
        reached = "diverged" if result.score is None else f"{result.score:.2%}"
        return f"{kind} {trial.rival}, batch {trial.batch:,}, rate {trial.rate:g}, seed {trial.seed}: {reached}"

    def show(self, results: Sequence[Result]) -> None:
        """Prints accuracies, best rates and samples to the target, and what the noise scale has predicted."""
        found = Findings.of(results)
        title = "accuracy in percent ± deviation over seeds (rate, * the least or greatest tried)"
        table = Table(title=f"{title}\nsamples to {found.target:.1%}")
        table.add_column("optimizer")
        for batch in BATCHES:
            table.add_column(f"batch {batch:,}", justify="right")
        for name in RIVALS:
            table.add_row(name, *(_cell(found.points.get((name, batch))) for batch in BATCHES))
        Console().print(table)
        print(f"critical batch that the gradient noise scale predicted at batch {BATCHES[0]}: {critical_batch(found)}")

    def draw(self, results: Sequence[Result], figure: Figure) -> None:
        """Draws accuracy, and samples to the target, over the batch."""
        found, (left, right) = Findings.of(results), figure.subplots(1, 2)
        for number, name in enumerate(RIVALS):
            mine = [point for (rival, _), point in sorted(found.points.items()) if rival == name]
            batches, how = [point.batch for point in mine], {"color": f"C{number}", "ms": 4, "label": name}
            left.errorbar(batches, [100 * p.mean for p in mine], [100 * p.spread for p in mine], fmt="o-", **how)
            reached = [(point.batch, point.to_target / 1e6) for point in mine if point.to_target is not None]
            if reached:
                right.plot(*zip(*reached, strict=True), "o-", **how)
        left.set(title="accuracy after the same number of samples, %", xlabel="global batch", xscale="log")
        right.set(title=f"samples to {found.target:.1%}, millions", xlabel="global batch", xscale="log")
        for axes in (left, right):
            if found.scales:
                axes.axvspan(min(found.scales), max(found.scales), color="gray", alpha=0.2, label="noise scale")
            elif found.lower_bound is not None:
                axes.axvline(found.lower_bound, color="gray", ls="--", label="noise scale, at least")
            axes.set_xticks(BATCHES, [f"{batch:,}" for batch in BATCHES])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        left.legend()


def samples(num_train: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """Returns contexts and next bytes to train on, to tune on, and to test on."""
    corpus = text_sets.corpus()
    seen, unseen = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT)
        for text in (corpus.train, corpus.held_out)
    )
    border = len(seen) * 9 // 10  # whole files are on either side, but for one

    def evenly(windows: Tensor, num: int) -> tuple[Tensor, Tensor]:
        some = windows[:: max(1, len(windows) // num)][:num]
        return some[:, :CONTEXT].contiguous(), some[:, CONTEXT].long()

    return evenly(seen[:border], num_train), evenly(seen[border:], NUM_JUDGED), evenly(unseen, NUM_JUDGED)


def best_of(trials: Sequence[Trial], results: Mapping[Any, Result]) -> list[Trial]:
    """Returns, for each optimizer and batch, the run with the best rate."""
    best: dict[tuple[str, int], Trial] = {}
    for trial in trials:
        key = trial.rival, trial.batch
        if key not in best or (results[trial].score or 0) > (results[best[key]].score or 0):
            best[key] = trial
    return list(best.values())


# ------------------------------------------------------------------------------------------- what tests say together


@dataclass(frozen=True)
class Point:
    """The tests of one optimizer at one batch.

    Attributes:
        accuracies: by seed; 0 for a run that diverged.
        to_target: samples until the target was reached, mean over the seeds; None if one of them did not.
    """

    rival: str
    batch: int
    rate: float
    accuracies: tuple[float, ...]
    to_target: float | None

    @property
    def mean(self) -> float:
        """Returns the mean accuracy."""
        return statistics.fmean(self.accuracies)

    @property
    def spread(self) -> float:
        """Returns the standard deviation over the seeds."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0


class Findings(NamedTuple):
    """Holds what the tests of a study say together.

    Attributes:
        points: by optimizer and batch.
        target: the accuracy that `to_target` asks for: two points below the best mean at the smallest batch.
        noise: the noise scales that the runs at the smallest batch have measured by their end.
    """

    points: dict[tuple[str, int], Point]
    target: float
    noise: list[Estimate]

    @classmethod
    def of(cls, results: Sequence[Result]) -> Findings:
        """Returns what these results say; runs that are missing are left out."""
        tests: dict[tuple[str, int], list[Result]] = {}
        for result in results:
            if result.trial.is_test:
                tests.setdefault((result.trial.rival, result.trial.batch), []).append(result)
        small = {key: of for key, of in tests.items() if key[1] == BATCHES[0]}
        target = max((statistics.fmean(_accuracies(of)) for of in small.values()), default=0.02) - 0.02
        noise = [each.noise_scale for of in small.values() for each in of if each.noise_scale is not None]
        return cls({key: _point(of, target) for key, of in tests.items()}, target, noise)

    @property
    def scales(self) -> list[float]:
        """Returns the noise scales of the runs in which the signal stood out."""
        return [each.scale for each in self.noise if each.scale is not None]

    @property
    def lower_bound(self) -> float | None:
        """Returns the median of the lower bounds that the other runs have found."""
        bounds = [each.above for each in self.noise if each.above is not None]
        return statistics.median(bounds) if bounds else None


def _point(tests: Sequence[Result], target: float) -> Point:
    reached = [samples_to(target, result.curve) if result.score is not None else None for result in tests]
    known = [samples for samples in reached if samples is not None]
    to_target = statistics.fmean(known) if len(known) == len(tests) else None
    trial = tests[0].trial
    return Point(trial.rival, trial.batch, trial.rate, _accuracies(tests), to_target)


def _accuracies(tests: Sequence[Result]) -> tuple[float, ...]:
    return tuple(result.score or 0.0 for result in tests)


def samples_to(target: float, curve: Sequence[tuple[int, float]]) -> float | None:
    """Returns the samples after which a curve crosses the target, between evaluations by a line; None if never."""
    before = (0, 0.0)
    for samples, accuracy in curve:
        if accuracy >= target:
            share = (target - before[1]) / (accuracy - before[1])
            return before[0] + share * (samples - before[0])
        before = samples, accuracy
    return None


def critical_batch(found: Findings) -> str:
    """Returns the critical batch that the noise scale foretells."""
    told = [f"{min(found.scales):,.0f} to {max(found.scales):,.0f} samples"] if found.scales else []
    if found.lower_bound is not None:
        num = len(found.noise) - len(found.scales)
        told.append(f"above {found.lower_bound:,.0f} samples by the median of {counted(num, 'run')}")
    return "; ".join(told) or "not measured"


def _cell(point: Point | None) -> str:
    if point is None:
        return ""
    to_target = "not reached" if point.to_target is None else f"{point.to_target:,.0f}"
    rates = RIVALS[point.rival].rates
    mark = "*" if point.rate in (rates[0], rates[-1]) else ""
    return f"{100 * point.mean:.1f} ± {100 * point.spread:.1f} ({point.rate:g}{mark})\n{to_target}"


def main() -> None:
    parser = parser_of("large_batch", __doc__)
    parser.add_argument(
        "--num-train",
        type=whole(BATCHES[-1], why="an epoch has a whole batch of the largest size"),
        default=NUM_TRAIN,
        metavar="N",
        help="samples of an epoch (default: %(default)s)",
    )
    options = parser.parse_args()
    carry_out(LargeBatch(options.num_train), "large_batch", options.folder)


if __name__ == "__main__":
    main()
