"""From a word to a replica and the strategy that trains it: `STRATEGIES` is the table of the words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from ddp.comm import checks
from ddp.comm.communicator import Communicator
from ddp.comm.device import device_of
from ddp.comm.meeting.role import current_role
from ddp.comm.session import init
from ddp.errors import ConfigError
from ddp.gradients.hook import Hook
from ddp.policies import Averaging, Rounds
from ddp.process import gpu
from ddp.process.log import log
from ddp.replica.broadcast import move
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.drop_in.in_backward import refusal
from ddp.replica.parameters import sparse_weights
from ddp.replica.replica import Replica
from ddp.replica.sync_batchnorm import waits
from ddp.setting import Precision, StrategyName
from ddp.strategies import central_storage
from ddp.strategies.central_storage import CentralStorage
from ddp.strategies.local_sgd import LocalSteps, Streaming
from ddp.strategies.sharded import Served, Sharded
from ddp.strategies.strategy import Replicated, Strategy

# --- The words -------------------------------------------------------------------------------------------------------


class Setup(NamedTuple):
    """Says what a run is to train on which processes: by its settings, before these start; or as a rank finds it.

    Attributes:
        num_hosts: of settings: 2 if there are several.
        shares_memory: the ranks of a host share its memory.
        device: the kind of it.
        is_naive: the replica has no buckets.
        is_sparse: a layer of the model has sparse gradients.
        waits: a layer waits in its forward for other ranks (`SyncBatchNorm`).
    """

    world_size: int
    num_hosts: int
    shares_memory: bool
    device: str
    precision: Precision
    is_naive: bool
    is_sparse: bool
    waits: bool = False


class Refusal(NamedTuple):
    """Says which setups are refused.

    Attributes:
        holds: the setup is one of them.
        reason: the end of a sentence, with the remedy; {0} is the setup.
    """

    holds: Callable[[Setup], bool]
    reason: str


SEVERAL_RANKS = Refusal(
    lambda setup: setup.world_size > 1,
    "is for one worker, and there are {0.world_size}; take one worker, or strategy=auto",
)
SEVERAL_HOSTS = Refusal(
    lambda setup: setup.num_hosts > 1,
    "is for the workers of one host, and there are several hosts; take strategy=multi_worker",
)
NO_BUCKETS = Refusal(
    lambda setup: setup.is_naive, "needs replica.kind=bucketed, whose buckets it cuts into slices; leave one out"
)
MASTER_WEIGHTS = Refusal(
    lambda setup: setup.precision == "bf16_pure",
    "precision=bf16_pure has master weights, which are not cut into slices; take precision=bf16, or strategy=auto",
)
SPARSE_GRADIENTS = Refusal(
    lambda setup: setup.is_sparse, "a layer has sparse gradients, which no slice can hold; take strategy=auto"
)
PRIVATE_MEMORY = Refusal(lambda setup: not setup.shares_memory, central_storage.PRIVATE_MEMORY)
ON_GPU = Refusal(lambda setup: setup.device != "cpu", central_storage.ON_GPU)
LOSS_SCALE = Refusal(
    lambda setup: setup.precision == "fp16",
    "precision=fp16 repeats steps with another loss scale, which workers do not agree on; take precision=bf16",
)
NO_FELLOWS = Refusal(
    lambda setup: setup.waits, "SyncBatchNorm waits for the other workers, which do not wait here; take BatchNorm"
)
SERVED_ON_CPU = Refusal(
    lambda setup: setup.device != "cpu", "servers and workers exchange what is on the CPU; take device=cpu"
)
NO_ROUNDS = (
    Refusal(lambda setup: setup.is_naive, "needs replica.kind=bucketed, whose buckets are exchanged; leave one out"),
    Refusal(
        lambda setup: setup.precision in ("fp16", "bf16_pure"),
        "precision={0.precision} has a loss scale or master weights, of which all workers need the same; take "
        "precision=bf16 or fp32",
    ),
    Refusal(
        lambda setup: setup.is_sparse,
        "a layer has sparse gradients, and the difference of its weights is dense; take strategy=auto",
    ),
    Refusal(
        lambda setup: setup.waits,
        "SyncBatchNorm lets all workers wait for each other in each forward; take BatchNorm, or strategy=auto",
    ),
)
OF_SLICES = (NO_BUCKETS, MASTER_WEIGHTS, SPARSE_GRADIENTS)
"""Refused where each rank updates a slice."""


class Row(NamedTuple):
    """Says what a word of `strategy` stands for.

    Attributes:
        strategy: its class: which gradients a rank gets, what it updates, and which state it holds.
        refuses: setups that it cannot train.
    """

    strategy: type[Replicated]
    refuses: Sequence[Refusal] = ()


# fmt: off
STRATEGIES: dict[StrategyName, Row] = {
    "auto":            Row(Replicated),
    "one_device":      Row(Replicated, (SEVERAL_RANKS,)),
    "mirrored":        Row(Replicated, (SEVERAL_HOSTS,)),
    "multi_worker":    Row(Replicated),
    "sharded":         Row(Sharded, OF_SLICES),
    "central_storage": Row(CentralStorage, (*OF_SLICES, PRIVATE_MEMORY, ON_GPU)),
    "parameter_server": Row(Served, (*OF_SLICES, LOSS_SCALE, NO_FELLOWS, SERVED_ON_CPU)),
    "local_sgd":       Row(LocalSteps, NO_ROUNDS),
}
# fmt: on


def refuse(word: StrategyName, setup: Setup) -> None:
    """Raises ConfigError, with the remedy, if a strategy cannot train this."""
    for each in STRATEGIES[word].refuses:
        if each.holds(setup):
            raise ConfigError(f"strategy={word}: {each.reason.format(setup)}")


def strategy_of(replica: Replica, word: StrategyName) -> type[Replicated]:
    """Returns the class of the strategy for a replica: the word's, or of "auto" the first one that takes it."""
    if word != "auto":
        return STRATEGIES[word].strategy
    return next(row.strategy for row in STRATEGIES.values() if row.strategy.takes(replica))


