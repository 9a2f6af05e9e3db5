"""Settings that cannot work, each with the reason and the remedy; and settings that follow from others.

A problem is one sentence, "key=value: what is wrong; the remedy", and is found before any worker starts. Each function
below yields those of one subject.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ddp.collectives.catalog import ALL_REDUCE, BETWEEN_HOSTS, all_reduce_schedules
from ddp.errors import ConfigError, did_you_mean
from ddp.policies import NUM_SHARDS, ONE_EVALUATION, Rounds, Serving, same_bits_problems
from ddp.process.memory import available_cores
from ddp.run.settings.address import is_address, own_parts
from ddp.run.settings.config import Config, folder_of
from ddp.setting import out_of_bounds
from ddp.units import counted

if TYPE_CHECKING:
    from torch import nn

NO_METRIC = "goes by metrics while the workers train, and with {} they have none"
SHARDINGS = ("auto", "file", "sample", "full_shuffle", "off")


def validate(config: Config) -> None:
    """Checks every value and every pair of values that can contradict. Call it again after changing one.

    Raises:
        ConfigError: a value cannot work, or two values contradict; the message names key, value and remedy.
    """
    for problems in (
        *(out_of_bounds, _choice_problems, _order_problems, _warmup_problems, _algorithm_problems, _cluster_problems),
        *(_server_problems, _device_problems, _course_problems, _sidecar_problems, _round_problems),
        *(_same_bits_problems, _name_problems),
    ):
        for problem in problems(config):
            raise ConfigError(problem)


def resolve(config: Config, *, local_workers: int | None = None, num_shards: int | None = None) -> None:
    """Fills in what is derived from other settings, so that RUN_DIR/config.yaml has it.

    Args:
        local_workers: workers on this host; None: all of them.
        num_shards: that of the run to be resumed, which is taken while it still fits.

    Raises:
        ConfigError: the result cannot work.
    """
    workers = config.cluster.workers
    if config.same_bits.audit_every and not config.same_bits.on:  # not before: a run that goes on may have it on
        raise ConfigError(
            f"same_bits.audit_every={config.same_bits.audit_every}: audits compare workers that have the same bits; "
            "set same_bits.on=true, too"
        )
    if isinstance(config.strategy, Serving) and not config.cluster.servers:
        if local_workers is not None:
            raise ConfigError(
                "cluster.servers=0: strategy=parameter_server needs one among the processes that are there; say "
                "cluster.servers=1 to all of them, or where tasks are described list some of the job ps"
            )
        config.cluster.servers = 1
    config.cluster.local_workers = local_workers or workers
    if config.cluster.threads_per_worker is None and config.same_bits.on:
        config.cluster.threads_per_worker = 1  # the bits of some kernels depend on it
    if config.cluster.threads_per_worker is None:
        cores = available_cores()
        if config.evaluate.by == "sidecar" and cores > config.cluster.local_workers:
            cores -= 1  # for the side-car
        beside = config.cluster.servers if config.cluster.local_workers == workers else 0
        config.cluster.threads_per_worker = max(1, cores // (config.cluster.local_workers + beside))
    if config.batch.num_shards is None:
        parts = config.strategy.num_parts(workers)
        fits = num_shards is not None and parts <= num_shards <= config.batch.global_size
        fits = fits and not isinstance(config.strategy, Rounds)  # in which each worker has one share
        config.batch.num_shards = num_shards if fits else NUM_SHARDS if config.same_bits.on else parts
    schedule = config.schedule
    if all(getattr(schedule, f"warmup_{unit}") is None for unit in WARMUPS):
        schedule.warmup_fraction = 0.05 if hasattr(schedule, "final_factor") else 0.0
    if not own_parts(asdict(config)):
        config.run.code = ""
    elif not config.run.code or not Path(config.run.code).is_dir():  # a new run, or one whose folder has moved
        config.run.code = str(Path.cwd())
    validate(config)


def name_problems(key: str, name: str) -> Iterator[str]:
    """Yields why a name cannot be that of a folder below another one."""
    if any(part in ("", ".", "..") or part != part.strip() or not part.isprintable() for part in name.split("/")):
        yield (
            f"{key}={name}: is no name of a folder below runs/; take one like mine or group/mine, without '.' or '..', "
            "and without a space at its beginning or end"
        )


def _name_problems(config: Config) -> Iterator[str]:
    yield from name_problems("run.name", config.run.name or "unnamed")
    yield from name_problems("sweep.name", config.sweep.name or "unnamed")


def _course_problems(config: Config) -> Iterator[str]:
    """Yields where a run cannot start, or would never end."""
    if config.epochs is None and config.max_steps is None:
        yield "epochs=null: with max_steps=null, too, the run would never end; set one of them"
    if config.profile.seconds is not None and not config.profile.steps:
        yield f"profile.seconds={config.profile.seconds:g}: needs profile.steps; set it, as to 50"
    if config.resume not in ("none", "auto") and config.init_from.path is not None:
        yield (
            f"init_from.path={config.init_from.path}: contradicts resume={config.resume}, which has its own "
            "weights; set one of them"
        )
    stopping = config.early_stopping
    try:
        folder_of(config, "runs/mine")
    except ConfigError as error:
        yield str(error)
    if stopping.patience is not None and not config.evaluate.is_meanwhile:
        yield (
            f"early_stopping.patience={stopping.patience}: {ONE_EVALUATION}; set evaluate.every_epochs or "
            "evaluate.every_steps"
        )
    if stopping.patience is None and stopping.min_delta:
        yield f"early_stopping.min_delta={stopping.min_delta:g}: does nothing without early_stopping.patience; set that"


def _sidecar_problems(config: Config) -> Iterator[str]:
    """Yields what needs metrics while the workers train, of which a side-car gives none."""
    if config.evaluate.by != "sidecar":
        return
    key = "evaluate.by=sidecar"
    if config.early_stopping.patience is not None:
        yield f"early_stopping.patience={config.early_stopping.patience}: {NO_METRIC.format(key)}; leave one out"
    if config.evaluate.every_steps is not None:
        yield (
            f"evaluate.every_steps={config.evaluate.every_steps}: with {key} each checkpoint is evaluated; set "
            "checkpoint.every_steps in its place"
        )
    if config.trial:
        yield f"trial=true: keeps no checkpoint, and {key} evaluates checkpoints; leave one out"


def _round_problems(config: Config) -> Iterator[str]:
    """Yields what contradicts the rounds of strategy=local_sgd."""
    rounds, batch, workers = config.strategy, config.batch, config.cluster.workers
    if not isinstance(rounds, Rounds):
        return
    key = "strategy=local_sgd"
    if batch.micro_size is not None:
        yield f"batch.micro_size={batch.micro_size}: with {key} a micro-batch is an inner step; leave one out"
    if batch.tokens is not None:
        yield f"batch.tokens={batch.tokens}: with {key} an inner step has batch.global_size samples; leave one out"
    if batch.warmup_size is not None:
        yield (
            f"batch.warmup_size={batch.warmup_size}: the rounds of {key} have batches of one size; leave it out, or "
            "let strategy.warmup_samples put rounds off"
        )
    if batch.num_shards not in (None, workers):
        yield f"batch.num_shards={batch.num_shards}: with {key} each of {workers} workers has one share; leave it out"
    if rounds.island == "host" and config.cluster.local_workers == workers:
        yield (
            "strategy.island=host: all workers are on one host, so that none would train alone; leave it out, or take "
            "strategy=mirrored"
        )
    if rounds.delay:
        given = {
            f"hook={config.hook.name}": config.hook.name != "none",
            f"replica.verify_every={config.replica.verify_every}": config.replica.verify_every,
            f"ema.decay={config.ema.decay}": config.ema.decay is not None,
        }
        for what in (what for what, is_given in given.items() if is_given):
            yield f"{what}: with strategy.delay={rounds.delay} workers differ between rounds; leave one out"
    if rounds.outer_momentum and getattr(config.hook, "momentum", 0):
        yield f"strategy.outer_momentum={rounds.outer_momentum:g}: the hook has momentum, too; leave one out"


def _same_bits_problems(config: Config) -> Iterator[str]:
    """Yields what cannot have the same bits at any number of workers."""
    if not config.same_bits.on:
        return
    for problem in same_bits_problems(
        strategy=config.strategy.name,
        hook="" if config.hook.name == "none" else config.hook.name,
        wire=config.replica.wire,
        algorithm=config.comm.algorithm,
        is_naive=config.replica.kind == "naive",
        waits=config.replica.sync_batchnorm,
    ):
        yield f"same_bits.on=true with {problem}"
    if config.same_bits.audit_every and config.cluster.workers == 1:
        yield (
            f"same_bits.audit_every={config.same_bits.audit_every}: a second worker audits, and there is one; set it "
            "to 0, or take more workers"
        )


WAYS = (
    *("auto", "shared_memory", *ALL_REDUCE, "two_dimensional", *BETWEEN_HOSTS),
    *(f"shared_memory+{between}" for between in ALL_REDUCE),
)


def _algorithm_problems(config: Config) -> Iterator[str]:
    """Yields an algorithm's name that no layout of workers has. The communicator checks it for this layout."""
    name = config.comm.algorithm
    if is_address(name):
        return
    workers = config.cluster.workers
    if name not in WAYS:
        yield f"comm.algorithm={name}: unknown.{did_you_mean(name, WAYS)} Choose one of {', '.join(WAYS)}"
    elif name.startswith("shared_memory") and not config.comm.shared_memory:
        yield f"comm.algorithm={name} with comm.shared_memory=false: leave one of them out"
    elif config.cluster.local_workers not in (None, workers) or name == "auto":
        return  # of several hosts only the ranks know which one each is on
    elif name in BETWEEN_HOSTS or "+" in name:
        yield f"comm.algorithm={name}: is for several hosts, and all workers are on this one; leave it out"
    elif name == "shared_memory" and workers == 1:
        yield f"comm.algorithm={name}: there is one worker, which has none to share memory with; leave it out"
    elif name == "two_dimensional" and name not in all_reduce_schedules((tuple(range(workers)),)):
        yield f"comm.algorithm={name}: {workers} workers fill no grid of several rows and columns; take ring, say"


