#!/usr/bin/env python3
"""Small collectives back to back, ours and torch's on Gloo: hosts.py run bench_latency.py --delay-ms 5

On a bed with a delay, time ÷ one-way delay says how many messages of an operation wait for one another:

    broadcast by a binomial tree         ⌈log2 n⌉
    all-reduce by recursive doubling     ⌈log2 n⌉ exchanges
    all-reduce by a ring                 2(n−1) exchanges

An exchange is one delay at least, and 2.3 over Gloo: its sender waits until the receiver has said where the bytes go.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import ddp
from ddp.bench.units import format_time, three_digits
from ddp.clock import now_s

NUM_TURNS = 5
NUMEL = 1024  # 4 KB of float32


class Rivals(NamedTuple):
    ours: Callable[[], object]
    torchs: Callable[[], object]


def rivals(comm: ddp.Communicator) -> dict[str, Rivals]:
    tensor = torch.zeros(NUMEL)
    rows = [torch.empty_like(tensor) for _ in range(comm.world_size)]
    by_name = {"all_reduce": Rivals(lambda: comm.all_reduce(tensor), lambda: dist.all_reduce(tensor))}
    by_name["all_gather"] = Rivals(lambda: comm.all_gather(tensor), lambda: dist.all_gather(rows, tensor))
    by_name["broadcast"] = Rivals(lambda: comm.broadcast(tensor), lambda: dist.broadcast(tensor, 0))
    by_name["barrier"] = Rivals(comm.barrier, dist.barrier)
    return by_name


def seconds(call: Callable[[], object], count: int) -> float:
    """Per call, on the slowest rank, over `count` calls one after another."""
    call()
    dist.barrier()
    start_s = now_s()
    for _ in range(count):
        call()
    slowest = torch.tensor([(now_s() - start_s) / count], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way, of the bed")
    parser.add_argument("--count", type=int, default=20, help="calls per turn")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = ddp.init()
    table = Table("operation", "ours", "Gloo", "× Gloo", "delays, ours", "delays, Gloo", title="4 KB, back to back")
    for name, pair in rivals(comm).items():
        turns = [(seconds(pair.ours, options.count), seconds(pair.torchs, options.count)) for _ in range(NUM_TURNS)]
        ours_s, torchs_s = (statistics.median(times) for times in zip(*turns, strict=True))
        ratio = statistics.median(theirs / mine for mine, theirs in turns)
        delays = [
            three_digits(time_s * 1e3 / options.delay_ms) if options.delay_ms else "" for time_s in (ours_s, torchs_s)
        ]
        table.add_row(name, format_time(ours_s), format_time(torchs_s), three_digits(ratio), *delays)
    if comm.rank == 0:
        Console(width=100).print(table)
    ddp.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
