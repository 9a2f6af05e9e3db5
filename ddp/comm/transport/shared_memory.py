"""Memory that processes of one host share, and a barrier in it, on which `comm/host_reduce.py` is built.

    kind         neighbours find it at           limit                       a crash leaves
    "memfd"      /proc/PID/fd/N of the creator   the host's memory           nothing: it has no name
    "/dev/shm"   /dev/shm/ddp-…                  the mount's size, often     the name, unless all ranks
                                                 64 MB in a container        had mapped the memory

`memfd_create` is tried first. Opening a neighbour's descriptor requires the right to inspect its process, which a
process of another user or in another PID namespace lacks. Then a file in /dev/shm is tried. Its memory is reserved at
once (`posix_fallocate`), because otherwise touching a missing page ends in SIGBUS, long after the call that could have
reported it. With both kinds, the path is needed only until every neighbour has mapped the memory. Then the creator
calls `forget`, and the memory ends with its last mapping.

The barrier is n × n semaphores, glibc's `sem_t`, called through ctypes. Calls that never wait (a post, a try) keep the
interpreter lock, because releasing it costs more than the call, and up to 5 ms while another thread is busy in Python.
The call that waits, `sem_clockwait`, releases the lock, and takes no CPU time from the rank that it waits for. It uses
the monotonic clock, so that setting the wall clock neither ends nor prolongs a wait. It waits in slices, so that
signals are handled, and the waiting rank can check whether the other one is still alive. Where it is missing (macOS,
musl, glibc before 2.30), `why_unsupported` says so, and the caller uses its sockets.

Note "patience". Sleeping and being woken on another processor costs 10 to 50 µs, on a virtual machine mostly for waking
up the processor. Ranks that arrive at about the same time can avoid that cost. So a wait spins for about as long as a
sleep would cost before it sleeps, which is never more than twice the best possible cost (Karlin, Li, Manasse and
Owicki, "Empirical studies of competitive spinning for a shared-memory multiprocessor", SOSP 1991). After each try it
yields the processor (`sched_yield`), because the rank that it waits for may need that very processor: there may be more
ranks than processors, or another program may keep one busy. Switching between processes costs 2 µs, and no processor
goes idle in between. A barrier after 30 µs of work, measured on two cores, with and without yielding: of 2 ranks 1 and
1 µs; of 2 ranks next to another program 35 and 52 µs; of 4 ranks 40 and 156 µs.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import secrets
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

from ddp.comm.transport.edge import GiveUpCheck, TransportError, never_hopeless
from ddp.process.clock import Patience
from ddp.process.files import NOTHING, why_shared
from ddp.process.memory import available_bytes

Kind = Literal["memfd", "/dev/shm"]
KINDS: tuple[Kind, ...] = ("memfd", "/dev/shm")

LINE_BYTES = 64  # a cache line; data of two writers is on different lines
SLICE_S = 0.2  # longest sleep between checks
TRIES = 128  # some 40 to 80 µs: note "patience"
KEEP_LOCK_BYTES = 32 << 10  # copying this much takes less time than releasing and reacquiring the interpreter lock
_NAMED = Path("/dev/shm")
_NAME = re.compile(r"ddp-(\d+)-[0-9a-f]{16}")
_PATH = re.compile(rf"/proc/\d+/fd/\d+|{_NAMED}/{_NAME.pattern}")
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


# --- memory ----------------------------------------------------------------------------------------------------------


class SharedMemory:
    """One mapping. It ends with this object and the last tensor over its `buffer`.

    Attributes:
        path: where neighbours find the memory, until its creator calls `forget`.
        buffer: the bytes.
        address: of the first byte in this process.
    """

    def __init__(self, descriptor: int, path: str, num_bytes: int) -> None:
        self.path = path
        self.buffer = mmap.mmap(descriptor, num_bytes)
        with torch.inference_mode(False):  # the memory may later be trained in
            self.bytes = torch.frombuffer(self.buffer, dtype=torch.uint8)  # [num_bytes]
        self.address = self.bytes.data_ptr()
        self._descriptor: int | None = None

    @classmethod
    def create(cls, kind: Kind, num_bytes: int) -> SharedMemory:
        """Creates zeroed memory.

        Raises:
            OSError: there is not enough memory, or this kind is not supported.
        """
        if num_bytes > (available := available_bytes()):
            raise OSError(errno.ENOMEM, f"{num_bytes} bytes of shared memory wanted, {available} are left here")
        name = f"ddp-{os.getpid()}-{secrets.token_hex(8)}"
        if kind == "memfd":
            if not hasattr(os, "memfd_create"):
                raise OSError(errno.ENOSYS, "this platform has no memfd_create")
            descriptor = os.memfd_create(name)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            path = f"/dev/shm/{name}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, num_bytes)
            if kind == "/dev/shm":
                os.posix_fallocate(descriptor, 0, num_bytes)
            memory = cls(descriptor, path, num_bytes)
        except BaseException:
            _end(descriptor, path)
            raise
        memory._descriptor = descriptor
        return memory

    @classmethod
    def attach(cls, path: str, num_bytes: int) -> SharedMemory:
        """Maps the memory that a neighbour has created.

        Raises:
            OSError: it cannot be reached from here, is other memory, or belongs to another user, who could truncate it.
        """
        descriptor = open_memory(path)
        try:
            return cls(descriptor, path, num_bytes)
        except ValueError as error:  # from mmap, if the file is shorter
            raise OSError(errno.EINVAL, str(error), path) from error
        finally:
            os.close(descriptor)

    def forget(self) -> None:
        """Closes the path, once every neighbour has attached. Harmless on attached memory."""
        if self._descriptor is not None:
            _end(self._descriptor, self.path)
            self._descriptor = None

    def prefault(self, start: int, stop: int) -> None:
        """Maps the pages of a range into this process's page table now, instead of at their first touch.

        Args:
            start, stop: multiples of the page size.

        Raises:
            OSError: there is not enough memory.
        """
        try:
            self.buffer.madvise(_POPULATE_WRITE, start, stop - start)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the kernel does not support the request
                raise
            # Reading maps the pages, too. Writing the values back could undo a neighbour's concurrent write.
            self.bytes[start : stop : mmap.PAGESIZE].max()


def open_memory(path: str) -> int:
    """Returns a descriptor of the memory that a process of this user has created.

    Raises:
        OSError: it cannot be reached from here, is other memory, or belongs to another user.
    """
    is_memfd = path.startswith("/proc/")
    if not _PATH.fullmatch(path) or (is_memfd and not str(Path(path).readlink()).startswith("/memfd:ddp-")):
        raise OSError(errno.EPERM, "is no memory of a neighbour", path)  # but a file of the user
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (0 if is_memfd else os.O_NOFOLLOW))
    if why_shared(Path(path), os.fstat(descriptor), rights=NOTHING):  # a memfd has no meaningful mode
        os.close(descriptor)
        raise OSError(errno.EPERM, "belongs to another user", path)
    return descriptor


def _end(descriptor: int, path: str) -> None:
    os.close(descriptor)
    if path.startswith("/dev/shm/"):
        Path(path).unlink()


def left_behind(folder: Path = _NAMED) -> list[Path]:
    """Returns the files of processes of this user that were killed before everyone had mapped the memory.

    A process in another PID namespace that shares the folder also counts as ended.
    """
    found = [(path, named) for path in folder.glob("ddp-*") if (named := _NAME.fullmatch(path.name))]
    return [path for path, named in found if _is_mine(path) and not Path(f"/proc/{named[1]}").exists()]


def _is_mine(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except FileNotFoundError:  # its creator has just removed it
        return False


_MEMMOVE = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
_ADDRESS = ctypes.c_void_p
_releasing_memmove = ctypes.CFUNCTYPE(None, _ADDRESS, _ADDRESS, ctypes.c_size_t)(_MEMMOVE)
_holding_memmove = ctypes.PYFUNCTYPE(None, _ADDRESS, _ADDRESS, ctypes.c_size_t)(_MEMMOVE)


def copy_bytes(to: int, source: int, num_bytes: int) -> None:
    """Copies between two addresses; releases the interpreter lock for large copies."""
    if num_bytes > KEEP_LOCK_BYTES:
        _releasing_memmove(to, source, num_bytes)
    elif num_bytes:
        _holding_memmove(to, source, num_bytes)


# --- semaphores ------------------------------------------------------------------------------------------------------


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def why_unsupported() -> str:
    """Returns the reason why this platform has no semaphores between processes; "" if it has them."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):
        return "the C library cannot be called"
    missing = [name for name in ("sem_init", "sem_post", "sem_trywait", "sem_clockwait") if not hasattr(libc, name)]
    return f"the C library has no {', '.join(missing)}" if missing else ""


