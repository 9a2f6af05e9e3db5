"""Collects facts about this host: packages, cores, memory, limits, network, folders. It does not evaluate them.

    which address Gloo takes    that of the interface in GLOO_SOCKET_IFNAME; else the first one that this host's name
                                has and that can be listened on; else the loopback's (torch, ProcessGroupGloo)

A query that may hang, to a name server, a driver or a network file system, has its own deadline. Queries without a
response are listed.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import platform
import resource
import shutil
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, TypeVar

from packaging.requirements import Requirement

from ddp.process.clock import within
from ddp.process.memory import VARIABLES, available_bytes, core_quota, processors

Answer = TypeVar("Answer")

PACKAGE = "ddp"
SHARED, GPUS, ADAPTERS = Path("/dev/shm"), Path("/proc/driver/nvidia/gpus"), Path("/sys/class/infiniband")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR")
INTERFACE = "GLOO_SOCKET_IFNAME"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
ANSWER_S = 20.0  # an idle driver takes seconds for each GPU to wake up
LOOPBACK = "127."
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class Demand(NamedTuple):
    """The versions of a package that another one admits: "ddp" or one of its dependencies."""

    by: str
    package: str
    versions: str


@dataclass(kw_only=True)
class HostFacts:
    """Facts of one process about itself and its host, as plain values that ranks can send.

    Those without a query that could hang are their own defaults; `facts` collects the others.

    Attributes:
        kernel: an identifier of the running kernel.
        versions: of each package, and of python; "" where it is missing.
        cores: numbers of the cores that this process may use.
        quota: the number of cores whose time the control groups allow.
        load: mean number of runnable processes over the last minute.
        gpus: name and bytes of each GPU that torch sees; `num_gpus`: their number by the driver.
        interfaces: by name, the IPv4 address; "" without one.
        address: where Gloo listens; "" if that is unknown.
        shared_bytes, shared_free: of /dev/shm; 0 where it cannot be written.
        left_behind: paths there from processes that have ended.
        pinned_bytes: that a process may lock in memory, as network adapters need.
        disk_free: bytes free in the current folder; -1 where it cannot be written.
        temporary: where programs put temporary files; `temporary_free`: bytes.
        data: the folder of data sets; `data_is`: "absent", "usable", or why it is neither.
        unanswered: the queries without a response in time.
    """

    host: str = field(default_factory=socket.gethostname)
    kernel: str
    versions: dict[str, str]
    demands: list[tuple[str, str, str]]
    cores: list[int] = field(default_factory=processors)
    num_cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    quota: float = field(default_factory=core_quota)
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    threads: int
    variables: dict[str, str]
    gpus: list[tuple[str, int]]
    num_gpus: int = field(default_factory=lambda: len(list(GPUS.glob("*"))))
    interfaces: dict[str, str]
    address: str
    shared_bytes: int
    shared_free: int
    left_behind: list[str]
    memory_left: float = field(default_factory=available_bytes)
    open_files: int = field(default_factory=lambda: _limit(resource.RLIMIT_NOFILE))
    pinned_bytes: int = field(default_factory=lambda: _limit(resource.RLIMIT_MEMLOCK))
    adapters: list[str] = field(default_factory=lambda: sorted(each.name for each in ADAPTERS.glob("*")))
    folder: str
    disk_free: int
    temporary: str
    temporary_free: int
    data: str
    data_is: str
    unanswered: list[str]


def facts(
    data: str,
    *,
    kernel: str,
    threads: int,
    gpus: Callable[[], list[tuple[str, int]]],
    left_behind: Sequence[Path],
) -> HostFacts:
    """Returns the facts of this process.

    Args:
        data: the folder of data sets.
        kernel, threads, gpus, left_behind: facts that need torch, which this module does not import.
    """
    unanswered: list[str] = []

    def ask(what: str, question: Callable[[], Answer], default: Answer) -> Answer:
        try:
            return within(ANSWER_S, question)
        except TimeoutError:
            unanswered.append(what)
            return default

    interfaces = {name: _address_of(name) for _, name in socket.if_nameindex()}
    shared_bytes, shared_free = ask("/dev/shm", lambda: _room_in(SHARED), (0, 0))
    folder, temporary = Path.cwd(), Path(os.environ.get("TMPDIR") or "/tmp")
    return HostFacts(
        kernel=kernel,
        versions=dict(versions()),
        demands=[(each.by, each.package, each.versions) for each in demands()],
        threads=threads,
        variables={name: os.environ[name] for name in (*THREAD_VARIABLES, *VARIABLES, INTERFACE) if name in os.environ},
        gpus=ask("the driver of the GPUs", gpus, []),
        interfaces=interfaces,
        address=ask(f"the name {socket.gethostname()}", lambda: _gloo_s_address(interfaces), ""),
        shared_bytes=shared_bytes,
        shared_free=shared_free,
        left_behind=list(map(str, left_behind)),
        folder=str(folder),
        disk_free=ask(f"the folder {folder}", lambda: _room_in(folder)[1] if _is_writable(folder) else -1, -1),
        temporary=str(temporary),
        temporary_free=ask(f"the folder {temporary}", lambda: _room_in(temporary)[1], 0),
        data=data,
        data_is=ask(f"the folder {data}", lambda: _state_of(Path(data)), "usable"),
        unanswered=unanswered,
    )


def visible_gpus() -> list[str]:
    """Returns the GPUs that this process may use, as CUDA names them, without asking the driver."""
    if VISIBLE_GPUS in os.environ:
        return [each for each in os.environ[VISIBLE_GPUS].split(",") if each]
    return [str(number) for number, _ in enumerate(GPUS.glob("*"))]


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return 1 << 62 if soft == resource.RLIM_INFINITY else soft


# --- packages --------------------------------------------------------------------------------------------------------


@functools.cache
def demands() -> Sequence[Demand]:
    """Returns the versions that this package and its dependencies admit, by their metadata.

    There are none if this package is not installed, but only on the path.
    """
    try:
        about = metadata.metadata(PACKAGE)
    except metadata.PackageNotFoundError:
        return []
    own = [Demand(PACKAGE, "python", about["Requires-Python"] or ""), *_demands_of(PACKAGE)]
    return [*own, *(each for demand in own[1:] for each in _demands_of(demand.package))]


def _demands_of(package: str) -> list[Demand]:
    """Returns the requirements of a package; none if it is not installed."""
    try:
        wanted = [Requirement(each) for each in metadata.requires(package) or ()]
    except metadata.PackageNotFoundError:
        return []
    here = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return [Demand(package, each.name, str(each.specifier)) for each in here]


@functools.cache
def versions() -> Mapping[str, str]:
    """Returns the version of Python, and of each package that `demands` names; "" where it is missing."""
    found = {"python": platform.python_version()}
    for package in {demand.package for demand in demands()} - {"python"}:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = ""
    return found


# --- network ---------------------------------------------------------------------------------------------------------


def _address_of(interface: str) -> str:
    """Returns the IPv4 address of an interface; "" if it has none, or this is not Linux."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            found = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])


