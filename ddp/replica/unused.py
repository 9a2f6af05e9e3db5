"""Parameters without a gradient: the ranks find out which ones they are, and what follows.

    used on another rank     gets the mean, to which this rank has contributed zeros (or what it had accumulated)
    used on no rank          keeps the gradient that it had: None stays None
    undefined                autograd reaches the parameter with an undefined gradient (a function's backward has
                             returned None): like unused, and always allowed
    not allowed              every rank raises UnusedParameters before the next forward, with names by rank

The ranks compare parameter by parameter only in steps in which at least one rank has such parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum

import torch

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.errors import UnusedParameters
from ddp.gradients.bucket import Slot


class Use(IntEnum):
    """The use that a backward has made of a parameter."""

    NONE = 0  # it has not reached it
    UNDEFINED = 1  # it has reached it with an undefined gradient
    GRADIENT = 2


def greatest_uses(
    comm: Communicator, slots: Sequence[Slot], missing: Collection[Slot], undefined: Collection[Slot]
) -> list[Use]:
    """Returns the greatest use that any rank has made of each slot. Collective.

    Args:
        missing: slots that this rank's backward has not reached.
        undefined: slots that it has reached with an undefined gradient.
    """
    uses = torch.full((len(slots),), Use.GRADIENT, dtype=torch.uint8, device=comm.device)
    uses[[slot.index for slot in undefined]] = Use.UNDEFINED
    uses[[slot.index for slot in missing]] = Use.NONE
    return list(map(Use, comm.all_reduce(uses, "max", label="parameters used by any rank").tolist()))


def complaint(comm: Communicator, missing: Sequence[Slot] | None) -> UnusedParameters | None:
    """Returns the error that names the missing parameters of every rank; None if none has any. Collective.

    Args:
        missing: this rank's, in the order of registration; None: it had no backward, so that they are no error.
    """
    mine = None if missing is None else [f"{slot.name} ({slot.index})" for slot in missing]
    everyone = all_gather_object(comm, mine)
    if not any(everyone):
        return None
    lines = [f"  rank {rank}: {', '.join(n) or 'none'}" for rank, n in enumerate(everyone) if n is not None]
    return UnusedParameters(
        "Expected to have finished reduction in the prior iteration: these parameters (and their numbers in the order "
        "of registration) did not receive grad in it:\n"
        + "\n".join(lines)
        + "\nLet every parameter take part in the loss, set requires_grad=False on those that do not, or pass "
        "find_unused_parameters=True to ddp.DistributedDataParallel (static_graph=True, if they are the same in every "
        "step)"
    )
