"""Forecasts a profiled run on other workers, hosts and links.

    python -m ddp train run.name=one cluster.workers=1 profile.steps=5 …      first, a run with a profile
    python -m ddp forecast runs/one --ranks 64 --per-host 8 --rate 10gbit --alpha 50us --hook powersgd
    python -m ddp forecast runs/one runs/SWEEP --ranks 8                        and how far off it is where it was tried

ddp/lab/forecast/ says how a step is replayed, docs/scaling.md what the answer means.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ddp.commands.command import parser_of, rate_of, respond, time_of
from ddp.errors import ConfigError
from ddp.lab.forecast import encoding
from ddp.lab.forecast.links_here import measured_here
from ddp.lab.forecast.prices import measured_of, threads_of_a_rank
from ddp.lab.forecast.question import Asked, Forecaster, asked_of
from ddp.lab.forecast.replay import Forecast
from ddp.lab.forecast.setup import STRATEGIES
from ddp.lab.scaling.runs import read_runs
from ddp.process.arguments import positive, whole
from ddp.process.memory import available_cores
from ddp.train.monitor.profile import FILE, Profile, read_profile
from ddp.units import counted, format_time, lines_of_table, three_digits

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
    parser.add_argument("--slow-down", type=positive, metavar="FACTOR", help="of a sample there (default: by cores)")
    return respond(parser, parser.parse_args(words), answer)


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
    lines = [*headline(options.run, forecaster, asked), *step_of(forecaster, forecaster.of(asked))]
    return "\n".join([*lines, "", *(checked or [UNCHECKED])])


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
    if asked.num_ranks > 1 and (lacks_memory or known is None):
        num_known = max(2, min(asked.per_host, here))
        found = measured_here(num_known, threads)
        between = found.network.between if known is None else known.network.between
        known = replace(found, network=replace(found.network, between=between))
    torch.set_num_threads(threads)  # as in a worker, for what hooks take to encode
    return Forecaster(
        profile,
        known,
        num_known=num_known,
        alpha_s=options.alpha,
        rate_bit_s=options.rate,
        cores=cores,
        slow_down=None if options.slow_down is None else (asked.per_host, options.slow_down),
    )


# --- where it was measured -------------------------------------------------------------------------------------------


def _checked(folders: Sequence[Path], forecaster: Forecaster) -> list[str]:
    """Returns a table of runs: measured, by windows, forecast, the naive guess; and what is not in it."""
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
                asked, here = _asked_of(profile, forecaster.profile), forecaster.as_measured(profile)
            except ConfigError as error:
                notes.append(f"{run.name} is left out: {error}.")
                continue
            spread = max(abs(each / profile.step_s - 1) for each in profile.windows_s)
            expected = [here.of(asked).step_s, here.naive_s(asked)]
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


# --- what is said -----------------------------------------------------------------------------------------------------


NEARLY = 0.95  # what is within 5 % counts as equal


def headline(run: Path, forecaster: Forecaster, asked: Asked) -> list[str]:
    """Returns what was profiled, and what is asked."""
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
    """Returns what a step takes and of what it consists, its samples a second, and how gradients travel."""
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
