"""`ddp.Guard`: a bad step is left out, or the run goes back, on any number of ranks alike."""

from __future__ import annotations

import json
import logging
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import ddp
from ddp.commands.where import place_of_sample, samples_of_step, starts_of
from ddp.errors import ConfigError, Diverged
from ddp.optim import precision
from ddp.replica.broadcast import tensor_hash
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import StepReport, TrainState

NUM_SAMPLES, BATCH = 40, 16  # three steps an epoch, the last one of 8 samples
INPUTS = torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(1))
BAD = 20  # in the second step


class Steps(Callback):
    """Keeps the numbers and losses of the steps that are made, and those of evaluations."""

    def __init__(self) -> None:
        self.made: list[tuple[int, str, float]] = []
        self.evaluated_at: list[int] = []
        self.heard: list[tuple[str, int]] = []

    def step_end(self, state: TrainState, report: StepReport) -> None:
        self.made.append((report.step, float(report.loss).hex(), report.rate))

    def step_left_out(self, state: TrainState, epoch: int) -> None:
        self.heard.append((f"left out of epoch {epoch}", state.step))

    def went_back(self, state: TrainState) -> None:
        self.heard.append(("went back", state.step))

    def evaluated(self, state: TrainState) -> None:
        self.evaluated_at.append(state.step)


class Breaks(Callback):
    """Makes some steps bad, as often as it says: a number of the model becomes infinite before it.

    Args:
        steps: their numbers, and how often.
    """

    def __init__(self, steps: dict[int, int]) -> None:
        self.left = dict(steps)

    def step_start(self, state: TrainState) -> None:
        if self.left.get(state.step + 1, 0):
            self.left[state.step + 1] -= 1
            with torch.no_grad():
                next(state.model.module.parameters()).view(-1)[0] = float("inf")


def with_bad(*samples: int, value: float = float("nan")) -> Tensor:
    inputs = INPUTS.clone()
    inputs[list(samples), 1] = value
    return inputs


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.Dropout(0.1), nn.Flatten(), nn.Linear(12, 3)
    )


