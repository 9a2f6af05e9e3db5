"""The package's errors: those of the user's input, and those of the cluster.

    ValueError                          RuntimeError
    ├── ConfigError*      bad setting   ├── PeerLost            a rank died, stopped, or was cut off
    │   └── UnreadableSample  bad bytes ├── CommunicatorBroken  a call after such an error
    ├── ReplicaMismatch*  models differ ├── Diverged            the loss is not a number
    └── CheckpointError   cannot load   ├── LoaderLost          a loader process died, stopped, or says nothing
                                        ├── UnusedParameters    a gradient never became ready
                                        ├── CollectiveMismatch  ranks called different collectives
                                        ├── HookFailed          a communication hook failed
                                        ├── AuditFailed         ranks compute one shard differently
                                        └── WorkersFailed       the workers of `ddp.launch` failed; of the cause's type
                                        ├── TooFewWorkers       others were lost, and none have come
    * also a RuntimeError, because torch's DistributedDataParallel raises that where ours raises these

Every message has the offending value and a remedy. `assert` is for invariants of this package alone.
"""

from __future__ import annotations

import difflib
import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import new_class
from typing import Any


def safe_str(error: BaseException) -> str:
    """Returns the text of an error, even if its `__str__` fails."""
    try:
        return str(error)
    except Exception as failed:
        return f"<its __str__ failed, {type(failed).__name__}>"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, because torch appends its own stack; without text, its class."""
    return next(iter(safe_str(error).splitlines()), type(error).__name__)


def one_line(error: BaseException) -> str:
    """Returns the class and the text of an error, in one line."""
    return " ".join(f"{type(error).__name__}: {safe_str(error)}".split())


_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 controls, Unicode's bidirectional controls, and lone surrogates, which no file can hold."""


def printable(text: str, *, is_line: bool = False) -> str:
    """Returns a text with control characters for terminals and text direction escaped, such as "\\x1b".

    Args:
        is_line: escape newlines, too, so that the text cannot look like a second message.
    """
    text = _COMMANDS.sub(lambda found: ascii(found[0])[1:-1], text)
    return text.replace("\n", "\\n") if is_line else text


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and its causes, each once, because `raise e from e` is a cycle."""
    found: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and not any(following is each for each in found):
        found.append(following)
        yield following
        following = following.__cause__ or following.__context__


def nearest(word: object, known: Iterable[str]) -> str:
    """Returns the nearest known word, ignoring case; "" if none is near."""
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(word).lower(), by_lower, n=1)
    return by_lower[near[0]] if near else ""


CALLED_ELSEWHERE = {  # our word, or a sentence → other libraries' words for it, lower-case letters and digits only
    "auto": "replicated ddp ddpspawn ddpfork ddpnotebook distributeddataparallel default nccl ncclallreduce",
    "one_device": "onedevice singledevice",
    "mirrored": "mirrored dp dataparallel horovod",
    "multi_worker": "multiworker multiworkermirrored collectiveallreduce",
    "sharded": "sharded zero zero1 zeroredundancyoptimizer ddpsharded",
    "fully_sharded": "fsdp fsdp2 fullyshard fullyshardeddataparallel deepspeed zero2 zero3",
    "central_storage": "centralstorage",
    "parameter_server": "parameterserver parameterservers ps parameterserverv2 async asynchronous",
    "local_sgd": "localsgd diloco streamingdiloco postlocalsgd postlocalsgdoptimizer periodicmodelaverager fedavg",
    "master_worker": "reductiontoonedevice",
    "product": "prod multiply",
    "mean": "avg average",
    "cuda": "gpu",
    "fp32": "float32 32 32true full",
    "fp16": "float16 mixedfloat16 16 16mixed half amp",
    "bf16": "bfloat16 mixedbfloat16 bf16mixed",
    "bf16_pure": "bf16true",
    "search": "tune hyperparameters",
    "bench step": "bench benchmark benchstrategies benchsamebits",
    "Take ddp.Averaging(find_unused_parameters=True), or replica.find_unused_parameters=true": (
        "ddpfindunusedparameterstrue"
    ),
    "TPUs are a strategy: strategy=tpu cluster.workers=4, or ddp.fit(…, strategy='tpu')": "tpu xla tpustrategy",
    "Pipelines are for a loop of your own, by ddp.Pipeline; slices of layers are made by hand": (
        "pipeline pipelineparallel gpipe tensorparallel modelparallel megatron"
    ),
    "It is not supported: train in float64 from Python, by ddp.fit(model.double(), …)": "fp64 float64 double 64 64true",
    "Gradients of 8 bits are a format on the wire: ddp.Averaging(wire='int8'), or replica.wire=int8": (
        "quantize quantization quantized int8 fp8 qsgd"
    ),
    "Samples are not kept in memory any more, but the system keeps files that were read": "loadercache cache",
    "Searches are a command: ddp search": "optuna nevergrad ax",
    "Give ddp.Classification()": "crossentropy categoricalcrossentropy sparsecategoricalcrossentropy nll nllloss",
    "Give torch.nn.functional.mse_loss": "mse mseloss meansquarederror l2",
    "Give torch.nn.functional.binary_cross_entropy_with_logits": "bce bceloss binarycrossentropy",
    "A run is profiled with profile.steps=5, and scale measures where its time would go": "profile profiler",
}


def meant(word: object, known: Iterable[str], say: str = "{}") -> str:
    """Returns a hint, with a leading space, for a word of another library; "" for any other word.

    Args:
        say: a template for our word.
    """
    letters, words = _letters(word), list(known)
    found = next((ours for ours, theirs in CALLED_ELSEWHERE.items() if letters in theirs.split()), "")
    if found[:1].isupper():
        return f" {found}."
    if found not in words:  # a class of another library may contain our word: HierarchicalCopyAllReduce
        found = max((each for each in words if len(each) > 5 and _letters(each) in letters), key=len, default="")
    return f" Did you mean {say.format(found)}?" if found else ""


def _letters(word: object) -> str:
    return re.sub("[^a-z0-9]|strategy", "", str(word).lower())


def did_you_mean(word: object, known: Iterable[str], say: str = "{}") -> str:
    """Returns a hint, with a leading space, that names the intended known word; "" if none is near."""
    words = list(known)
    near = nearest(word, words)
    return meant(word, words, say) or (f" Did you mean {say.format(near)}?" if near else "")


class _Printable(Exception):
    """An error whose message may quote foreign files, and reaches a terminal as a traceback's last line."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in args))


