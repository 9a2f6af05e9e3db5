"""Gradients that are computed in their buckets: the same bits as without, and the same as torch's class has.

Each case trains a model in three ways: ours, ours with `direct_gradients=False`, and torch's class. It says which
gradients were found in their places when their buckets were filled, so that none compares the ordinary way with itself.

Tests: ddp/replica/direct.py.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import in_each_mode, run_cases, run_ranks
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call, jvp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import ddp
from ddp.gradients.bucket import Bucket
from ddp.gradients.reducer import ReduceScatter
from ddp.replica import direct
from ddp.replica.backward import Backward
from ddp.replica.broadcast import verify_replicas

TINY = {"first_bucket_mb": 1e-6, "bucket_cap_mb": 1e-6}  # a bucket for every parameter
BOTH = {"0.weight", "2.weight"}  # of the model that most cases train
LAYERS = {"layers.0.weight", "layers.1.weight"}

Make = Callable[[], nn.Module]
Program = Callable[[Any, int], Collection[Tensor] | None]


class Seen:
    """What a block has done.

    Attributes:
        entered: number of forwards that were in the mode.
        given: names of the parameters that were given their places.
        found: names of the parameters whose gradients lay in their places when their buckets were filled.
        scratch: addresses that gradients of further micro-batches were computed at.
        computed: number of gradients of weights that were computed, in any memory.
    """

    def __init__(self) -> None:
        self.entered, self.given, self.found, self.scratch = 0, list[str](), list[str](), list[int]()
        self.computed = 0


@contextmanager
def watched() -> Iterator[Seen]:
    """Records what a block does."""
    seen = Seen()
    enter, adopt, place_for, memory_for, of_weight = (
        direct.DirectGradients.__enter__,
        Bucket.adopt,
        Bucket.place_for,
        direct.DirectGradients.memory_for,
        direct._of_weight,
    )

    def entering(mode: Any) -> Any:
        seen.entered += 1
        return enter(mode)

    def adopting(bucket: Bucket) -> None:
        for slot in bucket.slots:
            gradient, view = slot.parameter.grad, slot.view
            if gradient is None or view is None or gradient is view:
                continue
            if gradient.data_ptr() == view.data_ptr():
                seen.found.append(slot.name)
        adopt(bucket)

    def placing(bucket: Bucket, slot: Any) -> Tensor | None:
        place = place_for(bucket, slot)
        if place is not None:
            seen.given.append(slot.name)
        return place

    def finding_memory(mode: Any, weight: Tensor) -> Tensor | None:
        memory = memory_for(mode, weight)
        if weight.grad is not None and memory is not None:
            seen.scratch.append(memory.data_ptr())
        return memory

    def computing(*args: Any) -> Tensor | None:
        gradient = of_weight(*args)
        seen.computed += gradient is not None
        return gradient

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "_of_weight", computing)
        patch.setattr(direct.DirectGradients, "__enter__", entering)
        patch.setattr(direct.DirectGradients, "memory_for", finding_memory)
        patch.setattr(Bucket, "adopt", adopting)
        patch.setattr(Bucket, "place_for", placing)
        yield seen


def mlp(*widths: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after, bias=bias, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def equal(one: Tensor, other: Tensor, msg: Any = None) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=msg)


def small() -> nn.Sequential:
    return mlp(6, 5, 4)


def one_step(replica: Any, _step: int, *shape: int, dtype: torch.dtype = torch.float32) -> None:
    replica.zero_grad()
    replica(torch.randn(*(shape or (3, 6)), dtype=dtype)).square().sum().backward()


def alike(
    comm: ddp.Communicator,
    make: Make = small,
    program: Program = one_step,
    *,
    direct_in: Collection[str] | None = BOTH,
    steps: int = 3,
    torchs: dict[str, Any] | bool | None = None,
    tolerance: dict[str, float] | None = None,
    differentiable: bool = False,
    **ours: Any,
) -> list[Seen]:
    """Trains a model in three ways, and compares gradients and parameters after each step.

    Args:
        program: makes a step: a backward, and all before it. What it returns is compared, too.
        direct_in: names of the gradients that the last step has computed in their places; None: the caller looks.
        torchs: keywords of torch's class; None: as `ours`, as far as it has them; False: it cannot do this.
        differentiable: gradients are differentiated, so that autograd adds up several terms, in an order of its own.

    Returns:
        What ours has done in each step.
    """
    direct.LARGE_BYTES = 0
    shared = {key: value for key, value in ours.items() if key in ("find_unused_parameters", "static_graph")}
    ways = [
        ddp.DistributedDataParallel(make(), **ours),
        ddp.DistributedDataParallel(make(), direct_gradients=False, **ours),
    ]
    if torchs is not False:
        ways.append(nn.parallel.DistributedDataParallel(make(), **(shared if torchs is None else torchs)))
    history = []
    for step in range(steps):
        all_seen, results = [], []
        for replica in ways:
            torch.manual_seed(100 * step + comm.rank)
            with watched() as seen:
                results.append(list(program(replica, step) or ()))
            all_seen.append(seen)
        assert all_seen[1].entered == 0 == len(all_seen[1].given) == len(all_seen[1].scratch)
        history.append(all_seen[0])
        near = partial(torch.testing.assert_close, **tolerance or {})
        for way in ways[1:]:
            compare = equal if way is ways[1] and not differentiable else near
            for (name, p), q in zip(ways[0].module.named_parameters(), way.module.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), (name, step)
                if p.grad is not None:
                    compare(p.grad, q.grad, msg=lambda text, at=(name, step): f"{at}: {text}")
                compare(p.detach(), q.detach())
            for mine, other in zip(results[0], results[ways.index(way)], strict=True):
                compare(mine, other, msg=lambda text, at=step: f"what the program has seen in step {at}: {text}")
        named = list(ways[0].module.named_parameters())
        verify_replicas(comm, [*named, *((n, p.grad.detach()) for n, p in named if p.grad is not None)])
        with torch.no_grad():
            for replica in ways:
                for p in replica.parameters():
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-0.1)
    if direct_in is not None:
        assert set(history[-1].found) == set(direct_in), (history[-1].found, history[-1].given)
    return history


# --- layers and inputs -----------------------------------------------------------------------------------------------


def inputs_of_one_to_four_dimensions(comm: ddp.Communicator) -> None:
    for shape in ((3, 6), (2, 3, 6), (2, 1, 3, 6)):
        alike(comm, program=lambda replica, step, shape=shape: one_step(replica, step, *shape))
    alike(comm, program=lambda replica, step: one_step(replica, step, 6), direct_in=())  # no matrix product


def inputs_that_are_not_contiguous(comm: ddp.Communicator) -> None:
    def program(replica: Any, step: int) -> list[Tensor]:
        replica.zero_grad()
        x = torch.randn(6, 2, 8).transpose(0, 2)[::2].requires_grad_()
        replica(x).sum().backward()  # a gradient of strides 0
        return [x.grad]

    alike(comm, program=program, direct_in={"2.weight"})


def batches_without_samples(comm: ddp.Communicator) -> None:
    for empty in ({1}, {0, 1, 2}):
        rows = 0 if comm.rank in empty else 3
        alike(comm, program=lambda replica, step, rows=rows: one_step(replica, step, rows, 6))


def types(comm: ddp.Communicator) -> None:
    for dtype, tolerance in ((torch.bfloat16, {"rtol": 0.1, "atol": 0.1}), (torch.float64, {})):
        program = partial(one_step, dtype=dtype)
        alike(comm, partial(mlp, 6, 5, 4, dtype=dtype), program, tolerance=tolerance)


def without_biases(comm: ddp.Communicator) -> None:
    alike(comm, partial(mlp, 6, 5, 4, bias=False))
    alike(comm, partial(mlp, 6, 5, 4, bias=False), **TINY)


def a_bias_of_another_type_is_an_error_as_in_torch(comm: ddp.Communicator) -> None:
    direct.LARGE_BYTES = 0
    module = small()
    module[0].bias = nn.Parameter(module[0].bias.double())
    messages = []
    for call in (module, ddp.DistributedDataParallel(copy.deepcopy(module))):
        with pytest.raises(RuntimeError) as raised:
            call(torch.randn(3, 6))
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def buckets_of_one_gradient_each(comm: ddp.Communicator) -> None:
    for kw in (TINY, {"overlap": True, **TINY}):
        alike(comm, partial(mlp, 6, 5, 4, 3), direct_in={*BOTH, "4.weight"}, steps=4, **kw)


# --- hooks -----------------------------------------------------------------------------------------------------------


class Recording(nn.Sequential):
    """Keeps what hooks have seen."""

    def __init__(self) -> None:
        super().__init__(*small())
        self.kept: list[Tensor] = []
        self.nodes: list[Any] = []  # a hook on one that nobody holds is lost

    def keep(self, gradient: Tensor) -> None:
        self.kept.append(gradient)

    def keep_copy(self, gradient: Tensor) -> None:
        self.kept.append(gradient.detach().clone())


def keeping(replica: Any, step: int, program: Program = one_step) -> list[Tensor]:
    """A step; all that hooks have kept until now, as it is after this step."""
    program(replica, step)
    assert len(replica.module.kept) > step
    return list(replica.module.kept)


def a_hook_that_changes_the_gradient(comm: ddp.Communicator) -> None:
    def make() -> nn.Module:
        module = small()
        module[0].weight.register_hook(lambda gradient: gradient * 2)
        return module

    alike(comm, make, direct_in={"2.weight"})

    def double(p: Tensor) -> None:
        p.grad.mul_(2)

    def in_place() -> nn.Module:
        module = small()
        module[0].weight.register_post_accumulate_grad_hook(double)
        return module

    alike(comm, in_place, direct_in={"2.weight"})


def a_hook_that_keeps_this_ranks_gradient(comm: ddp.Communicator) -> None:
    """It is not overwritten by the mean: as with torch's class."""

    def make() -> nn.Module:
        module = Recording()
        module[2].weight.register_hook(module.keep)
        return module

    history = alike(comm, make, keeping, direct_in={"0.weight"})
    assert history[1].given == ["0.weight"], "none was computed in vain"

    def several() -> nn.Module:
        module = Recording()
        torch.autograd.graph.register_multi_grad_hook((module[2].weight,), lambda gs: module.keep(gs[0]))
        return module

    alike(comm, several, keeping, direct_in={"0.weight"})


