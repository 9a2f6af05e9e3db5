"""From an environment to a communicator: `ddp.init` and `ddp.shutdown`.

`init` takes what is there, in this order: an initialised torch.distributed, torchrun's environment (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT), or nothing: then it is a world of one. This module and the launcher are the only
ones that read the environment.

    device "auto"     CUDA where there is one, else CPU
    backend "auto"    NCCL where every local rank has a GPU of its own, else Gloo (CUDA tensors staged through the host)
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed import DistError, HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ddp.clock import now_s
from ddp.comm.communicator import SEGMENT_BYTES, Communicator
from ddp.comm.select import Order
from ddp.comm.watchdog import Watchdog
from ddp.errors import ConfigError, PeerLost
from ddp.log import follow_rank, log
from ddp.transport.process_group import process_group_transport

WARN_S, ABORT_S = 10.0, 60.0
MEET_EVERY_S = 0.05


class _Session:
    """The process's communicator, and what `shutdown` must undo."""

    comm: Communicator | None = None
    groups: ClassVar[dict[str, Communicator]] = {}  # of torch's process groups, by name
    owns_torch_distributed = False
    generation = -1  # of the last communicator; `init` counts it up, on every rank alike


def init(
    *,
    device: str | torch.device = "auto",
    backend: str = "auto",
    algorithm: str = "auto",
    order: Order = "any",
    shared_memory: bool = True,
    segment_bytes: int = SEGMENT_BYTES,
    warn_s: float = WARN_S,
    abort_s: float = ABORT_S,
    debug: bool = False,
) -> Communicator:
    """Joins the other ranks. Collective; a second call returns the same communicator.

    Args:
        device: "auto", "cpu", "cuda" or a torch.device.
        backend: "auto", "gloo" or "nccl".
        algorithm: what algorithm="auto" in a call stands for; "auto": the way with the least predicted time.
        order: "canonical": "auto" takes only ways that add in the order of the canonical binary tree over the ranks.
        shared_memory: let CPU tensors go through the memory of a host where its ranks share it.
        segment_bytes: size of a pipelining piece.
        warn_s: after so many seconds in one wait, say who is missing.
        abort_s: after so many seconds of silence, raise PeerLost.
        debug: compare what the ranks call before every collective.

    Raises:
        ConfigError: a device or backend that is not there, or does not go with the other.
        PeerLost: a rank did not come within `abort_s`.
    """
    if _Session.comm is not None:
        return _Session.comm
    _Session.generation += 1
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    chosen_device, chosen_backend = choose_device(device, backend, local_rank, local_world_size)
    if chosen_device.type == "cuda":
        torch.cuda.set_device(chosen_device)
    if not dist.is_initialized():
        _join(warn_s=warn_s, abort_s=abort_s)
        _Session.owns_torch_distributed = True
    follow_rank(dist.get_rank(), dist.get_world_size())
    watchdog = Watchdog(
        dist.distributed_c10d._get_default_store(),
        dist.get_rank(),
        dist.get_world_size(),
        generation=_Session.generation,
        warn_s=warn_s,
        abort_s=abort_s,
    )
    comm = Communicator(
        process_group_transport(chosen_device, chosen_backend, timeout_s=abort_s),
        watchdog=watchdog,
        device=chosen_device,
        local_rank=local_rank,
        generation=_Session.generation,
        algorithm=algorithm,
        order=order,
        segment_bytes=segment_bytes,
        abort_s=abort_s,
        debug=debug,
    )
    try:
        # Everyone is here then; and on NCCL the first round of a group must be one of all ranks.
        comm.meet_neighbours(shared_memory=shared_memory and chosen_device.type == "cpu")
    except BaseException as error:
        comm.abandon(f"{type(error).__name__}: {error}")
        raise
    _Session.comm = comm
    return comm


def current() -> Communicator:
    """The process's communicator; made with the defaults if there is none yet."""
    return _Session.comm if _Session.comm is not None else init()


