"""A folder for as long as a block runs, which does not outlive a killed process for long.

Whoever makes such a folder holds it (`files.hold`). The kernel lets go of it when the process ends, however it ends,
and the next process that makes one in the same place removes those that nobody holds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddp.errors import ConfigError
from ddp.process.files import hold

_NEW = ".new"  # until it is held, nobody else looks for it


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yields a new folder that only this user can enter, and removes it at the end of the block.

    Args:
        parent: where it is, on a file system with locks.
        prefix: begins its name, and nobody else's, because folders of that name that nobody holds are removed.

    Raises:
        OSError: it cannot be made.
    """
    for other in parent.glob(f"{prefix}*"):
        _remove_if_left(other)
    folder = Path(tempfile.mkdtemp(prefix=f"{_NEW}{prefix}", dir=parent))
    held = hold(folder)
    try:
        folder = folder.rename(parent / folder.name.removeprefix(_NEW))
        yield folder
    finally:
        held.close()
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_left(folder: Path) -> None:
    """Removes the folder of a process that was killed."""
    with contextlib.suppress(ConfigError, OSError):  # another process holds it, or it has just gone
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            hold(folder).close()
            shutil.rmtree(folder)
