"""From an environment to a communicator: `ddp.init` and `ddp.shutdown`.

`init` takes what is there, in this order: an initialised torch.distributed, torchrun's environment (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT), or nothing: then it is a world of one. This module and the launcher are the only
ones that read the environment.

    device "auto"     CUDA where there is one, else CPU
    backend "auto"    NCCL where every local rank has a GPU of its own, else Gloo (CUDA tensors staged through the host)
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from datetime import timedelta
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import DistError, HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ddp.allocator import keep_large_blocks
from ddp.comm.communicator import SEGMENT_BYTES, Communicator
from ddp.comm.meeting import meeting_place, out_of_reach
from ddp.comm.select import Order
from ddp.comm.watchdog import SILENCE_S, Watchdog
from ddp.errors import ConfigError, PeerLost
from ddp.log import follow_rank, log
from ddp.transport.process_group import process_group_transport

WARN_S, ABORT_S = 10.0, 600.0


class _Of(NamedTuple):
    """A communicator, and the process group of torch's that it goes with."""

    group: dist.ProcessGroup
    comm: Communicator


class _Session:
    """The process's communicator, and what `shutdown` must undo."""

    world: _Of | None = None
    groups: ClassVar[dict[str, _Of]] = {}  # by the group's name
    owns_torch_distributed = False
    abandoned: ClassVar[list[Communicator]] = []  # a collective of theirs may be in flight until the program ends
    generation = -1  # of the last communicator
    stores: ClassVar[dict[tuple[str, ...], Store]] = {}  # by address; each connects once, or is served once
    handled: BaseException | None = None  # the exception in whose handler the session began
    pid = os.getpid()  # a forked child ends for itself


def init(
    *,
    device: str | torch.device = "auto",
    backend: str = "auto",
    algorithm: str = "auto",
    order: Order = "any",
    shared_memory: bool = True,
    segment_bytes: int = SEGMENT_BYTES,
    warn_s: float = WARN_S,
    abort_s: float | None = None,
    debug: bool = False,
) -> Communicator:
    """Joins the other ranks. Collective; a second call returns the same communicator.

    After `torch.distributed.destroy_process_group` by the application, the next call makes a new one.

    Args:
        device: "auto", "cpu", "cuda" or a torch.device.
        backend: "auto", "gloo" or "nccl".
        algorithm: what algorithm="auto" in a call stands for; "auto": the way with the least predicted time.
        order: "canonical": "auto" takes only ways that add in the order of the canonical binary tree over the ranks.
        shared_memory: let CPU tensors go through the memory of a host where its ranks share it.
        segment_bytes: size of a pipelining piece.
        warn_s: after so many seconds in one wait, say who is missing.
        abort_s: after so many seconds in one wait, raise PeerLost; None: the timeout of the application's process
            group, else 600. A rank that died or shows no sign of life is not waited for so long (`watchdog.py`).
        debug: compare what the ranks call before every collective.

    Raises:
        ConfigError: a device or backend that is not there, or does not go with the other.
        PeerLost: a rank did not come within `abort_s`.
    """
    _forget_what_ended()
    if _Session.world is not None:
        return _Session.world.comm
    keep_large_blocks()
    _Session.generation += 1
    _Session.handled, _Session.pid = sys.exception(), os.getpid()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    chosen_device, chosen_backend = choose_device(device, backend, local_rank, local_world_size)
    if chosen_device.type == "cuda":
        torch.cuda.set_device(chosen_device)
    if dist.is_initialized():
        assert dist.group.WORLD is not None
        abort_s = abort_s or _timeout_s(dist.group.WORLD)
        store = _meeting_place_of(dist.group.WORLD, warn_s=warn_s, abort_s=abort_s)
    else:
        abort_s = abort_s or ABORT_S
        store = _join(warn_s=warn_s, abort_s=abort_s)
        _Session.owns_torch_distributed = True
    world = dist.group.WORLD
    assert world is not None
    follow_rank(dist.get_rank(), dist.get_world_size())
    comm = _communicator(
        world,
        store,
        chosen_device,
        chosen_backend,
        local_rank=local_rank,
        algorithm=algorithm,
        order=order,
        shared_memory=shared_memory,
        segment_bytes=segment_bytes,
        warn_s=warn_s,
        abort_s=abort_s,
        debug=debug,
    )
    _Session.world = _Of(world, comm)
    return comm


