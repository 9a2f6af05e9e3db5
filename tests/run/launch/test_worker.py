"""A worker's surroundings: reports of failures, the log it takes, the parent that it follows.

Tests: ddp/run/launch/failures.py.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddp.errors import CheckpointError, CommunicatorBroken, ConfigError, PeerLost
from ddp.run.launch.failures import Report, Seat
from ddp.run.launch.supervisor import SETTINGS
from ddp.run.launch.worker import guarded

LOST = PeerLost(1, "here", 0, 3, "all_reduce")
RING = ValueError("its own cause")


def raiser(error: Exception, cause: Exception | None = None) -> Report:
    try:
        raise error from cause
    except Exception as raised:
        return Report.of(raised, Seat(Path(), 2))


@pytest.mark.parametrize(
    ("error", "cause", "secondary"),
    [
        (ValueError("x"), None, False),
        (LOST, None, True),
        (CommunicatorBroken("x"), LOST, True),
        (RuntimeError("x"), LOST, True),
        (RuntimeError("x"), ValueError("y"), False),
        (RING, RING, False),
    ],
)
def test_only_a_lost_peer_makes_an_error_secondary(error: Exception, cause: Exception | None, secondary: bool) -> None:
    assert raiser(error, cause).is_secondary is secondary


def test_report_survives_the_file_and_its_block_ends_with_the_traceback(tmp_path: Path) -> None:
    report = raiser(ArithmeticError("scripted"))
    report.write(tmp_path)
    assert Report.read(Seat(tmp_path, 2)) == report
    assert Report.read(Seat(tmp_path, 0)) is None
    assert report.block().splitlines()[0].startswith(f"rank 2 on host {report.host} failed")
    assert report.block().splitlines()[-2] == "ArithmeticError: scripted"
    line = r"in your code: .*test_worker.py, line \d+, in raiser: raise error from cause"
    assert re.fullmatch(line, report.user_line)
    assert report.block().endswith(report.user_line)


def test_half_a_report_is_no_report(tmp_path: Path) -> None:
    (tmp_path / "error-rank-0.json").write_text('{"rank": 0')
    assert Report.read(Seat(tmp_path, 0)) is None


@pytest.mark.parametrize("error", [ConfigError("seed=-1: no"), CheckpointError("x is corrupt")])
def test_an_error_of_the_user_shows_no_traceback(error: Exception) -> None:
    assert "Traceback" not in raiser(error).block()
    assert str(error) in raiser(error).block()


def test_the_step_is_the_error_s_own() -> None:
    assert raiser(ValueError()).step is None
    error = ValueError()
    error.ddp_step = 11  # type: ignore[attr-defined]
    assert raiser(error).step == 11


def test_guarded_turns_an_exception_into_a_status_a_report_and_a_log(tmp_path: Path) -> None:
    assert guarded(lambda: None, Seat(tmp_path, 0)) == 0

    for rank, kind in enumerate((ArithmeticError, asyncio.CancelledError)):

        def work(kind: type[BaseException] = kind) -> None:
            raise kind("scripted")

        assert guarded(work, Seat(tmp_path, rank)) == 1
        report = Report.read(Seat(tmp_path, rank))
        assert report is not None and report.type == kind.__name__
        assert f"{kind.__name__}: scripted" in (tmp_path / f"rank-{rank}.log").read_text()
    with pytest.raises(SystemExit):
        guarded(lambda: sys.exit(3), Seat(tmp_path, 2))


def test_settings_are_read_where_nobody_else_may_write(tmp_path: Path) -> None:
    """Whoever may write the folder of a run could name code of their own there."""
    (tmp_path / "config.yaml").write_text("model: {name: 'evil:Net'}")
    (private := tmp_path / "private").mkdir()
    (private / SETTINGS).write_text("seed: -1")
    code = """
import os, sys, ddp.run.launch.worker
ddp.run.launch.worker.take_secret = lambda folder, **_: None
arguments = ["--rank", "1", "--parent", str(os.getppid()), "--private", f"{sys.argv[1]}/private", sys.argv[1]]
sys.exit(ddp.run.launch.worker.main(arguments))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == 1 and "seed=-1" in done.stderr and "evil" not in done.stderr


def test_only_rank_0_keeps_the_terminal(tmp_path: Path) -> None:
    code = """
import os, sys, logging
from pathlib import Path
from ddp.run.launch.failures import Seat
from ddp.run.launch.worker import take_log
rank = int(sys.argv[2])
take_log(Seat(Path(sys.argv[1]), rank), world_size=2)
print("python", rank, flush=True)
os.system(f"echo child {rank} >&2")
logging.getLogger("ddp").warning("logged")
"""
    shown = [
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), str(rank)], capture_output=True, text=True, check=True
        )
        for rank in (0, 1)
    ]
    assert shown[0].stdout == "python 0\n"
    assert "child 0" in shown[0].stderr and "logged" in shown[0].stderr
    assert shown[1].stdout == shown[1].stderr == ""
    log = (tmp_path / "rank-1.log").read_text()
    assert "python 1" in log and "child 1" in log and "rank 1/2 WARNING  logged" in log
    assert "logged" in (tmp_path / "rank-0.log").read_text()


def test_a_worker_that_ignores_sigterm_outlives_a_killed_parent_by_the_grace_only(tmp_path: Path) -> None:
    worker = """
import os, signal, sys, time
from ddp.run.launch.worker import follow_parent
follow_parent(int(sys.argv[1]), grace_s=0.2)
signal.signal(signal.SIGTERM, lambda *_: open(sys.argv[2], "w").close())
print(os.getpid(), flush=True)
while True:
    time.sleep(0.05)
"""
    parent = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]])
"""
    asked = tmp_path / "asked"
    process = subprocess.Popen([sys.executable, "-c", parent, worker, str(asked)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline(), "the worker is up"
    process.kill()
    process.wait()
    assert process.stdout.read() == "", "this pipe ends only when the worker is gone too"
    process.stdout.close()
    assert asked.exists(), "it was asked to stop before it was ended"


def test_a_worker_whose_parent_is_another_one_ends_at_once() -> None:
    code = "from ddp.run.launch.worker import follow_parent; follow_parent(1, grace_s=9); print('alive')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