def a_hook_once_the_gradient_is_accumulated(comm: ddp.Communicator) -> None:
    def make() -> nn.Module:
        module = Recording()
        module[2].weight.register_post_accumulate_grad_hook(lambda p: module.keep_copy(p.grad))
        return module

    alike(comm, make, keeping, direct_in={"0.weight"})


def a_hook_on_the_node_that_accumulates(comm: ddp.Communicator) -> None:
    def make() -> nn.Module:
        module = Recording()
        for layer in (module[0], module[2]):
            module.nodes.append(get_gradient_edge(layer.weight).node)
            module.nodes[-1].register_prehook(lambda gradients: module.keep_copy(gradients[0]))
        return module

    alike(comm, make, keeping)


def a_hook_on_a_node_that_keeps_this_ranks_gradient(comm: ddp.Communicator) -> None:
    def before() -> nn.Module:
        module = Recording()
        module.nodes.append(get_gradient_edge(module[2].weight).node)
        module.nodes[0].register_prehook(lambda gradients: module.keep(gradients[0]))
        return module

    history = alike(comm, before, keeping, direct_in={"0.weight"})
    assert set(history[1].given) == BOTH
    assert history[2].given == ["0.weight"], "of a gradient that the program keeps, none is computed in place"

    def of_the_function() -> nn.Module:
        module = Recording()

        def keep(gradients: Any, _outputs: Any) -> None:
            for gradient in gradients:
                if gradient is not None and gradient.shape in ((5, 4), (4, 5)):
                    module.keep(gradient)

        def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
            output.grad_fn.register_hook(keep)

        module[2].register_forward_hook(hook)
        return module

    def transposed(replica: Any, step: int) -> list[Tensor]:
        return [each if each.shape == (4, 5) else each.t() for each in keeping(replica, step)]

    alike(comm, of_the_function, transposed, direct_in=None, torchs=False)  # torch's class leaves the mean there


