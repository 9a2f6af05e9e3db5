"""The shapes and colours of pictures (SVG), as text.

Every function returns one element. Numbers are written with one digit after the point, so a picture that is drawn again
has the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from colorsys import hls_to_rgb
from html import escape

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
    lightness = 0.66 if hue % 2 == 0 or num_hues < 9 else 0.56  # neighbours stay apart where hues are many
    red, green, blue = hls_to_rgb((0.58 + hue / num_hues) % 1.0, lightness, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
