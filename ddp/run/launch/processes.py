"""Starts the processes of a launch on this host, and returns how they ended.

    run_workers     all of a launch: ranks, perhaps elastic ones, or servers and workers
    help_workers    one, in an elastic launch that another host's launcher has begun

The supervisor of each kind says what follows from the end of a process: `supervisor.py`, `elastic.py`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ddp.comm.meeting import membership
from ddp.comm.meeting.membership import Elastic, Hosts, rank_variables
from ddp.comm.meeting.place import is_on_loopback
from ddp.comm.meeting.role import STORE, Role
from ddp.comm.meeting.secret import holding_memory, private_folder, secret
from ddp.process.memory import available_cores
from ddp.run.launch.elastic import ElasticSupervisor, HelpingSupervisor
from ddp.run.launch.supervisor import (
    ADDRESS,
    SETTINGS,
    Ended,
    Events,
    Supervisor,
    assignments,
    paused_together,
    signals_to,
    worker_command,
)

NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def run_workers(
    arguments: Sequence[str],
    *,
    workers: int,
    threads: int | None,
    logs: Path,
    servers: int = 0,
    restarts: int = 0,
    settings: str = "",
    elastic: Elastic | None = None,
    hosts: Hosts | None = None,
) -> Ended:
    """Runs `ddp.run.launch.worker` in `servers` + `workers` processes, and waits.

    Args:
        threads: of a process; None: cores ÷ processes, at least 1.
        logs: the folder of their reports.
        servers: 0: the workers are ranks.
        restarts: most restarts of a worker, if there are servers or the launch is elastic; and of all servers.
        settings: of the run, as YAML, which the processes read in the private folder; "": it is no run, but a call.
        elastic: how far the ranks may shrink and grow; None: all fail with one.
        hosts: where processes of other hosts may join, if it is elastic; None: nowhere.

    Returns:
        How they ended, by number: first the servers, then the workers (`failures.Seat`).
    """
    from ddp.comm.meeting.private_store import Folder

    threads = threads or max(1, available_cores() // (workers + servers))
    events: Events = SimpleQueue()
    value = b"" if hosts is None else secret()
    signals, pauses = signals_to(events.put), paused_together(tell=events.put)
    with private_folder(value) as private, holding_memory(private), signals, pauses:
        (private / SETTINGS).write_text(settings)
        counts = ["--servers", str(servers), "--workers", str(workers)]
        command = _worker_command(private, [*arguments, *counts], threads=threads, hosts=hosts)
        store, commands, served = Folder(private / STORE), [command] * (servers + workers), None
        if not servers:
            served = hosts or _store_of_torch()  # as long as this is kept
            common = [*_meeting(ADDRESS if hosts is None else hosts.address, served.port), *command]
            places = [rank_variables(rank, workers, on_one_host=hosts is None) for rank in range(workers)]
            commands = [[*assignments(each), *common] for each in places]
        roles = [Role("server", index, workers, servers, store) for index in range(servers)]
        roles += [Role("worker", index, workers, servers, store) for index in range(workers)]
        how: dict[str, Any] = {"restarts": restarts, "logs": logs}
        supervisor = Supervisor(commands, roles, events, **how)
        if elastic is not None and served is not None:
            how |= {"elastic": elastic, "store": Folder(private / membership.STORE) if hosts is None else hosts.store}
            again, commands = [*common, "--elastic"], [[*each, "--elastic"] for each in commands]
            supervisor = ElasticSupervisor(commands, roles, events, again=again, **how)
        with contextlib.closing(supervisor):
            return supervisor.run()


def help_workers(arguments: Sequence[str], *, threads: int, hosts: Hosts, settings: str = "", **how: Any) -> Ended:
    """Runs one process of an elastic launch that another host's launcher has begun, and waits.

    Args:
        hosts: where it joins.
        settings: as of `run_workers`.
        how: further arguments of `HelpingSupervisor`.
    """
    events: Events = SimpleQueue()
    with private_folder(secret()) as private, signals_to(events.put), paused_together(tell=events.put):
        (private / SETTINGS).write_text(settings)
        command = _worker_command(private, [*arguments, "--elastic"], threads=threads, hosts=hosts)
        supervisor = HelpingSupervisor([*_meeting(hosts.address, hosts.port), *command], events, hosts.store, **how)
        with contextlib.closing(supervisor):
            return supervisor.run()


def _worker_command(private: Path, words: Sequence[str], *, threads: int, hosts: Hosts | None) -> list[str]:
    launch = ["--parent", str(os.getpid()), "--private", str(private)]
    is_apart = hosts is None or is_on_loopback(hosts.address)
    where = [] if hosts is None else ["--hosts", hosts.address, str(hosts.port)]
    return worker_command("ddp.run.launch.worker", [*launch, *words, *where], threads=threads, is_apart=is_apart)


def _store_of_torch() -> Any:
    """Returns a store that this process serves, for a worker's program that begins torch.distributed itself.

    `ddp.init` does not use it, because every user of this host reaches it.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listening = socket.create_server((ADDRESS, 0))  # because TCPStore itself listens on all addresses
    port = listening.getsockname()[1]
    return TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _meeting(address: str, port: int) -> list[str]:
    """Returns the part of a rank's environment that is the same for all."""
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    restarts = {f"TORCHELASTIC_{name}": 0 for name in ("RESTART_COUNT", "MAX_RESTARTS")}
    torchs = {"TORCHELASTIC_RUN_ID": "ddp", **restarts, NCCL_ERRORS: os.environ.get(NCCL_ERRORS, 1)}
    return assignments({**meeting, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, **torchs})
