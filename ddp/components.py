"""From settings to components: the one place that takes a `Config` apart and passes plain arguments on.

Each function below builds one component of a run. Components know nothing of `Config`. A component of the user's own
is imported from its address here, in the parent before any worker starts, and in every worker.

Read before: `worker.py`, `config.py`. Read next: `trained.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adam, AdamW, Optimizer

from ddp import config as settings
from ddp.address import called, from_address, is_address, told
from ddp.collectives import catalog
from ddp.comm.communicator import Communicator
from ddp.config import Config
from ddp.data import digits, image_sets, standard_library, streams, synthetic
from ddp.data.batch_sizes import BatchSizes, BatchWarmup
from ddp.data.source import whole_splits
from ddp.data.splits import Splits
from ddp.errors import ConfigError
from ddp.models.cnn import CNN
from ddp.models.gpt import GPT
from ddp.models.mlp import MLP
from ddp.models.resnet import resnet
from ddp.optim import schedules
from ddp.optim.groups import parameter_groups
from ddp.optim.lamb import LAMB
from ddp.optim.lars import LARC, LARS
from ddp.optim.layerwise import Layerwise
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.naive import NaiveDataParallel
from ddp.replica.replica import Replica
from ddp.replica.sharded import ShardedDataParallel
from ddp.tasks.classification import Classification
from ddp.tasks.language_model import LanguageModel
from ddp.tasks.loss_function import LossFunction, as_task
from ddp.tasks.task import Task
from ddp.wording import counted

SMALL_IMAGE = 64  # pixels; below it a ResNet starts without striding


def load_data(config: Config, *, download: bool = False) -> Splits:
    """Returns training and held-out samples, after downloading what is missing if `download`."""
    match config.data:
        case settings.OwnData():
            return _own_data(config)
        case settings.Data(name="mnist", root=root):
            return image_sets.load_mnist(root, download=download)
        case settings.Data(name="cifar10", root=root):
            return image_sets.load_cifar10(root, download=download)
        case settings.ImageFolder(path=path, image_size=image_size):
            return image_sets.load_folder(cast(str, path), image_size=image_size)
        case settings.StandardLibrary(context=context):
            return standard_library.load(context=context)
        case settings.Synthetic(num_samples=num, image_size=image_size, num_classes=num_classes):
            return synthetic.load(
                image_size=image_size, num_classes=num_classes, num_train=num, num_test=max(1, num // 8)
            )
        case _:
            return digits.load()


def _own_data(config: Config) -> Splits:
    """Returns the user's own data, which are the same in every process: a function may draw them at random."""
    address, arguments = config.data.name, cast(settings.OwnData, config.data).args
    function = from_address(address, key="data", folder=config.run.code)
    with streams.preserved():
        streams.seed_generators(0, device="cpu")
        found = called(function, arguments, address=address, key="data")
        try:
            return whole_splits(found, name=address)
        except ConfigError as error:
            raise ConfigError(f"data={address}: {error}") from error
        except Exception as error:
            raise ConfigError(f"data={address}: taking its first sample failed: {told(error)}") from error


def make_task(config: Config) -> Task:
    """Returns the task that the model learns."""
    if config.loss == "auto":
        return LanguageModel() if isinstance(config.data, settings.StandardLibrary) else Classification()
    found = from_address(config.loss, key="loss", folder=config.run.code)
    try:
        return as_task(called(found, {}, address=config.loss, key="loss") if isinstance(found, type) else found)
    except ConfigError as error:
        raise error if str(error).startswith("loss=") else ConfigError(f"loss={config.loss}: {error}") from error


def make_model(config: Config, splits: Splits) -> nn.Module:
    """Returns the bare model, initialised from the global generator.

    Raises:
        ConfigError: it cannot be built, or does not go with the samples.
    """
    match config.model:
        case settings.OwnModel(name=address, args=arguments):
            return _own_model(address, arguments, folder=config.run.code)
        case settings.Mlp(hidden=hidden):
            shape, num_classes = _facts(config, splits)
            return MLP(in_features=math.prod(shape), hidden=(hidden, hidden), num_classes=num_classes)
        case settings.Cnn(width=width, dropout=dropout):
            shape, num_classes = _facts(config, splits, of="[channels, height, width]")
            return CNN(in_channels=shape[0], image_size=shape[1], num_classes=num_classes, width=width, dropout=dropout)
        case settings.Gpt(width=width, depth=depth, heads=heads, dropout=dropout):
            (context,), num_classes = _facts(config, splits, of="[time]")
            return GPT(vocab_size=num_classes, context=context, width=width, depth=depth, heads=heads, dropout=dropout)
        case _:
            shape, num_classes = _facts(config, splits, of="[channels, height, width]")
            small = shape[1] < SMALL_IMAGE
            return resnet(config.model.name, num_classes=num_classes, small_images=small, in_channels=shape[0])


