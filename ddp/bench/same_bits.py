"""Holds `same_bits` against its promise, and measures what it costs: in time, and in memory.

Hashes: runs of `ddp.fit(…, same_bits=True)` end with the same bits at any number of workers.

    a case       a model, an optimizer and a strategy; all strategies of a model and an optimizer have one hash, too
    a run        all steps of a case on W workers; or resized: 1 → 4 → 3 → 8 → 2, each of which goes on from the
                 checkpoint of the one before
    a hash       of parameters, buffers, the last step's loss, and the metrics on held-out samples, on all ranks

Steps: a worker computes its part of a batch in one of these modes, and then its optimizer steps.

| mode        | what a step is                                                                                       |
|-------------|------------------------------------------------------------------------------------------------------|
| same_bits   | `ddp.BucketedDataParallel(num_shards=8)`: a forward and a backward for each of the worker's shards    |
| ordinary    | the same forwards and backwards by ranks: all but the last in `no_sync`                              |
| torch       | the same of torch's `DistributedDataParallel` on Gloo, with gradient_as_bucket_view=True             |
| one_forward | `ddp.BucketedDataParallel`, and one forward and backward for all samples of the worker               |

All train with the same samples, and find the same mean but for rounding. They take turns in one launch
(ddp/bench/step.py, where a repetition is one step).

Memory is measured in a launch of its own for each mode, so that no other's counts for it:

    import everything, join torch.distributed               ── before
    build the model, wrap it, make its batch, some steps    ── peak − before, of the worker where that is highest

The peak is the kernel's high-water mark of the resident set, because samples (`counts.py`) miss short peaks on a busy
machine, and the difference of two modes would be one of misses. Memory that workers share counts in full for each.

Note "free blocks". A worker keeps large blocks that are free (`process/memory.py`). What it keeps depends on the order
in which blocks of several sizes became free, and differs from run to run by more than the modes do. So here each block
goes back to the kernel as soon as it is free, and the peak is what the mode needs.

`scripts/ddp bench_same_bits` is the command.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch._dynamo  # torch's optimizers ask for it, and it counts for nobody
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp.bench.place import HERE, Place
from ddp.bench.step import Training, make, refuse_divergence, session
from ddp.bench.turns import OVER_TURNS, PROGRESS, STEP, Cell, TimedCell, announce, slowest, take_turns
from ddp.bench.workloads import Batch, loss_of, workload
from ddp.collectives.shards import owned
from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.comm.session import init, shutdown
from ddp.data.orders.steps import Batches
from ddp.errors import ConfigError
from ddp.models.gpt import GPT
from ddp.models.images import MLP, resnet
from ddp.optim.lamb import LAMB
from ddp.policies import NUM_SHARDS, Evaluation, Folder
from ddp.process.memory import resident_bytes
from ddp.replica.broadcast import tensor_hash
from ddp.replica.bucketed import BucketedDataParallel
from ddp.run.launch.from_python import launch
from ddp.setting import StrategyName
from ddp.train.callbacks import Callback
from ddp.train.fit import fit
from ddp.train.state import TrainState
from ddp.train.tasks.cross_entropy import Classification, LanguageModel
from ddp.train.tasks.task import Task
from ddp.units import counted, three_digits, written

# --- Hashes: the cases -----------------------------------------------------------------------------------------------
#
# The sizes are awkward. A batch of 30 makes shards of 3 or 4 samples; an epoch of 80 ends with a batch of 20; 45
# held-out samples divide by no number of workers but 1, 3 and 5. No shard has a single sample, of which BatchNorm has
# no statistics in ResNet's last stage, where an image of 32 pixels is one pixel.

GLOBAL_BATCH, NUM_SAMPLES, NUM_HELD_OUT = 30, 80, 45
DIGITS = 8
RESIZES = (1, 4, 3, 8, 2)
RESIZED = "resized"


class Subject(NamedTuple):
    """Makes a model whose runs are compared, and random samples for it, which its task is about."""

    make: Callable[[], nn.Module]
    samples: Callable[[int], Batch]
    task: Task


def _images(*shape: int) -> Callable[[int], Batch]:
    return lambda n: (torch.randn(n, *shape), torch.randint(0, 10, (n,)))


def _tokens(n: int) -> Batch:
    return torch.randint(0, 64, (n, 32)), torch.randint(0, 64, (n, 32))


SUBJECTS: dict[str, Subject] = {
    "mlp": Subject(
        lambda: MLP(in_features=64, hidden=(256, 128), num_classes=10), _images(1, 8, 8), Classification()
    ),
    "resnet18": Subject(
        lambda: resnet("resnet18", num_classes=10, small_images=False), _images(3, 32, 32), Classification()
    ),
    "gpt": Subject(
        lambda: GPT(vocab_size=64, context=32, width=64, depth=2, heads=4, dropout=0.1), _tokens, LanguageModel()
    ),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "lamb": partial(LAMB, lr=1e-3),
}
KINDS: dict[str, StrategyName] = {"whole": "auto", "sharded": "sharded", "central_storage": "central_storage"}


class Case(NamedTuple):
    """Names what is trained, by which optimizer, and who holds it: by `SUBJECTS`, `OPTIMIZERS` and `KINDS`."""

    model: str
    optimizer: str
    strategy: str


Ending = Mapping[str, str]
"""By part of a run's result, its hash; of ranks that have ended with different ones, all, with "/" between them."""


