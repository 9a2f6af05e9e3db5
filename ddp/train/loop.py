"""The training loop: its docstring is its pseudocode. `steps/supply.py` supplies steps, `steps/step.py` makes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn

from ddp.comm.meeting.membership import RESIZE, current_member
from ddp.comm.objects import all_gather_object
from ddp.data.loading.iterable import IterableSampler
from ddp.data.loading.source import Source
from ddp.optim.schedules import constant
from ddp.policies import Rounds
from ddp.strategies.parameter_server.server import Service
from ddp.train.arguments import FitArguments, Inputs
from ddp.train.batch_checks import FirstBatchCheck, check_waiting, may_have_one, refuse_waiting
from ddp.train.evaluate import refuse_uneven, switch_to_training
from ddp.train.held_out import Evaluator
from ddp.train.parameter_server import ServedSteps
from ddp.train.replay import Audit, Replay
from ddp.train.steps.callbacks import BatchCallback, Callback, notify_of
from ddp.train.steps.state import StepReport, TrainState, agreed_reason
from ddp.train.steps.step import StepRules
from ddp.train.steps.supply import EpochSupply, LoadedSteps, StreamedSteps
from ddp.train.steps.task import name_of
from ddp.train.supervision import Guard, Supervision, no_checkpoint
from ddp.train.survive import goes_on


def train_loop(
    state: TrainState,
    given: FitArguments,
    inputs: Inputs,
    callbacks: Sequence[Callback],
    service: Service | None = None,
    go_back: Callable[[Guard], None] = no_checkpoint,
) -> None:
    """Trains from `state` on, until `epochs` or `max_steps` is reached or any rank wants to stop. Collective.

    If `state` comes from a run that has stopped early, the stop is cleared from it, and training continues. Its flag is
    the caller's: one that is still set stops the next call, too.

        for each step that is supplied:                       (of each epoch's global batches, each rank has its share)
            forward, backward; gradients are summed over all ranks meanwhile
            if it is a bad step: leave it out, go back, or end (supervision.py)
            divide by the global count, clip, step, commit    (steps/step.py)
            if any rank wants to stop: leave              (if ranks join or leave: the next ones go on, survive.py)
            if it is time: evaluate                           (held_out.py)
        evaluate, unless that was done after the last step
        evaluate once more for the report, if there are samples for it alone

    Args:
        state: model, optimizer, sampler, step, stop flag; the sampler's seed is that of every random stream.
        given: length of the run, precision, reading, and when to evaluate.
        inputs: task, samples and schedule.
        callbacks: run at the moments of `steps/callbacks.py`, in this order.
        service: of a server, whose workers compute in its place.
        go_back: makes the state that of the last checkpoint, for a guard.

    Raises:
        ConfigError: settings that cannot work.
        AuditFailed: a rank computes other bits of a shard than others.
        Diverged: loss or gradient is not finite.
        UnusedParameters: some parameters got no gradient.
        PeerLost: a rank was lost.
    """
    num_steps, num_samples = end_of_run(state, epochs=given.epochs, max_steps=given.max_steps)
    factor = inputs.schedule or constant()
    rules = StepRules(
        task=inputs.task,
        schedule=state.schedule or (lambda plan: factor(state.sampler.position_of(plan) + plan.size / 2, num_samples)),
        precision=given.precision,
        seed=state.sampler.state.seed,
        noise_scale_every=given.folder.noise_scale_every,
        batch_checks=batch_checks(state, given, inputs, callbacks, num_steps=num_steps),
        keeps_buffers=current_member() is not None or any(each.action == "skip" for each in _guards(callbacks)),
    )
    evaluator = Evaluator(inputs.held_out, inputs.task, given.evaluation, given.precision, callbacks)
    supply = supply_of(state, rules, given, inputs.source, callbacks, service, go_back, num_steps=num_steps)
    state.stopped_by, number = "", None
    switch_to_training(state.model)
    try:
        _start(state, callbacks)
        evaluator.catch_up(state)
        for step in supply:
            number = state.step + 1
            for callback in callbacks:
                callback.step_start(state)
            report = step.make()
            if report is not None:
                _ended(report, state, callbacks)
            if report is not None and report.num_stopping:
                state.stopped_by = agreed_reason(state) or "stopped"
            elif evaluator.is_due(state):
                evaluator.choose(state)
        if state.stopped_by == RESIZE:
            if state.step < num_steps:
                return
            state.stopped_by = ""  # this was the last step
        evaluator.finish(state)
        for callback in callbacks:
            callback.fit_end(state)
    except BaseException as error:
        with suppress(Exception):  # of a class that lets nothing be set
            error.ddp_step = number  # type: ignore[attr-defined]  # for the report of a worker that fails
        if not goes_on(error):
            notify_of(error, state, callbacks)
        raise
    finally:
        supply.close()


def _ended(report: StepReport, state: TrainState, callbacks: Sequence[Callback]) -> None:
    """Tells callbacks of a step: all of them, also if one meets the loss of a rank, because the step is committed."""
    lost: BaseException | None = None
    for callback in callbacks:
        try:
            callback.step_end(state, report)
        except Exception as error:
            if not goes_on(error):
                raise
            lost = lost or error
    if lost is not None:
        raise lost


def batch_checks(
    state: TrainState, given: FitArguments, inputs: Inputs, callbacks: Sequence[Callback], *, num_steps: int
) -> Sequence[Callable[[nn.Module, Any, int], None]]:
    """Returns the checks of the batches of a run: a check of the first one, and callbacks that see each. Collective.

    Args:
        num_steps: of the whole run.

    Raises:
        ConfigError: layers of the model would wait for ever.
    """
    if state.waits:
        check_waiting(state, given.batches.uneven, given.reading.max_unreadable)
    checks = [each for each in callbacks if isinstance(each, BatchCallback)]
    for each in checks:
        each.begin(inputs.task, num_steps)
    # All ranks check the first batch, or none, because a model or a loss may call collectives.
    is_checked = state.model.is_whole and not given.reading.max_unreadable  # a batch may have less than it should
    if not is_checked or not _all_have_several_samples(state):
        return checks
    first = FirstBatchCheck(
        inputs.task,
        with_one=may_have_one(state.comm, state.sampler, num_steps=max(0, num_steps - state.step)),
        num_calls=lambda: state.comm.num_calls,
        if_it_waits=partial(_check_task, state, given, inputs),
    )
    return [first, *checks]


def _all_have_several_samples(state: TrainState) -> bool:
    """Returns True if the next step's first forward has two samples or more on every rank."""
    micros = next(iter(state.sampler.plans())).micros
    return all(all_gather_object(state.comm, bool(micros) and len(micros[0].indices) > 1))


def _check_task(state: TrainState, given: FitArguments, inputs: Inputs, where: Collection[str]) -> None:
    """Raises ConfigError if a task that calls collectives would wait for ever. Collective.

    Args:
        where: the methods that do: loss, metrics or both.
    """
    name, when = name_of(inputs.task), given.evaluation
    if "loss" in where:
        state.waits = True
        if given.same_bits.on or isinstance(given.strategy, Rounds):
            refuse_waiting(inputs.task, "same_bits=True" if given.same_bits.on else "strategy='local_sgd'")
        check_waiting(state, given.batches.uneven, given.reading.max_unreadable, f"{name}.loss")
    for source in inputs.held_out.given().values() if "metrics" in where else ():
        cut: dict[str, Any] = {"world_size": state.comm.world_size, "num_shards": state.model.num_shards}
        remedy = "let it call no collectives"
        refuse_uneven(f"{name}.metrics", remedy, len(source.samples), batch_size=when.batch, **cut)


def supply_of(
    state: TrainState,
    rules: StepRules,
    given: FitArguments,
    source: Source,
    callbacks: Sequence[Callback],
    service: Service | None,
    go_back: Callable[[Guard], None],
    *,
    num_steps: int,
) -> EpochSupply | Supervision:
    """Returns the supply of a run's steps; arguments as in `train_loop`."""
    until: dict[str, Any] = {"epochs": given.epochs, "num_steps": num_steps}
    if service is not None:
        return ServedSteps(state, rules, service, **until)
    if isinstance(state.sampler, IterableSampler):
        return StreamedSteps(state, rules, source, sampler=state.sampler, uneven=given.batches.uneven, **until)
    supply = LoadedSteps(state, rules, source, max_unreadable=given.reading.max_unreadable, **until)
    if isinstance(given.strategy, Rounds) or not state.model.is_whole:  # then no rank can compute a step alone
        return supply
    replay = Replay(state, rules, supply.read)
    audit = Audit(replay, every=given.same_bits.audit_every) if given.same_bits.on else None
    guard = next(iter(_guards(callbacks)), Guard())
    return Supervision(supply, replay, guard=guard, audit=audit, callbacks=callbacks, go_back=go_back)


def _guards(callbacks: Sequence[Callback]) -> list[Guard]:
    return [each for each in callbacks if isinstance(each, Guard)]


def _start(state: TrainState, callbacks: Sequence[Callback]) -> None:
    for callback in callbacks:
        try:
            callback.fit_start(state)
        except ValueError as error:
            if "more than one parameter group" in str(error) and state.step:
                error.add_note("the run was resumed, and has this group already: add it only if it is not there")
            raise


def end_of_run(state: TrainState, *, epochs: int | None, max_steps: int | None) -> tuple[int, int]:
    """Returns steps and samples of the whole run: those made, and those left."""
    num_steps = None if max_steps is None else max_steps - state.step
    left, num_samples = state.sampler.end(epochs=epochs, num_steps=num_steps)
    return state.step + left, num_samples
