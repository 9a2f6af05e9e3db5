"""`ddp.fit`: a whole training run from Python, from a model and data to checkpoints, metrics and curves.

    1  what is given      the task, the samples, the optimizer: each checked, and taken apart where it is a DataLoader
    2  the state          strategy, sampler, scheduler; and the checkpoint that the run resumes from, if there is one
    3  the loop           `loop.py`, with the callbacks that save, log and show
    4  the results        RUN_DIR/summary.json and curves.png, written by rank 0

The command line ends here, too: `ddp/run/assembly/stages.py` makes the arguments from the settings.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, Never

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp.comm.communicator import Communicator
from ddp.comm.meeting.cluster_spec import refuse_evaluator
from ddp.comm.meeting.membership import RESIZE, current_member, is_resized
from ddp.comm.meeting.secret import held_memory
from ddp.comm.objects import all_gather_object, on_rank_zero
from ddp.data.loading.iterable import ENDLESS, IterableSampler
from ddp.data.loading.source import Source
from ddp.data.orders.sampler import TrainSampler
from ddp.data.orders.steps import Batches, BatchWarmup
from ddp.data.orders.token_budget import TokenBudget
from ddp.errors import (
    CheckpointError,
    CommunicatorBroken,
    ConfigError,
    Diverged,
    PeerLost,
    UnusedParameters,
    nearest,
    safe_str,
)
from ddp.optim.schedules import RateSchedule, TorchSchedule
from ddp.policies import Averaging, Evaluation, Folder, ParameterServer, Reading, SameBits
from ddp.process import gpu
from ddp.process.clock import now_s
from ddp.process.files import make_folder, refuse_unwritable_name
from ddp.process.streams import preserved
from ddp.process.terminal import log, say
from ddp.replica.autograd import without_compile_wrappers
from ddp.setting import Precision, StrategyName
from ddp.strategies.central_storage import CentralStorage
from ddp.strategies.choice import ranks_of, strategy_for
from ddp.strategies.parameter_server.edge import failure_reported
from ddp.strategies.parameter_server.server import Service
from ddp.train import arguments
from ddp.train.arguments import NEEDED, FitArguments, Inputs, tried
from ddp.train.batch_checks import EqualBatches
from ddp.train.checkpoints.checkpoint import (
    AfterOthers,
    Checkpointer,
    InMemory,
    in_memory,
    newest,
    newest_in_memory,
    read_checkpoint,
    restore,
    run_identity,
    save_checkpoint,
    score_of,
    weights_of,
)
from ddp.train.checkpoints.checkpoint_store import (
    IN_MEMORY,
    CheckpointMemory,
    CheckpointStore,
    StoredCheckpoint,
    best_of,
    check_fits,
    resume_from,
    steps,
)
from ddp.train.checkpoints.extra_state import ExtraState, group_settings, plain
from ddp.train.evaluate import check_evaluation, modes_kept
from ddp.train.held_out import note_of_choice
from ddp.train.loop import end_of_run, train_loop
from ddp.train.parameter_server import check_role, next_store, restarted_arguments, service_of, work
from ddp.train.reports.history import HASHES, HashesFile, calls_left, note_generation, note_start_of_fit
from ddp.train.reports.meters import EpochCheck, Meters, MetricsFile, NoiseScale, Throughput
from ddp.train.reports.report import ProgressBar, StopNote, draw_curves, summary_of
from ddp.train.reports.results import is_metric, read_summary, write_summary
from ddp.train.reports.trackers import Tracker
from ddp.train.steps.callbacks import EMA, Callback, EarlyStopping, notify_of
from ddp.train.steps.state import TrainState
from ddp.train.steps.stopping import StopFlag, flag_of_a_new_fit, hears_signals
from ddp.train.steps.task import Task
from ddp.train.supervision import Guard, Watch
from ddp.train.survive import Interrupted, Kept, goes_on, over_generations, wait_for_others
from ddp.units import counted

OURS = (EMA, EarlyStopping, Guard, Watch)
SHORTEN = "Fewer epochs or max_steps shorten it, and so do more workers, if cores are idle."
GO_ON = "Ctrl-C ends it with a checkpoint, and resume=auto continues it."
_number = count()  # of the fits of this program, which all processes, and restarted ones, run in the same order


def fit(
    model: nn.Module,
    data: Any,
    optimizer: Optimizer,
    *,
    loss: Task | Callable[[Any, Any], Tensor] = NEEDED,
    global_batch: int | BatchWarmup | TokenBudget = NEEDED,
    epochs: int | None = None,
    max_steps: int | None = None,
    validation_data: Any = None,
    test_data: Any = None,
    evaluation: Evaluation = Evaluation(),
    batches: Batches = Batches(),
    reading: Reading = Reading(),
    schedule: RateSchedule | LRScheduler | TorchSchedule | None = None,
    clip_norm: float | None = None,
    precision: Precision = "fp32",
    strategy: StrategyName | Averaging = "auto",
    folder: str | Path | Folder | None = Folder(),
    same_bits: bool | SameBits = False,
    callbacks: Sequence[Callback] = (),
    **mistyped: Never,
) -> TrainState:
    """Trains a model on all ranks together, and evaluates, saves, logs and shows it meanwhile. Collective.

        def train():
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            state = ddp.fit(
                model, (inputs, targets), optimizer, loss=torch.nn.functional.cross_entropy, global_batch=64, epochs=3,
                test_data=(test_inputs, test_targets), folder=ddp.Folder("runs/mine", resume="auto"),
            )
            return state.evaluation                         # {"test_loss": …}, over all samples of all ranks

        if __name__ == "__main__":
            print(ddp.launch(train, workers=2)[0])

    Ctrl-C and SIGTERM end it after a step, in agreement, with a checkpoint; `stopped_by` of the result says so. A
    program that begins another fit then, such as a loop over folds, ends there; in a notebook, the cell does.

    Args:
        model: a module, which is wrapped in a `BucketedDataParallel`; or a replica, whose ranks train then. Unless it
            is on a GPU already, a module is moved to the device of `ddp.init`; unless that was called, to a GPU where
            there is one. Layers that are in evaluation mode by themselves, such as a frozen BatchNorm, stay there.
        data: a data set with length and index, a pair of tensors (inputs, targets), or a DataLoader, of which all is
            honoured or refused but the size of its batches (`data/loading/source.py`). The same on every rank: a
            random split needs a seed. Or an iterable without a length (`ddp/data/loading/iterable.py`).
        optimizer: over the model's parameters.
        loss: a function loss(outputs, targets) → scalar, the mean over a batch of pairs (inputs, targets); with
            `ddp.LossFunction(loss, reduction="sum")` their sum. Or a `ddp.Task`, such as `ddp.Classification()`, for
            everything else.
        global_batch: samples per optimizer step of all ranks together, any number from the world size up; a
            `ddp.BatchWarmup`, which lets it grow; or a `ddp.data.TokenBudget`, for samples of unequal lengths.
        epochs, max_steps: of the whole run, whichever is reached first; one is needed.
        validation_data: held-out samples that the run chooses by (the best checkpoint, ReduceLROnPlateau,
            `ddp.EarlyStopping`): a data set, as `data`; or a share of the training samples, such as 0.1, which the seed
            chooses. Those are set apart, and keep the transforms that they have in `data`, random ones included.
        test_data: held-out samples for the report at the end, with the last weights. Without validation_data the run
            evaluates them meanwhile and chooses by them. Without both nothing is evaluated, no checkpoint is the best.
        evaluation: when to evaluate, besides at the end, as `ddp.Evaluation(every_steps=100)`.
        batches: the order of samples, the parts and forwards of a batch, and the seed, as `ddp.Batches(micro_size=8)`.
        reading: loader processes, samples that cannot be read, as `ddp.Reading(num_workers=2)`.
        schedule: of the learning rate: a function (samples trained on, samples of the run) → factor, such as
            `ddp.optim.cosine()`; or a scheduler of torch's, as `ddp.optim.TorchSchedule(scheduler, every="epoch")`.
        clip_norm: largest norm of the global gradient.
        precision: "fp32"; "bf16" or "fp16" for autocast, where "fp16" scales the loss; "bf16_pure" for bfloat16
            parameters with float32 master weights (`ddp/optim/precision.py`).
        strategy: "auto": every rank holds all, and makes the same update; "one_device", "mirrored" (on one host) and
            "multi_worker" are guides' names for it. "sharded": each rank updates a slice of the parameters, and holds
            the optimizer's state of that alone. "central_storage": each host holds parameters and state once, in
            memory that its ranks share. "local_sgd", or a `ddp.LocalSGD(every=32)`: each rank trains by itself for a
            round of steps. "parameter_server", or a `ddp.ParameterServer(mode="async")`: servers make the updates of
            what workers push. Or a `ddp.Averaging`, which also says how gradients travel.
        folder: of the run: checkpoints/ (the last and the best), metrics.jsonl, summary.json, curves.png. Unless given,
            a new one below runs/. None: nothing is written. A `ddp.Folder` also resumes, and says what is kept.
        same_bits: True: any number of ranks, up to the number of shards, ends with the same parameters and metrics, bit
            by bit; there are 8 shards unless `batches` says otherwise (docs/same-bits.md), and one thread a rank. Or a
            `ddp.SameBits`.
        callbacks: objects of `ddp.Callback`, run after those of fit, such as `ddp.EMA()` and
            `ddp.EarlyStopping(patience=3)`. Their state is saved and resumed.

    Returns:
        The state of the run: `evaluation` (metrics by name), `history` (the same of each evaluation), `train_loss`,
        `step`, `model`, `stopped_by`.

    Raises:
        ConfigError: an argument cannot work; the message has the remedy.
        CheckpointError: a run to be resumed has no checkpoint, or one of another model.
        Diverged: the loss or the gradient is not finite.
        UnusedParameters: some parameters got no gradient.
        PeerLost: a rank was lost. In an elastic launch (docs/elastic.md) the others go on instead, in the first fit.
        TooFewWorkers: of an elastic launch, fewer than `min_workers` are left, and no others have come in `wait_s`.
    """
    given = {name: value for name, value in locals().items() if name != "mistyped"}
    arguments.refuse_unknown(mistyped, given)
    refuse_evaluator("ddp.fit")
    return train(FitArguments(**given))


def train(given: FitArguments) -> TrainState:
    """Trains as `fit` says, from checked arguments; the program around it continues as if there had been no fit.

    Raises:
        ConfigError, CheckpointError, Diverged, UnusedParameters, PeerLost, TooFewWorkers: as `fit`.
    """
    part, given = check_role(given), replace(given, number=next(_number))
    if part is not None:
        given = replace(given, run_store=next_store(part, given.number))
    wrapped = without_compile_wrappers(given.model)
    with wrapped as model, _given_back(model), arguments.one_thread(given), failure_reported(given.run_store, part):
        given = replace(given, model=model)
        if (member := current_member()) is not None:
            arguments.refuse_other_run(given, member)
            if given.folder.trial:
                member.close()  # its ranks stay
        comm = ranks_of(given.model, given.strategy.strategy)
        if part is not None:
            if part.job == "worker":
                return work(given, comm, part)
            given = restarted_arguments(given, part)
        return tried(_train, given, comm) if given.folder.trial else _train(given, comm)


@contextlib.contextmanager
def _given_back(model: nn.Module) -> Iterator[None]:
    """Gives back at the end of the block what each step changes: the generators, and the mode of every layer.

    All else that a fit changes for a while has its own block: the handlers of signals (`steps/stopping.py`), the
    factor of a schedule in learning rates (`optim/schedules.py`), warnings and compilation while the first batch is
    checked.
    """
    on_gpus = gpu.cuda.get_rng_state_all() if gpu.cuda.is_initialized() else []
    with preserved(), modes_kept(model):
        try:
            yield
        finally:
            if on_gpus:
                gpu.cuda.set_rng_state_all(on_gpus)


def _train(given: FitArguments, comm: Communicator) -> TrainState:
    stop = flag_of_a_new_fit() if given.stop is None else given.stop  # a flag that is not set counts as false
    if isinstance(given.optimizer, Optimizer):  # what is none is refused later
        given = replace(given, first_groups=group_settings(given.optimizer))
    meters, start_s = Meters(Throughput(), NoiseScale(), EpochCheck(), []), now_s()
    with stop.before_libraries():
        listening = stop.listening() if given.stop is None else contextlib.nullcontext()
        state = over_generations(partial(_train_with, given, stop, meters, start_s), comm, stop, listening)
    member = current_member()
    if given.stop is None and member is not None and member.asked not in ("", state.stopped_by):
        signal.raise_signal(signal.Signals[member.asked])  # which came too late for the launcher
    return state


def _train_with(
    given: FitArguments,
    stop: StopFlag,
    meters: Meters,
    start_s: float,
    comm: Communicator,
    kept: list[Kept],
) -> TrainState:
    """Trains with these ranks.

    Args:
        kept: what this rank has of the run, which is taken out.
    """
    taken = newest(comm, kept[0].state) if is_resized() else None
    mine = kept.pop()
    try:
        if taken is not None:  # first, because replicas begin with rank 0's weights
            check_fits(taken.parts["model"], given.model, source=taken.path)
            given.model.load_state_dict(taken.parts["model"])

        # 1  what is given
        given = arguments.with_shards(given.for_ranks(comm), comm)
        inputs = arguments.inputs_of(given, comm)

        # 2  the state
        run = open_run(given, inputs, comm, taken, last_step=mine.step)
    except BaseException as error:
        if not goes_on(error):
            raise
        raise Interrupted(mine if taken is None else Kept(taken, taken.step)) from error
    del taken, mine  # so that nobody holds a second model

    run.state.stop_flag = stop
    try:
        return _run(run, stop, meters, start_s)
    except BaseException as error:
        if run.service is not None:
            run.service.end({"failed": f"{type(error).__name__}: {safe_str(error)}"})
        raise


def _run(run: OpenRun, stop: StopFlag, meters: Meters, start_s: float) -> TrainState:
    # 3  the loop
    given, state = run.given, run.state
    with contextlib.nullcontext() if given.stop is not None else stop.listening(), calls_left(run.folder, state.comm):
        _loop(run, meters)
        is_known = bool(stop.signal_name)
        kept = run.kept() if current_member() is not None else Kept()

        # 4  the results
        stop.agreed = state.stopped_by
        try:
            _end(run, meters, seconds=now_s() - start_s)
            if current_member() is not None:
                state.comm.barrier()  # a rank that has returned makes nothing again for others
        except BaseException as error:
            if goes_on(error):
                raise Interrupted(kept) from error
            notify_of(error, state, given.callbacks)
            raise
    if run.service is not None:
        known = {"evaluation": state.evaluation, "history": state.history, "step": state.step}
        run.service.end({**known, "stopped_by": state.stopped_by})
        if state.comm.rank == 0:  # which keeps the ledger
            _say(given, state.comm, run.service.in_words())
    if given.stop is None and stop.signal_name and not is_known:  # it has waited for the results
        signal.raise_signal(signal.Signals[stop.signal_name])
    return state


def _end(run: OpenRun, meters: Meters, *, seconds: float) -> None:
    """Leaves the weights whole, and writes, draws and tells how the run went. Collective."""
    state, comm, given = run.state, run.state.comm, run.given
    state.strategy.finish()
    notes = [_best_at_end(run)]
    notes.append(note_of_choice(state, run.inputs.held_out, given.callbacks, saves=run.folder is not None))
    notes.append(known.in_words() if (known := meters.noise.estimate()) else "")
    for note in filter(None, notes):
        _say(given, comm, note)
    write = partial(_write_results, run, summary_of(state, meters, given, seconds=seconds))
    summary = on_rank_zero(comm, write, label="writing the results")
    for callback in sorted(given.callbacks, key=lambda each: isinstance(each, Tracker)):  # which say how it ended
        callback.finished(state, summary)


def _best_at_end(run: OpenRun) -> str:
    """Gives the model the weights of the best checkpoint, if that is wanted. Collective.

    Returns:
        Where better weights are than those of the last step, and which ones the model has; else "".
    """
    state, folder = run.state, run.folder
    if folder is None:
        return ""
    best = on_rank_zero(state.comm, lambda: best_of(folder / "checkpoints"), label="looking for the best checkpoint")
    if best is None:
        return ""
    step = int(best.name.removeprefix("step-"))
    note = f"the best checkpoint is that of step {step:,}, and the model has "
    if not run.given.folder.restore_best:
        way = f"ddp.load({os.path.relpath(folder)!r}) has the best ones, ddp.Folder(restore_best=True) restores them"
        is_said = run.given.settings is None and step != state.step
        return f"{note}the weights of step {state.step:,}: {way}" if is_said else ""
    found = read_checkpoint(state.comm, best, state.model.module, whole=state.model.is_whole)
    state.model.load_weights(weights_of(found))
    state.evaluation, state.evaluated_at = found.parts["position"]["evaluation"], step
    return f"{note}its weights"


def _say(given: FitArguments, comm: Communicator, text: str) -> None:
    """Tells the user, and the logs of all ranks."""
    for line in text.splitlines():
        log.info("%s", line)
    if comm.rank == 0 and given.folder.progress:
        say(text)


# ----------------------------------------------------------------------------------------------------------- the state


@dataclass(frozen=True)
class OpenRun:
    """A run that can begin or go on.

    Attributes:
        given, inputs: the arguments, and what was made of them.
        identity: what the bits of the result depend on; extra: what a checkpoint has besides the state.
        folder: of the run, which exists; None: nothing is written. start: the checkpoint that it resumes from.
        store: of its checkpoints; None: there is none. memory: in which the launcher keeps some; None: there are none.
        num_steps: of the whole run.
        service: what this process does for workers; None: it is no server.
    """

    given: FitArguments
    inputs: Inputs
    state: TrainState
    identity: dict[str, Any]
    extra: ExtraState
    folder: Path | None
    start: Path | None
    store: CheckpointStore | None
    memory: CheckpointMemory | None
    num_steps: int
    service: Service | None

    def kept(self) -> Kept:
        """Returns this rank's state of the last committed step. Not collective."""
        return Kept(in_memory(self.state, identity=self.identity, extra=self.extra), self.state.step)


