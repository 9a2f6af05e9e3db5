"""Gives a process its part among servers and workers that no launcher of this package has started (`cast.py::told`).

    DDP_ROLE        server 0 serves the store at MASTER_ADDR:MASTER_PORT, and says in it what the run is. Every other
                    process comes when it likes, and has the number of its arrival as its index
    DDP_SERVERS     below a launcher: all ranks meet, and the last ones are servers
    TF_CONFIG       the same, and the tasks of the job ps are servers

Server 0 is the one server; of several, the first that can serve at that address. The store ends with it, and so does
the run: who is left ends, too, and servers that are started again meet new workers there.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from torch import distributed
from torch.distributed import DistError

from ddp.comm.meeting.cast import ROLE, SERVERS, Cast, Job, Told, cast, numbered, take_part, told
from ddp.comm.meeting.place import Place, described_servers, number_of, place, refuse_no_worker
from ddp.comm.meeting.private_store import part_of
from ddp.comm.meeting.rendezvous import Opened, answered, open_store, rendezvous
from ddp.comm.meeting.secret import VARIABLE, secret
from ddp.errors import ConfigError, PeerLost, first_line
from ddp.units import counted

NUM_WORKERS = 2  # as of `ddp.launch`


def my_part(*, warn_s: float, abort_s: float) -> Cast | None:
    """Returns the part of this process; joins the others first, if it is told one and has not. None for a rank.

    Raises:
        ConfigError: what it is told cannot be.
        PeerLost: the others have not come within `abort_s`.
    """
    if (mine := cast()) is None and (me := Told(None, number) if (number := described_servers()) else told()):
        if me.job is None:
            mine = _by_rank(me, warn_s=warn_s, abort_s=abort_s)
        else:
            mine, run = arrive(me, dict, warn_s=warn_s, abort_s=abort_s)
            if "config" in run:
                raise ConfigError(f"{ROLE}={me.job}: server 0 is a \"train\" command; start this process as one, too")
        take_part(mine)
    return mine


def arrive(
    me: Told, prepare: Callable[[], dict[str, Any]], *, warn_s: float, abort_s: float
) -> tuple[Cast, dict[str, Any]]:
    """Returns the part of this process, and what server 0 says of the run.

    Args:
        prepare: returns that on server 0, as JSON can hold it, with the number of `workers`, if it knows better.

    Raises:
        ConfigError: the store cannot be served there, or there are as many servers already.
        PeerLost: server 0 is not there, or has gone.
    """
    opened = _opened(me, warn_s=warn_s, abort_s=abort_s)
    assert me.job is not None
    job: Job = me.job
    home, index = part_of(opened.store, "by arrival"), 0
    if opened.server is not None:
        run = {"servers": me.num_servers or 1, "workers": me.num_workers or NUM_WORKERS} | prepare()
        home.set("run", json.dumps(run))
    else:
        try:
            index = answered(partial(home.add, job, 1), within_s=abort_s) - (job == "worker")
            answered(partial(home.wait, ["run"], timedelta(seconds=abort_s)), within_s=abort_s)
            run = json.loads(home.get("run"))
        except DistError as error:
            same = f", has another {VARIABLE}" if secret() else ""
            reason = (
                f"server 0 at {me.address}:{me.port} has gone{same}, or does not say what the run is "
                f"({first_line(error)}): see what it prints, start it again, and then this process"
            )
            raise PeerLost(0, "unknown", 0, 0, "start-up", reason) from error
    servers = run["servers"]
    if me.num_servers not in (None, servers):
        raise ConfigError(f"{SERVERS}={me.num_servers} (cluster.servers): server 0 says {servers}; give all the same")
    if job == "server" and index >= servers:
        is_one = servers == 1
        raise ConfigError(
            f"{ROLE}=server (cluster.role): {'one' if is_one else servers} {'is' if is_one else 'are'} there already; "
            f"start a worker, or all again with {counted(index + 1, 'server')}"
        )
    return Cast(job, index, run["workers"], servers, part_of(home, "cast"), served=opened.server), run


def _opened(me: Told, *, warn_s: float, abort_s: float) -> Opened:
    """Returns the store, served by this process if it is server 0."""
    only = me.num_servers in (None, 1)
    keeper = Place("ddp", 0, 2, address=me.address, port=me.port, part=str(me.job))
    if me.job == "server" and (only or is_here(me.address)):
        try:
            return open_store(keeper, warn_s=warn_s, abort_s=abort_s)
        except ConfigError:
            if only:
                raise
    return open_store(keeper._replace(rank=1), warn_s=warn_s, abort_s=abort_s)


def is_here(address: str) -> bool:
    """Returns True for an address of this host."""
    with suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as tried:
                tried.bind(where)
                return True
    return False


def is_on_loopback(address: str) -> bool:
    """Returns True for an address that only processes of the same host reach."""
    return address == "localhost" or address.startswith("127.0.0.") or address == "::1"


def _by_rank(me: Told, *, warn_s: float, abort_s: float) -> Cast:
    """Returns the part of a rank of a launcher's, whose last ranks are servers. Collective."""
    if distributed.is_initialized():
        raise ConfigError(
            f"{SERVERS}={me.num_servers}: torch.distributed has begun, in which servers and workers are ranks alike; "
            "let ddp.fit begin it"
        )
    here, servers = place() or Place("", 0, 1), me.num_servers or 0
    if here.world_size == 1:
        raise ConfigError(
            f"{SERVERS}={servers}: no launcher has started other processes beside this one; take one, or start each "
            f"with {ROLE}=server or {ROLE}=worker"
        )
    refuse_no_worker(SERVERS, servers, here.world_size)
    opened = open_store(here, warn_s=warn_s, abort_s=abort_s)
    attempt = part_of(opened.store, "servers and workers")
    attempt = rendezvous(attempt, here.rank, here.world_size, warn_s=warn_s, abort_s=abort_s, tasks=here.tasks)
    workers, store = here.world_size - servers, part_of(attempt, "cast")
    return numbered(number_of(here, servers), workers=workers, servers=servers, store=store, served=opened.server)
