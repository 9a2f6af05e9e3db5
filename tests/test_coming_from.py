"""docs/coming-from.md: its programs run and do what the page says, and what it names exists here."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_program
from ranks import run_ranks
from torch import Tensor
from torch.nn.functional import cross_entropy

import ddp
from ddp.collectives.catalog import ALL_REDUCE
from ddp.collectives.cost import HIERARCHICAL
from ddp.comm.communicator import Communicator

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "coming-from.md").read_text()
BLOCKS = re.findall(r"^```(python|diff)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
PROBLEM = next(code for _, code in BLOCKS)
HEADED = r"\*\*[Yy]ou write\*\*[^`]*(?:`[^`]+`[^`]*)*?```(?:python|diff)\n(.*?)^```"
WRITTEN = re.findall(HEADED, PAGE, re.DOTALL | re.MULTILINE)


def side(block: str, sign: str) -> str:
    """Returns one side of a block: of a program, the program; of a comparison, the lines with this sign or none."""
    if not re.search(r"^[-+]", block, re.MULTILINE):
        return block
    return "".join(line[1:] or "\n" for line in block.splitlines(keepends=True) if line[0] in (sign, " ", "\n"))


TORCH, HOROVOD, FIT, LOOP, DEEPSPEED, LIGHTNING = (side(block, "+") for block in WRITTEN)


KEPT: list[dict[str, Any]] = []
"""The programs' names. A Reducer of torch that outlives its group, and is freed, keeps the interpreter's lock while it
waits for Gloo's thread, which may wait for that lock."""


def run(folder: str, *programs: str) -> list[dict[str, Any]]:
    """Runs programs one after another in this rank, as torchrun would; returns what tests look at."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    found = []
    for program in programs:
        names: dict[str, Any] = {"__name__": "__main__"}
        KEPT.append(names)
        exec(compile(program, "train.py", "exec"), names)
        model = getattr(names["model"], "module", names["model"])
        state = names.get("state")
        found.append(
            {
                "weights": [parameter.detach().clone() for parameter in model.parameters()],
                "optimizer": names["optimizer"].state_dict()["state"],
                "loss": float(names["loss"]) if "loss" in names else None,
                "evaluation": names.get("evaluation") or getattr(state, "evaluation", None),
                "state": (state.step, state.stopped_by) if hasattr(state, "step") else None,
            }
        )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coming")
    (folder / "problem.py").write_text(PROBLEM)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[list[dict[str, Any]]]:
    """What the programs found, by rank and program: torch's first, and Horovod's twice."""
    return run_ranks(run, 2, str(folder), TORCH, HOROVOD, HOROVOD, LOOP, DEEPSPEED, LIGHTNING)


@pytest.fixture(scope="module")
def problem() -> Any:
    names: dict[str, Any] = {}
    exec(PROBLEM, names)
    return names["data"], names["net"]


def right(net: Any, weights: list[Tensor], points: Tensor, classes: Tensor) -> int:
    """Counts the points whose class the network finds."""
    model = net()
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.data = weight
    return int((model(points).argmax(1) == classes).sum())


def test_the_loop_of_torch_ends_with_the_weights_of_torch_s_class(
    folder: Path, ranks: list[list[dict[str, Any]]], problem: Any
) -> None:
    (theirs,), _ = run_ranks(run, 2, str(folder), side(WRITTEN[0], "-"))
    ours = ranks[0][0]
    assert all(map(torch.equal, ours["weights"], theirs["weights"]))
    data, net = problem
    assert ours["evaluation"]["accuracy"] == pytest.approx(right(net, ours["weights"], *data()[1]) / 199)


def test_what_rank_0_has_read_is_everyone_s(ranks: list[list[dict[str, Any]]]) -> None:
    for rank in ranks:
        first, second = rank[1:3]
        assert [each["step"].item() for each in first["optimizer"].values()] == [20] * 4
        assert [each["step"].item() for each in second["optimizer"].values()] == [40] * 4
        assert second["loss"] < first["loss"] < 0.69
        assert first["loss"] == ranks[0][1]["loss"]
        assert all(map(torch.equal, second["weights"], ranks[0][2]["weights"]))


def test_the_loop_of_sums_and_counts_is_one_process_on_whole_batches(
    ranks: list[list[dict[str, Any]]], problem: Any
) -> None:
    data, net = problem
    (points, classes), model = data()[0], net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in torch.arange(801).split(64):
        optimizer.zero_grad()
        loss = cross_entropy(model(points[batch]), classes[batch])
        loss.backward()
        optimizer.step()
    for rank in ranks:
        assert rank[3]["loss"] == pytest.approx(loss.item(), rel=1e-4)
        for ours, theirs in zip(rank[3]["weights"], model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_fit_makes_the_steps_of_the_global_batch(ranks: list[list[dict[str, Any]]]) -> None:
    for deepspeed, lightning in (rank[4:] for rank in ranks):
        assert deepspeed["state"] == (5 * 13, "")  # 801 samples in steps of 64
        assert deepspeed["evaluation"]["test_loss"] < 0.4
        assert lightning["evaluation"]["test_accuracy"] > 0.9
        assert lightning["state"][0] < 20 * 13 and lightning["state"][1] == "it is good enough"


def test_a_script_starts_its_workers(folder: Path) -> None:
    (folder / "train.py").write_text(FIT)
    done = run_program(folder / "train.py", folder)
    assert done.returncode == 0, done.stderr
    evaluation = ast.literal_eval(done.stdout.splitlines()[-1])
    promised = re.search(r"# \{'test_loss': (0\.\d)…, 'test_accuracy': (0\.\d)…\}", FIT)
    assert promised is not None
    assert [f"{number:.8f}"[:3] for number in evaluation.values()] == list(promised.groups())


def test_what_others_wrote_is_python() -> None:
    for _, code in BLOCKS:
        ast.parse(side(code, "-"))


def test_what_the_page_names_exists() -> None:
    settings = (ROOT / "docs" / "settings.md").read_text()
    here = "\n".join(line.rsplit("|", 2)[-2] for line in PAGE.splitlines() if line.startswith("| "))
    homes: dict[str, Any] = {"ddp": ddp, "comm": Communicator, "model": ddp.DistributedDataParallel}
    for home, name in re.findall(r"\b(ddp|comm|model)\.(\w+)", here):
        assert hasattr(homes[home], name) or f"self.{name}" in inspect.getsource(homes[home]), f"{home}.{name}"
    functions = (ddp.fit, ddp.init, ddp.launch, ddp.DistributedDataParallel, ddp.LossFunction)
    policies = (ddp.Averaging, ddp.Batches, ddp.Classification, ddp.Evaluation, ddp.Folder, ddp.Reading)
    policies += (ddp.LocalSGD, ddp.ParameterServer)
    keywords = {name for function in (*functions, *policies) for name in inspect.signature(function).parameters}
    assert set(re.findall(r"[`(](\w+)=", here)) <= keywords
    keys = re.findall(r"`(batch\.\w+)`|`(\w+\.\w+)=", here)
    assert len(keys) > 2 and all(f"{first or second}=" in settings for first, second in keys)
    words = PAGE.partition("**Cross-device operations**")[2].partition("**Clusters**")[0]
    ways = re.findall(r"^\| .* \| `(\w+)`[,:| ]", words, re.MULTILINE)
    assert ways == ["ring", "auto", "hierarchical", "master_worker"]
    assert {*ways} <= {"auto", *ALL_REDUCE, *HIERARCHICAL}
