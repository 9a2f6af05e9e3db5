"""No command of the package's races with another one, even if no host wait happens to hide it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch
from gpu_standin import cuda, device, nccl
from ranks import run_ranks
from torch import Tensor, nn

import ddp
from ddp.collectives.catalog import ALL_REDUCE
from ddp.comm.communicator import Communicator
from ddp.data.loading.loader import TrainLoader
from ddp.data.orders.sampler import TrainSampler
from ddp.gradients.hook import ErrorFeedback
from ddp.gradients.hooks import PowerSGD, RandomK, Sign, TopK
from ddp.gradients.reducer import ReduceScatter
from ddp.gradients.totals import Totals
from ddp.replica.fully_sharded import FullyShardedDataParallel

NUM_STEPS = 2
SMALL = {"bucket_cap_mb": 0.05, "first_bucket_mb": 0.01}


def net(comm: Communicator) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 7)]
    return nn.Sequential(*layers).to(comm.device)


def batch(comm: Communicator) -> Tensor:
    return torch.randn(8, 40, device=comm.device)


def train(replica: nn.Module, comm: Communicator) -> None:
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        replica(batch(comm)).square().sum().backward()
        optimizer.step()


# ---- the verbs


def verbs(comm: Communicator) -> None:
    for algorithm in ALL_REDUCE:
        numbers = torch.ones(5000, device=comm.device)
        comm.all_reduce(numbers, algorithm=algorithm)
        numbers.add_(1)
    for wire in ("bf16", "int8"):
        comm.all_reduce(numbers, wire=wire)
    comm.broadcast(numbers, 1)
    numbers.mul_(2)
    everyone = comm.all_gather(numbers)
    (everyone[0] + everyone[1]).sum()
    comm.reduce_scatter(numbers).mul_(2)
    comm.barrier()


def verbs_in_flight(comm: Communicator) -> None:
    for _ in range(NUM_STEPS):
        numbers = torch.ones(5000, device=comm.device)
        one = comm.all_reduce(numbers, async_op=True)
        other = comm.all_gather(torch.ones(7, device=comm.device), async_op=True)
        one.wait()
        numbers.add_(1)
        mine, theirs = other.wait()
        both = mine + theirs
        del mine, theirs, other
        torch.ones(7, device=comm.device).add_(both)


def verbs_on_two_streams(comm: Communicator) -> None:
    side = cuda.Stream()
    for _ in range(NUM_STEPS):
        comm.all_reduce(torch.ones(5000, device=comm.device))
        with cuda.stream(side):
            comm.all_reduce(torch.ones(5000, device=comm.device))
        cuda.current_stream().wait_stream(side)


def a_tensor_is_dropped(comm: Communicator) -> None:
    for _ in range(NUM_STEPS):
        numbers = torch.ones(50000, device=comm.device)
        work = comm.all_reduce(numbers, "mean", async_op=True)
        del numbers
        work.wait()
        del work
        torch.zeros(50000, device=comm.device).add_(1)


def a_work_is_forgotten(comm: Communicator) -> None:
    """Its memory is kept until the host has seen that it is done."""
    for _ in range(NUM_STEPS):
        numbers = torch.ones(50000, device=comm.device)
        comm.all_reduce(numbers, "mean", async_op=True)
        del numbers
        comm.barrier()
        torch.zeros(50000, device=comm.device).add_(1)


def a_wait_in_another_thread(comm: Communicator) -> None:
    numbers = torch.ones(5000, device=comm.device)
    work = comm.all_reduce(numbers, async_op=True)
    thread = threading.Thread(target=lambda: (work.wait(), numbers.add_(1)))
    thread.start()
    thread.join()


def messages(comm: Communicator) -> None:
    for _ in range(NUM_STEPS):
        mine, theirs = torch.ones(2, 3000, device=comm.device).unbind()
        sent = comm.send(mine, 1 - comm.rank, async_op=True)
        comm.recv(theirs, 1 - comm.rank)
        sent.wait()
        theirs.add_(mine)


def messages_from_a_side_stream(comm: Communicator) -> None:
    side = cuda.Stream()
    mine, theirs = torch.ones(3000, device=comm.device), torch.ones(3000, device=comm.device)
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        mine.add_(1)
        sent = comm.send(mine, 1 - comm.rank, async_op=True)
    comm.recv(theirs, 1 - comm.rank)
    sent.wait()


# ---- training


def naive(comm: Communicator) -> None:
    train(ddp.NaiveDataParallel(net(comm)), comm)


def bucketed(comm: Communicator) -> None:
    train(ddp.BucketedDataParallel(net(comm), **SMALL), comm)


def drop_in(comm: Communicator) -> None:
    train(ddp.DistributedDataParallel(net(comm), **SMALL), comm)


def without_overlap(comm: Communicator) -> None:
    train(ddp.DistributedDataParallel(net(comm), overlap=False, **SMALL), comm)


def wires(comm: Communicator) -> None:
    for wire in ("bf16", "int8"):
        train(ddp.DistributedDataParallel(net(comm), wire=wire, **SMALL), comm)


def hooks(comm: Communicator) -> None:
    for hook in (TopK(0.1), Sign(), RandomK(0.1), PowerSGD(2)):
        train(ddp.DistributedDataParallel(net(comm), hook=ErrorFeedback(hook), **SMALL), comm)


def synchronised_batch_norm(comm: Communicator) -> None:
    train(ddp.DistributedDataParallel(ddp.SyncBatchNorm.convert(net(comm)), **SMALL), comm)


def totals_ride_along(comm: Communicator) -> None:
    replica = ddp.DistributedDataParallel(net(comm), **SMALL)
    for _ in range(NUM_STEPS):
        replica.zero_grad()
        loss = replica(batch(comm)).square().sum()
        replica.ride_along(Totals(loss.detach(), 8))
        loss.backward()


def steps_in_backward(comm: Communicator) -> None:
    replica = ddp.DistributedDataParallel(net(comm), **SMALL)
    replica.step_in_backward(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for _ in range(NUM_STEPS):
        replica(batch(comm)).square().sum().backward()


def steps_on_a_side_stream(comm: Communicator) -> None:
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        train(ddp.DistributedDataParallel(net(comm), **SMALL), comm)
    cuda.current_stream().wait_stream(side)


class TwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.here, self.there = (nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)) for _ in range(3))
        self.side = cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        x, current = self.first(x), cuda.current_stream()
        self.side.wait_stream(current)
        with cuda.stream(self.side):
            there = self.there(x)
        here = self.here(x)
        current.wait_stream(self.side)
        there.record_stream(current)
        x.record_stream(self.side)
        return here + there


def a_forward_on_two_streams(comm: Communicator) -> None:
    for cap_mb in (0.005, 0.02, 0.5):
        torch.manual_seed(0)
        model = TwoStreams().to(comm.device)
        train(ddp.DistributedDataParallel(model, bucket_cap_mb=cap_mb, first_bucket_mb=cap_mb), comm)


def the_loader(comm: Communicator) -> None:
    data = [{"x": torch.full((1000,), float(i))} for i in range(64)]
    sampler = TrainSampler(64, global_batch=4, rank=comm.rank, world_size=comm.world_size)
    loader = TrainLoader(data, sampler, device=comm.device)
    for plan, batches in loader.epoch():
        for _, each in zip(plan.micros, batches, strict=True):
            each["x"].mul_(2).sum()
    loader.close()


def fit(model: nn.Module, comm: Communicator) -> None:
    torch.manual_seed(0)
    x = torch.randn(96, 40)
    data, optimizer = (x, x.sum(1).gt(0).long()), torch.optim.AdamW(model.parameters())
    how = {"loss": nn.functional.cross_entropy, "global_batch": 16, "epochs": 1, "test_data": data, "clip_norm": 1.0}
    ddp.fit(model, data, optimizer, folder=ddp.Folder(None, progress=False), **how)


def a_fit(comm: Communicator) -> None:
    fit(net(comm), comm)


def sharded(comm: Communicator) -> None:
    fit(ddp.BucketedDataParallel(net(comm), reducer=ReduceScatter, **SMALL), comm)


def fully_sharded(comm: Communicator) -> None:
    fit(FullyShardedDataParallel(net(comm)), comm)


CASES: list[Callable[[Communicator], None]] = [
    *(verbs, verbs_in_flight, verbs_on_two_streams, a_tensor_is_dropped, a_work_is_forgotten, a_wait_in_another_thread),
    *(messages, messages_from_a_side_stream, naive, bucketed, drop_in),
    *(without_overlap, wires, hooks, synchronised_batch_norm, totals_ride_along),
    *(steps_in_backward, steps_on_a_side_stream, a_forward_on_two_streams, sharded, fully_sharded),
    *(the_loader, a_fit),
]


def what_each_case_does() -> tuple[dict[str, list[str]], list[str]]:
    """Returns the races of each case, and the communicators in the order in which batches were enqueued."""
    device.install(int(os.environ["WORLD_SIZE"]))
    comm = ddp.init(device="standin", abort_s=30)
    found = {}
    for case in CASES:
        comm.barrier()
        cuda.synchronize()
        device.detect(host_waits_order=case is a_work_is_forgotten)
        try:
            case(comm)
        except BaseException as error:
            error.add_note(f"in the case {case.__name__}")
            raise
        if races := device.races():
            found[case.__name__] = races
    device.detect(False)
    ddp.shutdown()
    return found, nccl.ENQUEUED


@pytest.mark.slow
def test_no_command_races_and_communicators_have_one_order() -> None:
    results = run_ranks(what_each_case_does, 2)
    for found, _ in results:
        assert found == {}
    assert nccl.other_order([enqueued for _, enqueued in results]) is None
