"""Serializes the calls of one communicator: numbers them, runs one at a time, and names the rank that breaks one.

All ranks must call the same collectives in the same order. So a communicator serves one thread at a time, because two
threads would interleave in an order that differs from rank to rank. A thread that calls while another thread's
collective is running is refused (`subgroup` gives it a communicator of its own). Calls with `async_op=True` are queued
in their order.

A call is numbered when it is made. The watchdog publishes the number, the label and the rank that the call waits for,
and a `PeerLost` carries them. After an error the communicator refuses further calls: the ranks no longer agree on which
call was the last. With `debug=True` the ranks compare what they call before every collective, so that a wrong
operation, shape or dtype is an error instead of an undefined result.

A wait for a message is queued, too, but has no number among the collectives, because only two ranks know of it.

One background thread per communicator, its `Runner`, runs asynchronous collectives one after another, in the order in
which they were called. That order is the same on every rank, and the ranks need no other agreement. Its waits release
the interpreter lock, so backward and optimizer continue meanwhile. If nothing is in flight, a synchronous call runs in
the caller's own thread, which saves two thread switches.

On a GPU with NCCL there is no such thread, because `nccl.py` enqueues collectives. Where GPU tensors travel through the
host, the thread works on its own stream, which first waits for what the caller's stream has produced so far;
`Work.wait` makes the caller's stream wait for the result. Nothing synchronises the device.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, Literal, overload

import torch
from torch import Tensor
from torch.autograd import profiler
from typing_extensions import TypeVar

from ddp.comm.host_memory import NoSharedMemory
from ddp.comm.transport.edge import Gather, TransportError
from ddp.comm.transport.shared_memory import SLICE_S
from ddp.comm.watch.call import Call, CallRecord, History, disagreement, recorded
from ddp.comm.watch.watchdog import Watchdog
from ddp.errors import CollectiveMismatch, CommunicatorBroken, ConfigError, PeerLost, safe_str
from ddp.process import gpu
from ddp.process.clock import HelperThread, now_s

CPU = torch.device("cpu")
Result = TypeVar("Result", default=Any)

LET_GO_S = 2.0  # longest wait at the end of the program for collectives in flight


class CallQueue:
    """Runs the collectives of one communicator.

    Args:
        watchdog: publishes what this rank does, and finds the rank that is missing.
        world_ranks: the ranks' numbers in the communicator that `ddp.init` made.
        device: where this rank's tensors live.
        gather: all-gather of bytes, with which the ranks compare their calls; None: they do not compare.

    Attributes:
        num_calls: the number of calls so far, which is also the number of the last one.
        error: the error that ended the communicator, if any.
        history: the last calls that have begun.
        neighbour: the rank that a collective is reported to wait for first.
        runners: `abandon` ends what is in flight on these.
    """

    def __init__(
        self, watchdog: Watchdog, rank: int, world_ranks: Sequence[int], *, device: torch.device, gather: Gather | None
    ) -> None:
        self.num_calls = 0
        self.error: BaseException | None = None
        self.history = History()
        self._num_runs = 0  # collectives so far, including those inside chains
        self._rank, self._world_ranks = rank, world_ranks
        self.neighbour = (rank + 1) % len(world_ranks)
        self._watchdog, self._gather = watchdog, gather
        self._runner = Runner(f"ddp-collectives-{rank}", device, self.history)
        self._chain_runner = Runner(f"ddp-chain-{rank}", device, self.history)  # for asynchronous calls in a chain
        self.runners = [self._runner, self._chain_runner]
        self._turn = threading.Lock()  # held while a collective runs
        self._running = Call(0, "start-up")
        self._chain: int | None = None  # the thread in which one runs
        self._has_ended = False

    def number(
        self,
        operation: str,
        op: str = "",
        tensors: Tensor | Sequence[Tensor] | None = None,
        label: str = "",
        how: tuple[object, ...] = (),
    ) -> Call:
        """Numbers a call. Returns it with its description, which is the same on every rank.

        Raises:
            CommunicatorBroken: an earlier collective failed.
        """
        self.refuse_if_broken()
        if self._chain is not None and self._is_in_chain:
            sequence, label = self._running.sequence, label or self._running.name
        else:
            sequence = self.num_calls = self.num_calls + 1
        if tensors is None:
            return Call(sequence, operation, op, name=label, how=how)
        if isinstance(tensors, Tensor):
            return Call(sequence, operation, op, tensors.shape, tensors.dtype, label, how)
        if self._gather is not None:
            how = (*how, *((list(tensor.shape), tensor.dtype) for tensor in tensors))
        totals: dict[torch.dtype, int] = {}
        for tensor in tensors:
            totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.numel()
        shape, how = (sum(totals.values()),), (*how, *totals.items())
        return Call(sequence, f"{operation} of {len(tensors)} tensors", op, shape, name=label, how=how)

    def call_number(self) -> int:
        """Returns the number of the running call, which is the same on all ranks."""
        return self._running.sequence

    def call_label(self) -> str:
        """Returns the caller's label of the running call, which other ranks may not have."""
        return self._running.name

    def refuse_if_broken(self) -> None:
        """Raises CommunicatorBroken if an earlier call failed."""
        if self.error is not None:
            raise CommunicatorBroken(f"the communicator is out of use since: {_text_of(self.error)}") from self.error

    @overload
    def run(self, call: Call, collective: Callable[[], Result], *, async_op: Literal[False] = False) -> Result: ...
    @overload
    def run(self, call: Call, collective: Callable[[], Result], *, async_op: bool) -> Result | Work[Result]: ...
    def run(self, call: Call, collective: Callable[[], Result], *, async_op: bool = False) -> Result | Work[Result]:
        """Runs a collective after those in flight: in this thread, or on the background thread.

        Returns:
            The collective's result; with `async_op` a `Work`.

        Raises:
            PeerLost: a rank did not take part within the deadline.
            CollectiveMismatch: a rank called another collective.
            CommunicatorBroken: an earlier collective failed.
        """
        in_chain = self._chain is not None and self._is_in_chain
        runner = self._chain_runner if in_chain else self._runner
        if not async_op and runner.is_idle():
            return self._run_now(call, collective, not in_chain)
        work = runner.submit(partial(self._run_now, call, collective, not in_chain), call)
        return work if async_op else work.wait()

    def run_chain(self, call: Call, chain: Callable[[], Result], *, async_op: bool = False) -> Result | Work[Result]:
        """Runs a function that calls collectives as one collective: they run in its thread, with no other in between.

        Its calls with `async_op` run in order on another thread, while the function continues. They share the number of
        the chain, because other calls may be numbered meanwhile, at another moment on each rank.
        """

        def run() -> Result:
            self._chain = threading.get_ident()
            try:
                return chain()
            finally:
                while not self._chain_runner.is_idle_within(SLICE_S):
                    pass  # until its own deadline
                self._chain_runner.is_idle()
                self._chain = None

        return self.run(call, chain if self._is_in_chain else run, async_op=async_op)

    @property
    def _is_in_chain(self) -> bool:
        return self._chain is not None and self._chain == threading.get_ident()

    def _run_now(self, call: Call, collective: Callable[[], Result], takes_turn: bool) -> Result:
        """Runs one collective in this thread; turns a failure into a PeerLost that names the culprit.

        Args:
            takes_turn: hold the lock meanwhile; False in a chain, which holds it already.
        """
        if takes_turn:
            self.refuse_if_broken()  # what was in flight may have failed since the call was made
            if not self._turn.acquire(False):
                self._refuse_second_thread(call)
        try:
            self._running, gather, record = call, None, self.history.note(call)
            if call.message is None:
                self._num_runs, gather = self._num_runs + 1, self._gather
            self._begin(call)
            if gather is not None and (difference := disagreement(gather(call.describe().encode()))):
                raise CollectiveMismatch(difference)
            in_profile = profiler._is_profiler_enabled  # on any thread
            result = recorded(call.range, collective)() if in_profile else collective()
            self._complete(record)
            if (recorder := self.history.recorder) is not None:
                recorder.ended(record)
            return result
        except TransportError as error:
            self.error = lost = self._lost(error)
            raise lost from error
        except PeerLost as lost:  # out of a subgroup that was being made, or out of a call in a chain
            if self.error is not lost:
                self.error = lost
                self._watchdog.fail(lost.reason, blames=lost.rank)
            raise
        except (ConfigError, NoSharedMemory):
            raise  # on every rank, before anything was sent
        except BaseException as error:  # also Ctrl-C: the others continue with calls that this rank has not finished
            self.error = error
            if not isinstance(error, CollectiveMismatch):
                self._watchdog.fail(f"{type(error).__name__}: {safe_str(error)}")
            raise
        finally:
            self._end()
            if takes_turn:
                self._turn.release()

    def _begin(self, call: Call) -> None:
        """Records that the call begins to wait."""
        peer, run = (self.neighbour, self._num_runs) if call.message is None else (call.message.peer, 0)
        self._watchdog.begin(call, peer, run)

    def _complete(self, record: CallRecord) -> None:
        """Records that the call has completed."""
        record.done_s = now_s()

    def _end(self) -> None:
        self._watchdog.end()

    def close(self) -> None:
        """Waits for what is in flight, and leaves the communicator."""
        self._runner.close()
        self._chain_runner.close()
        self._watchdog.leave()
        self.error = self.error or CommunicatorBroken("it was closed")

    def abandon(self, reason: str = "") -> None:
        """Ends this rank's part when it stops early, or the program ends.

        If the interpreter exits while a thread is inside one of torch's waits, the process ends by SIGABRT. So
        everything in flight is aborted first.

        Args:
            reason: why this rank stops early: the others are notified, and nothing is waited for. "": the program ends.
        """
        if reason:
            self._watchdog.fail(reason)
        self._watchdog.leave()
        self._has_ended = True
        if not all(runner.is_idle_within(0.0 if reason else LET_GO_S) for runner in self.runners):
            self._watchdog.give_up(self._rank, "the program has ended")
            for runner in self.runners:
                runner.is_idle_within(LET_GO_S)
        for runner in self.runners:
            runner.end()
        # Only its text: the error's traceback holds the loss, and its graph, by way of a replica, the communicator.
        # Python's collector cannot see this cycle, because a part of it is in C++.
        self.error = CommunicatorBroken(_text_of(self.error) if self.error else reason or "the program has ended")

    def _refuse_second_thread(self, call: Call) -> None:
        """Raises RuntimeError, because two threads of a rank would interleave differently on each rank."""
        error = RuntimeError(
            f"{call.title} began in thread {threading.current_thread().name!r} while {self._running.title} was running "
            "in another one; a communicator serves one thread at a time: give each its own communicator, "
            "comm.subgroup(range(comm.world_size))"
        )
        self.error = self.error or error
        self._watchdog.fail(f"RuntimeError: {error}")
        raise error

    def _lost(self, error: TransportError) -> PeerLost:
        """Returns the error that names the rank to blame, which the published statuses tell."""
        if self._has_ended:  # the error is never read; and no thread may be inside the store when the program ends
            raise CommunicatorBroken(str(error)) from error
        lost = self._watchdog.find_culprit(error.peer, str(error))
        if self._world_ranks[lost.rank] != lost.rank:
            lost.reason += f" (of this group; it is rank {self._world_ranks[lost.rank]} of all)"
        return lost


