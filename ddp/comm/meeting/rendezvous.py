"""The rendezvous: how ranks find each other, in a part of a store that belongs to one session of theirs alone.

Used by `session.py` before every session, and by `command_line.py` before every attempt under torchrun.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar

from torch.distributed import DistError, HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from ddp.comm.meeting.cast import cast
from ddp.comm.meeting.cluster_spec import Task
from ddp.comm.meeting.place import Place, launcher_serves
from ddp.comm.meeting.private_store import Folder, part_of, sealed
from ddp.comm.meeting.secret import VARIABLE, private_part, secret
from ddp.errors import ConfigError, PeerLost, first_line
from ddp.process.clock import Patience
from ddp.process.helper_thread import within
from ddp.process.log import log

Result = TypeVar("Result")

POLL_S = 0.05
SERVING_S = 30.0  # longest wait of rank 0 for the store that it serves itself
LET_GO_S = 2.0  # beyond a deadline of ours, for torch's client to keep its own
REACH_S = 5.0  # longest wait for a host that does not answer, before the next try


def answered(work: Callable[[], Result], *, within_s: float) -> Result:
    """Returns the result of `work`, which asks the store of the ranks.

    torch's client alone would wait for ever for a process that is stopped.

    Raises:
        PeerLost: there is no answer in time.
    """
    try:
        return within(within_s + LET_GO_S, work)
    except TimeoutError as error:
        late = error
    reason = f"the store that it keeps has not answered for {within_s:g} s: it was stopped, or its host is down"
    raise PeerLost(0, "unknown", 0, 0, "start-up", reason) from late


def rendezvous(
    store: Store, rank: int, world_size: int, *, warn_s: float, abort_s: float, tasks: Sequence[Task] = ()
) -> Store:
    """Returns a part of the store that belongs to this session of the ranks alone, once all of them have come.

    A store may outlive the processes that wrote to it: torchrun's serves one attempt after the other, and a process may
    begin a second session. A rank that read what an earlier session left there would connect to processes that are
    gone. So each rank draws a token, and a session is named by all of its ranks' tokens:

        here/RANK            the rank's token, drawn anew for each session
        roster               the tokens that rank 0 has found, as a list
        seen/NAME/RANK       the rank has found its own token in the roster of that name

    A rank that has gone does not answer a new roster, so all have come once all answers to one roster are there.

    Args:
        tasks: by rank, what the description of a cluster calls it; empty without one.

    Raises:
        PeerLost: a rank did not come within `abort_s`; connecting to it would wait in silence.
        ConfigError: two processes have come as this rank, and the other one has met the ranks, or will.
    """
    meet = partial(_meet, store, rank, world_size, warn_s=warn_s, abort_s=abort_s, tasks=tasks)
    return answered(meet, within_s=abort_s)


def _meet(
    store: Store, rank: int, world_size: int, *, warn_s: float, abort_s: float, tasks: Sequence[Task]
) -> Store:
    token, tokens = secrets.token_hex(8), [""] * world_size
    patience, has_warned, roster, pause_s = Patience(abort_s), False, "", 0.001
    everyone = range(world_size)
    try:
        store.set(f"here/{rank}", token)
        while True:
            if rank == 0:
                here = [other for other in everyone if store.check([f"here/{other}"])]
                tokens = [store.get(f"here/{other}").decode() if other in here else "" for other in everyone]
                if roster != json.dumps(tokens):
                    roster = json.dumps(tokens)
                    store.set("roster", roster)
            elif store.check(["roster"]):
                roster = store.get("roster").decode()
                tokens = json.loads(roster)
            name, seen = hashlib.sha256(roster.encode()).hexdigest()[:16], list[str]()
            if tokens[rank:][:1] == [token]:
                seen = [f"seen/{name}/{other}" for other in everyone]
                store.set(seen[rank], "")
                if store.check(seen):
                    return part_of(store, name)
            if store.get(f"here/{rank}").decode() != token:
                raise ConfigError(f"two processes have come as {_named([rank], tasks)}: start each once")
            left_s = patience.left_s()
            if not left_s or (abort_s - left_s > warn_s and not has_warned):
                missing = [other for other, key in enumerate(seen) if not store.check([key])] or [0]
                who, twice = _named(missing, tasks), ""
                if tokens[rank:][:1] not in ([], [""], [token]):  # of a session that goes on without this process
                    twice = f"; another process has come as {_named([rank], tasks)} before this one"
                if not left_s:
                    same = f", with the same {VARIABLE}" if secret() else ""
                    reason = f"of {world_size} ranks, {who} did not come within {abort_s:g} s{twice}. Was each started"
                    raise PeerLost(missing[0], "unknown", 0, 0, "start-up", f"{reason}{same}?")
                has_warned = True
                log.warning("start-up has waited %.0f s for rank(s) %s of %d%s", warn_s, who, world_size, twice)
            time.sleep(min(left_s, pause_s))
            pause_s = min(2 * pause_s, POLL_S)
    except DistError as error:
        reason = f"the store that it keeps is out of reach ({first_line(error)})"
        raise PeerLost(0, "unknown", 0, 0, "start-up", reason) from error


def _named(ranks: Sequence[int], tasks: Sequence[Task]) -> str:
    """Returns these ranks in words, as the tasks that they are where a cluster is described."""
    return ", ".join(f"{tasks[rank]} at {tasks[rank].address}" for rank in ranks if tasks) or str(list(ranks))


def on_this_host(here: Place, store: Store, *, within_s: float) -> tuple[int, int]:
    """Returns this rank's number among the ranks of its host, and how many these are. Collective, unless it is known.

    Args:
        store: of this session of the ranks alone, in which all have come.
    """

    def count() -> tuple[int, int]:
        store.set(f"host/{here.rank}", socket.gethostname())
        hosts = [store.get(f"host/{rank}") for rank in range(here.world_size)]
        return hosts[: here.rank].count(hosts[here.rank]), hosts.count(hosts[here.rank])

    return here.on_host or answered(count, within_s=within_s)


class Opened(NamedTuple):
    """A store of all ranks, for as long as this is kept."""

    store: Store
    server: Store | None = None  # apart from the store, which whatever is in flight after a failure may keep for long


def open_store(place: Place, *, warn_s: float, abort_s: float) -> Opened:
    """Returns the store of all ranks: in the private folder of a launch, or torchrun's agent's, or rank 0 serves it.

    If torch.distributed has begun, it has one. Servers have a part of the run's, which no earlier ones have used.

    Raises:
        ConfigError: rank 0 cannot serve it at this address, or the secret could be guessed.
        PeerLost: rank 0 cannot be reached.
    """
    if place.part and place.world_size > 1 and (mine := cast()) is not None:
        return Opened(part_of(mine.store, f"servers/{mine.incarnation}"), mine.served)
    if not place.address:
        return Opened(sealed(_get_default_store(), secret()) if place.world_size > 1 else HashStore())
    if (folder := private_part(place.port)) is not None:
        return Opened(Folder(folder))
    key, server = secret(), None
    if place.rank == 0 and not launcher_serves():
        server = _served(place, min(abort_s, SERVING_S))
    return Opened(sealed(_reached(place, warn_s=warn_s, abort_s=abort_s), key), server)


def _served(place: Place, timeout_s: float) -> Store:
    """Returns rank 0's store, which this process serves from now on. It waits for nobody."""
    choices = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    try:
        return TCPStore(place.address, place.port, timeout=timedelta(seconds=timeout_s), **choices)
    except DistError as error:
        where = f"MASTER_ADDR={place.address}, MASTER_PORT={place.port}"
        who, all_of_them, once = _keeper(place), "ranks", ""
        if place.tasks:
            where, once = f"{place.role} at {place.address}:{place.port}", f"start {place.role} once, and "
        elif place.part:
            all_of_them, once = "processes", "start one server, or say cluster.servers=2 (DDP_SERVERS), and "
        raise ConfigError(
            f"{where}: {who} cannot serve the store of the {all_of_them} there ({first_line(error)}); {once}give all "
            f"{all_of_them} an address of {who}'s host, and a port that is free there"
        ) from error


