"""Remote files against the bytes that were put there, through file systems that fail, hang and count.

Tests: ddp/data/files/storage.py.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from file_systems import EveryFifthFails, Hangs, Odd

from ddp.data.files import readers as remote
from ddp.data.files.readers import FileVersion, ReadFailed, RemoteReader, Retries, patiently, remote_facts
from ddp.data.files.storage import DIRECT, Storage, listed, local_copy
from ddp.errors import ConfigError
from ddp.process import clock

AT_ONCE = Retries(first_pause_s=0.0)
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def memory() -> Iterator[Any]:
    """The files of memory://, which all of these tests share, are gone afterwards; so are threads that hang."""
    system = fsspec.filesystem("memory")
    Hangs.num_hanging, Hangs.released = 10**9, threading.Event()
    yield system
    Hangs.released.set()
    system.rm("/", recursive=True)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 64)
    monkeypatch.setattr(remote, "_NUM_BLOCKS", 3)


@pytest.mark.parametrize("protocol", ["memory", "fifth"])
def test_any_range_is_what_the_file_holds(protocol: str, memory: Any, small_blocks: None) -> None:
    content = random.Random(0).randbytes(1000)
    memory.pipe_file("/a.bin", content)
    reader = RemoteReader(f"{protocol}://a.bin", retries=AT_ONCE)
    assert reader.facts.size == 1000
    draw = random.Random(1)
    before = EveryFifthFails.num_reads
    for _ in range(300):
        start = draw.randrange(1001)
        end = draw.randrange(start, min(1000, start + 200) + 1)
        assert reader.read(start, end - start) == content[start:end]
        assert reader._blocks.cache_info().currsize <= 3
    assert protocol == "memory" or EveryFifthFails.num_reads - before > 100
    with pytest.raises(
        ConfigError, match=r"^memory.*has 1000 bytes, none at 1001" if protocol == "memory" else "fifth"
    ):
        reader.read(1000, 1)


def test_blocks_are_fetched_once_while_they_are_kept(memory: Any, small_blocks: None) -> None:
    memory.pipe_file("/a.bin", bytes(192))
    reader = RemoteReader("fifth://a.bin", retries=AT_ONCE)
    EveryFifthFails.num_reads = 0
    reader.read(0, 64)
    assert EveryFifthFails.num_reads == 1
    for start in (0, 64, 128, 1, 65, 129, 30):
        reader.read(start, 20)
    assert EveryFifthFails.num_reads == 3


