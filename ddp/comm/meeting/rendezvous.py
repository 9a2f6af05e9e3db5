"""The rendezvous: how processes find each other, in a part of a store that belongs to a single session.

    ranks                 have numbers, and wait for each other: before every session (`session.py`), and before every
                          attempt under torchrun (`torchrun.py`)
    servers and workers   that no launcher of this package has started get their roles here (`role.py`):

    DDP_ROLE        server 0 serves the store at MASTER_ADDR:MASTER_PORT, and describes the run in it. Every other
                    process may come at any time; its index counts the arrivals
    DDP_SERVERS     under a launcher: all ranks meet, and the last ones are servers
    TF_CONFIG       the same, but the tasks of the job ps are servers

The first launcher of an elastic run serves such a store, too, if other hosts may join it (`open_to_hosts`).

Of several servers, server 0 is the first one that can serve at that address. The store ends with it, and so does the
run: the remaining processes end, too, and restarted servers meet new workers there.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from torch import distributed
from torch.distributed import DistError, DistStoreError, HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from ddp.comm.meeting.cluster_spec import ClusterTask, described_servers
from ddp.comm.meeting.membership import Hosts, is_superseded, leave_if_late, lost_member
from ddp.comm.meeting.place import ALONE, RankPlace, launcher_serves, number_of, place
from ddp.comm.meeting.private_store import Folder, part_of, sealed
from ddp.comm.meeting.role import ROLE, SERVERS, Role, RoleSettings, current_role, role_from_env, set_role
from ddp.comm.meeting.secret import VARIABLE, private_part, secret
from ddp.errors import ConfigError, PeerLost, first_line
from ddp.process.clock import HelperThread, Patience, within
from ddp.process.terminal import log
from ddp.units import counted

Result = TypeVar("Result")

POLL_S = 0.05
SERVING_S = 30.0  # longest wait of rank 0 for its own store
LET_GO_S = 2.0  # after our deadline, for torch's client to reach its own
NUM_WORKERS = 2  # by default, as in `ddp.launch`
REACH_S = 5.0  # longest wait for a silent host before the next try


def ask_store(work: Callable[[], Result], *, within_s: float) -> Result:
    """Returns the result of `work`, which calls the store of the ranks.

    Without this deadline, torch's client would wait for a stopped process for ever.

    Raises:
        PeerLost: the store has not responded in time, or not all ranks will come.
    """
    try:
        return within(within_s + LET_GO_S, work, unless=is_superseded)
    except TimeoutError as error:
        late = error
    _refuse_former_ranks()
    reason = f"the store that it serves has not responded for {within_s:g} s: it was stopped, or its host is down"
    raise PeerLost(0, "unknown", 0, 0, "start-up", reason) from late


def _refuse_former_ranks() -> None:
    """Raises PeerLost if the launcher has lost one of these ranks, or has let others join."""
    leave_if_late()
    if is_superseded():
        rank, why = lost_member() or (0, "the members are others now")
        raise PeerLost(rank, "unknown", 0, 0, "start-up", why)


def rendezvous(
    store: Store, rank: int, world_size: int, *, warn_s: float, abort_s: float, tasks: Sequence[ClusterTask] = ()
) -> Store:
    """Returns a part of the store for this session of the ranks alone, once all of them have arrived.

    A store may outlive the processes that wrote to it: torchrun's store serves several attempts, and a process may
    begin a second session. A rank that read the keys of an earlier session would connect to processes that are gone. So
    each rank draws a token, and the tokens of all its ranks name a session:

        here/RANK            the rank's token, a new one for each session
        roster               the tokens that rank 0 has found, as a list
        seen/NAME/RANK       the rank has found its own token in the roster of that name

    A rank that has gone never confirms a new roster, so all ranks are there once all have confirmed one roster.

    Args:
        tasks: by rank, its task in the description of a cluster; empty without one.

    Raises:
        PeerLost: a rank did not arrive within `abort_s`.
        ConfigError: two processes have arrived as this rank, and the other one is in the session.
    """
    meet = partial(_meet, store, rank, world_size, warn_s=warn_s, abort_s=abort_s, tasks=tasks)
    return ask_store(meet, within_s=abort_s)


def _meet(
    store: Store, rank: int, world_size: int, *, warn_s: float, abort_s: float, tasks: Sequence[ClusterTask]
) -> Store:
    token, tokens = secrets.token_hex(8), [""] * world_size
    patience, has_warned, roster, pause_s = Patience(abort_s), False, "", 0.001
    everyone = range(world_size)
    try:
        store.set(f"here/{rank}", token)
        while True:
            _refuse_former_ranks()
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
                raise ConfigError(f"two processes have started as {_named([rank], tasks)}: start each once")
            left_s = patience.left_s()
            if not left_s or (abort_s - left_s > warn_s and not has_warned):
                missing = [other for other, key in enumerate(seen) if not store.check([key])] or [0]
                who, twice = _named(missing, tasks), ""
                if tokens[rank:][:1] not in ([], [""], [token]):  # the session continues without this process
                    twice = f"; another process has started as {_named([rank], tasks)} before this one"
                if not left_s:
                    same = f" with the same {VARIABLE}" if secret() else ""
                    reason = f"of {world_size} ranks, {who} did not come within {abort_s:g} s{twice}: start each once"
                    raise PeerLost(missing[0], "unknown", 0, 0, "start-up", f"{reason}{same}")
                has_warned = True
                log.warning("start-up has waited %.0f s for rank(s) %s of %d%s", warn_s, who, world_size, twice)
            time.sleep(min(left_s, pause_s))
            pause_s = min(2 * pause_s, POLL_S)
    except DistError as error:
        reason = f"the store that it serves is out of reach ({first_line(error)})"
        raise PeerLost(0, "unknown", 0, 0, "start-up", reason) from error


def _named(ranks: Sequence[int], tasks: Sequence[ClusterTask]) -> str:
    """Returns these ranks as text: as tasks if a cluster is described."""
    return ", ".join(f"{tasks[rank]} at {tasks[rank].address}" for rank in ranks if tasks) or str(list(ranks))


def on_this_host(here: RankPlace, store: Store, *, within_s: float) -> tuple[int, int]:
    """Returns this rank's number among the ranks of its host, and their number. Collective, unless that is known.

    Args:
        store: of this session of the ranks alone, in which all have arrived.
    """

    def count() -> tuple[int, int]:
        store.set(f"host/{here.rank}", socket.gethostname())
        hosts = [store.get(f"host/{rank}") for rank in range(here.world_size)]
        return hosts[: here.rank].count(hosts[here.rank]), hosts.count(hosts[here.rank])

    return here.on_host or ask_store(count, within_s=within_s)


class Opened(NamedTuple):
    """The store of all ranks, which may end with this object."""

    store: Store
    server: Store | None = None  # separate, because calls in flight after a failure may keep the store alive


def open_store(place: RankPlace, *, warn_s: float, abort_s: float) -> Opened:
    """Returns the store of all ranks: in the private folder of a launch, from torchrun's agent, or from rank 0.

    If torch.distributed is initialized, it has one. Servers take an unused part of the run's store.

    Raises:
        ConfigError: rank 0 cannot serve it at this address, or the secret could be guessed.
        PeerLost: rank 0 cannot be reached.
    """
    if place.part and place.world_size > 1 and (mine := current_role()) is not None:
        return Opened(part_of(mine.store, f"servers/{mine.incarnation}"), mine.served)
    if not place.address:
        return Opened(sealed(_get_default_store(), secret()) if place.world_size > 1 else HashStore())
    if (folder := private_part(place.port)) is not None:
        return Opened(Folder(folder))
    key, server = secret(), None
    if place.rank == 0 and not launcher_serves():
        server = _served(place, min(abort_s, SERVING_S))
    return Opened(sealed(_reached(place, warn_s=warn_s, abort_s=abort_s), key), server)


def _served(place: RankPlace, timeout_s: float) -> Store:
    """Returns rank 0's store, which this process now serves. Does not wait for clients."""
    choices = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    try:
        return TCPStore(place.address, place.port, timeout=timedelta(seconds=timeout_s), **choices)
    except DistError as error:
        where = f"MASTER_ADDR={place.address}, MASTER_PORT={place.port}"
        who, all_of_them, once = _keeper(place), "ranks", ""
        if place.tasks:
            where, once = f"{place.role} at {place.address}:{place.port}", f"start {place.role} once, and "
        elif place.part == "launcher":
            all_of_them = "hosts"
        elif place.part:
            all_of_them, once = "processes", "start one server, or say cluster.servers=2 (DDP_SERVERS), and "
        raise ConfigError(
            f"{where}: {who} cannot serve the store of the {all_of_them} there ({first_line(error)}); {once}give all "
            f"{all_of_them} an address of {who}'s host, and a port that is free there"
        ) from error


