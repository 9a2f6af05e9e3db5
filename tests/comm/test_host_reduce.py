"""Collectives in shared memory: every member of the family × dtypes × lengths × 1 to 8 ranks, and when ranks misbehave.

Most ranks are threads of this process, each with mappings of its own; where it matters, they are processes.

Tests: ddp/comm/host_memory.py.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from ranks import as_threads, collect, run_ranks, start_ranks, unfailed
from torch import Tensor

from ddp.collectives.schedule import offsets
from ddp.comm import connect, host_memory, host_reduce
from ddp.comm.connect import join
from ddp.comm.host_memory import NoSharedMemory
from ddp.comm.host_reduce import HostGroup
from ddp.comm.reduction import flatten
from ddp.comm.transport.edge import Gather, TransportError
from ddp.comm.transport.shared_memory import KINDS, Kind, SharedMemory
from ddp.errors import CollectiveMismatch, ConfigError

Result = TypeVar("Result")
SIZES = range(2, 9)


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    before = mapped()  # by a test of another file
    yield
    if mapped() - before:
        gc.collect()  # tracebacks of expected errors hold groups in cycles
    assert not list(Path("/dev/shm").glob(f"ddp-{os.getpid()}-*"))
    assert not mapped() - before


def mapped() -> set[str]:
    """Shared memory that this process has in its address space."""
    return set(re.findall(r"ddp-\d+-\w+", Path("/proc/self/maps").read_text()))


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapping some megabytes for each of eight ranks would cost more than the collectives."""
    monkeypatch.setattr(host_memory, "PIECE_BYTES", host_reduce.SMALL_BYTES)


@pytest.fixture
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of some thousand take every path: many pieces, many blocks, no mailbox."""
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 4096)
    monkeypatch.setattr(host_reduce, "SMALL_BYTES", 0)
    monkeypatch.setattr(host_reduce, "SMALL_ALLOCATED_BYTES", 0)
    monkeypatch.setattr(host_reduce, "BLOCK_BYTES", 2048)


def on_one_host(
    size: int, program: Callable[[HostGroup], Result], *, kind: Kind = "memfd", timeout_s: float = 30
) -> list[Result]:
    """Runs `program` with the group of each of `size` ranks, as threads; the results by rank."""

    def run(rank: int, gather: Gather) -> Result:
        joined = join(rank, gather, timeout_s=timeout_s, kinds=(kind,))
        group = joined.group
        assert joined.hosts == (tuple(range(size)),)
        assert group is not None, joined.obstacle
        try:
            return program(group)
        finally:
            group.close()

    return as_threads(size, run)


class Numbered:
    """A group whose calls are numbered, as a communicator does it."""

    def __init__(self, group: HostGroup) -> None:
        self.group, self.index, self.size, self._sequence = group, group.index, group.size, 0

    def __call__(self, operation: str, *args: Any, **kwargs: Any) -> None:
        self._sequence += 1
        getattr(numbered(self.group, self._sequence), operation)(*args, **kwargs)


def numbered(group: HostGroup, number: int) -> HostGroup:
    """The group, whose next call has this number."""
    group._memory.call_number = lambda: number
    return group


# --- what is computed ------------------------------------------------------------------------------------------------


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128]
OPS = ["sum", "product", "min", "max"]


def values(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    """A rank's contribution: negative and positive, of different sizes; small enough for products of eight."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype is torch.bool:
        return torch.rand(numel, generator=generator) < 0.7
    if dtype in INTEGERS:
        return torch.randint(-100, 100, (numel,), generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.randn(numel, generator=generator, dtype=dtype)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * 1.5).to(dtype)


def in_tree_order(op: str, terms: Sequence[Tensor]) -> Tensor:
    """The canonical tree, written as a recursion with torch's own functions, out of place."""
    if len(terms) == 1:
        return terms[0]
    half = max(power for power in (1, 2, 4) if power < len(terms))
    left, right = in_tree_order(op, terms[:half]), in_tree_order(op, terms[half:])
    return {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}[op](left, right)


def expected(op: str, terms: Sequence[Tensor]) -> Tensor:
    """What must come out, bit by bit."""
    dtype = terms[0].dtype
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(dtype, dtype)
    return in_tree_order(op, [term.view(signed) for term in terms]).view(dtype)


def ops_of(dtype: torch.dtype) -> list[str]:
    """What torch computes; not products of complex numbers, whose bits depend on where a vectorised loop ends."""
    if dtype.is_complex:
        return ["sum"]
    return ["sum", "product"] if dtype in (torch.uint16, torch.uint32, torch.uint64) else OPS


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy()) if tensor.numel() else b""


