"""Checks a reader's replicas: what stands in `p.grad` after backward, beside what one process finds on the whole batch.

Ranks are threads on a simulated network, and numbers are float64. Before every collective, the ranks compare what they
call. An asynchronous all-reduce begins only when somebody waits for it. So a call that other ranks do not make, or a
wait that was forgotten, shows every time.

A wrong gradient is compared with what the usual mistakes give: the sum, the rank's own gradient, the mean divided
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations, pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp.comm.communicator import Communicator
from ddp.comm.settings import Settings
from ddp.comm.transport.simulated import SimulatedNetwork, SimulatedTransport
from ddp.comm.work import Work
from ddp.errors import CollectiveMismatch, CommunicatorBroken, PeerLost
from ddp.gradients.totals import Totals
from ddp.replica.backward import Backward, BucketReduction, State
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.replica import Replica
from ddp.units import counted
from recipes.tutorial.tools.mistake import Mistake, raised
from recipes.tutorial.tools.schedule_checks import SILENCE_S

BUCKET_MB = 200 / 2**20  # in these nets, a bucket for each layer
BOTH, SWAPPED, LEFT = ("left", "right"), ("right", "left"), ("left",)
Gradients = dict[str, Tensor | None]
MakeReplica = Callable[[nn.Module, Communicator], Replica]


class Trial(NamedTuple):
    """Something to try on all ranks, and to compute on one.

    Attributes:
        shares: how many samples each rank has.
        paths: the branches of the net that each rank takes, in this order.
        rides: the number of samples travels with the gradients, which are sums then.
        num_backwards: how many backwards add up, without `zero_grad` between them.
        no_sync: all backwards but the last only accumulate.
    """

    step: str
    shares: Sequence[int]
    paths: Sequence[Sequence[str]]
    rides: bool = False
    num_backwards: int = 1
    no_sync: bool = False

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


def equal(step: str, num_ranks: int, **more: Any) -> Trial:
    """Returns a trial in which every rank has three samples and takes both branches."""
    return Trial(step, [3] * num_ranks, [BOTH] * num_ranks, **more)


# --- exercise 06 -----------------------------------------------------------------------------------------------------


def naive(module: ModuleType, sizes: Sequence[int] = range(1, 9)) -> Iterator[str]:
    """Checks exercise 06."""
    for num_ranks in sorted(sizes, key=lambda size: (size == 1, size)):  # one rank last: a sum is a mean there
        try_out(module, _naive(module), equal(f"mean over {counted(num_ranks, 'rank')}", num_ranks))
    yield f"gradients are the mean over the ranks, with {sizes[0]} to {sizes[-1]} of them"
    trial = Trial("shares of 5, 2 and 4 samples", [5, 2, 4], [BOTH] * 3, rides=True)
    try_out(module, _naive(module), trial)
    yield f"{trial.step}: gradients are sums, divided by the number of all samples"
    trial = Trial("a branch that rank 1 alone takes", [3] * 3, [LEFT, BOTH, LEFT])
    try_out(module, _naive(module), trial)
    yield f"{trial.step}: the other ranks contribute zeros, and get the same mean"
    trial = Trial("a branch that no rank takes", [3] * 2, [LEFT] * 2)
    try_out(module, _naive(module), trial)
    yield f"{trial.step}: its parameters keep no gradient"
    trial = equal("two backwards without zero_grad", 2, num_backwards=2)
    try_out(module, _naive(module), trial)
    yield f"{trial.step}: the gradients add up"


def _naive(module: ModuleType) -> MakeReplica:
    return lambda net, comm: module.NaiveDataParallel(net, comm=comm)


# --- exercise 07 -----------------------------------------------------------------------------------------------------


def buckets(module: ModuleType, sizes: Sequence[int] = range(1, 9)) -> Iterator[str]:
    """Checks exercise 07."""
    module.__dict__["State"] = State  # the replica compares with these
    foreground, background = _bucketed(module, overlap=False), _bucketed(module, overlap=True)
    for num_ranks in sorted(sizes, key=lambda size: (size == 1, size)):
        trial = equal(f"mean over {counted(num_ranks, 'rank')}", num_ranks)
        try_out(module, foreground, trial, launches=True)
    yield f"gradients are the mean over the ranks, with {sizes[0]} to {sizes[-1]} of them"
    yield "every bucket is launched by the gradient that makes it full; the last one waits for the end"
    trial = equal("in the background", 3)
    try_out(module, background, trial, launches=True)
    yield f"{trial.step}: the same, while backward goes on"
    trial = Trial("gradients in another order on rank 1", [3] * 3, [BOTH, SWAPPED, BOTH])
    for replica in (foreground, background):
        try_out(module, replica, trial, launches=True)
    yield f"{trial.step}: buckets are launched in one order everywhere"
    trial = Trial("shares of 5, 2 and 4 samples", [5, 2, 4], [BOTH] * 3, rides=True)
    try_out(module, foreground, trial, launches=True)
    yield f"{trial.step}: gradients are sums, divided by the number of all samples"
    trial = equal("two backwards, the first in no_sync", 2, num_backwards=2, no_sync=True)
    try_out(module, foreground, trial)
    yield f"{trial.step}: the gradients add up, and travel once"
    trial = Trial("a branch that rank 1 does not take", [3] * 3, [BOTH, LEFT, BOTH])
    _try_unused(module, foreground, trial)
    yield f"{trial.step}: every rank learns of it from the last bucket"


class Noted(NamedTuple):
    """A gradient that has become ready, and how many buckets were launched after it."""

    parameter: int  # its id
    num_launched: int


def _bucketed(module: ModuleType, *, overlap: bool) -> MakeReplica:
    """Returns what makes bucketed replicas whose backward is the reader's."""

    class Written(module.Backward):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.noted: list[Noted] = []

        def note(self, parameter: Tensor) -> bool:
            is_waiting = id(parameter) in self.index_of
            answer = super().note(parameter)
            if is_waiting and answer is not True:
                hint = "it returns True for a gradient that a bucket waits for, and False for others"
                raise Mistake("the answer of `note`", f"it returned {answer!r}, expected True", hint)
            if is_waiting:
                self.noted.append(Noted(id(parameter), self._num_launched))
            return bool(answer)

        def _launch(self, reduction: BucketReduction) -> None:
            _check_launch(reduction, self.step, in_backward=self.ended_s == 0)
            super()._launch(reduction)

    class Bucketed(BucketedDataParallel):
        def _new_backward(self, former: Backward | None = None) -> Backward:
            written: Backward = Written(self.comm, overlap=overlap, waited=self.waited, former=former)
            return written

    return lambda net, comm: Bucketed(
        net, comm=comm, bucket_cap_mb=BUCKET_MB, first_bucket_mb=BUCKET_MB, overlap=overlap
    )


