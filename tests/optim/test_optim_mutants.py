"""One-line mutants of optimizers, schedules, growing batches, the noise scale and slices die.

Mutants that are right all the same are listed, each with the reason.
"""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import pytest
import test_schedules as schedule_tests
import test_trust_ratio as optimizer_tests
import torch
from mutants import mutants, mutated
from torch import nn

from ddp.data.batch_sizes import BatchSizes, BatchWarmup
from ddp.gradients.bucket import Bucket, Slot, span
from ddp.monitor.noise_scale import DECAY, FEWEST, NoiseScale
from ddp.optim import groups, layerwise, norms, schedules, trust_ratio
from ddp.optim.lamb import LAMB
from ddp.optim.lars import LARS
from ddp.optim.layerwise import Layerwise
from ddp.replica import shards

LIMIT_S = 2


def formulas(*kinds: str) -> Callable[[], None]:
    """Returns what compares optimizers with the formulas, with every option, and further properties of them."""

    def check() -> None:
        for kind, option in optimizer_tests.CASES:
            if kind in kinds:
                for maximize in (False, True):
                    optimizer_tests.equals_the_formulas(kind, option, maximize=maximize, num_steps=6)
        for kind in kinds:
            optimizer_tests.test_zero_weights_move_and_excluded_ones_step_as_if_the_ratio_were_one(kind)
            optimizer_tests.test_parameters_without_a_gradient_stay_and_count_no_step(kind)
            optimizer_tests.test_closures_added_groups_and_rates_in_tensors(kind)

    return check


def steps_in_all_layouts() -> None:
    formulas("lamb")()
    for kind in ("lamb", "lars"):
        optimizer_tests.test_gaps_between_elements_are_left_out(kind)
        optimizer_tests.test_complex_parameters_and_a_model_on_the_meta_device(kind)
        optimizer_tests.test_sparse_gradients_are_refused_before_anything_changes(kind)
        with pytest.MonkeyPatch.context() as patch:
            optimizer_tests.test_blocks_and_layouts_change_rounding_alone(kind, patch)
        optimizer_tests.patch_blocks(patch, 512)
        together = [nn.Parameter(torch.linspace(-1, 1, numel)) for numel in (400, 1000, 500, 300, 512, 450, 500)]
        apart = [nn.Parameter(each.detach().clone()) for each in together]
        optimizers = [optimizer_tests.KINDS[kind](together), *(optimizer_tests.KINDS[kind]([each]) for each in apart)]
        for each in (*together, *apart):
            each.grad = each.detach().square()
        for optimizer in optimizers:
            optimizer.step()
        assert all(map(torch.equal, together, apart))
        longest = max(apart, key=torch.numel)
        optimizer_tests.patch_blocks(patch, 2000)
        whole = nn.Parameter(torch.linspace(-1, 1, len(longest)))
        whole.grad = whole.detach().square()
        optimizer_tests.KINDS[kind]([whole]).step()
        torch.testing.assert_close(whole, longest)


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


def counting_equals_walking() -> None:
    batches = [1, 7, 60, BatchWarmup(2, 9, 30), BatchWarmup(3, 41, 50), BatchWarmup(1, 2, 1)]
    for length, batch in itertools.product((1, 10, 23), batches):
        sizes = BatchSizes(length, batch)
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
            steps.add(sizes.size_at(walked))
            walked += sizes.size_at(walked)
        assert sizes.all() == steps
        assert sizes.end(3, epochs=4, num_steps=None)[0] == sizes.num_steps(3, 4 * length)
        assert sizes.num_steps(69, 66) == 0
        for left in (0, -2):
            assert sizes.end(3, epochs=4, num_steps=left) == (left, 3)
        assert sizes.end(3, epochs=4, num_steps=1) == (min(1, sizes.num_steps(3, 4 * length)), sizes.after(3, 1))


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
            scale.add(
                weighted, part_samples=sum(parts), num_parts=len(parts), square=whole, num_samples=num_samples
            )
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


