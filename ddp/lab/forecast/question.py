"""Puts questions to one profiled run, such as the step on other ranks, with a hook, or in other buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from ddp.collectives.simulate import equal_hosts
from ddp.comm.calibrate import Measured
from ddp.comm.flat_collectives import possible_routes
from ddp.errors import ConfigError
from ddp.lab.forecast import encoding
from ddp.lab.forecast.prices import Dispatch, Prices, cores_of_a_rank, measured_of, measured_on, threads_of_a_rank
from ddp.lab.forecast.replay import Forecast, forecast, naive_s
from ddp.lab.forecast.setup import STRATEGIES, Setup, Strategy
from ddp.lab.forecast.work import Work, work_of
from ddp.setting import Narrow
from ddp.train.monitor.profile import Profile


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
        algorithm=profile.algorithm if any(each.answers_to(profile.algorithm) for each in routes) else "auto",
        hook=names.get(profile.hook or "", "none"),
        wire=None if profile.wire == "fp32" else cast("Narrow | None", profile.wire),
    )


class Forecaster:
    """Answers questions about one profiled run.

    Args:
        known: figures of links and memory; None: there are none.
        num_known: the ranks of a host whose memory that was.
        cores: of a host.
        slow_down: how many ranks of a host compute at once, and how much slower; None: by cores. Other numbers of
            ranks are as far off the factor by cores.
    """

    def __init__(
        self,
        profile: Profile,
        known: Measured | None,
        *,
        num_known: int,
        alpha_s: float | None = None,
        rate_bit_s: float | None = None,
        cores: int,
        slow_down: tuple[int, float] | None = None,
    ) -> None:
        self.profile, self.cores, self._slow_down = profile, cores, slow_down
        self.work = work_of(profile)
        self._known, self._num_known, self._links = known, num_known, (alpha_s, rate_bit_s)

    def as_measured(self, run: Profile) -> Forecaster:
        """Returns a forecaster of the same work for the links, memory and cores that another run found."""
        known = measured_of(run)
        if known is None:
            return self
        num_known, cores = max(map(len, run.hosts)), run.cores[0]
        return Forecaster(self.profile, known, num_known=num_known, cores=cores, slow_down=self._slow_down)

    @property
    def of_one_s(self) -> float:
        """Returns the seconds of one worker for a sample."""
        return self.work.computing_s / self.work.num_samples

    def slow_down_of(self, per_host: int) -> float:
        """Returns the factor of ranks of a host that compute at once."""
        if self._slow_down is None or per_host == 1:
            return self._by_cores(per_host)
        known, factor = self._slow_down
        return factor / self._by_cores(known) * self._by_cores(per_host)

    def _by_cores(self, per_host: int) -> float:
        profiled = cores_of_a_rank(self.profile.cores[0], len(self.profile.hosts[0]), self.profile.threads)
        return profiled / cores_of_a_rank(self.cores, per_host, self.profile.threads)

    def threads_of(self, per_host: int) -> int:
        """Returns the threads of each of so many ranks of a host."""
        return threads_of_a_rank(self.cores, per_host, self.profile.threads)

    def work_for(self, asked: Asked) -> Work:
        """Returns what a rank computes there."""
        work = self.work if asked.num_ranks == 1 else self.work.slower(self.slow_down_of(asked.per_host))
        return work if asked.bucket_mb is None else work.in_buckets(asked.bucket_mb)

    def measured(self, asked: Asked) -> Measured:
        """Returns links and memory there."""
        (alpha_s, rate_bit_s), hosts = self._links, equal_hosts(asked.num_ranks, asked.per_host)
        return measured_on(self._known, hosts, alpha_s=alpha_s, rate_bit_s=rate_bit_s, num_measured=self._num_known)

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
            threads=self.threads_of(asked.per_host),
        )

    def of(self, asked: Asked) -> Forecast:
        """Returns a forecast."""
        work, setup = self.work_for(asked), self.setup(asked)
        return forecast(work, setup, self._sent(work, setup, asked))

    def efficiency(self, found: Forecast) -> float:
        """Returns the samples/s of a forecast ÷ (its ranks × the samples/s of one worker)."""
        return found.samples_per_s * self.of_one_s / found.num_ranks

    def naive_s(self, asked: Asked) -> float:
        """Returns the naive guess: of one worker's step, and bytes ÷ rate."""
        return naive_s(self.work, self.setup(asked))

    def _sent(self, work: Work, setup: Setup, asked: Asked) -> list[Dispatch] | None:
        if asked.hook == "none" or len(setup.prices.hosts) == 1:  # then nothing travels
            return None
        shares, hook = setup.prices.measured.allocated is not None, encoding.HOOKS[asked.hook]
        return encoding.dispatches(work.buckets, hook, setup.prices.hosts, shares_memory=shares)
