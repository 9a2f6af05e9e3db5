"""Parses a command line: an error is one line, and an impossible number is refused with the reason.

    parser = Parser(description=__doc__)
    parser.add_argument("--workers", type=whole(2, 16, "one worker alone has nothing to reduce"), default=2)

    --workers 1000000   →   bench: argument --workers: 1000000: give a whole number from 2 to 16: one worker alone …

Every number of every command has one of these types, so no command checks its own numbers.

A command in a message begins with the words that the user typed (below).
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ddp.errors import ConfigError, printable
from ddp.process.files import at_home

Value = TypeVar("Value")

OTHER_TYPES = re.compile(r"null|true|false|[+-]?(nan|inf)|[\d._e+-]+", re.IGNORECASE)
"""Texts that Hydra reads as another type."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with the fault and the remedy. A path may begin with ~."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register("type", Path, lambda text: at_home(Path(text)))

    def error(self, message: str) -> NoReturn:
        """Prints the line; ends the program with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(printable(message), file)


def whole(least: int, most: int | None = None, why: str = "") -> Callable[[str], int]:
    """Returns the type of a whole number within these bounds.

    Args:
        most: None: no upper bound.
        why: the reason for the bounds.
    """
    bounds = f"from {least:,} up" if most is None else f"from {least:,} to {most:,}"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:  # also for more digits than Python parses
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{text:.40}: give a whole number {bounds}{why and ': '}{why}")
        return number

    return read


def positive(text: str) -> float:
    """Returns a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text:.40}: give a number above 0")
    return number


def checked(read: Callable[[str], Value]) -> Callable[[str], Value]:
    """Returns `read` as a type for argparse, which would otherwise replace the message of a ConfigError."""

    def typed(text: str) -> Value:
        try:
            return read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return typed


def listed(read: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """Returns the type of a comma-separated list of values, each parsed by `read`."""
    return lambda text: [read(part) for part in dict.fromkeys(text.split(","))]


# --- Commands as the user would type them ----------------------------------------------------------------------------
# A command that this package prints begins as the user's own did:
#
#     scripts/ddp train …             the script passes its name in DDP_COMMAND
#     python recipes/train.py …       from the interpreter's `sys.orig_argv`; `python -m ddp train …` as well
#     torchrun …                      python -m ddp train …, because torchrun's own arguments do not reach its processes


def program() -> str:
    """Returns the words that the user types before the name of a command."""
    return shlex.quote(os.environ.get("DDP_COMMAND", "")) if "DDP_COMMAND" in os.environ else "python -m ddp"


def train_command(*settings: str) -> str:
    """Returns a command line that trains with these settings, as the user would type it in this folder."""
    begin = len(sys.orig_argv) - len(sys.argv[1:])
    is_changed = [*map(_bare, sys.orig_argv[begin:])] != [*map(_bare, sys.argv[1:])]
    is_typed = not ("DDP_COMMAND" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ or is_changed)
    typed = shlex.join(sys.orig_argv[:begin]) if is_typed else f"{program()} train"
    return " ".join([typed, *map(shlex.quote, settings)])


def typed_settings(*without: str) -> list[str]:
    """Returns the settings of this process's command line, without those of some keys, and without Hydra's own.

    A key includes all keys below it.
    """
    settings = [argument.lstrip("+") for argument in sys.argv[1:] if "=" in argument and not argument.startswith("-")]
    settings = [re.sub(r'^([\w.]+=)"(.*)"$', r"\1\2", each) for each in settings]  # the launcher quotes them again
    keys = tuple(f"{key}{end}" for key in without for end in "=.")
    return [each for each in settings if not each.startswith(("hydra.", *keys))]


def _bare(setting: str) -> str:
    """Returns a setting without the launcher's additions for Hydra."""
    return setting.lstrip("+").replace('"', "")


def setting_for(run_dir: Path, name: str) -> str:
    """Returns the command-line setting of this run's folder. `name`: its run.name."""
    if run_dir.resolve() == Path("runs", name).resolve():
        return f"run.name={quoted(name)}"
    return f"hydra.run.dir={quoted(str(relative_path(run_dir)))}"


def relative_path(folder: Path) -> Path:
    """Returns the folder relative to the current one if it lies inside."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def quoted(value: str) -> str:
    """Returns a text for Hydra: in quotes if Hydra would read another type, or could not parse it."""
    if re.fullmatch(r"[\w/.+@%-]+", value, re.ASCII) and not OTHER_TYPES.fullmatch(value):
        return value
    escaped = re.sub(r'(\\+)(?="|$)', r"\1\1", value).replace('"', r"\"")
    return f'"{escaped}"'