def parameters_are_parted_into_those_that_decay_and_others() -> None:
    optimizer_tests.test_groups()
    net = nn.Sequential(nn.Linear(4, 3), nn.Conv1d(1, 1, 3))
    free = groups.parameter_groups(net, weight_decay=None)
    assert "weight_decay" not in free[0] and len(free) == 2
    only = groups.parameter_groups(nn.Linear(3, 3, bias=False), weight_decay=0.5)
    assert [each["weight_decay"] for each in only] == [0.5]


def slices_are_about_equal() -> None:
    examples = ([900], [64, 1, 300, 40], [0, 5, 0], [128, 128, 127], [100], [3, 600, 90])
    for numels, num_slices in itertools.product(examples, range(1, 6)):
        bucket = Bucket(0, [Slot(i, str(i), nn.Parameter(torch.empty(numel))) for i, numel in enumerate(numels)])
        spans = [span(slot.parameter) for slot in bucket.slots]
        starts = [sum(spans[:index]) for index in range(len(spans))]
        cuts = [range(start, start + max(1, numel), 128) for start, numel in zip(starts, numels, strict=True)]
        borders = sorted({border for each in cuts for border in each} | {sum(spans)})
        found = shards.slice_bounds(bucket, num_slices)
        wanted = [sum(spans) * number / num_slices for number in range(num_slices + 1)]
        nearest = [min(borders, key=lambda border, at=at: abs(border - at)) for at in wanted]
        assert len(found) == num_slices + 1
        assert [abs(a - at) for a, at in zip(found, wanted, strict=True)] == [
            abs(a - at) for a, at in zip(nearest, wanted, strict=True)
        ]
        held: list[int] = []
        for number in range(num_slices):
            for slot, start, begin, end in shards.slice_of(bucket, found, number):
                assert start == starts[slot.index] and start <= begin < end <= start + slot.parameter.numel()
                assert found[number] <= begin < end <= found[number + 1]
                held += range(begin, end)
        assert len(held) == sum(numels) == len(set(held))