def _keeper(place: RankPlace) -> str:
    """Returns the name of the process that serves the store."""
    if place.part == "worker":  # which knows not yet of what kind the run is
        return "server 0, or an elastic run's first launcher"
    return {"": "rank 0", "launcher": "this launcher"}.get(place.part, "server 0")


def _reached(place: RankPlace, *, warn_s: float, abort_s: float) -> Store:
    """Returns a client of the store that another process serves, once it is up.

    A thread connects, because torch's client would wait for ever for another kind of program at that port.
    """
    patience = Patience(abort_s)

    def connect() -> Store:
        while True:
            try:
                socket.create_connection((place.address, place.port), timeout=REACH_S).close()
                break
            except OSError:
                if not patience.left_s():
                    raise
            time.sleep(POLL_S)
        left = timedelta(seconds=max(1.0, patience.left_s()))
        return TCPStore(place.address, place.port, is_master=False, timeout=left)

    helper = HelperThread("ddp-connect")
    connected = helper.submit(connect)
    helper.end()
    where = f"{place.address}:{place.port}"
    if place.tasks:
        where = f"{where} as {place.tasks[0]}"
    if wait([connected], min(warn_s, abort_s)).not_done:
        who = _keeper(place)
        log.warning("start-up has waited %.0f s for %s, which serves the store of the ranks at %s", warn_s, who, where)
        # Longer than the deadline, because a return from torch while the interpreter exits would abort the process.
        wait([connected], max(0.0, abort_s - warn_s) + LET_GO_S)
    if not connected.done():
        why = f"no reply within {abort_s:g} s"
    elif (error := connected.exception()) is not None:  # of torch's store, or for an unknown host name
        why = first_line(error)
    else:
        store = connected.result()
        store.set_timeout(timedelta(seconds=abort_s))
        return store
    reason = f"the store of the ranks, which it serves at {where}, is out of reach ({why}): start it first"
    if place.part:
        reason = f"nobody serves a store at {where} ({why}): start a server, or the first launcher of an elastic run, "
        reason += "with the same address and port"
    raise PeerLost(0, "unknown", 0, 0, "start-up", reason)


