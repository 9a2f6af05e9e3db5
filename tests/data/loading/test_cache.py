"""The cache: the same samples as without it, each read once per host, nothing half written, nothing left behind."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import time
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch.utils.data import Dataset

import ddp
from ddp.comm.host_share import shared_by_host
from ddp.data.loading import cache
from ddp.data.loading.cache import Cached, cache_of, cached
from ddp.data.loading.loader import TrainLoader
from ddp.data.orders.sampler import TrainSampler
from ddp.data.samples import OnInput, Transformed
from ddp.errors import ConfigError
from recipes.tutorial.simulated import SimulatedNetwork

LENGTH = 60


class Counted(Dataset[Any]):
    """Samples of different sizes; counts in a file how often each is read, by all processes together."""

    file_sizes = (20, 40)

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with self.path.open("a") as file:
            file.write(f"{index}\n")
        return torch.arange(index + 1), index

    def reads(self) -> list[int]:
        return sorted(map(int, self.path.read_text().split()))


def alone(samples: Any, *, max_bytes: int = 1 << 20, **places: int) -> Cached:
    def allocate(num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    return Cached(samples, allocate, **{"max_bytes": max_bytes, "place": 0, "num_places": 1, **places})


kinds = st.recursive(
    st.one_of(
        st.integers(),
        st.floats(allow_nan=False),
        st.text(max_size=5),
        st.binary(max_size=9),
        st.none(),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]).map(
            lambda dtype: torch.arange(6).to(dtype).view(2, 3).t()
        ),
        st.just(torch.tensor(3)),
        st.just(torch.empty(0, 2)),
        st.just(np.arange(5, dtype=np.int16)),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


@settings(deadline=None, max_examples=150)
@given(st.lists(kinds, min_size=1, max_size=5), st.integers(0, 600))
def test_samples_of_any_kind_are_the_same_also_where_some_find_no_room(samples, room):
    both = alone(samples, max_bytes=room)
    for _ in range(2):
        assert all(same(both[index], sample) for index, sample in enumerate(samples))
    assert both.num_bytes <= room and 0 <= both.num_cached <= len(samples)


@pytest.mark.parametrize("is_ordered", [True, False])
def test_each_sample_is_read_once_and_a_copy_cannot_change_it(tmp_path, monkeypatch, is_ordered):
    monkeypatch.setattr(cache, "_IS_ORDERED", is_ordered)
    counted = Counted(tmp_path / "reads")
    both = alone(counted)
    for _ in range(3):
        for index in range(LENGTH):
            values, number = both[index]
            assert values.tolist() == [*range(index + 1)] and number == index
            values.zero_()
    assert counted.reads() == [*range(LENGTH)] and both.num_cached == LENGTH == len(both)
    assert both.file_sizes == (20, 40)  # what orders go by
    if not is_ordered:  # a store that is not seen yet
        both._bytes[int(both._table[7]) - 1 + 20] ^= 1
        assert both[7][0].tolist() == [*range(8)] and counted.reads().count(7) == 2


def test_a_writer_that_dies_in_the_middle_leaves_nothing_half(tmp_path, monkeypatch):
    """Killed after each store in turn; the next process of its place goes on."""

    class Died(BaseException):
        pass

    for stop_at in range(1, 5):
        counted = Counted(tmp_path / f"reads{stop_at}")
        both, stores = alone(counted), 0

        class Dying:
            def __init__(self, array: Any, last: int = stop_at) -> None:
                self.array, self.last = array, last

            def __getitem__(self, key: Any) -> Any:
                found = self.array[key]
                return Dying(found, self.last) if isinstance(found, np.ndarray) else found

            def __setitem__(self, key: Any, value: Any) -> None:
                nonlocal stores
                stores += 1
                if stores == self.last:
                    raise Died
                self.array[key] = value

            def view(self, dtype: Any) -> Any:
                return Dying(self.array.view(dtype), self.last)

        arrays = {name: getattr(both, name) for name in ("_table", "_filled", "_bytes")}
        for name, array in arrays.items():
            setattr(both, name, Dying(array))
        with pytest.raises(Died):
            both._keep(5, (torch.arange(6), 5))
        for name, array in arrays.items():
            setattr(both, name, array)
        assert both.num_cached == 0
        for index in (4, 5, 6, 5, 4):
            assert both[index][0].tolist() == [*range(index + 1)]
        assert both.num_cached == 3


def on_two_ranks(path: str) -> list[int]:
    comm = ddp.init(abort_s=30)
    data = Counted(Path(path))
    both = Cached(data, lambda n: shared_by_host(comm, n), max_bytes=1 << 20, place=comm.rank, num_places=2)
    sampler = TrainSampler(LENGTH, global_batch=6, rank=comm.rank, world_size=2)
    found = []
    for _ in range(3):
        for plan, batches in TrainLoader(both, sampler, collate=list).epoch():
            found += [number for batch in batches for values, number in batch if len(values) == number + 1]
            sampler.commit(plan)
        comm.barrier()
    ddp.shutdown()
    return found


def test_ranks_of_a_host_read_each_sample_once_together(tmp_path):
    found = run_ranks(on_two_ranks, 2, str(tmp_path / "reads"))
    assert sorted(found[0] + found[1]) == sorted([*range(LENGTH)] * 3)
    assert Counted(tmp_path / "reads").reads() == [*range(LENGTH)]


def test_loader_processes_share_it_with_their_parent(tmp_path):
    counted = Counted(tmp_path / "reads")
    comm = ddp.Communicator(SimulatedNetwork(1).transport(0))
    both = Cached(counted, lambda n: shared_by_host(comm, n), max_bytes=1 << 20, place=0, num_places=1, num_loaders=2)
    sampler = TrainSampler(LENGTH, global_batch=6, rank=0, world_size=1)
    loader = TrainLoader(both, sampler, collate=list, num_workers=2)
    for number in range(3):
        for plan, batches in loader.epoch():
            assert sum(len(values) == index + 1 for batch in batches for values, index in batch) == plan.size
            sampler.commit(plan)
        if number == 0:
            loader.close()  # other processes find what these have left
    assert counted.reads() == [*range(LENGTH)] and both.num_cached == LENGTH
    values, index = both[11]
    assert len(values) == 12 and index == 11
    loader.close()


def test_nothing_is_left_behind_by_a_killed_job(tmp_path):
    code = (
        "import os, time, ddp\n"
        "from ddp.comm.host_share import shared_by_host\n"
        "from pathlib import Path\n"
        "def work():\n"
        "    comm = ddp.init()\n"
        "    memory = shared_by_host(comm, 1 << 20)\n"
        "    memory[comm.rank] = 1 + comm.rank\n"
        "    comm.barrier()\n"
        "    assert memory[:2].tolist() == [1, 2]\n"
        "    Path(f'{comm.rank}').write_text(str(os.getpid()))\n"
        "    time.sleep(60)\n"
        "ddp.launch(work, workers=2)\n"
    )
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL
    ) as job:
        deadline = time.monotonic() + 60
        pids = [tmp_path / str(rank) for rank in range(2)]
        while not all(path.exists() and path.read_text() for path in pids):
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.05)
        killed = [int(path.read_text()) for path in pids]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        job.kill()
    assert [path for pid in killed for path in Path("/dev/shm").glob(f"*{pid}*")] == []


def test_random_samples_are_refused_unless_the_transform_is_behind_it(tmp_path):
    draws = [lambda: torch.rand(()), random.random, np.random.rand]

    class Augmented(Counted):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[0], float(draws[index % 3]())

    for index in range(3):
        with pytest.raises(ConfigError, match=rf"reading sample {index} draws at random.*ddp.data.Transformed"):
            alone(Augmented(tmp_path / "a"))[index]
    counted = Counted(tmp_path / "b")
    behind = cached(
        Transformed(counted, OnInput(lambda values: values + torch.rand(()))),
        lambda n: torch.zeros(n, dtype=torch.uint8),
        max_bytes=1 << 20,
        place=0,
        num_places=1,
    )
    one, other = behind[3], behind[3]
    assert not torch.equal(one[0], other[0]) and one[1] == other[1] == 3 and counted.reads() == [3]
    assert len(behind) == LENGTH and behind.file_sizes == (20, 40) and cache_of(behind).num_cached == 1
    assert cache_of(counted) is None
    assert pickle.loads(pickle.dumps(Transformed(counted, OnInput(torch.neg)))).file_sizes == (20, 40)


def test_what_cannot_be_pickled_is_read_each_time(tmp_path):
    class Odd(Counted):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            return lambda: index

    odd = Odd(tmp_path / "reads")
    both = alone(odd)
    assert [both[4]() for _ in range(3)] == [4] * 3 and odd.reads() == [4] * 3 and both.num_cached == 0
    with pytest.raises(ConfigError, match="must be forked"):
        pickle.dumps(both)


class Unmade(Exception):
    """Is pickled without its second argument, so it cannot be made again."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)


