"""A side-car evaluates a run's checkpoints in its own process, so that training never waits for an evaluation.

    RUN_DIR/checkpoints/step-00000120/    the run writes it, and removes it when newer ones are there
         │ all of its files are opened before one is read, so those that the side-car reads stay
    RUN_DIR/sidecar/
        step-00000080/, best         the best so far, and its name, in the form of the run's own
        metrics.jsonl                a line for each checkpoint: evaluated, or skipped and why
        .lock                        while a side-car follows the run: which process

Neither process checks whether the other one lives. The run writes whole checkpoints, and the side-car's state is its
folder. So either may be killed at any moment and started again, and no weights are evaluated twice: `weights` of a line
is their checksum.

A checkpoint that is not whole may be on its way over a slow file system. It is looked at again for a while, and then
skipped. That checkpoints were removed before the side-car has reached them shows in `order`, which counts saves.

Somebody else may have written the run, and may write there meanwhile. So nothing of it is linked, moved or removed:
checkpoints are read through open files, and the best one is written from memory, into a folder that is pinned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ddp.errors import CheckpointError, ConfigError
from ddp.process.clock import now_s
from ddp.process.files import hold, make_folder, pinned, to_append, write_whole
from ddp.process.records import to_json
from ddp.process.terminal import log, say
from ddp.train.checkpoints.checkpoint_store import MANIFEST, CheckpointStore, Saved, StoredCheckpoint, listed, read
from ddp.train.held_out import Side
from ddp.train.reports.results import METRICS, SIDECAR, is_metric, read_metrics, read_summary
from ddp.train.steps.stopping import StopFlag, is_signal
from ddp.units import counted

GRACE_S = 10.0
"""A checkpoint that is not whole is looked at for this long."""
POLL_S = 0.5

Measure = Callable[[StoredCheckpoint, Side], Mapping[str, float] | None]
"""Returns the metrics of a checkpoint on one side, such as {"validation_loss": 0.2}; None after a signal."""


def record_of(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's side-car; none where it had no side-car."""
    return _record_in(run_dir / SIDECAR)


def _record_in(folder: Path) -> list[dict[str, Any]]:
    lines = read_metrics(folder / METRICS)
    return [line for line in lines if line["kind"] == "skipped" or {"order", "weights"} <= line.keys()]


def missing(run_dir: Path) -> list[int]:
    """Returns the steps of the checkpoints that a side-car has neither evaluated nor skipped, in the order of saves."""
    record = record_of(run_dir)
    return [each.manifest.step for each in listed(run_dir / "checkpoints").saved[::-1] if not _is_done(each, record)]


def has_ended(run_dir: Path) -> bool:
    """Returns True if a run has written its results and will not continue, unlike one that a signal has stopped."""
    try:
        return not is_signal(str(read_summary(run_dir).get("stopped_by")))
    except (OSError, ValueError):
        return False


def results_of_sidecar(run_dir: Path, main_metric: str, *, last_step: int) -> dict[str, Any]:
    """Returns the side-car's entries of summary.json: how many checkpoints were evaluated, and the last one's metrics.

    There are none before the run's last step is evaluated, because those of an earlier step would pass for its result.

    Args:
        main_metric: of the run, whose side is that of a run that knows no held-out samples.
        last_step: of the run.
    """
    record = record_of(run_dir)
    evaluations = sorted((entry for entry in record if entry["kind"] == "evaluation"), key=lambda entry: entry["order"])
    metrics: dict[str, Any] = {}
    for entry in (*evaluations[-1:], *(entry for entry in record[-1:] if entry["kind"] == "report")):
        if entry["step"] == last_step:
            metrics |= {name: value for name, value in entry.items() if is_metric(name)}
    about = {
        "evaluated": len(evaluations),
        "last_step": evaluations[-1]["step"] if evaluations else None,
        "skipped": sum(entry.get("num", 1) for entry in record if entry["kind"] == "skipped"),
        "missing": missing(run_dir),
    }
    name = main_metric.partition("_")[2]
    if f"validation_{name}" in metrics:
        main_metric = f"validation_{name}"
    return {**metrics, "main_metric": main_metric, "sidecar": about}


def is_followed(run_dir: Path) -> bool:
    """Returns True while a side-car follows the run."""
    try:
        with only_sidecar(run_dir):
            return False
    except ConfigError:
        return True


def wait_for(run_dir: Path, is_there: Callable[[], bool], *, within_s: float) -> None:
    """Waits for the side-car of a run that has ended, which ends by itself once all is evaluated; Ctrl-C gives it up.

    Args:
        is_there: while it returns True, there is a side-car.
    """
    until_s = now_s() + within_s
    if is_there() and (left := missing(run_dir)):
        say(f"{counted(len(left), 'checkpoint')} left for the side-car; waiting up to {within_s:g} s …")
    with suppress(KeyboardInterrupt):
        while is_there() and now_s() < until_s:
            time.sleep(POLL_S / 10)