def _check_launch(reduction: BucketReduction, number: int, *, in_backward: bool) -> None:
    """Raises Mistake if a bucket is launched twice, too early, or before its gradients are in it."""
    step, bucket = f"backward {number}", reduction.bucket
    if reduction.is_launched:
        raise Mistake(step, f"{bucket.label} is launched twice", "`_num_launched` says how many were launched already")
    if in_backward and not reduction.is_full:
        raise Mistake(step, f"{bucket.label} is launched before it is full", "`is_full` says if it is")
    outside = [slot.name for slot in bucket.slots if slot.parameter.grad is not slot.view]
    if outside:
        hint = "aliasing: the bucket's memory is reduced, and a gradient is not there until `_fill` has moved it"
        raise Mistake(step, f"{bucket.label} is launched without the gradient of {outside[0]}", hint)


def _check_launches(step: str, rank: int, replica: Replica) -> None:
    """Raises Mistake unless each bucket was launched in its turn, by the gradient that made it full."""
    assert isinstance(replica, BucketedDataParallel)
    backward: Any = replica._last
    layout, ready = backward.layout, set[int]()
    in_backward = layout.buckets[:-1] if layout.verdicts_ride else layout.buckets
    before = 0
    for parameter, num_launched in backward.noted:
        ready.add(parameter)
        num_full = next((bucket.index for bucket in in_backward if not bucket.ids <= ready), len(in_backward))
        after = f"rank {rank}, after the gradient of {layout.slot_of[parameter].name}"
        if num_launched < num_full:
            label = layout.buckets[num_launched].label
            hint = "look at every gradient if its bucket is full now; only the last bucket waits for the end"
            if num_launched > before:
                hint = "a gradient may make several buckets full at once: go on up to the first that is not"
            raise Mistake(step, f"{after}: {label} is full, and so is all before it, but it is not launched", hint)
        if num_launched > num_full:
            label = layout.buckets[num_full].label
            hint = "stop at the first bucket that is not full"
            if num_full == len(in_backward):
                hint = "the last bucket carries the verdicts, which are known only at the end"
            raise Mistake(step, f"{after}: {label} was launched too early", hint)
        before = num_launched


