"""Parameters without a gradient: what they keep, and who is told.

    used on another rank     gets the mean, to which this rank has contributed zeros (or what it had accumulated)
    used on no rank          keeps the gradient that it had: None stays None
    not allowed              every rank raises UnusedParameters in the next forward, with names by rank

The ranks compare who used what only in steps in which any rank has something to tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
        self._used_by_none: list[Slot] | None = None
        self._error: UnusedParameters | None = None

    def raise_pending(self) -> None:
        """Raises UnusedParameters if the last step found some that must not be."""
        if self._error is not None:
            raise self._error

    def keep(self, slot: Slot) -> None:
        """Notes the gradient that a parameter has before zeros or the mean are written over it."""
        if slot not in self._kept:
            had = slot.parameter.grad
            self._kept[slot] = had if had is None or slot.is_sparse or had is not slot.view else had.clone()

    def settle(self, unused: Sequence[Slot], *, had_backward: bool) -> None:
        """Some rank has unused parameters: gives those that no rank used what they had. Collective.

        Args:
            unused: this rank's, in the order of registration.
        """
        if self._used_by_none is None:
            used = torch.ones(len(self._slots), dtype=torch.uint8, device=self._comm.device)
            used[[slot.index for slot in unused]] = 0
            by_any = self._comm.all_reduce(used, "max", label="parameters used by any rank").tolist()
            self._used_by_none = [slot for slot, is_used in zip(self._slots, by_any, strict=True) if not is_used]
        if late := [slot.name for slot in self._used_by_none if slot not in unused]:
            raise RuntimeError(
                f"with static_graph=True every step must use the same parameters, but {', '.join(late)} got a gradient "
                "now and none in the first step: pass find_unused_parameters=True instead"
            )
        for slot in self._used_by_none:
            had = self._kept[slot]
            if slot.is_sparse or had is None:
                slot.parameter.grad = had
            else:
                slot.parameter.grad = slot.view.copy_(had)
        if not self._tolerated:
            mine = [(slot.name, slot.index) for slot in unused] if had_backward else None
            by_rank = dict(enumerate(all_gather_object(self._comm, mine)))
            self._error = UnusedParameters(
                _message({rank: names for rank, names in by_rank.items() if names is not None})
            )
        if not self._fixed:
            self._used_by_none = None

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
