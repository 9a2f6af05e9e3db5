"""18 · Servers and staleness

One of four workers is five times as slow. Must the others wait for it, and what does it cost not to wait?

    server      w₀ ────────────── w₁ ──── w₂ ─────────────────── w₃      each gradient that counts is an update
                 ╲ ╲             ╱  ╲    ╱                      ╱
    fast          ╲ ╰▓▓▓▓▓▓▓▓▓▓▓╯    ╰▓▓╯                      ╱         pulls weights, computes, pushes a gradient
    slow           ╰▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓╯          it has w₀: its gradient is two updates old
"""

from collections import Counter
from heapq import heappop, heappush
from typing import Any, NamedTuple

import torch
from problem import NUM_SAMPLES, answer, flat_gradient, net, share
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp.strategies.parameter_server.ledger import Lease, Ledger, Plan

SECONDS = {"a": 1.01, "b": 1.02, "c": 1.03, "slow": 5.0}  # for all samples of the batch
RATES, NUM_UPDATES = (1.0, 6.0), 120

# ## What a server does
#
# A *parameter server* holds the weights. A worker holds nothing: it gets a *lease* of some samples, pulls the weights,
# and pushes the gradient of its samples. The ledger says who gets which lease, when it may begin, and whether its
# gradient counts. That is the library's own; only clock, workers and weights are played here.


class Run(NamedTuple):
    """What came of it: seconds per update, how old gradients were, the last weights, and whose gradients counted."""

    update_s: float
    ages: list[int]
    weights: Tensor
    by_worker: Counter[str]


def loss_and_gradient(weights: Tensor, part: int = 0, num_parts: int = 1) -> tuple[float, Tensor]:
    """Returns what a part of the batch adds to the mean loss, and to its gradient, at these weights."""
    model, (inputs, classes) = net(), share(part, num_parts)
    vector_to_parameters(weights, model.parameters())
    loss = F.cross_entropy(model(inputs), classes, reduction="sum") / NUM_SAMPLES
    loss.backward()
    return loss.item(), flat_gradient(model)


def run(rate: float, num_updates: int = NUM_UPDATES, **mode: Any) -> Run:
    """Trains by a clock that nobody has to wait for."""
    ledger, weights, ages, by_worker = Ledger(**mode), parameters_to_vector(net().parameters()).detach(), [], Counter()
    ledger.begin_epoch(Plan(step, 0, NUM_SAMPLES * (step - 1), NUM_SAMPLES) for step in range(1, num_updates + 1))
    now_s, events, queues, idle = 0.0, [], {name: list[Lease]() for name in SECONDS}, set(SECONDS)
    pulled, pushed = dict[str, Tensor](), dict[tuple[int, int], Tensor]()
    while not ledger.is_epoch_over:
        for name in sorted(idle):
            answer = "gone"
            while answer == "gone":  # its lease was taken back
                queues[name] += ledger.grant(name, most=2, now_s=now_s)
                lease = queues[name][0] if queues[name] else None
                answer = "wait" if lease is None else ledger.begin(name, lease, now_s=now_s)
                if answer != "wait":
                    del queues[name][0]
            if answer == "now":
                idle.remove(name)
                pulled[name] = weights
                heappush(events, (now_s + SECONDS[name] / lease.num_parts, name, lease))
        late_s = ledger.next_late_s(now_s)
        if idle and late_s is not None and now_s + late_s < events[0][0]:
            now_s += late_s  # then those who are idle look again
            continue
        now_s, name, lease = heappop(events)
        idle.add(name)
        if ledger.returned(name, lease, now_s=now_s):
            pushed[lease.plan.step, lease.part] = loss_and_gradient(pulled[name], lease.part, lease.num_parts)[1]
        while (update := ledger.take_update()) is not None:
            weights = weights - rate * sum(pushed.pop((update.plan.step, part)) for part in range(len(update.workers)))
            ages.append(update.age)
            by_worker.update(update.workers)
    return Run(now_s / num_updates, ages, weights, by_worker)


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs, start = {}, parameters_to_vector(net().parameters()).detach()
    for name, mode in {
        "sync, four parts": {"mode": "sync", "num_parts": 4},
        "sync, first three": {"mode": "sync", "num_parts": 3, "num_backups": 1},
        "async": {"mode": "async"},
        "bounded by four": {"mode": "bounded", "staleness": 4},
    }.items():
        assert torch.allclose(start - run(1.0, 1, **mode).weights, answer())  # whoever has computed its parts
        runs[name] = done, _ = [run(rate, **mode) for rate in RATES]
        losses = [loss_and_gradient(each.weights)[0] for each in runs[name]]
        print(f"{name:17} {done.update_s:4.2f} s an update, gradients at most {max(done.ages):2} updates old", end=", ")
        print(f"of the slow one {done.by_worker['slow']:3}; loss {losses[0]:.4f}, at the higher rate {losses[1]:7.4f}")
    (sync, _), (first, _), (free, _), (bounded, _) = runs.values()
    assert max(sync.ages) == max(first.ages) == 0 and torch.allclose(sync.weights, first.weights)
    assert max(bounded.ages) <= 4 < max(free.ages) and 3 * first.update_s < sync.update_s

# ## What to look at
#
# The seconds. Sync waits for the slow one's quarter; with three parts its work is thrown away, but no sample. Async
# uses all four. A bound of 4 lets four updates pass while the slow one computes: with its own, five in five seconds.
#
# ## The number that surprised
#
# The loss of async: at the low rate it is less than that of sync. A gradient that comes late still moves the weights
# when they have gone on, as a momentum does (arXiv 1605.09774). So at a rate that sync bears, async may fail.
#
# ## Exercises
#
# 1. What is the smallest bound that costs no time? Compute it first, and then try.
# 2. Let the slow one stop for good: give it a million seconds. Which modes go on, and what does it cost them?
#
# ## Next
#
# `19_few_agreements.py`: workers that seldom talk. `docs/strategies.md` has servers that train your model.
