"""What a checkpoint of a run holds, and how all ranks save and resume together.

    model.pt       the inner module's plain keys: loads into the bare model, with or without this package
    optimizer.pt   torch's optimizer state
    position.pt    step and sampler position: global numbers, valid at any world size
    slots.pt       per named slot one value per rank, e.g. "random": the states of each rank's generators
    meta           the identity of the run (below); readable without loading a tensor

Identity: everything that the bits of the result depend on beside the code. A resumed run compares it with its own
and says what has changed; with nothing changed it continues bit by bit.

Slots have a rule for another world size (`SLOT_RULES`). The generators' states are dropped then: training itself draws
from keyed streams (`data/streams.py`), so they only matter to code of the user's own.

Saving is collective. Rank 0 writes; whether that went well is agreed on, so that all ranks raise or none.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object, on_rank_zero
from ddp.errors import CheckpointError
from ddp.files import Hold
from ddp.log import log
from ddp.train.callbacks import Callback
from ddp.train.checkpoint_store import CheckpointStore, StoredCheckpoint, cause_of
from ddp.train.state import StepReport, TrainState

DROP = "dropped when the world size changes"
SLOT_RULES = {"random": DROP}


def save_checkpoint(
    store: CheckpointStore, state: TrainState, *, identity: Mapping[str, Any], score: float | None = None
) -> None:
    """Writes a checkpoint of where the run stands. Collective; rank 0's file system is the one that counts.

    Raises:
        CheckpointError: it could not be written; on every rank.
    """
    state.model.sync_buffers()
    slots = {"random": all_gather_object(state.comm, _random_states(state.comm))}
    meta = {
        "identity": _with_data(identity, state),
        "slot_rules": SLOT_RULES,
        "optimizer": type(state.optimizer).__name__,
        "all_reduce_choices": {str(nbytes): way for nbytes, way in state.comm.auto.choices.items()},
        "gradient_order": state.model.gradient_order,
    }

    def write() -> None:
        parts = {
            "model": state.model.module.state_dict(),
            "optimizer": state.optimizer.state_dict(),
            "position": state.position(),
            "slots": slots,
        }
        store.save(state.step, parts, meta=meta, score=score)

    on_rank_zero(state.comm, write, label=f"checkpoint of step {state.step}")


def read_checkpoint(comm: Communicator, store: CheckpointStore, which: Path | None) -> StoredCheckpoint:
    """A checkpoint as rank 0 sees it, on every rank. Collective.

    Raises:
        CheckpointError: there is none, or none is whole; on every rank.
    """
    return on_rank_zero(comm, lambda: store.load(which), label="reading a checkpoint")


def restore(checkpoint: StoredCheckpoint, state: TrainState, *, identity: Mapping[str, Any]) -> None:
    """Puts the run where the checkpoint was taken, and says what has changed since.

    The optimizer's state (momenta and the like) is the checkpoint's, its settings (rates, decay, …) are the run's own.

    Raises:
        CheckpointError: it belongs to another model or another optimizer; ConfigError: to another data set. Nothing
            has been changed then.
    """
    parts = checkpoint.parts
    check_fits(parts["model"], state.model.module, source=checkpoint.path)
    check_optimizer(checkpoint, state.optimizer)
    _check_groups(parts["optimizer"]["param_groups"], state.optimizer, source=checkpoint.path)
    state.load_position(parts["position"])
    state.model.module.load_state_dict(parts["model"])
    settings = [{k: v for k, v in group.items() if k != "params"} for group in state.optimizer.param_groups]
    state.optimizer.load_state_dict(parts["optimizer"])
    for group, own in zip(state.optimizer.param_groups, settings, strict=True):
        group.update(own, initial_lr=own["lr"])
    changed = changes(checkpoint.meta["identity"], _with_data(identity, state))
    if changed and state.comm.rank == 0:
        log.warning("the bits of the result will differ from an uninterrupted run: %s", "; ".join(changed))
    choices = {int(nbytes): way for nbytes, way in checkpoint.meta.get("all_reduce_choices", {}).items()}
    if set(choices.values()) <= set(state.comm.ways()):
        state.comm.auto.pin(choices)  # what "auto" took then; on another layout it chooses anew
    if (order := checkpoint.meta.get("gradient_order")) is not None:
        state.model.adopt_gradient_order(order)  # the same buckets as then: a ring's bits depend on them
    random_states = parts["slots"]["random"]
    if len(random_states) == state.comm.world_size:
        _load_random_states(random_states[state.comm.rank], state.comm)


def check_fits(weights: Mapping[str, Any], module: nn.Module, *, source: Path | str) -> None:
    """Raises CheckpointError, naming the first difference, unless `weights` has the module's keys and shapes."""
    own = module.state_dict()
    for name, tensor in own.items():
        if name not in weights:
            raise CheckpointError(f"{source} is of another model: it has no {name} {list(tensor.shape)}")
        if weights[name].shape != tensor.shape:
            shapes = f"{name} is {list(weights[name].shape)} there and {list(tensor.shape)} here"
            raise CheckpointError(f"{source} is of another model: {shapes}")
    for name in weights:
        if name not in own:
            raise CheckpointError(f"{source} is of another model: it has {name}, which this model has not")


def check_optimizer(checkpoint: StoredCheckpoint, optimizer: Optimizer) -> None:
    """Raises CheckpointError unless the checkpoint was taken with an optimizer of this class."""
    then, now = checkpoint.meta["optimizer"], type(optimizer).__name__
    if then != now:
        raise CheckpointError(
            f"{checkpoint.path} was taken with {then}, this run uses {now}, whose state it does not hold; "
            "take the same optimizer, or start fresh from its weights with init_from.path"
        )