class _Semaphores:
    """The C library's semaphore functions; a semaphore is an address here."""

    def __init__(self) -> None:
        holding, releasing = ctypes.PyDLL(None), ctypes.CDLL(None, use_errno=True)
        self._init = holding.sem_init
        self._init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        self.post: Callable[[int], int] = holding.sem_post
        self.try_wait: Callable[[int], int] = holding.sem_trywait  # 0 if it took a post
        holding.sem_post.argtypes = holding.sem_trywait.argtypes = (ctypes.c_void_p,)
        self._clock_wait = releasing.sem_clockwait
        self._clock_wait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec))
        self._until = _Timespec()
        self._until_reference = ctypes.pointer(self._until)

    def create(self, semaphore: int) -> None:
        """Initializes a semaphore to 0, shared between processes."""
        if self._init(semaphore, 1, 0) != 0:
            raise OSError("sem_init failed")

    def sleep(self, semaphore: int, *, until_s: float) -> bool:
        """Takes a post. Returns False without one by `until_s` on the monotonic clock, or after a signal."""
        self._until.seconds = int(until_s)
        self._until.nanoseconds = int(until_s % 1 * 1e9)
        if self._clock_wait(semaphore, time.CLOCK_MONOTONIC, self._until_reference) == 0:
            return True
        number = ctypes.get_errno()
        if number not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(number, f"sem_clockwait: {os.strerror(number)}")
        return False


