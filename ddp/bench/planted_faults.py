"""Plants faults in runs of `same_bits`, and counts how many are found and named.

    flipped bit   from a random step on, a rank flips a random bit of its gradients in every backward. Audits every
                  100 steps have to name that rank within 100 · W steps
    NaN           one number of a random sample. The step that reads it has to name the module, rank and sample
    none          an audit in every step, of each worker in turn: none may say anything

`scripts/ddp bench_same_bits --parts faults` is the command.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from ddp.bench.step import session
from ddp.bench.turns import PROGRESS, Cell
from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.errors import AuditFailed, Diverged
from ddp.policies import NUM_SHARDS, Folder, SameBits
from ddp.process.clock import now_s
from ddp.run.launch.from_python import launch
from ddp.train.callbacks import Callback
from ddp.train.fit import fit
from ddp.train.state import TrainState
from ddp.units import counted, written

WORLD_SIZES = (3, 4)  # of two ranks, nobody can tell which computes wrongly
AUDIT_EVERY = 100
HEALTHY_AUDITS = 250  # for each trial with a fault: 20 trials on 3 and on 4 workers come with 10,000
NUM_SAMPLES, FEATURES, GLOBAL_BATCH = 600, 20, 30
MANTISSA_BITS = 23  # a flip in one of these makes no number infinite, which the step itself would find


@dataclass(frozen=True, kw_only=True)
class FaultCell(Cell):
    """Holds what trials of one fault have come to.

    Attributes:
        num_right: of the trials, in how many the fault was named; without a fault, of the audits, how many were silent.
        most_steps: from the first with the fault until it was named, where these were most; None: there was no fault.
        audit_share: of a run's time that audits every `AUDIT_EVERY` steps take; None: there was a fault.
        said: by the first trial; if trials went wrong, by the first of these.
    """

    legend: ClassVar[Mapping[str, str]] = {
        "fault": f"flipped bit: of a rank's gradients, in every step, with an audit every {AUDIT_EVERY} steps; NaN: in "
        "one sample; none: all ranks compute rightly",
        "workers": "of the run",
        "trials": "runs with the fault; without one, audits",
        "right": "trials that name the rank, and of a NaN the module and the sample; without a fault, silent audits",
        "steps": f"from the first with the fault until it is named, at most; it may take {AUDIT_EVERY} × workers",
        "of time": f"that audits every {AUDIT_EVERY} steps take, by a run with one in every step, and one without",
    }
    fault: str
    workers: int
    num_trials: int
    num_right: int
    most_steps: int | None
    audit_share: float | None
    said: str

    @property
    def differs(self) -> str:
        """Returns what went wrong; "": nothing."""
        if self.num_right == self.num_trials:
            return ""
        return f"{self.fault} on {self.name}, {self.num_trials - self.num_right} of {self.num_trials:,} trials"

    def columns(self) -> dict[str, str]:
        """Returns the line by titles of columns."""
        numbers = {"workers": self.workers, "trials": self.num_trials, "right": self.num_right}
        return {
            "fault": self.fault,
            **{title: f"{each:,}" for title, each in numbers.items()},
            "steps": "" if self.most_steps is None else str(self.most_steps),
            "of time": written("{:.2%}".format, self.audit_share),
        }


class Trial(NamedTuple):
    """Says what has become of a run with a fault.

    Attributes:
        is_right: the fault was named.
        num_steps: from the first with the fault until the run's end.
        said: by the error that has ended the run; "": there was none.
    """

    is_right: bool
    num_steps: int
    said: str


@dataclass(frozen=True)
class PlantFaults:
    """Makes all trials. A call runs on every rank, in the environment of torchrun or `ddp.launch`.

    Attributes:
        num_trials: of each fault.
        num_audits: of a run without a fault.
        audit_every: steps from one audit of a flipped bit to the next.
    """

    num_trials: int
    num_audits: int
    audit_every: int = AUDIT_EVERY

    def __call__(self) -> list[FaultCell]:
        """Returns a cell for each fault, the same on all ranks."""
        with session() as comm:
            chances = [random.Random(number) for number in range(self.num_trials)]
            flips = [flipped_bit(comm, chance, self.audit_every) for chance in chances]
            bad_samples = [not_a_number(comm, chance) for chance in chances]
            began_s = now_s()
            said, num_steps = ending(Noted(), audit_every=1, max_steps=self.num_audits)
            audited_s = now_s()
            ending(Noted(), audit_every=0, max_steps=self.num_audits)
            share = ((audited_s - began_s) / (now_s() - audited_s) - 1) / AUDIT_EVERY
            healthy = {"num_trials": self.num_audits, "num_right": num_steps - bool(said), "audit_share": share}
            return [
                _cell("flipped bit", flips, comm),
                _cell("NaN", bad_samples, comm),
                _cell("none", [Trial(not said, num_steps, said)], comm, most_steps=None, **healthy),
            ]


def plant_faults(workers: int, num_trials: int) -> list[FaultCell]:
    """Makes all trials on this number of workers; returns a cell for each fault."""
    job = PlantFaults(num_trials, num_audits=HEALTHY_AUDITS * num_trials)
    cells: list[FaultCell] = launch(job, workers=workers, threads_per_worker=1)[0]
    print(f"{PROGRESS}{counted(num_trials, 'trial')} on {workers} workers", file=sys.stderr, flush=True)
    return cells


def _cell(fault: str, trials: Sequence[Trial], comm: Communicator, **other: Any) -> FaultCell:
    """Returns the cell of trials.

    Args:
        other: fields that do not follow from them.
    """
    found: dict[str, Any] = {
        "num_trials": len(trials),
        "num_right": sum(trial.is_right for trial in trials),
        "most_steps": max(trial.num_steps for trial in trials),
        "audit_share": None,
        "said": min(trials, key=lambda trial: trial.is_right).said,
    }
    place, name = f"faults planted in runs of {NUM_SHARDS} shards", counted(comm.world_size, "worker")
    return FaultCell(place=place, name=name, fault=fault, workers=comm.world_size, **{**found, **other})


# --- The trials ------------------------------------------------------------------------------------------------------


def flipped_bit(comm: Communicator, chance: random.Random, audit_every: int) -> Trial:
    """Makes a run in which a rank computes wrongly from a step on, but not in the first, which is audited on all."""
    rank, first_step = chance.randrange(comm.world_size), chance.randint(2, 1 + audit_every)
    flips = FlipsABit(rank, first_step, chance)
    most_steps = first_step - 1 + audit_every * comm.world_size
    said, last_step = ending(Noted(), audit_every=audit_every, max_steps=most_steps, callback=flips)
    return Trial(f" agree, and not rank {rank} on host " in said, last_step - first_step + 1, said)


def not_a_number(comm: Communicator, chance: random.Random) -> Trial:
    """Makes a run with a sample that is not finite."""
    samples = Noted(bad=chance.randrange(NUM_SAMPLES))
    said, _ = ending(samples, audit_every=0, max_steps=NUM_SAMPLES // GLOBAL_BATCH)
    has_read = all_gather_object(comm, samples.is_read)
    told = re.search(r"that 0 \(Linear\) is given are not finite, in shard \d on rank (\d), sample (\d+)$", said)
    is_right = told is not None and (has_read.index(True), samples.bad) == (int(told[1]), int(told[2]))
    return Trial(is_right and sum(has_read) == 1, 1, said)


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
        fit(
            model,
            samples,
            torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
            loss=F.cross_entropy,
            global_batch=GLOBAL_BATCH,
            max_steps=max_steps,
            folder=Folder(None, progress=False, curves=False),
            same_bits=SameBits(on=True, audit_every=audit_every),
            callbacks=[steps] if callback is None else [steps, callback],
        )
    except (AuditFailed, Diverged) as error:
        said = str(error)
    return said, steps.num_begun


# --- What is said of all trials --------------------------------------------------------------------------------------


def said_of(cells: Sequence[FaultCell]) -> list[str]:
    """Returns what runs have said: an example for each fault; of trials that went wrong, one for each cell."""
    shown = {cell.fault: f"{cell.fault}, {cell.name}: {cell.said}" for cell in cells if cell.said and not cell.differs}
    return [*shown.values(), *(f"{cell.differs}: {cell.said or 'nothing was said'}" for cell in cells if cell.differs)]


def named(cells: Sequence[FaultCell]) -> str:
    """Returns what all cells say together."""
    if wrong := [cell.differs for cell in cells if cell.differs]:
        return f"not named, or named wrongly: {'; '.join(wrong)}"
    num_audits = sum(cell.num_trials for cell in cells if cell.fault == "none")
    num_faults = sum(cell.num_trials for cell in cells) - num_audits
    return f"named: {counted(num_faults, 'fault')} of {num_faults}; no alarm in {num_audits:,} audits of healthy runs"
