"""A task says how a model is trained and judged: the contract between a subject and the training loop.

A task never divides. It returns sums and their counts. The loop adds both over micro-batches and ranks and divides
once, by the global count:

    rank 0    loss_sum 13.1, count 5  ┐
    rank 1    loss_sum  9.2, count 4  ┴→  22.3 / 9         the mean over all samples, whatever the shares

The mean of the ranks' means would be another number as soon as the shares differ. A rank without samples returns
(0, 0), which adds nothing. A task holds no state and is the same object on every rank.
"""

from __future__ import annotations

import inspect
import lzma
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from ddp.errors import ConfigError, meant

IGNORE = -100
"""A target that is none: neither in the sum nor in the count. It is torch's own convention."""
WEIGHING = {"weight", "ignore_index", "label_smoothing"}
"""Keywords of torch's losses whose mean is one by weight."""

Batch = Any  # collated samples of the data set, on the model's device: mostly (inputs, targets)


class Rows:
    """Values of every sample for a metric that is no mean over samples, such as the area under a curve.

    `Task.metrics` returns it in the place of a sum and a count. `Task.finish` is given one tensor of it, with the rows
    of all samples on all ranks in the order of the data, and computes the metric.

    Args:
        values: rows of a batch, [n, …]; or of several.

    Raises:
        ConfigError: one is not a tensor with rows.
    """

    def __init__(self, *values: Tensor) -> None:
        if wrong := [each for each in values if not isinstance(each, Tensor) or not each.dim()]:
            raise ConfigError(f"Rows: was given {_form(wrong[0])}, not a tensor with a row for each sample")
        self.values = [each.detach() for each in values]


class Task(ABC):
    """A way to train a model and to judge it. `loss` is all that a task must have.

    For a loss that is the mean over samples no task is needed: give `ddp.fit` the function. This one predicts a price
    from a table and a text, weighs some samples more, and reports the share of good guesses:

        class Price(ddp.Task):
            main_metric, higher_is_better = "within_ten_percent", True

            def loss(self, model, batch):
                errors = self.errors(model, batch)
                return (batch["weight"] * errors.square()).sum(), len(errors)      # a sum, and how many are in it

            def metrics(self, model, batch):
                errors = self.errors(model, batch).abs()
                return {"loss": self.loss(model, batch), "within_ten_percent": ((errors < 0.1).sum(), len(errors))}

            def outputs(self, model, batch):
                return model(batch["table"], batch["text"])

            def errors(self, model, batch):
                return self.outputs(model, batch) - batch["price"]

        ddp.fit(model, data, optimizer, loss=Price(), global_batch=64, epochs=3, test_data=test)

    Attributes:
        main_metric: the metric, among those of `finish`, that decides which checkpoint is the best.
        higher_is_better: True if a larger `main_metric` is a better model.
    """

    main_metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float | Tensor]:
        """Returns the loss to minimise: (its *sum*, a scalar with a gradient; the number of terms in the sum).

        The number may be a scalar tensor, so that the host does not wait for a GPU that counts the terms. Where terms
        have weights and the mean is one by weight, as that of torch's CrossEntropyLoss(weight=…), it is the sum of the
        weights. It need not be whole.
        """

    @torch.no_grad()
    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[float | Tensor, float | Tensor] | Rows]:
        """Returns a sum and a count for each metric, without gradient. The caller adds both over ranks and divides.

        Values that `finish` needs of every sample are returned as `Rows`.
        """
        return {"loss": self.loss(model, batch)}

    @torch.no_grad()
    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the outputs that `predict` keeps: [n, ...], without gradient, in the batch's order."""
        return outputs_of(model, batch)

    def finish(self, means: Mapping[str, Any]) -> dict[str, float]:
        """Returns the metrics to report, from the global means of `metrics`, and the rows of all samples."""
        return dict(means)


