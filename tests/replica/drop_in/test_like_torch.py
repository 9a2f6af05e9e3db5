"""What users of torch's DistributedDataParallel rely on, case by case, against torch's class in the same ranks.

Tests: ddp/gradients/reducer.py, ddp/replica/autograd.py, ddp/replica/backward.py, ddp/replica/drop_in/torch_names.py,
ddp/replica/parameters.py, ddp/replica/replica.py, ddp/replica/step_finalizer.py.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import weakref
from collections import deque, namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import in_each_mode, run_cases, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ddp
from ddp.errors import CollectiveMismatch, ConfigError, ReplicaMismatch, UnusedParameters
from ddp.gradients.totals import Totals
from ddp.replica.broadcast import verify_replicas

TINY = {"first_bucket_mb": 1e-6, "bucket_cap_mb": 1e-6}  # a bucket for every parameter


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def both(module: nn.Module, theirs: dict[str, Any] | None = None, **ours: Any) -> tuple[Any, Any]:
    """The module in our class and a copy of it in torch's."""
    twin = copy.deepcopy(module)
    shared = {key: value for key, value in ours.items() if key in ("find_unused_parameters", "static_graph")}
    return (
        ddp.DistributedDataParallel(module, **ours),
        nn.parallel.DistributedDataParallel(twin, **(shared if theirs is None else theirs)),
    )


def assert_same_gradients(comm: ddp.Communicator, ours: Any, theirs: Any, **tolerance: float) -> None:
    for (name, p), q in zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, msg=lambda text, name=name: f"{name}: {text}", **tolerance)
    dense = [(n, p.grad.to_dense()) for n, p in ours.module.named_parameters() if p.grad is not None]
    verify_replicas(comm, dense)


def compare(
    comm: ddp.Communicator,
    module: nn.Module,
    loss_of: Callable[[Any], Tensor],
    *,
    steps: int = 3,
    set_to_none: bool = True,
    rate: float = 0.1,
    theirs: dict[str, Any] | None = None,
    **ours: Any,
) -> Any:
    """Trains both for some steps; gradients agree after each. Returns our replica."""
    pair = both(module, theirs, **ours)
    for step in range(steps):
        for replica in pair:
            replica.zero_grad(set_to_none=set_to_none)
            torch.manual_seed(100 * step + comm.rank)
            loss_of(replica).backward()
        assert_same_gradients(comm, *pair)
        with torch.no_grad():
            for replica in pair:
                for p in replica.parameters():
                    if p.grad is not None:
                        p.add_(p.grad.to_dense(), alpha=-rate)
    return pair[0]


# --- outputs ---------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["first", "second"])  # what older code returns


class Typed(NamedTuple):
    first: Tensor
    second: Tensor


@dataclasses.dataclass
class Data:
    first: Tensor
    second: Tensor


class TwoHeads(nn.Module):
    def __init__(self, pack: Callable[[Tensor, Tensor], Any], width: int = 3) -> None:
        super().__init__()
        self.body, self.left, self.right, self.pack = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, width), pack

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x).tanh()
        return self.pack(self.left(hidden), self.right(hidden))