def test_what_cannot_be_made_again_is_read_each_time(tmp_path):
    class Odd(Counted):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            return Unmade(index, 1)

    odd = Odd(tmp_path / "reads")
    both = alone(odd)
    assert [both[4].args for _ in range(3)] == [(4,)] * 3 and odd.reads() == [4] * 3
    assert both[5].args == (5,) and both.num_cached == 1  # nothing more is kept


class Raising:
    def __reduce__(self) -> Any:
        raise ValueError("of its own")


@pytest.mark.parametrize(
    "sample",
    [
        torch.tensor([1 + 2j]).conj().imag,  # negative bit
        reduce(lambda inner, _: [inner], range(5000), 0),
        Raising(),
    ],
    ids=["negative", "deep", "raising"],
)
def test_what_pickle_or_torch_refuse_is_not_kept(sample):
    both = alone([sample])
    assert both[0] is sample and both[0] is sample and both.num_cached == 0


class Named(torch.Tensor):
    """A tensor of another type, which torch pickles with all of its storage."""


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base.requires_grad_()[1:3].detach().requires_grad_(),
        lambda base: base.requires_grad_()[1:3],
        lambda base: base.as_subclass(Named)[1:3],
        lambda base: torch.nn.Parameter(base[1:3]),
        lambda base: torch.quantize_per_tensor(base, 0.5, 0, torch.quint8)[1:3],
    ],
    ids=["leaf", "inner", "subclass", "parameter", "quantized"],
)
@pytest.mark.filterwarnings("ignore")  # quantized tensors are to be removed
def test_a_view_does_not_keep_the_rest(make):
    view = make(torch.arange(100_000.0))
    both = alone([view])
    both[0]
    assert both.num_cached == 1 and both.num_bytes < 1000
    again = both[0]
    assert type(again) is type(view) and again.requires_grad == view.requires_grad and again.is_leaf
    assert torch.equal(again.dequantize() if again.is_quantized else again, torch.tensor([1.0, 2.0]))


