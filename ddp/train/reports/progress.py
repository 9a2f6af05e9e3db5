"""Reports the progress of a run: the progress bar, and the last word after a signal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from ddp.data.loading.iterable import ENDLESS
from ddp.process.clock import now_s
from ddp.process.terminal import console as terminal_console
from ddp.process.terminal import log, say
from ddp.train.steps.callbacks import Callback, ThroughputMeter
from ddp.train.steps.state import StepReport, TrainState, agreed_reason
from ddp.train.steps.stopping import has_obeyed, is_signal

REFRESH_EVERY_S = 0.2
SHORTEST_BAR = 10  # letters
ESTIMATE_AFTER_S, ESTIMATE_AFTER_SHARE = 10.0, 0.05
"""An estimate is worth saying after this time, or after this share of the steps."""

LONG_S = 600.0
"""A run that takes longer says so."""

LINE_EVERY_S = 10.0
"""Off a terminal a line says so often how far the run is."""


class ProgressBar(Callback):
    """Prints a line per evaluation. Shows a bar on a terminal, and elsewhere prints a line every few seconds.

    The loss of a line is the mean over all samples since the last line. A long run says how long it will take.

    Args:
        if_long: what follows when a long run says so, such as how to shorten it.
        one_worker: samples/s of a single worker, beside which the speed of several is an efficiency; None: unknown.
        clock: seconds, from any start.
    """

    def __init__(
        self,
        meter: ThroughputMeter,
        *,
        num_steps: int,
        num_epochs: int | None,
        if_long: str = "",
        one_worker: float | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self._meter, self._num_epochs = meter, num_epochs
        self._num_steps = num_steps if num_steps < ENDLESS else None
        self._if_long, self._one_worker, self._clock = if_long, one_worker, clock
        self._console = console or terminal_console()
        self._bar: Progress | None = None
        self._first: tuple[int, float] | None = None  # the first step of this run, which is slow, and when it ended
        self._estimated = False
        self._loss_sum, self._num_items, self._line_s, self._told = 0.0, 0.0, clock(), 0

    def fit_start(self, state: TrainState) -> None:
        self._begin_line(state)
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
            rate = self._rate(state)
            epoch = f"epoch {report.epoch + 1}" + (f"/{self._num_epochs}" if self._num_epochs else "")
            self._bar.update(self._task, completed=report.step, others=(f"loss {report.loss:.4f}", rate, epoch))
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
        line = "  ".join([where, f"loss {loss:.4f}", self._rate(state), *metrics])
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)  # above the bar, where it stays
        else:
            say(line)
        self._begin_line(state)

    def _begin_line(self, state: TrainState) -> None:
        self._loss_sum, self._num_items, self._line_s, self._told = 0.0, 0.0, self._clock(), state.step

    def _rate(self, state: TrainState) -> str:
        rate = self._meter.whole.samples_per_s
        if self._one_worker is None:
            return f"{rate:,.0f} samples/s"
        num_workers = state.num_workers
        share = rate / (num_workers * self._one_worker)
        return f"{rate:,.0f} samples/s ({share:.0%} of {num_workers} × one worker)"

    def went_back(self, state: TrainState) -> None:
        self._begin_line(state)

    def exception(self, state: TrainState, error: BaseException) -> None:
        self._end()

    def fit_end(self, state: TrainState) -> None:
        if state.comm.rank == 0 and state.step > self._told:
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
            self._console.print(text, soft_wrap=one_line, highlight=False)


class StopNote(Callback):
    """Says where the checkpoint is and how to go on, if a signal has stopped the run (`steps/stopping.py`).

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
    """Steps and time left; and then the loss, metrics, speed and epoch, as far as one line has room beside the bar."""

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
