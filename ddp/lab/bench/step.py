"""Times training steps of several variants, in the same run, and counts the memory and the bytes that they need.

    python -m ddp bench step                                           the default job and ResNet-18, 2 workers
    python -m ddp bench step --models all --workers 2,4 --plot steps.png
    python -m ddp bench step --models mlp-25m --variants ours,torch,alone --turns 3 --memory
    python -m ddp bench step --models mine:Net                         your own: example_batch() gives a batch
    python -m ddp bench step --beside 1                                beside a process that keeps a core busy
    python -m ddp bench step --netbed 2x1@1gbit --models mlp-25m       on hosts made for it (root, iproute2)
    python -m ddp bench step --models mlp-25m --optimizer adamw --variants mirrored,sharded,torch_zero --memory
    python -m ddp bench step --models gpt-10m --variants same_bits,accumulated,bucketed --over accumulated,bucketed

ddp/lab/bench/variants.py describes the variants, ddp/lab/bench/workloads.py the models. Every variant
trains its own copy of a model on the same batch. They take turns (ddp/lab/bench/turns.py); a repetition is one step:
zero_grad, forward, backward, optimizer. Every worker has one thread.

Memory is measured in a separate launch for each variant, so that no other's counts for it:

    import everything, join torch.distributed               ── before
    build the model, wrap it, make its batch, some steps    ── peak − before

A host's peak is sampled (ddp/lab/bench/turns.py), and shared memory counts once. A worker's is the kernel's high-water
mark of the resident set, because samples miss short peaks on a busy machine; shared memory counts in full for each.

Note "free blocks". A worker keeps large blocks that are free (`process/memory.py`). Which ones depends on the order in
which blocks of several sizes became free, and differs from run to run by more than variants do. So where memory is
measured, each block goes back to the kernel as soon as it is free, and the peak is that of the variant.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.commands.registry import parser_of, respond
from ddp.errors import ConfigError
from ddp.lab.bench.command import HERE, BenchSite, Job, add_options, place_of, refuse_unknown, run_jobs, split
from ddp.lab.bench.turns import (
    STEP,
    TimedCell,
    announce,
    bytes_in,
    can_count_memory,
    paired,
    sampling,
    session,
    slowest,
    spans_of,
    torch_alone,
    with_ours,
)
from ddp.lab.bench.variants import OPTIMIZERS, VARIANTS
from ddp.lab.bench.workloads import add_models, make, models_of, workload
from ddp.process.memory import resident_bytes
from ddp.units import three_digits, written

USUAL = ("ours", "torch", "naive", "alone")
NUM_STEPS = 6  # of which the first makes the state, and the second has the layout of buckets that stays
MIB = 1 << 20


def main(words: Sequence[str]) -> int:
    """Times the steps that the words ask for."""
    parser = parser_of("bench step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, workers="2", least=1, turns=9, plots=True)
    add_models(parser)
    parser.add_argument(
        "--variants",
        default=",".join(USUAL),
        metavar="NAME,NAME,…",
        help=f"some of {', '.join(VARIANTS)} (default: %(default)s)",
    )
    parser.add_argument("--over", metavar="NAME,…", help="divide steps by those of these variants (default: the first)")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="sgd", help="(default: %(default)s)")
    parser.add_argument("--memory", action="store_true", help="measure memory, too, in a launch for each variant")
    return respond(parser, parser.parse_args(words), run)


def run(options: argparse.Namespace) -> str:
    """Times them; the report is printed."""
    where, models, variants = place_of(options), models_of(options), split("--variants", options.variants)
    refuse_unknown("variant", variants, VARIANTS)
    over = split("--over", options.over) if options.over else variants[:1]
    refuse_unknown("--over:", over, variants)
    if options.plot and "alone" not in variants:
        raise ConfigError('--plot draws steps relative to the variant "alone": add it to --variants')
    if options.memory and where.bed is not None:
        raise ConfigError("--memory measures on this host: leave --netbed out")
    if options.memory and not can_count_memory():
        raise ConfigError("--memory counts proportional set sizes, which only Linux has: leave it out")
    how = options.optimizer, where
    jobs: list[Job] = [TimeSteps(model, variants, *how, over, options.turns) for model in models]
    if options.memory:
        jobs += [MeasureMemory(model, variant, *how) for model in models for variant in variants]
    run_jobs(options, jobs, StepCell, where, merged)
    return ""


# --- The figures -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepCell(TimedCell):
    """The figures of one model, by variant: a line for each.

    Attributes:
        over: the variants by whose steps the others are divided.
        num_parameters: tensors that need a gradient; gradient_bytes: of all gradients.
        wait_s: how long backward waited for reductions, per step, on the rank where that is longest.
        wire_s: the least time in which the links of a bed carry the gradients.
        held: bytes of parameters and optimizer state on a host, where that is most.
        sent: bytes that leave a host in a step, where that is most, for each sample of the global batch; on a bed.
        peak: bytes above "before" of all ranks of a host; worker: of the rank where that is most.
    """

    rival: ClassVar[str] = "torch"
    legend: ClassVar[Mapping[str, str]] = {
        "model": "what is trained, and the optimizer if it is not SGD",
        "variant": "how it is trained (ddp/lab/bench/variants.py)",
        "step": STEP,
        "over alone": "step ÷ alone − 1: the share that communication adds to a step",
        "µs per parameter": "(step − alone) ÷ number of parameter tensors",
        "wait": "ms per step that backward waits for reductions, on the rank where that is longest",
        "wire": "least ms in which the hosts' links carry the gradients of a step",
        "held": "MiB of parameters and optimizer state on a host",
        "sent": "bytes that leave a host for each sample of the global batch",
        "peak": "MiB above what the workers of a host had before the model, together; shared memory counts once",
        "worker": "the same of one worker, where that is most; shared memory counts in full",
        "gradients": "the same in sizes of all gradients of the model",
    }
    over: Sequence[str] = ()
    num_parameters: int
    gradient_bytes: int
    wire_s: float | None
    wait_s: Mapping[str, float] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[str, float] = field(default_factory=dict)
    peak: Mapping[str, int] = field(default_factory=dict)
    worker: Mapping[str, int] = field(default_factory=dict)

    def meaning(self, title: str) -> str:
        return self.legend.get(title) or f"step {title}: median over turns; least and greatest"

    def rows(self) -> list[dict[str, str]]:
        """Returns a line for each variant."""
        return [self.columns(one) for one in dict.fromkeys((*self.turns_s, *self.peak))]

    def columns(self, one: str = "ours") -> dict[str, str]:
        """Returns the line of a variant by titles of columns."""
        alone_s, over_alone = self.median_s("alone"), self.ratio(one, "alone")
        added = None if over_alone is None or one == "alone" else over_alone - 1
        each_s = None if added is None or alone_s is None else added * alone_s / self.num_parameters
        return {
            "model": self.name,
            "variant": one,
            "step": written(three_digits, self.median_s(one), 1e3),
            **{f"÷ {other}": self.compare(one, other) for other in self.over},
            "over alone": written("{:+.1%}".format, added),
            "µs per parameter": written(three_digits, each_s, 1e6),
            "wait": written(three_digits, self.wait_s.get(one) or None, 1e3),
            "wire": written(three_digits, self.wire_s, 1e3),
            "held": written("{:.1f}".format, self.held.get(one), 1 / MIB),
            "sent": written("{:,.0f}".format, self.sent.get(one)),
            "peak": written("{:.1f}".format, self.peak.get(one), 1 / MIB),
            "worker": written("{:.1f}".format, self.worker.get(one), 1 / MIB),
            "gradients": written("{:.2f}".format, self.worker.get(one), 1 / self.gradient_bytes),
        }

    def compare(self, one: str, other: str) -> str:
        """Returns a variant's step ÷ another's; "" if either took no part, or for itself."""
        ratio = None if one == other else self.ratio(one, other)
        return "" if ratio is None else f"{ratio:.3f} ({self.spread(one, other)})"


def merged(cells: Iterable[StepCell]) -> list[StepCell]:
    """Returns one cell for each model and place: the first one, with the memory that others measured."""
    found: dict[tuple[str, str], StepCell] = {}
    for cell in cells:
        known = found.setdefault((cell.place, cell.name), cell)
        peak, worker = {**known.peak, **cell.peak}, {**known.worker, **cell.worker}
        found[cell.place, cell.name] = replace(known, peak=peak, worker=worker)
    return list(found.values())


# --- Jobs: a call runs on every rank, in the environment of torchrun or `ddp.launch` ---------------------------------


@dataclass(frozen=True)
class TimeSteps:
    """Times a step of one model by each variant, in turns.

    Attributes:
        optimizer: one of `OPTIMIZERS`.
        over: see `StepCell`.
    """

    model: str
    variants: Sequence[str] = USUAL
    optimizer: str = "sgd"
    place: BenchSite = HERE
    over: Sequence[str] = ()
    num_turns: int = 9

    def __call__(self) -> list[StepCell]:
        """Returns one cell, the same on all ranks."""
        with session(with_ours) as comm:
            cell = self._measure(comm)
            announce(cell)
        return [cell]

    def _measure(self, comm: Communicator) -> StepCell:
        """Has all replicas in local variables, so that they end here (`turns.py`, note "replicas first").

        Raises:
            RuntimeError: a loss is not finite any more, because such steps take another time.
        """
        module, batch = make(self.model, rank=comm.rank)
        trainings = {
            name: VARIANTS[name](copy.deepcopy(module), batch, OPTIMIZERS[self.optimizer]) for name in self.variants
        }
        turns_s = paired(trainings, self.num_turns)
        for name, training in trainings.items():
            if not training.loss.isfinite():
                raise RuntimeError(f"{self.model}, {name}: the loss is {training.loss.item()}; it is not timed")
        samples = _total(len(batch[0]))
        return _cell(
            self.place.title(comm.world_size, len(comm.hosts)),
            self,
            module,
            turns_s=turns_s,
            over=list(self.over),
            wait_s={name: each.wait_s() for name, each in trainings.items()},
            held={name: _held(each.held(), comm) for name, each in trainings.items()},
            sent={name: each.sent() / samples for name, each in trainings.items() if self.place.bed},
        )


@dataclass(frozen=True)
class MeasureMemory:
    """Measures the memory of one variant, on one host."""

    model: str
    variant: str
    optimizer: str = "sgd"
    place: BenchSite = HERE

    def __call__(self) -> list[StepCell]:
        """Returns one cell, the same on all ranks."""
        with torch.device("meta"), suppress(ConfigError):  # one of the user's own may need numbers
            workload(self.model).make()  # imports torchvision, say, before memory counts, and takes none for numbers
        with session(torch_alone):
            cell = self._measure()
        return [cell]

    def _measure(self) -> StepCell:
        """Compares with "before", which is before a communicator of ours, because its memory is to count."""
        pids: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        with sampling(*pids) if dist.get_rank() == 0 else nullcontext(lambda: 0) as take:
            before, mine = _together(take), resident_bytes()
            module, batch = make(self.model, rank=dist.get_rank())
            training = VARIANTS[self.variant](module, batch, OPTIMIZERS[self.optimizer])
            _give_back_blocks()
            training.steps_s(NUM_STEPS * training.every)
            peak, highest = _total(_together(take) - before), int(slowest([_most_resident_bytes() - mine])[0])
        place, name = self.place.title(dist.get_world_size()), self.variant
        return _cell(place, self, module, turns_s={}, peak={name: peak}, worker={name: highest})


def _cell(place: str, job: TimeSteps | MeasureMemory, module: torch.nn.Module, **measured: Any) -> StepCell:
    trained = [each for each in module.parameters() if each.requires_grad]
    gradient_bytes = sum(each.numel() * each.element_size() for each in trained)
    return StepCell(
        place=place,
        name=job.model if job.optimizer == "sgd" else f"{job.model}, {job.optimizer}",
        num_parameters=len(trained),
        gradient_bytes=gradient_bytes,
        wire_s=job.place.wire_s(gradient_bytes),
        **measured,
    )


def _together(take: Callable[[], int]) -> int:
    """Takes the peak once all ranks are here, and lets none continue before it is taken."""
    dist.barrier()
    taken = take()
    dist.barrier()
    return taken


def _give_back_blocks() -> None:
    """Lets the C library give each large block back when it is free (note "free blocks")."""
    M_MMAP_THRESHOLD = -3
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # the GNU C library's
        mallopt(M_MMAP_THRESHOLD, MIB)


def _most_resident_bytes() -> int:
    """Returns the most bytes of this process that were in memory at any moment, shared ones included."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) << 10


def _total(number: int) -> int:
    """Returns the sum over all ranks. Collective."""
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)


def _held(tensors: Iterable[Tensor], comm: Communicator) -> int:
    """Returns the bytes of these tensors of all ranks of a host, where that is most. Collective."""
    found = all_gather_object(comm, spans_of(tensors))
    return max(bytes_in(chain.from_iterable(found[rank] for rank in host)) for host in comm.hosts)
