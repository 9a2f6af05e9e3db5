"""Puts the stand-in for GPUs and NCCL in the place of CUDA, in this process, and tells what happened on it."""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from gpu_standin import cuda, nccl
from gpu_standin.build import ON_HOST_WAIT, load

import ddp

PACKAGE = str(Path(ddp.__file__).parent)
HOST_WAITS: collections.Counter[HostWait] = collections.Counter()


class HostWait(NamedTuple):
    """The host waited for the device: how, and which lines of the package did, innermost first. () is the caller."""

    kind: str
    lines: tuple[str, ...]


def install(num_devices: int = 1, *, first_device: int = 0) -> None:
    """Registers the device and puts it in CUDA's place: once, in a rank's process, before any backward pass.

    Autograd counts the devices when it first runs; pytest's own process keeps to the CPU.

    Args:
        num_devices: as many are visible to this process.
        first_device: which of the host's devices the first of them is.
    """
    from ddp.comm import nccl as transport
    from ddp.process import gpu

    cuda.num_devices, cuda.first_device = num_devices, first_device
    load().start(num_devices, _note)
    torch.utils.rename_privateuse1_backend(cuda.KIND)
    torch._register_device_module(cuda.KIND, cuda)
    sys.modules[f"torch.{cuda.KIND}"] = cuda  # torch imports it by this name to initialise the device
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    gpu.KIND, gpu.cuda = cuda.KIND, cuda
    transport.ProcessGroupNCCL = nccl.ProcessGroupNCCL


@ON_HOST_WAIT
def _note(kind: bytes) -> None:
    frame: FrameType | None = sys._getframe()
    lines: list[str] = []
    while frame is not None and len(lines) < 3:
        if (name := frame.f_code.co_filename).startswith(PACKAGE):
            lines.append(f"{name.removeprefix(PACKAGE)[1:]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    HOST_WAITS[HostWait(kind.decode(), tuple(lines))] += 1


def reset() -> None:
    """Forgets what has been counted, logged and found so far."""
    load().reset()
    HOST_WAITS.clear()
    nccl.ENQUEUED.clear()


def commands() -> dict[str, int]:
    """Returns how many commands were launched, by the kernel's name."""
    return json.loads(load().report())["commands"]


def commands_by_stream() -> dict[str, int]:
    return json.loads(load().report())["by_stream"]


def counters() -> dict[str, int]:
    return json.loads(load().report())["counters"]


def host_waits() -> dict[HostWait, int]:
    """Returns how often the package's own lines made the host wait for the device."""
    return {each: number for each, number in HOST_WAITS.items() if each.lines}


def late(on: bool = True) -> None:
    """Makes the device late: to whoever asks, no command from now on is done before somebody has waited for it."""
    load().late(on)


def detect(on: bool = True, *, host_waits_order: bool = False) -> None:
    """Begins, or ends, to look for races among the commands to come.

    Args:
        host_waits_order: what the host waited for is ordered before what it launches then. Without, only events and
            streams order, and a host wait that happens to hide a race does not.
    """
    load().detect(on, host_waits_order)


def races() -> list[str]:
    """Returns the races found since `detect`, each once."""
    return sorted(set(json.loads(load().report())["races"]))
