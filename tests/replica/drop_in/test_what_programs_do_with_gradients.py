"""What programs do with gradients besides a step: hooks that change them, references that outlive them, conversions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ranks import in_each_mode, run_cases, run_ranks
from test_like_torch import TINY, assert_same_gradients, both, mlp
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.dlpack import from_dlpack, to_dlpack

import ddp
from ddp.errors import CollectiveMismatch, ConfigError
from ddp.gradients import bucket as places
from ddp.gradients.reducer import ReduceScatter

TWO = {"first_bucket_mb": 1e-4, "bucket_cap_mb": 1e-4}  # a few parameters in each bucket


def clamp(parameter: nn.Parameter) -> None:
    parameter.grad.clamp_(-0.5, 0.5)


def clamp_all(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clamp)


def wide_loss(model: Any, seed: int) -> Tensor:
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    return 100 * model(batch).square().mean()


# --- hooks -----------------------------------------------------------------------------------------------------------


def hooks_that_are_not_linear(comm: ddp.Communicator) -> None:
    """The mean of what they leave, whenever they were registered: before, after, between forward and backward."""
    for moment in ("before", "after", "between"):
        for caps in (TINY, TWO, {}):
            torch.manual_seed(0)
            net = mlp(6, 5, 4, 3)
            twin = copy.deepcopy(net)
            if moment == "before":
                clamp_all(net)
                clamp_all(twin)
            pair = ddp.DistributedDataParallel(net, **caps), nn.parallel.DistributedDataParallel(twin)
            if moment == "after":
                clamp_all(net)
                clamp_all(twin)
            for step in range(4):
                for replica in pair:
                    replica.zero_grad()
                    loss = wide_loss(replica, 10 * step + comm.rank)
                    if moment == "between" and step == 2:
                        clamp_all(replica.module)
                    loss.backward()
                assert_same_gradients(comm, *pair)


def hooks_on_every_kind_of_replica(comm: ddp.Communicator) -> None:
    """Each element's owner has the mean of what the hooks leave; the oracle is the bare model on every rank."""
    kinds: list[Callable[..., Any]] = [
        ddp.NaiveDataParallel,
        partial(ddp.BucketedDataParallel, **TWO),
        partial(ddp.BucketedDataParallel, reducer=ReduceScatter, **TWO),
        partial(ddp.BucketedDataParallel, num_shards=comm.world_size),
    ]
    for make in kinds:
        torch.manual_seed(0)
        net = mlp(6, 5, 4, 3)
        alone = copy.deepcopy(net)
        replica = make(net)
        clamp_all(net)
        clamp_all(alone)
        for step in range(3):
            for each in (replica, alone):
                each.zero_grad()
                if each is replica and replica.num_shards:
                    with replica.shard(comm.rank):
                        wide_loss(replica, 10 * step + comm.rank).backward()
                else:
                    wide_loss(each, 10 * step + comm.rank).backward()
            means = {name: comm.all_reduce(p.grad.clone(), "mean") for name, p in alone.named_parameters()}
            if replica.collective is not None and replica.collective.is_sliced:
                for bucket in replica.buckets:
                    mine = slice(*replica.collective.slice_of(bucket))
                    expected = torch.zeros_like(bucket.gradients)
                    for slot, view in zip(bucket.slots, bucket.views_of(expected), strict=True):
                        view.copy_(means[slot.name])
                    torch.testing.assert_close(bucket.gradients[mine], expected[mine])
            else:
                for name, parameter in net.named_parameters():
                    torch.testing.assert_close(parameter.grad, means[name])


def a_hook_sees_its_own_rank_s_gradient(comm: ddp.Communicator) -> None:
    """Also while buckets before it are reduced, and whichever parameter closes a bucket."""
    torch.manual_seed(0)
    net, seen = mlp(6, 5, 4, 3), []
    alone = copy.deepcopy(net)
    for model in (net, alone):
        model_of = ddp.DistributedDataParallel(model, **TWO) if model is net else model
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for step in range(3):
            model_of.zero_grad()
            wide_loss(model_of, 10 * step + comm.rank).backward()
    half = len(seen) // 2
    torch.testing.assert_close(seen[:half], seen[half:])


