"""A setting is a line, with its bounds, its default and its meaning; a rule between settings is a row.

    every_steps: Natural | None = setting(None, "steps between two evaluations; null: not by steps")
    Rule(lambda s: s.delay and s.verify_every, "verify_every", "with {delay} workers differ between rounds; leave …")

The command line, its errors, --help and docs/settings.md read the lines of settings, and so do the policies that are
arguments of `ddp.fit`. A rule tests a `Setup`, which is filled from settings or from those arguments, and its sentence
names settings as the command line does, or as Python does. The words that a setting may be, and that several packages
know, stand here, too. Nothing here imports torch.
"""

from __future__ import annotations

import inspect
import json
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial, wraps
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from ddp.errors import ConfigError, did_you_mean, meant

Additions = Literal["any", "canonical"]  # the order in which an all-reduce may add
Narrow = Literal["bf16", "fp16", "int8", "int8_stochastic"]
WireName = Literal[Narrow, "fp32"]
Precision = Literal["fp32", "bf16", "bf16_pure", "fp16"]
Scaling = Literal["none", "linear", "sqrt", "legw"]
Uneven = Literal["join", "stop_all", "raise"]
StrategyName = Literal[
    "auto",
    "one_device",
    "mirrored",
    "multi_worker",
    "tpu",
    "sharded",
    "fully_sharded",
    "central_storage",
    "parameter_server",
    "local_sgd",
]
ServerMode = Literal["sync", "async", "bounded"]
Island = Literal["worker", "host"]


def strategy_hint(word: object, template: str = "{}") -> str:
    """Returns a sentence, with a space before it, for a word, a class or an object that is a strategy elsewhere; or "".

    Args:
        template: has {} where our word belongs.
    """
    kind = word if isinstance(word, type) else type(word)
    name = word if isinstance(word, str) else kind.__name__
    return meant(re.split("[.:]", name)[-1], get_args(StrategyName), template)  # without the name of its module


