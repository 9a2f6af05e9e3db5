"""The communicator runs a user's collectives, each with a number, a label and a deadline.

    comm.all_reduce(t)                    in place, sum; op="mean" | "product" | "min" | "max"; one tensor or a list
    comm.all_reduce(t, async_op=True)     returns a Work at once; any number may be in flight
    comm.all_reduce(t, algorithm="ring")  by that schedule; "auto" takes what is predicted to be fastest here
    comm.reduce_scatter(t)                rank r's share of the sum
    comm.reduce_scatter_(t, bounds)       the same in place, in slices of any length; comm.all_gather_(t, bounds)
    comm.all_gather(t), comm.gather(t)    everyone's tensor, by rank; first dimensions may differ
    comm.broadcast(t), comm.reduce(t)     in place, from or to a root
    comm.scatter(list), comm.all_to_all(list)
    comm.barrier(), comm.agree_any(flag)
    comm.chain(function)                  a function that calls several of these, as one
    comm.send(t, dst), comm.recv(t, src)  a message between two ranks, of which the others know nothing
    comm.allocate(numel, dtype)           memory that collectives reach without a copy
    comm.subgroup(ranks)                  a communicator of some of the ranks
    comm.explain(nbytes)                  the predicted time of every way, and the one that "auto" takes

Each verb checks its tensors, and gives the call a number and a turn (`CallQueue`); then `FlatCollectives` runs it. Only
an all-reduce has several algorithms to choose from: `Plan` chooses for "auto".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal, SupportsInt

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddp.collectives.catalog import SCHEDULES
from ddp.collectives.chunks import offsets
from ddp.collectives.placed import Hosts, rooted
from ddp.comm import checks
from ddp.comm.call_queue import CallQueue
from ddp.comm.connect import Channels, connect
from ddp.comm.flat import bounds_of, by_rank, flatten, in_place, sum_overflows, together, with_rows, write_back
from ddp.comm.flat_collectives import FlatCollectives, HostPartition
from ddp.comm.host_links import HostLinks, by_size
from ddp.comm.host_memory import NoSharedMemory
from ddp.comm.messages import Messages
from ddp.comm.plan import Plan
from ddp.comm.reduction import Reduction
from ddp.comm.routes import IN_MEMORY, possible_routes
from ddp.comm.settings import Settings
from ddp.comm.transport.edge import Transport
from ddp.comm.watch.call import Call, recorded
from ddp.comm.watch.watchdog import Watchdog
from ddp.comm.wire_format import widened, wire_format
from ddp.errors import ConfigError, PeerLost
from ddp.process.log import log
from ddp.setting import Narrow, WireName

Op = Literal["sum", "mean", "product", "min", "max"]
Predicted = Literal["all_reduce", "all_gather", "sum_in_host"]
DEFAULTS = Settings()


class Communicator:
    """The ranks of one membership and what they can do together. Made by `ddp.init`, or by `subgroup`. Collective.

    Args:
        transport: the edges between the ranks.
        watchdog: says who is missing; without one, the transport's word is taken.
        hosts: the ranks of every host, if known; then the ranks do not look for shared memory.
        world_ranks: what its ranks are called in the communicator that `ddp.init` made.
        channels: numbers the channels of the transport.

    Attributes:
        rank, world_size: this process's number, and how many there are.
        settings, and of them device, generation, abort_s: see `Settings`.
        warn_s: seconds in one wait after which a warning says who is missing.
        auto: which way "auto" takes, and what it has chosen so far.
        slices: by rank, the number of its slice in `reduce_scatter_` and `all_gather_`; its rank, but on several hosts.

    Raises:
        ConfigError: the algorithm asked for is not possible here.
        PeerLost: a rank did not take part.
    """

    def __init__(
        self,
        transport: Transport,
        settings: Settings = DEFAULTS,
        *,
        watchdog: Watchdog | None = None,
        hosts: Hosts | None = None,
        world_ranks: Sequence[int] = (),
        channels: Channels | None = None,
    ) -> None:
        self.rank, self.world_size = transport.rank, transport.world_size
        self.device, self.generation, self.abort_s = settings.device, settings.generation, settings.abort_s
        self._channels, self._world_ranks = channels or Channels(), world_ranks or range(self.world_size)
        self._watchdog = watchdog or Watchdog(
            HashStore(), self.rank, 1, generation=self.generation, warn_s=math.inf, abort_s=self.abort_s
        )
        links = HostLinks(transport, self._watchdog, settings)
        gather = links.gather_bytes if settings.debug else None
        self.warn_s = self._watchdog.warn_s
        self._queue = CallQueue(self._watchdog, self.rank, self._world_ranks, device=self.device, gather=gather)
        if hosts is not None:
            self._collectives = FlatCollectives(links, hosts, possible_routes(hosts, shared_memory=False))
        else:
            starting = partial(connect, links, self._watchdog, settings, self._channels)
            self._collectives = self._queue.run(Call(0, "start-up"), starting)
            if self._collectives.cross_host is not None:
                self._queue.end_too(self._collectives.cross_host.runner)
        if world_ranks and not self._collectives.offers(settings.algorithm):
            settings = replace(settings, algorithm="auto")  # a group of one rank shares no memory, for example
        try:
            self.plan = Plan(self._collectives, settings)
        except ConfigError:
            self._collectives.close()
            raise
        self.settings, self.slices = settings, self._collectives.slices
        self._messages = Messages(transport, self._queue, timeout_s=self.abort_s)
        self._watchdog.set_messages(self._messages.posted, self._messages.in_flight)
        self._groups: list[Communicator] = []
        self._is_closed = False
        self._unshared: set[int] = set()  # addresses of what `allocate` gave, where no memory is shared
        self._enough = 1 << (self.world_size - 1).bit_length()  # sums that may overflow are first divided by this

    # --- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: Tensor | list[Tensor],
        op: Op = "sum",
        *,
        algorithm: str = "auto",
        divide_by: SupportsInt = 1,
        wire: WireName | None = None,
        async_op: bool = False,
        label: str = "",
    ) -> Any:
        """Combines `tensor` over all ranks, in place; bitwise the same everywhere afterwards.

        Args:
            tensor: any shape, the same on every rank; or a list, which travels together (one message per dtype).
            op: "sum", "mean" (floating point only), "product", "min" or "max". Of bools, sum means any, product all.
            algorithm: a way from `algorithms()`, or "auto".
            divide_by: divisor of the result, applied as a part of the collective at almost no cost. It is an int, or an
                object whose `int()` is taken once all earlier collectives are complete. The same on every rank.
            wire: "bf16", "fp16", "int8" or "int8_stochastic": how numbers travel between hosts (`wire_format.py`); sums
                are kept in the tensor's own type. What goes through a host's memory is not encoded. "fp32": a tensor of
                a narrower type travels and is added up as float32.
            async_op: return a `Work` at once; leave `tensor` alone until its `wait` has returned.
            label: name of this call in messages and profiles.

        Raises:
            ConfigError: an operation or way that does not exist here, or does not fit the tensor.
            PeerLost: a rank did not take part within the deadline.
            CollectiveMismatch: a rank called another collective.
            CommunicatorBroken: an earlier collective failed.
        """
        for one in checks.tensors(tensor):
            checks.on(self.device, one)
            checks.operation(op, one.dtype)
            checks.wire(wire, op, one.dtype)
            checks.holds_result(one)
            checks.divisor(divide_by, op, one.dtype)
        self.plan.check(algorithm)
        call = self._queue.number("all_reduce", op, tensor, label, how=(algorithm, wire))
        if op == "mean":
            divide_by = self.world_size

        def reduce(flat: Tensor) -> None:
            wide, narrow_wire = widened(flat, wire)
            route = self.plan.route(wide, algorithm, narrow_wire)
            run = partial(self._collectives.all_reduce, wide, route, sequence=call.sequence)
            if profiler._is_profiler_enabled:
                run = partial(recorded, f"ddp: {route.name}", run)  # inside of the call's own range
            self._divided_by(int(divide_by), run, wide, wide, op=op, wire=narrow_wire)
            if wide is not flat:
                flat.copy_(wide)

        run = partial(in_place, reduce, tensor) if isinstance(tensor, Tensor) else partial(together, reduce, tensor)
        return self._queue.run(call, run, async_op=async_op)

    def reduce_scatter(self, tensor: Tensor, op: Op = "sum", *, async_op: bool = False) -> Any:
        """Returns this rank's chunk of the combined tensor; `tensor` itself is left as it was.

        Returns:
            [numel of chunk], flat: elements r·N//p to (r+1)·N//p of the flattened tensor, for rank r of p.
        """
        checks.on(self.device, tensor)
        checks.operation(op, tensor.dtype)
        call = self._queue.number("reduce_scatter", op, tensor)

        def run() -> Tensor:
            flat = self._divided(flatten(tensor).clone(), op)
            bounds = offsets(flat.numel(), self.world_size)
            if memory := self._collectives.memory_of(flat):
                memory.reduce_scatter(flat, bounds, _adding(op), sequence=call.sequence)
            else:
                schedule = by_size("reduce_scatter", flat.nbytes, self.world_size)
                self._collectives.links.run(schedule, flat, bounds, Reduction(_adding(op)))
            return self._averaged(flat[bounds[self.rank] : bounds[self.rank + 1]].clone(), op).view(tensor.dtype)

        return self._queue.run(call, run, async_op=async_op)

    def reduce_scatter_(
        self,
        flat: Tensor,
        bounds: Sequence[int],
        op: Op = "sum",
        *,
        divide_by: SupportsInt = 1,
        wire: WireName | None = None,
        async_op: bool = False,
        label: str = "",
    ) -> Any:
        """Combines slice s of `flat` over all ranks into that of the rank whose number in `slices` is s, in place.

        The rest of `flat` is undefined then.

        Args:
            flat: [numel], contiguous.
            bounds: world_size + 1 ascending positions: where each slice begins, and where the last one ends.
            op, divide_by, wire, async_op, label: as in `all_reduce`.
        """
        checks.on(self.device, flat)
        checks.operation(op, flat.dtype)
        checks.slices(flat, bounds, self.world_size)
        checks.divisor(divide_by, op, flat.dtype)
        checks.wire(wire, op, flat.dtype)
        call = self._queue.number("reduce_scatter_", op, flat, label, how=(*bounds, wire))
        if op == "mean":
            divide_by = self.world_size
        mine = slice(bounds[self.slices[self.rank]], bounds[self.slices[self.rank] + 1])

        def run() -> Tensor:
            wide, narrow_wire = widened(flat, wire)
            scatter = partial(self._collectives.reduce_scatter, wide, bounds, sequence=call.sequence)
            self._divided_by(int(divide_by), scatter, wide, wide[mine], op=op, wire=narrow_wire)
            return flat[mine] if wide is flat else flat[mine].copy_(wide[mine])

        return self._queue.run(call, run, async_op=async_op)

    def all_gather_(self, flat: Tensor, bounds: Sequence[int], *, async_op: bool = False, label: str = "") -> Any:
        """Gives everyone slice s of `flat` from the rank whose number in `slices` is s, in place.

        Args:
            flat, bounds: as in `reduce_scatter_`.
            async_op, label: as in `all_reduce`.
        """
        checks.on(self.device, flat)
        checks.slices(flat, bounds, self.world_size)
        call = self._queue.number("all_gather_", "", flat, label, how=tuple(bounds))

        def run() -> Tensor:
            self._collectives.all_gather(flat, bounds, sequence=call.sequence)
            return flat

        return self._queue.run(call, run, async_op=async_op)

    def all_gather(self, tensor: Tensor, *, async_op: bool = False) -> Any:
        """Returns every rank's tensor, by rank. All dimensions but the first must agree.

        Args:
            tensor: [n_r, ...]; n_r may differ by rank and may be 0. A scalar counts as [1].
        """
        checks.on(self.device, tensor)
        mine = with_rows(tensor)
        call = self._queue.number("all_gather", how=_alike(mine))  # first dimensions may differ by rank

        def run() -> list[Tensor]:
            flat, rows = self._laid_out(mine, call)
            self._all_gather(flat, bounds_of(rows, mine), call)
            return by_rank(flat, rows, mine)

        return self._queue.run(call, run, async_op=async_op)

    def chain(self, function: Callable[[], Any], *, async_op: bool = False, label: str = "") -> Any:
        """Runs a function that calls collectives of this communicator, as if it were one.

        They run in its thread, in its turn, with no other collective in between. Those that it calls with `async_op`
        run one after another while it goes on.

        Returns:
            What the function returns; with `async_op` a `Work`.
        """
        return self._queue.run_chain(self._queue.number("chain", label=label), function, async_op=async_op)

    @property
    def host_partition(self) -> HostPartition:
        """The part of each tensor that every rank carries from its host to the others."""
        return self._collectives.host_partition

    def sum_in_host(self, flat: Tensor, *, divide_by: SupportsInt = 1, label: str = "") -> None:
        """Sums over the ranks that share this host's memory, in place; alone, a rank only divides.

        Args:
            flat: [numel], contiguous.
            divide_by, label: as in `all_reduce`.
        """
        checks.on(self.device, flat)
        checks.operation("sum", flat.dtype)
        checks.is_flat(flat)
        checks.divisor(divide_by, "sum", flat.dtype)
        call = self._queue.number("sum_in_host", "sum", flat, label)

        def run() -> None:
            in_host = partial(self._collectives.sum_in_host, flat, sequence=call.sequence)
            self._divided_by(int(divide_by), in_host, flat, flat, op="sum")

        self._queue.run(call, run)

    def _all_gather(self, flat: Tensor, bounds: Sequence[int], call: Call) -> None:
        """Gives everyone rank r's flat[bounds[r]:bounds[r + 1]]."""
        if memory := self._collectives.memory_of(flat):
            memory.all_gather(flat, bounds, sequence=call.sequence)
        else:
            self._collectives.links.run(by_size("all_gather", flat.nbytes, self.world_size), flat, bounds)

    def broadcast(self, tensor: Tensor, root: int = 0, *, async_op: bool = False, label: str = "") -> Any:
        """Gives every rank the root's values, in place."""
        checks.root(root, self.world_size)
        checks.on(self.device, tensor)
        checks.holds_result(tensor)
        call = self._queue.number("broadcast", f"from {root}", tensor, label)

        def run(flat: Tensor) -> None:
            if memory := self._collectives.memory_of(flat):
                memory.broadcast(flat, root, sequence=call.sequence)
            else:
                self._collectives.links.run(rooted(SCHEDULES["tree_broadcast"], root), flat)

        return self._queue.run(call, partial(in_place, run, tensor), async_op=async_op)

    def reduce(self, tensor: Tensor, root: int = 0, op: Op = "sum", *, async_op: bool = False) -> Any:
        """Combines `tensor` over all ranks into the root's, in place; the others' are left as they were."""
        checks.root(root, self.world_size)
        checks.on(self.device, tensor)
        checks.operation(op, tensor.dtype)
        checks.holds_result(tensor)
        call = self._queue.number("reduce", f"{op} to {root}", tensor)

        def run() -> Tensor:
            flat = self._divided(flatten(tensor).clone(), op)  # inner ranks of the tree add up in it
            self._collectives.links.run(rooted(SCHEDULES["tree_reduce"], root), flat, reduction=Reduction(_adding(op)))
            return write_back(self._averaged(flat, op), tensor) if self.rank == root else tensor

        return self._queue.run(call, run, async_op=async_op)

    def gather(self, tensor: Tensor, root: int = 0, *, async_op: bool = False) -> Any:
        """Returns every rank's tensor, by rank, on the root; an empty list elsewhere.

        Args:
            tensor: as in `all_gather`.
        """
        checks.root(root, self.world_size)
        checks.on(self.device, tensor)
        mine = with_rows(tensor)
        call = self._queue.number("gather", f"to {root}", how=_alike(mine))

        def run() -> list[Tensor]:
            flat, rows = self._laid_out(mine, call)
            self._collectives.links.run(rooted(SCHEDULES["tree_gather"], root), flat, bounds_of(rows, mine))
            return by_rank(flat, rows, mine) if self.rank == root else []

        return self._queue.run(call, run, async_op=async_op)

    def scatter(self, tensors: Sequence[Tensor] | None = None, root: int = 0, *, async_op: bool = False) -> Any:
        """Returns rank r's tensor out of the root's list; shapes may differ. The other ranks pass nothing.

        Raises:
            ConfigError: the root has not one tensor per rank, or they differ in dtype.
        """
        checks.root(root, self.world_size)
        if self.rank == root:
            checks.pieces(tensors, self.world_size)
            for one in tensors or ():
                checks.on(self.device, one)
        call = self._queue.number("scatter", f"from {root}")

        def run() -> Tensor:
            pieces = [] if tensors is None or self.rank != root else list(tensors)
            about = [[list(piece.shape) for piece in pieces], str(pieces[0].dtype)[len("torch.") :]] if pieces else ""
            shapes, dtype = json.loads(self._collectives.links.gather_bytes(json.dumps(about).encode())[root])
            bounds = [0, *accumulate(map(math.prod, shapes))]
            flat = torch.empty(bounds[-1], dtype=getattr(torch, dtype), device=self.device)
            if pieces:
                torch.cat([with_rows(piece).reshape(-1) for piece in pieces], out=flat)
            self._collectives.links.run(rooted(SCHEDULES["tree_scatter"], root), flat, bounds)
            return flat[bounds[self.rank] : bounds[self.rank + 1]].clone().view(shapes[self.rank])

        return self._queue.run(call, run, async_op=async_op)

    def all_to_all(self, tensors: Sequence[Tensor], *, async_op: bool = False) -> Any:
        """Sends tensors[r] to rank r; returns what rank 0, 1, … sent here.

        Args:
            tensors: one per rank, [n, ...]; n may differ and may be 0, all else must agree between all ranks.
        """
        checks.pieces(tensors, self.world_size)
        for one in tensors:
            checks.on(self.device, one)
        pieces = [with_rows(piece) for piece in tensors]
        checks.rows(pieces)
        call = self._queue.number("all_to_all", how=_alike(pieces[0]))

        def run() -> list[Tensor]:
            table = self._gathered([len(piece) for piece in pieces], call)  # [from][to], in rows
            rows = [row[self.rank] for row in table]
            going, coming = bounds_of(table[self.rank], pieces[0]), bounds_of(rows, pieces[0])
            outgoing = torch.cat([piece.reshape(-1) for piece in pieces])
            incoming = outgoing.new_empty(coming[-1])
            longest = max(map(max, table)) * pieces[0].shape[1:].numel()
            self._collectives.links.exchange(outgoing, going, incoming, coming, longest=longest)
            return by_rank(incoming, rows, pieces[0])

        return self._queue.run(call, run, async_op=async_op)

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        call = self._queue.number("barrier")
        self._queue.run(call, partial(self._barrier, call.sequence))

    def _barrier(self, sequence: int) -> None:
        collectives = self._collectives
        if collectives.cross_host is not None:
            collectives.cross_host.barrier(sequence=sequence)
        elif collectives.group is not None:
            collectives.group.barrier(sequence=sequence)
        else:
            flag = torch.zeros(1, dtype=torch.uint8, device=self.device)
            collectives.links.run(SCHEDULES["recursive_doubling"], flag, reduction=Reduction("max"))

    def agree_any(self, flag: bool) -> bool:
        """Returns True on every rank if `flag` is true on any."""
        votes = torch.tensor([flag], dtype=torch.uint8, device=self.device)
        route = IN_MEMORY if IN_MEMORY in self._collectives.routes else "recursive_doubling"
        return bool(self.all_reduce(votes, "max", algorithm=route, label="agree_any").item())

    # --- messages ----------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int, *, async_op: bool = False, label: str = "") -> Any:
        """Sends `tensor` to rank `dst`, which calls `recv`; returns once that rank has taken it.

        The messages from one rank to another are received in the order in which they were sent.

        Args:
            async_op: post the message and return a `Message` at once; leave `tensor` alone until its `wait` has
                returned.
            label: name of this call in errors and profiles.

        Raises:
            ConfigError: there is no such rank, or this cannot be sent.
            PeerLost: `dst` did not receive it within the deadline, or both ranks wait for each other.
            CommunicatorBroken: an earlier call failed.
        """
        checks.one_tensor(tensor)
        checks.on(self.device, tensor)
        checks.peer("dst", dst, me=self.rank, world_size=self.world_size)
        message = self._messages.post("to", dst, tensor, label=label)
        return message if async_op else message.wait()

    def recv(self, tensor: Tensor, src: int, *, async_op: bool = False, label: str = "") -> Any:
        """Fills `tensor` with what rank `src` has sent, and returns it.

        Args:
            tensor: of the sender's dtype, with as many elements as the sender's; it may be laid out otherwise.
            async_op, label: as in `send`.

        Raises:
            ConfigError: there is no such rank, or this tensor cannot be received into.
            PeerLost: `src` did not send it within the deadline, or both ranks wait for each other.
            CommunicatorBroken: an earlier call failed.
        """
        checks.one_tensor(tensor)
        checks.on(self.device, tensor)
        checks.holds_result(tensor)
        checks.peer("src", src, me=self.rank, world_size=self.world_size)
        message = self._messages.post("from", src, tensor, label=label)
        return message if async_op else message.wait()

    # --- waiting for what the ranks do by other means ----------------------------------------------------------------

    def wait_for_rank_zero(self, label: str) -> None:
        """Returns once rank 0 has called it too, however long that takes while rank 0 lives.

        Raises:
            PeerLost: rank 0 failed, left, or shows no sign of life.
        """
        self._queue.wait_for_rank_zero(label)

    def wait_for(self, wait: Callable[[float], bool], *, label: str) -> None:
        """Waits for what the ranks do together by other means (a future of torch.distributed, say), with this
        communicator's number, warning, deadline and blame. Every rank calls it.

        Args:
            wait: waits for the given seconds at most; returns True if the wait is over. It is called until it is.

        Raises:
            PeerLost: it was not there within the deadline.
        """
        self._queue.wait_for(wait, self.abort_s, label=label)

    def find_lost(self, label: str) -> PeerLost | None:
        """Returns the rank that is surely lost after an error outside of this communicator, if any. Not collective."""
        return self._queue.find_lost(label)

    # --- which way an all-reduce goes --------------------------------------------------------------------------------

    @property
    def hosts(self) -> Hosts:
        """The ranks of every host."""
        return self._collectives.hosts

    def algorithms(self) -> list[str]:
        """Returns every way that an all-reduce can go here: what `algorithm=` accepts besides "auto"."""
        return list(self._collectives.routes)

    @property
    def overlaps(self) -> bool:
        """Returns True if an all-reduce in the background runs without taking CPU time from the caller.

        It does if there is a wire to wait for, or a processor to spare. Otherwise the foreground takes less time,
        because it needs no thread switches.
        """
        group = self._collectives.group
        in_memory = self.plan.algorithm in ("auto", IN_MEMORY) and IN_MEMORY in self._collectives.routes
        if group is None or not in_memory:
            return self.world_size > 1
        return group.num_processors >= group.size * (torch.get_num_threads() + 1)

    def explain(self, nbytes: int) -> str:
        """Returns a table of every way of such an all-reduce, fastest first. Collective: the first call measures."""
        return str(self._ask("explain", self.plan.explain, nbytes))

    def predict(
        self,
        nbytes: int,
        algorithm: str = "auto",
        *,
        operation: Predicted = "all_reduce",
        allocated: bool = False,
        wire: Narrow | None = None,
    ) -> float:
        """Returns the predicted seconds of a collective. Collective: the first call measures.

        Args:
            nbytes: of the tensor; of an "all_gather", that of all ranks' parts together.
            algorithm: a way from `algorithms()`, or "auto", of an all-reduce.
            operation: "all_reduce", "all_gather" or "sum_in_host".
            allocated: the tensor lies in memory from `allocate`.
            wire: the format in which an all-reduce sends.
        """
        self.plan.check(algorithm)
        question = partial(self.plan.predict, operation, algorithm, allocated=allocated, wire=wire)
        return float(self._ask("predict", question, nbytes))

    def choose(self, nbytes: int) -> str:
        """Returns the way that "auto" takes for a buffer of this size. Collective: the first call may measure."""
        return str(self._ask("choose", self.plan.choose, nbytes))

    def _ask(self, operation: str, question: Callable[[int], Any], nbytes: int) -> Any:
        checks.size(nbytes)
        return self._queue.run(self._queue.number(operation, how=(nbytes,)), partial(question, nbytes))

    # --- memory, groups, the end -------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns [numel] zeros, in the memory that this communicator's collectives reach without a copy. Collective.

        It belongs to the communicator, and is released when every rank has called `free`, or with the communicator.
        """
        checks.memory(numel, dtype)
        call = self._queue.number("allocate", f"{numel} {dtype}")
        tensor: Tensor = self._queue.run(call, partial(self._allocate, numel, dtype, call.sequence))
        return tensor

    def _allocate(self, numel: int, dtype: torch.dtype, sequence: int) -> Tensor:
        if self._collectives.group is not None:
            try:
                return self._collectives.group.allocate(numel, dtype, sequence=sequence)
            except NoSharedMemory as error:  # on all ranks of the host alike
                log.warning("a buffer of %d %s is not shared with the neighbours: %s", numel, dtype, error)
        try:
            with torch.inference_mode(False):
                tensor = torch.zeros(numel, dtype=dtype, device=self.device)
        except RuntimeError as error:
            raise ConfigError(f"numel={numel} of {dtype}: there is no memory for it ({error})") from error
        self._unshared.add(tensor.data_ptr())
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Gives memory from `allocate` back. Every rank calls it; no collective may still use the tensor.

        From any thread, and at any time: a finalizer may call it in the midst of another collective.
        """
        if tensor.data_ptr() in self._unshared:
            self._unshared.discard(tensor.data_ptr())
        elif self._collectives.group is not None:
            self._collectives.group.free(tensor)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """Returns a communicator of some of the ranks, in the order given; None on the others. Collective over all.

        Its collectives are numbered and watched by themselves and may run beside this one's.
        """
        checks.subgroup(ranks, self.world_size)
        call = self._queue.number("subgroup", f"of {list(ranks)}")
        group: Communicator | None = self._queue.run(call, partial(self._subgroup, list(ranks)))
        return group

    def _subgroup(self, ranks: list[int]) -> Communicator | None:
        channel = self._channels.take(self._collectives.links.gather_bytes)
        if self.rank not in ranks:
            return None
        watchdog = self._watchdog.among(ranks, channel)
        transport = self._collectives.links.transport.among(ranks, channel, watchdog.hopeless_because)
        named = [self._world_ranks[rank] for rank in ranks]
        try:
            group = Communicator(
                transport, self.settings, watchdog=watchdog, world_ranks=named, channels=self._channels
            )
        except BaseException as error:
            watchdog.leave()
            if isinstance(error, PeerLost):
                rank = ranks[error.rank]
                raise PeerLost(rank, error.host, error.generation, error.sequence, error.label, error.reason) from error
            raise
        self._groups = [other for other in self._groups if not other._is_closed] + [group]
        return group

    @property
    def is_broken(self) -> bool:
        """Returns True if further calls are refused, because an earlier one failed."""
        return self._queue.error is not None

    @property
    def num_calls(self) -> int:
        """The number of collective calls that this rank has made."""
        return self._queue.num_calls

    def abandon(self, reason: str = "") -> None:
        """Ends this rank's part at once, and breaks off what is in flight.

        Args:
            reason: why this rank stops early, for the others; "" if the program ends.
        """
        for group in self._groups:
            group.abandon(reason)
        self._queue.abandon(reason)

    def close(self) -> None:
        """Ends after what is in flight, and says goodbye. The communicator cannot be used afterwards."""
        self._is_closed = True
        for group in self._groups:
            group.close()
        self._queue.close()
        self._collectives.close()

    # --- what the verbs are made of ----------------------------------------------------------------------------------

    def _laid_out(self, mine: Tensor, call: Call) -> tuple[Tensor, list[int]]:
        """Returns a flat buffer with room for every rank's tensor and this one's in it, and how many rows each has."""
        rows = [num_rows for (num_rows,) in self._gathered([len(mine)], call)]
        bounds = bounds_of(rows, mine)
        flat = mine.new_empty(bounds[-1])
        flat[bounds[self.rank] : bounds[self.rank + 1]] = mine.reshape(-1)
        return flat, rows

    def _gathered(self, numbers: list[int], call: Call) -> list[list[int]]:
        """Returns every rank's numbers, by rank; equally many."""
        count = len(numbers)
        table = torch.zeros(self.world_size, count, dtype=torch.int64, device=self.device)
        table[self.rank] = torch.tensor(numbers, device=self.device)
        self._all_gather(table.view(-1), range(0, self.world_size * count + 1, count), call)
        rows: list[list[int]] = table.tolist()
        return rows

    def _divided_by(
        self,
        divisor: int,
        run: Callable[[Reduction], None],
        terms: Tensor,
        result: Tensor,
        *,
        op: str,
        wire: Narrow | None = None,
    ) -> None:
        """Runs a reduction that divides its result; terms whose sum may overflow are made smaller first."""
        checks.divisor_in_range(divisor)
        narrow = divisor != 1 and sum_overflows(terms.dtype)
        if narrow:
            terms.mul_(1 / self._enough)
        divide_by = 1 if narrow else divisor
        run(Reduction(_adding(op), divide_by, None if wire is None else wire_format(wire, divide_by)))
        if narrow:
            result.mul_(self._enough / divisor)

    def _divided(self, flat: Tensor, op: str) -> Tensor:
        """Divides the terms of a mean by a power of two, so that no sum overflows; this loses no digits."""
        return flat.mul_(1 / self._enough) if op == "mean" else flat

    def _averaged(self, sums: Tensor, op: str) -> Tensor:
        """Turns sums of divided terms into means."""
        return sums.div_(self.world_size / self._enough) if op == "mean" else sums


def _adding(op: str) -> str:
    return "sum" if op == "mean" else op


def _alike(tensor: Tensor) -> tuple[object, ...]:
    """Returns what must agree between ranks whose first dimensions may differ."""
    return "rows", list(tensor.shape[1:]), tensor.dtype
