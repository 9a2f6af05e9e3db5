"""The sharded update against the whole one: the same bits, in memory and over hosts; its state; what it refuses.

Tests: ddp/gradients/reducer.py.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import grouped
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.comm import connect
from ddp.errors import ConfigError, Diverged
from ddp.gradients.bucket import Bucket, Slot, span
from ddp.gradients.reducer import ReduceScatter, slice_bounds
from ddp.optim import LAMB, LARC, LARS, norms, parameter_groups
from ddp.replica.broadcast import tensor_hash
from ddp.strategies import Replicated, Sharded, Strategy, step

X = torch.randn(43, 6, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (43,), generator=torch.Generator().manual_seed(1))
NUM_STEPS = 14
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "lars": lambda groups: LARS(groups, lr=5.0),
    "larc": lambda groups: LARC(groups, lr=0.1, nesterov=True),
    "lamb": lambda groups: LAMB(groups, lr=0.01, decay_in_ratio=False, preset="nvlamb", clip_norm=None),
}


def small_blocks() -> None:
    from ddp.gradients import reducer
    from ddp.optim import layerwise
    from ddp.strategies import sharded

    for module in (norms, layerwise, reducer, sharded):
        assert module.BLOCK_NUMEL > 64  # type: ignore[attr-defined]
        module.BLOCK_NUMEL = 64  # type: ignore[attr-defined]
    layerwise.STRETCH_NUMEL = 256


class Widened(nn.Linear):
    """Computes in float64, behind layers of float32."""

    def __init__(self, here: int, there: int) -> None:
        super().__init__(here, there, bias=False, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(F.gelu(inputs).double())


def made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv1d(1, 5, 3).to(memory_format=torch.contiguous_format),
        nn.Flatten(),
        nn.Linear(20, 31),
        nn.LayerNorm(31),
        nn.GELU(),
        nn.Linear(31, 31, bias=False),
        Widened(31, 3),
    )
    return module, OPTIMIZERS[kind](parameter_groups(module, weight_decay=0.01))


def data() -> tuple[Tensor, Tensor]:
    return X.unsqueeze(1), CLASSES


def fitted(kind: str, **how: Any) -> tuple[nn.Module, torch.optim.Optimizer, float]:
    module, optimizer = made(kind)
    settings: dict[str, Any] = {
        "loss": F.cross_entropy,
        "global_batch": 10,
        "max_steps": NUM_STEPS,
        "clip_norm": 0.3,
        "schedule": ddp.optim.cosine(),
        "folder": None,
        "progress": False,
        "seed": 3,
        **how,
    }
    state = ddp.fit(module, data(), optimizer, **grouped(**settings))
    assert state.train_loss is not None
    return module, optimizer, state.train_loss


def bits_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Hashes of parameters and of the whole state, tensor by tensor."""
    found = [tensor_hash(parameter.detach()) for parameter in module.parameters()]
    for parameter in module.parameters():
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                assert name == "step" or value.shape == parameter.shape, name
                found.append(tensor_hash(value.reshape(-1).float()))
            else:
                found.append(str(value))
    return found


def everything(limit_mb: float) -> list[tuple[str, list[str], list[str]]]:
    """By optimizer: bits without and with shards."""
    small_blocks()
    ddp.init(abort_s=30)
    found = []
    for kind in OPTIMIZERS:
        whole = bits_of(*fitted(kind)[:2])
        parts = bits_of(*fitted(kind, sharded=True)[:2])
        found.append((kind, whole, parts))
        if kind not in ("lamb", "adamw"):
            continue
        found.append((f"{kind}, moved", whole, bits_of(*fitted(kind, sharded=True, callbacks=[MovesOut()])[:2])))
        module, optimizer = made(kind)  # in small buckets and micro-batches
        replica = ddp.BucketedDataParallel(module, bucket_cap_mb=limit_mb, reducer=Sharded.reducer)
        how: dict[str, Any] = {"loss": F.cross_entropy, "folder": None, "progress": False, "seed": 3}
        how |= {"global_batch": 10, "max_steps": NUM_STEPS, "clip_norm": 0.3, "schedule": ddp.optim.cosine()}
        ddp.fit(replica, data(), optimizer, **grouped(micro_size=2, **how))
        replica.verify_replicas()
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())  # each in memory of its own
        other = bits_of(*fitted(kind, micro_size=2)[:2])
        found.append((f"{kind}, small buckets", other, bits_of(module, optimizer)))
        found.append((f"{kind}, frozen", frozen(kind, sharded=False), frozen(kind, sharded=True)))
        veto(kind)
    ddp.shutdown()
    return found


