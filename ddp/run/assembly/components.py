"""From settings to components: the place that takes a `Config` apart into plain arguments.

Each function below builds one component of a run. Components know nothing of `Config`. A component of the user's own
is imported from its address here, in the parent before any worker starts, and in every worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ddp.collectives import catalog
from ddp.comm.communicator import Communicator
from ddp.data.loading.fetching import UNREADABLE
from ddp.data.loading.source import whole_splits
from ddp.data.orders.steps import BatchWarmup, Steps, StepsLeft
from ddp.data.orders.token_budget import TokenBudget
from ddp.data.samples import Samples, Splits, Transformed
from ddp.data.sets.file_splits import Files
from ddp.data.sets.image_sets import Augment
from ddp.data.sets.validation import with_share
from ddp.errors import ConfigError
from ddp.gradients import DenseStart, Hook
from ddp.optim import schedules
from ddp.optim.layerwise import parameter_groups
from ddp.policies import Averaging, Buckets, ParameterServer
from ddp.process import streams
from ddp.replica.naive import NaiveDataParallel
from ddp.replica.replica import Replica
from ddp.replica.sync_batchnorm import SyncBatchNorm
from ddp.run.settings.address import called, check_arguments, error_line, from_address, is_address
from ddp.run.settings.checks import NO_METRIC, setup_of
from ddp.run.settings.choices import Loading
from ddp.run.settings.config import Config
from ddp.run.settings.groups import DataFiles
from ddp.setting import refuse
from ddp.strategies.choice import wrapped
from ddp.train.reports.profiler import Profiler
from ddp.train.reports.trackers import CSV, MLflow, TensorBoard, Tracker, WandB, refuse_twice
from ddp.train.steps.callbacks import EMA, Callback, EarlyStopping
from ddp.train.steps.task import ByteModel, Classification, LanguageModel, LossFunction, Regression, Task, as_task
from ddp.train.supervision import Guard, Watch
from ddp.units import counted

_NUM_TRIED = 100  # samples, of which one must be readable


def load_data(config: Config, *, download: bool = False) -> Splits:
    """Returns training and held-out samples; `download` fetches missing files first."""
    splits, share = _whole_data(config, download=download), config.data.validation
    if share is None:
        return splits
    if splits.validation is not None:
        raise ConfigError(f"data.validation={share:g}: data={config.data.name} has a validation set; leave it out")
    return with_share(splits, share, seed=config.seed)


def load_held_out(config: Config, *, download: bool = False) -> Splits:
    """Returns the data set; if it lies in files, only its test samples."""
    return _whole_data(config, download=download, trains=False)


def _whole_data(config: Config, *, download: bool, trains: bool = True) -> Splits:
    """Returns all samples of the data set; without `trains`, at least the test samples."""
    data, files = config.data, None
    if is_address(data.name):
        return _own_data(config)
    if isinstance(data, DataFiles):
        files = Files(
            path=data.path if trains else None,
            test_path=cast(str, data.test_path),
            validation_path=data.validation_path if trains else None,
            index_dir=data.index_dir,
            cache_dir=data.cache_dir,
            build=download,
        )
    own = (lambda address: _own_transform(config, address)) if trains else (lambda address: None)
    splits: Splits = data.make(Loading(own, files, trains, download))
    return splits


def _own_data(config: Config) -> Splits:
    """Returns the user's own data. A fixed seed makes data that are drawn at random identical in every process."""
    address, arguments = config.data.name, asdict(config.data)["args"]
    function = from_address(address, key="data", folder=config.run.code)
    with streams.preserved():
        streams.seed_generators(0, device="cpu")
        found = called(function, arguments, address=address, key="data")
        try:
            return whole_splits(found, name=address)
        except ConfigError as error:
            raise ConfigError(f"data={address}: {error}") from error
        except Exception as error:
            raise ConfigError(f"data={address}: taking its first sample failed: {error_line(error)}") from error


def _own_transform(config: Config, address: str | None) -> Augment | None:
    """Returns the user's own augmentation; a class is instantiated."""
    if address is None:
        return None
    key = "data.transform"
    found = from_address(address, key=key, folder=config.run.code)
    found = called(found, {}, address=address, key=key) if isinstance(found, type) else found
    if not callable(found):
        raise ConfigError(f"{key}={address}: is {found!r:.60}; give the address of a function of an image")
    return cast(Augment, found)