def check_region(name: object) -> None:
    """Raises ConfigError unless a region (`strategies/region.py`) can have this name."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", name, re.ASCII):
        raise ConfigError(f"region={name!r:.120}: take letters, digits, '.', '_' and '-', 100 at most, no sign first")


LARGEST = 3.4e38  # of float32


class Bounds(NamedTuple):
    """The bounds of a number; None: not bounded on this side."""

    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None

    def admit(self, value: Any) -> bool:
        """Returns True if a number is within the bounds."""
        pairs = zip(self, (operator.ge, operator.gt, operator.lt, operator.le), strict=True)
        return all(bound is None or holds(value, bound) for bound, holds in pairs)

    def __str__(self) -> str:
        words = ("from {:g} up", "above {:g}", "below {:g}", "at most {:g}")
        return " and ".join(word.format(bound) for word, bound in zip(words, self, strict=True) if bound is not None)


Whole = Annotated[int, Bounds(at_least=0)]
Natural = Annotated[int, Bounds(at_least=1)]
Positive = Annotated[float, Bounds(above=0)]
FromZero = Annotated[float, Bounds(at_least=0)]
Below1 = Annotated[float, Bounds(at_least=0, below=1)]
UpTo1 = Annotated[float, Bounds(above=0, at_most=1)]


def setting(default: Any, meaning: str) -> Any:
    """Returns a field of a settings class.

    Args:
        default: MISSING where each choice of a group has its own.
        meaning: one phrase, with the unit and with what null and the choices of a Literal stand for.
    """
    if isinstance(default, (list, dict)):
        return field(default_factory=partial(copy, default), metadata={"meaning": meaning})
    return field(default=default, metadata={"meaning": meaning})


def meaning_of(kind: type, name: str) -> str:
    """Returns the meaning of a setting, also where a subclass has only given it another default; "": it is none."""
    lines = (getattr(each, "__dataclass_fields__", {}).get(name) for each in kind.__mro__)
    return next((str(line.metadata["meaning"]) for line in lines if line is not None and line.metadata), "")


def refusal(value: Any, kind: Any) -> str:
    """Returns what a value must be, if it is of another type, or out of its bounds; "" if it is right.

    Args:
        kind: bool, int, float, a Literal, or a number with its bounds; or one of these or None. Every value is right
            that should be of another type.
    """
    bounds, instead = Bounds(), ""
    while (origin := get_origin(kind)) in (Annotated, Union, UnionType):
        kind, *others = get_args(kind)
        bounds = next((each for each in others if isinstance(each, Bounds)), bounds)
        if type(None) in others:
            instead = ", or leave it out"
    if value is None and instead:
        return ""
    if kind is bool:
        return "" if isinstance(value, bool) else "must be True or False"
    if origin is Literal:
        words = get_args(kind)
        is_one = isinstance(value, str) and value in words
        return "" if is_one else f"take one of {', '.join(words)}{instead}.{did_you_mean(value, words)}"
    if kind not in (int, float):
        return ""
    wanted, whole = (Integral, "whole ") if kind is int else (Real, "")
    value = _of_python(value)  # float16 does not have the bounds
    if not isinstance(value, wanted) or isinstance(value, bool) or not bounds.admit(value):
        return f"must be a {whole}number {bounds}".rstrip() + instead
    return "" if -LARGEST <= value <= LARGEST else f"must be a finite number, at most {LARGEST:.2g}"  # type: ignore


@cache
def _kinds_in(function: Any) -> dict[str, Any]:
    return get_type_hints(function, include_extras=True)


def refused_in(settings: Any, prefix: str = "") -> Iterator[str]:
    """Yields a sentence for each setting in a tree of them that has a wrong type, or is out of its bounds."""
    whole: Any = type(settings)
    for item in fields(settings):
        value, kind, key = getattr(settings, item.name), _kinds_in(whole)[item.name], f"{prefix}{item.name}"
        if is_dataclass(value) and is_dataclass(kind):
            yield from refused_in(value, f"{key}.")
        elif why := refusal(value, kind):
            yield f"{key}={value!r:.60}: {why}"


def check_values(policy: Any) -> None:
    """Raises ConfigError for the first setting of a policy that has a wrong type, or is out of its bounds.

    A number of NumPy's becomes one of Python's, which can be written as JSON.
    """
    for problem in refused_in(policy):
        raise ConfigError(problem)
    for name, value in vars(policy).items():
        object.__setattr__(policy, name, _of_python(value))


def _of_python(value: Any) -> Any:
    """Returns another library's number as Python's; any other value as it is."""
    if not isinstance(value, Real) or isinstance(value, (int, float)):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


Made = TypeVar("Made", bound=Callable[..., Any])


def checked(function: Made) -> Made:
    """Makes a function refuse each argument that its annotation excludes, such as `steps: Natural`.

    A number of NumPy's becomes one of Python's, as in `check_values`.

    Raises:
        ConfigError: there is one; the message says what it must be.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def checking(*arguments: Any, **named: Any) -> Any:
        call = signature.bind(*arguments, **named)
        for name, value in call.arguments.items():
            if why := refusal(value, _kinds_in(function).get(name)):
                raise ConfigError(f"{name}={value!r:.60}: {why}")
            call.arguments[name] = _of_python(value)
        return function(*call.args, **call.kwargs)

    return checking  # type: ignore[return-value]


# --- Rules between settings ------------------------------------------------------------------------------------------
#
#     strategy.delay=1 …   on the command line   ──▶  Setup  ──▶  replica.verify_every=3: with strategy.delay=1 w…
#     LocalSGD(delay=1 …)  in `ddp.fit`          ──▶  Setup  ──▶  verify_every=3: with delay=1 workers differ …
#
# Settings are checked before workers start, and the arguments of `ddp.fit` on each rank, where more is known. So each
# sentence stands here once. Rules that only the command line can break stand in `run/settings/checks.py`.