def same_bits_as(word: StrategyName) -> StrategyName:
    """Returns the first word with the same class, and so with the same bits on the same processes."""
    return next(each for each, row in STRATEGIES.items() if row.strategy is STRATEGIES[word].strategy)


# --- The replica -----------------------------------------------------------------------------------------------------


def ranks_of(model: nn.Module) -> Communicator:
    """Returns the ranks of a replica, or all: those on the model's GPU, or else on the device to be moved to.

    Raises:
        ConfigError: the model is on another GPU than this process's communicator.
    """
    if isinstance(model, Replica):
        return model.comm
    device = device_of(model) if isinstance(model, nn.Module) else None
    if device is None or device.type != gpu.KIND:
        return init(device="auto")
    comm = init(device=device)
    if comm.device != device:  # its optimizer may have tensors there, too
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
    precision: Precision = "fp32",
    num_shards: int | None = None,
) -> Replica:
    """Returns the model as a replica on the rank's device.

    Args:
        num_shards: of a batch, by which gradients are added up; None: by ranks.

    Raises:
        ConfigError: the model cannot be trained here, or not by this optimizer.
    """
    _check(model, optimizer, comm)
    asked, averaging = averaging.strategy, of_this_process(averaging)
    word, row = averaging.strategy, STRATEGIES[averaging.strategy]
    if isinstance(model, Replica) and word != "auto" and not row.strategy.takes(model):
        reducer = row.strategy.reducer
        raise ConfigError(
            f"strategy={word} with a model in a {type(model).__name__}: give ddp.fit the bare module; or, for some of "
            f"the ranks, a ddp.BucketedDataParallel(module, comm=…, reducer={reducer.__name__}), of "
            f"{reducer.__module__}"
        )
    refuse(asked, setup_of(model, comm, precision))
    if isinstance(model, Replica):
        return _as_given(model, optimizer, averaging, num_shards)
    if isinstance(averaging.hook, Hook):
        check_momentum(averaging.hook, optimizer)
    return wrapped(move(model, comm.device), comm, averaging, num_shards=num_shards)