def _try_unused(module: ModuleType, make: MakeReplica, trial: Trial) -> None:
    """Raises Mistake unless all ranks learn that a parameter of one rank got no gradient."""

    def program(comm: Deferring) -> bool:
        replica = make(_net(), comm)
        for paths in (BOTH, trial.paths[comm.rank]):  # the first backward learns the order
            replica.zero_grad()
            trial._replace(paths=[paths] * comm.world_size).loss(replica, comm.rank).backward()
        assert isinstance(replica, BucketedDataParallel)
        return replica._last.error is not None

    for rank, has_learned in enumerate(on_ranks(module, len(trial.shares), program, trial.step)):
        if not has_learned:
            hint = "the last bucket was launched before the verdicts were written into it"
            raise Mistake(trial.step, f"rank {rank} does not learn that a parameter was not used on rank 1", hint)


# --- a trial ---------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The gradients of a rank after a trial, and what else was seen."""

    gradients: Gradients
    forgotten: list[str]  # all-reduces that nobody waited for
    overlapping: tuple[str, str] | None  # two parameters whose gradients share memory
    replica: Replica


def try_out(module: ModuleType, make: MakeReplica, trial: Trial, *, launches: bool = False) -> None:
    """Raises Mistake unless every rank ends with the gradients that one process computes.

    Args:
        launches: look at when buckets are launched, too, in a second step, when the order of gradients is known.
    """
    program = partial(_outcome, trial, make, num_steps=2 if launches else 1)
    outcomes = on_ranks(module, len(trial.shares), program, trial.step)
    expected = _expected(trial)
    for rank, outcome in enumerate(outcomes):
        if outcome.forgotten:
            hint = "wait for what all_reduce(…, async_op=True) returns before you use the gradient"
            what = f"missing wait: nobody on rank {rank} waits for the all-reduce of {outcome.forgotten[0]}"
            raise Mistake(trial.step, what, hint)
        if outcome.overlapping:
            first, second = outcome.overlapping
            hint = "each gradient needs memory of its own"
            raise Mistake(trial.step, f"aliasing: the gradients of {first} and {second} share memory", hint)
        for name, wanted in expected.items():
            _compare(trial, rank, name, outcome.gradients, wanted)
        if launches:
            _check_launches(trial.step, rank, outcome.replica)
    for rank, outcome in enumerate(outcomes):
        for name, gradient in outcome.gradients.items():
            other = outcomes[0].gradients[name]
            if gradient is not None and other is not None and not torch.equal(gradient, other):
                raise Mistake(trial.step, f"the gradient of {name} differs in its last bits on ranks 0 and {rank}")


