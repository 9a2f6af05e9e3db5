"""Servers and workers: the end of one touches no other, and each loss is answered as the supervisor's table says."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

import ddp
from ddp.comm.meeting.place import place
from ddp.comm.meeting.role import current_role, how_ended, is_done
from ddp.errors import ConfigError, PeerLost, WorkersFailed
from ddp.run.launch import supervisor
from ddp.run.launch.failures import status_text

DEADLINE_S = 20.0


def starts(folder: Path) -> list[str]:
    return sorted(path.name.partition(" as ")[0] for path in folder.glob("* as *"))


def state_of(pid: int) -> str:
    """The letter that the kernel has for it; "" once it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def alive(folder: Path) -> list[int]:
    pids = [int(path.name.partition(" as ")[2]) for path in folder.glob("* as *")]
    return [pid for pid in pids if state_of(pid) not in ("", "Z")]


def until(holds: Any, *, within_s: float = DEADLINE_S) -> None:
    stop_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < stop_s, f"not within {within_s} s"
        time.sleep(0.005)


def as_told(folder: Path, told: Mapping[str, Any], num_starts: int) -> tuple[str, int, str]:
    """Notes its start; then does what it is told, or ends well once there have been so many starts."""
    me = current_role()
    assert me is not None
    name = f"{me}.{me.incarnation}"
    (folder / f"{name} as {os.getpid()}").touch()
    match told.get(name):
        case int() as number:
            os.kill(os.getpid(), number)
        case "raises":
            raise ValueError(f"in {me}")
        case "blames":
            raise PeerLost(0, "here", 0, 0, "pull", "it has gone")
        case "exits":
            sys.exit(3)
        case "hangs":
            time.sleep(DEADLINE_S)
    until(lambda: len(starts(folder)) >= num_starts)
    found = ""
    if me.job == "server":
        if told.get("worker 1.0") in (SIGKILL, "blames"):
            until(lambda: how_ended(me.store, "worker", 1))
        comm = ddp.init()
        assert comm.all_reduce(torch.ones(1)) == me.num_servers
        ddp.shutdown()
        found = how_ended(me.store, "worker", 1)
    assert (here := place()) is not None
    assert (here.rank, here.world_size) == ((me.index, me.num_servers) if me.job == "server" else (0, 1))
    return str(me), me.incarnation, found


SIGKILL = int(signal.SIGKILL)
LOST = "PeerLost: lost rank 0 on host here during collective #0 [pull]: it has gone"
FAILED = r"{0} on host \S+ failed:\n(?s:.*)\nValueError: in {0}\n"


