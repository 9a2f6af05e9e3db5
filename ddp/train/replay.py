"""Computes shards of the running step again, on any rank, without communication, and with the same bits.

A shard of a step has no rank: its samples follow from the sampler's position, their augmentation from their numbers,
dropout from the step and the shard; and parameters do not change before all ranks agree. So a user who has the data can
compute it once more, until the update is made. Two things stand on that:

    explain_…    a step whose loss is not finite, or far too high, is searched for the module and the samples
    Audit        a shard that a second rank computes, too, shows a machine that computes wrongly

Buffers begin as those of the step, where the replica knows them, as one by shards does. Healthy steps pay nothing.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp.collectives.shards import shards_of_rank
from ddp.comm.meeting.place import host_name
from ddp.comm.objects import all_gather_object
from ddp.data.orders.sampler import Micro, StepPlan
from ddp.errors import AuditFailed, one_line
from ddp.replica.autograd import tensors_in
from ddp.replica.broadcast import checksum
from ddp.replica.by_shards import ByShards
from ddp.train.steps.state import TrainState
from ddp.train.steps.step import StepRules, forward, to_device
from ddp.units import counted


class Outcome(NamedTuple):
    """The loss and the gradients of a shard of a step, in a form that ranks can compare.

    Attributes:
        loss_sum, num_items: of its samples.
        checksums: by the parameter's name, that of its gradient, if it has one.
    """

    loss_sum: float
    num_items: float
    checksums: dict[str, int]

    def difference(self, other: Outcome) -> str:
        """Returns the first thing in which another outcome of the same shard differs; "": nothing."""
        if self.loss_sum.hex() != other.loss_sum.hex():
            return f"the loss ({self.loss_sum!r}, {other.loss_sum!r})"
        names = [*self.checksums, *other.checksums]
        return next((name for name in names if self.checksums.get(name) != other.checksums.get(name)), "")


class Replay:
    """Computes shards of the running step again.

    Args:
        rules: of the step.
        read: returns the batch of a micro-batch of a plan; None if none of its samples can be read.
    """

    def __init__(self, state: TrainState, rules: StepRules, read: Callable[[StepPlan, Micro], Any]) -> None:
        self.state, self._rules, self._read = state, replace(rules, batch_checks=()), read

    def batches(self, plan: StepPlan, shard: int) -> Iterator[tuple[Micro, Any]]:
        """Yields the micro-batches of any shard of a step, with their batches, on this rank's device."""
        sampler = self.state.sampler
        for micro in sampler.part_of(plan, shard, sampler.num_shards).micros:
            if (batch := self._read(plan, micro)) is not None:
                yield micro, to_device(batch, self.state.comm.device)

    def forward(self, micro: Micro, batch: Any) -> tuple[Tensor, float | Tensor]:
        """Returns the loss of a micro-batch, as a sum, and the number of items in it; inside of `model.apart`."""
        return forward(self.state, self._rules, micro, batch)

    def backward(self, loss_sum: Tensor) -> None:
        """Adds the gradients of a loss, times the loss scale, to `p.grad`; inside of `model.apart`."""
        with self.state.strategy.micro_batch(is_last=False) as scale:
            (loss_sum if scale == 1 else loss_sum * scale).backward()

    def shard(self, plan: StepPlan, shard: int) -> Outcome:
        """Returns the outcome of a shard of the running step."""
        model = self.state.model
        total: float | Tensor = 0.0
        num_items: float | Tensor = 0
        with model.isolated():
            for micro, batch in self.batches(plan, shard):
                loss_sum, number = self.forward(micro, batch)
                total, num_items = total + loss_sum.detach(), num_items + number
                self.backward(loss_sum)
            named = [(name, parameter.grad) for name, parameter in model.module.named_parameters()]
            checksums = {name: checksum(gradient) for name, gradient in named if gradient is not None}
        return Outcome(float(total), float(num_items), checksums)


