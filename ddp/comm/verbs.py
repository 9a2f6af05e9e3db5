"""The verbs of a communicator: each checks its tensors, numbers the call, and queues an operation of `FlatCollectives`.

With `async_op=True` a verb returns a `Work` at once; do not touch its tensors until `wait` has returned the result. The
label is the call's name in errors and profiles.

Note "gradients". In an autograd graph, an all-gather and an all-reduce have a gradient, to which all ranks contribute:

    forward                          backward, of a loss Lᵣ on each rank r
    all_gather   every rank has zᵣ   reduce-scatter   ∂/∂zᵣ = Σₛ ∂Lₛ/∂zᵣ
    all_reduce   y = Σ xᵣ            all-reduce       ∂/∂xᵣ = Σₛ ∂Lₛ/∂y

So each rank gets the gradient of the *sum* of all ranks' losses. `ddp.fit` divides it by the global count, and
`DistributedDataParallel` by the world size, whereby it becomes the gradient of the mean of the losses.

Every rank's loss must depend on the result, because the backward is a collective, too. For a collective after the
model's forward, the backward runs before that of the model, when no bucket of gradients is in flight. Inside a model,
it runs between buckets, in an order that is the same on all ranks if their graphs are identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, Literal, SupportsInt, TypeAlias, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ddp.collectives.schedule import offsets
from ddp.comm import checks
from ddp.comm.call_queue import CallQueue, HostCopy, Work
from ddp.comm.flat_collectives import IN_MEMORY, FlatCollectives
from ddp.comm.plan import Plan
from ddp.comm.reduction import Op, buffers, flatten, reduction_of, reduction_of_shards, widened, with_rows, write_back
from ddp.comm.watch.call import recorded
from ddp.errors import ConfigError
from ddp.setting import WireName

Now = Literal[False]  # of `async_op`
Later = Literal[True]
Input = TypeVar("Input", bound=Tensor | list[Tensor])
Result = TypeVar("Result")
Eventual: TypeAlias = Result | Work[Result]
"""The result of a verb; with `async_op`, its `Work`."""


class Terms(TypedDict, total=False):
    """The keywords that the reductions of flat tensors share, for the type checker."""

    divide_by: SupportsInt
    wire: WireName | None
    num_shards: int | None
    label: str


class How(Terms, total=False):
    """The keywords of `all_reduce`, for the type checker."""

    algorithm: str


class ScatterTerms(Terms, total=False):
    """The keywords of `reduce_scatter_`, for the type checker."""

    on_hosts: bool


class Verbs:
    """The collectives that a user calls; the base class of a communicator."""

    rank: int
    world_size: int
    device: torch.device
    slices: list[int]
    plan: Plan
    _queue: CallQueue
    _collectives: FlatCollectives

    # --- reductions --------------------------------------------------------------------------------------------------

    @overload
    def all_reduce(self, tensor: Input, op: Op = "sum", *, async_op: Now = False, **how: Unpack[How]) -> Input: ...
    @overload
    def all_reduce(self, tensor: Input, op: Op = "sum", *, async_op: Later, **how: Unpack[How]) -> Work[Input]: ...
    @overload
    def all_reduce(self, tensor: Input, op: Op = "sum", *, async_op: bool, **how: Unpack[How]) -> Eventual[Input]: ...
    def all_reduce(
        self,
        tensor: Input,
        op: Op = "sum",
        *,
        algorithm: str = "auto",
        divide_by: SupportsInt = 1,
        wire: WireName | None = None,
        num_shards: int | None = None,
        async_op: bool = False,
        label: str = "",
    ) -> Eventual[Input]:
        """Reduces `tensor` over all ranks, in place; the result is bitwise identical on all ranks.

        If autograd tracks the tensor, a sum or a mean has a gradient (note "gradients").

        Args:
            tensor: of any shape, the same on every rank; or a list, which is reduced together (one message per dtype).
            op: "sum", "mean" (floating point only), "product", "min" or "max". For bools, sum means any, product all.
            algorithm: one of `plan.algorithms()`, or "auto".
            divide_by: divisor of the result, applied inside the collective at almost no cost: an int, or an object
                whose `int()` is taken once all earlier collectives are complete. The same on every rank.
            wire: the format in which numbers travel between hosts, "bf16", "fp16", "int8" or "int8_stochastic"
                (`reduction.py`); sums are kept in the tensor's own type, and transfers in a host's memory are not
                encoded. "fp32": a tensor of a narrower type travels and is added up as float32.
            num_shards: the tensor is [rows, …], in memory from `allocate`: a row for each of this rank's nodes of the
                tree over this many shards (`collectives/shards.py`), and as many rows as the rank with most nodes. Row
                0 becomes the sum of all ranks' nodes, in which zeros are positive; the other rows are undefined
                afterwards. Only with op="sum", and without a wire format. Float16 numbers, whose sums may overflow,
                must have been divided by `reduction.overflow_headroom(num_shards)` before they were added up; the
                result is scaled back.
            async_op: return a `Work` at once; do not touch `tensor` until its `wait` has returned.
            label: name of this call in messages and profiles.

        Raises:
            ConfigError: the operation or algorithm does not exist here, or does not fit the tensor.
            PeerLost: a rank did not take part within the deadline.
            CollectiveMismatch: a rank called another collective.
            CommunicatorBroken: an earlier collective failed.
        """
        given = checks.tensors(tensor)
        for one in given:
            checks.result_on(self.device, one)
            checks.reduction(op, one.dtype, divide_by, wire)
        self.plan.check(algorithm)
        if is_differentiated(given, in_place=True, async_op=async_op):
            how = {"algorithm": algorithm, "divide_by": divide_by, "wire": wire, "num_shards": num_shards}
            all_reduce_in_graph(self, given, op, {**how, "label": label})
            return tensor
        if num_shards is not None:
            checks.rows_of_shards(tensor, num_shards, self.world_size, op, wire)
        call = self._queue.number("all_reduce", op, tensor, label, how=(algorithm, wire, num_shards))

        def run() -> Input:
            if isinstance(tensor, Tensor) and num_shards is not None:
                self._reduce_shards(tensor, num_shards, divide_by)
                return tensor
            for flat, tensors in buffers(tensor):
                wide, narrow = widened(flat, wire)
                route = self.plan.route(wide, algorithm, narrow)
                reduction = reduction_of(op, wide.dtype, self.world_size, divide_by, narrow)
                name = f"ddp: {route.name}"  # inside the call's own range
                recorded(name, self._collectives.all_reduce)(wide, route, reduction)
                write_back(flat if wide is flat else flat.copy_(wide), tensors)
            return tensor

        return self._queue.run(call, run, async_op=async_op)

    def _reduce_shards(
        self, rows: Tensor, num_shards: int, divide_by: SupportsInt, bounds: Sequence[int] | None = None
    ) -> Tensor:
        """Adds up the nodes of all ranks. Returns this rank's part of row 0."""
        flats = rows.view(len(rows), -1)
        route = None if bounds is not None else self.plan.route_over_shards(flats[0], num_shards)
        reduction = reduction_of_shards(rows.dtype, num_shards, divide_by)
        name = "ddp: slice_owners" if route is None else f"ddp: {route.name}"
        return recorded(name, self._collectives.reduce_shards)(flats, num_shards, route, reduction, bounds)

    @overload
    def reduce_scatter(self, tensor: Tensor, op: Op = "sum", *, async_op: Now = False, label: str = "") -> Tensor: ...
    @overload
    def reduce_scatter(self, tensor: Tensor, op: Op = "sum", *, async_op: Later, label: str = "") -> Work[Tensor]: ...
    def reduce_scatter(
        self, tensor: Tensor, op: Op = "sum", *, async_op: bool = False, label: str = ""
    ) -> Eventual[Tensor]:
        """Returns this rank's chunk of the reduced tensor; `tensor` is not changed.

        Returns:
            [numel of chunk], flat: elements r·N//p to (r+1)·N//p of the flattened tensor, for rank r of p.
        """
        checks.on(self.device, tensor)
        checks.reduction(op, tensor.dtype)
        call = self._queue.number("reduce_scatter", op, tensor, label)

        def run() -> Tensor:
            flat = flatten(tensor).clone()
            bounds = offsets(flat.numel(), self.world_size)
            reduction = reduction_of(op, flat.dtype, self.world_size)
            mine = self._collectives.reduce_scatter(flat, bounds, reduction, by_rank=True)
            return mine.clone().view(tensor.dtype)

        return self._queue.run(call, run, async_op=async_op)

    @overload
    def reduce_scatter_(
        self, flat: Tensor, bounds: Sequence[int], op: Op = "sum", *, async_op: Now = False, **how: Unpack[ScatterTerms]
    ) -> Tensor: ...
    @overload
    def reduce_scatter_(
        self, flat: Tensor, bounds: Sequence[int], op: Op = "sum", *, async_op: Later, **how: Unpack[ScatterTerms]
    ) -> Work[Tensor]: ...
    @overload
    def reduce_scatter_(
        self, flat: Tensor, bounds: Sequence[int], op: Op = "sum", *, async_op: bool, **how: Unpack[ScatterTerms]
    ) -> Eventual[Tensor]: ...
    def reduce_scatter_(
        self,
        flat: Tensor,
        bounds: Sequence[int],
        op: Op = "sum",
        *,
        divide_by: SupportsInt = 1,
        wire: WireName | None = None,
        num_shards: int | None = None,
        on_hosts: bool = False,
        async_op: bool = False,
        label: str = "",
    ) -> Eventual[Tensor]:
        """Reduces slice s of `flat` over all ranks to the rank whose number in `slices` is s, in place.

        The rest of `flat` is undefined afterwards.

        Args:
            flat: [numel], contiguous.
            bounds: world_size + 1 ascending positions: the start of each slice, and the end of the last one.
            on_hosts: every host gets the whole result: a rank also has the slices of its counterparts, the ranks in its
                place on the other hosts, which are adjacent to its own. Not with a wire format, nor if hosts differ in
                size.
            num_shards: as in `all_reduce`; then `flat` is [rows, numel], and the slices are of row 0.
            op, divide_by, wire, async_op, label: as in `all_reduce`.
        """
        checks.on(self.device, flat)
        checks.slices(flat if num_shards is None else flat[0], bounds, self.world_size)
        checks.reduction(op, flat.dtype, divide_by, wire)
        if num_shards is not None:
            checks.rows_of_shards(flat, num_shards, self.world_size, op, wire)
        call = self._queue.number("reduce_scatter_", op, flat, label, how=(*bounds, wire, num_shards, on_hosts))

        def run() -> Tensor:
            if num_shards is not None:
                mine = self._reduce_shards(flat, num_shards, divide_by, bounds)
            else:
                wide, narrow = widened(flat, wire)
                reduction = reduction_of(op, wide.dtype, self.world_size, divide_by, narrow)
                mine = self._collectives.reduce_scatter(wide, bounds, reduction)
                if wide is not flat:
                    number = self.slices[self.rank]
                    mine = flat[bounds[number] : bounds[number + 1]].copy_(mine)
            if on_hosts:
                row = flat if num_shards is None else flat[0]
                self._collectives.gather_on_hosts(row, bounds)
            return mine

        return self._queue.run(call, run, async_op=async_op)

    @overload
    def reduce(
        self, tensor: Tensor, root: int = 0, op: Op = "sum", *, async_op: Now = False, label: str = ""
    ) -> Tensor: ...
    @overload
    def reduce(
        self, tensor: Tensor, root: int = 0, op: Op = "sum", *, async_op: Later, label: str = ""
    ) -> Work[Tensor]: ...
    def reduce(
        self, tensor: Tensor, root: int = 0, op: Op = "sum", *, async_op: bool = False, label: str = ""
    ) -> Eventual[Tensor]:
        """Reduces `tensor` over all ranks into the root's, in place; those of the others are not changed."""
        checks.root(root, self.world_size)
        checks.result_on(self.device, tensor)
        checks.reduction(op, tensor.dtype)
        call = self._queue.number("reduce", f"{op} to {root}", tensor, label)

        def run() -> Tensor:
            flat = flatten(tensor).clone()  # because inner ranks of the tree add up in it
            self._collectives.reduce(flat, root, reduction_of(op, flat.dtype, self.world_size))
            if self.rank == root:
                write_back(flat, (tensor,))
            return tensor

        return self._queue.run(call, run, async_op=async_op)

    # --- what moves without being combined ---------------------------------------------------------------------------

    @overload
    def broadcast(self, tensor: Tensor, root: int = 0, *, async_op: Now = False, label: str = "") -> Tensor: ...
    @overload
    def broadcast(self, tensor: Tensor, root: int = 0, *, async_op: Later, label: str = "") -> Work[Tensor]: ...
    def broadcast(self, tensor: Tensor, root: int = 0, *, async_op: bool = False, label: str = "") -> Eventual[Tensor]:
        """Copies the root's values to every rank, in place."""
        checks.root(root, self.world_size)
        checks.result_on(self.device, tensor)
        call = self._queue.number("broadcast", f"from {root}", tensor, label)

        def run() -> Tensor:
            flat = flatten(tensor)
            self._collectives.broadcast(flat, root)
            write_back(flat, (tensor,))
            return tensor

        return self._queue.run(call, run, async_op=async_op)

    @overload
    def all_gather(self, tensor: Tensor, *, async_op: Now = False, label: str = "") -> list[Tensor]: ...
    @overload
    def all_gather(self, tensor: Tensor, *, async_op: Later, label: str = "") -> Work[list[Tensor]]: ...
    def all_gather(self, tensor: Tensor, *, async_op: bool = False, label: str = "") -> Eventual[list[Tensor]]:
        """Returns every rank's tensor, by rank. All dimensions but the first must agree.

        They have a gradient if the tensor requires one (note "gradients").

        Args:
            tensor: [n_r, ...]; n_r may differ by rank and may be 0. A scalar counts as [1].
        """
        checks.on(self.device, tensor)
        if is_differentiated((tensor,), in_place=False, async_op=async_op):
            return list(_AllGather.apply(self, label, tensor))  # type: ignore[no-untyped-call]
        mine = with_rows(tensor)
        call = self._queue.number("all_gather", label=label, how=_agreed(mine))  # first dimensions may differ by rank

        return self._queue.run(call, lambda: self._collectives.gather_rows(mine), async_op=async_op)

    @overload
    def all_gather_(self, flat: Tensor, bounds: Sequence[int], *, async_op: Now = False, label: str = "") -> Tensor: ...
    @overload
    def all_gather_(self, flat: Tensor, bounds: Sequence[int], *, async_op: Later, label: str = "") -> Work[Tensor]: ...
    def all_gather_(
        self, flat: Tensor, bounds: Sequence[int], *, async_op: bool = False, label: str = ""
    ) -> Eventual[Tensor]:
        """Copies slice s of `flat` from the rank whose number in `slices` is s to every rank, in place.

        Args:
            flat, bounds: as in `reduce_scatter_`.
            async_op, label: as in `all_reduce`.
        """
        checks.on(self.device, flat)
        checks.slices(flat, bounds, self.world_size)
        call = self._queue.number("all_gather_", "", flat, label, how=tuple(bounds))

        def run() -> Tensor:
            self._collectives.all_gather(flat, bounds)
            return flat

        return self._queue.run(call, run, async_op=async_op)

    @overload
    def gather(self, tensor: Tensor, root: int = 0, *, async_op: Now = False, label: str = "") -> list[Tensor]: ...
    @overload
    def gather(self, tensor: Tensor, root: int = 0, *, async_op: Later, label: str = "") -> Work[list[Tensor]]: ...
    def gather(
        self, tensor: Tensor, root: int = 0, *, async_op: bool = False, label: str = ""
    ) -> Eventual[list[Tensor]]:
        """Returns every rank's tensor, by rank, on the root; an empty list elsewhere.

        Args:
            tensor: as in `all_gather`.
        """
        checks.root(root, self.world_size)
        checks.on(self.device, tensor)
        mine = with_rows(tensor)
        call = self._queue.number("gather", f"to {root}", label=label, how=_agreed(mine))

        return self._queue.run(call, lambda: self._collectives.gather_rows(mine, root), async_op=async_op)

    @overload
    def scatter(
        self, tensors: Sequence[Tensor] | None = None, root: int = 0, *, async_op: Now = False, label: str = ""
    ) -> Tensor: ...
    @overload
    def scatter(
        self, tensors: Sequence[Tensor] | None = None, root: int = 0, *, async_op: Later, label: str = ""
    ) -> Work[Tensor]: ...
    def scatter(
        self, tensors: Sequence[Tensor] | None = None, root: int = 0, *, async_op: bool = False, label: str = ""
    ) -> Eventual[Tensor]:
        """Returns tensor r of the root's list on rank r; shapes may differ. The other ranks pass nothing.

        Raises:
            ConfigError: the root's list does not have one tensor per rank, or they differ in dtype.
        """
        checks.root(root, self.world_size)
        if self.rank == root:
            checks.pieces(tensors, self.world_size, self.device)
        call = self._queue.number("scatter", f"from {root}", label=label)

        pieces = [] if tensors is None or self.rank != root else list(tensors)
        return self._queue.run(call, lambda: self._collectives.scatter(pieces, root, self.device), async_op=async_op)

    @overload
    def all_to_all(self, tensors: Sequence[Tensor], *, async_op: Now = False, label: str = "") -> list[Tensor]: ...
    @overload
    def all_to_all(self, tensors: Sequence[Tensor], *, async_op: Later, label: str = "") -> Work[list[Tensor]]: ...
    def all_to_all(
        self, tensors: Sequence[Tensor], *, async_op: bool = False, label: str = ""
    ) -> Eventual[list[Tensor]]:
        """Sends tensors[r] to rank r; returns the tensors received from rank 0, 1, ….

        Args:
            tensors: one per rank, [n, ...]; n may differ and may be 0, all else must agree on all ranks.
        """
        checks.pieces(tensors, self.world_size, self.device)
        pieces = [with_rows(piece) for piece in tensors]
        checks.rows(pieces)
        call = self._queue.number("all_to_all", label=label, how=_agreed(pieces[0]))

        return self._queue.run(call, lambda: self._collectives.all_to_all(pieces), async_op=async_op)

    def barrier(self, *, label: str = "") -> None:
        """Returns once every rank has called it."""
        call = self._queue.number("barrier", label=label)
        self._queue.run(call, self._collectives.barrier)

    def agree_any(self, flag: bool, *, label: str = "agree_any") -> bool:
        """Returns True on every rank if `flag` is true on any."""
        votes = torch.tensor([flag], dtype=torch.uint8, device=self.device)
        algorithm = IN_MEMORY if IN_MEMORY in self._collectives.routes else "recursive_doubling"
        self.all_reduce(votes, "max", algorithm=algorithm, label=label)
        return bool(HostCopy([votes], self.device, self._queue.refuse_if_broken).read()[0][0])


