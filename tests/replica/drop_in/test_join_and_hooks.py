"""Uneven inputs, buffers, communication hooks, the optimizer inside backward: against torch's class or formulas.

Tests: ddp/replica/drop_in/in_backward.py, ddp/replica/drop_in/join.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_cases, run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import ddp
from ddp.errors import ConfigError, HookFailed
from ddp.replica.broadcast import verify_replicas
from ddp.replica.drop_in.in_backward import When

TINY = {"first_bucket_mb": 1e-6, "bucket_cap_mb": 1e-6}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(comm: ddp.Communicator, count: int, n: int = 5) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(comm.rank)
    return [
        (torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for _ in range(count)
    ]


def train(replica: nn.Module, data: list[tuple[Tensor, Tensor]], optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(replica.parameters(), 0.1, momentum=0.9)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(replica(x), y).backward()
        optimizer.step()


def assert_same_state(comm: ddp.Communicator, ours: Any, theirs: Any) -> None:
    for (name, mine), other in zip(ours.module.state_dict().items(), theirs.module.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, msg=lambda text, name=name: f"{name}: {text}")
    verify_replicas(comm, ours.module.named_parameters())


# --- join ------------------------------------------------------------------------------------------------------------


def uneven_inputs(comm: ddp.Communicator) -> None:
    """Rank r has 3 + 2r batches, then 5 − r; rank 0 runs out first, then last."""
    for divides_by_all in (True, False):
        for counts in ([3, 5, 7], [5, 4, 3], [4, 4, 4], [0, 2, 0]):
            for kw in (TINY, {}, {"find_unused_parameters": True})[: 3 if counts[0] == 3 else 1]:
                ours = ddp.DistributedDataParallel(net(), **kw)
                theirs = nn.parallel.DistributedDataParallel(
                    net(), find_unused_parameters="find_unused_parameters" in kw
                )
                for replica in (ours, theirs):
                    with replica.join(divide_by_initial_world_size=divides_by_all):
                        train(replica, batches(comm, counts[comm.rank]))
                assert_same_state(comm, ours, theirs)
                train(ours, batches(comm, 1))  # as if nothing had been
                train(theirs, batches(comm, 1)) if divides_by_all else None
    ours = ddp.DistributedDataParallel(net())
    ours.verify_replicas(every=1)  # not while some have no inputs, and make no steps
    with ours.join():
        train(ours, batches(comm, 2 + comm.rank))
    with ours.join(enable=False):
        train(ours, batches(comm, 2))
    assert not ours.inputs.may_end


def join_that_ends_everyones_loop(comm: ddp.Communicator) -> None:
    replica = ddp.DistributedDataParallel(net())
    with (
        pytest.raises(
            RuntimeError,
            match="Rank 1 exhausted all inputs; all ranks stop here"
            if comm.rank == 1
            else r"Detected at least one rank that exhausted inputs: rank\(s\) \[1\]; all ranks stop here",
        ),
        replica.join(throw_on_early_termination=True),
    ):
        train(replica, batches(comm, 2 if comm.rank == 1 else 4))
    train(replica, batches(comm, 1))
    verify_replicas(comm, replica.module.named_parameters())


def torch_s_join_context(comm: ddp.Communicator) -> None:
    """Alone as in torch's class. Beside a ZeroRedundancyOptimizer, ranks that shadow step their share of the parameters
    by the mean gradient, as if all had inputs; torch's class leaves them their own last one."""
    ours, theirs = ddp.DistributedDataParallel(net()), nn.parallel.DistributedDataParallel(net())
    for replica in (ours, theirs):
        with Join([replica], divide_by_initial_world_size=False):
            train(replica, batches(comm, 2 + comm.rank), torch.optim.SGD(replica.parameters(), 0.1))
    assert_same_state(comm, ours, theirs)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    sharded = ddp.DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.SGD, lr=0.1)
    with Join([sharded, optimizer], divide_by_initial_world_size=False):
        train(sharded, batches(comm, 2 + comm.rank), optimizer)
    assert_same_state(comm, sharded, theirs)
    train(sharded, batches(comm, 1))


