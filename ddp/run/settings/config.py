"""Every setting of a run, as plain dataclasses: one tree, and the one place for defaults and meanings.

    `Config` with its defaults + conf/train.yaml + command line       Hydra, in the parent only (`launch/`)
                 │  reader.from_plain
                 ▼
              Config  ── asdict ──▶  RUN_DIR/config.yaml  ── from_plain ──▶  Config, in every worker (PyYAML only)

A new setting is one line, `name: type = setting(default, "meaning", at_least=1)`, with its bounds. The command line,
its errors, --help and docs/settings.md take it from here.

Six groups offer a choice: `strategy`, `data`, `model`, `optim`, `schedule`, `hook`. Each is a base dataclass of shared
fields; a choice that has fields of its own is a subclass. The `name` of a choice is the word on the command line.
`CHOICES` is the table of all of them. Data and models of the user's own have an address as their name: see
`address.py`.

Components never see these classes: `components.py` and `optimizer.py` take them apart into plain arguments.
"""


from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ddp.collectives.simulate import SEGMENT_BYTES
from ddp.comm.meeting.cast import Job
from ddp.policies import (
    Buckets,
    Checkpoints,
    Evaluation,
    Folder,
    GuardAction,
    Reading,
    Reports,
    Rounds,
    SameBits,
    Serving,
    Training,
    WatchAction,
)
from ddp.process.clock import LONGEST_S
from ddp.run.settings.address import is_address
from ddp.setting import Additions, Scaling, StrategyName, check_region, setting

# ---------------------------------------------------------------------------------------------------- the words


Device = Literal["auto", "cpu", "cuda"]
Backend = Literal["auto", "gloo", "nccl"]
ReplicaKind = Literal["bucketed", "naive"]
Evaluator = Literal["workers", "sidecar"]
WatchChoice = Literal[WatchAction, "off"]
DataOrder = Literal["auto", "permutation", "blocks", "weighted", "stratified", "fixed"]
TokenType = Literal["uint8", "uint16", "int32", "uint32"]
TrackerName = Literal["tensorboard", "csv", "mlflow", "wandb"]


# ------------------------------------------------------------------------------------------------- the six groups


@dataclass(frozen=True, kw_only=True)
class StrategyChoice:
    """The strategy: who holds what, and how often the workers agree."""

    name: StrategyName

    def num_parts(self, num_workers: int) -> int:
        """Returns the number of parts of a step, each of which a worker computes."""
        return num_workers


@dataclass(frozen=True, kw_only=True)
class CentralStorageChoice(StrategyChoice):
    name: StrategyName = "central_storage"
    region: str | None = setting(
        None,
        "name by which other jobs of yours on the host find the parameters while the run goes on, as in "
        "ddp.load(region=NAME); null: none does",
    )

    def __post_init__(self) -> None:
        if self.region is not None:
            check_region(self.region)


@dataclass(frozen=True, kw_only=True)
class ParameterServerChoice(Serving, StrategyChoice):
    name: StrategyName = "parameter_server"


@dataclass(frozen=True, kw_only=True)
class LocalSGDChoice(Rounds, StrategyChoice):
    name: StrategyName = "local_sgd"


@dataclass(kw_only=True, slots=True)
class Data:
    """The data set to train on and to evaluate on."""

    name: str
    root: str = setting("data", "folder that MNIST and CIFAR-10 are downloaded into")
    order: DataOrder = setting(
        "auto",
        "order of an epoch: a permutation; blocks of shuffled files; fixed; weighted, by the weights of the data; "
        "stratified, by their classes; auto: blocks where files are dealt, else a permutation",
    )
    window: int | None = setting(
        None,
        "samples of blocks that are mixed with each other; null: 4096, or the samples of four files if fewer",
        at_least=1,
    )
    sharding: str = setting(
        "auto",
        "what shards of a batch are cut from: file, sample, full_shuffle, off, or MODULE:NAME of a function (shard, "
        "number of shards) → samples: docs/data.md; auto: file where there are as many files as shards, else sample",
    )
    skip_steps: list[int] = setting([], "first and last of the steps whose samples are left out, such as [4700,4710]")
    validation: float | None = setting(
        None,
        "share of the training samples that is set apart, between 0 and 1; the run chooses by it (the best checkpoint, "
        "say), and the test set is read at the end; null: it chooses by the test set",
        above=0,
        below=1,
    )