CASES: dict[FunctionType, Callable[[], None]] = {
    trust_ratio.trust_ratios: lambda: (formulas("lamb", "lars")(), optimizer_tests.test_the_ratio()),  # type: ignore
    norms.block_norms: blocks_have_their_norms,
    norms.num_blocks: blocks_have_their_norms,
    norms.whole_norms: blocks_have_their_norms,
    norms._blocks: blocks_have_their_norms,
    norms.wide: blocks_have_their_norms,
    LAMB._measure: formulas("lamb"),
    LAMB._ratios: formulas("lamb"),
    LAMB._apply: formulas("lamb"),
    LARS._measure: formulas("lars"),
    LARS._ratios: formulas("lars"),
    LARS._apply: formulas("lars"),
    Layerwise._measure_unit: steps_in_all_layouts,
    Layerwise._apply_to_unit: steps_in_all_layouts,
    Layerwise._rows: steps_in_all_layouts,
    Layerwise._units: steps_in_all_layouts,
    layerwise._of_tensors: steps_in_all_layouts,
    layerwise.clip_factor: formulas("lamb", "lars"),
    groups.parameter_groups: parameters_are_parted_into_those_that_decay_and_others,
    schedules.step: schedules_are_as_they_should_be,
    schedules.cosine: schedules_are_as_they_should_be,
    schedules.polynomial: schedules_are_as_they_should_be,
    schedules.wsd: schedules_are_as_they_should_be,
    schedules._down_to: schedules_are_as_they_should_be,
    schedules.with_warmup: schedules_are_as_they_should_be,
    schedules.set_rate: rates_are_as_they_should_be,
    schedules.scaled_rate: rates_are_as_they_should_be,
    BatchWarmup.size_at: batches_grow_evenly,
    BatchSizes.size_at: counting_equals_walking,
    BatchSizes.num_steps: counting_equals_walking,
    BatchSizes.after: counting_equals_walking,
    BatchSizes.end: counting_equals_walking,
    BatchSizes.all: counting_equals_walking,
    BatchSizes._is_steady: counting_equals_walking,
    BatchSizes._run: counting_equals_walking,
    NoiseScale.add: the_noise_scale_is_that_of_its_definition,
    NoiseScale.estimate: the_noise_scale_is_that_of_its_definition,
    NoiseScale._num_independent.fget: the_noise_scale_is_that_of_its_definition,  # type: ignore[attr-defined]
    shards.slice_bounds: slices_are_about_equal,
    shards.slice_of: slices_are_about_equal,
}
RIGHT_ALL_THE_SAME = {  # what a line is or becomes, and why that is no mistake
    "strict=False": "lengths are equal",
    "reversed[": "an annotation",
    "norm.device": "all tensors are on one device here",
    "norms[1].device": "all tensors are on one device here",
    "norms[-1].device": "all tensors are on one device here",
    "weights[-1].device": "all tensors are on one device here",
    "force=False": "tensors on a CPU can be read by NumPy",
    "+ eps, 2)": "where there is no ratio, its denominator does not count",
    "+ eps, 0)": "where there is no ratio, its denominator does not count",
    ">= BLOCK_NUMEL": "a tensor of one whole block may go either way",
    "< BLOCK_NUMEL": "a tensor of one whole block may go either way",
    "part[-1] if": "the part has one element",
    "if len(part) == 0": "the norm of one norm is itself",
    "ratios[-1] if unit.is_one": "there is one ratio",
    "is_one=False": "a list of one ratio does the same",
    "tensor.stride() == order": "tensors in the right order stay as they are",
    "weights = row[1]": "all tensors of a row have one shape",
    "weights = row[-1]": "all tensors of a row have one shape",
    "  →  numel = 1": "other units are only slower",
    "  →  numel = -1": "other units are only slower",
    "numel -= weights.numel()": "other units are only slower",
    "!= 'cpu'": "other units are only slower",
    "numel() >= STRETCH_NUMEL": "other units are only slower",
    "numel - weights.numel() > STRETCH_NUMEL": "other units are only slower",
    "together, numel = ([], 1)": "other units are only slower",
    "together, numel = ([], -1)": "other units are only slower",
    "max(counts) == 0": "whole norms of single blocks are the same",
    "min(counts) == 1": "a unit has one large tensor, or small ones",
    "named[:6]": "what a message shows",
    "named[:4]": "what a message shows",
    "if begin + samples > end:": "the next turn finds that nothing is left",
    "if steps > num_steps:": "the next turn finds that nothing is left",
    "while position <= self.batch.num_samples": "one turn more finds nothing new",
    "return position > self.batch.num_samples": "only slower",
    "self.length == -1": "only slower",
    "samples = left if position > self": "only slower",
    "isfinite(part_squares - square)": "two infinities leave no number either",
    "if signal < 2 * spread:": "at the border both may be said",
    "if noise < 0": "measurements do not add up to zero",
    "spread < 0:": "measurements do not add up to zero",
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__qualname__)
def test_one_line_mutants_die(function: FunctionType) -> None:
    with small_blocks():
        CASES[function]()
        survivors = [f"{each.before}  →  {each.after}" for each in mutants(function) if survives(function, each)]
    assert [each for each in survivors if not any(part in each for part in RIGHT_ALL_THE_SAME)] == []


def survives(function: FunctionType, mutant: Any) -> bool:
    if mutant.before.startswith("def "):  # a default, which belongs to the function and not to its code
        return False
    with mutated(function, mutant), a_limit():
        try:
            CASES[function]()
        except (Exception, pytest.fail.Exception):
            return False
    return True


@contextmanager
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        optimizer_tests.patch_blocks(patch, 512)
        patch.setattr(shards, "BLOCK_NUMEL", 128)
        yield


@contextmanager
def a_limit() -> Iterator[None]:
    """Some mutants never end."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    former = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
