"""The session of this process: the state of `ddp.init`, `ddp.shutdown` and `current`, in one object.

`init` uses, in this order, an initialised torch.distributed, or the environment of a launcher (`meeting/place.py`);
without either, this is a world of one. `opening.py` connects the ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from ddp.collectives.schedule import SEGMENT_BYTES
from ddp.comm.communicator import Communicator
from ddp.comm.host_links import WARN_S, Settings
from ddp.comm.meeting.membership import current_member, is_superseded
from ddp.comm.meeting.place import ALONE, RankPlace, place
from ddp.comm.meeting.private_store import for_torch, part_of, sealed
from ddp.comm.meeting.rendezvous import Opened, ask_store, join_role, on_this_host, open_store, rendezvous
from ddp.comm.meeting.role import current_role
from ddp.comm.meeting.secret import secret
from ddp.comm.opening import chosen_device, device_named, open_communicator
from ddp.errors import CommunicatorBroken, ConfigError, PeerLost, first_line, safe_str
from ddp.process import gpu
from ddp.process.clock import LONGEST_S, Patience
from ddp.process.memory import keep_large_blocks
from ddp.process.terminal import follow_rank, log
from ddp.setting import Additions

ABORT_S = 600.0
ANSWER_S = 3.0  # longest wait for a store that has responded before
LAST_S = 10.0  # longest wait, after the last barrier, of the rank that serves the store for the others
POLL_S = 0.05


@dataclass
class _Session:
    """The communicators of this process, and the state that `shutdown` must undo."""

    comms: dict[tuple[dist.ProcessGroup, str], Communicator] = field(default_factory=dict)  # and by kind of device
    generation: int = -1  # of the last communicator of all ranks
    owned_store: Store | None = None  # of torch.distributed, if `init` initialized it
    hooks: tuple[Any, Any] = None, None  # sys.excepthook before that, and torch's own, which names the rank
    met: tuple[RankPlace, Opened] | None = None  # the launcher's store, one per address
    on_host: tuple[int, int] | None = None  # number among the ranks of this host, and their number
    handled: BaseException | None = None  # the exception in whose handler the session began
    again: tuple[Any, ...] = ()  # the arguments of the last `init`
    pid: int = os.getpid()  # a forked child leaves it alone


_session = _Session()


def init(
    *,
    device: str | int | torch.device | None = None,
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
        device: "cpu", "cuda", one GPU ("cuda:1" or 1) or a torch.device: the device of its collectives' tensors.
            "auto": a GPU if there is one. None: a GPU if the program already uses one (`torch.cuda.set_device`, or a
            tensor there), or its process group is for GPUs; else the CPU. A replica whose parameters are elsewhere has
            its own communicator, over the same ranks. A GPU without a number is that of the process group's
            `device_id`, else the current one, else that of LOCAL_RANK, which then becomes the current one.
        backend: "gloo", "nccl", or "auto": NCCL if each rank has its own GPU.
        algorithm, order, shared_memory, segment_bytes, debug: see `Settings`.
        warn_s: seconds in one wait after which a warning names the missing rank.
        abort_s: seconds in one wait after which PeerLost is raised; None: the timeout of the application's process
            group, else 600. A rank that has died or shows no sign of life is given up earlier (`watchdog.py`).

    Raises:
        ConfigError: on every rank, a device or backend that is missing on one of them or incompatible with the others';
            a deadline out of range.
        PeerLost: a rank did not arrive within `abort_s`.
    """
    if abort_s is not None and not 0 < abort_s <= LONGEST_S:
        raise ConfigError(f"abort_s={abort_s}: must be seconds, above 0 and at most {LONGEST_S:g}")
    how: dict[str, Any] = {"algorithm": algorithm, "order": order, "shared_memory": shared_memory, "debug": debug}
    how |= {"segment_bytes": segment_bytes, "warn_s": warn_s}
    return init_again(device, backend, abort_s, how)