TRANSFORM = "your own augmentation of training images, as MODULE:NAME: docs/data.md; null: as shipped"


@dataclass(kw_only=True, slots=True)
class Images(Data):
    """Images and their classes."""

    transform: str | None = setting(None, TRANSFORM)


@dataclass(kw_only=True, slots=True)
class ImageFolder(Images):
    name: str = "image_folder"
    path: str | None = setting(None, "folder that holds train/CLASS/*.jpg and val/CLASS/*.jpg; must be given")
    index_dir: str = setting("data/index", "folder with the lists of images, which the parent makes")
    image_size: int = setting(224, "height and width that images are brought to, in pixels", at_least=1)


@dataclass(kw_only=True, slots=True)
class StandardLibrary(Data):
    name: str = "standard_library"
    context: int = setting(256, "length of a sample, in bytes", at_least=1)


@dataclass(kw_only=True, slots=True)
class Synthetic(Images):
    name: str = "synthetic"
    num_samples: int = setting(4096, "training images; there are an eighth as many test images", at_least=1)
    image_size: int = setting(32, "height and width of the images, in pixels", at_least=1)
    num_classes: int = setting(10, "number of classes", at_least=2)


@dataclass(kw_only=True, slots=True)
class DataFiles(Data):
    """Samples in files: tar files, lines or tokens."""

    path: str | None = setting(
        None, "training files: a file, a pattern such as s3://bucket/train-{000..099}.tar, or a folder; must be given"
    )
    test_path: str | None = setting(None, "the same for the held-out files; must be given")
    validation_path: str | None = setting(
        None, "the same for held-out files that the run chooses by, in place of data.validation; null: there are none"
    )
    index_dir: str = setting(
        "data/index", "folder with the indexes of files: where each sample begins, and a copy of each file with rows"
    )
    cache_dir: str | None = setting(
        None, "folder of each host into which remote files are copied; null: they are streamed"
    )


@dataclass(kw_only=True, slots=True)
class TarImages(DataFiles):
    name: str = "tar"
    transform: str | None = setting(None, TRANSFORM)
    image_size: int = setting(224, "height and width that images are brought to, in pixels", at_least=1)
    num_classes: int = setting(1000, "number of classes", at_least=2)


@dataclass(kw_only=True, slots=True)
class Lines(DataFiles):
    inputs: list[str] = setting([], "names of the columns that are a sample's inputs; must be given")
    target: str | None = setting(None, "name of the column that is the target; must be given")
    num_classes: int | None = setting(None, "number of classes, if the target is one; null: it is a number", at_least=2)
    missing: float | None = setting(None, "number that an empty cell of data.inputs counts as; null: it ends the run")
    text: str | None = setting(None, "name of the column with text for model=gpt, in place of inputs and target")
    tokenizer: str = setting("bytes", "of data.text: bytes, or the path of a Hugging Face tokenizer.json")
    context: int = setting(256, "length of a sample of data.text, in tokens", at_least=1)


@dataclass(kw_only=True, slots=True)
class Tokens(DataFiles):
    name: str = "tokens"
    context: int = setting(256, "length of a sample, in tokens", at_least=1)
    dtype: TokenType = setting("uint16", "number format of raw files; .npy files say it themselves")
    vocab_size: int = setting(50257, "number of different tokens", at_least=1)


@dataclass(kw_only=True, slots=True)
class OwnData(Data):
    """Data of your own: a function that returns a pair (train, test), or ddp.Splits."""

    args: dict[str, Any] = setting({}, "keyword arguments, such as data.args.n=100")


@dataclass(kw_only=True, slots=True)
class Model:
    """The model to train."""

    name: str


@dataclass(kw_only=True, slots=True)
class Mlp(Model):
    name: str = "mlp"
    hidden: int = setting(256, "units of each of the two hidden layers", at_least=1)


@dataclass(kw_only=True, slots=True)
class Cnn(Model):
    name: str = "cnn"
    width: int = setting(32, "channels of the first convolution", at_least=1)
    dropout: float = setting(0.3, "probability that an input of the last two layers is dropped", at_least=0, below=1)


