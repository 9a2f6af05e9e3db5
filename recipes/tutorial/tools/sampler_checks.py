"""Checks a reader's sampler: every sample of a step on one rank, shares alike, parts that no world size changes.

All of it is counted, on steps of a data set whose length fits nothing: the last step is smaller than the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from types import ModuleType
from typing import NamedTuple

from ddp.data.orders.order import Fixed
from ddp.data.orders.sampler import Micro, StepPlan
from ddp.units import counted
from recipes.tutorial.tools.mistake import Mistake, raised

LENGTH, GLOBAL_BATCH = 33, 10  # steps of 10, 10, 10 and 3 samples


class Cut(NamedTuple):
    """The numbers by which steps are cut."""

    world_size: int
    num_shards: int
    micro_size: int | None

    def __str__(self) -> str:
        parts = "" if self.micro_size is None else f", micro_size {self.micro_size}"
        return f"{counted(self.world_size, 'rank')}, {counted(self.num_shards, 'shard')}{parts}"


def sampler(module: ModuleType, sizes: Sequence[int] = range(1, 9)) -> Iterator[str]:
    """Checks exercise 08."""
    for world_size in sizes:
        _try(module, Cut(world_size, world_size, None))
    yield f"{sizes[0]} to {sizes[-1]} ranks: every sample of a step is on one rank, and shares differ by one at most"
    for world_size, micro_size in product(sizes, (1, 2, 3)):
        _try(module, Cut(world_size, world_size, micro_size))
    yield "micro_size 1 to 3: shards are cut into as few parts as can be, of about one size"
    for world_size, num_shards in product(sizes, (8, 12)):
        if world_size <= num_shards:
            _try(module, Cut(world_size, num_shards, 2))
    yield "8 and 12 shards: the parts of a step are the same with any number of ranks"


def _try(module: ModuleType, cut: Cut) -> None:
    """Raises Mistake unless every step is cut as it should be."""
    plans = []
    for rank in range(cut.world_size):
        written = module.TrainSampler(
            Fixed(LENGTH),
            global_batch=GLOBAL_BATCH,
            rank=rank,
            world_size=cut.world_size,
            num_shards=cut.num_shards,
            micro_size=cut.micro_size,
        )
        try:
            plans.append(list(written.plans()))
        except Exception as error:
            mistake = raised(str(cut), error, module)
            raise mistake or Mistake(str(cut), f"rank {rank}: {type(error).__name__}: {error}") from None
    try:
        for step in zip(*plans, strict=True):
            _check(cut, step)
    except (TypeError, AttributeError) as error:  # what was yielded is no Micro of whole numbers
        hint = "yield Micro(shard, part, positions)"
        raise Mistake(str(cut), f"a part is not as it should be: {error}", hint) from None


def _check(cut: Cut, plans: Sequence[StepPlan]) -> None:
    """Looks at all ranks' plans of one step."""
    position, size = plans[0].position, plans[0].size
    step = f"{cut}, a step of {counted(size, 'sample')} from {position} on"
    for rank, plan in enumerate(plans):
        for micro in plan.micros:
            if not micro.indices:
                hint = "a shard may have no samples; then it has no parts either"
                raise Mistake(step, f"rank {rank} has a part without samples: {_shown(micro)}", hint)
    _check_samples(step, plans, range(position, position + size))
    numbers = [sum(len(micro.indices) for micro in plan.micros) for plan in plans]
    if cut.num_shards % cut.world_size == 0 and max(numbers) - min(numbers) > 1:
        hint = "cut at i * size // n: consecutive floors differ by one at most"
        raise Mistake(step, f"shares differ by more than one: the ranks have {numbers} samples", hint)
    for rank, plan in enumerate(plans):
        _check_parts(f"{step}, rank {rank}", cut, plan, rank)


def _check_samples(step: str, plans: Sequence[StepPlan], samples: range) -> None:
    """Raises Mistake unless every sample of the step is on one rank, once."""
    places = [(rank, index) for rank, plan in enumerate(plans) for micro in plan.micros for index in micro.indices]
    count = Counter(index for _, index in places)
    ranks = {index: [str(rank) for rank, other in places if other == index] for index in count}
    for index in sorted(count):
        if index not in samples:
            hint = "yield the positions, which are the values in `step`, not their places in it"
            raise Mistake(step, f"sample {index} on rank {ranks[index][0]} does not belong to this step", hint)
        if count[index] > 1:
            last = plans[int(ranks[index][-1])]
            hint = "nothing is padded: where sizes do not divide, some shares are smaller"
            if last.micros[0].indices[0] == index:
                hint = "neighbours share a border: where one share ends, the next begins"
            raise Mistake(step, f"sample {index} is there twice, on ranks {' and '.join(ranks[index])}", hint)
    if missing := [index for index in samples if index not in count]:
        hint = "the last share is not smaller than its samples: nothing is dropped where sizes do not divide"
        raise Mistake(step, f"sample {missing[0]} is missing: no rank has it", hint)


def _check_parts(step: str, cut: Cut, plan: StepPlan, rank: int) -> None:
    """Raises Mistake unless a rank has the parts of its shards, in order, and as few as can be."""
    first, stop = (number * cut.num_shards // cut.world_size for number in (rank, rank + 1))
    shards = sorted({micro.shard for micro in plan.micros})
    if foreign := [shard for shard in shards if not first <= shard < stop]:
        hint = "rank r has the shards from r * num_shards // world_size up to where the next rank begins"
        raise Mistake(step, f"it has shard {foreign[0]}, and its shards are {first} to {stop - 1}", hint)
    for shard in range(first, stop):
        micros = [micro for micro in plan.micros if micro.shard == shard]
        begin, end = (plan.position + number * plan.size // cut.num_shards for number in (shard, shard + 1))
        found = [index for micro in micros for index in micro.indices]
        if found != list(range(begin, end)):
            hint = "shard i begins at i * size // num_shards, so that it is the same at every number of ranks"
            raise Mistake(step, f"shard {shard} has samples {found}, expected {list(range(begin, end))}", hint)
        sizes = [len(micro.indices) for micro in micros]
        most = cut.micro_size or max(1, end - begin)
        if sizes and max(sizes) > most:
            raise Mistake(step, f"a part of {max(sizes)} samples", f"parts have at most micro_size={most}")
        if len(sizes) > -(-(end - begin) // most):
            hint = f"as few parts as can be, of at most {counted(most, 'sample')}"
            raise Mistake(step, f"shard {shard} is cut into parts of {sizes} samples", hint)
        if sizes and max(sizes) - min(sizes) > 1:
            hint = "part i of n begins at i * size // n"
            raise Mistake(step, f"shard {shard} is cut unevenly, into parts of {sizes} samples", hint)
        if [micro.part for micro in micros] != list(range(len(micros))):
            numbers = [micro.part for micro in micros]
            raise Mistake(step, f"the parts of shard {shard} are numbered {numbers}", "they count from 0 in each shard")


def _shown(micro: Micro) -> str:
    return f"shard {micro.shard}, part {micro.part}"