def gradients_of_ranks_that_ran_out(comm: ddp.Communicator) -> None:
    """They keep what their own last backward left; the next pass, which adds to it, agrees with torch's class."""

    def passes(replica: Any, context: Any) -> list[float]:
        seen = []
        for epoch in range(2):
            with context(replica):
                for step in range(1 + comm.rank):
                    x = torch.full((1, 1), 100.0 * comm.rank + step)
                    replica(x).sum().backward()
            seen.append(replica.module.weight.grad.item())
            if epoch == 0:
                replica.module.weight.grad.add_(1)  # it is writable, and is what the next pass adds to
        return seen

    for context in (lambda replica: replica.join(), lambda replica: Join([replica])):
        for kw in ({}, {"find_unused_parameters": True}):
            ours, theirs = (
                wrap(nn.Linear(1, 1, bias=False), **kw)
                for wrap in (ddp.DistributedDataParallel, nn.parallel.DistributedDataParallel)
            )
            assert passes(ours, context) == pytest.approx(passes(theirs, context), rel=1e-6)
            verify_replicas(comm, ours.module.named_parameters())
    replica = ddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with replica.join():
        pass
    assert replica.module.weight.grad is None
    with replica.join():
        for _ in range(comm.rank):
            replica(torch.ones(1, 1)).sum().backward()
    assert (replica.module.weight.grad is None) == (comm.rank == 0)


# --- buffers ---------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Buffers of several types, changed by every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + x.mean()  # another tensor each time
        self.count += len(x)
        result: Tensor = self.linear(x) + self.mean
        return result


def buffers_of_every_mode(comm: ddp.Communicator) -> None:
    x = torch.full((2 + comm.rank, 4), float(comm.rank))
    for mode, mean, count in (
        ("broadcast", 0.0 + comm.rank, 2 + 2 + comm.rank),
        ("mean", 1.0 + comm.rank, 2 + 2 + comm.rank),
        ("none", 2.0 * comm.rank, 2 * (2 + comm.rank)),
    ):
        replica = ddp.DistributedDataParallel(Counting(), buffers=mode)
        for _ in range(2):
            replica(x).sum().backward()
        assert replica.module.mean.tolist() == [mean] * 3, mode
        assert replica.module.count.item() == count, mode


def buffers_around_every_kind_of_forward(comm: ddp.Communicator) -> None:
    """Each rank's statistics after each forward, whatever came before, are those of torch's class."""
    kinds: dict[str, Any] = {
        "train": lambda replica, x: replica(x).sum().backward(),
        "forward": lambda replica, x: replica(x),
        "no_sync": lambda replica, x: [_in(replica.no_sync(), replica, x).sum().backward()],
        "no_grad": lambda replica, x: _in(torch.no_grad(), replica, x),
        "eval": lambda replica, x: _in(torch.no_grad(), replica.eval(), x),
        "eval with gradients": lambda replica, x: replica.eval()(x).sum().backward(),
    }

    def _in(context: Any, replica: Any, x: Tensor) -> Any:
        with context:
            return replica(x)

    for kw in ({}, {"broadcast_buffers": False}):
        ours, theirs = (
            wrap(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)), **kw)
            for wrap in (ddp.DistributedDataParallel, nn.parallel.DistributedDataParallel)
        )
        generator = torch.Generator().manual_seed(comm.rank)
        order = torch.randint(0, len(kinds), (60,), generator=torch.Generator().manual_seed(0)).tolist()
        for index in order:
            kind, x = list(kinds)[index], torch.randn(3, 4, generator=generator)
            for replica in (ours, theirs):
                kinds[kind](replica.train(), x)
            assert ours.require_forward_param_sync == theirs.require_forward_param_sync
            for mine, other in zip(ours.module.buffers(), theirs.module.buffers(), strict=True):
                torch.testing.assert_close(mine, other, msg=kind)
            assert not kw or comm.rank == 0 or ours.module[0].num_batches_tracked > 0


