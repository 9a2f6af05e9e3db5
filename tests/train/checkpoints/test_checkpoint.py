"""A run that was stopped and resumed ends with the bits of one that was not."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import train_on
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import lr_scheduler

import ddp
from ddp.comm.flat_collectives import HostPartition
from ddp.data.orders.sampler import TrainSampler
from ddp.data.samples import TensorSet
from ddp.errors import CheckpointError, ConfigError
from ddp.replica.broadcast import tensor_hash
from ddp.run.assembly.load import load_initial_weights
from ddp.strategies.strategy import Replicated
from ddp.train.checkpoints.checkpoint import (
    Checkpointer,
    changes,
    read_checkpoint,
    restore,
    save_checkpoint,
)
from ddp.train.checkpoints.checkpoint_store import CheckpointStore, load
from ddp.train.loop import end_of_run
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import StepReport, TrainState
from ddp.train.steps.stopping import StopFlag
from ddp.train.steps.task import Classification
from recipes.tutorial.simulated import SimulatedNetwork

NUM_STEPS = 13  # of 5 per epoch: beyond two epochs' edges


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(4 * 16, 5)
    )


class Seen(TensorSet):
    """Remembers which samples were asked for."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        super().__init__(torch.randn(47, 1, 6, 6, generator=generator), torch.randint(0, 5, (47,), generator=generator))
        self.seen: list[int] = []

    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        self.seen += list(indices)
        return super().batch(indices)


class StopAt(Callback):
    """One rank wants to stop in the given step."""

    def __init__(self, step: int, stop: StopFlag) -> None:
        self.step, self.stop = step, stop

    def step_start(self, state: TrainState) -> None:
        if state.step + 1 == self.step and state.comm.rank == state.comm.world_size - 1:
            self.stop.request("SIGTERM")


def part_of_a_run(
    folder: str, stop_at: int | None, resume: bool, num_shards: int | None = None
) -> tuple[int, str, str, list[int], str]:
    """(step, hash of parameters and momenta, hash of buffers, samples seen here, why it stopped)."""
    comm = ddp.init(abort_s=20)
    module, data, stop = model(), Seen(), StopFlag()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    replica = ddp.DistributedDataParallel(module, buffers="none")
    sampler = TrainSampler(
        len(data), global_batch=10, rank=comm.rank, world_size=comm.world_size, num_shards=num_shards, seed=7
    )
    state = TrainState(comm, Replicated(replica, optimizer), optimizer, sampler)
    store = CheckpointStore(Path(folder))
    if resume:
        restore(read_checkpoint(comm, Path(folder), state.model.module), state, identity={})
    callbacks: list[Callback] = [Checkpointer(store, identity={}, every_steps=4)]
    if stop_at is not None:
        callbacks.append(StopAt(stop_at, stop))
    train_on(
        state,
        data,
        max_steps=NUM_STEPS,
        callbacks=callbacks,
        stop=stop,
    )
    replica.sync_buffers()
    tensors = [*module.parameters(), *(t for entry in optimizer.state.values() for t in entry.values())]
    bits = tensor_hash(torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors]))
    buffers = tensor_hash(torch.cat([buffer.reshape(-1).float() for buffer in module.buffers()]))
    ddp.shutdown()
    return state.step, bits, buffers, data.seen, state.stopped_by


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.quick(1)
def test_stopped_twice_and_resumed_is_bitwise_the_uninterrupted_run(tmp_path: Path, world_size: int) -> None:
    whole = run_ranks(part_of_a_run, world_size, str(tmp_path / "whole"), None, False)
    assert {result[0] for result in whole} == {NUM_STEPS}
    assert len({(result[1], result[2]) for result in whole}) == 1

    parts = str(tmp_path / "parts")
    first = run_ranks(part_of_a_run, world_size, parts, 5, False)  # the epoch's edge
    assert {(result[0], result[4]) for result in first} == {(5, "SIGTERM")}
    second = run_ranks(part_of_a_run, world_size, parts, 8, True)
    assert {result[0] for result in second} == {8}
    third = run_ranks(part_of_a_run, world_size, parts, None, True)
    assert {(result[0], result[4]) for result in third} == {(NUM_STEPS, "")}
    assert {result[1] for result in third} == {whole[0][1]}
    assert third[0][2] == whole[0][2]


