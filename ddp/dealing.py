"""Says who reads which sample, from the settings of a run alone: before it, in it, and years after it.

    data.order, data.sharding, batch.…, seed  ──▶  arguments of `ddp.fit`, or of a sampler of any rank
                                                                │
    python -m ddp where runs/mine --step 4711                   ├──▶  the samples of a step, by rank and shard
    python -m ddp where runs/mine --sample 123 --epoch 7        └──▶  the step, rank and loader process of a sample

Nothing is logged for that: orders are pure functions, which know their inverse.

Read before: `optimization.py`, `data/sampler.py`. Read next: `trained.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml

from ddp import optimization
from ddp.address import from_address, is_address
from ddp.components import load_data
from ddp.config import Config
from ddp.config_reader import from_plain, settings_of
from ddp.data.orders import Blocks, Fixed, Order, Permutation, Stratified, Weighted
from ddp.data.sampler import Micro, StepPlan, TrainSampler, sampler_of
from ddp.data.sharding import OwnSharding
from ddp.data.splits import Samples, Splits
from ddp.errors import ConfigError
from ddp.wording import counted, program


def dealing(config: Config, splits: Splits) -> dict[str, Any]:
    """Returns what says which samples are in which step, shard and forward, as arguments of `fit` and `sampler_of`."""
    return {
        "order": _order(config, splits.train),
        "sharding": _sharding(config),
        "global_batch": optimization.batch_of(config, splits.train),
        "num_shards": config.batch.num_shards,
        "micro_size": config.batch.micro_size,
        "seed": config.seed,
        "skip_steps": tuple(config.data.skip_steps) or None,
    }


def check_dealing(config: Config, splits: Splits, state: Mapping[str, Any] | None = None) -> None:
    """Checks that samples can be dealt as asked for.

    Args:
        state: of the sampler of the run to be resumed.

    Raises:
        ConfigError: they cannot, or not from that state on.
    """
    sampler = _sampler(config, splits, rank=0)
    if state is not None:
        try:
            sampler.load_state_dict(state)
        except ConfigError as error:
            raise ConfigError(
                f"resume={config.resume}: {error}; the settings are data.order, data.window, data.sharding, "
                "batch.global_size, and batch.num_shards, which is at least the number of workers"
            ) from error


def _sampler(config: Config, splits: Splits, *, rank: int) -> TrainSampler:
    """Returns the sampler of a rank, at the beginning of the run."""
    choices = dealing(config, splits)
    try:
        sampler, _ = sampler_of(splits.train, rank=rank, world_size=config.cluster.workers, **choices)
    except ConfigError as error:
        prefix = "data." if str(error).startswith(("sharding=", "skip_steps=")) else f"data={config.data.name}: "
        raise ConfigError(f"{prefix}{error}") from error
    return sampler


def _order(config: Config, samples: Samples) -> Order | None:
    """Returns the order of the training samples; None for the usual one.

    Raises:
        ConfigError: the data set does not have what the order goes by.
    """
    match config.data.order:
        case "permutation":
            return Permutation(len(samples))
        case "fixed":
            return Fixed(len(samples))
        case "blocks":
            return Blocks(_said_by(samples, config, "file_sizes"), window=config.data.window)
        case "weighted":
            return Weighted(_said_by(samples, config, "weights"))
        case "stratified":
            return Stratified(_said_by(samples, config, "targets"))
    return None


def _said_by(samples: Samples, config: Config, name: str) -> Any:
    """Returns an attribute of a data set that has one number for each sample, or for each file."""
    found = getattr(samples, name, None)
    if found is None:
        raise ConfigError(
            f"data.order={config.data.order}: needs the {name} of data={config.data.name}, which that does not have; "
            f"give the data set an attribute `{name}`, or take another order"
        )
    return found


def _sharding(config: Config) -> str | OwnSharding:
    """Returns the word for how shards are made, or the user's own function."""
    name = config.data.sharding
    if not is_address(name):
        return name
    return cast(OwnSharding, from_address(name, key="data.sharding", folder=config.run.code))


# ------------------------------------------------------------------------------------------------------ where was it?


def where(run: Path, *, step: int | None, sample: int | None, epoch: int | None) -> str:
    """Returns an answer about a run that was started from the command line.

    Raises:
        ConfigError: the run has no settings, or not just one question was asked.
    """
    if (step is None) == (sample is None) or (sample is None) != (epoch is None):
        raise ConfigError("ask for --step N, or for --sample N --epoch N")
    path = settings_of(run)
    if path is None:
        raise ConfigError(f"{run} holds no config.yaml: is it the folder of a run of {program()} train?")
    config = from_plain(yaml.safe_load(path.read_text(encoding="utf-8")))
    splits = load_data(config)
    if step is not None:
        return samples_of_step(config, splits, step)
    return place_of_sample(config, splits, cast(int, sample), cast(int, epoch))


