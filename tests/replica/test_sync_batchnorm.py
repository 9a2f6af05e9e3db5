"""SyncBatchNorm on several ranks against torch's BatchNorm in one process on the whole batch."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import ddp
from ddp.replica import sync_batchnorm
from ddp.replica.broadcast import verify_replicas
from ddp.replica.sync_batchnorm import BLOCK_BYTES, SyncBatchNorm, _combine, _group_of, _moments, _split, _summary

CHANNELS = 3


class Case(NamedTuple):
    """A layer, the shape of one sample behind its channels, and how memory is laid out."""

    kind: type[_BatchNorm]
    positions: tuple[int, ...] = ()
    layout: torch.memory_format = torch.contiguous_format
    transposed: bool = False


CASES = [
    Case(nn.BatchNorm1d),
    Case(nn.BatchNorm1d, (5,)),
    Case(nn.BatchNorm1d, (5,), transposed=True),
    Case(nn.BatchNorm2d, (4, 3)),
    Case(nn.BatchNorm2d, (4, 3), torch.channels_last),
    Case(nn.BatchNorm3d, (2, 3, 2)),
    Case(nn.BatchNorm3d, (2, 3, 2), torch.channels_last_3d),
]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"bias": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"momentum": 0.7, "eps": 0.1},
]
BATCHES = [[3, 3, 3, 3], [2, 4, 1, 5], [4, 0, 3, 1], [0, 5, 0, 0]]  # samples by rank


def layer_of(case: Case, settings: dict[str, Any]) -> _BatchNorm:
    torch.manual_seed(7)
    layer = case.kind(CHANNELS, dtype=torch.float64, **{key: each for key, each in settings.items() if key != "bias"})
    if "bias" in settings:  # not a keyword of torch's classes in 2.10
        layer.register_parameter("bias", None)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -1, 1)
    return layer


def batch_of(case: Case, num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Samples, and the gradient that will reach what becomes of them; both laid out as the case says."""
    torch.manual_seed(seed)
    tensors = []
    for shift in (2.0, 0.3):
        tensor = torch.randn(num_samples, CHANNELS, *case.positions, dtype=torch.float64) * 3 + shift
        tensor = tensor.transpose(1, -1).contiguous().transpose(1, -1) if case.transposed else tensor
        tensors.append(tensor.contiguous(memory_format=case.layout) if not case.transposed else tensor)
    return tensors[0], tensors[1]


def share_of(tensor: Tensor, sizes: list[int], rank: int) -> Tensor:
    return tensor.split(sizes)[rank].clone()


def all_cases() -> None:
    comm = ddp.init(abort_s=20)
    for number, case in enumerate(CASES):
        for settings in SETTINGS if number % 4 == 0 else SETTINGS[:1]:
            equals_one_process(comm, case, settings)
    assert (comm in sync_batchnorm._GROUPS) == (comm.world_size > 1)
    ddp.shutdown()


def equals_one_process(comm: ddp.Communicator, case: Case, settings: dict[str, Any]) -> None:
    """Outputs, gradients and running statistics, over steps with all kinds of batches, and in eval mode after them."""
    reference = layer_of(case, settings)
    ours = SyncBatchNorm.convert(copy.deepcopy(reference))
    for step, sizes in enumerate(sizes[: comm.world_size] for sizes in BATCHES):
        if sum(sizes) == 0:
            continue
        whole, dy = batch_of(case, sum(sizes), seed=step)
        mine = share_of(whole, sizes, comm.rank).requires_grad_()
        whole.requires_grad_()
        for layer in (reference, ours):
            layer.zero_grad()
        expected, output = reference(whole), ours(mine)
        expected.backward(dy)
        output.backward(share_of(dy, sizes, comm.rank))
        close(output, share_of(expected, sizes, comm.rank))
        assert whole.grad is not None
        close(mine.grad, share_of(whole.grad, sizes, comm.rank))
        gradients = [p.grad for p in ours.parameters() if p.grad is not None]
        for p, q in zip(comm.all_reduce(gradients), reference.parameters(), strict=True):
            close(p, q.grad)
        for (name, p), (other, q) in zip(ours.named_buffers(), reference.named_buffers(), strict=True):
            assert name == other
            close(p, q)
    verify_replicas(comm, ours.named_buffers())
    if reference.track_running_stats:
        whole, _ = batch_of(case, 4, seed=100 + comm.rank)
        close(ours.eval()(whole), reference.eval()(whole))