# --- the barrier -----------------------------------------------------------------------------------------------------


class ProcessHandle:
    """A handle that knows whether a process still runs. Unknown counts as running: no pidfds, another PID namespace.

    Any thread may use it, at any time.
    """

    def __init__(self, pid: int | None) -> None:
        self._descriptor: int | None = None
        if pid is not None and hasattr(os, "pidfd_open"):
            try:
                self._descriptor = os.pidfd_open(pid)
            except OSError:
                return

    def is_running(self) -> bool:
        """Returns False once the process has ended."""
        if (descriptor := self._descriptor) is None:
            return True
        poll = select.poll()  # a new one, because two threads may not share it
        poll.register(descriptor, select.POLLIN)
        return not any(event & select.POLLIN for _, event in poll.poll(0))  # not POLLNVAL, after `close`

    def close(self) -> None:
        """Closes the descriptor."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    __del__ = close  # not earlier after an error, because a thread may still use it


_RUNS, _LEFT, _GAVE_UP = 0, 1, 2  # states of a process; _GAVE_UP + i: gave up because of process i


class Barrier:
    """Lets the processes of one group wait for each other; used by one thread of each at a time.

    Each process posts to every other one, then takes one post from each, so the last one to arrive does not sleep at
    all. If a process has left or ended, only those that wait for it raise an error, because it may have completed its
    last barrier. If a process has given up because of another one, all blame that other one.

    Args:
        memory: whose first `num_bytes` hold semaphores [to][from] and states. One process calls `create` before the
            others attach.
        ranks: the processes' numbers in errors.
        pids: by process; None if unknown.
        hopeless_because: a wait calls it from time to time, and ends if it returns a rank that will never arrive.
    """

    def __init__(
        self,
        memory: SharedMemory,
        *,
        index: int,
        ranks: Sequence[int],
        pids: Sequence[int | None],
        hopeless_because: GiveUpCheck = never_hopeless,
    ) -> None:
        size = len(ranks)
        self._memory, self._index, self._ranks, self._pid = memory, index, tuple(ranks), os.getpid()
        self._hopeless_because = hopeless_because
        self._semaphores = _Semaphores()
        self._post, self._try_wait = self._semaphores.post, self._semaphores.try_wait
        others = [(index + distance) % size for distance in range(1, size)]  # each process begins with a different one
        address = memory.address
        self._outgoing = [address + LINE_BYTES * (other * size + index) for other in others]
        self._incoming = [(address + LINE_BYTES * (index * size + other), other) for other in reversed(others)]
        states = address + LINE_BYTES * size * size
        self._states = [ctypes.c_uint32.from_address(states + LINE_BYTES * number) for number in range(size)]
        self._processes = {other: ProcessHandle(pids[other]) for other in others}

    @staticmethod
    def num_bytes(size: int) -> int:
        """Returns the memory that a barrier of `size` processes takes."""
        return LINE_BYTES * (size * size + size)

    @staticmethod
    def create(memory: SharedMemory, *, size: int) -> None:
        """Creates the semaphores in zeroed memory."""
        semaphores = _Semaphores()
        for number in range(size * size):
            semaphores.create(memory.address + LINE_BYTES * number)

    def wait(self, timeout_s: float) -> None:
        """Returns once every process has called it.

        Args:
            timeout_s: longest wait for all of them, in seconds.

        Raises:
            TransportError: a process did not. The barrier is unusable afterwards, for every process.
        """
        for semaphore in self._outgoing:
            self._post(semaphore)
        missing, try_wait = list(self._incoming), self._try_wait
        for _ in range(TRIES):
            while missing and try_wait(missing[-1][0]) == 0:
                missing.pop()
            if not missing:
                return
            os.sched_yield()
        patience = Patience(timeout_s)
        for semaphore, other in reversed(missing):
            has_come = try_wait(semaphore) == 0
            while not has_come:
                until_s = time.monotonic() + min(patience.left_s(), SLICE_S)
                has_come = self._semaphores.sleep(semaphore, until_s=until_s)
                if not has_come and (lost := self._lost(other, late=not patience.left_s())) is not None:
                    has_come = try_wait(semaphore) == 0  # it may have posted just before its end
                    if not has_come:
                        self.give_up(self._ranks.index(lost.peer) if lost.peer in self._ranks else None)
                        raise lost

    def give_up(self, because_of: int | None = None) -> None:
        """Ends the others' waits for this process, and names the culprit: itself unless given."""
        if (mine := self._states[self._index]).value == _RUNS:
            mine.value = _GAVE_UP + (self._index if because_of is None else because_of)

    def leave(self) -> None:
        """Announces that this process will not return to the barrier. A no-op in a forked child of a member."""
        if self._pid == os.getpid():
            if (mine := self._states[self._index]).value == _RUNS:
                mine.value = _LEFT
            for life in self._processes.values():
                life.close()

    def _lost(self, other: int, *, late: bool) -> TransportError | None:
        """Returns the error if waiting for process `other` is useless; else None."""
        if (lost := self._hopeless_because()) is not None:
            return TransportError(*lost)
        for witness, its in zip(self._ranks, self._states, strict=True):
            if (state := its.value) >= _GAVE_UP:
                culprit = self._ranks[state - _GAVE_UP]
                if culprit == witness:
                    return TransportError(culprit, "it has given up a collective of this host")
                return TransportError(culprit, f"rank {witness} on this host has given up waiting for it")
        rank = self._ranks[other]
        if self._states[other].value == _LEFT:
            return TransportError(rank, "it has left this host's group")
        if not self._processes[other].is_running():
            return TransportError(rank, "its process has ended")
        return TransportError(rank, "it did not reach this host's barrier", timed_out=True) if late else None
