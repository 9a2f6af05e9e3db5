"""The watch: figures of each rank, a constant guess as an optimizer finds it, runs that do not learn or become slow.

Tests: ddp/train/supervision.py.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.errors import ConfigError
from ddp.process.memory import resident_bytes
from ddp.run.launch import command_line
from ddp.run.launch.supervisor import Ended
from ddp.run.settings.config import Config
from ddp.train import supervision as watch
from ddp.train.reports.meters import Usage
from ddp.train.steps.task import IGNORE, Task, as_task
from ddp.train.supervision import WATCH, Learning, Pace, Watch, guess_of

DRAW = torch.Generator().manual_seed(0)
CLASSES = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), 300, replacement=True, generator=DRAW)
TOKENS = torch.where(torch.rand(40, 30, generator=DRAW) < 0.2, IGNORE, torch.randint(0, 5, (40, 30), generator=DRAW))
LOSSES: dict[str, tuple[Any, Tensor, int]] = {  # loss, targets, and the numbers of an output
    "Classification": (ddp.Classification(), CLASSES, 3),
    "label smoothing": (ddp.Classification(label_smoothing=0.2), CLASSES, 3),
    "one-hot": (ddp.Classification(), F.one_hot(CLASSES), 3),
    "probabilities": (F.cross_entropy, torch.rand(300, 4, generator=DRAW).double().softmax(1), 4),
    "LanguageModel": (ddp.LanguageModel(), TOKENS, 5),
    "a module's": (nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES, 3),
    "yes or no": (F.binary_cross_entropy_with_logits, (torch.rand(300, 2, generator=DRAW) < 0.3).double(), 2),
    "squares": (nn.MSELoss(), torch.randn(300, 2, generator=DRAW).double() * torch.tensor([1.0, 3.0]) + 7, 2),
}


class Constant(nn.Module):
    """Returns the same for every sample, and in a language model at every time."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.row.expand(*inputs.shape, -1)


def fitted(task: Task, targets: Tensor, size: int) -> float:
    """The least loss of a constant, as torch's optimizer finds it."""
    model = Constant(size)
    inputs = targets if isinstance(task, ddp.LanguageModel) else torch.zeros(len(targets))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        total, count = task.loss(model, (inputs, targets))
        loss: Tensor = total / count
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return closure().item()


@pytest.mark.parametrize("name", LOSSES)
def test_a_constant_guess_is_the_one_that_an_optimizer_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks add up what they have seen, in batches."""
    loss, targets, size = LOSSES[name]
    task = as_task(loss)
    ranks = [Watch(), Watch()]
    monkeypatch.setattr(watch, "ENOUGH", 10**9)
    for mine, part in zip(ranks, targets.split([len(targets) - 90 // 3, 90 // 3]), strict=True):
        mine.begin(task, 100)
        for batch in part.split(7):
            mine(nn.Identity(), (batch, batch), len(batch))
    guesses: list[Any] = [mine._guess for mine in ranks]

    def gathered(_: None, mine: tuple[int, Any]) -> list[tuple[int, Any]]:
        return [(each._num, each._sums if isinstance(mine[1], list) else each._num_wanted) for each in guesses]

    monkeypatch.setattr(watch, "all_gather_object", gathered)
    assert guesses[0].loss(None) is None, "there are too few"
    monkeypatch.setattr(watch, "ENOUGH", 1)
    assert guesses[0].loss(None) == pytest.approx(fitted(task, targets, size), rel=1e-6)


def test_losses_whose_best_constant_is_not_known_are_not_judged() -> None:
    class Own(ddp.Classification):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            return super().loss(model, batch)

    weighted = nn.CrossEntropyLoss(weight=torch.ones(3))
    others = (Own(), F.l1_loss, weighted, nn.CrossEntropyLoss(ignore_index=0), nn.MSELoss(reduction="sum"))
    assert [guess_of(as_task(loss)) for loss in others] == [None] * 5
    odd = watch.ConstantGuess("numbers")
    odd.add(torch.ones(4, 3)), odd.add(torch.ones(4, 2))
    assert odd._num == 4, "samples of another shape are left out"


def test_a_loss_is_judged_over_the_last_steps() -> None:
    learning = Learning()
    for _ in range(19):
        learning.add(9.0)
    assert learning.problem(1.0) == "", "too few steps"
    learning.add(9.0)
    guessed = "no better than that of a constant guess, 8.9, and does not fall"
    assert learning.problem(8.9) == f"the loss of the last 20 steps, 9, is {guessed}"
    assert learning.problem(0.0) == "", "all targets are equal"
    for number in range(20):
        learning.add(9.0 - 0.01 * number)
    assert learning.problem(1.0) == "", "a short run that has only begun: the loss falls"
    for number in range(20):
        learning.add(9.0 - 0.008 * number)
    assert learning.problem(1.0), "by less than a hundredth in ten steps: it does not"
    for _ in range(20):
        learning.add(0.989)
    assert learning.problem(1.0) == "" and learning.problem(0.998)


def test_a_run_is_slow_below_a_share_of_its_median_for_some_time() -> None:
    now_s = 0.0
    pace = Pace(0.5, clock=lambda: now_s)
    said = []
    rates = [30, *[100] * 10, 49, 100, 20, 30, *[50] * 2, *[40] * 6, 100, *[45] * 5]
    for rate in rates:
        now_s += 3
        said.append(pace.add(rate))
    assert [number for number, text in enumerate(said) if text] == [20, 27], "a single one is none; a spell, told once"
    assert said[20] == "40 samples/s for 12 s, and a median of 100 before"
    never = Pace(0.0, clock=lambda: 0.0)
    assert not any(never.add(rate) for rate in [100.0] * 20 + [0.0] * 20)


def test_what_a_rank_uses_is_what_the_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank alone, which computes for a while; and at which lines figures are gathered."""
    now_s = 0.0
    monkeypatch.setattr("ddp.train.reports.meters.now_s", lambda: now_s)

    class One:
        world_size, device = 1, torch.device("cpu")

    comm: Any = One()
    usage, cpu_s = Usage(), time.process_time()
    while time.process_time() - cpu_s < 0.02:
        pass
    now_s = 0.04
    found = usage.figures(comm, num_samples=60, own_s=0.03)
    assert found["samples_per_s/rank_0"] == pytest.approx(2000)
    assert found["cpu_use/rank_0"] == pytest.approx(0.5, rel=0.5)
    assert found["memory_mb/rank_0"] == pytest.approx(resident_bytes() / 1e6, rel=0.1)
    assert resident_bytes() == pytest.approx(_vm_rss(), rel=0.1)
    lines = []
    for line in range(60):
        now_s += 0.04
        if usage.figures(comm, num_samples=60, own_s=0.03):
            lines.append(line)
    assert lines == [24, 49], "about once a second"