@contextmanager
def only_sidecar(run_dir: Path) -> Iterator[Path]:
    """Keeps other side-cars from a run for the duration of the block; yields the side-car's folder, which is pinned.

    Raises:
        ConfigError: there is one already, or its folder is a link or cannot be written.
    """
    folder = run_dir / SIDECAR
    with ExitStack() as until_end:
        try:
            make_folder(folder)
            pin = until_end.enter_context(pinned(folder))
            until_end.enter_context(closing(hold(pin)))
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}; a side-car keeps its results there") from error
        except ConfigError as error:
            if "is being written by" not in str(error):
                raise
            why = str(error).partition(": wait")[0]
            raise ConfigError(f"{run_dir} has a side-car: {why}; one is enough") from error
        yield pin


class SideCar:
    """Evaluates each checkpoint of a run once, and keeps the best. It runs inside `only_sidecar`.

    Args:
        folder: that `only_sidecar` yields.
        sides: on which a checkpoint is evaluated: by the first, and at the end of the run by all.
        main_metric: decides which one is the best; higher_is_better: in which direction.
        say: is given a line for each checkpoint.
    """

    def __init__(
        self,
        run_dir: Path,
        folder: Path,
        measure: Measure,
        *,
        sides: Sequence[Side],
        main_metric: str,
        higher_is_better: bool,
        say: Callable[[str], object] = log.info,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self._run_dir, self._folder = run_dir, folder
        self._measure, self._sides, self._say, self._clock = measure, sides, say, clock
        self._main_metric, self._sign = f"{sides[0]}_{main_metric}", 1.0 if higher_is_better else -1.0
        self._store = CheckpointStore(folder, keep_last=1, best="max" if higher_is_better else "min")
        self._doubted: dict[Path, float] = {}  # incomplete checkpoints, and since when they are
        self._record = _record_in(folder)
        if self._record:  # without a line that was cut off: the next one would join it
            write_whole(folder / METRICS, "".join(f"{to_json(entry)}\n" for entry in self._record))
        self._last_order = max((entry["order"] for entry in self._record if "order" in entry), default=0)

    # --- the life of a side-car ---------------------------------------------------------------------------------------

    def follow(
        self, stop: StopFlag, *, patience_s: float = math.inf, pause: Callable[[float], None] = time.sleep
    ) -> None:
        """Evaluates the run's checkpoints, until it has ended and none is left, or a signal asks to stop.

        Args:
            patience_s: how long nothing need happen in the folder of a run that has not ended.

        Raises:
            ConfigError: nothing has happened for that long; or the run has ended, and holds no checkpoint.
        """
        signs, since_s = _signs_of_life(self._run_dir), self._clock()
        while not stop:
            is_last_look = has_ended(self._run_dir)  # before it, because a run saves before it ends
            did_something = self.evaluate_next()
            if stop or (is_last_look and not did_something and not self._doubted):
                break
            if did_something or signs != (signs := _signs_of_life(self._run_dir)):
                since_s = self._clock()
            elif self._clock() - since_s > patience_s:
                raise ConfigError(
                    f"{self._run_dir}: nothing has happened there for {patience_s:g} s, and the run has not ended: "
                    "start the side-car again once it continues, or let it wait for longer with evaluate.wait_s"
                )
            if not did_something:
                pause(POLL_S)
        if not stop:
            self._report()

    def evaluate_next(self) -> bool:
        """Evaluates the first checkpoint that is new and whole. Returns False if there was none."""
        self._doubted = {path: since_s for path, since_s in self._doubted.items() if path.exists()}
        saved, unreadable = listed(self._run_dir / "checkpoints")
        reported = {entry.get("unreadable") for entry in self._record}
        for path in unreadable:
            if path.name not in reported and self._is_given_up(path):
                self._skip(path.name, f"its {MANIFEST} is missing or damaged", unreadable=path.name)
        for each in reversed(saved):
            is_new = not _is_done(each, self._record)
            if is_new:
                self._note_gap(each.manifest.order, num_unknown=len(unreadable))
            self._last_order = max(self._last_order, each.manifest.order)
            if is_new and self._evaluate(each, self._sides[0], "evaluation"):
                return True
        return False

    def _report(self) -> None:
        """Evaluates the last checkpoint on the other sides, too."""
        last = listed(self._run_dir / "checkpoints").saved[:1]
        if not last and not self._record:
            raise ConfigError(f"{self._run_dir} has ended and holds no checkpoint: there is nothing to evaluate")
        for each in last:
            kinds = [entry["kind"] for entry in self._record if _is_of(entry, each)]
            if self._sides[1:] and "evaluation" in kinds and "report" not in kinds:
                self._evaluate(each, self._sides[1], "report")

    def _note_gap(self, order: int, *, num_unknown: int) -> None:
        """Records the checkpoints that were removed before they were evaluated.

        Args:
            order: of one that is new; num_unknown: how many are there that cannot say theirs.
        """
        gone = order - 1 - self._last_order - num_unknown
        if gone > 0:
            why = "removed before the side-car has seen it; save less often, or raise checkpoint.keep_last"
            self._skip(counted(gone, "checkpoint"), why, order=order - 1, num=gone)

    # --- evaluating ---------------------------------------------------------------------------------------------------

    def _evaluate(self, each: Saved, side: Side, kind: str) -> bool:
        """Writes a line for a checkpoint, or has doubts; returns True if it is done with."""
        try:
            checkpoint = read(each.path)
            metrics = self._measure(checkpoint, side)
        except CheckpointError as error:
            if not self._is_given_up(each.path):
                return False
            why = str(error) if each.path.exists() else "it was removed meanwhile"
            self._skip(f"the checkpoint of step {each.manifest.step}", why, **_about(each))
            return True
        if metrics is None:  # a signal
            return False
        self._doubted.pop(each.path, None)
        entry = {"kind": kind, **_about(each), **metrics}
        if best_in([*self._record, entry], self._main_metric, self._sign) is entry:
            self._keep(checkpoint, metrics[self._main_metric])  # first: one that is killed here comes to it again
        self._append(entry)
        self._say(f"step {each.manifest.step}  {'  '.join(f'{name} {value:.4f}' for name, value in metrics.items())}")
        return True

    def _keep(self, best: StoredCheckpoint, score: float) -> None:
        """Writes a checkpoint in the place of the best so far."""
        try:
            self._store.save(best.step, best.parts, meta=best.meta, score=score)
        except CheckpointError as error:
            raise ConfigError(str(error).replace(str(self._folder), str(self._run_dir / SIDECAR))) from error

    def _is_given_up(self, path: Path) -> bool:
        """Returns True if a checkpoint is gone, or has not been whole for long enough."""
        since_s = self._doubted.setdefault(path, self._clock())
        if is_over := self._clock() - since_s >= GRACE_S or not path.exists():
            del self._doubted[path]
        return is_over

    def _skip(self, what: str, why: str, **about: Any) -> None:
        self._append({"kind": "skipped", **about, "why": why})
        log.warning("the side-car has skipped %s: %s", what, why)

    def _append(self, entry: dict[str, Any]) -> None:
        with to_append(self._folder / METRICS) as file:
            file.write(f"{to_json(entry)}\n")
        self._record.append(entry)


def best_in(record: Sequence[Mapping[str, Any]], main_metric: str, sign: float) -> Mapping[str, Any] | None:
    """Returns the evaluation with the best main metric, the first of equals; None where there is no number."""
    evaluations = [entry for entry in record if entry["kind"] == "evaluation"]
    scored = [entry for entry in evaluations if math.isfinite(entry.get(main_metric, math.nan))]
    return max(scored, key=lambda entry: sign * float(entry[main_metric]), default=None)


def _about(each: Saved) -> dict[str, Any]:
    """Returns the line on a checkpoint; `weights` is the checksum of the weights that an evaluation uses."""
    manifest = each.manifest
    digests = [manifest.parts[name].sha256 for name in manifest.weights() if name in manifest.parts]
    return {"step": manifest.step, "order": manifest.order, "weights": "+".join(digests)}


def _is_of(entry: Mapping[str, Any], each: Saved) -> bool:
    """Returns True for a line about these weights of this step."""
    about = _about(each)
    return all(entry.get(key) == about[key] for key in ("step", "weights"))


def _is_done(each: Saved, record: Sequence[Mapping[str, Any]]) -> bool:
    """Returns True if these weights were evaluated, or this checkpoint was skipped."""
    lines = [entry for entry in record if _is_of(entry, each)]
    return any(entry["kind"] == "evaluation" or entry.get("order") == each.manifest.order for entry in lines)


def _signs_of_life(run_dir: Path) -> list[int]:
    """Returns when a run's files have changed, those that it writes to while it trains."""
    paths = [run_dir / name for name in ("metrics.jsonl", "starts.jsonl", "summary.json", "checkpoints")]
    return [path.stat().st_mtime_ns if path.exists() else 0 for path in paths]
