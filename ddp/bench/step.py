"""How long a training step takes: ours, torch's DistributedDataParallel, and the same step without communication.

Every variant trains its own copy of one model on the same batch. They take turns, some steps each and in alternating
order, so that a machine whose speed drifts is the same machine for all of them. Ratios are taken turn by turn:

    turn 1       ours ▓▓▓▓▓   torch ▓▓▓▓▓   naive ▓▓▓▓▓   alone ▓▓▓▓▓
    turn 2       alone ▓▓▓▓▓   naive ▓▓▓▓▓   torch ▓▓▓▓▓   ours ▓▓▓▓▓
    …
    ▓            one step: zero_grad, forward, backward, optimizer
    a turn       median of its steps, on the rank where that is longest
    a ratio      median over turns of turn ÷ turn

| variant     | what a step is                                                                                     |
|-------------|----------------------------------------------------------------------------------------------------|
| ours        | `ddp.DistributedDataParallel`                                                                      |
| torch       | `torch.nn.parallel.DistributedDataParallel` on Gloo, with gradient_as_bucket_view=True             |
| naive       | one of our all-reduces per parameter, after backward                                               |
| alone       | no communication; all ranks compute at the same time, as in the others                             |
| in_backward | ours with `step_in_backward`: the optimizer steps a bucket while the next one travels              |
| reduce      | no computing: our all-reduce of as many numbers as each bucket of "ours" has, one after another    |

Whether a forward in training mode begins with a broadcast of rank 0's buffers (BatchNorm's statistics) is the same for
all replicas: by default it does, as is the default of both classes.

| figure            | meaning                                                                                  |
|-------------------|------------------------------------------------------------------------------------------|
| speedup           | torch ÷ ours: above 1, ours is faster                                                    |
| cost              | ours ÷ alone − 1: what communication adds to a step                                      |
| per parameter     | (ours − alone) ÷ parameters: where they are tiny and many, the interpreter's part        |
| wait              | how long backward's end waited for reductions, per step of ours; the mean over the ranks |

Note "replicas first". torch's replica holds the process group. Where it is the last to hold it, its end ends the group
with the interpreter lock held, and waits there for Gloo's thread; that thread may just be waiting for the lock, to give
back a tensor of the last broadcast. Then the rank hangs (torch 2.13, one run in ten of the shortest). So replicas go
before the group does.

`scripts/bench_step` is the command line. Read next: ddp/bench/workloads.py, ddp/bench/step_report.py.
"""

from __future__ import annotations

import copy
import gc
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp.bench.bystanders import Watch, running
from ddp.bench.collectives import available_cores, optimum_s, processes
from ddp.bench.workloads import WORKLOADS, Batch
from ddp.clock import now_s
from ddp.comm.communicator import Communicator
from ddp.comm.setup import init, shutdown
from ddp.drop_in.data_parallel import DistributedDataParallel
from ddp.errors import ConfigError
from ddp.replica.naive import NaiveDataParallel

USUAL = ("ours", "torch", "naive", "alone")
VARIANTS = (*USUAL, "in_backward", "reduce")
WARM_UP_STEPS = 3
"""At least: torch rebuilds its buckets after the first step."""
PAYLOAD = 0.956
"""What a link's rate leaves for payload; the rest is headers (scripts/netbed/README.md)."""

