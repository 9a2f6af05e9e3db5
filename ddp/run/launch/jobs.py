"""Jobs of a sweep, a search or a measurement: each a process on its own cores, the next one as soon as one has ended.

    run                     main, in its own session
     │  starts               └─ the command line of one run: launcher and workers, as without a sweep
     │  waits, writes RUN_DIR/job.json, and the table after each job
     ▼
    sweep.gather            the table, from the folder

What a job prints stands in its RUN_DIR/logs/job.log if several run at the same time, because their lines would mix.
A signal to this process is passed on to all running jobs. Each stops in agreement and saves, and none begins. A job
that is still there `STOP_S` after it was asked to stop is killed, such as one that somebody has paused.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn, TypeVar

from ddp.errors import ConfigError
from ddp.process.arguments import quoted, relative_path
from ddp.process.clock import Patience
from ddp.process.files import hold, make_folder, to_append
from ddp.process.host import VISIBLE_GPUS, visible_gpus
from ddp.process.memory import available_cores
from ddp.process.terminal import ended_by_ctrl_c, say
from ddp.run.launch import sweep
from ddp.run.launch.processes import SHUTDOWN_S, heard, paused_together
from ddp.run.launch.sweep import Job
from ddp.run.launch.worker import ORPHAN_GRACE_S, follow_parent
from ddp.units import counted

Item = TypeVar("Item")

POLL_S = 0.05
STOP_S = 2 * SHUTDOWN_S  # its launcher gives the workers SHUTDOWN_S, and then writes the results
_TAIL = 15  # lines of the log of a job that has failed


@dataclass
class _Running:
    """A job's process, and the number of its share of the cores.

    Attributes:
        patience: for how long, after it was asked to stop, it is not killed.
    """

    job: Job
    process: subprocess.Popen[bytes]
    share: int
    is_hopeless: bool = False
    patience: Patience | None = None

    def stop(self, number: int) -> None:
        """Asks the job to stop."""
        self.process.send_signal(number)
        self.patience = self.patience or Patience(STOP_S)

    def has_ended(self) -> bool:
        """Returns True if the process has ended; kills it when its time is up."""
        if self.patience is not None and not self.patience.left_s():
            self.process.kill()
        return self.process.poll() is not None

    def done(self) -> Job:
        """Notes how the job has ended; returns it so."""
        status = self.process.returncode
        status = status if status >= 0 else 128 - status
        return self.job.done(status, pruned=self.is_hopeless and status > 128)


def check_parallel(parallel: int) -> None:
    """Raises ConfigError if the jobs cannot have a core each; tells if they cannot have a GPU each."""
    cores = available_cores()
    if parallel > cores:
        raise ConfigError(
            f"sweep.parallel={parallel}: each job has its own cores, and {cores} can be used here; take at most that"
        )
    if 0 < (num_gpus := len(visible_gpus())) < parallel:
        there = f"there {'is' if num_gpus == 1 else 'are'} {counted(num_gpus, 'GPU')}"
        say(f"sweep.parallel={parallel}: {there}, so jobs share one", to=sys.stderr)


def run(
    todo: Iterator[Job],
    folder: Path | None = None,
    *,
    parallel: int = 1,
    options: Sequence[str] = (),
    in_view: bool | None = None,
    is_hopeless: Callable[[Job], bool] = lambda _: False,
    ended: Callable[[Job], object] = lambda _: None,
) -> int | None:
    """Makes jobs that are not done already; returns the status of a signal that has stopped them, else None.

    Args:
        todo: the next one is taken when there are cores for it.
        folder: the sweep's, in which the table is written anew after each job; None: another process does that.
        options: Hydra's own, for each job.
        in_view: the jobs print to this process's output; None: if there is one at a time.
        is_hopeless: is asked again and again while a job runs; if it returns True, the job is asked to stop.
        ended: is given each job once it has ended, or is found to be done.

    Raises:
        ConfigError: the folder of a job holds another run.
    """
    is_seen = parallel == 1 if in_view is None else in_view
    running: list[_Running] = []
    signals: list[signal.Signals] = []

    def note(job: Job) -> None:
        ended(job)
        if folder is not None:
            sweep.write(sweep.gather(folder), folder)

    with contextlib.ExitStack() as until_end:
        if folder is not None:
            make_folder(folder)
            until_end.enter_context(contextlib.closing(hold(folder)))
        until_end.enter_context(heard(signals.append))
        until_end.enter_context(paused_together(signal.SIGTSTP))
        until_end.callback(_end, running)
        num_passed_on = 0
        while True:
            while not signals and len(running) < parallel and (job := next(todo, None)) is not None:
                before = sweep.earlier(job)
                if before is not None and before.status == 0:
                    note(before)
                    continue
                words = _words(job, goes_on=before is not None and (job.run_dir / "config.yaml").exists())
                share = min({*range(parallel)} - {each.share for each in running})
                cores = _share_of_cores(share, parallel) if parallel > 1 else []
                gpus = _share_of_gpus(share, parallel) if parallel > 1 else []
                job = job.begun()
                running.append(_Running(job, _start(job, [*options, *words], cores, gpus, is_seen), share))
            if not running:
                return 128 + signals[0] if signals else None
            for each in [each for each in running if each.has_ended()]:
                running.remove(each)
                job = each.done()
                if not is_seen:
                    _tell(job)
                note(job)
            for number in signals[num_passed_on:]:
                num_passed_on += 1
                for each in running:
                    each.stop(number)
            for each in running:
                if not signals and not each.is_hopeless and is_hopeless(each.job):
                    each.is_hopeless = True
                    each.stop(signal.SIGTERM)
            time.sleep(POLL_S)


def _end(running: Sequence[_Running]) -> None:
    """Ends the jobs that run after an error."""
    for each in running:
        each.stop(signal.SIGTERM)
    while not all(each.has_ended() for each in running):
        time.sleep(POLL_S)


def _start(
    job: Job, words: Sequence[str], cores: Sequence[int], gpus: Sequence[str], is_seen: bool
) -> subprocess.Popen[bytes]:
    """Starts a job's process, in its own session, so that signals of the terminal reach it through this one.

    Args:
        cores, gpus: that it may use; empty: all.
    """
    bootstrap = [sys.executable, "-P", str(Path(__file__).parent / "bootstrap.py"), "ddp.run.launch.jobs"]
    about = ["--parent", str(os.getpid()), "--cores", ",".join(map(str, cores))]
    command = [*bootstrap, *about, str(job.run_dir), "--", *words]
    if gpus:
        command = ["env", f"{VISIBLE_GPUS}={','.join(gpus)}", *command]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the job hears it: see `main`
    try:
        if is_seen:
            sys.stdout.flush()
            return subprocess.Popen(command, start_new_session=True)
        logs = job.run_dir / "logs"
        make_folder(logs)
        with to_append(logs / "job.log") as log:
            return subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _words(job: Job, *, goes_on: bool) -> list[str]:
    """Returns the settings of a job's command line; its own come after those that the sweep proposes."""
    resume = ["resume=auto"] if goes_on else []
    group = f"run.group={quoted(job.run_dir.parent.name)}"
    return [group, *resume, *job.overrides, f"hydra.run.dir={quoted(str(job.run_dir))}"]


