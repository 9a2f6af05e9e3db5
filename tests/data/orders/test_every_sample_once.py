"""The promise of an epoch: whatever the order, sharding, lanes, ranks and loader processes, each sample as promised.

The oracle is the multiset. Real files and loader processes in forty cells; plans alone in a thousand.

Tests: ddp/data/orders/order.py, ddp/data/orders/sampler.py, ddp/data/orders/sharding.py, ddp/data/orders/steps.py.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp.data.files.file_set import FileSet
from ddp.data.files.rows import JsonLines
from ddp.data.loading.loader import TrainLoader
from ddp.data.orders.order import Blocks, Checksum, Fixed, Order, Stratified, key_of
from ddp.data.orders.sampler import TrainSampler, sampler_of
from ddp.data.orders.sharding import Lanes, _equal_lanes
from ddp.data.orders.steps import SamplerState, StepsLeft, joined
from ddp.data.orders.token_budget import TokenBudget
from ddp.errors import ConfigError
from tests.mutants import mutants, mutated

ORDERS = ("usual", "blocks", "fixed", "stratified", "tokens")
SHARDINGS = ("auto", "file", "sample", "full_shuffle", "off", "own")


class Sizes(list):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__(range(sum(sizes)))
        self.file_sizes = sizes


def samplers_of(data: Any, world_size: int, choices: dict[str, Any]) -> list[TrainSampler]:
    return [sampler_of(data, rank=rank, world_size=world_size, **choices)[0] for rank in range(world_size)]


def choices_of(data: Any, order: str, sharding: str, batch: int, num_shards: int, seed: int = 0) -> dict[str, Any]:
    length, sizes = len(data), data.file_sizes
    made: dict[str, Order | None] = {
        "usual": None,
        "blocks": Blocks(sizes, window=5),
        "fixed": Fixed(length),
        "stratified": Stratified([index % 3 for index in range(length)]),
        "tokens": None,
    }
    lengths = [1 + index % 7 for index in range(length)]
    return {
        "order": made[order],
        "sharding": (lambda v, V: range(v, length, V)) if sharding == "own" else sharding,
        "global_batch": TokenBudget(7 + batch, lengths) if order == "tokens" else batch,
        "num_shards": num_shards,
        "seed": seed,
    }


def rest_of(samplers: list[TrainSampler], num_steps: int) -> list[list[tuple[int, ...]]]:
    """The shards of the next steps, committed; fewer at the end of an epoch."""
    steps = []
    for plans in zip(*(sampler.plans() for sampler in samplers), strict=True):
        steps.append([tuple(micro.indices) for plan in plans for micro in plan.micros])
        for sampler, plan in zip(samplers, plans, strict=True):
            sampler.commit(plan)
        if len(steps) == num_steps:
            break
    return steps


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(0, 11), min_size=1, max_size=8).filter(any),
    st.integers(1, 9),
    st.integers(0, 12),
    st.sampled_from(ORDERS),
    st.sampled_from(SHARDINGS),
    st.integers(0, 3),
    st.data(),
)
def test_stopped_anywhere_twice_the_rest_follows_and_nothing_else(sizes, shards, more, order, sharding, epoch, draw):
    data = Sizes(sizes)
    choices = choices_of(data, order, sharding, shards + more, shards, seed=more)
    try:
        alone = samplers_of(data, 1, choices)
    except ConfigError:
        return
    start = {**alone[0].state_dict(), "epoch": epoch}
    alone[0].load_state_dict(start)
    whole = rest_of(alone, 10**6)
    copies = shards if sharding in ("full_shuffle", "off") else 1
    assert Counter(index for step in whole for shard in step for index in shard) == dict.fromkeys(data, copies)
    assert alone[0].state == SamplerState(more, epoch + 1, 0)

    found, state = [], start
    for _ in range(3):
        samplers = samplers_of(data, draw.draw(st.integers(1, shards)), choices)
        for sampler in samplers:
            sampler.load_state_dict(state)
        left = len(whole) - len(found)
        found += rest_of(samplers, draw.draw(st.integers(1, max(1, left)))) if left else []
        assert len({json.dumps(sampler.state_dict()) for sampler in samplers}) == 1
        state = samplers[0].state_dict()
    assert found == whole[: len(found)]


# --------------------------------------------------------------------------------------- real files, loader processes


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> FileSet:
    folder = tmp_path_factory.mktemp("files")
    first = 0
    for number, size in enumerate((9, 4, 7, 1, 12, 8)):
        lines = [json.dumps({"x": first + index, "y": 0}) + "\n" for index in range(size)]
        (folder / f"{number}.jsonl").write_text("".join(lines))
        first += size
    format = JsonLines(inputs=["x"], target="y")
    return FileSet(str(folder), format, index_dir=folder / "index")


CELLS = [
    (order, sharding, world_size, loaders)
    for number, (order, sharding) in enumerate(
        [("usual", "auto"), ("blocks", "file"), ("usual", "full_shuffle"), ("stratified", "sample"), ("tokens", "auto")]
    )
    for world_size in (1, 2, 3, 6)
    for loaders in (0, 1 + (number + world_size) % 2)
]


@pytest.mark.parametrize(("order", "sharding", "world_size", "loaders"), CELLS)
@pytest.mark.quick(4)
def test_what_loaders_read_is_what_was_promised(files, order, sharding, world_size, loaders):
    assert len(CELLS) == 40
    choices = choices_of(files, order, sharding, 12, 6)
    seen: Counter[int] = Counter()
    for sampler in samplers_of(files, world_size, choices):
        loader = TrainLoader(files, sampler, num_workers=loaders)
        for plan, batches in loader.epoch():
            for micro, (inputs, _) in zip(plan.micros, batches, strict=True):
                assert inputs[:, 0].int().tolist() == list(micro.indices)
                seen.update(micro.indices)
        loader.close()
    assert seen == dict.fromkeys(range(41), 6 if sharding == "full_shuffle" else 1)


# ------------------------------------------------------------------------------------------------------------ mutants


def promises() -> None:
    """A few epochs in which every line matters: multisets, the same steps at any world size, lanes, keys."""
    for sizes, shards, batch in (([5, 0, 4, 7, 3, 6], 3, 7), ([4, 4, 4, 4], 2, 4), ([9, 1, 1, 8, 2], 4, 5)):
        data, seen = Sizes(sizes), set()
        choices = choices_of(data, "blocks", "file", batch, shards)
        ends = np.cumsum(sizes)
        for epoch in (0, 1, 2):
            runs = []
            for world_size in (1, shards):
                samplers = samplers_of(data, world_size, choices)
                for sampler in samplers:
                    sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch})
                runs.append(rest_of(samplers, 100))
                assert all(sampler.state == SamplerState(0, epoch + 1, 0) for sampler in samplers)
                seen_by_all = reduce(Checksum.with_, [sampler.seen for sampler in samplers])
                assert seen_by_all == Checksum.of(np.arange(len(data)))
            flat = [index for step in runs[0] for shard in step for index in shard]
            assert runs[0] == runs[1] and sorted(flat) == list(data)
            assert all(sum(map(len, step)) == batch for step in runs[0][:-1])
            order = samplers[0].order
            assert [order.positions(index, seed=0, epoch=epoch) for index in flat] == [[k] for k in range(len(flat))]
            assert order.checksum() == (len(data), sum(data), int(np.bitwise_xor.reduce(np.array(data))))
            files = [
                {int(np.searchsorted(ends, index, "right")) for step in runs[0][:-1] for index in step[shard]}
                for shard in range(shards)
            ]
            assert sum(map(len, files)) <= len(sizes) + shards - 1
            seen.add(tuple(flat))
        assert len(seen) == 3
    skipping = TrainSampler(20, global_batch=6, rank=0, world_size=1, skip_steps=(3, 5))
    for number, position in enumerate((0, 6, 26, 32), start=1):
        plan = next(skipping.plans())
        assert skipping.position == position
        skipping.commit(plan)
        assert skipping.state_dict()["num_steps"] == number


def leased() -> None:
    """Commits the steps of an epoch in any order, and resumes with other ranks and batches: each sample once."""
    for seed in range(14):
        in_any_order(seed)


def in_any_order(seed: int) -> None:
    draw = random.Random(seed)
    length, batch, num_made, epoch = draw.randint(5, 40), draw.randint(3, 8), 0, draw.randint(0, 2)
    skip, length = ((2, 3), 3 * batch + length) if seed % 3 == 0 else (None, length)  # which ends inside the epoch
    state, seen = None, Checksum()
    made: list[tuple[int, int]] = []  # samples by position
    while True:
        choices: dict[str, Any] = {"global_batch": batch, "num_shards": 3, "skip_steps": skip}
        size = draw.randint(1, 3)
        samplers = [TrainSampler(length, rank=rank, world_size=size, **choices) for rank in range(size)]
        for sampler in samplers:
            sampler.load_state_dict(state or {**sampler.state_dict(), "epoch": epoch, "num_steps": 0})
        first = samplers[0]
        lowest = epoch * length + first.state.consumed
        assert first.position == epoch * length + len(made) + sum(map(len, first._steps.within(0, lowest)))
        plans = list(zip(*(sampler.plans() for sampler in samplers), strict=True))
        for number, (plan, *others) in enumerate(plans):
            where = first.position_of(plan)
            assert first.step_at(where) == first.step_at(where + plan.size - 1) == num_made + number + 1
            assert not first.was_made(where)
            assert [first.part_of(plan, rank, size) for rank in range(size)] == [plan, *others]
        assert all(first.was_made(epoch * length + position) for position, _ in made)
        assert first.end(epochs=epoch + 1, num_steps=None) == (len(plans), (epoch + 1) * length)
        assert first.end(epochs=epoch + 2, num_steps=len(plans) + 1)[0] == len(plans) + 1
        for number in range(len(plans)):
            left, end = first.end(epochs=None, num_steps=number)
            assert left == number and first._steps.past(end) == first.position_of(plans[number][0])
        assert len(plans) < 2 or "commit each plan once" in refusal(first.commit, plans[-1][0])
        draw.shuffle(plans)
        for done in plans[: draw.randint(0, len(plans))]:
            assert not first.at_epoch_end or not made
            for sampler, plan in zip(samplers, done, strict=True):
                sampler.commit_leased(plan)
                made += [each for micro in plan.micros for each in zip(micro.positions, micro.indices, strict=True)]
            num_made += 1
            assert "commit each plan once" in refusal(first.commit_leased, done[0])
            assert first.state_dict()["num_steps"] == num_made
            assert next(first.plans(), done[0]).epoch in (epoch, epoch + 1)
        seen = reduce(Checksum.with_, [sampler.seen for sampler in samplers], seen)
        if first.state.epoch > epoch:
            break
        state = json.loads(json.dumps(first.state_dict()))
        assert all(one[1] < two[0] for one, two in pairwise(state.get("ahead", [])))
        assert all(sampler.state_dict() == first.state_dict() for sampler in samplers)
        batch = batch if skip is not None or seed % 2 else draw.randint(3, 8)
    assert first.at_epoch_end and "ahead" not in first.state_dict() and first.state.consumed == 0
    left_out = [p for each in first._steps.within(epoch * length, (epoch + 1) * length) for p in each]
    order = first.order.samples(np.arange(length), seed=0, epoch=epoch)
    expected = [(p, int(order[p])) for p in range(length) if p + epoch * length not in left_out]
    assert sorted(made) == expected
    assert first.expected(epoch) == Checksum.of(np.array([index for _, index in expected])) == seen


def refusal(commit: Callable[[Any], None], plan: Any) -> str:
    try:
        commit(plan)
    except ConfigError as error:
        return str(error)
    return ""


HARMLESS = {
    "found: list[range]": "an annotation",
    "if gap.start > position": "no step begins in a range that was made",
    "if begin <= gap.start": "the same",
    ">= num_steps": "a range after the last step is not passed, or passed with 0 steps left",
    "found[0] != (seed, epoch)": "the sequence is made again",
    "self._files = found": "the sequence is made again",
    "largest=min(self.window, self.length)": "more rounds",
    "if left.min() < 0": "an argument that another test checks",
    "if self.length < self.num_lanes": "the same",
    "shards = counted": "words",
    "lane = int(left.argmin())": "words",
    "raise ConfigError": "words",
    "f'": "words",
}
MUTATED: list[Any] = [
    *(Lanes.__init__, Lanes.samples, Blocks.samples, Blocks._sequence),
    *(_equal_lanes, key_of, StepsLeft.of_epoch),
]
OF_LEASES: list[Any] = [
    *(
        StepsLeft.past,
        StepsLeft.size_at,
        StepsLeft.num_steps,
        StepsLeft.after,
        joined,
        TrainSampler.was_made,
        TrainSampler.commit_leased,
    ),
    *(TrainSampler.commit, TrainSampler._note),
]


@pytest.mark.parametrize("function", [*MUTATED, *OF_LEASES], ids=lambda function: function.__qualname__)
@pytest.mark.quick(2)
def test_a_mutant_breaks_a_promise(function):
    promise = leased if function in OF_LEASES else promises
    promise()
    survivors = []
    for mutant in mutants(function):
        if any(words in mutant.before for words in HARMLESS):
            continue
        with mutated(function, mutant):
            try:
                promise()
            except Exception:
                continue
        survivors.append(f"{mutant.before}   became   {mutant.after}")
    assert survivors == [], "\n".join(survivors)
