"""A failed worker's report: a file of the run's logs, from which the launcher finds the root cause."""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from ddp.comm.meeting.place import host_name
from ddp.errors import USER_ERRORS, CommunicatorBroken, PeerLost, safe_str, with_causes
from ddp.process.arguments import relative_path
from ddp.process.files import make_folder, read_own, write_whole
from ddp.process.records import json_object, made, to_json
from ddp.process.stack import users_frame


class Seat(NamedTuple):
    """A process of a launch; as text "rank 1", or "server 0", or "worker 1".

    Attributes:
        logs: the folder of the launch's logs and reports.
        rank: its number in the launch.
        servers: the number of servers, which have the first numbers; 0: all are ranks.
    """

    logs: Path
    rank: int
    servers: int = 0

    def __str__(self) -> str:
        if not self.servers:
            return f"rank {self.rank}"
        return f"server {self.rank}" if self.rank < self.servers else f"worker {self.rank - self.servers}"

    @property
    def log(self) -> Path:
        return self.logs / f"{str(self).replace(' ', '-')}.log"

    @property
    def report(self) -> Path:
        return self.logs / f"error-{str(self).replace(' ', '-')}.json"


def status_text(status: int) -> str:
    """Returns how a process without a report has ended, as text; a negative status is a signal."""
    if status < 0:
        known = -status in set(signal.Signals)
        return f"was killed by {signal.Signals(-status).name if known else f'signal {-status}'}"
    return f"exited with status {status} and left no report" if status else "has ended"


@dataclass(frozen=True, kw_only=True)
class Report:
    """A failed worker's message to its launcher.

    Attributes:
        rank, servers: see `Seat`.
        step: the step that training was in; None outside of it.
        is_secondary: this rank failed only because another one did.
        is_user_error: the message explains the error, so that no traceback is shown.
        user_line: the innermost line of the user's own code that the error went through; "" if there is none.
        time_s: seconds since 1970; orders the reports of one host.
    """

    rank: int
    type: str
    message: str
    traceback: str
    step: int | None = None
    is_secondary: bool = False
    is_user_error: bool = False
    user_line: str = ""
    servers: int = 0
    host: str = field(default_factory=host_name)
    time_s: float = field(default_factory=time.time)

    @classmethod
    def of(cls, error: BaseException, seat: Seat) -> Report:
        """Describes an exception; the training loop gives it an attribute `ddp_step`."""
        step = getattr(error, "ddp_step", None)
        return cls(
            rank=seat.rank,
            servers=seat.servers,
            type=type(error).__name__,
            message=safe_str(error),
            traceback="".join(traceback.format_exception(error)),
            step=step if isinstance(step, int) else None,
            is_secondary=_is_consequence(error),
            is_user_error=isinstance(error, USER_ERRORS),
            user_line=user_line(error),
        )

    @classmethod
    def read(cls, seat: Seat) -> Report | None:
        """Returns the report of a process, or None if it wrote none, or died while it wrote."""
        with contextlib.suppress(OSError, ValueError):
            return made(cls, json_object(read_own(seat.report)))
        return None

    def write(self, logs: Path) -> None:
        make_folder(logs)
        write_whole(Seat(logs, self.rank, self.servers).report, to_json(asdict(self), indent=1))

    def block(self) -> str:
        """Returns rank, host and step; the traceback, or the message where that explains the error; the user's line."""
        step = "" if self.step is None else f" at step {self.step}"
        body = f"{self.type}: {self.message}" if self.is_user_error else self.traceback.rstrip()
        who = str(Seat(Path(), self.rank, self.servers))
        host = self.host.removesuffix(f" as {who}")
        return "\n".join(filter(None, [f"{who} on host {host} failed{step}:", body, self.user_line]))


def user_line(error: BaseException) -> str:
    """Returns file, number and text of the innermost line of the user's code in a traceback; "" if there is none."""
    frame = users_frame(error)
    if frame is None:
        return ""
    where = f"{relative_path(Path(frame.filename))}, line {frame.lineno}, in {frame.name}"
    return f"in your code: {where}: {frame.line or ''}".rstrip(": ")


