"""Chooses the replica and the strategy for a value of `strategy`, by the table `STRATEGIES`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer

from ddp.comm.communicator import Communicator
from ddp.comm.meeting.role import current_role
from ddp.comm.opening import device_of
from ddp.comm.session import init
from ddp.errors import ConfigError
from ddp.gradients.hook import Hook
from ddp.policies import Averaging, Rounds
from ddp.process import gpu
from ddp.process.terminal import log
from ddp.replica.broadcast import move
from ddp.replica.drop_in.in_backward import refusal
from ddp.replica.replica import Replica
from ddp.setting import StrategyName
from ddp.strategies.central_storage import CentralStorage
from ddp.strategies.fully_sharded import FullySharded
from ddp.strategies.local_sgd import LocalSteps, Streaming
from ddp.strategies.sharded import Served, Sharded
from ddp.strategies.strategy import Compiled, Replicated, Strategy

# --- The words -------------------------------------------------------------------------------------------------------


# fmt: off
STRATEGIES: dict[StrategyName, type[Replicated]] = {
    "auto":             Replicated,
    "one_device":       Replicated,
    "mirrored":         Replicated,
    "multi_worker":     Replicated,
    "tpu":              Compiled,
    "sharded":          Sharded,
    "fully_sharded":    FullySharded,
    "central_storage":  CentralStorage,
    "parameter_server": Served,
    "local_sgd":        LocalSteps,
}
# fmt: on
"""By word the class, which defines the gradients that a rank gets, the part that it updates, and its state."""


def strategy_of(replica: Replica, word: StrategyName) -> type[Replicated]:
    """Returns the class of the strategy for a replica: the word's; for "auto" the first one that takes the replica."""
    if word != "auto":
        return STRATEGIES[word]
    return next(each for each in STRATEGIES.values() if each.takes(replica))


def same_bits_as(word: StrategyName) -> StrategyName:
    """Returns the first word with the same class, and so with the same bits on the same processes."""
    return next(each for each, strategy in STRATEGIES.items() if strategy is STRATEGIES[word])


# --- The replica -----------------------------------------------------------------------------------------------------


def ranks_of(model: nn.Module, word: StrategyName = "auto") -> Communicator:
    """Returns the ranks of a replica, or all; on the model's GPU, or else on the device that it will move to.

    Raises:
        ConfigError: the model is on another GPU than this process's communicator.
    """
    if isinstance(model, Replica):
        return model.comm
    device = device_of(model) if isinstance(model, nn.Module) else None
    if device is None or device.type != gpu.KIND:
        return init(device="cpu" if word == "tpu" else "auto")  # beside devices of JAX, the model is on the CPU
    comm = init(device=device)
    if comm.device != device:  # the optimizer may have tensors there, too
        raise ConfigError(
            f"the model is on {device}, and this rank's tensors are on {comm.device}: make both there, or call "
            f"ddp.init(device={str(device)!r}) before all else"
        )
    return comm


def replica_of(
    model: nn.Module,
    optimizer: Optimizer,
    comm: Communicator,
    averaging: Averaging,
    *,
    num_shards: int | None = None,
) -> Replica:
    """Returns the model as a replica on the rank's device.

    Args:
        num_shards: of a batch, by which gradients are added up; None: by ranks.

    Raises:
        ConfigError: the model cannot be trained here, or not by this optimizer.
    """
    averaging = of_this_process(averaging)
    word, strategy = averaging.strategy, STRATEGIES[averaging.strategy]
    if isinstance(model, Replica) and word != "auto" and not strategy.takes(model):
        what = type(model).__name__
        if model.collective is not None:
            what += f" with reducer={type(model.collective).__name__}"
        raise ConfigError(
            f"strategy={word!r} with a model in a {what}: give ddp.fit the bare module; or, for some of the ranks, "
            f"ddp.strategies.{strategy.__name__}.replica_of(module, comm=…)"
        )
    if isinstance(model, Replica):
        return _as_given(model, optimizer, averaging, num_shards)
    if isinstance(averaging.hook, Hook):
        check_momentum(averaging.hook, optimizer)
    return wrapped(move(model, comm.device), comm, averaging, num_shards=num_shards)


