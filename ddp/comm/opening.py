"""Opens a communicator: the ranks of one store and generation connect, and prove who they are.

This module keeps no state, so a process may open several, in turn or at once: `session.py` opens one for `ddp.init`,
and a change of membership brings a new store, generation, rank and world size.

Note "proof". Gloo accepts any process that connects to its port with the right small number as its rank, and every user
of a host can connect there. So, before a rank uses anything that arrives, it

    puts an unpredictable number into the private store
    sends each peer the code of (its own number, the peer's number), which takes the secret
    compares what each peer has sent with the code of (the peer's number, its own number)

The numbers are new for each set of connections. So replayed or reflected codes are wrong. A connection carries one code
of 32 bytes each way.

Note "device". NCCL carries tensors between the ranks, or Gloo does, through the host. Each rank chooses its device
(`chosen_device`) by the request and the devices that the program uses already. Then all ranks exchange their
capabilities and reach the same decision (`agreed_backend`): an impossible combination is an error on every rank, before
any rank waits for a connection.

The number of ranks on a host and the number of GPUs that a rank sees do not show whether each rank has its own GPU,
because a launcher may show each rank only one GPU, which is then cuda:0 (`srun --gpus-per-task`, Ray, Kubernetes). So
the ranks compare hosts and UUIDs.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from ddp.comm import nccl
from ddp.comm.communicator import Communicator
from ddp.comm.connect import boot_id
from ddp.comm.host_links import CPU, Settings
from ddp.comm.meeting.private_store import part_of
from ddp.comm.meeting.rendezvous import ask_store
from ddp.comm.meeting.secret import code_of, secret
from ddp.comm.transport.edge import Transfer, Transport, TransportError, never_hopeless
from ddp.comm.transport.gloo import GlooConnections, GlooTransport, StagedGlooTransport, gloo_of
from ddp.comm.watch.watchdog import SILENCE_S, Watchdog
from ddp.errors import ConfigError, PeerLost, first_line, safe_str
from ddp.process import gpu
from ddp.process.host import VISIBLE_GPUS
from ddp.process.terminal import log
from ddp.units import counted

Value = TypeVar("Value", bound=Hashable)

CODE_BYTES = 32


def open_communicator(
    store: Store,
    rank: int,
    world_size: int,
    settings: Settings,
    *,
    ranks: Sequence[int] = (),
    torch_s: dist.ProcessGroup | None = None,
) -> Communicator:
    """Connects this rank with the others, over their own connections. Collective over them.

    Args:
        store: of this session of the ranks alone (`rendezvous`), without keys of an earlier one; a separate connection
            (`clone`) if others are opened at the same time.
        rank, world_size: this process's number, and the number of processes.
        settings: see `Settings`.
        ranks: these ranks' numbers in torch.distributed, if they are a subset.
        torch_s: a process group of torch, whose connections must be proved, too.

    Raises:
        ConfigError: on every rank: see `agreed_backend`.
        PeerLost: a rank could not be reached, or does not belong to this launch.
        RuntimeError: NCCL failed on this rank.
    """
    abort_s, connect_s = settings.abort_s, min(settings.abort_s, SILENCE_S)  # all ranks have just met
    everyone, timeout = range(world_size), timedelta(seconds=connect_s)
    limits: dict[str, Any] = {"warn_s": settings.warn_s, "abort_s": abort_s, "world_ranks": ranks}
    watch = partial(Watchdog, store, rank, world_size, generation=settings.generation, **limits)
    watchdog = ask_store(watch, within_s=abort_s)
    try:

        def over_nccl() -> Transport:
            return nccl.NcclTransport(part_of(store, "nccl"), rank, world_size, settings.device)

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
            mine = capabilities_of(settings.device, settings.backend)
            backend = agreed_backend(store, rank, ranks or everyone, mine, watchdog.wait_for_value)
            transport = None if backend == "nccl" else ask_store(over_gloo, within_s=abort_s)
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
    """Returns once this rank and every peer have proved that they know the key (note "proof"). Collective.

    Args:
        connections: between these ranks, and not used before.
        store: of this session of the ranks, in which foreign writes are detected; a new part for each transport.

    Raises:
        PeerLost: a foreign process has taken a peer's end of the connection.
        TransportError: a peer does not respond.
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


# --- the device, and what carries its tensors ------------------------------------------------------------------------


