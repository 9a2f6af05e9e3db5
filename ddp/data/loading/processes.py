"""Loader processes: torch's DataLoader starts them, and they end with their trainer.

torch's DataLoader does the work of processes, prefetching and pinning. Each item is a whole batch, made by the data set
that the DataLoader gets. Its processes compute with one thread each.

They share the memory of batches through Unix sockets in the folder for temporary files. The path of such a socket has
at most 107 bytes. So where TMPDIR is too long, as Slurm and Nextflow make it, the sockets get a folder elsewhere.

While a rank waits for a batch, a thread watches the processes: no wait is longer than their life, or than a deadline.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import current_process, util
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.signal_handling import _remove_worker_pids  # type: ignore[attr-defined]

from ddp.data.samples import as_it_is
from ddp.errors import ConfigError, LoaderLost, UnreadableSample
from ddp.process import gpu
from ddp.process.clock import Patience
from ddp.process.memory import ask_for_signal
from ddp.process.terminal import log

_LONGEST_PATH = 107  # of a Unix socket
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def data_loader(
    batches: Any, *, num_workers: int, pin_memory: bool, processes: Mapping[str, Any], **others: Any
) -> DataLoader[Any]:
    """Returns a DataLoader whose items are batches.

    Args:
        batches: a data set of batches.
        processes: the user's worker_init_fn, multiprocessing_context and prefetch_factor, as far as given; the
            function is called after our own.
        others: further arguments of DataLoader.
    """
    of_processes: dict[str, Any] = {}  # torch refuses any where there are none
    if num_workers:
        _make_room_for_sockets()
        if jax_runs():
            of_processes["multiprocessing_context"] = "forkserver"
        of_processes |= {**processes, "worker_init_fn": partial(_begin_process, processes.get("worker_init_fn"))}
    return DataLoader(
        batches,
        batch_size=None,
        collate_fn=as_it_is,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # otherwise each pass would draw its workers' seeds from the program's generator
        **of_processes,
        **others,
    )


def jax_runs() -> bool:
    """Returns True if this process computes on devices of JAX, beside whose threads a fork may deadlock."""
    return "ddp.replica.compiled" in sys.modules


def _begin_process(users: Callable[[int], None] | None, worker: int) -> None:
    """Begins a loader process; the user's function finds their own data set in `get_worker_info()`."""
    follow_the_trainer()
    if users is not None:
        appear_as(worker, dataset=torch_worker._worker_info.dataset.dataset)  # type: ignore[union-attr]
        users(worker)


def appear_as(worker: int, **facts: Any) -> None:
    """Makes `get_worker_info` say that this is the loader process with another number, or that it has other facts."""
    info: Any = torch_worker._worker_info
    known = {"num_workers": info.num_workers, "seed": info.seed, "dataset": info.dataset}
    torch_worker._worker_info = torch_worker.WorkerInfo(id=worker, **{**known, **facts})


def follow_the_trainer() -> None:
    """Leaves the trainer's process group, which a launcher signals as a whole: the trainer ends its loaders itself.

    If the trainer is killed, the kernel ends them, even in a read that never returns.
    """
    os.setpgid(0, 0)
    ask_for_signal(signal.SIGKILL)
    trainer = multiprocessing.parent_process()  # also where a fork server is the parent that the kernel knows
    if trainer is not None and not trainer.is_alive():  # it has died before
        os._exit(1)


def _make_room_for_sockets() -> None:
    """Makes sockets of loader processes have short paths. Must run before any is started.

    Raises:
        ConfigError: there is no folder with a short path.
    """
    config: dict[str, Any] = current_process()._config  # type: ignore[attr-defined]  # where multiprocessing keeps it
    usual = config.get("tempdir") or f"{tempfile.gettempdir()}/pymp-12345678"
    if len(os.fsencode(usual)) + len("/listener-12345678") <= _LONGEST_PATH:
        return
    before, tempdir = config.pop("tempdir", None), tempfile.tempdir
    for tempfile.tempdir in _SHORT_FOLDERS:
        with suppress(OSError):
            util.get_temp_dir()  # makes the folder that this process and those that it starts use from now on
            break
    tempfile.tempdir = tempdir
    if "tempdir" not in config:
        config["tempdir"] = before
        raise ConfigError(
            f"TMPDIR={tempfile.gettempdir()}: its path is too long for the sockets of loader processes: set a shorter "
            "one (75 letters at most), or take num_workers=0"
        )


# --- A batch on its way to its rank ----------------------------------------------------------------------------------
#
# torch's DataLoader hands a batch to a queue, whose thread serialises it. Where that fails, the thread prints a
# traceback and drops the batch, and the rank would wait for it forever. So the loader process serialises a batch in
# its own code, where the error can name the sample, and the queue carries the bytes.
#
# The bytes of a tensor stay in shared memory, which the rank asks the loader process for.


