"""Sharding: what shard v of a step has, at any world size; the promised multiset is the oracle."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp.data.orders.order import Blocks, Checksum, Fixed, Order, Permutation, Stratified
from ddp.data.orders.sampler import TrainSampler
from ddp.data.orders.sharding import SHARDINGS, Lanes, shard_order
from ddp.errors import ConfigError
from ddp.run.settings import checks as config_checks


class Odd(list):
    file_sizes = (20, 3)


class Files(list):
    """Samples that lie in files."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(range(sum(sizes)))
        self.file_sizes = np.array(sizes)

    def file_of(self, sample: int) -> int:
        return int(np.searchsorted(np.cumsum(self.file_sizes), sample, side="right"))


def strided(shard: int, num_shards: int, length: int = 48) -> range:
    return range(shard, length, num_shards)


def shards_of(order: Order, batch: int, num_shards: int, *, world_size: int = 1, epoch: int = 0) -> list[list[list]]:
    """The samples of each shard of each step, as the ranks' samplers plan them."""
    steps: list[list[list]] = []
    for rank in range(world_size):
        sampler = TrainSampler(order, global_batch=batch, rank=rank, world_size=world_size, num_shards=num_shards)
        sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch})
        for number, plan in enumerate(sampler.plans()):
            if not rank:
                steps.append([[] for _ in range(num_shards)])
            for micro in plan.micros:
                steps[number][micro.shard] += micro.indices
    return steps


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    st.integers(1, 7),
    st.integers(0, 20),
    st.sampled_from([*SHARDINGS, "own"]),
    st.sampled_from(["usual", "blocks", "fixed", "stratified"]),
    st.integers(1, 9),
)
def test_an_epoch_has_what_was_promised(sizes, num_shards, more, sharding, name, window):
    data, batch, world_size = Files(sizes), num_shards + more, 1 + more % num_shards
    orders = {
        "usual": None,
        "blocks": Blocks(sizes, window=window),
        "fixed": Fixed(len(data)),
        "stratified": Stratified([index % 3 for index in range(len(data))]),
    }
    how = (lambda v, V: strided(v, V, len(data))) if sharding == "own" else sharding
    try:
        order, _ = shard_order(data, orders[name], how, num_shards=num_shards, batch=batch)
    except ConfigError:
        return
    copies = num_shards if sharding in ("full_shuffle", "off") else 1
    steps = shards_of(order, batch, num_shards, world_size=world_size, epoch=2)
    seen = [sample for step in steps for shard in step for sample in shard]
    assert Counter(seen) == dict.fromkeys(data, copies)
    assert Checksum.of(np.array(seen)) == order.checksum()
    assert all(sum(map(len, step)) == batch for step in steps[:-1])
    assert steps == shards_of(order, batch, num_shards, epoch=2)
    assert {order.checksum()} == {Checksum.of(order.samples(np.arange(order.length), seed=5, epoch=e)) for e in (0, 1)}
    for sample in {0, len(data) - 1}:
        where = [position for position, each in enumerate(seen) if each == sample]
        assert order.positions(sample, seed=0, epoch=2) == where


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 9), min_size=8, max_size=16), st.integers(1, 8), st.integers(0, 20), st.integers(1, 9))
def test_each_shard_follows_a_run_of_files_of_its_own(sizes, num_shards, more, window):
    data, batch = Files(sizes), num_shards + more
    order, note = shard_order(data, Blocks(sizes, window=window), "file", num_shards=num_shards, batch=batch)
    assert f"{len(sizes)} files are dealt to {num_shards} shard" in note
    steps = shards_of(order, batch, num_shards)
    files = [{data.file_of(sample) for step in steps for sample in step[shard]} for shard in range(num_shards)]
    # Two lanes meet in one file at most, and lanes are as long as even shares are.
    assert sum(map(len, files)) <= len(sizes) + num_shards - 1
    lengths = [sum(len(step[shard]) for step in steps) for shard in range(num_shards)]
    assert max(lengths) - min(lengths) <= len(steps)
    # Within a window only: when a lane leaves a file, all but the window's samples of it have been read.
    for shard in range(num_shards):
        last = {}
        for place, sample in enumerate(sample for step in steps for sample in step[shard]):
            last.setdefault(data.file_of(sample), []).append(place)
        for places in last.values():
            assert places[-1] - places[0] < len(places) + 2 * window


def test_full_shuffles_differ_and_copies_do_not():
    data = Files([6] * 4)
    for sharding, alike in (("full_shuffle", False), ("off", True)):
        order, note = shard_order(data, None, sharding, num_shards=3, batch=6)
        assert "each of the 24 samples 3 times" in note
        steps = shards_of(order, 6, 3)
        lanes = [[sample for step in steps for sample in step[shard]] for shard in range(3)]
        assert all(sorted(lane) == list(data) for lane in lanes)
        assert (lanes[0] == lanes[1] == lanes[2]) == alike


