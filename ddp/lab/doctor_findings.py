"""Judges the facts of `doctor`: pure functions from facts and figures to findings.

    problem    something that will fail, is wrong, or wastes most of a resource: one sentence with its remedy
    warning    something that may be meant so, or makes the figures of `doctor` itself worth less

Each function below yields the findings of one subject: those of a host compare its ranks, those of the world all
ranks. A finding that several hosts have in common is reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from packaging.specifiers import SpecifierSet

from ddp.collectives.cost import Link
from ddp.collectives.placed import Hosts
from ddp.process.host import ANSWER_S, INTERFACE, LOOPBACK, PACKAGE, HostFacts
from ddp.process.memory import VARIABLES
from ddp.units import binary_size, counted, format_time, three_digits

MIB, GIB = 1 << 20, 1 << 30
LEAST_MEMORY = 256 * MIB  # for each rank that runs already: a small model, its gradients and its batches
LEAST_SHARED = 256 * MIB  # of /dev/shm; a container has 64 MiB by default
LEAST_DISK = GIB  # for the checkpoints of a small run
LEAST_TEMPORARY = 16 * MIB  # for the files by which a launch and its workers communicate
OPEN_FILES, FILES_OF_A_RANK = 256, 8  # that each process has open, and more for each rank that it is connected with
PINNED = GIB  # an adapter's buffers
SLOW = 2.0  # a link or a rank that is this many times slower than the median one
MOST_OFFSET_S = 1.0  # between the clocks of two hosts: files that are a second from the future mislead


class Finding(NamedTuple):
    """One sentence with the problem and its remedy; `is_problem` is False for a warning."""

    is_problem: bool
    text: str


class Clock(NamedTuple):
    """The lead of a host's clock over rank 0's, and how far off it may be."""

    offset_s: float
    error_s: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures that the ranks have measured together; the same on all of them.

    Attributes:
        hosts: the ranks of every host: those that reach each other's memory.
        num_unreached: ranks of other hosts that there are besides.
        inside: between two ranks of a host over the transport; None without two such.
        links: by the first ranks of two hosts, the link between them.
        reduces: by the way an all-reduce has taken, its seconds.
        copies: by rank, bytes copied in a second, while all ranks copied.
        clocks: by rank.
    """

    hosts: Hosts
    num_unreached: int = 0
    inside: Link | None = None
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    reduces: Mapping[str, float] = field(default_factory=dict)
    copies: Sequence[float] = ()
    clocks: Sequence[Clock] = ()


def findings(facts: Sequence[HostFacts], figures: Figures) -> list[Finding]:
    """Returns the findings, the problems first.

    Args:
        facts: by rank.
    """
    by_finding: dict[Finding, list[str]] = {}
    world_size = len(facts) + figures.num_unreached
    for host in figures.hosts:
        ranks = [facts[rank] for rank in host]
        for check in OF_A_HOST:
            for finding in check(ranks, world_size):
                by_finding.setdefault(finding, []).append(ranks[0].host)
    found = []
    for (is_problem, text), hosts in by_finding.items():
        where = "" if len(hosts) == len(figures.hosts) else f"{', '.join(hosts)}: "
        found.append(Finding(is_problem, f"{where}{text}"))
    found += [finding for check in OF_THE_WORLD for finding in check(facts, figures)]
    return sorted(found, key=lambda finding: not finding.is_problem)


def usable_cores(ranks: Sequence[HostFacts]) -> float:
    """Returns how many cores the ranks of a host may keep busy: those that one of them may use, within the quota."""
    return min(len({core for each in ranks for core in each.cores}), *(each.quota for each in ranks))


# --- of a host -------------------------------------------------------------------------------------------------------


def _unanswered(ranks: Sequence[HostFacts], world_size: int) -> Iterator[Finding]:
    for what in ranks[0].unanswered:
        yield Finding(True, f"{what} has not answered within {ANSWER_S:g} s: fix that first")


def _packages(ranks: Sequence[HostFacts], world_size: int) -> Iterator[Finding]:
    for by, package, admitted in ranks[0].demands:
        here = ranks[0].versions[package]
        whose = by if by == PACKAGE else f"{by} {ranks[0].versions.get(by, '')}"
        if not here:
            yield Finding(True, f"{package} is missing, which {whose} needs: pip install '{package}{admitted}'")
        elif not SpecifierSet(admitted).contains(here, prereleases=True):
            what = "another Python" if package == "python" else f"another one: pip install '{package}{admitted}'"
            yield Finding(True, f"{package} {here} is none that {whose} admits ({admitted}): take {what}")


