"""Ranks that are threads, for what the reader has written: they talk by messages, and compare what they call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple, TypeVar

from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.comm.host_links import Settings
from ddp.errors import CollectiveMismatch, CommunicatorBroken, PeerLost
from recipes.tutorial.simulated import SimulatedNetwork, SimulatedTransport
from recipes.tutorial.tools.mistake import Mistake, raised

SILENCE_S = 10.0  # longest wait for a rank that runs in a thread beside
Comm = TypeVar("Comm", bound=Communicator)
Result = TypeVar("Result")


def on_ranks(
    num_ranks: int, program: Callable[[Comm], Result], *, kind: type[Comm], step: str, module: ModuleType
) -> list[Result]:
    """Returns what `program(comm)` returns on each rank.

    Args:
        kind: the class of the communicator.
        step: what is tried; module: the reader's file.

    Raises:
        Mistake: the reader's part has failed on some ranks; the one that the others followed from.
    """
    settings = Settings(algorithm="ring", shared_memory=False, abort_s=SILENCE_S, debug=True)

    def on_a_rank(transport: SimulatedTransport) -> Result | _Failed:
        comm = kind(transport, settings, hosts=(tuple(range(num_ranks)),))
        try:
            return program(comm)
        except Exception as error:
            return _Failed(error)
        finally:
            comm.close()

    results = SimulatedNetwork(num_ranks).run(on_a_rank)
    if errors := [result.error for result in results if isinstance(result, _Failed)]:
        raise _mistake_behind(errors, step, module)
    return [result for result in results if not isinstance(result, _Failed)]


class _Failed(NamedTuple):
    error: Exception


def _mistake_behind(errors: Sequence[Exception], step: str, module: ModuleType) -> Exception:
    """Returns the mistake behind the errors of some ranks: the one that the others followed from."""
    consequences = (PeerLost, CommunicatorBroken)
    error = min(errors, key=lambda each: (isinstance(each, consequences), isinstance(each, PeerLost)))
    if isinstance(error, CollectiveMismatch):
        hint = "every rank must launch the same all-reduces in the same order, whatever gradients it has itself"
        return Mistake(step, f"ranks call different collectives. {error}", hint)
    if isinstance(error, consequences):
        return Mistake(step, f"deadlock: {error}", "one rank waits in a collective that another one does not call")
    return raised(step, error, module) or Mistake(step, f"{type(error).__name__}: {error}")


def in_numbers(tensor: Tensor) -> str:
    """Returns the first numbers of a tensor."""
    shown = ", ".join(f"{number:.4g}" for number in tensor.flatten()[:3].tolist())
    return f"[{shown}{', …' if tensor.numel() > 3 else ''}]"
