"""An elastic launch over several hosts: others join it, die, leave, are cut off, and cut themselves off.

Tests: ddp/run/launch/elastic.py, ddp/run/launch/processes.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import forked
import pytest
from test_survive import SIGKILL, SIGTERM, check, launched, train, until
from torch.distributed import DistError, HashStore  # type: ignore[attr-defined]

from ddp.comm.meeting import rendezvous, secret
from ddp.comm.meeting.membership import Hosts, elastic
from ddp.comm.meeting.role import Role, RoleSettings
from ddp.errors import ConfigError, PeerLost
from ddp.run.launch import command_line, supervisor, torchrun
from ddp.run.launch import elastic as supervisors
from ddp.run.launch.elastic import ElasticSupervisor, HelpingSupervisor
from ddp.run.launch.from_python import CALL, folder_for_call, result_file
from ddp.run.launch.processes import help_workers, run_workers
from ddp.run.launch.supervisor import Ended
from ddp.run.settings.config import Config
from ddp.train.survive import _next_ranks

SECRET = "s" * 32


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.setenv(secret.VARIABLE, SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return rendezvous.open_to_hosts("127.0.0.1", port)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ddp.run.launch.supervisor.started", forked.Started)
        return launched(tmp_path_factory.mktemp("of-3"), [], workers=3)


def with_a_helper(
    folder: Path, where: Sequence[tuple[Any, ...]], meeting: Hosts, *, restarts: int = 0
) -> tuple[Ended, Ended, list[Any]]:
    """Two workers here, to which a launcher on another host, which is this one, adds one: both ends, and results."""
    limits = elastic(min_workers=1, workers=2, max_workers=3)
    there = Hosts(meeting.address, meeting.port, rendezvous.hosts_store(meeting.address, meeting.port))
    helped = SimpleQueue[Ended]()
    with folder_for_call(2, train, (folder, where, {"folder": None}, True), {}) as call:
        words, logs = ["--call", str(call / CALL), "--timeout", "60"], call / "logs"
        how: dict[str, Any] = {"threads": 1, "logs": logs}

        def help_them() -> None:
            helped.put(help_workers(words, hosts=there, restarts=restarts, silent_s=20.0, **how))

        thread = threading.Thread(target=help_them)
        thread.start()
        end = run_workers(words, workers=2, elastic=limits, hosts=meeting, **how)
        thread.join(20)
        files = [result_file(call, number) for number in end.members or ()]
        results = [pickle.loads(file.read_bytes()) for file in files if file.exists()]
    return end, helped.get(timeout=1), results


def test_a_process_of_another_host_joins(meeting: Hosts, undisturbed: list[Any], tmp_path: Path) -> None:
    end, helped, results = with_a_helper(tmp_path, [(0, 0, 3, "forward", "waits")], meeting)
    assert not end.failures and not helped.failures and not helped.is_cut_off
    assert [found[1:3] for found in results] == [(3, 1)] * 3
    check(results, tmp_path, undisturbed)


@pytest.mark.quick(1)
def test_it_dies_and_its_launcher_starts_another(
    meeting: Hosts, undisturbed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisors, "CALM_S", 0.1)
    where = [(0, 0, 2, "forward", "waits"), (1, 2, 4, "backward", SIGKILL), (2, 0, 5, "forward", "waits")]
    end, helped, results = with_a_helper(tmp_path, where, meeting, restarts=1)
    assert not end.failures and not helped.failures
    assert [found[1:3] for found in results] == [(3, 3)] * 3
    check(results, tmp_path, undisturbed)


def test_it_leaves(meeting: Hosts, undisturbed: list[Any], tmp_path: Path) -> None:
    where = [(0, 0, 2, "forward", "waits"), (1, 2, 4, "step_start", SIGTERM), (1, 0, 5, "forward", "waits")]
    end, helped, results = with_a_helper(tmp_path, where, meeting, restarts=1)
    assert not end.failures
    assert [failure.status for failure in helped.failures.values()] == [128 + SIGTERM]
    assert [found[1:3] for found in results] == [(2, 2)] * 2
    check(results, tmp_path, undisturbed)


def test_rank_0_dies_and_the_other_host_goes_on(meeting: Hosts, undisturbed: list[Any], tmp_path: Path) -> None:
    where = [(0, 0, 2, "forward", "waits"), (1, 0, 4, "backward", SIGKILL), (2, 0, 6, "step_end", SIGKILL)]
    end, _, results = with_a_helper(tmp_path, where, meeting)
    assert not end.failures
    assert [found[1:3] for found in results] == [(1, 3)]
    check(results, tmp_path, undisturbed)


def test_what_it_raises_ends_the_run(meeting: Hosts, tmp_path: Path) -> None:
    where = [(0, 0, 2, "forward", "waits"), (1, 2, 4, "forward", "raises")]
    end, helped, _ = with_a_helper(tmp_path, where, meeting)
    assert 2 in end.failures and 2 in helped.failures


# --- without processes -----------------------------------------------------------------------------------------------


class Told:
    """A process that ends when it is told to, and notes signals."""

    pid = 0

    def __init__(self, *_: Any) -> None:
        self.status = SimpleQueue[int]()

    def wait(self) -> int:
        return self.status.get()


class Helper(HelpingSupervisor):
    """A launcher on another host, whose process is `Told`."""

    def __init__(self, store: Any, folder: Path, **how: Any) -> None:
        self.events: Any = SimpleQueue()
        self.sent: list[tuple[str, int]] = []
        super().__init__(["command"], self.events, store, logs=folder, **{"restarts": 0, "silent_s": 5.0, **how})

    def _send(self, number: signal.Signals, rank: int) -> None:
        self.sent.append((number.name, rank))
        process: Any = self._running[rank].process
        process.status.put(-number)


class Leader(ElasticSupervisor):
    """The launcher that has begun the run, whose processes are `Told`."""

    def __init__(self, store: Any, folder: Path, *, restarts: int = 0, **numbers: Any) -> None:
        limits = elastic(**{"min_workers": 1, "workers": 1, "max_workers": 2, "silent_s": 0.4, **numbers})
        assert limits is not None
        roles = [Role("worker", 0, 1, 0, store)]
        how: dict[str, Any] = {"restarts": restarts, "logs": folder, "elastic": limits, "store": store, "again": []}
        super().__init__([[]], roles, SimpleQueue(), **how)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp.run.launch.supervisor.started", Told)


def looks(supervisor: Any, holds: Callable[[], object]) -> None:
    end_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end_s
        supervisor._look()
        time.sleep(0.01)


def test_a_launcher_looks_again_after_a_long_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill, process, looks, has_looked = os.kill, Told(), list[float](), list[bool]()
    process.pid = 1 << 30  # nobody's
    monkeypatch.setattr("ddp.run.launch.supervisor.started", lambda words: process)
    monkeypatch.setattr(ElasticSupervisor, "_look", lambda self: looks.append(time.monotonic()))

    def stop(pid: int, number: int) -> None:
        if number == signal.SIGSTOP:  # as if this process were stopped for longer than it waits
            until(lambda: time.monotonic() - looks[-1] > 2 * supervisor.POLL_S)
        else:
            kill(pid, number)

    def pause() -> None:
        until(lambda: looks)
        kill(os.getpid(), signal.SIGTSTP)
        before = len(looks)
        with contextlib.suppress(AssertionError):
            until(lambda: len(looks) > before + 1, within_s=5)
        has_looked.append(len(looks) > before + 1)
        process.status.put(0)

    monkeypatch.setattr("ddp.run.launch.supervisor.os.kill", stop)
    thread = threading.Thread(target=pause)
    thread.start()
    run_workers([], workers=1, threads=1, logs=tmp_path, elastic=elastic(min_workers=1, workers=1))
    thread.join(20)
    assert has_looked == [True]


class Unreachable(HashStore):
    """A store that answers, does not answer, or has ended."""

    state = "answers"

    def set(self, key: str, value: Any) -> None:
        if self.state == "is silent":
            time.sleep(60)
        if self.state == "has ended":
            raise DistError("Broken pipe")
        super().set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        if self.state == "has ended":
            raise DistError("Broken pipe")
        return bool(super().check(keys))


@pytest.mark.parametrize(("state", "sent"), [("is silent", "SIGKILL"), ("has ended", "SIGTERM")])
def test_a_host_that_is_cut_off_ends_its_process(state: str, sent: str, told: None, tmp_path: Path) -> None:
    store = Unreachable()
    store.set("number/1", "7")
    helper, ends = Helper(store, tmp_path, silent_s=0.3, restarts=3), list[Ended]()
    thread = threading.Thread(target=lambda: ends.append(helper.run()))
    thread.start()
    until(lambda: 7 in helper._running)
    store.state = state
    thread.join(20)
    assert {*helper.sent} == {(sent, 7)}  # if the launcher has ended, the ranks agree to stop, and save
    assert ends[0].is_cut_off and not ends[0].failures


def test_a_host_that_is_out_of_reach_is_lost(told: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    leader = Leader(store, tmp_path)
    leader._start(0)
    assert store.add("requests", 1) == 1
    for key, value in {"arrives/1": "there", "open": "", "ready/1": ""}.items():
        store.set(key, value)
    looks(leader, lambda: leader._membership.latest.members == [0, 1])
    assert store.get("number/1") == b"1"
    used = iter(range(10_000))

    def beat() -> bool:
        store.set("used/1", str(next(used)))
        store.set("alive/0", str(next(used)))
        return time.monotonic() > end_s

    end_s = time.monotonic() + 1.0
    looks(leader, beat)
    assert leader._membership.latest.members == [0, 1]  # a long compilation, say
    end_s = time.monotonic() + 1.0
    store.set("used/1", "")
    leader._membership.time_used = lambda process: ""  # type: ignore[method-assign]
    looks(leader, beat)
    assert leader._membership.latest.members == [0]
    assert store.get("ends/1") == b"SIGKILL"  # for a launcher that is back
    assert "process 1 has shown no sign of life for too long" in caplog.text


def test_where_too_few_are_left_none_waits_to_be_started(told: None, tmp_path: Path) -> None:
    leader = Leader(HashStore(), tmp_path, restarts=1, spares=1)
    leader._start(0), leader._start(1)
    for process in (1, 0):  # at once, though the first one's place was to be taken later
        leader._end_of(process, -SIGKILL)
    assert {*leader._running} == {2, 3} and not leader._failures


def test_a_request_after_the_end_is_refused(told: None, tmp_path: Path) -> None:
    store = HashStore()
    leader = Leader(store, tmp_path)
    leader._start(0)
    store.set("closed", "")
    thread = threading.Thread(target=looks, args=(leader, lambda: store.check(["number/1"])))
    thread.start()
    with pytest.raises(ConfigError, match=r"^cluster.role=worker: the run is ending, and nobody joins any more"):
        Helper(store, tmp_path).run()
    thread.join(20)


def test_a_request_of_a_launcher_that_has_ended_holds_up_nobody(told: None, tmp_path: Path) -> None:
    store = HashStore()
    leader = Leader(store, tmp_path)
    leader._start(0)
    assert store.add("requests", 2) == 2  # the first one was killed before it has said its name
    store.set("arrives/2", "there")
    looks(leader, lambda: store.check(["number/2"]))
    store.set("arrives/1", "late")
    looks(leader, lambda: store.check(["number/1"]))
    assert [store.get(f"number/{request}") for request in (2, 1)] == [b"1", b"2"]


def test_a_process_that_its_launcher_has_left_is_not_waited_for(told: None, tmp_path: Path) -> None:
    store, end_s = HashStore(), time.monotonic() + 20
    leader = Leader(store, tmp_path, silent_s=1000.0)
    assert store.add("requests", 1) == 1
    store.set("arrives/1", "there")
    leader._start(0)
    looks(leader, lambda: 1 in leader._running)
    store.set("closed", "")
    leader._end_of(0, 0)
    assert store.get("ends/1") == b"SIGTERM"
    leader._end_within(0.0)
    while 1 in leader._running:
        leader._look()
        assert time.monotonic() < end_s
    assert store.get("ends/1") == b"SIGKILL"


@pytest.mark.parametrize("has_run", [False, True])
def test_a_launcher_that_is_stopped_starts_no_process(has_run: bool, told: None, tmp_path: Path) -> None:
    store, ends = HashStore(), list[Ended]()
    helper = Helper(store, tmp_path, restarts=1)
    for number in ("1", "2"):
        store.set(f"number/{number}", number)
    if has_run:
        thread = threading.Thread(target=lambda: ends.append(helper.run()))
        thread.start()
        until(lambda: 1 in helper._running)
        process: Any = helper._running[1].process
        process.status.put(-SIGKILL)
        until(lambda: helper._waiting is not None)  # another one is due
        helper.events.put(signal.SIGTERM)
        thread.join(20)
    else:
        helper.events.put(signal.SIGTERM)
        ends.append(helper.run())
    assert ends[0].signal is signal.SIGTERM and not helper.sent


def test_a_process_that_comes_too_late_is_no_failure(told: None, tmp_path: Path) -> None:
    store, ends = HashStore(), list[Ended]()
    store.set("number/1", "1")
    helper = Helper(store, tmp_path, restarts=1)
    thread = threading.Thread(target=lambda: ends.append(helper.run()))
    thread.start()
    until(lambda: 1 in helper._running)
    for key, value in {"closed": "", "ends/1": "SIGTERM"}.items():
        store.set(key, value)
    thread.join(20)
    assert helper.sent == [("SIGTERM", 1)] and not ends[0].failures and not ends[0].is_cut_off


class Ending(HashStore):
    """A store that ends with the launcher that serves it, once that knows of the end of process 1."""

    has_ended = False

    def check(self, keys: Sequence[str]) -> bool:
        if self.has_ended:
            raise RuntimeError("Connection reset by peer")
        return bool(super().check(keys))

    def set(self, key: str, value: Any) -> None:
        super().set(key, value)
        self.has_ended = key == "gone/1"


def test_the_first_launcher_ends_as_soon_as_it_knows(told: None, tmp_path: Path) -> None:
    store, ends = Ending(), list[Ended]()
    store.set("number/1", "1")
    helper = Helper(store, tmp_path)
    thread = threading.Thread(target=lambda: ends.append(helper.run()))
    thread.start()
    until(lambda: 1 in helper._running)
    process: Any = helper._running[1].process
    process.status.put(0)
    thread.join(20)
    assert not ends[0].is_cut_off and not ends[0].failures


@pytest.mark.parametrize(
    ("address", "value", "says"),
    [
        ("127.0.0.1", "", r"MASTER_ADDR=127.0.0.1 with .*, but DDP_SECRET is not set: set it, on each host the same"),
        ("127.0.0.1", "short", r"DDP_SECRET has 5 characters"),
        ("192.0.2.1", SECRET, r"MASTER_ADDR=192.0.2.1 .* it is no address of this host: set one of its own"),
    ],
)
def test_where_hosts_cannot_meet(address: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.VARIABLE, value)
    with pytest.raises(ConfigError, match=says):
        rendezvous.open_to_hosts(address, 29_500)


def test_another_program_at_that_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.VARIABLE, SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        says = rf"MASTER_PORT={port}: this launcher cannot serve the store of the hosts there .*; give all hosts"
        with pytest.raises(ConfigError, match=says):
            rendezvous.open_to_hosts("127.0.0.1", port)


@pytest.mark.parametrize("value", ["", "t" * 32])
def test_another_secret_is_named_soon(
    value: str, meeting: Hosts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rendezvous.describe_to_hosts(meeting, {"workers": 0})
    me = RoleSettings("worker", None, None, meeting.address, meeting.port)
    assert rendezvous.arrive(me, dict, warn_s=5, abort_s=5)[1] == {"workers": 0, "servers": 0}
    monkeypatch.setenv(secret.VARIABLE, value)
    with pytest.raises(PeerLost, match=r"an elastic run's first launcher at .* has gone, has another DDP_SECRET, or"):
        rendezvous.arrive(me, dict, warn_s=0.1, abort_s=0.3)
    assert "it is being prepared, or has another DDP_SECRET" in caplog.text


@pytest.mark.parametrize(
    ("value", "memory_steps", "says"), [("", 0, "DDP_SECRET is not set"), (SECRET, 5, "take checkpoint.every_steps=5")]
)
def test_what_is_refused_leaves_no_run(
    value: str, memory_steps: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, word in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", secret.VARIABLE: value}.items():
        monkeypatch.setenv(name, word)
    config = Config()
    config.cluster.workers, config.cluster.min_workers = 2, 1
    config.checkpoint = replace(config.checkpoint, memory_steps=memory_steps)
    with pytest.raises(ConfigError, match=says):
        command_line._trained(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_host_without_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {"config": asdict(Config()), "run_dir": str(tmp_path / "elsewhere"), "typed": [], "workers": 0, "servers": 0}
    role = Role("worker", 0, 0, 0, HashStore())
    monkeypatch.setattr(rendezvous, "arrive", lambda *_, **__: (role, run))
    monkeypatch.setattr(torchrun, "prepare_host", lambda _: {})
    monkeypatch.setattr(sys, "argv", ["train", "cluster.role=worker"])
    with pytest.raises(SystemExit) as left:
        torchrun.train_by_hand(RoleSettings("worker", None, None, "127.0.0.1", 29_500))
    assert left.value.code == 2
    said = rf"error: cluster.role=worker: {tmp_path}/elsewhere, the folder of the run, is not on this host, .* one file"
    assert re.match(said, capsys.readouterr().err)
    assert not (tmp_path / "elsewhere").exists()


def test_a_store_that_ends_with_its_launcher_is_no_error_of_its_own() -> None:
    store, lost = Unreachable(), PeerLost(0, "there", 1, 2, "all_reduce", "the store is out of reach")
    store.state = "has ended"
    with pytest.raises(PeerLost) as raised:
        _next_ranks(SimpleNamespace(store=store), lost)  # type: ignore[arg-type]
    assert raised.value is lost


# --- from the command line -------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
TRAIN = [sys.executable, "-m", "ddp", "train"]
FIRST = ["run.name=mine", "cluster.workers=2", "cluster.min_workers=2", "cluster.max_workers=3", "epochs=1000"]


launchers: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    yield
    for launcher in launchers:
        launcher.kill()
        launcher.wait()
    launchers.clear()


def started(folder: Path, name: str, *words: str, **variables: str) -> subprocess.Popen[bytes]:
    given = {**os.environ, "DDP_SECRET": SECRET, "PYTHONPATH": str(ROOT), **variables}
    with (folder / name).open("wb") as output:
        process = subprocess.Popen(words, cwd=folder, env=given, stdout=output, stderr=output)
        launchers.append(process)
        return process


def begun(folder: Path, address: str, *settings: str, on: Callable[[int], Sequence[str]] = lambda host: ()) -> Any:
    """The two launchers, once the second host's worker has trained."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = {"MASTER_ADDR": address, "MASTER_PORT": str(server.getsockname()[1])}
    first = started(folder, "first", *on(0), *TRAIN, *FIRST, *settings, **there)
    second = started(folder, "second", *on(1), *TRAIN, "cluster.role=worker", **there)
    log = folder / "runs" / "mine" / "logs" / "rank-2.log"
    until(lambda: log.exists() and "step" in log.read_text(), within_s=60)
    return first, second


