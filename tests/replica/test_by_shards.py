"""Gradients added up by shards: the bits of an explicit tree over the shards, at any world size; and what is refused.

The oracle is one process that knows no ranks: torch.autograd.grad of each shard's loss on a copy of the model, added up
by torch.add in the order of the tree.

Tests: ddp/replica/shard_buffers.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from ranks import RankFailed, collect, run_ranks, start_ranks, unfailed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ddp
from ddp.collectives.shards import shards_of_rank
from ddp.errors import ConfigError, ReplicaMismatch, UnusedParameters
from ddp.gradients import ErrorFeedback, Sign
from ddp.replica.broadcast import tensor_hash
from ddp.replica.fully_sharded import FullyShardedDataParallel

NUM_STEPS = 3  # the first one learns the layout
WORLD_SIZES = (1, 2, 3, 4, 5)
Part = tuple[Tensor, Tensor]


def tree(terms: Sequence[Tensor]) -> Tensor:
    if len(terms) == 1:
        return terms[0]
    middle = 1 << (len(terms) - 1).bit_length() - 1
    return torch.add(tree(terms[:middle]), tree(terms[middle:]))


# --- members: a model, and what each shard of each step brings -------------------------------------------------------


class Tied(nn.Module):
    """A weight under two names, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.middle, self.decode = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 6, bias=False)
        self.decode.weight = nn.Parameter(self.encode.weight.detach().t().clone())
        self.again = nn.Linear(9, 6, bias=False)
        self.again.weight = self.decode.weight
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.middle(self.middle(self.encode(inputs)).tanh()).tanh()
        outputs: Tensor = self.head(self.decode(hidden) * self.again(hidden))
        return outputs


class Sometimes(nn.Module):
    """Has a layer that only some inputs go through: those whose first number is large."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rarely = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.always(inputs)
        return outputs + self.rarely(inputs) if float(inputs[0, 0]) > 50 else outputs


class Rematerialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(lambda each: self.norm(self.first(each)).tanh(), inputs, use_reentrant=False)
        outputs: Tensor = self.last(hidden)
        return outputs


class Reentrant(nn.Module):
    """Two re-entrant checkpoints share a layer, so that its gradient comes in two pieces."""

    use_reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = checkpoint(lambda each: self.twice(each).tanh(), hidden, use_reentrant=self.use_reentrant)
        outputs: Tensor = self.last(hidden)
        return outputs


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def with_hooks() -> nn.Module:
    """The user's own hooks double each gradient, which must not be a sum of two shards."""
    module = mlp()
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(double)
    return module


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 7),
        nn.BatchNorm1d(7, momentum=None), nn.Linear(7, 3),
    )  # fmt: skip


def large() -> nn.Module:
    """Three gradients of 64 KB and more, which go to their buckets by themselves, between small ones."""
    return nn.Sequential(nn.Linear(6, 140), nn.Tanh(), nn.Linear(140, 140), nn.Tanh(), nn.Linear(140, 130), nn.Tanh(),
                         nn.Linear(130, 130), nn.Tanh(), nn.Linear(130, 3))  # fmt: skip


def frozen() -> nn.Module:
    module = mlp()
    module[0].bias.requires_grad_(False)
    return module


def sizes_of(step: int, shard: int) -> list[int]:
    """Returns the samples of each part of a shard: here of one."""
    return [2 + (step + 3 * shard) % 3]


def in_parts(step: int, shard: int) -> list[int]:
    return [2, 3, 2, 4][: 1 + (step + shard * shard) % 4]


def mostly_empty(step: int, shard: int) -> list[int]:
    """Shards without samples: at the beginning, at the end, between; then all but one; then all; then none."""
    return [[3] if shard in (1, 2, 5) else [], [4] if shard == 6 else [], [], [3]][step]


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    num_shards: int = 8
    sizes: Callable[[int, int], list[int]] = sizes_of
    how: dict[str, Any] = {"bucket_cap_mb": 25.0}  # noqa: RUF012 it is never changed
    dtype: torch.dtype = torch.float32
    num_steps: int = NUM_STEPS
    between: Callable[[nn.Module, int], None] = lambda module, step: None
    rare: int | None = None  # the shard whose inputs are large
    factor: float = 1.0  # of the gradients, by hooks


def freeze_and_unfreeze(module: nn.Module, step: int) -> None:
    """Is called before each step."""
    module[2].weight.requires_grad_(step != 2)