@dataclass(kw_only=True, slots=True)
class Gpt(Model):
    name: str = "gpt"
    width: int = setting(192, "length of the vector of a position; a multiple of 2 · heads", at_least=1)
    depth: int = setting(4, "number of blocks", at_least=1)
    heads: int = setting(6, "attention heads of a block", at_least=1)
    dropout: float = setting(0.0, "probability that an activation is dropped", at_least=0, below=1)


@dataclass(kw_only=True, slots=True)
class OwnModel(Model):
    """A model of your own: a class, or a function that returns a torch.nn.Module."""

    args: dict[str, Any] = setting({}, "keyword arguments, such as model.args.width=64")


@dataclass(kw_only=True, slots=True)
class Optim:
    """The optimizer."""

    name: str
    lr: float = setting(MISSING, "learning rate for a global batch of optim.base_batch samples", above=0)
    weight_decay: float | None = setting(
        MISSING,
        "weight decay, of weight matrices only (not of biases and norms); null: the preset's or torch's",
        at_least=0,
    )
    lr_scaling: Scaling = setting(
        "none",
        "how lr follows the global batch, with k = batch.global_size ÷ base_batch: not, lr · k, or lr · √k; legw: lr · "
        "√k, and the warm-up takes k times more samples",
    )
    base_batch: int = setting(64, "global batch that lr was found for, in samples; lr_scaling reads it", at_least=1)
    exclude: list[str] = setting([], "names of further parameters to treat like biases and norms, such as [embed.*]")


@dataclass(kw_only=True, slots=True)
class Sgd(Optim):
    name: str = "sgd"
    lr: float = 0.05
    weight_decay: float | None = 5e-4
    momentum: float = setting(0.9, "share of the last update that is carried on", at_least=0, below=1)
    nesterov: bool = setting(True, "take the gradient's step from where momentum leads to (Nesterov)")


@dataclass(kw_only=True, slots=True)
class Adam(Optim):
    beta1: float = setting(0.9, "decay of the running mean of gradients, per step", at_least=0, below=1)
    beta2: float = setting(0.999, "decay of the running mean of squared gradients, per step", at_least=0, below=1)
    eps: float = setting(1e-8, "added to the root of the mean squared gradient before the division by it", above=0)


@dataclass(kw_only=True, slots=True)
class LayerwiseOptim(Optim):
    preset: str = setting(MISSING, "paper or program whose choices hold: docs/large-batches.md")
    args: dict[str, Any] = setting({}, "choices other than the preset's, such as optim.args.bias_correction=false")


@dataclass(kw_only=True, slots=True)
class Schedule:
    """The learning-rate schedule, a factor on lr by samples."""

    name: str
    warmup_steps: int | None = setting(
        None, "steps in which lr rises linearly at the start; set this or another below", at_least=0
    )
    warmup_samples: int | None = setting(None, "the same as samples of all workers", at_least=0)
    warmup_epochs: float | None = setting(None, "the same as epochs", at_least=0)
    warmup_fraction: float | None = setting(
        None,
        "the same as a share of the run, below 1; null, like the others: 0.05 where lr falls steadily, else 0",
        at_least=0,
        below=1,
    )


@dataclass(kw_only=True, slots=True)
class Falling(Schedule):
    """A schedule that falls steadily, for which a short warm-up is usual."""

    final_factor: float = setting(0.0, "factor on lr at the end of the run", at_least=0)


@dataclass(kw_only=True, slots=True)
class Polynomial(Falling):
    name: str = "polynomial"
    power: float = setting(1.0, "power of what is left of the run; 1: a straight line", above=0)


@dataclass(kw_only=True, slots=True)
class Wsd(Falling):
    name: str = "wsd"
    decay_fraction: float = setting(0.2, "last share of the run, in which lr falls, above 0", above=0, at_most=1)


@dataclass(kw_only=True, slots=True)
class StepDecay(Schedule):
    name: str = "step"
    milestones: list[float] = setting([0.5, 0.75], "when lr drops, as rising shares of the run between 0 and 1")
    gamma: float = setting(0.1, "factor on lr at each milestone", above=0)


@dataclass(kw_only=True, slots=True)
class HookChoice:
    """The hook that sends less than all of the gradients between hosts."""

    name: str
    error_feedback: bool = setting(True, "add to each gradient what the last steps have not sent of it")
    dense_start_steps: int = setting(0, "first steps that send gradients as they are", at_least=0)