OUTPUTS: list[tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = [
    (Pair, lambda out: out.first.sum() + out.second.square().sum()),
    (Typed, lambda out: out.first.sum() + out.second.square().sum()),
    (Data, lambda out: out.first.sum() + out.second.square().sum()),
    (lambda a, b: {"a": a, "b": [b, "text", None]}, lambda out: out["a"].sum() + out["b"][0].square().sum()),
    (lambda a, b: [{"deep": (a, {"er": b})}], lambda out: out[0]["deep"][0].sum() + out[0]["deep"][1]["er"].sum()),
]


def outputs_of_many_kinds(comm: ddp.Communicator) -> None:
    for pack, loss in OUTPUTS:
        torch.manual_seed(0)
        compare(comm, TwoHeads(pack), lambda replica, loss=loss: loss(replica(torch.randn(3, 4))), steps=2)


def outputs_partly_unused_in_the_loss(comm: ddp.Communicator) -> None:
    torch.manual_seed(0)
    compare(comm, TwoHeads(Pair), lambda replica: replica(torch.randn(3, 4)).first.sum(), find_unused_parameters=True)


def an_output_changed_in_place(comm: ddp.Communicator) -> None:
    torch.manual_seed(0)
    compare(comm, mlp(4, 3, 2), lambda replica: replica(torch.randn(3, 4)).mul_(2).add_(1).sum())


def outputs_without_elements(comm: ddp.Communicator) -> None:
    torch.manual_seed(0)
    compare(comm, mlp(4, 3, 2), lambda replica: replica(torch.randn(0 if comm.rank == 1 else 3, 4)).sum())


# --- graphs ----------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Uses what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = mlp(4, 3), mlp(4, 3), mlp(4, 3)

    def forward(self, x: Tensor, use: str) -> Tensor:
        return torch.stack([getattr(self, name)(x) for name in use.split()]).sum(0)


class Recomputed(nn.Module):
    """A layer under activation checkpointing, used so many times; another one that is never used."""

    def __init__(self, *, reentrant: bool, times: int, unused: bool) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.reentrant, self.times = reentrant, times
        if unused:
            self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        for _ in range(self.times):
            hidden = checkpoint(lambda h: self.layer(h).tanh(), hidden, use_reentrant=self.reentrant)
        result: Tensor = self.last(hidden)
        return result


def control_flow_that_differs_by_rank(comm: ddp.Communicator) -> None:
    for kw in ({}, TINY):
        torch.manual_seed(0)
        pair = both(Branches(), {"find_unused_parameters": True}, find_unused_parameters=True, **kw)
        for step in range(6):
            use = ["left", "left right", "right"][(step + comm.rank) % 3]
            for replica in pair:
                if step % 2:
                    replica.zero_grad()
                torch.manual_seed(step)
                replica(torch.randn(3, 4) + comm.rank, use).sum().backward()
            assert_same_gradients(comm, *pair)
        assert pair[0].module.never[0].weight.grad is None


def static_graphs(comm: ddp.Communicator) -> None:
    for reentrant in (True, False):
        for times, unused in ((1, False), (2, False), (3, True)):
            for kw in ({}, TINY):
                torch.manual_seed(0)
                replica = compare(
                    comm,
                    Recomputed(reentrant=reentrant, times=times, unused=unused),
                    lambda replica: replica(torch.randn(3, 4).requires_grad_()).square().sum(),
                    steps=3,
                    theirs={"static_graph": True},
                    static_graph=True,
                    **kw,
                )
                replica(torch.randn(3, 4))  # nothing to complain about


def checkpoints_around_the_replica(comm: ddp.Communicator) -> None:
    """Backward repeats the forward of the replica: that is no step, sends no buffers, and notifies nobody of inputs."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    def loss(replica: nn.Module, reentrant: bool, alone: bool) -> Tensor:
        torch.manual_seed(comm.rank)
        x, after = torch.randn(3, 4).requires_grad_(), () if alone else (nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
        output: Tensor = checkpoint(nn.Sequential(replica, *after), x, use_reentrant=reentrant)
        return output.square().sum()

    for reentrant in (False, True):
        for alone in (False, True):
            for kw in ({}, TINY, {"static_graph": True}, {"find_unused_parameters": True}):
                replica = compare(comm, made(), partial(loss, reentrant=reentrant, alone=alone), steps=2, **kw)
                assert replica.num_steps == 2

    def uneven(kind: Any, recomputes: bool) -> list[Tensor]:
        torch.manual_seed(1)
        replica, after, joins = kind(made()), nn.Linear(4, 4), kind is ddp.DistributedDataParallel
        with replica.join() if joins else nullcontext():
            for batch in range(2 + comm.rank * joins):
                net, x = nn.Sequential(replica, after), torch.full((3, 4), batch - comm.rank + 0.5).cumsum(0)
                with replica.no_sync() if batch == 0 else nullcontext():
                    output = checkpoint(net, x, use_reentrant=False) if recomputes else net(x)
                    output.square().sum().backward()
        return [each.grad.clone() for each in replica.parameters()]

    for kind in (ddp.DistributedDataParallel, ddp.BucketedDataParallel, ddp.NaiveDataParallel):
        assert all(map(torch.equal, uneven(kind, False), uneven(kind, True))), kind

    module, x = made(), torch.randn(3, 4) + comm.rank
    twin = copy.deepcopy(module)
    checkpoint(ddp.DistributedDataParallel(module), x, use_reentrant=False).sum().backward()
    twin(x)
    twin(x)
    assert torch.equal(module[1].running_mean, twin[1].running_mean)


def a_layer_used_twice_under_reentrant_checkpointing_is_an_error_with_a_name(comm: ddp.Communicator) -> None:
    replica = ddp.DistributedDataParallel(Recomputed(reentrant=True, times=2, unused=False), **TINY)
    replica(torch.randn(3, 4).requires_grad_()).sum().backward()  # the first step reduces nothing before the end
    with pytest.raises(RuntimeError, match=r"layer\..* got a gradient in step 2 after bucket .*static_graph=True"):
        replica(torch.randn(3, 4).requires_grad_()).sum().backward()
    with pytest.raises(RuntimeError, match="broke off"):
        replica(torch.randn(3, 4))
    comm.barrier()


def a_layer_used_twice_beside_others_in_its_bucket(comm: ddp.Communicator) -> None:
    """As many gradients have come as the bucket has places, but not those of all."""

    class Longer(Recomputed):
        def __init__(self) -> None:
            super().__init__(reentrant=True, times=2, unused=False)
            self.before = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.before(x))

    torch.manual_seed(0)
    module, x = Longer(), torch.randn(3, 4) + comm.rank
    alone = copy.deepcopy(module)
    replica = ddp.DistributedDataParallel(module, bucket_cap_mb_list=[128 / 2**20, 256 / 2**20])
    for _ in range(3):
        replica.zero_grad()
        replica(x.clone().requires_grad_()).square().sum().backward()
        assert replica.bucket_layout[1] == ["layer.bias", "layer.weight", "first.bias", "first.weight"]
        assert len(replica.bucket_layout) == 3
    alone(x.clone().requires_grad_()).square().sum().backward()
    for p, q in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, comm.all_reduce(q.grad, "mean"))


def gradients_of_gradients(comm: ddp.Communicator) -> None:
    """A penalty on the norm of the mean gradient; against one process on the whole batch."""
    torch.manual_seed(0)
    module = mlp(4, 3, 2).double()
    alone = copy.deepcopy(module)
    inputs = torch.randn(comm.world_size, 5, 4, dtype=torch.float64)
    for kw in ({}, TINY):
        replica = ddp.DistributedDataParallel(module, **kw)
        for net, x in ((replica, inputs[comm.rank]), (alone, inputs.flatten(0, 1))):
            net.zero_grad()
            net(x).square().sum(1).mean().backward(create_graph=True)
            gradients = [p.grad for p in net.parameters()]
            assert all(g.requires_grad for g in gradients)
            penalty = sum(g.square().sum() for g in gradients)
            penalty.backward()
        for p, q in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)
        verify_replicas(comm, [(n, p.grad.detach()) for n, p in module.named_parameters()])
        replica.zero_grad()
        alone.zero_grad()
        for net, x in ((replica, inputs[comm.rank]), (alone, inputs.flatten(0, 1))):
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)  # as in a Wasserstein GAN
            slope.square().sum(1).mean().backward()
        for (name, p), q in zip(module.named_parameters(), alone.parameters(), strict=True):
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12, msg=name)
        module.zero_grad()


def other_gradients_do_not_communicate(comm: ddp.Communicator) -> None:
    module = mlp(4, 3, 2)
    replica = ddp.DistributedDataParallel(module)
    replica(torch.randn(3, 4)).sum().backward()
    module.zero_grad()
    before = comm.num_calls
    x = torch.randn(3, 4, requires_grad=True)
    torch.autograd.grad(replica(x).sum(), x)
    torch.autograd.grad(replica(x).sum(), list(module.parameters()))
    replica(x).sum().backward(inputs=[x])
    assert x.grad is not None
    assert comm.num_calls - before == 0, "only forwards, and no buffers: nothing to send"
    assert all(p.grad is None for p in module.parameters())
    replica(x).sum().backward()
    verify_replicas(comm, [(n, p.grad) for n, p in module.named_parameters()])


def several_backwards(comm: ddp.Communicator) -> None:
    """Two forwards and one backward, two forwards and two, one forward and two: sums of means."""
    torch.manual_seed(0)
    module = mlp(4, 3, 2).double()
    replica = ddp.DistributedDataParallel(module, **TINY)
    x, y = torch.randn(2, 3, 4, dtype=torch.float64) + comm.rank

    def expected() -> list[Tensor]:
        alone = copy.deepcopy(module)
        alone.zero_grad()
        (alone(x).sum() + alone(y).square().sum()).backward()
        means = [p.grad for p in alone.parameters()]
        for mean in means:
            dist.all_reduce(mean)
        return [mean / comm.world_size for mean in means]

    def at_once() -> None:
        (replica(x).sum() + replica(y).square().sum()).backward()

    def one_by_one() -> None:
        first, second = replica(x).sum(), replica(y).square().sum()
        first.backward()
        second.backward()

    def twice_through_one() -> None:
        both_outputs = replica(torch.cat([x, y]))
        both_outputs[:3].sum().backward(retain_graph=True)
        both_outputs[3:].square().sum().backward()

    for way in (at_once, one_by_one, twice_through_one):
        replica.zero_grad()
        way()
        for p, mean in zip(module.parameters(), expected(), strict=True):
            torch.testing.assert_close(p.grad, mean, rtol=1e-12, atol=1e-12)


def hooks_of_the_user(comm: ddp.Communicator) -> None:
    calls: list[str] = []
    module = mlp(4, 3, 2)
    module[0].register_forward_hook(lambda *_: calls.append("forward"))
    module[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    module[0].weight.register_hook(lambda gradient: gradient * 2)
    twin = copy.deepcopy(module)
    twin[0].weight.register_hook(lambda gradient: gradient * 2)
    pair = ddp.DistributedDataParallel(module), nn.parallel.DistributedDataParallel(twin)
    pair[0].register_forward_hook(lambda *_: calls.append("of the replica"))
    torch.manual_seed(comm.rank)
    x = torch.randn(3, 4, requires_grad=True)
    for replica in pair:
        replica(x).sum().backward()
    assert_same_gradients(comm, *pair)
    assert calls[:3] == ["forward", "of the replica", "backward"]


def a_wrapper_inside_a_wrapper(comm: ddp.Communicator) -> None:
    torch.manual_seed(0)
    inner = mlp(4, 3)
    pair = both(nn.Sequential(inner, nn.Linear(3, 2)), {})
    nested = copy.deepcopy(pair[0].module)
    nested[0] = ddp.DistributedDataParallel(nested[0], **TINY)
    outer = ddp.DistributedDataParallel(nested, **TINY)
    only = ddp.DistributedDataParallel(ddp.DistributedDataParallel(copy.deepcopy(pair[0].module)))
    x = torch.randn(3, 4) + comm.rank
    for replica in (*pair, outer, only):
        for _ in range(2):
            replica.zero_grad()
            replica(x).square().sum().backward()
    for p, q, r in zip(outer.parameters(), pair[1].parameters(), only.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
        torch.testing.assert_close(r.grad, q.grad)


class Manual(nn.Module):
    """Its forward runs backward itself, several times, as Lightning's manual optimization does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.zeros(1)), []

    def forward(self, x: Tensor, contexts: list[Any]) -> None:
        for context in contexts:
            self.weight.grad = None
            with context:
                (self.weight * x).sum().backward()
            self.seen.append(self.weight.grad.item())


def a_forward_that_runs_backward_itself(comm: ddp.Communicator) -> None:
    for training in (True, False):
        replica = ddp.DistributedDataParallel(Manual()).train(training)
        mine, mean = 2.0 * comm.rank, comm.world_size - 1.0
        for _ in range(2):
            replica(torch.tensor(mine), [nullcontext(), replica.no_sync(), nullcontext()])
        with replica.no_sync():
            replica(torch.tensor(mine), [nullcontext()])
        with pytest.raises(TypeError):
            replica(torch.tensor(mine), [nullcontext(), None])
        before = comm.num_calls
        replica.module(torch.tensor(mine), [nullcontext()])  # nothing is expected after a forward that has failed
        assert comm.num_calls == before
        assert replica.module.seen == [mean, mine, mean, mean, mine, mean, mine, mean, mine]


class Nothing(torch.autograd.Function):
    """The identity, whose gradient is undefined."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> None:
        return None


def undefined_gradients(comm: ddp.Communicator) -> None:
    """On every rank: None stays None, as in one process. On some: zeros from those. Large ones, too."""

    def loss_of(replica: Any, *, on: range) -> Tensor:
        out = replica(torch.randn(3, 4) + comm.rank)
        return out.first.sum() + (Nothing.apply(out.second) if comm.rank in on else out.second).square().sum()

    for pack in (TwoHeads, partial(TwoHeads, width=20_000)):
        for kw in ({"find_unused_parameters": True}, {"find_unused_parameters": True, **TINY}, {"static_graph": True}):
            for on in (range(comm.world_size), range(1, comm.world_size)):
                torch.manual_seed(0)
                replica = compare(comm, pack(Pair), partial(loss_of, on=on), **kw)
                assert (replica.module.right.weight.grad is None) == (0 in on)
    pair = both(TwoHeads(Pair), find_unused_parameters=True)
    another = ddp.DistributedDataParallel(pair[0].module, find_unused_parameters=True)
    seen: tuple[list[bool], list[bool]] = [], []
    for replica, looks in zip(pair, seen, strict=True):
        if comm.rank == 0:  # this hook and those of the other replica harm nothing, since they only look
            weight = replica.module.right.weight
            weight.register_post_accumulate_grad_hook(lambda p, looks=looks: looks.append(p.grad is None))
    for step in range(4):
        for replica in pair:
            replica.zero_grad()
            torch.manual_seed(step)
            loss_of(replica, on=range(comm.world_size) if step % 3 else range(0)).backward()
        assert_same_gradients(comm, *pair)
    assert seen[0] == seen[1] == ([False, True, True, False] if comm.rank == 0 else [])
    del another
    for kw in ({"static_graph": True}, {}):
        net = TwoHeads(Pair)
        if kw:
            net.never = nn.Linear(2, 2)
        replica = ddp.DistributedDataParallel(net, **kw, **TINY)  # torch's class leaves zeros here
        for step in range(8):
            replica.zero_grad()
            if step > 3:  # divided by a count that is far larger than the number of ranks
                replica.ride_along(Totals(1.0, 1 << 20))
            if step > 5 and comm.rank == 1:
                replica.reduce_without_backward()
            else:
                loss_of(replica, on=range(comm.world_size) if step % 2 else range(0)).backward()
            assert (net.right.weight.grad is None) == (step % 2 == 1), step
    replica.zero_grad()
    Nothing.apply(replica(torch.randn(3, 4)).first).sum().backward()
    with pytest.raises(UnusedParameters, match=r"rank 0: right\.weight \(4\), right\.bias \(5\)\n"):
        replica(torch.randn(3, 4))
    assert all(p.grad is None for p in net.parameters())


# --- parameters ------------------------------------------------------------------------------------------------------


def functional_calls(comm: ddp.Communicator) -> None:
    module = nn.Linear(2, 1)
    replica = ddp.DistributedDataParallel(module)
    given = {"module.weight": torch.ones(1, 2, requires_grad=True), "module.bias": torch.zeros(1, requires_grad=True)}
    before = comm.num_calls
    torch.func.functional_call(replica, given, torch.full((1, 2), float(comm.rank))).sum().backward()
    assert comm.num_calls == before
    assert module.weight.grad is None
    assert given["module.weight"].grad.tolist() == [[comm.rank, comm.rank]]
    replica(torch.full((1, 2), float(comm.rank))).sum().backward()
    assert module.weight.grad.tolist() == [[(comm.world_size - 1) / 2] * 2]
    torch.manual_seed(0)
    pair = both(mlp(4, 3, 2), **TINY)
    for each in pair:
        each.zero_grad()
        scaled = {name: p * 0.9 for name, p in each.named_parameters()}  # gradients do come to our parameters
        torch.func.functional_call(each, scaled, torch.ones(3, 4) + comm.rank).square().sum().backward()
    assert_same_gradients(comm, *pair)


def frozen_and_unfrozen(comm: ddp.Communicator) -> None:
    torch.manual_seed(0)
    pair = both(mlp(4, 4, 4, 2), {"find_unused_parameters": True}, **TINY)
    for trained in ([0, 1, 2], [1, 2], [2], [0, 1, 2], [0]):
        for replica in pair:
            for layer in (0, 1, 2):
                replica.module[2 * layer].requires_grad_(layer in trained)
            replica.zero_grad()
            replica(torch.randn(3, 4, generator=torch.Generator().manual_seed(comm.rank))).square().sum().backward()
        assert_same_gradients(comm, *pair)
    net = mlp(4, 4, 2)
    net[0].requires_grad_(False)
    replica = ddp.DistributedDataParallel(net)
    net[0].requires_grad_(True)  # torch's class would never synchronise it
    replica(torch.randn(3, 4) + comm.rank).sum().backward()
    verify_replicas(comm, [(n, p.grad) for n, p in net.named_parameters()])


def frozen_wholly_and_back(comm: ddp.Communicator) -> None:
    """As the discriminator of a GAN is while the generator is trained; buckets are made once for each state."""
    torch.manual_seed(0)
    pair = both(mlp(4, 4, 2), {"find_unused_parameters": True}, **TINY)
    x = torch.randn(3, 4) + comm.rank
    for step in range(6):
        for replica in pair:
            replica.module.requires_grad_(step % 2 == 0)
            replica.zero_grad()
            leaf = x.clone().requires_grad_()
            replica(leaf).square().sum().backward()
            assert leaf.grad is not None
        assert_same_gradients(comm, *pair)
    assert len(pair[0]._layouts._by_needed) == 2


def frozen_between_forward_and_backward(comm: ddp.Communicator) -> None:
    for kw in ({}, {"find_unused_parameters": True}):
        net = mlp(4, 4, 2)
        replica = ddp.DistributedDataParallel(net, **kw)
        loss = replica(torch.randn(3, 4) + comm.rank).sum()
        net[0].weight.requires_grad_(False)
        loss.backward()
        verify_replicas(comm, [(n, p.grad) for n, p in net.named_parameters() if p.grad is not None])


def frozen_while_the_backward_of_an_earlier_forward_runs(comm: ddp.Communicator) -> None:
    """What is frozen when backward reaches it gets no gradient, as in one process; the rest is averaged."""
    for kw in ({}, {"find_unused_parameters": True, **TINY}):
        torch.manual_seed(0)
        alone = mlp(2, 3, 1)
        replica = ddp.DistributedDataParallel(copy.deepcopy(alone), **kw)
        for _ in range(3):
            for net, body in ((replica, replica.module), (alone, alone)):
                torch.manual_seed(comm.rank)
                net.zero_grad()
                first = net(torch.randn(3, 2)).sum()
                body[2].requires_grad_(False)
                second = net(torch.randn(3, 2)).square().sum()
                first.backward()
                body[2].requires_grad_(True)
                second.backward()
            assert replica.module[2].weight.grad is alone[2].weight.grad is None
            for p, q in zip(replica.module[0].parameters(), alone[0].parameters(), strict=True):
                torch.testing.assert_close(p.grad, comm.all_reduce(q.grad, "mean"))


class Toggling(nn.Module):
    """Freezes and unfreezes inside its forward, where it may also run backward, as Lightning's manual optimization."""

    def __init__(self, *, is_manual: bool, leaves_frozen: bool) -> None:
        super().__init__()
        self.first, self.second = mlp(2, 3, 2), mlp(2, 3, 1)
        self.is_manual, self.leaves_frozen = is_manual, leaves_frozen

    def forward(self, x: Tensor, announce: Callable[[Tensor], None]) -> Tensor | None:
        self.first.requires_grad_(not self.is_manual), self.second.requires_grad_(True)
        loss = self.second(self.first(x)).square().sum()
        if not self.is_manual:
            return loss
        announce(loss)
        loss.backward()
        self.first.requires_grad_(True), self.second.requires_grad_(False)
        loss = self.second(self.first(x)).sin().sum()
        announce(loss)
        loss.backward()
        self.second.requires_grad_(not self.leaves_frozen)
        return None


def unfrozen_inside_a_forward(comm: ddp.Communicator) -> None:
    for is_manual, announces, leaves_frozen in itertools.product((False, True), repeat=3):
        torch.manual_seed(0)
        alone = Toggling(is_manual=is_manual, leaves_frozen=leaves_frozen)
        replica = ddp.DistributedDataParallel(copy.deepcopy(alone), find_unused_parameters=is_manual, **TINY)
        for step in range(4):
            for net, body in ((replica, replica.module), (alone, alone)):
                body.second.requires_grad_(not (leaves_frozen and step > 0))
                net.zero_grad()
                x = torch.randn(3, 2, generator=torch.Generator().manual_seed(10 * step + comm.rank))
                is_told = announces and net is replica
                loss = net(x, lambda loss: replica.reducer.prepare_for_backward([loss]) if is_told else None)  # noqa: B023
                if loss is not None:
                    loss.backward()
            for (name, p), q in zip(replica.module.named_parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(p.grad, comm.all_reduce(q.grad, "mean"), msg=lambda m, n=name: f"{n}: {m}")


def unfrozen_too_late_to_be_averaged(comm: ddp.Communicator) -> None:
    """Buckets have been sent when the gradient comes; every rank is told."""
    net = mlp(2, 3, 1)
    net.register_forward_hook(lambda _module, _x, out: out.sum().backward())
    replica = ddp.DistributedDataParallel(net, **TINY)
    for _ in range(2):
        net[0].requires_grad_(False)
        replica(torch.randn(3, 2))
    net.register_forward_pre_hook(lambda module, x: (module.requires_grad_(True), x)[1])
    with pytest.raises(RuntimeError, match="or through one that unfreezes"):
        replica(torch.randn(3, 2))


def all_forwards_then_all_backwards(comm: ddp.Communicator) -> None:
    """Parameters are frozen in between, as in a GAN: a backward is averaged like its forward's parameters."""

    def losses(critic: nn.Module, generator: nn.Module, x: Tensor, way: str) -> list[Tensor]:
        body, z = critic.module if hasattr(critic, "module") else critic, 2 * x + 1
        found = []
        if way == "critic":
            found.append(critic(x).sum())
            body.requires_grad_(False)
            found.append(critic(generator(z)).square().sum())
        elif way == "generator":
            found.append(critic(generator(z)).square().sum())
            generator.requires_grad_(False)
            found.append(critic(x).sum() - critic(generator(z)).sum())
        elif way == "layers":
            found.append(critic(x).sum())
            body[0].requires_grad_(False)
            found.append(critic(generator(z)).square().sum())
            body.requires_grad_(False)
            found.append(critic(generator(z)).sin().sum())
        body.requires_grad_(True), generator.requires_grad_(True)
        return found

    for kw in ({}, TINY, {"find_unused_parameters": True}):
        for way in ("critic", "generator", "layers"):
            torch.manual_seed(0)
            nets = mlp(2, 3, 3, 1).double(), mlp(2, 3, 2).double()
            alone = copy.deepcopy(nets)
            ours = [ddp.DistributedDataParallel(net, **kw) for net in nets]
            theirs = [nn.parallel.DistributedDataParallel(copy.deepcopy(net)) for net in nets]
            orders = list(itertools.permutations(range(3 if way == "layers" else 2)))
            for order in orders if kw is TINY else orders[::5]:
                x = torch.randn(3, 2, dtype=torch.float64) + comm.rank
                for pair in (ours, alone, theirs) if way == "critic" else (ours, alone):
                    for net in pair:
                        net.zero_grad()
                    terms = losses(*pair, x, way)
                    for index in order:
                        terms[index].backward()
                for net, bare, other in zip(nets, alone, theirs, strict=True):
                    for p, q, r in zip(net.parameters(), bare.parameters(), other.module.parameters(), strict=True):
                        torch.testing.assert_close(p.grad, comm.all_reduce(q.grad, "mean"))
                        assert way != "critic" or torch.allclose(p.grad, r.grad, rtol=1e-12, atol=1e-12)
                        for each in (p, q, r):
                            each.data.sub_(p.grad, alpha=0.1)
                verify_replicas(comm, [parameter for net in nets for parameter in net.named_parameters()])
        for one, two in ((0, 1), (1, 0)):  # one backward through both
            for pair in (ours, alone):
                for net in pair:
                    net.zero_grad()
                terms = losses(*pair, x, "critic")
                (terms[one] + terms[two]).backward()
            for p, q in zip(nets[0].parameters(), alone[0].parameters(), strict=True):
                torch.testing.assert_close(p.grad, comm.all_reduce(q.grad, "mean"))
    net = mlp(2, 2, 1)
    replica = ddp.DistributedDataParallel(net, buffers="none")
    terms = []
    for frozen in (0, 2):
        net.requires_grad_(True)[frozen].requires_grad_(False)
        terms.append(replica(torch.ones(1, 2, requires_grad=True)).sum())
    net.requires_grad_(True)
    with pytest.raises(RuntimeError, match="one backward goes through two forwards, between which"):
        sum(terms).backward()
    comm.barrier()


def gradients_of_no_sync_are_not_forgotten(comm: ddp.Communicator) -> None:
    """Whatever happens to the buckets in between."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    torch.manual_seed(0)
    module = mlp(4, 4, 2)
    x = torch.randn(3, 4) + comm.rank
    for freeze, hook in ((True, False), (False, True), (True, True)):
        pair = both(copy.deepcopy(module), {"find_unused_parameters": True}, find_unused_parameters=True)
        for replica in pair:
            if hook:
                replica.register_comm_hook(None, default_hooks.allreduce_hook)
            replica(x).sum().backward()
            replica.zero_grad()
            with replica.no_sync():
                replica(x).square().sum().backward()
            if freeze:
                replica.module[0].bias.requires_grad_(False)
                replica.module[0].bias.grad = None
        if freeze:
            with pytest.raises(ConfigError, match=r"0\.bias: frozen with a gradient from no_sync"):
                pair[0](x)
            continue
        for replica in pair:
            replica(x).sum().backward()
        assert_same_gradients(comm, *pair)
    replica = ddp.DistributedDataParallel(copy.deepcopy(module))
    plain = ddp.DistributedDataParallel(copy.deepcopy(module))
    for each in (replica, plain):
        each(x).sum().backward()
        each.zero_grad()
        with each.no_sync():
            each(x).square().sum().backward()
    replica.register_comm_hook(None, default_hooks.allreduce_hook)
    for each in (replica, plain):
        each(x).sum().backward()
    for p, q in zip(replica.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    layers = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    replica, words = ddp.DistributedDataParallel(layers), torch.arange(2) + comm.rank
    for frozen in layers:
        replica.zero_grad()
        with replica.no_sync():
            loss = replica(words).sum()
            frozen.requires_grad_(False)
            loss.backward()  # gives the frozen layer nothing that could be sent
        replica(words).sum().backward()
        assert frozen.weight.grad is None
        frozen.requires_grad_(True)


def a_hook_outlives_freezing(comm: ddp.Communicator) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    torch.manual_seed(0)
    pair = both(mlp(4, 4, 2), {"find_unused_parameters": True}, **TINY)
    for replica in pair:
        replica.register_comm_hook(None, default_hooks.allreduce_hook)
        for trained in (True, False, True):
            replica.module[0].requires_grad_(trained)
            replica.zero_grad()
            replica(torch.randn(3, 4, generator=torch.Generator().manual_seed(comm.rank))).square().sum().backward()
    assert_same_gradients(comm, *pair)


def replicas_that_are_gone_leave_nothing_behind(comm: ddp.Communicator) -> None:
    import gc

    module = mlp(4, 3, 2)

    def num_regions() -> int:
        return len(comm._collectives.group._memory._regions)

    gc.collect()
    before = num_regions()
    for _ in range(3):
        replica = ddp.DistributedDataParallel(module)
        replica(torch.randn(3, 4)).sum().backward()
        observers = weakref.ref(replica._observers)
        del replica
        module.zero_grad()
        gc.collect()
        assert num_regions() == before
        assert observers() is None


def static_graphs_that_are_not(comm: ddp.Communicator) -> None:
    """A parameter more, one less, and one less on one rank alone: all ranks say which."""
    x = torch.randn(3, 4)
    one, both_sides, all_ranks = "left", "left right", range(comm.world_size)
    for first, then, mistaken in ((one, both_sides, all_ranks), (both_sides, one, all_ranks), (both_sides, one, [1])):
        replica = ddp.DistributedDataParallel(Branches(), static_graph=True)
        for _ in range(2):
            replica(x, first).sum().backward()
        with pytest.raises(UnusedParameters, match=r"graph has changed.*\n(.*\n)*  rank 1: right\.0\.weight \(2\) got"):
            replica(x, then if comm.rank in mistaken else first).sum().backward()
    comm.barrier()


def large_halves_and_conjugates(comm: ddp.Communicator) -> None:
    """float16 sums that would overflow before the division; gradients that torch conjugates when it is asked to."""

    class Scaled(nn.Module):
        def __init__(self, dtype: torch.dtype, numel: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(numel, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight.conj() if self.weight.is_complex() else self.weight) * x

    half = ddp.DistributedDataParallel(Scaled(torch.float16, 5))
    half(torch.full((5,), 40000.0, dtype=torch.float16)).sum().backward()
    assert half.module.weight.grad.tolist() == pytest.approx([40000.0] * 5, rel=1e-3)
    pair = both(Scaled(torch.complex64, 2_200_000))
    for replica in pair:
        torch.view_as_real(replica(torch.tensor(1.5 + 3j))).sum().backward()
    assert_same_gradients(comm, *pair)


def changed_parameters_are_an_error_with_a_name(comm: ddp.Communicator) -> None:
    def extend(net: nn.Sequential) -> None:
        net.append(nn.Linear(2, 2))

    def add_at_the_end(net: nn.Sequential) -> None:
        net[2].register_parameter("scale", nn.Parameter(torch.ones(2)))

    def remove_at_the_end(net: nn.Sequential) -> None:
        del net[2].bias

    def replace(net: nn.Sequential) -> None:
        net[0].weight = nn.Parameter(net[0].weight.detach().clone())

    def remove(net: nn.Sequential) -> None:
        net[0].register_parameter("bias", None)

    for change, message in (
        (extend, "added after the replica was made: 3.bias, 3.weight"),
        (add_at_the_end, "added after the replica was made: 2.scale"),
        (remove_at_the_end, "removed after the replica was made: 2.bias"),
        (replace, "replaced after the replica was made: 0.weight"),
        (remove, "removed after the replica was made: 0.bias"),
    ):
        net = mlp(4, 3, 2)
        replica = ddp.DistributedDataParallel(net)
        replica(torch.randn(2, 4)).sum().backward()
        change(net)
        with pytest.raises(ConfigError, match=message):
            replica(torch.randn(2, 4))
    net = mlp(4, 3, 2)
    replica = ddp.DistributedDataParallel(net)
    net.append(nn.Dropout(0.1))  # has none
    replica(torch.randn(2, 4)).sum().backward()


def ignored_by_name(comm: ddp.Communicator) -> None:
    pair = []
    for wrap in (ddp.DistributedDataParallel, nn.parallel.DistributedDataParallel):
        torch.manual_seed(comm.rank)
        net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        wrap._set_params_and_buffers_to_ignore_for_model(net, ["0.weight", "1.running_mean"])
        pair.append(wrap(net))
    x = torch.randn(3, 4) + comm.rank
    for replica in pair:
        for _ in range(2):
            replica(x).square().sum().backward()
    ours, theirs = (dict(replica.module.named_parameters()) for replica in pair)
    for name in ours:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad)
    gathered = comm.all_gather(ours["0.weight"].detach())
    assert not torch.equal(gathered[0], gathered[1]), "initial values stay each rank's own"


class ManyTypes(nn.Module):
    """Sparse, complex, double, bfloat16 and float, interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(20, 6, sparse=True, mode="sum")
        self.wide = nn.Linear(6, 6).double()
        self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.narrow = nn.Linear(6, 6).bfloat16()
        self.more = nn.Embedding(20, 6, sparse=True)
        self.plain = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x) + self.more(x).sum(1)
        hidden = (self.wide(hidden.double()) * self.phase).abs()
        result: Tensor = self.plain(self.narrow(hidden.bfloat16()).float())
        return result


def gradients_of_many_types(comm: ddp.Communicator) -> None:
    for set_to_none in (True, False):
        for kw in ({}, TINY):
            torch.manual_seed(0)
            replica = compare(
                comm,
                ManyTypes(),
                lambda replica: replica(torch.randint(0, 20, (3, 5))).square().mean(),
                set_to_none=set_to_none,
                rate=0,  # in bfloat16 it matters where one divides, and would from step to step
                **kw,
            )
            assert replica.module.words.weight.grad.is_sparse
    kinds = [{replica.module.get_parameter(name).dtype for name in bucket} for bucket in replica.bucket_layout]
    assert all(len(kind) == 1 for kind in kinds)


def an_unannounced_sparse_gradient_is_an_error_with_a_name(comm: ddp.Communicator) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(20, 6))

        def forward(self, x: Tensor) -> Tensor:
            return F.embedding(x, self.table, sparse=True)

    replica = ddp.DistributedDataParallel(Functional())
    with pytest.raises(RuntimeError, match=r"table.*sparse.*nn\.Embedding"):
        replica(torch.tensor([1, 2])).sum().backward()
    comm.barrier()