def check_transform(config: Config, splits: Splits) -> None:
    """Raises ConfigError unless the user's own augmentation turns an image into a tensor that models take."""
    address, train = getattr(config.data, "transform", None), splits.train
    if address is None or not isinstance(train, Transformed) or (image := _first_readable(train.samples)) is None:
        return
    try:
        with streams.preserved():
            made, _ = train.transform(image)
    except Exception as error:
        raise ConfigError(f"data.transform={address}: calling it failed: {error_line(error)}") from error
    shape = list(splits.sample_shape or ())
    if not isinstance(made, Tensor) or list(made.shape) != shape or made.dtype != torch.float32:
        found = f"{made.dtype} {list(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
        raise ConfigError(
            f"data.transform={address}: makes {found.removeprefix('torch.')} of an image, and models take float32 "
            f"{shape}: return such a tensor; for a Pillow image, an image of this size, which is then normalised"
        )


def _first_readable(samples: Any) -> Any:
    """Returns the first readable sample among the first ones; None if none of them can be read."""
    for index in range(min(_NUM_TRIED, len(samples))):
        with suppress(*UNREADABLE):
            return samples[index]
    return None


def make_callbacks(config: Config) -> list[Callback]:
    """Returns the callbacks of the run."""
    ours: list[tuple[bool, type[Callback], Any]] = [  # whether it is wanted, and the arguments that it is made of
        (config.ema.decay is not None, EMA, config.ema),
        (config.early_stopping.patience is not None, EarlyStopping, config.early_stopping),
        (config.watch.action != "off", Watch, config.watch),
        ((config.guard.action, config.guard.spike) != ("stop", None), Guard, config.guard),
    ]
    made = [kind(**asdict(settings)) for is_wanted, kind, settings in ours if is_wanted]
    own = [_own_callback(address, folder=config.run.code) for address in config.callbacks]
    profilers = [Profiler(**asdict(config.profile))] if config.profile.steps else []
    trackers = (_tracker(name, group=config.run.group) for name in config.trackers)
    return [*made, *own, *profilers, *trackers]


def check_callbacks(config: Config) -> None:
    """Raises ConfigError unless the callbacks can be made. A class is not called, because it may have side effects."""
    for address in config.callbacks:
        callback = _own_callback(address, folder=config.run.code, calls_class=False)
        is_one = issubclass(callback if isinstance(callback, type) else type(callback), EarlyStopping)
        if is_one and config.evaluate.by == "sidecar":
            raise ConfigError(f"callbacks={address}: {NO_METRIC.format('evaluate.by=sidecar')}; leave one out")
    refuse_twice([_tracker(name, group=config.run.group) for name in config.trackers])


def _own_callback(address: str, *, folder: str | Path, calls_class: bool = True) -> Any:
    """Returns the user's own callback, or its class.

    Raises:
        ConfigError: it cannot be imported or called, or is no callback.
    """
    key = "callbacks"
    found = from_address(address, key=key, folder=folder)
    is_class = isinstance(found, type) and issubclass(found, Callback)
    if is_class and not calls_class:
        check_arguments(found, {}, address=address, key=key)
        return found
    callback = found if isinstance(found, type) and not is_class else called(found, {}, address=address, key=key)
    if isinstance(callback, type):
        raise ConfigError(f"{key}={address}: is no ddp.Callback; derive the class from that")
    if not isinstance(callback, Callback):
        kind = type(callback).__name__
        raise ConfigError(f"{key}={address}: returned an object of type {kind}; return a ddp.Callback")
    return callback


def _tracker(name: str, *, group: str) -> Tracker:
    kinds: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "csv": CSV, "mlflow": MLflow, "wandb": WandB}
    try:
        return kinds[name](group=group)
    except ConfigError as error:
        raise ConfigError(f"trackers=[{name}]: {error}") from error


def make_task(config: Config, splits: Splits | None = None) -> Task:
    """Returns the task that the model learns.

    Args:
        splits: the data, if they are loaded; the first target of the user's own data decides if targets are numbers.
    """
    if config.loss == "auto":
        if getattr(config.data, "text", None) is not None:
            return ByteModel() if asdict(config.data)["tokenizer"] == "bytes" else LanguageModel()
        if _has_number(config, splits):
            return Regression()
        tasks = {"standard_library": ByteModel, "tokens": LanguageModel}
        return tasks.get(config.data.name, Classification)()
    found = from_address(config.loss, key="loss", folder=config.run.code)
    if not callable(found) and not isinstance(found, Task):
        raise ConfigError(f"loss={config.loss}: is {found!r:.60}; give the address of a function (outputs, targets)")
    try:
        return as_task(called(found, {}, address=config.loss, key="loss") if isinstance(found, type) else found)
    except ConfigError as error:
        raise error if str(error).startswith("loss=") else ConfigError(f"loss={config.loss}: {error}") from error


def _has_number(config: Config, splits: Splits | None) -> bool:
    """Returns True if the target of a sample is a number and not a class."""
    if not is_address(config.data.name):
        return getattr(config.data, "num_classes", 0) is None
    known = splits or load_data(config)
    if known.num_classes is not None:
        return False
    if not (samples := next((side for side in (known.train, known.test) if len(side)), None)):
        return True  # a run without its data
    target = first[1] if isinstance(first := samples[0], tuple | list) and len(first) == 2 else None
    is_number = isinstance(target, Tensor) and target.is_floating_point() and target.numel() == 1
    return is_number or isinstance(target, float)


