"""From settings to the samples that each rank reads: order, sharding, steps.

    data.order, data.sharding, batch.…, seed  ──▶  arguments of `ddp.fit`, or of a sampler of any rank

Where data or sharding are the user's own, `sampler_facts` keeps what a sampler reads of them, and `StandInData`
replaces them later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import numpy as np

from ddp.data.orders.order import Blocks, Fixed, Order, Permutation, Stratified, Weighted
from ddp.data.orders.sampler import TrainSampler, sampler_of
from ddp.data.orders.sharding import OwnSharding
from ddp.data.orders.steps import Batches
from ddp.data.samples import Samples, Splits
from ddp.data.sets.validation import selection_in
from ddp.errors import ConfigError
from ddp.run.assembly.components import batch_of
from ddp.run.settings.address import from_address, is_address, own_parts
from ddp.run.settings.config import Config
from ddp.train.arguments import round_length


def batches_of(config: Config, splits: Splits) -> Batches:
    """Returns how samples become steps.

    Raises:
        ConfigError: the data lack what the order needs.
    """
    return Batches(
        order=_order(config, splits.train),
        sharding=_sharding(config, splits.train),
        num_shards=config.batch.num_shards,
        micro_size=config.batch.micro_size,
        seed=config.seed,
        skip_steps=cast(Any, tuple(config.data.skip_steps) or None),
        collate=splits.collate,
    )


def check_sampling(config: Config, splits: Splits, state: Mapping[str, Any] | None = None) -> None:
    """Checks that the settings can share samples out among ranks.

    Args:
        state: the sampler's, in the run to be resumed.

    Raises:
        ConfigError: they cannot, or not from that state.
    """
    sampler = sampler_for(config, splits, rank=0)
    if state is not None:
        try:
            sampler.load_state_dict(state)
        except ConfigError as error:
            if str(error).startswith("skip_steps="):
                raise ConfigError(f"data.{error}") from error
            if str(error).startswith("the run has set apart"):
                raise ConfigError(f"resume={config.resume}: {error}") from error
            raise ConfigError(
                f"resume={config.resume}: {error}; the settings are data.order, data.window, data.sharding, "
                "batch.global_size, and batch.num_shards, which is at least the number of workers"
            ) from error
    elif not sampler.end(epochs=config.epochs, num_steps=config.max_steps)[0]:
        raise ConfigError(f"data.skip_steps={config.data.skip_steps}: leaves out all steps of the run; name fewer")


def num_parts(config: Config) -> int:
    """Returns the number of parts of a step, each of which a worker computes."""
    return config.strategy.num_parts(config.cluster.workers)


def sampler_for(config: Config, splits: Splits, *, rank: int) -> TrainSampler:
    """Returns the sampler of a rank, at the beginning of the run."""
    size = batch_of(config, splits.train)
    shares = {**batches_of(config, splits).sampler_arguments, "global_batch": size}
    try:
        rounds = round_length(config.strategy)
        sampler, _ = sampler_of(splits.train, rank=rank, world_size=num_parts(config), rounds=rounds, **shares)
    except ConfigError as error:
        prefix = f"data={config.data.name}: "
        if str(error).startswith(("sharding=", "skip_steps=")):
            prefix = "data."
        elif str(error).startswith(("the sharding function", "shard ")):
            prefix = f"data.sharding={config.data.sharding}: "
        raise ConfigError(f"{prefix}{error}") from error
    return sampler


def _order(config: Config, samples: Samples) -> Order | None:
    """Returns the order of the training samples; None for the usual one.

    Raises:
        ConfigError: the data set lacks what the order needs.
    """
    match config.data.order:
        case "auto" if config.data.window is not None:
            return Blocks(_attribute_of(samples, config, "file_sizes"), window=config.data.window)
        case "permutation":
            return Permutation(len(samples))
        case "fixed":
            return Fixed(len(samples))
        case "blocks":
            return Blocks(_attribute_of(samples, config, "file_sizes"), window=config.data.window)
        case "weighted":
            return Weighted(_attribute_of(samples, config, "weights"))
        case "stratified":
            return Stratified(_attribute_of(samples, config, "targets"))
    return None


def _attribute_of(samples: Samples, config: Config, name: str) -> Any:
    """Returns an attribute of a data set that has one number for each sample, or for each file."""
    found = getattr(samples, name, None)
    if found is None:
        asked = f"window={config.data.window}" if config.data.order == "auto" else f"order={config.data.order}"
        raise ConfigError(
            f"data.{asked}: needs the {name} of data={config.data.name}, which that does not have; give the data set "
            f"an attribute `{name}`, or leave the setting out"
        )
    return found


def _sharding(config: Config, samples: Samples) -> str | OwnSharding:
    """Returns the word for how shards are made, or the user's own function."""
    name = config.data.sharding
    if not is_address(name):
        return name
    whole = samples if (part := selection_in(samples)) is None else part.samples
    if isinstance(whole, StandInData):
        return lambda shard, _: whole.shards[shard]
    return cast(OwnSharding, from_address(name, key="data.sharding", folder=config.run.code))


# ------------------------------------------------------------------------------------- without the user's own code


class StandInData:
    """Placeholder for the user's own samples without their code: has what a sampler reads of them, but no samples.

    Args:
        facts: the result of `sampler_facts`.
    """

    shards: Sequence[Sequence[int]]  # of the user's own sharding, if there is one

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.num_samples: int = facts["num_samples"]
        vars(self).update(facts)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        raise IndexError(f"sample {index} is not at hand")


def sampler_facts(config: Config, samples: Samples) -> dict[str, Any] | None:
    """Returns, for JSON, what a sampler reads of the user's own data or sharding; None if neither is the user's own."""
    if not own_parts({"data": asdict(config.data)}):
        return None
    asked = {"file_sizes", "addresses"}
    asked |= {"weights"} if config.data.order == "weighted" else set()
    asked |= {"targets"} if config.data.order == "stratified" else set()
    asked |= {"lengths"} if config.batch.tokens is not None else set()
    whole = samples if (part := selection_in(samples)) is None else part.samples  # `where` sets the same share apart
    found = {name: getattr(whole, name, None) for name in sorted(asked)}
    facts = {"num_samples": len(whole), **{name: _plain(each) for name, each in found.items() if each is not None}}
    sharding = _sharding(config, samples)
    if callable(sharding):
        num_shards = config.batch.num_shards or num_parts(config)
        facts["shards"] = [_plain(sharding(shard, num_shards)) for shard in range(num_shards)]
    return facts


def _plain(numbers: Any) -> list[Any]:
    """Returns a tensor, an array, or another iterable as a list."""
    plain: list[Any] = numbers.tolist() if hasattr(numbers, "tolist") else np.asarray(list(numbers)).tolist()
    return plain
