"""What a run has beside model and optimizer is in its checkpoints, or the run says that it is not."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from flat import fit_over, grouped
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ddp
from ddp.errors import CheckpointError, ConfigError
from ddp.run.assembly.load import load_initial_weights
from ddp.train.checkpoints.checkpoint_store import CheckpointStore
from ddp.train.steps.callbacks import EARLY
from recipes.tutorial.simulated import SimulatedNetwork

X = torch.randn(44, 6, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (44,), generator=torch.Generator().manual_seed(1))


class RunningLoss(nn.Module):
    """Divides by a running mean of itself, which it updates in training alone."""

    reduction = "mean"

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.ones(()))
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs, targets)
        if self.training:
            self.mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss * self.scale / self.mean.clone()


class Counts(ddp.Callback):
    def __init__(self) -> None:
        self.num_steps = np.int64(0)

    def fit_start(self, state: ddp.TrainState) -> None:
        self.num_steps = np.int64(0)

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        self.num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_steps = state["num_steps"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def fit(folder: Any, callbacks: Any = (), *, module: nn.Module | None = None, **how: Any) -> ddp.TrainState:
    module = net() if module is None else module
    how = {"loss": F.cross_entropy, "test_data": (X, CLASSES), "epochs": None, "resume": "auto", **how}
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    given = {"data": (X, CLASSES), "optimizer": optimizer, "global_batch": 10, "folder": folder, **how}
    given |= {"callbacks": list(callbacks), "progress": False, "curves": False}
    comm = given.pop("comm", None)
    return ddp.fit(module, **grouped(**given)) if comm is None else fit_over(comm, module, **given)


def vector(values: Any) -> Tensor:
    return torch.cat([value.detach().flatten().double() for value in values])


class ByHand(ddp.Callback):
    """Averages as a program of one's own does."""

    def __init__(self, decay: float) -> None:
        self.average, self.decay = list[Tensor](), decay

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        weights = [state.masters.get(p, p).detach() for p in state.model.parameters()]
        before = self.average or weights
        self.average = [torch.lerp(old, new, 1 - self.decay) for old, new in zip(before, weights, strict=True)]


def resumed_bit_by_bit(folder: str) -> None:
    ddp.init(abort_s=30)
    choices: list[dict[str, Any]] = [{}, {"precision": "bf16_pure"}, {"sharded": True}]
    for number, choice in enumerate(choices):
        whole, parts, results = f"{folder}/{number}", f"{folder}/{number}-parts", list[Any]()
        by_hand = ByHand(0.8)
        for run_dir, steps in ((whole, 12), (parts, 7), (parts, 12)):
            ema, counts, loss, module = ddp.EMA(0.8), Counts(), RunningLoss(), net()
            callbacks = [ema, counts, *([by_hand] if run_dir == whole else [])]
            state = fit(run_dir, callbacks, loss=loss, module=module, max_steps=steps, **choice)
            assert ema.averaged is not None and counts.num_steps == state.step == steps
            averaged = ema.averaged.module
            saved = ddp.load(run_dir, "latest").weights
            assert torch.equal(
                vector(saved[name] for name, _ in module.named_parameters()), vector(averaged.parameters())
            )
            state.model.sync_buffers()
            averaged.load_state_dict({**averaged.state_dict(), **dict(module.named_buffers())})
            found = ddp.evaluate(averaged, (X, CLASSES), loss=loss)
            if choice.get("precision") != "bf16_pure":  # whose evaluations round
                assert found == {"loss": state.evaluation["test_loss"]}
            else:
                assert found is not None and found["loss"] == pytest.approx(state.evaluation["test_loss"], rel=1e-2)
            results.append((vector(averaged.parameters()), vector(module.parameters()), loss.mean, state.evaluation))
        assert torch.equal(vector(by_hand.average), results[0][0])
        assert all(map(torch.equal, results[0][:3], results[2][:3])) and results[0][3] == results[2][3]
        assert not torch.equal(results[0][0], results[0][1])
        raw = ddp.load(whole, "latest", averaged=False).weights
        assert torch.equal(vector(raw[name] for name, _ in module.named_parameters()), results[0][1])
    ends_early(f"{folder}/early")
    ddp.shutdown()


