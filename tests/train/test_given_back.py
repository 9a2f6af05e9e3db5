"""What a fit and an evaluation change of the process, and of the model, is as before when they are over."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import random
import signal
import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flat import fit_over, grouped
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, lr_scheduler

import ddp
from ddp.errors import ConfigError, Diverged
from ddp.gradients.reducer import ReduceScatter
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import StepReport, TrainState
from recipes.tutorial.simulated import SimulatedNetwork

X, CLASSES = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


def state_of_process() -> dict[str, Any]:
    """Returns what a program may notice of what another part of it has done."""
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
        "numpy": pickle.dumps(np.random.get_state()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "numbers": (torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_default_device()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), torch.is_grad_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_anomaly_enabled()),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "paths": (list(sys.path), dict(os.environ), Path.cwd(), list(sys.argv)),
        "collector": (gc.isenabled(), gc.get_threshold()),  # the number of frozen objects falls as these end
        "warnings": (list(warnings.filters), warnings.showwarning, logging.root.level, list(logging.root.handlers)),
        "output": (sys.stdout, sys.stderr, sys.excepthook, threading.excepthook, sys.displayhook),
        "interpreter": (sys.getrecursionlimit(), sys.getswitchinterval(), sys.gettrace(), np.geterr()),
    }


def differences(before: dict[str, Any]) -> list[str]:
    """Returns what is not as before, by name."""
    now = state_of_process()
    return [name for name, value in before.items() if now[name] != value]


def state_of_model(model: nn.Module, optimizer: SGD) -> dict[str, Any]:
    return {
        "modes": [layer.training for layer in model.modules()],
        "frozen": [parameter.requires_grad for parameter in model.parameters()],
        "dtypes": [(p.dtype, p.stride(), p.untyped_storage().nbytes()) for p in model.parameters()],
        "hooks": [(len(layer._forward_hooks), len(layer._state_dict_hooks)) for layer in model.modules()],
        "groups": [{**group, "params": len(group["params"])} for group in optimizer.param_groups],
    }


class Fails(Callback):
    def step_end(self, state: TrainState, report: StepReport) -> None:
        raise OSError("no space left")


def noisy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Is a loss that ends each step with every generator somewhere else."""
    return F.cross_entropy(outputs, targets) + 0 * (torch.rand(()) + random.random() + np.random.rand())


IN_SLICES = partial(ddp.BucketedDataParallel, reducer=ReduceScatter)
HOW: dict[str, dict[str, Any]] = {
    "plain": {"test_data": (X, CLASSES)},
    "failing": {"callbacks": [Fails()], "schedule": ddp.optim.cosine()},
    "diverging": {"schedule": ddp.optim.cosine(), "data": (X * float("nan"), CLASSES)},
    "sharded": {"replica": IN_SLICES, "schedule": ddp.optim.cosine()},
    "bf16_pure": {"precision": "bf16_pure"},
    "refused": {"precision": "bf16_pure", "epochs": None},
}


@pytest.mark.parametrize("case", HOW)
def test_the_process_is_as_a_fit_has_found_it(case: str, tmp_path: Path) -> None:
    comm = ddp.Communicator(SimulatedNetwork(1).transport(0))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))
    model[1].eval()
    model[0].bias.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    ddp.fit, ddp.evaluate  # noqa: B018  # imported here, because modules stay
    how: dict[str, Any] = {"data": (X, CLASSES), "loss": noisy, "progress": False, "curves": False, "global_batch": 10}
    how |= {"epochs": 1, "folder": tmp_path, **HOW[case]}
    before, of_model, running = state_of_process(), state_of_model(model, optimizer), set(threading.enumerate())
    try:
        fit_over(comm, model, optimizer=optimizer, **how)
    except (OSError, Diverged, ConfigError):
        assert case in ("failing", "diverging", "refused")
    assert (differences(before), state_of_model(model, optimizer)) == ([], of_model)
    ddp.evaluate(model, (X, CLASSES), loss=F.cross_entropy, comm=comm)
    ddp.predict(model, (X, CLASSES), comm=comm)
    assert (differences(before), state_of_model(model, optimizer)) == ([], of_model)
    assert set(threading.enumerate()) <= running  # those of earlier tests may end meanwhile


def test_a_run_that_is_resumed_gives_back_what_it_takes_from_the_checkpoint(tmp_path: Path) -> None:
    comm = ddp.Communicator(SimulatedNetwork(1).transport(0))
    for epochs in (1, 2):
        model = nn.Linear(6, 3)
        torch.manual_seed(epochs)
        before = state_of_process()
        ddp.fit(
            ddp.BucketedDataParallel(model, comm=comm), (X, CLASSES), SGD(model.parameters(), lr=0.1), loss=noisy,
            global_batch=10,
            epochs=epochs,
            folder=ddp.Folder(tmp_path, resume="auto", progress=False, curves=False),
        )  # fmt: skip
        assert differences(before) == []