# --- Hashes: one launch makes the runs of all cases ------------------------------------------------------------------


class StopAfter(Callback):
    """Ends a fit after this step, with a checkpoint."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step_start(self, state: TrainState) -> None:
        if state.step == self._step - 1:
            state.stop(RESIZED)


@dataclass(frozen=True)
class MakeRuns:
    """Makes the runs of all cases. A call runs on every rank, in the environment of torchrun or `ddp.launch`.

    Attributes:
        folder: of a run that is resized: it goes on from there, and is saved there; None: a run begins, and ends.
        until: the step after which it is saved; None: it ends.
    """

    cases: tuple[Case, ...]
    num_steps: int
    folder: Path | None = None
    until: int | None = None

    def __call__(self) -> list[Ending]:
        """Returns what each run has come to, the same on all ranks."""
        with session() as comm:
            return [self._made(case, comm) for case in self.cases]

    def _made(self, case: Case, comm: Communicator) -> Ending:
        subject = SUBJECTS[case.model]
        torch.manual_seed(0)
        module, data, held_out = subject.make(), subject.samples(NUM_SAMPLES), subject.samples(NUM_HELD_OUT)
        quiet: dict[str, Any] = {"progress": False, "curves": False}
        folder = Folder(None, **quiet)
        if self.folder is not None:
            quiet |= {"every_steps": self.num_steps, "keep_last": 1}  # a checkpoint at the end alone
            folder = Folder(self.folder / "-".join(case), resume="auto", **quiet)
        state = fit(
            module,
            data,
            OPTIMIZERS[case.optimizer](module.parameters()),
            loss=subject.task,
            global_batch=GLOBAL_BATCH,
            max_steps=self.num_steps,
            test_data=held_out,
            evaluation=Evaluation(every_epochs=None),
            batches=Batches(num_shards=NUM_SHARDS),
            clip_norm=1.0,
            strategy=KINDS[case.strategy],
            folder=folder,
            same_bits=True,
            callbacks=[] if self.until is None else [StopAfter(self.until)],
        )
        everyone = all_gather_object(comm, _ending(module, state))
        return {part: "/".join(dict.fromkeys(each[part] for each in everyone)) for part in everyone[0]}


def _ending(module: nn.Module, state: TrainState) -> dict[str, str]:
    assert state.train_loss is not None
    return {
        "parameters": _hash(f"{name} {tensor_hash(each)}" for name, each in module.named_parameters()),
        "buffers": _hash(f"{name} {tensor_hash(each)}" for name, each in module.named_buffers()),
        "loss": _hash([float(state.train_loss).hex()]),
        "metrics": _hash(f"{name} {float(value).hex()}" for name, value in sorted(state.evaluation.items())),
    }


def _hash(lines: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=DIGITS // 2).hexdigest()


# --- Hashes: all runs, and what is said of them ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BitsCell(Cell):
    """Holds what the runs of one case have ended with.

    Attributes:
        endings: by run ("W=3", or "resized").
        expected: what a run of the same model and optimizer has ended with, the first of all.
    """

    legend: ClassVar[Mapping[str, str]] = {
        "job": "what is trained, and the optimizer; gpt has dropout, resnet18 BatchNorm, and gradients are clipped",
        "strategy": "whole: every worker holds parameters and optimizer state; or ddp.fit's word for who holds them",
        **{f"W={number}": "the same on so many workers" for number in range(1, NUM_SHARDS + 1)},
        "W=1": "hash of all that the run on one worker ends with: parameters, buffers, loss, metrics",
        RESIZED: "the same of a run that goes on from checkpoints on other numbers of workers",
        "bits": "equal; or the first run whose bits differ from those of the first run of this job, and what differs",
    }
    model: str
    optimizer: str
    strategy: str
    endings: Mapping[str, Ending]
    expected: Ending

    @property
    def differs(self) -> str:
        """Returns the first run that differs, and in what; "": none does."""
        for run, ending in self.endings.items():
            if parts := [part for part, found in ending.items() if found != self.expected[part]]:
                return f"{run}: {', '.join(parts)}"
        return ""

    def columns(self) -> dict[str, str]:
        """Returns the line by titles of columns."""
        hashes = {title: "" for title in self.legend if title.startswith("W=")} | {RESIZED: ""}
        hashes |= {run: _hash(f"{part} {found}" for part, found in each.items()) for run, each in self.endings.items()}
        job = f"{self.model}, {self.optimizer}"
        return {"job": job, "strategy": self.strategy, **hashes, "bits": self.differs or "equal"}


def compare_bits(
    cases: Sequence[Case], *, workers: Sequence[int], resizes: Sequence[int], num_steps: int
) -> list[BitsCell]:
    """Makes the runs of all cases, a launch for each number of workers, and one for each part of the resized runs.

    Args:
        resizes: numbers of workers; none: no run is resized.

    Raises:
        ConfigError: there are fewer steps than parts of a resized run, or more workers than shards.
    """
    if num_steps < len(resizes):
        raise ConfigError(f"--steps {num_steps}: a run of {len(resizes)} sizes makes a step of each; make more steps")
    if (most := max([*workers, *resizes])) > NUM_SHARDS:
        raise ConfigError(f"--workers {most}: a batch has {NUM_SHARDS} shards, and each worker needs one")
    make_runs = MakeRuns(tuple(cases), num_steps)
    endings = {f"W={number}": _launched(make_runs, number) for number in workers}
    if resizes:
        endings[RESIZED] = _resized(make_runs, resizes)
    runs = list(endings)
    by_case = {case: {run: endings[run][at] for run in runs} for at, case in enumerate(cases)}
    expected: dict[tuple[str, str], Ending] = {}
    for case, ending in by_case.items():
        expected.setdefault(case[:2], ending[runs[0]])
    title = f"{NUM_SHARDS} shards of a batch of {GLOBAL_BATCH}, {counted(num_steps, 'step')}"
    if resizes:
        title += f"; resized: {' → '.join(map(str, resizes))} workers"
    return [
        BitsCell(place=title, name=", ".join(case), **case._asdict(), endings=each, expected=expected[case[:2]])
        for case, each in by_case.items()
    ]


def _launched(make_runs: MakeRuns, workers: int) -> list[Ending]:
    """Returns what all runs have come to on this number of workers."""
    found: list[Ending] = launch(make_runs, workers=workers, threads_per_worker=1)[0]
    until = "" if make_runs.until is None else f", up to step {make_runs.until}"
    num_runs = counted(len(make_runs.cases), "run")
    print(f"{PROGRESS}{num_runs} on {counted(workers, 'worker')}{until}", file=sys.stderr, flush=True)
    return found


def _resized(make_runs: MakeRuns, resizes: Sequence[int]) -> list[Ending]:
    """Returns what all runs end with that go on from one number of workers to the next."""
    found: list[Ending] = []
    with tempfile.TemporaryDirectory(prefix="ddp-bench-") as folder:
        for part, workers in enumerate(resizes, 1):
            until = make_runs.num_steps * part // len(resizes) if part < len(resizes) else None
            found = _launched(replace(make_runs, folder=Path(folder), until=until), workers)
    return found


def verdict(cells: Sequence[BitsCell]) -> str:
    """Returns what all cells say together."""
    if different := [f"{cell.name} at {cell.differs}" for cell in cells if cell.differs]:
        return f"different, first of each: {'; '.join(different)}"
    num_runs = sum(len(cell.endings) for cell in cells)
    return f"equal: {counted(num_runs, 'run')} of {counted(len(cells), 'case')}, bit by bit"


# --- Steps and memory: what same bits cost ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ShardsCell(TimedCell):
    """Holds the figures of one model, by mode.

    Attributes:
        gradient_bytes: of all gradients of the model.
        peak: bytes above "before", of the worker where that is most.
    """

    rival: ClassVar[str] = "torch"
    legend: ClassVar[Mapping[str, str]] = {
        "model": "what is trained (ddp/bench/workloads.py); a worker's batch is cut into its shards",
        "same_bits": f"a forward for each shard, added up by shards: {STEP}",
        "ordinary": "the same forwards, added up by ranks: all but the last in no_sync",
        "torch": "the same of torch's DistributedDataParallel on Gloo",
        "one_forward": "added up by ranks, one forward for all samples of a worker",
        "÷ ordinary": "same_bits ÷ ordinary, median over turns: what the same bits cost",
        "over turns": OVER_TURNS,
        "÷ torch": "same_bits ÷ torch; below 1, it is faster than torch's class",
        "over these": OVER_TURNS,
        "÷ one_forward": "same_bits ÷ one_forward: what shards and same bits cost, where a large forward would do",
        "ordinary ÷": "ordinary ÷ one_forward: of that, what several small forwards cost in any mode",
        "peak": "MiB that a worker of same_bits needs above what it had before the model, where that is most",
        "of ordinary": "the same of ordinary",
        "more": "peak of same_bits − that of ordinary, in sizes of all gradients of the model",
    }
    gradient_bytes: int
    peak: Mapping[str, int] = field(default_factory=dict)

    @property
    def more_gradients(self) -> float | None:
        """Returns how much more memory same bits take, in sizes of all gradients; None if that was not measured."""
        if not {"same_bits", "ordinary"} <= self.peak.keys():
            return None
        return (self.peak["same_bits"] - self.peak["ordinary"]) / self.gradient_bytes

    def columns(self) -> dict[str, str]:
        """Returns the line by titles of columns."""
        return {
            "model": self.name,
            **{mode: written(three_digits, self.median_s(mode), 1e3) for mode in MODES},
            "÷ ordinary": written("{:.3f}".format, self.ratio("same_bits", "ordinary")),
            "over turns": _spread(self.ratios("same_bits", "ordinary")),
            "÷ torch": written("{:.3f}".format, self.ratio("same_bits", "torch")),
            "over these": _spread(self.ratios("same_bits", "torch")),
            "÷ one_forward": written("{:.3f}".format, self.ratio("same_bits", "one_forward")),
            "ordinary ÷": written("{:.3f}".format, self.ratio("ordinary", "one_forward")),
            "peak": written("{:.1f}".format, self.peak.get("same_bits"), 1 / MIB),
            "of ordinary": written("{:.1f}".format, self.peak.get("ordinary"), 1 / MIB),
            "more": written("{:+.2f}".format, self.more_gradients),
        }


MIB = 1 << 20


def _spread(ratios: Sequence[float]) -> str:
    return f"{three_digits(min(ratios))} – {three_digits(max(ratios))}" if ratios else ""


def merged(cells: Iterable[ShardsCell]) -> list[ShardsCell]:
    """Returns one cell for each model and place, with all that is known of it."""
    found: dict[tuple[str, str], ShardsCell] = {}
    for cell in cells:
        known = found.setdefault((cell.place, cell.name), cell)
        turns_s, peak = {**known.turns_s, **cell.turns_s}, {**known.peak, **cell.peak}
        found[cell.place, cell.name] = replace(known, turns_s=turns_s, peak=peak)
    return list(found.values())


MODES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "same_bits": partial(BucketedDataParallel, num_shards=NUM_SHARDS),
    "ordinary": BucketedDataParallel,
    "torch": partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True),
    "one_forward": BucketedDataParallel,
}
IN_MEMORY = ("same_bits", "ordinary")
NUM_STEPS = 6  # of which the first makes the state, and the second has the layout of buckets that stays


class ShardTraining(Training):
    """Trains a module in one mode. The constructor is collective.

    Raises:
        ConfigError: the worker's batch has fewer samples than it has shards.
    """

    def __init__(self, mode: str, module: nn.Module, batch: Batch) -> None:
        self._set_up(MODES[mode](module), batch)
        rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._shards, self._mode = owned(rank, self._num_ranks, NUM_SHARDS), mode
        if len(batch[0]) < len(self._shards):
            raise ConfigError(
                f"a worker's batch of {counted(len(batch[0]), 'sample')} cannot be cut into {len(self._shards)} "
                "shards: take more workers, or another model"
            )
        inputs, targets = (part.tensor_split(len(self._shards)) for part in batch)
        self._parts = list(zip(inputs, targets, strict=True))

    def step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        if self._mode == "one_forward":
            self._backward(self._batch, 1.0)
        elif self._mode == "same_bits":
            replica: Any = self.replica
            for shard, part in zip(self._shards, self._parts, strict=True):
                with replica.shard(shard):
                    self._backward(part, 1.0)
        else:
            self._accumulate()
        self._update()

    def _accumulate(self) -> None:
        """Adds up this rank's parts; the last backward averages the sums over ranks."""
        replica: Any = self.replica
        for number, part in enumerate(self._parts, 1):
            with contextlib.nullcontext() if number == len(self._parts) else replica.no_sync():
                self._backward(part, self._num_ranks / NUM_SHARDS)

    def _backward(self, batch: Batch, scale: float) -> None:
        inputs, targets = batch
        loss: Tensor = loss_of(self.replica(inputs), targets)
        (loss if scale == 1.0 else loss * scale).backward()
        self.loss = loss.detach()


