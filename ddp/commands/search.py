"""Searches for settings by Optuna's ask and tell: a sweep whose next job depends on the results so far.

    python -m ddp search 'optim.lr=tag(log,interval(1e-4,1e-1))' model.width=16,32 --trials 20 sweep.name=mine

    folder: job.json and metrics.jsonl of each trial
       │ read back as Optuna's trials
       ▼
    study ── ask ──▶ a job, in its own process (`launch/sweep.py`)
       ▲                │ its evaluations, as metrics.jsonl grows
       └── tell ◀───────┘ its objective; failed, if that is not a number; pruned, if the study saw no hope

The folder is the study: there is no database, and a search that was killed resumes from the folder, with its unfinished
jobs first. A hopeless trial gets SIGTERM, on which its workers agree to stop, however many they are. Optuna sees the
number of an evaluation as the step, because trials may differ in their batches.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp.comm.meeting.place import refuse_workers
from ddp.commands.registry import parser_of
from ddp.errors import ConfigError
from ddp.process.arguments import program, relative_path, whole
from ddp.process.files import to_read
from ddp.process.terminal import say
from ddp.run.launch import sweep
from ddp.run.launch.command_line import bad_input_to, composed, exit_with_error, for_hydra, options_first
from ddp.run.launch.run_folder import unwritable
from ddp.run.launch.sweep import Job
from ddp.run.settings.address import is_address
from ddp.run.settings.checks import NO_METRIC
from ddp.run.settings.config import CHOICES, Sweep
from ddp.run.settings.reader import from_plain, value_of
from ddp.train.reports.results import METRICS, entry_of


def main(words: Sequence[str]) -> int:
    """Runs the trials that are left; returns the exit status."""
    usage = f"{program()} search KEY=VALUE,VALUE KEY='interval(LOW,HIGH)' … [--trials N] [SETTING=VALUE …]"
    about = "KEY='range(1,9)' and KEY='tag(log,interval(1e-4,1e-1))', too; sweep.name=, sweep.parallel=: docs/sweeps.md"
    parser = parser_of("search", usage=usage, epilog=about)
    parser.add_argument("--trials", type=whole(1), default=20, metavar="N", help="in all (default: %(default)s)")
    parser.add_argument("--no-pruning", action="store_true", help="let hopeless trials run to their end")
    about = "of Optuna's proposals (default: %(default)s)"
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help=about)
    options, settings = parser.parse_known_args(words)
    with bad_input_to(exit_with_error):
        refuse_workers("a search", instead="start it by itself")
        settings = options_first(settings, own=("--trials", "--no-pruning", "--seed"))
        ours = [each for each in settings if each.startswith("sweep.")]
        space = Space.of(for_hydra([each for each in settings if each not in ours], sweeps=True))
        shared = _sweep(ours)
        config, _ = composed(space.first())
        for words_of_trial in space.strange_choices():
            composed(words_of_trial)  # which refuses a name that no folder of the user's own has either
        if config.trial:
            raise ConfigError("trial=true: keeps no metric to search by; leave it out")
        if config.evaluate.by == "sidecar" and not options.no_pruning:
            why = NO_METRIC.format("evaluate.by=sidecar")
            raise ConfigError(f"--no-pruning: is missing, because pruning {why}; add it, or leave that setting out")
        from ddp.run.assembly.components import make_task

        task, folder = make_task(config), Path("runs", shared.name or time.strftime("search-%Y-%m-%d_%H-%M-%S"))
        search = Search(
            space,
            folder.absolute(),
            metric=task.main_metric,
            higher_is_better=task.higher_is_better,
            num_trials=options.trials,
            parallel=shared.parallel,
            seed=options.seed,
            prunes=not options.no_pruning,
        )
        try:
            status = run(search)
        except OSError as error:
            raise unwritable(error.filename or folder, error) from error
        if status >= 128:
            say(f"the search continues with {program()} search {shlex.join(sweep.again(words, folder))}", to=sys.stderr)
        return status
    raise AssertionError("bad input ends the process")


def _sweep(words: Sequence[str]) -> Sweep:
    """Returns the settings of the sweep as a whole."""
    parts = (each.partition("=") for each in words)
    found = {key.removeprefix("sweep."): value_of(key, text) for key, _, text in parts}
    shared: Sweep = from_plain({"sweep": found}).sweep
    sweep.check_parallel(shared.parallel)
    return shared


# --- what varies -----------------------------------------------------------------------------------------------------

EMPTY = "an empty range, whose end is not part of it: give a later end, as in range(1,9)"
DIGITS = 4  # of a number that is proposed, because the name of its folder is to be read


def _optuna() -> Any:
    """Returns the library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("a search needs Optuna: pip install 'optuna>=4,<6'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@dataclass(frozen=True)
class Space:
    """The values that a search may choose.

    Attributes:
        fixed: the settings that all trials share, as words of a command line.
        distributions: Optuna's, by key.
        words: key → value as Optuna knows it → the same as it is typed.
    """

    fixed: Sequence[str]
    distributions: Mapping[str, Any]
    words: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, settings: Sequence[str]) -> Space:
        """Reads settings: those with several values, `a,b`, `range(1,9)` or `interval(0,1)`, are what varies.

        Raises:
            ConfigError: none does.
        """
        from hydra.core.override_parser.overrides_parser import OverridesParser

        fixed, distributions, words = [], {}, {}
        for override, text in zip(OverridesParser.create().parse_overrides(list(settings)), settings, strict=True):
            if not override.is_sweep_override():
                fixed.append(text)
                continue
            key, value = override.get_key_element(), override.value()
            if override.is_discrete_sweep() and not _is_whole(value):
                typed = list(override.sweep_string_iterator())
                words[key] = {Job([f"{key}={each}"], Path()).settings[key.lstrip("+")]: each for each in typed}
                distributions[key] = _optuna().distributions.CategoricalDistribution([*words[key]])
            else:
                distributions[key] = _numbers(key, value)
        if not distributions:
            raise ConfigError(
                "nothing varies: give what is searched several values, as model.width=16,32, or "
                "'optim.lr=tag(log,interval(1e-4,1e-1))'"
            )
        return cls(fixed, distributions, words)

    def typed(self, key: str, value: Any) -> str:
        """Returns a value that Optuna proposes as a setting; few digits, and yet within its bounds."""
        if key in self.words:
            return f"{key}={self.words[key][value]}"
        bounds = self.distributions[key]
        if isinstance(value, float):
            value = min(max(float(f"{value:.{DIGITS}g}"), bounds.low), bounds.high)
        return f"{key}={value}"

    def params(self, job: Job) -> dict[str, Any] | None:
        """Returns the values of a job as Optuna knows them; None if they lie outside of this space."""
        found: dict[str, Any] = {}
        for key, kind in self.distributions.items():
            text = job.settings.get(key.lstrip("+"), "")
            try:
                found[key] = text if key in self.words else type(kind.low)(text)
            except ValueError:
                return None
            if not (text in self.words[key] if key in self.words else kind.low <= found[key] <= kind.high):
                return None
        return found

    def first(self, **others: str) -> list[str]:
        """Returns the settings of one trial, to compose and check before any begins. `others`: than its values."""
        lowest = {key: kind.low for key, kind in self.distributions.items() if key not in self.words}
        values = {key: lowest[key] if key in lowest else next(iter(self.words[key])) for key in self.distributions}
        return [*self.fixed, *(self.typed(key, value) for key, value in (values | others).items())]

    def strange_choices(self) -> Iterator[list[str]]:
        """Yields the settings of a trial for each name of a model, or the like, that this package does not have."""
        for key in self.words.keys() & CHOICES.keys():
            for name in self.words[key]:
                if name not in CHOICES[key] and not is_address(name):
                    yield self.first(**{key: name})


