"""What other libraries call things: every remedy names something that is there."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from operator import attrgetter
from typing import get_args

import pytest
import torch

import ddp
import ddp.data
from ddp.comm.checks import OPERATIONS
from ddp.commands.registry import COMMANDS
from ddp.errors import CALLED_ELSEWHERE, meant
from ddp.run.launch.from_python import OURS
from ddp.run.settings.checks import WAYS
from ddp.run.settings.config import CHOICES
from ddp.run.settings.reader import _owners
from ddp.setting import Precision, StrategyName
from ddp.train.checkpoints.moved import MEANINGS, meaning, meant_for_fit

ARGUMENTS = inspect.signature(ddp.fit).parameters.keys()
POLICIES = (ddp.Averaging, ddp.Batches, ddp.Evaluation, ddp.Folder, ddp.Reading)
FIELDS = {item.name for policy in POLICIES for item in fields(policy)}
SETTINGS = {*_owners({}), *CHOICES, "hydra.run.dir"}
LIBRARIES = {"ddp": ddp, "torch": torch}


@pytest.mark.parametrize("word", MEANINGS)
def test_what_a_foreign_word_means_is_there(word: str) -> None:
    here = meaning(word)
    said = meant_for_fit(word)
    instead = "" if said.isidentifier() else said
    assert {here.setting} <= SETTINGS | {""} and {here.launch} <= {*OURS, ""}
    assert said in {*ARGUMENTS, ""} or instead
    assert word not in ARGUMENTS, "a word of ours needs no other"
    assert word not in SETTINGS or here.setting in (word, "")
    assert any(here)
    for library, name in re.findall(r"\b(ddp|torch)\.([\w.]*\w)", instead):
        assert attrgetter(name)(LIBRARIES[library]) is not None
    assert set(re.findall(r"\b[a-z]+_[a-z]+\b", instead)) - {"cross_entropy", "state_dict"} <= ARGUMENTS | FIELDS


def test_the_values_of_settings_that_others_call_otherwise_are_there() -> None:
    known = {*OPERATIONS, *COMMANDS, *WAYS, "cuda"}.union(*map(get_args, (StrategyName, Precision)))
    theirs = [word for words in CALLED_ELSEWHERE.values() for word in words.split()]
    assert len(set(theirs)) == len(theirs) and all(meant(word, known) for word in theirs)
    assert {ours for ours in CALLED_ELSEWHERE if " " not in ours} <= known


def test_any_other_word_means_nothing() -> None:
    assert not any(meaning("epochs"))