def _choice_problems(config: Config) -> Iterator[str]:
    """Yields where a group's choice contradicts itself or another group's."""
    is_text = config.data.name in ("standard_library", "tokens") or getattr(config.data, "text", None) is not None
    is_own = is_address(config.data.name) or is_address(config.model.name)
    if not is_own and is_text != (config.model.name == "gpt"):
        remedy = "model=gpt" if is_text else "data=standard_library or tokens, or a model for images such as model=cnn"
        kind = "text" if is_text else "images"
        yield f"model={config.model.name}: does not read the {kind} of data={config.data.name}; take {remedy}"
    if config.loss != "auto" and not is_address(config.loss):
        yield f"loss={config.loss}: unknown; take auto, or MODULE:NAME, as torch.nn.functional:cross_entropy"
    match asdict(config.data):
        case {"name": "image_folder", "path": None}:
            yield "data.path=null: names no folder; give data.path=FOLDER, where FOLDER/train/CLASS/ holds the images"
        case {"path": path, "test_path": test_path} if path is None or test_path is None:
            key, which = ("path", "train on") if path is None else ("test_path", "evaluate on")
            yield f"data.{key}=null: names no files; give data.{key}=FILES, the {config.data.name} files to {which}"
        case {"validation": share, "validation_path": path} if share is not None and path is not None:
            yield f"data.validation={share:g}: contradicts data.validation_path={path}; leave one of them out"
        case {"text": str(text), "inputs": inputs, "target": target}:
            if inputs or target is not None:
                yield f"data.text={text}: is in place of data.inputs and data.target; leave them out"
        case {"inputs": inputs, "target": target} if not inputs or target is None:
            key = "target" if inputs else "inputs"
            yield f"data.{key}: names no columns; give data.inputs=[NAME,…] and data.target=NAME"
    match asdict(config.optim):
        case {"nesterov": True, "momentum": 0}:
            yield "optim.nesterov=true: needs momentum; set optim.momentum=0.9, or optim.nesterov=false"
    try:
        config.strategy.make()
    except ConfigError as error:
        yield f"strategy.{error}"
    wire = config.replica.wire
    if wire is not None and config.replica.kind == "naive":
        yield f"replica.wire={wire}: needs replica.kind=bucketed, whose buckets travel in it; leave one out"
    if config.precision == "bf16_pure" and (wire or "").startswith("int8"):
        yield f"replica.wire={wire}: takes fp32 gradients, and those of precision=bf16_pure are bf16; leave one out"
    if config.precision != "bf16_pure" and wire == "fp32":
        yield f"replica.wire=fp32: gradients of precision={config.precision} are fp32 already; leave it out"
    if config.hook.name != "none":
        yield from _hook_problems(config)
    match asdict(config.schedule):
        case {"milestones": each} if each != sorted(each) or not all(0 < share < 1 for share in each):
            yield f"schedule.milestones={each}: must be rising shares of the run between 0 and 1, as [0.5,0.75]"