def open_run(
    given: FitArguments,
    inputs: Inputs,
    comm: Communicator,
    kept: StoredCheckpoint | None = None,
    *,
    last_step: int | None = None,
) -> OpenRun:
    """Returns the state of a run over a communicator, and from its checkpoint, if it has one. Collective.

    Args:
        kept: the state from which all ranks go on; None: a checkpoint of the launcher or on the disk, if at all.
        last_step: that this rank has committed already; None: it has not trained.

    Raises:
        ConfigError, CheckpointError: as `fit`. The model and the optimizer are as they were then.
    """
    sampler, sampler_note = arguments.sampler_for(given, inputs, comm)
    settings = arguments.settings_of(given, inputs, sampler)
    if given.folder.restore_best and not inputs.held_out.is_evaluated:
        raise ConfigError("restore_best=True: nothing says which checkpoint is the best; give validation_data")
    arguments.refuse_disagreement(comm, given, inputs, settings)
    for each in inputs.held_out.given().values():
        size, num_samples = given.evaluation.batch, len(each.samples)
        cut: dict[str, Any] = {"world_size": comm.world_size, "num_shards": inputs.replica.num_shards}
        check_evaluation(inputs.replica, num_samples, batch_size=size, **cut)
    # The user's own callbacks may write to weights by any way; ours give back what they write, and show it.
    watched = any(type(each) not in OURS for each in given.callbacks if not isinstance(each, Tracker))
    how: dict[str, Any] = {"precision": given.precision, "clip_norm": given.clip_norm, "watched": watched}
    strategy = strategy_for(inputs.replica, given.optimizer, averaging=given.strategy, **how)
    state = TrainState(comm, strategy, given.optimizer, sampler, schedule=inputs.scheduler)
    state.main_metric = f"{inputs.held_out.chooser}_{inputs.task.main_metric}"
    state.higher_is_better = inputs.task.higher_is_better
    identity = run_identity(comm, inputs.replica, settings if given.settings is None else given.settings)
    state.settings = plain(identity)
    saves = given.folder.path is not None or given.folder.memory_steps > 0
    extra = ExtraState(inputs.replica, inputs.task, given.callbacks, saves=saves, schedule=inputs.schedule)
    try:
        memory = CheckpointMemory(held_memory(), fit=given.number) if given.folder.memory_steps else None
        folder, start, note = _resume(given, state, identity, extra, memory, kept, last_step)
        num_steps, _ = end_of_run(state, epochs=given.epochs, max_steps=given.max_steps)
        if not num_steps and (skipped := given.batches.skip_steps) is not None:
            raise ConfigError(f"skip_steps={list(skipped)}: leaves out all steps of the run; name fewer")
    except BaseException:
        strategy.finish(alone=True)  # no step was made, so that nothing has to be gathered
        raise
    notes = [*_headline(state, num_steps, given.strategy), *filter(None, (note, sampler_note))]
    if not inputs.replica.module.training:
        notes.append("the model was in evaluation mode as a whole: all of its layers are trained")
    notes += [*inputs.replica.in_words(), *arguments.idle_notes(inputs.replica)]
    begins_anew = given.folder.resume is not None and start is None
    if folder is not None and given.folder.is_unnamed:
        notes.append(f"the run is in {os.path.relpath(folder)}")
    notes += _notes(sampler, inputs.source, folder, num_left=num_steps - state.step, begins_anew=begins_anew)
    if folder is not None and given.stop is None and given.folder.every_steps is None and not hears_signals():
        way = "folder=ddp.Folder(every_steps=…) saves as it goes"
        notes.append(f"this fit is not in the main thread, so that no signal makes it save; {way}")
    store = None
    if folder is not None:
        best: Literal["max", "min"] = "max" if state.higher_is_better else "min"
        counts = {"keep_last": given.folder.keep_last, "keep_best": given.folder.keep_best}
        store = CheckpointStore(folder / "checkpoints", best=best, **counts)
    service = service_of(given, state, settings)
    _say(given, comm, "\n".join(notes))
    return OpenRun(given, inputs, state, identity, extra, folder, start, store, memory, num_steps, service)


