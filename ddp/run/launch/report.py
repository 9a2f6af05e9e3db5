"""A failed worker's report: a file of the run's logs, from which the launcher finds the root cause."""

from __future__ import annotations

import contextlib
import json
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from ddp.comm.meeting.place import host_name
from ddp.errors import USER_ERRORS, CommunicatorBroken, PeerLost, said, with_causes
from ddp.process.arguments import shown
from ddp.process.files import make_folder, read_own, write_whole
from ddp.process.stack import users_frame


@dataclass(frozen=True, kw_only=True)
class Report:
    """A failed worker's message to its launcher.

    Attributes:
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
    host: str = field(default_factory=host_name)
    time_s: float = field(default_factory=time.time)

    @classmethod
    def of(cls, error: BaseException, *, rank: int) -> Report:
        """Describes an exception; the training loop gives it an attribute `ddp_step`."""
        step = getattr(error, "ddp_step", None)
        return cls(
            rank=rank,
            type=type(error).__name__,
            message=said(error),
            traceback="".join(traceback.format_exception(error)),
            step=step if isinstance(step, int) else None,
            is_secondary=_is_consequence(error),
            is_user_error=isinstance(error, USER_ERRORS),
            user_line=user_line(error),
        )

    @classmethod
    def read(cls, logs: Path, *, rank: int) -> Report | None:
        """Returns the report of `rank`, or None if it wrote none, or died while it wrote."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return cls(**json.loads(read_own(logs / f"error-rank-{rank}.json")))
        return None

    def write(self, logs: Path) -> None:
        make_folder(logs)
        write_whole(logs / f"error-rank-{self.rank}.json", json.dumps(asdict(self), indent=1))

    def block(self) -> str:
        """Returns rank, host and step; the traceback, or the message where that explains the error; the user's line."""
        step = "" if self.step is None else f" at step {self.step}"
        body = f"{self.type}: {self.message}" if self.is_user_error else self.traceback.rstrip()
        return "\n".join(filter(None, [f"rank {self.rank} on host {self.host} failed{step}:", body, self.user_line]))


def user_line(error: BaseException) -> str:
    """Returns file, number and text of the innermost line of the user's code in a traceback; "" if there is none."""
    frame = users_frame(error)
    if frame is None:
        return ""
    where = f"{shown(Path(frame.filename))}, line {frame.lineno}, in {frame.name}"
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
# Once one worker has failed, torchrun's engine ends its neighbours. So nearly every rank of a failed run has failed,
# and the first traceback on the screen is seldom the one that matters.


SOON_S = 10.0  # less than what the engine grants from SIGTERM to SIGKILL


class Failure(NamedTuple):
    """Says how one worker ended: negative statuses are signals; seconds since 1970, as the engine rounds them down."""

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


def describe_failures(failures: Mapping[int, Failure], logs: Path) -> RootCause:
    """Returns the worker that failed first, with what is to be said of all that failed.

    Args:
        failures: by rank, in the order of discovery; not empty.
        logs: the folder of the workers' reports and logs.
    """
    reports = {rank: report for rank in failures if (report := Report.read(logs, rank=rank)) is not None}
    root = _root_cause(failures, reports)
    lines = [_aside(rank, reports.get(rank), root, reports.get(root)) for rank in sorted(failures) if rank != root]
    block = reports[root].block() if root in reports else _death(root, failures[root].status, logs)
    return RootCause(root, reports.get(root), "\n".join([*lines, block]))


def _aside(rank: int, report: Report | None, root: int, root_report: Report | None) -> str:
    """Returns the line for a rank that is not the root cause."""
    if report is not None and not report.is_secondary:
        return f"rank {rank} failed too, {report.type}: {report.message.strip().partition(chr(10))[0]}"
    if root_report is None or not root_report.is_secondary:
        return f"rank {rank} stopped because rank {root} failed"
    return f"rank {rank} {'was ended by the launcher' if report is None else 'stopped for the same reason'}"


def _root_cause(failures: Mapping[int, Failure], reports: Mapping[int, Report]) -> int:
    """Returns the rank that failed first.

    Note "who killed whom". Once one worker has failed, the engine sends SIGTERM to the others, and SIGKILL 30 s later.
    So a death by a signal other than SIGTERM is a cause only if it was seen soon after the first failure.
    """
    first_s = min([failure.time_s for failure in failures.values()] + [report.time_s for report in reports.values()])
    for rank, (status, time_s) in failures.items():
        if status < 0 and status != -signal.SIGTERM and rank not in reports and time_s < first_s + SOON_S:
            return rank
    own = [report for report in reports.values() if not report.is_secondary]
    if own:
        return min(own, key=lambda report: report.time_s).rank
    return next(iter(failures))


def _death(rank: int, status: int, logs: Path) -> str:
    """Returns the block of a worker that could not report: its signal or status, and the end of its log."""
    if status < 0:
        name = signal.Signals(-status).name
        how = f"was killed by {name}{' (out of memory?)' if -status == signal.SIGKILL else ''}"
    else:
        how = f"exited with status {status} and left no report"
    path = logs / f"rank-{rank}.log"
    tail = path.read_text(errors="replace").splitlines()[-15:] if path.is_file() else []
    return "\n".join([f"rank {rank} {how}", *([f"the end of {path}:", *tail] if tail else [])])