def _is_whole(value: Any) -> bool:
    return hasattr(value, "step") and all(isinstance(each, int) for each in (value.start, value.stop, value.step))


def _numbers(key: str, value: Any) -> Any:
    """Returns the distribution of a range of whole numbers, or of an interval.

    Raises:
        ConfigError: it is empty, or its logarithm would be taken of what is not positive.
    """
    kinds, is_log = _optuna().distributions, "log" in value.tags
    try:
        if hasattr(value, "step"):
            last = range(value.start, value.stop, value.step)[-1]
            return kinds.IntDistribution(value.start, last, step=1 if is_log else value.step, log=is_log)
        is_whole = isinstance(value.start, int) and isinstance(value.end, int)
        kind = kinds.IntDistribution if is_whole else kinds.FloatDistribution
        return kind(value.start, value.end, log=is_log)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{key}: {EMPTY if isinstance(error, IndexError) else error}") from error


# --- the trials ------------------------------------------------------------------------------------------------------


@dataclass
class _Trial:
    """A trial in flight: Optuna's, and what has been read of the metrics of its run.

    Attributes:
        file, num_bytes: that were read; a resumed run writes its metrics again, into another file.
    """

    asked: Any
    file: int = 0
    num_bytes: int = 0
    seen: list[int] = field(default_factory=list)  # steps


