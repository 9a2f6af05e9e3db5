"""Predicts the cost of an all-reduce by textbook formulas, in whose order `auto` times the algorithms.

p ranks, a buffer of N bytes, links of latency α and β seconds per byte, γ seconds per byte added. Every message of a
round is in flight at the same time; those that share a port follow each other at intervals of the gap g (the docstrings
of the algorithms assume g = α). L = ⌈log₂ p⌉; p' = 2^⌊log₂ p⌋:

    algorithm            seconds                                                       the simulator says
    naive_all_to_all     α + (p−2)g + (p−1)N(β + γ)                                    the same
    ring                 2(p−1)α + 2(p−1)/p·Nβ + (p−1)/p·Nγ; p = 2: α + N(β + γ)       the same
    tree                 2L(α + Nβ) + L·Nγ                                             the same if p = 2^k, else less
    double_tree          2L(α + g + Nβ) + L·Nγ                                         less, by up to one half
    butterfly            2L·α + 2(p−1)/p·Nβ + (p−1)/p·Nγ, p = 2^k                      the same
    recursive_doubling   L(α + Nβ + Nγ), p = 2^k                                       the same
       … any other p     the cost for p', and 2(α + Nβ) + Nγ for folding                   the same
    circulant            2L(α + g) + 2(p−1)/p·Nβ + (p−1)/p·Nγ                          the same if g = 0, else less
    all_to_all           2(α + (p−2)g) + 2(p−1)/p·Nβ + (p−1)/p·Nγ                      the same
    master_worker        2(α + (p−2)g) + 2(p−1)Nβ + (p−1)Nγ                            the same
    round_robin          p times all_to_all's: one master's share after another        less, by up to one half
    two_dimensional      rows of C, columns of R: a ring's 2(C−1)α + 2(C−1)/C·Nβ +     the same
                         (C−1)/C·Nγ, and `ring` of R ranks with N/C
    hierarchical         hosts of l ranks, h hosts: `tree` of l inside, then h ranks   at most that
                         between by the named algorithm
    slice_owners         no formula, because ranks have unequal numbers of nodes; a    the same for one node
                         node on each: all_to_all's

"The same" holds for one message per transfer, on links that the ranks of a host do not share, and is tested. Longer
buffers are cut into segments that overlap, so they cost less; `simulate.py` counts that, the formulas do not.

A formula uses the worst link, shared by as many ranks of a host as may use it at once, and so gives an upper bound.

Bandwidths are those of nccl-tests (its PERFORMANCE.md): *algorithm bandwidth* is bytes of the buffer per second. *Bus
bandwidth* is that times the share of the buffer that must leave and enter each rank with any algorithm, 2(p−1)/p for an
all-reduce; it is comparable to the speed of the link at any number of ranks.

Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH", 2005, section 3
(the model) and 4 (tree, butterfly, recursive doubling, ring); the others in the docstrings of the algorithms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ddp.collectives.placed import Hosts, rows_of
from ddp.collectives.schedule import Goal, Schedule, Send

COUNTED_MESSAGES = 20_000  # of all ranks

# --- links -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Link:
    """The cost of a message between two ranks.

    Attributes:
        alpha_s: seconds from a byte's departure to its arrival.
        beta_s: seconds per byte.
        gap_s: seconds for which a message keeps a port busy in addition to its bytes.
    """

    alpha_s: float
    beta_s: float
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Network:
    """The ranks of each host, and the costs of the links between ranks.

    Attributes:
        hosts: the ranks of each host.
        inside: the link between two ranks of one host.
        between: the link between two hosts, shared by the ranks of a host.
        gamma_s: seconds to add one byte that has arrived.
    """

    hosts: Hosts
    inside: Link
    between: Link
    gamma_s: float = 0.0

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.hosts))


def equal_hosts(num_ranks: int, per_host: int) -> Hosts:
    """Returns hosts of `per_host` neighbouring ranks; the last one may have fewer."""
    return tuple(tuple(range(start, min(start + per_host, num_ranks))) for start in range(0, num_ranks, per_host))


# --- the formulas ----------------------------------------------------------------------------------------------------


class Terms(NamedTuple):
    """The quantities that the formulas are made of."""

    num_ranks: int
    nbytes: float
    alpha_s: float
    beta_s: float
    gamma_s: float
    gap_s: float

    @property
    def log2(self) -> int:
        """⌈log₂ p⌉"""
        return (self.num_ranks - 1).bit_length()

    @property
    def bandwidth_optimal_s(self) -> float:
        """2(p−1)/p·Nβ + (p−1)/p·Nγ: the bytes of a ring. No all-reduce moves fewer."""
        return (self.num_ranks - 1) / self.num_ranks * self.nbytes * (2 * self.beta_s + self.gamma_s)


def naive_all_to_all(t: Terms) -> float:
    return _at_once(t) + (t.num_ranks - 1) * t.nbytes * (t.beta_s + t.gamma_s)


def ring(t: Terms) -> float:
    if t.num_ranks == 2:
        return t.alpha_s + t.nbytes * (t.beta_s + t.gamma_s)
    return 2 * (t.num_ranks - 1) * t.alpha_s + t.bandwidth_optimal_s


def tree(t: Terms) -> float:
    return 2 * t.log2 * (t.alpha_s + t.nbytes * t.beta_s) + t.log2 * t.nbytes * t.gamma_s


def double_tree(t: Terms) -> float:
    return 2 * t.log2 * t.gap_s + tree(t)


def butterfly(t: Terms) -> float:
    return _folded(t, lambda t: 2 * t.log2 * t.alpha_s + t.bandwidth_optimal_s)


def recursive_doubling(t: Terms) -> float:
    return _folded(t, lambda t: t.log2 * (t.alpha_s + t.nbytes * (t.beta_s + t.gamma_s)))


def circulant(t: Terms) -> float:
    return 2 * t.log2 * (t.alpha_s + t.gap_s) + t.bandwidth_optimal_s


def all_to_all(t: Terms) -> float:
    return 2 * _at_once(t) + t.bandwidth_optimal_s


def master_worker(t: Terms) -> float:
    return 2 * _at_once(t) + (t.num_ranks - 1) * t.nbytes * (2 * t.beta_s + t.gamma_s)


def round_robin(t: Terms) -> float:
    return t.num_ranks * (2 * _at_once(t) + t.bandwidth_optimal_s)


def two_dimensional(t: Terms, num_rows: int) -> float:
    length = t.num_ranks // num_rows
    row, column = t._replace(num_ranks=length), t._replace(num_ranks=num_rows, nbytes=t.nbytes / length)
    return 2 * (length - 1) * row.alpha_s + row.bandwidth_optimal_s + (ring(column) if num_rows > 1 else 0.0)


def _folded(t: Terms, seconds: Callable[[Terms], float]) -> float:
    """Returns the cost if ranks beyond a power of two send their buffers first, and receive the result last."""
    power = 1 << (t.num_ranks.bit_length() - 1)
    fold_s = 2 * (t.alpha_s + t.nbytes * t.beta_s) + t.nbytes * t.gamma_s if power < t.num_ranks else 0.0
    return seconds(t._replace(num_ranks=power)) + fold_s


def _at_once(t: Terms) -> float:
    """Returns the latency of the p−1 messages that one rank has in one round."""
    return t.alpha_s + max(0, t.num_ranks - 2) * t.gap_s if t.num_ranks > 1 else 0.0


FLAT: dict[str, Callable[[Terms], float]] = {
    formula.__name__: formula
    for formula in (
        *(ring, tree, double_tree, butterfly, recursive_doubling, circulant, all_to_all),
        *(master_worker, round_robin, naive_all_to_all),
    )
}
ONE_OF_A_HOST_CROSSES = {"ring", "tree"}  # on hosts of neighbouring ranks; else any number of ranks may cross at once
HIERARCHICAL = {"hierarchical": ring} | {
    f"hierarchical+{name}": FLAT[name] for name in ("butterfly", "recursive_doubling", "tree")
}


def textbook(name: str, nbytes: int, network: Network) -> float | None:
    """Returns the seconds of an all-reduce by its formula, on the network's worst link; None if there is no formula."""
    hosts, num_ranks, gamma_s = network.hosts, network.num_ranks, network.gamma_s
    largest, inside, between = max(map(len, hosts)), network.inside, network.between
    if name in HIERARCHICAL:
        within = Terms(largest, nbytes, inside.alpha_s, inside.beta_s, gamma_s, inside.gap_s)
        across = Terms(len(hosts), nbytes, between.alpha_s, between.beta_s, gamma_s, between.gap_s)
        return tree(within) + HIERARCHICAL[name](across)
    alpha_s, beta_s, gap_s = inside.alpha_s, inside.beta_s, inside.gap_s
    if len(hosts) > 1:
        sharing = 1 if name in ONE_OF_A_HOST_CROSSES else largest
        alpha_s, gap_s = max(alpha_s, between.alpha_s), max(gap_s, between.gap_s)
        beta_s = max(beta_s, between.beta_s * sharing)
    terms = Terms(num_ranks, nbytes, alpha_s, beta_s, gamma_s, gap_s)
    if name == "two_dimensional":
        return two_dimensional(terms, len(rows_of(hosts)))
    return FLAT[name](terms) if name in FLAT else None