class Failure(NamedTuple):
    """An error of the user's input, on its way from a loader process."""

    error: ConfigError


class Packed:
    """The bytes that a loader process sends. The rank takes an equal value from the queue, not this object.

    So the rank has mapped the memory of a batch before the process can learn that it is no longer needed, and end.

    Args:
        value: anything that can be pickled.
    """

    def __init__(self, value: Any) -> None:
        self._bytes = bytes(ForkingPickler.dumps(value))

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return ForkingPickler.loads, (self._bytes,)


def packed(fetch: Callable[[], Any], samples: Iterable[tuple[int, Any]]) -> Packed:
    """Returns the result of `fetch`, or the user's error that it raises, packed.

    Args:
        samples: numbers and samples of this batch, read only to find the one that cannot be sent.
    """
    try:
        value = fetch()
        try:
            return Packed(value)
        except (OSError, MemoryError):
            raise
        except Exception as error:
            if is_about_memory(error):
                raise
            raise ConfigError(
                f"{_culprit(samples)} cannot be sent from a loader process ({error}): let samples and collate return "
                "tensors, arrays, numbers and texts, or take num_workers=0"
            ) from error
    except ConfigError as error:
        if type(error) not in (ConfigError, UnreadableSample):  # a user's own class may fail to be pickled
            raise
        return Packed(Failure(error))


def received(value: Any) -> Any:
    """Returns the value that a loader process has sent.

    Raises:
        ConfigError: the loader process has sent this error.
    """
    if isinstance(value, Failure):
        raise value.error
    return value


def is_about_memory(error: BaseException) -> bool:
    """Returns True if memory, or the part of it that processes share, has run out."""
    words = ("annot allocate memory", "unable to allocate shared memory", "No space left on device")
    return isinstance(error, MemoryError) or any(each in str(error) for each in words)


def _culprit(samples: Iterable[tuple[int, Any]]) -> str:
    """Returns, as text, the sample of a batch that cannot be pickled."""
    numbers = []
    for number, sample in samples:
        numbers.append(number)
        try:
            ForkingPickler.dumps(sample)
        except Exception:
            return f"sample {number}"
    return f"the batch of {in_words(numbers)}, as collate returns it,"


def in_words(samples: Sequence[int]) -> str:
    """Returns the numbers of the first samples of a batch, as text."""
    shown = ", ".join(map(str, samples[:5]))
    return f"sample{'s' if len(samples) > 1 else ''} {shown}{', …' if len(samples) > 5 else ''}"


# --- The watch, while a rank waits for a batch ------------------------------------------------------------------------
#
#     after warn_s                a warning names the process, its state and its samples
#     after abort_s               it is given up
#     once the run is to stop     it is given up at once if it is stopped (SIGSTOP), else after `STOP_S`
#     it dies                     torch's DataLoader notices within seconds; or its socket closes, a little before
#
# A rank waits in many places: in a queue, in a pipe that holds half a batch, at the socket of a process that shares
# memory. None of them can be left from outside, but all of them end with the processes. So a thread keeps the time, and
# to give up it kills the loader processes; the error that this raises in the rank becomes a `LoaderLost`.
#
# The rank records the beginning and the end of a wait by two assignments, and the thread checks twice a second. A
# `DataLoader(timeout=…)` would not do: it ends a wait in the queue, and none of the others.


CHECK_S = 0.5
STOP_S = 10.0  # a run that is to stop waits this long for a batch
END_S = 2.0  # a process whose socket has closed ends meanwhile
MEMORY = "the memory may have run out; take fewer loader processes"
_MEMORY_SIGNALS = (signal.SIGKILL, signal.SIGBUS)  # the kernel's, where memory or /dev/shm has run out


class Limits(NamedTuple):
    """Deadlines of a rank's waits for its loader processes, in seconds.

    Attributes:
        rank: for messages.
        warn_s: until a warning.
        abort_s: until they are given up.
        wants_stop: returns something true once the run is to stop.
    """

    rank: int = 0
    warn_s: float = 10.0
    abort_s: float = 600.0
    wants_stop: Callable[[], object] = bool


CPU = torch.device("cpu")
NO_LIMITS = Limits()


