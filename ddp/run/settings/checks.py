"""Settings that cannot work, each with the reason and the remedy; and settings that follow from others.

A problem is one sentence, "key=value: what is wrong; the remedy", and is found before any worker starts. Rules that
also hold for `ddp.fit` stand in `ddp/setting.py`; rules of settings alone are the rows of `RULES`, and a rule that
takes more than a row has a function below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp.collectives.catalog import ALL_REDUCE, BETWEEN_HOSTS, all_reduce_schedules
from ddp.comm.meeting.membership import Elastic, elastic
from ddp.errors import ConfigError, did_you_mean
from ddp.policies import NUM_SHARDS, Rounds, Serving
from ddp.process.memory import available_cores
from ddp.run.settings.address import is_address, own_parts
from ddp.run.settings.config import Config, folder_of
from ddp.run.settings.groups import Choice
from ddp.setting import SETTINGS, Rule, Setup, Speaker, refuse, refused_in
from ddp.units import counted

if TYPE_CHECKING:
    from torch import nn

NO_METRIC = "goes by metrics while the workers train, and with {} they have none"
SHARDINGS = ("auto", "file", "sample", "full_shuffle", "off")
WARMUPS = ("steps", "samples", "epochs", "fraction")


def value_at(config: Config, key: str, default: Any = None) -> Any:
    """Returns a setting, or the name of a group's choice; the default if the choice in force has no such setting."""
    found: Any = config
    for part in key.split("."):
        if not isinstance(found, dict) and not hasattr(found, part):
            return default
        found = found.get(part, default) if isinstance(found, dict) else getattr(found, part)
    return found.name if isinstance(found, Choice) else found


