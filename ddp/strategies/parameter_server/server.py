"""A server: it leases samples to workers, sends them parameters, and makes updates of the gradients that come back.

    main thread     the loop of `fit`: waits for the next update, makes it as the sharded strategy does among the
                    servers, evaluates, saves. It alone changes parameters
    doorman         a thread that lets workers in, as they come
    attendants      a thread for each worker: answers its requests (`edge.py`)

| request | server 0                                          | the other servers, which hold other pieces   |
|---------|---------------------------------------------------|----------------------------------------------|
| leases  | parts of steps, for the worker to read ahead      |                                              |
| begin   | may it compute this part now? Then a pull follows | "pull", once they have made as many updates  |
| push    | gradients, loss, count; do they count?            | gradients, which wait for server 0's word    |
| forget  |                                                   | the last push does not count                 |

Server 0 keeps the ledger (`ledger.py`). All servers make the updates that it announces, in the same order. So they are
always at the same version, and a worker that dies between two servers leaves nothing half done.

Note "two locks". `_changed` guards the ledger and the pushed gradients; it is held only briefly. `_whole` is the main
thread's while it changes parameters, evaluates or saves, and free while it waits for an update: a pull takes it, and so
never sends half an update. Whoever takes both takes `_whole` first.

Every request is answered within `ANSWER_S`, if only by "wait". So a worker that waits never takes the server for lost,
and the other servers hear from server 0 as often.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from ddp.comm.communicator import Communicator
from ddp.comm.meeting.cast import Cast, how_ended
from ddp.comm.meeting.private_store import part_of
from ddp.comm.meeting.rendezvous import answered
from ddp.comm.objects import broadcast_object
from ddp.comm.opening import open_communicator
from ddp.comm.settings import CPU, Settings
from ddp.errors import CommunicatorBroken, ConfigError, PeerLost, first_line, said
from ddp.gradients.totals import Totals, count_of
from ddp.policies import ParameterServer
from ddp.process.clock import Patience, now_s
from ddp.process.log import log
from ddp.replica.served import ServedDataParallel
from ddp.replica.sharded import Part
from ddp.strategies.parameter_server.edge import SERVER, Edge, Piece, by_dtype, places_of
from ddp.strategies.parameter_server.ledger import Lease, Ledger, Plan, Update
from ddp.units import counted

ANSWER_S = 2.0  # longest time that a request waits for its answer, unless deadlines are short
POLL_S, ARRIVALS_S = 0.05, 0.2
WAIT, OVER, STOP = "wait", "over", "stop"  # words of server 0 in the place of an update
LOST = (PeerLost, CommunicatorBroken)
"""What a call raises if the other end is lost."""
LAST_S = 10.0  # longest wait for workers that are to hear how the run has ended


class Push(NamedTuple):
    """Holds what a worker has returned for a part of a step.

    Attributes:
        flats: mean gradients over the part's items, one for each dtype (`Edge.taken`).
        loss_sum, num_items, num_samples: of the part.
        buffers: those of the model that have changed, by name.
        without: names of the parameters that got no gradient.
    """

    flats: Sequence[Tensor]
    loss_sum: float
    num_items: float
    num_samples: int
    buffers: Mapping[str, Tensor]
    without: Sequence[str]


class Received(NamedTuple):
    """Says that the gradients of an update are in the buckets.

    Attributes:
        totals: of the update.
        since_s: when the wait for it began.
        hand_over: ends the step of the model, and is given the totals, with the votes of the servers.
    """

    totals: Totals
    since_s: float
    hand_over: Callable[[Totals], None]


class Service:
    """Serves workers, until `end`. Collective among the servers to make.

    Args:
        part: of this process.
        home: the part of the store in which the processes meet for this training.
        model: whose parameters are served.
        pieces: what this server holds of them.
        policy: when updates are made, and how gradients travel.
        num_shards: parts of a step that random streams hang on (`Ledger`).
        version: updates that the run has made before.
        facts: plain values that a worker compares with its own.

    Attributes:
        oldest: most updates between the pull of parameters and the update by their gradient, so far.
        is_stopped: the last epoch has ended early, because this process is to stop and no worker is here.
    """

    def __init__(
        self,
        part: Cast,
        home: Store,
        model: ServedDataParallel,
        pieces: Sequence[tuple[Piece, Part]],
        policy: ParameterServer,
        *,
        num_shards: int,
        version: int,
        facts: Mapping[str, Any],
    ) -> None:
        self._part, self._policy, self._model = part, policy, model
        self._comm, self._facts = model.comm, dict(facts)
        self._ledger = Ledger(
            mode=policy.mode,
            num_parts=policy.num_parts(part.num_workers),
            num_shards=num_shards,
            staleness=policy.staleness,
            num_backups=policy.backup_workers,
            version=version,
        )
        self._pieces = pieces
        self._parameters = dict(model.module.named_parameters())
        self._version = version
        self._buffers: dict[str, Tensor] = {}  # those that workers have changed
        self._pushed: dict[tuple[int, int, int], Push] = {}  # by step, part and worker
        self._error: BaseException | None = None  # of a thread, for the main one
        self._answer_s = min(ANSWER_S, self._comm.abort_s / 4)
        self.oldest, self.is_stopped = 0, False
        self._over: dict[str, Any] | None = None
        self._changed, self._whole = threading.Condition(), threading.Lock()
        self._attendants: dict[int, threading.Thread] = {}  # by the worker's number, and their communicators
        self._comms: dict[int, Communicator] = {}
        self._num_here, self._empty_since_s, self._warned_s, self._num_changes = 0, now_s(), 0.0, 0
        self._home = home
        self._whole.acquire()
        if part.index == 0:
            self._say_what_is_gone()
            self._home.set("incarnation", str(part.incarnation))
        self._doorman = threading.Thread(target=self._let_in, name="ddp-doorman", daemon=True)
        self._doorman.start()

    # --- the main thread ---------------------------------------------------------------------------------------------

    def epoch(self, plans: Iterable[Plan], *, stopping: Any) -> Iterator[tuple[Plan, Received]]:
        """Yields each update of an epoch, in the order in which the servers make them. Collective among the servers.

        Args:
            plans: the steps of the epoch; read on server 0.
            stopping: true once this process is to stop.

        Raises:
            ConfigError: no worker has come, or is left.
        """
        is_first, alone, last_step = self._part.index == 0, self._comm.world_size == 1, 0
        if is_first:
            with self._changed:
                self._ledger.begin_epoch(plans)
                self._notify()
        while True:
            since_s = now_s()
            word: Any = WAIT
            while word == WAIT:
                word = self._next(stopping) if is_first else None
                if not alone:
                    with nullcontext() if is_first else self._pulls_allowed():  # server 0 knows the next one already
                        word = broadcast_object(self._comm, word)
            if word in (OVER, STOP):
                self.is_stopped = word == STOP
                with self._changed:  # what is left of these steps does not count
                    self._pushed = {key: push for key, push in self._pushed.items() if key[0] > last_step}
                return
            told, keys, counts, buffers, without = word
            plan, last_step = Plan(*told), max(last_step, told[0])
            totals = self._received([tuple(key) for key in keys], counts, buffers)
            if (num_samples := sum(each[2] for each in counts)) != plan.size:
                raise AssertionError(f"step {plan.step} has {plan.size} samples, and {num_samples} were returned")
            yield plan, Received(totals, since_s, partial(self._model.take, without=without))
            with self._changed:
                self._version += 1
                self._notify()
            if is_first:
                self._home.set("version", str(self._version))

    def _next(self, stopping: Any) -> Any:
        """Waits on server 0 for the next update, and returns it; or OVER, STOP, or after a while WAIT."""
        patience = Patience(self._answer_s)
        while True:
            with self._changed:  # `_whole` is held, so that nobody pulls between an update's number and the update
                update, is_over, num_changes = self._ledger.take_update(), self._ledger.is_epoch_over, self._num_changes
            if self._error is not None:
                raise self._error
            if update is not None:
                return self._described(update)
            if is_over:
                return OVER
            idle_s = 0.0 if self._num_here else now_s() - self._empty_since_s
            if stopping and idle_s > POLL_S:
                return STOP
            if idle_s > self._comm.abort_s:
                raise ConfigError(
                    f"no worker has been here for {idle_s:.0f} s (comm.abort_s): start some; what is saved goes on by "
                    "resume=auto"
                )
            if not patience.left_s():
                if idle_s > self._warned_s + self._comm.warn_s:
                    self._warned_s = idle_s
                    log.warning("no worker has been here for %.0f s: the servers wait for one", idle_s)
                return WAIT
            with self._pulls_allowed(), self._changed:
                self._wait_for_change(num_changes, POLL_S)  # or until this process is to stop

    @contextmanager
    def _pulls_allowed(self) -> Iterator[None]:
        """Lets attendants send parameters in the block, in which the main thread only waits."""
        self._whole.release()
        try:
            yield
        finally:
            self._whole.acquire()

    def _notify(self) -> None:
        """Lets all look again at the ledger and at what was pushed; with `_changed` held."""
        self._num_changes += 1
        self._changed.notify_all()

    def _wait_for_change(self, num_changes: int, limit_s: float) -> None:
        """Waits until there have been more changes than these, or a worker is late; with `_changed` held."""
        if self._num_changes == num_changes:
            late_s = self._ledger.next_late_s(now_s())
            self._changed.wait(limit_s if late_s is None else min(limit_s, late_s))

    def _described(self, update: Update) -> Any:
        """Returns an update as all servers must know it, in plain values."""
        plan, workers, age = update
        self.oldest = max(self.oldest, age)
        with self._changed:
            keys = [(plan.step, part, worker) for part, worker in enumerate(workers) if isinstance(worker, int)]
            pushes = [self._pushed[key] for key in keys]
        counts = [(push.loss_sum, push.num_items, push.num_samples) for push in pushes]
        buffers = _together([push.buffers for push in pushes], [each[2] for each in counts])
        without = sorted(set.intersection(*(set(push.without) for push in pushes)) if pushes else ())
        return tuple(plan), keys, counts, buffers, without

    @torch.no_grad()
    def _received(
        self,
        keys: Sequence[tuple[int, int, int]],
        counts: Sequence[Sequence[float]],
        buffers: Mapping[str, Tensor],
    ) -> Totals:
        """Writes the sum of what these pushes have into the buckets, in their order, divided by the global count."""
        with self._changed:
            pushes = [self._pushed.pop(key) for key in keys]
        num_items = sum(each[1] for each in counts)
        parts = dict(self._pieces)
        packs = by_dtype([piece for piece, _ in self._pieces], self._parameters)
        for index, (dtype, pieces) in enumerate(packs):
            flats = [push.flats[index] for push in pushes]
            shares = [each[1] / (num_items or 1) for each in counts]
            total = flats[0].mul_(shares[0]) if flats else None
            for flat, share in zip(flats[1:], shares[1:], strict=True):
                assert total is not None
                total.add_(flat, alpha=share)
            for start, piece in zip(places_of(pieces, dtype)[0], pieces, strict=True):
                gradient = parts[piece].gradient
                if total is None:
                    gradient.zero_()
                else:
                    gradient.copy_(total[start : start + len(gradient)])
        module = self._model.module
        for name, value in buffers.items():
            module.get_buffer(name).copy_(value)
        self._buffers.update(buffers)
        return Totals(loss_sum=sum(each[0] for each in counts), num_items=count_of(num_items))

    def end(self, over: Mapping[str, Any]) -> None:
        """Tells the workers that the run is over, and lets them go.

        Args:
            over: plain values for them.
        """
        with self._changed:
            if self._over is not None:
                return
            self._over = dict(over)
            self._notify()
        if self._part.index == 0 and "failed" not in over:  # who comes later has nothing to do, either
            with suppress(DistError):
                self._home.set("over", json.dumps(self._over))
        with suppress(RuntimeError):  # the main thread need not have it, after an error
            self._whole.release()
        patience = Patience(LAST_S)
        self._doorman.join(LAST_S)
        for thread in list(self._attendants.values()):
            thread.join(patience.left_s())
        for comm in list(self._comms.values()):  # of workers that do not come for the word; so that their threads end
            comm.abandon("the run is over")
        for thread in list(self._attendants.values()):
            thread.join(1.0)

    # --- the doorman -------------------------------------------------------------------------------------------------

    def _let_in(self) -> None:
        home, mine, seen = self._home, self._part, 0
        stop = threading.Event()
        while self._over is None:
            try:
                num_arrivals = home.add(f"{mine.incarnation}/arrivals", 0)
            except (DistError, OSError) as error:  # then nobody can come any more
                log.warning("the store does not answer, so that no further worker can come: %s", first_line(error))
                return
            for number in range(seen, num_arrivals):
                thread = threading.Thread(target=self._attend, args=(number,), name=f"ddp-worker-{number}", daemon=True)
                self._attendants[number] = thread
                thread.start()
                if mine.index == 0:
                    home.set(f"{mine.incarnation}/welcome/{number}", "")
            seen = num_arrivals
            stop.wait(ARRIVALS_S)

    def _attend(self, number: int) -> None:
        """Serves one worker, from when it comes until it is gone."""
        who, mine, entered = f"worker {number}", self._part, None
        comm: Communicator | None = None
        try:
            store = own_part(self._home, f"{mine.incarnation}/edge/{mine.index}/{number}", self._comm.abort_s)
            comm = open_communicator(store, mine.incarnation, SERVER, 2, edge_settings(self._comm), warn_s=1e9)
            self._comms[number] = comm
            first = broadcast_object(comm, None, 1)
            who = f"worker {first['index']}"
            if problem := self._unlike(first["facts"]):
                broadcast_object(comm, {"refused": problem}, SERVER)
                return
            pieces = [piece for piece, _ in self._pieces]
            rest = {} if mine.index else self._rest()
            broadcast_object(comm, {"pieces": list(map(tuple, pieces)), "rest": rest}, SERVER)
            edge = Edge(comm, self._parameters, pieces, wire=self._policy.wire, hook=self._policy.hook)
            self._enters()
            entered = first
            while self._serve(edge, number):
                pass
        except (*LOST, DistError) as error:
            if self._over is None and entered is not None and mine.index == 0:
                how = how_ended(mine.store, "worker", entered["index"], entered["incarnation"])
                how = how or f"is gone ({error.reason if isinstance(error, PeerLost) else said(error)})"
                log.warning("%s %s: what it had leased goes to others", who, how)
        except BaseException as error:  # such as one of the user's order of samples
            self._error = error
        finally:
            with self._changed:
                if mine.index == 0:
                    self._ledger.lost(number)
                if entered is not None:
                    self._num_here -= 1
                    self._empty_since_s = now_s()
                self._notify()
            if comm is not None:
                with suppress(Exception):
                    comm.close() if not comm.is_broken else comm.abandon("the other end is gone")
            self._comms.pop(number, None)
            self._attendants.pop(number, None)

    def _unlike(self, facts: Mapping[str, Any]) -> str:
        """Returns what a worker has other than the servers, in words; "" for nothing."""
        for name, ours in self._facts.items():
            if facts.get(name) != ours:
                return f"{name} is {facts.get(name)} at the worker and {ours} at the servers: give both the same"
        return ""

    def _rest(self) -> dict[str, Tensor]:
        """Returns what no pull has, but for buffers that change: all buffers, and the parameters that nobody trains."""
        frozen = {name: each.detach() for name, each in self._parameters.items() if not each.requires_grad}
        return frozen | dict(self._model.module.named_buffers())

    def _enters(self) -> None:
        with self._changed:
            self._num_here += 1
            self._warned_s = 0.0

    def _say_what_is_gone(self) -> None:
        """Says how many updates earlier servers have made after the checkpoint that these go on from."""
        last = int(self._home.get("version")) if self._home.check(["version"]) else 0
        if num_gone := max(0, last - self._version):
            log.warning(
                "the servers were lost after update %d, and go on from update %d: %s gone, and their samples are "
                "leased again",
                *(last, self._version, f"{counted(num_gone, 'update')} {'is' if num_gone == 1 else 'are'}"),
            )

    # --- an attendant ------------------------------------------------------------------------------------------------

    def _serve(self, edge: Edge, number: int) -> bool:
        """Answers one request; False after the last one."""
        request = edge.heard()
        what = request["what"]
        if what == "bye":
            edge.tell({})
            return False
        if what == "push":
            return self._take_push(edge, number, request)
        if what == "forget":
            edge.take_back()
            with self._changed:
                self._pushed.pop((*request["key"], number), None)
            edge.tell({})
        elif what == "leases":
            edge.tell(self._leases(number, request["most"]))
        else:
            self._begin(edge, number, request)
        return True

    def _leases(self, number: int, most: int) -> dict[str, Any]:
        """Returns leases, as soon as there are some; or none, after a while."""
        patience = Patience(self._answer_s)
        with self._changed:
            while self._over is None:
                if granted := self._ledger.grant(number, most=most, now_s=now_s()):
                    return {"leases": [as_plain(lease) for lease in granted]}
                if not (left_s := patience.left_s()):
                    return {"leases": []}
                self._wait_for_change(self._num_changes, left_s)
            return {"leases": [], "over": self._over}

    def _begin(self, edge: Edge, number: int, request: Mapping[str, Any]) -> None:
        """Lets a worker compute a part, and sends it the parameters; or lets it wait."""
        patience = Patience(self._answer_s)
        answer: dict[str, Any] = {"verdict": "wait"}
        while answer["verdict"] == "wait" and (left_s := patience.left_s()):
            num_changes = self._num_changes
            if self._over is not None:
                answer = {"verdict": "gone", "over": self._over}
            elif self._whole.acquire(timeout=left_s):
                try:
                    answer = self._begun(edge, number, request)
                finally:
                    self._whole.release()
            if answer["verdict"] == "wait":
                with self._changed:
                    self._wait_for_change(num_changes, left_s)
        edge.tell(answer)
        if answer["verdict"] == "now":
            edge.pull(f"update {answer['version']}, parameters")

    def _begun(self, edge: Edge, number: int, request: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request to begin, and copies the parameters if it is "now"; with `_whole` held."""
        leases: list[Lease] = []
        with self._changed:
            if self._part.index:
                verdict = "now" if self._version >= request["version"] else "wait"
            else:
                verdict = self._ledger.begin(number, as_lease(request["lease"]), now_s=now_s())
                if verdict == "now":
                    leases = self._ledger.grant(number, most=request["most"], now_s=now_s())
        if verdict != "now":
            return {"verdict": verdict}
        edge.load()
        return {
            "verdict": verdict,
            "version": self._version,
            "buffers": dict(self._buffers),
            "leases": [as_plain(each) for each in leases],
        }

    def _take_push(self, edge: Edge, number: int, request: Mapping[str, Any]) -> bool:
        lease = as_lease(request["lease"])
        step, part = lease.plan.step, lease.part
        flats = edge.taken(f"step {step}, gradients of part {part}")
        push = Push(flats, *(request[name] for name in Push._fields[1:]))
        with self._changed:
            if self._part.index:
                self._pushed[step, part, number] = push
                counts = True
            elif counts := self._ledger.returned(number, lease, now_s=now_s()):
                self._pushed[step, part, number] = push
            self._notify()
        if not counts:
            edge.take_back()
        edge.tell({"counts": counts} | ({} if self._over is None else {"over": self._over}))
        return True


