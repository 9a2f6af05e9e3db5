"""The store: whatever a kill, a flipped bit or a full disk does, what is loaded is whole."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddp.errors import CheckpointError
from ddp.train.checkpoints.checkpoint_store import CheckpointStore, load, steps


def parts_of(value: int) -> dict[str, object]:
    return {
        "model": {"weight": torch.full((300,), float(value)), "half": torch.full((3,), value, dtype=torch.bfloat16)},
        "training": {"step": value, "names": ["a", None], "rate": 0.1},
    }


def save(store: CheckpointStore, step: int, value: int | None = None, **options) -> Path:
    return store.save(step, parts_of(step if value is None else value), meta={"value": value}, **options)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


# ---------------------------------------------------------------------------------------------------------- round trip


def test_what_is_saved_is_loaded(store):
    path = store.save(120, parts_of(5), meta={"world_size": 4, "names": ["x"]}, score=0.5)
    assert path == store.folder / "step-00000120"
    loaded = load(store.folder)
    assert (loaded.step, loaded.path, loaded.score) == (120, path, 0.5)
    assert loaded.meta == {"world_size": 4, "names": ["x"]}
    torch.testing.assert_close(loaded.parts["model"], parts_of(5)["model"], rtol=0, atol=0)
    assert loaded.parts["training"] == parts_of(5)["training"]
    assert torch.load(path / "model.pt", weights_only=True)["weight"][0] == 5.0  # torch alone can read it


def test_the_manifest_is_checked_by_other_tools(store):
    path = save(store, 7, score=2.0)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["schema"], manifest["step"], manifest["score"]) == (1, 7, 2.0)
    for name, entry in manifest["parts"].items():
        digest, _ = subprocess.check_output(["sha256sum", path / f"{name}.pt"], text=True).split(maxsplit=1)
        assert entry == {"bytes": (path / f"{name}.pt").stat().st_size, "sha256": digest}


def test_only_what_is_asked_for_is_loaded(store, monkeypatch):
    save(store, 7, value=3)
    assert set(load(store.folder, names=["training"]).parts) == {"training"}
    with pytest.raises(CheckpointError, match=r"no part optimizer; its parts are model, training"):
        load(store.folder, names=["optimizer"])
    monkeypatch.setattr(torch, "load", None)
    meta = load(store.folder, names=())
    assert (meta.step, meta.meta, meta.parts) == (7, {"value": 3}, {})


def test_paths_of_a_checkpoint_and_of_a_folder(store, tmp_path):
    for step in (1, 2, 3):
        save(store, step)
    assert load(store.folder).step == 3
    assert load(str(store.folder / "step-00000002")).step == 2
    copied = shutil.copytree(store.folder / "step-00000001", tmp_path / "a copy")
    assert load(copied).path == copied
    assert (steps(store.folder), steps(tmp_path / "other")) == ([1, 2, 3], [])
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*other"):
        load(tmp_path / "other")


# ------------------------------------------------------------------------------------------------- pointers and pruning


@pytest.mark.parametrize(
    ("best", "keep_best", "pointer", "kept"),
    [
        ("max", 1, "step-00000002", [2, 5, 6]),
        ("max", 3, "step-00000002", [2, 3, 5, 6]),
        ("min", 1, "step-00000001", [1, 5, 6]),
        ("min", 3, "step-00000001", [1, 3, 5, 6]),
        (None, 3, None, [5, 6]),
    ],
)
@pytest.mark.quick(1)
def test_the_last_and_the_best_are_kept(tmp_path, best, keep_best, pointer, kept):
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=keep_best, best=best)
    for step, score in enumerate([0.1, 0.9, 0.3, math.nan, None, 0.2], start=1):
        save(store, step, score=score)
    assert steps(store.folder) == kept
    assert (tmp_path / "latest").read_text() == "step-00000006\n"
    assert names_in(tmp_path) == sorted([*("best" for _ in [0] if best), "latest", *(f"step-{s:08d}" for s in kept)])
    if best:
        assert (tmp_path / "best").read_text().strip() == pointer


def test_the_later_of_equal_scores_is_best(store):
    for step in (1, 2):
        save(store, step, score=1.0)
    assert (store.folder / "best").read_text() == "step-00000002\n"


def test_a_run_that_went_back_goes_on_from_its_own_last(store):
    """Steps 200 and 300 belong to a course that was given up at 100; they leave like other old ones."""
    for step in (100, 200, 300, 110):
        save(store, step)
    assert load(store.folder).step == 110
    assert steps(store.folder) == [110, 200, 300]
    for step in (120, 130):
        save(store, step)
    assert steps(store.folder) == [110, 120, 130]


def test_saving_a_step_again_replaces_it(store):
    save(store, 4, value=1, score=1.0)
    save(store, 4, value=2, score=0.5)
    loaded = load(store.folder)
    assert (loaded.parts["training"]["step"], loaded.score, steps(store.folder)) == (2, 0.5, [4])
    assert names_in(store.folder) == ["best", "latest", "step-00000004"]


# --------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("part", ["model.pt", "training.pt", "manifest.json"])
def test_a_flipped_bit_is_detected_anywhere(store, part, caplog):
    save(store, 1)
    file = save(store, 2) / part
    whole = file.read_bytes()
    for position in sorted({*range(0, len(whole), 97), 0, len(whole) - 1}):
        for bit in (0, 6):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            file.write_bytes(damaged)
            step = load(store.folder, names=()).step
            if part == "manifest.json" and whole[position : position + 1].isspace():
                continue  # the same values in another layout
            assert step == 1, f"bit {bit} of byte {position} of {part}"
    assert "skipped" in caplog.text and part in caplog.text and "step-00000002" in caplog.text


def empty(path: Path) -> None:
    (path / "model.pt").write_bytes(b"")


def newer(path: Path) -> None:
    from ddp.train.checkpoints.checkpoint_store import digest

    manifest = {**json.loads((path / "manifest.json").read_text()), "schema": 2}
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest(manifest)}))


DAMAGES = {
    "has 0 bytes instead of": empty,
    "model.pt cannot be read .No such file": lambda path: (path / "model.pt").unlink(),
    "manifest.json cannot be read .No such file": lambda path: (path / "manifest.json").unlink(),
    "manifest.json has changed since": lambda path: (path / "manifest.json").write_text("{}"),
    "manifest.json is damaged .it is nested": lambda path: (path / "manifest.json").write_text("[" * 100_000),
    "schema is 2, this version of ddp reads 1": newer,
}


@pytest.mark.parametrize("words", DAMAGES)
@pytest.mark.quick(1)
def test_damage_is_named_and_an_earlier_checkpoint_serves(store, words, caplog):
    save(store, 1)
    damaged = save(store, 2)
    DAMAGES[words](damaged)
    with caplog.at_level(logging.WARNING, "ddp"):
        assert load(store.folder).step == load(store.folder, names=()).step == 1
    assert "step-00000002" in caplog.text
    with pytest.raises(CheckpointError, match=f"step-00000002 cannot be loaded: .*{words}.*name another"):
        load(damaged)
    DAMAGES[words](store.folder / "step-00000001")
    with pytest.raises(CheckpointError, match=f"(?s)is whole: .*{words}.*; .*{words}"):
        load(store.folder)
    save(store, 3)  # such folders do not hinder a run
    assert load(store.folder).step == 3


# ------------------------------------------------------------------------------------------------ refused by the disk


def test_a_full_disk_leaves_what_was_there(store):
    save(store, 1)
    before = names_in(store.folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # the kernel refuses what goes beyond
    try:
        with pytest.raises(CheckpointError, match=r"cannot save .*step-00000002: File too large; free some space"):
            store.save(2, {"small": 1, "model": torch.zeros(100_000)}, meta={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names_in(store.folder) == before and load(store.folder).step == 1


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot save .*file/checkpoints: Not a directory"):
        save(CheckpointStore(tmp_path / "file" / "checkpoints"), 1)


@pytest.mark.parametrize(
    ("parts", "meta", "words"),
    [
        ({"model": lambda: 0}, {}, "part 'model' cannot be written"),
        ({"model": Path("x")}, {}, "part 'model' could be written but not read back"),
    ],
)
def test_what_cannot_be_stored_is_refused_when_saving(store, parts, meta, words):
    save(store, 1)
    before = names_in(store.folder)
    with pytest.raises(CheckpointError, match=words):
        store.save(2, parts, meta=meta)
    assert names_in(store.folder) == before


def test_an_interrupted_save_leaves_nothing(store, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(store, 1)
    assert names_in(store.folder) == []


# ---------------------------------------------------------------------------------------------------------------- kills

# One program imports torch once and forks the processes that save and die. The parent checks, after each death, that
# the last save that was reported complete, or the one after it, is loaded whole.
KILLED = """
import os, random, select, signal, sys, time
from pathlib import Path
import torch
from ddp.train.checkpoints.checkpoint_store import CheckpointStore
from ddp.train.checkpoints.checkpoint_store import load

