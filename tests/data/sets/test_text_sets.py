"""Windows of tokens and bytes against slices of what was written, and the standard library's text against its files."""

from __future__ import annotations

import hashlib
import pickle
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ddp.data.loading.loader import TrainLoader
from ddp.data.orders.sampler import TrainSampler
from ddp.data.samples import WholeBatches
from ddp.data.sets.text_sets import ByteWindows, TokenSet, corpus, is_held_out, load_standard_library
from ddp.errors import ConfigError, UnreadableSample

DTYPES = ["uint8", "uint16", "int32", "uint32"]


def write_tokens(
    folder: Path, *, dtype: str, suffix: str, sizes: tuple[int, ...] = (101, 31, 32, 60)
) -> list[np.ndarray]:
    draw, arrays = np.random.RandomState(0), []
    for number, size in enumerate(sizes):
        array = draw.randint(0, min(np.iinfo(dtype).max, 2**31 - 1), size).astype(dtype)
        arrays.append(array)
        if suffix == ".npy":
            np.save(folder / f"{number}.npy", array)
        else:
            array.tofile(folder / f"{number}.bin")
    return arrays


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context", [1, 10, 30])
def test_windows_are_slices(dtype: str, suffix: str, context: int, tmp_path: Path) -> None:
    arrays = write_tokens(tmp_path, dtype=dtype, suffix=suffix)
    tokens = TokenSet(tmp_path, context=context, dtype=dtype, index_dir=tmp_path / "index")
    assert isinstance(tokens, WholeBatches)
    expected = [
        (array[k * context : (k + 1) * context], array[k * context + 1 : (k + 1) * context + 1])
        for array in arrays
        for k in range((len(array) - 1) // context)
    ]
    assert len(tokens) == len(expected) == sum(tokens.file_sizes)
    for (x, y), (inputs, targets) in zip(tokens, expected, strict=True):  # type: ignore[call-overload]
        assert x.dtype == y.dtype == torch.int64
        assert x.tolist() == inputs.tolist()
        assert y.tolist() == targets.tolist()
    order = np.random.RandomState(1).permutation(len(tokens)).tolist()
    batch_x, batch_y = pickle.loads(pickle.dumps(tokens)).batch(order)
    assert batch_x.tolist() == [expected[k][0].tolist() for k in order]
    assert batch_y.tolist() == [expected[k][1].tolist() for k in order]
    assert tokens.lengths is not None
    assert tokens.lengths.tolist() == [context] * len(tokens)


def test_loader_processes_read_the_same_windows(tmp_path: Path) -> None:
    write_tokens(tmp_path, dtype="uint16", suffix=".bin")
    tokens = TokenSet(tmp_path, context=10, index_dir=tmp_path / "index")
    tokens[0]
    loader: Any = DataLoader(tokens, batch_size=None, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type]
    for (x, y), (inputs, targets) in zip(loader, tokens, strict=True):  # type: ignore[call-overload]
        assert torch.equal(x, inputs)
        assert torch.equal(y, targets)


def test_the_training_loader_reads_batches_as_from_memory(tmp_path: Path) -> None:
    (array,) = write_tokens(tmp_path, dtype="uint8", suffix=".bin", sizes=(500,))
    sets = [
        TokenSet(tmp_path, context=7, dtype="uint8", index_dir=tmp_path / "index"),
        ByteWindows(array.tobytes(), context=7),
    ]
    batches = []
    for each in sets:
        sampler = TrainSampler(len(each), global_batch=8, rank=0, world_size=1, seed=3)
        loader = TrainLoader(each, sampler, num_workers=2)
        batches.append([batch for _, micros in loader.epoch() for batch in micros])
        loader.close()
    assert len(batches[0]) == len(batches[1]) == 9
    for (x, y), (inputs, targets) in zip(*batches, strict=True):
        assert torch.equal(x, inputs)
        assert torch.equal(y, targets)


def test_a_header_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"header!" + np.arange(21, dtype="uint16").tobytes())
    tokens = TokenSet(tmp_path / "a.bin", context=10, header_bytes=7, index_dir=tmp_path / "index")
    assert tokens.batch(range(2))[1].flatten().tolist() == list(range(1, 21))