def outputs_of(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the model's outputs for the inputs of a batch: its first part, or all of it if it has no parts."""
    outputs: Tensor = model(batch[0] if isinstance(batch, (tuple, list)) else batch)
    return outputs


def at_least_float32(logits: Tensor) -> Tensor:
    """Returns half-precision logits as float32, because a sum of thousands of losses needs the digits; others as is."""
    # torch.promote_types would stop a trace (`replica/compiled.py`)
    is_wide = logits.dtype.is_complex or (logits.dtype.is_floating_point and logits.dtype.itemsize >= 4)
    return logits if is_wide else logits.float()


# --- A task from a plain function loss(outputs, targets), such as `torch.nn.functional.cross_entropy` ----------------
#
#     reduction="mean"    the function returns the mean over the samples of a batch; times their number it is the sum
#     reduction="sum"     the function returns the sum over the samples
#
# Either way `fit` adds sums over micro-batches and ranks and divides by the global number of samples. A mean in which
# samples weigh unequally (class weights, `ignore_index`) cannot be taken apart like this; it needs a `Task`. torch's
# `cross_entropy` and `nll_loss` are called with reduction="sum", and the count is the sum of the weights. So their mean
# is exact, and a share may have no label at all.


Reduction = Literal["mean", "sum"]


class LossFunction(Task):
    """Minimises `function(model(inputs), targets)` over batches (inputs, targets); reports it as `loss`.

    Args:
        function: of the model's outputs and the targets; returns a scalar.
        reduction: how the scalar was reduced. None: as in the function's own attribute `reduction`, which torch's loss
            modules have, or else "mean".

    Raises:
        ConfigError: another reduction, or one that contradicts the function's own.
    """

    def __init__(self, function: Callable[[Any, Any], Tensor], *, reduction: Reduction | None = None) -> None:
        own = getattr(function, "reduction", None)
        own = "mean" if own == "batchmean" else own  # of KLDivLoss: the mean over samples
        chosen = reduction or own or "mean"
        if chosen not in ("mean", "sum"):
            raise ConfigError(f'reduction={chosen!r} of {name_of(function)}: take "mean" or "sum"')
        if own is not None and own != chosen:
            raise ConfigError(f"reduction={chosen!r}: but {name_of(function)} has reduction={own!r}; make them equal")
        self.function, self.reduction = function, chosen

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float | Tensor]:
        """Returns the sum over the samples, and their number, or the sum of their weights."""
        inputs, targets = pair_of(batch, self.function)
        outputs = model(inputs)
        known = _weighing(self.function) if self.reduction == "mean" else None
        try:
            if known is not None:
                return known(outputs, targets, reduction="sum"), weight_of(targets, **known.keywords)
            loss = self.function(outputs, targets)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            error.add_note(f"{name_of(self.function)} was given outputs, {_form(outputs)}")
            raise
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError(
                f"{name_of(self.function)} returned {_form(loss)}, not a tensor of one number: return the mean over "
                'the samples, or their sum with ddp.LossFunction(…, reduction="sum")'
            )
        count = length_of(batch)
        return (loss * count if self.reduction == "mean" else loss).squeeze(), count


def _weighing(function: Any) -> partial[Tensor] | None:
    """Returns torch's function, with its settings, if its mean leaves targets out or weighs classes; else None."""
    kinds: dict[type, Any] = {nn.CrossEntropyLoss: F.cross_entropy, nn.NLLLoss: F.nll_loss}
    given: dict[str, Any] = {}
    if isinstance(function, partial) and not function.args:
        function, given = function.func, function.keywords
    elif type(function) in kinds:
        given = {name: vars(function)[name] for name in WEIGHING if name in vars(function)}
        function, given["weight"] = kinds[type(function)], function.weight
    return partial(function, **given) if function in kinds.values() and given.keys() <= WEIGHING else None


def weight_of(targets: Tensor, *, weight: Tensor | None = None, ignore_index: int = IGNORE, **_: Any) -> float | Tensor:
    """Returns the number of targets that are one, or the sum of their classes' weights; on a GPU as a scalar there.

    Args:
        targets: numbers of classes; or probabilities of classes, which are dimension 1 then.
        weight, ignore_index: as of torch's `cross_entropy`.
    """
    if targets.is_floating_point():
        return targets.numel() // max(1, targets.shape[min(1, targets.dim() - 1)])
    counts = targets != ignore_index
    number = counts.sum() if weight is None else weight[targets.where(counts, 0)].where(counts, 0).sum()
    return number.item() if number.device.type == "cpu" else number  # for which the host would wait


