"""Sizes, rates and times as people write them: "25MB" (of 1024 × 1024 bytes), "1gbit" (per second, decimal), "5ms".

What a `parse_…` reads, the `format_…` of the same name writes; three digits are enough for what was measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ddp.errors import ConfigError

SIZES = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
RATES = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
DELAYS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_size(text: str) -> int:
    """Bytes of a tensor of float32.

    Raises:
        ConfigError: no size, or no whole number of float32.
    """
    size = _parse(text.upper(), SIZES)
    if size is None or size < 4 or size % 4:
        raise ConfigError(f"size {text!r}: want a multiple of 4 bytes (a float32), e.g. 1KB, 64KB, 25MB")
    return int(size)


def format_size(nbytes: int) -> str:
    return _format(nbytes, SIZES)


def parse_rate(text: str) -> float | None:
    """Bits per second; None if that is no rate."""
    return _parse(text.lower(), RATES) or None


def format_rate(bit_s: float) -> str:
    return _format(bit_s, RATES)


def parse_delay(text: str) -> float | None:
    """Seconds; None if that is no delay."""
    return _parse(text.lower(), DELAYS)


def format_delay(seconds: float) -> str:
    return _format(seconds, DELAYS)


def format_time(seconds: float) -> str:
    """For tables, three digits: "8.31 µs", "12.4 ms", "1.50 s"."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds)} s"


def format_bandwidth(bytes_s: float) -> str:
    """In GB/s (decimal), without the unit; small ones keep their digits."""
    return f"{bytes_s / 1e9:.2g}" if bytes_s < 1e9 else three_digits(bytes_s / 1e9)


def three_digits(value: float) -> str:
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}"


def _parse(text: str, units: Mapping[str, float]) -> float | None:
    match = re.fullmatch(rf"(\d+\.?\d*|\.\d+)({'|'.join(units)})", text)
    return float(match[1]) * units[match[2]] if match else None


def _format(value: float, units: Mapping[str, float]) -> str:
    fitting = [unit for unit in units if value >= units[unit]]
    unit = fitting[-1] if fitting else next(iter(units))
    return f"{value / units[unit]:.10g}{unit}"
