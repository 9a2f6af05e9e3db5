"""`ddp.fit` as a newcomer calls it: what works as it is, and one sentence for each mistake.

Tests: ddp/policies.py, ddp/train/arguments.py, ddp/train/loop.py, ddp/train/steps/step.py.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

import ddp
from ddp.commands.where import where
from ddp.data.orders.sampler import TrainSampler
from ddp.errors import CheckpointError, ConfigError
from ddp.train.arguments import FitArguments
from ddp.train.fit import train
from ddp.train.steps.state import StepReport, TrainState
from ddp.train.steps.stopping import StopFlag

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(40, 6, dtype=torch.float64, generator=RANDOM)
CLASSES = torch.randint(0, 3, (40,), generator=RANDOM)
VALUES = torch.randn(40, 1, dtype=torch.float64, generator=RANDOM)
QUIET: dict[str, Any] = {"folder": None, "progress": False}


def net(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, outputs)).double()


def fit(loss: Any, data: Any = (X, CLASSES), *, module: nn.Module | None = None, **how: Any) -> TrainState:
    module = module or net()
    how = {"optimizer": SGD(module.parameters(), lr=0.1), "global_batch": 10, "epochs": 1, **QUIET, **how}
    if "stop" in how:  # as the command line does
        return train(FitArguments(model=module, data=data, **grouped(loss=loss, **how)))
    return ddp.fit(module, data, **grouped(loss=loss, **how))


def weights(state: TrainState) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in state.model.parameters()])


# --- what works ------------------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[Any]):
    """Samples that only their own collate can make a batch of."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return {"x": X[index], "words": ["a"] * (index % 3), "class": int(CLASSES[index])}


def nested(samples: list[Any]) -> Any:
    classes = torch.tensor([sample["class"] for sample in samples])
    return {"inputs": [torch.stack([sample["x"] for sample in samples])], "rest": {"classes": classes}}


class Half(Sampler[int]):
    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        return iter(range(0, 40, 2))


class Nested(ddp.Task):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        classes = batch["rest"]["classes"]
        return F.cross_entropy(model(batch["inputs"][0]), classes, reduction="sum"), len(classes)

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch["inputs"][0])


class Rates(ddp.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []
        self.weights = torch.empty(0)

    def step_end(self, state: TrainState, report: StepReport) -> None:
        self.seen.append(report.rate)
        self.weights = weights(state)


def scheduled(schedule: Any, **how: Any) -> list[float]:
    return recorded(schedule, **how).seen


def recorded(schedule: Any, **how: Any) -> Rates:
    rates, module = Rates(), net()
    optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
    fit(F.cross_entropy, module=module, optimizer=optimizer, schedule=schedule(optimizer), callbacks=[rates], **how)
    return rates


def torchs_rates(schedule: Any, num_calls: int) -> list[float]:
    optimizer = SGD(net().parameters(), lr=0.1, momentum=0.9)
    scheduler, rates = schedule(optimizer), []
    for _ in range(num_calls):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=12)


