"""Parameter servers train what one process trains; each sample counts once, whoever is lost, and on each resume.

Tests: ddp/strategies/parameter_server/edge.py, ddp/strategies/parameter_server/server.py,
ddp/strategies/parameter_server/worker.py, ddp/strategies/parameter_server/worker_threads.py,
ddp/train/parameter_server.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import members
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn import functional as F

import ddp
from ddp.comm.meeting.private_store import Folder
from ddp.comm.meeting.role import Role, current_role, set_role
from ddp.errors import ConfigError
from ddp.process.clock import Patience
from ddp.run.launch import supervisor
from ddp.strategies.parameter_server import ledger, worker_threads
from ddp.strategies.parameter_server import server as served
from ddp.strategies.parameter_server.worker import Over, Servers
from ddp.strategies.parameter_server.worker_threads import Push, Shared, WorkerThreads

BATCH, NUM_SAMPLES = 10, 46  # the last step of an epoch has six samples
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "backup": {"backup_workers": 1},
    "async": {"mode": "async"},
    "bounded": {"mode": "bounded", "staleness": 1},
}


def parameters(module: nn.Module) -> Tensor:
    return torch.cat([each.detach().double().flatten() for each in module.parameters()])


# --- it is what one process trains -----------------------------------------------------------------------------------

KINDS = {"mlp": members.mlp, "cnn": members.cnn, "gpt": members.gpt, "odd": members.Odd}


def trained(kind: str, optimizer: str, shards: int, epochs: int, strategy: Any = "auto") -> Tensor:
    """The parameters after a training in float64, where the model has no dropout of its own precision."""
    with members.small_blocks():
        # workers begin with other values, frozen ones too
        torch.manual_seed(1 if str(current_role()).startswith("worker") else 0)
        module = KINDS[kind]().double()
        data = members.odd_samples() if kind == "odd" else members.samples(kind)
        data = tuple(each.double() if each.is_floating_point() else each for each in data)
        task = ddp.LanguageModel() if kind == "gpt" else F.cross_entropy
        state = ddp.fit(
            module,
            data,
            members.OPTIMIZERS[optimizer](members.groups_of(module)),
            loss=task,
            global_batch=BATCH,
            epochs=epochs,
            schedule=ddp.optim.cosine(),
            clip_norm=0.5 if optimizer == "adamw" else None,
            batches=ddp.Batches(num_shards=shards, seed=3),
            strategy=strategy,
            folder=None,
        )
    assert state.step == 5 * epochs
    return parameters(module)


CASES = [("mlp", "adamw", 40), ("gpt", "lamb", 3), ("cnn", "sgd", 3), ("odd", "nesterov", 3), ("mlp", "lars", 3)]


def sync_trainings(backups: int, most: int) -> list[Tensor]:
    policy = ddp.ParameterServer(backup_workers=backups)
    return [trained(kind, optimizer, 2, min(most, epochs), policy) for kind, optimizer, epochs in CASES]


@pytest.mark.parametrize(("workers", "servers", "most"), [(2, 1, 40), (3, 2, 3)])
@pytest.mark.quick(1)
def test_sync_is_one_process_on_the_whole_batch(workers: int, servers: int, most: int) -> None:
    found = ddp.launch(sync_trainings, workers - 2, most, workers=workers, servers=servers)
    for (kind, optimizer, epochs), theirs in zip(CASES, zip(*found[:servers], strict=True), strict=True):
        expected = trained(kind, optimizer, 2, min(most, epochs))
        for mine in theirs:
            assert torch.equal(mine, theirs[0])  # on each server
            assert (mine - expected).abs().max() <= 1e-12, (kind, optimizer)


# --- each sample once ------------------------------------------------------------------------------------------------


class Counts(nn.Module):
    """A weight for each sample, which by SGD with rate 1 falls by 1 ÷ batch for each time that the sample counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_SAMPLES, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, index: Tensor) -> Tensor:
        return self.weight[index]


