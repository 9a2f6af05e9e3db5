"""A strategy: who holds parameters and optimizer state, and how often the workers agree. A loop calls its members.

    strategy = ddp.strategies.Replicated(net, optimizer)              # or Sharded, LocalSteps, …
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_of(strategy.model(inputs), targets).backward()           # of a mean: the gradients are averaged
        ddp.strategies.step(strategy)                                 # agree, update

A step in several micro-batches has each forward and backward in its own block:

        for number, (inputs, targets) in enumerate(parts):
            with strategy.micro_batch(is_last=number == len(parts) - 1) as scale:
                (loss_of(strategy.model(inputs), targets) / len(parts) * scale).backward()

With `LocalSteps` each such block is a step of this rank alone, so its loss is a mean, and not divided by their number.
`ddp.fit` calls the same members; a strategy depends on nothing else of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp.collectives.catalog import all_reduce_schedules
from ddp.comm.communicator import Communicator
from ddp.comm.objects import gather_object, scatter_object
from ddp.comm.session import current
from ddp.errors import CheckpointError, ConfigError, Diverged, UnusedParameters, first_line
from ddp.gradients.reducer import AllReduce, Collective
from ddp.gradients.totals import Totals
from ddp.optim.layerwise import clipped_step
from ddp.optim.norms import gradient_norm
from ddp.optim.precision import LossScale, MasterWeights, narrowed
from ddp.process.terminal import log
from ddp.replica.broadcast import check_untied
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.replica import Replica
from ddp.setting import Precision, Setup, StrategyName, refuse


class Agreement(NamedTuple):
    """Values of a step that are the same on all ranks, before parameters change.

    Attributes:
        totals: of all ranks; zeros unless each rank has passed its own to `model.ride_along`.
        norm: of the global mean gradient, before clipping.
        length: the norm, on the host.
        is_overflow: the loss scale was too large, and has been reduced; repeat the step, or leave it out.
    """

    totals: Totals
    norm: Tensor
    length: float
    is_overflow: bool = False


class Strategy(Protocol):
    """The members of a strategy, in the order of a step."""

    @property
    def model(self) -> Replica:
        """Returns the model that the loop calls."""

    def micro_batch(self, *, is_last: bool = True, synchronous: bool = False) -> AbstractContextManager[int]:
        """Begins a block for forward and backward of one micro-batch of a step.

        Args:
            is_last: the step ends with it.
            synchronous: gradients are averaged in this step, also by a strategy that agrees less often.

        Yields:
            The factor for the loss, which `Totals.loss_scale` takes, too.
        """

    def agree(self, step: int) -> Agreement:
        """Returns values that are the same on every rank.

        Args:
            step: its number, from 1, for messages.

        Raises:
            UnusedParameters, Diverged: on every rank: the step cannot be made. No parameter has changed; in a round, no
                buffer, either; in other steps, forwards have changed buffers.
        """

    def update(self, agreement: Agreement) -> None:
        """Clips the gradients, and makes the optimizer's step with the rates that its groups have now."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state, valid for every strategy and world size: "model", "optimizer", "loss_scale".

        "own" has by rank the differences from rank 0's state, for the current number of ranks. A strategy may add
        "local_sgd"; others warn that they cannot use it. Collective; the result may be incomplete on ranks other than
        0.
        """

    def kept(self) -> dict[str, Any] | None:
        """Returns the same state as of the last update, as this rank has it by itself; None if it has not all of it.

        Not collective, so that the others may be lost. Its tensors are no copies.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a state that `state_dict` has returned on rank 0. Collective.

        Every rank passes the same state, except for "own" and "local_sgd", which rank 0 distributes.

        Raises:
            CheckpointError, ValueError: the state is of another model or optimizer. Nothing has changed.
        """

    def finish(self, *, alone: bool = False) -> None:
        """Leaves parameters and state whole, in the module and in the optimizer. Collective unless `alone`.

        Args:
            alone: an error has ended the training on this rank, so that others may not take part; their parts of the
                state are not gathered. The module can be used by itself then, or in another replica
                (`Replica.release`).
        """


def step(strategy: Strategy) -> Agreement:
    """Ends a step of a user's own loop, after backward: the ranks agree, and the optimizer steps. Collective.

    Raises:
        UnusedParameters, Diverged: as `Strategy.agree`.
        RuntimeError: no backward has averaged gradients since the last step.
    """
    model = strategy.model
    if model.num_steps == model.num_ended:
        raise RuntimeError(
            "no backward has averaged gradients since the last step: compute the loss by strategy.model(…), not by its "
            "module, and run the last backward of a step outside of no_sync()"
        )
    model.num_ended = model.num_steps
    agreement = strategy.agree(model.num_steps)
    if not agreement.is_overflow:
        strategy.update(agreement)
    return agreement


# --- The replicated strategy ------------------------------------------------------------------------------------------
#
# Every rank holds all parameters and the optimizer's whole state, and makes the same step.
#
#     backward      the replica averages the gradients
#     agree         every rank measures the norm of the same mean gradient: no message
#     update        clip, optimizer; with precision="bf16_pure" on master weights, which are rounded


class Replicated:
    """Makes the same update on every rank. Collective to make.

    Args:
        model: a module; or a replica of it, with this strategy's reducer.
        optimizer: over its parameters. Every step uses its current groups and state.
        precision: "fp16" scales the loss; "bf16_pure" makes the parameters bfloat16, with master weights. The loop
            enters autocast.
        clip_norm: largest norm of the global mean gradient; None for no clipping.
        watched: the program may write to `parameter.data` between steps (`MasterWeights`).

    Attributes:
        word: of the rules that say what the strategy cannot do (`ddp/setting.py`).
        reducer: class for the replica, which defines the part of the mean gradients that each rank gets.
        needs_buckets: gradients must be averaged in buckets.
        unties: moves parameters to other memory, which unties them.
    """

    word: StrategyName = "auto"
    reducer: type[Collective] = AllReduce
    needs_buckets = unties = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        precision: Precision = "fp32",
        clip_norm: float | None = None,
        watched: bool = True,
    ) -> None:
        name = type(self).__name__
        refuse(Setup(strategy=self.word, precision=precision))
        if isinstance(model, Replica) and not self.takes(model):
            raise ConfigError(f"{name} with a model in a {type(model).__name__}: give the bare module")
        self.model = model if isinstance(model, Replica) else self.replica_of(model)
        if self.unties:
            check_untied(self.model.module, name, instead="Replicated (strategy='auto')")
        self.optimizer, self._clip_norm = optimizer, clip_norm
        self.loss_scale = LossScale() if precision == "fp16" else None
        if precision == "bf16_pure":
            check_untied(self.model.module, "precision='bf16_pure'", instead="precision='bf16'")
        narrow = narrowed(self.model.module) if precision == "bf16_pure" else ()
        self.masters = MasterWeights(self.model.module, narrow, watched=watched)

    @classmethod
    def replica_of(cls, module: nn.Module, **how: Any) -> Replica:
        """Returns a replica of a module for this strategy. Collective.

        Args:
            how: further arguments of the replica.
        """
        return BucketedDataParallel(module, reducer=cls.reducer, **how)

    @classmethod
    def takes(cls, replica: Replica) -> bool:
        """Returns True if a replica gives each rank the gradients that this strategy needs."""
        has_mine = type(replica.collective) is cls.reducer and replica.is_whole
        return has_mine or (replica.collective is None and not cls.needs_buckets)

    @contextmanager
    def micro_batch(self, *, is_last: bool = True, synchronous: bool = False) -> Iterator[int]:
        with nullcontext() if is_last else self.model.no_sync():
            yield 1 if self.loss_scale is None else self.loss_scale.value

    def agree(self, step: int) -> Agreement:
        model = self.model
        try:
            if not model.comm.is_stream_ordered:
                model.raise_pending()
            norm = self._gradient_norm()
            [[length]] = model.comm.to_host(norm).read()  # the only wait for a GPU, if collectives are enqueued
            model.raise_pending()
            totals = model.totals
            if not math.isfinite(totals.mean_loss):
                raise Diverged(diverged(step, "loss", totals.mean_loss))
            if math.isfinite(length):
                return Agreement(totals, norm, length)
            if (scale := self.loss_scale) is None:
                raise Diverged(diverged(step, "gradient norm", length))
            if not scale.shrink():
                raise Diverged(
                    f"a gradient of step {step} is not finite, even with a loss scale of {scale.value}; parameters are "
                    f"still those of step {step - 1}. Take precision=bf16, or lower the learning rate (optim.lr)"
                )
        except (UnusedParameters, Diverged):
            self._take_back()
            raise
        log.debug("loss scale %d, because a gradient of step %d was not finite", scale.value, step)
        self._take_back()
        return Agreement(totals, norm, length, is_overflow=True)

    def _take_back(self) -> None:
        """Rolls back a step that will not be made."""
        self.model.take_back()

    def update(self, agreement: Agreement) -> None:
        self._step(agreement.norm)
        if self.loss_scale is not None:
            self.loss_scale.grow()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self._model_state(),
            "optimizer": self._optimizer_state(),
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
            "own": gather_object(self.model.comm, self._own_state()),
        }

    def kept(self) -> dict[str, Any] | None:
        scale = None if self.loss_scale is None else self.loss_scale.state_dict()
        whole = {"model": self.masters.state_dict(), "optimizer": self.optimizer.state_dict(), "loss_scale": scale}
        return {**whole, "own": []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        comm, own = self.model.comm, state.get("own", ())
        if state.get("local_sgd") is not None:
            log.warning(
                "the checkpoint is of strategy=local_sgd: the run continues with worker 0's optimizer state; those "
                "of the others are dropped, and the momentum of the common parameters"
            )
        elif len(own) != comm.world_size and any(own[1:]):
            log.warning(
                "the checkpoint is of %d workers, and there are %d: all continue with worker 0's optimizer state and "
                "buffers, and those of the others are dropped",
                *(len(own), comm.world_size),
            )
        check_same_shapes(self.masters.state_dict(), state["model"])
        self._load_optimizer_state(state["optimizer"])  # first, because torch may refuse it
        self._load_model(state["model"])
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])
        self._load_own_state(scatter_object(comm, own if len(own) == comm.world_size else None) or {})

    @property
    def _keeps_own_buffers(self) -> bool:
        """Returns True if buffers of other ranks than 0 count in training."""
        return self.model.keeps_own_buffers

    def _own_state(self) -> dict[str, Any]:
        """Returns this rank's own state: saved buffers that are not rank 0's, if these count. Collective."""
        if not self._keeps_own_buffers:
            return {}
        model = self.model
        with model.buffers_of_rank_zero() as own:
            first, saved = dict(model.module.named_buffers()), own.values.keys() & model.module.state_dict()
            mine = {name: own.values[name] for name in saved if not torch.equal(own.values[name], first[name])}
        return {"buffers": mine} if mine else {}

    def _load_own_state(self, own: Mapping[str, Any]) -> None:
        for name, value in own.get("buffers", {}).items() if self._keeps_own_buffers else ():
            self.model.module.get_buffer(name).data.copy_(value)

    def finish(self, *, alone: bool = False) -> None:
        self.masters.give_back()
        if alone:
            self.model.release()
        elif self.model.syncs_buffers:
            self.model.sync_buffers()

    # --- the update: `sharded.py` has another -------------------------------------------------------------------------

    def _gradient_norm(self) -> Tensor:
        self.masters.take_gradients()
        return gradient_norm(self.masters.updated())

    def _step(self, norm: Tensor) -> None:
        self.masters.take_in()
        with self.masters.installed_in(self.optimizer):
            clipped_step(self.optimizer, self.masters.updated(), norm, self._clip_norm)
        self.masters.round()

    def _optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def _model_state(self) -> dict[str, Tensor]:
        return self.masters.state_dict()

    def _load_model(self, state: Mapping[str, Tensor]) -> None:
        self.masters.load_state_dict(state)

    def _load_optimizer_state(self, state: dict[str, Any]) -> None:
        with self.masters.installed_in(self.optimizer):  # because torch gives a state its parameter's dtype
            self.optimizer.load_state_dict(state)


class Compiled(Replicated):
    """Updates on the host, by gradients that devices of JAX have computed (`replica/compiled.py`)."""

    word = "tpu"

    @classmethod
    def replica_of(
        cls, module: nn.Module, *, comm: Communicator | None = None, num_devices: int | None = None, **how: Any
    ) -> Replica:
        """Returns a replica that computes on devices of JAX.

        Args:
            num_devices: None: all of them.

        Raises:
            ConfigError: JAX or torchax is missing, or there are fewer devices; or another process takes part.
        """
        comm = comm or current()
        if comm.world_size > 1:
            raise ConfigError(f"strategy=tpu: one process has all devices, and there are {comm.world_size}; start one")
        try:
            compiled = import_module("ddp.replica.compiled")
        except Exception as error:  # of any kind, if one does not fit the other, or torch
            why = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(f"strategy=tpu needs JAX and torchax ({why}): pip install '.[tpu]'") from error
        devices = compiled.devices_of(num_devices)
        name = "ring" if comm.plan.algorithm == "auto" else comm.plan.algorithm
        schedule = all_reduce_schedules((tuple(range(len(devices))),))[name]
        given = {"schedule": schedule, "name": name, "devices": devices, "comm": comm}
        unused = how.get("find_unused_parameters", False)
        return cast(Replica, compiled.CompiledDataParallel(module, find_unused_parameters=unused, **given))

    @classmethod
    def takes(cls, replica: Replica) -> bool:
        return replica.compute is not None


def check_same_shapes(here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Raises CheckpointError, with the first difference, unless two states of models have tensors of one shape."""
    for name in {**here, **there}:
        one, other = (
            list(each[name].shape) if isinstance(each.get(name), Tensor) else "missing" for each in (there, here)
        )
        if one != other:
            raise CheckpointError(f"the state is of another model: {name} is {one} there and {other} here")


def diverged(step: int, what: str, value: float) -> str:
    """Returns the message on a step whose loss or gradient is not finite."""
    before = f"parameters are still those of step {step - 1}"
    return f"the {what} of step {step} is {value} on every rank; {before}. {ADVICE}"


ADVICE = "Lower the learning rate (optim.lr), warm it up (schedule.warmup_steps), or clip gradients (clip_norm=1.0)"
"""Advice for a step whose loss is not finite."""
