"""Measures the figures of the cost model on the links that are there. It takes a fraction of a second, once.

    figure    what the ranks run                                               who runs it
    α         rounds in which each rank sends 8 bytes to the next rank of a    inside: all ranks of every host at once
              ring and receives 8: seconds per round                           between: the first rank of every host
    g         the same with 8 messages each way: what each further one adds    the same
    β         the same with one message of 4 MB: what a byte adds              the same
    γ         `add_` of 4 MB: seconds per byte                                 every rank
    memory    an all-reduce in the host's memory, at some sizes. The times     all ranks of every host
              themselves are kept: because of caches, they are no straight
              line

The rounds of most schedules are such exchanges, so α covers everything that a round costs: Python's time between two
rounds, a send that waits for its receiver, a core that is shared with other ranks. One rank per host is enough between
hosts, because the simulator knows that the ranks of a host share its link.

In each repetition the slowest rank's time counts, because a collective ends with its last rank. Of the repetitions the
median counts, because a minimum would promise what is rarely reached, and one interruption would spoil a mean. All
ranks exchange all their times and compute the figures from them, so all have the same figures.

`plan.py` finds out how far off the predictions from these figures are: it times some all-reduces, and says so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from ddp.collectives.placed import Hosts
from ddp.collectives.schedule import Goal, Recv, Schedule, Send
from ddp.collectives.simulate import Link, Network
from ddp.comm.flat_collectives import FlatCollectives
from ddp.comm.host_links import HostLinks
from ddp.comm.host_reduce import HostGroup, NoSharedMemory
from ddp.comm.settings import Settings
from ddp.comm.transport.edge import Gather, gathered
from ddp.process import gpu
from ddp.process.clock import now_s

Times = dict[str, list[float]]  # by what was timed, the seconds of each repetition; absent where a rank took no part

NUM_REPETITIONS, IN_A_ROW = 5, 8  # repetitions of a measurement; calls or rounds in each repetition of a short one
SMALL_BYTES, BULK_BYTES, NUM_MESSAGES = 8, 4 << 20, 8
MEMORY_BYTES = tuple(1 << k for k in (10, 16, 20, 22, 24))
MEMORY_IN_ALL = 64 << 20  # of a host's memory, lent for the measurement


@dataclass(frozen=True)
class Curve:
    """Seconds by bytes: straight lines between the points, and along the last line beyond the last point."""

    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, nbytes: int) -> float:
        if nbytes <= self.nbytes[0]:
            return self.seconds[0]
        after = min(bisect_left(self.nbytes, nbytes), len(self.nbytes) - 1)
        x0, x1 = self.nbytes[after - 1 : after + 1]
        y0, y1 = self.seconds[after - 1 : after + 1]
        on_the_line = y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)
        return on_the_line if nbytes <= x1 else max(on_the_line, y1)


@dataclass(frozen=True)
class Measured:
    """The figures of one layout of ranks; the same on all of them.

    Attributes:
        ordinary: an all-reduce of any tensor in the host's memory; None where no ranks share memory. In the memory of
            GPUs, all tensors are allocated.
        allocated: the same for a tensor that lies in that memory.
    """

    network: Network
    ordinary: Curve | None = None
    allocated: Curve | None = None


def calibrate(collectives: FlatCollectives, settings: Settings) -> Measured:
    """Measures links and memory. Collective.

    Raises:
        TransportError: a rank did not take part in time.
    """
    links, hosts, device = collectives.links, collectives.hosts, settings.device
    here, arrived = (torch.zeros(BULK_BYTES // 4, dtype=torch.float32, device=device) for _ in range(2))
    mine = timed({"adding": partial(here.add_, arrived)}, device=device)
    rings = {
        "inside": next(host for host in hosts if links.rank in host),
        "between": tuple(host[0] for host in hosts),
    }
    for name, ring in rings.items():
        if links.rank in ring and len(ring) > 1:
            exchange = partial(_exchange, links, ring, device=device)
            small = {f"{name} alpha": exchange(1, SMALL_BYTES), f"{name} gap": exchange(NUM_MESSAGES, SMALL_BYTES)}
            mine |= timed(small, IN_A_ROW, device=device)
            mine |= timed({f"{name} beta": exchange(1, BULK_BYTES)}, device=device)
    if collectives.group is not None:
        mine |= _in_memory(collectives.group, max(map(len, hosts)), device)
    return figures(agreed(mine, links.gather_bytes), hosts)


def figures(times: Mapping[str, float], hosts: Hosts) -> Measured:
    """Computes the figures from the agreed times."""
    inside, between = _link(times, "inside"), _link(times, "between")
    one_link = inside or between or Link(0.0, 0.0)  # a link that does not exist is the other one
    network = Network(hosts, inside or one_link, between or one_link, times["adding"] / BULK_BYTES)
    ordinary, allocated = _curve(times, "ordinary"), _curve(times, "allocated")
    return Measured(network, ordinary or allocated, allocated or ordinary)


# --- times -----------------------------------------------------------------------------------------------------------


def timed(runs: Mapping[str, Callable[[], object]], in_a_row: int = 1, *, device: torch.device) -> Times:
    """Runs each of these several times, in turn, so that a disturbance hits all of them equally.

    Args:
        in_a_row: calls in each repetition.

    Returns:
        By name, the seconds per call of each repetition; one more before them warms up.
    """
    times: Times = {name: [] for name in runs}
    for _ in range(NUM_REPETITIONS + 1):
        for name, run in runs.items():
            start_s = now_s()
            for _ in range(in_a_row):
                run()
            if device.type == gpu.KIND:
                gpu.cuda.synchronize(device)
            times[name].append((now_s() - start_s) / in_a_row)
    return {name: repetitions[1:] for name, repetitions in times.items()}


def agreed(mine: Times, gather: Gather) -> dict[str, float]:
    """Returns, by name, the median over the repetitions of the slowest rank's time: the same on all ranks."""
    everyone: list[Times] = gathered(gather, mine)
    names = dict.fromkeys(name for times in everyone for name in times)
    by_rank = {name: [times[name] for times in everyone if name in times] for name in names}
    return {name: median(map(max, zip(*times, strict=True))) for name, times in by_rank.items()}


