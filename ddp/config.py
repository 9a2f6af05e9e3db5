"""Every setting of a run, as plain dataclasses: one tree, one place for defaults, one `validate`.

    conf/train.yaml + conf/GROUP/CHOICE.yaml + command line        Hydra, in the parent only (ddp.launcher)
                 │  from_plain
                 ▼
              Config  ── to_plain ──▶  RUN_DIR/config.yaml  ── from_plain ──▶  Config, in every worker (PyYAML only)

Four groups offer a choice: `data`, `model`, `optim`, `schedule`. Each is a base dataclass with the shared fields; a
choice that has fields of its own is a subclass. The `name` of a choice, the file conf/GROUP/NAME.yaml and the word on
the command line are the same. `CHOICES` is the table of all of them.

Hydra composes plain values. `from_plain` alone says which keys there are and which types they have. Components never
see these classes: ddp.build takes them apart into plain keyword arguments.

Read before: `train/report.py`. Read next: `launcher.py`, which composes a Config.
"""

from __future__ import annotations

import difflib
import os
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Union, get_args, get_origin, get_type_hints

from ddp.collectives.catalog import ALL_REDUCE, BETWEEN_HOSTS
from ddp.errors import ConfigError

# ---------------------------------------------------------------------------------------------------- the words


class Device(Enum):
    auto = "auto"  # CUDA where there is any, else the CPU
    cpu = "cpu"
    cuda = "cuda"


class Backend(Enum):
    auto = "auto"  # NCCL where every worker has a GPU of its own, else Gloo
    gloo = "gloo"  # CUDA tensors are staged through pinned memory
    nccl = "nccl"  # one worker per GPU


class Order(Enum):
    any = "any"  # every way of an all-reduce may be taken
    canonical = "canonical"  # only ways that add along the canonical binary tree over the ranks


class ReplicaKind(Enum):
    bucketed = "bucketed"  # reduces buckets while backward still runs
    naive = "naive"  # one all-reduce per parameter after backward


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"  # autocast; parameters, gradients and their sum stay fp32


class LrScaling(Enum):
    none = "none"
    linear = "linear"  # lr × global batch / base_batch
    sqrt = "sqrt"  # lr × √(global batch / base_batch)


# ------------------------------------------------------------------------------------------------ the four groups


@dataclass(kw_only=True, slots=True)
class Data:
    """A data set: the fields of all of them. Digits, MNIST and CIFAR-10 have no others."""

    name: str
    root: str = "data"  # where downloads lie


@dataclass(kw_only=True, slots=True)
class ImageFolder(Data):
    name: str = "image_folder"
    path: str | None = None  # holds train/CLASS/*.jpg and val/CLASS/*.jpg, ImageNet's layout; needed
    image_size: int = 224  # pixels


@dataclass(kw_only=True, slots=True)
class StandardLibrary(Data):
    name: str = "standard_library"
    context: int = 256  # bytes per sample


@dataclass(kw_only=True, slots=True)
class Synthetic(Data):
    name: str = "synthetic"
    num_samples: int = 4096
    image_size: int = 32  # pixels
    num_classes: int = 10


@dataclass(kw_only=True, slots=True)
class Model:
    """A model: the ResNets have no other fields."""

    name: str


@dataclass(kw_only=True, slots=True)
class Mlp(Model):
    name: str = "mlp"
    hidden: int = 256


@dataclass(kw_only=True, slots=True)
class Cnn(Model):
    name: str = "cnn"
    width: int = 32
    dropout: float = 0.3


@dataclass(kw_only=True, slots=True)
class Gpt(Model):
    name: str = "gpt"
    width: int = 192
    depth: int = 4
    heads: int = 6
    dropout: float = 0.0


@dataclass(kw_only=True, slots=True)
class Optim:
    """An optimizer: the fields of all of them."""

    name: str
    lr: float  # for `base_batch` samples a step
    weight_decay: float
    lr_scaling: LrScaling = LrScaling.none
    base_batch: int = 64  # the global batch that `lr` was found for


@dataclass(kw_only=True, slots=True)
class Sgd(Optim):
    name: str = "sgd"
    lr: float = 0.05
    weight_decay: float = 5e-4
    momentum: float = 0.9
    nesterov: bool = True


