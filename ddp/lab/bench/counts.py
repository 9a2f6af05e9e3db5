"""Counts what training uses: memory of a host at its peak, bytes of tensors on it, and bytes that leave it.

    peak       what processes hold at one moment: a thread samples them all while they train
    held       the bytes of tensors: what several ranks have mapped is one tensor's memory, and counts once
    sent       what the kernel has counted at the interfaces of the host

Memory is the proportional set size (PSS): what k processes have mapped counts 1/k for each, where RSS would count a
neighbour's gradients in full. So the sum over the ranks of a host counts shared memory once. Pages of files (libraries)
are left out, because they count less for a rank whenever a stranger maps them, too.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

REST_S = 0.001
COUNTED = ("Pss_Anon:", "Pss_Shmem:")


def can_count_memory() -> bool:
    """Returns True where the kernel counts proportional set sizes: on Linux."""
    return _rollup("self").exists()


def memory_of(pids: Sequence[int]) -> int:
    """Returns the bytes that processes hold together."""
    found = 0
    for pid in pids:
        with _rollup(pid).open() as lines:
            found += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(COUNTED))
    return found


def _rollup(pid: int | str) -> Path:
    return Path("/proc") / str(pid) / "smaps_rollup"


@contextlib.contextmanager
def sampling(*pids: int) -> Iterator[Callable[[], int]]:
    """Samples the memory of processes while the block runs: of this one unless others are named.

    A thread does it every few milliseconds, while torch computes without the interpreter's lock. A shorter peak can
    hide between two samples.

    Yields:
        a function that returns the most bytes that a sample found since its last call, that moment included.
    """
    watched, is_over, peak = pids or (os.getpid(),), threading.Event(), 0

    def sample() -> None:
        nonlocal peak
        while not is_over.wait(REST_S):
            peak = max(peak, memory_of(watched))

    def take() -> int:
        nonlocal peak
        taken, peak = max(peak, memory_of(watched)), 0
        return taken

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield take
    finally:
        is_over.set()
        thread.join()


# --- Bytes of tensors ------------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """Memory of a tensor: of what (a file that processes share, or a process), and from which byte to which."""

    of: tuple[str, int]
    start: int
    stop: int


def spans_of(tensors: Iterable[Tensor]) -> list[Span]:
    """Returns where tensors on the CPU lie, the same for all processes of a host that have mapped the same memory."""
    shared = _shared_mappings()
    found = []
    for tensor in tensors:
        address = tensor.data_ptr()
        for start, stop, offset, file in shared:
            if start <= address < stop:
                found.append(Span(file, offset + address - start, offset + address - start + tensor.nbytes))
                break
        else:
            found.append(Span(("", os.getpid()), address, address + tensor.nbytes))
    return found


def bytes_in(spans: Iterable[Span]) -> int:
    """Returns the bytes of spans; where some overlap, each byte counts once."""
    found, reached = 0, (("", 0), 0)
    for of, start, stop in sorted(spans):
        begin = max(start, reached[1]) if of == reached[0] else start
        if stop > begin:
            found, reached = found + stop - begin, (of, stop)
    return found


def _shared_mappings() -> list[tuple[int, int, int, tuple[str, int]]]:
    """Returns addresses, offset and file, by device and inode, of what this process shares with others."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, permissions, offset, device, inode, *_ = line.split()
            if permissions.endswith("s"):
                start, stop = (int(address, 16) for address in addresses.split("-"))
                found.append((start, stop, int(offset, 16), (device, int(inode))))
    return found


# --- Bytes that leave the host ---------------------------------------------------------------------------------------


def bytes_sent() -> int:
    """Returns the bytes that have left this host so far, by all interfaces but the loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counts = {name.strip(): counters.split() for name, counters in (line.split(":", 1) for line in lines)}
    return sum(int(of_one[8]) for name, of_one in counts.items() if name != "lo")
