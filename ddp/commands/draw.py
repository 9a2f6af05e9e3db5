"""Draws what happens in which round of a schedule, as text or as a picture; or, as `draw overlap`, a step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ddp.collectives.schedule import draw
from ddp.commands import overlap
from ddp.commands.command import parser_of, respond
from ddp.commands.overlap import add_picture, write_picture
from ddp.commands.schedules import add_schedule, chosen_schedule
from ddp.pictures.schedule import svg
from ddp.process.arguments import program, whole

MOST_RANKS_PICTURED = 32
RANKS_DRAWN = whole(1, 256, "a drawing has a line for each rank in each round")


def main(words: Sequence[str]) -> int:
    """Draws what the words say."""
    if words[:1] == ["overlap"]:
        return overlap.main(words[1:])
    parser = parser_of("draw", epilog=f"{program()} draw overlap --help: the timeline of a step.")
    add_schedule(parser, RANKS_DRAWN)
    add_picture(parser)
    return respond(parser, parser.parse_args(words), answer)


def answer(options: argparse.Namespace) -> str:
    """Returns the answer."""
    schedule, hosts = chosen_schedule(options)
    if options.svg is None:
        return draw(schedule.algorithm, options.num_ranks)
    if options.num_ranks > MOST_RANKS_PICTURED:
        raise ValueError(
            f"--svg with {options.num_ranks} ranks: take at most {MOST_RANKS_PICTURED}; a picture shows every "
            "chunk of every rank after every round, and a browser opens no larger one"
        )
    title = f"{options.schedule}, {options.num_ranks} ranks"
    write_picture(options.svg, svg(schedule, options.num_ranks, title=title, hosts=hosts))
    return f"{options.svg}: {title}"