class Once(ddp.Task):
    main_metric = "loss"

    def __init__(self, pause_s: float) -> None:
        self._pause = [pause_s]  # no plain value, which would have to be the same everywhere

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the fit listens
        time.sleep(*self._pause)
        return model(batch[0]).sum(), len(batch[0])


class Scripted(ddp.Callback):
    """Sends signals after certain steps of the first servers: "worker 1", or "server 0", which is this process.

    Or "raises".
    """

    def __init__(self, folder: Path, script: Mapping[int, tuple[str, signal.Signals]]) -> None:
        self._folder, self._script = folder, script

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        me = current_role()
        assert me is not None
        who, number = self._script.get(state.step, ("", signal.SIGTERM))
        if who == "raises":
            raise LookupError(state.step)  # and `counted` waits, so that the workers know before this process ends
        if who and not me.incarnation and (who == str(me) or (who.startswith("worker") and not me.index)):
            until_s = time.monotonic() + 30
            while not (pid := (self._folder / who).read_text() if (self._folder / who).exists() else ""):
                assert time.monotonic() < until_s, f"{who} has not begun"
                time.sleep(0.01)
            os.kill(int(pid), number)


def counted(folder: Path, mode: Mapping[str, Any], script: Mapping[int, Any], epochs: int = 3) -> Any:
    me = current_role()
    assert me is not None
    served.LAST_S = 1.0  # for a stopped worker, which never says goodbye
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # which may come before a slow worker begins its fit
    (folder / str(me)).write_text(str(os.getpid()))
    torch.manual_seed(0)
    module = Counts()
    try:
        state = ddp.fit(
            module,
            (torch.arange(NUM_SAMPLES), torch.zeros(NUM_SAMPLES)),
            torch.optim.SGD(module.parameters(), lr=1.0),
            loss=Once(0.01 if script else 0.0),
            global_batch=BATCH,
            epochs=epochs,
            strategy=ddp.ParameterServer(**mode),
            folder=ddp.Folder(folder / "run", every_steps=4, progress=False, curves=False),
            callbacks=[Scripted(folder, script)],
        )
    except LookupError:
        time.sleep(1)
        raise
    return state.step, module.weight.detach()


def times_counted(weight: Tensor, epochs: int) -> bool:
    """Whether each sample has counted once an epoch: in steps of 10 samples, or in the last one, of 6."""
    parts = [{round(k / 10 + (epochs - k) / 6, 9) for k in range(epochs + 1)}]
    return {round(-each, 9) for each in weight.tolist()} <= parts[0] and abs(weight.sum() + 5 * epochs) < 1e-9


KILLED = {4: ("worker 1", signal.SIGKILL)}
STOPPED = {4: ("worker 1", signal.SIGSTOP)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.quick(1)
def test_each_sample_counts_once_though_a_worker_is_killed(mode: str, tmp_path: Path) -> None:
    found = ddp.launch(counted, tmp_path, MODES[mode], KILLED, workers=3, servers=1)
    assert found[0][0] == 15
    assert times_counted(found[0][1], 3)


@pytest.mark.parametrize("mode", ["sync", "bounded"])
@pytest.mark.quick(1)
def test_a_stopped_worker_is_not_waited_for(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LEAVE_S", 0.5)
    monkeypatch.setattr(supervisor, "START_S", 0.5)
    found = ddp.launch(counted, tmp_path, MODES[mode], STOPPED, workers=3, servers=2)
    assert found[0][0] == 15
    assert times_counted(found[0][1], 3)


def test_a_worker_that_is_asked_to_stop_leaves_alone(tmp_path: Path) -> None:
    found = ddp.launch(counted, tmp_path, MODES["async"], {4: ("worker 1", signal.SIGTERM)}, workers=2, servers=1)
    assert [found[0][0], found[2][0] < 15] == [15, True]
    assert times_counted(found[0][1], 3)


@pytest.mark.parametrize(("mode", "servers"), [("sync", 2), ("async", 1)])
@pytest.mark.quick(1)
def test_lost_servers_go_on_from_a_checkpoint_and_say_what_is_gone(
    mode: str, servers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = {7: (f"server {servers - 1}", signal.SIGKILL)}
    found = ddp.launch(counted, tmp_path, MODES[mode], script, workers=2, servers=servers)
    assert found[0][0] == 15
    assert times_counted(found[0][1], 3)
    assert re.search("after update [67], and resume from update 4: [23] updates are lost", capfd.readouterr().err)


ALONE = r"\A(worker \d stopped because server 0 failed\n)*server 0 on host \S+ failed at step 4:\n(?s:.*)\nLookupE"


@pytest.mark.slow
def test_where_a_server_fails_its_error_alone_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = {4: ("raises", signal.SIGTERM)}
    with pytest.raises(ddp.WorkersFailed, match=ALONE):
        ddp.launch(counted, tmp_path, MODES["sync"], script, workers=2, servers=1)
    assert "again" not in caplog.text  # nobody is started again


class Raises(ddp.Callback):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        raise self._error


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 3, dtype=torch.cfloat))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.to(torch.cfloat) @ self.weight.T).abs()


