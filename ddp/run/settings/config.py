"""Every setting of a run, as plain dataclasses: one tree, the one place for defaults and meanings, and their page.

    `Config` with its defaults + conf/train.yaml + command line       Hydra, in the parent only (`launch/`)
                 │  reader.from_plain
                 ▼
              Config  ── asdict ──▶  RUN_DIR/config.yaml  ── from_plain ──▶  Config, in every worker (PyYAML only)

A new setting is one line, `name: type = setting(default, "meaning")`, whose type may have bounds. The command line,
its errors, --help and docs/settings.md take it from here.

Six groups offer a choice: `strategy`, `data`, `model`, `optim`, `schedule`, `hook`. What the choices of a group share
stands in `groups.py`, and each choice is a function in `choices.py`, whose signature is its own settings. Data and
models of the user's own have an address as their name: see `address.py`.

Components never see these classes, but plain arguments.
"""

from __future__ import annotations

import textwrap
import types
from collections.abc import Iterator
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ddp.collectives.schedule import SEGMENT_BYTES
from ddp.comm.meeting.role import Job
from ddp.policies import (
    Buckets,
    Checkpoints,
    Evaluation,
    Folder,
    GuardAction,
    Reading,
    Reports,
    SameBits,
    Training,
    WatchAction,
)
from ddp.process.clock import LONGEST_S
from ddp.process.terminal import say
from ddp.run.settings import choices as choices  # which fills CHOICES
from ddp.run.settings.groups import CHOICES as CHOICES
from ddp.run.settings.groups import GROUPS, Data, HookChoice, Model, Optim, Schedule, StrategyChoice
from ddp.run.settings.groups import OWN as OWN
from ddp.run.settings.groups import choose as choose
from ddp.setting import Additions, Below1, Bounds, FromZero, Natural, Positive, UpTo1, Whole, meaning_of, setting, typed

# ------------------------------------------------------------------------------------------------------- the words


Device = Literal["auto", "cpu", "cuda"]
Backend = Literal["auto", "gloo", "nccl"]
ReplicaKind = Literal["bucketed", "naive"]
Evaluator = Literal["workers", "sidecar"]
WatchChoice = Literal[WatchAction, "off"]
TrackerName = Literal["tensorboard", "csv", "mlflow", "wandb"]
Seconds = Annotated[float, Bounds(above=0, at_most=LONGEST_S)]


# ------------------------------------------------------------------------------------------------------- the groups


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
    """The jobs of a sweep (-m) or a search, each in its own process."""

    name: str | None = setting(
        None,
        "name of the folder of all jobs, below runs/; the same command again runs the jobs that are missing there or "
        "have failed; null: date and time",
    )
    parallel: Natural = setting(1, "jobs that run at the same time, each on its own cores")


@dataclass(kw_only=True, slots=True)
class Cluster:
    """The processes that train."""

    workers: Natural = setting(2, "number of workers, the world size")
    servers: Whole = setting(
        0, "further processes that hold the parameters, for strategy=parameter_server; 0: one there, else none"
    )
    restarts: Whole = setting(3, "most restarts of a lost worker, and of all servers after the loss of one")
    min_workers: Natural | None = setting(
        None, "fewest workers that train on when others are lost or leave; null: the loss of one ends the run"
    )
    spares: Whole = setting(0, "further processes that wait to take a lost worker's place, with min_workers")
    max_workers: Natural | None = setting(
        None, "most workers, up to which others may join; null: cluster.workers, with min_workers"
    )
    wait_s: FromZero = setting(300.0, "seconds that fewer than min_workers wait for others")
    silent_s: Positive = setting(30.0, "a worker that shows no sign of life for so many seconds is killed")
    spec: dict[str, Any] = setting(
        {},
        "addresses of the tasks of a cluster, by job, each of which is started by hand, as {chief: [HOST:PORT], "
        "worker: [HOST:PORT, …]}: docs/engines.md",
    )
    task: str | None = setting(None, "which of these tasks this process is, as worker:0")
    role: Job | None = setting(
        None,
        "role of this process in a run with servers, or with min_workers, whose processes are started by hand, at any "
        "time: docs/engines.md, docs/elastic.md; workers need nothing else",
    )
    local_workers: int | None = None  # of these, on this host; set by the launcher
    threads_per_worker: Natural | None = setting(None, "CPU threads of a worker; null: cores ÷ workers of the host")
    devices: list[int] | None = setting(
        None, "numbers of the GPUs of each host that its workers see, as [0,1]; null: all that are visible"
    )


