"""Forecasts a profiled run on other workers, hosts and links.

    python -m ddp train run.name=one cluster.workers=1 profile.steps=5 …      first, a run with a profile
    python -m ddp forecast runs/one --ranks 64 --per-host 8 --rate 10gbit --alpha 50us --hook powersgd
    python -m ddp forecast runs/one runs/SWEEP --ranks 8                        and how far off it is where it was tried

ddp/lab/forecast/replay.py describes how a step is replayed, docs/scaling.md how to read the answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import torch

from ddp.collectives.cost import equal_hosts
from ddp.comm.flat_collectives import possible_routes
from ddp.commands.registry import parser_of, rate_of, respond, time_of
from ddp.errors import ConfigError
from ddp.lab.forecast import encoding
from ddp.lab.forecast.prices import (
    Dispatch,
    Measured,
    Prices,
    cores_of_a_rank,
    measured_here,
    measured_on,
    threads_of_a_rank,
)
from ddp.lab.forecast.replay import STRATEGIES, Forecast, Setup, Strategy, forecast, naive_s
from ddp.lab.forecast.work import Work, work_of
from ddp.lab.scaling.runs import read_runs
from ddp.process.arguments import positive, whole
from ddp.process.memory import available_cores
from ddp.setting import Narrow
from ddp.train.reports.profile import FILE, Profile, read_profile
from ddp.units import counted, format_time, lines_of_table, three_digits

MOST_RANKS = 10_000
UNCHECKED = "not checked: name runs with a profile, or a sweep, after the first run, to see how far off forecasts are"


def main(words: Sequence[str]) -> int:
    """Makes the forecast that the command line asks for."""
    parser = parser_of("forecast", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run with a profile")
    about = "runs, or sweeps, to compare forecasts with"
    parser.add_argument("others", type=Path, nargs="*", default=[], help=about)
    parser.add_argument("--ranks", type=whole(1, MOST_RANKS), required=True, metavar="N", help="workers of all hosts")
    parser.add_argument("--per-host", type=whole(1), metavar="N", help="workers on each host (default: all on one)")
    parser.add_argument("--batch", type=whole(1), metavar="N", help="samples of a step (default: as in the run)")
    parser.add_argument("--rate", type=rate_of, help="bandwidth between hosts, as 10gbit")
    parser.add_argument("--alpha", type=time_of, metavar="TIME", help="latency between hosts, as 50us")
    parser.add_argument("--cores", type=whole(1), metavar="N", help="cores of each host (default: as in the run)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--hook", choices=["none", *encoding.HOOKS], default="none", help="powersgd1: of rank 1")
    how.add_argument("--wire", choices=encoding.WIRES, help="format in which gradients travel")
    parser.add_argument("--algorithm", default="auto", help="of the all-reduces (default: %(default)s)")
    parser.add_argument("--bucket-mb", type=positive, metavar="MB", help="size of a bucket (default: as in the run)")
    parser.add_argument("--strategy", choices=list(STRATEGIES.values()), help="default: as in the run")
    return respond(parser, parser.parse_args(words), run)


# --- the question ----------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> str:
    """Returns the text that the command prints."""
    profile = read_profile(options.run)
    if profile.strategy not in STRATEGIES and options.strategy is None:
        raise ConfigError(f"{options.run} was made by {profile.strategy}, which forecasts do not know: give --strategy")
    per_host = min(options.per_host or options.ranks, options.ranks)
    asked = Asked(
        options.ranks,
        per_host,
        options.batch or profile.batch,
        options.strategy or STRATEGIES[profile.strategy],
        options.algorithm,
        options.hook,
        options.wire,
        options.bucket_mb,
    )
    forecaster = _forecaster(options, profile, asked)
    checked = _checked(options.others, forecaster) if options.others else []
    lines = [*headline(options.run, forecaster, asked), *step_of(forecaster, forecaster.of(asked))]
    return "\n".join([*lines, "", *(checked or [UNCHECKED])])


def _forecaster(options: argparse.Namespace, profile: Profile, asked: Asked) -> Forecaster:
    cores = options.cores or profile.cores[0]
    threads = threads_of_a_rank(cores, asked.per_host, profile.threads)
    hosts, known, num_known = equal_hosts(asked.num_ranks, asked.per_host), None, 1
    if len(hosts) == 1 and not options.others and (options.alpha, options.rate) != (None, None):
        raise ConfigError("--alpha and --rate are of the links between hosts, and this is one host: give --per-host")
    measured_on(None, hosts, alpha_s=options.alpha, rate_bit_s=options.rate)  # refuses before anything is measured
    if asked.num_ranks > 1 or options.others:
        num_known = max(2, min(asked.per_host, available_cores()))
        known = measured_here(num_known, threads)
    torch.set_num_threads(threads)  # as in a worker, for the seconds that hooks take to encode
    return Forecaster(
        profile=profile,
        known=known,
        num_known=num_known,
        alpha_s=options.alpha,
        rate_bit_s=options.rate,
        cores=cores,
    )


# --- where it was measured -------------------------------------------------------------------------------------------


def _checked(folders: Sequence[Path], forecaster: Forecaster) -> list[str]:
    """Returns a table of runs: measured, by windows, forecast, the naive guess; and notes on the other runs."""
    titles = ("run", "workers", "measured", "±", "forecast", "÷ measured", "naive", "÷ measured")
    rows: list[Sequence[str]] = [titles]
    notes: list[str] = []
    for folder in folders:
        runs, untold = read_runs(folder, takes_one=True)
        notes += untold + [f"{run.name} has no {FILE}: run it with profile.steps=5." for run in runs if not run.profile]
        for run in runs:
            if (profile := run.profile) is None:
                continue
            try:
                asked = _asked_of(profile, forecaster.profile)
                here = replace(forecaster, cores=profile.cores[0])
                expected = [here.of(asked).step_s, here.naive_s(asked)]
            except ConfigError as error:
                notes.append(f"{run.name} is left out: {error}.")
                continue
            spread = max(abs(each / profile.step_s - 1) for each in profile.windows_s)
            figures = (word for each in expected for word in (format_time(each), f"{each / profile.step_s:.2f}"))
            rows.append((run.name, str(run.workers), format_time(profile.step_s), f"{spread:.0%}", *figures))
    return [*(lines_of_table(rows) if len(rows) > 1 else []), *notes]


def _asked_of(profile: Profile, ours: Profile) -> Asked:
    """Returns the question whose answer is a run.

    Raises:
        ConfigError: it is of another model, or forecasts do not know its hook.
    """
    if (profile.model, profile.num_parameters) != (ours.model, ours.num_parameters):
        size = f"{profile.num_parameters:,} parameters"
        raise ConfigError(f"it trained {profile.model} with {size}, and the forecast is of {ours.model}")
    return asked_of(profile)


# --- the answer -------------------------------------------------------------------------------------------------------


NEARLY = 0.95  # figures within 5 % count as equal


def headline(run: Path, forecaster: Forecaster, asked: Asked) -> list[str]:
    """Returns the profiled and the requested configuration, as lines."""
    profile, measured = forecaster.profile, forecaster.measured(asked)
    num_hosts = len(measured.network.hosts)
    between = measured.network.between
    links = ""
    if num_hosts > 1:
        rate = f"{8e-9 / between.beta_s:.3g} Gbit/s of payload" if between.beta_s else "any rate"
        links = f", {rate} and {format_time(between.alpha_s)} between hosts"
    how = [asked.strategy, f"batch {asked.batch:,}"]
    how += [f"hook={asked.hook}"] * (asked.hook != "none") + [f"wire={asked.wire}"] * (asked.wire is not None)
    there = f"{counted(asked.num_ranks, 'worker')} on {counted(num_hosts, 'host')}{links}: {', '.join(how)}"
    profiled = f"{counted(profile.world_size, 'worker')}, batch {profile.batch:,}"
    model = f"{profile.model} with {profile.num_parameters:,} parameters"
    lines = [f"profiled: {model}, {profiled} ({run})", f"asked:    {there}"]
    factor = forecaster.slow_down_of(asked.per_host)
    if asked.num_ranks > 1 and abs(factor - 1) > 1 - NEARLY:
        lines.append(f"computing a sample takes a worker {factor:.2f} times as long as in the profile")
    return lines


def step_of(forecaster: Forecaster, found: Forecast) -> list[str]:
    """Returns the time of a step and its parts, its samples a second, and how gradients travel."""
    parts = [f"computing {format_time(found.computing_s)}"]
    for seconds, name in ((found.exposed_s, "communication"), (found.waiting_s, "waiting for stragglers")):
        if abs(seconds) > (1 - NEARLY) * found.step_s:
            parts.append(f"{name} {format_time(seconds)}")
    of_one = ""
    if found.num_ranks > 1:
        of_one = f", {forecaster.efficiency(found):.0%} of {found.num_ranks:,} times one worker"
    paces = [each / forecaster.profile.step_s for each in forecaster.profile.windows_s]
    least, most = (format_time(found.step_s * each) for each in (min(paces), max(paces)))
    doubt = f"{least} to {most} by windows of the profile" if len(paces) > 1 else "how far off is unknown: one step"
    lines = [
        f"  step         {format_time(found.step_s)} ({doubt}): {', '.join(parts)}",
        f"  samples/s    {found.samples_per_s:,.0f}{of_one}",
    ]
    if found.num_ranks > 1:
        way = [f"{found.algorithm or 'slices'}", f"{format_time(found.network_s)} in all"]
        way += [f"encoding {format_time(found.encoding_s)}"] * (found.encoding_s > 0)
        way += [f"{three_digits(found.link_bytes / 1e6)} MB leave a host"] * (found.link_bytes > 0)
        lines.append(f"  reductions   {', '.join(way)}")
    return lines


# --- questions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """One question; `hook` is a name of `encoding.HOOKS` or "none"."""

    num_ranks: int
    per_host: int
    batch: int
    strategy: Strategy
    algorithm: str = "auto"
    hook: str = "none"
    wire: Narrow | None = None
    bucket_mb: float | None = None


def asked_of(profile: Profile) -> Asked:
    """Returns the question whose answer is the profiled run itself.

    Raises:
        ConfigError: forecasts do not know its strategy, or its hook.
    """
    if profile.strategy not in STRATEGIES:
        raise ConfigError(f"it was made by {profile.strategy}, and forecasts know {', '.join(STRATEGIES)}")
    names = {repr(hook): name for name, hook in encoding.HOOKS.items()}
    if profile.hook is not None and profile.hook not in names:
        raise ConfigError(f"it used the hook {profile.hook}, and forecasts know {', '.join(names)}")
    if profile.wire not in (None, "fp32", *encoding.WIRES):
        raise ConfigError(f"its wire format was {profile.wire}, and forecasts know {', '.join(encoding.WIRES)}")
    routes = possible_routes(tuple(map(tuple, profile.hosts)), shared_memory=True).values()
    return Asked(
        profile.world_size,
        max(map(len, profile.hosts)),
        profile.batch,
        STRATEGIES[profile.strategy],
        algorithm=profile.algorithm if any(each.matches(profile.algorithm) for each in routes) else "auto",
        hook=names.get(profile.hook or "", "none"),
        wire=None if profile.wire == "fp32" else cast("Narrow | None", profile.wire),
    )


@dataclass(frozen=True, kw_only=True)
class Forecaster:
    """Answers questions about one profiled run.

    Attributes:
        known: figures of this host's memory, and of the links in it; None: there are none.
        num_known: the ranks whose memory that was.
        cores: of a host.
        alpha_s, rate_bit_s: of the links between hosts; None: nothing says.
    """

    profile: Profile
    known: Measured | None
    num_known: int
    cores: int
    alpha_s: float | None = None
    rate_bit_s: float | None = None

    @cached_property
    def work(self) -> Work:
        """Returns the computation of a rank in a profiled step."""
        return work_of(self.profile)

    def slow_down_of(self, per_host: int) -> float:
        """Returns how many times as long ranks of a host compute that share its cores evenly."""
        profiled = cores_of_a_rank(self.profile.cores[0], len(self.profile.hosts[0]), self.profile.threads)
        return profiled / cores_of_a_rank(self.cores, per_host, self.profile.threads)

    def work_for(self, asked: Asked) -> Work:
        """Returns the computation of a rank there."""
        work = self.work if asked.num_ranks == 1 else self.work.slower(self.slow_down_of(asked.per_host))
        return work if asked.bucket_mb is None else work.in_buckets(asked.bucket_mb)

    def measured(self, asked: Asked) -> Measured:
        """Returns links and memory there."""
        return measured_on(
            self.known,
            equal_hosts(asked.num_ranks, asked.per_host),
            alpha_s=self.alpha_s,
            rate_bit_s=self.rate_bit_s,
            num_measured=self.num_known,
        )

    def setup(self, asked: Asked) -> Setup:
        """Returns the ranks that are asked about."""
        adding_s = None if asked.wire is None else encoding.adding_s()
        prices = Prices(self.measured(asked), asked.algorithm, adding_s=adding_s)
        return Setup(
            prices=prices,
            batch=asked.batch,
            strategy=asked.strategy,
            wire=asked.wire,
            cores=self.cores,
            threads=threads_of_a_rank(self.cores, asked.per_host, self.profile.threads),
        )

    def of(self, asked: Asked) -> Forecast:
        """Returns a forecast."""
        work, setup = self.work_for(asked), self.setup(asked)
        return forecast(work, setup, self._sent(work, setup, asked))

    def efficiency(self, found: Forecast) -> float:
        """Returns the samples/s of a forecast ÷ (its ranks × the samples/s of one worker)."""
        return found.samples_per_s * self.work.computing_s / self.work.num_samples / found.num_ranks

    def naive_s(self, asked: Asked) -> float:
        """Returns the naive guess: of one worker's step, and bytes ÷ rate."""
        return naive_s(self.work, self.setup(asked))

    def _sent(self, work: Work, setup: Setup, asked: Asked) -> list[Dispatch] | None:
        if asked.hook == "none" or len(setup.prices.hosts) == 1:  # then nothing travels
            return None
        shares, hook = setup.prices.measured.allocated is not None, encoding.HOOKS[asked.hook]
        return encoding.dispatches(work.buckets, hook, setup.prices.hosts, shares_memory=shares)