def test_each_context_has_an_index(tmp_path: Path) -> None:
    write_tokens(tmp_path, dtype="uint16", suffix=".bin")
    sets = [TokenSet(tmp_path, context=context, index_dir=tmp_path / "index") for context in (10, 5, 10)]
    assert [len(each) for each in sets] == [10 + 3 + 3 + 5, 20 + 6 + 6 + 11, 21]


@pytest.mark.parametrize(("dtype", "token"), [("uint16", 500), ("int32", -1), ("uint32", 2**32 - 1)])
def test_a_token_that_is_not_in_the_vocabulary_is_named(dtype: str, token: int, tmp_path: Path) -> None:
    array = np.arange(41, dtype=dtype)
    array[15] = token
    array.tofile(tmp_path / "a.bin")
    ask: Any = {"context": 10, "dtype": dtype, "index_dir": tmp_path / "index"}
    tokens = TokenSet(tmp_path / "a.bin", vocab_size=500, **ask)
    assert tokens.batch([0, 2, 3])[1].max() == 40 and tokens.batch([])[0].shape == (0, 10)
    for read in (lambda: tokens[1], lambda: tokens.batch([0, 1, 2])):
        with pytest.raises(UnreadableSample, match=rf"a.bin, sample 1, .* the token {token}, and vocab_size=500, so"):
            read()
    unlimited = TokenSet(tmp_path / "a.bin", **ask)
    assert token in unlimited[1][0] and token in unlimited.batch([1])[0]
    with pytest.raises(ConfigError, match="vocab_size=0"):
        TokenSet(tmp_path / "a.bin", vocab_size=0, **ask)


@pytest.mark.parametrize(
    ("written", "read", "vocab_size", "says"),
    [
        ("uint32", "uint16", None, "every second token is 0, .*: take dtype=uint32"),
        ("uint32", "uint16", 200_000, "every second token is at most 3, .*: take dtype=uint32"),
        ("uint16", "uint8", 50_257, "every second token is at most 196, .*: take dtype=uint16"),
        ("int64", "uint16", None, "every second token is 0, .*: take dtype=uint32"),
        ("int64", "uint32", None, "every second token is 0, .*: save them as int32 or uint32"),
        ("uint16", "uint16", 200_000, None),
        ("uint8", "uint8", 50_257, None),
        ("int32", "int32", None, None),
    ],
)
def test_tokens_of_another_dtype_are_named(
    written: str, read: str, vocab_size: int | None, says: str | None, tmp_path: Path
) -> None:
    tokens = np.random.RandomState(0).randint(0, min(vocab_size or 50_257, np.iinfo(written).max), 500)
    (tmp_path / "a.bin").write_bytes(tokens.astype(written).tobytes())
    ask: Any = {"context": 10, "dtype": read, "index_dir": tmp_path / "index"}
    if says is None:
        TokenSet(tmp_path, vocab_size=vocab_size, **ask)
        return
    for _ in range(2):  # also with an index that is there
        with pytest.raises(ConfigError, match=rf"^\S+/a.bin: read as {read}, {says}"):
            TokenSet(tmp_path, vocab_size=vocab_size, **ask)


