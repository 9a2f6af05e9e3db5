"""A worker's end of all its edges: it leases parts of steps, pulls parameters, and pushes gradients.

    join      once, and again after servers were lost
    leases    parts of steps, whose samples can be read meanwhile
    begin     waits until a part may be computed, and pulls the parameters for it
    push      gradients, loss and count of the part; and begins the next one, in one exchange with server 0

A worker holds no state that others need. If it is lost, its leases go to others; if the servers are lost, it drops its
leases, waits for them to come back, and joins again.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from ddp.comm.communicator import Communicator
from ddp.comm.meeting.rendezvous import ask_store
from ddp.comm.meeting.role import Role, how_ended
from ddp.comm.objects import broadcast_object
from ddp.data.loading.fetching import Request
from ddp.data.loading.loader import TrainLoader
from ddp.data.orders.sampler import StepPlan, TrainSampler
from ddp.errors import ConfigError, PeerLost
from ddp.gradients.totals import Totals
from ddp.policies import ParameterServer
from ddp.process.clock import Patience
from ddp.process.terminal import log
from ddp.strategies.parameter_server.edge import LOST, SERVER, WORKER, Edge, Piece, connected, failure_of
from ddp.strategies.parameter_server.ledger import Lease, as_lease, as_plain

POLL_S = 0.05  # between two checks for the servers
WAIT: Mapping[str, Any] = {"status": "wait"}


class Over(Exception):
    """The run has ended.

    Attributes:
        facts: plain values of the servers about its end.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        super().__init__("the run has ended")
        self.facts = facts