def _is_consequence(error: BaseException) -> bool:
    """Returns True if this exception, or one that caused it, says that another rank is lost."""
    return any(isinstance(each, (PeerLost, CommunicatorBroken)) for each in with_causes(error))


# --- The worker that failed first ------------------------------------------------------------------------------------
#
# Finds the worker that failed first; prints one line for each of the others, and then the root cause's block.
#
#     rank 0 stopped because rank 1 failed
#     rank 1 on host h failed at step 7:
#     Traceback …
#
# Once one worker has failed, the launcher ends its neighbours. So nearly every rank of a failed run has failed,
# and the first traceback on the screen is seldom the one that matters.


SOON_S = 10.0  # less than what the launcher grants from SIGTERM to SIGKILL


class Failure(NamedTuple):
    """The end of one worker: negative statuses are signals; seconds since 1970."""

    status: int
    time_s: float


class RootCause(NamedTuple):
    """The worker that failed first.

    Attributes:
        report: None if it died without one.
        text: a line for each other worker that failed, and last the block of this one.
    """

    rank: int
    report: Report | None
    text: str


def describe_failures(failures: Mapping[int, Failure], logs: Path, servers: int = 0) -> RootCause:
    """Returns the worker that failed first, with a text on all that failed.

    Args:
        failures: by rank, in the order of discovery; not empty.
        logs: the folder of the workers' reports and logs.
        servers: see `Seat`.
    """
    seats = {rank: Seat(logs, rank, servers) for rank in sorted(failures)}
    reports = {rank: report for rank, seat in seats.items() if (report := Report.read(seat)) is not None}
    root = _root_cause(failures, reports)
    asides = [
        f"{seat} {_aside(reports.get(rank), seats[root], reports.get(root))}"
        for rank, seat in seats.items()
        if rank != root
    ]
    block = reports[root].block() if root in reports else _death(seats[root], failures[root].status)
    return RootCause(root, reports.get(root), "\n".join([*asides, block]))


def _aside(report: Report | None, root: Seat, root_report: Report | None) -> str:
    """Returns the text on a rank that is not the root cause."""
    if report is not None and not report.is_secondary:
        return f"failed too, {report.type}: {report.message.strip().partition(chr(10))[0]}"
    if root_report is None or not root_report.is_secondary:
        return f"stopped because {root} failed"
    return "was ended by the launcher" if report is None else "stopped for the same reason"


def _root_cause(failures: Mapping[int, Failure], reports: Mapping[int, Report]) -> int:
    """Returns the rank that failed first.

    Note "who killed whom". Once one worker has failed, the launcher sends SIGTERM to the others, and SIGKILL a minute
    later. So a death by a signal other than SIGTERM is a cause only if it was seen soon after the first failure.
    """
    first_s = min([failure.time_s for failure in failures.values()] + [report.time_s for report in reports.values()])
    for rank, (status, time_s) in failures.items():
        if status < 0 and status != -signal.SIGTERM and rank not in reports and time_s < first_s + SOON_S:
            return rank
    own = [report for report in reports.values() if not report.is_secondary]
    if own:
        return min(own, key=lambda report: report.time_s).rank
    return next(iter(failures))


def _death(seat: Seat, status: int) -> str:
    """Returns the block of a worker that could not report: its signal or status, and the end of its log."""
    log, how = seat.log, f"{seat} {status_text(status)}{' (out of memory?)' if -status == signal.SIGKILL else ''}"
    tail = log.read_text(errors="replace").splitlines()[-15:] if log.is_file() else []
    return "\n".join([how, *([f"the end of {log}:", *tail] if tail else [])])


def agreed_signal(failures: Mapping[int, Failure]) -> signal.Signals | None:
    """Returns the signal on which the workers agreed to stop, if only they got it."""
    statuses = {failure.status for failure in failures.values()}
    return next((number for number in signal.Signals if statuses == {128 + number}), None)
