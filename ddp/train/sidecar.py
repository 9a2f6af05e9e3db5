"""A side-car evaluates a run's checkpoints in a process of its own, so that training never waits for an evaluation.

    RUN_DIR/checkpoints/step-00000120/    the run writes it, and removes it when newer ones are there
         │ hard links: what the side-car has seen stays, and takes no room of its own
    RUN_DIR/sidecar/
        .held-step-00000120-1f6a…    waits for its turn, oldest first
        step-00000080/, best         the best so far, and its name, in the form of the run's own
        metrics.jsonl                a line for each checkpoint: evaluated, or skipped and why
        .lock                        while a side-car follows the run: which process

Neither side asks whether the other one lives. The run writes whole checkpoints, and the side-car's state is its folder.
So either may be killed at any moment and started again, and no weights are evaluated twice: `weights` of a line is
their checksum.

A checkpoint that is not whole may be on its way over a slow file system. It is looked at again for a while, and then
skipped. That checkpoints were removed before the side-car has seen them shows in `order`, which counts saves.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ddp.errors import CheckpointError, ConfigError
from ddp.process.clock import now_s
from ddp.process.files import hold, json_object, make_folder, read_own, to_append, write_whole
from ddp.process.log import log
from ddp.train.checkpoint_store import MANIFEST, Saved, listed
from ddp.train.evaluate import Side
from ddp.train.metric_names import is_metric
from ddp.train.report import SIDECAR, read_metrics
from ddp.train.stopping import StopFlag, is_signal
from ddp.units import counted

METRICS, HELD = "metrics.jsonl", ".held-"
GRACE_S = 10.0
"""A checkpoint that is not whole is looked at for this long."""
POLL_S = 0.5
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of file systems, and of kernels, that make no hard link here."""

Measure = Callable[[Path, Side], Mapping[str, float] | None]
"""Returns the metrics of a checkpoint on one side, such as {"validation_loss": 0.2}; None after a signal."""