class Regression(Task):
    """Minimises the squared error of a number; reports its mean, and that of the absolute error as `mae`.

    Batches are (inputs, numbers) with a number for each sample, [n] or [n, 1]; so are the model's outputs:

        ddp.fit(model, data, optimizer, loss=ddp.Regression(), global_batch=64, epochs=3, test_data=test)
    """

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Returns (Σ of the squared errors, their number)."""
        errors = self._errors(model, batch)
        return errors.square().sum(), len(errors)

    @torch.no_grad()
    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[float | Tensor, float | Tensor]]:
        """Returns `loss` and `mae`."""
        errors = self._errors(model, batch)
        return {"loss": (errors.square().sum(), len(errors)), "mae": (errors.abs().sum(), len(errors))}

    def _errors(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, numbers = pair_of(batch, self)
        outputs = at_least_float32(model(inputs))
        if any(each.numel() != len(inputs) for each in (outputs, numbers)):
            shapes = f"outputs {list(outputs.shape)} for numbers {list(numbers.shape)}"
            raise ConfigError(f"Regression: the model returned {shapes}; both need one number for each sample")
        errors: Tensor = outputs.flatten() - numbers.flatten()
        return errors


def as_task(loss: Task | Callable[[Any, Any], Tensor]) -> Task:
    """Returns the task that a user's `loss` stands for.

    Raises:
        ConfigError: it is neither a task nor a function.
    """
    if isinstance(loss, type):
        raise ConfigError(f"loss={loss.__name__} is a class: give an object of it, {loss.__name__}()")
    if isinstance(loss, Task):
        return loss
    if hasattr(loss, "loss"):
        raise ConfigError(f"loss={name_of(loss)} has a method `loss` but is no task: derive its class from ddp.Task")
    if not callable(loss):
        raise ConfigError(f"loss={loss!r}: give a function loss(outputs, targets), or a ddp.Task.{meant(loss, ())}")
    if not _takes_two(loss):
        raise ConfigError(
            f"loss={name_of(loss)}: takes {_signature(loss)}, and is called with outputs and targets; give a "
            "function of both, or a ddp.Task"
        )
    return LossFunction(loss)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature that a call must fit: a wrapper's own, and not that of what it wraps."""
    return inspect.signature(function, follow_wrapped=False)


def _takes_two(function: Callable[..., Any]) -> bool:
    """Returns False if a function cannot be called with two arguments; True for one in C without a signature."""
    try:
        _signature(function).bind(None, None)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)
    return True


def pair_of(batch: Batch, loss: object) -> tuple[Any, Any]:
    """Returns inputs and targets.

    Raises:
        ConfigError: the batch has another form.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ConfigError(
            f"{name_of(loss)} needs batches (inputs, targets), but the data give {_form(batch)}: give "
            "samples of two parts, or a ddp.Task, which may have batches of any form"
        )
    inputs, targets = batch
    return inputs, targets


def length_of(batch: Batch) -> int:
    """Returns the length of the batch's first tensor, or of its first list."""
    leaf = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), None)
    return len(leaf if leaf is not None else batch[0])


def name_of(loss: object) -> str:
    """Returns the name of a function, or of an object's class, as its author knows it."""
    loss = getattr(loss, "function", loss)
    return getattr(loss, "__name__", type(loss).__name__)


