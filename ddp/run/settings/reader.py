"""Settings from plain values: the one place that checks keys and types.

Hydra composes plain values, and RUN_DIR/config.yaml holds plain values. `from_plain` makes a `Config` of them. It
refuses an unknown key, with the nearest valid one, and a value of the wrong type.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import yaml
from yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

from ddp.errors import ConfigError, did_you_mean, meant, nearest
from ddp.process.files import at_home, read_own
from ddp.process.records import DEPTH, Maker, described
from ddp.run.settings.address import is_address
from ddp.run.settings.checks import validate
from ddp.run.settings.config import CHOICES, OWN, Config, choose, plain_defaults
from ddp.setting import meaning_of
from ddp.train.checkpoints.moved import KEYS, VALUES, meaning, translated

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader where PyYAML has it: ten times as fast, which counts when hundreds of runs are read."""
MOST_BYTES = 1 << 20
PATHS = ("root", "path", "test_path", "validation_path", "index_dir", "cache_dir", "tokenizer", "resume")
"""Names of settings that may begin with ~."""


def from_plain(plain: Mapping[str, Any]) -> Config:
    """Returns the settings in plain dicts, as `asdict` or Hydra make them; missing keys take their defaults.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or a combination that cannot work.
    """
    current = translated(plain) if isinstance(plain, Mapping) else plain  # a damaged file may hold anything
    config: Config = _Settings().made(Config, current)
    validate(config)
    return config


def read_config(path: Path) -> Config:
    """Returns the settings of a run, from its config.yaml; as `read_settings`."""
    return from_plain(read_settings(path))


def read_settings(path: Path) -> dict[str, Any]:
    """Returns the content of the config.yaml of an earlier run, with the keys of today.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        text = read_own(path, most=MOST_BYTES, any_owner=True)
        plain = _from_yaml(text)
        whole = asdict(from_plain(plain))
        names, last = list(whole), list(whole)[-1]
        missing = list(reversed([*takewhile(lambda name: name not in plain, reversed(names))]))  # not a setting too new
        if missing := missing or [f"{last}.{name}" for name in whole[last] if name not in plain[last]]:
            raise ConfigError(f"it ends before {missing[0]}")
        if not text.endswith("\n"):
            raise ConfigError("it ends in the middle of a line")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} is damaged: {' '.join(str(error).split())}. The checkpoints do not need it: start a run "
            f"from them with resume={path.parent / 'checkpoints'} run.name=NEW, and give its settings again"
        ) from error
    return translated(plain)


def _from_yaml(text: str) -> Any:
    """Returns the value in a text. Its depth is checked first, because a loader recurses for each nested value."""
    depth = 0
    for event in yaml.parse(text, Loader=LOADER):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > DEPTH or isinstance(event, AliasEvent):
            raise ValueError("it is nested too deeply, or repeats a value by its name")
    return yaml.load(text, Loader=LOADER)


def settings_of(path: Path) -> Path | None:
    """Returns the config.yaml of the run that `path` belongs to: RUN_DIR, its checkpoints/, or one of these."""
    start = path.resolve()
    found = (folder / "config.yaml" for folder in (start, *start.parents[:2]))
    return next((each for each in found if each.is_file()), None)


@cache
def text_settings() -> dict[str, bool]:
    """Returns the keys of settings that are a text, or a list of texts; True: it may be null."""
    found = dict.fromkeys((*CHOICES, "recipe", "hydra.run.dir", "hydra.sweep.dir"), False)
    choices = ((group, choice) for group, named in CHOICES.items() for choice in named.values())
    kinds: list[tuple[str, Any]] = [("", Config), *((f"{group}.", type(choice)) for group, choice in choices)]
    for prefix, kind in kinds:  # which grows by what is inside
        for name, hint in get_type_hints(kind).items():
            options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
            if is_dataclass(hint):
                kinds.append((f"{prefix}{name}.", hint))
            elif str in options or list[str] in options:
                found[f"{prefix}{name}"] = type(None) in options
    return found


def value_of(key: str, text: str) -> Any:
    """Returns the plain value of a word of a command line that Hydra does not read; for a text setting, the text.

    Raises:
        ConfigError: it cannot be read.
    """
    may_be_null = text_settings().get(key)
    if may_be_null is not None and text[:1] not in ("'", '"', "["):
        return None if may_be_null and text == "null" else text
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{key}={text}: cannot be read ({' '.join(str(error).split())})") from error


def unknown_key(key: str, valid: Iterable[str], *, chosen: Mapping[str, str] | None = None) -> ConfigError:
    """Returns the error for a `key` whose last part is not among `valid`, such as "cluster.worker".

    Args:
        chosen: group → name of the choice in force. A key of another choice is named together with that choice.
    """
    names = sorted(valid)
    end = key.rfind(".") + 1
    above, last = key[:end], key[end:]
    owners = _owners(chosen or {})
    level = f"Valid{f' in {above[:-1]}' if above.endswith('.') else ''}: {', '.join(names) or 'nothing'}"
    if owner := owners.get(key):
        return ConfigError(f"unknown key {key}: it belongs to {owner}. {level}")
    if sentence := meant(key, ()):
        return ConfigError(f"unknown key {key}.{sentence} {level}")
    moved = next((new for old, new in KEYS.items() if key in (old, old.rpartition(".")[2])), "")
    foreign = moved if moved in owners else meaning(last).setting
    if True in VALUES.get(moved, {}):  # it was a switch
        foreign = f"{moved}={VALUES[moved][True]['name']}"
    guesses = [foreign] if foreign else _called(last, owners)
    if not guesses and (likely := nearest(last, names)):
        guesses = [above + likely]
    if not guesses:
        parts = [other.rpartition(".")[2] for other in owners]
        near = difflib.get_close_matches(last, parts, n=1, cutoff=0.8)
        guesses = _called(near[0], owners) if near else []
    hint = f" Did you mean {' or '.join(guesses)}?" if guesses else ""
    return ConfigError(f"unknown key {key}.{hint} {level}")


def chosen_in(plain: Mapping[Any, Any]) -> dict[str, str]:
    """Returns group → name of the choice in force in a tree of settings, which may be damaged."""
    groups = {group: plain.get(group) for group in CHOICES}
    return {group: str(found.get("name")) for group, found in groups.items() if isinstance(found, Mapping)}


def _called(last: str, owners: Mapping[str, str]) -> list[str]:
    """Returns the keys whose last part is `last`: those in force, or else each with the choice that it belongs to."""
    found = [key for key in owners if key.rpartition(".")[2] == last]
    return [key for key in found if not owners[key]] or [f"{key} (of {owners[key]})" for key in found]


def _owners(chosen: Mapping[str, str]) -> dict[str, str]:
    """Returns every key with the choices that have it, as "model=gpt", or "" if the choice in force is one of them."""
    owners = {"run.name": "", "run.group": ""}
    for part, inner in plain_defaults().items():
        names = [f"{part}.{name}" for name in inner] if isinstance(inner, dict) else []
        owners |= dict.fromkeys([part, *names], "")
    for group, choices in CHOICES.items():
        for key in {item.name: None for choice in choices.values() for item in fields(choice) if item.name != "name"}:
            having = [name for name, choice in choices.items() if hasattr(choice, key)]
            is_valid = chosen.get(group) in having or len(having) == len(choices)
            owners[f"{group}.{key}"] = "" if is_valid else " or ".join(f"{group}={name}" for name in having)
    return owners


def key_of_option(option: str) -> str:
    """Returns the key that is probably meant by an option of the shell's form: "--batch-size" → "batch.global_size"."""
    name, owners = option.strip("-").replace("-", "_"), _owners({})
    found = meaning(name).setting or name
    return found if found in owners else next(iter(_called(found, owners)), found).partition(" ")[0]


