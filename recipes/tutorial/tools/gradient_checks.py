"""Checks a reader's replicas: what stands in `p.grad` after backward, beside what one process finds on the whole batch.

The library's tests compare whole trainings with torch's, so they only say that something differs. These checks compare
a wrong gradient with what the usual mistakes give: the sum, the rank's own gradient, the mean divided twice.

Ranks are threads on a simulated network, and numbers are float64. Before every collective, the ranks compare what they
call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp.comm.communicator import Communicator
from ddp.gradients.bucket import Bucket
from ddp.gradients.totals import Totals
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.replica import Replica
from ddp.units import counted
from recipes.tutorial.tools.mistake import Mistake
from recipes.tutorial.tools.threads import in_numbers, on_ranks

BUCKET_MB = 200 / 2**20  # in these nets, a bucket for each layer
BOTH, SWAPPED, LEFT = ("left", "right"), ("right", "left"), ("left",)
Gradients = dict[str, Tensor | None]
MakeReplica = Callable[[nn.Module, Communicator], Replica]


class Trial(NamedTuple):
    """Something to try on all ranks, and to compute on one.

    Attributes:
        proves: what is right if it works.
        shares: how many samples each rank has.
        paths: the branches of the net that each rank takes, in this order.
        rides: the number of samples travels with the gradients, which are sums then.
        num_backwards: how many backwards add up, all but the last in `no_sync`.
    """

    step: str
    proves: str
    shares: Sequence[int]
    paths: Sequence[Sequence[str]]
    rides: bool = False
    num_backwards: int = 1

    def loss(self, net: nn.Module, rank: int) -> Tensor:
        """Returns the loss that a rank calls backward of: a mean over its samples, or their sum if the count rides."""
        first = sum(self.shares[:rank])
        inputs, classes = _batch(sum(self.shares))
        mine = slice(first, first + self.shares[rank])
        outputs = net(inputs[mine], self.paths[rank])
        return F.cross_entropy(outputs, classes[mine], reduction="sum" if self.rides else "mean")

    @property
    def divisor(self) -> int:
        """The number that sums over the ranks are to be divided by."""
        return sum(self.shares) if self.rides else len(self.shares)


def _means(sizes: Sequence[int]) -> Iterator[Trial]:
    for num_ranks in sorted(sizes, key=lambda size: (size == 1, size)):  # one rank last: a sum is a mean there
        yield Trial(counted(num_ranks, "rank"), "gradients are the mean", [3] * num_ranks, [BOTH] * num_ranks)


PER_SAMPLE = "sums are divided by the number of all samples"
UNEQUAL = Trial("shares of 5, 2 and 4 samples", PER_SAMPLE, [5, 2, 4], [BOTH] * 3, rides=True)
TWICE = Trial("two backwards, the first in no_sync", "gradients add up", [3] * 2, [BOTH] * 2, num_backwards=2)


def naive(module: ModuleType, sizes: Sequence[int] = range(1, 9)) -> Iterator[str]:
    """Checks exercise 06."""
    some = "the others contribute zeros, and get the same mean"
    one = Trial("a branch that rank 1 alone takes", some, [3] * 3, [LEFT, BOTH, LEFT])
    nobody = Trial("a branch that no rank takes", "its parameters keep no gradient", [3] * 2, [LEFT] * 2)
    for trial in (*_means(sizes), UNEQUAL, one, nobody, TWICE):
        try_out(module, lambda net, comm: module.NaiveDataParallel(net, comm=comm), trial)
        yield f"{trial.step}: {trial.proves}"


def buckets(module: ModuleType, sizes: Sequence[int] = range(1, 9)) -> Iterator[str]:
    """Checks exercise 07, in the foreground and in the background of backward."""
    same = "buckets are launched in one order everywhere"
    order = Trial("gradients in another order on rank 1", same, [3] * 3, [BOTH, SWAPPED, BOTH])
    small = partial(BucketedDataParallel, bucket_cap_mb=BUCKET_MB, first_bucket_mb=BUCKET_MB)
    with patch.object(module.Backward, "note", _watched(module.Backward.note)):
        for trial in (*_means(sizes), order, UNEQUAL, TWICE):
            try_out(module, lambda net, comm: small(net, comm=comm, overlap=False), trial)
            try_out(module, lambda net, comm: small(net, comm=comm, overlap=True), trial)
            yield f"{trial.step}: {trial.proves}"
    yield "every bucket is launched by the gradient that makes it full; the last one waits for the end"


def _watched(note: Callable[[Any, Tensor], bool]) -> Callable[[Any, Tensor], bool]:
    """Returns the reader's `note`, which tells the communicator of each gradient that a bucket waits for."""

    def watched(backward: Any, parameter: Tensor) -> bool:
        if is_awaited := id(parameter) in backward.index_of:
            backward.comm.launched.append((id(parameter), []))
        answer = note(backward, parameter)
        backward.comm.launched.append((None, []))
        if is_awaited and answer is not True:
            hint = "it returns True for a gradient that a bucket waits for, and False for others"
            raise Mistake("the answer of `note`", f"it returned {answer!r}, expected True", hint)
        return answer

    return watched


