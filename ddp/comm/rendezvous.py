"""The rendezvous: how ranks find each other, in a part of a store that belongs to one session of theirs alone.

Used by `setup.py` before every session, and by `launcher.py` before every attempt under torchrun.

Read before: `place.py`. Read next: `setup.py`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from datetime import timedelta

from torch.distributed import DistError, HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from ddp.clock import Patience
from ddp.comm.place import Place
from ddp.errors import PeerLost
from ddp.log import log

LOOK_EVERY_S = 0.05


def rendezvous(store: Store, rank: int, world_size: int, *, warn_s: float, abort_s: float) -> Store:
    """Returns a part of the store that belongs to this session of the ranks alone, once all of them have come.

    A store may outlive the processes that wrote to it: torchrun's serves one attempt after the other, and a process may
    begin a second session. A rank that read what an earlier session left there would connect to processes that are
    gone. So each rank draws a token, and a session is named by all of its ranks' tokens:

        here/RANK            the rank's token, drawn anew for each session
        roster               the tokens that rank 0 has found, as a list
        seen/NAME/RANK       the rank has found its own token in the roster of that name

    A rank that has gone does not answer a new roster, so all have come once all answers to one roster are there.

    Raises:
        PeerLost: a rank did not come within `abort_s`; connecting to it would wait in silence.
    """
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
                    return PrefixStore(name, store)
            left_s = patience.left_s()
            if not left_s or (abort_s - left_s > warn_s and not has_warned):
                missing = [other for other, key in enumerate(seen) if not store.check([key])] or [0]
                if not left_s:
                    reason = f"of {world_size} ranks, {missing} did not come within {abort_s:g} s. Was each started?"
                    raise PeerLost(missing[0], "unknown", 0, 0, "start-up", reason)
                has_warned = True
                log.warning("start-up has waited %.0f s for rank(s) %s of %d", warn_s, missing, world_size)
            time.sleep(min(left_s, pause_s))
            pause_s = min(2 * pause_s, LOOK_EVERY_S)
    except DistError as error:
        raise out_of_reach(error) from error


def open_store(place: Place, *, timeout: timedelta) -> Store:
    """Returns the store of all ranks: that of torchrun's agent, which outlives an attempt, or else rank 0 serves it.

    Raises:
        PeerLost: rank 0 cannot be reached.
    """
    if not place.address:
        return HashStore()
    host = f"[{place.address}]" if ":" in place.address else place.address  # IPv6
    meeting = torch_rendezvous(f"tcp://{host}:{place.port}", place.rank, place.world_size, timeout=timeout)
    try:
        store: Store = next(iter(meeting))[0]
    except DistError as error:
        raise out_of_reach(error) from error
    return store


def out_of_reach(error: DistError) -> PeerLost:
    """Returns the error for a store that cannot be reached: it is kept on rank 0's host."""
    reason = f"the store that it keeps is out of reach ({str(error).splitlines()[0]})"
    return PeerLost(0, "unknown", 0, 0, "start-up", reason)