class MovesOut(ddp.Callback):
    """Moves a parameter to other memory, as a user's program may."""

    def step_start(self, state: Any) -> None:
        weight = state.model.module[5].weight
        weight.data = weight.data.clone()


def frozen(kind: str, *, sharded: bool) -> list[str]:
    """Layers are frozen and unfrozen between the parts of a run, whose optimizer goes on."""
    module, optimizer = made(kind)
    for needs in (True, False, True):
        module[2].requires_grad_(needs)
        how: dict[str, Any] = {"loss": F.cross_entropy, "global_batch": 10, "max_steps": 4, "folder": None}
        ddp.fit(module, data(), optimizer, **grouped(progress=False, seed=5, sharded=sharded, **how))
    return bits_of(module, optimizer)


def veto(kind: str) -> None:
    """A step whose gradient is not finite changes neither parameters nor state."""
    module, optimizer, _ = fitted(kind, sharded=True)
    before = bits_of(module, optimizer)
    poisoned = X.clone().unsqueeze(1)
    poisoned[7, 0, 2] = float("nan")
    how: dict[str, Any] = {"loss": F.cross_entropy, "global_batch": 43, "max_steps": 1, "folder": None}
    with pytest.raises(Diverged):
        ddp.fit(module, (poisoned, CLASSES), optimizer, **grouped(progress=False, sharded=True, **how))
    assert bits_of(module, optimizer) == before


@pytest.mark.parametrize("world_size", [3])
def test_sharding_changes_no_bit(world_size: int) -> None:
    first, *others = run_ranks(everything, world_size, 1e-3, timeout_s=120)
    for kind, whole, parts in first:
        assert whole == parts, kind
    assert all(other == first for other in others)


def over_hosts() -> list[tuple[Tensor, Tensor]]:
    """Parameters of all layers, by the whole update and the sharded one."""
    small_blocks()
    connect.boot_id = lambda: f"host {int(os.environ['RANK']) // 2}"
    comm = ddp.init(abort_s=30, algorithm="shared_memory+ring")  # to choose one would measure all
    assert len(comm.hosts) == 2
    found = [(flat(fitted(kind)[0]), flat(fitted(kind, sharded=True)[0])) for kind in ("lamb", "adamw")]
    ddp.shutdown()
    return found


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in module.parameters()])


@pytest.mark.slow
def test_over_hosts_it_equals_the_whole_update_to_rounding() -> None:
    for found in run_ranks(over_hosts, 4):
        for whole, parts in found:
            assert (parts - whole).norm() <= 1e-5 * whole.norm()


def stopped_and_resumed(folder: str, num_steps: int, sharded: bool) -> tuple[list[Tensor], list[str]]:
    """Parameters and their state; their bits."""
    small_blocks()
    ddp.init(abort_s=30)
    how: dict[str, Any] = {"folder": folder, "resume": "auto", "num_shards": 4, "max_steps": num_steps}
    how["global_batch"] = ddp.BatchWarmup(4, 12, num_samples=60)
    module, optimizer, _ = fitted("lamb", sharded=sharded, schedule=None, **how)
    ddp.shutdown()
    state = [value for parameter in module.parameters() for value in optimizer.state[parameter].values()]
    values = [*module.parameters(), *(value for value in state if isinstance(value, Tensor))]
    return [value.detach().clone() for value in values], bits_of(module, optimizer)


