"""Collectives as data, compiled: a schedule as a function of JAX arrays, whose transfers are `lax.ppermute`. No torch.

    python -m ddp check ring 8 --compiled

Inside `jax.shard_map` every device runs one program, so that what differs between devices is data: which of its rows a
device sends and where it puts what arrives are looked up in tables, by its number. A round is a few *permutations*, in
each of which a device sends at most one message and receives at most one:

    round 1 of a ring of 3    device 0 sends row 2 to 1, device 1 sends row 0 to 2, device 2 sends row 1 to 0

A row is a chunk, cut where the executor of this package cuts it (`offsets`), and filled up to the longest. Receives add
in the order in which they are listed, and after those that come before the present value. So the result has the bits
that the proof's expressions say, on one host as over sockets.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ddp.collectives.schedule import Add, Expression, Proof, Recv, Schedule, ScheduleError, Send, offsets

AXIS = "devices"  # of the mesh


class Message(NamedTuple):
    """A run of rows that goes from one device to another, or is added to others on the same one.

    Attributes:
        source, into: the first row, there and here.
        before: it comes before the present value in the sum.
    """

    sender: int
    receiver: int
    source: int
    into: int
    num_rows: int
    add: bool
    before: bool = False

    @property
    def kind(self) -> tuple[object, ...]:
        """Returns what the messages of a permutation have in common."""
        return self.num_rows, self.add, self.before, self.sender == self.receiver


def rounds_of(schedule: Schedule, num_devices: int) -> Iterator[list[Message]]:
    """Yields the messages of each round in the order in which they are added: those before the present value first."""
    num_chunks = schedule.num_chunks(num_devices)
    programs = (schedule.algorithm(rank, num_devices) for rank in range(num_devices))
    for ops_by_rank in zip(*programs, strict=True):
        sends: dict[tuple[int, int], deque[Send]] = {}
        for rank, ops in enumerate(ops_by_rank):
            for op in ops:
                if isinstance(op, Send):
                    sends.setdefault((rank, op.peer), deque()).append(op)
        received, added = list[Message](), list[Message]()
        for rank, ops in enumerate(ops_by_rank):
            for op in ops:
                if isinstance(op, Recv):
                    sent, rows = sends[op.peer, rank].popleft(), (op.buffer * num_chunks + op.chunks.start)
                    source = sent.buffer * num_chunks + sent.chunks.start
                    received.append(Message(op.peer, rank, source, rows, len(op.chunks), op.add, op.before))
                elif isinstance(op, Add):
                    source, into = (each * num_chunks + op.chunks.start for each in (op.other, op.into))
                    added.append(Message(rank, rank, source, into, len(op.chunks), add=True))
        yield [*sorted(received, key=lambda each: not each.before), *added]


def permutations(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yields the messages of a round in groups of one kind, at most one from and one to each device, in their order."""
    left = list(messages)
    while left:
        group, waiting = list[Message](), set[int]()  # receivers whose next message is not of this group
        for each in left:
            fits = all(each.kind == other.kind and each.sender != other.sender for other in group)
            if fits and each.receiver not in waiting:
                group.append(each)
            waiting.add(each.receiver)
        left = [each for each in left if each not in group]
        yield group


def all_reduce(schedule: Schedule, num_devices: int) -> Callable[[jax.Array], jax.Array]:
    """Returns a function of a device's contribution, [numel], to be called in a `shard_map` over the axis `AXIS`.

    It returns the sum of all devices' contributions, [numel], which has the same bits on each.
    """
    rounds = [list(permutations(each)) for each in rounds_of(schedule, num_devices)]
    num_chunks = schedule.num_chunks(num_devices)
    num_rows = num_chunks + max((m.into + m.num_rows for each in rounds for group in each for m in group), default=0)
    most = max((m.num_rows for each in rounds for group in each for m in group), default=0)

    def call(mine: jax.Array) -> jax.Array:
        bounds = list(pairwise(offsets(len(mine), num_chunks)))
        longest = max(end - begin for begin, end in bounds)
        rows = jnp.stack([jnp.pad(mine[begin:end], (0, longest - (end - begin))) for begin, end in bounds])
        rows = jnp.pad(rows, ((0, num_rows + most - num_chunks), (0, 0)))  # the last ones are for what nobody receives
        for groups in rounds:
            rows = _play(groups, rows, spare=num_rows)
        return jnp.concatenate([rows[number, : end - begin] for number, (begin, end) in enumerate(bounds)])

    return call