def make_model(config: Config, splits: Splits) -> nn.Module:
    """Returns the bare model, initialised from the global generator.

    Raises:
        ConfigError: it cannot be built, or does not fit the samples.
    """
    if is_address(config.model.name):
        return own_model(config.model.name, asdict(config.model)["args"], key="model", folder=config.run.code)
    model: nn.Module = config.model.make(partial(_facts, config, splits))
    return model


def make_model_without_memory(config: Config, splits: Splits) -> nn.Module:
    """Returns the model on the meta device; the user's own model, if it cannot be built there, on the CPU."""
    try:
        with torch.device("meta"):
            return make_model(config, splits)
    except ConfigError:
        if is_address(config.model.name):
            return make_model(config, splits)
        raise


def _facts(config: Config, splits: Splits, *, of: str = "") -> tuple[tuple[int, ...], int]:
    """Returns the shape of a sample, and the number of classes, from which a shipped model is built.

    Args:
        of: the dimensions that the model reads; "": any.

    Raises:
        ConfigError: the user's own data do not say, or have other dimensions.
    """
    shape, num_classes = splits.sample_shape, splits.num_classes
    if isinstance(make_task(config, splits), Regression):
        num_classes = num_classes or 1
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
    """Raises ConfigError if the loss needs classes or pairs, and the user's own data have none."""
    targets: Any = getattr(splits.train, "targets", None)
    is_own = is_address(config.data.name)
    task = make_task(config, splits)
    needs_pairs = isinstance(task, Classification | LossFunction) and splits.collate is None
    if is_own and needs_pairs and not (isinstance(first := splits.train[0], tuple | list) and len(first) == 2):
        raise ConfigError(
            f"loss={config.loss}: needs samples (input, target), and one of data={config.data.name} is a "
            f"{type(first).__name__}; return pairs there, or take a ddp.Task of your own"
        )
    is_float = isinstance(targets, Tensor) and targets.is_floating_point()
    if is_own and is_float and config.loss == "auto" and not isinstance(task, Regression):
        kind = str(targets.dtype).removeprefix("torch.")
        raise ConfigError(
            f"loss={config.loss}: is for classes, and the targets of data={config.data.name} are {kind} "
            f"{list(targets.shape)}; take loss=ddp:Regression, or a function of your own"
        )


def add_own_algorithm(config: Config, *, check: bool = False) -> None:
    """Adds the all-reduce at the address in `comm.algorithm` to the catalog, where communicators find it.

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


def make_hook(config: Config) -> Hook | None:
    """Returns the hook that compresses gradients; None without one."""
    hook: Hook | None = config.hook.make(config.seed)
    first_steps = config.hook.dense_start_steps
    return DenseStart(hook, first_steps) if hook is not None and first_steps else hook


def synchronised(config: Config, module: nn.Module) -> nn.Module:
    """Returns the module, with BatchNorms over the samples of all ranks if the settings say so.

    Raises:
        ConfigError: it has none, or one that cannot be converted.
    """
    if not config.replica.sync_batchnorm:
        return module
    converted = SyncBatchNorm.convert(module)
    if not any(isinstance(layer, SyncBatchNorm) for layer in converted.modules()):
        raise ConfigError(f"replica.sync_batchnorm=true: model={config.model.name} has no BatchNorm; leave it out")
    return converted


def make_replica(config: Config, module: nn.Module, comm: Communicator) -> Replica:
    """Returns the module as a replica. `evaluate` and checkpoints synchronise its buffers; forwards do not."""
    module = synchronised(config, module)
    if config.replica.kind == "naive":
        replica = NaiveDataParallel(module, comm=comm, broadcast_buffers=False)
        replica.verify_replicas(every=config.replica.verify_every)
        return replica
    buckets = {item.name: getattr(config.replica, item.name) for item in fields(Buckets)}
    policy = replace(averaging_of(config), hook=make_hook(config), **buckets)
    num_shards = config.batch.num_shards if config.same_bits.on else None
    own = {"num_devices": config.cluster.workers} if config.strategy.name == "tpu" else {}
    return wrapped(module, comm, policy, num_shards=num_shards, broadcast_buffers=False, **own)


def averaging_of(config: Config) -> Averaging:
    """Returns the policy that says who holds parameters and optimizer state; servers also need wire type and hook."""
    averaging: Averaging = config.strategy.make()
    if isinstance(averaging, ParameterServer):
        return replace(averaging, wire=config.replica.wire, hook=make_hook(config))
    return averaging


# --- A model of the user's own ---------------------------------------------------------------------------------------


def own_model(address: str, arguments: Mapping[str, Any], *, key: str, folder: str | Path) -> nn.Module:
    """Returns the model that the class or function MODULE:NAME makes of the arguments.

    Args:
        key: the setting that holds the address, for errors.
        folder: searched after everything else on `sys.path`.

    Raises:
        ConfigError: it cannot be imported or called, or what it returns is no model, or has parameters without a size.
    """
    found = from_address(address, key=key, folder=folder)
    model = called(found, arguments, address=address, key=key)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ConfigError(f"{key}={address}: returned an object of type {kind}; return a torch.nn.Module")
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise ConfigError(f"{key}={address}: {lazy[0]} has no size yet; give it one, because replicas begin equal")
    return model


# --- What changes the weights: the optimizer, its rate, the global batch, and their schedules ------------------------
#
# Settings that follow from others, such as the rate from the batch, are derived here once.


def learning_rate(config: Config) -> float:
    """Returns the configured learning rate, scaled for the global batch."""
    optim, size = config.optim, config.batch.global_size
    return schedules.scaled_rate(optim.lr, global_batch=size, base_batch=optim.base_batch, rule=optim.lr_scaling)


def make_optimizer(config: Config, module: nn.Module) -> Optimizer:
    """Returns an optimizer over all parameters; biases and norms have neither weight decay nor a trust ratio.

    Raises:
        ConfigError: a preset, a choice or a name to be excluded does not exist.
    """
    groups = partial(parameter_groups, module, exclude=config.optim.exclude)
    optimizer: Optimizer = config.optim.make(groups, lr=learning_rate(config))
    clips_at = getattr(optimizer, "clip_norm", None)
    refuse(setup_of(config, own_clip_norm=clips_at))
    return optimizer


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keeps optimizers made in the block from importing torch's compiler, which takes a second and which none needs."""
    asks = Optimizer.add_param_group
    Optimizer.add_param_group = getattr(asks, "__wrapped__", asks)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.add_param_group = asks  # type: ignore[method-assign]


