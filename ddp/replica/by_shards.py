"""The running step of a replica that adds up shards: where it is, and what each shard has brought.

    with model.shard(0):                      p.grad is empty, buffers are those of the step
        loss_of(model(x0), y0).backward()     gradients stay here, and go on the stack (`shard_tree.py`)
    with model.shard(1):                      p.grad is that of shard 0, to which autograd adds; buffers are the step's
        loss_of(model(x1), y1).backward()     this rank's last shard: the backward that reduces full buckets

A shard that is marked twice, left out or out of order, or that an error has left, is told with the verdicts of a step,
so that all ranks raise it. What a rank finds wrong inside of a block is raised there, on that rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ddp.collectives.shards import is_node, nodes_by_rank, owned
from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.comm.reduction import OVERFLOWING, overflow_headroom
from ddp.comm.wire_format import WireFormat, wire_format
from ddp.errors import ConfigError, UnusedParameters
from ddp.gradients.bucket import Bucket, Slot
from ddp.gradients.layout import Layout
from ddp.gradients.totals import NUM_TOTALS, Parts, Totals
from ddp.optim.norms import block_norms, total_norm
from ddp.replica.broadcast import BufferSync, checksum
from ddp.replica.settlement import Usage
from ddp.replica.shard_buffers import ShardBuffers, version_of
from ddp.replica.shard_tree import GradientSums, Place, Prepare, Stack, places
from ddp.replica.sync_batchnorm import waits
from ddp.replica.tied import check_untied
from ddp.setting import Narrow, WireName


class ByShards:
    """The step that a rank makes shard by shard.

    Args:
        buffers: of the replica.
        num_shards: of a batch.
        wire: the narrow format to which the gradients of each shard are rounded; None: they are not. Their sums travel
            in their own type, because a sum that is rounded depends on where it is rounded.

    Attributes:
        shards: of this rank.
        running: the shard in whose block the program is.
        has_samples: a shard of this step has had a forward.
        seen: of the shard that is watched, in the last step: the sum of its losses, the number of items in it, and by
            the parameter's name, the checksum of its gradient.

    Raises:
        ConfigError: there are fewer shards than ranks.
    """

    def __init__(self, comm: Communicator, buffers: BufferSync, num_shards: int, wire: Narrow | None = None) -> None:
        if num_shards < comm.world_size:
            raise ConfigError(
                f"num_shards={num_shards} is less than {comm.world_size} workers, so some would compute nothing: take "
                f"at least {comm.world_size} shards, or fewer workers"
            )
        self.num_shards, self.shards = num_shards, owned(comm.rank, comm.world_size, num_shards)
        self.running: int | None = None
        self._watched: int | None = None
        self.seen: tuple[float, float, dict[str, int]] = (0.0, 0.0, {})
        self.has_samples = self._overflows = self._is_in_block = False
        self._keeps_apart = False  # no shard joins its sibling, because a gradient comes in several pieces
        self._wire = wire
        self._places = places(self.shards, num_shards)
        self._num_nodes = len(nodes_by_rank(comm.world_size, num_shards)[comm.rank])
        self.buffers = ShardBuffers(comm, buffers, num_shards)
        self.abandon()

    def abandon(self) -> None:
        """Lets a step begin, because the one before is over, or has broken off."""
        self.running, self._next = None, self.shards.start
        self._versions = list[tuple[int, int]]()  # of parameters, when the block began
        self._ended: int | None = None  # the last shard, once its backward has ended the step
        self._broken_off = ""
        self._slots: Sequence[Slot] = ()
        self._slot_of: Mapping[int, Slot] = {}
        self._given, self._is_learned = set[int](), False  # parameters whose gradients autograd is to add to
        self._gradients, self._totals, self._parts = GradientSums(), Stack(Tensor.add_), Stack(Tensor.add_)
        self._place, self._joins, self._has_forward = Place(0, 0), False, False
        self._noted, self._moved, self._squares = set[int](), set[Slot](), dict[Slot, Tensor]()
        self._of_shard: Totals | None = None
        self._has_parts = self._is_last_backward = False

    def watch(self, shard: int | None) -> None:
        """Looks at the gradients of a shard of the next steps, before they are added to others; or at none."""
        self._watched = shard

    def mistake(self, shard: int) -> str:
        """Returns what is wrong if the block of this shard begins now; "": nothing."""
        if self._broken_off:
            return self._broken_off
        if self.running is not None:
            return f"shard {shard} is marked inside of shard {self.running}: end that block before"
        if shard == self._next:
            return ""
        first, last = self.shards.start, self.shards.stop - 1
        return (
            f"shard {shard} is marked where shard {self._next} was to come: this rank computes the shards {first} to "
            f"{last} in this order, each once a step (model.shards)"
        )

    # --- a shard, in the order of time -------------------------------------------------------------------------------

    def begin(self, shard: int) -> None:
        """Begins a shard."""
        self.running, self._next, self._has_forward, self._is_in_block = shard, shard + 1, False, True
        self._noted.clear()
        self._moved.clear()
        self._squares.clear()
        self._has_parts = self._is_last_backward = False
        self._of_shard = None
        place = self._places[shard]
        is_apart = shard == self._watched or self._wire is not None or self._overflows or self._keeps_apart
        self._joins = place.has_sibling and not is_apart
        self._place = place.joined if self._joins else place
        self._gradients.begin(self._slots, self._place, joins=self._joins)
        self._given = {id(slot.parameter) for slot in self._slots if slot.parameter.grad is not None}
        self._versions = self._versions_now()

    def begin_step(self, layout: Layout, *, has_hooks: bool) -> None:
        """Begins a step.

        Args:
            has_hooks: the program has hooks on parameters, which are to see each shard's gradient by itself.

        Raises:
            RuntimeError: a gradient from before the step would be lost.
        """
        for slot in layout.slots:
            if (had := slot.parameter.grad) is not None and had.any():
                raise RuntimeError(
                    f"{slot.name} has a gradient before the first shard of a step, and would lose it: call zero_grad()"
                )
        self.abandon()
        self._slots, self._slot_of, self._is_learned = layout.slots, layout.slot_of, layout.is_learned
        self.has_samples, self.seen = False, (0.0, 0.0, {})
        for bucket in layout.buckets if layout.has_memory else ():
            bucket.mend()
        self._keeps_apart |= has_hooks
        self._overflows = any(parameter.dtype in OVERFLOWING for parameter in layout.parameters)
        self.buffers.begin_step()

    def expect_parts(self) -> None:
        """Takes note, before the first backward of a shard, that there will be several: their sum comes first."""
        self._refuse_if_over()
        self._has_parts = True
        if self._joins and self.running is not None and not self._noted:
            self._joins, self._place = False, self._places[self.running]
            self._gradients.begin(self._slots, self._place, joins=False)
            self._given = set()

    def leave(self) -> None:
        """Ends the block of a shard, whatever has happened in it."""
        self._is_in_block = False

    def break_off(self, shard: int) -> None:
        """Breaks the step off, because an error has left the block of a shard; the next block tells all ranks."""
        if self._ended is not None:  # the step itself is whole
            return
        for slot in self._slots:
            slot.parameter.grad = None
        self.abandon()
        what = f"an error has left the block of shard {shard}, so that its step was not made"
        self._broken_off = f"{what}: start anew, from the last checkpoint"

    def _refuse_if_over(self) -> None:
        """Raises RuntimeError in the block of the last shard, once a backward has ended the step."""
        if self._is_in_block and self.running is None:
            raise RuntimeError(
                f"shard {self.shards[-1]}: a backward in its block has ended the step, and another one follows; of "
                "several backwards in a shard, put all but the last into model.no_sync()"
            )

    def before_forward(self) -> None:
        """Begins a forward of the running shard.

        Raises:
            RuntimeError: the step is over.
        """
        self._refuse_if_over()
        if self.running is None:  # a forward outside of any block, of which no backward may come
            return
        self.buffers.before_forward()
        self._has_forward = self.has_samples = True

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Takes note that autograd has added to the gradients of parameters.

        Raises:
            RuntimeError: it has added twice to that of the sibling.
        """
        for parameter in parameters:
            if id(parameter) in self._noted:
                if id(parameter) in self._given:
                    raise self._refusal(parameter)
                self._keeps_apart = True  # of a re-entrant checkpoint, say
            self._noted.add(id(parameter))

    def _refusal(self, parameter: Tensor) -> RuntimeError:
        name = next(slot.name for slot in self._slots if slot.parameter is parameter)
        return RuntimeError(
            f"{name} got several gradients in shard {self.running}, and elsewhere they would be added up in another "
            "order: of several backwards in a shard, put all but the last into model.no_sync(); to re-entrant "
            "checkpoints, pass use_reentrant=False"
        )

    def move_in(self, parameter: Tensor) -> None:
        """Takes a large gradient as soon as it is ready, so that its own memory is free at once.

        Not while parts of a shard are in `no_sync`, because their sum is not complete then.

        Raises:
            RuntimeError: it is the second of this shard.
        """
        slot = self._slot_of.get(id(parameter))
        is_complete = (self._is_last_backward or not self._has_parts) and self._is_learned and not self._keeps_apart
        if self.running is None or slot is None or parameter.grad is None or not is_complete:
            return
        if slot in self._moved:
            raise self._refusal(parameter)
        self._moved.add(slot)
        self._gradients.take([slot], self._place, self._prepare)

    def ride_along(self, totals: Totals) -> None:
        """Takes the totals of the running shard, so far; the last call counts."""
        self._of_shard = totals

    def end(self) -> None:
        """Ends a shard that is not this rank's last one."""
        self.check_backward()
        self._check_parameters()
        self._take_totals()
        self._gradients.take(self._slots, self._place, self._prepare)
        self._take_square()
        assert self.running is not None
        self._end_buffers(self.running)
        self.running = None

    @property
    def is_silent(self) -> bool:
        """Returns True if the running shard has had a forward, and no gradient yet."""
        return self._has_forward and not self._noted

    def check_backward(self) -> None:
        """Raises RuntimeError if the running shard has had a forward, and no backward."""
        if self.is_silent:
            raise RuntimeError(
                f"shard {self.running}: a forward in its block, and no backward that reaches a parameter"
            )

    def _versions_now(self) -> list[tuple[int, int]]:
        return [version_of(slot.parameter) for slot in self._slots]

    def _check_parameters(self) -> None:
        for slot, before, now in zip(self._slots, self._versions, self._versions_now(), strict=True):
            if now != before:
                raise RuntimeError(
                    f"{slot.name} has changed inside of the block of shard {self.running}, so that not all shards have "
                    "the same: call optimizer.step() after the last block, and let no forward change a parameter"
                )

    def begin_refused(self, layout: Layout) -> None:
        """Begins the last shard of a step that will not be made, so that this rank ends it together with the others."""
        self.abandon()
        self._slots, self.has_samples, self.running = layout.slots, True, self.shards[-1]
        self._place, self._versions = self._places[self.running], self._versions_now()
        self._gradients.begin(self._slots, self._place, joins=False)
        self.buffers.begin_step()

    # --- the last shard: its backward reduces the buckets ------------------------------------------------------------

    def begin_last(self, layout: Layout) -> None:
        """Begins the backward of the last shard.

        Raises:
            RuntimeError: it is outside of that shard's block, or other parameters need a gradient than before.
        """
        if self.running != self.shards[-1]:
            raise RuntimeError(
                f"backward outside of the block of a shard: this replica adds up {self.num_shards} shards; put forward "
                "and backward of each into `with model.shard(…)`, for each of model.shards"
            )
        if layout.slots is not self._slots:
            raise RuntimeError("parameters were frozen or unfrozen between two shards of a step: do so between steps")
        self._check_parameters()
        self._is_last_backward = True
        self._take_totals()

    def write_totals(self, layout: Layout) -> None:
        """Writes the totals of this rank's nodes to their rows."""
        for row, node in zip(layout.rows_of_totals, self._totals.nodes, strict=False):
            row.copy_(node)

    def fill(self, bucket: Bucket, ready: Iterable[Tensor]) -> list[Slot]:
        """Leaves this rank's nodes in the rows of a full bucket.

        Args:
            ready: parameters whose gradients this backward has computed.

        Returns:
            The slots of which no shard had a gradient.

        Raises:
            RuntimeError: autograd has added twice to the gradient of the sibling, or to one that was taken.
        """
        self.note(ready)
        bucket.mend()
        self._gradients.take(bucket.slots, self._place, self._prepare)
        return self._gradients.fill(bucket, self._num_nodes)

    def write_squares(self, layout: Layout) -> None:
        """Writes what was measured of this rank's nodes to the rows of verdicts; row 0 has the rank's verdicts."""
        self._take_square()
        layout.rows_of_verdicts[1:] = 0
        for row, node in zip(layout.rows_of_verdicts, self._parts.nodes, strict=False):
            squares, *counts = node.unbind()
            row[-3:] = torch.stack([*counts, squares])

    def end_step(self) -> None:
        """Ends the step, whose buckets hold the mean, but for its buffers."""
        self._ended, self.running = self.running, None

    def end_buffers(self) -> None:
        """Ends the buffers of a step that is over, with the block of its last shard. Collective."""
        ended, self._ended = self._ended, None
        if ended is not None:
            self._end_buffers(ended)
            self.buffers.end_step()
            self.abandon()

    # --- what a shard has brought ------------------------------------------------------------------------------------

    @property
    def _prepare(self) -> Prepare | None:
        """Returns what is done with the gradients of the running shard before they are added up, if anything is."""
        is_plain = self._wire is None and not self._overflows
        return None if is_plain and not self._measures and self.running != self._watched else self._prepared

    def _prepared(self, slot: Slot, gradient: Tensor) -> Tensor:
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
        """Returns True if the running shard is measured: of two siblings the first, which joins no other."""
        assert self.running is not None
        is_first = is_node(range(self.running, self.running + 2), self.num_shards)
        return is_first and self._of_shard is not None and self._of_shard.measure

    def _take_totals(self) -> None:
        if self.running is not None:
            vector = torch.zeros(NUM_TOTALS, dtype=torch.float64, device=self._slots[0].parameter.device)
            (self._of_shard or Totals()).write(vector)
            if self._of_shard is not None and self.running == self._watched:
                self.seen = float(self._of_shard.loss_sum), float(self._of_shard.items_on_host), self.seen[2]
            self._totals.push(vector, self._places[self.running])

    def _take_square(self) -> None:
        """Adds the squared norm of the running shard's gradient to those before it, in a step that measures."""
        totals = self._of_shard
        if totals is None or not totals.measure or self.running is None:
            return
        part = Parts()
        if self._squares and totals.items_on_host:
            squares = [self._squares[slot] for slot in self._slots if slot in self._squares]
            part = Parts.of(torch.stack(squares).sum() / float(totals.loss_scale) ** 2, totals.items_on_host)
        device = self._slots[0].parameter.device
        vector = torch.stack([torch.as_tensor(each, dtype=torch.float64, device=device) for each in part])
        self._parts.push(vector, self._places[self.running])

    def _end_buffers(self, shard: int) -> None:
        self.buffers.end_shard(shard, self._places[shard], has_forward=self._has_forward)