@dataclass(kw_only=True, slots=True)
class Batch:
    """The samples of a step."""

    global_size: Natural = setting(64, "samples of an optimizer step, over all workers")
    warmup_size: Natural | None = setting(
        None, "its value at the start of the run, from which it grows evenly, in multiples; null: global_size at once"
    )
    warmup_samples: Natural | None = setting(
        None, "samples of all workers over which it grows; set this or warmup_epochs"
    )
    warmup_epochs: Positive | None = setting(None, "the same as epochs")
    tokens: Natural | None = setting(
        None, "most tokens of a step, over all workers, for samples of unequal lengths; null: global_size samples"
    )
    num_shards: Natural | None = setting(
        None, "parts of a batch, which random numbers depend on; null: one per worker, or as in the run to be resumed"
    )
    micro_size: Natural | None = setting(
        None, "most samples of one forward; a larger share is accumulated over several; null: no limit"
    )


@dataclass(kw_only=True, slots=True)
class Comm:
    """Communication between workers."""

    algorithm: str = setting(
        "auto", "how an all-reduce runs: shared_memory, ring, tree, …, MODULE:NAME; auto: the fastest of a trial"
    )
    order: Additions = setting(
        "any", "canonical: use only algorithms that add along the same binary tree over the workers; any: use all"
    )
    shared_memory: bool = setting(True, "use shared memory inside a host; false: messages only")
    debug: bool = setting(False, "before each collective, compare what the workers call")
    segment_bytes: Annotated[int, Bounds(at_least=1024)] = setting(
        SEGMENT_BYTES, "size of the pieces in which a long message travels, in bytes"
    )
    warn_s: Seconds = setting(10.0, "seconds after which a waiting worker names the one that it waits for")
    abort_s: Seconds = setting(600.0, "seconds after which a waiting worker ends the run")


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
        "workers: training pauses meanwhile; sidecar: one more process, on a separate core where one is free, "
        "evaluates each checkpoint",
    )
    wait_s: Annotated[float, Bounds(at_least=0, at_most=LONGEST_S)] = setting(
        600.0,
        "seconds that the table at the end waits for the sidecar, and that a sidecar started by hand waits for a run "
        "in whose folder nothing happens",
    )


@dataclass(kw_only=True, slots=True)
class EarlyStopping:
    """The end of a run whose main metric no longer improves."""

    patience: Natural | None = setting(
        None, "evaluations in a row without a better main metric, after which a run ends; null: off"
    )
    min_delta: FromZero = setting(0.0, "an improvement of the metric counts if it is larger than this")


@dataclass(kw_only=True, slots=True)
class Watching:
    """The watch over a run that does not learn, or that has become slow."""

    action: WatchChoice = setting(
        "warn", "warn: a line on the terminal; stop: the run ends with a checkpoint, and status 3; off: no watch"
    )
    learn_share: UpTo1 = setting(0.2, "share of the run's steps after which its loss must beat a constant guess's")
    slow_share: Below1 = setting(0.5, "a run is slow if its samples/s stay below this share of their median; 0: never")


@dataclass(kw_only=True, slots=True)
class Guarding:
    """The recovery from a step whose loss or gradient is not finite, or whose loss jumps."""

    action: GuardAction = setting(
        "stop",
        "stop: the run ends with an error; skip: the step is left out, as by data.skip_steps; go_back: the run resumes "
        "from its last checkpoint, at half the learning rate",
    )
    spike: Positive | None = setting(
        None,
        "standard deviations above the mean of the last losses from which a finite loss counts as bad, too, such as 8; "
        "null: none does",
    )
    most: Natural = setting(3, "how often a run leaves a step out or goes back; the next bad step ends it")


