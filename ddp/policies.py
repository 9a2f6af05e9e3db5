"""Policies: frozen values that each say one thing about a run, and check themselves.

    ddp.Evaluation     when a run is evaluated                              settings: evaluate.…
    ddp.Reading        how samples are read                                 loader.…
    ddp.Averaging      how gradients are averaged, and who updates what     strategy, replica.…, hook.…
    ddp.LocalSGD       the same, of workers that agree after several steps  strategy=local_sgd, strategy.…
    ddp.Folder         what a run keeps and shows                           checkpoint.…, report.…
    ddp.SameBits       the same bits at any number of workers               same_bits.…
    ddp.Batches        how samples become steps                             data.…, batch.… (`data/orders/steps.py`)

They are arguments of `ddp.fit`, and all but Batches are groups of a run's settings. So default, meaning and bounds of
each setting are defined once, here, and code that receives a policy reads a new field without another argument.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ddp.errors import ConfigError
from ddp.process.files import at_home
from ddp.setting import (
    Below1,
    Island,
    Natural,
    Positive,
    Precision,
    ServerMode,
    Setup,
    StrategyName,
    Whole,
    WireName,
    check_region,
    check_values,
    refuse,
    setting,
    strategy_hint,
)

WatchAction = Literal["warn", "stop"]
GuardAction = Literal["stop", "skip", "go_back"]


@dataclass(kw_only=True)
class Training:
    """The length of a run, and its number format: the arguments of `ddp.fit` that are settings by themselves."""

    epochs: Natural | None = setting(None, "passes over the training samples; null: until max_steps")
    max_steps: Natural | None = setting(None, "most optimizer steps; epochs may end the run earlier; null: no limit")
    precision: Precision = setting(
        "fp32",
        "number format of forward and backward; bf16, fp16: autocast, while parameters and gradients stay fp32; fp16 "
        "also scales the loss; bf16_pure: parameters and gradients, too, with fp32 master weights",
    )
    clip_norm: Positive | None = setting(None, "largest norm of the global mean gradient; null: no clipping")


@dataclass(frozen=True)
class Policy:
    """A value that checks itself when it is made.

    Raises:
        ConfigError: a field is of another type, or out of its bounds; the message has the remedy.
    """

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True, kw_only=True)
class Evaluation(Policy):
    """The evaluations on the held-out samples; the last one follows the last step."""

    every_epochs: Natural | None = setting(1, "epochs between two evaluations; null: not by epochs")
    every_steps: Natural | None = setting(None, "steps between two evaluations; null: not by steps")
    batch: Natural = setting(256, "samples per worker in one forward of an evaluation")
    training: Whole = setting(
        0,
        "training samples, spread over all of them, that are evaluated with the held-out ones, as training_loss and so "
        "on; 0: none",
    )


@dataclass(frozen=True, kw_only=True)
class Reading(Policy):
    """Reading of samples."""

    num_workers: Whole | None = setting(
        None,
        "loader processes of each worker; 0: the worker loads by itself; null: 0, but in Python a DataLoader's own",
    )
    max_unreadable: Whole = setting(
        0, "most training samples that a worker leaves out because they cannot be read; 0: the first one ends the run"
    )
    debug: bool = setting(False, "refuse workers or loader processes that begin with equal batches")


@dataclass(frozen=True, kw_only=True)
class Buckets(Policy):
    """The buckets in which gradients are averaged."""

    bucket_cap_mb: Positive = setting(25.0, "size at which a bucket is closed, in MiB")
    first_bucket_mb: Positive = setting(1.0, "the same for the first bucket: a small one starts early")
    wire: WireName | None = setting(
        None,
        "number format in which gradients travel between hosts; sums stay wide: docs/less-traffic.md; fp32: for "
        "precision=bf16_pure, whose gradients are added up as float32 then; null: their own",
    )
    find_unused_parameters: bool = setting(
        False, "parameters may go without a gradient, as a head that the loss of a step does not use; false: an error"
    )
    direct_gradients: bool | None = setting(
        None,
        "compute the gradients of large linear layers in their buckets, where they are summed; null: on CPUs; false: "
        "copy them there",
    )
    verify_every: Whole = setting(0, "steps between two bitwise comparisons of all workers' parameters; 0: never")


@dataclass(frozen=True, kw_only=True)
class Averaging(Buckets):
    """The averaging of gradients, and the choice of which rank updates which parameters.

    Attributes:
        strategy: the word for who holds parameters and optimizer state (`strategies/choice.py`).
        region: of strategy="central_storage": the name under which other jobs of this user on the host find the
            parameters while it trains, as `ddp.load(region=…)`.
        units: of strategy="fully_sharded": a pattern of names of modules, such as "blocks.*", each of which is gathered
            as one; None: the elements of outermost ModuleLists, Sequentials and ModuleDicts.
        hook: sends a part of the gradients between hosts, such as `ddp.gradients.PowerSGD(4)`.
    """

    strategy: StrategyName = "auto"
    region: str | None = None
    units: str | None = None
    hook: Any = None  # ddp.gradients.Hook, which imports torch

    def __post_init__(self) -> None:
        words = get_args(StrategyName)
        if self.strategy not in words and (hint := strategy_hint(self.strategy)):
            raise ConfigError(f"strategy={self.strategy!r:.60}: take one of {', '.join(words)}.{hint}")
        super().__post_init__()
        if self.region is not None:
            check_region(self.region)
            if self.strategy != "central_storage":
                raise ConfigError(
                    f"region={self.region!r} with strategy={self.strategy!r}: a region is of strategy='central_storage'"
                    " alone; take that, or leave region out"
                )
        if not isinstance(self.units, str | None):
            raise ConfigError(f"units={self.units!r:.60}: give one pattern of names of modules, such as 'blocks.*'")
        if self.units is not None and self.strategy != "fully_sharded":
            raise ConfigError(
                f"units={self.units!r} with strategy={self.strategy!r}: a model is cut into units by "
                "strategy='fully_sharded' alone; take that, or leave units out"
            )
        kind = KINDS.get(self.strategy, Averaging)
        if not isinstance(self, kind):
            raise ConfigError(f"strategy={self.strategy!r}: has its own choices; give a ddp.{kind.__name__}")


STALENESS = 4
"""Default of mode=bounded."""


@dataclass(frozen=True, kw_only=True)
class Serving(Policy):
    """The rule by which parameter servers make updates."""

    mode: ServerMode = setting(
        "sync",
        "sync: one update from all parts of a step, by any workers; async: one from each returned batch, whose "
        "parameters may be old; bounded: async, but a worker waits rather than use parameters older than staleness",
    )
    backup_workers: Whole = setting(0, "extra workers of a sync step, which recompute late parts")
    staleness: Whole | None = setting(
        None, "for mode=bounded: largest staleness of a gradient, in updates; null: 4, in that mode"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode != "bounded" and self.staleness is not None:
            raise ConfigError(f"staleness={self.staleness} with mode={self.mode}: bounds mode=bounded; leave one out")
        if self.backup_workers and self.mode != "sync":
            raise ConfigError(
                f"backup_workers={self.backup_workers} with mode={self.mode}: no worker waits for the parts of a step "
                "there; leave it out, or take mode=sync"
            )

    @property
    def bound(self) -> int | None:
        """Returns the largest staleness of a gradient, in updates; None: it has no bound."""
        return STALENESS if self.mode == "bounded" and self.staleness is None else self.staleness

    def num_parts(self, num_workers: int) -> int:
        """Returns the number of parts of a step, each of which a worker computes.

        Raises:
            ConfigError: all workers would be backup workers.
        """
        if self.mode != "sync":
            return 1
        if self.backup_workers >= num_workers:
            raise ConfigError(
                f"backup_workers={self.backup_workers}: leaves none of {num_workers} worker(s) to compute the step; "
                f"take at most {num_workers - 1}"
            )
        return num_workers - self.backup_workers


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Serving, Averaging):
    """Parameter servers hold parameters and optimizer state, and workers push gradients.

    The processes are those of `ddp.launch(…, workers=3, servers=1)`, or of the settings `cluster.…`; or each reads its
    role from the variables of `ddp/comm/meeting/role.py`, as DDP_ROLE=worker.
    """

    strategy: StrategyName = "parameter_server"


@dataclass(frozen=True, kw_only=True)
class Rounds(Policy):
    """Workers that train by themselves, and agree at the end of a round."""

    every: Natural = setting(8, "inner steps of a round: each worker's own, between two agreements")
    outer_lr: Positive = setting(
        1.0, "learning rate of the outer step: share of the mean difference that is applied; 1: all"
    )
    outer_momentum: Below1 = setting(
        0.0, "Nesterov momentum of the common parameters; DiLoCo has 0.9, with outer_lr=0.7"
    )
    warmup_samples: Whole = setting(
        0, "samples of the run until which gradients are averaged in each step, as by strategy=mirrored"
    )
    island: Island = setting(
        "worker", "unit that trains alone in a round; worker: each worker; host: each host, by mean gradients in memory"
    )
    fragments: Natural = setting(
        1, "parts of the parameters that are exchanged at different inner steps; several need a delay"
    )
    delay: Whole = setting(
        0, "inner steps that continue while differences are in flight; 0: workers wait at the end of a round"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay >= self.every:
            raise ConfigError(
                f"delay={self.delay}: is a whole round of every={self.every} inner steps or more; take less than every"
            )
        if self.fragments > self.every:
            raise ConfigError(
                f"fragments={self.fragments}: more than the every={self.every} inner steps after which they are sent; "
                "take as many at most"
            )
        if self.fragments > 1 and not self.delay:
            raise ConfigError(
                f"fragments={self.fragments}: with delay=0 nothing would be in flight; set delay, or leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Rounds, Averaging):
    """Each worker trains by itself for a round; then the workers agree on parameters (local SGD, DiLoCo)."""

    strategy: StrategyName = "local_sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy != "local_sgd":
            raise ConfigError(f"ddp.LocalSGD(strategy={self.strategy!r}): is local_sgd; leave strategy out")
        refuse(Setup.of(self, hook_momentum=getattr(self.hook, "momentum", 0)))


@dataclass(frozen=True, kw_only=True)
class SameBits(Policy):
    """`fit` gives the same bits at any number of workers, and shows it: docs/same-bits.md."""

    on: bool = setting(
        False,
        "gradients, losses, buffers and metrics are added up by the shards of a batch, of which there are 8 unless "
        "batch.num_shards is set; so any number of workers, up to the number of shards, ends with the same parameters, "
        "bit by bit",
    )
    hash_every: Whole = setting(
        0, "steps between two lines of hashes.jsonl: of parameters, buffers, optimizer state and loss; 0: none"
    )
    audit_every: Whole = setting(
        0,
        "steps between two audits, in which a second worker computes a shard, too: a machine with wrong results "
        "is named; 0: only in the first step",
    )


NUM_SHARDS = 8
"""Default for a run with the same bits: up to eight workers can have equal shares."""

KINDS: dict[str, type[Averaging]] = {"parameter_server": ParameterServer, "local_sgd": LocalSGD}
"""The policies of strategies that have their own choices."""


def averaging_named(word: Any) -> Averaging:
    """Returns the policy of a strategy with its defaults.

    Raises:
        ConfigError: there is no such word.
    """
    return KINDS[word]() if word in KINDS else Averaging(strategy=word)


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Policy):
    """The checkpoints of the run."""

    every_steps: Natural | None = setting(None, "steps between two checkpoints; null: one at the end of every epoch")
    memory_steps: Whole = setting(
        0,
        "steps between two checkpoints in memory that the launcher holds, twice as much as one needs: an elastic run "
        "that loses all workers continues from there, or from the disk, if that is newer; 0: none",
    )
    keep_last: Natural = setting(3, "how many of the latest checkpoints are kept, in addition to the best ones")
    keep_best: Natural = setting(1, "how many of those with the best main metric are kept")


@dataclass(frozen=True, kw_only=True)
class Reports(Policy):
    """The metrics of the run, and how they are shown."""

    log_every: Natural = setting(10, "steps between two lines of metrics.jsonl")
    noise_scale_every: Whole = setting(
        10,
        "steps between two measurements of the gradient noise scale, the batch up to which more workers pay; 0: never",
    )
    progress: bool = setting(True, "print what was derived, and a bar, or off a terminal a line every 10 s")
    curves: bool = setting(True, "draw curves.png at the end")


@dataclass(frozen=True)
class Folder(Checkpoints, Reports):
    """The folder of a run, and what is kept there and shown: checkpoints, metrics.jsonl, summary.json, curves.png.

    Attributes:
        path: unless given, a new one below runs/. None: nothing is written.
        resume: "auto" continues the run in the folder, or begins it if there is none; a path continues from the run or
            checkpoint there.
        trial: three steps, one evaluation and one save only, to check that all of it works; no file is kept.
        restore_best: the model ends with the weights of the best checkpoint, and `evaluation` with its metrics.
    """

    path: str | Path | None = "runs/DATE_TIME"
    resume: str | Path | None = None
    trial: bool = False
    restore_best: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("path", "resume"):
            path = getattr(self, name)
            is_path = isinstance(path, (str, os.PathLike))
            if is_path:
                object.__setattr__(self, name, at_home(path))
            elif path is not None:
                raise ConfigError(f"{name}={path!r:.60}: give the path of a folder, as a text or a pathlib.Path")
        if self.restore_best and self.path is None:
            raise ConfigError("restore_best=True with path=None: the best checkpoint needs a folder; name one")
        if self.resume == "":
            raise ConfigError("resume='': take auto, or the path of a run or checkpoint, or None")
        if self.resume == "auto" and (self.path is None or self.is_unnamed):
            raise ConfigError(
                'resume="auto" names no run: name its folder, such as ddp.Folder("runs/mine", resume="auto")'
            )
        if self.trial and self.resume is not None:
            raise ConfigError(f"trial with resume={self.resume}: a trial starts from scratch, so leave one out")

    @property
    def is_unnamed(self) -> bool:
        """Returns True if the folder is to be named by date and time."""
        return str(self.path) == "runs/DATE_TIME"