def close(ours: Tensor | None, theirs: Tensor | None) -> None:
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.quick(1)
def test_equals_one_process_on_the_whole_batch(world_size: int) -> None:
    run_ranks(all_cases, world_size)


def many_cases() -> None:
    comm = ddp.init(abort_s=20)
    statistics_are_bitwise_equal(comm)
    eval_mode_is_local(comm)
    nothing_is_sent_backward_unless_needed(comm)
    too_few_values_are_refused_everywhere(comm)
    batches_empty_everywhere(comm)
    half_precision(comm)
    a_large_mean(comm)
    copies_share_the_communicator(comm)
    inside_data_parallel(comm)
    recomputed_under_checkpointing(comm)
    ddp.shutdown()


def test_many_cases_on_two_ranks() -> None:
    run_ranks(many_cases, 2)


def statistics_are_bitwise_equal(comm: ddp.Communicator) -> None:
    torch.manual_seed(comm.rank)
    layer = SyncBatchNorm(17)
    for num_samples in (3 + comm.rank, 700 * (1 - comm.rank)):
        layer(torch.randn(num_samples, 17, 9, 5).exp())
        verify_replicas(comm, layer.named_buffers())


def eval_mode_is_local(comm: ddp.Communicator) -> None:
    group = _group_of(comm)
    x = torch.randn(4 + comm.rank, CHANNELS)
    for layer in (SyncBatchNorm(CHANNELS), SyncBatchNorm(CHANNELS, track_running_stats=False)):
        before = comm.num_calls, group.num_calls
        if comm.rank == 0:
            layer.eval()(x)
        assert before == (comm.num_calls, group.num_calls)
        layer.train()(x)
        assert (comm.num_calls, group.num_calls) == (before[0], before[1] + 1)


def nothing_is_sent_backward_unless_needed(comm: ddp.Communicator) -> None:
    layer, group = SyncBatchNorm(CHANNELS), _group_of(comm)
    for requires_grad in (False, True):
        output = layer(torch.randn(4, CHANNELS, requires_grad=requires_grad))
        before = group.num_calls
        output.sum().backward()
        assert group.num_calls == before + requires_grad


def too_few_values_are_refused_everywhere(comm: ddp.Communicator) -> None:
    layer = SyncBatchNorm(CHANNELS)
    state = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=r"1 value per channel when training, got 1 on all 2 ranks together"):
        layer(torch.randn(comm.rank, CHANNELS, 1))
    torch.testing.assert_close(layer.state_dict(), state)
    layer(torch.randn(1, CHANNELS))  # two in all; and the ranks are still in step
    for training in (True, False):
        layer.train(training)
        with pytest.raises(ValueError, match=r"input \[2, 4\] has 4 channels .* num_features=3"):
            layer(torch.randn(2, 4))
        with pytest.raises(ValueError, match=r"input \[3\]: .*\[N, C\]"):
            layer(torch.randn(3))


