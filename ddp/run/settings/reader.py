"""Settings from plain values: the one place that says which keys there are and which types they have.

Hydra composes plain values, and RUN_DIR/config.yaml holds plain values. `from_plain` makes a `Config` of them. It
refuses an unknown key, with the nearest valid one, and a value of the wrong type.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from ddp.errors import ConfigError, did_you_mean, nearest
from ddp.run.settings.address import is_address
from ddp.run.settings.checks import validate
from ddp.run.settings.config import CHOICES, OWN, Config, choose, plain_defaults
from ddp.setting import strategy_hint
from ddp.train.moved import KEYS, VALUES, meaning, translated


def from_plain(plain: Mapping[str, Any]) -> Config:
    """Returns the settings in plain dicts, as `asdict` or Hydra make them; missing keys take their defaults.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or a combination that cannot work.
    """
    current = translated(plain) if isinstance(plain, Mapping) else plain  # a damaged file may hold anything
    config: Config = _read(Config, current, key="")
    validate(config)
    return config


def read_settings(path: Path) -> Config:
    """Returns the settings of a run, from its config.yaml.

    Raises:
        ConfigError: as `from_plain`; or the file is damaged.
    """
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    return from_plain(plain)


def settings_of(path: Path) -> Path | None:
    """Returns the config.yaml of the run that `path` belongs to: RUN_DIR, its checkpoints/, or one of these."""
    start = path.resolve()
    found = (folder / "config.yaml" for folder in (start, *start.parents[:2]))
    return next((each for each in found if each.exists() and not each.is_fifo()), None)


def unknown_key(
    key: str, valid: Iterable[str], *, what: str = "key", chosen: Mapping[str, str] | None = None
) -> ConfigError:
    """Returns the error for a `key` whose last part is not among `valid`, such as "cluster.worker" or "model=gtp".

    Args:
        chosen: group → name of the choice in force. A key of another choice is named together with that choice.
    """
    names = sorted(valid)
    end = key.rfind("=" if what == "choice" else ".") + 1
    above, last = key[:end], key[end:]
    homes = {} if what == "choice" else _homes(chosen or {})
    level = f"Valid{f' in {above[:-1]}' if above.endswith('.') else ''}: {', '.join(names) or 'nothing'}"
    if home := homes.get(key):
        return ConfigError(f"unknown {what} {key}: it belongs to {home}. {level}")
    moved = next((new for old, new in KEYS.items() if key in (old, old.rpartition(".")[2])), "")
    foreign = (moved if moved in homes else meaning(last).setting) if homes else ""
    if True in VALUES.get(moved, {}):  # it was a switch
        foreign = f"{moved}={VALUES[moved][True]['name']}"
    guesses = [foreign] if foreign else _called(last, homes)
    if not guesses and (likely := nearest(last, names)):
        guesses = [above + likely]
    if not guesses:
        parts = [other.rpartition(".")[2] for other in homes]
        near = difflib.get_close_matches(last, parts, n=1, cutoff=0.8)
        guesses = _called(near[0], homes) if near else []
    hint = f" Did you mean {' or '.join(guesses)}?" if guesses else ""
    return ConfigError(f"unknown {what} {key}.{hint} {level}")


def chosen_in(plain: Mapping[Any, Any]) -> dict[str, str]:
    """Returns group → name of the choice in force in a tree of settings, which may be damaged."""
    groups = {group: plain.get(group) for group in CHOICES}
    return {group: str(found.get("name")) for group, found in groups.items() if isinstance(found, Mapping)}


def _called(last: str, homes: Mapping[str, str]) -> list[str]:
    """Returns the keys whose last part is `last`: those in force, or else each with the choice that it belongs to."""
    found = [key for key in homes if key.rpartition(".")[2] == last]
    return [key for key in found if not homes[key]] or [f"{key} (of {homes[key]})" for key in found]


def _homes(chosen: Mapping[str, str]) -> dict[str, str]:
    """Returns every key with the choices that have it, as "model=gpt", or "" if the choice in force is one of them."""
    homes = {"run.name": "", "run.group": ""}
    for part, inner in plain_defaults().items():
        homes |= dict.fromkeys([part, *(f"{part}.{name}" for name in inner)] if isinstance(inner, dict) else [part], "")
    for group, choices in CHOICES.items():
        for key in {item.name: None for choice in choices.values() for item in fields(choice) if item.name != "name"}:
            having = [name for name, choice in choices.items() if hasattr(choice, key)]
            is_valid = chosen.get(group) in having or len(having) == len(choices)
            homes[f"{group}.{key}"] = "" if is_valid else " or ".join(f"{group}={name}" for name in having)
    return homes


def key_of_option(option: str) -> str:
    """Returns the key that is probably meant by an option of the shell's form: "--batch-size" → "batch.global_size"."""
    name, homes = option.strip("-").replace("-", "_"), _homes({})
    found = meaning(name).setting or name
    return found if found in homes else next(iter(_called(found, homes)), found).partition(" ")[0]


