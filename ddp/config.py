"""Every setting of a run, as plain dataclasses: one tree, one place for defaults.

    conf/train.yaml + conf/GROUP/CHOICE.yaml + command line        Hydra, in the parent only (ddp.launcher)
                 │  config_reader.from_plain
                 ▼
              Config  ── asdict ──▶  RUN_DIR/config.yaml  ── from_plain ──▶  Config, in every worker (PyYAML only)

Four groups offer a choice: `data`, `model`, `optim`, `schedule`. Each is a base dataclass with the shared fields; a
choice that has fields of its own is a subclass. The `name` of a choice, the file conf/GROUP/NAME.yaml and the word on
the command line are the same. `CHOICES` is the table of all of them. Data and models of the user's own have an address
as their name: see `address.py`.

Components never see these classes: `components.py` takes them apart into plain keyword arguments.

Read before: `address.py`. Read next: `config_checks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ddp.address import is_address

# ---------------------------------------------------------------------------------------------------- the words


Device = Literal["auto", "cpu", "cuda"]  # auto: CUDA where there is any, else the CPU
Backend = Literal["auto", "gloo", "nccl"]  # nccl: one worker per GPU, and chosen by auto where each worker has its own
Order = Literal["any", "canonical"]  # canonical: only ways that add along the canonical binary tree over the ranks
ReplicaKind = Literal["bucketed", "naive"]  # naive: one all-reduce per parameter after backward
Precision = Literal["fp32", "bf16"]  # bf16: autocast; parameters, gradients and their sum stay fp32
LrScaling = Literal["none", "linear", "sqrt"]  # lr × k or lr × √k, k = global batch / base_batch

# ------------------------------------------------------------------------------------------------ the four groups


@dataclass(kw_only=True, slots=True)
class Data:
    """A data set: the fields of all of them. Digits, MNIST and CIFAR-10 have no others."""

    name: str
    root: str = "data"  # the folder of downloads


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
class OwnData(Data):
    """Data of the user's own; the name is the address of a function that returns them."""

    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the function


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
class OwnModel(Model):
    """A model of the user's own; the name is the address of a class, or of a function that returns a module."""

    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the class or function


@dataclass(kw_only=True, slots=True)
class Optim:
    """An optimizer: the fields of all of them."""

    name: str
    lr: float  # for `base_batch` samples a step
    weight_decay: float
    lr_scaling: LrScaling = "none"
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

OWN = {"data": OwnData, "model": OwnModel}
"""The groups in which a name may be an address."""


def choose(group: str, name: str, /, **settings: Any) -> Any:
    """Returns a choice of a group: its default settings, some of them replaced."""
    is_own = group in OWN and is_address(name)
    return replace(OWN[group](name=name) if is_own else CHOICES[group][name], **settings)


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
    dir: str = ""  # the run's folder; set by the launcher (hydra.run.dir)
    code: str = ""  # where addresses are imported from; set by the launcher to the folder that the run was started in


@dataclass(kw_only=True, slots=True)
class Cluster:
    workers: int = 2  # the world size
    local_workers: int | None = None  # of these, on this host; set by the launcher
    threads_per_worker: int | None = None  # None: cores ÷ local workers, at least 1


@dataclass(kw_only=True, slots=True)
class Batch:
    global_size: int = 64  # samples per optimizer step, over all workers
    num_shards: int | None = None  # parts of a batch, which random streams depend on; None: one per worker
    micro_size: int | None = None  # most samples in one forward; larger shares take several forwards. None: no limit


@dataclass(kw_only=True, slots=True)
class Comm:
    algorithm: str = "auto"  # auto (least predicted time) | shared_memory | ring, tree, … | hierarchical, … | ADDRESS
    order: Order = "any"
    shared_memory: bool = True  # False: also between workers of one host everything goes over the transport
    debug: bool = False  # the workers compare their calls before every collective
    segment_bytes: int = 4 << 20  # a chunk travels in pieces of this size
    warn_s: float = 10.0  # after this long a waiting rank says which rank it waits for
    abort_s: float = 600.0  # after this long it ends the run


@dataclass(kw_only=True, slots=True)
class Replica:
    kind: ReplicaKind = "bucketed"
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
    """The settings of one run."""

    seed: int = 0
    epochs: int | None = 15
    max_steps: int | None = None  # with `epochs` too: whichever comes first
    deterministic: bool = False
    device: Device = "auto"
    backend: Backend = "auto"
    precision: Precision = "fp32"
    clip_norm: float | None = None
    log_every: int = 10  # steps between two lines of metrics.jsonl
    resume: str = "none"  # none | auto (this run's folder, if it holds a checkpoint) | path of a checkpoint or run
    loss: str = "auto"  # auto (what the data are for) | ADDRESS of a function of outputs and targets, or of a task
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
