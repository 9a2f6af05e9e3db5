"""A region: a look gets the numbers of one moment, or an error that says why there are none."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import re
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import collect, run_ranks, start_ranks, unfailed
from regions import new_name, showing
from torch import Tensor, nn

import ddp
from ddp.errors import CheckpointError, ConfigError
from ddp.process.memory import ask_for_signal
from ddp.run.assembly import stages
from ddp.run.settings.reader import from_plain
from ddp.strategies import region
from ddp.strategies.region import Region, look

NUMEL = 1 << 15


@pytest.fixture
def name() -> Iterator[str]:
    """A name that no other test run has; nothing is left of its regions."""
    with new_name() as name:
        yield name


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look gets a snapshot of its own."""
    monkeypatch.setattr(region, "EVERY_S", 0.0)


def one(
    name: str, *, about: dict[str, Any] | None = None, folder: Path | None = None
) -> tuple[Region, dict[str, Tensor]]:
    """Returns a region, and its numbers."""
    state = {"weight": torch.zeros(NUMEL), "buffer": torch.zeros(3)}
    return Region(name, lambda: state, about or {}, folder=folder), state


def end(kept: Region, state: dict[str, Tensor], step: int) -> None:
    """Makes all numbers those of a step, and ends it; a snapshot of it is written then."""
    for each in state.values():
        each.fill_(step)
    kept.step_ended(step)
    kept.wait()


def asked(name: str) -> bool:
    return (region._folder(name) / "asked").exists()


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def numbers(found: region.Look) -> set[float]:
    return {found.step, *(value for each in found.weights.values() for value in each.flatten().unique().tolist())}