def _order_problems(config: Config) -> Iterator[str]:
    """Yields the errors in the order of samples."""
    data, batch = config.data, config.batch
    if data.sharding not in SHARDINGS and not is_address(data.sharding):
        hint = did_you_mean(data.sharding, SHARDINGS)
        yield f"data.sharding={data.sharding}: unknown.{hint} Choose one of {', '.join(SHARDINGS)}, or MODULE:NAME"
    if data.window is not None and data.order not in ("auto", "blocks"):
        yield f"data.window={data.window}: mixes samples of files, and data.order={data.order} does not; leave one out"
    if config.loader.debug and data.sharding == "off":
        yield "loader.debug=true: refuses equal batches, which data.sharding=off is for; leave one out"
    if data.skip_steps and not (len(data.skip_steps) == 2 and 1 <= data.skip_steps[0] <= data.skip_steps[1]):
        yield f"data.skip_steps={data.skip_steps}: takes the first and the last step, counted from 1, as [4700,4710]"
    if batch.tokens is None:
        return
    if data.order != "auto" or data.sharding not in ("auto", "sample"):
        yield f"batch.tokens={batch.tokens}: orders samples by itself; leave data.order and data.sharding out"
    if batch.warmup_size is not None:
        yield f"batch.tokens={batch.tokens}: contradicts batch.warmup_size={batch.warmup_size}; leave one out"
    if config.optim.lr_scaling != "none":
        yield f"batch.tokens={batch.tokens}: says no number of samples for optim.lr_scaling={config.optim.lr_scaling}"