SMALL: dict[str, Any] = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0005}
CASES = {
    "mlp": Case(mlp, how=SMALL),
    "mlp, one bucket": Case(mlp, 6),
    "mlp, 5 shards": Case(mlp, 5, how=SMALL),
    "mlp, 13 shards": Case(mlp, 13, how=SMALL),
    "in the background": Case(mlp, 6, how={**SMALL, "overlap": True}),
    "cnn": Case(cnn, how=SMALL),
    "cnn, parts": Case(cnn, 7, in_parts),
    "tied": Case(Tied, 6, how=SMALL),
    "frozen": Case(frozen, 8, how=SMALL),
    "frozen for a step": Case(mlp, 8, how=SMALL, between=freeze_and_unfreeze, num_steps=5),
    "empty shards": Case(mlp, 8, mostly_empty, SMALL, num_steps=4),
    "cnn, empty shards": Case(cnn, 7, mostly_empty, SMALL, num_steps=4),
    "parts": Case(mlp, 8, in_parts, SMALL),
    "large": Case(large, 5),
    "large, parts": Case(large, 6, in_parts, {"bucket_cap_mb": 0.1}),
    "checkpoints": Case(Rematerialised, 8, in_parts, SMALL),
    "re-entrant checkpoints": Case(Reentrant, 8),  # in one bucket, or the second piece would be refused
    "hooks of one's own": Case(with_hooks, 8, how=SMALL, factor=2.0),
    "bf16": Case(mlp, 8, in_parts, SMALL, torch.bfloat16),
    "fp16": Case(mlp, 8, sizes_of, SMALL, torch.float16),
    "fp64": Case(mlp, 6, in_parts, SMALL, torch.float64),
    "a layer of one shard": Case(Sometimes, 8, rare=3),
}
ON_MANY = ("mlp", "mlp, 5 shards", "cnn, parts", "tied", "empty shards", "large, parts")  # more than 3 ranks
OVER_LINKS = ("mlp", "mlp, 5 shards", "in the background", "cnn, parts", "empty shards", "large")


def parts_of(case: Case, step: int, shard: int) -> list[Part]:
    """Returns inputs and targets; a function of step and shard alone."""
    generator = torch.Generator().manual_seed(100 * step + shard)
    found = []
    for size in case.sizes(step, shard):
        inputs = torch.randn(size, 6, generator=generator)
        inputs[0, 0] += 100 * (shard == case.rare)
        found.append((inputs.to(case.dtype), torch.randn(size, 3, generator=generator).to(case.dtype)))
    return found


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets, reduction="sum") / 16


# --- the oracle ------------------------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def explicit(module: nn.Module, case: Case, step: int) -> Wanted:
    """Returns what one step by shards ends with, from copies of the model."""
    V = case.num_shards
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    zeros = [torch.zeros_like(parameter) for parameter in named.values()]
    start = {name: buffer.clone() for name, buffer in module.named_buffers()}
    smaller = V if case.dtype is torch.float16 else 1  # terms that may overflow are made smaller before
    gradients, buffers = [], []
    largest = {name: each for name, each in start.items() if not each.is_floating_point()}
    for shard in range(V):
        twin, parts, total = copy.deepcopy(module), parts_of(case, step, shard), zeros
        twin.use_reentrant = False  # type: ignore[assignment]  # autograd.grad knows no other checkpoints
        twin_named = [dict(twin.named_parameters())[name] for name in named]
        for number, (inputs, targets) in enumerate(parts):
            for name, buffer in twin.named_buffers():
                if name in largest:
                    buffer.copy_(start[name])  # each forward counts from where the step began
            found = torch.autograd.grad(loss_of(twin(inputs), targets), twin_named, allow_unused=True)
            filled = [zero if each is None else each for each, zero in zip(found, zeros, strict=True)]
            total = [torch.add(a, b) for a, b in zip(total, filled, strict=True)] if number else filled
            largest = {name: torch.maximum(each, twin.get_buffer(name)) for name, each in largest.items()}
        gradients.append([case.factor * each / smaller for each in total])
        if parts:
            buffers.append({name: buffer.double() for name, buffer in twin.named_buffers()})
        else:
            buffers.append({name: torch.zeros_like(buffer).double() for name, buffer in start.items()})
    num = sum(bool(parts_of(case, step, shard)) for shard in range(V))
    means = {
        name: (tree([each[name] for each in buffers]) / num).to(start[name].dtype) if num else start[name]
        for name in start.keys() - largest.keys()
    }
    sums = [tree([each[index] for each in gradients]) + 0.0 for index in range(len(named))]
    return Wanted(dict(zip(named, (each * smaller / V for each in sums), strict=True)), {**largest, **means})


