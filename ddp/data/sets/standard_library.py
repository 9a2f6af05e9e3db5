"""Text for everyone: the source code of Python's own standard library, as bytes. Nothing to download.

    …/lib/python3.11/argparse.py   sha256("argparse.py") → train
    …/lib/python3.11/ast.py        sha256("ast.py")      → train      9.4 MB
    …/lib/python3.11/csv.py        sha256("csv.py")      → held out   0.5 MB

    train = the files of one side, in the order of their paths, one after the other:
            b0 b1 b2 … │ b_c … │ b_2c … │            windows that do not overlap, c = context
    sample k = (x, y):   x = b[kc : kc + c],  y = b[kc + 1 : kc + c + 1]

So every byte but the first is a target exactly once per epoch (a last partial window is left out), and bits per byte
of the held-out side are comparable with any other model of the same bytes (`train/tasks/ngram.py` computes some).

Whole files are held out, by a hash of the path: the same file is on the same side on every machine, in every run. The
corpus has no tests, no generated tables (`encodings`, `pydoc_data`: hundreds of near copies, of which one side would
give away the other), no files of this one build (`_sysconfigdata…`, `config-…`), and nothing that was installed later.
The bytes depend on Python's version; `Splits.name` has it, with a digest.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ddp.data.samples import Splits, WholeBatches
from ddp.errors import ConfigError

_TESTS = {"test", "tests", "idle_test"}
_GENERATED = {"encodings", "pydoc_data", "__pycache__", "__phello__"}
_INSTALLED = {"site-packages", "dist-packages"}
_SKIPPED_FOLDERS = _TESTS | _GENERATED | _INSTALLED
_SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "config-")
_HELD_OUT = 18  # of 256, which is some 7 % of the files


class Corpus(NamedTuple):
    """Holds the raw bytes of both sides."""

    train: bytes
    held_out: bytes


class Windows(WholeBatches):
    """A data set of next-token samples over a run of tokens, kept in their type: as uint8, one byte per byte.

    Args:
        tokens: [n]
        context: length of an input, in tokens.

    Raises:
        ConfigError: the text is too short for a single window.
    """

    def __init__(self, tokens: Tensor, *, context: int) -> None:
        if not 1 <= context < len(tokens):
            kind = "bytes" if tokens.dtype == torch.uint8 else "tokens"
            raise ConfigError(
                f"context={context} does not fit a text of {len(tokens)} {kind}; choose 1 … {len(tokens) - 1}"
            )
        self.context = context
        self._tokens = tokens
        self._offsets = torch.arange(context + 1, device="cpu")

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        window = self._tokens[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns the windows at `indices`: (x, y), both [k, context] int64."""
        starts = torch.as_tensor(indices, dtype=torch.int64, device="cpu") * self.context
        windows = self._tokens[starts[:, None] + self._offsets].long()
        return windows[:, :-1], windows[:, 1:]


class ByteWindows(Windows):
    """Cuts the bytes of a text into windows."""

    def __init__(self, text: bytes, *, context: int) -> None:
        super().__init__(torch.frombuffer(bytearray(text), dtype=torch.uint8), context=context)


def load_standard_library(*, context: int = 256) -> Splits:
    """Returns both sides, as windows of `context` bytes.

    Raises:
        ConfigError: this Python came without its sources, or `context` is longer than they are.
    """
    text = corpus()
    digest = hashlib.sha256(text.train + text.held_out).hexdigest()[:12]
    return Splits(
        train=ByteWindows(text.train, context=context),
        test=ByteWindows(text.held_out, context=context),
        sample_shape=(context,),
        num_classes=256,
        name=f"standard library of Python {platform.python_version()}, sha256 {digest}",
    )


def corpus(library: str | Path | None = None) -> Corpus:
    """Reads all source files under `library`, by default this Python's own; some 10 MB, a third of a second.

    Raises:
        ConfigError: one of the two sides would be empty.
    """
    library = Path(library or sysconfig.get_path("stdlib"))
    sides: tuple[list[bytes], list[bytes]] = [], []
    for name in sorted(path.relative_to(library).as_posix() for path in library.rglob("*.py")):
        if not _is_skipped(name):
            sides[is_held_out(name)].append((library / name).read_bytes())
    text = Corpus(*(b"".join(files) for files in sides))
    if not all(text):
        raise ConfigError(
            f"{library} holds no source text of Python's standard library (a zipped or stripped installation); "
            "use a Python that has it, or train on images: data=digits needs no download"
        )
    return text


def is_held_out(name: str) -> bool:
    """Returns True if the file of this relative path (with forward slashes) is held out."""
    return hashlib.sha256(name.encode()).digest()[0] < _HELD_OUT


def _is_skipped(name: str) -> bool:
    return any(part in _SKIPPED_FOLDERS or part.startswith(_SKIPPED_PREFIXES) for part in name.split("/"))
