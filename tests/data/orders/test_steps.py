"""The sizes of steps, and steps that a guard has left out, against walking through a run step by step."""

from __future__ import annotations

from itertools import count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp.data.orders.sampler import TrainSampler
from ddp.data.orders.steps import BatchSizes, BatchWarmup, Skipped, StepsLeft
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


# Steps left out


def steps_of(sizes: BatchSizes, epochs: int) -> list[tuple[int, int]]:
    """Returns begin and end of each step of some epochs, none left out."""
    found, position = [], 0
    while position < epochs * sizes.length:
        found.append((position, position + sizes.size_at(position)))
        position = found[-1][1]
    return found


batches = st.integers(1, 9) | st.builds(BatchWarmup, st.just(2), st.integers(3, 9), st.integers(1, 60))


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 30), batches, st.integers(1, 4), st.data())
def test_the_end_with_several_ranges_ahead(length, batch, epochs, draw):
    sizes = BatchSizes(length, batch)
    steps = steps_of(sizes, epochs)
    left_out = sorted(draw.draw(st.sets(st.integers(0, len(steps) - 1), max_size=6)))
    ranges = [Skipped(number + 1, number + 1, *steps[number]) for number in left_out]
    left_over = StepsLeft(sizes, ranges)
    kept = [step for number, step in enumerate(steps) if number not in left_out]
    at = draw.draw(st.integers(0, len(kept)))
    begin = kept[at][0] if at < len(kept) else left_over.past(steps[-1][1])
    rest = kept[at:]
    most = draw.draw(st.none() | st.integers(0, len(steps) + 2))
    left, end = left_over.end(begin, epochs=epochs, num_steps=most)
    assert left == min(len(rest), len(steps) + 2 if most is None else most)
    if left:
        assert left_over.past(end) == left_over.past(rest[left - 1][1])
    for number, (start, stop) in enumerate(rest):
        assert {left_over.num_steps(begin, position + 1) for position in range(start, stop)} == {number + 1}


@settings(deadline=None, max_examples=40)
@given(st.integers(6, 30), st.integers(3, 9), st.integers(1, 3), st.data())
def test_a_sampler_that_leaves_out_steps_as_they_come(length, batch, world_size, draw):
    """It plans the other steps, in their order; and whoever is told later knows the number of each."""

    def fresh() -> list[TrainSampler]:
        how = {"global_batch": batch, "world_size": world_size, "seed": 5}
        return [TrainSampler(length, rank=rank, **how) for rank in range(world_size)]

    epochs = 3
    steps = steps_of(BatchSizes(length, batch), epochs)
    bad = draw.draw(st.sets(st.integers(0, len(steps) - 1), max_size=5))
    samplers, made, incidents = fresh(), dict[int, tuple[int, int]](), list[tuple[int, int, int]]()
    number, seen, state_at = 0, 0, {}
    while samplers[0].state.epoch < epochs:
        for plans in zip(*(sampler.plans() for sampler in samplers), strict=True):
            position, size = samplers[0].position_of(plans[0]), plans[0].size
            assert (position, position + size) == steps[seen]
            if seen in bad:
                incidents.append((number + 1, position, size))
                for sampler in samplers:
                    sampler.leave_out(*incidents[-1])
            else:
                number += 1
                made[number] = steps[seen]
                for sampler, plan in zip(samplers, plans, strict=True):
                    sampler.commit(plan)
                state_at[number] = samplers[0].state_dict()
            seen += 1
    assert len(made) == len(steps) - len(bad)
    [told, *_] = fresh()
    for incident in incidents:
        told.leave_out(*incident)
    assert told.end(epochs=epochs, num_steps=None)[0] == len(made)
    for step, (begin, end) in made.items():
        assert {told.step_at(position) for position in range(begin, end)} == {step}
        assert {told.left_out_from(position) for position in range(begin, end)} == {None}
        told.seek(step)
        plan = next(told.plans())
        assert (told.position_of(plan), plan.size) == (begin, end - begin)
    for step, begin, size in incidents:
        assert told.left_out_from(begin) == step == told.left_out_from(begin + size - 1)

    if made:  # a run that goes on leaves out no more than those that come again
        at = draw.draw(st.integers(1, len(made)))
        again = fresh()[0]
        again.load_state_dict(state_at[at])
        again = [again]
        for incident in incidents:
            if incident[1] >= made[at][1]:
                again[0].leave_out(*incident)
        rest = []
        while again[0].state.epoch < epochs:
            for plan in again[0].plans():
                rest.append((again[0].position_of(plan), again[0].position_of(plan) + plan.size))
                again[0].commit(plan)
        assert rest == [made[step] for step in range(at + 1, len(made) + 1)]
    for epoch in range(epochs):  # what an epoch promises is without them
        of_epoch = [step for step in made.values() if step[0] // length == epoch]
        positions = [position for begin, end in of_epoch for position in range(begin, end)]
        samples = fresh()[0].order.samples([position - epoch * length for position in positions], seed=5, epoch=epoch)
        expected = told.expected(epoch)
        assert expected is not None and expected.num == len(samples) and expected.total == sum(samples)


def test_a_range_of_the_settings_and_one_of_the_guard_stay_apart():
    """The range of the settings begins where the guard has left out the step of the same number."""
    sampler = TrainSampler(40, global_batch=8, rank=0, world_size=1, skip_steps=(3, 3))
    plans = list(islice(sampler.plans(), 4))
    assert [plan.position for plan in plans] == [0, 8, 24, 32]
    sampler.commit(plans[0]), sampler.commit(plans[1])
    sampler.leave_out(3, 24, 8)
    state = sampler.state_dict()
    assert [each[2:] for each in state["skipped"]] == [[16, 24], [24, 32]]
    resumed = TrainSampler(40, global_batch=8, rank=0, world_size=1, skip_steps=(3, 3))
    resumed.load_state_dict(state)
    assert [plan.position for plan in resumed.plans()] == [32]


@pytest.mark.parametrize("bad", [0, 2, 4])
def test_the_last_step_of_an_epoch_may_be_left_out(bad):
    sampler = TrainSampler(40, global_batch=8, rank=0, world_size=1)
    for number, plan in enumerate(sampler.plans()):
        if number == bad:
            sampler.leave_out(number + 1, sampler.position_of(plan), plan.size)
        else:
            sampler.commit(plan)
    assert sampler.state[1:] == (1, 0) and sampler.at_epoch_end
