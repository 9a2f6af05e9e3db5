"""Which ranks share a host: from faked facts, and found out by real processes."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch.distributed as dist
from ranks import as_threads, run_ranks

from ddp.comm import connect
from ddp.comm.connect import Neighbours, discover, group
from ddp.comm.transport.edge import Gather
from ddp.comm.transport.shared_memory import KINDS, Kind, SharedMemory

Result = TypeVar("Result")


@pytest.fixture(autouse=True)
def _leaves_no_names() -> Iterator[None]:
    yield
    assert not list(Path("/dev/shm").glob(f"ddp-{os.getpid()}-*"))


# --- grouping, a pure function ---------------------------------------------------------------------------------------


def reached(size: int, pairs: dict[tuple[int, int], list[Kind]]) -> list[dict[int, list[Kind]]]:
    """By rank, whom it reached; both ends of every pair did, unless only (a, b) with a > b is given."""
    found: list[dict[int, list[Kind]]] = [{} for _ in range(size)]
    for (a, b), kinds in pairs.items():
        found[a][b] = kinds
        if a < b:
            found[b][a] = kinds
    return found


MEMFD: list[Kind] = ["memfd"]
FILES: list[Kind] = ["/dev/shm"]
BOTH: list[Kind] = ["memfd", "/dev/shm"]


@pytest.mark.parametrize(
    ("size", "pairs", "hosts", "kinds"),
    [
        (1, {}, ((0,),), (None,)),
        (3, {}, ((0,), (1,), (2,)), (None, None, None)),
        (4, {(0, 1): MEMFD, (2, 3): MEMFD}, ((0, 1), (2, 3)), ("memfd", "memfd")),
        (4, {(0, 2): MEMFD, (1, 3): FILES}, ((0, 2), (1, 3)), ("memfd", "/dev/shm")),
        (4, {(0, 3): MEMFD, (1, 2): MEMFD}, ((0, 3), (1, 2)), ("memfd", "memfd")),
        (2, {(1, 0): MEMFD}, ((0,), (1,)), (None, None)),  # one sees the other only
        (3, {(0, 1): MEMFD, (1, 2): MEMFD}, ((0, 1), (2,)), ("memfd", None)),  # 0 and 2 do not meet
        (3, {(0, 1): BOTH, (1, 2): FILES, (0, 2): FILES}, ((0, 1, 2),), ("/dev/shm",)),
        (3, {(0, 1): MEMFD, (1, 2): FILES, (0, 2): FILES}, ((0, 1), (2,)), ("memfd", None)),  # nothing in common
        (5, {(0, 2): MEMFD, (0, 4): MEMFD, (2, 4): MEMFD}, ((0, 2, 4), (1,), (3,)), ("memfd", None, None)),
    ],
)
def test_groups_are_ranks_that_all_reach_each_other_by_one_kind(
    size: int, pairs: dict[tuple[int, int], list[Kind]], hosts: Any, kinds: Any
) -> None:
    assert group(reached(size, pairs)) == (hosts, kinds)


# --- discovery, with ranks as threads and some facts replaced ---------------------------------------------------------


def my_rank() -> int:
    return threading.current_thread().rank  # type: ignore[attr-defined, no-any-return]


def layouts(size: int, kinds: tuple[Kind, ...] = KINDS) -> list[Neighbours]:
    """What each of the ranks finds out."""
    found = as_threads(size, lambda rank, gather: discover(rank, gather, kinds=kinds))
    assert len({layout.hosts for layout in found}) == len({layout.kinds for layout in found}) == 1
    return found


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_one_host_find_each_other(size: int, kind: Kind) -> None:
    for rank, layout in enumerate(layouts(size, (kind,))):
        assert layout.hosts == (tuple(range(size)),)
        assert layout.host_of(rank) == (tuple(range(size)), kind if size > 1 else None)
        assert layout.pids == (os.getpid(),) * size
        assert not layout.reasons


def test_another_boot_id_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "boot_id", lambda: f"boot {my_rank() % 3}")
    found = layouts(7)
    assert found[0].hosts == ((0, 3, 6), (1, 4), (2, 5))
    assert not any(layout.reasons for layout in found)


def test_equal_boot_ids_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone of a virtual machine: what stands at the path there is another process's memory here."""
    honest = connect._why_out_of_reach

    def look(neighbour: connect.RankLocation) -> str:
        if my_rank() == 2:
            neighbour = connect.RankLocation(**{**vars(neighbour), "number": "00" * connect.PROBE_BYTES})
        return honest(neighbour)

    monkeypatch.setattr(connect, "_why_out_of_reach", look)
    found = layouts(3)
    assert found[0].hosts == ((0, 1), (2,))
    assert "is another process's here" in found[2].reasons[0]