def _agreed(tensor: Tensor) -> tuple[object, ...]:
    """Returns the properties that must agree on all ranks if first dimensions may differ."""
    return "rows", list(tensor.shape[1:]), tensor.dtype


# --- in a graph of autograd ------------------------------------------------------------------------------------------


_REQUIRES_GRAD = attrgetter("requires_grad")


def is_differentiated(tensors: Sequence[Tensor], *, in_place: bool, async_op: bool) -> bool:
    """Returns True if autograd must track a collective of these tensors.

    Args:
        in_place: the result replaces them, so that a leaf only gets a new value.

    Raises:
        ConfigError: it cannot, because of `async_op`.
    """
    needing = list(filter(_REQUIRES_GRAD, tensors))  # empty in most calls, which must not lose a microsecond here
    if not needing or not torch.is_grad_enabled() or (in_place and all(x.is_leaf for x in needing)):
        return False
    if async_op:
        raise ConfigError(
            "async_op=True of a tensor that requires a gradient: autograd does not wait for it; leave async_op "
            "out, or pass its .detach()"
        )
    return True


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, comm: Verbs, label: str, tensor: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.label, ctx.shape = comm, label, tensor.shape
        return tuple(comm.all_gather(tensor, label=label))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        by_slice = sorted(range(len(gradients)), key=ctx.comm.slices.__getitem__)  # ranks in the order of slices
        flat = torch.cat([gradients[rank].reshape(-1) for rank in by_slice])
        bounds = [0, *accumulate(gradients[rank].numel() for rank in by_slice)]
        mine = ctx.comm.reduce_scatter_(flat, bounds, label=f"{ctx.label or 'all_gather'}, backward")
        return None, None, mine.view(ctx.shape)


def all_reduce_in_graph(comm: Verbs, tensors: Sequence[Tensor], op: str, how: dict[str, Any]) -> None:
    """Sums or averages tensors over all ranks, in place, with a gradient for each.

    Raises:
        ConfigError: any other operation, because it has no gradient here.
    """
    if op not in ("sum", "mean") or how["num_shards"] is not None:
        raise ConfigError(f"op={op!r} of a tensor that requires a gradient: take sum or mean, or pass its .detach()")
    _AllReduce.apply(comm, op, how, *tensors)  # type: ignore[no-untyped-call]


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, comm: Verbs, op: Any, how: dict[str, Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.op, ctx.how = comm, op, how
        ctx.mark_dirty(*tensors)
        comm.all_reduce(tensors[0] if len(tensors) == 1 else list(tensors), op, **how)
        return tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        label = f"{ctx.how['label'] or 'all_reduce'}, backward"
        mine = [each.clone() for each in gradients]  # the originals may be shared
        return None, None, None, *ctx.comm.all_reduce(mine, ctx.op, **{**ctx.how, "label": label})