def gloo_s_interfaces() -> list[str]:
    """Returns the interfaces in GLOO_SOCKET_IFNAME; none: Gloo chooses one."""
    return [name for name in os.environ.get(INTERFACE, "").split(",") if name]


def _gloo_s_address(interfaces: Mapping[str, str]) -> str:
    """Returns the address at which Gloo listens; "" if the interface in GLOO_SOCKET_IFNAME is missing."""
    if named := gloo_s_interfaces():
        return interfaces.get(named[0], "")
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as listening:
            try:
                listening.bind(address)
            except OSError:
                continue
            return str(address[0])
    return "127.0.0.1"


# --- folders ---------------------------------------------------------------------------------------------------------


def _is_writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def _room_in(folder: Path) -> tuple[int, int]:
    """Returns the bytes of a folder's file system, and its free bytes; 0 if it cannot be written."""
    try:
        room = shutil.disk_usage(folder)
    except OSError:
        return 0, 0
    return (room.total, room.free) if _is_writable(folder) else (0, 0)


def _state_of(folder: Path) -> str:
    """Returns "absent" or "usable" for a folder of data sets; else why it is not usable."""
    if not folder.exists():
        return "absent"
    if not folder.is_dir():
        return os.strerror(errno.ENOTDIR)
    return "usable" if os.access(folder, os.R_OK | os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