def halved(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def what_works(folder: str) -> None:
    comm = ddp.init(abort_s=20)
    expected = fit(ddp.Classification(), epochs=2)
    for loss in (F.cross_entropy, nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")):
        torch.testing.assert_close(weights(fit(loss, epochs=2)), weights(expected), rtol=1e-9, atol=1e-12)
    summed = fit(lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum"), reduction="sum", epochs=2)
    assert torch.equal(weights(summed), weights(expected))
    for data in (DataLoader(Rows(), batch_size=3, collate_fn=nested), Rows()):
        how = {} if isinstance(data, DataLoader) else {"collate": nested}
        state = fit(Nested(), data, epochs=2, test_data=Rows(), **how)
        assert torch.equal(weights(state), weights(expected))
        means = ddp.evaluate(state.model, Rows(), loss=Nested(), collate=nested, batch_size=7)
        assert means is not None and means["loss"] == pytest.approx(state.evaluation["test_loss"], rel=1e-12)
        outputs = ddp.predict(state.model, Rows(), task=Nested(), collate=nested)
        assert torch.equal(outputs, ddp.predict(state.model, X))

    assert scheduled(one_cycle, every="step", epochs=3) == pytest.approx(torchs_rates(one_cycle, 12))
    by_epoch = [rate for rate in torchs_rates(halved, 3) for _ in range(4)]
    assert scheduled(halved, every="epoch", epochs=3) == pytest.approx(by_epoch)
    plateau = scheduled(
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, threshold=1e9, patience=0), epochs=3,
        test_data=(X, CLASSES),
    )  # fmt: skip
    assert plateau == pytest.approx([0.1] * 4 + [0.01] * 4 + [0.001] * 4)  # no metric is good enough

    run = Path(folder) / "cycle"
    first = scheduled(one_cycle, every="step", epochs=1, folder=run)
    rest = recorded(one_cycle, every="step", epochs=3, folder=run, resume="auto")
    assert first + rest.seen == pytest.approx(torchs_rates(one_cycle, 12))
    whole = recorded(one_cycle, every="step", epochs=3)
    assert torch.equal(rest.weights, whole.weights), "the momentum cycles, too"
    comm.barrier()
    written = {path.name for path in run.iterdir() if not path.name.startswith(".")}
    assert written == {"checkpoints", "metrics.jsonl", "starts.jsonl", "curves.png", "summary.json"} or comm.rank == 1
    starts_are_noted(Path(folder) / "noted")
    for argument in ("global_batch", "seed"):
        with pytest.raises(ConfigError, match=f"{argument} is 10 on rank 0 and 11 on rank 1: give all ranks the same"):
            fit(F.cross_entropy, **{argument: 10 + comm.rank})
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddp").addHandler(handler)
    fit(F.cross_entropy, (X + comm.rank, CLASSES))
    logging.getLogger("ddp").removeHandler(handler)
    assert ["the samples of data are not the same on all ranks" in each for each in logged] == [True] * (comm.rank == 0)
    with pytest.raises(ConfigError, match=r"optimizer\.0\.lr is 0\.1 on rank 0 and 0\.2 on rank 1"):
        own = net()
        fit(F.cross_entropy, module=own, optimizer=SGD(own.parameters(), lr=0.1 * (1 + comm.rank)))
    if comm.rank == 0:
        assert json.loads((run / "summary.json").read_text())["steps"] == 12
    ddp.shutdown()


def test_what_works(tmp_path: Path) -> None:
    run_ranks(what_works, 2, str(tmp_path), timeout_s=90)


# --- what does not, and says so --------------------------------------------------------------------------------------


class Returns(ddp.Task):
    """Returns something from the sum of the losses, their number, and their mean."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def loss(self, model: nn.Module, batch: Any) -> Any:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return self.what(losses)


class Judged(ddp.Task):
    """Returns certain metrics."""

    main_metric, higher_is_better = "accuracy", True

    def __init__(self, found: Any) -> None:
        self.found = found

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return self.found


class Measured(Returns):
    """Trains by the sum of the losses, and returns something from them as a metric."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": self.loss(model, batch), "error": super().loss(model, batch)}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class NoTask:
    def loss(self, model: nn.Module, batch: Any) -> None: ...


def other_optimizer() -> Any:
    return SGD(net().parameters(), lr=0.1)


def scheduler_of(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 30)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()


CLIPPED = net()
MISTAKES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "mean, with the length": (Returns(lambda x: (x.mean(), len(x))), {}, r"a mean, where the sum is expected"),
    "count of one": (Returns(lambda x: (x.sum(), 1)), {}, r"returned the count 1 for 5 samples, but 1 and 1 for two"),
    "mean and count of one": (Returns(lambda x: (x.mean(), 1)), {}, r"a mean, where the sum is expected"),
    "no count": (Returns(lambda x: x.sum()), {}, r"Returns.loss returned a Tensor: return two, the sum"),
    "three values": (Returns(lambda x: (x.sum(), len(x), x)), {}, r"Returns.loss returned 3 values: return two"),
    "losses unsummed": (Returns(lambda x: (x, len(x))), {}, r"returned a tensor \[5\] as its loss: return a scalar"),
    "a number": (Returns(lambda x: (x.sum().item(), len(x))), {}, r"returned a float as its loss: return a scalar"),
    "half a count": (Returns(lambda x: (x.sum(), 2.5)), {}, r"returned the count 2.5 for 5 samples, but 2.5 and 2.5"),
    "a count below 0": (Returns(lambda x: (x.sum(), -0.5)), {}, r"returned the count -0.5: return the number of terms"),
    "no number": (Returns(lambda x: (x.sum(), math.nan)), {}, r"returned the count nan: return the number of terms"),
    "detached": (Returns(lambda x: (x.sum().detach(), len(x))), {}, "depends on no parameter that is trained"),
    "a new tensor": (
        Returns(lambda x: (torch.tensor(float(x.detach().sum()), requires_grad=True), len(x))),
        {},
        "was not computed from the model's outputs",
    ),
    "a class of optimizers": (F.cross_entropy, {"optimizer": SGD}, "optimizer=<class .*: give a torch.optim.Optimizer"),
    "one callback": (F.cross_entropy, {"callbacks": ddp.Callback()}, "give a list of objects of classes derived from"),
    "a factor below 0": (F.cross_entropy, {"schedule": lambda step, steps: -1.0}, "schedule returned the factor -1.0"),
    "a sum taken for a mean": (
        lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum"),
        {},
        r'returns the sum of a batch, but reduction="mean" was taken: say reduction="sum"',
    ),
    "a mean taken for a sum": (
        F.cross_entropy,
        {"reduction": "sum"},
        'cross_entropy returns the mean .* say reduction="mean"',
    ),
    "reductions that contradict": (
        nn.CrossEntropyLoss(),
        {"reduction": "sum"},
        "CrossEntropyLoss has reduction='mean'",
    ),
    "unreduced": (nn.CrossEntropyLoss(reduction="none"), {}, "reduction='none' of CrossEntropyLoss: take"),
    "shapes that broadcast": (
        F.mse_loss,
        {"module": net(1), "data": (X, VALUES[:, 0])},
        r"in mse_loss outputs \[5, 1\] and targets \[5\] broadcast to all pairs of them",
    ),
    "shapes that broadcast in a function": (
        lambda outputs, targets: ((outputs - targets) ** 2).mean(),
        {"module": net(1), "data": (X, VALUES[:, 0]), "global_batch": 40},
        r"outputs \[40, 1\] and targets \[40\] broadcast to all pairs of them",
    ),
    "metrics without a count": (
        Judged({"accuracy": torch.tensor(1.0)}),
        {},
        r"metrics returned tensor\(1.\) for 'accu",
    ),
    "a mean as metric": (
        Measured(lambda x: (x.mean(), len(x))),
        {},
        r"Measured.metrics\['error'\] returned .* a mean, where the sum is expected",
    ),
    "a metric's count of one": (
        Measured(lambda x: (x.mean(), 1)),
        {},
        r"Measured.metrics\['error'\] returned .* a mean, where the sum is expected",
    ),
    "a sum with the count of one": (
        Measured(lambda x: (x.sum(), 1)),
        {},
        r"Measured.metrics\['error'\] returned the count 1 for 5 samples, but 1 and 1 for two parts",
    ),
    "a metric for each sample": (
        Measured(lambda x: (x, len(x))),
        {},
        r"Measured.metrics returned \(tensor\(.* for 'error': return a sum and its count for each, two numbers",
    ),
    "an array as metric": (
        Measured(lambda x: (x.numpy(), len(x))),
        {},
        r"Measured.metrics returned \(array\(.* for 'error': return a sum",
    ),
    "a word as metric": (Measured(lambda x: ("low", len(x))), {}, r"returned \('low', 5\) for 'error': return a sum"),
    "no main metric": (Judged({"acc": (1.0, 2)}), {}, "main_metric='accuracy' is not among its metrics, acc: make"),
    "no test samples": (F.cross_entropy, {"test_data": []}, "test_data has 0 samples"),
    "batch_size": (F.cross_entropy, {"batch_size": 3}, "no argument 'batch_size'. Did you mean 'global_batch'"),
    "Keras' share": (F.cross_entropy, {"validation_split": 0.1}, "'validation_split'. Did you mean 'validation_data'"),
    "Keras' order": (F.cross_entropy, {"shuffle": True}, "no argument 'shuffle': samples are shuffled"),
    "Keras' steps": (F.cross_entropy, {"steps_per_epoch": 3}, "'steps_per_epoch'. Did you mean 'max_steps'"),
    "a rate": (F.cross_entropy, {"lr": 0.1}, "no argument 'lr': the optimizer has it, as torch.optim.Adam"),
    "capitals": (F.cross_entropy, {"precision": "BF16"}, r"precision='BF16': take one of .*. Did you mean bf16\?"),
    "a folder's name": (
        F.cross_entropy,
        {"folder": os.fsdecode(b"r\xff")},
        "this name is not UTF-8, and torch cannot load files from such a folder",
    ),
    "a schedule's name": (F.cross_entropy, {"schedule": "cosine"}, "schedule='cosine': give a function"),
    "a schedule of epochs": (
        F.cross_entropy,
        {"schedule": lambda epoch: 0.9},
        "schedule: takes .samples trained on, samples of",
    ),
    "keep none": (F.cross_entropy, {"keep_last": None}, "keep_last=None: must be a whole number from 1 up"),
    "clip in quotes": (F.cross_entropy, {"clip_norm": "1"}, "clip_norm='1': must be a number above 0"),
    "half of the samples": (
        F.cross_entropy,
        {"data": DataLoader(Rows(), sampler=Half(), collate_fn=nested)},
        "whose Half takes 20 of 40 samples, and chooses them in a way that cannot be seen: give the data set",
    ),
    "two choices": (
        F.cross_entropy,
        {"data": DataLoader(Rows(), sampler=RandomSampler(Rows(), num_samples=5)), "order": ddp.data.Fixed(40)},
        "order=fixed: the sampler of the DataLoader chooses samples, too",
    ),
    "no whole step": (
        F.cross_entropy,
        {"data": DataLoader(Rows(), drop_last=True), "global_batch": 41},
        "drop_last of the DataLoader: leaves no step, because an epoch has 40 samples, fewer than global_batch=41",
    ),
    "a class": (
        nn.CrossEntropyLoss,
        {},
        r"loss=CrossEntropyLoss is a class: give an object of it, CrossEntropyLoss\(\)",
    ),
    "no task": (NoTask(), {}, "NoTask has a method `loss` but is no task: derive its class from ddp.Task"),
    "a string": ("cross_entropy", {}, r"loss='cross_entropy': give a function loss\(.*Give ddp.Classification\(\)"),
    "one argument": (lambda outputs: outputs, {}, r"takes \(outputs\), and is called with outputs and targets; give"),
    "no folder": (F.cross_entropy, {"folder": 3}, "path=3: give the path of a folder, as a text or a pathlib.Path"),
    "no pairs": (
        F.cross_entropy,
        {"data": X},
        r"cross_entropy needs batches \(inputs, targets\), but the data give a tensor",
    ),
    "rows with names": (
        ddp.Classification(),
        {"data": [{"x": x, "y": y} for x, y in zip(X, CLASSES, strict=True)]},
        r"Classification needs batches \(inputs, targets\), but the data give a dict",
    ),
    "a stream": (
        F.cross_entropy,
        {"data": Stream(), "epochs": None},
        "epochs=None: with max_steps=None, too, the run would",
    ),
    "a test stream": (F.cross_entropy, {"test_data": Stream()}, "test_data is Stream, an iterable"),
    "no samples": (F.cross_entropy, {"data": (X[:0], CLASSES[:0])}, "the training set has 0 samples"),
    "meta": (F.cross_entropy, {"module": nn.Linear(6, 3, device="meta")}, "weight is on the meta device and has no"),
    "another's optimizer": (
        F.cross_entropy,
        {"optimizer": other_optimizer()},
        r"holds 6 parameter\(s\) that are not the model's",
    ),
    "epoch": (F.cross_entropy, {"epoch": 3}, r"fit\(\) has no argument 'epoch'. Did you mean 'epochs'\?"),
    "no epochs": (F.cross_entropy, {"epochs": -1}, "epochs=-1: must be a whole number from 1 up"),
    "a number in quotes": (F.cross_entropy, {"max_steps": "9"}, "max_steps='9': must be a whole number from 1 up"),
    "fp8": (F.cross_entropy, {"precision": "fp8"}, "precision='fp8': take one of fp32, bf16, bf16_pure, fp16"),
    "clip at nothing": (F.cross_entropy, {"clip_norm": 0}, "clip_norm=0: must be a number above 0, or leave"),
    "clip at none": (F.cross_entropy, {"clip_norm": float("nan")}, "clip_norm=nan: must be a number above 0, or"),
    "endless": (F.cross_entropy, {"max_steps": 10**400}, "max_steps=10+: must be a finite number"),
    "two clips": (
        F.cross_entropy,
        {"module": CLIPPED, "optimizer": ddp.optim.LAMB(CLIPPED.parameters(), preset="timm"), "clip_norm": 0.5},
        "clip_norm=0.5: the optimizer clips by itself, at 1.0; leave it out, or make the optimizer with clip_norm=None",
    ),
    "a share of one sample": (
        F.cross_entropy,
        {"module": normalised(), "data": (X[:11], CLASSES[:11])},
        "in a step of size 1 a worker has a share of one sample, which BatchNorm cannot normalise: leave some",
    ),
    "one sample of bfloat16": (
        F.cross_entropy,
        {"module": normalised(), "data": (X[:11], CLASSES[:11]), "precision": "bf16_pure"},
        "in a step of size 1 a worker has a share of one sample, which BatchNorm cannot normalise: leave some",
    ),
    "no end": (F.cross_entropy, {"epochs": None}, "with max_steps=None, too, the run would never end"),
    "too small a batch": (F.cross_entropy, {"global_batch": 0}, "global_batch=0: must be a whole number from 1 up"),
    "another's scheduler": (
        F.cross_entropy,
        {"schedule": scheduler_of(other_optimizer()), "every": "step"},
        "StepLR was made for another optimizer",
    ),
    "resume without a folder": (F.cross_entropy, {"resume": "auto"}, "names no run: name its folder"),
    "resume from nowhere": (F.cross_entropy, {"resume": "/nowhere"}, "resume=/nowhere does not exist"),
}


