"""The page of settings: complete, the same in --help and in docs/, and there at once.

Tests: ddp/run/settings/config.py.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from ddp.run.launch.command_line import main
from ddp.run.settings.config import CHOICES, OWN, WIDTH, Config, markdown, page

ROOT = Path(__file__).parents[3]
BY_LAUNCHER = {"run.dir", "run.code", "cluster.local_workers"}


def keys() -> set[str]:
    """Returns every key that a user can set, from the plain form of the settings."""
    found = set()
    trees = [asdict(Config()), *({group: asdict(one)} for group, all_ in CHOICES.items() for one in all_.values())]
    for tree in trees:
        for key, value in tree.items():
            inside = isinstance(value, dict) and key != "rename"
            found |= {f"{key}.{name}" for name in value} if inside else {key}
    found |= {f"{group}.args" for group in OWN}
    return found - BY_LAUNCHER - {f"{group}.name" for group in CHOICES}


@pytest.mark.slow
def test_every_setting_and_every_choice_stands_there_with_a_meaning() -> None:
    entries: dict[str, str] = {}
    for line in page().splitlines():
        key, equals, rest = line.strip().partition("=")
        if equals and len(line) - len(line.lstrip()) in (2, 4) and " " not in key:
            entries.setdefault(key, rest)
    assert {key for key in entries if key not in {*CHOICES, "recipe"}} == keys()
    assert [key for key, rest in entries.items() if len(rest.split()) < 3] == []
    for group, choices in CHOICES.items():
        assert [name for name in choices if f"  {group}={name} " not in page() or not choices[name].meaning] == []
    assert max(map(len, page().splitlines())) <= WIDTH


def test_the_page_in_docs_is_this_one() -> None:
    written = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert written == markdown(), "write it anew: python -m ddp.run.settings.config > docs/settings.md"


@pytest.mark.parametrize("words", [["--help"], ["data=synthetic", "-h"]])
@pytest.mark.quick(1)
def test_help_needs_neither_hydra_nor_torch(words: list[str]) -> None:
    program = f"""
import sys
from ddp.run.launch.command_line import main
sys.argv[1:] = {words}
try:
    main()
finally:
    assert not {{"hydra", "omegaconf", "torch"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", page("python -m ddp") + "\n")


@pytest.mark.slow
def test_hydra_s_own_help_is_still_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--hydra-help"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "--multirun" in capsys.readouterr().out
