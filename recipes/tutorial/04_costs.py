"""04 · What it costs

The ring sends least, recursive doubling takes few rounds. Which one is faster?

    seconds of a message
        │                ╱          a message of N bytes takes α + N·β seconds:
        │            ╱              α  the latency, which even an empty one costs
        │        ╱                  β  seconds per byte
      α │    ╱
        │
        └──────────────────── N     ring   2(p−1)·α + 2(p−1)/p·N·β       recursive doubling   log₂ p · (α + N·β)
"""

from collections.abc import Callable
from math import ceil, isclose, log2

import torch
from problem import NUM_SAMPLES, answer, gradient_of_sum, seconds_of, share

import ddp
from ddp.collectives.catalog import SCHEDULES
from ddp.collectives.cost import Link, Network, equal_hosts, textbook
from ddp.collectives.simulate import cost_s

P, SIZES = 4, (64, 32 << 10, 1 << 20, 8 << 20)  # ranks, a power of two from 4 up; bytes

# ## The formulas
#
# The messages of a round are on their way at the same time. So a round costs one α, and β for each byte of one message.
# To add what has arrived costs γ for each byte, which the drawing leaves out.

SECONDS: dict[str, Callable[[int, float, float, float, float], float]] = {  # of p ranks and n bytes
    "naive_all_to_all": lambda p, n, a, b, g: a + (p - 1) * n * (b + g),  # one round: all send everything to all
    "ring": lambda p, n, a, b, g: 2 * (p - 1) * (a + n / p * b) + (p - 1) / p * n * g,  # many rounds, each with a chunk
    "tree": lambda p, n, a, b, g: 2 * ceil(log2(p)) * (a + n * b) + ceil(log2(p)) * n * g,  # few, each with all bytes
    "recursive_doubling": lambda p, n, a, b, g: log2(p) * (a + n * b + n * g),  # half as many; p is a power of two
}

# ## The figures of this machine
#
# Two measurements are enough to find α and β. A ring over a few bytes takes 2(p − 1) times α, and whatever a large one
# takes beyond that, it takes for its bytes. Everything else is then a prediction.


def on_each_rank() -> tuple[dict[tuple[str, int], float], float, torch.Tensor]:
    """Returns the measured seconds of all-reduces, by name and size; γ; and the gradient."""
    comm = ddp.init(shared_memory=False)  # messages only
    measured = {}
    for num_bytes in SIZES:
        tensor = torch.zeros(num_bytes // 4)
        for name in SECONDS:
            measured[name, num_bytes] = seconds_of(comm, lambda t=tensor, n=name: comm.all_reduce(t, algorithm=n))
    arrived = torch.ones_like(tensor)
    gamma = seconds_of(comm, lambda: tensor.add_(arrived)) / SIZES[-1]
    gradient = comm.all_reduce(gradient_of_sum(*share(comm.rank, P)), algorithm="auto")  # "auto" takes the cheapest
    return measured, gamma, gradient / NUM_SAMPLES


def fitted(measured: dict[tuple[str, int], float], gamma: float) -> tuple[float, float]:
    """Returns α and β, from the ring's times for the fewest and for the most bytes."""
    num_rounds, fewest_s, most_s = 2 * (P - 1), measured["ring", SIZES[0]], measured["ring", SIZES[-1]]
    return fewest_s / num_rounds, (most_s - fewest_s) / (num_rounds * SIZES[-1] / P) - gamma / 2  # half of them add


# ## The library's answers
#
# `textbook` has these formulas, and more of them. `cost_s` uses none: it plays the schedule on a simulated network,
# message by message, and reads the clock of the simulation.


def hosts(p: int, alpha: float, beta: float, gamma: float) -> Network:
    """Returns a network of p hosts (computers) with one rank each, so that every message crosses the network."""
    return Network(equal_hosts(p, 1), inside=Link(0.0, 0.0), between=Link(alpha, beta), gamma_s=gamma)


if __name__ == "__main__":
    measured, gamma, gradient = ddp.launch(on_each_rank, workers=P)[0]
    figures = alpha, beta, _ = (*fitted(measured, gamma), gamma)
    print(f"{P} ranks here: α = {1e6 * alpha:.0f} µs, β = {1e9 * beta:.2f} and γ = {1e9 * gamma:.2f} ns per byte")
    for (name, num_bytes), measured_s in measured.items():
        predicted_s = SECONDS[name](P, num_bytes, *figures)
        times = f"predicted {1e3 * predicted_s:6.2f} ms, measured {1e3 * measured_s:6.2f} ms"
        print(f"  {num_bytes:9,} bytes, {name:18}  {times}")
        assert isclose(predicted_s, textbook(name, num_bytes, hosts(P, *figures)))
        if num_bytes <= 1 << 20:  # larger ones are cut into segments, and take less
            assert isclose(predicted_s, cost_s(name, SCHEDULES[name], num_bytes, hosts(P, *figures)))
    assert torch.allclose(gradient, answer()) and alpha > 0 and beta > 0
    k = log2(P)  # the ring is the faster one from where 2(p−1)·α + N·(2(p−1)/p·β + (p−1)/p·γ) = k·(α + N·β + N·γ)
    border = (2 * P - 2 - k) * alpha / ((k - 2 + 2 / P) * beta + (k - 1 + 1 / P) * gamma)
    assert isclose(SECONDS["ring"](P, border, *figures), SECONDS["recursive_doubling"](P, border, *figures))
    print(f"the ring is faster from {border / 1e6:.1f} MB up. On 10,000 hosts, with the same figures:")
    for num_bytes in (1000, 10**6, 10**8):
        times = {name: textbook(name, num_bytes, hosts(10_000, *figures)) for name in ("ring", "tree", "circulant")}
        print(f"  {num_bytes:11,} bytes:", ", ".join(f"{name} {seconds:.3g} s" for name, seconds in times.items()))
        assert times["circulant"] < min(times["ring"], times["tree"])

# ## What to look at
#
# For a small tensor the number of rounds decides, for a large one the number of bytes. The first and the last row of
# the ring agree because α and β were fitted to them; the others are predictions, and only the trend: ranks that share
# few cores wait for a core as often as for a message, and a tree leaves ranks idle, so it may take less than predicted.
# That is why `algorithm="auto"` times the candidates in the order of their formulas, and takes the fastest.
#
# ![Predicted times of all-reduces over their size](pictures/costs.svg)
#
# ## The number that surprised
#
# The ring of 10,000 ranks with 1,000 bytes: 19,998 rounds, each with an α. The circulant schedule sends as few bytes in
# 28 rounds: each rank sends to the one that is 1, 2, 4, … places on, so that what it has doubles each time
# (`ddp/collectives/circulant.py`).
#
# ## Exercises
#
# 1. Take `P = 8`. α and β describe a link, so they should not change. How much do they, and why?
# 2. `scripts/ddp explain 1MB --workers 4 --transport-only` ranks all algorithms on your machine. Which figures does the
#    library measure for it besides α, β and γ? See `ddp/comm/plan.py`.
#
# ## Next
#
# `05_shared_memory.py`: ranks of one host need no messages at all.
