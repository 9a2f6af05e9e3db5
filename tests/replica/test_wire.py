"""Gradients in a wire format: equal replicas, exact counts, means in range; for every kind of replica."""

from __future__ import annotations

from typing import Any, cast, get_args

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.comm.wire_format import WireName
from ddp.errors import ConfigError
from ddp.gradients.totals import Totals
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.replica import Replica
from ddp.replica.verify import tensor_hash

X = torch.randn(43, 6, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (43,), generator=torch.Generator().manual_seed(1))
WIRES = get_args(WireName)
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
    state = ddp.fit(model, (X, CLASSES), optimizer, wire=wire, checkpoint_dir=None, progress=False, **settings, **how)
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
    comm = ddp.init(abort_s=30, shared_memory=False)
    found: dict[str, Any] = {"plain": tensor_hash(trained(None)), "wires": {}}
    plain = trained(None)
    for wire in WIRES:
        changed, sharded = trained(wire), trained(wire, sharded=True)
        for each in (changed, sharded):
            assert (each - plain).norm() <= NEAR[wire] * plain.norm(), wire
        assert not torch.equal(changed, plain), wire  # it was rounded
        found["wires"][wire] = tensor_hash(changed), tensor_hash(sharded)

    for kind in (BucketedDataParallel, ddp.DistributedDataParallel):
        # the sum of all ranks is beyond fp16, the mean is not
        assert torch.equal(by_hand(kind, "fp16", 30000.0, torch.float32), torch.full((1, 300), 60000.0))
        assert torch.isfinite(by_hand(kind, "bf16", 1.0, torch.bfloat16)).all()

    module = nn.Linear(3, 1, bias=False)
    replica = BucketedDataParallel(module, wire="bf16")
    replica.ride_along(Totals(torch.tensor(1.0), 4097))
    replica(torch.ones(1, 3)).sum().backward()
    assert replica.totals.num_items == 4097 * comm.world_size  # bf16 holds 4096 and 4128
    with pytest.raises(ConfigError, match="wire='bf16' beside a registered communication hook, which does the sending"):
        drop_in = ddp.DistributedDataParallel(made(), wire="bf16")
        drop_in.register_comm_hook(None, lambda state, bucket: cast(Any, None))
    with pytest.raises(ConfigError, match=r"wire='int8' with torch.bfloat16: takes float32 and float64"):
        BucketedDataParallel(made().bfloat16(), wire="int8")
    ddp.shutdown()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_stay_equal_and_near_plain_ones(world_size: int) -> None:
    first, *others = run_ranks(everything, world_size)
    assert all(other == first for other in others)


def in_memory() -> None:
    ddp.init(abort_s=30)
    assert torch.equal(trained(None), trained("int8"))
    ddp.shutdown()


def test_what_stays_in_memory_is_not_encoded() -> None:
    run_ranks(in_memory, 2)
