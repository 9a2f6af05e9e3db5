"""Lets a server train (`strategies/parameter_server/`), whose steps are made of what workers return.

The loop is the one of every run. Its feed yields updates in the place of batches, and its step takes their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]

from ddp.comm.meeting.cluster_spec import allow_servers
from ddp.comm.meeting.private_store import part_of
from ddp.comm.meeting.rendezvous import join_role
from ddp.comm.meeting.role import Role, current_role, publish_end
from ddp.comm.opening import WARN_S
from ddp.comm.session import ABORT_S
from ddp.data.orders.sampler import StepPlan, TrainSampler
from ddp.data.orders.steps import BatchWarmup
from ddp.errors import ConfigError
from ddp.policies import ParameterServer
from ddp.process.clock import now_s
from ddp.strategies.parameter_server.ledger import Plan
from ddp.strategies.parameter_server.server import Received, Service
from ddp.strategies.served import Served
from ddp.train.arguments import Given
from ddp.train.checkpoint_store import steps
from ddp.train.state import StepReport, TrainState, agreed_reason
from ddp.train.step import StepRules, committed, update

ALIKE = ("loss", "global_batch", "order", "num_shards", "micro_size", "seed", "precision", "wire", "hook")
FOLDER = "folder"
_number = count()  # of the trainings of this program, which all processes run alike


def check_role(given: Given) -> Role | None:
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
            raise ConfigError(
                f"strategy={policy.strategy!r} in {part} of a launch with servers: take strategy='parameter_server', "
                "or leave servers out"
            )
        return None
    if part is None:
        raise ConfigError(
            "strategy='parameter_server': there are no servers; start them with ddp.launch(…, servers=1), or "
            "cluster.servers=1 on the command line, or start each process with DDP_ROLE=server or DDP_ROLE=worker, or "
            "with TF_CONFIG, whose cluster lists them as the job ps"
        )
    for problem in policy.problems(
        workers=part.num_workers,
        servers=part.num_servers,
        clip_norm=given.clip_norm,
        grows=isinstance(given.global_batch, BatchWarmup),
        has_hook=policy.hook is not None,
        max_unreadable=given.reading.max_unreadable,
    ):
        raise ConfigError(f"strategy='parameter_server': {problem}")
    return part


def next_home(part: Role) -> Store:
    """Returns the part of the store in which the processes meet for the training that begins."""
    number = next(_number)
    if number:
        publish_end(replace(part, store=part_of(part.store, f"training {number - 1}")), "")  # of its fit, well or not
    return part_of(part.store, f"training {number}")


def going_on(given: Given, part: Role) -> Given:
    """Returns what is given to a server that is started anew: it goes on in the run's folder, if that has checkpoints.

    The folder may have been named by date and time, so that only the store knows it.

    Raises:
        ConfigError: this training is over, has left nothing, and the servers were lost in a later one.
    """
    if part.incarnation and given.folder.path is None and given.home.check(["over"]):
        raise ConfigError(
            "the servers were lost in a later fit of this program than this one, which has left no checkpoint to go on "
            "from (folder=None): give each fit a folder"
        )
    if not part.incarnation or given.folder.path is None or not given.home.check([FOLDER]):
        return given
    folder = Path(given.home.get(FOLDER).decode())
    resume = "auto" if steps(folder / "checkpoints") else None
    return replace(given, folder=replace(given.folder, path=folder, resume=resume))


def service_of(given: Given, state: TrainState, settings: Mapping[str, Any]) -> Service | None:
    """Returns what this process does for workers; None where it is no server.

    Args:
        settings: what the bits of the result depend on.
    """
    if not isinstance(state.strategy, Served):
        return None
    part, policy = current_role(), given.strategy
    assert part is not None and isinstance(policy, ParameterServer)
    if part.index == 0 and state.run_dir is not None:
        given.home.set(FOLDER, str(state.run_dir))
    facts = facts_of(state.model.module, state.sampler, settings)
    strategy = state.strategy
    return Service(
        part,
        given.home,
        strategy.model,
        strategy.pieces(),
        policy,
        num_shards=state.sampler.num_shards,
        version=state.step,
        facts=facts,
    )


def facts_of(module: nn.Module, sampler: TrainSampler, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what must be the same at servers and workers, by name, in words."""
    named = {
        f"the parameter {name}": f"{list(each.shape)} {each.dtype} with strides {each.stride()}"
        + ("" if each.requires_grad else ", frozen")
        for name, each in module.named_parameters()
    }
    return {**{name: str(settings[name]) for name in ALIKE}, "len(data)": str(sampler.num_samples), **named}


class LeaseFeed:
    """Yields the steps of an epoch, as workers return them.

    Args:
        num_steps: of the whole run.
    """

    def __init__(self, state: TrainState, service: Service, *, num_steps: int) -> None:
        self._state, self._service, self._num_steps = state, service, num_steps
        self.unreadable: set[int] = set()  # a worker leaves none out

    def epoch(self) -> Iterator[tuple[StepPlan, Received]]:
        """Yields each plan with what was received for it. Collective among the servers."""
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

    def ended(self, num_ending: int) -> None:
        """Does nothing: data with a length end where the sampler says."""

    def close(self) -> None:
        """Does nothing: the workers go when the results are written."""


def served_step(
    state: TrainState, rules: StepRules, plan: StepPlan, received: Received, *, wants_stop: bool
) -> tuple[StepReport, bool]:
    """Makes the step whose gradients were received. Returns its report, and whether any server wants to stop.

    Raises:
        Diverged: loss or gradient norm is not finite; parameters and sampler are as before the step.
        ConfigError: parameters were frozen, unfrozen or converted since the training began.
    """
    state.model.waited.take_s()
    state.model.waited.total_s = now_s() - received.since_s
    if state.comm.world_size > 1:
        wants_stop = state.comm.agree_any(wants_stop, label="a wish to stop")
    received.hand_over(received.totals._replace(num_stopping=int(wants_stop)))
    with state.phase("update"):
        agreement = state.strategy.agree(state.step + 1)
    update(state, rules, plan, agreement)
    state.sampler.commit_leased(plan)
    return committed(state, rules, plan, agreement, start_s=received.since_s)
