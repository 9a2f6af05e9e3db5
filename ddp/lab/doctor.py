"""Examines this host, or under torchrun all ranks' hosts: reports facts and findings, and measures the speed.

    inspect    each rank its host (`process/host.py`)
    measure    all ranks together: links, all-reduces of 25 MB, copies in memory
    judge      the facts (`doctor_findings.py`): problems, each with its remedy, and warnings

If the ranks cannot connect, each judges the facts of its own host, and the cause is reported as a problem.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ddp.collectives.cost import Link
from ddp.comm.meeting.place import is_rank, place
from ddp.commands.registry import parser_of, respond
from ddp.errors import ConfigError, WorkersFailed, first_line
from ddp.lab.doctor_findings import Clock, Figures, Finding, ahead, findings, named, rate, usable_cores
from ddp.lab.ranks import add_workers, at_ranks
from ddp.process.clock import now_s
from ddp.process.host import INTERFACE, THREAD_VARIABLES, HostFacts, facts
from ddp.process.memory import VARIABLES
from ddp.process.terminal import say
from ddp.units import binary_size, counted, format_bandwidth, format_time

if TYPE_CHECKING:
    from ddp.comm.communicator import Communicator

REDUCED_BYTES, NUM_TIMES = 25 << 20, 3
SMALL_BYTES, BULK_BYTES, NUM_TRIPS = 8, 1 << 20, 10
MOST_PAIRED = 16  # hosts that are all paired with each other; of more, each with the next one
MOST_SHOWN = 4  # hosts, and links between hosts, the slowest
HOW: dict[str, Any] = {"device": "auto", "warn_s": 10.0, "abort_s": 60.0}  # of `ddp.init`
LAUNCH_S = 240.0  # for all that workers of this command do


class Diagnosis(NamedTuple):
    """The text to print, and how many problems there are."""

    text: str
    num_problems: int


def main(words: Sequence[str]) -> int:
    """Prints the report; returns 1 if there is a problem."""
    parser = parser_of("doctor", epilog="All ranks of a job, on all hosts: torchrun … -m ddp doctor on each of them.")
    add_workers(parser)
    parser.add_argument("--data", default="data", help="folder of data sets, as data.root (default: %(default)s)")
    num_problems = 0

    def run(options: argparse.Namespace) -> str:
        nonlocal num_problems
        text, num_problems = (of_a_rank if is_rank() else partial(of_workers, options.workers))(options.data)
        return text

    return respond(parser, parser.parse_args(words), run) or int(num_problems > 0)


def of_workers(workers: int, data: str) -> Diagnosis:
    """Starts workers to measure with, and examines this host."""
    try:
        return Diagnosis(*at_ranks(partial(examine, data), workers, threads=None, timeout_s=LAUNCH_S, **HOW))
    except (WorkersFailed, ConfigError, ImportError, OSError) as error:
        reason = Finding(True, f"workers cannot work here ({_why(error)}): fix that first")
        alone = own_facts(data)
        alone.variables.update(VARIABLES, MKL_CBWR="AUTO")  # as the launcher sets them for workers
        return diagnosis([alone], Figures(hosts=((0,),)), [reason])


def of_a_rank(data: str) -> Diagnosis:
    """Examines all hosts, as one rank of several; rank 0 prints before any of them ends."""
    import ddp

    mine = own_facts(data)
    try:
        comm = ddp.init(**HOW)
        found = measure_jointly(comm, mine)
        if comm.rank == 0:
            say(found.text)
        comm.barrier()
        ddp.shutdown()
        return found._replace(text="")
    except (RuntimeError, ConfigError) as error:
        here = place()
        assert here is not None
        reason = Finding(True, f"rank {here.rank} on {mine.host} has not come together with the others: {_why(error)}")
        if here.local_rank:  # the first rank of the host says the rest
            return Diagnosis(finding_line(reason), 1)
        elsewhere = here.world_size - (here.local_world_size or here.world_size)
        return diagnosis([mine], Figures(hosts=((0,),), num_unreached=elsewhere), [reason])


def examine(data: str, comm: Communicator) -> Diagnosis:
    """Examines this host, as one worker of a new world. Collective."""
    return measure_jointly(comm, own_facts(data))


def _why(error: Exception) -> str:
    """Returns in one line why workers failed, without a traceback."""
    if isinstance(error, WorkersFailed):
        if error.exception is None:
            lines = str(error).splitlines()
            return next((line for line in lines if line.startswith(f"rank {error.rank} ")), lines[-1])
        return f"rank {error.rank}: {type(error.exception).__name__}: {first_line(error.exception)}"
    return f"{type(error).__name__}: {first_line(error)}"


# --- inspect ---------------------------------------------------------------------------------------------------------


def own_facts(data: str) -> HostFacts:
    """Returns the facts that this process finds alone; of torch nothing where it cannot be imported."""
    try:
        import torch

        from ddp.comm.connect import boot_id
        from ddp.comm.transport import shared_memory
        from ddp.process import gpu
        from ddp.strategies import region
    except (ImportError, OSError):
        return facts(data, kernel="", threads=1, gpus=list, left_behind=[])

    def gpus() -> list[tuple[str, int]]:
        of_each = map(gpu.cuda.get_device_properties, range(gpu.cuda.device_count()))
        return [(each.name, each.total_memory) for each in of_each]

    return facts(
        data,
        kernel=boot_id(),
        threads=torch.get_num_threads(),
        gpus=gpus,
        left_behind=[*shared_memory.left_behind(), *region.left_behind()],
    )


# --- measure ---------------------------------------------------------------------------------------------------------


def measure_jointly(comm: Communicator, mine: HostFacts) -> Diagnosis:
    """Measures, and judges the facts of all ranks; the same result on all of them. Collective."""
    from ddp.comm.objects import all_gather_object

    everyone = [HostFacts(**each) for each in all_gather_object(comm, asdict(mine))]
    return diagnosis(everyone, measured(comm))


def measured(comm: Communicator) -> Figures:
    """Measures links, all-reduces and memory. Collective."""
    import torch

    from ddp.comm.objects import all_gather_object

    here, there = (torch.ones(REDUCED_BYTES // 4, dtype=torch.float32, device=comm.device) for _ in range(2))
    copy_s = _fastest_s(comm, lambda: there.copy_(here))
    copies = [REDUCED_BYTES / each for each in all_gather_object(comm, copy_s)]
    clocks = _clocks(comm)
    if comm.world_size == 1:
        return Figures(hosts=comm.hosts, copies=copies, clocks=clocks)
    flat = comm.allocate(REDUCED_BYTES // 4, torch.float32)
    ways = dict.fromkeys([comm.plan.choose(REDUCED_BYTES), "ring"])
    mine = {way: _fastest_s(comm, partial(comm.all_reduce, flat, algorithm=way)) for way in ways}
    comm.free(flat)
    everyone = all_gather_object(comm, mine)
    return Figures(
        hosts=comm.hosts,
        inside=comm.plan.network().inside if any(len(host) > 1 for host in comm.hosts) else None,
        links=_links(comm),
        reduces={way: max(each[way] for each in everyone) for way in ways},
        copies=copies,
        clocks=clocks,
    )


def _fastest_s(comm: Communicator, run: Callable[[], object]) -> float:
    """Returns the least seconds that this rank has taken, of several times that all ranks run this at once."""
    from ddp.process import gpu

    times = []
    for _ in range(NUM_TIMES):
        comm.barrier()
        start_s = now_s()
        run()
        if comm.device.type == gpu.KIND:
            gpu.cuda.synchronize(comm.device)
        times.append(now_s() - start_s)
    return min(times)


def _clocks(comm: Communicator) -> list[Clock]:
    """Returns how far the time of day at each rank is ahead of rank 0's. Collective.

    Hosts are compared by the clock of durations, so each rank gives the offset of its time of day from it.
    """
    from ddp.comm.objects import all_gather_object
    from ddp.train.reports.traces import compare_clocks

    apart_s = max(time.time() - now_s() for _ in range(NUM_TRIPS))  # a pause between the two readings makes it less
    since_epoch = all_gather_object(comm, apart_s)
    pairs = zip(since_epoch, compare_clocks(comm), strict=True)
    return [Clock(mine - since_epoch[0] - other.offset_s, other.error_s) for mine, other in pairs]


def _links(comm: Communicator) -> dict[tuple[int, int], Link]:
    """Returns the link between each two hosts, measured by messages there and back between their first ranks."""
    from ddp.comm.objects import all_gather_object

    firsts = [host[0] for host in comm.hosts]
    pairs = list(combinations(firsts, 2) if len(firsts) <= MOST_PAIRED else pairwise(firsts))
    mine = {pair: _link(comm, *pair) for pair in pairs if comm.rank in pair}
    everyone = all_gather_object(comm, {pair: (link.alpha_s, link.beta_s) for pair, link in mine.items()})
    return {pair: Link(*everyone[pair[0]][pair]) for pair in pairs}


def _link(comm: Communicator, first: int, second: int) -> Link:
    """Measures the link between two ranks; both call it, and that of the first one counts."""
    import torch

    def trip_s(num_bytes: int) -> float:
        message = torch.zeros(num_bytes, dtype=torch.uint8, device=comm.device)
        times = []
        for _ in range(NUM_TRIPS):
            start_s = now_s()
            if comm.rank == first:
                comm.send(message, second, label="there")
                comm.recv(message, second, label="back")
            else:
                comm.recv(message, first, label="there")
                comm.send(message, first, label="back")
            comm.to_host(message[:1]).read()  # on a GPU, the host waits
            times.append(now_s() - start_s)
        return min(times) / 2

    alpha_s = trip_s(SMALL_BYTES)
    return Link(alpha_s, max(0.0, trip_s(BULK_BYTES) - alpha_s) / BULK_BYTES)


# --- say -------------------------------------------------------------------------------------------------------------


def diagnosis(everyone: Sequence[HostFacts], figures: Figures, before: Sequence[Finding] = ()) -> Diagnosis:
    """Returns the report: the facts, and then the findings.

    Args:
        everyone: the facts, by rank.
        before: findings that the ranks have made on their way.
    """
    found = [*before, *findings(everyone, figures)]
    num_problems = sum(finding.is_problem for finding in found)
    rows = [row for host in figures.hosts[:MOST_SHOWN] for row in of_a_host(everyone, host)]
    if (num_more := len(figures.hosts) - MOST_SHOWN) > 0:
        rows.append(("", f"and {counted(num_more, 'more host')}, of which only problems and warnings are listed"))
    rows += of_figures(everyone, figures)
    width = max(len(name) for name, _ in rows)
    summary = counted(num_problems, "problem") if num_problems else "no problem"
    summary += f", {counted(len(found) - num_problems, 'warning')}"
    lines = [f"{name:{width}}  {text}" for name, text in rows]
    return Diagnosis("\n".join([*lines, "", *map(finding_line, found), summary]), num_problems)


def finding_line(finding: Finding) -> str:
    """Returns the line of a finding."""
    return f"{'problem' if finding.is_problem else 'warning'}: {finding.text}"


def of_a_host(everyone: Sequence[HostFacts], ranks: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yields the facts about a host: pairs of a name and a text."""
    first, here = everyone[ranks[0]], [everyone[rank] for rank in ranks]
    shown = {package: first.versions.get(package, "") for package in ("python", "torch", "torchvision", "hydra-core")}
    threads = sorted({each.threads for each in here})
    variables = " ".join(f"{name}={first.variables.get(name, 'unset')}" for name in THREAD_VARIABLES)
    addresses = ", ".join(f"{name} {address or '-'}" for name, address in first.interfaces.items())
    by = f" ({INTERFACE}={first.variables[INTERFACE]})" if INTERFACE in first.variables else ""
    kept = [name for name in VARIABLES if name in first.variables]
    pinned = f"; {binary_size(first.pinned_bytes)} pinned, for {', '.join(first.adapters)}" if first.adapters else ""
    yield "host", f"{first.host}: {named(ranks)}"
    yield "  versions", ", ".join(f"{package} {version or 'missing'}" for package, version in shown.items())
    yield "  cores", f"{usable_cores(here):g} usable of {first.num_cores}; load {first.load:.1f}"
    yield "  threads", f"{' or '.join(map(str, threads))} for each rank; {variables}"
    yield "  GPUs", ", ".join(f"{name} ({binary_size(size)})" for name, size in first.gpus) or "none"
    yield "  memory", f"{_size(first.memory_left)} left, by the kernel and the control groups"
    yield "  allocator", ", ".join(kept) or "no variable is set; ddp.init sets what a running program can"
    yield "  /dev/shm", f"{binary_size(first.shared_free)} free of {binary_size(first.shared_bytes)}"
    yield "  network", f"{addresses}; ranks are reached at {first.address or 'no address'}{by}"
    yield "  limits", f"{first.open_files:,} open files{pinned}"
    yield "  folder", f"{first.folder}: {_size(max(0, first.disk_free))} free"
    yield "  temporary", f"{first.temporary}: {_size(first.temporary_free)} free"
    data_is = "not there yet; a download makes it" if first.data_is == "absent" else first.data_is
    yield "  data", f"{first.data}: {data_is}"


