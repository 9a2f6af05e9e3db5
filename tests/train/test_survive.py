"""A run whose workers are lost, leave and join: the batch, the samples and the bits stay, wherever it happens."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddp

SAMPLES, BATCH, EPOCHS = 48, 12, 2
STEPS = EPOCHS * SAMPLES // BATCH


def model() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    return net.double(), (torch.randn(SAMPLES, 6, dtype=torch.float64), torch.randint(0, 3, (SAMPLES,)))


class Faults(ddp.Callback):
    """Notes each committed step, and ends this process where it is told to."""

    def __init__(self, folder: Path, where: Sequence[tuple[int, int, int, str]]) -> None:
        self.folder, self.where = folder, where

    def fit_start(self, state: ddp.TrainState) -> None:
        self.state = state

    def meets(self, phase: str, step: int) -> None:
        comm = self.state.comm
        if (comm.generation, comm.rank, step, phase) in [tuple(each) for each in self.where]:
            os.kill(os.getpid(), signal.SIGKILL)

    def step_start(self, state: ddp.TrainState) -> None:
        self.meets("step_start", state.step + 1)

    def step_end(self, state: ddp.TrainState, report: Any) -> None:
        indices = [i for micro in report.micros for i in micro.indices]
        line = {"step": state.step, "size": report.num_samples, "indices": indices}
        line |= {"loss": report.loss.hex(), "rank": state.comm.rank, "generation": state.comm.generation}
        with (self.folder / f"steps-{os.getpid()}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.meets("step_end", state.step)

    def evaluating(self, state: ddp.TrainState) -> Any:
        self.meets("evaluation", state.step)
        return super().evaluating(state)

    def checkpoint_saved(self, state: ddp.TrainState, path: Path) -> None:
        self.meets("saved", state.step)

    def state_dict(self) -> dict[str, Any]:
        self.meets("save", -1)
        return {}


def train(folder: Path, where: Sequence[Any], how: dict[str, Any], shared_memory: bool) -> tuple[Any, ...]:
    ddp.init(shared_memory=shared_memory, algorithm="auto" if shared_memory else "ring")
    net, data = model()
    faults = Faults(folder, where)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        found = nn.functional.cross_entropy(outputs, targets)
        if outputs.requires_grad:
            step = faults.state.step + 1
            faults.meets("forward", step)
            outputs.register_hook(lambda _: faults.meets("backward", step))
        return found

    state = ddp.fit(
        net,
        data,
        torch.optim.AdamW(net.parameters(), 1e-2),
        loss=loss,
        global_batch=BATCH,
        epochs=EPOCHS,
        test_data=data,
        callbacks=[faults, ddp.EMA(decay=0.9)],
        **how,
    )
    values = {name: value.clone() for name, value in net.state_dict().items()}
    return state.step, state.comm.world_size, state.comm.generation, values, state.evaluation


def launched(folder: Path, where: Sequence[Any], *, shared_memory: bool = True, **how: Any) -> list[Any]:
    folder.mkdir(exist_ok=True)
    fit = {"folder": None, **how.pop("fit", {})}
    if fit["folder"] is not None:
        fit["folder"] = ddp.Folder(folder / "run", every_steps=3, log_every=1, curves=False, progress=False)
    how = {"min_workers": 1, "restarts": 0, "timeout_s": 60, **how}
    return ddp.launch(train, folder, where, fit, shared_memory, **how)


def committed(folder: Path) -> Iterator[tuple[int, list[int]]]:
    """Yields for each step the samples of the ranks that have committed it in its last generation."""
    lines = [json.loads(line) for path in folder.glob("steps-*") for line in path.read_text().splitlines()]
    for step in sorted({line["step"] for line in lines}):
        of_step = [line for line in lines if line["step"] == step]
        last = max(line["generation"] for line in of_step)
        assert len({line["loss"] for line in of_step if line["generation"] == last}) == 1
        assert {line["size"] for line in of_step} == {BATCH}
        yield step, [i for line in of_step if line["generation"] == last for i in line["indices"]]


def check(results: list[Any], folder: Path, reference: list[Any], *, exact: bool = False) -> None:
    """The run made its steps, each sample of an epoch once, and has the weights of an undisturbed one."""
    epochs = [Counter[int]() for _ in range(EPOCHS)]
    for step, indices in committed(folder):
        epochs[(step - 1) * BATCH // SAMPLES].update(indices)
    assert epochs == [Counter(range(SAMPLES))] * EPOCHS
    for step, _, _, values, evaluation in results:
        assert step == STEPS
        assert evaluation.keys() == reference[0][4].keys()
        for name, value in values.items():
            assert torch.equal(value, results[0][3][name])  # replicas are equal, bit by bit
            if "running" not in name:  # of rank 0's samples alone
                torch.testing.assert_close(value, reference[0][3][name], rtol=1e-9, atol=1e-12)
            assert not exact or torch.equal(value, reference[0][3][name])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    return {n: launched(tmp_path_factory.mktemp(f"of-{n}"), [], workers=n) for n in (2, 3)}


PHASES = ["step_start", "forward", "backward", "step_end", "evaluation"]


@pytest.mark.parametrize("rank", [1, 0, 2])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.quick(3)
def test_a_rank_is_lost_anywhere(phase: str, rank: int, undisturbed: dict[int, list[Any]], tmp_path: Path) -> None:
    results = launched(tmp_path, [(0, rank, 4, phase)], workers=3)
    assert [found[1:3] for found in results] == [(2, 1), (2, 1)]
    check(results, tmp_path, undisturbed[3])


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.quick(2)
def test_a_spare_takes_its_place_and_bits_stay(
    rank: int, shared_memory: bool, undisturbed: dict[int, list[Any]], tmp_path: Path
) -> None:
    reference = undisturbed[3] if shared_memory else launched(tmp_path / "of-3", [], workers=3, shared_memory=False)
    results = launched(tmp_path, [(0, rank, 6, "backward")], workers=3, spares=1, shared_memory=shared_memory)
    assert [found[1:3] for found in results] == [(3, 1)] * 3
    check(results, tmp_path, reference, exact=rank != 0)  # whose BatchNorm was lost with it


@pytest.mark.parametrize("phase", ["save", "saved"])
@pytest.mark.quick(1)
def test_rank_0_is_lost_while_it_saves(phase: str, undisturbed: dict[int, list[Any]], tmp_path: Path) -> None:
    where = [(0, 0, -1 if phase == "save" else 3, phase)]
    results = launched(tmp_path, where, workers=3, fit={"folder": "run"})
    assert [found[1:3] for found in results] == [(2, 1), (2, 1)]
    check(results, tmp_path, undisturbed[3])
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [4, 8]
    assert (run / "checkpoints" / "step-00000003").is_dir()


def test_one_after_another_is_lost_and_replaced(undisturbed: dict[int, list[Any]], tmp_path: Path) -> None:
    where = [(0, 0, 2, "forward"), (1, 1, 4, "backward"), (2, 0, 6, "step_end")]
    results = launched(tmp_path, where, workers=3, restarts=3, spares=1)
    assert results
    check(results, tmp_path, undisturbed[3])