def _own_model(address: str, arguments: dict[str, Any], *, folder: str) -> nn.Module:
    """Returns the user's own model."""
    found = from_address(address, key="model", folder=folder)
    model = called(found, arguments, address=address, key="model")
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ConfigError(f"model={address}: returned an object of type {kind}; return a torch.nn.Module")
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise ConfigError(f"model={address}: {lazy[0]} has no size yet; give it one, because replicas begin equal")
    return model


def make_model_without_memory(config: Config, splits: Splits) -> nn.Module:
    """Returns the model on the meta device; one of the user's own that cannot be built there is built for real."""
    try:
        with torch.device("meta"):
            return make_model(config, splits)
    except ConfigError:
        if isinstance(config.model, settings.OwnModel):
            return make_model(config, splits)
        raise


def _facts(config: Config, splits: Splits, *, of: str = "") -> tuple[tuple[int, ...], int]:
    """Returns what a shipped model must know about samples: their shape, and the number of classes.

    Args:
        of: the dimensions that the model reads; "": any.

    Raises:
        ConfigError: the user's own data do not tell, or have other dimensions.
    """
    shape, num_classes = splits.sample_shape, splits.num_classes
    model, data = f"model={config.model.name}", f"data={config.data.name}"
    unknown = {"sample_shape": shape, "num_classes": num_classes}
    if missing := [name for name, fact in unknown.items() if fact is None]:
        facts = ", ".join(f"{name}=…" for name in missing)
        raise ConfigError(
            f"{model}: needs the {' and '.join(missing)} of {data}; return ddp.Splits(train=…, test=…, {facts}) there"
        )
    assert shape is not None and num_classes is not None
    if of and len(shape) != len(of.split()):
        raise ConfigError(f"{model}: reads samples of {of}, and those of {data} are {list(shape)}; take model=mlp")
    return shape, num_classes


def check_loss(config: Config, splits: Splits) -> None:
    """Raises ConfigError if the loss cannot be that of the user's own data: without classes, or without pairs."""
    targets: Any = getattr(splits.train, "targets", None)
    is_own = isinstance(config.data, settings.OwnData)
    needs_pairs = isinstance(make_task(config), Classification | LossFunction) and splits.collate is None
    if is_own and needs_pairs and not (isinstance(first := splits.train[0], tuple | list) and len(first) == 2):
        raise ConfigError(
            f"loss={config.loss}: needs samples (input, target), and one of data={config.data.name} is a "
            f"{type(first).__name__}; return pairs there, or take a ddp.Task of your own"
        )
    if is_own and config.loss == "auto" and isinstance(targets, torch.Tensor) and targets.is_floating_point():
        kind = str(targets.dtype).removeprefix("torch.")
        raise ConfigError(
            f"loss=auto: is for classes, and the targets of data={config.data.name} are {kind}; "
            "take loss=torch.nn.functional:mse_loss, or a function of your own"
        )


def add_own_algorithm(config: Config, *, check: bool = False) -> None:
    """Puts the all-reduce that `comm.algorithm` gives the address of into the catalog, where communicators find it.

    Args:
        check: prove it first, for this number of workers.

    Raises:
        ConfigError: there is none, or it is wrong; the message says in which round of which rank.
    """
    name = config.comm.algorithm
    if not is_address(name):
        return
    schedule = catalog.own_all_reduce(from_address(name, key="comm.algorithm", folder=config.run.code))
    if check:
        catalog.prove(schedule, config.cluster.workers, what=f"comm.algorithm={name}")
    catalog.add(name, schedule)


def make_replica(config: Config, module: nn.Module, comm: Communicator) -> Replica:
    """Returns the module as a replica. `evaluate` and checkpoints synchronise its buffers, and no forward does."""
    if config.replica.kind == "naive":
        replica: Replica = NaiveDataParallel(module, comm=comm, broadcast_buffers=False)
    else:
        replica = (ShardedDataParallel if config.optim.sharded else BucketedDataParallel)(
            module,
            comm=comm,
            broadcast_buffers=False,
            bucket_cap_mb=config.replica.bucket_cap_mb,
            first_bucket_mb=config.replica.first_bucket_mb,
        )
    replica.verify_replicas(every=config.replica.verify_every)
    return replica


def learning_rate(config: Config) -> float:
    """Returns the configured learning rate, scaled for the global batch."""
    optim = config.optim
    return schedules.scaled_rate(
        optim.lr,
        global_batch=config.batch.global_size,
        base_batch=optim.base_batch,
        rule=optim.lr_scaling,
    )