def current() -> Communicator:
    """The process's communicator; made with the defaults if there is none yet."""
    return init() if _Session.world is None or _has_ended(_Session.world) else _Session.world.comm


def communicator_of(group: dist.ProcessGroup) -> Communicator:
    """A communicator of the ranks of one of torch's process groups. Collective among them; made once for each group.

    With the group's timeout, otherwise with the settings of the process's communicator, if there is one; and with
    connections of its own, so that what the application sends over the group meets nothing of ours.

    Raises:
        ConfigError: this process does not belong to the group.
    """
    if group is dist.group.WORLD:
        return current()
    if dist.get_rank(group) < 0:
        raise ConfigError("this process is not in the process group; make the replica on its members only")
    _forget_what_ended()
    if group.group_name not in _Session.groups:
        base = _Session.world.comm if _Session.world is not None else None
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        device, backend = choose_device(
            base.device if base is not None else "auto",
            "auto",
            local_rank,
            int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        )
        abort_s = _timeout_s(group)
        comm = _communicator(
            group,
            _meeting_place_of(group, warn_s=WARN_S, abort_s=abort_s),
            device,
            backend,
            local_rank=local_rank,
            algorithm=base.auto.algorithm if base is not None else "auto",
            abort_s=abort_s,
            debug=base.debug if base is not None else False,
        )
        comm.world_ranks = dist.get_process_group_ranks(group)
        _Session.groups[group.group_name] = _Of(group, comm)
    return _Session.groups[group.group_name].comm


def _communicator(
    group: dist.ProcessGroup,
    store: Store,
    device: torch.device,
    backend: str,
    *,
    local_rank: int,
    algorithm: str,
    abort_s: float,
    debug: bool,
    order: Order = "any",
    shared_memory: bool = True,
    segment_bytes: int = SEGMENT_BYTES,
    warn_s: float = WARN_S,
) -> Communicator:
    """A communicator of a group's ranks, over connections of its own. Collective over them.

    Args:
        store: of this session of the ranks alone.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    generation = max(0, _Session.generation)
    watchdog = Watchdog(store, rank, world_size, generation=generation, warn_s=warn_s, abort_s=abort_s)
    try:
        transport = process_group_transport(
            device,
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout_s=min(abort_s, SILENCE_S),  # everyone has just been here
            ranks=None if group is dist.group.WORLD else dist.get_process_group_ranks(group),
        )
    except RuntimeError as error:
        lost = watchdog.find_culprit((rank + 1) % world_size, str(error).splitlines()[0])
        watchdog.stop()
        raise lost from error
    comm = Communicator(
        transport,
        watchdog=watchdog,
        device=device,
        local_rank=local_rank,
        generation=generation,
        algorithm=algorithm,
        order=order,
        segment_bytes=segment_bytes,
        abort_s=abort_s,
        debug=debug,
    )
    try:
        # Everyone is here then; and on NCCL the first round of a group must be one of all ranks.
        comm.meet_neighbours(shared_memory=shared_memory and device.type == "cpu")
    except BaseException as error:
        comm.abandon(f"{type(error).__name__}: {error}")
        raise
    return comm


def _has_ended(of: _Of) -> bool:
    """True if the application has destroyed torch's process group, and perhaps begun another one."""
    known = dist.distributed_c10d._world.pg_map if dist.is_initialized() else {}
    return of.group not in known


def _forget_what_ended() -> None:
    for name in [name for name, of in _Session.groups.items() if _has_ended(of)]:
        _end(_Session.groups.pop(name).comm)
    if _Session.world is not None and _has_ended(_Session.world):
        _end(_Session.world.comm)
        _Session.world, _Session.owns_torch_distributed = None, False


