"""Wire formats: how far numbers are off, that rounding again changes no bit, and what becomes of odd numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp.comm.reduction import ALIGNMENT_BYTES, BLOCK, STRETCH, TINY, WireFormat, wire_format
from ddp.setting import WireName

LENGTHS = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, STRETCH, STRETCH + BLOCK + 7)
NAMES: tuple[WireName, ...] = ("bf16", "fp16", "int8", "int8_stochastic")


def encoded(wire: WireFormat, numbers: Tensor) -> Tensor:
    into = torch.empty(wire.length(len(numbers)), dtype=wire.dtype)
    wire.encode(numbers, into)
    assert into.nbytes == wire.bytes_of(len(numbers))
    return into


def rounded(wire: WireFormat, numbers: Tensor) -> Tensor:
    into = torch.empty_like(numbers)
    wire.decode(encoded(wire, numbers), into)
    return into


def normal(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(numel, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", LENGTHS)
def test_int8_is_off_by_half_a_scale_at_most(numel: int, dtype: torch.dtype) -> None:
    numbers = normal(numel, dtype) * 10.0 ** torch.linspace(-20, 20, numel).floor().to(dtype)
    found = rounded(wire_format("int8"), numbers)
    for block, of_block in zip(numbers.split(BLOCK), found.split(BLOCK), strict=True):
        scale = block.abs().max().item() / 127 if len(block) else 0.0
        assert (block - of_block).abs().max().item() <= 0.5 * scale * (1 + 1e-5) if len(block) else True


@pytest.mark.parametrize("numel", [BLOCK, STRETCH + 300])
@pytest.mark.quick(1)
def test_chance_rounds_up_and_down_and_is_right_on_average(numel: int) -> None:
    wire, numbers = wire_format("int8_stochastic"), normal(numel)
    off = torch.zeros(numel, dtype=torch.float64)  # in scales
    for step in range(400):  # a block's largest number is never twice the same
        for block in numbers.split(BLOCK):
            block[0] = 5 + step / 1e4
        scales = torch.cat([block[:1].expand(len(block)) / 127 for block in numbers.split(BLOCK)])
        found = rounded(wire, numbers)
        assert ((found - numbers).abs() < 1.0001 * scales).all()
        assert torch.equal(found, rounded(wire, numbers))  # the same for the same
        off += (found - numbers) / scales / 400
    assert off.abs().max() < 6 / 40  # each has a standard deviation of 1/40 at most
    assert off.mean().abs() < 0.01


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=200)
@given(st.integers(0, 600), st.integers(0, 10_000), st.integers(-30, 30), st.integers(1, 1 << 40))
@pytest.mark.quick(1)
def test_rounding_again_changes_no_bit(name: WireName, numel: int, seed: int, exponent: int, divide_by: int) -> None:
    wire = wire_format(name, divide_by)
    for dtype in (torch.float32, torch.float64):
        once = encoded(wire, normal(numel, dtype, seed) * 2.0**exponent)
        again = torch.empty(numel, dtype=dtype)
        wire.decode(once, again)
        used = once[: -(-numel // BLOCK) * 4 + numel] if name.startswith("int8") else once
        assert torch.equal(used, encoded(wire, again)[: len(used)])


def test_the_scale_of_127_scales_is_that_scale_for_every_mantissa() -> None:
    largest = (torch.arange(1 << 23, dtype=torch.int32) | 0x3F800000).view(torch.float32)  # [1, 2)
    scales = largest / 127
    assert torch.equal((scales * 127) / 127, scales)


@pytest.mark.parametrize("name", NAMES)
def test_adding_is_decoding_and_adding(name: WireName) -> None:
    wire = wire_format(name, divide_by=5)
    for dtype in (torch.float32, torch.float64):
        here, there = normal(1000, dtype), normal(1000, dtype, seed=1)
        expected = here + rounded(wire, there)
        wire.add(encoded(wire, there), here)
        assert torch.equal(here, expected)


@pytest.mark.parametrize(("divide_by", "shrink"), [(1, 1), (2, 2), (3, 2), (64, 64), (100, 64), (1 << 20, 1 << 20)])
def test_fp16_travels_about_as_large_as_a_mean(divide_by: int, shrink: int) -> None:
    assert wire_format("fp16", divide_by).shrink == shrink
    assert all(wire_format(name, divide_by).shrink == 1 for name in NAMES if name != "fp16")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(name: WireName, odd: float) -> None:
    numbers = normal(3 * BLOCK)
    numbers[BLOCK + 3] = odd
    found = rounded(wire_format(name), numbers)
    assert not found[BLOCK + 3].isfinite()
    assert found[:BLOCK].isfinite().all() and found[2 * BLOCK :].isfinite().all()


def test_zeros_and_tiny_numbers_are_zeros_in_int8() -> None:
    tiny = normal(BLOCK) * TINY
    assert torch.equal(rounded(wire_format("int8"), tiny), torch.zeros(BLOCK))
    assert torch.equal(rounded(wire_format("int8"), torch.zeros(5)), torch.zeros(5))
    small = torch.full((BLOCK,), 127 * TINY)
    assert torch.equal(rounded(wire_format("int8"), small), small)


@pytest.mark.parametrize("numel", LENGTHS)
def test_int8_takes_a_byte_a_number_and_four_a_block(numel: int) -> None:
    num_bytes = wire_format("int8").bytes_of(numel)
    assert 0 <= num_bytes - numel - 4 * -(-numel // BLOCK) < ALIGNMENT_BYTES and num_bytes % ALIGNMENT_BYTES == 0
