"""The content of a run's checkpoint, and the way in which all ranks save and resume together.

    model.pt       the inner module's plain keys: loads into the bare model, with or without this package; of
                   precision=bf16_pure, the master weights
    optimizer.pt   torch's optimizer state
    schedule.pt    the state of torch's learning-rate scheduler, if there is one
    position.pt    step and sampler position: global numbers, valid at any world size
    slots.pt       "random": by rank, the states of its generators
    hook.pt        gradients that a hook has not sent yet, if there is one (`gradients/compression.py`)
    local_sgd.pt   of strategy=local_sgd: the momentum of the common parameters
    own.pt         by rank the state that differs from rank 0's: buffers, and of strategy=local_sgd its optimizer state
    callbacks.pt   the states of callbacks, and loss.pt, of the loss (`extra_state.py`)
    meta           the identity of the run (below); readable without loading a tensor

The identity is everything that the bits of the result depend on, apart from the code. A resumed run compares it with
its own and logs what has changed. If nothing has, the run continues as if it had never stopped, bit by bit.

The generators' states are dropped when the world size changes. Training itself draws from keyed streams
(`process/streams.py`), so only code of the user's own needs them.

Saving is collective. Rank 0 writes; the ranks agree on whether that went well, so that all of them raise or none.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import platform
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp.comm.communicator import Communicator
from ddp.comm.meeting.membership import is_resized
from ddp.comm.objects import all_gather_object, on_rank_zero, recv_object, send_object
from ddp.comm.session import on_cpu
from ddp.data.orders.order import Checksum
from ddp.errors import CheckpointError
from ddp.optim.schedules import Rates
from ddp.process import gpu
from ddp.process.records import damage_as_error, json_object, made, to_json
from ddp.process.terminal import log
from ddp.replica.replica import Replica
from ddp.replica.units import form_of
from ddp.train.checkpoints.checkpoint_store import (
    ANOTHER,
    IN_MEMORY,
    CheckpointMemory,
    CheckpointStore,
    StoredCheckpoint,
    check_fits,
    is_extra,
    load,
    steps,
)
from ddp.train.checkpoints.extra_state import ExtraState, plain
from ddp.train.checkpoints.moved import translated
from ddp.train.steps.callbacks import MEASURED, Callback
from ddp.train.steps.state import StepReport, TrainState

FREE = ("world_size", "all_reduce", "buckets", "strategy")
"""Keys of a run's identity on which the bits do not depend with `same_bits`."""


@dataclass(frozen=True, kw_only=True)
class _Meta:
    """The values that `save_checkpoint` leaves in a manifest for `restore`; those with a default came later."""

    identity: dict[str, Any]
    optimizer: str
    optimizer_settings: list[dict[str, Any]] = field(default_factory=list)
    all_reduce_choices: dict[str, str] = field(default_factory=dict)
    gradient_order: list[str] | None = None
    hook: str | None = None
    added_groups: list[list[str]] = field(default_factory=list)
    changed_frozen: list[str] = field(default_factory=list)


def _meta_of(checkpoint: StoredCheckpoint) -> _Meta:
    with damage_as_error(checkpoint.path, ANOTHER, CheckpointError):
        return made(_Meta, checkpoint.meta)


def save_checkpoint(
    store: CheckpointStore | CheckpointMemory,
    state: TrainState,
    *,
    identity: Mapping[str, Any],
    score: float | None = None,
    extra: ExtraState | None = None,
) -> Path:
    """Writes a checkpoint of the run. Collective; rank 0 writes to its file system, or to memory of its host.

    Returns:
        The checkpoint's folder, as rank 0 names it from the root on; or the path of the memory.

    Raises:
        CheckpointError: it could not be written; on every rank.
    """
    whole, compression = state.strategy.state_dict(), state.model.compression
    hook = None if compression is None else compression.state_dict()
    extra_parts = {} if extra is None else extra.parts()
    mine = _random_states(state.comm), state.sampler.places(), state.sampler.seen_in_epoch, state.unreadable
    everyone = all_gather_object(state.comm, mine)
    meta = _meta(state, identity, extra)

    def write() -> Path:
        parts = _parts(state, whole, hook, extra_parts, everyone)
        return store.save(state.step, parts, meta=meta, score=score).absolute()

    return on_rank_zero(state.comm, write, label=f"checkpoint of step {state.step}")


