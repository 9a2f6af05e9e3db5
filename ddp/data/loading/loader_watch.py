"""Watches loader processes while a rank waits for their batch: no wait is longer than their life, or than a deadline.

    after warn_s                a warning names the process, its state and its samples
    after abort_s               it is given up
    once the run shall stop     it is given up at once if it is stopped (SIGSTOP), else after `STOP_S`
    it dies                     torch's DataLoader notices within seconds; or its socket closes, a little before

A rank waits in many places: in a queue, in a pipe that holds half a batch, at the socket of a process that shares
memory. None of them can be left from outside, but all of them end with the processes. So a thread keeps the time, and
to give up it kills the loader processes; the error that this raises in the rank becomes a `LoaderLost`.

The rank notes the beginning and the end of a wait by two assignments, and the thread checks twice a second.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import DataLoader
from torch.utils.data._utils.signal_handling import _remove_worker_pids  # type: ignore[attr-defined]

from ddp.data.loading.processes import in_words, is_about_memory, received
from ddp.errors import ConfigError, LoaderLost
from ddp.process.clock import Patience
from ddp.process.terminal import log

CHECK_S = 0.5
STOP_S = 10.0  # a run that shall stop waits so long for a batch
END_S = 2.0  # a process whose socket has closed ends meanwhile
MEMORY = "the memory may have run out; take fewer loader processes"
_MEMORY_SIGNALS = (signal.SIGKILL, signal.SIGBUS)  # the kernel's, where memory or /dev/shm has run out


class Limits(NamedTuple):
    """Deadlines of a rank's waits for its loader processes, in seconds.

    Attributes:
        rank: for messages.
        warn_s: until a warning.
        abort_s: until they are given up.
        wants_stop: returns something true once the run shall stop.
    """

    rank: int = 0
    warn_s: float = 10.0
    abort_s: float = 600.0
    wants_stop: Callable[[], object] = bool


class LoaderWatch:
    """Passes on the batches of a DataLoader, and watches its processes, if it has any.

    Args:
        loader: its processes send their batches packed (`processes.py`).

    Attributes:
        asked: the samples of each batch that was asked for and has not come; the one who asks appends to it. It stays
            empty for streams, and where there are no loader processes.
    """

    def __init__(self, loader: DataLoader[Any], limits: Limits) -> None:
        self._loader, self._limits = loader, limits
        self.asked: deque[Sequence[int]] = deque()
        self._iterator: Any = None  # once the processes have started
        self._before: set[int] = set()  # this process's descendants before they start
        self._waits, self._number = False, 0
        self._lost = ""

    def batches(self) -> Iterator[Any]:
        """Returns an iterator over the batches of one pass."""
        self.asked.clear()
        return self._watched() if self._loader.num_workers else iter(self._loader)

    def _watched(self) -> Iterator[Any]:
        self._iterator = self._loader._iterator  # of processes that persist
        with self._watching():
            if self._iterator is None:
                self._before = _descendants(os.getpid())
                self._iterator = self._wait_for(_started, self._loader)
            else:
                self._wait_for(iter, self._loader)  # for each process, which is to begin anew
            while True:
                try:
                    batch = self._wait_for(_next, self._iterator)
                except StopIteration:
                    return
                if self.asked:
                    self.asked.popleft()
                yield batch

    def explained(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Returns batches that came through `batches`, in whichever thread that is read.

        Raises:
            LoaderLost: a loader process has died, or was given up; when the iterator is read.
        """
        return self._explained(batches) if self._loader.num_workers else batches

    def _explained(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception as error:
                try:
                    why = self._why(error)
                except RuntimeError:  # torch's handler of SIGCHLD, which may come a little later than the end of a pipe
                    why = self._why(error)
                if why:
                    raise LoaderLost(why) from error
                if is_about_memory(error):
                    error.add_note(MEMORY)
                raise
            yield batch

    def close(self) -> None:
        """Ends the loader processes. None is left, also of those that are stopped."""
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            return
        if deaf := [each for each in iterator._workers if self._lost or _state(each.pid) == "stopped"]:
            _expect_no_more(iterator)
            for process in deaf:
                process.kill()
        ending = threading.Thread(target=iterator._shutdown_workers, name="ddp-end-loader", daemon=True)
        ending.start()
        ending.join(STOP_S)  # it waits without a deadline for a thread that may be reading half a batch
        for process in iterator._workers:
            process.kill()  # if it is alive yet: the interpreter waits for it when it exits
            process.join(1.0)
        if self._loader._iterator is iterator:  # DataLoader has no public way to end persistent workers
            self._loader._iterator = None

    # --- the wait ----------------------------------------------------------------------------------------------------

    def _wait_for(self, call: Callable[[Any], Any], argument: Any) -> Any:
        self._number += 1
        self._waits = True
        try:
            return call(argument)
        finally:
            self._waits = False

    # --- the thread --------------------------------------------------------------------------------------------------

    @contextmanager
    def _watching(self) -> Iterator[None]:
        is_over = threading.Event()
        threading.Thread(target=self._watch, args=(is_over,), name="ddp-loader-watch", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def _watch(self, is_over: threading.Event) -> None:
        """Looks how long the rank has been waiting, until the pass is over or a process is given up."""
        limits, number = self._limits, 0
        patience, stopping, has_warned = Patience(limits.abort_s), Patience(STOP_S), False
        while not (is_over.wait(CHECK_S) or self._lost):
            if not self._waits or self._number != number:
                number, patience, has_warned = self._number, Patience(limits.abort_s), False
            if not self._waits or not limits.wants_stop():
                stopping = Patience(STOP_S)
            if not self._waits:
                continue
            waited_s = limits.abort_s - patience.left_s()
            place, state = self._late()
            if waited_s >= limits.abort_s:
                self._give_up(place, state, f"for {limits.abort_s:g} s (abort_s)")
            elif limits.wants_stop() and (state == "stopped" or not stopping.left_s()):
                self._give_up(place, state, f"while the run shall stop ({limits.wants_stop()})")
            elif waited_s > limits.warn_s and not has_warned:
                has_warned = True
                log.warning("waited %.0f s for %s, %s, to send %s", waited_s, self._name(place), state, self._samples())

    def _give_up(self, place: int | None, state: str, how_long: str) -> None:
        remedy = "look what a sample waits for; if reading takes so long, raise comm.abort_s (abort_s of ddp.init)"
        if state == "stopped" and place is not None:
            remedy = f"continue it with kill -CONT {self._iterator._workers[place].pid}, or find out who has stopped it"
        self._lost = f"{self._name(place)} is {state} and has not sent {self._samples()} {how_long}: {remedy}"
        if self._iterator is not None:
            for process in self._iterator._workers:
                process.kill()
            return
        for pid in _descendants(os.getpid()) - self._before:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # --- words -------------------------------------------------------------------------------------------------------

    def _late(self) -> tuple[int | None, str]:
        """Returns the number and the state of the process that the rank waits for; None while they start."""
        iterator = self._iterator
        if iterator is None:
            return None, "starting"
        states = [_state(process.pid) for process in iterator._workers]
        awaited = (iterator._task_info.get(iterator._rcvd_idx) or (0,))[0]
        # One that is stopped may hold the lock of the queue, which all of them share.
        place = next((each for each, state in enumerate(states) if state == "stopped"), awaited)
        return place, states[place]

    def _why(self, error: BaseException) -> str:
        """Returns which loader process was given up or has ended, and why, if that is what an error is about."""
        if self._lost:
            if self._iterator is not None:
                _expect_no_more(self._iterator)
            return self._lost
        if self._iterator is None or not (_is_of_a_connection(error) or "DataLoader worker (pid" in str(error)):
            return ""
        patience = Patience(END_S)
        while not any(process.exitcode for process in self._iterator._workers) and patience.left_s():
            time.sleep(0.005)
        for place, process in enumerate(self._iterator._workers):
            if process.exitcode:
                how, remedy = f"ended with status {process.exitcode}", "num_workers=0 shows where"
                if process.exitcode < 0:
                    how = f"was killed by {signal.Signals(-process.exitcode).name}"
                    remedy = MEMORY if -process.exitcode in _MEMORY_SIGNALS else remedy
                return f"{self._name(place)} {how} before it had sent {self._samples()}: {remedy}"
        return ""

    def _name(self, place: int | None) -> str:
        if place is None:
            return f"a loader process of rank {self._limits.rank}"
        pid = self._iterator._workers[place].pid
        return f"loader process {place} of rank {self._limits.rank} (pid {pid})"

    def _samples(self) -> str:
        return in_words(list(self.asked[0])) if self.asked else "its next batch"


def _started(loader: DataLoader[Any]) -> Iterator[Any]:
    """Starts the processes; returns the iterator over their batches.

    Raises:
        ConfigError: they cannot be started here.
    """
    try:
        return iter(loader)
    except OSError as error:
        raise ConfigError(
            f"loader processes cannot be started: {error.strerror or error}. They need room in /dev/shm, and leave to "
            "write there; without them, take num_workers=0"
        ) from error


def _is_of_a_connection(error: BaseException) -> bool:
    """Returns True if an error may be of the socket of a loader process, and not of what it has read."""
    return isinstance(error, (EOFError, OSError)) and "in DataLoader worker process" not in str(error)


def _descendants(pid: int) -> set[int]:
    """Returns the processes that a process has started, and those that they have; none where there is no /proc."""
    found = set[int]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            for child in map(int, path.read_text().split()):
                found |= {child, *_descendants(child)}
    return found


def _next(batches: Iterator[Any]) -> Any:
    return received(next(batches))


def _expect_no_more(iterator: Any) -> None:
    """Keeps torch from raising an error, wherever the program is, for each loader process that ends from now on."""
    if iterator._worker_pids_set:
        _remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def _state(pid: int | None) -> str:
    """Returns the state of a process, in a word."""
    with suppress(OSError):  # it has ended, or there is no /proc
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return {"T": "stopped", "t": "stopped", "D": "waiting for a disk or network", "Z": "dead"}.get(letter, "alive")
    return "alive"
