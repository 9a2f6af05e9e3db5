"""Chrome traces of the ranks: one of each, by torch's profiler, and all of them on one clock.

A trace has its own clock. So while it is recorded, some ranges are marks: each rank knows when they were by the
clock of its process, whose offset to that of rank 0 is measured (`compare_clocks`). All of this is in the trace itself:

    "distributedInfo": {"rank": 1, "world_size": 2, …}             torch's, by which Holistic Trace Analysis goes
    "ddpClock": {"mark": …, "mark_s": …, "error_s": …}             by which `merged` goes
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler

from ddp.comm.communicator import Communicator
from ddp.comm.connect import boot_id
from ddp.comm.objects import all_gather_object, broadcast_object
from ddp.errors import ConfigError
from ddp.process.clock import now_s
from ddp.process.files import if_possible, make_folder, read_own, scratch_folder, write_whole
from ddp.process.memory import variable_set
from ddp.process.records import damage_as_error, json_object, to_json
from ddp.process.terminal import log
from ddp.train.reports.profile import ClockOffset
from ddp.units import format_time

FOLDER = "traces"
STEP_RANGE = "ProfilerStep#"  # torch's name, by which readers of traces find the steps
CLOCK, MARK = "ddpClock", "ddp: mark"
NUM_MARKS = 5


class Trace:
    """Records each operation of this process from now on, unless another profiler records already."""

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None
        if profiler._is_profiler_enabled:
            log.warning("no trace: another profile of torch's is being recorded")
            return
        threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # those of collectives, too
        with variable_set("KINETO_LOG_LEVEL", "9"):  # else it prints that it begins and ends
            self._profile = torch.profiler.profile(experimental_config=threads)
            self._profile.start()
        marks = [self._marked(number) for number in range(NUM_MARKS)]
        self._mark = min(range(NUM_MARKS), key=lambda number: marks[number][1])
        self._at_s, self._error_s = marks[self._mark]

    def _marked(self, number: int) -> tuple[float, float]:
        """Records a mark. Returns when it was, and how far off that may be."""
        before_s = now_s()
        with profiler.record_function(f"{MARK} {number}"):
            pass
        after_s = now_s()
        return (before_s + after_s) / 2, (after_s - before_s) / 2

    def stop(self) -> None:
        """Ends the recording."""
        if self._profile is not None and profiler._is_profiler_enabled:
            self._profile.stop()

    def write(self, path: Path, clock: ClockOffset, world_size: int) -> None:
        """Writes the recorded trace.

        Args:
            clock: of this rank.
            world_size: number of the ranks whose traces are in the folder afterwards.
        """
        if self._profile is None:
            return
        about = {
            "mark": f"{MARK} {self._mark}",
            "mark_s": self._at_s + clock.offset_s,
            "error_s": self._error_s + clock.error_s,
        }
        with if_possible(path):
            self._write(path, about, world_size)

    def _write(self, path: Path, about: dict[str, Any], world_size: int) -> None:
        assert self._profile is not None
        make_folder(path.parent)
        ranks = {path.with_name(f"rank-{rank}.json") for rank in range(world_size)}
        for stale in {*path.parent.glob("rank-*.json")} - ranks:  # of an earlier run on more workers
            stale.unlink(missing_ok=True)
        with scratch_folder(path.parent, ".trace-") as scratch:
            self._profile.export_chrome_trace(str(scratch / "trace"))
            text = (scratch / "trace").read_text() if (scratch / "trace").exists() else ""
        if not text.rstrip().endswith("}"):  # torch does not say so
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_whole(path, f'{{"{CLOCK}": {to_json(about)},{text.lstrip()[1:]}')


# --- one trace of all ranks ------------------------------------------------------------------------------------------

MOST_BYTES, MOST_NAMED = 1 << 30, 8
PID_BITS, ID_BITS = 23, 40  # a process of Linux has a number below 2²²


class _Trace(NamedTuple):
    """A rank's trace as it was read.

    Attributes:
        shift_us: added to its times, gives those of rank 0's clock; error_s: how far off that may be.
    """

    rank: int
    world_size: int
    events: list[dict[str, Any]]
    shift_us: float
    error_s: float


def merged(folder: Path) -> dict[str, Any]:
    """Returns the traces of all ranks as one, on the clock of rank 0.

    Args:
        folder: RUN_DIR/traces.

    Raises:
        ConfigError: a trace is missing or damaged, or has no offset; or the clocks are not known well enough.
    """
    with damage_as_error(folder, "profile the run again"):
        return _together([_read(path) for path in sorted(folder.glob("rank-*.json"))], folder)


def _together(traces: Sequence[_Trace], folder: Path) -> dict[str, Any]:
    if not traces:
        raise ConfigError(f"{folder} holds no trace: run it with profile.steps=5")
    there = {trace.rank for trace in traces}
    if missing := list(islice((rank for rank in range(traces[0].world_size) if rank not in there), MOST_NAMED)):
        ranks = ", ".join(map(str, missing))
        raise ConfigError(f"{folder} lacks the traces of ranks {ranks}: copy them from the folder on their hosts")
    events = [event for trace in traces for event in trace.events if "dur" in event]
    steps_us = [event["dur"] for event in events if str(event.get("name")).startswith(STEP_RANGE)]
    worst = max(traces, key=lambda trace: trace.error_s)
    if not steps_us or worst.error_s * 1e6 > (step_us := median(steps_us)):
        known, step = format_time(worst.error_s), format_time(step_us / 1e6) if steps_us else "no step"
        raise ConfigError(
            f"the clock of rank {worst.rank} is known to {known}, and a step takes {step}: the order of "
            "events would be a guess; view the traces one by one"
        )
    first_us = min(event["ts"] + trace.shift_us for trace in traces for event in trace.events if "dur" in event)
    errors = {f"rank {trace.rank}": trace.error_s for trace in traces}
    return {
        "displayTimeUnit": "ms",
        CLOCK: {"error_s": errors},
        "traceEvents": [event for trace in traces for event in _moved(trace, -first_us)],
    }


def _read(path: Path) -> _Trace:
    with damage_as_error(path, "profile the run again"):
        plain = json_object(read_own(path, most=MOST_BYTES))
        info, clock, events = plain["distributedInfo"], plain.get(CLOCK), plain["traceEvents"]
        if clock is None:
            raise ConfigError(
                f"{path} has no offset to the clock of rank 0, because another program has written it: record traces "
                "with profile.steps=5"
            )
        mark = [event for event in events if event.get("name") == clock["mark"] and "dur" in event][0]  # noqa: RUF015
        shift_us = clock["mark_s"] * 1e6 - (mark["ts"] + mark["dur"] / 2)
        return _Trace(int(info["rank"]), int(info["world_size"]), events, shift_us, float(clock["error_s"]))


def _moved(trace: _Trace, by_us: float) -> Iterator[dict[str, Any]]:
    """Yields the events of a rank on the common clock, with numbers of processes and of arrows that no other has."""
    rank = trace.rank
    for event in trace.events:
        moved = dict(event)
        if "ts" in event:
            moved["ts"] = event["ts"] + trace.shift_us + by_us
        pid, number = event.get("pid"), event.get("id")
        if pid is not None:
            moved["pid"] = rank << PID_BITS | pid if isinstance(pid, int) else f"rank {rank}: {pid}"
        if isinstance(number, int):
            moved["id"] = rank << ID_BITS | number
        if event.get("ph") == "M" and event.get("name") == "process_name":
            moved["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
        if event.get("ph") == "M" and event.get("name") == "process_sort_index":
            moved["args"] = {"sort_index": rank}
        yield moved


# --- The clocks of hosts: the offset from a rank's clock to rank 0's, and how far off it may be -----------------------
#
#     rank 0      t0 ───────────╮                ╭─────── t3        Processes of one host read the same clock. Of every
#                                ╲              ╱                   other host one rank exchanges messages with rank 0,
#     other        ─ ─ ─ ─ ─ ─ ─  t1 ──────── t2                    as in NTP (RFC 5905, section 8).
#
#     offset = ((t0 − t1) + (t3 − t2)) ÷ 2        round trip = (t3 − t0) − (t2 − t1)
#
# The true offset is within half a round trip, however unequal the two ways are. So the exchange with the least round
# trip counts. Clocks drift by some 10 µs a second, so a long measurement compares them before and after.


NUM_EXCHANGES = 20
SAME = ClockOffset(offset_s=0.0, error_s=0.0)


def clock_name() -> str:
    """Returns a text that is the same in all processes that read the same clock; "" if no other process does."""
    try:
        return f"{boot_id()} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return ""


def compare_clocks(comm: Communicator) -> list[ClockOffset]:
    """Returns the offset of each rank's clock, by rank. Collective."""
    names = all_gather_object(comm, clock_name())
    firsts = {name or str(rank): rank for rank, name in reversed(list(enumerate(names)))}
    found = {firsts[names[0] or "0"]: SAME}
    for first in firsts.values():
        if first not in found and comm.rank in (0, first):
            measured = _exchanged(comm, first)
            if comm.rank == 0:
                found[first] = measured
    offsets = [found.get(firsts[name or str(rank)], SAME) for rank, name in enumerate(names)]
    plain: list[tuple[float, float]] = broadcast_object(comm, [(each.offset_s, each.error_s) for each in offsets])
    return [ClockOffset(offset_s=offset_s, error_s=error_s) for offset_s, error_s in plain]