def on_ranks(module: ModuleType, num_ranks: int, program: Callable[[Deferring], Any], step: str) -> list[Any]:
    """Runs a program on ranks that are threads; returns its results by rank.

    Raises:
        Mistake: it raised, or ranks called different collectives.
    """

    def guarded(transport: SimulatedTransport) -> Any:
        settings = Settings(algorithm="ring", shared_memory=False, abort_s=SILENCE_S, debug=True)
        comm = Deferring(transport, settings, hosts=(tuple(range(num_ranks)),))
        try:
            return program(comm)
        except Exception as error:
            return error
        finally:
            comm.close()

    results = SimulatedNetwork(num_ranks).run(guarded)
    errors = [(rank, result) for rank, result in enumerate(results) if isinstance(result, Exception)]
    if errors:
        raise _worst(module, step, errors)
    return results


def _worst(module: ModuleType, step: str, errors: list[tuple[int, Exception]]) -> Exception:
    """Returns the mistake behind the errors of some ranks: what the others followed from."""
    consequences = (PeerLost, CommunicatorBroken)
    rank, error = min(errors, key=lambda each: (isinstance(each[1], consequences), isinstance(each[1], PeerLost)))
    if isinstance(error, CollectiveMismatch):
        hint = "every rank must launch the same all-reduces in the same order, whatever gradients it has itself"
        return Mistake(step, f"ranks call different collectives. {error}", hint)
    if isinstance(error, consequences):
        hint = "one rank waits in a collective that another one does not call"
        return Mistake(step, f"deadlock: rank {rank}: {error}", hint)
    return raised(step, error, module) or Mistake(step, f"rank {rank}: {type(error).__name__}: {error}")


def _outcome(trial: Trial, make: MakeReplica, comm: Deferring, *, num_steps: int) -> Outcome:
    replica, rank = make(_net(), comm), comm.rank
    for _ in range(num_steps):
        replica.zero_grad()
        for number in range(trial.num_backwards):
            if trial.no_sync and number < trial.num_backwards - 1:
                with replica.no_sync():
                    trial.loss(replica, rank).backward()
                continue
            loss = trial.loss(replica, rank)
            if trial.rides:
                replica.ride_along(Totals(loss.detach(), trial.shares[rank]))
            loss.backward()
    named = dict(replica.module.named_parameters())
    gradients = {name: None if each.grad is None else each.grad.clone() for name, each in named.items()}
    return Outcome(gradients, comm.forgotten(), _overlapping(named), replica)


def _overlapping(named: dict[str, nn.Parameter]) -> tuple[str, str] | None:
    places = sorted(
        (each.grad.data_ptr(), each.grad.data_ptr() + each.grad.nbytes, name)
        for name, each in named.items()
        if each.grad is not None
    )
    for (_, stop, name), (start, _, other) in pairwise(places):
        if start < stop:
            return name, other
    return None


