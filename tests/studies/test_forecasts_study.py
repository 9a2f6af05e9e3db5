"""The study of forecasts: cells are the same on all ranks, and of several methods it tells what the choice costs."""

from __future__ import annotations

from functools import partial

from ranks import run_ranks

from ddp.lab.bench import turns
from recipes.studies.forecasts import CompareForecasts, ForecastCell, chosen


def test_of_several_methods_the_one_that_was_forecast_fastest_is_told() -> None:
    cell = partial(ForecastCell, place="here", model="mlp", naive_s=[1.0])
    plain = cell(name="plain", measured_s=[2.0, 4.0, 3.0], forecast_s=[3.0, 2.0, 1.0])
    other = cell(name="int8", measured_s=[2.5, 2.5, 9.0], forecast_s=[4.0, 4.0, 1.0])
    assert [each.over_fastest for each in chosen([plain, other])] == [3.0 / 2.5, None]
    assert [each.columns()["chosen ÷ fastest"] for each in chosen([other, plain])] == ["", "1.20"]
    assert [each.over_fastest for each in chosen([plain])] == [None]


def on_two_ranks() -> list[ForecastCell]:
    turns.TURN_S = 0.0
    return CompareForecasts("small-mlp", ("plain", "int8"), num_turns=1)()


def test_cells_are_the_same_on_all_ranks() -> None:
    cells, same = run_ranks(on_two_ranks, 2, timeout_s=100)
    assert cells == same
    assert [cell.name for cell in cells] == ["plain", "int8"]
    for cell in cells:
        assert cell.place.startswith("2 ranks on one host") and cell.columns().keys() == cell.legend.keys()
        assert min(cell.measured_s[0], cell.forecast_s[0], cell.naive_s[0]) > 0