def _resume(
    given: FitArguments,
    state: TrainState,
    identity: Mapping[str, Any],
    extra: ExtraState,
    memory: CheckpointMemory | None,
    kept: StoredCheckpoint | None,
    last_step: int | None,
) -> tuple[Path | None, Path | None, str]:
    """Makes the state that of the checkpoint from which the run continues, if there is one. Collective.

    Args:
        kept, last_step: as in `open_run`.

    Returns:
        The run's folder; the path of the checkpoint; and a line on what is repeated, if ranks were lost.

    Raises:
        ConfigError, CheckpointError: as `fit`.
    """
    comm, found, note = state.comm, list[StoredCheckpoint](), ""  # what rank 0 has loaded already

    def look() -> tuple[Path | None, Path | None, Path | None, int | None]:
        folder, run_dir, path = _folder_and_start(given.folder, given.number)
        if memory is None or kept is not None or not is_resized():
            return folder, run_dir, path, None
        if (saved := newest_in_memory(memory, folder)) is not None:
            found.append(saved)
            path = saved.path
        return folder, run_dir, path, memory.last_step

    folder, state.run_dir, start, noted = on_rank_zero(comm, look, label="looking for a checkpoint")
    known = all_gather_object(comm, last_step) if kept is None and is_resized() else []
    begun = 0 if state.model.is_whole else -1  # a model in slices is lost before the first step, too
    trained = [each for each in (*known, noted) if each is not None and each > begun]
    if trained and start is None:
        raise CheckpointError(
            f"a part of the state after step {max(trained):,} was lost with the ranks that had it, and there is no "
            "checkpoint: let every_steps or memory_steps save some, or take a strategy that keeps the state whole"
        )
    if kept is not None or start is not None:
        path, model = found[0] if found else start, state.model
        checkpoint = kept or read_checkpoint(comm, path, model.module, whole=model.is_whole)
        restore(checkpoint, state, identity=identity)
        extra.resumes(checkpoint.parts, given.optimizer)
        start = checkpoint.path
        if trained:
            repeated = counted(max(trained) - state.step, "step")
            note = f"continues from {os.path.relpath(start)} after step {state.step:,}: repeats {repeated}"
    if kept is not None:
        state.sampler.take_as_planned()
    return folder, start, note


