"""Gives calls of one communicator their turn: numbers them, runs one at a time, and blames a rank that breaks one.

All ranks must call the same collectives in the same order. So a communicator serves one thread at a time, because two
threads would take turns in an order that differs from rank to rank. A thread that calls while another thread's
collective is running is refused (`subgroup` gives it a communicator of its own). Calls with `async_op=True` are queued
in their order.

A call is numbered when it is made. The number, its label and whom it waits for are what the watchdog publishes, and
what a `PeerLost` carries. After an error the communicator refuses further calls: the ranks no longer agree on what came
last. With `debug=True` the ranks compare what they call before every collective, so that a wrong operation, shape or
dtype is reported, where otherwise the result would be undefined.

A wait for a message takes its turn, too, but has no number among the collectives, because only two ranks know of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar, overload

import torch
from torch import Tensor
from torch.autograd import profiler

from ddp.comm.host_memory import NoSharedMemory
from ddp.comm.transport.edge import Gather, TransportError
from ddp.comm.transport.shared_memory import SLICE_S
from ddp.comm.watch.call import Call, History, Noted, disagreement, recorded
from ddp.comm.watch.watchdog import Watchdog
from ddp.comm.work import Runner, Work
from ddp.errors import CollectiveMismatch, CommunicatorBroken, ConfigError, PeerLost, safe_str
from ddp.process.clock import Patience, now_s

Result = TypeVar("Result")

LET_GO_S = 2.0  # time for what is still in flight when the program ends


class CallQueue:
    """Runs the collectives of one communicator.

    Args:
        watchdog: is told what this rank does, and says who is missing.
        world_ranks: what the ranks are called in the communicator that `ddp.init` made.
        device: where this rank's tensors live.
        gather: all-gather of bytes, by which the ranks compare their calls; None: they do not.

    Attributes:
        num_calls: the number of calls so far, which is also the number of the last one.
        error: what ended the communicator, if anything has.
        history: the last calls that have begun.
        neighbour: the rank that a collective is said to wait for first.
        runners: what is in flight on these ends in `abandon`.
    """

    def __init__(
        self, watchdog: Watchdog, rank: int, world_ranks: Sequence[int], *, device: torch.device, gather: Gather | None
    ) -> None:
        self.num_calls = 0
        self.error: BaseException | None = None
        self.history = History()
        self._num_runs = 0  # collectives so far, with each one inside of a chain
        self._rank, self._world_ranks = rank, world_ranks
        self.neighbour = (rank + 1) % len(world_ranks)
        self._watchdog, self._gather = watchdog, gather
        self._runner = Runner(f"ddp-collectives-{rank}", device, self.history)
        self._beside = Runner(f"ddp-chain-{rank}", device, self.history)  # for what a chain does not wait for
        self.runners = [self._runner, self._beside]
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
        """Numbers a call, and returns it with its description, which is the same on every rank.

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

    def refuse_if_broken(self) -> None:
        """Raises CommunicatorBroken if an earlier call failed."""
        if self.error is not None:
            raise CommunicatorBroken(f"the communicator is out of use since: {_words(self.error)}") from self.error

    @overload
    def run(self, call: Call, collective: Callable[[], Result], *, async_op: Literal[False] = False) -> Result: ...
    @overload
    def run(self, call: Call, collective: Callable[[], Result], *, async_op: bool) -> Result | Work[Result]: ...
    def run(self, call: Call, collective: Callable[[], Result], *, async_op: bool = False) -> Result | Work[Result]:
        """Runs a collective now, or on the background thread: behind what is in flight.

        Returns:
            What the collective returns; with `async_op` a `Work`.

        Raises:
            PeerLost: a rank did not take part within the deadline.
            CollectiveMismatch: a rank called another collective.
            CommunicatorBroken: an earlier collective failed.
        """
        in_chain = self._chain is not None and self._is_in_chain
        runner = self._beside if in_chain else self._runner
        if not async_op and runner.is_idle():
            return self._run_now(call, collective, not in_chain)
        work = runner.submit(partial(self._run_now, call, collective, not in_chain), call)
        return work if async_op else work.wait()

    def run_chain(self, call: Call, chain: Callable[[], Result], *, async_op: bool = False) -> Result | Work[Result]:
        """Runs a function that calls collectives, as one of them: they run in its thread, with no other in between.

        With `async_op` they run on another thread, in their order, while the function continues, until they have ended.
        They have its number, because other calls may be numbered meanwhile, at another moment on each rank.
        """

        def run() -> Result:
            self._chain = threading.get_ident()
            try:
                return chain()
            finally:
                while not self._beside.is_idle_within(SLICE_S):
                    pass  # until its own deadline
                self._beside.is_idle()
                self._chain = None

        return self.run(call, chain if self._is_in_chain else run, async_op=async_op)

    @property
    def _is_in_chain(self) -> bool:
        return self._chain is not None and self._chain == threading.get_ident()

    def _run_now(self, call: Call, collective: Callable[[], Result], takes_turn: bool) -> Result:
        """Runs one collective in this thread; a failure becomes a PeerLost with the culprit's name.

        Args:
            takes_turn: no other one may run meanwhile; False in a chain, which has the turn.
        """
        if takes_turn:
            self.refuse_if_broken()  # what was in flight may have failed since the call was made
            if not self._turn.acquire(False):
                self._refuse_second_thread(call)
        try:
            self._running, gather, noted = call, None, self.history.note(call)
            if call.message is None:
                self._num_runs, gather = self._num_runs + 1, self._gather
            self._begin(call)
            if gather is not None and (difference := disagreement(gather(call.describe().encode()))):
                raise CollectiveMismatch(difference)
            in_profile = profiler._is_profiler_enabled  # on any thread
            result = recorded(call.range, collective) if in_profile else collective()
            self._is_through(noted)
            if (recorder := self.history.recorder) is not None:
                recorder.ended(noted)
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
        except BaseException as error:  # also Ctrl-C: the others go on to calls that this rank has not finished
            self.error = error
            if not isinstance(error, CollectiveMismatch):
                self._watchdog.fail(f"{type(error).__name__}: {safe_str(error)}")
            raise
        finally:
            self._end()
            if takes_turn:
                self._turn.release()

    def _begin(self, call: Call) -> None:
        """Notes that the call waits from now on."""
        peer, run = (self.neighbour, self._num_runs) if call.message is None else (call.message.peer, 0)
        self._watchdog.begin(call, peer, run)

    def _is_through(self, noted: Noted) -> None:
        """Notes that the call has ended well."""
        noted.done_s = now_s()

    def _end(self) -> None:
        self._watchdog.end()

    def close(self) -> None:
        """Ends after what is in flight, and says goodbye."""
        self._runner.close()
        self._beside.close()
        self._watchdog.leave()
        self.error = self.error or CommunicatorBroken("it was closed")

    def abandon(self, reason: str = "") -> None:
        """Ends this rank's part when it stops early, or the program ends.

        If the interpreter exits while a thread is inside one of torch's waits, the process ends by SIGABRT. So whatever
        is still in flight is broken off first.

        Args:
            reason: why this rank stops early: the others are told, and nothing is waited for. "": the program ends.
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
        # Its words alone: an error's traceback holds the loss, and its graph, by way of a replica, the communicator.
        # Python's collector does not see such a circle, because one part of it is in C++.
        self.error = CommunicatorBroken(_words(self.error) if self.error else reason or "the program has ended")

    def _refuse_second_thread(self, call: Call) -> None:
        """Raises RuntimeError, because two threads of a rank would take turns in an order that other ranks lack."""
        error = RuntimeError(
            f"{call.title} began in thread {threading.current_thread().name!r} while {self._running.title} was running "
            "in another one; a communicator serves one thread at a time: give each its own communicator, "
            "comm.subgroup(range(comm.world_size))"
        )
        self.error = self.error or error
        self._watchdog.fail(f"RuntimeError: {error}")
        raise error

    def _lost(self, error: TransportError) -> PeerLost:
        """Returns the error that names the rank to blame, by what the ranks publish about themselves."""
        if self._has_ended:  # it is never read; and a thread must not be inside the store when the program ends
            raise CommunicatorBroken(str(error)) from error
        lost = self._watchdog.find_culprit(error.peer, str(error))
        if self._world_ranks[lost.rank] != lost.rank:
            lost.reason += f" (of this group; it is rank {self._world_ranks[lost.rank]} of all)"
        return lost


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__  # Ctrl-C has no text


class Peers:
    """Waits for what the other ranks do by other means than collectives: with their numbers, deadlines and blame.

    Args:
        timeout_s: longest wait for a rank that lives.
    """

    def __init__(self, queue: CallQueue, watchdog: Watchdog, rank: int, *, timeout_s: float) -> None:
        self._queue, self._watchdog, self._rank, self._timeout_s = queue, watchdog, rank, timeout_s

    def wait_for_rank_zero(self, label: str) -> None:
        """Returns once rank 0 has called it too, however long that takes while rank 0 lives.

        Raises:
            PeerLost: rank 0 failed, left, or shows no sign of life.
        """
        call = self._queue.number("wait_for_rank_zero", label=label)
        try:
            if self._rank == 0:
                self._watchdog.publish(f"passed/{call.sequence}", "")
            else:
                self._watchdog.wait_for_word(f"passed/{call.sequence}", 0, call)
        except PeerLost as lost:
            self._queue.error = lost
            raise

    def wait_for(self, wait: Callable[[float], bool], *, label: str) -> None:
        """Waits for what the ranks do by other means: a future of torch.distributed, say. Every rank calls it.

        Args:
            wait: waits for the given seconds at most; returns True if the wait is over. It is called until it is.

        Raises:
            PeerLost: it was not there within the deadline.
        """
        neighbour = self._queue.neighbour

        def until_there() -> None:
            patience = Patience(self._timeout_s)
            while not wait(min(patience.left_s(), SLICE_S)):
                if culprit := self._watchdog.hopeless_because():
                    raise TransportError(neighbour, f"rank {culprit[0]}: {culprit[1]}", timed_out=True)
                if not patience.left_s():
                    raise TransportError(neighbour, f"nothing came for {self._timeout_s:g} s", timed_out=True)

        self._queue.run(self._queue.number("wait", label=label), until_there)

    def find_lost(self, label: str) -> PeerLost | None:
        """Returns the rank that is surely lost after an error outside of this communicator, if any. Not collective."""
        call = Call(self._queue.num_calls, "wait", name=label)
        lost = self._watchdog.find_lost(call, self._queue.neighbour)
        self._queue.error = self._queue.error or lost
        return lost
