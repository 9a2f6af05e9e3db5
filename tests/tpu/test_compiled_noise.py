"""Dropout in compiled steps: its mask is that of a step, a shard and a micro-batch, also in a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from computed import fitted
from jaxed import jaxed, needs_jax
from torch import Tensor, nn
from torch.nn import functional as F

import ddp

pytestmark = needs_jax

DEVICES, SHARE, PARTS, STEPS, WIDTH = 2, 4, 2, 2, 32
NUM_SAMPLES = DEVICES * SHARE * STEPS


class Rows(nn.Module):
    """Drops elements of a row of each sample's own, so that its gradient is the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(NUM_SAMPLES, WIDTH))

    def forward(self, numbers: Tensor) -> Tensor:
        return F.dropout(self.rows[numbers], 0.5, self.training)


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.sum(1).mean()


class Masks(ddp.Callback):
    """Keeps the mask of each sample."""

    def __init__(self) -> None:
        self.before = torch.ones(NUM_SAMPLES, WIDTH)
        self.found: dict[tuple[int, int, int], Tensor] = {}  # by step, shard and micro-batch, in the order of samples

    def step_end(self, state: ddp.TrainState, report: Any) -> None:
        rows = state.model.module.rows.detach().clone()
        masks, self.before = (self.before - rows) != 0, rows
        for micro in report.micros:
            self.found[state.step, micro.shard, micro.part] = masks[list(micro.indices)]


def trained(folder: str | None, num_steps: int) -> tuple[dict[tuple[int, int, int], Tensor], Tensor]:
    """Returns the masks, and the parameters at the end."""
    module, masks = Rows(), Masks()
    data = torch.arange(NUM_SAMPLES), torch.zeros(NUM_SAMPLES)
    how: dict[str, Any] = {"folder": None} if folder is None else {"folder": Path(folder), "resume": "auto"}
    how |= {"curves": False, "loss": total, "global_batch": DEVICES * SHARE, "micro_size": SHARE // PARTS}
    how |= {"max_steps": num_steps, "devices": DEVICES, "callbacks": [masks]}
    fitted(module, data, torch.optim.SGD(module.parameters(), lr=1.0), **how)
    return masks.found, module.rows.detach()


def test_no_two_micro_batches_have_one_mask_and_a_resumed_run_has_the_same(tmp_path: Path) -> None:
    masks, whole = jaxed(trained, None, 2 * STEPS)
    assert len(masks) == 2 * STEPS * DEVICES * PARTS
    kinds = {mask.numpy().tobytes() for mask in masks.values()}
    assert len(kinds) == len(masks)
    kept = torch.cat(list(masks.values())).float().mean().item()
    assert kept == pytest.approx(0.5, abs=0.08)
    first, _ = jaxed(trained, str(tmp_path / "run"), 1)
    rest, resumed = jaxed(trained, str(tmp_path / "run"), 2 * STEPS)
    assert first.keys() | rest.keys() == masks.keys() and not first.keys() & rest.keys()
    assert torch.equal(resumed, whole)