def test_a_function_of_shard_and_number_of_shards():
    asked = []

    def own(shard, num_shards):
        asked.append((shard, num_shards))
        return strided(shard, num_shards)

    steps = shards_of(shard_order(Files([48]), None, own, num_shards=4, batch=8).order, 8, 4, world_size=2)
    assert asked == [(shard, 4) for shard in range(4)]
    assert all({sample % 4 for sample in shard} == {v} for step in steps for v, shard in enumerate(step))


def test_auto_takes_files_where_there_are_enough():
    def kind(data, num_shards, order=None, batch=12):
        return type(shard_order(data, order, "auto", num_shards=num_shards, batch=batch).order)

    assert kind(Files([4] * 6), 6) is Lanes and kind(Files([4] * 6), 7) is Permutation
    assert kind(Files([4, 0, 4]), 3) is Permutation  # a file without samples feeds nobody
    assert kind(list(range(24)), 2) is Permutation and kind(list(range(24)), 2, Blocks([12, 12])) is Lanes
    assert kind(Files([4] * 6), 3, Fixed(24)) is Fixed
    assert kind(Files([4] * 6), 3, batch=None) is Permutation  # it grows


def test_the_command_line_knows_the_same_words():
    assert config_checks.SHARDINGS == SHARDINGS


def test_what_was_chosen_is_said():
    def note(data, sharding, batch=12, num_shards=3):
        return shard_order(data, None, sharding, num_shards=num_shards, batch=batch).note

    assert note(Files([4] * 6), "auto") == "6 files are dealt to 3 shards, samples mixed 8 at a time"
    assert note(Files([24]), "auto") == "1 file for 3 shards: shards do not follow files, so a worker opens all of them"
    assert note(Files([4] * 6), "auto", batch=None).startswith("the batch changes inside an epoch: shards do not")
    assert note(list(range(24)), "auto") == note(Files([24]), strided_24) == ""
    assert note(list(range(3)), lambda v, V: [v], batch=3) == ""  # one sample for each shard
    dense = note(Files([24]), lambda v, V: range(16))
    assert dense == "of 24 samples, an epoch leaves out 8 and has 16 several times"


def strided_24(shard: int, num_shards: int) -> range:
    return range(shard, 24, num_shards)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sharding": "files"}, "sharding='files': take one of auto, file, sample"),
        ({"sharding": "file", "num_shards": 7}, "6 files cannot be dealt to 7 shards; write more .* sharding=sample"),
        ({"sharding": "file", "data": list(range(24))}, "no attribute `file_sizes`; take sharding=sample"),
        ({"sharding": "file", "order": Fixed(24)}, r"the order \(fixed\) does not keep to files"),
        ({"data": Odd(range(24))}, "file_sizes of the data add up to 23, and they have 24 samples"),
        ({"sharding": "file", "batch": None}, "changes inside an epoch; take sharding=sample"),
        ({"sharding": "off", "num_shards": 5}, "a batch that 5 shards divide"),
        ({"sharding": "full_shuffle", "order": Fixed(24)}, r"leave the order \(fixed\) out"),
        ({"order": Fixed(23)}, "made for 23 samples, and the data have 24"),
        ({"sharding": lambda v, V: [24]}, r"called with \(0, 3\), returned sample 24, .* have samples 0 … 23"),
        ({"sharding": lambda v, V: np.arange(24) % V == v}, r"returned true and false: .* np.flatnonzero\(mask\)"),
        ({"sharding": lambda v, V: [i % V == v for i in range(24)]}, "returned true and false"),
        ({"sharding": lambda v, V: np.arange(4.0)}, r"returned float64 \[4\]: return whole numbers"),
        ({"sharding": lambda v, V: np.arange(4).reshape(2, 2)}, r"returned int64 \[2, 2\]"),
        ({"sharding": lambda v, V: None}, "returned None: return the numbers of samples"),
        ({"sharding": lambda v, V: ["a"]}, r"returned str32 \[1\]"),
        ({"sharding": lambda v: [v]}, "failed: TypeError: .* takes 1 positional"),
        ({"sharding": lambda v, V: [-1]}, "returned sample -1"),
        ({"sharding": lambda v, V: range(v, 2)[:1], "batch": 3}, "2 samples cannot be dealt to 3 shards: take fewer"),
        ({"sharding": lambda v, V: range(8), "order": Fixed(24)}, r"leave the order \(fixed\) out"),
        ({"sharding": lambda v, V: []}, "no sample for any of 3 shards"),
        ({"sharding": lambda v, V: range(8 * (v == 0), 24)}, "shard 0 of 3 has 16 samples, .* give all shards about"),
    ],
)
def test_impossible_shardings(changes, words):
    choices = {"data": Files([4] * 6), "order": None, "sharding": "auto", "num_shards": 3, "batch": 6, **changes}
    with pytest.raises(ConfigError, match=words):
        shard_order(choices.pop("data"), choices.pop("order"), choices.pop("sharding"), **choices)
