"""Loaders: one process without worker processes, fetching sample by sample, is the oracle."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from ddp.data.loading.loader import EvaluationLoader, TrainLoader, num_evaluation_batches
from ddp.data.loading.processes import data_loader
from ddp.data.orders.distributed_sampler import EvaluationSampler
from ddp.data.orders.order import Weighted
from ddp.data.orders.sampler import TrainSampler
from ddp.data.orders.steps import SamplerState
from ddp.data.samples import WholeBatches
from ddp.errors import ConfigError, LoaderLost, UnreadableSample
from ddp.process.streams import preserved, seed_generators, stream_seed


class Augmented(Dataset):
    """Each sample: its index, and a draw from each generator that transforms use."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


class InMemory(WholeBatches, Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])

    def batch(self, indices):
        return {"rows": torch.tensor(indices), "at_once": True}


def expected(seed: int, epoch: int, length: int) -> dict[int, list[float]]:
    """Sample by sample, straight from the stream's definition."""
    samples = {}
    with preserved():
        for index in range(length):
            seed_generators(stream_seed(seed, "augmentation", epoch, index), device="cpu")
            samples[index] = Augmented(length)[index].tolist()
    return samples


def sampler_of(rank=0, world_size=1, length=13, **options):
    options = {"global_batch": 5, "num_shards": 4, "micro_size": 2, "seed": 3, **options}
    return TrainSampler(length, rank=rank, world_size=world_size, **options)


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 0), (3, 0), (4, 0), (2, 2)])
def test_a_sample_is_the_same_at_any_world_size_and_number_of_workers(world_size, num_workers):
    seen: list[dict[int, list[float]]] = [{}, {}]
    for rank in range(world_size):
        loader = TrainLoader(Augmented(13), sampler_of(rank, world_size), num_workers=num_workers)
        for epoch in range(2):
            for plan, micros in loader.epoch():
                assert plan.epoch == epoch
                for micro, batch in zip(plan.micros, micros, strict=True):
                    assert batch[:, 0].tolist() == list(micro.indices)  # in the plan's order
                    seen[epoch].update({int(row[0]): row for row in batch.tolist()})
                loader.sampler.commit(plan)
        loader.close()
    assert seen == [expected(3, 0, 13), expected(3, 1, 13)]
    assert seen[0][0] != seen[1][0]