class Watched(Communicator):
    """A communicator that notes which all-reduces are launched after which gradient, and which are waited for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.launched: list[tuple[int | None, list[str]]] = []  # a parameter's id, and labels; None: not by a gradient
        self.forgotten: list[str] = []  # labels

    def all_reduce(self, *args: Any, async_op: bool = False, label: str = "", **kwargs: Any) -> Any:
        if self.launched:
            self.launched[-1][1].append(label)
        result: Any = super().all_reduce(*args, async_op=async_op, label=label, **kwargs)
        if async_op:
            self.forgotten.append(label)
            result.wait = partial(self._wait, result.wait, label)
        return result

    def _wait(self, wait: Callable[..., Any], label: str, *args: Any) -> Any:
        if label in self.forgotten:
            self.forgotten.remove(label)
        return wait(*args)


def try_out(module: ModuleType, make: MakeReplica, trial: Trial) -> None:
    """Raises Mistake unless every rank ends with the gradients that one process computes."""
    program = partial(_try_on_a_rank, trial, make)
    on_ranks(len(trial.shares), program, kind=Watched, step=trial.step, module=module)


def _try_on_a_rank(trial: Trial, make: MakeReplica, comm: Watched) -> None:
    net = _net()
    replica = make(net, comm)
    for _ in range(2):  # the first step learns the order of gradients
        replica.zero_grad()
        for left in reversed(range(trial.num_backwards)):
            comm.launched.clear()
            with replica.no_sync() if left else nullcontext():
                loss = trial.loss(replica, comm.rank)
                if trial.rides:
                    replica.ride_along(Totals(loss.detach(), trial.shares[comm.rank]))
                loss.backward()
    comm.barrier()  # a mistake on one rank alone must not look like a deadlock on the others
    if comm.forgotten:
        hint = "wait for what all_reduce(…, async_op=True) returns before you use the gradient"
        what = f"missing wait: nobody on rank {comm.rank} waits for the all-reduce of {comm.forgotten[0]}"
        raise Mistake(trial.step, what, hint)
    if isinstance(replica, BucketedDataParallel):
        _check_launches(f"{trial.step}, rank {comm.rank}", replica.buckets, comm.launched)
    memory = [parameter.grad.data_ptr() for parameter in net.parameters() if parameter.grad is not None]
    if len(set(memory)) < len(memory):
        raise Mistake(trial.step, "aliasing: two gradients share memory", "each gradient needs memory of its own")
    found = _gradients(net)
    for name, wanted in _alone(trial, range(len(trial.shares)), trial.divisor).items():
        _compare(trial, comm.rank, name, found[name], wanted)


def _check_launches(step: str, buckets: Sequence[Bucket], launched: list[tuple[int | None, list[str]]]) -> None:
    """Raises Mistake unless each bucket was launched in its turn, by the gradient that made it full."""
    names = {id(slot.parameter): slot.name for bucket in buckets for slot in bucket.slots}
    ready, full = set[int](), 0
    for parameter, labels in launched:
        if parameter is None:
            continue
        ready.add(parameter)
        found = [bucket.label for label in labels for bucket in buckets if label.endswith(bucket.label)]
        expected = []
        while full < len(buckets) - 1 and buckets[full].ids <= ready:
            expected.append(buckets[full].label)
            full += 1
        if found != expected:
            raise Mistake(
                f"{step}, after the gradient of {names[parameter]}",
                f"launched: {', '.join(found) or 'no bucket'}; expected: {', '.join(expected) or 'no bucket'}",
                "look at every gradient: it may make its bucket full, and others behind it can go then. The first that "
                "is not full stops all behind it, and the last one waits for the end, when the flags are known",
            )


def _compare(trial: Trial, rank: int, name: str, found: Tensor | None, wanted: Tensor | None) -> None:
    """Raises Mistake unless a rank's gradient is the expected one."""
    of = f"rank {rank}, gradient of {name}"
    if wanted is None and found is not None:
        raise Mistake(trial.step, f"{of}: found one, expected None", "no rank has computed it, so it is left alone")
    if wanted is not None and found is None:
        hint = "a rank that has no gradient itself gets the mean as well: assign it to `parameter.grad`"
        raise Mistake(trial.step, f"{of}: found None, expected {in_numbers(wanted)}", hint)
    if wanted is not None and found is not None and not torch.allclose(found, wanted, rtol=1e-9, atol=1e-12):
        what = f"{of}: found {in_numbers(found)}, expected {in_numbers(wanted)}"
        raise Mistake(trial.step, what, _explanation(trial, rank, name, found, wanted))


