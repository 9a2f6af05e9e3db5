"""Questions from the command line.

python -m ddp draw ring 4                        the rounds of a schedule, as text
python -m ddp draw ring 4 --svg ring.svg         … as a picture
python -m ddp draw hierarchical 6 --hosts 3,3    … of one that needs to know which ranks share a host
python -m ddp check ring 4                       proves it, and shows what each chunk becomes

A question is one function below: it adds its subcommand, and says how that is answered.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ddp.collectives.catalog import BETWEEN_HOSTS, SCHEDULES, Hosts, Schedule, all_reduce_schedules
from ddp.collectives.draw import draw, svg

if TYPE_CHECKING:
    Questions = argparse._SubParsersAction["Parser"]

MOST_RANKS_SHOWN = 64


class Parser(argparse.ArgumentParser):
    """Says in one line what was wrong and what to do."""

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str]) -> int:
    """Answers one question; returns the exit status."""
    parser = Parser(prog="python -m ddp", description="Questions about collectives.")
    questions = parser.add_subparsers(metavar="question", required=True, dest="question")
    for add_question in (draw_question, check_question):
        add_question(questions)
    options = parser.parse_args(argv)
    try:
        print(options.answer(options), flush=True)
    except ValueError as error:
        questions.choices[options.question].error(str(error))
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; leave nothing to be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def draw_question(questions: Questions) -> None:
    """What happens in which round?"""

    def answer(options: argparse.Namespace) -> str:
        schedule, hosts = chosen_schedule(options)
        if options.svg is None:
            return draw(schedule.algorithm, options.num_ranks)
        title = f"{options.schedule}, {options.num_ranks} ranks"
        try:
            options.svg.write_text(svg(schedule, options.num_ranks, title=title, hosts=hosts), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write {options.svg}: {error.strerror}; name another file after --svg") from error
        return f"{options.svg}: {title}"

    parser = questions.add_parser("draw", help="the rounds of a schedule, as text or as a picture")
    add_schedule(parser)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture instead of printing text")
    parser.set_defaults(answer=answer)


def check_question(questions: Questions) -> None:
    """Is it right, and in which order are the contributions added?"""

    def answer(options: argparse.Namespace) -> str:
        schedule, _ = chosen_schedule(options)
        proof = schedule.check(options.num_ranks)
        lines = [
            f"{options.schedule} with {options.num_ranks} ranks: proven ({schedule.goal.value})",
            f"  rounds: {proof.num_rounds}; a rank sends at most {max(proof.messages_sent)} messages, "
            f"{float(proof.busiest):.4g} times the buffer",
        ]
        if schedule.goal.adds:
            lines.append(f"  order of additions: {'canonical' if proof.canonical else 'not canonical'}")
        if options.num_ranks > MOST_RANKS_SHOWN:
            return "\n".join([*lines, f"  (what chunks become is shown up to {MOST_RANKS_SHOWN} ranks)"])
        of = "" if schedule.goal.adds else "of rank "
        return "\n".join(lines + [f"  chunk {chunk} = {of}{part}" for chunk, part in enumerate(proof.expressions)])

    parser = questions.add_parser("check", help="proves a schedule, and shows what each chunk becomes")
    add_schedule(parser)
    parser.set_defaults(answer=answer)


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a schedule."""
    parser.add_argument("schedule", help=f"one of {', '.join([*SCHEDULES, 'two_dimensional', *BETWEEN_HOSTS])}")
    parser.add_argument("num_ranks", type=int, help="from 1 up")
    parser.add_argument(
        "--hosts", metavar="N,N,…", help="how many ranks each host has, e.g. 2,2 (one host unless given)"
    )


def chosen_schedule(options: argparse.Namespace) -> tuple[Schedule, Hosts]:
    """The schedule that was asked for, and the hosts that its ranks stand on."""
    name, num_ranks = options.schedule, options.num_ranks
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}: a schedule needs at least one rank")
    hosts = hosts_of_sizes(options.hosts, num_ranks) if options.hosts else (tuple(range(num_ranks)),)
    found = {**SCHEDULES, **all_reduce_schedules(hosts)}
    if name in found:
        return found[name], hosts
    if name in BETWEEN_HOSTS:
        raise ValueError(
            f"{name} needs several hosts, one of them with several ranks: add e.g. --hosts 2,2 for 4 ranks"
        )
    if name == "two_dimensional":
        raise ValueError(f"{num_ranks} ranks fill no grid of several rows and columns: take another number, or ring")
    names = [*SCHEDULES, "two_dimensional", *BETWEEN_HOSTS]
    guess = [f"did you mean {match}? " for match in get_close_matches(name, names, n=1)]
    raise ValueError(f"there is no schedule {name!r}; {''.join(guess)}There are {', '.join(names)}")


def hosts_of_sizes(sizes: str, num_ranks: int) -> Hosts:
    """ "2,3" → ranks 0 and 1 on one host, 2 to 4 on another."""
    numbers = sizes.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise ValueError(f"--hosts {sizes}: give the number of ranks of each host, from 1 up, e.g. --hosts 2,2")
    starts = [0, *accumulate(int(number) for number in numbers)]
    if starts[-1] != num_ranks:
        raise ValueError(f"--hosts {sizes} are {starts[-1]} ranks, but num_ranks={num_ranks}: make them equal")
    return tuple(tuple(range(start, stop)) for start, stop in pairwise(starts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
