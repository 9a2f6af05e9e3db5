"""A region: whoever looks gets the numbers of one moment, and is told why where there are none."""

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
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import collect, run_ranks, start_ranks, unfailed
from regions import new_name, shared
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


def one(name: str, *, about: dict[str, Any] | None = None) -> tuple[Region, Tensor, Tensor]:
    """Returns a region of two numbers, one a parameter, one a buffer."""
    memory, found = shared({"weight": torch.zeros(1)})
    buffer = torch.zeros(1)
    return Region(name, memory, found, lambda: {"buffer": buffer}, about or {}), found["weight"], buffer


def update(kept: Region, weight: Tensor, buffer: Tensor, step: int, *, half: Callable[[], None] = lambda: None) -> None:
    """Makes all numbers those of a step."""
    buffer.fill_(step)
    kept.begin()
    weight.fill_(step)
    half()
    kept.end(step)


def numbers(found: region.Look) -> set[float]:
    return {found.step, *(value for each in found.weights.values() for value in each.flatten()[:: NUMEL - 1].tolist())}


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


def test_a_look_is_the_state_dict_in_memory_of_its_own(name: str) -> None:
    torch.manual_seed(0)
    module = Odd()
    state = module.state_dict()
    memory, inside = shared(dict(module.named_parameters()))
    tensors = {**inside, **{key.replace("second", "tied"): inside[key] for key in inside if "second" in key}}
    buffers = dict(module.named_buffers())
    kept = Region(name, memory, tensors, lambda: buffers, {"run_dir": None, "sizes": [1, 2]}, step=7)
    found = look(name)
    assert (found.step, found.about) == (7, {"run_dir": None, "sizes": [1, 2]})
    for key, value in state.items():
        assert found.weights[key].equal(value) and found.weights[key].dtype == value.dtype, key
        assert found.weights[key].stride() == value.stride(), key
    assert found.weights.keys() == state.keys()
    assert found.weights["second.weight"].data_ptr() == found.weights["tied.weight"].data_ptr()
    torch.save(found.weights, io.BytesIO())

    module.norm(torch.randn(2, 4, 3, 3))
    earlier, later = {key: each.clone() for key, each in found.weights.items()}, look(name).weights
    assert later["norm.running_mean"].equal(earlier["norm.running_mean"])  # until the next update ends
    kept.begin()
    inside["conv.weight"].fill_(5)
    kept.end(8)
    later = look(name).weights
    assert later["norm.running_mean"].equal(buffers["norm.running_mean"]) and later["norm.num_batches_tracked"] == 1
    assert (later["conv.weight"] == 5).all() and all(found.weights[key].equal(each) for key, each in earlier.items())
    nn.Module.load_state_dict(Odd(), later)
    kept.close()
    kept.close()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (torch.zeros(1), r"the buffer buffer is \[1\] of torch.float32 now, and was \[3\] of torch.float32 when"),
        (torch.zeros(3, dtype=torch.int64), r"is \[3\] of torch.int64 now"),
        (None, "AttributeError"),
    ],
)
def test_a_buffer_that_changes_its_form_ends_the_region_alone_and_nothing_stays_open(
    name: str, changed: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    memory, found = shared({"weight": torch.zeros(1)})
    buffers = {"buffer": torch.zeros(3)}
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept = Region(name, memory, found, lambda: buffers, {})
    assert look(name).step == 0
    buffers["buffer"] = changed
    for step in (1, 2):
        kept.begin()
        kept.end(step)
    [record] = caplog.records
    assert re.search(f"^region={name} ends here, and the training goes on: .*{says}", record.getMessage())
    with pytest.raises(CheckpointError, match="nobody on this host keeps region="):
        look(name)
    kept.close()
    del kept  # and with it the mapping of the header
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_look_is_on_the_cpu_whatever_the_default_device(name: str) -> None:
    kept, *_ = one(name)
    with torch.device("meta"):
        assert numbers(look(name)) == {0}
    kept.close()


# --- one moment ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after the parameters", "after the step"])
def test_a_copy_that_an_update_overtakes_is_made_again(
    name: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, weight, buffer = one(name)
    update(kept, weight, buffer, 1)
    copied, num_copies = np.copyto, 0

    def copyto(mine: Any, theirs: Any) -> None:
        nonlocal num_copies
        num_copies += 1
        if num_copies == 2 and when == "after the parameters":
            update(kept, weight, buffer, 2)
        if num_copies == 1 and when == "before":
            update(kept, weight, buffer, 2)
        copied(mine, theirs)
        if num_copies == 2 and when == "after the step":
            kept.begin()
            weight.fill_(2)
            threading.Timer(0.02, lambda: (buffer.fill_(2), kept.end(2))).start()

    monkeypatch.setattr(np, "copyto", copyto)
    assert numbers(look(name)) == {2}
    assert num_copies == 4
    kept.close()


def keep_updating(name: str, numel: int) -> None:
    """Makes all numbers those of the next step, again and again, until it is killed."""
    memory, found = shared({"first": torch.zeros(numel), "second": torch.zeros(numel, dtype=torch.float64)})
    buffer = torch.zeros(3)
    kept, step = Region(name, memory, found, lambda: {"buffer": buffer}, {}), 0
    while True:
        time.sleep(0.0005)
        step += 1
        buffer.fill_(step)
        kept.begin()
        for each in found.values():
            each.fill_(step)
        kept.end(step)


def begun(name: str, work: Callable[..., None], *args: Any) -> int:
    """Returns a child that keeps a region, and is killed with this process; `work(name, …)` is all that it does."""
    if not (pid := os.fork()):
        try:
            ask_for_signal(signal.SIGKILL)
            work(name, *args)
        finally:
            os._exit(1)
    deadline_s = time.monotonic() + 30
    while not region._is_kept(region._folder(name)):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    return pid


def look_while_it_is_updated(name: str, num_looks: int) -> int:
    pid = begun(name, keep_updating, NUMEL)
    steps = set()
    for _ in range(num_looks):
        found = look(name)
        assert numbers(found) == {found.step}
        steps.add(found.step)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    for _ in range(2):  # of a process that has ended, and of none
        with pytest.raises(CheckpointError, match="nobody on this host keeps region="):
            look(name)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    kept, *_ = one(name)  # what the killed one has left is no obstacle
    assert look(name).step == 0
    kept.close()
    return len(steps)


def test_no_look_has_half_an_update(name: str) -> None:
    [num_steps] = run_ranks(look_while_it_is_updated, 1, name, 200)
    assert num_steps > 50


def update_half(name: str) -> None:
    update(*one(name, about={"run_dir": "runs/mine"}), 1, half=lambda: time.sleep(600))


def look_at_half_an_update(name: str) -> None:
    pid = begun(name, update_half)
    region.LONGEST_LOOK_S = 0.05
    says = rf"for 0.05 s, process {pid} on host .* midst of an update: .* ddp.load\('runs/mine', 'latest'\)"
    with pytest.raises(CheckpointError, match=says):
        while True:  # it may not have begun the update yet
            look(name)
    region.LONGEST_LOOK_S = 30
    threading.Timer(0.05, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(CheckpointError, match=rf"process {pid} .* was killed in the midst of an update: load its last"):
        look(name)
    os.waitpid(pid, 0)
    one(name)[0].close()


def test_an_update_after_one_that_broke_off_is_not_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, weight, buffer = one(name)
    monkeypatch.setattr(region, "LONGEST_LOOK_S", 0.01)

    def half() -> None:
        with pytest.raises(CheckpointError, match="in the midst of an update"):
            look(name)

    kept.begin()
    for step in (1, 2):
        update(kept, weight, buffer, step, half=half)
        assert numbers(look(name)) == {step}
    kept.close()


def test_an_update_that_never_ends_is_told(name: str) -> None:
    run_ranks(look_at_half_an_update, 1, name)


def test_what_ends_or_goes_too_fast_while_it_is_looked_at_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, weight, buffer = one(name)
    monkeypatch.setattr(region, "LONGEST_LOOK_S", 0.05)
    monkeypatch.setattr(np, "copyto", lambda *_: update(kept, weight, buffer, 1))
    with pytest.raises(CheckpointError, match=r"an update has overtaken [0-9,]+ looks: leave a core .* start it again"):
        look(name)
    monkeypatch.setattr(np, "copyto", lambda *_: kept.close())
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} .* has just ended"):
        look(name)
    update(kept, weight, buffer, 2)
    with pytest.raises(CheckpointError, match="nobody on this host keeps region="):
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
    assert look(name).step == 0
    atexit._run_exitfuncs() if exits else kept.close()
    with pytest.raises(CheckpointError, match="nobody on this host keeps region="):
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
            with pytest.raises(CheckpointError, match="is that of user 4321, and only its own user can look at it"):
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
    entry = json.loads((folder / "region.json").read_text())
    for pid, namespace in ((1 << 30, "pid:[1]"), (os.getppid(), "pid:[1]")):
        (folder / "region.json").write_text(json.dumps({**entry, "pid": pid, "namespace": namespace}))
        with pytest.raises(CheckpointError, match=rf"process {pid} on .* cannot be opened from here \(.*: look from"):
            look(name)
    for changed in ({"pid": os.getppid()}, {"header": [entry["header"][0], "/memfd:ddp-1-0", 64]}):
        (folder / "region.json").write_text(json.dumps({**entry, **changed}))
        with pytest.raises(CheckpointError, match="nobody on this host keeps region="):
            look(name)
    (folder / "region.json").write_text("{")
    with pytest.raises(CheckpointError, match="nobody on this host keeps region="):
        look(name)
    kept.close()


def damaged(entry: dict[str, Any]) -> Iterator[str]:
    """Yields texts that a region.json may have and none is written with."""
    yield from ("", "[]", "{}", "\0", json.dumps(entry)[:100], "[" * 100_000)
    for key in entry:
        yield from (json.dumps({**entry, key: value}) for value in (None, -1, "no", [], ["no"] * 3, {"a": ["no"] * 6}))
    weight = entry["tensors"]["weight"]
    for place, value in ((0, "no"), (1, 1 << 30), (2, 5), (3, "load"), (3, "float64"), (4, [1000]), (5, [-1])):
        tensors = {"weight": [*weight[:place], value, *weight[place + 1 :]]}
        yield json.dumps({**entry, "tensors": tensors})
    yield json.dumps({**entry, "pid": 1 << 70})
    yield json.dumps({**entry, "tensors": {}, "header": [*entry["header"][:2], 8]})
    for size in (1 << 40, 1 << 70):
        yield json.dumps({**entry, "parameters": [*entry["parameters"][:2], size]})


def test_a_region_whose_file_is_damaged_is_none(name: str) -> None:
    (kept, *_), (sound, *_) = one(name), one(f"{name}-b")
    path = region._folder(name) / "region.json"
    entry = json.loads(path.read_text())
    others = []
    for text in damaged(entry):
        path.write_text(text)
        try:
            look(name)
            others.append(text)
        except CheckpointError as error:
            assert f"region={name}" in str(error)
        with pytest.raises(CheckpointError, match=f"{name}-b"):
            look(f"{name}-c")
        region.refuse_kept(f"{name}-c")
        with contextlib.suppress(ConfigError):
            region.refuse_kept(name)
        with pytest.raises(ConfigError, match=f"region={name} is kept by "):
            one(name)
    assert others == [  # which are as good
        json.dumps({**entry, **each}) for each in ({"host": "no"}, {"namespace": "no"}, {"about": {"a": ["no"] * 6}})
    ]
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
    for rights, says in ((0o700, "nobody on this host keeps region="), (0o777, "others may enter")):
        folder.chmod(rights)
        with pytest.raises(CheckpointError, match=says):
            look(name)
        with pytest.raises(CheckpointError, match=f"region={name}-b"):
            look(f"{name}-b")
        region.refuse_kept(name)
    entry.unlink()
    folder.rmdir()


def test_memory_is_mapped_to_be_read_only(name: str) -> None:
    kept, *_ = one(name)
    entry = json.loads((region._folder(name) / "region.json").read_text())
    for which in ("header", "parameters"):
        with pytest.raises(TypeError, match="modify a readonly"):
            region._mapped(entry["pid"], *entry[which])[0] = 1
    kept.close()


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
    """Trains on two ranks, which look after each step."""
    comm = ddp.init()
    torch.manual_seed(0)
    strategy = ddp.strategies.CentralStorage(net := Replacing(6), torch.optim.AdamW(net.parameters(), lr=0.1))
    strategy.publish(name, {"run_dir": "runs/mine"})
    for step in range(4):
        found = look(name)
        assert found.step == step and found.about == {"run_dir": "runs/mine"}
        state = net.state_dict()
        assert found.weights.keys() == state.keys()
        differ = [key for key, each in state.items() if not found.weights[key].equal(each)]
        assert all(comm.rank and "running" in key for key in differ)  # the statistics are those of rank 0
        comm.barrier()
        strategy.model(torch.randn(5 + comm.rank, 8)).square().mean().backward()
        ddp.strategies.step(strategy)
    with pytest.raises(ConfigError, match="publishes under another name already"):  # on each rank
        strategy.publish(name, {})
    comm.barrier()
    strategy.finish()
    comm.barrier()
    with pytest.raises(CheckpointError, match="nobody on this host keeps region="):
        look(name)
    ddp.shutdown()


def test_a_region_of_central_storage_is_its_state_dict_after_each_step(name: str) -> None:
    run_ranks(follow, 2, name)


def checksum(parameters: Iterable[Tensor]) -> int:
    return sum(int(each.detach().view(torch.int32).sum(dtype=torch.int64)) for each in parameters)


def train_until(name: str, width: int, ending: Path) -> list[int]:
    """Trains until there is a file; returns what the parameters were after each step."""
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


def test_no_look_has_half_a_step_of_two_workers(name: str, tmp_path: Path) -> None:
    assert look_at_training(name, tmp_path, width=128, num_looks=200) > 2


class Follows(ddp.Callback):
    """Looks at the beginning and after each step, and may end the run by an error."""

    def __init__(self, name: str, *, fails_at: int = -1) -> None:
        self.name, self.fails_at = name, fails_at
        self.steps: list[int] = []

    def fit_start(self, state: Any) -> None:
        self.step_end(state)

    def step_end(self, state: Any, report: Any = None) -> None:
        found = look(self.name)
        weights = state.model.module.state_dict()
        assert all(found.weights[key].equal(each) for key, each in weights.items())
        assert found.about == {"run_dir": str(state.run_dir), "sample_shape": None, "num_classes": None}
        self.steps.append(found.step)
        state.comm.barrier()  # nobody updates while another one compares
        if state.step == self.fails_at:
            raise ArithmeticError("of a callback")


def fit_and_follow(name: str, folder: Path) -> None:
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

    for first, last in ((0, 3), (3, 5)):
        fit(follows := Follows(name), last)
        assert follows.steps == [*range(first, last + 1)]
        comm.barrier()
        with pytest.raises(CheckpointError, match="nobody on this host keeps region="):
            look(name)
    with pytest.raises(ArithmeticError, match="of a callback"):
        fit(Follows(name, fails_at=6), 9)
    comm.barrier()
    with pytest.raises(CheckpointError, match="nobody on this host keeps region="):
        look(name)
    comm.barrier()  # both have looked before there is another one
    with pytest.raises(ConfigError, match=f"region={name} is kept by process"):
        if comm.rank == 0:
            kept, *_ = one(name)
        comm.barrier()
        fit(Follows(name), 9)
    comm.barrier()
    if comm.rank == 0:
        kept.close()
    ddp.shutdown()


def test_fit_publishes_until_it_ends_however_that_is(name: str, tmp_path: Path) -> None:
    run_ranks(fit_and_follow, 2, name, tmp_path / "run")
