"""Samplers: set algebra is the oracle of the exact ones. The drop-in has its own: test_distributed_sampler.py."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp.data.orders.distributed_sampler import DistributedSampler, EvaluationSampler
from ddp.data.orders.order import Fixed, Order, Permutation
from ddp.data.orders.sampler import StepPlan, TrainSampler
from ddp.data.orders.steps import SamplerState
from ddp.errors import ConfigError

WORLD_SIZES = range(1, 9)
lengths, world_sizes = st.integers(0, 70), st.integers(1, 8)


def data(length: int) -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.arange(length))


def test_defaults_come_from_torch_distributed(tmp_path):
    with pytest.raises(ConfigError, match=r"ddp\.init\(\)"):
        DistributedSampler(data(10))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sampler = DistributedSampler(data(10), shuffle=False)
        assert list(sampler) == list(range(10))
        assert list(EvaluationSampler(data(10))) == list(range(10))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("make", [DistributedSampler, EvaluationSampler])
@pytest.mark.parametrize(("world_size", "rank"), [(2, 2), (2, -1), (0, 0), (-1, 0)])
def test_impossible_ranks(make, world_size, rank):
    with pytest.raises(ConfigError, match=str(rank if world_size > 0 else world_size)):
        make(data(10), num_replicas=world_size, rank=rank)


# -------------------------------------------------------------------------------------------------------- TrainSampler


def team(length: int | Order, world_size: int, **options) -> list[TrainSampler]:
    return [TrainSampler(length, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def samples(plan: StepPlan) -> list[int]:
    return [index for micro in plan.micros for index in micro.indices]


def train(samplers: list[TrainSampler], num_steps: int) -> list[list[int]]:
    """The samples of each step in shard order, committed; all ranks must agree on everything but their share."""
    steps: list[list[int]] = []
    while len(steps) < num_steps:
        for plans in zip(*(sampler.plans() for sampler in samplers), strict=True):
            assert len({plan[:3] for plan in plans}) == 1
            steps.append([index for plan in plans for index in samples(plan)])
            assert len(steps[-1]) == plans[0].size
            for sampler, plan in zip(samplers, plans, strict=True):
                sampler.commit(plan)
            assert len({sampler.state for sampler in samplers}) == 1
            if len(steps) == num_steps:
                break
    return steps


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("length", [1, 5, 8, 61])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sample_once_per_epoch_and_the_same_steps_at_every_world_size(world_size, length, shuffle):
    options = {"global_batch": 9, "num_shards": 8, "seed": 5}
    order = Permutation(length) if shuffle else Fixed(length)
    samplers = team(order, world_size, **options)
    per_epoch = samplers[0].num_steps_per_epoch
    steps = train(samplers, 3 * per_epoch)
    epochs = [list(chain.from_iterable(steps[i * per_epoch : (i + 1) * per_epoch])) for i in range(3)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    assert samplers[0].state == SamplerState(5, 3, 0)
    assert steps == train(team(order, 1, **options), 3 * per_epoch)
    if shuffle and length == 61:
        assert epochs[0] != epochs[1] != epochs[2]


@settings(deadline=None, max_examples=100)
@given(world_sizes, st.integers(1, 6), st.integers(0, 40), st.integers(1, 7))
def test_shares_differ_by_one_sample_if_the_shards_divide(world_size, shards_per_rank, extra, micro_size):
    options = {"global_batch": world_size + extra, "num_shards": world_size * shards_per_rank, "seed": 1}
    for plans in zip(*(s.plans() for s in team(60, world_size, micro_size=micro_size, **options)), strict=True):
        shares = [sum(len(micro.indices) for micro in plan.micros) for plan in plans]
        assert max(shares) - min(shares) <= 1
        assert plans[0].size < options["global_batch"] or min(shares) >= 1
        shards: dict[int, list[int]] = {}
        for micro in (micro for plan in plans for micro in plan.micros):
            assert micro.part == len(shards.setdefault(micro.shard, []))
            shards[micro.shard].append(len(micro.indices))
        assert list(shards) == sorted(shards)
        for parts in shards.values():  # as few parts as the limit allows, as even as can be
            assert 1 <= min(parts) <= max(parts) <= micro_size and max(parts) - min(parts) <= 1
            assert len(parts) == -(-sum(parts) // micro_size)


@settings(deadline=None, max_examples=100)
@given(world_sizes, st.integers(0, 20), st.integers(0, 40), st.none() | st.integers(1, 5))
def test_micro_batches_are_the_same_at_every_world_size(world_size, more_shards, extra, micro_size):
    num_shards = world_size + more_shards
    options = {"global_batch": world_size + extra, "num_shards": num_shards, "micro_size": micro_size}
    alone = [plan.micros for plan in team(50, 1, **options)[0].plans()]
    together = list(zip(*(sampler.plans() for sampler in team(50, world_size, **options)), strict=True))
    assert [sum((plan.micros for plan in plans), ()) for plans in together] == alone
    for plans in together:
        shares = [sum(len(micro.indices) for micro in plan.micros) for plan in plans]
        assert max(shares) - min(shares) <= -(-plans[0].size // num_shards) + 1  # one shard and one sample


def test_the_picture_of_the_module():
    samplers = team(Fixed(10), 2, global_batch=10, num_shards=4, micro_size=2)
    parts = [[(micro.shard, micro.indices) for micro in next(sampler.plans()).micros] for sampler in samplers]
    assert parts[0] == [(0, (0, 1)), (1, (2,)), (1, (3, 4))]
    assert parts[1] == [(2, (5, 6)), (3, (7,)), (3, (8, 9))]


def test_planning_moves_nothing_and_commits_come_in_order():
    sampler = TrainSampler(10, global_batch=4, rank=0, world_size=1)
    first, second, third = sampler.plans()
    assert sampler.state == SamplerState(0, 0, 0) and list(sampler.plans()) == [first, second, third]
    with pytest.raises(ConfigError, match="position 4 cannot be committed"):
        sampler.commit(second)
    sampler.commit(first)
    with pytest.raises(ConfigError, match="position 0 cannot be committed"):
        sampler.commit(first)
    late = sampler.plans()
    sampler.commit(second)
    assert next(late) == second  # planned from where the state stood when asked
    sampler.commit(third)
    assert sampler.state == SamplerState(0, 1, 0) and third.size == 2


@settings(deadline=None, max_examples=50)
@given(st.integers(8, 60), st.lists(world_sizes, min_size=2, max_size=4), st.data())
def test_resume_at_other_world_sizes_again_and_again(length, sizes, choice):
    """Stopped anywhere, an epoch's edge included, and continued by another number of workers: nothing changes."""
    options = {"global_batch": 8, "num_shards": 8, "seed": 2}
    expected = train(team(length, 1, **options), 12)
    done, state = [], None
    for world_size in sizes:
        samplers = team(length, world_size, **{**options, "seed": 99})
        for sampler in samplers:
            sampler.load_state_dict(state or {"seed": 2, "epoch": 0, "consumed": 0})
        done += train(samplers, choice.draw(st.integers(0, 12 - len(done))))
        state = samplers[-1].state_dict()
        assert set(state) == {"seed", "epoch", "consumed", "order", "length", "num_steps", "skipped"}
    assert done == expected[: len(done)]