class WatchedLoader:
    """A DataLoader whose processes, if it has any, are watched.

    Args:
        batches: a data set of batches, by request or in a stream; in a loader process, packed.
        num_workers: loader processes; 0 loads in this process. Those that get requests stay from pass to pass.
        device: where batches are needed.
        processes: as in `data_loader`.
        limits: how long loader processes are waited for.

    Attributes:
        num_prefetched: batches that loader processes fetch before they are asked for.
    """

    def __init__(
        self,
        batches: Any,
        *,
        num_workers: int = 0,
        device: torch.device = CPU,
        processes: Mapping[str, Any] = MappingProxyType({}),
        limits: Limits = NO_LIMITS,
    ) -> None:
        self.num_workers, self.device, self._limits = num_workers, device, limits
        self._requests = _Requests(num_workers)
        of_requests = {"sampler": self._requests, "persistent_workers": num_workers > 0}
        self._loader = data_loader(
            batches,
            num_workers=num_workers,
            pin_memory=device.type == gpu.KIND,
            processes=processes,
            **({} if isinstance(batches, IterableDataset) else of_requests),
        )
        self.num_prefetched = num_workers * (self._loader.prefetch_factor or 0)
        self._iterator: Any = None  # once the processes have started
        self._before: set[int] = set()  # this process's descendants before they start
        self._wait: Patience | None = None  # while the rank waits; another one each time
        self._lost = ""

    def batches(
        self, requests: Iterable[Any] = (), through: Callable[[Iterator[Any]], Iterator[Any]] = iter
    ) -> Iterator[Any]:
        """Returns an iterator over the batches of one pass. Those of earlier passes must not be used any more.

        Args:
            requests: of the pass, which are taken ahead; each has `indices`. A stream needs none.
            through: makes the iterator that the rank reads, perhaps in another thread, of that over the batches.

        Raises:
            LoaderLost: a loader process has died, or was given up; when the iterator is read.
        """
        self._requests.begin(requests)
        if not self._loader.num_workers:
            return through(iter(self._loader))
        return self._explained(through(self._watched()))

    def _watched(self) -> Iterator[Any]:
        is_over = threading.Event()
        threading.Thread(target=self._watch, args=(is_over,), name="ddp-loader-watch", daemon=True).start()
        try:
            self._iterator = self._loader._iterator  # of persistent processes, each of which is to begin again
            self._before = _descendants(os.getpid())
            self._iterator = self._waiting(_started if self._iterator is None else iter, self._loader)
            while True:
                try:
                    batch = received(self._waiting(next, self._iterator))
                except StopIteration:
                    return
                self._requests.arrived()
                yield batch
        finally:
            is_over.set()

    def _waiting(self, call: Callable[[Any], Any], argument: Any) -> Any:
        self._wait = Patience(self._limits.abort_s)
        try:
            return call(argument)
        finally:
            self._wait = None

    def _explained(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from batches
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

    # --- the thread --------------------------------------------------------------------------------------------------

    def _watch(self, is_over: threading.Event) -> None:
        """Looks how long the rank has been waiting, until the pass is over or a process is given up."""
        limits, stopping, warned = self._limits, Patience(STOP_S), None
        while not (is_over.wait(CHECK_S) or self._lost):
            wait = self._wait
            if wait is None or not limits.wants_stop():
                stopping = Patience(STOP_S)
            if wait is None:
                continue
            waited_s = limits.abort_s - wait.left_s()
            place, state = self._late()
            if waited_s >= limits.abort_s:
                self._give_up(place, state, f"for {limits.abort_s:g} s (abort_s)")
            elif limits.wants_stop() and (state == "stopped" or not stopping.left_s()):
                self._give_up(place, state, f"while the run shall stop ({limits.wants_stop()})")
            elif waited_s > limits.warn_s and wait is not warned:
                warned = wait
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

    # --- texts of warnings and errors --------------------------------------------------------------------------------

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
        """Returns, as text, which loader process was given up or has ended, and why; "" for any other error."""
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
        return self._requests.in_words()


class _Requests:
    """DataLoader's `sampler`: one object, because its workers persist, whose content each pass replaces.

    It knows the samples of each batch that loader processes were asked for, and which has not arrived.
    """

    def __init__(self, num_workers: int) -> None:
        self._source: Iterable[Any] = ()
        self._asked: deque[Sequence[int]] = deque(maxlen=None if num_workers else 0)

    def begin(self, source: Iterable[Any]) -> None:
        """Begins a pass."""
        self._source = source
        self._asked.clear()

    def __iter__(self) -> Iterator[Any]:
        for request in self._source:  # lazily, because DataLoader makes one iterator more than it uses
            self._asked.append(request.indices)
            yield request

    def arrived(self) -> None:
        """Records that the next batch has arrived."""
        if self._asked:
            self._asked.popleft()

    def in_words(self) -> str:
        """Returns the samples of the next batch, as text; a stream does not know them."""
        return in_words(list(self._asked[0])) if self._asked else "its next batch"


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
