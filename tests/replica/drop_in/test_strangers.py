"""Programs that were written for torch's DistributedDataParallel: what they catch, ask, call and look for."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_cases, run_ranks
from torch import Tensor, nn
from torch.distributed import autograd, rpc
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict

import ddp
import ddp.replica.naive
from ddp.errors import ConfigError
from ddp.replica.broadcast import verify_replicas
from ddp.replica.step_finalizer import StaticGraph

Class = Callable[..., Any]
THEIRS = nn.parallel.DistributedDataParallel
BOTH: tuple[Class, Class] = ddp.DistributedDataParallel, THEIRS


class Net(nn.Module):
    """Has a buffer, and a layer that is used on request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor, uses_spare: bool = True) -> Tensor:
        y: Tensor = self.body(x)
        return self.spare(y) if uses_spare else y


def batch(comm: ddp.Communicator, seed: int = 0) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * seed + comm.rank))


# --- what they catch -------------------------------------------------------------------------------------------------


def unlike(comm: ddp.Communicator) -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + comm.rank)))


def two_unused(comm: ddp.Communicator, wrap: Class) -> None:
    replica = wrap(Net())
    for _ in range(2):
        replica(batch(comm), uses_spare=False).sum().backward()


def early_end(comm: ddp.Communicator, wrap: Class) -> None:
    replica = wrap(Net())
    with replica.join(throw_on_early_termination=True):
        for number in range(1 + comm.rank):
            replica(batch(comm, number)).sum().backward()


MISUSES: list[tuple[Callable[[ddp.Communicator, Class], Any], type[Exception], str]] = [
    (lambda comm, wrap: wrap(nn.Linear(2, 2).requires_grad_(False)), RuntimeError, ""),
    (lambda comm, wrap: wrap(nn.LazyLinear(2)), RuntimeError, ""),
    (lambda comm, wrap: wrap(unlike(comm)), RuntimeError, ""),
    (
        lambda comm, wrap: wrap(nn.Linear(2, 2), process_group=dist.group.WORLD, device_mesh=mesh(comm.world_size)),
        RuntimeError,
        "Cannot specify both process_group and device_mesh arguments",
    ),
    (
        lambda comm, wrap: wrap(nn.Linear(2, 2), device_mesh=mesh(1, comm.world_size)),
        RuntimeError,
        "Only 1D device mesh is supported, but got",
    ),
    (lambda comm, wrap: wrap(nn.Linear(2, 2), device_ids=[0, 1]), ValueError, ""),
    (lambda comm, wrap: wrap(nn.Linear(2, 2), device_ids=[0]), ValueError, ""),
    (lambda comm, wrap: wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))), ValueError, ""),
    (lambda comm, wrap: wrap(nn.Linear(2, 2), bucket_size=3), TypeError, "unexpected keyword"),
    (lambda comm, wrap: wrap(nn.Linear(2, 2)).register_comm_hook(None, 3), TypeError, ""),
    (two_unused, RuntimeError, "Expected to have finished reduction in the prior iteration.*did not receive grad"),
    (early_end, RuntimeError, "(Detected at least one rank that exhausted|exhausted all) inputs"),
]


def mesh(*shape: int) -> Any:
    return dist.device_mesh.init_device_mesh("cpu", shape)


def warnings_of_torch_s_class(comm: ddp.Communicator) -> None:
    """At the line of the program that makes the replica."""
    theirs_warns = "forward_sync_buffers" in inspect.signature(THEIRS.__init__).parameters  # not in torch 2.10
    for keywords in ({}, {"forward_sync_buffers": True}):
        for wrap in BOTH[: 1 + theirs_warns]:
            with pytest.warns(FutureWarning, match="`broadcast_buffers` is deprecated") as caught:
                wrap(nn.Linear(2, 2), broadcast_buffers=True, **keywords)
            assert caught[0].filename == __file__


def errors_of_torch_s_class(comm: ddp.Communicator) -> None:
    for misuse, kind, phrase in MISUSES:
        for wrap in BOTH:
            with pytest.raises(kind, match=f"(?s){phrase}"):
                misuse(comm, wrap)
                raise AssertionError(f"{misuse} of {wrap}: nothing was wrong")


