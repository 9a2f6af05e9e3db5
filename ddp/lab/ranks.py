"""Asks one question of new ranks on this host, for the commands that measure within seconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ddp.process.arguments import Parser, whole
from ddp.run.settings.checks import most_workers


def at_ranks(work: Callable[[Any], Any], workers: int, *, threads: int | None = 1, timeout_s: float, **how: Any) -> Any:
    """Calls `work(comm)` at all ranks of a new world on this host; returns rank 0's result. `how`: of `ddp.init`."""
    from ddp.run.launch import from_python

    question = partial(joined, work, **how)
    return from_python.launch(question, workers=workers, threads_per_worker=threads, timeout_s=timeout_s)[0]


def joined(work: Callable[[Any], Any], **how: Any) -> Any:
    """Calls `work` with the communicator of the ranks of which this process is one."""
    from ddp.comm.session import init, shutdown

    result = work(init(**how))
    shutdown()
    return result


def add_workers(parser: Parser) -> None:
    """Adds the number of ranks that a command starts."""
    parser.add_argument(
        "--workers",
        type=whole(2, most_workers(), "one worker alone has nothing to reduce, and many oversubscribe the cores"),
        default=2,
        help="ranks to start on this host (default: %(default)s)",
    )
