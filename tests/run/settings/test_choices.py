"""A function becomes a choice: its signature is the settings, and nothing else has to be said.

Tests: ddp/run/settings/groups.py.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import pytest

from ddp.errors import ConfigError
from ddp.policies import Averaging, Rounds
from ddp.run.settings.config import CHOICES, Config, choose, page
from ddp.run.settings.groups import DataFiles, choice
from ddp.run.settings.reader import from_plain
from ddp.setting import Bounds

if TYPE_CHECKING:
    from a_library_that_is_not_there import Weights

NOTHING: dict[str, Any] = {}


@pytest.fixture
def newton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two choices of a function whose other annotations cannot be read without a library."""
    monkeypatch.setitem(CHOICES, "optim", dict(CHOICES["optim"]))

    @choice("optim", "damped", "the same, in smaller steps", lr=0.5, weight_decay=0.0, damping=0.25)
    @choice("optim", "newton", "steps by the inverse Hessian", lr=1.0)
    def newton(
        groups: Weights,
        *,
        name: str,
        lr: float,
        weight_decay: float | None = None,
        damping: Annotated[float, Bounds(at_least=0), "what is added to the diagonal"] = 0.0,
        args: Annotated[dict[str, Any], "further words"] = NOTHING,
    ) -> Weights:
        return (groups, name, lr, weight_decay, damping, args)


@pytest.mark.usefixtures("newton")
def test_a_function_is_a_choice_with_its_settings_and_those_of_the_group() -> None:
    optim = from_plain({"optim": {"name": "newton", "damping": 2, "base_batch": 32}}).optim
    assert list(CHOICES["optim"])[-2:] == ["newton", "damped"]
    shared = {"lr": 1.0, "weight_decay": None, "lr_scaling": "none", "base_batch": 32, "exclude": []}
    assert asdict(optim) == {"name": "newton", **shared, "damping": 2.0, "args": {}}
    assert optim.make("g") == ("g", "newton", 1.0, None, 2.0, {})
    assert choose("optim", "damped", args={"a": 1}).make("g", lr=8.0) == ("g", "damped", 8.0, 0.0, 0.25, {"a": 1})
    choose("optim", "newton").args["a"] = 1
    assert choose("optim", "damped").args == NOTHING == {}, "choices do not share a default"


@pytest.mark.usefixtures("newton")
@pytest.mark.parametrize(
    ("plain", "says"),
    [
        ({"name": "newton", "damping": -1.0}, r"^optim\.damping=-1\.0: must be a number from 0 up$"),
        ({"name": "newton", "damping": "a"}, r"^optim\.damping=a: expected a number$"),
        ({"name": "newton", "dampin": 1.0}, r"^unknown key optim\.dampin\. Did you mean optim\.damping\?"),
        ({"name": "sgd", "damping": 1.0}, "it belongs to optim=newton or optim=damped"),
        ({"name": "newtown"}, r"Did you mean optim=newton\?"),
        ({"name": "newton", "lr": 0.0}, r"^optim\.lr=0\.0: must be a number above 0$"),
    ],
)
def test_it_is_read_as_all_choices_are(plain: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_plain({"optim": plain})


@pytest.mark.usefixtures("newton")
def test_it_stands_in_the_help() -> None:
    text = page()
    assert "  optim=newton                    steps by the inverse Hessian\n    optim.lr=1\n" in text
    assert "    optim.damping=0.25            number            what is added to the diagonal\n" in text


def test_settings_of_a_choice_are_values() -> None:
    config = Config(data=choose("data", "csv", inputs=["x"]), strategy=choose("strategy", "local_sgd", every=4))
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
    assert config != Config() and isinstance(config.data, DataFiles) and isinstance(config.strategy, Rounds)
    with pytest.raises(AttributeError):
        config.optim.momentun = 0.5  # type: ignore[attr-defined]


def test_a_strategy_takes_its_policy_whole() -> None:
    made = choose("strategy", "local_sgd", every=4, delay=2).make()
    assert (type(made).__name__, made.every, made.delay) == ("LocalSGD", 4, 2)
    assert choose("strategy", "sharded").make() == Averaging(strategy="sharded")
    with pytest.raises(ConfigError, match=r"^strategy\.region='\.': take letters"):
        from_plain({"strategy": {"name": "central_storage", "region": "."}})