def lengths(size: int) -> list[int]:
    return [0, 1, size - 1, size, size + 1, 63, 512 * size - 1, 2048 + size, 3001]


def reduce_every_way(group: HostGroup) -> None:
    """Every length with one dtype, every dtype with one length."""
    call, size = Numbered(group), group.size
    for numel, dtype in [*((numel, torch.float32) for numel in lengths(size)), *((3001, dtype) for dtype in DTYPES)]:
        memory = group.allocate(numel, dtype)
        assert (memory.numel(), memory.dtype, bool(memory.any())) == (numel, dtype, False)
        assert memory.data_ptr() % 64 == 0
        terms = [values(numel, dtype, rank) for rank in range(size)]
        for op in ops_of(dtype):
            want = bits(expected(op, terms))
            for tensor in (terms[group.index].clone(), memory):
                tensor.copy_(terms[group.index])
                call("all_reduce", flatten(tensor), op)
                assert bits(tensor) == want, (numel, dtype, op)
        group.free(memory)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("_small_pieces")
@pytest.mark.quick(1)
def test_zero_copy_and_staged_all_reduce_give_the_bits_of_the_tree(size: int) -> None:
    on_one_host(size, reduce_every_way)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.quick(1)
def test_mailboxes_give_the_bits_of_the_tree(size: int) -> None:
    on_one_host(size, reduce_every_way)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS[:5]])
def test_the_tree_is_as_exact_as_any_order(dtype: torch.dtype) -> None:
    """The bits above are those of a formula of this file; this one asks float64, and whole numbers, for the truth."""
    for size in range(1, 9):
        terms = [values(999, dtype, rank) for rank in range(size)]
        total, exact = expected("sum", terms), torch.stack(terms).double().sum(0)
        if dtype in INTEGERS:
            assert torch.equal(total, torch.stack(terms).to(torch.int64).sum(0).to(dtype))
        else:
            bound = 2 * (size - 1) * torch.finfo(dtype).eps * torch.stack(terms).double().abs().sum(0)
            assert bool(((total.double() - exact).abs() <= bound).all())


def take_means(group: HostGroup) -> None:
    call = Numbered(group)
    for numel in (5, 5000):
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            terms = [values(numel, dtype, rank) for rank in range(group.size)]
            want = bits(expected("sum", terms).div_(group.size))
            memory = group.allocate(numel, dtype)
            for tensor in (terms[group.index].clone(), memory):
                tensor.copy_(terms[group.index])
                call("all_reduce", tensor, "sum", divide_by=group.size)
                assert bits(tensor) == want
            group.free(memory)
    many = torch.full((5000,), 3.0 * (1 << 40), dtype=torch.float64)  # as the tokens of a step may be
    call("all_reduce", many, "sum", divide_by=3 << 40)
    assert (many == group.size).all()


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.usefixtures("_small_pieces")
def test_the_mean_divides_once_after_adding(size: int) -> None:
    on_one_host(size, take_means)


def scatter_gather_broadcast(group: HostGroup) -> None:
    call, size, me = Numbered(group), group.size, group.index
    for numel in (0, 1, size + 1, 512 * size - 1, 3001):
        uneven = [0, *sorted(random.Random(numel).choices(range(numel + 1), k=size - 1)), numel]
        one_owns_all = [0] * size + [numel]
        for bounds in (offsets(numel, size), uneven, one_owns_all):
            for dtype in (torch.float32, torch.bool) if numel < 3001 else (torch.bfloat16, torch.uint16, torch.float64):
                memory = group.allocate(numel, dtype)
                terms = [values(numel, dtype, rank) for rank in range(size)]
                mine = slice(bounds[me], bounds[me + 1])
                for tensor in (terms[me].clone(), memory):
                    tensor.copy_(terms[me])
                    call("reduce_scatter", flatten(tensor), bounds, "sum")
                    assert bits(tensor[mine]) == bits(expected("sum", terms)[mine])
                    call("all_gather", tensor, bounds)
                    assert bits(tensor) == bits(expected("sum", terms))
                    for root in {0, size - 1}:
                        tensor.copy_(terms[me])
                        call("broadcast", tensor, root)
                        assert bits(tensor) == bits(terms[root])
                group.free(memory)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.usefixtures("_small_pieces")
