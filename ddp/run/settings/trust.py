"""Finds out whether others could have written which code a run's files name, before any of it is imported.

    RUN_DIR/config.yaml      model: mine:Net, run.code: /home/bob/project
             │
             ├──▶  resume=RUN_DIR, ddp.load(RUN_DIR).model()      import mine from there, and say so
             └──▶  … of a folder that others may write             refuse, unless trust=true

Whoever may write config.yaml decides what is imported, and whoever may write the code decides what it does. So both
must be this user's or root's, with their folders. The folder in which the user gives the command is their own choice,
as for a new run, and so is whatever else Python searches.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from importlib.util import cache_from_source
from pathlib import Path

from ddp.errors import ConfigError
from ddp.process.files import why_in_other_hands
from ddp.process.log import log


def check_trust(parts: Mapping[str, str], *, code: str, settings: Path, trust: bool) -> None:
    """Says which code is about to be imported because a run's config.yaml names it.

    Args:
        parts: setting → address.
        code: the folder that the addresses are searched in.
        settings: the config.yaml.
        trust: the user has said that this is right, whoever wrote the file.

    Raises:
        ConfigError: others could have written the file or the code, and `trust` is False.
    """
    if not parts:
        return
    listed = ", ".join(f"{key}={address}" for key, address in parts.items())
    if not trust and (why := _why_in_other_hands(parts, Path(code).resolve(), settings)):
        raise ConfigError(
            f"{why}, and {settings} would run code of {code or 'this folder'} as you: {listed}; look at that code, "
            "then say trust=true (in Python trust=True)"
        )
    log.warning("running code of %s, as %s says: %s", code or Path.cwd(), settings, listed)


def _why_in_other_hands(parts: Mapping[str, str], code: Path, settings: Path) -> str:
    """Returns in words why others decide what the settings say, or what the code does; "" if they do not."""
    paths = [settings.parent, settings]
    if code != Path.cwd():
        paths += [path for address in parts.values() for path in _imported_from(code, address)]
    return next(filter(None, map(why_in_other_hands, dict.fromkeys(paths))), "")


def _imported_from(code: Path, address: str) -> Iterator[Path]:
    """Yields the files and folders in `code` from which an import of this address would read."""
    importlib.invalidate_caches()
    search = [*(each for each in sys.path if Path(each).resolve() != code), str(code)]
    for part in address.partition(":")[0].split("."):
        spec = PathFinder.find_spec(part, search)  # of a whole name it would ask for the package, which is not imported
        if spec is None:
            return
        search = list(spec.submodule_search_locations or ())
        files = [spec.origin, cache_from_source(spec.origin)] if spec.has_location and spec.origin else []
        ours = [path for path in map(Path, [*search, *files]) if path.is_relative_to(code)]
        ours += [path.parent for path in ours]
        yield from (path for path in [code, *ours] if ours and path.exists())
