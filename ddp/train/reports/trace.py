"""Traces steps: a checksum of what each module gives, and of each gradient, shard by shard, in the order of time.

Two runs that differ are made again from a checkpoint, each with its own settings, and their traces are compared
(`commands/same_bits.py`): the first entry that differs is where their bits part.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddp.replica.autograd import tensors_in
from ddp.replica.broadcast import checksum
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import StepReport, TrainState

Entry = tuple[int, str, int]  # shard, what, and its checksum


class StepTrace(NamedTuple):
    """The trace of one step.

    Attributes:
        entries: in the order of time.
        updated: by what was updated in the step, its checksum afterwards: of parameters and buffers.
    """

    step: int
    entries: list[Entry]
    updated: dict[str, int]


class Trace(Callback):
    """Traces the steps of a run by shards, and ends it after the last of them.

    Args:
        last_step: after which the run is to end.

    Attributes:
        steps: that were made.
    """

    def __init__(self, last_step: int) -> None:
        self.steps: list[StepTrace] = []
        self._last_step, self._entries = last_step, list[Entry]()
        self._handles: list[RemovableHandle] = []

    def fit_start(self, state: TrainState) -> None:
        module = state.model.module
        for name, each in module.named_modules():
            kind = type(each).__name__
            title = f"the outputs of {f'{name} ({kind})' if name else kind}"
            self._handles.append(each.register_forward_hook(partial(self._note_outputs, state, title)))
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(partial(self._note, state, f"the gradient of {name}")))

    def step_start(self, state: TrainState) -> None:
        self._entries = []
        if state.step + 1 >= self._last_step:
            state.stop("traced")

    def step_end(self, state: TrainState, report: StepReport) -> None:
        module = state.model.module
        updated = {f"the update of {name}": checksum(each) for name, each in module.named_parameters()}
        updated |= {f"the buffer {name}": checksum(each) for name, each in module.named_buffers()}
        self.steps.append(StepTrace(report.step, self._entries, updated))

    def fit_end(self, state: TrainState) -> None:
        for handle in self._handles:
            handle.remove()

    def _note_outputs(self, state: TrainState, title: str, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        for tensor in tensors_in(outputs):
            self._note(state, title, tensor)

    def _note(self, state: TrainState, title: str, tensor: Tensor) -> None:
        shard = state.model.accumulation.running
        if shard is not None:  # else it is another forward than a step's
            self._entries.append((shard, title, checksum(tensor)))


def parting(one: list[StepTrace], other: list[StepTrace]) -> tuple[int, str] | None:
    """Returns the first step in which two traces part, and as text where; None if they are equal."""
    for here, there in zip(one, other, strict=False):
        for mine, theirs in zip(here.entries, there.entries, strict=False):
            if mine[:2] != theirs[:2]:
                what = f"shard {mine[0]}, where one has {mine[1]}, and the other shard {theirs[0]}, {theirs[1]}"
                return here.step, what
            if mine != theirs:
                return here.step, f"shard {mine[0]}, in {mine[1]}"
        if len(here.entries) != len(there.entries):
            return here.step, "the number of modules that are called"
        changed = [what for what, value in here.updated.items() if there.updated.get(what) != value]
        if changed:
            return here.step, f"{changed[0]}, while all gradients of all shards are equal"
    return None