def _hook_problems(config: Config) -> Iterator[str]:
    """Yields the settings that a hook contradicts."""
    hook, key = config.hook, f"hook={config.hook.name}"
    if config.replica.kind == "naive":
        yield f"{key}: needs replica.kind=bucketed, whose buckets it gets; leave one out"
    if config.replica.wire is not None:
        yield f"{key}: does the sending by itself; leave replica.wire={config.replica.wire} out"
    if hook.name == "sign" and not hook.error_feedback:
        yield "hook.error_feedback=false: sign compression diverges without error feedback; leave it out"
    match asdict(hook), asdict(config.optim):
        case {"momentum": momentum, "error_feedback": False}, _ if momentum:
            yield f"hook.momentum={momentum:g}: needs hook.error_feedback=true"
        case {"momentum": momentum}, {"momentum": other} if momentum and other:
            yield (
                f"hook.momentum={momentum:g}: contradicts optim.momentum={other:g}, both would act; set "
                "optim.momentum=0 optim.nesterov=false"
            )
        case {"momentum": momentum}, {"name": name} if momentum and name != "sgd":
            yield f"hook.momentum={momentum:g}: optim={name} has momentum, too; take optim=sgd optim.momentum=0"


WARMUPS = ("steps", "samples", "epochs", "fraction")


