"""Gradients by shards: the running step of a replica that adds up shards, and the contribution of each shard.

    with model.shard(0):                      p.grad is empty, buffers are those of the step
        loss_of(model(x0), y0).backward()     at the end of the block, gradients go on the stack of sums
    with model.shard(1):                      p.grad is empty again, and buffers are the step's
        loss_of(model(x1), y1).backward()     this rank's last shard: the backward that reduces full buckets

The sums are those of the tree over the shards (`collectives/shards.py`). At the end this rank's nodes are left, in the
rows of the buckets, where the ranks add them up. Other sums stay in the tensors that autograd has made.

A shard without samples, or without a gradient of a parameter, counts as zeros. They are not added: x + 0 is x, but for
the sign of a zero, and the last sum loses that (`Communicator.all_reduce`).

If a shard is marked twice, left out or out of order, or if an error has left its block, the step flags report it, and
all ranks raise the error. Other errors inside of a block are raised there, on that rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ddp.collectives.shards import Stack, TreeSlot, is_node, nodes_by_rank, places, shards_of_rank
from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.comm.reduction import OVERFLOWING, WireFormat, overflow_headroom, wire_format
from ddp.errors import ConfigError, UnusedParameters
from ddp.gradients.bucket import Bucket, Slot, copy_into
from ddp.gradients.layout import Layout
from ddp.gradients.totals import NUM_TOTALS, Parts, Totals
from ddp.optim.norms import block_norms, total_norm
from ddp.process.streams import seed_generators, stream_seed
from ddp.replica.autograd import is_in_backward, uncompiled
from ddp.replica.backward import Accumulation
from ddp.replica.broadcast import BufferSync, check_untied, checksum
from ddp.replica.parameters import Layouts, sparse_weights
from ddp.replica.replica import Replica
from ddp.replica.shard_buffers import ShardBuffers
from ddp.replica.step_finalizer import Share, Usage
from ddp.replica.sync_batchnorm import waits
from ddp.setting import Narrow, Setup, WireName, refuse

Prepare = Callable[[Slot, Tensor], Tensor]


class ByShards(Accumulation):
    """Adds up gradients by shards of the batch. Collective to make.

    Args:
        buffers: of the replica.
        num_shards: of a batch.
        wire: the narrow format to which the gradients of each shard are rounded; None: they are not. Their sums travel
            in their own type, because a sum that is rounded depends on where it is rounded.
        finds_unused: as in `Usage`.

    Attributes:
        shards: of this rank.
        has_samples: a shard of this step has had a forward.
        seen: of the watched shard in the last step: the sum of its losses, its number of items, and by parameter name
            the checksum of its gradient.
        usage: decides which gradients each step must have.

    Raises:
        ConfigError: there are fewer shards than ranks.
    """

    num_shards: int
    may_unfreeze = False

    def __init__(
        self, comm: Communicator, buffers: BufferSync, num_shards: int, wire: Narrow | None, *, finds_unused: bool
    ) -> None:
        if num_shards < comm.world_size:
            raise ConfigError(
                f"num_shards={num_shards} is less than {comm.world_size} workers, so some would compute nothing: take "
                f"at least {comm.world_size} shards, or fewer workers"
            )
        self.num_shards, self.shards = num_shards, shards_of_rank(comm.rank, comm.world_size, num_shards)
        self._device, self._wire, self.usage = comm.device, wire, UsageByShards(comm, finds_unused=finds_unused)
        self._watched: int | None = None
        self.seen: tuple[float, float, dict[str, int]] = (0.0, 0.0, {})
        self.has_samples = False
        self._most = max(len(shards_of_rank(rank, comm.world_size, num_shards)) for rank in range(comm.world_size))
        self._places = places(self.shards, num_shards)
        self._num_nodes = len(nodes_by_rank(comm.world_size, num_shards)[comm.rank])
        self._buffers = ShardBuffers(comm, buffers, num_shards)
        self._seed = int(all_gather_object(comm, torch.initial_seed())[0])
        self._reset()

    def _reset(self, abort_reason: str = "") -> None:
        """Prepares for the next step, because the last one is over, or was aborted."""
        self.running = None
        self._next, self._abort_reason = self.shards.start, abort_reason

    @property
    def buffers_at_start(self) -> Mapping[str, Tensor]:  # type: ignore[override]
        return self._buffers.start

    def watch(self, shard: int | None) -> None:
        """Records the gradients of one shard in the next steps, before they are added to others; None: of no shard."""
        self._watched = shard

    # --- a shard, in the order of time -------------------------------------------------------------------------------

    def connect(self, layouts: Layouts) -> None:
        self._layouts = layouts

    @contextmanager
    def block(self, replica: Replica, shard: int) -> Iterator[None]:
        """Makes forward and backward inside those of one shard. Collective."""
        if error := self._protocol_error(shard):
            self._refuse(replica, error)
        if shard == self.shards.start:
            replica.prepare()
            self._begin_step(self._layouts.current, replica.num_steps)
            self._follow(replica, self._most - len(self.shards))
        self.running, self._next, self._has_forward, self._of_shard = shard, shard + 1, False, None
        before, is_last = replica.require_backward_grad_sync, shard == self.shards[-1]
        replica.require_backward_grad_sync = is_last
        seed_generators(stream_seed(self._seed, "dropout", self._step, shard), device=self._device)
        try:
            yield
            if not is_last:
                self._of_shard, replica.riding = replica.riding, None
                self._follow(replica, 0 if self._has_forward else 1)
                self._end_shard(shard)
            elif not self._is_over(replica):  # no backward has ended the step
                self._check_backward()
                replica.reduce_without_backward()
            if is_last:  # random numbers of the update are the same on all ranks
                seed_generators(stream_seed(self._seed, "update", self._step), device=self._device)
        except BaseException:
            if not self._is_over(replica):  # else the step itself is complete
                self._abort(shard)
            raise
        finally:
            replica.require_backward_grad_sync = before
            if self._is_over(replica):
                self._end_step()

    @staticmethod
    def _follow(replica: Replica, num_shards: int) -> None:
        """Takes part in other ranks' shards, before their last ones, where this rank has none or no samples."""
        for _ in range(num_shards):
            replica._follow_micro_batch()

    def _protocol_error(self, shard: int) -> str:
        """Returns the error if this shard must not begin now; "": it may."""
        if self._abort_reason:
            return self._abort_reason
        if self.running is not None:
            return f"shard {shard} is marked inside of shard {self.running}: end that block first"
        if shard == self._next:
            return ""
        first, last = self.shards.start, self.shards.stop - 1
        return (
            f"expected shard {self._next}, got shard {shard}: this rank computes the shards {first} to "
            f"{last} in this order, each once a step (model.shards)"
        )

    def _refuse(self, replica: Replica, error: str) -> None:
        """Ends the step together with the other ranks, and raises the error on all of them."""
        self.usage.protocol_error, begun = error, self._next - self.shards.start
        if not begun:
            replica.prepare()
        self._follow(replica, (len(self.shards) - begun if begun else self._most) - 1)
        replica.prepare()
        self._begin_sums(self._layouts.current, replica.num_steps)
        self.has_samples, self.running = True, self.shards[-1]
        replica._begin_without_samples()
        replica._finish()
        self._end_step()
        replica.raise_pending()

    def _begin_step(self, layout: Layout, step: int) -> None:
        """Begins a step.

        Raises:
            RuntimeError: a gradient from before the step would be lost.
        """
        for slot in layout.slots:
            if (had := slot.parameter.grad) is not None and had.any():
                raise RuntimeError(
                    f"{slot.name} has a gradient before the first shard of a step, and would lose it: call zero_grad()"
                )
            slot.parameter.grad = None
        self._begin_sums(layout, step)
        self.has_samples = False
        for bucket in layout.buckets if layout.has_memory else ():
            bucket.restore_views()

    def _begin_sums(self, layout: Layout, step: int) -> None:
        self._step, self._slots, self._of_shard = step, layout.slots, None
        self._has_forward = self._has_begun = False
        self._versions = [parameter._version for parameter in layout.parameters]
        self._overflows = any(parameter.dtype in OVERFLOWING for parameter in layout.parameters)
        self._gradients, self._squares = GradientSums(), dict[Slot, Tensor]()
        self._totals, self._parts = Stack(Tensor.add_), Stack(Tensor.add_)
        self.seen = (0.0, 0.0, {})
        self._buffers.begin_step()

    @uncompiled
    def before_forward(self, replica: Replica, _inputs: object) -> None:
        """Begins a forward of the running shard; ignores one outside of a block, which may have no backward.

        Raises:
            RuntimeError: the step is over.
        """
        if self.running is None or not torch.is_grad_enabled():
            return
        if replica._is_no_step():
            return
        self._refuse_if_begun()
        self._has_forward = self.has_samples = True
        if self._buffers.has_counters:
            self._buffers.before_forward()

    def _refuse_if_begun(self) -> None:
        """Raises RuntimeError in the block of the last shard, once the backward that ends the step has begun."""
        if self._has_begun:
            raise RuntimeError(
                f"shard {self.shards[-1]}: a backward in its block has ended the step, and another one follows; of "
                "several backwards in a shard, put all but the last into model.no_sync()"
            )

    def _is_over(self, replica: Replica) -> bool:
        """Returns True in the block of the last shard, once a backward has ended the step."""
        return self.running is not None and replica.num_steps > self._step

    def _check_backward(self) -> None:
        """Raises RuntimeError if the running shard has had a forward, and no backward."""
        if self._has_forward and all(slot.parameter.grad is None for slot in self._slots):
            raise RuntimeError(
                f"shard {self.running}: its block has a forward, but no backward that reaches a parameter"
            )

    def _end_shard(self, shard: int) -> None:
        """Ends a shard that is not this rank's last one."""
        self._check_backward()
        self._take_totals()
        self._take(self._slots)
        self._take_square()
        self._buffers.end_shard(shard, self._places[shard], has_forward=self._has_forward)
        self.running = None

    def _end_step(self) -> None:
        """Ends a step with the block of its last shard: buffers become those of all shards. Collective."""
        last = self.shards[-1]
        self._buffers.end_shard(last, self._places[last], has_forward=self._has_forward)
        self._buffers.end_step()
        self._reset()

    def _abort(self, shard: int) -> None:
        """Aborts the step, because an error has left the block of a shard; the next block raises it on all ranks."""
        for slot in self._slots:
            slot.parameter.grad = None
        what = f"an error has left the block of shard {shard}, so that its step was not made"
        self._reset(f"{what}: restart from the last checkpoint")

    # --- the last shard: its backward reduces the buckets ------------------------------------------------------------

    def begin(self, layout: Layout, share: Share) -> Share:
        """Begins the backward of the last shard.

        Raises:
            RuntimeError: backward is outside of that shard's block, or the second one in it; it creates a graph;
                parameters have changed since the last shard.
        """
        if self.running != self.shards[-1]:
            raise RuntimeError(
                f"backward outside of the block of a shard: this replica adds up {self.num_shards} shards; put forward "
                "and backward of each into `with model.shard(…)`, for each of model.shards"
            )
        self._refuse_if_begun()
        if torch.is_grad_enabled() and is_in_backward():
            raise RuntimeError("backward(create_graph=True) by shards: gradients are added in place; leave one out")
        if layout.slots is not self._slots:
            raise RuntimeError("parameters were frozen or unfrozen between two shards of a step: do so between steps")
        for slot, before in zip(self._slots, self._versions, strict=True):
            if slot.parameter._version != before:
                raise RuntimeError(
                    f"{slot.name} has changed between the shards of a step, so that not all shards have the same: call "
                    "optimizer.step() after the last block, and let no forward change a parameter"
                )
        self._has_begun, self._of_shard = True, share.totals
        self._take_totals()
        totals = share.totals and share.totals._replace(measure=False, parts=None)
        return Share(totals, self.num_shards, self.has_samples)

    def write_totals(self, layout: Layout, totals: Totals) -> None:
        """Writes the totals of this rank's nodes to their rows."""
        for row, node in zip(layout.totals.rows, self._totals.nodes, strict=False):
            row.copy_(node)

    def has_gradient(self, parameter: Tensor) -> bool:
        return parameter.grad is not None or self._gradients.has(parameter)

    def fill(self, bucket: Bucket) -> list[Slot]:
        """Writes this rank's nodes to the rows of a full bucket. Returns the slots without a gradient in any shard."""
        self._take(bucket.slots)
        return self._gradients.fill(bucket, self._num_nodes)

    def write_parts(self, layout: Layout) -> None:
        """Writes the measurements of this rank's nodes to the rows of flags; row 0 has the rank's flags."""
        self._take_square()
        layout.flags.rows[1:] = 0
        for row, node in zip(layout.flags.rows, self._parts.nodes, strict=False):
            squares, *counts = node.unbind()
            row[-3:] = torch.stack([*counts, squares])

    # --- the contribution of a shard ----------------------------------------------------------------------------------

    def _take(self, slots: Sequence[Slot]) -> None:
        """Takes the gradients of the running shard."""
        assert self.running is not None
        is_plain = self._wire is None and not self._overflows and not self._measures and self.running != self._watched
        self._gradients.take(slots, self._places[self.running], None if is_plain else self._prepared)

    def _prepared(self, slot: Slot, gradient: Tensor) -> Tensor:
        """Returns the tensor that is added up in place of a gradient."""
        if self._measures:
            self._squares[slot] = total_norm(block_norms([gradient])).double().square()
        if self.running == self._watched:
            self.seen[2][slot.name] = checksum(gradient)
        if gradient.dtype in OVERFLOWING:
            gradient.mul_(1 / overflow_headroom(self.num_shards))
        if self._wire is not None:
            num_items = 1 if self._of_shard is None else max(1, int(self._of_shard.items_on_host))
            gradient = rounded(gradient, wire_format(self._wire, num_items))
        return gradient

    @property
    def _measures(self) -> bool:
        """Returns True if the running shard is measured: the first of two siblings is."""
        assert self.running is not None
        is_first = self._of_shard is not None and is_node(range(self.running, self.running + 2), self.num_shards)
        return is_first and self._of_shard is not None and self._of_shard.measure

    def _take_totals(self) -> None:
        if self.running is not None:
            vector = torch.zeros(NUM_TOTALS, dtype=torch.float64, device=self._device)
            if (totals := self._of_shard) is not None:
                totals.write(vector)
                if self.running == self._watched:
                    self.seen = float(totals.loss_sum), float(totals.items_on_host), self.seen[2]
            self._totals.push(vector, self._places[self.running])

    def _take_square(self) -> None:
        """Adds the squared norm of the running shard's gradient to the sum, in a step that measures."""
        totals, squares, self._squares = self._of_shard, self._squares, {}
        if totals is None or not totals.measure or self.running is None:
            return
        part = Parts()
        if squares and totals.items_on_host:
            in_order = [squares[slot] for slot in self._slots if slot in squares]
            part = Parts.of(torch.stack(in_order).sum() / float(totals.loss_scale) ** 2, totals.items_on_host)
        vector = torch.stack([torch.as_tensor(each, dtype=torch.float64, device=self._device) for each in part])
        self._parts.push(vector, self._places[self.running])