def _explanation(trial: Trial, rank: int, name: str, found: Tensor, wanted: Tensor) -> str:
    """Returns the usual mistake that gives what was found, or ""."""
    num_ranks, sums = len(trial.shares), wanted * trial.divisor
    own = [_alone(trial, [each])[name] for each in range(num_ranks)]
    having = [gradient for gradient in own if gradient is not None]
    mine = own[rank]
    usual: dict[str, Tensor | None] = {
        "nothing was reduced: this is the rank's own gradient (is `p.grad` the tensor that was reduced?)": mine,
        "nothing was reduced, but it was divided": None if mine is None else mine / trial.divisor,
        "a sum in place of a mean: it was not divided": sums,
        "divided twice": wanted / trial.divisor,
        "divided by the number of ranks, not by the number of all samples": sums / num_ranks,
        "divided by the number of ranks that have this gradient, not by that of all": sums / len(having),
        "the last step's mean was reduced again: copy this step's gradients first": wanted * num_ranks / trial.divisor,
        "zeros: the gradient was overwritten, or never copied to where it is reduced": torch.zeros_like(wanted),
    }
    if trial.rides:
        means = [gradient / share for gradient, share in zip(having, trial.shares, strict=True)]
        usual["a mean of the ranks' means, although their shares differ"] = torch.stack(means).mean(0)
    for hint, candidate in usual.items():
        if candidate is not None and candidate.shape == found.shape and torch.allclose(found, candidate, atol=1e-12):
            return hint
    return ""


def _alone(trial: Trial, ranks: Sequence[int], divisor: int = 1) -> Gradients:
    """Returns what one process computes on these ranks' samples."""
    net = _net()
    for _ in range(trial.num_backwards):
        (torch.stack([trial.loss(net, rank) for rank in ranks]).sum() / divisor).backward()
    return _gradients(net)


def _gradients(net: nn.Module) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


class Net(nn.Module):
    """A net with two branches, of which a forward takes one or both, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: Tensor, path: Sequence[str]) -> Tensor:
        """Returns the outputs, [samples, 3]."""
        hidden = torch.tanh(self.stem(inputs))
        branches = {"left": self.left, "right": self.right}
        outputs: Tensor = self.head(torch.tanh(sum(branches[name](hidden) for name in path)))
        return outputs


def _net() -> Net:
    """Returns the net with its first weights; they come from a generator, because ranks are threads of one process."""
    net, numbers = Net().double(), torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        parameter.data.uniform_(-0.5, 0.5, generator=numbers)
    return net


def _batch(num_samples: int) -> tuple[Tensor, Tensor]:
    """Returns inputs [samples, 4] and their classes [samples]."""
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 4, generator=numbers, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (num_samples,), generator=numbers)