def fitted(
    *,
    inputs: Tensor = INPUTS,
    guard: ddp.Guard | None = None,
    callbacks: tuple[Callback, ...] = (),
    make: Any = normalised,
    **how: Any,
) -> tuple[nn.Module, Steps, ddp.TrainState]:
    torch.manual_seed(1)
    model, steps = make(), Steps()
    settings: dict[str, Any] = {
        "order": ddp.data.Fixed(len(inputs)), "folder": None, "progress": False, "curves": False, "epochs": 2,
        "same_bits": True, "loss": F.cross_entropy, "global_batch": BATCH,
    }  # fmt: skip
    settings |= how
    own = [*callbacks, steps] if guard is None else [guard, *callbacks, steps]
    targets = CLASSES.repeat(len(inputs) // NUM_SAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.pop("lr", 0.1), momentum=0.9)
    state = ddp.fit(model, (inputs, targets), optimizer, **grouped(callbacks=own, **settings))
    return model, steps, state


def hash_of(model: nn.Module) -> str:
    return " ".join(tensor_hash(each) for each in model.state_dict().values())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- a step is left out ----------------------------------------------------------------------------------------------


def ends(folder: str) -> dict[str, Any]:
    """Returns what runs with and without bad samples end with, by name."""
    comm = ddp.init(abort_s=30)
    precision.FIRST = 1 << 8
    found: dict[str, Any] = {}
    bad = with_bad(BAD)
    for name, how in {
        "skip": {"folder": f"{folder}/{comm.world_size}"},
        "skip, by ranks": {"same_bits": False, "make": lambda: nn.Linear(6, 3)},
        "skip, sharded, fp16": {"strategy": "sharded", "precision": "fp16"},
    }.items():
        model, steps, state = fitted(inputs=bad, guard=ddp.Guard("skip"), **how)
        state.model.verify_replicas()
        is_finite = all(each.isfinite().all() for each in model.state_dict().values())
        found[name] = hash_of(model), steps.made, is_finite
    model, steps, _ = fitted(skip_steps=(2, 2), epochs=1)
    found["as skip_steps"] = hash_of(model), steps.made, True
    model, steps, _ = fitted(inputs=bad, guard=ddp.Guard("skip"), epochs=1)
    found["one epoch"] = hash_of(model), steps.made, True
    ddp.shutdown()
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    folder = tmp_path_factory.mktemp("runs")
    return {size: (run_ranks(ends, size, str(folder)), folder / str(size)) for size in (1, 3)}


@pytest.mark.slow
def test_a_step_that_is_left_out_leaves_nothing_behind(both: dict[int, Any]) -> None:
    for found, _ in both.values():
        for name, (_, made, is_finite) in found[0].items():
            assert is_finite and [number for number, *_ in made] == list(range(1, len(made) + 1)), name
            assert len(made) == (4 if name.startswith("skip") else 2)
        assert all(each["skip"] == found[0]["skip"] for each in found)


def test_any_number_of_ranks_leaves_out_the_same(both: dict[int, Any]) -> None:
    (alone, _), (three, _) = both[1], both[3]
    for name in ("skip", "skip, sharded, fp16", "one epoch"):
        assert alone[0][name] == three[0][name]


def test_it_is_as_if_settings_had_left_it_out(both: dict[int, Any]) -> None:
    for found, _ in both.values():
        assert found[0]["one epoch"] == found[0]["as skip_steps"]


def test_where_knows_the_step_that_was_left_out(both: dict[int, Any]) -> None:
    for world_size, (_, run) in both.items():
        [start, *incidents] = lines(run / "starts.jsonl")
        assert [each["left_out"]["step"] for each in incidents] == [2, 4]
        assert [each["left_out"]["position"] for each in incidents] == [16, 56]
        assert "sample 20" in incidents[0]["left_out"]["why"] and start["position"] is None
        starts = starts_of(run)
        assert place_of_sample(starts, BAD, 0) == "sample 20, epoch 0: left out, by the run's guard, before step 2"
        assert place_of_sample(starts, BAD, 1) == "sample 20, epoch 1: left out, by the run's guard, before step 4"
        assert "step 2, rank" in place_of_sample(starts, 33, 0) and "step 4, rank" in place_of_sample(starts, 33, 1)
        assert "step 1, rank" in place_of_sample(starts, 3, 0) and "step 3, rank" in place_of_sample(starts, 3, 1)
        told = samples_of_step(starts, 2)
        assert told.startswith("step 2, in epoch 0: 8 samples") and " 33" in told and " 20" not in told
        assert samples_of_step(starts, 4).startswith("step 4, in epoch 1: 8 samples")
        with pytest.raises(ConfigError, match="the run has steps 1 to 4"):
            samples_of_step(starts, 5)
        assert world_size in (1, 3)


class Crashes(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def step_start(self, state: TrainState) -> None:
        if state.step + 1 == self.step:
            raise KeyError("a crash")


def test_a_run_that_goes_on_equals_one_that_was_not_interrupted(tmp_path: Path) -> None:
    """It is stopped after the step that was left out, and once again crashes after another one."""
    how: dict[str, Any] = {"inputs": with_bad(BAD), "checkpoint_every_steps": 1}
    whole, _, state = fitted(guard=ddp.Guard("skip"), folder=tmp_path / "whole", **how)
    folder = tmp_path / "parts"
    fitted(guard=ddp.Guard("skip"), folder=folder, max_steps=2, **how)
    with pytest.raises(KeyError):
        fitted(guard=ddp.Guard("skip"), folder=folder, resume="auto", callbacks=(Crashes(5),), epochs=3, **{
            **how, "checkpoint_every_steps": 3,
        })  # fmt: skip
    guard = ddp.Guard("skip")
    parts, _, resumed = fitted(guard=guard, folder=folder, resume="auto", **how)
    assert hash_of(whole) == hash_of(parts) and state.step == resumed.step == 4
    assert guard.num_acted == 2
    starts = starts_of(folder)
    for sample, epoch, expected in ((BAD, 0, "before step 2"), (BAD, 1, "before step 4")):
        assert place_of_sample(starts, sample, epoch) == (
            f"sample {sample}, epoch {epoch}: left out, by the run's guard, {expected}"
        )
    for sample in range(NUM_SAMPLES):  # each has one place in each epoch, and the step names it
        for epoch in range(2):
            [told] = place_of_sample(starts, sample, epoch).splitlines()
            if "step" in told and "left out" not in told:
                number = int(told.split(": step ")[1].split(",")[0])
                assert f" {sample} " in f" {samples_of_step(starts, number)} ".replace("\n", " ")


def test_the_last_step_of_an_epoch_may_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """The next epoch is what its order promises."""
    with caplog.at_level(logging.WARNING, "ddp"):
        _, steps, state = fitted(guard=ddp.Guard("skip"), callbacks=(Once(3),))
    assert [number for number, *_ in steps.made] == [1, 2, 3, 4, 5] and state.epoch == 2
    assert "promises" not in caplog.text


def test_an_epoch_whose_last_step_is_left_out_is_evaluated_and_saved(tmp_path: Path) -> None:
    """As one whose last step the settings leave out."""
    how: dict[str, Any] = {"validation_data": (INPUTS[:8], CLASSES[:8]), "batch": 8}
    _, plain, _ = fitted(skip_steps=(3, 3), **how)
    saved = Saved()
    _, steps, _ = fitted(guard=ddp.Guard("skip"), callbacks=(Once(3), saved), folder=tmp_path / "run", **how)
    assert steps.evaluated_at == plain.evaluated_at == [2, 5]
    assert saved.steps == [2, 5]


class Saved(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def checkpoint_saved(self, state: TrainState, path: Path | None) -> None:
        self.steps.append(state.step)


class Once(Callback):
    """Makes the loss of one step infinite, once, and leaves the model as it was."""

    def __init__(self, step: int) -> None:
        self.step, self.is_over = step, False
        self.handle: Any = None

    def fit_start(self, state: TrainState) -> None:
        def spoiled(module: nn.Module, inputs: Any, outputs: Tensor) -> Tensor | None:
            if module.training and state.step + 1 == self.step and not self.is_over:
                return outputs * float("inf")
            return None

        self.handle = state.model.module.register_forward_hook(spoiled)

    def step_start(self, state: TrainState) -> None:
        self.is_over = self.is_over or self.seen
        self.seen = state.step + 1 == self.step

    seen = False

    def fit_end(self, state: TrainState) -> None:
        self.handle.remove()


def test_a_guard_acts_as_often_as_it_may() -> None:
    with pytest.raises(Diverged, match=r"sample 20.* The guard has acted 2 times, which is the most \(guard.most\)"):
        fitted(inputs=with_bad(BAD), guard=ddp.Guard("skip", most=2), epochs=5)
    guard = ddp.Guard("skip", most=2)
    _, steps, _ = fitted(inputs=with_bad(BAD), guard=guard)
    assert guard.num_acted == 2 and len(steps.made) == 4


def test_the_first_and_all_steps() -> None:
    _, steps, _ = fitted(inputs=with_bad(0), guard=ddp.Guard("skip"))
    assert [number for number, *_ in steps.made] == [1, 2, 3, 4]
    _, steps, state = fitted(inputs=with_bad(0, BAD, 35), guard=ddp.Guard("skip", most=9))
    assert not steps.made and state.step == 0 and state.epoch == 2


def test_the_scale_of_a_loss_is_as_before_a_step_that_is_left_out() -> None:
    """Else gradients of all later steps may underflow."""
    before, precision.FIRST = precision.FIRST, 1 << 8
    try:
        _, _, state = fitted(guard=ddp.Guard("skip"), callbacks=(BadGradient(2),), precision="fp16")
    finally:
        precision.FIRST = before
    assert state.strategy.loss_scale is not None and state.strategy.loss_scale.value == 1 << 8


class BadGradient(Callback):
    """Makes a gradient of one step infinite, at any scale of the loss."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.handle: Any = None

    def fit_start(self, state: TrainState) -> None:
        parameter = state.model.module.get_parameter("5.weight")
        is_new = [True]

        def spoiled(gradient: Tensor) -> Tensor | None:
            if is_new[0] and state.sampler.state.consumed == 16:
                return gradient * float("inf")
            return None

        self.handle = parameter.register_hook(spoiled)

    def fit_end(self, state: TrainState) -> None:
        self.handle.remove()


# --- spikes ----------------------------------------------------------------------------------------------------------


def spiky() -> Tensor:
    """30 batches of 16; the samples of the 27th have other classes than those like them."""
    many = torch.randn(480, 6, generator=torch.Generator().manual_seed(4))
    many[26 * 16 : 27 * 16] *= 1000
    return many


def spikes() -> dict[str, Any]:
    ddp.init(abort_s=30)
    how: dict[str, Any] = {"inputs": spiky(), "make": lambda: nn.Linear(6, 3), "epochs": 1}
    guard = ddp.Guard("skip", spike=8)
    model, steps, _ = fitted(guard=guard, **how)
    with pytest.raises(Diverged) as raised:
        fitted(guard=ddp.Guard("stop", spike=8), **how)
    _, unguarded, _ = fitted(guard=ddp.Guard("skip"), **how)
    found = hash_of(model), guard.num_acted, steps.made, str(raised.value), len(unguarded.made)
    ddp.shutdown()
    return {"found": found}


@cache
def spikes_on(world_size: int) -> list[dict[str, Any]]:
    return run_ranks(spikes, world_size)


@pytest.mark.slow
def test_a_spike_is_found_named_and_left_out() -> None:
    (alone,), three = spikes_on(1), spikes_on(3)
    for each in three:
        assert each["found"][:3] == alone["found"][:3]
    for each in (alone, *three):
        _, num_acted, made, said, num_unguarded = each["found"]
        assert num_acted == 1 and [number for number, *_ in made] == list(range(1, 30)) and num_unguarded == 30
        assert max(float.fromhex(loss) for _, loss, _ in made) < 10
        assert said.startswith("the loss of step 27 is a spike: ")
        assert " standard deviations above the mean of the last losses, " in said
        assert "Computed again, the highest loss is that of shard" in said and "in the others, among samples 4" in said


def test_there_is_no_spike_among_the_first_steps_nor_without_a_bound() -> None:
    guard = ddp.Guard("skip", spike=3)
    state: Any = None
    for number, loss in enumerate([1.0, 1.1] * 10):
        assert not guard.is_spike(1e9) or number >= 20
        guard.step_end(state, report(loss))
    assert not guard.is_spike(1.2) and guard.is_spike(1.25) and not guard.is_spike(-1e9)
    again = ddp.Guard("skip", spike=3)
    again.load_state_dict(guard.state_dict())
    assert again.is_spike(1.25) == guard.is_spike(1.25) and again.state_dict() == guard.state_dict()
    assert not ddp.Guard("skip").is_spike(1e9)


def report(loss: float) -> StepReport:
    return StepReport(1, 0, loss, 1, 1, None, 1.0, 0.1, 0.0, 0.0, 0.0)


# --- the run goes back -----------------------------------------------------------------------------------------------


def back(folder: str, **how: Any) -> tuple[list[tuple[int, str, float]], str]:
    given = {"checkpoint_every_steps": 2, "log_every": 1, "folder": folder, "epochs": 3} | how
    same_bits = ddp.SameBits(on=True, hash_every=1)
    model, steps, state = fitted(guard=ddp.Guard("go_back"), same_bits=same_bits, **given)
    state.model.verify_replicas()
    return steps.made, hash_of(model)


def goes_back(folder: str) -> dict[str, Any]:
    comm = ddp.init(abort_s=30)
    found: dict[str, Any] = {}
    for name, how in {
        "twice": {"callbacks": (Breaks({6: 2}),)},
        "two checkpoints": {"callbacks": (Breaks({4: 1, 8: 1}),), "strategy": "sharded"},
    }.items():
        found[name] = back(f"{folder}/{name} {comm.world_size}", **how)
    ddp.shutdown()
    return found


@pytest.fixture(scope="module")
def gone_back(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    folder = tmp_path_factory.mktemp("back")
    return {size: (run_ranks(goes_back, size, str(folder))[0], folder) for size in (1, 3)}


EXPECTED = {  # steps, with their rates
    "twice": [
        *((step, 0.1) for step in (1, 2, 3, 4, 5)), (5, 0.05), *((step, 0.025) for step in (5, 6, 7, 8, 9)),
    ],
    "two checkpoints": [
        *((step, 0.1) for step in (1, 2, 3)), *((step, 0.05) for step in (3, 4, 5, 6, 7)),
        *((step, 0.025) for step in (7, 8, 9)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.slow
def test_the_run_goes_back_at_half_the_rate(gone_back: dict[int, Any], name: str, world_size: int) -> None:
    found, folder = gone_back[world_size]
    made, _ = found[name]
    assert [(step, pytest.approx(rate)) for step, _, rate in made] == EXPECTED[name]
    assert found[name] == gone_back[1][0][name]
    run = folder / f"{name} {world_size}"
    steps = [line["step"] for line in lines(run / "metrics.jsonl") if line["kind"] == "step"]
    assert Counter(steps) == dict.fromkeys(steps, 1) and steps == sorted(steps)
    hashed = [line["step"] for line in lines(run / "hashes.jsonl") if "hashes" in line]
    assert hashed == list(range(1, 10))
    incidents = [line["went_back"] for line in lines(run / "starts.jsonl") if "went_back" in line]
    back_to = {"twice": [4, 4], "two checkpoints": [2, 6]}[name]
    assert [each["to"] for each in incidents] == back_to
    assert all("is not finite before the step" in each["why"] for each in incidents)
    starts = starts_of(run)
    for step in range(1, 10):
        epoch, at = divmod(step - 1, 3)
        first = 16 * at
        told = samples_of_step(starts, step)
        assert told.startswith(f"step {step}, in epoch {epoch}: {8 if at == 2 else 16} samples")
        assert place_of_sample(starts, first, epoch).startswith(f"sample {first}, epoch {epoch}: step {step}, rank 0")
        assert len(place_of_sample(starts, first, epoch).splitlines()) == 1


def test_the_lower_rate_stays_in_a_run_that_goes_on(tmp_path: Path) -> None:
    how: dict[str, Any] = {"folder": tmp_path / "run", "checkpoint_every_steps": 2}
    fitted(guard=ddp.Guard("go_back"), callbacks=(Breaks({6: 1}),), epochs=3, max_steps=7, **how)
    guard = ddp.Guard("go_back")
    _, steps, state = fitted(guard=guard, resume="auto", epochs=3, **how)
    assert [(step, rate) for step, _, rate in steps.made] == [(8, 0.05), (9, 0.05)] and guard.num_acted == 1
    assert state.rates.base == [0.05] and not steps.heard


def test_callbacks_hear_of_both(tmp_path: Path) -> None:
    _, steps, _ = fitted(inputs=with_bad(BAD), guard=ddp.Guard("skip"))
    assert steps.heard == [("left out of epoch 0", 1), ("left out of epoch 1", 3)]
    how: dict[str, Any] = {"folder": tmp_path / "run", "checkpoint_every_steps": 2}
    _, steps, _ = fitted(guard=ddp.Guard("go_back"), callbacks=(Breaks({6: 1}),), **how)
    assert steps.heard == [("went back", 4)]


def test_loader_processes_and_schedules_go_back_too(tmp_path: Path) -> None:
    _, steps, _ = fitted(
        guard=ddp.Guard("go_back"), callbacks=(Breaks({6: 1}),), epochs=3, folder=tmp_path / "run",
        checkpoint_every_steps=2, num_workers=1, schedule=lambda done, of: 1 - done / of / 2,
    )  # fmt: skip
    rates = {step: rate for step, _, rate in steps.made}
    _, plain, _ = fitted(epochs=3, schedule=lambda done, of: 1 - done / of / 2)
    expected = {step: rate * (0.5 if step > 4 else 1) for step, _, rate in plain.made}
    assert rates == pytest.approx(expected)


def test_the_end_of_going_back(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"finite before the step.* The run cannot go back: "):
        fitted(guard=ddp.Guard("go_back"), callbacks=(Breaks({2: 1}),), folder=tmp_path / "none")
    guard = ddp.Guard("go_back", most=2)
    with pytest.raises(Diverged, match=r"The guard has acted 2 times, which is the most \(guard.most\)"):
        fitted(guard=guard, callbacks=(Breaks({3: 9}),), folder=tmp_path / "most", checkpoint_every_steps=1, epochs=3)
    assert guard.num_acted == 2


# --- what is refused -------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(INPUTS[0], CLASSES[0])] * 40)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"action": "halt"}, "action='halt': take one of stop, skip, go_back"),
        ({"spike": 0}, "spike=0: must be a number above 0, or leave it out"),
        ({"spike": float("inf")}, "spike=inf: must be"),
        ({"spike": float("nan")}, "spike=nan: must be"),
        ({"spike": "8"}, "spike='8': must be"),
        ({"spike": True}, "spike=True: must be"),
        ({"most": 0}, "most=0: must be a whole number from 1 up"),
        ({"most": True}, "most=True: must be"),
        ({"most": 1.5}, "most=1.5: must be"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ddp.Guard(**arguments)


def fit_with(guards: list[ddp.Guard], data: Any = (INPUTS, CLASSES), **how: Any) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how.pop("steps", False):
        how["schedule"] = ddp.optim.TorchSchedule(torch.optim.lr_scheduler.StepLR(optimizer, 1), every="epoch")
    settings = {"folder": None, "progress": False, "max_steps": 1, "global_batch": 8, "loss": F.cross_entropy}
    ddp.fit(model, data, optimizer, **grouped(callbacks=guards, **{**settings, **how}))


def test_what_a_guard_cannot_do_is_refused(tmp_path: Path) -> None:
    back, skip = ddp.Guard("go_back"), ddp.Guard("skip")
    for guards, how, said in (
        ([skip, back], {}, "callbacks has two Guard"),
        ([skip], {"data": Stream()}, "ddp.Guard..skip..: a stream of samples cannot be read again"),
        ([back], {}, "ddp.Guard..go_back..: goes back to a checkpoint, and folder=None keeps none"),
        ([back], {"folder": tmp_path, "steps": True}, "ddp.Guard..go_back..: lowers the learning rate, which a"),
        ([skip], {"strategy": "local_sgd"}, "ddp.Guard..skip..: with strategy=.local_sgd. .* take strategy=.auto."),
    ):
        with pytest.raises(ConfigError, match=said):
            fit_with(guards, **how)
    fit_with([ddp.Guard("skip")], steps=True)
