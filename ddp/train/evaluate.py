"""Evaluation and prediction: every sample exactly once, at any world size.

The data are cut into V parts, and each part is evaluated by one rank, in batches that lie within it. Parts differ by at
most one sample and may be empty. Of each metric, (sum, count) is added up over the batches of a part, then over all
parts, and divided once: no padding, no mean of means. 13 samples, V = 4 parts, W = 2 ranks, batches of at most 2:

    parts         boundary v at sample v*n//V           0 1 2 |3 4 5 |6 7 8 |9 10 11 12
    ranks         boundary r at part r*V//W             rank 0       |rank 1
    batches       of a part                             01  2 |34  5 |67  8 |9 10  11 12
    sums          in order, the same on every rank    ((part 0 + part 1) + part 2) + part 3

W decides which rank makes a sum, and never which samples are in it. So with one V, metrics have the same bits at any W.
Without a V each rank has one part, which makes the fewest batches, and then the last bits depend on W.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import repeat
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.comm.opening import device_of
from ddp.comm.session import current, on_cpu
from ddp.data.loading.loader import EvaluationLoader, num_evaluation_batches
from ddp.data.loading.source import UNKEYED, Source, fingerprint, source_of
from ddp.data.samples import Collate
from ddp.errors import ConfigError
from ddp.optim.precision import forward_precision
from ddp.process import gpu
from ddp.process.terminal import log
from ddp.replica.replica import Replica, replicas_in
from ddp.replica.sync_batchnorm import waits
from ddp.setting import Precision
from ddp.train.checkpoints.extra_state import loss_modules
from ddp.train.steps.state import loading
from ddp.train.steps.step import to_device
from ddp.train.steps.stopping import StopFlag
from ddp.train.steps.task import Rows, Task, as_task, name_of, outputs_of

_SAY_HOW = "give task=, a ddp.Task whose outputs(model, batch) returns [n, ...] for n samples"
POLL_EVERY = 16  # batches between two polls of the stop flag


def evaluate(
    model: nn.Module,
    data: Any,
    *,
    loss: Task | Callable[[Any, Any], Tensor],
    collate: Collate | None = None,
    batch_size: int = 256,
    num_shards: int | None = None,
    num_workers: int | None = None,
    precision: Precision = "fp32",
    stop: StopFlag | None = None,
    comm: Communicator | None = None,
) -> dict[str, float] | None:
    """Returns the task's metrics over all of `data`. Collective; the same numbers on every rank.

    Args:
        model: a replica, whose buffers become rank 0's first, or any module on the rank's device.
        data, loss: as in `ddp.fit`, all samples on every rank; collate: as in `ddp.Batches`.
        batch_size: most samples per forward and rank; apart from rounding, the result does not depend on it.
        num_shards: parts that the data are cut into; each is evaluated by one rank, in its own batches, and the
            parts' sums are added up in the order of the data, so that metrics have the same bits at any world size.
            None: one per rank, and then the last bits may differ.
        num_workers: processes per rank that prepare batches; None for the DataLoader's number, or 0.
        stop: polled every few batches; once a signal has reached any rank, all ranks give up the evaluation.

    Returns:
        Metric by name; None if the ranks gave up the evaluation.

    Raises:
        ConfigError: there is nothing to evaluate on, other ranks have more of it, or an argument cannot work.
    """
    comm, task = comm or current(device_of(model)), as_task(loss)
    source = _source(comm, data, collate, num_workers)
    if not (num_samples := len(source.samples)):
        raise ConfigError("the data to evaluate on has 0 samples; check its path and its split")
    check_evaluation(model, num_samples, batch_size=batch_size, world_size=comm.world_size, num_shards=num_shards)
    loader = _loader(source, comm, stop, batch_size=batch_size, num_shards=num_shards)
    by_rank = num_evaluation_batches(
        num_samples, batch_size=batch_size, world_size=comm.world_size, num_shards=num_shards
    )
    sums = defaultdict[int, dict[str, Any]](dict)  # by part; a part without samples has none
    with _evaluating(model, task), torch.no_grad():
        batches = iter(zip(loader.parts, loader, strict=True))
        for index in range(max(by_rank)):  # on every rank, because polls are collective
            if stop is not None and index % POLL_EVERY == POLL_EVERY - 1 and comm.agree_any(bool(stop.signal_name)):
                return None
            if (mine := next(batches, None)) is None:
                follow(model)
                continue
            part, batch = mine
            with forward_precision(precision, comm.device):
                metrics = task.metrics(model, to_device(batch, comm.device))
            add_metrics(task, metrics, sums[part])
    totals: dict[str, Any] = {}
    for theirs in all_gather_object(comm, _known([*sums.values()], comm)):  # in rank order, so in that of the parts
        for of_part in theirs:
            add_metrics(task, {name: Rows(*x) if isinstance(x, list) else x for name, x in of_part.items()}, totals)
    return finished(task, totals)


def predict(
    model: nn.Module,
    data: Any,
    *,
    task: Task | None = None,
    collate: Collate | None = None,
    batch_size: int = 256,
    num_shards: int | None = None,
    num_workers: int | None = None,
    precision: Precision = "fp32",
    comm: Communicator | None = None,
) -> Any:
    """Returns the model's output for every sample, in the data set's order, on every rank. Collective.

    Args:
        model, data, collate, batch_size, num_shards, num_workers: as in `evaluate`.
        task: its `outputs` are returned; None: what the model returns for the inputs, the first part of a sample, or
            for the whole sample if that has no parts, as a dict.

    Returns:
        [len(data), ...], on the CPU; a list of len(data) tensors if those of two batches have other shapes, because
        each batch is padded to a length of its own, say; a tuple or a dict of these if the model returns several
        tensors.

    Raises:
        ConfigError: an argument cannot work; or an output is not a tensor with a row for each sample.
    """
    comm = comm or current(device_of(model))
    source = _source(comm, data, collate, num_workers)
    how: dict[str, Any] = {"batch_size": batch_size, "num_shards": num_shards}
    loader = _loader(source, comm, None, **how)
    by_rank = num_evaluation_batches(len(source.samples), world_size=comm.world_size, **how)
    batches: list[list[Tensor]] = []  # of each batch, the tensors of its outputs
    forms: list[_Form] = []
    devices = set[torch.device]()
    with _evaluating(model, task), torch.no_grad():
        for batch in loader:
            with forward_precision(precision, comm.device):
                found = _outputs(model, to_device(batch, comm.device), task)
            form, tensors = _taken_apart(found, model if task is None else task)
            forms += [] if form in forms else [form]
            batches.append(list(map(gpu.leaving, tensors)))
            devices.update(each.device for each in tensors)
        for _ in range(max(by_rank) - by_rank[comm.rank]):
            follow(model)
    for device in devices:
        if device.type == gpu.KIND:
            gpu.cuda.current_stream(device).synchronize()  # once, for all batches
    form, *others = [each for of_rank in all_gather_object(comm, forms) for each in of_rank] or [None]
    if any(each != form for each in others):
        raise ConfigError(f"the outputs are tensors in other dicts or tuples in each batch: {_SAY_HOW}")
    of_outputs = zip(*batches, strict=True) if batches else repeat([])
    return _put_together(form, (_together(comm, each, len(source.samples)) for each in of_outputs))


def follow(model: nn.Module) -> None:
    """Takes part in a forward of an evaluation for which this rank has no samples, if forwards are collective."""
    for replica in replicas_in(model):
        replica.follow_evaluation()


_Form = dict[Any, Any] | list[Any] | None
"""Of outputs: None for a tensor; a dict or a list of forms for a mapping or a sequence."""


def _taken_apart(outputs: Any, by: object) -> tuple[_Form, list[Tensor]]:
    """Returns the form of outputs, and the tensors in them."""
    if isinstance(outputs, (Mapping, tuple, list)):
        keys = outputs.keys() if isinstance(outputs, Mapping) else range(len(outputs))
        parts = {key: _taken_apart(outputs[key], by) for key in keys}
        forms = {key: form for key, (form, _) in parts.items()}
        tensors = [tensor for _, tensors in parts.values() for tensor in tensors]
        return forms if isinstance(outputs, Mapping) else list(forms.values()), tensors
    if not isinstance(outputs, Tensor) or not outputs.dim():
        what = "a tensor of one number" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        name = f"{type(by).__name__}.outputs" if isinstance(by, Task) else "the model"
        raise ConfigError(f"{name} returned {what}, not a tensor with a row for each sample: {_SAY_HOW}")
    return None, [outputs]


def _put_together(form: _Form, tensors: Iterator[Any]) -> Any:
    if form is None:
        return next(tensors)
    if isinstance(form, dict):
        return {key: _put_together(each, tensors) for key, each in form.items()}
    return tuple(_put_together(each, tensors) for each in form)


def _outputs(model: nn.Module, batch: Any, task: Task | None) -> Any:
    """Returns the outputs that `predict` keeps of a batch.

    Raises:
        ConfigError: the model is called in another way.
    """
    try:
        return outputs_of(model, batch) if task is None else task.outputs(model, batch)
    except (AttributeError, TypeError, LookupError, ValueError) as error:
        if task is not None or not isinstance(batch, Mapping):
            raise
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"the data give dicts of {', '.join(map(str, batch))}, and the model cannot be called with one ({cause}): "
            f"{_SAY_HOW}"
        ) from error


def _together(comm: Communicator, batches: Sequence[Tensor], num_samples: int) -> Tensor | list[Tensor]:
    """Returns the rows of all ranks, as one tensor if they have one shape. Collective.

    Raises:
        ConfigError: there is not a row for each sample, or rows have several types.
    """
    found = all_gather_object(comm, [(list(each.shape), each.dtype) for each in batches])
    shapes = [shape for of_rank in found for shape, _ in of_rank]
    dtypes = list(dict.fromkeys(dtype for of_rank in found for _, dtype in of_rank)) or [torch.float32]
    if len(dtypes) > 1:
        raise ConfigError(f"an output is {dtypes[0]} in one batch and {dtypes[1]} in another: make them equal")
    if (num_rows := sum(num for num, *_ in shapes)) != num_samples:
        raise ConfigError(f"the outputs have {num_rows} rows for {num_samples} samples: {_SAY_HOW}")
    mine = torch.cat([each.reshape(-1) for each in batches] or [torch.empty(0, dtype=dtypes[0], device="cpu")])
    host = on_cpu(comm)
    flat = torch.cat(host.all_gather(mine.to(host.device))).cpu()
    if len({tuple(row) for _, *row in shapes}) <= 1:
        return flat.view(num_rows, *(shapes[0][1:] if shapes else ()))
    pieces = flat.split([math.prod(shape) for shape in shapes])
    return [row for piece, shape in zip(pieces, shapes, strict=True) for row in piece.view(shape)]


def _source(comm: Communicator, data: Any, collate: Collate | None, num_workers: int | None) -> Source:
    """Returns the samples, of which each rank will read a part; warns of different ones, unless `fit` has. Collective.

    Raises:
        ConfigError: they cannot be had by index, or ranks have other numbers of them.
    """
    source = source_of(data, what="data", collate=collate, num_workers=num_workers)
    if comm.world_size > 1 and not isinstance(data, Source):
        lengths = all_gather_object(comm, len(source.samples))
        if len(set(lengths)) > 1:
            raise ConfigError(f"data has {lengths} samples by rank: give each rank all samples, not a share of its own")
        if lengths[0]:
            warn_of_other_samples(comm, source, what="data")
    return source


def check_evaluation(
    module: nn.Module, num_samples: int, *, batch_size: int, world_size: int, num_shards: int | None = None
) -> None:
    """Raises ConfigError if ranks would wait for each other in the forwards of an evaluation.

    Args:
        batch_size, num_shards: as in `evaluate`.
    """
    if waits(module, in_evaluation=True):
        how: dict[str, Any] = {"batch_size": batch_size, "world_size": world_size, "num_shards": num_shards}
        refuse_uneven("SyncBatchNorm with track_running_stats=False", "leave that out", num_samples, **how)


def refuse_uneven(
    what: str, remedy: str, num_samples: int, *, batch_size: int, world_size: int, num_shards: int | None
) -> None:
    """Raises ConfigError if ranks have different numbers of forwards in an evaluation, and something waits in each."""
    by_rank = num_evaluation_batches(num_samples, batch_size=batch_size, world_size=world_size, num_shards=num_shards)
    if len(set(by_rank)) > 1:
        raise ConfigError(
            f"{what} waits in each forward for all workers, and in an evaluation of {num_samples} samples, "
            f"{batch_size} at once, {world_size} workers have different numbers of forwards: {remedy}, or take another "
            "batch size of the evaluation (ddp.Evaluation.batch), or another num_shards than "
            f"{world_size if num_shards is None else num_shards}"
        )


def warn_of_other_samples(comm: Communicator, source: Source, *, what: str) -> None:
    """Warns if the ranks' samples are not the same, as after a random split without a seed."""
    prints = all_gather_object(comm, fingerprint(source))
    known = [each for each in prints if each is not None]
    if comm.rank == 0 and UNKEYED in known:
        log.warning(
            "the samples of %s are others each time they are read: they draw from a generator that was not found, so "
            "ranks and loader processes may draw the same, and a resumed run something else. Draw from torch's, "
            "random's or NumPy's own functions, or keep the generator in an attribute of the data set",
            what,
        )
    elif comm.rank == 0 and len(set(known)) > 1:
        log.warning(
            "the samples of %s are not the same on all ranks: a random split, shuffle or choice needs a seed, because "
            "otherwise some samples are read twice, and others never or also held out",
            what,
        )