class Judged(ddp.Task):
    """Reports numbers that were written before."""

    main_metric, higher_is_better = "right", True

    def __init__(self, *right: float) -> None:
        self.right = iter(right)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[float | Tensor, float]]:
        return {"right": (0.0, 1.0)}

    def finish(self, means: Mapping[str, float]) -> dict[str, float]:
        return {"right": next(self.right)}


def ends_early(folder: str) -> None:
    """After two evaluations that are not better by more than 0.05; a larger patience goes on, and counts on."""
    how: dict[str, Any] = {"every_steps": 3, "every_epochs": None, "max_steps": 30}
    how |= {"max_unreadable": 1}  # then there is no look at the first batch, which would ask for metrics
    how |= {"checkpoint_every_steps": 3}
    for patience, right, steps in ((2, [0.5, 0.6, 0.6, 0.61], 12), (2, [], 12), (4, [0.62, 0.4], 18)):
        stopping = ddp.EarlyStopping(patience, min_delta=0.05)
        state = fit(folder, [stopping], loss=Judged(*right), **how)
        assert (state.step, state.stopped_by, stopping.best) == (steps, EARLY, 0.6)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    run_ranks(resumed_bit_by_bit, 2, str(tmp_path))


class Forgets(ddp.Callback):
    def __init__(self, model: nn.Module) -> None:
        self.model, self.average = model, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


class Unplain(Counts):
    def state_dict(self) -> dict[str, Any]:
        return {"names": {"a", "b"}, "path": Path("here")}


class Nothing(ddp.Callback):
    def state_dict(self) -> dict[str, Any]:
        return None  # type: ignore[return-value]


class Extra(nn.Linear):
    extra: Any = Path("here")

    def forward(self, inputs: Tensor) -> Tensor:
        self.extra = self.extra + 1 if isinstance(self.extra, int) and self.training else self.extra
        return super().forward(inputs)

    def get_extra_state(self) -> Any:
        return {"n": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["n"]


def test_what_no_checkpoint_holds_is_told_before_the_first_step(tmp_path: Path, caplog: Any) -> None:
    comm = ddp.Communicator(SimulatedNetwork(1).transport(0))
    module = net()
    how: dict[str, Any] = {"comm": comm, "max_steps": 1, "test_data": None}
    fit(tmp_path / "a", [Forgets(module), Unplain(), Counts(), ddp.EMA()], module=module, loss=RunningLoss(), **how)
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0].partition(" (")[0] for text in told] == [
        "the state of Unplain is in no checkpoint, because it holds more than tensors and plain values",
        "Forgets.average",
    ]
    caplog.clear()
    how |= {"max_steps": 2}
    fit(tmp_path / "a", [Counts(), Counts(), ddp.EarlyStopping(2)], **{**how, "test_data": (X, CLASSES)})
    told = [record.getMessage() for record in caplog.records if "bits of" not in record.getMessage()]
    assert told == [
        "the checkpoint has no state of Counts 2, which starts from scratch",
        "the checkpoint has no state of EarlyStopping, which starts from scratch",
        "the checkpoint has a state of EMA, but this run has no such callback",
        "the checkpoint has values that this run's loss does not have: mean",
    ]
    with pytest.raises(CheckpointError, match=r"of a run with another loss: .*mean"):
        fit(tmp_path / "a", loss=nn.BCEWithLogitsLoss(), **{**how, "resume": tmp_path / "a/checkpoints/step-00000001"})
    wrong: list[ddp.Callback]
    for wrong, words in (
        ([Nothing()], "Nothing.state_dict returned None"),
        ([ddp.EarlyStopping(1)], "give validation_data, or test_data"),
        ([ddp.EMA(), ddp.EMA()], "two EMA"),
    ):
        with pytest.raises(ConfigError, match=words):
            fit(tmp_path / "b", wrong, **how)
    with pytest.raises(ConfigError, match=r"0._extra_state, which a checkpoint cannot hold"):
        fit(tmp_path / "c", module=nn.Sequential(Extra(6, 3)), **how)
    for make in (
        lambda: ddp.EMA(1),
        lambda: ddp.EarlyStopping(0),
        lambda: ddp.EarlyStopping(1, min_delta=-1),
        lambda: ddp.EarlyStopping(1, min_delta=np.float16("inf")),  # in which the largest number is no bound
    ):
        with pytest.raises(ConfigError, match="must be a"):
            make()
    assert type(ddp.EarlyStopping(np.int64(2)).patience) is int  # type: ignore[arg-type]