class Search:
    """A loop that asks Optuna for jobs, and tells it their results.

    Args:
        metric: the main metric of the task, without the word for the side.
        num_trials: trials in all, with those that are there.
        prunes: hopeless trials are stopped: their best so far is worse than the median of the others at that point.
    """

    def __init__(
        self,
        space: Space,
        folder: Path,
        *,
        metric: str,
        higher_is_better: bool,
        num_trials: int,
        parallel: int = 1,
        seed: int = 0,
        prunes: bool = True,
    ) -> None:
        optuna = self._optuna = _optuna()
        self.space, self.folder, self.metric = space, folder, metric
        self.num_trials, self.parallel = num_trials, parallel
        found = sweep.jobs_in(folder)
        for job in found:
            sweep.refuse_other(job, Job(space.fixed, folder), but=[key.lstrip("+") for key in space.distributions])
        self.unfinished = [job for job in found if job.status is None or (job.status >= 128 and not job.pruned)]
        self.in_flight: dict[Path, _Trial] = {}
        self.study = optuna.create_study(
            direction="maximize" if higher_is_better else "minimize",
            sampler=optuna.samplers.TPESampler(seed=seed + len(found), constant_liar=parallel > 1),
            pruner=optuna.pruners.MedianPruner() if prunes else optuna.pruners.NopPruner(),
        )
        for job in found:
            if job not in self.unfinished and (params := space.params(job)) is not None:
                self.study.add_trial(self._past(job, params))

    def jobs(self) -> Iterator[Job]:
        """Yields the next job as long as there are trials left; its result may be reported later."""
        for job in self.unfinished:
            if (params := self.space.params(job)) is not None:
                self.study.enqueue_trial(params)
                self.in_flight[job.run_dir] = _Trial(self.study.ask(dict(self.space.distributions)))
                yield Job(job.overrides, job.run_dir)
        while len(self.study.trials) < self.num_trials:
            trial = self.study.ask(dict(self.space.distributions))
            chosen = [self.space.typed(key, value) for key, value in trial.params.items()]
            keys = [key.lstrip("+") for key in self.space.distributions]
            job = Job([*self.space.fixed, *chosen], Path())
            name = sweep.job_folder(job.overrides, keys, number=trial.number)
            job = Job(job.overrides, self.folder / name)
            if job.run_dir in self.in_flight:  # it is proposed a second time, before its result is there
                self.study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
                continue
            self.in_flight[job.run_dir] = _Trial(trial)
            if (earlier := sweep.earlier(job)) is not None:  # or after that
                self.tell(earlier)
            else:
                yield job

    def is_hopeless(self, job: Job) -> bool:
        """Reports the evaluations that a run has made since the last call; returns True if Optuna would prune it."""
        trial = self.in_flight[job.run_dir]
        before = len(trial.seen)
        for number, value in self._evaluations(job, trial):
            trial.asked.report(value, number)
        return len(trial.seen) > before and bool(trial.asked.should_prune())

    def tell(self, job: Job) -> None:
        """Tells Optuna how a job has ended, unless a signal to the search has ended it.

        Raises:
            ConfigError: it has trained, and there is no metric to search by.
        """
        trial, states = self.in_flight.pop(job.run_dir), self._optuna.trial.TrialState
        has_metric = job.summary.get("main_metric") in job.summary
        if job.status == 0 and not has_metric and "sidecar" not in job.summary:  # which may not have been in time
            raise ConfigError(
                f"{relative_path(job.run_dir)}/: no {self.metric} of held-out samples, so the search has no objective; "
                "give held-out data, as with data.validation=0.1"
            )
        if job.objective is not None:
            self.study.tell(trial.asked, job.objective)
        elif job.pruned:
            self.study.tell(trial.asked, state=states.PRUNED)
        elif job.status is not None and job.status < 128:
            self.study.tell(trial.asked, state=states.FAIL)

    def _evaluations(self, job: Job, trial: _Trial) -> Iterator[tuple[int, float]]:
        """Yields number and main metric of each evaluation that metrics.jsonl has got since the last call."""
        with contextlib.suppress(OSError, ConfigError), to_read(job.run_dir / METRICS) as stream:
            if trial.file != (file := os.fstat(stream.fileno()).st_ino):
                trial.file, trial.num_bytes = file, 0
            stream.seek(trial.num_bytes)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                trial.num_bytes += len(line)
                entry = entry_of(line.decode(errors="replace"))
                if entry.get("kind") != "evaluation" or entry["step"] in trial.seen:
                    continue
                trial.seen.append(entry["step"])
                value = entry.get(f"validation_{self.metric}", entry.get(f"test_{self.metric}"))
                if value is not None:  # else the run itself will fail
                    yield len(trial.seen), value

    def _past(self, job: Job, params: Mapping[str, Any]) -> Any:
        """Returns a trial of an earlier command."""
        states = self._optuna.trial.TrialState
        seen = {} if job.status == 2 else dict(self._evaluations(job, _Trial(None)))
        state = states.PRUNED if job.pruned else states.FAIL if job.objective is None else states.COMPLETE
        return self._optuna.trial.create_trial(
            state=state,
            value=job.objective,
            params=dict(params),
            distributions=dict(self.space.distributions),
            intermediate_values=seen,
        )


def run(search: Search) -> int:
    """Runs the trials that are left, and prints the table; returns the status: 0 if there is a best trial."""
    how: dict[str, Any] = {"is_hopeless": search.is_hopeless, "ended": search.tell}
    stopped = sweep.run(search.jobs(), search.folder, parallel=search.parallel, in_view=False, **how)
    status, best = sweep.report_jobs(search.folder), sweep.gather(search.folder).jobs[0]
    return stopped or (0 if best.objective is not None else status)
