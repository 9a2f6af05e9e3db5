"""Names commands as they work where the user started this process, and folders as seen from there.

A command that this package prints begins as the user's own did:

    scripts/ddp train …             the script says under which name it was called, in DDP_COMMAND
    python recipes/train.py …       the interpreter remembers what was typed; `python -m ddp train …` as well
    torchrun …                      python -m ddp train …, because torchrun's own arguments do not reach its processes
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path


def program() -> str:
    """Returns the words that the user types before the name of a command."""
    return shlex.quote(os.environ.get("DDP_COMMAND", "")) if "DDP_COMMAND" in os.environ else "python -m ddp"


def train_command(*settings: str) -> str:
    """Returns a command line that trains with these settings, as the user would type it in the same folder."""
    begin = len(sys.orig_argv) - len(sys.argv[1:])
    is_changed = [*map(_bare, sys.orig_argv[begin:])] != [*map(_bare, sys.argv[1:])]
    if "DDP_COMMAND" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ or is_changed:
        typed = f"{program()} train"
    else:
        typed = shlex.join(sys.orig_argv[:begin])
    return " ".join([typed, *map(shlex.quote, settings)])


def typed_settings(*without: str) -> list[str]:
    """Returns the settings of this process's command line, except those of some keys, and of Hydra's own."""
    settings = [argument.lstrip("+") for argument in sys.argv[1:] if "=" in argument and not argument.startswith("-")]
    # The launcher quotes paths, and will do so again.
    settings = [
        re.sub(r'^(data\.(?:(?:test_|validation_)?path|target|text)=)"(.*)"$', r"\1\2", each) for each in settings
    ]
    return [each for each in settings if not each.startswith(("hydra.", *(f"{key}=" for key in without)))]


def _bare(setting: str) -> str:
    """Returns a setting without what the launcher adds for Hydra."""
    return setting.lstrip("+").replace('"', "")


def setting_for(run_dir: Path, name: str) -> str:
    """Returns the setting that names this run's folder on the command line. `name`: its run.name."""
    if run_dir.resolve() == Path("runs", name).resolve():
        return f"run.name={_quoted(name)}"
    return f"hydra.run.dir={_quoted(str(shown(run_dir)))}"


def shown(folder: Path) -> Path:
    """Returns the folder relative to the current one if it lies inside."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def _quoted(value: str) -> str:
    """Returns a value as Hydra reads it back: in quotes if it has a letter that means something to Hydra."""
    if re.fullmatch(r"[\w/.+@%-]+", value, re.ASCII):
        return value
    escaped = re.sub(r'(\\+)(?="|$)', r"\1\1", value).replace('"', r"\"")
    return f'"{escaped}"'
