"""Plants faults in runs of same_bits: every fault is named, and healthy ranks raise no alarm.

    flipped bit   from a random step on, a rank flips a random bit of its gradients in every backward. Audits every N
                  steps have to name that rank within N · W steps
    NaN           one number of a random sample. The step that reads it has to name the module, rank and sample
    none          an audit in every step, of each worker in turn: none may say anything

Of two ranks, nobody can tell which one computes wrongly, so runs have three or four.
"""

from __future__ import annotations

import os
import random
import re
from typing import NamedTuple

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import ddp
from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.errors import AuditFailed, Diverged
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import TrainState

NUM_TRIALS = int(os.environ.get("TRIALS", "1"))
"""Of each fault and number of ranks, in the slow test; docs/same-bits.md says what came of 20."""
AUDIT_EVERY, HEALTHY_AUDITS = 100, 250  # the latter for each trial
NUM_SAMPLES, FEATURES, GLOBAL_BATCH = 600, 20, 30
MANTISSA_BITS = 23  # a flip in one of these makes no number infinite, which the step itself would find


class Trials(NamedTuple):
    """Is what trials with faults, and a run without one, have ended with.

    Attributes:
        wrong: of faults that were not named, or named wrongly, what was said instead.
        most_steps: from the first with a flipped bit until it was named, where these were most.
        num_audits: of the healthy run, until it ended.
        alarm: raised in the healthy run; "": none.
    """

    wrong: list[str]
    most_steps: int
    num_audits: int
    alarm: str


def planted(num_trials: int, audit_every: int, num_audits: int) -> Trials:
    """Makes all trials. Collective."""
    comm = ddp.init(device="cpu")
    wrong, most_steps = [], 0
    for chance in map(random.Random, range(num_trials)):
        is_right, said, num_steps = flipped_bit(comm, chance, audit_every)
        most_steps = max(most_steps, num_steps)
        wrong += [] if is_right else [f"flipped bit: {said}"]
        is_right, said = not_a_number(comm, chance)
        wrong += [] if is_right else [f"NaN: {said}"]
    alarm, num_steps = ending(Noted(), audit_every=1, max_steps=num_audits)
    return Trials(wrong, most_steps, num_steps, alarm)


def flipped_bit(comm: Communicator, chance: random.Random, audit_every: int) -> tuple[bool, str, int]:
    """Makes a run in which a rank computes wrongly from a step on, but not in the first, which is audited on all."""
    rank, first_step = chance.randrange(comm.world_size), chance.randint(2, 1 + audit_every)
    flips = FlipsABit(rank, first_step, chance)
    most_steps = first_step - 1 + audit_every * comm.world_size
    said, last_step = ending(Noted(), audit_every=audit_every, max_steps=most_steps, callback=flips)
    is_right = f" agree, and not rank {rank} on host " in said and "take that machine out" in said
    return is_right, said, last_step - first_step + 1


def not_a_number(comm: Communicator, chance: random.Random) -> tuple[bool, str]:
    """Makes a run with a sample that is not finite."""
    samples = Noted(bad=chance.randrange(NUM_SAMPLES))
    said, _ = ending(samples, audit_every=0, max_steps=NUM_SAMPLES // GLOBAL_BATCH)
    has_read = all_gather_object(comm, samples.is_read)
    told = re.search(r"that 0 \(Linear\) is given are not finite, in shard \d on rank (\d), sample (\d+)$", said)
    is_right = told is not None and (has_read.index(True), samples.bad) == (int(told[1]), int(told[2]))
    return is_right and sum(has_read) == 1, said


class Noted(Dataset[tuple[Tensor, Tensor]]):
    """Random samples, of which one may have a NaN; this rank notes if it reads that one."""

    def __init__(self, bad: int | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(NUM_SAMPLES, FEATURES, generator=generator)
        self._classes = torch.randint(0, 5, (NUM_SAMPLES,), generator=generator)
        self.bad, self.is_read = bad, False
        if bad is not None:
            self._inputs[bad, bad % FEATURES] = float("nan")

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.is_read |= index == self.bad
        return self._inputs[index], self._classes[index]


class Steps(Callback):
    """Counts steps, the last one included, which may end the run."""

    num_begun = 0

    def step_start(self, state: TrainState) -> None:
        self.num_begun += 1


class FlipsABit(Callback):
    """Flips a random bit of a gradient in each backward of one rank, from a step on."""

    def __init__(self, rank: int, first_step: int, chance: random.Random) -> None:
        self._rank, self._first_step = rank, first_step
        self._parameter, self._number, self._bit = (chance.random() for _ in range(3))

    def fit_start(self, state: TrainState) -> None:
        parameters = list(state.model.module.parameters())
        parameter = parameters[int(self._parameter * len(parameters))]
        parameter.register_hook(lambda gradient: self._flipped(state, gradient))

    def _flipped(self, state: TrainState, gradient: Tensor) -> Tensor:
        if state.comm.rank != self._rank or state.step + 1 < self._first_step:
            return gradient
        wrong = gradient.clone(memory_format=torch.contiguous_format)
        wrong.view(torch.int32).view(-1)[int(self._number * wrong.numel())] ^= 1 << int(self._bit * MANTISSA_BITS)
        return wrong


def ending(samples: Noted, *, audit_every: int, max_steps: int, callback: Callback | None = None) -> tuple[str, int]:
    """Makes a run; returns what the error says that has ended it ("": none has), and its last step. Collective."""
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 5)]
    model, steps, said = nn.Sequential(*layers), Steps(), ""
    try:
        ddp.fit(
            model,
            samples,
            torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
            loss=F.cross_entropy,
            global_batch=GLOBAL_BATCH,
            max_steps=max_steps,
            folder=ddp.Folder(None, progress=False, curves=False),
            same_bits=ddp.SameBits(on=True, audit_every=audit_every),
            callbacks=[steps] if callback is None else [steps, callback],
        )
    except (AuditFailed, Diverged) as error:
        said = str(error)
    return said, steps.num_begun


def test_faults_are_named_and_healthy_ranks_are_not() -> None:
    for found in run_ranks(planted, 3, 2, 2, 6):
        assert (found.wrong, found.num_audits, found.alarm) == ([], 6, "")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3] if NUM_TRIALS == 1 else [3, 4])
def test_faults_are_named_at_rare_audits(world_size: int) -> None:
    num_audits = HEALTHY_AUDITS * NUM_TRIALS
    found, *_ = run_ranks(planted, world_size, NUM_TRIALS, AUDIT_EVERY, num_audits, timeout_s=240.0 + 60 * NUM_TRIALS)
    assert (found.wrong, found.num_audits, found.alarm) == ([], num_audits, "")
    print(f"{world_size} ranks: a flipped bit was named after {found.most_steps} steps at most")
