"""A failed worker's report: a file of the run's logs, from which the launcher finds the root cause."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ddp.errors import (
    CheckpointError,
    CommunicatorBroken,
    ConfigError,
    Diverged,
    LoaderLost,
    PeerLost,
    ReplicaMismatch,
    UnusedParameters,
)
from ddp.process.files import make_folder, read_own, write_whole
from ddp.process.invocation import shown
from ddp.process.stack import users_frame

USER_ERRORS = (ConfigError, CheckpointError, ReplicaMismatch, Diverged, LoaderLost, UnusedParameters)
"""Errors that the message alone explains; a traceback would hide it."""


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
    host: str = field(default_factory=socket.gethostname)
    time_s: float = field(default_factory=time.time)

    @classmethod
    def of(cls, error: BaseException, *, rank: int) -> Report:
        """Describes an exception; the training loop gives it an attribute `step`."""
        step = getattr(error, "step", None)
        return cls(
            rank=rank,
            type=type(error).__name__,
            message=str(error),
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
    """Returns the innermost line of the user's own code that an exception went through, in words; "" if none."""
    frame = users_frame(error)
    if frame is None:
        return ""
    where = f"{shown(Path(frame.filename))}, line {frame.lineno}, in {frame.name}"
    return f"in your code: {where}: {frame.line or ''}".rstrip(": ")


def _is_consequence(error: BaseException | None) -> bool:
    """Returns True if this exception, or one that caused it, says that another rank is lost."""
    while error is not None:
        if isinstance(error, (PeerLost, CommunicatorBroken)):
            return True
        error = error.__cause__ or error.__context__
    return False