class UsageByShards(Usage):
    """Expects a gradient of every parameter in some shard; tells all ranks of a mistake that one has made.

    Attributes:
        mistake: of this rank.
    """

    mistake = ""

    def expected(self, layout: Layout) -> None:
        """Returns None, because other shards than the last may have gradients that its backward does not lead to."""

    def must_compare(self, layout: Layout, missing: Sequence[Slot], computed: Callable[[], Iterable[Tensor]]) -> bool:
        return bool(missing) or bool(self.mistake)

    def complaint(self, missing: Sequence[Slot] | None) -> UnusedParameters | ConfigError | None:
        """Returns the error that names a mistake, or the parameters that no shard of any rank has used. Collective."""
        mistakes = all_gather_object(self._comm, self.mistake)
        self.mistake = ""
        if any(mistakes):
            return ConfigError("; ".join(f"rank {rank}: {what}" for rank, what in enumerate(mistakes) if what))
        everyone = all_gather_object(self._comm, None if missing is None else [slot.index for slot in missing])
        unused = set.intersection(*(set(indices) for indices in everyone if indices is not None))
        return super().complaint(None if missing is None else [slot for slot in missing if slot.index in unused])


def rounded(gradient: Tensor, form: WireFormat) -> Tensor:
    """Returns a gradient as it would be once it has travelled in a format, in the order of its indices."""
    flat = gradient.reshape(-1).div(form.shrink)
    encoded = torch.zeros(form.length(flat.numel()), dtype=form.dtype, device=flat.device)
    form.encode(flat, encoded)
    form.decode(encoded, flat)
    return flat.mul_(form.shrink).view(gradient.shape)


def check_shards(module: nn.Module, comm: Communicator, wire: WireName | None, hook: object | None) -> None:
    """Raises ConfigError if the gradients of a module cannot be added up by shards."""
    if waits(module):
        raise ConfigError("num_shards with SyncBatchNorm: its statistics are sums over workers; take BatchNorm")
    check_untied(module, "num_shards", instead="no num_shards", buffers_alone=True)
    if wire == "fp32":
        raise ConfigError("num_shards with wire='fp32': gradients are added up in their own type; leave it out")
    if hook is not None:
        raise ConfigError(
            f"num_shards with hook={hook!r}: what a hook remembers is of a host, and changes with the number of hosts; "
            "leave one out"
        )
    for name, parameter in module.named_parameters():
        if parameter.device != comm.device:
            raise ConfigError(
                f"{name} is on {parameter.device}: by shards, all parameters are on {comm.device}; move it there"
            )
