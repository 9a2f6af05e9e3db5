#!/usr/bin/env python3
"""A training step on a bed: hosts.py run -k 2 bench_training.py --models mlp-25m

Our replicas, torch's DistributedDataParallel on Gloo, one all-reduce per parameter, and the step without communication;
they take turns (ddp/bench/step.py). Every rank prints when it is done with a model, so faults can be timed by `--on`.
"""

from __future__ import annotations

import argparse
import os

from rich.console import Console
from rich.table import Table

from ddp.bench.step import WORKLOADS, measure_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp-25m", help=f"among {', '.join(WORKLOADS)}")
    parser.add_argument("--turns", type=int, default=3, help="turns per variant; ratios are medians over turns")
    parser.add_argument("--steps", type=int, default=3, help="steps per turn")
    options = parser.parse_args()
    names = options.models.split(",")
    if unknown := set(names) - set(WORKLOADS):
        parser.error(f"unknown models {', '.join(sorted(unknown))}; choose among {', '.join(WORKLOADS)}")

    table = Table("model", "ours", "torch", "naive", "alone", "÷ torch", "÷ alone", title="step time in ms")
    for name in names:
        result = measure_step(name, num_turns=options.turns, steps_per_turn=options.steps)
        times = (result.ours_s, result.torch_s, result.naive_s, result.alone_s)
        ratios = (f"{result.over_torch:.2f}", f"{result.over_alone:.2f}")
        table.add_row(name, *(f"{time_s * 1e3:.1f}" for time_s in times), *ratios)
        print(f"rank {os.environ['RANK']} has measured {name}", flush=True)
    if os.environ["RANK"] == "0":
        Console(width=100).print(table)


if __name__ == "__main__":
    main()