def ended(folder: Path, first: subprocess.Popen[bytes]) -> tuple[int, dict[str, Any], list[str]]:
    """Its status, the summary, and what both have printed; each step was made once."""
    status = first.wait(60)
    run = folder / "runs" / "mine"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert len(steps) == len({*steps})
    summary = json.loads((run / "summary.json").read_text())
    return status, summary, [(folder / name).read_text() for name in ("first", "second")]


@pytest.mark.engine
def test_a_host_joins_and_leaves(tmp_path: Path) -> None:
    first, second = begun(tmp_path, "127.0.0.1")
    second.terminate()
    assert second.wait(60) == 128 + signal.SIGTERM
    until(lambda: "process 2 has left" in (tmp_path / "first").read_text())
    first.terminate()
    status, summary, (_, said) = ended(tmp_path, first)
    assert status == 128 + signal.SIGTERM
    assert {summary[f"workers_{what}"] for what in ("joined", "left")} == {1} and not summary["workers_lost"]
    assert said == "one process of this host joins runs/mine/; it writes to runs/mine/logs/\n"
    last = json.loads((tmp_path / "runs/mine/starts.jsonl").read_text().splitlines()[-1])["position"]["step"]
    where = [sys.executable, "-m", "ddp", "where", "runs/mine", "--step", str(last + 1)]
    told = subprocess.run(where, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert told.returncode == 0, told.stderr


@pytest.fixture
def bed() -> Iterator[Callable[..., list[str]]]:
    """Two hosts; returns the words before a command of the bed's."""
    words = [sys.executable, str(ROOT / "scripts" / "netbed" / "hosts.py"), "--name", f"join{os.getpid()}"]
    if os.geteuid() or subprocess.run([*words, "up", "2"], capture_output=True).returncode:
        pytest.skip("no network namespaces here")
    yield lambda *more: [*words, *map(str, more)]
    subprocess.run([*words, "down"], check=True)


@pytest.mark.slow
@pytest.mark.engine
def test_a_host_is_cut_off(bed: Callable[..., list[str]], tmp_path: Path) -> None:
    silent_s = 5
    first, second = begun(tmp_path, "10.77.0.1", f"cluster.silent_s={silent_s}", on=lambda host: bed("exec", host))
    subprocess.run(bed("cut", 1, "--silent"), check=True)
    cut_s, run = time.monotonic(), tmp_path / "runs" / "mine"
    until(lambda: "lost rank 2" in (run / "logs" / "rank-0.log").read_text(), within_s=60)
    metrics = run / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.exists() else 0  # the first steps may be computed again
    until(lambda: metrics.exists() and metrics.stat().st_size > size, within_s=60)
    assert silent_s - 1 < time.monotonic() - cut_s < silent_s + 15  # it is 0.3 s where nothing else runs
    assert second.wait(20) == 1
    subprocess.run(["pkill", "-TERM", "-f", rf"^{re.escape(sys.executable)} -m ddp train run.name=mine .*={silent_s}$"])
    status, summary, (_, said) = ended(tmp_path, first)
    assert status == 128 + signal.SIGTERM and summary["workers_lost"] == 1
    assert "the launcher that has begun the run is out of reach (no response within 5 s); this host leaves" in said
