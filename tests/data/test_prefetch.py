"""Reading ahead: the same batches with and without the thread, which starts where reading waits, and ends in time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from ddp.data.loader import TrainLoader, WholeBatches, _two_readers
from ddp.data.prefetch import AHEAD, ReadAhead
from ddp.data.sampler import TrainSampler
from ddp.data.streams import generator_states
from ddp.errors import UnreadableSample

LENGTH = 60


class Slow(Dataset[Any]):
    """Waits for each sample, as for a disk."""

    wait_s = 0.4e-3

    def __init__(self) -> None:
        self.threads = set[str]()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        self.threads.add(threading.current_thread().name)
        time.sleep(self.wait_s)
        return torch.tensor([float(index)])


class Augmented(Slow):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.rand(())


class Whole(WholeBatches, Slow):
    def batch(self, indices: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        time.sleep(2e-3)
        return torch.tensor([[float(index)] for index in indices])


class Damaged(Slow):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.worst:
            raise UnreadableSample("cut off")
        return super().__getitem__(index)

    worst = -1


def loader_of(data: Any) -> TrainLoader:
    return TrainLoader(data, TrainSampler(LENGTH, global_batch=5, rank=0, world_size=1, seed=3))


def epochs_of(loader: TrainLoader, number: int = 2) -> list[Any]:
    rows = []
    for _ in range(number):
        for plan, batches in loader.epoch():
            rows += [batch.tolist() for batch in batches]
            loader.sampler.commit(plan)
    return rows


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "ddp-read-ahead"]


def until_none_is_left() -> None:
    for thread in threads():
        thread.join(timeout=10)
    assert not threads()


@pytest.mark.parametrize("kind", [Slow, Whole, Augmented])
def test_the_same_batches_and_a_thread_where_reading_waits(kind):
    quick = kind()
    quick.wait_s = 0.0
    expected = epochs_of(loader_of(quick))
    slow = kind()
    loader = loader_of(slow)
    before = generator_states()
    assert epochs_of(loader) == expected and len(expected) == 24
    assert generator_states() == before
    is_ahead = kind is not Augmented  # its draws would mix with those of the forward
    assert loader._ahead.pays is is_ahead
    assert slow.threads == {"MainThread", *(["ddp-read-ahead"] if is_ahead else [])}
    until_none_is_left()


def test_no_thread_where_reading_does_not_wait():
    class Quick(Slow):
        wait_s = 0.0

        def __getitem__(self, index: int) -> torch.Tensor:
            self.threads.add(threading.current_thread().name)
            return torch.tensor([sum(range(200)) / 19900 * index])

    data = Quick()
    loader = loader_of(data)
    epochs_of(loader)
    assert loader._ahead.pays is False and data.threads == {"MainThread"}


def test_an_error_is_raised_where_its_batch_is_wanted():
    data = Damaged()
    loader = loader_of(data)
    epochs_of(loader, 1)
    data.worst = list(loader.sampler.plans())[6].micros[0].indices[2]
    rows = []
    with pytest.raises(UnreadableSample, match="1 sample cannot be read, max_unreadable=0: sample"):
        for _, batches in loader.epoch():
            rows += list(batches)
    assert len(rows) == 6
    until_none_is_left()


def test_a_thread_ends_with_an_abandoned_epoch():
    loader = loader_of(Slow())
    expected = epochs_of(loader_of(Slow()))
    assert epochs_of(loader, 1) == expected[:12]
    for number, (plan, batches) in enumerate(loader.epoch()):
        assert [batch.tolist() for batch in batches] == expected[12 + number : 13 + number]
        loader.sampler.commit(plan)
        if number == 3:
            break
    start_s = time.monotonic()
    rest = epochs_of(loader, 1)  # a new one begins where the sampler is, and waits for a read, not for its user
    assert rest == expected[16:] and time.monotonic() - start_s < 30
    until_none_is_left()


def test_it_is_never_more_than_a_few_batches_ahead():
    fetched = 0

    def batches() -> Iterator[int]:
        nonlocal fetched
        for fetched in range(1, 50):
            time.sleep(1e-3)
            yield fetched

    ahead = ReadAhead(lambda: True)
    for batch in ahead.of(batches()):
        if batch > 8:
            time.sleep(3e-3)
            assert batch <= fetched <= batch + AHEAD + 1
    assert batch == 49 and ahead.pays
    until_none_is_left()


def test_two_threads_may_read_one_sequence_of_plans():
    """The interpreter changes threads as often as it can, in the middle of a plan that is being made."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            sampler = TrainSampler(3000, global_batch=1, rank=0, world_size=1)
            mine, theirs = _two_readers(sampler.plans())
            found: list[Any] = []
            thread = threading.Thread(target=lambda theirs=theirs, found=found: found.extend(theirs))
            thread.start()
            assert list(mine) == list(sampler.plans())
            thread.join()
            assert found == list(sampler.plans())
    finally:
        sys.setswitchinterval(interval)