def batches_empty_everywhere(comm: ddp.Communicator) -> None:
    theirs = nn.BatchNorm1d(CHANNELS)
    ours = SyncBatchNorm.convert(copy.deepcopy(theirs))
    for layer in (ours, theirs):
        x = torch.empty(0, CHANNELS, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad is not None
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def half_precision(comm: ddp.Communicator) -> None:
    """bfloat16 in and out; statistics in float32. Parameters in float32, as under autocast, or in bfloat16, too."""
    torch.manual_seed(0)
    whole, dy = 5 + torch.randn(2, 8, CHANNELS, 6, 6), torch.randn(2, 8, CHANNELS, 6, 6)
    for dtype in (torch.float32, torch.bfloat16):
        reference, ours = nn.BatchNorm2d(CHANNELS), SyncBatchNorm(CHANNELS, dtype=dtype)
        expected_x = whole.bfloat16().float().flatten(0, 1).requires_grad_()
        expected = reference(expected_x)
        expected.backward(dy.bfloat16().float().flatten(0, 1))
        x = whole[comm.rank].bfloat16().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = ours(x)
        assert output.dtype == torch.bfloat16
        output.backward(dy[comm.rank].bfloat16())
        for mine, theirs in ((output, expected), (x.grad, expected_x.grad)):
            assert mine is not None
            assert theirs is not None
            torch.testing.assert_close(mine.float(), share_of(theirs, [8, 8], comm.rank), rtol=1e-2, atol=1e-2)
        assert ours.running_var is not None
        assert ours.running_var.dtype == dtype
        tolerance = 1e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(ours.running_var.float(), reference.running_var, rtol=tolerance, atol=0)


def a_large_mean(comm: ddp.Communicator) -> None:
    """Mean 10⁴, deviation 1, in float32: a sum of squares would have no digit left."""
    for num_samples in (8, 3000):
        torch.manual_seed(0)
        wholes = [1e4 + torch.randn(2 * num_samples, CHANNELS, 5, 5)]
        wholes.append(wholes[0].contiguous(memory_format=torch.channels_last))
        for whole in wholes:
            layer = SyncBatchNorm(CHANNELS, momentum=1.0)
            layer(whole[: num_samples - 3] if comm.rank == 0 else whole[num_samples - 3 :])
            variance, mean = torch.var_mean(whole.double(), (0, 2, 3))
            assert layer.running_mean is not None
            torch.testing.assert_close(layer.running_mean.double(), mean, rtol=6e-8, atol=0)
            torch.testing.assert_close(layer.running_var.double(), variance, rtol=1e-6, atol=0)


def copies_share_the_communicator(comm: ddp.Communicator) -> None:
    """A group of one rank: such a layer sends nothing, and neither does its deep copy."""
    alone = [comm.subgroup([rank]) for rank in range(comm.world_size)][comm.rank]
    model = SyncBatchNorm.convert(nn.Sequential(nn.BatchNorm1d(CHANNELS)), comm=alone)
    group, x = _group_of(comm), torch.randn(4, CHANNELS) + comm.rank
    before = group.num_calls
    for each in (model, copy.deepcopy(model), copy.copy(model)):
        each(x)
    assert group.num_calls == before
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for each in (pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        torch.testing.assert_close(each.state_dict(), model.state_dict())
        each(x)  # all ranks' again: the pickle knows no communicator
    assert group.num_calls == before + 2
    SyncBatchNorm.convert(model, comm=comm)(x)
    assert group.num_calls == before + 3


def small_cnn() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 5), nn.BatchNorm1d(5)
    ).double()


def inside_data_parallel(comm: ddp.Communicator) -> None:
    """Equal shares of a batch: the gradients' mean over ranks is the gradient of the mean loss over the batch."""
    reference = small_cnn()
    replica = ddp.DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(small_cnn()))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (reference, replica)]
    for step in range(3):
        torch.manual_seed(step)
        x, weights = torch.randn(8, 1, 8, 8, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
        mine = slice(4 * comm.rank, 4 * comm.rank + 4)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (reference(x) * weights).sum(1).mean().backward()
        (replica(x[mine]) * weights[mine]).sum(1).mean().backward()
        for p, q in zip(replica.parameters(), reference.parameters(), strict=True):
            close(p.grad, q.grad)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(replica.module.state_dict(), reference.state_dict(), rtol=1e-10, atol=1e-12)
    verify_replicas(comm, replica.state_dict().items())


def recomputed_under_checkpointing(comm: ddp.Communicator) -> None:
    """Forward runs again in backward, collectives and all."""
    torch.manual_seed(comm.rank)
    layer = SyncBatchNorm(CHANNELS)
    x = torch.randn(4, CHANNELS, requires_grad=True)
    dy = torch.randn(4, CHANNELS)
    layer(x).backward(dy)
    expected, x.grad = x.grad, None
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).backward(dy)
    torch.testing.assert_close(x.grad, expected)
    assert layer.num_batches_tracked == 3


