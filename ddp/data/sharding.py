"""Sharding: what the shards of a batch are made of. Files are dealt to shards, and never to ranks.

    sample          a step is a run of the epoch's order, cut into shards         any order, any data
    file            shard v of every step comes from lane v, a run of files       a worker opens its lanes' files only
    full_shuffle    each lane goes through everything, in an order of its own     an epoch has each sample V times
    off             every lane reads the same samples in the same order           an epoch has each sample V times
    a function      lane v has the samples of function(v, V), in a random order   rank and world size, where V is W
    auto            file, if there are files, and as many as shards; else sample

Lanes (`lanes.py`) depend on V = `batch.num_shards` alone. So the samples of a step are the same at any number of
workers, and a run can go on with more or fewer.

Read before: `lanes.py`. Read next: `sampler.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ddp.data.lanes import Copies, Lanes, Listed, Shuffles
from ddp.data.orders import Blocks, Order, Permutation
from ddp.data.permutation import Indices, indices
from ddp.errors import ConfigError
from ddp.wording import counted

OwnSharding = Callable[[int, int], Iterable[int]]
"""A function (shard, number of shards) → the samples of that lane."""

SHARDINGS = ("auto", "file", "sample", "full_shuffle", "off")


class Dealt(NamedTuple):
    """An order whose shards are what was asked for, and in words what was chosen."""

    order: Order
    note: str


def dealt(
    samples: Any, order: Order | None, sharding: str | OwnSharding, *, num_shards: int, batch: int | None
) -> Dealt:
    """Returns the order in which the steps of an epoch read a data set.

    Args:
        samples: the data set; `file_sizes`, if it has them, are the numbers of samples of its files.
        order: None for a permutation, or for blocks where files are dealt.
        sharding: one of `SHARDINGS`, or a function.
        num_shards: shards of a step.
        batch: samples of a step; None where it changes inside an epoch.

    Raises:
        ConfigError: the choices contradict each other or the data.
    """
    if not callable(sharding) and sharding not in SHARDINGS:
        raise ConfigError(f"sharding={sharding!r}: take one of {', '.join(SHARDINGS)}, or a function (shard, shards)")
    if order is not None and order.num_samples != len(samples):
        raise ConfigError(f"the order is made for {order.num_samples} samples, and the data have {len(samples)}")
    blocks = order if isinstance(order, Blocks) else _blocks_of(samples) if order is None else None
    if sharding == "auto":
        can_deal = blocks is not None and batch is not None and _num_files(blocks) >= num_shards
        sharding = "file" if can_deal else "sample"
    if sharding == "sample":
        return Dealt(order or Permutation(len(samples)), "")
    name = "file" if sharding == "file" else f"{sharding}" if isinstance(sharding, str) else "a function"
    if batch is None:
        raise ConfigError(
            f"sharding={name}: takes equally many samples from a lane in all steps of an epoch, and this batch changes "
            "inside an epoch; take sharding=sample, or a batch of constant size"
        )
    if sharding == "file":
        return _by_file(blocks, num_shards=num_shards, batch=batch)
    if callable(sharding):
        lists = _own_lists(sharding, len(samples), num_shards)
        return Dealt(Lanes(lists, lists.sizes, batch=batch), "")
    if batch % num_shards:
        raise ConfigError(f"sharding={name}: all lanes are equally long; take a batch that {num_shards} shards divide")
    if sharding == "off":
        places: Order = Copies(order or Permutation(len(samples)), num_shards)
    elif order is None or isinstance(order, Permutation):
        places = Shuffles(len(samples), num_shards)
    else:
        raise ConfigError(f"sharding=full_shuffle: shuffles by itself; leave the order ({order.in_words()}) out")
    note = f"an epoch has each of the {len(samples):,} samples {num_shards} times, because of sharding={name}"
    return Dealt(Lanes(places, np.full(num_shards, places.length // num_shards), batch=batch), note)


def _blocks_of(samples: Any) -> Blocks | None:
    """Returns the usual order of samples that lie in files; None if they do not say in which."""
    sizes = getattr(samples, "file_sizes", None)
    return None if sizes is None else Blocks(sizes)


def _num_files(blocks: Blocks) -> int:
    return int(np.count_nonzero(blocks.file_sizes))


def _by_file(blocks: Blocks | None, *, num_shards: int, batch: int) -> Dealt:
    """Returns an order in which each shard follows a run of files of its own."""
    if blocks is None:
        raise ConfigError(
            "sharding=file: it is not known which samples lie in one file (the data have no file_sizes), or the order "
            "is not one of blocks; take sharding=sample, or order=blocks"
        )
    files = counted(_num_files(blocks), "file")
    if _num_files(blocks) < num_shards:
        raise ConfigError(
            f"sharding=file: {files} cannot be dealt to {counted(num_shards, 'shard')}; write more and smaller files, "
            f"set num_shards to {_num_files(blocks)} or less, or take sharding=sample"
        )
    lengths = _equal_lanes(blocks.length, num_shards, batch)
    order = Lanes(Blocks(blocks.file_sizes, window=blocks.window, lanes=lengths), lengths, batch=batch)
    return Dealt(order, f"{files} are dealt to {counted(num_shards, 'shard')}, samples mixed {blocks.window} at a time")


def _equal_lanes(length: int, num_shards: int, batch: int) -> Indices:
    """Returns how many samples each shard has in all steps of an epoch, if each is cut as evenly as can be."""
    num_whole, rest = divmod(length, batch)
    edges = np.arange(num_shards + 1)
    return num_whole * np.diff(edges * batch // num_shards) + np.diff(edges * rest // num_shards)


def _own_lists(function: OwnSharding, num_samples: int, num_shards: int) -> Listed:
    """Returns the lanes of the user's own function."""
    lists = []
    for shard in range(num_shards):
        mine = indices(function(shard, num_shards))
        if len(mine) and not 0 <= mine.min() <= mine.max() < num_samples:
            raise ConfigError(
                f"the sharding function returned sample {mine.min() if mine.min() < 0 else mine.max()} for shard "
                f"{shard}, and the data have samples 0 … {num_samples - 1}"
            )
        lists.append(mine)
    if not sum(map(len, lists)):
        raise ConfigError(f"the sharding function returned no sample for any of {counted(num_shards, 'shard')}")
    return Listed(lists, num_samples=num_samples)
