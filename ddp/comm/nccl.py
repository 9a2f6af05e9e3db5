"""Collectives on GPUs, by NCCL: each rank enqueues them on its own GPU, and the host waits for none.

    StreamQueue      serializes collectives on a GPU, as `call_queue.py` does elsewhere
    NcclTransport    the edges between the ranks

The calling thread enqueues a whole collective on the communicator's stream: batches of NCCL, and the additions between
them. So the order of calls is the order on the GPU, and must be the same on all ranks.

    caller's stream      … writes x ─╮ event                           ╭ `Work.wait` …  reads x
    communicator's                   ╰ batch ─ add ─ batch ─ … ─ event ╯
    NCCL's                             ╰─────╯     ╰─────╯

Because all collectives are on one stream, they may share scratch memory. The stream has high priority: additions are
short, and other ranks wait for them.

A second thread, the *monitor*, polls the events. It holds references to what a collective reads or writes until the GPU
is done with it, so that the memory is not reused; and it enforces the deadline, which begins when the GPU reaches the
collective. If a peer is missing, it records the error, which the next call raises, and aborts NCCL: then the GPU
continues with undefined numbers. So code that reads a result on the host calls `refuse_if_broken` before using it.

The transport uses torch's backend object directly, without torch's groups: with those, one timeout holds for every
operation, waited for or not, and torch ends the process; and the names of overlapping groups may collide.

A round is one coalesced batch: posted one by one, "send, then receive" on both sides deadlocks, since NCCL runs the
operations of a pair in launch order (NVIDIA/nccl#479). The batch begins when the current stream reaches it, and `wait`
makes the current stream wait for its end. Everything travels as bytes, because NCCL lacks some of torch's types.

Note "errors". After an error, torch reports a batch as complete, and its `wait` raises nothing: only `exception`
returns the error. By default, torch's thread would then end the process; `TORCH_NCCL_ASYNC_ERROR_HANDLING=0` leaves the
error to us.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ddp.comm.call_queue import LET_GO_S, CallQueue, Result, Work, done, hold_current_stream
from ddp.comm.meeting.private_store import for_torch, part_of
from ddp.comm.transport.edge import NO_DEADLINE, Gather, GiveUpCheck, Pending, Transfer, Transport, TransportError
from ddp.comm.watch.call import Call, CallRecord, History
from ddp.comm.watch.watchdog import Watchdog
from ddp.errors import CommunicatorBroken, PeerLost, first_line
from ddp.process import gpu
from ddp.process.clock import Patience, now_s, within
from ddp.process.memory import variable_set
from ddp.process.terminal import log

ProcessGroupNCCL: Any = getattr(dist, "ProcessGroupNCCL", None)  # None: a build of torch without NCCL
ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # note "errors"
BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"  # would make the host wait
POLL_S = 0.002
ABORT_S = 60.0  # longest wait for NCCL to shut down
SLOW_S = 1.0  # after this, a collective is checked for NCCL's errors


class Flight:
    """A collective that has been enqueued, or is being enqueued.

    Attributes:
        peer, run: see `Wait`.
        began: the GPU has reached it.
        ended: the GPU has completed it; None while the host still enqueues it.
        keeps: objects that hold its tensors.
        records: of the calls in it, which the history has, too.
        done_s: when the monitor saw that it had ended.
    """

    def __init__(self, call: Call, peer: int, began: torch.cuda.Event, *keeps: object) -> None:
        self.call, self.peer, self.began, self.keeps = call, peer, began, list(keeps)
        self.run, self.done_s = 0, 0.0
        self.records: list[CallRecord] = []
        self.ended: torch.cuda.Event | None = None

    def is_over(self) -> bool:
        return self.ended is not None and self.ended.query()

    def is_surely_over(self) -> bool:
        """Returns True if it has ended; False also if the GPU has failed."""
        try:
            return self.is_over()
        except RuntimeError:
            return False


class StreamWork(Work[Result]):
    """A collective that has been enqueued. `wait` makes the caller's stream wait for it, and returns at once."""

    def __init__(self, flight: Flight, result: Result, device: torch.device, history: History) -> None:
        self._flight, self._result, self._device, self._history = flight, result, device, history

    @property
    def done_s(self) -> float:  # type: ignore[override]
        """Returns when the monitor saw that it had ended; 0 before."""
        return self._flight.done_s

    def wait(self, timeout_s: float | None = None) -> Result:
        assert self._flight.ended is not None
        with self._history.waiting():
            hold_current_stream(self._flight.ended, self._result, self._device)
        return self._result

    def is_completed(self) -> bool:
        return self._flight.is_over()