def _keeper(place: Place) -> str:
    """Returns who serves the store, in words: a server of a run with parameter servers, if this has a part in one."""
    return "server 0" if place.part else "rank 0"


def _reached(place: Place, *, warn_s: float, abort_s: float) -> Store:
    """Returns a client of the store that somebody else serves, once he does.

    A thread connects, because torch's client would wait for ever for a program of another kind at that port.
    """
    found: list[Store] = []
    failed: list[Exception] = []
    over = threading.Event()

    def connect() -> None:
        patience = Patience(abort_s)
        try:
            while True:
                try:
                    socket.create_connection((place.address, place.port), timeout=REACH_S).close()
                    break
                except OSError:
                    if over.is_set() or not patience.left_s():  # nobody would wait until torch's client has returned
                        raise
                time.sleep(POLL_S)
            left = timedelta(seconds=max(1.0, patience.left_s()))
            found.append(TCPStore(place.address, place.port, is_master=False, timeout=left))
        except Exception as error:  # of torch's store, or for a name that is none of a host
            failed.append(error)
        over.set()

    connecting = threading.Thread(target=connect, name="ddp-connect", daemon=True)
    connecting.start()
    where = f"{place.address}:{place.port}"
    if place.tasks:
        where = f"{where} as {place.tasks[0]}"
    if not over.wait(min(warn_s, abort_s)):
        who = _keeper(place)
        log.warning("start-up has waited %.0f s for %s, which keeps the store of the ranks at %s", warn_s, who, where)
        over.wait(max(0.0, abort_s - warn_s))
        over.set()
        connecting.join(LET_GO_S)  # one that returns from torch while the interpreter exits would abort the process
    if found:
        found[0].set_timeout(timedelta(seconds=abort_s))
        return found[0]
    why = first_line(failed[0]) if failed else f"nothing that it says within {abort_s:g} s"
    reason = f"the store of the ranks, which it keeps at {where}, is out of reach ({why}). Was it started?"
    if place.part:
        reason = f"no server serves a store at {where} ({why}). Was one started, with the same address and port?"
    raise PeerLost(0, "unknown", 0, 0, "start-up", reason)
