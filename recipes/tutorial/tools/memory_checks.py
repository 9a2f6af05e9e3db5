"""Checks exercise memory: is it the step of the whole batch, in forwards that fit, sent once?

Each rank notes its forwards, backwards, all-reduces and updates in the order of time. The gradients that the optimizer
finds are compared with those of one process on the whole batch, and a wrong one with what the usual mistakes give.
Ranks are threads, and numbers are float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp.comm.communicator import Communicator
from ddp.replica.bucketed import BucketedDataParallel
from ddp.units import counted
from recipes.tutorial.tools.mistake import Mistake
from recipes.tutorial.tools.threads import in_numbers, on_ranks

NUM_STEPS = 3  # in the first, the replica also learns the order of gradients
RATE, MOMENTUM = 0.1, 0.9
SPLIT = "take micro-batches: zip(inputs.split(most), classes.split(most))"
NO_SYNC = (
    "all micro-batches but the last one stand in `with model.no_sync():`, forward and backward, because the replica "
    "decides in the forward whether the backward will average"
)


class Trial(NamedTuple):
    """A batch: how many samples each rank has, and how many of them a forward may take."""

    shares: Sequence[int]
    most: int

    @property
    def step(self) -> str:
        """Returns what is tried, in words."""
        *others, last = self.shares
        return f"shares of {', '.join(map(str, others))} and {last} samples, {self.most} at a time"

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns the inputs [samples, 4] and classes of a step, of all ranks."""
        seeded = torch.Generator().manual_seed(number)
        inputs = torch.randn(sum(self.shares), 4, generator=seeded, dtype=torch.float64)
        return inputs, torch.randint(0, 3, (len(inputs),), generator=seeded)


TRIALS = Trial([6, 6], 2), Trial([7, 5], 3), Trial([3, 8, 2], 3)


class Update(NamedTuple):
    """Holds what the optimizer finds when it is called."""

    rate: float
    gradient: Tensor


class Sent(NamedTuple):
    """Tells how many numbers an all-reduce adds up."""

    numel: int


