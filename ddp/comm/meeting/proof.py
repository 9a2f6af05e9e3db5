"""Both ends of each connection prove that they know the secret of their launch.

Gloo takes whoever connects to its port and says the right small number for a rank, and every user of a host can connect
there. So, before anything that arrives is believed, each rank

    puts a number that nobody can foresee into the private store
    sends each peer the code of (its own number, the peer's number), which takes the secret
    compares what each peer has sent with the code of (the peer's number, its own number)

The numbers are new for each set of connections. So no code that was seen elsewhere, or that a peer has sent itself, is
right here. A connection carries one code of 32 bytes each way.
"""

from __future__ import annotations

import hmac
import secrets

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from ddp.comm.meeting.secret import code_of
from ddp.comm.transport.edge import Transfer, Transport
from ddp.errors import PeerLost

CODE_BYTES = 32


def prove(transport: Transport, store: Store, key: bytes, *, timeout_s: float) -> None:
    """Returns once every peer has proved that it knows the key, and this rank has. Collective over the ranks.

    Args:
        transport: of CPU tensors; nothing was sent over it before.
        store: of this session of the ranks, in which no stranger can write unnoticed; new for each transport.

    Raises:
        PeerLost: somebody else has taken a peer's end of the connection.
        TransportError: a peer does not answer.
    """
    rank, others = transport.rank, [rank for rank in range(transport.world_size) if rank != transport.rank]
    store.set(f"proof/{rank}", secrets.token_hex(CODE_BYTES))
    numbers = store.multi_get([f"proof/{other}" for other in range(transport.world_size)])

    def code(sender: int, receiver: int) -> bytes:
        return code_of(key, b"edge", numbers[sender], numbers[receiver])

    given = [torch.zeros(CODE_BYTES, dtype=torch.uint8, device="cpu") for _ in others]
    mine = [torch.tensor(list(code(rank, other)), dtype=torch.uint8, device="cpu") for other in others]
    receives = [Transfer(*each) for each in zip(others, given, strict=True)]
    transport.post([Transfer(*each) for each in zip(others, mine, strict=True)], receives).wait(timeout_s)
    for other, got in receives:
        if not hmac.compare_digest(got.numpy().tobytes(), code(other, rank)):
            reason = "a program that does not know the secret of this launch has taken its connection: start again"
            raise PeerLost(other, "unknown", 0, 0, "start-up", reason)