def _loader(
    source: Source, comm: Communicator, stop: StopFlag | None, *, batch_size: int, num_shards: int | None
) -> EvaluationLoader:
    """Returns this rank's batches, in order."""
    return EvaluationLoader(
        source.samples,
        batch_size=batch_size,
        num_shards=num_shards,
        rank=comm.rank,
        world_size=comm.world_size,
        **loading(source, comm, stop),
    )


@contextmanager
def _evaluating(model: nn.Module, task: Task | None) -> Iterator[None]:
    """Synchronises buffers, and switches model and loss to evaluation mode; restores every submodule's mode afterwards.

    No forward synchronises buffers meanwhile, because a rank with fewer samples makes fewer forwards.
    """
    losses = [] if task is None else loss_modules(task)
    with ExitStack() as stack:
        for replica in replicas_in(model):  # also one inside torch.compile's module
            stack.enter_context(replica.settled())  # makes the ranks' parameters equal
            stack.enter_context(replica.buffers_of_rank_zero())
        for each in (model, *losses):
            stack.enter_context(modes_kept(each))
            each.eval()
        yield


def finished(task: Task, sums: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics to report, from the sums and the rows of all samples.

    Raises:
        ConfigError: one is not a number; the message has its name.
    """
    found = {
        name: torch.cat(each.values) if isinstance(each, Rows) else each[0] / each[1] if each[1] else math.nan
        for name, each in sums.items()
    }
    metrics = dict(task.finish(found))
    for name, value in metrics.items():
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{name_of(task)}.finish returned {' '.join(repr(value).split()):.60} for {name!r}: return a number "
                "for each metric, and leave rows out"
            ) from error
    return metrics


def add_metrics(task: Task, found: Any, sums: dict[str, Any]) -> None:
    """Adds each metric to `sums`: numbers; on a GPU float64 scalars, for which no batch waits; rows as they are.

    Args:
        found: the result of `task.metrics`.

    Raises:
        ConfigError: a metric has another form; the message has its name.
    """
    for name, pair in found.items() if isinstance(found, Mapping) else [("", found)]:
        if isinstance(pair, Rows):
            sums[name] = Rows(*(sums[name].values if name in sums else ()), *pair.values)
            continue
        try:
            total, count = (each.double().reshape(()) if _is_on_gpu(each) else float(each) for each in pair)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{name_of(task)}.metrics returned {' '.join(repr(pair).split()):.60} for {name!r}: return a sum and "
                'its count for each, two numbers, such as {"accuracy": (right.sum(), len(right))}'
            ) from error
        before = sums.get(name, (0.0, 0.0))
        sums[name] = before[0] + total, before[1] + count


def _known(sums: Sequence[Mapping[str, Any]], comm: Communicator) -> list[dict[str, Any]]:
    """Returns the sums of parts as numbers: all that are on a GPU by one copy; and rows as lists of tensors."""
    pairs = [pair for of_part in sums for pair in of_part.values() if not isinstance(pair, Rows)]
    there = [each for pair in pairs for each in pair if _is_on_gpu(each)]
    copied = iter(comm.to_host(*there).read() if there else ())

    def known(metric: Any) -> Any:
        if isinstance(metric, Rows):
            return [each.cpu() for each in metric.values]
        return tuple(next(copied)[0] if _is_on_gpu(each) else float(each) for each in metric)

    return [{name: known(metric) for name, metric in of_part.items()} for of_part in sums]


def _is_on_gpu(each: Any) -> TypeGuard[Tensor]:
    return isinstance(each, Tensor) and each.device.type == gpu.KIND


def switch_to_training(model: Replica) -> None:
    """Switches a model to the mode of training, but not the layers that were put into evaluation mode by themselves.

    A model that is in evaluation mode as a whole, as one that was loaded, is trained in all of its layers.
    """
    frozen = [each for each in model.module.modules() if not each.training] if model.module.training else []
    model.train()  # also where a module switches some layers back itself
    for layer in frozen:
        layer.training = False


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restores the mode of every layer at the end of the block."""
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
