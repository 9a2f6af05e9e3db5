"""Makes communicators from what the environment says: `ddp.init` and `ddp.shutdown`.

`init` takes what is there, in this order: an initialised torch.distributed, the environment of a launcher (`place.py`),
or nothing: then it is a world of one.

    device            what was asked for; or where a replica's parameters are; or a GPU if the program has begun to use
                      one; or the CPU. One communicator for each kind of device, over the same ranks
    backend "auto"    NCCL where every local rank has a GPU of its own, else Gloo (CUDA tensors staged through the host)
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DistError, HashStore, Store  # type: ignore[attr-defined]

from ddp.collectives.simulate import SEGMENT_BYTES
from ddp.comm.communicator import Communicator
from ddp.comm.meeting.place import Place, on_this_host, place
from ddp.comm.meeting.private_store import for_torch, part_of, sealed
from ddp.comm.meeting.proof import prove
from ddp.comm.meeting.rendezvous import LET_GO_S, answered, open_store, rendezvous
from ddp.comm.meeting.secret import secret
from ddp.comm.settings import Settings
from ddp.comm.transport.edge import TransportError, never_hopeless
from ddp.comm.transport.process_group import GlooConnections, GlooTransport, process_group_transport
from ddp.comm.watch.watchdog import SILENCE_S, Watchdog
from ddp.errors import ConfigError, PeerLost, first_line
from ddp.process.allocator import keep_large_blocks
from ddp.process.clock import LONGEST_S
from ddp.process.log import follow_rank, log
from ddp.setting import Additions

WARN_S, ABORT_S = 10.0, 600.0
ANSWER_S = 5.0  # longest wait for a store that has answered before


@dataclass
class _Process:
    """The communicators of this process, and what `shutdown` must undo."""

    comms: dict[tuple[dist.ProcessGroup, str], Communicator] = field(default_factory=dict)  # by kind of device, too
    generation: int = -1  # of the last one for all ranks
    owned_store: Store | None = None  # of torch.distributed, if `init` began it
    stores: dict[Place, Store] = field(default_factory=dict)  # each connects once, or serves once
    handled: BaseException | None = None  # the exception in whose handler the session began
    pid: int = os.getpid()  # a forked child ends for itself


_process = _Process()


def init(
    *,
    device: str | torch.device | None = None,
    backend: str = "auto",
    algorithm: str = "auto",
    order: Additions = "any",
    shared_memory: bool = True,
    segment_bytes: int = SEGMENT_BYTES,
    warn_s: float = WARN_S,
    abort_s: float | None = None,
    debug: bool = False,
) -> Communicator:
    """Joins the other ranks. Collective; a second call returns the same communicator, unless it names another device.

    After `torch.distributed.destroy_process_group` by the application, the next call makes a new one.

    Args:
        device: "cpu", "cuda" or a torch.device: where the tensors are that its verbs take. "auto": a GPU where there is
            one. None: a GPU if the program has begun to use one (`torch.cuda.set_device`, or a tensor there), else the
            CPU. A replica whose parameters are elsewhere has a communicator of its own, over the same ranks.
        backend: "auto", "gloo" or "nccl".
        algorithm, order, shared_memory, segment_bytes, debug: see `Settings`.
        warn_s: seconds in one wait after which a warning says who is missing.
        abort_s: seconds in one wait after which PeerLost is raised; None: the timeout of the application's process
            group, else 600. A rank that died or shows no sign of life is given up earlier (`watchdog.py`).

    Raises:
        ConfigError: a device or backend that is not there, or does not go with the other; a deadline out of its range.
        PeerLost: a rank did not come within `abort_s`.
    """
    if abort_s is not None and not 0 < abort_s <= LONGEST_S:
        raise ConfigError(f"abort_s={abort_s}: must be seconds, above 0 and at most {LONGEST_S:g}")
    _forget_what_ended()
    _end_what_failed()
    if dist.group.WORLD is not None and (first := _known(dist.group.WORLD)) is not None:
        asked = None if device in (None, "auto") else torch.device(device)
        return first if asked is None else communicator_of(dist.group.WORLD, asked)
    keep_large_blocks()
    _process.generation += 1
    _process.handled = sys.exception()
    chosen_device, chosen_backend = choose_device(device, backend, *_on_this_host())
    if chosen_device.type == "cuda" and not isinstance(device, torch.device):
        torch.cuda.set_device(chosen_device)
    if dist.group.WORLD is not None:
        abort_s = abort_s or _timeout_s(dist.group.WORLD)
        store = _own_part(dist.group.WORLD, warn_s=warn_s, abort_s=abort_s)
    else:
        abort_s = abort_s or ABORT_S
        store = _join(warn_s=warn_s, abort_s=abort_s)
    follow_rank(dist.get_rank(), dist.get_world_size())
    settings = Settings(
        device=chosen_device,
        generation=_process.generation,
        algorithm=algorithm,
        order=order,
        shared_memory=shared_memory,
        segment_bytes=segment_bytes,
        abort_s=abort_s,
        debug=debug,
    )
    assert dist.group.WORLD is not None
    return _communicator(dist.group.WORLD, store, settings, chosen_backend, warn_s=warn_s)


def current(device: torch.device | None = None) -> Communicator:
    """Returns the process's communicator; made with the defaults if there is none yet.

    Args:
        device: where the tensors are; None: of the first communicator.
    """
    if dist.group.WORLD is not None and _known(dist.group.WORLD) is not None:
        return communicator_of(dist.group.WORLD, device)  # also one that is broken, and says so
    return init(device=device)


def device_of(module: nn.Module) -> torch.device | None:
    """Returns where a replica's gradients are reduced: on a GPU if any parameter is there; None without parameters."""
    devices = [parameter.device for parameter in module.parameters()]
    kinds = ("cuda", "cpu")
    return next((each for kind in kinds for each in devices if each.type == kind), None)


