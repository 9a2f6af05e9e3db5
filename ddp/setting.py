"""A setting: the field of a dataclass, with its default, its meaning and its bounds on one line.

    every_steps: int | None = setting(None, "steps between two evaluations; null: not by steps", at_least=1)

The command line, its errors, --help and docs/settings.md read these lines, and so do the policies that are arguments of
`ddp.fit`. The words that a setting may be, and that several rooms know, stand here, too. Nothing here imports torch.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import field, fields, is_dataclass
from functools import partial
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from ddp.errors import ConfigError, did_you_mean, meant

Additions = Literal["any", "canonical"]  # the order in which an all-reduce may add
Narrow = Literal["bf16", "fp16", "int8", "int8_stochastic"]
WireName = Literal[Narrow, "fp32"]
Precision = Literal["fp32", "bf16", "bf16_pure", "fp16"]
Scaling = Literal["none", "linear", "sqrt", "legw"]
Uneven = Literal["join", "stop_all", "raise"]
StrategyName = Literal[
    "auto", "one_device", "mirrored", "multi_worker", "sharded", "central_storage", "parameter_server", "local_sgd"
]
ServerMode = Literal["sync", "async", "bounded"]
Island = Literal["worker", "host"]


def strategy_hint(word: object, say: str = "{}") -> str:
    """Returns a sentence, with a space before it, for a word, a class or an object that is a strategy elsewhere; or "".

    Args:
        say: where the word of ours belongs.
    """
    kind = word if isinstance(word, type) else type(word)
    name = word if isinstance(word, str) else kind.__name__
    return meant(re.split("[.:]", name)[-1], get_args(StrategyName), say)  # without the name of its module


def check_region(name: object) -> None:
    """Raises ConfigError unless a region (`strategies/region.py`) can be called so."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", name, re.ASCII):
        raise ConfigError(f"region={name!r:.120}: take letters, digits, '.', '_' and '-', 100 at most, no sign first")


LARGEST = 3.4e38  # of float32


class Bounds(NamedTuple):
    """The bounds of a number; None: not bounded on this side."""

    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None

    def admit(self, value: float) -> bool:
        """Returns True if the value is within the bounds."""
        pairs = zip(self, (operator.ge, operator.gt, operator.lt, operator.le), strict=True)
        return all(bound is None or holds(value, bound) for bound, holds in pairs)

    def __str__(self) -> str:
        words = ("at least", "greater than", "below", "at most")
        return " and ".join(f"{word} {bound:g}" for word, bound in zip(words, self, strict=True) if bound is not None)


def setting(default: Any, meaning: str, **bounds: float) -> Any:
    """Returns a field of a settings class.

    Args:
        default: MISSING where each choice of a group has its own.
        meaning: one phrase, with the unit and with what null and the choices of a Literal stand for.
        bounds: of a number, by the names of `Bounds`.
    """
    metadata = {"meaning": meaning, "bounds": Bounds(**bounds)}
    if isinstance(default, (list, dict)):
        return field(default_factory=partial(copy, default), metadata=metadata)
    return field(default=default, metadata=metadata)


def metadata_of(kind: type, name: str) -> Mapping[str, Any]:
    """Returns meaning and bounds of a setting, also where a subclass has only given it another default."""
    lines = (getattr(each, "__dataclass_fields__", {}).get(name) for each in kind.__mro__)
    return next((line.metadata for line in lines if line is not None and line.metadata), {})


def out_of_bounds(settings: Any, prefix: str = "") -> Iterator[str]:
    """Yields a sentence for each number in a tree of settings that is not within its bounds."""
    for item in fields(settings):
        value, key = getattr(settings, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from out_of_bounds(value, f"{key}.")
        elif isinstance(value, Real) and not isinstance(value, bool):
            bounds: Bounds | None = metadata_of(type(settings), item.name).get("bounds")
            if bounds is None:
                continue  # no setting: who takes it says what it wants
            if not -LARGEST <= value <= LARGEST:  # type: ignore[operator]  # as an int may be too large for a float
                yield f"{key}={value!s:.24}: must be a finite number, at most {LARGEST:.2g}"
            elif not bounds.admit(float(value)):
                yield f"{key}={value}: must be {bounds}"


def check_values(policy: Any) -> None:
    """Raises ConfigError for the first setting of a policy that is of another type, or out of its bounds.

    A number of NumPy's becomes one of Python's, which can be written as JSON.
    """
    kinds = get_type_hints(type(policy))
    for item in fields(policy):
        value, kind = getattr(policy, item.name), kinds[item.name]
        options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if value is None and type(None) in options:
            continue
        metadata = metadata_of(type(policy), item.name)
        bounds: Bounds = metadata.get("bounds", Bounds())
        if bool in options and not isinstance(value, bool):
            raise ConfigError(f"{item.name}={value!r}: must be True or False")
        least = bounds.at_least
        is_whole = is_number and isinstance(value, Integral)
        if int in options and not (is_whole and (least is None or value >= least)):
            raise ConfigError(f"{item.name}={value!r}: must be a whole number from {least} up")
        if float in options and not (is_number and (bounds.above is None or bounds.admit(value))):
            above = "" if bounds.above is None else f" above {bounds.above:g}"
            or_none = metadata.get("meaning", "").partition("null: ")[2] if item.default is None else ""
            remedy = f"; leave it out for {or_none}" if or_none else ""
            raise ConfigError(f"{item.name}={value!r}: must be a number{above}{remedy}")
        words = next((get_args(each) for each in options if get_origin(each) is Literal), None)
        if words is not None and not (isinstance(value, str) and value in words):
            missing = ", or leave it out" if type(None) in options else ""
            hint = did_you_mean(value, words)
            raise ConfigError(f"{item.name}={value!r}: take one of {', '.join(words)}{missing}.{hint}")
        if is_number and not isinstance(value, (int, float)):
            object.__setattr__(policy, item.name, int(value) if is_whole else float(value))
    for problem in out_of_bounds(policy):
        raise ConfigError(problem)