def _play(groups: Sequence[Sequence[Message]], rows: jax.Array, *, spare: int) -> jax.Array:
    """Returns the rows after a round.

    Args:
        spare: the first of some rows that are never read.
    """
    device, num_devices = lax.axis_index(AXIS), lax.axis_size(AXIS)
    before, sums = rows, jnp.zeros_like(rows)
    summed: set[tuple[int, int]] = set()  # receivers and rows whose sum of messages has begun that comes first
    ends = {(m.receiver, m.into): m for group in groups for m in group if m.before}  # the last message of each

    def table(values: dict[int, Any], otherwise: Any) -> jax.Array:
        return jnp.asarray(np.array([values.get(each, otherwise) for each in range(num_devices)]))[device]

    for group in groups:
        num_rows, adds, comes_before, is_here = group[0].kind
        source = table({m.sender: m.source for m in group}, 0)
        into = table({m.receiver: m.into for m in group}, spare)
        found = lax.dynamic_slice_in_dim(rows if is_here else before, source, num_rows)
        if not is_here:
            found = lax.ppermute(found, AXIS, [(m.sender, m.receiver) for m in group])
        present = lax.dynamic_slice_in_dim(rows, into, num_rows)
        if comes_before:
            so_far = lax.dynamic_slice_in_dim(sums, into, num_rows)
            has_begun = table({m.receiver: (m.receiver, m.into) in summed for m in group}, False)
            found = jnp.where(has_begun, so_far + found, found)
            sums = lax.dynamic_update_slice_in_dim(sums, found, into, 0)
            summed |= {(m.receiver, m.into) for m in group}
            is_last = table({m.receiver: ends[m.receiver, m.into] is m for m in group}, False)
            found = jnp.where(is_last, found + present, present)
        elif adds:
            found = present + found
        rows = lax.dynamic_update_slice_in_dim(rows, found, into, 0)
    return rows


# --- for a reader ----------------------------------------------------------------------------------------------------

NUM_TRIED = 1_003  # numbers of each device: chunks of two lengths, for most numbers of them


def compare(schedule: Schedule, proof: Proof, num_devices: int) -> int:
    """Compiles a schedule for devices of the CPU, and compares its bits with the proof's expressions.

    Returns:
        The number of permutes in the compiled program.

    Raises:
        ScheduleError: a device has other bits.
    """
    jax.config.update("jax_num_cpu_devices", num_devices)
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")), (AXIS,))
    each, call = jax.sharding.PartitionSpec(AXIS), all_reduce(schedule, num_devices)
    mine = np.random.default_rng(0).standard_normal((num_devices, NUM_TRIED)).astype(np.float32)
    mapped = jax.shard_map(lambda rows: call(rows[0])[None], mesh=mesh, in_specs=each, out_specs=each, check_vma=False)
    program = jax.jit(mapped).lower(mine).compile()
    bounds = pairwise(offsets(NUM_TRIED, proof.num_chunks))
    chunks = (_value(proof.expressions[chunk], mine[:, begin:end]) for chunk, (begin, end) in enumerate(bounds))
    expected = np.concatenate(list(chunks))
    for device, found in enumerate(np.asarray(program(mine))):
        if (found.view(np.uint32) != expected.view(np.uint32)).any():
            raise ScheduleError(f"{num_devices} devices, compiled: device {device} has other bits than the proof says")
    return len(re.findall(r"collective-permute(-start)?\(", program.as_text()))


def _value(expression: Expression, contributions: Any) -> Any:
    """Returns the sum that an expression describes, of contributions by rank."""
    if isinstance(expression, int):
        return contributions[expression]
    first, second = expression
    return _value(first, contributions) + _value(second, contributions)
