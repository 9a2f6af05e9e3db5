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

Note "device". NCCL carries tensors between the ranks, or Gloo does, through the host. A rank chooses its device alone
(`chosen_device`), from what was asked for and what the program has begun. Then all ranks tell each other what they
have, and decide the same (`agreed_backend`): what cannot work is an error on each of them, before any of them waits for
another one's connection.

Neither the number of ranks on a host nor that of the GPUs that a rank sees tells whether each rank has a GPU of its
own, because a launcher may show each rank one GPU alone, which is cuda:0 then (`srun --gpus-per-task`, Ray,
Kubernetes). So the ranks compare hosts and UUIDs.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from ddp.comm import nccl
from ddp.comm.communicator import Communicator
from ddp.comm.connect import boot_id
from ddp.comm.host_links import CPU, Settings
from ddp.comm.meeting.private_store import code_of, part_of, secret
from ddp.comm.meeting.rendezvous import answered
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


# --- the device, and what carries its tensors ------------------------------------------------------------------------


def device_of(module: nn.Module) -> torch.device | None:
    """Returns where a module's gradients are reduced: on a GPU if any of its tensors is there; None without tensors."""
    devices = [tensor.device for tensor in chain(module.parameters(), module.buffers())]
    kinds = (gpu.KIND, "cpu")
    return next((each for kind in kinds for each in devices if each.type == kind), None)


def device_named(name: str | int | torch.device) -> torch.device:
    """Returns the device that somebody names; a number is that of a GPU.

    Raises:
        ConfigError: it is no device, or of a kind that is not supported.
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
    """Returns the device for what was asked; a GPU with its number, which need not be there.

    A GPU without a number is the one that is bound; or the current one if the program has begun to use GPUs, because it
    may have set it; or that of the rank's number on its host.

    Args:
        asked: see `ddp.init`.
        local_rank: this rank's number among the ranks of its host.
        bound: what torch's process group is for, if the application has said it; of GPUs perhaps without a number.

    Raises:
        ConfigError: as `device_named`.
    """
    has_begun = gpu.cuda.is_initialized()  # asked first, because torch may begin in order to name its default device
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
    """Lets this process, and those that it starts, see only these of the GPUs that it sees; before it uses any.

    Args:
        devices: numbers among those that CUDA_VISIBLE_DEVICES names, if that is set; each once.

    Raises:
        ConfigError: one of them is not there, or the process has begun to use GPUs.
    """
    shown = os.environ.get(VISIBLE_GPUS)
    names = shown.split(",") if shown is not None else list(map(str, range(max(devices) + 1)))
    os.environ[VISIBLE_GPUS] = ",".join(names[each] for each in devices if each < len(names))
    if (found := gpu.cuda.device_count()) != len(devices):  # CUDA leaves out what is not there, and all behind it
        raise ConfigError(
            f"cluster.devices={list(devices)}: torch finds {found} of these, where CUDA_VISIBLE_DEVICES is "
            f"{shown or 'not set'}; take GPUs that are there, or leave it out"
        )


class Means(NamedTuple):
    """Says what one rank has for the exchange of tensors.

    Attributes:
        backend: what was asked for.
        kind: of the device where its tensors are.
        gpu: a GPU's name that is the same for all ranks; "" on the CPU.
        has_nccl: its build of torch can do NCCL.
        problem: why this device or backend is not possible here; "" if it is.
    """

    backend: str
    kind: str
    gpu: str = ""
    has_nccl: bool = False
    problem: str = ""


def take(device: torch.device, backend: str) -> Means:
    """Returns the `Means` of this rank. Makes the GPU this thread's, unless the program has used GPUs before."""
    means = Means(backend, device.type, has_nccl=nccl.ProcessGroupNCCL is not None)
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
            return means._replace(gpu=f"{_host()} {uuid_of(device)}")
        except RuntimeError as error:  # the driver's
            problem = f"device={device} does not begin ({first_line(error)}); fix that, or use device=cpu"
    return means._replace(problem=problem)


def _host() -> str:
    """Returns a name for this host, by NCCL's rules: NCCL_HOSTID makes hosts of what is one."""
    return os.environ.get("NCCL_HOSTID") or boot_id() or socket.gethostname()


def uuid_of(device: torch.device) -> str:
    """Returns the GPU's UUID; of a build that does not tell it, the number by which this process is shown it."""
    shown = f"{device.index} of {os.environ.get(VISIBLE_GPUS, 'all')}"
    return str(getattr(gpu.cuda.get_device_properties(device), "uuid", shown))


def agreed_backend(
    store: Store, rank: int, ranks: Sequence[int], mine: Means, read: Callable[[str, int], bytes] | None = None
) -> str:
    """Returns "nccl" if every rank has its own GPU, else "gloo"; the same on every rank. Collective over them.

    Args:
        store: of this session of the ranks alone.
        rank: this rank's number among them.
        ranks: what they are called in messages.
        mine: what this rank has.
        read: returns what a rank has written under a name, once it has; None: the store waits for it.

    Raises:
        ConfigError: on every rank: one of them has a problem, or what they have asked for does not go together.
    """
    everyone = range(len(ranks))
    store.set(f"means/{rank}", json.dumps(mine))
    read = read or (lambda name, _: store.get(name))
    told = [mine if other == rank else Means(*json.loads(read(f"means/{other}", other))) for other in everyone]
    try:
        backend, reason = _decided(ranks, told)
    except ConfigError:
        with contextlib.suppress(DistError):  # the rank that keeps the store ends once all have read what it holds
            store.set(f"read/{rank}", "")
            store.multi_get([f"read/{other}" for other in everyone])
        raise
    if reason and rank == 0 and len(ranks) > 1:
        log.warning("%s: tensors travel by Gloo, through the host, which is slower than NCCL", reason)
    return backend


def _decided(ranks: Sequence[int], told: Sequence[Means]) -> tuple[str, str]:
    """Returns the backend, and why it is not NCCL if that was left open; raises ConfigError as `agreed_backend`."""
    for problem, at in _by_value(ranks, [each.problem for each in told]).items():
        if problem:
            raise ConfigError(f"{_named(at)}: {problem}" if len(ranks) > 1 else problem)
    kinds = _by_value(ranks, [each.kind for each in told])
    if len(kinds) > 1:
        raise ConfigError(
            f"the device is {_listed(kinds)}: put the models of all ranks on one kind of device, or say "
            "ddp.init(device=…) on each"
        )
    asked = _by_value(ranks, [each.backend for each in told])
    asked.pop("auto", None)
    if len(asked) > 1:
        raise ConfigError(f"backend is {_listed(asked)}: give all ranks the same one")
    if CPU.type in kinds or "gloo" in asked:
        return "gloo", ""
    lacking = [name for name, each in zip(ranks, told, strict=True) if not each.has_nccl]
    sharing = [at for at in _by_value(ranks, [each.gpu for each in told]).values() if len(at) > 1]
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
    """Returns by value the ranks that have it."""
    found: dict[Value, list[int]] = {}
    for name, value in zip(ranks, values, strict=True):
        found.setdefault(value, []).append(name)
    return found


def _listed(ranks_by_value: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{value} on {_named(at)}" for value, at in ranks_by_value.items())


def _named(ranks: Sequence[int]) -> str:
    *before, last = map(str, ranks)
    return f"ranks {', '.join(before)} and {last}" if before else f"rank {last}"
