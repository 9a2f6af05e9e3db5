"""Runs that older versions have written: settings, starts and identities are those of today, without a complaint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn import functional as F

import ddp
from ddp.data.samples import Splits
from ddp.errors import ConfigError
from ddp.gradients.reducer import AllReduce, Collective, ReduceScatter
from ddp.run.assembly.stages import bits_depend_on
from ddp.run.launch.command_line import composed
from ddp.run.settings.config import CHOICES, Config, choose
from ddp.run.settings.reader import _owners, from_plain
from ddp.train.arguments import FitArguments, inputs_of, sampler_for, settings_of
from ddp.train.checkpoints.checkpoint import changes
from ddp.train.checkpoints.moved import KEYS, meant_for_fit, translated
from ddp.train.steps.state import StepReport, TrainState

OLD: dict[str, Any] = json.loads(Path(__file__).with_name("old_run.json").read_text())
OF_THE_HOST = ("world_size", "device", "all_reduce", "buckets", "torch", "cpu", "machine", "threads_per_worker")


def test_settings_of_an_older_run_are_read_and_are_those_of_today() -> None:
    config = from_plain(OLD["config"])
    assert asdict(config) == asdict(from_plain(OLD["start"]))
    assert (config.strategy.name, config.replica.wire, config.evaluate.batch) == ("auto", None, 256)
    assert from_plain(asdict(config)) == config
    changed: dict[str, Any] = json.loads(json.dumps(OLD["config"]))
    changed["optim"]["sharded"], changed["replica"]["wire"], changed["log_every"] = True, "bf16", 7
    for word, now in (("replicated", "auto"), ("sharded", "sharded")):  # as after `optim.sharded` had gone
        later: dict[str, Any] = json.loads(json.dumps(OLD["config"])) | {"strategy": word}
        del later["optim"]["sharded"]
        assert from_plain(later).strategy == choose("strategy", now)
    changed["data"]["debug"], changed["data"]["max_unreadable"], changed["loader"]["evaluation_batch"] = True, 3, 9
    config = from_plain(changed)
    assert (config.strategy.name, config.replica.wire, config.report.log_every) == ("sharded", "bf16", 7)
    assert (config.loader.debug, config.loader.max_unreadable, config.evaluate.batch) == (True, 3, 9)


@pytest.mark.parametrize("then", [OLD["config"], {**OLD["config"], "strategy": "sharded"}])
def test_an_older_run_goes_on_with_another_strategy(then: dict[str, Any], tmp_path: Path) -> None:
    then = json.loads(json.dumps(then))
    if "strategy" in then:
        del then["optim"]["sharded"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(then, sort_keys=False))
    given = [f"hydra.run.dir={tmp_path}", "resume=auto", "evaluate.batch=9"]
    config, _ = composed(given)
    assert (config.strategy.name, config.evaluate.batch) == (then.get("strategy", "auto"), 9)
    config, _ = composed([*given, "strategy=central_storage", "strategy.region=mine"])
    assert config.strategy == choose("strategy", "central_storage", region="mine")
    config, _ = composed([*given, "strategy.region=null", "strategy=central_storage"])
    assert config.strategy == choose("strategy", "central_storage")


def test_a_run_that_goes_on_with_equal_settings_is_told_of_no_change() -> None:
    config, then = from_plain(OLD["config"]), OLD["identity"]
    now = bits_depend_on(config, Splits(train=(), test=(), sample_shape=(1, 8, 8), num_classes=10))
    same = {key: then[key] for key in (*OF_THE_HOST, "training_samples")}
    assert changes(translated(then), {**now, **same}) == []
    for word, told in (("multi_worker", []), ("sharded", ["strategy.name was auto, is sharded"])):
        config.strategy = choose("strategy", word)
        now = bits_depend_on(config, Splits(train=(), test=(), sample_shape=(1, 8, 8), num_classes=10))
        moved = {**then, "strategy": "replicated", "optim": now["optim"]}  # as after `optim.sharded` had gone
        for earlier in (then, moved):
            assert changes(translated(earlier), {**now, **same}) == told


def test_a_run_from_python_that_goes_on_is_told_of_no_change() -> None:
    then = OLD["identity_from_python"]
    data = torch.zeros(40, 6), torch.zeros(40, dtype=torch.long)
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    given = FitArguments(
        model=model,
        data=data,
        optimizer=optimizer,
        loss=F.cross_entropy,
        global_batch=10,
        max_steps=6,
        test_data=data,
        evaluation=ddp.Evaluation(every_steps=3, every_epochs=None),
        batches=ddp.Batches(micro_size=5, seed=3),
        schedule=ddp.optim.TorchSchedule(rates, every="epoch"),
        strategy=ddp.Averaging(wire="bf16"),
        folder=None,
    )
    comm = ddp.init()
    inputs = inputs_of(given, comm)
    now = settings_of(given, inputs, sampler_for(given, inputs, comm)[0])
    ddp.shutdown()
    same = {key: then[key] for key in (*OF_THE_HOST, "training_samples")}
    assert changes(translated(then), json.loads(json.dumps({**now, **same}))) == []


def test_keys_that_have_moved_are_there_and_are_named() -> None:
    homes = _owners({})
    for old, new in KEYS.items():
        assert new in homes or new in CHOICES or new.partition(".")[0] in ("evaluation", "scheduler")  # of an identity
        assert old not in homes
    with pytest.raises(ConfigError, match=r"unknown key optim.sharded. Did you mean strategy=sharded\?"):
        raise unknown("optim.sharded")


def test_a_key_that_has_gone_is_dropped_in_files_and_told_elsewhere() -> None:
    assert translated({"loader": {"cache": True, "num_workers": 2}}) == {"loader": {"num_workers": 2}}
    said = "amples are not kept in memory any more, but the system keeps files that were read"
    with pytest.raises(ConfigError, match=rf"^unknown key loader.cache. S{said}. Valid in loader: "):
        raise unknown("loader.cache")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=rf"^fit\(\) has no argument 'cache'. S{said}.$"):
        ddp.fit(model, (), torch.optim.SGD(model.parameters()), cache=True)  # type: ignore[arg-type]


def unknown(key: str) -> ConfigError:
    from ddp.run.settings.reader import unknown_key

    return unknown_key(key, asdict(Config())["optim"])


# fmt: off
ARGUMENTS = [
    "reduction", "evaluate_every_epochs", "evaluate_every_steps", "evaluation_batch", "collate", "loader_workers",
    "order", "sharding", "skip_steps", "debug_data", "uneven", "max_unreadable", "schedule_every",
    "sharded", "wire", "hook", "num_shards", "micro_size", "seed", "checkpoint_dir", "checkpoint_every_steps",
    "keep_last", "keep_best", "resume", "log_every", "noise_scale_every", "progress", "curves", "trial", "comm",
    "stop", "settings",
]
# fmt: on


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_fit_had_once_is_told_where_it_has_gone(name: str) -> None:
    model = torch.nn.Linear(2, 2)
    now = meant_for_fit(name)
    with pytest.raises(ConfigError) as error:
        ddp.fit(model, (), torch.optim.SGD(model.parameters()), **{name: 1})  # type: ignore[arg-type]
    hint = f". Did you mean {now!r}?" if now.isidentifier() else f": {now}"
    assert now and str(error.value) == f"fit() has no argument {name!r}{hint}"


class Stated(ddp.Callback):
    """Stops after two steps, and goes on with equal words alone."""

    def __init__(self, words: str) -> None:
        self.words = words

    def step_end(self, state: TrainState, report: StepReport) -> None:
        if state.step == 1:
            state.stop("enough")

    def state_dict(self) -> dict[str, Any]:
        return {"words": self.words}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["words"] != self.words:
            raise ConfigError(f"the words were {state['words']}")


def test_what_stands_for_an_argument_of_once_does_what_that_did(tmp_path: Path) -> None:
    comm, data = ddp.init(), (torch.zeros(12, 6), torch.zeros(12, dtype=torch.long))

    def fitted(reducer: type[Collective], words: str) -> TrainState:
        model = torch.nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        how: dict[str, Any] = {"loss": F.cross_entropy, "global_batch": 4, "strategy": "sharded", "epochs": 2}
        replica = ddp.BucketedDataParallel(model, comm=comm, reducer=reducer)
        folder = ddp.Folder(tmp_path / "run", resume="auto", curves=False, progress=False)
        return ddp.fit(replica, data, optimizer, **how, folder=folder, callbacks=[Stated(words)])

    state = fitted(ReduceScatter, "these")
    assert (state.step, state.stopped_by) == (2, "enough")
    with pytest.raises(ConfigError, match="the words were these"):
        fitted(ReduceScatter, "others")
    assert fitted(ReduceScatter, "these").step == 6
    with pytest.raises(ConfigError, match=r"ddp.strategies.Sharded.replica_of\(module, comm=…\)"):
        fitted(AllReduce, "these")
    ddp.shutdown()
