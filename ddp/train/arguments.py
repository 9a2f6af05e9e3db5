"""The arguments of `fit`: each is checked, and brought into the form that the loop takes.

A mistake is one sentence, before the first step. What differs between ranks is refused, too: every rank would go on
with its own, and the replicas would drift apart. A trial has the same arguments, but for its length.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp.collectives.catalog import own_schedules
from ddp.comm.communicator import Communicator
from ddp.comm.meeting.membership import Member, current_member
from ddp.comm.meeting.role import current_role
from ddp.comm.objects import all_gather_object, on_rank_zero
from ddp.data.loading.iterable import sampler_of_stream
from ddp.data.loading.source import Source, source_of
from ddp.data.orders.order import Order
from ddp.data.orders.sampler import TrainSampler, sampler_of
from ddp.data.orders.steps import Batches, BatchWarmup, RoundLength
from ddp.data.orders.token_budget import TokenBudget
from ddp.data.sets.validation import selection_in
from ddp.errors import CheckpointError, ConfigError, meant, nearest
from ddp.gradients.hook import corrected
from ddp.optim.layerwise import Layerwise
from ddp.optim.schedules import RateSchedule, TorchSchedule
from ddp.policies import (
    NUM_SHARDS,
    Averaging,
    Evaluation,
    Folder,
    ParameterServer,
    Reading,
    Rounds,
    SameBits,
    Training,
    averaging_named,
)
from ddp.process.files import scratch_folder
from ddp.process.terminal import say
from ddp.replica.naive import NaiveDataParallel
from ddp.replica.parameters import sparse_weights
from ddp.replica.replica import Replica
from ddp.replica.sync_batchnorm import waits
from ddp.replica.units import form_of
from ddp.setting import Natural, Setup, check_values, refusal, refuse
from ddp.strategies.choice import check_model, replica_of
from ddp.train.checkpoints.checkpoint import flat
from ddp.train.checkpoints.checkpoint_store import identity_of, resume_from, shape_or_type
from ddp.train.checkpoints.extra_state import group_settings
from ddp.train.checkpoints.moved import meant_for_fit
from ddp.train.evaluate import warn_of_other_samples
from ddp.train.held_out import HeldOut, held_out_of
from ddp.train.reports.profiler import Profiler
from ddp.train.reports.trackers import Tracker, refuse_twice
from ddp.train.steps.callbacks import EMA, Callback, EarlyStopping
from ddp.train.steps.state import TrainState
from ddp.train.steps.stopping import StopFlag
from ddp.train.steps.task import Task, as_task, name_of
from ddp.train.supervision import Guard

NEEDED: Any = ...
"""The default of an argument without a default, so that a mistyped name is told before a missing one."""


@dataclass(kw_only=True)
class FitArguments(Training):
    """The arguments of `ddp.fit`, each checked, and what only the command line gives.

    Attributes:
        stop: a wish to stop that the caller sets; None: signals set it.
        settings: what the result depends on, by key, to be compared on a resume; None: the arguments.
        run_store: the part of a store in which servers and workers meet for this training.
        number: of the fit in this program.
        first_groups: the settings of the optimizer's groups as the fit began.
        replica: puts the model into a replica of the ranks; None: `strategy` says which one.
    """

    model: nn.Module
    data: Any
    optimizer: Optimizer
    loss: Any = NEEDED
    global_batch: Any = NEEDED
    validation_data: Any = None
    test_data: Any = None
    evaluation: Evaluation = Evaluation()
    batches: Batches = Batches()
    reading: Reading = Reading()
    schedule: Any = None
    strategy: Averaging = Averaging()
    folder: Folder = Folder()
    same_bits: SameBits = SameBits()
    callbacks: Sequence[Callback] = ()
    stop: StopFlag | None = None
    settings: Mapping[str, Any] | None = None
    run_store: Any = None
    replica: Callable[[Communicator], Replica] | None = None
    number: int = 0
    first_groups: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        for name in ("loss", "global_batch"):
            if getattr(self, name) is NEEDED:
                raise ConfigError(f"fit() needs {name}: see help(ddp.fit)")
        if isinstance(self.clip_norm, float) and self.clip_norm == math.inf:
            self.clip_norm = None  # torch's word for a norm that is only measured; fit measures it in any case
        check_values(self)
        if not isinstance(self.global_batch, (BatchWarmup, TokenBudget)):
            if why := refusal(self.global_batch, Natural):
                raise ConfigError(f"global_batch={self.global_batch!r}: {why}")
            self.global_batch = int(self.global_batch)
        for name, kind in (("evaluation", Evaluation), ("batches", Batches), ("reading", Reading)):
            if not isinstance(value := getattr(self, name), kind):
                raise ConfigError(f"{name}={value!r:.60}: give a ddp.{kind.__name__}, such as ddp.{kind.__name__}()")
        if isinstance(self.same_bits, bool):
            self.same_bits = SameBits(on=self.same_bits)
        if not isinstance(self.same_bits, SameBits):
            raise ConfigError(f"same_bits={self.same_bits!r:.60}: give True, or a ddp.SameBits")
        if not isinstance(self.strategy, Averaging):  # but a word
            self.strategy = averaging_named(self.strategy)
        if not isinstance(self.folder, Folder):  # but a path
            self.folder = Folder(self.folder)
        if self.same_bits.hash_every and self.folder.path is None and not self.folder.trial:
            raise ConfigError(
                f"hash_every={self.same_bits.hash_every}: folder=None keeps no hashes.jsonl; leave one of them out"
            )
        _check_callbacks(self)
        refuse(self.setup())

    def for_ranks(self, comm: Communicator) -> FitArguments:
        """Returns the arguments with the model in a replica of these ranks, if the caller makes it. Collective."""
        return self if self.replica is None else replace(self, model=self.replica(comm), replica=None)

    def setup(self, **facts: Any) -> Setup:
        """Returns what rules between arguments look at.

        Args:
            facts: of the processes, and of the samples.
        """
        size, policy, model, callbacks = self.global_batch, self.strategy, self.model, self.callbacks
        known: dict[str, Any] = {
            "is_whole": True,
            "hook_momentum": getattr(policy.hook, "momentum", 0),
            "own_clip_norm": self.optimizer.clip_norm if isinstance(self.optimizer, Layerwise) else None,
            "global_batch": size if isinstance(size, int) else None,
            "warmup_size": size.first if isinstance(size, BatchWarmup) else None,
            "tokens": size if isinstance(size, TokenBudget) else None,
            "same_bits": self.same_bits.on,
            "decay": next((each for each in callbacks if isinstance(each, EMA)), None),
            "patience": next((each.patience for each in callbacks if isinstance(each, EarlyStopping)), None),
            "guard": next((each.action for each in callbacks if isinstance(each, Guard)), None),
            "has_folder": self.folder.path is not None,
            "memory_steps": self.folder.memory_steps,
        }
        if (member := current_member()) is not None:
            known |= {"min_workers": member.limits.min_workers, "max_workers": member.limits.max_workers}
        if isinstance(model, Replica):
            hook = policy.hook if model.compression is None else model.compression.hook
            known |= {"wire": policy.wire or model.wire, "hook": hook}
            known["kind"] = "naive" if isinstance(model, NaiveDataParallel) else "bucketed"
            if model.compute is not None:
                known["strategy"] = "tpu"
        return Setup.of(self, policy, self.batches, self.reading, self.evaluation, self.same_bits, **known | facts)


def _check_callbacks(given: FitArguments) -> None:
    """Raises ConfigError unless these are several objects of `ddp.Callback`, and what they need is there."""
    callbacks = given.callbacks
    if not isinstance(callbacks, (tuple, list)) or not all(isinstance(each, Callback) for each in callbacks):
        raise ConfigError(f"callbacks={callbacks!r:.60}: give a list of objects of classes derived from ddp.Callback")
    is_evaluated = given.validation_data is not None or given.test_data is not None
    if not is_evaluated and any(isinstance(each, EarlyStopping) for each in callbacks):
        raise ConfigError("EarlyStopping goes by evaluations: give validation_data, or test_data")
    if sum(isinstance(each, EMA) for each in callbacks) > 1:
        raise ConfigError("callbacks has two EMA: evaluations and ddp.load use the averages of one; leave one out")
    if sum(isinstance(each, Guard) for each in callbacks) > 1:
        raise ConfigError("callbacks has two Guard: one says what becomes of a bad step; leave one out")
    refuse_twice(callbacks)


class Inputs(NamedTuple):
    """Task, samples, replica and schedule, made of the arguments.

    Attributes:
        source: the training samples, without those that are set apart.
        schedule: one of ours; scheduler: one of torch's.
    """

    task: Task
    source: Source
    held_out: HeldOut
    replica: Replica
    schedule: RateSchedule | None
    scheduler: TorchSchedule | None


def inputs_of(given: FitArguments, comm: Communicator) -> Inputs:
    """Returns task, samples, replica and schedule. The model is on the rank's device then.

    Raises:
        ConfigError: something cannot be trained, or not with the rest.
    """
    check_model(given.model, given.optimizer, comm)
    task, collate = as_task(given.loss), given.batches.collate
    source = source_of(given.data, what="data", collate=collate, num_workers=given.reading.num_workers, trains=True)
    source, held_out = held_out_of(
        source, given.validation_data, given.test_data, collate=collate, seed=given.batches.seed
    )
    held_out = held_out.with_training(source, given.evaluation.training)
    schedule, scheduler = schedules_of(given.schedule, given.optimizer, task=task, is_evaluated=held_out.is_evaluated)
    setup = given.setup(
        workers=comm.world_size,
        num_hosts=len(comm.hosts),
        device=comm.device.type,
        shared_memory=comm.host_partition.num_hosts == len(comm.hosts),  # else each rank counts as a host there
        algorithm=comm.plan.algorithm,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        is_sparse=bool(sparse_weights(given.model)),
        is_wide=all(parameter.dtype.itemsize >= 4 for parameter in given.model.parameters()),
        waits=waits(given.model),
        is_stream=source.is_stream,
        has_scheduler=scheduler is not None,
    )
    refuse(setup)
    num_shards = given.batches.num_shards if given.same_bits.on else None
    replica = replica_of(given.model, given.optimizer, comm, given.strategy, num_shards=num_shards)
    return Inputs(task, source, held_out, replica, schedule, scheduler)


def with_shards(given: FitArguments, comm: Communicator) -> FitArguments:
    """Returns the arguments with the number of shards, if the run is to have the same bits. Collective."""
    if not given.same_bits.on:
        return given
    num_shards, size = _num_shards(given, comm) or NUM_SHARDS, given.global_batch
    smallest = size.first if isinstance(size, BatchWarmup) else size
    if isinstance(smallest, int) and smallest < num_shards:
        raise ConfigError(
            f"num_shards={num_shards}: more shards than the {smallest} samples of a batch; take a global_batch of "
            f"{num_shards} or more, or fewer shards, as ddp.Batches(num_shards={smallest})"
        )
    return replace(given, batches=replace(given.batches, num_shards=num_shards))


def sampler_for(given: FitArguments, inputs: Inputs, comm: Communicator) -> tuple[TrainSampler, str]:
    """Returns the sampler, and a note of how samples are dealt, if that is not as usual. Collective.

    Raises:
        ConfigError: the samples cannot be dealt like this.
    """
    order = order_of(given.batches.order, inputs.source)
    sampler_arguments = {**given.batches.sampler_arguments, "order": order, "global_batch": given.global_batch}
    num_shards, member = _num_shards(given, comm), current_member()
    if inputs.replica.compute is not None:
        num_shards = inputs.replica.num_devices
        if (asked := given.batches.num_shards) not in (None, num_shards):
            each = f"each of {num_shards} devices has one"
            raise ConfigError(f"num_shards={asked}: with strategy='tpu' {each}; leave it out")
    if num_shards is None and member is not None and not isinstance(given.strategy, Rounds):
        num_shards = member.limits.max_workers  # so that a step's parts stay the same
    sampler_arguments |= {"rank": comm.rank, "world_size": comm.world_size, "num_shards": num_shards}
    if isinstance(policy := given.strategy, ParameterServer):
        part = current_role()
        assert part is not None
        # A server plans whole steps, and a worker the part that it leases.
        sampler_arguments |= {"rank": 0, "world_size": 1}
        sampler_arguments["num_shards"] = sampler_arguments["num_shards"] or policy.num_parts(part.num_workers)
    rounds = round_length(given.strategy)
    if not inputs.source.is_stream:
        return sampler_of(inputs.source.samples, drop_last=inputs.source.drop_last, rounds=rounds, **sampler_arguments)
    processes = max(1, inputs.source.num_workers)
    stated_length = None
    if inputs.schedule is not None and given.max_steps is None:
        stated_length = _told_length(inputs.source.samples, comm, is_sum=given.batches.sharding == "off")
    sampler_arguments |= {"num_processes": processes, "stated_length": stated_length}
    return sampler_of_stream(max_steps=given.max_steps, schedule=inputs.schedule, **sampler_arguments), ""


def round_length(policy: Any) -> RoundLength | None:
    """Returns which steps are rounds; None: none is."""
    return RoundLength(policy.every, policy.warmup_samples) if isinstance(policy, Rounds) else None


def _told_length(data: Any, comm: Communicator, *, is_sum: bool) -> int | None:
    """Returns how many samples a stream says that it has; None if it does not say so on each rank. Collective.

    Args:
        is_sum: each rank has its own stream.
    """
    length = None
    with contextlib.suppress(TypeError, NotImplementedError, AssertionError):  # of a chain of streams without one
        length = len(data)
    lengths = all_gather_object(comm, length)
    return None if None in lengths else sum(lengths) if is_sum else lengths[0]


def _num_shards(given: FitArguments, comm: Communicator) -> int | None:
    """Returns the number of shards; unless given, that of the run to be resumed, while it still fits. Collective."""
    keeps, size = given.folder, given.global_batch
    if isinstance(given.strategy, Rounds):
        return given.batches.num_shards
    if given.batches.num_shards is not None or keeps.resume is None:
        return given.batches.num_shards

    def saved() -> Any:
        with contextlib.suppress(CheckpointError):
            start = resume_from(str(keeps.resume), Path(keeps.path or ""))
            identity = flat({} if start is None else identity_of(start))
            return identity.get("num_shards", identity.get("batch.num_shards"))  # the latter: of a command
        return None

    then = on_rank_zero(comm, saved, label="looking for a checkpoint")
    fits = isinstance(then, int) and comm.world_size <= then and not (waits(given.model) and then % comm.world_size)
    return then if fits and not (isinstance(size, int) and size < then) else None


def idle_notes(replica: Replica) -> list[str]:
    """Returns a line that says so where a hook or a wire format has nothing to do, because no gradient travels."""
    hook = None if replica.compression is None else replica.compression.hook
    if replica.num_shards is not None and replica.wire is not None:
        return [f"wire={replica.wire!r} rounds the gradients of each shard; their sums travel in their own type"]
    given = [] if hook is None or hook.momentum else [f"the hook {hook!r}"]
    given += [] if replica.wire in (None, "fp32") else [f"wire={replica.wire!r}"]
    if not given or replica.comm.host_partition.num_hosts > 1:
        return []
    if replica.comm.world_size == 1:
        return [f"{given[0]} does nothing here: there is one worker"]
    return [f"{given[0]} does nothing here: all workers share a host's memory; to try it: comm.shared_memory=false"]


@contextlib.contextmanager
def one_thread(given: FitArguments) -> Iterator[None]:
    """Gives a run with the same bits one thread, inside the block: the bits of some kernels depend on the number.

    Not where settings say how many there are (`cluster.threads_per_worker`).
    """
    threads = torch.get_num_threads()
    if given.same_bits.on and given.settings is None and threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


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


def schedules_of(
    schedule: Any, optimizer: Optimizer, *, task: Task, is_evaluated: bool
) -> tuple[RateSchedule | None, TorchSchedule | None]:
    """Returns the schedule as one of ours, or as one of torch's.

    Raises:
        ConfigError: it is neither, or does not go with the optimizer or the task.
    """
    scheduler = TorchSchedule(schedule) if isinstance(schedule, LRScheduler) else schedule
    if isinstance(scheduler, TorchSchedule):
        scheduler.check_optimizer(optimizer)
        wanted = "max" if task.higher_is_better else "min"
        if scheduler.needs_metric and not is_evaluated:
            raise ConfigError(f"schedule={scheduler.name} reads a metric: give validation_data, or test_data")
        if scheduler.needs_metric and scheduler.mode != wanted:
            raise ConfigError(
                f"schedule={scheduler.name} with mode={scheduler.mode!r}: it reads {task.main_metric}, so make it with "
                f"mode={wanted!r}"
            )
        return None, scheduler
    if isinstance(schedule, type) or not (schedule is None or callable(schedule)):
        raise ConfigError(
            f"schedule={schedule!r}: give a function (samples trained on, samples of the run) → factor, such as "
            "ddp.optim.cosine(), or an object of a scheduler of torch's"
        )
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
        remedy = meant_for_fit(name)
        if remedy and not remedy.isidentifier():
            raise ConfigError(f"fit() has no argument {name!r}: {remedy}")
        near = remedy or nearest(name, known)
        hint = meant(name, ()) or (f" Did you mean {near!r}?" if near else f" It has {', '.join(known)}")
        raise ConfigError(f"fit() has no argument {name!r}.{hint}")


def settings_of(given: FitArguments, inputs: Inputs, sampler: TrainSampler) -> dict[str, Any]:
    """Returns the arguments that the bits of the result depend on, as JSON can hold them."""
    before = "initial_lr" if inputs.scheduler is not None else "lr"  # a scheduler may have begun by itself
    groups = given.first_groups or group_settings(given.optimizer)
    groups = [{**group, "lr": group.get(before, group["lr"])} for group in groups]
    hidden, kind = ("params", "initial_lr"), type(given.optimizer).__name__
    hook, evaluation, rounds = given.strategy.hook, given.evaluation, None
    if isinstance(given.strategy, Rounds):
        rounds = {"name": "local_sgd", **{item.name: getattr(given.strategy, item.name) for item in fields(Rounds)}}
    return {
        "loss": _task_in_words(inputs.task),
        "optimizer": [
            {"class": kind, **{key: repr(value) for key, value in group.items() if key not in hidden}}
            for group in groups
        ],
        "global_batch": sampler.sizes.setting,
        "order": sampler.order.identity,
        "num_shards": sampler.num_shards,
        "micro_size": sampler.micro_size,
        "seed": sampler.state.seed,
        "schedule": _schedule_in_words(inputs),
        "scheduler": {"every": None if inputs.scheduler is None else inputs.scheduler.every},
        "epochs": given.epochs,
        "max_steps": given.max_steps,
        "precision": given.precision,
        "clip_norm": given.clip_norm,
        "skip_steps": given.batches.skip_steps,
        "wire": given.strategy.wire,
        **({"strategy": rounds} if rounds is not None else {}),
        "hook": None if hook is None else repr(corrected(hook)),
        "evaluation": {"every_epochs": evaluation.every_epochs, "every_steps": evaluation.every_steps},
        "chooses by": None if inputs.held_out.validation is None else "validation_data",
        **({"same_bits": True} if given.same_bits.on else {}),
    }


def _task_in_words(task: Task) -> str:
    """Returns a task's name and its plain attributes."""
    plain = {key: value for key, value in vars(task).items() if isinstance(value, (int, float, str))}
    about = ", ".join(f"{key}={value}" for key, value in plain.items())
    return f"{name_of(task)}({about})"


