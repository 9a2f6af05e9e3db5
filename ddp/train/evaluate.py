"""Evaluation and prediction: every sample exactly once, whatever the world size; and the held-out samples of a run.

The data are cut into V parts, and each part is evaluated by one rank, in batches that lie within it. Parts differ by at
most one sample and may be empty. Of each metric, (sum, count) is added up over the batches of a part, then over all
parts, and divided once: no padding, no mean of means. 13 samples, V = 4 parts, W = 2 ranks, batches of at most 2:

    parts         boundary v at sample v*n//V           0 1 2 |3 4 5 |6 7 8 |9 10 11 12
    ranks         boundary r at part r*V//W             rank 0       |rank 1
    batches       of a part                             01  2 |34  5 |67  8 |9 10  11 12
    sums          in order, on every rank alike       ((part 0 + part 1) + part 2) + part 3

W says who makes a sum, and never what is in it. So with one V, metrics have the same bits at any W. Without a V each
rank has one part, which makes the fewest batches, and then the last bits depend on W.
"""

from __future__ import annotations

import math
import numbers
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ddp import gpu
from ddp.comm.communicator import Communicator
from ddp.comm.device import device_of
from ddp.comm.objects import all_gather_object
from ddp.comm.session import current, on_cpu
from ddp.data.loading.loader import EvaluationLoader, num_evaluation_batches
from ddp.data.loading.source import Source, source_of
from ddp.data.samples import Collate
from ddp.data.sets.validation import choose, selection_of
from ddp.errors import ConfigError
from ddp.optim.precision import forward_precision
from ddp.replica.replica import replicas_in
from ddp.setting import Precision
from ddp.train.batch_statistics import check_evaluation
from ddp.train.callbacks import Callback, EarlyStopping
from ddp.train.kept import loss_modules
from ddp.train.state import TrainState, limits_of
from ddp.train.step import to_device
from ddp.train.stopping import StopFlag
from ddp.train.tasks.task import Task, as_task, outputs_of

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
        data, loss: as in `ddp.fit`; collate: as in `ddp.Batches`.
        batch_size: most samples per forward and rank; apart from rounding, the result does not depend on it.
        num_shards: parts that the data are cut into; each is evaluated by one rank, in batches of its own, and the
            parts' sums are added up in the order of the data, so that metrics have the same bits at any world size.
            None: one per rank, and then the last bits may differ.
        num_workers: processes per rank that prepare batches; None for the DataLoader's number, or 0.
        stop: polled every few batches; once a signal has reached any rank, all ranks give up the evaluation.

    Returns:
        Metric by name; None if the ranks gave up the evaluation.

    Raises:
        ConfigError: there is nothing to evaluate on, or an argument cannot work.
    """
    comm, task = comm or current(device_of(model)), as_task(loss)
    source = source_of(data, what="data", collate=collate, num_workers=num_workers)
    if not (num_samples := len(source.samples)):
        raise ConfigError("the data to evaluate on has 0 samples; check its path and its split")
    check_evaluation(model, num_samples, batch_size=batch_size, world_size=comm.world_size, num_shards=num_shards)
    loader = _loader(source, comm, stop, batch_size=batch_size, num_shards=num_shards)
    by_rank = num_evaluation_batches(
        num_samples, batch_size=batch_size, world_size=comm.world_size, num_shards=num_shards
    )
    sums = defaultdict[int, dict[str, tuple[Any, Any]]](dict)  # by part; a part without samples has none
    with _evaluating(model, task), torch.no_grad():
        batches = iter(zip(loader.parts, loader, strict=True))
        for index in range(max(by_rank)):  # on every rank, because polls are collective
            if stop is not None and index % POLL_EVERY == POLL_EVERY - 1 and comm.agree_any(bool(stop.signal_name)):
                return None
            if (mine := next(batches, None)) is None:
                continue
            part, batch = mine
            with forward_precision(precision, comm.device):
                metrics = task.metrics(model, to_device(batch, comm.device))
            _add(metrics, sums[part])
    totals: dict[str, tuple[Any, Any]] = {}
    for theirs in all_gather_object(comm, _known([*sums.values()], comm)):  # in rank order, so in that of the parts
        for of_part in theirs:
            _add(of_part, totals)
    return task.finish({name: total / count if count else math.nan for name, (total, count) in totals.items()})


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
) -> Tensor:
    """Returns the model's output for every sample, in the data set's order, on every rank. Collective.

    Args:
        model, data, collate, batch_size, num_shards, num_workers: as in `evaluate`.
        task: its `outputs` are returned; None: what the model returns for the inputs, the first part of a sample, or
            for the whole sample if that has no parts, as a dict.

    Returns:
        [len(data), ...], on the CPU.

    Raises:
        ConfigError: an argument cannot work; or the outputs are not one tensor with a row for each sample.
    """
    comm = comm or current(device_of(model))
    source = source_of(data, what="data", collate=collate, num_workers=num_workers)
    loader = _loader(source, comm, None, batch_size=batch_size, num_shards=num_shards)
    outputs: list[Tensor] = []
    devices = set[torch.device]()
    with _evaluating(model, task), torch.no_grad():
        for batch in loader:
            with forward_precision(precision, comm.device):
                found = _outputs(model, to_device(batch, comm.device), task)
            outputs.append(gpu.leaving(found))
            devices.add(found.device)
    for device in devices:
        if device.type == gpu.KIND:
            gpu.cuda.current_stream(device).synchronize()  # once, for all batches
    shape, dtype = _kind(comm, outputs, num_samples=len(source.samples))
    mine = torch.cat(outputs) if outputs else torch.empty(0, *shape, dtype=dtype, device="cpu")
    beside = on_cpu(comm)
    return torch.cat(beside.all_gather(mine.to(beside.device))).cpu()


def _outputs(model: nn.Module, batch: Any, task: Task | None) -> Tensor:
    """Returns the outputs that `predict` keeps of a batch.

    Raises:
        ConfigError: the model is called in another way, or returns something else.
    """
    try:
        found: Any = outputs_of(model, batch) if task is None else task.outputs(model, batch)
    except (AttributeError, TypeError, LookupError, ValueError) as error:
        if task is not None or not isinstance(batch, Mapping):
            raise
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"the data give dicts of {', '.join(map(str, batch))}, and the model cannot be called with one ({cause}): "
            f"{_SAY_HOW}"
        ) from error
    if not isinstance(found, Tensor) or not found.dim():
        what = "a tensor of one number" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        by = "the model" if task is None else f"{type(task).__name__}.outputs"
        raise ConfigError(f"{by} returned {what}, not a tensor with a row for each sample: {_SAY_HOW}")
    return found


def _kind(comm: Communicator, outputs: Sequence[Tensor], *, num_samples: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Returns shape and type of a row, which are the same in all batches of all ranks; raises ConfigError if not."""
    mine = list(dict.fromkeys((tuple(each.shape[1:]), each.dtype) for each in outputs))
    found = all_gather_object(comm, (mine, sum(map(len, outputs))))
    kinds = list(dict.fromkeys(kind for kinds, _ in found for kind in kinds))
    if len(kinds) > 1:
        (one, of_one), (other, of_other) = kinds[:2]
        raise ConfigError(
            f"the outputs of one sample are {list(one)} of {of_one} in one batch and {list(other)} of {of_other} in "
            f"another: make them alike, as by padding all samples to one length; or {_SAY_HOW}"
        )
    if (num_rows := sum(num for _, num in found)) != num_samples:
        raise ConfigError(f"the outputs have {num_rows} rows for {num_samples} samples: {_SAY_HOW}")
    return kinds[0] if kinds else ((), torch.float32)


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
        collate=source.collate,
        num_workers=source.num_workers,
        device=comm.device,
        processes=source.processes,
        limits=limits_of(comm, stop),
    )


