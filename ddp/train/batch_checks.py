"""Checks of the first batches: the loss must add up, so that ranks and micro-batches may share a batch.

    whole batch of n       (L, c)            sum: L = L₁ + L₂         mean: L = (k·L₁ + (n−k)·L₂) / n
    its first k samples    (L₁, c₁)          counts: c = c₁ + c₂
    the other n − k        (L₂, c₂)

A task that returns a mean with the batch's length as its count would train with gradients that are too small by the
size of a micro-batch, and nothing else would show it. A metric like this would be reported wrongly, and choose the best
checkpoint. So the first batch of each rank is computed whole and in two parts, once, by a copy of the model in
evaluation mode, because there dropout and BatchNorm treat each sample the same. A fresh model may give all samples
nearly the same loss, of which every mean is the same. So all of it is computed once more with outputs that are drawn at
random. A model that cannot run like this, or a batch that cannot be cut, is not looked at.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Never

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.data.loading.iterable import IterableSampler
from ddp.data.loading.source import digest_of
from ddp.data.orders.sampler import TrainSampler
from ddp.errors import CollectiveMismatch, CommunicatorBroken, ConfigError, PeerLost
from ddp.gradients.totals import count_of
from ddp.process.streams import preserved
from ddp.process.terminal import log
from ddp.replica.autograd import leaves_of
from ddp.replica.sync_batchnorm import waits
from ddp.setting import Uneven
from ddp.train.checkpoints.extra_state import loss_modules
from ddp.train.evaluate import add_metrics, finished
from ddp.train.steps.callbacks import BatchCallback
from ddp.train.steps.state import StepReport, TrainState
from ddp.train.steps.step import REMEDY, TOO_FEW, sum_and_count
from ddp.train.steps.task import LossFunction, Rows, Task, length_of, name_of


def warn_of_other_weights(task: Task, module: nn.Module, batch: Any, own: Container[int]) -> None:
    """Warns if the loss depends on parameters that are not the model's, which nothing trains.

    Args:
        task, module: copies.
        own: the ids of the parameters of the model itself, which a loss may refer to.
    """
    with torch.enable_grad():
        loss, _ = task.loss(module, batch)
    known = {id(each) for each in module.parameters()}
    names = {id(each): name for part in loss_modules(task) for name, each in part.named_parameters()}
    others = [each for each in leaves_of(loss) if id(each) not in known and id(each) not in own]
    if found := [names.get(id(each), f"of shape {list(each.shape)}") for each in others]:
        log.warning(
            "the loss %s has its own weights (%s), and fit trains those of the model alone: put the loss into the "
            "model (docs/losses.md), or call requires_grad_(False) on them",
            *(name_of(task), ", ".join(found)),
        )


class FirstBatchCheck:
    """Checks the first batch that it is given, and no other one.

    Args:
        with_one: sizes of the steps in which some rank has a share of one sample.
        num_calls: returns the number of collectives that this rank has called.
        if_it_waits: called with the methods, of loss and metrics, that call collectives; then no sums are compared,
            because those of a batch depend on the batches of other ranks.
    """

    def __init__(
        self,
        task: Task,
        *,
        with_one: list[int] | None = None,
        num_calls: Callable[[], int] = lambda: 0,
        if_it_waits: Callable[[Collection[str]], object] = lambda where: None,
    ) -> None:
        self._task: Task | None = task
        self._with_one = with_one or []
        self._num_calls, self._if_it_waits = num_calls, if_it_waits

    def __call__(self, module: nn.Module, batch: Any, num_samples: int) -> None:
        """Checks the loss and the metrics of a batch of two samples or more on the bare model.

        Raises:
            ConfigError: the loss is a mean where a sum is expected, or the other way round; its count does not fit;
                outputs and targets have shapes that broadcast; metrics have another form, or lack the main one.
        """
        task, self._task = self._task, None
        if task is None or waits(module, in_evaluation=True):
            return
        if isinstance(task, LossFunction) and (length := length_of(batch)) != num_samples:
            raise ConfigError(
                f"a batch of {num_samples} samples has {length} as its first dimension: collate samples along the "
                "first dimension, or give a ddp.Task, which may have batches of any form"
            )
        try:
            parts = _cut(batch, num_samples, num_samples // 2)
            # Copies, because a forward or a loss may count, draw, keep something of what it has seen, or change it.
            own, in_training = {id(each) for each in module.parameters()}, copy.deepcopy(module)
            module, task = copy.deepcopy((module, task))
            for each in (module, *loss_modules(task)):
                each.eval()
            with _evaluating():
                _refuse_broadcast(task, module, copy.deepcopy(batch))
                sums = Sums(task, module, (batch, *(parts or ())), num_samples, self._num_calls)
                sums.judge()
                if sums.waiting:
                    self._if_it_waits(sums.waiting)
                    return
                if parts is None:
                    log.info("the first batch was not looked at whole, because its parts are not all over samples")
                    return
                warn_of_other_weights(task, module, copy.deepcopy(parts[0]), own)
                if (first := _cut(batch, num_samples, 1)) is not None:
                    try_one_sample(in_training, copy.deepcopy(first[0]), self._with_one)
                module.register_forward_hook(sums.draw)
                sums.judge()
        except (ConfigError, PeerLost, CommunicatorBroken, CollectiveMismatch):
            raise
        except Exception as error:  # if training fails like this, too, the user sees it there
            log.info("the first batch was not looked at: %s", error)
            return


class Sums:
    """The loss and the metrics of a batch, and of two parts of it.

    Args:
        task, module: copies.
        pieces: the batch, and its parts, if it can be cut: half of the samples, and the others.
        num_samples: of the batch.
        num_calls: as in `FirstBatchCheck`.

    Attributes:
        waiting: the task's methods that have called collectives.
    """

    def __init__(
        self, task: Task, module: nn.Module, pieces: Sequence[Any], num_samples: int, num_calls: Callable[[], int]
    ) -> None:
        self._task, self._module, self._pieces, at = task, module, pieces, num_samples // 2
        self._num_calls, self.waiting = num_calls, set[str]()
        self._rows, self._sizes = (slice(None), slice(at), slice(at, None)), (num_samples, at, num_samples - at)
        self._tolerance, self._warned = _tolerance(module), set[str]()  # the latter: names that were warned of
        self._drawn, self._piece, self._number = list[Tensor | None](), 0, 0  # of `draw`

    def judge(self) -> None:
        """Judges the loss and each metric, and warns once of one that is neither a sum nor a mean.

        Raises:
            ConfigError: one is a mean where a sum is expected, or the other way round; a count does not fit; metrics
                have another form, or lack the main one.
        """
        whole, task = self._figures(0), self._task
        of_parts = [] if self.waiting else [self._figures(piece) for piece in range(1, len(self._pieces))]
        for name, figures in whole.items() if of_parts else ():
            first, second = (of_part[name] for of_part in of_parts)
            is_constant = name and figures == first == second
            if not isinstance(figures, Rows) and not is_constant:
                self._judge(name, figures, first, second)
        means = finished(task, {name: each for name, each in whole.items() if name} or {"loss": whole[""]})
        if task.main_metric not in means:
            raise ConfigError(
                f"{name_of(task)}.main_metric={task.main_metric!r} is not among its metrics, {', '.join(means)}: make "
                "them fit, because it decides which checkpoint is the best"
            )

    def _figures(self, piece: int) -> dict[str, Any]:
        """Returns sum and count of a piece's loss, which has no name, and of its metrics or rows, if there are some."""
        self._piece, self._number, task = piece, 0, self._task
        sums: dict[str, Any] = {"": sum_and_count(task, self._called("loss"))}
        if type(task).metrics is not Task.metrics:
            add_metrics(task, self._called("metrics"), sums)
        elif self.waiting:
            self.waiting.add("metrics")
        return {
            name: each if isinstance(each, Rows) else (float(each[0]), count_of(float(each[1])))
            for name, each in sums.items()
        }

    def _called(self, method: str) -> Any:
        """Returns the result of a method of the task for a piece, and records if it calls collectives."""
        before, batch = self._num_calls(), copy.deepcopy(self._pieces[self._piece])
        found = getattr(self._task, method)(self._module, batch)
        if self._num_calls() > before:
            self.waiting.add(method)
        return found

    def _judge(self, name: str, *sums: tuple[float, float]) -> None:
        """Judges the sums and counts of a metric, or of the loss, which has no name: of the batch, and of its parts."""
        (whole, count), *of_parts = sums
        parts, counts = zip(*of_parts, strict=True)
        task, kind, (num_samples, *sizes) = self._task, name_of(self._task), self._sizes
        where = f"{kind}.metrics[{name!r}]" if name else f"{kind}.loss"
        close = partial(math.isclose, rel_tol=self._tolerance, abs_tol=1e-6)
        adds_up = close(whole, sum(parts)) or not math.isfinite(whole)  # a part may have a mean over no label, 0 ÷ 0

        def mean(weights: Sequence[float]) -> float:
            return float(np.average(parts, weights=weights)) if any(weights) else 0.0

        is_mean = not adds_up and (close(whole, mean(sizes)) or close(whole, mean(counts)))
        times_length = num_samples * sum(part / size for size, part in zip(sizes, parts, strict=True))
        is_sum = not adds_up and close(whole, times_length)
        if isinstance(task, LossFunction) and (is_mean if task.reduction == "sum" else is_sum):
            found = "mean" if is_mean else "sum"
            raise ConfigError(
                f'{kind} returns the {found} of a batch, but reduction="{task.reduction}" was taken: '
                f'say reduction="{found}" (or give the function an attribute `reduction`)'
            )
        if is_mean:
            raise ConfigError(
                f"{where} returned {whole:.4g} for {num_samples} samples, and {parts[0]:.4g} and {parts[1]:.4g} for "
                "two parts of them: a mean, where the sum is expected. Return the sum of its terms, such as "
                "F.cross_entropy(outputs, targets, reduction='sum'), and their number"
            )
        is_whole = all(isinstance(each, int) for each in (count, *counts))
        if not math.isclose(count, sum(counts), rel_tol=0 if is_whole else self._tolerance):
            raise ConfigError(
                f"{where} returned the count {count} for {num_samples} samples, but {counts[0]} and {counts[1]} for "
                "two parts of them: return how many terms are in the sum, such as len(targets)"
            )
        if not adds_up and name not in self._warned:
            self._warned.add(name)
            log.warning(
                "the %s of a batch (%.4g) is not the sum of its parts' %s (%.4g + %.4g), as with class weights, "
                "ignore_index, or losses over pairs of samples. So the result depends on how a batch is cut; to be "
                "exact, give torch's loss itself, as nn.CrossEntropyLoss(ignore_index=0), or a ddp.Task that returns a "
                "sum over samples and its count (with class weights, weight[targets].sum()); for losses over pairs of "
                "the whole batch, gather the outputs of all workers by comm.all_gather, which has a gradient "
                "(docs/losses.md)",
                *(f"metric {name!r}" if name else "loss", whole, "values" if name else "losses", *parts),
            )

    def draw(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        """Puts numbers drawn at random in the place of the model's outputs: of a part, those of the whole batch.

        It is a forward hook of the model.
        """
        return tree_map_only(Tensor, self._drawn_for, outputs)

    def _drawn_for(self, output: Tensor) -> Tensor:
        if not self._piece:
            has_rows = output.is_floating_point() and output.shape[:1] == self._sizes[:1]
            self._drawn.append(_drawn_like(output) if has_rows else None)
        self._number += 1
        drawn = self._drawn[self._number - 1]
        mine = output if drawn is None else drawn[self._rows[self._piece]]
        return mine if mine.shape == output.shape else output  # which has no row for each sample


def _drawn_like(output: Tensor) -> Tensor:
    """Returns random numbers in the range that a loss may ask for: of probabilities, rates, logarithms, or any.

    The last rows are larger, so that the losses of both parts of a batch differ.
    """
    (low, high), drawn = output.aminmax(), torch.randn(output.shape, device=output.device)
    drawn[len(drawn) // 2 :] *= 3
    if low >= 0:
        drawn = drawn.sigmoid() if high <= 1 else drawn.exp()
    elif high <= 0:
        drawn = -drawn.exp()
    return drawn.to(output.dtype)


def _refuse_broadcast(task: Task, module: nn.Module, batch: Any) -> None:
    """Raises ConfigError if a loss function takes all pairs of [n, 1] outputs and [n] targets, say."""
    if not isinstance(task, LossFunction) or not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return
    inputs, targets = batch
    outputs = module(inputs)
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        return
    if outputs.shape == targets.shape or outputs.numel() != targets.numel() or not targets.is_floating_point():
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, which this error replaces
            given, aligned = (float(task.function(each, targets)) for each in (outputs, outputs.reshape(targets.shape)))
    except Exception:  # the function itself aligns them
        return
    if not math.isclose(given, aligned, rel_tol=1e-4, abs_tol=1e-9):
        raise ConfigError(
            f"in {name_of(task.function)} outputs {list(outputs.shape)} and targets {list(targets.shape)} broadcast to "
            "all pairs of them: make their shapes equal, for example with outputs.squeeze(1)"
        )


def _tolerance(module: nn.Module) -> float:
    """Returns the relative tolerance of sums that were added in another order."""
    kinds = {(p.dtype.itemsize, p.device.type) for p in module.parameters() if p.is_floating_point()}
    if any(size < 4 for size, _ in kinds):
        return 5e-2
    return 1e-4 if all(device == "cpu" for _, device in kinds) else 2e-3  # GPUs multiply in TF32


def _cut(batch: Any, num_samples: int, at: int) -> tuple[Any, Any] | None:
    """Returns the first `at` samples of a batch, and the others; None if a part of it is not over samples."""
    parts = _part(batch, slice(None, at), num_samples), _part(batch, slice(at, None), num_samples)
    return None if _WHOLE in tree_leaves(parts[0]) else parts


_WHOLE = object()
"""Placeholder for a value that cannot be cut."""


def _part(value: Any, which: slice, num_samples: int) -> Any:
    """Returns some samples of a batch, or of a part of it."""
    if isinstance(value, Tensor):
        return value[which] if value.dim() and len(value) == num_samples else _WHOLE
    if isinstance(value, Mapping):
        return {key: _part(each, which, num_samples) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        if len(value) == num_samples and not any(isinstance(each, (Tensor, Mapping, tuple, list)) for each in value):
            return value[which]
        parts = [_part(each, which, num_samples) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value if value is None or isinstance(value, (str, int, float, bool)) else _WHOLE


@contextmanager
def _evaluating() -> Iterator[None]:
    """Computes without gradients and compilation; restores the generators."""
    # A compiled model would be compiled again for the parts' sizes. To say so where nothing is compiled would import
    # the compiler, which takes seconds.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with torch.no_grad(), preserved(), eager:
        yield


# --- Layers and losses that read a whole batch ------------------------------------------------------------------------
#
#     BatchNorm                     one value per channel has no variance: torch raises at the first share of one sample
#     SyncBatchNorm                 its forward waits for all ranks, so all need as many forwards
#     track_running_stats=False     both hold in an evaluation, too (`evaluate.py::check_evaluation`)
#     a loss with collectives       it waits as SyncBatchNorm does
#
# Shares of one sample come at the end of an epoch, and only at some world sizes. Whether they are too few depends on
# the model: an image has many values per channel. So the first batch is tried with one sample of it, before the first
# step.


def may_have_one(comm: Communicator, sampler: TrainSampler, *, num_steps: int) -> list[int]:
    """Returns the sizes of steps, of those that may come, in which some rank computes one sample alone. Collective.

    Args:
        num_steps: that are left of the run.
    """
    if isinstance(sampler, IterableSampler):
        return []
    is_short = num_steps < sampler.num_steps_per_epoch
    sizes = sampler.sizes_ahead(num_steps) if is_short else sampler.sizes.all()
    mine = [size for size in sizes if any(len(micro.positions) == 1 for micro in sampler.micros(range(size)))]
    return sorted(set[int]().union(*all_gather_object(comm, mine)))


def try_one_sample(module: nn.Module, one: Any, sizes: list[int]) -> None:
    """Raises ConfigError if the model cannot be trained on a share of one sample, and some step has one.

    Args:
        module: a copy, in the mode of training, in which some layers may be in evaluation mode.
        one: a batch of one sample, whose inputs come first.
        sizes: of the steps with such a share.
    """
    if not sizes or waits(module):
        return
    try:
        module(one[0] if isinstance(one, (tuple, list)) else one)
    except ValueError as error:
        if TOO_FEW in str(error):
            steps = f"a step of size {' or '.join(map(str, sizes[:3]))}"
            raise ConfigError(
                f"in {steps} a worker has a share of one sample, which BatchNorm cannot normalise: {REMEDY}"
            ) from error


def check_waiting(state: TrainState, uneven: Uneven, max_unreadable: int, what: str = "SyncBatchNorm") -> None:
    """Raises ConfigError if layers of the replica, or its loss, would wait for ever."""
    sampler = state.sampler
    if state.comm.world_size > 1:
        if max_unreadable:
            raise ConfigError(
                f"max_unreadable={max_unreadable} with {what}, which waits in each forward for all ranks: one whose "
                "samples cannot be read would make none; leave max_unreadable out"
            )
        is_stream = isinstance(sampler, IterableSampler)
        if is_stream and uneven != "stop_all":
            raise ConfigError(
                f"{what} waits in each forward for all ranks, and at the end of a stream some have no samples: take "
                "uneven='stop_all', which ends with the first"
            )
        sizes = {sampler.global_batch} if is_stream else sampler.sizes.all()
        mine = [sampler.num_micros(size) for size in sorted(sizes)]
        if len(set(map(tuple, all_gather_object(state.comm, mine)))) > 1:
            remedy = "choose a global batch that divides the number of samples, or leave out micro_size"
            if sampler.num_shards % state.comm.world_size:
                remedy = f"leave num_shards={sampler.num_shards} out, or take a multiple of {state.comm.world_size}"
            raise ConfigError(
                f"{what} waits in each forward for all ranks, but in some steps they have different numbers of "
                f"forwards: {remedy}, so that every rank has as many in every step"
            )


def refuse_waiting(task: Task, setting: str) -> Never:
    """Raises ConfigError, because the loss calls collectives, and no worker waits for another one."""
    raise ConfigError(
        f"{name_of(task)} calls collectives, and so waits for the other workers, and with {setting} a worker computes "
        "alone: take strategy='auto', without same_bits"
    )


# --- In debug mode: equal batches -------------------------------------------------------------------------------------


class EqualBatches(BatchCallback):
    """Refuses ranks or loader processes that begin with equal batches, because each of them reads all the data then.

    Args:
        rank: this one.
        num_processes: loader processes of a rank, which take turns; 0: the rank itself loads.
    """

    def __init__(self, rank: int, num_processes: int) -> None:
        self._rank, self._num_processes = rank, num_processes
        self._num_steps = max(1, num_processes)
        self._mine: list[tuple[str, str]] = []  # (digest, who)
        self._seen: dict[str, str] = {}
        self._num_batches = 0

    def __call__(self, module: nn.Module, batch: Any, num_samples: int) -> None:
        """Records a batch of this rank."""
        if self._num_steps:
            process = f", loader process {self._num_batches % self._num_processes}" if self._num_processes else ""
            if (digest := digest_of(batch)) is not None:
                self._mine.append((digest, f"rank {self._rank}{process}"))
            self._num_batches += 1

    def step_end(self, state: TrainState, report: StepReport) -> None:
        if not self._num_steps:
            return
        self._num_steps -= 1
        mine, self._mine = self._mine, []
        for digest, who in (each for theirs in all_gather_object(state.comm, mine) for each in theirs):
            other = self._seen.setdefault(digest, who)
            if other != who:
                raise ConfigError(
                    f"debug: {other} and {who} have begun with equal batches: let each of them read its own "
                    "part of the stream, and let each sample depend on its index"
                )