def _check_groups(groups: Sequence[Mapping[str, Any]], optimizer: Optimizer, *, source: Path) -> None:
    """Raises CheckpointError unless the optimizer has as many groups, of as many parameters: state goes by position."""
    then, now = ([len(group["params"]) for group in each] for each in (groups, optimizer.param_groups))
    if then != now:
        raise CheckpointError(
            f"{source} was taken with parameter groups of {then} parameters, this optimizer has groups of {now}; "
            "make the same groups, or start fresh from its weights with init_from.path"
        )


def _with_data(identity: Mapping[str, Any], state: TrainState) -> dict[str, Any]:
    """Returns a run's identity with the size of its data, because a data set may grow where its settings stay."""
    return {**identity, "training_samples": state.sampler.length}


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two identities, in words."""
    return [
        f"{key} was {_short(then.get(key))}, is {_short(now.get(key))}"
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key)
    ]


def software_identity() -> dict[str, Any]:
    """What the bits depend on that no setting shows."""
    return {
        "torch": str(torch.__version__),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads_per_worker": torch.get_num_threads(),
    }


def load_initial_weights(
    path: Path, module: nn.Module, *, strict: bool, rename: Mapping[str, str], skip: list[str]
) -> None:
    """Gives a fresh module weights from a file or a checkpoint folder.

    Args:
        path: a checkpoint of a run, a folder of them, or a file of `torch.save(module.state_dict())`.
        strict: every tensor of the module that is not skipped must be found, and every key of the file be used.
        rename: prefix of a key in the file → prefix in the module.
        skip: prefixes (in the module) that keep their fresh values, such as a new head.

    Raises:
        CheckpointError: nothing there, or, if strict, the first tensor that does not fit.
    """
    weights = {_renamed(key, rename): value for key, value in read_weights(path).items()}
    weights = {key: value for key, value in weights.items() if not key.startswith(tuple(skip))}
    own = {key: value for key, value in module.state_dict().items() if not key.startswith(tuple(skip))}
    if strict:
        kept = {key: value for key, value in module.state_dict().items() if key not in own}
        check_fits({**weights, **kept}, module, source=path)
    fitting = {key: value for key, value in weights.items() if key in own and value.shape == own[key].shape}
    if not fitting:
        raise CheckpointError(f"{path} has no tensor that fits the model; see init_from.rename and init_from.skip")
    module.load_state_dict(fitting, strict=False)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Plain keys and tensors from a checkpoint folder, or from a file of a state dict."""
    if path.is_dir():
        return dict(CheckpointStore(path.parent).load(path, names=["model"]).parts["model"])
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; init_from.path takes a checkpoint folder or a file of weights")
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as weights ({cause_of(error)}); init_from.path takes a file of "
            "torch.save(model.state_dict(), PATH), or a checkpoint folder"
        ) from error
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(f"{path} holds no state dict; save it with torch.save(model.state_dict(), PATH)")
    return {str(key).removeprefix("module."): value for key, value in weights.items()}


class Checkpointer(Callback):
    """Saves every so many steps, or at the end of each epoch, and at the end of the run.

    A checkpoint that is due together with an evaluation waits for it: the metric decides which one is the best. While
    a fit runs, no other process may save into the store's folder.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        identity: Mapping[str, Any],
        every_steps: int | None,
        score_metric: str | None = None,
    ) -> None:
        self._store, self._identity = store, identity
        self._every_steps, self._score_metric = every_steps, score_metric
        self._due = False
        self._saved_step = -1
        self._held: Hold | None = None  # on rank 0, while a fit runs

    def fit_start(self, state: TrainState) -> None:
        on_rank_zero(state.comm, self._hold, label="locking the folder of the checkpoints")
        self._saved_step = state.step  # resumed from there, or nothing to save yet

    def _hold(self) -> None:
        self._held = self._store.hold()

    def step_start(self, state: TrainState) -> None:
        if self._due:
            self._save(state)

    def step_end(self, state: TrainState, report: StepReport) -> None:
        if self._every_steps is None:
            self._due = self._due or state.sampler.state.consumed == 0
        else:
            self._due = self._due or state.step % self._every_steps == 0

    def evaluated(self, state: TrainState) -> None:
        if self._due:
            self._save(state)

    def fit_end(self, state: TrainState) -> None:
        if self._saved_step != state.step:
            self._save(state)
        self._release()

    def exception(self, state: TrainState, error: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def _save(self, state: TrainState) -> None:
        self._due = False
        scored = self._score_metric is not None and state.evaluated_at == state.step
        score = state.evaluation.get(self._score_metric or "") if scored else None
        save_checkpoint(self._store, state, identity=self._identity, score=score)
        self._saved_step = state.step


def _random_states(comm: Communicator) -> dict[str, Any]:
    """Of the generators that this package never relies on, but code of the user's own may."""
    version, keys, gauss = random.getstate()
    kind, state, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(keys, dtype=torch.int64, device="cpu"), gauss),
        "numpy": (str(kind), torch.from_numpy(np.asarray(state).astype(np.int64)), position, has_gauss, cached),
    }
    if comm.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(comm.device)
    return states


def _load_random_states(states: Mapping[str, Any], comm: Communicator) -> None:
    torch.set_rng_state(states["torch"])
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys.tolist()), gauss))
    kind, state, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, state.numpy().astype(np.uint32), position, has_gauss, cached))
    if comm.device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], comm.device)


def _renamed(key: str, rename: Mapping[str, str]) -> str:
    for old, new in rename.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