def _schedule_in_words(inputs: Inputs) -> str:
    """Returns a text that is the same in every process, and the same for few other schedules."""
    if inputs.scheduler is not None:
        settings = inputs.scheduler.state_dict()["state"].items()
        return f"{inputs.scheduler.name} {[each for each in settings if isinstance(each[1], (int, float, list))]}"
    schedule = inputs.schedule
    return "None" if schedule is None else f"{[schedule(step, 1000) for step in (0, 10, 500, 999)]}"


def refuse_other_run(given: FitArguments, member: Member) -> None:
    """Refuses this process alone, before it joins the ranks of an elastic launch, unless it would make the same run.

    Raises:
        ConfigError: the model is in a replica; or the program or its data have changed since the others began.
    """
    if isinstance(given.model, Replica) and given.replica is None:
        raise ConfigError("min_workers with a model in a replica, whose ranks stay: give ddp.fit the bare module")
    state = form_of(given.model) if isinstance(given.model, nn.Module) else {}  # what is none is refused later
    data = getattr(given.data, "dataset", given.data)
    mine = {f"the model's {name}": shape_or_type(each) for name, each in state.items()} | {
        "torch": str(torch.__version__),
        "optimizer": type(given.optimizer).__name__,
        "data": str(len(data[0] if isinstance(data, tuple) else data)) if isinstance(data, Sized) else "",
        "length": f"epochs={given.epochs}, max_steps={given.max_steps}",
    }
    theirs = member.agreed(f"run/{given.number}", mine)
    for name in {**theirs, **mine}:
        here, there = mine.get(name, "missing"), theirs.get(name, "missing")
        if here != there:
            raise ConfigError(
                f"{name} is {here} in this process, and {there} in the run that it would join: the program or its data "
                "have changed since; start the run again"
            )


