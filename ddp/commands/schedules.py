"""Finds the schedule that `draw`, `check` and `simulate` are asked about, and the hosts that its ranks stand on."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path

from ddp.collectives.catalog import (
    BETWEEN_HOSTS,
    OVER_SHARDS,
    SCHEDULES,
    Hosts,
    Schedule,
    all_reduce_schedules,
    own_all_reduce,
    prove,
)
from ddp.collectives.cost import about_messages, equal_hosts
from ddp.errors import did_you_mean
from ddp.process.arguments import whole
from ddp.run.settings.address import from_address, is_address

RANKS_FOLLOWED = whole(1, 10_000, "some schedules take half a minute with 10,000 ranks")  # proven, or simulated
MOST_PARTS_PROVEN = 2 * 512 * 512  # chunks or messages of all ranks together: a ring of 512 takes some seconds
NAMES = [*SCHEDULES, "two_dimensional", *BETWEEN_HOSTS, *OVER_SHARDS]


def add_schedule(parser: argparse.ArgumentParser, num_ranks: Callable[[str], int]) -> None:
    """Adds the arguments that name a schedule; `num_ranks` is the type of the number of ranks."""
    parser.add_argument("schedule", help=f"one of {', '.join(NAMES)}; or MODULE:NAME, a generator of your own")
    parser.add_argument("num_ranks", type=num_ranks, help="from 1 up")
    parser.add_argument(
        "--hosts", metavar="N,N,…", help="how many ranks each host has, e.g. 2,2 (one host unless given)"
    )
    parser.add_argument(
        "--shards",
        type=whole(1, 10_000, "a proof follows each of them"),
        default=8,
        metavar="V",
        help=f"how many shards the batch has, for {', '.join(OVER_SHARDS)} (default: %(default)s)",
    )


def chosen_schedule(options: argparse.Namespace, *, per_host: int | None = None) -> tuple[Schedule, Hosts]:
    """Returns the schedule that was asked for, and the hosts that its ranks stand on.

    Args:
        per_host: ranks on each host unless --hosts says it; None: all ranks on one host.
    """
    name, num_ranks = options.schedule, options.num_ranks
    hosts = hosts_of_sizes(options.hosts, num_ranks) if options.hosts else equal_hosts(num_ranks, per_host or num_ranks)
    if is_address(name):
        schedule = own_all_reduce(from_address(name, key="schedule", folder=Path.cwd()))
        if num_parts(schedule, num_ranks) <= MOST_PARTS_PROVEN:
            prove(schedule, num_ranks, what=name)
        return schedule, hosts
    if name in OVER_SHARDS:
        if options.shards < num_ranks:
            raise ValueError(
                f"--shards {options.shards} are fewer than {num_ranks:,} ranks, some of which would have none: "
                f"give at least --shards {num_ranks}"
            )
        return OVER_SHARDS[name](options.shards), hosts
    found = {**SCHEDULES, **all_reduce_schedules(hosts)}
    if name in found:
        return found[name], hosts
    if name in BETWEEN_HOSTS:
        raise ValueError(
            f"{name} needs several hosts, one of them with several ranks: add e.g. --hosts 2,2 for 4 ranks"
        )
    if name == "two_dimensional":
        raise ValueError(f"{num_ranks} ranks fill no grid of several rows and columns: take another number, or ring")
    raise ValueError(f"there is no schedule {name!r}.{did_you_mean(name, NAMES)} There are {', '.join(NAMES)}")


def num_parts(schedule: Schedule, num_ranks: int) -> int:
    """Returns the number of chunks on all ranks together, or of messages, whichever is larger."""
    return max(num_ranks * schedule.num_chunks(num_ranks), about_messages(schedule, num_ranks))


def hosts_of_sizes(sizes: str, num_ranks: int) -> Hosts:
    """Returns the ranks of each host: "2,3" → ranks 0 and 1 on one host, 2 to 4 on another."""
    numbers = sizes.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise ValueError(f"--hosts {sizes}: give the number of ranks of each host, from 1 up, e.g. --hosts 2,2")
    starts = [0, *accumulate(int(number) for number in numbers)]
    if starts[-1] != num_ranks:
        raise ValueError(f"--hosts {sizes} are {starts[-1]} ranks, but num_ranks={num_ranks}: make them equal")
    return tuple(tuple(range(start, stop)) for start, stop in pairwise(starts))