class GradientSums:
    """The stack of the gradients of one step. Each slot is taken once per shard, alone or together with others."""

    def __init__(self) -> None:
        self._levels: list[dict[Slot, Tensor]] = []

    def has(self, parameter: Tensor) -> bool:
        """Returns True if a shard had a gradient of a parameter."""
        return any(slot.parameter is parameter for sums in self._levels for slot in sums)

    @torch.no_grad()
    def take(self, slots: Sequence[Slot], place: TreeSlot, prepare: Prepare | None = None) -> None:
        """Takes complete gradients of a shard: `p.grad` becomes None.

        Args:
            prepare: returns the tensor that is added up in place of a gradient.
        """
        while len(self._levels) <= place.level:
            self._levels.append({})
        level, sums = place.level, self._levels[place.level]
        for slot in slots:
            if (gradient := slot.parameter.grad) is not None:
                gradient = gradient.detach() if gradient.requires_grad else gradient
                sums[slot] = gradient if prepare is None else prepare(slot, gradient)
                slot.parameter.grad = None
        for _ in range(place.num_merges):
            level, above, sums = level - 1, sums, self._levels[level - 1]
            if both := [slot for slot in slots if slot in above and slot in sums]:
                torch._foreach_add_([sums[slot] for slot in both], [above[slot] for slot in both])
            for slot in slots:
                if slot in above:
                    sums.setdefault(slot, above.pop(slot))
        self._move_in(slots, level)

    @torch.no_grad()
    def fill(self, bucket: Bucket, num_nodes: int) -> list[Slot]:
        """Writes this rank's nodes to the rows of a bucket, once all its gradients were taken.

        Returns:
            The slots for which no shard had a gradient.
        """
        for level in range(num_nodes):
            self._move_in(bucket.slots, level)
            for slot in bucket.slots:
                if slot not in self._levels[level]:
                    slot.rows[level].zero_()
        return [slot for slot in bucket.slots if not any(slot in sums for sums in self._levels[:num_nodes])]

    def _move_in(self, slots: Sequence[Slot], level: int) -> None:
        """Copies sums to their rows in the buckets, if they have one."""
        sums = self._levels[level]
        here = [slot for slot in slots if slot in sums and level < len(slot.rows)]
        if moving := [slot for slot in here if sums[slot] is not slot.rows[level]]:
            rows = [slot.rows[level] for slot in moving]
            copy_into(moving, rows, [sums[slot] for slot in moving])
            sums.update(zip(moving, rows, strict=True))