def _folder_and_start(keeps: Folder, number: int) -> tuple[Path | None, Path | None, Path | None]:
    """Returns the folder of the run, which exists then, also from the root on, and the checkpoint to go on from.

    On rank 0 only. All generations have the same folder in a fit of this number.

    Raises:
        ConfigError: the folder holds another run, or cannot be made.
        CheckpointError: `resume` names a path without a checkpoint.
    """
    if keeps.path is None:
        return None, None, None if keeps.resume is None else resume_from(str(keeps.resume), Path())
    run_dir = Path("runs", f"{datetime.now():%Y-%m-%d_%H-%M-%S.%f}") if keeps.is_unnamed else Path(keeps.path)
    member, key = current_member(), f"folder/{number}"
    if member is not None and member.store.check([key]):  # this fit has begun with other ranks
        run_dir = Path(member.store.get(key).decode())
        first = None if keeps.resume is None else resume_from(str(keeps.resume), run_dir)
        return run_dir, run_dir.absolute(), resume_from("auto", run_dir) or first
    start = None if keeps.resume is None else resume_from(str(keeps.resume), run_dir)
    is_own = start is not None and start.resolve().is_relative_to(run_dir.resolve())
    if steps(run_dir / "checkpoints") and not is_own:
        raise ConfigError(f'folder={run_dir} holds a run: continue it with resume="auto", or take another folder')
    refuse_unwritable_name(run_dir)
    try:
        make_folder(run_dir)
    except OSError as error:
        raise ConfigError(f"folder={run_dir}: {error.strerror}; take another folder") from error
    if member is not None:
        member.store.set(key, str(run_dir))
    return run_dir, run_dir.absolute(), start


