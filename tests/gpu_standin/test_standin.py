"""The stand-in itself: planted races are found and others are not, waits are counted, and what is not done is not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_standin import cuda, device, nccl
from ranks import run_ranks
from torch import Tensor, nn


def found(case: Callable[[], object], **how: bool) -> list[str]:
    device.detect(**how)
    case()
    return device.races()


# ---- one process


def written_on_another_stream_without_waiting() -> None:
    numbers, side = torch.zeros(10, device="standin"), cuda.Stream()
    with cuda.stream(side):
        numbers.add_(1)


def read_on_another_stream_without_waiting() -> None:
    numbers, side = torch.zeros(10, device="standin"), cuda.Stream()
    with cuda.stream(side):
        numbers.sum()


def written_while_another_stream_reads() -> None:
    numbers, side = torch.zeros(10, device="standin"), cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        numbers.sum()
    numbers[3:5].zero_()
    cuda.current_stream().wait_stream(side)


def event_recorded_too_early() -> None:
    numbers, side = torch.zeros(10, device="standin"), cuda.Stream()
    event = cuda.current_stream().record_event()
    numbers.add_(1)
    side.wait_event(event)
    with cuda.stream(side):
        numbers.sum()
    cuda.current_stream().wait_stream(side)


def freed_while_another_stream_reads() -> None:
    numbers, side = torch.zeros(10, device="standin"), cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        numbers.sum()


def ordered_by_events() -> None:
    numbers, side = torch.zeros(10, device="standin"), cuda.Stream()
    side.wait_event(cuda.current_stream().record_event())
    with cuda.stream(side):
        numbers.add_(1)
    cuda.current_stream().wait_stream(side)
    numbers.sum()


def apart_in_one_block() -> None:
    numbers, side = torch.zeros(10, device="standin"), cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        numbers[:5].add_(1)
    numbers[5:].add_(1)
    cuda.current_stream().wait_stream(side)


def freed_after_record_stream() -> None:
    numbers, side = torch.zeros(10, device="standin"), cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        numbers.sum()
    numbers.record_stream(side)


def the_host_has_waited() -> None:
    numbers, side = torch.zeros(10, device="standin"), cuda.Stream()
    cuda.synchronize()
    with cuda.stream(side):
        numbers.sum()
    side.synchronize()


RACES = [
    written_on_another_stream_without_waiting,
    read_on_another_stream_without_waiting,
    written_while_another_stream_reads,
    event_recorded_too_early,
]


def the_detector() -> None:
    device.install(2)
    for case in RACES:
        assert any(each.startswith("race: ") for each in found(case)), case
    (early,) = found(freed_while_another_stream_reads)
    assert early == "freed too early: free after read by sum on device 0, stream 5, in memory of device 0"
    for case in (ordered_by_events, apart_in_one_block, freed_after_record_stream):
        assert found(case) == [], case
    assert found(the_host_has_waited) != []
    assert found(the_host_has_waited, host_waits_order=True) == []


def the_counts() -> None:
    device.install(2)
    numbers = torch.arange(4.0, device="standin")
    pinned = torch.empty(4, pin_memory=True)
    device.reset()
    for wait in (
        lambda: numbers.sum().item(),
        lambda: numbers.cpu(),
        lambda: numbers.tolist(),
        lambda: torch.empty(4).copy_(numbers, non_blocking=True),  # not pinned
        lambda: torch.ones(3, device="cpu").to("standin"),
        lambda: numbers.equal(numbers),
        lambda: numbers[numbers > 1],
        lambda: numbers.nonzero(),
        cuda.synchronize,
        lambda: cuda.current_stream().synchronize(),
        lambda: cuda.current_stream().record_event().synchronize(),
    ):
        before = sum(device.HOST_WAITS.values())
        wait()
        assert sum(device.HOST_WAITS.values()) == before + 1, device.HOST_WAITS
    device.reset()
    pinned.copy_(numbers, non_blocking=True)
    numbers.copy_(pinned, non_blocking=True)
    torch.ones(3).to("standin", non_blocking=True)
    torch._foreach_add_([numbers, numbers], 1)
    numbers.view(2, 2)[0].add_(1)
    assert not device.HOST_WAITS
    assert device.commands() == {"copy to host": 1, "copy from host": 2, "_foreach_add_": 1, "add": 1}
    assert device.commands_by_stream() == {"device 0": 5}
    before, _ = cuda.current_stream().record_event(), device.late()
    after = cuda.current_stream().record_event()
    assert before.query() and after.query()
    numbers.add_(1)
    after.record()
    assert before.query() and not after.query() and not cuda.current_stream().query()
    after.synchronize()
    assert after.query()
    device.late(False)


def like_the_cpu(kind: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    x, y = torch.randn(4, 1, 8, 8).to(kind), torch.randint(0, 10, (4,)).to(kind)
    net.to(kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=True)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return [value.cpu() for value in net.state_dict().values()]


def a_device_as_others() -> None:
    from ddp.process import gpu

    assert not torch.cuda.is_available()
    device.install(2, first_device=1)
    assert (gpu.KIND, gpu.cuda, gpu.cuda.device_count(), gpu.cuda.is_initialized()) == ("standin", cuda, 2, False)
    for ours, theirs in zip(like_the_cpu("standin"), like_the_cpu("cpu"), strict=True):
        assert torch.equal(ours, theirs)
    assert gpu.cuda.is_initialized()
    one, other = torch.ones(3, device="standin:0"), torch.ones(3, device="standin:1")
    for wrong in (lambda: one + other, lambda: one + torch.ones(3)):
        with pytest.raises(RuntimeError, match="to be on the same device"):
            wrong()
    assert torch.equal(one.to("standin:1"), other)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(3, device="standin:2")
    cuda.manual_seed(3)
    state = cuda.get_rng_state()
    numbers = torch.randn(5, device="standin")
    cuda.set_rng_state(state)
    assert torch.equal(torch.randn(5, device="standin"), numbers)
    assert len({cuda.get_device_properties(index).uuid for index in range(2)}) == 2
    with torch.autocast("standin", torch.bfloat16):
        assert nn.functional.linear(one, torch.ones(2, 3, device="standin")).dtype == torch.bfloat16
    assert torch.empty(3, device="standin").isnan().all()
    with cuda.device(1):
        assert torch.empty(1, device="standin").device.index == 1
    threads: set[int] = set()
    for each in (one, other):
        each.requires_grad_().register_hook(lambda gradient: threads.add(threading.get_ident()))
    (one.sum() + other.sum().to("standin:0")).backward()
    assert len(threads | {threading.get_ident()}) == 3  # autograd has one for each device


def what_is_not_done() -> None:
    """Commands behind a busy stream wait for it, on the device; the host only where it reads."""
    device.install()
    numbers, side = torch.zeros(4, device="standin"), cuda.Stream()
    pinned = torch.full((4,), 7.0).pin_memory()
    with cuda.stream(side):
        cuda._sleep(400_000_000)
        busy = side.record_event()
        numbers.add_(1)
        pinned.copy_(numbers, non_blocking=True)
    assert not busy.query() and not side.query() and cuda.current_stream().query()
    assert pinned.tolist() == [7.0] * 4
    begin = time.monotonic()
    cuda.current_stream().wait_stream(side)
    numbers.mul_(2)
    after = cuda.current_stream().record_event()
    assert not after.query() and time.monotonic() - begin < 0.15
    assert numbers.tolist() == [2.0] * 4 and pinned.tolist() == [1.0] * 4
    assert busy.query() and after.query() and time.monotonic() - begin > 0.1


@pytest.mark.parametrize("case", [the_detector, the_counts, a_device_as_others, what_is_not_done])
def test_one_process(case: Callable[[], None]) -> None:
    run_ranks(case, 1)


# ---- NCCL


def communicator(name: str) -> Any:
    store = torch.distributed.TCPStore("localhost", int(os.environ["MASTER_PORT"]), is_master=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = nccl.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    found = nccl.ProcessGroupNCCL(torch.distributed.PrefixStore(name, store), rank, size, options)
    found.eager_connect_single_device(torch.device("standin", cuda.current_device()))
    return found


def exchange(group: Any, mine: Tensor) -> tuple[Tensor, Any]:
    """Sends a tensor to the next rank, and receives the one before's."""
    theirs = torch.full_like(mine, -1.0)
    group._start_coalescing()
    group.send([mine.view(torch.uint8)], (group.rank() + 1) % group.size(), 0)
    group.recv([theirs.view(torch.uint8)], (group.rank() - 1) % group.size(), 0)
    return theirs, group._end_coalescing()


