"""From a model and settings to a replica, and the strategy that trains it."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from ddp import gpu
from ddp.comm import checks
from ddp.comm.communicator import Communicator
from ddp.comm.device import device_of
from ddp.comm.session import init
from ddp.errors import ConfigError
from ddp.gradients.hooks.hook import Hook
from ddp.policies import Averaging
from ddp.process.log import log
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.drop_in.data_parallel import DistributedDataParallel
from ddp.replica.drop_in.in_backward import refusal
from ddp.replica.replica import Replica
from ddp.replica.settlement import produces_sparse_gradient
from ddp.replica.sharded import ShardedDataParallel
from ddp.setting import Precision
from ddp.strategies.replicated import Replicated
from ddp.strategies.sharded import Sharded
from ddp.strategies.strategy import Strategy


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


def replica_of(model: nn.Module, optimizer: Optimizer, comm: Communicator, averaging: Averaging) -> Replica:
    """Returns the model as a replica on the rank's device; of the drop-in class where gradients are sparse.

    Raises:
        ConfigError: the model cannot be trained here, or not by this optimizer.
    """
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
            "from the parameters of the model that is trained, after the model was changed or copied"
        )
    left_out = [key for key, p in named.items() if p.requires_grad and id(p) not in held]
    if left_out and comm.rank == 0:
        log.warning(
            "the optimizer leaves out %d parameter(s) of the model that have a gradient, such as %s: they stay as they "
            "are; requires_grad_(False) would save their gradients",
            len(left_out),
            left_out[0],
        )
    sharded = averaging.strategy == "sharded"
    if isinstance(model, Replica):
        if sharded and not isinstance(model, ShardedDataParallel):
            raise ConfigError(
                f"strategy='sharded' with a model in a {name}: give ddp.fit the bare module; or, for some of the "
                "ranks, a ShardedDataParallel(module, comm=…) of ddp.replica.sharded"
            )
        for key in ("wire", "hook", "bucket_cap_mb", "first_bucket_mb"):
            if (given := getattr(averaging, key)) != getattr(Averaging, key):
                takes_it = isinstance(model, BucketedDataParallel)
                what = f"give {key} to the replica" if takes_it else "give ddp.fit the bare module"
                raise ConfigError(f"{key}={given!r} with a model in a {name}: {what}")
        if averaging.verify_every:
            model.verify_replicas(every=averaging.verify_every)
        if model.compression is not None:
            check_momentum(model.compression.hook, optimizer)
        if isinstance(model, DistributedDataParallel) and model.steps_in_backward:
            raise refusal("ddp.fit (which clips, and takes back steps whose loss or gradient is not finite)")
        return model
    if isinstance(averaging.hook, Hook):
        check_momentum(averaging.hook, optimizer)
    model.to(comm.device)  # in place, so that the optimizer's parameters are still the model's
    is_sparse = any(produces_sparse_gradient(layer) for layer in model.modules())
    if is_sparse and sharded:
        raise ConfigError("strategy='sharded': a layer has sparse gradients, which no slice can hold; leave it out")
    kind = ShardedDataParallel if sharded else DistributedDataParallel if is_sparse else BucketedDataParallel
    replica: BucketedDataParallel = kind(
        model,
        comm=comm,
        wire=averaging.wire,
        hook=averaging.hook,
        bucket_cap_mb=averaging.bucket_cap_mb,
        first_bucket_mb=averaging.first_bucket_mb,
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
) -> Strategy:
    """Returns the strategy for a kind of replica. With precision="bf16_pure" the parameters are bfloat16 then.

    Args:
        precision, clip_norm, watched: as in `Replicated`.

    Raises:
        ConfigError: precision, wire format, optimizer and replica do not go together.
    """
    match replica:
        case ShardedDataParallel():
            chosen: type[Replicated] = Sharded
        case _:
            chosen = Replicated
    if precision != "bf16_pure":
        if replica.wire == "fp32" and all(parameter.dtype.itemsize >= 4 for parameter in replica.parameters()):
            raise ConfigError("wire='fp32': all gradients are float32 already; leave it out")
    elif chosen is Replicated:
        try:
            checks.wire(replica.wire, "mean", torch.bfloat16)
        except ConfigError as error:
            raise ConfigError(f"{error}; with precision='bf16_pure' gradients are bfloat16") from None
    return chosen(replica, optimizer, precision=precision, clip_norm=clip_norm, watched=watched)


def check_momentum(hook: Hook, optimizer: Optimizer) -> None:
    """Raises ConfigError if the hook and the optimizer both have momentum, which would act twice."""
    if hook.momentum and any(group.get("momentum") or group.get("betas") for group in optimizer.param_groups):
        raise ConfigError(
            f"momentum={hook.momentum:g} in the hook {hook!r}, beside that of {type(optimizer).__name__}: leave one "
            "out, as in torch.optim.SGD(…, momentum=0)"
        )
