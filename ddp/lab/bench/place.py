"""Says where a benchmark runs: on this host or on a bed of network namespaces, alone or beside strangers.

    --netbed 2x2@1gbit@1ms     2 hosts with 2 ranks each; every link carries 1 Gbit/s each way; 1 ms from host to host
    --beside 1                 one process that only computes runs on the same cores as the ranks
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ddp.errors import ConfigError
from ddp.process.memory import available_cores
from ddp.units import counted, parse_delay, parse_rate

PAYLOAD = 0.956
"""The share of a link's rate that is left for payload; the rest is headers (scripts/netbed/README.md)."""


@dataclass(frozen=True)
class Bed:
    """Describes hosts made of network namespaces, and the links that join them.

    Attributes:
        name: the text that `parse` has read.
        rate_bit_s: of each host's link, each way; None: unlimited.
        delay_s: one way, from host to host.
    """

    name: str
    num_hosts: int
    ranks_per_host: int
    rate_bit_s: float | None = None
    delay_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Bed:
        """Reads HOSTSxRANKS[@RATE][@DELAY], as in "2x2@1gbit", "4x1@5ms", "2x2@100mbit@1ms".

        Raises:
            ConfigError: the text has another form, or means fewer than two ranks.
        """
        shape, *links = text.lower().split("@")
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", shape)
        rates = [rate for rate in map(parse_rate, links) if rate is not None]
        delays = [delay for delay in map(parse_delay, links) if delay is not None]
        if not match or len(rates) > 1 or len(delays) > 1 or len(rates) + len(delays) < len(links):
            raise ConfigError(f"netbed {text!r}: want HOSTSxRANKS@RATE@DELAY, e.g. 2x2@1gbit, 4x1@5ms, 2x2@100mbit@1ms")
        if int(match[1]) * int(match[2]) < 2:
            raise ConfigError(f"netbed {text!r}: a collective needs at least two ranks")
        return cls(text, int(match[1]), int(match[2]), rates[0] if rates else None, delays[0] if delays else 0.0)


@dataclass(frozen=True)
class BenchSite:
    """Surroundings of the ranks of a benchmark; `beside` is the number of other processes that compute."""

    bed: Bed | None = None
    beside: int = 0

    def title(self, world_size: int, num_hosts: int = 1) -> str:
        """Returns the headline of a report: "2 ranks on one host, 2 cores, beside 1 process that only computes"."""
        ranks = f"{counted(world_size, 'rank')} on {'one host' if num_hosts == 1 else f'{num_hosts} hosts'}"
        bed = f" (netbed {self.bed.name})" if self.bed else ""
        strangers = "1 process that only computes" if self.beside == 1 else f"{self.beside} processes that only compute"
        return f"{ranks}{bed}, {available_cores()} cores{f', beside {strangers}' if self.beside else ''}"

    def wire_s(self, nbytes: int) -> float | None:
        """Returns the least time in which the links can all-reduce `nbytes`, or None where no link has a rate.

        Between h hosts each link carries at least 2(h−1)/h of the tensor, whatever number of ranks a host has.
        """
        if self.bed is None or self.bed.rate_bit_s is None:
            return None
        return 2 * (self.bed.num_hosts - 1) / self.bed.num_hosts * nbytes * 8 / (PAYLOAD * self.bed.rate_bit_s)


HERE = BenchSite()


def refuse_unknown(what: str, names: Collection[str], known: Collection[str]) -> None:
    """Raises ConfigError if a name is unknown."""
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{what} {unknown[0]!r} is unknown; choose among {', '.join(known)}")


def split(option: str, text: str) -> list[str]:
    """Returns the parts between commas, each once; raises ConfigError if there is none."""
    if parts := list(dict.fromkeys(part for part in text.split(",") if part)):
        return parts
    raise ConfigError(f"{option} {text}: want at least one, or several with commas between them")


# --- Strangers beside the ranks --------------------------------------------------------------------------------------
#
# Keeps strangers, processes that only compute, on the cores of a benchmark where `--beside` asks for them.
#
# Beside a stranger both rivals show how they wait on a shared machine: a rank that spins until its neighbours are there
# takes the core from the very rank that it waits for.


# A stranger computes until its standard input closes. The kernel closes it also when the parent is killed by SIGKILL.
STRANGER = """
import select
while not select.select([0], [], [], 0)[0]:
    for _ in range(100_000):
        pass
"""


@contextmanager
def strangers(number: int) -> Iterator[list[int]]:
    """Keeps `number` processes computing, free to run on any core, until the block ends. Yields their ids."""
    with ExitStack() as stack:
        processes = [
            # A session of its own, because Ctrl-C would reach it otherwise.
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", STRANGER], stdin=subprocess.PIPE, start_new_session=True
            )
            for _ in range(number)
        ]
        for process in processes:
            stack.enter_context(process)  # which closes its standard input and waits for its end
        yield [process.pid for process in processes]
