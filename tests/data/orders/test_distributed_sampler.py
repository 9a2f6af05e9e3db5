"""The drop-in sampler: torch's class is the oracle of its indices, and an uninterrupted pass that of a resumed one.

Tests with torchdata's loader are skipped where it is missing: pip install -c constraints.txt -e '.[test,strangers]'
"""

from __future__ import annotations

import json
import tracemalloc
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

from ddp.data.orders.distributed_sampler import DistributedSampler
from ddp.errors import ConfigError

lengths, world_sizes = st.integers(0, 64), st.integers(1, 9)


def data(length: int) -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.arange(length))


# --- indices ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(lengths, world_sizes, st.booleans(), st.booleans(), st.integers(0, 2**40), st.integers(0, 50))
def test_same_indices_as_torch(length, world_size, shuffle, drop_last, seed, first):
    for rank in range(world_size):
        options = {"num_replicas": world_size, "rank": rank, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        ours, theirs = DistributedSampler(data(length), **options), TorchSampler(data(length), **options)
        ours.set_epoch(first)
        assert (len(ours), ours.num_samples, ours.total_size) == (len(theirs), theirs.num_samples, theirs.total_size)
        for epoch in (first, first + 1, first + 2):  # it moves by itself
            theirs.set_epoch(epoch)
            assert list(ours) == list(theirs)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_large_data_set_costs_one_block_of_python_integers(shuffle, drop_last):
    """The first index does not wait for a list of all; every later one is torch's, and of torch's type."""
    options = {"num_replicas": 7, "rank": 6, "shuffle": shuffle, "drop_last": drop_last}
    sampler = DistributedSampler(range(300_000), **options)
    indices = iter(sampler)
    tracemalloc.start()
    first = next(indices)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    ours = [first, *indices]
    assert ours == list(TorchSampler(range(300_000), **options)) and {type(index) for index in ours} == {int}
    assert peak < 300_000  # bytes; this rank's list alone would take 42857 * 36
    assert sampler._share(0, 0).untyped_storage().nbytes() <= 4 * len(sampler)  # not the whole order's


def test_set_epoch_each_time_changes_nothing():
    ours, moved = (DistributedSampler(data(10), num_replicas=2, rank=1) for _ in range(2))
    for epoch in range(3):
        moved.set_epoch(epoch)
        assert list(ours) == list(moved)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("batching", [{"batch_size": 3}, {"batch_size": None}])
def test_passes_are_counted_under_a_dataloader(num_workers, batching):
    """DataLoader asks for two iterators at its start, and with persistent workers for another one per pass."""
    ours = DistributedSampler(range(10), num_replicas=2, rank=0)
    theirs = TorchSampler(range(10), num_replicas=2, rank=0)
    loader = DataLoader(
        list(range(10)), sampler=ours, num_workers=num_workers, persistent_workers=num_workers > 0, **batching
    )
    for epoch in range(3):
        theirs.set_epoch(epoch)
        assert torch.cat([torch.as_tensor(batch).reshape(-1) for batch in loader]).tolist() == list(theirs)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 60), world_sizes, world_sizes, st.booleans(), st.data())