def test_rates_of_a_scheduler_that_is_not_used_are_left_alone() -> None:
    model = nn.Linear(6, 3)
    optimizer, seen = SGD(model.parameters(), lr=0.1), list[float]()
    lr_scheduler.ConstantLR(optimizer, factor=0.5)
    optimizer.param_groups[0]["lr"] = 0.02

    class Rates(Callback):
        def step_end(self, state: TrainState, report: StepReport) -> None:
            seen.append(report.rate)

    comm = ddp.Communicator(SimulatedNetwork(1).transport(0))
    how: dict[str, Any] = {"loss": F.cross_entropy, "global_batch": 20, "epochs": 1, "folder": None}
    ddp.fit(
        ddp.BucketedDataParallel(model, comm=comm),
        (X, CLASSES),
        optimizer,
        **grouped(progress=False, callbacks=[Rates()], **how),
    )
    assert seen == [0.02, 0.02]
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["initial_lr"]) == (0.02, 0.1)


def test_to_import_a_name_draws_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As importing rich does, which most names need."""
    (tmp_path / "drawing.py").write_text("import random; Drawn = random.random()")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(ddp._MODULES, "Drawn", "drawing")
    random.seed(3)
    assert ddp.Drawn == random.random() == random.Random(3).random()


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()


class FreezesItself(nn.Sequential):
    """Has a BatchNorm that no call of `train` reaches, as many programs have it."""

    def train(self, mode: bool = True) -> FreezesItself:
        super().train(mode)
        self[1].eval(), self[2].eval()
        return self


class Thaws(Callback):
    """Lets BatchNorm learn from the third step on, and looks at the modes in each step."""

    def __init__(self) -> None:
        self.seen = list[list[bool]]()

    def step_start(self, state: TrainState) -> None:
        if state.step == 2:
            state.model.module[1].train()

    def step_end(self, state: TrainState, report: StepReport) -> None:
        self.seen.append([layer.training for layer in state.model.module])


@pytest.mark.parametrize("how", ["each layer", "by its own", "thawed", "same bits", "sharded"])
def test_layers_in_evaluation_mode_stay_there_while_others_are_trained(how: str) -> None:
    comm = ddp.Communicator(SimulatedNetwork(1).transport(0))
    module, expected, callback = normalised(), normalised(), Thaws()
    if how == "by its own":
        module = FreezesItself(*module)
    else:
        module[1].eval(), module[2].eval()
    expected[1].eval(), expected[2].eval()
    optimizer, plain = SGD(module.parameters(), lr=0.1), SGD(expected.parameters(), lr=0.1)
    inputs, samples = X.double(), ddp.data.Fixed(40)
    options: dict[str, Any] = {"data": (inputs, CLASSES), "test_data": (inputs, CLASSES), "loss": F.cross_entropy}
    options |= {"global_batch": 10, "epochs": 1, "every_steps": 1, "folder": None, "progress": False, "order": samples}
    options |= {"callbacks": [callback]} if how == "thawed" else {}
    if how == "same bits":
        ddp.fit(module, optimizer=optimizer, **grouped(**options, same_bits=True))
    else:
        replica = IN_SLICES if how == "sharded" else ddp.BucketedDataParallel
        fit_over(comm, module, replica, optimizer=optimizer, **options)
    for step, (x, y) in enumerate(zip(inputs.split(10), CLASSES.split(10), strict=True)):
        if how == "thawed" and step == 2:
            expected[1].train()
        plain.zero_grad()
        F.cross_entropy(expected(x), y).backward()
        plain.step()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-12, atol=1e-14)
    assert module[1].num_batches_tracked == (2 if how == "thawed" else 0)
    if how == "thawed":
        assert callback.seen == [[True, False, False, True]] * 2 + [[True, True, False, True]] * 2
    if how != "by its own":
        assert [layer.training for layer in module] == [True, False, False, True]


def test_a_model_that_was_only_evaluated_is_trained_in_all_of_its_layers(capsys: pytest.CaptureFixture[str]) -> None:
    comm, module = ddp.Communicator(SimulatedNetwork(1).transport(0)), normalised().eval()
    optimizer = SGD(module.parameters(), lr=0.1)
    how: dict[str, Any] = {"data": (X.double(), CLASSES), "loss": F.cross_entropy, "global_batch": 10, "epochs": 1}
    fit_over(comm, module, optimizer=optimizer, folder=None, **how)
    assert module[1].num_batches_tracked == 4 and not any(layer.training for layer in module.modules())
    assert "the model was in evaluation mode as a whole: all of its layers are trained" in capsys.readouterr().out


def test_a_share_of_one_sample_goes_with_a_batchnorm_that_is_not_trained() -> None:
    comm, module = ddp.Communicator(SimulatedNetwork(1).transport(0)), normalised()
    module[1].eval()
    optimizer = SGD(module.parameters(), lr=0.1)
    how: dict[str, Any] = {"data": (X[:21].double(), CLASSES[:21]), "loss": F.cross_entropy, "global_batch": 10}
    assert fit_over(comm, module, optimizer=optimizer, folder=None, epochs=1, **how).step == 3