def test_files_serve_where_processes_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = connect._why_out_of_reach

    def look(neighbour: connect.RankLocation) -> str:
        return honest(neighbour) if neighbour.path.startswith("/dev/shm/") else "[Errno 13] Permission denied"

    monkeypatch.setattr(connect, "_why_out_of_reach", look)
    monkeypatch.setattr(connect, "_pid_namespace", lambda: f"pid:[{my_rank()}]")
    found = layouts(3)
    assert (found[0].hosts, found[0].kinds) == (((0, 1, 2),), ("/dev/shm",))
    assert found[1].pids == (None, os.getpid(), None)  # a PID of another namespace is nobody's here
    assert found[0].reasons == {}


def test_a_host_without_shared_memory_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SharedMemory.create

    def create(kind: Kind, num_bytes: int) -> SharedMemory:
        if my_rank() == 1:
            raise OSError(f"no {kind} for you")
        return honest(kind, num_bytes)

    monkeypatch.setattr(SharedMemory, "create", create)
    found = layouts(3)
    assert found[0].hosts == ((0, 2), (1,))
    assert found[1].reasons == {0: "no /dev/shm for you", 2: "no /dev/shm for you"}
    assert found[0].reasons == {1: "it has no shared memory to offer"}


# --- real processes --------------------------------------------------------------------------------------------------


def over_gloo() -> tuple[int, Gather]:
    """This process's rank, and a gather."""
    dist.init_process_group("gloo")

    def gather(payload: bytes) -> list[bytes]:
        payloads: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(payloads, payload)
        return payloads

    return dist.get_rank(), gather


def stand(where: str) -> Neighbours:
    """Rank 1 stands somewhere else than ranks 0 and 2, on the same host."""
    rank, gather = over_gloo()
    if rank == 1 and where == "another user":
        os.setuid(65534)
    return discover(rank, gather)


def stand_in_a_pid_namespace() -> Neighbours | None:
    """Rank 1 becomes process 1 of a PID namespace, with the host's /proc: its own PID means nothing to the others."""
    if os.environ["RANK"] != "1":
        return discover(*over_gloo())
    clone_newpid = 0x20000000
    ctypes.CDLL(None).unshare(clone_newpid)
    if os.fork() == 0:
        discover(*over_gloo())
        os._exit(0)
    os.wait()
    return None


def test_processes_of_one_host() -> None:
    found = run_ranks(stand, 3, "the same place")
    assert [layout.host_of(rank) for rank, layout in enumerate(found)] == [((0, 1, 2), "memfd")] * 3
    assert len(set(found[0].pids)) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_s_process_on_the_same_host() -> None:
    found = run_ranks(stand, 3, "another user")
    assert found[0].hosts == found[1].hosts == ((0, 2), (1,))
    assert "Permission denied" in found[1].reasons[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make PID namespaces")
def test_a_process_in_another_pid_namespace_of_the_same_host() -> None:
    found = run_ranks(stand_in_a_pid_namespace, 3)
    assert (found[0].hosts, found[0].kinds) == (((0, 1, 2),), ("/dev/shm",))
    assert [pid is None for pid in found[0].pids] == [False, True, False]