def _warmup_problems(config: Config) -> Iterator[str]:
    """Yields warm-ups of the rate and of the batch that contradict."""
    for group, units in (("schedule", WARMUPS), ("batch", WARMUPS[1:3])):
        found = {f"{group}.warmup_{unit}": getattr(getattr(config, group), f"warmup_{unit}") for unit in units}
        given = [f"{key}={value:g}" for key, value in found.items() if value is not None]
        for other in given[1:]:
            yield f"{given[0]}: contradicts {other}; leave one of them out"
    batch, optim, fraction = config.batch, config.optim, config.schedule.warmup_fraction
    ratio = batch.global_size / optim.base_batch
    if optim.lr_scaling == "legw" and fraction and fraction * ratio >= 1:
        yield (
            f"optim.lr_scaling=legw: the warm-up of schedule.warmup_fraction={fraction:g} becomes {ratio:g} times "
            f"longer, more than the run; lower it, or set optim.base_batch={optim.base_batch} to the batch that lr was "
            "found for"
        )
    lasts = batch.warmup_samples or batch.warmup_epochs
    if batch.warmup_size is None and lasts is not None:
        key = "samples" if batch.warmup_samples else "epochs"
        yield f"batch.warmup_{key}={lasts:g}: batch.warmup_size is not set; set it to the size of the first batch"
    if batch.warmup_size is not None and lasts is None:
        yield f"batch.warmup_size={batch.warmup_size}: has no end; set batch.warmup_epochs or batch.warmup_samples"
    shards = max(config.cluster.workers, batch.num_shards or 0)
    if batch.warmup_size is not None and not shards <= batch.warmup_size < batch.global_size:
        yield (
            f"batch.warmup_size={batch.warmup_size}: must be at least the number of shards, {shards}, and less than "
            f"batch.global_size={batch.global_size}, which it grows to"
        )


def _cluster_problems(config: Config) -> Iterator[str]:
    """Yields worker counts and batch sizes that do not go together."""
    workers, batch = config.cluster.workers, config.batch
    local_workers = config.cluster.local_workers or workers
    most = most_workers()
    if config.cluster.local_workers is not None and local_workers > workers:
        yield f"cluster.local_workers={local_workers}: is more than cluster.workers={workers}"
    servers = config.cluster.servers if local_workers == workers else 0  # else only the launcher knows where they are
    if local_workers + servers > most:
        what = f"{local_workers} workers" + (f" and {counted(servers, 'server')}" if servers else "")
        yield (
            f"cluster.workers={workers}: {what} here are too many for {available_cores()} cores; take at most "
            f"{most - servers if servers < most else most}"
        )
    try:
        parts = config.strategy.num_parts(workers)
    except ConfigError as error:
        yield f"strategy.{error}"
        return
    if batch.global_size < parts:
        yield (
            f"batch.global_size={batch.global_size}: smaller than cluster.workers={workers}, so some would have no "
            f"sample; take a global batch of at least {parts}, or fewer workers"
        )
    if batch.num_shards is not None and not parts <= batch.num_shards <= batch.global_size:
        yield (
            f"batch.num_shards={batch.num_shards}: must be from {parts}, the workers that share a batch, to "
            f"batch.global_size={batch.global_size}; set it, or another number of workers"
        )
    if config.comm.warn_s >= config.comm.abort_s:
        yield f"comm.warn_s={config.comm.warn_s:g}: must be less than comm.abort_s={config.comm.abort_s:g}"


def _server_problems(config: Config) -> Iterator[str]:
    """Yields servers without a strategy that has them, the reverse, and what such a strategy cannot train."""
    cluster = config.cluster
    if not isinstance(config.strategy, Serving):
        if cluster.servers:
            yield (
                f"cluster.servers={cluster.servers}: is for strategy=parameter_server, and with "
                f"strategy={config.strategy.name} the workers keep the parameters; leave it out, or take that one"
            )
        return
    for problem in config.strategy.problems(
        workers=cluster.workers,
        servers=cluster.servers,
        clip_norm=config.clip_norm,
        grows=config.batch.warmup_size is not None,
        has_hook=config.hook.name != "none",
        max_unreadable=config.loader.max_unreadable,
    ):
        yield f"strategy=parameter_server: {problem}"