class DrawsLate(Augmented):
    """Only some samples draw."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) if index % 4 == 3 else torch.tensor([index, 0, 0, 0], dtype=torch.float64)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_seldom_draw_have_the_numbers_of_their_keys_from_the_first_draw_on(num_workers):
    loader = TrainLoader(DrawsLate(64), sampler_of(length=64), num_workers=num_workers)
    rows = {int(row[0]): row for batch in read_through(loader) for row in batch.tolist()}
    whole = expected(3, 0, 64)
    assert rows == {index: whole[index] if index % 4 == 3 else [index, 0, 0, 0] for index in range(64)}
    loader.close()


def from_initial_seed() -> float:
    return np.random.default_rng(torch.initial_seed() % 2**32).random()


def from_a_fork() -> float:
    with torch.random.fork_rng(devices=[]):
        return torch.rand(()).item()


def from_a_state_put_back() -> float:
    state, drawn = random.getstate(), random.random()
    random.setstate(state)
    return drawn


class DrawsUnseen(Augmented):
    """Draws without a trace in the generators."""

    def __init__(self, length: int, draw: Any) -> None:
        super().__init__(length)
        self.draw = draw

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.draw()], dtype=torch.float64)


@pytest.mark.parametrize("draw", [from_initial_seed, from_a_fork, from_a_state_put_back])
def test_draws_without_a_trace_have_the_numbers_of_their_keys(draw):
    rows = []
    for world_size, num_workers in ((1, 0), (2, 0), (1, 1)):
        loaders = [
            TrainLoader(DrawsUnseen(13, draw), sampler_of(r, world_size), num_workers=num_workers)
            for r in range(world_size)
        ]
        rows.append(sorted(row for loader in loaders for batch in read_through(loader) for row in batch.tolist()))
        for loader in loaders:
            loader.close()
    assert rows[0] == rows[1] == rows[2] and len({value for _, value in rows[0]}) == 13


def masked(samples: list[torch.Tensor]) -> torch.Tensor:
    """Draws a number for a whole batch, as masks of a language model are drawn."""
    return torch.cat([torch.stack(samples), torch.rand(len(samples), 1)], dim=1)


@pytest.mark.parametrize("kind", [DrawsLate, Augmented])
def test_what_a_collate_function_draws_is_the_same_at_any_world_size_and_number_of_workers(kind):
    seen = []
    for world_size, num_workers in [(1, 0), (1, 2), (2, 0), (4, 0)]:
        batches = []
        for rank in range(world_size):
            options = {"collate": masked, "num_workers": num_workers}
            loader = TrainLoader(kind(13), sampler_of(rank, world_size, micro_size=None), **options)
            batches += [batch.tolist() for batch in read_through(loader)]
            loader.close()
        seen.append(sorted(batches))
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert len({batch[0][-1] for batch in seen[0]}) == len(seen[0])


def test_a_sample_that_an_epoch_has_twice_is_drawn_twice():
    rows = []
    for world_size in (1, 2):
        rows.append([])
        for rank in range(world_size):
            sampler = sampler_of(rank, world_size, length=Weighted([1.0, 2.0], length=30))
            rows[-1] += [
                tuple(row) for batch in read_through(TrainLoader(Augmented(2), sampler)) for row in batch.tolist()
            ]
    assert sorted(rows[0]) == sorted(rows[1]) and len(set(rows[0])) == 30


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_program_draws_as_if_nothing_had_been_loaded(num_workers):
    def generators():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    before = generators()
    loader = TrainLoader(Augmented(13), sampler_of(), num_workers=num_workers)
    for _, micros in loader.epoch():
        list(micros)
    loader.close()
    list(EvaluationLoader(Augmented(13), batch_size=4, rank=0, world_size=1, num_workers=num_workers))
    assert generators() == before


@pytest.mark.parametrize("num_workers", [0, 1])
def test_steps_broken_off_and_epochs_abandoned(num_workers):
    """What is left unread does not shift what comes next, and a new epoch() starts from the sampler's state."""
    loader = TrainLoader(InMemory(40), sampler_of(length=40), num_workers=num_workers)
    for number, (plan, micros) in enumerate(loader.epoch()):
        for micro, batch in zip(plan.micros[: number % 3], micros, strict=False):  # reads none, some, or one more
            assert batch["rows"].tolist() == list(micro.indices)
        loader.sampler.commit(plan)
        if number == 4:
            break
    assert loader.sampler.state == SamplerState(3, 0, 25)
    there = {"seed": 8, "epoch": 2, "consumed": 10, "order": loader.sampler.order.identity}
    loader.sampler.load_state_dict(there)  # the seed travels with the request
    rows = []
    for plan, micros in loader.epoch():
        assert plan.position == 10 + len(rows)
        rows += [row for batch in micros for row in batch["rows"].tolist()]
    other = sampler_of(length=40)
    other.load_state_dict(there)
    assert rows == [index for plan in other.plans() for micro in plan.micros for index in micro.indices]
    loader.close()
    loader.close()
    assert sum(len(batch["rows"]) for _, micros in loader.epoch() for batch in micros) == 30  # opens again
    loader.close()


def test_a_rank_without_samples_has_plans_and_no_batches():
    loader = TrainLoader(InMemory(6), sampler_of(0, 4, length=6, micro_size=None))
    assert [(plan.size, len(list(micros))) for plan, micros in loader.epoch()] == [(5, 1), (1, 0)]


def test_data_in_memory_is_read_at_once():
    at_once = TrainLoader(InMemory(13), sampler_of())
    assert next(next(at_once.epoch())[1])["at_once"]
    evaluation = EvaluationLoader(InMemory(13), batch_size=4, rank=0, world_size=1)
    assert [batch["rows"].tolist() for batch in evaluation][-1] == [12]
    sample_by_sample = TrainLoader(InMemory(13), sampler_of(), collate=list)
    assert isinstance(next(next(sample_by_sample.epoch())[1]), list)


class Threads(InMemory):
    def batch(self, indices):
        return torch.get_num_threads()


