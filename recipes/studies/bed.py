"""A bed for benchmarks (`--netbed`): hosts made of network namespaces, on which the same command runs under torchrun.

    --netbed 2x2@1gbit@1ms     2 hosts with 2 ranks each; each link carries 1 Gbit/s each way; 1 ms from host to host
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp.errors import ConfigError
from ddp.lab.bench.turns import PROGRESS
from ddp.lab.clone import CLONE
from ddp.lab.forecast.prices import PAYLOAD
from ddp.process.terminal import say
from ddp.units import parse_delay, parse_rate

HOSTS = CLONE / "scripts" / "netbed" / "hosts.py"


@dataclass(frozen=True)
class Bed:
    """Hosts made of network namespaces, and the links that join them.

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

    def wire_s(self, nbytes: int) -> float | None:
        """Returns the least time in which the links can all-reduce `nbytes`, or None where they have no rate.

        Between h hosts each link carries at least 2(h−1)/h of the tensor, whatever number of ranks a host has.
        """
        if self.rate_bit_s is None:
            return None
        return 2 * (self.num_hosts - 1) / self.num_hosts * nbytes * 8 / (PAYLOAD * self.rate_bit_s)

    def run_command(self, name: str) -> str:
        """Runs this very command under torchrun on hosts that hosts.py makes and removes. Returns its cells as JSON.

        Args:
            name: of the command.
        """
        if os.geteuid():
            raise ConfigError("--netbed needs root: it makes network namespaces")
        if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
            raise ConfigError(f"--netbed needs {', '.join(missing)}: install iproute2 and util-linux")
        script = Path(sys.argv[0]).resolve()
        program = ["-m", "ddp"] if script.name == "__main__.py" else [str(script)]
        up = ["--up", str(self.num_hosts), "--delay", f"{self.delay_s * 1e6:g}us"]
        up += [] if self.rate_bit_s is None else ["--rate", f"{self.rate_bit_s:.0f}bit"]
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with tempfile.TemporaryDirectory(prefix="ddp-bench-") as folder:
            kept = Path(folder) / "cells.json"
            hosts = [sys.executable, str(HOSTS), "--name", f"bench{os.getpid()}"]
            command = [*hosts, "run", *up, "-k", str(self.ranks_per_host), *program, *sys.argv[1:], "--json", str(kept)]
            lines = _lines_of(command)
            if not kept.exists():
                refusals = [line for line in lines if f"{name}: " in line]
                if refusals:
                    raise ConfigError(refusals[0].partition(f"{name}: ")[2].rstrip())
                sys.exit("".join([*lines[-30:], f"{name}: the ranks failed, see above"]))
            return kept.read_text()


def _lines_of(command: Sequence[str]) -> list[str]:
    """Returns the lines that the command prints; passes on its progress meanwhile."""
    lines = []
    # In a session of its own, so that Ctrl-C reaches only us, and a second one does not leave half a bed.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                if PROGRESS in line:
                    say(line.rstrip("\n"), to=sys.stderr)
        except BaseException:
            process.terminate()  # it ends what it has started on the hosts, and removes them
            raise
    return lines