class ConfigError(_Printable, ValueError, RuntimeError):
    """A setting that cannot work: unknown, of the wrong type, or incompatible with another one."""


class UnreadableSample(ConfigError):
    """A sample's bytes cannot be decoded; the message names the file, the sample's place in it, and the cause."""


class ReplicaMismatch(ValueError, RuntimeError):
    """The ranks' models are not built identically, or replicas that must be equal are not."""


class CheckpointError(_Printable, ValueError):
    """A checkpoint is missing, corrupt, or belongs to another model."""


class CommunicatorBroken(RuntimeError):
    """A collective was called after an earlier one had failed; the first error is the `__cause__`."""


class CollectiveMismatch(RuntimeError):
    """Ranks called different collectives: another operation, size, dtype or number; the message gives both calls."""


class LoaderLost(RuntimeError):
    """A loader process died, was stopped, or did not send a batch in time; names rank, process and samples."""


class Diverged(RuntimeError):
    """The loss or the gradient norm of a step is not finite."""


class UnusedParameters(RuntimeError):
    """Some parameters took no part in producing the loss, and `find_unused_parameters` is off."""


class AuditFailed(RuntimeError):
    """Two ranks have computed the same shard of a step, and their gradients differ; names who computes wrongly."""


class TooFewWorkers(RuntimeError):
    """Fewer workers than `min_workers` are left of an elastic launch, and no others have come."""


USER_ERRORS = (
    *(ConfigError, CheckpointError, ReplicaMismatch, Diverged, LoaderLost, UnusedParameters, AuditFailed),
    TooFewWorkers,
)
"""Errors whose message is sufficient, and would be hidden by a traceback."""


class HookFailed(RuntimeError):
    """A communication hook raised, or did not return a future of a tensor like its bucket; names hook and bucket."""


