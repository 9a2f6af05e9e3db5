"""Leaves the last calls of a rank in RUN_DIR/logs/calls-rank-R.jsonl when a run fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddp.comm.communicator import Communicator
from ddp.errors import USER_ERRORS, ConfigError
from ddp.process.files import make_folder, write_whole
from ddp.process.log import log


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
            _write(run_dir / "logs" / f"calls-rank-{comm.rank}.jsonl", comm)
        raise


def _write(path: Path, comm: Communicator) -> None:
    try:
        make_folder(path.parent)
        write_whole(path, "".join(f"{json.dumps(call)}\n" for call in comm.recent_calls()))
    except (OSError, ConfigError) as error:  # such as a full disk, which may have ended the run
        log.warning("the last calls are not in %s: %s", path, error)
