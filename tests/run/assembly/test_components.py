"""Every model of the settings takes the samples of the data that it may stand beside."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch.utils.data import default_collate

from ddp.comm.session import init, shutdown
from ddp.data.orders.steps import BatchWarmup, Steps
from ddp.data.samples import Splits
from ddp.errors import ConfigError
from ddp.optim.trust_ratio import LAMB_PRESETS, LARC_PRESETS, LARS_PRESETS
from ddp.replica.sync_batchnorm import SyncBatchNorm
from ddp.run.assembly.components import (
    batch_of,
    derived,
    load_data,
    make_model,
    make_model_without_memory,
    make_optimizer,
    make_replica,
    make_task,
    warmup_samples,
)
from ddp.run.assembly.sampling import sampler_for
from ddp.run.assembly.stages import bits_depend_on, check
from ddp.run.settings.checks import resolve
from ddp.run.settings.config import CHOICES, Config
from ddp.run.settings.reader import from_plain
from ddp.train.reports.profiler import Profiler
from ddp.train.steps.callbacks import EMA, EarlyStopping
from ddp.train.supervision import Guard, Watch


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


@pytest.mark.parametrize(
    ("group", "kind"),
    [("ema", EMA), ("early_stopping", EarlyStopping), ("watch", Watch), ("guard", Guard), ("profile", Profiler)],
)
def test_a_callback_is_made_of_the_settings_of_its_group(group: str, kind: Any) -> None:
    """With their bounds, too, except that a setting has one more value, which says that there is no such callback."""
    taken = get_type_hints(kind.__init__, include_extras=True)
    settings = get_type_hints(type(getattr(Config(), group)), include_extras=True)
    assert settings.keys() == taken.keys() - {"return"}
    for name, hint in settings.items():
        has_off = (group, name) in (("watch", "action"), ("profile", "steps"))
        assert has_off or taken[name] in (hint, get_args(hint)[0])


def optimizer_of(**plain: Any) -> torch.optim.Optimizer:
    config = from_plain(plain)
    return make_optimizer(config, make_model_without_memory(config, load_data(config)))


@pytest.mark.parametrize("optim", CHOICES["optim"])
def test_every_optimizer_is_made_without_memory_and_spares_biases_and_norms(optim: str) -> None:
    decaying, excluded = optimizer_of(optim={"name": optim}).param_groups
    assert decaying["weight_decay"] == {"adam": 0.0, "adamw": 0.01, "lamb": 0.01}.get(optim, 5e-4)
    assert excluded["weight_decay"] == 0.0
    assert {p.dim() for p in excluded["params"]} == {1}
    assert excluded.get("adapt", "never") == "never"


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        (name, preset)
        for name, presets in (("lamb", LAMB_PRESETS), ("lars", LARS_PRESETS), ("larc", LARC_PRESETS))
        for preset in presets
    ],
)
def test_every_preset_has_its_word(name: str, preset: str) -> None:
    presets: dict[str, Any] = {"lamb": LAMB_PRESETS, "lars": LARS_PRESETS, "larc": LARC_PRESETS}[name]
    plain = {"name": name, "preset": preset, "args": {"eps": 0.25}}
    decaying, excluded = optimizer_of(optim=plain).param_groups
    assert excluded["eps"] == 0.25
    assert (decaying["weight_decay"], excluded["weight_decay"]) == (presets[preset]["weight_decay"], 0.0)
    assert optimizer_of(optim={**plain, "weight_decay": 0.5}).param_groups[0]["weight_decay"] == 0.5
    assert (excluded["adapt"] == "always") == (preset == "nvlamb")


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        ({"name": "lamb", "preset": "nv"}, "optim=lamb: preset='nv': LAMB has paper, tfa"),
        (
            {"name": "lars", "args": {"momentun": 0.5}},
            r"optim=lars: LARS\(\) has no argument 'momentun'. Did you mean 'mom",
        ),
        ({"name": "larc", "args": {"lr": 0.5}}, "optim.args.lr=0.5: is a separate setting; set optim.lr"),
        ({"name": "sgd", "exclude": ["head"]}, "optim.exclude: no trained parameter is called 'head'"),
        (
            {"name": "lamb", "preset": "apex"},
            "clip_norm=2: the optimizer clips by itself, at 1; .* optim.args.clip_norm=null",
        ),
    ],
)
def test_optimizers_that_cannot_be_made(plain: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        optimizer_of(optim=plain, clip_norm=2.0)


def test_batchnorm_over_all_workers_is_a_word() -> None:
    plain: dict[str, Any] = {"replica": {"sync_batchnorm": True}, "data": {"name": "synthetic"}}
    config = from_plain({**plain, "model": {"name": "resnet18"}})
    splits = load_data(config)
    model = make_model(config, splits)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    replica = make_replica(config, model, init(device="cpu"))
    shutdown()
    layers = [layer for layer in replica.modules() if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)]
    assert layers and all(type(layer) is SyncBatchNorm for layer in layers)
    assert list(replica.module.state_dict()) == keys, "checkpoints do not change"
    assert all(one is other for one, other in zip(replica.parameters(), parameters, strict=True))
    assert bits_depend_on(config, splits)["sync_batchnorm"] and "sync_batchnorm" not in bits_depend_on(Config(), splits)
    with pytest.raises(ConfigError, match=r"^replica.sync_batchnorm=true: model=mlp has no BatchNorm; leave it out"):
        check(from_plain({**plain, "model": {"name": "mlp"}}))


def sizes_of(config: Config, length: int = 1000) -> Steps:
    return sampler_for(config, Splits(train=range(length), test=range(1)), rank=0).sizes


def rises_over(**plain: Any) -> float:
    config = from_plain({"max_steps": None, "epochs": 4, **plain})
    resolve(config)
    return warmup_samples(config, sizes_of(config))


@pytest.mark.parametrize(
    ("schedule", "samples"),
    [
        ({"name": "constant"}, 0),
        ({"name": "cosine"}, 200),
        ({"name": "wsd"}, 200),
        ({"name": "cosine", "warmup_fraction": 0.5}, 2000),
        ({"name": "polynomial", "warmup_samples": 77}, 77),
        ({"name": "step", "warmup_epochs": 0.5}, 500),
        ({"name": "cosine", "warmup_steps": 17}, 1064),  # 15 steps of 64 and one of 40 are an epoch
        ({"name": "cosine", "warmup_steps": 0}, 0),
    ],
)
def test_a_warm_up_becomes_samples(schedule: dict[str, Any], samples: int) -> None:
    assert rises_over(schedule=schedule) == samples


def test_legw_prolongs_the_warm_up_and_keeps_its_steps() -> None:
    legw: dict[str, Any] = {
        "optim": {"name": "adamw", "lr_scaling": "legw", "base_batch": 64},
        "batch": {"global_size": 256},
    }
    for given in ({"warmup_samples": 192}, {"warmup_epochs": 0.192}, {"warmup_fraction": 0.048}):
        schedule = {"name": "cosine", **given}
        assert rises_over(schedule=schedule) == pytest.approx(192)
        assert rises_over(schedule=schedule, **legw) == pytest.approx(768)
    in_steps = {"name": "cosine", "warmup_steps": 3}
    assert rises_over(schedule=in_steps) == 192 and rises_over(schedule=in_steps, **legw) == 768
    config = from_plain({**legw, "schedule": {"name": "cosine", "warmup_epochs": 0.192}, "epochs": 4})
    assert derived(config, sizes_of(config)) == [
        "learning rate 0.008: 0.004 × 2 for this batch",
        "the learning rate rises over 768 samples (3 steps)",
    ]


def test_a_warm_up_is_a_share_of_all_that_shards_read() -> None:
    for sharding, samples in (("sample", 200), ("off", 400), ("full_shuffle", 400)):
        data = {"name": "digits", "sharding": sharding}
        assert rises_over(schedule={"name": "cosine"}, data=data, cluster={"workers": 2}) == samples


def test_a_growing_batch_is_said_in_samples() -> None:
    config = from_plain({"batch": {"warmup_size": 8, "warmup_epochs": 0.25}})
    assert batch_of(config, train=range(1000)) == BatchWarmup(8, 64, 250)