def _form(value: object) -> str:
    """Returns the type and shape of a value, for a message."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


# --- Classification: the model returns [n, num_classes] scores --------------------------------------------------------
#
#     loss       Σ over samples of  −ln p(class),  p = softmax(scores)            in nats
#     accuracy   the number of samples whose class has the highest score, of how many
#
# Label smoothing ε makes p(class) = 1 − ε + ε/num_classes, and ε/num_classes elsewhere, the target. It belongs to
# training, so the reported loss is without it. Source: Szegedy et al. 2015, section 7.


@dataclass(frozen=True)
class Classification(Task):
    """Minimises the cross-entropy of the class; reports it with the accuracy.

    Batches are (inputs, classes), the classes [n] whole numbers from 0, or −100 for none; the model returns scores
    [n, num_classes]. Classes may also be one-hot, or a probability of each class, [n, num_classes]; the right class is
    then the likeliest:

        ddp.fit(model, data, optimizer, loss=ddp.Classification(), global_batch=64, epochs=3, test_data=test)

    Raises:
        ConfigError: `label_smoothing` is not within 0 … 1.
    """

    label_smoothing: float = 0.0
    main_metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ConfigError(f"label_smoothing={self.label_smoothing} is no share of a label; choose 0 … 1, often 0.1")

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float | Tensor]:
        """Returns (Σ cross-entropy over the samples, their number)."""
        inputs, classes = pair_of(batch, self)
        scores = at_least_float32(model(inputs))
        targets = _targets(classes, scores)
        loss_sum = F.cross_entropy(scores, targets, reduction="sum", label_smoothing=self.label_smoothing)
        return loss_sum, weight_of(targets)

    @torch.no_grad()
    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[float | Tensor, float | Tensor]]:
        """Returns `loss` (without label smoothing) and `accuracy`."""
        inputs, classes = batch
        scores = at_least_float32(model(inputs))
        targets = _targets(classes, scores)
        num_right = (scores.argmax(dim=1) == (targets.argmax(dim=1) if targets.is_floating_point() else targets)).sum()
        return {
            "loss": (F.cross_entropy(scores, targets, reduction="sum"), weight_of(targets)),
            "accuracy": (num_right, weight_of(targets)),
        }

    @torch.no_grad()
    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns log-probabilities [n, num_classes]; their argmax is the predicted class."""
        inputs, _ = batch
        return F.log_softmax(at_least_float32(model(inputs)), dim=1)


def _targets(classes: Tensor, scores: Tensor) -> Tensor:
    """Returns classes as numbers; or as probabilities of the scores' type, if there is one for each score."""
    return classes.to(scores.dtype) if classes.shape == scores.shape else classes


# --- Language models: the next token ----------------------------------------------------------------------------------
#
#     loss            Σ over targets of  −ln p(target | everything before it)           in nats
#     bits per token  loss mean / ln 2; per byte, where a token is a byte               as a compressor would need
#
# A target of −100 (`IGNORE`, torch's own convention) is no target: neither in the sum nor in the count. So padded texts
# of uneven length weigh by what they hold, on every rank.