def test_files_that_hold_no_windows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"

    def refused(message: str, **settings: Any) -> None:
        with pytest.raises(ConfigError, match=message) as failure:
            TokenSet(tmp_path, index_dir=tmp_path / "index", **{"context": 10, **settings})
        assert "\n" not in str(failure.value)

    path.write_bytes(bytes(101))
    refused(r"^\S+/a.bin has 101 bytes of tokens, and uint16 has 2: it is cut off, or of another dtype")
    refused(r"^\S+/a.bin has 99 bytes of tokens", header_bytes=2)
    refused(r"^\S+/a.bin has -99 bytes of tokens", header_bytes=200)
    path.write_bytes(bytes(20))
    refused(r"^\S+/a.bin has 10 tokens, too few for a window of context=10 .*: choose 1 … 9, or join")
    refused("context=0", context=0)
    refused("dtype='float32' of tokens: choose one of uint8, uint16, int32, uint32", dtype="float32")
    np.save(tmp_path / "a.npy", np.arange(100, dtype="uint16"))
    path.unlink()
    whole = (tmp_path / "a.npy").read_bytes()
    for cut, message in (
        (-2, "has 198 bytes of tokens instead of 200: it is cut off"),
        (50, "is cut off or no .npy file"),
    ):
        (tmp_path / "a.npy").write_bytes(whole[:cut])
        refused(rf"^\S+/a.npy {message}")
    header = b"{'descr': ('<u2', 'fortran_order': (((".ljust(69) + b"\n"  # Python's tokenizer raises errors of its own
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00\x46\x00" + header + bytes(50))
    refused(r"^\S+/a.npy is cut off or no .npy file \(.+\): write it again")
    for array in (np.zeros(50), np.zeros((50, 2), dtype="uint16")):
        np.save(tmp_path / "a.npy", array)
        refused(rf"^\S+/a.npy holds {array.dtype.name} \[50.*: save the tokens as one dimension")


# The standard library's text


@given(text=st.binary(min_size=2, max_size=60), context=st.integers(1, 70))
def test_every_byte_but_the_first_is_a_target_once(text: bytes, context: int) -> None:
    if context >= len(text):
        with pytest.raises(ConfigError, match=f"context={context} .*{len(text)} bytes"):
            ByteWindows(text, context=context)
        return
    windows = ByteWindows(text, context=context)
    inputs, targets = windows.batch(range(len(windows)))
    covered = len(windows) * context
    assert len(text) - 1 - context < covered <= len(text) - 1
    assert bytes(inputs.flatten().tolist()) == text[:covered]
    assert bytes(targets.flatten().tolist()) == text[1 : covered + 1]


def test_a_context_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="context=0"):
        ByteWindows(b"abc", context=0)


def make_library(root: Path, names: list[str]) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"# {name}\n".encode())


def test_files_are_taken_whole_sorted_and_without_what_is_left_out(tmp_path: Path) -> None:
    kept = sorted([f"module_{i}.py" for i in range(60)] + ["json/decoder.py", "json/testing.py"])
    left_out = [
        "test/test_json.py",
        "lib2to3/tests/pytree.py",
        "idlelib/idle_test/test_run.py",
        "encodings/cp037.py",
        "site-packages/torch/nn/modules/linear.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "json/decoder.txt",
    ]
    make_library(tmp_path, kept + left_out)
    expected = [b"".join(f"# {n}\n".encode() for n in kept if is_held_out(n) == side) for side in (False, True)]
    assert list(corpus(tmp_path)) == expected


def test_a_python_without_sources_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path} holds no source text.*data=digits"):
        corpus(tmp_path)


def test_the_real_thing() -> None:
    text = corpus()
    assert 3_000_000 < len(text.train) < 30_000_000
    assert 0.03 < len(text.held_out) / len(text.train) < 0.12
    argparse = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    assert argparse in (text.held_out if is_held_out("argparse.py") else text.train)
    splits = load_standard_library(context=100)
    digest = hashlib.sha256(text.train + text.held_out).hexdigest()
    assert digest[:12] in splits.name
    assert bytes(splits.test[3][0].tolist()) == text.held_out[300:400]


def test_windows_keep_one_byte_per_byte() -> None:
    windows = ByteWindows(bytes(1000), context=10)
    assert windows._tokens.untyped_storage().nbytes() == 1000
    assert windows.batch([0])[0].dtype == torch.int64