@dataclass(kw_only=True, slots=True)
class Adam(Optim):
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass(kw_only=True, slots=True)
class Schedule:
    """A learning-rate schedule: the fields of all of them. The constant one has no others."""

    name: str
    warmup_steps: int = 0  # linear, from lr / warmup_steps up to lr
    warmup_fraction: float = 0.0  # the same, as a share of the whole run; set one of the two


@dataclass(kw_only=True, slots=True)
class Cosine(Schedule):
    name: str = "cosine"
    warmup_fraction: float = 0.05
    final_factor: float = 0.0  # of lr, reached at the last step


@dataclass(kw_only=True, slots=True)
class Step(Schedule):
    name: str = "step"
    milestones: list[float] = field(default_factory=lambda: [0.5, 0.75])  # shares of the whole run
    gamma: float = 0.1  # lr is multiplied by it at each milestone


_ALL: dict[str, tuple[Any, ...]] = {
    "data": (
        *(Data(name=name) for name in ("digits", "mnist", "cifar10")),
        ImageFolder(),
        StandardLibrary(),
        Synthetic(),
    ),
    "model": (Mlp(), Cnn(), *(Model(name=f"resnet{depth}") for depth in (18, 34, 50)), Gpt()),
    "optim": (
        Sgd(),
        Adam(name="adam", lr=1e-3, weight_decay=0.0),
        Adam(name="adamw", lr=4e-3, weight_decay=0.01),
    ),
    "schedule": (Schedule(name="constant"), Cosine(), Step()),
}
CHOICES = {group: {choice.name: choice for choice in choices} for group, choices in _ALL.items()}
"""group → name → its default settings: what conf/GROUP/ offers."""


def choose(group: str, name: str, /, **settings: Any) -> Any:
    """Returns a choice of a group: its default settings, some of them replaced."""
    return replace(CHOICES[group][name], **settings)


# -------------------------------------------------------------------------------------------------- the fixed parts


@dataclass(kw_only=True, slots=True)
class InitFrom:
    """Starts from given weights, at step 0 with a fresh optimizer, unlike `resume`."""

    path: str | None = None
    strict: bool = True  # every parameter must be found, and every key used
    rename: dict[str, str] = field(default_factory=dict)  # key prefix in the file → prefix in the model
    skip: list[str] = field(default_factory=list)  # key prefixes that keep their fresh values: a new head


@dataclass(kw_only=True, slots=True)
class Run:
    name: str = ""  # names the folder below runs/; "" takes date and time
    dir: str = ""  # where everything of this run lies; set by the launcher (hydra.run.dir)


@dataclass(kw_only=True, slots=True)
class Cluster:
    workers: int = 2  # the world size
    local_workers: int | None = None  # of these, on this host; set by the launcher
    threads_per_worker: int | None = None  # None: cores ÷ local workers, at least 1


@dataclass(kw_only=True, slots=True)
class Batch:
    global_size: int = 64  # samples per optimizer step, over all workers
    num_shards: int | None = None  # parts of a batch that random streams hang on; None: one per worker
    micro_size: int | None = None  # most samples in one forward; a larger share is accumulated. None: no limit


@dataclass(kw_only=True, slots=True)
class Comm:
    algorithm: str = "auto"  # auto (least predicted time) | shared_memory | ring, tree, … | hierarchical, …
    order: Order = Order.any
    shared_memory: bool = True  # False: also between workers of one host everything goes over the transport
    debug: bool = False  # the workers compare their calls before every collective
    segment_bytes: int = 4 << 20  # a chunk travels in pieces of this size
    warn_s: float = 10.0  # after this long a waiting rank says which rank it waits for
    abort_s: float = 600.0  # after this long it ends the run


@dataclass(kw_only=True, slots=True)
class Replica:
    kind: ReplicaKind = ReplicaKind.bucketed
    bucket_cap_mb: float = 25.0
    first_bucket_mb: float = 1.0  # small, so that the first reduction starts early
    verify_every: int = 0  # after so many steps the parameters of all workers are compared bit by bit; 0: never


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    every_steps: int | None = None  # None: at the end of every epoch
    keep_last: int = 3  # beside the best


@dataclass(kw_only=True, slots=True)
class Evaluate:
    every_epochs: int | None = 1
    every_steps: int | None = None


@dataclass(kw_only=True, slots=True)
class Loader:
    num_workers: int = 0  # loader processes per worker; 0: in the worker itself
    evaluation_batch: int = 256  # samples per worker in one forward of `evaluate`


