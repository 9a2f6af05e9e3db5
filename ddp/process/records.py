"""Reads files of a run safely, whoever has written them, and writes JSON that every program can read.

    files.read_own     the text of a file of bounded size, which is not a link, pipe or device
    from_json          the value in a text, with bounded nesting and no number too large for a float
    made               the value as an instance of a type: a dataclass, a list, Literal["a", "b"], Digest …
    to_json            the text of a value; NaN and infinities, which JSON does not have, become null

For any bytes in a file, reading returns a value or raises a single ValueError: no other error, no endless wait, and no
more memory than some twenty times the size of the file. A dataclass describes what a file must hold, so no command gets
a value of an unexpected type.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import chain
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ddp.errors import CheckpointError, ConfigError, one_line, printable

T = TypeVar("T")

DEPTH = 64
"""Maximum nesting of lists and mappings."""
LARGEST = 1 << 128
"""Upper bound of numbers, as for float32, so that results computed from them stay finite."""

DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of code that reads a value of an unexpected form."""

Count = Annotated[int, range(1 << 53)]
Digest = Annotated[str, re.compile("[0-9a-f]{64}")]
Name = Annotated[str, re.compile(r"\w{1,64}", re.ASCII)]
"""A file name that cannot leave its folder."""


@contextmanager
def damage_as_error(what: object, remedy: str = "", kind: type[ValueError] = ConfigError) -> Iterator[None]:
    """Turns every error of reading a file into one error of type `kind`, in one line."""
    try:
        yield
    except (ConfigError, CheckpointError) as error:  # whose text may quote the file
        raise kind(printable(str(error), is_line=True)) from error
    except (OSError, *DAMAGE) as error:
        key = f"it has no {error.args[0]}" if isinstance(error, KeyError) else ""
        why = key or (str(error) if isinstance(error, ValueError) else one_line(error))
        how = f"cannot be read ({error.strerror or why})" if isinstance(error, OSError) else f"is damaged ({why})"
        raise kind(printable(f"{what} {how}{remedy and f': {remedy}'}", is_line=True)) from error


def to_json(value: Any, **options: Any) -> str:
    """Returns a value as JSON. `options`: of `json.dumps`."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_json(text: str, *, keeps_nan: bool = False) -> Any:
    """Returns the value in a text.

    Args:
        keeps_nan: return NaN and infinities, which older files hold, as such; else as None.

    Raises:
        ValueError: the text is damaged in any way.
    """
    try:
        value = json.loads(text, parse_constant=float if keeps_nan else lambda _: None)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    layer = [value]
    for _ in range(DEPTH):
        if any(isinstance(each, int) and abs(each) > LARGEST for each in layer):
            raise ValueError("it holds a number that is too large")
        outer = [each.values() if isinstance(each, dict) else each for each in layer if isinstance(each, (dict, list))]
        layer = list(chain.from_iterable(outer))
    if layer:
        raise ValueError("it is nested too deeply")
    return value


def json_object(text: str, *, keeps_nan: bool = False) -> dict[str, Any]:
    """Returns the JSON object in a text, as `from_json` does.

    Raises:
        ValueError: the text does not hold one.
    """
    return made(dict[str, Any], from_json(text, keeps_nan=keeps_nan))


def made(kind: type[T], plain: Any) -> T:
    """Returns a plain value as an instance of this type. Unknown keys of a dataclass are dropped.

    Raises:
        ValueError: the value has another type; the message has the key.
    """
    value: T = Maker().made(kind, plain)
    return value


class Maker:
    """Creates instances of types from plain values; settings have a subclass with their groups and better errors."""

    def made(self, kind: Any, plain: Any, key: str = "", *, expected: Any = None) -> Any:
        """Returns a plain value as an instance of `kind`.

        Args:
            key: names the value in errors; expected: the expectation in errors, if not `kind`.
        """
        origin, args = get_origin(kind), get_args(kind)
        expected = expected or kind
        if kind is Any:
            return plain
        if origin in (Union, UnionType):  # only T | None occurs
            return None if plain is None else self.made(args[0], plain, key, expected=expected)
        if origin is Annotated:
            value, bounds = self.made(args[0], plain, key, expected=expected), args[1]
            if bounds.fullmatch(value) if isinstance(bounds, re.Pattern) else value in bounds:
                return value
        elif is_dataclass(kind) and isinstance(plain, Mapping):
            return self.record(kind, plain, key)
        elif origin in (list, Sequence) and isinstance(plain, list):
            return [self.made(args[0], each, f"{key}[{number}]") for number, each in enumerate(plain)]
        elif origin is dict and isinstance(plain, Mapping):
            return {
                self.made(args[0], str(name), key): self.made(args[1], each, f"{key}.{name}")
                for name, each in plain.items()
            }
        elif isinstance(plain, list) and (of_tuple := _of_tuple(kind)) and len(of_tuple) == len(plain):
            values = [self.made(each, value, key) for each, value in zip(of_tuple, plain, strict=True)]
            return tuple(values) if origin is tuple else kind(*values)
        elif origin is Literal and isinstance(plain, str) and plain in args:
            return plain
        elif kind is float and type(plain) in (int, float) and -LARGEST < plain < LARGEST:
            return float(plain)
        elif isinstance(kind, type) and isinstance(plain, kind) and (kind is bool) == isinstance(plain, bool):
            return plain
        return self.refused(expected, plain, key)

    def record(self, kind: Any, plain: Mapping[str, Any], key: str) -> Any:
        """Returns an instance of a dataclass; missing fields take their defaults."""
        needed = [each.name for each in fields(kind) if each.default is each.default_factory is MISSING]
        prefix = f"{key}." if key else ""
        if missing := [name for name in needed if name not in plain]:
            raise ValueError(f"it has no {prefix}{missing[0]}")
        found = {name: hint for name, hint in _hints(kind).items() if name in plain}
        return kind(**{name: self.made(hint, plain[name], f"{prefix}{name}") for name, hint in found.items()})

    def refused(self, expected: Any, plain: Any, key: str) -> Any:
        """Raises the error for a value of an unexpected type, or returns a replacement."""
        raise ValueError(f"{f'{key}=' if key else ''}{reprlib.repr(plain)}: expected {described(expected)}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _of_tuple(kind: Any) -> Sequence[Any]:
    """Returns the types of a tuple's values; empty for other types."""
    if isinstance(kind, type) and issubclass(kind, tuple):
        return list(_hints(kind).values())
    return get_args(kind) if get_origin(kind) is tuple else ()


def described(kind: Any) -> str:
    """Returns the name of a type for users."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(described(option) for option in args)
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin is Annotated:
        return f"{described(args[0])}{f' like {args[1].pattern}' if isinstance(args[1], re.Pattern) else ' from 0 up'}"
    if origin in (list, dict):
        return f"a list, as [{described(args[0])}, …]" if origin is list else "a mapping, as {key: value}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "a mapping"}
    return "null" if kind is type(None) else "a mapping" if is_dataclass(kind) else names.get(kind, str(kind))
