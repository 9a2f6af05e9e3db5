"""The training of a worker of parameter servers: it computes the parts of steps that it leases, and keeps nothing.

    join the servers
    until the run is over:
        lease parts of steps; their samples are read ahead
        for each part: begin (pull the parameters), forward, backward, push the gradients and begin the next
        if the servers are lost, or fail: drop all leases, wait for them to come back, join again
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp.comm.communicator import Communicator
from ddp.comm.meeting.cast import Cast
from ddp.data.loading.leased import LeasedLoader
from ddp.data.orders.sampler import StepPlan
from ddp.errors import ConfigError
from ddp.gradients.totals import Totals
from ddp.policies import ParameterServer
from ddp.process.clock import Stopwatch, now_s
from ddp.process.log import log
from ddp.strategies.choice import strategy_for
from ddp.strategies.parameter_server.edge import LOST
from ddp.strategies.parameter_server.ledger import Lease
from ddp.strategies.parameter_server.worker import Over, Servers
from ddp.train import arguments
from ddp.train.arguments import Given
from ddp.train.evaluate import switch_to_training
from ddp.train.first_look import FirstLook, refuse_waiting
from ddp.train.served import facts_of
from ddp.train.state import TrainState, loading
from ddp.train.step import StepRules, backward
from ddp.train.stopping import StopFlag, flag_of_a_new_fit


def work(given: Given, comm: Communicator, part: Cast) -> TrainState:
    """Computes for the servers until the run is over.

    Callbacks, evaluations and the run's folder are the servers'.

    Returns:
        The state as the servers have it at the end, but for the model, whose parameters are those of the last pull.

    Raises:
        ConfigError: something cannot be trained, or is not as at the servers.
        PeerLost: the servers are lost or have failed, and this worker is to stop; or the store has gone.
    """
    policy = given.strategy
    assert isinstance(policy, ParameterServer)
    inputs = arguments.inputs_of(given, comm)
    sampler, _ = arguments.sampler_for(given, inputs, comm)
    settings = arguments.settings_of(given, inputs, sampler)
    strategy = strategy_for(inputs.replica, given.optimizer, precision=given.precision)
    stop = flag_of_a_new_fit() if given.stop is None else given.stop
    state = TrainState(comm, strategy, given.optimizer, sampler, stop_flag=stop)
    rules = StepRules(
        task=inputs.task,
        schedule=lambda _: 1.0,  # rates are the servers'
        precision=given.precision,
        seed=sampler.state.seed,
        noise_scale_every=0,
        looks=[
            FirstLook(
                inputs.task,
                wanted=True,
                num_calls=lambda: comm.num_calls,
                if_it_waits=lambda where: "loss" in where and refuse_waiting(inputs.task, "parameter servers"),
            )
        ],
    )
    facts = facts_of(inputs.replica.module, sampler, settings)
    servers = Servers(part, given.home, comm, inputs.replica.module, policy, facts=facts)
    switch_to_training(state.model)
    with stop.listening():
        try:
            while True:
                servers.join(stopping=stop)
                took_s = 0.0  # what the part that is pushed took to compute
                loader = LeasedLoader[Lease](inputs.source.samples, sampler, **loading(inputs.source, comm, stop))
                try:
                    while True:
                        _leave_if_asked(stop, servers)
                        loader.put(servers.leases(loader.num_ahead))
                        for lease, plan, batches in loader.steps():
                            if (more := servers.begin(lease, num_ahead=loader.num_ahead)) is None:
                                continue
                            loader.put(more)
                            began_s = now_s()
                            totals = _computed(state, rules, lease, plan, batches)
                            took_s = now_s() - began_s
                            then, most = None if stop else loader.following, loader.num_ahead
                            servers.push(lease, totals, then=then, num_ahead=most)
                            took_s = 0.0
                            _leave_if_asked(stop, servers)
                except LOST as lost:
                    log.warning("the servers are lost (%s): this worker waits for them to come back", lost)
                finally:
                    loader.close()
                if took_s > comm.abort_s:
                    raise ConfigError(
                        f"a part took {took_s:.0f} s, and after comm.abort_s={comm.abort_s:g} s servers give a worker "
                        "up: raise it (ddp.init(abort_s=…)), or take a smaller batch"
                    )
        except Over as over:
            servers.leave()
            state.history = list(over.facts.get("history", ()))
            state.evaluation, state.step = dict(over.facts["evaluation"]), over.facts["step"]
            state.stopped_by = over.facts["stopped_by"]
        except BaseException as error:
            servers.abandon(f"{type(error).__name__}: {error}")
            raise
    strategy.finish(alone=True)
    return state


def _leave_if_asked(stop: StopFlag, servers: Servers) -> None:
    """Ends the work of a process that a signal asks to stop, between two parts: the run goes on without it.

    Raises:
        Over: for this worker.
    """
    if stop.reason:
        raise Over({"evaluation": {}, "step": servers.version, "stopped_by": stop.reason})


def _computed(state: TrainState, rules: StepRules, lease: Lease, plan: StepPlan, batches: Iterator[Any]) -> Totals:
    """Computes the gradients of a part; returns its totals.

    Raises:
        UnusedParameters, ConfigError: as in a step of any strategy.
    """
    state.step = lease.plan.step - 1  # random streams hang on it, and not on who computes
    backward(state, rules, plan, batches, Stopwatch(), wants_stop=False)
    state.model.raise_pending()
    return state.model.totals