def check_model(model: nn.Module, optimizer: Optimizer, comm: Communicator) -> None:
    """Raises ConfigError unless the optimizer can train the model; warns of parameters that it leaves out."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={model!r:.60}: give a torch.nn.Module; of a class, an object")
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer={optimizer!r:.60}: give a torch.optim.Optimizer; of a class, an object")
    if isinstance(optimizer, LBFGS):
        raise ConfigError("LBFGS evaluates the loss several times a step, which fit does not: take another optimizer")
    if not isinstance(model, Replica) and isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError("the model is in torch's DistributedDataParallel already: give ddp.fit the bare module")
    named = dict(model.named_parameters())
    own = {id(parameter): key for key, parameter in named.items()}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not held <= own.keys():
        raise ConfigError(
            f"the optimizer holds {len(held - own.keys())} parameter(s) that are not the model's: make the optimizer "
            "from the parameters of the model that is trained, after the model was changed or copied; if they are "
            "weights of a loss, put the loss into the model (docs/losses.md)"
        )
    left_out = [key for key, p in named.items() if p.requires_grad and id(p) not in held]
    if left_out and comm.rank == 0:
        log.warning(
            "the optimizer leaves out %d parameter(s) of the model that have a gradient, such as %s: they stay as they "
            "are; requires_grad_(False) would save their gradients",
            len(left_out),
            left_out[0],
        )


def _as_given(model: Replica, optimizer: Optimizer, averaging: Averaging, num_shards: int | None) -> Replica:
    """Returns a replica that the program has made.

    Raises:
        ConfigError: a setting contradicts its arguments.
    """
    name = type(model).__name__
    sizes = "bucket_cap_mb", "first_bucket_mb", "units"
    for key in ("wire", "hook", *sizes, "find_unused_parameters", "direct_gradients"):
        if (given := getattr(averaging, key)) != getattr(Averaging, key):
            what = f"give {key} to the replica" if model.collective is not None else "give ddp.fit the bare module"
            raise ConfigError(f"{key}={given!r} with a model in a {name}: {what}")
    if model.num_shards != num_shards:
        instead = f"fit the bare module, or a ddp.BucketedDataParallel with num_shards={num_shards}"
        wanted = "give same_bits=True" if num_shards is None else instead
        raise ConfigError(f"a {name} with num_shards={model.num_shards}: {wanted}")
    if averaging.verify_every:
        model.verify_replicas(every=averaging.verify_every)
    if model.compression is not None:
        check_momentum(model.compression.hook, optimizer)
    if model.steps_in_backward:
        raise refusal("ddp.fit (which clips, and rolls back steps whose loss or gradient is not finite)")
    return model


def of_this_process(averaging: Averaging) -> Averaging:
    """Returns how the replica of this process averages; with parameter servers, it communicates nothing.

    A worker computes alone, and pushes its gradients; a server takes those that workers push.
    """
    part = current_role()
    if part is None:
        return averaging
    alone = Averaging(find_unused_parameters=averaging.find_unused_parameters)
    return alone if part.job == "worker" else replace(averaging, wire=None, hook=None)


def wrapped(
    module: nn.Module, comm: Communicator, averaging: Averaging, *, num_shards: int | None = None, **how: Any
) -> Replica:
    """Returns a module on this rank's device as the strategy's replica.

    Args:
        num_shards: as in `replica_of`.
        how: further arguments of the replica.
    """
    averaging = of_this_process(averaging)
    own = {} if averaging.units is None else {"units": averaging.units}
    replica = STRATEGIES[averaging.strategy].replica_of(
        module,
        comm=comm,
        wire=averaging.wire,
        hook=averaging.hook,
        bucket_cap_mb=averaging.bucket_cap_mb,
        first_bucket_mb=averaging.first_bucket_mb,
        find_unused_parameters=averaging.find_unused_parameters,
        direct_gradients=averaging.direct_gradients,
        num_shards=num_shards,
        **own,
        **how,
    )
    replica.verify_replicas(every=averaging.verify_every)
    return replica


def strategy_for(
    replica: Replica, optimizer: Optimizer, *, averaging: Averaging | None = None, **how: Any
) -> Strategy:
    """Returns the strategy for a kind of replica. With precision="bf16_pure" the parameters are bfloat16 then.

    Args:
        averaging: has the strategy's own settings, if there are any.
        how: further arguments of `Replicated`.

    Raises:
        ConfigError: precision, wire format, optimizer and replica do not go together.
    """
    chosen = strategy_of(replica, "auto" if averaging is None else averaging.strategy)
    own: dict[str, Any] = {"rounds": averaging} if isinstance(averaging, Rounds) else {}
    if isinstance(averaging, Rounds) and averaging.delay:
        chosen = Streaming
    return chosen(replica, optimizer, **how, **own)


def check_momentum(hook: Hook, optimizer: Optimizer) -> None:
    """Raises ConfigError if the hook and the optimizer both have momentum, which would act twice."""
    if hook.momentum and any(group.get("momentum") or group.get("betas") for group in optimizer.param_groups):
        raise ConfigError(
            f"momentum={hook.momentum:g} in the hook {hook!r}, and that of {type(optimizer).__name__}: leave one "
            "out, as in torch.optim.SGD(…, momentum=0)"
        )