def _text_of(error: BaseException) -> str:
    return str(error) or type(error).__name__  # Ctrl-C has no text


# --- a collective in flight, and the thread that runs collectives ----------------------------------------------------


class Work(ABC, Generic[Result]):
    """An asynchronous collective: queued, running or complete.

    Attributes:
        done_s: when it ended.
    """

    done_s: float

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> Result:
        """Returns the collective's result once it is complete, or raises its error.

        On a GPU the current stream waits for the result; the host continues, unless the collective still runs on a
        thread. Every collective ends by its own deadline; `timeout_s` bounds this wait more tightly (TimeoutError).
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Returns True once the collective has completed or failed."""


class ThreadWork(Work[Result]):
    """A collective of a `Runner`, or one that has already ended.

    Args:
        call: names the wait in a profile.
        history: whose recorder measures the wait.

    Attributes:
        future: of its result.
        finished: on a GPU, once the host is done: the event of its end.
    """

    future: Future[Result]

    def __init__(self, device: torch.device = CPU, call: Call | None = None, history: History | None = None) -> None:
        self._device, self._call, self._history = device, call, history
        self.finished: torch.cuda.Event | None = None
        self.done_s = 0.0

    def wait(self, timeout_s: float | None = None) -> Result:
        with nullcontext() if self._history is None else self._history.waiting():
            if profiler._is_profiler_enabled and self._call is not None:
                result = recorded(self._call.wait_range, self.future.result)(timeout_s)
            else:
                result = self.future.result(timeout_s)
            if self.finished is not None:
                hold_current_stream(self.finished, result, self._device)
            return result

    def is_completed(self) -> bool:
        return self.future.done()

    def is_completed_within(self, timeout_s: float) -> bool:
        """Waits until the collective has completed or failed; returns False if it has not by then."""
        return not wait([self.future], timeout_s).not_done


