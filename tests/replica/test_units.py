"""Units: which modules they are, what their parameters are while released, and what programs do with them in a step.

A program trains twice with two ranks: fully sharded, and with `Sharded`, whose parameters are whole. Both have the same
bits, whatever the program does around forward and backward.

Tests: ddp/replica/units.py, ddp/replica/flat.py, ddp/replica/common_order.py, ddp/replica/in_slices.py,
ddp/replica/fully_sharded.py.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from ranks import run_cases, run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import ddp
from ddp.comm.objects import all_gather_object, broadcast_object
from ddp.errors import ConfigError, Diverged
from ddp.gradients.bucket import Bucket, Slot
from ddp.gradients.reducer import slice_bounds
from ddp.replica.flat import absent, is_absent
from ddp.replica.units import dissolve_units, form_of, unit_modules, units_of
from ddp.strategies import Sharded, step
from ddp.strategies.fully_sharded import FullySharded

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (12,), generator=torch.Generator().manual_seed(1))
NUM_STEPS = 4
IN_TURN = "released: its parameters are in slices.*Copy, save and load the module inside of `with model.whole"

# --- which modules are units -----------------------------------------------------------------------------------------


def linear(width: int = 2) -> nn.Linear:
    return nn.Linear(width, width)


class Nested(nn.Module):
    """Has lists in lists, a dictionary, a sequence that is no outermost one, and what is in none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = linear()
        self.stages = nn.ModuleList([nn.ModuleList([linear(), nn.Sequential(linear(), linear())]), linear()])
        self.heads = nn.ModuleDict({"a": linear(), "b": nn.ModuleDict({"c": linear()})})
        self.inner = nn.ModuleDict({"body": nn.Sequential(linear(), nn.ReLU(), linear())})
        self.deep = nn.Module()
        self.deep.layers = nn.Sequential(linear(), nn.Tanh(), linear())


def test_units_are_the_elements_of_outermost_containers() -> None:
    assert list(unit_modules(nn.Sequential(linear(), nn.ReLU(), linear()))) == ["0", "2"]
    assert list(unit_modules(Nested())) == [
        *("stages.0.0", "stages.0.1", "stages.1", "heads.a", "heads.b.c", "inner.body"),
        *("deep.layers.0", "deep.layers.2"),
    ]
    assert unit_modules(linear()) == {}
    net = Net()
    net.alias = net.blocks
    units = units_of(net, list(net.named_parameters()), None)
    assert [(unit.name, len(unit.named)) for unit in units] == [*((f"blocks.{n}", 4) for n in range(3)), ("", 5)]


def test_a_pattern_overrides_them() -> None:
    module = Nested()
    assert list(unit_modules(module, "stages.1")) == ["stages.1"]
    assert list(unit_modules(module, "stages.0.?")) == ["stages.0.0", "stages.0.1"]
    assert list(unit_modules(module, "embed")) == ["embed"]
    with pytest.raises(ConfigError, match=r"^units='blocks.\*': no module has such a name; there are embed, stages, "):
        unit_modules(module, "blocks.*")
    assert list(unit_modules(nn.Sequential(linear(), linear()), "*")) == ["0", "1"], "none that is inside of another"
    with pytest.raises(ConfigError, match=r"units='s\*': stages is a ModuleList, which has no forward; name"):
        unit_modules(module, "s*")
    with pytest.raises(ConfigError, match="there are none"):
        unit_modules(linear(), "*")


def test_slices_of_many_tiny_units_are_balanced() -> None:
    buckets = [Bucket(0, [Slot(0, "tiny", nn.Parameter(torch.zeros(number)))]) for number in (40, 1, 7, 100, 33, 64, 2)]
    held = [0] * 3
    for bucket in buckets * 9:
        bounds = slice_bounds(bucket, 3, held)
        assert bounds[0] == 0 and bounds == sorted(bounds) and bounds[-1] == bucket.numel
        held = [before + bounds[n + 1] - bounds[n] for n, before in enumerate(held)]
    assert max(held) - min(held) <= 112, "the span of the largest, which is no larger than a block"
    alone = sum(slice_bounds(bucket, 3)[1] for bucket in buckets * 9)
    assert alone in (0, sum(held)), "without the others, a rank would have all or nothing of each"


