"""Checks the reader's solution of an exercise, and says what is wrong with it in the reader's terms.

    scripts/ddp exercise 02 --begin                  writes recipes/tutorial/exercises/02_ring.py, with holes to fill
    scripts/ddp exercise 02                          checks ./02_ring.py, or else the file in that folder
    scripts/ddp exercise 02 my_ring.py
    scripts/ddp exercise schedule my_module:chain    a new all-reduce (`own_schedule.py`)
    scripts/ddp exercise mirrored my_model:train     a training on two workers (`own_training.py`); also: cluster
    scripts/ddp exercise precision --begin           writes a program to be changed (`PROGRAMS`); then as 02

Every step that the solution has passed is a line; the first mistake is the last one. What the reader's file raises is
shown with the lines of that file alone. A file that runs on and on is ended after `DEADLINE_S`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from ddp.commands.registry import parser_of, respond
from ddp.process.arguments import program, relative_path
from recipes.tutorial.tools import (
    bottleneck_checks,
    gradient_checks,
    judged_by_tests,
    memory_checks,
    own_schedule,
    own_training,
    precision_checks,
    schedule_checks,
)
from recipes.tutorial.tools.holes import FOLDER, SOURCES, begin, cut, holes, name_of
from recipes.tutorial.tools.mistake import Check, Mistake, raised

DEADLINE_S = 120.0
CHECKS: dict[str, Check] = {
    "02": schedule_checks.ring,
    "03": schedule_checks.butterfly,
    "06": gradient_checks.naive,
    "07": gradient_checks.buckets,
    "08": partial(judged_by_tests.passes, proofs=judged_by_tests.SAMPLER),
    "precision": precision_checks.mixed,
    "memory": memory_checks.accumulation,
    "bottleneck": bottleneck_checks.bottleneck,
}
BEGINNINGS = FOLDER.parent / "programs"
PROGRAMS = {  # that are right, and to be changed: by name, the function that is called, and what comes next
    "precision": ("train", 'ddp.fit(…, precision="bf16") does it: ddp/optim/precision.py, ddp/train/steps/step.py'),
    "memory": ("step", "ddp.fit(…, batches=ddp.Batches(micro_size=8)) does it: ddp/train/steps/step.py"),
    "bottleneck": ("train", "--begin draws another one, once this file is moved away"),
}


def main(words: Sequence[str]) -> int:
    """Checks the exercise that the words name."""
    parser = parser_of("exercise")
    parser.add_argument(
        "number",
        help="02, 03, 06, 07, 08, precision, memory, bottleneck; schedule, mirrored or cluster for code of your own",
    )
    parser.add_argument("file", nargs="?", help="your file (default: the exercise's, in this folder); or MODULE:NAME")
    parser.add_argument("--begin", action="store_true", help="write the exercise's file in recipes/tutorial/exercises/")
    return respond(parser, parser.parse_args(words), lambda asked: answer(asked.number, asked.file, begins=asked.begin))


def answer(number: str, file: str | None, *, begins: bool = False) -> str:
    """Checks the reader's solution, and prints what it finds; ends the process if it is wrong. Returns what comes next.

    Args:
        number: of the exercise, or its name.
        file: the reader's; for those with a name the address of the all-reduce or the training, MODULE:NAME.
        begins: write the exercise's file in the place of checking it.

    Raises:
        ValueError: there is no such exercise, file or schedule.
    """
    sys.dont_write_bytecode = True  # else a folder __pycache__ would stand beside the reader's file
    if number == "schedule":
        schedule, module = own_schedule.of_address(name := file or "")
        lines = ended_by_deadline(own_schedule.open_exercise(name, schedule, module), Path(module.__file__ or ""))
        solved = own_schedule.what_next(name)
    elif number in own_training.WORDS:
        lines = (f"✓ {line}" for line in own_training.training(file or "", number))
        solved = own_training.NEXT[number]
    elif (number := number.zfill(2)) not in CHECKS:
        raise ValueError(
            f"there is no exercise {number}; there are {', '.join(CHECKS)}, `schedule` for an all-reduce of yours, and "
            "`mirrored` and `cluster` for a training of yours"
        )
    elif begins:
        to_do = "what to change is said" if number in PROGRAMS else "write what is missing"
        path = relative_path(begin(number, text_of(number)))
        return f"{path}: {to_do} there; `{program()} exercise {number}` checks it"
    else:
        next_one = PROGRAMS[number][1] if number in PROGRAMS else f"the library has it in ddp/{SOURCES[number]}"
        lines, solved = checked(number, file), f"solved; {next_one}"
    if not passed(lines):
        sys.exit(1)
    return solved


def text_of(number: str) -> str:
    """Returns the file that a reader begins with."""
    if number == "bottleneck":
        return bottleneck_checks.text_of(secrets.randbelow(1_000_000))
    if number in PROGRAMS:
        return (BEGINNINGS / name_of(number)).read_text(encoding="utf-8")
    return cut(number)


def checked(number: str, file: str | None) -> Iterator[str]:
    """Yields the reader's file, and a line for each step that it has passed.

    Args:
        file: the reader's; None: the one with the exercise's name, in the current folder or else in `FOLDER`.

    Raises:
        Mistake: it is wrong.
        ValueError: there is no such file.
    """
    name = name_of(number)
    places = [Path.cwd() / name, FOLDER / name] if file is None else [Path.cwd() / file]
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        write = f"`{program()} exercise {number} --begin` writes the one to begin with"
        raise ValueError(f"there is no file {file or name}: {write}")
    yield str(relative_path(path))
    torch.set_num_threads(1)  # the ranks are threads already
    yield from ended_by_deadline(check(number, path), path)


def check(number: str, path: Path, by: Check | None = None) -> Iterator[str]:
    """Yields a line for each step that the file passes, by the exercise's own check or another one."""
    module = loaded(path, number)
    with in_place_of_the_library(module, number) if number in SOURCES else nullcontext():
        yield from (by or CHECKS[number])(module)


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
        spec.loader.exec_module(module)
    except SyntaxError as error:
        line = "" if error.lineno is None else f", line {error.lineno}"
        raise Mistake(f"{relative_path(Path(error.filename or path))}{line}", str(error.msg)) from None
    except (Exception, SystemExit) as error:
        raise raised(str(relative_path(path)), error, module) or Mistake(str(relative_path(path)), str(error)) from None
    functions = [hole.function for hole in holes(number)] if number in SOURCES else [PROGRAMS[number][0]]
    for function in functions:
        found: object = module
        for part in function.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise Mistake(str(relative_path(path)), f"there is no {function} in it any more", "start from a fresh copy")
    return module