def test_resumed_at_another_world_size_nothing_is_missed(length, before, after, drop_last, choice):
    options = {"seed": 3, "drop_last": drop_last}
    olds = [DistributedSampler(data(length), num_replicas=before, rank=rank, **options) for rank in range(before)]
    passes = [list(old) for old in olds]
    num_rounds = choice.draw(st.integers(0, len(passes[0])))  # each rank has used so many of its indices
    seen = [index for one in passes for index in one[:num_rounds]]
    states = {tuple(old.state_dict(consumed=num_rounds * before).items()) for old in olds}
    assert len(states) == 1

    news = [DistributedSampler(data(length), num_replicas=after, rank=rank, **options) for rank in range(after)]
    rests = []
    for new in news:
        new.load_state_dict(dict(*states))
        new.set_epoch(new.epoch)  # the habit of torch's users
        announced = len(new)
        rests.append(list(new))
        assert len(rests[-1]) == announced
    if news[0].epoch == 1 or passes[0] == []:  # the epoch was over: the next one is whole
        assert {len(rest) for rest in rests} == {news[0].num_samples}
        return
    left = length - len(set(seen))
    if drop_last:
        both = seen + [index for rest in rests for index in rest]
        assert len(both) == len(set(both)) and len(both) > length - before - after
    else:
        assert set(seen).union(*rests) == set(range(length))
        assert left <= sum(map(len, rests)) < left + after
    if before == after:  # the very same indices, in the same order
        assert [one[num_rounds:] for one in passes] == rests
    for new in news:  # the next pass is whole again, and torch's
        theirs = TorchSampler(data(length), num_replicas=after, rank=new.rank, **options)
        theirs.set_epoch(1)
        assert list(new) == list(theirs)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_look_at_a_batch_on_one_rank_does_not_shift_the_data(num_workers, resumed):
    """Rank 0 looks, in several ways, before each pass. The oracle: torch's class, which is told the epoch."""
    ours = [DistributedSampler(range(40), num_replicas=2, rank=rank) for rank in range(2)]
    theirs = [TorchSampler(range(40), num_replicas=2, rank=rank) for rank in range(2)]
    loader = DataLoader(range(40), sampler=ours[0], batch_size=1, num_workers=num_workers)
    for sampler in ours:
        sampler.load_state_dict({"seed": 0, "epoch": 0, "consumed": 24 * resumed})
    for epoch in range(3):
        left = slice(12 if resumed and epoch == 0 else 0, None)
        next(iter(loader))
        if not num_workers:
            list(islice(ours[0], 3))
            next(zip(loader, loader, strict=True))
            if epoch != 1:
                ours[0].set_epoch(epoch)  # torch's habit, after a look
        for sampler, oracle in zip(ours, theirs, strict=True):
            oracle.set_epoch(epoch)
            assert list(sampler) == list(oracle)[left]


def test_two_passes_at_once_are_one_and_an_old_iterator_moves_nothing():
    ours, theirs = (kind(range(20), num_replicas=2, rank=1) for kind in (DistributedSampler, TorchSampler))
    first = list(theirs)
    assert list(zip(ours, ours, strict=True)) == list(zip(first, first, strict=True))
    theirs.set_epoch(1)
    old = iter(ours)
    assert next(old) == next(iter(theirs))
    assert list(ours) == list(theirs)
    theirs.set_epoch(2)
    assert next(iter(ours)) == next(iter(theirs))
    list(old)  # of epoch 1
    assert list(islice(ours, len(ours))) == list(theirs)  # to its last index, and no further
    theirs.set_epoch(3)
    assert list(ours) == list(theirs)


def test_state_in_the_middle_of_a_pass_must_be_told():
    sampler = DistributedSampler(data(10), num_replicas=2, rank=0, seed=4)
    assert sampler.state_dict() == {"seed": 4, "epoch": 0, "consumed": 0}
    next(iter(sampler))
    with pytest.raises(ConfigError, match=r"epoch 0 needs consumed="):
        sampler.state_dict()
    assert sampler.state_dict(consumed=4) == {"seed": 4, "epoch": 0, "consumed": 4}
    assert sampler.state_dict(consumed=10) == {"seed": 4, "epoch": 1, "consumed": 0}
    with pytest.raises(ConfigError, match="-1"):
        sampler.state_dict(consumed=-1)


# --- the state of an iterator ----------------------------------------------------------------------------------------


def through_a_file(state: dict) -> dict:
    return json.loads(json.dumps(state))


