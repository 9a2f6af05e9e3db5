"""Reads a command line: an error is one line, and a number that cannot work is refused with the reason.

    parser = Parser(description=__doc__)
    parser.add_argument("--workers", type=whole(2, 16, "one worker alone has nothing to reduce"), default=2)

    --workers 1000000   →   bench: argument --workers: 1000000: give a whole number from 2 to 16: one worker alone …

Every number of every command has one of these types, so that no command checks one by itself.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn, TypeVar

from ddp.errors import ConfigError

Value = TypeVar("Value")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that says what was wrong and what to do."""

    def error(self, message: str) -> NoReturn:
        """Prints the line; ends the program with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def whole(least: int, most: int | None = None, why: str = "") -> Callable[[str], int]:
    """Returns the type of a whole number within these bounds.

    Args:
        most: None: there is no largest one.
        why: the reason for the bounds.
    """
    bounds = f"from {least:,} up" if most is None else f"from {least:,} to {most:,}"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:  # also for more digits than Python reads
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
    """Returns `read` as a type for argparse, which would replace the sentence of a ConfigError by one of its own."""

    def typed(text: str) -> Value:
        try:
            return read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return typed


def listed(read: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """Returns the type of several values with commas between them, each of which `read` reads."""
    return lambda text: [read(part) for part in dict.fromkeys(text.split(","))]