def _check(model: nn.Module, optimizer: Optimizer, comm: Communicator) -> None:
    """Raises ConfigError unless the optimizer can train the model; warns of parameters that it leaves out."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={model!r:.60}: give a torch.nn.Module; of a class, an object")
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer={optimizer!r:.60}: give a torch.optim.Optimizer; of a class, an object")
    if isinstance(optimizer, LBFGS):
        raise ConfigError("LBFGS evaluates the loss several times a step, which fit does not: take another optimizer")
    if not isinstance(model, Replica) and isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError("the model is in torch's DistributedDataParallel already: give ddp.fit the bare module")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(f"the model {name} is on the meta device and has no weights: model.to_empty(device=…) first")
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
    """Returns a replica of the program's own.

    Raises:
        ConfigError: a setting contradicts how it was made.
    """
    name = type(model).__name__
    for key in ("wire", "hook", "bucket_cap_mb", "first_bucket_mb", "find_unused_parameters"):
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
        raise refusal("ddp.fit (which clips, and takes back steps whose loss or gradient is not finite)")
    return model


def setup_of(model: nn.Module, comm: Communicator, precision: Precision) -> Setup:
    """Returns the setup that a rank finds."""
    return Setup(
        world_size=comm.world_size,
        num_hosts=len(comm.hosts),
        shares_memory=comm.host_partition.num_hosts == len(comm.hosts),  # else each rank counts as a host there
        device=comm.device.type,
        precision=precision,
        is_naive=isinstance(model, Replica) and model.collective is None,
        is_sparse=has_sparse_gradients(model),
        waits=waits(model),
    )


def of_this_process(averaging: Averaging) -> Averaging:
    """Returns how the replica of this process averages: of parameter servers, nothing travels by it.

    A worker computes alone, and pushes what it has found; a server takes what workers push.
    """
    part = current_role()
    if part is None:
        return averaging
    alone = Averaging(find_unused_parameters=averaging.find_unused_parameters)
    return alone if part.job == "worker" else replace(averaging, wire=None, hook=None)


def has_sparse_gradients(model: nn.Module) -> bool:
    """Returns True if a layer of the model has sparse gradients."""
    return bool(sparse_weights(model))


def wrapped(
    module: nn.Module, comm: Communicator, averaging: Averaging, *, num_shards: int | None = None, **how: Any
) -> BucketedDataParallel:
    """Returns a module of this device as the strategy's replica.

    Args:
        num_shards: as in `replica_of`.
        how: further arguments of the replica.
    """
    averaging = of_this_process(averaging)
    replica = BucketedDataParallel(
        module,
        comm=comm,
        wire=averaging.wire,
        hook=averaging.hook,
        bucket_cap_mb=averaging.bucket_cap_mb,
        first_bucket_mb=averaging.first_bucket_mb,
        find_unused_parameters=averaging.find_unused_parameters,
        num_shards=num_shards,
        reducer=STRATEGIES[averaging.strategy].strategy.reducer,
        **how,
    )
    replica.verify_replicas(every=averaging.verify_every)
    return replica


def strategy_for(
    replica: Replica,
    optimizer: Optimizer,
    *,
    precision: Precision = "fp32",
    clip_norm: float | None = None,
    watched: bool = True,
    averaging: Averaging | None = None,
) -> Strategy:
    """Returns the strategy for a kind of replica. With precision="bf16_pure" the parameters are bfloat16 then.

    Args:
        averaging: has the settings of the strategy's own, if there are any.
        precision, clip_norm, watched: as in `Replicated`.

    Raises:
        ConfigError: precision, wire format, optimizer and replica do not go together.
    """
    chosen = strategy_of(replica, "auto" if averaging is None else averaging.strategy)
    if precision != "bf16_pure":
        if replica.wire == "fp32" and all(parameter.dtype.itemsize >= 4 for parameter in replica.parameters()):
            raise ConfigError("wire='fp32': all gradients are float32 already; leave it out")
    elif chosen is Replicated:
        try:
            checks.wire(replica.wire, "mean", torch.bfloat16)
        except ConfigError as error:
            raise ConfigError(f"{error}; with precision='bf16_pure' gradients are bfloat16") from None
    own: dict[str, Any] = {"rounds": averaging} if isinstance(averaging, Rounds) else {}
    if isinstance(averaging, Rounds) and averaging.delay:
        chosen = Streaming
    return chosen(replica, optimizer, precision=precision, clip_norm=clip_norm, watched=watched, **own)


def check_momentum(hook: Hook, optimizer: Optimizer) -> None:
    """Raises ConfigError if the hook and the optimizer both have momentum, which would act twice."""
    if hook.momentum and any(group.get("momentum") or group.get("betas") for group in optimizer.param_groups):
        raise ConfigError(
            f"momentum={hook.momentum:g} in the hook {hook!r}, beside that of {type(optimizer).__name__}: leave one "
            "out, as in torch.optim.SGD(…, momentum=0)"
        )
