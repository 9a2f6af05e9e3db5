"""Hooks: sent + kept = there; the same bits on every rank, by every algorithm; each against its formula.

Tests: ddp/gradients/compression.py, ddp/gradients/hook.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp.collectives.catalog import all_reduce_schedules
from ddp.comm.communicator import Communicator
from ddp.comm.host_links import Settings
from ddp.errors import ConfigError
from ddp.gradients import DenseStart, ErrorFeedback, Hook, PowerSGD, RandomK, Sign, TopK
from ddp.gradients.bucket import Bucket, Slot
from ddp.gradients.compression import Compression, as_matrix, owners
from ddp.gradients.hook import corrected
from ddp.gradients.hooks import MOST, block_of, largest
from recipes.tutorial.simulated import SimulatedNetwork, SimulatedTransport

SHAPES = [(40, 50), (100,), (3, 700), (1025, 2), (16, 8, 3, 3), (), (0, 4), (30, 34)]
HOOKS: dict[str, Callable[[], Hook]] = {
    "sign": Sign,
    "top_k": lambda: TopK(0.1),
    "deep": lambda: TopK(0.05, momentum=0.9, warmup_steps=3),
    "random_k": lambda: RandomK(0.07),
    "power": lambda: PowerSGD(2),
    "power, cold": lambda: ErrorFeedback(PowerSGD(1, warm_start=False)),
    "dense start": lambda: ErrorFeedback(DenseStart(Sign(), 2)),
    "start of feedback": lambda: DenseStart(ErrorFeedback(TopK(0.1)), 1),
    "plain random_k": lambda: RandomK(0.2, error_feedback=False),
    "plain power": lambda: PowerSGD(1, error_feedback=False),
    "plain top_k": lambda: TopK(0.3, error_feedback=False),
}
CORRECTED = [name for name in HOOKS if not name.startswith("plain") and name != "deep"]


class OneBucket:
    """Parameters in one bucket, which a hook reduces."""

    def __init__(self, hook: Hook, comm: Communicator, shapes: Any = SHAPES, dtype: Any = torch.float64) -> None:
        named = [(f"p{n}", nn.Parameter(torch.zeros(shape, dtype=dtype))) for n, shape in enumerate(shapes)]
        self.comm, self.compression = comm, Compression(hook, comm, named)
        self.bucket = Bucket(0, [Slot(n, name, parameter) for n, (name, parameter) in enumerate(named)])
        self.bucket.allocate(self.bucket.slots[0].parameter.detach().new_zeros(self.bucket.numel))

    def step(self, gradients: list[Tensor], divide_by: int = 1) -> list[Tensor]:
        """Every gradient's sum, as the hook makes it."""
        self.compression.begin()
        for slot, gradient in zip(self.bucket.slots, gradients, strict=True):
            assert slot.view is not None
            slot.view.copy_(gradient)
        self.compression.reduce(self.bucket, divide_by=divide_by, async_op=False, label="a step")
        return [slot.view.clone() for slot in self.bucket.slots if slot.view is not None]

    def remembered(self, what: str) -> list[Tensor]:
        """What the hook will have of each parameter once the step is committed."""
        memory = self.compression.hook.memories()[what]
        found = []
        for slot in self.bucket.slots:
            mine = memory.pending.get(slot.name, memory.committed.get(slot.name))
            whole = slot.parameter.detach().clone()
            found.append(whole.zero_() if mine is None or not mine.numel() else mine.view(whole.shape).clone())
        return found


