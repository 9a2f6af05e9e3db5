"""Compares the clocks of hosts: what to add to a rank's clock to get rank 0's, and how far off that may be.

    rank 0      t0 ───────────╮                ╭─────── t3        Processes of one host read the same clock. Of every
                               ╲              ╱                   other host one rank exchanges messages with rank 0,
    other        ─ ─ ─ ─ ─ ─ ─  t1 ──────── t2                    as in NTP (RFC 5905, section 8).

    offset = ((t0 − t1) + (t3 − t2)) ÷ 2        round trip = (t3 − t0) − (t2 − t1)

The true offset is within half a round trip, however unequal the two ways are. So the exchange with the least round trip
counts. Clocks drift by some 10 µs a second, so a long measurement compares them before and after.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ddp.comm.communicator import Communicator
from ddp.comm.connect import boot_id
from ddp.comm.objects import all_gather_object, broadcast_object
from ddp.process.clock import now_s
from ddp.train.monitor.profile import ClockOffset

NUM_EXCHANGES = 20
SAME = ClockOffset(offset_s=0.0, error_s=0.0)


def clock_name() -> str:
    """Returns a text that is the same in all processes that read the same clock; "" if no other process does."""
    try:
        return f"{boot_id()} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return ""


def compare_clocks(comm: Communicator) -> list[ClockOffset]:
    """Returns the offset of each rank's clock, by rank. Collective."""
    names = all_gather_object(comm, clock_name())
    firsts = {name or str(rank): rank for rank, name in reversed(list(enumerate(names)))}
    found = {firsts[names[0] or "0"]: SAME}
    for first in firsts.values():
        if first not in found and comm.rank in (0, first):
            measured = _exchanged(comm, first)
            if comm.rank == 0:
                found[first] = measured
    offsets = [found.get(firsts[name or str(rank)], SAME) for rank, name in enumerate(names)]
    plain: list[tuple[float, float]] = broadcast_object(comm, [(each.offset_s, each.error_s) for each in offsets])
    return [ClockOffset(offset_s=offset_s, error_s=error_s) for offset_s, error_s in plain]


def _exchanged(comm: Communicator, other: int) -> ClockOffset:
    """Exchanges messages between rank 0 and another one; both call it."""
    times = torch.zeros(2, dtype=torch.float64, device=comm.device)
    found = []
    for _ in range(NUM_EXCHANGES):
        if comm.rank != 0:
            comm.recv(times, 0, label="clock").tolist()  # on a GPU, the host waits
            times.copy_(torch.tensor([now_s(), 0.0], dtype=torch.float64, device="cpu"))
            times[1] = now_s()
            comm.send(times, 0, label="clock")
        else:
            t0 = now_s()
            comm.send(times, other, label="clock")
            t1, t2 = comm.recv(times, other, label="clock").tolist()
            t3 = now_s()
            trip = ClockOffset(offset_s=((t0 - t1) + (t3 - t2)) / 2, error_s=((t3 - t0) - (t2 - t1)) / 2)
            found.append(trip)
    return min(found, key=lambda each: each.error_s) if found else SAME


def between(before: ClockOffset, after: ClockOffset) -> ClockOffset:
    """Returns the offset that holds from one comparison to the next."""
    drift_s = abs(after.offset_s - before.offset_s) / 2
    error_s = max(before.error_s, after.error_s) + drift_s
    return ClockOffset(offset_s=(before.offset_s + after.offset_s) / 2, error_s=error_s)