def a_hook_on_a_module_that_reads_another_layers_gradient(comm: ddp.Communicator) -> None:
    def make() -> nn.Module:
        module = Recording()
        module[0].register_full_backward_hook(lambda *_: module.keep_copy(module[2].weight.grad))
        module[0].register_full_backward_pre_hook(lambda *_: module.keep_copy(module[2].weight.grad))
        return module

    def program(replica: Any, step: int) -> None:
        replica.zero_grad()
        replica(torch.randn(3, 6).requires_grad_()).square().sum().backward()

    alike(comm, make, partial(keeping, program=program))


def hooks_that_come_and_go(comm: ddp.Communicator) -> None:
    handles: dict[Any, Any] = {}

    def program(replica: Any, step: int) -> None:
        if step == 2:
            handles[replica] = replica.module[0].weight.register_hook(lambda gradient: gradient + 1)
        elif step == 3:
            handles.pop(replica).remove()
        one_step(replica, step)

    history = alike(comm, program=program, steps=4)
    assert [set(seen.found) for seen in history] == [set(), BOTH, {"2.weight"}, BOTH]


# --- graphs ----------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A weight of two layers, or a layer that is used twice."""

    def __init__(self, times: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.first(x).tanh()
        result: Tensor = self.last(self.second(x).tanh())
        return result


def a_weight_of_two_layers(comm: ddp.Communicator) -> None:
    for kw in ({}, TINY):
        history = alike(comm, partial(Tied, 1), direct_in={"last.weight"}, **kw)
        assert history[-1].given == ["last.weight", "first.weight"], "the second gradient has memory of its own"


def a_layer_that_is_used_twice(comm: ddp.Communicator) -> None:
    for kw in ({}, TINY, {"find_unused_parameters": True}, {"static_graph": True}):
        history = alike(comm, partial(Tied, 3), direct_in={"last.weight"}, **kw)
        assert set(history[-1].given) == {"last.weight", "first.weight"}


def two_forwards_and_one_backward(comm: ddp.Communicator) -> None:
    def program(replica: Any, _step: int) -> None:
        replica.zero_grad()
        (replica(torch.randn(3, 6)).sum() + replica(torch.randn(2, 6)).square().sum()).backward()

    history = alike(comm, program=program, direct_in=(), torchs=False)
    assert set(history[-1].given) == BOTH
    direct.LARGE_BYTES = 0
    module, alone, x = small(), small(), torch.randn(3, 6) + comm.rank
    replica = ddp.DistributedDataParallel(module)
    for _ in range(3):
        module.zero_grad(), alone.zero_grad()
        (replica(x).sum() + replica(2 * x).square().sum()).backward()
        (alone(x).sum() + alone(2 * x).square().sum()).backward()
        for p, q in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, comm.all_reduce(q.grad, "mean"))


def two_backwards_with_other_gradients(comm: ddp.Communicator) -> None:
    def program(replica: Any, step: int) -> list[Tensor]:
        replica.zero_grad()
        output = replica(torch.randn(3, 6))
        output.backward(torch.randn(3, 4), retain_graph=True)
        first = [p.grad.clone() for p in replica.parameters()]
        if step == 1:
            replica.zero_grad()
        output.backward(torch.randn(3, 4))
        return first

    history = alike(comm, program=program, torchs=False, steps=4)
    assert set(history[1].found) == BOTH
    assert len(history[1].found) == 4, "both backwards of the second step, because gradients were dropped between them"
    assert len(history[2].scratch) == 2