def mistakes() -> list[str]:
    """Returns the sentence of each mistake, in order; "trained" where there was none."""
    ddp.init(abort_s=20)
    said = []
    for loss, how, _ in MISTAKES.values():
        try:
            fit(loss, **{"global_batch": 5, **how})
            said.append("trained")
        except (ConfigError, CheckpointError, TypeError) as error:
            said.append(str(error))
    module = net()
    optimizer = SGD(module.parameters(), lr=0.1)
    with pytest.raises(
        ConfigError, match="ReduceLROnPlateau with mode='min': it reads accuracy, so make it with mode='m"
    ):
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
        fit(ddp.Classification(), module=module, optimizer=optimizer, schedule=plateau, test_data=(X, CLASSES))
    with pytest.raises(ConfigError, match=r"StepLR with every=None: .* say ddp.optim.TorchSchedule\(scheduler, ev"):
        fit(F.cross_entropy, module=module, optimizer=optimizer, schedule=scheduler_of(optimizer))
    ddp.shutdown()
    return said


def test_mistakes_are_told_in_one_sentence() -> None:
    (said,) = run_ranks(mistakes, 1)
    for (name, (_, _, sentence)), told in zip(MISTAKES.items(), said, strict=True):
        with pytest.raises(ConfigError, match=sentence):
            raise ConfigError(told)
        assert "\n" not in told, name


