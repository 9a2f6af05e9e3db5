"""What a callback changes holds from the next step on, in every mode, and on a resume; torch's loop is the judge.

Tests: ddp/train/steps/state.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer, lr_scheduler

import ddp
from ddp.data.orders.sampler import TrainSampler
from ddp.errors import CheckpointError
from ddp.gradients.reducer import AllReduce, ReduceScatter
from recipes.tutorial.simulated import SimulatedNetwork

NUM_STEPS, CHANGED_AFTER = 8, 4
X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))
Change = Callable[[nn.Module, Optimizer], None]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))


def new_data(module: nn.Module, optimizer: Optimizer) -> None:
    for parameter in module.parameters():
        parameter.data = torch.full_like(parameter, 0.25)


def in_place(module: nn.Module, optimizer: Optimizer) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(0.5)


def loaded(module: nn.Module, optimizer: Optimizer) -> None:
    module.load_state_dict({name: torch.full_like(value, 0.25) for name, value in module.state_dict().items()})


def cleared(module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state.clear()


def zeroed(module: nn.Module, optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def whole_values(module: nn.Module, optimizer: Optimizer) -> None:
    """Sets what a plain optimizer has, in the shape of the parameters."""
    for parameter in module.parameters():
        for name in list(optimizer.state[parameter]):
            if name != "step":
                optimizer.state[parameter][name] = torch.full(parameter.shape, 0.125)


def rates(module: nn.Module, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.1
        group["weight_decay"] = 0.5


def another_state(module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state = type(optimizer.state)(dict)


OF_WEIGHTS: list[Change] = [new_data, in_place, loaded, rates]
OF_STATE: list[Change] = [cleared, zeroed, whole_values, another_state]


def sgd(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=0.05, momentum=0.9)


def adam(module: nn.Module) -> Optimizer:
    return Adam(module.parameters(), lr=0.02)


class Changes(ddp.Callback):
    def __init__(self, change: Change | None) -> None:
        self.change = change

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        if report.step == CHANGED_AFTER and self.change is not None:
            self.change(state.model.module, state.optimizer)


def by_hand(change: Change | None, make: Callable[[nn.Module], Optimizer]) -> Tensor:
    module = net()
    optimizer, sampler, step = make(module), TrainSampler(40, global_batch=10, rank=0, world_size=1, seed=0), 0
    while step < NUM_STEPS:
        plan = next(sampler.plans())
        indices = list(plan.micros[0].indices)
        optimizer.zero_grad()
        F.cross_entropy(module(X[indices]), CLASSES[indices]).backward()
        optimizer.step()
        sampler.commit(plan)
        step += 1
        if step == CHANGED_AFTER and change is not None:
            change(module, optimizer)
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def by_fit(
    change: Change | None, make: Callable[[nn.Module], Optimizer], *, shrinks: bool = False, **how: Any
) -> Tensor:
    module = net()
    if shrinks:
        module[0].__class__ = Shrinks
    ddp.fit(
        module,
        (X, CLASSES),
        make(module),
        **grouped(
            loss=F.cross_entropy,
            global_batch=10,
            max_steps=NUM_STEPS,
            progress=False,
            folder=None,
            callbacks=[] if shrinks else [Changes(change)],
            **how,
        ),
    ).model.verify_replicas()
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def all_changes_hold() -> None:
    ddp.init(abort_s=30)
    first = nn.utils.parameters_to_vector(net().parameters()).detach()
    for make, changes in ((sgd, OF_WEIGHTS), (adam, OF_STATE)):
        without = by_hand(None, make)
        for change in changes:
            wanted, case = by_hand(change, make), f"{make.__name__}, {change.__name__}"
            way = (wanted - first).norm()
            assert (wanted - without).norm() > 0.1 * way, case  # so that a lost change would show
            torch.testing.assert_close(by_fit(change, make), wanted, rtol=1e-4, atol=1e-5, msg=case)
            torch.testing.assert_close(by_fit(change, make, strategy="sharded"), wanted, rtol=1e-4, atol=1e-5, msg=case)
            assert (by_fit(change, make, precision="bf16_pure") - wanted).norm() < 0.05 * way, case
    kept = [by_fit(None, sgd, precision=precision, shrinks=True) for precision in ("fp32", "bf16_pure")]
    assert (kept[1] - kept[0]).norm() < 0.05 * kept[0].norm() < 0.05 * first.norm()
    ddp.shutdown()


class Shrinks(nn.Linear):
    """Changes its weights itself, without a callback."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(inputs)


@pytest.mark.slow
def test_what_a_callback_changes_holds_in_every_mode() -> None:
    run_ranks(all_changes_hold, 2)


def alone() -> ddp.Communicator:
    return ddp.Communicator(SimulatedNetwork(1).transport(0))


class Sets(ddp.Callback):
    """Sets rates before some steps, and notes those that steps have had."""

    def __init__(self, rates: dict[int, float]) -> None:
        self.rates, self.seen = rates, list[float]()

    def step_start(self, state: ddp.TrainState) -> None:
        if state.step in self.rates:
            state.optimizer.param_groups[0]["lr"] = self.rates[state.step]

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        self.seen.append(report.rate)