S = TypeVar("S")


class Rule(NamedTuple, Generic[S]):
    """A combination of settings that cannot work.

    Attributes:
        when: returns True for a setup to refuse. A fact that is not known yet makes it False.
        key: the setting that the sentence begins with, or several, as "same_bits with wire".
        why: the rest of the sentence, with the remedy. In it {key} stands for a setting with its value, {key:other} for
            it with another value, {.key} for its value, and {=key} for its name.
    """

    when: Callable[[S], object]
    key: str
    why: str


_IN_BRACES = re.compile(r"\{([.=]?)([\w.]+)(?::([^}]*))?\}")


def typed(value: Any) -> str:
    """Returns a value as it is typed on the command line."""
    if isinstance(value, str):
        return value or "''"
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return json.dumps(value, separators=(",", ":")).replace('"', "")


class Speaker(ABC):
    """The words for settings in a sentence, as the command line has them."""

    @abstractmethod
    def value_of(self, key: str) -> Any:
        """Returns the value of a setting."""

    def name_of(self, key: str) -> str:
        """Returns the name of a setting."""
        return key

    def spelled(self, value: Any) -> str:
        """Returns a value as it is typed."""
        return typed(value)

    def assignment(self, key: str, value: Any) -> str:
        """Returns a setting with a value, as `key=value`."""
        return f"{self.name_of(key)}={self.spelled(value)}"

    def filled(self, text: str) -> str:
        """Returns a sentence with its braces filled in: see `Rule.why`."""
        return _IN_BRACES.sub(self._fill, text)

    def _fill(self, found: re.Match[str]) -> str:
        form, key, other = found.groups()
        if form == "=":
            return self.name_of(key)
        value = self.value_of(key) if other is None else _OTHER.get(other, other)
        return self.spelled(value) if form else self.assignment(key, value)

    def problems(self, rules: Iterable[Rule[S]], subject: S) -> Iterator[str]:
        """Yields a sentence for each rule that refuses a subject."""
        for rule in rules:
            if rule.when(subject):
                parts = rule.key.split(" with ")
                key = " with ".join(f"{{{part}}}" if re.fullmatch(r"[a-z_.]+", part) else part for part in parts)
                yield self.filled(f"{key}: {rule.why}")


_OTHER = {"true": True, "false": False, "null": None, "0": 0}


def fact(default: Any, key: str = "", python: Callable[[Any], str] | None = None) -> Any:
    """Returns a field of `Setup`.

    Args:
        default: a value that no rule refuses.
        key: the setting's; "": the fact is no setting.
        python: returns the words for a value in Python, where no argument has the field's name.
    """
    return field(default=default, metadata={"key": key, "python": python})


def _kind(kind: str) -> str:
    made = ", which ddp.fit makes of the bare module" if kind == "bucketed" else ""
    return f"a ddp.{kind.capitalize()}DataParallel{made}"


def _same_bits(on: int) -> str:
    return "same_bits=True" if on is True else f"num_shards={on}"


