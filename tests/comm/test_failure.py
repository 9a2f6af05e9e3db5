"""A peer that dies, stops, stays away, or fails: every survivor names it, within the deadline and two seconds.

Tests: ddp/comm/watch/status.py, ddp/comm/watch/watchdog.py.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, collect, run_ranks, start_ranks, unfailed
from torch.distributed import HashStore

import ddp
from ddp.comm.objects import on_rank_zero
from ddp.comm.watch import status
from ddp.comm.watch import watchdog as watchdog_module
from ddp.comm.watch.call import Call
from ddp.comm.watch.watchdog import Watchdog
from ddp.errors import CommunicatorBroken, PeerLost
from ddp.process.clock import Patience
from ddp.replica.drop_in.in_backward import result_of

ABORT_S, CULPRIT, WORLD_SIZE = 4.0, 1, 3


def lose_a_peer(how: str, shared_memory: bool) -> tuple[str, int, int, str, float, str]:
    """The survivors' PeerLost: (message, rank, sequence, label, seconds that it took, what a second call says)."""
    comm = ddp.init(abort_s=ABORT_S, warn_s=1.0, shared_memory=shared_memory)
    comm.all_reduce(torch.ones(3), label="a good one")
    if comm.rank == CULPRIT:
        misbehave(how)
    elif how == "killed long before":
        time.sleep(1.5)  # its connections have broken by now: posting fails, not waiting
    start_s = time.monotonic()
    try:
        comm.all_reduce(torch.ones(300_000), label="bucket 0 (fc)")
    except PeerLost as lost:
        took_s = time.monotonic() - start_s
        try:
            comm.barrier()
        except CommunicatorBroken as broken:
            return str(lost), lost.rank, lost.sequence, lost.label, took_s, str(broken)
    return "nothing happened", -1, 0, "", 0.0, ""


def misbehave(how: str) -> None:
    if how.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "elsewhere":
        stuck_in_user_code()
    elif how == "failed":
        ddp.shutdown(failed="ValueError: bad pixel")
        raise ValueError("bad pixel")


def stuck_in_user_code() -> None:
    time.sleep(3 * ABORT_S)


@pytest.mark.parametrize(
    ("how", "shared_memory", "says"),
    [
        ("killed", True, "it shows no sign of life"),
        ("stopped", True, "it shows no sign of life"),
        ("elsewhere", True, "stuck_in_user_code"),
        ("failed", True, "it failed: ValueError: bad pixel"),
        ("killed", False, "it shows no sign of life"),
        ("killed long before", False, "it shows no sign of life"),
        ("stopped", False, "it shows no sign of life"),
    ],
)
@pytest.mark.quick(1)
def test_survivors_name_the_lost_rank(how: str, shared_memory: bool, says: str) -> None:
    started = start_ranks(lose_a_peer, WORLD_SIZE, how, shared_memory)
    try:
        results = unfailed(collect([started[0], started[2]], timeout_s=30))
        for message, rank, sequence, label, took_s, afterwards in results:
            assert rank == CULPRIT, message
            assert (sequence, label) == (2, "bucket 0 (fc)")
            assert took_s < 2 * ABORT_S
            assert "out of use since: lost rank 1" in afterwards
        assert any(says in message for message, *_ in results), results
    finally:
        started[CULPRIT][0].kill()


class SilentStore(HashStore):
    """A store whose process is stopped: it takes what it is told, and answers nothing any more."""

    def clone(self) -> SilentStore:
        return self

    def check(self, keys: list[str]) -> bool:
        threading.Event().wait(30)
        return False


@pytest.mark.slow
def test_a_silent_store_does_not_hold_up_the_verdict() -> None:
    watchdog = Watchdog(SilentStore(), 1, 3, generation=0, warn_s=100, abort_s=1)
    watchdog.set_hosts(["a", "b", "c"], {})
    start_s = time.monotonic()
    watchdog.begin(Call(7, "barrier"), 2)
    lost = watchdog.find_culprit(2)
    assert time.monotonic() - start_s < 1 + 2
    assert (lost.rank, lost.host, lost.sequence) == (0, "a", 7)
    assert "the store that the ranks share, on rank 0's host, does not respond" in str(lost)
    watchdog.leave()