@pytest.mark.quick(1)
def test_the_other_collectives_with_uneven_and_empty_slices(size: int) -> None:
    on_one_host(size, scatter_gather_broadcast)


def use_parts_of_a_region(group: HostGroup) -> None:
    """Views of allocated memory are reduced where they lie, whatever their dtype and place; nothing else is touched."""
    call = Numbered(group)
    memory = group.allocate(10_000, torch.float32)
    for start, stop in ((0, 10_000), (1, 5001), (7777, 9999), (16, 17)):
        memory.fill_(-1.0)
        part = memory[start:stop]
        part.fill_(group.index + 1.0)
        call("all_reduce", part, "sum")
        total = group.size * (group.size + 1) / 2
        assert bool((part == total).all())
        assert bool((memory[:start] == -1).all() and (memory[stop:] == -1).all())
    whole = memory.view(torch.int64)
    whole.fill_(1 << 40)
    call("all_reduce", whole, "sum")
    assert bool((whole == group.size << 40).all())


@pytest.mark.usefixtures("_small_pieces")
def test_views_of_allocated_memory() -> None:
    on_one_host(3, use_parts_of_a_region)


def mix_memory(group: HostGroup) -> None:
    """One rank's tensor is allocated, the other's is not; or both are, but not in the same place."""
    call = Numbered(group)
    memory = group.allocate(8000, torch.float32)
    ordinary = torch.empty(4000)
    for _ in range(3):
        for number, places in enumerate(([ordinary, memory[:4000]], [memory[:4000], memory[4000:]], [ordinary] * 2)):
            tensor = places[group.index % 2]
            bounds = offsets(4000, group.size)
            for operation in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
                tensor.copy_(torch.arange(4000) + group.index)
                if operation == "all_reduce":
                    call(operation, tensor, "max")
                    assert torch.equal(tensor, torch.arange(4000.0) + group.size - 1), number
                elif operation == "reduce_scatter":
                    call(operation, tensor, bounds, "min")
                    mine = slice(bounds[group.index], bounds[group.index + 1])
                    assert torch.equal(tensor[mine], torch.arange(4000.0)[mine])
                elif operation == "all_gather":
                    call(operation, tensor, bounds)
                    owner = torch.arange(group.size).repeat_interleave(torch.tensor(bounds).diff())
                    assert torch.equal(tensor, torch.arange(4000) + owner)
                else:
                    call(operation, tensor, 1)
                    assert torch.equal(tensor, torch.arange(4000.0) + 1)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.usefixtures("_small_pieces")
def test_ranks_whose_tensors_lie_in_different_kinds_of_memory(size: int) -> None:
    on_one_host(size, mix_memory)


class Step(NamedTuple):
    """One call of a random program."""

    operation: str
    numel: int
    allocated: bool