# --- layouts ---------------------------------------------------------------------------------------------------------


class Named(nn.Module):
    """Layers that are used by name."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: Tensor, use: str) -> Tensor:
        return torch.stack([self.layers[name](x).float().square().sum() for name in use]).sum()

    def train_only(self, names: str) -> None:
        for name, layer in self.layers.items():
            layer.requires_grad_(name in names)


def a_hook_registered_before_backwards_of_earlier_forwards(comm: ddp.Communicator) -> None:
    """Also before those whose layout is not kept any more."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    torch.manual_seed(0)
    net = Named(a=nn.Linear(2, 2), b=nn.Linear(2, 2), c=nn.Linear(2, 2))
    replica, losses = ddp.DistributedDataParallel(net, find_unused_parameters=True), []
    for name in "abc":
        net.train_only(name)
        losses.append(replica(torch.ones(1, 2) + comm.rank, name))
    replica.register_comm_hook(None, default_hooks.allreduce_hook)
    replica.ride_along(Totals(1.0, 3 + comm.rank))
    net.train_only("abc")
    losses[0].backward()
    assert replica.totals.num_items == sum(range(3, 3 + comm.world_size))
    verify_replicas(comm, [("a", net.layers["a"].weight.grad)])


def an_order_that_is_adopted_gives_the_same_buckets(comm: ddp.Communicator) -> None:
    net = Named(a=mlp(8, 8, 8, 8).bfloat16(), b=mlp(8, 8, 8, 8), c=mlp(8, 8).bfloat16())
    caps = {"bucket_cap_mb_list": [100 / 2**20, 300 / 2**20, 600 / 2**20]}
    replica = ddp.DistributedDataParallel(net, **caps)
    order = sorted((name for bucket in replica.bucket_layout for name in bucket), key=lambda name: name[::-1])
    replica.adopt_gradient_order(order)
    twin = ddp.DistributedDataParallel(copy.deepcopy(net), **caps)
    twin.adopt_gradient_order(replica.gradient_order)
    assert twin.bucket_layout == replica.bucket_layout
    assert twin.gradient_order == replica.gradient_order == order