@contextmanager
def _evaluating(model: nn.Module, task: Task | None) -> Iterator[None]:
    """Synchronises buffers, and switches model and loss to evaluation mode; restores every submodule's mode afterwards.

    No forward synchronises buffers meanwhile, because a rank with fewer samples makes fewer forwards.
    """
    losses = [] if task is None else loss_modules(task)
    with ExitStack() as stack:
        for replica in replicas_in(model):  # also one inside torch.compile's module
            replica.sync_buffers()
            stack.enter_context(replica.without_buffer_sync())
        for each in (model, *losses):
            stack.enter_context(modes_kept(each))
            each.eval()
        yield


def _add(metrics: Mapping[str, tuple[float | Tensor, float | Tensor]], sums: dict[str, tuple[Any, Any]]) -> None:
    """Adds the (sum, count) of each metric to `sums`: numbers; on a GPU float64 scalars, which no batch waits for."""
    for name, pair in metrics.items():
        total, count = (each.double().reshape(()) if _is_on_gpu(each) else float(each) for each in pair)
        before = sums.get(name, (0.0, 0.0))
        sums[name] = before[0] + total, before[1] + count


def _known(sums: Sequence[Mapping[str, tuple[Any, Any]]], comm: Communicator) -> list[dict[str, tuple[float, float]]]:
    """Returns the sums of parts as numbers: all that are on a GPU by one copy."""
    there = [each for of_part in sums for pair in of_part.values() for each in pair if _is_on_gpu(each)]
    copied = iter(comm.to_host(*there).read() if there else ())

    def known(each: float | Tensor) -> float:
        return next(copied)[0] if _is_on_gpu(each) else float(each)

    return [{name: (known(total), known(count)) for name, (total, count) in of_part.items()} for of_part in sums]


