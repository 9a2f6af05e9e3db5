"""DistributedDataParallel against torch's class and against one process; naive and bucketed alike.

Tests: ddp/replica/bucketed.py, ddp/replica/drop_in/torch_names.py, ddp/replica/naive.py.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ddp
from ddp.errors import CollectiveMismatch, ConfigError, ReplicaMismatch, UnusedParameters
from ddp.replica.broadcast import verify_replicas
from ddp.replica.drop_in.torch_names import moved


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 36, 50),
        nn.Tanh(),
        nn.Linear(50, 10),
    )


class Branches(nn.Module):
    """Uses `left`, `right` or both, as told."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, use: str) -> Tensor:
        outputs = [getattr(self, name)(x) for name in use.split()]
        return torch.stack(outputs).sum(0)


class Tied(nn.Module):
    """One matrix used twice, and outputs in a dict, one of them unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 5), nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.embedding(x)
        return {"logits": (self.head(hidden),), "hidden": [hidden]}


class Checkpointed(nn.Module):
    """Activation checkpointing, re-entrant or not."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        result: Tensor = checkpoint(lambda h: self.second(h).tanh(), hidden, use_reentrant=self.reentrant)
        return result


def batch(step: int, rank: int, n: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (
        torch.randn(n, 1, 8, 8, generator=generator, dtype=torch.float64),
        torch.randint(0, 10, (n,), generator=generator),
    )


def compare_with_torch() -> None:
    comm = ddp.init(abort_s=20)
    torch.manual_seed(comm.rank)  # the initial broadcast has to make the replicas equal
    net = small_cnn().double()
    ours = ddp.DistributedDataParallel(net, bucket_cap_mb=0.02, first_bucket_mb=0.001)
    assert len(ours.bucket_layout) == 3
    replicas = [
        ours,
        ddp.NaiveDataParallel(copy.deepcopy(net)),
        ddp.BucketedDataParallel(copy.deepcopy(net), bucket_cap_mb=0.02, first_bucket_mb=0.001, overlap=True),
        nn.parallel.DistributedDataParallel(copy.deepcopy(net)),
    ]
    optimizers = [torch.optim.SGD(replica.parameters(), 0.1, momentum=0.9) for replica in replicas]
    for step in range(12):
        accumulate, set_to_none = step % 3 == 1, step % 2 == 0
        for replica, optimizer in zip(replicas, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            if accumulate:
                with replica.no_sync():
                    x, y = batch(step, comm.rank + 50)
                    F.cross_entropy(replica(x), y).backward()
            x, y = batch(step, comm.rank)
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
        for *ours_p, torch_p in zip(*(replica.parameters() for replica in replicas), strict=True):
            for parameter in ours_p:
                torch.testing.assert_close(parameter, torch_p, rtol=1e-12, atol=1e-13)
        for replica in replicas[:3]:
            verify_replicas(comm, replica.named_parameters())
        for bucket in ours.reducer.buckets:
            for slot in bucket.slots:
                assert slot.parameter.grad is slot.view
                assert slot.view.data_ptr() % 64 == bucket.flat.data_ptr() % 64
    ours.eval(), replicas[3].eval()
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, dict(replicas[3].named_buffers())[name], rtol=1e-12, atol=1e-13)
    ddp.shutdown()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.quick(1)
def test_equals_torch_with_accumulation_and_buffers(world_size: int) -> None:
    run_ranks(compare_with_torch, world_size)


def many_cases() -> None:
    comm = ddp.init(abort_s=20)
    unused_parameters(comm)
    tied_and_nested(comm)
    frozen(comm)
    checkpointing(comm)
    several_forwards_then_one_backward(comm)
    module_alone_does_not_communicate(comm)
    layouts_and_dtypes(comm)
    state_dicts_of_both_forms(comm)
    no_sync_covers_the_forward(comm)
    a_rank_without_samples_takes_part_in_buffers_too(comm)
    outputs_of_any_kind_are_synchronised(comm)
    a_mismatch_names_parameter_and_ranks(comm)
    wrong_keywords(comm)
    the_bucketed_replica_alone(comm)
    ddp.shutdown()


@pytest.mark.slow
def test_many_cases_on_three_ranks() -> None:
    run_ranks(many_cases, 3)


def unused_parameters(comm: ddp.Communicator) -> None:
    """Locally unused gets the mean of the others, globally unused keeps what it had: as torch's class does."""
    torch.manual_seed(0)
    ours = ddp.DistributedDataParallel(Branches(), find_unused_parameters=True)
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(ours.module), find_unused_parameters=True)
    x = torch.randn(2, 4) + comm.rank
    for use in ("left", "right", "left right"):
        use = "left" if comm.rank == 0 else use
        for replica in (ours, theirs):
            replica(x, use).sum().backward()
        for (name, p), q in zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None and q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)
    assert ours.module.never.weight.grad is None

    strict = ddp.DistributedDataParallel(Branches())
    strict(x, "left right" if comm.rank else "left").sum().backward()  # nobody hangs in this step
    with pytest.raises(UnusedParameters) as raised:
        strict(x, "left")
    message = str(raised.value)
    assert strict._get_ddp_logging_data()["error"] == message
    assert "rank 0: right.weight (2), right.bias (3), never.weight (4), never.bias (5)" in message
    assert "rank 1: never.weight (4), never.bias (5)\n" in message
    assert "find_unused_parameters=True" in message


