"""Iterables in fit: the same steps at any world size, exact resume, and streams that end at different times.

Tests: ddp/data/loading/iterable.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import ddp
from ddp.errors import ConfigError
from ddp.process.terminal import log

INPUTS = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
SEEN: list[list[float]] = []  # samples that this process has trained on


def sample(index: int) -> tuple[Tensor, Tensor]:
    """Its number, a draw at random, and a class."""
    inputs = torch.cat([torch.tensor([float(index), torch.rand(()).item()]), INPUTS[index % 1000]])
    return inputs, torch.tensor(index % 2)


class Stream(IterableDataset[Any]):
    """Gives each reader everything; ends after `length` samples, or never."""

    def __init__(self, length: int | None = None, first: int = 0) -> None:
        self.length, self.first = length, first

    def __iter__(self) -> Iterator[Any]:
        index = 0
        while self.length is None or index < self.length:
            yield sample(self.first + index)
            index += 1


class Shared(Stream):
    """Shares itself out among loader processes, as torch's documentation has it, and among ranks."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__()
        self.lengths = lengths

    def __iter__(self) -> Iterator[Any]:
        info, rank = get_worker_info(), ddp.init().rank
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(start, self.lengths[rank], step):
            yield sample(1000 * rank + index)


class Stateful(Stream):
    """Knows its own position, and can begin there."""

    num_read = 0

    def __init__(self, length: int | None = None, *, lends_state: bool = False) -> None:
        super().__init__(length)
        self._next, self._lent = 0, {"next": 0} if lends_state else None

    def __iter__(self) -> Iterator[Any]:
        while self.length is None or self._next < self.length:
            self._next += 1
            Stateful.num_read += 1
            yield sample(self._next - 1)
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        if self._lent is not None:  # the same object each time, which goes on changing
            self._lent["next"] = self._next
            return self._lent
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Any:
        if self.training:
            SEEN.extend(x[:, :2].tolist())
        return self.layer(x / 100)