def _exchanged(comm: Communicator, other: int) -> ClockOffset:
    """Exchanges messages between rank 0 and another one; both call it."""
    times = torch.zeros(2, dtype=torch.float64, device=comm.device)
    found = []
    for _ in range(NUM_EXCHANGES):
        if comm.rank != 0:
            comm.recv(times, 0, label="clock").tolist()  # on a GPU, the host waits
            times.copy_(torch.tensor([now_s(), 0.0], dtype=torch.float64, device="cpu"))
            times[1] = now_s()
            comm.send(times, 0, label="clock")
        else:
            t0 = now_s()
            comm.send(times, other, label="clock")
            t1, t2 = comm.recv(times, other, label="clock").tolist()
            t3 = now_s()
            trip = ClockOffset(offset_s=((t0 - t1) + (t3 - t2)) / 2, error_s=((t3 - t0) - (t2 - t1)) / 2)
            found.append(trip)
    return min(found, key=lambda each: each.error_s) if found else SAME


def between(before: ClockOffset, after: ClockOffset) -> ClockOffset:
    """Returns the offset that holds from one comparison to the next."""
    drift_s = abs(after.offset_s - before.offset_s) / 2
    error_s = max(before.error_s, after.error_s) + drift_s
    return ClockOffset(offset_s=(before.offset_s + after.offset_s) / 2, error_s=error_s)
