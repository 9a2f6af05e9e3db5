"""Checkpoints in memory that the launcher holds: whole or absent, of one fit alone, and a run continues from them."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import ddp
from ddp.comm.meeting.membership import current_member
from ddp.comm.meeting.secret import FOLDER, MEMORY, VARIABLE, held_memory, holding_memory, private_folder, take_secret
from ddp.errors import CheckpointError, ConfigError
from ddp.replica.broadcast import tensor_hash
from ddp.run.settings.reader import from_plain
from ddp.train.checkpoints import checkpoint_store
from ddp.train.checkpoints.checkpoint import newest_in_memory
from ddp.train.checkpoints.checkpoint_store import IN_MEMORY, CheckpointMemory, CheckpointStore
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import StepReport, TrainState

LOG = logging.getLogger("ddp")


@pytest.fixture
def launch() -> Iterator[Path]:
    """The private folder of a launch; this process is its launcher."""
    with private_folder() as folder, holding_memory(folder):
        yield folder


def memory_of(launch: Path, fit: int = 0) -> CheckpointMemory:
    return CheckpointMemory((launch / MEMORY).read_text().split(), fit=fit)


def parts_of(value: int) -> dict[str, object]:
    return {"model": {"weight": torch.full((300,), float(value))}, "position": {"step": value}}


def saved(memory: CheckpointMemory, *steps: int) -> CheckpointMemory:
    for step in steps:
        memory.save(step, parts_of(step), meta={"value": step})
    return memory


def step_of(memory: CheckpointMemory) -> int | None:
    """The step of the newest whole checkpoint, all of which is as it was saved."""
    if (found := memory.newest()) is None:
        return None
    torch.testing.assert_close(found.parts, parts_of(found.step), rtol=0, atol=0)
    assert found.meta["value"] == found.step
    return found.step


# --- whole or absent --------------------------------------------------------------------------------------------------


def test_the_last_two_are_kept_and_others_than_this_fit_find_none(launch: Path) -> None:
    memory = memory_of(launch, 0)
    assert (step_of(memory), memory.last_step) == (None, None)
    assert step_of(saved(memory, 1, 2, 3)) == 3
    memory.note(5)
    again = memory_of(launch, 0)  # of a rank that has been started again
    assert (step_of(again), again.last_step) == (3, 5)
    assert step_of(memory_of(launch, 1)) is None
    assert step_of(saved(memory_of(launch, 1), 9)) == 9
    assert step_of(again) == 3, "the other fit has taken the place of the older one"
    again.clear()
    assert step_of(memory) is None
    with private_folder() as other, holding_memory(other):
        assert step_of(saved(memory_of(other, 0), 7)) == 7
        assert step_of(memory) is None, "two launches at once do not mix"


def test_whatever_byte_has_changed_the_other_one_is_taken(launch: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = saved(memory_of(launch), 1, 2)
    path = Path((launch / MEMORY).read_text().split()[1])
    whole = path.read_bytes().rstrip(b"\0")  # more is reserved
    for position in range(0, len(whole), 1 if len(whole) < 100 else 61):
        with path.open("r+b") as file:
            file.write(whole)
            file.seek(position)
            file.write(bytes([whole[position] ^ 0x40]))
        caplog.clear()
        step = step_of(memory)
        is_counter = 16 <= position < 24
        assert step == (2 if is_counter else 1), position
        if not is_counter:
            assert "dropped" in caplog.text, position
            with path.open("rb") as file:  # so that the next save does not take the place of the whole one
                assert not any(file.read(16))


def test_a_kill_before_any_write_leaves_a_whole_one(launch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, left = os.pwrite, 0

    def alive(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal left
        left -= 1
        return write(descriptor, data, offset) if left >= 0 else len(data)

    monkeypatch.setattr(os, "pwrite", alive)
    found = []
    while not found or found[-1] == 2:
        left = 1000
        memory = saved(memory_of(launch), 1, 2)
        left = len(found)
        saved(memory, 3)
        left = 1000
        found.append(step_of(memory_of(launch)))
    assert found == [2] * (len(found) - 1) + [3]
    assert len(found) > 20


def test_memory_that_is_not_there_is_told_with_both_numbers(
    launch: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory, parts = memory_of(launch), {"model": torch.zeros(1 << 20)}
    monkeypatch.setattr(checkpoint_store, "available_bytes", lambda: 3 << 20)
    with pytest.raises(ConfigError, match=r"two checkpoints need 10.1 MiB more memory, and 3 MiB are free .*every_ste"):
        memory.save(0, parts, meta={})
    saved(memory, 1)
    with pytest.raises(ConfigError, match=r"and 3 MiB are free here; leave it out"):
        memory.save(2, parts, meta={})
    saved(memory, 2)
    for step in (3, 4):
        memory.save(step, parts, meta={})
    assert (caplog.text.count("no checkpoint of step 3 in memory"), caplog.text.count("of step 4")) == (1, 0)
    assert step_of(memory) == 2
    monkeypatch.undo()
    memory.save(5, parts, meta={})
    assert memory.newest().step == 5  # type: ignore[union-attr]


def test_what_cannot_be_loaded_is_refused_at_once(launch: Path) -> None:
    memory = saved(memory_of(launch), 1, 2)
    with pytest.raises(CheckpointError, match="part 'model' must hold tensors and plain values only"):
        memory.save(3, {"model": LOG}, meta={})
    assert [step_of(memory), memory.clear(), step_of(saved(memory, 4))] == [2, None, 4]


def test_the_disk_is_taken_if_it_is_newer_or_none_in_memory_is_whole(launch: Path, tmp_path: Path) -> None:
    memory, store = memory_of(launch), CheckpointStore(tmp_path / "checkpoints")
    assert newest_in_memory(memory, None) is newest_in_memory(memory, tmp_path) is None
    saved(memory, 4, 6)
    for step in (5, 6):
        store.save(step, parts_of(step), meta={})
    for newer in (7, None):
        found = newest_in_memory(memory_of(launch), tmp_path)
        assert found is not None
        assert found.step == (newer or 7) - (newer is not None)
        if newer is not None:
            assert found.path == IN_MEMORY
            path = store.save(newer, parts_of(newer), meta={})
        else:
            assert found.path == path
    for slot in (launch / MEMORY).read_text().split():
        with Path(slot).open("r+b") as file:
            file.seek(500)
            file.write(b"damage")
    found = newest_in_memory(memory_of(launch), tmp_path)
    assert found is not None
    assert found.step == 7


def test_memory_of_others_is_not_opened(launch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    mine = os.open(tmp_path / "file", os.O_RDWR)
    for paths in ([], ["/proc/1/fd/99999"], [str(tmp_path / "file")], [f"/proc/{os.getpid()}/fd/{mine}"]):
        with pytest.raises(
            ConfigError, match=r"memory_steps: no launcher .* holds memory; start the run by ddp.launch"
        ):
            CheckpointMemory(paths, fit=0).newest()
    os.close(mine)
    for variable in (VARIABLE, FOLDER):
        monkeypatch.setenv(variable, "")  # which is put back
    take_secret(launch)
    assert held_memory() == []  # this process is no rank
    monkeypatch.setenv("MASTER_PORT", "1")
    take_secret(launch)
    assert len(held_memory()) == 2
    monkeypatch.setenv("MASTER_PORT", "2")  # a child of a rank, which is one of another job
    assert held_memory() == []


# --- a whole run ------------------------------------------------------------------------------------------------------


class KillAt(Callback):
    """Kills every rank after a step, once two others are ready."""

    def __init__(self, step: int) -> None:
        self.step = step

    def step_end(self, state: TrainState, report: StepReport) -> None:
        member = current_member()
        if state.step == self.step and member is not None and state.comm.generation == 0:
            while not member.store.check(["ready/2", "ready/3"]):
                time.sleep(0.01)
            time.sleep(0.3 * (1 + state.comm.rank))  # until all have committed it; the last one meets nobody any more
            os.kill(os.getpid(), signal.SIGKILL)


def fitted(kill: int, folder: str | None, given: dict[str, Any]) -> tuple[int, str, Any, list[str]]:
    """(step, hash of parameters, optimizer state and averages, the run's folder, what it says of repeated steps)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(60, 4, generator=generator), torch.randint(0, 2, (60,), generator=generator)
    keeps = {"progress": False, "curves": False, "log_every": 1, **given.get("folder", {})}
    paths = [] if folder == "unnamed" else [folder]
    average, said = ddp.EMA(0.9), list[str]()
    notes = logging.Handler()
    notes.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(notes)
    LOG.setLevel(logging.INFO)
    optimizer = AdamW(net.parameters(), lr=0.01)
    state = ddp.fit(
        net,
        data,
        optimizer,
        loss=nn.functional.cross_entropy,
        global_batch=8,
        max_steps=given.get("max_steps", 14),
        test_data=data,
        folder=ddp.Folder(*paths, **keeps),
        strategy=given.get("strategy", "auto"),
        callbacks=[average, *([KillAt(kill)] if kill else [])],
    )
    moments = [value for each in optimizer.state.values() for value in each.values()]
    assert average.averaged is not None
    tensors = [*net.state_dict().values(), *moments, *average.averaged.state_dict().values()]
    bits = tensor_hash(torch.cat([each.detach().reshape(-1).double() for each in tensors]))
    ddp.shutdown()
    return state.step, bits, state.run_dir, [each for each in said if "repeats" in each]


def run(kill: int, where: Path | str | None, **given: Any) -> list[Any]:
    name = None if where is None else str(where)
    how = {"min_workers": 2, "spares": 2, "restarts": 0} if kill else {}
    return ddp.launch(fitted, kill, name, given, workers=2, timeout_s=60, **how)


@pytest.mark.parametrize("strategy", ["auto", "sharded", "central_storage"])
@pytest.mark.quick(2)
def test_all_killed_at_once_go_on_from_memory_with_the_same_bits(tmp_path: Path, strategy: str) -> None:
    whole = [each[:2] for each in run(0, None, strategy=strategy)]
    for kill, folder, last in ((11, tmp_path / "run", 9), (5, None, 3), (1, None, 0)):
        again = run(kill, folder, strategy=strategy, folder={"memory_steps": 3})
        assert [each[:2] for each in again] == whole
        assert again[0][3] == [f"continues from memory after step {last}: repeats {kill - last} step{'s' * (kill > 1)}"]


def test_a_run_without_a_name_goes_on_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [(step, _, where, said), _] = run(7, "unnamed", folder={"memory_steps": 4, "every_steps": 6})
    [first] = (tmp_path / "runs").iterdir()
    assert (step, where) == (14, first)
    assert said == [
        f"continues from {first.relative_to(tmp_path)}/checkpoints/step-00000006 after step 6: repeats 1 step"
    ]
    lines = [line for line in (first / "metrics.jsonl").read_text().splitlines() if '"kind": "step"' in line]
    assert len(lines) == 14, "each step once"


class Poison(Callback):
    """Makes a weight NaN before step 8, once; notes how many checkpoints are in memory then, and after going back."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def _count(self) -> None:
        self.counts.append(len(CheckpointMemory(held_memory(), fit=0)._saved()))

    def step_start(self, state: TrainState) -> None:
        if state.step == 7 and not self.counts:
            self._count()
            next(state.model.module.parameters()).data.fill_(torch.nan)

    def went_back(self, state: TrainState) -> None:
        self._count()


def guarded(folder: str) -> list[int]:
    net, data, poison = nn.Linear(4, 2), (torch.randn(64, 4), torch.randint(0, 2, (64,))), Poison()
    ddp.fit(
        net,
        data,
        SGD(net.parameters(), lr=0.1),
        loss=nn.functional.cross_entropy,
        global_batch=8,
        max_steps=9,
        folder=ddp.Folder(folder, memory_steps=2, every_steps=3, progress=False, curves=False),
        callbacks=[poison, ddp.Guard("go_back")],
    )
    poison._count()
    ddp.shutdown()
    return poison.counts


def test_memory_is_emptied_when_the_guard_goes_back_to_an_earlier_one(tmp_path: Path) -> None:
    """What was saved after it belongs to a course that was given up."""
    assert ddp.launch(guarded, str(tmp_path / "run"), workers=1, min_workers=1) == [[2, 0, 1]]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_launch_that_keeps_its_workers_is_told(tmp_path: Path) -> None:
    net = nn.Linear(4, 2)
    data = torch.randn(8, 4), torch.randint(0, 2, (8,))
    given: dict[str, Any] = {"loss": nn.functional.cross_entropy, "global_batch": 8, "epochs": 1}
    with pytest.raises(ConfigError, match=r"memory_steps=2: without min_workers a lost worker ends the lau"):
        ddp.fit(net, data, SGD(net.parameters(), lr=0.1), folder=ddp.Folder(None, memory_steps=2), **given)
    with pytest.raises(ConfigError, match=r"memory_steps=-1: must be a whole number from 0 up"):
        ddp.Folder(tmp_path, memory_steps=-1)
    ddp.shutdown()
    served = {"strategy": {"name": "parameter_server"}, "cluster": {"servers": 1}, "checkpoint": {"memory_steps": 5}}
    with pytest.raises(ConfigError, match=r"^checkpoint\.memory_steps=5: with strategy=parameter_server servers keep"):
        from_plain(served)


def too_much() -> None:
    checkpoint_store.available_bytes = lambda: 1 << 20  # type: ignore[attr-defined]
    fitted(0, None, {"folder": {"memory_steps": 2}})


def test_too_little_memory_ends_a_run_before_its_first_step() -> None:
    with pytest.raises(ConfigError, match=r"memory_steps: two checkpoints need 2\.\d+ MiB more memory, and 1 MiB"):
        ddp.launch(too_much, workers=2, min_workers=1)


def launched() -> int:
    return len(held_memory())


def test_a_launch_holds_memory_and_leaves_nothing() -> None:
    def held() -> list[str]:
        links = (path for path in Path("/proc/self/fd").iterdir())
        return [name for path in links if path.is_symlink() and "ddp-checkpoint" in (name := str(path.readlink()))]

    before = held(), set(Path("/dev/shm").glob("ddp-*"))
    assert ddp.launch(launched, workers=1) == [2]
    assert held() == before[0]
    assert set(Path("/dev/shm").glob("ddp-*")) <= before[1]
