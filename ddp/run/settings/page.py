"""Writes out every setting with its default, its type and its meaning: `--help`, and docs/settings.md.

    scripts/ddp train --help                                    prints the page
    .venv/bin/python -m ddp.run.settings.page > docs/settings.md    writes it for the web

All of it is taken from config.py and choices.py beside this file, without Hydra and torch, so that it is there at once.
"""

from __future__ import annotations

import json
import textwrap
import types
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ddp.process.terminal import say
from ddp.run.settings.config import CHOICES, MEANINGS, OWN, Config
from ddp.run.settings.groups import GROUPS
from ddp.setting import metadata_of

WIDTH = 100
TYPE_AT, MEANING_AT = 34, 52
"""Where the columns begin; the first one is what can be typed on the command line."""
USAGE = """\
Trains a model on several workers. Each SETTING=VALUE replaces a default below ("…": each choice has
its own).

  ddp train [SETTING=VALUE …] [OPTION …]
  ddp train data=cifar10 model=resnet18 cluster.workers=4
  ddp train -m cluster.workers=1,2              a sweep: one run for each value
  ddp train run.name=mine resume=auto           continue the run in runs/mine

  -m, --multirun    a sweep over the values that commas separate
  --cfg job         print the settings that the run would have, and end
  --hydra-help      Hydra's own options: composing, overriding, sweeping
  -h, --help        this page"""


def page(command: str = "scripts/ddp") -> str:
    """Returns the page that `--help` prints. `command`: what the user types before `train`."""
    default = Config()
    usage = USAGE.replace("  ddp train", f"  {command} train")
    blocks = [usage, "\n".join(["The run as a whole", *_lines(default, "")])]
    for part in fields(Config):
        inner = getattr(default, part.name)
        if part.name in CHOICES:
            blocks.append("\n".join(_choice_lines(part.name, inner.name)))
        elif is_dataclass(inner):
            blocks.append("\n".join([f"{part.name}: {_purpose(type(inner))}", *_lines(inner, f"{part.name}.")]))
    return "\n\n".join([*blocks, "\n".join(_recipe_lines())])


def markdown() -> str:
    """Returns docs/settings.md."""
    return (
        "# Settings\n\n`scripts/ddp train --help` prints this page. Its source is `ddp/run/settings/config.py`; "
        "`.venv/bin/python -m ddp.run.settings.page > docs/settings.md` writes it anew.\n\n"
        f"```text\n{page()}\n```\n"
    )


def _lines(settings: Any, prefix: str) -> Iterator[str]:
    """Yields the lines of the settings that have a meaning; those without are not the user's to set."""
    for item in fields(settings):
        if metadata_of(type(settings), item.name):
            yield _setting(prefix, item, type(settings), _plain(getattr(settings, item.name)))


def _choice_lines(group: str, usual: str) -> Iterator[str]:
    """Yields the lines of a group: what its choices share, and then each choice with what is its own."""
    base = GROUPS[group]
    shared = {item.name: item for item in fields(base) if item.name != "name"}
    yield f"{group}=CHOICE: {_purpose(base)} (default: {usual})"
    same = {name for name in shared if len({repr(getattr(choice, name)) for choice in CHOICES[group].values()}) == 1}
    for name, item in shared.items():
        default = _plain(getattr(CHOICES[group][usual], name)) if name in same else "…"
        yield _setting(f"{group}.", item, base, default)
    for choice in CHOICES[group].values():
        yield _columns(f"{group}={choice.name}", "", MEANINGS[group][choice.name], indent=2)
        for item in fields(choice):
            if item.name in shared and item.name not in same:
                yield f"    {group}.{item.name}={_plain(getattr(choice, item.name))}"
            elif item.name not in shared and item.name != "name":
                yield _setting(f"{group}.", item, type(choice), _plain(getattr(choice, item.name)), indent=4)
    if own := OWN.get(group):
        yield _columns(f"{group}=MODULE:NAME", "", _purpose(own), indent=2)
        for item in fields(own):
            if item.name not in (*shared, "name"):
                yield _setting(f"{group}.", item, own, "{}", indent=4)


def _recipe_lines() -> Iterator[str]:
    """Yields the line of each recipe: its file's second line says what it is."""
    yield "recipe=CHOICE: settings that belong together (default: none)"
    for path in sorted((Path(__file__).parent / "conf" / "recipe").glob("*.yaml")):
        about = path.read_text(encoding="utf-8").splitlines()[1]
        yield _columns(f"recipe={path.stem}", "", about.removeprefix("# ").removesuffix("."), indent=2)


def _setting(prefix: str, item: Field[Any], kind: type, default: str, *, indent: int = 2) -> str:
    """Returns the lines of one setting of the class `kind`."""
    expected = _type(get_type_hints(kind)[item.name])
    return _columns(f"{prefix}{item.name}={default}", expected, metadata_of(kind, item.name)["meaning"], indent=indent)


def _columns(key: str, kind: str, meaning: str, *, indent: int) -> str:
    """Returns the line of one setting, with its meaning wrapped below itself."""
    first = f"{' ' * indent}{key}".ljust(TYPE_AT - 1) + f" {kind}"
    start = MEANING_AT if kind else TYPE_AT
    return textwrap.fill(
        meaning,
        WIDTH,
        initial_indent=first.rstrip().ljust(start - 1) + " ",
        subsequent_indent=" " * start,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _type(kind: Any) -> str:
    """Returns the name of a type, or its choices."""
    if get_origin(kind) in (Union, types.UnionType):
        return "|".join(_type(option) for option in get_args(kind))
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is list and get_origin(get_args(kind)[0]) is Literal:
        return "list of words"
    if get_origin(kind) is list:
        return f"list of {_type(get_args(kind)[0])}s"
    if get_origin(kind) is dict:
        return "mapping"
    return {int: "integer", float: "number", bool: "true|false", str: "text"}.get(kind, "null")


def _plain(value: Any) -> str:
    """Returns a value as it is typed on the command line."""
    if value == "":
        return "''"
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":")).replace('"', "")


def _purpose(kind: type) -> str:
    """Returns the first sentence of a class's docstring, as the end of a line."""
    text = " ".join((kind.__doc__ or "").split()).removesuffix(".")
    return text[0].lower() + text[1:]


if __name__ == "__main__":
    say(markdown().removesuffix("\n"))
