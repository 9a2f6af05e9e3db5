"""Draws what happens in which round of a schedule, as text or as a picture.

`draw step` draws a step of a run that was profiled.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from statistics import median_low

from ddp.collectives.schedule import draw
from ddp.commands.command import parser_of, respond
from ddp.commands.schedules import add_schedule, chosen_schedule
from ddp.pictures.schedule import svg
from ddp.process.arguments import Parser, program, whole

MOST_RANKS_PICTURED = 32
RANKS_DRAWN = whole(1, 256, "a drawing has a line for each rank in each round")


def main(words: Sequence[str]) -> int:
    """Draws what the words say."""
    if words[:1] == ["step"]:
        return draw_step(words[1:])
    others = f"{program()} draw step --help: a step of a run; draw overlap --help: what backward hides here."
    parser = parser_of("draw", epilog=others)
    add_schedule(parser, RANKS_DRAWN)
    add_picture(parser)
    return respond(parser, parser.parse_args(words), run)


def run(options: argparse.Namespace) -> str:
    """Returns the text that the command prints."""
    schedule, hosts = chosen_schedule(options)
    if options.svg is None:
        return draw(schedule.algorithm, options.num_ranks)
    if options.num_ranks > MOST_RANKS_PICTURED:
        raise ValueError(
            f"--svg with {options.num_ranks} ranks: take at most {MOST_RANKS_PICTURED}; a picture shows every "
            "chunk of every rank after every round, and a browser opens no larger one"
        )
    title = f"{options.schedule}, {options.num_ranks} ranks"
    title += f", {schedule.num_shards} shards" if schedule.num_shards is not None else ""
    write_picture(options.svg, svg(schedule, options.num_ranks, title=title, hosts=hosts))
    return f"{options.svg}: {title}"


# --- A step of a run -------------------------------------------------------------------------------------------------


def draw_step(words: Sequence[str]) -> int:
    """Draws a step of a run that was profiled, or writes the traces of its ranks as one."""
    parser = parser_of("draw step", description="Draws where the time of a profiled step went, on each rank.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run with profile.steps=5")
    parser.add_argument("--step", type=int, metavar="N", help="number of the step (default: the one of median length)")
    add_picture(parser)
    parser.add_argument("--png", type=Path, metavar="FILE", help="the same as a PNG")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the traces of all ranks as one, for ui.perfetto.dev"
    )
    return respond(parser, parser.parse_args(words), step_answer)


def step_answer(options: argparse.Namespace) -> str:
    """Returns the drawing, or what was written."""
    from dataclasses import asdict

    from ddp.pictures.timeline import step_figure, step_text
    from ddp.train.monitor.profile import read_profile

    profile = read_profile(options.run)
    lengths = [max(rank.step_s for rank in step) for step in profile.steps]
    numbers = [step[0].step for step in profile.steps]
    index = lengths.index(median_low(lengths))
    if options.step is not None:
        if options.step not in numbers:
            raise ValueError(f"--step {options.step}: {options.run} has the steps {numbers[0]} to {numbers[-1]}")
        index = numbers.index(options.step)
    steps = [[asdict(rank) for rank in step] for step in profile.steps]
    title, written = f"{options.run.name}: {profile.model}, {profile.strategy}", []
    if options.svg is not None:
        from ddp.pictures.timeline import svg_of

        write_picture(options.svg, svg_of(step_figure(steps[index], title=title), title))
        written.append(options.svg)
    if options.png is not None:
        picture = BytesIO()
        step_figure(steps[index], title=title).savefig(picture, format="png", dpi=150)
        write_picture(options.png, picture.getvalue(), after="--png")
        written.append(options.png)
    if options.trace is not None:
        from ddp.process.records import to_json
        from ddp.train.monitor.traces import FOLDER, merged

        write_picture(options.trace, to_json(merged(options.run / FOLDER)), after="--trace")
        written.append(options.trace)
    if written:
        return f"{', '.join(map(str, written))}: step {numbers[index]} of {options.run}"
    return step_text(steps, index)


def add_picture(parser: Parser) -> None:
    """Adds the name of a picture."""
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture instead of printing text")


def write_picture(path: Path, picture: str | bytes, *, after: str = "--svg") -> None:
    """Writes a picture to the file that was named after an option."""
    try:
        path.write_bytes(picture.encode() if isinstance(picture, str) else picture)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; name another file after {after}") from error
