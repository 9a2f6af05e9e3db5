"""A server: it leases samples to workers, sends them parameters, and updates these by the gradients of the workers.

    main thread     the loop of `fit`: waits for the next update, makes it as the sharded strategy does among the
                    servers, evaluates, saves. It alone changes parameters
    other threads   one for each worker: answers its requests (`worker_threads.py`)

    workers         pull parameters, compute, push gradients                            (`worker.py`)
    this server     waits for the gradients of an update, piece by piece
    agree           the servers measure the norm of the gradient together
    update          each makes the optimizer's step for its pieces, and gives the others the new parameters

So each server has all parameters, and a part of the optimizer's state; a worker exchanges with each server only the
pieces that this server holds. Pieces have about equal sizes; large tensors are cut. In mode async an update is one
batch of one worker (Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1, Downpour SGD).

Server 0 keeps the ledger (`ledger.py`). All servers make the updates that it announces, in the same order. So they are
always at the same version, and a worker that dies between two servers leaves no partial update.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from ddp.comm.meeting.role import Role, is_done
from ddp.comm.objects import broadcast_object, error_of, error_values
from ddp.errors import ConfigError
from ddp.gradients.totals import Totals, count_of
from ddp.policies import ParameterServer
from ddp.process.clock import Patience, now_s
from ddp.process.terminal import log
from ddp.strategies.parameter_server.edge import Piece, failure_of
from ddp.strategies.parameter_server.ledger import Ledger, Plan, Update
from ddp.strategies.parameter_server.worker_threads import Shared, WorkerThreads
from ddp.strategies.sharded import Served
from ddp.units import counted

POLL_S = 0.05  # between two checks if this process is to stop
LAST_S = 10.0  # longest wait for workers at the end of the run
WAIT, OVER, STOP, FAILED = "wait", "over", "stop", "failed"  # sent by server 0 in place of an update


class Received(NamedTuple):
    """An update whose gradients are in the buckets.

    Attributes:
        totals: of the update.
        since_s: when the wait for the update began.
        finish_step: ends the step of the model; takes the totals, with the votes of the servers.
    """

    totals: Totals
    since_s: float
    finish_step: Callable[[Totals], None]


class Service:
    """Serves workers, until `end`. Collective among the servers to make.

    Args:
        part: of this process.
        run_store: the part of the store in which the processes meet for this training.
        strategy: of this server, whose parts are served.
        policy: when updates are made, and how gradients travel.
        num_shards: parts of a step with their own random streams (`Ledger`).
        version: updates that the run has made already.
        facts: plain values that a worker compares with its own.

    Attributes:
        is_stopped: the last epoch has ended early, because this process is to stop and no worker is here.
    """

    def __init__(
        self,
        part: Role,
        run_store: Store,
        strategy: Served,
        policy: ParameterServer,
        *,
        num_shards: int,
        version: int,
        facts: Mapping[str, Any],
    ) -> None:
        model = strategy.model
        self._part, self._run_store, self._strategy, self._comm = part, run_store, strategy, model.comm
        self._parts = {Piece(name, part.start, part.stop): part for name, part in strategy.parts()}
        ledger = Ledger(
            mode=policy.mode,
            num_parts=policy.num_parts(part.num_workers),
            num_shards=num_shards,
            staleness=policy.bound,
            num_backups=policy.backup_workers,
            version=version,
        )
        self._shared = Shared(ledger)
        self._oldest, self.is_stopped = 0, False
        self._computed = Counter[int]()  # samples, by the index of a worker
        self._warned_s = 0.0
        self._shared.parameters_lock.acquire()
        if part.index == 0:
            self._warn_of_lost_updates()
            run_store.set("incarnation", str(part.incarnation))
        self._worker_threads = WorkerThreads(part, run_store, model, [*self._parts], policy, facts, self._shared)

    def _warn_of_lost_updates(self) -> None:
        """Warns of the updates that earlier servers made after the checkpoint from which these resume."""
        last = int(self._run_store.get("version")) if self._run_store.check(["version"]) else 0
        if num_gone := max(0, last - self._shared.version):
            log.warning(
                "the servers were lost after update %d, and resume from update %d: %s lost, and their samples are "
                "leased again",
                *(last, self._shared.version, f"{counted(num_gone, 'update')} {'is' if num_gone == 1 else 'are'}"),
            )

    # --- updates -----------------------------------------------------------------------------------------------------

    def epoch(self, plans: Iterable[Plan], *, stopping: Any) -> Iterator[tuple[Plan, Received]]:
        """Yields each update of an epoch, in the order in which the servers make them. Collective among the servers.

        Args:
            plans: the steps of the epoch; read on server 0.
            stopping: true once this process is to stop.

        Raises:
            ConfigError: no worker has connected, or is left.
            Exception: all workers' fits have failed; the error has the class of theirs.
        """
        shared, last_step = self._shared, 0
        is_first, alone = self._part.index == 0, self._comm.world_size == 1
        if is_first:
            with shared.changed:
                shared.ledger.begin_epoch(self._reporting_errors(plans))
                shared.notify()
        while True:
            since_s = now_s()
            word: Any = WAIT
            raised = None
            while word == WAIT:
                try:
                    word = self._next(stopping) if is_first else None
                except Exception as error:
                    word, raised = (FAILED, *error_values(error)), error
                if not alone:
                    with nullcontext() if is_first else self._pulls_allowed():  # server 0 has the next update already
                        word = broadcast_object(self._comm, word)
            if word[0] == FAILED:
                raise raised or error_of(*word[1:], where="server 0")
            if word in (OVER, STOP):
                self.is_stopped = word == STOP
                with shared.changed:  # further pushes of these steps do not count
                    shared.pushed = {key: push for key, push in shared.pushed.items() if key[0] > last_step}
                return
            plan_values, keys, counts, buffers, without = word
            plan, last_step = Plan(*plan_values), max(last_step, plan_values[0])
            totals = self._write_gradients([tuple(key) for key in keys], counts, buffers)
            yield plan, Received(totals, since_s, partial(self._strategy.take_step, without=without))
            with shared.changed:
                shared.version += 1
                shared.notify()
            if is_first:
                self._run_store.set("version", str(shared.version))

    def _reporting_errors(self, plans: Iterable[Plan]) -> Iterator[Plan]:
        """Yields plans in the threads that lease them, and passes an error of the user's order to the main thread."""
        try:
            yield from plans
        except BaseException as error:
            self._shared.error = error
            raise

    def _next(self, stopping: Any) -> Any:
        """Waits on server 0 for the next update, and returns it; or OVER, STOP, or after a while WAIT."""
        shared, patience = self._shared, Patience(self._worker_threads.reply_s)
        while True:
            with shared.changed:  # no worker pulls between an update's number and the update: `parameters_lock` is held
                update, is_over = shared.ledger.take_update(), shared.ledger.is_epoch_over
                num_changes, error = shared.num_changes, shared.error
                idle_s = 0.0 if shared.num_here else now_s() - shared.empty_since_s
            if error is not None:
                raise error
            if update is not None:
                return self._announcement(update)
            if is_over:
                return OVER
            self._warned_s = min(self._warned_s, idle_s)
            if stopping and idle_s > POLL_S:
                return STOP
            if idle_s > self._comm.abort_s:
                raise ConfigError(
                    f"no worker has been here for {idle_s:.0f} s (comm.abort_s): start some; what is saved resumes by "
                    "resume=auto"
                )
            if not patience.left_s():
                if idle_s and (failed := failure_of(self._run_store, "worker")):  # caught, if all go on
                    stores, workers = (self._run_store, self._part.store), range(self._part.num_workers)
                    if all(any(is_done(store, f"worker {index}") for store in stores) for index in workers):
                        raise failed
                if idle_s > self._warned_s + self._comm.warn_s:
                    self._warned_s = idle_s
                    log.warning("no worker has been here for %.0f s: the servers wait for one", idle_s)
                return WAIT
            with self._pulls_allowed(), shared.changed:
                shared.wait_for_change(num_changes, POLL_S)  # or until this process is to stop

    @contextmanager
    def _pulls_allowed(self) -> Iterator[None]:
        """Lets the threads of workers send parameters in the block, in which the main thread only waits."""
        self._shared.parameters_lock.release()
        try:
            yield
        finally:
            self._shared.parameters_lock.acquire()

    def _announcement(self, update: Update) -> Any:
        """Returns an update for all servers, in plain values."""
        plan, workers, sizes, age = update
        self._oldest = max(self._oldest, age)
        with self._shared.changed:
            keys = [(plan.step, part, worker) for part, worker in enumerate(workers) if isinstance(worker, int)]
            pushes = [self._shared.pushed[key] for key in keys]
            for _, part, worker in keys:
                self._computed[self._shared.indices[worker]] += sizes[part]
        counts = [(push.loss_sum, push.num_items, sizes[key[1]]) for key, push in zip(keys, pushes, strict=True)]
        buffers = _merged_buffers([push.buffers for push in pushes], [each[2] for each in counts])
        without = sorted(set.intersection(*(set(push.without) for push in pushes)) if pushes else ())
        return tuple(plan), keys, counts, buffers, without

    @torch.no_grad()
    def _write_gradients(
        self,
        keys: Sequence[tuple[int, int, int]],
        counts: Sequence[Sequence[float]],
        buffers: Mapping[str, Tensor],
    ) -> Totals:
        """Writes the sum of these pushes' gradients to the buckets, in their order, divided by the global count."""
        with self._shared.changed:
            pushes = [self._shared.pushed[key] for key in keys]
            steps = {key[0] for key in keys}  # lost workers may have left pushes for these that do not count
            self._shared.pushed = {key: push for key, push in self._shared.pushed.items() if key[0] not in steps}
        num_items = sum(each[1] for each in counts)
        shares = [each[1] / (num_items or 1) for each in counts]
        for piece, part in self._parts.items():
            gradient = (part.gradient if pushes else part.gradient.zero_()).view(-1)
            for number, (push, share) in enumerate(zip(pushes, shares, strict=True)):
                here = push.gradients[piece]
                gradient.add_(here, alpha=share) if number else torch.mul(here, share, out=gradient)
        module = self._strategy.model.module
        for name, value in buffers.items():
            module.get_buffer(name).copy_(value)
        self._shared.buffers.update(buffers)
        return Totals(loss_sum=sum(each[0] for each in counts), num_items=count_of(num_items))

    def in_words(self) -> str:
        """Returns the largest staleness of a gradient and each worker's share of the samples, as text. At server 0."""
        age = f"no gradient was of parameters more than {counted(self._oldest, 'update')} old"
        if not (total := self._computed.total()):
            return age
        shares = (f"worker {index} ({100 * number / total:.0f} %)" for index, number in sorted(self._computed.items()))
        return f"{age}; the samples were computed by {', '.join(shares)}"

    def end(self, over: Mapping[str, Any]) -> None:
        """Notifies the workers that the run is over, and disconnects them.

        Args:
            over: plain values for them.
        """
        shared = self._shared
        with shared.changed:
            if shared.over is not None:
                return
            shared.over = dict(over)
            shared.notify()
        with suppress(RuntimeError):  # after an error the main thread may not hold it
            shared.parameters_lock.release()
        num_accepted = self._worker_threads.close(LAST_S)
        with suppress(DistError):
            if "failed" not in over and self._part.index == 0:  # for workers that come later
                self._run_store.set("over", json.dumps({**over, "num_accepted": num_accepted}))
            elif "failed" not in over:  # serves the workers that server 0 has accepted
                self._run_store.wait(["over"], timedelta(seconds=LAST_S))
                self._worker_threads.accept(json.loads(self._run_store.get("over"))["num_accepted"])
        self._worker_threads.end(LAST_S)


def _merged_buffers(buffers: Sequence[Mapping[str, Tensor]], counts: Sequence[int]) -> dict[str, Tensor]:
    """Returns the buffers of an update: in floating point, the mean over its parts by samples; else the last part's."""
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
