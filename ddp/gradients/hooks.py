"""The hooks of this package: four ways to send less than all of a gradient (`hook.py` has their protocol).

Sign         one bit for each number, and a scale for each row
TopK         the largest numbers, with their positions
RandomK      numbers at random positions, which are the same on all ranks
PowerSGD     two narrow matrices, whose product is near the gradient
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
from ddp.errors import ConfigError
from ddp.gradients.hook import Gathering, Hook, Memory, Parcel, aligned, summing, wide
from ddp.process import gpu
from ddp.process.streams import stream_seed
from ddp.setting import Below1, Natural, UpTo1, Whole, checked

# --- Sign ------------------------------------------------------------------------------------------------------------
#
# One bit for each number, and one scale for each row of them: the mean of their absolute values.
#
#     outgoing       0.9  −0.2   0.1  −0.4        scale 0.4
#     what travels     +     −     +     −        1 bit each, 4 bytes for the scale
#     sent           0.4  −0.4   0.4  −0.4
#     kept           0.5   0.2  −0.3   0.0        error feedback sends it later
#
# A scale serves a row of a matrix, or a part of a long one, because rows differ in magnitude: that of a token which is
# not in the batch is zero, and stays so. Adam would amplify what a common scale put there.
#
# Every rank sends its bits to all others, which decode and add them. So the bytes grow with the number of hosts h: (h −
# 1) ÷ 32 of a gradient's arrive on each host, where a ring moves 2 (h − 1) ÷ h of them.
#
# Source: Zheng, Huang, Kwok, "Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback", arXiv
# 1905.10936, definition 1.


LEAST, MOST = 64, 2048  # numbers with one scale
BATCH = 1 << 21  # numbers that travel in one message, while the next ones are encoded
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
        """Encodes this rank's pieces, and sends them."""
        for piece, block, start in zip(self._pieces, self._blocks, self._bounds[self._rank], strict=False):
            parcel = self._parcels[piece.parcel]
            outgoing = parcel.outgoing[piece.of(slice(0, len(parcel.outgoing)))]
            encode_signs(outgoing, self._gathering.mine[start:], block)
        self._gathering.start()

    def receive(self, sums: Sequence[Tensor]) -> None:
        """Adds the pieces of all ranks to the sums."""
        for encoded, places, bounds in zip(self._gathering.wait(), self._places, self._bounds, strict=True):
            for piece, block, place, start in zip(self._pieces, self._blocks, places, bounds, strict=False):
                add_signs(encoded[start:], sums[piece.parcel][place], block)


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


def encode_signs(numbers: Tensor, into: Tensor, block: int) -> None:
    """Writes signs and scales, and leaves the encoding error in `numbers`, [numel].

    Args:
        into: bytes; those of `numbers` come first.
        block: the number of numbers with one scale.
    """
    for values, signs, scales in _sign_blocks(numbers, into, block):
        scales.copy_(values.abs().mean(dim=1))
        is_negative = torch.zeros(len(values), 8 * signs.shape[1], dtype=torch.bool, device=values.device)
        torch.signbit(values, out=is_negative[:, : values.shape[1]])
        signs.copy_((is_negative.view(torch.int64) * GATHER_BITS).view(torch.uint8)[:, 7::8])
        values.sub_(torch.copysign(scales.unsqueeze(1).to(values.dtype), values))


def add_signs(encoded: Tensor, to: Tensor, block: int) -> None:
    """Decodes signs and scales, and adds them to numbers, [numel]."""
    table = _bit_table(to.device)
    for values, signs, scales in _sign_blocks(to, encoded, block):
        unpacked = table.index_select(0, signs.reshape(-1).int()).view(torch.int8).view(len(values), -1)
        values.addcmul_(unpacked[:, : values.shape[1]].to(values.dtype), scales.unsqueeze(1).to(values.dtype))