class Odd(nn.Module):
    """Has tensors of several types and forms, and two keys for one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.second = nn.Linear(4, 4, dtype=torch.float64)
        self.tied = self.second
        self.none = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("wave", torch.tensor(1 + 2j))


def test_a_look_is_the_state_dict_in_memory_of_its_own(name: str, unlimited: None) -> None:
    torch.manual_seed(0)
    module = Odd()
    state = module.state_dict()
    about = {"run_dir": None, "sizes": [1, 2]}
    kept = Region(name, lambda: module.state_dict(keep_vars=True), about)
    with showing(kept, 7):
        found = look(name)
        assert (found.step, found.about) == (7, about)
        for key, value in state.items():
            assert found.weights[key].equal(value) and found.weights[key].dtype == value.dtype, key
            assert found.weights[key].stride() == value.stride(), key
        assert found.weights.keys() == state.keys()
        assert found.weights["second.weight"].data_ptr() == found.weights["tied.weight"].data_ptr()
        torch.save(found.weights, io.BytesIO())
        with torch.no_grad():
            module.conv.weight.fill_(5)
        module.norm(torch.randn(2, 4, 3, 3))
        with torch.device("meta"):
            later = look(name).weights
        assert later["norm.running_mean"].equal(module.norm.running_mean) and later["norm.num_batches_tracked"] == 1
        assert (later["conv.weight"] == 5).all() and not (found.weights["conv.weight"] == 5).any()
        nn.Module.load_state_dict(Odd(), later)
    kept.close()


# --- one moment ------------------------------------------------------------------------------------------------------


def test_a_snapshot_serves_all_who_ask_and_is_made_for_nobody_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, state = one(name, folder=tmp_path)
    clock_s = 0.0
    monkeypatch.setattr(region, "now_s", lambda: clock_s)
    kept._last_s = -10.0
    snapshot = tmp_path / "region.pt"
    with ThreadPoolExecutor(2) as lookers:
        for step, later_s in ((1, 0.0), (2, 10.0), (3, 10.0)):
            clock_s += later_s
            end(kept, state, step * 10)
            assert [path.name for path in tmp_path.iterdir()] == (["region.pt"] if step > 1 else [])
            if step > 1:
                os.utime(snapshot, (time.time() - 11,) * 2)  # too old by now
            looks = [lookers.submit(look, name) for _ in range(2)]
            wait_until(lambda: asked(name))
            if step > 1:
                clock_s -= 0.5
                end(kept, state, step * 10 + 1)  # too early
                assert asked(name) and not any(each.done() for each in looks)
                clock_s += 0.5
            end(kept, state, step * 10 + 2)
            assert [numbers(each.result()) for each in looks] == [{step * 10 + 2}] * 2
            assert not asked(name) and numbers(look(name)) == {step * 10 + 2}  # which is new enough
            assert stat.S_IMODE(snapshot.stat().st_mode) == 0o600
    kept.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails", ["copy", "write"])
def test_a_snapshot_that_cannot_be_made_is_a_warning_and_the_next_one_can(
    name: str, fails: str, caplog: pytest.LogCaptureFixture, unlimited: None, tmp_path: Path
) -> None:
    kept, state = one(name, folder=tmp_path / "run")
    (tmp_path / "run").mkdir()
    with ThreadPoolExecutor(1) as looker:
        found = looker.submit(look, name)
        wait_until(lambda: asked(name))
        if fails == "copy":
            buffer = state.pop("buffer")
            kept._state, whole = (lambda: {"buffer": None}), kept._state  # type: ignore[dict-item,return-value]
            kept.step_ended(1)
            kept._state, state["buffer"] = whole, buffer
        else:
            (tmp_path / "run").rename(tmp_path / "moved")
            end(kept, state, 1)
            (tmp_path / "moved").rename(tmp_path / "run")
        [record] = caplog.records
        says = "AttributeError" if fails == "copy" else "FileNotFoundError"
        assert re.search(f"^region={name} shows nothing new, and the training continues: {says}", record.getMessage())
        wait_until(lambda: asked(name))
        end(kept, state, 2)
        assert numbers(found.result()) == {2}
    kept.close()


def keep_updating(name: str) -> None:
    """Makes all numbers those of the next step, again and again, until it is killed."""
    (kept, state), step = one(name), 0
    while True:
        step += 1
        for each in state.values():
            each.fill_(step)
        kept.step_ended(step)


def begun(name: str, work: Callable[..., None], *args: Any) -> int:
    """Returns a child that keeps a region, and is killed with this process; `work(name, …)` is all that it does."""
    if not (pid := os.fork()):
        try:
            ask_for_signal(signal.SIGKILL)
            work(name, *args)
        finally:
            os._exit(1)
    wait_until(lambda: region._kept_entry(region._folder(name)))
    return pid


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def look_while_it_is_updated(name: str, num_looks: int) -> int:
    region.EVERY_S = 0.0
    pid = begun(name, keep_updating)
    steps = set()
    for _ in range(num_looks):
        found = look(name)
        assert numbers(found) == {found.step}
        steps.add(found.step)
    killed(pid)
    region.EVERY_S = 10.0  # what it has left would be new enough
    for _ in range(2):  # of a process that has ended, and of none
        with pytest.raises(CheckpointError, match="no run on this host keeps region="):
            look(name)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    assert (region._folder(name) / "region.pt").exists()
    with showing(one(name)[0], 0):  # what the killed one has left is no obstacle, and is not shown
        assert numbers(look(name)) == {0}
    return len(steps)


def test_no_look_has_half_an_update(name: str) -> None:
    [num_steps] = run_ranks(look_while_it_is_updated, 1, name, 40)
    assert num_steps == 40


def write_half(name: str, folder: Path) -> None:
    """Ends a step for whoever asks, and is never through with its second snapshot."""
    kept, state = one(name, about={"run_dir": "runs/mine"}, folder=folder)
    save, num_saves = torch.save, 0

    def save_half(snapshot: Any, file: Any) -> None:
        nonlocal num_saves
        num_saves += 1
        if num_saves == 2:
            file.write(b"half")
            file.flush()
            time.sleep(600)
        save(snapshot, file)

    torch.save = save_half
    step = 0
    while True:
        step += 1
        for each in state.values():
            each.fill_(step)
        kept.step_ended(step)


def look_at_half_a_snapshot(name: str, folder: Path) -> None:
    region.EVERY_S = 0.0
    pid = begun(name, write_half, folder)
    first = look(name)
    assert numbers(first) == {first.step}
    region.LONGEST_LOOK_S = 0.1
    says = rf"for 0.1 s, process {pid} on host .* has made no snapshot, .* ddp.load\('runs/mine', 'latest'\)"
    with pytest.raises(CheckpointError, match=says):
        look(name)
    region.LONGEST_LOOK_S = 30
    wait_until(lambda: (folder / ".tmp-region.pt").exists())
    threading.Timer(0.05, killed, (pid,)).start()
    with pytest.raises(CheckpointError, match=rf"process {pid} .* was killed: load its last"):
        look(name)
    os.waitpid(pid, 0)
    assert len(list(folder.iterdir())) == 2
    one(name, folder=folder)[0].close()
    assert not list(folder.iterdir())


def test_a_run_that_is_killed_while_it_writes_leaves_no_half_snapshot(name: str, tmp_path: Path) -> None:
    run_ranks(look_at_half_a_snapshot, 1, name, tmp_path)


@pytest.mark.parametrize("how", ["before a step", "after its snapshot", "and another begins", "and is asked meanwhile"])
def test_a_run_that_ends_while_it_is_asked_is_told(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (kept, state), rmdir = one(name), Path.rmdir

    def next_poll(_: float) -> None:
        if how == "after its snapshot":
            end(kept, state, 1)
            monkeypatch.setattr(region, "to_read", lambda path: (kept.close(), path.open("rb"))[1])
        elif how == "and is asked meanwhile":
            with monkeypatch.context() as once:
                once.setattr(Path, "rmdir", lambda folder: ((folder / "asked").touch(), rmdir(folder)))
                kept.close()
        else:
            kept.close()
        if how == "and another begins":
            kept.__init__(name, dict, {"run_dir": "runs/other"})  # type: ignore[misc]

    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", next_poll)
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} .* has just ended: start it again"):
            look(name)
    kept.close()
    with pytest.raises(CheckpointError, match="no run on this host keeps region="):
        look(name)


# --- who keeps it ----------------------------------------------------------------------------------------------------


def keep_until_the_end(name: str, exits: bool) -> None:
    kept, *_ = one(name, about={"run_dir": "runs/first"})
    with pytest.raises(ConfigError, match=f"is kept by process {os.getpid()} .*, for the run in runs/first: wait"):
        one(name)
    if not (pid := os.fork()):
        kept.close()  # a child that has inherited it
        says = ""
        try:
            one(name)
        except ConfigError as error:
            says = str(error)
        os._exit(0 if f"process {os.getppid()} on host" in says else 1)
    assert os.waitpid(pid, 0)[1] == 0
    end_a_step = threading.Thread(target=lambda: (wait_until(lambda: asked(name)), kept.step_ended(3)))
    end_a_step.start()
    assert look(name).step == 3
    end_a_step.join()
    atexit._run_exitfuncs() if exits else kept.close()
    with pytest.raises(CheckpointError, match="no run on this host keeps region="):
        look(name)


@pytest.mark.parametrize("exits", [False, True])
def test_one_process_keeps_a_name_until_it_closes_it_or_exits(name: str, exits: bool) -> None:
    run_ranks(keep_until_the_end, 1, name, exits)


def test_names_that_are_kept_are_told_the_nearest_first(name: str) -> None:
    kept = [one(f"{prefix}-{name}")[0] for prefix in ("circles", "digits", "digests")]
    with pytest.raises(CheckpointError) as told:
        look(f"digitz-{name}")
    said = str(told.value)
    places = [said.index(f" {prefix}-{name}") for prefix in ("digits", "digests", "circles")]
    assert places == sorted(places) and f"keeps region=digitz-{name}: take one of those kept, digits-" in said
    strategy = {"name": "central_storage", "region": f"digits-{name}"}
    config = from_plain({"strategy": strategy, "data": {"name": "synthetic", "num_samples": 64, "image_size": 8}})
    with pytest.raises(ConfigError, match=f"region=digits-{name} is kept by process {os.getpid()} .*: wait"):
        stages.check(config)  # before workers start
    for each in kept:
        each.close()
    stages.check(config)


def test_what_is_not_this_user_s_or_not_of_this_container_is_told(name: str) -> None:
    folder = Path(f"/dev/shm/ddp-region-{os.geteuid()}-{name}")
    other = folder.with_name(f"ddp-region-4321-{name}")
    other.mkdir()
    try:
        if os.geteuid() == 0:
            os.chown(other, 4321, 4321)
            with pytest.raises(CheckpointError, match="belongs to user 4321, and only that user can look at it"):
                look(name)
        folder.mkdir()
        folder.chmod(0o777)
        with pytest.raises(ConfigError, match=f"others may enter {folder}"):
            one(name)
        (folder / "region.json").write_text("{}")
        with pytest.raises(CheckpointError, match=f"others may enter {folder}"):
            look(name)
        (folder / "region.json").unlink()
        folder.chmod(0o700)
    finally:
        other.rmdir()
    kept, *_ = one(name)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match="is kept by"):
        region.refuse_kept(name)
    folder.chmod(0o777)
    region.refuse_kept(name)  # others could have written that it is kept
    folder.chmod(0o700)
    (folder / "region.json").write_text("{")
    with pytest.raises(CheckpointError, match="no run on this host keeps region="):
        look(name)
    kept.close()


def damaged(entry: dict[str, Any]) -> Iterator[str]:
    """Yields texts that a region.json may have and none is written with."""
    yield from ("", "[]", "{}", "\0", json.dumps(entry)[:-1], "[" * 100_000)
    for key in entry:
        yield from (json.dumps({**entry, key: value}) for value in (None, -1, "no", [], ["no"] * 3, {"a": ["no"] * 6}))
    yield json.dumps({**entry, "pid": 1 << 70})


def test_a_region_whose_files_are_damaged_is_none(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kept, *_), (sound, *_) = one(name, folder=tmp_path), one(f"{name}-b")
    path = region._folder(name) / "region.json"
    entry = json.loads(path.read_text())
    monkeypatch.setattr(region, "LONGEST_LOOK_S", 0.0)
    others = []
    for text in damaged(entry):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=f"region={name}") as told:
            look(name)
        others += [text] if "for 0 s" in str(told.value) else []
        with pytest.raises(CheckpointError, match=f"{name}-b"):
            look(f"{name}-c")
        region.refuse_kept(f"{name}-c")
        with contextlib.suppress(ConfigError):
            region.refuse_kept(name)
        with pytest.raises(ConfigError, match=f"region={name} is kept by "):
            one(name)
    changed = ({"host": "no"}, {"snapshot": "no"}, {"about": {"a": ["no"] * 6}})
    assert others == [json.dumps({**entry, **each}) for each in changed]  # which are as good
    path.write_text(json.dumps(entry))
    for content in (b"", b"no", b"\x80\x02N."):
        (tmp_path / "region.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"region={name}: {tmp_path}/region.pt is damaged \(.*: start it"):
            look(name)
    (tmp_path / "region.pt").unlink()
    (tmp_path / "elsewhere").touch()
    (tmp_path / "region.pt").symlink_to("elsewhere")
    with pytest.raises(CheckpointError, match="is a link"):
        look(name)
    sound.close()
    kept.close()


def test_what_another_user_may_leave_in_the_place_of_a_region_is_told_at_once(name: str) -> None:
    folder = region._folder(name)
    for leave in (folder.touch, lambda: folder.symlink_to("nowhere")):
        leave()
        folder.chmod(0o600) if folder.exists() else None
        with pytest.raises(ConfigError, match=f"^region={name}: .*{folder}.*: .*take another name"):
            one(name)
        with pytest.raises(CheckpointError, match=f"region={name}"):
            look(name)
        folder.unlink()
    folder.mkdir(mode=0o700)
    os.mkfifo(entry := folder / "region.json")  # which would wait for a writer
    for rights, says in ((0o700, "no run on this host keeps region="), (0o777, "others may enter")):
        folder.chmod(rights)
        with pytest.raises(CheckpointError, match=says):
            look(name)
        with pytest.raises(CheckpointError, match=f"region={name}-b"):
            look(f"{name}-b")
        region.refuse_kept(name)
    entry.unlink()
    folder.rmdir()


@pytest.mark.parametrize("bad", ["", "a/b", "..", "-x", "ä", "x" * 101, 3])
def test_names_that_cannot_be_used(bad: Any) -> None:
    for use in (one, look):
        with pytest.raises(ConfigError, match=rf"region={re.escape(repr(bad)[:9])}.*: take letters, digits"):
            use(bad)


# --- central storage -------------------------------------------------------------------------------------------------


class Replacing(nn.Module):
    """Counts its forwards in a buffer that it replaces, and has BatchNorm and a layer by two names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 1)
        self.again = self.first
        self.register_buffer("num_forwards", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_forwards = self.num_forwards + 1
        return self.last(self.norm(self.first(inputs)).relu())


def follow(name: str) -> None:
    """Trains on two ranks, of which the second one looks at each step."""
    region.EVERY_S = 0.0
    comm = ddp.init()
    torch.manual_seed(0)
    strategy = ddp.strategies.CentralStorage(net := Replacing(6), torch.optim.AdamW(net.parameters(), lr=0.1))
    strategy.publish(name, {"run_dir": "runs/mine"})
    with ThreadPoolExecutor(1) as looker:
        for step in range(1, 5):
            if comm.rank:
                wait_until(lambda: not asked(name))
                looking = looker.submit(look, name)
                wait_until(lambda: asked(name))
            comm.barrier()
            strategy.model(torch.randn(5 + comm.rank, 8)).square().mean().backward()
            ddp.strategies.step(strategy)
            if comm.rank:
                found = looking.result()
                assert found.step == step and found.about == {"run_dir": "runs/mine"}
                state = net.state_dict()
                assert found.weights.keys() == state.keys() and found.weights["num_forwards"] == step
                differ = {key for key, each in state.items() if not found.weights[key].equal(each)}
                assert differ == {"norm.running_mean", "norm.running_var"}  # which are those of rank 0
    with pytest.raises(ConfigError, match="publishes under another name already"):  # on each rank
        strategy.publish(name, {})
    comm.barrier()
    strategy.finish()
    comm.barrier()
    with pytest.raises(CheckpointError, match="no run on this host keeps region="):
        look(name)
    ddp.shutdown()


def test_a_region_of_central_storage_is_its_state_dict_after_each_step(name: str) -> None:
    run_ranks(follow, 2, name)


def checksum(parameters: Iterable[Tensor]) -> int:
    return sum(int(each.detach().view(torch.int32).sum(dtype=torch.int64)) for each in parameters)


def train_until(name: str, width: int, ending: Path) -> list[int]:
    """Trains until there is a file; returns what the parameters were after each step."""
    region.EVERY_S = 0.0
    comm = ddp.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    strategy = ddp.strategies.CentralStorage(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    were = [checksum(net.parameters())]
    strategy.publish(name, {})
    inputs = torch.randn(2, width)
    while not comm.agree_any(comm.rank == 0 and ending.exists()):
        strategy.model(inputs).square().mean().backward()
        ddp.strategies.step(strategy)
        were.append(checksum(net.parameters()))
    strategy.finish()
    ddp.shutdown()
    return were


def look_at_training(name: str, folder: Path, *, width: int, num_looks: int) -> int:
    """Looks at two workers that train; returns how many of their steps were seen."""
    started = start_ranks(train_until, 2, name, width, folder / "ending")
    seen: list[tuple[int, int]] = []
    deadline_s = time.monotonic() + 60
    while len(seen) < num_looks or (len({step for step, _ in seen}) < 3 and time.monotonic() < deadline_s):
        try:
            found = look(name)
        except CheckpointError:
            assert not seen and time.monotonic() < deadline_s
            time.sleep(0.01)
        else:
            seen.append((found.step, checksum(found.weights.values())))
    (folder / "ending").touch()
    were, _ = unfailed(collect(started))
    assert len(set(were)) == len(were) and [value for _, value in seen] == [were[step] for step, _ in seen]
    return len({step for step, _ in seen})


def test_no_look_has_half_a_step_of_two_workers(name: str, tmp_path: Path, unlimited: None) -> None:
    assert look_at_training(name, tmp_path, width=128, num_looks=40) > 2


class Follows(ddp.Callback):
    """Lets a thread of rank 1 look at each step, compares what it finds, and may end the run by an error."""

    def __init__(self, name: str, *, fails_at: int = -1) -> None:
        self.name, self.fails_at, self.looker = name, fails_at, ThreadPoolExecutor(1)
        self.steps: list[int] = []

    def fit_start(self, state: Any) -> None:
        if state.comm.rank:
            wait_until(lambda: not asked(self.name))
            self.looking = self.looker.submit(look, self.name)
            wait_until(lambda: asked(self.name))
        state.comm.barrier()

    def step_end(self, state: Any, report: Any = None) -> None:
        if state.comm.rank:
            found = self.looking.result()
            weights = state.model.module.state_dict()
            assert all(found.weights[key].equal(each) for key, each in weights.items())
            assert found.about == {"run_dir": str(state.run_dir), "sample_shape": None, "num_classes": None}
            self.steps.append(found.step)
        state.comm.barrier()  # rank 1 has it before the run may end
        if state.step == self.fails_at:
            raise ArithmeticError("of a callback")
        self.fit_start(state)


def fit_and_follow(name: str, folder: Path) -> None:
    region.EVERY_S = 0.0
    comm = ddp.init()
    data = torch.randn(40, 8), torch.randn(40, 1)

    def fit(follows: Follows, max_steps: int) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
        return ddp.fit(
            net,
            data,
            torch.optim.AdamW(net.parameters()),
            loss=nn.functional.mse_loss,
            global_batch=4,
            max_steps=max_steps,
            test_data=data,
            strategy=ddp.Averaging(strategy="central_storage", region=name),
            folder=ddp.Folder(folder, resume="auto", progress=False, curves=False),
            callbacks=[ddp.EMA(0.9), follows],
        )

    def nothing_is_left() -> None:
        comm.barrier()
        with pytest.raises(CheckpointError, match="no run on this host keeps region="):
            look(name)
        assert not list(folder.glob("*region*"))
        comm.barrier()  # both have looked before there is another one

    for first, last in ((0, 3), (3, 5)):
        fit(follows := Follows(name), last)
        assert follows.steps == ([*range(first + 1, last + 1)] if comm.rank else [])
        if comm.rank:
            with pytest.raises(CheckpointError, match=r"process .* has just ended: load its last checkpoint, ddp.load"):
                follows.looking.result()
        nothing_is_left()
    with pytest.raises(ArithmeticError, match="of a callback"):
        fit(Follows(name, fails_at=6), 9)
    nothing_is_left()
    if comm.rank == 0:
        kept, *_ = one(name)
    comm.barrier()
    with pytest.raises(ConfigError, match=f"region={name} is kept by process"):
        fit(Follows(name), 9)
    comm.barrier()
    if comm.rank == 0:
        kept.close()
    ddp.shutdown()


@pytest.mark.slow
def test_fit_publishes_until_it_ends_however_that_is(name: str, tmp_path: Path) -> None:
    run_ranks(fit_and_follow, 2, name, tmp_path / "run")
