"""Where a sample is: what `python -m ddp where` says is what samplers plan; steps that are left out stay left out."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from ddp.__main__ import main
from ddp.config import Config, choose
from ddp.data.sampler import TrainSampler, sampler_of
from ddp.data.splits import Splits
from ddp.dealing import check_dealing, dealing, place_of_sample, samples_of_step
from ddp.errors import ConfigError


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
    config.cluster.workers, config.loader.num_workers = workers, 2
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
    read: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}  # (epoch, sample) → (step, rank, loader, shard)
    for rank in range(config.cluster.workers):
        sampler, _ = sampler_of(SPLITS.train, rank=rank, world_size=config.cluster.workers, **dealing(config, SPLITS))
        step = count(1)
        while sampler.state.epoch < 3:
            numbers = count()
            for plan in sampler.plans():
                here, lines = next(step), []
                for micro in plan.micros:
                    loader = next(numbers) % 2
                    for sample in micro.indices:
                        read.setdefault((plan.epoch, sample), []).append((here, rank, loader, micro.shard))
                    lines.append(f"rank {rank}, loader process {loader}, shard {micro.shard}")
                answer = samples_of_step(config, SPLITS, here)
                assert answer.startswith(f"step {here}, in epoch {plan.epoch}: {plan.size} samples")
                assert [line in answer for line in lines] == [True] * len(lines)
                sampler.commit(plan)
        assert samples_of_step(config, SPLITS, next(step) - 1)
        with pytest.raises(ConfigError, match="the run has steps 1 to"):
            samples_of_step(config, SPLITS, next(step))
    for sample, file in ((0, "a.tar"), (17, "c.tar"), (39, "d.tar")):
        for epoch in range(3):
            answer = place_of_sample(config, SPLITS, sample, epoch)
            expected = sorted(read.get((epoch, sample), []))
            found = [line.partition(", part")[0] for line in answer.splitlines() if ": step " in line]
            assert sorted(found) == sorted(
                f"sample {sample}  in {file}, epoch {epoch}: step {step}, rank {rank}, loader process {loader}, "
                f"shard {shard}"
                for step, rank, loader, shard in expected
            )
            if config.data.skip_steps and not expected:
                assert "left out, by data.skip_steps=" in answer


def test_the_samples_of_a_step_stand_with_their_files():
    answer = samples_of_step(CASES[4], SPLITS, 2)
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
            states = {tuple(sampler.state_dict().items()) for sampler in ranks}
            assert len(states) == 1
            ranks = [
                TrainSampler(47, global_batch=10, rank=r, world_size=world_size, num_shards=6, skip_steps=skipped)
                for r in range(world_size)
            ]
            for sampler in ranks:
                sampler.load_state_dict(dict(*states))
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


def test_what_cannot_be_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for words, says in [
        (("--step", "1"), f"{tmp_path} holds no config.yaml"),
        ((), "ask for --step N, or for --sample N --epoch N"),
        (("--sample", "3"), "ask for"),
        (("--sample", "3", "--epoch", "1", "--step", "1"), "ask for"),
    ]:
        with pytest.raises(SystemExit):
            main(["where", str(tmp_path), *words])
        assert says in capsys.readouterr().err
    for sample, epoch, says in [(40, 0, "samples 0 to 39"), (-1, 0, "--sample -1"), (3, -1, "--epoch -1")]:
        with pytest.raises(ConfigError, match=says):
            place_of_sample(CASES[0], SPLITS, sample, epoch)
    assert "never read: that would be in step 17, and the run has 12" in place_of_sample(CASES[0], SPLITS, 2, 4)


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
        check_dealing(config, SPLITS)


@pytest.mark.parametrize("order", ["weighted", "blocks"])
def test_orders_need_what_they_go_by(order):
    plain = Splits(train=[(0, 0)] * 40, test=[])
    with pytest.raises(ConfigError, match=f"data.order={order}: needs the .* of data=digits"):
        check_dealing(config_of(order=order), plain)
    with pytest.raises(ConfigError, match=r"batch.tokens=20: .* an attribute `lengths`"):
        check_dealing(config_of(batch={"tokens": 20}), plain)


def test_the_parent_refuses_to_resume_in_the_middle_of_another_epoch():
    config = config_of(2, sharding="file", order="blocks", window=5)
    state = {"seed": 0, "epoch": 1, "consumed": 24, "order": "blocks with a window of 5 in 4 lanes for a batch of 12"}
    check_dealing(config, SPLITS, state)
    check_dealing(config_of(3), SPLITS, {**state, "consumed": 0})  # between epochs anything goes
    words = r"^resume=none: the state is one after 24 of .* batch.num_shards, which is"
    with pytest.raises(ConfigError, match=words):
        check_dealing(config_of(3), SPLITS, state)