def in_memory(
    state: TrainState, *, identity: Mapping[str, Any], extra: ExtraState | None = None
) -> StoredCheckpoint | None:
    """Returns the run's checkpoint of the last committed step as this rank has it by itself, without copying a tensor.

    It is None if the rank has not the whole state. What the hooks of other ranks have not sent yet is missing. Not
    collective.
    """
    if (whole := state.strategy.kept()) is None:
        return None
    compression = state.model.compression
    hook = None if compression is None else compression.kept()
    extra_parts = {} if extra is None else extra.parts(alone=True)
    parts = _parts(state, whole, hook, extra_parts, [({}, state.sampler.places(), None, state.unreadable)])
    return StoredCheckpoint(state.step, IN_MEMORY, None, _meta(state, identity, extra), parts)


def _meta(state: TrainState, identity: Mapping[str, Any], extra: ExtraState | None) -> dict[str, Any]:
    """Returns the values of a checkpoint that are readable without its parts."""
    compression = state.model.compression
    return {
        "identity": _with_data(identity, state),
        "slot_rules": {"random": "dropped when the world size changes"},  # for people who read the manifest
        "optimizer": type(state.optimizer).__name__,
        "optimizer_settings": state.first_settings,
        "all_reduce_choices": dict(state.comm.plan.choices),
        "gradient_order": state.model.gradient_order,
        "hook": None if compression is None else compression.name,
        "added_groups": _added_groups(state),
        "changed_frozen": sorted(state.frozen() ^ state.first_frozen),
        "averages": None if extra is None else extra.name_of_averages,
    }


def _parts(
    state: TrainState,
    whole: Mapping[str, Any],
    hook: Mapping[str, Any] | None,
    extra_parts: Mapping[str, Any],
    everyone: Sequence[Any],
) -> dict[str, Any]:
    """Returns the parts of a checkpoint.

    Args:
        whole: the strategy's state; hook, extra_parts: that of the hook, and of callbacks and loss.
        everyone: by rank: random states, sampler's place, checksum of samples, unreadable samples.
    """
    random_states, places, sums, unreadable = map(list, zip(*everyone, strict=True))
    seen = [None if each is None else Checksum(*each) for each in sums]
    parts = {
        "model": whole["model"],
        "optimizer": plain(whole["optimizer"]),
        "position": {
            **state.position(),
            "loss_scale": whole["loss_scale"],
            "seen": _together(seen),
            "places": places,
            "unreadable": sorted(set[int]().union(*unreadable)),
        },
        "slots": {"random": [each for each in random_states if each]},
        **extra_parts,
    }
    if state.schedule is not None:
        parts["schedule"] = plain(state.schedule.state_dict())
    if hook is not None:
        parts["hook"] = hook
    if (rounds := whole.get("local_sgd")) is not None:
        parts["local_sgd"] = plain(rounds)
    if any(whole["own"]):
        parts["own"] = plain({"ranks": whole["own"]})
    return parts


def _together(parts: Sequence[Checksum | None]) -> tuple[int, ...] | None:
    """Returns the checksum of the samples of all ranks since the epoch began; None if a rank does not know its own."""
    known = [part for part in parts if part is not None]
    together: Checksum = reduce(Checksum.with_, known, Checksum())
    return tuple(together) if len(known) == len(parts) else None


def newest(comm: Communicator, mine: StoredCheckpoint | None) -> StoredCheckpoint | None:
    """Returns the newest of the checkpoints that ranks have in memory; None if none has one. Collective.

    It is that of the lowest rank that has it. A rank that has it already receives nothing, and keeps its own. Of two
    after the same step, the one is newer that has been evaluated.
    """
    cpu = on_cpu(comm)
    ages = all_gather_object(cpu, None if mine is None else [mine.step, mine.parts["position"]["evaluated_at"]])
    if (newest := max((each for each in ages if each is not None), default=None)) is None:
        return None
    source, label = ages.index(newest), "the state of the run"
    if comm.rank == source and mine is not None:
        hook = {"hook": {**mine.parts["hook"], "pieces": {}}} if "hook" in mine.parts else {}  # which only one may have
        for rank in [rank for rank, each in enumerate(ages) if each != newest]:
            send_object(cpu, {**vars(mine), "parts": {**mine.parts, **hook}}, rank, label=label)
    if ages[comm.rank] == newest:
        return mine
    return StoredCheckpoint(**recv_object(cpu, source, label=label))