class UsageByShards(Usage):
    """Expects a gradient of every parameter in some shard; reports a protocol error of one rank on all ranks."""

    looks_ahead = False  # earlier shards may have gradients that the last backward does not reach

    def unused_error(self, missing: Sequence[Slot] | None) -> UnusedParameters | ConfigError | None:
        """Returns an error that names protocol errors, or parameters that no shard of any rank has used. Collective."""
        errors = all_gather_object(self._comm, self.protocol_error)
        self.protocol_error = ""
        if any(errors):
            return ConfigError("; ".join(f"rank {rank}: {what}" for rank, what in enumerate(errors) if what))
        everyone = all_gather_object(self._comm, None if missing is None else [slot.index for slot in missing])
        unused = set.intersection(*(set(indices) for indices in everyone if indices is not None))
        return super().unused_error(None if missing is None else [slot for slot in missing if slot.index in unused])


def rounded(gradient: Tensor, form: WireFormat) -> Tensor:
    """Returns a gradient encoded in a wire format and decoded again, in the order of its indices."""
    flat = gradient.reshape(-1).div(form.shrink)
    encoded = torch.zeros(form.length(flat.numel()), dtype=form.dtype, device=flat.device)
    form.encode(flat, encoded)
    form.decode(encoded, flat)
    return flat.mul_(form.shrink).view(gradient.shape)


def check_shards(
    module: nn.Module, comm: Communicator, num_shards: int, wire: WireName | None, hook: object | None
) -> None:
    """Raises ConfigError if the gradients of a module cannot be added up by shards."""
    is_sparse = bool(sparse_weights(module))
    refuse(Setup(same_bits=num_shards, waits=waits(module), is_sparse=is_sparse, wire=wire, hook=hook))
    check_untied(module, "num_shards", instead="no num_shards", buffers_alone=True)
    for name, parameter in module.named_parameters():
        if parameter.device != comm.device:
            raise ConfigError(
                f"{name} is on {parameter.device}: by shards, all parameters are on {comm.device}; move it there"
            )
