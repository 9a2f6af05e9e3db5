"""Lets rivals take turns in one run, and takes their ratios turn by turn, for both benchmarks.

    turn 1    ours ▓▓▓▓▓    torch ▓▓▓▓▓    alone ▓▓▓▓▓
    turn 2    alone ▓▓▓▓▓   torch ▓▓▓▓▓    ours ▓▓▓▓▓
    …
    ▓         one repetition: an all-reduce, or a training step
    a turn    the median of its repetitions, on the slowest rank
    a ratio   the median, over turns, of turn ÷ turn

A machine whose speed drifts is the same machine for all rivals, because they run within the same second.
"""

from __future__ import annotations

import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from ddp.process.terminal import say
from ddp.units import three_digits

TURN_S, MOST_REPETITIONS = 0.2, 200


@dataclass(frozen=True, kw_only=True)
class Cell(ABC):
    """Is one line of a report, or a few: what ran (`name`), and where (`place`, the title of its table).

    Attributes:
        legend: by titles of columns, what they show.
    """

    legend: ClassVar[Mapping[str, str]]
    place: str
    name: str

    @abstractmethod
    def columns(self) -> dict[str, str]:
        """Returns the line by titles of columns; "" for what was not measured."""

    def rows(self) -> list[dict[str, str]]:
        """Returns all lines of the cell."""
        return [self.columns()]


STEP = "ms per step, median over turns, on the slowest rank"
OVER_TURNS = "least and greatest such ratio of a turn"


@dataclass(frozen=True, kw_only=True)
class TimedCell(Cell):
    """Is one line of a report on rivals that took turns.

    Attributes:
        rival: the name of the rival that "ours" has to beat.
        turns_s: by rival, the time of each turn.
    """

    rival: ClassVar[str]
    turns_s: Mapping[str, Sequence[float]]

    @property
    def drawn(self) -> Sequence[str]:
        """Returns the rivals whose bars a picture shows."""
        return "ours", self.rival, "alone"

    def median_s(self, one: str) -> float | None:
        """Returns the median over turns, or None if that rival took no part."""
        return statistics.median(self.turns_s[one]) if one in self.turns_s else None

    def ratios(self, one: str, other: str) -> list[float]:
        """Returns one rival ÷ another, turn by turn; nothing if either took no part."""
        both = one in self.turns_s and other in self.turns_s
        return [a / b for a, b in zip(self.turns_s[one], self.turns_s[other], strict=True)] if both else []

    def ratio(self, one: str, other: str) -> float | None:
        """Returns the median of `ratios`, or None."""
        return statistics.median(ratios) if (ratios := self.ratios(one, other)) else None

    @property
    def spread(self) -> str:
        """Returns the least and the greatest speedup of a turn, for a table."""
        ratios = self.ratios(self.rival, "ours")
        return f"{three_digits(min(ratios))} – {three_digits(max(ratios))}" if ratios else ""

    @property
    def speedup(self) -> float | None:
        """Returns the rival ÷ ours: above 1, ours is faster."""
        return self.ratio(self.rival, "ours")


def take_turns(rivals: Mapping[str, Callable[[], float]], num_turns: int) -> dict[str, list[float]]:
    """Lets each rival run its turn, `num_turns` times, in alternating order; returns what their turns took."""
    turns_s: dict[str, list[float]] = {name: [] for name in rivals}
    for number in range(num_turns):
        for name in list(rivals) if number % 2 == 0 else reversed(list(rivals)):
            turns_s[name].append(rivals[name]())
    return turns_s


def num_repetitions(repetition_s: float, *, least: int) -> int:
    """Returns how many repetitions fill a turn."""
    return int(min(max(TURN_S / max(repetition_s, 1e-9), least), MOST_REPETITIONS))


def slowest(times_s: Sequence[float]) -> list[float]:
    """Returns each entry's maximum over the ranks. Collective."""
    longest = torch.tensor(times_s, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.tolist()


PROGRESS = "cell: "


def announce(cell: TimedCell) -> None:
    """Tells whoever waits, on rank 0, that a cell is done."""
    if dist.get_rank() == 0:
        speedup = "" if cell.speedup is None else f": {cell.speedup:.2f}x"
        say(f"{PROGRESS}{cell.place}: {cell.name}{speedup}", to=sys.stderr)