def other_gradients_between_backward_and_step(comm: ddp.Communicator) -> None:
    """`autograd.grad` with respect to inputs changes no gradient of a weight, and none is computed for it."""

    def program(replica: Any, _step: int) -> list[Tensor]:
        replica.zero_grad()
        x = torch.randn(3, 6).requires_grad_()
        loss = replica(x).square().sum()
        loss.backward(retain_graph=True)
        with watched() as seen:
            (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
            assert not seen.computed
            (again,) = torch.autograd.grad(loss, replica.module[2].weight)
            assert seen.computed <= 1
        assert not seen.given
        assert not seen.scratch
        return [slope, again]

    alike(comm, program=program)


def other_gradients_after_they_are_dropped(comm: ddp.Communicator) -> None:
    """Places are free then, and would be written to."""

    def program(replica: Any, step: int) -> list[Tensor]:
        x = torch.randn(3, 6).requires_grad_()
        loss = replica(x).square().sum()
        replica.zero_grad()
        gradients = torch.autograd.grad(loss, [x, *replica.module.parameters()], retain_graph=True)
        assert all(p.grad is None for p in replica.module.parameters())
        loss.backward()
        return list(gradients)

    history = alike(comm, program=program)
    assert len(history[-1].given) == 2, "by backward"


def other_gradients_between_micro_batches(comm: ddp.Communicator) -> None:
    def program(replica: Any, _step: int) -> list[Tensor]:
        replica.zero_grad()
        found = []
        for last in (False, False, True):
            with nullcontext() if last else replica.no_sync():
                x = torch.randn(3, 6).requires_grad_()
                loss = replica(x).square().sum()
                found += torch.autograd.grad(loss, x, retain_graph=True)
                loss.backward()
        return found

    history = alike(comm, program=program)
    assert len(history[-1].scratch) == 4


def a_gradient_penalty(comm: ddp.Communicator) -> None:
    def program(replica: Any, _step: int) -> list[Tensor]:
        replica.zero_grad()
        x = torch.randn(3, 6).requires_grad_()
        output = replica(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (output.square().mean() + slope.square().sum(1).mean()).backward()
        return [slope.detach()]

    history = alike(comm, program=program, direct_in=None)
    assert history[-1].entered == 1

    def mean_gradients(replica: Any, _step: int) -> None:
        replica.zero_grad()
        replica(torch.randn(3, 6)).square().mean().backward(create_graph=True)
        sum(p.grad.square().sum() for p in replica.module.parameters()).backward()
        for p in replica.module.parameters():
            p.grad = p.grad.detach()

    history = alike(comm, program=mean_gradients, direct_in=None, torchs=False, differentiable=True)
    assert history[-1].entered == 1
    assert not history[-1].found


def backward_with_respect_to_inputs(comm: ddp.Communicator) -> None:
    def program(replica: Any, _step: int) -> list[Tensor]:
        replica.zero_grad()
        x = torch.randn(3, 6).requires_grad_()
        with replica.no_sync(), watched() as seen:
            loss = replica(x).square().sum()
            loss.backward(inputs=[x], retain_graph=True)
            assert all(p.grad is None for p in replica.module.parameters())
            loss.backward(inputs=[replica.module[0].weight])
            assert [p.grad is None for p in replica.module.parameters()] == [False, True, True, True]
        assert seen.given in ([], ["0.weight"])
        replica(x).sum().backward()
        return [x.grad]

    alike(comm, program=program)

    def alone(replica: Any, step: int) -> list[Tensor]:
        one_step(replica, step)
        x = torch.randn(3, 6).requires_grad_()
        before = [p.grad.clone() for p in replica.module.parameters()]
        replica(x).sum().backward(inputs=[x])
        assert all(map(torch.equal, before, (p.grad for p in replica.module.parameters())))
        return [x.grad]

    alike(comm, program=alone)

    def one_weight(replica: Any, _step: int) -> None:
        replica.zero_grad()
        replica(torch.randn(3, 6)).square().sum().backward(inputs=[replica.module[2].weight])

    found = alike(comm, program=one_weight, direct_in=None, torchs=False, find_unused_parameters=True)[-1]
    assert found.given == ["2.weight"]


class Recomputed(nn.Module):
    """A layer under activation checkpointing between two that are not."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda h: self.layer(h).tanh(), self.first(x).tanh(), use_reentrant=self.reentrant)
        result: Tensor = self.last(hidden)
        return result


def checkpoints_inside_the_replica(comm: ddp.Communicator) -> None:
    for reentrant in (False, True):
        for kw in ({}, TINY, {"static_graph": True}):
            make = partial(Recomputed, reentrant=reentrant)
            alike(comm, make, direct_in={"first.weight", "last.weight"}, **kw)


def checkpoints_around_the_replica(comm: ddp.Communicator) -> None:
    def program(replica: Any, _step: int, reentrant: bool) -> list[Tensor]:
        replica.zero_grad()
        x = torch.randn(3, 6).requires_grad_()
        checkpoint(replica, x, use_reentrant=reentrant).square().sum().backward()
        return [x.grad]

    for reentrant, direct_in in ((False, ()), (True, BOTH)):
        for kw in ({}, TINY):
            alike(comm, program=partial(program, reentrant=reentrant), direct_in=direct_in, **kw)


def saved_tensors_elsewhere(comm: ddp.Communicator) -> None:
    def program(replica: Any, _step: int) -> None:
        replica.zero_grad()
        with torch.autograd.graph.save_on_cpu():
            output = replica(torch.randn(3, 6))
        output.square().sum().backward()

    alike(comm, program=program, direct_in=())


def anomaly_mode(comm: ddp.Communicator) -> None:
    def program(replica: Any, step: int) -> None:
        with torch.autograd.set_detect_anomaly(True):
            one_step(replica, step)

    alike(comm, program=program)


def autocast(comm: ddp.Communicator) -> None:
    def program(replica: Any, _step: int) -> None:
        replica.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = replica(torch.randn(3, 6))
        output.float().square().sum().backward()

    alike(comm, program=program, direct_in=(), tolerance={"rtol": 0.05, "atol": 0.05})


def functions_of_other_weights(comm: ddp.Communicator) -> None:
    """`functional_call` and transforms of torch.func compute gradients of other tensors, in no bucket."""

    def program(replica: Any, step: int) -> list[Tensor]:
        one_step(replica, step)
        before = [p.grad.clone() for p in replica.module.parameters()]
        x, found = torch.randn(3, 6), list[Tensor]()
        if isinstance(replica, ddp.DistributedDataParallel):
            others = {name: (2 * p).detach() for name, p in replica.named_parameters()}
            with watched() as seen:
                slopes = torch.func.grad(lambda values: functional_call(replica, values, x).sum())(others)
                found += slopes.values()
                found.append(jvp(replica, (x,), (torch.ones_like(x),))[1])
                found.append(vmap(replica)(x))
                mine = {name: value.requires_grad_() for name, value in others.items()}
                functional_call(replica, mine, x).sum().backward()
                found += [value.grad for value in mine.values()]
            assert not seen.given
            bare, mine = copy.deepcopy(replica.module), [value.detach() for value in mine.values()]
            with torch.no_grad():
                for p, value in zip(bare.parameters(), mine, strict=True):
                    p.copy_(value)
            slopes = torch.autograd.grad(bare(x).sum(), list(bare.parameters()))
            assert all(map(torch.equal, slopes, found[-len(slopes) :]))
        assert all(map(torch.equal, before, (p.grad for p in replica.module.parameters())))
        return found if isinstance(replica, ddp.DistributedDataParallel) else []

    alike(comm, program=program, torchs=False)


def forward_mode(comm: ddp.Communicator) -> None:
    """Derivatives of the outputs travel along, with respect to inputs and weights, as in the bare module."""

    def program(replica: Any, step: int) -> list[Tensor]:
        one_step(replica, step)
        x, found = torch.randn(3, 6), []
        for net in (replica, replica.module):
            with forward_ad.dual_level(), replica.no_sync():
                output = net(forward_ad.make_dual(x, torch.ones_like(x)))
                found.append(forward_ad.unpack_dual(output).tangent)
        assert torch.equal(found[0], found[1])
        return [found[0].detach()]

    alike(comm, program=program)


# --- between steps ---------------------------------------------------------------------------------------------------


def frozen_and_unfrozen(comm: ddp.Communicator) -> None:
    def program(replica: Any, step: int) -> None:
        replica.module[0].weight.requires_grad_(step not in (2, 3))
        one_step(replica, step)

    for kw in ({}, TINY):
        history = alike(comm, program=program, steps=6, torchs={"find_unused_parameters": True}, **kw)
        assert [set(seen.found) for seen in history[1::2]] == [BOTH, {"2.weight"}, BOTH]


def unfrozen_for_the_first_time(comm: ddp.Communicator) -> None:
    """The layout is made anew, and its order is learned."""

    def make() -> nn.Module:
        module = small()
        module[0].requires_grad_(False)
        return module

    def program(replica: Any, step: int) -> None:
        replica.module[0].requires_grad_(step > 1)
        one_step(replica, step)

    history = alike(comm, make, program, steps=5, torchs=False)
    assert set(history[1].found) == {"2.weight"}


def widened_while_backward_runs(comm: ddp.Communicator) -> None:
    """One backward goes through two forwards, between which a layer is frozen: it reaches the second one first."""
    widened: list[int] = []
    widen = Backward.widen

    def widening(backward: Backward, layout: Any) -> None:
        before = len(backward.layout.slots)
        widen(backward, layout)
        widened.append(len(backward.layout.slots) - before)

    def program(replica: Any, _step: int) -> None:
        replica.zero_grad()
        first = replica(torch.randn(3, 6)).sum()
        replica.module[0].requires_grad_(False)
        second = replica(torch.randn(2, 6)).square().sum()
        replica.module[0].requires_grad_(True)
        (first + second).backward()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backward, "widen", widening)
        history = alike(comm, program=program, steps=5, direct_in=None, torchs=False)
    assert set(widened) == {2}
    assert set(history[-1].given) == BOTH
    assert set(history[-1].found) == {"0.weight"}


def a_backward_of_an_earlier_layout(comm: ddp.Communicator) -> None:
    """All forwards, then all backwards; between the forwards a layer is frozen: places are looked up in backward."""

    def program(replica: Any, _step: int, order: int) -> list[Tensor]:
        replica.zero_grad()
        losses = [replica(torch.randn(3, 6)).sum()]
        replica.module[0].requires_grad_(False)
        losses.append(replica(torch.randn(2, 6)).square().sum())
        replica.module[0].requires_grad_(True)
        means = []
        for index in (order, 1 - order):
            losses[index].backward()
            means += [p.grad.clone() for p in replica.module.parameters() if p.grad is not None]
            replica.zero_grad()
        return means

    for order in (0, 1):
        history = alike(comm, program=partial(program, order=order), steps=4, torchs=False)
        assert sorted(history[-1].found) == ["0.weight", "2.weight", "2.weight"]


def converted_and_back(comm: ddp.Communicator) -> None:
    def program(replica: Any, step: int) -> None:
        if step == 2:
            replica.module.double().float()
        elif step == 4:
            with torch.no_grad():
                replica.module[0].weight.data = replica.module[0].weight.data.clone() * 2
        one_step(replica, step)

    alike(comm, program=program, steps=6, torchs=False)


def converted_for_good(comm: ddp.Communicator) -> None:
    def program(replica: Any, step: int) -> None:
        if step == 2:
            replica.module.double()
        one_step(replica, step, dtype=torch.float32 if step < 2 else torch.float64)

    alike(comm, program=program, steps=5, torchs=False)


def replaced_between_forward_and_backward(comm: ddp.Communicator) -> None:
    """`weight.data = …` after forward does not reach the graph: as in plain torch."""

    def program(replica: Any, _step: int) -> list[Tensor]:
        replica.zero_grad()
        x = torch.randn(3, 6).requires_grad_()
        loss = replica(x).square().sum()
        for p in replica.module.parameters():
            p.data = p.detach() * 3
        loss.backward()
        return [x.grad]

    alike(comm, program=program, tolerance={"rtol": 1e-5, "atol": 1e-4})  # weights triple in each step


def frozen_between_forward_and_backward(comm: ddp.Communicator) -> None:
    def program(replica: Any, _step: int) -> None:
        replica.zero_grad()
        loss = replica(torch.randn(3, 6)).square().sum()
        replica.module[0].weight.requires_grad_(False)
        loss.backward()
        replica.module[0].weight.requires_grad_(True)

    alike(comm, program=program, direct_in={"2.weight"}, steps=4, torchs=False)


class Fuse(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *_gradients: Tensor) -> Any:
        raise ArithmeticError("blown")


def a_backward_that_breaks_off(comm: ddp.Communicator) -> None:
    """Gradients in places of the first replica stay there; a new replica of the module goes on."""
    direct.LARGE_BYTES = 0
    results = []
    for is_direct in (None, False):
        module = small()
        replica = ddp.DistributedDataParallel(module, direct_gradients=is_direct)
        for step in range(3):
            torch.manual_seed(step + comm.rank)
            one_step(replica, step)
        handle = module[1].register_forward_hook(lambda _module, _inputs, output: Fuse.apply(output))
        replica.zero_grad()
        with pytest.raises(ArithmeticError, match="blown"), watched() as seen:
            replica(torch.randn(3, 6)).sum().backward()
        assert seen.given == (["2.weight"] if is_direct is None else [])
        handle.remove()
        with pytest.raises(RuntimeError, match="broke off"):
            replica(torch.randn(3, 6))
        kept = module[2].weight.grad
        values = kept.clone()
        again = ddp.DistributedDataParallel(module, direct_gradients=is_direct)
        for step in range(3):
            torch.manual_seed(step + comm.rank)
            with watched() as seen:
                one_step(again, step)
        assert set(seen.found) == (BOTH if is_direct is None else set())
        assert torch.equal(kept, values), "it was this rank's own, and still is"
        results.append([values, *(p.grad.clone() for p in module.parameters())])
    assert all(map(torch.equal, *results))
    comm.barrier()


def gradients_that_the_program_keeps(comm: ddp.Communicator) -> None:
    kept: dict[Any, list[tuple[Tensor, Tensor]]] = {}

    def program(replica: Any, step: int) -> list[Tensor]:
        one_step(replica, step)
        mine, p = kept.setdefault(replica, []), replica.module[2].weight
        if step > 1:
            mine.append((p.grad, p.grad.clone()))
            p.grad = None
        assert all(torch.equal(*pair) for pair in mine)
        return [gradient for gradient, _ in mine]

    history = alike(comm, program=program, steps=6, direct_in=None)
    assert set(history[2].found) == BOTH
    assert "0.weight" in history[-1].found


def gradients_that_are_zeroed(comm: ddp.Communicator) -> None:
    """They stay in their buckets, and autograd adds to them."""

    def program(replica: Any, _step: int) -> None:
        replica.zero_grad(set_to_none=False)
        replica(torch.randn(3, 6)).square().sum().backward()

    history = alike(comm, program=program, direct_in=())
    assert len(history[-1].scratch) == 2


def what_a_hook_of_another_layer_puts_in_place(comm: ddp.Communicator) -> None:
    """A hook may exchange or drop the gradient of another weight, after it was computed in its place."""

    def make(change: Callable[[Tensor], Tensor | None]) -> nn.Module:
        module = small()

        def hook(_gradient: Tensor) -> None:
            if module[2].weight.grad is not None:
                module[2].weight.grad = change(module[2].weight.grad)

        module[0].bias.register_hook(hook)
        return module

    for change in (lambda g: g * 2, lambda g: g.mul_(2), lambda g: g[:], lambda g: g.clone().t().contiguous().t()):
        history = alike(comm, partial(make, change), direct_in=None, torchs=False)
        assert set(history[-1].given) == BOTH
        assert "0.weight" in history[-1].found


# --- micro-batches ---------------------------------------------------------------------------------------------------


def accumulating(replica: Any, _step: int, num: int = 4) -> None:
    replica.zero_grad()
    for batch in range(num):
        with replica.no_sync() if batch + 1 < num else nullcontext():
            replica(torch.randn(3, 6)).square().sum().backward()


def micro_batches_use_one_scratch(comm: ddp.Communicator) -> None:
    for kw in ({}, TINY):
        history = alike(comm, program=accumulating, **kw)
        assert all(len(seen.scratch) == 6 and set(seen.given) == BOTH for seen in history[1:])
        assert len({address for seen in history[1:] for address in seen.scratch}) == 1


def micro_batches_whose_gradients_are_kept(comm: ddp.Communicator) -> None:
    """A hook that keeps them gets its own, on the weight or on a node of the graph."""

    def make() -> nn.Module:
        module = Recording()
        module[0].weight.register_hook(module.keep)
        return module

    def program(replica: Any, step: int) -> list[Tensor]:
        return keeping(replica, step, accumulating)

    history = alike(comm, make, program, direct_in={"2.weight"})
    assert len(history[-1].scratch) == 3, "those of the other weight"

    def on_nodes() -> nn.Module:
        module = Recording()
        module.nodes.append(get_gradient_edge(module[2].weight).node)
        module.nodes[0].register_prehook(lambda gradients: module.keep(gradients[0]))
        return module

    history = alike(comm, on_nodes, program, direct_in={"0.weight"})
    assert len(set(history[-1].scratch)) > 1


# --- options ---------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Uses what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.never = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor, use: str) -> Tensor:
        return torch.stack([getattr(self, name)(x) for name in use.split()]).sum(0)


def unused_parameters(comm: ddp.Communicator) -> None:
    def program(replica: Any, step: int) -> None:
        replica.zero_grad()
        use = ["left", "left right", "right"][(step + comm.rank) % 3]
        replica(torch.randn(3, 6), use).square().sum().backward()

    uses = ["left", "left right", "right"][(5 + comm.rank) % 3]
    for kw in ({}, TINY):
        alike(
            comm,
            Branches,
            program,
            direct_in={f"{name}.weight" for name in uses.split()},
            steps=6,
            find_unused_parameters=True,
            **kw,
        )


def static_graphs(comm: ddp.Communicator) -> None:
    for kw in ({}, TINY):
        alike(comm, static_graph=True, **kw)


def a_gradient_that_comes_too_late(comm: ddp.Communicator) -> None:
    """It is not written into a bucket that has been sent, though its place is free."""
    direct.LARGE_BYTES = 0
    module = Tied(2)
    replica = ddp.DistributedDataParallel(module, **TINY)
    for step in range(2):
        one_step(replica, step)
    index = replica.backward.layout.index_of if hasattr(replica.backward, "layout") else replica._last.index_of
    number = index[id(module.last.weight)]

    def hook(_gradient: Tensor) -> None:
        reduction = replica.backward.reductions[number]
        assert reduction.is_launched
        module.last.weight.grad = None
        assert replica.place_of(module.last.weight) is None

    module.first.bias.register_hook(hook)
    with watched() as seen:
        one_step(replica, 2)
    assert "last.weight" in seen.found
    comm.barrier()


def an_error_inside_names_the_parameter(comm: ddp.Communicator) -> None:
    direct.LARGE_BYTES = 0
    replica = ddp.DistributedDataParallel(small())
    for step in range(2):
        one_step(replica, step)
    replica.zero_grad()
    loss = replica(torch.randn(3, 6)).sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "place_for", lambda self, slot: torch.empty(3, 3, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="dtype") as raised:
            loss.backward()
    assert any("2.weight" in note for note in raised.value.__notes__)
    comm.barrier()


def pickled_and_copied(comm: ddp.Communicator) -> None:
    def program(replica: Any, step: int) -> None:
        one_step(replica, step)

    for again in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        direct.LARGE_BYTES = 0
        results = []
        for is_direct in (None, False):
            replica = ddp.DistributedDataParallel(small(), direct_gradients=is_direct)
            for step in range(2):
                one_step(replica, step)
            twin = again(replica)
            assert type(twin.module[0]) is nn.Linear
            assert type(twin.module[0].weight) is nn.Parameter
            assert twin.state_dict().keys() == replica.state_dict().keys()
            for each in (replica, twin):
                for step in range(2):
                    torch.manual_seed(step + comm.rank)
                    with watched() as seen:
                        program(each, step)
                assert set(seen.found) == (BOTH if is_direct is None else set())
                results.append([p.grad.clone() for p in each.module.parameters()])
        for others in results[1:]:
            assert all(map(torch.equal, results[0], others))


def models_with_nothing_large_are_left_alone(comm: ddp.Communicator) -> None:
    direct.LARGE_BYTES = 1 << 10
    try:
        replica = ddp.DistributedDataParallel(mlp(6, 5, 64, 5))
        with watched() as seen:
            for step in range(3):
                one_step(replica, step)
        assert set(seen.found) == {"2.weight", "4.weight"}
        direct.LARGE_BYTES = 1 << 20
        replica = ddp.DistributedDataParallel(mlp(6, 5, 64, 5))
        with watched() as seen:
            for step in range(3):
                one_step(replica, step)
        assert not seen.entered
    finally:
        direct.LARGE_BYTES = 0


# --- programs that must not change -----------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    """Runs a function as the forward of two layers."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], make: Make = lambda: nn.Linear(6, 6)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self._forward = nn.ModuleList([make(), make()]), forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self.layers, x)


def with_inputs(replica: Any, _step: int, shape: tuple[int, ...] = (3, 6)) -> list[Tensor]:
    """A step; the loss, and the gradient of its inputs."""
    replica.zero_grad()
    x = torch.randn(shape).requires_grad_()
    loss = replica(x).square().mean()
    loss.backward()
    return [loss.detach(), *([] if x.grad is None else [x.grad])]


def results_changed_in_place(comm: ddp.Communicator) -> None:
    """An activation in place, or a residual sum, after a layer with inputs of three or four dimensions."""
    make = partial(TwoLayers, lambda layers, x: layers[1](torch.relu_(layers[0](x))).add_(x))
    for shape in ((3, 6), (2, 3, 6), (2, 1, 3, 6)):
        alike(comm, make, partial(with_inputs, shape=shape), direct_in=LAYERS)


def biases_that_are_broadcast(comm: ddp.Communicator) -> None:
    """A bias of one number, of one row, or of a row for each sample."""
    forwards = (
        lambda layers, x: layers[1](F.linear(x, layers[0].weight, layers[0].bias[1])),
        lambda layers, x: layers[1](F.linear(x, layers[0].weight, layers[0].bias[None])),
        lambda layers, x: F.linear(x, layers[0].weight, layers[1](x) + layers[0].bias),
    )
    for forward in forwards:
        alike(comm, partial(TwoLayers, forward), with_inputs, direct_in={"layers.1.weight"})


def inputs_that_are_transposed(comm: ddp.Communicator) -> None:
    """Autograd computes the transposed gradient of a transposed matrix, and takes a single column for one."""
    make = partial(TwoLayers, lambda layers, x: layers[1](torch.tanh(layers[0](x)).t().contiguous().t()))
    alike(comm, make, partial(with_inputs, shape=(300, 6)), direct_in={"layers.0.weight"})
    column = partial(nn.Linear, 1, 1 << 16)
    make = partial(TwoLayers, lambda layers, x: layers[0](x) - layers[1](x * 2), column)
    alike(comm, make, partial(with_inputs, shape=(1, 1)), direct_in=())


def transposed_inputs_changed_in_place(comm: ddp.Communicator) -> None:
    """Autograd has saved a copy of them."""

    def forward(layers: Any, x: Tensor) -> Tensor:
        hidden = layers[0](x) * 2
        return hidden.add_(layers[1](hidden.transpose(0, 1)).transpose(0, 1))

    alike(comm, partial(TwoLayers, forward), partial(with_inputs, shape=(2, 6, 6)), direct_in={"layers.0.weight"})


def a_first_layer_that_was_stepped_since(comm: ddp.Communicator) -> None:
    """Its backward does not need its weight, so a step may come between forward and backward; of others it must not."""
    direct.LARGE_BYTES = 0
    replica = ddp.DistributedDataParallel(small())
    for step in range(3):
        one_step(replica, step)
    optimizer = torch.optim.SGD(replica.module[0].parameters())
    first, second = (replica(torch.ones(3, 6)).sum() for _ in range(2))
    first.backward()
    optimizer.step()
    second.backward()
    third = replica(torch.ones(3, 6)).sum()
    with torch.no_grad():
        replica.module[2].weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        third.backward()
    replica.release()
    comm.barrier()


def a_mode_of_the_program(comm: ddp.Communicator) -> None:
    """One that replaces `F.linear`, around the replica, and adds a factor that is trained."""

    class Adapter(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is F.linear:
                args = (args[0], args[1] * factor, *args[2:])
            return function(*args, **(kwargs or {}))

    factor = torch.ones(()).requires_grad_()

    def program(replica: Any, step: int) -> list[Tensor]:
        factor.grad = None
        with Adapter():
            one_step(replica, step)
        return [factor.grad]

    alike(comm, program=program, direct_in=())


def a_frozen_encoder(comm: ddp.Communicator) -> None:
    """In evaluation mode torch computes it by fused kernels, which return zeros for samples that are masked."""

    def forward(layers: Any, x: Tensor) -> Tensor:
        for layer in layers:
            layer[0].eval()
        mask = torch.arange(x.shape[1]).expand(x.shape[:2]) > 4
        return layers[0][1](layers[0][0](x.detach(), src_key_padding_mask=mask)) + layers[1][1](x)

    def both() -> nn.Module:
        layer = nn.TransformerEncoderLayer(6, 2, 6, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, 2).requires_grad_(False), nn.Linear(6, 6))

    alike(comm, partial(TwoLayers, forward, both), partial(with_inputs, shape=(3, 7, 6)), direct_in=())


def differences_in_flight(_comm: ddp.Communicator) -> None:
    """The inner steps of local SGD with a delay run while buckets hold differences of parameters."""
    inputs = torch.randn(48, 16, generator=torch.Generator().manual_seed(1))
    seen = []
    for is_direct in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        rounds = ddp.LocalSGD(every=6, delay=2, direct_gradients=is_direct)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        how: dict[str, Any] = {"loss": F.mse_loss, "global_batch": 4, "epochs": 3, "folder": None}
        ddp.fit(net, (inputs, inputs), optimizer, strategy=rounds, **how)
        seen.append(nn.utils.parameters_to_vector(net.parameters()))
    assert torch.equal(*seen)


def kept_from_a_micro_batch_where_buckets_cannot_move(comm: ddp.Communicator) -> None:
    for kind, how in (
        (ddp.BucketedDataParallel, {"reducer": ReduceScatter}),
        (ddp.DistributedDataParallel, {"gradient_as_bucket_view": True}),
    ):
        replica = kind(small(), **how)
        weight = replica.module[0].weight
        for step in range(3):
            one_step(replica, step)
        replica.zero_grad()
        with replica.no_sync():
            replica(torch.randn(3, 6)).sum().backward()
        kept, weight.grad = weight.grad, None
        before = kept.clone()
        for step in range(2):
            one_step(replica, step)
        assert torch.equal(kept, before)


CASES = [
    inputs_of_one_to_four_dimensions,
    inputs_that_are_not_contiguous,
    batches_without_samples,
    types,
    without_biases,
    a_bias_of_another_type_is_an_error_as_in_torch,
    buckets_of_one_gradient_each,
    a_hook_that_changes_the_gradient,
    a_hook_that_keeps_this_ranks_gradient,
    a_hook_once_the_gradient_is_accumulated,
    a_hook_on_the_node_that_accumulates,
    a_hook_on_a_node_that_keeps_this_ranks_gradient,
    a_hook_on_a_module_that_reads_another_layers_gradient,
    hooks_that_come_and_go,
    a_weight_of_two_layers,
    a_layer_that_is_used_twice,
    two_forwards_and_one_backward,
    two_backwards_with_other_gradients,
    other_gradients_between_backward_and_step,
    other_gradients_after_they_are_dropped,
    other_gradients_between_micro_batches,
    a_gradient_penalty,
    backward_with_respect_to_inputs,
    checkpoints_inside_the_replica,
    checkpoints_around_the_replica,
    saved_tensors_elsewhere,
    anomaly_mode,
    autocast,
    functions_of_other_weights,
    forward_mode,
    frozen_and_unfrozen,
    unfrozen_for_the_first_time,
    widened_while_backward_runs,
    a_backward_of_an_earlier_layout,
    converted_and_back,
    converted_for_good,
    replaced_between_forward_and_backward,
    frozen_between_forward_and_backward,
    a_backward_that_breaks_off,
    gradients_that_the_program_keeps,
    gradients_that_are_zeroed,
    what_a_hook_of_another_layer_puts_in_place,
    micro_batches_use_one_scratch,
    micro_batches_whose_gradients_are_kept,
    unused_parameters,
    static_graphs,
    a_gradient_that_comes_too_late,
    an_error_inside_names_the_parameter,
    pickled_and_copied,
    models_with_nothing_large_are_left_alone,
    results_changed_in_place,
    biases_that_are_broadcast,
    inputs_that_are_transposed,
    transposed_inputs_changed_in_place,
    a_first_layer_that_was_stepped_since,
    a_mode_of_the_program,
    a_frozen_encoder,
    differences_in_flight,
    kept_from_a_micro_batch_where_buckets_cannot_move,
]


def all_cases(names: list[str], overlap: bool = False) -> None:
    comm = ddp.init(abort_s=20)
    type(comm.plan).overlaps = property(lambda self: overlap)
    run_cases(CASES, comm, names)
    ddp.shutdown()


# --- bits, and compiled parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradients_in_place_have_the_bits_of_autograds(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)

    def number(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=draw))

    for case in range(150):
        most = 260 if case % 5 == 0 else 33
        samples, inner, outer = (number(most) for _ in range(3))
        samples -= case % 29 == 0  # none, at times
        shape = [[samples], [samples, number(3)], [2, samples, number(2)]][case % 3]
        x = torch.randn(*shape, inner, generator=draw, dtype=dtype)
        if case % 4 == 1:
            x = torch.randn(*shape, 2 * inner, generator=draw, dtype=dtype)[..., ::2]
        weight = torch.randn(outer, inner, generator=draw, dtype=dtype)
        bias = torch.randn(outer, generator=draw, dtype=dtype) if case % 2 else None
        upstream = torch.randn(*shape, outer, generator=draw, dtype=dtype)
        if case % 7 == 2:
            upstream = torch.ones((), dtype=dtype).expand(*shape, outer)
        place = torch.full_like(weight, math.nan)
        mode = SimpleNamespace(memory_for=lambda _weight, place=place: place.detach(), names={})

        def leaves(x: Tensor = x, weight: Tensor = weight, bias: Tensor | None = bias) -> list[Tensor | None]:
            return [None if each is None else each.detach().requires_grad_() for each in (x, weight, bias)]

        mine, autograds = leaves(), leaves()
        output = direct._Linear.apply(mine[2], mine[0], mine[1], mode)
        expected = F.linear(*autograds)
        assert torch.equal(output, expected)
        output.backward(upstream)
        expected.backward(upstream)
        assert mine[1].grad.data_ptr() == place.data_ptr()
        for one, other in zip(mine, autograds, strict=True):
            assert one is None or (torch.equal(one.grad, other.grad) and one.grad.stride() == other.grad.stride()), case


class Net(nn.Module):
    """Its forward is a frame that can be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result


def compiled_parts(what: str) -> None:
    from torch._dynamo.testing import CompileCounter

    comm = ddp.init(abort_s=20)
    direct.LARGE_BYTES = 0
    results, frames = [], []
    for is_direct in (None, False):
        torch._dynamo.reset()
        module = Net() if what != "submodule" else nn.Sequential(Net())
        replica = ddp.DistributedDataParallel(module, direct_gradients=is_direct)
        with watched() as seen:
            for step in range(2):
                one_step(replica, step)
        assert bool(seen.found) == (is_direct is None), "nothing is compiled yet"
        counter, call = CompileCounter(), replica
        if what == "submodule":
            module[0].compile(backend=counter)
        elif what == "function":
            module.body[1].forward = torch.compile(lambda x: x.sin() + 1, backend=counter)
        else:
            call = torch.compile(replica, backend=counter)
        with watched() as seen:
            for step in range(4):
                torch.manual_seed(step + comm.rank)
                replica.zero_grad()
                call(torch.randn(3, 6)).square().sum().backward()
        assert not seen.entered
        assert not seen.given
        frames.append(counter.frame_count)
        results.append([p.grad.clone() for p in replica.parameters()])
    assert frames[0] == frames[1] > 0, frames
    assert all(map(torch.equal, *results))
    ddp.shutdown()


@pytest.mark.quick(1)
@pytest.mark.parametrize("what", ["function", "submodule", "replica"])
def test_programs_that_compile_are_left_alone(what: str) -> None:
    run_ranks(compiled_parts, 2, what)


@in_each_mode
@pytest.mark.quick(1)
def test_all_cases_on_three_ranks(overlap: bool, half: int) -> None:
    names = [case.__name__ for case in CASES[half::2]]
    run_ranks(all_cases, 3, names, overlap, timeout_s=120)
