"""Shows a run: the progress bar, and a note after a signal; then summary.json, curves.png, and the table."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column, Table
from rich.text import Text

from ddp.comm.meeting.membership import current_member
from ddp.comm.meeting.place import roles
from ddp.comm.meeting.role import current_role
from ddp.data.loading.iterable import ENDLESS
from ddp.data.orders.steps import RoundSizes
from ddp.policies import Training
from ddp.process.arguments import program, relative_path
from ddp.process.clock import now_s
from ddp.process.files import whole_file
from ddp.process.terminal import console as terminal_console
from ddp.process.terminal import log, say
from ddp.train.reports.meters import Meters, Throughput
from ddp.train.reports.results import evaluations_in, is_metric, metric_in_words, read_metrics, words_of
from ddp.train.steps.callbacks import EARLY, MEASURED, Callback
from ddp.train.steps.state import StepReport, TrainState, agreed_reason
from ddp.train.steps.stopping import has_obeyed, is_signal
from ddp.units import counted

# --- While it trains --------------------------------------------------------------------------------------------------


REFRESH_EVERY_S = 0.2
SHORTEST_BAR = 10  # letters
ESTIMATE_AFTER_S, ESTIMATE_AFTER_SHARE = 10.0, 0.05
"""An estimate is printed after this time, or after this share of the steps."""

LONG_S = 600.0
"""A run that takes longer prints an estimate."""

LINE_EVERY_S = 10.0
"""Off a terminal, a line is printed this often."""


class ProgressBar(Callback):
    """Prints a line per evaluation. Shows a bar on a terminal, and elsewhere prints a line every few seconds.

    The loss of a line is the mean over all samples since the last line. A long run prints an estimate of its duration.

    Args:
        if_long: advice that follows the warning of a long run, such as how to shorten it.
        clock: seconds, from any start.
    """

    def __init__(
        self,
        meter: Throughput,
        *,
        num_steps: int,
        num_epochs: int | None,
        if_long: str = "",
        console: Console | None = None,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self._meter, self._num_epochs = meter, num_epochs
        self._num_steps = num_steps if num_steps < ENDLESS else None
        self._if_long, self._clock = if_long, clock
        self._console = console or terminal_console()
        self._bar: Progress | None = None
        self._first: tuple[int, float] | None = None  # the first step of this run, which is slow, and when it ended
        self._estimated = False
        self._loss_sum, self._num_items, self._line_s, self._printed_step = 0.0, 0.0, clock(), 0

    def fit_start(self, state: TrainState) -> None:
        self._begin_line(state)
        if state.comm.rank != 0 or not self._console.is_terminal:
            return
        self._bar = Progress(
            BarColumn(bar_width=None, table_column=Column(ratio=1)),  # the rest of the line
            _Facts(self._console),
            console=self._console,
            refresh_per_second=1 / REFRESH_EVERY_S,
            expand=True,
        )
        self._task = self._bar.add_task("", total=self._num_steps, completed=state.step, others=(), metrics=())
        self._bar.start()

    def step_end(self, state: TrainState, report: StepReport) -> None:
        if state.comm.rank != 0:
            return
        if self._bar is not None:
            epoch = f"epoch {report.epoch + 1}" + (f"/{self._num_epochs}" if self._num_epochs else "")
            self._bar.update(self._task, completed=report.step, others=(f"loss {report.loss:.4f}", self._rate, epoch))
        self._loss_sum += report.loss * report.num_items
        self._num_items += report.num_items
        if self._bar is None and self._clock() - self._line_s >= LINE_EVERY_S:
            self._print_line(state)
        if not self._estimated:
            self._estimate(report.step)

    def evaluated(self, state: TrainState) -> None:
        if state.comm.rank != 0:
            return
        metrics = [f"{name} {value:.4f}" for name, value in state.evaluation.items()]
        if self._bar is not None:
            self._bar.update(self._task, metrics=metrics)
        self._print_line(state, *metrics)

    def _print_line(self, state: TrainState, *metrics: str) -> None:
        where = f"step {state.step}" + (f"/{self._num_steps}" if self._num_steps else "")
        loss = self._loss_sum / self._num_items if self._num_items else state.train_loss or 0.0
        line = "  ".join([where, f"loss {loss:.4f}", self._rate, *metrics])
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)  # above the bar, where it stays
        else:
            say(line)
        self._begin_line(state)

    def _begin_line(self, state: TrainState) -> None:
        self._loss_sum, self._num_items, self._line_s, self._printed_step = 0.0, 0.0, self._clock(), state.step

    @property
    def _rate(self) -> str:
        return f"{self._meter.samples_per_s:,.0f} samples/s"

    def went_back(self, state: TrainState) -> None:
        self._begin_line(state)

    def exception(self, state: TrainState, error: BaseException) -> None:
        self._end()

    def fit_end(self, state: TrainState) -> None:
        if state.comm.rank == 0 and state.step > self._printed_step:
            self._print_line(state)
        self._end()
        if state.comm.rank == 0 and state.reported:
            reported = "  ".join(f"{name} {value:.4f}" for name, value in state.reported.items())
            say(f"with the last weights  {reported}")

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _estimate(self, step: int) -> None:
        """Warns once, as soon as this is known, that the run will take long."""
        now = self._clock()
        if self._first is None:
            self._first = step, now
        if self._num_steps is None or step == self._first[0]:
            return
        first_step, first_s = self._first
        done, ahead = step - first_step, self._num_steps - step
        if now - first_s < ESTIMATE_AFTER_S and done < ESTIMATE_AFTER_SHARE * (self._num_steps - first_step):
            return
        self._estimated = True
        left_s = (now - first_s) / done * ahead
        if left_s > LONG_S:
            hours, minutes = divmod(round(left_s / 60), 60)
            duration = f"{hours} h {minutes} min" if hours else f"{minutes} minutes"
            text = f"This run will take about {duration}. {self._if_long}".rstrip()
            one_line = not self._console.is_terminal
            self._console.print(text, soft_wrap=one_line, highlight=False)


class StopNote(Callback):
    """Prints where the checkpoint is and how to resume, if a signal has stopped the run (`steps/stopping.py`).

    Args:
        run_dir: the folder of the run; None: nothing is saved.
    """

    def __init__(self, run_dir: Path | None) -> None:
        self._run_dir = run_dir

    def fit_end(self, state: TrainState) -> None:
        if not is_signal(state.stopped_by):  # one that came too late to stop the run still asks its program to
            if has_obeyed(late := agreed_reason(state)) and state.comm.rank == 0:
                log.warning("%s came after the last step: the run is complete", late)
            return
        if not has_obeyed(state.stopped_by) or state.comm.rank != 0:
            return
        saved = f'which is saved in {self._run_dir}: the same call with resume="auto" resumes from there'
        if self._run_dir is None:
            saved = "and nothing is saved: folder=None"
        log.warning("stopped by %s after step %d, %s", state.stopped_by, state.step, saved)


class _Facts(ProgressColumn):
    """Steps and time left; and then the loss, metrics, speed and epoch, as far as they fit on one line with the bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._console = console

    def render(self, task: Task) -> Text:
        left = "-:--:--" if task.time_remaining is None else _clock_time(task.time_remaining)
        total = "" if task.total is None else f"{task.total:.0f}"  # unknown for a stream
        steps = f"{task.completed:>{len(total)}.0f}{'/' * bool(total)}{total} steps"
        loss, *others = task.fields["others"] or [""]
        wanted = [loss, *reversed(task.fields["metrics"]), *others]  # a task's main metric is its last one
        room = self._console.width - SHORTEST_BAR - len(" ")
        return Text(fitting([f"{steps}  {left} left", *wanted], room), no_wrap=True)


def fitting(parts: Iterable[str], room: int) -> str:
    """Joins the parts that fit into `room` letters; an earlier one takes precedence. The first is always there."""
    first, *others = parts
    for part in filter(None, others):
        if len(first) + len(part) + 2 <= room:
            first += f"  {part}"
    return first


def _clock_time(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


# --- At its end -------------------------------------------------------------------------------------------------------


LINES_WRITTEN = 8  # of a language model's text
LOWEST_LOSS_SHOWN = 1e-4  # a logarithmic axis needs a floor


def summary_of(state: TrainState, meters: Meters, given: Training, *, seconds: float) -> dict[str, Any]:
    """Returns the figures of a run, as JSON can hold them."""
    sizes = getattr(state.sampler, "sizes", None)  # a stream has none
    whole, comm, checks = meters.throughput, state.comm, state.model.num_verified
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
        **({} if (member := current_member()) is None else member.latest.counts()),
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
    """Prints the table at the end: quality, speed, shares of the time; then text by a language model, where the
    results are, and commands to try next.

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
    terminal = terminal_console()
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
    """Returns as text how many checkpoints a side-car has evaluated, and how many are missing."""
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
