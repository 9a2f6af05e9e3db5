"""Sends a batch from a loader process to its rank as bytes that the process has made itself.

torch's DataLoader hands a batch to a queue, whose thread serialises it. Where that fails, the thread prints a traceback
and drops the batch, and the rank would wait for it for ever. So the loader process serialises a batch in its own code,
where the error can name the sample, and the queue carries the bytes.

The bytes of a tensor stay in shared memory, which the rank asks the loader process for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from ddp.errors import ConfigError, UnreadableSample


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
    """Returns what `fetch` returns, or the user's error that it raises, packed.

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
    """Returns what a loader process has sent.

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
    """Returns which sample of a batch cannot be pickled, in words."""
    numbers = []
    for number, sample in samples:
        numbers.append(number)
        try:
            ForkingPickler.dumps(sample)
        except Exception:
            return f"sample {number}"
    return f"the batch of {in_words(numbers)}, as collate returns it,"


def in_words(samples: Sequence[int]) -> str:
    """Returns the numbers of the first samples of a batch, in words."""
    shown = ", ".join(map(str, samples[:5]))
    return f"sample{'s' if len(samples) > 1 else ''} {shown}{', …' if len(samples) > 5 else ''}"
