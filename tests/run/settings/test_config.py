"""The configuration: what round-trips, what is refused and in which words, and Hydra against the dataclasses.

Tests: ddp/policies.py, ddp/run/settings/checks.py, ddp/run/settings/reader.py.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

import ddp
from ddp.errors import ConfigError
from ddp.policies import SameBits, Serving
from ddp.process.memory import available_cores
from ddp.run.launch.command_line import CONF, composed, translated
from ddp.run.settings.checks import resolve, validate
from ddp.run.settings.config import CHOICES, Config, choose
from ddp.run.settings.reader import from_plain, read_settings

EVERY_CHOICE = [(group, name) for group, choices in CHOICES.items() for name in choices]
BESIDE = {"gpt": ["data=standard_library"], "standard_library": ["model=gpt"]}
FILES = {"path": "x", "test_path": "y"}
COLUMNS = {**FILES, "inputs": ["a"], "target": "b", "num_classes": 2}
GIVEN = {"image_folder": {"path": "x"}, "tar": FILES, "tokens": FILES, "csv": COLUMNS, "jsonl": COLUMNS}
GIVEN |= {"parquet": COLUMNS, "arrow": COLUMNS}
BESIDE |= {name: [f"data.{key}={value}" for key, value in given.items()] for name, given in GIVEN.items()}
BESIDE["tokens"].append("model=gpt")


def compose(tmp_path: Path, *overrides: str) -> Config:
    return composed([f"hydra.run.dir={tmp_path}", *overrides])[0]


@pytest.mark.parametrize(("group", "name"), EVERY_CHOICE)
@pytest.mark.quick(5)
def test_every_choice_composes_to_its_dataclass(group: str, name: str, tmp_path: Path) -> None:
    config = compose(tmp_path, f"{group}={name}", *BESIDE.get(name, []))
    chosen = getattr(config, group)
    expected = choose(group, name, **GIVEN.get(name, {}))
    assert type(chosen) is type(expected)
    assert chosen == expected


@pytest.mark.parametrize("name", [path.stem for path in (CONF / "recipe").glob("*.yaml")])
def test_every_recipe_composes_and_the_command_line_wins_over_it(name: str, tmp_path: Path) -> None:
    config = compose(tmp_path, f"recipe={name}", "optim.lr=0.125", "seed=3")
    assert (config.optim.lr, config.seed) == (0.125, 3)
    assert config != compose(tmp_path, "optim.lr=0.125", "seed=3")


def test_hydra_starts_from_the_defaults_of_the_dataclasses(tmp_path: Path) -> None:
    config = compose(tmp_path, "run.name=x")
    config.run = Config().run  # named by the clock or by the user
    assert config == Config()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lr=0.1", "unknown key lr. Did you mean optim.lr? Valid: "),
        ("+lr=0.1", "unknown key lr. Did you mean optim.lr? Valid: "),
        ("workers=4", "Did you mean cluster.workers?"),
        ("name=mine", "Did you mean run.name or sweep.name?"),
        ("width=8", "Did you mean model.width?"),
        ("every_steps=9", "Did you mean checkpoint.every_steps or evaluate.every_steps?"),
        ("optim.warmup_steps=9", "Did you mean schedule.warmup_steps? Valid in optim: base_batch, "),
        ("heads=3", "Did you mean model.heads (of model=gpt)?"),
        ("momentum=0", "Did you mean optim.momentum (of optim=sgd) or hook.momentum (of hook=top_k)?"),
        ("model.heads=3", "unknown key model.heads: it belongs to model=gpt. Valid in model: dropout, name, width"),
        ("+model.meaning=3", "unknown key model.meaning. Valid in model: dropout, name, width"),
        ("+model.heads=3", "unknown key model.heads: it belongs to model=gpt. Valid in model: dropout, name, width"),
        ("optim.beta3=1", "Did you mean optim.beta2?"),
        ("num_worker=1", "Did you mean loader.num_workers?"),
        ("+log_every=5", "unknown key log_every. Did you mean report.log_every?"),
        ("sharded=true", "unknown key sharded. Did you mean strategy=sharded?"),
        ("+optim.sharded=true", "unknown key optim.sharded. Did you mean strategy=sharded?"),
        ("strategy=replicated", "unknown choice strategy=replicated. Did you mean strategy=auto? Valid: auto, central"),
        ("strategy=MirroredStrategy", "unknown choice strategy=MirroredStrategy. Did you mean strategy=mirrored?"),
        ("strategy=tf.distribute.MirroredStrategy", "MirroredStrategy. Did you mean strategy=mirrored? Valid: auto, c"),
        ("strategy=mine.parts:Plan", "unknown choice strategy=mine.parts:Plan. Valid: auto, central_storage, "),
        ("strategy=ddp_spawn", "unknown choice strategy=ddp_spawn. Did you mean strategy=auto?"),
        ("strategy=miror", "unknown choice strategy=miror. Did you mean strategy=mirrored?"),
        ("strategy=horovod", "Did you mean strategy=mirrored?"),
        ("strategy=pipeline", "strategy=pipeline. Pipelines are for a loop of your own, by ddp.Pipeline; s"),
        ("model.parallel=2", "model.parallel. Pipelines are for a loop of your own, by ddp.Pipeline; slices"),
        ("hook=quantize", "hook=quantize. Gradients of 8 bits are a format on the wire: ddp.Averaging(wire='int8')"),
        ("hydra/sweeper=optuna", "unknown choice hydra/sweeper=optuna. Searches are a command: ddp search. Valid: "),
        ("strategy.name=sharded", "a name is not set by itself; choose strategy=sharded"),
    ],
)
@pytest.mark.quick(4)
def test_an_unknown_key_is_looked_for_everywhere(override: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(Exception) as error:
        compose(tmp_path, override)
    assert words in str(translated(error.value))


def test_a_recipe_of_ones_own_has_addresses_and_no_key_that_has_moved(tmp_path: Path) -> None:
    recipes = tmp_path / "recipe"
    recipes.mkdir()
    head = "# @package _global_\ndefaults: [override /model: 'mine:Net', override /data: 'my.own:make']\n"
    (recipes / "own.yaml").write_text(head + "model: {args: {width: 3}}\nreport: {log_every: 5}\n")
    (recipes / "old.yaml").write_text(head + "log_every: 5\noptim: {sharded: true}\n")
    search = f"hydra.searchpath=[address://,file://{tmp_path}]"  # as --config-dir has it
    config = compose(tmp_path, search, "recipe=own")
    assert config.model == choose("model", "mine:Net", args={"width": 3}) and config.report.log_every == 5
    assert config.data == choose("data", "my.own:make")
    with pytest.raises(ConfigError, match=r"unknown key (log_every|optim.sharded). Did you mean (report.log|strategy)"):
        compose(tmp_path, search, "recipe=old")


@pytest.mark.parametrize(("group", "name"), EVERY_CHOICE)
@pytest.mark.quick(4)
def test_plain_form_round_trips_through_yaml(group: str, name: str) -> None:
    plain: dict[str, Any] = {group: {"name": name, **GIVEN.get(name, {})}}
    for override in BESIDE.get(name, []):
        key, value = override.split("=")
        plain |= {key: {"name": value}} if "." not in key else {}
    if name == "one_device":
        plain["cluster"] = {"workers": 1}
    config = from_plain(plain | {"init_from": {"rename": {"fc": "head"}, "skip": ["a"]}, "clip_norm": 1})
    resolve(config)
    assert from_plain(yaml.safe_load(yaml.safe_dump(asdict(config)))) == config


def test_a_batch_can_grow_with_the_workers(tmp_path: Path) -> None:
    per_worker = "batch.global_size=${per_worker:%s}"
    assert compose(tmp_path, "cluster.workers=3", per_worker % 32).batch.global_size == 96
    for odd in ("", "a", "1.5", "1,2"):
        with pytest.raises(ConfigError, match=rf"batch.global_size={odd}: expected a whole number"):
            compose(tmp_path, per_worker % odd)


BAD = {
    "cluster.workers": [0, -1, 10_000],
    "cluster.threads_per_worker": [0],
    "cluster.servers": [-1, 1],
    "cluster.restarts": [-1],
    "cluster.devices": [[], [-1], [0, 1, 0]],
    "checkpoint.memory_steps": [-1],
    "batch.global_size": [0, 1],
    "batch.num_shards": [1, 65],
    "batch.micro_size": [0],
    "epochs": [0, None],
    "max_steps": [0],
    "clip_norm": [0.0, -1.0],
    "optim.lr": [0.0, float("nan")],
    "optim.momentum": [1.0, -0.1],
    "optim.weight_decay": [-0.1, 1e300],
    "comm.abort_s": [1e30],
    "model.dropout": [1.0, -0.5],
    "model.width": [0],
    "schedule.warmup_fraction": [1.0],
    "schedule.warmup_steps": [-1],
    "schedule.warmup_samples": [-1],
    "schedule.warmup_epochs": [-0.5, float("inf"), float("nan")],
    "batch.warmup_size": [0, 1, 64, 8],  # 1 is less than the shards, 64 does not grow, and 8 does not say how long
    "batch.warmup_samples": [0, 9],
    "batch.warmup_epochs": [0.0, 0.5, float("inf")],
    "comm.warn_s": [0.0, 601],
    "comm.segment_bytes": [1],
    "checkpoint.keep_last": [0],
    "report.log_every": [0],
    "profile.seconds": [0.0, 5.5],  # of no steps
    "loader.num_workers": [-1],
    "resume": [""],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_impossible_value_names_key_and_value(key: str, value: object) -> None:
    plain: dict[str, Any] = {"optim": {"name": "sgd"}, "model": {"name": "cnn"}, "schedule": {"name": "cosine"}}
    above, _, last = key.rpartition(".")
    holder = plain.setdefault(above, {}) if above else plain
    holder[last] = value
    with pytest.raises(ConfigError) as error:
        from_plain(plain)
    shown = "null" if value is None else "''" if value == "" else str(value).replace(" ", "")
    assert str(error.value).startswith(f"{key}={shown}: ")


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ({"model": {"name": "gpt"}}, "model=gpt: does not read the images of data=digits"),
        ({"data": {"name": "standard_library"}}, "model=cnn: does not read the text of data=standard_library"),
        ({"data": {"name": "image_folder"}}, "data.path=null"),
        ({"backend": "nccl", "device": "cpu"}, "backend=nccl"),
        (
            {"cluster": {"devices": [0]}, "device": "cpu"},
            "cluster.devices=[0]: names GPUs, but device=cpu uses none; leave one of them out",
        ),
        ({"cluster": {"devices": ["a"]}}, "cluster.devices[0]=a: expected a whole number"),
        ({"optim": {"name": "sgd", "momentum": 0.0}}, "optim.nesterov=true"),
        ({"schedule": {"name": "step", "milestones": [0.7, 0.2]}}, "schedule.milestones"),
        ({"schedule": {"name": "step", "milestones": 0.5}}, "schedule.milestones=0.5: expected a list, as [a number"),
        ({"resume": "x", "init_from": {"path": "y"}}, "init_from.path=y"),
        ({"schedule": {"name": "wsd", "decay_fraction": 2.0}}, "schedule.decay_fraction=2"),
        (
            {"schedule": {"name": "cosine", "warmup_steps": 9, "warmup_epochs": 0.5}},
            "schedule.warmup_steps=9: contradicts schedule.warmup_epochs=0.5; leave one",
        ),
        (
            {"batch": {"warmup_size": 8, "warmup_samples": 9, "warmup_epochs": 1.0}},
            "batch.warmup_samples=9: contradicts batch.warmup_epochs=1; leave one",
        ),
        (
            {
                "batch": {"global_size": 2048},
                "optim": {"name": "sgd", "lr_scaling": "legw"},
                "schedule": {"name": "cosine", "warmup_fraction": 0.05},
            },
            "optim.lr_scaling=legw: the warm-up of schedule.warmup_fraction=0.05 becomes 32 times longer, more",
        ),
        (
            {"replica": {"kind": "naive", "wire": "int8"}},
            "replica.wire=int8: needs replica.kind=bucketed, whose buckets travel in it; leave one out",
        ),
        (
            {"hook": {"name": "sign", "error_feedback": False}},
            "hook.error_feedback=false: sign compression diverges without error feedback; leave it out",
        ),
        (
            {"hook": {"name": "powersgd"}, "replica": {"kind": "naive"}},
            "hook=powersgd: needs replica.kind=bucketed, whose buckets it gets; leave one out",
        ),
        (
            {"hook": {"name": "top_k"}, "replica": {"wire": "bf16"}},
            "hook=top_k: does the sending by itself; leave replica.wire=bf16 out",
        ),
        ({"trial": True, "resume": "auto"}, "trial with resume=auto: a trial starts from scratch, so leave one out"),
        ({"early_stopping": {"min_delta": 0.1}}, "early_stopping.min_delta=0.1: does nothing without"),
        (
            {"early_stopping": {"patience": 2}, "evaluate": {"every_epochs": None}},
            "early_stopping.patience=2: goes by evaluations, of which there is one, at the end; set",
        ),
        ({"ema": {"decay": 1.0}}, "ema.decay=1.0: must be a number from 0 up and below 1"),
        ({"hook": {"name": "top_k", "ratio": 1.5}}, "hook.ratio=1.5: must be a number above 0 and at most 1"),
        ({"hook": {"name": "random_k", "ratio": 0.0}}, "hook.ratio=0.0: must be a number above 0 and at most 1"),
        ({"hook": {"name": "powersgd", "rank": 0}}, "hook.rank=0: must be a whole number from 1 up"),
        ({"hook": {"name": "top_k", "momentum": 1.0}}, "hook.momentum=1.0: must be a number from 0 up and below 1"),
        ({"hook": {"name": "sign", "dense_start_steps": -1}}, "dense_start_steps=-1: must be a whole number from 0 up"),
        (
            {"hook": {"name": "top_k", "momentum": 0.9, "error_feedback": False}},
            "hook.momentum=0.9: needs hook.error_feedback=true",
        ),
        (
            {"hook": {"name": "top_k", "momentum": 0.9}, "optim": {"name": "sgd"}},
            "hook.momentum=0.9: contradicts optim.momentum=0.9, both would act; set optim.momentum=0 "
            "optim.nesterov=false",
        ),
        (
            {"hook": {"name": "top_k", "momentum": 0.9}, "optim": {"name": "lamb"}},
            "hook.momentum=0.9: optim=lamb has momentum, too; take optim=sgd optim.momentum=0",
        ),
        ({"cluster": {"worker": 3}}, "unknown key cluster.worker. Did you mean cluster.workers?"),
        ({"bach": 3}, "unknown key bach. Did you mean batch?"),
        ({"model": {"name": "gtp"}}, "unknown choice model=gtp. Did you mean model=gpt?"),
        ({"seed": "a"}, "seed=a: expected a whole number"),
        ({"seed": True}, "seed=true: expected a whole number"),
        ({"deterministic": 1}, "deterministic=1: expected true or false"),
        ({"device": "gpu"}, "device=gpu: expected one of auto, cpu, cuda. Did you mean cuda?"),
        ({"device": "tpu"}, "device=tpu: expected one of auto, cpu, cuda. TPUs are a strategy: strategy=tpu cl"),
        ({"precision": "fp64"}, "fp16. It is not supported: train in float64 from Python, by ddp.fit(model.d"),
        ({"precision": "mixed_float16"}, "Did you mean fp16?"),
        ({"comm": {"algorithm": "HierarchicalCopyAllReduce"}}, "Did you mean hierarchical? Choose one of"),
        ({"comm": {"algorithm": "ReductionToOneDevice"}}, "Did you mean master_worker? Choose one of"),
        ({"cluster": 3}, "cluster=3: is a group of settings; set one of them, as cluster.workers=…: cluster.wor"),
        ({"same_bits": True}, "same_bits=true: is a group of settings; set one of them, as same_bits.on=…"),
        ({"init_from": {"skip": "head"}}, "init_from.skip=head: expected a list"),
        ({"run": {"name": 5e2}}, "run.name=500.0: expected a text; a file has it in quotes, or else 5e2 is 500.0"),
        ({"run": {"name": 0o10}}, "run.name=8: expected a text; a file has it in quotes"),
        ({"sweep": {"name": True}}, "sweep.name=true: expected a text or null; a file has it in quotes"),
        ({"init_from": {"skip": [7]}}, "init_from.skip[0]=7: expected a text; a file has it in quotes"),
        ({"optim": {"name": "sgd", "lr": "1e-3"}}, "optim.lr=1e-3: expected a number, got a text: leave out its"),
    ],
)
def test_contradictions_unknown_keys_and_wrong_types(plain: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_plain(plain)
    assert words in str(error.value)


def test_a_choice_is_not_renamed_in_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose optim=adam"):
        compose(tmp_path, "optim.name=adam")


def test_values_become_what_their_key_needs(tmp_path: Path) -> None:
    config = compose(tmp_path, "run.name=7", "optim.lr=1", "init_from.rename.fc=head", "init_from.skip=[a,b]")
    assert (config.run.name, config.optim.lr) == ("7", 1.0)
    lamb = compose(tmp_path, "optim=lamb", "optim.args.bias_correction=false", "optim.args.betas=[0.8,0.9]").optim
    assert lamb.args == {"bias_correction": False, "betas": [0.8, 0.9]}
    assert (config.init_from.rename, config.init_from.skip) == ({"fc": "head"}, ["a", "b"])
    assert (
        compose(tmp_path, "init_from.rename={fc: head}").init_from
        == compose(tmp_path, "init_from.rename.fc=head").init_from
    )


@pytest.mark.parametrize("workers", range(1, 9))
def test_resolve_derives_threads_and_shards(workers: int) -> None:
    config = Config()
    config.cluster.workers = workers
    resolve(config)
    assert config.cluster.local_workers == config.batch.num_shards == workers
    assert config.cluster.threads_per_worker == max(1, available_cores() // workers)


@pytest.mark.parametrize(("strategy", "shards"), [("auto", 3), ("local_sgd", None)])
def test_rounds_have_as_many_shards_as_workers_however_many_come(strategy: str, shards: int | None) -> None:
    cluster = {"workers": 2, "min_workers": 1, "max_workers": 3}
    config = from_plain({"cluster": cluster, "strategy": {"name": strategy}})
    resolve(config)
    assert config.batch.num_shards == shards
    validate(config)


def test_resumed_number_of_shards_wins_while_it_fits() -> None:
    for earlier, expected in [(3, 3), (1, 2), (65, 2), (None, 2)]:
        config = Config()
        resolve(config, num_shards=earlier)
        assert config.batch.num_shards == expected


def test_many_hosts_may_have_many_workers() -> None:
    config = from_plain({"cluster": {"workers": 512, "local_workers": 2}, "batch": {"global_size": 512}})
    assert config.cluster.workers == 512


@pytest.mark.parametrize(
    ("mode", "bound"),
    [
        *(({}, None), ({"backup_workers": 1}, None), ({"mode": "async"}, None)),
        *(({"mode": "bounded"}, 4), ({"mode": "bounded", "staleness": 2}, 2)),
    ],
)
def test_each_mode_of_servers_starts_from_settings(mode: dict[str, Any], bound: int | None) -> None:
    config = from_plain({"cluster": {"workers": 3}, "strategy": {"name": "parameter_server", **mode}})
    assert isinstance(config.strategy, Serving)
    assert config.strategy.bound == ddp.ParameterServer(**mode).bound == bound
    validate(config)
    resolve(config)
    assert config.batch.num_shards == {"backup_workers": 2, "mode": 1}.get(next(iter(mode), ""), 3)
    assert config.cluster.servers == 1
    config.cluster.servers = 0
    with pytest.raises(ConfigError, match=r"^cluster\.servers=0: strategy=parameter_server needs at least one server"):
        resolve(config, local_workers=2)  # of processes that others have started


@pytest.mark.parametrize("content", [b"model: [1", b"\xff\xfe", b"a: b: c"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{path} is damaged: "):
        read_settings(path)


def test_audits_are_refused_where_workers_may_have_other_bits() -> None:
    """Not before the settings of a run that goes on are known, which may have the switch."""
    config = from_plain({"same_bits": {"audit_every": 4}})
    with pytest.raises(ConfigError, match=r"same_bits\.audit_every=4: audits compare .*; set on to true, next to it"):
        resolve(config)
    config.same_bits = SameBits(on=True, audit_every=4)
    resolve(config)
    config.cluster.workers = config.cluster.local_workers = 1
    with pytest.raises(ConfigError, match=r"a second worker audits, and there is one; set it to 0, or take more worke"):
        validate(config)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cluster.workers=2", "cluster.min_workers=3"], "cluster.min_workers=3: is more than workers=2"),
        (["cluster.spares=1"], "cluster.spares=1: workers come and go only with min_workers"),
        (["cluster.min_workers=1", "strategy=parameter_server"], "workers come and go already"),
        (["cluster.workers=3", "cluster.min_workers=2", "replica.sync_batchnorm=true"], "SyncBatchNorm each possible"),
        (["cluster.min_workers=1", "cluster.max_workers=4", "batch.num_shards=3"], "batch.num_shards=3: is less than"),
    ],
)
def test_workers_that_come_and_go_are_checked_before_they_start(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        resolve(composed(words)[0])
