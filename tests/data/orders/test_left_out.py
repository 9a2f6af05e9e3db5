"""Steps that a guard has left out, and ranges of settings beside them, against walking step by step."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp.data.orders.sampler import TrainSampler
from ddp.data.orders.steps import BatchSizes, BatchWarmup, Skipped, StepsLeft


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
