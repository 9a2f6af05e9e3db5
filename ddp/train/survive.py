"""Goes on in an elastic launch, whose workers are lost, leave and join (`comm/meeting/membership.py`).

A resize is a resume whose checkpoint lies in a survivor's memory:

    a worker is lost        a collective raises PeerLost on each survivor: in a step, an evaluation or a save
    one joins or leaves     the launcher says so, and the ranks agree to stop after a step, with the reason "resize"
         │
         ▼ `Interrupted`    the rank keeps its state of the last committed step; a broken-off step leaves no trace in it
    the next generation     `over_generations` opens its communicator. The ranks take the newest state that one of them
                            has, since survivors may stand one step apart, and begin again as at a start: replica,
                            strategy, sampler, loader, and the duties of rank 0

Of a step that was lost, its samples are computed again, by those that are there; the global batch stays as it is.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import NamedTuple, TypeVar

from torch.distributed import DistError

from ddp.comm.communicator import Communicator
from ddp.comm.meeting.membership import POLL_S, RESIZE, Member, current_member, is_resized
from ddp.comm.session import init_again, shutdown
from ddp.errors import CommunicatorBroken, PeerLost, TooFewWorkers, with_causes
from ddp.process.clock import Patience
from ddp.process.terminal import log
from ddp.train.checkpoints.checkpoint_store import StoredCheckpoint
from ddp.train.steps.stopping import StopFlag

Result = TypeVar("Result")


class Kept(NamedTuple):
    """The state that this rank brings to a generation.

    Attributes:
        state: of the last committed step; None if it has not all of it.
        step: the last step that it has committed; None: it has not trained in this fit.
    """

    state: StoredCheckpoint | None = None
    step: int | None = None


class Interrupted(BaseException):
    """A generation has ended before its run."""

    def __init__(self, kept: Kept) -> None:
        super().__init__("the ranks change")
        self.kept = kept


def goes_on(error: BaseException) -> bool:
    """Returns True if the run goes on after this error, because it is the loss of a rank in an elastic launch."""
    is_loss = any(isinstance(each, (PeerLost, CommunicatorBroken)) for each in with_causes(error))
    return is_loss and current_member() is not None


def over_generations(
    train: Callable[[Communicator, list[Kept]], Result],
    comm: Communicator,
    stop: StopFlag,
    listening: AbstractContextManager[None],
) -> Result:
    """Returns the result of a fit, which is called once for each generation.

    Args:
        train: is given the ranks, and what this one has kept, to be taken out of the list, so that nobody else holds
            the former state; raises `Interrupted`.
        comm: the ranks of the first one.
        stop: the wish of this rank to stop.
        listening: lets signals set it, also between two generations.

    Raises:
        PeerLost: a rank is out of reach, but has not ended.
        TooFewWorkers: see `wait_for_others`.
    """
    if (member := current_member()) is None:
        return train(comm, [Kept()])
    kept, is_over = [Kept()], True
    with ExitStack() as until_end:
        if is_resized():  # a newcomer
            until_end.enter_context(listening)
            listening = nullcontext()
        _follow(member, stop)
        try:
            while True:
                error: BaseException | None = None
                try:
                    return train(comm, kept)
                except Interrupted as over:
                    kept, error = [over.kept], over.__cause__
                except (PeerLost, CommunicatorBroken) as lost:  # before the kept state was looked at
                    kept, error = kept or [Kept()], lost
                until_end.enter_context(listening)
                listening = nullcontext()
                if error is not None:
                    log.info("%s", error)
                comm = _next_ranks(member, error)
                error = None  # whose traceback holds the former replica
                gc.collect()  # because the former ranks' connections and memory lie in cycles
                stop.forget(RESIZE)
                _follow(member, stop)
        except SystemExit:
            is_over = False  # this process has left, and the others go on
            raise
        finally:
            stop.leave, member.on_news = None, bool
            if is_over:
                with suppress(Exception):  # the launch has ended
                    member.close()


def _follow(member: Member, stop: StopFlag) -> None:
    """Lets the launcher decide what becomes of a signal, and stops after a step once the members are to change."""

    def hear() -> None:
        if member.stopped_by:
            stop.request(member.stopped_by)
        elif member.is_superseded and member.lost is None:
            stop.request(RESIZE)

    def leave(by: str) -> None:
        if not member.ask_to_leave(by):
            stop.request(by)

    if stop.signal_name and not member.stopped_by:  # it came while the program loaded its data
        member.ask_to_leave(stop.signal_name)
        stop.forget(stop.signal_name)
    stop.leave, member.on_news = leave, hear
    member.open()
    hear()


def _next_ranks(member: Member, error: BaseException | None) -> Communicator:
    """Returns the communicator of the next generation.

    Args:
        error: because of which this one has ended; None: the ranks have agreed.

    Raises:
        SystemExit: this process has left.
        PeerLost: as `over_generations`; or the fit of another rank has ended, which does not come back.
    """
    if error is None:
        member.has_news()  # which another rank may have heard first
        shutdown()
        return init_again()
    try:
        if not member.store.check(["closed"]):
            return init_again()
    except (CommunicatorBroken, DistError):  # the latter: of the store, which has ended with its launcher
        pass
    raise error


def wait_for_others(member: Member) -> None:
    """Returns once there are other members, for which fewer than `min_workers` wait, or the run is to stop.

    Raises:
        TooFewWorkers: there are none within `wait_s`.
    """
    limits, patience = member.limits, Patience(member.limits.wait_s)
    while not (member.is_superseded or member.stopped_by):
        if not patience.left_s():
            raise TooFewWorkers(
                f"{len(member.latest.members)} of min_workers={limits.min_workers} workers are left, and no other has "
                f"come within wait_s={limits.wait_s:g} s: start the run again with resume=auto, or with a lower "
                "min_workers"
            )
        time.sleep(POLL_S)
    member.look()  # so that all ranks see the same: a generation is written before the stop
