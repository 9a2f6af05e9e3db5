"""Reads and writes sizes, rates and times as people do: "25MB" (1 KB is 1024 bytes), "1gbit" (per second), "5ms".

`format_size` writes what `parse_size` reads. Measured times and bandwidths are shown with three digits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from ddp.errors import ConfigError

SIZES = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
RATES = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
DELAYS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_size(text: str) -> int:
    """Returns the bytes of a tensor of float32.

    Raises:
        ConfigError: the text is no size, or the size is no whole number of float32.
    """
    size = _parse(text.upper(), SIZES)
    if size is None or size < 4 or size % 4:
        raise ConfigError(f"size {text!r}: want a multiple of 4 bytes (a float32), with its unit, e.g. 4B, 64KB, 25MB")
    return int(size)


def format_size(nbytes: int) -> str:
    """Returns the size in the largest unit that fits: "25MB"."""
    unit = max((unit for unit in SIZES if nbytes >= SIZES[unit]), key=SIZES.__getitem__, default="B")
    return f"{nbytes / SIZES[unit]:.10g}{unit}"


def parse_rate(text: str) -> float | None:
    """Returns bits per second, or None if the text is no rate."""
    return _parse(text.lower(), RATES) or None


def parse_delay(text: str) -> float | None:
    """Returns seconds, or None if the text is no delay."""
    return _parse(text.lower(), DELAYS)


def format_time(seconds: float) -> str:
    """Returns "8.31 µs", "12.4 ms" or "1.50 s"."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds)} s"


def format_bandwidth(bytes_s: float) -> str:
    """Returns decimal GB/s without the unit; small ones keep their digits."""
    return f"{bytes_s / 1e9:.2g}" if bytes_s < 1e9 else three_digits(bytes_s / 1e9)


def three_digits(value: float) -> str:
    """Returns "1.23", "12.3" or "123"."""
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}"


def written(write: Callable[[float], str], value: float | None, factor: float = 1.0) -> str:
    """Returns the text of value × factor for a table; "" for what was not measured."""
    return "" if value is None else write(value * factor)


def _parse(text: str, units: Mapping[str, float]) -> float | None:
    match = re.fullmatch(rf"(\d+\.?\d*|\.\d+)({'|'.join(units)})", text)
    value = float(match[1]) * units[match[2]] if match else math.inf
    return value if value < math.inf else None


def counted(number: int, noun: str) -> str:
    """Returns "1 worker", "2 workers", …"""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def binary_size(nbytes: float) -> str:
    """Returns "512 B", "1.5 KiB", "12 MiB", …"""
    units = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    unit, factor = next((pair for pair in units if nbytes >= pair[1]), ("B", 1))
    return f"{nbytes / factor:.3g} {unit}"


def lines_of_table(rows: Sequence[Sequence[str]], sides: str = "<") -> list[str]:
    """Returns the lines of a table. `sides`: "<" or ">" for each column from the left on; all others are ">"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [f"{{:{side}{width}}}" for side, width in zip(sides.ljust(len(widths), ">"), widths, strict=True)]
    return ["  ".join(aligned).format(*row).rstrip() for row in rows]


def milliseconds(seconds: float) -> str:
    """Returns milliseconds without the unit: "12.3"."""
    return f"{seconds * 1e3:.1f}"
