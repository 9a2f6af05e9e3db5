"""The training loop. The docstring of `fit` is its pseudocode; one step is in `step.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.comm.setup import current
from ddp.data.loader import TrainLoader
from ddp.data.sampler import TrainSampler
from ddp.errors import ConfigError
from ddp.optim.schedules import Schedule, constant
from ddp.precision.autocast import Precision
from ddp.replica.data_parallel import DistributedDataParallel, Replica
from ddp.tasks.task import Task
from ddp.train.callbacks import Callback, Callbacks
from ddp.train.state import TrainState
from ddp.train.step import StepRules, train_step
from ddp.train.stopping import StopFlag


def fit(
    model: nn.Module,
    task: Task,
    train_data: Any,
    optimizer: Optimizer,
    *,
    global_batch: int | None = None,
    epochs: int | None = None,
    max_steps: int | None = None,
    comm: Communicator | None = None,
    state: TrainState | None = None,
    num_shards: int | None = None,
    micro_size: int | None = None,
    schedule: Schedule | None = None,
    clip_norm: float | None = None,
    precision: Precision = "fp32",
    seed: int = 0,
    loader_workers: int = 0,
    evaluation: Callable[[TrainState], dict[str, float]] | None = None,
    evaluate_every_epochs: int | None = 1,
    evaluate_every_steps: int | None = None,
    callbacks: Sequence[Callback] = (),
    stop: StopFlag | None = None,
) -> TrainState:
    """Trains until `epochs` or `max_steps` are reached, or any rank wants to stop. Collective.

        for each epoch:
            for each global batch of the epoch's order:           (the sampler plans, each rank gets its share)
                forward, backward; gradients are summed over all ranks meanwhile
                divide by the global count, clip, step, commit    (step.py)
                evaluate, if it is time
                leave, if any rank wants to stop

    Args:
        model: a `Replica` (`DistributedDataParallel`), or a module, which is wrapped in one.
        task: turns a batch into (loss_sum, count).
        train_data: map-style data set.
        optimizer: of the module's parameters; its present rates are what `schedule` multiplies.
        global_batch: samples per step of all ranks together; any number from the world size up.
        epochs, max_steps: whichever is reached first; one is needed.
        state: to continue from, instead of a fresh one made of model, optimizer and batch settings.
        num_shards, micro_size: parts that a batch is cut into, and most samples per forward (`TrainSampler`).
        schedule: factor of the learning rate as a function of the step.
        clip_norm: largest norm of the global gradient.
        seed: of the order and of all random streams.
        loader_workers: processes that prepare batches, per rank.
        evaluation: computes metrics; collective, called on all ranks after the same step. An empty result means that
            it was given up because a rank wants to stop.
        callbacks: called at the six moments of `callbacks.py`.
        stop: this rank's wish to stop.

    Returns:
        Where the run stands.

    Raises:
        ConfigError: settings that cannot work.
        Diverged: the loss is not finite.
        PeerLost: a rank was lost.
    """
    comm = comm or (state.comm if state else current())
    if state is None:
        if global_batch is None:
            raise ConfigError("global_batch is missing: say how many samples a step takes, over all workers together")
        sampler = TrainSampler(
            len(train_data),
            global_batch=global_batch,
            rank=comm.rank,
            world_size=comm.world_size,
            num_shards=num_shards,
            micro_size=micro_size,
            seed=seed,
        )
        replica = model if isinstance(model, Replica) else DistributedDataParallel(model, comm=comm)
        state = TrainState(comm, replica, optimizer, sampler)
    num_steps = last_step(state.sampler, epochs=epochs, max_steps=max_steps)
    rules = StepRules(task, schedule or constant(), base_rates(optimizer), clip_norm, precision, seed)
    watching = Callbacks(callbacks)
    stop = StopFlag() if stop is None else stop  # a flag that is not raised counts as false
    loader = TrainLoader(train_data, state.sampler, num_workers=loader_workers, pin_memory=comm.device.type == "cuda")
    state.model.train()
    try:
        watching.fit_start(state)
        while state.step < num_steps and not state.stopped_by:
            for plan, batches in loader.epoch():
                watching.step_start(state)
                report, someone_stops = train_step(state, rules, plan, batches, wants_stop=bool(stop))
                watching.step_end(state, report)
                if someone_stops:
                    state.stopped_by = _agreed_reason(state, stop)
                elif evaluation and _is_time(state, num_steps, evaluate_every_epochs, evaluate_every_steps):
                    _evaluate(state, evaluation, watching, stop)
                if state.step >= num_steps or state.stopped_by:
                    break
        watching.fit_end(state)
    except BaseException as error:
        watching.exception(state, error)
        raise
    finally:
        loader.close()
    return state


def last_step(sampler: TrainSampler, *, epochs: int | None, max_steps: int | None) -> int:
    """The number of steps of the whole run, resumed parts included."""
    if epochs is None and max_steps is None:
        raise ConfigError("neither epochs nor max_steps is given: the run would never end")
    by_epochs = None if epochs is None else epochs * sampler.num_steps_per_epoch
    return min(limit for limit in (by_epochs, max_steps) if limit is not None)


def base_rates(optimizer: Optimizer) -> tuple[float, ...]:
    """Learning rates per group before any schedule; kept in the optimizer, and so in its checkpoints."""
    return tuple(float(group.setdefault("initial_lr", group["lr"])) for group in optimizer.param_groups)


def _is_time(state: TrainState, num_steps: int, every_epochs: int | None, every_steps: int | None) -> bool:
    """At the end, every so many epochs, every so many steps."""
    if state.step >= num_steps:
        return True
    position = state.sampler.state
    at_epoch_end = position.consumed == 0
    if every_epochs is not None and at_epoch_end and position.epoch % every_epochs == 0:
        return True
    return every_steps is not None and state.step % every_steps == 0


def _evaluate(
    state: TrainState,
    evaluation: Callable[[TrainState], dict[str, float]],
    watching: Callback,
    stop: StopFlag,
) -> None:
    metrics = evaluation(state)
    if metrics:
        state.evaluation, state.evaluated_at = metrics, state.step
        watching.evaluated(state)
    else:
        state.stopped_by = _agreed_reason(state, stop)


def _agreed_reason(state: TrainState, stop: StopFlag) -> str:
    """The reason of the lowest rank that has one, on every rank."""
    reasons = all_gather_object(state.comm, stop.reason)
    return next((reason for reason in reasons if reason), "stopped")
