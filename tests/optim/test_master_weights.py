"""precision="bf16_pure": small updates add up in master weights, which a checkpoint and the end of a run have.

Tests: ddp/optim/precision.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.errors import ConfigError
from ddp.gradients import ErrorFeedback, PowerSGD
from ddp.optim import LAMB
from ddp.replica.broadcast import tensor_hash
from ddp.train.checkpoints.checkpoint_store import load
from ddp.train.steps.state import StepReport, TrainState

X = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))
Make = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def made() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(12, 100), nn.BatchNorm1d(100), nn.ReLU(), nn.Linear(100, 100), nn.LayerNorm(100)
    return nn.Sequential(*layers, nn.Linear(100, 3))


class Looks(ddp.Callback):
    """Looks at the parameters after each step."""

    def step_end(self, state: TrainState, report: StepReport) -> None:
        assert state.masters
        named = dict(state.model.module.named_parameters())
        assert {name: p.dtype for name, p in named.items() if p.dtype != torch.bfloat16} == {
            "1.weight": torch.float32,
            "1.bias": torch.float32,
        }
        for parameter, master in state.masters.items():
            assert master.dtype == torch.float32
            assert torch.equal(parameter, master.bfloat16())
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in named.values())


def fitted(precision: Any = "bf16_pure", make: Make = sgd, **how: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = made()
    optimizer = make(model.parameters())
    settings: dict[str, Any] = {"loss": F.cross_entropy, "global_batch": 8, "max_steps": 7, "seed": 3, "clip_norm": 1.0}
    settings |= {"folder": None, "progress": False, "curves": False, "num_shards": 2, **how}
    callbacks = [Looks()] if precision == "bf16_pure" else []
    state = ddp.fit(model, (X, CLASSES), optimizer, **grouped(precision=precision, callbacks=callbacks, **settings))
    state.model.verify_replicas()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return model, optimizer


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    values = [value for p in model.parameters() for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    assert all(value.dtype == torch.float32 for value in values)
    return [tensor_hash(value.detach().reshape(-1)) for value in (*model.parameters(), *values)]


class OwnSGD(torch.optim.SGD):
    """Has an attribute of its own, and writes to its groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.02)
        self.num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


def own_optimizers() -> None:
    """An optimizer keeps attributes and hooks of its own; a run that an error ends gives the model back."""
    steps: list[int] = []

    def hooked(parameters: Any) -> OwnSGD:
        optimizer = OwnSGD(parameters)
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        return optimizer

    _, optimizer = fitted(make=hooked)
    assert len(steps) == 7
    assert optimizer.param_groups[0]["steps"] == 7

    class Fails(ddp.Callback):
        def step_end(self, state: TrainState, report: StepReport) -> None:
            if report.step == 3:
                raise OSError("no space left")

    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with pytest.raises(OSError, match="no space left"):
        ddp.fit(
            model, (X, CLASSES), optimizer, loss=F.cross_entropy,
            global_batch=8,
            max_steps=7,
            precision="bf16_pure",
            folder=ddp.Folder(None, progress=False),
            callbacks=[Fails()],
        )  # fmt: skip
    assert all(p.dtype == torch.float32 and "exp_avg" in optimizer.state[p] for p in model.parameters())


def everything(folder: str) -> None:
    ddp.init(abort_s=30)
    own_optimizers()
    first = vector(made())
    makers: dict[str, Make] = {
        "sgd": sgd,
        "small": lambda parameters: torch.optim.SGD(parameters, lr=1e-4),  # updates below bfloat16's precision
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.002),
        "lamb": lambda parameters: LAMB(parameters, lr=0.005),
    }
    for name, make in makers.items():
        plain = vector(fitted("fp32", make)[0]) - first
        pure = vector(fitted(make=make)[0]) - first
        assert (pure - plain).norm() < 0.2 * plain.norm(), name
        assert not torch.equal(pure, plain)
    hooked = vector(fitted(hook=ErrorFeedback(PowerSGD(2)))[0])
    assert torch.isfinite(hooked).all()

    how: dict[str, Any] = {"resume": "auto", "max_steps": 7, "make": makers["adamw"]}
    whole = fitted(folder=f"{folder}/whole", **how)
    fitted(folder=f"{folder}/parts", **{**how, "max_steps": 4})
    assert bits(*fitted(folder=f"{folder}/parts", **how)) == bits(*whole)
    stored = load(f"{folder}/parts/checkpoints").parts["model"]
    assert all(torch.equal(stored[name], value) for name, value in whole[0].state_dict().items())
    fitted("fp32", folder=f"{folder}/parts", **{**how, "max_steps": 9})  # goes on in another precision
    fitted(folder=f"{folder}/parts", **{**how, "max_steps": 11})
    for wrong, match in ({"sharded": True}, "precision='bf16_pure' has"), ({"wire": "int8"}, "takes fp32 gradie"):
        with pytest.raises(ConfigError, match=match):
            fitted(**wrong)
    ddp.shutdown()


@pytest.mark.slow
def test_small_updates_add_up_and_a_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    run_ranks(everything, 2, str(tmp_path))