def run_with_pauses(group: HostGroup, program: list[Step]) -> None:
    """Note "turns" in practice: whoever runs ahead must not overwrite what a slow rank still reads."""
    call, me, size = Numbered(group), group.index, group.size
    dice = random.Random(me)
    memory = group.allocate(4096, torch.int64)
    for number, step in enumerate(program):
        tensor = memory[: step.numel] if step.allocated else torch.empty(step.numel, dtype=torch.int64)
        tensor.copy_(torch.arange(step.numel) * (me + 1) + number)
        if dice.random() < 0.3:
            time.sleep(dice.random() / 500)
        if step.operation == "all_reduce":
            call(step.operation, tensor, "sum")
            want = torch.arange(step.numel) * (size * (size + 1) // 2) + number * size
        elif step.operation == "broadcast":
            call(step.operation, tensor, number % size)
            want = torch.arange(step.numel) * (number % size + 1) + number
        else:
            bounds = offsets(step.numel, size)
            call(step.operation, tensor, bounds)
            owner = torch.arange(size).repeat_interleave(torch.tensor(bounds).diff())
            want = torch.arange(step.numel) * (owner + 1) + number
        assert torch.equal(tensor, want), (number, step)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_fast_and_slow_ranks_do_not_run_into_each_other(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 4096)
    monkeypatch.setattr(host_reduce, "SMALL_BYTES", 1024)
    monkeypatch.setattr(host_reduce, "SMALL_ALLOCATED_BYTES", 512)
    monkeypatch.setattr(host_reduce, "BLOCK_BYTES", 2048)
    slow, honest_copy, honest_add = random.Random(1), host_reduce.copy_bytes, host_reduce._Arithmetic.out_of_place

    def copy_slowly(to: int, source: int, num_bytes: int) -> None:
        if slow.random() < 0.1:
            time.sleep(slow.random() / 500)
        honest_copy(to, source, num_bytes)

    def add_slowly(self: Any, leaves: Sequence[Tensor], out: Tensor, scratch: Any, divide_by: int) -> None:
        if slow.random() < 0.2:
            time.sleep(slow.random() / 500)
        honest_add(self, leaves, out, scratch, divide_by)

    monkeypatch.setattr(host_reduce, "copy_bytes", copy_slowly)
    monkeypatch.setattr(host_reduce._Arithmetic, "out_of_place", add_slowly)
    dice = random.Random(size)
    program = [
        Step(
            dice.choice(["all_reduce", "all_reduce", "all_gather", "broadcast"]),
            dice.choice([0, 1, 16, 100, 128, 129, 1000, 4096]),
            dice.random() < 0.4,
        )
        for _ in range(150)
    ]
    on_one_host(size, lambda group: run_with_pauses(group, program))


# --- what is refused -------------------------------------------------------------------------------------------------


def call_differently(group: HostGroup, first: Callable[..., Any], second: Callable[..., Any]) -> str:
    """Member 1 calls something else; afterwards all go on together."""
    with pytest.raises(CollectiveMismatch) as raised:
        (second if group.index == 1 else first)(numbered(group, 7))
    tensor = torch.ones(20_000)
    numbered(group, 99).all_reduce(tensor, "sum")
    assert bool((tensor == group.size).all())
    return str(raised.value)


ONES = torch.ones(8)


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (
            lambda group: group.all_reduce(torch.ones(8), "sum"),
            lambda group: group.all_reduce(torch.ones(9), "sum"),
            ["#7 all_reduce of 8 × float32 by sum", "\n  rank 1 on host", ": #7 all_reduce of 9 × float32"],
        ),
        (
            lambda group: group.all_reduce(torch.ones(30_000), "sum"),
            lambda group: group.all_reduce(torch.ones(30_000, dtype=torch.int32), "max"),
            ["#7 all_reduce of 30000 × float32 by sum", "#7 all_reduce of 30000 × int32 by max"],
        ),
        (
            lambda group: group.barrier(),
            lambda group: group.broadcast(torch.ones(8), 1),
            ["#7 barrier", "#7 broadcast of 8 × float32 from the host's member 1"],
        ),
        (
            lambda group: group.all_reduce(torch.ones(8), "sum"),
            lambda group: numbered(group, 8).all_reduce(torch.ones(8), "sum"),
            ["#7 all_reduce of 8 × float32 by sum", "#8 all_reduce of 8 × float32 by sum"],
        ),
        (
            lambda group: group.all_gather(torch.ones(8), [0, 3, 8, 8]),
            lambda group: group.all_gather(torch.ones(8), [0, 4, 8, 8]),
            ["#7 all_gather of 8 × float32 with slices "],
        ),
        (
            lambda group: group.reduce_scatter(torch.ones(8), [0, 8, 8, 8], "sum"),
            lambda group: group.reduce_scatter(torch.ones(8), [0, 8, 8, 8], "max"),
            ["#7 reduce_scatter of 8 × float32 by sum with slices", "float32 by max with slices"],
        ),
        (
            lambda group: group.all_reduce(torch.ones(8), "sum", divide_by=3),
            lambda group: group.all_reduce(torch.ones(8), "sum"),
            ["#7 all_reduce of 8 × float32 by sum divided by 3\n", "#7 all_reduce of 8 × float32 by sum\n"],
        ),
        (
            lambda group: group.allocate(8, torch.float32),
            lambda group: group.all_reduce(torch.ones(8), "sum"),
            ["#7 allocate of 8 × float32", "#7 all_reduce of 8 × float32 by sum"],
        ),
    ],
)
def test_ranks_that_call_different_things_are_all_told_both(
    first: Callable[..., Any], second: Callable[..., Any], says: list[str]
) -> None:
    for message in on_one_host(3, lambda group: call_differently(group, first, second)):
        assert all(words in f"{message}\n" for words in says), message


def ask_for_nonsense(group: HostGroup) -> None:
    with pytest.raises(ConfigError, match="free takes a tensor from allocate"):
        group.free(torch.ones(3))
    group.barrier()


def test_nonsense_is_refused_before_anyone_waits() -> None:
    on_one_host(2, ask_for_nonsense)


# --- memory ----------------------------------------------------------------------------------------------------------