# --- gradients that a program keeps ----------------------------------------------------------------------------------

ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda gradient: gradient,
    "detach": Tensor.detach,
    "data": lambda gradient: gradient.data,
    "flatten": Tensor.flatten,
    "split": lambda gradient: gradient.split(1)[-1],
    "an element": lambda gradient: gradient[..., -1:],
    "numpy": Tensor.numpy,
    "a buffer": lambda gradient: memoryview(gradient.numpy()),
    "dlpack": lambda gradient: from_dlpack(to_dlpack(gradient)),
    "storage": lambda gradient: gradient.untyped_storage(),
}


def values(alias: Any) -> list[float]:
    return np.array(alias).flatten().tolist()


def kept_gradients(comm: ddp.Communicator) -> None:
    """They stay as they were, on whichever ranks, and the next ones are right; then the shared memory is used again."""
    for name, alias_of in ALIASES.items():
        for keepers in (range(comm.world_size), [1]):
            torch.manual_seed(0)
            pair = both(mlp(6, 5, 4, 3), {}, **TWO)
            homes: list[int] = []
            for step in range(8):
                kept = []
                for task in range(2):
                    for replica in pair:
                        replica.zero_grad()
                        wide_loss(replica, 100 * task + 10 * step + comm.rank).backward()
                        if comm.rank in keepers and step in (1, 2, 5):
                            aliases = [alias_of(p.grad) for p in replica.parameters()]
                            kept.append((aliases, list(map(values, aliases))))
                    assert_same_gradients(comm, *pair)
                    for aliases, before in kept:
                        assert list(map(values, aliases)) == before, name
                del kept
                aliases = []
                if step == 0:
                    homes = [bucket.flat.data_ptr() for bucket in pair[0].buckets]
            assert [bucket.flat.data_ptr() for bucket in pair[0].buckets] == homes, name


def exchanged(gradient: Tensor) -> None:
    gradient.data = gradient.data * 0.5


def swapped(gradient: Tensor) -> Tensor:
    other = torch.zeros_like(gradient)
    torch.utils.swap_tensors(gradient, other)
    return other


def kept_gradients_whose_memory_is_exchanged(comm: ddp.Communicator) -> None:
    """What the program has kept of the memory before stays as it was; nothing is kept where it has kept nothing."""
    exchanges: list[Callable[[Tensor], Any]] = [
        lambda gradient: (gradient.detach(), exchanged(gradient))[0],
        lambda gradient: (gradient.numpy(), exchanged(gradient))[0],
        exchanged,
        swapped,
    ]
    for exchange in exchanges:
        torch.manual_seed(0)
        pair = both(mlp(6, 5, 3), {}, **TWO)
        for step in range(4):
            before = []
            for replica in pair:
                replica.zero_grad()
                wide_loss(replica, 10 * step + comm.rank).backward()
                gradients = [p.grad for p in replica.parameters()]
                for parameter in replica.parameters():
                    parameter.grad = None
                kept = list(map(exchange, gradients))
                for parameter, gradient in zip(replica.parameters(), gradients, strict=True):
                    parameter.grad = gradient
                del gradients, gradient
                before.append((kept, [np.array(each).tolist() for each in kept]))
                wide_loss(replica, 10 * step + comm.rank + 5).backward()
            assert_same_gradients(comm, *pair)
            for kept, values_before in before:
                assert [np.array(each).tolist() for each in kept] == values_before
            del before, kept
        assert any(slot.is_kept for slot in pair[0]._layouts.current.slots) is (exchange is not exchanged)


def gradients_that_accumulate_stay_in_their_buckets(comm: ddp.Communicator) -> None:
    """A reference to `p.grad` costs nothing as long as `p.grad` is that tensor; torch's class adds to it, too."""
    pair = both(mlp(6, 5, 3), {}, **TWO)
    for step in range(3):
        for replica in pair:
            wide_loss(replica, step + comm.rank).backward()
        if step == 0:
            kept = [[p.grad for p in replica.parameters()] for replica in pair]
    assert_same_gradients(comm, *pair)
    for replica, gradients in zip(pair, kept, strict=True):
        assert all(p.grad is gradient for p, gradient in zip(replica.parameters(), gradients, strict=True))
    assert not any(slot.is_kept for slot in pair[0]._layouts.current.slots)


