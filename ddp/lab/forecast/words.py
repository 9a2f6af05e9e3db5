"""Says in lines of text what a forecast is of, what a step takes, what would be faster, and how long the loss takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ddp.collectives.simulate import equal_hosts
from ddp.comm.flat_collectives import possible_routes
from ddp.lab.forecast import encoding
from ddp.lab.forecast.question import Asked, Forecaster
from ddp.lab.forecast.replay import Forecast
from ddp.lab.forecast.to_loss import ToLoss, batches_for, first_reason, to_loss
from ddp.units import counted, format_time, three_digits

BUCKETS_MB = (1.0, 5.0, 25.0, 100.0)
NEARLY = 0.95  # forecasts within 5 % of each other count as equal


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


def what_would_buy(forecaster: Forecaster, asked: Asked, found: Forecast) -> list[str]:
    """Returns a line each for the best algorithm, bucket size and hook or wire format."""
    routes = possible_routes(
        equal_hosts(asked.num_ranks, asked.per_host), shared_memory=forecaster.measured(asked).allocated is not None
    )
    has_choice = asked.num_ranks > asked.per_host and asked.strategy == "replicated"  # else memory, or no all-reduce
    kinds: dict[str, dict[str, Asked]] = {}
    if has_choice:
        kinds["algorithm"] = {f"comm.algorithm={name}": replace(asked, algorithm=name) for name in ("auto", *routes)}
    kinds["bucket size"] = {f"replica.bucket_cap_mb={mb:g}": replace(asked, bucket_mb=mb) for mb in BUCKETS_MB}
    if has_choice:
        plain = replace(asked, hook="none", wire=None)
        kinds["hook"] = {"hook=none": plain}
        kinds["hook"] |= {f"replica.wire={wire}": replace(plain, wire=wire) for wire in encoding.WIRES}
        hooks = encoding.HOOKS if encoding.has_room(forecaster.work_for(asked).buckets) else ()
        kinds["hook"] |= {f"hook={name}": replace(plain, hook=name) for name in hooks}
    now_s = forecaster.of(asked, even=True).step_s
    lines = []
    for kind, choices in kinds.items():
        steps_s = {name: forecaster.of(choice, even=True).step_s for name, choice in choices.items()}
        best = min(steps_s, key=lambda name: steps_s[name])
        is_better = steps_s[best] < NEARLY * now_s
        bought = f"step {format_time(steps_s[best])}, {now_s / steps_s[best]:.2f} times as fast" if is_better else ""
        lines.append(f"  best {kind:<12}{best if is_better else 'as it is':<32}{bought}".rstrip())
    return ["what would buy more:", *lines]


def to_the_loss(
    forecaster: Forecaster, asked: Asked, found: Forecast, noise_scale: float | None, num_steps: float | None
) -> list[str]:
    """Returns steps, time and worker-hours to the profiled run's own loss, and why workers stop paying.

    Args:
        noise_scale, num_steps: of the run; None: not known.
    """
    reasons = _reasons(forecaster, asked, noise_scale)
    if num_steps is None:
        why = "it was there to be measured, or has no summary.json"
        return ["", *reasons, f"(time and worker-hours to the loss of the run are not known: {why})"]
    known_batch = forecaster.profile.batch

    def reached(batch: int) -> ToLoss:
        return to_loss(
            batch,
            found.step_s if batch == asked.batch else forecaster.of(replace(asked, batch=batch)).step_s,
            num_ranks=asked.num_ranks,
            noise_scale=noise_scale or 0.0,  # at the same batch it plays no part
            num_steps=num_steps,
            known_batch=known_batch,
        )

    shown = [("the same", reached(known_batch))] if known_batch >= asked.num_ranks else []
    if noise_scale is not None:
        batches = [batch for batch in batches_for(asked.num_ranks, known_batch) if batch >= asked.num_ranks]
        shown.append(("the best", min(map(reached, batches), key=lambda each: each.seconds)))
    lines = [
        f"  at {name} batch {each.batch:>8,}: {each.num_steps:,.0f} steps, {_duration(each.seconds)}, "
        f"{each.worker_hours:.3g} worker-hours"
        for name, each in shown
    ]
    if noise_scale is None:
        how = "more than 100 steps, with several workers or with batch.micro_size"
        lines.append(f"  at another batch: not known without a noise scale, which a run measures in {how}")
        return ["", "to the loss of the run:", *lines, *reasons]
    return ["", f"to the loss of the run, whose noise scale is {noise_scale:,.0f} samples:", *lines, *reasons]


def _reasons(forecaster: Forecaster, asked: Asked, noise_scale: float | None) -> list[str]:
    """Returns a sentence about why workers stop paying, and from how many on."""
    batch, most = forecaster.profile.batch, min(forecaster.profile.batch, max(64, 4 * asked.num_ranks), 1024)
    numbers = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    efficiencies = {}
    for number in numbers:
        per_host = min(number, asked.per_host)
        if number > per_host and asked.num_ranks == asked.per_host:
            break  # nobody has said what is between hosts
        there = replace(asked, num_ranks=number, per_host=per_host, batch=batch, algorithm="auto")
        efficiencies[number] = forecaster.efficiency(forecaster.of(there, even=True))
    by_share, by_noise = first_reason(efficiencies, noise_scale=noise_scale, batch=batch)
    tried = max(efficiencies)
    share = f"at the same batch, half of a worker is lost from {by_share} workers on, to fixed costs and communication"
    noise = f"with a growing batch, half of the samples are lost from {by_noise} workers on, to the noise scale"
    if by_share is None and by_noise is None:
        return [f"workers keep paying up to {counted(tried, 'worker')} at least"] if tried > 1 else []
    if by_noise is None or (by_share is not None and by_share <= by_noise):
        other = "" if by_noise is None else f"; {noise}"
        return [f"why workers stop paying: {share}{other}"]
    return [f"why workers stop paying: {noise}{'' if by_share is None else f'; {share}'}"]


def _duration(seconds: float) -> str:
    return format_time(seconds) if seconds < 120 else f"{seconds / 60:,.1f} min"
