"""Orders: set algebra says what an epoch has, chi-square tests beside `torch.randperm` how well it is shuffled."""

from __future__ import annotations

from collections import Counter
from itertools import permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ddp.data.orders.order import (
    Blocks,
    Checksum,
    FirstOf,
    Fixed,
    Order,
    Permutation,
    Permutations,
    Stratified,
    Weighted,
)
from ddp.data.orders.sharding import Copies, Lanes, Listed, Shuffles
from ddp.data.orders.token_budget import TokenBudget
from ddp.errors import ConfigError

NUM_KEYS = 1000


def epoch_of(order: Order, seed: int = 0, epoch: int = 0) -> list[int]:
    return order.samples(np.arange(order.length), seed=seed, epoch=epoch).tolist()


def orders_of(file_sizes: list[int]) -> list[Order]:
    length = sum(file_sizes)
    classes = [index % 3 if index % 5 else 0 for index in range(length)]
    windows = (1, 3, 8, 1000)
    return [
        *(Permutation(length), Fixed(length), Stratified(classes)),
        *(Blocks(file_sizes, window=window) for window in windows),
    ]


files = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)


@settings(deadline=None, max_examples=50)
@given(files, st.integers(0, 2**40), st.integers(0, 50), st.data())
def test_each_sample_once_and_every_position_by_itself(file_sizes, seed, epoch, choice):
    for order in orders_of(file_sizes):
        samples = epoch_of(order, seed, epoch)
        assert sorted(samples) == list(range(sum(file_sizes)))
        assert Checksum.of(np.array(samples)) == order.checksum()
        at = choice.draw(st.lists(st.integers(0, order.length - 1), max_size=5))
        found = order.samples(np.array(at, dtype=np.int64), seed=seed, epoch=epoch)
        assert found.tolist() == [samples[position] for position in at]
        for sample in {0, order.length // 2, order.length - 1}:
            assert order.positions(sample, seed=seed, epoch=epoch) == [samples.index(sample)]
        assert order.positions(order.num_samples, seed=seed, epoch=epoch) == []


def test_the_first_of_an_order_leave_out_other_samples_in_each_epoch():
    whole, first = Permutation(50), FirstOf(Permutation(50), 48)
    assert epoch_of(first, 3, 1) == epoch_of(whole, 3, 1)[:48]
    assert first.checksum() is None and FirstOf(whole, 50).checksum() == whole.checksum()
    left_out = [set(range(50)) - set(epoch_of(first, 0, epoch)) for epoch in range(4)]
    assert len(set(map(frozenset, left_out))) > 1
    assert all(first.positions(sample, seed=0, epoch=0) == [] for sample in left_out[0])
    assert first.positions(epoch_of(first)[47], seed=0, epoch=0) == [47]
    with pytest.raises(ConfigError, match=r"length=51: the order \(permutation\) has 50 positions"):
        FirstOf(whole, 51)


def test_epochs_and_seeds_have_orders_of_their_own():
    for order in (
        *(Permutation(50), Blocks([10] * 5, window=7), Stratified([0, 1] * 25), Weighted(np.ones(50))),
        *(TokenBudget(40, np.arange(1, 31)), Shuffles(50, 2), Copies(Permutation(50), 2)),
        Listed([np.arange(10, 30), np.arange(20)], num_samples=50),
    ):
        found = [epoch_of(order, seed, epoch) for seed, epoch in product((0, 1), (0, 1, 2))]
        assert len(set(map(tuple, found))) == 6 and found[0] == epoch_of(order)


def test_a_budget_mixes_batches_in_each_epoch_and_who_shares_one_in_each_epoch_and_seed():
    budget = TokenBudget(40, np.arange(1, 31).repeat(3))
    sizes, sharing = set(), set()
    for seed, epoch in product((0, 1), (0, 1, 2)):
        samples, begin, batches = epoch_of(budget, seed, epoch), 0, []
        while begin < budget.length:
            batches.append(samples[begin : begin + budget.size_at(epoch * budget.length + begin)])
            begin += len(batches[-1])
        sizes.add(tuple(map(len, batches)))
        sharing.add(frozenset(map(frozenset, batches)))
    assert len(sizes) == 3 and len(sharing) == 6


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(0, 2**62))
def test_groups_have_permutations_of_their_own_in_one_call(sizes, key):
    numbers = np.concatenate([np.arange(size) for size in sizes])
    group, size = np.repeat(np.arange(len(sizes)), sizes), np.repeat(sizes, sizes)
    shuffle = Permutations(key, largest=max(sizes))
    places = shuffle.places(numbers, size=size, group=group)
    for which, its_size in enumerate(sizes):
        alone = shuffle.places(np.arange(its_size), size=its_size, group=which)
        assert places[group == which].tolist() == alone.tolist() and sorted(alone) == list(range(its_size))