class LanguageModel(Task):
    """Minimises the cross-entropy of the next token; reports it as bits per token, too (`ByteModel`: per byte).

    Batches are (tokens, targets), both [n, time], where targets are the tokens one position later, or −100 for none;
    the model returns logits [n, time, vocabulary]:

        ddp.fit(model, data, optimizer, loss=ddp.LanguageModel(), global_batch=16, max_steps=2000, test_data=test)
    """

    main_metric: ClassVar[str] = "bits_per_token"

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float | Tensor]:
        """Returns (Σ −ln p over the targets, their number)."""
        tokens, targets = batch
        logits = at_least_float32(model(tokens))  # [n, time, vocabulary]
        loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        return loss_sum, weight_of(targets)

    @torch.no_grad()
    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the nats of every target, [n, time]; 0 where the target is `IGNORE`."""
        tokens, targets = batch
        logits = at_least_float32(model(tokens))
        return F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE, reduction="none")

    def finish(self, means: Mapping[str, float]) -> dict[str, float]:
        """Adds bits per token, or per byte."""
        return {**means, self.main_metric: means["loss"] / math.log(2)}


class ByteModel(LanguageModel):
    """A `LanguageModel` whose tokens are bytes: reports bits per byte."""

    main_metric: ClassVar[str] = "bits_per_byte"


# --- Yardsticks for a language model of bytes: n-grams, which only count, and `xz`, on the same text ------------------
#
# Interpolated Witten-Bell n-grams. With c(h w) the number of times that byte w followed history h in the training text,
# c(h) their sum over w, and t(h) the number of *different* bytes that followed h:
#
#     p(w | h)  =  ( c(h w) + t(h) · p(w | h without its oldest byte) ) / ( c(h) + t(h) )         p(w) begins at 1/256
#
# t(h)/(c(h) + t(h)) is the probability of a new byte after h; it goes to the shorter history. If h was never seen, all
# of it does. The first bytes of the held-out text have as much history as there is.
#
# On `ddp.data.sets.text_sets` (9.4 MB to count, 0.5 MB to score), in bits per byte, and seconds on one core:
#
#     order 1     4.50   0.6 s          order 3     2.60   1.2 s          order 6     1.89   3.5 s
#     order 2     3.48   0.7 s          order 5     1.91   2.6 s          xz          1.45   9.7 s
#
# The cost of an order is a sort of the training text; `xz` compresses that text twice. `xz` is the lowest because it
# copies whole passages from anywhere in the text, which no window of a few bytes can.
#
# Source: Witten & Bell 1991; Chen & Goodman 1998, section 2.6.

Codes = NDArray[np.uint64]  # n bytes as one number, the oldest byte most significant


def ngram_bits_per_byte(train: bytes, held_out: bytes, order: int) -> float:
    """Returns the mean −log₂ p of held-out bytes under a Witten-Bell model that looks at `order` − 1 bytes before each.

    Args:
        train: text that is counted.
        held_out: text that is scored; not empty.
        order: length of the n-grams, 1 … 8.
    """
    probability = np.full(len(held_out), 1 / 256)
    for n in range(1, min(order, len(held_out)) + 1):
        longer = probability[n - 1 :]  # a view: the bytes that have n − 1 bytes before them
        count, total, distinct = _counts(_ngrams(train, n), of=_ngrams(held_out, n))
        np.divide(count + distinct * longer, total + distinct, out=longer, where=total > 0)
    return float(-np.log2(probability).mean())


def xz_bits_per_byte(train: bytes, held_out: bytes) -> float:
    """Returns the bits per held-out byte that the held-out text adds to the compressed training text."""
    with ThreadPoolExecutor(2) as threads:  # which lzma lets run at the same time
        compressed = threads.map(partial(lzma.compress, preset=_XZ_PRESET), (train, train + held_out))
        alone, together = map(len, compressed)
    return (together - alone) * 8 / len(held_out)


_XZ_PRESET = 9  # a dictionary of 64 MiB, so that all of the training text can be referred to


def _ngrams(text: bytes, n: int) -> Codes:
    """Returns all n-grams of the text, in order: [len(text) − n + 1]."""
    single = np.frombuffer(text, dtype=np.uint8)
    codes = np.zeros(max(len(single) - n + 1, 0), dtype=np.uint64)
    for shift in range(n if len(codes) else 0):
        codes = (codes << np.uint64(8)) | single[shift : shift + len(codes)]
    return codes


def _counts(train: Codes, *, of: Codes) -> tuple[NDArray[np.float64], ...]:
    """Returns c(h w), c(h) and t(h) for each n-gram `of` = h w, all [len(of)]; zeros where it was never seen."""
    grams, gram_counts = np.unique(train, return_counts=True)
    histories, first, distinct = np.unique(grams >> np.uint64(8), return_index=True, return_counts=True)
    totals = np.add.reduceat(gram_counts, first) if len(first) else gram_counts
    count = _look_up(of, keys=grams, values=gram_counts)
    history = of >> np.uint64(8)
    return count, _look_up(history, keys=histories, values=totals), _look_up(history, keys=histories, values=distinct)


def _look_up(wanted: Codes, *, keys: Codes, values: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the value of each wanted key, 0 where there is none. `keys` is sorted."""
    if not len(keys):
        return np.zeros(len(wanted))
    where = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[where] == wanted, values[where], 0).astype(np.float64)
