"""Opens a communicator: the ranks of one store and generation connect, and prove who they are.

Nothing is remembered here, so a process may open one after the other, or several at once: `session.py` does it for
`ddp.init`, and a change of membership gives another store, generation, rank and world size.

Note "proof". Gloo accepts any process that connects to its port and says the right small number for a rank, and every
user of a host can connect there. So, before anything that arrives is believed, each rank

    puts an unpredictable number into the private store
    sends each peer the code of (its own number, the peer's number), which takes the secret
    compares what each peer has sent with the code of (the peer's number, its own number)

The numbers are new for each set of connections. So no code that was seen elsewhere, or that a peer has sent itself, is
right here. A connection carries one code of 32 bytes each way.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ddp.comm.communicator import Communicator
from ddp.comm.device import agreed_backend, take
from ddp.comm.meeting.private_store import part_of
from ddp.comm.meeting.rendezvous import answered
from ddp.comm.meeting.secret import code_of, secret
from ddp.comm.settings import CPU, Settings
from ddp.comm.transport.edge import Transfer, Transport, TransportError, never_hopeless
from ddp.comm.transport.gloo import GlooConnections, GlooTransport, StagedGlooTransport, gloo_of
from ddp.comm.transport.nccl import NcclTransport
from ddp.comm.watch.watchdog import SILENCE_S, Watchdog
from ddp.errors import ConfigError, PeerLost, first_line, safe_str
from ddp.process import gpu

CODE_BYTES = 32
WARN_S = 10.0


def open_communicator(
    store: Store,
    generation: int,
    rank: int,
    world_size: int,
    settings: Settings,
    *,
    warn_s: float = WARN_S,
    ranks: Sequence[int] = (),
    torch_s: dist.ProcessGroup | None = None,
) -> Communicator:
    """Connects this rank with the others, over their own connections. Collective over them.

    Args:
        store: of this session of the ranks alone (`rendezvous`), with nothing in it from an earlier one; a connection
            to it of its own (`clone`), if others are opened at the same time.
        generation: version of the membership.
        rank, world_size: this process's number, and how many there are.
        settings: see `Settings`.
        warn_s: seconds in one wait after which a warning says who is missing.
        ranks: the ranks of torch.distributed, if they are only some of all.
        torch_s: a group of torch's, whose connections must be proved, too.

    Raises:
        ConfigError: on every rank: see `agreed_backend`.
        PeerLost: a rank could not be reached, or is none of this launch.
        RuntimeError: NCCL failed on this rank.
    """
    settings = replace(settings, generation=generation)
    abort_s, connect_s = settings.abort_s, min(settings.abort_s, SILENCE_S)  # everyone has just been here
    everyone, timeout = range(world_size), timedelta(seconds=connect_s)
    watch = partial(Watchdog, store, rank, world_size, generation=generation, warn_s=warn_s, abort_s=abort_s)
    watchdog = answered(watch, within_s=abort_s)
    try:

        def over_nccl() -> Transport:
            return NcclTransport(part_of(store, "nccl"), rank, world_size, settings.device)

        def over_gloo() -> Transport:
            gloo = gloo_of(PrefixStore("gloo", store), rank, world_size, timeout)
            connections = GlooConnections(gloo, rank)
            if world_size > 1 and (key := secret()):
                prove(connections, world_size, part_of(store, "ours"), key, timeout_s=connect_s)
                if torch_s is not None:
                    theirs = GlooConnections(torch_s._get_backend(CPU), rank)
                    prove(theirs, world_size, part_of(store, "torch"), key, timeout_s=connect_s)
            kind = StagedGlooTransport if settings.device.type == gpu.KIND else GlooTransport
            return kind(connections, everyone, rank, watchdog.hopeless_because)

        try:
            mine = take(settings.device, settings.backend)
            backend = agreed_backend(store, rank, ranks or everyone, mine, watchdog.wait_for_start_up)
            transport = None if backend == "nccl" else answered(over_gloo, within_s=abort_s)
        except (PeerLost, ConfigError):
            raise
        except RuntimeError as error:
            suspect = error.peer if isinstance(error, TransportError) else (rank + 1) % world_size
            raise watchdog.find_culprit(suspect, first_line(error)) from error
        if transport is None:
            transport = watchdog.while_watched(over_nccl, (rank + 1) % world_size)
        return Communicator(transport, settings, watchdog=watchdog, world_ranks=ranks)
    except BaseException as error:
        watchdog.fail(f"{type(error).__name__}: {safe_str(error)}")
        watchdog.leave()
        raise


def prove(connections: GlooConnections, world_size: int, store: Store, key: bytes, *, timeout_s: float) -> None:
    """Returns once every peer has proved that it knows the key, and this rank has (note "proof"). Collective.

    Args:
        connections: between these ranks; nothing was sent over them before.
        store: of this session of the ranks, in which no stranger can write unnoticed; new for each transport.

    Raises:
        PeerLost: somebody else has taken a peer's end of the connection.
        TransportError: a peer does not answer.
    """
    rank, everyone = connections.rank, range(world_size)
    transport = GlooTransport(connections, everyone, rank, never_hopeless)
    others = [other for other in everyone if other != rank]
    store.set(f"proof/{rank}", secrets.token_hex(CODE_BYTES))
    numbers = store.multi_get([f"proof/{other}" for other in everyone])

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
