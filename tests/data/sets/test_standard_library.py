"""The text against the files it is made of, and the windows against slices of it."""

import hashlib
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp.data.sets.text_sets import ByteWindows, corpus, is_held_out, load_standard_library
from ddp.errors import ConfigError


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