@dataclass(frozen=True)
class TimeModes:
    """Times a step of each mode. A call runs on every rank, in the environment of torchrun or `ddp.launch`."""

    model: str
    num_turns: int = 9
    place: Place = HERE

    def __call__(self) -> list[ShardsCell]:
        """Returns one cell, the same on all ranks."""
        with session() as comm:
            cell = self._measure(comm)
            announce(cell)
        return [cell]

    def _measure(self, comm: Communicator) -> ShardsCell:
        """Has all replicas in local variables, so that they end here (`step.py`, note "replicas first")."""
        module, batch = make(self.model, rank=comm.rank)
        trainings = {mode: ShardTraining(mode, copy.deepcopy(module), batch) for mode in MODES}
        for training in trainings.values():
            training.find_pace()
        turns_s = take_turns({mode: partial(each.turn_s, comm) for mode, each in trainings.items()}, self.num_turns)
        refuse_divergence(self.model, trainings)
        place = self.place.title(comm.world_size, len(comm.hosts))
        return _cell(place, self.model, module, turns_s=turns_s)


@dataclass(frozen=True)
class MeasureMode:
    """Measures the memory of one mode. A call runs on every rank of one host, as that of `TimeModes`."""

    model: str
    mode: str
    place: Place = HERE

    def __call__(self) -> list[ShardsCell]:
        """Returns one cell, the same on all ranks."""
        torch.set_num_threads(1)
        with torch.device("meta"), contextlib.suppress(ConfigError):  # one of the user's own may need numbers
            workload(self.model).make()  # imports what it needs, torchvision say, and takes no memory for numbers
        dist.init_process_group("gloo")
        cell = self._measure()
        gc.collect()  # ddp/bench/step.py, note "replicas first"
        shutdown()
        dist.destroy_process_group()
        return [cell]

    def _measure(self) -> ShardsCell:
        before = resident_bytes()
        if self.mode != "torch":
            init(device="cpu")
        _give_back_blocks()
        module, batch = make(self.model, rank=dist.get_rank())
        training = ShardTraining(self.mode, module, batch)
        for _ in range(NUM_STEPS):
            training.step()
        peak = int(slowest([_most_resident_bytes() - before])[0])
        place = self.place.title(dist.get_world_size())
        return _cell(place, self.model, module, turns_s={}, peak={self.mode: peak})


def _give_back_blocks() -> None:
    """Lets the C library give each large block back when it is free (note "free blocks")."""
    M_MMAP_THRESHOLD = -3
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # the GNU C library's
        mallopt(M_MMAP_THRESHOLD, 1 << 20)


def _most_resident_bytes() -> int:
    """Returns the most bytes of this process that were in memory at any moment, shared ones included."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) << 10


def _cell(place: str, model: str, module: nn.Module, **measured: Any) -> ShardsCell:
    gradients = sum(each.nbytes for each in module.parameters() if each.requires_grad)
    return ShardsCell(place=f"{place}; {NUM_SHARDS} shards", name=model, gradient_bytes=gradients, **measured)