def warnings_of(folder: str) -> list[list[str]]:
    """Returns what is warned of in some runs that train all the same."""
    ddp.init(abort_s=20)
    found: list[list[str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found[-1].append(record.getMessage())

    logging.getLogger("ddp").addHandler(Keep(logging.WARNING))
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1], dtype=torch.float64))
    partly = net()
    runs: list[tuple[Any, dict[str, Any]]] = [
        (F.cross_entropy, {}),
        (lambda outputs, targets: weighted(outputs, targets), {}),
        (F.cross_entropy, {"module": partly, "optimizer": SGD(partly[4].parameters(), lr=0.1)}),
        (F.cross_entropy, {"module": nn.Linear(6, 3), "data": (X.float(), CLASSES)}),
        (nn.CrossEntropyLoss(weight=weighted.weight, reduction="sum"), {}),
        (weighted, {}),
    ]
    for loss, how in runs:
        found.append([])
        fit(loss, **how)
    run = Path(folder) / "run"
    for global_batch in (10, 8):
        found.append([])
        fit(F.cross_entropy, folder=run, resume="auto", global_batch=global_batch)
    with pytest.raises(ConfigError, match=r'run holds a run: continue it with resume="auto", or take another folder'):
        fit(F.cross_entropy, folder=run)
    ddp.shutdown()
    return found


