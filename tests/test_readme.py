"""The commands of README and docs/features.md are run as they stand there, cut short by settings that come after them;
README's code is that of the files that it names."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from forked import run_program

from ddp.__main__ import main as ask
from ddp.collectives.catalog import ALL_REDUCE, SCHEDULES
from ddp.run.assembly import stages
from ddp.run.launch.command_line import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FEATURES = (ROOT / "docs" / "features.md").read_text()
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
SHORT = ["max_steps=2", "report.log_every=1", "report.curves=false"]
SMALL = {
    "data=synthetic": ["data.num_samples=128", "data.image_size=8"],
    "recipe=gpt": ["model.width=12", "model.depth=1"],
    "profile.steps=5": ["max_steps=15"],
    "evaluate.by=sidecar": ["evaluate.wait_s=0"],  # a new interpreter imports torch for seconds
}


def commands() -> list[str]:
    table = FEATURES.split("## From the command line")[1]
    shown = re.findall(r"^(scripts/ddp (?:check|draw) .*?)(?: +#.*)?$", README, re.MULTILINE)
    found = re.findall(r"`((?:scripts/ddp|[.]venv/bin/torchrun) [^`]*)`", table)
    # tests/test_main_job.py makes a sweep, tests/lab/scaling/test_scale.py runs scale, and a search needs Optuna
    # tests/lab/test_chaos.py injects faults
    # tests/comm/meeting/test_rendezvous.py starts servers and workers by hand
    elsewhere = " (-m cluster[.]|chaos |report |search |scale |train cluster[.]role)"
    return [*shown, *(each for each in found if not re.search(elsewhere, each))]


def run(command: str, folder: Path) -> str:
    """Runs what makes a rank of the process that it is called in: torchrun, or a task of a cluster."""
    there = [str(ROOT / word) if word.endswith(".py") else word for word in shlex.split(command)[1:]]
    words = [sys.executable, "-m", "torch.distributed.run" if "torchrun" in command else "ddp", *there, *SHORT]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all: some commands go on with what an earlier one has left."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copy(ROOT / "tests" / "mine.py", folder)
    return folder


@pytest.fixture(autouse=True)
def shipped_schedules() -> Iterator[None]:
    """Forgets a schedule that a command has added: each next command would prove it at all of its ranks."""
    yield
    for schedules in (ALL_REDUCE, SCHEDULES):
        schedules.pop("mine:chain", None)


def of_a_few_bytes(yardstick: Callable[..., float], train: bytes, held_out: bytes, **how: Any) -> float:
    return yardstick(train[:100_000], held_out[:10_000], **how)


@pytest.mark.parametrize("command", commands())
@pytest.mark.quick(6)
def test_command(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Runs it in this process, without three seconds of imports; tests/test_package.py runs scripts/ddp itself."""
    monkeypatch.chdir(folder)
    if "strategy=tpu" in command and find_spec("jax") is None:  # tests/tpu/ has it in an environment of its own
        pytest.skip("pip install -e '.[tpu]'")
    if "torchrun" in command or "cluster.spec" in command:
        assert run(command, folder).strip()
        return
    words = shlex.split(command)[1:]
    if words[0] != "train":
        shorter = ["--turns", "1"] if words[0].startswith("bench") else []
        if words[0] == "simulate":  # tests/collectives/test_simulate.py does it for so many ranks
            words = [word.replace("10000", "1000") for word in words]
        assert ask([*words, *shorter]) == 0 and capfd.readouterr().out.strip()
        return
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")  # `main` sets it; this takes it back
    for yardstick in ("ngram_bits_per_byte", "xz_bits_per_byte"):
        monkeypatch.setattr(stages, yardstick, partial(of_a_few_bytes, getattr(stages, yardstick)))
    smaller = [setting for word in words for setting in SMALL.get(word, [])]
    monkeypatch.setattr(sys, "argv", ["train.py", *words[1:], *SHORT, *smaller])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0, capfd.readouterr()
    assert ("the trial went well" if "trial=true" in words else "results: runs/") in capfd.readouterr().out


def python_of(page: str) -> list[str]:
    """Returns the programs and parts of programs that a page shows."""
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_python_examples(tmp_path: Path) -> None:
    def said_by(name: str, program: str) -> list[str]:
        (tmp_path / name).write_text(program)
        done = run_program(tmp_path / name, tmp_path)
        assert done.returncode == 0, done
        return done.stdout.splitlines()

    first, again = (said_by("mine.py", python_of(README)[-1]) for _ in range(2))
    assert ast.literal_eval(first[-1])["test_loss"] < 0.1
    assert "all of the run's steps are done" in "\n".join(again) and again[-1] == first[-1]
    assert said_by("step.py", *python_of(FEATURES)) == ["[[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]"]


def functions_of(code: str) -> dict[str, str]:
    """Returns each function as the interpreter sees it: without comments and docstrings."""
    found = {}
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node):
                del node.body[0]
            found[node.name] = ast.unparse(node)
    return found


def test_code_is_that_of_the_files() -> None:
    ring, by_hand, _ = map(functions_of, python_of(README))
    assert ring.items() < functions_of((ROOT / "ddp" / "collectives" / "ring.py").read_text()).items()
    (chapter,) = (ROOT / "recipes" / "tutorial").glob("07_*.py")
    assert by_hand and by_hand.items() < functions_of(chapter.read_text()).items()


def test_it_is_short() -> None:
    assert len(README.replace("|", " ").split()) <= 800


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_named_exists(page: str) -> None:
    names = re.findall(r"`((?:ddp|tests|scripts|recipes|docs)/[\w/.-]+)", PAGES[page])
    links = re.findall(r"\]\(([\w/.-]+)\)", PAGES[page])
    home = ROOT if page == "README.md" else ROOT / "docs"
    assert [name for name in names if not (ROOT / name).exists()] == []
    assert [link for link in links if not (home / link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_heading_that_is_linked_exists(page: str) -> None:
    links = re.findall(r"\]\((?:(?:docs/)?([\w-]+[.]md))?#([\w-]+)\)", PAGES[page])
    assert [link for link in links if link[1] not in headings_of(PAGES[link[0] or page])] == []


def headings_of(text: str) -> list[str]:
    """Returns what links call the headings of a page: their words, in small letters, with hyphens."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in titles]