def bad_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    raise KeyError("bad_loss")


VERSIONS: list[list[int]] = []


class Versions(ddp.Task):
    """Notes of which update each parameter is, since SGD with rate 0.1 takes 0.1 from each in each update."""

    main_metric = "loss"

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        VERSIONS.append([round(-10 * each.item()) for each in model.parameters()])
        return model(batch[0]), len(batch[0])


class Four(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = nn.ParameterList([torch.zeros(1) for _ in range(4)])

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([*self.held]).sum() * len(inputs)


FITS: list[dict[str, Any]] = [
    {"model": Complex},
    {"callbacks": [Raises(LookupError("step 1"))]},  # on the servers alone
    {},
    {"model": Four, "loss": Versions(), "max_steps": 12, "strategy": ddp.ParameterServer(mode="async")},
    {"model": Four, "loss": Versions(), "max_steps": 12},
    {"loss": bad_loss},  # on the workers alone
]


def fit_after_fit() -> list[Any]:
    ledger.LEAST_LATE_S = 60.0  # nobody computes a copy, of a mixture that does not count
    worker_threads.REPLY_S = 0.1  # after which servers look at what became of workers that are not here
    said = list[Any]()
    for how in FITS:
        kind = how.get("model", nn.Linear)
        model = kind(3, 1) if issubclass(kind, nn.Linear) else kind()
        data = torch.zeros(NUM_SAMPLES, 3), torch.zeros(NUM_SAMPLES, 1)
        given = {"loss": F.mse_loss, "max_steps": 3, "strategy": "parameter_server", **how}
        given.pop("model", None)
        VERSIONS.clear()
        try:
            state = ddp.fit(
                *(model, data, torch.optim.SGD(model.parameters(), lr=0.1)),
                **given,
                global_batch=BATCH,
                folder=None,
            )
            said.append(f"trained {state.step} steps")
            said += [VERSIONS.copy()] if "max_steps" in how else []
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_fit_that_fails_for_servers_or_workers_fails_for_all_and_the_next_one_trains() -> None:
    server, other, *workers = ddp.launch(fit_after_fit, workers=2, servers=2, timeout_s=60)
    assert server == other
    for here in (server, *workers):
        assert here[0].startswith("ConfigError: weight is torch.complex64 on cpu: a sharded update takes real numbers")
        assert here[1:3] == ["LookupError: step 1", "trained 3 steps"]
        assert here[3::2] == ["trained 12 steps", "trained 12 steps", "KeyError: 'bad_loss'"]
    for *_, of_async, _, of_sync, _ in workers:  # docs/strategies.md; server 0 has the last two parameters
        assert all(each == sorted(each, reverse=True) and each[2] == each[3] for each in of_async), of_async
        assert of_sync and all(len(set(each)) == 1 for each in of_sync)
    assert sum(len(here[4]) for here in workers) >= 12


def come_late() -> int:
    if str(current_role()) == "worker 1":  # as on a busy host
        time.sleep(1.0)
    model = nn.Linear(3, 1)
    return ddp.fit(
        *(model, (torch.zeros(8, 3), torch.zeros(8, 1)), torch.optim.SGD(model.parameters(), lr=0.1)),
        loss=F.mse_loss,
        global_batch=4,
        max_steps=1,
        strategy=ASYNC,
        folder=None,
    ).step


def test_a_worker_that_comes_once_the_run_is_over_is_not_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "LEAVE_S", 0.1)
    assert ddp.launch(come_late, workers=2, servers=1) == [1, 1, 1]
    assert not caplog.records


