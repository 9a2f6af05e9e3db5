"""Loader processes: torch's DataLoader starts them, and they end with their trainer.

torch's DataLoader does the work of processes, prefetching and pinning. Each item is a whole batch, which the data set
that it is given has made. Its processes compute with one thread each.

They share the memory of batches through Unix sockets in the folder for temporary files. The path of such a socket has
at most 107 bytes. So where TMPDIR is too long, as Slurm and Nextflow make it, the sockets get a folder elsewhere.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import current_process, util
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as torch_worker

from ddp.data.samples import as_it_is
from ddp.errors import ConfigError, UnreadableSample
from ddp.process.memory import ask_for_signal

_LONGEST_PATH = 107  # of a Unix socket
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def data_loader(
    batches: Any, *, num_workers: int, pin_memory: bool, processes: Mapping[str, Any], **others: Any
) -> DataLoader[Any]:
    """Returns a DataLoader whose items are batches.

    Args:
        batches: a data set of batches.
        processes: the user's worker_init_fn, multiprocessing_context and prefetch_factor, as far as given.
        others: further arguments of DataLoader.
    """
    if num_workers:
        _make_room_for_sockets()
    return DataLoader(
        batches,
        batch_size=None,
        collate_fn=as_it_is,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # otherwise each pass would draw its workers' seeds from the program's generator
        **process_options(processes, num_workers=num_workers),
        **others,
    )


def process_options(given: Mapping[str, Any], *, num_workers: int) -> dict[str, Any]:
    """Returns the arguments of torch's DataLoader for its processes, the user's `worker_init_fn` after our own."""
    if not num_workers:  # then torch refuses the others
        return {}
    return {**given, "worker_init_fn": partial(_begin_process, given.get("worker_init_fn"))}


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
    """Sees to it that sockets of loader processes have short paths. Before any is started.

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
# traceback and drops the batch, and the rank would wait for it for ever. So the loader process serialises a batch in
# its own code, where the error can name the sample, and the queue carries the bytes.
#
# The bytes of a tensor stay in shared memory, which the rank asks the loader process for.


class Failure(NamedTuple):
    """An error of the user's input, on its way from a loader process."""

    error: ConfigError


class Packed:
    """Holds in bytes what a loader process sends. What the rank takes from the queue is an equal value, not this.

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
    """Returns which sample of a batch cannot be pickled, as text."""
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
