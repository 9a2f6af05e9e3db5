"""Batches of leases: those that ranks have, in whichever order leases come, with and without what reads ahead.

Tests: ddp/strategies/parameter_server/worker.py.
"""

from __future__ import annotations

import multiprocessing
import random
import threading

import pytest
import torch

from ddp.data.loading.fetching import THREAD
from ddp.data.loading.loader import TrainLoader
from ddp.data.orders.sampler import StepPlan, TrainSampler
from ddp.errors import LoaderLost, UnreadableSample
from ddp.strategies.parameter_server.ledger import Lease, Plan
from ddp.strategies.parameter_server.worker import LeasedLoader

NUM_SAMPLES, BATCH, NUM_PARTS = 26, 8, 3


class Data:
    """Samples with random numbers; `read` has those that this process has read."""

    def __init__(self, *, may_read_ahead: bool = False, broken: int = -1) -> None:
        self.may_read_ahead, self.broken = may_read_ahead, broken
        self.read: list[int] = []

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.broken:
            raise UnreadableSample(f"sample {index} is broken")
        self.read.append(index)
        noise = 0.0 if self.may_read_ahead else float(torch.rand(()))
        return torch.tensor([index, noise])


def sampler_of(rank: int = 0, world_size: int = 1) -> TrainSampler:
    return TrainSampler(NUM_SAMPLES, global_batch=BATCH, rank=rank, world_size=world_size, num_shards=4, micro_size=2)


def of_ranks(data: Data) -> dict[tuple[int, int], list[torch.Tensor]]:
    """Returns the batches of an epoch by position and rank."""
    found = {}
    for rank in range(NUM_PARTS):
        loader = TrainLoader(data, sampler_of(rank, NUM_PARTS))
        found |= {(plan.position, rank): list(micros) for plan, micros in loader.epoch()}
    return found


def leases() -> list[Lease]:
    plans = [Plan(step, *plan[:3]) for step, plan in enumerate(sampler_of().plans(), 1)]
    parts = ((plan, part) for plan in plans for part in range(NUM_PARTS))
    return [Lease(number, plan, part, NUM_PARTS) for number, (plan, part) in enumerate(parts)]


def nothing_is_left() -> bool:
    threads = [thread for thread in threading.enumerate() if thread.name == THREAD]
    for thread in threads:
        thread.join(10)
    return not multiprocessing.active_children() and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(("num_workers", "ahead"), [(0, False), (0, True), (2, False)])
def test_leases_in_any_order_have_the_batches_of_ranks(num_workers: int, ahead: bool) -> None:
    """They come one by one or several at once, some are left, some in the midst, and it goes on after a pause."""
    data, draw = Data(may_read_ahead=ahead), random.Random(num_workers + ahead)
    expected, todo = of_ranks(data), leases()
    draw.shuffle(todo)
    loader = LeasedLoader(data, sampler_of(), num_workers=num_workers)
    assert loader.num_ahead == (4 if num_workers else 3)
    for _ in range(2):  # it can be used again
        done, ahead_of, order = 0, list(todo), []
        while ahead_of:
            loader.put([ahead_of.pop() for _ in range(min(len(ahead_of), draw.randint(1, 5)))])
            for lease, part, batches in loader.steps():
                order.append(lease)
                if ahead_of and draw.random() < 0.6:
                    loader.put([ahead_of.pop()])
                assert part == sampler_of(lease.part, NUM_PARTS).part_of(part, lease.part, NUM_PARTS)
                mine = expected[lease.plan.position, lease.part]
                num_read = draw.choice((0, 1, len(mine), len(mine)))
                for want, _ in zip(mine, range(num_read), strict=False):
                    torch.testing.assert_close(next(batches), want, rtol=0, atol=0)
                assert num_read < len(mine) or next(batches, None) is None
                done += 1
        assert done == len(todo) and order == todo[::-1]
        loader.close()
        assert nothing_is_left()


def test_what_is_left_is_not_read_where_nothing_reads_ahead() -> None:
    data = Data()
    loader = LeasedLoader(data, sampler_of())
    loader.put(leases()[:4])
    for number, (_, part, batches) in enumerate(loader.steps()):
        assert data.read == []
        if number == 3:
            next(batches)
            assert data.read == list(part.micros[0].indices)
    assert loader.num_ahead == 3


def test_a_thread_reads_as_far_ahead_as_there_are_leases() -> None:
    data = Data(may_read_ahead=True)
    loader = LeasedLoader(data, sampler_of())
    loader.put(leases()[:2])
    steps = loader.steps()
    _, first, batches = next(steps)
    next(batches)
    _, second, batches = next(steps)
    assert len(list(batches)) == len(second.micros)
    assert data.read == [index for part in (first, second) for micro in part.micros for index in micro.indices]
    assert next(steps, None) is None
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_cannot_be_read_is_said(num_workers: int) -> None:
    todo = leases()[:4]
    plan = StepPlan(*todo[2].plan[1:], micros=())
    broken = sampler_of().part_of(plan, todo[2].part, NUM_PARTS).micros[0].indices[0]
    loader = LeasedLoader(Data(broken=broken), sampler_of(), num_workers=num_workers)
    loader.put(todo)
    with pytest.raises((UnreadableSample, LoaderLost), match=f"sample {broken}"):
        for _, _, batches in loader.steps():
            list(batches)
    loader.close()
    assert nothing_is_left()


def test_it_ends_in_the_midst() -> None:
    for data, num_workers in ((Data(), 2), (Data(may_read_ahead=True), 0)):
        loader = LeasedLoader(data, sampler_of(), num_workers=num_workers)
        loader.put(leases())
        for _, _, batches in loader.steps():
            next(batches)
            break
        loader.close()
        assert nothing_is_left()