def _is_on_gpu(each: Any) -> TypeGuard[Tensor]:
    return isinstance(each, Tensor) and each.device.type == gpu.KIND


# --- The held-out samples of a run -----------------------------------------------------------------------------------
#
#     validation_data   test_data     while the run goes on     at its end     `state.main_metric`
#     given             given         validation                test           validation_loss, say
#     given             none          validation                               validation_loss
#     none              given         test                                     test_loss; the run says so at its end
#     none              none                                                   nothing can choose
#
# This is the one place that decides it. Whatever chooses (the best checkpoint, ReduceLROnPlateau, `ddp.EarlyStopping`,
# a callback of the user's own) reads `state.evaluation[state.main_metric]`.


Side = Literal["validation", "test"]


class HeldOut(NamedTuple):
    """The held-out samples of a run; None where there are none."""

    validation: Source | None
    test: Source | None

    @property
    def chooser(self) -> Side:
        """Returns the side that the run chooses by, if there is one."""
        return "test" if self.validation is None else "validation"

    @property
    def is_evaluated(self) -> bool:
        """Returns True if there are samples to evaluate on while the run goes on."""
        return self.side(self.chooser) is not None

    @property
    def is_reported(self) -> bool:
        """Returns True if there are samples for the report alone."""
        return self.validation is not None and self.test is not None

    def side(self, side: Side) -> Source | None:
        """Returns the samples of a side."""
        return self.validation if side == "validation" else self.test

    def given(self) -> dict[str, Source]:
        """Returns the samples by the name of their argument."""
        both = {"validation_data": self.validation, "test_data": self.test}
        return {name: source for name, source in both.items() if source is not None}


def note_of_choice(state: TrainState, held_out: HeldOut, callbacks: Sequence[Callback], *, saves: bool) -> str:
    """Returns a sentence that says so if the run has chosen by the test set; else ""."""
    plateau = state.schedule is not None and state.schedule.needs_metric
    chosen = {"the best checkpoint": saves, "the learning rate": plateau}
    chosen["the end of the run"] = any(isinstance(each, EarlyStopping) for each in callbacks)
    if held_out.chooser != "test" or held_out.test is None or not any(chosen.values()):
        return ""
    what = " and ".join(each for each, is_chosen in chosen.items() if is_chosen)
    return (
        f"chosen by {state.main_metric}: {what}; with validation_data (data.validation=0.1) the test set is for the "
        "report alone"
    )


def held_out_of(
    source: Source, validation_data: Any, test_data: Any, *, collate: Collate | None, seed: int
) -> tuple[Source, HeldOut]:
    """Returns the samples that are left to train on, and the held-out ones.

    Args:
        source: all training samples.
        validation_data, test_data, seed: as in `ddp.fit`.

    Raises:
        ConfigError: some have no sample, or cannot be had by index.
    """
    test = _read_alike(test_data, source, collate, what="test_data")
    if not isinstance(validation_data, numbers.Real):
        return source, HeldOut(_read_alike(validation_data, source, collate, what="validation_data"), test)
    share = float(validation_data)
    _check_share(share, source)
    train, validation, words = choose(len(source.samples), share, seed=seed, what="validation_data")
    apart = source._replace(samples=selection_of(source.samples, validation, set_apart=words), drop_last=False)
    return source._replace(samples=selection_of(source.samples, train, set_apart=words)), HeldOut(apart, test)


def _check_share(share: float, source: Source) -> None:
    """Raises ConfigError if no share of the training samples can be set apart."""
    if not 0 < share < 1:
        raise ConfigError(f"validation_data={share:g}: give a share between 0 and 1, or a data set")
    if source.is_stream:
        raise ConfigError(
            f"validation_data={share:g}: data is a stream, which has no shares; give a data set of its own"
        )
    if source.order is not None:
        raise ConfigError(
            f"validation_data={share:g}: the sampler of the DataLoader chooses among all samples; give a data set"
        )


def _read_alike(data: Any, source: Source, collate: Collate | None, *, what: str) -> Source | None:
    """Returns held-out samples, which are read as the training samples are, unless they are in a DataLoader.

    Raises:
        ConfigError: there are none, or they cannot be had by index.
    """
    if data is None:
        return None
    found = source_of(data, what=what, collate=collate)
    if not len(found.samples):
        raise ConfigError(f"{what} has 0 samples; check its path and its split, or leave it out")
    if isinstance(data, DataLoader):
        return found
    return found._replace(
        collate=found.collate or source.collate, num_workers=source.num_workers, processes=source.processes
    )


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restores the mode of every layer at the end of the block."""
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
