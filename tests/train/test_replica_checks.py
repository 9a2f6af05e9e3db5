"""What `ddp.fit` refuses in a replica, before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ddp
from ddp.errors import ConfigError, ReplicaMismatch


class Squares(ddp.Task):
    """Loss: the sum of squares."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        outputs = model(batch[0])
        return outputs.square().sum(), len(outputs)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def fit(replica: nn.Module, num_samples: int, **how: Any) -> None:
    data = TensorDataset(torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    quiet: Any = {"folder": None, "progress": False}
    ddp.fit(replica, data, optimizer, **grouped(loss=Squares(), global_batch=4, epochs=1, **quiet, **how))


def refusals() -> None:
    comm = ddp.init(abort_s=20)
    inside = ddp.DistributedDataParallel(net())
    inside.step_in_backward(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(ConfigError, match=r"ddp\.fit .* does not go with step_in_backward"):
        fit(inside, 8)
    with pytest.raises(ConfigError, match="SyncBatchNorm waits in each forward"):
        fit(ddp.DistributedDataParallel(ddp.SyncBatchNorm.convert(net())), 9)  # the last batch has one sample
    with pytest.raises(ConfigError, match="leave num_shards=3 out, or take a multiple of 2"):
        fit(ddp.DistributedDataParallel(ddp.SyncBatchNorm.convert(net())), 8, num_shards=3)
    fit(ddp.DistributedDataParallel(ddp.SyncBatchNorm.convert(net())), 8)
    with pytest.raises(ConfigError, match=r"bucket_cap_mb=5 with a model in a Dist.*: give bucket_cap_mb to"):
        fit(ddp.DistributedDataParallel(net()), 8, strategy=ddp.Averaging(bucket_cap_mb=5))
    for wrap in (ddp.DistributedDataParallel, ddp.NaiveDataParallel):
        for how in ({}, {"verify_every": 2}):
            drifting = wrap(net())
            if not how:
                drifting.verify_replicas(every=2)
            if comm.rank == 1:
                torch.nn.init.ones_(drifting.module[0].bias)
            with pytest.raises(ReplicaMismatch, match=r"0\.bias is not the same on all ranks"):
                fit(drifting, 16, **how)
    ddp.shutdown()


def test_refusals() -> None:
    run_ranks(refusals, 2)
