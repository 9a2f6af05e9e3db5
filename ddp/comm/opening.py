"""Opens a communicator: the ranks of one store and generation connect, and prove who they are.

Nothing is remembered here, so a process may open one after the other, or several at once: `session.py` does it for
`ddp.init`, and whoever changes the membership gives another store, generation, rank and world size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ddp.comm.communicator import Communicator
from ddp.comm.meeting.private_store import part_of
from ddp.comm.meeting.proof import prove
from ddp.comm.meeting.rendezvous import answered
from ddp.comm.meeting.secret import secret
from ddp.comm.settings import Settings
from ddp.comm.transport.edge import TransportError, never_hopeless
from ddp.comm.transport.process_group import GlooConnections, GlooTransport, process_group_transport
from ddp.comm.watch.watchdog import SILENCE_S, Watchdog
from ddp.errors import ConfigError, PeerLost, first_line

WARN_S = 10.0


def open_communicator(
    store: Store,
    generation: int,
    rank: int,
    world_size: int,
    settings: Settings,
    *,
    backend: str = "gloo",
    warn_s: float = WARN_S,
    ranks: Sequence[int] = (),
    torch_s: dist.ProcessGroup | None = None,
) -> Communicator:
    """Connects this rank with the others, over connections of their own. Collective over them.

    Args:
        store: of this session of the ranks alone (`rendezvous`), with nothing in it from an earlier one.
        generation: version of the membership.
        rank, world_size: this process's number, and how many there are.
        settings: see `Settings`.
        backend: "gloo" or "nccl".
        warn_s: seconds in one wait after which a warning says who is missing.
        ranks: the ranks of torch.distributed, if they are only some of all.
        torch_s: a group of torch's, whose connections must be proved, too.

    Raises:
        ConfigError: the ranks are on devices of different kinds.
        PeerLost: a rank could not be reached, or is none of this launch.
    """
    settings = replace(settings, generation=generation)
    abort_s, connect_s = settings.abort_s, min(settings.abort_s, SILENCE_S)  # everyone has just been here
    watch = partial(Watchdog, store, rank, world_size, generation=generation, warn_s=warn_s, abort_s=abort_s)
    watchdog = answered(watch, within_s=abort_s)
    try:
        answered(partial(_refuse_unlike_devices, store, rank, world_size, settings.device), within_s=abort_s)
        connect = partial(
            process_group_transport,
            settings.device,
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout_s=connect_s,
            hopeless_because=watchdog.hopeless_because,
            ranks=list(ranks) or None,
            check=partial(_prove, store=store, torch_s=torch_s, timeout_s=connect_s),
        )
        try:
            # NCCL takes the GPU that is this thread's
            transport = connect() if backend == "nccl" else answered(connect, within_s=abort_s)
        except (PeerLost, ConfigError):
            raise
        except RuntimeError as error:
            suspect = error.peer if isinstance(error, TransportError) else (rank + 1) % world_size
            raise watchdog.find_culprit(suspect, first_line(error)) from error
        return Communicator(transport, settings, watchdog=watchdog, world_ranks=ranks)
    except BaseException as error:
        watchdog.fail(f"{type(error).__name__}: {error}")
        watchdog.leave()
        raise


def _prove(transport: GlooTransport, *, store: Store, torch_s: dist.ProcessGroup | None, timeout_s: float) -> None:
    """Lets both ends of each new connection prove who they are, if the ranks share a secret. Collective."""
    if not (key := secret()) or transport.world_size == 1:
        return
    prove(transport, part_of(store, "ours"), key, timeout_s=timeout_s)
    if torch_s is not None:
        connections = GlooConnections(torch_s._get_backend(torch.device("cpu")), transport.rank)
        transport = GlooTransport(connections, range(transport.world_size), transport.rank, never_hopeless)
        prove(transport, part_of(store, "torch"), key, timeout_s=timeout_s)


def _refuse_unlike_devices(store: Store, rank: int, world_size: int, device: torch.device) -> None:
    """Raises ConfigError, on every rank, unless all ranks are on devices of one kind, because transports differ."""
    store.set(f"device/{rank}", device.type)
    kinds = [kind.decode() for kind in store.multi_get([f"device/{other}" for other in range(world_size)])]
    other = next((other for other, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        raise ConfigError(
            f"the device of rank 0 is {kinds[0]}, that of rank {other} is {kinds[other]}: put the models of all ranks "
            "on one kind of device, or say ddp.init(device=…) on each"
        )