# --- servers and workers ---------------------------------------------------------------------------------------------


def join_role(*, warn_s: float, abort_s: float) -> Role | None:
    """Returns the role of this process, after joining the others if the variables set one; None for a rank.

    Raises:
        ConfigError: the variables are contradictory.
        PeerLost: the others have not arrived within `abort_s`.
    """
    if (mine := current_role()) is not None:
        return mine
    servers = described_servers()
    if me := RoleSettings(None, servers) if servers else role_from_env():
        if me.job is None:
            mine = _by_rank(me, warn_s=warn_s, abort_s=abort_s)
        else:
            mine, run = arrive(me, dict, warn_s=warn_s, abort_s=abort_s)
            if "config" in run:
                raise ConfigError(f"{ROLE}={me.job}: server 0 is a \"train\" command; start this process as one, too")
        mine.store.set(f"joins/{mine}", "")
        set_role(mine)
    return mine


def arrive(
    me: RoleSettings, prepare: Callable[[], dict[str, Any]], *, warn_s: float, abort_s: float
) -> tuple[Role, dict[str, Any]]:
    """Returns the role of this process, and server 0's description of the run.

    Args:
        prepare: on server 0, returns that description as JSON values; it may set the number of `workers`.

    Raises:
        ConfigError: the store cannot be served there, or there are enough servers already.
        PeerLost: server 0 is not there, or has gone.
    """
    opened = _opened(me, warn_s=warn_s, abort_s=abort_s)
    assert me.job is not None
    job, run_store, index = me.job, part_of(opened.store, "by arrival"), 0
    if opened.server is not None:
        run = {"servers": me.num_servers or 1, "workers": me.num_workers or NUM_WORKERS} | prepare()
        run_store.set("run", json.dumps(run))
    else:
        try:
            index = ask_store(partial(run_store.add, job, 1), within_s=abort_s) - (job == "worker")
            try:
                ask_store(partial(run_store.wait, ["run"], timedelta(seconds=min(warn_s, abort_s))), within_s=abort_s)
            except DistStoreError:  # it has not come in time
                where = f"{me.address}:{me.port}: it is being prepared, or has another {VARIABLE}"
                log.warning("start-up has waited %.0f s for the run at %s", warn_s, where)
                left = timedelta(seconds=max(0.1, abort_s - warn_s))
                ask_store(partial(run_store.wait, ["run"], left), within_s=abort_s)
            run = json.loads(run_store.get("run"))
        except DistError as error:
            reason = (
                f"{_keeper(RankPlace('ddp', 1, 2, part=me.job))} at {me.address}:{me.port} has gone, has another "
                f"{VARIABLE}, or has not described the run "
                f"({first_line(error)}): see what it prints, start it again, and then this process"
            )
            raise PeerLost(0, "unknown", 0, 0, "start-up", reason) from error
    servers = run["servers"]
    if me.num_servers not in (None, servers):
        raise ConfigError(f"{SERVERS}={me.num_servers} (cluster.servers): server 0 has {servers}; give all the same")
    if job == "server" and index >= servers:
        single = servers == 1
        raise ConfigError(
            f"{ROLE}=server (cluster.role): {'one' if single else servers} {'is' if single else 'are'} there already; "
            f"start a worker, or all again with {counted(index + 1, 'server')}"
        )
    return Role(job, index, run["workers"], servers, part_of(run_store, "roles"), served=opened.server), run