def hold_current_stream(finished: torch.cuda.Event, result: object, device: torch.device) -> None:
    """Makes the device's current stream wait for a collective that has been queued on another one.

    Its result may lie in the other stream's memory, which must not be reused while this one reads.
    """
    stream = gpu.cuda.current_stream(device)
    stream.wait_event(finished)
    for each in result if isinstance(result, list) else [result]:
        if isinstance(each, Tensor):
            each.record_stream(stream)


def done(result: Result) -> ThreadWork[Result]:
    """Returns a `Work` that is already complete."""
    work = ThreadWork[Result]()
    work.future, work.done_s = Future(), now_s()
    work.future.set_result(result)
    return work


class Runner:
    """Runs collectives in order on a background thread.

    Args:
        history: whose recorder measures waits for them.
    """

    def __init__(self, name: str, device: torch.device, history: History | None = None) -> None:
        self._name, self._device, self._history = name, device, history
        self._helper: HelperThread | None = None
        self._last: ThreadWork[Any] | None = None  # the last one submitted, if it may still be running
        self._stream: torch.cuda.Stream | None = None
        self._kept: list[tuple[torch.cuda.Event, object]] = []  # tensors that the GPU may still read

    def is_idle(self) -> bool:
        """Returns True if everything submitted has ended, so that the caller may run the next one itself.

        On CUDA, it makes the caller's stream wait for the last one, because both use the same scratch memory.
        """
        if self._last is not None and self._last.is_completed():
            if self._last.finished is not None:
                hold_current_stream(self._last.finished, None, self._device)
            self._last = None
        return self._last is None

    def submit(self, collective: Callable[[], Result], call: Call | None = None) -> Work[Result]:
        """Queues a collective after everything submitted before."""
        self._helper = self._helper or HelperThread(self._name)
        inference = torch.is_inference_mode_enabled()  # of the caller, whose tensors it works on
        on_gpu = self._device.type == gpu.KIND
        produced = gpu.cuda.current_stream(self._device).record_event() if on_gpu else None
        work = ThreadWork[Result](self._device, call, self._history)

        def run() -> Result:
            stream = None
            if produced is not None:
                stream = self._stream = self._stream or gpu.cuda.Stream(self._device)
                stream.wait_event(produced)
                self._kept = [each for each in self._kept if not each[0].query()]
            with nullcontext() if stream is None else gpu.cuda.stream(stream), torch.inference_mode(inference):
                result = collective()
            work.done_s = now_s()
            if stream is not None:
                work.finished = stream.record_event()
                self._kept.append((work.finished, collective))
            return result

        work.future = self._helper.submit(run)
        self._last = work
        return work

    @property
    def thread(self) -> int | None:
        """The ident of the background thread; None before it starts."""
        return None if self._helper is None else self._helper.thread.ident

    def is_idle_within(self, timeout_s: float) -> bool:
        """Waits for everything submitted; returns False if it has not ended by then."""
        return self._last is None or self._last.is_completed_within(timeout_s)

    def close(self) -> None:
        """Ends the thread after everything queued, and waits for it."""
        helper = self._helper
        self.end()
        if helper is not None:
            helper.thread.join()

    def end(self) -> None:
        """Ends the thread after everything queued."""
        if self._helper is not None:
            self._helper.end()
            self._helper = None


