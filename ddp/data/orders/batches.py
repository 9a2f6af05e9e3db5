"""Says how the samples of a data set become the steps of a run: `ddp.Batches`, an argument of `ddp.fit`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddp.data.orders.order import Order
from ddp.data.orders.sharding import OwnSharding
from ddp.data.orders.steps import checked_range
from ddp.data.samples import Collate
from ddp.errors import ConfigError
from ddp.setting import Uneven, check_values, setting


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Says how samples become steps: in which order, in which parts of a batch, in which forwards.

    Attributes:
        order: says which samples an epoch has where, such as `ddp.data.Weighted(weights)`; None: each once, at random.
        sharding: "sample", "file", "full_shuffle", "off", or a function (shard, number of shards) → its samples:
            `ddp/data/orders/sharding.py`. "auto": by file, if the data have `file_sizes` and as many files as shards.
        num_shards: parts of a batch; None: those of the run to be resumed, or one for each rank.
        micro_size: most samples of one forward; larger shares are accumulated. None: no limit.
        skip_steps: first and last of the steps whose samples are left out, counted from 1.
        uneven: what happens where an iterable ends on one rank before another: "join", "stop_all" or "raise".
        seed: of the samples' order and of dropout. The program's own generators are afterwards as before.
        collate: makes a batch of a list of samples, in any nested form; None for the DataLoader's, or torch's default.

    Raises:
        ConfigError: a field is of another type, or out of its bounds.
    """

    order: Order | None = None
    sharding: str | OwnSharding = "auto"
    num_shards: int | None = setting(None, "parts of a batch", at_least=1)
    micro_size: int | None = setting(None, "most samples of one forward", at_least=1)
    skip_steps: tuple[int, int] | None = None
    uneven: Uneven = "join"
    seed: int = setting(0, "of all random numbers", at_least=0)
    collate: Collate | None = None

    def __post_init__(self) -> None:
        check_values(self)
        if not (self.order is None or isinstance(self.order, Order)):
            raise ConfigError(
                f"order={self.order!r:.60}: give an order of ddp.data, such as ddp.data.Fixed(len(data)), or None"
            )
        if self.skip_steps is not None:
            object.__setattr__(self, "skip_steps", checked_range(self.skip_steps))

    @property
    def dealing(self) -> dict[str, Any]:
        """Returns the fields that say who gets which sample, as arguments of `sampler_of`."""
        names = ("order", "sharding", "num_shards", "micro_size", "skip_steps", "seed")
        return {name: getattr(self, name) for name in names}
