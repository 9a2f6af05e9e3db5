"""Draws curves (SVG): one panel with two axes, each linear or logarithmic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log

from ddp.pictures.svg import FAINT, INK, QUIET, line, rect, text

Curve = Sequence[tuple[float, float]]
COLORS = ("#1b2a52", "#b8690b", "#2b8563", "#b3243b", "#3b78b8", "#6d4b9e")
"""Dark enough for words on white, which name every curve where it ends."""


@dataclass(frozen=True)
class Axis:
    """One axis: from which value to which, the values that are marked, and how they are written."""

    first: float
    last: float
    marked: Sequence[float]
    written: Callable[[float], str]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Returns where a value stands: 0 at the first one, 1 at the last one."""
        if self.logarithmic:
            return log(value / self.first) / log(self.last / self.first)
        return (value - self.first) / (self.last - self.first)


@dataclass(frozen=True)
class Panel:
    """A place on the page, and the axes along its left and lower edge."""

    left: float
    top: float
    width: float
    height: float
    x: Axis
    y: Axis

    def at(self, point: tuple[float, float]) -> tuple[float, float]:
        """Returns where a point stands on the page."""
        x, y = point
        return self.left + self.width * self.x.share(x), self.top + self.height * (1 - self.y.share(y))

    def frame(self, title: str, *, x_name: str, y_name: str) -> Iterator[str]:
        """Draws title, grid and axes."""
        bottom = self.top + self.height
        yield text(self.left, self.top - 30, title, size=13, weight="bold")
        yield text(self.left, self.top - 12, y_name, size=11, fill=QUIET)
        yield text(self.left + self.width / 2, bottom + 34, x_name, size=11, anchor="middle", fill=QUIET)
        for value in self.y.marked:
            y = self.at((self.x.first, value))[1]
            yield line([(self.left, y), (self.left + self.width, y)], stroke="#e2e8f0")
            yield text(self.left - 8, y + 4, self.y.written(value), size=11, anchor="end")
        for value in self.x.marked:
            x = self.at((value, self.y.first))[0]
            yield line([(x, bottom), (x, bottom + 4)], stroke=FAINT)
            yield text(x, bottom + 17, self.x.written(value), size=11, anchor="middle")
        yield line([(self.left, bottom), (self.left + self.width, bottom)], stroke=FAINT)

    def curves(self, curves: Mapping[str, Curve]) -> Iterator[str]:
        """Draws curves, and their names where they end, one below the other."""
        last_y = float("-inf")
        for name, color in sorted(zip(curves, COLORS, strict=False), key=lambda each: -curves[each[0]][-1][1]):
            points = [self.at(point) for point in curves[name]]
            x, y = points[-1]
            last_y = max(y, last_y + 15)
            yield line(points, stroke=color, thickness=2.5)
            yield line([(x, y), (x + 8, last_y)], stroke=color)
            yield text(x + 12, last_y + 4, name, size=11, fill=color, weight="bold")

    def winners(self, curves: Mapping[str, Curve], y: float) -> Iterator[str]:
        """Draws a band that says which curve is the lowest where; all curves have the same x."""
        names = list(curves)
        lowest = [min(names, key=lambda name: curves[name][place][1]) for place in range(len(curves[names[0]]))]
        begins = [place for place, name in enumerate(lowest) if place == 0 or name != lowest[place - 1]]
        for begin, end in zip(begins, [*begins[1:], len(lowest) - 1], strict=True):
            left, right = (self.at((curves[names[0]][place][0], self.y.first))[0] for place in (begin, end))
            name = lowest[begin]
            yield rect(left, y, right - left, 18, fill=COLORS[names.index(name)], stroke="#ffffff")
            if 6.2 * len(name) < right - left:
                yield text((left + right) / 2, y + 13, name, size=11, anchor="middle", fill="#ffffff", weight="bold")

    def points(self, curve: Curve, ranges: Sequence[tuple[float, float]]) -> Iterator[str]:
        """Draws points that lines join, each with its value beside it, and a bar over what was measured."""
        yield line(map(self.at, curve), stroke=COLORS[0], thickness=2.5)
        for (value, height), ends in zip(curve, ranges, strict=True):
            x, y = self.at((value, height))
            yield line([self.at((value, end)) for end in ends], stroke=INK, thickness=1.5)
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{COLORS[0]}"/>'
            yield text(x + 8, y + 20, f"{height:,.0f}", size=12, weight="bold")
