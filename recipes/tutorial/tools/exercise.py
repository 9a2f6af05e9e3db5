"""Checks the reader's solution of an exercise, and says what is wrong with it in the reader's terms.

    python -m ddp exercise 02                          ./02_ring.py, or else the file in recipes/tutorial/exercises/
    python -m ddp exercise 02 my_ring.py
    python -m ddp exercise schedule my_module:chain    a new all-reduce (`own_schedule.py`)

Every step that the solution has passed is a line; the first mistake is the last one. What the reader's file raises is
shown with the lines of that file alone. A file that runs on and on is ended after `DEADLINE_S`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from ddp.collectives.catalog import own_all_reduce
from ddp.collectives.schedule import Schedule
from ddp.process.invocation import program, shown
from ddp.run.launch.command_line import launch
from ddp.run.settings.address import from_address, is_address
from recipes.tutorial.tools import gradient_checks, sampler_checks, schedule_checks
from recipes.tutorial.tools.holes import FOLDER, SOURCES, holes, name_of
from recipes.tutorial.tools.mistake import Check, Mistake, raised
from recipes.tutorial.tools.own_schedule import TRAINED, Train, open_exercise

DEADLINE_S = 60.0
CHECKS: dict[str, Check] = {
    "02": schedule_checks.ring,
    "03": schedule_checks.butterfly,
    "06": gradient_checks.naive,
    "07": gradient_checks.buckets,
    "08": sampler_checks.sampler,
}


def answer(number: str, file: str | None) -> str:
    """Checks the reader's solution, and prints what it finds; ends the process if it is wrong. Returns what comes next.

    Args:
        number: of the exercise; or "schedule".
        file: the reader's; for "schedule" the address of the all-reduce, MODULE:NAME.

    Raises:
        ValueError: there is no such exercise, file or schedule.
    """
    if number != "schedule":
        number = number.zfill(2)
        if not passed(checked(number, file)):
            sys.exit(1)
        return f"solved; the library has it in ddp/{SOURCES[number]}"
    name = file or ""
    if not is_address(name):
        raise ValueError(f"schedule {name!r}: give the address of an all-reduce of yours, e.g. my_module:chain")
    schedule = own_all_reduce(from_address(name, key="schedule", folder=Path.cwd()))
    train = partial(launch, workers=TRAINED, threads_per_worker=1, timeout_s=60)
    if not passed(checked_schedule(name, schedule, train=train)):
        sys.exit(1)
    return f"train with it: {program()} train comm.algorithm={name}"


def checked(number: str, file: str | None) -> Iterator[str]:
    """Yields a line for each step that the reader's solution has passed.

    Args:
        file: the reader's; None: the one with the exercise's name, in the current folder or else beside the package.

    Raises:
        Mistake: it is wrong.
        ValueError: there is no such exercise, or no such file.
    """
    if number not in CHECKS:
        there = ", ".join(CHECKS)
        raise ValueError(f"there is no exercise {number}; there are {there}, and `schedule` for an all-reduce of yours")
    path = _found(number, file)
    yield str(shown(path))
    module = loaded(path, number)
    torch.set_num_threads(1)  # the ranks are threads already
    with deadline(path):
        yield from _ticked(CHECKS[number](module))


def checked_schedule(name: str, schedule: Schedule, *, train: Train) -> Iterator[str]:
    """Yields a line for each step that an all-reduce of the reader's has passed (`open_exercise`)."""
    module = sys.modules[name.partition(":")[0]]
    with deadline(Path(module.__file__ or ""), 2 * DEADLINE_S):  # it starts workers, too
        yield from _ticked(open_exercise(name, schedule, module, train=train))


def _ticked(lines: Iterable[str]) -> Iterator[str]:
    return (f"✓ {line}" for line in lines)


def _found(number: str, file: str | None) -> Path:
    """Returns the reader's file."""
    name = name_of(number)
    places = [Path.cwd() / name, FOLDER / name] if file is None else [Path.cwd() / file]
    for path in places:
        if path.is_file():
            return path
    if file is not None:
        raise ValueError(f"there is no file {file}; begin with a copy of recipes/tutorial/exercises/{name}")
    raise ValueError(f"there is no {name} in this folder; copy it from recipes/tutorial/exercises of the repository")


def loaded(path: Path, number: str) -> ModuleType:
    """Imports the reader's file.

    Raises:
        Mistake: it does not compile, raises, or lacks a function that the exercise is about.
    """
    name = f"ddp_exercise_{number}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path.name} is no Python file; its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for it there
    try:
        with deadline(path):
            spec.loader.exec_module(module)
    except SyntaxError as error:
        line = "" if error.lineno is None else f", line {error.lineno}"
        raise Mistake(f"{shown(Path(error.filename or path))}{line}", str(error.msg)) from None
    except (Exception, SystemExit) as error:
        raise raised(str(shown(path)), error, module) or Mistake(str(shown(path)), str(error)) from None
    for hole in holes(number):
        found: object = module
        for part in hole.function.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise Mistake(str(shown(path)), f"there is no {hole.function} in it any more", "start from a fresh copy")
    return module


@contextmanager
def deadline(path: Path, seconds: float = DEADLINE_S) -> Iterator[None]:
    """Ends the program with a sentence if the block runs longer, because the reader's file may hold an endless loop."""

    def end() -> None:
        stacks = [traceback.extract_stack(frame) for frame in sys._current_frames().values()]
        inside = [frame for stack in stacks for frame in stack if frame.filename == str(path)]
        where = f", line {inside[-1].lineno}: {inside[-1].line}" if inside else ""
        print(f"✗ still running after {seconds:g} s; does a loop never end?\n  {shown(path)}{where}", flush=True)
        os._exit(1)  # a thread that loops cannot be ended by itself

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def passed(lines: Iterable[str]) -> bool:
    """Prints the lines as they come. Returns False after a mistake, which it prints last."""
    try:
        for line in lines:
            print(line, flush=True)
    except Mistake as mistake:
        print(f"✗ {mistake}", flush=True)
        return False
    except SystemExit as end:  # raised by the reader's file
        print(f"✗ the solution calls sys.exit({end.code!r}): return instead", flush=True)
        return False
    return True