def test_callbacks_of_an_earlier_fit_begin_anew() -> None:
    how: dict[str, Any] = {"comm": ddp.Communicator(SimulatedNetwork(1).transport(0)), "resume": None, "epochs": 2}
    once, again = [ddp.EMA(0.5), ddp.EarlyStopping(1)], [ddp.EMA(0.5), ddp.EarlyStopping(1)]
    fit(None, again, loss=F.multi_margin_loss, **how)  # whose losses are other numbers
    first, second = fit(None, once, **how), fit(None, again, **how)
    assert (second.evaluation, second.step) == (first.evaluation, first.step)
    averages = [callbacks[0].averaged.parameters() for callbacks in (once, again)]  # type: ignore[union-attr]
    assert torch.equal(vector(averages[0]), vector(averages[1]))


def test_a_model_that_cannot_be_copied_is_refused_for_averages_in_a_sentence() -> None:
    computed = torch.ones(1, requires_grad=True) * 2
    for attribute, reason in (computed, "Only Tensors created"), (Lock(), "cannot pickle"):
        module = net()
        module.kept = attribute  # type: ignore[assignment]
        comm = ddp.Communicator(SimulatedNetwork(1).transport(0))
        with pytest.raises(ConfigError, match=rf"EMA needs a copy of the model Sequential, .*\({reason}.*\): let it"):
            fit(None, [ddp.EMA()], module=module, comm=comm, resume=None, epochs=1)


def test_what_is_constant_in_a_loss_is_the_program_s_own(tmp_path: Path) -> None:
    comm = ddp.Communicator(SimulatedNetwork(1).transport(0))
    for scale, steps in ((1.0, 2), (3.0, 4)):
        loss = RunningLoss(scale)
        fit(tmp_path, loss=loss, comm=comm, max_steps=steps, test_data=None)
        assert loss.scale == scale and loss.mean != 1


def test_what_a_layer_saves_beside_tensors_is_resumed_and_given_to_a_fresh_model(tmp_path: Path) -> None:
    comm = ddp.Communicator(SimulatedNetwork(1).transport(0))
    for steps in (2, 5):
        module = nn.Sequential(nn.Linear(6, 6), Extra(6, 3))
        module[1].extra = 0  # type: ignore[assignment]
        fit(tmp_path, [ddp.EMA()], module=module, comm=comm, max_steps=steps, test_data=None)
        assert module[1].extra == steps
    weights = ddp.load(tmp_path, "latest").weights
    assert weights["1._extra_state"] == {"n": 5}
    torch.save(weights, tmp_path / "file")
    for path in (tmp_path / "checkpoints", tmp_path / "file"):
        fresh = nn.Sequential(nn.Linear(6, 6), Extra(6, 3))
        load_initial_weights(path, fresh, strict=True, rename={}, skip=[])
        assert fresh[1].extra == 5
        with pytest.raises(CheckpointError, match=r"it has 1._extra_state, which this model does not have"):
            load_initial_weights(path, nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), strict=True, rename={}, skip=[])
    with pytest.raises(CheckpointError, match=r"it has no 0._extra_state \(dict\)"):
        load_initial_weights(
            tmp_path / "file", nn.Sequential(Extra(6, 6), Extra(6, 3)), strict=True, rename={}, skip=[]
        )


