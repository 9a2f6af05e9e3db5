"""Tells what the study of less traffic has found, in a table and in a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ddp.bench.less_traffic import JOBS, PLAIN, Result, Trial

TITLES = {"digits": "digits: accuracy, %", "gpt": "GPT: bits per byte"}


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


def show(found: Mapping[tuple[str, str], Point], ways: Sequence[str]) -> None:
    """Prints the table."""
    title = "mean over seeds, and the mean difference to plain of the same seed ± its standard error"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("way", no_wrap=True)
    jobs = [job for job in JOBS if any((job, way) in found for way in ways)]
    for job in jobs:
        table.add_column(TITLES[job], justify="right")
        table.add_column("÷ plain, %" if job == "gpt" else "− plain, points", justify="right", no_wrap=True)
    for way in ways:
        table.add_row(way, *(cell for job in jobs for cell in _cells(found, job, way)))
    Console().print(table)


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


def draw(found: Mapping[tuple[str, str], Point], ways: Sequence[str], picture: Path) -> None:
    """Draws the mean curves: on the left those of digits, as errors, and on the right those of the GPT."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, job in zip(figure.subplots(1, 2), JOBS, strict=True):
        for number, way in enumerate(ways):
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
    figure.savefig(picture, dpi=120)
