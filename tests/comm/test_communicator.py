"""The executor on ranks that are threads: right for every world size, length, dtype, operation and segment size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.errors import CommunicatorBroken, ConfigError, PeerLost
from ddp.transport.faulty import Faulty
from ddp.transport.simulated import SimulatedNetwork, SimulatedTransport

LENGTHS = [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 1000]


def values(rank: int, numel: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small whole numbers: every order of additions gives the same, exactly."""
    generator = torch.Generator().manual_seed(rank * 10_007 + numel)
    return torch.randint(-8, 8, (numel,), generator=generator).to(dtype)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_all_reduce_equals_the_sum(world_size: int) -> None:
    def program(transport: SimulatedTransport) -> list[Tensor]:
        comm = Communicator(transport, segment_bytes=64, abort_s=10)
        return [comm.all_reduce(values(comm.rank, numel)) for numel in LENGTHS]

    results = SimulatedNetwork(world_size).run(program)
    for index, numel in enumerate(LENGTHS):
        expected = torch.stack([values(rank, numel) for rank in range(world_size)]).sum(0)
        for rank in range(world_size):
            assert torch.equal(results[rank][index], expected)


@pytest.mark.parametrize("segment_bytes", [1, 8, 100, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8])
def test_any_dtype_and_segment_size(dtype: torch.dtype, segment_bytes: int) -> None:
    def program(transport: SimulatedTransport) -> Tensor:
        comm = Communicator(transport, segment_bytes=segment_bytes, abort_s=10)
        return comm.all_reduce(values(comm.rank, 50).abs().to(dtype))

    expected = sum(values(rank, 50).abs() for rank in range(3))
    for result in SimulatedNetwork(3).run(program):
        assert result.dtype == dtype
        assert torch.equal(result.double(), expected)


@pytest.mark.parametrize(("op", "reference"), [("min", torch.amin), ("max", torch.amax), ("mean", torch.mean)])
def test_other_operations(op: str, reference: object) -> None:
    def program(transport: SimulatedTransport) -> Tensor:
        return Communicator(transport, abort_s=10).all_reduce(values(transport.rank, 33), op)  # type: ignore[arg-type]

    expected = reference(torch.stack([values(rank, 33) for rank in range(4)]), 0)  # type: ignore[operator]
    for result in SimulatedNetwork(4).run(program):
        torch.testing.assert_close(result, expected, rtol=1e-15, atol=0)


def test_result_is_bitwise_equal_on_all_ranks_and_in_place() -> None:
    def program(transport: SimulatedTransport) -> Tensor:
        comm = Communicator(transport, segment_bytes=256, abort_s=10)
        tensor = torch.randn(999, generator=torch.Generator().manual_seed(comm.rank))
        assert comm.all_reduce(tensor) is tensor
        return tensor

    first, *others = SimulatedNetwork(5).run(program)
    assert all(torch.equal(first.view(torch.int32), other.view(torch.int32)) for other in others)


def test_non_contiguous_tensors() -> None:
    def program(transport: SimulatedTransport) -> Tensor:
        tensor = torch.arange(12.0).view(3, 4).t()
        Communicator(transport, abort_s=10).all_reduce(tensor)
        return tensor

    for result in SimulatedNetwork(3).run(program):
        assert torch.equal(result, 3 * torch.arange(12.0).view(3, 4).t())


@pytest.mark.parametrize("world_size", range(1, 7))
def test_reduce_scatter_all_gather_and_broadcast(world_size: int) -> None:
    def program(transport: SimulatedTransport) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        comm = Communicator(transport, segment_bytes=16, abort_s=10)
        mine = comm.reduce_scatter(values(comm.rank, 37))
        gathered = comm.all_gather(torch.full((comm.rank % 3, 2), float(comm.rank)))
        from_each = [comm.broadcast(torch.full((5,), float(comm.rank)), root) for root in range(world_size)]
        return mine, gathered, from_each

    results = SimulatedNetwork(world_size).run(program)
    total = torch.stack([values(rank, 37) for rank in range(world_size)]).sum(0)
    assert torch.equal(torch.cat([mine for mine, _, _ in results]), total)
    for _, gathered, from_each in results:
        for rank in range(world_size):
            assert torch.equal(gathered[rank], torch.full((rank % 3, 2), float(rank)))
            assert torch.equal(from_each[rank], torch.full((5,), float(rank)))


def test_many_in_flight_end_in_order_and_sync_calls_queue_behind() -> None:
    def program(transport: SimulatedTransport) -> list[float]:
        comm = Communicator(transport, abort_s=10)
        tensors = [torch.full((100,), float(k)) for k in range(20)]
        works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
        agreed = comm.agree_any(comm.rank == 1)
        assert agreed
        assert all(work.is_completed() for work in works)
        for work in works:
            work.wait()
        comm.close()
        return [tensor[0].item() for tensor in tensors]

    for result in SimulatedNetwork(3).run(program):
        assert result == [3.0 * k for k in range(20)]


def test_agree_any_and_barrier() -> None:
    def program(transport: SimulatedTransport) -> tuple[bool, bool]:
        comm = Communicator(transport, abort_s=10)
        comm.barrier()
        return comm.agree_any(False), comm.agree_any(comm.rank == 2)

    assert SimulatedNetwork(3).run(program) == [(False, True)] * 3


@pytest.mark.parametrize("how", ["raise", "silent"])
@pytest.mark.parametrize("fail_round", [0, 1, 3])
def test_a_failing_rank_ends_everyone_and_the_communicator(how: str, fail_round: int) -> None:
    def program(transport: SimulatedTransport) -> list[str]:
        faulty = Faulty(transport, fail_at={1: fail_round}, how=how)  # type: ignore[arg-type]
        comm = Communicator(faulty, abort_s=0.3)
        errors = []
        for _ in range(2):
            try:
                comm.all_reduce(torch.zeros(10), label="gradients of fc")
            except (PeerLost, CommunicatorBroken) as error:
                errors.append(f"{type(error).__name__} {error}")
        return errors

    for errors in SimulatedNetwork(3).run(program):
        assert len(errors) == 2
        assert errors[0].startswith("PeerLost lost rank")
        assert "#1 [gradients of fc]" in errors[0]
        assert errors[1].startswith("CommunicatorBroken")


def test_wrong_arguments() -> None:
    comm = Communicator(SimulatedNetwork(1).transport(0))
    with pytest.raises(ConfigError, match="algorithm='star' is unknown; choose one of auto, ring"):
        comm.all_reduce(torch.zeros(1), algorithm="star")
    for verb in (comm.all_reduce, comm.reduce_scatter):
        with pytest.raises(ConfigError, match="op='avg' is unknown"):
            verb(torch.zeros(1), "avg")  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"op='mean' on torch\.int64"):
        comm.all_reduce(torch.zeros(1, dtype=torch.int64), "mean")
    with pytest.raises(ConfigError, match="root=1 is no rank of a world of 1"):
        comm.broadcast(torch.zeros(1), root=1)