@dataclass(kw_only=True, slots=True)
class Config:
    """All settings of one run.

    Raises:
        ConfigError: a value cannot work, or two values contradict; the message names key, value and remedy.
    """

    seed: int = 0
    epochs: int | None = 15
    max_steps: int | None = None  # with `epochs` too: whichever comes first
    deterministic: bool = False
    device: Device = Device.auto
    backend: Backend = Backend.auto
    precision: Precision = Precision.fp32
    clip_norm: float | None = None
    log_every: int = 10  # steps between two lines of metrics.jsonl
    resume: str = "none"  # none | auto (this run's folder, if it holds a checkpoint) | path of a checkpoint or run
    init_from: InitFrom = field(default_factory=InitFrom)
    run: Run = field(default_factory=Run)
    cluster: Cluster = field(default_factory=Cluster)
    batch: Batch = field(default_factory=Batch)
    comm: Comm = field(default_factory=Comm)
    replica: Replica = field(default_factory=Replica)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    evaluate: Evaluate = field(default_factory=Evaluate)
    loader: Loader = field(default_factory=Loader)
    data: Data = field(default_factory=lambda: choose("data", "digits"))
    model: Model = field(default_factory=Cnn)
    optim: Optim = field(default_factory=lambda: choose("optim", "adamw"))
    schedule: Schedule = field(default_factory=Cosine)

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Checks every value and every pair of values that can contradict. Call it again after changing one."""
        for problem in _problems(self):
            raise ConfigError(problem)

    def resolve(self, *, local_workers: int | None = None, num_shards: int | None = None) -> None:
        """Fills in what is derived from other settings, so that RUN_DIR/config.yaml has it.

        Args:
            local_workers: workers on this host; None: all of them.
            num_shards: that of the run to be resumed, which is taken while it still fits.

        Raises:
            ConfigError: the result cannot work.
        """
        workers = self.cluster.workers
        self.cluster.local_workers = local_workers or workers
        if self.cluster.threads_per_worker is None:
            self.cluster.threads_per_worker = max(1, available_cores() // self.cluster.local_workers)
        if self.batch.num_shards is None:
            fits = num_shards is not None and workers <= num_shards <= self.batch.global_size
            self.batch.num_shards = num_shards if fits else workers
        self.validate()


# --------------------------------------------------------------------------------------------------- what cannot work


def _problems(config: Config) -> Iterator[str]:
    """Yields one sentence per problem: key=value, what is wrong with it, the remedy."""
    yield from _bound_problems(config)
    yield from _choice_problems(config)
    yield from _algorithm_problems(config)
    yield from _cluster_problems(config)
    yield from _device_problems(config)
    yield from _start_problems(config)


def _bound_problems(config: Config) -> Iterator[str]:
    """Yields what is wrong with single values."""
    for bound, keys in _AT_LEAST.items():
        for key in keys.split():
            if (value := _lookup(config, key)) is not None and value < bound:
                yield f"{key}={value}: must be at least {bound}"
    for key in _SHARES.split():
        if (value := _lookup(config, key)) is not None and not 0 <= value < 1:
            yield f"{key}={value}: must be at least 0 and below 1"
    for key in _POSITIVE.split():
        if (value := _lookup(config, key)) is not None and not value > 0:
            yield f"{key}={value}: must be greater than 0"


_AT_LEAST = {
    0: "seed loader.num_workers optim.weight_decay schedule.warmup_steps schedule.final_factor replica.verify_every",
    1: "epochs max_steps log_every cluster.workers cluster.local_workers cluster.threads_per_worker batch.global_size "
    "batch.num_shards batch.micro_size checkpoint.every_steps checkpoint.keep_last evaluate.every_epochs "
    "evaluate.every_steps loader.evaluation_batch data.image_size data.context data.num_samples model.hidden "
    "model.width model.depth model.heads optim.base_batch",
    2: "data.num_classes",
    1024: "comm.segment_bytes",
}
_SHARES = "model.dropout optim.momentum optim.beta1 optim.beta2 schedule.warmup_fraction"
_POSITIVE = (
    "clip_norm comm.warn_s comm.abort_s replica.bucket_cap_mb replica.first_bucket_mb optim.lr optim.eps schedule.gamma"
)


def _lookup(config: Config, key: str) -> Any:
    """Returns the value under a dotted key, or None if this choice of a group has no such field."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


