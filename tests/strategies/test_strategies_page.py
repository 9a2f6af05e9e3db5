"""docs/strategies.md: its formulas are what is counted, of memory and of what travels, and each word is in it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from ranks import run_ranks

import ddp
from ddp.comm import connect
from ddp.comm.transport.gloo import GlooTransport
from ddp.gradients import reducer
from ddp.lab.bench.turns import Span, bytes_in, spans_of
from ddp.optim import layerwise, norms
from ddp.run.assembly import stages
from ddp.run.launch.command_line import composed
from ddp.run.launch.run_folder import only_writer, prepare
from ddp.run.settings.config import Config
from ddp.setting import StrategyName
from ddp.strategies import central_storage, sharded
from ddp.strategies.fully_sharded import FullySharded

PAGE = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
TABLE = PAGE.partition("\n## ")[0]
ROWS = re.findall(r"^\| `(\w+)` \| [^|]* \| `([^`]*)` \| `([^`]*)` \|", TABLE, re.MULTILINE)
WIDTH, BATCH = 300, 12
BY_HAND: dict[str, Any] = {
    "one_device": ddp.strategies.Replicated,
    "mirrored": ddp.strategies.Replicated,
    "multi_worker": ddp.strategies.Replicated,
    "sharded": ddp.strategies.Sharded,
    "fully_sharded": FullySharded,
    "central_storage": ddp.strategies.CentralStorage,
    "local_sgd": ddp.strategies.LocalSteps,
}
NUM_INNER = 2


def value(formula: str, **numbers: int) -> float:
    """Returns what a formula of the page says."""
    signs = str.maketrans({"·": "*", "÷": "/", "−": "-"})
    return float(eval(formula.translate(signs), {}, numbers))


def counted(ranks_per_host: int) -> dict[str, tuple[list[Span], int]]:
    """Returns, by class, where parameters, gradients and state lie, and bytes sent to other hosts in the third step."""
    connect.boot_id = lambda: f"host {int(os.environ['RANK']) // ranks_per_host}"
    torch.set_num_threads(1)
    for module in (norms, layerwise, reducer, sharded, central_storage):  # so that slices of a small model are equal
        assert module.BLOCK_NUMEL > 256  # type: ignore[attr-defined]
        module.BLOCK_NUMEL = 256  # type: ignore[attr-defined]
    rank, sent, post = int(os.environ["RANK"]), 0, GlooTransport.post

    def watched(self: GlooTransport, sends: Any, receives: Any) -> Any:
        nonlocal sent
        away = [data for peer, data in sends if self.ranks[peer] // ranks_per_host != rank // ranks_per_host]
        sent += sum(data.nbytes for data in away)
        return post(self, sends, receives)

    GlooTransport.post = watched  # type: ignore[method-assign]
    ring = "shared_memory+ring" if ranks_per_host > 1 and int(os.environ["WORLD_SIZE"]) > ranks_per_host else "ring"
    comm, found = ddp.init(abort_s=30, algorithm=ring), {}
    for kind in dict.fromkeys(BY_HAND.values()):
        net: torch.nn.Module = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        inputs = torch.ones(BATCH, WIDTH)
        if kind is FullySharded:  # a unit that backward gathers again: not the last, nor one whose inputs are samples
            net, inputs = torch.nn.Sequential(net, torch.nn.Linear(WIDTH, 1, bias=False)), inputs.requires_grad_()
        strategy = kind(net, torch.optim.AdamW(net.parameters(), fused=True))
        inputs = inputs.tensor_split(comm.world_size)[comm.rank]
        for _ in range(3):
            before = sent
            common: list[torch.Tensor] = []
            num_inner = NUM_INNER if kind is ddp.strategies.LocalSteps else 1
            for number in range(1, num_inner + 1):
                strategy.optimizer.zero_grad()
                with strategy.micro_batch(is_last=number == num_inner):
                    strategy.model(inputs).square().mean().backward()
                    common = [*getattr(strategy, "_common", [])]
            flats = [flat for unit in strategy.units.all for flat in unit.flats] if kind is FullySharded else []
            slices = [each for flat in flats for each in (flat.mine, flat.gradient)]  # until the update
            ddp.strategies.step(strategy)
            comm.barrier()
            travelled = sent - before
        state = [each for of_one in strategy.optimizer.state.values() for each in of_one.values() if each.numel() > 1]
        held = slices or [net.weight, net.weight.grad, *common]
        found[kind.__name__] = spans_of([*held, *state]), travelled
        strategy.finish()
    ddp.shutdown()
    return found


@pytest.mark.parametrize(("n", "num_hosts"), [(1, 1), (2, 1), (1, 3), (2, 2)])
@pytest.mark.quick(1)
def test_formulas_are_what_is_counted(n: int, num_hosts: int) -> None:
    ranks = run_ranks(counted, n * num_hosts, n)
    for word, memory, travels in ROWS:
        if (word == "one_device" and n * num_hosts > 1) or (word == "mirrored" and num_hosts > 1):
            continue
        mine = [rank[BY_HAND[word].__name__] for rank in ranks]
        hosts = [mine[first : first + n] for first in range(0, len(mine), n)]
        held = max(bytes_in(span for spans, _ in host for span in spans) for host in hosts)
        sent = max(sum(each for _, each in host) for host in hosts)
        numbers = {"P": WIDTH**2, "n": n, "H": num_hosts, "B": BATCH, "K": NUM_INNER}
        num_samples = BATCH * (NUM_INNER if word == "local_sgd" else 1)
        assert held == pytest.approx(value(memory, **numbers), rel=0.02), word
        assert sent / num_samples == pytest.approx(value(travels, **numbers), rel=0.02, abs=20), word


SERVED = PAGE.partition("## Parameter servers")[2].partition("## Agree seldom")[0]
MODES = [re.findall("`([^`]+)`", row) for row in re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \|", SERVED, re.MULTILINE)][1:]


def each_run(runs: Sequence[tuple[Config, Path]]) -> None:
    """Makes runs one after another, as a server or worker of the command line."""
    for config, folder in runs:
        stages.run(config, folder)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.quick(1)
def test_each_line_on_servers_trains_with_one_and_with_two(
    servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [[], ["strategy.mode=bounded"], *([f"strategy.mode={mode}", *more] for mode, *more in MODES)]
    assert len(lines) == 6
    small = ["data=synthetic", "data.num_samples=64", "model=mlp", "max_steps=2", "report.curves=false", "device=cpu"]
    several = [f"cluster.servers={servers}"] if servers > 1 else []
    runs = []
    for number, line in enumerate(lines):
        config, folder = composed(["strategy=parameter_server", *line, *several, *small, f"run.name={number}"])
        with only_writer(folder):
            prepare(config, folder)
        runs.append((config, folder))
    ddp.launch(each_run, runs, workers=2, servers=servers)
    for _, folder in runs:
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["steps"], summary["servers"], summary["world_size"]) == (2, servers, 2)
    said = capfd.readouterr().out
    assert said.count(f" and {servers} server") == 6
    assert said.count("(bounded, of parameters at most 4 updates old)") == 2


def test_every_word_has_a_row() -> None:
    assert [word for word, *_ in ROWS] == [*BY_HAND]
    assert {*get_args(StrategyName)} <= {"auto", "parameter_server", "tpu", *BY_HAND}  # these are counted nowhere
