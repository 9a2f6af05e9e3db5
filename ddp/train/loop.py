"""The training loop: its docstring is its pseudocode, and one step is in `step.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.data.loading.iterable import IterableLoader, IterableSampler
from ddp.data.loading.loader import TrainLoader
from ddp.data.loading.source import Source
from ddp.data.orders.sampler import StepPlan
from ddp.errors import ConfigError, Diverged
from ddp.optim.schedules import constant
from ddp.policies import Rounds
from ddp.process.log import log
from ddp.setting import Uneven
from ddp.strategies.parameter_server.server import Service
from ddp.train.arguments import Given, Inputs
from ddp.train.audit import Audit
from ddp.train.batch_statistics import may_have_one, refuse_uneven
from ddp.train.callbacks import Callback, tell_of
from ddp.train.evaluate import switch_to_training
from ddp.train.first_look import EqualBatches, FirstLook, refuse_waiting
from ddp.train.guard import Guard
from ddp.train.held_out import Evaluator
from ddp.train.replay import Replay
from ddp.train.served import LeaseFeed, served_step
from ddp.train.state import StepReport, TrainState, agreed_reason, loading
from ddp.train.step import StepRules, train_step
from ddp.train.supervision import Course, Supervision, no_checkpoint
from ddp.train.tasks.task import name_of
from ddp.train.watcher import Watch
from ddp.units import counted


def train_loop(
    state: TrainState,
    given: Given,
    inputs: Inputs,
    callbacks: Sequence[Callback],
    service: Service | None = None,
    go_back: Callable[[Guard], None] = no_checkpoint,
) -> None:
    """Trains from `state` on, until `epochs` or `max_steps` is reached or any rank wants to stop. Collective.

    If `state` comes from a run that has stopped early, the stop is cleared from it, and training goes on. Its flag is
    the caller's: one that is still set stops the next call, too.

        for each epoch:
            for each global batch of the epoch's order:           (the sampler plans, each rank gets its share)
                forward, backward; gradients are summed over all ranks meanwhile
                is that a bad step? leave it out, go back, or end (supervision.py)
                divide by the global count, clip, step, commit    (step.py)
                if any rank wants to stop: leave
                if it is time: evaluate
        evaluate, unless that was done after the last step
        evaluate once more for the report, if there are samples for it alone

    Args:
        state: model, optimizer, sampler, step, stop flag; the sampler's seed is that of every random stream.
        given: length of the run, precision, reading, and when to evaluate.
        inputs: task, samples and schedule.
        callbacks: run at the moments of `callbacks.py`, in this order.
        service: what a server does for workers, who compute in its place.
        go_back: makes the state that of the last checkpoint, for a guard.

    Raises:
        ConfigError: settings that cannot work.
        AuditFailed: a rank computes other bits of a shard than others.
        Diverged: loss or gradient is not finite.
        UnusedParameters: some parameters got no gradient.
        PeerLost: a rank was lost.
    """
    task, source, factor = inputs.task, inputs.source, inputs.schedule or constant()
    epochs, reading, uneven = given.epochs, given.reading, given.batches.uneven
    num_steps, num_samples = end_of_run(state, epochs=epochs, max_steps=given.max_steps)
    is_wanted = not reading.max_unreadable and _all_have_several_samples(state)  # else a batch may have less
    with_one = may_have_one(state.comm, state.sampler, num_steps=max(0, num_steps - state.step))
    first = FirstLook(
        task,
        wanted=is_wanted,
        with_one=with_one,
        num_calls=lambda: state.comm.num_calls,
        if_it_waits=partial(_check_task, state, given, inputs),
    )
    looks: list[FirstLook | EqualBatches | Watch] = [first]
    if reading.debug:
        equal_batches = EqualBatches(state.comm.rank, source.num_workers)
        looks, callbacks = [equal_batches, *looks], [equal_batches, *callbacks]
    for watch in (each for each in callbacks if isinstance(each, Watch)):
        watch.begin(task, num_steps)
        looks = [*looks, watch]
    rules = StepRules(
        task=task,
        schedule=state.schedule or (lambda plan: factor(state.sampler.position_of(plan) + plan.size / 2, num_samples)),
        precision=given.precision,
        seed=state.sampler.state.seed,
        noise_scale_every=given.folder.noise_scale_every,
        looks=looks,
    )
    evaluator = Evaluator(inputs.held_out, task, given.evaluation, given.precision, callbacks)
    feed: LeaseFeed | TrainLoader | StreamFeed = (
        _feed(state, source, uneven, reading.max_unreadable)
        if service is None
        else LeaseFeed(state, service, num_steps=num_steps)
    )
    make_step: Callable[..., tuple[StepReport, bool]] = train_step if service is None else served_step
    supervision = None
    if isinstance(feed, TrainLoader) and not isinstance(given.strategy, Rounds):
        replay = Replay(state, rules, feed.read)
        audit = Audit(replay, every=given.same_bits.audit_every) if given.same_bits.on else None
        guard = next((each for each in callbacks if isinstance(each, Guard)), None)
        supervision = Supervision(replay, guard=guard, audit=audit, go_back=go_back)
        rules = replace(rules, supervisor=supervision)
    state.unreadable = feed.unreadable
    if state.waits:
        _check_waiting(state, uneven, reading.max_unreadable)
    state.stopped_by = ""
    switch_to_training(state.model)
    running_step = None
    try:
        _start(state, callbacks)
        evaluator.catch_up(state)
        while state.step < num_steps and not state.stopped_by and (epochs is None or state.epoch < epochs):
            for plan, batches in feed.epoch():
                running_step = state.step + 1
                for callback in callbacks:
                    callback.step_start(state)
                try:
                    with state.phase("step"):
                        step, someone_stops = make_step(state, rules, plan, batches, wants_stop=bool(state.stop_flag))
                except Diverged as error:
                    if supervision is None:
                        raise
                    if supervision.act(plan, error) is Course.FROM_CHECKPOINT:
                        break  # the epoch begins anew, where the checkpoint is
                    for callback in callbacks:
                        callback.step_left_out(state, plan.epoch)
                    if evaluator.is_due(state):
                        evaluator.choose(state)
                    continue
                if step.num_ending:
                    feed.ended(step.num_ending)
                for callback in callbacks:
                    callback.step_end(state, step)
                if someone_stops:
                    state.stopped_by = agreed_reason(state) or "stopped"
                elif evaluator.is_due(state):
                    evaluator.choose(state)
                if state.step >= num_steps or state.stopped_by:
                    break
        evaluator.finish(state)
        if reading.max_unreadable:
            state.unreadable = set[int]().union(*all_gather_object(state.comm, state.unreadable))
        for callback in callbacks:
            callback.fit_end(state)
    except BaseException as error:
        with suppress(Exception):  # of a class that lets nothing be set
            error.ddp_step = running_step  # type: ignore[attr-defined]  # for the report of a worker that fails
        tell_of(error, state, callbacks)
        raise
    finally:
        feed.close()


def _start(state: TrainState, callbacks: Sequence[Callback]) -> None:
    for callback in callbacks:
        try:
            callback.fit_start(state)
        except ValueError as error:
            if "more than one parameter group" in str(error) and state.step:
                error.add_note("the run was resumed, and has this group already: add it only if it is not there")
            raise


def _feed(state: TrainState, source: Source, uneven: Uneven, max_unreadable: int) -> TrainLoader | StreamFeed:
    """Returns the loader, or the feed of a stream, which yields steps with their batches, epoch by epoch."""
    choices = loading(source, state.comm, state.stop_flag)
    if isinstance(state.sampler, IterableSampler):
        loader = IterableLoader(source.samples, state.sampler, **choices)
        return StreamFeed(state.comm, loader, uneven=uneven)
    choices |= {"max_unreadable": max_unreadable, "known_unreadable": state.unreadable}
    return TrainLoader(source.samples, state.sampler, **choices)


def _check_waiting(state: TrainState, uneven: Uneven, max_unreadable: int, what: str = "SyncBatchNorm") -> None:
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


def _check_task(state: TrainState, given: Given, inputs: Inputs, where: Collection[str]) -> None:
    """Raises ConfigError if a task that calls collectives would wait for ever. Collective.

    Args:
        where: the methods that do: loss, metrics or both.
    """
    name, when = name_of(inputs.task), given.evaluation
    if "loss" in where:
        state.waits = True
        if given.same_bits.on or isinstance(given.strategy, Rounds):
            refuse_waiting(inputs.task, "same_bits=True" if given.same_bits.on else "strategy='local_sgd'")
        _check_waiting(state, given.batches.uneven, given.reading.max_unreadable, f"{name}.loss")
    for source in inputs.held_out.given().values() if "metrics" in where else ():
        cut: dict[str, Any] = {"world_size": state.comm.world_size, "num_shards": state.model.num_shards}
        remedy = "let it call no collectives"
        refuse_uneven(f"{name}.metrics", remedy, len(source.samples), batch_size=when.batch, **cut)


def end_of_run(state: TrainState, *, epochs: int | None, max_steps: int | None) -> tuple[int, int]:
    """Returns steps and samples of the whole run: what was made, and what is left."""
    if epochs is None and max_steps is None:
        raise ConfigError("neither epochs nor max_steps is given: the run would never end")
    num_steps = None if max_steps is None else max_steps - state.step
    left, num_samples = state.sampler.end(epochs=epochs, num_steps=num_steps)
    return state.step + left, num_samples


def _all_have_several_samples(state: TrainState) -> bool:
    """Returns True if the next step's first forward has two samples or more on every rank."""
    micros = next(iter(state.sampler.plans())).micros
    return all(all_gather_object(state.comm, bool(micros) and len(micros[0].indices) > 1))