# ------------------------------------------------------------------------------------------------------------ the loop


def _loop(run: OpenRun, meters: Meters) -> None:
    """Makes the steps of the run, while no other process may write into its folder."""
    state, given = run.state, run.given
    with contextlib.ExitStack() as until_end:
        until_end.callback(state.rates.take_schedule_out)
        try:
            if run.store is not None:  # before a callback changes a file there
                on_rank_zero(state.comm, lambda: _begin(run, until_end), label="locking the run's folder")
            callbacks = _callbacks(run, meters)
            if given.strategy.region is not None:
                _publish(given.strategy.region, run)
            if (member := current_member()) is not None and state.comm.world_size < member.limits.min_workers:
                if run.store is not None:
                    how: dict[str, Any] = {"identity": run.identity, "extra": run.extra}
                    save_checkpoint(run.store, state, score=score_of(state), **how)
                wait_for_others(member)
                if member.is_superseded:
                    _leave_ranks(run)
            train_loop(state, given, run.inputs, callbacks, run.service, partial(_go_back, run, callbacks))
            if state.stopped_by == RESIZE:
                _leave_ranks(run)
        except Interrupted:
            raise
        except BaseException as error:
            kept = run.kept() if goes_on(error) else Kept()
            # An error that all ranks raise together has changed nothing, so that the optimizer can go on.
            state.strategy.finish(alone=not isinstance(error, (Diverged, UnusedParameters)))
            if goes_on(error):
                raise Interrupted(kept) from error
            raise


