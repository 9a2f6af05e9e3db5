"""One-line mutants of optimizers, schedules, growing batches, the noise scale and slices die.

Mutants that are right all the same are listed, each with the reason.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import test_schedules as schedule_tests
import test_trust_ratio as optimizer_tests
import torch
from mutants import Mutant, mutants, mutated
from torch import nn
from torch.optim import lr_scheduler

from ddp.data.orders.steps import BatchSizes, BatchWarmup, StepsLeft
from ddp.errors import CheckpointError
from ddp.gradients import reducer
from ddp.gradients.bucket import Bucket, Slot, span
from ddp.optim import layerwise, norms, schedules, trust_ratio
from ddp.optim.layerwise import Layerwise
from ddp.optim.schedules import TorchSchedule
from ddp.optim.trust_ratio import LAMB, LARS
from ddp.strategies import sharded as parameter_slices
from ddp.train.reports import meters
from ddp.train.reports.meters import DECAY, FEWEST, Estimate, NoiseScale

pytestmark = pytest.mark.slow  # because what is proven here is that other tests can fail


def formulas(*kinds: str) -> Callable[[], None]:
    """Returns what compares optimizers with the formulas, with every option, and further properties of them."""

    def check() -> None:
        for number, (kind, option) in enumerate(optimizer_tests.CASES):
            if kind in kinds:
                optimizer_tests.equals_the_formulas(kind, option, maximize=number % 2 == 1, num_steps=5)
        for kind in kinds:
            optimizer_tests.test_zero_weights_move_and_excluded_ones_step_as_if_the_ratio_were_one(kind)
            optimizer_tests.test_parameters_without_a_gradient_stay_and_count_no_step(kind)
            optimizer_tests.test_closures_added_groups_and_rates_in_tensors(kind)

    return check


def steps_in_all_layouts() -> None:
    for kind in ("lamb", "lars"):
        step_with_gaps(kind)
        step_after_the_order_has_changed(kind)
        step_together_or_apart(kind)
        for option in ({}, {"adapt": "with_decay"}, {"adapt": "never"}):
            optimizer_tests.equals_the_formulas(kind, option, maximize=False, num_steps=5)
        optimizer_tests.test_complex_parameters_and_a_model_on_the_meta_device(kind)
        optimizer_tests.test_parameters_without_a_gradient_stay_and_count_no_step(kind)


def step_with_gaps(kind: str) -> None:
    """A large tensor with gaps, together with a small one, equals one without gaps."""
    start = torch.linspace(-3, 3, 60 * 24).view(60, 24).sin()
    tight, gappy = start[:, :17].clone(), start.clone()[:, :17]
    for weights in (tight, gappy):
        params = [nn.Parameter(weights), nn.Parameter(torch.ones(3))]
        optimizer = optimizer_tests.KINDS[kind](params, lr=0.1)
        for number in range(3):
            params[0].grad = (start * (number + 1)).cos()[:, :17]
            params[1].grad = torch.full((3,), number - 0.5)
            optimizer.step()
    torch.testing.assert_close(tight, gappy)
    assert not torch.equal(tight, start[:, :17])


def step_after_the_order_has_changed(kind: str) -> None:
    """A model may be laid out anew in the middle of a run, while its gradients and states are as they were."""
    start, ends = torch.linspace(-3, 3, 6 * 10 * 3 * 4).view(6, 10, 3, 4).sin(), []
    for changes in (False, True):
        weights = nn.Parameter(start.clone())
        optimizer = optimizer_tests.KINDS[kind]([weights], lr=0.1)
        for number in range(4):
            if changes and number == 2:
                weights.data = weights.data.contiguous(memory_format=torch.channels_last)
            weights.grad = (start * (number + 1)).cos()
            optimizer.step()
        ends.append(weights.detach().contiguous())
    torch.testing.assert_close(*ends)


def step_together_or_apart(kind: str) -> None:
    """The same bits, whether tensors share units or not, and whether another finds the norms of whole tensors."""
    numels = (400, 1000, 500, 300, 512, 450, 500, 2000, 2600)
    together = [nn.Parameter(torch.linspace(-1, 1, numel)) for numel in numels]
    apart, exchanged, halved = ([nn.Parameter(each.detach().clone()) for each in together] for _ in range(3))
    make = optimizer_tests.KINDS[kind]
    last, half = make(exchanged), make(halved, maximize=True)
    last.exchange = lambda waiting: [layerwise._of_tensors(each) for each in waiting]
    optimizers = [make(together), *(make([each]) for each in apart), last]
    for number in (1, 2):
        for each in (*together, *apart, *exchanged):
            each.grad = each.detach().square() * number
        for each in halved:
            each.grad = each.detach().square() * (-2 * number)
        for optimizer in optimizers:
            optimizer.step()
        half.step(gradient_factor=0.5)
    for others in (apart, exchanged, halved):
        assert all(map(torch.equal, together, others))
    longest = together[-1].detach()
    with pytest.MonkeyPatch.context() as patch:
        optimizer_tests.patch_blocks(patch, 5000)
        whole = nn.Parameter(torch.linspace(-1, 1, len(longest)))
        optimizer = make([whole])
        for number in (1, 2):
            whole.grad = whole.detach().square() * number
            optimizer.step()
        torch.testing.assert_close(whole.detach(), longest)


def steps_and_their_closures() -> None:
    steps_in_all_layouts()
    for kind in ("lamb", "lars"):
        optimizer_tests.test_closures_added_groups_and_rates_in_tensors(kind)
        optimizer_tests.test_sparse_gradients_are_refused_before_anything_changes(kind)
        optimizer_tests.equals_the_formulas(kind, {"clip_norm": 0.7}, maximize=True, num_steps=3)


def ratios_follow_from_norms() -> None:
    optimizer_tests.test_the_ratio()
    lengths, updates = np.array([2.0, 3.0, 0.0, 4.0]), np.array([5.0, 0.25, 1.0, 0.0])
    how = {"coefficient": 0.5, "weight_decay": 0.25, "eps": 0.125, "norm_bounds": (2.5, 2.75), "max_ratio": 1.0}
    expected = [0.5 * 2.5 / (5.0 + 0.25 * 2.0 + 0.125), 1.0, 1.0, 1.0]
    assert trust_ratio.trust_ratios(lengths, updates, **how).tolist() == expected  # type: ignore[arg-type]
    free = trust_ratio.trust_ratios(lengths, updates, coefficient=0.5)
    assert free.tolist() == [0.5 * 2.0 / 5.0, 0.5 * 3.0 / 0.25, 1.0, 1.0]


def gradients_are_cut_to_a_length() -> None:
    for norm in (0.0, 1.0, 2.0, 2.0000005, 2.00001, 4.0, 5e-7):
        for clip_norm in (2.0, 1e-7):
            gradient = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
            gradient.grad = torch.full((1,), norm, dtype=torch.float64)
            total = torch.nn.utils.clip_grad_norm_(gradient, clip_norm)
            factor = layerwise.clip_factor(total, clip_norm)
            assert type(factor) is float and norm * factor == gradient.grad.item()
    assert layerwise.clip_factor(torch.tensor(100.0), None) == 1.0


def large_tensors_are_those_of_several_blocks() -> None:
    assert [Layerwise.is_large(torch.empty(numel)) for numel in (1, 512, 513)] == [False, False, True]
    assert not Layerwise.is_large(torch.empty(513, 2)[:, 0])
    assert not Layerwise.is_large(torch.empty(513, device="meta"))


def blocks_have_their_norms() -> None:
    for numels in itertools.product((0, 1, 511, 512, 513, 1100), repeat=2):
        tensors = [torch.randn(numel, dtype=torch.float64) for numel in numels]
        found = norms.block_norms(tensors)
        expected = [block.norm() for tensor in tensors for block in tensor.split(512)]
        torch.testing.assert_close(found, torch.stack(expected))
        counts = [norms.num_blocks(numel) for numel in numels]
        assert counts == [len(tensor.split(512)) for tensor in tensors]
        torch.testing.assert_close(norms.whole_norms(found, counts), torch.stack([each.norm() for each in tensors]))
    both = norms.block_norms([torch.tensor([3 + 4j] * 300), torch.ones(4, dtype=torch.float64)])
    assert both.dtype == torch.float64
    assert both.square().sum().item() == pytest.approx(300 * 25 + 4)
    assert norms.block_norms([]).shape == (0,)
    assert norms.block_norms([torch.ones(1)], torch.float64).dtype == torch.float64
    assert norms.block_norms([torch.ones(1, dtype=torch.float16)]).dtype == torch.float32
    assert norms.wide([torch.float16]) == torch.float32 and norms.wide([torch.complex128]) == torch.float64


def schedules_are_as_they_should_be() -> None:
    for name in schedule_tests.PAIRS:
        schedule_tests.test_same_rates_as_torch(name)
    schedule_tests.test_landmarks()
    schedule_tests.test_what_is_no_share_or_power_is_refused()
    assert schedules.wsd(decay_fraction=1)(2.5, 10) == pytest.approx(0.5)
    assert schedules.polynomial(power=0.5)(3, 4) == pytest.approx(0.5)
    stairs = schedules.step(gamma=0.1, milestones=[0.25, 0.5])
    assert [stairs(t, 8) for t in (0, 1, 2, 3, 4, 8)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    schedules.with_warmup(schedules.constant(), fraction=0.999)
    for factor in (-1, math.inf, math.nan):
        with pytest.raises(schedules.ConfigError):
            schedules.set_rate(schedule_tests.optimizer(0.1), [0.1], factor)
    for fraction in (1, -0.5):
        with pytest.raises(schedules.ConfigError):
            schedules.with_warmup(schedules.constant(), fraction=fraction)


def rates_are_as_they_should_be() -> None:
    schedule_tests.test_each_group_keeps_its_proportion_and_tensors_stay_in_place()
    schedule_tests.test_what_is_no_share_or_power_is_refused()
    schedules.set_rate(schedule_tests.optimizer(0.1), [0.1], 0)
    for factor in (-1, math.inf, math.nan):
        with pytest.raises(schedules.ConfigError):
            schedules.set_rate(schedule_tests.optimizer(0.1), [0.1], factor)
    for rule, expected in schedule_tests.RULES:
        schedule_tests.test_scaled_rate(rule, expected)


class Bounded(BatchSizes):
    """Ends what would count for ever."""

    num_turns = 0

    def _stretch(self, position: int) -> tuple[int, int, int]:
        self.num_turns += 1
        assert self.num_turns < 20_000
        return super()._stretch(position)


def counting_equals_walking() -> None:
    batches = [1, 7, 60, BatchWarmup(2, 9, 30), BatchWarmup(3, 41, 50), BatchWarmup(1, 2, 1)]
    for length, batch in itertools.product((1, 10, 23), batches):
        sizes = Bounded(length, batch)
        for begin in (0, 5, 29, 30, 46, 69):
            positions = [begin]
            for _ in range(120):
                positions.append(positions[-1] + sizes.size_at(positions[-1]))
            for num_steps in (0, 1, 2, 9, 40):
                assert sizes.after(begin, num_steps) == positions[num_steps]
            for end in (begin, begin + 1, begin + 37, begin + 70):
                found = sizes.num_steps(begin, end)
                assert positions[found] >= end and (found == 0 or positions[found - 1] < end)
        steps, walked = set[int](), 0
        while walked < 200:
            assert sizes.size_at(walked) > 0
            steps.add(sizes.size_at(walked))
            walked += sizes.size_at(walked)
        assert sizes.all() == steps
        assert StepsLeft(sizes).end(3, epochs=4, num_steps=None)[0] == sizes.num_steps(3, 4 * length)
        assert sizes.num_steps(69, 66) == 0
        for left in (0, -2):
            assert StepsLeft(sizes).end(3, epochs=4, num_steps=left) == (left, 3)
        assert StepsLeft(sizes).end(3, epochs=4, num_steps=1) == (
            min(1, sizes.num_steps(3, 4 * length)),
            sizes.after(3, 1),
        )


def batches_grow_evenly() -> None:
    for warmup in (BatchWarmup(2, 9, 30), BatchWarmup(3, 41, 50), BatchWarmup(1, 2, 1), BatchWarmup(4, 64, 1000)):
        for position in range(warmup.num_samples + 3):
            line = warmup.first + (warmup.last - warmup.first) * min(1, position / warmup.num_samples)
            found = warmup.size_at(position)
            assert found == (warmup.last if line == warmup.last else line // warmup.first * warmup.first)


def the_noise_scale_is_that_of_its_definition() -> None:
    silent = NoiseScale()
    for squares, num_parts, whole in ((16.0, 1, 1.0), (0.0, 0, 1.0), (math.nan, 2, 1.0), (16.0, 2, 1.0)):
        for _ in range(2 * FEWEST):  # one part is the whole batch; none; no number; parts with equal gradients
            silent.add(squares, part_samples=16 if num_parts else 0, num_parts=num_parts, square=whole, num_samples=16)
    assert silent.estimate() is None and silent._num == 0
    for number in range(FEWEST + 2):
        assert (silent.estimate() is None) == (number <= FEWEST)
        silent.add(32.0, part_samples=16, num_parts=2, square=1.5, num_samples=16)
    negative = NoiseScale()  # more often than not, by chance
    for squares in (26.0, *[15.0] * FEWEST):
        negative.add(squares, part_samples=16, num_parts=2, square=1.0, num_samples=16)
    assert negative.estimate() is None and negative._num == FEWEST
    strengths = (0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 2.0)  # from less than noise alone explains to clear signals
    for parts, others, strength in itertools.product(([3, 4], [1, 9, 2], [6], [4, 4, 4]), (1, 10), strengths):
        scale, random = NoiseScale(), torch.Generator().manual_seed(0)
        num_samples, rows, unit = sum(parts) + others, [], 0.0
        for number in range(25):
            squares = [1e-3 * float(each) for each in 1 + torch.rand(len(parts), generator=random, dtype=torch.float64)]
            weighted = sum(size * square for size, square in zip(parts, squares, strict=True))
            of_noise = weighted / len(parts) / num_samples  # the whole gradient's square, if all of it is noise
            whole = of_noise * (strength + float(torch.rand(1, generator=random)))
            known = scale.estimate()
            assert known is None or number > FEWEST  # the first one only finds the unit
            scale.add(weighted, part_samples=sum(parts), num_parts=len(parts), square=whole, num_samples=num_samples)
            # The two equations of the module, solved by elimination.
            noise = (weighted - sum(parts) * whole) / (len(parts) - sum(parts) / num_samples)
            if unit > 0:
                rows.append(((whole - noise / num_samples) / unit, noise / unit))
            unit = 0.8 * (unit or noise) + 0.2 * noise
        if len(rows) < FEWEST:
            assert scale.estimate() is None
            continue
        weights = [DECAY ** (len(rows) - 1 - number) for number in range(len(rows))]
        mean = [sum(w * row[k] for w, row in zip(weights, rows, strict=True)) / sum(weights) for k in (0, 1)]
        about = [
            [
                sum(w * (row[k] - mean[k]) * (row[j] - mean[j]) for w, row in zip(weights, rows, strict=True))
                for j in (0, 1)
            ]
            for k in (0, 1)
        ]
        num = sum(weights) ** 2 / sum(w**2 for w in weights) - 1
        variance = [[about[k][j] / sum(weights) / num for j in (0, 1)] for k in (0, 1)]
        found = scale.estimate()
        if mean[0] + 2 * variance[0][0] ** 0.5 <= 0:
            assert found is None
            continue
        assert found is not None
        if mean[0] > 2 * variance[0][0] ** 0.5:
            slope = [-mean[1] / mean[0] ** 2, 1 / mean[0]]
            error = sum(slope[k] * variance[k][j] * slope[j] for k in (0, 1) for j in (0, 1)) ** 0.5
            assert found.scale == pytest.approx(mean[1] / mean[0]) and found.error == pytest.approx(error)
        else:
            assert found.above == pytest.approx(mean[1] / (mean[0] + 2 * variance[0][0] ** 0.5))


class Exact(NoiseScale):
    """Knows means and their covariance exactly."""

    _num_independent = 1.0  # type: ignore[assignment]

    def __init__(self, mean: tuple[float, float], covariance: list[list[float]]) -> None:
        super().__init__()
        self._num, self._weight = FEWEST, 1.0
        self._sums = np.array(mean)
        self._products = np.array(covariance) + np.outer(mean, mean)


def estimates_follow_from_means_and_covariance() -> None:
    covariance = [[4.0, 1.0], [1.0, 9.0]]
    for signal, noise in itertools.product(
        (-5.0, -4.0, -3.5, -2.0, 0.0, 1.0, 3.0, 4.0, 5.0, 8.0), (-0.5, 0.0, 0.5, 7.0)
    ):
        found = Exact((signal, noise), covariance).estimate()
        if noise <= 0 or signal <= -4:
            assert found is None
        elif signal <= 4:
            assert found == Estimate(None, None, noise / (signal + 4))
        else:
            a, b = -noise / signal**2, 1 / signal
            error = math.sqrt(4 * a * a + 2 * a * b + 9 * b * b)
            assert found is not None and found.above is None
            assert (found.scale, found.error) == pytest.approx((noise / signal, error))
    rounded = Exact((1.0, 2.0), [[-0.125, 0.0], [0.0, -0.125]]).estimate()  # by rounding, a variance below 0
    assert rounded == Estimate(2.0, 0.0, None)
    few = Exact((8.0, 1.0), covariance)
    few._num = FEWEST - 1
    assert few.estimate() is None
    the_noise_scale_is_that_of_its_definition()


def the_noise_scale_is_said() -> None:
    for known, words in WORDS:
        assert known.in_words() == words
    assert "± 100:" in Estimate(700.0, 100.0, None).in_words() and "± 90:" in Estimate(700.0, 94.0, None).in_words()
    assert "≈ 70 ± 10:" in Estimate(66.0, 10.0, None).in_words()
    assert "≈ 10 ± 10:" in Estimate(0.4, 10.0, None).in_words()
    for scale, error in ((5.0, None), (None, 5.0)):
        assert Estimate(scale, error, None).in_words().startswith("critical batch above 1:")


WORDS = [
    (Estimate(912.0, 96.0, None), "critical batch ≈ 910 ± 100: beyond it workers buy less"),
    (Estimate(1234.5, 180.0, None), "critical batch ≈ 1,200 ± 200: beyond it workers buy less"),
    (Estimate(7.7, 0.3, None), "critical batch ≈ 8 ± 1: beyond it workers buy less"),
    (Estimate(None, None, 1470.0), "critical batch above 1,000: up to there more workers pay"),
    (Estimate(None, None, 0.2), "critical batch above 1: up to there more workers pay"),
]


def schedulers_of_torch_step_at_their_moment() -> None:
    def made(every: str | None, kind: str = "StepLR") -> tuple[TorchSchedule, Any]:
        optimizer = schedule_tests.optimizer(0.5)
        scheduler: Any = lr_scheduler.StepLR(optimizer, 1, 0.5)
        if kind == "ReduceLROnPlateau":
            scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
        return TorchSchedule(scheduler, every=every), optimizer

    def rate(optimizer: Any) -> float:
        optimizer.step()
        return float(optimizer.param_groups[0]["lr"])

    for every, expected in (("step", [0.25, 0.125]), ("epoch", [0.5, 0.25])):
        schedule, optimizer = made(every)
        rate(optimizer)
        for is_epoch_end, then in zip((False, True), expected, strict=True):
            schedule.stepped(is_epoch_end=is_epoch_end)
            schedule.evaluated(1.0)
            assert rate(optimizer) == then
        state = schedule.state_dict()
        assert (schedule.name, schedule.needs_metric, schedule.mode) == ("StepLR", False, "")
        other, _ = made(every)
        other.load_state_dict(state)
        assert other.state_dict() == state
        with pytest.raises(CheckpointError):
            other.load_state_dict({**state, "class": "CosineAnnealingLR"})
    for given in (None, "evaluation"):
        plateau, optimizer = made(given, "ReduceLROnPlateau")
        assert (plateau.needs_metric, plateau.mode) == (True, "max")
        for metric, then in ((1.0, 0.5), (0.5, 0.25), (2.0, 0.25)):
            plateau.stepped(is_epoch_end=True)
            plateau.evaluated(metric)
            assert rate(optimizer) == then
    for wrong, kind in ((None, "StepLR"), ("evaluation", "StepLR"), ("step", "ReduceLROnPlateau")):
        with pytest.raises(schedules.ConfigError):
            made(wrong, kind)
    with pytest.raises(schedules.ConfigError):
        mine, theirs = schedule_tests.optimizer(0.5), schedule_tests.optimizer(0.5)
        TorchSchedule(lr_scheduler.StepLR(theirs, 1), every="step").check_optimizer(mine)


def parameters_are_parted_into_those_that_decay_and_others() -> None:
    optimizer_tests.test_groups()
    net = nn.Sequential(nn.Linear(4, 3), nn.Conv1d(1, 1, 3))
    free = layerwise.parameter_groups(net, weight_decay=None)
    assert "weight_decay" not in free[0] and len(free) == 2
    only = layerwise.parameter_groups(nn.Linear(3, 3, bias=False), weight_decay=0.5)
    assert [each["weight_decay"] for each in only] == [0.5]


def slices_are_about_equal() -> None:
    examples = ([900], [64, 1, 300, 40], [0, 5, 0], [128, 128, 127], [100], [3, 600, 90], [0, 0])
    for numels, num_slices in itertools.product(examples, range(1, 6)):
        bucket = Bucket(0, [Slot(i, str(i), nn.Parameter(torch.empty(numel))) for i, numel in enumerate(numels)])
        spans = [span(slot.parameter) for slot in bucket.slots]
        starts = [sum(spans[:index]) for index in range(len(spans))]
        cuts = [range(start, start + max(1, numel), 128) for start, numel in zip(starts, numels, strict=True)]
        borders = sorted({border for each in cuts for border in each} | {sum(spans)})
        for others in ([7] * num_slices, [300] + [0] * (num_slices - 1), [*range(0, 100 * num_slices, 100)], []):
            level = (sum(others) + sum(spans)) / num_slices
            missing = [max(0.0, level - each) for each in others] or [1.0] * num_slices
            shares = [each / (sum(missing) or 1) for each in missing]
            found = reducer.slice_bounds(bucket, num_slices, others)
            wanted = [sum(spans) * sum(shares[:number]) for number in range(num_slices)] + [sum(spans)]
            nearest = [min(borders, key=lambda border, at=at: abs(border - at)) for at in wanted]
            assert len(found) == num_slices + 1
            assert [abs(a - at) for a, at in zip(found, wanted, strict=True)] == pytest.approx(
                [abs(a - at) for a, at in zip(nearest, wanted, strict=True)], abs=1e-6
            )
        held: list[int] = []
        for number in range(num_slices):
            for slot, start, begin, end in parameter_slices.parts_in(bucket, *found[number : number + 2]):
                assert start == starts[slot.index] and start <= begin < end <= start + slot.parameter.numel()
                assert found[number] <= begin < end <= found[number + 1]
                held += range(begin, end)
        assert len(held) == sum(numels) == len(set(held))


# `_ratios` of LAMB and LARS have no mutants; LARC's calls super(), which no mutant can.
CASES: dict[FunctionType, Callable[[], None]] = {
    trust_ratio.trust_ratios: ratios_follow_from_norms,
    norms.block_norms: blocks_have_their_norms,
    norms.num_blocks: blocks_have_their_norms,
    norms.whole_norms: blocks_have_their_norms,
    norms._blocks: blocks_have_their_norms,
    norms.wide: blocks_have_their_norms,
    LAMB._measure: formulas("lamb"),
    LAMB._apply: formulas("lamb"),
    LARS._measure: formulas("lars"),
    LARS._apply: formulas("lars"),
    Layerwise._measure_unit: steps_in_all_layouts,
    Layerwise._apply_to_unit: steps_in_all_layouts,
    Layerwise._rows: steps_in_all_layouts,
    Layerwise._units: steps_in_all_layouts,
    layerwise._of_tensors: steps_in_all_layouts,
    layerwise.clip_factor: gradients_are_cut_to_a_length,
    layerwise.laid_out_like: steps_in_all_layouts,
    Layerwise._small: steps_in_all_layouts,
    Layerwise._memory: steps_in_all_layouts,
    Layerwise.is_large: large_tensors_are_those_of_several_blocks,
    inspect.unwrap(Layerwise.step): steps_and_their_closures,
    layerwise.parameter_groups: parameters_are_parted_into_those_that_decay_and_others,
    schedules.step: schedules_are_as_they_should_be,
    schedules.cosine: schedules_are_as_they_should_be,
    inspect.unwrap(schedules.polynomial): schedules_are_as_they_should_be,
    inspect.unwrap(schedules.wsd): schedules_are_as_they_should_be,
    schedules._down_to: schedules_are_as_they_should_be,
    inspect.unwrap(schedules.with_warmup): schedules_are_as_they_should_be,
    schedules.set_rate: rates_are_as_they_should_be,
    schedules.scaled_rate: rates_are_as_they_should_be,
    BatchWarmup.size_at: batches_grow_evenly,
    BatchSizes.size_at: counting_equals_walking,
    BatchSizes.num_steps: counting_equals_walking,
    BatchSizes.after: counting_equals_walking,
    StepsLeft.end: counting_equals_walking,
    BatchSizes.all: counting_equals_walking,
    BatchSizes._is_steady: counting_equals_walking,
    BatchSizes._stretch: counting_equals_walking,
    NoiseScale.add: the_noise_scale_is_that_of_its_definition,
    NoiseScale.estimate: estimates_follow_from_means_and_covariance,
    Estimate.in_words: the_noise_scale_is_said,
    meters._rounded: the_noise_scale_is_said,
    TorchSchedule.__init__: schedulers_of_torch_step_at_their_moment,
    TorchSchedule.check_optimizer: schedulers_of_torch_step_at_their_moment,
    TorchSchedule.stepped: schedulers_of_torch_step_at_their_moment,
    TorchSchedule.evaluated: schedulers_of_torch_step_at_their_moment,
    TorchSchedule.load_state_dict: schedulers_of_torch_step_at_their_moment,
    NoiseScale._num_independent.fget: the_noise_scale_is_that_of_its_definition,  # type: ignore[attr-defined]
    reducer.slice_bounds: slices_are_about_equal,
    parameter_slices.parts_in: slices_are_about_equal,
}
LENGTHS = "lengths are equal"
UNITS = "other units are only slower"
ONE_BLOCK = "a tensor of one whole block may go either way"
DEVICES = "all tensors are on one device here"
ANNOTATION = "an annotation"
NOTHING_LEFT = "the next turn finds that nothing is left"
ONE_ROW = "all tensors of a row have one shape"
SAME: dict[FunctionType, dict[str, str]] = {  # what a part of the line becomes, and why that is right all the same
    trust_ratio.trust_ratios: {
        "+ eps, 2)": "where there is no ratio, its denominator does not count",
        "+ eps, 0)": "where there is no ratio, its denominator does not count",
    },
    norms.block_norms: {
        "for norm in norms}) >= 1": DEVICES,
        "for norm in norms}) > 2": DEVICES,
        "for norm in norms}) > 0": DEVICES,
        "norms[1].device": DEVICES,
        "norms[-1].device": DEVICES,
        ">= BLOCK_NUMEL": ONE_BLOCK,
    },
    reducer.slice_bounds: {"or 2": "of nothing, each share is nothing"},
    norms.whole_norms: {
        "len(part) == 0": "the norm of one norm is itself",
        "part[-1] if": "the part has one element",
    },
    norms._blocks: {"numel() < BLOCK_NUMEL": ONE_BLOCK},
    LAMB._measure: {"weights[-1].device": DEVICES},
    Layerwise._measure_unit: {"reversed[": ANNOTATION},
    Layerwise._apply_to_unit: {
        "force=False": "NumPy can read what is on a CPU",
        "ratios[-1] if": "there is one ratio",
    },
    Layerwise._rows: {"reversed[": ANNOTATION, "others[1:], strict=False": LENGTHS},
    Layerwise._units: {
        "numel = 1": UNITS,
        "numel = -1": UNITS,
        "numel -= ": UNITS,
        "reversed[": ANNOTATION,
        "!= 'cpu'": UNITS,
        ">= STRETCH_NUMEL": UNITS,
        "numel - weights.numel() >": UNITS,
        "([], 1)": UNITS,
        "([], -1)": UNITS,
        "is_one=False": "a list of one ratio does the same, in one pass more",
        "strict=False": LENGTHS,
    },
    Layerwise._small: {"row[1]": ONE_ROW, "row[-1]": ONE_ROW},
    Layerwise._memory: {
        "!= 'cpu' and": "room in another order is only slower",
        "== 'cpu' or": "new room is only slower",
        "weights[-1]": "any one of a unit's tensors tells it from other units",
        "numel() <= numel": "new room is only slower",
    },
    layerwise._of_tensors: {"max(counts) == 0": "the norm of one norm is itself"},
    inspect.unwrap(Layerwise.step): {"reversed[": ANNOTATION, "strict=False": LENGTHS},
    layerwise.parameter_groups: {
        "strict=False": LENGTHS,
        "named[:6]": "a message may show one name more",
        "named[:4]": "a message may show one name less",
    },
    schedules.set_rate: {"strict=False": LENGTHS},
    BatchSizes.num_steps: {"begin + samples > end": NOTHING_LEFT},
    BatchSizes.after: {"steps > num_steps": NOTHING_LEFT},
    BatchSizes.all: {"position <= self.batch.num_samples": "one turn more finds nothing new"},
    BatchSizes._is_steady: {
        "position > self.batch": "another epoch is counted step by step",
        "self.length == -1": "all epochs are counted step by step",
    },
    BatchSizes._stretch: {"position > self.batch": "an epoch is counted step by step"},
    StepsLeft.end: {"left < num_steps": "both limits end there"},
    NoiseScale.add: {"part_squares - square": "two infinities leave no number either"},
}


def in_words(function: FunctionType) -> str:
    return f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"


@pytest.mark.parametrize("function", CASES, ids=in_words)
def test_one_line_mutants_die(function: FunctionType) -> None:
    with small_blocks():
        CASES[function]()
        survivors = [each.after for each in mutants(function) if survives(function, each)]
    known = SAME.get(function, {})
    assert [line for line in survivors if not any(part in line for part in known)] == []
    assert [part for part in known if not any(part in line for line in survivors)] == []


def survives(function: FunctionType, mutant: Mutant) -> bool:
    if mutant.before.startswith("def "):  # a default, which belongs to the function and not to its code
        return False
    with mutated(function, mutant), np.errstate(all="ignore"):
        try:
            CASES[function]()
        except (Exception, pytest.fail.Exception):
            return False
    return True


@contextmanager
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        optimizer_tests.patch_blocks(patch, 512)
        patch.setattr(reducer, "BLOCK_NUMEL", 128)
        yield