def read_checkpoint(
    comm: Communicator, path: Path | StoredCheckpoint | None, module: nn.Module, *, whole: bool = True
) -> StoredCheckpoint:
    """Returns a checkpoint, or the last one of a folder, as rank 0 sees it, on every rank. Collective.

    On rank 0, `path` may also be a checkpoint that is loaded already; on other ranks it is not read.

    Its names are those of this module, also if an earlier version wrote what torch.compile puts into them.

    The state of a hook and the other ranks' own states stay on rank 0, because they may be larger than the model; and
    unless `whole`, so do the tensors of model and optimizer, which are on the meta device elsewhere. All else goes to
    the memory of the CPU, because a GPU may have no room for a second model.

    Raises:
        CheckpointError: there is none, or none is whole; on every rank.
    """
    on_zero = {}

    def read() -> dict[str, Any]:
        assert path is not None  # on rank 0
        found = path if isinstance(path, StoredCheckpoint) else load(path)
        for_all = {name: part for name, part in found.parts.items() if name not in ("hook", "local_sgd", "own")}
        on_zero.update({name: found.parts[name] for name in found.parts.keys() - for_all})
        for name in () if whole else ("model", "optimizer"):
            on_zero[name], for_all[name] = for_all[name], apply_to_collection(for_all[name], Tensor, _form_of)
        return {**vars(found), "parts": for_all}

    found = StoredCheckpoint(**on_rank_zero(on_cpu(comm), read, label="reading a checkpoint"))
    parts = {**(found.parts if whole else apply_to_collection(found.parts, tuple, _of_form)), **on_zero}
    if any("_orig_mod" in name for name in form_of(module)):
        return replace(found, parts=parts)
    return replace(found, parts=bare(parts), meta=bare(found.meta))


def _form_of(tensor: Tensor) -> Any:
    """Returns shape and type of a tensor; of a single number, itself."""
    return ("form", list(tensor.shape), tensor.dtype) if tensor.dim() else tensor


def _of_form(value: tuple[Any, ...]) -> Any:
    """Returns a tensor without memory for what `_form_of` has returned; any other tuple as it is."""
    return torch.empty(value[1], dtype=value[2], device="meta") if value[:1] == ("form",) else value


def bare(part: Any) -> Any:
    """Returns a part of a checkpoint by the names of a bare model: of a compiled one, earlier versions wrote others."""
    if isinstance(part, str):
        return part.replace("_orig_mod.", "")
    if isinstance(part, Mapping):
        return {bare(key): bare(value) for key, value in part.items()}
    return type(part)(map(bare, part)) if isinstance(part, (list, tuple)) else part


def weights_of(checkpoint: StoredCheckpoint, *, averaged: bool = True) -> dict[str, Any]:
    """Returns a model's state: of a run with `ddp.EMA` the averages, or as the optimizer has left it."""
    weights, averages = dict(checkpoint.parts["model"]), checkpoint.meta.get("averages")
    return weights | _averages_in(checkpoint.parts["callbacks"][averages]) if averaged and averages else weights