def test_a_pause_is_no_wait_that_is_worth_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    store, told, now = HashStore(), list[str](), 1000.0
    watchdog, _ = pair = [Watchdog(store, rank, 2, generation=0, warn_s=10, abort_s=600) for rank in range(2)]
    for each in pair:
        each._stopped.set()
        each._thread.join()
    for module in (status, watchdog_module):
        monkeypatch.setattr(module, "now_s", lambda: now)
    monkeypatch.setattr(watchdog_module.log, "warning", lambda text, *values: told.append(text % values))
    watchdog.begin(Call(7, "barrier"), 1)
    for pause_s in (0, 2, 100, 2, 2, 2, 2, 1):
        assert not told
        now += pause_s
        watchdog._warn_if_late(watchdog.board.observe())
    now += 1
    watchdog._warn_if_late(watchdog.board.observe())
    assert ["has waited 10 s for rank 1" in text for text in told] == [True]

    def read_and_be_paused(read: Callable[[], Any] = watchdog.board.read_all) -> Any:
        nonlocal now
        now += 100
        return read()

    monkeypatch.setattr(watchdog.board, "read_all", read_and_be_paused)
    watchdog.board.observe()
    assert watchdog.board.observe().silent_s[1] < 60


def never_comes() -> str:
    if os.environ["RANK"] == "1":
        return ""
    start_s = time.monotonic()
    with pytest.raises(PeerLost, match=r"lost rank 1.*\[start-up\]: of 3 ranks, \[1\] did not come within 2 s"):
        ddp.init(warn_s=1.0, abort_s=2.0)
    assert time.monotonic() - start_s < 4
    return "named"


def test_a_rank_that_never_comes_is_named() -> None:
    assert run_ranks(never_comes, 3) == ["named", "", "named"]


def slow_on_rank_zero() -> tuple[str, str]:
    """Rank 0 works for longer than the deadline, then fails at something: both are shared."""
    comm = ddp.init(abort_s=1.0)
    value = on_rank_zero(comm, slow, label="saving")
    with pytest.raises(OSError, match="disk full") as raised:
        on_rank_zero(comm, fails, label="saving")
    comm.barrier()
    ddp.shutdown()
    return value, str(raised.value)


def slow() -> str:
    time.sleep(2.5)
    return "saved"


def fails() -> str:
    raise OSError("disk full")


def test_rank_zero_may_take_its_time_and_its_error_is_everyone_s() -> None:
    assert run_ranks(slow_on_rank_zero, 3) == [("saved", "disk full")] * 3


def leave_early() -> str:
    comm = ddp.init(abort_s=ABORT_S)
    if comm.rank == CULPRIT:
        comm.close()
        time.sleep(2)
        return ""
    with pytest.raises(PeerLost, match=r"lost rank 1.*it has left already"):
        comm.barrier()
    return "named"


def test_a_rank_that_left_is_named() -> None:
    assert run_ranks(leave_early, 2) == ["named", ""]


def leave_after_its_part(how: str) -> float:
    """The last collective is a gather to rank 0: rank 2 has done its part and goes while rank 1 still computes."""
    watchdog_module.SILENCE_S = 1.0
    comm = ddp.init(abort_s=30)
    if comm.rank == 1:
        time.sleep(5)
    total = sum(float(each.sum()) for each in comm.gather(torch.ones(3)))
    if comm.rank == 2 and how == "leaves":
        comm.close()
    return total


@pytest.mark.slow
def test_a_rank_that_left_after_its_part_is_not_missed() -> None:
    jobs = {how: start_ranks(leave_after_its_part, 3, how) for how in ("leaves", "ends")}  # the latter by os._exit
    for how, job in jobs.items():
        assert collect(job, timeout_s=30) == [9.0, 0.0, 0.0], how


def late_but_not_lost() -> tuple[float, str]:
    """Rank 1 comes after the warning and before the deadline: one warning, no error."""
    import logging

    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("ddp").addHandler(Keep())
    comm = ddp.init(abort_s=20, warn_s=1.0)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(2.5)
    total = comm.all_reduce(torch.ones(1), label="late")
    ddp.shutdown()
    return total.item(), "\n".join(lines)


def test_a_late_rank_is_warned_about_with_its_stack_and_waited_for() -> None:
    results = run_ranks(late_but_not_lost, 2)
    assert [total for total, _ in results] == [2.0, 2.0]
    warning = results[0][1]
    assert warning.count("has waited") == 1
    assert re.search(r"\[late\] has waited [12] s for rank 1", warning)
    assert "late_but_not_lost (test_failure.py:" in warning


def five_sessions() -> list[float]:
    totals = []
    for _ in range(5):
        comm = ddp.init()
        assert ddp.init() is comm
        totals.append(comm.all_reduce(torch.ones(1)).item())
        ddp.shutdown()
        ddp.shutdown()
        assert not dist.is_initialized()
    return totals


def test_sessions_one_after_another_in_the_same_processes() -> None:
    assert run_ranks(five_sessions, 2) == [[2.0] * 5] * 2


def wrong_device() -> Any:
    from ddp.errors import ConfigError

    if torch.cuda.is_available():
        return None
    with pytest.raises(ConfigError, match="device=cuda, but torch sees no GPU here; use device=cpu"):
        ddp.init(device="cuda")
    with pytest.raises(ConfigError, match="backend=nccl, but torch sees no GPU here; use device=cpu and backend=gloo"):
        ddp.init(backend="nccl")
    with pytest.raises(ConfigError, match="backend=nccl needs a GPU for each rank, but tensors are on the CPU"):
        ddp.init(device="cpu", backend="nccl")
    return None