def _known(group: dist.ProcessGroup, device: torch.device | None = None) -> Communicator | None:
    """Returns a group's communicator for this kind of device, or its first one."""
    return next(
        (comm for (of, kind), comm in _process.comms.items() if of is group and device in (None, torch.device(kind))),
        None,
    )


def communicator_of(group: dist.ProcessGroup, device: torch.device | None = None) -> Communicator:
    """Returns a communicator of the ranks of one of torch's process groups. Collective among them; made once for each.

    It has the group's timeout, and otherwise the settings of the process's communicator, if there is one. Its
    connections are its own, so that its messages never mix with those that the application sends over the group.

    Args:
        device: where the tensors are; None: of the group's first communicator, or else of the process's.

    Raises:
        ConfigError: this process does not belong to the group.
    """
    world = None if dist.group.WORLD is None else _known(dist.group.WORLD)
    if group is dist.group.WORLD and world is None:
        return init(device=device)
    if dist.get_rank(group) < 0:
        raise ConfigError("this process is not in the process group; make the replica on its members only")
    _forget_what_ended()
    if (known := _known(group, device)) is not None:
        return known
    wanted = device or (world.device if world is not None else None)
    chosen, backend = choose_device(wanted, "auto", *_on_this_host())
    base = world.settings if world is not None else Settings(device=chosen)
    algorithm = base.algorithm if chosen.type == base.device.type else "auto"  # the memory of a host is for the CPU
    settings = replace(
        base, device=chosen, algorithm=algorithm, abort_s=_timeout_s(group), generation=max(0, _process.generation)
    )
    store = _own_part(group, warn_s=WARN_S, abort_s=settings.abort_s)
    return _communicator(group, store, settings, backend, warn_s=WARN_S)


def _communicator(
    group: dist.ProcessGroup, store: Store, settings: Settings, backend: str, *, warn_s: float
) -> Communicator:
    """Returns a communicator of a group's ranks, over connections of its own. Collective over them.

    Args:
        store: of this session of the ranks alone.
    """
    rank, world_size, abort_s = dist.get_rank(group), dist.get_world_size(group), settings.abort_s
    ranks = dist.get_process_group_ranks(group)
    watch = partial(Watchdog, store, rank, world_size, generation=settings.generation, warn_s=warn_s, abort_s=abort_s)
    watchdog = answered(watch, within_s=abort_s + LET_GO_S)
    try:
        try:
            compare = partial(_refuse_unlike_devices, store, rank, world_size, settings.device)
            answered(compare, within_s=abort_s + LET_GO_S)
            connect = partial(
                process_group_transport,
                settings.device,
                backend,
                store=store,
                rank=rank,
                world_size=world_size,
                timeout_s=min(abort_s, SILENCE_S),  # everyone has just been here
                hopeless_because=watchdog.hopeless_because,
                ranks=None if group is dist.group.WORLD else ranks,
                check=partial(_prove, store=store, group=group, timeout_s=min(abort_s, SILENCE_S)),
            )
            # NCCL takes the GPU that is this thread's
            transport = connect() if backend == "nccl" else answered(connect, within_s=abort_s + LET_GO_S)
        except (PeerLost, ConfigError):
            raise
        except RuntimeError as error:
            suspect = error.peer if isinstance(error, TransportError) else (rank + 1) % world_size
            raise watchdog.find_culprit(suspect, first_line(error)) from error
        others = () if group is dist.group.WORLD else ranks
        comm = Communicator(transport, settings, watchdog=watchdog, world_ranks=others)
    except BaseException as error:
        watchdog.fail(f"{type(error).__name__}: {error}")
        watchdog.leave()
        raise
    _process.comms[group, settings.device.type], _process.pid = comm, os.getpid()
    return comm


