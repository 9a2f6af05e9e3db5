"""Writes figures of matplotlib as SVG."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def svg_of(figure: Figure, title: str) -> str:
    """Returns a figure as SVG, whose words stay words; drawn again it has the same bytes."""
    from matplotlib import rc_context

    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(written, format="svg", metadata={"Title": title, "Date": None, "Creator": None})
    return written.getvalue()
