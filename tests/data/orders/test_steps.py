"""The sizes of steps, against walking through a run step by step."""

from __future__ import annotations

from itertools import count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp.data.orders.sampler import TrainSampler
from ddp.data.orders.steps import BatchSizes, BatchWarmup
from ddp.errors import ConfigError

warmups = st.builds(
    lambda first, more, num_samples: BatchWarmup(first, first + more, num_samples),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(1, 200),
)


def walk(sizes: BatchSizes, position: int) -> list[int]:
    """Returns the positions after 0, 1, … steps."""
    found = [position]
    for _ in range(300):
        found.append(found[-1] + sizes.size_at(found[-1]))
    return found


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 50), st.integers(1, 60) | warmups, st.integers(0, 120), st.integers(0, 60), st.integers(0, 200))
def test_counting_equals_walking(length, batch, begin, num_steps, more):
    sizes = BatchSizes(length, batch)
    positions = walk(sizes, begin)
    assert sizes.after(begin, num_steps) == positions[num_steps]
    end = begin + more
    assert sizes.num_steps(begin, end) == next(n for n in count() if positions[n] >= end)
    assert set(map(lambda a, b: b - a, walk(sizes, 0), walk(sizes, 0)[1:])) <= sizes.all()


@given(warmups)
def test_it_grows_in_multiples_from_the_first_to_the_last(warmup):
    found = [warmup.size_at(position) for position in range(warmup.num_samples + 2)]
    assert found[0] == warmup.first and found[-1] == found[-2] == warmup.last
    assert found == sorted(found)
    assert all(size % warmup.first == 0 for size in found[:-2])
    at_half, half = warmup.size_at(warmup.num_samples // 2), (warmup.first + warmup.last) / 2
    assert abs(at_half - half) <= warmup.first + (warmup.last - warmup.first) / warmup.num_samples


@settings(deadline=None, max_examples=25)
@given(st.integers(8, 60), warmups, st.integers(1, 8), st.integers(1, 8), st.integers(0, 30))
@pytest.mark.slow
def test_a_growing_run_goes_on_at_another_world_size_with_the_same_steps(length, warmup, first, second, at):
    warmup = warmup._replace(first=8, last=8 + warmup.last)

    def steps(world_size: int, start: dict[str, int] | None, num_steps: int) -> tuple[list[list[int]], dict[str, int]]:
        samplers = [TrainSampler(length, global_batch=warmup, rank=r, world_size=world_size) for r in range(world_size)]
        found = []
        for sampler in samplers:
            if start:
                sampler.load_state_dict(start)
        while len(found) < num_steps:
            for plans in islice(zip(*(s.plans() for s in samplers), strict=True), num_steps - len(found)):
                found.append([index for plan in plans for micro in plan.micros for index in micro.indices])
                assert plans[0].size == len(found[-1]) == samplers[0].sizes.size_at(samplers[0].position)
                for sampler, plan in zip(samplers, plans, strict=True):
                    sampler.commit(plan)
        return found, samplers[0].state_dict()

    whole, _ = steps(first, None, 40)
    begun, state = steps(first, None, at)
    gone_on, _ = steps(second, state, 40 - at)
    assert begun + gone_on == whole


NO_GROWTH = [(8, 8, 10), (9, 8, 10), (0, 8, 10), (4, 8, 0), (4, 8, 9.5), ("4", 8, 9), (True, 8, 9), (4, 8, None)]


@pytest.mark.parametrize("warmup", NO_GROWTH)
def test_a_warm_up_that_does_not_grow_is_refused(warmup):
    with pytest.raises(ConfigError, match=r"first=.*: takes whole numbers; first must be at least 1 and less than"):
        BatchSizes(100, BatchWarmup(*warmup))


def test_the_smallest_batch_is_shared_by_all_workers():
    with pytest.raises(ConfigError, match="a global batch of 4 cannot be shared by 8 workers"):
        TrainSampler(100, global_batch=BatchWarmup(4, 16, 50), rank=0, world_size=8)
    with pytest.raises(ConfigError, match="a batch that grows from 4 samples cannot be cut into 8 shards"):
        TrainSampler(100, global_batch=BatchWarmup(4, 16, 50), rank=0, world_size=2, num_shards=8)
