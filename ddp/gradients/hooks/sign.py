"""Sign: one bit for each number, and one scale for each row of them: the mean of their absolute values.

    outgoing       0.9  −0.2   0.1  −0.4        scale 0.4
    what travels     +     −     +     −        1 bit each, 4 bytes for the scale
    sent           0.4  −0.4   0.4  −0.4
    kept           0.5   0.2  −0.3   0.0        error feedback sends it later

A scale serves a row of a matrix, or a part of a long one, because rows differ in size: that of a token which a batch
does not hold is zero, and stays so. An optimizer such as Adam would make much of what a common scale put there.

Every rank sends its bits to all others, who add up what they mean. So the bytes grow with the number of hosts h:
(h − 1) ÷ 32 of a gradient's arrive on each host, where a ring moves 2 (h − 1) ÷ h of them.

Source: Zheng, Huang, Kwok, "Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback", arXiv
1905.10936, definition 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ddp.collectives.schedule import offsets
from ddp.comm.communicator import Communicator
from ddp.gradients.hooks.hook import Gathering, Hook, Parcel, aligned, summing

LEAST, MOST = 64, 2048  # numbers with one scale
BATCH = 1 << 21  # numbers that travel together, while the next ones are encoded
STRETCH = 1 << 16  # numbers whose temporary copies fit a CPU's cache
SCALE_BYTES = 4
GATHER_BITS = 0x0102_0408_1020_4080  # times eight bytes of 0 or 1: they are the bits of the product's highest byte


class Sign(Hook):
    """Sends one bit for each number, with `ErrorFeedback` around it."""

    error_feedback = True

    def __repr__(self) -> str:
        return "Sign()"

    def reduce(self, parcels: Sequence[Parcel], comm: Communicator, step: int) -> None:
        batches = [_Batch(pieces, parcels, comm) for pieces in _batched(parcels, comm)]
        for batch in batches:
            batch.send()  # while the next ones are encoded
        with ExitStack() as until_end:
            sums = [until_end.enter_context(summing(parcel.gradient)) for parcel in parcels]
            for batch in batches:
                batch.receive(sums)


class _Piece(NamedTuple):
    """A piece of a parcel: `number` of `num_pieces`, about equally long."""

    parcel: int
    number: int
    num_pieces: int

    def of(self, part: slice) -> slice:
        """Returns the piece of a rank's part."""
        bounds = offsets(part.stop - part.start, self.num_pieces)
        return slice(part.start + bounds[self.number], part.start + bounds[self.number + 1])


class _Batch:
    """Pieces that travel together."""

    def __init__(self, pieces: Sequence[_Piece], parcels: Sequence[Parcel], comm: Communicator) -> None:
        self._pieces, self._parcels, self._rank = pieces, parcels, comm.rank
        numels = [parcels[piece.parcel].gradient.numel() for piece in pieces]
        self._blocks = [block_of(parcels[piece.parcel].shape[1]) for piece in pieces]
        self._places = [  # by rank, of each piece: where it is in its tensor
            [piece.of(comm.host_partition.part_of(numel, rank)) for piece, numel in zip(pieces, numels, strict=True)]
            for rank in range(comm.world_size)
        ]
        self._bounds = [
            aligned(_num_bytes(at.stop - at.start, block) for at, block in zip(places, self._blocks, strict=True))
            for places in self._places
        ]
        self._gathering = Gathering([bounds[-1] for bounds in self._bounds], parcels[0].gradient, comm)

    def send(self) -> None:
        """Encodes this rank's, and sends it."""
        for piece, block, start in zip(self._pieces, self._blocks, self._bounds[self._rank], strict=False):
            parcel = self._parcels[piece.parcel]
            outgoing = parcel.outgoing[piece.of(slice(0, len(parcel.outgoing)))]
            encode(outgoing, self._gathering.mine[start:], block)
        self._gathering.start()

    def receive(self, sums: Sequence[Tensor]) -> None:
        """Adds what all ranks have sent."""
        for encoded, places, bounds in zip(self._gathering.wait(), self._places, self._bounds, strict=True):
            for piece, block, place, start in zip(self._pieces, self._blocks, places, bounds, strict=False):
                add(encoded[start:], sums[piece.parcel][place], block)


