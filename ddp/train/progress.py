"""The progress bar, on rank 0 only: loss, samples per second and time left.

Read before: `stopping.py`. Read next: `report.py`.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ddp.train.callbacks import Callback, ThroughputMeter
from ddp.train.state import StepReport, TrainState

REFRESH_EVERY_S = 0.2


class ProgressBar(Callback):
    """Shows a bar on a terminal; elsewhere it prints one line per evaluation."""

    def __init__(self, meter: ThroughputMeter, *, num_steps: int, num_epochs: int | None) -> None:
        self._meter, self._num_steps, self._num_epochs = meter, num_steps, num_epochs
        self._console = Console()
        self._bar: Progress | None = None

    def fit_start(self, state: TrainState) -> None:
        if state.comm.rank != 0 or not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]:,.0f} samples/s {task.fields[metrics]}"),
            TimeRemainingColumn(),
            console=self._console,
            refresh_per_second=1 / REFRESH_EVERY_S,
        )
        self._task = self._bar.add_task(
            self._description(state.epoch), total=self._num_steps, completed=state.step, loss=0.0, rate=0.0, metrics=""
        )
        self._bar.start()

    def step_end(self, state: TrainState, report: StepReport) -> None:
        if self._bar is not None:
            rate = self._meter.whole.samples_per_s
            description = self._description(report.epoch)
            self._bar.update(self._task, completed=report.step, loss=report.loss, rate=rate, description=description)

    def evaluated(self, state: TrainState) -> None:
        if state.comm.rank != 0:
            return
        metrics = "  ".join(f"{name} {value:.4f}" for name, value in state.evaluation.items())
        if self._bar is not None:
            self._bar.update(self._task, metrics=f" {metrics}")
        else:
            rate = f"{self._meter.whole.samples_per_s:,.0f} samples/s"
            where = f"step {state.step}/{self._num_steps}"
            print(f"{where}  loss {state.train_loss or 0.0:.4f}  {rate}  {metrics}", flush=True)

    def exception(self, state: TrainState, error: BaseException) -> None:
        self.fit_end(state)

    def fit_end(self, state: TrainState) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _description(self, epoch: int) -> str:
        return f"epoch {epoch + 1}" + (f"/{self._num_epochs}" if self._num_epochs else "")
