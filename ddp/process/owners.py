"""Checks whether other users could have written a file, could change it, or could replace it.

It goes by owners and modes. Which users count as others:

    root, this user                                                 are trusted
    a group of this user alone, as many systems make for each       counts as this user
    everyone else who may write                                     is another user

    why_shared           one file or folder: its owner and its mode
    why_in_other_hands   a path: also its links, and the folders above, in which others could rename entries
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

NOTHING, WRITE, ANYTHING = 0o0, 0o2, 0o7
"""Rights of others, as bits of a mode. NOTHING: only the owner counts."""

_NOBODY = 65534  # apparent owner of root's folders in a container whose user namespace lacks root


def why_shared(path: Path, status: os.stat_result, *, rights: int = WRITE) -> str:
    """Returns the reason why users other than this one and root have rights on a file or folder; "" if they have none.

    Args:
        status: of the path, or of the file that was opened there.
        rights: the ones that others must not have.
    """
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to {user_name(status.st_uid)}"
    if status.st_mode & rights or (status.st_mode >> 3 & rights and not _is_alone_in(status.st_gid)):
        return f"others may {'write' if rights == WRITE else 'enter'} {path}"
    return ""


def why_in_other_hands(path: Path) -> str:
    """Returns the reason why other users control a path; "" if they do not.

    The current folder and those above it are not checked, because the user has chosen to be there.

    Raises:
        OSError: the path does not exist.
    """
    here = Path.cwd()
    for way in dict.fromkeys((path.absolute(), path.resolve())):
        whys = [why_shared(way, way.lstat(), rights=NOTHING), why_shared(way, way.stat())]
        whys += [_why_others_rename_in(folder) for folder in way.parents if not here.is_relative_to(folder)]
        if why := next(filter(None, whys), ""):
            return why
    return ""


def _why_others_rename_in(folder: Path) -> str:
    """Returns the reason why others may replace this user's entries in a folder; "" if they may not."""
    status, link = folder.stat(), folder.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid != _NOBODY and (why := why_shared(folder, link, rights=NOTHING)):
        return why  # its owner may retarget a link
    is_sticky = status.st_mode & stat.S_ISVTX  # as in /tmp: only owners rename their entries
    rights = NOTHING if is_sticky else WRITE
    return "" if status.st_uid == _NOBODY else why_shared(folder, status, rights=rights)


def _is_alone_in(group: int) -> bool:
    """Returns True for the group that many systems make for each user, with the user's name and no other member."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_gid == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def user_name(uid: int) -> str:
    """Returns the name of a user; the number if the host has no name for it."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