def refuse_disagreement(comm: Communicator, given: FitArguments, inputs: Inputs, arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError, on every rank, if ranks were given different arguments; warns of different samples."""
    source, held_out = inputs.source, inputs.held_out.given()
    lengths = {"len(data)": None if source.is_stream else len(source.samples)}
    lengths |= {f"len({name})": len(each.samples) for name, each in held_out.items()}
    alike: dict[str, Any] = {"reading": asdict(given.reading), "uneven": given.batches.uneven}
    alike |= {"strategy": given.strategy.strategy, "hash_every": given.same_bits.hash_every}
    if given.same_bits.on:
        alike |= {"threads": torch.get_num_threads(), "audit_every": given.same_bits.audit_every}
    arguments = {**arguments, **alike}
    everyone = all_gather_object(comm, flat({**arguments, **lengths, "own schedules": sorted(own_schedules())}))
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        values = [theirs.get(name) for theirs in everyone]
        if (other := next((rank for rank, value in enumerate(values) if value != values[0]), None)) is not None:
            raise ConfigError(
                f"{name} is {values[0]} on rank 0 and {values[other]} on rank {other}: give all ranks the same"
            )
    if comm.world_size > 1 or source.num_workers:  # loader processes draw the same, too
        if not source.is_stream:
            warn_of_other_samples(comm, source, what="data")
        for name, each in held_out.items():
            warn_of_other_samples(comm, each, what=name)


# --- A trial ---------------------------------------------------------------------------------------------------------
#
# A trial is a fit with other arguments: three steps, one evaluation, one save, as quickly as they go, of which no file
# is kept. It finds out in a minute what would else show after hours: a batch that does not fit into memory, an
# evaluation that fails, a disk that is full, a state that cannot be saved.

NUM_STEPS = 3
_NAME = ".ddp-trial-"  # begins the name of a trial's folder, and of no other, because it is removed


def tried(
    train: Callable[[FitArguments, Communicator], TrainState], given: FitArguments, comm: Communicator
) -> TrainState:
    """Returns the state after a trial of what is given. Model and optimizer have made its steps.

    Its files lie beside the run's folder, on the same disk, until it is over.
    """
    keeps, folder, until_end = given.folder, None, contextlib.ExitStack()
    if keeps.path is not None:
        run_dir = Path(keeps.path)
        folder = on_rank_zero(comm, lambda: _folder_beside(run_dir, until_end), label="making a folder")
    num_steps = min(NUM_STEPS, given.max_steps or NUM_STEPS)
    short = replace(
        given,
        max_steps=num_steps,
        evaluation=replace(given.evaluation, every_epochs=None, every_steps=num_steps),
        folder=replace(keeps, path=folder, every_steps=NUM_STEPS, trial=False),
        callbacks=[each for each in given.callbacks if not isinstance(each, (Tracker, Profiler))],
    )
    with until_end:
        state = train(short, comm)
    if keeps.progress and comm.rank == 0:
        more = {"an evaluation": bool(state.evaluation), "a save": folder is not None}
        done = ", ".join([f"{state.step} steps", *(what for what, was_made in more.items() if was_made)])
        say(f"the trial went well: {done}; no file of it is kept")
    return state


def _folder_beside(run_dir: Path, until_end: contextlib.ExitStack) -> Path:
    """Returns a new folder, which is removed at the end. On rank 0 only."""
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        return until_end.enter_context(scratch_folder(run_dir.parent, _NAME))
    except OSError as error:
        raise ConfigError(f"folder={run_dir}: {error.strerror}; take another folder") from error