def stopped_at_step_2(folder: Path) -> None:
    ddp.init(abort_s=1.5)
    counted(folder, MODES["async"], {2: ("server 0", signal.SIGSTOP)})


@pytest.mark.slow
def test_a_stopped_server_is_named_and_continued_to_be_ended(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match=r"worker 0: server 0 is silent: it was stopped, or its host is down, and"):
        ddp.launch(stopped_at_step_2, tmp_path, workers=1, servers=1)
    assert time.monotonic() - began_s < supervisor.SHUTDOWN_S


def lost_in_the_second() -> None:
    for number in range(2):
        if number and str(current_role()) == "server 0":
            os.kill(os.getpid(), signal.SIGKILL)
        model = nn.Linear(3, 1)
        ddp.fit(
            model,
            (torch.zeros(NUM_SAMPLES, 3), torch.zeros(NUM_SAMPLES, 1)),
            torch.optim.SGD(model.parameters(), lr=1.0),
            loss=F.mse_loss,
            global_batch=BATCH,
            max_steps=2,
            strategy="parameter_server",
            folder=None,
        )


def test_servers_that_are_lost_in_a_second_fit_without_folders_say_so() -> None:
    with pytest.raises(ddp.WorkersFailed, match=r"lost in a later fit of this program than this one.*give each fit a"):
        ddp.launch(lost_in_the_second, workers=1, servers=1)


def twice(folder: Path) -> list[Tensor]:
    """A training that stops and goes on, with a new model, and one that does not stop; each with all buffers."""
    found = []
    for path, until in (("halves", 3), ("halves", 8), ("whole", 8)):
        torch.manual_seed(until)  # first weights and buffers are the checkpoint's, and not this program's
        module = members.cnn().double()
        if path == "whole":
            torch.manual_seed(3)
            module = members.cnn().double()
        ddp.fit(
            module,
            members.samples("cnn"),
            torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9),
            loss=F.cross_entropy,
            global_batch=BATCH,
            max_steps=until,
            strategy="parameter_server",
            folder=ddp.Folder(folder / path, resume="auto", progress=False, curves=False),
        )
        found.append(torch.cat([each.double().flatten() for each in module.state_dict().values()]))
    return found


def test_a_run_that_goes_on_has_the_bits_of_one_that_did_not_stop(tmp_path: Path) -> None:
    _, halves, whole = ddp.launch(twice, tmp_path, workers=2, servers=1)[0]
    assert torch.equal(halves, whole)


# --- a checkpoint goes from any strategy to any other ----------------------------------------------------------------


class Enough(ddp.Callback):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        if state.step == 3:
            state.stop("enough")
            (self._folder / "enough").touch()


class Overtaken(Once):
    """Lets who first begins one of the four whole batches end after the other worker has made the rest."""

    def __init__(self, folder: Path) -> None:
        super().__init__(0.0)
        self._files = folder / "begun", folder / "enough"

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        begun, enough = self._files
        if len(batch[0]) < BATCH:
            return super().loss(model, batch)
        with contextlib.suppress(FileExistsError):
            begun.touch(exist_ok=False)
            stop_s = time.monotonic() + 20
            while current_role() is not None and not enough.exists() and time.monotonic() < stop_s:
                time.sleep(0.005)
        return super().loss(model, batch)


