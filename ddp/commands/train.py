"""Trains with the settings that follow, which Hydra reads; below torchrun, mpirun, …, in its processes.

As a server or worker that is started by hand (`cluster.role`) it joins the others.
In the task `evaluator` of a cluster it follows the others' run as its side-car.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import NoReturn

from ddp.comm.meeting.cluster_spec import evaluator
from ddp.comm.meeting.place import is_rank
from ddp.process.arguments import program
from ddp.run.launch import command_line as launcher
from ddp.run.launch import torchrun


def main(settings: Sequence[str]) -> NoReturn:
    """Trains, and ends the process."""
    sys.argv = [f"{program()} train", *settings]
    train()


def train() -> NoReturn:
    """Trains as the command line says, as the rank that this process is, or else with its own workers; ends it."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        launcher.main()  # which prints help or settings, and needs no cluster
    with launcher.bad_input_to(launcher.exit_with_error):
        role = launcher.take_role(sys.argv[1:])
        launcher.join_cluster(sys.argv[1:])
        as_asked = partial(torchrun.train_by_hand, role) if role else torchrun.main if is_rank() else launcher.main
        if me := evaluator():
            import_module("ddp.commands.sidecar").follow_the_others(me, sys.argv[1:])
    as_asked()
    raise AssertionError("training ends the process")