def static_graphs_of_several_sets_of_parameters(comm: ddp.Communicator) -> None:
    """Each set has parameters of its own that are never used; the other set's come too late for nobody."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(2, 2) for name in ("a", "b", "u", "v")}
    net = Named(**layers)
    replica = ddp.DistributedDataParallel(net, static_graph=True, **TINY)
    for step in range(8):
        used, unused = ("a", "u") if step % 2 == 0 else ("b", "v")
        net.train_only(used + unused)
        replica.zero_grad()
        replica(torch.ones(1, 2) + comm.rank, used).backward()
        assert layers[unused].weight.grad is None, step
        verify_replicas(comm, [(used, layers[used].weight.grad)])
    assert replica.logging_data()["order_is_learned"]


def layouts_that_are_superseded_give_their_memory_back(comm: ddp.Communicator) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def num_regions() -> int:
        return len(comm._collectives.group._memory._regions)

    before = num_regions()
    replica = ddp.DistributedDataParallel(mlp(4, 3, 2), **TINY)
    replica.reduce_without_backward()
    for _ in range(3):
        replica(torch.ones(1, 4)).sum().backward()
        assert num_regions() - before == 4
        replica.adopt_gradient_order(list(reversed(replica.gradient_order)))
    replica.register_comm_hook(None, default_hooks.allreduce_hook)
    replica(torch.ones(1, 4)).sum().backward()
    assert num_regions() == before
    for _ in range(2000):
        replica.adopt_gradient_order(list(reversed(replica.gradient_order)))
    assert len(replica.bucket_layout) == 4


def gradients_of_no_sync_wait_until_their_parameters_take_part(comm: ddp.Communicator) -> None:
    layers = {name: nn.Linear(1, 1, bias=False) for name in "gd"}
    net = Named(**layers)
    replica = ddp.DistributedDataParallel(net, find_unused_parameters=True)
    for layer in layers.values():
        nn.init.ones_(layer.weight)
    x = torch.full((1, 1), 1.0 + comm.rank)
    net.train_only("g")
    earlier = replica(x, "g")
    net.train_only("gd")
    with replica.no_sync():
        replica(x, "d").backward()
    earlier.backward()
    replica(x, "g").backward()
    mean = sum(2 * (1.0 + rank) ** 2 for rank in range(comm.world_size)) / comm.world_size
    assert layers["d"].weight.grad.item() == pytest.approx(mean)
    assert layers["g"].weight.grad.item() == pytest.approx(2 * mean)


def gradients_that_a_hook_of_the_user_puts_elsewhere(comm: ddp.Communicator) -> None:
    for width in (2, 200):  # small, and worth a copy of its own
        net = nn.Linear(width, width, bias=False)
        pair = both(net, {})
        for replica in pair:
            weight = replica.module.weight
            weight.register_post_accumulate_grad_hook(lambda p: setattr(p.grad, "data", p.grad.data * 2))
        for _ in range(3):
            for replica in pair:
                replica.zero_grad()
                replica(torch.ones(1, width) + comm.rank).sum().backward()
            assert_same_gradients(comm, *pair)


# --- contexts --------------------------------------------------------------------------------------------------------


def types_changed_after_wrapping(comm: ddp.Communicator) -> None:
    early = ddp.DistributedDataParallel(nn.Linear(3, 2)).bfloat16()  # buckets are laid out anew
    early.ride_along(Totals(num_items=1001))
    early(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert early.totals.num_items == 1001 * comm.world_size
    for kw in ({}, {"find_unused_parameters": True}):
        for set_to_none in (True, False):
            net = nn.Linear(3, 2, bias=False)
            late = ddp.DistributedDataParallel(nn.Sequential(net), **kw)
            for convert in (nn.Module.float, nn.Module.double, lambda each: each.module.bfloat16(), nn.Module.float):
                convert(late)
                late(torch.full((1, 3), float(comm.rank), dtype=net.weight.dtype)).sum().backward()
                assert net.weight.grad.dtype == net.weight.dtype
                assert net.weight.grad.tolist() == [[(comm.world_size - 1) / 2] * 3] * 2
                late.zero_grad(set_to_none=set_to_none)
            assert len(late._layouts._by_needed) == 1


def memory_format_changed_after_wrapping(comm: ddp.Communicator) -> None:
    """Gradients lie in their buckets as the parameters do. torch's class is far off here, so one process is asked."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 1))
    alone, replica = copy.deepcopy(net), ddp.DistributedDataParallel(net, **TINY)
    batch = torch.randn(comm.world_size, 2, 3, 3)
    for memory_format in (torch.channels_last, torch.contiguous_format):
        for each in (alone, replica):
            each.to(memory_format=memory_format)
        for _ in range(2):
            for each, samples in ((alone, batch), (replica, batch[comm.rank, None])):
                each.zero_grad()
                each(samples).mean().backward()
            for mine, expected in zip(net.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, expected.grad)
                assert mine.grad.stride() == mine.stride()


