"""Layers and losses that look at a whole batch, and what goes wrong where a rank's share is one sample, or none.

    BatchNorm                     one value per channel has no variance: torch raises at the first share of one sample
    SyncBatchNorm                 its forward waits for all ranks, so all need as many forwards
    track_running_stats=False     both hold in an evaluation, too
    a loss with collectives       it waits as SyncBatchNorm does

Shares of one sample come at the end of an epoch, and only at some world sizes. Whether they are too few depends on the
model: an image has many values per channel. So the first batch is tried with one sample of it, before the first step.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Never

from torch import nn

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.data.loading.iterable import IterableSampler
from ddp.data.loading.loader import num_evaluation_batches
from ddp.data.orders.sampler import TrainSampler
from ddp.errors import ConfigError
from ddp.replica.sync_batchnorm import waits
from ddp.setting import Uneven
from ddp.train.steps.state import TrainState
from ddp.train.tasks.task import Task, name_of

TOO_FEW = "Expected more than 1 value per channel"  # torch's words
REMEDY = (
    "leave some samples out of the data, take another global_batch, num_shards or micro_size, or ddp.SyncBatchNorm, "
    "which normalises over all ranks"
)


def may_have_one(comm: Communicator, sampler: TrainSampler, *, num_steps: int) -> list[int]:
    """Returns the sizes of steps, of those that may come, in which some rank computes one sample alone. Collective.

    Args:
        num_steps: that are left of the run.
    """
    if isinstance(sampler, IterableSampler):
        return []
    is_short = num_steps < sampler.num_steps_per_epoch
    sizes = {plan.size for plan in islice(sampler.plans(), num_steps)} if is_short else sampler.sizes.all()
    mine = [size for size in sizes if any(len(micro.positions) == 1 for micro in sampler.micros(range(size)))]
    return sorted(set[int]().union(*all_gather_object(comm, mine)))


def try_one_sample(module: nn.Module, one: Any, sizes: list[int]) -> None:
    """Raises ConfigError if the model cannot be trained on a share of one sample, and some step has one.

    Args:
        module: a copy, in the mode of training, in which some layers may be in evaluation mode.
        one: a batch of one sample, whose inputs come first.
        sizes: of the steps with such a share.
    """
    if not sizes or waits(module):
        return
    try:
        module(one[0] if isinstance(one, (tuple, list)) else one)
    except ValueError as error:
        if TOO_FEW in str(error):
            steps = f"a step of size {' or '.join(map(str, sizes[:3]))}"
            raise ConfigError(
                f"in {steps} a worker has a share of one sample, which BatchNorm cannot normalise: {REMEDY}"
            ) from error


def check_evaluation(
    module: nn.Module, num_samples: int, *, batch_size: int, world_size: int, num_shards: int | None = None
) -> None:
    """Raises ConfigError if ranks would wait for each other in the forwards of an evaluation.

    Args:
        batch_size, num_shards: as in `evaluate`.
    """
    if waits(module, in_evaluation=True):
        how: dict[str, Any] = {"batch_size": batch_size, "world_size": world_size, "num_shards": num_shards}
        refuse_uneven("SyncBatchNorm with track_running_stats=False", "leave that out", num_samples, **how)


def refuse_uneven(
    what: str, remedy: str, num_samples: int, *, batch_size: int, world_size: int, num_shards: int | None
) -> None:
    """Raises ConfigError if ranks have different numbers of forwards in an evaluation, and something waits in each."""
    by_rank = num_evaluation_batches(
        num_samples, batch_size=batch_size, world_size=world_size, num_shards=num_shards
    )
    if len(set(by_rank)) > 1:
        raise ConfigError(
            f"{what} waits in each forward for all workers, and in an evaluation of {num_samples} samples, "
            f"{batch_size} at once, {world_size} workers have different numbers of forwards: {remedy}, or take another "
            "batch size of the evaluation (ddp.Evaluation.batch), or another num_shards than "
            f"{world_size if num_shards is None else num_shards}"
        )


def check_waiting(state: TrainState, uneven: Uneven, max_unreadable: int, what: str = "SyncBatchNorm") -> None:
    """Raises ConfigError if layers of the replica, or its loss, would wait for ever."""
    sampler = state.sampler
    if state.comm.world_size > 1:
        if max_unreadable:
            raise ConfigError(
                f"max_unreadable={max_unreadable} with {what}, which waits in each forward for all ranks: one whose "
                "samples cannot be read would make none; leave max_unreadable out"
            )
        is_stream = isinstance(sampler, IterableSampler)
        if is_stream and uneven != "stop_all":
            raise ConfigError(
                f"{what} waits in each forward for all ranks, and at the end of a stream some have no samples: take "
                "uneven='stop_all', which ends with the first"
            )
        sizes = {sampler.global_batch} if is_stream else sampler.sizes.all()
        mine = [sampler.num_micros(size) for size in sorted(sizes)]
        if len(set(map(tuple, all_gather_object(state.comm, mine)))) > 1:
            remedy = "choose a global batch that divides the number of samples, or leave out micro_size"
            if sampler.num_shards % state.comm.world_size:
                remedy = f"leave num_shards={sampler.num_shards} out, or take a multiple of {state.comm.world_size}"
            raise ConfigError(
                f"{what} waits in each forward for all ranks, but in some steps they have different numbers of "
                f"forwards: {remedy}, so that every rank has as many in every step"
            )


def refuse_waiting(task: Task, setting: str) -> Never:
    """Raises ConfigError, because the loss calls collectives, and no worker waits for another one."""
    raise ConfigError(
        f"{name_of(task)} calls collectives, and so waits for the other workers, and with {setting} a worker computes "
        "alone: take strategy='auto', without same_bits"
    )
