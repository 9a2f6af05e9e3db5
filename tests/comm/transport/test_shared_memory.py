"""Memory shared by two mappings, and the barrier: everyone waits for everyone, and nobody for the dead."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import collect, run_ranks, start_ranks, unfailed

from ddp.comm.transport import shared_memory
from ddp.comm.transport.edge import TransportError
from ddp.comm.transport.shared_memory import (
    KINDS,
    Barrier,
    Kind,
    ProcessHandle,
    SharedMemory,
    copy_bytes,
    why_unsupported,
)
from ddp.process.memory import available_bytes

PAGE = 4096
RANKS = [10, 20, 30]  # what the processes are called, unlike their places


@pytest.fixture(autouse=True)
def _leaves_no_names() -> Iterator[None]:
    yield
    assert not list(Path("/dev/shm").glob(f"ddp-{os.getpid()}-*"))


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_writes_the_other_reads_also_after_the_name_is_gone(kind: Kind) -> None:
    mine = SharedMemory.create(kind, 3 * PAGE)
    yours = SharedMemory.attach(mine.path, 3 * PAGE)
    assert mine.address != yours.address
    mine.forget()
    with pytest.raises(OSError, match=r"."):
        SharedMemory.attach(mine.path, 3 * PAGE)
    assert not yours.bytes.any()
    mine.prefault(PAGE, 3 * PAGE)
    mine.bytes[PAGE + 5] = 7
    assert yours.buffer[PAGE + 5] == 7
    del mine
    yours.bytes[0] = 1
    assert yours.buffer[PAGE + 5] == 7


def test_only_memory_of_ours_is_mapped_whatever_path_a_neighbour_tells(tmp_path: Path) -> None:
    """Else one that lies could have a file of this user's written over, or cut memory off that is read here."""
    file = tmp_path / "notes"
    file.write_bytes(bytes(PAGE))
    link = Path(f"/dev/shm/ddp-{os.getpid()}-{'0' * 16}")
    link.symlink_to(file)
    with file.open("r+b") as opened:
        for path in (str(file), f"/proc/{os.getpid()}/fd/{opened.fileno()}", str(link), f"{link}/../../{file}"):
            with pytest.raises(OSError, match=r"is no memory of a neighbour|Too many levels of symbolic links"):
                SharedMemory.attach(path, PAGE)
    link.unlink()
    if os.geteuid() == 0:
        link.write_bytes(bytes(PAGE))
        os.chown(link, 65534, 65534)
        with pytest.raises(OSError, match="belongs to another user"):
            SharedMemory.attach(str(link), PAGE)
        link.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_more_memory_than_there_is_is_refused_at_once(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match=f"{1 << 50} bytes of shared memory wanted, [0-9]+ are left here"):
        SharedMemory.create(kind, 1 << 50)
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: float("inf"))  # then the kernel says so
    with pytest.raises(OSError, match=r"."):
        SharedMemory.create(kind, 1 << 62)


def test_an_offer_of_more_than_there_is_is_not_mapped() -> None:
    memory = SharedMemory.create("memfd", PAGE)
    with pytest.raises(OSError, match="mmap length"):
        SharedMemory.attach(memory.path, 2 * PAGE)
    memory.forget()
    memory.forget()


def prefault_without_populate_write() -> str:
    """On a kernel before 5.14, and with a page that would end the process if anybody wrote to it."""
    shared_memory._POPULATE_WRITE = 9999  # a request that no kernel knows
    memory = SharedMemory.create("memfd", 2 * PAGE)
    memory.bytes[PAGE] = 7
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(memory.address), 2 * PAGE, mmap.PROT_READ) == 0
    memory.prefault(0, 2 * PAGE)
    memory.forget()
    return f"read {memory.buffer[PAGE]}"


def test_on_an_old_kernel_pages_are_made_without_writing_to_them() -> None:
    """Else what a neighbour writes between the reading and the writing back is lost."""
    assert run_ranks(prefault_without_populate_write, 1) == ["read 7"]


GIB = 1 << 30