def an_unfrozen_sparse_layer_is_not_measured(comm: ddp.Communicator) -> None:
    """Already before the forward that finds it unfrozen."""
    net = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    net[0].weight.requires_grad_(False)
    replica = ddp.DistributedDataParallel(net, comm=comm)
    assert replica.measures_parts
    net[0].weight.requires_grad_(True)
    assert not replica.measures_parts


def types_changed_on_one_rank(comm: ddp.Communicator) -> None:
    replica = ddp.DistributedDataParallel(nn.Linear(3, 2), comm=comm.subgroup(range(comm.world_size)))
    replica(torch.ones(1, 3)).sum().backward()
    if comm.rank == 1:
        replica.double()
    named, unnamed = "^parameters were converted on rank 1, and not on another one", "called different collectives"
    with pytest.raises((ReplicaMismatch, CollectiveMismatch), match=named if comm.rank == 1 else unnamed):
        replica(torch.ones(1, 3, dtype=replica.module.weight.dtype)).sum().backward()


def gradients_put_elsewhere(comm: ddp.Communicator) -> None:
    """`p.grad.data = …` moves the gradient out of its bucket."""
    torch.manual_seed(0)
    pair = both(mlp(4, 3, 2), **TINY)
    for step in range(4):
        for replica in pair:
            if step == 2:
                replica.zero_grad()
            replica(torch.randn(3, 4, generator=torch.Generator().manual_seed(comm.rank))).square().sum().backward()
        assert_same_gradients(comm, *pair)
        for replica in pair:
            for p in replica.parameters():
                p.grad.data = p.grad.data / 2


