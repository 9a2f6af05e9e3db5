"""Replicas with hooks: several hosts in memory, sharded, drop-in; vetoes, values that are not finite, last batches.

Tests: ddp/gradients/compression.py, ddp/gradients/totals.py.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.comm import connect
from ddp.errors import ConfigError, Diverged, ReplicaMismatch
from ddp.gradients import DenseStart, ErrorFeedback, Hook, PowerSGD, RandomK, Sign, TopK
from ddp.gradients.totals import Totals
from ddp.replica.broadcast import tensor_hash
from ddp.replica.bucketed import BucketedDataParallel
from ddp.train.arguments import idle_notes

X = torch.randn(43, 20, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (43,), generator=torch.Generator().manual_seed(1))
HOOKS: dict[str, Callable[[], Hook]] = {
    "sign": lambda: ErrorFeedback(Sign()),
    "top_k": lambda: ErrorFeedback(TopK(0.1)),
    "deep": lambda: DenseStart(ErrorFeedback(TopK(0.05, momentum=0.9)), 2),
    "random_k": lambda: ErrorFeedback(RandomK(0.1)),
    "power": lambda: ErrorFeedback(PowerSGD(2)),
}


def made() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv1d(1, 60, 3),
        nn.Flatten(),
        nn.Linear(1080, 61),
        nn.ReLU(),
        nn.LayerNorm(61),
        nn.Linear(61, 130, bias=False),
        nn.Linear(130, 3),
    )


def fitted(hook: Hook | None, **how: Any) -> tuple[Tensor, Any]:
    """By how much training has changed the parameters, in one vector; and the state."""
    model = made()
    first = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    settings: dict[str, Any] = {"loss": F.cross_entropy, "global_batch": 10, "max_steps": 9, "seed": 3, **how}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = X.unsqueeze(1), CLASSES
    state = ddp.fit(model, data, optimizer, **grouped(hook=hook, folder=None, progress=False, **settings))
    state.model.verify_replicas()
    return nn.utils.parameters_to_vector(model.parameters()).detach() - first, state


def on_hosts(num_per_host: int) -> dict[str, Any]:
    connect.boot_id = lambda: f"host {int(os.environ['RANK']) // num_per_host}"
    algorithm = "shared_memory" if int(os.environ["WORLD_SIZE"]) == num_per_host else "shared_memory+ring"
    comm = ddp.init(abort_s=30, algorithm=algorithm)  # to choose one for each size would take most of the time
    found: dict[str, Any] = {}
    plain, _ = fitted(None)
    for name, hook in HOOKS.items():
        changed, state = fitted(hook())
        sharded, _ = fitted(hook(), strategy="sharded")
        assert torch.equal(changed, sharded), name  # every rank gets all of the gradient, and updates its part
        if name != "deep":  # which has a momentum of its own
            assert F.cosine_similarity(changed, plain, dim=0) > 0.5, name
        kept = state.model.compression.hook.memories()
        lines = idle_notes(state.model)
        assert len(lines) == (comm.host_partition.num_hosts == 1 and name != "deep")  # whose momentum acts there, too
        assert all("does nothing here: all workers share a host's memory" in line for line in lines)
        carried = {what: sum(each.numel() for each in memory.committed.values()) for what, memory in kept.items()}
        found[name] = tensor_hash(changed), changed, carried
        if name == "sign" and comm.host_partition.num_hosts > 1:  # in the background of backward, and in small buckets
            overlapped = BucketedDataParallel(made(), hook=hook(), overlap=True, bucket_cap_mb=0.02)
            for batch in range(4):
                overlapped(X.unsqueeze(1)[batch + comm.rank :: 7]).square().mean().backward()
            overlapped.verify_replicas()
            assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in overlapped.parameters())
    ddp.shutdown()
    return found


@pytest.mark.parametrize(("world_size", "num_per_host"), [(4, 2), (3, 2)])
@pytest.mark.slow
def test_ranks_of_a_host_share_the_work(world_size: int, num_per_host: int) -> None:
    by_rank = run_ranks(on_hosts, world_size, num_per_host, timeout_s=120)
    for name in HOOKS:
        assert len({found[name][0] for found in by_rank}) == 1, name
    carried = [found["sign"][2].get("residual", 0) for found in by_rank]
    large = 1080 * 61 + 61 * 130  # of the layers that are worth encoding
    expected = {(4, 2): [large // 2] * 4, (3, 2): [large, 0, large], (2, 2): [0, 0]}
    assert carried == expected[world_size, num_per_host]


def by_hand() -> None:
    comm = ddp.init(abort_s=30, shared_memory=False, algorithm="ring")
    for kind in (BucketedDataParallel, ddp.DistributedDataParallel):
        for name, hook in HOOKS.items():
            not_finite(kind, hook())
            vetoed(hook())
            last_batch_of_one_sample(kind, hook(), name)
    frozen_and_unfrozen(HOOKS["sign"]())
    for name in ("sign", "deep", "power"):
        used_by_none(HOOKS[name]())
    with pytest.raises(ConfigError, match=r"hook=ErrorFeedback\(Sign\(\)\) does not go with step_in_backward"):
        ddp.DistributedDataParallel(made(), hook=HOOKS["sign"]()).step_in_backward(partial(torch.optim.SGD, lr=0.1))
    match = r"rank 0 was given wire='bf16', and rank 1 hook=ErrorFeedback\(Sign\(\)\): give every rank the same"
    with pytest.raises(ReplicaMismatch, match=match):
        ddp.DistributedDataParallel(made(), **({"hook": HOOKS["sign"]()} if comm.rank else {"wire": "bf16"}))
    with pytest.raises(ConfigError, match=r"ErrorFeedback\('sign'\): give a hook of ddp\.gradients, such as"):
        ErrorFeedback("sign")  # type: ignore[arg-type]
    module = made()
    replica = ddp.DistributedDataParallel(module, hook=HOOKS["power"]())
    twin = copy.deepcopy(replica)
    assert twin.compression is not replica.compression
    with pytest.raises(ConfigError, match=r"hook=ErrorFeedback\(PowerSGD.* with a registered communication hook"):
        replica.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    for reducer in (None, "ReduceScatter", ddp.strategies.Sharded):
        with pytest.raises(ConfigError, match=r"reducer=.* give a class of ddp.gradients.reducer, such"):
            BucketedDataParallel(made(), reducer=reducer)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"1\.weight is on the meta device and has no values: call to_empty"):
        BucketedDataParallel(nn.Sequential(made(), nn.Linear(2, 2, device="meta")))
    with pytest.raises(ConfigError, match=r"hook=ErrorFeedback\(Sign\(\)\): does the sending by itself; leave wire=.b"):
        BucketedDataParallel(made(), wire="bf16", hook=HOOKS["sign"]())
    with pytest.raises(ConfigError, match=r"hook=ErrorFeedback.* with a model in a BucketedDataParallel: give hook to"):
        ddp.fit(
            BucketedDataParallel(module), (X.unsqueeze(1), CLASSES), torch.optim.SGD(module.parameters(), 0.1),
            loss=F.cross_entropy, global_batch=4, epochs=1, strategy=ddp.Averaging(hook=HOOKS["sign"]()),
        )  # fmt: skip
    for optimizer in (torch.optim.SGD(module.parameters(), 0.1, momentum=0.9), torch.optim.Adam(module.parameters())):
        with pytest.raises(ConfigError, match=r"momentum=0\.9 in the hook .* and that of .*: leave one out"):
            ddp.fit(
                module, (X.unsqueeze(1), CLASSES), optimizer,
                loss=F.cross_entropy, global_batch=4, epochs=1, strategy=ddp.Averaging(hook=HOOKS["deep"]()),
            )  # fmt: skip
    comm.barrier()
    ddp.shutdown()


def not_finite(kind: Any, hook: Hook) -> None:
    """A value that is not finite, on one rank, shows in all gradients on every rank; the hook is as before."""
    replica, twin = kind(made(), hook=hook), kind(made(), hook=hook)
    rank = replica.comm.rank
    for step in range(3):
        inputs = X.unsqueeze(1)[step + rank :: 3]
        if step == 1:
            for bad in (torch.nan, torch.inf):
                replica(inputs * (bad if rank == 1 else 1.0)).sum().backward()
                assert all(p.grad is not None and p.grad.isnan().all() for p in replica.parameters())
                replica.zero_grad()
        for each in (replica, twin):
            each(inputs).square().sum().backward()
        for mine, its in zip(replica.parameters(), twin.parameters(), strict=True):
            assert mine.grad is not None
            assert torch.equal(mine.grad, its.grad)
        replica.zero_grad()
        twin.zero_grad()


def vetoed(hook: Hook) -> None:
    """A step of `fit` that is refused leaves the hook as it was."""
    module = made()
    replica = BucketedDataParallel(module, hook=hook)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + (torch.inf if replica.num_steps == 3 else 0.0)

    how: dict[str, Any] = {"global_batch": 10, "folder": None, "progress": False}
    with pytest.raises(Diverged):
        ddp.fit(replica, (X.unsqueeze(1), CLASSES), optimizer, **grouped(loss=loss, max_steps=9, **how))
    assert replica.compression is not None
    assert replica.compression.num_steps == 3
    assert not any(memory.pending for memory in replica.compression.hook.memories().values())


def last_batch_of_one_sample(kind: Any, hook: Hook, name: str) -> None:
    """The residual of a large batch is in units of the mean: it weighs no more in a batch of one sample."""
    replica, twin = kind(made(), hook=hook), made()
    comm, linear = replica.comm, replica.module[2]
    twin(X.unsqueeze(1)[:1]).sum().backward()
    of_one_sample = twin[2].weight.grad.norm().item()
    sizes = []
    for num_items in (64, 64, 64, 1):
        mine = num_items if num_items > 1 else int(comm.rank == 0)
        replica.zero_grad()
        replica.ride_along(Totals(torch.tensor(0.0), mine))
        if mine:
            (replica(X.unsqueeze(1)[:1]).sum() * mine).backward()  # every sample alike
        else:
            replica.reduce_without_backward()
        assert replica.totals.num_items == (num_items * comm.world_size if num_items > 1 else 1)
        sizes.append(linear.weight.grad.norm().item())
    assert sizes[-1] < 4 * max(sizes[:-1]), (name, sizes)
    if not hook.momentum:
        assert max(sizes) < 4 * of_one_sample, (name, sizes, of_one_sample)


def frozen_and_unfrozen(hook: Hook) -> None:
    """What a layer has kept waits for it while it is frozen."""
    replica = BucketedDataParallel(made(), hook=hook, bucket_cap_mb=0.02)
    layer = replica.module[2]
    assert replica.compression is not None and isinstance(layer, nn.Linear)
    residual = replica.compression.hook.memories()["residual"]

    def step() -> Tensor:
        replica.zero_grad()
        replica(X.unsqueeze(1)[replica.comm.rank :: 3]).square().sum().backward()
        replica.compression.commit()  # type: ignore[union-attr]
        return residual.committed["2.weight"].clone()

    step()
    kept = step()
    layer.weight.requires_grad_(False)
    assert torch.equal(step(), kept)
    layer.weight.requires_grad_(True)
    assert not torch.equal(step(), kept)
    replica.verify_replicas()


def used_by_none(hook: Hook) -> None:
    """What a hook has kept of a parameter that no rank uses in a step stays whole: nobody gets what it sends."""
    torch.manual_seed(1)
    module = nn.ModuleList(nn.Linear(61, 61) for _ in range(2))

    def forward(which: int) -> None:
        replica.zero_grad()
        inputs = torch.linspace(-1, 1, 5 * 61).view(5, 61) + replica.comm.rank
        replica(inputs, which).square().mean().backward()

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module

        def forward(self, inputs: Tensor, which: int) -> Tensor:
            outputs: Tensor = self.layers[which](inputs)
            return outputs

    replica = ddp.DistributedDataParallel(Either(), hook=hook, find_unused_parameters=True)
    assert replica.compression is not None
    forward(0)
    forward(0)
    replica.compression.commit()
    before = {
        (what, name): kept.clone()
        for what, memory in replica.compression.hook.memories().items()
        for name, kept in memory.committed.items()
        if name == "layers.0.weight"
    }
    assert before
    forward(1)
    forward(1)
    replica.compression.commit()
    assert module[0].weight.grad is None
    for (what, name), kept in before.items():
        assert torch.equal(replica.compression.hook.memories()[what].committed[name], kept), what


@pytest.mark.slow
def test_a_hook_and_its_step_belong_together() -> None:
    run_ranks(by_hand, 2, timeout_s=120)


Remembered = dict[str, Tensor]


def in_parts(folder: str, num_steps: int, shares_memory: bool, shift: int = 0) -> list[tuple[int, Tensor, Remembered]]:
    """By hook: its steps, the parameters after so many, the run being continued; and what this rank has kept.

    Args:
        shift: take the hook that comes so much later in the list.
    """
    ddp.init(abort_s=30, shared_memory=shares_memory, algorithm="auto" if shares_memory else "ring")
    found = []
    for number, name in enumerate(HOOKS):
        how: dict[str, Any] = {"folder": f"{folder}/{name}", "resume": "auto", "max_steps": num_steps}
        model = made()
        hook = list(HOOKS.values())[(number + shift) % len(HOOKS)]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        data = X.unsqueeze(1), CLASSES
        how |= {"loss": F.cross_entropy, "global_batch": 10, "num_shards": 3, "seed": 3, "progress": False}
        compression = ddp.fit(model, data, optimizer, **grouped(hook=hook, curves=False, **how)).model.compression
        assert compression is not None
        kept = {}
        for what, memory in compression.hook.memories().items():
            for key, tensor in memory.committed.items():
                kept[f"{what} {key}"] = tensor
                if memory.kind == "summed":
                    kept[f"{what} {key}"] = torch.zeros(compression.numels[key])
                    kept[f"{what} {key}"][compression.part_of(key)] = tensor
        found.append((compression.num_steps, nn.utils.parameters_to_vector(model.parameters()).detach(), kept))
    ddp.shutdown()
    return found


@pytest.mark.slow
def test_a_run_goes_on_with_what_its_hook_has_kept(tmp_path: Path) -> None:
    """As it would have at the same world size, bit by bit; at another one nothing is lost."""
    parts, other = str(tmp_path / "parts"), str(tmp_path / "other")
    first = run_ranks(in_parts, 2, parts, 4, False)
    shutil.copytree(parts, other)
    second = run_ranks(in_parts, 2, parts, 6, False)
    whole = run_ranks(in_parts, 2, str(tmp_path / "whole"), 6, False)
    for mine, its in zip(chain(*whole), chain(*second), strict=True):
        assert mine[0] == its[0] == 6
        assert torch.equal(mine[1], its[1])
        assert mine[2].keys() == its[2].keys()
        assert mine[2]
        assert all(torch.equal(mine[2][key], its[2][key]) for key in mine[2])

    third = run_ranks(in_parts, 3, other, 4, False)  # no further step: what comes out of the checkpoint is what went in
    for before, after in zip(zip(*first, strict=True), zip(*third, strict=True), strict=True):
        for key in before[0][2]:
            there, here = (torch.stack([kept[key] for *_, kept in run]) for run in (before, after))
            if key.startswith("factor"):
                assert torch.equal(here[2], there[0])
            else:
                assert torch.allclose(here.sum(0), there.sum(0), atol=1e-6), key
                assert torch.equal(here[0], here[2])

    # On one host nothing has to travel any more: what is kept is added to the first step's gradients, and gone.
    for _, _, kept in chain(*run_ranks(in_parts, 2, other, 5, True)):
        assert not any(key.startswith("residual") for key in kept)
    for num_steps, _, kept in chain(*run_ranks(in_parts, 2, parts, 6, False, 1)):  # another hook begins with nothing
        assert num_steps == 0
        assert not kept