def views_of_buckets_are_reused(comm: ddp.Communicator) -> None:
    """As torch's class does it, if a program asks for it."""
    replica = ddp.DistributedDataParallel(mlp(6, 5, 3), gradient_as_bucket_view=True)
    assert replica._get_ddp_logging_data()["gradient_as_bucket_view"] == 1
    kept = []
    for step in range(3):
        replica.zero_grad()
        wide_loss(replica, step + comm.rank).backward()
        kept.append(next(replica.parameters()).grad)
    assert kept[1] is kept[2]


def without_counts_of_users(comm: ddp.Communicator) -> None:
    """Every gradient is the program's own, unless it has asked for views."""
    counts, places._NUM_USERS = places._NUM_USERS, None
    try:
        for view in (False, True):
            replica = ddp.DistributedDataParallel(mlp(6, 5, 3), gradient_as_bucket_view=view)
            kept = []
            for step in range(3):
                replica.zero_grad()
                wide_loss(replica, step + comm.rank).backward()
                kept.append(next(replica.parameters()).grad)
            assert (kept[1] is kept[2]) is view
            assert torch.equal(kept[1], kept[2]) is view
    finally:
        places._NUM_USERS = counts


def gradients_detached_in_place(comm: ddp.Communicator) -> None:
    """As older programs write out zero_grad."""
    pair = both(mlp(6, 5, 3), {})
    for step in range(3):
        for replica in pair:
            for parameter in replica.parameters():
                if parameter.grad is not None:
                    parameter.grad.detach_()
                    parameter.grad.zero_()
            wide_loss(replica, step + comm.rank).backward()
        assert_same_gradients(comm, *pair)


# --- conversions, and replicas that go on ----------------------------------------------------------------------------


def converted_and_back(comm: ddp.Communicator) -> None:
    """Parameters get other nodes in the graph, of which no type tells; with gradients of no_sync, too."""
    conversions: list[Callable[[nn.Module], Any]] = [
        lambda net: net.double().float(),
        lambda net: net.to(torch.bfloat16).to(torch.float32),
        lambda net: [setattr(p, "data", p.data.clone()) for p in net.parameters()],
        lambda net: [p.requires_grad_(False).requires_grad_(True) for p in net.parameters()],
    ]
    for convert in conversions:
        for moment in ("between steps", "in no_sync", "before backward"):
            torch.manual_seed(0)
            net = mlp(6, 5, 3)
            alone, replica = copy.deepcopy(net), ddp.DistributedDataParallel(net, **TWO)
            for step in range(4):
                for each in (alone, replica):
                    each.zero_grad()
                    if moment == "in no_sync":
                        with replica.no_sync():
                            if step == 2:
                                convert(each)
                            wide_loss(each, 1000 + comm.rank).backward()
                    if step == 2 and moment == "between steps":
                        convert(each)
                    loss = wide_loss(each, step + comm.rank)
                    if step == 2 and moment == "before backward":
                        convert(each)
                    loss.backward()
                for mine, other in zip(net.parameters(), alone.parameters(), strict=True):
                    mean = comm.all_reduce(other.grad.clone(), "mean")
                    torch.testing.assert_close(mine.grad, mean, rtol=1e-4, atol=1e-5)


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> None:
        raise ArithmeticError("boom")


def wrapped_again_after_a_backward_that_broke_off(comm: ddp.Communicator) -> None:
    """Though the program still holds the first replica."""
    torch.manual_seed(0)
    net = mlp(6, 5, 3)
    twin = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
    first = ddp.DistributedDataParallel(net, **TINY)
    wide_loss(first, comm.rank).backward()
    broken = net.register_forward_hook(lambda *_: None)
    handle = net[0].register_forward_hook(lambda _module, _inputs, output: Boom.apply(output))
    with pytest.raises(ArithmeticError):
        wide_loss(first, comm.rank).backward()
    handle.remove()
    broken.remove()
    with pytest.raises(RuntimeError, match="broke off"):
        wide_loss(first, comm.rank)
    second = ddp.DistributedDataParallel(net, **TINY)
    for step in range(2):
        for replica in (second, twin):
            replica.zero_grad()
            wide_loss(replica, step + comm.rank).backward()
        assert_same_gradients(comm, second, twin)
    assert not first._observers._nodes
    del first