folder, mode = Path(sys.argv[1]), sys.argv[2]
store = CheckpointStore(folder, keep_last=2)
torch.set_num_threads(1)  # a forked child has none of its parent's other threads

def saving(value, steps, report):
    for step in steps:
        value += 1
        parts = {"model": torch.full((50_000,), float(value)), "training": {"value": value}}
        store.save(step, parts, meta={"value": value}, score=-float(value))  # the first stays the best
        os.write(report, b"%d\\n" % value)

def in_a_child(act):
    reader, report = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            act(report)
        finally:
            os._exit(0)
    os.close(report)
    return pid, reader

def check(reader, last):
    while chunk := os.read(reader, 1 << 16):
        last = int(chunk.split()[-1])
    os.close(reader)
    for path in folder.glob("step-*"):
        load(path)  # not one is half, those that were being pruned included
    loaded = load(folder)
    value = loaded.meta["value"]
    assert value in (last, last + 1), (value, last)
    assert loaded.parts["training"]["value"] == value
    assert torch.equal(loaded.parts["model"], torch.full((50_000,), float(value)))
    return value

nobody = os.open(os.devnull, os.O_WRONLY)
saving(0, [0], nobody)
last, num_checks = 1, 0
if mode == "any instant":
    for _ in range(10):
        pid, reader = in_a_child(lambda report: saving(last, (n // 2 for n in range(2 * last, 10**6)), report))
        select.select([reader], [], [])  # it has saved once; then the kill comes whenever it comes
        time.sleep(random.uniform(0.0, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        last = check(reader, last)
        num_checks += 1
else:  # before each single operation on files, told by the interpreter's audit events
    count = 0
    def die_at(number):
        def hook(event, args):
            global count
            if event == "open" or event.startswith(("os.", "shutil.")):
                count += 1
                if count == number:
                    os._exit(9)
        return hook
    status, number = None, 0
    while status != 0:
        number += 1
        def act(report):
            sys.addaudithook(die_at(number))
            saving(last, [0 if mode == "same step" else last], report)
        pid, reader = in_a_child(act)
        status = os.waitpid(pid, 0)[1]
        last = check(reader, last)
        num_checks += 1
        saving(last, [0 if mode == "same step" else last], nobody)  # tidies up, so that every run does equally much
        last += 1
saving(last, [10**6], nobody)
assert not [path for path in folder.iterdir() if path.name.startswith(".")], "leftovers are swept"
print(num_checks)
"""


@pytest.mark.parametrize(("mode", "least"), [("any instant", 10), ("new step", 30), ("same step", 30)])
@pytest.mark.quick(1)
def test_killed_while_saving(tmp_path, mode, least):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path, mode], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= least
