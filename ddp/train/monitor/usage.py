"""Measures what each rank uses of its host, and what one worker alone would make.

    Usage                processor, memory and device of each rank, and its samples per second of its own time
    rate_of_one_worker   samples per second of one worker, with which the progress line compares several

    logging step   10     20     30     40      …
    gathered        x                    x            once a second, in words of steps, so that all ranks do the same
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from pathlib import Path

import torch

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.errors import ConfigError
from ddp.process import gpu
from ddp.process.clock import now_s
from ddp.process.memory import resident_bytes
from ddp.train.monitor.profile import FILE, read_profile

EVERY_S = 1.0


class Usage:
    """Gathers what each rank has used since the last time.

    The figures of all ranks travel together, about once a second and at logging steps alone: where one is to follow,
    every rank knows from what was gathered.
    """

    def __init__(self) -> None:
        self._num_lines = self._num_skipped = 0
        self._samples = self._own_s = 0.0
        self._since_s, self._cpu_s = now_s(), time.process_time()

    def figures(self, comm: Communicator, *, num_samples: int, own_s: float) -> dict[str, float]:
        """Returns figures by name and rank, as "cpu_use/rank_0"; none at most logging steps. Collective.

        Args:
            num_samples: of all ranks since the last logging step.
            own_s: in which this rank did not wait for others.
        """
        self._samples += num_samples / comm.world_size
        self._own_s += own_s
        self._num_lines += 1
        if self._num_lines <= self._num_skipped:
            return {}
        now, cpu_s = now_s(), time.process_time()
        elapsed_s = now - self._since_s or math.inf
        mine = {
            "cpu_use": (cpu_s - self._cpu_s) / elapsed_s,
            "memory_mb": resident_bytes() / 1e6,
            "samples_per_s": self._samples / self._own_s if self._own_s else 0.0,
            **_of_device(comm.device),
        }
        sent = [(elapsed_s, mine)]
        if comm.world_size > 1:
            sent = all_gather_object(comm, sent[0])
        line_s = max(seconds for seconds, _ in sent) / self._num_lines
        self._num_skipped = max(0, math.ceil(EVERY_S / line_s) - 1)
        self._num_lines, self._samples, self._own_s = 0, 0.0, 0.0
        self._since_s, self._cpu_s = now, cpu_s
        return {f"{name}/rank_{rank}": each[name] for name in mine for rank, (_, each) in enumerate(sent)}


def _of_device(device: torch.device) -> dict[str, float]:
    """Returns the memory that torch holds on a GPU, and where NVIDIA's library is installed, the share of busy time."""
    if device.type != gpu.KIND:
        return {}
    found = {"device_memory_mb": gpu.cuda.memory_reserved(device) / 1e6}
    try:
        return {**found, "device_use": gpu.cuda.utilization(device) / 100}
    except (AttributeError, ImportError, RuntimeError):
        return found


def rate_of_one_worker(
    runs: Path, *, model: str, num_parameters: int, threads: int, device: str
) -> float | None:
    """Returns the samples/s of one worker, by the latest profile of such a run in a folder of runs; None without one.

    Args:
        model, num_parameters, threads, device: as `Profile` has them; a run of others is another run.
    """
    wanted = 1, model, num_parameters, threads, device
    paths: list[Path] = []
    with suppress(OSError):  # one is being removed
        paths = sorted(runs.glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in paths:
        with suppress(ConfigError):  # it is of another version
            found = read_profile(path.parent)
            kind = found.device.partition(":")[0]
            if (found.world_size, found.model, found.num_parameters, found.threads, kind) == wanted:
                return found.batch / found.step_s
    return None