def tied_and_nested(comm: ddp.Communicator) -> None:
    torch.manual_seed(0)
    ours = ddp.DistributedDataParallel(Tied())
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(ours.module))
    x = torch.arange(6).view(2, 3) + comm.rank
    for replica in (ours, theirs):
        replica(x)["logits"][0].logsumexp(-1).sum().backward()
    torch.testing.assert_close(ours.module.head.weight.grad, theirs.module.head.weight.grad)


def frozen(comm: ddp.Communicator) -> None:
    net = small_cnn()
    net[0].weight.requires_grad_(False)
    replica = ddp.DistributedDataParallel(net)
    replica(torch.randn(2, 1, 8, 8)).sum().backward()
    assert net[0].weight.grad is None
    verify_replicas(comm, [(name, p.grad) for name, p in net.named_parameters() if p.grad is not None])
    with pytest.raises(ValueError, match="no parameter of the module needs a gradient"):
        ddp.DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))


def checkpointing(comm: ddp.Communicator) -> None:
    for reentrant in (True, False):
        torch.manual_seed(0)
        ours = ddp.DistributedDataParallel(Checkpointed(reentrant=reentrant), first_bucket_mb=1e-6, bucket_cap_mb=1e-6)
        theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(ours.module))
        x = torch.randn(2, 4) + comm.rank
        for replica in (ours, theirs):
            replica(x).sum().backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def several_forwards_then_one_backward(comm: ddp.Communicator) -> None:
    torch.manual_seed(0)
    ours = ddp.DistributedDataParallel(small_cnn(), buffers="none")
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(ours.module), broadcast_buffers=False)
    x = torch.randn(2, 1, 8, 8) + comm.rank
    for replica in (ours, theirs):
        (replica(x).sum() + replica(2 * x).square().sum()).backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def module_alone_does_not_communicate(comm: ddp.Communicator) -> None:
    replica = ddp.DistributedDataParallel(nn.Linear(3, 1))
    before = comm.num_calls
    replica.module(torch.full((1, 3), float(comm.rank))).sum().backward()
    assert comm.num_calls == before
    assert replica.module.weight.grad is not None
    assert replica.module.weight.grad[0, 0] == comm.rank
    with torch.no_grad():
        replica(torch.randn(1, 3))
    assert comm.num_calls == before


def layouts_and_dtypes(comm: ddp.Communicator) -> None:
    """channels_last keeps its strides; several dtypes share a model; totals ride beside bfloat16."""
    net = nn.ModuleDict(
        {
            "conv": nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
            "wide": nn.Linear(6, 2).double(),
            "narrow": nn.Linear(2, 2).bfloat16(),
        }
    )

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.net["conv"](x).mean((2, 3)).double()
            result: Tensor = self.net["narrow"](self.net["wide"](hidden).bfloat16())
            return result

    replica = ddp.DistributedDataParallel(Mixed())
    replica(torch.randn(2, 4, 5, 5) + comm.rank).float().sum().backward()
    weight = net["conv"].weight
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    verify_replicas(comm, [(name, p.grad) for name, p in replica.named_parameters() if p.grad is not None])