def test_what_is_warned_of(tmp_path: Path) -> None:
    (found,) = run_ranks(warnings_of, 1, str(tmp_path))
    assert [len(each) for each in found] == [0, 1, 1, 0, 0, 0, 0, 1]
    assert "is not the sum of its parts' losses" in found[1][0]
    assert "leaves out 4 parameter(s) of the model that have a gradient, such as 0.weight" in found[2][0]
    assert "global_batch was 10, is 8" in found[7][0]


class Stopped(ddp.Callback):
    """Asks to stop in the last step of an epoch, before its evaluation."""

    def __init__(self, stop: StopFlag) -> None:
        self.stop, self.evaluated_at = stop, list[int]()

    def step_start(self, state: TrainState) -> None:
        if state.step + 1 == 4:
            self.stop.request("SIGTERM")

    def evaluated(self, state: TrainState) -> None:
        self.evaluated_at.append(state.step)


class Adds(ddp.Callback):
    """Begins to train the last layer after the first step, at a rate of its own."""

    def __init__(self) -> None:
        self.rates = list[float]()

    def step_end(self, state: TrainState, report: StepReport) -> None:
        groups = state.optimizer.param_groups
        if report.step == 1:
            state.optimizer.add_param_group({"params": state.model.module[4].parameters(), "lr": 0.4})
        else:
            self.rates.append(groups[1]["lr"])


