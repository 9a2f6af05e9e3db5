"""Forecasts what the step of a run would have taken on another network, from the run's own profile.

Hosts stay what they were; of a run on one host, each worker gets a host of its own. What communication costs in Python
and in the kernel is counted in as far as `ALPHA_S` covers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ddp.lab.forecast.prices import measured_of
from ddp.lab.forecast.question import Forecaster, asked_of
from ddp.lab.forecast.replay import Forecast
from ddp.train.monitor.profile import Profile

RATES_BIT_S = (1e9, 1e10, 1e11)
ALPHA_S = 50e-6
"""What a round of messages costs between these hosts."""


class Elsewhere(NamedTuple):
    """The step of a run as it is forecast: on the run's own links and memory, and at each of `RATES_BIT_S`."""

    here: Forecast
    there: Sequence[Forecast]


def elsewhere(profile: Profile) -> Elsewhere:
    """Returns forecasts of a profiled run.

    Raises:
        ConfigError: forecasts do not know its strategy or its hook.
    """
    asked, num_hosts = asked_of(profile), len(profile.hosts)
    of_run = partial(Forecaster, profile, measured_of(profile), num_known=asked.per_host, cores=profile.cores[0])
    apart = asked if num_hosts > 1 else replace(asked, per_host=1, algorithm="auto")
    there = [of_run(alpha_s=ALPHA_S, rate_bit_s=rate).of(apart) for rate in RATES_BIT_S]
    return Elsewhere(of_run().of(asked), there)
