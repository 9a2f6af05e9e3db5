"""Checks the reader's solution of an exercise, and explains the first thing that is wrong with it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ddp.commands.registry import parser_of, respond
from ddp.lab.tutorial import tool


def main(words: Sequence[str]) -> int:
    """Checks the exercise that the words name."""
    parser = parser_of("exercise")
    parser.add_argument(
        "number",
        help="02, 03, 06, 07, 08, precision, memory, bottleneck; schedule, mirrored or cluster for code of your own",
    )
    parser.add_argument("file", nargs="?", help="your file (default: the exercise's, in this folder); or MODULE:NAME")
    parser.add_argument("--begin", action="store_true", help="write the exercise's file in recipes/tutorial/exercises/")
    return respond(parser, parser.parse_args(words), run)


def run(options: argparse.Namespace) -> str:
    """Returns the answer to a solution that is right."""
    return str(tool("exercise").answer(options.number, options.file, begins=options.begin))