def allocate_and_free(group: HostGroup) -> None:
    kept = []
    for numel in (0, 1, 5000, 1 << 18):
        tensor = group.allocate(numel, torch.bfloat16)
        assert tensor.untyped_storage().nbytes() == 2 * numel  # saving it saves nothing of the neighbours'
        tensor.fill_(1)
        group.all_reduce(tensor, "sum")
        group.free(tensor)
        group.all_reduce(tensor, "sum")  # it still is a tensor like any other
        assert bool((tensor == group.size**2).all())
        kept.append(tensor)
    with pytest.raises(ConfigError, match="once"):
        group.free(kept[-1])
    group.barrier()
    before = mapped()
    group.barrier()
    del tensor
    kept.clear()
    group.barrier()
    assert (len(before), len(mapped())) == (4, 1)
    group.barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_ends_when_all_have_freed_it_and_let_go(kind: Kind) -> None:
    on_one_host(3, allocate_and_free, kind=kind)


def train_in_inference_mode(group: HostGroup) -> None:
    with torch.inference_mode():
        memory = group.allocate(4, torch.float32)
    parameter = torch.ones(4, requires_grad=True)
    (parameter * memory).sum().backward()
    assert not memory.is_inference()


def test_memory_allocated_in_inference_mode_is_ordinary() -> None:
    on_one_host(2, train_in_inference_mode)


def run_short_of_memory(group: HostGroup) -> tuple[str, str]:
    with pytest.raises(NoSharedMemory) as too_much:
        group.allocate(1 << 48, torch.float32)
    with pytest.raises(NoSharedMemory) as not_mapped:
        group.allocate(1 << 10, torch.float32)
    assert group.allocate(10, torch.float32).numel() == 10
    return str(too_much.value), str(not_mapped.value)


def test_a_rank_without_memory_is_a_reason_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SharedMemory.attach.__func__  # type: ignore[attr-defined]
    failed = []

    def attach(cls: type[SharedMemory], path: str, num_bytes: int) -> SharedMemory:
        if num_bytes == 3 * 4096 and not failed:
            failed.append(path)
            raise OSError("too many open files")
        return honest(cls, path, num_bytes)  # type: ignore[no-any-return]

    monkeypatch.setattr(SharedMemory, "attach", classmethod(attach))
    said = on_one_host(3, run_short_of_memory)
    assert len(set(said)) == 1
    assert f"{3 << 50} bytes for the 3 ranks of this host: rank 0: [Errno 12]" in said[0][0]
    assert "of this host: rank 1: too many open files" in said[0][1] or "rank 2: too many open files" in said[0][1]


def test_ranks_that_cannot_share_memory_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "why_unsupported", lambda: "the C library has no sem_clockwait")
    with pytest.raises(AssertionError, match="rank 0: the C library has no sem_clockwait; rank 1: the C library"):
        on_one_host(2, lambda group: None)


def test_a_rank_alone_has_no_group() -> None:
    joined = join(0, lambda payload: [payload], timeout_s=1)
    assert (joined.hosts, joined.group, joined.obstacle) == (((0,),), None, "")


def use_two_groups(group: HostGroup) -> None:
    """All four, and the two halves by themselves, in turns and at once."""
    half = [rank for rank in range(4) if rank % 2 == group.index % 2]

    def gather(payload: bytes) -> list[bytes]:
        table = torch.zeros(4, 1024, dtype=torch.uint8)
        table[group.index, : len(payload)] = torch.tensor(list(payload), dtype=torch.uint8)
        group.all_reduce(table.view(-1), "max")
        return [bytes(table[rank].numpy()).rstrip(b"\0") for rank in half]

    pair = join(half.index(group.index), gather, timeout_s=30).group
    assert pair is not None
    memory, of_pair = group.allocate(9000, torch.int64), pair.allocate(9000, torch.int64)
    with ThreadPoolExecutor(1) as thread:
        for _ in range(20):
            memory.fill_(group.index)
            of_pair.fill_(group.index)
            ahead = thread.submit(pair.all_reduce, of_pair, "sum")
            group.all_reduce(memory, "sum")
            ahead.result()
            assert int(memory.min()) == int(memory.max()) == 6
            assert int(of_pair.min()) == int(of_pair.max()) == sum(half)
    pair.close()


def test_two_groups_in_one_process_do_not_mix() -> None:
    on_one_host(4, use_two_groups)


# --- the end ---------------------------------------------------------------------------------------------------------


