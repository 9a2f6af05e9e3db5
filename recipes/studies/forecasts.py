"""Compares forecasts of training steps with the steps: from one worker's profile, on one host or on a bed.

In each turn, one after another:

    alone         rank 0 trains by itself: the step of one worker, from which the naive guess is made
    at once       all ranks train, each by itself: the profile that is forecast from, which has cores and memory shared
    each method   all ranks train together: the step that is forecast

A forecast is made from the turn's own profile, and from links and memory as they were measured before the first turn.
So it does not know the steps that it is compared with.

    python -m ddp bench forecast --workers 1,2 --models digits-cnn,mlp-25m            on this host
    python -m ddp bench forecast --netbed 2x1@1gbit                                   on hosts made for it (root)
    python -m ddp bench forecast --netbed 2x1@100mbit --methods plain,int8,powersgd   which is fastest?

`python -m ddp forecast RUN OTHER …` compares forecasts with runs of your own.

ddp/lab/bench/workloads.py describes the models. Every worker has one thread.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn

from ddp.comm.communicator import Communicator
from ddp.commands.registry import parser_of, respond
from ddp.lab.bench.command import HERE, BenchSite, add_options, place_of, refuse_unknown, run_jobs, split
from ddp.lab.bench.turns import PROGRESS, Cell, session, slowest, take_turns, with_ours
from ddp.lab.bench.variants import OPTIMIZERS, Training
from ddp.lab.bench.workloads import Batch, add_models, loss_of, make, models_of
from ddp.lab.forecast import encoding
from ddp.lab.forecast.prices import Dispatch, Prices, measured_in
from ddp.lab.forecast.replay import Setup, forecast, naive_s
from ddp.lab.forecast.work import Work, work_in
from ddp.process.clock import now_s
from ddp.process.memory import available_cores
from ddp.process.terminal import say
from ddp.replica.bucketed import BucketedDataParallel
from ddp.train.reports.profile import Part, RankStep, Span, bucket_times
from ddp.units import three_digits, written

PLAIN = "plain"
METHODS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {},
    **{wire: {"wire": wire} for wire in encoding.WIRES},
    **{name: {"hook": hook} for name, hook in encoding.HOOKS.items()},
}
"""How gradients travel → keywords of a replica."""


def main(words: Sequence[str]) -> int:
    """Compares the forecasts that the words ask for."""
    parser = parser_of("bench forecast", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, workers="1,2", least=1, turns=3)
    add_models(parser, default="digits-cnn,mlp-25m,resnet18-small-stem,gpt-10m")
    about = f"how gradients travel: some of {', '.join(METHODS)} (default: %(default)s)"
    parser.add_argument("--methods", default=PLAIN, metavar="NAME,NAME,…", help=about)
    return respond(parser, parser.parse_args(words), run)


def run(options: argparse.Namespace) -> str:
    """Compares what was asked for; the report is printed."""
    where, models, methods = place_of(options), models_of(options), tuple(split("--methods", options.methods))
    refuse_unknown("method", methods, METHODS)
    run_jobs(options, [CompareForecasts(model, methods, options.turns, where) for model in models], ForecastCell, where)
    return ""


@dataclass(frozen=True, kw_only=True)
class ForecastCell(Cell):
    """The figures of one model and one method, by turn.

    Attributes:
        measured_s: the median step, on the slowest rank.
        forecast_s, naive_s: its forecasts.
        over_fastest: of the method whose forecast is the least: its step ÷ that of the fastest one.
    """

    legend: ClassVar[Mapping[str, str]] = {
        "model": "what is trained",
        "method": "how gradients travel",
        "measured": "ms of a step, median over turns, on the slowest rank",
        "±": "greatest deviation of a turn from that, %",
        "forecast": "ms of a step, forecast from processes that compute without communicating",
        "forecast ÷ measured": "of the medians",
        "naive": "ms of a step of one worker, and the bytes of its gradients ÷ the rate of the slowest link",
        "naive ÷ measured": "of the medians",
        "chosen ÷ fastest": "measured, of the method whose forecast is the least: the cost of trusting the forecast",
    }
    model: str
    measured_s: Sequence[float]
    forecast_s: Sequence[float]
    naive_s: Sequence[float]
    over_fastest: float | None = None

    def columns(self) -> dict[str, str]:
        measured_s, forecast_s, guess_s = map(statistics.median, (self.measured_s, self.forecast_s, self.naive_s))
        deviation = max(abs(each / measured_s - 1) for each in self.measured_s)
        return {
            "model": self.model,
            "method": self.name,
            "measured": three_digits(measured_s * 1e3),
            "±": f"{100 * deviation:.0f}",
            "forecast": three_digits(forecast_s * 1e3),
            "forecast ÷ measured": three_digits(forecast_s / measured_s),
            "naive": three_digits(guess_s * 1e3),
            "naive ÷ measured": three_digits(guess_s / measured_s),
            "chosen ÷ fastest": written(three_digits, self.over_fastest),
        }


@dataclass(frozen=True)
class CompareForecasts:
    """Compares forecasts of one model with its steps. A call runs on every rank.

    Attributes:
        methods: those of `METHODS` that take turns.
    """

    model: str
    methods: tuple[str, ...] = (PLAIN,)
    num_turns: int = 3
    place: BenchSite = HERE

    def __call__(self) -> list[ForecastCell]:
        """Returns a cell for each method, the same on all ranks."""
        with session(with_ours) as comm:
            return self._measure(comm)

    def _measure(self, comm: Communicator) -> list[ForecastCell]:
        module, batch = make(self.model, rank=comm.rank)
        own = [comm.subgroup([rank]) for rank in range(comm.world_size)][comm.rank]
        assert own is not None
        prices = Prices(measured_in(comm), adding_s=encoding.adding_s())
        alone = Computing(comm, own, copy.deepcopy(module), batch)
        methods = {
            name: Paced(BucketedDataParallel(copy.deepcopy(module), comm=comm, **METHODS[name]), batch)
            for name in self.methods
        }
        for training in (alone, *methods.values()):
            training.find_pace()
        turns: dict[str, Callable[[], float]] = {"alone": alone.by_itself, "at once": alone.at_once}
        turns |= {name: method.turn_s for name, method in methods.items()}
        turns_s = take_turns(turns, self.num_turns)
        cells = chosen([self._cell(comm, name, turns_s[name], alone, prices) for name in self.methods])
        if comm.rank == 0:
            for cell in cells:
                say(f"{PROGRESS}{cell.place}: {cell.columns()}")
        return cells

    def _cell(
        self, comm: Communicator, name: str, measured_s: Sequence[float], alone: Computing, prices: Prices
    ) -> ForecastCell:
        how = METHODS[name]
        setup = partial(Setup, prices=prices, wire=how.get("wire"), cores=alone.cores)
        forecast_s, guesses_s = [], []
        for together, by_itself in zip(alone.works, alone.works_of_one, strict=True):
            here = setup(batch=together.num_samples * comm.world_size)
            sent: list[Dispatch] | None = None
            if "hook" in how:
                shares = prices.measured.allocated is not None
                sent = encoding.dispatches(together.buckets, how["hook"], prices.hosts, shares_memory=shares)
            forecast_s.append(forecast(together, here, sent).step_s)
            guesses_s.append(naive_s(by_itself, here))
        place = self.place.title(comm.world_size, len(comm.hosts))
        return ForecastCell(
            place=place,
            name=name,
            model=self.model,
            measured_s=measured_s,
            forecast_s=[slowest([each])[0] for each in forecast_s],
            naive_s=[slowest([each])[0] for each in guesses_s],
        )


def chosen(cells: Sequence[ForecastCell]) -> list[ForecastCell]:
    """Returns the methods of a model; the one with the least forecast has the cost of choosing it."""
    steps_s = [statistics.median(cell.measured_s) for cell in cells]
    forecasts_s = [statistics.median(cell.forecast_s) for cell in cells]
    place = forecasts_s.index(min(forecasts_s))
    over = steps_s[place] / min(steps_s) if len(cells) > 1 else None
    return [replace(cell, over_fastest=over if number == place else None) for number, cell in enumerate(cells)]


class Paced(Training):
    """Trains in turns of a few steps, because a step on a slow network takes long."""

    least = 4

    def __init__(self, replica: nn.Module, batch: Batch) -> None:
        super().__init__(replica, batch, OPTIMIZERS["sgd"](replica.parameters()))


class Computing(Paced):
    """Trains without the other ranks, and profiles it.

    Attributes:
        works: of each turn in which all ranks trained at once; works_of_one: of each turn of rank 0.
    """

    def __init__(self, comm: Communicator, own: Communicator, module: nn.Module, batch: Batch) -> None:
        super().__init__(BucketedDataParallel(module, comm=own), batch)
        self._comm, self.cores = comm, available_cores()
        self._records: list[RankStep] = []
        self.works: list[Work] = []
        self.works_of_one: list[Work] = []

    def step(self) -> None:
        inputs, targets = self.batch
        began_s = now_s()
        self.optimizers[0].zero_grad(set_to_none=True)
        loss = loss_of(self.replica(inputs), targets)
        forward_s = now_s()
        loss.backward()
        backward_s = now_s()
        self.optimizers[0].step()
        ended_s = now_s()
        self.loss = loss.detach()
        self._records.append(self._record(began_s, forward_s, backward_s, ended_s, len(inputs)))

    def _record(
        self, began_s: float, forward_s: float, backward_s: float, ended_s: float, num_samples: int
    ) -> RankStep:
        assert isinstance(self.replica, BucketedDataParallel)
        logged = self.replica.logging_data()
        reduced_s = sum(each["done_s"] - each["launched_s"] for each in logged["buckets"])
        edges_s = [0.0, *(each - began_s for each in (forward_s, backward_s - reduced_s, backward_s, ended_s))]
        parts: list[Part] = ["forward", "backward", "communication", "update"]
        spans = [Span(part, *edges) for part, edges in zip(parts, pairwise(edges_s), strict=True)]
        return RankStep(
            step=len(self._records) + 1,
            began_s=began_s,
            num_samples=num_samples,
            backward_began_s=forward_s - began_s,
            buckets=list(map(bucket_times, logged["buckets"])),
            spans=spans,
        )

    def by_itself(self) -> float:
        """Returns the median step of rank 0, while the others wait."""
        self._comm.barrier()
        if self._comm.rank == 0:
            self._profiled()
        self.works_of_one.append(work_in(_of_all(self._records)[0], in_foreground=True))
        return self.works_of_one[-1].computing_s

    def at_once(self) -> float:
        """Returns the median step of the slowest rank, while all ranks train."""
        self._comm.barrier()
        took_s = statistics.median(self._profiled())
        self.works.append(work_in(list(chain.from_iterable(_of_all(self._records))), in_foreground=True))
        return slowest([took_s])[0]

    def _profiled(self) -> list[float]:
        self._records = []
        return self.steps_s(self.num_steps)


def _of_all(mine: Any) -> list[Any]:
    """Returns each rank's object, by torch's gather, because `comm/objects.py` sends plain values alone. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