class Servers:
    """The servers of a run, as one worker sees them.

    Args:
        part: of this process.
        run_store: the part of the store in which the processes meet for this training.
        comm: of this process alone; its settings are those of the edges.
        module: the model, whose gradients are pushed, and whose parameters and buffers become the servers'.
        facts: plain values that must equal those of the servers.
    """

    def __init__(
        self,
        part: Role,
        run_store: Store,
        comm: Communicator,
        module: nn.Module,
        policy: ParameterServer,
        *,
        facts: Mapping[str, Any],
    ) -> None:
        self._part, self._comm, self._policy, self._facts = part, comm, policy, dict(facts)
        self._module, self._parameters = module, dict(module.named_parameters())
        self._run_store = run_store
        self._comms: list[Communicator] = []
        self._edges: list[Edge] = []
        self._pulled: dict[str, Tensor] = {}  # buffers as they were before the forward
        self._pushed: int | None = None  # the step of the last push
        self._begin_reply = WAIT  # to the request to begin the next part
        self.version = 0  # updates that the servers had made at the last pull

    def join(self, leave_if_asked: Callable[[], None]) -> None:
        """Connects to all servers, as soon as they are there.

        Args:
            leave_if_asked: raises Over once this process is to stop.

        Raises:
            Over: the run has ended, or this process is to stop.
            PeerLost: the store in which all meet has gone.
            ConfigError: servers are missing at the deadline, or train another model, or with other settings.
            Exception: the servers' fit has failed; the error has the class of theirs.
        """
        self.abandon("the servers were lost")
        patience = Patience(self._comm.abort_s)
        while True:
            within_s = max(1.0, patience.left_s())
            number, incarnation = ask_store(partial(self._welcomed, patience, leave_if_asked), within_s=within_s)
            try:
                for server in range(
                    self._part.num_servers
                ):  # all, because each waits for this worker, though another may refuse it
                    where = {"incarnation": incarnation, "server": server, "number": number}
                    comm = connected(self._run_store, self._comm, WORKER, **where, warn_s=self._comm.warn_s)
                    self._comms.append(comm)
                self._edges = [self._edge(comm) for comm in self._comms]
            except (*LOST, DistError):  # the latter if the store has gone, which `_welcomed` reports
                self.abandon("a server was lost")
                if not patience.left_s():
                    raise
            else:
                return

    def _welcomed(self, patience: Patience, leave_if_asked: Callable[[], None]) -> tuple[int, int]:
        """Returns this worker's number at servers that accept it, and their incarnation."""
        run_store = self._run_store
        number, incarnation = -1, -1
        try:
            while left_s := patience.left_s():
                over = json.loads(run_store.get("over")) if run_store.check(["over"]) else None
                if over is not None and number not in range(over["num_accepted"]):
                    raise Over(over)  # else the servers wait for this worker
                if error := failure_of(run_store, "server"):
                    raise error
                now = int(run_store.get("incarnation")) if run_store.check(["incarnation"]) else -1
                if now > incarnation:
                    incarnation = now
                    number = run_store.add(f"{now}/arrivals", 1) - 1
                if number >= 0 and run_store.check([f"{incarnation}/welcome/{number}"]):
                    return number, incarnation
                leave_if_asked()
                time.sleep(min(POLL_S, left_s))
        except DistError as error:
            reason = (
                "the store in which servers and workers meet has gone, and this run with it: start the servers again, "
                "with resume=auto, and then the workers"
            )
            raise PeerLost(SERVER, "unknown", 0, 0, "start-up", reason) from error
        within = f"within {patience.limit_s:g} s (comm.abort_s)"
        problem = f"no server has come {within}: start the servers first"
        if incarnation >= 0:
            how = how_ended(self._part.store, "server", 0, incarnation)
            how = how or "is silent: it was stopped, or its host is down"
            problem = f"server 0 {how}, and none has come {within}; continue it, or start all again with resume=auto"
        raise ConfigError(f"{self._part}: {problem}")

    def _edge(self, comm: Communicator) -> Edge:
        mine = {"index": self._part.index, "incarnation": self._part.incarnation, "facts": self._facts}
        broadcast_object(comm, mine, WORKER)
        reply = broadcast_object(comm, None, SERVER)
        if "refused" in reply:
            raise ConfigError(reply["refused"])
        self._take(reply["rest"])
        pieces = [Piece(*piece) for piece in reply["pieces"]]
        return Edge(comm, self._parameters, pieces, wire=self._policy.wire, hook=self._policy.hook)

    @torch.no_grad()
    def _take(self, values: Mapping[str, Tensor]) -> None:
        """Copies the servers' buffers and frozen parameters to the module."""
        here = self._parameters | dict(self._module.named_buffers())
        for name, value in values.items():
            here[name].copy_(value)

    # --- a part of a step, in the order of time -----------------------------------------------------------------------

    def leases(self, most: int) -> list[Lease]:
        """Returns further leases, so that this worker holds `most` that it has not begun; an empty list after a while.

        Raises:
            Over: the run has ended.
        """
        reply = self._request_from(0, {"what": "leases", "most": most})
        return [as_lease(each) for each in reply["leases"]]

    def begin(self, lease: Lease, *, num_ahead: int) -> list[Lease] | None:
        """Waits until a part may be computed, and pulls the parameters, unless the last push has done so.

        Args:
            num_ahead: most leases that this worker holds and has not begun.

        Returns:
            Further leases; None if this one is to be left out.

        Raises:
            Over: the run has ended.
        """
        reply, self._begin_reply = self._begin_reply, WAIT
        while reply["status"] == "wait":
            reply = self._request_from(0, {"what": "begin", **self._begin_fields(lease, num_ahead)})
        if reply["status"] == "gone":
            return None
        self.version = reply["version"]
        for server in range(1, len(self._edges)):
            while self._request_from(server, {"what": "pull", "version": self.version})["status"] == "wait":
                pass
        self._take(self._pulled | reply["buffers"])  # also undoes the changes of the last part
        self._pulled = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        return [as_lease(each) for each in reply["leases"]]

    def push(self, lease: Lease, totals: Totals, *, then: Lease | None, num_ahead: int) -> None:
        """Pushes the gradients of a part, means over its items.

        Args:
            totals: of the part.
            then: the next part, if it is known, so that `begin` needs no request to server 0.
            num_ahead: as in `begin`.

        Raises:
            Over: the run has ended.
            ConfigError: a buffer of the model has another shape than the servers'.
        """
        for name, buffer in self._module.named_buffers():
            if name not in self._pulled or self._pulled[name].shape != buffer.shape:
                raise ConfigError(
                    f"buffer {name}: has the shape {list(buffer.shape)} after a forward, but servers keep one for all "
                    "workers, as the model is made with: give it that shape, or take strategy=auto"
                )
        changed = {
            name: buffer.detach()
            for name, buffer in self._module.named_buffers()
            if not torch.equal(buffer, self._pulled[name])
        }
        request = {
            "what": "push",
            "lease": as_plain(lease),
            "loss_sum": float(totals.loss_sum),
            "num_items": float(totals.num_items),
            "buffers": changed,
            "without": [name for name, each in self._parameters.items() if each.requires_grad and each.grad is None],
        }
        # Server 0 last, because it decides: then the others have the gradients that it announces.
        for server in range(1, len(self._edges)):
            self._push(server, request | {"buffers": {}, "without": [], "then": None})
        self._pushed = lease.plan.step
        reply = self._push(0, request | self._begin_fields(then, num_ahead))
        if then is not None:
            self._begin_reply = reply
        if not reply["counts"]:
            for server in range(1, len(self._edges)):
                self._request_from(server, {"what": "forget", "key": [lease.plan.step, lease.part]})
            self._edges[0].take_back()  # a hook, which several servers do not have

    def _begin_fields(self, lease: Lease | None, most: int) -> dict[str, Any]:
        """Returns the fields of a request to begin the next part, after the update by the last push."""
        return {"then": None if lease is None else as_plain(lease), "most": most, "after": self._pushed}

    def _push(self, server: int, request: dict[str, Any]) -> dict[str, Any]:
        edge, lease = self._edges[server], request["lease"]
        edge.send_values(request)
        edge.push(f"gradients of lease {lease[0]}")
        return self._receive_reply(server)

    def _request_from(self, server: int, request: dict[str, Any]) -> dict[str, Any]:
        self._edges[server].send_values(request)
        return self._receive_reply(server)

    def _receive_reply(self, server: int) -> dict[str, Any]:
        """Returns the reply of a server, and pulls the parameters that it promises."""
        edge = self._edges[server]
        reply = edge.receive_values()
        if reply.get("status") == "now":
            edge.pull(f"update {reply['version']}, parameters")
        if (over := reply.get("over")) is not None and "failed" in over:
            raise PeerLost(SERVER, "unknown", 0, 0, "its fit", over["failed"])
        if over is not None:
            raise Over(over)
        return reply

    # --- the end -----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Disconnects from the servers."""
        for edge in self._edges:
            try:
                edge.send_values({"what": "bye"})
                edge.receive_values()
                edge.comm.close()
            except LOST:
                edge.comm.abandon("the server is gone")
        self._comms, self._edges = [], []

    def abandon(self, reason: str) -> None:
        """Gives up all edges at once."""
        for comm in self._comms:
            comm.abandon(reason)
        self._comms, self._edges, self._begin_reply, self._pulled, self._pushed = [], [], WAIT, {}, None
        log.debug("left the servers: %s", reason)