def _batched(parcels: Sequence[Parcel], comm: Communicator) -> list[list[_Piece]]:
    """Returns the pieces that travel together, the same on every rank: up to about BATCH numbers of a rank."""
    batches: list[list[_Piece]] = [[]]
    left = BATCH
    for number, parcel in enumerate(parcels):
        numel = parcel.gradient.numel() // comm.host_partition.num_places
        count = max(1, numel // BATCH)
        for index in range(count):
            if left <= 0:
                batches.append([])
                left = BATCH
            batches[-1].append(_Piece(number, index, count))
            left -= numel // count
    return batches


def block_of(columns: int) -> int:
    """Returns the number of numbers with one scale, a multiple of 8: whole rows of a matrix, if they are short."""
    rows = columns * (8 // math.gcd(columns, 8))
    return min(MOST, rows * -(-LEAST // rows))


def encode(numbers: Tensor, into: Tensor, block: int) -> None:
    """Writes signs and scales, and leaves in `numbers`, [numel], what they do not say.

    Args:
        into: bytes; those of `numbers` come first.
        block: the number of numbers with one scale.
    """
    for values, signs, scales in _blocks(numbers, into, block):
        scales.copy_(values.abs().mean(dim=1))
        is_negative = torch.zeros(len(values), 8 * signs.shape[1], dtype=torch.bool, device=values.device)
        torch.signbit(values, out=is_negative[:, : values.shape[1]])
        signs.copy_((is_negative.view(torch.int64) * GATHER_BITS).view(torch.uint8)[:, 7::8])
        values.sub_(torch.copysign(scales.unsqueeze(1).to(values.dtype), values))


def add(encoded: Tensor, to: Tensor, block: int) -> None:
    """Adds what was encoded to numbers, [numel]."""
    table = _table(to.device)
    for values, signs, scales in _blocks(to, encoded, block):
        unpacked = table.index_select(0, signs.reshape(-1).int()).view(torch.int8).view(len(values), -1)
        values.addcmul_(unpacked[:, : values.shape[1]].to(values.dtype), scales.unsqueeze(1).to(values.dtype))


def _num_bytes(numel: int, block: int) -> int:
    """Returns the number of bytes for numbers: the scales, and then the signs."""
    return SCALE_BYTES * -(-numel // block) + -(-numel // 8)


def _blocks(numbers: Tensor, encoded: Tensor, block: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields views of some blocks at a time: numbers, [blocks, numbers], signs, [blocks, bytes], scales, [blocks]."""
    numel = len(numbers)
    num_blocks, last = -(-numel // block), numel // block * block
    stretch = STRETCH // block * block if numbers.device.type == "cpu" else max(block, last)
    scales = encoded[: SCALE_BYTES * num_blocks].view(torch.float32)
    signs = encoded[SCALE_BYTES * num_blocks :]
    for start in range(0, last, stretch):
        stop = min(start + stretch, last)
        bits = signs[start // 8 : stop // 8].view(-1, block // 8)
        yield numbers[start:stop].view(-1, block), bits, scales[start // block : stop // block]
    if last < numel:
        yield numbers[last:].view(1, -1), signs[last // 8 : -(-numel // 8)].view(1, -1), scales[-1:]


@lru_cache
def _table(device: torch.device) -> Tensor:
    """Returns the eight signs that a byte means, 1 or −1 in eight bits each, as one number."""
    bits = torch.arange(256).unsqueeze(1).bitwise_right_shift(torch.arange(8)).bitwise_and(1)
    return (1 - 2 * bits).to(torch.int8).view(torch.int64).squeeze(1).to(device)