WAYS = (
    *("auto", "shared_memory", *ALL_REDUCE, "two_dimensional", *BETWEEN_HOSTS),
    *(f"shared_memory+{between}" for between in ALL_REDUCE),
)


def _algorithm_problems(config: Config) -> Iterator[str]:
    """Yields names that no layout of workers has. The communicator knows whether this layout has it."""
    name = config.comm.algorithm
    if name not in WAYS:
        yield f"comm.algorithm={name}: unknown; choose one of {', '.join(WAYS)}"
    elif name.startswith("shared_memory") and not config.comm.shared_memory:
        yield f"comm.algorithm={name} with comm.shared_memory=false: leave one of them out"


def _choice_problems(config: Config) -> Iterator[str]:
    """Yields where a group's choice contradicts itself or another group's."""
    is_text = isinstance(config.data, StandardLibrary)
    if is_text != isinstance(config.model, Gpt):
        remedy = "model=gpt" if is_text else "data=standard_library, or a model for images such as model=cnn"
        kind = "text" if is_text else "images"
        yield f"model={config.model.name}: does not read {kind}, which data={config.data.name} is; take {remedy}"
    match config.data:
        case ImageFolder(path=None):
            yield "data.path=null: which folder? Give data.path=FOLDER, where FOLDER/train/CLASS/ holds the images"
    match config.optim:
        case Sgd(nesterov=True, momentum=0):
            yield "optim.nesterov=true: needs momentum; set optim.momentum=0.9, or optim.nesterov=false"
    if config.schedule.warmup_steps and config.schedule.warmup_fraction:
        yield (
            f"schedule.warmup_steps={config.schedule.warmup_steps}: stands beside schedule.warmup_fraction="
            f"{config.schedule.warmup_fraction:g}; set one of them to 0"
        )
    match config.schedule:
        case Step(milestones=milestones) if milestones != sorted(milestones) or not all(0 < m < 1 for m in milestones):
            yield f"schedule.milestones={milestones}: must be rising shares of the run between 0 and 1, as [0.5,0.75]"


def _cluster_problems(config: Config) -> Iterator[str]:
    """Yields worker counts and batch sizes that do not go together."""
    workers, batch = config.cluster.workers, config.batch
    local_workers = config.cluster.local_workers or workers
    most = max(8, 8 * available_cores())
    if config.cluster.local_workers is not None and local_workers > workers:
        yield f"cluster.local_workers={local_workers}: is more than cluster.workers={workers}"
    if local_workers > most:
        yield (
            f"cluster.workers={workers}: {local_workers} on this host are too many for {available_cores()} cores; "
            f"take at most {most}"
        )
    if batch.global_size < workers:
        yield (
            f"batch.global_size={batch.global_size}: smaller than cluster.workers={workers}, so some would have no "
            f"sample; take a global batch of at least {workers}, or fewer workers"
        )
    if batch.num_shards is not None and not workers <= batch.num_shards <= batch.global_size:
        yield (
            f"batch.num_shards={batch.num_shards}: must be from cluster.workers={workers} to batch.global_size="
            f"{batch.global_size}"
        )
    if config.comm.warn_s >= config.comm.abort_s:
        yield f"comm.warn_s={config.comm.warn_s:g}: must be less than comm.abort_s={config.comm.abort_s:g}"


def _device_problems(config: Config) -> Iterator[str]:
    """Yields devices and backends that this machine does not have, or that do not go together."""
    nccl = config.backend is Backend.nccl
    if nccl and config.device is Device.cpu:
        yield "backend=nccl: moves GPU memory only, and device=cpu; take backend=gloo, or device=cuda"
    if not nccl and config.device is not Device.cuda:
        return
    import torch  # this late, because the parent of a CPU run does not need it here

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not num_gpus:
        key = "backend=nccl" if nccl else "device=cuda"
        yield f"{key}: no CUDA device is seen here; take device=cpu backend=gloo"
    local_workers = config.cluster.local_workers or config.cluster.workers
    if nccl and local_workers > num_gpus:
        yield (
            f"backend=nccl: needs a GPU of its own for each of the {local_workers} workers here, and there are "
            f"{num_gpus}; take backend=gloo, or cluster.workers={num_gpus}"
        )