def state_dicts_of_both_forms(comm: ddp.Communicator) -> None:
    replica = ddp.DistributedDataParallel(nn.Linear(3, 1))
    assert set(replica.state_dict()) == {"module.weight", "module.bias"}
    replica.load_state_dict({"weight": torch.ones(1, 3), "bias": torch.ones(1)})
    assert replica.module.weight.sum() == 3
    replica.load_state_dict(nn.parallel.DistributedDataParallel(nn.Linear(3, 1)).state_dict())
    inner = nn.ModuleDict({"module_": nn.Linear(1, 1)})
    inner.module = nn.Linear(3, 1)  # a child of the same name as the wrapper's
    replica = ddp.DistributedDataParallel(inner)
    for state in (inner.state_dict(), replica.state_dict()):
        replica.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        replica.load_state_dict({"weight": torch.ones(1, 3)})


def no_sync_covers_the_forward(comm: ddp.Communicator) -> None:
    replica = ddp.DistributedDataParallel(nn.Linear(3, 1))
    with replica.no_sync():
        loss = replica(torch.full((1, 3), float(comm.rank))).sum()
    before = comm.num_calls
    loss.backward()
    assert comm.num_calls == before
    replica(torch.full((1, 3), float(comm.rank))).sum().backward()
    assert replica.module.weight.grad is not None
    torch.testing.assert_close(replica.module.weight.grad, torch.full((1, 3), 2.0))  # 2 × mean of ranks 0, 1, 2


def a_rank_without_samples_takes_part_in_buffers_too(comm: ddp.Communicator) -> None:
    replica = ddp.DistributedDataParallel(small_cnn())
    if comm.rank == 2:
        replica.reduce_without_backward()
    else:
        replica(torch.randn(2, 1, 8, 8)).sum().backward()
    verify_replicas(comm, [(name, p.grad) for name, p in replica.named_parameters() if p.grad is not None])
    replica(torch.randn(2, 1, 8, 8))  # what the first step left behind is no complaint about unused parameters


class Opaque:
    def __init__(self, logits: Tensor) -> None:
        self.logits, self.itself = logits, self


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    logits: Tensor


def outputs_of_any_kind_are_synchronised(comm: ddp.Communicator) -> None:
    class Wrapped(nn.Module):
        def __init__(self, kind: type) -> None:
            super().__init__()
            self.linear, self.kind = nn.Linear(2, 1), kind

        def forward(self, x: Tensor) -> Any:
            return self.kind(self.linear(x))

    for kind in (Opaque, Frozen):
        replica = ddp.DistributedDataParallel(Wrapped(kind))
        replica(torch.full((1, 2), float(comm.rank))).logits.sum().backward()
        assert torch.equal(replica.module.linear.weight.grad, torch.ones(1, 2))