class InterruptedAfterTwoSteps(ddp.Callback):
    def step_start(self, state: TrainState) -> None:
        if state.step == 2 and state.comm.rank == 1:
            signal.raise_signal(signal.SIGINT)


class InterruptedAtItsEnd(ddp.Callback):
    def evaluated(self, state: TrainState) -> None:
        if state.comm.rank == 1:
            signal.raise_signal(signal.SIGINT)


def in_a_cell(source: str, **names: Any) -> None:
    """Runs source as a notebook runs a cell, and a prompt what is typed there."""
    namespace = vars(sys.modules["__main__"])
    namespace.update(names)
    exec(compile(source, "<cell>", "exec"), namespace)


def folds(folder: str) -> list[str]:
    """A loop over fits that one rank's Ctrl-C ends on all ranks, in a program and in a cell; the next cell fits."""
    ddp.init(abort_s=20)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddp").addHandler(handler)
    begun = list[str]()

    def fold(number: int, name: str) -> None:
        run_dir = Path(folder) / f"{name}-{number}"
        begun.append(run_dir.name)
        state = fit(F.cross_entropy, epochs=2, callbacks=[InterruptedAfterTwoSteps()], folder=run_dir)
        assert (state.stopped_by, state.step) == ("SIGINT", 3)

    loop = "for number in range(3): fold(number, name)"
    for name in ("program", "cell", "again"):
        with pytest.raises(KeyboardInterrupt, match="SIGINT has ended a fit of this program"):
            if name == "program":
                for number in range(3):
                    fold(number, name)
            else:
                in_a_cell(loop, fold=fold, name=name)
    assert begun == [f"{name}-{number}" for name in ("program", "cell", "again") for number in (0, 1)]
    assert not (Path(folder) / "program-1").exists()

    def too_late(run_dir: str) -> None:
        begun.append(run_dir)
        state = fit(F.cross_entropy, epochs=1, callbacks=[InterruptedAtItsEnd()], test_data=(X, CLASSES))
        assert state.stopped_by == "" and state.evaluation

    with pytest.raises(KeyboardInterrupt, match="SIGINT has ended a fit of this program"):
        in_a_cell("for number in range(3): too_late(f'late-{number}')", too_late=too_late)
    assert begun[-2:] == ["late-0", "late-1"], "the first is complete, and the second begins no step"
    finished = list[str]()
    in_a_cell(
        "for _ in range(2): finished.append(one())",
        finished=finished,
        one=lambda: fit(F.cross_entropy, epochs=1).stopped_by,
    )
    assert finished == ["", ""]
    return [line for line in said if "stopped by" in line or "came after" in line]