def _start_problems(config: Config) -> Iterator[str]:
    """Yields what is wrong with where the run starts and when it ends."""
    if config.epochs is None and config.max_steps is None:
        yield "epochs=null: beside max_steps=null the run would never end; set one of them"
    if config.resume not in ("none", "auto") and config.init_from.path is not None:
        yield (
            f"init_from.path={config.init_from.path}: stands beside resume={config.resume}, which brings its own "
            "weights; set one of them"
        )
    if not config.resume:
        yield "resume='': take none, auto, or the path of a checkpoint"


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ------------------------------------------------------------------------------------------- to a file and back


def to_plain(config: Any) -> Any:
    """Returns settings as dicts, lists and scalars that YAML can hold; enums become their names."""
    if is_dataclass(config):
        return {item.name: to_plain(getattr(config, item.name)) for item in fields(config)}
    if isinstance(config, Enum):
        return config.name
    if isinstance(config, Mapping):
        return {key: to_plain(value) for key, value in config.items()}
    return [to_plain(value) for value in config] if isinstance(config, (list, tuple)) else config


def from_plain(plain: Mapping[str, Any]) -> Config:
    """Returns the settings that `to_plain` has written, or Hydra composed; missing keys take their defaults.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or a combination that cannot work.
    """
    config = _read(Config, plain, key="")
    assert isinstance(config, Config)
    return config


def unknown_key(key: str, valid: Iterable[str], *, what: str = "key") -> ConfigError:
    """Returns the error for a `key` whose last part is not among `valid`, such as "cluster.worker" or "model=gtp"."""
    names = sorted(valid)
    end = max(key.rfind("."), key.rfind("=")) + 1
    above, last = key[:end], key[end:]
    near = difflib.get_close_matches(last, names, n=1)
    hint = f" Did you mean {above}{near[0]}?" if near else ""
    level = f" in {above[:-1]}" if above.endswith(".") else ""
    return ConfigError(f"unknown {what} {key}.{hint} Valid{level}: {', '.join(names) or 'nothing'}")


def wrong_type(key: str, value: object, expected: object) -> ConfigError:
    """Returns the error for a value of the wrong type."""
    return ConfigError(f"{key}={'null' if value is None else value}: expected {_describe(expected)}")


def _read(kind: Any, value: Any, *, key: str) -> Any:
    """Returns `value` as an instance of the type `kind`; `key` is where it stands."""
    expected = kind
    if get_origin(kind) in (Union, types.UnionType):  # only T | None occurs
        if value is None:
            return None
        (kind,) = (option for option in get_args(kind) if option is not type(None))
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise wrong_type(key or "the configuration", value, dict)
        return _read_fields(kind, value, key=key)
    if isinstance(kind, type) and issubclass(kind, Enum):
        if str(value) not in kind.__members__:
            raise wrong_type(key, value, expected)
        return kind[str(value)]
    if origin is list and isinstance(value, list):
        return [_read(arguments[0], item, key=f"{key}[{i}]") for i, item in enumerate(value)]
    if origin is dict and isinstance(value, Mapping):
        return {str(name): _read(arguments[1], item, key=f"{key}.{name}") for name, item in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if kind is str and type(value) in (int, float):  # run.name=7
        return str(value)
    if origin is None and type(value) is kind:  # not isinstance: True is no int here
        return value
    raise wrong_type(key, value, expected)


def _read_fields(kind: Any, plain: Mapping[str, Any], *, key: str) -> Any:
    default = kind
    if key in CHOICES:
        name = str(plain.get("name"))
        if name not in CHOICES[key]:
            raise unknown_key(f"{key}={name}", CHOICES[key], what="choice")
        default = partial(choose, key, name)
        kind = type(CHOICES[key][name])
    hints = get_type_hints(kind)
    prefix = f"{key}." if key else ""
    for name in plain:
        if name not in hints:
            raise unknown_key(f"{prefix}{name}", hints)
    return default(**{name: _read(hints[name], value, key=f"{prefix}{name}") for name, value in plain.items()})


def _describe(kind: Any) -> str:
    """Returns the name of a type in the words of a user."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(kind.__members__)}"
    if get_origin(kind) is list:
        return f"a list, as [{_describe(get_args(kind)[0])}, …]"
    if get_origin(kind) is dict:
        return "a mapping, as {key: value}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "a mapping"}
    return "null" if kind is type(None) else names.get(kind, str(kind))