class Precise(NamedTuple):
    """In float64, by one backward: the gradient of the mean of all shards' losses, and what rounding may do to it.

    Attributes:
        amplification: BatchNorm divides the rounding of its inputs x, 2⁻²⁴ |x|, by their standard deviation, which of
            two samples that are nearly alike is tiny: the largest |x| ÷ deviation of all its inputs.
    """

    gradients: dict[str, Tensor]
    amplification: float


def in_float64(module: nn.Module, case: Case, step: int) -> Precise:
    twin, amplifications = copy.deepcopy(module).double(), [0.0]

    def measure(layer: nn.Module, inputs: tuple[Tensor]) -> None:
        by_channel = inputs[0].detach().transpose(0, 1).flatten(1)
        deviation = (by_channel.var(1, unbiased=False) + layer.eps).sqrt()
        amplifications.append(float((by_channel.abs().amax(1) / deviation).max()))

    for layer in twin.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.register_forward_pre_hook(measure)
    losses = [
        loss_of(twin(inputs.double()), targets.double())
        for shard in range(case.num_shards)
        for inputs, targets in parts_of(case, step, shard)
    ]
    if losses:
        (case.factor * sum(losses, start=torch.zeros(())) / case.num_shards).backward()
    gradients = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in twin.named_parameters()}
    return Precise(gradients, max(amplifications))


# --- a run on ranks --------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What a rank has found in one case."""

    hashes: list[str]  # of gradients, parameters and buffers after each step
    wrong: list[str]  # what is not as the oracle has it


def differs(one: Tensor, other: Tensor) -> bool:
    """Returns True if bits differ; the sign of a zero counts."""
    flat = [each.detach().contiguous().flatten() for each in (one, other)]
    return flat[0].dtype != flat[1].dtype or not torch.equal(*(each.view(torch.uint8) for each in flat))


def one_step(model: nn.Module, case: Case, step: int) -> None:
    for shard in model.shards:
        with model.shard(shard):
            parts = parts_of(case, step, shard)
            for number, (inputs, targets) in enumerate(parts, 1):
                with model.no_sync() if number < len(parts) else nullcontext():
                    loss_of(model(inputs), targets).backward()


def trained(case: Case, comm: Any) -> Found:
    """Asks the oracle if there is one rank; the others must have the bits of that one."""
    torch.manual_seed(0 if comm.rank == 0 else 99)  # rank 0's parameters are those that count
    module = case.make().to(case.dtype)
    model = ddp.BucketedDataParallel(module, num_shards=case.num_shards, **case.how)
    assert list(model.shards) == list(shards_of_rank(comm.rank, comm.world_size, case.num_shards))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    hashes, wrong = list[str](), list[str]()
    for step in range(case.num_steps):
        case.between(module, step)
        asked = (explicit(module, case, step), in_float64(module, case, step)) if comm.world_size == 1 else None
        optimizer.zero_grad()
        one_step(model, case, step)
        model.raise_pending()
        has_gradient = [parameter.grad is not None for parameter in module.parameters()]
        assert has_gradient == [parameter.requires_grad for parameter in module.parameters()]
        wrong += [f"step {step}: {what}" for what in differences(module, *asked)] if asked else []
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        optimizer.step()
        hashes.append(" ".join(map(tensor_hash, [*gradients, *module.state_dict().values()])))
    assert model.num_steps == case.num_steps
    assert (case.make, case.how) != (mlp, SMALL) or len(model.buckets) > 1
    model.verify_replicas()
    return Found(hashes, wrong)


def differences(module: nn.Module, wanted: Wanted, precise: Precise) -> list[str]:
    found = [name for name, buffer in module.named_buffers() if differs(buffer, wanted.buffers[name])]
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            tolerance = {torch.bfloat16: 0.1, torch.float16: 0.02}.get(parameter.dtype, 1e-5)
            tolerance += 4 * 2**-24 * precise.amplification  # forward and backward round it, in each layer
            found += [f"{name}.grad"] if differs(parameter.grad, wanted.gradients[name]) else []
            if not torch.allclose(parameter.grad.double(), precise.gradients[name], rtol=tolerance, atol=tolerance):
                found.append(f"{name}.grad is not that of float64")
    return found


