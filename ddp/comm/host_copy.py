"""Numbers of a device on their way to the host, which nobody waits for before they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ddp import gpu


class HostCopy:
    """The numbers of some tensors as they are now, for the host: from a GPU by one copy, which goes on meanwhile.

    Args:
        tensors: of any shape and type; numbers are exact up to 2⁵³.
        refuse: raises an error if what a collective has left in them means nothing.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, refuse: Callable[[], None]) -> None:
        self._refuse, self._is_there = refuse, None
        if device.type != gpu.KIND:  # at once, because each tensor more would cost small collectives their speed
            self._known = [each.flatten().tolist() for each in tensors]
            return
        flat = torch.cat([each.detach().reshape(-1).to(device, torch.float64) for each in tensors])
        self._sizes = [each.numel() for each in tensors]
        self._numbers = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        self._numbers.copy_(flat, non_blocking=True)
        self._is_there = gpu.cuda.current_stream(device).record_event()

    def read(self) -> list[list[float]]:
        """Returns the numbers of each tensor, as a list. Waits for the GPU, if it has not come that far.

        Raises:
            PeerLost, CommunicatorBroken: the collectives before it failed.
        """
        if self._is_there is None:
            return self._known
        if not self._is_there.query():
            self._is_there.synchronize()
        self._refuse()
        return [part.tolist() for part in self._numbers.split(self._sizes)]
