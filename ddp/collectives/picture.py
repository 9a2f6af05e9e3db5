"""Draws a schedule as a picture (SVG).

python -m ddp draw ring 3 --svg ring.svg

The picture runs from top to bottom: a row of buffers, the transfers of a round, the buffers after it, and so on. A
chunk keeps its colour; its cell is filled by its share of contributions; a ribbon is as wide as its chunks. Additions
among a rank's own buffers after a round are below them: "0 += 2".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from colorsys import hls_to_rgb
from html import escape
from itertools import product, zip_longest
from typing import NamedTuple

from ddp.collectives.placed import Hosts
from ddp.collectives.schedule import Add, Goal, Proof, Recv, Round, Schedule, Send, SymbolicRun, Value
from ddp.units import counted

# --- Shapes and colours, as text -------------------------------------------------------------------------------------
#
# Every function returns one element. Numbers have one digit after the point, so redrawing a picture gives the same
# bytes.


INK, FAINT, PAPER, PANEL, QUIET = "#1f2937", "#94a3b8", "#ffffff", "#f1f5f9", "#64748b"


def page(title: str, width: float, height: float, parts: Iterable[str]) -> str:
    """Returns a picture: these parts on white paper, which dark pages need, too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="Helvetica, Arial, sans-serif" fill="{INK}">'
    )
    paper = rect(0, 0, width, height, fill=PAPER, stroke="none")
    return "\n".join([head, f"<title>{escape(title)}</title>", paper, *parts, "</svg>\n"])


def rect(
    x: float, y: float, width: float, height: float, *, fill: str, stroke: str, dash: str = "", thickness: float = 1
) -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"'
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<rect {box} stroke="{stroke}" stroke-width="{thickness:.2g}"{dashes}/>'


