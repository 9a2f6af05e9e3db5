"""Simulates a schedule: how long would it take on such a network?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ddp.collectives.cost import Link, Network, bus_bandwidth
from ddp.collectives.simulate import simulate, whole_chunks
from ddp.commands.command import parser_of, rate_of, respond, time_of
from ddp.commands.schedules import RANKS_FOLLOWED, add_schedule, chosen_schedule
from ddp.process.arguments import checked, positive, whole
from ddp.units import format_bandwidth, format_size, format_time, parse_size


def main(words: Sequence[str]) -> int:
    """Simulates what the words say."""
    parser = parser_of("simulate")
    add_schedule(parser, RANKS_FOLLOWED)
    parser.add_argument("--per-host", type=whole(1), metavar="N", help="ranks on each host (default: 1)")
    for option, read, usual, meaning in (
        ("--bytes", checked(parse_size), "25MB", "size of the buffer"),
        ("--alpha", time_of, "20us", "latency between hosts"),
        ("--rate", rate_of, "10gbit", "bandwidth between hosts, in bits/s"),
        ("--inside-alpha", time_of, "2us", "latency inside a host"),
        ("--inside-rate", rate_of, "100gbit", "bandwidth inside a host"),
        ("--add-gb-s", positive, "10", "additions per rank, GB/s"),
    ):
        parser.add_argument(option, type=read, default=usual, help=f"{meaning} (default: %(default)s)")
    return respond(parser, parser.parse_args(words), run)


def run(options: argparse.Namespace) -> str:
    """Returns the text that the command prints."""
    per_host = 1 if options.per_host is None else options.per_host
    if options.per_host is not None and options.hosts:
        raise ValueError("--hosts and --per-host both say who shares a host: leave one out")
    schedule, hosts = chosen_schedule(options, per_host=per_host)
    network = Network(
        hosts=hosts,
        inside=Link(options.inside_alpha, 8 / options.inside_rate),
        between=Link(options.alpha, 8 / options.rate),
        gamma_s=1 / (options.add_gb_s * 1e9),
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