# --- what they ask ---------------------------------------------------------------------------------------------------


def an_instance_of_torch_s_class(comm: ddp.Communicator) -> None:
    """As torch.distributed.checkpoint asks: keys without "module.", which the bare model takes, and back."""
    replica = ddp.DistributedDataParallel(Net())
    assert isinstance(replica, THEIRS) and isinstance(copy.deepcopy(replica), THEIRS)
    assert issubclass(ddp.DistributedDataParallel, THEIRS)
    for other in (replica.module, ddp.replica.naive.NaiveDataParallel, nn.DataParallel):
        assert not isinstance(other, THEIRS)
    optimizer = torch.optim.Adam(replica.parameters())
    replica(batch(comm)).sum().backward()
    optimizer.step()
    bare = Net()
    bare_optimizer = torch.optim.Adam(bare.parameters())
    state, moments = get_state_dict(replica, optimizer)
    assert state.keys() == bare.state_dict().keys() == get_model_state_dict(replica).keys()
    set_state_dict(bare, bare_optimizer, model_state_dict=state, optim_state_dict=moments)
    again = ddp.DistributedDataParallel(Net())
    set_state_dict(again, torch.optim.Adam(again.parameters()), model_state_dict=state, optim_state_dict=moments)
    for mine, loaded, twice in zip(replica.parameters(), bare.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, loaded) and torch.equal(mine, twice)
        assert torch.equal(optimizer.state[mine]["exp_avg"], bare_optimizer.state[loaded]["exp_avg"])