def two_forwards_before_a_backward_keep_their_graphs(comm: ddp.Communicator) -> None:
    ours = ddp.DistributedDataParallel(net())
    theirs = nn.parallel.DistributedDataParallel(net(), broadcast_buffers=False)  # torch 2.10 fails with its broadcast
    for replica in (ours, theirs):
        (first, _), (second, _) = batches(comm, 2)
        (replica(first).square().sum() + replica(second).sum()).backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def a_hook_on_buffers(comm: ddp.Communicator) -> None:
    def total(state: list[str], buffers: dict[str, Tensor]) -> list[Any]:
        state.append("called")
        return [dist.all_reduce(buffers["count"], async_op=True).get_future()]

    for when in (When.POST_FORWARD, When.PRE_FORWARD):
        calls: list[str] = []
        replica = ddp.DistributedDataParallel(Counting())
        replica.register_buffer_hook(calls, total, when=when)
        replica(torch.zeros(2 + comm.rank, 4)).sum().backward()
        assert calls == ["called"]
        assert replica.module.count.item() == (9 if when is When.POST_FORWARD else 2 + comm.rank)
    theirs = nn.parallel.distributed._BufferCommHookLocation.POST_FORWARD
    replica = ddp.DistributedDataParallel(Counting())
    replica._register_buffer_comm_hook([], total, theirs)
    replica(torch.zeros(2 + comm.rank, 4)).sum().backward()
    assert replica.module.count.item() == 9


def a_hook_on_buffers_that_fails_later(comm: ddp.Communicator) -> None:
    def fail(state: object, buffers: dict[str, Tensor]) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_exception(ValueError("no such buffer"))
        return future

    for when in (When.POST_FORWARD, When.PRE_FORWARD):
        replica = ddp.DistributedDataParallel(Counting())
        replica.register_buffer_hook(None, fail, when=when)
        with pytest.raises(
            HookFailed, match=rf"the hook on buffers failed: .*no such buffer \({when.value} a forward\)"
        ):
            replica(torch.zeros(2, 4)).sum().backward()


# --- communication hooks ---------------------------------------------------------------------------------------------