def of_figures(everyone: Sequence[HostFacts], figures: Figures) -> Iterator[tuple[str, str]]:
    """Yields the measured figures, in the same way."""
    if figures.inside is not None:
        yield "link inside", f"α {format_time(figures.inside.alpha_s)}, {rate(figures.inside)}, by messages"
    slowest = sorted(figures.links.items(), key=lambda each: -each[1].beta_s)[:MOST_SHOWN]
    for (a, b), link in sorted(slowest):
        between = f"{everyone[a].host} to {everyone[b].host}"
        yield "link", f"α {format_time(link.alpha_s)}, {rate(link)}, {between}"
    size, share = binary_size(REDUCED_BYTES), 2 * (len(everyone) - 1) / len(everyone)
    for way, took_s in figures.reduces.items():
        bus = format_bandwidth(share * REDUCED_BYTES / took_s)
        yield "all-reduce", f"{size} in {format_time(took_s)}, bus bandwidth {bus} GB/s, by {way}"
    for host in figures.hosts[1:MOST_SHOWN] if figures.clocks else ():
        there, here = everyone[host[0]].host, everyone[0].host
        yield "clock", f"that of {there} is {ahead(figures.clocks[host[0]])} that of {here}"
    if figures.copies:
        least, most = (format_bandwidth(each) for each in (min(figures.copies), max(figures.copies)))
        yield "copy", f"{least if least == most else f'{least} to {most}'} GB/s by each rank, all at once"


def _size(num_bytes: float) -> str:
    return "unknown" if num_bytes == float("inf") else binary_size(num_bytes)