@dataclass(kw_only=True, slots=True)
class TopKChoice(HookChoice):
    name: str = "top_k"
    ratio: float = setting(
        0.01, "share of the numbers of a tensor that is sent, above 0 and at most 1", above=0, at_most=1
    )
    momentum: float = setting(0.0, "momentum that the hook applies in the place of the optimizer", at_least=0, below=1)
    warmup_steps: int = setting(0, "steps in which the ratio falls from 1/4 to this one", at_least=0)


@dataclass(kw_only=True, slots=True)
class RandomKChoice(HookChoice):
    name: str = "random_k"
    ratio: float = setting(
        0.1, "share of the numbers of a tensor that is sent, above 0 and at most 1", above=0, at_most=1
    )


@dataclass(kw_only=True, slots=True)
class PowerSgdChoice(HookChoice):
    name: str = "powersgd"
    rank: int = setting(4, "columns of the two narrow matrices whose product stands for a gradient", at_least=1)
    warm_start: bool = setting(True, "begin with the factor of the last step, and not with a random one")


_ALL: dict[str, list[tuple[Any, str]]] = {
    "strategy": [
        (StrategyChoice(name="auto"), "every worker holds all, and makes the same update; on any number of hosts"),
        (StrategyChoice(name="one_device"), "the same, with one worker"),
        (StrategyChoice(name="mirrored"), "the same, with the workers of one host"),
        (StrategyChoice(name="multi_worker"), "the same as auto, by the name that guides have for several hosts"),
        (
            StrategyChoice(name="sharded"),
            "each worker updates a slice of the parameters, and holds its optimizer state alone (ZeRO 1)",
        ),
        (
            CentralStorageChoice(),
            "parameters and optimizer state are once on each host, in memory that all of its workers share",
        ),
        (
            ParameterServerChoice(),
            "servers hold parameters and optimizer state; workers lease samples and push gradients: docs/strategies.md",
        ),
        (LocalSGDChoice(), "workers train by themselves, and agree every few dozen steps: local SGD, DiLoCo"),
    ],
    "data": [
        (Images(name="digits"), "1,797 scanned digits of 8×8 pixels; scikit-learn brings them"),
        (Images(name="mnist"), "70,000 digits of 28×28 pixels; downloaded once (11 MB)"),
        (Images(name="cifar10"), "60,000 colour images of 32×32 pixels in ten classes; downloaded once (170 MB)"),
        (ImageFolder(), "your own images, in ImageNet's layout"),
        (TarImages(), "images and classes in tar files, in WebDataset's layout"),
        (Lines(name="jsonl"), "numbers and a target in JSON lines"),
        (Lines(name="csv"), "numbers and a target in CSV files with a header"),
        (Lines(name="parquet"), "numbers and a target in Parquet files"),
        (Lines(name="arrow"), "numbers and a target in Arrow files, as Hugging Face's datasets and Feather write them"),
        (Tokens(), "text as tokens, in flat files, for model=gpt"),
        (StandardLibrary(), "source text of Python's standard library, byte by byte, for model=gpt"),
        (Synthetic(), "made-up colour images of classes that can be learnt: to measure speed"),
    ],
    "model": [
        (Mlp(), "fully connected layers, for images"),
        (Cnn(), "small convolutional network, for small images"),
        (Model(name="resnet18"), "torchvision's ResNet-18, for images"),
        (Model(name="resnet34"), "torchvision's ResNet-34, for images"),
        (Model(name="resnet50"), "torchvision's ResNet-50, for images"),
        (Gpt(), "small GPT, for text: data=standard_library model=gpt"),
    ],
    "optim": [
        (Sgd(), "stochastic gradient descent with momentum"),
        (Adam(name="adam", lr=1e-3, weight_decay=0.0), "Adam; weight decay is added to the gradient"),
        (Adam(name="adamw", lr=4e-3, weight_decay=0.01), "Adam with weight decay apart from the gradient"),
        (
            LayerwiseOptim(name="lars", lr=4.0, weight_decay=None, preset="paper"),
            "momentum whose rate follows the size of each tensor, for large batches",
        ),
        (LayerwiseOptim(name="larc", lr=0.2, weight_decay=None, preset="apex"), "LARS whose rate is never above lr"),
        (
            LayerwiseOptim(name="lamb", lr=0.01, weight_decay=None, preset="paper"),
            "Adam whose rate follows the size of each tensor, for large batches",
        ),
    ],
    "schedule": [
        (Schedule(name="constant"), "the same rate all the time, after the warm-up if there is one"),
        (Falling(name="cosine"), "half a cosine from lr down to lr · final_factor, after the warm-up"),
        (Polynomial(), "a line or a power from lr down to lr · final_factor, after the warm-up"),
        (Wsd(), "the same rate after the warm-up, and a decay at the end (warm-up, stable, decay)"),
        (StepDecay(), "lr is multiplied by gamma at each milestone"),
    ],
    "hook": [
        (HookChoice(name="none"), "gradients are sent whole"),
        (HookChoice(name="sign"), "one bit for each number, and a scale for each row"),
        (TopKChoice(), "the largest numbers of each tensor, with their positions"),
        (RandomKChoice(), "numbers drawn at random, the same ones on every worker"),
        (PowerSgdChoice(), "two narrow matrices for each matrix"),
    ],
}
CHOICES: dict[str, dict[str, Any]] = {
    group: {choice.name: choice for choice, _ in choices} for group, choices in _ALL.items()
}
"""group → name → its default settings."""
MEANINGS = {group: {choice.name: meaning for choice, meaning in choices} for group, choices in _ALL.items()}
"""group → name → what the choice is."""

