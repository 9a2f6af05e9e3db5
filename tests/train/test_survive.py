"""A run whose workers are lost, leave and join: the batch, the samples and the bits stay, wherever it happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from torch import Tensor, nn

import ddp
from ddp.comm.meeting.membership import Membership, current_member
from ddp.errors import TooFewWorkers, WorkersFailed
from ddp.gradients.hook import ErrorFeedback
from ddp.gradients.hooks import PowerSGD
from ddp.run.launch import elastic

SAMPLES, BATCH, EPOCHS = 48, 12, 2
SIGKILL, SIGTERM = int(signal.SIGKILL), int(signal.SIGTERM)
STEPS = EPOCHS * SAMPLES // BATCH


def model() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    return net.double(), (torch.randn(SAMPLES, 6, dtype=torch.float64), torch.randint(0, 3, (SAMPLES,)))


def until(holds: Callable[[], object], *, within_s: float = 20) -> None:
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


class Faults(ddp.Callback):
    """Notes each committed step, and ends this process where it is told to."""

    def __init__(self, folder: Path, where: Sequence[tuple[Any, ...]]) -> None:
        self.folder, self.where = folder, where

    def fit_start(self, state: ddp.TrainState) -> None:
        self.state = state

    def meets(self, phase: str, step: int) -> None:
        comm, member = self.state.comm, current_member()
        assert member is not None
        here = comm.generation, comm.rank, step, phase
        for does in [does for *at, does in self.where if tuple(at) == here]:
            match does:
                case "waits":  # until others have joined, one has left, or all are to stop
                    (self.folder / f"waits in step {step}").touch()
                    until(lambda: member.is_superseded or member.stopped_by)
                case "is asked later":  # to leave, once it waits for others
                    subprocess.Popen(["sh", "-c", f"sleep 2; kill -TERM {os.getpid()}"])
                case "rests":  # is stopped, and continued in time
                    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "raises":
                    raise ValueError("a mistake of the user's own")
                case number:
                    os.kill(os.getpid(), number)

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
        schedule=ddp.optim.cosine(),
        callbacks=[faults] if "strategy" in how else [faults, ddp.EMA(decay=0.9)],
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
            if "1.r" not in name and "1.n" not in name:  # of BatchNorm, for the forwards of rank 0 alone
                torch.testing.assert_close(value, reference[0][3][name], rtol=1e-9, atol=1e-12)
            assert not exact or torch.equal(value, reference[0][3][name])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ddp.run.launch.supervisor.started", forked.Started)
        return {n: launched(tmp_path_factory.mktemp(f"of-{n}"), [], workers=n) for n in (2, 3)}


PHASES = ["step_start", "forward", "backward", "step_end", "evaluation"]


@pytest.mark.parametrize("rank", [1, 0, 2])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.quick(3)
def test_a_rank_is_lost_anywhere(phase: str, rank: int, undisturbed: dict[int, list[Any]], tmp_path: Path) -> None:
    results = launched(tmp_path, [(0, rank, 4, phase, SIGKILL)], workers=3)
    assert [found[1:3] for found in results] == [(2, 1), (2, 1)]
    check(results, tmp_path, undisturbed[3])


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.quick(2)
def test_a_spare_takes_its_place_and_bits_stay(
    rank: int, shared_memory: bool, undisturbed: dict[int, list[Any]], tmp_path: Path
) -> None:
    reference = undisturbed[3] if shared_memory else launched(tmp_path / "of-3", [], workers=3, shared_memory=False)
    results = launched(tmp_path, [(0, rank, 6, "backward", SIGKILL)], workers=3, spares=1, shared_memory=shared_memory)
    assert [found[1:3] for found in results] == [(3, 1)] * 3
    check(results, tmp_path, reference, exact=rank != 0)  # whose BatchNorm was lost with it


@pytest.mark.parametrize("phase", ["save", "saved"])
@pytest.mark.quick(1)
def test_rank_0_is_lost_while_it_saves(phase: str, undisturbed: dict[int, list[Any]], tmp_path: Path) -> None:
    where = [(0, 0, -1 if phase == "save" else 3, phase, SIGKILL)]
    results = launched(tmp_path, where, workers=3, fit={"folder": "run"})
    assert [found[1:3] for found in results] == [(2, 1), (2, 1)]
    check(results, tmp_path, undisturbed[3])
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [4, 8]
    assert (run / "checkpoints" / "step-00000003").is_dir()


def test_one_after_another_is_lost_and_replaced(undisturbed: dict[int, list[Any]], tmp_path: Path) -> None:
    where = [(0, 0, 2, "forward", SIGKILL), (1, 1, 4, "backward", SIGKILL), (2, 0, 6, "step_end", SIGKILL)]
    results = launched(tmp_path, where, workers=3, restarts=3, spares=1)
    assert results
    check(results, tmp_path, undisturbed[3])


def test_others_join_after_a_step(undisturbed: dict[int, list[Any]], tmp_path: Path) -> None:
    where = [(0, 0, 3, "forward", "waits")]
    results = launched(tmp_path, where, workers=2, spares=1, max_workers=3)
    assert [found[1:3] for found in results] == [(3, 1)] * 3
    check(results, tmp_path, undisturbed[3])  # its batch has had three parts from the beginning


@pytest.mark.parametrize("rank", [1, 0])
def test_one_leaves_after_a_step(rank: int, undisturbed: dict[int, list[Any]], tmp_path: Path) -> None:
    where = [(0, rank, 3, "step_start", SIGTERM), (0, 1 - rank, 4, "forward", "waits")]
    results = launched(tmp_path, where, workers=3, restarts=3)
    assert [found[1:3] for found in results] == [(2, 1)] * 2
    check(results, tmp_path, undisturbed[3])


def test_all_stop_if_too_few_would_stay(tmp_path: Path) -> None:
    where = [(0, rank, 3, "step_start", SIGTERM) for rank in range(3)] + [(0, 0, 3, "forward", "waits")]
    results = launched(tmp_path, where, workers=3, min_workers=2, fit={"folder": "run"})
    assert len({found[0] for found in results}) == 1
    assert results[0][0] < STEPS
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "SIGTERM"
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_too_few_wait_for_another(undisturbed: dict[int, list[Any]], tmp_path: Path) -> None:
    where = [(0, 1, 4, "backward", SIGKILL)]
    results = launched(tmp_path, where, workers=2, min_workers=2, restarts=1, fit={"folder": "run"})
    assert [found[1:3] for found in results] == [(2, 2)] * 2
    check(results, tmp_path, undisturbed[2])
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()


def test_too_few_that_wait_can_be_stopped(tmp_path: Path) -> None:
    where = [(0, 0, 5, "step_start", "is asked later"), (0, 1, 5, "backward", SIGKILL)]
    [(step, *_)] = launched(tmp_path, where, workers=2, min_workers=2, fit={"folder": "run"})
    assert step < STEPS
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "SIGTERM"


def test_one_that_leaves_is_killed_before_its_step_has_ended(undisturbed: dict[int, list[Any]], tmp_path: Path) -> None:
    leaves = [(0, 1, 3, phase, does) for phase, does in (("step_start", SIGTERM), ("forward", "waits"))]
    began_s = time.monotonic()
    results = launched(tmp_path, [*leaves, (0, 1, 3, "backward", SIGKILL)], workers=3)
    assert len(results) == 2 and time.monotonic() - began_s < 20
    check(results, tmp_path, undisturbed[3])


def test_too_few_save_and_end(tmp_path: Path) -> None:
    where = [(0, 1, 5, "backward", SIGKILL)]
    with pytest.raises(WorkersFailed, match=r"1 of min_workers=2 workers are left, .* within wait_s=0.5 s") as failed:
        launched(tmp_path, where, workers=2, min_workers=2, wait_s=0.5, fit={"folder": "run"})
    assert isinstance(failed.value, TooFewWorkers)
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()


def test_a_worker_that_raises_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a mistake of the user's own"):
        launched(tmp_path, [(0, 1, 3, "forward", "raises")], workers=3, restarts=3)


WAYS: dict[str, dict[str, Any]] = {
    "central storage": {"strategy": "central_storage"},
    "bf16_pure": {"precision": "bf16_pure"},
    "fp16": {"precision": "fp16"},
    "same bits": {"same_bits": True, "batches": ddp.Batches(num_shards=4)},
    "clipped": {"clip_norm": 0.5, "strategy": "central_storage"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.quick(3)
def test_bits_stay_in_every_way_to_train(way: str, tmp_path: Path) -> None:
    reference = launched(tmp_path / "of-3", [], workers=3, fit=WAYS[way])
    where = [(0, 1, 4, "backward", SIGKILL), (1, 2, 6, "step_end", SIGKILL)]
    results = launched(tmp_path, where, workers=3, spares=2, fit=WAYS[way])
    assert [found[1:3] for found in results] == [(3, 2)] * 3
    for _, _, _, values, _ in results:
        for name, value in values.items():
            assert torch.equal(value, reference[0][3][name]), name


def test_any_number_of_workers_has_the_same_bits(tmp_path: Path) -> None:
    reference = launched(tmp_path / "of-1", [], workers=1, fit=WAYS["same bits"])
    where = [(0, 1, 2, "backward", SIGKILL), (1, 0, 4, "forward", SIGKILL)]
    results = launched(tmp_path, where, workers=4, fit=WAYS["same bits"])
    assert [found[1:3] for found in results] == [(2, 2)] * 2
    for name, value in results[0][3].items():
        assert torch.equal(value, reference[0][3][name]), name


def test_local_sgd_repeats_the_round(tmp_path: Path) -> None:
    how = {"strategy": ddp.LocalSGD(every=2)}
    results = launched(tmp_path, [(0, 1, 2, "backward", SIGKILL)], workers=3, fit=how)
    assert [found[1:3] for found in results] == [(2, 1)] * 2
    assert all(torch.equal(value, results[1][3][name]) for name, value in results[0][3].items())


def test_a_sharded_state_goes_on_if_one_leaves_and_else_from_the_disk(tmp_path: Path) -> None:
    sharded = {"strategy": "sharded", "folder": "run"}
    reference = launched(tmp_path / "of-3", [], workers=3, fit=sharded)
    leaves = [(0, 1, 4, "step_start", SIGTERM), (0, 0, 5, "forward", "waits")]
    killed = [(0, 1, 5, "backward", SIGKILL)]
    for name, where in {"leaves": leaves, "killed": killed}.items():
        results = launched(tmp_path / name, where, workers=3, fit=sharded)
        assert [found[:3] for found in results] == [(STEPS, 2, 1)] * 2
        for key, value in results[0][3].items():
            if "running" not in key:
                torch.testing.assert_close(value, reference[0][3][key], rtol=1e-9, atol=1e-12)


def test_a_model_in_slices_is_lost_before_its_first_checkpoint(tmp_path: Path) -> None:
    fit = {"strategy": "fully_sharded", "folder": "run"}
    with pytest.raises(WorkersFailed, match="a part of the state after step 0 was lost with the ranks that had it"):
        launched(tmp_path, [(0, 1, 1, "forward", SIGKILL)], workers=3, fit=fit)


def test_a_stopped_worker_is_killed_and_one_that_goes_on_is_not(
    undisturbed: dict[int, list[Any]], tmp_path: Path
) -> None:
    for name, does, ends in (("rests", "rests", (3, 0)), ("stays", int(signal.SIGSTOP), (2, 1))):
        results = launched(tmp_path / name, [(0, 1, 4, "forward", does)], workers=3, silent_s=2.5)
        assert [found[1:3] for found in results] == [ends] * ends[0]
        check(results, tmp_path / name, undisturbed[3])


def test_a_hook_goes_on_with_what_the_others_owe(tmp_path: Path) -> None:
    strategy = ddp.Averaging(hook=ErrorFeedback(PowerSGD(2)))
    how: dict[str, Any] = {"shared_memory": False, "fit": {"strategy": strategy}}
    results = launched(tmp_path, [(0, 0, 4, "backward", SIGKILL)], workers=3, spares=1, **how)
    assert [found[:3] for found in results] == [(STEPS, 3, 1)] * 3
    for name, value in results[0][3].items():
        assert all(torch.equal(value, found[3][name]) for found in results), name


def test_after_the_first_fit_a_loss_ends_the_run(tmp_path: Path) -> None:
    def second() -> None:
        train(tmp_path, [], {"folder": None}, True)
        comm = ddp.init()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    with pytest.raises(WorkersFailed, match="rank 1 was killed by SIGKILL"):
        ddp.launch(second, workers=3, min_workers=1, restarts=3, timeout_s=60)


def test_two_launches_at_once_lose_their_own_alone(undisturbed: dict[int, list[Any]], tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        where = {"one": [(0, 1, 4, "backward", SIGKILL)], "other": [(0, 0, 3, "forward", SIGKILL)]}
        runs = {name: threads.submit(launched, tmp_path / name, each, workers=3) for name, each in where.items()}
    for name, run in runs.items():
        assert [found[1:3] for found in run.result()] == [(2, 1)] * 2
        check(run.result(), tmp_path / name, undisturbed[3])


def changed(folder: Path, where: Sequence[Any]) -> Any:
    """Trains a model that another process makes otherwise once there is a file, as a program that was edited does."""
    net, data = model()
    if (folder / "edited").exists():
        net.append(nn.Linear(3, 3))
    faults = Faults(folder, where)

    class Edits(ddp.Callback):
        def step_end(self, state: ddp.TrainState, report: Any) -> None:
            (folder / "edited").touch()
            if state.step == 6:
                until(lambda: list(folder.glob("refused")) or state.comm.rank)

    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    how: dict[str, Any] = {"loss": nn.functional.cross_entropy, "global_batch": BATCH, "epochs": EPOCHS, "folder": None}
    try:
        state = ddp.fit(net, data, optimizer, callbacks=[Edits(), faults], **how)
    except ddp.ConfigError:
        (folder / "refused").touch()
        raise
    return state.step, state.comm.world_size


def test_a_newcomer_of_another_program_is_refused_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(elastic, "CALM_S", 0.1)
    where = [(0, 1, 3, "step_end", SIGKILL)]
    results = ddp.launch(changed, tmp_path, where, workers=3, min_workers=1, restarts=1, timeout_s=60)
    assert results == [(STEPS, 2)] * 2
    assert any(
        "ConfigError: the model's 4.weight is [3, 3] in this process, and missing in the run" in record.getMessage()
        for record in caplog.records
    )


def test_one_that_comes_too_late_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = Membership._ready
    last = tmp_path / "waits in step 8"  # however slow the machine is, it joins in the last evaluation
    monkeypatch.setattr(Membership, "_ready", lambda self: ready(self) if last.exists() else [])
    results = launched(tmp_path, [(0, 0, STEPS, "evaluation", "waits")], workers=2, spares=1, max_workers=3)
    assert [found[:2] for found in results] == [(STEPS, 2)] * 2


def synchronised(folder: Path, where: Sequence[Any]) -> tuple[int, int]:
    """Trains with layers whose forward waits for the other ranks, and a rate that a callback lowers."""
    net, data = model()
    net[1] = ddp.SyncBatchNorm(8, dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    class Lowers(ddp.Callback):
        def step_end(self, state: ddp.TrainState, report: Any) -> None:
            if state.step == 2:
                optimizer.param_groups[0]["weight_decay"] = 0.01

    how: dict[str, Any] = {"loss": nn.functional.cross_entropy, "global_batch": BATCH, "epochs": EPOCHS, "folder": None}
    state = ddp.fit(net, data, optimizer, callbacks=[Lowers(), Faults(folder, where)], **how)
    return state.step, state.comm.world_size


def test_a_loss_in_the_layers_of_a_model_and_settings_that_changed(tmp_path: Path) -> None:
    where = [(0, 1, 4, "step_start", SIGKILL)]
    how: dict[str, Any] = {"min_workers": 2, "spares": 1, "restarts": 0, "timeout_s": 60}
    assert ddp.launch(synchronised, tmp_path, where, workers=2, **how) == [(STEPS, 2)] * 2