def test_a_billion_samples_need_no_list():
    order = Permutation(10**9)
    positions = np.array([0, 1, 2, 10**9 - 1])
    samples = order.samples(positions, seed=1, epoch=2)
    assert len(set(samples.tolist())) == 4 and samples.min() >= 0 and samples.max() < 10**9


# --------------------------------------------------------------------------------------------------------- quality


def drawn_by(order: Order) -> np.ndarray:
    """Epochs of an order, one under each key, [NUM_KEYS, length]."""
    return np.stack([epoch_of(order, seed=11, epoch=epoch) for epoch in range(NUM_KEYS)])


def drawn_by_torch(length: int) -> np.ndarray:
    return np.stack([torch.randperm(length, generator=torch.Generator().manual_seed(k)) for k in range(NUM_KEYS)])


def p_values(epochs: np.ndarray) -> dict[str, float]:
    """Chances of figures at least as odd as these under true shuffling."""
    num, length = epochs.shape
    where = np.zeros((length, length))
    np.add.at(where, (np.arange(length), epochs), 1)
    steps = (np.diff(epochs, axis=1) % length).ravel()  # any step but 0 is equally likely
    steps = np.bincount(steps, minlength=length)[1:]
    fixed = (epochs == np.arange(length)).sum(axis=1)  # nearly Poisson(1)
    seen = np.bincount(np.minimum(fixed, 5), minlength=6)
    expected = [stats.poisson.pmf(k, 1) for k in range(5)]
    expected = num * np.array([*expected, 1 - sum(expected)])
    # Places are dependent: each row and each column adds up to the number of epochs.
    squares = ((where - num / length) ** 2 / (num / length)).sum() * (length - 1) / length
    return {
        "positions": stats.chi2.sf(squares, (length - 1) ** 2),
        "neighbours": stats.chisquare(steps).pvalue,
        "fixed points": stats.chisquare(seen, expected).pvalue,
        "rising": stats.binomtest(int((epochs[:, 1:2] > epochs[:, :1]).sum()), num).pvalue,
    }


@pytest.mark.parametrize("length", [16, 100])
@pytest.mark.quick(1)
def test_shuffled_as_well_as_by_torch(length):
    one_window = Blocks([1] * length, window=length)
    for epochs in (drawn_by(Permutation(length)), drawn_by(one_window), drawn_by_torch(length)):
        assert {name: p for name, p in p_values(epochs).items() if p <= 0.001} == {}