def _vm_rss() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) << 10


@pytest.mark.parametrize("arguments", [{"action": "end"}, {"learn_share": 0}, {"learn_share": 2}, {"slow_share": 1}])
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(arguments))}="):
        Watch(**arguments)


X = torch.randn(240, 4, generator=DRAW)
Y = (X.sum(1) > 0).long()


def trained(folder: Path, **watching: Any) -> tuple[str, int]:
    """Trains on three quarters of all; a model whose outputs do not depend on its inputs, unless `learns`."""
    learns = watching.pop("learns", False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2) if learns else _Blind())
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddp").addHandler(handler)
    state = ddp.fit(
        model,
        (X, Y),
        torch.optim.SGD(model.parameters(), lr=0.5 if learns else 0.01),
        loss=ddp.Classification(),
        global_batch=12,
        epochs=5,
        folder=ddp.Folder(folder, log_every=4, progress=False, curves=False),
        callbacks=[Watch(**watching)],
    )
    ddp.shutdown()
    return "\n".join(messages) + state.stopped_by, state.step


class _Blind(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(torch.zeros_like(inputs))


def test_a_run_that_does_not_learn_is_told_or_ended_on_all_ranks(tmp_path: Path) -> None:
    def runs() -> list[tuple[str, int]]:
        return [
            trained(tmp_path / "warned"),
            trained(tmp_path / "ended", action="stop", learn_share=0.5),
            trained(tmp_path / "learnt", learns=True, action="stop"),
            trained(tmp_path / "few", learn_share=0.01),
        ]

    mine, other = run_ranks(runs, 2)
    (warned, num_warned), (ended, num_ended), (learnt, num_learnt), (few, _) = mine
    assert (num_warned, num_ended, num_learnt) == (100, 53, 100) and [step for _, step in other][:3] == [100, 53, 100]
    assert few.count("is no better than") == 1, "at first, too few targets were seen"
    assert warned.count("is no better than that of a constant guess") == 1 and "step 24: the loss of" in warned
    assert f"{WATCH}the loss of the last 20 steps, 0." in ended and WATCH in other[1][0] and not learnt
    assert (tmp_path / "ended" / "checkpoints" / "step-00000053").exists()
    lines = [json.loads(line) for line in (tmp_path / "learnt" / "metrics.jsonl").read_text().splitlines()]
    used = {name for line in lines for name in line if "/" in name}
    assert used == {f"{name}/rank_{rank}" for name in ("cpu_use", "memory_mb", "samples_per_s") for rank in (0, 1)}


def test_it_ends_with_a_status_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "run_workers", lambda *_, **__: Ended(None, {}))
    monkeypatch.setattr("ddp.run.assembly.stages.finish", lambda *_: None)
    for stopped_by, status in ((f"{WATCH}slow", 3), ("pruned", 0), ("SIGTERM", 143), (None, 0)):
        (tmp_path / "summary.json").write_text(json.dumps({"stopped_by": stopped_by}))
        assert command_line.train(Config(), tmp_path) == status
