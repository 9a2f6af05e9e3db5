"""Injects faults into a small training run, of ours and of its peers in turns, and compares what they cost.

    python -m ddp chaos --peer torchrun,torchft --fault kill --rounds 3         one fault in each run of 30 s
    python -m ddp chaos --peer torchrun --spares 1 --every 30 --for 300         a random worker, every 30 s

Every worker writes a line to a file of its own at each committed step (`recipes/studies/elastic.py`), and `figures`
computes everything from these lines and the instants of the faults:

    recovery   from the fault to the next committed step that the lost worker had no part in, less undisturbed steps
    later      the longest pause between two steps after that, less a step: a newcomer's entry, say
    batch      samples of a step, and the fewest of a step after the first fault
    lost       samples of the steps up to the last one that were in no committed step
    repeated   samples that were in a committed step more than once; steps: as many steps as had to be made again
    rate       samples per second in committed steps, each counted once, ÷ those of an undisturbed run
    bits       parameters equal those of an undisturbed run at the last step that both have digested since the fault
    left       processes that were there five seconds after the run had ended
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ddp.commands.registry import parser_of, respond
from ddp.errors import ConfigError
from ddp.lab.clone import of_clone
from ddp.process.arguments import listed, positive, whole
from ddp.process.terminal import say
from ddp.units import lines_of_table, written

PROGRAM = "recipes.studies.elastic"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}
FAULTS = (*SIGNALS, "full_disk")
PEERS = ("torchrun", "torchft", "torchft_quick")
MODELS = ("small-mlp", "digits-cnn", "mlp-25m")
START_S, END_S, UNDISTURBED_S = 240.0, 20.0, 60.0
DISK_BYTES = 2 << 30


# --- from lines to figures --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one run, which the docstring of the module defines; `None`: no step followed.

    Attributes:
        step_s: median time of a step before the first fault.
        recoveries_s: one for each fault.
        batch: samples of an undisturbed step; `fewest`: of a step after the first fault.
        rate: samples per second.
        digests: of the parameters, by step.
    """

    step_s: float
    recoveries_s: Sequence[float | None] = ()
    later_s: float | None = None
    batch: int
    fewest: int
    lost: int
    repeated: int
    steps_repeated: int
    rate: float
    digests: Mapping[int, str] = field(default_factory=dict)
    left: int = 0


def figures(lines: Iterable[Mapping[str, Any]], begin: float, end: float, faults: Sequence[float] = ()) -> Figures:
    """Returns the figures of a run.

    Args:
        lines: of all workers: `t`, `step`, `batch` (samples of the step, of all workers), `samples` (the worker's own).
        begin: once all workers had written a line, in the clock of `t`; `end`: of the run; `faults`: between them.
    """
    rows = sorted((line for line in lines if line["t"] <= end), key=lambda line: line["t"])
    commits = [rows[0], *(row for before, row in pairwise(rows) if row["step"] != before["step"])]
    times = [row["t"] for row in commits if row["t"] >= begin]
    first_fault = min(faults, default=end)
    step_s = statistics.median([b - a for a, b in pairwise(times) if b <= first_fault] or [0.0])
    recoveries, later = [], [0.0]
    for fault, until in pairwise([*faults, end]):
        # The lost worker may have done its part of the first step that follows, but not of the second one.
        after = [each for each in times if fault < each <= until]
        ahead = [each - fault - number * step_s for number, each in enumerate(after[:2], 1)]
        recoveries.append(max(0.0, *ahead) if ahead[1:] else None)
        later += [b - a - step_s for a, b in pairwise(after[1:])]
    first = max((row["step"] for row in rows if row["t"] < begin), default=0)
    front, batch = max(row["step"] for row in rows), max(row["batch"] for row in rows)
    times_read = Counter(sample for row in rows for sample in row["samples"])
    counted_rows = [row for row in rows if row["step"] > first]
    used = len({sample for row in counted_rows for sample in row["samples"]})
    # A worker that dies between a commit and its line leaves the line's samples out, which the others' `batch` counts.
    of_step, size = Counter[int](), {row["step"]: row["batch"] for row in counted_rows}
    for row in counted_rows:
        of_step[row["step"]] += len(row["samples"])
    used += sum(-count % size[step] for step, count in of_step.items() if size[step])
    return Figures(
        step_s=step_s,
        recoveries_s=recoveries,
        later_s=max(later) if faults else None,
        batch=batch,
        fewest=min((row["batch"] for row in rows if row["t"] > first_fault), default=batch),
        lost=(front - first) * batch - used,
        repeated=times_read.total() - len(times_read),
        steps_repeated=len(commits) - len({row["step"] for row in commits}),
        rate=used / (end - begin),
        digests={
            row["step"]: row["digest"] for row in rows if "digest" in row and (row["t"] > first_fault or not faults)
        },
    )


