"""An evaluation, a save and a prediction look at a run and change nothing; a resumed run has the bits of one at once.

Nor does a state that is refused.

Bits are those of parameters and buffers after each step, on each rank, of a model whose training uses its buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from members import fitted
from ranks import run_ranks
from torch import Tensor, nn

import ddp
from ddp.replica.broadcast import tensor_hash
from ddp.strategies.local_sgd import Streaming

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (24,), generator=torch.Generator().manual_seed(1))
STEPS = 5


class Centred(nn.Module):
    """Takes a running mean from what it computes, and counts its forwards, also those of an evaluation."""

    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.body(x)))
        self.calls = self.calls + 1  # another tensor
        if self.training:
            self.mean.mul_(0.5).add_(hidden.detach().mean(0), alpha=0.5)
        scores: Tensor = self.head(hidden - self.mean)
        return scores


class Bits(ddp.Callback):
    """Notes the bits after each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        self.seen.append({name: tensor_hash(value) for name, value in state.model.module.state_dict().items()})


class Predicts(ddp.Callback):
    """Predicts after each step, and compares the replicas."""

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        ddp.predict(state.model, X[:5])
        if not isinstance(state.strategy, Streaming):  # whose parameters differ between rounds
            state.model.verify_replicas()


def drop_in(buffers: str) -> Callable[[nn.Module], nn.Module]:
    return lambda module: ddp.DistributedDataParallel(module, buffers=buffers)


HOW: dict[str, dict[str, Any]] = {  # whose buffers count: those of rank 0, of each rank, or of all
    "mirrored": {},
    "central_storage": {"strategy": ddp.Averaging(strategy="central_storage")},
    "local_sgd": {"strategy": ddp.LocalSGD(every=2, warmup_samples=8)},
    "local_sgd with a delay": {
        "strategy": ddp.LocalSGD(every=2, delay=1, fragments=2, bucket_cap_mb=1e-4, outer_momentum=0.9)
    },
    "each rank its own": {"wrap": drop_in("none")},
    "their mean": {"wrap": drop_in("mean")},
    "same bits": {"same_bits": True, "num_shards": 4},
}
EVERY_STEP = ddp.Evaluation(every_epochs=None, every_steps=1)
LOOKS: dict[str, dict[str, Any]] = {
    "evaluated": {"test_data": (X[:9], Y[:9]), "evaluation": EVERY_STEP, "callbacks": [Predicts]},
    "saved": {"checkpoint_every_steps": 1},
    "resumed": {"stops": (2, 3, STEPS)},
}


def trained(folder: Path, *, wrap: Any = None, stops: Sequence[int] = (STEPS,), callbacks: Any = (), **how: Any) -> Any:
    """Returns the bits after each step of a run that ends after each of these numbers of steps, and goes on."""
    bits, others = Bits(), [each() for each in callbacks]
    saves = len(stops) > 1 or "checkpoint_every_steps" in how
    for last in stops:
        module = Centred()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        given = {"global_batch": 8, "max_steps": last, "callbacks": [bits, *others], **how}
        given |= {"folder": folder, "resume": "auto"} if saves else {}
        fitted(wrap(module) if wrap else module, (X, Y), optimizer, **given)
    return bits.seen


OTHERS: dict[str, Callable[[dict[str, Any]], Any]] = {  # whose states are refused
    "another shape": lambda state: state["model"].update({"head.weight": torch.zeros(9, 9)}),
    "a layer less": lambda state: state["model"].pop("head.bias"),
    "a layer more": lambda state: state["model"].update({"more": torch.zeros(1)}),
    "another optimizer": lambda state: state["optimizer"]["param_groups"][0]["params"].pop(),
}


def after_refusals(kind: str, *others: str) -> tuple[list[str], dict[str, str]]:
    """Returns what is said of states of other models, and the bits after a step before them and one after them."""
    module, said = Centred(), []
    strategy = getattr(ddp.strategies, kind)(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    for number in range(2):
        with strategy.micro_batch() as scale:
            (nn.functional.cross_entropy(strategy.model(X[:8]), Y[:8]) * scale).backward()
        ddp.strategies.step(strategy)
        module.zero_grad()
        for other in others if not number else ():
            state = copy.deepcopy(strategy.state_dict())
            state["model"] = {name: torch.zeros_like(value) for name, value in state["model"].items()}
            OTHERS[other](state)
            try:
                strategy.load_state_dict(state)
            except ValueError as error:
                said.append(str(error))
    strategy.finish()
    return said, {name: tensor_hash(value) for name, value in module.state_dict().items()}


KINDS = ("Replicated", "Sharded", "CentralStorage", "LocalSteps")


def everything(folder: Path) -> dict[str, dict[str, Any]]:
    ddp.init(abort_s=60)
    found = {
        name: {look: trained(folder / name / look, **how, **LOOKS.get(look, {})) for look in ("at once", *LOOKS)}
        for name, how in HOW.items()
    }
    return {**found, "refused": {kind: (after_refusals(kind, *OTHERS), after_refusals(kind)[1]) for kind in KINDS}}


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(everything, 2, tmp_path_factory.mktemp("runs"), timeout_s=120)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", HOW)
@pytest.mark.slow
def test_a_look_changes_no_bit_of_a_run(on_ranks: list[dict[str, dict[str, Any]]], name: str, look: str) -> None:
    for found in on_ranks:
        assert found[name][look] == found[name]["at once"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_state_that_is_refused_changes_nothing(on_ranks: list[dict[str, dict[str, Any]]], kind: str) -> None:
    for found in on_ranks:
        (said, bits), without = found["refused"][kind]
        assert bits == without
        assert said[:3] == [
            "the state is of another model: head.weight is [9, 9] there and [3, 8] here",
            "the state is of another model: head.bias is missing there and [3] here",
            "the state is of another model: more is [1] there and missing here",
        ]
        assert "parameter group" in said[3]


@pytest.mark.slow
def test_ranks_that_keep_their_own_have_others(on_ranks: list[dict[str, dict[str, Any]]]) -> None:
    first, second = (found["local_sgd with a delay"]["at once"][-1] for found in on_ranks)
    assert first["head.weight"] != second["head.weight"]
    for name in ("local_sgd", "each rank its own"):
        means = zip(*(found[name]["at once"] for found in on_ranks), strict=True)
        assert all(one["mean"] != other["mean"] for one, other in means)