# ----------------------------------------------------------------------------------------------------- what is learned


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """One model on some ranks.

    Attributes:
        num_hosts, num_cores: as the communicator found them; the cores of one host.
        num_parameters: tensors that need a gradient; `gradient_bytes` is all of them together.
        turns_s: by variant, the step of each turn.
        wait_s: per step of ours; None without that variant.
        others_cores, greediest: what other processes took meanwhile, in cores, and who took most.
    """

    workload: str
    world_size: int
    num_hosts: int
    num_cores: int
    num_parameters: int
    gradient_bytes: int
    turns_s: Mapping[str, Sequence[float]]
    wait_s: float | None = None
    others_cores: float = 0.0
    greediest: str = ""

    def step_s(self, variant: str) -> float | None:
        """Median over turns; None if the variant took no part."""
        return statistics.median(self.turns_s[variant]) if variant in self.turns_s else None

    def ratios(self, one: str, other: str) -> list[float]:
        """One variant ÷ another, turn by turn; empty if either took no part."""
        return [a / b for a, b in self._pairs(one, other)]

    @property
    def speedups(self) -> list[float]:
        """torch ÷ ours, turn by turn."""
        return self.ratios("torch", "ours")

    @property
    def speedup(self) -> float | None:
        return _median(self.speedups)

    @property
    def cost(self) -> float | None:
        """ours ÷ alone − 1."""
        return _median([ratio - 1 for ratio in self.ratios("ours", "alone")])

    @property
    def per_parameter_s(self) -> float | None:
        """(ours − alone) ÷ parameters."""
        return _median([(ours - alone) / self.num_parameters for ours, alone in self._pairs("ours", "alone")])

    def wire_s(self, rate_bit_s: float) -> float:
        """The least time that a link of this rate needs to exchange the gradients, whatever stands on the hosts."""
        return optimum_s(self.gradient_bytes, self.num_hosts, PAYLOAD * rate_bit_s)

    def _pairs(self, one: str, other: str) -> list[tuple[float, float]]:
        both = one in self.turns_s and other in self.turns_s
        return list(zip(self.turns_s[one], self.turns_s[other], strict=True)) if both else []


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


# --------------------------------------------------------------------------------------------------------- measuring


def measure_step(
    workload_name: str,
    *,
    variants: Collection[str] = USUAL,
    num_turns: int = 9,
    steps_per_turn: int = 10,
    broadcast_buffers: bool = True,
) -> StepFigures:
    """Runs on every rank, in the environment that torchrun or `ddp.launch` gives; the same figures on all of them.

    Args:
        variants: those of `VARIANTS` that take turns; "reduce" takes its buckets from "ours".
        broadcast_buffers: of ours, torch and naive alike.

    Raises:
        ConfigError: an unknown workload or variant, or "reduce" without "ours".
    """
    refuse_unknown("model", [workload_name], WORKLOADS)
    refuse_unknown("variant", variants, VARIANTS)
    if "reduce" in variants and "ours" not in variants:
        raise ConfigError('variant "reduce" takes its buckets from "ours": ask for both')
    torch.set_num_threads(1)
    comm = init(device="cpu")
    figures = _measured(
        comm,
        workload_name,
        variants=variants,
        num_turns=num_turns,
        steps_per_turn=steps_per_turn,
        broadcast_buffers=broadcast_buffers,
    )
    gc.collect()  # note "replicas first"
    shutdown()
    return figures


