"""Collectives on GPUs, by NCCL: each rank has a GPU of its own, on which they are enqueued; the host waits for none.

    StreamQueue      gives collectives their turn on a GPU, as `call_queue.py` does elsewhere
    NcclTransport    the edges between the ranks

The thread that calls a collective enqueues the whole of it on the communicator's stream: batches of NCCL, and the
additions between them. So the order in which threads call is the order on the GPU, and all ranks must have the same.

    caller's stream      … writes x ─╮ event                           ╭ `Work.wait` …  reads x
    communicator's                   ╰ batch ─ add ─ batch ─ … ─ event ╯
    NCCL's                             ╰─────╯     ╰─────╯

Because every collective is on one stream, all may use the same scratch memory. The stream has high priority: additions
are short, and other ranks wait for them.

A thread beside it, the *lookout*, asks the events whether the GPU has come that far. It keeps what a collective reads
or writes until then, so that the memory is not reused; and it keeps the deadline, which begins when the GPU reaches
the collective. If a peer is missing it notes the error, which the next call raises, and aborts NCCL: then the GPU goes
on with numbers that mean nothing. So code that reads a result on the host asks `refuse_if_broken` before believing it.

The transport is made from torch's own object, past torch's groups: with those, one timeout holds for every operation,
waited for or not, and torch ends the process; and groups that overlap may get each other's names.

A round is one coalesced batch: posted one by one, "send, then receive" on both sides deadlocks, since NCCL runs the
operations of a pair in launch order (NVIDIA/nccl#479). The batch begins when the current stream has reached it, and
`wait` makes the current stream wait for its end. Everything travels as bytes, because NCCL lacks some of torch's types.

Note "errors". torch calls a batch complete once there is an error, and its `wait` is silent: only `exception` tells.
By itself, torch's thread would end the process then; `TORCH_NCCL_ASYNC_ERROR_HANDLING=0` leaves it to us.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ddp.comm.call_queue import LET_GO_S, CallQueue, Result, Work, done, hold_current_stream
from ddp.comm.meeting.private_store import for_torch, part_of
from ddp.comm.transport.edge import NO_DEADLINE, Gather, GiveUpCheck, Pending, Transfer, Transport, TransportError
from ddp.comm.watch.call import Call, History, Noted
from ddp.comm.watch.watchdog import Watchdog
from ddp.errors import CommunicatorBroken, PeerLost, first_line
from ddp.process import gpu
from ddp.process.clock import Patience, now_s, within
from ddp.process.memory import variable_set
from ddp.process.terminal import log

ProcessGroupNCCL: Any = getattr(dist, "ProcessGroupNCCL", None)  # None: a build of torch without NCCL
ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # note "errors"
BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"  # with which the host would wait
POLL_S = 0.002
ABORT_S = 60.0  # longest wait for NCCL to end
SLOW_S = 1.0  # a collective that takes longer is looked at more closely


class Flight:
    """A collective that has been enqueued, or is being.

    Attributes:
        peer, run: see `Wait`.
        began: the GPU has reached it.
        ended: the GPU is through with it; None while the host still enqueues it.
        keeps: what holds its tensors.
        noted: the calls in it, as the history has them.
        done_s: when it was seen to have ended.
    """

    def __init__(self, call: Call, peer: int, began: torch.cuda.Event, *keeps: object) -> None:
        self.call, self.peer, self.began, self.keeps = call, peer, began, list(keeps)
        self.run, self.done_s = 0, 0.0
        self.noted: list[Noted] = []
        self.ended: torch.cuda.Event | None = None

    def is_over(self) -> bool:
        return self.ended is not None and self.ended.query()

    def is_surely_over(self) -> bool:
        """Returns False also if the GPU has failed, so that it does not answer."""
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
        """Returns when it was seen to have ended; 0 before."""
        return self._flight.done_s

    def wait(self, timeout_s: float | None = None) -> Result:
        assert self._flight.ended is not None
        with nullcontext() if self._history.recorder is None else self._history.recorder.waiting():
            hold_current_stream(self._flight.ended, self._result, self._device)
        return self._result

    def is_completed(self) -> bool:
        return self._flight.is_over()


class StreamQueue(CallQueue):
    """Enqueues the collectives of one communicator.

    Args:
        timeout_s: longest wait of the GPU for a rank that lives.
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
        self._flight: Flight | None = None  # that is being enqueued
        self._last: Flight | None = None
        self._failure: BaseException | None = None  # found by the lookout, and not raised yet
        self._is_aborted, self._abort_once = False, threading.Lock()
        self._flights: SimpleQueue[Flight | None] = SimpleQueue()
        known = weakref.ref(self), self._flights
        self._lookout = threading.Thread(target=_look_out, args=known, name=f"ddp-lookout-{rank}", daemon=True)
        self._lookout.start()
        weakref.finalize(self, self._flights.put, None).atexit = False

    def run(self, call: Call, collective: Callable[[], Result], *, async_op: bool = False) -> Any:
        if self._is_in_chain:  # and so on the stream
            result = self._run_now(call, collective, False)
            return done(result) if async_op else result
        self.refuse_if_broken()
        with gpu.cuda.device(self._device):
            self._stream.wait_stream(gpu.cuda.current_stream(self._device))
            peer = self.neighbour if call.message is None else call.message.peer
            flight = self._flight = self._last = Flight(call, peer, self._stream.record_event(), collective)
            with gpu.cuda.stream(self._stream):
                try:
                    self._flights.put(flight)  # in here, where Ctrl-C ends it, too
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

    def _is_through(self, noted: Noted) -> None:
        """Has the lookout note it, once the GPU is through with it."""
        if self._flight is not None:
            self._flight.noted.append(noted)

    def _end(self) -> None:
        """Does nothing: it continues when the GPU does."""

    def refuse_if_broken(self) -> None:
        """Raises what the lookout has found, once; later CommunicatorBroken."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        super().refuse_if_broken()

    def _lost(self, error: TransportError) -> PeerLost:
        """Returns the lookout's finding, if there is one: the transport has failed because it was aborted."""
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
        self._lookout.join()
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
        self._lookout.join(LET_GO_S)  # a thread that is inside CUDA when the interpreter exits would abort the process

    # --- the lookout -------------------------------------------------------------------------------------------------

    def look_at(self, flight: Flight, patience: Patience) -> None:
        """Keeps the deadline of a collective that the GPU has reached, and has not ended."""
        if self.error is not None:
            self._abort()  # unless that was done, because somebody else has found the error
            return
        if culprit := self._watchdog.hopeless_because():
            self._fail(TransportError(flight.peer, f"rank {culprit[0]}: {culprit[1]}", timed_out=True))
        elif not patience.left_s():
            why = f"the GPU has waited for {self._timeout_s:g} s"
            self._fail(TransportError(flight.peer, why, timed_out=True))
        elif patience.limit_s - patience.left_s() > SLOW_S and (failure := self._transport.failure()):
            self._fail(TransportError(flight.peer, failure))

    def note(self, flight: Flight) -> Patience:
        """Notes that the GPU waits in a collective from now on. Returns the patience with it."""
        self._watchdog.begin(flight.call, flight.peer, flight.run)
        return Patience(self._timeout_s)

    def forget(self) -> None:
        """Notes that the GPU waits no more."""
        self._watchdog.end()

    def lose(self, error: BaseException) -> None:
        """Notes an error of the GPU itself."""
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


