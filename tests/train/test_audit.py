"""Audits name the rank that computes other bits than the others, and nobody else.

Tests: ddp/train/replay.py.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.collectives.shards import shards_of_rank
from ddp.errors import AuditFailed, ConfigError
from ddp.replica.broadcast import tensor_hash
from ddp.train import replay
from ddp.train.replay import Outcome, agreeing, first_turn, turn_of
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import TrainState

INPUTS = torch.randn(37, 6, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (37,), generator=torch.Generator().manual_seed(1))


# --- whose turn it is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("num_shards", [8, 11, 24])
def test_each_rank_is_audited_in_its_turn_and_all_shards_come(world_size: int, num_shards: int) -> None:
    num_turns = 4 * world_size * num_shards
    turns = [turn_of(number, 2 * num_shards, world_size, num_shards) for number in range(num_turns)]
    for begin in range(num_turns - world_size):
        assert {turn.owner for turn in turns[begin : begin + world_size]} == set(range(world_size))
    for turn in turns:
        assert turn.shard in shards_of_rank(turn.owner, world_size, num_shards)
        assert len(turn.again) == 1 and turn.again[0] != turn.owner and 0 <= turn.again[0] < world_size
    assert {turn.shard for turn in turns} == set(range(num_shards))
    pairs = Counter((turn.owner, turn.again[0]) for turn in turns)
    assert set(pairs) == {(one, other) for one in range(world_size) for other in range(world_size) if one != other}


@pytest.mark.parametrize("num_samples", [1, 3, 8, 20])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_no_empty_shard_is_audited(world_size: int, num_samples: int) -> None:
    bounds = [shard * num_samples // 8 for shard in range(9)]
    turns = [turn_of(number, num_samples, world_size, 8) for number in range(8 * world_size)]
    assert all(bounds[shard] < bounds[shard + 1] for shard, *_ in turns)
    assert all(shard in shards_of_rank(owner, world_size, 8) and owner not in again for shard, owner, again in turns)
    assert {shard for shard, *_ in turns} == {shard for shard in range(8) if bounds[shard] < bounds[shard + 1]}


@pytest.mark.parametrize("num_samples", [1, 3, 8, 20])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_first_audit_is_of_a_shard_with_samples_by_all(world_size: int, num_samples: int) -> None:
    turn = first_turn(num_samples, world_size, 8)
    bounds = [shard * num_samples // 8 for shard in range(9)]
    assert bounds[turn.shard] < bounds[turn.shard + 1] and bounds[turn.shard] == 0
    assert turn.shard in shards_of_rank(turn.owner, world_size, 8)
    assert sorted([turn.owner, *turn.again]) == list(range(world_size))


def test_those_that_agree() -> None:
    one, other, third = Outcome(1.0, 2.0, {"a": 1}), Outcome(1.0, 2.0, {"a": 2}), Outcome(1.5, 2.0, {"a": 1})
    assert agreeing({0: one, 1: one}) == [[0, 1]]
    assert agreeing({0: other, 1: one, 2: one}) == [[1, 2], [0]]
    assert agreeing({2: third, 1: other, 0: one}) == [[0], [1], [2]]


# --- ranks that compute wrongly --------------------------------------------------------------------------------------


class Flips(Callback):
    """Flips the last bit of one number of a gradient, in each backward of one rank from a step on.

    Args:
        rank: that computes wrongly; None: none does.
    """

    def __init__(self, rank: int | None, *, first_step: int = 1) -> None:
        self.rank, self.first_step = rank, first_step
        self.last_step, self.handle = 0, None

    def fit_start(self, state: TrainState) -> None:
        parameter = state.model.module.get_parameter("2.weight")
        self.handle: Any = parameter.register_hook(lambda gradient: self._flipped(state, gradient))

    def _flipped(self, state: TrainState, gradient: Tensor) -> Tensor:
        self.last_step = state.step + 1
        if state.comm.rank != self.rank or state.step + 1 < self.first_step:
            return gradient
        wrong = gradient.clone()
        wrong.view(torch.int32).view(-1)[7] ^= 1
        return wrong

    def fit_end(self, state: TrainState) -> None:
        self.handle.remove()


def trained(flips: Flips, *, audit_every: int = 1, max_steps: int = 12, **how: Any) -> str:
    """Returns what is said against a rank; else the hash of the parameters."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3))
    same_bits = ddp.SameBits(on=True, audit_every=audit_every)
    how = grouped(callbacks=[flips], folder=None, progress=False, seed=2, **how)
    try:
        ddp.fit(
            model, (INPUTS, CLASSES), torch.optim.SGD(model.parameters(), lr=0.01), loss=F.cross_entropy,
            global_batch=16, max_steps=max_steps, same_bits=same_bits, **how,
        )  # fmt: skip
    except AuditFailed as error:
        return str(error)
    return " ".join(tensor_hash(each) for each in model.parameters())


