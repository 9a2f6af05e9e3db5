"""A mistake in the reader's solution of an exercise, and the lines of the reader's file that an error came from.

A check is a generator: it yields a line for each step that the solution has passed, and raises `Mistake` at the first
one that it has not.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

from ddp.errors import PeerLost
from ddp.process.arguments import relative_path

LOST = "lost"
SHOWN = 5  # of the first lines of a traceback, and of the last
Check = Callable[[ModuleType], Iterator[str]]


class Mistake(Exception):
    """A solution is wrong.

    Args:
        step: what was tried.
        found: what came of it, and what should have.
        hint: what may have caused it.
    """

    def __init__(self, step: str, found: str, hint: str = "") -> None:
        super().__init__("\n".join([f"{step}: {found}", *([f"hint: {hint}"] if hint else [])]))
        self.step, self.found, self.hint = step, found, hint


def raised(step: str, error: BaseException, module: ModuleType) -> Mistake | None:
    """Returns the mistake behind an exception that was raised in the reader's file; None if the file had no part in it.

    Args:
        module: the reader's file.
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:  # `raise error from error` is a ring
        chain.append(cause)
        cause = cause.__cause__
    for cause in reversed(chain):
        if isinstance(cause, Mistake):
            return cause
        frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if frame.filename == module.__file__]
        if not frames:
            continue
        where = [f"\n  {relative_path(Path(frame.filename))}, line {frame.lineno}: {frame.line}" for frame in frames]
        where = where[:SHOWN] + ["\n  …"] * (len(where) > 2 * SHOWN) + where[SHOWN:][-SHOWN:]  # an endless recursion
        if isinstance(cause, NotImplementedError):
            return Mistake("not written yet", f"{cause}{where[-1]}")
        return Mistake(step, f"{type(cause).__name__}: {cause}{''.join(where)}")
    return None


# --- mistakes that ranks in processes of their own find ---------------------------------------------------------------


def in_words(step: str, error: BaseException, module: ModuleType | None) -> tuple[str, ...]:
    """Returns the mistake behind an exception of a rank as words, which the rank can send: those of `Mistake`, and a
    fourth one, `LOST` if the exception only says that another rank is gone.

    Args:
        module: the reader's file; None if it could not be imported.
    """
    mistake = raised(step, error, module) if module is not None else None
    mistake = mistake or Mistake(step, f"{type(error).__name__}: {error}")
    return mistake.step, mistake.found, mistake.hint, LOST if isinstance(error, PeerLost) else ""


def raise_first(mistakes: Iterable[tuple[str, ...]]) -> None:
    """Raises the first mistake of these words, if there is any: rather a rank's own than that another rank is lost."""
    found = sorted(filter(None, mistakes), key=lambda each: each[3:] == (LOST,))
    if found:
        raise Mistake(*found[0][:3])