class StreamQueue(CallQueue):
    """Enqueues the collectives of one communicator.

    Args:
        timeout_s: longest wait of the GPU for a rank that is alive.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        rank: int,
        world_ranks: Sequence[int],
        *,
        transport: NcclTransport,
        gather: Gather | None,
        timeout_s: float,
    ) -> None:
        super().__init__(watchdog, rank, world_ranks, device=transport.device, gather=gather)
        self._transport, self._device, self._timeout_s = transport, transport.device, timeout_s
        self._stream = gpu.cuda.Stream(self._device, priority=-1)
        self._flight: Flight | None = None  # the one that is being enqueued
        self._last: Flight | None = None
        self._failure: BaseException | None = None  # found by the monitor, and not raised yet
        self._is_aborted, self._abort_once = False, threading.Lock()
        self._flights: SimpleQueue[Flight | None] = SimpleQueue()
        known = weakref.ref(self), self._flights
        self._monitor = threading.Thread(target=_watch_flights, args=known, name=f"ddp-monitor-{rank}", daemon=True)
        self._monitor.start()
        weakref.finalize(self, self._flights.put, None).atexit = False

    def run(self, call: Call, collective: Callable[[], Result], *, async_op: bool = False) -> Any:
        if self._is_in_chain:  # which is on the stream
            result = self._run_now(call, collective, False)
            return done(result) if async_op else result
        self.refuse_if_broken()
        with gpu.cuda.device(self._device):
            self._stream.wait_stream(gpu.cuda.current_stream(self._device))
            peer = self.neighbour if call.message is None else call.message.peer
            flight = self._flight = self._last = Flight(call, peer, self._stream.record_event(), collective)
            with gpu.cuda.stream(self._stream):
                try:
                    self._flights.put(flight)  # inside the `try`, so that Ctrl-C is handled, too
                    result = self._run_now(call, collective, True)
                    flight.keeps.append(result)
                except BaseException:
                    if self.error is not None:
                        self._abort()
                    raise
                finally:
                    flight.ended = self._stream.record_event()
        work = StreamWork(flight, result, self._device, self.history)
        return work if async_op else work.wait()

    def _begin(self, call: Call) -> None:
        if self._flight is not None and call.message is None:
            self._flight.run = self._num_runs

    def _complete(self, record: CallRecord) -> None:
        """Lets the monitor record the end, once the GPU has completed the call."""
        if self._flight is not None:
            self._flight.records.append(record)

    def _end(self) -> None:
        """Does nothing, because the wait ends on the GPU."""

    def refuse_if_broken(self) -> None:
        """Raises the monitor's error, once; later CommunicatorBroken."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        super().refuse_if_broken()

    def _lost(self, error: TransportError) -> PeerLost:
        """Returns the monitor's error, if any, because then the transport has failed because it was aborted."""
        failure, self._failure = self._failure, None
        return failure if isinstance(failure, PeerLost) else super()._lost(error)

    def _abort(self) -> None:
        with self._abort_once:
            is_first, self._is_aborted = not self._is_aborted, True
        if is_first:
            with suppress(TimeoutError):
                within(ABORT_S, self._transport.abort)

    def close(self) -> None:
        self._flights.put(None)
        self._monitor.join()
        if self._failure is not None:
            log.error("%s", self._failure)
        if self.error is None:
            with suppress(TimeoutError):
                within(ABORT_S, self._transport.close)
        super().close()

    def abandon(self, reason: str = "") -> None:
        patience, last = Patience(0.0 if reason else LET_GO_S), self._last
        while last is not None and not last.is_surely_over() and self.error is None and patience.left_s():
            time.sleep(POLL_S)
        is_over = last is None or last.is_surely_over()
        if self._failure is not None:
            log.error("%s", self._failure)
        super().abandon(reason)
        if not is_over:
            self._abort()
        self._flights.put(None)
        self._monitor.join(LET_GO_S)  # a thread that is inside CUDA when the interpreter exits would abort the process

    # --- the monitor -------------------------------------------------------------------------------------------------

    def check_deadline(self, flight: Flight, patience: Patience) -> None:
        """Enforces the deadline of a collective that the GPU has reached, but not completed."""
        if self.error is not None:
            self._abort()  # if the error was found elsewhere
            return
        if culprit := self._watchdog.hopeless_because():
            self._fail(TransportError(flight.peer, f"rank {culprit[0]}: {culprit[1]}", timed_out=True))
        elif not patience.left_s():
            why = f"the GPU has waited for {self._timeout_s:g} s"
            self._fail(TransportError(flight.peer, why, timed_out=True))
        elif patience.limit_s - patience.left_s() > SLOW_S and (failure := self._transport.failure()):
            self._fail(TransportError(flight.peer, failure))

    def begin_wait(self, flight: Flight) -> Patience:
        """Records that the GPU begins to wait in a collective. Returns the deadline of the wait."""
        self._watchdog.begin(flight.call, flight.peer, flight.run)
        return Patience(self._timeout_s)

    def end_wait(self) -> None:
        """Records that the GPU no longer waits."""
        self._watchdog.end()

    def fail(self, error: BaseException) -> None:
        """Records an error of the GPU itself."""
        self.error = self.error or error
        self._failure = self._failure or error
        self._watchdog.fail(f"{type(error).__name__}: {first_line(error)}")
        self._abort()

    def _fail(self, error: TransportError) -> None:
        try:
            lost = super()._lost(error)
            self.error = self._failure = lost
            self._watchdog.give_up(lost.rank, lost.reason)
        except CommunicatorBroken as broken:  # because the program ends
            self.error = broken
        self._abort()