def open_to_hosts(address: str, port: int) -> Hosts:
    """Serves the store of an elastic launch that processes of other hosts may join, once the run is described in it.

    Raises:
        ConfigError: the store cannot be served there, or no secret keeps strangers away.
    """
    where = f"MASTER_ADDR={address} with cluster.min_workers: processes of other hosts may join there, but"
    if not secret():
        raise ConfigError(f"{where} {VARIABLE} is not set: set it, on each host the same; or unset MASTER_ADDR")
    if not is_here(address):
        raise ConfigError(f"{where} it is no address of this host: set one of its own; or unset MASTER_ADDR")
    served = _served(RankPlace("ddp", 0, 2, address=address, port=port, part="launcher"), SERVING_S)
    return Hosts(address, port, part_of(part_of(sealed(served, secret()), "by arrival"), "roles"), served)


def describe_to_hosts(hosts: Hosts, run: Mapping[str, Any]) -> None:
    """Lets processes of other hosts join the run that this describes."""
    part_of(sealed(cast(Store, hosts.served), secret()), "by arrival").set("run", json.dumps({**run, "servers": 0}))


def hosts_store(address: str, port: int | str) -> Store:
    """Returns this process's own connection to the membership in the store that `open_to_hosts` serves.

    Raises:
        PeerLost: it is out of reach.
    """
    place = RankPlace("ddp", 1, 2, address=address, port=int(port), part="worker")
    reached = _reached(place, warn_s=SERVING_S, abort_s=SERVING_S)
    return part_of(part_of(sealed(reached, secret()), "by arrival"), "roles")


def _opened(me: RoleSettings, *, warn_s: float, abort_s: float) -> Opened:
    """Returns the store, served by this process if it is server 0."""
    only = me.num_servers in (None, 1)
    keeper = RankPlace("ddp", 0, 2, address=me.address, port=me.port, part=str(me.job))
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


def _by_rank(me: RoleSettings, *, warn_s: float, abort_s: float) -> Role:
    """Returns the role of a rank of a launcher, whose last ranks are servers. Collective."""
    if distributed.is_initialized():
        raise ConfigError(
            f"{SERVERS}={me.num_servers}: torch.distributed has begun, in which servers and workers are both ranks; "
            "let ddp.fit begin it"
        )
    here, servers = place() or ALONE, me.num_servers or 0
    if here.world_size == 1:
        raise ConfigError(
            f"{SERVERS}={servers}: no launcher has started other processes than this one; take one, or start each "
            f"with {ROLE}=server or {ROLE}=worker"
        )
    number = number_of(here, servers, setting=SERVERS)
    opened = open_store(here, warn_s=warn_s, abort_s=abort_s)
    attempt = part_of(opened.store, "servers and workers")
    attempt = rendezvous(attempt, here.rank, here.world_size, warn_s=warn_s, abort_s=abort_s, tasks=here.tasks)
    workers, store = here.world_size - servers, part_of(attempt, "roles")
    return Role.of_number(number, workers=workers, servers=servers, store=store, served=opened.server)
