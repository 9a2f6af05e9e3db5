"""The words of `strategy`: what each one stands for, and what it refuses, before workers start and on a rank."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from ranks import run_ranks
from torch import nn

import ddp
from ddp.comm import connect
from ddp.errors import ConfigError
from ddp.gradients.reducer import HostReduceScatter, ReduceScatter
from ddp.policies import averaging_named
from ddp.replica.fully_sharded import FullyShardedDataParallel
from ddp.run.assembly import components, stages
from ddp.run.settings import checks
from ddp.run.settings.checks import check_strategy
from ddp.run.settings.config import CHOICES
from ddp.run.settings.reader import from_plain
from ddp.setting import Setup, StrategyName, refuse
from ddp.strategies import CentralStorage, FullySharded, Replicated, Sharded
from ddp.strategies.choice import STRATEGIES, same_bits_as, strategy_for
from ddp.train.arguments import FitArguments, inputs_of

WORDS = get_args(StrategyName)
CLUSTER = {"workers": 1, "local_workers": 1}
ONE = Setup(is_whole=True, workers=1, num_hosts=1)
SLICED = ("sharded", "fully_sharded", "central_storage", "parameter_server")
SPARSE = nn.Sequential(nn.EmbeddingBag(3, 2, sparse=True))


# fmt: off
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    # how a setup differs from ONE; the same as settings; word → what it says
    "nothing": ({}, {}, {}),
    "two workers": (
        {"workers": 2}, {"cluster": {"workers": 2}},
        {"one_device": "is for one worker, and there are 2; take one worker, or strategy=auto"},
    ),
    "two hosts": (
        {"workers": 2, "num_hosts": 2}, {"cluster": {"workers": 2, "local_workers": 1}},
        {"one_device": "is for one worker", "mirrored": "there are several hosts; take strategy=multi_worker",
         "tpu": "one process has all devices, and there are several hosts; take one host, or strategy=auto"},
    ),
    "naive": (
        {"kind": "naive"}, {"replica": {"kind": "naive"}},
        {**dict.fromkeys((*SLICED, "local_sgd"), "needs replica.kind=bucketed"), "tpu": "compiles whole steps, so"},
    ),
    "pure": (
        {"precision": "bf16_pure"}, {"precision": "bf16_pure"},
        {
            **dict.fromkeys(SLICED, "precision=bf16_pure has master weights, which are not cut into slices; take prec"),
            "local_sgd": "precision=bf16_pure has a loss scale or master weights, of which all workers need the same; ",
            "tpu": "a compiled step computes in the types of its parameters, and not in precision=bf16_pure; take prec",
        },
    ),
    "sparse": (
        {"is_sparse": True}, {},
        {
            **dict.fromkeys(SLICED, "a layer has sparse gradients, which no slice can hold; take strategy=auto"),
            "local_sgd": "a layer has sparse gradients, and the difference of its weights is dense; take strategy=auto",
            "tpu": "a layer has sparse gradients, which a compiled step does not have; take sparse=False",
        },
    ),
    "private memory": (
        {"workers": 2, "shared_memory": False}, {"cluster": {"workers": 2}, "comm": {"shared_memory": False}},
        {"one_device": "is for one worker", "central_storage": "needs memory that the workers of a host share, and "},
    ),
    "private memory of one": ({}, {"comm": {"shared_memory": False}}, {}),
    "GPU": (
        {"device": "cuda"}, {"device": "cuda"},
        {"central_storage": "keeps parameters in the host's memory, ", "parameter_server": "servers and workers ",
         "tpu": "the model is on the CPU, and JAX finds the devices; leave device=cuda out"},
    ),
    "loss scale": (
        {"precision": "fp16"}, {"precision": "fp16"},
        {
            "parameter_server": "precision=fp16 repeats steps with another",
            "local_sgd": "precision=fp16 has a loss scale or master weights, of which all workers need the same; take",
            "tpu": "a compiled step computes in the types of its parameters, and not in precision=fp16; take",
        },
    ),
    "waits": (
        {"waits": True}, {"replica": {"sync_batchnorm": True}},
        {
            "parameter_server": "SyncBatchNorm waits for the",
            "local_sgd": "SyncBatchNorm makes all workers wait for each other in each forward; take BatchNorm, or ",
            "tpu": "SyncBatchNorm waits for other ranks, and here is one; take BatchNorm",
        },
    ),
}
# fmt: on


def refused_with(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", REFUSED)
def test_a_word_refuses_what_it_cannot_train_and_nothing_else(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: name)  # strategy=tpu needs no JAX to be refused
    setup, settings, told = REFUSED[what]
    for word in WORDS:
        cluster = {**settings.get("cluster", CLUSTER), "servers": int(word == "parameter_server")}
        plain = {**settings, "cluster": cluster, "strategy": {"name": word}}
        model = SPARSE if what == "sparse" else nn.Linear(1, 1)
        before = refused_with(lambda plain=plain, model=model: check_strategy(from_plain(plain), model))
        on_a_rank = refused_with(refuse, replace(ONE, strategy=word, **setup))
        assert bool(on_a_rank) == bool(before) and on_a_rank.startswith(f"strategy={word!r}: " if before else "")
        assert (before.startswith(f"strategy={word}: ") and told[word] in before) if word in told else not before


def test_the_parent_refuses_it_with_the_model_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a launcher, whose processes have not met before rank 0 looks."""
    monkeypatch.setattr(components, "make_model_without_memory", lambda *_: SPARSE)
    for word, told in (("mirrored", "several hosts"), ("sharded", "sparse gradients")):
        plain = {"cluster": {"workers": 2, "local_workers": 1}, "strategy": {"name": word}}
        assert told in refused_with(lambda plain=plain: stages.check(from_plain(plain)))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)  # to which device=auto leads
    config = from_plain({"cluster": CLUSTER, "strategy": {"name": "central_storage"}})
    assert "which a GPU would read over its bus" in refused_with(check_strategy, config)


