"""Forecasts a profiled run on other workers, hosts and links.

    python -m ddp train run.name=one cluster.workers=1 profile.steps=5 …      first, a run with a profile
    python -m ddp forecast runs/one --ranks 64 --per-host 8 --rate 10gbit --alpha 50us --hook powersgd
    python -m ddp forecast runs/one --ranks 4 --measure                         4 workers of this host, tried here
    python -m ddp forecast runs/one runs/SWEEP --ranks 8                        and how far off it is where it was tried
    python -m ddp forecast runs/one --ranks 8 --register runs/SWEEP             before the runs of a sweep are made

ddp/bench/forecast/ says how a step is replayed, docs/scaling.md what the answer means.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from ddp.bench.forecast import encoding
from ddp.bench.forecast.links_here import measured_here, taken_here
from ddp.bench.forecast.prices import measured_of, threads_of_a_rank
from ddp.bench.forecast.question import Asked, Forecaster, asked_of
from ddp.bench.forecast.registered import Registered, register, settings_of
from ddp.bench.forecast.replay import Forecast
from ddp.bench.forecast.setup import STRATEGIES
from ddp.bench.forecast.slow_down import slow_down
from ddp.bench.forecast.words import headline, step_of, to_the_loss, what_would_buy
from ddp.bench.forecast.work import work_of
from ddp.bench.scaling.foreseen import deviations, foreseen
from ddp.bench.scaling.runs import read_runs
from ddp.commands.command import parser_of, rate_of, respond, time_of
from ddp.commands.finished import settings_for
from ddp.errors import ConfigError
from ddp.process.arguments import positive, whole
from ddp.process.memory import available_cores
from ddp.train.monitor.profile import FILE, Profile, read_profile
from ddp.train.reports.results import read_metrics, read_summary
from ddp.train.steps.callbacks import MEASURED
from ddp.units import counted, format_time, lines_of_table

MOST_RANKS = 10_000
UNCHECKED = "not checked: name runs with a profile, or a sweep, after the first run, to see how far off forecasts are"


def main(words: Sequence[str]) -> int:
    """Forecasts what the words ask."""
    parser = parser_of("forecast", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run with a profile")
    parser.add_argument("others", type=Path, nargs="*", help="runs, or sweeps, to compare forecasts with")
    parser.add_argument("--ranks", type=whole(1, MOST_RANKS), required=True, metavar="N", help="workers of all hosts")
    parser.add_argument("--per-host", type=whole(1), metavar="N", help="workers on each host (default: all on one)")
    parser.add_argument("--batch", type=whole(1), metavar="N", help="samples of a step (default: as in the run)")
    parser.add_argument("--rate", type=rate_of, help="bandwidth between hosts, as 10gbit (default: as measured)")
    parser.add_argument("--alpha", type=time_of, metavar="TIME", help="latency between hosts (default: as measured)")
    parser.add_argument("--cores", type=whole(1), metavar="N", help="cores of each host (default: as in the run)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--hook", choices=["none", *encoding.HOOKS], default="none", help="powersgd1: of rank 1")
    how.add_argument("--wire", choices=encoding.WIRES, help="format in which gradients travel")
    parser.add_argument("--algorithm", default="auto", help="of the all-reduces (default: %(default)s)")
    parser.add_argument("--bucket-mb", type=positive, metavar="MB", help="size of a bucket (default: as in the run)")
    parser.add_argument("--strategy", choices=list(STRATEGIES.values()), help="default: as in the run")
    slower = parser.add_mutually_exclusive_group()
    slower.add_argument("--measure", action="store_true", help="measure here how fast workers of a host compute")
    slower.add_argument("--slow-down", type=positive, metavar="FACTOR", help="of a sample there (default: by cores)")
    parser.add_argument("--register", type=Path, metavar="SWEEP", help="write to SWEEP/predictions/, before its runs")
    options = parser.parse_args(words)
    options.words = words
    return respond(parser, options, answer)


# --- what is asked ---------------------------------------------------------------------------------------------------


def answer(options: argparse.Namespace) -> str:
    """Returns the answer."""
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
    found = forecaster.of(asked)
    lines = [*headline(options.run, forecaster, asked), *step_of(forecaster, found)]
    if asked.num_ranks > 1:
        lines += ["", *what_would_buy(forecaster, asked, found)]
    lines += to_the_loss(forecaster, asked, found, *_noise_and_steps(options.run))
    lines += ["", *(checked or [UNCHECKED])]
    if options.register is not None:
        lines += ["", f"registered: {register(options.register, _registered(options, forecaster, asked, found))}"]
    return "\n".join(lines)


def _forecaster(options: argparse.Namespace, profile: Profile, asked: Asked) -> Forecaster:
    cores, here = options.cores or profile.cores[0], available_cores()
    threads = threads_of_a_rank(cores, asked.per_host, profile.threads)
    known, num_known = measured_of(profile), max(map(len, profile.hosts))
    lacks_memory = asked.per_host > 1 and (known is None or known.allocated is None)
    links, num_hosts = (options.alpha, options.rate), -(-asked.num_ranks // asked.per_host)
    if num_hosts > 1 and len(profile.hosts) == 1 and None in links:
        raise ConfigError(f"{options.run} was profiled on one host: give --alpha and --rate of the links between hosts")
    if num_hosts == 1 and links != (None, None):
        raise ConfigError("--alpha and --rate are of the links between hosts, and this is one host: give --per-host")
    if asked.num_ranks > 1 and (options.measure or lacks_memory or known is None):
        num_known = max(2, min(asked.per_host, here))
        found = measured_here(num_known, threads)
        between = found.network.between if known is None else known.network.between
        known = replace(found, network=replace(found.network, between=between))
    factor, taken_s = options.slow_down, 0.0
    torch.set_num_threads(threads)  # as in a worker, for what hooks take to encode
    if options.measure:
        if asked.per_host > here:
            have = f"{asked.per_host} workers of a host cannot be tried on {counted(here, 'core')}"
            raise ConfigError(f"--measure: {have}; give --slow-down")
        factor = slow_down(
            settings_for(options.run, []),
            before=round(work_of(profile).num_samples),
            samples=-(-asked.batch // asked.num_ranks),
            num_ranks=asked.per_host,
            threads=threads,
        )
        taken_s = taken_here() if num_hosts > 1 else 0.0
    return Forecaster(
        profile,
        known,
        num_known=num_known,
        alpha_s=options.alpha,
        rate_bit_s=options.rate,
        cores=cores,
        slow_down=None if factor is None else (asked.per_host, factor),
        taken_s=taken_s,
    )


def _noise_and_steps(run: Path) -> tuple[float | None, float | None]:
    """Returns the noise scale of a run as it last was, and its steps; None for what is not known.

    A run that was there to be measured has no loss that its steps were for.
    """
    try:
        scales = [entry["noise_scale"] for entry in read_metrics(run / "metrics.jsonl") if entry.get("noise_scale")]
        summary = read_summary(run)
    except (OSError, ValueError):
        return None, None
    steps = None if summary.get("stopped_by") == MEASURED else summary.get("steps")
    return scales[-1] if scales else None, float(steps) if steps else None


# --- where it was measured -------------------------------------------------------------------------------------------


def _checked(folders: Sequence[Path], forecaster: Forecaster) -> list[str]:
    """Returns a table of runs: measured, forecast, the naive guess, and what was registered; and what is not in it."""
    titles = ("run", "workers", "measured", "±", "forecast", "÷ measured", "naive", "÷ measured", "registered")
    rows: list[Sequence[str]] = [titles]
    notes: list[str] = []
    for folder in folders:
        runs, untold = read_runs(folder, takes_one=True)
        notes += untold + [f"{run.name} has no {FILE}: run it with profile.steps=5." for run in runs if not run.profile]
        profiled = [(run, run.profile) for run in runs if run.profile is not None]
        registered, untold = foreseen(folder, runs)
        notes += untold
        before, deviation = {each.run.name: f"{each.ratio:.2f}" for each in registered}, deviations(profiled)
        for run, profile in profiled:
            try:
                asked, here = _asked_of(profile, forecaster.profile), forecaster.as_measured(profile)
            except ConfigError as error:
                notes.append(f"{run.name} is left out: {error}.")
                continue
            spread = "" if (found := deviation[run.name]) is None else f"{found:.0%}"
            expected = [here.of(asked).step_s, here.naive_s(asked)]
            figures = (word for each in expected for word in (format_time(each), f"{each / profile.step_s:.2f}"))
            measured = format_time(profile.step_s), spread
            rows.append((run.name, str(run.workers), *measured, *figures, before.get(run.name, "")))
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


def _registered(options: argparse.Namespace, forecaster: Forecaster, asked: Asked, found: Forecast) -> Registered:
    threads = forecaster.threads_of(asked.per_host)
    return Registered(
        date=datetime.now(UTC).isoformat(),
        settings=settings_of(forecaster.profile, asked, threads=threads),
        how=shlex.join(["forecast", *options.words]),
        step_s=found.step_s,
        naive_s=forecaster.naive_s(asked),
    )
