"""A file is whole or absent: what stands on the disk, and in which order it got there. A folder has one writer."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp.errors import ConfigError
from ddp.files import flush_folder, hold, json_object, make_folder, write_whole


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """What was flushed to the disk: its name, and what a folder held at that moment."""
    calls: list[tuple[str, list[str]]] = []
    flush: Callable[[int], None] = os.fsync

    def record(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        calls.append((path.name, sorted(each.name for each in path.iterdir()) if path.is_dir() else [path.read_text()]))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return calls


def test_a_file_is_flushed_before_it_has_its_name_and_its_folder_after(
    tmp_path: Path, flushed: list[tuple[str, list[str]]]
) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    write_whole(folder / "x", "é\n")
    assert flushed == [(".tmp-x", ["é\n"]), ("a", ["x"])]


def test_the_entry_of_every_new_folder_is_flushed(tmp_path: Path, flushed: list[tuple[str, list[str]]]) -> None:
    make_folder(tmp_path / "a" / "b")
    assert sorted(flushed) == sorted([("a", ["b"]), (tmp_path.name, ["a"])])
    flushed.clear()
    make_folder(tmp_path / "a" / "b")
    assert flushed == []


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "x", "old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "x", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x", "old")]
    with pytest.raises(OSError, match="No space left"):
        flush_folder(tmp_path)


def test_a_file_system_that_cannot_flush_a_folder_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", cannot)
    write_whole(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "new"


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000, '{"a":' * 100_000])
def test_whatever_holds_no_object_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        json_object(text)
    assert json_object('{"a": [1]}') == {"a": [1]}


# Holds a folder, with a forked child as a loader has; or tries to.
HOLDER = """
import os, pathlib, sys, time
from ddp.files import hold
held = hold(pathlib.Path(sys.argv[1]))
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the folder, if it can, until it is killed."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", HOLDER, folder], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_a_second_process_is_refused_by_name_until_the_first_is_dead(tmp_path: Path) -> None:
    first = holder(tmp_path)
    assert first.stdout is not None
    child = int(first.stdout.readline())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    words = f"^{tmp_path} is being written by process {first.pid} on host {socket.gethostname()}: wait "
    with pytest.raises(ConfigError, match=words):
        hold(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    first.kill()
    first.wait()
    os.kill(child, 0)  # it lives, and holds nothing
    held = hold(tmp_path)
    os.kill(child, 9)
    first.communicate()

    again = hold(tmp_path)  # the same process may
    again.close()
    shutil.copytree(tmp_path, tmp_path / "copy")  # which closes the file
    _, said = holder(tmp_path).communicate(timeout=60)
    assert f"is being written by process {os.getpid()} on host" in said
    held.close()
    shutil.rmtree(tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    hold(tmp_path).close()
    assert f"{tmp_path} cannot be locked (No locks available)" in caplog.text
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    hold(tmp_path).close()
