"""Sends a run to a tracker: this file says when a run begins there, what is sent, and how it ends.

    first step                      begin(id, start)      a new run there, or that of the checkpoint to go on from
                                    settings(values)      of a new one
    each object of metrics.jsonl    metrics(kind, step, values)
    last of all                     file(path, step)      curves.png, and the folder of the last checkpoint
                                    end(status, reason, step)

A subclass has these methods. Rank 0 alone runs them, one after another in its own thread, so that no step waits
for a server. All ranks know the id, which is saved with the run: if rank 0 was killed, rank 1 marks the run as failed.

What goes wrong at the beginning is an error of the run, on all ranks. Later on the run continues without the tracker
and says so once, because hours of training are worth more than their curves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from ddp.comm.objects import all_gather_object, on_rank_zero
from ddp.errors import ConfigError, PeerLost, one_line, with_causes
from ddp.process.clock import HelperThread
from ddp.process.streams import preserved
from ddp.process.terminal import log
from ddp.train.checkpoints.checkpoint import flat
from ddp.train.reports.results import METRICS, read_metrics
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import TrainState
from ddp.train.steps.stopping import is_signal

T = TypeVar("T")
Status = Literal["finished", "interrupted", "failed"]

BEGIN_S = 120.0  # a first run makes a database
END_S = 600.0  # a checkpoint may be large
STOP_S = 20.0  # after a signal or an error: less than what launchers grant from SIGTERM to SIGKILL


class Start(NamedTuple):
    """The place of a run, as its tracker begins.

    Attributes:
        folder: of the run; None: it has none. name: of that folder.
        group: what belongs together, such as the folder of a sweep; "" for none.
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
        group: what the run belongs to.

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
    """Once begun, `metrics` skips what stands there already, so that a resumed run sends all of metrics.jsonl again."""

    def __init__(self, *, group: str = "") -> None:
        spec = find_spec(self.module) if self.module else None
        if self.module and (spec is None or spec.origin is None):  # a folder of that name has none, as wandb/ of a run
            raise ConfigError(f"{self.title} is not installed: pip install {self.module}")
        self._group = group
        self._begins_anew()

    def _begins_anew(self) -> None:
        self._has_begun, self._id, self._folder = False, "", ""
        self._found: Mapping[str, Any] = {}
        self._calls: Calls | None = None
        self._checkpoint: Path | None = None
        self._before: list[dict[str, Any]] = []

    # --- what a subclass does ----------------------------------------------------------------------------------------

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
        self._begins_anew()
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
        if self._calls is not None:
            self._calls.add(partial(self._send, entry))

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
            self._calls = Calls(self.title)
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
        self._calls = calls = Calls(self.title)
        try:
            with preserved():  # libraries may draw numbers while they are imported
                start = self._start(state)
                found: str = calls.ask(lambda: self.begin(before, start)).result(BEGIN_S)
        except (Exception, SystemExit) as error:
            calls.ask(lambda: self.end("failed", "it began too late", state.step))  # if it ever does
            calls.end()
            self._calls = None
            why = f"it has not answered within {BEGIN_S:g} s" if isinstance(error, TimeoutError) else one_line(error)
            raise ConfigError(f"{self.title} cannot begin a run: {why}") from error
        if not before:
            calls.add(lambda: self.settings({name: str(value) for name, value in flat(state.settings).items()}))
        if not before or self.skips:  # steps before the checkpoint may be missing: sent elsewhere, or not yet
            for entry in self._before:
                calls.add(partial(self._send, entry))
        self._before = []
        return found

    def _send(self, entry: Mapping[str, Any]) -> None:
        about = ("kind", "step") if entry["kind"] == "step" else ("kind", "step", "samples", "epoch")  # once a step
        values = {name: value for name, value in entry.items() if name not in about}
        self.metrics(entry["kind"], entry["step"], values)

    def _start(self, state: TrainState) -> Start:
        return Start(state.run_dir, self._group, state.step)

    def _end(
        self, state: TrainState, status: Status, reason: str, limit_s: float, *, begins: bool = False
    ) -> None:
        """Ends the run on the rank that talks to the tracker, within the limit; first begins again if `begins`."""
        calls, self._calls = self._calls, None
        if calls is None:
            return

        def end() -> None:
            if begins:
                self.begin(self._id, self._start(state))
            self.end(status, reason, state.step)

        if status != "failed" and state.run_dir is not None:
            for path in filter(None, [state.run_dir / "curves.png", self._checkpoint]):
                if path.exists():
                    calls.add(partial(self.file, path, state.step))
        done = calls.ask(end)
        calls.end()
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


class Calls:
    """Makes calls one after another in a separate thread, so that no step waits for a server."""

    def __init__(self, title: str) -> None:
        self._title, self._has_failed, self._helper = title, False, HelperThread(f"ddp {title}")

    def add(self, call: Callable[[], object]) -> None:
        """Has this called in its turn. If it fails, a warning says so, and what is added is called no more."""
        self._helper.submit(partial(self._make, call))

    def ask(self, call: Callable[[], T]) -> Future[T]:
        """Returns the future of a call that is made in its turn, also after one that has failed."""
        return self._helper.submit(call)

    def end(self) -> None:
        """Lets the thread end after all these calls."""
        self._helper.end()

    def _make(self, call: Callable[[], object]) -> None:
        if self._has_failed:
            return
        try:
            call()
        except (Exception, SystemExit) as error:
            self._has_failed = True
            log.warning("%s: %s; the run continues, and sends it nothing more", self._title, one_line(error))


def _was_killed(error: BaseException, *, rank: int) -> bool:
    """Returns True if an error, or one that has caused it, says that this rank is lost and could not say why itself."""
    lost = [each for each in with_causes(error) if isinstance(each, PeerLost) and each.rank == rank]
    return any(not each.reason.startswith("it failed") for each in lost)
