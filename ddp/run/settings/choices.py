"""The choices of the groups of settings: what each is, its settings, and how it is made of them (`groups.py`).

    strategy                            → ddp.Averaging
    data        what to load            → ddp.Splits
    model       facts of the samples    → torch.nn.Module, initialised from the global generator
    optim       parameter groups        → torch.optim.Optimizer
    schedule                            → a factor on the learning rate, without warm-up
    hook        the run's seed          → ddp.gradients.Hook, or None

Nothing here imports torch before a component is made, so that `--help` prints at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast

from ddp.errors import ConfigError
from ddp.policies import Averaging, LocalSGD, ParameterServer, Rounds, Serving
from ddp.run.settings.groups import DataFiles, choice
from ddp.setting import Below1, Bounds, FromZero, Natural, Positive, StrategyName, UpTo1, Whole

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ddp.data.samples import Splits
    from ddp.data.sets.image_sets import Augment
    from ddp.gradients import Hook
    from ddp.optim.schedules import RateSchedule

NO_ARGS: dict[str, Any] = {}

# ------------------------------------------------------------------------------------------------------- strategies


@choice(
    "strategy",
    "sharded",
    "each worker updates a slice of the parameters, and holds its optimizer state alone (ZeRO 1)",
)
@choice("strategy", "tpu", "one process computes on TPUs, or other devices of JAX: a worker is a device")
@choice("strategy", "multi_worker", "the same as auto, by the name that guides have for several hosts")
@choice("strategy", "mirrored", "the same, with the workers of one host")
@choice("strategy", "one_device", "the same, with one worker")
@choice("strategy", "auto", "every worker holds all, and makes the same update; on any number of hosts")
def averaging(*, name: StrategyName) -> Averaging:
    return Averaging(strategy=name)


@choice(
    "strategy",
    "fully_sharded",
    "each worker holds a slice of parameters, gradients and state; for a model that no worker can hold (ZeRO 3)",
)
def fully_sharded(
    *,
    units: Annotated[
        str | None,
        "pattern of names of modules, each of which is whole on a worker while it computes, as blocks.*; null: the "
        "elements of outermost lists of modules",
    ] = None,
) -> Averaging:
    return Averaging(strategy="fully_sharded", units=units)


@choice(
    "strategy",
    "central_storage",
    "parameters and optimizer state are once on each host, in memory that all of its workers share",
)
def central_storage(
    *,
    region: Annotated[
        str | None,
        "name by which your other jobs on the host find the parameters during the run, as in "
        "ddp.load(region=NAME); null: none can",
    ] = None,
) -> Averaging:
    return Averaging(strategy="central_storage", region=region)


@choice(
    "strategy",
    "parameter_server",
    "servers hold parameters and optimizer state; workers lease samples and push gradients: docs/strategies.md",
    shares=Serving,
)
def parameter_server(**policy: Any) -> Averaging:
    return ParameterServer(**policy)


@choice(
    "strategy",
    "local_sgd",
    "workers train by themselves, and agree every few dozen steps: local SGD, DiLoCo",
    shares=Rounds,
)
def local_sgd(**policy: Any) -> Averaging:
    return LocalSGD(**policy)


# --------------------------------------------------------------------------------------------------------- data sets


class Loading(NamedTuple):
    """The parts of a data set to load, and whether to fetch them.

    Attributes:
        own: imports the user's augmentation by its address; None: the data set augments as it does by itself.
        files: where the samples are, of a choice that shares `DataFiles`.
        trains: training samples are loaded; else the test samples alone, if these lie apart.
        download: what is missing is fetched, and indexes are made; one process of a host does so.
    """

    own: Callable[[str | None], Augment | None]
    files: Any  # ddp/data/sets/file_splits.py::Files
    trains: bool
    download: bool


TokenType = Literal["uint8", "uint16", "int32", "uint32"]
Transform = Annotated[
    str | None, "your own augmentation of training images, as MODULE:NAME: docs/data.md; null: as shipped"
]
Pixels = Annotated[Natural, "height and width that images are brought to, in pixels"]
Classes = Annotated[int, Bounds(at_least=2), "number of classes"]
NO_COLUMNS: list[str] = []


@choice("data", "digits", "1,797 scanned digits of 8×8 pixels, shipped with scikit-learn")
def digits(load: Loading, *, transform: Transform = None) -> Splits:
    from ddp.data.sets.image_sets import augmented, load_digits

    return augmented(load_digits(), load.own(transform))


@choice("data", "mnist", "70,000 digits of 28×28 pixels; downloaded once (11 MB)")
def mnist(load: Loading, *, root: str, transform: Transform = None) -> Splits:
    from ddp.data.sets.image_sets import augmented, load_mnist

    return augmented(load_mnist(root, download=load.download), load.own(transform))


@choice("data", "cifar10", "60,000 colour images of 32×32 pixels in ten classes; downloaded once (170 MB)")
def cifar10(load: Loading, *, root: str, transform: Transform = None) -> Splits:
    from ddp.data.sets.image_sets import load_cifar10

    return load_cifar10(root, augment=load.own(transform), download=load.download)


@choice("data", "image_folder", "your own images, in ImageNet's layout")
def image_folder(
    load: Loading,
    *,
    transform: Transform = None,
    path: Annotated[str | None, "folder that holds train/CLASS/*.jpg and val/CLASS/*.jpg; must be given"] = None,
    index_dir: Annotated[str, "folder with the lists of images, which the parent makes"] = "data/index",
    image_size: Pixels = 224,
) -> Splits:
    from ddp.data.sets.image_sets import load_folder

    how = {"trains": load.trains, "build": load.download}
    return load_folder(cast(str, path), index_dir=index_dir, image_size=image_size, augment=load.own(transform), **how)


@choice("data", "tar", "images and classes in tar files, in WebDataset's layout", shares=DataFiles)
def tar(load: Loading, *, transform: Transform = None, image_size: Pixels = 224, num_classes: Classes = 1000) -> Splits:
    from ddp.data.sets.file_splits import load_tar

    return load_tar(load.files, image_size=image_size, num_classes=num_classes, augment=load.own(transform))


@choice(
    "data",
    "arrow",
    "numbers and a target in Arrow files, as Hugging Face's datasets and Feather write them",
    shares=DataFiles,
)
@choice("data", "parquet", "numbers and a target in Parquet files", shares=DataFiles)
@choice("data", "csv", "numbers and a target in CSV files with a header", shares=DataFiles)
@choice("data", "jsonl", "numbers and a target in JSON lines", shares=DataFiles)
def rows(
    load: Loading,
    *,
    name: Literal["csv", "jsonl", "parquet", "arrow"],
    inputs: Annotated[list[str], "names of the columns that are a sample's inputs; must be given"] = NO_COLUMNS,
    target: Annotated[str | None, "name of the column that is the target; must be given"] = None,
    num_classes: Annotated[
        int | None, Bounds(at_least=2), "number of classes, if the target is one; null: it is a number"
    ] = None,
    missing: Annotated[
        float | None, "number that an empty cell of data.inputs counts as; null: it ends the run"
    ] = None,
    text: Annotated[str | None, "name of the column with text for model=gpt, in place of inputs and target"] = None,
    tokenizer: Annotated[str, "of data.text: bytes, or the path of a Hugging Face tokenizer.json"] = "bytes",
    context: Annotated[Natural, "length of a sample of data.text, in tokens"] = 256,
) -> Splits:
    from ddp.data.sets.file_splits import load_rows, load_text

    if text is not None:
        return load_text(load.files, kind=name, field=text, tokenizer=tokenizer, context=context)
    columns: dict[str, Any] = {"inputs": inputs, "target": target, "missing": missing}
    return load_rows(load.files, kind=name, num_classes=num_classes, **columns)


@choice("data", "tokens", "text as tokens, in flat files, for model=gpt", shares=DataFiles)
def tokens(
    load: Loading,
    *,
    context: Annotated[Natural, "length of a sample, in tokens"] = 256,
    dtype: Annotated[TokenType, "number format of raw files; .npy files say it themselves"] = "uint16",
    vocab_size: Annotated[Natural, "number of different tokens"] = 50257,
) -> Splits:
    from ddp.data.sets.file_splits import load_tokens

    return load_tokens(load.files, context=context, dtype=dtype, vocab_size=vocab_size)


@choice("data", "standard_library", "source text of Python's standard library, byte by byte, for model=gpt")
def standard_library(load: Loading, *, context: Annotated[Natural, "length of a sample, in bytes"] = 256) -> Splits:
    from ddp.data.sets.text_sets import load_standard_library

    return load_standard_library(context=context)


@choice("data", "synthetic", "made-up colour images of classes that can be learnt: to measure speed")
def synthetic(
    load: Loading,
    *,
    transform: Transform = None,
    num_samples: Annotated[Natural, "training images; there are an eighth as many test images"] = 4096,
    image_size: Annotated[Natural, "height and width of the images, in pixels"] = 32,
    num_classes: Classes = 10,
) -> Splits:
    from ddp.data.sets.image_sets import augmented, load_synthetic

    sizes = {"num_train": num_samples, "num_test": max(1, num_samples // 8)}
    splits = load_synthetic(image_size=image_size, num_classes=num_classes, **sizes)
    return augmented(splits, load.own(transform))


# ----------------------------------------------------------------------------------------------------------- models

SampleFacts = Callable[..., tuple[tuple[int, ...], int]]
"""Returns the shape of a sample and the number of classes. `of`: the dimensions that the model reads; else any."""
IMAGE = "[channels, height, width]"
SMALL_IMAGE = 64  # pixels; below it a ResNet starts without striding


@choice("model", "mlp", "fully connected layers, for images")
def mlp(
    facts: SampleFacts, *, hidden: Annotated[Natural, "units of each of the two hidden layers"] = 256
) -> nn.Module:
    from ddp.models import MLP

    shape, num_classes = facts()
    return MLP(in_features=math.prod(shape), hidden=(hidden, hidden), num_classes=num_classes)


@choice("model", "cnn", "small convolutional network, for small images")
def cnn(
    facts: SampleFacts,
    *,
    width: Annotated[Natural, "channels of the first convolution"] = 32,
    dropout: Annotated[Below1, "probability that an input of the last two layers is dropped"] = 0.3,
) -> nn.Module:
    from ddp.models import CNN

    shape, num_classes = facts(of=IMAGE)
    return CNN(in_channels=shape[0], image_size=shape[1], num_classes=num_classes, width=width, dropout=dropout)


@choice("model", "resnet50", "torchvision's ResNet-50, for images")
@choice("model", "resnet34", "torchvision's ResNet-34, for images")
@choice("model", "resnet18", "torchvision's ResNet-18, for images")
def residual(facts: SampleFacts, *, name: str) -> nn.Module:
    from ddp.models import resnet

    shape, num_classes = facts(of=IMAGE)
    return resnet(name, num_classes=num_classes, small_images=shape[1] < SMALL_IMAGE, in_channels=shape[0])


@choice("model", "gpt", "small GPT, for text: data=standard_library model=gpt")
def gpt(
    facts: SampleFacts,
    *,
    width: Annotated[Natural, "length of the vector of a position; a multiple of 2 · heads"] = 192,
    depth: Annotated[Natural, "number of blocks"] = 4,
    heads: Annotated[Natural, "attention heads of a block"] = 6,
    dropout: Annotated[Below1, "probability that an activation is dropped"] = 0.0,
) -> nn.Module:
    from ddp.models import GPT

    (context,), num_classes = facts(of="[time]")
    return GPT(vocab_size=num_classes, context=context, width=width, depth=depth, heads=heads, dropout=dropout)


# ------------------------------------------------------------------------------------------------------- optimizers

Groups = Callable[..., Any]
"""`ddp/optim/layerwise.py::parameter_groups` of the model: takes the weight decay, and what else the excluded have."""


@choice("optim", "sgd", "stochastic gradient descent with momentum", lr=0.05, weight_decay=5e-4)
def sgd(
    groups: Groups,
    *,
    lr: float,
    weight_decay: float | None,
    momentum: Annotated[Below1, "share of the last update that the next one keeps"] = 0.9,
    nesterov: Annotated[bool, "Nesterov momentum: the gradient's step starts where momentum leads to"] = True,
) -> Optimizer:
    from torch.optim import SGD

    return SGD(groups(weight_decay=weight_decay), lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)


@choice("optim", "adamw", "Adam with decoupled weight decay", lr=4e-3, weight_decay=0.01)
@choice("optim", "adam", "Adam; weight decay is added to the gradient", lr=1e-3, weight_decay=0.0)
def adam(
    groups: Groups,
    *,
    name: str,
    lr: float,
    weight_decay: float | None,
    beta1: Annotated[Below1, "decay of the running mean of gradients, per step"] = 0.9,
    beta2: Annotated[Below1, "decay of the running mean of squared gradients, per step"] = 0.999,
    eps: Annotated[Positive, "added to the root of the mean squared gradient before the division by it"] = 1e-8,
) -> Optimizer:
    from torch.optim import Adam, AdamW

    kind = AdamW if name == "adamw" else Adam
    return kind(groups(weight_decay=weight_decay), lr=lr, betas=(beta1, beta2), eps=eps)


@choice("optim", "lamb", "Adam whose rate follows the size of each tensor, for large batches", lr=0.01)
@choice("optim", "larc", "LARS whose rate is never above lr", lr=0.2, preset="apex")
@choice("optim", "lars", "momentum whose rate follows the size of each tensor, for large batches", lr=4.0)
def layerwise(
    groups: Groups,
    *,
    name: str,
    lr: float,
    weight_decay: float | None = None,
    preset: Annotated[str, "paper or program whose choices apply: docs/large-batches.md"] = "paper",
    args: Annotated[
        dict[str, Any], "choices other than the preset's, such as optim.args.bias_correction=false"
    ] = NO_ARGS,
) -> Optimizer:
    from ddp.optim import LAMB, LARC, LARS

    kinds: dict[str, Callable[..., Optimizer]] = {"lars": LARS, "larc": LARC, "lamb": LAMB}
    parameters = groups(weight_decay=weight_decay, **({} if preset == "nvlamb" else {"adapt": "never"}))
    for key in ("lr", "weight_decay", "preset"):
        if key in args:
            raise ConfigError(f"optim.args.{key}={args[key]}: is a separate setting; set optim.{key}")
    try:
        return kinds[name](parameters, lr, preset=preset, **args)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"optim={name}: {error}") from error


# -------------------------------------------------------------------------------------------------------- schedules

Final = Annotated[FromZero, "factor on lr at the end of the run"]
HALF_WAY = [0.5, 0.75]


@choice("schedule", "constant", "a constant rate, after the warm-up if there is one")
def constant() -> RateSchedule:
    from ddp.optim import schedules

    return schedules.constant()


@choice("schedule", "cosine", "half a cosine from lr down to lr · final_factor, after the warm-up")
def cosine(*, final_factor: Final = 0.0) -> RateSchedule:
    from ddp.optim import schedules

    return schedules.cosine(final_factor=final_factor)


@choice("schedule", "polynomial", "a line or a power from lr down to lr · final_factor, after the warm-up")
def polynomial(
    *,
    final_factor: Final = 0.0,
    power: Annotated[Positive, "power of the remaining share of the run; 1: a straight line"] = 1.0,
) -> RateSchedule:
    from ddp.optim import schedules

    return schedules.polynomial(power=power, final_factor=final_factor)


@choice("schedule", "wsd", "a constant rate after the warm-up, and a decay at the end (warm-up, stable, decay)")
def wsd(
    *,
    final_factor: Final = 0.0,
    decay_fraction: Annotated[UpTo1, "last share of the run, in which lr falls, above 0"] = 0.2,
) -> RateSchedule:
    from ddp.optim import schedules

    return schedules.wsd(decay_fraction=decay_fraction, final_factor=final_factor)


@choice("schedule", "step", "lr is multiplied by gamma at each milestone")
def step(
    *,
    milestones: Annotated[list[float], "when lr drops, as rising shares of the run between 0 and 1"] = HALF_WAY,
    gamma: Annotated[Positive, "factor on lr at each milestone"] = 0.1,
) -> RateSchedule:
    from ddp.optim import schedules

    return schedules.step(gamma=gamma, milestones=milestones)


# ------------------------------------------------------------------------------------------------------------ hooks

Ratio = Annotated[UpTo1, "share of the numbers of a tensor that is sent, above 0 and at most 1"]


@choice("hook", "none", "gradients are sent whole")
def none(seed: int) -> None:
    return None


@choice("hook", "sign", "one bit for each number, and a scale for each row")
def sign(seed: int) -> Hook:
    from ddp.gradients import Sign

    return Sign()


@choice("hook", "top_k", "the largest numbers of each tensor, with their positions")
def top_k(
    seed: int,
    *,
    error_feedback: bool,
    ratio: Ratio = 0.01,
    momentum: Annotated[Below1, "momentum that the hook applies instead of the optimizer"] = 0.0,
    warmup_steps: Annotated[Whole, "steps in which the ratio falls from 1/4 to this one"] = 0,
) -> Hook:
    from ddp.gradients import TopK

    return TopK(ratio, error_feedback=error_feedback, momentum=momentum, warmup_steps=warmup_steps)


@choice("hook", "random_k", "numbers drawn at random, the same ones on every worker")
def random_k(seed: int, *, error_feedback: bool, ratio: Ratio = 0.1) -> Hook:
    from ddp.gradients import RandomK

    return RandomK(ratio, error_feedback=error_feedback, seed=seed)


@choice("hook", "powersgd", "two narrow matrices for each matrix")
def powersgd(
    seed: int,
    *,
    error_feedback: bool,
    rank: Annotated[Natural, "columns of the two narrow matrices whose product approximates a gradient"] = 4,
    warm_start: Annotated[bool, "begin with the factor of the last step instead of a random one"] = True,
) -> Hook:
    from ddp.gradients import PowerSGD

    return PowerSGD(rank, error_feedback=error_feedback, warm_start=warm_start, seed=seed)
