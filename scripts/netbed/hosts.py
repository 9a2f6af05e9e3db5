#!/usr/bin/env python3
"""Makes several hosts on one Linux machine, for jobs that are meant for many.

Each host is a network namespace with its own address, host name, /dev/shm and boot id. All hosts hang on one bridge,
which has a namespace of its own (the hub), so no device, address or route is added to the machine's own network, and
no packet can leave the bed.

    h0 eth0 ───── p0 ┐
    h1 eth0 ───── p1 ┤ bridge (hub)
    h2 eth0 ───── p2 ┘

A link is full duplex. Its rate is enforced with a tbf qdisc at both ends: on eth0 for what the host sends (the sender
is held back, nothing is dropped) and on the hub's port for what it receives (drop-tail, like a switch port). Without a
delay a link is a veth pair. With a delay it is a pair of TAP devices joined by a small process, the cable, that holds
each frame back; this needs no netem in the kernel, only /dev/net/tun.

    hosts.py up 2 --rate 100mbit --delay 1ms
    hosts.py run -k 2 train.py --epochs 1
    hosts.py run --up 2 --rate 1gbit train.py     makes the hosts first, and removes them afterwards
    hosts.py run --on 'step 20' 'cut 1; sleep 5; heal 1' --timeout 120 train.py
    hosts.py cut 1; hosts.py heal 1; hosts.py kill 0 1
    hosts.py rate 1gbit
    hosts.py down

Needs root, iproute2 and util-linux; Python 3.9 or newer, no packages.

Read next: scripts/netbed/README.md.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import fcntl
import ipaddress
import json
import os
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

STATE_ROOT = Path("/run/hosts-bed")
SHM_ROOT = Path("/dev/shm")
SUBNET = ipaddress.ip_network("10.77.0.0/24")
MTU = 1500
BUFFER = 512 * 1024  # bytes that a port may queue, or what a link carries in one round trip if that is more
BURST_SECONDS = 0.00025
GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL
PORT = 29500  # of torchrun's rendezvous
DEFAULT_WAITING = 4 << 20  # bytes that a connection may put into its host's queue: so many that it is no limit
UNLIMITED = "unlimited"
KILL_WORDS = ("agent", "all")
TIME_LIMIT_STATUS = 124
NUMBER = r"([0-9]{1,15}(?:\.[0-9]*)?)"  # of a quantity: neither negative nor more than any link or clock has
MOST_WORKERS = 64  # on each host


class BedError(Exception):
    """Says to the user what cannot be done, and why."""


# --- units ------------------------------------------------------------------


def parse_rate(text: str) -> int | None:
    """Returns bits per second, or None for an unlimited link."""
    if text == UNLIMITED:
        return None
    match = re.fullmatch(NUMBER + "([kmg]?)bit", text.lower())
    if not match or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: want e.g. 100mbit, 1gbit or {UNLIMITED}")
    return int(float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]])


def parse_delay(text: str) -> float:
    """Returns seconds."""
    match = re.fullmatch(NUMBER + "(us|ms|s)|0", text.lower())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}: want e.g. 500us, 2ms or 0")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]] if match[1] else 0.0


def parse_seconds(text: str) -> float:
    """Returns a number of seconds above 0."""
    if not re.fullmatch(NUMBER, text) or float(text) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: want seconds above 0")
    return float(text)


def parse_workers(text: str) -> int:
    """Returns a number of workers on one host."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"{text!r}: want 1 to {MOST_WORKERS}: all hosts share this machine's cores")
    return int(text)


def parse_name(text: str) -> str:
    """Returns the text if it can be part of the names of namespaces and files."""
    if not re.fullmatch(r"[a-z][a-z0-9]{0,15}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: want up to 16 lower-case letters and digits")
    return text


# --- system -----------------------------------------------------------------