def own_part(home: Store, name: str, within_s: float) -> Store:
    """Returns the part of a store that belongs to an edge, by a connection of its own.

    Waiting there for a peer that does not come must not block whoever opens another edge.
    """
    own: Store = answered(home.clone, within_s=within_s)  # type: ignore[attr-defined]
    return part_of(own, name)


def edge_settings(comm: Communicator) -> Settings:
    """Returns the settings of an edge: those of the process's communicator, on the CPU."""
    return replace(comm.settings, device=CPU, backend="auto", algorithm="auto", generation=0)


def as_plain(lease: Lease) -> list[Any]:
    """Returns a lease as JSON can hold it."""
    number, plan, part, num_parts = lease
    return [number, list(plan), part, num_parts]


def as_lease(plain: Sequence[Any]) -> Lease:
    """Returns the lease that `as_plain` was given."""
    number, plan, part, num_parts = plain
    return Lease(number, Plan(*plan), part, num_parts)


def _together(buffers: Sequence[Mapping[str, Tensor]], counts: Sequence[int]) -> dict[str, Tensor]:
    """Returns the buffers of an update: of floating point, the mean over its parts by samples; else the last one's."""
    names = list(dict.fromkeys(name for each in buffers for name in each))
    found: dict[str, Tensor] = {}
    for name in names:
        here = [(each[name], count) for each, count in zip(buffers, counts, strict=True) if name in each]
        last = here[-1][0]
        if last.is_floating_point():
            total = sum(count for _, count in here) or 1
            mean = torch.stack([value.double() * count for value, count in here]).sum(0) / total
            found[name] = mean.to(last.dtype)
        else:
            found[name] = last
    return found

