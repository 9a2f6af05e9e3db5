"""The held-out samples of a run: which there are, which of them it chooses by, and when it is evaluated on them.

    validation_data   test_data     while the run trains      at its end     `state.main_metric`
    given             given         validation                test           validation_loss, say
    given             none          validation                               validation_loss
    none              given         test                                     test_loss; the run says so at its end
    none              none                                                   nothing can choose

This is the one place that decides it. Whatever chooses (the best checkpoint, ReduceLROnPlateau, `ddp.EarlyStopping`,
a callback of the user's own) reads `state.evaluation[state.main_metric]`.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from ddp.data.loading.source import Source, source_of
from ddp.data.samples import Collate
from ddp.data.sets.validation import choose, selection_of
from ddp.errors import ConfigError
from ddp.policies import Evaluation
from ddp.process.terminal import log
from ddp.setting import Precision
from ddp.train.evaluate import evaluate
from ddp.train.steps.callbacks import EARLY, Callback, EarlyStopping
from ddp.train.steps.state import TrainState, agreed_reason
from ddp.train.steps.task import Task

Side = Literal["validation", "test", "training"]


class HeldOut(NamedTuple):
    """The held-out samples of a run, and training samples that are evaluated with them; None where there are none."""

    validation: Source | None
    test: Source | None
    training: Source | None = None

    @property
    def chooser(self) -> Side:
        """Returns the side that the run chooses by, if there is one."""
        return "test" if self.validation is None else "validation"

    @property
    def is_evaluated(self) -> bool:
        """Returns True if there are samples to evaluate on during the run."""
        return self.side(self.chooser) is not None

    @property
    def is_reported(self) -> bool:
        """Returns True if there are samples for the report alone."""
        return self.validation is not None and self.test is not None

    def side(self, side: Side) -> Source | None:
        """Returns the samples of a side."""
        return self._asdict()[side]  # type: ignore[no-any-return]

    def given(self) -> dict[str, Source]:
        """Returns the samples by the name of their argument."""
        known = {"validation_data": self.validation, "test_data": self.test, "evaluation.training": self.training}
        return {name: source for name, source in known.items() if source is not None}

    def with_training(self, source: Source, number: int) -> HeldOut:
        """Returns this with this number of training samples, spread over all of them.

        Raises:
            ConfigError: there are no held-out samples to be evaluated with them; or the data are a stream.
        """
        if not number:
            return self
        if not self.is_evaluated or source.is_stream:
            remedy = "leave it out with a stream" if self.is_evaluated else "give validation_data, or test_data"
            raise ConfigError(f"evaluation.training={number}: goes with held-out samples, by their numbers; {remedy}")
        number, length = min(number, len(source.samples)), len(source.samples)
        chosen = np.arange(number, dtype=np.int64) * length // number
        samples = selection_of(source.samples, chosen, set_apart="")
        return self._replace(training=source._replace(samples=samples, drop_last=False))


def note_of_choice(state: TrainState, held_out: HeldOut, callbacks: Sequence[Callback], *, saves: bool) -> str:
    """Returns a sentence that says so if the run has chosen by the test set; else ""."""
    plateau = state.schedule is not None and state.schedule.needs_metric
    chosen = {"the best checkpoint": saves, "the learning rate": plateau}
    chosen["the end of the run"] = any(isinstance(each, EarlyStopping) for each in callbacks)
    if held_out.chooser != "test" or held_out.test is None or not any(chosen.values()):
        return ""
    what = " and ".join(each for each, is_chosen in chosen.items() if is_chosen)
    return (
        f"chosen by {state.main_metric}: {what}; with validation_data (data.validation=0.1) the test set is for the "
        "report alone"
    )


def held_out_of(
    source: Source, validation_data: Any, test_data: Any, *, collate: Collate | None, seed: int
) -> tuple[Source, HeldOut]:
    """Returns the samples that are left to train on, and the held-out ones.

    Args:
        source: all training samples.
        validation_data, test_data, seed: as in `ddp.fit`.

    Raises:
        ConfigError: some have no sample, or cannot be had by index.
    """
    test = _source_like(test_data, source, collate, what="test_data")
    if not isinstance(validation_data, numbers.Real):
        return source, HeldOut(_source_like(validation_data, source, collate, what="validation_data"), test)
    share = float(validation_data)
    _check_share(share, source)
    train, validation, words = choose(len(source.samples), share, seed=seed, what="validation_data")
    apart = source._replace(samples=selection_of(source.samples, validation, set_apart=words), drop_last=False)
    return source._replace(samples=selection_of(source.samples, train, set_apart=words)), HeldOut(apart, test)


def _check_share(share: float, source: Source) -> None:
    """Raises ConfigError if no share of the training samples can be set apart."""
    if not 0 < share < 1:
        raise ConfigError(f"validation_data={share:g}: give a share between 0 and 1, or a data set")
    if source.is_stream:
        raise ConfigError(
            f"validation_data={share:g}: data is a stream, which has no shares; give a data set of its own"
        )
    if source.order is not None:
        raise ConfigError(
            f"validation_data={share:g}: the sampler of the DataLoader chooses among all samples; give a data set"
        )


def _source_like(data: Any, source: Source, collate: Collate | None, *, what: str) -> Source | None:
    """Returns held-out samples, which are read as the training samples are, unless they are in a DataLoader.

    Raises:
        ConfigError: there are none, or they cannot be had by index.
    """
    if data is None:
        return None
    found = source_of(data, what=what, collate=collate)
    if not len(found.samples):
        raise ConfigError(f"{what} has 0 samples; check its path and its split, or leave it out")
    if isinstance(data, DataLoader):
        return found
    return found._replace(
        collate=found.collate or source.collate, num_workers=source.num_workers, processes=source.processes
    )


# --- When a run is evaluated -----------------------------------------------------------------------------------------


class Evaluator:
    """Evaluates the model of a run on its held-out samples, with the weights that callbacks evaluate.

    Args:
        when: after which steps, and how many samples at once.
        callbacks: whose `evaluated` runs after each evaluation that chooses.
    """

    def __init__(
        self, held_out: HeldOut, task: Task, when: Evaluation, precision: Precision, callbacks: Sequence[Callback]
    ) -> None:
        self._held_out, self._when, self._callbacks = held_out, when, callbacks
        self._options: dict[str, Any] = {"loss": task, "precision": precision, "batch_size": when.batch}

    def catch_up(self, state: TrainState) -> None:
        """Evaluates where a resumed run was stopped before it could. Collective."""
        if state.step and self.is_due(state):
            self.choose(state)

    def is_due(self, state: TrainState) -> bool:
        """Returns True if the model is to be evaluated after the last step, and was not yet."""
        if not self._held_out.is_evaluated or state.evaluated_at == state.step:
            return False
        epochs, steps = self._when.every_epochs, self._when.every_steps
        if epochs is not None and state.sampler.at_epoch_end and state.epoch % epochs == 0:
            return True
        return steps is not None and state.step > 0 and state.step % steps == 0

    def finish(self, state: TrainState) -> None:
        """Evaluates once all steps are made, unless that was done; and for the report, if it has samples. Collective.

        A run that is stopped evaluates no more; one that a signal has stopped will continue.
        """
        if self._held_out.is_evaluated and not state.stopped_by and state.evaluated_at != state.step:
            self.choose(state)
        if self._held_out.is_reported and state.stopped_by in ("", EARLY):
            state.evaluation |= self._measured(state, "test") or {}

    def choose(self, state: TrainState) -> None:
        """Takes the metrics that choose, and tells whatever goes by them. Collective."""
        metrics: dict[str, float] = {}
        sides: list[Side] = [self._held_out.chooser]
        for side in sides if self._held_out.training is None else [*sides, "training"]:
            if (found := self._measured(state, side)) is None:
                return
            metrics |= found
        state.evaluation, state.evaluated_at = metrics, state.step
        where = {"step": state.step, "epochs": state.epochs_done, "train_loss": state.train_loss}
        state.history.append({**where, **metrics})
        log.info("step %d: %s", state.step, ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        if state.schedule is not None:
            state.schedule.evaluated(metrics[state.main_metric])
        for callback in self._callbacks:
            callback.evaluated(state)

    def _measured(self, state: TrainState, side: Side) -> dict[str, float] | None:
        """Returns the metrics of one side by name; None if the ranks have agreed to stop instead. Collective."""
        source = self._held_out.side(side)
        with ExitStack() as contexts:
            contexts.enter_context(as_evaluated(state.optimizer))
            for callback in self._callbacks:
                contexts.enter_context(callback.evaluating(state))
            how: dict[str, Any] = {"comm": state.comm, "stop": state.stop_flag, "num_shards": state.model.num_shards}
            metrics = evaluate(state.model, source, **how, **self._options)
        if metrics is None:
            state.stopped_by = agreed_reason(state) or "stopped"
            return None
        return {f"{side}_{name}": value for name, value in metrics.items()}


@contextmanager
def as_evaluated(optimizer: Any) -> Iterator[None]:
    """Gives parameters the values that the optimizer wants evaluated, as schedule-free ones do; restores their bits."""
    if not all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
        yield
        return
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    before = [each.detach().clone() for each in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        with torch.no_grad():
            torch._foreach_copy_(parameters, before)