@contextmanager
def in_place_of_the_library(module: ModuleType, number: str) -> Iterator[None]:
    """Gives what the reader's file defines to all who import the library's file, or have imported from it."""
    name = "ddp." + SOURCES[number].removesuffix(".py").replace("/", ".")
    library = importlib.import_module(name)
    defined = {key: value for key, value in vars(library).items() if getattr(value, "__module__", "") == name}
    borrowers = [each for each in sys.modules.values() if each.__name__.startswith("ddp.") and each is not library]
    taken = [(each, key) for each in borrowers for key in defined if vars(each).get(key) is defined[key]]
    sys.modules[name] = module
    try:
        for each, key in taken:
            setattr(each, key, getattr(module, key, defined[key]))
        yield
    finally:
        sys.modules[name] = library
        for each, key in taken:
            setattr(each, key, defined[key])


def ended_by_deadline(lines: Iterator[str], path: Path, seconds: float = DEADLINE_S) -> Iterator[str]:
    """Yields the lines; ends the program if they take longer, because the reader's file may loop endlessly."""

    def end() -> None:
        stacks = [traceback.extract_stack(frame) for frame in sys._current_frames().values()]
        inside = [frame for stack in stacks for frame in stack if frame.filename == str(path)]
        where = f", line {inside[-1].lineno}: {inside[-1].line}" if inside else ""
        at = f"{relative_path(path)}{where}"
        print(f"✗ still running after {seconds:g} s; a loop may never end\n  {at}", flush=True)
        os._exit(1)  # a thread that loops cannot be ended by itself

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        for line in lines:
            yield f"✓ {line}"
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