@pytest.mark.slow
def test_a_signal_ends_a_loop_over_fits_and_says_what_is_saved(tmp_path: Path) -> None:
    first, second = run_ranks(folds, 2, str(tmp_path))
    again = 'which is saved in %s: the same call with resume="auto" resumes from there'
    runs = [tmp_path / f"{name}-0" for name in ("program", "cell", "again")]
    late = ["SIGINT came after the last step: the run is complete"]
    assert first == [*(f"stopped by SIGINT after step 3, {again % run}" for run in runs), *late] and second == []


class Read(ddp.Callback):
    """Records which samples this rank has trained on in each step; they are their own targets."""

    def __init__(self) -> None:
        self.step: set[int] = set()
        self.by_step: dict[int, set[int]] = {}

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.step |= {int(target) for target in targets}
        return outputs.mean(dim=1).mean()

    def step_start(self, state: TrainState) -> None:
        self.step.clear()

    def step_end(self, state: TrainState, report: StepReport) -> None:
        self.by_step[report.step] = set(self.step)


def starts_are_noted(run: Path) -> None:
    """`where` answers about a run from Python what it can: in each step as its own start has dealt it."""
    comm, read, data = ddp.init(), Read(), (X, torch.arange(40.0))
    how: dict[str, Any] = {"folder": run, "resume": "auto", "callbacks": [read], "curves": False}
    fit(read.loss, data, max_steps=np.int64(3), epochs=None, micro_size=3, **how)
    fit(read.loss, data, epochs=2, num_shards=4, seed=3, skip_steps=(6, 6), **how)
    apart = Read()
    how |= {"folder": run / "apart", "callbacks": [apart], "validation_data": 0.25}
    fit(apart.loss, list(zip(*data, strict=True)), **how)
    asked = [(run, *each) for each in read.by_step.items()] + [(run / "apart", *each) for each in apart.by_step.items()]
    for folder, step, samples in asked if comm.rank == 0 else ():
        answer = where(folder, step=step, sample=None, epoch=None)
        of_rank_0 = re.findall(r"(rank \d), shard .*\n((?:    .*\n?)+)", answer)
        told = {int(each) for rank, line in of_rank_0 if rank == "rank 0" for each in line.split()}
        assert told == samples, answer
    assert (sorted(read.by_step), sorted(apart.by_step)) == ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3])
    weighted = ddp.data.Weighted(torch.ones(40))
    fit(read.loss, data, order=weighted, folder=run / "weighted", curves=False)
    fit(F.cross_entropy, Endless(), max_steps=1, epochs=None, folder=run / "stream", curves=False)
    for name, says in (("weighted", "the order of the run, .* was made by its program"), ("stream", "holds no starts")):
        with pytest.raises(ConfigError, match=says):
            where(run / name, step=1, sample=None, epoch=None)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield X[0], CLASSES[0]