def a_sparse_layer_that_is_also_a_dense_one(comm: ddp.Communicator) -> None:
    tied = nn.ModuleList([nn.Embedding(5, 3, sparse=True), nn.Linear(3, 5, bias=False)])
    tied[1].weight = tied[0].weight
    tied.forward = lambda x: tied[1](tied[0](x))  # type: ignore[method-assign]
    replica = ddp.DistributedDataParallel(tied)
    with pytest.raises(RuntimeError, match=r"^0\.weight got a dense gradient, though its layer has sparse=True"):
        replica(torch.arange(4)).sum().backward()


def no_sync_nested_and_without_gradients(comm: ddp.Communicator) -> None:
    a_layer_each = {"bucket_cap_mb": 128 / 2**20, "first_bucket_mb": 128 / 2**20}
    for kw, num_buckets in ((TINY, 4), (a_layer_each, 2), ({}, 1)):
        torch.manual_seed(0)
        pair = both(mlp(4, 3, 2), **kw)
        assert len(pair[0].bucket_layout) == num_buckets
        x = torch.randn(3, 4) + comm.rank
        for replica in pair:
            replica(x).sum().backward()
            before = comm.num_calls
            with replica.no_sync():
                replica(x).sum().backward()
                with replica.no_sync(), torch.no_grad():
                    replica(x)
                replica(2 * x).sum().backward()
            with torch.no_grad():
                replica(x)
            assert comm.num_calls == before
            replica(x).square().sum().backward()
        assert_same_gradients(comm, *pair)


