"""What ranks send each other besides tensors comes out as it went in, and runs nothing."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.utils._pytree import tree_flatten

import ddp
from ddp.comm.objects import all_gather_object, on_rank_zero, packed, unpacked
from ddp.errors import CheckpointError, PeerLost


class Pair(NamedTuple):
    left: int
    right: str


PLAIN = [
    *(None, True, 0, -(2**70), 0.1, math.inf, "ä\n\ud800", b"", b"\0\xff", Path("a b")),
    *([], [[1], ()], (1, (2, "x")), {1, 2}, {1: 2, (3, "y"): [None], None: {}}, 1 - 2j),
    *(OrderedDict(b=1, a=2), Counter("aab"), torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1")),
]
TENSORS = [
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(3, 4).t(),
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.empty(0, 3),
    torch.tensor([True, False]),
    torch.randn(3, dtype=torch.complex64).conj(),
    torch.ones(1).expand(4),
    torch.nn.Parameter(torch.arange(4.0)),
]


def test_values_come_out_as_they_went_in() -> None:
    out = unpacked(packed(PLAIN))
    assert out == PLAIN
    assert list(map(type, out)) == list(map(type, PLAIN))
    assert math.isnan(unpacked(packed(math.nan)))
    leaves = unpacked(packed((np.int64(3), np.float32(0.5), np.bool_(True), Pair(1, "a"))))
    assert leaves == (3, 0.5, True, (1, "a"))
    assert [type(leaf) for leaf in tree_flatten(leaves)[0]] == [int, float, bool, int, str]


def test_tensors_come_out_with_their_bits_layout_and_memory_of_their_own() -> None:
    for theirs, ours in zip(unpacked(packed(TENSORS)), TENSORS, strict=True):
        assert torch.equal(theirs, ours)
        assert theirs.dtype == ours.dtype
        assert theirs.stride() == torch.empty_like(ours).stride()
        assert theirs.untyped_storage().nbytes() == ours.numel() * ours.element_size()


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(TypeError, match="an object of type Random cannot be sent between ranks: use plain values"):
        packed({"key": [random.Random()]})
    with pytest.raises(TypeError, match="an object of type Tensor"):
        packed(torch.eye(2).to_sparse())


class Boom:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.file),)


def as_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


HOSTILE = [
    {"is": "tensor", "of": ["float32", [100], [1], 8]},  # beyond its bytes
    {"is": "tensor", "of": ["float32", [2], [-1], 8]},
    {"is": "tensor", "of": ["load", [1], [1], 8]},
    {"is": "tensor", "of": ["uint8", [1], [1], 2**60]},
    {"is": "bytes", "of": [-1]},
    {"is": "dtype", "of": ["load"]},
    {"is": "eval", "of": ["1"]},
    {"is": "ConfigError", "of": ["1"]},
    {"is": "dict", "of": [[[], 1]]},
    {"of": []},
]


@pytest.mark.parametrize("plain", HOSTILE)
def test_bytes_that_nobody_packed_are_an_error_and_nothing_else(plain: Any) -> None:
    text = json.dumps(plain).encode()
    with pytest.raises((ValueError, KeyError, TypeError, RuntimeError)):
        unpacked(as_bytes(len(text).to_bytes(8, "little") + text + bytes(8)))


def test_a_pickle_is_an_error_and_runs_nothing(tmp_path: Path) -> None:
    data = pickle.dumps(Boom(tmp_path / "ran"))
    for bad in (data, len(data).to_bytes(8, "little") + data, b"", b"\xff" * 8):
        with pytest.raises((ValueError, RuntimeError)):
            unpacked(as_bytes(bad) if bad else torch.empty(0, dtype=torch.uint8))
    assert not (tmp_path / "ran").exists()


class Own(Exception):
    pass


def raises(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def errors_of_rank_zero() -> list[tuple[str, str]]:
    comm = ddp.init(abort_s=20)
    lost = PeerLost(1, "there", 0, 3, "gradients", "gone")
    told = [FileNotFoundError(2, "no such file", "a.pt"), CheckpointError("is not whole"), lost, Own("mine")]
    found = []
    for error in told:
        try:
            on_rank_zero(comm, raises(error), label="work")
        except Exception as caught:
            assert (caught is error) == (comm.rank == 0), "rank 0 keeps its own, with its traceback"
            found.append((type(caught).__name__, str(caught)))
    try:
        on_rank_zero(comm, object, label="what cannot be sent")
    except TypeError as error:
        found.append(("TypeError", str(error)))
    assert on_rank_zero(comm, lambda: (Path("run"), 3), label="work") == (Path("run"), 3)
    assert all_gather_object(comm, {"rank": comm.rank}) == [{"rank": 0}, {"rank": 1}]
    ddp.shutdown()
    return found


def test_an_error_of_rank_zero_is_raised_everywhere_by_name_and_text() -> None:
    mine, others = run_ranks(errors_of_rank_zero, 2)
    assert mine[0] == ("FileNotFoundError", "[Errno 2] no such file: 'a.pt'")
    assert mine[2] == ("PeerLost", "lost rank 1 on host there during collective #3 [gradients]: gone")
    assert others[3] == ("RuntimeError", "Own on rank 0: mine")
    assert mine[4][1].startswith("an object of type object cannot be sent")
    assert [*others[:3], others[4]] == [*mine[:3], mine[4]]