def leave_early(group: HostGroup) -> str:
    group.barrier()
    if group.index == 1:
        return ""
    with pytest.raises(TransportError, match=r"rank 1 failed") as raised:
        group.barrier()
    with pytest.raises(TransportError, match="this host's group is out of use: transfer with rank 1 failed"):
        group.barrier()
    assert not raised.value.timed_out
    return "noticed"


def test_a_rank_that_has_closed_is_not_waited_for() -> None:
    assert on_one_host(3, leave_early) == ["noticed", "", "noticed"]


def break_off(group: HostGroup) -> str:
    if group.index == 1:
        with pytest.raises(AttributeError):
            group.all_reduce("no tensor", "sum")  # type: ignore[arg-type]
    with pytest.raises(TransportError) as raised:
        group.all_reduce(torch.ones(3), "sum")
    return str(raised.value)


def test_an_error_in_the_middle_of_a_collective_ends_it_for_all() -> None:
    said = on_one_host(2, break_off)
    assert said[0] == "transfer with rank 1 failed: it has given up a collective of this host"
    assert said[1].startswith("transfer with rank 1 failed: this host's group is out of use: 'str' object")


def test_calls_after_close_are_refused() -> None:
    kept = on_one_host(2, lambda group: group)
    with pytest.raises(TransportError, match="out of use: closed"):
        kept[0].barrier()
    kept[0].close()


# --- real processes --------------------------------------------------------------------------------------------------


def join_over_gloo(timeout_s: float = 30) -> HostGroup:
    """This process's group."""
    dist.init_process_group("gloo")

    def gather(payload: bytes) -> list[bytes]:
        payloads: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(payloads, payload)
        return payloads

    joined = join(dist.get_rank(), gather, timeout_s=timeout_s)
    assert joined.group is not None, joined.obstacle
    return joined.group


def reduce_in_processes() -> str:
    """At the sizes of the real thing; torch is the oracle."""
    group = join_over_gloo()
    call = Numbered(group)
    for numel in (3, 20_000, 600_001):
        memory = group.allocate(numel, torch.float32)
        mine = values(numel, torch.float32, group.index)
        by_torch = mine.double()
        dist.all_reduce(by_torch)
        results = []
        for tensor in (mine.clone(), memory):
            tensor.copy_(mine)
            call("all_reduce", tensor, "sum")
            torch.testing.assert_close(tensor.double(), by_torch, rtol=1e-5, atol=1e-5)
            results.append(tensor)
        assert torch.equal(*results)
        memory.copy_(mine)
        call("broadcast", memory, 1)
        assert torch.equal(memory, values(numel, torch.float32, 1))
        group.free(memory)
    group.close()
    del memory, tensor, results
    gc.collect()
    return "".join(mapped())


@pytest.mark.parametrize("size", [2, 4])
def test_processes_reduce_as_torch_does(size: int) -> None:
    assert run_ranks(reduce_in_processes, size) == [""] * size


def lose_a_member(how: str) -> tuple[int, bool, float]:
    group = join_over_gloo(60 if how == "killed" else 2)
    call = Numbered(group)
    memory = group.allocate(3_000_000, torch.float32)
    call("all_reduce", memory, "sum")
    if group.index == 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    start_s = time.monotonic()
    with pytest.raises(TransportError) as raised:
        while True:
            group.all_reduce(memory, "sum")
    return raised.value.peer, raised.value.timed_out, time.monotonic() - start_s


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.quick(1)
def test_every_survivor_names_the_lost_member(how: str) -> None:
    started = start_ranks(lose_a_member, 4, how)
    try:
        for peer, timed_out, took_s in unfailed(collect([started[rank] for rank in (0, 2, 3)], timeout_s=50)):
            assert peer == 1
            assert took_s < 30  # half the deadline of the call, where it was killed
            if how == "killed":
                assert not timed_out
    finally:
        started[1][0].kill()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_cannot_be_prepared_leaves_nothing(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(memory: SharedMemory, start: int, stop: int) -> None:
        raise OSError(errno.ENOMEM, "no more")

    monkeypatch.setattr(SharedMemory, "prefault", fail)
    gc.collect()  # what earlier tests have left
    before = len(list(Path("/proc/self/fd").iterdir())), named()
    with pytest.raises(OSError, match="no more"):
        connect._mapped(SharedMemory.create(kind, 1 << 16), size=2)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before[0]  # threads of earlier tests may close theirs now
    assert named() == before[1]


def named() -> set[str]:
    """This process's names in /dev/shm."""
    return {path.name for path in Path("/dev/shm").glob(f"ddp-{os.getpid()}-*")}
