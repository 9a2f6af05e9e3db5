"""Draws the timeline of a step: how much of the reductions does backward hide on this machine?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ddp.commands.command import add_workers, parser_of, respond
from ddp.process.arguments import Parser, positive


def main(words: Sequence[str]) -> int:
    """Trains a small network, and draws the timeline of a step."""
    parser = parser_of("draw overlap", description="Trains a small network, and draws the timeline of a step.")
    add_workers(parser)
    parser.add_argument(
        "--bucket-mb", type=positive, default=4.0, metavar="MB", help="size of a bucket, in MiB (default: %(default)s)"
    )
    add_picture(parser)
    return respond(parser, parser.parse_args(words), answer)


def answer(options: argparse.Namespace) -> str:
    """Returns the timeline, or what was drawn."""
    from ddp.pictures.timeline import TITLE, svg_of, timeline_figure, timeline_text
    from ddp.run.launch.from_python import launch

    if options.svg is not None and not options.svg.absolute().parent.is_dir():
        raise ValueError(f"cannot write {options.svg}: there is no such folder; name another file after --svg")
    measured = launch(overlap_here, options.bucket_mb, workers=options.workers, threads_per_worker=1, timeout_s=300)
    background, foreground, default = measured[0]
    if options.svg is not None:
        write_picture(options.svg, svg_of(timeline_figure(background, foreground), TITLE))
        return f"{options.svg}: a step of {options.workers} workers"
    text = timeline_text(background, foreground)
    return f"{text}\n\nBackward and reductions in ms. Here ddp reduces {default} unless it is told otherwise."


def overlap_here(bucket_mb: float) -> tuple[object, ...]:
    """Returns, as one rank of a new world, the timelines of a step."""
    import ddp
    from ddp.bench.overlap import overlap

    measured = overlap(ddp.init(device="cpu"), bucket_mb=bucket_mb)
    ddp.shutdown()
    return measured


def add_picture(parser: Parser) -> None:
    """Adds the name of a picture."""
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture instead of printing text")


def write_picture(path: Path, picture: str) -> None:
    """Writes a picture to the file that was named."""
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; name another file after --svg") from error
