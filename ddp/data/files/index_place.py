"""Says where an index is kept: in the folder that the user gives, or in a private one if others may write there.

    data/index/tar-4f1d….index                 the user's own folder
    ~/.cache/ddp/81c2…/tar-4f1d….index         in its place, if that folder is a team's, or another user's

Whoever can forge an index decides which bytes are a sample. So each member of a team makes their own index, once, and
no member's run ends because another one was first.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from ddp.errors import ConfigError
from ddp.process.files import make_folder
from ddp.process.owners import why_shared


def index_place(given: Path) -> Path:
    """Returns where this user's index is, or would be; the same in all of the user's processes.

    Args:
        given: where the index is in the folder that the user has given, absolute.

    Raises:
        ConfigError: others may write in the given folder, and there is no private one.
    """
    folder = given.parent
    if not (folder.is_dir() and (why := why_shared(folder, folder.stat()))):
        return given
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    try:
        private = Path.home() / ".cache" / "ddp" / digest
        if not private.is_dir():
            make_folder(private.parent)
            private.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError) as error:  # of a user without a home
        raise ConfigError(
            f"{why}, and no index of yours can be in its place ({error}): give another index_dir"
        ) from error
    if why := why_shared(private, private.stat()):
        raise ConfigError(f"{why}, so no index can be there: make it yours alone, or give another index_dir")
    return private / given.name
