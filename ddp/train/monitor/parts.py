"""Divides a step of each rank into its parts, each instant counted once.

    exposed     the rank's own thread is in a collective, or waits for one in the background; on a GPU its stream waits
                  wait             … and the collective has begun here, and not on all ranks yet
                  communication    … all the rest of it, with what a hook computes
    a phase     data, forward, backward, update: as far as it is not exposed
    other       neither

A collective in the background that is not waited for costs no extra time: backward hides it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ddp.train.monitor.profile import Part, Span

Key = tuple[int, int]
"""The number of a call, and how many others of that number came before it: inside of a chain all have one number."""


class Phase(NamedTuple):
    """A phase of a step on one rank."""

    name: str
    began_s: float
    ended_s: float


class CallTimes(NamedTuple):
    """A call on one rank.

    Attributes:
        key: the same on all ranks; None for one that no other rank makes: a message, or a chain, whose calls
            follow by themselves.
    """

    key: Key | None
    began_s: float
    ended_s: float


class RawStep(NamedTuple):
    """Holds what one rank has noted in one step, by one clock.

    Attributes:
        exposed: when its thread was in a collective, or waited for one.
    """

    began_s: float
    ended_s: float
    phases: Sequence[Phase]
    calls: Sequence[CallTimes]
    exposed: Sequence[tuple[float, float]]


def last_begun(ranks: Sequence[RawStep]) -> dict[Key, float]:
    """Returns when the last rank has begun each call."""
    last: dict[Key, float] = {}
    for step in ranks:
        for call in step.calls:
            if call.key is not None:
                last[call.key] = max(call.began_s, last.get(call.key, call.began_s))
    return last


def spans_of(step: RawStep, last_s: Mapping[Key, float]) -> list[Span]:
    """Returns the parts of a step, one stretch after another, without gaps.

    Args:
        last_s: when the last rank has begun each call.
    """
    stretches: list[tuple[float, float, Phase | CallTimes | None]] = [
        *((phase.began_s, phase.ended_s, phase) for phase in step.phases),
        *((call.began_s, call.ended_s, call) for call in step.calls),
        *((began_s, ended_s, None) for began_s, ended_s in step.exposed),
    ]
    stretches.sort(key=lambda each: each[0])
    moments = {moment for each in stretches for moment in each[:2]} | set(last_s.values())
    edges = [step.began_s, *sorted(each for each in moments if step.began_s < each < step.ended_s), step.ended_s]
    spans: list[Span] = []
    ahead, now = iter([*stretches, (step.ended_s, step.ended_s, None)]), []
    following = next(ahead)
    for edge_s, next_s in pairwise(edges):
        while following[0] <= edge_s:
            now.append(following)
            following = next(ahead)
        now = [each for each in now if each[1] > edge_s]
        part = _part([each[2] for each in now], edge_s, last_s)
        began_s, ended_s = edge_s - step.began_s, next_s - step.began_s
        if spans and spans[-1].part == part:
            began_s = spans.pop().began_s
        spans.append(Span(part, began_s, ended_s))
    return spans


def _part(under_way: Sequence[Phase | CallTimes | None], now_s: float, last_s: Mapping[Key, float]) -> Part:
    """Returns the part that a moment belongs to.

    Args:
        under_way: phases, calls and exposures (None), in the order in which they have begun.
    """
    if None in under_way:
        call = next((each for each in reversed(under_way) if isinstance(each, CallTimes)), None)
        return "wait" if call is not None and call.key is not None and now_s < last_s[call.key] else "communication"
    names: list[Part] = ["data", "forward", "backward", "update"]
    running = [each.name for each in under_way if isinstance(each, Phase)]
    return next((name for name in names if name in running), "other")