def runs() -> dict[str, tuple[str, int]]:
    """Returns what is said, and the last step, of some runs by name."""
    comm = ddp.init(abort_s=30)
    found: dict[str, tuple[str, int]] = {}

    def note(name: str, flips: Flips, **how: Any) -> None:
        found[name] = trained(flips, **how), flips.last_step

    for rank in range(comm.world_size):
        note(f"rank {rank}", Flips(rank))
        note(f"rank {rank}, later", Flips(rank, first_step=2))
    note("rank 1, every second", Flips(1, first_step=2), audit_every=2)
    note("rank 1, at first alone", Flips(1, first_step=2), audit_every=0)
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512_OTHER")
        note("another kind", Flips(1))
    if comm.world_size in MANY:
        note("many", Flips(None), max_steps=MANY[comm.world_size])
    if comm.world_size == 2:
        note("none", Flips(None), audit_every=0, max_steps=MANY[comm.world_size])
    ddp.shutdown()
    return found


MANY = {2: 30, 3: 120}


@cache
def found_by(world_size: int) -> list[dict[str, tuple[str, int]]]:
    return run_ranks(runs, world_size, timeout_s=100)


def about(rank: int) -> str:
    return rf"rank {rank} on host \S+ \(\S+ \w+, torch \S+, 1 thread\)"


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.quick(1)
def test_whoever_computes_wrongly_from_the_first_step_on_is_named(world_size: int) -> None:
    for wrong in range(world_size):
        said, last_step = found_by(world_size)[0][f"rank {wrong}"]
        assert said.startswith("step 1, shard 0: ranks compute other bits of it, first in 2.weight. ")
        assert last_step == 1
        if world_size == 2:
            assert re.search(f"There is no majority among {about(0)}; {about(1)}: if all", said), said
        else:
            agree = ", ".join(str(rank) for rank in range(world_size) if rank != wrong)
            expected = rf"{world_size - 1} ranks \({agree}\) agree, and not {about(wrong)}: take that machine out"
            assert re.search(expected, said), said
        assert said.endswith("begin again from where this run began")
        assert {each[f"rank {wrong}"] for each in found_by(world_size)} == {(said, last_step)}


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.slow
def test_whoever_begins_later_is_named_within_as_many_audits_as_ranks(world_size: int) -> None:
    for wrong in range(world_size):
        said, last_step = found_by(world_size)[0][f"rank {wrong}, later"]
        assert 2 <= last_step <= 1 + world_size
        assert said.endswith("resume from the checkpoint of step 1 or before")  # the audits between were of others
        if world_size == 2:
            assert "There is no majority among rank" in said
        else:
            assert re.search(rf"2 ranks \(\d, \d\) agree, and not {about(wrong)}: take", said), said
    said, last_step = found_by(world_size)[0]["rank 1, every second"]
    assert last_step % 2 == 0 and last_step <= 2 * (world_size + 1) and "rank 1 on host" in said
    assert "ranks compute" not in found_by(world_size)[0]["rank 1, at first alone"][0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_kind_of_a_machine_is_told(world_size: int) -> None:
    said, _ = found_by(world_size)[0]["another kind"]
    assert re.search(r"rank 1 on host \S+ \(\S+ AVX512_OTHER, torch ", said)


@pytest.mark.parametrize("world_size", MANY)
def test_no_false_alarm(world_size: int) -> None:
    for found in found_by(world_size):
        assert "ranks compute" not in found["many"][0] and found["many"][1] == MANY[world_size]
        assert found.get("none", found["many"]) == found["many"]
    assert found_by(world_size)[0]["rank 1, at first alone"][1] == 12


# --- settings --------------------------------------------------------------------------------------------------------


def test_audits_of_one_worker_are_refused() -> None:
    with pytest.raises(ConfigError, match="audit_every"):
        assert "ranks compute" not in trained(Flips(None), max_steps=1)


def test_audits_without_the_same_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"audit_every=2: audits compare workers .*; set on to true, next to it"):
        ddp.fit(nn.Linear(6, 3), ..., ..., loss=F.mse_loss, global_batch=8, same_bits=ddp.SameBits(audit_every=2))


def other_threads() -> int:
    comm = ddp.init(abort_s=30)
    torch.set_num_threads(1 + comm.rank)
    trained(Flips(None))
    return torch.get_num_threads()


def test_a_run_has_one_thread_whatever_the_program_has() -> None:
    assert run_ranks(other_threads, 2) == [1, 2]


def test_facts_name_what_kernels_depend_on() -> None:
    assert re.fullmatch(r"\S+ \(\S+ \w+, torch \S+, \d+ threads?\)", replay.facts())