def samples_of_step(config: Config, splits: Splits, step: int) -> str:
    """Returns, in words, which samples each rank has in a step of the run, counted from 1.

    Raises:
        ConfigError: the run has no such step.
    """
    samplers = [_sampler(config, splits, rank=rank) for rank in range(config.cluster.workers)]
    num_steps, _ = samplers[0].end(epochs=config.epochs, num_steps=config.max_steps)
    if not 1 <= step <= num_steps:
        raise ConfigError(f"--step {step}: the run has steps 1 to {num_steps}")
    lines = []
    for rank, sampler in enumerate(samplers):
        sampler.seek(step)
        plan = next(sampler.plans())
        before = _num_micros_before(sampler, plan)
        if not rank:
            lines.append(f"step {step:,}, in epoch {plan.epoch}: {counted(plan.size, 'sample')}")
        for number, micro in enumerate(plan.micros):
            lines += _lines_of(micro, rank, _loader(config, before + number), splits.train)
        if not plan.micros:
            lines.append(f"rank {rank}: none")
    return "\n".join(lines)


def place_of_sample(config: Config, splits: Splits, sample: int, epoch: int) -> str:
    """Returns, in words, in which steps of an epoch a sample is read, and by whom. Epochs are counted from 0.

    Raises:
        ConfigError: there is no such sample or epoch.
    """
    first = _sampler(config, splits, rank=0)
    if not 0 <= sample < first.order.num_samples:
        raise ConfigError(f"--sample {sample}: the data have samples 0 to {first.order.num_samples - 1}")
    if epoch < 0:
        raise ConfigError(f"--epoch {epoch}: epochs are counted from 0")
    found = [
        _place(config, splits, epoch * first.length + position)
        for position in first.order.positions(sample, seed=config.seed, epoch=epoch)
    ]
    name = f"sample {sample}{_file_of(splits.train, sample)}, epoch {epoch}"
    return "\n".join(f"{name}: {each}" for each in found) or f"{name}: not drawn"


def _place(config: Config, splits: Splits, position: int) -> str:
    """Returns who reads the sample at a position of the run."""
    for rank in range(config.cluster.workers):
        sampler = _sampler(config, splits, rank=rank)
        step = sampler.step_at(position)
        if step is None:
            return f"left out, by data.skip_steps={config.data.skip_steps}"
        num_steps, _ = sampler.end(epochs=config.epochs, num_steps=config.max_steps)
        if step > num_steps:
            return f"never read: that would be in step {step:,}, and the run has {num_steps:,}"
        sampler.seek(step)
        plan = next(sampler.plans())
        before = _num_micros_before(sampler, plan)
        for number, micro in enumerate(sampler.parts(range(plan.position, plan.position + plan.size))):
            if position % sampler.length in micro.indices:
                where = f"step {step:,}, rank {rank}, {_loader(config, before + number)}shard {micro.shard}"
                return f"{where}, part {micro.part}" if config.batch.micro_size else where
    raise AssertionError(position)


def _num_micros_before(sampler: TrainSampler, plan: StepPlan) -> int:
    """Returns how many micro-batches the rank has had in the epoch before a step of it."""
    steps = sampler.steps_before(plan)
    sizes, numbers = np.unique([len(step) for step in steps], return_counts=True)
    return sum(sampler.num_micros(int(size)) * int(number) for size, number in zip(sizes, numbers, strict=True))


def _loader(config: Config, number: int) -> str:
    """Returns who fetches a rank's micro-batch with this number in an epoch: DataLoader's processes take turns."""
    processes = config.loader.num_workers
    return f"loader process {number % processes}, " if processes else ""


def _lines_of(micro: Micro, rank: int, loader: str, samples: Samples) -> Iterator[str]:
    """Yields the samples of a micro-batch, by file if they lie in files."""
    part = f", part {micro.part}" if micro.part else ""
    yield f"rank {rank}, {loader}shard {micro.shard}{part}:"
    by_file: dict[str, list[int]] = {}
    for sample in micro.indices:
        by_file.setdefault(_file_of(samples, sample), []).append(sample)
    for file, numbers in by_file.items():
        yield f"    {' '.join(map(str, numbers))}{file}"


def _file_of(samples: Samples, sample: int) -> str:
    """Returns the name of a sample's file, in words, if it lies in one that has a name."""
    addresses = getattr(samples, "addresses", None)
    if addresses is None:
        return ""
    ends = np.cumsum(np.asarray(cast(Any, samples).file_sizes))
    return f"  in {addresses[int(np.searchsorted(ends, sample, side='right'))]}"
