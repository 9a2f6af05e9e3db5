"""The state of a run: `TrainState` holds everything that a step changes, so that the loop itself holds nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ddp.comm.communicator import Communicator
from ddp.comm.meeting.role import current_role
from ddp.comm.objects import all_gather_object
from ddp.data.loading.processes import Limits
from ddp.data.loading.source import Source
from ddp.data.orders.sampler import Micro, TrainSampler
from ddp.errors import ConfigError
from ddp.gradients.totals import Parts
from ddp.optim.precision import LossScale
from ddp.optim.schedules import Rates, TorchSchedule
from ddp.replica.broadcast import BufferSnapshot
from ddp.replica.replica import Replica
from ddp.replica.sync_batchnorm import waits
from ddp.strategies.strategy import Replicated, Strategy
from ddp.train.steps.stopping import StopFlag, weight

NOTHING: AbstractContextManager[None] = nullcontext()


def unmeasured(name: str) -> AbstractContextManager[None]:
    """Returns a block that does nothing, for a phase that is not measured of a step that it is around."""
    return NOTHING


@dataclass(eq=False)
class TrainState:
    """The state of a run after its last committed step.

    Attributes:
        strategy: holds parameters and optimizer state, and makes the update.
        optimizer: the user's, whose groups and state hold in every step as they are then.
        step: committed optimizer steps.
        run_dir: the run's folder, as rank 0 names it from the root on; None: nothing is written.
        settings: values that the bits of the result depend on, by name: a checkpoint's identity of the run.
        stopped_by: why the run ends before its time ("SIGTERM", say), agreed on by all ranks; "" while it runs.
        stop_flag: this rank's wish to stop, which signals and `stop` set.
        train_loss: of the last step; None before the first.
        evaluation: the latest metrics by name; evaluated_at: the step that they belong to.
        history: of each evaluation before the run's end, also before a resume: step, epochs, train_loss, and metrics.
        main_metric: the one of them by which checkpoints, callbacks and schedulers choose (`held_out.py`);
            higher_is_better: in which direction.
        schedule: torch's scheduler, if there is one: the schedules of ours hold no state.
        unreadable: numbers of the samples that were left out because they could not be read, as far as this rank knows.
        phase: returns the block that is around a phase of a step: "step", and in it "data", "forward", "backward" and
            "update". A profiler replaces it.
        rates: of the groups, with and without the schedule.
        first_frozen: names of the parameters that needed no gradient when the run began.
        first_settings: the optimizer's groups as the run has begun with them, as text; some change in training.
        waits: a layer or the loss waits in each forward for other ranks.
        buffers: as the last step began, if steps keep them.
    """

    comm: Communicator
    strategy: Strategy
    optimizer: Optimizer
    sampler: TrainSampler
    step: int = 0
    run_dir: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    stopped_by: str = ""
    stop_flag: StopFlag = field(default_factory=StopFlag)
    train_loss: float | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    evaluated_at: int = -1
    history: list[dict[str, Any]] = field(default_factory=list)
    main_metric: str = "test_loss"
    higher_is_better: bool = False
    schedule: TorchSchedule | None = None
    unreadable: set[int] = field(default_factory=set)
    phase: Callable[[str], AbstractContextManager[None]] = unmeasured
    rates: Rates = field(init=False)
    first_frozen: set[str] = field(init=False)
    first_settings: list[dict[str, str]] = field(init=False)
    waits: bool = field(init=False)
    buffers: BufferSnapshot | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.rates, self.first_frozen, self.waits = Rates(self.optimizer), self.frozen(), waits(self.model)
        self.first_settings = [
            {key: repr(value) for key, value in group.items() if key not in ("params", "initial_lr")}
            for group in self.optimizer.param_groups
        ]

    def stop(self, reason: str) -> None:
        """Ends the run on all ranks after the next step that begins, with a checkpoint; `stopped_by` is `reason` then.

        One rank is enough: its wish travels with the totals of that step. The first reason stands, and of several
        ranks' that of the lowest rank. No evaluation is made afterwards. A wish after the last step changes nothing,
        because the run is complete.

        Raises:
            ConfigError: the reason is no text, or an empty one.
        """
        if not isinstance(reason, str) or not reason:
            raise ConfigError(f"state.stop({reason!r}): say why the run ends, such as state.stop('pruned')")
        self.stop_flag.request(reason)

    @property
    def model(self) -> Replica:
        """Returns the replica that is trained."""
        return self.strategy.model

    @property
    def num_workers(self) -> int:
        """Returns how many compute gradients: the ranks, unless those are servers, or one has several devices."""
        part = current_role()
        return self.comm.world_size * self.model.num_devices if part is None else part.num_workers

    @property
    def masters(self) -> Mapping[Tensor, nn.Parameter]:
        """Returns the master weights, by parameter, of those that have one."""
        return self.strategy.masters.of if isinstance(self.strategy, Replicated) else {}

    @property
    def loss_scale(self) -> LossScale | None:
        """Returns the loss scale of fp16; None: there is none."""
        return self.strategy.loss_scale if isinstance(self.strategy, Replicated) else None

    @property
    def reported(self) -> dict[str, float]:
        """Returns the metrics of the latest evaluation that are for the report alone, because others choose."""
        others = self.main_metric.partition("_")[0], "training"
        return {name: value for name, value in self.evaluation.items() if name.partition("_")[0] not in others}

    @property
    def epochs_done(self) -> float:
        """Returns the number of epochs trained so far, as a fraction."""
        position = self.sampler.state
        return position.epoch + position.consumed / self.sampler.length

    @property
    def epoch(self) -> int:
        """Returns the epoch that the next step belongs to."""
        return self.sampler.state.epoch

    def frozen(self) -> set[str]:
        """Returns the names of the parameters that need no gradient now."""
        return {name for name, parameter in self.model.module.named_parameters() if not parameter.requires_grad}

    def position(self) -> dict[str, Any]:
        """Returns step, sampler position and latest metrics, valid at any world size."""
        return {
            "step": self.step,
            "sampler": self.sampler.state_dict(),
            "train_loss": self.train_loss,
            "base_rates": self.rates.adopted(),
            "evaluation": dict(self.evaluation),
            "evaluated_at": self.evaluated_at,
            "history": list(self.history),
        }

    def load_position(self, position: Mapping[str, Any]) -> None:
        """Continues from a result of `position`."""
        self.sampler.load_state_dict(position["sampler"])  # first, because it may refuse
        self.step, self.train_loss = int(position["step"]), position["train_loss"]
        # Checkpoints of the first version have no metrics, and those of later ones no history.
        self.history = list(position.get("history", ()))
        self.evaluation, self.evaluated_at = dict(position.get("evaluation", {})), position.get("evaluated_at", -1)


@dataclass(frozen=True)
class StepReport:
    """Figures of one step: global numbers, and this rank's times.

    Attributes:
        step: its number, from 1.
        loss: mean over all samples (or tokens) of the global batch.
        num_items: number of samples (or tokens) in that mean, or the sum of their weights.
        num_samples: samples of the global batch.
        parts: squared norms of gradients of parts of the batch, if they were measured.
        gradient_norm: of the global mean gradient, before clipping.
        rate: learning rate of the first parameter group.
        num_stopping: number of ranks that want to stop after this step.
        num_ending: number of ranks whose stream ends with this step.
        micros: this rank's samples.
        step_s: whole step; data_s: waiting for data during it; wait_s: waiting for other ranks during it.
    """

    step: int
    epoch: int
    loss: float
    num_items: float
    num_samples: int
    parts: Parts | None
    gradient_norm: float
    rate: float
    step_s: float
    data_s: float
    wait_s: float
    num_ending: int = 0
    micros: Sequence[Micro] = ()
    num_stopping: int = 0


def loading(source: Source, comm: Communicator, stop: StopFlag | None) -> dict[str, Any]:
    """Returns the arguments of every loader of these samples on this rank.

    It waits for its loader processes as long as for other ranks, and less if it is to stop.
    """
    limits = Limits(comm.rank, comm.warn_s, comm.abort_s, lambda: "" if stop is None else stop.signal_name)
    given = {"collate": source.collate, "num_workers": source.num_workers, "processes": source.processes}
    return {**given, "device": comm.device, "limits": limits}


def agreed_reason(state: TrainState) -> str:
    """Returns, on every rank, the reason of the lowest rank that wants to stop; "" if none does. Collective.

    A signal on any rank comes before the wish of a callback, because it asks the program to stop, too.
    """
    reason: str = max(all_gather_object(state.comm, state.stop_flag.reason), key=weight)  # the first one of the most
    return reason