def _cores(ranks: Sequence[HostFacts], world_size: int) -> Iterator[Finding]:
    cores, num_cores = usable_cores(ranks), ranks[0].num_cores
    num_threads = sum(each.threads for each in ranks)
    of = f"{cores:g} of {counted(num_cores, 'core')}" if cores < num_cores else counted(num_cores, "core")
    fitting = max(1, int(cores / len(ranks)))
    if num_threads > cores and num_threads > len(ranks):
        bound = ", or let the launcher bind the ranks to more (mpirun --bind-to none)" if cores < num_cores else ""
        yield Finding(
            True,
            f"{counted(num_threads, 'thread')} of {counted(len(ranks), 'rank')} on {of} take turns: set "
            f"OMP_NUM_THREADS={fitting} (cluster.threads_per_worker={fitting}){bound}",
        )
    elif num_threads > cores:
        yield Finding(False, f"{len(ranks)} ranks oversubscribe {of}: {int(max(1, cores))} or fewer train faster")
    elif 2 * num_threads <= cores:
        yield Finding(
            False,
            f"{counted(num_threads, 'thread')} of {counted(len(ranks), 'rank')} use at most half of {of}: start more "
            f"ranks, or set OMP_NUM_THREADS={fitting} (torchrun sets 1)",
        )


def _load(ranks: Sequence[HostFacts], world_size: int) -> Iterator[Finding]:
    first = ranks[0]
    if first.load > first.num_cores + len(ranks):
        yield Finding(
            False,
            f"other processes are using the cores (load {first.load:.1f} on {counted(first.num_cores, 'core')}): what "
            "is measured now is less than there is; end them, and call doctor again",
        )


def _variables(ranks: Sequence[HostFacts], world_size: int) -> Iterator[Finding]:
    wanted = {"MKL_CBWR": "AUTO", "GLIBC_TUNABLES": VARIABLES["GLIBC_TUNABLES"]}
    if missing := [f"{name}={value}" for name, value in wanted.items() if name not in ranks[0].variables]:
        yield Finding(
            False,
            "a running program cannot set for itself what keeps bits equal (MKL_CBWR) and copies fast "
            f"(GLIBC_TUNABLES): export {' '.join(missing)} before your launcher, as scripts/ddp train does by itself",
        )


def _memory(ranks: Sequence[HostFacts], world_size: int) -> Iterator[Finding]:
    left = ranks[0].memory_left
    if left < LEAST_MEMORY * len(ranks):
        yield Finding(
            True,
            f"less than {binary_size(LEAST_MEMORY)} of memory are left for each of {counted(len(ranks), 'rank')}: "
            "start fewer, end other programs, or raise the limit of the control group (docker run --memory)",
        )


def _shared_memory(ranks: Sequence[HostFacts], world_size: int) -> Iterator[Finding]:
    first = ranks[0]
    if first.kernel and not first.shared_bytes:  # another system's kernel has none
        yield Finding(
            True, "/dev/shm cannot be written, through which loader processes send: mount a tmpfs there, mode 1777"
        )
    elif first.shared_free < LEAST_SHARED:
        yield Finding(
            False,
            f"{binary_size(first.shared_free)} of {binary_size(first.shared_bytes)} are free in /dev/shm, which loader "
            "processes fill with batches: docker run --shm-size=1g, or --ipc=host",
        )
    if paths := " ".join(sorted({path for each in ranks for path in each.left_behind})):
        yield Finding(False, f"processes that were killed have left something in memory: rm -r {paths}")


def _limits(ranks: Sequence[HostFacts], world_size: int) -> Iterator[Finding]:
    first, needed = ranks[0], OPEN_FILES + FILES_OF_A_RANK * world_size
    if first.open_files < needed:
        yield Finding(
            True,
            f"a process may open {counted(first.open_files, 'file')}, and a rank of {world_size} needs up to {needed}: "
            f"ulimit -n {needed}",
        )
    if first.gpus and first.adapters and first.pinned_bytes < PINNED:
        yield Finding(
            True,
            f"a process may pin {binary_size(first.pinned_bytes)} of memory, and {', '.join(first.adapters)} needs "
            "more for its buffers: ulimit -l unlimited",
        )


def _network(ranks: Sequence[HostFacts], world_size: int) -> Iterator[Finding]:
    first, is_over_hosts = ranks[0], len(ranks) < world_size
    named = first.variables.get(INTERFACE, "").split(",")[0]
    others = [name for name, address in first.interfaces.items() if address and not address.startswith(LOOPBACK)]
    if named and named not in first.interfaces:
        there = ", ".join(first.interfaces)
        yield Finding(True, f"{INTERFACE}={named} names no interface: take one of {there}, or leave it out")
    elif is_over_hosts and first.address.startswith(LOOPBACK):
        what = f"{INTERFACE} names {named}" if named else f"the name {first.host} stands for {first.address}"
        remedy = f"export {INTERFACE}={others[0] if others else 'NAME'}"
        yield Finding(True, f"{what}, where no other host reaches the ranks: {remedy}, or fix /etc/hosts")


def _gpus(ranks: Sequence[HostFacts], world_size: int) -> Iterator[Finding]:
    first = ranks[0]
    if first.num_gpus and not first.gpus:
        yield Finding(
            False,
            f"the driver shows {counted(first.num_gpus, 'GPU')}, and torch sees none: install its CUDA build, and look "
            "at CUDA_VISIBLE_DEVICES",
        )
    elif 0 < len(first.gpus) < len(ranks):
        yield Finding(
            False,
            f"{len(ranks)} ranks share {counted(len(first.gpus), 'GPU')}, so tensors travel through the host's memory: "
            f"start {len(first.gpus)}",
        )