# --- one run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run of one system in a folder; all its processes have the folder's name in their environment."""

    system: str
    folder: Path
    options: argparse.Namespace

    def measure(self, seconds: float, faults: Sequence[tuple[float, str]], chosen: random.Random) -> Figures:
        """Trains for so many seconds once all workers make steps, with these faults: seconds from then on, and which.

        Raises:
            ConfigError: it did not start; with the last line of its log.
        """
        (self.folder / "lines").mkdir(parents=True)
        given = {"model": self.options.model, "workers": self.options.workers, "spares": self.options.spares}
        given |= {"seconds": seconds + END_S, "over": self.options.over, "disk": "full_disk" in self.options.fault}
        program = [sys.executable, of_clone(PROGRAM, wanted_by="chaos").__file__, self.system, str(self.folder)]
        environment = ["env", f"DDP_CHAOS={self.folder}", "OMP_NUM_THREADS=1"]
        done, hit = list[float](), set[int]()
        with self._disk(), (self.folder / "log").open("w") as log:
            command = [*environment, *program, json.dumps(given)]
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            try:
                deadline = time.time() + START_S
                while len({rank for rank, _ in self._workers()}) < self.options.workers:
                    if self._ended(process, 0.05) or time.time() > deadline:
                        last = (self.folder / "log").read_text(errors="replace").strip().rpartition("\n")[2]
                        raise ConfigError(f"{self.system} ended, or made no step in {START_S:g} s: {last:.300}")
                begin = time.time()
                for at, fault in faults:
                    if not self._ended(process, begin + at - time.time()):
                        self._inject(fault, hit, chosen)
                    done.append(time.time())
                self._ended(process, begin + seconds - time.time())  # one that does has made no step since
                process.terminate()
                self._ended(process, END_S)
                deadline = time.time() + 5
                while (left := self._processes()) and time.time() < deadline:
                    time.sleep(0.1)
            finally:
                while alive := self._processes():
                    for pid in alive:
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    time.sleep(0.05)
                process.wait()
        lines = [
            json.loads(line)
            for file in self.folder.glob("lines/*")
            for line in file.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        return replace(figures(lines, begin, begin + seconds, done), left=len(left))

    def _ended(self, process: subprocess.Popen[bytes], seconds: float) -> bool:
        """Waits so long at most; returns True if the run has ended."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(seconds, 0.0))
        return process.returncode is not None

    def _workers(self) -> list[tuple[int, int]]:
        """Returns the rank and process id of all workers that have made a step and live."""
        alive = self._processes()
        files = [file.name.split(".") for file in self.folder.glob("lines/*") if file.stat().st_size]
        return [(int(rank), int(pid)) for rank, pid, _ in files if int(pid) in alive]

    def _processes(self) -> set[int]:
        mark, found = f"DDP_CHAOS={self.folder}\0".encode(), set()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if mark in (entry / "environ").read_bytes():
                    found.add(int(entry.name))
        return found

    def _inject(self, fault: str, hit: set[int], chosen: random.Random) -> None:
        if fault == "full_disk":
            with (self.folder / "disk" / "filler").open("wb") as filler, suppress(OSError):
                while True:
                    filler.write(bytes(1 << 20))
        victims = sorted(each for each in self._workers() if each[1] not in hit)
        wanted = [each for each in victims if each[0] == self.options.rank] or victims
        if fault in SIGNALS and wanted:
            _, pid = chosen.choice(wanted)
            hit.add(pid)
            os.kill(pid, SIGNALS[fault])

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """Mounts a small disk for what the run saves, if it is to be filled."""
        if "full_disk" not in self.options.fault:
            yield
            return
        (disk := self.folder / "disk").mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "ddp-chaos", disk]).returncode:
            raise ConfigError("--fault full_disk: this root may mount no disk, as in many containers; leave it out")
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", disk], check=True)


# --- the command ------------------------------------------------------------------------------------------------------


def main(words: Sequence[str]) -> int:
    """Compares what faults cost; returns the exit status."""
    formatted = argparse.RawDescriptionHelpFormatter
    parser = parser_of("chaos", description=__doc__, formatter_class=formatted)
    add = parser.add_argument
    about = f"{', '.join(PEERS)}: torchft with its program's defaults, and with its shortest timeouts; none (default)"
    add("--peer", type=listed(one_of((*PEERS, "none"))), default=["none"], metavar="P,P,…", help=about)
    add("--workers", type=whole(2, 64), default=3, metavar="N", help="workers of a run (default: %(default)s)")
    add("--spares", type=whole(0, 64), default=0, metavar="N", help="spares of ours (default: %(default)s)")
    about = "kill (SIGKILL), stop (SIGSTOP), leave (SIGTERM), full_disk (root); of several one is drawn each time"
    add("--fault", type=listed(one_of(FAULTS)), default=["kill"], metavar="F,F,…", help=f"{about} (default: kill)")
    add("--rank", type=whole(0, 63), metavar="R", help="of the worker (default: one at random)")
    add("--rounds", type=whole(1), default=1, metavar="N", help="runs of each (default: %(default)s)")
    add("--model", choices=MODELS, default="small-mlp", help="(default: %(default)s)")
    add("--over", choices=("memory", "sockets"), default="memory", help="how ours reduces (default: %(default)s)")
    add("--every", type=positive, metavar="S", help="seconds between faults (default: one, after a third of a run)")
    add("--for", type=positive, default=30.0, dest="seconds", metavar="S", help="of a run (default: %(default)g)")
    add("--seed", type=whole(0), default=0, metavar="N", help="of all that is random (default: %(default)s)")
    return respond(parser, parser.parse_args(words), chaos)


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    """Returns the type of a word that is one of these."""

    def read(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text:.40}: give one of {', '.join(known)}")
        return text

    return read


def chaos(options: argparse.Namespace) -> str:
    """Runs everything, and returns the table.

    Raises:
        ConfigError: an option cannot work, a package is missing, or a run fails.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the run that is going, too
    systems = ["ours", *(peer for peer in options.peer if peer != "none")]
    if any(peer.startswith("torchft") for peer in systems) and importlib.util.find_spec("torchft") is None:
        raise ConfigError("--peer torchft: torchft is not installed: pip install 'torchft==0.2.0'")
    if options.rank is not None and options.rank >= options.workers:
        raise ConfigError(f"--rank {options.rank} with --workers {options.workers}: ranks count from 0")
    if options.every is not None and options.every >= options.seconds:
        raise ConfigError(f"--every {options.every:g} with --for {options.seconds:g}: make --for longer")
    if "full_disk" in options.fault and os.geteuid():
        raise ConfigError("--fault full_disk needs root: it mounts a small disk; leave it out")
    undisturbed, runs = dict[str, Figures](), dict[str, list[Figures]]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ddp-chaos-")))
        for turn in range(options.rounds + 1):
            for system in systems:
                run = Run(system, folder / f"{system}.{turn}", options)
                chosen = random.Random(f"{options.seed} {turn}")
                if turn == 0:
                    done = undisturbed[system] = run.measure(min(options.seconds, UNDISTURBED_S), (), chosen)
                else:
                    done = run.measure(options.seconds, plan(options, chosen), chosen)
                    runs.setdefault(system, []).append(done)
                after = ", ".join(map(seconds, done.recoveries_s))
                say(f"turn {turn} of {options.rounds}: {system}{after and ': next step after '}{after}", to=sys.stderr)
    return table(undisturbed, runs)


def plan(options: argparse.Namespace, chosen: random.Random) -> list[tuple[float, str]]:
    """Returns the faults of a run: seconds from its begin, and which one."""
    every = options.every or options.seconds / 3
    number = 1 if options.every is None else int((options.seconds - 1e-9) // every)
    return [(every * (1 + at), chosen.choice(options.fault)) for at in range(number)]


def table(undisturbed: Mapping[str, Figures], runs: Mapping[str, Sequence[Figures]]) -> str:
    """Returns the lines that compare all systems: medians over runs; of counts, sums."""
    titles = "step ms,recovery s,worst,÷ ours,later s,batch,lost,repeated,steps,rate,bits,left"
    rows = [["", *titles.split(",")]]
    recoveries = {system: [s for run in each for s in run.recoveries_s] for system, each in runs.items()}
    median = {system: middle(each) for system, each in recoveries.items()}
    for system, each in runs.items():
        ours, this = median["ours"], median[system]
        worst = None if None in recoveries[system] else max(filter(None, recoveries[system]), default=0.0)
        same = [equal_bits(run.digests, undisturbed[system].digests) for run in each]
        rate = statistics.median(run.rate for run in each) / undisturbed[system].rate
        rows += [
            [
                *(system, f"{undisturbed[system].step_s * 1e3:.1f}", seconds(this), seconds(worst)),
                *(f"{this / ours:.2f}" if this and ours else "", seconds(middle([run.later_s for run in each]))),
                f"{each[0].batch} → {min(run.fewest for run in each)}",
                *(str(sum(getattr(run, name) for run in each)) for name in ("lost", "repeated", "steps_repeated")),
                *(
                    f"{rate:.2f}",
                    f"{same.count(True)} of {len(same) - same.count(None)}",
                    str(sum(run.left for run in each)),
                ),
            ]
        ]
    return "\n".join(lines_of_table(rows))


def middle(values: Sequence[float | None]) -> float | None:
    """Returns the median; None, which counts as endless, if it is that."""
    known = statistics.median_high([float("inf") if value is None else value for value in values])
    return None if known == float("inf") else known


def seconds(value: float | None) -> str:
    """Returns seconds, or that it did not happen."""
    return written(lambda known: f"{known:.2f}", value) or "never"


def equal_bits(some: Mapping[int, str], others: Mapping[int, str]) -> bool | None:
    """Returns True if both have the same digest at the last step that both have; None: there is no such step."""
    both = some.keys() & others.keys()
    return some[max(both)] == others[max(both)] if both else None
