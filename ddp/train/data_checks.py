"""Two checks of the data: an epoch has the samples of its order, and no two processes begin with equal batches.

    at the end of an epoch     number, sum and exclusive or of the sample numbers of all ranks = the order's promise
    with debug                 after the first steps: no two ranks or loader processes have had equal batches

The first costs 15 µs a step and one message an epoch, and memory for three numbers. An order of this package cannot
fail it; one of the user's own, or a sharding function, can.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from torch import nn

from ddp.comm.objects import all_gather_object
from ddp.data.loading.source import digest_of
from ddp.data.orders.order import Checksum
from ddp.errors import ConfigError
from ddp.process.log import log
from ddp.train.callbacks import Callback
from ddp.train.state import StepReport, TrainState


class EpochCheck(Callback):
    """Compares each epoch with what its order promises.

    Attributes:
        num_checked, num_as_promised: epochs so far.
    """

    def __init__(self) -> None:
        self.num_checked = self.num_as_promised = 0

    def step_end(self, state: TrainState, report: StepReport) -> None:
        if not state.sampler.at_epoch_end:
            return
        seen = state.sampler.take_seen()
        expected = state.sampler.expected(report.epoch)
        parts = all_gather_object(state.comm, seen)
        if expected is None or None in parts:
            return
        found = reduce(Checksum.with_, (Checksum(*each) for each in parts))
        self.num_checked += 1
        self.num_as_promised += found == expected
        if found != expected and state.comm.rank == 0:
            log.warning(
                "epoch %d was not what its order (%s) promises: %s in the place of %s; some samples were read twice or "
                "never. Is each position one sample, and the same at each call?",
                *(report.epoch, state.sampler.order.in_words(), found, expected),
            )


class EqualBatches(Callback):
    """Refuses ranks or loader processes that begin with equal batches, because each of them reads all the data then.

    Args:
        rank: this one.
        num_processes: loader processes of a rank, which take turns; 0: the rank itself loads.
    """

    def __init__(self, rank: int, num_processes: int) -> None:
        self._rank, self._num_processes = rank, num_processes
        self._num_steps = max(1, num_processes)
        self._mine: list[tuple[str, str]] = []  # (digest, who)
        self._seen: dict[str, str] = {}
        self._num_batches = 0

    def __call__(self, module: nn.Module, batch: Any, num_samples: int) -> None:
        """Takes note of a batch of this rank."""
        if self._num_steps:
            process = f", loader process {self._num_batches % self._num_processes}" if self._num_processes else ""
            if (digest := digest_of(batch)) is not None:
                self._mine.append((digest, f"rank {self._rank}{process}"))
            self._num_batches += 1

    def step_end(self, state: TrainState, report: StepReport) -> None:
        if not self._num_steps:
            return
        self._num_steps -= 1
        mine, self._mine = self._mine, []
        for digest, who in (each for theirs in all_gather_object(state.comm, mine) for each in theirs):
            other = self._seen.setdefault(digest, who)
            if other != who:
                raise ConfigError(
                    f"debug: {other} and {who} have begun with equal batches: do all of them read the whole "
                    "stream, or does a sample not depend on its index?"
                )