# --- The batches of leases --------------------------------------------------------------------------------------------
#
#                     this process                                       loader process, or a thread that reads ahead
#     put(leases)  →  lease, its part of the step → micro → Request   →  KeyedBatches: read, collate
#     steps()      →  lease, part, batches                            ←  batch
#
# The reader ahead takes one request after another, and there may be no further lease before the held ones are computed.
# Then it gets a request without samples, whose batch is dropped. So the reader never waits for a lease, and reads ahead
# as far as there are leases.


NOTHING = Request(0, 0, (), ())


class _Part:
    """A lease, its part of the step, the requests that were not taken yet, and the number of batches still due."""

    def __init__(self, lease: Lease, plan: StepPlan, requests: deque[Request]) -> None:
        self.lease, self.plan, self.requests, self.num_due = lease, plan, requests, 0


class LeasedLoader:
    """Yields the batches of leases, in any order of the sampler's steps.

        loader.put(leases)
        for lease, part, batches in loader.steps():
            ...                                 # skip it, if it was taken back; or compute, and put further leases

    Args:
        dataset, sampler, choices: the arguments of a `TrainLoader`, whose order defines the samples of a part.

    Attributes:
        num_ahead: most leases that are worth holding in addition to the running one.
    """

    def __init__(self, dataset: Any, sampler: TrainSampler, **choices: Any) -> None:
        self._sampler, self._loader = sampler, TrainLoader(dataset, sampler, **choices)
        self.num_ahead = max(3, self._loader.num_prefetched)
        self._lock = threading.Lock()
        self._parts = deque[_Part]()  # in the order of their leases
        self._taken = deque[_Part | None]()  # the owners of the taken requests; None: without samples
        self._batches: Iterator[Any] | None = None

    def put(self, leases: Sequence[Lease]) -> None:
        """Takes further leases."""
        seed = self._sampler.state.seed
        for lease in leases:
            step = StepPlan(lease.plan.epoch, lease.plan.position, lease.plan.size, ())
            plan = self._sampler.part_of(step, lease.part, lease.num_parts)
            with self._lock:
                self._parts.append(_Part(lease, plan, deque(self._loader.requests_of(plan, seed))))

    def steps(self) -> Iterator[tuple[Lease, StepPlan, Iterator[Any]]]:
        """Yields each lease, its part of the step, and its batches, until none is left; unread batches are skipped."""
        while self._parts:
            part = self._parts[0]
            batches = self._of(part)
            yield part.lease, part.plan, batches
            with self._lock:
                part.requests.clear()
                self._parts.popleft()
            for _ in batches:  # those that were read ahead, so that leases and batches stay in line
                pass

    @property
    def following(self) -> Lease | None:
        """Returns the lease after the one that was yielded last; None if none was put."""
        return self._parts[1].lease if len(self._parts) > 1 else None

    def _of(self, part: _Part) -> Iterator[Any]:
        """Yields the batches of the first lease."""
        while part.num_due or part.requests:
            if self._batches is None:
                self._batches = self._loader.stream(iter(self._request, None))
            batch = next(self._batches)
            if (owner := self._taken.popleft()) is not None:
                assert owner is part
                part.num_due -= 1
                yield batch

    def _request(self) -> Request:
        """Returns the next request. Called by the thread that reads ahead."""
        with self._lock:
            part = next((part for part in self._parts if part.requests), None)
            self._taken.append(part)
            if part is None:
                return NOTHING
            part.num_due += 1
            return part.requests.popleft()

    def close(self) -> None:
        """Drops all leases, and stops reading ahead. The loader can be used again."""
        self._loader.close()
        self._parts.clear()
        self._taken.clear()
        self._batches = None