def _prove(transport: GlooTransport, *, store: Store, group: dist.ProcessGroup, timeout_s: float) -> None:
    """Lets both ends of each new connection prove who they are, if the ranks share a secret. Collective."""
    if not (key := secret()) or transport.world_size == 1:
        return
    prove(transport, part_of(store, "ours"), key, timeout_s=timeout_s)
    if group is dist.group.WORLD and _process.owned_store is not None:  # torch has connections of its own
        torch_s = GlooConnections(group._get_backend(torch.device("cpu")), transport.rank)
        transport = GlooTransport(torch_s, range(transport.world_size), transport.rank, never_hopeless)
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


def _forget_what_ended() -> None:
    """Ends the communicators of process groups that the application has destroyed."""
    known = dist.distributed_c10d._world.pg_map if dist.is_initialized() else {}
    for key in [key for key in _process.comms if key[0] not in known]:
        _end(_process.comms.pop(key))
    if not known:
        _process.owned_store = None


def _end_what_failed() -> None:
    """Ends a session that has failed, so that a new one can begin, and a group of torch's that such a one has left."""
    if dist.group.WORLD is None:
        return
    known = _known(dist.group.WORLD)
    if known is not None and known.is_broken:
        shutdown(failed="a collective of its own failed, and it begins anew")
        known = None
    if known is None and _process.owned_store is not None:
        _end_torch_distributed(failed=True)


def _end(comm: Communicator, failed: str = "") -> None:
    if failed or comm.is_broken:
        comm.abandon(failed or "a collective of its own failed")
    else:
        comm.close()


def shutdown(*, failed: str = "") -> None:
    """Ends the communicator, and torch.distributed if `init` began it. Harmless without one, or after an error.

    If it is called while an exception is being raised (`finally: ddp.shutdown()`), this rank counts as stopping early.
    The same holds inside an `except` block, because the two cannot be told apart here.

    Args:
        failed: why this rank stops early. Then the others are told, and nothing is waited for: what may still be in
            flight ends with the process.
    """
    if os.getpid() != _process.pid:  # a forked child, which is none of the ranks
        return
    failed = failed or _in_flight()
    if not failed:
        _forget_what_ended()
    comms, _process.comms, _process.handled = _process.comms, {}, None
    of_all = [key for key in comms if key[0] is dist.group.WORLD]
    world = comms.pop(of_all[0]) if of_all else None
    for comm in comms.values():
        _end(comm, failed)
    if world is None:
        return
    try:
        if not failed and not world.is_broken:
            world.barrier()  # nobody takes the store away while others still need it
    except PeerLost as lost:
        log.warning("at the end: %s", lost)  # this rank has all that it wanted
    finally:
        ends_well = not failed and not world.is_broken
        _end(world, failed)
        if _process.owned_store is not None and ends_well:
            _end_torch_distributed()


