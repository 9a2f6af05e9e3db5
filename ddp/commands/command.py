"""Gives every command a parser that is called as the user calls it, and one way to answer or to refuse."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from ddp.collectives.schedule import ScheduleError
from ddp.commands.registry import COMMANDS
from ddp.errors import WorkersFailed
from ddp.process.arguments import Parser, program, whole
from ddp.process.terminal import say
from ddp.run.settings.checks import most_workers
from ddp.units import parse_delay, parse_rate


def parser_of(name: str, **options: Any) -> Parser:
    """Returns the parser of a command, described as in the list of commands; other keywords are argparse's."""
    _, about = COMMANDS.get(name, ("", ""))
    described = {"description": f"{about[0].upper()}{about[1:]}."} if about else {}
    return Parser(prog=f"{program()} {name}", **described | options)


def respond(parser: Parser, options: argparse.Namespace, run: Callable[[argparse.Namespace], str]) -> int:
    """Prints an answer, or in one line why there is none. Returns the exit status."""
    try:
        if text := run(options):  # one rank of many says it
            say(text)
    except WorkersFailed as error:  # first, because it is also of the type of its cause
        say(error, to=sys.stderr)
        return 1
    except MemoryError:
        parser.error("what is asked for does not fit into the memory of this host")
    except (ValueError, ScheduleError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        say("stopped by SIGINT before there was an answer", to=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader, such as `head`, has left; nothing must be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def add_workers(parser: Parser) -> None:
    """Adds the number of ranks that a command starts."""
    parser.add_argument(
        "--workers",
        type=whole(2, most_workers(), "one worker alone has nothing to reduce, and many take turns on the cores"),
        default=2,
        help="ranks to start on this host (default: %(default)s)",
    )


def rate_of(text: str) -> float:
    """Returns bits per second."""
    rate = parse_rate(text)
    if rate is None:
        raise argparse.ArgumentTypeError(f"{text:.40}: give bits per second, e.g. 10gbit or 100mbit")
    return rate


def time_of(text: str) -> float:
    """Returns seconds."""
    seconds = parse_delay(text)
    if seconds is None:
        raise argparse.ArgumentTypeError(f"{text:.40}: give a time, e.g. 20us or 5ms")
    return seconds