@pytest.mark.slow
def test_resumed_at_another_world_size_sees_every_sample_once_per_epoch(tmp_path: Path) -> None:
    folder = str(tmp_path)
    first = run_ranks(part_of_a_run, 3, folder, 3, False)
    second = run_ranks(part_of_a_run, 2, folder, None, True)
    seen = [index for _, _, _, indices, _ in (*first, *second) for index in indices]
    counts = [seen.count(index) for index in range(47)]
    assert set(counts) == {2, 3}  # 13 steps of 5 per epoch: twice everything, and 30 samples a third time
    assert counts.count(3) == 30


@cache
def alone() -> ddp.Communicator:
    """One for all tests of this process, because each has a thread of its own."""
    return ddp.Communicator(SimulatedNetwork(1).transport(0))


def state_of(sampler: TrainSampler, step: int, optimizer: torch.optim.Optimizer | None = None) -> TrainState:
    comm, module = alone(), nn.Linear(3, 1)
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    strategy = Replicated(ddp.DistributedDataParallel(module, comm=comm), optimizer)
    return TrainState(comm, strategy, optimizer, sampler, step)


@pytest.mark.parametrize("global_batch", [5, 10, 47, 20])
@pytest.mark.parametrize(("epoch", "consumed"), [(0, 0), (0, 10), (1, 0), (2, 40), (3, 0), (4, 0)])
def test_epochs_are_counted_in_samples_whatever_the_batch_was(global_batch: int, epoch: int, consumed: int) -> None:
    sampler = TrainSampler(47, global_batch=global_batch, rank=0, world_size=1)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "consumed": consumed})
    state = state_of(sampler, step=17)
    left = 0
    while sampler.state.epoch < 3:
        for plan in list(sampler.plans()):
            sampler.commit(plan)
            left += 1
    sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "consumed": consumed})
    end = max(3 * 47, sampler.position)
    assert end_of_run(state, epochs=3, max_steps=None) == (17 + left, end)
    one_more = sampler.position + next(sampler.plans()).size if left else end
    assert end_of_run(state, epochs=3, max_steps=18) == (min(18, 17 + left), one_more)


def test_a_resumed_run_keeps_its_own_optimizer_settings_and_refuses_another_optimizer(tmp_path: Path) -> None:
    def fresh(kind: type[torch.optim.Optimizer], **settings: float) -> TrainState:
        sampler = TrainSampler(47, global_batch=10, rank=0, world_size=1)
        state = state_of(sampler, step=0)
        state = replace(state, optimizer=kind(state.model.module.parameters(), **settings))  # type: ignore[call-arg]
        state.model(torch.ones(2, 3)).sum().backward()
        state.optimizer.step()
        return state

    store = CheckpointStore(tmp_path)
    save_checkpoint(store, fresh(torch.optim.AdamW, lr=0.1, weight_decay=0.01), identity={"optim": 1, "threads": 1})
    resumed = fresh(torch.optim.AdamW, lr=0.2, weight_decay=0.5)
    checkpoint = load(store.folder)
    restore(checkpoint, resumed, identity={"optim": 2, "threads": 1})
    assert resumed.model.num_steps == resumed.step == 0  # so that errors number the steps of the run
    group = resumed.optimizer.param_groups[0]
    assert (group["lr"], resumed.rates.base, group["weight_decay"]) == (0.2, [0.2], 0.5)
    assert changes({"optim": 1, "threads": 1}, {"optim": 2, "threads": 1}) == ["optim was 1, is 2"]
    with pytest.raises(CheckpointError, match="was taken with AdamW, this run uses SGD"):
        restore(checkpoint, fresh(torch.optim.SGD, lr=0.1), identity={})

    def apart() -> TrainState:
        state = fresh(torch.optim.AdamW, lr=0.1)
        groups = [{"params": [each]} for each in state.model.module.parameters()]
        state.optimizer = torch.optim.AdamW(groups, lr=0.1)
        return state

    def smaller() -> TrainState:
        state = fresh(torch.optim.AdamW, lr=0.1)
        state.sampler = TrainSampler(9, global_batch=3, rank=0, world_size=1)
        return state

    there = fresh(torch.optim.AdamW, lr=0.1)
    there.sampler.load_state_dict({**there.sampler.state_dict(), "consumed": 10})
    save_checkpoint(store, there, identity={})
    refusals: list[tuple[TrainState, type[Exception], str]] = [
        (apart(), CheckpointError, r"parameter groups of \[2\] parameters, this optimizer has groups of \[1, 1\]"),
        (smaller(), ConfigError, "no position in a data set of 9 samples"),
    ]
    for state, kind, words in refusals:
        for parameter in state.model.parameters():
            parameter.data.fill_(7.0)
        with pytest.raises(kind, match=words):
            restore(load(store.folder), state, identity={})
        assert all(bool((parameter == 7.0).all()) for parameter in state.model.parameters()), "nothing was changed"
        assert (state.step, state.sampler.state.consumed) == (0, 0)