# --- links -----------------------------------------------------------------------------------------------------------


def _exchange(
    links: HostLinks, ring: Sequence[int], num_messages: int, num_bytes: int, *, device: torch.device
) -> Callable[[], object]:
    """Returns a round in which this rank sends to the next one of a ring and receives from the one before."""
    place = ring.index(links.rank)
    sends = [Send(ring[(place + 1) % len(ring)], range(k, k + 1)) for k in range(num_messages)]
    receives = [Recv(ring[place - 1], range(k, k + 1), add=False) for k in range(num_messages, 2 * num_messages)]
    schedule = Schedule(
        lambda rank, num_ranks: iter([(*sends, *receives)]), Goal.ALL_TO_ALL, lambda num_ranks: 2 * num_messages
    )
    return partial(links.run, schedule, torch.zeros(2 * num_messages * num_bytes, dtype=torch.uint8, device=device))


def _link(times: Mapping[str, float], name: str) -> Link | None:
    if f"{name} alpha" not in times:
        return None
    alpha_s = times[f"{name} alpha"]
    beta_s = max(0.0, times[f"{name} beta"] - alpha_s) / BULK_BYTES
    return Link(alpha_s, beta_s, max(0.0, times[f"{name} gap"] - alpha_s) / (NUM_MESSAGES - 1))


# --- memory ----------------------------------------------------------------------------------------------------------


def _in_memory(group: HostGroup, largest_host: int, device: torch.device) -> Times:
    """Times all-reduces among the ranks of this host, of a tensor that they share, and of one that they need not."""
    sizes = [nbytes for nbytes in MEMORY_BYTES if nbytes * largest_host <= MEMORY_IN_ALL]
    reduce = partial(group.all_reduce, op="sum", sequence=0)
    tensors = {"ordinary": torch.zeros(sizes[-1] // 4, dtype=torch.float32, device=device)}
    try:
        tensors["allocated"] = group.allocate(sizes[-1] // 4, torch.float32, sequence=0)
    except NoSharedMemory:  # on all ranks of the host
        pass
    times: Times = {}
    for nbytes in sizes:
        runs = {f"{kind} {nbytes}": partial(reduce, tensor[: nbytes // 4]) for kind, tensor in tensors.items()}
        times |= timed(runs, IN_A_ROW if nbytes <= 1 << 20 else 1, device=device)
    if "allocated" in tensors:
        group.free(tensors["allocated"])
    return times


def _curve(times: Mapping[str, float], kind: str) -> Curve | None:
    known = {nbytes: times[f"{kind} {nbytes}"] for nbytes in MEMORY_BYTES if f"{kind} {nbytes}" in times}
    return Curve(tuple(known), tuple(known.values())) if known else None