def drawn(rank: int, step: int, shapes: Any = SHAPES, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def each_rank(world_size: int, program: Callable[[Communicator], Any], **settings: Any) -> list[Any]:
    def run(transport: SimulatedTransport) -> Any:
        chosen = Settings(**{"algorithm": "ring", "abort_s": 20, "shared_memory": False, **settings})
        comm = Communicator(transport, chosen, hosts=tuple((rank,) for rank in range(world_size)))
        try:
            return program(comm)
        finally:
            comm.close()

    return SimulatedNetwork(world_size).run(run)


@pytest.mark.parametrize("name", CORRECTED)
@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.quick(4)
def test_sent_and_kept_together_are_what_was_there(world_size: int, name: str) -> None:
    def program(comm: Communicator) -> list[Any]:
        one = OneBucket(HOOKS[name](), comm)
        found = []
        for step in range(5):
            before = one.remembered("residual")
            sent = one.step(drawn(comm.rank, step), divide_by=3)
            found.append((before, sent, one.remembered("residual")))
        return found

    by_rank = each_rank(world_size, program)
    for step in range(5):
        for n in range(len(SHAPES)):
            there = sum(drawn(rank, step)[n] / 3 + by_rank[rank][step][0][n] for rank in range(world_size))
            kept = sum(by_rank[rank][step][2][n] for rank in range(world_size))
            assert torch.allclose(by_rank[0][step][1][n] + kept, there, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("world_size", range(2, 6))
@pytest.mark.quick(5)
def test_every_rank_has_the_same_bits_by_every_algorithm(world_size: int, name: str) -> None:
    schedules = all_reduce_schedules(tuple((rank,) for rank in range(world_size)))
    for algorithm in schedules if world_size in (3, 4) else ["ring"]:

        def program(comm: Communicator) -> list[list[Tensor]]:
            one = OneBucket(HOOKS[name](), comm, dtype=torch.float32)
            return [one.step(drawn(comm.rank, step, dtype=torch.float32), divide_by=7) for step in range(2)]

        first, *others = each_rank(world_size, program, algorithm=algorithm)
        for other in others:
            for mine, its in zip(first, other, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True)), algorithm


@pytest.mark.parametrize("name", HOOKS)
def test_a_step_that_is_taken_back_leaves_no_trace(name: str) -> None:
    def program(comm: Communicator) -> bool:
        one, other = OneBucket(HOOKS[name](), comm), OneBucket(HOOKS[name](), comm)
        for step in range(5):
            expected = one.step(drawn(comm.rank, step))
            if step in (1, 3, 4):
                other.step([gradient * 1e3 for gradient in drawn(comm.rank, 99)])
                other.compression.take_back()
                other.compression.take_back()  # nothing is there any more
            assert all(torch.equal(a, b) for a, b in zip(expected, other.step(drawn(comm.rank, step)), strict=True))
        return one.compression.num_steps == other.compression.num_steps == 4  # the last one is not committed yet

    assert each_rank(2, program) == [True, True]


def alone(hook: Hook, gradients: list[Tensor], world_size: int = 2, divide_by: int = 1) -> list[list[Tensor]]:
    """By step, what a matrix becomes if rank 0 alone has a gradient."""
    shape = gradients[0].shape

    def program(comm: Communicator) -> list[Tensor]:
        one = OneBucket(hook, comm, [shape], gradients[0].dtype)
        mine = [gradient if comm.rank == 0 else torch.zeros_like(gradient) for gradient in gradients]
        return [one.step([gradient], divide_by)[0] for gradient in mine]

    return each_rank(world_size, program)[1]


def test_whoever_wants_a_hook_without_error_feedback_says_so() -> None:
    for make in (Sign, TopK, RandomK, PowerSGD):
        by_itself, explicit = corrected(make()), ErrorFeedback(make())
        assert repr(by_itself) == repr(explicit) == repr(corrected(explicit))
        assert repr(corrected(DenseStart(make(), 3))) == f"DenseStart({explicit!r}, 3)"
        assert repr(corrected(ErrorFeedback(DenseStart(make(), 3)))) == f"ErrorFeedback(DenseStart({make()!r}, 3))"
    for plain in (TopK(error_feedback=False), RandomK(error_feedback=False), PowerSGD(error_feedback=False)):
        assert corrected(plain) is plain


def test_sign_sends_the_mean_size_of_each_block() -> None:
    numbers = torch.randn(3, MOST + 100, dtype=torch.float64)  # the last block is shorter
    numbers[0, ::3] = 0.0
    numbers[0, ::5] = -0.0
    (sent,) = alone(ErrorFeedback(Sign()), [numbers])
    for block, found in zip(numbers.view(-1).split(MOST), sent.view(-1).split(MOST), strict=True):
        scale = block.abs().mean().float().double()
        expected = torch.where(block.signbit(), -scale, scale)
        assert torch.allclose(found, expected, rtol=1e-12, atol=0)  # the other rank's are all 0


@pytest.mark.parametrize(
    ("columns", "block"),
    [(1, 64), (2, 64), (3, 72), (8, 64), (64, 64), (65, 520), (96, 96), (576, 576), (2048, 2048), (3000, 2048)],
)
def test_sign_has_a_scale_for_each_row_or_for_a_few_short_ones(columns: int, block: int) -> None:
    assert block_of(columns) == block
    assert block % 8 == 0


def test_rows_of_zeros_stay_zeros_by_sign() -> None:
    numbers = torch.randn(256, 64, dtype=torch.float64)
    numbers[::3] = 0.0
    (sent,) = alone(ErrorFeedback(Sign()), [numbers])
    assert not sent[::3].any()
    assert sent[1::3].all()


@pytest.mark.parametrize("numel", [1024, 70_001, 1_000_003])
@pytest.mark.parametrize("count", [1, 10, 5000])
def test_the_largest_are_found_exactly(numel: int, count: int) -> None:
    count = min(count, numel)
    for numbers in (torch.randn(numel), torch.arange(numel).float().sub(numel // 2), torch.zeros(numel)):
        where = largest(numbers, count)
        assert where.unique().numel() == count
        assert torch.equal(numbers[where].abs().sort().values, numbers.abs().topk(count).values.sort().values)
    periodic = torch.zeros(numel)
    periodic[:: max(1, numel // (1 << 16))] = torch.arange(len(periodic[:: max(1, numel // (1 << 16))])).float()
    assert torch.equal(periodic[largest(periodic, count)].sort().values, periodic.topk(count).values.sort().values)


def test_top_k_sends_the_largest_of_each_host() -> None:
    numbers = torch.randn(40, 50, dtype=torch.float64)
    (sent,) = alone(TopK(0.01, error_feedback=False), [numbers])
    where = numbers.abs().view(-1).topk(20).indices
    expected = torch.zeros(2000, dtype=torch.float64)
    expected[where] = numbers.view(-1)[where]
    assert torch.equal(sent.view(-1), expected)


def test_the_ratio_falls_by_the_same_factor_in_each_step() -> None:
    hook = TopK(0.25 / 2**4, warmup_steps=4)
    assert [hook.ratio_at(step) for step in range(6)] == pytest.approx([0.25, 0.125, 0.0625, 0.03125, 1 / 64, 1 / 64])
    assert TopK(0.5, warmup_steps=4).ratio_at(0) == 0.5


def test_momentum_correction_is_that_of_deep_gradient_compression() -> None:
    """Algorithm 4 of the paper, with momentum factor masking, on two nodes."""
    shape, momentum, ratio = (40, 50), 0.9, 0.05

    def program(comm: Communicator) -> list[Tensor]:
        one = OneBucket(ErrorFeedback(TopK(ratio, momentum=momentum)), comm, [shape])
        return [one.step(drawn(comm.rank, step, [shape]))[0].view(-1) for step in range(6)]

    found = each_rank(2, program)[0]
    velocity, kept = [torch.zeros(2000, dtype=torch.float64) for _ in range(2)], [0.0, 0.0]
    for step in range(6):
        total = torch.zeros(2000, dtype=torch.float64)
        for rank in range(2):
            velocity[rank] = momentum * velocity[rank] + drawn(rank, step, [shape])[0].view(-1)
            kept[rank] = kept[rank] + velocity[rank]
            mask = torch.zeros(2000, dtype=torch.bool)
            mask[kept[rank].abs().topk(math.ceil(ratio * 2000)).indices] = True
            total += torch.where(mask, kept[rank], 0.0)
            kept[rank], velocity[rank] = torch.where(mask, 0.0, kept[rank]), torch.where(mask, 0.0, velocity[rank])
        assert torch.allclose(found[step], total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
@pytest.mark.quick(1)
def test_random_k_alone_is_right_on_average(ratio: float) -> None:
    numbers = torch.linspace(1, 2, 1030, dtype=torch.float64).view(2, 515)
    stride, num_steps = round(1 / ratio), 400
    sent = alone(RandomK(ratio, seed=3, error_feedback=False), [numbers] * num_steps)
    for each in sent[:5]:
        there = each.view(-1) != 0
        assert there.sum() == math.ceil(1030 / stride)
        lengths = torch.cat([run.new_full(run.shape, run.numel(), dtype=torch.float64) for run in there.split(stride)])
        assert torch.allclose(each.view(-1)[there], (lengths * numbers.view(-1))[there])
        assert all(run.sum() == 1 for run in there.split(stride))
    mean = torch.stack(sent).mean(0) / numbers
    assert abs(mean.mean() - 1) < 0.05
    assert mean.max() - mean.min() < 12 * math.sqrt(stride / num_steps)
    assert stride == 1 or not torch.equal(sent[0], sent[1])


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("hook", [lambda rank: PowerSGD(rank, error_feedback=False), PowerSGD])
def test_power_sgd_of_a_matrix_of_low_rank_is_exact(rank: int, hook: Callable[[int], Hook]) -> None:
    common = torch.randn(60, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def mine(place: int) -> Tensor:
        return common @ torch.randn(rank, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(place))

    def program(comm: Communicator) -> Tensor:
        one = OneBucket(hook(rank), comm, [(60, 80)])
        one.step([torch.zeros(60, 80)])  # so that the first factor is of zeros
        return one.step([mine(comm.rank)])[0]

    for world_size in (1, 2, 3):
        total = sum(mine(place) for place in range(world_size))
        for found in each_rank(world_size, program):
            assert torch.allclose(found, total, rtol=1e-10, atol=1e-10)


def test_power_sgd_turns_to_the_largest_directions() -> None:
    """The same matrix again and again, without error feedback: its best approximation of this rank (Eckart–Young)."""
    left, right = (torch.linalg.qr(torch.randn(60, 60, dtype=torch.float64)).Q for _ in range(2))
    matrix = left @ torch.diag(0.5 ** torch.arange(60, dtype=torch.float64)) @ right
    best = (left[:, :2] * 0.5 ** torch.arange(2, dtype=torch.float64)) @ right[:2]
    warm, cold = (alone(PowerSGD(2, warm_start=warm, error_feedback=False), [matrix] * 20) for warm in (True, False))
    assert torch.allclose(warm[-1], best, atol=1e-8)
    assert (cold[-1] - best).norm() > 0.01


def test_small_and_flat_tensors_go_dense() -> None:
    def program(comm: Communicator) -> list[bool]:
        one = OneBucket(ErrorFeedback(Sign()), comm)
        sent = one.step(drawn(comm.rank, 0))
        sums = [sum(terms) for terms in zip(*(drawn(rank, 0) for rank in range(2)), strict=True)]
        return [torch.allclose(found, total) for found, total in zip(sent, sums, strict=True)]

    small = [math.prod(shape) < 1024 or len(shape) < 2 for shape in SHAPES]
    assert each_rank(2, program)[0] == small
    assert not PowerSGD(16).takes(torch.zeros(33 * 40), (33, 40), 0)  # 1,168 numbers of 1,320: not worth it
    assert PowerSGD(4).takes(torch.zeros(60 * 60), (60, 60), 0)
    assert not Sign().takes(torch.zeros(9000, dtype=torch.complex64), (90, 100), 0)


def test_matrices_are_as_they_lie_in_memory() -> None:
    assert as_matrix(torch.zeros(4, 5)) == (4, 5)
    assert as_matrix(torch.zeros(4, 5).T) == (4, 5)
    assert as_matrix(torch.zeros(8, 3, 5, 5).to(memory_format=torch.channels_last)) == (8, 75)
    assert as_matrix(torch.zeros(7)) == (1, 7)
    assert as_matrix(torch.zeros(())) == (1, 1)
    assert as_matrix(torch.zeros(0, 3)) == (1, 0)


def test_whole_tensors_are_shared_out_evenly() -> None:
    assert owners({"a": 5, "b": 9, "c": 4, "d": 1}, 2) == {"b": 0, "a": 1, "c": 1, "d": 0}
    assert set(owners({"a": 5, "b": 9}, 1).values()) == {0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", HOOKS)
def test_narrow_gradients_are_kept_wide(name: str, dtype: torch.dtype) -> None:
    def program(comm: Communicator) -> list[Tensor]:
        one = OneBucket(HOOKS[name](), comm, dtype=dtype)
        for step in range(3):
            sent = one.step(drawn(comm.rank, step, dtype=dtype), divide_by=2)
        for memory in one.compression.hook.memories().values():
            assert all(tensor.dtype == torch.float32 for tensor in memory.committed.values())
        return sent

    first, other = each_rank(2, program)
    assert all(a.dtype == dtype and torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_wrong_values() -> None:
    for make, match in {
        lambda: TopK(0): "ratio=0: must be a number above 0 and at most 1",
        lambda: TopK(1.5): r"ratio=1\.5: must be a number above 0",
        lambda: TopK(momentum=1.0): r"momentum=1\.0: must be a number from 0 up and below 1",
        lambda: TopK(warmup_steps=-1): "warmup_steps=-1: must be a whole number from 0 up",
        lambda: RandomK(0): "ratio=0: must be a number above 0",
        lambda: PowerSGD(0): "rank=0: must be a whole number from 1 up",
        lambda: PowerSGD(2.5): r"rank=2\.5: must be a whole number",  # type: ignore[arg-type]
        lambda: TopK("a"): "ratio='a': must be a number above 0",  # type: ignore[arg-type]
        lambda: DenseStart(Sign(), None): "steps=None: must be",  # type: ignore[arg-type]
        lambda: DenseStart(Sign(), -2): "steps=-2: must be a whole number from 0 up",
    }.items():
        with pytest.raises(ConfigError, match=match):
            make()

    def program(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match="momentum needs error feedback; leave error_feedback=False out, or"):
            OneBucket(TopK(momentum=0.9, error_feedback=False), comm)
        with pytest.raises(ConfigError, match=r"hook=<function .*: give an object of ddp\.gradients, such as"):
            OneBucket(test_wrong_values, comm)  # type: ignore[arg-type]
        OneBucket(ErrorFeedback(DenseStart(Sign(), 3)), comm)

    each_rank(1, program)
