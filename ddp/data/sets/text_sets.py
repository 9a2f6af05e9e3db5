"""Text as windows of `context` tokens, as language models are trained on.

    tokens               in flat binary files, read where they lie      `TokenSet`, which follows
    text in rows         its tokens lie in memory                       `Tokenizer`
    standard library     Python's own source code, as bytes             nothing to download

    a.bin     t0 t1 t2 … │ t_c … │ t_2c … │           uint16, one after the other (nanoGPT's format); or a.npy
    sample k = (x, y):   x = t[kc : kc + c],  y = t[kc + 1 : kc + c + 1],  both int64

Windows do not overlap, and do not cross files. The last tokens of a file that fill no window are left out.

The index has 16 bytes for each window. A window is one pread(2), and the kernel keeps the file in memory as it would a
map. A batch is filled row by row, without a tensor for each window: some 300 million tokens a second for c = 1024,
where a memory map would give six times as many and a SIGBUS for a file that is cut off.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from array import array
from collections.abc import Callable, Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp.data.files.file_set import FileSet, Format, IndexedFile, Layout
from ddp.data.files.readers import Reader, check_not_compressed
from ddp.data.files.storage import Addresses
from ddp.data.samples import Splits, WholeBatches
from ddp.errors import ConfigError

_DTYPES = ("uint8", "uint16", "int32", "uint32")
_NPY = b"\x93NUMPY"
_NUM_CHECKED = 4096  # tokens at the beginning of the first file
_NUM_NEEDED = 64  # of them, to tell the dtype
_WIDER = {1: "uint16", 2: "uint32"}  # by bytes of a token


class TokenFiles(Format):
    """Flat files of tokens, raw or as NumPy saves them.

    Args:
        context: tokens in an input.
        dtype: of the tokens of a raw file: "uint8", "uint16", "int32" or "uint32". A .npy file says it itself.
        header_bytes: to skip at the beginning of a raw file.
        vocab_size: a token is one of 0 … vocab_size - 1; None: any number.
    """

    kind = "tokens"
    suffixes = (".bin", ".npy")
    draws_nothing = True

    def __init__(
        self, *, context: int, dtype: str = "uint16", header_bytes: int = 0, vocab_size: int | None = None
    ) -> None:
        if context < 1 or header_bytes < 0:
            raise ConfigError(f"context={context}, header_bytes={header_bytes}: a window has at least one token")
        if vocab_size is not None and vocab_size < 1:
            raise ConfigError(f"vocab_size={vocab_size}: a vocabulary has at least one token")
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype={dtype!r} of tokens: choose one of {', '.join(_DTYPES)}")
        self.context, self.dtype, self.header_bytes, self.vocab_size = context, dtype, header_bytes, vocab_size

    def settings(self) -> dict[str, Any]:
        """Returns the settings that the index depends on."""
        return {"context": self.context, "dtype": self.dtype, "header_bytes": self.header_bytes}

    def index(self, reader: Reader) -> Layout:
        """Computes the number of windows of a file from its size."""
        if reader.address.endswith((".gz", ".bz2", ".xz", ".zst")):  # tokens may begin like this, too
            check_not_compressed(reader)
        is_npy = reader.read(0, min(6, reader.facts.size)) == _NPY
        first, dtype = _npy_header(reader) if is_npy else (self.header_bytes, np.dtype(self.dtype).newbyteorder("<"))
        num_bytes = reader.facts.size - first
        if num_bytes < 0 or num_bytes % dtype.itemsize:
            raise ConfigError(
                f"{reader.address} has {num_bytes} bytes of tokens, and {dtype.name} has {dtype.itemsize}: it is cut "
                "off, or of another dtype"
            )
        num_tokens = num_bytes // dtype.itemsize
        if num_tokens <= self.context:
            raise ConfigError(
                f"{reader.address} has {num_tokens} tokens, too few for a window of context={self.context} and its "
                f"targets: choose 1 … {num_tokens - 1}, or join short files"
            )
        stride = self.context * dtype.itemsize
        starts = first + stride * np.arange((num_tokens - 1) // self.context, dtype=np.int64)
        return Layout(np.stack([starts, starts + stride + dtype.itemsize], axis=1), {"dtype": dtype.str})

    def check(self, files: Sequence[IndexedFile], first: Callable[[], tuple[Reader, int, int]]) -> None:
        """Raises ConfigError if tokens of twice the bytes seem to be read as two each, so that every second one is 0.

        With a large vocabulary every second one is not 0, but holds only the high bits of a token.
        """
        reader, start, _ = first()
        dtype = np.dtype(files[0].notes["dtype"])
        num = min(_NUM_CHECKED, (reader.facts.size - start) // dtype.itemsize)
        tokens = np.frombuffer(reader.read(start, num * dtype.itemsize), dtype=dtype).astype(np.int64)
        rest = 0 if self.vocab_size is None else (self.vocab_size - 1) >> 8 * dtype.itemsize
        if num >= _NUM_NEEDED and tokens[1::2].max() <= rest < tokens[::2].max() and tokens.min() >= 0:
            wider = _WIDER.get(dtype.itemsize)
            remedy = f"take dtype={wider}" if wider else "save them as int32 or uint32"
            found = "0" if not rest else f"at most {rest}"
            raise ConfigError(
                f"{reader.address}: read as {dtype.name}, every second token is {found}, so the tokens have more "
                f"bytes: {remedy}"
            )

    def decode(self, data: bytes, notes: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns a window."""
        tokens = self.tokens(data, notes).astype(np.int64)
        if self.has_unknown(tokens):
            extreme = tokens.min() if tokens.min() < 0 else tokens.max()
            raise ValueError(
                f"it has the token {extreme}, and vocab_size={self.vocab_size}, so the file has another vocabulary "
                "or dtype"
            )
        window = torch.from_numpy(tokens)
        return window[:-1], window[1:]

    def tokens(self, data: bytes, notes: dict[str, Any]) -> NDArray[Any]:
        """Returns the tokens in `data`, [context + 1], without a copy."""
        return np.frombuffer(data, dtype=notes["dtype"])

    def has_unknown(self, tokens: NDArray[np.int64]) -> bool:
        """Returns True if a token is not in the vocabulary."""
        if self.vocab_size is None:
            return False
        return int(tokens.view(np.uint64).max(initial=0)) >= self.vocab_size  # negative ones are large there

    def lengths(self, num_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the length of each input, in tokens."""
        return np.full_like(num_bytes, self.context)


def _npy_header(reader: Reader) -> tuple[int, np.dtype[Any]]:
    """Returns where the tokens of a .npy file begin, and their type.

    Raises:
        ConfigError: it is damaged, cut off, or holds something else.
    """
    head = BytesIO(reader.read(0, min(4096, reader.facts.size)))
    try:
        version = np.lib.format.read_magic(head)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(head)
    except Exception as error:  # NumPy lets Python's parser read the header
        cause = " ".join(str(error).split())
        raise ConfigError(f"{reader.address} is cut off or no .npy file ({cause}): write it again") from error
    if len(shape) != 1 or dtype.name not in _DTYPES:
        raise ConfigError(
            f"{reader.address} holds {dtype.name} {list(shape)}: save the tokens as one dimension of "
            f"{', '.join(_DTYPES)}"
        )
    num_bytes = reader.facts.size - head.tell()
    if num_bytes != shape[0] * dtype.itemsize:
        raise ConfigError(
            f"{reader.address} has {num_bytes} bytes of tokens instead of {shape[0] * dtype.itemsize}: it is cut off; "
            "copy it again"
        )
    return head.tell(), dtype


class TokenSet(FileSet, WholeBatches):
    """Windows of tokens as a data set that hands out whole batches.

    Args:
        addresses: as in `FileSet`.
        context, dtype, header_bytes, vocab_size: as in `TokenFiles`.
        files: index_dir, build and storage, as in `FileSet`.

    Raises:
        ConfigError: as `FileSet`.
    """

    def __init__(
        self,
        addresses: Addresses,
        *,
        context: int,
        dtype: str = "uint16",
        header_bytes: int = 0,
        vocab_size: int | None = None,
        **files: Any,
    ) -> None:
        self._tokens = TokenFiles(context=context, dtype=dtype, header_bytes=header_bytes, vocab_size=vocab_size)
        super().__init__(addresses, self._tokens, **files)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns the windows at `indices`: (x, y), both [k, context] int64.

        Raises:
            UnreadableSample: one of them cannot be read, or has a token that is not in the vocabulary.
        """
        windows = np.empty((len(indices), self._tokens.context + 1), dtype=np.int64)
        for row, index in zip(windows, indices, strict=True):
            data, notes = self.raw(int(index))
            row[:] = self._tokens.tokens(data, notes)
        if self._tokens.has_unknown(windows):
            for index in indices:
                self[int(index)]  # raises for the one that has it
        both = torch.from_numpy(windows)
        return both[:, :-1], both[:, 1:]


# --- Text in rows, as windows of its tokens ---------------------------------------------------------------------------
#
#     {"text": "to be"}        t o   b e ⏎ o r … │ …         bytes, with a line end between two texts
#     {"text": "or …"}         12 7 0 31 … │ …               a Hugging Face tokenizer's, with its token of an end
#
# All tokens lie in memory, 1 byte each as bytes and 4 otherwise; for more text than that, write token files.


_ENDS = ("<|endoftext|>", "</s>", "<eos>", "[SEP]")  # of a text, as tokenizers call it


class Tokenizer:
    """Turns texts into tokens.

    Args:
        name: "bytes", or the path of a Hugging Face tokenizer.json.

    Attributes:
        vocab_size: number of different tokens.

    Raises:
        ConfigError: there is no such file, or the package `tokenizers` is not installed.
    """

    def __init__(self, name: str) -> None:
        self._of_file: Any = None if name == "bytes" else _read(name)
        self.vocab_size = 256 if self._of_file is None else int(self._of_file.get_vocab_size())
        ends = [] if self._of_file is None else map(self._of_file.token_to_id, _ENDS)
        self._end = next(([end] for end in ends if end is not None), [])

    def joined(self, texts: FileSet) -> Tensor:
        """Returns the tokens of all texts, [n] uint8 or int32."""
        tokens = bytearray() if self._of_file is None else array("i")
        for text in map(texts.__getitem__, range(len(texts))):
            if isinstance(tokens, bytearray):
                tokens += text.encode() + b"\n"
            else:
                tokens.extend([*self._of_file.encode(text, add_special_tokens=False).ids, *self._end])
        return torch.frombuffer(tokens, dtype=torch.uint8 if isinstance(tokens, bytearray) else torch.int32)


def _read(name: str) -> Any:
    try:
        package = import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(f"data.tokenizer={name}: needs a package: pip install tokenizers") from error
    if not Path(name).is_file():
        raise ConfigError(f"data.tokenizer={name}: no such file; give a tokenizer.json, or bytes")
    try:
        return package.Tokenizer.from_file(name)
    except Exception as error:  # the package has no error class for it
        raise ConfigError(f"data.tokenizer={name}: no tokenizer.json ({' '.join(str(error).split())})") from error


# --- Text for everyone: the source code of Python's own standard library, as bytes ------------------------------------
#
#     …/lib/python3.11/argparse.py   sha256("argparse.py") → train
#     …/lib/python3.11/ast.py        sha256("ast.py")      → train      9.4 MB
#     …/lib/python3.11/csv.py        sha256("csv.py")      → held out   0.5 MB
#
#     train = the files of one side, in the order of their paths, one after the other:
#             b0 b1 b2 … │ b_c … │ b_2c … │            windows that do not overlap, c = context
#     sample k = (x, y):   x = b[kc : kc + c],  y = b[kc + 1 : kc + c + 1]
#
# So every byte but the first is a target exactly once per epoch (a last partial window is left out), and bits per byte
# of the held-out side are comparable with any other model of the same bytes (`train/steps/task.py` computes some).
#
# Whole files are held out, by a hash of the path: the same file is on the same side on every machine, in every run.
# The corpus has no tests, no generated tables (`encodings`, `pydoc_data`: hundreds of near copies, of which one side
# would give away the other), no files of this one build (`_sysconfigdata…`, `config-…`), and nothing that was installed
# later. The bytes depend on Python's version; `Splits.name` has it, with a digest.


_TESTS = {"test", "tests", "idle_test"}
_GENERATED = {"encodings", "pydoc_data", "__pycache__", "__phello__"}
_INSTALLED = {"site-packages", "dist-packages"}
_SKIPPED_FOLDERS = _TESTS | _GENERATED | _INSTALLED
_SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "config-")
_HELD_OUT = 18  # of 256, which is some 7 % of the files


class Corpus(NamedTuple):
    """The raw bytes of both sides."""

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
    """The bytes of a text as windows."""

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
