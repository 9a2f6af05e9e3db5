"""The held-out samples of a run: which of them choose, and which are for the report alone.

    validation_data   test_data     while the run goes on     at its end     `state.main_metric`
    given             given         validation                test           validation_loss, say
    given             none          validation                               validation_loss
    none              given         test                                     test_loss; the run says that it chose by it
    none              none                                                   nothing can choose

This is the one place that decides it. Whatever chooses (the best checkpoint, ReduceLROnPlateau, `ddp.EarlyStopping`, a
callback of the user's own) reads `state.evaluation[state.main_metric]`.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.utils.data import DataLoader

from ddp.comm.communicator import Communicator
from ddp.data.loading.source import Source, source_of
from ddp.data.samples import Collate
from ddp.data.sets.validation import choose, selection_of
from ddp.errors import ConfigError
from ddp.setting import Precision
from ddp.train.batch_statistics import check_evaluation
from ddp.train.callbacks import Callback
from ddp.train.early_stopping import EarlyStopping
from ddp.train.evaluate import evaluate
from ddp.train.state import TrainState
from ddp.train.stopping import StopFlag
from ddp.train.tasks.task import Task

Side = Literal["validation", "test"]


class HeldOut(NamedTuple):
    """The held-out samples of a run; None where there are none."""

    validation: Source | None
    test: Source | None

    @property
    def chooser(self) -> Side:
        """Returns the side that the run chooses by, if there is one."""
        return "test" if self.validation is None else "validation"

    @property
    def is_evaluated(self) -> bool:
        """Returns True if there are samples to evaluate on while the run goes on."""
        return self.side(self.chooser) is not None

    @property
    def is_reported(self) -> bool:
        """Returns True if there are samples for the report alone."""
        return self.validation is not None and self.test is not None

    def side(self, side: Side) -> Source | None:
        """Returns the samples of a side."""
        return self.validation if side == "validation" else self.test

    def given(self) -> dict[str, Source]:
        """Returns the samples by the name of their argument."""
        both = {"validation_data": self.validation, "test_data": self.test}
        return {name: source for name, source in both.items() if source is not None}


def check_held_out(comm: Communicator, model: nn.Module, held_out: HeldOut, *, batch_size: int) -> None:
    """Raises ConfigError if the model cannot be evaluated on these samples by this number of workers."""
    for source in held_out.given().values():
        check_evaluation(model, len(source.samples), batch_size=batch_size, world_size=comm.world_size)


class Evaluator:
    """Evaluates the model of a run on its held-out samples.

    Args:
        task, batch_size, precision, stop: as in `evaluate`.
    """

    def __init__(self, held_out: HeldOut, task: Task, *, batch_size: int, precision: Precision, stop: StopFlag) -> None:
        self.held_out, self._task = held_out, task
        self._options: dict[str, Any] = {"batch_size": batch_size, "precision": precision, "stop": stop}

    def choosing(self, state: TrainState) -> dict[str, float] | None:
        """Returns the metrics that choose, or None if a rank wants to stop. Collective."""
        return self._on(self.held_out.chooser, state)

    def reported(self, state: TrainState) -> dict[str, float] | None:
        """Returns the metrics for the report alone, or None if a rank wants to stop. Collective."""
        return self._on("test", state)

    def _on(self, side: Side, state: TrainState) -> dict[str, float] | None:
        source = self.held_out.side(side)
        found = evaluate(state.model, source, loss=self._task, comm=state.comm, **self._options)
        return None if found is None else {f"{side}_{name}": value for name, value in found.items()}


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
    test = _read_alike(test_data, source, collate, what="test_data")
    if not isinstance(validation_data, numbers.Real):
        return source, HeldOut(_read_alike(validation_data, source, collate, what="validation_data"), test)
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


def _read_alike(data: Any, source: Source, collate: Collate | None, *, what: str) -> Source | None:
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
