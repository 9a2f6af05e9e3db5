"""Measures on this host what forecasts have to know of communication, where no profile has it.

    measured_here    links, and memory that ranks share, as calibration finds them
    taken_s          seconds of a core for each byte that a host sends: by how much a matrix product beside it is slower
"""

from __future__ import annotations

import statistics

import torch

import ddp
from ddp.comm.calibrate import Measured
from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.process.clock import now_s
from ddp.run.launch.from_python import launch

MATRIX, LOOPS_S, SENT_BYTES = 256, 0.1, 8 << 20
TIMEOUT_S = 300


def measured_here(num_ranks: int, threads: int) -> Measured:
    """Returns the figures of links and memory of this number of ranks on this host."""
    found: Measured = launch(_figures, workers=num_ranks, threads_per_worker=threads, timeout_s=TIMEOUT_S)[0]
    return found


def _figures() -> Measured:
    comm = ddp.init(device="cpu")
    measured = comm.plan.measured
    ddp.shutdown()
    return measured


def taken_s(comm: Communicator) -> float:
    """Returns the seconds of a core that communication takes for each byte that a host sends. Collective."""
    num_hosts = comm.host_partition.num_hosts
    if num_hosts == 1:
        return 0.0
    matrix, flat = torch.randn(MATRIX, MATRIX), torch.zeros(SENT_BYTES // 4)
    comm.all_reduce(flat.clone())  # finds the algorithm
    comm.barrier()
    start_s, loops = now_s(), 0
    while now_s() - start_s < LOOPS_S:
        torch.mm(matrix, matrix)
        loops += 1
    loop_s = (now_s() - start_s) / loops
    comm.barrier()
    start_s, loops = now_s(), 0
    work = comm.all_reduce(flat, async_op=True)
    while not work.is_completed():
        torch.mm(matrix, matrix)
        loops += 1
    work.wait()
    lost_s = max(0.0, now_s() - start_s - loops * loop_s)
    sent = 2 * SENT_BYTES * (num_hosts - 1) / num_hosts
    return float(statistics.fmean(all_gather_object(comm, lost_s / sent)))
