"""Trains with the settings that follow, which Hydra reads; below torchrun, mpirun, …, in its processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from ddp.comm.meeting.place import is_rank, refuse_evaluator
from ddp.process.arguments import program
from ddp.run.launch import command_line as launcher
from ddp.run.launch import torchrun as under_torchrun


def main(settings: Sequence[str]) -> NoReturn:
    """Trains, and ends the process."""
    sys.argv = [f"{program()} train", *settings]
    train()


def train() -> NoReturn:
    """Trains as the command line says, as the rank that this process is, or else with workers of its own; ends it."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        launcher.main()  # which answers, and needs no cluster
    with launcher.bad_input_to(launcher.exit_with_error):
        launcher.join_cluster(sys.argv[1:])
        refuse_evaluator("train")
        as_asked = under_torchrun.main if is_rank() else launcher.main
    as_asked()
    raise AssertionError("training ends the process")
