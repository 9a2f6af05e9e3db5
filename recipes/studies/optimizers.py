"""Times the steps of LAMB and LARS beside those of torch's optimizers, in one process with one thread.

| column | whose step it is                                                                    |
|--------|-------------------------------------------------------------------------------------|
| AdamW  | torch's, fused: each parameter's state in one pass over memory                      |
| LAMB   | ours: the same and a trust ratio, for which it must know norms before it may update |
| loop   | LAMB as papers write it, one parameter after the other                              |
| SGD    | torch's, fused, with momentum                                                       |
| LARS   | ours                                                                                |

    python recipes/studies/optimizers.py               25M elements in 60 tensors, 24M in 6, 4M in 2,000
    python recipes/studies/optimizers.py --turns 21    more turns, whose medians are shown
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from ddp.lab.bench.turns import take_turns
from ddp.optim.trust_ratio import LAMB, LARS
from ddp.process.arguments import Parser, whole
from ddp.process.clock import now_s
from ddp.units import three_digits

SHAPES = {
    "60 × 417k": [25_000_000 // 60] * 60,
    "6 × 4M": [4_000_000] * 6,
    "2,000 × 2k": [2_000] * 2_000,
}
STEPS_OF_A_TURN = 3


class Loop(Optimizer):
    """LAMB, one parameter after the other (arXiv 1904.00962v5, algorithm 2)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for w in group["params"]:
                state = self.state[w]
                if not state:
                    state.update(t=0, m=torch.zeros_like(w), v=torch.zeros_like(w))
                state["t"] += 1
                m, v, t = state["m"], state["v"], state["t"]
                m.lerp_(w.grad, 0.1)
                v.mul_(0.999).addcmul_(w.grad, w.grad, value=0.001)
                u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt_().add_(1e-6))
                u.add_(w, alpha=group["weight_decay"])
                weight_norm, update_norm = w.norm().item(), u.norm().item()
                ratio = weight_norm / update_norm if weight_norm and update_norm else 1.0
                w.add_(u, alpha=-group["lr"] * ratio)


RIVALS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": partial(AdamW, fused=True),
    "LAMB": LAMB,
    "loop": Loop,
    "SGD": partial(SGD, lr=1e-3, momentum=0.9, weight_decay=1e-4, fused=True),
    "LARS": LARS,
}


def measure(numels: Sequence[int], num_turns: int) -> dict[str, list[float]]:
    """Returns what a step of each rival has taken in each turn, in seconds, over parameters of these sizes."""
    turns = {name: partial(_turn_s, make(_parameters(numels))) for name, make in RIVALS.items()}
    for turn in turns.values():
        turn()  # makes the state
    return take_turns(turns, num_turns)


def _parameters(numels: Sequence[int]) -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(0.02 * torch.randn(numel)) for numel in numels]
    for parameter in parameters:
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    return parameters


def _turn_s(optimizer: Optimizer) -> float:
    times_s = []
    for _ in range(STEPS_OF_A_TURN):
        start_s = now_s()
        optimizer.step()
        times_s.append(now_s() - start_s)
    return statistics.median(times_s)


def show(num_turns: int) -> None:
    """Measures all shapes, and prints the table."""
    torch.set_num_threads(1)
    table = Table(title=f"ms per step, one thread; medians of {num_turns} turns, and of their ratios")
    table.add_column("parameters")
    ratios = (("LAMB", "AdamW"), ("loop", "LAMB"), ("LARS", "SGD"))
    for title in (*RIVALS, *(f"{one} ÷ {other}" for one, other in ratios)):
        table.add_column(title, justify="right")
    for shape, numels in SHAPES.items():
        turns_s = measure(numels, num_turns)
        times = [three_digits(1e3 * statistics.median(turns_s[name])) for name in RIVALS]
        quotients = [
            three_digits(statistics.median(a / b for a, b in zip(turns_s[one], turns_s[other], strict=True)))
            for one, other in ratios
        ]
        table.add_row(shape, *times, *quotients)
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=whole(1), default=9, help="turns of each optimizer (default: %(default)s)")
    show(parser.parse_args().turns)


if __name__ == "__main__":
    main()
