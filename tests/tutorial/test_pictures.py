"""The pictures of the read-along are what their schedules and measurements give, byte for byte."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from ddp.pictures.svg import marks
from ddp.pictures.timeline import timeline_text
from recipes.tutorial.tools import pictures
from recipes.tutorial.tools.chart import Axis, Panel
from tests.ranks import run_ranks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_drawn_again_it_has_the_same_bytes(name: str) -> None:
    drawn = pictures.PICTURES[name]()
    assert drawn == (pictures.FOLDER / name).read_text(encoding="utf-8"), f"run python -m {pictures.__name__}"
    assert ElementTree.fromstring(drawn).findtext(f"{SVG}title")
    assert len(drawn) < 200_000


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


def test_curves_stand_where_their_values_say() -> None:
    """Two powers of ten on the left edge, in the middle, and on the right edge; the lower curve wins on each side."""
    x = Axis(1.0, 100.0, [1.0, 10.0, 100.0], str, logarithmic=True)
    panel = Panel(50, 20, 200, 100, x, Axis(0.0, 10.0, [0.0, 10.0], str))
    curves = {"up": [(1.0, 0.0), (10.0, 5.0), (100.0, 10.0)], "down": [(1.0, 9.0), (10.0, 4.0), (100.0, 1.0)]}
    lines = [part for part in panel.curves(curves) if "2.5" in part]
    assert [part.split('"')[1] for part in lines] == [
        "50.0,120.0 150.0,70.0 250.0,20.0",
        "50.0,30.0 150.0,80.0 250.0,110.0",
    ]
    bands = [ElementTree.fromstring(part) for part in panel.winners(curves, 0) if part.startswith("<rect")]
    assert [(band.get("x"), band.get("width")) for band in bands] == [("50.0", "100.0"), ("150.0", "100.0")]


@pytest.mark.parametrize(
    ("most", "expected"), [(1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (47.0, [0, 10, 20, 30, 40]), (5.0, [0, 1, 2, 3, 4, 5])]
)
def test_marks_are_round_numbers(most: float, expected: list[float]) -> None:
    assert marks(most, 5) == pytest.approx(expected)


def test_measurements_can_be_made_again() -> None:
    def measure() -> dict[str, Any]:
        from ddp.bench import overlap
        from ddp.comm.setup import init, shutdown
        from recipes.tutorial.tools import measure

        measure.WARM_UP, measure.NUM_TURNS, measure.TURN_S = 1, 1, 0.05
        overlap.WARM_UP, overlap.NUM_STEPS = 1, 3
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
