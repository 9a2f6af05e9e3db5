"""A file is whole or absent: what stands on the disk, and in which order it got there; folders with one writer."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp.commands.finished import _absolute
from ddp.data.files.storage import _locked
from ddp.errors import CheckpointError, ConfigError
from ddp.process.files import (
    flush_folder,
    hold,
    make_folder,
    new_file,
    scratch_folder,
    to_append,
    whole_file,
    write_whole,
)
from ddp.process.records import json_object
from ddp.run.assembly.load import load
from ddp.run.launch.failures import Report
from ddp.run.launch.run_folder import _note_start, _refuse_planted, _try_writing, only_writer, read_settings
from ddp.run.settings.config import Config
from ddp.run.settings.reader import settings_of
from ddp.train.checkpoints.checkpoint_store import CheckpointStore
from ddp.train.reports.history import STARTS
from ddp.train.reports.report import draw_curves
from ddp.train.reports.results import write_summary


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
from ddp.process.files import hold
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


# ------------------------------------------------------------------------------------------------- links of strangers


def write_in(path: Path) -> None:
    with whole_file(path) as file:
        file.write(b"new")


def locked(path: Path) -> None:
    with _locked(path):
        pass


def appended(path: Path) -> None:
    with to_append(path) as file:
        file.write("new")


def noted(path: Path) -> None:
    config = Config()
    config.resume = "auto"
    _note_start(config, path.parent, None, None)


SUMMARY = {"main_metric": "test_loss"}
OPENS: dict[str, Callable[[Path], object]] = {
    ".lock": lambda path: hold(path.parent).close(),
    "metrics.jsonl": appended,
    "rank-1.log": to_append,
    "starts.jsonl": noted,
    ".lock-copy": locked,
}
REPLACES: dict[str, Callable[[Path], object]] = {
    ".part-copy": write_in,
    "summary.json": lambda path: write_summary(path.parent, SUMMARY),
    ".tmp-x": lambda path: write_whole(path.with_name("x"), "new"),
    "curves.png": lambda path: draw_curves(path.with_name("metrics.jsonl"), path, summary=SUMMARY),
    ".trial": lambda path: _try_writing(path.parent),
    "model.pt": lambda path: new_file(path).close(),
    ".tmp-error-rank-1.json": lambda path: Report(rank=1, type="", message="", traceback="").write(path.parent),
    ".tmp-step-00000001": lambda path: CheckpointStore(path.parent).save(1, {"model": {}}, meta={}),
    "latest": lambda path: CheckpointStore(path.parent).save(1, {"model": {}}, meta={}),
}


@pytest.mark.parametrize("name", [*OPENS, *REPLACES])
def test_no_file_is_written_or_emptied_through_a_link(name: str, tmp_path: Path) -> None:
    """A file is refused in a sentence, or made anew in the link's place. The same for hard links, and for pipes."""
    mine, folder = tmp_path / "mine", tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    path = folder / name
    for plant in (Path.symlink_to, Path.hardlink_to):
        mine.write_text("precious\n" * 9)
        plant(path, mine)
        if name in OPENS:
            with pytest.raises(ConfigError, match=rf"^{path} (is a link|has a second name elsewhere), and is not open"):
                OPENS[name](path)
        else:
            REPLACES[name](path)
            assert not path.exists() or not path.samefile(mine)
        assert mine.read_text() == "precious\n" * 9
        for each in folder.iterdir():
            shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
    if name in OPENS:
        os.mkfifo(path)
        with pytest.raises(ConfigError, match=rf"^{path} is not a regular file"):
            OPENS[name](path)


def test_a_run_in_whose_folder_links_are_planted_is_refused_before_it_starts(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    for name in ("metrics.jsonl", "logs/rank-3.log"):
        (tmp_path / "run" / "logs").mkdir(parents=True)
        (tmp_path / "run" / name).symlink_to(mine)
        with pytest.raises(ConfigError, match=f"{name} is a link"):
            _refuse_planted(tmp_path / "run")
        shutil.rmtree(tmp_path / "run")
    assert mine.read_text() == "precious"


def test_a_pipe_in_the_place_of_settings_holds_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.yaml")
    os.mkfifo(tmp_path / STARTS)
    assert settings_of(tmp_path) is None
    with pytest.raises(ConfigError, match=r"is damaged: .*config\.yaml is not a regular file"):
        read_settings(tmp_path / "config.yaml")
    assert _absolute({"path": "a.csv"}, tmp_path / STARTS)["path"] == str(Path("a.csv").absolute())


def given_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a file or link another user's, as far as this process may."""
    if os.geteuid() == 0:
        os.lchown(path, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)


def test_another_user_s_link_leads_to_no_folder_of_mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    link = tmp_path / "checkpoints"
    link.symlink_to(tmp_path / "mine")
    make_folder(link)  # one's own is followed
    given_away(link, monkeypatch)
    with pytest.raises(ConfigError, match=f"^{link} is a link of user .*, and is not followed"):
        make_folder(link)
    with pytest.raises(ConfigError, match="is a link of user"), only_writer(link):
        pass
    with pytest.raises(ConfigError, match="is a link of user"):
        CheckpointStore(link).save(1, {}, meta={})
    with pytest.raises(ConfigError, match="is a link of user"):
        _refuse_planted(tmp_path)
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_stranger_s_file_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "other").hardlink_to(tmp_path / "metrics.jsonl")
    appended(tmp_path / "metrics.jsonl")  # a copy of hard links, as backups make; nobody else may write here
    (tmp_path / "other").unlink()
    tmp_path.chmod(0o1777)
    given_away(tmp_path / "metrics.jsonl", monkeypatch)
    if os.geteuid() == 0:
        with pytest.raises(ConfigError, match=r"metrics\.jsonl belongs to user"):
            appended(tmp_path / "metrics.jsonl")
    tmp_path.chmod(0o700)


def test_the_best_checkpoint_is_one_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "best").write_text("../../elsewhere\n")
    with pytest.raises(CheckpointError, match="best names no checkpoint"):
        load(tmp_path)


# Folders for a while


def leave_one_behind(parent: Path) -> None:
    """Kills a process that has such a folder."""
    if not (pid := os.fork()):
        with scratch_folder(parent, ".mine-") as folder:
            (folder / "part").write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_what_a_killed_process_has_left_goes_and_what_others_hold_stays(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / ".mine-link").symlink_to(precious)
    leave_one_behind(tmp_path)
    assert len(list(tmp_path.glob(".mine-*/part"))) == 1
    with scratch_folder(tmp_path, ".mine-") as first, scratch_folder(tmp_path, ".mine-") as second:
        assert first.stat().st_mode & 0o777 == 0o700
        assert set(tmp_path.iterdir()) == {precious, tmp_path / ".mine-link", first, second}
    assert set(tmp_path.iterdir()) == {precious, tmp_path / ".mine-link"}