# --- programs that go other ways -------------------------------------------------------------------------------------


class Centred(nn.Module):
    """Keeps a mean of its outputs, as self-distillation does."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.norm(self.net(inputs))
        return outputs - self.centre


def past_the_replica(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    loss_of(model.module(inputs), targets).backward()


def without_gradients_first(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    with torch.no_grad():
        model(inputs + 1)
    loss_of(model(inputs), targets).backward()


def buffer_afterwards(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    outputs = model(inputs)
    loss_of(outputs, targets).backward()
    model.module.centre.mul_(0.9).add_(outputs.detach().mean(0), alpha=0.1)


def usual(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    loss_of(model(inputs), targets).backward()


def twice(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Two backwards in a block, and a call that would lose the gradients of the shards before if `p.grad` held them."""
    model.zero_grad()
    with model.no_sync():
        loss_of(model(inputs[:2]), targets[:2]).backward()
    loss_of(model(inputs), targets).backward()


PROGRAMS = (past_the_replica, without_gradients_first, buffer_afterwards, usual, twice)


def programmed(program: Callable[[nn.Module, Tensor, Tensor], None]) -> list[str]:
    """Returns hashes of all tensors after each step; after the first one of the usual program come hooks."""
    torch.manual_seed(0)
    module = Centred()
    model = ddp.BucketedDataParallel(module, num_shards=8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    hashes = []
    for step in range(4):
        optimizer.zero_grad()
        for shard in model.shards:
            with model.shard(shard):
                program(model, *parts_of(CASES["mlp"], step, shard)[0])
        optimizer.step()
        hashes.append(" ".join(map(tensor_hash, module.state_dict().values())))
        for parameter in module.parameters() if program is usual and not step else ():
            parameter.register_post_accumulate_grad_hook(double)
    model.verify_replicas()
    return hashes


def all_programs() -> dict[str, list[str]]:
    ddp.init(abort_s=30)
    found = {program.__name__: programmed(program) for program in PROGRAMS}
    module = nn.Sequential(nn.Linear(6, 3))
    for said, change in {
        "was made inside of the block": lambda: module.register_buffer("late", torch.zeros(1)),
        "has gone inside of the block": lambda: delattr(module, "late"),
    }.items():
        model = ddp.BucketedDataParallel(module, num_shards=8)
        with pytest.raises(ConfigError, match=f"the buffer late {said} of a shard"), model.shard(model.shards.start):
            model(X).sum().backward()
            change()
    ddp.shutdown()
    return found


@pytest.mark.slow
def test_programs_that_go_other_ways_have_the_same_bits_too() -> None:
    (alone,) = run_ranks(all_programs, 1)
    assert len({str(hashes) for hashes in alone.values()}) == len(PROGRAMS)
    for world_size in (2, 3):
        assert run_ranks(all_programs, world_size) == [alone] * world_size


def all_cases(num_ranks: int) -> dict[str, Found]:
    comm, found = ddp.init(abort_s=30), dict[str, Found]()
    for name, case in CASES.items():
        if case.num_shards >= num_ranks and (num_ranks <= 3 or name in ON_MANY):
            try:
                found[name] = trained(case, comm)
            except UnusedParameters as error:
                found[name] = Found([], [str(error)])
            except BaseException as error:
                error.add_note(f"in the case {name}")
                raise
    ddp.shutdown()
    if num_ranks in (2, 3):
        comm = ddp.init(abort_s=30, shared_memory=False, algorithm="tree")
        found |= {f"{name}, over links": trained(CASES[name], comm) for name in OVER_LINKS}
        ddp.shutdown()
    return found


@cache
def results_of(world_size: int) -> list[dict[str, Found] | RankFailed]:
    return collect(start_ranks(all_cases, world_size, world_size))


def found_by(world_size: int) -> list[dict[str, Found]]:
    return unfailed(results_of(world_size))


def runs() -> list[tuple[str, int]]:
    """Returns cases and world sizes."""
    found = [(name, size) for name, case in CASES.items() for size in WORLD_SIZES if case.num_shards >= size]
    found = [(name, size) for name, size in found if size <= 3 or name in ON_MANY]
    return [*found, *((f"{name}, over links", size) for name in OVER_LINKS for size in (2, 3))]


@pytest.mark.parametrize(("name", "world_size"), runs())
@pytest.mark.quick(1)
def test_each_step_has_the_bits_of_an_explicit_tree(name: str, world_size: int) -> None:
    (alone,) = found_by(1)
    assert alone[name.removesuffix(", over links")].wrong == []
    for rank, found in enumerate(found_by(world_size)):
        assert found[name].wrong == [], f"rank {rank}"
        assert found[name].hashes == alone[name.removesuffix(", over links")].hashes


# --- mistakes --------------------------------------------------------------------------------------------------------


def replica(
    num_shards: int | None = 4, make: Callable[[], nn.Module] = mlp, kind: Any = ddp.BucketedDataParallel, **how: Any
) -> nn.Module:
    torch.manual_seed(0)
    return kind(make(), num_shards=num_shards, **how)


X = torch.ones(2, 6)


def marked(model: nn.Module, shards: Sequence[int]) -> None:
    """Makes forward and backward of these shards, in blocks."""
    for shard in shards:
        with model.shard(shard):
            model(X).sum().backward()
    model.raise_pending()


ORDERS = {  # what rank 0 of 2 marks, where 0, 1, 2 is right: of 6 shards
    "twice": ([0, 0, 1, 2], "rank 0: expected shard 1, got shard 0"),
    "the last one twice": ([0, 1, 2, 2], "rank 0: expected shard 0, got shard 2"),
    "left out": ([0, 2], "rank 0: expected shard 1, got shard 2"),
    "the first one left out": ([1, 2], "rank 0: expected shard 0, got shard 1"),
    "the last one left out": ([0, 1, 0], "rank 0: expected shard 2, got shard 0"),
    "out of order": ([1, 0, 2], "rank 0: expected shard 0, got shard 1"),
    "another rank's": ([0, 1, 3], "rank 0: expected shard 2, got shard 3"),
    "no shard": ([0, 1, 17], "rank 0: expected shard 2, got shard 17"),
}
TOLD = "this rank computes the shards 0 to 2 in this order, each once a step"


def mistakes() -> None:
    comm = ddp.init(abort_s=20)
    kinds = (ddp.BucketedDataParallel, 6), (FullyShardedDataParallel, 7)  # of 7 the other rank has one more
    for (kind, num_shards), learned in product(kinds, (False, True)):
        for what, (order, said) in ORDERS.items():
            model = replica(num_shards, kind=kind)
            for _ in range(learned):
                marked(model, model.shards)
                model.zero_grad()
            with pytest.raises(ConfigError, match=f"{said}: {TOLD}"):
                if comm.rank == 0:
                    marked(model, order)
                else:
                    marked(model, model.shards)
                    if what == "the last one twice":  # when the others are a step ahead
                        model.zero_grad()
                        marked(model, model.shards)
        nested(comm, replica(6))
    for mistake in (outside, before_the_step, after_the_end, with_a_graph, frozen_between):
        mistake(replica(4))
        mistake(replica(4, bucket_cap_mb=0.0001, overlap=True))
        mistake(replica(4, kind=FullyShardedDataParallel))
    for number in (0, 1):
        broken_off(number)
    changed_inside()
    alone(comm, replica(4))
    refused(comm)
    ddp.shutdown()


def late_part() -> None:
    """Its gradient, which is in the means of this rank alone then, would let replicas drift apart."""
    ddp.init(abort_s=20)
    with pytest.raises(RuntimeError, match=r"shard"):
        one_more_backward(replica(4), is_late=True)
    ddp.shutdown()


def nested(comm: Any, model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="rank 0: shard 1 is marked inside of shard 0: end that block first"):
        if comm.rank == 0:
            with model.shard(0), model.shard(1):
                model(X).sum().backward()
        else:
            marked(model, model.shards)


def outside(model: nn.Module) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"backward outside of the block of a shard: .* 4 shards; put"):
            model(X).sum().backward()
        model.zero_grad()


