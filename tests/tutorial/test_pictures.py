"""The pictures of the read-along are what their schedules and measurements give, byte for byte.

Tests: ddp/lab/draw_overlap.py.
"""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from ddp.lab.timeline import timeline_text
from recipes.tutorial.tools import pictures
from tests.ranks import run_ranks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", pictures.PICTURES)
@pytest.mark.quick(1)
def test_drawn_again_it_says_the_same(name: str) -> None:
    """Schedules have the same bytes; what matplotlib draws has the same words, whichever version of it is here."""
    drawn, kept = pictures.PICTURES[name](), (pictures.FOLDER / name).read_text(encoding="utf-8")
    if kept.startswith("<svg"):
        assert drawn == kept, f"run python -m {pictures.__name__}"
    assert words_of(drawn) == words_of(kept), f"run python -m {pictures.__name__}"
    assert ElementTree.fromstring(drawn).findtext(f"{SVG}title")
    assert len(drawn) < 200_000


def words_of(picture: str) -> list[str]:
    return [str(text.text).strip() for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_nothing_else_lies_there() -> None:
    kept = {f"{name}.json" for name in pictures.PLANS}
    assert {path.name for path in pictures.FOLDER.iterdir()} == kept | set(pictures.PICTURES)


@pytest.mark.parametrize("name", pictures.PLANS)
def test_a_measurement_says_what_it_is_of(name: str) -> None:
    kept, plan = pictures.measured(name), pictures.PLANS[name]
    assert set(kept) == {"command", "cores", "torch", "rounds"}
    assert {int(workers): len(rounds) for workers, rounds in kept["rounds"].items()} == dict.fromkeys(
        plan.workers, plan.num_rounds
    )


def test_the_cheapest_is_the_lowest_curve() -> None:
    """The lower curve wins on each side of their crossing; a name stands where there is room for it."""
    axes = Figure().subplots()
    curves = {"up": [1.0, 5.0, 9.0, 9.0], "down": [9.0, 8.0, 1.0, 1.0]}
    pictures._draw_cheapest(axes, [1.0, 10.0, 100.0, 1e6], curves)
    spans = [bar.get_paths()[0].get_extents().intervalx.tolist() for bar in axes.collections]
    assert spans == [[1, 100], [100, 1e6]]
    assert [text.get_text() for text in axes.texts] == ["up", "down"]


@pytest.mark.slow
def test_measurements_can_be_made_again() -> None:
    def measure() -> dict[str, Any]:
        from ddp.comm.session import init, shutdown
        from ddp.lab import draw_overlap
        from recipes.tutorial.tools import measure

        measure.WARM_UP, measure.NUM_TURNS, measure.TURN_S = 1, 1, 0.0
        draw_overlap.WARM_UP, draw_overlap.NUM_STEPS = 1, 3
        comm = init(device="cpu", shared_memory=False)
        measured = {name: measured(comm) for name, measured in measure.MEASUREMENTS.items()}
        shutdown()
        return measured

    first, second = run_ranks(measure, 2)
    assert first["costs"] == second["costs"] and first["costs"]["alpha_s"] > 0
    assert first["scaling"] > 0
    background, foreground, default = first["overlap"]
    assert default == "in the background"  # since there is a wire to wait for
    assert [step["runs"] for run in (background, foreground) for step in run] == 2 * [default] + 2 * [
        "in the foreground"
    ]
    assert all(step["overlap"] == 0 for step in foreground)
    text = timeline_text(background, foreground)
    assert text.count("backward  ") == 4 and text.count("bucket 4") == 5
    assert "hidden1.bias … hidden1.weight" in text
