"""Ranks know each other by a secret: a stranger on their host becomes none of them, reads nothing, changes nothing.

Tests: ddp/comm/meeting/private_store.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import collect, start_ranks
from torch.distributed import DistError, HashStore, Store

import ddp
from ddp.comm.meeting import secret
from ddp.comm.meeting.private_store import Folder, Sealed, part_of, sealed
from ddp.comm.meeting.rendezvous import rendezvous
from ddp.comm.objects import all_gather_object
from ddp.errors import ConfigError, PeerLost
from ddp.run.launch.from_python import folder_for_call

ROOT = Path(__file__).parents[3]
KEY, OTHER = b"k" * 32, b"o" * 32


# --- the secret ------------------------------------------------------------------------------------------------------


def test_a_launcher_hands_the_secret_over_in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (secret.VARIABLE, secret.FOLDER):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("MASTER_PORT", "4000")
    with secret.private_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        secret.take_secret(folder)
        assert len(secret.secret()) == 64
        assert secret.private_part(4000) == folder / "4000"
        assert secret.private_part(4001) is None, "child processes that meet elsewhere are ranks of another job"
        folder.chmod(0o755)
        with pytest.raises(ConfigError, match=f"^others may enter {folder}: one of them"):
            secret.take_secret(folder)
    assert not folder.exists()


def test_a_secret_that_could_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.VARIABLE, "hunter2")
    with pytest.raises(ConfigError, match="DDP_SECRET has 7 characters: take at least 16"):
        secret.secret()


def test_codes_tell_where_their_parts_end() -> None:
    assert secret.code_of(KEY, b"ab", b"c") != secret.code_of(KEY, b"a", b"bc")
    assert secret.code_of(KEY, b"a") != secret.code_of(OTHER, b"a")


# --- stores ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["folder", "sealed"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    yield Folder(tmp_path / "4000") if request.param == "folder" else Sealed(HashStore(), KEY)


def test_a_private_store_is_a_store(store: Store) -> None:
    part, other = part_of(part_of(store, "a"), "b"), part_of(store, "a")
    part.set("x", "1")
    other.set("../x/" + "long " * 100, b"\0\xff")  # type: ignore[arg-type]
    assert part.get("x") == part_of(store, "a/b").get("x") == other.get("b/x") == b"1"
    assert part.clone().multi_get(["x"]) == [b"1"]  # type: ignore[attr-defined]
    assert other.get("../x/" + "long " * 100) == b"\0\xff"
    assert part.check(["x"])
    assert not part.check(["x", "y"])
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(part.get, "y")
        part.set("y", "2")
        assert waits.result() == b"2"
    with pytest.raises(DistError):
        part.wait(["z"], timedelta(milliseconds=10))


def test_a_counter_never_goes_back_wherever_who_adds_to_it_is_killed(tmp_path: Path) -> None:
    """A kill leaves what other processes find at that moment, which is looked at before each line."""
    store, found, earlier = Folder(tmp_path), [], sys.gettrace()
    store.add("arrivals", 7)

    def look(frame: Any, *_: Any) -> Any:
        found.append(Folder(tmp_path).get("arrivals"))
        return look

    sys.settrace(look)
    try:
        store.add("arrivals", 1)
    finally:
        sys.settrace(earlier)
    assert list(dict.fromkeys(found)) == [b"7", b"8"]


def test_gloo_and_sessions_meet_in_a_private_store(store: Store) -> None:
    def one(rank: int) -> str:
        session = rendezvous(store, rank, 3, warn_s=10, abort_s=20)
        gloo = dist.ProcessGroupGloo(session, rank, 3, timedelta(seconds=20))
        total = torch.tensor([rank])
        gloo.allreduce([total]).wait()
        return f"{total.item()}"

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(one, range(3))) == ["3"] * 3


def test_what_a_stranger_writes_into_a_sealed_store_is_not_found_or_refused() -> None:
    open_to_all = HashStore()
    mine, stranger = sealed(open_to_all, KEY), sealed(open_to_all, OTHER)
    for theirs in (open_to_all, stranger):
        theirs.set("here/1", "stranger")
    assert not mine.check(["here/1"])
    mine.set("here/1", "me")
    mine.set("here/2", "you")
    assert (mine.get("here/1"), stranger.get("here/1")) == (b"me", b"stranger")
    assert b"me" not in b"".join(name.encode() for name in open_to_all.list_keys())
    first, second = (mine._name(f"here/{rank}") for rank in (1, 2))  # type: ignore[attr-defined]
    for changed in (open_to_all.get(second), open_to_all.get(first)[:-1], b"", open_to_all.get(first) + b"!"):
        open_to_all.set(first, changed)  # the value of another name, less, nothing, more
        with pytest.raises(DistError, match="here/1 was written by a process that does not know DDP_SECRET"):
            mine.get("here/1")
    assert sealed(open_to_all, b"") is open_to_all


# --- ranks under another launcher ------------------------------------------------------------------------------------


def join(who: str) -> tuple[float, list[str]]:
    comm = ddp.init(abort_s=20)
    pair = comm.subgroup([1, 0])
    group = dist.new_group([0, 1])
    assert pair is not None
    assert isinstance(group, dist.ProcessGroup)
    beside = ddp.DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group)
    beside(torch.ones(1, 1)).sum().backward()
    found = pair.all_reduce(torch.ones(1)).item(), all_gather_object(comm, who)
    ddp.shutdown()
    return found


def test_ranks_with_a_secret_of_the_user_s_find_each_other() -> None:
    started = start_ranks(join, 2, "me", environment={"DDP_SECRET": "s" * 16})
    assert collect(started) == [(2.0, ["me", "me"])] * 2


def without_the_secret() -> str:
    if os.environ["RANK"] == "1":
        os.environ["DDP_SECRET"] = "guessed" * 3
    try:
        return f"joined {ddp.init(abort_s=3.0)}"
    except PeerLost as lost:
        return str(lost)


def test_a_rank_without_the_secret_does_not_join() -> None:
    said = collect(start_ranks(without_the_secret, 2, environment={"DDP_SECRET": "s" * 16}))
    assert "lost rank 1" in said[0]
    assert "of 2 ranks, [1] did not come within 3 s: start each once with the same DDP_SECRET" in said[0]
    assert "joined" not in said[1]


def at_the_end_of_a_connection() -> str:
    """Rank 1 is at the end of rank 0's connections, as a stranger who was there first: all it lacks is the secret."""
    from ddp.comm import opening

    if os.environ["RANK"] == "1":
        opening.prove.__globals__["code_of"] = lambda key, *parts: secret.code_of(OTHER, *parts)
    try:
        return f"joined {ddp.init(abort_s=20)}"
    except PeerLost as lost:
        return str(lost)


