"""Proves a schedule: is it right, and in which order does it add the contributions?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ddp.commands.command import parser_of, respond
from ddp.commands.schedules import MOST_PARTS_PROVEN, RANKS_FOLLOWED, add_schedule, chosen_schedule, num_parts
from ddp.units import counted

MOST_RANKS_SHOWN = 64


def main(words: Sequence[str]) -> int:
    """Proves the schedule that the words name."""
    parser = parser_of("check")
    add_schedule(parser, RANKS_FOLLOWED)
    return respond(parser, parser.parse_args(words), run)


def run(options: argparse.Namespace) -> str:
    """Returns the text that the command prints."""
    schedule, _ = chosen_schedule(options)
    if (parts := num_parts(schedule, options.num_ranks)) > MOST_PARTS_PROVEN:
        raise ValueError(
            f"{options.schedule} with {options.num_ranks:,} ranks: its proof follows {parts:,} chunks or messages "
            f"of all ranks; take so few ranks that there are at most {MOST_PARTS_PROVEN:,}, in a ring 512"
        )
    proof = schedule.check(options.num_ranks)
    who = counted(options.num_ranks, "rank")
    if schedule.num_shards is not None:
        who += f" and {counted(schedule.num_shards, 'shard')}"
    lines = [
        f"{options.schedule} with {who}: proven ({schedule.goal.value})",
        f"  rounds: {proof.num_rounds}; a rank sends at most {max(proof.messages_sent)} messages, "
        f"{float(proof.busiest):.4g} times the buffer",
    ]
    if schedule.goal.adds:
        lines.append(f"  order of additions: {'canonical' if proof.canonical else 'not canonical'}")
    if options.num_ranks > MOST_RANKS_SHOWN:
        return "\n".join([*lines, f"  (what chunks become is shown up to {MOST_RANKS_SHOWN} ranks)"])
    of = "" if schedule.goal.adds else "of rank "
    return "\n".join(lines + [f"  chunk {chunk} = {of}{part}" for chunk, part in enumerate(proof.expressions)])
