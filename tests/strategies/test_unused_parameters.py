"""A head that the loss of a step does not use: refused with the words that allow it, or trained as by one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.errors import ConfigError, UnusedParameters
from ddp.run.assembly.components import make_replica
from ddp.run.settings.reader import from_plain
from ddp.strategies import choice

RANDOM = torch.Generator().manual_seed(0)
ROWS, CLASSES = torch.randn(48, 4, generator=RANDOM, dtype=torch.float64), torch.randint(3, (48,), generator=RANDOM)
HEADS = torch.zeros(48, 1, dtype=torch.float64)
HEADS[4:8] = HEADS[16:30] = 1.0  # one head on each of two ranks; one head on both; the other one; both on one rank
INPUTS = torch.cat([ROWS, HEADS], dim=1)
TINY = {"bucket_cap_mb": 1e-5, "first_bucket_mb": 1e-5}
ALLOWED: dict[str, dict[str, Any]] = {
    "auto": {},
    "small buckets": TINY,
    "sharded": {"strategy": "sharded", **TINY},
    "central storage": {"strategy": "central_storage"},
    "synchronous steps": {"kind": ddp.LocalSGD, "warmup_samples": 48},
    "same bits": {"same_bits": True, **TINY},
    "same bits, sharded": {"same_bits": True, "strategy": "sharded"},
    "in parts": {"micro_size": 2},
    "a replica": {"wrap": True},
}


class Heads(nn.Module):
    """Takes a sample's last number for the head that it belongs to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(4, 8), nn.ModuleList([nn.Linear(8, 3) for _ in range(2)])
        self.never = nn.Linear(8, 2)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        features, which = self.body(inputs[:, :4]).tanh(), inputs[:, 4]
        outputs = features.new_zeros(len(inputs), 3)
        for number, head in enumerate(self.heads):
            if (mine := which == number).any():
                outputs[mine] = head(features[mine])
        return outputs


def optimizer_of(module: nn.Module) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1)  # which moves what has a gradient of zero


def trained(module: nn.Module, model: nn.Module, **how: Any) -> Tensor:
    how = {"epochs": 1, "global_batch": 8, "folder": None, "order": ddp.data.Fixed(48), **how}
    optimizer = optimizer_of(module)
    ddp.fit(model, (INPUTS, CLASSES), optimizer, **grouped(loss=F.cross_entropy, progress=False, curves=False, **how))
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def on_two_ranks() -> tuple[dict[str, Tensor], str]:
    ddp.init(abort_s=20)
    found = {}
    for name, given in ALLOWED.items():
        module, how = Heads(), dict(given)
        kind = how.pop("kind", ddp.Averaging)
        outer: dict[str, Any] = {key: how.pop(key) for key in ("same_bits", "micro_size") if key in how}
        if how.pop("wrap", False):
            model: nn.Module = ddp.BucketedDataParallel(module, find_unused_parameters=True)
        else:
            model, outer["strategy"] = module, kind(find_unused_parameters=True, **how)
        found[name] = trained(module, model, **outer)
    with pytest.raises(ConfigError, match="find_unused_parameters=True with a model in a BucketedDataParallel: give"):
        trained(module, model, strategy=ddp.Averaging(find_unused_parameters=True))
    with pytest.raises(UnusedParameters) as error:
        trained(module := Heads(), module)
    ddp.shutdown()
    return found, str(error.value)


@pytest.mark.slow
def test_a_head_that_is_not_used_is_trained_as_by_one_process() -> None:
    module = Heads()
    optimizer = optimizer_of(module)
    for inputs, classes in zip(INPUTS.split(8), CLASSES.split(8), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(module(inputs), classes).backward()
        optimizer.step()
    expected = nn.utils.parameters_to_vector(module.parameters()).detach()
    found, told = run_ranks(on_two_ranks, 2)[0]
    for parameters in found.values():
        torch.testing.assert_close(parameters, expected, rtol=1e-12, atol=1e-13)
    assert "rank 0: heads.1.weight (4), heads.1.bias (5), never.weight (6)" in told and "rank 1: heads.0.weight" in told
    for word in ("strategy=ddp.Averaging(find", "replica.find_unused_parameters=true", "ddp.DistributedDataParallel"):
        assert word in told


def test_the_setting_reaches_the_replica_of_the_command_line_and_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_plain({"replica": {"find_unused_parameters": True}})
    replica = make_replica(config, Heads(), ddp.init(device="cpu"))
    for _ in range(2):
        replica(INPUTS[:4]).sum().backward()
    replica.prepare()
    with pytest.raises(ConfigError, match=r"no argument 'find_unused_parameters': say strategy=ddp.Averaging\(find_un"):
        ddp.fit(Heads(), (INPUTS, CLASSES), None, find_unused_parameters=True)
    monkeypatch.setattr(choice, "current_role", lambda: SimpleNamespace(job="worker"))
    assert choice.of_this_process(ddp.ParameterServer(find_unused_parameters=True)).find_unused_parameters