def test_blocks_that_were_not_used_for_longest_make_room(
    memory: Any, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe_file("/a.bin", bytes(400))
    starts: list[int] = []
    monkeypatch.setattr(remote, "remote_range", lambda _, start, end, **__: starts.append(start) or bytes(end - start))
    reader = RemoteReader("memory://a.bin", retries=AT_ONCE)
    for block in (0, 1, 2, 0, 3, 0, 2, 1):
        reader.read(64 * block, 1)
    assert [start // 64 for start in starts] == [0, 1, 2, 3, 1]


def test_a_read_that_hangs_ends_with_the_file_the_offset_the_tries_and_the_deadline(
    memory: Any, small_blocks: None
) -> None:
    memory.pipe_file("/a.bin", bytes(200))
    reader = RemoteReader("hangs://a.bin", retries=Retries(deadline_s=0.02, num_retries=2, first_pause_s=0.0))
    with pytest.raises(ConfigError) as failure:
        reader.read(130, 10)
    message = str(failure.value)
    for words in ("hangs://a.bin: 64 bytes at offset 128 ", " 3 tries", "deadline of 0.02 s", "no response", "network"):
        assert words in message
    assert "\n" not in message


def test_a_read_that_hangs_once_is_tried_again(memory: Any) -> None:
    memory.pipe_file("/a.bin", b"abc")
    reader = RemoteReader("hangs://a.bin", retries=Retries(deadline_s=0.05, first_pause_s=0.0))
    Hangs.num_hanging = 1
    assert reader.read(1, 2) == b"bc"


def test_blocks_of_two_versions_are_not_mixed(memory: Any, small_blocks: None) -> None:
    memory.pipe_file("/a.bin", b"1" * 200)
    reader = RemoteReader("memory://a.bin", retries=AT_ONCE)
    assert reader.read(0, 10) == b"1" * 10
    memory.pipe_file("/a.bin", b"2" * 200)
    with pytest.raises(ConfigError, match=r"^memory://a.bin has changed in time, with the same size since") as failure:
        reader.read(60, 10)
    assert not isinstance(failure.value, ReadFailed)
    assert reader.read(0, 10) == b"1" * 10


def test_a_file_system_that_returns_no_bytes_is_named(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe_file("/a.bin", b"abc")
    reader = RemoteReader("odd://a.bin", retries=Retries(num_retries=0))
    for answer, kind in ((bytes.decode, "str"), (lambda _: None, "NoneType")):
        monkeypatch.setattr(Odd, "answer", staticmethod(answer))
        with pytest.raises(ReadFailed, match=rf"^odd://a.bin: .*its file system returned {kind} instead of bytes"):
            reader.read(0, 3)


def test_pauses_double(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    with pytest.raises(ConfigError, match="in 4 tries"):
        remote.patiently(lambda: 1 / 0, what="x", address="memory://a", retries=Retries(60.0, 3, 0.5))
    assert pauses == [0.5, 1.0, 2.0]


def test_a_call_with_a_timeout_of_its_own_is_no_hanging_one() -> None:
    def fail() -> None:
        raise TimeoutError("the service's")

    with pytest.raises(ConfigError, match="the service's"):
        remote.patiently(fail, what="x", address="memory://a", retries=Retries(60.0, 1, 0.0))


def test_helper_threads_are_used_again(memory: Any) -> None:
    memory.pipe_file("/a.bin", b"abc")
    for _ in range(20):
        remote_facts("memory://a.bin", retries=AT_ONCE)
    assert sum(thread.name == "ddp-within" for thread in threading.enumerate()) <= 3


def test_a_missing_file_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote.time, "sleep", lambda _: pytest.fail("it was tried again"))
    with pytest.raises(ConfigError, match=r"^memory://none.tar does not exist"):
        remote_facts("memory://none.tar", retries=Retries())
    with pytest.raises(ConfigError, match=r"^nonsense://none.tar: fsspec cannot read nonsense://"):
        remote_facts("nonsense://none.tar", retries=Retries())


def test_local_reading_needs_neither_fsspec_nor_threads(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    code = (
        "import sys, threading; from ddp.data.files.storage import DIRECT\n"
        f"address = 'file://{tmp_path}/a.bin'.removeprefix('file://')\n"
        "before = 'fsspec' in sys.modules\n"
        "(facts,) = DIRECT.facts([address]); reader = DIRECT.reader(address, facts)\n"
        "assert reader.read(1, 2) == b'bc' and ('fsspec' in sys.modules) == before\n"
        "assert not any(each.name == 'ddp-within' for each in threading.enumerate())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_a_process_ends_while_a_read_hangs(tmp_path: Path) -> None:
    code = (
        "import file_systems, fsspec\n"
        "from ddp.data.files.readers import Retries, remote_range\n"
        "fsspec.filesystem('memory').pipe_file('/a', b'abc')\n"
        "try: remote_range('hangs://a', 0, 3, retries=Retries(0.01, 0))\n"
        "except ValueError: print('given up', flush=True)"
    )
    path = f"{Path(__file__).parents[2]}:{Path(__file__).parents[3]}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("given up\n", 0), done.stderr


def test_a_forked_child_has_threads_of_its_own(memory: Any) -> None:
    memory.pipe_file("/a.bin", b"abc")
    remote_facts("memory://a.bin", retries=AT_ONCE)
    assert clock._idle
    child = os.fork()
    if child == 0:
        os._exit(0 if remote.remote_range("memory://a.bin", 0, 3, retries=Retries(5.0, 0)) == b"abc" else 1)
    assert os.waitpid(child, 0)[1] == 0


# Which files an address means


def test_remote_listing(memory: Any) -> None:
    for name in ("b.tar", "a.tar", "a.txt", "deep/c.tar"):
        memory.pipe_file(f"/set/{name}", b"x")
    ask: Any = {"suffixes": [".tar"], "storage": DIRECT}
    assert listed("memory://set/", **ask) == ["memory:///set/a.tar", "memory:///set/b.tar"]
    assert listed("memory://set/a.*", **ask) == ["memory:///set/a.tar", "memory:///set/a.txt"]
    assert listed("memory://set/{b,a}.tar", **ask) == ["memory://set/b.tar", "memory://set/a.tar"]
    with pytest.raises(ConfigError, match="matches no file"):
        listed("memory://set/*.zip", **ask)


def test_the_version_changes_with_the_file(memory: Any) -> None:
    memory.pipe_file("/a.bin", b"abc")
    facts = remote_facts("memory://a.bin", retries=AT_ONCE)
    assert facts.size == 3
    assert facts.version
    memory.pipe_file("/a.bin", b"xyz")
    assert remote_facts("memory://a.bin", retries=AT_ONCE) != facts
    with pytest.raises(ConfigError, match=r"^memory://a.bin has changed in time"):
        DIRECT.reader("memory://a.bin", facts)


# Copies on this host


def copies_in(folder: Path) -> list[Path]:
    """Returns all files but locks, which are empty."""
    return [path for path in folder.iterdir() if not path.name.startswith(".lock-") or path.stat().st_size]


def fetch(address: str, facts: FileVersion, cache: Path, barrier: Any, results: Any) -> None:
    barrier.wait(30)
    results.put(local_copy(address, facts, cache_dir=cache, retries=AT_ONCE).read_bytes())


def test_eight_processes_fetch_a_file_once(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(3 * remote.BLOCK_BYTES // 2)
    (tmp_path / "a.bin").write_bytes(content)
    address, cache = f"counted:/{tmp_path}/a.bin", tmp_path / "cache"
    facts = remote_facts(address, retries=AT_ONCE)
    barrier, results = FORK.Barrier(8), FORK.Queue()
    processes = [FORK.Process(target=fetch, args=(address, facts, cache, barrier, results)) for _ in range(8)]
    for process in processes:
        process.start()
    assert all(results.get(timeout=30) == content for _ in processes)
    for process in processes:
        process.join()
    assert (tmp_path / "reads").read_text().splitlines() == ["a.bin 0", f"a.bin {remote.BLOCK_BYTES}"]
    assert [path.name[16:] for path in copies_in(cache)] == ["-a.bin"]


def test_a_download_that_was_killed_is_begun_again(tmp_path: Path, memory: Any) -> None:
    memory.pipe_file("/a.bin", b"whole")
    facts, cache = remote_facts("hangs://a.bin", retries=AT_ONCE), tmp_path / "cache"
    child = os.fork()
    if child == 0:
        local_copy("hangs://a.bin", facts, cache_dir=cache, retries=AT_ONCE)
    while not (parts := list(cache.glob(".part-*"))):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    (part,) = parts
    part.write_bytes(b"more bytes than the file has")
    Hangs.num_hanging = 0
    copy = local_copy("hangs://a.bin", facts, cache_dir=cache, retries=AT_ONCE)
    assert copies_in(cache) == [copy]
    assert copy.read_bytes() == b"whole"


def test_a_download_that_fails_leaves_nothing_behind(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe_file("/a.bin", b"whole")
    storage = Storage(Retries(num_retries=0), cache_dir=tmp_path)
    (facts,) = storage.facts(["odd://a.bin"])
    monkeypatch.setattr(Odd, "answer", staticmethod(lambda data: data[1:]))
    with pytest.raises(ReadFailed, match="4 bytes received instead of 5"):
        storage.reader("odd://a.bin", facts)
    assert not copies_in(tmp_path)
    monkeypatch.undo()
    assert storage.reader("odd://a.bin", facts).read(0, 5) == b"whole"


def test_a_copy_is_of_the_version_that_was_indexed(tmp_path: Path, memory: Any) -> None:
    memory.pipe_file("/a.bin", b"old")
    storage = Storage(AT_ONCE, cache_dir=tmp_path)
    (old,) = storage.facts(["memory://a.bin"])
    memory.pipe_file("/a.bin", b"new")
    with pytest.raises(ConfigError, match=r"^memory://a.bin has changed in time"):
        storage.reader("memory://a.bin", old)
    (new,) = storage.facts(["memory://a.bin"])
    reader = storage.reader("memory://a.bin", new)
    assert (reader.read(0, 3), reader.address, reader.facts) == (b"new", "memory://a.bin", new)
    memory.rm("/a.bin")
    assert storage.reader("memory://a.bin", new).read(1, 2) == b"ew"
    (copy,) = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    copy.write_bytes(b"x")
    with pytest.raises(ConfigError, match="delete the copy"):
        storage.reader("memory://a.bin", new)


def test_versions_of_one_size_have_a_copy_each(tmp_path: Path, memory: Any) -> None:
    storage = Storage(AT_ONCE, cache_dir=tmp_path)
    for content in (b"old", b"new"):
        memory.pipe_file("/a.bin", content)
        (facts,) = storage.facts(["memory://a.bin"])
        assert storage.reader("memory://a.bin", facts).read(0, 3) == content


def test_a_cache_that_others_may_write_is_refused(tmp_path: Path, memory: Any) -> None:
    memory.pipe_file("/a.bin", b"abc")
    storage = Storage(AT_ONCE, cache_dir=tmp_path)
    (facts,) = storage.facts(["memory://a.bin"])
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=rf"^others may write {tmp_path}, and could .*: take a cache_dir that is"):
        storage.reader("memory://a.bin", facts)
    assert not copies_in(tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, memory: Any) -> None:
    memory.pipe_file("/a.bin", b"abc")
    (tmp_path / "file").write_text("")
    storage = Storage(AT_ONCE, cache_dir=tmp_path / "file" / "cache")
    with pytest.raises(ConfigError, match=r"^memory://a.bin cannot be copied to .*file/cache .*cache_dir"):
        storage.reader("memory://a.bin", storage.facts(["memory://a.bin"])[0])


@pytest.mark.parametrize(
    ("status", "words", "tries"),
    [(403, "cannot be opened .its server answers 403.", 1), (404, "does not exist", 1), (503, "in 2 tries", 2)],
)
def test_what_a_web_server_answers_is_told(status: int, words: str, tries: int) -> None:
    calls = []

    def call() -> None:
        calls.append(status)
        raise FileNotFoundError("x") from Answer(status)  # as fsspec does for any answer

    with pytest.raises(ConfigError, match=words):
        patiently(
            call, what="it could not be read", address="memory://x", retries=Retries(num_retries=1, first_pause_s=0.0)
        )
    assert len(calls) == tries


class Answer(Exception):
    def __init__(self, status: int) -> None:
        self.status = status
