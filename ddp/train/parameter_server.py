"""Training with parameter servers (`strategies/parameter_server/`): the loop of a server, and that of a worker.

A server runs the loop of every run. Its supply yields updates, whose gradients workers have computed.

A worker keeps nothing: callbacks, evaluations and the run's folder are the servers'. Its supply yields parts of steps:

    join the servers
    until the run is over:
        lease parts of steps; their samples are read ahead
        for each part: begin (pull the parameters), forward, backward, push the gradients and begin the next
        if the servers are lost, or fail: drop all leases, wait for them to come back, join again
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]

from ddp.comm.communicator import Communicator
from ddp.comm.host_links import WARN_S
from ddp.comm.meeting.cluster_spec import allow_servers
from ddp.comm.meeting.private_store import part_of
from ddp.comm.meeting.rendezvous import join_role
from ddp.comm.meeting.role import Role, current_role, publish_end
from ddp.comm.session import ABORT_S
from ddp.data.loading.source import Source
from ddp.data.orders.sampler import StepPlan, TrainSampler
from ddp.errors import ConfigError
from ddp.policies import ParameterServer
from ddp.process.clock import Stopwatch, now_s
from ddp.process.terminal import log
from ddp.setting import refuse
from ddp.strategies.choice import strategy_for
from ddp.strategies.parameter_server.edge import LOST
from ddp.strategies.parameter_server.ledger import Lease, Plan
from ddp.strategies.parameter_server.server import Received, Service
from ddp.strategies.parameter_server.worker import LeasedLoader, Over, Servers
from ddp.strategies.sharded import Served
from ddp.train import arguments
from ddp.train.arguments import FitArguments
from ddp.train.batch_checks import FirstBatchCheck, refuse_waiting
from ddp.train.checkpoints.checkpoint_store import steps
from ddp.train.evaluate import switch_to_training
from ddp.train.steps.state import StepReport, TrainState, agreed_reason, loading
from ddp.train.steps.step import StepRules, backward, committed, update
from ddp.train.steps.stopping import flag_of_a_new_fit
from ddp.train.steps.supply import EpochSupply, Step

MUST_AGREE = ("loss", "global_batch", "order", "num_shards", "micro_size", "seed", "precision", "wire", "hook")
FOLDER = "folder"


def check_role(given: FitArguments) -> Role | None:
    """Returns the role of this process; None for a rank.

    Raises:
        ConfigError: it has one and the strategy is not that of parameter servers, or the reverse; or these cannot train
            what is given.
    """
    policy = given.strategy
    if isinstance(policy, ParameterServer):
        allow_servers()
    part = join_role(warn_s=WARN_S, abort_s=ABORT_S)
    if not isinstance(policy, ParameterServer):
        if part is not None:
            refuse(given.setup(servers=part.num_servers))
        return None
    if part is None:
        raise ConfigError(
            "strategy='parameter_server': there are no servers; start them with ddp.launch(…, servers=1), or "
            "cluster.servers=1 on the command line, or start each process with DDP_ROLE=server or DDP_ROLE=worker, or "
            "with TF_CONFIG, whose cluster lists them as the job ps"
        )
    policy.num_parts(part.num_workers)
    refuse(given.setup(workers=part.num_workers, servers=part.num_servers))
    return part


def next_store(part: Role, number: int) -> Store:
    """Returns the part of the store in which the processes meet for the fit of this number, which begins."""
    if number:
        publish_end(replace(part, store=part_of(part.store, f"training {number - 1}")), "")  # of its fit, well or not
    return part_of(part.store, f"training {number}")


def restarted_arguments(given: FitArguments, part: Role) -> FitArguments:
    """Returns the arguments of a restarted server, which resumes from the run's folder, if that has checkpoints.

    The folder may have been named by date and time, so that only the store knows it.

    Raises:
        ConfigError: this training is over, has left nothing, and the servers were lost in a later one.
    """
    if part.incarnation and given.folder.path is None and given.run_store.check(["over"]):
        raise ConfigError(
            "the servers were lost in a later fit of this program than this one, which left no checkpoint to resume "
            "from (folder=None): give each fit a folder"
        )
    if not part.incarnation or given.folder.path is None or not given.run_store.check([FOLDER]):
        return given
    folder = Path(given.run_store.get(FOLDER).decode())
    resume = "auto" if steps(folder / "checkpoints") else None
    return replace(given, folder=replace(given.folder, path=folder, resume=resume))


def service_of(given: FitArguments, state: TrainState, settings: Mapping[str, Any]) -> Service | None:
    """Returns the service of this process for its workers; None where it is no server.

    Args:
        settings: the values that the bits of the result depend on.
    """
    policy, strategy = given.strategy, state.strategy
    if not isinstance(policy, ParameterServer):
        return None
    part = current_role()
    assert part is not None and isinstance(strategy, Served)
    if part.index == 0 and state.run_dir is not None:
        given.run_store.set(FOLDER, str(state.run_dir))
    how = {"num_shards": state.sampler.num_shards, "version": state.step}
    facts = facts_of(state.model.module, state.sampler, settings)
    return Service(part, given.run_store, strategy, policy, facts=facts, **how)


def facts_of(module: nn.Module, sampler: TrainSampler, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts that must be equal on servers and workers, by name, as text."""
    named = {
        f"the parameter {name}": f"{list(each.shape)} {each.dtype} with strides {each.stride()}"
        + ("" if each.requires_grad else ", frozen")
        for name, each in module.named_parameters()
    }
    return {**{name: str(settings[name]) for name in MUST_AGREE}, "len(data)": str(sampler.num_samples), **named}