def test_the_words_are_those_of_the_command_line_and_of_python() -> None:
    assert tuple(STRATEGIES) == tuple(CHOICES["strategy"]) == WORDS
    assert [same_bits_as(word) for word in WORDS] == ["auto"] * 4 + ["tpu", *SLICED, "local_sgd"]
    for word, told in (
        ("replicated", "Did you mean auto?"),
        ("MirroredStrategy", "Did you mean mirrored?"),
        ("multi_worker_mirrored", "Did you mean multi_worker?"),
        ("fsdp", "Did you mean fully_sharded?"),
        ("DeepSpeed", "Did you mean fully_sharded?"),
        ("CentralStorageStrategy", "Did you mean central_storage?"),
        ("shard", "Did you mean sharded?"),
        (type("TPUStrategy", (), {"__repr__": lambda _: "theirs"})(), "strategy='tpu')."),
        (ddp.strategies.CentralStorage, "Did you mean central_storage?"),
        ("DiLoCo", "Did you mean local_sgd?"),
        ("PostLocalSGDOptimizer", "Did you mean local_sgd?"),
        (None, "central_storage, parameter_server, local_sgd."),
    ):
        said = refused_with(lambda word=word: ddp.Averaging(strategy=word))
        assert said.startswith(f"strategy={word!r}: take one of auto, one_device, ") and said.endswith(told), said


def test_a_region_has_a_name_and_belongs_to_central_storage() -> None:
    for region in ("a", "mnist-3.b_2", "x" * 100):
        assert ddp.Averaging(strategy="central_storage", region=region).region == region
        plain = {"strategy": {"name": "central_storage", "region": region}}
        assert components.averaging_of(from_plain(plain)) == ddp.Averaging(strategy="central_storage", region=region)
    for odd in ("", "a/b", "..", "-a", "a b", "a\n", "ä", "x" * 101):
        told = f"region={odd!r}: take letters, digits, '.', '_' and '-', 100 at most, no sign first"
        assert refused_with(lambda odd=odd: ddp.Averaging(strategy="central_storage", region=odd)) == told
        plain = {"strategy": {"name": "central_storage", "region": odd}}
        assert refused_with(from_plain, plain) == f"strategy.{told}"
    assert refused_with(lambda: ddp.Averaging(region="a")).startswith(
        "region='a' with strategy='auto': a region is of strategy='central_storage' alone; take that, or leave region"
    )
    told = refused_with(from_plain, {"strategy": {"name": "sharded", "region": "a"}})
    assert told.startswith("unknown key strategy.region: it belongs to strategy=central_storage.")


def test_a_pattern_of_units_belongs_to_fully_sharded() -> None:
    expected = ddp.Averaging(strategy="fully_sharded", units="blocks.*")
    assert expected.units == "blocks.*"
    plain = {"strategy": {"name": "fully_sharded", "units": "blocks.*"}}
    assert components.averaging_of(from_plain(plain)) == expected
    assert components.averaging_of(from_plain({"strategy": {"name": "fully_sharded"}})).units is None
    said = refused_with(lambda: ddp.Averaging(strategy="fully_sharded", units=["a.*"]))  # type: ignore[arg-type]
    assert said == "units=['a.*']: give one pattern of names of modules, such as 'blocks.*'"
    assert refused_with(lambda: ddp.Averaging(units="a")).startswith(
        "units='a' with strategy='auto': a model is cut into units by strategy='fully_sharded' alone; take that, or"
    )
    told = refused_with(from_plain, {"strategy": {"name": "sharded", "units": "a"}})
    assert told.startswith("unknown key strategy.units: it belongs to strategy=fully_sharded.")