# --- A bad step is explained -----------------------------------------------------------------------------------------
#
# Each rank computes its own shards of the step once more, with an observer on each module. Of all findings of
# all ranks, the earliest is reported:
#
#     parameters    a parameter is not finite before the step
#     samples       a batch has a number that is not finite
#     forward       the first module whose outputs are not finite, while all before were
#     loss          all outputs are finite, and the loss is not
#     backward      the gradient of a module's outputs is finite, and that of its inputs or parameters is not
#
# If nothing is found, every shard is finite by itself: their sum overflows, or a machine has computed wrongly. For a
# loss that is finite and far too high, the shard with the highest loss is named.
#
# Note "samples". Where a tensor has a row for each sample, those are named whose rows are not finite. A module that
# mixes samples, such as BatchNorm, spreads what is not finite over all of them; but the first module comes before it.


MOST_SAMPLES = 8  # that are named
NO_LABEL = " (a mean over no label is 0 ÷ 0: then give a ddp.Task that returns a sum and its count)"
PARAMETERS, SAMPLES, FORWARD, LOSS, BACKWARD, UNKNOWN = range(6)  # the stages; the last one could not be computed


class Finding(NamedTuple):
    """The first thing that is not finite in a shard.

    Attributes:
        stage: its place in the table above.
        place: of a module, in the order of calls.
        what: it is, as text.
        shard: of the step.
        samples: that it concerns; all of a micro-batch if the tensor has no row for each sample.
        are_known: the samples were found by their rows.
    """

    stage: int
    place: int
    what: str
    shard: int
    samples: Sequence[int]
    are_known: bool


def explain_divergence(replay: Replay, plan: StepPlan) -> tuple[str, bool]:
    """Returns which values of a step that was taken back are not finite, and where that begins. Collective.

    Returns:
        That as text, and True if samples are to blame, so that no learning rate would help.
    """
    if replay.state.waits:
        return "It is not computed again, because layers wait for other ranks in each forward", False
    mine = min(_findings(replay, plan), default=None)
    everyone = all_gather_object(replay.state.comm, mine and tuple(mine))
    found = sorted((Finding(*each), rank) for rank, each in enumerate(everyone) if each is not None)
    if not found:
        what = (
            "Computed again, each shard is finite by itself: their sum is not, or a machine has computed wrongly "
            "(same_bits.audit_every finds out)"
        )
        return what, False
    first, rank = found[0]
    if first.stage in (PARAMETERS, UNKNOWN):
        return f"Computed again: {first.what}" + f" on rank {rank}" * (first.stage == UNKNOWN), False
    samples, no_label = _named(first.samples, first.are_known), NO_LABEL * (first.stage == LOSS)
    what = f"Computed again: {first.what}, in shard {first.shard} on rank {rank}, {samples}{no_label}"
    return what, first.stage == SAMPLES


def explain_spike(replay: Replay, plan: StepPlan) -> str:
    """Returns which shard of a step has the highest loss, and how high the others' are. Collective."""
    mine: list[tuple[int, float, float, list[int]]] = []
    if replay.state.waits:
        return "It is not computed again, because layers wait for other ranks in each forward"
    for shard in own_shards(plan):
        total, count, samples = 0.0, 0.0, list[int]()
        with suppress(Exception), replay.state.model.isolated(), torch.no_grad():  # of the user's code
            for micro, batch in replay.batches(plan, shard):
                loss_sum, num_items = replay.forward(micro, batch)
                total, count = total + float(loss_sum), count + float(num_items)
                samples += micro.indices
            mine.append((shard, total, count, samples))
    everyone = all_gather_object(replay.state.comm, mine)
    shards = [(rank, *each) for rank, its in enumerate(everyone) for each in its]
    if not shards:
        return "Computed again: no shard has samples"
    first, *others = sorted(shards, key=lambda each: -each[2] / (each[3] or 1))
    rank, shard, total, count, samples = first
    rest = sum(each[2] for each in others) / (sum(each[3] for each in others) or 1)
    compared = f", and {rest:.4g} in the others" if others else ""
    return (
        f"Computed again, the highest loss is that of shard {shard} on rank {rank}, {total / (count or 1):.4g} per "
        f"item{compared}, {_named(samples, False)}"
    )


def own_shards(plan: StepPlan) -> list[int]:
    """Returns the shards of a step that this rank has samples of."""
    return list(dict.fromkeys(micro.shard for micro in plan.micros))