@pytest.mark.parametrize("then", ["replicated", {"name": "auto"}])
def test_another_strategy_has_the_same_bits_on_one_host(
    then: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state, store = in_one_process(40)[0], CheckpointStore(tmp_path)
    save_checkpoint(store, state, identity={"strategy": then})  # the word is of an older version
    restore(load(store.folder), state, identity={"strategy": {"name": "sharded"}})
    assert not caplog.records
    monkeypatch.setattr(state.comm, "host_partition", HostPartition([0, 1], [0, 0], 1))
    restore(load(store.folder), state, identity={"strategy": {"name": "auto"}})
    assert not caplog.records
    restore(load(store.folder), state, identity={"strategy": {"name": "sharded"}})
    assert caplog.messages[0].endswith("an uninterrupted run: strategy.name was auto, is sharded")


def in_one_process(num_samples: int) -> tuple[TrainState, TensorSet]:
    data = TensorSet(torch.randn(num_samples, 3), torch.zeros(num_samples, dtype=torch.int64))
    return state_of(TrainSampler(num_samples, global_batch=10, rank=0, world_size=1), step=0), data


def rates_of_a_run(folder: Path, make: Any, *, epochs: int, every: str | None = None) -> list[float]:
    """Returns the learning rates of the steps that are made, of four an epoch."""
    rates: list[float] = []

    class Rates(Callback):
        def step_end(self, state: TrainState, report: StepReport) -> None:
            rates.append(report.rate)

    network = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    schedule = make(optimizer)
    ddp.fit(
        ddp.BucketedDataParallel(network, comm=ddp.Communicator(SimulatedNetwork(1).transport(0))),
        (torch.zeros(40, 6), torch.zeros(40, dtype=torch.int64)),
        optimizer,
        loss=nn.functional.cross_entropy,
        global_batch=10,
        epochs=epochs,
        schedule=schedule if every is None else ddp.optim.TorchSchedule(schedule, every=every),
        folder=ddp.Folder(folder, resume="auto", progress=False, curves=False),
        callbacks=[Rates()],
    )
    return rates


@pytest.mark.parametrize("schedule", [ddp.optim.cosine(), ddp.optim.with_warmup(ddp.optim.wsd(), fraction=0.25)])
@pytest.mark.quick(1)
def test_a_schedule_follows_the_length_of_a_run_that_is_extended(tmp_path: Path, schedule: Any) -> None:
    rates_of_a_run(tmp_path, lambda _: schedule, epochs=1)
    rates = rates_of_a_run(tmp_path, lambda _: schedule, epochs=3)
    assert rates == pytest.approx([0.1 * schedule(10 * step + 5, 120) for step in range(4, 12)])


EXTENDED: dict[str, tuple[Any, str]] = {
    "cosine": (lambda optimizer, n: lr_scheduler.CosineAnnealingLR(optimizer, n), "T_max was 4, is 12"),
    "inside": (
        lambda optimizer, n: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.ConstantLR(optimizer, total_iters=1), lr_scheduler.LinearLR(optimizer, total_iters=n)],
            [1],
        ),
        "_schedulers.1.total_iters was 4, is 12",
    ),
    "milestones": (
        lambda optimizer, n: lr_scheduler.MultiStepLR(optimizer, [n // 2]),
        "milestones.2 was 1, is not set; milestones.6 was not set, is 1",
    ),
    "the same": (lambda optimizer, n: lr_scheduler.CosineAnnealingLR(optimizer, 12), ""),
}


@pytest.mark.parametrize("name", EXTENDED)
@pytest.mark.quick(1)
def test_a_scheduler_of_torch_s_that_keeps_its_old_length_is_told(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, told = EXTENDED[name]
    for epochs in (1, 1, 3):
        caplog.clear()
        rates = rates_of_a_run(tmp_path, lambda optimizer: make(optimizer, 4 * epochs), epochs=epochs, every="step")  # noqa: B023
        assert ("in this program, but the run continues with" in caplog.text) == (epochs == 3 and bool(told))
    assert told in caplog.text and "schedule was" not in caplog.text
    if name == "cosine":  # goes up again, as torch's own with the old length does
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        alone = make(optimizer, 4)
        for number in range(12):
            assert number < 4 or rates[number - 4] == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
            optimizer.step(), alone.step()


def test_a_run_goes_on_after_an_agreed_stop() -> None:
    state, data = in_one_process(40)
    stop = StopFlag()
    stop.request("enough")
    train_on(state, data, max_steps=9, stop=stop)
    assert (state.step, state.stopped_by) == (1, "enough")
    for max_steps in (9, 4):  # the latter are done already
        train_on(state, data, max_steps=max_steps)
        assert (state.step, state.stopped_by) == (9, "")


@pytest.mark.slow
def test_while_a_fit_runs_no_other_process_saves_into_its_folder(tmp_path: Path) -> None:
    state, data = in_one_process(40)
    store = CheckpointStore(tmp_path / "checkpoints")
    other = "import sys; from ddp.train.checkpoints.checkpoint_store import CheckpointStore as Store\n"
    other += "Store(sys.argv[1]).save(7, {}, meta={})"

    class Intruder(Callback):
        said = ""

        def step_end(self, state: TrainState, report: StepReport) -> None:
            done = subprocess.run([sys.executable, "-c", other, store.folder], capture_output=True, text=True)
            self.said = done.stderr.splitlines()[-1]

    intruder = Intruder()
    folder = ddp.Folder(tmp_path, every_steps=1, progress=False)
    how: dict[str, Any] = {"global_batch": 8, "max_steps": 1, "folder": folder, "callbacks": [intruder]}
    ddp.fit(state.model, data, state.optimizer, loss=Classification(), **how)
    assert f"{store.folder} is being written by process {os.getpid()} on host" in intruder.said
    assert sorted(path.name for path in store.folder.iterdir()) == ["latest", "step-00000001"]


def test_a_grown_data_set_is_told_on_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, data = in_one_process(40)
    store = CheckpointStore(tmp_path)
    train_on(state, data, max_steps=1, callbacks=[Checkpointer(store, identity={}, every_steps=1)])
    with pytest.raises(ConfigError, match=r"permutation \(40 positions, .* samples would be read twice or never"):
        restore(load(store.folder), in_one_process(41)[0], identity={})
    train_on(  # to the end of the epoch
        state, data, max_steps=4, callbacks=[Checkpointer(store, identity={}, every_steps=1)]
    )
    for num_samples, words in [(40, ""), (41, "training_samples was 40, is 41")]:
        caplog.clear()
        restore(load(store.folder), in_one_process(num_samples)[0], identity={})
        assert words in caplog.text and bool(caplog.text) == bool(words)


def test_dropout_and_order_do_not_depend_on_the_world_size(tmp_path: Path) -> None:
    """With the shards fixed, 1, 2 and 4 workers draw the same noise for the same samples."""
    results = [run_ranks(losses, world_size, 4) for world_size in (1, 2, 4)]
    for result in results[1:]:
        torch.testing.assert_close(result[0], results[0][0], rtol=1e-9, atol=0)


def losses(num_shards: int) -> Tensor:
    class Losses(Callback):
        seen: list[float] = []  # noqa: RUF012

        def step_end(self, state: TrainState, report: StepReport) -> None:
            self.seen.append(report.loss)

    ddp.init(abort_s=20)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.Dropout(0.5), nn.Linear(20, 5)).double()
    data = Seen()
    data.inputs = data.inputs.double()
    recorder = Losses()
    ddp.fit(
        module,
        data,
        torch.optim.SGD(module.parameters(), 0.1),
        loss=Classification(),
        folder=ddp.Folder(None, progress=False),
        global_batch=10,
        batches=ddp.Batches(num_shards=num_shards),
        max_steps=NUM_STEPS,
        callbacks=[recorder],
    )
    ddp.shutdown()
    return torch.tensor(recorder.seen, dtype=torch.float64)


def test_weights_load_plain_and_wrapped_and_a_renamed_head(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    wrapped = {f"module.{key}": value for key, value in source.state_dict().items()}
    for name, weights in {"plain": source.state_dict(), "wrapped": wrapped}.items():
        torch.save(weights, tmp_path / name)
        target = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        load_initial_weights(tmp_path / name, target, strict=True, rename={}, skip=[])
        assert torch.equal(target[1].weight, source[1].weight)

    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 7)

    target = Renamed()
    with pytest.raises(CheckpointError, match=r"it has no body.weight \[4, 3\]"):
        load_initial_weights(tmp_path / "plain", target, strict=True, rename={}, skip=[])
    rename = {"0.": "body.", "1.": "head."}
    with pytest.raises(CheckpointError, match=r"head.weight is \[2, 4\] there and \[7, 4\] here"):
        load_initial_weights(tmp_path / "plain", target, strict=True, rename=rename, skip=[])
    load_initial_weights(tmp_path / "plain", target, strict=True, rename=rename, skip=["head."])
    assert torch.equal(target.body.weight, source[0].weight)
    torch.save(source, tmp_path / "module")
    (tmp_path / "text").write_text("# readme\n")
    for name, cause in [("text", "Unsupported operand 35"), ("module", "Unsupported global: .*Sequential was not .*")]:
        message = rf"text cannot be read as weights \({cause}\); init_from.path takes [^\n]*$".replace("text", name, 1)
        with pytest.raises(CheckpointError, match=message):
            load_initial_weights(tmp_path / name, target, strict=True, rename={}, skip=[])
    with pytest.raises(CheckpointError, match="is no file; init_from"):
        load_initial_weights(tmp_path / "nothing", target, strict=True, rename={}, skip=[])


def test_a_checkpoint_of_the_first_version_can_be_resumed(tmp_path: Path) -> None:
    state, data = in_one_process(40)
    store = CheckpointStore(tmp_path)
    train_on(state, data, max_steps=1, callbacks=[Checkpointer(store, identity={}, every_steps=1)])
    checkpoint = load(store.folder)
    for name in ("evaluation", "evaluated_at"):
        del checkpoint.parts["position"][name]
    first_version = replace(
        checkpoint, meta={key: value for key, value in checkpoint.meta.items() if key != "optimizer_settings"}
    )
    resumed, _ = in_one_process(40)
    restore(first_version, resumed, identity={})
    assert (resumed.step, resumed.evaluation, resumed.evaluated_at) == (1, {}, -1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.slow
def test_a_compiled_model_has_the_names_of_the_bare_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever part is compiled; so that a run goes on with the model compiled or not, and any program loads it."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    def built(compiles: str) -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 3)))
        if compiles == "a part":
            net[2] = torch.compile(net[2], backend=backend)
        return torch.compile(net, backend=backend) if compiles == "all" else net

    def run(compiles: str, folder: str, *, max_steps: int, resume: str | None = None) -> dict[str, Tensor]:
        torch._dynamo.reset()
        net, num_graphs = built(compiles), len(graphs)
        before = list(net.state_dict()), type(net), type(net[2]) if compiles != "all" else None
        keeps = ddp.Folder(tmp_path / folder, resume=resume, progress=False, curves=False)
        data = torch.arange(64.0).view(16, 4) / 64, torch.arange(16) % 3
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        how: dict[str, Any] = {"loss": nn.functional.cross_entropy, "global_batch": 4, "max_steps": max_steps}
        ddp.fit(net, data, optimizer, folder=keeps, **how)
        assert (len(graphs) > num_graphs) == bool(compiles)
        assert before == (list(net.state_dict()), type(net), type(net[2]) if compiles != "all" else None)
        return load(tmp_path / folder / "checkpoints").parts["model"]

    whole = run("", "never", max_steps=6)
    with monkeypatch.context() as earlier:  # versions wrote the compiled model's names
        earlier.setattr("ddp.train.fit.without_compile_wrappers", nullcontext)
        assert "2._orig_mod.0.weight" in run("a part", "a part all", max_steps=3)
    assert run("all", "a part all", max_steps=6, resume="auto").keys() == whole.keys()
    assert all(torch.equal(ddp.load(tmp_path / "a part all").weights[name], each) for name, each in whole.items())
    for first, then in (("all", ""), ("", "a part")):
        run(first, f"{first} {then}", max_steps=3)
        found = run(then, f"{first} {then}", max_steps=6, resume="auto")
        built("").load_state_dict(found)
        assert all(torch.equal(found[name], each) for name, each in whole.items())