def _leave_ranks(run: OpenRun) -> Never:
    """Lets this rank go on with others, as all have agreed. Collective.

    Raises:
        Interrupted: always.
    """
    kept = run.kept()
    try:
        run.state.strategy.finish()  # leaves on each rank what only all together have
    except (PeerLost, CommunicatorBroken) as error:
        run.state.strategy.finish(alone=True)
        raise Interrupted(kept) from error
    raise Interrupted(run.kept())


def _go_back(run: OpenRun, callbacks: Sequence[Callback], guard: Guard) -> None:
    """Makes the state that of the run's last checkpoint, with a lower learning rate. Collective.

    Raises:
        CheckpointError: there is none.
    """
    state, folder = run.state, run.folder
    assert folder is not None  # a rule has seen to it

    def load() -> None:
        checkpoint = read_checkpoint(state.comm, folder / "checkpoints", state.model.module)
        restore(checkpoint, state, identity=run.identity)
        run.extra.resumes(checkpoint.parts, state.optimizer)
        for callback in callbacks:
            callback.went_back(state)  # files drop what lies beyond; `ExtraState` loads the states of all

    guard.go_back(state, load)


def _publish(region: str, run: OpenRun) -> None:
    """Lets other jobs of the host look at the parameters, and tells them what `ddp.load` knows of a checkpoint."""
    strategy, folder = run.state.strategy, run.state.run_dir
    assert isinstance(strategy, CentralStorage)  # a region beside another word is refused
    facts = {key: run.identity.get(key) for key in ("sample_shape", "num_classes")}
    strategy.publish(region, {"run_dir": None if folder is None else str(folder), **facts}, folder=folder)