def _named(samples: Sequence[int], are_known: bool) -> str:
    numbers = ", ".join(map(str, samples[:MOST_SAMPLES]))
    more = f" and {len(samples) - MOST_SAMPLES} more" if len(samples) > MOST_SAMPLES else ""
    word = "sample" if len(samples) == 1 else "samples"
    return f"{word} {numbers}{more}" if are_known else f"among {word} {numbers}{more}"


# --- on this rank ----------------------------------------------------------------------------------------------------


def _findings(replay: Replay, plan: StepPlan) -> Iterator[Finding]:
    """Yields the first finding of each of this rank's micro-batches."""
    model = replay.state.model
    for name, parameter in model.module.named_parameters():
        if not _is_finite(parameter):
            yield Finding(PARAMETERS, 0, f"the parameter {name} is not finite before the step", 0, [], False)
            return
    try:
        for shard in own_shards(plan):
            for micro, batch in replay.batches(plan, shard):
                with model.isolated():
                    found = _first(replay, micro, batch)
                if found is not None:
                    yield found
    except Exception as error:  # of the user's code: the other ranks have found something, and wait
        yield Finding(UNKNOWN, 0, f"{one_line(error)}, which is raised", 0, [], False)


def _first(replay: Replay, micro: Micro, batch: Any) -> Finding | None:
    """Returns the first thing that is not finite in a micro-batch; None if all is."""
    module, shard = replay.state.model.module, micro.shard
    bad = next((tensor for tensor in tensors_in(batch) if not _is_finite(tensor)), None)
    with _observed(module) as seen:
        loss_sum, _ = replay.forward(micro, batch)
        if bad is not None:
            given = f" that {seen.first[0]} is given" if seen.first is not None else ""
            return Finding(SAMPLES, 0, f"the samples themselves{given} are not finite", shard, *_rows(bad, micro))
        if seen.first is not None:
            name, tensor, is_before = seen.first
            what = f"the input of {name} is not finite" if is_before else f"the outputs of {name} are not finite"
            return Finding(FORWARD, seen.num_calls, what, shard, *_rows(tensor, micro))
        if not math.isfinite(float(loss_sum.detach())):
            return Finding(LOSS, 0, "the loss is not finite, while all outputs are", shard, micro.indices, False)
        seen.is_backward = True
        loss_sum.backward()  # without a loss scale, which the step has lowered as far as it could
    if seen.first is not None:
        name, tensor, _ = seen.first
        after = f"that of {seen.last}" if seen.last else "the loss"
        what = f"the gradient of the outputs of {name} is not finite, while {after} is"
        return Finding(BACKWARD, seen.num_calls, what, shard, *_rows(tensor, micro))
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and not _is_finite(parameter.grad):
            return Finding(BACKWARD, sys.maxsize, f"the gradient of {name} is not finite", shard, micro.indices, False)
    return None


class _Seen:
    """The findings of observers of modules.

    Attributes:
        first: the first tensor that is not finite: the module's name, the tensor, and if it is among its inputs.
        last: the module whose output's gradient was seen last, and was finite.
        is_backward: the forward is over.
        num_calls: of observers, until the first.
    """

    def __init__(self) -> None:
        self.first: tuple[str, Tensor, bool] | None = None
        self.last, self.is_backward, self.num_calls = "", False, 0


