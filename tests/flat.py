"""`ddp.fit` for tests that vary its arguments one by one, fields of policies beside each other; and its loop alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from torch import nn

import ddp
from ddp.data.loading.source import Source
from ddp.train.arguments import FitArguments, Inputs
from ddp.train.held_out import HeldOut
from ddp.train.loop import train_loop
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import TrainState
from ddp.train.steps.stopping import StopFlag
from ddp.train.steps.task import Classification

POLICIES = {"evaluation": ddp.Evaluation, "batches": ddp.Batches, "reading": ddp.Reading}


def grouped(*, every: str | None = None, reduction: Any = None, sharded: bool = False, **flat: Any) -> dict[str, Any]:
    """Returns the arguments of `ddp.fit`, with each field of a policy in its policy.

    Args:
        every: moment of the scheduler of torch's that `schedule` is; reduction: of the function that `loss` is.
        sharded: the strategy is that one.
        flat: arguments of `ddp.fit`, and fields of its policies; "checkpoint_every_steps" is `ddp.Folder.every_steps`.
    """
    given = dict(flat)
    if every is not None:
        given["schedule"] = ddp.optim.TorchSchedule(given["schedule"], every=every)
    if reduction is not None:
        given["loss"] = ddp.LossFunction(given["loss"], reduction=reduction)
    if sharded:
        given["strategy"] = "sharded"
    for argument, policy in POLICIES.items():
        names = {item.name for item in fields(policy)} & given.keys()
        if names:
            given[argument] = policy(**{name: given.pop(name) for name in names})
    averaging = {name: given.pop(name) for name in ("wire", "hook", "verify_every") if name in given}
    if averaging:
        given["strategy"] = ddp.Averaging(strategy=given.pop("strategy", "auto"), **averaging)
    kept = {item.name for item in fields(ddp.Folder)} & given.keys()
    folder = {name: given.pop(name) for name in kept}
    if "checkpoint_every_steps" in given:
        folder["every_steps"] = given.pop("checkpoint_every_steps")
    if folder:
        given["folder"] = ddp.Folder(*([given["folder"]] if "folder" in given else []), **folder)
    return given


def fit_over(
    comm: ddp.Communicator, module: nn.Module, replica: Callable[..., nn.Module] = ddp.BucketedDataParallel, **flat: Any
) -> ddp.TrainState:
    """Returns the state after a fit of a module over a communicator of the test's own, in a replica of this class."""
    return ddp.fit(replica(module, comm=comm), **grouped(**flat))


def train_on(
    state: TrainState, data: Any, *, callbacks: Sequence[Callback] = (), stop: StopFlag | None = None, **options: Any
) -> None:
    """Trains from `state` on, without evaluations."""
    task = Classification()
    inputs = Inputs(task, Source(data), HeldOut(None, None), state.model, None, None)
    given = FitArguments(model=state.model, data=data, optimizer=state.optimizer, loss=task, global_batch=1, **options)
    state.stop_flag = StopFlag() if stop is None else stop
    train_loop(state, given, inputs, callbacks)