@pytest.mark.slow
def test_a_checkpoint_is_the_ordinary_one_at_any_world_size_and_with_or_without_shards(tmp_path: Path) -> None:
    """The whole run once, and in four parts: 2 ranks with shards, 1 without, 4 and 3 with. The batch grows."""
    whole, _ = run_ranks(stopped_and_resumed, 2, str(tmp_path / "whole"), 12, False)[0]
    parts = str(tmp_path / "parts")
    for world_size, num_steps, sharded in ((2, 3, True), (1, 6, False), (4, 9, True)):
        run_ranks(stopped_and_resumed, world_size, parts, num_steps, sharded)
        stored = ddp.load(parts).weights
        assert len(stored) == len(dict(made("lamb")[0].named_parameters()))
    last = run_ranks(stopped_and_resumed, 3, parts, 12, True)
    assert last[0][1] == last[1][1] == last[2][1]
    assert len(whole) == 3 * len(list(made("lamb")[0].parameters()))
    for expected, found in zip(whole, last[0][0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


@given(st.lists(st.integers(0, 900), min_size=1, max_size=12), st.integers(1, 8))
def test_slices_begin_at_tensors_or_blocks_and_are_about_equal(numels: list[int], num_slices: int) -> None:
    slots = [Slot(index, str(index), nn.Parameter(torch.empty(numel))) for index, numel in enumerate(numels)]
    bucket = Bucket(0, slots)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp.gradients.reducer.BLOCK_NUMEL", 128)
        bounds = slice_bounds(bucket, num_slices)
    spans = [span(slot.parameter) for slot in slots]
    assert len(bounds) == num_slices + 1 and bounds == sorted(bounds)
    assert (bounds[0], bounds[-1]) == (0, sum(spans))
    starts = [sum(spans[:index]) for index in range(len(spans))]
    cuts = [range(start, start + max(1, numel), 128) for start, numel in zip(starts, numels, strict=True)]
    allowed = {border for each in cuts for border in each}
    assert set(bounds) <= allowed | {sum(spans)}
    for number, bound in enumerate(bounds):
        assert abs(bound - number * sum(spans) / num_slices) <= 128  # the longest distance between two borders


class Derived(torch.optim.SGD):
    """May do anything in its step."""


def refusals() -> None:
    ddp.init(abort_s=30)
    module, _ = made("sgd")
    with pytest.raises(ConfigError, match=r"Sharded with RMSprop: takes SGD, Adam, AdamW, LARS"):
        fitted_with(module, torch.optim.RMSprop(module.parameters()))
    with pytest.raises(ConfigError, match=r"which ddp\.fit makes of the bare module, whose buckets it cuts"):
        fitted_with(ddp.NaiveDataParallel(module), torch.optim.SGD(module.parameters()))
    stepped = ddp.DistributedDataParallel(nn.Linear(3, 3))
    stepped.step_in_backward(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(ConfigError, match=r"='sharded' with a model in a DistributedDataParallel with reducer="):
        fitted_with(stepped, torch.optim.SGD(stepped.parameters(), lr=0.1))
    sparse = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    with pytest.raises(ConfigError, match="strategy='sharded': a layer has sparse gradients"):
        fitted_with(sparse, torch.optim.SGD(sparse.parameters()))
    odd = nn.Linear(3, 3, dtype=torch.complex64)
    with pytest.raises(ConfigError, match=r"weight is torch.complex64 on cpu: a sharded update takes real numbers"):
        Sharded(odd, torch.optim.SGD(odd.parameters(), lr=0.1))
    hooked = torch.optim.SGD(module.parameters(), momentum=0.9)
    hooked.state[next(module.parameters())] = {"momentum_buffer": torch.ones(5, 1, 3)}
    hooked.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="with hooks of SGD: they would see parts"):
        fitted_with(module, hooked)
    assert hooked.state
    with pytest.raises(ConfigError, match="with Derived: takes SGD"):
        fitted_with(module, Derived(module.parameters()))
    with pytest.raises(ConfigError, match="Rprop: takes SGD"):
        replica = ddp.BucketedDataParallel(nn.Linear(3, 3), reducer=ReduceScatter)
        Sharded(replica, torch.optim.Rprop(module.parameters()))
    ddp.shutdown()


def fitted_with(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    how: dict[str, Any] = {"global_batch": 10, "max_steps": 1, "folder": None, "progress": False}
    ddp.fit(module, data(), optimizer, **grouped(loss=F.cross_entropy, sharded=True, **how))


def test_what_cannot_be_sharded_is_refused() -> None:
    run_ranks(refusals, 1)


def memory() -> tuple[int, int, int]:
    """Elements of state on this rank with shards, those of room beside it, and those of all parameters."""
    comm = ddp.init(abort_s=30)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 300), nn.Linear(300, 1000))
    twin = copy.deepcopy(module)
    optimizer = LAMB(module.parameters(), lr=0.01)
    sharded = Sharded(module, optimizer)
    both: list[Strategy] = [sharded, Replicated(twin, LAMB(twin.parameters(), lr=0.01))]
    for number in range(3):
        inputs = torch.randn(2, 1000, generator=torch.Generator().manual_seed(2 * number + comm.rank))
        for each in both:
            each.model.zero_grad(set_to_none=True)
            each.model(inputs).square().sum().backward()
            step(each)
    assert torch.equal(flat(module), flat(twin))  # with blocks of the usual size
    held = sum(t.numel() for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    room = sum(tensor.numel() for tensor in sharded._of_parts.__dict__["_memories"].values())
    assert list(map(id, optimizer.state.values())) == list(map(id, sharded._of_parts.state.values()))
    assert comm.world_size == 2
    ddp.shutdown()
    return held, room, sum(parameter.numel() for parameter in module.parameters())


def test_each_rank_holds_its_share_of_the_state() -> None:
    for held, room, numel in run_ranks(memory, 2):
        assert abs(held - numel) <= 2 * norms.BLOCK_NUMEL  # two states of half of the elements
        assert abs(room - numel / 2) <= norms.BLOCK_NUMEL  # updates that wait for the ratio