def communicator_of(group: dist.ProcessGroup) -> Communicator:
    """A communicator of the ranks of one of torch's process groups. Collective among them; made once for each group.

    With the settings of the process's communicator, if there is one, and with connections of its own, so that what the
    application sends over the group meets nothing of ours.

    Raises:
        ConfigError: this process does not belong to the group.
    """
    if group is dist.group.WORLD:
        return current()
    if dist.get_rank(group) < 0:
        raise ConfigError("this process is not in the process group; make the replica on its members only")
    name = group.group_name
    if name not in _Session.groups:
        _Session.groups[name] = _make(dist.get_process_group_ranks(group), name)
    return _Session.groups[name]


def _make(ranks: list[int], name: str) -> Communicator:
    base = _Session.comm
    abort_s = base.abort_s if base is not None else ABORT_S
    device, backend = choose_device(
        base.device if base is not None else "auto",
        "auto",
        int(os.environ.get("LOCAL_RANK", 0)),
        int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    )
    rank = ranks.index(dist.get_rank())
    comm = Communicator(
        process_group_transport(device, backend, timeout_s=abort_s, ranks=ranks),
        watchdog=Watchdog(
            PrefixStore(f"group/{name}", dist.distributed_c10d._get_default_store()),
            rank,
            len(ranks),
            generation=max(0, _Session.generation),
            warn_s=WARN_S,
            abort_s=abort_s,
        ),
        device=device,
        algorithm=base.auto.algorithm if base is not None else "auto",
        abort_s=abort_s,
        debug=base.debug if base is not None else False,
    )
    comm.world_ranks = ranks
    comm.meet_neighbours(shared_memory=device.type == "cpu")
    return comm


def shutdown(*, failed: str = "") -> None:
    """Ends the communicator, and torch.distributed if `init` began it. Harmless without one, and after an error.

    Args:
        failed: why this rank stops early. Then the others are told, and nothing is waited for: what may still be in
            flight ends with the process.
    """
    comm, _Session.comm = _Session.comm, None
    groups = list(_Session.groups.values())
    _Session.groups.clear()
    for group in groups:
        if failed or group.is_broken:
            group.abandon(failed or "a collective of its own failed")
        else:
            group.close()
    if comm is None:
        return
    if failed or comm.is_broken:
        comm.abandon(failed or "a collective of its own failed")
        return
    comm.barrier()  # nobody takes the store away while others still need it
    comm.close()
    if _Session.owns_torch_distributed:
        dist.destroy_process_group()
        _Session.owns_torch_distributed = False


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


def _join(*, warn_s: float, abort_s: float) -> None:
    """Meets the other ranks. Gloo carries set-up even on GPUs: it needs no device and fails in words.

    Every session has keys of its own in the store: else the second one would find the addresses of the first.
    """
    timeout = timedelta(seconds=abort_s)
    store: Store = HashStore()
    rank, world_size = 0, 1
    if "RANK" in os.environ:
        try:
            store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
        except DistError as error:
            reason = f"the store that it keeps is out of reach ({str(error).splitlines()[0]})"
            raise PeerLost(0, "unknown", _Session.generation, 0, "start-up", reason) from error
    store = PrefixStore(f"ddp/session/{_Session.generation}", store)
    _meet(store, rank, world_size, warn_s=warn_s, abort_s=abort_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _meet(store: Store, rank: int, world_size: int, *, warn_s: float, abort_s: float) -> None:
    """Returns once every rank has come; connecting to ranks that never come would wait in silence."""
    start_s, warned = now_s(), False
    store.set(f"here/{rank}", "")
    while missing := [other for other in range(world_size) if not store.check([f"here/{other}"])]:
        waited_s = now_s() - start_s
        if waited_s > abort_s:
            reason = f"of {world_size} ranks, {missing} did not come within {abort_s:g} s. Was each worker started?"
            raise PeerLost(missing[0], "unknown", _Session.generation, 0, "start-up", reason)
        if waited_s > warn_s and not warned:
            warned = True
            log.warning("start-up has waited %.0f s for rank(s) %s of %d", waited_s, missing, world_size)
        time.sleep(MEET_EVERY_S)
