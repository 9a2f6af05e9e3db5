"""Questions from the command line.

python -m ddp draw ring 4        the rounds of a schedule, as text
python -m ddp check ring 4       proves it, and shows what each chunk becomes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ddp.collectives.catalog import SCHEDULES
from ddp.collectives.draw import draw
from ddp.collectives.schedule import check


def main(argv: Sequence[str]) -> int:
    """Answers one question; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ddp", description="Questions about collectives.")
    parser.add_argument("question", choices=["draw", "check"])
    parser.add_argument("schedule", choices=sorted(SCHEDULES))
    parser.add_argument("num_ranks", type=int, help="from 1 up")
    options = parser.parse_args(argv)
    if options.num_ranks < 1:
        parser.error(f"num_ranks={options.num_ranks}: a schedule needs at least one rank")
    schedule = SCHEDULES[options.schedule]
    if options.question == "draw":
        print(draw(schedule.algorithm, options.num_ranks))
        return 0
    num_chunks = schedule.num_chunks(options.num_ranks)
    proof = check(schedule.algorithm, options.num_ranks, goal=schedule.goal, num_chunks=num_chunks)
    print(
        f"{options.schedule} with {options.num_ranks} ranks: proven, {proof.num_rounds} rounds ({schedule.goal.value})"
    )
    for chunk, expression in enumerate(proof.expressions):
        print(f"  chunk {chunk} = {expression}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
