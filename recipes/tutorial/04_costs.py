"""04 · What it costs

The ring sends least, recursive doubling has the fewest rounds. Which one is faster?

    seconds of a message
        │                    ╱      a message of N bytes takes α + N·β seconds:
        │               ╱           α  the latency, which even an empty one costs
        │          ╱                β  seconds per byte
      α │─────╱
        └──────────────────── N     ring   2(p−1)·α + 2(p−1)/p·N·β       recursive doubling   log₂ p · (α + N·β)
"""

from collections.abc import Callable
from math import ceil, isclose, log2

import torch
from problem import NUM_SAMPLES, answer, gradient_of_sum, seconds_of, share

import ddp
from ddp.collectives.catalog import SCHEDULES
from ddp.collectives.cost import cost_s, textbook
from ddp.collectives.simulate import Link, Network, equal_hosts

P, SIZES = 4, (16, 32 << 10, 1 << 20, 8 << 20)  # ranks; bytes

# ## The formulas
#
# The messages of a round are on their way at the same time. So a round costs one α and the bytes of one message, and γ
# for each byte that a rank then adds.

SECONDS: dict[str, Callable[[int, float, float, float, float], float]] = {  # of p ranks and n bytes
    "ring": lambda p, n, a, b, g: 2 * (p - 1) * (a + n / p * b) + (p - 1) / p * n * g,  # many rounds, each with a chunk
    "tree": lambda p, n, a, b, g: 2 * ceil(log2(p)) * (a + n * b) + ceil(log2(p)) * n * g,  # few, each with all bytes
    "recursive_doubling": lambda p, n, a, b, g: log2(p) * (a + n * b + n * g),  # the fewest; p is a power of two
}

# ## The figures of this machine
#
# Two measurements tell α and β: a ring with next to no bytes consists of 2(p − 1) times α, and what a large one takes
# in addition are its bytes. Everything else is then a prediction.


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


def fitted(measured: dict[tuple[str, int], float]) -> tuple[float, float]:
    """Returns α and β, from the ring's times for the fewest and for the most bytes; β has a part of γ in it."""
    num_rounds, fewest_s, most_s = 2 * (P - 1), measured["ring", SIZES[0]], measured["ring", SIZES[-1]]
    return fewest_s / num_rounds, (most_s - fewest_s) / (num_rounds * SIZES[-1] / P)


# ## The library's answers
#
# `textbook` has these formulas, and more of them. `cost_s` does not know any: it plays the schedule on a simulated
# network, message by message, and looks at the clock there.


def hosts(p: int, alpha: float, beta: float, gamma: float) -> Network:
    """Returns a network of p hosts with one rank each, so that nothing moves inside of one."""
    return Network(equal_hosts(p, 1), inside=Link(0.0, 0.0), between=Link(alpha, beta), gamma_s=gamma)


if __name__ == "__main__":
    measured, gamma, gradient = ddp.launch(on_each_rank, workers=P)[0]
    figures = (*fitted(measured), gamma)
    alpha, beta, _ = figures
    print(f"{P} ranks here: α = {1e6 * alpha:.0f} µs, β = {1e9 * beta:.2f} ns per byte, γ = {1e9 * gamma:.2f}")
    for (name, num_bytes), measured_s in measured.items():
        predicted_s = SECONDS[name](P, num_bytes, *figures)
        times = f"predicted {1e3 * predicted_s:6.2f} ms, measured {1e3 * measured_s:6.2f} ms"
        print(f"  {num_bytes:9,} bytes, {name:18}  {times}")
        assert isclose(predicted_s, textbook(name, num_bytes, hosts(P, *figures)))
        if num_bytes <= 1 << 20:  # larger ones are cut into segments, and take less
            assert isclose(predicted_s, cost_s(name, SCHEDULES[name], num_bytes, hosts(P, *figures)))
    assert torch.allclose(gradient, answer()) and alpha > 0 and beta > 0
    border = 4 * alpha / (0.5 * beta + 1.25 * gamma)  # where 6α + N(1.5β + 0.75γ) = 2α + N(2β + 2γ)
    assert isclose(SECONDS["ring"](P, border, *figures), SECONDS["recursive_doubling"](P, border, *figures))
    print(f"the ring is faster from {border / 1e6:.1f} MB up. On 10,000 hosts, with the same figures:")
    for num_bytes in (1000, 10**6, 10**8):
        times = {name: textbook(name, num_bytes, hosts(10_000, *figures)) for name in ("ring", "tree", "circulant")}
        print(f"  {num_bytes:11,} bytes:", ", ".join(f"{name} {seconds:.3g} s" for name, seconds in times.items()))
        assert times["circulant"] < min(times["ring"], times["tree"])

# ## What to look at
#
# Small tensors cost the number of rounds, large ones the bytes. Do not expect more than that trend here: four ranks
# that share few cores wait for a core as often as for a message, which no formula knows. That is why `algorithm="auto"`
# also times the best candidates before it trusts a prediction. A large tree beats its formula, because the library cuts
# large tensors into segments, and adds one while the next is on its way.
#
# ![Predicted times of all-reduces over their size](pictures/costs.svg)
#
# ## The number that surprised
#
# A ring of 10,000 ranks takes seconds for 1,000 bytes: 19,998 rounds, each with an α. The circulant schedule sends the
# ring's bytes in 28 rounds (`ddp/collectives/circulant.py`).
#
# ## Exercises
#
# 1. What do α and β become with 2 ranks, and why?
# 2. `scripts/ddp explain 1MB --workers 4` asks the library the same. Which figures does it measure besides these two?
#
# ## Next
#
# `05_shared_memory.py`: ranks of one host need no messages at all.