def partly(folder: Path, strategy: Any, *, stops: bool) -> tuple[int, Tensor]:
    """Two epochs, or four steps of them, in which one worker overtakes the other."""
    ledger.LEAST_LATE_S = 60.0  # nobody computes a copy of what the slow one has
    torch.manual_seed(0)
    module, data = Counts(), (torch.arange(NUM_SAMPLES), torch.zeros(NUM_SAMPLES))
    state = ddp.fit(
        module,
        data,
        torch.optim.SGD(module.parameters(), lr=1.0),
        loss=Overtaken(folder) if stops else Once(0.0),
        global_batch=BATCH,
        epochs=2,
        strategy=strategy,
        folder=ddp.Folder(folder, resume="auto", progress=False, curves=False),
        callbacks=[Enough(folder)] if stops else [],
    )
    return state.step, module.weight.detach()


def sampler_in(folder: Path) -> dict[str, Any]:
    (last,) = (folder / "checkpoints").glob("*step-*")
    found: dict[str, Any] = torch.load(last / "position.pt", weights_only=True)["sampler"]
    return found


ASYNC = ddp.ParameterServer(mode="async")


@pytest.mark.parametrize("order", ["async, auto", "auto, async"])
@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy_with_each_sample_once(order: str, tmp_path: Path) -> None:
    for strategy, stops in zip(order.split(", "), (True, False), strict=True):
        policy, servers = (ASYNC, 1) if strategy == "async" else ("auto", 0)
        found = ddp.launch(partly, tmp_path, policy, stops=stops, workers=2, servers=servers)
        if stops:
            assert found[0][0] == 4
            position = sampler_in(tmp_path)  # a worker that had leased one step alone leaves no hole when it ends it
            assert ("ahead" in position) == (position["consumed"] < 4 * BATCH)
            assert strategy == "async" or "ahead" not in position
    assert found[0][0] == 10
    assert times_counted(found[0][1], 2)


# --- bad input -------------------------------------------------------------------------------------------------------


def refused(how: Mapping[str, Any], strategy: Any) -> str:
    """What the first process of a launch with servers is told."""
    module = nn.Linear(2, 2) if "norm" not in how else nn.Sequential(nn.Linear(2, 2), ddp.SyncBatchNorm(2))
    given = {"loss": F.cross_entropy, "global_batch": 4, "epochs": 1, **{k: v for k, v in how.items() if k != "norm"}}
    try:
        ddp.fit(
            module,
            (torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64)),
            torch.optim.SGD(module.parameters(), lr=0.1),
            strategy=strategy,
            folder=None,
            **given,
        )
    except ValueError as error:
        return str(error)
    return ""


GROWS = ddp.BatchWarmup(2, 4, 4)
BAD: list[tuple[dict[str, Any], Any, str]] = [
    ({}, "auto", "servers=1: is for strategy='parameter_server', and with strategy='auto' the workers keep the param"),
    ({"clip_norm": 1.0}, ASYNC, "clip_norm=1.0: with mode='async' it would clip the gradients of one worker at a"),
    ({"global_batch": GROWS}, ASYNC, "a batch that grows from 2: with mode='async' batches of several sizes"),
    ({"norm": 1}, ASYNC, "SyncBatchNorm waits for the other workers, which do not wait here; take BatchNorm"),
    ({"precision": "fp16"}, "parameter_server", "precision='fp16' repeats steps with another loss scale"),
    ({}, ddp.ParameterServer(backup_workers=3), "backup_workers=3: leaves none of 3 worker(s) to compute the step"),
    (
        {"reading": ddp.Reading(max_unreadable=1)},
        ASYNC,
        "max_unreadable=1: with strategy='parameter_server' a worker cannot",
    ),
]


def test_what_servers_cannot_train_is_one_sentence() -> None:
    served_by = Role("server", 0, 3, 1, HashStore())
    set_role(served_by)
    try:
        for how, strategy, told in BAD:
            assert told in refused(how, strategy)
    finally:
        set_role(None)
        ddp.shutdown()
    assert "there are no servers; start them with ddp.launch(…, servers=1)" in refused({}, "parameter_server")


