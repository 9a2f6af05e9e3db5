"""Wraps the supply of steps, so that each is looked at before its update is made, and the run recovers from a bad one.

    begin        a step begins: the shard to be audited, if one is; what a step that is left out must give back
    check        all ranks have computed it: the audit, and whether its loss is a spike
    explained    it was taken back: computed again without communication, it names module, rank and samples
    recover      what the run's guard says: leave the step out, go back to the last checkpoint, or stop

`ddp.Guard` is that guard, which ends the run unless it is told otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from ddp.comm.objects import on_rank_zero
from ddp.data.orders.sampler import StepPlan
from ddp.errors import CheckpointError, ConfigError, Diverged
from ddp.optim.precision import LossScale
from ddp.optim.schedules import Rates
from ddp.policies import GuardAction
from ddp.process.terminal import log
from ddp.strategies.strategy import ADVICE, Agreement, Replicated
from ddp.train.checks.replay import Audit, Replay, explain_divergence, explain_spike
from ddp.train.reports.starts import note_incident
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import StepReport, TrainState
from ddp.train.steps.step import StepSnapshot
from ddp.train.steps.supply import EpochSupply, Step
from ddp.units import counted

# --- `ddp.Guard`: what becomes of a run whose loss is not finite, or jumps --------------------------------------------
#
#     stop        the run ends with an error that names module and samples (`replay.py`); so does one without a guard
#     skip        the samples of the step are left out, as by `skip_steps`, and the run continues
#     go_back     the run resumes from its last checkpoint, at half the learning rate
#
# A spike is a loss that lies this many standard deviations above the mean of the steps before it, of which the last
# hundred or so count. It is found before the update, on all ranks, and taken back like any other bad step.


DECAY = 0.98  # of the weight of a step, per step
FEWEST = 20  # steps before a loss can be a spike
RATE_FACTOR = 0.5  # on the learning rate, each time that a run goes back


class Guard(Callback):
    """Says what becomes of a step whose loss or gradient is not finite, or whose loss is a spike.

    Args:
        action: "stop", "skip" or "go_back" (see above).
        spike: standard deviations above the mean of the last losses from which a loss is a spike; None: none is.
        most: how often the run leaves a step out or goes back, before the next one ends it.

    Attributes:
        num_acted: how often it has.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(self, action: GuardAction = "stop", *, spike: float | None = None, most: int = 3) -> None:
        if action not in get_args(GuardAction):
            raise ConfigError(f"action={action!r:.60}: take one of {', '.join(get_args(GuardAction))}")
        if spike is not None and (not isinstance(spike, (int, float)) or spike is True or not 0 < spike < math.inf):
            raise ConfigError(f"spike={spike!r:.60}: must be a number of standard deviations above 0, or None")
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise ConfigError(f"most={most!r:.60}: must be a whole number from 1 up")
        self.action, self.spike, self.most, self.num_acted = action, spike, most, 0
        self._num, self._weight, self._sum, self._squares = 0, 0.0, 0.0, 0.0
        self._went_back_to: list[int] = []

    def is_spike(self, loss: float) -> str:
        """Returns by how much a loss is too high, as text; "" if it is not."""
        if self.spike is None or self._num < FEWEST:
            return ""
        mean = self._sum / self._weight
        deviation = math.sqrt(max(0.0, self._squares / self._weight - mean * mean))
        if loss <= mean + self.spike * deviation or deviation == 0.0:
            return ""
        above = (loss - mean) / deviation
        return f"{loss:.6g}, {above:.1f} standard deviations above the mean of the last losses, {mean:.6g}"

    def step_end(self, state: TrainState, report: StepReport) -> None:
        self._num += 1
        self._weight, self._sum = DECAY * self._weight + 1, DECAY * self._sum + report.loss
        self._squares = DECAY * self._squares + report.loss**2

    def go_back(self, state: TrainState, load: Callable[[], None]) -> None:
        """Goes back to the last checkpoint, and lowers the learning rate; each time there once more. Collective.

        Args:
            load: makes the state that of the checkpoint, also this guard's, which knows more.
        """
        num_acted, went_back_to = self.num_acted, self._went_back_to
        load()
        self.num_acted, self._went_back_to = num_acted, [*went_back_to, state.step]
        factor = RATE_FACTOR ** self._went_back_to.count(state.step)
        state.rates = Rates(state.optimizer, [rate * factor for rate in state.rates.base])

    def state_dict(self) -> dict[str, Any]:
        losses = [self._num, self._weight, self._sum, self._squares]
        return {"acted": self.num_acted, "losses": losses, "went_back_to": list(self._went_back_to)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_acted = int(state["acted"])
        self._num, self._weight, self._sum, self._squares = state["losses"]
        self._went_back_to = [*state["went_back_to"]]


# --- The supply of steps is wrapped -----------------------------------------------------------------------------------


class Supervision:
    """Supervises the steps of a run. Collective.

    Args:
        supply: of those steps; replay computes them again.
        guard: what becomes of a bad step.
        audit: of the shards; None: they are not audited.
        callbacks: told of steps that are left out.
        go_back: makes the state that of the last checkpoint, at the learning rate that a guard says.
    """

    def __init__(
        self,
        supply: EpochSupply,
        replay: Replay,
        *,
        guard: Guard,
        audit: Audit | None,
        callbacks: Sequence[Callback],
        go_back: Callable[[Guard], None],
    ) -> None:
        self._supply, self._state, self._replay, self._guard, self._audit = supply, replay.state, replay, guard, audit
        self._callbacks, self._go_back, self._is_spike = callbacks, go_back, False
        self._before: StepSnapshot | None = None
        self._scale: dict[str, int] | None = None
        supply.check = self._check

    def __iter__(self) -> Iterator[Step]:
        for step in self._supply:
            yield Step(step.plan, partial(self._made, step))

    def close(self) -> None:
        """Ends what reads the samples."""
        self._supply.close()

    def _made(self, step: Step) -> StepReport | None:
        self._begin(step.plan)
        try:
            return step.make()
        except Diverged as error:
            self._recover(step.plan, error)
            return None

    def _begin(self, plan: StepPlan) -> None:
        """Begins a step: the audit of one of its shards, and what it must give back if it is left out."""
        if self._audit is not None:
            self._audit.begin(plan)
        self._before = StepSnapshot(self._state, iter(())) if self._guard.action == "skip" else None
        scale = _scale_of(self._state)
        self._scale = None if scale is None else scale.state_dict()
        self._is_spike = False

    def _check(self, plan: StepPlan, agreement: Agreement) -> None:
        """Raises AuditFailed, or Diverged if the loss is a spike, once all ranks have computed the step."""
        if self._audit is not None:
            self._audit.check(plan)
        if spike := self._guard.is_spike(agreement.totals.mean_loss):
            self._state.model.take_back()
            self._is_spike = True
            raise Diverged(f"the loss of step {self._state.step + 1} is a spike: {spike}")

    # --- a bad step --------------------------------------------------------------------------------------------------

    def _recover(self, plan: StepPlan, error: Diverged) -> None:
        """Does what the guard says of a step that has been taken back.

        Raises:
            Diverged: the run is to end.
        """
        guard, explained = self._guard, self._explained(plan, error)
        if guard.action == "stop":
            raise explained from error
        if guard.num_acted >= guard.most:
            times = counted(guard.num_acted, "time")
            raise Diverged(f"{explained}. The guard has acted {times}, which is the most (guard.most)") from error
        guard.num_acted += 1
        state = self._state
        facts: dict[str, Any] = {"step": state.step + 1, "epoch": plan.epoch}
        facts |= {"position": state.sampler.position_of(plan), "size": plan.size, "why": str(explained)}
        if guard.action == "skip":
            self._leave_out(guard, facts)
        else:
            self._resume_from_checkpoint(guard, facts)

    def _explained(self, plan: StepPlan, error: Diverged) -> Diverged:
        """Returns the error with the module, the rank and the samples that have caused it."""
        if self._is_spike:
            return Diverged(f"{error}. {explain_spike(self._replay, plan)}")
        found, are_samples_to_blame = explain_divergence(self._replay, plan)
        what = str(error).removesuffix(f". {ADVICE}")
        advice = f". {ADVICE}" if what != str(error) and not are_samples_to_blame else ""
        return Diverged(f"{what}. {found}{advice}")

    def _leave_out(self, guard: Guard, facts: Mapping[str, Any]) -> None:
        """Continues after the step, whose samples count as seen."""
        state, step, epoch, size = self._state, facts["step"], facts["epoch"], facts["size"]
        assert self._before is not None
        self._before.restore(state)
        if self._scale is not None and (scale := _scale_of(state)) is not None:
            scale.load_state_dict(self._scale)
        state.sampler.leave_out(step, facts["position"], size)
        which = f"step {step}, in epoch {epoch}, is left out, with its {size} samples"
        self._note({"left_out": facts}, f"{which} ({guard.num_acted} of {guard.most}): {facts['why']}")
        for callback in self._callbacks:
            callback.step_left_out(state, epoch)

    def _resume_from_checkpoint(self, guard: Guard, facts: Mapping[str, Any]) -> None:
        """Continues from the last checkpoint, at a lower learning rate."""
        state, why = self._state, facts["why"]
        try:
            self._go_back(guard)
        except CheckpointError as missing:
            raise Diverged(f"{why}. The run cannot go back: {missing}") from missing
        self._supply.moved()
        rates = ", ".join(f"{rate:g}" for rate in state.rates.base)
        self._note(
            {"went_back": {**facts, "to": state.step, "sampler": state.sampler.state_dict()}},
            f"the run goes back to step {state.step}, at the learning rate {rates}: {why}",
        )

    def _note(self, incident: dict[str, Any], words: str) -> None:
        comm, folder = self._state.comm, self._state.run_dir
        if comm.rank == 0:
            log.warning("%s", words)
        if folder is not None:
            on_rank_zero(comm, lambda: note_incident(folder, incident), label="noting a bad step")


def _scale_of(state: TrainState) -> LossScale | None:
    return state.strategy.loss_scale if isinstance(state.strategy, Replicated) else None


def no_checkpoint(guard: Guard) -> None:
    """Goes back nowhere: of a run that keeps no checkpoint."""
    raise CheckpointError("this run keeps no checkpoint")
