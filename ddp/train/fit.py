"""`ddp.fit`: a whole training run from Python, from a model and data to checkpoints, metrics and curves.

    1  what is given      the task, the samples, the optimizer: each checked, and taken apart where it is a DataLoader
    2  the state          replica, sampler, scheduler; and the checkpoint that the run goes on from, if there is one
    3  the loop           `loop.py`, with the callbacks that save, log and show
    4  the results        RUN_DIR/summary.json and curves.png, written by rank 0

The command line ends here, too: `ddp/run/build/stages.py` makes the arguments from the settings.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, Never, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp.comm.communicator import Communicator
from ddp.comm.objects import on_rank_zero
from ddp.data.loading.cache import cache_of
from ddp.data.loading.iterable import ENDLESS, IterableSampler, sampler_of_stream
from ddp.data.loading.source import Source, source_of
from ddp.data.orders.order import Order
from ddp.data.orders.sampler import TrainSampler, sampler_of
from ddp.data.orders.sharding import OwnSharding
from ddp.data.orders.skips import checked_range
from ddp.data.orders.steps import BatchWarmup
from ddp.data.orders.token_budget import TokenBudget
from ddp.data.samples import Collate
from ddp.errors import ConfigError, Diverged, UnusedParameters, nearest
from ddp.gradients.hooks.error_feedback import corrected
from ddp.gradients.hooks.hook import Hook
from ddp.optim.layerwise import Layerwise
from ddp.optim.schedules import RateSchedule
from ddp.optim.torch_schedule import Moment
from ddp.process.clock import now_s
from ddp.process.files import json_object, make_folder, read_own, refuse_unwritable_name
from ddp.process.log import log
from ddp.setting import Precision, Uneven, WireName
from ddp.strategies.choice import ranks_of, replica_of, strategy_for
from ddp.train.arguments import (
    NEEDED,
    check_callbacks,
    check_ending,
    check_numbers,
    idle_notes,
    not_one_of,
    order_of,
    refuse_disagreement,
    refuse_unknown,
    schedules_of,
    settings_of,
    shards_of,
    with_cache,
)
from ddp.train.callbacks import Callback, MetricsFile, NoiseMeter, ThroughputMeter
from ddp.train.checkpoint import AfterEvaluation, Checkpointer, read_checkpoint, restore, run_identity
from ddp.train.checkpoint_store import CheckpointStore
from ddp.train.data_checks import EpochCheck
from ddp.train.early_stopping import EarlyStopping
from ddp.train.ema import EMA
from ddp.train.given_back import gives_back
from ddp.train.held_out import Evaluator, check_held_out, held_out_of, note_of_choice
from ddp.train.kept import Kept
from ddp.train.loop import end_of_run, train_loop
from ddp.train.progress import ProgressBar, StopNote
from ddp.train.report import draw_curves, is_metric, summary_of, write_summary
from ddp.train.start_note import StartNote
from ddp.train.state import TrainState
from ddp.train.stopping import StopFlag, flag_of_a_new_fit
from ddp.train.stored_checkpoint import resume_from, steps
from ddp.train.tasks.loss_function import Reduction, as_task
from ddp.train.tasks.task import Task
from ddp.train.traffic_hint import TrafficHint
from ddp.train.trial import tried
from ddp.units import binary_size, counted

SHORTEN = "Fewer epochs or max_steps shorten it, and so do more workers, if cores are idle."
GO_ON = "Ctrl-C ends it with a checkpoint, and resume=auto continues it."


@gives_back
def fit(
    model: nn.Module,
    data: Any,
    optimizer: Optimizer,
    *,
    loss: Task | Callable[[Any, Any], Tensor] = NEEDED,
    reduction: Reduction | None = None,
    global_batch: int | BatchWarmup | TokenBudget = NEEDED,
    epochs: int | None = None,
    max_steps: int | None = None,
    validation_data: Any = None,
    test_data: Any = None,
    evaluate_every_epochs: int | None = 1,
    evaluate_every_steps: int | None = None,
    evaluation_batch: int = 256,
    collate: Collate | None = None,
    loader_workers: int | None = None,
    order: Order | None = None,
    sharding: str | OwnSharding = "auto",
    skip_steps: tuple[int, int] | None = None,
    debug_data: bool = False,
    uneven: Uneven = "join",
    max_unreadable: int = 0,
    cache: bool = False,
    schedule: RateSchedule | LRScheduler | None = None,
    schedule_every: Moment | None = None,
    clip_norm: float | None = None,
    precision: Precision = "fp32",
    sharded: bool = False,
    wire: WireName | None = None,
    hook: Hook | None = None,
    num_shards: int | None = None,
    micro_size: int | None = None,
    seed: int = 0,
    checkpoint_dir: str | Path | None = "runs/DATE_TIME",
    checkpoint_every_steps: int | None = None,
    keep_last: int = 3,
    keep_best: int = 1,
    resume: str | Path | None = None,
    log_every: int = 10,
    noise_scale_every: int = 10,
    progress: bool = True,
    curves: bool = True,
    callbacks: Sequence[Callback] = (),
    stop: StopFlag | None = None,
    trial: bool = False,
    settings: Mapping[str, Any] | None = None,
    comm: Communicator | None = None,
    **mistyped: Never,
) -> TrainState:
    """Trains a model on all ranks together, and evaluates, saves, logs and shows it meanwhile. Collective.

        def train():
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            state = ddp.fit(
                model, (inputs, targets), optimizer, loss=torch.nn.functional.cross_entropy, global_batch=64, epochs=3,
                test_data=(test_inputs, test_targets), checkpoint_dir="runs/mine", resume="auto",
            )
            return state.evaluation                         # {"test_loss": …}, over all samples of all ranks

        if __name__ == "__main__":
            print(ddp.launch(train, workers=2)[0])

    Ctrl-C and SIGTERM end it after a step, in agreement, with a checkpoint; `stopped_by` of the result says so. A
    program that begins another fit then, such as a loop over folds, ends there; in a notebook, the cell does.

    Args:
        model: a module, which is wrapped in a `BucketedDataParallel`; or a replica. Unless it is on a GPU already, it
            is moved to the device of `ddp.init`; unless that was called, to a GPU where there is one.
        data: a data set with length and index, a pair of tensors (inputs, targets), or a DataLoader, of which all is
            honoured or refused but the size of its batches (`data/loading/torch_loader.py`). The same on every rank: a
            random split needs a seed. Or an iterable without a length (`ddp/data/loading/iterable.py`).
        optimizer: over the model's parameters.
        loss: a function loss(outputs, targets) → scalar, for data of pairs (inputs, targets); or a `ddp.Task`, such as
            `ddp.Classification()`, for everything else.
        reduction: what a function returns for a batch: the "mean" over its samples (the default) or their "sum".
        global_batch: samples per optimizer step of all ranks together, any number from the world size up; a
            `ddp.BatchWarmup`, which lets it grow; or a `ddp.data.TokenBudget`, for samples of unequal lengths.
        epochs, max_steps: of the whole run, whichever is reached first; one is needed.
        validation_data: held-out samples that the run chooses by (the best checkpoint, ReduceLROnPlateau,
            `ddp.EarlyStopping`): a data set, as `data`; or a share of the training samples, such as 0.1, which the seed
            chooses. Those are set apart, and keep the transforms that they have in `data`, random ones included.
        test_data: held-out samples for the report at the end, with the last weights. Without validation_data the run
            evaluates them meanwhile and chooses by them. Without both nothing is evaluated, no checkpoint is the best.
        evaluate_every_epochs, evaluate_every_steps: when to evaluate, besides at the end.
        evaluation_batch: samples per rank in one forward of an evaluation.
        collate: makes a batch of a list of samples, in any nested form; None for the DataLoader's, or torch's default.
        loader_workers: processes per rank that prepare batches; None for the DataLoader's number, or 0.
        order: says which samples an epoch has where, such as `ddp.data.Weighted(weights)`; None: each once, at random.
        sharding: "sample", "file", "full_shuffle", "off", or a function (shard, number of shards) → its samples:
            `ddp/data/orders/sharding.py`. "auto": by file, if the data have `file_sizes` and as many files as shards.
        skip_steps: first and last of the steps whose samples are left out, counted from 1.
        uneven: what happens where an iterable ends on one rank before another: "join", "stop_all" or "raise".
        max_unreadable: most training samples that a rank leaves out, with a warning, because they cannot be read
            (OSError or `ddp.data.UnreadableSample`); 0: the first one ends the run. Held-out ones must be readable.
        cache: keeps samples in memory once they are read, one copy for all ranks of a host and their loader processes
            (`ddp/data/loading/cache.py`). Random transforms go behind it: `ddp.data.Transformed(samples, transform)`.
        debug_data: refuses ranks or loader processes that begin with equal batches.
        schedule: of the learning rate: a function (samples trained on, samples of the run) → factor, such as
            `ddp.optim.cosine()`; or a scheduler of torch's.
        schedule_every: "step" or "epoch": what one call of torch's `scheduler.step()` stands for.
        clip_norm: largest norm of the global gradient.
        precision: "fp32"; "bf16" or "fp16" for autocast, where "fp16" scales the loss (`ddp/optim/loss_scale.py`);
            "bf16_pure" for bfloat16 parameters with float32 master weights (`ddp/optim/master.py`).
        sharded: each rank updates a slice of the parameters, and holds the optimizer's state of that alone
            (`ddp/replica/sharded.py`).
        wire: "bf16", "fp16", "int8" or "int8_stochastic": the format in which gradients travel between hosts
            (`ddp/comm/wire_format.py`). "fp32", for precision="bf16_pure": they are added up as float32.
        hook: sends less than all of the gradients between hosts, such as `ddp.gradients.PowerSGD(4)`.
        num_shards, micro_size: number of parts of a batch, unless given that of the run to be resumed, or one for each
            rank; and largest number of samples per forward: larger shares are accumulated (`TrainSampler`).
        seed: of the samples' order and of dropout. The program's own generators are afterwards as before.
        checkpoint_dir: the folder of the run: checkpoints/ (the last and the best), metrics.jsonl, summary.json,
            curves.png. Unless given, a new one below runs/. None: nothing is written.
        checkpoint_every_steps: None: at the end of every epoch.
        keep_last, keep_best: numbers of checkpoints to keep: the last ones, and those with the best main metric.
        resume: "auto" continues the run in `checkpoint_dir`, or begins it if there is none; a path continues from the
            run or checkpoint there.
        log_every: steps between two lines of metrics.jsonl.
        noise_scale_every: steps from one measurement of the gradient noise scale to the next: up to which batch more
            workers pay (`ddp/train/monitor/noise_scale.py`); 0: never. It needs several ranks or micro-batches.
        progress: prints what was derived, and a bar, or off a terminal a line per evaluation.
        curves: draws curves.png at the end.
        callbacks: objects of `ddp.Callback`, run after those of fit, such as `ddp.EMA()` and
            `ddp.EarlyStopping(patience=3)`. Their state is saved and resumed.
        stop: a wish to stop that the caller sets; unless given, signals set it.
        trial: makes three steps, one evaluation and one save only, and keeps no file, to see whether all goes well.
        settings: what else the result depends on, by key, to be compared on a resume; None: the arguments above.
        comm: the ranks; None: all.

    Returns:
        The state of the run: `evaluation` (metrics by name), `train_loss`, `step`, `model`, `stopped_by`.

    Raises:
        ConfigError: an argument cannot work; the message has the remedy.
        CheckpointError: `resume` names no checkpoint, or one of another model.
        Diverged: the loss or the gradient is not finite.
        UnusedParameters: some parameters got no gradient.
        PeerLost: a rank was lost.
    """
    given = {name: value for name, value in locals().items() if name != "mistyped"}
    refuse_unknown(mistyped, [each for each in inspect.signature(fit).parameters if each != "mistyped"])
    for name, value in (("loss", loss), ("global_batch", global_batch)):
        if value is NEEDED:
            raise ConfigError(f"fit() needs {name}: see help(ddp.fit)")
    check_numbers(
        least=1,
        needed=True,
        evaluation_batch=evaluation_batch,
        keep_last=keep_last,
        keep_best=keep_best,
        log_every=log_every,
    )
    if not isinstance(global_batch, (BatchWarmup, TokenBudget)):
        check_numbers(least=1, needed=True, global_batch=global_batch)
        global_batch = int(global_batch)
    check_numbers(least=0, needed=True, seed=seed, noise_scale_every=noise_scale_every, max_unreadable=max_unreadable)
    check_numbers(least=0, loader_workers=loader_workers)
    check_numbers(
        least=1,
        epochs=epochs,
        max_steps=max_steps,
        evaluate_every_epochs=evaluate_every_epochs,
        evaluate_every_steps=evaluate_every_steps,
        num_shards=num_shards,
        micro_size=micro_size,
        checkpoint_every_steps=checkpoint_every_steps,
    )
    check_callbacks(callbacks, is_evaluated=validation_data is not None or test_data is not None)
    for name, value in (("sharded", sharded), ("cache", cache), ("debug_data", debug_data), ("trial", trial)):
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r}: must be True or False")
    check_ending(given)
    if trial:
        return tried(fit, given)
    if not (order is None or isinstance(order, Order)):
        raise ConfigError(f"order={order!r:.60}: give an order of ddp.data, such as ddp.data.Fixed(len(data)), or None")
    skip_steps = None if skip_steps is None else checked_range(skip_steps)
    if uneven not in get_args(Uneven):
        raise not_one_of(get_args(Uneven), uneven=uneven)
    if precision not in get_args(Precision):
        raise not_one_of(get_args(Precision), precision=precision)
    if clip_norm is not None and not (isinstance(clip_norm, (int, float)) and clip_norm > 0):
        raise ConfigError(f"clip_norm={clip_norm!r}: must be a number above 0; leave it out for no clipping")
    if isinstance(optimizer, Layerwise) and None not in (clip_norm, optimizer.clip_norm):
        raise ConfigError(
            f"clip_norm={clip_norm!r}: {type(optimizer).__name__} clips by itself, at {optimizer.clip_norm:g}; leave "
            "clip_norm out, or make the optimizer with clip_norm=None"
        )
    comm, stop_on_signals = comm or ranks_of(model), stop is None
    stop = flag_of_a_new_fit() if stop is None else stop  # not `or`, because a flag that is not set counts as false

    # 1  what is given
    task = as_task(loss, reduction)
    source = source_of(data, what="data", collate=collate, num_workers=loader_workers, trains=True)
    source, held_out = held_out_of(source, validation_data, test_data, collate=collate, seed=seed)
    order = order_of(order, source)
    replica = replica_of(model, optimizer, comm, sharded=sharded, wire=wire, hook=hook)
    factor, scheduler = schedules_of(schedule, schedule_every, optimizer, task=task, is_evaluated=held_out.is_evaluated)

    # 2  the state
    shares: dict[str, Any] = {"rank": comm.rank, "world_size": comm.world_size}
    shares["num_shards"] = shards_of(num_shards, comm, model, global_batch, checkpoint_dir, resume)
    shares |= {"global_batch": global_batch, "micro_size": micro_size, "seed": seed, "skip_steps": skip_steps}
    if source.is_stream:
        if max_unreadable:
            raise ConfigError(f"max_unreadable={max_unreadable}: data is a stream, which must leave samples out itself")
        sampler: TrainSampler = sampler_of_stream(
            sharding,
            order=order,
            limits={"epochs": epochs, "max_steps": max_steps},
            schedule=factor,
            num_processes=max(1, source.num_workers),
            **shares,
        )
        dealing = ""
    else:
        sampler, dealing = sampler_of(
            source.samples, order=order, sharding=sharding, drop_last=source.drop_last, **shares
        )
    arguments = {
        **settings_of(task, optimizer, sampler, schedule),
        "epochs": epochs,
        "max_steps": max_steps,
        "precision": precision,
        "clip_norm": clip_norm,
        "skip_steps": skip_steps,
        "wire": wire,
        "hook": None if hook is None else repr(corrected(hook)),
        "evaluate_every_epochs": evaluate_every_epochs,
        "evaluate_every_steps": evaluate_every_steps,
        "schedule_every": schedule_every,
        "chooses by": None if held_out.validation is None else "validation_data",
    }
    alike = {"max_unreadable": max_unreadable, "uneven": uneven, "cache": cache, "debug_data": debug_data}
    refuse_disagreement(comm, {**arguments, **alike}, source, held_out.given())
    check_held_out(comm, replica, held_out, batch_size=evaluation_batch)
    source = with_cache(source, comm) if cache else source
    # The user's own callbacks may write to weights by any way; ours give back what they write, and show it.
    watched = any(type(each) not in (EMA, EarlyStopping) for each in callbacks)
    strategy = strategy_for(replica, optimizer, precision=precision, clip_norm=clip_norm, watched=watched)
    state = TrainState(comm, strategy, optimizer, sampler, schedule=scheduler)
    state.main_metric, state.higher_is_better = f"{held_out.chooser}_{task.main_metric}", task.higher_is_better
    identity = run_identity(comm, replica, arguments if settings is None else settings)
    beside = Kept(replica, task, callbacks, saves=checkpoint_dir is not None, schedule=factor)
    try:
        run_dir, start = on_rank_zero(comm, lambda: _open(checkpoint_dir, resume), label="looking for a checkpoint")
        if start is not None:
            checkpoint = read_checkpoint(comm, start)
            restore(checkpoint, state, identity=identity)
            beside.resumes(checkpoint.parts, optimizer)
        num_steps, _ = end_of_run(state, epochs=epochs, max_steps=max_steps)
        if not num_steps and skip_steps is not None:
            raise ConfigError(f"skip_steps={list(skip_steps)}: leaves out all steps of the run; name fewer")
    except BaseException:
        state.strategy.finish(alone=True)  # no step was made, so that nothing has to be gathered
        raise
    begins_anew, num_left = resume is not None and start is None, num_steps - state.step
    notes = _headline(state, num_steps)
    notes += [dealing] if dealing else []
    notes += idle_notes(replica)
    notes += _notes(sampler, source, run_dir, num_left=num_left, begins_anew=begins_anew)
    _say(comm, "\n".join(notes), progress=progress)

    # 3  the loop
    meter, noise, epochs_seen = ThroughputMeter(), NoiseMeter(), EpochCheck()
    watching: list[Callback] = [meter, noise, epochs_seen]
    last: list[Callback] = [beside]
    store = None
    if run_dir is not None:
        best: Literal["max", "min"] = "max" if task.higher_is_better else "min"
        store = CheckpointStore(run_dir / "checkpoints", keep_last=keep_last, keep_best=keep_best, best=best)
        watching += [
            MetricsFile(run_dir / "metrics.jsonl", meter, noise, every=log_every),
            checkpointer := Checkpointer(
                store,
                identity=identity,
                every_steps=checkpoint_every_steps,
                score_metric=state.main_metric,
                kept=beside,
            ),
        ]
        last.append(AfterEvaluation(checkpointer))
        if settings is None and not source.is_stream:  # the command line has noted its start
            how: dict[str, Any] = {"order": order, "sharding": sharding, "validation": validation_data}
            watching.append(StartNote(run_dir, source, arguments, **how, goes_on=start is not None))
    if replica.comm.host_partition.num_hosts > 1:
        watching.append(TrafficHint(partial(_say, comm, progress=progress)))
    if progress:  # after the others, so that it shows what is saved already
        if_long = SHORTEN if run_dir is None else f"{SHORTEN} {GO_ON}"
        last.append(ProgressBar(meter, num_steps=num_steps, num_epochs=epochs, if_long=if_long))
    if stop_on_signals:
        last.append(StopNote(run_dir, stop))
    evaluator = Evaluator(held_out, task, batch_size=evaluation_batch, precision=precision, stop=stop)
    start_s = now_s()
    with contextlib.ExitStack() as until_end:
        until_end.callback(state.rates.take_schedule_out)
        if store is not None:  # before a callback changes a file there
            on_rank_zero(comm, lambda: _take(store, until_end), label="locking the folder of the checkpoints")
        if stop_on_signals:
            until_end.enter_context(stop.listening())
        try:
            train_loop(
                state,
                task,
                source,
                epochs=epochs,
                max_steps=max_steps,
                schedule=factor,
                precision=precision,
                noise_scale_every=noise_scale_every,
                debug_data=debug_data,
                uneven=uneven,
                max_unreadable=max_unreadable,
                evaluation=evaluator.choosing if held_out.is_evaluated else None,
                report=evaluator.reported if held_out.is_reported else None,
                evaluate_every_epochs=evaluate_every_epochs,
                evaluate_every_steps=evaluate_every_steps,
                callbacks=[*watching, *callbacks, *last],
                stop=stop,
            )
        except BaseException as error:
            # What all ranks raise alike has changed nothing, so that the optimizer can go on.
            state.strategy.finish(alone=not isinstance(error, (Diverged, UnusedParameters)))
            raise

    # 4  the results
    state.strategy.finish()
    if note := note_of_choice(state, held_out, callbacks, saves=run_dir is not None):
        _say(comm, note, progress=progress)
    if known := noise.scale.estimate():
        _say(comm, known.in_words(), progress=progress)
    if (kept := cache_of(source.samples)) is not None:
        size = binary_size(kept.num_bytes)
        _say(comm, f"the cache holds {counted(kept.num_cached, 'sample')} in {size}", progress=progress)
    summary = summary_of(
        state, meter, noise, epochs_seen, precision=precision, clip_norm=clip_norm, seconds=now_s() - start_s
    )
    if run_dir is not None:
        on_rank_zero(comm, partial(_finish, run_dir, summary, curves=curves), label="writing the results")
    return state


def _say(comm: Communicator, text: str, *, progress: bool) -> None:
    """Tells the user, and the logs of all ranks."""
    log.info("%s", text)
    if comm.rank == 0 and progress:
        print(text, flush=True)


def _open(checkpoint_dir: str | Path | None, resume: str | Path | None) -> tuple[Path | None, Path | None]:
    """Returns the folder of the run, which exists then, and the checkpoint to go on from. On rank 0 only.

    Raises:
        ConfigError: the folder holds another run, or cannot be made.
        CheckpointError: `resume` names a path without a checkpoint.
    """
    unnamed = str(checkpoint_dir) == "runs/DATE_TIME"
    if resume == "":
        raise ConfigError('resume="": give "auto", the path of a run or checkpoint, or None')
    if resume == "auto" and (checkpoint_dir is None or unnamed):
        raise ConfigError('resume="auto": which run? Name its folder, such as checkpoint_dir="runs/mine"')
    if checkpoint_dir is None:
        return None, None if resume is None else resume_from(str(resume), Path())
    run_dir = Path("runs", f"{datetime.now():%Y-%m-%d_%H-%M-%S.%f}") if unnamed else Path(checkpoint_dir)
    start = None if resume is None else resume_from(str(resume), run_dir)
    is_own = start is not None and start.resolve().is_relative_to(run_dir.resolve())
    if steps(run_dir / "checkpoints") and not is_own:
        raise ConfigError(
            f'checkpoint_dir={run_dir} holds a run: continue it with resume="auto", or take another folder'
        )
    refuse_unwritable_name(run_dir)
    try:
        make_folder(run_dir)
    except OSError as error:
        raise ConfigError(f"checkpoint_dir={run_dir}: {error.strerror}; take another folder") from error
    return run_dir, start


def _headline(state: TrainState, num_steps: int) -> list[str]:
    """Returns everything that was derived, in three lines."""
    comm, sampler, module = state.comm, state.sampler, state.model.module
    micros = next(iter(sampler.plans())).micros
    largest = max((len(micro.indices) for micro in micros), default=0)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    workers = f"{counted(comm.world_size, 'worker')} × {counted(torch.get_num_threads(), 'thread')}"
    start = f", continuing after step {state.step:,}" if state.step else ""
    way = f", all-reduce: {comm.plan.describe()}" if comm.world_size > 1 else ""
    if state.model.compression is not None:
        way += f", hook: {state.model.compression.hook!r}"
    samples = f"{counted(sampler.length, 'training sample')}, {counted(sampler.num_steps_per_epoch, 'step')} per epoch"
    if isinstance(sampler, IterableSampler):
        samples = "a stream of training samples"
    return [
        f"{workers} on {comm.device}, {type(module).__name__} with {num_parameters:,} parameters in a "
        f"{type(state.model).__name__}{way}",
        f"global batch {sampler.sizes.in_words()} in {counted(sampler.num_shards, 'shard')}; worker 0: "
        f"{counted(len(micros), 'forward')} of up to {counted(largest, 'sample')} a step; learning rate "
        f"{state.rates.base[0]:g}",
        f"{samples}, {counted(num_steps, 'step') if num_steps < ENDLESS else 'as many steps as it has'}{start}",
    ]


def _notes(
    sampler: TrainSampler, source: Source, run_dir: Path | None, *, num_left: int, begins_anew: bool
) -> list[str]:
    """Returns what the user may not expect, a line each."""
    notes = []
    if source.ignored:
        order = "" if source.is_stream or source.order else "each epoch is shuffled, in "
        notes.append(f"not used of the DataLoader: {source.ignored}; {order}steps of global_batch")
    if sampler.length < sampler.global_batch:
        notes.append(f"the data have fewer samples than global_batch={sampler.global_batch}: each step has all of them")
    if num_left <= 0:
        notes.append("all of the run's steps are done: raise epochs or max_steps to go on")
    if begins_anew and run_dir is not None:
        others = [path.parent.name for path in run_dir.absolute().parent.glob("*/checkpoints")]
        near = nearest(run_dir.name, [name for name in others if name != run_dir.name])
        hint = f"; did you mean {os.path.relpath(run_dir.parent / near)}?" if near else ""
        notes.append(f"resume=auto: {os.path.relpath(run_dir)} holds no checkpoint, so this run begins anew{hint}")
    return notes


def _take(store: CheckpointStore, until_end: contextlib.ExitStack) -> None:
    """Keeps other processes from writing into the folder. On rank 0 only."""
    until_end.callback(store.hold().close)


def _finish(run_dir: Path, summary: dict[str, Any], *, curves: bool) -> None:
    """Writes summary.json and curves.png. On rank 0 only."""
    path = run_dir / "summary.json"
    if not summary["samples_per_s"] and path.exists():  # nothing was left to train: keep the figures of the training
        with contextlib.suppress(ValueError):
            new = {key: value for key, value in summary.items() if is_metric(key) or key == "stopped_by"}
            summary = {**json_object(read_own(path)), **new}
    write_summary(run_dir, summary)
    if curves:
        draw_curves(run_dir / "metrics.jsonl", run_dir / "curves.png", summary=summary)