@dataclass(kw_only=True, slots=True)
class Ema:
    """An exponential moving average of the weights, which evaluations and ddp.load use."""

    decay: Below1 | None = setting(None, "share of the average that a step keeps, such as 0.999; null: no average")


@dataclass(kw_only=True, slots=True)
class ProfileOf:
    """The steps that are profiled, after five that warm up: profile.json and traces/."""

    steps: Whole = setting(
        0, "steps whose parts are measured, into profile.json; as many after them are recorded, into traces/; 0: none"
    )
    seconds: Positive | None = setting(
        None,
        "for a run that is only measured: it ends this many seconds after its warm-up, without a checkpoint; at least "
        "profile.steps steps are spread over that time, and no trace is made; null: it continues",
    )


@dataclass(kw_only=True)
class Config(Training):
    """The settings of one run."""

    seed: Whole = setting(0, "seed of all random numbers: first weights, order of samples, augmentation, dropout")
    epochs: Natural | None = 15
    deterministic: bool = setting(False, "use deterministic kernels only, which can be slower")
    device: Device = setting("auto", "where tensors live; auto: on CUDA where there is any, else on the CPU")
    backend: Backend = setting(
        "auto", "torch's transport; nccl needs a GPU per worker; auto: nccl where each worker has its own, else gloo"
    )
    resume: str = setting(
        "none", "none; auto: continue what the run's folder holds, if anything; or path of a checkpoint or run"
    )
    trust: bool = setting(False, "run code that the files of a run to be resumed name, even if others may write them")
    trial: bool = setting(False, "only three steps, one evaluation and one save, of which no file but logs is kept")
    loss: str = setting(
        "auto", "auto: by the data; or MODULE:NAME of a function of outputs and targets, or of a ddp.Task"
    )
    callbacks: list[str] = setting(
        [],
        "your own, as [MODULE:NAME] of a ddp.Callback, or of a function without arguments that returns one, which the "
        "command also calls once before any worker starts",
    )
    trackers: list[TrackerName] = setting(
        [],
        "where else settings, metrics, curves and the last checkpoint go: some of tensorboard, csv, mlflow and wandb, "
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
    model: Model = field(default_factory=lambda: choose("model", "cnn"))
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


# -------------------------------------------------------------------------------------------------------- the page
#
# Every setting with its default, its type and its meaning:
#
#     scripts/ddp train --help                                          prints the page
#     .venv/bin/python -m ddp.run.settings.config > docs/settings.md    writes it for the web
#
# All of it is taken from here and from `choices.py`, without Hydra and torch, so that it prints at once.


WIDTH = 100
TYPE_AT, MEANING_AT = 34, 52
"""Where the columns begin; the first one is what can be typed on the command line."""
USAGE = """\
Trains a model on several workers. Each SETTING=VALUE replaces a default below ("…": each choice has
its own).

  ddp train [SETTING=VALUE …] [OPTION …]
  ddp train data=cifar10 model=resnet18 cluster.workers=4
  ddp train -m cluster.workers=1,2              a sweep: one run for each value
  ddp train run.name=mine resume=auto           continue the run in runs/mine

  -m, --multirun    a sweep over the values that commas separate
  --cfg job         print the settings that the run would have, and end
  --hydra-help      Hydra's own options: composing, overriding, sweeping
  -h, --help        this page"""


def page(command: str = "scripts/ddp") -> str:
    """Returns the page that `--help` prints. `command`: what the user types before `train`."""
    default = Config()
    usage = USAGE.replace("  ddp train", f"  {command} train")
    blocks = [usage, "\n".join(["The run as a whole", *_lines(default, "")])]
    for part in fields(Config):
        inner = getattr(default, part.name)
        if part.name in CHOICES:
            blocks.append("\n".join(_choice_lines(part.name, inner.name)))
        elif is_dataclass(inner):
            blocks.append("\n".join([f"{part.name}: {_purpose(type(inner))}", *_lines(inner, f"{part.name}.")]))
    return "\n\n".join([*blocks, "\n".join(_recipe_lines())])


def markdown() -> str:
    """Returns docs/settings.md."""
    return (
        "# Settings\n\n`scripts/ddp train --help` prints this page. Its source is `ddp/run/settings/config.py`; "
        "`.venv/bin/python -m ddp.run.settings.config > docs/settings.md` regenerates it.\n\n"
        f"```text\n{page()}\n```\n"
    )


def _lines(settings: Any, prefix: str) -> Iterator[str]:
    """Yields the lines of the settings that have a meaning; those without are not the user's to set."""
    for item in fields(settings):
        if meaning_of(type(settings), item.name):
            yield _setting(prefix, item, type(settings), typed(getattr(settings, item.name)))


def _choice_lines(group: str, usual: str) -> Iterator[str]:
    """Yields the lines of a group: the settings that its choices share, and then each choice with its own settings."""
    base = GROUPS[group]
    shared = {item.name: item for item in fields(base) if item.name != "name"}
    yield f"{group}=CHOICE: {_purpose(base)} (default: {usual})"
    same = {name for name in shared if len({repr(getattr(choice, name)) for choice in CHOICES[group].values()}) == 1}
    for name, item in shared.items():
        default = typed(getattr(CHOICES[group][usual], name)) if name in same else "…"
        yield _setting(f"{group}.", item, base, default)
    for choice in CHOICES[group].values():
        yield _columns(f"{group}={choice.name}", "", choice.meaning, indent=2)
        for item in fields(choice):
            if item.name in shared and item.name not in same:
                yield f"    {group}.{item.name}={typed(getattr(choice, item.name))}"
            elif item.name not in shared and item.name != "name":
                yield _setting(f"{group}.", item, type(choice), typed(getattr(choice, item.name)), indent=4)
    if own := OWN.get(group):
        yield _columns(f"{group}=MODULE:NAME", "", _purpose(own), indent=2)
        for item in fields(own):
            if item.name not in (*shared, "name"):
                yield _setting(f"{group}.", item, own, "{}", indent=4)


def _recipe_lines() -> Iterator[str]:
    """Yields the line of each recipe: its file's second line says what it is."""
    yield "recipe=CHOICE: settings that belong together (default: none)"
    for path in sorted((Path(__file__).parent / "conf" / "recipe").glob("*.yaml")):
        about = path.read_text(encoding="utf-8").splitlines()[1]
        yield _columns(f"recipe={path.stem}", "", about.removeprefix("# ").removesuffix("."), indent=2)


def _setting(prefix: str, item: Field[Any], kind: type, default: str, *, indent: int = 2) -> str:
    """Returns the lines of one setting of the class `kind`."""
    expected = _type(get_type_hints(kind)[item.name])
    return _columns(f"{prefix}{item.name}={default}", expected, meaning_of(kind, item.name), indent=indent)


def _columns(key: str, kind: str, meaning: str, *, indent: int) -> str:
    """Returns the line of one setting, with its meaning wrapped below itself."""
    first = f"{' ' * indent}{key}".ljust(TYPE_AT - 1) + f" {kind}"
    start = MEANING_AT if kind else TYPE_AT
    return textwrap.fill(
        meaning,
        WIDTH,
        initial_indent=first.rstrip().ljust(start - 1) + " ",
        subsequent_indent=" " * start,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _type(kind: Any) -> str:
    """Returns the name of a type, or its choices."""
    if get_origin(kind) in (Union, types.UnionType):
        return "|".join(_type(option) for option in get_args(kind))
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is list and get_origin(get_args(kind)[0]) is Literal:
        return "list of words"
    if get_origin(kind) is list:
        return f"list of {_type(get_args(kind)[0])}s"
    if get_origin(kind) is dict:
        return "mapping"
    return {int: "integer", float: "number", bool: "true|false", str: "text"}.get(kind, "null")


def _purpose(kind: type) -> str:
    """Returns the first sentence of a class's docstring, as the end of a line."""
    text = " ".join((kind.__doc__ or "").split()).removesuffix(".")
    return text[0].lower() + text[1:]


if __name__ == "__main__":
    say(markdown().removesuffix("\n"))
