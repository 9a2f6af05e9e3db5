"""One step of training, as a transaction: nothing irreversible happens before every rank agrees.

    for each micro-batch of mine:             its own dropout stream; forward, backward of the loss *sum*
                                              (gradients are sent during the last one only)
                                              by shards: each shard's in its own block (`replica/by_shards.py`)
                                              of a round each is a step of this rank's own, at its own rate
    all ranks' totals are known               loss, number of items, number of ranks that want to stop
    if a parameter has no gradient            UnusedParameters, on every rank
    if loss or gradient is not finite         Diverged, on every rank; no parameter was changed, and a hook that
                                              has sent gradients takes the step back. With a loss scale the step is
                                              repeated with a smaller one: same batches, same noise, same buffers
    clip, set the rate, optimizer step        the same on every rank; no optimizer step without a sample on any rank
    commit                                    sampler and step counter move on
    if an error ends it before                buffers, hooks and loss scale go back, if the run can go on after that

The gradients are sums over this rank's items, added over ranks and divided once by the global number of items. So
shares may differ, a rank may have no samples at all, and accumulation is exact.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ddp.data.orders.sampler import Micro, StepPlan
from ddp.errors import ConfigError
from ddp.gradients.totals import Parts, Totals, count_of
from ddp.optim.norms import gradient_norm
from ddp.optim.precision import forward_precision
from ddp.optim.schedules import TorchSchedule
from ddp.process import gpu
from ddp.process.clock import Stopwatch, now_s
from ddp.process.streams import dropout_stream, stream_seed
from ddp.process.terminal import log
from ddp.replica.broadcast import BufferSnapshot
from ddp.setting import Precision
from ddp.strategies.strategy import Agreement
from ddp.train.steps.state import StepReport, TrainState
from ddp.train.steps.task import Task, name_of
from ddp.units import counted

TOO_FEW = "Expected more than 1 value per channel"  # torch's words
REMEDY = (
    "leave some samples out of the data, take another global_batch, num_shards or micro_size, or ddp.SyncBatchNorm, "
    "which normalises over all ranks"
)


@dataclass(frozen=True)
class StepRules:
    """Settings of a step that are fixed for a run.

    Attributes:
        schedule: a factor on the rates, by the plan of a step; or a scheduler of torch's, which sets the rates itself.
        noise_scale_every: steps from one measurement of the gradient's noise to the next; 0: never.
        batch_checks: each is given the bare model and each batch, with its number of samples, before the batch is used.
        keeps_buffers: a step that breaks off leaves no trace in buffers, hooks and loss scale. Parameters never change.
    """

    task: Task
    schedule: Callable[[StepPlan], float] | TorchSchedule
    precision: Precision
    seed: int
    noise_scale_every: int
    batch_checks: Sequence[Callable[[nn.Module, Any, int], None]]
    keeps_buffers: bool

    @cached_property
    def loss(self) -> Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]]:
        """Returns a function that returns the loss of a batch, as a sum, and the number of items; always the same."""

        def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float | Tensor]:
            with explained(batch, model):
                return sum_and_count(self.task, self.task.loss(model, batch))

        return loss


Check = Callable[[StepPlan, Agreement], None]
"""Checks a step that all ranks have computed, and raises an error, on every rank, if it is not to be made."""


def unchecked(plan: StepPlan, agreement: Agreement) -> None:
    """Lets every step be made."""


def train_step(
    state: TrainState, rules: StepRules, plan: StepPlan, batches: Iterator[Any], check: Check = unchecked
) -> StepReport:
    """Makes one step, and returns its report.

    Args:
        batches: of this rank.
        check: called before the update.

    Raises:
        Diverged: loss or gradient norm is not finite; parameters and sampler are as before the step.
        ConfigError: the loss does not depend on the model.
    """
    with state.phase("step"):
        start_s, fetching, wants_stop = now_s(), Stopwatch(), bool(state.stop_flag)
        state.model.waited.take_s()
        may_repeat = rules.precision == "fp16"
        before = StepSnapshot(state, batches) if may_repeat or rules.keeps_buffers else None
        try:
            while True:
                given = before.batches() if before is not None and may_repeat else batches
                backward(state, rules, plan, given, fetching, wants_stop)
                with state.phase("update"):
                    agreement = state.strategy.agree(state.step + 1)
                if before is None or not agreement.is_overflow:
                    break
                before.restore(state)
            check(plan, agreement)
            update(state, rules, plan, agreement)
            state.sampler.commit(plan)
        except BaseException:
            if before is not None:
                before.take_back(state)
            raise
        return committed(state, rules, plan, agreement, start_s=start_s, data_s=fetching.total_s)


def update(state: TrainState, rules: StepRules, plan: StepPlan, agreement: Agreement) -> None:
    """Sets the rate, and lets the strategy make the update that all ranks have agreed on."""
    if not plan.num_inner:  # else inner steps have set it
        _set_rate(state, rules, plan)
    if agreement.totals.num_items:
        with state.phase("update"):
            state.strategy.update(agreement)
    else:  # no rank could read a sample: momentum and decay alone must not move parameters
        state.model.take_back()


def committed(
    state: TrainState, rules: StepRules, plan: StepPlan, agreement: Agreement, *, start_s: float, data_s: float = 0.0
) -> StepReport:
    """Counts a step whose plan the sampler has committed, and returns its report."""
    totals = agreement.totals
    rate = float(state.optimizer.param_groups[0]["lr"])
    state.step, state.train_loss = state.step + 1, totals.mean_loss
    if isinstance(rules.schedule, TorchSchedule):
        rules.schedule.stepped(is_epoch_end=state.sampler.at_epoch_end)
    return StepReport(
        step=state.step,
        epoch=plan.epoch,
        loss=totals.mean_loss,
        num_items=totals.items_on_host,
        num_samples=plan.size,
        parts=totals.parts,
        gradient_norm=agreement.length,
        rate=rate,
        step_s=now_s() - start_s,
        data_s=data_s,
        wait_s=state.model.waited.take_s(),
        num_stopping=totals.num_stopping,
        num_ending=totals.num_ending,
        micros=plan.micros,
    )


def _set_rate(state: TrainState, rules: StepRules, plan: StepPlan) -> None:
    if not isinstance(rules.schedule, TorchSchedule):
        state.rates.set(rules.schedule(plan))


class StepSnapshot:
    """The state before a step, as far as forward and backward change it, for a step that may be repeated.

    The copies of buffers lie in the memory of the last step's.

    Args:
        batches: this rank's micro-batches.
    """

    def __init__(self, state: TrainState, batches: Iterator[Any]) -> None:
        state.model.commit()
        self._num_steps = state.model.num_steps
        self._scale = None if state.loss_scale is None else state.loss_scale.state_dict()
        self._buffers = state.buffers = BufferSnapshot(state.model, state.buffers)
        self._fetched: list[Any] = []
        self._batches = batches

    def batches(self) -> Iterator[Any]:
        """Yields the micro-batches, the same ones at each call, even if a model changes its input in place."""
        yield from map(copy.deepcopy, self._fetched)
        for batch in self._batches:
            self._fetched.append(copy.deepcopy(batch))
            yield batch

    def restore(self, state: TrainState) -> None:
        """Makes buffers as they were, because the step is repeated."""
        state.model.num_steps = self._num_steps
        self._buffers.restore()

    def take_back(self, state: TrainState) -> None:
        """Makes everything as it was, because the step is not made."""
        self.restore(state)
        state.model.take_back()
        if state.loss_scale is not None and self._scale is not None:
            state.loss_scale.load_state_dict(self._scale)


def backward(
    state: TrainState, rules: StepRules, plan: StepPlan, batches: Iterator[Any], fetching: Stopwatch, wants_stop: bool
) -> None:
    """Computes the gradients of this rank's micro-batches; the last one's backward averages them over all ranks.

    By shards, those of each shard ride with its own totals; the votes with those of the last.

    Raises:
        ConfigError: the loss does not depend on the model.
    """
    model = state.model
    model.zero_grad(set_to_none=True)  # also of parameters that the optimizer leaves out
    num_averaged = model.num_steps
    every, has_shards = rules.noise_scale_every, model.num_shards is not None
    has_parts = has_shards or state.comm.world_size > 1 or len(plan.micros) > 1
    is_due = every > 0 and state.step % every == 0 and not plan.num_inner
    measures = is_due and has_parts and model.measures_parts
    is_stopping = wants_stop and not plan.num_inner
    votes = Totals(num_stopping=int(is_stopping), num_ending=int(plan.is_last), measure=measures)
    if model.compute is not None:
        parts = _shares(state, rules, plan, batches, fetching)
        with state.phase("backward"):
            model.compute(rules.loss, parts, votes)
    elif has_shards:
        for shard in model.shards:
            totals = votes if shard == model.shards[-1] else Totals(measure=measures)
            with model.shard(shard):
                mine = [micro for micro in plan.micros if micro.shard == shard]
                _accumulate(state, rules, plan, mine, batches, fetching, totals)
    else:
        _accumulate(state, rules, plan, plan.micros, batches, fetching, votes)
    if model.num_steps == num_averaged:
        model.raise_pending()
        raise ConfigError(
            f"{name_of(rules.task)}.loss returned a loss that was not computed from the model's outputs, so "
            "backward did not reach the model: compute it from model(…), without detach(), item() or torch.tensor()"
        )


def _shares(
    state: TrainState, rules: StepRules, plan: StepPlan, batches: Iterator[Any], fetching: Stopwatch
) -> list[list[tuple[Any, int] | None]]:
    """Returns by micro-batch and shard its samples, with the seed of their random numbers; None: there are none."""
    num_parts = max((micro.part for micro in plan.micros), default=0) + 1
    found: list[list[tuple[Any, int] | None]] = [[None] * state.sampler.num_shards for _ in range(num_parts)]
    for micro in plan.micros:
        with fetching.running(), state.phase("data"):
            batch = next(batches)
        if batch is not None:  # else none of them can be read
            for check in rules.batch_checks:
                check(state.model.module, batch, len(micro.indices))
            seed = stream_seed(rules.seed, "dropout", state.step, micro.shard, micro.part)
            found[micro.part][micro.shard] = batch, seed
    return found


def _accumulate(
    state: TrainState,
    rules: StepRules,
    plan: StepPlan,
    micros: Sequence[Micro],
    batches: Iterator[Any],
    fetching: Stopwatch,
    totals: Totals,
) -> None:
    """Computes the gradients of some micro-batches: of all that this rank has, or of those of one shard.

    Args:
        totals: that ride along with them, without their losses.
    """
    model, device = state.model, state.comm.device
    num_micros = model.most_micros(len(micros))
    for number, micro in enumerate((*repeat(None, num_micros - len(micros)), *micros), 1):
        is_last, batch = number >= num_micros, None
        if micro is not None:
            with fetching.running(), state.phase("data"):
                batch = next(batches)
                batch = None if batch is None else to_device(batch, device)
        if plan.num_inner:
            _set_rate(state, rules, plan.inner(number - 1))
            if state.stop_flag and not totals.num_stopping:  # a round is long, so a request during it counts
                totals = totals._replace(num_stopping=1)
                _say_what_is_left(state, num_micros - number)
        with state.strategy.micro_batch(is_last=is_last, synchronous=not plan.num_inner) as scale:
            totals = totals._replace(loss_scale=scale)
            model.ride_along(totals)
            if micro is None or batch is None:  # there are no samples for this rank, or none of them can be read
                takes_part = is_last or not model.is_whole  # in what the other ranks send
                if takes_part and model.num_shards is None:  # else the block of the last shard ends the step
                    with state.phase("backward"):
                        model.reduce_without_backward()
                continue
            with state.phase("forward"):
                loss_sum, num_items = forward(state, rules, micro, batch)
            totals = totals._replace(
                loss_sum=totals.loss_sum + loss_sum.detach(), num_items=totals.num_items + num_items
            )
            model.ride_along(totals)
            with state.phase("backward"):
                (loss_sum if scale == 1 else loss_sum * scale).backward()
        if totals.measure and not is_last and model.num_shards is None:  # the first micro-batch is this rank's part
            square = (gradient_norm(model.parameters()) / scale).square()
            totals = totals._replace(parts=Parts.of(square, float(num_items)), measure=False)


def _say_what_is_left(state: TrainState, num_inner: int) -> None:
    """Tells the sender of a signal why the run does not end yet."""
    if state.stop_flag.signal_name and num_inner:
        log.warning(
            "%s: the run ends with this round, after %s more; a second signal ends it at once, without a checkpoint",
            *(state.stop_flag.signal_name, counted(num_inner, "inner step")),
        )


def forward(state: TrainState, rules: StepRules, micro: Micro, batch: Any) -> tuple[Tensor, float | Tensor]:
    """Returns the loss of a micro-batch, as a sum, and the number of items in it."""
    model, device = state.model, state.comm.device
    # bfloat16 weights take the user's inputs under autocast alone; other weights are looked at in their own type
    with forward_precision("bf16_pure" if rules.precision == "bf16_pure" else "fp32", device):
        for check in rules.batch_checks:
            check(model.module, batch, len(micro.indices))
    dropout_stream(rules.seed, state.step, micro.shard, micro.part, device)
    with forward_precision(rules.precision, device):
        return rules.loss(model, batch)


@contextmanager
def explained(batch: Any, model: nn.Module) -> Iterator[None]:
    """Notes on an error of the block what the batch was, because the usual cause is that they do not fit each other."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        error.add_note(_about(batch, model))
        if TOO_FEW in str(error):
            error.add_note(f"a share of one sample cannot be normalised: {REMEDY}")
        raise


