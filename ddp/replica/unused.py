"""Parameters without a gradient: what they keep, and who is told.

    used on another rank     gets the mean, to which this rank has contributed zeros (or what it had accumulated)
    used on no rank          keeps the gradient that it had: None stays None
    undefined                autograd reaches the parameter with an undefined gradient (a function's backward has
                             returned None): like unused, and always allowed
    not allowed              every rank raises UnusedParameters in the next forward, with names by rank

The ranks compare who used what only in steps in which any rank has something to tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.errors import UnusedParameters
from ddp.gradients.bucket import Slot


class Unused:
    """Bookkeeping of one replica.

    Args:
        tolerated: it is no error.
        fixed: no step differs from the first one: what no rank used then is not asked for again.
    """

    def __init__(self, comm: Communicator, slots: Sequence[Slot], *, tolerated: bool, fixed: bool) -> None:
        self._comm, self._slots, self._tolerated, self._fixed = comm, slots, tolerated, fixed
        self._kept: dict[Slot, Tensor | None] = {}
        self._never: list[Slot] | None = None  # no rank's autograd reaches them
        self._error: UnusedParameters | None = None

    def raise_pending(self) -> None:
        """Raises UnusedParameters if the last step found some that must not be."""
        if self._error is not None:
            raise self._error

    def keep(self, slot: Slot, had: Tensor | None) -> None:
        """Notes the gradient that a parameter had before zeros or the mean are written over it."""
        if slot not in self._kept:
            self._kept[slot] = had if had is None or slot.is_sparse or had is not slot.view else had.clone()

    def settle(
        self, missing: Sequence[Slot], undefined: Iterable[Slot], *, is_any_undefined: bool, had_backward: bool
    ) -> None:
        """Some rank has unused parameters: gives those that no rank used what they had. Collective.

        Args:
            missing: parameters that this rank's autograd has not reached, in the order of registration.
            undefined: those that it has reached with an undefined gradient.
            is_any_undefined: a rank has undefined gradients.
        """
        if self._never is None or is_any_undefined:
            use = torch.full((len(self._slots),), 2, dtype=torch.uint8, device=self._comm.device)
            use[[slot.index for slot in undefined]] = 1
            use[[slot.index for slot in missing]] = 0
            most = self._comm.all_reduce(use, "max", label="parameters used by any rank").tolist()
            by_none = [slot for slot, is_used in zip(self._slots, most, strict=True) if is_used < 2]
            if self._never is None:
                self._never = [slot for slot in by_none if not most[slot.index]]
        else:
            by_none = self._never
        gone = set(missing)
        if late := [slot.name for slot in self._never if slot not in gone]:
            raise RuntimeError(
                f"with static_graph=True every step must use the same parameters, but {', '.join(late)} got a gradient "
                "now and none in the first step: pass find_unused_parameters=True instead"
            )
        for slot in by_none:
            had = self._kept[slot]
            if slot.is_sparse or had is None:
                slot.parameter.grad = had
            else:
                slot.parameter.grad = slot.view.copy_(had)
        if not self._tolerated:
            mine = [(slot.name, slot.index) for slot in missing] if had_backward else None
            by_rank = dict(enumerate(all_gather_object(self._comm, mine)))
            if any(by_rank.values()):
                self._error = UnusedParameters(
                    _message({rank: names for rank, names in by_rank.items() if names is not None})
                )
        if not self._fixed:
            self._never = None

    def forget(self) -> None:
        """The step is over."""
        self._kept.clear()


def _message(by_rank: Mapping[int, Sequence[tuple[str, int]]]) -> str:
    lines = [
        f"  rank {rank}: {', '.join(f'{name} ({index})' for name, index in names) or 'none'}"
        for rank, names in by_rank.items()
    ]
    return (
        "Expected to have finished reduction in the prior iteration: these parameters (and their numbers in the order "
        "of registration) did not receive grad in it:\n"
        + "\n".join(lines)
        + "\nLet every parameter take part in the loss, set requires_grad=False on those that do not, or pass "
        "find_unused_parameters=True (static_graph=True, if they are the same in every step)"
    )
