"""hashes.jsonl: equal at any number of workers, whole after a resume, and exact about what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import nn
from torch.nn import functional as F

import ddp
from ddp.errors import ConfigError
from ddp.train.reports.history import DIGITS, HASHES, Line, _hash, compare, read_hashes
from ddp.train.steps.state import StepReport, TrainState

NUM_STEPS = 6
X = torch.randn(40, 1, 4, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))


def fit(folder: Path, *callbacks: ddp.Callback, **how: Any) -> TrainState:
    torch.manual_seed(how.pop("init", 0))
    module = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Dropout(0.1), nn.Linear(27, 3))
    module[0].register_buffer("scale", torch.ones(1), persistent=False)
    given = {"loss": F.cross_entropy, "global_batch": 12, "max_steps": NUM_STEPS, "noise_scale_every": 0, **how}
    given = {"same_bits": ddp.SameBits(on=True, hash_every=4), "curves": False, "progress": False, **given}
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    return ddp.fit(module, (X, CLASSES), optimizer, callbacks=callbacks, **grouped(folder=folder, **given))


def all_strategies(folder: Path) -> None:
    for strategy in ("auto", "sharded", "central_storage"):
        fit(folder / f"{strategy} {ddp.init().world_size}", strategy=strategy)
    ddp.shutdown()


@pytest.mark.slow
def test_hashes_are_equal_at_any_number_of_workers_and_by_any_strategy(tmp_path: Path) -> None:
    run_ranks(all_strategies, 3, tmp_path)
    all_strategies(tmp_path)
    runs = sorted(tmp_path.iterdir())
    first, *others = map(read_hashes, runs)
    assert len(others) == 5 and list(first) == [4, NUM_STEPS]
    for other in others:
        assert compare(first, other) == ([4, NUM_STEPS], NUM_STEPS, None, [], 0, [])
    names = list(first[4].by_name())
    assert names[:3] == ["0.weight", "0.bias", "1.weight"] and names[9:11] == ["0.scale", "exp_avg of 0.weight"]
    assert names[-2:] == ["step of 4.bias", "the loss"] and len(names) == 10 + 6 * 3 + 1
    assert (runs[0] / HASHES).read_text().count("names") == 1


class Breaks(ddp.Callback):
    """Ends the run with an error after a step, as a crash would."""

    def step_end(self, state: TrainState, report: StepReport) -> None:
        if report.step == 5:
            raise RuntimeError("killed")


def test_a_resumed_run_drops_what_lies_beyond_its_checkpoint_and_goes_on(tmp_path: Path) -> None:
    dense: dict[str, Any] = {"same_bits": ddp.SameBits(on=True, hash_every=1), "checkpoint_every_steps": 3}
    run = tmp_path / "run"
    fit(tmp_path / "whole", **dense)
    with pytest.raises(RuntimeError, match="killed"):
        fit(run, Breaks(), **dense)
    assert list(read_hashes(run)) == [1, 2, 3, 4, 5]
    with (run / HASHES).open("a") as file:
        file.write('{"step":6,"lo')
    assert list(read_hashes(run)) == [1, 2, 3, 4, 5]
    fit(run, resume="auto", **dense)
    assert compare(read_hashes(tmp_path / "whole"), read_hashes(run)).first_different is None
    before = (run / HASHES).read_text()
    entries = list(map(json.loads, before.splitlines()))
    assert [entry["step"] for entry in entries] == [1, 1, 1, 2, 3, 4, 4, 4, 5, 6]  # with identity and names at 1 and 4
    fit(run, resume="auto", **dense)  # is complete: no step has a second line
    assert [json.loads(line)["step"] for line in (run / HASHES).read_text().splitlines()[len(entries) :]] == [7]
    fit(run, resume="auto", **{**dense, "same_bits": True}, max_steps=7)
    assert (run / HASHES).read_text() == before


def test_any_run_has_hashes_also_with_a_loss_scale_or_master_weights(tmp_path: Path) -> None:
    plain = ddp.SameBits(hash_every=NUM_STEPS)
    fit(tmp_path / "fp16", same_bits=plain, precision="fp16")
    state = fit(tmp_path / "bf16_pure", same_bits=plain, precision="bf16_pure")
    scaled, pure = (read_hashes(tmp_path / name)[NUM_STEPS] for name in ("fp16", "bf16_pure"))
    assert "loss scale" in scaled.names and "loss scale" not in pure.names
    assert pure.by_name()["the loss"] == float(state.train_loss or 0).hex()
    changed = compare({6: scaled}, {6: pure}).changed
    assert changed == ["precision was fp16, is bf16_pure"]


def test_another_start_is_named_in_step_tensor_and_setting(tmp_path: Path) -> None:
    for name, how in {"one": {}, "seed": {"seed": 1}, "init": {"init": 1}, "wide": {"num_shards": 4}}.items():
        fit(tmp_path / name, **how)
    one, seed, init, wide = (read_hashes(tmp_path / name) for name in ("one", "seed", "init", "wide"))
    found = compare(one, seed)
    assert (found.last_equal, found.first_different, found.changed) == (None, 4, ["seed was 0, is 1"])
    assert found.names[0] == "0.weight" and "0.scale" not in found.names and found.num_names == 29
    assert compare(one, init).changed == []
    assert compare(one, wide).changed == ["num_shards was 8, is 4"]


LINE = Line({"same_bits": True, "world_size": 1}, ["w", "b", "step of w"], "0" * DIGITS * 3, "0x1.0p+0")


def test_one_bit_of_one_state_is_named(tmp_path: Path) -> None:
    class Flips(ddp.Callback):
        def step_start(self, state: TrainState) -> None:
            if state.step == 3:
                bias = dict(state.model.module.named_parameters())["0.bias"]
                average = state.optimizer.state[bias]["exp_avg_sq"]
                average.view(torch.int32)[0] ^= 1 << 4  # the last bit may be lost again where the step rounds

    every = ddp.SameBits(on=True, hash_every=1)
    fit(tmp_path / "one", same_bits=every, max_steps=4)
    fit(tmp_path / "other", Flips(), same_bits=every, max_steps=4)
    found = compare(read_hashes(tmp_path / "one"), read_hashes(tmp_path / "other"))
    assert (found.last_equal, found.first_different) == (3, 4) and "exp_avg_sq of 0.bias" in found.names
    assert {name for name in found.names if name.startswith("exp_avg")} == {"exp_avg_sq of 0.bias"}


def test_what_one_run_alone_has_differs_and_where_names_stand_does_not_matter() -> None:
    turned = LINE._replace(names=["b", "w", "step of w"])
    assert compare({1: LINE}, {1: turned}).first_different is None
    more = LINE._replace(names=["w", "b", "step of w", "step of b"], hashes="0" * DIGITS * 4, loss="0x1.1p+0")
    assert compare({1: LINE, 2: LINE}, {1: LINE, 2: more})[1:5] == (1, 2, ["step of b", "the loss"], 5)


def test_workers_count_where_bits_depend_on_them() -> None:
    three = LINE._replace(identity={"same_bits": True, "world_size": 3})
    assert compare({1: LINE}, {1: three}).changed == []
    other = LINE._replace(identity={"world_size": 3})
    assert compare({1: LINE}, {1: other}).changed == ["same_bits was True, is not set", "world_size was 1, is 3"]
    resumed = LINE._replace(identity={**LINE.identity, "threads_per_worker": 2})
    assert compare({1: LINE, 2: LINE}, {1: LINE, 2: resumed}).changed == ["threads_per_worker was not set, is 2"]


def test_zeros_of_two_signs_differ() -> None:
    zero = torch.zeros(3)
    assert _hash(zero) != _hash(-zero) and _hash([zero, 1]) != _hash([zero, 2]) and len(_hash(zero)) == DIGITS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"step":1,"identity":{}}\nnonsense\n', "line 2 of .* is damaged"),
        ('{"step":1,"loss":"0x1p+0","hashes":""}\n', "line 1 of .* is damaged .*do not name its hashes"),
        ('{"step":1,"identity":{}}\n{"step":1,"names":["w"]}\n{"step":1,"loss":"","hashes":"ab"}\n', "line 3"),
        ('{"step":1,"identity":{}}\n{"step":1,"hashes":""}\n', "line 2 .*it has no loss"),
        ('{"step":Infinity}\n', "line 1"),
        ("[1]\n", "line 1"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / HASHES).write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_hashes(tmp_path)