# --- absent parameters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 1), (1, 3), (4, 2, 1, 1), (0, 3)])
def test_an_absent_tensor_has_a_shape_and_one_number(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = absent(torch.ones(shape, dtype=dtype))
        assert is_absent(tensor) and (tensor.shape, tensor.dtype) == (shape, dtype) and tensor.isnan().all()
        assert tensor.untyped_storage().nbytes() == tensor.itemsize
        assert not is_absent(torch.full(shape, torch.nan)) and not is_absent(torch.full((), torch.nan).expand(shape))
        if tensor.numel() > 1:
            with pytest.raises(RuntimeError, match="single memory location"):
                tensor.copy_(torch.ones(shape))


# --- programs --------------------------------------------------------------------------------------------------------


def block(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(4, 8), nn.Linear(8, 3), nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def layers(self) -> list[Callable[[Tensor], Tensor]]:
        return list(self.blocks)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        for each in self.layers():
            hidden = hidden + each(hidden)
        scores: Tensor = self.last(hidden) * self.scale
        return scores


class Twice(Net):
    """Runs each unit twice."""

    def layers(self) -> list[Callable[[Tensor], Tensor]]:
        return [*self.blocks, *self.blocks]


class Checkpointed(Net):
    def layers(self) -> list[Callable[[Tensor], Tensor]]:
        return [lambda hidden, each=each: checkpoint(each, hidden, use_reentrant=False) for each in self.blocks]


class Caller(nn.Module):
    """Calls another unit in the middle of its forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.after, self._inner = nn.Linear(8, 8), nn.Linear(8, 8), [inner]

    def forward(self, hidden: Tensor) -> Tensor:
        after: Tensor = self.after(self._inner[0](torch.tanh(self.before(hidden))))
        return after


class Calling(Net):
    def __init__(self) -> None:
        super().__init__()
        inner = self.blocks[2]
        self.blocks = nn.ModuleList([Caller(inner), inner, Caller(inner)])


class Keeping(nn.Module):
    """Keeps a number that it has computed with its weights, for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.kept = nn.Linear(8, 8), torch.zeros(())

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.inner(hidden)
        self.kept = (found * found).mean() * self.inner.weight.sum()
        return torch.tanh(found)


class WithSides(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping() for _ in range(3))


class Tied(Net):
    """Units share a weight, which the root holds then; and a layer of the root shares one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.blocks[1][2].bias = self.first.bias


class TiedToTheRoot(Net):
    """A layer of the root shares a weight whose first name is a unit's: GPTs with an embedding in a dictionary do."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, 16, bias=False)
        self.again.weight = self.blocks[0][0].weight

    def layers(self) -> list[Callable[[Tensor], Tensor]]:
        return [*self.blocks, lambda hidden: self.again(hidden)[:, :8]]


class Quantized(Net):
    """Whole numbers, which cannot be NaN, and are frozen."""

    def __init__(self) -> None:
        super().__init__()
        for each in self.blocks:
            each.factors = nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)
            each.register_forward_hook(lambda each, _, hidden: hidden * each.factors / 8)


class PartlyFrozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[2][0].requires_grad_(False)


class Pruned(Net):
    """A hook of the program computes a weight before the forward of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = prune.random_unstructured(nn.Linear(8, 8), "weight", amount=0.5)


class OtherLayouts(Net):
    """Autograd saves tensors that have no memory of their own."""

    def layers(self) -> list[Callable[[Tensor], Tensor]]:
        return [self.sparse, self.nested]

    def sparse(self, hidden: Tensor) -> Tensor:
        for other in (Tensor.to_sparse, Tensor.to_sparse_csr):
            hidden = other(torch.eye(len(hidden), dtype=hidden.dtype)) @ self.blocks[0](hidden)
        return hidden

    def nested(self, hidden: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor([hidden[:1], hidden[1:]], layout=torch.jagged)
        found: Tensor = self.blocks[1](rows).values() + self.blocks[2](hidden)
        return found


class Channels(nn.Module):
    """Weights in the order of channels, and kernels of one pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 6, 2), nn.Tanh(), nn.Conv2d(6, 3, 1), nn.Flatten(), nn.Linear(3, 3))
        self.to(memory_format=torch.channels_last)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layers(inputs.view(-1, 1, 2, 2).expand(-1, 2, -1, -1))
        return scores