OWN = {"data": OwnData, "model": OwnModel}
"""The groups in which a name may be an address."""


def choose(group: str, name: str, /, **settings: Any) -> Any:
    """Returns a choice of a group: its default settings, some of them replaced."""
    is_own = group in OWN and is_address(name)
    return replace(OWN[group](name=name) if is_own else CHOICES[group][name], **settings)


# -------------------------------------------------------------------------------------------------- the fixed parts


@dataclass(kw_only=True, slots=True)
class InitFrom:
    """Starts from given weights, at step 0 with a fresh optimizer, unlike resume."""

    path: str | None = setting(None, "run, checkpoint or file of weights to start from; null: fresh weights")
    strict: bool = setting(True, "refuse the file unless every parameter is found and every key is used")
    rename: dict[str, str] = setting({}, "prefix of keys in the file → prefix in the model, as {backbone: features}")
    skip: list[str] = setting([], "prefixes of keys that keep their fresh values, such as a new head")


@dataclass(kw_only=True, slots=True)
class Run:
    """The run's folder."""

    name: str = setting("", "name of the folder below runs/; date and time unless given")
    group: str = setting("", "what the run belongs to, for trackers; a sweep sets it to its folder's name")
    dir: str = ""  # the run's folder; set by the launcher (hydra.run.dir)
    code: str = ""  # where addresses are imported from; set by the launcher to the folder that the run was started in


@dataclass(kw_only=True, slots=True)
class Sweep:
    """The jobs of a sweep (-m) or a search, each a process of its own."""

    name: str | None = setting(
        None,
        "name of the folder of all jobs, below runs/; the same command again runs what is missing there or has failed; "
        "null: date and time",
    )
    parallel: int = setting(1, "jobs that run at the same time, each on cores of its own", at_least=1)


@dataclass(kw_only=True, slots=True)
class Cluster:
    """The processes that train."""

    workers: int = setting(2, "number of workers, the world size", at_least=1)
    servers: int = setting(
        0,
        "further processes that hold the parameters, for strategy=parameter_server; 0: one there, else none",
        at_least=0,
    )
    restarts: int = setting(
        3, "most times that a lost worker is started again, and that all servers are after the loss of one", at_least=0
    )
    spec: dict[str, Any] = setting(
        {},
        "addresses of the tasks of a cluster, by job, each of which is started by hand, as {chief: [HOST:PORT], "
        "worker: [HOST:PORT, …]}: docs/engines.md",
    )
    task: str | None = setting(None, "which of these tasks this process is, as worker:0")
    role: Job | None = setting(
        None,
        "what this process is in a run with servers whose processes are started by hand, at any time: docs/engines.md; "
        "workers need nothing else",
    )
    local_workers: int | None = None  # of these, on this host; set by the launcher
    threads_per_worker: int | None = setting(
        None, "CPU threads of a worker; null: cores ÷ workers of the host", at_least=1
    )
    devices: list[int] | None = setting(
        None, "numbers of the GPUs of each host that its workers see, as [0,1]; null: all that are visible"
    )


