"""Sign: one bit for each number, and one scale for each block of them: the mean of their absolute values.

    outgoing       0.9  −0.2   0.1  −0.4        scale 0.4
    what travels     +     −     +     −        1 bit each, 4 bytes for the scale
    sent           0.4  −0.4   0.4  −0.4
    kept           0.5   0.2  −0.3   0.0        error feedback sends it later

Every rank sends its bits to all others, who add up what they mean. So the bytes grow with the number of hosts h:
(h − 1) ÷ 32 of a gradient's arrive on each host, where a ring moves 2 (h − 1) ÷ h of them.

Source: Zheng, Huang, Kwok, "Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback", arXiv
1905.10936, definition 1. Read before: `dense_start.py`. Read next: `top_k.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.errors import ConfigError
from ddp.gradients.hook import Hook, Parcel, aligned, all_gather, wide

BLOCK = 2048  # numbers with one scale
STRETCH = 32 * BLOCK  # numbers whose temporary copies fit a cache
SCALE_BYTES = 4
GATHER_BITS = 0x0102_0408_1020_4080  # times eight bytes of 0 or 1: they are the bits of the product's highest byte


class Sign(Hook):
    """Sends one bit for each number. Needs `ErrorFeedback` around it."""

    def __repr__(self) -> str:
        return "Sign()"

    def check(self) -> None:
        if not self.is_corrected:
            raise ConfigError(
                "the hook Sign() without error feedback goes astray: take ErrorFeedback(Sign()), or "
                "hook.error_feedback=true"
            )

    def reduce(self, parcels: Sequence[Parcel], comm: Communicator, step: int) -> None:
        carriers = comm.carriers
        parts = [[carriers.part_of(p.gradient.numel(), r) for p in parcels] for r in range(comm.world_size)]
        bounds = [aligned(_num_bytes(part.stop - part.start) for part in mine) for mine in parts]
        payload = parcels[0].gradient.new_zeros(max(each[-1] for each in bounds), dtype=torch.uint8)
        for parcel, start in zip(parcels, bounds[comm.rank], strict=False):
            encode(parcel.outgoing, payload[start:])
        arrived = all_gather(payload, comm)
        for number, parcel in enumerate(parcels):
            total = torch.zeros_like(parcel.gradient, dtype=wide(parcel.gradient.dtype))
            for rank, encoded in enumerate(arrived):
                add(encoded[bounds[rank][number] :], total[parts[rank][number]])
            parcel.gradient.copy_(total)


def encode(numbers: Tensor, into: Tensor) -> None:
    """Writes signs and scales, and leaves in `numbers`, [numel], what they do not say.

    Args:
        into: bytes; those of `numbers` come first.
    """
    for values, signs, scales in _blocks(numbers, into):
        scales.copy_(torch.linalg.vector_norm(values, 1, dim=1).div_(values.shape[1]))
        is_negative = torch.zeros(len(values), 8 * signs.shape[1], dtype=torch.bool, device=values.device)
        torch.signbit(values, out=is_negative[:, : values.shape[1]])
        signs.copy_((is_negative.view(torch.int64) * GATHER_BITS).view(torch.uint8)[:, 7::8])
        values.sub_(torch.copysign(scales.unsqueeze(1).to(values.dtype), values))


def add(encoded: Tensor, to: Tensor) -> None:
    """Adds what was encoded to numbers, [numel]."""
    table = _table(to.device)
    for values, signs, scales in _blocks(to, encoded):
        unpacked = table[signs.reshape(-1).int()].view(torch.int8).view(len(values), -1)
        values.add_(torch.mul(unpacked[:, : values.shape[1]], scales.unsqueeze(1)))


def _num_bytes(numel: int) -> int:
    """Returns the bytes for so many numbers: the scales, and then the signs."""
    return SCALE_BYTES * -(-numel // BLOCK) + -(-numel // 8)


def _blocks(numbers: Tensor, encoded: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields views of some blocks at a time: numbers, [blocks, numbers], signs, [blocks, bytes], scales, [blocks]."""
    numel = len(numbers)
    num_blocks, last = -(-numel // BLOCK), numel // BLOCK * BLOCK
    scales = encoded[: SCALE_BYTES * num_blocks].view(torch.float32)
    signs = encoded[SCALE_BYTES * num_blocks :]
    for start in range(0, last, STRETCH):
        stop = min(start + STRETCH, last)
        bits = signs[start // 8 : stop // 8].view(-1, BLOCK // 8)
        yield numbers[start:stop].view(-1, BLOCK), bits, scales[start // BLOCK : stop // BLOCK]
    if last < numel:
        yield numbers[last:].view(1, -1), signs[last // 8 : -(-numel // 8)].view(1, -1), scales[-1:]


@lru_cache
def _table(device: torch.device) -> Tensor:
    """Returns the eight signs that a byte means, 1 or −1 in eight bits each, as one number."""
    bits = torch.arange(256).unsqueeze(1).bitwise_right_shift(torch.arange(8)).bitwise_and(1)
    return (1 - 2 * bits).to(torch.int8).view(torch.int64).squeeze(1).to(device)