def _callbacks(run: OpenRun, meters: Meters) -> list[Callback]:
    """Returns the callbacks in their order: those that measure and save, the user's own, those that show."""
    given, keeps, own, last = run.given, run.given.folder, run.given.callbacks, list[Callback]([run.extra])
    metrics = None if run.folder is None else run.folder / "metrics.jsonl"
    watching: list[Callback] = [*meters[:3], MetricsFile(metrics, meters, every=keeps.log_every, callbacks=own)]
    if given.reading.debug:
        watching.insert(0, EqualBatches(run.state.comm.rank, run.inputs.source.num_workers))
    if run.folder is not None and run.store is not None:
        how: dict[str, Any] = {"every_steps": keeps.every_steps, "extra": run.extra, "callbacks": own}
        how["goes_on"] = run.start == IN_MEMORY
        checkpointer = Checkpointer(run.store, identity=run.identity, **how)
        watching += [HashesFile(run.folder / HASHES, every=given.same_bits.hash_every), checkpointer]
        last.append(AfterOthers(checkpointer))
    if run.memory is not None:
        how = {"identity": run.identity, "every_steps": keeps.memory_steps, "extra": run.extra}
        watching.append(saver := InMemory(run.memory, **how))
        last.append(AfterOthers(saver))
    if keeps.progress:  # after the others, so that it shows what is saved already
        if_long = SHORTEN if run.folder is None else f"{SHORTEN} {GO_ON}"
        shown: dict[str, Any] = {"num_steps": run.num_steps, "num_epochs": given.epochs, "if_long": if_long}
        last.append(ProgressBar(meters.throughput, **shown))
    if given.stop is None:
        last.append(StopNote(run.folder))
    return [*watching, *own, *last]