# --- A server --------------------------------------------------------------------------------------------------------


class ServedSteps(EpochSupply):
    """Yields the updates of a server, as workers return their gradients. Collective among the servers."""

    def __init__(self, state: TrainState, rules: StepRules, service: Service, **until: Any) -> None:
        super().__init__(state, rules, **until)
        self._service = service
        state.unreadable = set()  # a worker leaves none out

    def _epoch(self) -> Iterator[tuple[StepPlan, Received]]:
        state, leased = self._state, dict[int, StepPlan]()

        def plans() -> Iterator[Plan]:
            for plan in islice(state.sampler.plans(), self._num_steps - state.step):
                step = state.sampler.step_at(state.sampler.position_of(plan))
                leased[step] = plan
                yield Plan(step, plan.epoch, plan.position, plan.size)

        for plan, received in self._service.epoch(plans(), stopping=state.stop_flag):
            others = StepPlan(plan.epoch, plan.position, plan.size, ())  # its samples count at server 0
            yield leased.pop(plan.step, others), received
        if self._service.is_stopped:
            state.stopped_by = agreed_reason(state) or "stopped"

    def close(self) -> None:
        """Does nothing, because the workers read the samples."""

    def _made(self, plan: StepPlan, given: Received) -> StepReport:
        """Makes the step whose gradients were received.

        Raises:
            Diverged: loss or gradient norm is not finite; parameters and sampler are as before the step.
            ConfigError: parameters were frozen, unfrozen or converted since the training began.
        """
        state = self._state
        with state.phase("step"):
            state.model.waited.take_s()
            state.model.waited.total_s = now_s() - given.since_s
            wants_stop = bool(state.stop_flag)
            if state.comm.world_size > 1:
                wants_stop = state.comm.agree_any(wants_stop, label="a wish to stop")
            given.finish_step(given.totals._replace(num_stopping=int(wants_stop)))
            with state.phase("update"):
                agreement = state.strategy.agree(state.step + 1)
            update(state, self._rules, plan, agreement)
            state.sampler.commit_leased(plan)
            return committed(state, self._rules, plan, agreement, start_s=given.since_s)


# --- A worker --------------------------------------------------------------------------------------------------------