@dataclass(frozen=True, kw_only=True)
class Setup(Speaker):
    """The facts of a run that rules test: from its settings, before processes start; or as a rank finds them.

    A field has the name of the argument in Python, and the setting's key.

    Attributes:
        in_settings: it is filled from settings, and sentences are worded for the command line.
        is_whole: no other settings will be added, as those of a run to be resumed.
        workers, num_hosts: how many there are; 0: unknown.
        same_bits: True; or the number of shards, of a replica that was made by hand.
        own_clip_norm: norm at which the optimizer itself clips.
        is_sparse: a layer of the model has sparse gradients.
        is_wide: it is known that all parameters have 32 bits or more.
        waits: a layer waits in its forward for other ranks (`SyncBatchNorm`).
    """

    in_settings: bool = False
    is_whole: bool = False
    strategy: StrategyName = fact("auto", "strategy")
    mode: ServerMode = fact("sync", "strategy.mode")
    delay: int = fact(0, "strategy.delay")
    island: Island = fact("worker", "strategy.island")
    outer_momentum: float = fact(0.0, "strategy.outer_momentum")
    warmup_samples: int = fact(0, "strategy.warmup_samples")
    kind: str = fact("bucketed", "replica.kind", _kind)
    wire: WireName | None = fact(None, "replica.wire")
    verify_every: int = fact(0, "replica.verify_every")
    hook: Any = fact(None, "hook")
    hook_momentum: float = fact(0.0, "hook.momentum")
    precision: Precision = fact("fp32", "precision")
    clip_norm: float | None = fact(None, "clip_norm")
    own_clip_norm: float | None = fact(None, "optim.args.clip_norm", lambda value: f"clip_norm={value}")
    epochs: int | None = fact(1, "epochs")
    max_steps: int | None = fact(None, "max_steps")
    global_batch: int | None = fact(None, "batch.global_size")
    warmup_size: int | None = fact(None, "batch.warmup_size", lambda first: f"a batch that grows from {first}")
    tokens: Any = fact(None, "batch.tokens", lambda _: "a budget of tokens")
    num_shards: int | None = fact(None, "batch.num_shards")
    micro_size: int | None = fact(None, "batch.micro_size")
    sharding: Any = fact("auto", "data.sharding")
    debug: bool = fact(False, "loader.debug")
    max_unreadable: int = fact(0, "loader.max_unreadable")
    same_bits: int = fact(False, "same_bits.on", _same_bits)
    audit_every: int = fact(0, "same_bits.audit_every")
    algorithm: str = fact("auto", "comm.algorithm")
    shared_memory: bool = fact(True, "comm.shared_memory")
    deterministic: bool = fact(True, "deterministic", lambda _: "torch.use_deterministic_algorithms(True)")
    decay: float | None = fact(None, "ema.decay", lambda _: "EMA")
    patience: int | None = fact(None, "early_stopping.patience", lambda patience: f"EarlyStopping({patience})")
    every_epochs: int | None = fact(1, "evaluate.every_epochs")
    every_steps: int | None = fact(None, "evaluate.every_steps")
    memory_steps: int = fact(0, "checkpoint.memory_steps")
    guard: str | None = fact(None, "guard.action", lambda action: f"ddp.Guard({action!r})")
    device: str = fact("cpu", "device")
    servers: int = fact(0, "cluster.servers")
    workers: int = fact(0, "cluster.workers")
    min_workers: int | None = fact(None, "cluster.min_workers")
    max_workers: int | None = fact(None, "cluster.max_workers")
    num_hosts: int = fact(0)
    is_sparse: bool = fact(False)
    is_wide: bool = fact(False)
    waits: bool = fact(False, "replica.sync_batchnorm")
    is_stream: bool = fact(False)
    has_folder: bool = fact(True)
    has_scheduler: bool = fact(False)

    @classmethod
    def of(cls, *policies: Any, **facts: Any) -> Setup:
        """Returns the setup of arguments of `ddp.fit` and further facts; of two with one name, the latter."""
        known = {name: value for policy in policies for name, value in vars(policy).items()} | facts
        return cls(**{item.name: known[item.name] for item in fields(cls) if item.name in known})

    def value_of(self, key: str) -> Any:
        return getattr(self, key)

    def name_of(self, key: str) -> str:
        return str(SETTINGS[key]["key"]) if self.in_settings else key

    def spelled(self, value: Any) -> str:
        return super().spelled(value) if self.in_settings else repr(value)

    def assignment(self, key: str, value: Any) -> str:
        python = None if self.in_settings else SETTINGS[key]["python"]
        return super().assignment(key, value) if python is None else str(python(value))