def unknown_choice(group: str, name: str) -> ConfigError:
    """Returns the error for a choice that a group does not offer, such as model=gtp."""
    if group in OWN and "." in name:
        remedy = f"for one of your own write a colon before its name: {group}={':'.join(name.rsplit('.', 1))}"
        return ConfigError(f"unknown choice {group}={name}; {remedy}")
    if group == "strategy" and (hint := strategy_hint(name, "strategy={}")):
        return ConfigError(f"unknown choice strategy={name}.{hint} Valid: {', '.join(CHOICES[group])}")
    return unknown_key(f"{group}={name}", CHOICES[group], what="choice")


def wrong_type(key: str, value: object, expected: object) -> ConfigError:
    """Returns the error for a value of the wrong type."""
    hint = f".{did_you_mean(value, map(str, get_args(expected)))}" if get_origin(expected) is Literal else ""
    return ConfigError(f"{key}={'null' if value is None else value}: expected {_describe(expected)}{hint}".rstrip("."))


def _read(kind: Any, value: Any, *, key: str) -> Any:
    """Returns `value` as an instance of the type `kind`; `key` names it in errors."""
    expected = kind
    if get_origin(kind) in (Union, types.UnionType):  # only T | None occurs
        if value is None:
            return None
        (kind,) = (option for option in get_args(kind) if option is not type(None))
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:  # arguments of the user's own
        return value
    if is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise wrong_type(key or "the configuration", value, dict)
        return _read_fields(kind, value, key=key)
    if origin is Literal and value in arguments:
        return value
    if origin is list and isinstance(value, list):
        return [_read(arguments[0], item, key=f"{key}[{i}]") for i, item in enumerate(value)]
    if origin is dict and isinstance(value, Mapping):
        return {str(name): _read(arguments[1], item, key=f"{key}.{name}") for name, item in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if kind is str and type(value) in (int, float):  # such as run.name=7
        return str(value)
    if origin is None and type(value) is kind:  # not isinstance: True is no int here
        return value
    raise wrong_type(key, value, expected)


def _read_fields(kind: Any, plain: Mapping[str, Any], *, key: str) -> Any:
    default = kind
    if key in CHOICES:
        name = str(plain.get("name"))
        if name not in CHOICES[key] and not (key in OWN and is_address(name)):
            raise unknown_choice(key, name)
        default = partial(choose, key, name)
        kind = type(choose(key, name))
    hints = get_type_hints(kind)
    prefix = f"{key}." if key else ""
    for name in plain:
        if name not in hints:
            chosen = {key: str(plain.get("name"))} if key else chosen_in(plain)
            raise unknown_key(f"{prefix}{name}", hints, chosen=chosen)
    values = {name: _read(hints[name], value, key=f"{prefix}{name}") for name, value in plain.items()}
    try:
        return default(**values)
    except ConfigError as error:  # of a policy, which knows its fields alone
        raise ConfigError(f"{prefix}{error}") from error


def _describe(kind: Any) -> str:
    """Returns the name of a type in the words of a user."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in get_args(kind))
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is list:
        return f"a list, as [{_describe(get_args(kind)[0])}, …]"
    if get_origin(kind) is dict:
        return "a mapping, as {key: value}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "a mapping"}
    return "null" if kind is type(None) else names.get(kind, str(kind))