def test_blocks_shuffle_files_and_windows():
    """Of 20 files of 5 samples: the files at the epoch's places, and the samples inside of a window of 10."""
    epochs = drawn_by(Blocks([5] * 20, window=10))
    files = epochs // 5
    pairs = np.sort(files.reshape(NUM_KEYS, 10, 10), axis=2)[:, :, ::5]  # a window holds two files
    assert (np.sort(epochs.reshape(NUM_KEYS, 10, 10), axis=2) // 5 == np.repeat(pairs, 5, axis=2)).all()
    first = np.bincount(pairs[:, 0].ravel(), minlength=20)
    assert stats.chisquare(first).pvalue > 0.001
    for window in (0, 9):  # the place in a window of its first file's first sample
        ordered = epochs.reshape(NUM_KEYS, 10, 10)[:, window]
        place = (ordered == 5 * pairs[:, window, :1]).argmax(axis=1)
        assert stats.chisquare(np.bincount(place, minlength=10)).pvalue > 0.001


@pytest.mark.parametrize("length", [2, 3, 4, 5])
@pytest.mark.quick(1)
def test_all_permutations_of_a_few_samples_are_equally_likely(length):
    found = Counter(map(tuple, drawn_by(Permutation(length)).tolist()))
    assert stats.chisquare([found[each] for each in permutations(range(length))]).pvalue > 0.001


def test_weights_are_chances():
    weights = [0.0, 1, 2, 3, 0, 4, 0]
    draws = np.array(epoch_of(Weighted(weights, length=20_000)))
    counts = np.bincount(draws, minlength=7)
    assert counts[[0, 4, 6]].tolist() == [0, 0, 0]
    assert stats.chisquare(counts[[1, 2, 3, 5]], np.array([1, 2, 3, 4]) * 2000).pvalue > 0.001
    order = Weighted([1.0, 0, 1], length=10)
    assert set(order.positions(0, seed=0, epoch=0)) | set(order.positions(2, seed=0, epoch=0)) == set(range(10))
    assert order.positions(1, seed=0, epoch=0) == [] and order.checksum() is None


def test_weights_may_be_large_tensors_or_of_any_type():
    for weights in ([1e308] * 4, torch.tensor([0.5] * 4, dtype=torch.bfloat16), torch.ones(4, requires_grad=True)):
        assert epoch_of(Weighted(weights, length=50)) == epoch_of(Weighted([1.0] * 4, length=50))
    assert set(epoch_of(Weighted([1e308] * 4, length=200))) == {0, 1, 2, 3}


def test_equal_orders_have_equal_names_and_others_have_not():
    """A position in the middle of an epoch is good for the very same order only."""
    makers = [
        lambda: Permutation(8),
        lambda: Permutation(9),
        lambda: Fixed(8),
        lambda: Weighted([1.0] * 8, length=9),
        *(lambda sizes=sizes: Blocks(sizes, window=2) for sizes in ([4, 4], [3, 5], [2, 6])),
        lambda: Blocks([4, 4], window=3),
        *(lambda classes=classes: Stratified(classes) for classes in ([0, 1] * 4, [0, 0, 1, 1] * 2)),
        *(lambda weights=weights: Weighted(weights) for weights in ([1, 2] * 4, [2, 1] * 4)),
        *(lambda lengths=lengths: TokenBudget(9, lengths) for lengths in ([1, 2] * 4, [2, 1] * 4)),
        lambda: Listed([np.array([1, 2]), np.array([3])], num_samples=8),
        lambda: Listed([np.array([1]), np.array([2, 3])], num_samples=8),
        lambda: Copies(Stratified([0, 1] * 4), 2),
        lambda: Copies(Stratified([0, 0, 1, 1] * 2), 2),
        lambda: Lanes(Blocks([4, 4], window=2, lanes=[4, 4]), [4, 4], batch=4),
        lambda: Lanes(Blocks([3, 5], window=2, lanes=[4, 4]), [4, 4], batch=4),
    ]
    names = [make().identity for make in makers]
    assert names == [make().identity for make in makers] and len(set(names)) == len(names)


def test_every_batch_has_its_share_of_every_class():
    classes = np.repeat([0, 1, 2], [60, 30, 10])
    order = Stratified(classes)
    for epoch in range(3):
        labels = classes[epoch_of(order, epoch=epoch)]
        for begin, size in product(range(80), (10, 20)):
            counts = np.bincount(labels[begin : begin + size], minlength=3)
            assert (abs(counts - size * np.array([0.6, 0.3, 0.1])) <= 1.5).all()
    # Whichever member of a class comes first is random.
    first = Counter(epoch_of(order, epoch=epoch)[0] for epoch in range(NUM_KEYS))
    assert stats.chisquare([first[sample] for sample in range(60)]).pvalue > 0.001


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Weighted([1.0, -2, 3]), r"weights\[1\]=-2: .* at least 0"),
        (lambda: Weighted(["a", "b"]), "weights holds str"),
        (lambda: Weighted({0: 1.0}), "weights is a dict"),
        (lambda: Weighted(np.ma.array([1.0, 2], mask=[0, 1])), "weights is a MaskedArray"),
        (lambda: Weighted(torch.eye(2).to_sparse()[0]), "weights is a Tensor"),
        (lambda: Weighted([1.0, [2]]), "weights is a list"),
        (lambda: Weighted([1.0], length=-3), "length=-3: must be a whole number"),
        (lambda: Permutation(3.5), "num_samples=3.5"),
        (lambda: Permutation(-1), "num_samples=-1"),
        (lambda: Blocks(None), "file_sizes is a NoneType"),
        (lambda: Blocks([3, -1]), r"file_sizes\[1\]=-1"),
        (lambda: Blocks([3.5, 2]), r"file_sizes\[0\]=3.5: must be a whole number"),
        (lambda: Blocks([[3, 2]]), r"file_sizes has the shape \[1, 2\]"),
        (lambda: Blocks([3, 4], window=1.5), "window=1.5"),
        (lambda: Stratified([1, "a", None]), "classes holds object|classes holds str"),
        (lambda: Stratified([[1], [1, 2]]), "classes is a list"),
        (lambda: Weighted([1.0, float("nan")]), r"weights\[1\]=nan"),
        (lambda: Weighted([1.0, float("inf")]), r"weights\[1\]=inf"),
        (lambda: Weighted([0.0, 0, 0]), "all 3 weights are 0"),
        (lambda: Weighted([]), r"shape \[0\]"),
        (lambda: Weighted([[1.0]]), r"shape \[1, 1\]"),
        (lambda: Blocks([3, 4], window=0), "window=0"),
        (lambda: Stratified([]), "shape"),
    ],
)
def test_impossible_orders(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("length", range(20))
def test_checksums(length):
    numbers = np.arange(length)
    one = Checksum.of(numbers)
    xor = 0
    for number in range(length):
        xor ^= number
    assert one == Checksum.of_range(length) == (length, sum(range(length)), xor)
    assert Checksum.of(numbers[:7]).with_(Checksum.of(numbers[7:])) == one
    assert Checksum().with_samples(range(3)).with_samples(range(3, length)) == one or length < 3
    assert one.times(3) == one.with_(one).with_(one)
    changed = Checksum.of(np.append(numbers, -1))
    assert changed.total < 2**64 and changed != one
