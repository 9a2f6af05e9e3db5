"""A run with parameter servers whose processes are started by hand, each a job of its own, on any host and at any time.

    server 0        compose, prepare ── "run" ──▶ the store           config and run directory, and the settings typed
    every other     ◀── "run" ── the store                            refuses settings that server 0 is not given
    each            fetches the data of its host, takes its part, and trains in this process

The words `cluster.role`, or variables, say what a process is (`comm/meeting/role.py::role_from_env`), and its arrival
which (`comm/meeting/rendezvous.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ddp.comm.meeting.role import RoleSettings, set_role
from ddp.errors import ConfigError, PeerLost, first_line
from ddp.process.arguments import relative_path
from ddp.process.terminal import say
from ddp.run.launch.command_line import bad_input_to, exit_with_error
from ddp.run.launch.report import Seat
from ddp.run.launch.torchrun import become_worker, prepare_host, prepared, train_as, typed
from ddp.run.launch.worker import leave
from ddp.run.settings.reader import from_plain


def main(me: RoleSettings) -> NoReturn:
    """Trains as a server or worker; ends the process."""
    become_worker()
    with bad_input_to(exit_with_error):
        if several := [each for each in sys.argv[1:] if each in ("-m", "--multirun")]:
            raise ConfigError(f"{several[0]}: is for a process that starts its own workers; leave cluster.role out")

        from ddp.comm.meeting.rendezvous import arrive, is_on_loopback
        from ddp.comm.opening import WARN_S
        from ddp.comm.session import ABORT_S
        from ddp.run.launch.engine import ON_LOOPBACK

        alone = is_on_loopback(me.address)  # then no process outside of this host has to reach the others
        for name, interface in ON_LOOPBACK.items() if alone else ():
            os.environ.setdefault(name, interface)
        try:
            mine, run = arrive(me, partial(_prepared, me, on_one_host=alone), warn_s=WARN_S, abort_s=ABORT_S)
        except PeerLost as error:
            say(f"{me.job}: {first_line(error)}", to=sys.stderr)
            leave(1)
        if mine.served is None:
            _refuse_other_settings(str(mine), run)
    if mine.served is None and prepare_host(run):
        sys.exit(2)
    config, run_dir = from_plain(run["config"]), Path(run["run_dir"])
    number = mine.index + (mine.num_servers if mine.job == "worker" else 0)
    if number:
        log = relative_path(Seat(run_dir / "logs", number, mine.num_servers).log)
        say(f"{mine} of {relative_path(run_dir)}/; it writes to {log}")
    train_as(number, config, run_dir, play=partial(set_role, mine))


def _prepared(me: RoleSettings, *, on_one_host: bool) -> dict[str, Any]:
    """Prepares the run on server 0. Returns what the other processes have to know; ends the process after an error."""
    counts: dict[str, Any] = {"workers": me.num_workers, "local_workers": None if on_one_host else 1}
    sent = prepared(**counts, servers=me.num_servers or 1)
    if "error" in sent:
        sys.exit(2)
    return {**sent, "workers": sent["config"]["cluster"]["workers"], "typed": typed()}


def _refuse_other_settings(who: str, run: Mapping[str, Any]) -> None:
    """Raises ConfigError if this process is given settings that server 0, which composes, is not."""
    if "config" not in run:
        raise ConfigError(f"{who}: server 0 is a program of its own; start this process as that program, too")
    if strange := [each for each in typed() if each not in run["typed"]]:
        raise ConfigError(
            f"{who}: {' '.join(strange)}: a run has the settings of server 0; give them there, or nowhere"
        )
