"""Trackers of other projects, and their common base: when a run begins there, what is sent, and how it ends.

    first step                      begin(id, start)      a new run there, or that of the checkpoint to resume
                                    settings(values)      of a new one
    each object of metrics.jsonl    metrics(kind, step, values)
    last of all                     file(path, step)      curves.png, and the folder of the last checkpoint
                                    end(status, reason, step)

A subclass has these methods. Rank 0 alone runs them, one after another in its own thread, so that no step waits
for a server. All ranks know the id, which is saved with the run: if rank 0 was killed, rank 1 marks the run as failed.

A failure at the beginning is an error of the run, on all ranks. Later the run continues without the tracker and
warns once, because hours of training are worth more than their curves.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from ddp.comm.objects import all_gather_object, on_rank_zero
from ddp.errors import ConfigError, PeerLost, one_line, with_causes
from ddp.process.clock import HelperThread
from ddp.process.files import lines_of, read_own, to_append, write_whole
from ddp.process.records import json_object, to_json
from ddp.process.streams import preserved
from ddp.process.terminal import log
from ddp.train.checkpoints.checkpoint import flat
from ddp.train.reports.results import METRICS, read_metrics
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import TrainState
from ddp.train.steps.stopping import is_signal

Status = Literal["finished", "interrupted", "failed"]

BEGIN_S = 120.0  # a first run makes a database
END_S = 600.0  # a checkpoint may be large
STOP_S = 20.0  # after a signal or an error: less than what launchers grant from SIGTERM to SIGKILL


class Start(NamedTuple):
    """The place of a run, as its tracker begins.

    Attributes:
        folder: of the run; None: it has none. name: of that folder.
        group: name of runs that belong together, such as the folder of a sweep; "" for none.
        step: the step that the run resumes from.
    """

    folder: Path | None
    group: str
    step: int

    @property
    def name(self) -> str | None:
        return None if self.folder is None else self.folder.name


class Tracker(Callback):
    """Sends the settings, metrics, curves and last checkpoint of a run to a tracker, each once.

    A resumed run continues the same run there, unless it resumes in another folder. A run that is complete already
    sends nothing.

    Args:
        group: that the run belongs to.

    Raises:
        ConfigError: the library is not installed.
    """

    title: ClassVar[str]
    """The tracker's name, as its users write it."""
    module: ClassVar[str] = ""
    """The module that must be installed; "" for none."""
    needs_folder: ClassVar[bool] = False
    """It writes into the run's folder."""
    skips: bool = False
    """Once begun, `metrics` skips lines that were sent already: a resumed run sends all of metrics.jsonl again."""

    def __init__(self, *, group: str = "") -> None:
        spec = find_spec(self.module) if self.module else None
        if self.module and (spec is None or spec.origin is None):  # a folder of that name has none, as wandb/ of a run
            raise ConfigError(f"{self.title} is not installed: pip install {self.module}")
        self._group = group
        self._reset()

    def _reset(self) -> None:
        self._has_begun, self._id, self._folder = False, "", ""
        self._found: Mapping[str, Any] = {}
        self._thread: HelperThread | None = None  # on the rank that talks to the tracker
        self._has_failed = False
        self._checkpoint: Path | None = None
        self._before: list[dict[str, Any]] = []

    # --- methods of a subclass ---------------------------------------------------------------------------------------

    def begin(self, id: str, start: Start) -> str:
        """Imports the library, and begins a run, or resumes that of this id if it is not "". Returns its id.

        Steps beyond `start.step` that stand there are about to happen again: it drops them, or `metrics` skips those.
        """
        raise NotImplementedError

    def settings(self, values: Mapping[str, str]) -> None:
        """Sends the settings of a new run, by dotted name."""

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Sends an object of metrics.jsonl; `kind` is "step", "evaluation" or "report"."""

    def file(self, path: Path, step: int) -> None:
        """Sends a picture, or a checkpoint, which is a folder."""

    def end(self, status: Status, reason: str, step: int) -> None:
        """Ends the run. One is interrupted if a signal has stopped it; the reason of one that is complete is ""."""

    # --- when --------------------------------------------------------------------------------------------------------

    def fit_start(self, state: TrainState) -> None:
        if self.needs_folder and state.run_dir is None:
            raise ConfigError(f"{self.title} writes into the run's folder, and folder=None: give a folder")
        self._reset()
        self._folder = "" if state.run_dir is None else str(state.run_dir)
        if state.comm.rank == 0 and state.run_dir is not None:  # before this run adds to it
            self._before = read_metrics(state.run_dir / METRICS)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._found = state

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id, "folder": self._folder} if self._id else {}

    def step_start(self, state: TrainState) -> None:
        self._begin(state)

    def logged(self, state: TrainState, entry: Mapping[str, Any]) -> None:
        self._begin(state)
        self._add(partial(self._send, entry))

    def checkpoint_saved(self, state: TrainState, path: Path) -> None:
        self._begin(state)
        self._checkpoint = path

    def finished(self, state: TrainState, summary: Mapping[str, Any]) -> None:
        if not self._has_begun:  # nothing was left to do
            return
        on_rank_zero(state.comm, lambda: None, label=self.title)  # other callbacks may keep it busy
        all_gather_object(state.comm, None)  # no rank has failed
        status: Status = "interrupted" if is_signal(state.stopped_by) else "finished"
        limit_s = END_S if status == "finished" else STOP_S
        on_rank_zero(state.comm, lambda: self._end(state, status, state.stopped_by, limit_s), label=self.title)

    def exception(self, state: TrainState, error: BaseException) -> None:
        again = bool(self._id) and state.comm.rank == 1 and _was_killed(error, rank=0)
        if again:
            self._thread = HelperThread(f"ddp {self.title}")
        status: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self._end(state, status, one_line(error), STOP_S, begins=again)

    # --- how ---------------------------------------------------------------------------------------------------------

    def _begin(self, state: TrainState) -> None:
        """Begins on rank 0 if that was not done yet, and tells all ranks the id. Collective."""
        if self._has_begun:
            return
        self._has_begun = True
        before = str(self._found.get("id", "")) if self._found.get("folder") == self._folder else ""
        self._id = on_rank_zero(state.comm, lambda: self._begun(state, before), label=self.title)

    def _begun(self, state: TrainState, before: str) -> str:
        """Returns the id of the run, which begins, or resumes that of the id `before`. On rank 0 only."""
        self._thread = thread = HelperThread(f"ddp {self.title}")
        try:
            with preserved():  # libraries may draw numbers while they are imported
                start = self._start(state)
                found: str = thread.submit(lambda: self.begin(before, start)).result(BEGIN_S)
        except (Exception, SystemExit) as error:
            thread.submit(lambda: self.end("failed", "it began too late", state.step))  # if it ever does
            thread.end()
            self._thread = None
            why = f"it has not answered within {BEGIN_S:g} s" if isinstance(error, TimeoutError) else one_line(error)
            raise ConfigError(f"{self.title} cannot begin a run: {why}") from error
        if not before:
            self._add(lambda: self.settings({name: str(value) for name, value in flat(state.settings).items()}))
        if not before or self.skips:  # steps before the checkpoint may be missing: sent elsewhere, or not yet
            for entry in self._before:
                self._add(partial(self._send, entry))
        self._before = []
        return found

    def _add(self, call: Callable[[], object]) -> None:
        """Has this called in its turn, where this rank talks to the tracker; if it fails, nothing more is called."""
        if self._thread is not None:
            self._thread.submit(partial(self._make, call))

    def _make(self, call: Callable[[], object]) -> None:
        if self._has_failed:
            return
        try:
            call()
        except (Exception, SystemExit) as error:
            self._has_failed = True
            log.warning("%s: %s; the run continues, and sends it nothing more", self.title, one_line(error))

    def _send(self, entry: Mapping[str, Any]) -> None:
        about = ("kind", "step") if entry["kind"] == "step" else ("kind", "step", "samples", "epoch")  # once a step
        values = {name: value for name, value in entry.items() if name not in about}
        self.metrics(entry["kind"], entry["step"], values)

    def _start(self, state: TrainState) -> Start:
        return Start(state.run_dir, self._group, state.step)

    def _end(self, state: TrainState, status: Status, reason: str, limit_s: float, *, begins: bool = False) -> None:
        """Ends the run on the rank that talks to the tracker, within the limit; first begins again if `begins`."""
        if (thread := self._thread) is None:
            return

        def end() -> None:
            if begins:
                self.begin(self._id, self._start(state))
            self.end(status, reason, state.step)

        if status != "failed" and state.run_dir is not None:
            for path in filter(None, [state.run_dir / "curves.png", self._checkpoint]):
                if path.exists():
                    self._add(partial(self.file, path, state.step))
        done, self._thread = thread.submit(end), None
        thread.end()
        try:
            done.result(limit_s)
        except TimeoutError:
            log.warning("%s has not taken all of the run within %g s, and may miss the rest", self.title, limit_s)
        except (Exception, SystemExit) as error:
            log.warning("%s: the run there has not ended as it should: %s", self.title, one_line(error))


def refuse_twice(callbacks: Sequence[Callback]) -> None:
    """Raises ConfigError if two trackers are of one class, because they would write into one place."""
    kinds = [type(each) for each in callbacks if isinstance(each, Tracker)]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ConfigError(f"the run would be sent to {kind.title} twice: give that tracker once")


def _was_killed(error: BaseException, *, rank: int) -> bool:
    """Returns True if an error, or one that has caused it, says that this rank is lost and could not say why itself."""
    lost = [each for each in with_causes(error) if isinstance(each, PeerLost) and each.rank == rank]
    return any(not each.reason.startswith("it failed") for each in lost)


# --- A table for pandas or a spreadsheet ------------------------------------------------------------------------------
#
# RUN_DIR/metrics.csv     a row for each object of metrics.jsonl, empty where the object has no such number
#         settings.csv    a row for each setting; status.csv: one row, with the reason for it


class CSV(Tracker):
    """Writes metrics.csv, settings.csv and status.csv into the run's folder."""

    title, needs_folder = "CSV", True

    def begin(self, id: str, start: Start) -> str:
        assert start.folder is not None
        self._folder_of_run, self._path = start.folder, start.folder / "metrics.csv"
        self._columns = ["kind", "step"]
        self._write([row for row in self._rows() if int(row["step"]) <= start.step])
        return str(start.folder)

    def settings(self, values: Mapping[str, str]) -> None:
        rows = [{"name": name, "value": value} for name, value in values.items()]
        write_whole(self._folder_of_run / "settings.csv", _table(["name", "value"], rows, header=True))

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        row = {"kind": kind, "step": step, **values}
        if row.keys() <= {*self._columns}:
            with to_append(self._path) as file:
                file.write(_table(self._columns, [row]))
        else:
            self._write([*self._rows(), row])

    def end(self, status: Status, reason: str, step: int) -> None:
        row = {"status": status, "reason": reason, "step": step}
        write_whole(self._folder_of_run / "status.csv", _table(row, [row], header=True))

    def _write(self, rows: list[dict[str, Any]]) -> None:
        self._columns = list(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        write_whole(self._path, _table(self._columns, rows, header=True))

    def _rows(self) -> list[dict[str, Any]]:
        return list(csv.DictReader(lines_of(self._path)))


def _table(columns: Iterable[str], rows: Iterable[Mapping[str, Any]], *, header: bool = False) -> str:
    writer = csv.DictWriter(file := io.StringIO(), list(columns), lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


# --- MLflow: where MLFLOW_TRACKING_URI says, or mlflow.db in the current folder ---------------------------------------


MLFLOW_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflow(Tracker):
    """Sends a run to MLflow, into the experiment of MLFLOW_EXPERIMENT_NAME or `mlflow.set_experiment`."""

    title, module, skips = "MLflow", "mlflow", True

    def begin(self, id: str, start: Start) -> str:
        import mlflow

        group = {"group": start.group} if start.group else None
        run = mlflow.start_run(id or None, run_name=start.name, tags=group)  # the active one of this thread alone
        self._mlflow, client = mlflow, mlflow.MlflowClient()
        history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        self._last = {name: max(each.step for each in found) for name, found in history.items()}
        return str(run.info.run_id)

    def settings(self, values: Mapping[str, str]) -> None:
        self._mlflow.log_params(_named(values))

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        new = {name: value for name, value in _named(values).items() if step > self._last.get(name, -1)}
        if new:
            self._mlflow.log_metrics(new, step)

    def file(self, path: Path, step: int) -> None:
        if path.is_dir():
            self._mlflow.log_artifacts(str(path), f"checkpoints/{path.name}")
        else:
            self._mlflow.log_artifact(str(path))

    def end(self, status: Status, reason: str, step: int) -> None:
        self._mlflow.set_tag("reason", reason)
        self._mlflow.end_run(MLFLOW_STATUS[status])


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values under names that MLflow takes: of others it would refuse all that is sent with them."""
    return {re.sub(r"[^\w/.\- :]", "_", name)[:250]: value for name, value in values.items()}


# --- TensorBoard: `tensorboard --logdir runs` shows all runs below runs/ ----------------------------------------------


class TensorBoard(Tracker):
    """Writes event files into the run's folder. Steps that a resumed run repeats appear once."""

    title, module, needs_folder = "TensorBoard", "tensorboard", True

    def begin(self, id: str, start: Start) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(start.folder), purge_step=start.step + 1)
        return str(start.folder)

    def settings(self, values: Mapping[str, str]) -> None:
        rows = [f"| {name} | {value} |" for name, value in values.items()]
        self._writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]), 0)

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a kill would lose metrics of before the checkpoint, too

    def file(self, path: Path, step: int) -> None:
        from PIL import Image  # which torch's writer needs for a picture, too

        if path.is_dir():
            self._writer.add_text("checkpoint", str(path), step)
        else:
            self._writer.add_image("curves", np.asarray(Image.open(path)), step, dataformats="HWC")

    def end(self, status: Status, reason: str, step: int) -> None:
        self._writer.add_text("status", f"{status}: {reason}" if reason else status, step)
        self._writer.close()