def _end(comm: Communicator, failed: str = "") -> None:
    if failed or comm.is_broken:
        comm.abandon(failed or "a collective of its own failed")
        _Session.abandoned.append(comm)
    else:
        comm.close()


def shutdown(*, failed: str = "") -> None:
    """Ends the communicator, and torch.distributed if `init` began it. Harmless without one, and after an error.

    While an exception is on its way (`finally: ddp.shutdown()`), this rank stops early. So it does inside an `except`
    block, which looks the same from here.

    Args:
        failed: why this rank stops early. Then the others are told, and nothing is waited for: what may still be in
            flight ends with the process.
    """
    failed = failed or _in_flight()
    if not failed:
        _forget_what_ended()
    world, _Session.world = _Session.world, None
    for of in _Session.groups.values():
        _end(of.comm, failed)
    _Session.groups.clear()
    _Session.handled = None
    if world is None:
        return
    if not failed and not world.comm.is_broken:
        try:
            world.comm.barrier()  # nobody takes the store away while others still need it
        except PeerLost as lost:
            log.warning("at the end: %s", lost)  # this rank has all that it wanted
    ends_well = not failed and not world.comm.is_broken
    _end(world.comm, failed)
    if _Session.owns_torch_distributed and ends_well:
        dist.destroy_process_group()
        _Session.owns_torch_distributed = False


@atexit.register
def _let_go() -> None:
    """The program ends without a `shutdown`."""
    if os.getpid() != _Session.pid:
        return
    error = getattr(sys, "last_value", None)  # what the interpreter has just printed
    failed = f"{type(error).__name__}: {error}" if error is not None else ""
    for comm in (*(of.comm for of in (*_Session.groups.values(), _Session.world) if of), *_Session.abandoned):
        comm.let_go(failed)


def _in_flight() -> str:
    """Returns the exception that the session is being left by, in words; "" if there is none, or a plain `sys.exit()`.

    One that was being handled when the session began (`except: main()`) does not leave it.
    """
    error = sys.exception()
    if error is None and not threading.main_thread().is_alive():  # called by atexit
        error = getattr(sys, "last_value", None)
    if error is None or error is _Session.handled or (isinstance(error, SystemExit) and not error.code):
        return ""
    return f"{type(error).__name__}: {error}"


def choose_device(
    device: str | torch.device, backend: str, local_rank: int, local_world_size: int
) -> tuple[torch.device, str]:
    """What "auto" means here, and whether the pair is possible."""
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
    return torch.device("cuda", local_rank % num_gpus if index is None else index), backend


def _timeout_s(group: dist.ProcessGroup) -> float:
    """How long the application lets a collective of its process group take."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return float(options._timeout.total_seconds())
    return ABORT_S


def _join(*, warn_s: float, abort_s: float) -> Store:
    """Begins torch.distributed with the other ranks; returns a store of this session.

    Gloo carries set-up even on GPUs: it needs no device and fails in words.
    """
    timeout = timedelta(seconds=abort_s)
    rank, world_size = 0, 1
    store: Store = HashStore()
    if "RANK" in os.environ:
        address = tuple(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
        try:
            if address not in _Session.stores:
                _Session.stores[address] = next(iter(rendezvous("env://", timeout=timeout)))[0]
        except DistError as error:
            raise out_of_reach(error) from error
        rank, world_size, store = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), _Session.stores[address]
    store = meeting_place(PrefixStore("ddp", store), rank, world_size, warn_s=warn_s, abort_s=abort_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    return PrefixStore("ddp", store)


def _meeting_place_of(group: dist.ProcessGroup, *, warn_s: float, abort_s: float) -> Store:
    store = PrefixStore(f"ddp/{group.group_name}", dist.distributed_c10d._get_default_store())
    return meeting_place(store, dist.get_rank(group), dist.get_world_size(group), warn_s=warn_s, abort_s=abort_s)
