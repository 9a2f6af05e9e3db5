"""Leaves the last calls of a rank in RUN_DIR/logs/calls-rank-R.jsonl when a run fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddp.comm.communicator import Communicator
from ddp.errors import USER_ERRORS
from ddp.process.files import if_possible, make_folder, write_whole
from ddp.process.records import to_json


@contextmanager
def calls_left(run_dir: Path | None, comm: Communicator) -> Iterator[None]:
    """Begins a block after whose failure this rank's last calls are in a file, unless the error says it all.

    Args:
        run_dir: None: nothing is written.
    """
    try:
        yield
    except Exception as error:
        if run_dir is not None and not isinstance(error, USER_ERRORS):
            path = run_dir / "logs" / f"calls-rank-{comm.rank}.jsonl"
            with if_possible(path):
                make_folder(path.parent)
                write_whole(path, "".join(f"{to_json(call)}\n" for call in comm.recent_calls()))
        raise
