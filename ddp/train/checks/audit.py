"""Audits: now and then, one shard of a step is computed by a second rank, too. Equal machines give equal bits.

A processor or a GPU that computes wrongly and says nothing is not found by its loss, which moves little. It is found
by its bits, if shards have the same bits everywhere: Llama 3 counted six such events in 54 days on 16,000 GPUs (arXiv
2407.21783, table 5).

    first step             every rank computes the first shard; so another instruction set, thread count or library is
                           found before the first update
    every `every` steps    rank r in turn is audited: another rank computes one of its shards again. Where they differ,
                           a third decides; with two ranks, the pair is named

What the audited rank is judged by is the gradient that it has contributed, before it is added to others. A shard is
computed by a second rank before the update, because parameters are still those of the step.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from ddp.collectives.shards import shards_of_rank
from ddp.comm.meeting.place import host_name
from ddp.comm.objects import all_gather_object
from ddp.data.orders.sampler import StepPlan
from ddp.errors import AuditFailed
from ddp.replica.by_shards import ByShards
from ddp.train.checks.replay import Outcome, Replay
from ddp.units import counted


class Turn(NamedTuple):
    """Says which shard is audited in a step.

    Attributes:
        owner: the rank that contributes it.
        again: the ranks that compute it, too.
    """

    shard: int
    owner: int
    again: Sequence[int]


def turn_of(number: int, num_samples: int, world_size: int, num_shards: int) -> Turn:
    """Returns the turn of an audit, counted from 0; of `world_size` audits in a row, each rank is the owner in one.

    A rank that has no samples of this step is not audited in it, but the next one that has some.
    """
    lap, filled = number // world_size, _filled(num_samples, world_size, num_shards)
    owner = next(rank for turn in range(world_size) if filled[rank := (number + turn) % world_size])
    mine, distance = filled[owner], 1 + lap % (world_size - 1)
    return Turn(mine[lap % len(mine)], owner, [(owner + distance) % world_size])


def first_turn(num_samples: int, world_size: int, num_shards: int) -> Turn:
    """Returns the turn in which every rank computes the first shard of a step that has samples."""
    filled = _filled(num_samples, world_size, num_shards)
    owner = next(rank for rank in range(world_size) if filled[rank])
    return Turn(filled[owner][0], owner, [rank for rank in range(world_size) if rank != owner])


def _filled(num_samples: int, world_size: int, num_shards: int) -> list[list[int]]:
    """Returns each rank's shards that have samples in a step of this size."""
    bounds = [shard * num_samples // num_shards for shard in range(num_shards + 1)]
    shards = [shards_of_rank(rank, world_size, num_shards) for rank in range(world_size)]
    return [[shard for shard in mine if bounds[shard] < bounds[shard + 1]] for mine in shards]


class Audit:
    """Audits the steps of a run by shards. Every method is collective.

    Args:
        every: steps from one audit to the next; 0: the first step of this start alone.
    """

    def __init__(self, replay: Replay, *, every: int) -> None:
        self._replay, self._every, self._state = replay, every, replay.state
        self._turn: Turn | None = None
        self._passed_at: dict[int, int] = {}  # by rank, the step of the last audit that it took part in

    def begin(self, plan: StepPlan) -> None:
        """Begins a step. The owner of a shard that is audited in it keeps that shard's gradients apart."""
        comm, number = self._state.comm, self._state.step + 1
        num_shards = self._by_shards.num_shards
        self._turn = None
        if comm.world_size > 1 and not self._passed_at:
            self._turn = first_turn(plan.size, comm.world_size, num_shards)
        elif comm.world_size > 1 and self._every and number % self._every == 0:
            self._turn = turn_of(number // self._every - 1, plan.size, comm.world_size, num_shards)
        is_mine = self._turn is not None and self._turn.owner == comm.rank
        self._by_shards.watch(self._turn.shard if self._turn is not None and is_mine else None)

    def check(self, plan: StepPlan) -> None:
        """Compares what ranks have computed of the shard that is audited, once its step is computed, if one is.

        Raises:
            AuditFailed: they differ; names the rank that computes wrongly, or the pair.
        """
        if (turn := self._turn) is None:
            return
        comm = self._state.comm
        mine = Outcome(*self._by_shards.seen) if comm.rank == turn.owner else None
        found = self._found(mine or self._again(plan, turn, turn.again))
        if len(found) == 2 < comm.world_size and len(agreeing(found)) > 1:  # a third decides
            third = next(rank for rank in range(comm.world_size) if rank not in found)
            found |= self._found(self._again(plan, turn, [third]))
        if len(agreeing(found)) > 1:
            self._refuse_if_unsteady(plan, turn)
            raise AuditFailed(self._in_words(turn, found))
        self._passed_at |= dict.fromkeys(found, self._state.step + 1)

    def _refuse_if_unsteady(self, plan: StepPlan, turn: Turn) -> None:
        """Raises AuditFailed if a rank does not compute the same twice, so that no comparison says anything."""
        twice = [self._replay.shard(plan, turn.shard) for _ in range(2)]
        differing = all_gather_object(self._state.comm, twice[0].difference(twice[1]))
        if any(differing):
            rank, where = next((rank, each) for rank, each in enumerate(differing) if each)
            raise AuditFailed(
                f"step {self._state.step + 1}, shard {turn.shard}: rank {rank} computes other bits of it each time, "
                f"first in {where}: the model or the loss keeps a state that is no buffer of the model, the samples "
                "differ each time they are read, or the machine computes wrongly"
            )

    def _again(self, plan: StepPlan, turn: Turn, ranks: Sequence[int]) -> Outcome | None:
        """Returns this rank's result of computing the shard again, where it is one of these."""
        return self._replay.shard(plan, turn.shard) if self._state.comm.rank in ranks else None

    def _found(self, mine: Outcome | None) -> dict[int, Outcome]:
        """Returns the results of the ranks that have computed the shard."""
        everyone = all_gather_object(self._state.comm, mine and tuple(mine))
        return {rank: Outcome(*each) for rank, each in enumerate(everyone) if each is not None}

    @property
    def _by_shards(self) -> ByShards:
        by_shards = self._state.model.accumulation
        assert isinstance(by_shards, ByShards)
        return by_shards

    def _in_words(self, turn: Turn, found: Mapping[int, Outcome]) -> str:
        """Returns who computes wrongly, as far as that can be told. Collective."""
        groups = agreeing(found)
        known = all_gather_object(self._state.comm, facts())
        about = [f"rank {rank} on host {each}" for rank, each in enumerate(known)]
        most, rest = groups[0], [rank for group in groups[1:] for rank in group]
        where = found[most[0]].difference(found[rest[0]])
        what = f"step {self._state.step + 1}, shard {turn.shard}: ranks compute other bits of it, first in {where}"
        if len(most) > len(groups[1]):
            wrong = "; ".join(about[rank] for rank in rest)
            agree = f"{counted(len(most), 'rank')} ({', '.join(map(str, most))}) agree"
            return f"{what}. {agree}, and not {wrong}: take that machine out, and {self._go_on(rest)}"
        named = "; ".join(about[rank] for rank in sorted(found))
        other = "a third" if len(found) == 2 else "another"
        return (
            f"{what}. There is no majority among {named}: if all have the same processor and library, one computes "
            f"wrongly; find out which by comparing with {other}, and {self._go_on(found)}"
        )

    def _go_on(self, suspects: Iterable[int]) -> str:
        """Returns from where a run can go on without what these ranks have computed since their last audit."""
        if not self._passed_at:
            return "begin again from where this run began"
        return f"go on from the checkpoint of step {min(self._passed_at[rank] for rank in suspects)} or before"


def agreeing(found: Mapping[int, Outcome]) -> list[list[int]]:
    """Returns the ranks that have found the same, group by group; the largest group first."""
    groups: list[list[int]] = []
    for rank, outcome in sorted(found.items()):
        group = next((each for each in groups if not found[each[0]].difference(outcome)), None)
        groups.append([rank]) if group is None else group.append(rank)
    return sorted(groups, key=len, reverse=True)


def facts() -> str:
    """Returns this rank's host, and what its kernels depend on."""
    cpu, threads = torch.backends.cpu.get_cpu_capability(), counted(torch.get_num_threads(), "thread")
    return f"{host_name()} ({platform.machine()} {cpu}, torch {torch.__version__}, {threads})"
