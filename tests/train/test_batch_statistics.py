"""Layers that normalise by the batch are refused where a rank would wait for ever, before the first step."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import ddp
from ddp.data.loading.loader import EvaluationLoader
from ddp.errors import ConfigError
from ddp.train.batch_checks import check_waiting, try_one_sample
from ddp.train.evaluate import check_evaluation


def model(**options: Any) -> nn.Module:
    return ddp.SyncBatchNorm.convert(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, **options)))


@pytest.mark.parametrize(
    ("num_samples", "num_shards", "batch_size", "is_refused"),
    [
        *((5, None, 2, True), (1, None, 2, True), (8, None, 4, False)),
        *((5, 4, 2, False), (8, 3, 4, True), (8, 1, 4, True), (12, 4, 2, False), (6, 3, 1, True)),
    ],
)
def test_an_evaluation_by_the_batch_needs_as_many_forwards_on_every_rank(
    num_samples, num_shards, batch_size, is_refused
):
    cut = {"batch_size": batch_size, "num_shards": num_shards}
    loaders = [EvaluationLoader(range(num_samples), rank=rank, world_size=2, **cut) for rank in range(2)]
    assert is_refused == (len(loaders[0]) != len(loaders[1]))
    check_evaluation(model(), num_samples, world_size=2, **cut)  # by running statistics
    check_evaluation(model(track_running_stats=False), num_samples, world_size=1, **cut)
    told = f"of {num_samples} samples, {batch_size} at once, 2 workers .* another num_shards than {num_shards or 2}"
    with pytest.raises(ConfigError, match=told) if is_refused else nullcontext():
        check_evaluation(model(track_running_stats=False), num_samples, world_size=2, **cut)


def test_samples_that_cannot_be_read_do_not_go_with_layers_that_wait():
    state = SimpleNamespace(comm=SimpleNamespace(world_size=2), model=model(), sampler=None)
    with pytest.raises(ConfigError, match="max_unreadable=3 with SyncBatchNorm, which waits in each forward"):
        check_waiting(cast(Any, state), "join", 3)


def test_one_sample_is_tried_where_a_step_may_have_it():
    flat, image = nn.BatchNorm1d(3), nn.BatchNorm2d(3)
    try_one_sample(flat, torch.zeros(1, 3), [])
    try_one_sample(image, (torch.zeros(1, 3, 4, 4), torch.zeros(1)), [33])  # an image has many values per channel
    with pytest.raises(ConfigError, match="in a step of size 33 or 35 a worker has a share of one sample"):
        try_one_sample(flat, (torch.zeros(1, 3), torch.zeros(1)), [33, 35])
    try_one_sample(flat.eval(), (torch.zeros(1, 3), torch.zeros(1)), [33, 35])  # frozen, also while others are trained