SETTINGS = {item.name: item.metadata for item in fields(Setup) if item.metadata}
SLICED = ("sharded", "fully_sharded", "central_storage", "parameter_server")
"""Each rank updates a slice."""
CANONICAL = ("auto", "shared_memory", "tree")
"""Words for algorithms that add up in one order at any number of workers."""

# fmt: off
RULES: tuple[Rule[Setup], ...] = (
    # --- who is there
    Rule(lambda s: s.is_whole and s.strategy == "one_device" and s.workers > 1, "strategy",
         "is for one worker, and there are {.workers}; take one worker, or {strategy:auto}"),
    Rule(lambda s: s.strategy == "mirrored" and s.num_hosts > 1, "strategy",
         "is for the workers of one host, and there are several hosts; take {strategy:multi_worker}"),
    Rule(lambda s: s.servers and s.strategy != "parameter_server", "servers",
         "is for {strategy:parameter_server}, and with {strategy} the workers keep the parameters; leave it out, or "
         "take that one"),

    # --- workers that come and go
    Rule(lambda s: s.min_workers and s.strategy == "parameter_server", "min_workers",
         "with {strategy} workers come and go already, as far as restarts let them; leave it out"),
    Rule(lambda s: s.min_workers and s.is_stream, "min_workers",
         "data is a stream, of which no other worker can read what a lost one has left; give a data set with a length"),
    Rule(lambda s: s.min_workers and s.delay, "min_workers",
         "with {delay} a lost worker's differences are in flight; take {delay:0}"),
    Rule(lambda s: s.max_workers and s.global_batch and s.global_batch < s.max_workers, "global_batch",
         "is less than {max_workers}, so that some would have no sample; take {.max_workers} or more"),
    Rule(lambda s: s.max_workers and s.num_shards and s.num_shards < s.max_workers and s.strategy != "local_sgd",
         "num_shards", "is less than {max_workers}, so that some would have no shard; take a multiple of "
         "{.max_workers}, or leave it out"),
    Rule(lambda s: s.min_workers and s.max_workers and s.waits
         and any((s.num_shards or s.max_workers) % n for n in range(s.min_workers, s.max_workers + 1)), "min_workers",
         "with SyncBatchNorm each possible number of workers must divide the shards; take a number of shards that "
         "they do, or BatchNorm"),

    # --- strategies that cut buckets into slices
    Rule(lambda s: s.strategy in SLICED and s.kind == "naive", "strategy",
         "needs {kind:bucketed}, whose buckets it cuts into slices; leave one out"),
    Rule(lambda s: s.strategy in SLICED and s.precision == "bf16_pure", "strategy",
         "{precision} has master weights, which are not cut into slices; take {precision:bf16}, or {strategy:auto}"),
    Rule(lambda s: s.strategy in SLICED and s.is_sparse, "strategy",
         "a layer has sparse gradients, which no slice can hold; take {strategy:auto}"),
    Rule(lambda s: s.strategy == "central_storage" and not s.shared_memory, "strategy",
         "needs memory that the workers of a host share, and here they share none ({shared_memory:false}, or the log "
         "says why); take {strategy:sharded}"),
    Rule(lambda s: s.strategy == "central_storage" and s.device != "cpu", "strategy",
         "keeps parameters in the host's memory, which a GPU would read over its bus in every forward; take "
         "{device:cpu}, or {strategy:sharded}"),

    Rule(lambda s: s.strategy == "fully_sharded" and s.verify_every, "verify_every",
         "compares whole parameters, which no worker has with {strategy}; leave it out"),
    Rule(lambda s: s.strategy == "fully_sharded" and s.guard, "guard",
         "looks for a bad sample on one worker alone, and with {strategy} none can compute alone; leave it out"),
    Rule(lambda s: s.strategy == "fully_sharded" and s.hook is not None and s.micro_size is not None, "hook",
         "with {strategy} each micro-batch is summed by itself, so that a hook would see the last one alone; leave "
         "{=micro_size} or the hook out"),
    Rule(lambda s: s.strategy == "fully_sharded" and s.same_bits and s.micro_size is not None, "micro_size",
         "with {strategy} and the same bits all workers take part in the forward of each shard, of which there is one; "
         "leave it out, or take more shards ({=num_shards})"),
    Rule(lambda s: s.strategy == "fully_sharded" and s.audit_every, "audit_every",
         "an audit computes on one worker alone, and with {strategy} none can; leave it out"),

    # --- devices of JAX
    Rule(lambda s: s.strategy == "tpu" and s.precision != "fp32", "strategy",
         "a compiled step computes in the types of its parameters, and not in {precision}; take {precision:fp32}"),
    Rule(lambda s: s.strategy == "tpu" and s.same_bits, "same_bits with strategy",
         "a compiled step adds up by devices; take {strategy:auto}"),
    Rule(lambda s: s.strategy == "tpu" and s.hook is not None, "hook",
         "with {strategy} gradients travel inside a compiled step; leave it out"),
    Rule(lambda s: s.strategy == "tpu" and s.wire is not None, "wire",
         "with {strategy} gradients travel inside a compiled step; leave it out"),
    Rule(lambda s: s.strategy == "tpu" and s.kind == "naive", "strategy",
         "compiles whole steps, so that {kind} does nothing; leave one out"),
    Rule(lambda s: s.strategy == "tpu" and s.waits, "strategy",
         "SyncBatchNorm waits for other ranks, and here is one; take BatchNorm, which has one device's statistics"),
    Rule(lambda s: s.strategy == "tpu" and s.is_sparse, "strategy",
         "a layer has sparse gradients, which a compiled step does not have; take sparse=False"),
    Rule(lambda s: s.strategy == "tpu" and s.is_stream, "strategy",
         "data is a stream, whose samples no device can be dealt; give a data set with a length"),
    Rule(lambda s: s.strategy == "tpu" and s.device != "cpu", "strategy",
         "the model is on the CPU, and JAX finds the devices; leave {device} out"),
    Rule(lambda s: s.strategy == "tpu" and s.min_workers, "min_workers",
         "with {strategy} all workers are devices of one process, and none can be lost alone; leave it out"),
    Rule(lambda s: s.strategy == "tpu" and s.in_settings and s.num_shards not in (None, s.workers), "num_shards",
         "with {strategy} each of {.workers} workers has one share; leave it out"),
    Rule(lambda s: s.strategy == "tpu" and s.num_hosts > 1, "strategy",
         "one process has all devices, and there are several hosts; take one host, or {strategy:auto}"),

    # --- servers
    Rule(lambda s: s.strategy == "parameter_server" and s.precision == "fp16", "strategy",
         "{precision} repeats steps with another loss scale, which workers do not agree on; take {precision:bf16}"),
    Rule(lambda s: s.strategy == "parameter_server" and s.waits, "strategy",
         "SyncBatchNorm waits for the other workers, which do not wait here; take BatchNorm"),
    Rule(lambda s: s.strategy == "parameter_server" and s.device != "cpu", "strategy",
         "servers and workers exchange what is on the CPU; take {device:cpu}"),
    Rule(lambda s: s.mode != "sync" and s.clip_norm is not None, "clip_norm",
         "with {mode} it would clip the gradients of one worker at a time; take {mode:sync}"),
    Rule(lambda s: s.mode != "sync" and s.warmup_size is not None, "warmup_size",
         "with {mode} batches of several sizes would overtake each other; take {mode:sync}, or leave it out"),
    Rule(lambda s: s.hook is not None and s.servers > 1, "hook",
         "its state is of whole tensors, which {servers} cut; take one"),
    Rule(lambda s: s.strategy == "parameter_server" and s.max_unreadable, "max_unreadable",
         "with {strategy} a worker cannot tell the others what it leaves out; leave it out"),
    Rule(lambda s: s.strategy == "parameter_server" and s.memory_steps, "memory_steps",
         "with {strategy} servers keep the parameters, and start again from the disk; leave it out"),
    Rule(lambda s: s.memory_steps and s.min_workers is None, "memory_steps",
         "without min_workers a lost worker ends the launch, and its memory with it; give min_workers, or leave "
         "it out, and save to the disk (every_steps)"),
    Rule(lambda s: s.strategy == "parameter_server" and s.is_stream, "strategy",
         "data is a stream, of which no part can be leased; give a data set with a length, or take {strategy:auto}"),

    # --- rounds
    Rule(lambda s: s.strategy == "local_sgd" and s.kind == "naive", "strategy",
         "needs {kind:bucketed}, whose buckets are exchanged; leave one out"),
    Rule(lambda s: s.strategy == "local_sgd" and s.precision in ("fp16", "bf16_pure"), "strategy",
         "{precision} has a loss scale or master weights, of which all workers need the same; take {precision:bf16}, "
         "or {precision:fp32}"),
    Rule(lambda s: s.strategy == "local_sgd" and s.is_sparse, "strategy",
         "a layer has sparse gradients, and the difference of its weights is dense; take {strategy:auto}"),
    Rule(lambda s: s.strategy == "local_sgd" and s.waits, "strategy",
         "SyncBatchNorm makes all workers wait for each other in each forward; take BatchNorm, or {strategy:auto}"),
    Rule(lambda s: s.strategy == "local_sgd" and s.is_stream, "strategy",
         "data is a stream, whose rounds have no known end; give a data set with a length, or take {strategy:auto}"),
    Rule(lambda s: s.strategy == "local_sgd" and s.micro_size is not None, "micro_size",
         "with {strategy} a micro-batch is an inner step; leave one out"),
    Rule(lambda s: s.strategy == "local_sgd" and s.tokens is not None, "tokens",
         "with {strategy} an inner step has {=global_batch} samples; leave one out"),
    Rule(lambda s: s.strategy == "local_sgd" and s.warmup_size is not None, "warmup_size",
         "the rounds of {strategy} have batches of one size; leave it out, or let {=warmup_samples} put rounds off"),
    Rule(lambda s: s.strategy == "local_sgd" and s.workers and s.num_shards not in (None, s.workers), "num_shards",
         "with {strategy} each of {.workers} workers has one share; leave it out"),
    Rule(lambda s: s.island == "host" and s.num_hosts == 1, "island",
         "all workers are on one host, so that none would train alone; leave it out, or take {strategy:mirrored}"),
    Rule(lambda s: s.delay and s.hook is not None, "hook",
         "with {delay} it keeps what it has not sent until an exchange is complete; take {wire:int8}, or {delay:0}"),
    Rule(lambda s: s.delay and s.verify_every, "verify_every",
         "with {delay} workers differ between rounds; leave one out"),
    Rule(lambda s: s.delay and s.decay is not None, "decay",
         "with {delay} workers differ between rounds; leave one out"),
    Rule(lambda s: s.outer_momentum and s.hook_momentum, "outer_momentum",
         "the hook has momentum, too; leave one out"),

    # --- the same bits
    Rule(lambda s: s.same_bits and s.strategy in ("parameter_server", "local_sgd"), "same_bits with strategy",
         "its updates depend on which worker computes what; take {strategy:auto}, sharded or central_storage"),
    Rule(lambda s: s.same_bits and s.hook is not None, "same_bits with hook",
         "what it has not sent yet depends on the number of hosts; leave it out"),
    Rule(lambda s: s.same_bits and s.wire == "fp32", "same_bits with wire",
         "the gradients of each shard are added up in their own type; leave it out"),
    Rule(lambda s: s.same_bits and s.algorithm not in CANONICAL, "same_bits with algorithm",
         "adds up by workers, at some numbers of them in another order; take one of " + ", ".join(CANONICAL)),
    Rule(lambda s: s.same_bits and s.kind == "naive", "same_bits with kind",
         "shards are added up in buckets; leave it out"),
    Rule(lambda s: s.same_bits and s.waits, "same_bits with SyncBatchNorm",
         "its statistics are sums over workers; take BatchNorm, which has one shard's in training"),
    Rule(lambda s: s.same_bits and s.is_sparse, "same_bits with sparse gradients",
         "they are added up by workers; take sparse=False"),
    Rule(lambda s: s.same_bits and s.is_stream, "same_bits",
         "ranks share out a stream of samples by their number; give a data set with a length"),
    Rule(lambda s: s.same_bits and s.device not in ("cpu", "auto") and not s.deterministic, "same_bits",
         "a GPU needs deterministic kernels for it; set {deterministic:true}"),
    Rule(lambda s: s.same_bits and s.audit_every and s.workers == 1, "audit_every",
         "a second worker audits, and there is one; set it to 0, or take more workers"),
    Rule(lambda s: s.is_whole and s.audit_every and not s.same_bits, "audit_every",
         "audits compare workers that have the same bits; set on to true, next to it"),

    # --- what gradients travel in, and how they are clipped
    Rule(lambda s: s.wire is not None and s.kind == "naive", "wire",
         "needs {kind:bucketed}, whose buckets travel in it; leave one out"),
    Rule(lambda s: s.precision == "bf16_pure" and (s.wire or "").startswith("int8"), "wire",
         "takes fp32 gradients, and those of {precision} are bf16; leave one out"),
    Rule(lambda s: s.precision != "bf16_pure" and s.wire == "fp32" and s.is_wide, "wire",
         "gradients of {precision} are fp32 already; leave it out"),
    Rule(lambda s: s.hook is not None and s.kind == "naive", "hook",
         "needs {kind:bucketed}, whose buckets it gets; leave one out"),
    Rule(lambda s: s.hook is not None and s.wire is not None, "hook",
         "does the sending by itself; leave {wire} out"),
    Rule(lambda s: None not in (s.clip_norm, s.own_clip_norm), "clip_norm",
         "the optimizer clips by itself, at {.own_clip_norm}; leave it out, or make the optimizer with "
         "{own_clip_norm:null}"),

    # --- the course of the run
    Rule(lambda s: s.epochs is None and s.max_steps is None, "epochs",
         "with {max_steps}, too, the run would never end; set one of them"),
    Rule(lambda s: s.patience is not None and s.every_epochs is None and s.every_steps is None, "patience",
         "goes by evaluations, of which there is one, at the end; set {=every_epochs}, or {=every_steps}"),
    Rule(lambda s: s.guard and s.strategy in ("local_sgd", "parameter_server"), "guard",
         "with {strategy} not all ranks make a step together, which it guards; take {strategy:auto}"),
    Rule(lambda s: s.guard and s.is_stream, "guard",
         "a stream of samples cannot be read again; give a data set"),
    Rule(lambda s: s.guard == "go_back" and not s.has_folder, "guard",
         "goes back to a checkpoint, and folder=None keeps none; give a folder"),
    Rule(lambda s: s.guard == "go_back" and s.has_scheduler, "guard",
         "lowers the learning rate, which a scheduler of torch's sets; give a function as schedule"),
    Rule(lambda s: s.debug and s.sharding == "off", "debug",
         "refuses equal batches, which {sharding} is for; leave one out"),
    Rule(lambda s: s.max_unreadable and s.is_stream, "max_unreadable",
         "data is a stream, which must leave samples out itself"),
)
# fmt: on


def refuse(setup: Setup) -> None:
    """Raises ConfigError, with the remedy, for the first rule that refuses a setup."""
    for problem in setup.problems(RULES, setup):
        raise ConfigError(problem)