def before_the_step(model: nn.Module) -> None:
    model.module(X).sum().backward()
    with pytest.raises(RuntimeError, match=r"0\.weight has a gradient before the first shard of a ste.* zero_grad\(\)"):
        marked(model, model.shards)
    model.zero_grad(set_to_none=False)
    marked(model, model.shards)  # zeros are not lost


def one_more_backward(model: nn.Module, *, is_late: bool = False) -> None:
    """Makes one after that which has ended the step, in the same block."""
    for shard in model.shards:
        with model.shard(shard):
            model(X).sum().backward()
            if shard == model.shards[-1]:
                with model.no_sync() if is_late else nullcontext():
                    model(X).sum().backward()


def after_the_end(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="a backward in its block has ended the step"):
        one_more_backward(model)
    model.zero_grad()
    with pytest.raises(RuntimeError, match="a backward in its block has ended the step"):
        for shard in model.shards:
            with model.shard(shard):
                loss = model(X).sum()
                loss.backward(retain_graph=True)
                if shard == model.shards[-1]:
                    loss.backward()


def told_of_error(model: nn.Module, shard: int) -> None:
    """A step that an error has left is the last one, because other ranks may have waited in it."""
    assert all(parameter.grad is None for parameter in model.parameters())
    for _ in range(2):
        said = f"an error has left the block of shard {shard}|the last backward through this replica broke off"
        with pytest.raises((ConfigError, RuntimeError), match=f"({said}).*: restart from the last checkpoint"):
            marked(model, model.shards)