def work(given: FitArguments, comm: Communicator, part: Role) -> TrainState:
    """Computes for the servers until the run is over.

    Returns:
        The state as the servers have it at the end, but for the model, whose parameters are those of the last pull.

    Raises:
        ConfigError: something cannot be trained, or is not as at the servers.
        PeerLost: the store has gone.
        Exception: the servers' fit has failed; the error has the class of theirs.
    """
    policy = given.strategy
    assert isinstance(policy, ParameterServer)
    inputs = arguments.inputs_of(given, comm)
    sampler, _ = arguments.sampler_for(given, inputs, comm)
    settings = arguments.settings_of(given, inputs, sampler)
    strategy = strategy_for(inputs.replica, given.optimizer, precision=given.precision)
    stop = flag_of_a_new_fit() if given.stop is None else given.stop
    state = TrainState(comm, strategy, given.optimizer, sampler, stop_flag=stop)
    first = FirstBatchCheck(
        inputs.task,
        num_calls=lambda: comm.num_calls,
        if_it_waits=lambda where: "loss" in where and refuse_waiting(inputs.task, "parameter servers"),
    )
    rules = StepRules(
        task=inputs.task,
        schedule=lambda _: 1.0,  # rates are the servers'
        precision=given.precision,
        seed=sampler.state.seed,
        noise_scale_every=0,
        batch_checks=[first],
        keeps_buffers=False,  # a part that breaks off ends this worker
    )
    facts = facts_of(inputs.replica.module, sampler, settings)
    servers = Servers(part, given.run_store, comm, inputs.replica.module, policy, facts=facts)
    switch_to_training(state.model)
    with stop.listening():
        try:
            for step in LeasedSteps(state, rules, inputs.source, servers):
                step.make()
        except BaseException as error:
            servers.abandon(f"{type(error).__name__}: {error}")
            raise
    strategy.finish(alone=True)
    return state


class LeasedSteps:
    """Yields the parts of steps that a worker leases. Their gradients are pushed once they are made.

    Raises:
        ConfigError, PeerLost: as `work`.
    """

    def __init__(self, state: TrainState, rules: StepRules, source: Source, servers: Servers) -> None:
        self._state, self._rules, self._source, self._servers = state, rules, source, servers

    def __iter__(self) -> Iterator[Step]:
        state, servers = self._state, self._servers
        try:
            while True:
                servers.join(self._leave_if_asked)
                yield from self._until_lost()
        except Over as over:
            servers.leave()
            state.history = list(over.facts.get("history", ()))
            state.evaluation, state.step = dict(over.facts["evaluation"]), over.facts["step"]
            state.stopped_by = over.facts["stopped_by"]

    def _until_lost(self) -> Iterator[Step]:
        """Yields parts until the servers are lost.

        Raises:
            Over: the run is over.
            ConfigError: a part took so long that the servers have given this worker up.
        """
        state, servers, comm = self._state, self._servers, self._state.comm
        choices = loading(self._source, comm, state.stop_flag)
        loader = LeasedLoader(self._source.samples, state.sampler, **choices)
        took_s = 0.0  # seconds that computing the part took which is pushed
        try:
            while True:
                self._leave_if_asked()
                loader.put(servers.leases(loader.num_ahead))
                for lease, plan, batches in loader.steps():
                    if (more := servers.begin(lease, num_ahead=loader.num_ahead)) is None:
                        continue
                    loader.put(more)
                    began_s = now_s()
                    yield Step(plan, partial(self._made, lease, plan, batches))
                    took_s = now_s() - began_s
                    then = None if state.stop_flag else loader.following
                    servers.push(lease, state.model.totals, then=then, num_ahead=loader.num_ahead)
                    took_s = 0.0
                    self._leave_if_asked()
        except LOST as lost:
            log.warning("the servers are lost (%s): this worker waits for them to come back", lost)
        finally:
            loader.close()
        if took_s > comm.abort_s:
            raise ConfigError(
                f"a part took {took_s:.0f} s, and after comm.abort_s={comm.abort_s:g} s servers give a worker up: "
                "raise it (ddp.init(abort_s=…)), or take a smaller batch"
            )

    def _leave_if_asked(self) -> None:
        """Ends the work of a process that a signal asks to stop, between two parts or while it waits for servers.

        The run continues without it.

        Raises:
            Over: for this worker.
        """
        if reason := self._state.stop_flag.reason:
            raise Over({"evaluation": {}, "step": self._servers.version, "stopped_by": reason})

    def _made(self, lease: Lease, plan: StepPlan, batches: Iterator[Any]) -> None:
        """Computes the gradients of a part, which are the model's then, with their totals.

        Raises:
            UnusedParameters, ConfigError: as in a step of any strategy.
        """
        state = self._state
        state.step = lease.plan.step - 1  # random streams hang on it, and not on who computes
        backward(state, self._rules, plan, batches, Stopwatch(), wants_stop=False)
        state.model.raise_pending()