def test_a_view_of_another_type_keeps_its_attributes():
    view = torch.arange(100_000.0).as_subclass(Named)[1:3]
    view.label = "second"  # type: ignore[attr-defined]
    both = alone([view])
    both[0]
    assert both[0].label == "second" and both.num_bytes < 1000


def test_a_transform_says_that_no_other_thread_may_read_ahead(tmp_path):
    class Ahead(Counted):
        may_read_ahead = True

    ahead = Ahead(tmp_path / "reads")
    assert alone(ahead).may_read_ahead and not Transformed(ahead, OnInput(torch.neg)).may_read_ahead


def test_a_rank_writes_into_its_own_arena(tmp_path):
    region = torch.zeros(1 << 16, dtype=torch.uint8)
    both = [
        Cached(Counted(tmp_path / "r"), lambda n: region[:n], max_bytes=3000, place=place, num_places=3)
        for place in range(3)
    ]
    for index in range(30):
        both[index % 3][index]
    assert (both[0]._filled > 0).all() and both[0].num_cached == both[2].num_cached
    for index in range(LENGTH):
        assert both[index % 2][index][0].tolist() == [*range(index + 1)]
    assert both[0]._filled.max() <= 1000


STREAM = (sample for sample in [(torch.ones(2), 0)])


@pytest.mark.parametrize(
    ("data", "words"),
    [((torch.ones(8, 2), torch.zeros(8).long()), "whole batches"), (STREAM, "data is a stream, whose samples")],
)
def test_fit_refuses_a_cache_that_keeps_nothing(data, words):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=words):
        ddp.fit(
            model,
            data,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss=ddp.Classification(),
            global_batch=2,
            max_steps=1,
            reading=ddp.Reading(cache=True),
            folder=ddp.Folder(None, progress=False),
        )


def test_fit_trains_alike_with_a_cache(tmp_path, capsys):
    class Pairs(Counted):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            return torch.tensor([float(index), 1.0]), index % 2

    results = []
    for is_cached in (False, True):
        torch.manual_seed(0)
        model, data = torch.nn.Linear(2, 2), Pairs(tmp_path / f"reads-{is_cached}")
        ddp.fit(
            model,
            data,
            torch.optim.SGD(model.parameters(), lr=1e-3),
            loss=ddp.Classification(),
            global_batch=7,
            epochs=3,
            reading=ddp.Reading(cache=is_cached),
            folder=None,
        )
        results.append((model.weight.detach().clone(), len(data.reads())))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] >= 3 * LENGTH and results[1][1] <= LENGTH + 3  # and the look for differences between ranks
    assert "the cache holds 60 samples" in capsys.readouterr().out