def formula_s(name: str, schedule: Schedule, nbytes: int, network: Network) -> float:
    """Returns the seconds of an all-reduce by its formula; without one, by its rounds and its busiest rank's bytes."""
    seconds = textbook(name, nbytes, network)
    if seconds is None:
        link, moved = network.between, volume(schedule, nbytes, network.num_ranks)
        seconds = moved.num_rounds * link.alpha_s + moved.bytes_sent * (link.beta_s + network.gamma_s)
    return seconds


# --- messages and bytes ----------------------------------------------------------------------------------------------


def about_messages(schedule: Schedule, num_ranks: int) -> int:
    """Returns the number of messages if every rank sends as many as the last one, a leaf of trees or a worker."""
    rounds = schedule.algorithm(num_ranks - 1, num_ranks)
    return num_ranks * sum(isinstance(op, Send) for ops in rounds for op in ops)


class Volume(NamedTuple):
    """The rounds of a schedule, and the bytes that a rank sends in them."""

    num_rounds: int
    bytes_sent: float  # by the busiest rank; beyond `COUNTED_MESSAGES` messages, by rank 0


@lru_cache(maxsize=4096)
def volume(schedule: Schedule, nbytes: int, num_ranks: int) -> Volume:
    """Returns the rounds of a schedule, and the bytes that a rank sends."""
    ranks = range(num_ranks) if about_messages(schedule, num_ranks) <= COUNTED_MESSAGES else range(1)
    schedules = [list(schedule.algorithm(rank, num_ranks)) for rank in ranks]
    chunks = [sum(len(op.chunks) for ops in rounds for op in ops if isinstance(op, Send)) for rounds in schedules]
    return Volume(max(map(len, schedules)), nbytes * max(chunks) / schedule.num_chunks(num_ranks))


# --- bandwidth -------------------------------------------------------------------------------------------------------


def bus_factor(goal: Goal, num_ranks: int) -> float:
    """Returns the share of the buffer that must cross the busiest rank's link with any algorithm."""
    if goal is Goal.ALL_REDUCE:
        return 2 * (num_ranks - 1) / num_ranks
    if goal in (Goal.BROADCAST, Goal.REDUCE):
        return 1.0
    return (num_ranks - 1) / num_ranks


def bus_bandwidth(goal: Goal, num_ranks: int, nbytes: int, seconds: float) -> float:
    """Returns the bytes per second that the links must have carried."""
    return nbytes / seconds * bus_factor(goal, num_ranks)
