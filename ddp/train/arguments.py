"""The arguments of `fit`: each is checked, and brought into the form that the loop takes.

A mistake is one sentence, before the first step. What differs between ranks is refused, too: every rank would go on
with its own, and the replicas would drift apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp.collectives.catalog import own_schedules
from ddp.comm.communicator import Communicator
from ddp.comm.host_share import shared_by_host
from ddp.comm.objects import all_gather_object, on_rank_zero
from ddp.data.loading.cache import cached
from ddp.data.loading.source import UNKEYED, Source, fingerprint
from ddp.data.orders.order import Order
from ddp.data.orders.sampler import TrainSampler
from ddp.data.samples import WholeBatches
from ddp.data.sets.validation import selection_in
from ddp.errors import CheckpointError, ConfigError, did_you_mean, nearest
from ddp.optim.schedules import RateSchedule
from ddp.optim.torch_schedule import Moment, TorchSchedule
from ddp.process.log import log
from ddp.process.memory import available_bytes
from ddp.replica.replica import Replica
from ddp.replica.sync_batchnorm import SyncBatchNorm
from ddp.train.callbacks import Callback
from ddp.train.checkpoint import flat
from ddp.train.early_stopping import EarlyStopping
from ddp.train.ema import EMA
from ddp.train.ending import ending_problems
from ddp.train.foreign_words import meaning
from ddp.train.stored_checkpoint import identity_of, resume_from
from ddp.train.tasks.loss_function import name_of
from ddp.train.tasks.task import Task

NEEDED: Any = ...
"""The default of an argument without a default, so that a mistyped name is told before a missing one."""

CACHE_SHARE = 0.5  # of the memory that is left
LARGEST_CACHE = 1 << 44  # bytes, where the host does not say how much is left


def shards_of(
    num_shards: int | None,
    comm: Communicator,
    model: nn.Module,
    global_batch: Any,
    checkpoint_dir: str | Path | None,
    resume: str | Path | None,
) -> int | None:
    """Returns the number of shards; unless given, that of the run to be resumed, while it still fits. Collective."""
    if num_shards is not None or resume is None:
        return num_shards

    def saved() -> Any:
        with contextlib.suppress(CheckpointError):
            start = resume_from(str(resume), Path(checkpoint_dir or ""))
            identity = {} if start is None else identity_of(start)
            return flat(identity).get("num_shards", flat(identity).get("batch.num_shards"))  # the latter: of a command
        return None

    then = on_rank_zero(comm, saved, label="looking for a checkpoint")
    waits = any(isinstance(layer, SyncBatchNorm) for layer in model.modules())  # for all ranks, in each forward
    fits = isinstance(then, int) and comm.world_size <= then and not (waits and then % comm.world_size)
    return then if fits and not (isinstance(global_batch, int) and global_batch < then) else None


def idle_notes(replica: Replica) -> list[str]:
    """Returns a line that says so where a hook or a wire format has nothing to do, because no gradient travels."""
    hook = None if replica.compression is None else replica.compression.hook
    given = [] if hook is None or hook.momentum else [f"the hook {hook!r}"]
    given += [] if replica.wire in (None, "fp32") else [f"wire={replica.wire!r}"]
    if not given or replica.comm.host_partition.num_hosts > 1:
        return []
    if replica.comm.world_size == 1:
        return [f"{given[0]} does nothing here: there is one worker"]
    return [f"{given[0]} does nothing here: all workers share a host's memory; to try it: comm.shared_memory=false"]


def check_numbers(*, least: int, needed: bool = False, **numbers: int | None) -> None:
    """Raises ConfigError unless each number is a whole one and large enough, or None where it is not needed."""
    for name, number in numbers.items():
        if number is None and not needed:
            continue
        if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < least:
            raise ConfigError(f"{name}={number!r}: must be a whole number from {least} up")


def not_one_of(known: Sequence[str], **given: object) -> ConfigError:
    """Returns the error for an argument that is a word, and none of those that it may be."""
    ((name, value),) = given.items()
    return ConfigError(f"{name}={value!r}: take one of {', '.join(known)}.{did_you_mean(value, known)}")


def check_callbacks(callbacks: Any, *, is_evaluated: bool) -> None:
    """Raises ConfigError unless these are several objects of `ddp.Callback`, and what they need is there."""
    if not isinstance(callbacks, (tuple, list)) or not all(isinstance(each, Callback) for each in callbacks):
        raise ConfigError(f"callbacks={callbacks!r:.60}: give a list of objects of classes derived from ddp.Callback")
    if not is_evaluated and any(isinstance(each, EarlyStopping) for each in callbacks):
        raise ConfigError("EarlyStopping goes by evaluations: give validation_data, or test_data")
    if sum(isinstance(each, EMA) for each in callbacks) > 1:
        raise ConfigError("callbacks has two EMA: evaluations and ddp.load use the averages of one; leave one out")


def check_ending(given: Mapping[str, Any]) -> None:
    """Raises ConfigError for arguments of `fit` about the end of the run that do not go together."""
    is_early = any(isinstance(each, EarlyStopping) for each in given["callbacks"])
    intervals = given["evaluate_every_epochs"], given["evaluate_every_steps"]
    for problem in ending_problems(
        trial="trial=True" if given["trial"] else "",
        resumes="" if given["resume"] is None else f"resume={str(given['resume'])!r}",
        stops_early="EarlyStopping" if is_early else "",
        is_evaluated_meanwhile=intervals != (None, None),
        remedy="give evaluate_every_epochs or evaluate_every_steps",
    ):
        raise ConfigError(problem)


def order_of(order: Order | None, source: Source) -> Order | None:
    """Returns the order that the user gives, or that their DataLoader stands for; None for the usual one.

    Raises:
        ConfigError: there are both, or the order is one of samples that are set apart, too.
    """
    rest = selection_in(source.samples)
    if order is not None and rest is not None and order.num_samples == len(rest.samples):
        raise ConfigError(
            f"order={order.in_words()}: has places for the samples that are set apart for validation, too; give "
            "validation_data a data set of its own"
        )
    if order is not None and source.order is not None:
        raise ConfigError(
            f"order={order.in_words()}: the sampler of the DataLoader chooses samples, too; leave one of them out"
        )
    return order or source.order


def with_cache(source: Source, comm: Communicator) -> Source:
    """Returns the samples with a cache that all ranks of a host share. Collective.

    Raises:
        ConfigError: there is nothing that could be kept.
    """
    if source.is_stream:
        raise ConfigError("cache=True: data is a stream, whose samples have no number; leave the cache out")
    if isinstance(source.samples, WholeBatches):
        raise ConfigError("cache=True: the data hand out whole batches, which need no cache; leave it out")
    host = next(host for host in comm.hosts if comm.rank in host)
    room = min(all_gather_object(comm, int(min(available_bytes(), LARGEST_CACHE) * CACHE_SHARE)))
    samples = cached(
        source.samples,
        partial(shared_by_host, comm),
        max_bytes=room,
        place=host.index(comm.rank),
        num_places=len(host),
        num_loaders=source.num_workers,
    )
    return source._replace(samples=samples)


def schedules_of(
    schedule: RateSchedule | LRScheduler | None,
    every: Moment | None,
    optimizer: Optimizer,
    *,
    task: Task,
    is_evaluated: bool,
) -> tuple[RateSchedule | None, TorchSchedule | None]:
    """Returns the schedule as one of ours, or as one of torch's.

    Raises:
        ConfigError: it is neither, or does not go with the optimizer or the task.
    """
    if isinstance(schedule, type) or not (schedule is None or callable(schedule) or isinstance(schedule, LRScheduler)):
        raise ConfigError(
            f"schedule={schedule!r}: give a function (samples trained on, samples of the run) → factor, such as "
            "ddp.optim.cosine(), or an object of a scheduler of torch's"
        )
    if isinstance(schedule, LRScheduler):
        scheduler = TorchSchedule(schedule, every=every, optimizer=optimizer)
        wanted = "max" if task.higher_is_better else "min"
        if scheduler.needs_metric and not is_evaluated:
            raise ConfigError(f"schedule={scheduler.name} reads a metric: give validation_data, or test_data")
        if scheduler.needs_metric and scheduler.mode != wanted:
            raise ConfigError(
                f"schedule={scheduler.name} with mode={scheduler.mode!r}: it reads {task.main_metric}, so make it with "
                f"mode={wanted!r}"
            )
        return None, scheduler
    if every is not None:
        raise ConfigError(f"schedule_every={every!r}: is for torch's schedulers only; leave it out")
    try:
        factor = 1.0 if schedule is None else schedule(0, 1000)
    except TypeError as error:
        raise ConfigError(
            f"schedule: takes (samples trained on, samples of the run) and returns a factor; {error}"
        ) from error
    if not isinstance(factor, (int, float)):
        raise ConfigError(f"schedule: returned {factor!r}; return a factor on the learning rate, such as 0.5")
    return schedule, None


def refuse_unknown(mistyped: Iterable[str], known: Iterable[str]) -> None:
    """Raises ConfigError for the first argument that `fit` does not have, with the one that is probably meant."""
    for name in mistyped:
        here = meaning(name)
        if here.instead:
            raise ConfigError(f"fit() has no argument {name!r}: {here.instead}")
        near = here.fit or nearest(name, known)
        hint = f"Did you mean {near!r}?" if near else f"It has {', '.join(known)}"
        raise ConfigError(f"fit() has no argument {name!r}. {hint}")


def settings_of(
    task: Task, optimizer: Optimizer, sampler: TrainSampler, schedule: RateSchedule | LRScheduler | None
) -> dict[str, Any]:
    """Returns the arguments that the bits of the result depend on, as JSON can hold them."""
    before = "initial_lr" if isinstance(schedule, LRScheduler) else "lr"  # a scheduler may have begun by itself
    groups = [{**group, "lr": group.get(before, group["lr"])} for group in optimizer.param_groups]
    hidden, kind = ("params", "initial_lr"), type(optimizer).__name__
    return {
        "loss": _task_in_words(task),
        "optimizer": [
            {"class": kind, **{key: repr(value) for key, value in group.items() if key not in hidden}}
            for group in groups
        ],
        "global_batch": sampler.sizes.setting,
        "order": sampler.order.identity,
        "num_shards": sampler.num_shards,
        "micro_size": sampler.micro_size,
        "seed": sampler.state.seed,
        "schedule": _named(schedule),
    }


def _task_in_words(task: Task) -> str:
    """Returns a task's name and its plain attributes."""
    plain = {key: value for key, value in vars(task).items() if isinstance(value, (int, float, str))}
    about = ", ".join(f"{key}={value}" for key, value in plain.items())
    return f"{name_of(task)}({about})"


