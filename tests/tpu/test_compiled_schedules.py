"""A schedule that is compiled for devices of JAX has the bits that the proof's expressions say.

Tests: ddp/collectives/compiled.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from jaxed import jaxed, needs_jax

from ddp.collectives.catalog import ALL_REDUCE
from ddp.collectives.schedule import Add, Expression, Goal, Recv, Round, Schedule, Send, offsets, one_per_rank

pytestmark = needs_jax

LENGTHS = 1, 7, 1003
QUICK = [  # a case of each schedule, and of most numbers of devices
    *(("ring", 8), ("tree", 3), ("double_tree", 4), ("butterfly", 3), ("recursive_doubling", 3), ("circulant", 5)),
    *(("all_to_all", 4), ("master_worker", 3), ("round_robin", 3), ("naive_all_to_all", 3), ("own", 1), ("own", 4)),
]


def own_all_reduce(rank: int, num_ranks: int) -> Iterator[Round]:
    """Sends everything to everyone, who adds: what comes from ranks below before its own part, and that of the last
    rank by way of another buffer."""
    others = [other for other in range(num_ranks) if other != rank]
    last, whole = num_ranks - 1, range(num_ranks)
    ops: list[Any] = [Send(other, whole) for other in others]
    ops += [Recv(other, whole, add=other != last, before=other < rank, buffer=int(other == last)) for other in others]
    if others and rank != last:
        ops.append(Add(into=0, other=1, chunks=whole))
    yield tuple(ops)


SCHEDULES = {**ALL_REDUCE, "own": Schedule(own_all_reduce, Goal.ALL_REDUCE, one_per_rank)}


def contributions(num_devices: int, length: int) -> np.ndarray[Any, Any]:
    """Returns numbers [num_devices, length] of so different sizes that each order of additions has its own bits."""
    random = np.random.default_rng(length)
    sizes = 10.0 ** random.integers(-3, 4, (num_devices, length))
    return (random.standard_normal((num_devices, length)) * sizes).astype(np.float32)


def added(expression: Expression, parts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the sum of parts in the order of an expression."""
    if isinstance(expression, int):
        return parts[expression]
    return added(expression[0], parts) + added(expression[1], parts)


def by_proof(name: str, num_devices: int, length: int) -> np.ndarray[Any, Any]:
    """Returns what a schedule makes by its proof, by numpy."""
    parts, proof = contributions(num_devices, length), SCHEDULES[name].check(num_devices)
    bounds = pairwise(offsets(length, proof.num_chunks))
    chunks = zip(proof.expressions, bounds, strict=True)
    return np.concatenate([added(expression, parts[:, begin:end]) for expression, (begin, end) in chunks])


def compiled(name: str, num_devices: int, lengths: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    """Returns by length what each device has after the compiled schedule."""
    import jax
    from jax.sharding import Mesh, PartitionSpec

    from ddp.collectives.compiled import AXIS, all_reduce

    reduce = all_reduce(SCHEDULES[name], num_devices)
    mesh, each = Mesh(np.array(jax.devices()[:num_devices]), (AXIS,)), PartitionSpec(AXIS)

    def on_device(parts: Any) -> Any:
        return [reduce(part[0])[None] for part in parts]

    jax.config.update("jax_disable_most_optimizations", False)  # which must not change a bit
    program = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(each,), out_specs=each, check_vma=False))
    try:
        return list(map(np.array, program([contributions(num_devices, length) for length in lengths])))
    finally:
        jax.config.update("jax_disable_most_optimizations", True)


def differing(cases: Sequence[tuple[str, int]], lengths: Sequence[int] = LENGTHS) -> list[tuple[str, int, int]]:
    """Returns the cases in which a device has other bits than the proof says."""
    found = []
    for name, num_devices in cases:
        for length, sums in zip(lengths, compiled(name, num_devices, lengths), strict=True):
            expected = by_proof(name, num_devices, length)
            if not all(each.tobytes() == expected.tobytes() for each in sums):
                found.append((name, num_devices, length))
    return found


def test_every_device_has_the_bits_of_the_proof() -> None:
    assert {name for name, _ in QUICK} == set(SCHEDULES)
    assert jaxed(differing, QUICK) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_the_bits_of_its_proof_on_1_to_8_devices(name: str) -> None:
    assert jaxed(differing, [(name, num_devices) for num_devices in range(1, 9)]) == []
