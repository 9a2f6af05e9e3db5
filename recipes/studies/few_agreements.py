"""Trains the GPT recipe on four workers that agree seldom, to see what that costs in loss.

    python recipes/studies/few_agreements.py                     24 runs; a second call goes on where one stopped
    python recipes/studies/few_agreements.py --seeds 1           a shorter study
    python recipes/studies/few_agreements.py --samples 1600      on fewer samples, to see if it works
    python recipes/studies/few_agreements.py --folder FOLDER     for results.jsonl and few_agreements.png

    synchronous     gradients are averaged in each step (`strategy=mirrored`)
    every N         `strategy=local_sgd`: each worker makes N steps by itself; then all take the mean of their weights
    after a fifth   the first fifth of the samples is synchronous (`warmup_samples`)
    DiLoCo          outer_lr=0.7, outer_momentum=0.9

All runs of a seed have the same samples, each once, and the recipe's settings, which were found for synchronous steps.
The loss is that of held-out text, in bits per byte.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from study import Result, Study, carry_out, parser_of, trained
from torch.utils.data import Subset

import ddp
from ddp.data.sets.text_sets import load_standard_library
from ddp.models import GPT
from ddp.optim import cosine, parameter_groups, with_warmup
from ddp.process.arguments import whole
from ddp.train.steps.task import ByteModel

SEEDS = (0, 1, 2)
CONTEXT, BATCH, NUM_SAMPLES, NUM_JUDGED = 128, 16, 32_000, 4096
SYNCHRONOUS = "synchronous"
LENGTHS = (8, 32, 100)
WAYS: dict[str, dict[str, Any]] = {  # fields of `ddp.LocalSGD`; "after": the share of samples before the first round
    SYNCHRONOUS: {},
    **{f"every {every}, after a fifth": {"every": every, "after": 0.2} for every in LENGTHS},
    **{f"every {every}": {"every": every} for every in LENGTHS},
    "every 32, after a fifth, DiLoCo": {"every": 32, "after": 0.2, "outer_lr": 0.7, "outer_momentum": 0.9},
}


@dataclass(frozen=True)
class Trial:
    """One run of the study."""

    way: str
    seed: int
    num_samples: int


class FewAgreements(Study):
    """Trains in each way with each seed."""

    kind = Trial
    workers: ClassVar[int] = 4

    def __init__(self, seeds: Sequence[int] = SEEDS, num_samples: int = NUM_SAMPLES) -> None:
        self.planned = [Trial(way, seed, num_samples) for way in WAYS for seed in seeds]
        self.num_trials = len(self.planned)

    def trials(self, results: Mapping[Any, Result]) -> Iterator[Trial]:
        """Yields all runs."""
        yield from self.planned

    def run(self, trial: Trial) -> Result | None:
        """Trains in the trial's way."""
        torch.manual_seed(trial.seed)
        module, texts = GPT(context=CONTEXT, width=96, depth=4, heads=3), load_standard_library(context=CONTEXT)
        train, judged = (
            Subset(each, range(0, len(each), max(1, len(each) // num))[:num])
            for each, num in ((texts.train, trial.num_samples), (texts.test, NUM_JUDGED))
        )
        way = dict(WAYS[trial.way])
        after = round(way.pop("after", 0) * trial.num_samples)
        return trained(
            trial,
            module,
            train,
            torch.optim.AdamW(parameter_groups(module, weight_decay=0.1), lr=4e-3, betas=(0.9, 0.99)),
            metric="test_bits_per_byte",
            progress=lambda state: state.step,
            loss=ByteModel(),
            global_batch=BATCH,
            epochs=1,
            clip_norm=1.0,
            test_data=judged,
            evaluation=ddp.Evaluation(every_epochs=None, batch=32),
            schedule=with_warmup(cosine(), fraction=0.05),
            folder=ddp.Folder(None, noise_scale_every=0, progress=False),
            strategy=ddp.LocalSGD(**way, warmup_samples=after) if way else "mirrored",
        )

    def in_words(self, result: Result) -> str:
        """Returns one run in one line."""
        reached = "diverged" if result.score is None else f"{result.score:.4f} bits per byte"
        return f"{result.trial.way}, seed {result.trial.seed}: {reached}"

    def show(self, results: Sequence[Result]) -> None:
        """Prints the mean loss of each way, and its ratio to synchronous of the same seed."""
        found = ratios(results)
        table = Table(title="held-out loss, mean over seeds", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("way", no_wrap=True)
        for column in ("bits per byte", "÷ synchronous", "over seeds"):
            table.add_column(column, justify="right", no_wrap=True)
        for way in WAYS:
            scores = [each.score for each in results if each.trial.way == way and each.score is not None]
            over = found.get(way, [])
            table.add_row(
                way,
                f"{statistics.fmean(scores):.3f}" if scores else "",
                f"{statistics.fmean(over):.3f}" if over else "",
                f"{min(over):.3f}–{max(over):.3f}" if over else "",
            )
        Console().print(table)

    def draw(self, results: Sequence[Result], figure: Figure) -> None:
        """Draws how much is lost by the length of a round, with and without a synchronous beginning."""
        found, axes = ratios(results), figure.subplots()
        for suffix, title in (("", "from the beginning"), (", after a fifth", "after a synchronous fifth")):
            points = [(n, statistics.fmean(found[way])) for n in LENGTHS if found.get(way := f"every {n}{suffix}")]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", label=title)
        axes.set(xscale="log", xlabel="steps of a round", ylabel="held-out loss ÷ synchronous")
        axes.set_xticks(LENGTHS, list(map(str, LENGTHS)))
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()


def ratios(results: Sequence[Result]) -> dict[str, list[float]]:
    """Returns, by way, the loss over that of the synchronous run of the same seed, where both have ended."""
    by_trial, found = {result.trial: result for result in results}, dict[str, list[float]]()
    for result in results:
        trial = result.trial
        plain = by_trial.get(Trial(SYNCHRONOUS, trial.seed, trial.num_samples))
        if plain is not None and plain.score is not None and result.score is not None:
            found.setdefault(trial.way, []).append(result.score / plain.score)
    return found


def main() -> None:
    parser = parser_of("few_agreements", __doc__)
    parser.add_argument("--seeds", type=whole(1, len(SEEDS)), default=len(SEEDS), metavar="N", help="(default: 3)")
    how_many = {"type": whole(BATCH, 60_000), "default": NUM_SAMPLES, "metavar": "N"}
    parser.add_argument("--samples", **how_many, help="that each run trains on (default: %(default)s)")
    options = parser.parse_args()
    carry_out(FewAgreements(SEEDS[: options.seeds], options.samples), "few_agreements", options.folder)


if __name__ == "__main__":
    main()