def evaluation_on_one_rank(comm: ddp.Communicator) -> None:
    """No communication where no buffers are kept equal: one rank may evaluate, with or without gradients."""
    for net, kw in ((mlp(4, 3), {}), (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), {"buffers": "none"})):
        replica = ddp.DistributedDataParallel(net, **kw)
        replica(torch.randn(3, 4)).sum().backward()
        if comm.rank == 1:
            before = comm.num_calls
            replica.eval()
            replica(torch.randn(3, 4))
            with torch.no_grad():
                replica(torch.randn(3, 4))
            assert comm.num_calls == before
            replica.train()
        replica(torch.randn(3, 4)).sum().backward()
    replica = ddp.DistributedDataParallel(nn.BatchNorm1d(4), comm=comm.subgroup(range(comm.world_size)))
    replica(torch.randn(3, 4)).sum().backward()
    if comm.rank == 1:
        with pytest.raises(CollectiveMismatch, match=r"a rank that evaluates alone calls model\.module"):
            replica.eval()(torch.randn(3, 4))
    else:
        with pytest.raises(CollectiveMismatch):
            replica.comm.barrier()


@dataclasses.dataclass
class Base:
    __slots__ = ("first",)
    first: Tensor


@dataclasses.dataclass
class Derived(Base):
    __slots__ = ("second",)
    second: Tensor


class Packing(nn.Module):
    """Packs what it has computed into something."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.pack = nn.Linear(4, 2), pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.linear(x))


def evaluation_with_gradients(comm: ddp.Communicator) -> None:
    """A backward after a forward in evaluation mode synchronises, whatever the outputs are packed in."""
    packings: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = [
        (lambda y: deque([y]), lambda packed: packed[0]),
        (lambda y: Derived(y, y.detach()), lambda packed: packed.first),
        (lambda y: (each for each in (y,)), next),
    ]
    for pack, unpack in packings:
        torch.manual_seed(0)
        pair, x = both(Packing(pack)), torch.randn(3, 4) + comm.rank
        for replica in pair:
            replica.eval()
            for _ in range(2):
                replica.zero_grad()
                unpack(replica(x)).square().sum().backward()
        assert_same_gradients(comm, *pair)


# --- copies ----------------------------------------------------------------------------------------------------------


def saved_loaded_and_copied(comm: ddp.Communicator) -> None:
    torch.manual_seed(0)
    replica, theirs = both(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), **TINY)
    x = torch.randn(3, 4) + comm.rank
    for num_steps in (0, 2):
        for _ in range(num_steps):
            for each in (replica, theirs):
                each.zero_grad()
                each(x).square().sum().backward()
        stream = io.BytesIO()
        torch.save(replica, stream)
        stream.seek(0)
        before = comm.num_calls
        loaded = torch.load(stream, weights_only=False)
        twin = copy.deepcopy(replica)
        assert comm.num_calls == before, "nothing collective"
        for name, value in replica.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value)
            assert torch.equal(twin.state_dict()[name], value)
        for each in (loaded, twin):
            for other in (each, theirs):
                other.zero_grad()
                other(x).square().sum().backward()
            assert_same_gradients(comm, each, theirs)
    if comm.rank == 0:  # one rank may load alone
        stream.seek(0)
        with torch.no_grad():
            torch.load(stream, weights_only=False).module(x)
    average = torch.optim.swa_utils.AveragedModel(replica)
    average.update_parameters(replica)


# --- order of buckets ------------------------------------------------------------------------------------------------


class Backwards(nn.Module):
    """Registers its layers in the order opposite to their use."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.middle(self.first(x).tanh()).tanh())
        return result


def the_order_is_learned(comm: ddp.Communicator) -> None:
    torch.manual_seed(0)
    sizes = {"first_bucket_mb": 20 * 4 / 2**20, "bucket_cap_mb": 20 * 4 / 2**20}
    replica = ddp.DistributedDataParallel(Backwards(), **sizes)
    assert replica.bucket_layout[0] == ["first.bias", "first.weight"]
    assert not replica.logging_data()["order_is_learned"]
    compare_pair = both(copy.deepcopy(replica.module), **sizes)
    for step in range(3):
        for each in compare_pair:
            if step == 1:
                each.zero_grad()
            each(torch.randn(3, 4, generator=torch.Generator().manual_seed(comm.rank))).square().sum().backward()
        assert_same_gradients(comm, *compare_pair)
    ours = compare_pair[0]
    assert [name.split(".")[0] for bucket in ours.bucket_layout for name in bucket][::2] == ["last", "middle", "first"]
    assert ours.logging_data()["order_is_learned"]
    for bucket in ours.reducer.buckets:
        assert all(slot.parameter.grad is slot.view for slot in bucket.slots)
    launched = [bucket["launched_s"] for bucket in ours.logging_data()["buckets"]]
    assert launched == sorted(launched)