class Noted(Communicator):
    """A communicator that notes what a rank does, in the order of time.

    Attributes:
        events: the number of samples of a forward; "backward", which has reached the model's outputs; all-reduces;
            updates.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.events: list[int | str | Sent | Update] = []

    def all_reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensor] if isinstance(tensor, Tensor) else tensor
        self.events.append(Sent(sum(each.numel() for each in tensors)))
        return super().all_reduce(tensor, *args, **kwargs)


def accumulation(module: ModuleType, trials: Sequence[Trial] = TRIALS) -> Iterator[str]:
    """Checks exercise memory."""
    for trial in trials:
        program = partial(_steps, module, trial)
        ranks = on_ranks(len(trial.shares), program, kind=Noted, step=trial.step, module=module)
        wanted = list(_alone(trial))
        for number in range(NUM_STEPS):
            for rank in range(len(trial.shares)):
                _check_step(trial, number, rank, ranks, wanted[number])
        yield f"{trial.step}: the step of the whole batch, and its gradient is sent once"
    yield "no forward takes more samples than there is memory for, and none is kept until a later one"


def _steps(module: ModuleType, trial: Trial, comm: Noted) -> list[list[Any]]:
    """Makes some steps as one rank; returns the events of each, and those of one more that is right but for memory."""
    net = _net()
    replica = BucketedDataParallel(net, comm=comm)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)
    first, steps = sum(trial.shares[: comm.rank]), []

    def on_forward(_: nn.Module, given: tuple[Tensor, ...], by_name: dict[str, Tensor], outputs: Tensor) -> None:
        if outputs.requires_grad:  # else it keeps nothing
            comm.events.append(len([*given, *by_name.values()][0]))
            outputs.register_hook(lambda _: comm.events.append("backward"))

    def on_update(*_: object) -> None:
        comm.events.append(Update(optimizer.param_groups[0]["lr"], _flat_gradient(net)))

    net.register_forward_hook(on_forward, with_kwargs=True)
    optimizer.register_step_pre_hook(on_update)
    for number in range(NUM_STEPS):
        inputs, classes = (each[first : first + trial.shares[comm.rank]] for each in trial.batch(number))
        module.step(replica, optimizer, inputs, classes, num_samples=sum(trial.shares), most=trial.most)
        steps.append(comm.events)
        comm.events = []
    replica(inputs).sum().backward()
    comm.barrier()  # a mistake on one rank alone must not look like a deadlock on the others
    return [*steps, comm.events]


# --- what is right, in the order in which a reader can mend it --------------------------------------------------------


def _check_step(trial: Trial, number: int, rank: int, ranks: Sequence[list[list[Any]]], wanted: _Alone) -> None:
    """Raises Mistake unless a rank has made the step of the whole batch in forwards that fit.

    Args:
        ranks: by rank, the events of each step.
    """
    step, share = f"{trial.step}: step {number + 1}, rank {rank}", trial.shares[rank]
    events, whole = ranks[rank][number], ranks[rank][-1]
    forwards = [each for each in events if isinstance(each, int)]
    updates = [each for each in events if isinstance(each, Update)]
    if forwards and max(forwards) > trial.most:
        raise Mistake(step, f"a forward takes {max(forwards)} samples, and there is memory for {trial.most}", SPLIT)
    if sum(forwards) != share:
        hint = "the last micro-batch may be smaller, and each sample is in one of them: `inputs.split(most)` does that"
        raise Mistake(step, f"the forwards take {counted(sum(forwards), 'sample')}, and the share has {share}", hint)
    order = [each for each in events if isinstance(each, int) or each == "backward"]
    if any(isinstance(one, int) and isinstance(other, int) for one, other in pairwise(order)):
        hint = "call backward for each micro-batch before the next forward: it frees what the forward has kept"
        raise Mistake(step, "the graphs of several micro-batches are in memory at once", hint)
    if len(updates) != 1:
        hint = "call optimizer.step() once, after the last micro-batch: gradients add up in p.grad until then"
        raise Mistake(step, f"{counted(len(updates), 'update')}, expected 1", hint)
    if updates[0].rate != RATE:
        hint = "leave the rate alone: the division belongs to the loss, so that it is the same for any micro-batches"
        raise Mistake(step, f"the update is at the rate {updates[0].rate:g}, expected {RATE:g}", hint)
    _check_traffic(step, events, numel=updates[0].gradient.numel(), once=_sent(whole))
    if not torch.allclose(found := updates[0].gradient, wanted.gradient, rtol=1e-9, atol=1e-12):
        what = f"the gradient is {in_numbers(found)}, that of the whole batch {in_numbers(wanted.gradient)}"
        raise Mistake(step, what, _explanation(trial, number, found, [steps[number] for steps in ranks], wanted))


def _check_traffic(step: str, events: Sequence[Any], *, numel: int, once: int) -> None:
    """Raises Mistake unless the gradients of a rank are sent once, after its last forward.

    Args:
        numel: of the gradients; once: what one backward of the replica sends.
    """
    last = max(index for index, each in enumerate(events) if isinstance(each, int))
    if num_early := sum(isinstance(each, Sent) for each in events[:last]):
        found = f"{counted(num_early, 'all-reduce')} before the last micro-batch, expected none"
        raise Mistake(step, found, NO_SYNC)
    if _sent(events) < numel:
        hint = "the last micro-batch stands outside of no_sync: its backward sends what has added up"
        raise Mistake(step, f"the {numel} numbers of the gradients are not sent", hint)
    if _sent(events) > once:
        found = f"{_sent(events)} numbers are sent, where {once} are enough"
        raise Mistake(step, found, "the replica has averaged the gradients already: nothing is left to send")


def _sent(events: Sequence[Any]) -> int:
    return sum(each.numel for each in events if isinstance(each, Sent))


def _explanation(trial: Trial, number: int, found: Tensor, ranks: Sequence[list[Any]], wanted: _Alone) -> str:
    """Returns the usual mistake that gives what was found, or ""."""
    num_ranks, num_samples, first = len(trial.shares), sum(trial.shares), 0
    inputs, classes = trial.batch(number)
    sums, means = list[Tensor](), list[Tensor]()  # by rank: the gradient of each micro-batch's sum, of its mean
    for events, share in zip(ranks, trial.shares, strict=True):
        sizes = [each for each in events if isinstance(each, int)]
        parts = [each[first : first + share].split(sizes) for each in (inputs, classes)]
        sums.append(torch.stack([_gradient_of_sum(wanted.net, *part) for part in zip(*parts, strict=True)]))
        means.append(sums[-1] / torch.tensor(sizes)[:, None])
        first += share
    scale = num_ranks / num_samples
    usual = {
        "only the last micro-batch is in it: zero_grad() belongs before the first one, once in a step": [
            parts[-1] * scale for parts in sums
        ],
        "the gradient of the step before is still in it: zero_grad() belongs before the first micro-batch": [
            wanted.gradient + wanted.before for _ in sums
        ],
        "means of micro-batches are added up, and nothing divides by their number: add up the sums of the losses, and "
        "divide by num_samples": [parts.sum(0) for parts in means],
        "a mean of the micro-batches' means, although they differ in size: add up the sums of the losses, and divide "
        "by num_samples": [parts.mean(0) for parts in means],
        "a mean of the ranks' means, although their shares differ: divide the sums by num_samples": [
            parts.sum(0) / share for parts, share in zip(sums, trial.shares, strict=True)
        ],
        "a sum: nothing has divided it by num_samples": [parts.sum(0) for parts in sums],
        "divided by the number of ranks twice: the replica does it, so multiply the loss by it": [
            wanted.gradient / num_ranks for _ in sums
        ],
        "divided by the number of micro-batches as well as by num_samples, which counts the samples of all of them": [
            parts.sum(0) * scale / len(parts) for parts in sums
        ],
    }
    for hint, candidate in usual.items():
        if torch.allclose(found, torch.stack(candidate).mean(0), rtol=1e-9, atol=1e-12):
            return hint
    return ""


# --- one process on the whole batch -----------------------------------------------------------------------------------


class _Alone(NamedTuple):
    """Holds the net before a step, the gradient of the step, and that of the step before."""

    net: nn.Module
    gradient: Tensor
    before: Tensor


def _alone(trial: Trial) -> Iterator[_Alone]:
    net, before = _net(), torch.zeros(())
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)
    for number in range(NUM_STEPS):
        former = _net()
        former.load_state_dict(net.state_dict())
        optimizer.zero_grad()
        F.cross_entropy(net(trial.batch(number)[0]), trial.batch(number)[1]).backward()
        yield _Alone(former, gradient := _flat_gradient(net), before)
        optimizer.step()
        before = gradient


def _gradient_of_sum(net: nn.Module, inputs: Tensor, classes: Tensor) -> Tensor:
    net.zero_grad()
    F.cross_entropy(net(inputs), classes, reduction="sum").backward()
    return _flat_gradient(net)


def _flat_gradient(net: nn.Module) -> Tensor:
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients]).detach().clone()


def _net() -> nn.Sequential:
    """Returns the net with its first weights; they come from a generator, because ranks are threads of one process."""
    net, seeded = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double(), torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        parameter.data.uniform_(-0.5, 0.5, generator=seeded)
    return net