def a_mismatch_names_parameter_and_ranks(comm: ddp.Communicator) -> None:
    with pytest.raises(ReplicaMismatch, match=r"rank 0 and rank 2 differ: weight \[1, 3\].*weight \[1, 4\]"):
        ddp.DistributedDataParallel(nn.Linear(4 if comm.rank == 2 else 3, 1))
    memory_format = torch.channels_last if comm.rank == 1 else torch.contiguous_format
    for make in (ddp.DistributedDataParallel, ddp.BucketedDataParallel, ddp.NaiveDataParallel):
        with pytest.raises(ReplicaMismatch, match=r"rank 0 and rank 1 differ: weight .* on rank 0, .* with strides"):
            make(nn.Conv2d(2, 3, 2).to(memory_format=memory_format))
        half_frozen = nn.Linear(1, 2)
        half_frozen.bias.requires_grad_(comm.rank != 1)
        with pytest.raises(ReplicaMismatch, match=r"bias \[2\] float32 on rank 0, bias \[2\] float32 frozen on rank 1"):
            make(half_frozen)
    net = nn.Conv2d(2, 3, 2).to(memory_format=memory_format)
    unsynced = ddp.DistributedDataParallel(net, init_sync=False)  # then the end of the first backward is the time
    with pytest.raises(ReplicaMismatch, match="rank 0 and rank 1 differ: weight"):
        unsynced(torch.randn(1, 2, 3, 3)).sum().backward()
    replica = ddp.DistributedDataParallel(small_cnn(), comm=comm.subgroup(range(comm.world_size)))
    x = torch.randn(2, 1, 8, 8)
    replica(x).sum().backward()
    if comm.rank == 1:
        replica.module[0].weight.requires_grad_(False)
    named, unnamed = "^0\\.weight: frozen or unfrozen on rank 1", "called different collectives"
    with pytest.raises((ReplicaMismatch, CollectiveMismatch), match=named if comm.rank == 1 else unnamed):
        replica(x).sum().backward()
    drifted = torch.full((2,), float(comm.rank == 1))
    with pytest.raises(ReplicaMismatch, match=r"bias is not the same on all ranks: rank\(s\) \[1\] differ"):
        verify_replicas(comm, [("weight", torch.zeros(3)), ("bias", drifted)])


def wrong_keywords(comm: ddp.Communicator) -> None:
    with pytest.raises(TypeError, match="skip_all_reduce_unused_params=True; instead: static_graph=True"):
        ddp.DistributedDataParallel(nn.Linear(3, 1), skip_all_reduce_unused_params=True)
    with pytest.raises(TypeError, match="unexpected keyword 'bucket_size'"):
        ddp.DistributedDataParallel(nn.Linear(3, 1), bucket_size=3)
    with pytest.raises(ValueError, match="one process drives one device"):
        ddp.DistributedDataParallel(nn.Linear(3, 1), device_ids=[0, 1])


def the_bucketed_replica_alone(comm: ddp.Communicator) -> None:
    """It names unused parameters; a forward may unfreeze some, and gradients may be sparse."""
    strict = ddp.BucketedDataParallel(Branches())
    strict(torch.ones(2, 4), "left right").sum().backward()
    with pytest.raises(UnusedParameters, match=r"never\.weight \(4\), never\.bias \(5\)"):
        strict(torch.ones(2, 4), "left")
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].requires_grad_(False)
    net.register_forward_pre_hook(lambda module, _: module.requires_grad_(True) and None)
    replica = ddp.BucketedDataParallel(net)
    for _ in range(2):
        replica(torch.full((1, 2), comm.rank + 1.0)).sum().backward()
    mean = comm.all_reduce(net[0].weight.grad.clone(), "mean")
    assert torch.equal(net[0].weight.grad, mean) and mean.any()
    embedding = nn.Embedding(3, 2, sparse=True)
    ddp.BucketedDataParallel(embedding)(torch.arange(2)).sum().backward()
    assert embedding.weight.grad.is_sparse
    with pytest.raises(ConfigError, match=r"^weight has a sparse gradient, which no slice can hold"):
        sharded = ddp.strategies.Sharded(embedding, torch.optim.SGD(embedding.parameters(), lr=0.1))
        sharded.model(torch.arange(2)).sum().backward()
        ddp.strategies.step(sharded)
    comm.barrier()


def test_inputs_are_moved_as_torch_moves_them() -> None:
    """Tensors in tuples, lists and dicts; whatever else there is stays the very same object."""

    class Pair(NamedTuple):
        x: Tensor
        y: list[Tensor]

    other = object()
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    value = {"pair": Pair(torch.ones(2), [torch.ones(3)]), "packed": packed, "other": other}
    result = moved((defaultdict(list, value), 3), torch.device("meta"))
    found = result[0]
    assert isinstance(found["pair"], Pair)
    assert found["pair"].x.is_meta
    assert found["pair"].y[0].is_meta
    assert found["packed"].data.is_meta
    assert found["packed"].batch_sizes.device.type == "cpu"
    assert found["other"] is other
    assert found["new"] == []
    assert result[1] == 3
    assert not value["pair"].x.is_meta
