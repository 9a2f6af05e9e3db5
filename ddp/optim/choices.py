"""The choices of an optimizer: a preset's, some of them replaced, each checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from torch import Tensor

from ddp.errors import ConfigError

Choices = TypeVar("Choices")


def with_preset(kind: str, preset: str, presets: Mapping[str, Choices], choices: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a preset's choices, some of them replaced.

    Raises:
        ConfigError: there is no such preset or choice.
    """
    if preset not in presets:
        raise ConfigError(f"preset={preset!r}: {kind} has {', '.join(presets)}")
    known = cast(Mapping[str, Any], presets[preset])
    for name in choices:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(known)}"
            raise ConfigError(f"{kind}() has no argument {name!r}. {hint}")
        _check_kind(name, choices[name], known[name])
    return {**known, **choices}


def _check_kind(name: str, value: Any, like: Any) -> None:
    """Raises ConfigError unless the value of a choice is of the kind of the preset's."""

    def is_number(each: Any) -> bool:
        return isinstance(each, (int, float)) and not isinstance(each, bool)

    if isinstance(like, bool):
        right, wanted = isinstance(value, bool), "True or False"
    elif isinstance(like, tuple):
        right = isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_number, value))
        wanted = "two numbers"
    elif isinstance(like, str):
        right, wanted = isinstance(value, str), "a word"
    else:
        right, wanted = is_number(value) or (name == "clip_norm" and value is None), "a number"
    if not right:
        raise ConfigError(f"{name}={value!r}: must be {wanted}")


def check_range(name: str, value: Any, *, least: float, below: float = math.inf) -> None:
    """Raises ConfigError unless a number, or a tensor of one, is within its range."""
    number = float(value) if isinstance(value, (int, float, Tensor)) and not isinstance(value, bool) else math.nan
    if not least <= number < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ConfigError(f"{name}={value!r}: must be a number from {least:g} up{limit}")