def with_a_graph(model: nn.Module) -> None:
    first, *others = model.shards
    with pytest.raises(RuntimeError, match="create_graph=True"):
        with model.shard(first):
            model(X).sum().backward(create_graph=True)
        for each in others:
            with model.shard(each):
                model(X).sum().backward(create_graph=True)


def frozen_between(model: nn.Module) -> None:
    first, second = model.shards
    with model.shard(first):
        model(X).sum().backward()
    model.module[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"0\.weight: frozen|unfrozen between two"), model.shard(second):
        model(X).sum().backward()


def broken_off(shard: int) -> None:
    """An error of the user's own, in the block of a shard of each rank, is told once more."""
    model = replica(4)
    with pytest.raises(ZeroDivisionError):
        for number, each in enumerate(model.shards):
            with model.shard(each):
                loss = model(X).sum()
                if number == shard:
                    raise ZeroDivisionError
                loss.backward()
    told_of_error(model, model.shards[shard])


def alone(comm: Any, model: nn.Module) -> None:
    """One rank leaves its last block by an error, while the others wait for it in theirs."""
    with pytest.raises(ConfigError, match="rank 0: an error has left the block of shard 1, so that its step was not"):
        for _ in range(2):
            with suppress(ZeroDivisionError):
                for each in model.shards:
                    with model.shard(each):
                        loss = model(X).sum()
                        if comm.rank == 0 and each == model.shards[-1]:
                            raise ZeroDivisionError
                        loss.backward()
            model.zero_grad()


def changed_inside() -> None:
    """A program that steps in a block. With one shard for each worker, that would be right."""
    for stepping in (0, 1):
        model = replica(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match=r"has changed between the shards of a step.* call optimizer.step\(\)"):
            for number, each in enumerate(model.shards):
                with model.shard(each):
                    loss = model(X).sum()
                    if number == stepping:
                        model.module[0].weight.grad = torch.ones_like(model.module[0].weight)
                        optimizer.step()
                    loss.backward()
        told_of_error(model, model.shards[-1])


def refused(comm: Any) -> None:
    with pytest.raises(ConfigError, match="num_shards=1 is less than 2 workers, so some would compute nothing: take"):
        replica(1)
    with pytest.raises(ConfigError, match=r"num_shards=4 with hook=ErrorFeedback\(Sign\(\)\): .* leave it out"):
        replica(4, hook=ErrorFeedback(Sign()))
    match = r"rank 0 was given num_shards=4, and rank 1 num_shards=8: give every rank the same"
    with pytest.raises(ReplicaMismatch, match=match):
        replica(8 if comm.rank else 4)
    with pytest.raises(ReplicaMismatch, match=r"rank 0 was given num_shards=4, and rank 1 "):
        replica(None if comm.rank else 4)
    with pytest.raises(ConfigError, match=r"shard\(0\): this replica adds up by ranks; give it num_shards"):
        marked(replica(None), [0])
    assert (replica(None).num_shards, list(replica(None).shards)) == (None, [])


@pytest.mark.slow
def test_mistakes_are_told_on_all_ranks() -> None:
    run_ranks(mistakes, 2)


def test_a_part_after_the_backward_that_ends_the_step_is_told() -> None:
    run_ranks(late_part, 2)
