"""Times training steps whose gradients travel in fewer bytes: wire formats and hooks of ours, and torch's hooks.

    python recipes/studies/hooks.py --netbed 2x1@100mbit --models mlp-25m --turns 3      on two hosts (root, iproute2)
    python recipes/studies/hooks.py --netbed 2x2@100mbit --methods plain,sign

| method           | how gradients travel                                                                            |
|------------------|-------------------------------------------------------------------------------------------------|
| plain            | `ddp.DistributedDataParallel`, as they are                                                      |
| bf16, fp16, int8 | the same with `wire=`                                                                           |
| sign             | the same with `hook=ErrorFeedback(Sign())`; the next ones in the same way                       |
| top_k, random_k  | one number in a hundred, and one in ten                                                         |
| powersgd4, …1    | matrices of rank 4, and of rank 1                                                               |
| local50_int8     | `ddp.strategies.LocalSteps`: 50 steps of each rank's own, and one exchange, `wire="int8"`       |
| late50_int8      | `ddp.strategies.Streaming`: the same, and ten steps go on while the exchange is under way       |
| alone            | nothing travels: each rank trains by itself                                                     |
| torch            | `torch.nn.parallel.DistributedDataParallel` on Gloo, as they are                                |
| torch_fp16       | the same with `fp16_compress_hook`                                                              |
| torch_powersgd4… | the same with `powerSGD_hook` and all gradients in one bucket                                   |

All methods train a copy of one model on the same batch, and take turns. Besides the time of a step it says

    on the link     bytes that left the busiest host in a step, as its network interface counts them; headers included
    predicted       bytes that this package says leave a host, and what it forecasts of a step (`lab/forecast/`),
                    given what forward, backward and update take without the waiting
    of alone        samples/s as a part of those without communication, which take turns with it (`--methods alone,…`)
    encoding        processor time of a rank for encoding and decoding, without what collectives take
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from ddp.comm.communicator import Communicator
from ddp.commands.registry import respond
from ddp.gradients import ErrorFeedback, PowerSGD, RandomK, Sign, TopK
from ddp.lab.bench.command import HERE, BenchSite, add_options, place_of, refuse_unknown, run_jobs, split
from ddp.lab.bench.turns import PROGRESS, STEP, Cell, num_repetitions, session, slowest, take_turns, with_ours
from ddp.lab.bench.variants import OPTIMIZERS, Training
from ddp.lab.bench.workloads import add_models, loss_of, make, models_of
from ddp.lab.forecast import encoding
from ddp.lab.forecast.prices import Prices, measured_in
from ddp.lab.forecast.replay import Forecast, Setup, forecast
from ddp.lab.forecast.work import Gradient, Work, bytes_of
from ddp.policies import LocalSGD
from ddp.process.arguments import Parser
from ddp.process.clock import now_s
from ddp.process.memory import available_cores
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.drop_in.data_parallel import DistributedDataParallel
from ddp.replica.replica import Replica
from ddp.strategies import strategy
from ddp.strategies.local_sgd import LocalSteps, Streaming
from ddp.units import three_digits, written

Make = Callable[[nn.Module], nn.Module]
ONE_BUCKET_MB = 1 << 20


def _torch_power_sgd(rank: int, module: nn.Module) -> nn.Module:
    replica = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=ONE_BUCKET_MB)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=2
    )
    replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return replica


def _torch_fp16(module: nn.Module) -> nn.Module:
    replica = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return replica


OURS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{wire: {"wire": wire} for wire in ("bf16", "fp16", "int8")},
    "sign": {"hook": ErrorFeedback(Sign())},
    "top_k": {"hook": ErrorFeedback(TopK(0.01))},
    "random_k": {"hook": ErrorFeedback(RandomK(0.1))},
    "powersgd4": {"hook": ErrorFeedback(PowerSGD(4))},
    "powersgd1": {"hook": ErrorFeedback(PowerSGD(1))},
}
METHODS: dict[str, Make] = {
    **{name: partial(DistributedDataParallel, **how) for name, how in OURS.items()},
    "alone": lambda module: module,
    "torch": partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True),
    "torch_fp16": _torch_fp16,
    "torch_powersgd4": partial(_torch_power_sgd, 4),
    "torch_powersgd1": partial(_torch_power_sgd, 1),
}
EVERY = 50  # steps of a round
ROUNDS = {f"local{EVERY}_int8": 0, f"late{EVERY}_int8": 10}  # the delay
WARM_UP_STEPS = 3  # torch's PowerSGD begins with its third step


@dataclass(frozen=True, kw_only=True)
class HookCell(Cell):
    """Holds the figures of one method.

    Attributes:
        model: what is trained.
        step_s: of a step, by turn.
        ratio: median over turns of plain's step ÷ this one's; of_alone: of alone's ÷ this one's.
        link_bytes: what has left the busiest host in a step; None where its interface also carries other things.
        encoding_s: processor time of a rank; None where collectives do the encoding.
        predicted_bytes, predicted_s: what was to be expected of the bytes and of the step; None for torch's.
    """

    legend: ClassVar[Mapping[str, str]] = {
        "model": "what is trained",
        "method": "how gradients travel (--help lists the methods)",
        "step": STEP,
        "plain ÷ step": "median over turns; how many times as fast a step is",
        "of alone": "samples/s ÷ those without communication, median over turns",
        "predicted": "a step by the forecast, from the measured links and what a step takes without waiting",
        "on the link": "MB that leave the busiest host in a step, counted by its network interface",
        "predicted MB": "MB that were to leave it, headers not included",
        "encoding": "ms of processor time of a rank in a step, for encoding and decoding outside of collectives",
    }
    model: str
    step_s: Sequence[float]
    ratio: float | None
    of_alone: float | None
    link_bytes: float | None
    encoding_s: float | None
    predicted_bytes: float | None = None
    predicted_s: float | None = None

    def columns(self) -> dict[str, str]:
        return {
            "model": self.model,
            "method": self.name,
            "step": written(three_digits, statistics.median(self.step_s), 1e3),
            "plain ÷ step": written(three_digits, self.ratio),
            "of alone": written("{:.3f}".format, self.of_alone),
            "predicted": written(three_digits, self.predicted_s, 1e3),
            "on the link": written(three_digits, self.link_bytes, 1e-6),
            "predicted MB": written(three_digits, self.predicted_bytes, 1e-6),
            "encoding": written(three_digits, self.encoding_s, 1e3),
        }


@dataclass(frozen=True)
class TimeHooks:
    """Times a step of one model by each method. A call runs on every rank.

    Attributes:
        methods: those of `METHODS` that take turns.
    """

    model: str
    methods: tuple[str, ...] = (*METHODS, *ROUNDS)
    num_turns: int = 3
    place: BenchSite = HERE

    def __call__(self) -> list[HookCell]:
        """Returns a cell for each method, the same on all ranks."""
        with session(with_ours) as comm:
            return self._measure(comm)

    def _measure(self, comm: Communicator) -> list[HookCell]:
        module, batch = make(self.model, rank=comm.rank)
        methods = {name: _method(name, copy.deepcopy(module), batch) for name in self.methods}
        for name, method in methods.items():
            method.find_pace()
            if dist.get_rank() == 0:
                print(f"{PROGRESS}{self.model}: {name} runs", flush=True)
        turns_s = take_turns({name: method.turn_s for name, method in methods.items()}, self.num_turns)
        plain_s, alone_s = turns_s.get("plain"), turns_s.get("alone")
        compute_s, update_s = next((method.parts_s() for name, method in methods.items() if name in OURS), (0.0, 0.0))
        adding_s, measured = encoding.adding_s(), measured_in(comm)
        predicted = {
            name: method.predicted(Prices(measured, adding_s=adding_s), compute_s, update_s, **OURS[name])
            for name, method in methods.items()
            if name in OURS
        }
        steps_s = {name: slowest([found.step_s])[0] for name, found in predicted.items()}
        return [
            HookCell(
                place=self.place.title(comm.world_size, len(comm.hosts)),
                name=name,
                model=self.model,
                step_s=turns_s[name],
                ratio=None if plain_s is None else statistics.median(map(float.__truediv__, plain_s, turns_s[name])),
                of_alone=None if alone_s is None else statistics.median(map(float.__truediv__, alone_s, turns_s[name])),
                link_bytes=method.sent() if self.place.bed is not None else None,
                encoding_s=method.encoding_s(),
                predicted_bytes=predicted[name].link_bytes if name in predicted else None,
                predicted_s=steps_s.get(name),
            )
            for name, method in methods.items()
        ]


def _method(name: str, module: nn.Module, batch: Any) -> Method:
    return Rounds(module, batch, ROUNDS[name]) if name in ROUNDS else Method(METHODS[name](module), batch)


class Method(Training):
    """Trains by one method, and measures the time of encoding."""

    def __init__(self, replica: nn.Module, batch: Any) -> None:
        super().__init__(replica, batch, OPTIMIZERS["sgd"](replica.parameters()))
        self._clocked = Clocked(replica) if isinstance(replica, Replica) and replica.compression else None
        self._busy_s: list[float] = []  # of a step, by turn: without waiting for gradients

    def find_pace(self) -> None:
        self.steps_s(WARM_UP_STEPS - 1)
        self.num_steps = num_repetitions(slowest(self.steps_s(1))[0], least=1)
        if self._clocked is not None:
            self._clocked.encoding_s = 0.0

    def turn_s(self) -> float:
        self._busy_s.append(0.0)
        return super().turn_s()

    def steps_s(self, num_steps: int) -> list[float]:
        waited_s, steps_s = self.waited_s(), super().steps_s(num_steps)
        if self._busy_s:  # else it warms up
            self._busy_s[-1] = (sum(steps_s) - self.waited_s() + waited_s) / num_steps
        return steps_s

    def parts_s(self) -> tuple[float, float]:
        """Returns the times of a forward and backward without the waiting, and of an update, which is the last one."""
        start_s = now_s()
        self.optimizers[0].step()
        update_s = now_s() - start_s
        compute_s, update_s = slowest([statistics.median(self._busy_s) - update_s, update_s])
        return compute_s, update_s

    def predicted(
        self, prices: Prices, compute_s: float, update_s: float, *, hook: Any = None, wire: Any = None
    ) -> Forecast:
        """Returns what such a step sends and takes: backward, twice as long as forward, makes gradients evenly."""
        assert isinstance(self.replica, DistributedDataParallel)
        backward_s, made = 2 / 3 * compute_s, 0
        slots = [[(each.name, each.parameter) for each in bucket.slots] for bucket in self.replica.buckets]
        buckets = [[Gradient(name, tuple(p.shape), p.dtype, 0.0) for name, p in bucket] for bucket in slots]
        num_bytes, ready = sum(map(bytes_of, buckets)), []
        for bucket in buckets:
            made += bytes_of(bucket)
            ready.append(tuple(each._replace(ready_s=backward_s * made / num_bytes) for each in bucket))
        work = Work(
            num_samples=1, before_s=compute_s - backward_s, update_s=update_s, other_s=0.0, buckets=tuple(ready)
        )
        sent, shares = None, prices.measured.allocated is not None
        if hook is not None:
            sent = encoding.dispatches(work.buckets, hook, prices.hosts, shares_memory=shares)
        setup = Setup(prices=prices, batch=prices.num_ranks, wire=wire, cores=available_cores())
        return forecast(work, setup, sent)

    def encoding_s(self) -> float | None:
        """Returns the processor time of a rank for encoding and decoding in a step, of the slowest rank."""
        return None if self._clocked is None else slowest([self._clocked.encoding_s / self.num_counted])[0]


class Rounds(Method):
    """Trains by rounds, each with its exchange."""

    def __init__(self, module: nn.Module, batch: Any, delay: int) -> None:
        super().__init__(BucketedDataParallel(module, wire="int8"), batch)
        rounds = LocalSGD(every=EVERY, delay=delay)
        self._strategy = (Streaming if delay else LocalSteps)(self.replica, self.optimizers[0], rounds)
        self._number = 0

    def step(self) -> None:
        inputs, targets = self.batch
        self._number += 1
        is_last = self._number % EVERY == 0
        self.optimizers[0].zero_grad(set_to_none=True)
        with self._strategy.micro_batch(is_last=is_last):
            loss = loss_of(self.replica(inputs), targets)
            loss.backward()
        if is_last:
            strategy.step(self._strategy)
        self.loss = loss.detach()

    def find_pace(self) -> None:
        self.steps_s(EVERY + EVERY // 2)  # so that a round ends in the midst of a turn, and all of its exchange counts
        self.num_steps = EVERY

    def of_turn(self, steps_s: Sequence[float]) -> float:
        return statistics.fmean(steps_s)  # an exchange counts wherever it is


class Clocked:
    """Stands for a communicator, and measures what a hook does outside of its collectives."""

    def __init__(self, replica: Replica) -> None:
        self._comm, self.encoding_s = replica.comm, 0.0
        compression = replica.compression
        assert compression is not None
        compression.comm = self  # type: ignore[assignment]

    def chain(self, function: Callable[[], Any], **how: Any) -> Any:
        def run() -> None:
            start_s = thread_time()
            function()
            self.encoding_s += thread_time() - start_s

        return self._comm.chain(run, **how)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if name not in ("all_reduce", "all_gather_", "sum_in_host"):
            return found

        def outside(*args: Any, **how: Any) -> Any:
            start_s = thread_time()
            try:
                return found(*args, **how)
            finally:
                self.encoding_s -= thread_time() - start_s

        return outside


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, workers="2", least=1, turns=9)
    add_models(parser)
    usual = ",".join((*METHODS, *ROUNDS))
    parser.add_argument("--methods", default=usual, metavar="NAME,NAME,…", help="what to time (default: all)")
    sys.exit(respond(parser, parser.parse_args(), run))


def run(options: argparse.Namespace) -> str:
    """Times what was asked for; the report is printed."""
    where, models, methods = place_of(options), models_of(options), tuple(split("--methods", options.methods))
    refuse_unknown("method", methods, (*METHODS, *ROUNDS))
    run_jobs(options, [TimeHooks(model, methods, options.turns, where) for model in models], HookCell, where)
    return ""


if __name__ == "__main__":
    main()