Strategy = Any


def loss_of(strategy: Strategy, inputs: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(strategy.model(inputs), classes)


def plain(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
    loss_of(strategy, inputs, classes).backward()


def checkpointed_around(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
    F.cross_entropy(checkpoint(strategy.model, inputs, use_reentrant=False), classes).backward()


def saved_on_cpu(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(strategy, inputs, classes)
    loss.backward()


def hooks_outside(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
    packed: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.shape) or x.detach().clone(), lambda x: x):
        loss = loss_of(strategy, inputs, classes)
    loss.backward()
    assert inputs.shape in packed and len(packed) > 5, "those that are no parameters"


def with_sides(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
    loss = loss_of(strategy, inputs, classes)
    (loss + sum(each.kept for each in strategy.model.module.blocks)).backward()


def retained(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
    loss = loss_of(strategy, inputs, classes)
    loss.backward(retain_graph=True)
    strategy.optimizer.zero_grad()
    loss.backward()


def two_forwards(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
    (loss_of(strategy, inputs, classes) + loss_of(strategy, inputs * 0.5, classes)).backward()


def evaluations(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
    for context in (torch.no_grad, torch.inference_mode, nullcontext):
        strategy.model.eval()
        with context():
            assert strategy.model(inputs).isfinite().all()
        strategy.model.train()
        loss = loss_of(strategy, inputs, classes)
        strategy.optimizer.zero_grad()
        loss.backward()


def gradient_of_inputs(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
    inputs = inputs.clone().requires_grad_(True)
    [found] = torch.autograd.grad(strategy.model(inputs).sum(), inputs)
    assert found.isfinite().all() and found.any()
    loss_of(strategy, inputs + found, classes).backward()


def penalty(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
    inputs = inputs.clone().requires_grad_(True)
    outputs = strategy.model(inputs)
    [found] = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    (F.cross_entropy(outputs, classes) + found.square().sum()).backward()


def hooks_on_parameters(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
    seen: list[Tensor] = []
    parameters = list(strategy.model.parameters())
    handles = [each.register_hook(lambda gradient: gradient * 0.5) for each in parameters]
    handles += [each.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad)) for each in parameters]
    loss_of(strategy, inputs, classes).backward()
    for handle in handles:
        handle.remove()
    assert len(seen) == len(parameters) and all(each.isfinite().all() for each in seen)


def zeroed(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
    with strategy.model.no_sync():
        loss_of(strategy, inputs, classes).backward()
    strategy.optimizer.zero_grad(set_to_none=False)
    loss_of(strategy, inputs, classes).backward()


def replaced(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
    loss_of(strategy, inputs, classes).backward()
    for name, parameter in strategy.model.module.named_parameters():
        if "bias" in name or name == "scale":
            parameter.grad = torch.full(parameter.shape, 0.01)
        elif name == "first.weight":
            parameter.grad = torch.arange(32.0).view(4, 8).t() / 100  # in another order of memory
        elif name == "last.weight" and number == 1:
            parameter.grad = None


def freezing(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
    module = strategy.model.module
    if number == 1:
        module.blocks[1].requires_grad_(False)
        module.first.weight.requires_grad_(False)
    if number == 3:
        module.blocks[1].requires_grad_(True)
        module.blocks[0][0].requires_grad_(False)
    loss_of(strategy, inputs, classes).backward()


def autocast(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        outputs = strategy.model(inputs)
    F.cross_entropy(outputs.float(), classes).backward()


def after_an_error(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        strategy.model(inputs[:, :3])
    handle = strategy.model.module.blocks[1].register_forward_pre_hook(fails, prepend=True)
    with pytest.raises(ZeroDivisionError):
        strategy.model(inputs)
    handle.remove()
    loss_of(strategy, inputs, classes).backward()


def fails(*_: Any) -> None:
    raise ZeroDivisionError


PROGRAMS: dict[str, tuple[type[nn.Module], Any]] = {
    "plain": (Net, plain),
    "a unit runs twice": (Twice, plain),
    "units call units": (Calling, plain),
    "checkpointed units": (Checkpointed, plain),
    "checkpointed around": (Net, checkpointed_around),
    "checkpointed twice": (Checkpointed, checkpointed_around),
    "channels": (Channels, plain),
    "tied": (Tied, plain),
    "tied to the root": (TiedToTheRoot, plain),
    "quantized": (Quantized, plain),
    "partly frozen": (PartlyFrozen, plain),
    "pruned": (Pruned, plain),
    "other layouts": (OtherLayouts, plain),
    "partly frozen, two forwards": (PartlyFrozen, two_forwards),
    "sides": (WithSides, with_sides),
    **{
        each.__name__: (Net, each)
        for each in (
            *(saved_on_cpu, hooks_outside, retained, two_forwards, evaluations, gradient_of_inputs, penalty),
            *(hooks_on_parameters, zeroed, replaced, freezing, autocast, after_an_error),
        )
    },
}


def made(kind: Any = FullySharded, net: Callable[[], nn.Module] = Net) -> Strategy:
    torch.manual_seed(5)
    module = net()
    return kind(module, torch.optim.AdamW(module.parameters(), lr=0.05, fused=True))


def mine() -> tuple[Tensor, Tensor]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return X[rank::world_size].to(torch.get_default_dtype()), CLASSES[rank::world_size]


def trained(kind: Any, net: type[nn.Module], program: Any) -> dict[str, Tensor]:
    strategy = made(kind, net)
    for number in range(NUM_STEPS):
        strategy.optimizer.zero_grad()
        program(strategy, *mine(), number)
        step(strategy)
    with strategy.model.whole():
        found = {name: value.detach().clone() for name, value in strategy.model.module.state_dict().items()}
    strategy.finish()
    return found


def programs(comm: ddp.Communicator) -> None:
    for name, (net, program) in PROGRAMS.items():
        try:
            expected, found = trained(Sharded, net, program), trained(FullySharded, net, program)
        except BaseException as error:
            error.add_note(f"in the program {name!r}")
            raise
        different = [each for each in expected if not torch.equal(expected[each], found[each])]
        assert not different, (name, different)


def micro_batches(comm: ddp.Communicator) -> None:
    """Each is summed by itself, so the order of additions differs, and nothing else."""

    def one_by_one(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
        with strategy.model.no_sync():
            for first in range(2):
                loss_of(strategy, inputs[first::3], classes[first::3]).backward()
        loss_of(strategy, inputs[2::3], classes[2::3]).backward()

    def dropped(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
        with strategy.model.no_sync():
            loss_of(strategy, inputs, classes).backward()
        strategy.optimizer.zero_grad()
        one_by_one(strategy, inputs, classes, number)

    def all_forwards_first(strategy: Strategy, inputs: Tensor, classes: Tensor, number: int) -> None:
        with strategy.model.no_sync():
            losses = [loss_of(strategy, inputs[first::3], classes[first::3]) for first in range(2)]
            for loss in losses:
                loss.backward()
        loss_of(strategy, inputs[2::3], classes[2::3]).backward()

    nets = (Net, Twice, Checkpointed, PartlyFrozen)
    for net, program in (*((net, one_by_one) for net in nets), (Net, dropped), (Net, all_forwards_first)):
        kept = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        found = [trained(kind, net, program) for kind in (Sharded, FullySharded)]
        torch.set_default_dtype(kept)
        for name, expected in found[0].items():
            torch.testing.assert_close(found[1][name], expected, rtol=1e-11, atol=1e-13)


# --- what is refused, and what whole() gives -------------------------------------------------------------------------


def released(comm: ddp.Communicator) -> None:
    strategy = made()
    module = strategy.model.module
    for name, parameter in module.named_parameters():
        assert parameter.isnan().all() and parameter.shape == dict(Net().named_parameters())[name].shape
    parts = module.blocks[1], module.blocks[1][2], module.first  # a unit, a part of one, and of the root
    states = [each.state_dict for each in (module, *parts)]
    for act in (*states, lambda: module.load_state_dict(Net().state_dict())):
        with pytest.raises(ConfigError, match=rf"(the root unit|unit blocks.1) is {IN_TURN}"):
            act()
    with pytest.raises(ConfigError, match=r"^copy model\.module inside of `with model\.whole"):
        torch.optim.swa_utils.AveragedModel(strategy.model)
    for act in (copy.deepcopy, cloudpickle.dumps, lambda each: torch.save(each, io.BytesIO(), cloudpickle)):
        for each in (module, *parts):
            with pytest.raises(ConfigError, match=IN_TURN):
                act(each)
    shapes = {name: value.shape for name, value in form_of(module).items()}
    assert shapes == {name: value.shape for name, value in Net().state_dict().items()}
    for act in (lambda each: each.copy_(torch.ones_like(each)), lambda each: each.add_(1)):
        with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
            act(module.first.weight)


def halve(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.fill_(0.5)


def halve_data(parameter: nn.Parameter) -> None:
    parameter.data.fill_(0.5)


def replace_data(parameter: nn.Parameter) -> None:
    parameter.data = torch.full(parameter.shape, 0.5)


def written(comm: ddp.Communicator) -> None:
    """Torch does not refuse some writes: to one element, of one value, another tensor, and those of a forward."""
    for name, unit in (("scale", ""), ("blocks.1.0.weight", "blocks.1")):
        says = f"{name} was written to outside of `with model.whole.*, which has changed no rank's slice"
        strategy = made()
        parameter = strategy.model.module.get_parameter(name)
        for act in (halve, halve_data, replace_data):
            act(parameter)
            with pytest.raises(ConfigError, match=says):
                strategy.model(mine()[0])
        assert strategy.model(mine()[0]).isfinite().all()
        with strategy.model.whole():
            assert strategy.model.module.scale == 1
        for act in (halve, replace_data):
            strategy = made()
            parameter = strategy.model.module.get_parameter(name)
            strategy.model.module.get_submodule(unit).register_forward_pre_hook(partial(write, act, parameter))
            with pytest.raises(ConfigError, match=says):
                plain(strategy, *mine(), 0)
                step(strategy)


    strategy = made(net=Bounded)
    with pytest.raises(ConfigError, match=r"rows.weight was written to outside of .* max_norm of an embedding w"):
        for number in range(2):
            plain(strategy, *mine(), number)
            step(strategy)
    strategy = made()
    strategy.model.bfloat16()
    with pytest.raises(ConfigError, match=r"scale was torch.float32 and is torch.bfloat16 since .*: convert the"):
        strategy.model(mine()[0].bfloat16())


def write(act: Callable[[nn.Parameter], None], parameter: nn.Parameter, *_: Any) -> None:
    act(parameter)


def whole(comm: ddp.Communicator) -> None:
    torch.manual_seed(5)
    first, strategy = Net(), made()
    module = strategy.model.module
    with strategy.model.whole():
        for mine_, other in zip(module.parameters(), first.parameters(), strict=True):
            assert torch.equal(mine_, other)
        twin, thawed = copy.deepcopy(module), cloudpickle.loads(cloudpickle.dumps(module))
        with strategy.model.whole():  # nested
            module.scale.data.fill_(2.0)
        module.blocks[0][0].weight.data = torch.ones(16, 8)
        with torch.no_grad():
            module.last.weight.mul_(2)
        assert module.scale == 2
    assert module.scale.isnan() and module.blocks[0][0].weight.isnan().all()
    for each in (twin, thawed):
        assert torch.equal(each(X), first(X)) and each.state_dict().keys() == first.state_dict().keys()
        each.load_state_dict(first.state_dict())
        copy.deepcopy(each)(X).sum().backward()
    found = strategy.model.state_dict()
    assert list(found) == [f"module.{name}" for name in first.state_dict()]
    assert found["module.scale"] == 2 and torch.equal(found["module.blocks.0.0.weight"], torch.ones(16, 8))
    assert torch.equal(found["module.last.weight"], 2 * first.last.weight)
    strategy.model.load_state_dict(first.state_dict())
    with pytest.raises(ZeroDivisionError), strategy.model.whole():
        raise ZeroDivisionError
    assert torch.equal(strategy.model(X), first(X)) and module.scale.isnan() == (comm.rank < 0)
    dissolve_units(module)
    for mine_, other in zip(module.parameters(), first.parameters(), strict=True):
        assert torch.equal(mine_, other)
    assert not module._forward_pre_hooks and not module.blocks[0]._forward_hooks


def in_another_replica(comm: ddp.Communicator) -> None:
    """A part, or a larger module around it, is whole in the replica that is made next; a replica inside stays."""
    for make in (lambda module: module.blocks[1], lambda module: nn.Sequential(module, nn.Linear(3, 3))):
        torch.manual_seed(5)
        first, strategy = Net(), made()
        strategy.model(mine()[0])
        other = made(net=lambda make=make, strategy=strategy: make(strategy.model.module))
        with other.model.whole():
            for name, found in other.model.module.named_parameters():
                if not name.startswith("1."):
                    assert torch.equal(found, make(first).get_parameter(name))
        with pytest.raises(RuntimeError, match="the module is in another replica since"):
            strategy.model(mine()[0])
    strategy = made()
    assert torch.equal(ddp.DistributedDataParallel(strategy.model.module).module(X), first(X))
    inner = FullySharded.replica_of(Net())
    outer = made(net=lambda: nn.Sequential(inner, nn.Linear(3, 3)))
    assert outer.model(mine()[0]).isfinite().all() and inner(mine()[0]).isfinite().all()


def without_zero_grad(comm: ddp.Communicator) -> None:
    strategy = made()
    plain(strategy, *mine(), 0)
    step(strategy)
    with pytest.raises(RuntimeError, match=r"has the gradient of the last step, which is in slices.*call zero_grad"):
        plain(strategy, *mine(), 0)
    strategy.optimizer.zero_grad(set_to_none=False)
    plain(strategy, *mine(), 0)


def frozen(comm: ddp.Communicator) -> None:
    """A model that is not trained, but computes in slices; gradients flow through it."""
    torch.manual_seed(5)
    net = Net()
    twin = FullySharded.replica_of(copy.deepcopy(net).requires_grad_(False))
    found = []
    for each in (net, twin):
        inputs = mine()[0].requires_grad_(True)
        F.cross_entropy(each(inputs), mine()[1]).backward()
        found.append(inputs.grad)
    assert torch.equal(*found)
    assert all(parameter.isnan().all() for parameter in twin.module.blocks[2].parameters())


def on_the_meta_device(comm: ddp.Communicator) -> None:
    with torch.device("meta" if comm.rank else "cpu"):
        net = Net()
    strategy = made(net=lambda: net)
    plain(strategy, *mine(), 0)
    step(strategy)
    with torch.device("meta" if comm.rank else "cpu"):
        net = Net()
        net.blocks[1].table = torch.ones(3)
    with pytest.raises(ConfigError, match=r"^blocks.1.table is on the meta device on rank 1, and gets no values, beca"):
        made(net=lambda: net)


def without_backward(comm: ddp.Communicator) -> None:
    """A step has the gradients of one backward, which has averaged them."""

    def inside_no_sync(strategy: Strategy) -> None:
        with strategy.model.no_sync():
            plain(strategy, *mine(), 0)

    def of_the_module(strategy: Strategy) -> None:
        F.cross_entropy(strategy.model.module(mine()[0]), mine()[1]).backward()

    def by_hand(strategy: Strategy) -> None:
        parameters = list(strategy.model.parameters())
        found = torch.autograd.grad(loss_of(strategy, *mine()), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient

    for act in (inside_no_sync, of_the_module, by_hand):
        for kind in (Sharded, FullySharded):
            strategy = made(kind)
            act(strategy)
            with pytest.raises(RuntimeError, match="no backward has averaged gradients since the last step"):
                step(strategy)
    strategy = made()
    plain(strategy, *mine(), 0)
    step(strategy)
    with pytest.raises(RuntimeError, match="no backward has averaged gradients since the last step"):
        step(strategy)


def read_for_the_loss(comm: ddp.Communicator) -> None:
    strategy = made()
    penalty = sum(each.square().sum() for each in strategy.model.parameters())
    (loss_of(strategy, *mine()) + penalty).backward()
    with pytest.raises(Diverged, match=r"norm of step 1 is nan.*their unit.s forward, where they read as NaN"):
        step(strategy)


def refused_kinds(comm: ddp.Communicator) -> None:
    net = Net()
    net.blocks[1] = torch.jit.script(net.blocks[1])
    with pytest.raises(ConfigError, match=r"blocks\.1 is a ScriptModule, which takes no hooks"):
        FullySharded(net, torch.optim.SGD(net.parameters()))


def outside(comm: ddp.Communicator) -> None:
    """A parameter that is used outside of its unit is found if autograd saves it; else the outputs are NaN."""
    strategy = made()
    module = strategy.model.module
    handle = module.register_forward_hook(lambda module, _, outputs: outputs + module.blocks[1][2].bias.sum())
    plain(strategy, *mine(), 0)
    with pytest.raises(Diverged, match="the loss uses parameters outside of their unit's forward"):
        step(strategy)
    strategy.optimizer.zero_grad()
    handle.remove()
    for use in (
        lambda module, inputs, outputs: outputs * module.blocks[1][0].weight.square().sum(),
        lambda module, inputs, outputs: F.linear(outputs[:, :1].expand(-1, 8), module.blocks[1][0].weight),
    ):
        handle = module.register_forward_hook(use)
        with pytest.raises(ConfigError, match=r"blocks.1.0.weight is used outside of the forward of unit blocks.1,"):
            strategy.model(X)
        handle.remove()
    (loss_of(strategy, *mine()) + module.blocks[1][0].weight.square().sum()).backward()
    with pytest.raises(Diverged, match=r"^the gradient norm of step \d is nan .* Or the loss uses parameters outs"):
        step(strategy)
    strategy.optimizer.zero_grad()
    with strategy.model.whole():
        (loss_of(strategy, *mine()) + module.blocks[1][0].weight.square().sum()).backward()
    step(strategy)


def updated_between(comm: ddp.Communicator) -> None:
    """As with torch, whose parameters count their versions; reading is none."""
    strategy = made()
    loss = loss_of(strategy, *mine())
    with strategy.model.whole():
        assert all(each.isfinite().all() for each in strategy.model.parameters())
    loss.backward(retain_graph=True)
    step(strategy)
    strategy.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"(the root unit|unit blocks.\d) has been updated since the forward"):
        loss.backward()


def transforms(comm: ddp.Communicator) -> None:
    strategy, inputs = made(), mine()[0]
    gradient = torch.func.grad(lambda each: strategy.model(each).square().sum())
    with pytest.raises(ConfigError, match=r"torch.func transforms a model in slices inside of `with model.whole"):
        gradient(inputs)
    with strategy.model.whole():
        found = gradient(inputs)
    torch.manual_seed(5)
    net = Net()
    assert torch.equal(found, torch.func.grad(lambda each: net(each).square().sum())(inputs))
    plain(strategy, *mine(), 0)
    step(strategy)


class Rows(Net):
    how: Mapping[str, Any] = {"sparse": True}

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(3, 8, **self.how)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.rows(torch.tensor([1])).sum()


class Bounded(Rows):
    """Writes to a weight in its forward."""

    how: Mapping[str, Any] = {"max_norm": 0.1}


def lazy(comm: ddp.Communicator) -> None:
    with pytest.raises(ConfigError, match=r"weight of a lazy module has no shape yet: run one forward before making t"):
        made(net=lambda: nn.LazyLinear(3))


def sparse_gradient(comm: ddp.Communicator) -> None:
    with pytest.raises(ConfigError, match=r"rows.weight has a sparse gradient, which no slice can hold"):
        plain(made(net=Rows), *mine(), 0)


def compiled_around(comm: ddp.Communicator) -> None:
    """The compiler must not follow what gathers units, of which it warns."""
    strategy = made()
    model = torch.compile(strategy.model, backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo ")
        F.cross_entropy(model(mine()[0]), mine()[1]).backward()
    step(strategy)


# --- memory ----------------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Units of several sizes, the largest in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 64)
        self.blocks = nn.ModuleList(block(64) for _ in range(12))
        self.last = nn.Linear(64, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for each in self.blocks:
            hidden = hidden + each(hidden)
        scores: Tensor = self.last(hidden)
        return scores


def held_bytes(known: set[int]) -> int:
    """Returns the bytes of the storages of all tensors that are not known."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if isinstance(each, Tensor) and each.device.type == "cpu":
            storage = each.untyped_storage()
            if storage.data_ptr() not in known:
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def storages() -> set[int]:
    gc.collect()
    return {each.untyped_storage().data_ptr() for each in gc.get_objects() if isinstance(each, Tensor)}


def memory(comm: ddp.Communicator) -> None:
    known = storages()
    strategy = made(net=Deep)
    units = [unit.num_bytes for unit in strategy.units.all]
    num_bytes, most = sum(units), units[-1] + sum(sorted(units[:-1])[-3:])
    between: list[int] = []
    peaks: list[int] = []

    def look(*_: Any) -> None:
        peaks.append(held_bytes(known))

    for number in range(4):
        strategy.optimizer.zero_grad()
        between.append(held_bytes(known))
        if number == 2:
            strategy.model.module.blocks[3].requires_grad_(False)
        if number == 1:
            handles = [each.register_full_backward_hook(look) for each in strategy.model.module.blocks]
            handles += [each.register_forward_hook(look) for each in strategy.model.module.blocks]
        plain(strategy, *mine(), number)
        if number == 1:
            for handle in handles:
                handle.remove()
        step(strategy)
    between.append(held_bytes(known))
    small = 32 * 1024  # activations of a few samples
    assert max(between[:3]) <= 1.1 * 3 * num_bytes / comm.world_size, (between, num_bytes)
    assert between[-1] <= between[2] + 2 * units[3] + small, "the whole state of what is frozen, and nothing else"
    assert max(peaks) - between[1] <= most + num_bytes / comm.world_size + small, (max(peaks), between, most)
    strategy.finish()


def loading(comm: ddp.Communicator) -> None:
    """On other ranks than 0 a state takes no more memory than a unit while it comes."""
    strategy = made(net=Deep)
    plain(strategy, *mine(), 0)
    step(strategy)
    state = broadcast_object(comm, strategy.state_dict())
    if comm.rank:  # which knows the forms alone
        state = apply_to_collection(state, Tensor, lambda each: each.to("meta") if each.dim() else each)
    known = storages()
    strategy, peaks, broadcast = made(net=Deep), list[int](), comm.broadcast

    def watched(*given: Any, **how: Any) -> Any:
        found = broadcast(*given, **how)
        peaks.append(held_bytes(known))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "broadcast", watched)
        strategy.load_state_dict(state)
    more, largest = max(peaks) - held_bytes(known), max(unit.num_bytes for unit in strategy.units.all)
    assert all_gather_object(comm, more)[1] <= 1.05 * largest, (more, largest)
    strategy.finish()


CASES = (
    *(programs, micro_batches, released, written, whole, without_zero_grad, outside, updated_between, transforms),
    *(in_another_replica, without_backward, read_for_the_loss, refused_kinds, lazy, sparse_gradient, frozen),
    *(on_the_meta_device, memory, loading, compiled_around),
)


def cases() -> None:
    run_cases(CASES, ddp.init(abort_s=20), ())


def test_programs_train_as_with_whole_parameters_and_released_ones_are_protected() -> None:
    run_ranks(cases, 2)
