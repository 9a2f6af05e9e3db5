"""The words of `strategy`: what each one stands for, and what it refuses, before workers start and on a rank."""

from __future__ import annotations

import os
from typing import Any, get_args

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn import functional as F

import ddp
from ddp.comm.transport import topology
from ddp.errors import ConfigError
from ddp.replica.sharded import ShardedDataParallel
from ddp.run.settings.checks import check_strategy
from ddp.run.settings.config import CHOICES
from ddp.run.settings.reader import from_plain
from ddp.setting import StrategyName
from ddp.strategies import Replicated, Sharded
from ddp.strategies.choice import STRATEGIES, Setup, refuse, same_bits_as, strategy_for

WORDS = get_args(StrategyName)
CLUSTER = {"workers": 1, "local_workers": 1}
ONE = Setup(
    world_size=1, num_hosts=1, shares_memory=True, device="cpu", precision="fp32", is_naive=False, is_sparse=False
)
SPARSE = nn.Sequential(nn.EmbeddingBag(3, 2, sparse=True))


# fmt: off
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    # how a setup differs from ONE; the same as settings; word → what it says
    "nothing": ({}, {}, {}),
    "two workers": (
        {"world_size": 2}, {"cluster": {"workers": 2}},
        {"one_device": "is for one worker, and there are 2; take one worker, or strategy=auto"},
    ),
    "two hosts": (
        {"world_size": 2, "num_hosts": 2}, {"cluster": {"workers": 2, "local_workers": 1}},
        {"one_device": "is for one worker", "mirrored": "there are several hosts; take strategy=multi_worker"},
    ),
    "naive": ({"is_naive": True}, {"replica": {"kind": "naive"}}, {"sharded": "needs replica.kind=bucketed"}),
    "pure": ({"precision": "bf16_pure"}, {"precision": "bf16_pure"}, {"sharded": "precision=bf16_pure has master wei"}),
    "sparse": ({"is_sparse": True}, {}, {"sharded": "a layer has sparse gradients, which no slice can hold; take"}),
}
# fmt: on


def refused_with(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", REFUSED)
def test_a_word_refuses_what_it_cannot_train_and_nothing_else(what: str) -> None:
    setup, settings, told = REFUSED[what]
    for word in WORDS:
        config = from_plain({"cluster": CLUSTER, "strategy": {"name": word}, **settings})
        before = refused_with(check_strategy, config, SPARSE if what == "sparse" else nn.Linear(1, 1))
        assert refused_with(refuse, word, ONE._replace(**setup)) == before
        assert (before.startswith(f"strategy={word}: ") and told[word] in before) if word in told else not before


def test_the_words_are_those_of_the_command_line_and_of_python() -> None:
    assert tuple(STRATEGIES) == tuple(CHOICES["strategy"]) == WORDS
    assert [same_bits_as(word) for word in WORDS] == ["auto", "auto", "auto", "auto", "sharded"]
    for word, told in (
        ("replicated", "Did you mean auto?"),
        ("MirroredStrategy", "Did you mean mirrored?"),
        ("multi_worker_mirrored", "Did you mean multi_worker?"),
        ("fsdp", "Parameters are whole on every rank here; sharded cuts the optimizer's state alone."),
        ("parameter_server", "Parameter servers are not here yet: all ranks agree in every step."),
        ("shard", "Did you mean sharded?"),
        (type("TPUStrategy", (), {"__repr__": lambda _: "theirs"})(), "TPUs are not supported."),
        (None, "multi_worker, sharded."),
    ):
        said = refused_with(lambda word=word: ddp.Averaging(strategy=word))
        assert said.startswith(f"strategy={word!r}: take one of auto, one_device, ") and said.endswith(told), said


def test_a_name_of_another_library_is_told_the_word() -> None:
    for name, told in (
        ("MirroredStrategy", '. Did you mean strategy="mirrored", of ddp.fit?'),
        ("OneDeviceStrategy", '. Did you mean strategy="one_device", of ddp.fit?'),
        ("MultiWorkerMirroredStrategy", '. Did you mean strategy="multi_worker", of ddp.fit?'),
        ("ZeroRedundancyOptimizer", '. Did you mean strategy="sharded", of ddp.fit?'),
        ("ParameterServerStrategy", ". Parameter servers are not here yet: all ranks agree in every step"),
        ("TPUStrategy", ". TPUs are not supported"),
        ("FSDP", ". Parameters are whole on every rank here; sharded cuts the optimizer's state alone"),
        ("Mirror", ""),
        ("ps", ""),
    ):
        assert not hasattr(ddp, name)
        with pytest.raises(AttributeError) as error:
            getattr(ddp, name)
        assert str(error.value) == f"module 'ddp' has no attribute {name!r}{told}"


def on_two_hosts() -> list[str]:
    """What `ddp.fit` says to each word on two ranks, each a host of its own; and beside replicas of other kinds."""
    topology.boot_id = lambda: f"host {os.environ['RANK']}"
    comm = ddp.init(abort_s=30)
    data = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)

    def fitted(word: Any, kind: Any = None) -> str:
        module = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        how: dict[str, Any] = {"loss": F.cross_entropy, "global_batch": 4, "max_steps": 1, "folder": None}
        replica = module if kind is None else kind(module, comm=comm)
        return refused_with(lambda: ddp.fit(replica, data, optimizer, **how, strategy=word))

    said = [fitted(word) for word in WORDS]
    said += [fitted("sharded", ddp.BucketedDataParallel), fitted("multi_worker", ShardedDataParallel)]
    said += [fitted("multi_worker", ddp.NaiveDataParallel), fitted("auto", ShardedDataParallel)]
    ddp.shutdown()
    return said


def test_on_ranks_a_word_refuses_their_number_their_hosts_and_a_replica_of_another() -> None:
    told = {"one_device": "is for one worker, and there are 2", "mirrored": "is for the workers of one host, and"}
    first = [f"strategy={word}: {told[word]}" if word in told else "" for word in WORDS]
    wrapped = [
        "strategy=sharded with a model in a BucketedDataParallel: give ddp.fit the bare module; or, for some of the "
        "ranks, a ShardedDataParallel(module, comm=…) of ddp.replica.sharded",
        "strategy=multi_worker with a model in a ShardedDataParallel: give ddp.fit the bare module; or, for some of ",
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
        (ShardedDataParallel, Sharded),
    ):
        assert type(strategy_for(kind(nn.Linear(2, 2), comm=comm), optimizer)) is update
    ddp.shutdown()