def _watch_flights(queue: weakref.ref[StreamQueue], flights: SimpleQueue[Flight | None]) -> None:
    """Watches one collective after another until its end."""
    while (flight := flights.get()) is not None:
        patience: Patience | None = None
        try:
            while not flight.is_over():
                here = queue()
                if here is not None and patience is None and flight.began.query():
                    patience = here.begin_wait(flight)
                elif here is not None and patience is not None:
                    here.check_deadline(flight, patience)
                del here
                time.sleep(POLL_S)
        except Exception as error:  # such as a failure of the GPU: no event completes any more
            if (here := queue()) is not None:
                here.fail(error)
                del here
        flight.done_s, here = now_s(), queue()
        flight.keeps.clear()
        if here is not None and here.error is None:
            for record in flight.records:
                record.done_s = flight.done_s
        if here is not None and patience is not None:
            here.end_wait()
        del flight, here


# --- the transport ---------------------------------------------------------------------------------------------------


class NcclTransport(Transport):
    """Point-to-point over NCCL, on GPU tensors: one batch per round. Its construction is collective and blocks the
    host.

    Args:
        store: of these ranks alone, and of this transport.
        device: this rank's.

    Raises:
        RuntimeError: NCCL could not connect the ranks.
    """

    has_tags = False

    def __init__(self, store: Store, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._store, self._last = store, None
        options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = NO_DEADLINE
        with variable_set(ERRORS, "0"), variable_set(BLOCKING, "0"), gpu.cuda.device(device):
            self._backend = ProcessGroupNCCL(for_torch(store), rank, world_size, options)
            self._backend.eager_connect_single_device(device)
            self._meet_all()

    def _meet_all(self) -> None:
        """Exchanges a byte with every rank, because the first exchange of a pair connects it, and blocks the host."""
        mine, theirs = torch.zeros(2, dtype=torch.uint8, device=self.device).split(1)
        for distance in range(1, self.world_size):
            ahead, behind = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            self.post([Transfer(ahead, mine)], [Transfer(behind, theirs)]).wait(0)
        gpu.cuda.current_stream(self.device).synchronize()

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        backend = self._backend
        transfers = [(backend.recv, *each) for each in receives] + [(backend.send, *each) for each in sends]
        transfers = [each for each in transfers if each[-1].numel()]  # the peer skips empty transfers, too
        if not transfers:
            return _Batch(None)
        try:
            backend._start_coalescing()
            for operation, peer, data in transfers:
                operation([data.view(torch.uint8)], peer, 0)
            self._last = backend._end_coalescing()
        except RuntimeError as error:
            raise TransportError(transfers[0][1], first_line(error)) from error
        return _Batch(self._last)

    def among(self, ranks: Sequence[int], channel: int, hopeless_because: GiveUpCheck) -> NcclTransport:
        """Makes another NCCL communicator, because NCCL has no tags. Collective over these ranks.

        All ranks must enqueue the work of both in the same order.
        """
        store = part_of(self._store, f"channel {channel}")
        return NcclTransport(store, list(ranks).index(self.rank), len(ranks), self.device)

    def failure(self) -> str:
        """Returns NCCL's error as text; "" without one (note "errors")."""
        if self._last is None or not self._last.is_completed():
            return ""
        try:
            error = self._last.exception()
        except RuntimeError as raised:
            error = raised
        return "" if error is None else first_line(error)

    def abort(self) -> None:
        """Ends everything in flight on this rank; other ranks keep waiting."""
        self._backend.abort()

    def close(self) -> None:
        """Closes the connections. Nothing may be in flight."""
        self._backend.shutdown()


class _Batch:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> None:
        """Makes the current stream wait; the host continues."""
        if self._work is not None:
            self._work.wait()
