"""`python -m ddp same_bits`: what it says of two runs, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddp.__main__ import main
from ddp.train.hashes import DIGITS, HASHES

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
        f"where they part could be told from a checkpoint before step 20 in both, and {one} has none: "
        "checkpoint.every_steps and checkpoint.keep_last say which ones a run keeps",
    ]
    third = write(tmp_path / "third", {10: "0010"})
    assert main(["same_bits", one, third]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "different at step 10, the first of 1 common step",
        "  1 of 5 values: exp_avg of 0.weight",
    ]


def test_questions_without_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write(tmp_path / "one", {1: "0000", 2: "0000", 3: "0000", 4: "0000"}), write(tmp_path / "other", {})
    damaged, linked = write(tmp_path / "damaged", {1: "00"}), tmp_path / "linked"
    linked.symlink_to(one)
    for words, says in {
        (one, other): "steps 1, 2, 3 … in the first, none in the second; take the same same_bits.hash_every",
        (one, damaged): "damaged in line 3 (ValueError: the lines before do not name what it has hashes of)",
        (one, str(linked)): "are the same run: name another one",
        (one, str(tmp_path)): f"holds no {HASHES}: make the run with same_bits.hash_every=10",
        (one,): "the following arguments are required: RUN",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main(["same_bits", *words])
        assert ended.value.code == 2 and says in capsys.readouterr().err