def _folders(ranks: Sequence[HostFacts], world_size: int) -> Iterator[Finding]:
    first = ranks[0]
    if first.disk_free < 0:
        yield Finding(True, f"{first.folder}, which keeps runs, cannot be written: call from another folder")
    elif first.disk_free < LEAST_DISK:
        yield Finding(True, f"less than {binary_size(LEAST_DISK)} are free in {first.folder}: make room")
    if first.temporary_free < LEAST_TEMPORARY:
        yield Finding(
            True,
            f"less than {binary_size(LEAST_TEMPORARY)} are free in {first.temporary}, which every launch needs: make "
            "room, or set TMPDIR to another folder",
        )
    if first.data_is not in ("absent", "usable"):
        yield Finding(True, f"{first.data}: {first.data_is}: let data.root be a folder that you may read and write")


OF_A_HOST: Sequence[Callable[[Sequence[HostFacts], int], Iterator[Finding]]] = (
    *(_unanswered, _packages, _cores, _load, _variables, _memory, _shared_memory, _limits, _network, _gpus, _folders),
)

# --- of the world ----------------------------------------------------------------------------------------------------


def _unequal(facts: Sequence[HostFacts], figures: Figures) -> Iterator[Finding]:
    for package in ("python", "torch"):
        by_version: dict[str, list[int]] = {}
        for rank, each in enumerate(facts):
            by_version.setdefault(each.versions.get(package, ""), []).append(rank)
        if len(by_version) > 1:
            listed = ", ".join(f"{version} on {named(ranks)}" for version, ranks in by_version.items())
            yield Finding(True, f"{package} is {listed}: install one version everywhere, or bits differ")


def _apart(facts: Sequence[HostFacts], figures: Figures) -> Iterator[Finding]:
    """Yields hosts that are one machine under one name, whose ranks do not reach each other's memory."""
    by_machine: dict[tuple[str, str], list[int]] = {}
    for host in figures.hosts:
        first = facts[host[0]]
        by_machine.setdefault((first.host, first.kernel), []).append(host[0])
    for (name, kernel), ranks in by_machine.items():
        if kernel and len(ranks) > 1:
            yield Finding(
                True,
                f"{named(ranks)} are on one machine, {name}, and do not reach each other's memory: start them as one "
                "user in one container (docker run --ipc=host --pid=host), or all-reduces take sockets",
            )


def _slow(facts: Sequence[HostFacts], figures: Figures) -> Iterator[Finding]:
    if figures.links:
        usual = median(link.beta_s for link in figures.links.values())
        for (a, b), link in figures.links.items():
            if link.beta_s > SLOW * usual:
                yield Finding(
                    True,
                    f"the link from {facts[a].host} to {facts[b].host} carries {rate(link)}, and the median one "
                    f"{rate(Link(0.0, usual))}: check its cable, its switch, and other traffic on it",
                )
    if len(figures.copies) > 2:  # of two, either may be the slow one
        usual = median(figures.copies)
        if slow := [rank for rank, speed in enumerate(figures.copies) if SLOW * speed < usual]:
            yield Finding(
                False,
                f"{named(slow)} copied memory at less than half of the median speed, and all wait for the "
                f"slowest rank: find other processes on {', '.join(dict.fromkeys(facts[rank].host for rank in slow))}",
            )


def _clocks(facts: Sequence[HostFacts], figures: Figures) -> Iterator[Finding]:
    for host in figures.hosts:
        if figures.clocks and abs((clock := figures.clocks[host[0]]).offset_s) - clock.error_s > MOST_OFFSET_S:
            yield Finding(
                True,
                f"the clock of {facts[host[0]].host} is {ahead(clock)} that of {facts[0].host}: let both follow a time "
                "server (chronyd, systemd-timesyncd), or logs and files mislead",
            )


OF_THE_WORLD: Sequence[Callable[[Sequence[HostFacts], Figures], Iterator[Finding]]] = (_unequal, _apart, _slow, _clocks)

# --- words -----------------------------------------------------------------------------------------------------------


def named(ranks: Sequence[int]) -> str:
    """Returns "rank 3", "ranks 0 to 7" or "ranks 0, 2, 5"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    in_a_row = len(ranks) > 2 and all(after == before + 1 for before, after in pairwise(ranks))
    return f"ranks {ranks[0]} to {ranks[-1]}" if in_a_row else f"ranks {', '.join(map(str, ranks))}"


def rate(link: Link) -> str:
    """Returns the rate of a link as text."""
    if not link.beta_s:
        return "more than can be measured"
    bits_s = 8 / link.beta_s
    return f"{three_digits(bits_s / 1e9)} Gbit/s" if bits_s > 0.9995e9 else f"{three_digits(bits_s / 1e6)} Mbit/s"


def ahead(clock: Clock) -> str:
    """Returns "1.50 s ± 20 µs ahead of", or "behind"."""
    way = "ahead of" if clock.offset_s >= 0 else "behind"
    return f"{format_time(abs(clock.offset_s))} ± {format_time(clock.error_s)} {way}"