# --- A stream, whose end nobody knows --------------------------------------------------------------------------------
#
# a pass begins      one message: has everyone a batch, and have all (or no two) ranks begun with the same samples?
# each step          nothing: the totals count the ranks whose stream ends with it
# a pass ends        one message: how many samples it had


class StreamFeed:
    """Yields the steps of a pass over a stream until its end, on which all ranks agree.

    Args:
        uneven: what happens where the stream of one rank ends before that of another.
    """

    def __init__(self, comm: Communicator, loader: IterableLoader, *, uneven: Uneven) -> None:
        self._comm, self._loader, self._uneven = comm, loader, uneven
        self._is_over, self._is_last = False, False
        self.unreadable: set[int] = set()  # nothing can be left out of a stream from outside

    def epoch(self) -> Iterator[tuple[StepPlan, Iterator[Any]]]:
        """Yields each plan with an iterator over this rank's batches. Collective.

        Raises:
            ConfigError: the streams are empty, or not as `sharding` says, or uneven where that is an error.
        """
        self._is_over, self._consumed = False, self._loader.sampler.state.consumed
        firsts = all_gather_object(self._comm, self._loader.begin())
        self._check(firsts)
        self._is_last = firsts[self._comm.rank] is None
        if num_ending := firsts.count(None):
            self.ended(num_ending)
        for plan, batches in self._loader.steps():
            if self._is_over:
                return
            self._is_last = plan.is_last
            yield plan, batches

    def ended(self, num_ending: int) -> None:
        """Ends the pass if it is time, once the streams of this number of ranks are at their end. Collective.

        Raises:
            ConfigError: some ranks have more samples than others, and that is an error.
        """
        world_size, sampler = self._comm.world_size, self._loader.sampler
        if num_ending < world_size and self._uneven == "raise" and sampler.shares_itself:
            ended = [rank for rank, is_last in enumerate(all_gather_object(self._comm, self._is_last)) if is_last]
            raise ConfigError(
                f"the stream of rank {', '.join(map(str, ended))} has ended, and others have not: give all ranks as "
                "many samples, or take uneven='join' or 'stop_all'"
            )
        if num_ending == world_size or self._uneven == "stop_all":
            num_samples = sum(all_gather_object(self._comm, self._loader.num_samples))
            if not num_samples and not self._consumed:
                raise ConfigError("the data have given no sample: is the iterable used up? It must be read again")
            had = self._consumed + num_samples
            if sampler.told not in (None, had) and sampler.state.epoch == self._comm.rank == 0:
                log.warning(
                    "the schedule goes by the length of the data, %d, and the first pass had %d samples: let __len__ "
                    "say what a pass has, or give max_steps",
                    *(sampler.told, had),
                )
            sampler.end_pass(had)
            self._is_over = True

    def _check(self, firsts: list[tuple[str, ...] | None]) -> None:
        """Raises ConfigError if ranks should share one stream and do not; warns if they should not and seem to."""
        known = {rank: first for rank, first in enumerate(firsts) if first is not None}
        num_compared = min(map(len, known.values()), default=0)
        if len(known) < 2 or not num_compared:
            return
        found = {rank: first[:num_compared] for rank, first in known.items()}
        most = Counter(found.values()).most_common(1)[0][0]
        if self._loader.sampler.shares_itself and len(set(found.values())) < len(found) and self._comm.rank == 0:
            twice = [rank for rank, first in found.items() if first == most]
            log.warning(
                "sharding='off': ranks %s begin with %s; if they read the same stream, leave sharding out, or let the "
                "data share themselves out by rank",
                *(", ".join(map(str, twice)), f"the same {counted(num_compared, 'sample')}"),
            )
        if not self._loader.sampler.shares_itself and len(set(found.values())) > 1:
            raise ConfigError(
                f"the streams of {counted(len(found), 'rank')} do not begin with the same samples: if the data share "
                "themselves out by rank, take ddp.Batches(sharding='off'), and each rank trains on all that its own "
                "stream gives; if they are shuffled, that needs a seed"
            )

    def close(self) -> None:
        """Ends the loader processes."""
        self._loader.close()
