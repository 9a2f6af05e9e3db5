"""Whether another user could have written something, could change it, or could put another in its place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp.process.files import ANYTHING, NOTHING, why_in_other_hands, why_shared

STRANGER, GROUP = 4242, 4243
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "above" / "folder").mkdir(parents=True)
    (tmp_path / "above" / "folder" / "file").write_text("")
    return tmp_path / "above" / "folder" / "file"


def away(path: Path) -> None:
    os.chown(path, STRANGER, -1, follow_symlinks=False)


def of_a_group(path: Path) -> None:
    os.chown(path, -1, GROUP)
    path.chmod(0o775)


def linked_away(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")
    away(path)


CHANGES: dict[str, tuple[int, Callable[[Path], object], str]] = {  # of the file (0) or a folder above it
    "written by all": (0, lambda path: path.chmod(0o666), "others may write {}"),
    "read by all": (0, lambda path: path.chmod(0o644), ""),
    "another's file": (0, away, "{} belongs to user 4242"),
    "another's link": (0, linked_away, "{} belongs to user 4242"),
    "a group's file": (0, of_a_group, "others may write {}"),
    "its folder": (1, lambda path: path.chmod(0o777), "others may write {}"),
    "a folder above": (2, lambda path: path.chmod(0o777), "others may write {}"),
    "as /tmp": (2, lambda path: path.chmod(0o1777), ""),
    "another's folder above": (2, away, "{} belongs to user 4242"),
    "a group's folder above": (2, of_a_group, "others may write {}"),
    "root's, in a container": (2, lambda path: os.chown(path, 65534, -1), ""),
}


@NEEDS_ROOT
@pytest.mark.parametrize("name", CHANGES)
def test_who_decides_what_is_at_a_path(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    level, change, words = CHANGES[name]
    assert why_in_other_hands(path) == ""
    changed = [path, *path.parents][level]
    change(changed)
    assert why_in_other_hands(path) == words.format(changed)
    monkeypatch.chdir(path.parents[1])
    assert why_in_other_hands(path) == ("" if level == 2 else words.format(changed)), "the user has chosen to be there"


@NEEDS_ROOT
def test_the_owner_of_a_link_above_a_path_decides_where_it_leads(path: Path) -> None:
    linked_away(path.parents[1])
    assert why_in_other_hands(path) == f"{path.parents[1]} belongs to user 4242"
    os.chown(path.parents[1], 0, 0, follow_symlinks=False)
    assert why_in_other_hands(path) == ""


def test_what_others_may_do_with_one_file(path: Path) -> None:
    path.chmod(0o644)
    assert why_shared(path, path.stat()) == why_shared(path, path.stat(), rights=NOTHING) == ""
    assert why_shared(path, path.stat(), rights=ANYTHING) == f"others may enter {path}"
    path.chmod(0o666)
    assert why_shared(path, path.stat(), rights=NOTHING) == ""
    assert why_shared(path, path.stat()) == f"others may write {path}"