@pytest.mark.parametrize("is_whole", [True, False])
def test_weights_of_a_compiled_model_s_earlier_run_fit_the_bare_one(is_whole: bool, tmp_path: Path) -> None:
    """Whose names have the compiler's wrapper in them, of the model or of a part; the averages, too."""
    bare = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 3)))
    names = [f"_orig_mod.{key}" if is_whole else key.replace("1.0.", "1._orig_mod.0.") for key in bare.state_dict()]
    weights = dict(zip(names, bare.state_dict().values(), strict=True))
    callbacks = {"EMA": {f"module.{name}": value + 1 for name, value in weights.items()}}
    meta = {"identity": {}, "averages": "EMA"}
    CheckpointStore(tmp_path / "checkpoints").save(1, {"model": weights, "callbacks": callbacks}, meta=meta)
    torch.save(weights, tmp_path / "file")
    for averaged in (False, True):
        found = ddp.load(tmp_path, "latest", averaged=averaged).weights
        assert all(torch.equal(found[key], value + averaged) for key, value in bare.state_dict().items())
        assert list(found) == list(bare.state_dict())
    for path in (tmp_path / "checkpoints", tmp_path / "file"):
        fresh = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 3)))
        load_initial_weights(path, fresh, strict=True, rename={}, skip=[])
        assert all(map(torch.equal, fresh.parameters(), bare.parameters()))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match=r"pipe is no file; init_from\.path takes"):
        load_initial_weights(tmp_path / "pipe", bare, strict=True, rename={}, skip=[])


def test_a_trial_makes_three_steps_one_evaluation_and_one_save_and_keeps_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    class Notes(ddp.EMA):
        def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
            super().step_end(state, report)
            calls.append("step")

        def evaluated(self, state: ddp.TrainState) -> None:
            calls.append("evaluation")

        def fit_end(self, state: ddp.TrainState) -> None:
            (folder,) = {*tmp_path.glob("runs/.ddp-trial-*/checkpoints")} - {lock.parent / "checkpoints"}
            calls.append(f"{len(list(folder.glob('step-*')))} saved")

    how: dict[str, Any] = {"comm": ddp.Communicator(SimulatedNetwork(1).transport(0)), "epochs": 50}
    module = net()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for name in (".ddp-trial-killed", ".ddp-trial-running"):
        (tmp_path / "runs" / name / "checkpoints").mkdir(parents=True)
    (own := tmp_path / "runs" / ".trial-notes").mkdir()
    lock = tmp_path / "runs" / ".ddp-trial-running" / ".lock"
    running = lock.open("w")
    fcntl.flock(running, fcntl.LOCK_EX)  # as another process
    state = fit_over(
        module=module,
        data=(X, CLASSES),
        optimizer=optimizer,
        loss=F.cross_entropy,
        test_data=(X, CLASSES),
        global_batch=10,
        every_steps=1,
        checkpoint_every_steps=1,
        folder=tmp_path / "runs" / "mine",
        callbacks=[Notes(), ddp.EarlyStopping(1)],
        trial=True,
        **how,
    )
    assert (state.step, calls) == (3, ["step", "step", "step", "evaluation", "1 saved"])
    assert {*(tmp_path / "runs").iterdir()} == {lock.parent, own}, "what a killed trial has left is gone, no more"
    running.close()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "the trial went well: 3 steps, an evaluation, a save; no file of it is kept"
    with pytest.raises(ConfigError, match="trial with resume=auto: a trial starts from scratch"):
        fit(tmp_path, resume="auto", trial=True, **how)
    with pytest.raises(ConfigError, match=r"EarlyStopping\(.\): goes by evaluations, of which there is one, at"):
        fit(tmp_path, callbacks=[ddp.EarlyStopping(1)], test_data=(X, CLASSES), every_epochs=None, **how)
    with pytest.raises(ConfigError, match="cannot hold"):
        fit(tmp_path / "runs" / "mine", module=nn.Sequential(Extra(6, 3)), trial=True, resume=None, **how)
    assert list((tmp_path / "runs").iterdir()) == [own]
