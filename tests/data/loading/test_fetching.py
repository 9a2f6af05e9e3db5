"""Reading ahead: the same batches with and without the thread, which reads what it may, and ends in time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import Dataset

from ddp.data.loading.fetching import AHEAD, DeviceCopies, ReadAhead
from ddp.data.loading.loader import TrainLoader, _two_readers
from ddp.data.orders.sampler import TrainSampler
from ddp.data.samples import WholeBatches
from ddp.errors import UnreadableSample
from ddp.process.streams import GeneratorStates

LENGTH = 60


class Slow(Dataset[Any]):
    """Waits for each sample, as for a disk."""

    may_read_ahead = True
    wait_s = 0.4e-3

    def __init__(self) -> None:
        self.threads = set[str]()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        self.threads.add(threading.current_thread().name)
        time.sleep(self.wait_s)
        return torch.tensor([float(index)])


class InMemory(WholeBatches, Slow):
    """Draws nothing, and does not say that it may be read ahead."""

    may_read_ahead = False

    def batch(self, indices: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        return torch.tensor([[float(index)] for index in indices])


class Augmented(Slow):
    may_read_ahead = False

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


@pytest.mark.parametrize("kind", [Slow, Whole, Augmented, InMemory])
def test_the_same_batches_and_a_thread_where_it_may_read(kind):
    quick = kind()
    quick.wait_s = 0.0
    expected = epochs_of(loader_of(quick))
    slow = kind()
    loader = loader_of(slow)
    before = GeneratorStates.now()
    assert epochs_of(loader) == expected and len(expected) == 24
    assert GeneratorStates.now() == before
    is_ahead = kind in (Slow, Whole)  # what is drawn would mix with what the forward draws
    assert slow.threads == {"MainThread", *(["ddp-read-ahead"] if is_ahead else [])}
    until_none_is_left()


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

    for batch in ReadAhead().of(batches()):
        if batch > 8:
            time.sleep(3e-3)
            assert batch <= fetched <= batch + AHEAD + 1
    assert batch == 49
    until_none_is_left()


class Copies:
    """In the place of `DeviceCopies`: notes who calls it."""

    log: list[tuple[str, str, float]]

    def __init__(self, device: torch.device) -> None:
        Copies.log = []

    def note(self, what: str, fetched: Any) -> Any:
        Copies.log.append((what, threading.current_thread().name, float(fetched.batch[0][0])))
        return fetched

    def begin(self, fetched: Any) -> Any:
        return self.note("begin", fetched)

    def finish(self, fetched: Any) -> Any:
        return self.note("finish", fetched)


@pytest.mark.filterwarnings("ignore:.*pin_memory")
@pytest.mark.parametrize(("kind", "num_workers"), [(InMemory, 0), (Whole, 0), (Augmented, 0), (Augmented, 1)])
def test_a_thread_copies_to_a_gpu_what_may_be_read_ahead(kind, num_workers, monkeypatch):
    """Also what does not wait, and what processes have fetched; but not what is drawn at random in this process."""
    expected = epochs_of(loader_of(kind()))
    monkeypatch.setattr("ddp.data.loading.fetching.DeviceCopies", Copies)
    sampler = TrainSampler(LENGTH, global_batch=5, rank=0, world_size=1, seed=3)
    loader = TrainLoader(kind(), sampler, num_workers=num_workers, device=torch.device("cuda"))
    assert epochs_of(loader) == expected
    loader.close()
    begun, finished = ([each for each in Copies.log if each[0] == what] for what in ("begin", "finish"))
    assert [value for *_, value in begun] == [value for *_, value in finished] == [batch[0][0] for batch in expected]
    assert {thread for _, thread, _ in finished} == {"MainThread"}
    is_ahead = (kind, num_workers) != (Augmented, 0)
    assert {thread for _, thread, _ in begun[1:12]} == {"ddp-read-ahead" if is_ahead else "MainThread"}
    until_none_is_left()


class Moving(torch.Tensor):
    """A tensor that notes what would happen on a GPU."""

    is_cuda = True

    def to(self, *_: Any, **__: Any) -> Moving:
        Streams.log.append(("copy", Streams.current))
        return self

    def record_stream(self, stream: Any) -> None:
        Streams.log.append(("freed after", stream))


class Streams:
    """In the place of torch's streams: notes the order of calls."""

    log: ClassVar[list[Any]] = []
    current: Any = "step's"

    def __init__(self, name: Any) -> None:
        self.name = self.device = name

    def __enter__(self) -> None:
        Streams.current = self

    def __exit__(self, *_: Any) -> None:
        Streams.current = "step's"

    def record_event(self) -> Any:
        Streams.log.append(("event", self))
        return "copied"

    def wait_event(self, event: Any) -> None:
        Streams.log.append(("wait", event))


def test_a_step_waits_for_the_copy_and_the_allocator_for_the_step(monkeypatch):
    steps = Streams("step's")
    monkeypatch.setattr(torch.cuda, "Stream", Streams)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: steps)
    copies = DeviceCopies(torch.device("cuda"))
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])  # moves itself
    batch = {"x": torch.zeros(2).as_subclass(Moving), "other": ["a text", packed]}
    Streams.log.clear()
    assert copies.finish(copies.begin(batch)) == batch
    copying = copies._stream
    assert Streams.log == [("copy", copying), ("event", copying), ("wait", "copied"), ("freed after", steps)]


def test_two_threads_may_read_one_sequence_of_plans():
    """The interpreter changes threads as often as it can, in the middle of a plan that is being made."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(6):
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
