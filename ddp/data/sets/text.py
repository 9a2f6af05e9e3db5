"""Text in lines as windows of tokens: the texts of a field, one after the other, cut as `tokens.py` cuts its files.

    {"text": "to be"}        t o   b e ⏎ o r … │ …         bytes, with a line end between two texts
    {"text": "or …"}         12 7 0 31 … │ …               a Hugging Face tokenizer's, with its token of an end

All tokens lie in memory, 1 byte each as bytes and 4 otherwise; for more text than that, write token files.
"""

from __future__ import annotations

from array import array
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp.data.files.file_set import FileSet
from ddp.errors import ConfigError

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

    def joined(self, texts: FileSet, field: str) -> Tensor:
        """Returns the tokens of a field of all lines, [n] uint8 or int32.

        Raises:
            ConfigError: a line has no text in this field.
        """
        tokens = bytearray() if self._of_file is None else array("i")
        for number in range(len(texts)):
            record = texts[number]
            text = record.get(field)
            if not isinstance(text, str):
                raise ConfigError(
                    f"data.text={field}: line {number} of the data has {text!r:.40} there; fields: {list(record)}"
                )
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
    except Exception as error:  # the package has no class of its own for it
        raise ConfigError(f"data.tokenizer={name}: no tokenizer.json ({' '.join(str(error).split())})") from error