def seen(rates: dict[int, float], schedule: Any = None, *, steps: int = 8, folder: Path | None = None) -> list[float]:
    module, sets = nn.Linear(6, 3), Sets(rates)
    ddp.fit(
        ddp.BucketedDataParallel(module, comm=alone()),
        (X, CLASSES),
        SGD(module.parameters(), lr=0.1),
        loss=F.cross_entropy,
        global_batch=10,
        max_steps=steps,
        schedule=schedule,
        folder=ddp.Folder(folder, resume=folder and "auto", progress=False, curves=False),
        callbacks=[sets],
    )
    return sets.seen


def halves(done: float, of: float) -> float:
    return 1.0 if done < 20 else 0.5 if done < 40 else 0.25


def test_a_rate_that_a_callback_sets_holds_and_a_schedule_goes_on_in_proportion(tmp_path: Path) -> None:
    assert seen({}) == [0.1] * 8
    assert seen({0: 0.3, 3: 0.7, 5: 0.0, 6: 0.2}) == [0.3, 0.3, 0.3, 0.7, 0.7, 0.0, 0.2, 0.2]
    assert seen({}, halves) == [0.1, 0.1, 0.05, 0.05, 0.025, 0.025, 0.025, 0.025]
    changed = [0.2, 0.2, 0.1, 0.03, 0.015, 0.015, 0.015, 0.015]
    assert seen({0: 0.2, 3: 0.03}, halves) == pytest.approx(changed)
    resumed = [seen({0: 0.2, 3: 0.03}, halves, steps=steps, folder=tmp_path) for steps in (5, 8)]
    assert resumed[0] + resumed[1] == pytest.approx(changed)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=9),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.3, step_size_up=3),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5, factor=0.3),
}


