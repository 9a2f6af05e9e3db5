"""Draws the timeline of a step, as text and as a picture (SVG): how much of the reductions backward has hidden.

python -m ddp draw overlap

rank 0  backward  ████████████████████████
        bucket 0        ░░░░░░░░░░
        bucket 1                   ·░░░░░░░░

A run is a list of what `BucketedDataParallel.logging_data()` returns, rank by rank. Several runs are drawn one above
the other with the same length for a millisecond, so that they can be compared.

Zero is the moment at which a rank's own backward began. No clock is common to ranks of several hosts, and none is
needed: what the ranks wait for shows in the times between ready and done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddp.errors import ConfigError
from ddp.pictures.svg import FAINT, INK, PANEL, QUIET, color_of, line, marks, page, rect, text

Run = Sequence[Mapping[str, Any]]
"""By rank, what `logging_data()` has returned."""

MEANING = {
    "in the background": "a thread reduces buckets while backward goes on",
    "in the foreground": "backward stands still while a bucket is reduced",
}

# --- text ------------------------------------------------------------------------------------------------------------

COLUMNS = 50  # of the time axis


def timeline_text(*runs: Run) -> str:
    """Returns a block for each run, a line for every backward and bucket in it; and what the buckets hold.

    Raises:
        ConfigError: a rank has reduced nothing yet.
    """
    longest_s = _longest_s(runs)
    blocks = ["\n".join(_block(run, longest_s)) for run in runs]
    names = [
        f"bucket {bucket['index']:<3}{_size(bucket['bytes']):<9} {_names(bucket['parameters'])}"
        for bucket in runs[0][0]["buckets"]
    ]
    return "\n\n".join([*blocks, "\n".join(names)])


def _block(run: Run, longest_s: float) -> Iterator[str]:
    how = run[0]["runs"]
    yield f"{how}: {MEANING[how]}"
    yield f"{'':18}0 ms{f'{longest_s * 1e3:.1f} ms':>{COLUMNS - 4}}   ready launched    done  hidden"
    for rank, step in enumerate(run):
        cells = _painted("", 0.0, step["backward_s"], longest_s, "█")
        for began_s, over_s in _pauses(step):
            cells = _painted(cells, began_s, over_s, longest_s, "─")
        yield f"rank {rank:<3}backward  {cells:<{COLUMNS}}{_ms(step['backward_s']):>24}{step['overlap']:>8.0%}"
        for bucket in step["buckets"]:
            ready_s, launched_s, done_s = bucket["ready_s"], bucket["launched_s"], bucket["done_s"]
            cells = _painted("", ready_s, launched_s, longest_s, "·")
            cells = _painted(cells, launched_s, done_s, longest_s, "░", least=1)
            times = f"{_ms(ready_s):>8}{_ms(launched_s):>9}{_ms(done_s):>7}{bucket['overlap']:>8.0%}"
            yield f"{'':8}bucket {bucket['index']:<3}{cells:<{COLUMNS}}{times}"


def _painted(cells: str, began_s: float, over_s: float, longest_s: float, letter: str, *, least: int = 0) -> str:
    """Returns a line of text with `least` or more of a letter from one moment to another."""
    end = max(least, round(over_s / longest_s * COLUMNS))
    begin = min(end - least, round(began_s / longest_s * COLUMNS))
    cells = cells.ljust(end)
    return cells[:begin] + letter * (end - begin) + cells[end:]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


# --- picture ---------------------------------------------------------------------------------------------------------

MARGIN, LABELS, AXIS = 28, 112, 720  # left of everything; names of the ranks; length of the time axis
WIDTH = MARGIN + LABELS + AXIS + 72 + MARGIN
HEADER, ROW, BETWEEN, FOOTER = 84, 24, 18, 84
COMPUTES = "#cbd5e1"


def timeline_svg(*runs: Run, title: str = "One step: backward, and what it hides") -> str:
    """Returns a picture with a panel for each run: every rank's backward, and below it its reductions.

    Raises:
        ConfigError: a rank has reduced nothing yet.
    """
    longest_s = _longest_s(runs)
    parts, y = list(_heading(title, runs)), float(HEADER)
    for run in runs:
        panel = _Panel(run, y, longest_s)
        parts += panel.parts()
        y += panel.height + BETWEEN
    buckets = runs[0][0]["buckets"]
    parts += [*_bucket_names(buckets, y + 14), *_legend(y + 14 + (len(buckets) + 1) // 2 * 20 + 16)]
    return page(title, WIDTH, y + 14 + (len(buckets) + 1) // 2 * 20 + FOOTER, parts)


class _Panel:
    """One run: the ranks one below the other, above a time axis."""

    def __init__(self, run: Run, top: float, longest_s: float) -> None:
        self.run, self.top, self.longest_s = run, top, longest_s
        self.lanes = [_lanes(step["buckets"]) for step in run]
        self.rows = [ROW * (1 + max(lanes) + 1) + BETWEEN for lanes in self.lanes]
        self.height = 34 + sum(self.rows) + 26

    def x(self, at_s: float) -> float:
        """Returns where a moment stands on the page."""
        return MARGIN + LABELS + at_s / self.longest_s * AXIS

    def parts(self) -> Iterator[str]:
        """Draws the panel from its background to the marks of its ranks."""
        how, bottom = self.run[0]["runs"], self.top + self.height - 26
        yield rect(MARGIN - 10, self.top, WIDTH - 2 * MARGIN + 20, self.height, fill=PANEL, stroke="none")
        yield text(MARGIN, self.top + 20, how.capitalize(), size=13, weight="bold")
        yield text(MARGIN + LABELS + 20, self.top + 20, MEANING[how], size=12)
        for mark_ms in marks(self.longest_s * 1e3, 9):
            x = self.x(mark_ms / 1e3)
            yield line([(x, self.top + 30), (x, bottom)], stroke="#dbe2ea")
            yield text(x, bottom + 15, f"{mark_ms:g} ms", size=11, anchor="middle", fill=QUIET)
        y = self.top + 34
        for rank, (step, lanes) in enumerate(zip(self.run, self.lanes, strict=True)):
            yield from self._rank(rank, step, lanes, y)
            y += self.rows[rank]

    def _rank(self, rank: int, step: Mapping[str, Any], lanes: Sequence[int], y: float) -> Iterator[str]:
        buckets, backward_s = step["buckets"], step["backward_s"]
        end = self.x(backward_s)
        yield text(MARGIN, y + 17, f"rank {rank}", size=12, weight="bold")
        yield text(MARGIN, y + ROW + 16, f"{step['overlap']:.0%} hidden", size=11, fill=QUIET)
        edges = [0.0, *(moment for pause in _pauses(step) for moment in pause), backward_s]
        yield line([(self.x(0), y + 12), (end, y + 12)], stroke=FAINT)
        for began_s, paused_s in zip(edges[::2], edges[1::2], strict=True):
            yield rect(self.x(began_s), y + 3, self.x(paused_s) - self.x(began_s), 18, fill=COMPUTES, stroke="none")
        yield text(end + 6, y + 17, f"{_ms(backward_s)} ms", size=11)
        for bucket, lane in zip(buckets, lanes, strict=True):
            yield from self._bucket(bucket, color_of(bucket["index"], len(buckets)), y + ROW * (1 + lane))
        yield line([(end, y), (end, y + ROW * (2 + max(lanes)) + 2)], stroke=INK, dash="3 3")
        for bucket, lane in zip(buckets, lanes, strict=True):
            yield from self._label(bucket, y + ROW * (1 + lane))
        last = max(zip(buckets, lanes, strict=True), key=lambda pair: pair[0]["done_s"])
        last_s = last[0]["done_s"]
        yield text(self.x(last_s) + 6, y + ROW * (1 + last[1]) + 17, f"{_ms(last_s)} ms", size=11, weight="bold")

    def _bucket(self, bucket: Mapping[str, Any], color: str, y: float) -> Iterator[str]:
        ready, launched, done = (self.x(bucket[moment]) for moment in ("ready_s", "launched_s", "done_s"))
        if launched - ready > 1:
            yield line([(ready, y + 12), (launched, y + 12)], stroke=color, thickness=2)
        yield rect(launched, y + 3, max(1.0, done - launched), 18, fill=color, stroke="none")
        yield _ready(ready, y + 2)

    def _label(self, bucket: Mapping[str, Any], y: float) -> Iterator[str]:
        """Writes as much about a bucket as there is room for."""
        launched, done = self.x(bucket["launched_s"]), self.x(bucket["done_s"])
        number = f"{bucket['index']}"
        for words in (f"bucket {number}  ·  {_size(bucket['bytes'])}", f"bucket {number}", number):
            if 6.0 * len(words) + 4 < done - launched:
                yield text((launched + done) / 2, y + 16, words, size=11, anchor="middle")
                return


def _heading(title: str, runs: Sequence[Run]) -> Iterator[str]:
    step = runs[0][0]
    what = f"{step['world_size']} ranks, {step['num_parameters']} parameters in {len(step['buckets'])} buckets"
    yield text(MARGIN, 34, title, size=20, weight="bold")
    yield text(MARGIN, 54, f"{what}, {_size(step['bytes'])} in all. Time runs to the right", size=12)
    yield text(MARGIN, 71, "from the moment at which a rank's backward began.", size=12)


def _bucket_names(buckets: Sequence[Mapping[str, Any]], y: float) -> Iterator[str]:
    for place, bucket in enumerate(buckets):
        row, column = divmod(place, 2)
        x, at = MARGIN + column * (WIDTH - 2 * MARGIN) / 2, y + 20 * row
        yield rect(x, at, 14, 14, fill=color_of(bucket["index"], len(buckets)), stroke="none")
        yield text(x + 22, at + 11, f"bucket {bucket['index']}", size=11, weight="bold")
        yield text(x + 80, at + 11, _size(bucket["bytes"]), size=11)
        yield text(x + 138, at + 11, _names(bucket["parameters"]), size=11)


def _legend(y: float) -> Iterator[str]:
    """Explains the marks in two lines along the foot of the page."""
    first, second, third, below = MARGIN, MARGIN + 190, MARGIN + 380, y + 24
    yield rect(first, y, 18, 14, fill=COMPUTES, stroke="none")
    yield line([(second, y + 7), (second + 18, y + 7)], stroke=FAINT)
    yield line([(third + 9, y - 3), (third + 9, y + 17)], stroke=INK, dash="3 3")
    yield _ready(first + 9, below + 6)
    yield line([(second, below + 7), (second + 18, below + 7)], stroke=color_of(0, 1), thickness=2)
    yield rect(third, below, 18, 14, fill=color_of(0, 1), stroke="none")
    yield text(first + 26, y + 11, "backward computes", size=11)
    yield text(second + 26, y + 11, "it stands still", size=11)
    yield text(third + 26, y + 11, "it has ended", size=11)
    yield text(first + 26, below + 11, "a bucket is ready", size=11)
    yield text(second + 26, below + 11, "it waits for its turn", size=11)
    yield text(third + 26, below + 11, "it is in flight, or waits for the other ranks", size=11)


def _ready(x: float, y: float) -> str:
    return f'<polygon points="{x - 4:.1f},{y - 4:.1f} {x + 4:.1f},{y - 4:.1f} {x:.1f},{y + 3:.1f}"/>'


# --- both ------------------------------------------------------------------------------------------------------------


def _longest_s(runs: Sequence[Run]) -> float:
    """Returns how long the longest step of all runs and ranks took."""
    steps = [step for run in runs for step in run]
    if not steps or not all(step["buckets"] for step in steps):
        raise ConfigError("no bucket has been reduced yet: call logging_data() after a backward on every rank")
    return max(map(ended_s, steps))


def ended_s(step: Mapping[str, Any]) -> float:
    """Returns when a rank had backward and all reductions behind it."""
    return max(float(step["backward_s"]), *(float(bucket["done_s"]) for bucket in step["buckets"]))


def _pauses(step: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Returns from when to when a backward stood still: while it reduced in the foreground."""
    if step["runs"] != "in the foreground":
        return []
    moments = [(bucket["launched_s"], bucket["done_s"]) for bucket in step["buckets"]]
    return [(launched_s, done_s) for launched_s, done_s in moments if done_s <= step["backward_s"]]


def _lanes(buckets: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the row of each bucket: the first one that is free when the bucket is ready."""
    free_s: list[float] = []
    lanes = []
    for bucket in buckets:
        lane = next((lane for lane, at_s in enumerate(free_s) if at_s <= bucket["ready_s"]), len(free_s))
        free_s[lane:] = [bucket["done_s"], *free_s[lane + 1 :]]
        lanes.append(lane)
    return lanes


def _names(parameters: Sequence[str]) -> str:
    return parameters[0] if len(parameters) == 1 else f"{parameters[0]} … {parameters[-1]}"


def _size(nbytes: int) -> str:
    unit, factor = next((pair for pair in (("MiB", 1 << 20), ("KiB", 1 << 10)) if nbytes >= pair[1]), ("B", 1))
    return f"{nbytes / factor:.3g} {unit}"