def _averages_in(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns parameters and buffers of the model from a state of `EMA.state_dict`."""
    prefix = "module."
    named = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return {name: value for name, value in named.items() if not is_extra(name)}  # which is the copy's own


def restore(checkpoint: StoredCheckpoint, state: TrainState, *, identity: Mapping[str, Any]) -> None:
    """Continues from a checkpoint, and logs the changes since it was saved.

    The optimizer's state is the checkpoint's. So are its settings (rates, decay, …), of which some change in training;
    but those that this run begins with another value of are the run's own.

    Raises:
        CheckpointError: it belongs to another model or another optimizer. Nothing has been changed then.
        ConfigError: it belongs to another data set. Nothing has been changed then.
    """
    parts, meta = checkpoint.parts, _meta_of(checkpoint)
    check_fits(parts["model"], state.model.module, source=checkpoint.path)
    check_optimizer(checkpoint, state.optimizer)
    added = _groups_to_add(checkpoint, state)
    state.load_position(parts["position"])
    state.model.num_steps = state.step
    settings = [dict(group) for group in state.optimizer.param_groups]
    for parameters in added:
        state.optimizer.add_param_group({"params": parameters})
    named = dict(state.model.module.named_parameters())
    for name in meta.changed_frozen:
        named[name].requires_grad_(name in state.first_frozen)
    scale = parts["position"].get("loss_scale")  # checkpoints of the first version have none
    whole = {"model": parts["model"], "optimizer": parts["optimizer"], "loss_scale": scale}
    rounds = parts.get("local_sgd")  # older ones have the optimizers there
    own = parts.get("own", {}).get("ranks") or [{}, *({"optimizer": each} for each in (rounds or {}).get("others", ()))]
    state.strategy.load_state_dict({**whole, "local_sgd": rounds, "own": own})
    began = zip(meta.optimizer_settings or [{}] * len(settings), state.first_settings, strict=False)
    base = _base_rates(parts["position"], state.optimizer, settings)
    for index, (group, own, (then, now)) in enumerate(zip(state.optimizer.param_groups, settings, began, strict=False)):
        group.update({key: own[key] for key in now if now[key] != then.get(key)})
        if now["lr"] != then.get("lr"):
            base[index] = float(own["lr"])
    state.rates = Rates(state.optimizer, base if state.schedule is None else None)
    if state.schedule is not None and "schedule" in parts:
        state.schedule.load_state_dict(parts["schedule"])
    earlier, mine = translated(meta.identity), _with_data(identity, state)
    if state.schedule is not None and (then := parts.get("schedule", {}).get("begun")) is not None:
        earlier["schedule"] = mine["schedule"]  # because the checkpoint's continues
        if (kept := changes(then, state.schedule.begun)) and state.comm.rank == 0:
            log.warning(
                "schedule=%s: %s in this program, but the run continues with what it was, because torch's schedulers "
                "keep their settings in their state; set them again in the fit_start of a ddp.Callback, or take a "
                "schedule of ddp.optim, such as cosine(), which follows the length of the run",
                *(state.schedule.name, "; ".join(kept)),
            )
    in_memory = state.comm.settings.algorithm in ("auto", "shared_memory")
    if state.comm.host_partition.num_hosts == 1 and in_memory:  # where every strategy has the same bits
        for each in (earlier, mine):
            if (each.get("strategy") or {}).get("name") != "local_sgd":
                each.pop("strategy", None)
    changed = changes(earlier, mine)
    if changed and state.comm.rank == 0:
        level = logging.INFO if checkpoint.path == IN_MEMORY else logging.WARNING
        log.log(level, "the bits of the result may differ from an uninterrupted run: %s", "; ".join(changed))
    if {*meta.all_reduce_choices.values()} <= set(state.comm.plan.algorithms()):
        state.comm.plan.pin(meta.all_reduce_choices)  # the choices of "auto"; on another layout it chooses again
    if meta.gradient_order is not None:
        state.model.adopt_gradient_order(meta.gradient_order)  # the same buckets, because a ring's bits depend on them
    _restore_hook(checkpoint, state)
    is_same_epoch = parts["position"]["sampler"].get("epoch") == state.sampler.state.epoch
    seen = parts["position"].get("seen") if is_same_epoch else ()
    state.sampler.seen = None if seen is None else Checksum(*seen) if state.comm.rank == 0 else Checksum()
    state.unreadable = set(parts["position"].get("unreadable", ()))
    state.sampler.load_places(parts["position"].get("places", [None]))
    random_states = parts["slots"]["random"]
    if len(random_states) == state.comm.world_size:
        _load_random_states(random_states[state.comm.rank], state.comm)


def _base_rates(
    position: Mapping[str, Any], optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Returns the rates without a schedule; older checkpoints have them in the groups, and the first ones do not."""
    if "base_rates" in position:
        return list(position["base_rates"])
    groups = optimizer.param_groups
    own = [each["lr"] for each in (*settings, *groups[len(settings) :])]
    return [float(group.get("initial_lr", rate)) for group, rate in zip(groups, own, strict=True)]


def _restore_hook(checkpoint: StoredCheckpoint, state: TrainState) -> None:
    """Restores the state of the hook. Another hook starts without one, and rank 0 warns."""
    compression = state.model.compression
    then, now = _meta_of(checkpoint).hook, None if compression is None else compression.name
    if then == now and compression is not None:
        found = checkpoint.parts.get("hook")
        compression.load_state_dict(found)
        if checkpoint.path == IN_MEMORY:
            compression.take_together((found or {}).get("pieces", {}))
    elif then is not None and state.comm.rank == 0:
        log.warning(
            "%s was taken with the hook %s, and this run has %s: gradients that the first has not sent are lost",
            *(checkpoint.path, then, now or "none"),
        )


def check_optimizer(checkpoint: StoredCheckpoint, optimizer: Optimizer) -> None:
    """Raises CheckpointError unless the checkpoint was taken with an optimizer of this class."""
    then, now = _meta_of(checkpoint).optimizer, type(optimizer).__name__
    if then != now:
        raise CheckpointError(
            f"{checkpoint.path} was taken with {then}, this run uses {now}, whose state it does not hold; "
            "take the same optimizer, or start fresh from its weights with init_from.path"
        )


def _added_groups(state: TrainState) -> list[list[str]]:
    """Returns the names of the parameters in each group that callbacks have added since the run began."""
    names = {id(parameter): name for name, parameter in state.model.module.named_parameters()}
    added = state.optimizer.param_groups[len(state.first_settings) :]
    return [[names.get(id(parameter), "?") for parameter in group["params"]] for group in added]


def _groups_to_add(checkpoint: StoredCheckpoint, state: TrainState) -> list[list[nn.Parameter]]:
    """Returns the parameters of the groups that callbacks had added, and that the optimizer does not have yet.

    Raises:
        CheckpointError: the optimizer has other groups, or of other lengths. torch assigns the state by position.
    """
    source, named = checkpoint.path, dict(state.model.module.named_parameters())
    then, now = (
        [len(group["params"]) for group in groups]
        for groups in (checkpoint.parts["optimizer"]["param_groups"], state.optimizer.param_groups)
    )
    added = _meta_of(checkpoint).added_groups
    if unknown := [name for name in itertools.chain(*added) if name not in named]:
        raise CheckpointError(
            f"{source} was taken after a callback had added {unknown[0]} to the optimizer: this model does not have it"
        )
    missing = added if len(now) + len(added) == len(then) else []
    if then != [*now, *map(len, missing)]:
        raise CheckpointError(
            f"{source} was taken with parameter groups of {then} parameters, this optimizer has groups of {now}; "
            "make the same groups, or start fresh from its weights with init_from.path"
        )
    return [[named[name] for name in names] for names in missing]


def _with_data(identity: Mapping[str, Any], state: TrainState) -> dict[str, Any]:
    """Returns a run's identity with the size of its data, because a data set may grow where its settings stay."""
    return json_object(to_json(plain({**identity, "training_samples": state.sampler.num_samples})))


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the differences of two identities on which bits depend: each dotted key, with its values then and now."""
    free = FREE if then.get("same_bits") and now.get("same_bits") else ()
    before, after = (flat({key: value for key, value in each.items() if key not in free}) for each in (then, now))
    return [
        f"{key} was {before.get(key, 'not set')}, is {after.get(key, 'not set')}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Returns the values in nested mappings and lists of mappings under dotted keys, such as "optimizer.0.lr"."""
    if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {key: value}
    nested = (flat(each, f"{key}.{name}" if key else str(name)) for name, each in value.items())
    return {name: each for found in nested for name, each in found.items()}


def run_identity(comm: Communicator, model: Replica, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the identity of a run: all that the bits of the result depend on, apart from the code."""
    layout = model.bucket_layout
    return {
        **settings,
        "world_size": comm.world_size,
        "device": comm.device.type,
        "all_reduce": comm.plan.describe(),
        "buckets": f"{len(layout)} ({hashlib.sha256(repr(layout).encode()).hexdigest()[:8]})",
        "torch": str(torch.__version__),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads_per_worker": torch.get_num_threads(),
    }


def score_of(state: TrainState) -> float | None:
    """Returns the main metric after this step; None if it is not known."""
    return state.evaluation.get(state.main_metric) if state.evaluated_at == state.step else None


class Checkpointer(Callback):
    """Saves every few steps, or at the end of each epoch, and at the end of the run.

    A checkpoint that is due together with an evaluation waits for `AfterOthers`: the metric decides which one is the
    best.

    Args:
        callbacks: whose `checkpoint_saved` runs after each checkpoint.
        goes_on: the run goes on with other ranks, perhaps before a checkpoint that was due was saved.
    """

    def __init__(
        self,
        store: CheckpointStore | CheckpointMemory,
        *,
        identity: Mapping[str, Any],
        every_steps: int | None,
        extra: ExtraState | None = None,
        callbacks: Sequence[Callback] = (),
        goes_on: bool = False,
    ) -> None:
        self._goes_on = goes_on
        self._store, self._identity, self._every_steps, self._extra = store, identity, every_steps, extra
        self._callbacks = callbacks
        self._due, self._saved_step = False, -1

    def fit_start(self, state: TrainState) -> None:
        self._saved_step = state.step  # resumed from there, or nothing to save yet
        self._due = self._goes_on and state.step > 0 and self._is_due(state)

    def went_back(self, state: TrainState) -> None:
        self._saved_step, self._due = state.step, False

    def _is_due(self, state: TrainState) -> bool:
        return state.sampler.at_epoch_end if self._every_steps is None else state.step % self._every_steps == 0

    def step_start(self, state: TrainState) -> None:
        if self._due:
            self._save(state)

    def step_end(self, state: TrainState, report: StepReport) -> None:
        self._due = self._due or self._is_due(state)

    def step_left_out(self, state: TrainState, epoch: int) -> None:
        if self._every_steps is None:
            self._due = self._due or state.sampler.at_epoch_end

    def fit_end(self, state: TrainState) -> None:
        if self._saved_step != state.step and state.stopped_by != MEASURED:
            self._save(state)

    def started(self, state: TrainState) -> None:
        """Runs once all callbacks have started."""

    def scored(self, state: TrainState) -> None:
        """Saves a checkpoint that waits for an evaluation, or one that a stop has saved without a score."""
        if self._due or self._saved_step == state.step:
            self._save(state)

    def _save(self, state: TrainState) -> None:
        self._due = False
        how: dict[str, Any] = {"identity": self._identity, "extra": self._extra}
        path = save_checkpoint(self._store, state, score=score_of(state), **how)
        self._saved_step = state.step
        for callback in self._callbacks:
            callback.checkpoint_saved(state, path)


class AfterOthers(Callback):
    """Lets a checkpointer save once all callbacks before this one have taken note of an evaluation, as in a counter."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer

    def fit_start(self, state: TrainState) -> None:
        self._checkpointer.started(state)

    def evaluated(self, state: TrainState) -> None:
        self._checkpointer.scored(state)


# --- in memory --------------------------------------------------------------------------------------------------------


def newest_in_memory(memory: CheckpointMemory, run_dir: Path | None) -> StoredCheckpoint | None:
    """Returns the newest whole checkpoint of a fit of this launch, for `read_checkpoint`; on rank 0's host.

    It is the one in memory, unless the run's folder has a newer one, or none in memory is whole. `memory.last_step` is
    the last step that was committed: those after the checkpoint are repeated.
    """
    found = memory.newest()
    if run_dir is None:
        return found
    folder, step = run_dir / "checkpoints", -1 if found is None else found.step
    try:
        if max(steps(folder), default=-1) > step and (on_disk := load(folder)).step > step:
            return on_disk
    except CheckpointError as error:
        log.warning("%s", error)
    return found


class InMemory(Checkpointer):
    """Saves every few steps in memory, from which the run continues if all of its ranks are lost; not at its end.

    It saves at the start, too, and after the first step, when the optimizer has its state: if there is not so much
    memory, the run ends there, and not hours later.
    """

    def __init__(self, memory: CheckpointMemory, **how: Any) -> None:
        super().__init__(memory, **how)
        self._memory, self._begins = memory, False

    def started(self, state: TrainState) -> None:
        self._begins = state.step == 0 or not is_resized()
        if self._begins:
            self._save(state)

    def step_end(self, state: TrainState, report: StepReport) -> None:
        super().step_end(state, report)
        self._due, self._begins = self._due or self._begins, False
        if state.comm.rank == 0:
            self._memory.note(state.step)

    def went_back(self, state: TrainState) -> None:
        super().went_back(state)
        if state.comm.rank == 0:
            self._memory.clear()

    def fit_end(self, state: TrainState) -> None:
        """Saves nothing, because a run that ends is saved on the disk."""


def _random_states(comm: Communicator) -> dict[str, Any]:
    """Returns the states of the generators that code of the user's own may draw from."""
    version, keys, gauss = random.getstate()
    kind, state, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(keys, dtype=torch.int64, device="cpu"), gauss),
        "numpy": (str(kind), torch.from_numpy(np.asarray(state).astype(np.int64)), position, has_gauss, cached),
    }
    if comm.device.type == gpu.KIND:
        states["cuda"] = gpu.cuda.get_rng_state(comm.device)
    return states


def _load_random_states(states: Mapping[str, Any], comm: Communicator) -> None:
    torch.set_rng_state(states["torch"])
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys.tolist()), gauss))
    kind, state, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, state.numpy().astype(np.uint32), position, has_gauss, cached))
    if comm.device.type == gpu.KIND and "cuda" in states:
        gpu.cuda.set_rng_state(states["cuda"], comm.device)