def _look_out(queue: weakref.ref[StreamQueue], flights: SimpleQueue[Flight | None]) -> None:
    """Sees one collective after the other to its end."""
    while (flight := flights.get()) is not None:
        patience: Patience | None = None
        try:
            while not flight.is_over():
                here = queue()
                if here is not None and patience is None and flight.began.query():
                    patience = here.note(flight)
                elif here is not None and patience is not None:
                    here.look_at(flight, patience)
                del here
                time.sleep(POLL_S)
        except Exception as error:  # the GPU itself has failed, say: no event ends any more
            if (here := queue()) is not None:
                here.lose(error)
                del here
        flight.done_s, here = now_s(), queue()
        flight.keeps.clear()
        if here is not None and here.error is None:
            for noted in flight.noted:
                noted.done_s = flight.done_s
        if here is not None and patience is not None:
            here.forget()
        del flight, here


# --- the transport ---------------------------------------------------------------------------------------------------


class NcclTransport(Transport):
    """Point-to-point over NCCL, on GPU tensors: one batch per round. Collective to make; the host waits meanwhile.

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
        transfers = [each for each in transfers if each[-1].numel()]  # the peer has no bytes either
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
        """Makes a communicator of NCCL's own, because NCCL knows no tags. Collective over these ranks.

        All ranks must enqueue what they do on both in one order.
        """
        store = part_of(self._store, f"channel {channel}")
        return NcclTransport(store, list(ranks).index(self.rank), len(ranks), self.device)

    def failure(self) -> str:
        """Returns the error that NCCL has met, as text; "" without one (note "errors")."""
        if self._last is None or not self._last.is_completed():
            return ""
        try:
            error = self._last.exception()
        except RuntimeError as raised:
            error = raised
        return "" if error is None else first_line(error)

    def abort(self) -> None:
        """Ends whatever is on its way, here; other ranks wait in vain."""
        self._backend.abort()

    def close(self) -> None:
        """Gives the connections back. Nothing may be on its way."""
        self._backend.shutdown()


class _Batch:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> None:
        """Makes the current stream wait; the host continues."""
        if self._work is not None:
            self._work.wait()