def device_of(module: nn.Module) -> torch.device | None:
    """Returns the device for a module's gradients: a GPU if any of its tensors is there; None without tensors."""
    devices = [tensor.device for tensor in chain(module.parameters(), module.buffers())]
    kinds = (gpu.KIND, "cpu")
    return next((each for kind in kinds for each in devices if each.type == kind), None)


def device_named(name: str | int | torch.device) -> torch.device:
    """Returns the device of this name; a number is that of a GPU.

    Raises:
        ConfigError: it is not a device, or of a kind that is not supported.
    """
    try:
        device = torch.device(gpu.KIND, name) if isinstance(name, int) else torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in (CPU.type, gpu.KIND):
        raise ConfigError(f"device={name}: is not supported; use auto, cpu, cuda, or one GPU, as cuda:1")
    return device


def chosen_device(
    asked: str | int | torch.device | None, local_rank: int, bound: torch.device | None = None
) -> torch.device:
    """Returns the requested device; a GPU with its number, which need not exist.

    A GPU without a number is the bound one; else the current one if the program already uses GPUs, because it may have
    set it; else that of the rank's number on its host.

    Args:
        asked: see `ddp.init`.
        local_rank: this rank's number among the ranks of its host.
        bound: the device of torch's process group, if the application has set it; a GPU may have no number.

    Raises:
        ConfigError: as `device_named`.
    """
    has_begun = gpu.cuda.is_initialized()  # first, because torch may initialize CUDA to name its default device
    if bound is not None and bound.type != gpu.KIND:
        bound = None
    if asked is None:
        is_gpu = bound is not None or has_begun or torch.get_default_device().type == gpu.KIND
        device = torch.device(gpu.KIND) if is_gpu else CPU
    elif asked == "auto":
        device = torch.device(gpu.KIND) if gpu.cuda.device_count() else CPU
    else:
        device = device_named(asked)
    if device.type == CPU.type:
        return CPU
    if device.index is not None:
        return device
    if bound is not None and bound.index is not None:
        return bound
    own = gpu.cuda.current_device() if has_begun else local_rank % max(1, gpu.cuda.device_count())
    return torch.device(gpu.KIND, own)


def show_only(devices: Sequence[int]) -> None:
    """Restricts this process and its children to these GPUs; to be called before it uses any.

    Args:
        devices: numbers among those in CUDA_VISIBLE_DEVICES, if that is set; each once.

    Raises:
        ConfigError: one of them does not exist, or the process already uses GPUs.
    """
    visible = os.environ.get(VISIBLE_GPUS)
    names = visible.split(",") if visible is not None else list(map(str, range(max(devices) + 1)))
    os.environ[VISIBLE_GPUS] = ",".join(names[each] for each in devices if each < len(names))
    if (found := gpu.cuda.device_count()) != len(devices):  # CUDA drops a missing one, and all after it
        raise ConfigError(
            f"cluster.devices={list(devices)}: torch finds {found} of these, where CUDA_VISIBLE_DEVICES is "
            f"{visible or 'not set'}; take GPUs that exist, or leave it out"
        )


class Capabilities(NamedTuple):
    """The device and backends of one rank.

    Attributes:
        backend: the requested one.
        kind: the type of its tensors' device.
        gpu: an identifier of the GPU that is the same on all ranks; "" on the CPU.
        has_nccl: its build of torch has NCCL.
        problem: why this device or backend is not possible here; "" if it is.
    """

    backend: str
    kind: str
    gpu: str = ""
    has_nccl: bool = False
    problem: str = ""


def capabilities_of(device: torch.device, backend: str) -> Capabilities:
    """Returns this rank's capabilities. Makes the GPU the current one, unless the program already uses GPUs."""
    mine = Capabilities(backend, device.type, has_nccl=nccl.ProcessGroupNCCL is not None)
    num_gpus = gpu.cuda.device_count() if device.type == gpu.KIND else 0
    problem = ""
    if backend not in ("auto", "gloo", "nccl"):
        problem = f"backend={backend!r} is unknown; use auto, gloo or nccl"
    elif device.type == CPU.type:
        if backend == "nccl":
            problem = "backend=nccl needs a GPU for each rank, but tensors are on the CPU; use backend=gloo"
    elif not num_gpus:
        what = "backend=nccl" if backend == "nccl" else f"device={gpu.KIND}"
        problem = f"{what}, but torch sees no GPU here; use device=cpu and backend=gloo, or torch's CUDA build"
    elif (device.index or 0) >= num_gpus:
        problem = f"device={device}, but torch sees {counted(num_gpus, 'GPU')} here, counted from 0; use another one"
    else:
        try:
            if not gpu.cuda.is_initialized():
                gpu.cuda.set_device(device)
            return mine._replace(gpu=f"{_host()} {uuid_of(device)}")
        except RuntimeError as error:  # from the driver
            problem = f"device={device} cannot be used ({first_line(error)}); fix that, or use device=cpu"
    return mine._replace(problem=problem)


