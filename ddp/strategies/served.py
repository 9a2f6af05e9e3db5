"""The strategy of parameter servers: each updates the pieces that it holds, as `sharded` does among the servers.

    workers     pull parameters, compute, push gradients                            (`parameter_server/worker.py`)
    server      waits for the gradients of an update, piece by piece                (`parameter_server/server.py`)
    agree       the servers measure the norm of the gradient together
    update      each makes the optimizer's step for its pieces, and gives the others the new parameters

So every server has all parameters, and a part of the optimizer's state; a worker exchanges with each server only what
that one holds. The pieces are about equally many bytes; large tensors are cut. In mode async an update is one batch of
one worker (Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1, Downpour SGD).
"""

from __future__ import annotations

from ddp.replica.served import ServedDataParallel
from ddp.replica.sharded import Part
from ddp.strategies.parameter_server.edge import Piece
from ddp.strategies.sharded import Sharded


class Served(Sharded):
    """Makes the updates of a server. Every method is collective among the servers."""

    model: ServedDataParallel

    def pieces(self) -> list[tuple[Piece, Part]]:
        """Returns the pieces that this server holds."""
        if not self.model.layout.has_memory:
            self.model.layout.allocate()
        slices = self._prepared()
        names = {id(slot.parameter): slot.name for slot in slices.layout.slots}
        return [(Piece(names[id(part.whole)], part.start, part.stop), part) for part in slices.parts]
