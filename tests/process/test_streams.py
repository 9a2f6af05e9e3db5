"""Streams: keys name numbers that no process, version or rank changes."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from ddp.process.streams import (
    dropout_stream,
    init_stream,
    preserved,
    seed_generators,
    stream_seed,
)


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_the_numbers_are_fixed_for_ever():
    """Written down: a change of the mixing would silently change every run that is resumed."""
    assert stream_seed(0) == 3877483726552662742
    assert stream_seed(7, "dropout", 3, 1, 0) == 2907533972494214492


@pytest.mark.slow
def test_another_process_computes_the_same():
    code = "from ddp.process.streams import stream_seed; print(stream_seed(5, 'augmentation', 2, 99))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == stream_seed(5, "augmentation", 2, 99)


def test_neighbouring_and_look_alike_keys_do_not_collide():
    keys = [(s, e, i) for s in range(10) for e in range(10) for i in range(100)]
    alike = [(1,), ("1",), ("1", 2), ("12",), (12,), (1, 2), ("i1;",), ("a", "b"), ("ab",), (-1,), ()]
    seeds = {stream_seed(*key) for key in keys} | {stream_seed(0, "x", *key) for key in alike}
    assert len(seeds) == len(keys) + len(alike)
    assert all(0 <= seed < 2**63 for seed in seeds)


def augmentation(seed: int, epoch: int, sample: int) -> None:
    seed_generators(stream_seed(seed, "augmentation", epoch, sample), device="cpu")


def test_whole_numbers_count_by_value():
    assert stream_seed(3, np.int64(4)) == stream_seed(np.int32(3), torch.tensor(4).item()) == stream_seed(3, 4)
    with pytest.raises(TypeError):
        stream_seed(3, 4.0)


@pytest.mark.parametrize(
    "stream",
    [
        lambda seed, a, b: augmentation(seed, a, b),
        lambda seed, a, b: dropout_stream(seed, a, b, 0, "cpu"),
        lambda seed, a, b: dropout_stream(seed, a, 0, b, "cpu"),
    ],
)
def test_a_stream_repeats_and_differs_from_its_neighbours(stream):
    def drawn(*key):
        with preserved():
            stream(*key)
            return draw()

    assert drawn(1, 2, 3) == drawn(1, 2, 3)
    values = [drawn(seed, a, b) for seed in range(3) for a in range(3) for b in range(3)]
    for column in zip(*values, strict=True):  # torch, random and numpy each
        assert len(set(column)) == len(values)


def test_streams_of_equal_numbers_differ_by_name():
    with preserved():
        init_stream(0, device="cpu")
        first = draw()
        augmentation(0, 0, 0)
        second = draw()
        dropout_stream(0, 0, 0, 0, "cpu")
        third = draw()
    assert len({first, second, third}) == 3


def test_blocks_leave_no_trace():
    with preserved():
        init_stream(11, device="cpu")
        expected = [draw(), draw()]
        init_stream(11, device="cpu")
        assert draw() == expected[0]
        with pytest.raises(KeyError), preserved():
            init_stream(5, device="cpu")
            raise KeyError
        stream_seed(1, "order", 2)
        assert draw() == expected[1]


@pytest.mark.slow
def test_cuda_is_not_initialised_by_asking():
    code = "import torch; from ddp.process.streams import dropout_stream as d; d(0, 0, 0, 0, 'cpu')"
    code += "; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_cuda_generator_follows(device):
    before = torch.rand(4, device="cuda")
    dropout_stream(1, 2, 3, 4, device)
    first = torch.rand(4, device="cuda")
    dropout_stream(1, 2, 3, 4, device)
    assert torch.equal(first, torch.rand(4, device="cuda"))
    assert not torch.equal(first, before)