@pytest.mark.parametrize(
    ("workers", "servers", "restarts", "told", "num_starts", "results", "said"),
    [
        (
            *(2, 1, 3, {"worker 0.0": "exits", "worker 0.1": "blames", "worker 1.0": SIGKILL}, 6),
            [("server 0", 0, "was killed by SIGKILL"), ("worker 0", 2, ""), ("worker 1", 1, "")],
            [
                "worker 0 exited with status 3 and left no report; it is started again (1 of 3)",
                f"worker 0 has ended ({LOST}); it is started again (2 of 3)",
                "worker 1 was killed by SIGKILL; it is started again (1 of 3)",
            ],
        ),
        (
            *(2, 1, 0, {"worker 1.0": SIGKILL}, 3),
            [("server 0", 0, "was killed by SIGKILL"), ("worker 0", 0, ""), None],
            ["worker 1 was killed by SIGKILL; the others continue without it"],
        ),
        (
            *(2, 1, 0, {"worker 1.0": "blames"}, 3),
            [("server 0", 0, f"has ended ({LOST})"), ("worker 0", 0, ""), None],
            [f"worker 1 has ended ({LOST}); the others continue without it"],
        ),
        (
            *(1, 2, 2, {"server 1.0": 15, "server 0.0": "hangs", "server 0.1": "blames", "server 1.1": "hangs"}, 7),
            [("server 0", 2, ""), ("server 1", 2, ""), ("worker 0", 0, "")],
            [
                f"server 0 has ended ({LOST}); all servers are started again (2 of 2)",
                "server 1 was killed by SIGTERM; all servers are started again (1 of 2)",
            ],
        ),
        (
            *(2, 1, 3, {"worker 1.0": "hangs"}, 3),
            [("server 0", 0, ""), ("worker 0", 0, ""), None],
            ["worker 1 still runs 0 s after the servers have ended, and is killed"],
        ),
    ],
)
@pytest.mark.quick(1)
def test_the_others_go_on(
    workers: int,
    servers: int,
    restarts: int,
    told: Mapping[str, Any],
    num_starts: int,
    results: Sequence[Any],
    said: Sequence[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(supervisor, "FOLLOW_S", 0.3)
    for name in ("LEAVE_S", "START_S"):
        monkeypatch.setattr(supervisor, name, 0.3 if "hangs" in told.values() else 10.0)
    got = ddp.launch(as_told, tmp_path, told, num_starts, workers=workers, servers=servers, restarts=restarts)
    assert got == results
    assert sorted(record.getMessage() for record in caplog.records) == said
    assert len(starts(tmp_path)) == num_starts


@pytest.mark.parametrize(
    ("servers", "told", "who", "says"),
    [
        (1, {"worker 1.0": "raises", "worker 0.0": "hangs"}, 2, "^" + FAILED.format("worker 1")),
        (2, {"server 0.0": "blames", "server 1.0": "raises"}, 1, "(?m)^" + FAILED.format("server 1")),
        (1, {"server 0.0": SIGKILL}, 0, r"^server 0 was killed by SIGKILL \(out of memory\?\)"),
        (1, {"worker 0.0": SIGKILL, "worker 1.0": "exits"}, None, r"^worker \d (was killed by|exited with status 3)"),
    ],
)
@pytest.mark.quick(1)
def test_the_run_fails_with_its_root_cause(
    servers: int, told: Mapping[str, Any], who: int | None, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError if "raises" in told.values() else WorkersFailed, match=says) as failed:
        ddp.launch(as_told, tmp_path, told, 99, workers=2, servers=servers, restarts=0)
    assert isinstance(failed.value, WorkersFailed)
    assert who in (None, failed.value.rank)
    assert not alive(tmp_path)


def die_after_the_workers() -> None:
    """The server is killed once all workers have done their work."""
    if (me := current_role()) is not None and me.job == "server":
        until(lambda: all(is_done(me.store, f"worker {number}") for number in range(2)))
        os.kill(os.getpid(), signal.SIGKILL)


def test_servers_are_not_started_again_for_nobody() -> None:
    with pytest.raises(WorkersFailed, match=r"^server 0 was killed by SIGKILL"):
        ddp.launch(die_after_the_workers, workers=2, servers=1, restarts=3)


def save_at_the_end(folder: Path) -> None:
    """A server saves when it is asked to stop; a worker knows of nothing."""
    as_told(folder, {}, 0)
    try:
        time.sleep(DEADLINE_S)
    except KeyboardInterrupt:
        (folder / f"{current_role()} saves").touch()
        if (folder / "slow").exists():
            time.sleep(DEADLINE_S)


@pytest.mark.parametrize("second", [False, True])
def test_a_signal_asks_the_servers_and_a_second_one_ends_all(
    second: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "ECHO_S", 0.0)
    saved = tmp_path / "server 0 saves"

    def interrupt() -> None:
        until(lambda: len(starts(tmp_path)) == 3)
        time.sleep(0.2)  # they sleep by now
        os.kill(os.getpid(), signal.SIGINT)
        if second:
            until(saved.exists)
            os.kill(os.getpid(), signal.SIGTERM)

    if second:
        (tmp_path / "slow").touch()
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        ddp.launch(save_at_the_end, tmp_path, workers=2, servers=1)
    assert [path.name for path in tmp_path.glob("* saves")] == [saved.name]
    assert not alive(tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


PROGRAM = """
import sys, time
from pathlib import Path
import ddp

def train(folder):
    from ddp.comm.meeting.role import current_role
    import os
    (folder / f"{current_role()} as {os.getpid()}").touch()
    time.sleep(60)

if __name__ == "__main__":
    ddp.launch(train, Path.cwd(), workers=1, servers=1)
"""


def test_a_launcher_that_is_paused_pauses_all_and_one_that_is_killed_leaves_nobody(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    outputs = [Connection(os.dup(number)) for number in (1, 2)]
    words = (tmp_path / "program.py", dict(os.environ), tmp_path, outputs)
    launcher = forked._server().Process(target=forked._program, args=words)
    launcher.start()
    until(lambda: len(starts(tmp_path)) == 2)
    everyone = [launcher.pid, *alive(tmp_path)]
    os.kill(launcher.pid, signal.SIGTSTP)
    until(lambda: [state_of(pid) for pid in everyone] == ["T"] * 3)
    os.kill(launcher.pid, signal.SIGCONT)
    until(lambda: "T" not in [state_of(pid) for pid in everyone])
    launcher.kill()
    until(lambda: not alive(tmp_path))
    launcher.join()


def test_two_launches_at_once(tmp_path: Path) -> None:
    def launched(number: int) -> list[Any]:
        folder = tmp_path / str(number)
        folder.mkdir()
        return ddp.launch(as_told, folder, {"worker 0.0": SIGKILL}, 3, workers=1, servers=1)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(launched, range(2))) == [[("server 0", 0, ""), ("worker 0", 1, "")]] * 2


def launch_again() -> str:
    with pytest.raises(ConfigError) as refused:
        ddp.launch(launch_again, workers=1)
    return str(refused.value)


def test_a_server_and_a_worker_launch_nothing() -> None:
    server, worker = ddp.launch(launch_again, workers=1, servers=1)
    assert server == "ddp.launch(launch_again, …): this process is server 0 already: call launch_again() itself"
    assert "is worker 0 already" in worker


@pytest.mark.engine
def test_a_process_has_its_variables_and_a_session_of_its_own() -> None:
    program = "import os, signal, sys; os.kill(0 if os.environ['WHO'] == 'me' else 1, signal.SIGUSR1)"
    process = supervisor.started(["WHO=me", sys.executable, "-S", "-c", program])
    assert process.wait() == -signal.SIGUSR1


def test_a_status_is_named_also_if_its_signal_has_no_name() -> None:
    assert status_text(-9) == "was killed by SIGKILL" and status_text(-40) == "was killed by signal 40"
    assert status_text(3) == "exited with status 3 and left no report"
