"""Every model of the settings takes the samples of the data that it may stand beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from ddp.components import load_data, make_model, make_task
from ddp.config import CHOICES
from ddp.config_reader import from_plain


@pytest.mark.parametrize("model", CHOICES["model"])
@pytest.mark.parametrize("data", ["digits", "synthetic"])
def test_every_model_reads_what_it_may_be_combined_with(model: str, data: str) -> None:
    plain: dict[str, Any] = {"model": {"name": model}, "data": {"name": "standard_library" if model == "gpt" else data}}
    config = from_plain(plain)
    splits = load_data(config)
    torch.manual_seed(0)
    loss_sum, count = make_task(config).loss(
        make_model(config, splits), default_collate([splits.train[0], splits.train[1]])
    )
    assert torch.isfinite(loss_sum) and count >= 2