class Steps(ddp.Callback):
    """Steps a scheduler of torch's after each step, and notes the rates and momenta that steps have had."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.seen, self.losses = scheduler, list[tuple[float, float]](), list[float]()
        self.state_dict, self.load_state_dict = scheduler.state_dict, scheduler.load_state_dict  # type: ignore[method-assign]

    def step_start(self, state: ddp.TrainState) -> None:
        self.note(state.optimizer)

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        self.step(report.loss)

    def note(self, optimizer: Optimizer) -> None:
        self.seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))

    def step(self, loss: float) -> None:
        self.losses.append(loss)
        self.scheduler.step(*[loss] * isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau))


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.quick(1)
def test_a_scheduler_that_a_callback_steps_is_as_in_a_loop_by_hand(name: str, tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, SGD, Steps]:
        torch.manual_seed(0)
        module = nn.Linear(6, 3)
        optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
        return module, optimizer, Steps(SCHEDULERS[name](optimizer))

    found, losses, last = list[tuple[float, float]](), list[float](), list[float]()
    for steps in (5, 8):  # the second one goes on from the first one's checkpoint
        module, optimizer, callback = made()
        ddp.fit(
            ddp.BucketedDataParallel(module, comm=alone()),
            (X, CLASSES),
            optimizer,
            loss=F.cross_entropy,
            global_batch=10,
            max_steps=steps,
            folder=ddp.Folder(tmp_path, resume="auto", progress=False, curves=False),
            callbacks=[callback],
        )
        found, losses = found + callback.seen, losses + callback.losses
        last.append(optimizer.param_groups[0]["lr"])
    _, optimizer, by_hand = made()
    rates = list[float]()
    for loss in losses:
        by_hand.note(optimizer)
        optimizer.step()
        by_hand.step(loss)
        rates.append(optimizer.param_groups[0]["lr"])
    assert found == by_hand.seen and len(set(found)) > 2
    assert last == [rates[4], rates[7]]  # also what the last step has left


class Makes(Steps):
    """Makes the scheduler when the fit starts, where it gets the optimizer."""

    def __init__(self, make: Callable[[Optimizer], Any]) -> None:
        self.make, self.seen, self.losses = make, [], []

    def fit_start(self, state: ddp.TrainState) -> None:
        super().__init__(self.make(state.optimizer))


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
@pytest.mark.parametrize("name", ["one cycle", "cosine"])
@pytest.mark.quick(1)
def test_a_scheduler_made_at_the_start_of_a_resumed_fit_leaves_the_checkpoint_s_rates(
    name: str, rate: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def made(steps: int, folder: Path | None) -> Tensor:
        torch.manual_seed(0)
        module = nn.Linear(6, 3)
        optimizer = torch.optim.AdamW(module.parameters(), lr=copy.deepcopy(rate))
        ddp.fit(
            ddp.BucketedDataParallel(module, comm=alone()),
            (X, CLASSES),
            optimizer,
            loss=F.cross_entropy,
            global_batch=10,
            max_steps=steps,
            folder=ddp.Folder(folder, progress=False, resume=folder and "auto", curves=False),
            callbacks=[Made(name)],
        )
        return module.weight.detach()

    class Made(Makes):
        def __init__(self, name: str) -> None:
            super().__init__(SCHEDULERS[name])

        def note(self, optimizer: Optimizer) -> None:
            pass

    made(3, tmp_path)
    assert torch.equal(made(8, tmp_path), made(8, None))
    assert "in no checkpoint" not in caplog.text, "the object has state_dict, and not its class"


def test_masters_are_compared_for_a_user_s_callback_and_not_for_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, equal = list[Tensor](), torch.equal

    def noting(first: Tensor, second: Tensor) -> bool:
        compared.extend([first] if first.dtype == torch.int16 else [])
        return equal(first, second)

    monkeypatch.setattr(torch, "equal", noting)
    found = []
    for others in ([], [ddp.Callback()]):
        module, averages = net(), ddp.EMA(0.5)
        compared.clear()
        state = ddp.fit(
            ddp.BucketedDataParallel(module, comm=alone()),
            (X, CLASSES),
            SGD(module.parameters(), lr=0.1),
            loss=F.cross_entropy,
            test_data=(X, CLASSES),
            global_batch=10,
            max_steps=8,
            evaluation=ddp.Evaluation(every_steps=4, every_epochs=None),
            precision="bf16_pure",
            folder=ddp.Folder(None, progress=False),
            callbacks=[averages, ddp.EarlyStopping(9), *others],
        )
        found.append((state.evaluation, nn.utils.parameters_to_vector(module.parameters()), len(compared)))
    (evaluation, weights, few), (other_evaluation, other_weights, many) = found
    assert evaluation == other_evaluation and equal(weights, other_weights)
    assert (few, many) == (0, 9 * 4)  # ours write to no weight; before each step and at the end


class Unfreezes(ddp.Callback):
    """Begins to train the first layer after the second step, at a rate of its own; or before the first one."""

    def __init__(self, *, at_start: bool = False, always: bool = False) -> None:
        self.at_start, self.always = at_start, always

    def fit_start(self, state: ddp.TrainState) -> None:
        if self.at_start and (self.always or len(state.optimizer.param_groups) == 1):
            self.unfreeze(state)

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        if report.step == 2 and not self.at_start:
            self.unfreeze(state)

    def unfreeze(self, state: ddp.TrainState) -> None:
        layer = state.model.module[0]
        layer.requires_grad_(True)
        state.optimizer.add_param_group({"params": layer.parameters(), "lr": 0.03, "weight_decay": 0.1})


def unfrozen(folder: Path, steps: int, callback: Unfreezes, *, module: nn.Sequential | None = None, **how: Any) -> Any:
    module = module or net()
    module[0].requires_grad_(False)
    optimizer = Adam(module[2].parameters(), lr=0.02)
    state = ddp.fit(
        ddp.BucketedDataParallel(
            module, comm=alone(), reducer=ReduceScatter if how.pop("sharded", False) else AllReduce
        ),
        (X, CLASSES),
        optimizer,
        **grouped(
            loss=F.cross_entropy,
            global_batch=10,
            max_steps=steps,
            folder=folder,
            resume="auto",
            progress=False,
            curves=False,
            callbacks=[callback],
            **how,
        ),
    )
    momenta = [value for p in module.parameters() for name, value in sorted(optimizer.state[p].items())]
    tensors = [*module.parameters(), *momenta]
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors]), optimizer, state


@pytest.mark.parametrize("how", [{}, {"precision": "bf16_pure"}, {"sharded": True}])
@pytest.mark.parametrize("at_start", [False, True])
@pytest.mark.quick(1)
def test_a_run_whose_callback_has_added_a_group_is_resumed(tmp_path: Path, at_start: bool, how: dict[str, Any]) -> None:
    whole, _, _ = unfrozen(tmp_path / "whole", 9, Unfreezes(at_start=at_start), **how)
    for steps in (1, 3, 6, 9):
        parts, optimizer, _ = unfrozen(tmp_path / "parts", steps, Unfreezes(at_start=at_start), **how)
    assert torch.equal(parts, whole)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.03]
    assert len(whole) > 3 * 123  # with two momenta of each


def test_what_does_not_fit_an_added_group_is_told(tmp_path: Path) -> None:
    unfrozen(tmp_path, 3, Unfreezes(at_start=True))
    with pytest.raises(ValueError, match="more than one parameter group") as failed:
        unfrozen(tmp_path, 5, Unfreezes(at_start=True, always=True))
    assert failed.value.__notes__ == ["the run was resumed, and has this group already: add it only if it is not there"]
    module = net()
    optimizer = Adam([{"params": [each]} for each in module.parameters()])
    with pytest.raises(
        CheckpointError, match=r"groups of \[2, 2\] parameters, this optimizer has groups of \[1, 1, 1, 1\]"
    ):
        ddp.fit(
            ddp.BucketedDataParallel(module, comm=alone()),
            (X, CLASSES),
            optimizer,
            loss=F.cross_entropy,
            global_batch=10,
            max_steps=5,
            folder=ddp.Folder(tmp_path, resume="auto", progress=False),
        )