def _end_torch_distributed(*, failed: bool = False) -> None:
    """Ends torch.distributed, which `init` began; after a failure without waiting for what NCCL still does."""
    if failed and any(str(dist.get_backend(group)) == "nccl" for group in dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
    _process.owned_store = None


@atexit.register
def _end_with_the_program() -> None:
    """Ends what a program without a `shutdown` has left."""
    if os.getpid() == _process.pid:
        error = getattr(sys, "last_value", None)  # what the interpreter has just printed
        for comm in _process.comms.values():
            comm.abandon(f"{type(error).__name__}: {error}" if error is not None else "")


def _in_flight() -> str:
    """Returns the exception that the session is being left by, in words; "" if there is none, or a plain `sys.exit()`.

    One that was being handled when the session began (`except: main()`) does not leave it.
    """
    error = sys.exception()
    if error is None and not threading.main_thread().is_alive():  # called by atexit
        error = getattr(sys, "last_value", None)
    if error is None or error is _process.handled or (isinstance(error, SystemExit) and not error.code):
        return ""
    return f"{type(error).__name__}: {error}"


def choose_device(
    device: str | torch.device | None, backend: str, local_rank: int, local_world_size: int
) -> tuple[torch.device, str]:
    """Returns what None and "auto" mean here; a GPU without a number is the rank's own, or the one that is current.

    Raises:
        ConfigError: the device or the backend is not possible here.
    """
    if device is None:
        device = "cuda" if torch.get_default_device().type == "cuda" or torch.cuda.is_initialized() else "cpu"
    num_gpus = torch.cuda.device_count()
    kind = ("cuda" if num_gpus else "cpu") if str(device) == "auto" else torch.device(device).type
    if kind == "cuda" and not num_gpus:
        raise ConfigError("device=cuda, but torch sees no GPU here; use device=cpu, or install torch's CUDA build")
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device={device} is not supported; use auto, cpu or cuda")
    own_gpu = kind == "cuda" and local_world_size <= num_gpus
    if backend == "auto":
        backend = "nccl" if own_gpu else "gloo"
    if backend == "nccl" and not own_gpu:
        reason = f"{local_world_size} ranks share {num_gpus} GPUs" if kind == "cuda" else "tensors are on the CPU"
        raise ConfigError(f"backend=nccl needs a GPU for each rank, but {reason}; use backend=gloo")
    if backend not in ("gloo", "nccl"):
        raise ConfigError(f"backend={backend!r} is unknown; use auto, gloo or nccl")
    if kind == "cpu":
        return torch.device("cpu"), backend
    index = None if str(device) == "auto" else torch.device(device).index
    if index is None and torch.cuda.is_initialized():  # asking would begin it
        index = torch.cuda.current_device() or None  # 0 is also what it is before anyone sets it
    return torch.device("cuda", local_rank % num_gpus if index is None else index), backend


def _on_this_host() -> tuple[int, int]:
    """Returns this process's number on its host, and how many there are on it."""
    if dist.is_initialized():
        return on_this_host(dist.get_rank(), dist.get_world_size())
    found = place()
    return (0, 1) if found is None else on_this_host(found.rank, found.world_size)


def _timeout_s(group: dist.ProcessGroup) -> float:
    """Returns how long the application lets a collective of its process group take."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return min(LONGEST_S, float(options._timeout.total_seconds()))
    return ABORT_S


def _join(*, warn_s: float, abort_s: float) -> Store:
    """Begins torch.distributed with the other ranks; returns a store of this session.

    Gloo carries set-up even on GPUs: it needs no device and fails in words.
    """
    timeout = timedelta(seconds=abort_s)
    rank, world_size = 0, 1
    store: Store = HashStore()
    if (found := place()) is not None:
        rank, world_size = found.rank, found.world_size
        if found not in _process.stores or not _answers(_process.stores[found]):
            _process.stores[found] = open_store(found, warn_s=warn_s, abort_s=abort_s)
        store = _process.stores[found]
    store = rendezvous(part_of(store, "ddp"), rank, world_size, warn_s=warn_s, abort_s=abort_s)
    store.set(f"joins/{rank}", "")
    begin = partial(dist.init_process_group, "gloo", rank=rank, world_size=world_size, timeout=timeout)
    try:
        answered(lambda: begin(store=for_torch(store)), within_s=abort_s + LET_GO_S)
    except PeerLost:
        raise
    except RuntimeError as error:
        raise _not_connected(store, rank, world_size, error) from error
    _process.owned_store = store
    return part_of(store, "ddp")


def _not_connected(store: Store, rank: int, world_size: int, error: RuntimeError) -> PeerLost:
    """Returns the error for ranks that have come, and that torch could not connect: one has gone in between."""
    others = [other for other in range(world_size) if other != rank]
    gone = answered(lambda: [each for each in others if not store.check([f"joins/{each}"])], within_s=ANSWER_S)
    reason = f"it came, but could not be connected ({first_line(error)}): killed, stopped, or its host is down"
    return PeerLost((gone or others)[0], "unknown", 0, 0, "start-up", reason)


def _answers(store: Store) -> bool:
    """Returns False if the process that served the store has gone, or is stopped."""
    try:
        answered(lambda: store.check(["ddp"]), within_s=ANSWER_S)
    except (DistError, PeerLost):
        return False
    return True


def _own_part(group: dist.ProcessGroup, *, warn_s: float, abort_s: float) -> Store:
    """Returns the part of the ranks' store that belongs to this session of a group's ranks."""
    store = _process.owned_store or sealed(dist.distributed_c10d._get_default_store(), secret())
    store = part_of(store, f"ddp/{group.group_name}")
    return rendezvous(store, dist.get_rank(group), dist.get_world_size(group), warn_s=warn_s, abort_s=abort_s)
