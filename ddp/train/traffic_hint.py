"""A hint of a run on several hosts, once: what a hook would save, or that the one it has costs more than it saves.

After its first steps a run knows how long it waits for gradients. If that is long, it asks the cost model what PowerSGD
would make of a step (`hooks/traffic.py`). With a hook or a wire format, it asks what a step would take without.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ddp.gradients import ErrorFeedback, PowerSGD
from ddp.gradients.hooks.traffic import Traffic, predicted
from ddp.train.callbacks import Callback
from ddp.train.state import StepReport, TrainState
from ddp.units import format_time

NUM_SKIPPED, NUM_STEPS = 2, 8  # the first steps are slow: buckets are planned, and links measured
LONG = 0.25  # share of a step that is spent waiting
WORTH_IT = 0.8  # of a step
HOOK = ErrorFeedback(PowerSGD())


class TrafficHint(Callback):
    """Says once what a hook would save, or that the one that is there costs more than it saves. Collective.

    Args:
        say: gets the line, on every rank.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._num_steps = say, 0
        self._step_s = self._wait_s = 0.0

    def step_end(self, state: TrainState, report: StepReport) -> None:
        self._num_steps += 1
        if NUM_SKIPPED < self._num_steps <= NUM_SKIPPED + NUM_STEPS:
            self._step_s += report.step_s / NUM_STEPS
            self._wait_s += report.wait_s / NUM_STEPS
        if self._num_steps == NUM_SKIPPED + NUM_STEPS:
            line = self._line(state)
            if line:
                self._say(line)

    def _line(self, state: TrainState) -> str:
        replica, comm = state.model, state.comm
        if comm.host_partition.num_hosts == 1 or not (buckets := replica.all_reduced_buckets):
            return ""
        # The rank that waits least is the one that the others wait for, too; it waits for the network alone.
        figures = torch.tensor([self._wait_s, -self._step_s], dtype=torch.float64, device="cpu").to(comm.device)
        wait_s, step_s = (
            comm.all_reduce(figures, "min", label="times of a step").mul_(figures.new_tensor([1, -1])).tolist()
        )
        ask = partial(predicted, comm, buckets)
        if replica.compression is not None:
            return too_dear(repr(replica.compression.hook), ask(hook=replica.compression.hook), ask(), step_s - wait_s)
        if replica.wire == "fp32":  # for its precision
            return ""
        if replica.wire is not None:
            return too_dear(f"wire={replica.wire!r}", ask(wire=replica.wire), ask(), step_s - wait_s)
        return worth_it(ask(), ask(hook=HOOK), step_s, wait_s) if wait_s > LONG * step_s else ""


def too_dear(name: str, with_it: Traffic, without: Traffic, compute_s: float) -> str:
    """Returns a line that says so where a hook or a wire format costs more than it saves, or ""."""
    longer_s, shorter_s = with_it.step_s(compute_s), without.step_s(compute_s)
    if shorter_s >= longer_s:
        return ""
    return (
        f"{name} costs more than it saves here: by the cost model a step takes {format_time(longer_s)} with it, and "
        f"{format_time(shorter_s)} without"
    )


def worth_it(plain: Traffic, hooked: Traffic, step_s: float, wait_s: float) -> str:
    """Returns a line that says what PowerSGD would save, or "" if that is little."""
    shorter_s = hooked.step_s(step_s - wait_s)
    if shorter_s > WORTH_IT * step_s:
        return ""
    return (
        f"waiting for gradients takes {wait_s / step_s:.0%} of a step; with hook=powersgd, in Python "
        f"hook={HOOK!r}, each host would send {hooked.link_bytes / 1e6:,.3g} MB in the place of "
        f"{plain.link_bytes / 1e6:,.3g}, and a step would take about {format_time(shorter_s)} in the place of "
        f"{format_time(step_s)}"
    )