def text(
    x: float, y: float, words: str, *, size: int, anchor: str = "start", weight: str = "normal", fill: str = INK
) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def color_of(hue: int, num_hues: int) -> str:
    """Returns one of `num_hues` colours that differ from each other and carry dark text."""
    lightness = 0.66 if hue % 2 == 0 or num_hues < 9 else 0.56  # alternate, so that many hues stay distinguishable
    red, green, blue = hls_to_rgb((0.58 + hue / num_hues) % 1.0, lightness, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


MARGIN, LABELS, HEADER, FOOTER = 28, 74, 108, 84  # left of everything; round labels; title; legend
CELL_HEIGHT, TIP_HEIGHT, READABLE = 26, 10, 9  # a cell less wide than the last bears no number
LINE_HEIGHT = 13  # of an addition


def svg(schedule: Schedule, num_ranks: int, *, title: str, hosts: Hosts = ()) -> str:
    """Returns a picture of the schedule; it is readable up to some 16 ranks.

    Args:
        hosts: drawn as frames around their ranks, if given.

    Raises:
        ScheduleError: the schedule is wrong.
    """
    proof = schedule.check(num_ranks)
    programs = [list(schedule.algorithm(rank, num_ranks)) for rank in range(num_ranks)]
    sheet = _Page(programs, proof.num_chunks, goal=schedule.goal, hosts=hosts)
    run = SymbolicRun(schedule, num_ranks)
    height = sheet.top(proof.num_rounds) + sheet.state_height + FOOTER
    parts = [
        *_heading(schedule, proof, title),
        *(part for number in range(1, proof.num_rounds + 1) for part in sheet.panel(number)),
        *sheet.names(height),
        *sheet.state(run, 0),
    ]
    for number, ops in enumerate(zip_longest(*programs), start=1):
        run.play(ops)
        parts += [*sheet.flights(ops, number), *sheet.state(run, number), *sheet.additions(ops, number)]
    return page(title, sheet.width, height, [*parts, *sheet.legend(height)])


def _heading(schedule: Schedule, proof: Proof, title: str) -> Iterator[str]:
    most = max(proof.messages_sent)
    share = f"{float(proof.busiest):.3g}"
    sent = f"{counted(most, 'message')}, {share} × the buffer"
    counts = f"{counted(proof.num_rounds, 'round')}  ·  a rank sends at most {sent}"
    order = "  ·  canonical order of additions" if schedule.goal.adds and proof.canonical else ""
    yield text(MARGIN, 34, title, size=20, weight="bold")
    yield text(MARGIN, 54, f"Goal: {schedule.goal.value}.", size=12)
    yield text(MARGIN, 71, counts + order, size=12)


class _Page:
    """Places everything on the page: ranks are columns, rounds follow each other downwards."""

    def __init__(self, programs: Sequence[Sequence[Round]], num_chunks: int, *, goal: Goal, hosts: Hosts) -> None:
        self.num_ranks, self.num_chunks, self.goal, self.hosts = len(programs), num_chunks, goal, hosts
        num_ranks, rounds = self.num_ranks, [ops for program in programs for ops in program]
        landings = [op.buffer for ops in rounds for op in ops if isinstance(op, Recv)]
        self.num_buffers = 2 if goal is Goal.ALL_TO_ALL else 1 + max(landings, default=0)
        self.most_additions = max((sum(isinstance(op, Add) for op in ops) for ops in rounds), default=0)
        self.cell = max(5.0, min(1000 / num_ranks / (num_chunks + 1), 30.0 if num_chunks > 1 else 56.0))
        self.column = self.cell * num_chunks
        self.gap = max(14.0, min(40.0, 0.3 * self.column))
        self.gap = max(self.gap, min(60.0, 540 / num_ranks - self.column))  # few ranks spread out
        order = [rank for host in hosts for rank in host] or list(range(num_ranks))
        self.place = {rank: place for place, rank in enumerate(order)}
        self.width = max(640.0, LABELS + num_ranks * (self.column + self.gap) + 2 * MARGIN)
        self.state_height = self.num_buffers * (CELL_HEIGHT + 4) + self.most_additions * LINE_HEIGHT + 10
        self.flight_height = 70 + 0.045 * self.width  # so that far ribbons do not lie too flat

    def left(self, rank: int, chunk: int) -> float:
        """Returns x of a chunk's cell."""
        return MARGIN + LABELS + self.gap / 2 + self.place[rank] * (self.column + self.gap) + chunk * self.cell

    def top(self, number: int) -> float:
        """Returns y of the buffers after round `number`, or before the first round for 0."""
        return HEADER + 30 + number * (self.flight_height + self.state_height)

    def names(self, height: float) -> Iterator[str]:
        """Draws the names of the ranks, and a frame around those of each host."""
        for number, host in enumerate(self.hosts if len(self.hosts) > 1 else ()):
            x = self.left(host[0], 0) - self.gap / 2 + 3
            width = self.left(host[-1], self.num_chunks) + self.gap / 2 - 3 - x
            yield rect(x, HEADER - 18, width, height - FOOTER - HEADER + 18, fill="none", stroke=FAINT, dash="4 3")
            yield text(x + 6, HEADER - 4, f"host {number}", size=11, fill=QUIET)
        for rank in range(self.num_ranks):
            yield text(self.left(rank, 0) + self.column / 2, HEADER + 20, f"rank {rank}", size=12, anchor="middle")
        yield text(MARGIN, self.top(0) + 18, "at first", size=12)

    def panel(self, number: int) -> Iterator[str]:
        """Draws the background of a round, and its number."""
        y = self.top(number) - self.flight_height
        yield rect(MARGIN - 10, y, self.width - 2 * MARGIN + 20, self.flight_height - 5, fill=PANEL, stroke="none")
        yield text(MARGIN, y + self.flight_height / 2, f"round {number}", size=13, weight="bold")

    def state(self, run: SymbolicRun, number: int) -> Iterator[str]:
        """Draws every rank's buffers, cell by cell; fuller ones last, so that their edges are visible."""
        places = [
            (rank, buffer, chunk)
            for rank in range(self.num_ranks)
            for buffer in range(self.num_buffers)
            for chunk in range(self.num_chunks)
        ]
        values = {place: run.buffers[place[0]].get(place[1:]) for place in places}
        for place in sorted(places, key=lambda place: _fullness(values[place], run)):
            rank, buffer, chunk = place
            x, y = self.left(rank, chunk), self.top(number) + buffer * (CELL_HEIGHT + 4)
            yield from self._cell(x, y, chunk, values[place], run)
        if self.most_additions:  # which name buffers
            for rank, buffer in product(range(self.num_ranks), range(self.num_buffers)):
                y = self.top(number) + buffer * (CELL_HEIGHT + 4) + CELL_HEIGHT / 2 + 3
                yield text(self.left(rank, 0) - 4, y, str(buffer), size=9, anchor="end", fill=QUIET)

    def additions(self, rounds: tuple[Round, ...], number: int) -> Iterator[str]:
        """Writes each rank's additions among its buffers, in order, below their chunks."""
        for rank, ops in enumerate(rounds):
            y = self.top(number) + self.num_buffers * (CELL_HEIGHT + 4) + 8
            for op in ops:
                if isinstance(op, Add):
                    x = self.left(rank, op.chunks.start) + len(op.chunks) * self.cell / 2
                    yield text(x, y, f"{op.into} += {op.other}", size=10, anchor="middle")
                    y += LINE_HEIGHT

    def _cell(self, x: float, y: float, chunk: int, value: Value | None, run: SymbolicRun) -> Iterator[str]:
        if value is None:
            yield rect(x, y, self.cell, CELL_HEIGHT, fill=PAPER, stroke=FAINT, dash="2 2")
            return
        full = _fullness(value, run)
        hue = chunk if run.goal is not Goal.ALL_TO_ALL else value.contributors.bit_length() - 1
        filled, edge = full * CELL_HEIGHT, INK if full == 1 else FAINT
        color = color_of(hue, self.num_chunks)
        yield rect(x, y + CELL_HEIGHT - filled, self.cell, filled, fill=color, stroke="none")
        yield rect(x, y, self.cell, CELL_HEIGHT, fill="none", stroke=edge, thickness=min(1, self.cell / 10))
        if self.cell >= READABLE:
            label = value.contributors.bit_count() if run.goal.adds else value.expression
            size = min(12, int(self.cell * 0.8))
            yield text(x + self.cell / 2, y + CELL_HEIGHT / 2 + size / 3, str(label), size=size, anchor="middle")

    def flights(self, rounds: tuple[Round, ...], number: int) -> Iterator[str]:
        """Draws the transfers of a round, far ones below near ones."""
        messages = sorted(
            _messages(rounds), key=lambda message: -abs(self.place[message.peer] - self.place[message.rank])
        )
        y = self.top(number) - self.flight_height
        tip = self.top(number) - TIP_HEIGHT - 2
        for message in messages:
            for chunk, landing in zip(message.send.chunks, message.receive.chunks, strict=True):
                color = color_of(chunk if self.goal is not Goal.ALL_TO_ALL else message.rank, self.num_chunks)
                yield _ribbon(
                    self.left(message.rank, chunk), self.left(message.peer, landing), self.cell, y, tip, color
                )
        for message in messages:
            chunks = message.receive.chunks
            x, width = self.left(message.peer, chunks.start), len(chunks) * self.cell
            yield _tip(x, tip, width, filled=message.receive.add)

    def legend(self, height: float) -> Iterator[str]:
        """Explains the picture in two lines along the foot of the page."""
        y, goal = height - FOOTER + 24.0, self.goal
        moves = [(0.0, "undefined"), (1.0, "has it")]
        cells = [(1 / 3, "some contributions"), (1.0, "all of them")] if goal.adds else moves
        for place, (full, meaning) in enumerate(cells):
            x = MARGIN + 150.0 * place
            yield rect(x, y + 18 - 18 * full, 18, 18 * full, fill=color_of(0, 1), stroke="none")
            yield rect(x, y, 18, 18, fill="none", stroke=INK if full == 1 else FAINT, dash="" if full else "2 2")
            yield text(x + 26, y + 13, meaning, size=11)
        if self.cell >= READABLE:
            meaning = "number: how many contributions" if goal.adds else "number: whose it is"
            yield text(MARGIN + 150 * len(cells), y + 13, meaning, size=11)
        tips = [(True, "is added")] if goal.adds else []
        for place, (filled, meaning) in enumerate([*tips, (False, "is written over what was there")]):
            yield _tip(MARGIN + 150.0 * place, y + 30, 18, filled=filled)
            yield text(MARGIN + 150 * place + 26, y + 39, meaning, size=11)
        if self.most_additions:
            yield text(MARGIN + 365, y + 39, "0 += 2: buffer 2 is added to buffer 0", size=11)


class _Message(NamedTuple):
    """A send and the receive that takes it."""

    rank: int
    peer: int
    send: Send
    receive: Recv


def _messages(rounds: tuple[Round, ...]) -> Iterator[_Message]:
    """Pairs sends with their receives, in the order listed."""
    for rank, ops in enumerate(rounds):
        for peer in dict.fromkeys(op.peer for op in ops if isinstance(op, Send)):
            sends = [op for op in ops if isinstance(op, Send) and op.peer == peer]
            receives = [op for op in rounds[peer] if isinstance(op, Recv) and op.peer == rank]
            for send, receive in zip(sends, receives, strict=True):
                yield _Message(rank, peer, send, receive)


def _fullness(value: Value | None, run: SymbolicRun) -> float:
    """Returns the share of the contributions that a value has, from 0 to 1."""
    if value is None:
        return 0.0
    return value.contributors.bit_count() / run.num_contributors if run.goal.adds else 1.0


def _ribbon(x0: float, x1: float, width: float, y0: float, y1: float, color: str) -> str:
    above, below = y0 + 0.3 * (y1 - y0), y1 - 0.3 * (y1 - y0)
    there = f"M{x0:.1f},{y0:.1f} C{x0:.1f},{above:.1f} {x1:.1f},{below:.1f} {x1:.1f},{y1:.1f}"
    x0, x1 = x0 + width, x1 + width
    back = f"L{x1:.1f},{y1:.1f} C{x1:.1f},{below:.1f} {x0:.1f},{above:.1f} {x0:.1f},{y0:.1f} Z"
    return f'<path d="{there} {back}" fill="{color}" fill-opacity="0.6" stroke="{color}" stroke-width="0.8"/>'


def _tip(x: float, y: float, width: float, *, filled: bool) -> str:
    points = f"{x - 1:.1f},{y:.1f} {x + width + 1:.1f},{y:.1f} {x + width / 2:.1f},{y + TIP_HEIGHT:.1f}"
    return f'<polygon points="{points}" fill="{INK if filled else PAPER}" stroke="{INK}" stroke-linejoin="round"/>'