@pytest.mark.parametrize(
    ("cgroup", "groups", "left"),
    [
        ("0::/", {}, 8 * GIB),
        ("0::/a/b", {"a/b": ("max", GIB, 0), "a": (4 * GIB, 3 * GIB, GIB // 2)}, 3 * GIB // 2),
        ("0::/gone", {"": (2 * GIB, GIB, 0)}, GIB),  # a container sees its own group as the root
        ("0::/a", {"a": (GIB, 2 * GIB, 0)}, 0),
        ("5:cpu,memory:/a\n0::/", {"memory/a": (3 * GIB, GIB, 0)}, 2 * GIB),
        ("5:memory:/", {"memory": (9223372036854771712, GIB, 0)}, 8 * GIB),
        ("", {}, 8 * GIB),
    ],
)
def test_the_memory_that_is_left_counts_the_limits_of_a_container(
    tmp_path: Path, cgroup: str, groups: dict[str, tuple[int | str, int, int]], left: int
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(cgroup + "\n")
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 << 20} kB\n")
    names = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for folder, (limit, used, files) in groups.items():
        at = tmp_path / "cgroups" / folder
        at.mkdir(parents=True, exist_ok=True)
        limit_name, used_name, files_name = names[folder.startswith("memory")]
        (at / limit_name).write_text(f"{limit}\n")
        (at / used_name).write_text(f"{used}\n")
        (at / "memory.stat").write_text(f"anon 5\n{files_name} {files}\n")
    assert available_bytes(tmp_path, tmp_path / "cgroups") == left


def test_where_nothing_says_how_much_is_left_nothing_is_refused(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) == float("inf")


def test_copying_bytes() -> None:
    source = torch.arange(100_000, dtype=torch.int32)
    for start, stop in ((0, 0), (3, 4), (0, 8192), (1, 100_000)):
        target = torch.zeros_like(source)
        copy_bytes(target[start:].data_ptr(), source[start:].data_ptr(), (stop - start) * 4)
        assert torch.equal(target[start:stop], source[start:stop])
        assert int(target.sum()) == int(source[start:stop].sum())


def test_a_platform_without_the_semaphores_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_unsupported() == ""
    monkeypatch.setattr(shared_memory.ctypes, "CDLL", lambda name: type("MacOS", (), {"sem_post": 0, "sem_trywait": 0}))
    assert why_unsupported() == "the C library has no sem_init, sem_clockwait"


# --- the barrier -----------------------------------------------------------------------------------------------------


def barriers(size: int, ranks: list[int] | None = None) -> tuple[SharedMemory, list[Barrier]]:
    """A barrier of `size` members of this process, each with a mapping of its own; counters stand behind it."""
    start = Barrier.num_bytes(size)
    memory = SharedMemory.create("memfd", 2 * PAGE * size)
    Barrier.create(memory, size=size)
    assert start + 64 * size <= 2 * PAGE * size
    members = [
        Barrier(
            SharedMemory.attach(memory.path, 2 * PAGE * size),
            index=index,
            ranks=ranks or range(size),
            pids=[os.getpid()] * size,
        )
        for index in range(size)
    ]
    memory.forget()
    return memory, members


@pytest.mark.parametrize("size", range(1, 9))
def test_nobody_passes_before_everyone_has_come(size: int) -> None:
    memory, members = barriers(size)
    counters = memory.bytes[Barrier.num_bytes(size) :].view(torch.int64)[:size]

    def run(index: int) -> None:
        for number in range(1, 40):
            if (number + index) % 7 == 0:
                time.sleep(0.001)
            counters[index] = number
            members[index].wait(30)
            assert number <= int(counters.min()) <= int(counters.max()) <= number + 1

    with ThreadPoolExecutor(size) as threads:
        for done in [threads.submit(run, index) for index in range(size)]:
            done.result()
    for member in members:
        member.leave()


def lost(member: Barrier, timeout_s: float) -> TransportError:
    with pytest.raises(TransportError) as raised:
        member.wait(timeout_s)
    return raised.value


def test_who_stays_away_is_named_at_the_deadline_and_the_others_are_told() -> None:
    _, (a, b, _) = barriers(3, RANKS)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lost, a, 0.3)
        second = threads.submit(lost, b, 60.0)
        assert (first.result().peer, first.result().timed_out) == (30, True)
        assert (second.result().peer, second.result().timed_out) == (30, False)  # long before its own deadline
    assert str(second.result()) == "transfer with rank 30 failed: rank 10 on this host has given up waiting for it"


def test_who_leaves_or_gives_up_is_named() -> None:
    _, (a, b) = barriers(2, RANKS[:2])
    b.leave()
    assert "rank 20 failed: it has left" in str(lost(a, 60))
    _, (a, b) = barriers(2, RANKS[:2])
    b.give_up()
    b.leave()
    assert "rank 20 failed: it has given up" in str(lost(a, 60))


@pytest.mark.parametrize("last", [252, 253, 254, 300])  # more than a byte holds
def test_who_gives_up_is_named_on_a_host_of_many_ranks(last: int) -> None:
    size = last + 1
    memory = SharedMemory.create("memfd", Barrier.num_bytes(size))
    a, b = (Barrier(memory, index=index, ranks=range(size), pids=[None] * size) for index in (0, last))
    b.give_up()
    told = a._lost(1, late=False)
    assert told is not None and told.peer == last and "it has given up" in str(told)
    memory.forget()


def test_who_leaves_after_its_last_barrier_is_not_missed() -> None:
    _, (a, b) = barriers(2)
    with ThreadPoolExecutor(1) as threads:
        passed = threads.submit(b.wait, 30)
        while not passed.running():
            time.sleep(0.001)
        a.wait(30)
        passed.result()
        last = threads.submit(b.wait, 30)
        a.wait(30)
        a.leave()
        last.result()


def test_a_forked_child_is_no_member() -> None:
    _, (a, b) = barriers(2)
    threads = ThreadPoolExecutor(1)
    waiting = threads.submit(a.wait, 30)
    here = os.getpid
    try:
        os.getpid = lambda: -1  # type: ignore[assignment]
        b.leave()  # as an exit handler in a child would
    finally:
        os.getpid = here  # type: ignore[assignment]
    b.wait(30)
    waiting.result()
    threads.shutdown()


def test_signals_are_handled_in_the_wait() -> None:
    _, (a, b) = barriers(2)
    handled = []

    def come_late(number: int, frame: object) -> None:
        handled.append(number)
        if len(handled) == 3:
            threading.Thread(target=b.wait, args=(30,)).start()

    before = signal.signal(signal.SIGALRM, come_late)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        a.wait(30)
        assert len(handled) >= 3
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            a.wait(30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- processes -------------------------------------------------------------------------------------------------------


def wait_for_the_lost(path: str, pids_at: str, how: str) -> tuple[int, bool, float]:
    """The last of three processes is lost after the first barrier. What the others say, after how many seconds."""
    index = int(os.environ["RANK"])
    memory = SharedMemory.attach(path, 4 * PAGE)
    (Path(pids_at) / str(index)).write_text(str(os.getpid()))
    wait_until(
        lambda: all((Path(pids_at) / str(i)).exists() and (Path(pids_at) / str(i)).read_text() for i in range(3))
    )
    pids = [int((Path(pids_at) / str(i)).read_text()) for i in range(3)]
    barrier = Barrier(memory, index=index, ranks=RANKS, pids=pids)
    barrier.wait(30)
    if index == 2:
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    start_s = time.monotonic()
    try:
        barrier.wait(2.0 if how == "stopped" else 60.0)
    except TransportError as error:
        return error.peer, error.timed_out, time.monotonic() - start_s
    return -1, False, 0.0


def wait_until(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.quick(1)
def test_survivors_name_the_lost_process(how: str, tmp_path: Path) -> None:
    memory = SharedMemory.create("memfd", 4 * PAGE)
    Barrier.create(memory, size=3)
    started = start_ranks(wait_for_the_lost, 3, memory.path, str(tmp_path), how)
    try:
        for peer, timed_out, took_s in unfailed(collect(started[:2], timeout_s=50)):
            assert peer == 30
            if how == "killed":
                assert not timed_out  # noticed, not waited for: the deadline is a minute
                assert took_s < 30
            else:
                assert 1.0 < took_s < 30
    finally:
        started[2][0].kill()
        memory.forget()


def test_threads_may_ask_at_the_same_time_whether_a_process_lives() -> None:
    process = ProcessHandle(os.getpid())

    def ask() -> bool:
        return all(process.is_running() for _ in range(2000))

    with ThreadPoolExecutor(8) as pool:
        assert all(answer.result() for answer in [pool.submit(ask) for _ in range(8)])
        asking = [pool.submit(ask) for _ in range(8)]
        process.close()
        assert all(answer.result() for answer in asking)