def stopped_and_resumed(folder: str) -> None:
    ddp.init(abort_s=20)
    run, stop = Path(folder) / "run", StopFlag()
    first, rest, again = Stopped(stop), Stopped(StopFlag()), Stopped(StopFlag())
    how: dict[str, Any] = {"test_data": (X, CLASSES), "folder": run, "resume": "auto", "curves": False}
    begun = fit(F.cross_entropy, epochs=2, callbacks=[first], stop=stop, num_shards=2, **how)
    assert begun.stopped_by == "SIGTERM"
    whole = fit(F.cross_entropy, epochs=2, test_data=(X, CLASSES), num_shards=2)
    state = fit(F.cross_entropy, epochs=2, callbacks=[rest], **how)
    assert (first.evaluated_at, rest.evaluated_at) == ([], [4, 8])
    assert state.sampler.num_shards == 2, "unless given, as in the run"
    assert torch.equal(weights(state), weights(whole)) and state.evaluation == whole.evaluation
    summary = (run / "summary.json").read_text()
    assert fit(F.cross_entropy, epochs=2, callbacks=[again], **how).evaluation == whole.evaluation
    assert again.evaluated_at == [] and (run / "summary.json").read_text() == summary
    assert {ddp.load(run, "best").step, ddp.load(run, "latest").step} <= {4, 8}
    assert ddp.load(run, "latest").score == whole.evaluation["test_loss"]
    with pytest.raises(ConfigError, match="other holds a run"):
        fit(F.cross_entropy, folder=run.with_name("other"))
        fit(F.cross_entropy, **{**how, "folder": run.with_name("other"), "resume": run})
    module = net()
    optimizer = SGD(module.parameters(), lr=np.float64(0.1))  # type: ignore[arg-type]
    numbers: dict[str, Any] = {"global_batch": np.int64(10), "folder": run.with_name("numpy"), "curves": False}
    fit(F.cross_entropy, module=module, optimizer=optimizer, schedule=lambda step, steps: np.float64(0.5), **numbers)
    assert optimizer.param_groups[0]["lr"] == 0.1 and "initial_lr" not in optimizer.param_groups[0]

    module, rates, half = net(), Rates(), ddp.optim.step(gamma=0.5, milestones=[0.0])
    for epochs in (1, 2):  # the rate is a tensor, which keeps its place
        optimizer = SGD(module.parameters(), lr=torch.tensor(0.1))
        how = {"folder": run.with_name("tensor"), "resume": "auto", "curves": False}
        fit(F.cross_entropy, module=module, optimizer=optimizer, schedule=half, epochs=epochs, callbacks=[rates], **how)
    assert rates.seen == pytest.approx([0.05] * 8)

    adds = Adds()
    fit(F.cross_entropy, module=module, optimizer=SGD(module[:4].parameters(), lr=0.1), schedule=half, callbacks=[adds])
    assert adds.rates == pytest.approx([0.2] * 3)
    ddp.shutdown()


def test_an_evaluation_that_a_stop_prevented_is_made_up_for(tmp_path: Path) -> None:
    run_ranks(stopped_and_resumed, 1, str(tmp_path))


def test_a_look_at_the_first_batch_changes_nothing() -> None:
    run_ranks(looked_at, 1)


def looked_at() -> None:
    """A loop by hand, without the look, ends with the same bits, with dropout and BatchNorm."""
    comm = ddp.init(abort_s=20)
    from ddp.process.streams import dropout_stream

    state = fit(ddp.Classification(), epochs=2)
    module = net()
    optimizer = SGD(module.parameters(), lr=0.1)
    sampler = TrainSampler(40, global_batch=10, rank=0, world_size=1)
    for step in range(8):
        plan = next(sampler.plans())
        dropout_stream(0, step, 0, 0, comm.device)
        optimizer.zero_grad()
        indices = list(plan.micros[0].indices)
        loss = F.cross_entropy(module(X[indices]), CLASSES[indices], reduction="sum")
        loss.backward()
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad /= 10
        optimizer.step()
        sampler.commit(plan)
    ddp.shutdown()
    assert torch.equal(torch.cat([p.detach().flatten() for p in module.parameters()]), weights(state))
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), state.model.module.buffers(), strict=True))