@dataclass(kw_only=True, slots=True)
class Batch:
    """The samples of a step."""

    global_size: int = setting(64, "samples of an optimizer step, over all workers", at_least=1)
    warmup_size: int | None = setting(
        None,
        "the same at the start of the run, from where it grows evenly, in multiples; null: global_size at once",
        at_least=1,
    )
    warmup_samples: int | None = setting(
        None, "samples of all workers in which it grows; set this or warmup_epochs", at_least=1
    )
    warmup_epochs: float | None = setting(None, "the same as epochs", above=0)
    tokens: int | None = setting(
        None,
        "most tokens of a step, over all workers, for samples of unequal lengths; null: global_size samples",
        at_least=1,
    )
    num_shards: int | None = setting(
        None,
        "parts of a batch, which random numbers depend on; null: one per worker, or as in the run to be resumed",
        at_least=1,
    )
    micro_size: int | None = setting(
        None, "most samples of one forward; a larger share is accumulated over several; null: no limit", at_least=1
    )


@dataclass(kw_only=True, slots=True)
class Comm:
    """Communication between workers."""

    algorithm: str = setting(
        "auto", "how an all-reduce runs: shared_memory, ring, tree, …, MODULE:NAME; auto: in the least predicted time"
    )
    order: Additions = setting(
        "any", "canonical: use only algorithms that add along the same binary tree over the workers; any: use all"
    )
    shared_memory: bool = setting(True, "use shared memory inside a host; false: messages only")
    debug: bool = setting(False, "before each collective, compare what the workers call")
    segment_bytes: int = setting(
        SEGMENT_BYTES, "size of the pieces in which a long message travels, in bytes", at_least=1024
    )
    warn_s: float = setting(
        10.0, "seconds after which a waiting worker says whom it waits for", above=0, at_most=LONGEST_S
    )
    abort_s: float = setting(600.0, "seconds after which a waiting worker ends the run", above=0, at_most=LONGEST_S)


@dataclass(frozen=True, kw_only=True)
class ReplicaChoice(Buckets):
    """The copies of the model, and how their gradients are averaged."""

    kind: ReplicaKind = setting(
        "bucketed", "bucketed: buckets are reduced while backward runs; naive: one all-reduce per parameter, afterwards"
    )
    sync_batchnorm: bool = setting(False, "BatchNorm normalises over all workers' samples, by ddp.SyncBatchNorm")


@dataclass(frozen=True, kw_only=True)
class EvaluationChoice(Evaluation):
    """The evaluations on the held-out samples, and who makes them."""

    by: Evaluator = setting(
        "workers",
        "workers: training pauses meanwhile; sidecar: one more process, on a core of its own where there is one, "
        "evaluates each checkpoint",
    )
    wait_s: float = setting(
        600.0,
        "seconds that the table at the end waits for the sidecar; and one that was started by hand for a run in whose "
        "folder nothing happens",
        at_least=0,
        at_most=LONGEST_S,
    )


@dataclass(kw_only=True, slots=True)
class EarlyStopping:
    """The end of a run whose main metric no longer becomes better."""

    patience: int | None = setting(
        None, "evaluations in a row without a better main metric that end a run; null: off", at_least=1
    )
    min_delta: float = setting(0.0, "a metric is better if it is better by more than this", at_least=0)


@dataclass(kw_only=True, slots=True)
class Watching:
    """The watch over a run that does not learn, or that has become slow."""

    action: WatchChoice = setting(
        "warn", "warn: a line on the terminal; stop: the run ends with a checkpoint, and status 3; off: not looked for"
    )
    learn_share: float = setting(
        0.2, "share of the run's steps after which its loss is better than a constant guess's", above=0, at_most=1
    )
    slow_share: float = setting(
        0.5, "a run is slow if its samples/s stay below this share of their median; 0: never", at_least=0, below=1
    )


@dataclass(kw_only=True, slots=True)
class Guarding:
    """The course after a step whose loss or gradient is not finite, or whose loss jumps."""

    action: GuardAction = setting(
        "stop",
        "stop: the run ends with an error; skip: the step is left out, as by data.skip_steps; go_back: the run goes on "
        "from its last checkpoint, at half the learning rate",
    )
    spike: float | None = setting(
        None,
        "standard deviations above the mean of the last losses from which a loss counts as bad, too, such as 8; null: "
        "only what is not finite does",
        above=0,
    )
    most: int = setting(3, "how often a run leaves a step out or goes back; the next bad step ends it", at_least=1)