def init_again(*given: Any) -> Communicator:
    """Joins the other ranks; returns the communicator if there is one.

    Args:
        given: those of `_init`; unless given, those with which the last session began.
    """
    given = given or _session.again
    while True:
        try:
            return _init(*given)
        except PeerLost:
            member = current_member()
            if member is None or not member.has_news():  # else one was lost meanwhile, and the others meet again
                raise


def _init(
    device: str | int | torch.device | None, backend: str, abort_s: float | None, how: Mapping[str, Any]
) -> Communicator:
    """Joins the other ranks as `init` does; `how`: further settings."""
    warn_s = how["warn_s"]
    _forget_what_ended()
    has_failed = _end_what_failed()
    if dist.group.WORLD is not None and (first := _known(dist.group.WORLD)) is not None:
        asked = None if device in (None, "auto") else device_named(device)
        comm = first if asked is None else communicator_of(dist.group.WORLD, asked)
        if asked is not None and asked.index not in (None, comm.device.index):
            raise ConfigError(f"device={device}: this process's communicator is on {comm.device}; shut it down first")
        return comm
    _session.again = device, backend, abort_s, how
    _session.generation += 1
    if dist.group.WORLD is None:
        if (member := current_member()) is not None:
            _session.generation = member.enter(is_later=has_failed).number
        join_role(warn_s=warn_s, abort_s=abort_s or ABORT_S)
    keep_large_blocks()
    _session.handled = sys.exception()
    abort_s = abort_s or (ABORT_S if dist.group.WORLD is None else _timeout_s(dist.group.WORLD))
    _session.on_host = _on_this_host(warn_s=warn_s, abort_s=abort_s)
    bound = _bound(dist.group.WORLD) or (torch.device(gpu.KIND) if backend == "nccl" else None)
    settings = Settings(
        device=chosen_device(device, _session.on_host[0], bound),
        backend=backend,
        generation=_session.generation,
        abort_s=abort_s,
        **how,
    )
    return _opened(dist.group.WORLD, settings)


def current(device: torch.device | None = None) -> Communicator:
    """Returns the process's communicator; creates it with the defaults if there is none yet.

    Args:
        device: of the tensors; None: that of the first communicator.
    """
    if dist.group.WORLD is not None and _known(dist.group.WORLD) is not None:
        return communicator_of(dist.group.WORLD, device)  # even if it is broken, because its calls raise that
    return init(device=device)


def _known(group: dist.ProcessGroup, device: torch.device | None = None) -> Communicator | None:
    """Returns a group's communicator for this kind of device, or its first one."""
    for (of, kind), comm in _session.comms.items():
        if of is group and (device is None or device.type == kind):
            return comm
    return None


