"""Starts a file of docs/engines.md as its engine would: a script here, on two hosts of a bed, in a cluster, or as pods.

Each of these is a context in which some commands run side by side; what it has started ends with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts" / "netbed"))
from hosts import Bed, BedError, Layout, descendants, end  # noqa: E402, F401 (engines.py takes two of them from here)

SLURM = ROOT / ".engines" / "slurm"
SLURM_PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins"),
    *("munge", "libmunge2", "libhwloc15", "liblua5.1-0"),
)
MUNGE_FILES = {"key-file": "key", "socket": "munge.socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


class NotRun(Exception):
    """Says why an engine cannot run here."""


class Command(NamedTuple):
    """Words of a command line, and the variables that it gets besides the engine's; it is repeated until it succeeds.

    Attributes:
        most: how often it is started at most.
    """

    words: list[str]
    variables: dict[str, str]
    most: int = 1


@contextlib.contextmanager
def here(file: Path) -> Iterator[list[Command]]:
    """Runs a file as a user does in a terminal."""
    yield [Command(["python" if file.suffix == ".py" else "bash", str(file)], {})]


@contextlib.contextmanager
def on_two_hosts(file: Path) -> Iterator[list[Command]]:
    """Runs a file on each of two network namespaces (scripts/netbed)."""
    if os.geteuid():
        raise NotRun("two hosts on one machine are network namespaces, which need root")
    bed = Bed(f"engines{os.getpid() % 100_000}")
    try:
        bed.up(Layout(2, 0.0), None)
        yield [
            Command(bed.inside(host, ["bash", str(file)]), {"HEAD": bed.address(0), "GLOO_SOCKET_IFNAME": "eth0"})
            for host in range(2)
        ]
    except BedError as error:
        raise NotRun(str(error)) from error
    finally:
        bed.down()


# --- Kubernetes: the variables that its operators give each pod -------------------------------------------------------


@contextlib.contextmanager
def as_pods(file: Path) -> Iterator[list[Command]]:
    """Runs the command of a manifest once for each of its pods. A pod that fails is started again."""
    import yaml

    manifest = yaml.safe_load(file.read_text())
    spec, port = manifest["spec"], str(free_port())
    pods = []
    if manifest["kind"] == "PyTorchJob":
        replicas = spec["pytorchReplicaSpecs"].values()
        containers = [each["template"]["spec"]["containers"][0] for each in replicas for _ in range(each["replicas"])]
        for rank, container in enumerate(containers):
            own = {each["name"]: each["value"] for each in container.get("env", [])}
            ranks = {"RANK": str(rank), "WORLD_SIZE": str(len(containers))}
            elastic = {"PET_NNODES": str(len(containers)), "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": "auto"}
            meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONUNBUFFERED": "1"}
            pods.append(Command(container["command"], {**own, **ranks, **elastic, **meet}, most=4))
    else:
        trainer = spec["trainer"]
        own = {each["name"]: each["value"] for each in trainer.get("env", [])}
        size = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
        meet = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
        for node in range(trainer["numNodes"]):
            pods.append(Command(trainer["command"], {**own, **size, **meet, "PET_NODE_RANK": str(node)}, most=4))
    yield pods


# --- Slurm: a cluster of this host alone ------------------------------------------------------------------------------


def install_slurm() -> None:
    """Unpacks Debian's packages into .engines/slurm, where nothing else of the host sees them."""
    if (SLURM / "usr" / "bin" / "sbatch").exists():
        return
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise NotRun("Slurm is taken from Debian's packages, and there is no apt-get here")
    SLURM.mkdir(parents=True, exist_ok=True)
    fetched = subprocess.run(["apt-get", "download", *SLURM_PACKAGES], cwd=SLURM, capture_output=True, text=True)
    if fetched.returncode:
        raise NotRun(f"apt-get has no Slurm for this host: {fetched.stderr.strip().splitlines()[-1]}")
    for package in SLURM.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, SLURM], check=True)


@contextlib.contextmanager
def in_slurm(file: Path) -> Iterator[list[Command]]:
    """Submits a file to a cluster of this host alone, and waits for it: sbatch --wait FILE, or python FILE."""
    install_slurm()
    folder = file.parent.parent / "slurm"
    folder.mkdir()
    libraries = SLURM / "usr" / "lib" / "x86_64-linux-gnu"
    host, ports = socket.gethostname().partition(".")[0], [free_port(), free_port()]
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    settings = f"""
        ClusterName=engines
        SlurmctldHost={host}(127.0.0.1)
        SlurmctldPort={ports[0]}
        SlurmUser={user}
        SlurmdUser={user}
        AuthType=auth/munge
        AuthInfo=socket={folder}/munge.socket,cred_expire=5
        CredType=cred/munge
        PluginDir={libraries}/slurm-wlm
        StateSaveLocation={folder}
        SlurmdSpoolDir={folder}/spool
        SlurmctldPidFile={folder}/slurmctld.pid
        SlurmdPidFile={folder}/slurmd.pid
        ProctrackType=proctrack/pgid
        TaskPlugin=task/none
        SelectType=select/cons_tres
        SelectTypeParameters=CR_CPU
        MpiDefault=none
        JobAcctGatherType=jobacct_gather/none
        AccountingStorageType=accounting_storage/none
        KillWait=5
        NodeName={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={max(2, os.cpu_count() or 1)} State=UNKNOWN
        PartitionName=all Nodes=ALL Default=YES State=UP
        """
    (folder / "slurm.conf").write_text("".join(f"{line.strip()}\n" for line in settings.splitlines()))
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    variables = {
        "LD_LIBRARY_PATH": f"{libraries}:{libraries}/slurm-wlm",
        "PATH": f"{SLURM}/usr/bin",
        "SLURM_CONF": f"{folder}/slurm.conf",
    }
    munge = [f"--{name}={folder / path}" for name, path in MUNGE_FILES.items()]
    servers = (
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld-wlm", "-D", "-c"],
        ["slurmd-wlm", "-D", "-d", str(SLURM / "usr" / "sbin" / "slurmstepd-wlm")],
    )
    with contextlib.ExitStack() as until_end, (folder / "servers.log").open("w") as log:
        for program, *words in servers:
            server = subprocess.Popen([str(SLURM / "usr" / "sbin" / program), *words], env={**os.environ, **variables},
                                      stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # fmt: skip
            until_end.callback(server.wait)
            until_end.callback(server.kill)
        until_up(folder, variables)
        words = ["sbatch", "--wait", str(file)] if file.suffix == ".sh" else ["python", str(file)]
        yield [Command(words, variables)]


def until_up(folder: Path, variables: dict[str, str], *, limit_s: float = 30.0) -> None:
    """Waits until the cluster's node is idle."""
    deadline_s, words = time.monotonic() + limit_s, [str(SLURM / "usr" / "bin" / "sinfo"), "--noheader", "--format=%T"]
    while time.monotonic() < deadline_s:
        asked = subprocess.run(words, env={**os.environ, **variables}, capture_output=True, text=True)
        if asked.stdout.strip() == "idle":
            return
        time.sleep(0.2)
    raise NotRun(f"no cluster of Slurm's has come up: {(folder / 'servers.log').read_text()[-300:]!r}")


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