def record_of(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's side-car, without a last one that a crash cut off; none where it had no side-car."""
    return read_metrics(run_dir / SIDECAR / METRICS)


def missing(run_dir: Path) -> list[int]:
    """Returns the steps of the checkpoints that a side-car has neither evaluated nor skipped, in the order of saves."""
    record = record_of(run_dir)
    waiting = [*listed(run_dir / "checkpoints").saved, *_held(run_dir / SIDECAR)]
    return [step for _, step in sorted({(_order(each), _step(each)) for each in waiting if not _is_done(each, record)})]


def has_ended(run_dir: Path) -> bool:
    """Returns True if a run has written its results, and will not go on, as one does that a signal has stopped."""
    path = run_dir / "summary.json"
    try:
        return not is_signal(str(json_object(read_own(path)).get("stopped_by")))
    except (OSError, ValueError):
        return False


def results_of_sidecar(run_dir: Path, main_metric: str, *, last_step: int) -> dict[str, Any]:
    """Returns what summary.json holds of a side-car: how many checkpoints were evaluated, and the last one's metrics.

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
        print(f"{counted(len(left), 'checkpoint')} left for the side-car; waiting up to {within_s:g} s …", flush=True)
    with suppress(KeyboardInterrupt):
        while is_there() and now_s() < until_s:
            time.sleep(POLL_S / 10)


@contextmanager
def only_sidecar(run_dir: Path) -> Iterator[None]:
    """Keeps other side-cars from a run for the duration of the block.

    Raises:
        ConfigError: there is one already, or its folder cannot be written.
    """
    folder = run_dir / SIDECAR
    try:
        make_folder(folder)
        held = hold(folder)
    except ConfigError as error:
        raise ConfigError(f"{run_dir} has a side-car: {str(error).partition(': wait')[0]}; one is enough") from error
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; a side-car keeps its results there") from error
    with closing(held):
        yield


class SideCar:
    """Evaluates each checkpoint of a run once, and keeps the best. It runs inside `only_sidecar`.

    Args:
        sides: on which a checkpoint is evaluated: by the first, and at the end of the run by all.
        main_metric: decides which one is the best; higher_is_better: in which direction.
        say: is given a line for each checkpoint.
    """

    def __init__(
        self,
        run_dir: Path,
        measure: Measure,
        *,
        sides: Sequence[Side],
        main_metric: str,
        higher_is_better: bool,
        say: Callable[[str], object] = log.info,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self._run_dir, self._folder = run_dir, run_dir / SIDECAR
        self._measure, self._sides, self._say, self._clock = measure, sides, say, clock
        self._main_metric, self._sign = f"{sides[0]}_{main_metric}", 1.0 if higher_is_better else -1.0
        self._doubted: dict[Path, float] = {}  # what is not whole, and since when
        self._record = record_of(run_dir)
        self._copies = False
        if (metrics := self._folder / METRICS).exists():  # without a line that was cut off: the next one would join it
            write_whole(metrics, "".join(f"{json.dumps(entry)}\n" for entry in self._record))
        for left in self._folder.glob(".tmp-*"):  # by a side-car that was killed
            shutil.rmtree(left, ignore_errors=True)
        held = _held(self._folder)
        orders = [entry["order"] for entry in self._record if "order" in entry]
        self._last_order = max([*orders, *map(_order, held)], default=0)
        for each in held:
            if _is_done(each, self._record):
                self._settle(each)

    # --- the life of a side-car ---------------------------------------------------------------------------------------

    def follow(
        self, stop: StopFlag, *, patience_s: float = math.inf, pause: Callable[[float], None] = time.sleep
    ) -> None:
        """Evaluates what the run saves, until it has ended and nothing is left, or a signal asks to stop.

        Args:
            patience_s: how long nothing need happen in the folder of a run that has not ended.

        Raises:
            ConfigError: nothing has happened for that long; or the run has ended, and holds no checkpoint.
        """
        signs, since_s = _signs_of_life(self._run_dir), self._clock()
        while not stop:
            is_last_look = has_ended(self._run_dir)  # before it, because a run saves before it ends
            did_something = self.look()
            if stop or (is_last_look and not did_something and not self._doubted):
                break
            if did_something or signs != (signs := _signs_of_life(self._run_dir)):
                since_s = self._clock()
            elif self._clock() - since_s > patience_s:
                raise ConfigError(
                    f"{self._run_dir}: nothing has happened there for {patience_s:g} s, and the run has not ended: "
                    "start the side-car again once it goes on, or let it wait for longer with evaluate.wait_s"
                )
            if not did_something:
                pause(POLL_S)
        if not stop:
            self._report()

    def look(self) -> bool:
        """Holds all checkpoints that are new, and evaluates the first of them. Returns False if there was none."""
        self._take()
        for each in _held(self._folder):
            if self._evaluate(each, self._sides[0], "evaluation"):
                self._settle(each)
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

    # --- holding ------------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Links all checkpoints that are new into the side-car's folder."""
        self._doubted = {path: since_s for path, since_s in self._doubted.items() if path.exists()}
        held = [_same(each) for each in _held(self._folder)]
        saved, unreadable = listed(self._run_dir / "checkpoints")
        for each in reversed(saved):
            if _same(each) not in held and not _is_done(each, self._record):
                self._note_gap(_order(each), num_unknown=len(unreadable))
                self._hold(each)
            self._last_order = max(self._last_order, _order(each))
        told = {entry.get("unreadable") for entry in self._record}
        for path in unreadable:
            if path.name not in told and self._is_given_up(path):
                self._skip(path.name, f"its {MANIFEST} is missing or damaged", unreadable=path.name)

    def _hold(self, each: Saved) -> None:
        target, whole = (self._folder / f"{begin}step-{_step(each):08d}-{_key(each)[:8]}" for begin in (".tmp-", HELD))
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        try:
            for name in (*(f"{part}.pt" for part in each.manifest["parts"]), MANIFEST):
                self._link(each.path / name, target / name)
            target.rename(whole)
            self._doubted.pop(each.path, None)
        except FileNotFoundError as error:
            shutil.rmtree(target, ignore_errors=True)
            if self._is_given_up(each.path):
                lacks = f"it has no {Path(str(error.filename)).name}"
                self._skip_one(each, lacks if each.path.exists() else "it was removed meanwhile")

    def _link(self, path: Path, target: Path) -> None:
        try:
            if not self._copies:
                os.link(path, target, follow_symlinks=False)
                return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._copies = True
            log.warning("%s takes no hard links (%s): the side-car copies checkpoints", target.parent, error.strerror)
        shutil.copyfile(path, target)

    def _note_gap(self, order: int, *, num_unknown: int) -> None:
        """Tells of checkpoints that were removed before they were seen.

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
            metrics = self._measure(each.path, side)
        except CheckpointError as error:
            if not self._is_given_up(each.path):
                return False
            self._skip_one(each, str(error.__cause__ or error))
            return True
        if metrics is None:  # a signal
            return False
        self._doubted.pop(each.path, None)
        self._append({"kind": kind, "step": _step(each), "order": _order(each), "weights": _key(each), **metrics})
        self._say(f"step {_step(each)}  {'  '.join(f'{name} {value:.4f}' for name, value in metrics.items())}")
        return True

    def _is_given_up(self, path: Path) -> bool:
        """Returns True if a checkpoint is gone, or has not been whole for long enough."""
        since_s = self._doubted.setdefault(path, self._clock())
        if is_over := self._clock() - since_s >= GRACE_S or not path.exists():
            del self._doubted[path]
        return is_over

    def _skip_one(self, each: Saved, why: str) -> None:
        about = {"step": _step(each), "order": _order(each), "weights": _key(each)}
        self._skip(f"the checkpoint of step {_step(each)}", why, **about)

    def _skip(self, what: str, why: str, **about: Any) -> None:
        self._append({"kind": "skipped", **about, "why": why})
        log.warning("the side-car has skipped %s: %s", what, why)

    def _append(self, entry: dict[str, Any]) -> None:
        with to_append(self._folder / METRICS) as file:
            file.write(f"{json.dumps(entry)}\n")
        self._record.append(entry)

    # --- the best -----------------------------------------------------------------------------------------------------

    def _settle(self, each: Saved) -> None:
        """Keeps a held checkpoint in the place of the best if it is better, or else lets go of it."""
        best, folder = best_in(self._record, self._main_metric, self._sign), self._folder
        if best is None or not _is_of(best, each):
            _remove(each.path)
            return
        others = list(folder.glob("step-*"))
        path = folder / f"step-{_step(each):08d}"
        if path in others:
            _remove(path)
        each.path.rename(path)
        write_whole(folder / "best", f"{path.name}\n")
        for other in others:
            if other != path:
                _remove(other)


def best_in(record: Sequence[Mapping[str, Any]], main_metric: str, sign: float) -> Mapping[str, Any] | None:
    """Returns the evaluation with the best main metric, the first of equals; None where there is no number."""
    evaluations = [entry for entry in record if entry["kind"] == "evaluation"]
    scored = [entry for entry in evaluations if math.isfinite(entry.get(main_metric, math.nan))]
    return max(scored, key=lambda entry: sign * float(entry[main_metric]), default=None)


def _step(each: Saved) -> int:
    return int(each.manifest["step"])


def _order(each: Saved) -> int:
    return int(each.manifest["order"])


def _key(each: Saved) -> str:
    """Returns the checksum of the weights that an evaluation of this checkpoint uses."""
    parts = each.manifest["parts"]
    averages = each.manifest["meta"].get("averages")  # of `ddp.EMA`
    return "+".join(str(parts.get(name, {}).get("sha256")) for name in ("model", *(["callbacks"] if averages else [])))


def _same(each: Saved) -> tuple[int, str]:
    """Returns what two checkpoints have in common that need one evaluation."""
    return _step(each), _key(each)


def _is_of(entry: Mapping[str, Any], each: Saved) -> bool:
    """Returns True for a line about these weights of this step."""
    return (entry.get("step"), entry.get("weights")) == _same(each)


def _is_done(each: Saved, record: Sequence[Mapping[str, Any]]) -> bool:
    """Returns True if these weights were evaluated, or this checkpoint was skipped."""
    lines = [entry for entry in record if _is_of(entry, each)]
    return any(entry["kind"] == "evaluation" or entry["order"] == _order(each) for entry in lines)


def _held(folder: Path) -> list[Saved]:
    """Returns the checkpoints that wait for their turn, in the order of saves."""
    found = []
    for path in folder.glob(f"{HELD}*"):
        with suppress(OSError, ValueError):  # it is being removed
            found.append(Saved(path, json_object((path / MANIFEST).read_text(encoding="utf-8"))))
    return sorted(found, key=_order)


def _remove(path: Path) -> None:
    """Removes a folder; if this is killed half-way, nobody takes what is left for a checkpoint."""
    shutil.rmtree(path.rename(path.with_name(f".tmp-{path.name}")), ignore_errors=True)


def _signs_of_life(run_dir: Path) -> list[int]:
    """Returns when a run's files have changed, those that it writes to while it trains."""
    paths = [run_dir / name for name in ("metrics.jsonl", "starts.jsonl", "summary.json", "checkpoints")]
    return [path.stat().st_mtime_ns if path.exists() else 0 for path in paths]