def communicator_of(group: dist.ProcessGroup, device: torch.device | None = None) -> Communicator:
    """Returns a communicator for the ranks of one of torch's process groups. Collective among them; cached per group.

    It has the group's timeout, and otherwise the settings of the process's communicator, if there is one. Its
    connections are its own, so that its messages never mix with the application's messages over the group.

    Args:
        device: of the tensors; None: that of the group's first communicator, else of the process's.

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
    as_if_all_were = dist.get_rank(), dist.get_world_size()  # because counting the ranks of a host takes all ranks
    on_host = _session.on_host or ((here := place()) and here.on_host) or as_if_all_were
    chosen = chosen_device(wanted, on_host[0], _bound(group) or _bound(dist.group.WORLD))
    base = world.settings if world is not None else Settings(device=chosen)
    backend = base.backend if chosen.type == gpu.KIND else "auto"  # a backend for GPUs need not work on the CPU
    algorithm = base.algorithm if chosen.type == base.device.type else "auto"  # shared memory is for the CPU
    settings = replace(
        base,
        device=chosen,
        backend=backend,
        algorithm=algorithm,
        abort_s=_timeout_s(group),
        generation=max(0, _session.generation),
    )
    return _opened(group, settings)


def on_cpu(comm: Communicator) -> Communicator:
    """Returns the communicator of the same ranks for tensors on the CPU. Collective; cached per process group.

    Data as large as a model goes over it, because the GPU may have no memory for a second model. A subgroup has none,
    and is returned itself.
    """
    group = next((of for (of, _), each in _session.comms.items() if each is comm), None)
    return comm if group is None or comm.device.type == "cpu" else communicator_of(group, torch.device("cpu"))


def _opened(group: dist.ProcessGroup | None, settings: Settings) -> Communicator:
    """Opens and caches a communicator of a group's ranks; without a group, initializes torch.distributed first."""
    limits = {"warn_s": settings.warn_s, "abort_s": settings.abort_s}
    if group is None:
        store = _join(**limits)
        group = dist.distributed_c10d._get_default_group()
    else:
        store = _own_part(group, **limits)
    if is_world := group is dist.group.WORLD:
        follow_rank(dist.get_rank(), dist.get_world_size(), (place() or ALONE).role)
    comm = open_communicator(
        store,
        dist.get_rank(group),
        dist.get_world_size(group),
        settings,
        ranks=() if is_world else dist.get_process_group_ranks(group),
        torch_s=group if is_world and _session.owned_store is not None else None,  # `init` made the group
    )
    _session.comms[group, settings.device.type], _session.pid = comm, os.getpid()
    return comm


def _forget_what_ended() -> None:
    """Ends the communicators of process groups that the application has destroyed."""
    known = dist.distributed_c10d._world.pg_map if dist.is_initialized() else {}
    for key in [key for key in _session.comms if key[0] not in known]:
        _end(_session.comms.pop(key))
    if not known:
        _session.owned_store = None


def _end_what_failed() -> bool:
    """Ends a failed session, and the process group that it has left, so that a new one can begin; True if it did."""
    if dist.group.WORLD is None:
        return False
    known = _known(dist.group.WORLD)
    is_lost = (member := current_member()) is not None and member.lost is not None  # which a group may have met first
    if is_lost or any(comm.is_broken for (group, _), comm in _session.comms.items() if group is dist.group.WORLD):
        shutdown(failed="a collective of its own failed, and it starts again")
        known = None
    if is_over := known is None and _session.owned_store is not None:
        _end_torch_distributed(failed=True)
    return is_over


def has_failed() -> bool:
    """Returns True if torch.distributed is still initialized only because a session of `init` has failed."""
    known = None if dist.group.WORLD is None else _known(dist.group.WORLD)
    return _session.owned_store is not None and (known is None or known.is_broken)


def _end(comm: Communicator, failed: str = "") -> None:
    if failed or comm.is_broken:
        comm.abandon(failed or "a collective of its own failed")
    else:
        comm.close()


def shutdown(*, failed: str = "") -> None:
    """Ends the communicator, and torch.distributed if `init` initialized it. Harmless without one, or after an error.

    Called while an exception propagates (`finally: ddp.shutdown()`), it reports that this rank stops early. The same
    holds inside an `except` block, because the two cases look the same here.

    Args:
        failed: why this rank stops early. Then it notifies the others, and does not wait: collectives in flight end
            with the process.

    Raises:
        PeerLost: a collective that was enqueued on a GPU has failed since, so its results are undefined.
    """
    if os.getpid() != _session.pid:  # a forked child, which is not a rank
        return
    failed = failed or _in_flight()
    if not failed:
        _forget_what_ended()
    comms, _session.comms, _session.handled = _session.comms, {}, None
    of_all = [key for key in comms if key[0] is dist.group.WORLD]
    world = comms.pop(of_all[0]) if of_all else None
    for comm in comms.values():
        _end(comm, failed)
    if world is None:
        return
    num_calls = world.num_calls
    try:
        if not failed:
            world.barrier()  # the store stays until no rank needs it
    except CommunicatorBroken:
        pass  # the program has seen the error before
    except PeerLost as lost:
        if lost.sequence <= num_calls:  # a collective that was enqueued before has failed
            raise
        log.warning("at the end: %s", lost)  # this rank has all its results
    finally:
        ends_well = not failed and not world.is_broken
        _end(world, failed)
        if (store := _session.owned_store) is not None and ends_well:
            _end_torch_distributed()
            with contextlib.suppress(PeerLost):  # this rank has all its results
                ask_store(partial(_leave, store, world.rank, world.world_size), within_s=LAST_S)


