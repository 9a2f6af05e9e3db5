"""Groups of settings that offer a choice. A choice is a function, and its signature is its settings.

    @choice("optim", "sgd", "stochastic gradient descent with momentum", lr=0.05)
    def sgd(groups: Groups, *, lr: float, momentum: Annotated[Below1, "share of …"] = 0.9) -> Optimizer:
        │        │              │          └ a setting of this choice: type, bounds, meaning, default
        │        │              └ a setting that all choices of the group share: a field of the class in `GROUPS`
        │        └ no setting: the caller of `make` passes it, by position
        └ may import torch, because it runs in a worker; its module may not, because --help reads the signature

`choice` makes a dataclass of the signature. Its instances are the values of `Config.optim` and so on, and
`Choice.make` calls the function with them. The functions stand in `choices.py`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, make_dataclass, replace
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from ddp.run.settings.address import is_address
from ddp.setting import Below1, Bounds, FromZero, Natural, Positive, Scaling, StrategyName, Whole, setting

DataOrder = Literal["auto", "permutation", "blocks", "weighted", "stratified", "fixed"]

NOT_GIVEN = inspect.Parameter.empty
F = TypeVar("F", bound=Callable[..., Any])


class Choice:
    """A choice of a group: the word for it, and the settings of its function.

    Attributes:
        meaning: what the choice is, for `--help`.
        function: makes it; takes: the names of the settings that are its arguments.
    """

    __slots__ = ()
    name: str
    meaning: ClassVar[str]
    function: ClassVar[Callable[..., Any]]
    takes: ClassVar[Sequence[str]]

    def make(self, *given: Any, **derived: Any) -> Any:
        """Returns the function's result for its settings.

        Args:
            given: its positional arguments, which are no settings.
            derived: values that replace settings, such as `lr` for the global batch.
        """
        return self.function(*given, **{name: getattr(self, name) for name in self.takes} | derived)


@dataclass(frozen=True, kw_only=True)
class StrategyChoice(Choice):
    """The strategy: who holds what, and how often the workers agree."""

    name: StrategyName

    def num_parts(self, num_workers: int) -> int:
        """Returns the number of parts of a step, each of which a worker computes."""
        return num_workers

    def num_processes(self, num_workers: int) -> int:
        """Returns the number of processes of so many workers."""
        return 1 if self.name == "tpu" else num_workers


@dataclass(kw_only=True, slots=True)
class Data(Choice):
    """The data set to train on and to evaluate on."""

    name: str
    root: str = setting("data", "folder that MNIST and CIFAR-10 are downloaded into")
    order: DataOrder = setting(
        "auto",
        "order of an epoch: a permutation; blocks of shuffled files; fixed; weighted, by the weights of the data; "
        "stratified, by their classes; auto: blocks where files are dealt, else a permutation",
    )
    window: Natural | None = setting(
        None, "samples that blocks mix with each other; null: 4096, or the samples of four files if fewer"
    )
    sharding: str = setting(
        "auto",
        "what shards of a batch are cut from: file, sample, full_shuffle, off, or MODULE:NAME of a function (shard, "
        "number of shards) → samples: docs/data.md; auto: file where there are as many files as shards, else sample",
    )
    skip_steps: list[int] = setting([], "first and last of the steps whose samples are left out, such as [4700,4710]")
    validation: Annotated[float, Bounds(above=0, below=1)] | None = setting(
        None,
        "share of the training samples that is held out for validation, between 0 and 1; the run chooses by it (the "
        "best checkpoint, say), and reads the test set at the end; null: it chooses by the test set",
    )


@dataclass(kw_only=True, slots=True)
class DataFiles(Data):
    """Samples in files: tar files, lines or tokens."""

    path: str | None = setting(
        None, "training files: a file, a pattern such as s3://bucket/train-{000..099}.tar, or a folder; must be given"
    )
    test_path: str | None = setting(None, "the same for the held-out files; must be given")
    validation_path: str | None = setting(
        None, "the same for the validation files, instead of data.validation; null: there are none"
    )
    index_dir: str = setting(
        "data/index", "folder with the indexes of files: where each sample begins, and a copy of each file with rows"
    )
    cache_dir: str | None = setting(
        None, "folder of each host into which remote files are copied; null: they are streamed"
    )


@dataclass(kw_only=True, slots=True)
class OwnData(Data):
    """Data of your own: a function that returns a pair (train, test), or ddp.Splits."""

    args: dict[str, Any] = setting({}, "keyword arguments, such as data.args.n=100")


@dataclass(kw_only=True, slots=True)
class Model(Choice):
    """The model to train."""

    name: str


@dataclass(kw_only=True, slots=True)
class OwnModel(Model):
    """A model of your own: a class, or a function that returns a torch.nn.Module."""

    args: dict[str, Any] = setting({}, "keyword arguments, such as model.args.width=64")


@dataclass(kw_only=True, slots=True)
class Optim(Choice):
    """The optimizer."""

    name: str
    lr: Positive = setting(MISSING, "learning rate for a global batch of optim.base_batch samples")
    weight_decay: FromZero | None = setting(
        MISSING, "weight decay, of weight matrices only (not of biases and norms); null: the preset's or torch's"
    )
    lr_scaling: Scaling = setting(
        "none",
        "how lr follows the global batch, with k = batch.global_size ÷ base_batch: not, lr · k, or lr · √k; legw: lr · "
        "√k, and the warm-up takes k times more samples",
    )
    base_batch: Natural = setting(64, "global batch that lr was found for, in samples; lr_scaling reads it")
    exclude: list[str] = setting([], "names of further parameters to treat like biases and norms, such as [embed.*]")


@dataclass(kw_only=True, slots=True)
class Schedule(Choice):
    """The learning-rate schedule, a factor on lr by samples."""

    name: str
    warmup_steps: Whole | None = setting(
        None, "steps in which lr rises linearly at the start; set this or another below"
    )
    warmup_samples: Whole | None = setting(None, "the same as samples of all workers")
    warmup_epochs: FromZero | None = setting(None, "the same as epochs")
    warmup_fraction: Below1 | None = setting(
        None, "the same as a share of the run, below 1; null, like the others: 0.05 where lr falls steadily, else 0"
    )


@dataclass(kw_only=True, slots=True)
class HookChoice(Choice):
    """The hook that sends less than all of the gradients between hosts."""

    name: str
    error_feedback: bool = setting(True, "add to each gradient what the last steps have not sent of it")
    dense_start_steps: Whole = setting(0, "first steps that send gradients as they are")


GROUPS: dict[str, type[Any]] = {
    "strategy": StrategyChoice,
    "data": Data,
    "model": Model,
    "optim": Optim,
    "schedule": Schedule,
    "hook": HookChoice,
}
"""group → what its choices share."""
CHOICES: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
"""group → name → its default settings."""
OWN = {"data": OwnData, "model": OwnModel}
"""The groups in which a name may be an address."""


def choose(group: str, name: str, /, **settings: Any) -> Any:
    """Returns a choice of a group: its default settings, some of them replaced."""
    is_own = group in OWN and is_address(name)
    return replace(OWN[group](name=name) if is_own else CHOICES[group][name], **settings)


def choice(
    group: str, name: str, meaning: str, *, shares: type[Any] | None = None, **defaults: Any
) -> Callable[[F], F]:
    """Makes a function the choice `name` of a group. Several may stand above a function; the lowest is listed first.

    Args:
        meaning: one phrase, for `--help`.
        shares: the class of what it shares with some choices of the group, or with `ddp.fit`: a policy. A function
            with `**policy` takes all that it shares.
        defaults: of settings, where they differ from the group's or the signature's.
    """

    def register(function: F) -> F:
        base = GROUPS[group]
        bases = (base,) if shares is None else (shares,) if issubclass(shares, base) else (shares, base)
        parameters, hints = inspect.signature(function).parameters, _settings_of(function)
        given = {key: parameters[key].default for key in hints} | defaults
        shared = get_type_hints(bases[0], include_extras=True)
        own = [_field(key, hints[key], shared, default) for key, default in given.items() if default is not NOT_GIVEN]
        takes_policy = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        takes = [each.name for each in fields(bases[0])] if takes_policy else list(hints)
        is_frozen = base.__dataclass_params__.frozen  # as policies are
        how = {"bases": bases, "kw_only": True, "frozen": is_frozen, "slots": not is_frozen}
        about = {"meaning": meaning, "function": staticmethod(function), "takes": takes}
        how["namespace"] = {"__module__": function.__module__, **about}
        kind = make_dataclass(f"{group}={name}", [("name", get_type_hints(base)["name"], name), *own], **how)
        vars(sys.modules[function.__module__])[kind.__name__] = kind  # where pickle looks for it
        CHOICES[group][name] = kind()
        return function

    return register


def _settings_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the settings that a function takes: its keyword-only arguments, each with its type."""
    parameters = inspect.signature(function).parameters.values()
    kinds = {each.name: each.annotation for each in parameters if each.kind is each.KEYWORD_ONLY}
    alone = SimpleNamespace(__annotations__=kinds)  # the other annotations may name what only type checkers import
    return get_type_hints(alone, function.__globals__, include_extras=True)


def _field(key: str, hint: Any, shared: Mapping[str, Any], default: Any) -> tuple[str, Any, Any]:
    """Returns the field of a setting; of one that the group shares, with its default in this choice."""
    if get_origin(hint) is not Annotated:
        return key, shared[key], default
    return key, hint, setting(default, get_args(hint)[-1])
