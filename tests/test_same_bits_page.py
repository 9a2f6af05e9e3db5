"""docs/same-bits.md: its commands are run as they stand there, and say what it shows; its program runs."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from forked import run_program

from ddp.__main__ import main as ask
from ddp.run.launch.command_line import main

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "same-bits.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
BY_HAND, UNIT = (code for kind, code in BLOCKS if kind == "python")
SHOWN = [text for kind, text in BLOCKS if not kind]
GROUPS = re.findall(r"^```bash\n(.*?)^```\n+```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
(BAD,) = re.findall(r"^`(scripts/ddp train [^`]*)` ends with:", PAGE, re.MULTILINE)
SKEWED = """
import os

from torch import Tensor, nn


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        is_wrong = os.environ["RANK"] == "2" and self.num_forwards > 30
        return super().forward(x) * (1 + is_wrong * 2**-20)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")  # `main` sets it; this takes it back
    (tmp_path / "unit.py").write_text(UNIT)
    return tmp_path


def words_of(text: str) -> list[str]:
    """Returns the words of a message that are the same on every machine."""
    text = re.sub(r"on host \S+ \([^)]*\)", "on host", text)
    return re.sub(r"[-+]?\d[\d.]*", "0", text).split()


def run(command: str, monkeypatch: pytest.MonkeyPatch, *further: str, status: int = 0) -> None:
    words = shlex.split(command)[1:]
    if words[0] != "train":
        assert ask(words) in (0, 1)
        return
    monkeypatch.setattr(sys, "argv", ["train.py", *words[1:], "report.curves=false", *further])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status


@pytest.mark.parametrize(("commands", "shown"), GROUPS)
@pytest.mark.quick(1)
def test_commands_say_what_is_shown(
    commands: str, shown: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    *before, last = commands.splitlines()
    for command in before:
        run(command, monkeypatch)
    capfd.readouterr()
    run(last, monkeypatch)
    expected = words_of(shown)
    assert words_of(capfd.readouterr().out)[-len(expected) :] == expected


def ending(text: str) -> str:
    return next(line for line in text.splitlines()[::-1] if re.match(r"(Diverged|AuditFailed): ", line))


@pytest.mark.slow
def test_a_bad_step_says_what_is_shown(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    run(BAD, monkeypatch, status=1)
    (shown,) = (each for each in SHOWN if each.startswith("Diverged"))
    assert words_of(ending(capfd.readouterr().err)) == words_of(shown)


@pytest.mark.slow
def test_an_audit_says_what_is_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "skewed.py").write_text(SKEWED)
    command = "scripts/ddp train same_bits.on=true same_bits.audit_every=5 model=skewed:Net max_steps=40"
    run(command, monkeypatch, "cluster.workers=3", status=1)
    (shown,) = (each for each in SHOWN if each.startswith("AuditFailed"))
    assert words_of(ending(capfd.readouterr().err)) == words_of(shown)


def test_the_program_by_hand(tmp_path: Path) -> None:
    (tmp_path / "by_hand.py").write_text(BY_HAND)
    done = run_program(tmp_path / "by_hand.py", tmp_path)
    assert (done.returncode, done.stdout) == (0, "True\n"), done
