"""`python -m ddp same_bits`: what it says of two runs, and its exit status.

Tests: ddp/commands/same_bits.py.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import grouped
from torch import nn
from torch.nn import functional as F

import ddp
from ddp.__main__ import main
from ddp.train.reports.history import DIGITS, HASHES, StepTrace, Trace, parting
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import TrainState

NAMES = ["0.weight", "0.bias", "exp_avg of 0.weight", "exp_avg of 0.bias"]
SETTINGS = {"same_bits": True, "batch": {"num_shards": 8}, "world_size": 1}


def write(run: Path, lines: dict[int, str], settings: dict[str, Any] = SETTINGS) -> str:
    """Writes the hashes of a run by step, a digit for each name, and returns its folder."""
    run.mkdir()
    entries: list[dict[str, Any]] = [{"step": 1, "identity": settings}, {"step": 1, "names": NAMES}]
    for step, digits in lines.items():
        hashes = "".join(digit * DIGITS for digit in digits)
        entries.append({"step": step, "loss": "0x1.0p+0", "hashes": hashes})
    (run / HASHES).write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return str(run)


def test_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one", {500: "0000", 1000: "1111", 1500: "2222"})
    other = write(tmp_path / "other", {1000: "1111", 1500: "2222"}, {**SETTINGS, "world_size": 3})
    assert main(["same_bits", one, other]) == 0
    assert capsys.readouterr().out == "equal at all 2 common steps, up to step 1,500\n"


def test_different_runs_with_the_settings_that_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one", {10: "0000", 20: "0000"})
    other = write(tmp_path / "other", {10: "0000", 20: "1111"}, {**SETTINGS, "batch": {"num_shards": 4}})
    assert main(["same_bits", one, other]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "different at step 20; the last equal one is step 10, of 2 common steps",
        "  4 of 5 values: 0.weight, 0.bias, exp_avg of 0.weight and 1 more",
        "bits depend on these, in which the second run differs from the first:",
        "  batch.num_shards was 8, is 4",
        f"to find where they part, both runs need a checkpoint before step 20, and {one} has none: "
        "checkpoint.every_steps and checkpoint.keep_last say which ones a run keeps",
    ]
    third = write(tmp_path / "third", {10: "0010"})
    assert main(["same_bits", one, third]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "different at step 10, the first of 1 common step",
        "  1 of 5 values: exp_avg of 0.weight",
        f"to find where they part, both runs need a checkpoint before step 10, and {one} has none: "
        "checkpoint.every_steps and checkpoint.keep_last say which ones a run keeps",
    ]


@pytest.mark.parametrize(
    ("num_shards", "last_steps", "said"),
    [
        (8, (20, 20), "steps 20 to 20 of both runs have the same bits: a machine of one of them has computed wrongly"),
        (4, (20, 20), "the same bits: they are made with the settings that each run has now, and it may have had"),
        (8, (20, 15), "cannot be made again: the settings that {other} has now end it before step 20"),
        (8, (20, 0), "cannot be made again: the settings that {other} has now end it before step 20"),
    ],
)
def test_what_is_said_of_steps_that_are_made_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_shards: int,
    last_steps: tuple[int, int],
    said: str,
) -> None:
    one = write(tmp_path / "one", {10: "0000", 20: "0000"})
    other = write(tmp_path / "other", {10: "0000", 20: "1111"}, {**SETTINGS, "batch": {"num_shards": num_shards}})
    traces = iter([[StepTrace(last, [], {"the update of w": 3})] if last else [] for last in last_steps])
    monkeypatch.setattr("ddp.commands.same_bits.checkpoint_before", lambda run, step: run)
    monkeypatch.setattr("ddp.commands.same_bits.threads_of", lambda run: 1)
    trusts = list[bool]()

    def launch(traced: partial[Any], *_: Path, **how: Any) -> list[Any]:
        trusts.append(traced.keywords["trust"])
        return [next(traces)]

    monkeypatch.setattr("ddp.run.launch.from_python.launch", launch)
    assert main(["same_bits", one, other, *["trust=true"] * (num_shards == 4)]) == 1
    assert said.format(other=other) in capsys.readouterr().out.splitlines()[-1]
    assert trusts == [num_shards == 4] * 2


def test_buffers_that_part_are_named() -> None:
    one = [StepTrace(4, [], {"the update of w": 3, "the buffer b": 1})]
    other = [StepTrace(4, [], {"the update of w": 3, "the buffer b": 2})]
    assert parting(one, other) == (4, "the buffer b, while all gradients of all shards are equal")


def test_questions_without_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write(tmp_path / "one", {1: "0000", 2: "0000", 3: "0000", 4: "0000"}), write(tmp_path / "other", {})
    damaged, linked = write(tmp_path / "damaged", {1: "00"}), tmp_path / "linked"
    linked.symlink_to(one)
    for words, says in {
        (one, other): "steps 1, 2, 3 … in the first, none in the second; take the same same_bits.hash_every",
        (one, damaged): "hashes.jsonl is damaged (the lines before do not name its hashes): make the",
        (one, str(linked)): "are the same run: name another one",
        (one, str(tmp_path)): f"holds no {HASHES}: make the run with same_bits.hash_every=10",
        (one,): "the following arguments are required: RUN",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main(["same_bits", *words])
        assert ended.value.code == 2 and says in capsys.readouterr().err


# --- where two runs part ---------------------------------------------------------------------------------------------

INPUTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (24,), generator=torch.Generator().manual_seed(1))


class Rate(Callback):
    """Sets the probability of dropout before a step."""

    def __init__(self, step: int, probability: float) -> None:
        self.step, self.probability = step, probability

    def step_start(self, state: TrainState) -> None:
        if state.step + 1 == self.step:
            layer = state.model.module.get_submodule("2")
            assert isinstance(layer, nn.Dropout)
            layer.p = self.probability


def traced(*, inputs: torch.Tensor = INPUTS, last_step: int = 3, **how: Any) -> list[StepTrace]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3))
    trace = Trace(last_step)
    settings = {"order": ddp.data.Fixed(24), "num_shards": 4, "folder": None, "progress": False, "epochs": 2, "lr": 0.1}
    settings |= how
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.pop("lr"))
    callbacks = [*settings.pop("callbacks", ()), trace]
    held_out = INPUTS[:8], CLASSES[:8]
    ddp.fit(
        model, (inputs, CLASSES), optimizer, loss=F.cross_entropy, global_batch=8, same_bits=True,
        validation_data=held_out, **grouped(callbacks=callbacks, **settings),
    )  # fmt: skip
    assert not any(each._forward_hooks for each in model.modules())
    return trace.steps


def test_equal_runs_have_equal_traces() -> None:
    one, other = traced(), traced()
    assert one == other and parting(one, other) is None
    assert [each.step for each in one] == [1, 2, 3]
    in_shard = [
        "the outputs of 0 (Linear)", "the outputs of 1 (Tanh)", "the outputs of 2 (Dropout)",
        "the outputs of 3 (Linear)", "the outputs of Sequential",
    ]  # fmt: skip
    for each in one:
        for shard in range(4):
            names = [what for at, what, _ in each.entries if at == shard]
            assert names[:5] == in_shard and sorted(names[5:]) == sorted(
                f"the gradient of {name}" for name in ("0.weight", "0.bias", "3.weight", "3.bias")
            )
        assert list(each.updated) == [f"the update of {name}" for name in ("0.weight", "0.bias", "3.weight", "3.bias")]


def test_where_runs_part_is_told_by_step_shard_and_module() -> None:
    usual, one_sample = traced(), INPUTS.clone()
    one_sample[13, 0] += 1e-6  # of step 2, its shard 2
    assert parting(usual, traced(callbacks=[Rate(2, 0.5)])) == (2, "shard 0, in the outputs of 2 (Dropout)")
    assert parting(usual, traced(inputs=one_sample)) == (2, "shard 2, in the outputs of 0 (Linear)")
    assert parting(usual, traced(lr=0.2)) == (
        1, "the update of 0.weight, while all gradients of all shards are equal"
    )  # fmt: skip
    fewer = traced(num_shards=2)
    assert parting(usual, fewer) == (1, "shard 0, in the outputs of 0 (Linear)")
    in_parts = traced(micro_size=1)
    assert parting(usual, in_parts) == (1, "shard 0, in the outputs of 0 (Linear)")


def test_traces_that_are_not_alike() -> None:
    three, four = {"the update of w": 3}, {"the update of w": 4}
    one = [StepTrace(4, [(0, "a", 1), (0, "b", 2)], three)]
    assert parting(one, [StepTrace(4, [(0, "a", 1)], three)]) == (4, "the number of modules that are called")
    assert parting(one, [StepTrace(4, [(0, "a", 1), (1, "b", 2)], three)]) == (
        4, "shard 0, where one has b, and the other shard 1, b"
    )  # fmt: skip
    assert parting(one, [StepTrace(4, [(0, "a", 1), (0, "b", 2)], four)]) == (
        4, "the update of w, while all gradients of all shards are equal"
    )  # fmt: skip
    assert parting(one, []) is None


def test_evaluations_leave_no_entry() -> None:
    """They are forwards, too, and no step's."""
    assert parting(traced(), traced(every_steps=1)) is None