def sh(*command: object, check: bool = True) -> str:
    """Runs a command and returns what it prints; its failure is a BedError with its own words."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError:
        raise BedError(f"{words[0]} is not installed: it comes with iproute2 or util-linux") from None
    if check and done.returncode:
        raise BedError(f"{shlex.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def parents() -> dict[int, int]:
    """Returns the parent of every process that lives (is no zombie), by pid."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # it has ended
        state, parent = stat.rpartition(")")[2].split()[:2]
        if state != "Z":
            found[int(entry.name)] = int(parent)
    return found


def descendants(root: int) -> set[int]:
    """Returns the processes started by `root`, by those that it started, and so on."""
    table = parents()
    found: set[int] = set()
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in table.items() if parent in frontier} - found
        found |= frontier
    return found


def environment(pid: int) -> dict[str, str]:
    """Returns the variables that a process was started with; none if it is gone."""
    try:
        pairs = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(pair.decode(errors="replace").split("=", 1) for pair in pairs if b"=" in pair)


def send(pid: int, number: signal.Signals) -> None:
    """Signals a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end(list_pids: Callable[[], set[int]]) -> None:
    """Ends the processes that `list_pids` names, now and meanwhile: asks them, and after a while kills them."""
    for number, patience in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + patience
        signalled: set[int] = set()
        while pids := list_pids():
            for pid in pids - signalled:
                send(pid, number)
            signalled |= pids
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)


# --- the bed ----------------------------------------------------------------


class Layout(NamedTuple):
    """Holds what a bed was made with, except the rate, which can change; `delay`: seconds from host to host."""

    count: int
    delay: float


class Bed:
    """Knows the hosts of one name, up or not; all of its knowledge is in the kernel and in `dir`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dir = STATE_ROOT / name
        self.state_file = self.dir / "state.json"
        self.hub = f"{name}-hub"
        self._layout = Layout(*json.loads(self.state_file.read_text())) if self.state_file.exists() else None

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            raise BedError(f"bed {self.name!r} is not up")
        return self._layout

    @property
    def count(self) -> int:
        return self.layout.count

    def check(self, host: int) -> None:
        """Refuses a host that is not there."""
        if not 0 <= host < self.count:
            raise BedError(f"no host {host}: there are {self.count}, from 0")

    def namespace(self, host: int) -> str:
        return f"{self.name}-h{host}"

    def shm(self, host: int) -> Path:
        """Returns the folder that the host sees as /dev/shm."""
        return SHM_ROOT / self.namespace(host)

    def address(self, host: int) -> str:
        return str(SUBNET[host + 1])

    def namespaces(self) -> list[str]:
        """Returns those of this bed that exist, whether or not there is a state file."""
        pattern = re.compile(rf"{self.name}-(hub|h\d+)")
        names = (line.split()[0] for line in sh("ip", "netns", "list").splitlines() if line)
        return [name for name in names if pattern.fullmatch(name)]

    def pids(self, namespace: str) -> set[int]:
        return {int(pid) for pid in sh("ip", "netns", "pids", namespace, check=False).split()}

    def inside(self, host: int, command: Iterable[str]) -> list[str]:
        """Returns the command line that runs `command` on the host."""
        setup = (
            'hostname "$1" && mount --bind "$2/hosts" /etc/hosts && mount --bind "$3" /dev/shm'
            ' && mount --bind "$2/$1.boot_id" /proc/sys/kernel/random/boot_id'
            ' && shift 3 && exec "$@"'
        )
        name = self.namespace(host)
        arguments = ["sh", name, str(self.dir), str(self.shm(host))]
        return ["ip", "netns", "exec", name, "unshare", "--uts", "--ipc", "sh", "-c", setup, *arguments, *command]

    # up and down

    def up(self, layout: Layout, rate: int | None) -> None:
        """Makes the hosts, in place of those there were; nothing is left of them if that fails."""
        self.down()
        if not 1 <= layout.count <= 250:
            raise BedError(f"cannot make {layout.count} hosts: want 1 to 250")
        self.dir.mkdir(parents=True)
        self._layout = layout
        self.state_file.write_text(json.dumps(layout))
        try:
            self.make(rate)
        except BaseException:
            self.down()
            raise

    def make(self, rate: int | None) -> None:
        """Makes the namespaces, then the bridge, then a link for each host."""
        names = [self.namespace(host) for host in range(self.count)]
        for name in (self.hub, *names):
            sh("ip", "netns", "add", name)
            conf = "/proc/sys/net/ipv6/conf"
            no_ipv6 = f"echo 1 >{conf}/all/disable_ipv6; echo 1 >{conf}/default/disable_ipv6"
            sh("ip", "netns", "exec", name, "sh", "-c", no_ipv6)
            self.set_tcp(name, "congestion_control", "reno")  # with BBR some transfers take a fifth longer
            sh("ip", "-n", name, "link", "set", "lo", "up")
        hosts_file = ["127.0.0.1 localhost"]
        for host, name in enumerate(names):
            address = self.address(host)
            hosts_file += [f"{address} {name}", f"::ffff:{address} {name}"]
        (self.dir / "hosts").write_text("\n".join(hosts_file) + "\n")

        bridge = ("type", "bridge", "stp_state", 0, "forward_delay", 0, "mcast_snooping", 0)
        sh("ip", "-n", self.hub, "link", "add", "br0", "mtu", MTU, *bridge)
        sh("ip", "-n", self.hub, "link", "set", "br0", "up")
        self.make_links()
        for host, name in enumerate(names):
            (self.dir / f"{name}.boot_id").write_text(f"{uuid.uuid4()}\n")
            self.shm(host).mkdir(mode=0o1777)
            self.shm(host).chmod(0o1777)
            sh("ip", "-n", name, "addr", "add", f"{self.address(host)}/{SUBNET.prefixlen}", "dev", "eth0")
            sh("ip", "-n", name, "link", "set", "eth0", "mtu", MTU, "up")
            sh("ip", "-n", self.hub, "link", "set", f"p{host}", "mtu", MTU, "master", "br0", "up")
            self.set_rate(host, rate)

    def make_links(self) -> None:
        """Makes the two ends e<i> and p<i> of every link; e<i> goes to its host as eth0."""
        if self.layout.delay:
            self.start_cable()
        for host in range(self.count):
            if not self.layout.delay:
                sh("ip", "-n", self.hub, "link", "add", f"e{host}", "type", "veth", "peer", "name", f"p{host}")
            sh("ip", "-n", self.hub, "link", "set", f"e{host}", "netns", self.namespace(host), "name", "eth0")

    def start_cable(self) -> None:
        """Leaves the cable running in the hub's namespace; `down` ends it with the rest."""
        this = [sys.executable, str(Path(__file__).resolve())]
        command = ["ip", "netns", "exec", self.hub, *this, "cable", str(self.count), str(self.layout.delay / 2)]
        log_file = self.dir / "cable.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        assert process.stdout is not None
        with process.stdout as ready:
            if ready.readline() != b"ready\n":
                raise BedError("no cable: " + log_file.read_text().strip())

    def down(self) -> None:
        """Ends every process on the hosts and removes all there is of the bed, and of half a bed."""
        names = self.namespaces()
        me = {os.getpid()}
        end(lambda: {pid for name in names for pid in self.pids(name)} - me)
        for name in names:
            sh("ip", "netns", "del", name)
        for path in SHM_ROOT.glob(f"{self.name}-h*"):
            if re.fullmatch(rf"{self.name}-h\d+", path.name):
                shutil.rmtree(path)
        if self.dir.exists():
            shutil.rmtree(self.dir)
        self._layout = None

    # links

    def set_tcp(self, namespace: str, setting: str, value: object) -> None:
        """Changes one of TCP's settings for the connections of a namespace."""
        sh("ip", "netns", "exec", namespace, "sh", "-c", f'echo "$0" >/proc/sys/net/ipv4/tcp_{setting}', value)

    def set_rate(self, host: int, rate: int | None) -> None:
        """Shapes both directions of a host's link.

        The burst, what may leave at once after a pause, is a quarter of a millisecond's worth but at least three
        packets, so that small messages pay for the link too. TCP is told to build chunks of half of it, or of two
        packets: tbf would cut up larger ones, and a chunk as large as the burst leaves only when that is whole again,
        so that the link would idle for as long as a timer is late (0.88 of 1 Gbit/s instead of 0.95). And each
        connection may put a quarter of the buffer into its host's own queue at a time: four of them can send as much
        as they like, and nothing is dropped there.
        """
        burst = 65536 if rate is None else int(rate / 8 * BURST_SECONDS)
        burst = min(max(burst, 2 * MTU), 65536)
        chunk = burst if rate is None else max(burst // 2, 2 * MTU)
        buffer = BUFFER if rate is None else max(BUFFER, int(rate / 8 * 2 * self.layout.delay))
        waiting = DEFAULT_WAITING if rate is None else max(buffer // 4, 2 * chunk)
        self.set_tcp(self.namespace(host), "limit_output_bytes", waiting)
        for namespace, device in ((self.namespace(host), "eth0"), (self.hub, f"p{host}")):
            sh("ip", "-n", namespace, "link", "set", device, "gso_max_size", chunk)
            if rate is None:
                sh("tc", "-n", namespace, "qdisc", "del", "dev", device, "root", check=False)
            else:
                shape = ("rate", f"{rate}bit", "burst", burst + MTU, "limit", buffer)
                sh("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *shape)

    def cut(self, host: int, *, silent: bool = False) -> None:
        """Pulls the host's cable; silent: it sees no loss of carrier."""
        self.check(host)
        if silent:
            sh("ip", "-n", self.hub, "link", "set", f"p{host}", "nomaster")
        else:
            sh("ip", "-n", self.hub, "link", "set", f"p{host}", "down")
            if self.layout.delay:
                sh("ip", "-n", self.namespace(host), "link", "set", "eth0", "carrier", "off")

    def heal(self, host: int) -> None:
        """Puts the host's cable back."""
        self.check(host)
        sh("ip", "-n", self.hub, "link", "set", f"p{host}", "master", "br0", "up")
        if self.layout.delay:
            sh("ip", "-n", self.namespace(host), "link", "set", "eth0", "carrier", "on")

    # processes

    def workers(self, host: int) -> dict[int, int]:
        """Returns the pid of each local rank that torchrun has started; not of what the ranks have started."""
        ranks = {pid: environment(pid).get("LOCAL_RANK") for pid in self.pids(self.namespace(host))}
        table = parents()
        return {int(rank): pid for pid, rank in ranks.items() if rank and ranks.get(table.get(pid, 0)) is None}

    def kill(self, host: int, target: str) -> list[int]:
        """SIGKILLs a local rank, the agent (torchrun) or all; returns the pids."""
        self.check(host)
        workers = self.workers(host)
        if target == "all":
            victims = self.pids(self.namespace(host))
        elif target == "agent":
            table = parents()
            victims = {table[pid] for pid in workers.values() if pid in table}
            victims &= self.pids(self.namespace(host))
        else:
            victims = {workers[int(target)]} if int(target) in workers else set()
        if not victims:
            raise BedError(f"host {host} runs no {target if target in KILL_WORDS else 'rank ' + target}")
        for pid in victims:
            send(pid, signal.SIGKILL)
        return sorted(victims)

    def status(self) -> None:
        """Prints a line for the bed and one for each host."""
        print(f"bed {self.name}: {self.count} hosts, one-way delay {self.layout.delay * 1e3:g} ms")
        for host in range(self.count):
            name, port = self.namespace(host), f"p{host}"
            link = sh("ip", "-n", self.hub, "link", "show", port)
            joined = "up" if "master br0" in link and "state DOWN" not in link else "cut"
            shaped = re.search(r" rate (\w+)", sh("tc", "-n", self.hub, "qdisc", "show", "dev", port))
            rate = shaped[1] if shaped else UNLIMITED
            workers = ", ".join(f"rank {rank}: pid {pid}" for rank, pid in sorted(self.workers(host).items()))
            processes = f"{len(self.pids(name))} processes{f' ({workers})' if workers else ''}"
            print(f"  {host} {name} {self.address(host)} {rate} {joined} {processes}")


# --- the delaying cable -----------------------------------------------------


def open_tap(name: str) -> int:
    """Makes a TAP device; reading the file gives what its owner sends, with whole TCP segments instead of packets."""
    tun_set_iff, tun_set_offload = 0x400454CA, 0x400454D0
    tap, no_packet_info, virtio_header = 0x0002, 0x1000, 0x4000
    checksum, tso4 = 1, 2
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = tap | no_packet_info | virtio_header
    fcntl.ioctl(fd, tun_set_iff, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(fd, tun_set_offload, checksum | tso4)
    return fd


CABLE_BATCH, CABLE_FRAME_BYTES, CABLE_QUEUE = 32, 65536 + 64, 20000


def cable(count: int, delay: float) -> int:
    """Joins TAP e<i> to TAP p<i>, both ways, `delay` seconds each; never returns."""
    peer: dict[int, int] = {}
    for host in range(count):
        near, far = open_tap(f"e{host}"), open_tap(f"p{host}")
        peer[near], peer[far] = far, near
    print("ready", flush=True)
    sys.stdout.close()

    fds = list(peer)
    queue: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        timeout = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        readable = select.select(fds, (), (), timeout)[0]
        due = time.monotonic() + delay
        for fd in readable:
            with contextlib.suppress(OSError):  # nothing left to read, or the device is down
                for _ in range(CABLE_BATCH):
                    frame = os.read(fd, CABLE_FRAME_BYTES)
                    if len(queue) < CABLE_QUEUE:
                        queue.append((due, peer[fd], frame))
        now = time.monotonic()
        while queue and queue[0][0] <= now:
            _, fd, frame = queue.popleft()
            with contextlib.suppress(OSError):  # the device is down: the frame is lost
                os.write(fd, frame)


# --- run --------------------------------------------------------------------


def adopt_orphans() -> None:
    """Makes this process the parent of what its children leave behind, so that all it started are its descendants."""
    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Runner:
    """Runs torchrun on every host: starts it, passes its lines on, injects faults, and ends all that was started."""

    def __init__(self, bed: Bed, args: argparse.Namespace, faults: Sequence[tuple[str, str]]) -> None:
        self.bed = bed
        self.args = args
        self.start = time.monotonic()
        self.lock = threading.Lock()
        self.triggers = list(faults)  # the text to wait for, and the fault
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def say(self, who: str, text: str) -> None:
        with self.lock:
            print(f"[{who} {time.monotonic() - self.start:7.2f}] {text}", flush=True)

    def command(self, host: int) -> list[str]:
        """Returns torchrun's command line for a host; host 0 is the master."""
        line = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(self.bed.count)]
        line += ["--nproc-per-node", str(self.args.nproc_per_node), "--rdzv-id", self.bed.name]
        line += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.bed.address(0)}:{PORT}"]
        line += ["--local-addr", self.bed.address(host), "--rdzv-conf", f"is_host={int(host == 0)}"]
        return [*line, *(["-m"] if self.args.module else []), self.args.script, *self.args.args]

    def environment(self) -> dict[str, str]:
        extra = {f"{library}_SOCKET_IFNAME": "eth0" for library in ("GLOO", "NCCL", "TP")}
        extra["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        extra["PYTHONUNBUFFERED"] = "1"
        extra.update(pair.split("=", 1) for pair in self.args.env)
        return {**os.environ, **extra}

    def inject(self, text: str) -> None:
        for part in text.split(";"):
            self.say("bed", part.strip())
            try:
                inject(self.bed, shlex.split(part))
            except BedError as error:
                self.say("bed", f"failed: {error}")

    def pump(self, host: int) -> None:
        """Passes a host's output on, line by line, and fires the faults that wait for a line."""
        output = self.processes[host].stdout
        assert output is not None
        for line in output:
            text = line.decode(errors="replace").rstrip("\n")
            self.say(f"h{host}", text)
            with self.lock:
                fired = [trigger for trigger in self.triggers if trigger[0] in text]
                self.triggers = [trigger for trigger in self.triggers if trigger not in fired]
            for _, fault in fired:
                threading.Thread(target=self.inject, args=(fault,), daemon=True).start()

    def wait(self) -> dict[int, int | None]:
        """Returns exit codes by host; None for those still alive at the time limit."""
        codes: dict[int, int | None] = dict.fromkeys(self.processes)
        while any(code is None for code in codes.values()):
            passed = time.monotonic() - self.start
            if self.args.timeout and passed > self.args.timeout:
                self.say("bed", f"time limit of {self.args.timeout:g} s")
                break
            time.sleep(0.05)
            for host, process in self.processes.items():
                if codes[host] is None and process.poll() is not None:
                    codes[host] = process.returncode
                    self.say(f"h{host}", f"exit {process.returncode}")
        return codes

    def run(self) -> int:
        """Returns the exit status: 0, 1 if a host failed, 124 at the time limit."""
        adopt_orphans()
        env = self.environment()
        pumps: list[threading.Thread] = []
        try:
            for host in range(self.bed.count):
                command = self.bed.inside(host, self.command(host))
                self.processes[host] = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
                pumps.append(threading.Thread(target=self.pump, args=(host,), daemon=True))
                pumps[-1].start()
            codes = self.wait()
        finally:
            me = os.getpid()
            end(lambda: descendants(me))
            for thread in pumps:
                thread.join(1.0)
        if any(code is None for code in codes.values()):
            return TIME_LIMIT_STATUS
        return 1 if any(codes.values()) else 0


# --- command line -----------------------------------------------------------


def host_number(text: str) -> int:
    if not re.fullmatch(r"h?[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: want a host number")
    return int(text.lstrip("h"))


def kill_target(text: str) -> str:
    if not (text.isdigit() or text in KILL_WORDS):
        raise argparse.ArgumentTypeError(f"{text!r}: want a local rank, agent or all")
    return text


def inject(bed: Bed, words: Sequence[str]) -> None:
    """Does what the words of a fault say: 'cut 1', 'heal 1', 'kill 0 1', 'rate 1gbit 0', 'sleep 5'."""
    if words[:1] == ["sleep"]:
        time.sleep(float(words[1]))
    else:
        act(bed, parser().parse_args(words))


def fault_text(text: str) -> str:
    """Returns the text if it is a fault, so that a wrong one is refused when it is given, not when it fires."""
    for part in text.split(";"):
        words = shlex.split(part)
        if words[:1] == ["sleep"] and len(words) == 2 and re.fullmatch(NUMBER, words[1]):
            continue
        if words[:1] and words[0] in ("cut", "heal", "kill", "rate"):
            parser().parse_args(words)
        else:
            raise BedError(f"not a fault: {part!r}")
    return text


def parser() -> argparse.ArgumentParser:
    """Returns the parser of every verb and its options."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--name", type=parse_name, default="bed", help="several beds may be up at once")
    after = argparse.ArgumentParser(add_help=False)  # the same, after the verb
    after.add_argument("--name", type=parse_name, default=argparse.SUPPRESS, help="of the bed")
    verbs = top.add_subparsers(dest="verb", required=True)

    up = verbs.add_parser("up", parents=[after], help="make the hosts, in place of those there were")
    up.add_argument("count", type=int)

    verbs.add_parser("down", parents=[after], help="end every process on the hosts and remove them")
    verbs.add_parser("status", parents=[after])

    rate = verbs.add_parser("rate", parents=[after], help="change the rate of some links, or all")
    rate.add_argument("rate", type=parse_rate)
    rate.add_argument("hosts", type=host_number, nargs="*")

    cut = verbs.add_parser("cut", parents=[after], help="pull a host's cable")
    cut.add_argument("host", type=host_number)
    cut.add_argument("--silent", action="store_true", help="the host keeps its carrier; frames vanish")

    heal = verbs.add_parser("heal", parents=[after], help="put it back")
    heal.add_argument("host", type=host_number)

    kill = verbs.add_parser("kill", parents=[after], help="SIGKILL a worker, by its local rank")
    kill.add_argument("host", type=host_number)
    kill.add_argument("target", type=kill_target, metavar="rank|agent|all")

    execute = verbs.add_parser("exec", parents=[after], help="run a command on a host")
    execute.add_argument("host", type=host_number)
    execute.add_argument("command", nargs=argparse.REMAINDER)

    run = verbs.add_parser("run", parents=[after], help="torchrun on every host")
    run.add_argument(
        "-k", "--nproc-per-node", type=parse_workers, default=1, metavar="N", help="workers on each host (default: 1)"
    )
    run.add_argument("--up", type=int, dest="count", help="make so many hosts first, and remove them afterwards")
    run.add_argument("--env", action="append", default=[], metavar="KEY=VALUE", help="for the workers")
    run.add_argument("--timeout", type=parse_seconds, help="seconds; exit status 124 when it is reached")
    on = run.add_argument("--on", action="append", nargs=2, default=[])
    on.metavar, on.help = ("TEXT", "FAULT"), "when a line of output first holds TEXT, e.g. --on 'step 9' 'kill 1 0'"
    for verb in (up, run):
        verb.add_argument("--rate", type=parse_rate, default=None, help=f"e.g. 100mbit (default {UNLIMITED})")
        verb.add_argument("--delay", type=parse_delay, default=0.0, help="one way, host to host, e.g. 1ms")
    run.add_argument("-m", action="store_true", dest="module", help="the script is a module, as in python -m")
    run.add_argument("script")
    run.add_argument("args", nargs=argparse.REMAINDER)

    internal = verbs.add_parser("cable")
    internal.add_argument("count", type=int)
    internal.add_argument("delay", type=float)
    return top


def act(bed: Bed, args: argparse.Namespace) -> int:
    """Runs one verb; returns the exit status."""
    if args.verb == "up":
        bed.up(Layout(args.count, args.delay), args.rate)
    elif args.verb == "down":
        bed.down()
    elif args.verb == "status":
        bed.status()
    elif args.verb == "rate":
        for host in args.hosts or range(bed.count):
            bed.check(host)
            bed.set_rate(host, args.rate)
    elif args.verb == "cut":
        bed.cut(args.host, silent=args.silent)
    elif args.verb == "heal":
        bed.heal(args.host)
    elif args.verb == "kill":
        print("killed", *bed.kill(args.host, args.target), flush=True)
    elif args.verb == "exec":
        bed.check(args.host)
        return subprocess.run(bed.inside(args.host, args.command)).returncode
    elif args.verb == "run":
        runner = Runner(bed, args, [(text, fault_text(fault)) for text, fault in args.on])
        if args.count is None:
            return runner.run()
        try:
            bed.up(Layout(args.count, args.delay), args.rate)
            return runner.run()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):  # a second one would leave half a bed
                signal.signal(number, signal.SIG_IGN)
            bed.down()
    return 0


def main() -> int:
    """Runs the command line; returns the exit status."""
    args = parser().parse_args()
    if args.verb == "cable":
        return cable(args.count, args.delay)
    if os.geteuid():
        raise BedError("needs root")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return act(Bed(args.name), args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BedError as error:
        sys.exit(f"hosts.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