@contextmanager
def _observed(module: nn.Module) -> Iterator[_Seen]:
    """Observes, inside the block, the outputs of all modules, and the gradients of these."""
    seen, handles = _Seen(), []

    def observe(name: str, _: nn.Module, given: Any, by_name: Any, outputs: Any) -> None:
        if seen.first is not None or seen.is_backward:  # a checkpoint repeats forwards
            return
        seen.num_calls += 1
        for tensor in tensors_in(outputs):
            if not _is_finite(tensor):
                before = next((one for one in tensors_in((given, by_name)) if not _is_finite(one)), None)
                seen.first = name, tensor.detach() if before is None else before.detach(), before is not None
                return
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda gradient: observe_gradient(name, gradient))

    def observe_gradient(name: str, gradient: Tensor) -> None:
        seen.num_calls += seen.first is None
        if seen.first is None and not _is_finite(gradient):
            seen.first = name, gradient.detach(), False
        elif seen.first is None:
            seen.last = name

    for name, each in module.named_modules():
        title = f"{name} ({type(each).__name__})" if name else type(each).__name__
        handles.append(each.register_forward_hook(partial(observe, title), with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _is_finite(tensor: Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return not is_number or bool(tensor.detach().isfinite().all())


def _rows(tensor: Tensor, micro: Micro) -> tuple[list[int], bool]:
    """Returns the samples whose rows are not finite; all, and False, if there is not a row for each sample."""
    samples = list(micro.indices)
    if not tensor.dim() or len(tensor) != len(samples):
        return samples, False
    rows = tensor.detach().reshape(len(samples), -1).isfinite().all(dim=1).tolist()
    bad = [sample for sample, is_finite in zip(samples, rows, strict=True) if not is_finite]
    return (bad, True) if (bad and len(bad) < len(samples)) or len(samples) == 1 else (samples, False)


# --- Audits: now and then, one shard of a step is computed by a second rank, too --------------------------------------
#
# Equal machines give equal bits.
# A processor or a GPU that computes wrongly and says nothing is not found by its loss, which moves little. It is found
# by its bits, if shards have the same bits everywhere: Llama 3 counted six such events in 54 days on 16,000 GPUs (arXiv
# 2407.21783, table 5).
#
#     first step            every rank computes the first shard; so another instruction set, thread count or library is
#                           found before the first update
#     every `every` steps   rank r in turn is audited: another rank computes one of its shards again. Where they differ,
#                           a third decides; with two ranks, the pair is named
#
# The audit compares the gradient that the audited rank has contributed, before it is added to others. A second rank
# computes the shard before the update, while parameters are still those of the step.


class Turn(NamedTuple):
    """The shard that is audited in a step.

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
        """Compares the ranks' results for the audited shard, if there is one, once its step is computed.

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
        """Returns which ranks compute wrongly, as far as the audit can tell. Collective."""
        groups = agreeing(found)
        known = all_gather_object(self._state.comm, facts())
        about = [f"rank {rank} on host {each}" for rank, each in enumerate(known)]
        most, rest = groups[0], [rank for group in groups[1:] for rank in group]
        where = found[most[0]].difference(found[rest[0]])
        what = f"step {self._state.step + 1}, shard {turn.shard}: ranks compute other bits of it, first in {where}"
        if len(most) > len(groups[1]):
            wrong = "; ".join(about[rank] for rank in rest)
            agree = f"{counted(len(most), 'rank')} ({', '.join(map(str, most))}) agree"
            return f"{what}. {agree}, and not {wrong}: take that machine out, and {self._resume_from(rest)}"
        named = "; ".join(about[rank] for rank in sorted(found))
        other = "a third" if len(found) == 2 else "another"
        return (
            f"{what}. There is no majority among {named}: if all have the same processor and library, one computes "
            f"wrongly; find out which by comparing with {other}, and {self._resume_from(found)}"
        )

    def _resume_from(self, suspects: Iterable[int]) -> str:
        """Returns the advice to resume from before these ranks' last audit, as text."""
        if not self._passed_at:
            return "begin again from where this run began"
        return f"resume from the checkpoint of step {min(self._passed_at[rank] for rank in suspects)} or before"


def agreeing(found: Mapping[int, Outcome]) -> list[list[int]]:
    """Returns the ranks that have found the same, group by group; the largest group first."""
    groups: list[list[int]] = []
    for rank, outcome in sorted(found.items()):
        group = next((each for each in groups if not found[each[0]].difference(outcome)), None)
        groups.append([rank]) if group is None else group.append(rank)
    return sorted(groups, key=len, reverse=True)


def facts() -> str:
    """Returns this rank's host, and the facts that its kernels depend on."""
    cpu, threads = torch.backends.cpu.get_cpu_capability(), counted(torch.get_num_threads(), "thread")
    return f"{host_name()} ({platform.machine()} {cpu}, torch {torch.__version__}, {threads})"
