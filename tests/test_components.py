"""Every model of the settings takes the samples of the data that it may stand beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from ddp.components import load_data, make_model, make_model_without_memory, make_optimizer, make_task
from ddp.config import CHOICES
from ddp.config_reader import from_plain
from ddp.errors import ConfigError
from ddp.optim.lamb import PRESETS
from ddp.optim.lars import LARC_PRESETS, LARS_PRESETS


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


def optimizer_of(**plain: Any) -> torch.optim.Optimizer:
    config = from_plain(plain)
    return make_optimizer(config, make_model_without_memory(config, load_data(config)))


@pytest.mark.parametrize("optim", CHOICES["optim"])
def test_every_optimizer_is_made_without_memory_and_spares_biases_and_norms(optim: str) -> None:
    decaying, excluded = optimizer_of(optim={"name": optim}).param_groups
    assert decaying["weight_decay"] == CHOICES["optim"][optim].weight_decay
    assert excluded["weight_decay"] == 0.0
    assert {p.dim() for p in excluded["params"]} == {1}
    assert excluded.get("adapt", "never") == "never"


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        (name, preset)
        for name, presets in (("lamb", PRESETS), ("lars", LARS_PRESETS), ("larc", LARC_PRESETS))
        for preset in presets
    ],
)
def test_every_preset_has_its_word(name: str, preset: str) -> None:
    _, excluded = optimizer_of(optim={"name": name, "preset": preset, "args": {"eps": 0.25}}).param_groups
    assert excluded["eps"] == 0.25
    assert (excluded["adapt"] == "always") == (preset == "nvlamb")


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        ({"name": "lamb", "preset": "nv"}, "optim=lamb: preset='nv': LAMB has paper, tfa"),
        (
            {"name": "lars", "args": {"momentun": 0.5}},
            r"optim=lars: LARS\(\) has no argument 'momentun'. Did you mean 'mom",
        ),
        ({"name": "larc", "args": {"lr": 0.5}}, "optim.args.lr=0.5: is a setting of its own; set optim.lr"),
        ({"name": "sgd", "exclude": ["head"]}, "optim.exclude: no trained parameter is called 'head'"),
        (
            {"name": "lamb", "preset": "apex"},
            "clip_norm=2: optim.preset=apex clips by itself, at 1; leave clip_norm out",
        ),
    ],
)
def test_optimizers_that_cannot_be_made(plain: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        optimizer_of(optim=plain, clip_norm=2.0)