def transforms_of_functions(comm: ddp.Communicator) -> None:
    """torch.func over a replica gives this rank's gradients, as over torch's class."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 3), nn.Tanh())
    replica = ddp.DistributedDataParallel(net)
    before = comm.num_calls
    named = {name: p.detach() for name, p in replica.named_parameters()}
    batch = torch.randn(4, 6) + comm.rank

    def loss_of(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(replica, parameters, (x,)).pow(2).mean()

    gradients = grad(loss_of)(named, batch)
    by_sample = vmap(grad(loss_of), in_dims=(None, 0))(named, batch[:, None])
    assert comm.num_calls == before
    net(batch).pow(2).mean().backward()
    for name, parameter in replica.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
        torch.testing.assert_close(by_sample[name].mean(0), parameter.grad)
    replica.zero_grad()
    replica(batch).sum().backward()  # the next step is as ever
    assert replica.num_steps == 1


def compiled_autograd_is_refused(comm: ddp.Communicator) -> None:
    from torch._dynamo import compiled_autograd

    for make in (ddp.DistributedDataParallel, ddp.BucketedDataParallel, ddp.NaiveDataParallel):
        replica = make(mlp(6, 3))
        loss = wide_loss(replica, comm.rank)
        with compiled_autograd._enable(lambda graph: graph), pytest.raises(RuntimeError, match="compiled autograd"):
            loss.backward()
        wide_loss(make(replica.module), comm.rank).backward()


def split_parameters_are_refused(comm: ddp.Communicator) -> None:
    """Those of torch's tensor parallelism, also once its own transform has made them ready for torch's class."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    mesh = init_device_mesh("cpu", (comm.world_size, 1), mesh_dim_names=("dp", "tp"))
    net = parallelize_module(mlp(6, 3), mesh["tp"], {"0": ColwiseParallel()})
    for _ in range(2):
        for make in (ddp.DistributedDataParallel, ddp.NaiveDataParallel):
            with pytest.raises(ConfigError, match="tensor parallelism"):
                make(net)
        _pre_dp_module_transform(net)


class Growing(nn.Module):
    """A buffer follows the samples of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.zeros(len(x))
        return self.linear(x)


def buffers_of_unequal_shapes_have_a_name(comm: ddp.Communicator) -> None:
    """Last, because ranks that have called different collectives make no more of them."""
    replica = ddp.DistributedDataParallel(Growing())
    replica(torch.randn(3 + comm.rank, 6)).sum().backward()
    with pytest.raises(CollectiveMismatch, match=rf"table was \[2\].*is \[{3 + comm.rank}\].*register_buffer"):
        replica(torch.randn(3, 6))


CASES = [
    hooks_that_are_not_linear,
    hooks_on_every_kind_of_replica,
    a_hook_sees_its_own_rank_s_gradient,
    kept_gradients,
    kept_gradients_whose_memory_is_exchanged,
    gradients_that_accumulate_stay_in_their_buckets,
    views_of_buckets_are_reused,
    without_counts_of_users,
    gradients_detached_in_place,
    converted_and_back,
    wrapped_again_after_a_backward_that_broke_off,
    transforms_of_functions,
    compiled_autograd_is_refused,
    split_parameters_are_refused,
    buffers_of_unequal_shapes_have_a_name,
]


def all_cases(names: list[str], overlap: bool = False) -> None:
    comm = ddp.init(abort_s=20)
    type(comm.plan).overlaps = property(lambda self: overlap)
    run_cases(CASES, comm, names)
    with suppress(RuntimeError):
        ddp.shutdown()


@in_each_mode
@pytest.mark.quick(1)
def test_all_cases_on_three_ranks(overlap: bool, half: int) -> None:
    names = [case.__name__ for case in CASES[half::2]]
    run_ranks(all_cases, 3, names, overlap, timeout_s=120)