def attending(mode: Any = "async", **how: Any) -> tuple[WorkerThreads, Shared]:
    """What serves workers, without its threads."""
    serving, shared = object.__new__(WorkerThreads), Shared(ledger.Ledger(mode=mode, **how))
    serving._shared, serving.reply_s, serving._part = shared, 2.0, Role("server", 0, 2, 1, HashStore())
    return serving, shared


def test_a_worker_gets_its_answer_while_the_servers_evaluate() -> None:
    """So it does not take them for lost, however long that lasts."""
    serving, shared = attending()
    began_s = time.monotonic()
    with shared.parameters_lock:
        answer = serving._begin(None, 0, {})  # type: ignore[arg-type]
    assert answer == {"status": "wait"} and time.monotonic() - began_s < 3


def test_workers_that_wait_are_told_of_parts_that_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has done its part of a step leaves its part of the next one for that of a worker that is late."""
    monkeypatch.setattr(ledger, "LEAST_LATE_S", 0.0)
    serving, shared = attending("sync", num_parts=2)
    book = shared.ledger
    book.begin_epoch([ledger.Plan(step, 0, 4 * step, 4) for step in range(2)])
    held = {who: book.grant(who, most=2, now_s=0.0) for who in range(2)}
    assert book.begin(0, held[0][0], now_s=0.0) == "now" and book.returned(0, held[0][0], now_s=0.001)
    wish = {"then": ledger.as_plain(held[0][1]), "most": 2, "after": 0}
    with monkeypatch.context() as later:
        later.setattr(worker_threads, "now_s", lambda: 9.0)
        assert serving._try_begin(None, 0, wish) == {"status": "gone"} and shared.num_changes == 1  # type: ignore[arg-type]
        ((copy,),) = [serving._leases(0, 1)["leases"]]
    assert shared.num_changes == 2 and ledger.as_lease(copy).plan == held[1][0].plan


HELLO = {"index": 1, "incarnation": 0, "facts": {}}
LEASE = [1, [1, 0, 0, 4], 0, 1]
PUSH = {"what": "push", "lease": LEASE, "loss_sum": 1.0, "num_items": 4.0, "without": [], "then": None}
ODD: list[tuple[Any, Any]] = [  # the first message of a worker, and the second
    (None, None),
    ({"index": 1}, None),
    ({**HELLO, "index": "first"}, None),
    (HELLO, ["what"]),
    (HELLO, {"what": "leases"}),
    (HELLO, {"what": "leases", "most": "all"}),
    (HELLO, {"what": "begin", "then": [1], "most": 1, "after": None}),
    (HELLO, {"what": "forget", "key": 3}),
    (HELLO, {**PUSH, "lease": [1, ["first", 0, 0, 4], 0, 1], "buffers": {}}),
    (HELLO, {**PUSH, "buffers": {"none": torch.zeros(1)}}),
    (HELLO, {**PUSH, "buffers": {"mean": torch.zeros(2)}}),
    (HELLO, {**PUSH, "buffers": {}, "num_items": []}),
]


@pytest.mark.parametrize(("first", "second"), ODD)
def test_an_odd_message_ends_the_service_of_its_worker_alone(
    first: Any, second: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serving, shared = attending()
    shared.ledger.begin_epoch([ledger.Plan(1, 0, 0, 4)])
    serving._run_store, serving._pieces, serving._facts, serving._refusals = HashStore(), [], {}, {}  # type: ignore[assignment]
    serving._model, serving._policy = types.SimpleNamespace(module=Counts(), comm=None), ASYNC  # type: ignore[assignment]
    serving._parameters, serving._comms, told = {}, {}, list[Any]()
    comm = types.SimpleNamespace(abandon=told.append, close=lambda: told.append("closed"), is_broken=False)
    monkeypatch.setattr(worker_threads, "connected", lambda *_, **__: comm)
    heard = iter([first])
    monkeypatch.setattr(
        *(worker_threads, "broadcast_object"), lambda _, value, root: next(heard) if root else told.append(value)
    )
    said = types.SimpleNamespace(
        receive_values=lambda: second, send_values=told.append, receive_gradients=lambda _: {}, take_back=lambda: None
    )
    monkeypatch.setattr(worker_threads, "Edge", lambda *_, **__: said)
    serving._serve_worker(7)
    assert told[-1].startswith("server 0 cannot use what this worker has sent (") and "left out" in caplog.text
    assert shared.error is None and not shared.pushed and shared.num_here == 0 and not shared.ledger._workers
    if second is not None:
        heard = iter([first])
        serving._serve_worker(8)
        assert told[-2]["refused"].startswith("server 0 cannot use") and told[-1] == "closed"


class Ends(Folder):
    """A store in which the run is over as soon as a worker comes, whom the servers let in or not."""

    lets_in = False

    def add(self, key: str, amount: int) -> int:
        number = super().add(key, amount)
        self.set("over", json.dumps({"num_accepted": number if self.lets_in else number - 1}))
        if self.lets_in:
            self.set(f"0/welcome/{number - 1}", "")
        return number


def test_who_has_been_let_in_hears_from_the_servers_that_the_run_is_over(tmp_path: Path) -> None:
    """They wait for it, and would wait in vain for one that has gone."""
    home, comm = Ends(tmp_path), types.SimpleNamespace(abort_s=20.0)
    home.set("incarnation", "0")
    worker = Servers(Role("worker", 0, 2, 1, home), home, comm, nn.Linear(1, 1), ASYNC, facts={})  # type: ignore[arg-type]
    with pytest.raises(Over):
        worker._welcomed(Patience(20.0), lambda: None)
    home.lets_in = True
    (tmp_path / home._file("over").name).unlink()
    assert worker._welcomed(Patience(20.0), lambda: None) == (1, 0)


def test_a_worker_that_is_asked_to_stop_while_no_server_is_there_leaves(tmp_path: Path) -> None:
    def leave() -> None:
        raise Over({})

    home, comm = Folder(tmp_path), types.SimpleNamespace(abort_s=20.0)
    worker = Servers(Role("worker", 0, 2, 1, home), home, comm, nn.Linear(1, 1), ASYNC, facts={})  # type: ignore[arg-type]
    with pytest.raises(Over):
        worker.join(leave)


@pytest.mark.parametrize("seen", [None, torch.zeros(2)])
def test_a_buffer_of_another_shape_than_the_servers_is_named_by_the_worker(seen: Tensor | None) -> None:
    module: Any = nn.Linear(1, 1)
    servers = Servers(Role("worker", 0, 1, 1, HashStore()), HashStore(), module, module, ASYNC, facts={})
    servers._pulled = {} if seen is None else {"seen": seen}
    module.register_buffer("seen", torch.zeros(5))
    with pytest.raises(ConfigError, match=r"^buffer seen: has the shape \[5\] after a forward, but servers keep"):
        servers.push(None, None, then=None, num_ahead=1)  # type: ignore[arg-type]


def test_pushes_that_do_not_count_end_with_their_step() -> None:
    """Those of workers that have gone before server 0 has heard of them, and that no other server is told of."""
    service, (_, shared) = object.__new__(served.Service), attending()
    service._shared, service._parts, service._parameters = shared, {}, {}
    service._strategy = types.SimpleNamespace(model=types.SimpleNamespace(module=Counts()))  # type: ignore[assignment]
    for key in ((3, 0, 1), (3, 0, 2), (4, 0, 1)):
        shared.pushed[key] = Push({}, 1.0, 2.0, {}, [])
    assert service._write_gradients([(3, 0, 2)], [(1.0, 2.0, 4)], {}).num_items == 2
    assert list(shared.pushed) == [(4, 0, 1)]
