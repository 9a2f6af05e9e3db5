"""docs/engines.md: its files can be read by what they are for, and scripts/engines finds out what is wrong.

The runs themselves need the engines: scripts/engines all.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import run_ranks

from ddp.comm.meeting.place import place

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts" / "enginebed"))
import engines  # noqa: E402
from starts import as_pods  # noqa: E402

PAGE = (ROOT / "docs" / "engines.md").read_text()
FILES = engines.files_of(PAGE)


def test_each_file_can_be_read() -> None:
    blocks = re.findall(r"^```\w+\n", PAGE, re.MULTILINE)
    assert len(FILES) == len(blocks), "a block has no name in its first line"
    for name, text in FILES.items():
        if name.endswith(".py"):
            ast.parse(text)
        elif name.endswith(".sh"):
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        else:
            assert yaml.safe_load(text)["kind"]


def test_each_engine_has_its_file_and_its_row() -> None:
    programs, of_servers = {"circle.py", "loop.py"}, {name for name in FILES if name.startswith("servers")}
    assert {each.file for each in engines.ENGINES.values()} | programs | of_servers == FILES.keys()
    assert engines.with_rows(PAGE, {}) == PAGE, "scripts/engines NAME --json writes the rows anew"
    other = engines.with_rows(PAGE, {"dask": "ran"})
    assert "| ran |" in other and other.count("\n") == PAGE.count("\n")


def test_circle_is_the_program_of_the_readme() -> None:
    """All but what the page says: no launch, arguments, the seed of the first weights, the status after a signal."""
    readme = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[-1]
    theirs, ours = readme.split("\n\n\nif __name__")[0], FILES["circle.py"].split("\n\n\nif __name__")[0]
    changed = [line for line in ours.splitlines() if line not in theirs.splitlines()]
    assert [line.strip().partition("(")[0] for line in changed] == [
        "# circle.py",
        "import signal",
        "import sys",
        "def train",
        "torch.manual_seed",
        "state = ddp.fit",
        "global_batch=64, epochs=5, test_data=test, folder=ddp.Folder",
        "callbacks=callbacks)",
        "if state.stopped_by in signal.Signals.__members__:  # all is saved: the engine is to start it again",
        "sys.exit",
    ]


@pytest.mark.parametrize("manifest", ["pytorchjob.yaml"])
def test_a_pod_finds_its_rank(manifest: str, tmp_path: Path) -> None:
    (tmp_path / manifest).write_text(FILES[manifest])
    with as_pods(tmp_path / manifest) as pods:
        found = [place(each.variables) for each in pods]
    assert [(each.rank, each.world_size) for each in found if each] == [(0, 2), (1, 2)]
    assert len({each.port for each in found if each}) == 1


def whole_run() -> list[dict[str, Any]]:
    share = engines.NUM_SAMPLES // 2
    samples = [[[number, 0.0] for number in range(rank * share, (rank + 1) * share)] * 5 for rank in range(2)]
    return [{"rank": r, "world_size": 2, "pid": r, "weights": "w", "samples": samples[r]} for r in range(2)]


def test_two_processes_install_an_engine_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[list[Any]]()

    def slowly(words: list[Any], **_: Any) -> Any:
        calls.append(words)
        time.sleep(0.05)
        Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / ".engines" / "distributed")})).mkdir(
            parents=True, exist_ok=True
        )
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(engines, "ROOT", tmp_path)
    monkeypatch.setattr(engines.subprocess, "run", slowly)
    with ThreadPoolExecutor() as pool:
        assert len({*pool.map(engines.installed, ["dask"] * 2)}) == 1
    assert [words[2] for words in calls] == ["venv", "pip"]


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    engines.check(whole_run(), whole=True, said="")
    changes: dict[str, Any] = {
        "ranks and world sizes": lambda ranks: ranks.pop(),
        "world sizes were": lambda ranks: ranks[1].update(world_size=1),
        "one process": lambda ranks: ranks[1].update(pid=0),
        "different weights": lambda ranks: ranks[1].update(weights="v"),
        "epoch 0 had 3999 of": lambda ranks: ranks[0]["samples"].__setitem__(0, [1, 0.0]),
        "epoch 4 had": lambda ranks: ranks[0]["samples"].pop(),
        "samples, and not": lambda ranks: ranks[0]["samples"].append([1, 0.0]),
    }
    for words, change in changes.items():
        ranks = copy.deepcopy(whole_run())
        change(ranks)
        with pytest.raises(engines.Wrong, match=words):
            engines.check(ranks, whole=True, said="")
    metrics = tmp_path / "runs" / "circle" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text("".join(f'{{"kind": "step", "step": {step}}}\n' for step in (1, 2, 2)))
    with pytest.raises(engines.Wrong, match="has the steps"):
        engines.check_steps(tmp_path)


def test_the_probe_sees_what_a_rank_has_trained_on(tmp_path: Path) -> None:
    folder, seen = tmp_path / "work", tmp_path / "seen"
    seen.mkdir()
    engines.lay_out(folder, seen, "loop", "SIGKILL")
    assert "from loop import train" in (folder / "on_ray.py").read_text()
    (folder / "loop.py").write_text((folder / "loop.py").read_text().replace("range(5)", "range(2)"))
    (found,) = run_ranks(watched_loop, 1, str(folder))
    (left,) = [engines.json.loads(path.read_text()) for path in seen.glob("*.json")]
    assert left["weights"] == hashlib.sha256(found).hexdigest()
    assert (left["rank"], left["world_size"], left["steps"]) == (0, 1, 2 * 125)
    epochs = [sorted(map(tuple, left["samples"][4000 * each : 4000 * (each + 1)])) for each in range(2)]
    assert epochs[0] == epochs[1] and len(set(epochs[0])) == 4000


def watched_loop(folder: str) -> bytes:
    """Runs the page's loop as a rank; returns the bytes of the weights that it has saved."""
    import torch

    os.chdir(folder)
    sys.path.insert(0, folder)
    from loop import train

    torch.set_num_threads(1)
    train()
    weights = torch.load("runs/loop/weights.pt")
    return b"".join(each.numpy().tobytes() for each in weights.values())