def test_the_end_of_an_epoch_is_the_beginning_of_the_next():
    sampler = TrainSampler(10, global_batch=4, rank=0, world_size=1)
    sampler.load_state_dict({"seed": 0, "epoch": 3, "consumed": 10})
    assert sampler.state == SamplerState(0, 4, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch": 3}, "global batch of 3 .* 4 workers: raise it to 4"),
        ({"num_shards": 3}, "num_shards=3 is less than 4 workers"),
        ({"length": 0}, "0 samples"),
        ({"micro_size": 0}, "micro_size must be at least 1, got 0"),
        ({"rank": 4}, "invalid rank 4"),
        ({"world_size": 0}, "at least 1, got 0"),
    ],
)
def test_impossible_settings(changes, words):
    options = {"length": 10, "global_batch": 8, "rank": 0, "world_size": 4, **changes}
    with pytest.raises(ConfigError, match=words):
        TrainSampler(options.pop("length"), **options)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"seed": 0, "epoch": 1}, "missing: consumed"),
        ({"seed": 0, "epoch": 1, "consumed": 11}, "10 samples"),
        ({"seed": 0, "epoch": -1, "consumed": 1}, "epoch=-1"),
    ],
)
def test_states_of_something_else(state, words):
    with pytest.raises(ConfigError, match=words):
        TrainSampler(10, global_batch=8, rank=0, world_size=1).load_state_dict(state)
    with pytest.raises(ConfigError, match=words):
        DistributedSampler(data(10), num_replicas=1, rank=0).load_state_dict(state)


# --------------------------------------------------------------------------------------------------- EvaluationSampler


@given(lengths, world_sizes)
def test_evaluation_sees_each_sample_once_in_order(length, world_size):
    samplers = [EvaluationSampler(length, num_replicas=world_size, rank=rank) for rank in range(world_size)]
    assert list(chain.from_iterable(samplers)) == list(range(length))
    sizes = [len(sampler) for sampler in samplers]
    assert max(sizes) - min(sizes) <= 1
    assert list(EvaluationSampler(data(length), num_replicas=world_size, rank=0)) == list(samplers[0].share)