def test_a_name_of_another_library_is_told_the_word() -> None:
    for name, told in (
        ("MirroredStrategy", '. Did you mean strategy="mirrored", of ddp.fit?'),
        ("OneDeviceStrategy", '. Did you mean strategy="one_device", of ddp.fit?'),
        ("CentralStorageStrategy", '. Did you mean strategy="central_storage", of ddp.fit?'),
        ("MultiWorkerMirroredStrategy", '. Did you mean strategy="multi_worker", of ddp.fit?'),
        ("ZeroRedundancyOptimizer", '. Did you mean strategy="sharded", of ddp.fit?'),
        ("ParameterServerStrategy", '. Did you mean strategy="parameter_server", of ddp.fit?'),
        ("DiLoCo", '. Did you mean strategy="local_sgd", of ddp.fit?'),
        ("TPUStrategy", ". TPUs are a strategy: strategy=tpu cluster.workers=4, or ddp.fit(…, strategy='tpu')"),
        ("FSDP", '. Did you mean strategy="fully_sharded", of ddp.fit?'),
        ("Mirror", ""),
        ("ps", ""),
    ):
        assert not hasattr(ddp, name)
        with pytest.raises(AttributeError) as error:
            getattr(ddp, name)
        assert str(error.value) == f"module 'ddp' has no attribute {name!r}{told}"


in_slices = partial(ddp.BucketedDataParallel, reducer=ReduceScatter)
on_hosts = partial(ddp.BucketedDataParallel, reducer=HostReduceScatter)
in_units = FullyShardedDataParallel


def on_two_hosts() -> list[str]:
    """What is said to each word on two ranks, each a host of its own; and beside replicas of other kinds."""
    connect.boot_id = lambda: f"host {os.environ['RANK']}"
    comm = ddp.init(abort_s=30)

    def told(word: Any, kind: Any = None) -> str:
        module = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = module if kind is None else kind(module, comm=comm)
        how = {"data": (torch.zeros(4, 2), torch.zeros(4, 2)), "loss": torch.nn.functional.mse_loss, "global_batch": 4}
        given = FitArguments(model=model, optimizer=optimizer, epochs=1, strategy=averaging_named(word), **how)
        return refused_with(inputs_of, given, comm)

    said = [told(word) for word in WORDS if word != "parameter_server"]  # which has no ranks that are workers
    said += [told("sharded", ddp.BucketedDataParallel), told("multi_worker", in_slices)]
    said += [told("sharded", on_hosts), told("central_storage", in_slices)]
    said += [told("multi_worker", ddp.NaiveDataParallel), told("auto", on_hosts)]
    ddp.shutdown()
    return said


def test_on_ranks_a_word_refuses_their_number_their_hosts_and_a_replica_of_another() -> None:
    told = {"one_device": "is for one worker, and there are 2", "mirrored": "is for the workers of one host, and"}
    told["tpu"] = "one process has all devices, and "
    first = [f"strategy={word!r}: {told[word]}" if word in told else "" for word in WORDS if word != "parameter_server"]
    wrapped = [
        "strategy='sharded' with a model in a BucketedDataParallel with reducer=AllReduce: give ddp.fit the bare "
        "module; or, for some of the ranks, ddp.strategies.Sharded.replica_of(module, comm=…)",
        "strategy='multi_worker' with a model in a BucketedDataParallel with reducer=ReduceScatter: give ddp.fit the",
        "strategy='sharded' with a model in a BucketedDataParallel with reducer=HostReduceScatter: give ddp.fit",
        "strategy='central_storage' with a model in a BucketedDataParallel with reducer=ReduceScatter: give",
        "",
        "",
    ]
    for found in run_ranks(on_two_hosts, 2):
        for said, wanted in zip(found, [*first, *wrapped], strict=True):
            assert said.startswith(wanted) and bool(said) == bool(wanted)


def test_the_kind_of_a_replica_says_which_update_it_gets() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    comm = ddp.init()
    for kind, update in (
        (ddp.BucketedDataParallel, Replicated),
        (ddp.NaiveDataParallel, Replicated),
        (ddp.DistributedDataParallel, Replicated),
        (in_slices, Sharded),
        (in_units, FullySharded),
        (on_hosts, CentralStorage),
    ):
        assert type(strategy_for(kind(nn.Linear(2, 2), comm=comm), optimizer)) is update
    ddp.shutdown()