def torch_s_own_hooks(comm: ddp.Communicator) -> None:
    # imported here: it warns, which is an error in the process of pytest
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook

    def states() -> dict[str, tuple[Any, Any]]:
        power = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1
        )
        local = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, 2)
        return {
            "allreduce": (None, default_hooks.allreduce_hook),
            "fp16": (None, default_hooks.fp16_compress_hook),
            "power": (power, powerSGD_hook.powerSGD_hook),
            "narrow power": (power, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
            "wrapped": (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
            "local": (local, post_localSGD_hook.post_localSGD_hook),
        }

    for name in states():
        for kw in ({}, TINY) if name != "power" else (TINY,):
            if name == "narrow power" and kw:
                continue  # its result depends on the buckets; torch's are ours only where there is one
            module = net()
            module[1] = nn.Identity()
            ours, theirs = (
                ddp.DistributedDataParallel(module, **kw),
                nn.parallel.DistributedDataParallel(copy.deepcopy(module)),
            )
            pair = [(ours, ours.register_comm_hook), (theirs, theirs.register_comm_hook)]
            if name == "power":
                pair = pair[:1]  # its result depends on the buckets, which are others
            for replica, register in pair:
                register(*states()[name])
                train(replica, batches(comm, 4))
            assert ours.logging_data()["comm_hook"] == states()[name][1].__qualname__
            if name == "power":
                verify_replicas(comm, ours.module.named_parameters())
                continue
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=2e-3, atol=1e-5)


def bf16_hook(comm: ddp.Communicator) -> None:
    """torch's class refuses it without NCCL."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    module = net()
    replica = ddp.DistributedDataParallel(module)
    plain = ddp.DistributedDataParallel(copy.deepcopy(module))
    replica.register_comm_hook(None, default_hooks.bf16_compress_hook)
    x, y = batches(comm, 1)[0]
    for each in (replica, plain):
        F.cross_entropy(each(x), y).backward()
    for p, q in zip(replica.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=1e-3)
    verify_replicas(comm, [(n, p.grad) for n, p in module.named_parameters()])


def what_a_hook_sees(comm: ddp.Communicator) -> None:
    seen: list[Any] = []

    def hook(state: str, bucket: Any) -> torch.futures.Future[Tensor]:
        assert state == "state"
        seen.append((bucket.index(), bucket.is_last(), [tuple(p.shape) for p in bucket.parameters()]))
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert gradient.shape == parameter.shape
            assert bucket.buffer().data_ptr() <= gradient.data_ptr()
        bucket.set_buffer(bucket.buffer() * 0 + 7)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    module = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 3).bfloat16().float())
    replica = ddp.DistributedDataParallel(module, **TINY)
    replica.register_comm_hook("state", hook)
    replica(torch.ones(1, 4)).sum().backward()
    assert seen == [(0, False, [(3,)]), (1, False, [(3, 2)]), (2, True, [(2, 4)])]
    assert all((p.grad == 7).all() for p in module.parameters())
    assert replica.module[0].weight.grad is replica.reducer.buckets[2].slots[0].view
    with pytest.raises(RuntimeError, match="registered already"):
        replica.register_comm_hook(None, hook)
    with pytest.raises(TypeError, match="callable"):
        ddp.DistributedDataParallel(net()).register_comm_hook(None, 3)


def hooks_follow_one_another(comm: ddp.Communicator) -> None:
    """The next one starts when the future before is done, unless the hook says that it need not."""
    in_flight = most = 0

    def hook(_: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)

        def count_down(future: Any) -> Tensor:
            nonlocal in_flight
            in_flight -= 1
            return future.value()[0] / comm.world_size

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(count_down)

    for overlap in (False, True):
        plain = ddp.DistributedDataParallel(net(), **TINY)
        replica = ddp.DistributedDataParallel(net(), **TINY)
        replica.register_comm_hook(None, hook, overlap=overlap)
        most = 0
        for _ in range(3):
            for each in (plain, replica):
                each.zero_grad()
                x, y = batches(comm, 1)[0]
                F.cross_entropy(each(x), y).backward()
        for p, q in zip(plain.parameters(), replica.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        assert overlap or most == 1


def hooks_that_break_their_promise(comm: ddp.Communicator) -> None:
    def raises(state: Any, bucket: Any) -> Any:
        raise KeyError("lost")

    def wrong_type(state: Any, bucket: Any) -> Any:
        return bucket.buffer()

    def wrong_value(state: Any, bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer()[:3])
        return future

    def fails_later(state: Any, bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_exception(ValueError("too late"))
        return future

    for hook, message in (
        (raises, r"raises raised KeyError\('lost'\) \(step 1, bucket 0 \(1 gradients: 5\.bias\)\)"),
        (wrong_type, r"wrong_type returned a Tensor .*must return a torch\.futures\.Future"),
        (wrong_value, r"wrong_value holds \[3\].*like the bucket's buffer"),
        (fails_later, r"fails_later failed: .*too late.*bucket 0"),
    ):
        replica = ddp.DistributedDataParallel(net(), **TINY, buffers="none")
        replica.register_comm_hook(None, hook)
        with pytest.raises(HookFailed, match=message):
            replica(torch.randn(3, 4)).sum().backward()
        with pytest.raises(RuntimeError, match="broke off"):
            replica(torch.randn(3, 4))
        comm.barrier()


# --- the optimizer inside backward -----------------------------------------------------------------------------------


def steps_inside_backward(comm: ddp.Communicator) -> None:
    for kw in ({}, TINY):
        inside, after = ddp.DistributedDataParallel(net(), **kw), ddp.DistributedDataParallel(net(), **kw)
        inside.step_in_backward(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        for x, y in batches(comm, 5):
            F.cross_entropy(inside(x), y).backward()
            assert all(p.grad is None for p in inside.parameters())
        train(after, batches(comm, 5))
        for p, q in zip(inside.parameters(), after.parameters(), strict=True):
            assert torch.equal(p, q)
        verify_replicas(comm, inside.module.named_parameters())


def what_does_not_go_with_it(comm: ddp.Communicator) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    for kw in ({"find_unused_parameters": True}, {"static_graph": True}):
        with pytest.raises(ConfigError, match="does not go with step_in_backward: once the first bucket"):
            ddp.DistributedDataParallel(net(), **kw).step_in_backward(make)
    with pytest.raises(ConfigError, match="a sparse gradient"):
        ddp.DistributedDataParallel(nn.Embedding(3, 2, sparse=True)).step_in_backward(make)
    replica = ddp.DistributedDataParallel(net())
    with pytest.raises(TypeError, match="make_optimizer=3: want a function"):
        replica.step_in_backward(3)  # type: ignore[arg-type]
    replica.step_in_backward(make)
    with pytest.raises(ConfigError, match="another optimizer does not go"):
        replica.step_in_backward(make)
    with pytest.raises(ConfigError, match=r"a step that may be refused .*ddp\.fit clips"):
        replica.ride_along(None)
    replica(torch.randn(3, 4)).sum().backward()
    assert len(replica.optimizers_in_backward) == len(replica.bucket_layout)
    with pytest.raises(ConfigError, match="a communication hook that is registered after it"):
        replica.register_comm_hook(None, lambda state, bucket: None)
    replica.module[0].requires_grad_(False)
    for _ in range(2):
        with pytest.raises(ConfigError, match="freezing, unfreezing or converting"):
            replica(torch.randn(3, 4))
    replica.module[0].requires_grad_(True)
    replica(torch.randn(3, 4)).sum().backward()  # nothing has changed after all
    verify_replicas(comm, replica.module.named_parameters())
    for overlap in (False, True):
        replica = ddp.DistributedDataParallel(net(), overlap=overlap, **TINY)
        replica.step_in_backward(make)
        replica(torch.randn(3, 4)).sum().backward()
        before = [p.detach().clone() for p in replica.parameters()]
        with pytest.raises(ConfigError, match="create_graph=True does not go with"):
            replica(torch.randn(3, 4)).sum().backward(create_graph=True)
        assert all(map(torch.equal, replica.parameters(), before))


# --- looking at it ---------------------------------------------------------------------------------------------------


def logging_data(comm: ddp.Communicator) -> None:
    for overlap in (False, True):
        replica = ddp.DistributedDataParallel(net(), overlap=overlap, **TINY)
        for _ in range(2):
            replica(torch.randn(3, 4)).sum().backward()
        data = replica.logging_data()
        assert [bucket["index"] for bucket in data["buckets"]] == list(range(len(replica.bucket_layout)))
        assert [bucket["parameters"] for bucket in data["buckets"]] == replica.bucket_layout
        assert sum(bucket["numel"] for bucket in data["buckets"]) == sum(p.numel() for p in replica.parameters())
        for bucket in data["buckets"]:
            assert 0 <= bucket["ready_s"] <= bucket["launched_s"] <= bucket["done_s"]
            assert 0 <= bucket["overlap"] <= 1
        assert 0 <= data["overlap"] <= 1
        assert data["num_steps"] == 2
        assert data["runs"] == ("in the background" if overlap else "in the foreground")
        assert data["buckets"][-1]["launched_s"] <= data["buckets"][-1]["done_s"]
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the background's thread, too
    with torch.profiler.profile(experimental_config=everywhere) as profile:
        replica(torch.randn(3, 4)).sum().backward()
    ranges = {event.key for event in profile.key_averages() if event.key.startswith("ddp: bucket")}
    assert ranges == {f"ddp: {bucket.label}" for bucket in replica.reducer.buckets}


CASES = [
    uneven_inputs,
    join_that_ends_everyones_loop,
    torch_s_join_context,
    gradients_of_ranks_that_ran_out,
    buffers_around_every_kind_of_forward,
    buffers_of_every_mode,
    two_forwards_before_a_backward_keep_their_graphs,
    a_hook_on_buffers,
    a_hook_on_buffers_that_fails_later,
    torch_s_own_hooks,
    bf16_hook,
    what_a_hook_sees,
    hooks_follow_one_another,
    steps_inside_backward,
    what_does_not_go_with_it,
    logging_data,
    hooks_that_break_their_promise,
]


def all_cases(names: list[str]) -> None:
    comm = ddp.init(abort_s=20)
    run_cases(CASES, comm, names)
    ddp.shutdown()


def test_all_cases_on_three_ranks() -> None:
    run_ranks(all_cases, 3, [], timeout_s=120)
