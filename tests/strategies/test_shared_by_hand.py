"""What a program may do to a model that its ranks share: central storage then has the bits of replicas.

Tests: ddp/strategies/central_storage.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.errors import ConfigError
from ddp.optim import LAMB
from ddp.replica.broadcast import tensor_hash
from ddp.strategies import CentralStorage, Replicated, step

X = torch.randn(24, 12, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (24,), generator=torch.Generator().manual_seed(1))
AT, NUM_STEPS = 3, 5

Makes = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def clear(strategy: Replicated) -> None:
    strategy.optimizer.state.clear()


def set_steps(strategy: Replicated) -> None:
    for state in strategy.optimizer.state.values():
        state["step"].fill_(1.0)


def replace_steps(strategy: Replicated) -> None:
    for state in strategy.optimizer.state.values():
        state["step"] = torch.tensor(1.0)


def replace_means(strategy: Replicated) -> None:
    for parameter, state in strategy.optimizer.state.items():
        state["exp_avg"] = torch.full_like(parameter, 0.01)


def switch_on_amsgrad(strategy: Replicated) -> None:
    for group in strategy.optimizer.param_groups:
        group["amsgrad"] = True
    for parameter, state in strategy.optimizer.state.items():
        state["max_exp_avg_sq"] = torch.zeros_like(parameter)


def switch_on_momentum(strategy: Replicated) -> None:
    strategy.optimizer.param_groups[0]["momentum"] = 0.9


def exchange_data(strategy: Replicated) -> None:
    for parameter in strategy.model.module.parameters():
        parameter.data = parameter.data * 0.5


def replace_gradients(strategy: Replicated) -> None:
    for parameter in strategy.model.module.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5


def nothing(strategy: Replicated) -> None: ...


BEFORE_A_STEP: dict[str, tuple[Callable[[Replicated], None], Makes]] = {
    "clear": (clear, adamw),
    "set steps": (set_steps, adamw),
    "replace steps": (replace_steps, adamw),
    "replace means": (replace_means, adamw),
    "replace means of LAMB": (replace_means, lambda parameters: LAMB(parameters, lr=0.01)),
    "amsgrad": (switch_on_amsgrad, adamw),
    "momentum": (switch_on_momentum, lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    "exchange data": (exchange_data, adamw),
}
AFTER_BACKWARD = {"replace gradients": replace_gradients}


def trained(
    kind: type[Replicated], makes: Makes, before: Callable[[Replicated], None], after: Callable[[Replicated], None]
) -> list[str]:
    """Hashes of parameters and state after a few steps, with something done in the midst."""
    comm = ddp.init()
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(12, 700), nn.ReLU(), nn.Linear(700, 300), nn.ReLU(), nn.Linear(300, 3))
    strategy = kind(module, makes(module.parameters()), clip_norm=0.5)
    mine = torch.arange(24).tensor_split(comm.world_size)[comm.rank]
    for number in range(NUM_STEPS):
        if number == AT:
            before(strategy)
            strategy.optimizer.load_state_dict(strategy.optimizer.state_dict())  # which is adopted
        strategy.optimizer.zero_grad()
        F.cross_entropy(strategy.model(X[mine]), CLASSES[mine]).backward()
        if number == AT:
            after(strategy)
        step(strategy)
    strategy.finish()
    state = [strategy.optimizer.state[parameter] for parameter in module.parameters()]
    values = [value.reshape(-1).float() for each in state for value in each.values() if isinstance(value, Tensor)]
    return [tensor_hash(each.detach()) for each in (*(each.reshape(-1) for each in module.parameters()), *values)]


def all_edits() -> list[str]:
    """The edits after which central storage has other bits than replicas."""
    ddp.init(abort_s=30)
    ways = {name: (makes, edit, nothing) for name, (edit, makes) in BEFORE_A_STEP.items()}
    ways |= {name: (adamw, nothing, edit) for name, edit in AFTER_BACKWARD.items()}
    wrong = [name for name, way in ways.items() if trained(Replicated, *way) != trained(CentralStorage, *way)]
    ddp.shutdown()
    return wrong


@pytest.mark.slow
def test_what_a_program_changes_between_steps_counts() -> None:
    assert run_ranks(all_edits, 2, timeout_s=120) == [[], []]


def lives() -> None:
    comm = ddp.init(abort_s=30)
    torch.manual_seed(1)
    module = nn.Linear(12, 3)
    strategy = CentralStorage(module, adamw(module.parameters()))

    def make_step(inputs: Tensor = X) -> None:
        strategy.optimizer.zero_grad()
        F.cross_entropy(strategy.model(inputs), CLASSES).backward()
        step(strategy)

    make_step()
    first = module.weight.detach()  # a tensor of the program's own, in the memory that all share
    saved = {key: value.clone() if isinstance(value, Tensor) else value for key, value in module.state_dict().items()}
    whole = {**strategy.state_dict(), "model": saved}
    if comm.rank == 0:
        module.weight.data.fill_(1.0)
    comm.barrier()
    assert bool((first == 1.0).all())  # on each rank
    if comm.rank == 1:
        comm.barrier()
        assert bool((module.weight == 1.0).all())  # the others wait for this rank before they load
    else:
        comm.barrier()
    strategy.load_state_dict({**whole, "optimizer": strategy.optimizer.state_dict()})
    assert torch.equal(module.weight, saved["weight"])
    strategy.publish(f"lives-{os.getppid()}", {})
    with pytest.raises(ConfigError, match="publishes under another name already"):
        strategy.publish("other", {})
    strategy.finish()
    comm.barrier()
    first.fill_(float(comm.rank))  # is this rank's own now
    comm.barrier()
    assert bool((module.weight == comm.rank).all())
    module.weight.data.copy_(saved["weight"])
    make_step()  # and central storage begins anew
    assert module.weight.data_ptr() != first.data_ptr()
    module.double()
    with pytest.raises(ConfigError, match=r"float32 are float64 now since strategy='central_storage' was made"):
        make_step(X.double())
    ddp.shutdown()


def test_memory_is_shared_from_the_beginning_to_finish_and_no_longer() -> None:
    run_ranks(lives, 2, timeout_s=60)