def _host() -> str:
    """Returns a name for this host, by NCCL's rules: NCCL_HOSTID may divide a host into several."""
    return os.environ.get("NCCL_HOSTID") or boot_id() or socket.gethostname()


def uuid_of(device: torch.device) -> str:
    """Returns the GPU's UUID; if torch's build lacks it, the GPU's number among the visible ones."""
    visible = f"{device.index} of {os.environ.get(VISIBLE_GPUS, 'all')}"
    return str(getattr(gpu.cuda.get_device_properties(device), "uuid", visible))


def agreed_backend(
    store: Store, rank: int, ranks: Sequence[int], mine: Capabilities, read: Callable[[str, int], bytes] | None = None
) -> str:
    """Returns "nccl" if every rank has its own GPU, else "gloo"; the same on every rank. Collective over them.

    Args:
        store: of this session of the ranks alone.
        rank: this rank's number among them.
        ranks: their numbers in messages.
        mine: this rank's capabilities.
        read: waits for a rank's value under a name, and returns it; None: the store's own wait.

    Raises:
        ConfigError: on every rank: one of them has a problem, or their requests are incompatible.
    """
    everyone = range(len(ranks))
    store.set(f"means/{rank}", json.dumps(mine))
    read = read or (lambda name, _: store.get(name))
    capabilities = [
        mine if other == rank else Capabilities(*json.loads(read(f"means/{other}", other))) for other in everyone
    ]
    try:
        backend, reason = _decide(ranks, capabilities)
    except ConfigError:
        with contextlib.suppress(DistError):  # the rank that serves the store ends once all have read it
            store.set(f"read/{rank}", "")
            store.multi_get([f"read/{other}" for other in everyone])
        raise
    if reason and rank == 0 and len(ranks) > 1:
        log.warning("%s: tensors travel by Gloo, through the host, which is slower than NCCL", reason)
    return backend


def _decide(ranks: Sequence[int], capabilities: Sequence[Capabilities]) -> tuple[str, str]:
    """Returns the backend, and why "auto" is not NCCL; raises ConfigError as `agreed_backend`."""
    for problem, at in _by_value(ranks, [each.problem for each in capabilities]).items():
        if problem:
            raise ConfigError(f"{_named(at)}: {problem}" if len(ranks) > 1 else problem)
    kinds = _by_value(ranks, [each.kind for each in capabilities])
    if len(kinds) > 1:
        raise ConfigError(
            f"the device is {_listed(kinds)}: put the models of all ranks on one kind of device, or call "
            "ddp.init(device=…) on each"
        )
    asked = _by_value(ranks, [each.backend for each in capabilities])
    asked.pop("auto", None)
    if len(asked) > 1:
        raise ConfigError(f"backend is {_listed(asked)}: give all ranks the same one")
    if CPU.type in kinds or "gloo" in asked:
        return "gloo", ""
    lacking = [name for name, each in zip(ranks, capabilities, strict=True) if not each.has_nccl]
    sharing = [at for at in _by_value(ranks, [each.gpu for each in capabilities]).values() if len(at) > 1]
    if lacking:
        reason = f"the torch of {_named(lacking)} is built without NCCL"
    elif sharing:
        reason = f"{_named(sharing[0])} share a GPU"
    else:
        return "nccl", ""
    if "nccl" in asked:
        raise ConfigError(f"backend=nccl needs a GPU for each rank, but {reason}; fix that, or use backend=gloo")
    return "gloo", reason


def _by_value(ranks: Sequence[int], values: Sequence[Value]) -> dict[Value, list[int]]:
    """Returns the ranks by their value."""
    found: dict[Value, list[int]] = {}
    for name, value in zip(ranks, values, strict=True):
        found.setdefault(value, []).append(name)
    return found


def _listed(ranks_by_value: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{value} on {_named(at)}" for value, at in ranks_by_value.items())


def _named(ranks: Sequence[int]) -> str:
    *before, last = map(str, ranks)
    return f"ranks {', '.join(before)} and {last}" if before else f"rank {last}"
