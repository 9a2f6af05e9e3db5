"""LARS, LARC and LAMB under `ddp.fit`: two workers equal one process on the whole batch, and a veto changes nothing.

Tests: ddp/optim/layerwise.py, ddp/optim/trust_ratio.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.data.orders.sampler import TrainSampler
from ddp.errors import Diverged
from ddp.optim import LAMB, LARC, LARS, parameter_groups
from ddp.replica.broadcast import tensor_hash

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(43, 6, dtype=torch.float64, generator=RANDOM)
CLASSES = torch.randint(0, 3, (43,), generator=RANDOM)
KINDS: dict[str, Any] = {"lars": (LARS, 5.0), "larc": (LARC, 0.1), "lamb": (LAMB, 0.01)}
CLIP, NUM_STEPS = 0.3, 40


def made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)).double()
    optimizer, rate = KINDS[kind]
    return module, optimizer(parameter_groups(module, weight_decay=0.01, adapt="never"), rate)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def trained() -> list[tuple[Tensor, str]]:
    comm = ddp.init(abort_s=30)
    results = []
    for kind in KINDS:
        module, optimizer = made(kind)
        ddp.fit(
            module,
            (X, CLASSES),
            optimizer,
            loss=F.cross_entropy,
            global_batch=10,
            max_steps=NUM_STEPS,
            clip_norm=CLIP,
            schedule=ddp.optim.cosine(),
            folder=ddp.Folder(None, progress=False),
            batches=ddp.Batches(seed=3),
        )
        results.append((flat(module), tensor_hash(flat(module))))
        state = [tensor for each in optimizer.state.values() for tensor in each.values() if isinstance(tensor, Tensor)]
        before = [flat(module), *[tensor.clone() for tensor in state]]
        poisoned = X.clone()
        poisoned[7, 2] = float("nan")
        with pytest.raises(Diverged):
            how: dict[str, Any] = {"loss": F.cross_entropy, "global_batch": 43, "epochs": 1, "folder": None}
            ddp.fit(module, (poisoned, CLASSES), optimizer, **grouped(progress=False, **how))
        assert all(map(torch.equal, [flat(module), *state], before))
    assert comm.world_size == 2
    ddp.shutdown()
    return results


def in_one_process(kind: str) -> Tensor:
    module, optimizer = made(kind)
    sampler, schedule, step = TrainSampler(43, global_batch=10, rank=0, world_size=1, seed=3), ddp.optim.cosine(), 0
    num_samples = sampler.sizes.after(0, NUM_STEPS)
    rates = [group["lr"] for group in optimizer.param_groups]
    while step < NUM_STEPS:
        for plan in sampler.plans():
            if step == NUM_STEPS:
                break
            indices = list(plan.micros[0].indices)
            optimizer.zero_grad()
            F.cross_entropy(module(X[indices]), CLASSES[indices]).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule(sampler.position + plan.size / 2, num_samples)
            optimizer.step()
            sampler.commit(plan)
            step += 1
    return flat(module)


@pytest.mark.slow
def test_two_workers_equal_one_process_and_a_veto_leaves_the_state() -> None:
    ranks = run_ranks(trained, 2)
    for kind, (first, first_hash), (_, second_hash) in zip(KINDS, *ranks, strict=True):
        assert first_hash == second_hash
        torch.testing.assert_close(first, in_one_process(kind), rtol=1e-9, atol=1e-11)
