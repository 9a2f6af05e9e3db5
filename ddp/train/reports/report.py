"""The results of a run: summary.json, curves.png, and the table on the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ddp.comm.meeting.place import roles
from ddp.comm.meeting.role import current_role
from ddp.data.orders.steps import RoundSizes
from ddp.policies import Training
from ddp.process.arguments import program, relative_path
from ddp.process.files import whole_file
from ddp.process.terminal import console
from ddp.train.reports.results import evaluations_in, is_metric, metric_in_words, read_metrics, words_of
from ddp.train.steps.callbacks import EARLY, MEASURED, Meters
from ddp.train.steps.state import TrainState
from ddp.units import counted

LINES_WRITTEN = 8  # of what a language model writes
LOWEST_LOSS_SHOWN = 1e-4  # a logarithmic axis needs a floor


def summary_of(state: TrainState, meters: Meters, given: Training, *, seconds: float) -> dict[str, Any]:
    """Returns the figures of a run, as JSON can hold them."""
    sizes = getattr(state.sampler, "sizes", None)  # a stream has none
    whole, comm, checks = meters.throughput.whole, state.comm, state.model.num_verified
    return {
        **state.evaluation,
        "main_metric": state.main_metric,
        "higher_is_better": state.higher_is_better,
        "world_size": state.num_workers,
        **({} if current_role() is None else {"servers": comm.world_size}),
        **({"roles": by_rank} if len(by_rank := roles()) == comm.world_size else {}),
        "threads_per_worker": torch.get_num_threads(),
        "device": str(comm.device),
        "all_reduce": comm.plan.describe(),
        "choices": dict(comm.plan.choices),
        "global_batch": sizes.setting if isinstance(sizes, RoundSizes) else state.sampler.global_batch,
        **meters.noise.figures(),
        "num_parameters": sum(parameter.numel() for parameter in state.model.parameters()),
        "precision": given.precision,
        "clip_norm": given.clip_norm,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "verified": [checks, checks] if checks else None,  # a check that fails ends the run
        "steps": state.step,
        "epochs": round(state.epochs_done, 2),
        "unreadable_samples": len(state.unreadable),
        "epochs_as_promised": [meters.epochs.num_as_promised, meters.epochs.num_checked],
        "samples_per_s": round(whole.samples_per_s, 1),
        **{name: round(share, 4) for name, share in whole.shares.items()},
        "train_loss": state.train_loss,
        "seconds": round(seconds, 2),
        "stopped_by": state.stopped_by or None,
    }


def draw_curves(metrics: Path, picture: Path, *, summary: Mapping[str, Any]) -> None:
    """Draws training loss, held-out loss and the main metric over steps; yardsticks become level lines."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    main_metric = summary["main_metric"]
    steps = [entry for entry in read_metrics(metrics) if entry["kind"] == "step" and "train_loss" in entry]
    evaluations = evaluations_in(metrics, summary)
    figure = Figure(figsize=(10, 3.8))  # no pyplot, which would choose the program's backend
    # Fixed margins: a layout that measures its texts draws everything twice, a quarter of a second at a run's end.
    left, right = figure.subplots(1, 2, gridspec_kw={"left": 0.07, "right": 0.985, "bottom": 0.14, "top": 0.91})
    losses = [max(e["train_loss"], LOWEST_LOSS_SHOWN) for e in steps]
    left.plot([e["step"] for e in steps], losses, lw=1, label="train")
    side, _, metric = main_metric.partition("_")
    held_out = [(e["step"], e[f"{side}_loss"]) for e in evaluations if f"{side}_loss" in e]
    if held_out:
        left.plot(*zip(*held_out, strict=True), "o-", ms=3, label="held out" if side == "test" else side)
    left.set(title="loss", xlabel="step")
    losses += [loss for _, loss in held_out]
    if losses and max(losses) >= 10 * min(losses):  # within a decade a logarithmic axis would have one label or two
        left.set(yscale="log")
        left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 4)))
        left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        left.yaxis.set_minor_formatter(NullFormatter())
    left.legend()
    points = [(e["step"], e[main_metric]) for e in evaluations if main_metric in e]
    name = main_metric.replace("_", " ")
    if points:
        right.plot(*zip(*points, strict=True), "o-", ms=3, color="tab:green", label=f"{name}: {points[-1][1]:.4f}")
    if side != "test" and (reported := summary.get(f"test_{metric}")) is not None:
        right.axhline(reported, ls=":", lw=1, color="tab:red", label=f"test {words_of(metric)}: {reported:.4f}")
    for number, (key, value) in enumerate(item for item in summary.items() if item[0].startswith("yardstick_")):
        right.axhline(value, ls="--", lw=1, color=f"C{number + 4}", label=f"{words_of(key)}: {value:.2f}")
    right.set(title=name, xlabel="step")
    if right.get_legend_handles_labels()[0]:
        right.legend(fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    with whole_file(picture) as file:
        figure.savefig(file, dpi=120, format="png")


def print_summary(summary: Mapping[str, Any], run_dir: Path, *, next_commands: list[str]) -> None:
    """Prints the table at the end: quality, speed, shares of the time; then what a language model writes, where the
    results are, and what to try next.

    Paths and commands stand below the table, where nothing breaks them, so that they can be copied.
    """
    titles = {None: "finished", EARLY: "finished early: the main metric no longer became better"}
    titles[MEASURED] = "measured, and not saved"
    table = Table(show_header=False, title=titles.get(summary["stopped_by"], "stopped early and saved"))
    table.add_column(justify="right", style="bold")
    table.add_column()
    for key, value in summary.items():
        if is_metric(key) or key.startswith("yardstick_"):
            table.add_row(words_of(key), metric_in_words(key, value) or "not a finite number")
    workers = f"{counted(summary['world_size'], 'worker')} × {counted(summary['threads_per_worker'], 'thread')}"
    computing, waiting, data = (summary[f"{what}_fraction"] for what in ("compute", "wait", "data"))
    if "servers" in summary:
        workers += f" and {counted(summary['servers'], 'server')}"
        shares = f"of a server: updating {computing + data:.0%}, waiting for workers {waiting:.0%}"
    elif summary["world_size"] == 1:
        shares = f"computing {computing + waiting:.0%}, waiting for data {data:.0%}"
    else:
        shares = f"computing {computing:.0%}, waiting for other workers {waiting:.0%}, for data {data:.0%}"
    rate = f"{summary['samples_per_s']:,.0f}" if summary["samples_per_s"] else "no step was left"
    table.add_row("samples/s", f"{rate}   ({workers}, global batch {summary['global_batch']})")
    table.add_row("share of a step", shares)
    table.add_row("steps, epochs", f"{summary['steps']:,}, {summary['epochs']:g}")
    if summary["stopped_by"] not in titles:
        table.add_row("stopped by", summary["stopped_by"])
    if "sidecar" in summary:
        table.add_row("side-car", _by_sidecar(**summary["sidecar"]))
    if was_on := ", ".join(_was_on(summary)):
        table.add_row("with", was_on)
    terminal = console()
    terminal.print(table)
    written = [line[: terminal.width - 2] for line in summary.get("writes", "").splitlines() if line.strip()]
    lines = ["it writes:", *(f"  {line}" for line in written[:LINES_WRITTEN]), ""] if written else []
    if str(summary.get("main_metric")).startswith("validation_") and any(key.startswith("test_") for key in summary):
        best = f"{program()} evaluate {shlex.quote(str(relative_path(run_dir)))}"
        lines += [f"test figures are of the last weights; those of the best checkpoint: {best}"]
    if summary.get("sidecar", {}).get("missing"):
        lines += [f"the side-car has not evaluated all: {program()} sidecar {shlex.quote(str(relative_path(run_dir)))}"]
    lines += [f"results: {relative_path(run_dir)}/"]
    lines += ["         summary.json, metrics.jsonl, curves.png, checkpoints/, logs/"]
    lines += [f"{'         ' if number else 'try next:'} {command}" for number, command in enumerate(next_commands)]
    terminal.print("\n".join(lines), soft_wrap=True, highlight=False)


def _by_sidecar(*, evaluated: int, last_step: int | None, skipped: int, missing: list[int]) -> str:
    """Returns as text what a side-car has done, and what is missing."""
    last = "" if last_step is None else f", the last one of step {last_step:,}"
    more = [f"{skipped} skipped"] if skipped else []
    more += [f"not in time: step {', '.join(map(str, missing))}"] if missing else []
    return "; ".join([f"{counted(evaluated, 'checkpoint')} evaluated{last}", *more])


def _was_on(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yields the facts of this run that differ from the usual ones."""
    if unreadable := summary.get("unreadable_samples"):
        yield f"{counted(unreadable, 'sample')} left out that could not be read"
    if (precision := summary.get("precision", "fp32")) != "fp32":
        yield precision
    if summary.get("clip_norm") is not None:
        yield f"clip_norm {summary['clip_norm']:g}"
    if summary.get("deterministic"):
        yield "deterministic kernels"
    if summary.get("verified"):
        equal, checks = summary["verified"]
        yield f"replicas bitwise equal at {equal:,} of {counted(checks, 'check')}"