def attributes_of_torch_s_class(comm: ddp.Communicator) -> None:
    ours, theirs = (wrap(Net()) for wrap in BOTH)
    for name in ("device", "device_type", "device_ids", "output_device", "dim", "bucket_bytes_cap"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for _ in range(3):
        for replica in (ours, theirs):
            replica(batch(comm)).sum().backward()
    mine, reference = ours._get_ddp_logging_data(), theirs._get_ddp_logging_data()
    assert not mine["has_error"] and mine["error"] == ""
    for name in mine.keys() & reference.keys() - {"gradient_as_bucket_view", "iteration"}:
        assert mine[name] == reference[name], name
    assert len(mine.keys() & reference.keys()) >= 10
    with torch.profiler.profile() as profile:
        ours(batch(comm)).sum().backward()
    assert any(event.key == "DistributedDataParallel.forward" for event in profile.key_averages())
    for replica in (ours, theirs):
        assert replica.will_sync_module_buffers() and replica._get_active_ddp_module() is None
        assert [p.shape for p in replica._module_parameters] == [p.shape for p in Net().parameters()]
        inputs, keywords = replica.to_kwargs((torch.ones(1),), {"x": [torch.ones(2)]}, None)
        assert inputs[0] == (torch.ones(1),) and keywords[0]["x"][0].shape == (2,)
        replica._check_reducer_finalized()
        values = [torch.full((2,), float(comm.rank)), torch.full((3,), comm.rank)]
        replica._distributed_broadcast_coalesced(values, 1 << 20, 1)
        assert [value.tolist() for value in values] == [[1, 1], [1, 1, 1]]
        replica.broadcast_buffers = False
        replica.module.body[1].running_mean.fill_(comm.rank)
        replica.eval()
        replica(batch(comm))
        assert replica.module.body[1].running_mean[0] == comm.rank
        assert not getattr(replica, "forward_sync_buffers", False)  # torch 2.10 does not have it
        assert not hasattr(replica, "_sync_params")


# --- what they call --------------------------------------------------------------------------------------------------

Step = Callable[[Any, Tensor, Tensor], None]


def as_accelerate_triggers(replica: Any, x: Tensor, y: Tensor) -> None:
    """Accelerator.trigger_sync_in_backward: both forwards in no_sync, the second backward synchronises."""
    with replica.no_sync():
        first, second = replica(x).square().sum(), replica(y).square().sum()
        first.backward()
    before = replica.require_backward_grad_sync, replica.require_forward_param_sync
    replica.require_backward_grad_sync = replica.require_forward_param_sync = True
    replica.reducer.prepare_for_backward([])
    second.backward()
    replica.require_backward_grad_sync, replica.require_forward_param_sync = before


def as_pipelining_does(replica: Any, x: Tensor, y: Tensor) -> None:
    """torch.distributed.pipelining: the last chunk's backward synchronises."""
    with replica.no_sync():
        chunks = [replica(x), replica(y)]
        chunks[0].sum().backward()
    replica.reducer.prepare_for_backward(list(torch.nn.parallel.distributed._find_tensors(chunks[1])))
    chunks[1].sum().backward()


def as_mmcv_does(replica: Any, x: Tensor, y: Tensor) -> None:
    """Its own forward around the module's."""
    replica.reducer._rebuild_buckets()
    output = replica._run_ddp_forward(x)
    replica.reducer.prepare_for_backward([])
    output.square().sum().backward()


def as_lightning_does(replica: Any, x: Tensor, y: Tensor) -> None:
    """Manual optimization with a loss from two forwards; prepared before each backward."""
    for value in (x, y):
        replica.require_backward_grad_sync = True
        loss = replica(value).square().sum()
        replica.require_forward_param_sync = True
        replica.reducer._rebuild_buckets()
        replica.reducer.prepare_for_backward(list(loss) if replica.find_unused_parameters else [])
        loss.backward()
        replica.reducer._delay_all_reduce() if replica.static_graph and value is x else None


def programs_that_reach_into_the_reducer(comm: ddp.Communicator) -> None:
    for step in (as_accelerate_triggers, as_pipelining_does, as_mmcv_does, as_lightning_does):
        for kw in ({}, {"bucket_cap_mb": 1e-4}):
            ours, theirs = (wrap(Net(), **kw) for wrap in BOTH)
            for number in range(3):
                for replica in (ours, theirs):
                    if number != 1:
                        replica.zero_grad()
                    step(replica, batch(comm, number), batch(comm, number + 10))
                assert_same(comm, ours, theirs)


class Manual(nn.Module):
    """As Lightning's manual optimization: the forward itself runs backward and steps, and then ends synchronisation."""

    wrapper: tuple[Any, ...]

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.rate = 0.01

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            result: Tensor = self.net(x)
            return result
        (replica,) = self.wrapper
        for part in x.split(3):
            replica.zero_grad()
            loss: Tensor = self.net(part).square().sum()
            replica.reducer._rebuild_buckets()
            replica.reducer.prepare_for_backward([])
            loss.backward()
            with torch.no_grad():
                for p in self.parameters():
                    p.sub_(p.grad, alpha=self.rate)
        replica.require_backward_grad_sync = False
        return loss.detach()


def a_forward_that_steps_by_itself(comm: ddp.Communicator) -> None:
    pair = [wrap(Manual()) for wrap in BOTH]
    for number in range(3):
        for replica in pair:
            replica.module.wrapper = (replica,)
            replica.train()
            replica(torch.cat([batch(comm, number), batch(comm, number + 10)[:1]]))
            replica.require_backward_grad_sync = True
            replica.eval()
            with torch.no_grad():
                replica(batch(comm))
        assert_same(comm, *pair)
        for mine, other in zip(pair[0].buffers(), pair[1].buffers(), strict=True):
            torch.testing.assert_close(mine, other)


def assert_same(comm: ddp.Communicator, ours: Any, theirs: Any) -> None:
    for (name, p), q in zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(p, q, msg=lambda text, name=name: f"{name}: {text}")
    verify_replicas(comm, [*ours.module.named_parameters(), *((n, p.grad) for n, p in ours.module.named_parameters())])


def hooks_and_optimizers_by_private_names(comm: ddp.Communicator) -> None:
    def fused(replica: Any) -> None:
        chosen = [p for name, p in replica.named_parameters() if "spare" in name]
        replica._register_fused_optim(torch.optim.SGD, 0.1, optim_params=chosen, momentum=0.9)

    prepare: list[Callable[[Any], None]] = [
        lambda replica: replica._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
        lambda replica: replica._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
        fused,
        lambda replica: replica._set_static_graph(),
    ]
    for each in prepare:
        pair = [wrap(Net()) for wrap in BOTH]
        for replica in pair:
            each(replica)
            for number in range(3):
                replica.zero_grad()
                replica(batch(comm, number)).square().sum().backward()
        assert_same(comm, *pair)
    assert pair[0].static_graph and isinstance(pair[0]._usage, StaticGraph)
    with pytest.raises(RuntimeError, match="after the first step"):
        late = ddp.DistributedDataParallel(Net())
        late(batch(comm)).sum().backward()
        late._set_static_graph()


# --- what takes gradients away before there is a mean ----------------------------------------------------------------


def optimizers_in_backward_that_are_not_ours(comm: ddp.Communicator) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    applied = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, applied.body.parameters(), {"lr": 0.1})
    with pytest.raises(ConfigError, match=r"body\.0\.weight, .*body\.3\.bias: _apply_optimizer.*step_in_backward"):
        ddp.DistributedDataParallel(applied)

    replica = ddp.DistributedDataParallel(Net())
    _apply_optimizer_in_backward(torch.optim.SGD, replica.module.spare.parameters(), {"lr": 0.1})
    with pytest.raises(ConfigError, match=r"^spare\.weight, spare\.bias: .*_apply_optimizer.*step_in_backward"):
        replica(batch(comm)).sum().backward()

    def step(parameter: Tensor) -> None:  # torch's tutorial on fusing the optimizer into backward does this
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    rows = torch.zeros(1, dtype=torch.int64)
    cases: list[tuple[Callable[[], nn.Module], Tensor]] = [
        (lambda: nn.Linear(2, 2), torch.ones(1, 2)),
        (lambda: nn.Linear(200, 200), torch.ones(1, 200)),  # is moved into its bucket as soon as it is there
        (lambda: nn.Embedding(3, 2, sparse=True), rows),
    ]
    for make, x in cases:
        for is_first in (True, False):
            layer = make()
            if is_first:
                layer.weight.register_post_accumulate_grad_hook(step)
            replica = ddp.DistributedDataParallel(layer, find_unused_parameters=True)
            if not is_first:
                layer.weight.register_post_accumulate_grad_hook(step)
            with pytest.raises(ConfigError, match=r"^weight: a hook \(yours.*step_in_backward"):
                replica(x).sum().backward()
    replica = ddp.DistributedDataParallel(nn.Linear(2, 2))
    replica(torch.ones(1, 2)).sum().backward()
    replica.module.bias.register_post_accumulate_grad_hook(step)  # late, so the second step with it is the one
    replica(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigError, match=r"^bias: a hook"):
        replica(torch.ones(1, 2)).sum().backward()