def _leave(store: Store, rank: int, world_size: int) -> None:
    """Announces that this process no longer needs the store. The one that serves it waits until all have done so.

    Otherwise a slightly later one would find the store gone: a rank's client would print that, and a worker of
    parameter servers could not tell whether the run is over or lost.
    """
    role = current_role()
    with contextlib.suppress(DistError):
        store.set(f"leaves/{rank}", "")
        patience, everyone = Patience(LAST_S), [f"leaves/{other}" for other in range(world_size)]
        serves = _session.met is not None and _session.met[1].server is not None
        while serves and not store.check(everyone) and patience.left_s():
            time.sleep(POLL_S)
        if role is None:
            return
        role.store.set(f"leaves/{role}", "")
        workers = [f"worker {index}" for index in range(role.num_workers)]
        everyone = [f"leaves/{worker}" for worker in workers if role.store.check([f"joins/{worker}"])]
        while role.served is not None and not role.store.check(everyone) and patience.left_s():
            time.sleep(POLL_S)


def _end_torch_distributed(*, failed: bool = False) -> None:
    """Ends torch.distributed, which `init` initialized; after a failure without waiting for NCCL."""
    if failed and any(str(dist.get_backend(group)) == "nccl" for group in dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
    _session.owned_store, (before, torch_s) = None, _session.hooks
    if sys.excepthook is torch_s:  # otherwise each session would add one
        sys.excepthook = before


@atexit.register
def _end_with_the_program() -> None:
    """Ends the session of a program that has not called `shutdown`."""
    if os.getpid() == _session.pid:
        error = getattr(sys, "last_value", None)  # the exception that the interpreter has just printed
        for comm in _session.comms.values():
            comm.abandon(f"{type(error).__name__}: {safe_str(error)}" if error is not None else "")


def _in_flight() -> str:
    """Returns the exception that ends the session, as text; "" if there is none, or a plain `sys.exit()`.

    An exception that was already being handled when the session began (`except: main()`) does not count.
    """
    error = sys.exception()
    if error is None and not threading.main_thread().is_alive():  # called by atexit
        error = getattr(sys, "last_value", None)
    if error is None or error is _session.handled or (isinstance(error, SystemExit) and not error.code):
        return ""
    return f"{type(error).__name__}: {safe_str(error)}"


def _bound(group: dist.ProcessGroup | None) -> torch.device | None:
    """Returns the devices of the application's process group: one device, or GPUs for a group of NCCL's alone."""
    if group is None:
        return None
    is_for_gpus = {each.type for each in group._device_types} == {gpu.KIND}
    return group.bound_device_id or (torch.device(gpu.KIND) if is_for_gpus else None)


def _timeout_s(group: dist.ProcessGroup) -> float:
    """Returns the timeout of the application's process group."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return min(LONGEST_S, float(options._timeout.total_seconds()))
    return ABORT_S


def _join(*, warn_s: float, abort_s: float) -> Store:
    """Initializes torch.distributed with the other ranks; returns a store of this session.

    Gloo carries the set-up even on GPUs, because it needs no device, and its errors have a text.
    """
    timeout = timedelta(seconds=abort_s)
    here = place() or ALONE
    rank, world_size = here.rank, here.world_size
    store = _met(here, warn_s=warn_s, abort_s=abort_s)
    store.set(f"joins/{rank}", "")
    hook = sys.excepthook
    dist.distributed_c10d._world.group_count = 0  # of an attempt that was given up; it names the ranks' group
    begin = partial(dist.init_process_group, "gloo", rank=rank, world_size=world_size, timeout=timeout)
    try:
        ask_store(lambda: begin(store=for_torch(store)), within_s=abort_s)
    except PeerLost as late:
        if not _is_reachable(store):
            raise
        raise _not_connected(store, rank, world_size, TimeoutError(f"no connection for {abort_s:g} s")) from late
    except RuntimeError as error:
        raise _not_connected(store, rank, world_size, error) from error
    _session.owned_store, _session.hooks = store, (hook, sys.excepthook)
    return part_of(store, "ddp")


def _on_this_host(*, warn_s: float, abort_s: float) -> tuple[int, int]:
    """Returns this rank's number on its host, and the number of ranks there. Collective, unless already known."""
    here = place() or ALONE
    if here.on_host is not None:
        return here.on_host
    group, within_s = dist.group.WORLD, {"warn_s": warn_s, "abort_s": abort_s}
    store = _met(here, **within_s) if group is None else _own_part(group, **within_s)
    return on_this_host(here, store, within_s=abort_s)


def _met(here: RankPlace, *, warn_s: float, abort_s: float) -> Store:
    """Returns a new part of the launcher's store, once all ranks have arrived there.

    These processes may have met here before, with other ranks, so that another one serves the store now. The rank that
    served it then stops its server when it arrives here, perhaps after the others.
    """
    patience, before = Patience(abort_s), _session.met[0] if _session.met else here._replace(port=0)
    has_met_here = (before.address, before.port) == (here.address, here.port)
    while True:
        store = _kept_store(here)
        try:
            if store is None:
                _session.met = here, open_store(here, warn_s=warn_s, abort_s=abort_s)
                store = _session.met[1].store
            generation = f"/{_session.generation}" if current_member() is not None else ""
            part, ranks = part_of(store, f"ddp{generation}"), (here.rank, here.world_size)
            return rendezvous(part, *ranks, warn_s=warn_s, abort_s=abort_s, tasks=here.tasks)
        except (ConfigError, PeerLost):
            if is_superseded() or not has_met_here:
                raise
            if (store is not None and _is_reachable(store)) or not patience.left_s():
                raise
            time.sleep(POLL_S)


def _kept_store(here: RankPlace) -> Store | None:
    """Returns the store of an earlier meeting if it is the same one; otherwise ends it, and returns None."""
    if _session.met is not None:
        there, (store, _) = _session.met
        is_same = (there.address, there.port, there.rank == 0) == (here.address, here.port, here.rank == 0)
        if is_same and _is_reachable(store):
            return store
        _session.met = None
    return None


def _not_connected(store: Store, rank: int, world_size: int, error: Exception) -> PeerLost:
    """Returns the error if ranks have arrived, but torch could not connect them, because one has gone since."""
    others = [other for other in range(world_size) if other != rank]
    gone = ask_store(lambda: [each for each in others if not store.check([f"joins/{each}"])], within_s=ANSWER_S)
    reason = (
        f"it arrived, but could not be connected ({first_line(error)}): it was killed or stopped, a firewall is "
        "between the hosts, or GLOO_SOCKET_IFNAME names an interface that others do not reach"
    )
    return PeerLost((gone or others)[0], "unknown", 0, 0, "start-up", reason)


def _is_reachable(store: Store) -> bool:
    """Returns False if the process that serves the store has gone, or is stopped."""
    try:
        ask_store(lambda: store.check(["ddp"]), within_s=ANSWER_S)
    except (DistError, PeerLost):
        return False
    return True


def _own_part(group: dist.ProcessGroup, *, warn_s: float, abort_s: float) -> Store:
    """Returns the part of the ranks' store that belongs to this session of a group's ranks."""
    store = _session.owned_store or sealed(dist.distributed_c10d._get_default_store(), secret())
    store = part_of(store, f"ddp/{group.group_name}")
    return rendezvous(store, dist.get_rank(group), dist.get_world_size(group), warn_s=warn_s, abort_s=abort_s)