def _num_bytes(numel: int, block: int) -> int:
    """Returns the number of bytes for numbers: the scales, and then the signs."""
    return SCALE_BYTES * -(-numel // block) + -(-numel // 8)


def _sign_blocks(numbers: Tensor, encoded: Tensor, block: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
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
def _bit_table(device: torch.device) -> Tensor:
    """Returns the eight signs that a byte means, 1 or −1 in eight bits each, as one number."""
    bits = torch.arange(256).unsqueeze(1).bitwise_right_shift(torch.arange(8)).bitwise_and(1)
    return (1 - 2 * bits).to(torch.int8).view(torch.int64).squeeze(1).to(device)


# --- Top-k -----------------------------------------------------------------------------------------------------------
#
# The largest numbers of each tensor, with their positions.
#
#     outgoing       0.9  −0.2   0.1  −0.4        ratio 0.5: the two largest
#     what travels   0.9 at 0,  −0.4 at 3         8 bytes each
#     kept           0.0  −0.2   0.1   0.0        error feedback sends it later
#
# The k largest are found exactly. A sample gives a threshold; of the few numbers that reach it, the k largest are
# selected.
#
# Every rank sends its numbers to all others, so the bytes grow with the number of hosts h: each host receives 2 ratio
# (h − 1) times those of a gradient.
#
# Note "momentum correction". A number that waits for many steps misses the momentum that an optimizer would have given
# it. With `momentum` the hook keeps the velocity itself, on each rank, and sends that; the optimizer must have none.
# Where a number was sent, its velocity restarts at zero, so that it does not push in an old direction.
#
# Note "ratio warm-up". At first weights change fast, so the ratio falls from 1/4 to the final one, by the same factor
# in each of `warmup_steps` steps.
#
# Source: Lin et al., "Deep Gradient Compression", arXiv 1712.01887, sections 3.2 and 3.3 and algorithm 4.


FIRST_RATIO = 0.25
NUM_SAMPLED = 1 << 16
INDEX_BYTES = 4
MARGIN = 1.2  # candidates for each number to be found


class TopK(Hook):
    """Sends the largest numbers of each tensor.

    Args:
        ratio: share of the numbers that is sent, above 0 and up to 1.
        momentum: of the velocity that is sent in place of the gradient (note "momentum correction"); below 1.
        warmup_steps: steps until the ratio is the final one (note "ratio warm-up").
        error_feedback: put `ErrorFeedback` around it; without it accuracy is lost.

    Raises:
        ConfigError: a value is out of range.
    """

    @checked
    def __init__(
        self, ratio: UpTo1 = 0.01, *, momentum: Below1 = 0.0, warmup_steps: Whole = 0, error_feedback: bool = True
    ) -> None:
        self.ratio, self.momentum, self.warmup_steps = ratio, momentum, warmup_steps
        self.error_feedback = error_feedback
        self._velocity = Memory("summed")

    def __repr__(self) -> str:
        return f"TopK({self.ratio:g}, momentum={self.momentum:g}, warmup_steps={self.warmup_steps})"

    def check(self) -> None:
        if self.momentum and not self.is_corrected:
            raise ConfigError(
                f"the hook {self!r}: momentum needs error feedback; leave error_feedback=False out, or take momentum=0"
            )

    def ratio_at(self, step: int) -> float:
        """Returns the share of the numbers that is sent in this step, counted from 0."""
        if step >= self.warmup_steps or self.ratio >= FIRST_RATIO:
            return self.ratio
        return float(FIRST_RATIO * (self.ratio / FIRST_RATIO) ** (step / self.warmup_steps))

    def enter(self, parcel: Parcel) -> None:
        if self.momentum:
            parcel.outgoing = self._velocity.add_to(parcel.outgoing, parcel.name, factor=self.momentum)

    def reduce(self, parcels: Sequence[Parcel], comm: Communicator, step: int) -> None:
        host_partition, ratio = comm.host_partition, self.ratio_at(step)
        dtype = wide(parcels[0].gradient.dtype)
        parts = [[host_partition.part_of(p.gradient.numel(), r) for p in parcels] for r in range(comm.world_size)]
        counts = [[math.ceil(ratio * (part.stop - part.start)) for part in mine] for mine in parts]
        each = dtype.itemsize + INDEX_BYTES
        bounds = [aligned(each * count for count in mine) for mine in counts]
        gathering = Gathering([of_rank[-1] for of_rank in bounds], parcels[0].gradient, comm)
        for parcel, count, start in zip(parcels, counts[comm.rank], bounds[comm.rank], strict=False):
            where = largest(parcel.outgoing, count)
            numbers, positions = _views(gathering.mine[start:], count, dtype)
            torch.index_select(parcel.outgoing, 0, where, out=numbers)
            positions.copy_(where)
            parcel.outgoing.index_fill_(0, where, 0.0)
            if self.momentum:
                self._velocity.pending[parcel.name].index_fill_(0, where, 0.0)
        arrived = gathering.start().wait()
        for number, parcel in enumerate(parcels):
            with summing(parcel.gradient) as total:
                for rank, encoded in enumerate(arrived):
                    numbers, positions = _views(encoded[bounds[rank][number] :], counts[rank][number], dtype)
                    total[parts[rank][number]].index_add_(0, positions, numbers)

    def memories(self) -> dict[str, Memory]:
        return {"velocity": self._velocity} if self.momentum else {}


def largest(numbers: Tensor, count: int) -> Tensor:
    """Returns the positions of the `count` numbers of the largest absolute values, in any order."""
    numel = len(numbers)
    if numbers.device.type == "cpu" and numel > 4 * max(NUM_SAMPLED, count):
        # not on a GPU, because the host would wait for the number of candidates
        sample = numbers[:: numel // NUM_SAMPLED].abs()
        rank = math.ceil(MARGIN * count / numel * len(sample)) + 8  # among the sample, from the largest on
        least = sample.kthvalue(max(1, len(sample) - rank)).values
        starts = range(0, numel, STRETCH)
        found = [torch.nonzero(numbers[start : start + STRETCH].abs() >= least) + start for start in starts]
        candidates = torch.cat(found).squeeze(1)
        if len(candidates) >= count:
            return candidates[numbers[candidates].abs().topk(count, sorted=False).indices]
    return numbers.abs().topk(count, sorted=False).indices


def _views(encoded: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the numbers and the positions in the bytes of a parcel."""
    middle = dtype.itemsize * count
    return encoded[:middle].view(dtype), encoded[middle : middle + INDEX_BYTES * count].view(torch.int32)


# --- Random-k --------------------------------------------------------------------------------------------------------
#
#     step 1      0.9  ·  ·  │  ·  ·  0.3  │  …      ratio 1/3: one number of every three
#     step 2       ·  0.1 ·  │ 0.5 ·   ·   │  …
#
# All ranks draw from the same keyed stream, so positions need not travel, and the numbers are added up by an ordinary
# all-reduce: the bytes are `ratio` times those of the gradient, at any number of hosts. Each number has the same
# chance. Without error feedback, what is sent is multiplied by the length of its run, so that the mean over many steps
# is right.
#
# Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", arXiv 1809.07599, definition 2.2; here one number is
# drawn from each run of neighbours, which costs k draws.


class RandomK(Hook):
    """Sends one number out of every 1 ÷ ratio.

    Args:
        ratio: share of the numbers that is sent, above 0 and up to 1; 1 ÷ ratio is rounded to a whole number.
        seed: of the draws.
        error_feedback: put `ErrorFeedback` around it.

    Raises:
        ConfigError: the ratio is out of range.
    """

    @checked
    def __init__(self, ratio: UpTo1 = 0.1, *, seed: int = 0, error_feedback: bool = True) -> None:
        self.ratio, self.seed, self._stride, self.error_feedback = ratio, seed, round(1 / ratio), error_feedback

    def __repr__(self) -> str:
        return f"RandomK({self.ratio:g}, seed={self.seed})"

    def reduce(self, parcels: Sequence[Parcel], comm: Communicator, step: int) -> None:
        on_host = [self._draw(parcel, step) for parcel in parcels]  # where their number is known without waiting
        lengths = list(map(len, on_host))
        bounds = aligned(lengths)
        drawn = gpu.sent(torch.cat(on_host), parcels[0].gradient.device).split(lengths)
        numbers = parcels[0].gradient.new_zeros(bounds[-1], dtype=wide(parcels[0].gradient.dtype))
        for parcel, where, known, start in zip(parcels, drawn, on_host, bounds, strict=False):
            first, last = torch.searchsorted(known, known.new_tensor([parcel.mine.start, parcel.mine.stop])).tolist()
            here = where[first:last] - parcel.mine.start
            torch.index_select(parcel.outgoing, 0, here, out=numbers[start + first : start + last])
            parcel.outgoing.index_fill_(0, here, 0.0)
            if not self.is_corrected:
                runs, last_run = numbers[start : start + len(where)].split([len(where) - 1, 1])
                runs.mul_(self._stride)
                last_run.mul_(parcel.gradient.numel() - self._stride * (len(where) - 1))
        comm.all_reduce(numbers)
        torch._foreach_zero_([parcel.gradient for parcel in parcels])
        for parcel, where, start in zip(parcels, drawn, bounds, strict=False):
            parcel.gradient[where] = numbers[start : start + len(where)].to(parcel.gradient.dtype)

    def _draw(self, parcel: Parcel, step: int) -> Tensor:
        """Returns the positions of this step, rising, on the CPU."""
        numel = parcel.gradient.numel()
        generator = torch.Generator().manual_seed(stream_seed(self.seed, "random_k", step, parcel.name))
        starts = torch.arange(0, numel, self._stride, device="cpu")
        lengths = (numel - starts).clamp_(max=self._stride)
        draws = torch.randint(1 << 40, lengths.shape, generator=generator, device="cpu")
        return starts + draws % lengths


# --- PowerSGD --------------------------------------------------------------------------------------------------------
#
# A matrix travels as two narrow ones, whose product is near it.
#
#     M   [rows, columns]    the outgoing gradient of this host; Σ: sum over hosts
#     P = Σ M Q              [rows, rank], one all-reduce
#     P̂ = the orthonormal columns of P
#     Q = Σ Mᵀ P̂             [columns, rank], another all-reduce
#     result P̂ Qᵀ            kept: M − P̂ (Mᵀ P̂)ᵀ, of this host
#
# That is one step of a power iteration, from the Q of the last step (*warm start*): over the steps, P̂ turns to the
# directions in which gradients are largest. Only (rows + columns) × rank numbers travel, by ordinary all-reduces, at
# any number of hosts.
#
# Source: Vogels, Karimireddy, Jaggi, "PowerSGD", arXiv 1905.13727, algorithms 1 and 2; here each host keeps the error
# of its own M, and not of the mean: the sum over hosts is the same.


WORTH_IT = 2  # times fewer numbers; otherwise the gradient is sent dense


class PowerSGD(Hook):
    """Sends matrices as products of two narrow ones.

    Args:
        rank: number of columns of the narrow matrices.
        warm_start: begin with the factor of the last step, and not with a new random one.
        seed: of the first factors.
        error_feedback: put `ErrorFeedback` around it; without it accuracy is lost.

    Raises:
        ConfigError: the rank is not positive.
    """

    carries_whole = True

    @checked
    def __init__(
        self, rank: Natural = 4, *, warm_start: bool = True, seed: int = 0, error_feedback: bool = True
    ) -> None:
        self.rank, self.warm_start, self.seed, self.error_feedback = rank, warm_start, seed, error_feedback
        self._factors = Memory("same")

    def __repr__(self) -> str:
        return f"PowerSGD({self.rank}, warm_start={self.warm_start}, seed={self.seed})"

    def takes(self, gradient: Tensor, shape: tuple[int, int], step: int) -> bool:
        narrow = WORTH_IT * self.rank * sum(shape)
        return super().takes(gradient, shape, step) and self.rank <= min(shape) and narrow <= gradient.numel()

    def reduce(self, parcels: Sequence[Parcel], comm: Communicator, step: int) -> None:
        starts = [self._start(parcel, step) for parcel in parcels]
        carried = [(n, parcel.outgoing.view(parcel.shape)) for n, parcel in enumerate(parcels) if len(parcel.outgoing)]
        summed, left = self._narrow(parcels, side=0)
        for number, matrix in carried:
            torch.mm(starts[number], matrix.T, out=left[number])
        comm.all_reduce(summed)
        torch._foreach_copy_(left, [torch.linalg.qr(p.T).Q.T for p in left])
        summed, right = self._narrow(parcels, side=1)
        for number, matrix in carried:
            torch.mm(left[number], matrix, out=right[number])
            if self.is_corrected:
                matrix.addmm_(left[number].T, right[number], alpha=-1)
        comm.all_reduce(summed)
        for parcel, start, p, q in zip(parcels, starts, left, right, strict=True):
            with summing(parcel.gradient) as total:
                torch.mm(p.T, q, out=total.view(parcel.shape))
            if self.warm_start:
                # A gradient of zeros says nothing about directions, and zeros would be a bad start.
                torch.where(q.any(), q, start, out=self._factors.buffer_for(parcel.name, q, q.dtype))

    def _narrow(self, parcels: Sequence[Parcel], *, side: int) -> tuple[Tensor, list[Tensor]]:
        """Returns zeros, and views of them as a narrow matrix for each parcel, of its rows or of its columns.

        They are [rank, size], because matrices of a few long rows are multiplied faster than those of a few columns.
        """
        sizes = [parcel.shape[side] for parcel in parcels]
        bounds = aligned(self.rank * size for size in sizes)
        flat = parcels[0].gradient.new_zeros(bounds[-1], dtype=wide(parcels[0].gradient.dtype))
        views = [
            flat[start : start + self.rank * size].view(self.rank, size)
            for size, start in zip(sizes, bounds, strict=False)
        ]
        return flat, views

    def _start(self, parcel: Parcel, step: int) -> Tensor:
        """Returns the Qᵀ to begin with, [rank, columns]: the last one, or a random one."""
        like, shape = parcel.outgoing, (self.rank, parcel.shape[1])
        factor = self._factors.committed.get(parcel.name)
        if factor is not None and factor.shape == shape:
            return factor
        keys = ("powersgd", parcel.name) if self.warm_start else ("powersgd", parcel.name, step)
        generator = torch.Generator().manual_seed(stream_seed(self.seed, *keys))
        return gpu.sent(torch.randn(shape, generator=generator, dtype=like.dtype, device="cpu"), like.device)

    def memories(self) -> dict[str, Memory]:
        return {"factor": self._factors} if self.warm_start else {}