def sum_and_count(task: Task, returned: Any) -> tuple[Tensor, float | Tensor]:
    """Returns the sum and the count that `task.loss` has returned, once they have the right form.

    A count on a GPU stays there, so that the host need not wait; its value is not looked at. In a step that is compiled
    there are no values, and no gradients yet.

    Raises:
        ConfigError: it is not a scalar tensor and a finite number from 0 up.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        what = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise ConfigError(
            f"{name_of(task)}.loss returned {what}: return two, the sum of the losses and the number of terms in it, "
            "such as (loss_sum, len(targets))"
        )
    loss, count = returned
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ConfigError(f"{name_of(task)}.loss returned {shape} as its loss: return a scalar, such as losses.sum()")
    is_scalar = isinstance(count, Tensor) and count.numel() == 1
    stays = is_scalar and count.device.type != "cpu"
    number = 0 if stays else count.item() if is_scalar else count
    if not isinstance(number, (int, float, np.number)) or not 0 <= number < math.inf:
        raise ConfigError(
            f"{name_of(task)}.loss returned the count {number!r}: return the number of terms in the sum, or the sum of "
            "their weights"
        )
    if torch.is_grad_enabled() and loss.device.type in ("cpu", gpu.KIND) and not loss.requires_grad:
        raise ConfigError(
            f"{name_of(task)}.loss returned a loss that depends on no parameter that is trained: compute it from the "
            "model's outputs, without detach() or item(), and leave some parameters with requires_grad=True"
        )
    return loss.squeeze(), count.detach().squeeze() if stays else count_of(float(number))


@runtime_checkable
class Movable(Protocol):
    """A tensor, or a user's batch that knows how to move its own."""

    def to(self, device: torch.device, *, non_blocking: bool) -> Any: ...


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns the batch with its tensors on `device`; copies from pinned memory do not wait."""
    if device.type == "cpu":
        return batch
    return apply_to_collection(batch, Movable, lambda each: each.to(device, non_blocking=True))


def _about(batch: Any, model: nn.Module) -> str:
    """Returns types and shapes of a batch, and the type of the parameters."""
    shapes = apply_to_collection(batch, Tensor, lambda tensor: _Shape(f"{tensor.dtype} {list(tensor.shape)}"))
    kinds = sorted({str(parameter.dtype) for parameter in model.parameters()})
    return f"the batch was {shapes}, the parameters {', '.join(kinds)}".replace("torch.", "")


class _Shape(str):
    """A text whose repr has no quotes."""

    __repr__ = str.__str__
