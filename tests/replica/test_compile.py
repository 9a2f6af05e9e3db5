"""torch.compile inside a replica, around it, and around a whole step with its backward: the same gradients as eager.

The module gets compiled in each of them; hooks and collectives do not.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import ddp
from ddp.replica.broadcast import verify_replicas
from ddp.strategies import FullySharded
from ddp.strategies import step as step_of

TINY = {"first_bucket_mb": 1e-6, "bucket_cap_mb": 1e-6}  # a bucket for every parameter
NUM_STEPS = 3

Step = Callable[..., Any]


class Net(nn.Module):
    """Has buffers, and a layer that not every step uses."""

    def __init__(self, has_spare: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
        self.spare = nn.Linear(3, 3) if has_spare else None

    def forward(self, x: Tensor, uses_spare: bool = False) -> Tensor:
        y: Tensor = self.body(x)
        return self.spare(y) if uses_spare and self.spare is not None else y


class Counting:
    """A backend: aot_eager, and how many operations it was given."""

    def __init__(self) -> None:
        self.num_operations = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        from torch._dynamo import lookup_backend

        self.num_operations += sum(node.op.startswith("call_") for node in graph.graph.nodes)
        return lookup_backend("aot_eager")(graph, inputs)


def a_step(replica: Any, *args: Any) -> None:
    replica(*args).square().mean().backward()


def an_accumulating_step(replica: Any, x: Tensor, uses_spare: bool) -> None:
    with replica.no_sync():
        a_step(replica, x + 1, uses_spare)
    a_step(replica, x, uses_spare)


def inside(net: Net, step: Step, backend: Counting, **kw: Any) -> tuple[Any, Callable[..., None]]:
    replica = ddp.DistributedDataParallel(torch.compile(net, backend=backend), **kw)
    return replica, lambda *args: step(replica, *args)


class Around:
    """What is called is compiled, and `no_sync` is the replica's."""

    def __init__(self, replica: Any, backend: Counting) -> None:
        self.call, self.no_sync = torch.compile(replica, backend=backend), replica.no_sync

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def around(net: Net, step: Step, backend: Counting, **kw: Any) -> tuple[Any, Callable[..., None]]:
    replica = ddp.DistributedDataParallel(net, **kw)
    compiled = Around(replica, backend)
    return replica, lambda *args: step(compiled, *args)


def around_the_step(net: Net, step: Step, backend: Counting, **kw: Any) -> tuple[Any, Callable[..., None]]:
    replica = ddp.DistributedDataParallel(net, **kw)
    compiled = torch.compile(step, backend=backend)
    return replica, lambda *args: compiled(replica, *args)


CASES: list[tuple[Callable[..., Any], Step, dict[str, Any]]] = [
    *[(wrap, a_step, {"overlap": False}) for wrap in (inside, around, around_the_step)],
    *[(wrap, an_accumulating_step, {"overlap": True}) for wrap in (inside, around, around_the_step)],
    *[(wrap, a_step, {"find_unused_parameters": True}) for wrap in (inside, around, around_the_step)],
    (around, a_step, {"static_graph": True}),
    (around, a_step, {"hook": default_hooks.allreduce_hook}),
]


def compare(comm: ddp.Communicator, wrap: Callable[..., Any], step: Step, kw: dict[str, Any]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    has_spare = kw.get("find_unused_parameters", False)
    net = Net(has_spare)
    backend, settings = Counting(), {key: value for key, value in kw.items() if key != "hook"} | TINY
    eager = ddp.DistributedDataParallel(copy.deepcopy(net), **settings)
    replica, run = wrap(net, step, backend, **settings)
    if "hook" in kw:
        for each in (eager, replica):
            each.register_comm_hook(None, kw["hook"])
    for number in range(NUM_STEPS):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * number + comm.rank))
        uses_spare = has_spare and number == 1 and comm.rank == 0
        eager.zero_grad()
        replica.zero_grad()
        step(eager, x, uses_spare)
        run(x, uses_spare)
        assert replica.reducer.num_steps == number + 1
        for (name, p), q in zip(net.named_parameters(), eager.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)
        torch.testing.assert_close([*net.buffers()], [*eager.buffers()])
        verify_replicas(comm, [(name, p.grad) for name, p in net.named_parameters() if p.grad is not None])
        with torch.no_grad():
            for p in (*net.parameters(), *eager.parameters()):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)
    replica.verify_replicas()
    assert backend.num_operations >= len(net.body), "the module was not compiled"
    replica.eval()
    with torch.no_grad():
        replica(torch.ones(2, 8))  # every rank gets rank 0's buffers
        for _ in range(comm.rank):
            replica(torch.ones(2, 8))  # no collectives in the rest of an evaluation
    verify_replicas(comm, net.named_buffers())


def all_cases() -> None:
    comm = ddp.init(abort_s=20)
    had_compiler = "torch._dynamo" in sys.modules  # an earlier test of this process may have imported it
    replica = ddp.DistributedDataParallel(Net(has_spare=False))
    a_step(replica, torch.randn(6, 8))
    has_compiler = "torch._dynamo" in sys.modules
    assert had_compiler or not has_compiler, "it takes seconds to import; who compiles nothing needs none"

    for wrap, step, kw in CASES:
        try:
            compare(comm, wrap, step, kw)
        except BaseException as error:
            error.add_note(f"compiled {wrap.__name__}, {step.__name__}, {kw}")
            raise
    ddp.shutdown()


@pytest.mark.slow
def test_compiled_replicas_have_the_gradients_of_eager_ones() -> None:
    run_ranks(all_cases, 2, timeout_s=60)


def in_slices() -> None:
    """A model in slices agrees on the order of units around the graphs, here by messages, which no graph can hold."""
    ddp.init(abort_s=20, shared_memory=False)
    losses = []
    for backend in ("eager", Counting()):
        torch.manual_seed(0)
        net = Net(has_spare=False)
        strategy = FullySharded(net, torch.optim.SGD(net.parameters(), lr=0.1))
        compiled = torch.compile(strategy.model, backend=backend) if isinstance(backend, Counting) else strategy.model
        for _ in range(NUM_STEPS):
            strategy.optimizer.zero_grad()
            loss = compiled(torch.ones(6, 8).cumsum(0)).square().mean()
            loss.backward()
            step_of(strategy)
        losses.append(loss.item())
        strategy.finish()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert isinstance(backend, Counting) and backend.num_operations >= len(net.body), "the module was not compiled"


@pytest.mark.slow
def test_a_model_in_slices_is_compiled_between_its_collectives() -> None:
    run_ranks(in_slices, 2, timeout_s=60)