def batch_of(config: Config, train: Samples) -> int | BatchWarmup | TokenBudget:
    """Returns the global batch, or how it grows over a data set, or its budget of tokens.

    Raises:
        ConfigError: the data do not give the lengths of samples, or one is longer than the budget.
    """
    first, last = config.batch.warmup_size, config.batch.global_size
    if config.batch.tokens is not None:
        return _budget(config, train)
    if first is None:
        return last
    samples = config.batch.warmup_samples or math.ceil((config.batch.warmup_epochs or 0) * len(train))
    return BatchWarmup(first, last, samples)


def _budget(config: Config, train: Samples) -> TokenBudget:
    if (lengths := getattr(train, "lengths", None)) is None:
        raise ConfigError(
            f"batch.tokens={config.batch.tokens}: data={config.data.name} do not say how long samples are; give the "
            "data set an attribute `lengths`, one number for each sample, or leave it out"
        )
    try:
        return TokenBudget(cast(int, config.batch.tokens), lengths)
    except ConfigError as error:
        raise ConfigError(f"batch.{error}") from error


def warmup_samples(config: Config, sizes: Steps) -> float:
    """Returns the number of samples, of all workers, over which the learning rate rises."""
    schedule, optim = config.schedule, config.optim
    if schedule.warmup_steps is not None:
        return sizes.after(0, schedule.warmup_steps)
    times = config.batch.global_size / optim.base_batch if optim.lr_scaling == "legw" else 1
    if schedule.warmup_samples is not None:
        return times * schedule.warmup_samples
    if schedule.warmup_epochs is not None:
        return times * schedule.warmup_epochs * sizes.length
    return times * (schedule.warmup_fraction or 0) * _samples_of_run(config, sizes)


def _samples_of_run(config: Config, sizes: Steps) -> int:
    _, num_samples = StepsLeft(sizes).end(0, epochs=config.epochs, num_steps=config.max_steps)
    return num_samples


def derived(config: Config, sizes: Steps) -> list[str]:
    """Returns the rate and the warm-up that the rules for large batches give, a line each."""
    rate, given, rise = learning_rate(config), config.optim.lr, warmup_samples(config, sizes)
    notes = [] if rate == given else [f"learning rate {rate:g}: {given:g} × {rate / given:g} for this batch"]
    if rise:
        steps = counted(sizes.num_steps(0, math.ceil(rise)), "step")
        is_too_long = ": longer than the run" if rise > _samples_of_run(config, sizes) else ""
        notes.append(f"the learning rate rises over {math.ceil(rise):,} samples ({steps}){is_too_long}")
    return notes


def make_schedule(config: Config, sizes: Steps) -> schedules.RateSchedule:
    """Returns the learning-rate schedule for the steps of a run."""
    return schedules.with_warmup(config.schedule.make(), num_samples=warmup_samples(config, sizes))