def test_loader_processes_compute_with_one_thread():
    loader = TrainLoader(Threads(13), sampler_of(), num_workers=1)
    assert {threads for _, micros in loader.epoch() for threads in micros} == {1}
    loader.close()


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("length", [0, 3, 8, 21])
def test_evaluation_reads_each_sample_once(world_size, length):
    loaders = [
        EvaluationLoader(Augmented(length), batch_size=4, rank=r, world_size=world_size) for r in range(world_size)
    ]
    rows = [row for loader in loaders for batch in loader for row in batch.tolist()]
    assert rows == list(expected(0, 0, length).values())
    for rank, loader in enumerate(loaders):
        batches = list(loader)  # a second pass draws the same
        assert len(batches) == len(loader)
        assert [int(row[0]) for batch in batches for row in batch.tolist()] == list(
            EvaluationSampler(length, num_replicas=world_size, rank=rank)
        )
        assert all(len(batch) == 4 for batch in batches[:-1])


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize(("length", "num_shards"), [(3, 8), (13, 5), (21, 1), (21, 4)])
def test_batches_of_an_evaluation_in_parts_do_not_depend_on_the_world_size(world_size, length, num_shards):
    cut = {"batch_size": 2, "num_shards": num_shards}
    loaders = [
        EvaluationLoader(InMemory(length), rank=r, world_size=world_size, collate=list, **cut)
        for r in range(world_size)
    ]
    assert [len(loader) for loader in loaders] == num_evaluation_batches(length, world_size=world_size, **cut)
    found = [
        (part, [int(sample) for sample in batch])
        for loader in loaders
        for part, batch in zip(loader.parts, loader, strict=True)
    ]
    edges = [part * length // num_shards for part in range(num_shards + 1)]
    assert found == [
        (part, list(range(start, min(start + 2, edges[part + 1]))))
        for part in range(num_shards)
        for start in range(edges[part], edges[part + 1], 2)
    ]


def test_evaluation_with_worker_processes():
    loader = EvaluationLoader(Augmented(11), batch_size=3, rank=1, world_size=2, num_workers=2)
    assert [row for batch in loader for row in batch.tolist()] == list(expected(0, 0, 11).values())[5:]


def test_bad_input():
    with pytest.raises(ConfigError, match="13 samples, the data set has 12"):
        TrainLoader(InMemory(12), sampler_of())
    with pytest.raises(ValueError, match="should be non-negative"):
        TrainLoader(InMemory(13), sampler_of(), num_workers=-1)
    with pytest.raises(ConfigError, match="got 0"):
        EvaluationLoader(InMemory(13), batch_size=0, rank=0, world_size=1)
    with pytest.raises(ConfigError, match="num_shards=0"):
        EvaluationLoader(InMemory(13), batch_size=1, num_shards=0, rank=0, world_size=1)


def test_loader_processes_that_cannot_be_started_are_one_sentence(monkeypatch):
    """As with a /dev/shm that is full or cannot be written to, where their locks would be."""

    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("torch.utils.data.DataLoader.__iter__", refuse)
    with pytest.raises(ConfigError, match=r"cannot be started: Read-only file system.*/dev/shm.* num_workers=0"):
        next(next(TrainLoader(InMemory(13), sampler_of(), num_workers=1).epoch())[1])


def test_an_error_in_the_data_set_reaches_the_caller():
    class Broken(Augmented):
        def __getitem__(self, index):
            raise RuntimeError(f"cannot read sample {index}")

    with pytest.raises(RuntimeError, match="cannot read sample"):
        next(next(TrainLoader(Broken(13), sampler_of()).epoch())[1])


ABANDONED = """
import sys, torch
from multiprocessing import active_children
from ddp.data.loading.loader import EvaluationLoader, TrainLoader
from ddp.data.orders.sampler import TrainSampler
data = [torch.zeros(3)] * 64
loader = TrainLoader(data, TrainSampler(64, global_batch=4, rank=0, world_size=1), num_workers=2)
steps = loader.epoch()
plan, micros = next(steps)
next(micros)
children = active_children()
assert len(children) == 2
loader.close()  # while `steps` and `micros` are still held
assert not any(child.is_alive() for child in children)
steps, micros = loader.epoch(), None
next(next(steps)[1])
for batch in EvaluationLoader(data, batch_size=2, rank=0, world_size=1, num_workers=1):
    break
print(*(child.pid for child in active_children()))
"""


@pytest.mark.slow
def test_nothing_is_left_of_an_abandoned_iteration():
    done = subprocess.run([sys.executable, "-W", "error", "-c", ABANDONED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 2
    for pid in pids:  # workers that were alive when the program ended have ended with it
        with pytest.raises(OSError, match="No such process"):
            os.kill(pid, 0)


ORPHANS = """
import os, signal, time
from multiprocessing import active_children
from ddp.data.loading.loader import TrainLoader
from ddp.data.orders.sampler import TrainSampler
class Hangs(list):
    def __getitem__(self, index):
        time.sleep(1000)
loader = TrainLoader(Hangs(range(64)), TrainSampler(64, global_batch=4, rank=0, world_size=1), num_workers=2)
def die(*_):
    print(*(child.pid for child in active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGALRM, die)
signal.setitimer(signal.ITIMER_REAL, 1.5)
next(next(loader.epoch())[1])
"""


@pytest.mark.slow
def test_loader_processes_end_with_a_trainer_that_is_killed_even_in_a_read_that_hangs():
    done = subprocess.run([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True, timeout=60)
    pids = done.stdout.split()
    assert done.returncode == -9 and len(pids) == 2
    deadline_s = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def is_alive(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_loader_process_that_is_killed_is_told_with_a_remedy():
    loader = TrainLoader(Waits(40), sampler_of(length=40), num_workers=1)
    batches = (batch for _, micros in loader.epoch() for batch in micros)
    next(batches)
    os.kill(active_children()[0].pid, signal.SIGKILL)
    told = r"^loader process 0 of rank 0 \(pid \d+\) was killed by SIGKILL before it had sent sample.*: the memory may"
    with pytest.raises(LoaderLost, match=told):
        list(batches)
    loader.close()


class Waits(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.05)
        return super().__getitem__(index)


class ProcessGroups(Dataset[int]):
    """Samples are the process group of whoever fetches them."""

    begun_by = -1

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return os.getpgid(0)


class BegunBy(ProcessGroups):
    def __getitem__(self, index: int) -> int:
        return self.begun_by


def begin(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.begun_by = 7 + worker


def test_a_worker_init_fn_finds_its_own_data_set_and_the_process_is_of_the_context_that_was_asked_for() -> None:
    processes = {"worker_init_fn": begin, "multiprocessing_context": "fork", "prefetch_factor": 1}
    loader = EvaluationLoader(BegunBy(), batch_size=2, rank=0, world_size=1, num_workers=2, processes=processes)
    assert [batch.tolist() for batch in loader] == [[7, 7], [8, 8]]
    made = data_loader([], num_workers=2, pin_memory=False, processes=processes)
    assert made.prefetch_factor == 1


def test_a_signal_to_the_trainer_s_process_group_does_not_reach_its_loaders() -> None:
    """Launchers signal whole groups; a loader that dies of it would take the agreed stop with it."""
    loader = EvaluationLoader(ProcessGroups(), batch_size=2, rank=0, world_size=1, num_workers=1)
    assert all(group != os.getpgid(0) for batch in loader for group in batch.tolist())


class Damaged(Augmented):
    """Some samples cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 5 == 2:
            raise UnreadableSample(f"file.tar, member {index}")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_cannot_be_read_is_left_out_and_counted_up_to_a_limit(num_workers, caplog):
    whole = expected(3, 0, 13)
    options = {"num_workers": num_workers, "max_unreadable": 3}
    loader = TrainLoader(Damaged(13), sampler_of(micro_size=None, num_shards=1), **options)
    rows = [row for _, micros in loader.epoch() for batch in micros for row in batch.tolist()]
    assert sorted(rows) == [whole[index] for index in range(13) if index % 5 != 2] and loader.unreadable == {2, 7, 12}
    assert caplog.text.count("left out") == 3 and "sample 12: file.tar, member 12" in caplog.text
    loader.close()
    few = TrainLoader(Damaged(13), sampler_of(micro_size=None, num_shards=1), **{**options, "max_unreadable": 2})
    with pytest.raises(
        UnreadableSample, match=r"^3 samples cannot be read, max_unreadable=2: sample \d+: file.tar, mem"
    ):
        read_through(few)
    none = TrainLoader(Damaged(13), sampler_of(), num_workers=num_workers)
    with pytest.raises(
        UnreadableSample, match=r"^1 sample cannot be read, max_unreadable=0: sample \d+: file.tar, member"
    ):
        read_through(none)
    for each in (few, none):
        each.close()


def read_through(loader: TrainLoader) -> list:
    return [batch for _, micros in loader.epoch() for batch in micros]


class Gone(Damaged):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise FileNotFoundError(2, "No such file", f"{index}.png")


class PartlyGone(WholeBatches, Damaged):
    def batch(self, indices):
        return torch.stack([self[index] for index in indices])


def test_a_batch_of_which_nothing_can_be_read_is_none_and_whole_batches_are_looked_through(caplog):
    gone = TrainLoader(Gone(5), sampler_of(length=5, num_shards=1, micro_size=None), max_unreadable=5)
    assert read_through(gone) == [None] and gone.unreadable == set(range(5)) and "No such file: '4.png'" in caplog.text
    with pytest.raises(UnreadableSample, match=r"^5 samples cannot be read, max_unreadable=4: sample"):
        read_through(TrainLoader(Gone(5), sampler_of(length=5, num_shards=1, micro_size=None), max_unreadable=4))
    caplog.clear()
    loader = TrainLoader(PartlyGone(13), sampler_of(micro_size=None, num_shards=1), max_unreadable=3)
    assert sum(map(len, read_through(loader))) == 10 and caplog.text.count("left out") == 3
