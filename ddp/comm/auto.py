"""`algorithm="auto"`: which way an all-reduce goes, and the memory of what was chosen.

    one host, memory shared     "shared_memory", at once: it is ahead of every schedule at every size
    anything else               the first call measures the links (`calibrate.py`, under a second), prices every way for
                                the message's size (`select.py`) and takes the cheapest

A choice is remembered by size, so that equal sizes go equal ways. The prices come from measurements, so another run may
choose otherwise near a crossing, and with another way the sums come out in other bits. A run that must repeat another
bit by bit takes over its `choices`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from ddp.comm.calibrate import Measured, calibrate
from ddp.comm.carrier import IN_MEMORY, Carrier
from ddp.comm.select import Choice, Order, rank_choices
from ddp.errors import ConfigError


class Auto:
    """Chooses for one communicator. Every rank asks the same questions in the same order: the first one measures.

    Args:
        algorithm: what "auto" stands for: "auto", or the name of a way.
        order: "canonical" takes only ways whose additions follow the canonical binary tree over the ranks.
        timeout_s: longest silence while measuring.
        empty_call: see `calibrate`.

    Attributes:
        choices: bytes → way, of what was chosen by price.
    """

    def __init__(
        self,
        carrier: Carrier,
        *,
        algorithm: str,
        order: Order,
        segment_bytes: int,
        timeout_s: float,
        empty_call: Callable[[], object],
    ) -> None:
        self.algorithm, self.order, self._empty_call = algorithm, order, empty_call
        self.choices: dict[int, str] = {}
        self._carrier, self._segment_bytes, self._timeout_s = carrier, segment_bytes, timeout_s
        self._measured: Measured | None = None

    def check(self, name: str) -> None:
        """A way, "auto", or the beginning of several: "shared_memory" on several hosts.

        Raises:
            ConfigError: there is no such way here.
        """
        ways = self._carrier.all_reduces
        if name != "auto" and not any(way == name or way.startswith(f"{name}+") for way in ways):
            raise ConfigError(f"algorithm={name!r} is not possible here; choose one of auto, {', '.join(ways)}")

    def way(self, flat: Tensor, algorithm: str) -> str:
        """The way of this tensor, for a name that may leave something open."""
        asked = self.algorithm if algorithm == "auto" else algorithm
        if asked == "auto":
            return self.choose(flat.nbytes, device=flat.device.type)
        return asked if asked in self._carrier.all_reduces else cheapest(self.ranking(flat.nbytes), asked).name

    def choose(self, nbytes: int, *, device: str = "cpu") -> str:
        """The cheapest way for so many bytes."""
        on_cpu = device == "cpu"
        if on_cpu and IN_MEMORY in self._carrier.all_reduces:
            return IN_MEMORY
        if nbytes not in self.choices:
            possible = [choice for choice in self.ranking(nbytes) if on_cpu or not choice.name.startswith(IN_MEMORY)]
            self.choices[nbytes] = cheapest(possible).name
        return self.choices[nbytes]

    def ranking(self, nbytes: int, *, allocated: bool = False) -> list[Choice]:
        """Every way with its predicted time, the cheapest first.

        Args:
            allocated: the tensor lies in memory from `allocate`.
        """
        carrier = self._carrier
        if self._measured is None:
            self._measured = calibrate(
                carrier.transport,
                carrier.hosts,
                carrier.group,
                carrier.gather_bytes,
                timeout_s=self._timeout_s,
                device=carrier.device,
                empty_call=self._empty_call,
            )
        return rank_choices(
            nbytes,
            carrier.all_reduces,
            self._measured,
            hosts=carrier.hosts,
            allocated=allocated,
            order=self.order,
            segment_bytes=self._segment_bytes,
        )

    def pin(self, choices: Mapping[int, str]) -> None:
        """Takes over what another run chose.

        Raises:
            ConfigError: a way that is not possible here.
        """
        for way in choices.values():
            self.check(way)
        self.choices.update(choices)

    def describe(self) -> str:
        """How all-reduces go here, in a few words: for a headline, and for the identity in a checkpoint."""
        hosts = self._carrier.hosts
        if self.algorithm != "auto":
            return self.algorithm
        if IN_MEMORY in self._carrier.all_reduces:
            return "shared memory"
        memory = "shared memory and " if self._carrier.shares_memory else ""
        sizes = "+".join(str(len(host)) for host in hosts)
        return f"auto over {memory}transport, hosts of {sizes}{', canonical' if self.order == 'canonical' else ''}"


def cheapest(ranking: Sequence[Choice], name: str = "") -> Choice:
    """The first of a ranking that is called so, or begins so.

    Raises:
        ConfigError: none does, or the order of additions that was asked for leaves none.
    """
    for choice in ranking:
        if not name or choice.name == name or choice.name.startswith(f"{name}+"):
            return choice
    raise ConfigError(f"no way {name!r} adds in canonical order here; leave order at 'any', or take another way")
