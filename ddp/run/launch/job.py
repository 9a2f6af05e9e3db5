"""The process of one job of a sweep or a search: takes its cores, follows its parent, and runs one command line.

python -P …/bootstrap.py ddp.run.launch.job --parent PID --cores 0,1 --typed COMMAND RUN_DIR -- SETTING …
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ddp.errors import ConfigError
from ddp.process.files import hold
from ddp.process.terminal import ended_by_ctrl_c
from ddp.run.launch import command_line
from ddp.run.launch.engine import SHUTDOWN_S, paused_together
from ddp.run.launch.worker import ORPHAN_GRACE_S, follow_parent


def main(argv: Sequence[str]) -> NoReturn:
    """Runs one job; ends with its status."""
    parser = argparse.ArgumentParser(prog="ddp.run.launch.job")
    parser.add_argument("--parent", type=int, required=True, help="process id of the sweep")
    parser.add_argument("--cores", default="", help="numbers of the cores to use; none: all")
    parser.add_argument("--typed", required=True, help="what the user would type before the settings")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("words", nargs="*", help="settings, and Hydra's own options")
    options = parser.parse_args(argv)

    with ended_by_ctrl_c():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # which the sweep has kept from the interpreter
    follow_parent(options.parent, grace_s=ORPHAN_GRACE_S + SHUTDOWN_S)
    if options.cores:
        os.sched_setaffinity(0, map(int, options.cores.split(",")))
    sys.orig_argv[:] = [*shlex.split(options.typed), *options.words]
    sys.argv[1:] = options.words
    with paused_together():  # from the beginning, because the kernel pauses no session that has no terminal
        _wait_for_orphans(options.run_dir)
        command_line.main()


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