class WorkersFailed(RuntimeError):
    """The workers of `ddp.launch` failed; the message ends with the root cause's block.

    It is raised from the exception of the worker that failed first, and is of its type, too, if that is an `Exception`.
    So `except ValueError` around `ddp.launch` catches it if that was a ValueError. It has the attributes of that
    exception, in addition to its own.

    Attributes:
        rank: the worker that failed first.
        type_name: of its exception; "" if it was killed.
        exception: that exception; None if it was killed, or if the exception could not be sent, because it cannot be
            pickled, or is larger than 64 MiB.
    """

    rank: int | None  # these are not on the class, so that one that Ray derives from it looks for them in its cause
    type_name: str
    exception: BaseException | None

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    # The cause's type may have its own, which Python or a library calls while this one is on its way.
    __repr__, __setattr__ = BaseException.__repr__, BaseException.__setattr__
    __eq__, __hash__ = BaseException.__eq__, BaseException.__hash__

    def __getattr__(self, name: str) -> Any:
        if (original := vars(self).get("exception")) is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(original, name)

    # The class is made for each, so that it cannot be pickled by its name.
    def __reduce__(self) -> tuple[Any, ...]:
        return workers_failed, vars(self).get("_made_of", self.args)


def workers_failed(message: str, rank: int | None = None, type_name: str = "", sent: bytes = b"") -> WorkersFailed:
    """Returns the error of a launch.

    Args:
        sent: the exception, as pickled in the worker; it was not sent, or cannot be read here, if it is not one.
    """
    original = None
    with suppress(Exception, SystemExit):  # of a program without a main guard, which this imports
        original = pickle.loads(sent)
    failed = WorkersFailed()
    if not isinstance(original, BaseException):
        original = None
    elif isinstance(original, Exception) and type(original) not in WorkersFailed.__mro__:
        with suppress(Exception):  # such as of a type that forbids subclasses
            failed = _of_both_types(original)
    BaseException.__init__(failed, message)
    vars(failed).update(rank=rank, type_name=type_name, exception=original)
    vars(failed)["_made_of"] = message, rank, type_name, sent
    BaseException.__setattr__(failed, "__cause__", original)
    return failed


def _of_the_original(name: str, failed: WorkersFailed) -> Any:
    return getattr(failed.exception, name)


def _of_ours(name: str, failed: WorkersFailed) -> Any:
    return vars(failed)[name]


def _of_both_types(original: Exception) -> WorkersFailed:
    """Returns an object, not yet filled, of a class derived from WorkersFailed and from the type of `original`."""
    kind = type(original)
    bases = (kind,) if issubclass(kind, WorkersFailed) else (WorkersFailed, kind)
    theirs = {name for name in dir(kind) if not name.startswith("__")} - {*dir(WorkersFailed)}
    ours = theirs & {*WorkersFailed.__annotations__}
    body: dict[str, Any] = {name: property(partial(_of_the_original, name)) for name in theirs - ours}
    body |= {name: property(partial(_of_ours, name)) for name in ours}
    body |= {"__module__": WorkersFailed.__module__, "__doc__": WorkersFailed.__doc__}
    both = new_class(WorkersFailed.__name__, bases, exec_body=lambda space: space.update(body))
    builtin: Any = both
    while builtin.__module__ != "builtins":  # the one that says what memory the object needs; no code of the user's
        builtin = builtin.__base__
    made: WorkersFailed = builtin.__new__(both, *original.args)
    return made


@dataclass(eq=False)
class PeerLost(RuntimeError):
    """A collective or a message could not complete because of one rank: it died, stopped, was cut off, or never came.

    Attributes:
        rank: the rank that is missing.
        host: the host of that rank, with its role in a described cluster, as "node7 as worker:1"; "unknown" if it never
            reported.
        generation: version of the membership in which this happened.
        sequence: number of the collective or message that the reporting rank was in.
        label: its purpose (operation, bucket, parameter names, step).
        reason: the observation, and the remedy.
        message: "to rank 1" or "from rank 1", if it was a message.
    """

    rank: int
    host: str
    generation: int
    sequence: int
    label: str
    reason: str = ""
    message: str = ""

    def __str__(self) -> str:
        call = f"message #{self.sequence} {self.message}" if self.message else f"collective #{self.sequence}"
        membership = f" (generation {self.generation})" if self.generation else ""
        where = f"lost rank {self.rank} on host {self.host}{membership} during {call}"
        return f"{where} [{self.label}]{': ' if self.reason else ''}{self.reason}"

    # Exceptions are pickled by `args`, which dataclasses do not set.
    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return PeerLost, (self.rank, self.host, self.generation, self.sequence, self.label, self.reason, self.message)
