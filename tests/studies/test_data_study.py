"""The benchmark of what feeds the workers: its table has every figure, also for a small data set."""

from __future__ import annotations

import data
import pytest
import torch

SMALL = data.Sizes(
    order=10**6, first_index=1000, resumed=6400, num_files=12, samples_per_file=20, num_steps=8
)


def test_the_table_has_all_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(data, "COMPUTING_S", 2e-3)
    num_threads = torch.get_num_threads()
    data.show(num_turns=1, sizes=SMALL)
    torch.set_num_threads(num_threads)
    out = capsys.readouterr().out
    wanted = (
        "order of 1e+06 samples",
        "first index",
        "resume at 90 % of 6e+03",
        "resume at 90 % of 12 tar files",
    )
    wanted += ("a step whose reading waits", "in whole batches", "one by one", "a worker of 4")
    for name in wanted:
        assert name in out
    assert "12 (at most 16)" in out and "6 (at most 10)" in out and "3 (at most 7)" in out


def test_reading_waits_as_long_as_asked() -> None:
    assert 0 < data._sleep_for(1e-3) <= 1e-3
