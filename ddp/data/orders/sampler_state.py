"""All samplers say where a run is in its data by (seed, epoch, consumed), and whose share is meant by a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from ddp.errors import ConfigError


class SamplerState(NamedTuple):
    """The position of a run in its data."""

    seed: int
    epoch: int
    consumed: int  # samples of this epoch that all ranks together have trained on


def replicas(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Returns number of ranks and rank, from `torch.distributed` where they are None.

    Raises:
        ConfigError: `rank` outside [0, num_replicas), or no default for them.
    """
    if num_replicas is None or rank is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                f"num_replicas={num_replicas} and rank={rank} have no default, as torch.distributed is not "
                "initialised: call ddp.init() first, or pass both"
            )
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
    if num_replicas < 1:
        raise ConfigError(f"the number of workers must be at least 1, got {num_replicas}")
    if not 0 <= rank < num_replicas:
        raise ConfigError(f"invalid rank {rank}: with {num_replicas} workers it must lie in [0, {num_replicas - 1}]")
    return num_replicas, rank


def read_state(state: Mapping[str, Any], *, length: int) -> SamplerState:
    """Returns the position that a sampler saved, or the next epoch's beginning if that epoch was over.

    Raises:
        ConfigError: a field is missing, or the position lies outside this data set.
    """
    missing = [name for name in SamplerState._fields if name not in state]
    if missing:
        raise ConfigError(f"a sampler's state needs {', '.join(SamplerState._fields)}; missing: {', '.join(missing)}")
    loaded = SamplerState(*(int(state[name]) for name in SamplerState._fields))
    if loaded.epoch < 0 or not 0 <= loaded.consumed <= length:
        raise ConfigError(
            f"{loaded} is no position in a data set of {length} samples: "
            "it was saved with another data set; give that one, or start without the sampler's state"
        )
    return loaded if loaded.consumed < length else SamplerState(loaded.seed, loaded.epoch + 1, 0)
