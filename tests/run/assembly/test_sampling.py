"""Where a sample is: what `python -m ddp where` says is what samplers plan; steps that are left out stay left out."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from ddp.__main__ import main
from ddp.commands.where import Start, place_of_sample, samples_of_step, where
from ddp.data.orders.order import Checksum
from ddp.data.orders.sampler import TrainSampler
from ddp.data.samples import Splits
from ddp.data.sets.validation import with_share
from ddp.errors import ConfigError
from ddp.policies import Reading
from ddp.run.assembly.sampling import StandInData, check_sampling, sampler_facts, sampler_for
from ddp.run.settings.config import Config, choose


class Named(list):
    """Samples in files that have names."""

    file_sizes = (10, 7, 16, 7)
    addresses = ("a.tar", "b.tar", "c.tar", "d.tar")
    lengths = tuple(1 + index % 5 for index in range(40))
    targets = tuple(index % 2 for index in range(40))
    weights = tuple(index % 3 for index in range(40))


SPLITS = Splits(train=Named((index, index) for index in range(40)), test=Named())


def config_of(workers: int = 2, *, batch: dict | None = None, **data) -> Config:
    config = Config(epochs=3, data=choose("data", "digits", **data))
    config.cluster.workers, config.loader = workers, Reading(num_workers=2)
    config.batch.global_size = 12
    for key, value in {"num_shards": 4, **(batch or {})}.items():
        setattr(config.batch, key, value)
    return config


CASES = [
    config_of(1),
    config_of(3, skip_steps=[3, 5]),
    config_of(2, order="weighted"),
    config_of(2, order="stratified", batch={"micro_size": 2}),
    config_of(4, sharding="file", order="blocks", window=5),
    config_of(2, sharding="off", skip_steps=[13, 15]),
    config_of(3, sharding="full_shuffle"),
    config_of(2, batch={"tokens": 20}),
]


@pytest.mark.parametrize("config", CASES)
def test_both_answers_are_what_the_samplers_plan(config):
    read: dict[tuple[int, int], list[tuple[int, int, int]]] = {}  # (epoch, sample) → (step, rank, shard)
    for rank in range(config.cluster.workers):
        sampler = sampler_for(config, SPLITS, rank=rank)
        step = count(1)
        while sampler.state.epoch < 3:
            for plan in sampler.plans():
                here, lines = next(step), []
                for micro in plan.micros:
                    for sample in micro.indices:
                        read.setdefault((plan.epoch, sample), []).append((here, rank, micro.shard))
                    lines.append(f"rank {rank}, shard {micro.shard}")
                answer = samples_of_step([Start(config, SPLITS)], here)
                assert answer.startswith(f"step {here}, in epoch {plan.epoch}: {plan.size} samples")
                assert [line in answer for line in lines] == [True] * len(lines)
                sampler.commit(plan)
        assert samples_of_step([Start(config, SPLITS)], next(step) - 1)
        with pytest.raises(ConfigError, match="the run has steps 1 to"):
            samples_of_step([Start(config, SPLITS)], next(step))
    for sample, file in ((0, "a.tar"), (17, "c.tar"), (39, "d.tar")):
        for epoch in range(3):
            answer = place_of_sample([Start(config, SPLITS)], sample, epoch)
            expected = sorted(read.get((epoch, sample), []))
            found = [line.partition(", part")[0] for line in answer.splitlines() if ": step " in line]
            assert sorted(found) == sorted(
                f"sample {sample}  in {file}, epoch {epoch}: step {step}, rank {rank}, shard {shard}"
                for step, rank, shard in expected
            )
            if config.data.skip_steps and not expected:
                assert "left out, by data.skip_steps" in answer


def test_samples_that_are_set_apart_are_never_read_and_the_others_keep_their_numbers():
    config, splits = config_of(validation=0.2), with_share(SPLITS, 0.2, seed=0)
    start = Start(config, splits)
    answers = {sample: place_of_sample([start], sample, 0) for sample in range(40)}
    held_out = {sample for sample, answer in answers.items() if answer.endswith("it is set apart by data.validation")}
    assert held_out == {index for index, _ in splits.validation} and len(held_out) == 8
    for sample in set(range(40)) - held_out:
        file = "abcd"[int(np.searchsorted(np.cumsum(Named.file_sizes), sample, side="right"))]
        assert answers[sample].startswith(f"sample {sample}  in {file}.tar, epoch 0: step ")
        step = int(answers[sample].split("step ")[1].split(",")[0])
        lines = [line for line in samples_of_step([start], step).splitlines() if line.endswith(f"in {file}.tar")]
        assert str(sample) in " ".join(lines).split()
    with pytest.raises(ConfigError, match="the data have samples 0 to 39"):
        place_of_sample([start], 40, 0)
    own = config_of(validation=0.2)
    own.data = choose("data", "mine:make", validation=0.2)
    facts = sampler_facts(own, splits.train)
    assert facts is not None and facts["num_samples"] == 40
    stand_ins = with_share(Splits(train=StandInData(facts), test=()), 0.2, seed=0)
    assert {sample: place_of_sample([Start(config, stand_ins)], sample, 0) for sample in range(40)} == answers


def test_each_start_of_a_run_answers_for_its_own_steps():
    """Ten steps an epoch; resumed after 5 by two workers, and after 7 with steps left out."""
    first = config_of(1, batch={"global_size": 4, "num_shards": 2})
    others = [
        config_of(2, batch={"global_size": 4, "num_shards": 2}),
        config_of(2, batch={"global_size": 4, "num_shards": 2}, skip_steps=[9, 10]),
    ]
    read: dict[int, list[tuple[int, int]]] = {}  # step → (rank, sample)
    starts: list[Start] = []
    state = None
    for config, begin, end in [(first, 0, 5), (others[0], 5, 7), (others[1], 7, 15)]:
        starts.append(Start(config, SPLITS, begin, state))
        samplers = [starts[-1].sampler(rank=rank) for rank in range(config.cluster.workers)]
        for sampler in samplers:
            for step, plan in numbered(sampler, begin, end):
                read.setdefault(step, []).extend((sampler.rank, i) for m in plan.micros for i in m.indices)
        state = samplers[0].state_dict()
    for step, who in read.items():
        answer = samples_of_step(starts, step)
        for rank, sample in who:
            lines = [line for line in answer.splitlines() if line.startswith(f"rank {rank}, ")]
            assert lines and f" {sample} " in f"{answer} ".replace("\n", " ")
            epoch = int(answer.split("in epoch ")[1].split(":")[0])
            assert f"step {step}, rank {rank}, " in place_of_sample(starts, sample, epoch)
    begins_later = [start for start in starts if start.step >= 5]
    early = next(sample for *_, sample in read[1])
    assert "epoch 0: read before step 6, with which this run began" in place_of_sample(begins_later, early, 0)
    left_out = set(range(40)) - {i for step, who in read.items() if step <= 8 for *_, i in who}
    assert any("left out, by data.skip_steps" in place_of_sample(starts, sample, 0) for sample in left_out)


def test_steps_that_were_made_before_their_turn_are_found():
    """Of ten steps workers make five in any order, 1 2 3 5 7; then the run goes on with others."""
    config = config_of(2, batch={"global_size": 4, "num_shards": 2})
    first = Start(config, SPLITS)
    samplers = [first.sampler(rank=rank) for rank in range(2)]
    for plans in [list(zip(*(each.plans() for each in samplers), strict=True))[number] for number in (1, 0, 4, 6, 2)]:
        for sampler, plan in zip(samplers, plans, strict=True):
            sampler.commit_leased(plan)
    state = samplers[0].state_dict()
    starts = [first, Start(config, SPLITS, 5, state)]
    numbers = {0: "1", 4: "2", 8: "3", 16: "5", 24: "7", 12: "6", 20: "7", 28: "8", 32: "9", 36: "10"}
    for position, sample in enumerate(samplers[0].order.samples(np.arange(40), seed=config.seed, epoch=0).tolist()):
        answer = place_of_sample(starts, sample, 0)
        assert f"step {numbers[position // 4 * 4]}, rank" in answer and "\n" not in answer
    early = samplers[0].part_of(plans[0], 0, 1).micros[0].indices[0]
    assert "read before step 6" in place_of_sample(starts[1:], early, 0)


def numbered(sampler, begin, end):
    """Makes steps, and yields each with its number."""
    step = begin
    while step < end:
        for plan in sampler.plans():
            step += 1
            yield step, plan
            sampler.commit(plan)
            if step == end:
                return


def test_the_samples_of_a_step_stand_with_their_files():
    answer = samples_of_step([Start(CASES[4], SPLITS)], 2)
    for line in answer.splitlines():
        if line.startswith("    "):
            *numbers, _, file = line.split()
            begin = {"a.tar": 0, "b.tar": 10, "c.tar": 17, "d.tar": 33}[file]
            assert all(begin <= int(number) < begin + 16 for number in numbers)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("skipped", [(1, 2), (3, 3), (4, 6), (2, 9), (1, 99)])
def test_skipped_steps_are_left_out_at_any_world_size(skipped, world_size):
    """47 samples in steps of 10: five steps an epoch, two of which end one."""
    whole = TrainSampler(47, global_batch=10, rank=0, world_size=1, num_shards=6)
    ranks = [
        TrainSampler(47, global_batch=10, rank=rank, world_size=world_size, num_shards=6, skip_steps=skipped)
        for rank in range(world_size)
    ]
    expected = []
    for number in range(1, 16):
        plan = next(whole.plans())
        if not skipped[0] <= number <= skipped[1]:
            expected.append(plan)
        whole.commit(plan)
    num_steps, end = ranks[0].end(epochs=3, num_steps=None)
    assert num_steps == len(expected) and end == (3 * 47 if expected else end)
    for number, plan in enumerate(expected, start=1):
        if number % 4 == 0:  # go on from a state, by samplers that know nothing of the past
            states = {json.dumps(sampler.state_dict()) for sampler in ranks}
            assert len(states) == 1
            ranks = [
                TrainSampler(47, global_batch=10, rank=r, world_size=world_size, num_shards=6, skip_steps=skipped)
                for r in range(world_size)
            ]
            for sampler in ranks:
                sampler.load_state_dict(json.loads(*states))
        theirs = [next(sampler.plans()) for sampler in ranks]
        assert sum((each.micros for each in theirs), ()) == plan.micros
        for sampler, mine in zip(ranks, theirs, strict=True):
            assert mine[:3] == plan[:3]
            sampler.commit(mine)
            assert sampler.end(epochs=3, num_steps=None)[0] == num_steps - number
            assert sampler.end(epochs=None, num_steps=2)[0] == 2
    ends = [sampler.at_epoch_end for sampler in ranks]
    assert ends == [True] * world_size if expected else True


def test_the_end_of_an_epoch_that_is_left_out_is_still_an_end():
    sampler = TrainSampler(40, global_batch=10, rank=0, world_size=1, skip_steps=(3, 6))
    ends = []
    for _ in range(4):
        sampler.commit(next(sampler.plans()))
        ends.append(sampler.at_epoch_end)
    assert ends == [False, True, False, True]


def test_what_is_left_out_may_begin_with_an_epoch_and_the_one_before_still_ends():
    sampler = TrainSampler(40, global_batch=10, rank=0, world_size=1, skip_steps=(5, 6))
    found = []
    for _ in range(6):
        sampler.commit(next(sampler.plans()))
        if sampler.at_epoch_end:
            found.append((sampler.state.epoch, sampler.take_seen() == sampler.expected(len(found))))
    assert found == [(1, True), (2, True)]


def test_what_was_to_be_left_out_next_can_be_taken_back():
    first = TrainSampler(47, global_batch=10, rank=0, world_size=1, skip_steps=(4, 8))
    for _ in range(3):
        first.commit(next(first.plans()))
    assert first.position == 77
    for skip_steps, position in (((4, 8), 77), (None, 30), ((5, 6), 30), ((4, 4), 40)):
        second = TrainSampler(47, global_batch=10, rank=0, world_size=1, skip_steps=skip_steps)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert second.position == position


def test_steps_that_were_left_out_stay_behind_if_epochs_become_longer():
    choices = {"rank": 0, "world_size": 1, "skip_steps": (2, 3)}
    first = TrainSampler(40, global_batch=10, **choices)
    while first.state.epoch < 1:
        first.commit(next(first.plans()))
    second = TrainSampler(20, global_batch=10, **choices)  # half as many samples from now on
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.position == 20 and second.end(epochs=2, num_steps=None)[0] == 2


@pytest.mark.parametrize("made", range(1, 9))
@pytest.mark.parametrize(("first", "last"), [(4, 5), (6, 6), (5, 8), (8, 12)])
def test_steps_may_be_left_out_from_a_resume_on(made, first, last):
    """The usual use: a run goes wrong, and is resumed from before that. Steps count as the run has made them."""
    whole, plans = TrainSampler(47, global_batch=10, rank=0, world_size=1), []
    for _ in range(30):
        plans.append(next(whole.plans()))
        whole.commit(plans[-1])

    def going_on(state, skip_steps, number, length=47):
        sampler = TrainSampler(length, global_batch=10, rank=0, world_size=1, skip_steps=skip_steps)
        sampler.load_state_dict(json.loads(json.dumps(state)))
        found = []
        for _ in range(number):
            found.append(next(sampler.plans()))
            sampler.commit(found[-1])
        return found, sampler

    _, sampler = going_on(TrainSampler(47, global_batch=10, rank=0, world_size=1).state_dict(), None, made)
    if first <= made:
        with pytest.raises(
            ConfigError, match=rf"after step {made}, so that it is too late for step {first}; name later"
        ):
            going_on(sampler.state_dict(), (first, last), 1)
        return
    left_out = [*plans[made : first - 1], *plans[last:]]
    found, once = going_on(sampler.state_dict(), (first, last), 7)
    assert found == left_out[:7]
    for skip_steps in ((first, last), None):  # and the run may be resumed again, with the setting or without
        if skip_steps is None and made + 7 < first:
            continue
        found, twice = going_on(once.state_dict(), skip_steps, 5)
        assert found == left_out[7:12] and twice.state_dict()["num_steps"] == made + 12
    if (
        first > made + 1
    ):  # a second range counts from the steps that were made, not from those that there would have been
        found, _ = going_on(once.state_dict(), (made + 9, made + 9), 4)
        assert found == [left_out[7], *left_out[9:12]] or once.state_dict()["skipped"] == []
    for epoch in range(3):
        expected = Checksum.of(np.array([i for p in left_out if p.epoch == epoch for m in p.micros for i in m.indices]))
        before = Checksum.of(
            np.array([i for p in plans[:made] if p.epoch == epoch for m in p.micros for i in m.indices])
        )
        assert twice.expected(epoch) == expected.with_(before)


def test_what_cannot_be_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for words, says in [
        (("--step", "1"), f"{tmp_path} holds no starts.jsonl"),
        ((), "ask for --step N, or for --sample N --epoch N"),
        (("--sample", "3"), "ask for"),
        (("--sample", "3", "--epoch", "1", "--step", "1"), "ask for"),
    ]:
        with pytest.raises(SystemExit):
            main(["where", str(tmp_path), *words])
        assert says in capsys.readouterr().err
    for text, says in [("", "is empty"), ("[1]\n", "is damaged"), ("{}\n", "is damaged"), ("null\n", "is damaged")]:
        (tmp_path / "starts.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=f"starts.jsonl {says}"):
            where(tmp_path, step=1, sample=None, epoch=None)
    for step in (0, -3, 13):
        with pytest.raises(ConfigError, match=f"--step {step}: the run has steps 1 to 12"):
            samples_of_step([Start(CASES[0], SPLITS)], step)
    for sample, epoch, says in [(40, 0, "samples 0 to 39"), (-1, 0, "--sample -1"), (3, -1, "--epoch -1")]:
        with pytest.raises(ConfigError, match=says):
            place_of_sample([Start(CASES[0], SPLITS)], sample, epoch)
    answer = place_of_sample([Start(CASES[0], SPLITS)], 2, 4)
    assert "never read: that would be in step 17, and the run has 12" in answer


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (config_of(5, sharding="file", batch={"num_shards": 5}), r"^data.sharding=file: 4 files cannot .* 5 shards"),
        (config_of(2, sharding="off", batch={"num_shards": 5}), "^data.sharding=off: .* 5 shards divide"),
        (config_of(2, batch={"tokens": 4}), "^batch.tokens=4: sample 4 alone has 5"),
    ],
)
def test_the_parent_refuses_what_cannot_be_dealt(config, words):
    with pytest.raises(ConfigError, match=words):
        check_sampling(config, SPLITS)


@pytest.mark.parametrize("order", ["weighted", "blocks"])
def test_orders_need_what_they_go_by(order):
    plain = Splits(train=[(0, 0)] * 40, test=[])
    with pytest.raises(ConfigError, match=f"data.order={order}: needs the .* of data=digits"):
        check_sampling(config_of(order=order), plain)
    with pytest.raises(ConfigError, match=r"batch.tokens=20: .* an attribute `lengths`"):
        check_sampling(config_of(batch={"tokens": 20}), plain)


def test_the_parent_refuses_to_resume_in_the_middle_of_another_epoch():
    config = config_of(2, sharding="file", order="blocks", window=5)
    state = {"seed": 0, "epoch": 1, "consumed": 24, "order": sampler_for(config, SPLITS, rank=0).order.identity}
    check_sampling(config, SPLITS, state)
    check_sampling(config_of(3), SPLITS, {**state, "consumed": 0})  # between epochs anything goes
    words = r"^resume=none: the state is one after 24 of .* batch.num_shards, which is"
    with pytest.raises(ConfigError, match=words):
        check_sampling(config_of(3), SPLITS, state)