def test_impossible_devices() -> None:
    run_ranks(wrong_device, 1)


def test_a_dead_rank_is_reported_by_the_test_helper_itself() -> None:
    with pytest.raises(RankFailed, match="exit code -9"):
        run_ranks(misbehave, 1, "killed")


def wait_while_paused(shared_memory: bool) -> float:
    """Rank 0 waits in a collective for rank 1 while the test stops both for longer than the deadline."""
    comm = ddp.init(abort_s=2.0, warn_s=1.0, shared_memory=shared_memory)
    comm.barrier()
    Path(os.environ["READY"], f"{shared_memory}{comm.rank}").touch()
    if comm.rank == 1:
        time.sleep(1.5)
    return comm.all_reduce(torch.ones(3), label="across the pause").sum().item()


@pytest.mark.slow
def test_a_job_that_was_paused_for_longer_than_its_deadline_goes_on(tmp_path: Path) -> None:
    """Ctrl-Z and fg, a frozen container, a suspended laptop."""
    jobs = [start_ranks(wait_while_paused, 2, route, environment={"READY": str(tmp_path)}) for route in (True, False)]
    while len(list(tmp_path.iterdir())) < 4:
        time.sleep(0.01)
    time.sleep(0.3)
    processes = [process for job in jobs for process, _ in job]
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(4.0)
    for process in processes:  # rank 0, which waits, first
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.05)
    assert [collect(job, timeout_s=30) for job in jobs] == [[6.0, 6.0]] * 2


def test_patience_begins_anew_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([100.0, 101.0, 103.5, 500.0, 502.0, 504.0, 504.9, 505.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(moments))
    patience = Patience(5.0)
    left = [patience.left_s() for _ in range(7)]
    assert left == pytest.approx([4.0, 1.5, 5.0, 3.0, 1.0, 0.1, 0.0])


def outlast_the_silence(what: str, shared_memory: bool) -> tuple[str, float]:
    """The application's process group has a timeout of 30 s; a rank may be silent for 1.5 s."""
    watchdog_module.SILENCE_S = 1.5
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    comm = ddp.init(shared_memory=shared_memory)
    comm.barrier()
    if comm.rank == 1 and what == "busy":
        stop_s = time.monotonic() + 4.0
        while time.monotonic() < stop_s:  # evaluates, writes a checkpoint, fetches a file
            time.sleep(0.01)
    elif comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    start_s = time.monotonic()
    try:
        if what == "stopped in a hook":
            future: torch.futures.Future[int] = torch.futures.Future()
            result_of(comm, future, hook="a hook", where="step 0")
        comm.all_reduce(torch.ones(3), label="gradients")
    except PeerLost as lost:
        return str(lost), time.monotonic() - start_s
    return "done", time.monotonic() - start_s


@pytest.mark.slow
def test_a_rank_that_lives_is_waited_for_and_one_that_does_not_is_named_soon() -> None:
    """Long before the process group's timeout, which holds for the living."""
    cases = [("busy", True), ("busy", False), ("stopped", True), ("stopped", False), ("stopped in a hook", True)]
    jobs = [start_ranks(outlast_the_silence, 2, *case) for case in cases]
    for (what, _), job in zip(cases, jobs, strict=True):
        try:
            (message, took_s), *_ = unfailed(collect(job[: None if what == "busy" else 1], timeout_s=40))
        finally:
            job[1][0].kill()
        if what == "busy":
            assert message == "done"
            assert took_s > 3
        else:
            assert re.search("lost rank 1 .*it shows no sign of life for [0-9]+ s", message)
            assert took_s < 8


def lose_rank_zero_while_it_writes(shared_memory: bool) -> tuple[str, float]:
    """A checkpoint is waited for at the store, where no connection breaks."""
    comm = ddp.init(shared_memory=shared_memory)
    comm.barrier()
    start_s = time.monotonic()
    with pytest.raises(PeerLost) as lost:
        on_rank_zero(comm, lambda: os.kill(os.getpid(), signal.SIGKILL), label="checkpoint of step 3")
    return str(lost.value), time.monotonic() - start_s


@pytest.mark.parametrize("shared_memory", [True, False])
def test_who_waits_for_rank_zero_s_disk_does_not_wait_for_a_dead_one(shared_memory: bool) -> None:
    started = start_ranks(lose_rank_zero_while_it_writes, 2, shared_memory)
    _, (message, took_s) = collect(started, timeout_s=30)
    assert re.search(
        r"lost rank 0 .*\[checkpoint of step 3\]: it shows no sign of life: its process has ended", message
    )
    assert took_s < 3