def make_optimizer(config: Config, module: nn.Module) -> Optimizer:
    """Returns an optimizer over all parameters; biases and norms have neither weight decay nor a trust ratio.

    Raises:
        ConfigError: a preset, a choice or a name to be excluded does not exist.
    """
    optim, rate = config.optim, learning_rate(config)
    if isinstance(optim, settings.LayerwiseOptim):
        return _layerwise(optim, module, rate, clip_norm=config.clip_norm)
    groups = parameter_groups(module, weight_decay=optim.weight_decay, exclude=optim.exclude)
    match optim:
        case settings.Sgd(momentum=momentum, nesterov=nesterov):
            return SGD(groups, lr=rate, momentum=momentum, nesterov=nesterov and momentum > 0)
        case settings.Adam(name=name, beta1=beta1, beta2=beta2, eps=eps):
            kind = AdamW if name == "adamw" else Adam
            return kind(groups, lr=rate, betas=(beta1, beta2), eps=eps)
    raise AssertionError(optim)


def _layerwise(optim: settings.LayerwiseOptim, module: nn.Module, rate: float, *, clip_norm: float | None) -> Layerwise:
    """Returns LARS, LARC or LAMB."""
    of_excluded = {} if optim.preset == "nvlamb" else {"adapt": "never"}
    groups = parameter_groups(module, weight_decay=optim.weight_decay, exclude=optim.exclude, **of_excluded)
    kinds: dict[str, Callable[..., Layerwise]] = {"lars": LARS, "larc": LARC, "lamb": LAMB}
    for name in ("lr", "weight_decay", "preset"):
        if name in optim.args:
            raise ConfigError(f"optim.args.{name}={optim.args[name]}: is a setting of its own; set optim.{name}")
    try:
        optimizer = kinds[optim.name](groups, rate, preset=optim.preset, **optim.args)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"optim={optim.name}: {error}") from error
    if clip_norm is not None and optimizer.clip_norm is not None:
        raise ConfigError(
            f"clip_norm={clip_norm:g}: optim.preset={optim.preset} clips by itself, at {optimizer.clip_norm:g}; leave "
            "clip_norm out, or set optim.args.clip_norm=null"
        )
    return optimizer


def batch_of(config: Config, num_train: int) -> int | BatchWarmup:
    """Returns the global batch, or how it grows over a data set of so many samples."""
    first, last = config.batch.warmup_size, config.batch.global_size
    if first is None:
        return last
    samples = config.batch.warmup_samples or math.ceil((config.batch.warmup_epochs or 0) * num_train)
    return BatchWarmup(first, last, samples)


def warmup_samples(config: Config, num_train: int) -> float:
    """Returns in how many samples of all workers the learning rate rises."""
    schedule, optim, sizes = config.schedule, config.optim, BatchSizes(num_train, batch_of(config, num_train))
    if schedule.warmup_steps is not None:
        return sizes.after(0, schedule.warmup_steps)
    times = config.batch.global_size / optim.base_batch if optim.lr_scaling == "legw" else 1
    if schedule.warmup_samples is not None:
        return times * schedule.warmup_samples
    if schedule.warmup_epochs is not None:
        return times * schedule.warmup_epochs * num_train
    _, of_run = sizes.end(0, epochs=config.epochs, num_steps=config.max_steps)
    return times * (schedule.warmup_fraction or 0) * of_run


def derived(config: Config, num_train: int) -> list[str]:
    """Returns what follows from the rules for large batches, a line each."""
    rate, given, rise = learning_rate(config), config.optim.lr, warmup_samples(config, num_train)
    notes = [] if rate == given else [f"learning rate {rate:g}: {given:g} × {rate / given:g} for this batch"]
    if rise:
        steps = BatchSizes(num_train, batch_of(config, num_train)).num_steps(0, math.ceil(rise))
        notes.append(f"the learning rate rises over {rise:,.0f} samples ({counted(steps, 'step')})")
    return notes


def make_schedule(config: Config, num_train: int) -> schedules.RateSchedule:
    """Returns the learning-rate schedule for a data set of so many samples."""
    schedule = config.schedule
    match schedule:
        case settings.Cosine(final_factor=final_factor):
            factor = schedules.cosine(final_factor=final_factor)
        case settings.Polynomial(power=power, final_factor=final_factor):
            factor = schedules.polynomial(power=power, final_factor=final_factor)
        case settings.Wsd(decay_fraction=decay_fraction, final_factor=final_factor):
            factor = schedules.wsd(decay_fraction=decay_fraction, final_factor=final_factor)
        case settings.Step(milestones=milestones, gamma=gamma):
            factor = schedules.step(milestones=milestones, gamma=gamma)
        case _:
            factor = schedules.constant()
    return schedules.with_warmup(factor, num_samples=warmup_samples(config, num_train))
