"""The communicator: collectives for users, each with a number, a label and a deadline.

    comm.all_reduce(t)                    in place, sum; op="mean" | "product" | "min" | "max"; one tensor or a list
    comm.all_reduce(t, async_op=True)     returns a Work at once; any number may be in flight
    comm.all_reduce(t, algorithm="ring")  by that schedule; "auto" takes what is predicted to be fastest here
    comm.reduce_scatter(t)                rank r's share of the sum
    comm.all_gather(t), comm.gather(t)    everyone's tensor, by rank; first dimensions may differ
    comm.broadcast(t), comm.reduce(t)     in place, from or to a root
    comm.scatter(list), comm.all_to_all(list)
    comm.barrier(), comm.agree_any(flag)
    comm.allocate(numel, dtype)           memory that collectives reach without a copy
    comm.subgroup(ranks)                  a communicator of some of the ranks
    comm.explain(nbytes)                  what "auto" thinks of every way

Each verb shapes its tensors into flat ones and hands them to the `Carrier` (`carrier.py`), which knows schedules,
transport and shared memory. One larger class rather than functions over a smaller one: every verb needs the same four
things (numbering, order, deadline, blame), and they are the class. How bytes move is the other class.

All ranks must call the same collectives in the same order. So a communicator serves one thread at a time, since two
threads would take turns in another order on every rank. A second one that comes while a collective runs in the first is
refused (`subgroup` gives it a communicator of its own); calls with `async_op=True` are queued as they come.

A call is numbered when it is made; the number, its label and whom it waits for are what the watchdog publishes, and
what a `PeerLost` carries. After an error the communicator refuses further calls: the ranks no longer agree on what came
last. With `debug=True` the ranks compare what they call before every collective, so that a wrong operation, shape or
dtype is reported instead of undefined.
"""

from __future__ import annotations

import json
import math
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal, SupportsInt, TypeVar, overload

import torch
from torch import Tensor
from torch.autograd import profiler

from ddp.clock import Patience
from ddp.collectives.chunks import offsets
from ddp.collectives.placed import Hosts
from ddp.comm import call as calls
from ddp.comm.call import Call
from ddp.comm.carrier import IN_MEMORY, Carrier
from ddp.comm.flat import (
    bounds_of,
    by_rank,
    check_all_reduce,
    check_divisor,
    check_in_place,
    check_nbytes,
    check_op,
    check_pieces,
    check_rows,
    check_tensors,
    flatten,
    in_place,
    sum_overflows,
    together,
    with_rows,
    write_back,
)
from ddp.comm.host_reduce import NoSharedMemory, meet
from ddp.comm.select import Auto, Choice, Order, cheapest
from ddp.comm.watchdog import Watchdog
from ddp.comm.way import Way, possible_ways
from ddp.comm.work import Runner, Work
from ddp.errors import CollectiveMismatch, CommunicatorBroken, ConfigError, PeerLost
from ddp.log import log
from ddp.transport.edge import Transport, TransportError
from ddp.transport.shared_memory import SLICE_S

Op = Literal["sum", "mean", "product", "min", "max"]
Divisor = SupportsInt
Tensors = TypeVar("Tensors", Tensor, list[Tensor])
SEGMENT_BYTES = 4 << 20
LET_GO_S = 2.0  # what is still in flight when the program ends may take so long


@dataclass
class _Channels:
    """The highest channel of the transport that any group of this process has; its groups share one of these."""

    last: int = 0


