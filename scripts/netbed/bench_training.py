#!/usr/bin/env python3
"""A training step on a bed: hosts.py run -k 2 bench_training.py --models mlp-25m --rate 1gbit

Our replicas, with the optimizer after and inside backward, torch's DistributedDataParallel on Gloo, one all-reduce per
parameter, the step without communication and the communication without a step; they take turns (ddp/bench/step.py).
`--rate` repeats the bed's, which a host cannot see: a second table then holds a step of ours against what its links
need at least.

    wire       2(h−1)/h × bytes of the gradients ÷ (0.956 × rate), for h hosts: the least for each link
    overlap    step ÷ the longer of wire and computing: 1 if the shorter one were hidden behind the longer one;
               wait ÷ reduce: the share of the communication that backward's end still waits for

Every rank prints when it is done with a model, so faults can be timed by `--on`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from ddp.allocator import VARIABLES
from ddp.bench.step import VARIANTS, measure_step, refuse_unknown
from ddp.bench.step_report import print_overlap, print_report, to_json
from ddp.bench.units import parse_rate
from ddp.bench.workloads import WORKLOADS
from ddp.errors import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp-25m", help=f"among {', '.join(WORKLOADS)}")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=3, help="turns per variant; ratios are medians over turns")
    parser.add_argument("--steps", type=int, default=3, help="steps per turn")
    parser.add_argument("--rate", help="of the bed's links, e.g. 1gbit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures")
    options = parser.parse_args()
    names, variants = options.models.split(","), options.variants.split(",")
    rate_bit_s = None if options.rate is None else parse_rate(options.rate)
    if options.rate is not None and rate_bit_s is None:
        parser.error(f"--rate {options.rate}: want a number and a unit, e.g. 100mbit, 1gbit")
    try:
        refuse_unknown("model", names, WORKLOADS)
        refuse_unknown("variant", variants, VARIANTS)
    except ConfigError as error:
        parser.error(str(error))

    if not os.environ.keys() >= VARIABLES.keys():  # as ddp.launch has it; the C library looks once, at the start
        os.execve(sys.executable, [sys.executable, *sys.argv], {**VARIABLES, **os.environ})

    figures = []
    for name in names:
        figures.append(measure_step(name, variants=variants, num_turns=options.turns, steps_per_turn=options.steps))
        print(f"rank {os.environ['RANK']} has measured {name}", flush=True)
    if os.environ["RANK"] == "0":
        console = Console(width=150)
        print_report(figures, console)
        if "ours" in variants:
            print_overlap(figures, console, rate_bit_s=rate_bit_s)
        if options.json:
            options.json.write_text(to_json(figures))


if __name__ == "__main__":
    main()