@settings(deadline=None, max_examples=100)
@given(lengths, world_sizes, world_sizes, st.booleans(), st.booleans(), st.integers(0, 2), st.data())
def test_an_iterator_resumes_from_its_state(length, before, after, shuffle, drop_last, epoch, choice):
    """Three times in one pass, the last time at another world size. The oracle: the pass without an interruption."""

    def team(world_size: int, seed: int) -> list[DistributedSampler]:
        options = {"num_replicas": world_size, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        return [DistributedSampler(data(length), rank=rank, **options) for rank in range(world_size)]

    start = choice.draw(st.integers(0, max(0, length - 1)))  # of a pass that is itself resumed, by its sampler
    pieces: list[list[int]] = [[] for _ in range(before)]
    state = None
    for number in (choice.draw(st.integers(0, 9)) for _ in range(2)):
        iterators = []
        for sampler in team(before, seed=4 if state is None else 99):
            if state is None:
                sampler.load_state_dict({"seed": 4, "epoch": epoch, "consumed": start})
                sampler.set_epoch(sampler.epoch)
            iterators.append(iter(sampler))
            if state is not None:
                iterators[-1].load_state_dict(state)
        for piece, iterator in zip(pieces, iterators, strict=True):
            piece.extend(islice(iterator, number))
        states = [iterator.state_dict() for iterator in iterators]
        assert states == states[:1] * before
        state = through_a_file(states[0])

    rests = []
    for sampler in team(after, seed=99):
        iterator = iter(sampler)
        iterator.load_state_dict(state)
        rests.append(list(iterator))
        theirs = TorchSampler(data(length), after, sampler.rank, shuffle=shuffle, seed=4, drop_last=drop_last)
        theirs.set_epoch(state["epoch"] + 1)
        assert list(sampler) == list(theirs)  # the next pass is whole
    for rank, sampler in enumerate(team(before, seed=4)):
        sampler.load_state_dict({"seed": 4, "epoch": epoch, "consumed": start})
        whole = list(sampler)
        if before == after:
            assert pieces[rank] + rests[rank] == whole
    order = torch.arange(length).tolist()
    if shuffle:
        order = torch.randperm(length, generator=torch.Generator().manual_seed(4 + state["epoch"])).tolist()
    union = set(order[:start]).union(*pieces, *rests)
    assert union == set(range(length)) if not drop_last else len(union) > length - before - after


def test_an_iterator_that_has_not_begun_saves_the_pass_that_it_would_begin():
    sampler = DistributedSampler(range(9), num_replicas=2, rank=0, seed=3)
    iterator = iter(sampler)
    assert iterator.state_dict() == {"seed": 3, "epoch": 0, "consumed": 0, "start": 0}
    next(iterator)
    assert iterator.state_dict() == {"seed": 3, "epoch": 0, "consumed": 2, "start": 0}
    list(iterator)
    assert iterator.state_dict() == {"seed": 3, "epoch": 0, "consumed": 9, "start": 0}
    late = iter(sampler)
    assert late.state_dict() == {"seed": 3, "epoch": 1, "consumed": 0, "start": 0}
    sampler.load_state_dict({"seed": 6, "epoch": 5, "consumed": 4})
    assert late.state_dict() == {"seed": 6, "epoch": 5, "consumed": 4, "start": 4}
    assert iterator.state_dict()["seed"] == 3  # its pass was cut from that seed's order


@pytest.mark.parametrize("consumed", [0, 4, 10])
@pytest.mark.parametrize("told", [None, 2, 7])
def test_set_epoch_before_an_iterators_state(consumed, told):
    """Inside a pass its state wins, between two passes the epoch that set_epoch has named. The seed is the state's."""
    sampler = DistributedSampler(range(10), num_replicas=2, rank=1, seed=99)
    if told is not None:
        sampler.set_epoch(told)
    iterator = iter(sampler)
    iterator.load_state_dict({"seed": 3, "epoch": 2, "consumed": consumed, "start": 0})
    theirs = TorchSampler(range(10), num_replicas=2, rank=1, seed=3)
    gives_way = told == 7 and consumed != 4
    epoch = 7 if gives_way else 2
    theirs.set_epoch(epoch)
    assert list(iterator) == list(theirs)[0 if gives_way else consumed // 2 :]
    assert len(sampler) == 5 and sampler.epoch == epoch
    theirs.set_epoch(epoch + 1)
    assert list(sampler) == list(theirs)


@pytest.mark.parametrize("state", [{"yielded": 3}, {"seed": 0, "epoch": 0, "consumed": 11, "start": 0}])
def test_an_iterator_refuses_the_state_of_something_else(state):
    with pytest.raises(ConfigError, match=r"missing: seed|10 samples"):
        iter(DistributedSampler(range(10), num_replicas=2, rank=1)).load_state_dict(state)


# --- torchdata's StatefulDataLoader ----------------------------------------------------------------------------------

LENGTH, NUM_EPOCHS = 45, 3  # 23 indices on each of 2 ranks, the last one padding on rank 1
TORCHDATA_CALLS_IT = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
AT_ONCE = {"num_workers": 0}
SIDE_BY_SIDE = {"num_workers": 2, "snapshot_every_n_steps": 1}


def train(make_sampler, stops: list[tuple[int, int]], *, set_epoch: bool, **options) -> list[list[list[int]]]:
    """Returns the batches of each epoch. At each stop (epoch, batches) everything starts anew from the loader's state.

    A stop after -1 batches comes when the pass over the epoch has ended.
    """
    loading = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install -e '.[test,strangers]'")
    stops = [*stops]

    def begin(state=None):
        sampler = make_sampler(range(LENGTH), num_replicas=2, rank=1, seed=8)
        loader = loading.StatefulDataLoader(range(LENGTH), sampler=sampler, **options)
        if state is not None:
            loader.load_state_dict(through_a_file(state))
        return sampler, loader

    sampler, loader = begin()
    epochs: list[list[list[int]]] = [[] for _ in range(NUM_EPOCHS)]
    for epoch, batches in enumerate(epochs):
        ended = False
        while not ended:
            ended = True
            if set_epoch:
                sampler.set_epoch(epoch)
            for batch in loader:
                batches.append(torch.as_tensor(batch).reshape(-1).tolist())
                if stops[:1] == [(epoch, len(batches))]:
                    ended = False
                    break
            while stops and stops[0] == (epoch, -1 if ended else len(batches)):
                stops.pop(0)
                sampler, loader = begin(loader.state_dict())
    assert stops == []
    return epochs


@TORCHDATA_CALLS_IT
@pytest.mark.parametrize(
    "stops",
    [
        [(0, 1)],
        [(0, 3), (0, 3), (0, 5)],  # twice in one epoch, and once more before the first batch
        [(0, 6), (1, 6), (2, 6)],  # all batches are out, but the loader has not found the end
        [(0, -1), (1, -1)],  # it has
        [(0, -1), (0, -1), (1, 2), (2, 4)],
    ],
)
@pytest.mark.parametrize("set_epoch", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {**AT_ONCE, "batch_size": 4},
        {**AT_ONCE, "batch_size": None},
        {**SIDE_BY_SIDE, "batch_size": 4},
        {**SIDE_BY_SIDE, "batch_size": None},
        {**SIDE_BY_SIDE, "batch_size": 4, "snapshot_every_n_steps": 4},
        {**SIDE_BY_SIDE, "batch_size": 4, "persistent_workers": True},
    ],
    ids=str,
)
def test_a_stateful_loader_resumes_exactly(options, set_epoch, stops):
    """The oracles: torch's class under a plain DataLoader, uninterrupted, and under this loader with the same stops."""
    whole = []
    theirs = TorchSampler(range(LENGTH), num_replicas=2, rank=1, seed=8)
    for epoch in range(NUM_EPOCHS):
        theirs.set_epoch(epoch)
        batches = DataLoader(range(LENGTH), sampler=theirs, batch_size=options["batch_size"])
        whole.append([torch.as_tensor(batch).reshape(-1).tolist() for batch in batches])
    assert train(DistributedSampler, stops, set_epoch=set_epoch, **options) == whole
    if set_epoch:
        assert train(TorchSampler, stops, set_epoch=True, **options) == whole


@TORCHDATA_CALLS_IT
@pytest.mark.parametrize("options", [AT_ONCE, SIDE_BY_SIDE], ids=str)
def test_only_the_stateful_loader_may_ask_in_the_middle_of_a_pass(options):
    loading = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install -e '.[test,strangers]'")
    samplers = [DistributedSampler(range(LENGTH), num_replicas=2, rank=rank) for rank in range(2)]
    torch.manual_seed(0)
    loaders = [loading.StatefulDataLoader(range(LENGTH), sampler=s, batch_size=4, **options) for s in samplers]
    for batches in zip(*(islice(loader, 2) for loader in loaders), strict=True):
        assert len(batches) == 2
    states = [loader.state_dict() for loader in loaders]
    for state in states:  # torch's own seed for the workers is another on each rank
        state.get("_snapshot", {}).get("_main_snapshot", {}).pop("_base_seed", None)
    assert states[0] == states[1]
    for sampler in samplers:
        with pytest.raises(ConfigError, match=r"epoch 0 needs consumed="):
            sampler.state_dict()
        assert sampler.state_dict(consumed=16) == {"seed": 0, "epoch": 0, "consumed": 16}
    assert {len(loader) for loader in loaders} == {6}  # batches of the whole pass, as with torchdata's samplers


class Wrapper(BatchSampler):
    """Somebody's own batches, with a state that leaves the iterator's out."""

    def state_dict(self):
        return self.sampler.state_dict()

    def load_state_dict(self, state):
        self.sampler.load_state_dict(state)


@TORCHDATA_CALLS_IT
def test_who_saves_the_sampler_without_its_iterator_is_refused_under_the_stateful_loader_too():
    loading = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install -e '.[test,strangers]'")
    batches = Wrapper(DistributedSampler(range(LENGTH), num_replicas=2, rank=0), 4, False)
    loader = loading.StatefulDataLoader(range(LENGTH), batch_sampler=batches)
    next(iter(loader))
    with pytest.raises(ConfigError, match=r"epoch 0 needs consumed="):
        loader.state_dict()