# --- numbers of a device on their way to the host ---------------------------------------------------------------------


class HostCopy:
    """The numbers of some tensors as they are now, for the host: from a GPU by one asynchronous copy.

    Args:
        tensors: of any shape and type; numbers are exact up to 2⁵³.
        refuse: raises an error if a failed collective has left undefined values in them.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, refuse: Callable[[], None]) -> None:
        self._refuse, self._is_there = refuse, None
        if device.type != gpu.KIND:  # at once, because each tensor more would cost small collectives their speed
            self._known = [each.flatten().tolist() for each in tensors]
            return
        flat = torch.cat([each.detach().reshape(-1).to(device, torch.float64) for each in tensors])
        self._sizes = [each.numel() for each in tensors]
        self._numbers = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        self._numbers.copy_(flat, non_blocking=True)
        self._is_there = gpu.cuda.current_stream(device).record_event()

    def read(self) -> list[list[float]]:
        """Returns the numbers of each tensor, as a list; waits for the GPU if necessary.

        Raises:
            PeerLost, CommunicatorBroken: the collectives before it failed.
        """
        if self._is_there is None:
            return self._known
        if not self._is_there.query():
            self._is_there.synchronize()
        self._refuse()
        return [part.tolist() for part in self._numbers.split(self._sizes)]