class Communicator:
    """The ranks of one membership and what they can do together. Made by `ddp.init`, or by `subgroup`.

    Args:
        transport: the edges between the ranks.
        watchdog: says who is missing.
        algorithm: what `algorithm="auto"` in a call stands for; "auto" here: the way with the least predicted time.
        order: "canonical" lets "auto" take only ways whose additions follow the canonical binary tree over the ranks.
        segment_bytes: size of a pipelining piece of a chunk.
        abort_s: longest wait for a neighbour, in seconds.
        debug: compare what the ranks call before every collective.

    Attributes:
        rank, world_size: this process's number, and how many there are.
        local_rank: this process's number on its host.
        device: where this rank's tensors live.
        generation: version of the membership.
        auto: which way "auto" takes, and what it has chosen so far.
        world_ranks: what its ranks are called in the communicator that `ddp.init` made.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        watchdog: Watchdog | None = None,
        device: torch.device | str = "cpu",
        local_rank: int = 0,
        generation: int = 0,
        algorithm: str = "ring",
        order: Order = "any",
        segment_bytes: int = SEGMENT_BYTES,
        abort_s: float = 60.0,
        debug: bool = False,
        hosts: Hosts | None = None,
    ) -> None:
        self.rank, self.world_size, self.local_rank = transport.rank, transport.world_size, local_rank
        self.device, self.generation = torch.device(device), generation
        self.abort_s, self.debug = abort_s, debug
        self._transport, self._watchdog, self._segment_bytes = transport, watchdog, segment_bytes
        self._carrier = Carrier(
            transport, device=self.device, segment_bytes=segment_bytes, timeout_s=abort_s, hosts=hosts
        )
        if watchdog is not None:
            self._carrier.waiting_for = watchdog.waits_for
            watchdog.interrupt = self._interrupt
        self.auto = self._new_auto(algorithm, order)
        self._running = Call(0, "start-up")
        self._runner = Runner(f"ddp-collectives-{self.rank}", self.device)
        self._sequence = 0
        self._neighbour = (self.rank + 1) % self.world_size
        self._channels = _Channels()
        self._groups: list[Communicator] = []
        self._shares_memory = False
        self._unshared: set[int] = set()  # addresses of what `allocate` gave, where no memory is shared
        self._freed: deque[Tensor] = deque()
        self._turn = threading.Lock()  # held while a collective runs, or memory is given back
        self._gives_back = False
        self._enough = 1 << (self.world_size - 1).bit_length()  # sums that may overflow are first divided by this
        self._in_vain = ""  # why no wait can succeed any more, if the watchdog knows
        self._closed = False
        self._broken: BaseException | None = None
        self.world_ranks: Sequence[int] = range(self.world_size)

    # --- collectives -------------------------------------------------------------------------------------------------

    @overload
    def all_reduce(
        self,
        tensor: Tensors,
        op: Op = ...,
        *,
        algorithm: str = ...,
        divide_by: Divisor = ...,
        wire_dtype: torch.dtype | None = ...,
        async_op: Literal[False] = ...,
        label: str = ...,
    ) -> Tensors: ...
    @overload
    def all_reduce(
        self,
        tensor: Tensor | list[Tensor],
        op: Op = ...,
        *,
        algorithm: str = ...,
        divide_by: Divisor = ...,
        wire_dtype: torch.dtype | None = ...,
        async_op: Literal[True],
        label: str = ...,
    ) -> Work: ...
    def all_reduce(
        self,
        tensor: Tensor | list[Tensor],
        op: Op = "sum",
        *,
        algorithm: str = "auto",
        divide_by: Divisor = 1,
        wire_dtype: torch.dtype | None = None,
        async_op: bool = False,
        label: str = "",
    ) -> Any:
        """Combines `tensor` over all ranks, in place; bitwise the same everywhere afterwards.

        Args:
            tensor: any shape, the same on every rank; or a list, which travels together (one message per dtype).
            op: "sum", "mean" (floating point only), "product", "min" or "max". Of bools, sum means any, product all.
            algorithm: a way from `ways()`, or "auto".
            divide_by: a number that the result is divided by on its way, for nearly nothing; or a value that `int()`
                reads when this collective's turn has come, and all before it are done. The same on every rank.
            wire_dtype: torch.bfloat16 or torch.float16: what travels between hosts is cast to it, sums are kept in the
                tensor's own type. What goes through a host's memory is not cast.
            async_op: return a `Work` at once; leave `tensor` alone until its `wait` has returned.
            label: what this is, for messages.

        Raises:
            ConfigError: an operation or way that is not there, or does not go with the tensor.
            PeerLost: a rank did not take part within the deadline.
            CollectiveMismatch: a rank called another collective.
            CommunicatorBroken: an earlier collective failed.
        """
        for one in (tensor,) if isinstance(tensor, Tensor) else check_tensors(tensor):
            check_all_reduce(one, op, wire_dtype)
            check_divisor(divide_by, op, one.dtype)
        self.auto.check(algorithm)
        call = self._call("all_reduce", op, tensor, label, how=(algorithm, wire_dtype))
        if op == "mean":
            divide_by = self.world_size

        def reduce(flat: Tensor) -> None:
            divisor = int(divide_by)
            narrow = divisor != 1 and sum_overflows(flat.dtype, wire_dtype)
            if narrow:
                flat.mul_(1 / self._enough)
            self._carrier.all_reduce(
                flat,
                "sum" if op == "mean" else op,
                self.auto.way(flat, algorithm).name,
                sequence=call.sequence,
                divide_by=1 if narrow else divisor,
                wire_dtype=wire_dtype,
            )
            if narrow:
                flat.mul_(self._enough / divisor)

        if isinstance(tensor, Tensor):
            return self._start(call, partial(in_place, reduce, tensor), async_op)
        return self._start(call, partial(together, reduce, tensor), async_op)

    @overload
    def reduce_scatter(self, tensor: Tensor, op: Op = ..., *, async_op: Literal[False] = ...) -> Tensor: ...
    @overload
    def reduce_scatter(self, tensor: Tensor, op: Op = ..., *, async_op: Literal[True]) -> Work: ...
    def reduce_scatter(self, tensor: Tensor, op: Op = "sum", *, async_op: bool = False) -> Any:
        """This rank's chunk of the combined tensor; `tensor` itself is left as it was.

        Returns:
            [numel of chunk], flat: elements r·N//p to (r+1)·N//p of the flattened tensor, for rank r of p.
        """
        check_op(op, tensor.dtype)
        call = self._call("reduce_scatter", op, tensor)

        def run() -> Tensor:
            flat = flatten(tensor).clone()
            bounds = offsets(flat.numel(), self.world_size)
            mine = flat[bounds[self.rank] : bounds[self.rank + 1]]
            with self._divided(op, of=flat, sums=mine):
                self._carrier.reduce_scatter(flat, bounds, "sum" if op == "mean" else op, sequence=call.sequence)
            return mine.clone().view(tensor.dtype)

        return self._start(call, run, async_op)

    @overload
    def all_gather(self, tensor: Tensor, *, async_op: Literal[False] = ...) -> list[Tensor]: ...
    @overload
    def all_gather(self, tensor: Tensor, *, async_op: Literal[True]) -> Work: ...
    def all_gather(self, tensor: Tensor, *, async_op: bool = False) -> Any:
        """Every rank's tensor, by rank. All dimensions but the first must agree.

        Args:
            tensor: [n_r, ...]; n_r may differ by rank and may be 0. A scalar counts as [1].
        """
        mine = with_rows(tensor)
        call = self._call("all_gather", how=_alike(mine))  # first dimensions may differ by rank

        def run() -> list[Tensor]:
            flat, rows = self._laid_out(mine, call)
            self._carrier.all_gather(flat, bounds_of(rows, mine), sequence=call.sequence)
            return by_rank(flat, rows, mine)

        return self._start(call, run, async_op)

    @overload
    def broadcast(
        self, tensor: Tensor, root: int = ..., *, async_op: Literal[False] = ..., label: str = ...
    ) -> Tensor: ...
    @overload
    def broadcast(self, tensor: Tensor, root: int = ..., *, async_op: Literal[True], label: str = ...) -> Work: ...
    def broadcast(self, tensor: Tensor, root: int = 0, *, async_op: bool = False, label: str = "") -> Any:
        """Gives every rank the root's values, in place."""
        self._check_root(root)
        check_in_place(tensor)
        call = self._call("broadcast", f"from {root}", tensor, label)
        run = partial(self._carrier.broadcast, root=root, sequence=call.sequence)
        return self._start(call, partial(in_place, run, tensor), async_op)

    @overload
    def reduce(self, tensor: Tensor, root: int = ..., op: Op = ..., *, async_op: Literal[False] = ...) -> Tensor: ...
    @overload
    def reduce(self, tensor: Tensor, root: int = ..., op: Op = ..., *, async_op: Literal[True]) -> Work: ...
    def reduce(self, tensor: Tensor, root: int = 0, op: Op = "sum", *, async_op: bool = False) -> Any:
        """Combines `tensor` over all ranks into the root's, in place; the others' are left as they were."""
        self._check_root(root)
        check_op(op, tensor.dtype)
        check_in_place(tensor)
        call = self._call("reduce", f"{op} to {root}", tensor)

        def run() -> Tensor:
            flat = flatten(tensor).clone()  # inner ranks of the tree add up in it
            with self._divided(op, of=flat, sums=flat):
                self._carrier.reduce(flat, root, "sum" if op == "mean" else op)
            return write_back(flat, tensor) if self.rank == root else tensor

        return self._start(call, run, async_op)

    @overload
    def gather(self, tensor: Tensor, root: int = ..., *, async_op: Literal[False] = ...) -> list[Tensor]: ...
    @overload
    def gather(self, tensor: Tensor, root: int = ..., *, async_op: Literal[True]) -> Work: ...
    def gather(self, tensor: Tensor, root: int = 0, *, async_op: bool = False) -> Any:
        """Every rank's tensor, by rank, on the root; an empty list elsewhere. First dimensions may differ by rank."""
        self._check_root(root)
        mine = with_rows(tensor)
        call = self._call("gather", f"to {root}", how=_alike(mine))

        def run() -> list[Tensor]:
            flat, rows = self._laid_out(mine, call)
            self._carrier.gather(flat, bounds_of(rows, mine), root)
            return by_rank(flat, rows, mine) if self.rank == root else []

        return self._start(call, run, async_op)

    @overload
    def scatter(
        self, tensors: Sequence[Tensor] | None = ..., root: int = ..., *, async_op: Literal[False] = ...
    ) -> Tensor: ...
    @overload
    def scatter(self, tensors: Sequence[Tensor] | None = ..., root: int = ..., *, async_op: Literal[True]) -> Work: ...
    def scatter(self, tensors: Sequence[Tensor] | None = None, root: int = 0, *, async_op: bool = False) -> Any:
        """Rank r's tensor out of the root's list; shapes may differ. The other ranks pass nothing.

        Raises:
            ConfigError: the root has not one tensor per rank, or they differ in dtype.
        """
        self._check_root(root)
        if self.rank == root:
            check_pieces(tensors, self.world_size)
        call = self._call("scatter", f"from {root}")

        def run() -> Tensor:
            pieces = [] if tensors is None or self.rank != root else list(tensors)
            shapes, dtype = self._told_by(root, [list(piece.shape) for piece in pieces], pieces[:1])
            bounds = [0, *accumulate(math.prod(shape) for shape in shapes)]
            flat = torch.empty(bounds[-1], dtype=dtype, device=self.device)
            if pieces:
                torch.cat([with_rows(piece).reshape(-1) for piece in pieces], out=flat)
            self._carrier.scatter(flat, bounds, root)
            return flat[bounds[self.rank] : bounds[self.rank + 1]].clone().view(shapes[self.rank])

        return self._start(call, run, async_op)

    @overload
    def all_to_all(self, tensors: Sequence[Tensor], *, async_op: Literal[False] = ...) -> list[Tensor]: ...
    @overload
    def all_to_all(self, tensors: Sequence[Tensor], *, async_op: Literal[True]) -> Work: ...
    def all_to_all(self, tensors: Sequence[Tensor], *, async_op: bool = False) -> Any:
        """Sends tensors[r] to rank r; returns what rank 0, 1, … sent here.

        Args:
            tensors: one per rank, [n, ...]; n may differ and may be 0, all else must agree between all ranks.
        """
        check_pieces(tensors, self.world_size)
        pieces = [with_rows(piece) for piece in tensors]
        check_rows(pieces)
        call = self._call("all_to_all", how=_alike(pieces[0]))

        def run() -> list[Tensor]:
            ranks = self.world_size
            counts = torch.zeros(ranks, ranks, dtype=torch.int64, device=self.device)  # [from, to]
            counts[self.rank] = torch.tensor([len(piece) for piece in pieces], device=self.device)
            self._carrier.all_gather(counts.view(-1), range(0, ranks**2 + 1, ranks), sequence=call.sequence)
            rows = counts[:, self.rank].tolist()
            going, coming = bounds_of(counts[self.rank].tolist(), pieces[0]), bounds_of(rows, pieces[0])
            outgoing = torch.cat([piece.reshape(-1) for piece in pieces])
            incoming = outgoing.new_empty(coming[-1])
            longest = int(counts.max()) * pieces[0].shape[1:].numel()
            self._carrier.all_to_all(outgoing, going, incoming, coming, longest=longest)
            return by_rank(incoming, rows, pieces[0])

        return self._start(call, run, async_op)

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        call = self._call("barrier")
        self._start(call, partial(self._carrier.barrier, sequence=call.sequence), False)

    def agree_any(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on any."""
        votes = torch.tensor([flag], dtype=torch.uint8, device=self.device)
        way = (
            IN_MEMORY if IN_MEMORY in self._carrier.all_reduces and self.device.type == "cpu" else "recursive_doubling"
        )
        return bool(self.all_reduce(votes, "max", algorithm=way, label="agree_any").item())

    def wait_for_rank_zero(self, label: str) -> None:
        """Returns once rank 0 has called it too, however long that takes while rank 0 lives.

        Raises:
            PeerLost: rank 0 failed, left, or shows no sign of life.
        """
        call = self._call("wait_for_rank_zero", label=label)
        if self._watchdog is not None:
            try:
                if self.rank == 0:
                    self._watchdog.say(f"passed/{call.sequence}", "")
                else:
                    self._watchdog.wait_for_word(f"passed/{call.sequence}", 0, call)
            except PeerLost as lost:
                self._broken = lost
                raise

    def wait_for(self, wait: Callable[[float], bool], *, label: str) -> None:
        """Waits for what the ranks do together by other means (a future of torch.distributed, say), with this
        communicator's number, warning, deadline and blame. Every rank calls it.

        Args:
            wait: waits for so many seconds at most; True if what it waits for is there. Called until it is.

        Raises:
            PeerLost: it was not there within the deadline.
        """

        def until_there() -> None:
            patience = Patience(self.abort_s)
            while not wait(min(patience.left_s(), SLICE_S)):
                if self._in_vain or not patience.left_s():
                    why = self._in_vain or f"nothing came for {self.abort_s:g} s"
                    raise TransportError(self._neighbour, why, timed_out=True)

        self._start(self._call("wait", label=label), until_there, False)

    def find_lost(self, label: str) -> PeerLost | None:
        """After an error outside of this communicator: the rank that is surely lost, if it was one. Not collective."""
        if self._watchdog is None:
            return None
        lost = self._watchdog.find_lost(Call(self._sequence, "wait", name=label), self._neighbour)
        self._broken = self._broken or lost
        return lost

    # --- which way an all-reduce goes --------------------------------------------------------------------------------

    @property
    def hosts(self) -> Hosts:
        """The ranks of every host."""
        return self._carrier.hosts

    def ways(self) -> list[str]:
        """Every way that an all-reduce can go here: what `algorithm=` accepts besides "auto"."""
        return list(self._carrier.all_reduces)

    def explain(self, nbytes: int) -> str:
        """Every way of an all-reduce of so many bytes, by predicted time. Collective: the first call measures."""
        check_nbytes(nbytes)
        return str(self._ask("explain", partial(self.auto.explain, nbytes)))

    @property
    def overlaps(self) -> bool:
        """Whether an all-reduce in the background leaves the caller its processor: there is a wire to wait for, or a
        processor to spare. Else it takes less time in the foreground, where nothing changes threads."""
        group = self._carrier.group
        in_memory = self.auto.algorithm in ("auto", IN_MEMORY) and IN_MEMORY in self._carrier.all_reduces
        if group is None or not in_memory or self.device.type != "cpu":
            return self.world_size > 1
        return group.num_processors >= group.size * (torch.get_num_threads() + 1)

    def predict(self, nbytes: int, algorithm: str = "auto", *, allocated: bool = False) -> float:
        """Predicted seconds of an all-reduce. Collective: the first call measures."""
        check_nbytes(nbytes)
        self.auto.check(algorithm)
        ranking: list[Choice] = self._ask("predict", partial(self.auto.ranking, nbytes, allocated=allocated))
        return cheapest(ranking, algorithm).predicted_s

    def choose(self, nbytes: int) -> str:
        """The way that "auto" takes for an all-reduce of so many bytes. Collective: the first call may measure."""
        check_nbytes(nbytes)
        way: str = self._ask("choose", partial(self.auto.choose, nbytes))
        return way

    def _ask(self, operation: str, question: Callable[[], Any]) -> Any:
        return self._start(self._call(operation), question, False)

    # --- memory, neighbours, groups ----------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] zeros, in the memory that this communicator's collectives reach without a copy. Collective.

        It belongs to the communicator, and goes when every rank has called `free`, or with the communicator.
        """
        if numel < 0:
            raise ConfigError(f"numel={numel}: must be at least 0")
        call = self._call("allocate", f"{numel} {dtype}")
        tensor: Tensor = self._start(call, partial(self._allocate, numel, dtype), False)
        return tensor

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        group = self._carrier.group
        if group is not None and self.device.type == "cpu":
            try:
                return group.allocate(numel, dtype, timeout_s=self.abort_s)
            except NoSharedMemory as error:  # on all ranks of the host alike
                log.warning("a buffer of %d %s is not shared with the neighbours: %s", numel, dtype, error)
        tensor = torch.zeros(numel, dtype=dtype, device=self.device)
        self._unshared.add(tensor.data_ptr())
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Gives memory from `allocate` back. Every rank calls it; no collective may still use the tensor.

        From any thread, and at any time: a finalizer may call it in the midst of another collective. Then the memory
        goes before the next one.
        """
        if tensor.data_ptr() in self._unshared:
            self._unshared.discard(tensor.data_ptr())
        elif self._carrier.group is not None and self.device.type == "cpu":
            self._freed.append(tensor)
            self._gives_back = True
            if self._turn.acquire(blocking=False):
                try:
                    self._give_back()
                finally:
                    self._turn.release()
            self._gives_back = False

    def _give_back(self) -> None:
        while self._freed:
            tensor = self._freed.popleft()
            if self._carrier.group is not None:
                self._carrier.group.free(tensor)

    def meet_neighbours(self, *, shared_memory: bool = True, crowded: bool = False) -> None:
        """Finds out which ranks share a host and, if asked to, meets them in its memory. Collective.

        Args:
            crowded: with ranks of other groups, there are more of them on the host than processors.
        """
        call = self._call("meet_neighbours")
        self._start(call, partial(self._meet, shared_memory, crowded), False)

    def _meet(self, shared_memory: bool, crowded: bool) -> None:
        carrier = self._carrier
        hosts, group, reason = meet(self.rank, carrier.gather_bytes, timeout_s=self.abort_s, crowded=crowded)
        pids = group.pids if group is not None else {}
        carrier.know_hosts(hosts)
        obstacles = [answer.decode() for answer in carrier.gather_bytes(reason.encode()) if answer]
        self._shares_memory = shared_memory
        if shared_memory and not obstacles and len(hosts) < self.world_size:
            carrier.share_memory(group, channel=self._new_channel())
        elif group is not None:
            group.close()
        if shared_memory and obstacles and self.rank == 0:
            log.warning("collectives inside a host go over the network's transport: %s", obstacles[0])
        self.auto = self._new_auto(self.auto.algorithm, self.auto.order)
        self.auto.check(self.auto.algorithm)
        names = [name.decode() for name in carrier.gather_bytes(socket.gethostname().encode())]
        if self._watchdog is not None:
            self._watchdog.know_hosts(names, pids)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of some of the ranks, numbered in the order given; None on the others. Collective over all.

        Its collectives are numbered and watched by themselves and may run beside this one's.
        """
        if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(self.world_size)) or not ranks:
            raise ConfigError(f"ranks={list(ranks)}: a subgroup needs distinct ranks from 0 to {self.world_size - 1}")
        call = self._call("subgroup", f"of {list(ranks)}")
        group: Communicator | None = self._start(call, partial(self._subgroup, list(ranks)), False)
        return group

    def _subgroup(self, ranks: list[int]) -> Communicator | None:
        channel = self._new_channel()
        transport = self._transport.among(ranks, channel)
        if transport is None:
            return None
        watchdog = self._watchdog and self._watchdog.among(ranks, channel)
        group = Communicator(
            transport,
            watchdog=watchdog,
            device=self.device,
            local_rank=self.local_rank,
            generation=self.generation,
            algorithm=self.auto.algorithm,
            order=self.auto.order,
            segment_bytes=self._segment_bytes,
            abort_s=self.abort_s,
            debug=self.debug,
        )
        group._channels = self._channels
        group.world_ranks = [self.world_ranks[rank] for rank in ranks]
        neighbours = self._carrier.group
        crowded = neighbours is not None and neighbours.is_crowded
        group.meet_neighbours(shared_memory=self._shares_memory, crowded=crowded)
        self._groups = [other for other in self._groups if not other._closed] + [group]
        return group

    def _new_channel(self) -> int:
        """A channel of the transport that no group with any of these ranks has."""
        counts = self._carrier.gather_bytes(str(self._channels.last).encode())
        self._channels.last = max(int(count) for count in counts) + 1
        return self._channels.last

    # --- the end -----------------------------------------------------------------------------------------------------

    @property
    def is_broken(self) -> bool:
        """True after an error: further calls are refused."""
        return self._broken is not None

    def abandon(self, reason: str) -> None:
        """Tells the other ranks that this one stops because of an error of its own, and waits for nothing.

        A collective may still be in flight, waiting for ranks that will never come; its thread ends with the process.
        """
        for group in self._groups:
            group.abandon(reason)
        if self._watchdog is not None:
            self._watchdog.fail(reason)
            self._watchdog.stop()

    def let_go(self, failed: str = "") -> None:
        """Ends the threads' waits when the program ends, whatever they wait for.

        The interpreter ends a thread that is inside one of torch's waits in a way that ends the process by SIGABRT.

        Args:
            failed: the error that ends the program.
        """
        for group in self._groups:
            group.let_go(failed)
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            if failed:
                watchdog.fail(failed)
            watchdog.leave()
        if not self._runner.is_idle_within(0.0 if failed else LET_GO_S):
            self._carrier.interrupt(self.rank, "the program has ended")
            self._runner.is_idle_within(LET_GO_S)

    def close(self) -> None:
        """Ends the background threads and says goodbye. The communicator cannot be used afterwards."""
        if self._closed:
            return
        self._closed = True
        for group in self._groups:
            group.close()
        self._groups.clear()
        self._runner.close()
        self._carrier.close()
        if self._watchdog is not None:
            self._watchdog.leave()
        self._transport.close()
        self._broken = self._broken or CommunicatorBroken("it was closed")

    # --- how a collective runs ---------------------------------------------------------------------------------------

    def _call(
        self,
        operation: str,
        op: str = "",
        tensors: Tensor | Sequence[Tensor] | None = None,
        label: str = "",
        how: tuple[object, ...] = (),
    ) -> Call:
        """Refuses calls after an error; else this call's number, and what it says of itself: the same on every rank."""
        self._refuse_if_broken()
        self._sequence += 1
        if tensors is None:
            return Call(self._sequence, operation, op, name=label, how=how)
        if isinstance(tensors, Tensor):
            return Call(self._sequence, operation, op, tensors.shape, tensors.dtype, label, how)
        if self.debug:
            how = (*how, *((list(tensor.shape), tensor.dtype) for tensor in tensors))
        total = sum(tensor.numel() for tensor in tensors)
        return Call(self._sequence, f"{operation} of {len(tensors)} tensors", op, (total,), name=label, how=how)

    def _new_auto(self, algorithm: str, order: Order) -> Auto:
        carrier = self._carrier

        def run(flat: Tensor, way: Way) -> None:
            carrier.all_reduce(flat, "sum", way.name, sequence=self._running.sequence)

        return Auto(
            self._transport,
            carrier.hosts,
            possible_ways(carrier.hosts, shared_memory=carrier.shares_memory),
            carrier.group,
            run,
            carrier.gather_bytes,
            device=self.device,
            algorithm=algorithm,
            order=order,
            segment_bytes=self._segment_bytes,
            timeout_s=self.abort_s,
        )

    def _refuse_if_broken(self) -> None:
        if self._broken is not None:
            raise CommunicatorBroken(f"the communicator is out of use since: {self._broken}") from self._broken

    def _start(self, call: Call, collective: Callable[[], Any], async_op: bool) -> Any:
        """Now, or on the background thread: behind what is in flight."""
        if not async_op and self._runner.is_idle():
            return self._perform(call, collective)
        work = self._runner.submit(partial(self._perform, call, collective))
        return work if async_op else work.wait()

    def _perform(self, call: Call, collective: Callable[[], Any]) -> Any:
        """Runs one collective, alone; a failure becomes a PeerLost with the culprit's name."""
        self._refuse_if_broken()  # what was in flight may have failed since the call was made
        turn = self._turn
        if not turn.acquire(False):
            came = self._gives_back and turn.acquire(timeout=1)  # a finalizer gives memory back, or has just done so
            if not came and not turn.acquire(False):
                self._refuse_second_thread(call)
        self._running = call
        watchdog = self._watchdog
        outer = watchdog.begin(call, self._neighbour) if watchdog is not None else None
        try:
            if self._freed:
                self._give_back()
            if self.debug:
                self._compare(call)
            if profiler._is_profiler_enabled:  # on any thread
                with profiler.record_function(call.range):
                    return collective()
            return collective()
        except TransportError as error:
            self._broken = lost = self._lost(call, error)
            raise lost from error
        except (ConfigError, NoSharedMemory):
            raise  # said by every rank alike, before anything was sent
        except BaseException as error:  # also Ctrl-C: the others go on to calls that this rank has not finished
            self._broken = error
            if watchdog is not None and not isinstance(error, CollectiveMismatch):
                watchdog.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            if watchdog is not None:
                watchdog.end(outer)
            turn.release()

    def _refuse_second_thread(self, call: Call) -> None:
        """Two threads of one rank take turns in an order of their own, and not in the other ranks'."""
        error = RuntimeError(
            f"collective #{call.sequence} [{call.label}] began in thread {threading.current_thread().name!r} while "
            f"#{self._running.sequence} [{self._running.label}] was running in another one; a communicator serves one "
            "thread at a time: give each a communicator of its own, comm.subgroup(range(comm.world_size))"
        )
        self._broken = self._broken or error
        if self._watchdog is not None:
            self._watchdog.fail(f"RuntimeError: {error}")
        raise error

    def _interrupt(self, culprit: int, reason: str) -> None:
        """The watchdog has found out that the wait in progress cannot succeed."""
        self._in_vain = f"rank {culprit}: {reason}"
        self._carrier.interrupt(culprit, self._in_vain)

    def _lost(self, call: Call, error: TransportError) -> PeerLost:
        """Who is to blame, by what the ranks say of themselves; without a watchdog, by what the transport saw."""
        if self._watchdog is not None:
            lost = self._watchdog.find_culprit(error.peer, str(error))
        else:
            lost = PeerLost(error.peer, "unknown", self.generation, call.sequence, call.label, str(error))
        if self.world_ranks[lost.rank] != lost.rank:
            lost.reason += f" (of this group; it is rank {self.world_ranks[lost.rank]} of all)"
        return lost

    def _compare(self, call: Call) -> None:
        difference = calls.disagreement(self._carrier.gather_bytes(call.describe().encode()))
        if difference:
            raise CollectiveMismatch(difference)

    def _told_by(
        self, root: int, shapes: list[list[int]], example: list[Tensor]
    ) -> tuple[list[list[int]], torch.dtype]:
        """The root's shapes, by rank, and its dtype."""
        words = json.dumps([shapes, str(example[0].dtype).removeprefix("torch.")]) if example else ""
        shapes, dtype = json.loads(self._carrier.gather_bytes(words.encode())[root])
        return shapes, getattr(torch, dtype)

    def _laid_out(self, mine: Tensor, call: Call) -> tuple[Tensor, list[int]]:
        """A flat buffer with room for every rank's tensor and this one's in its place, and how many rows each has."""
        counts = torch.zeros(self.world_size, dtype=torch.int64, device=mine.device)
        counts[self.rank] = len(mine)
        self._carrier.all_gather(counts, range(self.world_size + 1), sequence=call.sequence)
        rows = counts.tolist()
        bounds = bounds_of(rows, mine)
        flat = mine.new_empty(bounds[-1])
        flat[bounds[self.rank] : bounds[self.rank + 1]] = mine.reshape(-1)
        return flat, rows

    @contextmanager
    def _divided(self, op: str, *, of: Tensor, sums: Tensor) -> Iterator[None]:
        """Makes a mean of what is added up inside."""
        narrow = op == "mean" and sum_overflows(of.dtype)
        if narrow:
            of.mul_(1 / self._enough)
        yield
        if narrow:
            sums.mul_(self._enough / self.world_size)
        elif op == "mean":
            sums.div_(self.world_size)

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.world_size:
            raise ConfigError(f"root={root} is no rank of a world of {self.world_size}")


def _alike(tensor: Tensor) -> tuple[object, ...]:
    """What must agree between ranks whose first dimensions may differ."""
    return "rows", list(tensor.shape[1:]), tensor.dtype