def _begin(run: OpenRun, until_end: contextlib.ExitStack) -> None:
    """Keeps other processes from writing into the run's folder, and notes the start. On rank 0 only."""
    given, source = run.given, run.inputs.source
    assert run.store is not None and run.folder is not None
    until_end.callback(run.store.hold().close)
    if given.settings is None and not source.is_stream:  # a command has noted it
        what = source, run.state, given, given.batches, given.validation_data
        note_start_of_fit(run.folder, *what, goes_on=run.start is not None)
    elif is_resized():
        note_generation(run.folder, run.state)


# -------------------------------------------------------------------------------------------------------- what is said


def _headline(state: TrainState, num_steps: int, policy: Averaging) -> list[str]:
    """Returns everything that was derived, in three lines."""
    comm, sampler, module = state.comm, state.sampler, state.model.module
    micros = next(iter(sampler.plans())).micros
    if state.model.num_devices > 1:  # each has its own shard
        micros = tuple(micro for micro in micros if not micro.shard)
    largest = max((len(micro.indices) for micro in micros), default=0)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    workers = f"{counted(state.num_workers, 'worker')} × {counted(torch.get_num_threads(), 'thread')}"
    share = f"worker 0: {counted(len(micros), 'forward')} of up to {counted(largest, 'sample')} a step"
    if isinstance(policy, ParameterServer):
        workers += f" and {counted(comm.world_size, 'server')}"
        bound = "" if policy.bound is None else f", of parameters at most {counted(policy.bound, 'update')} old"
        share = f"an update: {counted(policy.num_parts(state.num_workers), 'part')} ({policy.mode}{bound})"
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
        f"global batch {sampler.sizes.in_words()} in {counted(sampler.num_shards, 'shard')}; {share}; learning rate "
        f"{state.rates.base[0]:g}",
        f"{samples}, {counted(num_steps, 'step') if num_steps < ENDLESS else 'as many steps as it has'}{start}",
    ]


def _notes(
    sampler: TrainSampler, source: Source, run_dir: Path | None, *, num_left: int, begins_anew: bool
) -> list[str]:
    """Returns a line for each fact that the user may not expect."""
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


def _write_results(run: OpenRun, summary: dict[str, Any]) -> dict[str, Any]:
    """Writes summary.json and curves.png, if there is a folder, and returns the summary. On rank 0 only."""
    run_dir = run.folder
    if run_dir is None:
        return summary
    if not summary["samples_per_s"]:  # nothing was left to train: keep the figures of the training
        with contextlib.suppress(OSError, ValueError):
            new = [key for key in summary if is_metric(key) or key.startswith(("stopped_by", "workers_"))]
            summary = {**read_summary(run_dir), **{key: summary[key] for key in new}}
    write_summary(run_dir, summary)
    if run.given.folder.curves:
        draw_curves(run_dir / "metrics.jsonl", run_dir / "curves.png", summary=summary)
    return summary