def over_nccl() -> list[str]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device.install(size)
    cuda.set_device(rank)
    group, other = communicator("one"), communicator("other")
    before = float((rank - 1) % size)

    # Batches are asynchronous and in order; whoever waits on a stream blocks nobody.
    nccl.FAULTS.delay_s = 0.1
    device.detect()
    mine = torch.full((100,), float(rank), device="standin")
    (first, one), (second, two) = exchange(group, mine), exchange(group, mine)
    assert not one.is_completed() and not two.is_completed() and not device.HOST_WAITS
    one.wait()
    first.add_(1)
    event = cuda.current_stream().record_event()
    assert not event.query() and not one.is_completed()
    event.synchronize()
    assert one.is_completed() and not two.is_completed() and one.exception() is None
    assert first.tolist() == [before + 1] * 100
    two.wait()
    assert second.tolist() == [before] * 100 and device.races() == []
    nccl.FAULTS.delay_s = 0.0

    # Whoever does not wait races.
    theirs, work = exchange(group, mine)
    theirs.add_(1)
    assert any("write by nccl batch" in each for each in device.races())
    work.wait()
    device.detect(False)

    # What the real one refuses.
    with pytest.raises(TypeError, match="not supported for NCCL"):
        group.send([torch.ones(3, dtype=torch.int16, device="standin")], 0, 0)
    with pytest.raises(ValueError, match="not contiguous"):
        group.send([torch.ones(3, 3, device="standin").t()], 0, 0)
    with pytest.raises(ValueError, match="on cpu"):
        group.send([torch.ones(3)], 0, 0)
    device.reset()
    with cuda.device((rank + 1) % size):
        exchange(group, mine)[1].wait()
    assert device.counters()["NCCL called with another current device"] == 2
    exchange(group, mine)[1].wait()

    # Two communicators in different orders.
    nccl.ENQUEUED.clear()
    works = [exchange(each, mine)[1] for each in ((group, other) if rank else (other, group))]
    enqueued = list(nccl.ENQUEUED)
    for work in works:
        work.wait()
    cuda.synchronize()

    # An asynchronous error: `is_completed` is True and `wait` silent, the kernel spins until it is aborted.
    nccl.FAULTS.error = "unhandled system error"
    _, work = exchange(other, mine)
    while work.exception() is None:
        time.sleep(0.001)
    assert work.is_completed() and work.wait() and str(work.exception()) == "unhandled system error"
    assert not cuda.current_stream().query()
    other.abort()
    cuda.synchronize()
    nccl.FAULTS.error = ""

    # A peer that never comes: blocked until the abort, and everything behind it too.
    nccl.FAULTS.peer_never_comes = True
    theirs, work = exchange(group, mine)
    work.wait()
    theirs.add_(1)
    late, later = cuda.current_stream().record_event(), exchange(group, mine)[1]
    assert not late.query() and not work.is_completed() and work.exception() is None
    begin = time.monotonic()
    threading.Timer(0.2, group.abort).start()
    late.synchronize()
    assert time.monotonic() - begin > 0.15 and theirs.tolist() == [0.0] * 100
    cuda.synchronize()
    for each in (work, later):
        while not each.is_completed():
            time.sleep(0.001)
        assert "aborted" in str(each.exception())
    with pytest.raises(RuntimeError, match="aborted"):
        exchange(group, mine)
    return enqueued


def test_nccl() -> None:
    enqueued = run_ranks(over_nccl, 2)
    assert nccl.other_order(enqueued) is not None
    assert nccl.other_order([enqueued[0], enqueued[0]]) is None


def a_batch_meets_its_peer_s() -> None:
    """Send, then receive, in a batch each, on both sides: NCCL never ends."""
    rank = int(os.environ["RANK"])
    device.install(2)
    cuda.set_device(rank)
    group = communicator("one")
    mine, theirs = torch.ones(3, device="standin"), torch.ones(3, device="standin")
    group.send([mine], 1 - rank, 0)
    group.recv([theirs], 1 - rank, 0)
    time.sleep(0.2)
    assert not nccl.COMMUNICATORS[0]._in_flight[0].is_completed()


def test_a_batch_meets_its_peer_s() -> None:
    run_ranks(a_batch_meets_its_peer_s, 2)