def caps_by_bucket(comm: ddp.Communicator) -> None:
    net = mlp(*[8] * 9)  # 8 layers of 256 bytes and 32, which take 64
    one = 320 / 2**20
    for kw, sizes in (
        ({"bucket_cap_mb_list": [one, 2 * one, 3 * one]}, [1, 2, 3, 2]),
        ({"bucket_cap_mb": 2 * one, "first_bucket_mb": one}, [1, 2, 2, 2, 1]),
        ({}, [8]),
    ):
        layout = ddp.DistributedDataParallel(copy.deepcopy(net), **kw).bucket_layout
        assert [len(bucket) // 2 for bucket in layout] == sizes
    with pytest.raises(ValueError, match="exclude each other"):
        ddp.DistributedDataParallel(net, bucket_cap_mb=3, bucket_cap_mb_list=[1])
    with pytest.raises(ValueError, match="positive"):
        ddp.DistributedDataParallel(net, bucket_cap_mb=0)


# --- keywords and groups ---------------------------------------------------------------------------------------------


def keywords(comm: ddp.Communicator) -> None:
    import inspect

    accepted = set(inspect.signature(ddp.DistributedDataParallel.__init__).parameters)
    from ddp.replica.drop_in.torch_names import ACCEPTED, USE_INSTEAD

    theirs = set(inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters)
    assert theirs - accepted <= ACCEPTED | USE_INSTEAD.keys()  # torch 2.10 has fewer
    for keyword in ACCEPTED:
        ddp.DistributedDataParallel(nn.Linear(1, 1), **{keyword: True})
    for keyword, instead in USE_INSTEAD.items():
        ddp.DistributedDataParallel(nn.Linear(1, 1), **{keyword: None})
        with pytest.raises(TypeError, match=instead.split(":")[0].split("(")[0][:20]):
            ddp.DistributedDataParallel(nn.Linear(1, 1), **{keyword: [1]})
    with pytest.raises(TypeError, match="unexpected keyword 'bucket_size'"):
        ddp.DistributedDataParallel(nn.Linear(3, 1), bucket_size=3)
    with pytest.raises(ValueError, match="one process drives one device"):
        ddp.DistributedDataParallel(nn.Linear(3, 1), device_ids=[0, 1])
    with pytest.raises(ValueError, match="no parameter of the module needs a gradient"):
        ddp.DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="no shape yet"):
        ddp.DistributedDataParallel(nn.LazyLinear(2))
    with pytest.raises(ValueError, match="buffers='often': choose one of"):
        ddp.DistributedDataParallel(nn.Linear(2, 2), buffers="often")


def groups_and_meshes(comm: ddp.Communicator) -> None:
    assert ddp.DistributedDataParallel(nn.Linear(1, 1)).process_group is dist.group.WORLD
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    mine = pairs[comm.rank // 2]
    for kw in ({"process_group": mine}, {"comm": ddp.comm.session.communicator_of(mine)}):
        net = nn.Linear(1, 1)
        replica = ddp.DistributedDataParallel(net, **kw)
        replica(torch.full((1, 1), float(comm.rank))).sum().backward()
        assert net.weight.grad.item() == (2 if comm.rank == 2 else 0.5)
    assert ddp.DistributedDataParallel(nn.Linear(1, 1), process_group=mine).process_group is mine
    if comm.rank == 2:
        with pytest.raises(ConfigError, match="not in the process group"):
            ddp.DistributedDataParallel(nn.Linear(1, 1), process_group=pairs[0])
    mesh = dist.device_mesh.init_device_mesh("cpu", (comm.world_size,))
    replica = ddp.DistributedDataParallel(nn.Linear(1, 1), device_mesh=mesh)
    assert replica.device_mesh is mesh
    replica(torch.full((1, 1), float(comm.rank))).sum().backward()
    assert replica.module.weight.grad.item() == 1
    with pytest.raises(ConfigError, match="comm excludes process_group"):
        ddp.DistributedDataParallel(nn.Linear(1, 1), device_mesh=mesh, comm=comm)
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        torch.save(ddp.DistributedDataParallel(nn.Linear(1, 1), process_group=mine), io.BytesIO())


def mismatches_and_verification(comm: ddp.Communicator) -> None:
    net = mlp(4, 3, 2)
    replica = ddp.DistributedDataParallel(net)
    replica.verify_replicas()
    replica.verify_replicas(every=2)
    rate = torch.tensor(0.1)
    for step in range(2):
        if step == 1 and comm.rank == 1:
            with torch.no_grad():
                net[2].bias[0] += 1
        loss = replica(torch.randn(2, 4)).sum()
        if step == 0:
            loss.backward()
        else:
            with pytest.raises(ReplicaMismatch, match=r"2.bias is not the same on all ranks: rank\(s\) \[1\]"):
                loss.backward()
    replica.verify_replicas(every=0)
    with pytest.raises(ReplicaMismatch, match=r"2\.bias"):
        replica.verify_replicas()
    fine = ddp.DistributedDataParallel(mlp(2, 1))
    fine.verify_replicas(every=1, also=lambda: [("rate", rate + comm.rank)])
    with pytest.raises(ReplicaMismatch, match="rate is not the same"):
        fine(torch.randn(2, 2)).sum().backward()


def without_initial_synchronisation(comm: ddp.Communicator) -> None:
    torch.manual_seed(comm.rank)
    for kw, same_parameters, same_buffers in (
        ({}, True, True),
        ({"init_sync": False}, False, False),
        ({"broadcast_buffers": False}, True, False),
        ({"forward_sync_buffers": False}, True, True),
    ):
        net = nn.BatchNorm1d(3)
        nn.init.normal_(net.weight)
        net.running_mean.normal_()
        replica = ddp.DistributedDataParallel(net, **kw)
        assert (len({str(each) for each in comm.all_gather(net.weight.detach())}) == 1) == same_parameters
        assert (len({str(each) for each in comm.all_gather(net.running_mean)}) == 1) == same_buffers
        assert replica.broadcast_buffers == (not {"broadcast_buffers", "forward_sync_buffers"} & kw.keys())


CASES = [
    outputs_of_many_kinds,
    outputs_partly_unused_in_the_loss,
    an_output_changed_in_place,
    outputs_without_elements,
    control_flow_that_differs_by_rank,
    static_graphs,
    checkpoints_around_the_replica,
    a_layer_used_twice_beside_others_in_its_bucket,
    gradients_of_gradients,
    other_gradients_do_not_communicate,
    several_backwards,
    hooks_of_the_user,
    a_wrapper_inside_a_wrapper,
    functional_calls,
    frozen_and_unfrozen,
    frozen_wholly_and_back,
    frozen_between_forward_and_backward,
    frozen_while_the_backward_of_an_earlier_forward_runs,
    gradients_of_no_sync_are_not_forgotten,
    a_hook_outlives_freezing,
    replicas_that_are_gone_leave_nothing_behind,
    large_halves_and_conjugates,
    changed_parameters_are_an_error_with_a_name,
    ignored_by_name,
    gradients_of_many_types,
    no_sync_nested_and_without_gradients,
    evaluation_on_one_rank,
    evaluation_with_gradients,
    saved_loaded_and_copied,
    the_order_is_learned,
    caps_by_bucket,
    keywords,
    groups_and_meshes,
    mismatches_and_verification,
    without_initial_synchronisation,
    static_graphs_that_are_not,
    a_layer_used_twice_under_reentrant_checkpointing_is_an_error_with_a_name,
    types_changed_after_wrapping,
    memory_format_changed_after_wrapping,
    an_unfrozen_sparse_layer_is_not_measured,
    types_changed_on_one_rank,
    gradients_put_elsewhere,
    a_forward_that_runs_backward_itself,
    undefined_gradients,
    all_forwards_then_all_backwards,
    unfrozen_inside_a_forward,
    unfrozen_too_late_to_be_averaged,
    a_hook_registered_before_backwards_of_earlier_forwards,
    an_order_that_is_adopted_gives_the_same_buckets,
    static_graphs_of_several_sets_of_parameters,
    layouts_that_are_superseded_give_their_memory_back,
    gradients_of_no_sync_wait_until_their_parameters_take_part,
    gradients_that_a_hook_of_the_user_puts_elsewhere,
    an_unannounced_sparse_gradient_is_an_error_with_a_name,
    a_sparse_layer_that_is_also_a_dense_one,
]


def all_cases(names: list[str], overlap: bool = False) -> None:
    comm = ddp.init(abort_s=20)
    type(comm.plan).overlaps = property(lambda self: overlap)
    run_cases(CASES, comm, names)
    ddp.shutdown()


@in_each_mode
@pytest.mark.quick(1)
def test_all_cases_on_three_ranks(overlap: bool, half: int) -> None:
    names = [case.__name__ for case in CASES[half::2]]
    run_ranks(all_cases, 3, names, overlap, timeout_s=120)
