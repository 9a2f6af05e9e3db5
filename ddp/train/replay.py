"""Computes shards of the running step again, on any rank, without communication, and with the same bits.

A shard of a step has no rank: its samples follow from the sampler's position, their augmentation from their numbers,
dropout from the step and the shard; and parameters do not change before all ranks agree. So whoever has the data can
compute it once more, until the update is made. Two things stand on that:

    bad_step.py     a step whose loss is not finite, or far too high, is searched for the module and the samples
    audit.py        a shard that a second rank computes, too, shows a machine that computes wrongly

Buffers begin as those of the step, where the replica knows them, as one by shards does. Healthy steps pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from ddp.data.orders.sampler import Micro, StepPlan
from ddp.replica.broadcast import checksum
from ddp.train.state import TrainState
from ddp.train.step import StepRules, forward, to_device


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
        self.state, self._rules, self._read = state, replace(rules, looks=()), read

    def batches(self, plan: StepPlan, shard: int) -> Iterator[tuple[Micro, Any]]:
        """Yields the micro-batches of any shard of a step, with what they have of it, on this rank's device."""
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
        with model.apart():
            for micro, batch in self.batches(plan, shard):
                loss_sum, number = self.forward(micro, batch)
                total, num_items = total + loss_sum.detach(), num_items + number
                self.backward(loss_sum)
            named = [(name, parameter.grad) for name, parameter in model.module.named_parameters()]
            checksums = {name: checksum(gradient) for name, gradient in named if gradient is not None}
        return Outcome(float(total), float(num_items), checksums)