def _measured(
    comm: Communicator,
    workload_name: str,
    *,
    variants: Collection[str],
    num_turns: int,
    steps_per_turn: int,
    broadcast_buffers: bool,
) -> StepFigures:
    """With all replicas in locals, so that they end here (note "replicas first")."""
    module, batch = make(workload_name, rank=comm.rank)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    replicas = {
        name: wrap(name, copy.deepcopy(module), broadcast_buffers=broadcast_buffers)
        for name in VARIANTS
        if name in variants and name != "reduce"
    }
    steps: dict[str, Callable[[], object]] = {
        name: Training(replica, batch, in_backward=name == "in_backward") for name, replica in replicas.items()
    }
    ours = replicas.get("ours")
    for step in steps.values():
        _turn_s(comm, step, max(WARM_UP_STEPS, steps_per_turn // 2))
    if "reduce" in variants and ours is not None:
        steps["reduce"] = _Reduction(comm, ours)  # after the warm-up: only then buckets have the order that they keep
        _turn_s(comm, steps["reduce"], WARM_UP_STEPS)
    _waited_s(ours)
    watch = Watch([*processes(), *running("hosts.py")])  # a bed's cable is its own
    turns_s = _take_turns(comm, steps, num_turns=num_turns, steps_per_turn=steps_per_turn)
    others = _everyones(watch.so_far())[0]
    waits_s = _everyones(_waited_s(ours) / (num_turns * steps_per_turn))
    for name, step in steps.items():
        if isinstance(step, Training) and not step.loss.isfinite():
            raise RuntimeError(f"{workload_name}, {name}: the loss is {step.loss.item()}; such steps are not timed")
    return StepFigures(
        workload=workload_name,
        world_size=comm.world_size,
        num_hosts=len(comm.hosts),
        num_cores=available_cores(),
        num_parameters=len(parameters),
        gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        turns_s=turns_s,
        wait_s=None if ours is None else statistics.mean(waits_s),
        others_cores=others.num_cores,
        greediest=others.greediest,
    )


def _take_turns(
    comm: Communicator, steps: Mapping[str, Callable[[], object]], *, num_turns: int, steps_per_turn: int
) -> dict[str, tuple[float, ...]]:
    """By variant and turn, the longest step of any rank: the others wait for that rank, or would have to."""
    mine: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(num_turns):
        for name in list(steps) if turn % 2 == 0 else reversed(list(steps)):
            mine[name].append(_turn_s(comm, steps[name], steps_per_turn))
    by_rank = _everyones(mine)
    return {name: tuple(map(max, zip(*(theirs[name] for theirs in by_rank), strict=True))) for name in steps}


def refuse_unknown(what: str, names: Collection[str], known: Collection[str]) -> None:
    """Raises ConfigError if a name is not known, or if there is none."""
    if not names:
        raise ConfigError(f"no {what}: choose among {', '.join(known)}")
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{what} {unknown[0]!r} is unknown; choose among {', '.join(known)}")


def make(workload_name: str, *, rank: int) -> tuple[nn.Module, Batch]:
    """The same model on every rank, and a batch of its own."""
    workload = WORKLOADS[workload_name]
    torch.manual_seed(0)
    module = workload.make()
    torch.manual_seed(1 + rank)
    return module, workload.batch()


def wrap(variant: str, module: nn.Module, *, broadcast_buffers: bool) -> nn.Module:
    """All but "reduce". Collective, except for "alone"."""
    if variant in ("ours", "in_backward"):
        return DistributedDataParallel(module, broadcast_buffers=broadcast_buffers)
    if variant == "torch":
        return nn.parallel.DistributedDataParallel(
            module, gradient_as_bucket_view=True, forward_sync_buffers=broadcast_buffers
        )
    if variant == "naive":
        return NaiveDataParallel(module, broadcast_buffers=broadcast_buffers)
    return module


class Training:
    """One variant with its optimizer; a call is a step.

    Args:
        in_backward: the optimizer steps inside backward; after it, no gradient is left to step with.
    """

    def __init__(self, replica: nn.Module, batch: Batch, *, in_backward: bool = False) -> None:
        self._replica, self._batch = replica, batch
        self._optimizer = _optimizer(replica.parameters())
        if in_backward:
            assert isinstance(replica, DistributedDataParallel)
            replica.step_in_backward(_optimizer)
        self.loss = torch.zeros(())

    def __call__(self) -> None:
        inputs, targets = self._batch
        self._optimizer.zero_grad(set_to_none=True)
        scores = self._replica(inputs)
        loss = F.cross_entropy(scores.flatten(0, -2), targets.flatten())
        loss.backward()
        self._optimizer.step()
        self.loss = loss.detach()


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


class _Reduction:
    """As many numbers as each bucket of a replica has, in the memory that buckets have; a call sums them all."""

    def __init__(self, comm: Communicator, replica: nn.Module) -> None:
        assert isinstance(replica, DistributedDataParallel)
        self._comm = comm
        numel = {name: parameter.numel() for name, parameter in replica.module.named_parameters()}
        sizes = [sum(numel[name] for name in names) for names in replica.bucket_layout]
        self._buckets: list[Tensor] = [comm.allocate(size, torch.float32) for size in sizes if size]

    def __call__(self) -> None:
        for bucket in self._buckets:
            self._comm.all_reduce(bucket)


def _turn_s(comm: Communicator, step: Callable[[], object], num_steps: int) -> float:
    """Median step on this rank."""
    times = []
    comm.barrier()
    for _ in range(num_steps):
        start_s = now_s()
        step()
        times.append(now_s() - start_s)
    return statistics.median(times)


def _waited_s(ours: nn.Module | None) -> float:
    """Since the last call."""
    return ours.waited.take_s() if isinstance(ours, DistributedDataParallel) else 0.0


def _everyones(mine: Any) -> list[Any]:
    found = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
