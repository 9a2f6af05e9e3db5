"""Steps by tokens: counting equals walking, each sample once an epoch, nothing above the budget."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp.data.orders.order import Fixed
from ddp.data.orders.sampler import TrainSampler, sampler_of
from ddp.data.orders.steps import StepsLeft
from ddp.data.orders.token_budget import TokenBudget
from ddp.errors import ConfigError

lengths = st.lists(st.one_of(st.integers(0, 5), st.integers(1, 60)), min_size=1, max_size=70)


@settings(deadline=None, max_examples=60)
@given(lengths, st.integers(1, 200), st.integers(0, 9))
def test_each_sample_once_and_no_step_above_the_budget(lengths, more, seed):
    budget = TokenBudget(max(lengths) + more, lengths)
    for epoch in range(3):
        samples = budget.samples(np.arange(budget.length), seed=seed, epoch=epoch)
        assert sorted(samples.tolist()) == list(range(len(lengths)))
        begin = 0
        while begin < budget.length:
            size = budget.size_at(epoch * budget.length + begin)
            longest = max(lengths[sample] for sample in samples[begin : begin + size])
            assert size >= 1 and size * longest <= budget.tokens
            begin += size
        assert begin == budget.length
    sample = len(lengths) // 2
    assert budget.positions(sample, seed=seed, epoch=2) == np.flatnonzero(samples == sample).tolist()


@settings(deadline=None, max_examples=60)
@given(lengths, st.integers(1, 200), st.data())
def test_counting_equals_walking(lengths, more, choice):
    budget = TokenBudget(max(lengths) + more, lengths)
    starts = [0]
    while starts[-1] < 4 * budget.length:
        starts.append(starts[-1] + budget.size_at(starts[-1]))
    assert {b - a for a, b in pairwise(starts)} == budget.all()
    assert budget.num_steps_per_epoch == starts.index(budget.length)
    for _ in range(5):
        first, last = sorted(choice.draw(st.integers(0, len(starts) - 1)) for _ in range(2))
        assert budget.num_steps(starts[first], starts[last]) == last - first
        assert budget.after(starts[first], last - first) == starts[last]
        if last > first:  # a little less takes as many steps; from inside of a step it is the same step
            assert budget.num_steps(starts[first], starts[last - 1] + 1) == last - first
            inside = starts[first + 1] - 1
            assert budget.size_at(inside) == 1 and budget.num_steps(inside, starts[last]) == last - first
            assert budget.after(inside, last - first) == starts[last]
    assert StepsLeft(budget).end(starts[1], epochs=2, num_steps=None) == (
        2 * starts.index(budget.length) - 1,
        2 * budget.length,
    )


def test_batches_have_little_padding_and_all_lengths_come_at_any_time():
    drawn = np.random.default_rng(0).lognormal(5, 0.7, 20_000).astype(int).clip(1, 2048)
    budget = TokenBudget(16_384, drawn)
    samples = budget.samples(np.arange(budget.length), seed=0, epoch=0)
    padded, begin, longest = 0, 0, []
    while begin < budget.length:
        size = budget.size_at(begin)
        longest.append(drawn[samples[begin : begin + size]].max())
        padded += size * longest[-1]
        begin += size
    assert drawn.sum() / padded > 0.92
    assert len({tuple(sorted(budget.samples(np.arange(9), seed=seed, epoch=0))) for seed in range(20)}) > 15
    halves = [np.mean(half) for half in np.array_split(longest, 2)]
    assert abs(halves[0] - halves[1]) < 0.15 * np.mean(longest)
    assert np.mean(longest[:10]) > 1.2 * min(longest)  # not the short ones first


@pytest.mark.parametrize("num_shards", [2, 4, 7])
def test_shards_of_a_step_have_about_equally_many_tokens(num_shards):
    """torch.randperm over all samples is the yardstick: equal counts at random."""
    drawn = np.random.default_rng(0).integers(1, 2001, 20_000)
    budget = TokenBudget(16_384, drawn)
    sampler = TrainSampler(budget, global_batch=budget, rank=0, world_size=1, num_shards=num_shards)
    over, at_random = [], []
    for plan in sampler.plans():
        sums = [drawn[list(micro.indices)].sum() for micro in plan.micros]
        if plan.size % num_shards == 0:
            over.append(max(sums) / min(sums))
            mixed = np.random.default_rng(len(over)).permutation([i for micro in plan.micros for i in micro.indices])
            sums = [drawn[part].sum() for part in np.split(mixed, num_shards)]
            at_random.append(max(sums) / min(sums))
    assert len(over) > 100 and np.median(over) < 1.08 and np.median(over) <= np.median(at_random)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_rank_has_the_same_steps(world_size):
    drawn = [1 + 7 * index % 23 for index in range(60)]
    ranks = [
        sampler_of(
            range(60),
            order=None,
            sharding="auto",
            global_batch=TokenBudget(64, drawn),
            rank=rank,
            world_size=world_size,
            num_shards=5,
        )[0]
        for rank in range(world_size)
    ]
    alone = TrainSampler(60, global_batch=TokenBudget(64, drawn), rank=0, world_size=1, num_shards=5)
    for plans in zip(alone.plans(), *(sampler.plans() for sampler in ranks), strict=True):
        assert len({plan[:3] for plan in plans}) == 1
        assert sum((plan.micros for plan in plans[1:]), ()) == plans[0].micros


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TokenBudget(10, [3, 11]), "tokens=10: sample 1 alone has 11; take a budget of at least that"),
        (lambda: TokenBudget(10, [3, -1]), r"lengths\[1\]=-1: must be a whole number from 0"),
        (lambda: TokenBudget(10, [3, 9.9]), r"lengths\[1\]=9.9: must be a whole number"),
        (lambda: TokenBudget(10, [3, None]), "lengths holds object"),
        (lambda: TokenBudget(2**62, [2**61, 2**61, 3]), r"lengths\[0\]=2.30584e\+18: must be .* to 72057594037927936"),
        (lambda: TokenBudget(0, [0, 0]), "tokens=0"),
        (lambda: TokenBudget("5", [3]), "tokens='5': must be a whole number"),
        (lambda: TokenBudget(10, []), r"shape \[0\]"),
        (lambda: TrainSampler(Fixed(2), global_batch=TokenBudget(9, [3, 4]), rank=0, world_size=1), r"order \(fixed\)"),
        (lambda: TrainSampler(3, global_batch=TokenBudget(9, [3, 4]), rank=0, world_size=1), "2 samples, .* have 3"),
    ],
)
def test_impossible_budgets(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
