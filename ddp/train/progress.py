"""Tells how a run goes on: the progress bar, the last word after a signal, a hint of less traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from ddp.data.loading.iterable import ENDLESS
from ddp.gradients import ErrorFeedback, PowerSGD
from ddp.gradients.hooks.traffic import Traffic, predicted
from ddp.process.clock import now_s
from ddp.process.log import log
from ddp.train.callbacks import Callback, ThroughputMeter
from ddp.train.state import StepReport, TrainState, agreed_reason
from ddp.train.stopping import has_obeyed, is_signal
from ddp.units import format_time

REFRESH_EVERY_S = 0.2
SHORTEST_BAR = 10  # letters
ESTIMATE_AFTER_S, ESTIMATE_AFTER_SHARE = 10.0, 0.05
"""An estimate is worth saying after this time, or after this share of the steps."""

LONG_S = 600.0
"""A run that takes longer says so."""


class ProgressBar(Callback):
    """Prints a line per evaluation, and shows a bar on a terminal. A long run says how long it will take.

    Args:
        if_long: what follows when a long run says so, such as how to shorten it.
        clock: seconds, from any start.
    """

    def __init__(
        self,
        meter: ThroughputMeter,
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
        self._console = console or Console()
        self._bar: Progress | None = None
        self._first: tuple[int, float] | None = None  # the first step of this run, which is slow, and when it ended
        self._estimated = False

    def fit_start(self, state: TrainState) -> None:
        if state.comm.rank != 0 or not self._console.is_terminal:
            return
        self._bar = Progress(
            BarColumn(bar_width=None, table_column=Column(ratio=1)),  # what is left of the line
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
            rate = f"{self._meter.whole.samples_per_s:,.0f} samples/s"
            epoch = f"epoch {report.epoch + 1}" + (f"/{self._num_epochs}" if self._num_epochs else "")
            self._bar.update(self._task, completed=report.step, others=(f"loss {report.loss:.4f}", rate, epoch))
        if not self._estimated:
            self._estimate(report.step)

    def evaluated(self, state: TrainState) -> None:
        if state.comm.rank != 0:
            return
        metrics = [f"{name} {value:.4f}" for name, value in state.evaluation.items()]
        rate = f"{self._meter.whole.samples_per_s:,.0f} samples/s"
        where = f"step {state.step}" + (f"/{self._num_steps}" if self._num_steps else "")
        line = f"{where}  loss {state.train_loss or 0.0:.4f}  {rate}  {'  '.join(metrics)}"
        if self._bar is not None:
            self._bar.update(self._task, metrics=metrics)
            self._bar.console.print(line, highlight=False, markup=False)  # above the bar, where it stays
        else:
            print(line, flush=True)

    def exception(self, state: TrainState, error: BaseException) -> None:
        self._end()

    def fit_end(self, state: TrainState) -> None:
        self._end()
        if state.comm.rank == 0 and state.reported:
            reported = "  ".join(f"{name} {value:.4f}" for name, value in state.reported.items())
            print(f"with the last weights  {reported}", flush=True)

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _estimate(self, step: int) -> None:
        """Says once, as soon as it can be known, that this run will take long."""
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
            self._console.print(text, soft_wrap=one_line, highlight=False, markup=False)


class StopNote(Callback):
    """Says where the checkpoint is and how to go on, if a signal has stopped the run; `stopping.py` remembers that.

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
        saved = f'which is saved in {self._run_dir}: the same call with resume="auto" goes on from there'
        if self._run_dir is None:
            saved = "and nothing is saved: folder=None"
        log.warning("stopped by %s after step %d, %s", state.stopped_by, state.step, saved)


class _Facts(ProgressColumn):
    """Steps and time left; and then the loss, metrics, speed and epoch, as far as one line has room beside the bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._console = console

    def render(self, task: Task) -> Text:
        left = "-:--:--" if task.time_remaining is None else _clock_time(task.time_remaining)
        total = "" if task.total is None else f"{task.total:.0f}"  # of a stream nobody knows it
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


# --- A hint of a run on several hosts --------------------------------------------------------------------------------
#
# After its first steps a run knows how long it waits for gradients. If that is long, it asks the cost model what
# PowerSGD would make of a step (`hooks/traffic.py`). With a hook or a wire format, it asks what a step would take
# without.


NUM_SKIPPED, NUM_STEPS = 2, 8  # the first steps are slow: buckets are planned, and links measured
LONG = 0.25  # share of a step that is spent waiting
WORTH_IT = 0.8  # of a step
HOOK = ErrorFeedback(PowerSGD())


class TrafficHint(Callback):
    """Says once what a hook would save, or that the one that is there costs more than it saves. Collective.

    Args:
        say: gets the line, on every rank.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._num_steps = say, 0
        self._step_s = self._wait_s = 0.0

    def step_end(self, state: TrainState, report: StepReport) -> None:
        self._num_steps += 1
        if NUM_SKIPPED < self._num_steps <= NUM_SKIPPED + NUM_STEPS:
            self._step_s += report.step_s / NUM_STEPS
            self._wait_s += report.wait_s / NUM_STEPS
        if self._num_steps == NUM_SKIPPED + NUM_STEPS:
            line = self._line(state)
            if line:
                self._say(line)

    def _line(self, state: TrainState) -> str:
        replica, comm = state.model, state.comm
        if comm.host_partition.num_hosts == 1 or not (buckets := replica.all_reduced_buckets):
            return ""
        # The rank that waits least is the one that the others wait for, too; it waits for the network alone.
        figures = torch.tensor([self._wait_s, -self._step_s], dtype=torch.float64, device="cpu").to(comm.device)
        comm.all_reduce(figures, "min", label="times of a step")
        wait_s, step_s = (abs(seconds) for seconds in comm.to_host(figures).read()[0])
        ask = partial(predicted, comm, buckets)
        if replica.compression is not None:
            return too_dear(repr(replica.compression.hook), ask(hook=replica.compression.hook), ask(), step_s - wait_s)
        if replica.wire == "fp32":  # for its precision
            return ""
        if replica.wire is not None:
            return too_dear(f"wire={replica.wire!r}", ask(wire=replica.wire), ask(), step_s - wait_s)
        return worth_it(ask(), ask(hook=HOOK), step_s, wait_s) if wait_s > LONG * step_s else ""


def too_dear(name: str, with_it: Traffic, without: Traffic, compute_s: float) -> str:
    """Returns a line that says so where a hook or a wire format costs more than it saves, or ""."""
    longer_s, shorter_s = with_it.step_s(compute_s), without.step_s(compute_s)
    if shorter_s >= longer_s:
        return ""
    return (
        f"{name} costs more than it saves here: by the cost model a step takes {format_time(longer_s)} with it, and "
        f"{format_time(shorter_s)} without"
    )


def worth_it(plain: Traffic, hooked: Traffic, step_s: float, wait_s: float) -> str:
    """Returns a line that says what PowerSGD would save, or "" if that is little."""
    shorter_s = hooked.step_s(step_s - wait_s)
    if shorter_s > WORTH_IT * step_s:
        return ""
    return (
        f"waiting for gradients takes {wait_s / step_s:.0%} of a step; with hook=powersgd, in Python "
        f"hook={HOOK!r}, each host would send {hooked.link_bytes / 1e6:,.3g} MB in the place of "
        f"{plain.link_bytes / 1e6:,.3g}, and a step would take about {format_time(shorter_s)} in the place of "
        f"{format_time(step_s)}"
    )
