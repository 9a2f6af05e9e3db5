"""Saves and restores the state of a run besides model and optimizer: that of callbacks, and of a loss.

    callbacks.pt   by name ("EMA", or "EMA 2" for the second one of that class): its `state_dict` on rank 0
    loss.pt        by rank: the values of a loss that is a module, or holds one, that have changed since the run began

A value of the loss that has not changed, such as class weights, is the program's own, also when the run is resumed. A
rank's loss sees this rank's samples alone, so its values differ between ranks. If they do not, or if the world size
changes, all ranks continue from those of rank 0.

The run warns before its first step of each state that a checkpoint cannot hold.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from ddp.comm.objects import all_gather_object
from ddp.data.loading.source import digest_of
from ddp.errors import CheckpointError, ConfigError
from ddp.process.terminal import log
from ddp.replica.replica import Replica
from ddp.replica.units import form_of
from ddp.train.checkpoints.checkpoint_store import refusal_of
from ddp.train.steps.callbacks import EMA, Callback
from ddp.train.steps.state import TrainState
from ddp.train.steps.task import Task, name_of


class ExtraState(Callback):
    """Saves and loads these states. It runs as the last callback of a fit, so that the others have started.

    Args:
        model: the replica.
        task: as the run begins.
        callbacks: the user's own.
        saves: the run has checkpoints.
        schedule: the user's function, which is to have no state.
    """

    def __init__(
        self, model: Replica, task: Task, callbacks: Sequence[Callback], *, saves: bool, schedule: Any = None
    ) -> None:
        self._comm = model.comm
        self._callbacks, of_model = named(callbacks), {id(each) for each in model.modules()}
        self._losses = {name: loss for name, loss in stateful_parts(task).items() if id(loss) not in of_model}
        self._first = {name: _digests(loss) for name, loss in self._losses.items()}
        self._saves, self._schedule = saves, schedule
        self._unsaved = set[str]()
        self._found: Mapping[str, Any] | None = None
        self._settings: list[dict[str, Any]] = []

    def resumes(self, parts: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Takes the parts of the checkpoint that the run resumes from. The optimizer has its state already."""
        self._found, self._settings = parts, group_settings(optimizer)

    @property
    def name_of_averages(self) -> str | None:
        """The name of the callback whose weights evaluations have used, if there is one."""
        return next((name for name, callback in self._callbacks.items() if isinstance(callback, EMA)), None)

    def fit_start(self, state: TrainState) -> None:
        if self._saves:
            self._warn_of_what_is_lost(state)
        found, self._found = self._found, None
        if found is not None:
            self._load_callbacks(found.get("callbacks", {}), state)
            self._load_losses(found.get("loss", []))

    went_back = fit_start

    def parts(self, *, alone: bool = False) -> dict[str, Any]:
        """Returns the parts of a checkpoint, which rank 0 is to write. Collective unless `alone`: then of this rank."""
        parts: dict[str, Any] = {}
        if states := dict(self._states_of_callbacks()):
            parts["callbacks"] = states
        if self._losses:
            mine = {name: self._changed(name, loss) for name, loss in self._losses.items()}
            of_ranks = [mine] if alone else all_gather_object(self._comm, mine)
            digests = {digest_of(each) for each in of_ranks}
            parts["loss"] = of_ranks[:1] if len(digests) == 1 and None not in digests else of_ranks
        return parts

    def _states_of_callbacks(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, callback in self._callbacks.items():
            state = callback.state_dict()
            if not isinstance(state, Mapping):
                raise ConfigError(f"{name}.state_dict returned {state!r:.60}: return a dict, {{}} for nothing")
            state = plain(dict(state))
            if why := refusal_of(state):
                more = f"because it holds more than tensors and plain values ({why})"
                self._warn_once(name, f"the state of {name} is in no checkpoint, {more}")
            elif state:
                yield name, state

    def _changed(self, name: str, loss: Any) -> dict[str, Any]:
        """Returns the values that are not as the run began with them, as far as a checkpoint can hold them."""
        first, now, values = self._first[name], _digests(loss), plain(loss.state_dict())
        changed = {key: values[key] for key, digest in now.items() if digest is None or digest != first.get(key)}
        for key in list(changed):
            if why := refusal_of(changed[key]):
                del changed[key]
                self._warn_once(f"{name} {key}", f"{key} of the loss is in no checkpoint ({why})")
        return changed

    # --- the states in a checkpoint -----------------------------------------------------------------------------------

    def _load_callbacks(self, states: Mapping[str, Any], state: TrainState) -> None:
        for name, callback in self._callbacks.items():
            if name in states:
                if any(isinstance(each, LRScheduler) for each in tree_leaves(vars(callback))):
                    put_back(self._settings, state.optimizer)  # a scheduler begins by writing its first rates there
                callback.load_state_dict(states[name])
            elif callback.state_dict():
                self._warn_once(name, f"the checkpoint has no state of {name}, which starts from scratch")
        for name in states.keys() - self._callbacks:
            self._warn_once(name, f"the checkpoint has a state of {name}, but this run has no such callback")

    def _load_losses(self, of_ranks: Sequence[Mapping[str, Any]]) -> None:
        rank = self._comm.rank if len(of_ranks) == self._comm.world_size else 0
        mine = of_ranks[rank] if of_ranks else {}
        for name, values in mine.items():
            if values and name not in self._losses:
                found = ", ".join(values)
                self._warn_once(name, f"the checkpoint has values that this run's loss does not have: {found}")
            elif values:
                loss = self._losses[name]
                try:
                    loss.load_state_dict({**loss.state_dict(), **values})
                except (RuntimeError, KeyError, ValueError) as error:
                    reason = " ".join(str(error).split())
                    raise CheckpointError(f"the checkpoint is of a run with another loss: {reason}") from error

    # --- states that no checkpoint has --------------------------------------------------------------------------------

    def _warn_of_what_is_lost(self, state: TrainState) -> None:
        dict(self._states_of_callbacks())
        saved = {id(each) for each in (*state.model.modules(), state.optimizer, *self._losses.values())}
        saved |= {id(each) for loss in self._losses.values() for each in getattr(loss, "modules", list)()}
        for name, callback in self._callbacks.items():
            if getattr(callback.state_dict, "__func__", None) is Callback.state_dict:  # not one of the object's own
                for attribute, each in vars(callback).items():
                    if has_state(each) and id(each) not in saved:
                        what = f"{name}.{attribute} ({type(each).__name__})"
                        remedy = f"give {name} the methods state_dict and load_state_dict"
                        self._warn_once(name, f"{what} has a state that is in no checkpoint: {remedy}")
        if has_state(self._schedule):
            what = f"the state of schedule={name_of(self._schedule)}"
            self._warn_once("schedule", f"{what} is in no checkpoint: make it a function of its arguments alone")
        for name, value in form_of(state.model.module).items():
            if not isinstance(value, Tensor) and (why := refusal_of(value)):
                raise ConfigError(
                    f"the model's state_dict has {name}, which a checkpoint cannot hold, because it is more than "
                    f"tensors and plain values ({why}): let get_extra_state return these alone, or take "
                    "folder=None"
                )

    def _warn_once(self, name: str, text: str) -> None:
        if name not in self._unsaved and self._comm.rank == 0:
            log.warning("%s", text)
        self._unsaved.add(name)


def named(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Returns the callbacks by the names that checkpoints know them by: its class, and which one of that class."""
    found, counts = dict[str, Callback](), Counter[str]()
    for callback in callbacks:
        kind = type(callback).__name__
        counts[kind] += 1
        found[kind if counts[kind] == 1 else f"{kind} {counts[kind]}"] = callback
    return found


def stateful_parts(task: Task) -> dict[str, Any]:
    """Returns the task itself if it has a state, or else its attributes that have one, by name."""
    if has_state(task):
        return {"": task}
    held = {name: getattr(each, "__self__", each) for name, each in vars(task).items()}  # of a method, its object
    return {name: each for name, each in held.items() if has_state(each)}


def loss_modules(task: Task) -> list[nn.Module]:
    """Returns the modules that a loss is, or holds, which are switched to evaluation mode as the model is."""
    return [each for each in stateful_parts(task).values() if isinstance(each, nn.Module)]


def has_state(each: Any) -> bool:
    """Returns True for an object, not a class, with torch's two methods."""
    methods: list[Callable[..., Any] | None] = [getattr(each, name, None) for name in ("state_dict", "load_state_dict")]
    return not isinstance(each, type) and all(map(callable, methods))


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Returns values with Python's numbers in place of NumPy's, which a checkpoint cannot hold."""
    found: dict[str, Any] = apply_to_collection(values, np.generic, lambda number: number.item())
    return found


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns a copy of the settings of each group, such as its rate."""
    return [copy.deepcopy({key: group[key] for key in group if key != "params"}) for group in optimizer.param_groups]


def put_back(settings: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
    """Gives the groups these settings. A rate that is a tensor stays that tensor, which others may hold."""
    for group, before in zip(optimizer.param_groups, settings, strict=False):  # groups may have been added
        for key, value in before.items():
            if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


def _digests(loss: Any) -> dict[str, str | None]:
    """Returns a hash of each value in a state; None of one that has no hash, which counts as changed."""
    return {key: digest_of(value) for key, value in loss.state_dict().items()}
