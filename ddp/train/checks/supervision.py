"""Wraps the supply of steps, so that each is looked at before its update is made, and the run recovers from a bad one.

    begin        a step begins: the shard to be audited, if one is; what a step that is left out must give back
    check        all ranks have computed it: the audit, and whether its loss is a spike
    explained    it was taken back: computed again without communication, it names module, rank and samples
    recover      what the run's guard says: leave the step out, go back to the last checkpoint, or stop
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ddp.comm.objects import on_rank_zero
from ddp.data.orders.sampler import StepPlan
from ddp.errors import CheckpointError, ConfigError, Diverged
from ddp.optim.precision import LossScale
from ddp.process.log import log
from ddp.strategies.strategy import ADVICE, Agreement, Replicated
from ddp.train.checks.audit import Audit
from ddp.train.checks.guard import Guard
from ddp.train.checks.replay import Replay, explain_divergence, explain_spike
from ddp.train.reports.starts import note_incident
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import StepReport, TrainState
from ddp.train.steps.step import StepSnapshot
from ddp.train.steps.supply import EpochSupply, Step
from ddp.units import counted


class Supervision:
    """Supervises the steps of a run. Collective.

    Args:
        supply: of those steps; replay computes them again.
        guard: what becomes of a bad step; None: it ends the run.
        audit: of the shards; None: they are not audited.
        callbacks: told of steps that are left out.
        go_back: makes the state that of the last checkpoint, at the learning rate that a guard says.
    """

    def __init__(
        self,
        supply: EpochSupply,
        replay: Replay,
        *,
        guard: Guard | None,
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
        keeps = self._guard is not None and self._guard.action == "skip"
        self._before = StepSnapshot(self._state, iter(())) if keeps else None
        scale = _scale_of(self._state)
        self._scale = None if scale is None else scale.state_dict()
        self._is_spike = False

    def _check(self, plan: StepPlan, agreement: Agreement) -> None:
        """Raises AuditFailed, or Diverged if the loss is a spike, once all ranks have computed the step."""
        if self._audit is not None:
            self._audit.check(plan)
        if self._guard is not None and (spike := self._guard.is_spike(agreement.totals.mean_loss)):
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
        if guard is None or guard.action == "stop":
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


def check_guard(
    guards: Sequence[Guard], *, is_stream: bool, has_folder: bool, has_scheduler: bool, strategy: str
) -> None:
    """Raises ConfigError if the run cannot do what its guard says."""
    if len(guards) > 1:
        raise ConfigError("callbacks has two Guard: one says what becomes of a bad step; leave one out")
    for guard in guards:
        action = f"guard.action={guard.action}"
        if strategy in ("local_sgd", "parameter_server"):
            raise ConfigError(
                f"ddp.Guard with strategy={strategy}: guards steps that all ranks make together; take strategy=auto"
            )
        if is_stream:
            raise ConfigError("ddp.Guard with a stream of samples, which cannot be read again; give a data set")
        if guard.action == "go_back" and not has_folder:
            raise ConfigError(f"{action}: goes back to a checkpoint, and folder=None keeps none; give a folder")
        if guard.action == "go_back" and has_scheduler:
            raise ConfigError(
                f"{action}: lowers the learning rate, which a scheduler of torch's sets; give a function as schedule"
            )
