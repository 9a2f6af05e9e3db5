"""Commands about schedules: `draw`, `check` and `simulate`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise
from operator import call
from pathlib import Path
from typing import Any

import ddp.collectives.pipelines as pipelines
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
from ddp.collectives.cost import Link, Network, about_messages, bus_bandwidth, equal_hosts
from ddp.collectives.picture import svg
from ddp.collectives.pipelines import ALIASES, PIPELINES, Costs
from ddp.collectives.schedule import Goal, Proof, draw
from ddp.collectives.simulate import simulate, whole_chunks
from ddp.commands.registry import parser_of, rate_of, respond, time_of
from ddp.errors import did_you_mean
from ddp.process.arguments import Parser, checked, positive, program, whole
from ddp.run.settings.address import from_address, is_address
from ddp.units import counted, format_bandwidth, format_size, format_time, parse_size

RANKS_FOLLOWED = whole(1, 10_000, "some schedules take half a minute with 10,000 ranks")  # proven, or simulated
MICRO_BATCHES = SHARDS = 8
MOST_PARTS_PROVEN = 2 * 512 * 512  # chunks or messages of all ranks together: a ring of 512 takes some seconds
NAMES = [*SCHEDULES, "two_dimensional", *BETWEEN_HOSTS, *OVER_SHARDS, *PIPELINES, *ALIASES]

# --- the schedule that the words name, and the hosts of its ranks ----------------------------------------------------


def add_schedule(parser: argparse.ArgumentParser, num_ranks: Callable[[str], int]) -> None:
    """Adds the arguments that name a schedule; `num_ranks` is the type of the number of ranks."""
    parser.add_argument("schedule", help=f"one of {', '.join(NAMES)}; or MODULE:NAME, a generator of your own")
    parser.add_argument("num_ranks", type=num_ranks, help="from 1 up; of a pipeline, the number of stages")
    parser.add_argument(
        "--hosts", metavar="N,N,…", help="how many ranks each host has, e.g. 2,2 (one host unless given)"
    )
    parser.add_argument(
        "--shards",
        type=whole(1, 10_000, "a proof follows each of them"),
        metavar="V",
        help=f"how many shards the batch has, for {', '.join(OVER_SHARDS)} (default: {SHARDS})",
    )
    parser.add_argument(
        "--micro",
        type=whole(1, 10_000, "a proof follows each of them"),
        metavar="M",
        help=f"how many micro-batches a batch has, for {', '.join(PIPELINES)} (default: {MICRO_BATCHES}); "
        "with MODULE:NAME it says that this is a pipeline",
    )


def chosen_schedule(options: argparse.Namespace, *, per_host: int | None = None) -> tuple[Schedule, Hosts]:
    """Returns the schedule that the options name, and the hosts of its ranks.

    Args:
        per_host: ranks on each host unless --hosts says it; None: all ranks on one host.
    """
    name, num_ranks = options.schedule, options.num_ranks
    if options.micro is not None:
        remedy = f"leave it out, or take {' or '.join(PIPELINES)}"
        raise ValueError(f"--micro {options.micro}: {name} is no pipeline; {remedy}")
    if name not in OVER_SHARDS:
        refuse(options, ["shards"], f"{name} has no shards")
    refuse(options, OF_PIPELINES, f"{name} is no pipeline")
    hosts = hosts_of_sizes(options.hosts, num_ranks) if options.hosts else equal_hosts(num_ranks, per_host or num_ranks)
    if is_address(name):
        schedule = own_all_reduce(from_address(name, key="schedule", folder=Path.cwd()))
        if num_parts(schedule, num_ranks) <= MOST_PARTS_PROVEN:
            prove(schedule, num_ranks, what=name)
        return schedule, hosts
    if name in OVER_SHARDS:
        shards = options.shards or SHARDS
        if shards < num_ranks:
            raise ValueError(
                f"--shards {shards} are fewer than {num_ranks:,} ranks, some of which would have none: "
                f"give at least --shards {num_ranks}"
            )
        return OVER_SHARDS[name](shards), hosts
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


def refuse(options: argparse.Namespace, names: Iterable[str], because: str) -> None:
    """Raises ValueError if one of these options was given."""
    for name in names:
        if getattr(options, name, None) is not None:
            raise ValueError(f"--{name.replace('_', '-')}: {because}; leave it out")


def given_or(options: argparse.Namespace, usual: Mapping[str, float]) -> list[float]:
    """Returns the values of options, or the usual ones of those that were not given."""
    return [value if getattr(options, name) is None else getattr(options, name) for name, value in usual.items()]


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


# --- draw: what happens in which round of a schedule, as text or as a picture ----------------------------------------

MOST_RANKS_PICTURED = 32
RANKS_DRAWN = whole(1, 256, "a drawing has a line for each rank in each round")


def draw_main(words: Sequence[str]) -> int:
    """Draws the schedule that the words name."""
    others = f"{program()} draw step --help: a step of a run; draw overlap --help: what backward hides here."
    parser = parser_of("draw", epilog=others)
    add_schedule(parser, RANKS_DRAWN)
    add_picture(parser)
    return respond(parser, parser.parse_args(words), run_draw)


def run_draw(options: argparse.Namespace) -> str:
    """Returns the text that the command prints."""
    if (pipeline := chosen_pipeline(options)) is not None:
        return draw_pipeline(options, pipeline)
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


def add_picture(parser: Parser) -> None:
    """Adds the name of a picture."""
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture instead of printing text")


def write_picture(path: Path, picture: str | bytes, *, after: str = "--svg") -> None:
    """Writes a picture to the file that was named after an option."""
    try:
        path.write_bytes(picture.encode() if isinstance(picture, str) else picture)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; name another file after {after}") from error


# --- check: a schedule is right, and the order in which it adds the contributions ------------------------------------

MOST_RANKS_SHOWN = 64


def check_main(words: Sequence[str]) -> int:
    """Proves the schedule that the words name."""
    parser = parser_of("check")
    add_schedule(parser, RANKS_FOLLOWED)
    parser.add_argument(
        "--compiled",
        action="store_const",
        const=True,
        help="compile an all-reduce by JAX, and compare its bits with the proof",
    )
    return respond(parser, parser.parse_args(words), run_check)


def run_check(options: argparse.Namespace) -> str:
    """Returns the text that the command prints."""
    if (pipeline := chosen_pipeline(options)) is not None:
        return check_pipeline(options, pipeline)
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
    if options.compiled:
        lines.append(f"  {compiled_in_words(options, schedule, proof)}")
    if options.num_ranks > MOST_RANKS_SHOWN:
        return "\n".join([*lines, f"  (what chunks become is shown up to {MOST_RANKS_SHOWN} ranks)"])
    of = "" if schedule.goal.adds else "of rank "
    return "\n".join(lines + [f"  chunk {chunk} = {of}{part}" for chunk, part in enumerate(proof.expressions)])


MOST_DEVICES = 64  # of the CPU, each with its threads


def compiled_in_words(options: argparse.Namespace, schedule: Schedule, proof: Proof) -> str:
    """Returns a line on the compiled schedule, once its bits are those of the proof."""
    if schedule.goal is not Goal.ALL_REDUCE or schedule.num_shards is not None:
        raise ValueError(f"--compiled: {options.schedule} is no all-reduce over ranks, which alone are compiled")
    if options.num_ranks > MOST_DEVICES:
        raise ValueError(f"--compiled with {options.num_ranks:,} ranks: take at most {MOST_DEVICES}")
    try:
        compiled = import_module("ddp.collectives.compiled")
    except ImportError as error:
        raise ValueError(f"--compiled needs JAX ({error}): pip install '.[tpu]'") from error
    num_permutes = compiled.compare(schedule, proof, options.num_ranks)
    devices = counted(options.num_ranks, "device")
    return f"compiled for {devices}: {counted(num_permutes, 'permute')}, and on each the bits of the proof"


# --- simulate: how long a schedule takes on a network ----------------------------------------------------------------


OF_COLLECTIVES = {"inside_alpha": 2e-6, "inside_rate": 100e9, "add_gb_s": 10.0}  # unless given
OF_PIPELINES = {"forward": 10e-3, "backward": 20e-3}


def simulate_main(words: Sequence[str]) -> int:
    """Simulates the schedule that the words name."""
    parser = parser_of("simulate")
    add_schedule(parser, RANKS_FOLLOWED)
    parser.add_argument("--per-host", type=whole(1), metavar="N", help="ranks on each host (default: 1)")
    for option, read, usual, meaning in (
        ("--bytes", checked(parse_size), "25MB", "size of the buffer; of a pipeline, of a micro-batch's activation"),
        ("--alpha", time_of, "20us", "latency between hosts; of a pipeline, between stages"),
        ("--rate", rate_of, "10gbit", "bandwidth between hosts, or stages, in bits/s"),
    ):
        parser.add_argument(option, type=read, default=usual, help=f"{meaning} (default: %(default)s)")
    for option, read, meaning in (
        ("--inside-alpha", time_of, "latency inside a host (default: 2us)"),
        ("--inside-rate", rate_of, "bandwidth inside a host (default: 100gbit)"),
        ("--add-gb-s", positive, "additions per rank, GB/s (default: 10)"),
        ("--forward", time_of, "of a pipeline: a micro-batch's forward through a stage (default: 10ms)"),
        ("--backward", time_of, "of a pipeline: its backward (default: 20ms)"),
    ):
        parser.add_argument(option, type=read, help=meaning)
    return respond(parser, parser.parse_args(words), run_simulate)


def run_simulate(options: argparse.Namespace) -> str:
    """Returns the text that the command prints."""
    per_host = 1 if options.per_host is None else options.per_host
    if options.per_host is not None and options.hosts:
        raise ValueError("--hosts and --per-host both say who shares a host: leave one out")
    if (pipeline := chosen_pipeline(options)) is not None:
        return simulate_pipeline(options, pipeline)
    schedule, hosts = chosen_schedule(options, per_host=per_host)
    inside_alpha, inside_rate, add_gb_s = given_or(options, OF_COLLECTIVES)
    network = Network(
        hosts=hosts,
        inside=Link(inside_alpha, 8 / inside_rate),
        between=Link(options.alpha, 8 / options.rate),
        gamma_s=1 / (add_gb_s * 1e9),
    )
    numel = whole_chunks(options.bytes // 4, schedule.num_chunks(options.num_ranks))  # for symmetry
    timeline = simulate(schedule, network, numel)
    if timeline.num_messages == 0:
        return f"{options.schedule}, one rank: there is nothing to send"
    sent, left = max(timeline.bytes_sent), max(timeline.host_bytes_sent)
    busbw = bus_bandwidth(schedule.goal, options.num_ranks, options.bytes, timeline.makespan_s)
    return (
        f"{options.schedule}, {options.num_ranks:,} ranks on {len(hosts):,} hosts, {format_size(options.bytes)}: "
        f"{format_time(timeline.makespan_s)}\n"
        f"  {timeline.num_rounds:,} rounds, {timeline.num_messages:,} messages\n"
        f"  sent by the busiest rank {sent:,} bytes ({sent / options.bytes:.3g} times the buffer), "
        f"by the busiest host {left:,}\n"
        f"  bus bandwidth {format_bandwidth(busbw)} GB/s"
    )


# --- the same of a pipeline ------------------------------------------------------------------------------------------

MOST_COMPUTED = 50_000  # forwards of all stages together: some seconds
MOST_PICTURED = 2048


def chosen_pipeline(options: argparse.Namespace) -> pipelines.Algorithm | None:
    """Returns the pipeline that the options name; None if they name a collective."""
    name = ALIASES.get(options.schedule, options.schedule)
    if name not in PIPELINES and (options.micro is None or not is_address(name)):
        return None
    options.micro = options.micro or MICRO_BATCHES
    refuse(options, ["hosts", "per_host", *OF_COLLECTIVES], "a pipeline has one stage per rank, wherever that is")
    refuse(options, ["shards"], "a pipeline has no shards")
    refuse(options, ["compiled"], "a pipeline is not compiled, but all-reduces are")
    if options.num_ranks * options.micro > MOST_COMPUTED:
        raise ValueError(
            f"{options.num_ranks:,} stages and {options.micro:,} micro-batches: a proof follows each micro-batch "
            f"through each stage; take at most {MOST_COMPUTED:,} of them together"
        )
    found: Any = PIPELINES.get(name) or from_address(name, key="schedule", folder=Path.cwd())
    return partial(call, found)  # whatever it is, this can be a key


def titled(options: argparse.Namespace) -> str:
    """Returns the name of a pipeline, with its stages and micro-batches."""
    micro_batches = "1 micro-batch" if options.micro == 1 else f"{options.micro:,} micro-batches"
    return f"{options.schedule}, {counted(options.num_ranks, 'stage')}, {micro_batches}"


def draw_pipeline(options: argparse.Namespace, algorithm: pipelines.Algorithm) -> str:
    """Returns the drawing, or writes the picture and returns its name."""
    size, title = (options.num_ranks, options.micro), titled(options)
    if options.svg is None:
        return pipelines.draw(algorithm, *size)
    if options.num_ranks * options.micro > MOST_PICTURED:
        raise ValueError(
            f"--svg with {title}: take at most {MOST_PICTURED:,} micro-batches of all stages together, because a "
            "browser opens no larger picture"
        )
    write_picture(options.svg, pipelines.svg(algorithm, *size, title=title))
    return f"{options.svg}: {title}"


def check_pipeline(options: argparse.Namespace, algorithm: pipelines.Algorithm) -> str:
    """Returns what is proven of a pipeline."""
    proof = pipelines.check(algorithm, options.num_ranks, options.micro)
    return "\n  ".join(
        [
            f"{titled(options)}: proven (each micro-batch passes each stage once forward and once backward)",
            f"no deadlock, even if a send waits for its receive; {counted(proof.num_messages, 'message')}",
            *pipelines.summary(proof),
        ]
    )


def simulate_pipeline(options: argparse.Namespace, algorithm: pipelines.Algorithm) -> str:
    """Returns when a pipeline's step would end."""
    forward_s, backward_s = given_or(options, OF_PIPELINES)
    costs = Costs(forward_s, backward_s, options.alpha + options.bytes * 8 / options.rate)
    run = pipelines.simulate(algorithm, options.num_ranks, options.micro, costs)
    sizes = f"activations of {format_size(options.bytes)}"
    return "\n  ".join([f"{titled(options)}, {sizes}: {format_time(run.makespan_s)}", *pipelines.summary(run)])
