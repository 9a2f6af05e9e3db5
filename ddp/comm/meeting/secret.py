"""The secret by which the ranks of a launch know each other: no other user of their hosts can read it.

    ddp.launch, scripts/ddp train   the launcher draws one, in a folder that only its user can enter
    torchrun, srun, mpirun, …       DDP_SECRET, if the user has set it: the same for all ranks
    otherwise                       there is none, and any process that reaches the ranks' ports can be one of them

With the secret, the ranks meet in a store that others cannot reach, or cannot write to unnoticed (`private_store.py`),
and both ends of each connection prove that they know it (`../opening.py`). It is never on a command line, which every
user of a host can read. It is in a worker's environment, which only the same user can read, and which a rank's child
processes inherit.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddp.errors import ConfigError
from ddp.process.files import ANYTHING, scratch_folder, why_shared

VARIABLE, FOLDER, MEMORY = "DDP_SECRET", "DDP_PRIVATE_FOLDER", "memory"
MIN_LENGTH = 16
_NAME = "ddp-secret-"  # older versions, which do not lock their folders, use "ddp-private-"


@contextlib.contextmanager
def private_folder(value: bytes = b"") -> Iterator[Path]:
    """Yields a new folder that only this user can enter, with a new secret in it, for the ranks of one launch.

    It is in memory if possible, because ranks write there all the time, and must not wait for a busy disk.

    Args:
        value: the secret of a launch that has one on other hosts.
    """
    with contextlib.ExitStack() as until_end:
        try:
            folder = until_end.enter_context(_with_secret("/dev/shm", value))
        except OSError:  # it does not exist, or cannot be written
            folder = until_end.enter_context(_with_secret(tempfile.gettempdir(), value))
        yield folder


@contextlib.contextmanager
def _with_secret(place: str, value: bytes) -> Iterator[Path]:
    with scratch_folder(Path(place), _NAME) as folder:
        (folder / VARIABLE).write_bytes(value or secrets.token_hex(32).encode())
        yield folder


@contextlib.contextmanager
def holding_memory(folder: Path) -> Iterator[None]:
    """Holds empty memory for two checkpoints in this process, and leaves the paths of it in the private folder.

    It takes no space until a rank writes there, and ends with this process, however that ends.
    """
    names = ("ddp-checkpoint-0", "ddp-checkpoint-1") if hasattr(os, "memfd_create") else ()  # Linux only
    descriptors = list(map(os.memfd_create, names))
    try:
        (folder / MEMORY).write_text("".join(f"/proc/{os.getpid()}/fd/{each}\n" for each in descriptors))
        yield
    finally:
        for each in descriptors:
            os.close(each)


def held_memory() -> list[str]:
    """Returns the paths of the memory that the launcher of this rank holds; empty outside of a launch of ranks."""
    folder, port = Path(os.environ.get(FOLDER, "")), os.environ.get("MASTER_PORT")
    is_rank, file = port and folder.name == port, folder.parent / MEMORY  # and not the child of one: `private_part`
    return file.read_text().split() if is_rank and file.exists() else []


def take_secret(folder: Path, *, is_meeting: bool = True) -> None:
    """Puts the secret in the launcher's folder into the environment of this process.

    Args:
        is_meeting: the ranks meet in this folder.

    Raises:
        ConfigError: other users have rights on the folder.
    """
    if why := why_shared(folder, folder.lstat(), rights=ANYTHING):
        raise ConfigError(f"{why}: one of them may have put it there; delete it, and start again")
    os.environ[VARIABLE] = (folder / VARIABLE).read_text()
    os.environ[FOLDER] = str(folder / (os.environ.get("MASTER_PORT", "") if is_meeting else "elsewhere"))


def private_part(port: int) -> Path | None:
    """Returns the private folder for the ranks that meet at this port; None outside of a launch by this package.

    Child processes of a rank inherit its environment, but if they meet at another port, they are ranks of another job.
    """
    folder = Path(os.environ.get(FOLDER, ""))
    return folder if folder.name == str(port) else None


def secret() -> bytes:
    """Returns the secret of this rank's launch; b"" if it has none.

    Raises:
        ConfigError: it could be guessed.
    """
    value = os.environ.get(VARIABLE, "")
    if value and len(value) < MIN_LENGTH:
        raise ConfigError(
            f"{VARIABLE} has {len(value)} characters: take at least {MIN_LENGTH} that cannot be guessed, the same for "
            f"all ranks, such as the output of: python -c 'import secrets; print(secrets.token_hex())'"
        )
    return value.encode()


def code_of(key: bytes, *parts: bytes) -> bytes:
    """Returns 32 bytes that cannot be computed without the key: HMAC-SHA-256 (RFC 2104) of all parts."""
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "little") + part for part in parts), "sha256")