def _share_of_cores(share: int, parallel: int) -> Sequence[int]:
    """Returns one of `parallel` equal parts of the cores that this process may use; both threads of a core together.

    Where a quota pays for fewer cores than there are, each part is cut to its share of them.
    """
    cores = sorted(os.sched_getaffinity(0), key=lambda core: (_siblings(core), core))
    mine = _part(cores, share, parallel)
    return mine if available_cores() == len(cores) else mine[: len(_part(range(available_cores()), share, parallel))]


def _share_of_gpus(share: int, parallel: int) -> Sequence[str]:
    """Returns one of `parallel` equal parts of the GPUs, as CUDA names them; one alone where there are fewer."""
    gpus = visible_gpus()
    return _part(gpus, share, parallel) or gpus[share % max(1, len(gpus)) :][:1]


def _part(of: Sequence[Item], share: int, parallel: int) -> Sequence[Item]:
    return of[share * len(of) // parallel : (share + 1) * len(of) // parallel]


def _siblings(core: int) -> tuple[int, int]:
    """Returns package and core that a logical processor belongs to; itself where the kernel does not say."""
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    with contextlib.suppress(OSError, ValueError):
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text())
    return 0, core


def _tell(job: Job) -> None:
    """Prints how a job has ended that has printed to its log; if it has failed, with the end of that log."""
    objective = "" if job.objective is None else f", {job.summary['main_metric']} {job.objective:.6g}"
    say(f"{relative_path(job.run_dir)}/: {sweep.ending(job)}{objective}")
    log = job.run_dir / "logs" / "job.log"
    if job.status in (1, 2) and log.is_file():
        lines = log.read_text(errors="replace").splitlines()[-_TAIL if job.status == 1 else -1 :]
        say("\n".join([f"the end of {relative_path(log)}:", *lines]), to=sys.stderr)


# --- The process of a job --------------------------------------------------------------------------------------------
#
#     python -P …/bootstrap.py ddp.run.launch.jobs --parent PID --cores 0,1 RUN_DIR -- SETTING …


def main(argv: Sequence[str]) -> NoReturn:
    """Takes the cores of a job, follows its parent, and runs one command line; ends with its status."""
    parser = argparse.ArgumentParser(prog="ddp.run.launch.jobs")
    parser.add_argument("--parent", type=int, required=True, help="process id of the sweep")
    parser.add_argument("--cores", default="", help="numbers of the cores to use; none: all")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("words", nargs="*", help="settings, and Hydra's own options")
    options = parser.parse_args(argv)

    with ended_by_ctrl_c():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # which the sweep has kept from the interpreter
    follow_parent(options.parent, grace_s=ORPHAN_GRACE_S + SHUTDOWN_S)
    if options.cores:
        os.sched_setaffinity(0, map(int, options.cores.split(",")))
    sys.orig_argv.clear()  # which nobody has typed, so that what this prints for typing begins as any command does
    sys.argv[1:] = options.words
    with paused_together():  # from the beginning, because the kernel pauses no session that has no terminal
        _wait_for_orphans(options.run_dir)
        import_module("ddp.run.launch.command_line").main()  # by name, because that starts jobs
    raise AssertionError("training ends the process")


def _wait_for_orphans(run_dir: Path) -> None:
    """Waits for the workers of a sweep that was killed: they agree to stop, save, and then give the folder back."""
    deadline_s = time.monotonic() + ORPHAN_GRACE_S + SHUTDOWN_S
    for folder in (run_dir, run_dir / "checkpoints"):
        while folder.is_dir():
            try:
                hold(folder).close()
                break
            except (ConfigError, OSError):  # the run itself will say what is wrong
                if time.monotonic() > deadline_s:
                    break
                time.sleep(0.2)