def test_a_connection_whose_other_end_does_not_know_the_secret_is_refused() -> None:
    said = collect(start_ranks(at_the_end_of_a_connection, 2, environment={"DDP_SECRET": "s" * 16}))
    sentence = "a program that does not know the secret of this launch has taken its connection: start again"
    assert said[0].startswith("lost rank 1")
    assert sentence in said[0]
    assert "joined" not in said[1]


# --- another user of the host ----------------------------------------------------------------------------------------

STRANGER = """
import glob, json, os, pickle, socket, sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
shared = Path(sys.argv[1])
import torch, torch.distributed as dist
from torch.distributed import DistError, TCPStore
import ddp

ddp.init(), ddp.shutdown(), socket.getaddrinfo("localhost", 1)  # imports everything
os.setgroups([]), os.setgid(65534), os.setuid(65534)

class Boom:
    def __reduce__(self):
        return os.system, (f"touch {shared}/ran",)

def reads():  # whatever names the launch
    found = []
    for pattern in ("/dev/shm/ddp-*", "/tmp/ddp-*", "/proc/[0-9]*/fd", "/proc/[0-9]*/environ"):
        for name in glob.glob(pattern):
            with suppress(OSError):
                found += os.listdir(name) if os.path.isdir(name) else [Path(name).read_bytes().decode()]
    return [each for each in found if "DDP_SECRET" in each]

with (shared / "port").open() as pipe:  # /proc/net/tcp shows it to everyone
    port, joined, refused, read = int(pipe.readline()), [], [], []
os.environ.update(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
while len(joined) + len(refused) < 20:
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
        for key in store.list_keys():
            store.set(key, pickle.dumps(Boom()))
            store.delete_key(key)
        joined.append(str(ddp.init(abort_s=0.15)))
        dist.all_gather_object([None, None], Boom())
    except (ddp.PeerLost, DistError) as error:
        refused.append(str(error))
    read += reads()
commands = b""
for name in glob.glob("/proc/[0-9]*/cmdline"):
    with suppress(OSError):
        commands += Path(name).read_bytes()
(shared / "said.partial").write_text(json.dumps([joined, refused, read, commands.decode(errors="replace")]))
(shared / "said.partial").rename(shared / "said")
"""
"""A program that becomes user nobody, and then tries 20 times to be rank 1 of the launch at a given port."""


def attacked(shared: Path) -> tuple[list[float], str]:
    """Sessions, one after another, until the stranger has had enough."""
    totals, is_over, end_s = [], False, time.monotonic() + 30
    if os.environ["RANK"] == "0":
        pipe = os.open(shared / "port", os.O_RDWR)  # which waits for no reader
        os.write(pipe, f"{os.environ['MASTER_PORT']}\n".encode())
    while not is_over:
        comm = ddp.init()
        totals.append(comm.all_reduce(torch.ones(1)).item() + sum(all_gather_object(comm, comm.rank)))
        is_over = comm.agree_any((shared / "said").exists() or time.monotonic() > end_s)
        ddp.shutdown()
    return totals, os.environ["DDP_SECRET"]


@pytest.fixture
def shared() -> Iterator[Path]:
    """Yields a folder that every user may write to."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.engine
@pytest.mark.slow
def test_another_user_of_the_host_gets_nowhere_20_of_20(shared: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    os.mkfifo(shared / "port")
    stranger = subprocess.Popen([sys.executable, "-c", STRANGER, str(shared)], env=environment)
    try:
        (totals, drawn), (others, _) = ddp.launch(attacked, shared, workers=2)
        assert stranger.wait(300) == 0
    finally:
        stranger.kill()
    joined, refused, read, commands = json.loads((shared / "said").read_text())
    assert (joined, read, len(refused)) == ([], [], 20)
    assert all("[0] did not come within 0.15 s" in each for each in refused), "it has reached a store, and nobody there"
    assert not (shared / "ran").exists()
    assert totals == others == [3.0] * len(totals)
    assert len(totals) > 1
    assert "ddp.run.launch.worker" in commands
    assert drawn not in commands


def test_a_folder_of_secrets_beside_calls_removes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /dev/shm cannot be written: both are in the temporary folder, and nobody holds a call's."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with folder_for_call(1, int, (), {}) as call, secret._with_secret(str(tmp_path), b""):
        assert call.exists()