def contexts_of_distributed_autograd(comm: ddp.Communicator) -> None:
    replica = ddp.DistributedDataParallel(Net())
    with tempfile.NamedTemporaryFile() as file:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file.name}")
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        try:
            with autograd.context(), pytest.raises(RuntimeError, match=r"keeps gradients.*loss\.backward\(\) outside"):
                replica(batch(comm))
            loss = replica(batch(comm)).sum()
            with autograd.context() as context, pytest.raises(RuntimeError, match="Error on Node 0"):
                autograd.backward(context, [loss])
            replica(batch(comm)).sum().backward()
        finally:
            rpc.shutdown(graceful=False)
    verify_replicas(comm, [(name, p.grad) for name, p in replica.named_parameters()])


CASES = [
    optimizers_in_backward_that_are_not_ours,
    warnings_of_torch_s_class,
    errors_of_torch_s_class,
    an_instance_of_torch_s_class,
    attributes_of_torch_s_class,
    programs_that_reach_into_the_reducer,
    a_forward_that_steps_by_itself,
    hooks_and_optimizers_by_private_names,
    contexts_of_distributed_autograd,
]


def all_cases(names: list[str]) -> None:
    comm = ddp.init(abort_s=20)
    run_cases(CASES, comm, names)
    ddp.shutdown()


@pytest.mark.slow
def test_all_cases_on_two_ranks() -> None:
    run_ranks(all_cases, 2, [], timeout_s=120)
