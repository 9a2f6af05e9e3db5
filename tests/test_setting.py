"""Rules between settings: each is said in the words of the command line, and in those of Python.

Tests: ddp/run/settings/checks.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from ddp.errors import ConfigError
from ddp.run.settings import checks
from ddp.run.settings.config import CHOICES, Config, plain_defaults
from ddp.setting import RULES, SETTINGS, Setup, refuse

KEYS = {*plain_defaults(), "optim.args.clip_norm", *CHOICES}
KEYS |= {f"{group}.{name}" for group, inner in plain_defaults().items() if isinstance(inner, dict) for name in inner}
KEYS |= {f"{group}.{name}" for group in CHOICES for each in CHOICES[group].values() for name in dir(each)}


def test_every_fact_has_a_setting_or_is_none() -> None:
    assert {about["key"] for about in SETTINGS.values()} - {""} <= KEYS
    refuse(Setup())
    checks.validate(Config())


@pytest.mark.parametrize("in_settings", [True, False])
def test_every_rule_can_be_said(in_settings: bool) -> None:
    """All keys that a sentence has in braces are there, and no brace is left."""
    setup = Setup(in_settings=in_settings)
    always = [rule._replace(when=lambda _: True) for rule in RULES]
    for said in setup.problems(always, setup):
        assert not {*"{}"} & {*said} and said.split(": ")[0].strip()


def test_every_rule_of_settings_can_be_said() -> None:
    config = Config()
    always = [rule._replace(when=lambda _: True) for rule in checks.RULES]
    assert {rule.key for rule in checks.RULES} <= KEYS
    for said in checks.Settings(config).problems(always, config):
        assert not {*"{}"} & {*said}


@pytest.mark.parametrize(
    ("facts", "typed", "python"),
    [
        (
            {"strategy": "local_sgd", "micro_size": 8},
            "batch.micro_size=8: with strategy=local_sgd a micro-batch is an inner step; leave one out",
            "micro_size=8: with strategy='local_sgd' a micro-batch is an inner step; leave one out",
        ),
        (
            {"strategy": "central_storage", "shared_memory": False},
            "share none (comm.shared_memory=false, or the log says why); take strategy=sharded",
            "share none (shared_memory=False, or the log says why); take strategy='sharded'",
        ),
        (
            {"hook": "top_k", "kind": "naive"},
            "hook=top_k: needs replica.kind=bucketed, whose buckets it gets; leave one out",
            "hook='top_k': needs a ddp.BucketedDataParallel, which ddp.fit makes of the bare module, whose buckets it "
            "gets; leave one out",
        ),
        (
            {"same_bits": True, "algorithm": "ring"},
            "same_bits.on=true with comm.algorithm=ring: adds up by workers, at some numbers of them in another order;",
            "same_bits=True with algorithm='ring': adds up by workers, at some numbers of them in another order;",
        ),
        ({"epochs": None}, "epochs=null: with max_steps=null, too, the run", "epochs=None: with max_steps=None, too,"),
        (
            {"debug": True, "sharding": "off"},
            "loader.debug=true: refuses equal batches, which data.sharding=off is for; leave one out",
            "debug=True: refuses equal batches, which sharding='off' is for; leave one out",
        ),
    ],
)
def test_a_rule_is_said_in_the_words_of_who_asked(facts: dict[str, Any], typed: str, python: str) -> None:
    for in_settings, words in ((True, typed), (False, python)):
        with pytest.raises(ConfigError) as error:
            refuse(Setup(in_settings=in_settings, **facts))
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"precision": "bf16"}, "strategy=tpu: a compiled step computes in the types of its parameters, and not in"),
        ({"same_bits": True}, "same_bits.on=true with strategy=tpu: a compiled step adds up by devices; take s"),
        ({"hook": "top_k"}, "hook=top_k: with strategy=tpu gradients travel inside a compiled step; leave it out"),
        ({"wire": "bf16"}, "replica.wire=bf16: with strategy=tpu gradients travel inside a compiled step; leav"),
        ({"kind": "naive"}, "strategy=tpu: compiles whole steps, so that replica.kind=naive does nothing; leave"),
        ({"waits": True}, "strategy=tpu: SyncBatchNorm waits for other ranks, and here is one; take BatchNorm"),
        ({"is_sparse": True}, "strategy=tpu: a layer has sparse gradients, which a compiled step does not have; take"),
        ({"is_stream": True}, "strategy=tpu: data is a stream, whose samples no device can be dealt; give a data set"),
        ({"device": "cuda"}, "strategy=tpu: the model is on the CPU, and JAX finds the devices; leave device=cuda out"),
        ({"min_workers": 1}, "cluster.min_workers=1: with strategy=tpu all workers are devices of one process,"),
        ({"num_shards": 3, "workers": 2}, "batch.num_shards=3: with strategy=tpu each of 2 workers has one sha"),
        ({"num_hosts": 2}, "strategy=tpu: one process has all devices, and there are several hosts; take one h"),
    ],
)
def test_what_devices_of_jax_do_not_do(facts: dict[str, Any], words: str) -> None:
    refuse(Setup(in_settings=True, strategy="tpu", workers=2, num_shards=2))
    with pytest.raises(ConfigError) as error:
        refuse(Setup(in_settings=True, strategy="tpu", **facts))
    assert str(error.value).startswith(words)
