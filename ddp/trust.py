"""Finds out whether others could have written which code a run's files name, before any of it is imported.

    RUN_DIR/config.yaml      model: mine:Net, run.code: /home/bob/project
             │
             ├──▶  resume=RUN_DIR, ddp.load(RUN_DIR).model()      import mine from there, and say so
             └──▶  … of a folder that others may write             refuse, unless trust=true

Whoever may write config.yaml decides what is imported. So it must be this user's or root's, and so must its folder.

Read before: `address.py`. Read next: `config.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ddp.errors import ConfigError
from ddp.files import others_may_write, user_name
from ddp.log import log


def check_trust(parts: Mapping[str, str], *, code: str, settings: Path, trust: bool) -> None:
    """Says which code is about to be imported because a run's config.yaml names it.

    Args:
        parts: setting → address.
        code: the folder that the addresses are searched in.
        settings: the config.yaml.
        trust: the user has said that this is right, whoever wrote the file.

    Raises:
        ConfigError: others could have written the file, and `trust` is False.
    """
    if not parts:
        return
    listed = ", ".join(f"{key}={address}" for key, address in parts.items())
    if not trust and (why := _in_other_hands(settings)):
        raise ConfigError(
            f"{why}, and the settings there would run code of {code or 'this folder'} as you: {listed}; look at that "
            "code, then say trust=true (in Python trust=True)"
        )
    log.warning("running code of %s, as %s says: %s", code or Path.cwd(), settings, listed)


def _in_other_hands(settings: Path) -> str:
    """Returns in words why others decide what a config.yaml says; "" if they do not."""
    for path in (settings.parent, settings):
        for owner in (path.lstat().st_uid, path.stat().st_uid):  # of a link, and of what it leads to
            if owner not in (0, os.geteuid()):
                return f"{path} belongs to {user_name(owner)}"
        if others_may_write(path.stat()):
            return f"others may write {path}"
    return ""