class Deferring(Communicator):
    """A communicator whose asynchronous all-reduces begin as late as they may: when somebody waits for one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deferred: list[Deferred] = []

    def all_reduce(self, *args: Any, async_op: bool = False, label: str = "", **kwargs: Any) -> Any:
        """Reduces at once, after all that was deferred; or returns a work."""
        reduce = partial(super().all_reduce, *args, label=label, **kwargs)
        if async_op:
            self._deferred.append(Deferred(reduce, self._deferred, label))
            return self._deferred[-1]
        for each in self._deferred:
            each.run_once()
        return reduce()

    def forgotten(self) -> list[str]:
        """Returns the labels of the all-reduces that nobody has waited for."""
        return [each.label for each in self._deferred if not each.was_waited_for]


class Deferred(Work):
    """An all-reduce that begins when somebody waits for it, or for a later one."""

    def __init__(self, reduce: Callable[[], Any], queue: list[Deferred], label: str) -> None:
        super().__init__(reduce)
        self.label, self.was_waited_for, self._queue, self._has_run = label, False, queue, False

    def run_once(self) -> None:
        """Runs it, unless it has run."""
        if not self._has_run:
            self._has_run = True
            self.run()

    def wait(self, timeout_s: float | None = None) -> Any:
        """Runs all that was deferred before this one, and then this one."""
        self.was_waited_for = True
        for each in self._queue:
            each.run_once()
            if each is self:
                break
        return super().wait(timeout_s)


# --- what is expected, and what is found in its place ----------------------------------------------------------------


def _compare(trial: Trial, rank: int, name: str, gradients: Gradients, wanted: Tensor | None) -> None:
    """Raises Mistake unless a rank's gradient is the expected one."""
    found = gradients[name]
    if found is None and wanted is None:
        return
    if found is not None and wanted is not None and torch.allclose(found, wanted, rtol=1e-9, atol=1e-12):
        return
    of = f"rank {rank}, gradient of {name}"
    if wanted is None:
        raise Mistake(trial.step, f"{of}: found one, expected None", "no rank has computed it, so it is left alone")
    if found is None:
        hint = "a rank that has no gradient itself gets the mean as well: assign it to `parameter.grad`"
        raise Mistake(trial.step, f"{of}: found None, expected {_numbers(wanted)}", hint)
    what = f"{of}: found {_numbers(found)}, expected {_numbers(wanted)}"
    raise Mistake(trial.step, what, _explanation(trial, rank, name, found, wanted))


def _explanation(trial: Trial, rank: int, name: str, found: Tensor, wanted: Tensor) -> str:
    """Returns the usual mistake that gives what was found, or ""."""
    own = [_own(trial, each)[name] for each in range(len(trial.shares))]
    mine, divisor = own[rank], trial.divisor
    having = [gradient for gradient in own if gradient is not None]
    usual: list[tuple[str, Tensor | None]] = [
        ("nothing was reduced: this is the rank's own gradient (is `p.grad` the tensor that was reduced?)", mine),
        ("nothing was reduced, but it was divided", None if mine is None else mine / divisor),
        ("a sum in place of a mean: it was not divided", wanted * divisor),
        ("divided twice", wanted / divisor),
        ("divided by the number of ranks, not by the number of all samples", wanted * divisor / len(own)),
        ("divided by the number of ranks that have this gradient, not by that of all", wanted * divisor / len(having)),
        ("only the last backward is in it: gradients add up until zero_grad", wanted / trial.num_backwards),
        ("zeros: the gradient was overwritten, or never copied to where it is reduced", torch.zeros_like(wanted)),
    ]
    usual += [(f"this is the gradient of {other}", each) for other, each in _expected(trial).items() if other != name]
    if trial.rides and len(having) == len(own):
        means = [gradient / share for gradient, share in zip(having, trial.shares, strict=True)]
        usual.append(("a mean of the ranks' means, although their shares differ", torch.stack(means).mean(0)))
    for one, other in combinations(range(len(own)), 2):
        if len(own) > 2 and own[one] is not None and own[other] is not None:
            usual.append((f"only ranks {one} and {other} are in it", (own[one] + own[other]) / divisor))  # type: ignore[operator]
    for hint, candidate in usual:
        if candidate is not None and candidate.shape == found.shape and torch.allclose(found, candidate, atol=1e-12):
            return hint
    return ""


def _numbers(tensor: Tensor) -> str:
    """Returns the first numbers of a tensor."""
    shown = ", ".join(f"{number:.4g}" for number in tensor.flatten()[:3].tolist())
    return f"[{shown}{', …' if tensor.numel() > 3 else ''}]"


def _expected(trial: Trial) -> Gradients:
    """Returns what one process computes."""
    net = _net()
    for _ in range(trial.num_backwards):
        losses = [trial.loss(net, rank) for rank in range(len(trial.shares))]
        (torch.stack(losses).sum() / trial.divisor).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def _own(trial: Trial, rank: int) -> Gradients:
    """Returns what a rank computes by itself."""
    net = _net()
    trial.loss(net, rank).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


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
