"""Gradients in a wire format: equal replicas, exact counts, means in range; for every kind of replica.

Tests: ddp/gradients/bucket.py, ddp/gradients/layout.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.errors import ConfigError
from ddp.gradients.totals import Totals
from ddp.replica.broadcast import tensor_hash
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.replica import Replica
from ddp.setting import Narrow, WireName

X = torch.randn(43, 6, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (43,), generator=torch.Generator().manual_seed(1))
WIRES: tuple[WireName, ...] = get_args(Narrow)
NEAR = {"bf16": 0.02, "fp16": 0.003, "int8": 0.04, "int8_stochastic": 0.08}  # of an update's length


def made() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.LayerNorm(300), nn.Linear(300, 3))


def trained(wire: WireName | None, **how: Any) -> Tensor:
    """By how much training has changed the parameters, in one vector."""
    model = made()
    first = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"loss": F.cross_entropy, "global_batch": 10, "max_steps": 9, "noise_scale_every": 2}
    settings["seed"] = 1  # with seed 0 rounding to fp16 makes a ReLU change sides, and the update 0.6 % another
    settings |= {"folder": None, "progress": False, **how}
    state = ddp.fit(model, (X, CLASSES), optimizer, **grouped(wire=wire, **settings))
    state.model.verify_replicas()
    return nn.utils.parameters_to_vector(model.parameters()).detach() - first


def by_hand(kind: type[Replica], wire: WireName, value: float, dtype: torch.dtype) -> Tensor:
    """The gradient of one weight per feature whose terms are all of this value."""
    module = nn.Linear(300, 1, bias=False).to(dtype)
    replica = kind(module, wire=wire)  # type: ignore[call-arg]
    replica(torch.full((2, 300), value, dtype=dtype)).sum().backward()
    assert module.weight.grad is not None
    return module.weight.grad


def everything() -> dict[str, Any]:
    ddp.init(abort_s=30, shared_memory=False, algorithm="ring")  # without trials of the others
    found: dict[str, Any] = {"plain": tensor_hash(trained(None)), "wires": {}}
    plain = trained(None)
    for wire in WIRES:
        changed, sharded = trained(wire), trained(wire, strategy="sharded")
        for each in (changed, sharded):
            assert (each - plain).norm() <= NEAR[wire] * plain.norm(), wire
        assert not torch.equal(changed, plain), wire  # it was rounded
        found["wires"][wire] = tensor_hash(changed), tensor_hash(sharded)

    for kind in (BucketedDataParallel, ddp.DistributedDataParallel):
        # the sum of all ranks is beyond fp16, the mean is not
        assert torch.equal(by_hand(kind, "fp16", 30000.0, torch.float32), torch.full((1, 300), 60000.0))
        assert torch.isfinite(by_hand(kind, "bf16", 1.0, torch.bfloat16)).all()

    for wire in WIRES:
        many_items(wire)
        finite_again(wire)
        scaled = trained(wire, precision="fp16")
        assert (scaled - plain).norm() <= (NEAR[wire] + 0.02) * plain.norm(), wire  # forward is in fp16, too
    wide_sums()

    for wire in WIRES:
        exact_count(wire)
    with pytest.raises(ConfigError, match="wire='bf16' with a registered communication hook, which sends gradients"):
        drop_in = ddp.DistributedDataParallel(made(), wire="bf16")
        drop_in.register_comm_hook(None, lambda state, bucket: cast(Any, None))
    with pytest.raises(ConfigError, match=r"wire='int8' with torch.bfloat16: takes float32 and float64"):
        BucketedDataParallel(made().bfloat16(), wire="int8")
    ddp.shutdown()
    return found


def exact_count(wire: WireName) -> None:
    replica = BucketedDataParallel(nn.Linear(3, 1, bias=False), wire=wire)
    replica.ride_along(Totals(torch.tensor(1.0), 4097))
    replica(torch.full((1, 3), 1e6)).sum().backward()  # large beside the count, which would be in one block with it
    assert replica.totals.num_items == 4097 * replica.comm.world_size


def many_items(wire: WireName) -> None:
    """Gradients that are divided by a large count, as of tokens, and of a scaled loss, keep their digits."""
    for count in (8192, 1 << 22):
        module = nn.Linear(300, 1, bias=False)
        replica = BucketedDataParallel(module, wire=wire)
        replica.ride_along(Totals(torch.tensor(1.0), count))
        (replica(torch.linspace(0.5, 1.0, 300).expand(2, 300)).sum() * count / 2).backward()
        assert module.weight.grad is not None
        expected = torch.linspace(0.5, 1.0, 300)
        assert (module.weight.grad[0] - expected).abs().max() < 0.02, (wire, count)


def finite_again(wire: WireName) -> None:
    """A value that is not finite in one step leaves nothing behind, not even in the padding between two gradients."""
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    replica = ddp.DistributedDataParallel(module, wire=wire)
    for value, is_finite in ((1.0, True), (torch.inf, False), (1.0, True), (torch.nan, False), (1.0, True)):
        replica.zero_grad()
        replica(torch.full((2, 6), value)).square().sum().backward()
        found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        assert all(bool(torch.isfinite(gradient).all()) for gradient in found) == is_finite, wire


def wide_sums() -> None:
    """A sum of bfloat16 gradients in float32: 1 and what bfloat16 loses beside it, once for each rank."""
    found = []
    for wire in (None, "fp32"):
        module = nn.Linear(300, 1, bias=False).bfloat16()
        for kind in (BucketedDataParallel, ddp.DistributedDataParallel):
            replica = kind(module, wire=wire)
            replica.zero_grad()
            comm = replica.comm
            mine = 256.0 if comm.rank == 0 else 0.6  # bfloat16 has 256 and 258
            replica(torch.full((1, 300), mine, dtype=torch.bfloat16)).sum().backward()
            assert module.weight.grad is not None
            found.append(module.weight.grad[0, 0].item() * comm.world_size)
    assert len(set(found[2:])) == 1
    if comm.world_size == 3:
        assert found[2] == pytest.approx(257.2, rel=2**-8)
    with pytest.raises(ConfigError, match="wire='fp32': gradients of precision='fp32' are fp32 already; leave it out"):
        trained("fp32")
    state = trained("fp32", precision="bf16_pure")
    assert (state - trained(None, precision="bf16_pure")).norm() < 0.1 * state.norm()


@pytest.mark.parametrize("world_size", [3])
def test_replicas_stay_equal_and_near_plain_ones(world_size: int) -> None:
    first, *others = run_ranks(everything, world_size)
    assert all(other == first for other in others)


def in_memory() -> None:
    comm = ddp.init(abort_s=30)
    assert torch.equal(trained(None), trained("int8"))
    alone = comm.subgroup([0])
    if alone is not None:  # nothing travels, and nothing is rounded
        mine = torch.randn(1000)
        for wire in WIRES:
            assert torch.equal(alone.all_reduce(mine.clone(), wire=wire, divide_by=4), mine / 4)
    ddp.shutdown()


def resumed(folder: str) -> None:
    """A run that rounds by chance, in two parts and in one."""
    ddp.init(abort_s=30, shared_memory=False, algorithm="ring")
    how: dict[str, Any] = {"max_steps": 8, "sharded": False}
    whole, again = trained("int8_stochastic", **how), trained("int8_stochastic", **how)
    assert torch.equal(whole, again)
    parts = {"folder": folder, "resume": "auto", "curves": False}
    trained("int8_stochastic", **{**how, "max_steps": 3}, **parts)
    assert torch.equal(trained("int8_stochastic", **how, **parts), whole)
    ddp.shutdown()


def test_rounding_by_chance_is_repeatable(tmp_path: Path) -> None:
    run_ranks(resumed, 2, str(tmp_path))


def test_what_stays_in_memory_is_not_encoded() -> None:
    run_ranks(in_memory, 2)