def _named(schedule: RateSchedule | LRScheduler | None) -> str:
    """Returns a schedule in words that are the same in every process, and in only a few for another schedule."""
    if isinstance(schedule, LRScheduler):
        settings = schedule.state_dict().items()
        return f"{type(schedule).__name__} {[each for each in settings if isinstance(each[1], (int, float, list))]}"
    return "None" if schedule is None else f"{[schedule(step, 1000) for step in (0, 10, 500, 999)]}"


def refuse_disagreement(
    comm: Communicator, arguments: Mapping[str, Any], source: Source, held_out: Mapping[str, Source]
) -> None:
    """Raises ConfigError, on every rank, if ranks were given different arguments; warns of different samples."""
    lengths = {"len(data)": None if source.is_stream else len(source.samples)}
    lengths |= {f"len({name})": len(each.samples) for name, each in held_out.items()}
    everyone = all_gather_object(comm, flat({**arguments, **lengths, "own schedules": sorted(own_schedules())}))
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        values = [theirs.get(name) for theirs in everyone]
        if (other := next((rank for rank, value in enumerate(values) if value != values[0]), None)) is not None:
            raise ConfigError(
                f"{name} is {values[0]} on rank 0 and {values[other]} on rank {other}: give all ranks the same"
            )
    if comm.world_size > 1 or source.num_workers:  # loader processes draw the same, too
        if not source.is_stream:
            _warn_of_other_samples(comm, source, what="data")
        for name, each in held_out.items():
            _warn_of_other_samples(comm, each, what=name)


def _warn_of_other_samples(comm: Communicator, source: Source, *, what: str) -> None:
    """Warns if the ranks' samples are not the same, as after a random split without a seed."""
    prints = all_gather_object(comm, fingerprint(source))
    known = [each for each in prints if each is not None]
    if comm.rank == 0 and UNKEYED in known:
        log.warning(
            "the samples of %s are others each time they are read: they draw from a generator that was not found, so "
            "ranks and loader processes may draw the same, and a resumed run something else. Draw from torch's, "
            "random's or NumPy's own functions, or keep the generator in an attribute of the data set",
            what,
        )
    elif comm.rank == 0 and len(set(known)) > 1:
        log.warning(
            "the samples of %s are not the same on all ranks: a random split, shuffle or choice needs a seed, because "
            "otherwise some samples are trained on twice, and others never or also held out",
            what,
        )