# --- Weights & Biases: WANDB_PROJECT, WANDB_MODE and its other variables say where ------------------------------------
#
# Offline, a run's folder says which steps stand there, unless its process was killed: then those that a resumed run
# makes once more are sent once more.


class WandB(Tracker):
    """Sends a run to Weights & Biases, separate from any other run of the program there."""

    title, module, skips = "Weights & Biases", "wandb", True

    def begin(self, id: str, start: Start) -> str:
        import wandb

        how = {"id": id, "resume": "allow"} if id else {"group": start.group or None}
        run = wandb.init(dir=start.folder, name=start.name, reinit="create_new", **how)
        run.define_metric("*", step_metric="step")
        self._wandb, self._run = wandb, run
        known: Any = run.summary
        self._note = start.folder / "wandb" / f"sent-{run.id}.json" if run.offline and start.folder else None
        if id and self._note is not None:
            self.skips = self._note.exists()
            known = json_object(read_own(self._note)) if self.skips else {}
            self._note.unlink(missing_ok=True)
        self._last = {kind: known.get(f"last_{kind}", -1) for kind in ("step", "evaluation", "report")}
        return str(run.id)

    def settings(self, values: Mapping[str, str]) -> None:
        self._run.config.update(values)

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if step > self._last[kind]:
            self._run.log({**values, "step": step, f"last_{kind}": step})
            self._last[kind] = step

    def file(self, path: Path, step: int) -> None:
        if path.is_dir():
            self._run.log_artifact(str(path), name=f"checkpoint-{self._run.id}", type="model")
        else:
            self._run.log({path.stem: self._wandb.Image(str(path)), "step": step})

    def end(self, status: Status, reason: str, step: int) -> None:
        self._run.summary.update({"status": status, "reason": reason})
        if status == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "finished" else 1)
        if self._note is not None and self.skips:
            write_whole(self._note, to_json({f"last_{kind}": step for kind, step in self._last.items()}))