@dataclass(kw_only=True, slots=True)
class Ema:
    """An exponential moving average of the weights, which evaluations and ddp.load use."""

    decay: float | None = setting(
        None, "share of the average that a step keeps, such as 0.999; null: no average", at_least=0, below=1
    )


@dataclass(kw_only=True, slots=True)
class ProfileOf:
    """The steps that are profiled, after five that warm up: profile.json and traces/."""

    steps: int = setting(
        0,
        "steps whose parts are measured, into profile.json; as many after them are recorded, into traces/; 0: none",
        at_least=0,
    )
    seconds: float | None = setting(
        None,
        "the run is there to be measured: it ends so many seconds after its warm-up, without a checkpoint; so many "
        "steps as above or more are spread over that time, and no trace is made; null: it goes on",
        above=0,
    )


@dataclass(kw_only=True)
class Config(Training):
    """The settings of one run."""

    seed: int = setting(
        0, "seed of all random numbers: first weights, order of samples, augmentation, dropout", at_least=0
    )
    epochs: int | None = 15
    deterministic: bool = setting(False, "use deterministic kernels only, which can be slower")
    device: Device = setting("auto", "where tensors live; auto: on CUDA where there is any, else on the CPU")
    backend: Backend = setting(
        "auto", "torch's transport; nccl needs a GPU per worker; auto: nccl where each worker has its own, else gloo"
    )
    resume: str = setting(
        "none", "none; auto: continue what the run's folder holds, if anything; or path of a checkpoint or run"
    )
    trust: bool = setting(False, "run code that the files of a run to be resumed name, also if others may write them")
    trial: bool = setting(False, "three steps, one evaluation and one save only, of which no file but logs is kept")
    loss: str = setting(
        "auto", "auto: what the data are for; or MODULE:NAME of a function of outputs and targets, or of a ddp.Task"
    )
    callbacks: list[str] = setting(
        [],
        "your own, as [MODULE:NAME] of a ddp.Callback, or of a function without arguments that returns one; the "
        "command calls that once, too, before any worker starts",
    )
    trackers: list[TrackerName] = setting(
        [],
        "what else gets settings, metrics, curves and the last checkpoint: some of tensorboard, csv, mlflow and wandb, "
        "as [csv,mlflow]: docs/trackers.md",
    )
    init_from: InitFrom = field(default_factory=InitFrom)
    run: Run = field(default_factory=Run)
    sweep: Sweep = field(default_factory=Sweep)
    cluster: Cluster = field(default_factory=Cluster)
    batch: Batch = field(default_factory=Batch)
    comm: Comm = field(default_factory=Comm)
    replica: ReplicaChoice = field(default_factory=ReplicaChoice)
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    report: Reports = field(default_factory=Reports)
    profile: ProfileOf = field(default_factory=ProfileOf)
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    watch: Watching = field(default_factory=Watching)
    guard: Guarding = field(default_factory=Guarding)
    ema: Ema = field(default_factory=Ema)
    evaluate: EvaluationChoice = field(default_factory=EvaluationChoice)
    loader: Reading = field(default_factory=Reading)
    same_bits: SameBits = field(default_factory=SameBits)
    strategy: StrategyChoice = field(default_factory=lambda: choose("strategy", "auto"))
    data: Data = field(default_factory=lambda: choose("data", "digits"))
    model: Model = field(default_factory=Cnn)
    optim: Optim = field(default_factory=lambda: choose("optim", "adamw"))
    schedule: Schedule = field(default_factory=lambda: choose("schedule", "cosine"))
    hook: HookChoice = field(default_factory=lambda: choose("hook", "none"))


def folder_of(config: Config, path: str | Path) -> Folder:
    """Returns the policy of the run's folder.

    Raises:
        ConfigError: how it starts contradicts what it keeps.
    """
    resume = None if config.resume == "none" else config.resume
    return Folder(path, resume, config.trial, **vars(config.checkpoint), **vars(config.report))


def plain_defaults() -> dict[str, Any]:
    """Returns the tree of defaults that the command line starts from: plain values, without the groups of choices."""
    plain = {key: value for key, value in asdict(Config()).items() if key not in CHOICES}
    del plain["run"], plain["cluster"]["local_workers"]  # conf/train.yaml names the run; the launcher counts workers
    return plain