class Settings(Speaker):
    """The words for the settings of a run."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def value_of(self, key: str) -> Any:
        return value_at(self.config, key)


def setup_of(config: Config, **facts: Any) -> Setup:
    """Returns the setup that settings and further facts describe."""
    known = {name: value_at(config, about["key"], Setup) for name, about in SETTINGS.items() if about["key"]}
    workers, local_workers, guard = config.cluster.workers, config.cluster.local_workers, config.guard
    known |= {
        "hook": None if config.hook.name == "none" else config.hook.name,
        "device": "cpu" if config.device == "auto" else config.device,
        "deterministic": True,  # a worker checks it, which knows whether it has a GPU
        "shared_memory": config.comm.shared_memory or (local_workers or workers) == 1,
        "guard": None if (guard.action, guard.spike) == ("stop", None) else guard.action,
        "num_hosts": 0 if local_workers is None else 1 if local_workers == workers else 2,
        "is_wide": True,
        "max_workers": config.cluster.max_workers or (workers if config.cluster.min_workers else None),
    }
    return Setup(in_settings=True, **{name: value for name, value in known.items() if value is not Setup} | facts)


def validate(config: Config, *, is_whole: bool = False) -> None:
    """Checks every value and every pair of values that can contradict. Call it again after changing one.

    Args:
        is_whole: no settings of a run to be resumed will be added.

    Raises:
        ConfigError: a value cannot work, or two values contradict; the message names key, value and remedy.
    """
    for problems in (refused_in, _choice_problems, _warmup_problems, _algorithm_problems, _cluster_problems):
        for problem in problems(config):
            raise ConfigError(problem)
    for problem in Settings(config).problems(RULES, config):
        raise ConfigError(problem)
    refuse(setup_of(config, is_whole=is_whole))


# fmt: off
RULES: tuple[Rule[Config], ...] = (
    Rule(lambda c: c.profile.seconds is not None and not c.profile.steps, "profile.seconds",
         "needs profile.steps; set it, as to 50"),
    Rule(lambda c: c.resume not in ("none", "auto") and c.init_from.path is not None, "init_from.path",
         "contradicts {resume}, which has its own weights; set one of them"),
    Rule(lambda c: c.early_stopping.patience is None and c.early_stopping.min_delta, "early_stopping.min_delta",
         "does nothing without early_stopping.patience; set that"),

    # --- the samples
    Rule(lambda c: c.data.window is not None and c.data.order not in ("auto", "blocks"), "data.window",
         "mixes samples of files, and {data.order} does not; leave one out"),
    Rule(lambda c: c.data.skip_steps and not _is_range(c.data.skip_steps), "data.skip_steps",
         "takes the first and the last step, counted from 1, as [4700,4710]"),
    Rule(lambda c: c.data.name == "image_folder" and value_at(c, "data.path") is None, "data.path",
         "names no folder; give data.path=FOLDER, where FOLDER/train/CLASS/ holds the images"),
    Rule(lambda c: value_at(c, "data.path", "") is None, "data.path",
         "names no files; give data.path=FILES, the {.data} files to train on"),
    Rule(lambda c: value_at(c, "data.test_path", "") is None, "data.test_path",
         "names no files; give data.test_path=FILES, the {.data} files to evaluate on"),
    Rule(lambda c: None not in (c.data.validation, value_at(c, "data.validation_path")), "data.validation",
         "contradicts {data.validation_path}; leave one of them out"),
    Rule(lambda c: value_at(c, "data.text") and (value_at(c, "data.inputs") or value_at(c, "data.target")), "data.text",
         "is in place of data.inputs and data.target; leave them out"),
    Rule(lambda c: not value_at(c, "data.text") and value_at(c, "data.inputs") == [], "data.inputs",
         "names no columns; give data.inputs=[NAME,…] and data.target=NAME"),
    Rule(lambda c: not value_at(c, "data.text") and value_at(c, "data.target", "") is None, "data.target",
         "names no column; give data.inputs=[NAME,…] and data.target=NAME"),
    Rule(lambda c: c.batch.tokens and (c.data.order != "auto" or c.data.sharding not in ("auto", "sample")),
         "batch.tokens", "orders samples by itself; leave data.order and data.sharding out"),
    Rule(lambda c: None not in (c.batch.tokens, c.batch.warmup_size), "batch.tokens",
         "contradicts {batch.warmup_size}; leave one out"),
    Rule(lambda c: c.batch.tokens is not None and c.optim.lr_scaling != "none", "batch.tokens",
         "says no number of samples for {optim.lr_scaling}; leave one out"),

    # --- rates and hooks
    Rule(lambda c: value_at(c, "optim.nesterov") and not value_at(c, "optim.momentum"), "optim.nesterov",
         "needs momentum; set optim.momentum=0.9, or optim.nesterov=false"),
    Rule(lambda c: not _are_shares(value_at(c, "schedule.milestones", [])), "schedule.milestones",
         "must be rising shares of the run between 0 and 1, as [0.5,0.75]"),
    Rule(lambda c: c.hook.name == "sign" and not c.hook.error_feedback, "hook.error_feedback",
         "sign compression diverges without error feedback; leave it out"),
    Rule(lambda c: value_at(c, "hook.momentum") and not c.hook.error_feedback, "hook.momentum",
         "needs hook.error_feedback=true"),
    Rule(lambda c: value_at(c, "hook.momentum") and value_at(c, "optim.momentum"), "hook.momentum",
         "contradicts {optim.momentum}, both would act; set optim.momentum=0 optim.nesterov=false"),
    Rule(lambda c: value_at(c, "hook.momentum") and c.optim.name != "sgd", "hook.momentum",
         "{optim} has momentum, too; take optim=sgd optim.momentum=0"),

    # --- the side-car, which gives no metrics while the workers train
    Rule(lambda c: c.evaluate.by == "sidecar" and c.early_stopping.patience is not None, "early_stopping.patience",
         NO_METRIC.format("{evaluate.by}") + "; leave one out"),
    Rule(lambda c: c.evaluate.by == "sidecar" and c.evaluate.every_steps is not None, "evaluate.every_steps",
         "with {evaluate.by} each checkpoint is evaluated; set checkpoint.every_steps in its place"),
    Rule(lambda c: c.evaluate.by == "sidecar" and c.trial, "trial",
         "keeps no checkpoint, and {evaluate.by} evaluates checkpoints; leave one out"),

    # --- devices and waiting
    Rule(lambda c: c.backend == "nccl" and c.device == "cpu", "backend",
         "works with GPU memory only, but {device}; take backend=gloo, or device=cuda"),
    Rule(lambda c: c.cluster.devices is not None and c.device == "cpu", "cluster.devices",
         "names GPUs, but {device} uses none; leave one of them out"),
    Rule(lambda c: c.cluster.devices is not None and not _are_gpus(c.cluster.devices), "cluster.devices",
         "must be numbers from 0 up, each once, as [0,1]; leave it out for all GPUs"),
    Rule(lambda c: c.comm.warn_s >= c.comm.abort_s, "comm.warn_s",
         "must be less than {comm.abort_s}"),
)
# fmt: on


def _is_range(steps: list[int]) -> bool:
    return len(steps) == 2 and 1 <= steps[0] <= steps[1]


def _are_shares(milestones: list[float]) -> bool:
    return milestones == sorted(milestones) and all(0 < share < 1 for share in milestones)


def _are_gpus(numbers: list[int]) -> bool:
    return bool(numbers) and min(numbers) >= 0 and len(set(numbers)) == len(numbers)


def resolve(config: Config, *, local_workers: int | None = None, num_shards: int | None = None) -> None:
    """Fills in what is derived from other settings, so that RUN_DIR/config.yaml has it.

    Args:
        local_workers: workers on this host; None: all of them.
        num_shards: that of the run to be resumed, which is taken while it still fits.

    Raises:
        ConfigError: the result cannot work.
    """
    workers = config.cluster.workers
    if config.cluster.min_workers is not None and local_workers is not None:
        raise ConfigError(
            f"cluster.min_workers={config.cluster.min_workers}: the launcher that has started these workers ends all "
            "with one; leave it out, or start scripts/ddp train by itself"
        )
    if isinstance(config.strategy, Serving) and not config.cluster.servers:
        if local_workers is not None:
            raise ConfigError(
                "cluster.servers=0: strategy=parameter_server needs at least one server among the processes of the "
                "launcher; give all of them cluster.servers=1, or describe tasks of the job ps"
            )
        config.cluster.servers = 1
    if config.strategy.name == "tpu" and config.device == "auto":
        config.device = "cpu"  # where the model is, also beside a GPU
    config.cluster.local_workers = local_workers or workers
    if config.cluster.threads_per_worker is None and config.same_bits.on:
        config.cluster.threads_per_worker = 1  # the bits of some kernels depend on it
    if config.cluster.threads_per_worker is None:
        cores = available_cores()
        if config.evaluate.by == "sidecar" and cores > config.cluster.local_workers:
            cores -= 1  # for the side-car
        num_servers = config.cluster.servers if config.cluster.local_workers == workers else 0
        num_processes = config.strategy.num_processes(config.cluster.local_workers)
        config.cluster.threads_per_worker = max(1, cores // (num_processes + num_servers))
    grows = config.cluster.min_workers is not None and isinstance(config.strategy, Rounds)  # and its shards with it
    if config.batch.num_shards is None and not grows:
        parts = config.strategy.num_parts(config.cluster.max_workers or workers)
        fits = num_shards is not None and parts <= num_shards <= config.batch.global_size
        has_one = isinstance(config.strategy, Rounds) or config.strategy.name == "tpu"  # share for each worker
        fits = fits and not has_one
        config.batch.num_shards = num_shards if fits else NUM_SHARDS if config.same_bits.on else parts
    schedule = config.schedule
    if all(getattr(schedule, f"warmup_{unit}") is None for unit in WARMUPS):
        schedule.warmup_fraction = 0.05 if hasattr(schedule, "final_factor") else 0.0
    if not own_parts(asdict(config)):
        config.run.code = ""
    elif not config.run.code or not Path(config.run.code).is_dir():  # a new run, or one whose folder has moved
        config.run.code = str(Path.cwd())
    validate(config, is_whole=True)


def elastic_of(config: Config) -> Elastic | None:
    """Returns how far the workers may shrink and grow; None if they stay.

    Raises:
        ConfigError: as `elastic`.
    """
    given = {item.name: getattr(config.cluster, item.name) for item in fields(Elastic)}
    return elastic(**given)


def name_problems(key: str, name: str) -> Iterator[str]:
    """Yields why a name cannot be that of a folder below another one."""
    if any(part in ("", ".", "..") or part != part.strip() or not part.isprintable() for part in name.split("/")):
        yield (
            f"{key}={name}: is no name of a folder below runs/; take one like mine or group/mine, without '.' or '..', "
            "and without a space at its beginning or end"
        )


def _choice_problems(config: Config) -> Iterator[str]:
    """Yields problems of a single choice, policy, name or address; and of a model that does not read the data."""
    is_text = config.data.name in ("standard_library", "tokens") or value_at(config, "data.text") is not None
    is_own = is_address(config.data.name) or is_address(config.model.name)
    if not is_own and is_text != (config.model.name == "gpt"):
        remedy = "model=gpt" if is_text else "data=standard_library or tokens, or a model for images such as model=cnn"
        kind = "text" if is_text else "images"
        yield f"model={config.model.name}: does not read the {kind} of data={config.data.name}; take {remedy}"
    if config.loss != "auto" and not is_address(config.loss):
        yield f"loss={config.loss}: unknown; take auto, or MODULE:NAME, as torch.nn.functional:cross_entropy"
    sharding = config.data.sharding
    if sharding not in SHARDINGS and not is_address(sharding):
        hint = did_you_mean(sharding, SHARDINGS)
        yield f"data.sharding={sharding}: unknown.{hint} Choose one of {', '.join(SHARDINGS)}, or MODULE:NAME"
    makers: list[tuple[str, Callable[[], Any]]] = [("strategy.", config.strategy.make)]
    makers += [("cluster.", partial(elastic_of, config)), ("", partial(folder_of, config, "runs/mine"))]
    for prefix, make in makers:
        try:
            make()
        except ConfigError as error:
            yield f"{prefix}{error}"
    yield from name_problems("run.name", config.run.name or "unnamed")
    yield from name_problems("sweep.name", config.sweep.name or "unnamed")


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


WAYS = (
    *("auto", "shared_memory", *ALL_REDUCE, "two_dimensional", *BETWEEN_HOSTS),
    *(f"shared_memory+{between}" for between in ALL_REDUCE),
)


def _algorithm_problems(config: Config) -> Iterator[str]:
    """Yields a problem if no layout of workers has the algorithm. The communicator checks it for this layout."""
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


def check_servers(config: Config, model: nn.Module) -> None:
    """Raises ConfigError if there are more servers than tensors to be held."""
    num_tensors = sum(parameter.requires_grad for parameter in model.parameters())
    if config.cluster.servers > num_tensors:
        raise ConfigError(
            f"cluster.servers={config.cluster.servers}: the model has {counted(num_tensors, 'tensor')} to train, and a "
            "server without one does nothing; take fewer"
        )


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
            f"backend=nccl: needs one GPU for each of the {workers} workers here, and there are {num_gpus}; "
            f"take backend=gloo, or cluster.workers={num_gpus}"
        )


def places(config: Config) -> tuple[int, str]:
    """Returns how many workers of this host can each have a GPU, or without GPUs a core; and the same as text."""
    from ddp.process import gpu  # this late, as in `check_gpus`

    num_gpus = 0 if config.device == "cpu" else gpu.cuda.device_count()
    if num_gpus and config.cluster.devices is not None:
        num_gpus = len(config.cluster.devices)
    return (num_gpus, counted(num_gpus, "GPU")) if num_gpus else (cores := available_cores(), counted(cores, "core"))


def check_strategy(config: Config, model: nn.Module | None = None) -> None:
    """Raises ConfigError if the strategy cannot train this model, or not on this device.

    Args:
        model: None: it is not known yet.
    """
    if config.strategy.name == "auto" and model is None:
        return
    if config.strategy.name == "tpu" and not all(map(find_spec, ("jax", "torchax"))):
        raise ConfigError("strategy=tpu needs JAX and torchax: pip install '.[tpu]'")
    from ddp.process import gpu  # this late, as in `check_gpus`
    from ddp.replica.parameters import sparse_weights
    from ddp.replica.sync_batchnorm import waits

    on_gpu = config.device == gpu.KIND or (config.device == "auto" and gpu.cuda.device_count() > 0)
    facts: dict[str, Any] = {"device": gpu.KIND if on_gpu else "cpu", "is_whole": True}
    if model is not None:
        has_waiting = config.replica.sync_batchnorm or waits(model)
        facts |= {"is_sparse": bool(sparse_weights(model)), "waits": has_waiting}
    refuse(setup_of(config, **facts))


def most_workers() -> int:
    """Returns the number of workers above which a larger one is surely a mistake on this host."""
    return max(8, 8 * available_cores())
