"""Accepts workers as they connect, and answers their requests: a thread for each.

| request | server 0                                          | the other servers, which hold other pieces   |
|---------|---------------------------------------------------|----------------------------------------------|
| leases  | parts of steps, for the worker to read ahead      |                                              |
| begin   | replies if it may compute now; then a pull        | "pull", once they have made as many updates  |
| push    | gradients, loss, count; replies if they count;    | gradients, until server 0 announces an       |
|         | and begin, if the worker has its next part        | update with them                             |
| forget  |                                                   | the last push does not count                 |
| bye     | the worker leaves                                 | the same                                     |

Every request is answered within `REPLY_S`, if only by "wait". So a waiting worker never considers the server lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from ddp.comm.communicator import Communicator
from ddp.comm.meeting.role import Role, how_ended
from ddp.comm.objects import broadcast_object
from ddp.errors import PeerLost, first_line, one_line, safe_str
from ddp.policies import ParameterServer
from ddp.process.clock import Patience, now_s
from ddp.process.terminal import log
from ddp.replica.replica import Replica
from ddp.strategies.parameter_server.edge import LOST, SERVER, WORKER, Edge, Piece, connected
from ddp.strategies.parameter_server.ledger import Lease, Ledger, as_lease, as_plain

REPLY_S = 2.0  # unless deadlines are short
ARRIVALS_S = 0.2  # between two checks for new workers


class WorkerThreads:
    """Threads that serve workers until the run is over.

    Args:
        part: of this process.
        run_store: the part of the store in which the processes meet for this training.
        model: its parameters are served.
        pieces: the parts of them that this server holds.
        facts: plain values that must equal those of each worker.
        shared: with the main thread.

    Attributes:
        reply_s: longest time that a request waits for its reply.
    """

    def __init__(
        self,
        part: Role,
        run_store: Store,
        model: Replica,
        pieces: Sequence[Piece],
        policy: ParameterServer,
        facts: Mapping[str, Any],
        shared: Shared,
    ) -> None:
        self._part, self._run_store, self._model, self._policy = part, run_store, model, policy
        self._pieces, self._facts, self._shared = pieces, dict(facts), shared
        self._parameters = dict(model.module.named_parameters())
        self.reply_s = min(REPLY_S, model.comm.abort_s / 4)
        self._threads: dict[int, threading.Thread] = {}  # by the worker's number; the acceptor forgets those that ended
        self._comms: dict[int, Communicator] = {}  # by the same number
        self._refusals: dict[tuple[Any, Any], str] = {}  # why workers are refused, by index and incarnation
        self._num_accepted = 0
        self._acceptor = threading.Thread(target=self._accept_workers, name="ddp-acceptor", daemon=True)
        self._acceptor.start()

    def close(self, within_s: float) -> int:
        """Accepts no more workers, once `shared.over` is set; returns how many have been accepted."""
        self._acceptor.join(within_s)
        return self._num_accepted

    def end(self, within_s: float) -> None:
        """Waits until workers have learned that the run is over (`shared.over`), and ends all threads.

        A thread that still releases Gloo's objects when the interpreter exits would abort the process.
        """
        until_s = now_s() + within_s
        for thread in self._threads.values():
            thread.join(max(0.0, until_s - now_s()))
        for comm in list(self._comms.values()):  # of workers that send no further request, so that their threads end
            comm.abandon("the run is over")
        for thread in self._threads.values():
            thread.join(1.0)

    def _accept_workers(self) -> None:
        while self._shared.over is None:
            self._threads = {number: thread for number, thread in self._threads.items() if thread.is_alive()}
            try:
                self.accept(self._run_store.add(f"{self._part.incarnation}/arrivals", 0))
            except (DistError, OSError) as error:  # then no worker can connect any more
                log.warning("the store does not answer, so that no further worker can connect: %s", first_line(error))
                return
            time.sleep(ARRIVALS_S)

    def accept(self, num_arrivals: int) -> None:
        """Accepts and serves workers up to this number of arrivals."""
        for number in range(self._num_accepted, num_arrivals):
            name = f"ddp-worker-{number}"
            self._threads[number] = threading.Thread(target=self._serve_worker, args=(number,), name=name, daemon=True)
            self._threads[number].start()
            if self._part.index == 0:
                self._run_store.set(f"{self._part.incarnation}/welcome/{number}", "")
        self._num_accepted = num_arrivals

    # --- one worker --------------------------------------------------------------------------------------------------

    def _serve_worker(self, number: int) -> None:
        """Serves one worker, from its arrival until it is gone."""
        mine, shared = self._part, self._shared
        who: Mapping[str, Any] | None = None  # the worker, once it is served
        odd = ""  # why it is refused from now on
        try:
            where = {"incarnation": mine.incarnation, "server": mine.index, "number": number}
            comm = connected(self._run_store, self._model.comm, SERVER, **where, warn_s=1e9)
            self._comms[number] = comm
            first = broadcast_object(comm, None, WORKER)
            problem = self._refusals.get((first["index"], first["incarnation"]), "") or self._mismatch(first["facts"])
            if problem:
                broadcast_object(comm, {"refused": problem}, SERVER)
                return
            rest = {} if mine.index else self._unpulled()
            broadcast_object(comm, {"pieces": list(map(tuple, self._pieces)), "rest": rest}, SERVER)
            edge = Edge(comm, self._parameters, self._pieces, wire=self._policy.wire, hook=self._policy.hook)
            with shared.changed:
                shared.indices[number] = int(first["index"])
                shared.num_here += 1
            who = first
            while self._serve(edge, number):
                pass
        except (*LOST, DistError) as error:
            if shared.over is None and who is not None and mine.index == 0:
                how = how_ended(mine.store, "worker", who["index"], who["incarnation"])
                how = how or f"is gone ({error.reason if isinstance(error, PeerLost) else safe_str(error)})"
                log.warning("worker %d %s: its leases go to others", who["index"], how)
        except Exception as error:
            if shared.error is None:  # else it comes from the user's order of samples
                odd = f"server {mine.index} cannot use what this worker has sent ({one_line(error)})"
                log.warning("a worker is left out: %s", odd)
            if odd and who is not None:
                self._refusals[who["index"], who["incarnation"]] = f"{odd}: give servers and workers the same program"
        finally:
            with shared.changed:
                if mine.index == 0:
                    shared.ledger.lost(number)
                if who is not None:
                    shared.num_here -= 1
                    shared.empty_since_s = now_s()
                shared.notify()
            gone = self._comms.pop(number, None)
            if gone is not None:
                with suppress(Exception):
                    gone.abandon(odd or "the other end is gone") if odd or gone.is_broken else gone.close()

    def _mismatch(self, facts: Mapping[str, Any]) -> str:
        """Returns the differences between a worker and the servers, as text; "" for none."""
        for name, ours in self._facts.items():
            if facts.get(name) != ours:
                return f"{name} is {facts.get(name)} at the worker and {ours} at the servers: give both the same"
        return ""

    def _unpulled(self) -> dict[str, Tensor]:
        """Returns the tensors that no pull sends, except changed buffers: all buffers and frozen parameters."""
        frozen = {name: each.detach() for name, each in self._parameters.items() if not each.requires_grad}
        return frozen | dict(self._model.module.named_buffers())

    def _serve(self, edge: Edge, number: int) -> bool:
        """Answers one request. Returns False after the last one."""
        request, shared = edge.receive_values(), self._shared
        match request["what"]:
            case "bye":
                edge.send_values({})
                return False
            case "push":
                counts = self._take_push(edge, number, request)
                begun = {} if request["then"] is None else self._begin(edge, number, request)
                self._reply(edge, {"counts": counts} | begun)
            case "forget":
                with shared.changed:
                    shared.pushed.pop((*request["key"], number), None)
                edge.send_values({})
            case "leases":
                self._reply(edge, self._leases(number, request["most"]))
            case _:
                self._reply(edge, self._begin(edge, number, request))
        return True

    def _reply(self, edge: Edge, reply: dict[str, Any]) -> None:
        """Sends a reply, and the parameters if it promises them."""
        edge.send_values(reply if self._shared.over is None else reply | {"over": self._shared.over})
        if reply.get("status") == "now":
            edge.pull(f"update {reply['version']}, parameters")

    def _leases(self, number: int, most: int) -> dict[str, Any]:
        """Returns leases, as soon as there are some; an empty list after a while."""
        shared = self._shared
        for _ in self._attempts():
            with shared.changed:
                if granted := shared.ledger.grant(number, most=most, now_s=now_s()):
                    shared.notify()  # because leases may have been taken back from others
                    return {"leases": [as_plain(lease) for lease in granted]}
        return {"leases": []}

    def _begin(self, edge: Edge, number: int, request: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the reply to a worker that is to compute its next part: "now", "gone", or after a while "wait"."""
        for left_s in self._attempts():
            if self._shared.parameters_lock.acquire(timeout=left_s):
                try:
                    reply = self._try_begin(edge, number, request)
                finally:
                    self._shared.parameters_lock.release()
                if reply["status"] != "wait":
                    return reply
        return {"status": "wait"}

    def _attempts(self) -> Iterator[float]:
        """Yields the seconds left to answer a request, again after each change, until the deadline."""
        patience, shared = Patience(self.reply_s), self._shared
        while shared.over is None and (left_s := patience.left_s()):
            num_changes = shared.num_changes
            yield left_s
            with shared.changed:
                shared.wait_for_change(num_changes, patience.left_s())

    def _try_begin(self, edge: Edge, number: int, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answers a request to begin, and copies the parameters if it is "now"; with `parameters_lock` held."""
        shared = self._shared
        leases: list[Lease] = []
        with shared.changed:
            if self._part.index:
                status = "now" if shared.version >= request["version"] else "wait"
            elif shared.ledger.is_complete(request["after"]):  # until the parameters include the worker's last push
                status = "wait"
            else:
                status = shared.ledger.begin(number, as_lease(request["then"]), now_s=now_s())
                if status == "now":
                    leases = shared.ledger.grant(number, most=request["most"], now_s=now_s())
            if status == "gone":  # and other leases with it, for which workers may wait
                shared.notify()
        if status != "now":
            return {"status": status}
        edge.load()
        return {
            "status": status,
            "version": shared.version,
            "buffers": dict(shared.buffers),
            "leases": [as_plain(each) for each in leases],
        }

    def _take_push(self, edge: Edge, number: int, request: Mapping[str, Any]) -> bool:
        """Takes the gradients of a part. Returns True if they count."""
        lease, shared = as_lease(request["lease"]), self._shared
        step, part = lease.plan.step, lease.part
        gradients = edge.receive_gradients(f"step {step}, gradients of part {part}")
        buffers, without = dict(request["buffers"]), list(map(str, request["without"]))
        if odd := [name for name, each in buffers.items() if each.shape != self._model.module.get_buffer(name).shape]:
            raise ValueError(f"buffers of another shape: {', '.join(odd)}")
        push = Push(gradients, float(request["loss_sum"]), float(request["num_items"]), buffers, without)
        with shared.changed:
            counts = bool(self._part.index) or shared.ledger.returned(number, lease, now_s=now_s())
            if counts:
                shared.pushed[step, part, number] = push
            shared.notify()
        if not counts:
            edge.take_back()
        return counts


# --- The state that the threads of a server share
# -------------------------------------------------------------------------
#
# Note "two locks". `parameters_lock` guards parameters and buffers. The main thread holds it while it changes them,
# evaluates or saves, and frees it while it waits for an update: a pull takes it, and so never sends half an update.
# `changed` guards the rest where it is written, and is held only briefly. A thread that takes both takes
# `parameters_lock` first.


class Push(NamedTuple):
    """The return of a worker for a part of a step.

    Attributes:
        gradients: by piece of this server, the mean over the part's items, [numel].
        loss_sum, num_items: of the part.
        buffers: those of the model that have changed, by name.
        without: names of the parameters that got no gradient.
    """

    gradients: Mapping[Piece, Tensor]
    loss_sum: float
    num_items: float
    buffers: Mapping[str, Tensor]
    without: Sequence[str]


class Shared:
    """The state that the threads of a server share.

    Args:
        ledger: of server 0; on other servers it stays empty.

    Attributes:
        version: updates that are made.
        pushed: pushes that are in no update yet, by step, part and worker.
        buffers: those of the model that workers have changed, by name.
        indices: of the connected workers, by their unique numbers.
        num_here: workers that are connected.
        empty_since_s: since when no worker is connected.
        over: plain values for workers about the run's end, once it has ended.
        error: of a thread, for the main thread.
        num_changes: number of calls of `notify`.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.version = ledger, ledger.version
        self.pushed: dict[tuple[int, int, int], Push] = {}
        self.buffers: dict[str, Tensor] = {}
        self.indices: dict[int, int] = {}
        self.num_here, self.empty_since_s = 0, now_s()
        self.over: dict[str, Any] | None = None
        self.error: BaseException | None = None
        self.num_changes = 0
        self.changed, self.parameters_lock = threading.Condition(), threading.Lock()

    def notify(self) -> None:
        """Wakes all waiting threads; with `changed` held."""
        self.num_changes += 1
        self.changed.notify_all()

    def wait_for_change(self, num_changes: int, limit_s: float) -> None:
        """Waits until there have been more changes than these, or a worker is late; with `changed` held."""
        if self.num_changes == num_changes:
            late_s = self.ledger.next_late_s(now_s())
            self.changed.wait(limit_s if late_s is None else min(limit_s, late_s))