def unknown_choice(group: str, name: str) -> ConfigError:
    """Returns the error for a choice that a group does not offer, such as model=gtp."""
    if group in OWN and "." in name:
        remedy = f"for one of your own write a colon before its name: {group}={':'.join(name.rsplit('.', 1))}"
        return ConfigError(f"unknown choice {group}={name}; {remedy}")
    return not_among(group, name, CHOICES[group])


def not_among(group: str, name: str, choices: Iterable[str]) -> ConfigError:
    """Returns the error for a choice that is not among those of a group."""
    hint = did_you_mean(name, choices, f"{group}={{}}")
    return ConfigError(f"unknown choice {group}={name}.{hint} Valid: {', '.join(sorted(choices))}")


def wrong_type(key: str, value: object, expected: object) -> ConfigError:
    """Returns the error for a value of the wrong type."""
    text = "null" if value is None else f"{str(value).lower() if isinstance(value, bool) else value!s:.200}"
    if is_dataclass(expected) and expected is not Config and key not in CHOICES:
        keys = [f"{key}.{item.name}" for item in fields(expected) if meaning_of(cast(type, expected), item.name)]
        return ConfigError(f"{key}={text}: is a group of settings; set one of them, as {keys[0]}=…: {', '.join(keys)}")
    hint = f".{did_you_mean(value, map(str, get_args(expected)))}" if get_origin(expected) is Literal else ""
    if str in (expected, *get_args(expected)) and type(value) in (bool, int, float):
        hint = "; a file has it in quotes, or else 5e2 is 500.0"
    elif isinstance(value, str) and re.fullmatch(r"[-+.\d]+(e[-+]?\d+)?", value):
        hint = ", got a text: leave out its quotes, or write ${oc.decode:…} around it"
    return ConfigError(f"{key}={text}: expected {described(expected)}{hint}".rstrip("."))


class _Settings(Maker):
    """A maker of settings that knows the groups of choices, and whose errors say what was probably meant."""

    def record(self, kind: Any, plain: Mapping[str, Any], key: str) -> Any:
        """Returns an instance of a settings class; of a group, that of the choice in force."""
        default = kind
        if key in CHOICES:
            name = str(plain.get("name"))
            if name not in CHOICES[key] and not (key in OWN and is_address(name)):
                raise unknown_choice(key, name)
            default = partial(choose, key, name)
            kind = type(choose(key, name))
        kinds = get_type_hints(kind)  # also of what a choice knows that is no setting
        hints = {item.name: kinds[item.name] for item in fields(kind)}
        prefix = f"{key}." if key else ""
        for name in plain:
            if name not in hints:
                chosen = {key: str(plain.get("name"))} if key else chosen_in(plain)
                raise unknown_key(f"{prefix}{name}", hints, chosen=chosen)
        values = {name: self.made(hints[name], value, f"{prefix}{name}") for name, value in plain.items()}
        values |= {name: at_home(value) for name, value in values.items() if name in PATHS and isinstance(value, str)}
        try:
            return default(**values)
        except ConfigError as error:  # a policy knows only its own fields
            raise ConfigError(f"{prefix}{error}") from error

    def refused(self, expected: Any, plain: Any, key: str) -> Any:
        """Raises the error for a value of the wrong type."""
        if type(plain) is float and float in (expected, *get_args(expected)) and get_origin(expected) is not list:
            return plain  # it is not finite, which is out of bounds
        raise wrong_type(key or "the configuration", plain, expected)
