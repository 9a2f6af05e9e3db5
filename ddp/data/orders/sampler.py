"""The sampler of `fit` says which samples a rank reads, in which order: each once an epoch, in steps of a global batch.

The state is (seed, epoch, consumed), and `consumed` counts *global* samples of the epoch. No rank occurs in it, so it
is O(1), equal on all ranks, and valid at any other world size. A saved state also names the order that it belongs to,
the number of steps that were made, the ranges of steps that were left out, and those that were made before their turn.

TrainSampler cuts an epoch like this (B = 10 samples a step, V = 4 shards, W = 2 workers, micro-batches of at most 2):

    order         |............ consumed ............|  0  1  2  3  4  5  6  7  8  9  |.......
    shards        boundary i at position i*B//V         0  1 |2  3  4 |5  6 |7  8  9 |
    workers       boundary r at shard r*V//W            rank 0        |rank 1        |
    micro-batches parts of one shard, evenly            01   |2  34   |56   |7  89   |

Proof that the shares of two workers differ by at most one sample if W divides V: rank r begins at shard rV/W, that
is at position floor((rV/W) B/V) = floor(rB/W), and consecutive floors of multiples of B/W differ by floor(B/W) or
ceil(B/W). The same holds for the shards with V for W. If W does not divide V, one worker computes at most one shard
more than another, so that shares differ by at most one shard and one sample.

Shards depend on V alone, and micro-batches on their shard alone. So a step's parts, and the random streams keyed by
them, are the same at every world size.

Cost: a rank looks up its own samples only, some thousand at a time; no list of all samples exists.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from ddp.data.orders.order import Checksum, FirstOf, Order, Permutation, indices, length_of
from ddp.data.orders.sharding import OwnSharding, shard_order
from ddp.data.orders.steps import (
    BatchSizes,
    BatchWarmup,
    RoundLength,
    RoundSizes,
    SamplerState,
    Skipped,
    Steps,
    StepsLeft,
    checked_range,
    gaps,
    joined,
    read_state,
    replicas,
)
from ddp.data.orders.token_budget import TokenBudget
from ddp.errors import ConfigError

_LOOKED_UP = 4096  # samples that are looked up together
_ADDED_UP = 1 << 16  # samples that are left out, and added up together


class Micro(NamedTuple):
    """The samples of one forward and backward: part `part` of shard `shard` of a step."""

    shard: int
    part: int
    positions: Sequence[int]  # in the epoch; never empty
    indices: Sequence[int] = ()  # the samples there; empty as long as only positions are planned


class StepPlan(NamedTuple):
    """One step: `size` samples from global `position` of `epoch`; `micros` are this rank's (none if it has none).

    Attributes:
        is_last: this rank's stream ends with it. Data with a length do not say so.
        num_inner: it is a round of this number of inner steps, and each of `micros` is one; 0: gradients are averaged.
    """

    epoch: int
    position: int
    size: int
    micros: tuple[Micro, ...]
    is_last: bool = False
    num_inner: int = 0

    def inner(self, number: int) -> StepPlan:
        """Returns an inner step, counted from 0, as a separate step; of a step without inner steps, the whole."""
        begin, end = (each * self.size // max(1, self.num_inner) for each in (number, number + 1))
        return self._replace(position=self.position + begin, size=end - begin) if self.num_inner else self


class TrainSampler:
    """Plans steps of a global batch over an epoch's order, without padding or dropping samples.

    The last step of an epoch may be smaller, and a rank may then have no sample at all.

    A step is a transaction: `plans()` looks ahead without moving, `commit(plan)` moves once the step has happened.

        for plan in sampler.plans():    # from the state to the end of its epoch
            ...                         # forward, backward, agree, optimizer step
            sampler.commit(plan)

    Where workers lease steps, these happen in any order inside an epoch, and `commit_leased(plan)` records them.

    Args:
        order: says which samples an epoch reads, in which order; or a number of samples, for a `Permutation` of them.
        global_batch: samples per step of all ranks together, at least `world_size`; or how they grow; or a budget of
            tokens, which has its own order.
        rank, world_size: whose share to plan.
        num_shards: parts that a step is cut into, fixed for a run; at least `world_size`, which is the default. If it
            is a multiple of the world size, shares differ by at most one sample.
        micro_size: most samples in one forward; None for whole shards.
        seed: of the order.
        skip_steps: first and last of the steps, counted from 1, whose samples are left out. A run that is resumed
            counts on from the steps that it has made.
        rounds: steps are rounds, whose micro-batches are inner steps of a batch; then shards are ranks.

    Attributes:
        seen: the checksum of this rank's samples since the epoch began, to be compared with the expected one; None if
            that is not known.
        set_apart: as text, the samples that are set apart for validation; "": none.

    Raises:
        ConfigError: an argument cannot work; the message says which one, and the remedy.
    """

    def __init__(
        self,
        order: Order | int,
        *,
        global_batch: int | BatchWarmup | TokenBudget,
        rank: int,
        world_size: int,
        num_shards: int | None = None,
        micro_size: int | None = None,
        seed: int = 0,
        skip_steps: tuple[int, int] | None = None,
        rounds: RoundLength | None = None,
    ) -> None:
        num_shards = world_size if num_shards is None else num_shards
        if isinstance(global_batch, TokenBudget):
            order = _only_order(order, global_batch)
        order = _checked_order(order) if isinstance(order, Order) else Permutation(order)
        length = order.length
        if length < 1:
            raise ConfigError(f"the training set has {length} samples; check its path and its split")
        replicas(world_size, rank)
        if isinstance(global_batch, Steps):
            self.sizes: Steps = global_batch
        else:
            of_rounds = rounds and RoundSizes(length, global_batch, rounds)
            self.sizes = of_rounds or BatchSizes(length, global_batch)
        if isinstance(self.sizes, BatchSizes):
            _check_batch(self.sizes.batch, world_size, num_shards)
        if num_shards < world_size:
            raise ConfigError(
                f"num_shards={num_shards} is less than {world_size} workers, so some would compute nothing: "
                f"set it to a multiple of {world_size}"
            )
        if micro_size is not None and micro_size < 1:
            raise ConfigError(f"micro_size must be at least 1, got {micro_size}; leave it out for whole shards")
        self.order, self.length, self.global_batch = order, length, self.sizes.usual
        self.num_shards, self.micro_size = num_shards, micro_size
        self.rank, self.world_size = rank, world_size
        self.seen: Checksum | None = Checksum()
        self._as_planned = range(0)
        self.set_apart = ""
        self._skip_steps = None if skip_steps is None else checked_range(skip_steps)
        self._left_out: list[Skipped] = []  # one by one, by `leave_out`
        self._begin(SamplerState(seed, epoch=0, consumed=0), num_steps=0, skipped=())

    def _begin(
        self, state: SamplerState, *, num_steps: int, skipped: Sequence[Skipped], ahead: Sequence[range] = ()
    ) -> None:
        """Begins at a state.

        Args:
            num_steps: steps that were made.
            skipped: ranges that were left out.
            ahead: ranges that were made before their turn.
        """
        position = state.epoch * self.length + state.consumed
        last = ahead[-1].stop if ahead else position
        self._steps = StepsLeft(self.sizes, [each for each in skipped if each.stop <= last], ahead)
        if self._skip_steps is not None:
            self._steps = self._steps.with_range(self._skip_steps, num_steps=num_steps, position=position)
        self._seed, self._next = state.seed, self._steps.past(position)  # `length` positions an epoch
        self._num_steps, self._ahead = num_steps, list(ahead)
        self._origin = (num_steps, self._next, list(ahead))

    @property
    def _left(self) -> StepsLeft:
        """Returns the steps that are left, without those that were made before their turn since a state was loaded."""
        return StepsLeft(self.sizes, self._steps.skipped, self._ahead) if self._ahead else self._steps

    @property
    def num_samples(self) -> int | None:
        """Returns the length of the data set; None if it is unknown."""
        return self.order.num_samples

    @property
    def num_steps_per_epoch(self) -> int:
        """Returns the number of steps of a whole epoch, the smaller last one included, once the batch has grown."""
        return self.sizes.num_steps_per_epoch

    @property
    def state(self) -> SamplerState:
        """Returns the position after the last committed step before which all are committed."""
        return SamplerState(self._seed, *divmod(self._next, self.length))

    @property
    def position(self) -> int:
        """Returns how many samples all ranks together have trained on in the whole run."""
        return self._next + sum(map(len, self._ahead))

    @property
    def at_epoch_end(self) -> bool:
        """Returns True if no step of an epoch is left after the last committed one."""
        _, epoch, consumed = self.state
        if consumed == 0 or self._ahead:
            return not self._ahead
        return any(each.stop == self._next and 0 < each.start <= epoch * self.length for each in self._steps.skipped)

    def position_of(self, plan: StepPlan) -> int:
        """Returns how many samples the run has trained on before a step."""
        return plan.epoch * self.length + plan.position

    def plans(self) -> Iterator[StepPlan]:
        """Yields the steps from the present state to the end of its epoch. The state stays where it is."""
        return self._plans_from(self._next)  # the state at this call, not at the first next()

    def sizes_ahead(self, num_steps: int) -> set[int]:
        """Returns the sizes of so many steps from the present state on, all of one epoch; looks no sample up."""
        return {len(step) for step in islice(self._left.of_epoch(self._next), num_steps)}

    def _plans_from(self, position: int) -> Iterator[StepPlan]:
        epoch, steps = position // self.length, self._left.of_epoch(position)
        while ahead := list(islice(steps, max(1, _LOOKED_UP * self.world_size // self.global_batch))):
            micros = self._looked_up([self.micros(step) for step in ahead], epoch)
            for step, mine in zip(ahead, micros, strict=True):
                yield StepPlan(epoch, step.start, len(step), mine, num_inner=self._num_inner(step, epoch))

    def _looked_up(self, steps: Sequence[Sequence[Micro]], epoch: int) -> list[tuple[Micro, ...]]:
        """Returns the micro-batches of steps with the samples at their positions."""
        positions = indices(each for micros in steps for micro in micros for each in micro.positions)
        samples = iter(self.order.checked_samples(positions, seed=self._seed, epoch=epoch).tolist())
        return [
            tuple(micro._replace(indices=tuple(islice(samples, len(micro.positions)))) for micro in micros)
            for micros in steps
        ]

    def end(self, *, epochs: int | None, num_steps: int | None) -> tuple[int, int]:
        """Returns the steps that are left of the run, and the position after them.

        Args:
            epochs: of the whole run; None for no limit.
            num_steps: most steps from now on; None for no limit.
        """
        return self._left.end(self._next, epochs=epochs, num_steps=num_steps)

    def left_out_from(self, position: int) -> int | None:
        """Returns the first step of the range in which the sample at a position is skipped, if that lies ahead."""
        ahead = (each for each in self._steps.skipped if each.first > self._origin[0])
        return next((each.first for each in ahead if each.start <= position < each.stop), None)

    def step_at(self, position: int) -> int:
        """Returns the number of the run's step that has the sample at a position, not before the state loaded."""
        num_steps, begin, _ = self._origin
        return num_steps + self._steps.num_steps(begin, position + 1)

    def was_made(self, position: int) -> bool:
        """Returns True if the step that has the sample at a position was made before the state loaded."""
        _, begin, ahead = self._origin
        return position < begin or any(position in each for each in ahead)

    def seek(self, step: int) -> None:
        """Moves the state to where the run's step with this number begins, counted from 1; not before one loaded."""
        num_steps, begin, self._ahead = self._origin
        self._next = self._steps.past(self._steps.after(begin, max(0, step - 1 - num_steps)))

    def parts(self, step: Sequence[int]) -> Iterator[Micro]:
        """Yields this rank's parts of a step, with their positions, which `step` has."""
        # exercise 08: cut the step into shards, take this rank's, and cut each into parts of `micro_size` at most
        size, num_shards = len(step), self.num_shards
        first, end = (rank * num_shards // self.world_size for rank in (self.rank, self.rank + 1))
        for shard in range(first, end):
            mine = step[shard * size // num_shards : (shard + 1) * size // num_shards]
            num_parts = math.ceil(len(mine) / (self.micro_size or max(1, len(mine))))
            for part in range(num_parts):
                begin, stop = (i * len(mine) // num_parts for i in (part, part + 1))
                yield Micro(shard, part, mine[begin:stop])

    def part_of(self, plan: StepPlan, part: int, num_parts: int) -> StepPlan:
        """Returns the share of rank `part` of `num_parts` ranks in a step, for any rank of this sampler."""
        other = copy.copy(self)
        other.rank, other.world_size = part, num_parts
        [micros] = other._looked_up([list(other.parts(range(plan.position, plan.position + plan.size)))], plan.epoch)
        return plan._replace(micros=micros)

    def micros(self, step: Sequence[int]) -> list[Micro]:
        """Returns this rank's micro-batches of a step; of a round, the parts of its inner steps."""
        if not isinstance(self.sizes, RoundSizes):
            return list(self.parts(step))
        size, number = len(step), self.sizes.num_inner(len(step), self.world_size)
        cuts = [inner * size // number for inner in range(number + 1)]
        pieces = [step[begin:end] for begin, end in pairwise(cuts)]
        return [micro._replace(part=inner) for inner, piece in enumerate(pieces) for micro in self.parts(piece)]

    def _num_inner(self, step: Sequence[int], epoch: int) -> int:
        """Returns the inner steps of a step; 0 if gradients are averaged in it."""
        sizes, position = self.sizes, epoch * self.length + step[0]
        if not isinstance(sizes, RoundSizes) or position < sizes.batch.num_samples:
            return 0
        return sizes.num_inner(len(step), self.world_size)

    def num_micros(self, size: int) -> int:
        """Returns this rank's number of micro-batches in a step of this size."""
        return len(self.micros(range(size)))

    def commit(self, plan: StepPlan) -> None:
        """Moves the state past a step that has happened, at the end of an epoch to the beginning of the next one.

        Raises:
            ConfigError: the plan does not begin at the state (a step was left out, or committed twice).
        """
        if plan.epoch * self.length + plan.position != self._next:
            _, epoch, consumed = self.state
            raise ConfigError(
                f"the step at epoch {plan.epoch}, position {plan.position} cannot be committed: the sampler is at "
                f"epoch {epoch}, position {consumed}; commit each plan once, in the order of plans()"
            )
        self._next = self._left.past(self._next + plan.size)
        self._ahead = [each for each in self._ahead if each.stop > self._next]
        self._note(plan)

    def leave_out(self, number: int, position: int, size: int) -> None:
        """Leaves out a step that comes next, or later, as `skip_steps` does.

        Args:
            number: of the step in the run, from 1; the step that replaces it has the same.
            position: samples that the run has trained on before it.
            size: of the step, in samples.
        """
        left_out = Skipped(number, number, position, position + size)
        skipped = sorted([*self._steps.skipped, left_out], key=lambda each: each.start)
        self._steps, self._left_out = StepsLeft(self.sizes, skipped, self._steps.made), [*self._left_out, left_out]
        self._next = self._left.past(self._next)

    def commit_leased(self, plan: StepPlan) -> None:
        """Records a step that has happened, in any order inside the epoch; the state moves past it in its turn.

        Raises:
            ConfigError: it is a step of another epoch, or was committed already.
        """
        begin = self.position_of(plan)
        is_of_this_epoch = plan.epoch == self._next // self.length and begin > self._next
        if not is_of_this_epoch or any(begin in each for each in self._ahead):
            self.commit(plan)  # which refuses it, but in its turn
        else:
            self._ahead = joined(self._ahead, range(begin, begin + plan.size))
            self._note(plan)

    def _note(self, plan: StepPlan) -> None:
        """Counts a step that was committed, and its samples."""
        self._num_steps += 1
        if self.seen is not None:
            self.seen = self.seen.with_samples(chain.from_iterable(micro.indices for micro in plan.micros))

    @property
    def seen_in_epoch(self) -> Checksum | None:
        """The checksum of this rank's samples since the epoch began; None if some were taken as read."""
        return None if len(self._as_planned) and self._as_planned.stop // self.length == self.state.epoch else self.seen

    def take_as_planned(self) -> None:
        """Takes the samples of the epoch so far as read, because ranks that have read some of them are gone."""
        self.seen, self._as_planned = Checksum(), range(self._next // self.length * self.length, self._next)

    def take_seen(self) -> Checksum | None:
        """Returns `seen` at the end of an epoch, and resets it."""
        seen, self.seen = self.seen, Checksum()
        return seen

    def expected(self, epoch: int) -> Checksum | None:
        """Returns the checksum of all ranks' samples in an epoch; None if the order does not say."""
        expected, first = self.order.checksum(), epoch * self.length
        if expected is None:
            return None
        apart = list(self._steps.within(first, first + self.length))
        apart += gaps(apart, self._as_planned) if self._as_planned.start == first else []
        for each in apart:
            for begin in range(each.start, each.stop, _ADDED_UP):
                positions = np.arange(begin, min(begin + _ADDED_UP, each.stop)) - first
                samples = self.order.checked_samples(positions, seed=self._seed, epoch=epoch)
                expected = expected.without(Checksum.of(samples))
        return expected

    def state_dict(self) -> dict[str, Any]:
        """Returns seed, epoch, consumed, and what they belong to: equal on all ranks, and valid at any world size.

        It lacks steps that would be left out later, because a resumed run may leave out others.
        """
        position, last = self._next, self._ahead[-1].stop if self._ahead else self._next
        skipped = [each for each in self._steps.skipped if each.stop <= last]
        is_planned = skipped and skipped[-1][:2] == self._skip_steps and skipped[-1] not in self._left_out
        if is_planned and skipped[-1].stop == position and not self._ahead:
            position = skipped.pop().start
        state = SamplerState(self._seed, *divmod(position, self.length))
        about = {"order": self.order.identity, "length": self.length, "num_steps": self._num_steps}
        about |= {"set_apart": self.set_apart} if self.set_apart else {}
        first = state.epoch * self.length
        about |= {"ahead": [[each.start - first, each.stop - first] for each in self._ahead]} if self._ahead else {}
        return {**state._asdict(), **about, "skipped": [list(each) for each in skipped]}

    def places(self) -> Any:
        """Returns this rank's part of a state: None, but for data that are a stream."""
        return None

    def load_places(self, places: Sequence[Any]) -> None:
        """Takes the results of `places` on each rank."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state, with its seed.

        Raises:
            ConfigError: a field is missing, the position lies outside this data set or in an epoch of another order, or
                samples were trained on that are set apart now.
        """
        if (then := state.get("set_apart", "")) != self.set_apart:
            wrong = "of which it has trained on some" if self.set_apart else "so that it would train on those"
            raise ConfigError(
                f"the run has set apart {then or 'no samples'} for validation, and now that would be "
                f"{self.set_apart or 'none'}, {wrong}: give the same share, seed and data as then, or begin another run"
            )
        loaded, mine = read_state(state, length=self.length), self.order.identity
        saved, first = state.get("order", "not noted"), loaded.epoch * self.length
        ahead = [range(first + start, first + stop) for start, stop in state.get("ahead", ())]
        if (num_samples := loaded.consumed + sum(map(len, ahead))) and saved != mine:
            raise ConfigError(
                f"the state is one after {num_samples} of {self.length} samples of an epoch whose order was "
                f"{saved}, and this order is {mine}, so that samples would be read twice or never: give back that "
                "order, its data, its sharding, shards and batch, or resume from the end of an epoch"
            )
        position = first + loaded.consumed
        num_steps = int(state.get("num_steps", self.sizes.num_steps(0, position)))
        skipped = [Skipped(*each) for each in state.get("skipped", ())]
        if state.get("length", self.length) != self.length:  # their positions were those of other epochs
            skipped = [each._replace(start=0, stop=0) for each in skipped]
        self._begin(loaded, num_steps=num_steps, skipped=skipped, ahead=ahead)


def sampler_of(
    samples: Any,
    *,
    order: Order | None,
    sharding: str | OwnSharding,
    global_batch: int | BatchWarmup | TokenBudget,
    rank: int,
    world_size: int,
    num_shards: int | None,
    drop_last: bool = False,
    rounds: RoundLength | None = None,
    **choices: Any,
) -> tuple[TrainSampler, str]:
    """Returns the sampler of a data set, and a note on how its samples are shared, if that is not as usual.

    Args:
        samples: the data set.
        order, sharding: as in `sharding.shard_order`.
        drop_last: an epoch ends with its last whole step.
        choices: the other arguments of `TrainSampler`.

    Raises:
        ConfigError: the arguments contradict each other or the data.
    """
    num_shards = world_size if num_shards is None else num_shards
    if isinstance(global_batch, TokenBudget):
        order = _only_order(len(samples) if order is None else order, global_batch)
    batch = global_batch if isinstance(global_batch, int) else None
    if batch is not None and rounds is not None:
        batch = None if rounds.warmup_samples else batch * rounds.every
    chosen, note = shard_order(samples, order, sharding, num_shards=num_shards, batch=batch)
    chosen = _whole_steps(chosen, batch) if drop_last else chosen
    sampler = TrainSampler(
        chosen,
        global_batch=global_batch,
        rank=rank,
        world_size=world_size,
        num_shards=num_shards,
        rounds=rounds,
        **choices,
    )
    sampler.set_apart = getattr(samples, "set_apart", "")
    return sampler, note


# -------------------------------------------------------------------------------------------------- arguments and state


def _checked_order(order: Order) -> Order:
    """Returns an order of the user's own that says how long it is."""
    for name in ("num_samples", "length"):
        length_of(getattr(order, name, None), what=f"{type(order).__name__}.{name}")
    return order


def _only_order(order: Order | int, budget: TokenBudget) -> Order:
    """Returns the order of a budget.

    Raises:
        ConfigError: there is another one, or the lengths are those of other samples.
    """
    if isinstance(order, Order) and order is not budget:
        raise ConfigError(f"a budget of tokens orders samples by itself; leave the order ({order.in_words()}) out")
    if isinstance(order, int) and order != budget.num_samples:
        raise ConfigError(f"the budget has lengths of {budget.num_samples} samples, and the data have {order}")
    return budget


def _whole_steps(order: Order, batch: int | None) -> Order:
    """Returns the order without an incomplete last step.

    Raises:
        ConfigError: there is no whole step, or steps differ in size.
    """
    if batch is None:
        raise ConfigError("drop_last of the DataLoader: needs a global_batch that does not change; leave it out")
    if not (length := order.length // batch * batch):
        raise ConfigError(
            f"drop_last of the DataLoader: leaves no step, because an epoch has {order.length} samples, fewer than "
            f"global_batch={batch}; leave it out"
        )
    return order if length == order.length else FirstOf(order, length)


def _check_batch(batch: BatchWarmup, world_size: int, num_shards: int) -> None:
    """Raises ConfigError if some step has too few samples for the ranks or the shards."""
    smallest = batch.first
    if smallest < world_size:
        raise ConfigError(
            f"a global batch of {smallest} cannot be shared by {world_size} workers: "
            f"raise it to {world_size} or more, or use {max(smallest, 1)} worker(s)"
        )
    if smallest < min(num_shards, batch.last):
        raise ConfigError(
            f"a batch that grows from {smallest} samples cannot be cut into {num_shards} shards: begin with "
            f"{num_shards} samples or more, or set num_shards={smallest}"
        )