def trained(data: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    arguments = {"global_batch": 12, "max_steps": 9, "num_shards": 4, "loss": ddp.Classification(), **changes}
    quiet = {"progress": False, "curves": False, "folder": None}
    return ddp.fit(model, data, torch.optim.SGD(model.parameters(), lr=0.1), **grouped(**{**quiet, **arguments}))


def run(data: Any, **changes: Any) -> tuple[Any, ...]:
    """Samples that this rank has seen, and where the run stands."""
    ddp.init(abort_s=20)
    SEEN.clear()
    state = trained(data, **changes)
    weights = state.model.module.state_dict()["layer.weight"]
    return sorted(SEEN), state.step, state.epoch, state.sampler.position, weights


def together(results: list[Any]) -> list[list[float]]:
    return sorted(chain.from_iterable(samples for samples, *_ in results))


def numbers(results: list[Any]) -> list[int]:
    return sorted(int(number) for samples, *_ in results for number, _ in samples)


def on_ranks(size: int, data: Any, folder: Path | None = None, **choices: Any) -> list[Any]:
    """What `run` returns on each rank, or `resumed` if there is a folder."""
    return run_ranks(with_choices, size, data, None if folder is None else str(folder), choices, timeout_s=60)


def with_choices(data: Any, folder: str | None, choices: dict[str, Any]) -> Any:
    return run(data, **choices) if folder is None else resumed(data, folder, **choices)


def resumed(data: Any, folder: str, **choices: Any) -> tuple[Any, ...]:
    return run(data, folder=folder, resume="auto", **choices)


class Sized(Shared):
    """One shard for each rank, whose length is known, as a user makes it of a shard of Ray Data."""

    def __init__(self, lengths: list[int], *, says: int = 0) -> None:
        super().__init__(lengths)
        self.says = says

    def __len__(self) -> int:
        return self.lengths[ddp.init().rank] + self.says


class Rates(ddp.Callback):
    """Writes down the learning rate of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def step_end(self, state: Any, report: Any) -> None:
        self.seen.append(report.rate)


def rates_by_length(lengths: list[int]) -> tuple[Any, list[float]]:
    rates, goes_by = Rates(), ddp.optim.cosine()
    limits: dict[str, Any] = {"max_steps": None, "epochs": 2, "schedule": goes_by, "sharding": "off"}
    return run(Sized(lengths), callbacks=[rates], **limits), rates.seen


def test_a_schedule_goes_by_the_length_that_a_stream_has_and_epochs_end_with_it() -> None:
    for lengths in ([30], [30, 24]):
        total = sum(lengths)
        starts = [total * epoch + first for epoch in range(2) for first in range(0, 30 * len(lengths), 12)]
        expected = [0.05 * (1 + math.cos(math.pi * min(1.0, (first + 6) / (2 * total)))) for first in starts]
        for found, rates in run_ranks(rates_by_length, len(lengths), lengths):
            assert found[2:4] == (2, 2 * total)
            torch.testing.assert_close(rates, expected)


def test_a_stream_whose_length_is_another_one_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ddp"):
        run(Sized([30], says=5), max_steps=None, epochs=2, schedule=ddp.optim.cosine())
        run(Sized([30], says=5), max_steps=None, epochs=2)
        run(Sized([30], says=-30), epochs=2, schedule=ddp.optim.cosine())  # which goes by max_steps
    assert [record.getMessage() for record in caplog.records] == [
        "the schedule goes by the length of the data, 35, and the first pass had 30 samples: let __len__ say what a "
        "pass has, or give max_steps"
    ]


@pytest.mark.slow
def test_steps_are_the_same_at_any_world_size_and_number_of_loader_processes() -> None:
    alone = run(Stream(70), max_steps=20)
    assert alone[1:4] == (20, 3, 3 * 70 + 2 * 12) and numbers([alone]) == sorted([*range(70)] * 3 + [*range(24)])
    for workers in (1, 2):
        found = run(Stream(70), max_steps=20, num_workers=workers)
        assert found[:4] == alone[:4] and torch.equal(found[4], alone[4])
    short = run(Stream(70))
    for size in (2, 3, 4):
        ranks = on_ranks(size, Stream(70))
        assert {each[1:4] for each in ranks} == {short[1:4]} == {(9, 1, 106)}
        assert together(ranks) == short[0]  # random draws, too
        assert all(torch.equal(each[4], ranks[0][4]) for each in ranks)
        torch.testing.assert_close(ranks[0][4], short[4])


def test_a_stream_that_is_shorter_than_a_batch_is_looked_at_as_it_is() -> None:
    loss = torch.nn.functional.cross_entropy
    assert run(Stream(5), epochs=2, loss=loss, num_shards=1)[1:4] == (2, 2, 10)
    assert run_ranks(with_choices, 2, Stream(5), None, {"epochs": 1, "loss": loss})[0][1:4] == (1, 1, 5)


def test_an_endless_stream_ends_at_max_steps_and_epochs_end_a_finite_one() -> None:
    assert run(Stream(), max_steps=5)[1:4] == (5, 0, 60)
    assert run(Stream(24), epochs=2)[1:4] == (4, 2, 48)  # the end is where a step ends
    assert run(Stream(25), epochs=2)[1:4] == (6, 2, 50)
    assert run(Stream(25), epochs=2, max_steps=None, progress=True)[1:4] == (6, 2, 50)
    assert run(DataLoader(Stream(25), batch_size=3, num_workers=2), epochs=1)[1:4] == (3, 1, 25)
    assert run((sample(index) for index in range(30)), epochs=1)[1:4] == (3, 1, 30)


@pytest.mark.parametrize("kind", [Stream, Stateful, partial(Stateful, lends_state=True)])
@pytest.mark.quick(1)
def test_a_run_goes_on_at_another_world_size(kind: Any, tmp_path: Path) -> None:
    whole = run(kind(70), max_steps=14)
    parts = []
    for size, max_steps in ((2, 2), (1, 5), (3, 6), (1, 12), (2, 14)):  # the sixth step ends a pass
        parts += on_ranks(size, kind(70), tmp_path / "run", max_steps=max_steps)
    assert together(parts) == whole[0] and parts[-1][1:4] == whole[1:4]
    torch.testing.assert_close(parts[-1][4], whole[4])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.quick(1)
def test_data_with_a_state_are_not_read_again(workers: int, tmp_path: Path) -> None:
    whole = run(Stateful(400), max_steps=30)
    first = resumed(Stateful(400), str(tmp_path / "run"), max_steps=20, num_workers=workers)
    Stateful.num_read = 0
    rest = resumed(Stateful(400), str(tmp_path / "run"), max_steps=30, num_workers=workers)
    assert together([first, rest]) == whole[0] and torch.equal(rest[4], whole[4])
    assert Stateful.num_read <= 10 * 12 + 12 + 3


@pytest.mark.slow
def test_streams_that_share_themselves_out_and_end_at_different_times(tmp_path: Path) -> None:
    data, everything = Shared([30, 17]), sorted([*range(30), *range(1000, 1017)])
    joined = on_ranks(2, data, sharding="off", epochs=1)
    assert numbers(joined) == everything and {each[1:4] for each in joined} == {(5, 1, 47)}
    assert torch.equal(joined[0][4], joined[1][4])
    stopped = on_ranks(2, data, sharding="off", epochs=1, uneven="stop_all")
    assert {each[1:4] for each in stopped} == {(3, 1, 35)}
    even = on_ranks(2, Shared([18, 18]), sharding="off", epochs=1, uneven="raise")
    assert {each[1:4] for each in even} == {(3, 1, 36)}
    for lengths in ([30, 17], [30, 0]):
        assert run_ranks(refused, 2, Shared(lengths)) == ["the stream of rank 1 has ended, and others have not"] * 2
    assert numbers(on_ranks(2, Shared([13, 0]), sharding="off", epochs=1)) == [*range(13)]
    # Each process goes on where it was.
    whole = on_ranks(2, Shared([60, 50]), sharding="off", max_steps=8)
    parts = [
        on_ranks(2, Shared([60, 50]), tmp_path / "run", sharding="off", max_steps=max_steps) for max_steps in (3, 4, 8)
    ]
    for rank in range(2):
        assert together([part[rank] for part in parts]) == whole[rank][0]


def refused(data: Any) -> str:
    ddp.init(abort_s=20)
    with pytest.raises(ConfigError) as caught:
        trained(data, sharding="off", uneven="raise")
    return str(caught.value).partition(":")[0]


@pytest.mark.slow
def test_data_that_share_themselves_out_among_loader_processes_go_on_exactly(tmp_path: Path) -> None:
    choices = {"sharding": "off", "num_workers": 2, "num_shards": 1}
    whole = run(Shared([60]), max_steps=6, **choices)  # the last two have six samples
    assert numbers([whole]) == [*range(60)]
    parts = [resumed(Shared([60]), str(tmp_path / "run"), max_steps=max_steps, **choices) for max_steps in (1, 2, 5, 6)]
    assert together(parts) == whole[0] and torch.equal(parts[-1][4], whole[4])
    resumed(Shared([60]), str(tmp_path / "other"), max_steps=2, **choices)
    with pytest.raises(ConfigError, match="among 2 processes of each worker, and now there are 1"):
        resumed(Shared([60]), str(tmp_path / "other"), max_steps=3, **{**choices, "num_workers": 0})


class Strange(Stream):
    """Samples that cannot be compared."""

    def __iter__(self) -> Iterator[Any]:
        return (Pair(*sample(index)) for index in range(24))


@dataclass
class Pair:
    inputs: Tensor
    target: Tensor


def pairs(samples: list[Pair]) -> tuple[Tensor, Tensor]:
    return torch.stack([each.inputs for each in samples]), torch.stack([each.target for each in samples])


def test_samples_that_cannot_be_compared_are_trusted() -> None:
    assert {each[1:4] for each in on_ranks(2, Strange(), sharding="off", epochs=1, collate=pairs)} == {(4, 1, 48)}


class Deaf(Stream):
    """Would share itself out, but every rank reads the same."""


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def wrong_sharding() -> tuple[list[str], str]:
    ddp.init(abort_s=20)
    log.addHandler(seen := Warnings())
    trained(Deaf(50), sharding="off", max_steps=2, global_batch=12)
    with pytest.raises(ConfigError) as caught:
        trained(Shared([50, 50]), sharding="auto")
    return seen.texts, str(caught.value)


def test_a_wrong_sharding_is_told_from_the_first_samples() -> None:
    same, other = run_ranks(wrong_sharding, 2)[0]

    assert any("ranks 0, 1 begin with the same 3 samples; if they read the same stream" in text for text in same)
    assert "take ddp.Batches(sharding='off'), and each rank trains on all" in other and "needs a seed" in other


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_steps": None}, "epochs=None: with max_steps=None, too, the run would never end; set one"),
        (
            {"max_steps": None, "epochs": 1, "schedule": ddp.optim.cosine()},
            "schedule: goes by the samples of the whole",
        ),
        ({"order": ddp.data.Fixed(9)}, "order=fixed: data is a stream"),
        ({"sharding": "file"}, "sharding='file': data is a stream"),
        ({"skip_steps": (2, 3)}, "skip_steps: data is a stream"),
        ({"global_batch": ddp.BatchWarmup(4, 8, 100)}, "for a stream, give a number"),
        ({"max_unreadable": 3}, "max_unreadable=3: data is a stream"),
        ({"uneven": "wait"}, "uneven='wait': take one of join, stop_all, raise"),
        ({"data": Stream(0)}, "the data have given no sample"),
        ({"data": iter([sample(0)] * 12)}, "that can be read again"),
        ({"test_data": Stream(5)}, "only what ddp.fit trains on may be a stream"),
        ({"data": {1, 2}}, "data is a set: give a data set"),
    ],
)
def test_what_a_stream_cannot_do(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trained(changes.pop("data", Stream(50)), **changes)


class Batches(Stream):
    """Whole batches, of which some are smaller."""

    def __iter__(self) -> Any:
        return ((torch.zeros(number, 5), torch.zeros(number)) for number in (4, 3) * 12)


def test_a_stream_of_batches_is_told() -> None:
    with pytest.raises(ConfigError, match=r"samples 0 to \d+ of the stream cannot make a batch .* single samples"):
        run(Batches(), max_steps=2)


def test_a_stream_of_other_data_is_not_resumed(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    resumed(Stream(50), folder, max_steps=2)
    with pytest.raises(ConfigError, match=r"an epoch whose order was a stream|no position in a data set"):
        resumed([sample(index) for index in range(40)], folder, max_steps=3)
    folder = str(tmp_path / "other")
    resumed([sample(index) for index in range(40)], folder, max_steps=2)
    with pytest.raises(ConfigError, match="these are a stream"):
        resumed(Stream(50), folder, max_steps=3)


def test_numpy_draws_do_not_depend_on_the_rank() -> None:
    class Drawn(Stream):
        def __iter__(self) -> Iterator[Any]:
            for index in range(24):
                yield torch.tensor([float(index), np.random.rand(), 0, 0, 0]).float(), torch.tensor(0)

    alone, ranks = run(Drawn(), epochs=1), on_ranks(2, Drawn(), epochs=1)
    assert together(ranks) == alone[0]


def with_sync_batchnorm() -> list[Any]:
    ddp.init(abort_s=20)
    found: list[Any] = []
    for uneven in ("join", "stop_all"):
        model = nn.Sequential(nn.Linear(5, 4), ddp.SyncBatchNorm(4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        quiet: dict[str, Any] = {"progress": False, "folder": None, "loss": ddp.Classification()}
        try:
            state = ddp.fit(
                model, Stream(30), optimizer, **grouped(global_batch=8, max_steps=9, epochs=1, uneven=uneven, **quiet)
            )
            found.append(state.step)
        except ConfigError as error:
            found.append("take uneven='stop_all'" in str(error))
    return found


def test_sync_batchnorm_never_waits_for_a_rank_whose_stream_has_ended() -> None:
    assert run_ranks(with_sync_batchnorm, 2) == [[True, 4]] * 2  # in the last step they have four samples and two