# --- what needs no second rank ---------------------------------------------------------------------------------------


def test_summaries_of_parts_and_of_blocks_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    x = 50 + torch.randn(11, CHANNELS, 4, dtype=torch.float64)
    large = 50 + torch.randn(3 * BLOCK_BYTES // (8 * CHANNELS * 100) + 3, CHANNELS, 100, dtype=torch.float64)
    large[:2] += 1e6  # the first block is unlike the others
    parts = _combine(torch.stack([_summary(part) for part in (x[:1], x[:0], x[1:3], x[3:])]))
    for summary, whole in ((_summary(x), x), (parts, x), (_summary(large), large)):
        count, mean, m2 = _split(summary)
        variance, expected = torch.var_mean(whole, (0, 2), correction=0)
        assert int(count) == whole.numel() // CHANNELS
        torch.testing.assert_close(mean, expected, rtol=1e-13, atol=0)
        torch.testing.assert_close(m2 / count, variance, rtol=1e-12, atol=0)
        for ours, theirs in zip(_moments(whole, 1), (expected, variance), strict=True):  # what other devices take
            torch.testing.assert_close(ours, theirs)


def test_convert_keeps_state_and_identity() -> None:
    shared = nn.BatchNorm1d(5, eps=0.2, momentum=None)
    model = nn.ModuleDict(
        {
            "cnn": nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4).eval()),
            "volume": nn.BatchNorm3d(3, affine=False, track_running_stats=False),
            "torch": nn.SyncBatchNorm(6, momentum=0.3),
            "instance": nn.InstanceNorm2d(4),
            "one": shared,
            "two": shared,
        }
    )
    calls: list[nn.Module] = []
    shared.register_forward_hook(lambda module, *_: calls.append(module))
    old = dict(model.named_modules(remove_duplicate=False))
    keys, parameters, buffers = list(model.state_dict()), list(model.parameters()), list(model.buffers())
    assert SyncBatchNorm.convert(model) is model
    assert list(model.state_dict()) == keys
    for ours, theirs in ((model.parameters(), parameters), (model.buffers(), buffers)):
        assert all(mine is other for mine, other in zip(ours, theirs, strict=True))
    for name, layer in model.named_modules(remove_duplicate=False):
        assert isinstance(layer, SyncBatchNorm) == isinstance(old[name], _BatchNorm), name
        assert layer.training == old[name].training
        if isinstance(layer, SyncBatchNorm):
            assert repr(layer).split("(")[1] == repr(old[name]).split("(")[1]  # eps, momentum and all
    assert model["one"] is model["two"]
    model["one"].eval()(torch.randn(2, 5))
    assert calls == [model["one"]]
    before = dict(model.named_modules())
    assert dict(SyncBatchNorm.convert(model).named_modules()) == before

    alone = nn.BatchNorm1d(3)
    converted = SyncBatchNorm.convert(alone)
    assert type(alone) is nn.BatchNorm1d
    assert isinstance(converted, SyncBatchNorm)
    assert converted.weight is alone.weight


def test_convert_refuses_what_it_would_break() -> None:
    class Activated(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    for layer in (nn.LazyBatchNorm2d(), Activated(3)):
        model = nn.Sequential(nn.BatchNorm1d(2), layer)
        with pytest.raises(ValueError, match=f"module '1' is a {type(layer).__name__}"):
            SyncBatchNorm.convert(model)
        assert type(model[0]) is nn.BatchNorm1d


def test_a_constructed_layer_is_as_torchs() -> None:
    theirs, ours = nn.BatchNorm2d(4, 0.1, 0.2, False), SyncBatchNorm(4, 0.1, 0.2, False)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert ours.extra_repr() == theirs.extra_repr()
    assert SyncBatchNorm(4, device="meta", dtype=torch.float16).weight.dtype == torch.float16
    assert list(dict(SyncBatchNorm(4, bias=False).named_parameters())) == ["weight"]
    with pytest.raises(TypeError, match="process_group"):
        SyncBatchNorm(4, process_group=None)  # type: ignore[call-arg]