def check_servers(config: Config, model: nn.Module) -> None:
    """Raises ConfigError if there are more servers than tensors to be held."""
    num_tensors = sum(parameter.requires_grad for parameter in model.parameters())
    if config.cluster.servers > num_tensors:
        raise ConfigError(
            f"cluster.servers={config.cluster.servers}: the model has {counted(num_tensors, 'tensor')} to train, and a "
            "server without one does nothing; take fewer"
        )


def _device_problems(config: Config) -> Iterator[str]:
    """Yields a device and a backend that do not go together."""
    if config.backend == "nccl" and config.device == "cpu":
        yield "backend=nccl: works with GPU memory only, but device=cpu; take backend=gloo, or device=cuda"
    devices = config.cluster.devices
    if devices is not None and config.device == "cpu":
        yield f"cluster.devices={devices}: names GPUs, but device=cpu uses none; leave one of them out"
    if devices is not None and (not devices or min(devices) < 0 or len(set(devices)) < len(devices)):
        yield f"cluster.devices={devices}: must be numbers from 0 up, each once, as [0,1]; leave it out for all GPUs"


def check_gpus(config: Config) -> None:
    """Refuses GPUs that workers cannot have if this process starts them all, because they see those that it sees.

    Workers of a launcher may each see other ones; so `comm/opening.py` checks these, once they have met.

    Raises:
        ConfigError: there is none, or not all that are named, or not one for each where NCCL needs that.
    """
    nccl, devices = config.backend == "nccl", config.cluster.devices
    if not nccl and config.device != "cuda" and devices is None:
        return
    from ddp.process import gpu  # this late, because it imports torch, which takes a second

    num_gpus, workers = gpu.cuda.device_count(), config.cluster.workers
    if devices is not None and max(devices) >= num_gpus:
        seen = f"{counted(num_gpus, 'GPU')} here, counted from 0" if num_gpus else "no GPU here"
        raise ConfigError(f"cluster.devices={devices}: torch sees {seen}; take others, or leave it out")
    if not num_gpus:
        key = "backend=nccl" if nccl else "device=cuda"
        raise ConfigError(f"{key}: torch sees no GPU here; take device=cpu backend=gloo")
    num_gpus = num_gpus if devices is None else len(devices)
    if nccl and workers > num_gpus:
        raise ConfigError(
            f"backend=nccl: needs a GPU of its own for each of the {workers} workers here, and there are {num_gpus}; "
            f"take backend=gloo, or cluster.workers={num_gpus}"
        )


def places(config: Config) -> tuple[int, str]:
    """Returns how many workers of this host can have a GPU of their own, or without GPUs a core, and that as text."""
    from ddp.process import gpu  # this late, as in `check_gpus`

    num_gpus = 0 if config.device == "cpu" else gpu.cuda.device_count()
    if num_gpus and config.cluster.devices is not None:
        num_gpus = len(config.cluster.devices)
    return (num_gpus, counted(num_gpus, "GPU")) if num_gpus else (cores := available_cores(), counted(cores, "core"))


def check_strategy(config: Config, model: nn.Module | None = None) -> None:
    """Raises ConfigError if the strategy cannot train this; its table is `strategies/choice.py::STRATEGIES`.

    Args:
        model: None: it is not known yet.
    """
    if config.strategy.name == "auto":
        return
    from ddp.process import gpu  # this late, as in `check_gpus`
    from ddp.replica.sync_batchnorm import waits
    from ddp.strategies.choice import Setup, has_sparse_gradients, refuse

    workers = config.cluster.workers
    on_gpu = config.device == gpu.KIND or (config.device == "auto" and gpu.cuda.device_count() > 0)
    setup = Setup(
        world_size=workers,
        num_hosts=1 if config.cluster.local_workers in (None, workers) else 2,
        shares_memory=config.comm.shared_memory or (config.cluster.local_workers or workers) == 1,
        device=gpu.KIND if on_gpu else "cpu",
        precision=config.precision,
        is_naive=config.replica.kind == "naive",
        is_sparse=model is not None and has_sparse_gradients(model),
        waits=config.replica.sync_batchnorm or (model is not None and waits(model)),
    )
    refuse(config.strategy.name, setup)


def most_workers() -> int:
    """Returns the number of workers beyond which this host is surely meant to have fewer."""
    return max(8, 8 * available_cores())
