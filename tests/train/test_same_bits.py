"""same_bits=True: any number of workers ends with the same parameters, losses and metrics, bit by bit.

A member is a way to train. Each is trained once on 1, 2, 3 and 4 ranks, all in one launch for each number of ranks. For
every mutant, a way of adding up that depends on who computes what, the same comparison must fail.

Tests: ddp/replica/by_shards.py, ddp/replica/shard_buffers.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flat import grouped
from ranks import RankFailed, collect, run_ranks, start_ranks, unfailed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

import ddp
from ddp.collectives.shards import TreeSlot
from ddp.data.orders.sampler import StepPlan
from ddp.errors import ConfigError
from ddp.gradients import ErrorFeedback, Sign
from ddp.gradients.bucket import Bucket
from ddp.optim import precision
from ddp.replica.broadcast import tensor_hash
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import StepReport, TrainState

WORLD_SIZES = (1, 2, 3, 4)
NUM_SAMPLES, BATCH, NUM_STEPS = 41, 18, 4  # steps of 18, 18 and 5 samples: fewer than shards
INPUTS = torch.randn(NUM_SAMPLES, 12, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(1))
HELD_OUT = INPUTS[:29] * 1.3 + 0.1, CLASSES[:29]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 35), nn.Tanh(), nn.Linear(35, 3))


def dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 40), nn.ReLU(), nn.Dropout(0.3), nn.Linear(40, 35), nn.Dropout(0.2), nn.Linear(35, 3)
    )


def normalised() -> nn.Module:
    """BatchNorm over positions, so that a shard of one sample is enough."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 12)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(),
        nn.Linear(40, 3),
    )  # fmt: skip


class Tied(nn.Module):
    """One weight serves two layers, and another is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(12, 20), nn.Linear(20, 20), nn.Linear(20, 3)
        self.second.weight.requires_grad_(False)
        self.third = nn.Linear(20, 20)
        self.fourth = nn.Linear(20, 20, bias=False)
        self.fourth.weight = self.third.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).tanh())
        return self.last(self.fourth(self.third(x).tanh()))


class InFiles(Dataset[Any]):
    """Lies in eight files, so that each shard has one in an epoch."""

    file_sizes = (5,) * 8

    def __len__(self) -> int:
        return sum(self.file_sizes)

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index], CLASSES[index]


class Damaged(Dataset[Any]):
    """Nine samples cannot be read."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index % 5 == 3:
            raise OSError(f"sample {index} cannot be read")
        return INPUTS[index], CLASSES[index]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def lamb(parameters: Any) -> torch.optim.Optimizer:
    return ddp.optim.LAMB(parameters, lr=0.01)


Member = dict[str, Any]
FIRST_SCALE = 1 << 24
MEMBERS: dict[str, Member] = {
    "sgd": {},
    "adamw": {"optimizer": adamw},
    "lamb": {"optimizer": lamb},
    "clipped": {"clip_norm": 0.5},
    "bf16": {"precision": "bf16"},
    "bf16_pure": {"precision": "bf16_pure", "optimizer": adamw},
    "fp16": {"precision": "fp16", "make": normalised},
    "wire bf16": {"wire": "bf16"},
    "wire int8": {"wire": "int8_stochastic", "optimizer": adamw},
    "dropout": {"make": dropout},
    "batch norm": {"make": normalised, "optimizer": adamw},
    "micro-batches": {"make": normalised, "micro_size": 1},
    "5 shards": {"make": normalised, "num_shards": 5, "micro_size": 3},
    "11 shards": {"make": dropout, "num_shards": 11},
    "a growing batch": {"make": dropout, "global_batch": ddp.BatchWarmup(8, 18, 60), "max_steps": 5},
    "a token budget": {"make": dropout, "global_batch": ddp.data.TokenBudget(70, np.arange(NUM_SAMPLES) % 7 + 1)},
    "files": {"make": dropout, "data": InFiles(), "sharding": "file", "global_batch": 19},
    "tied and frozen": {"make": Tied},
    "unreadable samples": {"make": normalised, "data": Damaged(), "max_unreadable": 9, "micro_size": 1},
    "noise scale": {"make": dropout, "noise_scale_every": 1, "micro_size": 2},
    "everything": {
        "make": normalised, "optimizer": adamw, "clip_norm": 0.3, "precision": "fp16", "micro_size": 2,
        "noise_scale_every": 2, "num_shards": 7, "schedule": lambda done, of: 50 / (done + 50),
    },
}  # fmt: skip
TWINS = {  # other strategies, which must have the bits of the same member
    "everything": ("sharded", "central_storage"),
    "adamw": ("sharded", "central_storage", "fully_sharded"),
    "lamb": ("sharded", "central_storage", "fully_sharded"),
    "sgd": ("sharded", "central_storage"),
    **dict.fromkeys(("clipped", "fp16", "wire bf16", "11 shards", "tied and frozen", "files"), ("fully_sharded",)),
}
OVER_LINKS = ("batch norm",)


def members_on(world_size: int) -> list[str]:
    """Returns the members that so many ranks train; those of three have most kinds of nodes."""
    return [name for name in MEMBERS if world_size < 4 or name in ("everything", "batch norm", "11 shards")]


def twins_on(world_size: int) -> list[tuple[str, str]]:
    twins = [(name, strategy) for name, strategies in TWINS.items() for strategy in strategies]
    return {1: [], 3: twins}.get(world_size, [*twins[:4], ("adamw", "fully_sharded")])


# --- one run ---------------------------------------------------------------------------------------------------------


class Recorder(Callback):
    """Keeps all figures of the steps and evaluations, exactly."""

    def __init__(self) -> None:
        self.figures: list[tuple[Any, ...]] = []

    def step_end(self, state: TrainState, report: StepReport) -> None:
        parts = None if report.parts is None else tuple(float(each).hex() for each in report.parts)
        numbers = (report.loss, report.gradient_norm or 0.0, report.rate, float(report.num_items))
        self.figures.append((report.step, *(float(each).hex() for each in numbers), parts))

    def evaluated(self, state: TrainState) -> None:
        self.figures.append(tuple((name, value.hex()) for name, value in state.evaluation.items()))


def fitted(
    *, make: Callable[[], nn.Module] = plain, optimizer: Callable[[Any], torch.optim.Optimizer] = sgd, **how: Any
) -> list[Any]:
    """Returns everything that a run ends with, as it can be compared: figures, parameters, buffers."""
    torch.manual_seed(1)
    model, recorder = make(), Recorder()
    settings: dict[str, Any] = {
        "data": (INPUTS, CLASSES), "loss": F.cross_entropy, "global_batch": BATCH, "max_steps": NUM_STEPS, "seed": 3,
        "validation_data": HELD_OUT, "batch": 4, "every_steps": 3, "folder": None, "progress": False,
    }  # fmt: skip
    settings |= how
    evaluation = ddp.Evaluation(batch=settings.pop("batch"), every_steps=settings.pop("every_steps"))
    data, callbacks = settings.pop("data"), [recorder, *settings.pop("callbacks", ())]
    given = grouped(callbacks=callbacks, same_bits=True, **settings)
    state = ddp.fit(model, data, optimizer(model.parameters()), evaluation=evaluation, **given)
    state.model.verify_replicas()
    assert state.train_loss is not None
    tensors = {name: tensor_hash(each) for name, each in state.model.state_dict().items()}
    last = {name: value.hex() for name, value in state.evaluation.items()}
    scale = state.strategy.loss_scale
    numbers = state.train_loss.hex(), last, len(state.unreadable), None if scale is None else scale.value
    return [recorder.figures, numbers, tensors]


@cache
def with_overflows() -> None:
    """Lets the loss scale begin so high that some steps are repeated."""
    precision.FIRST = precision.LARGEST = FIRST_SCALE


def members() -> dict[str, Any]:
    """Trains every member, and some for each mutant; what they end with by name."""
    comm = ddp.init(abort_s=30)
    with_overflows()
    found: dict[str, Any] = {}
    for name in members_on(comm.world_size):
        found[name] = told(partial(fitted, **MEMBERS[name]), name)
    for name, strategy in twins_on(comm.world_size):
        found[f"{name}, {strategy}"] = told(partial(fitted, **MEMBERS[name], strategy=strategy), name)
    for name, (mutate, how, world_size) in MUTANTS.items():
        if comm.world_size not in (1, world_size):
            continue
        with pytest.MonkeyPatch.context() as patch:
            mutate(patch, comm)
            found[name] = told(partial(fitted, **how), name)
    ddp.shutdown()
    if comm.world_size in (2, 3):
        ddp.init(abort_s=30, shared_memory=False, algorithm="tree")
        found |= {f"{name}, over links": told(partial(fitted, **MEMBERS[name]), name) for name in OVER_LINKS}
        ddp.shutdown()
    return found


def told(run: Callable[[], Any], name: str) -> Any:
    try:
        return run()
    except BaseException as error:
        error.add_note(f"in the case {name}")
        raise


@cache
def results_of(world_size: int) -> list[dict[str, Any] | RankFailed]:
    return collect(start_ranks(members, world_size))


def found_by(world_size: int) -> list[dict[str, Any]]:
    return unfailed(results_of(world_size))


def runs() -> Iterator[tuple[str, str, int]]:
    """Yields what is compared with the member on one rank: its name, a suffix, and the number of ranks."""
    for world_size in WORLD_SIZES:
        yield from ((name, "", world_size) for name in members_on(world_size))
        yield from ((name, f", {strategy}", world_size) for name, strategy in twins_on(world_size))
        yield from ((name, ", over links", world_size) for name in OVER_LINKS if world_size in (2, 3))


@pytest.mark.parametrize(("name", "suffix", "world_size"), [*runs()])
@pytest.mark.quick(2)
def test_any_number_of_workers_has_the_same_bits(name: str, suffix: str, world_size: int) -> None:
    alone = found_by(1)[0][name]
    for found in found_by(world_size):
        for ours, expected in zip(found[name + suffix], alone, strict=True):
            assert ours == expected


def test_members_are_what_their_names_say() -> None:
    """Else their bits would be the same for nothing."""
    (found,) = found_by(1)
    assert len({str(found[name][-1]) for name in MEMBERS}) == len(MEMBERS)
    assert {name for name in MEMBERS if (found[name][1][3] or FIRST_SCALE) < FIRST_SCALE} == {"fp16", "everything"}
    assert found["unreadable samples"][1][2] == sum(index % 5 == 3 for index in range(NUM_SAMPLES))
    parts = [figures[-1] for figures in found["noise scale"][0] if len(figures) == 6]
    assert len(parts) == NUM_STEPS and all(parts)
    norms = [float.fromhex(figures[2]) for figures in found["clipped"][0] if len(figures) == 6]
    assert min(norms) < 0.5 < max(norms)


# --- mutants ---------------------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def chain_in_places(patch: Patch, comm: Any) -> None:
    """Another bracket: a rank adds each shard to the sum of those before."""

    def chain(shards: range, num_shards: int) -> dict[int, TreeSlot]:
        return {shard: TreeSlot(int(shard > shards.start), int(shard > shards.start)) for shard in shards}

    patch.setattr("ddp.replica.by_shards.places", chain)


def chain_over_ranks(patch: Patch, comm: Any) -> None:
    """Another order across ranks: their nodes are added one after the other."""

    def chain(num_ranks: int, num_shards: int) -> list[tuple[int, int]]:
        from ddp.collectives.shards import nodes_by_rank

        return [(0, number) for number in range(1, sum(map(len, nodes_by_rank(num_ranks, num_shards))))]

    patch.setattr("ddp.comm.host_reduce.additions_between", chain)


def mean_before_the_sum(patch: Patch, comm: Any) -> None:
    """Each rank divides what it has."""
    from ddp.gradients.reducer import AllReduce

    reduce = AllReduce.reduce

    def divided_first(self: AllReduce, bucket: Bucket, *, divide_by: Any, **how: Any) -> Any:
        bucket.rows.div_(int(divide_by))
        return reduce(self, bucket, divide_by=1, **how)

    patch.setattr(AllReduce, "reduce", divided_first)


def dropout_by_rank(patch: Patch, comm: Any) -> None:
    """From the second step on: the audit of the first would find it."""
    from ddp.train.steps import step

    stream = step.dropout_stream
    patch.setattr(step, "dropout_stream", lambda seed, *where: stream(seed + comm.rank * (where[0] > 0), *where))


def empty_shards_are_skipped(patch: Patch, comm: Any) -> None:
    """The next one takes the place of an empty shard."""
    from ddp.train.steps import step

    backward = step.backward

    def renumbered(state: TrainState, rules: Any, plan: StepPlan, *rest: Any) -> None:
        there = sorted({micro.shard for micro in plan.micros})
        number = dict(zip(there, state.model.shards, strict=False))
        micros = tuple(micro._replace(shard=number[micro.shard]) for micro in plan.micros)
        backward(state, rules, plan._replace(micros=micros), *rest)

    patch.setattr(step, "backward", renumbered)


def buffers_of_rank_0(patch: Patch, comm: Any) -> None:
    from ddp.replica.shard_buffers import ShardBuffers

    end_step = ShardBuffers.end_step

    def of_rank_0(self: ShardBuffers) -> None:
        for sums in self._levels.nodes if comm.rank else ():
            sums.clear()
        end_step(self)

    patch.setattr(ShardBuffers, "end_step", of_rank_0)


def buffers_run_on(patch: Patch, comm: Any) -> None:
    """Each shard begins with the buffers of the one before."""
    patch.setattr("ddp.replica.shard_buffers.ShardBuffers._set", lambda self, names: None)


def norms_by_rank(patch: Patch, comm: Any) -> None:
    """The figures of the noise scale are those of a rank's own shards, not of certain ones."""
    from ddp.replica.by_shards import ByShards

    patch.setattr(ByShards, "_measures", property(lambda self: self.running == self.shards.start))


def evaluated_by_rank(patch: Patch, comm: Any) -> None:
    from ddp.train import held_out

    evaluate = held_out.evaluate
    patch.setattr(held_out, "evaluate", lambda *given, **how: evaluate(*given, **{**how, "num_shards": None}))


Mutate = Callable[[Patch, Any], None]
MUTANTS: dict[str, tuple[Mutate, Member, int]] = {  # by whom the bits of one rank and of how many are compared
    mutate.__name__: (mutate, how, world_size)
    for mutate, how, world_size in (
        (chain_in_places, {}, 2),
        (chain_over_ranks, {"num_shards": 10}, 3),  # of which no other member keeps the additions
        (mean_before_the_sum, {}, 2),
        (dropout_by_rank, MEMBERS["dropout"], 2),
        (empty_shards_are_skipped, {}, 2),
        (buffers_of_rank_0, MEMBERS["batch norm"], 2),
        (buffers_run_on, MEMBERS["batch norm"], 2),
        (norms_by_rank, MEMBERS["noise scale"], 2),
        (evaluated_by_rank, {}, 2),
    )
}
FIGURES_ALONE = ("norms_by_rank", "evaluated_by_rank")


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.quick(1)
def test_mutants_have_other_bits(mutant: str) -> None:
    alone, other = (found_by(world_size)[0][mutant] for world_size in (1, MUTANTS[mutant][2]))
    assert (other[-1] != alone[-1]) == (mutant not in FIGURES_ALONE)
    assert other != alone


# --- resumes, with other numbers of workers --------------------------------------------------------------------------


def part_of_a_run(folder: str, max_steps: int, whole: str = "") -> tuple[list[Any], list[Any]]:
    ddp.init(abort_s=30)
    with_overflows()
    how: dict[str, Any] = {**MEMBERS["everything"], "global_batch": ddp.BatchWarmup(9, 18, 50), "resume": "auto"}
    how |= {"curves": False, "checkpoint_every_steps": 2}
    found = fitted(**how, folder=folder, max_steps=max_steps, callbacks=[ddp.EMA(0.9)], epochs=4)
    uninterrupted = fitted(**how, folder=whole, max_steps=9, callbacks=[ddp.EMA(0.9)], epochs=4) if whole else []
    ddp.shutdown()
    return found, uninterrupted


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_numbers_of_workers_has_the_same_bits(tmp_path: Path) -> None:
    folder = str(tmp_path / "parts")
    parts, whole = list[Any](), list[Any]()
    for world_size, max_steps in ((1, 3), (3, 6), (2, 9)):
        ((part, uninterrupted), *_) = run_ranks(
            part_of_a_run, world_size, folder, max_steps, str(tmp_path / "whole") if world_size == 1 else ""
        )
        parts, whole = [*parts, part], whole or uninterrupted
    steps = [figures for part in parts for figures in part[0] if len(figures) == 6]
    assert steps == [figures for figures in whole[0] if len(figures) == 6]
    assert parts[-1][1:] == whole[1:]


# --- what is refused -------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(INPUTS[0], CLASSES[0])] * 40)


def with_sync_batchnorm() -> nn.Module:
    return ddp.SyncBatchNorm.convert(normalised())


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(3, 5, sparse=True), nn.Linear(5, 3))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "local_sgd": ({"strategy": "local_sgd"}, "same_bits=True with strategy=.local_sgd.: .* take strategy=.auto., sha"),
    "servers": ({"strategy": "parameter_server"}, "with strategy=.parameter_server.: its updates"),
    "hook": ({"hook": ErrorFeedback(Sign())}, r"same_bits=True with hook=ErrorFeedback\(Sign\(\)\): .* leave it out"),
    "wire": ({"wire": "fp32"}, "same_bits=True with wire='fp32': .* leave it out"),
    "SyncBatchNorm": ({"make": with_sync_batchnorm}, "same_bits=True with SyncBatchNorm: .* take BatchNorm"),
    "sparse": (
        {"make": sparse, "data": (CLASSES, CLASSES)},
        "same_bits=True with sparse gradients: .* take sparse=False",
    ),
    "stream": ({"data": Stream()}, "same_bits=True: .* a stream of samples .* give a data set with a length"),
    "few shards": ({"num_shards": 1}, "num_shards=1"),
    "a batch that begins small": (
        {"global_batch": ddp.BatchWarmup(4, 18, 60)},
        "num_shards=8: more shards than the 4 samples of a batch; take a global_batch of 8 or more",
    ),
    "a word": ({"same_bits": "yes"}, "same_bits='yes': give True, or a ddp.SameBits"),
}


def refusals() -> None:
    ddp.init(abort_s=30)
    for name, (how, said) in REFUSED.items():
        if "same_bits" in how:
            with pytest.raises(ConfigError, match=said):
                ddp.fit(
                    plain(), (INPUTS, CLASSES), sgd(plain().parameters()), loss=F.cross_entropy, global_batch=9,
                    epochs=1, **how,
                )  # fmt: skip
            continue
        try:
            fitted(**{"validation_data": None, **how})
        except ConfigError as error:
            assert re.search(said, str(error)), f"{name}: {error}"
        else:
            raise AssertionError(f"{name} is not refused")
    replicas()
    ddp.shutdown()


def replicas() -> None:
    """A replica must add up by as many shards as the run."""
    for wrap, said in (
        (ddp.BucketedDataParallel, "a BucketedDataParallel with num_shards=None: fit the bare module, or a ddp.Buck"),
        (partial(ddp.BucketedDataParallel, num_shards=4), "with num_shards=4: fit the bare"),
        (ddp.NaiveDataParallel, "same_bits=True with a ddp.NaiveDataParallel: shards are added up in buckets"),
    ):
        with pytest.raises(ConfigError, match=said):
            fitted(make=lambda wrap=wrap: wrap(plain()))
    assert fitted(make=lambda: ddp.BucketedDataParallel(plain(), num_shards=8))[1] == fitted()[1]
    model = ddp.BucketedDataParallel(plain(), num_shards=8)
    with pytest.raises(ConfigError, match="a BucketedDataParallel with num_shards=8: give same_bits=True"):
        ddp.fit(
            model, (INPUTS, CLASSES), sgd(model.parameters()), loss=F.cross_entropy, global_batch=9, epochs=1,
            folder=None,
        )  # fmt: skip


def test_what_cannot_have_the_same_bits_is_refused() -> None:
    run_ranks(refusals, 2)


@pytest.mark.parametrize("how", [{"num_shards": 19}, {"global_batch": 7}])
def test_more_shards_than_samples_of_a_batch_are_refused(how: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="shards"):
        fitted(**how, validation_data=None)


def served(same_bits: bool) -> int:
    model = plain()
    state = ddp.fit(
        model, (INPUTS, CLASSES), sgd(model.parameters()), loss=F.cross_entropy, global_batch=BATCH, max_steps=1,
        folder=None, strategy="parameter_server", same_bits=same_bits,
    )  # fmt: skip
    return state.step


def test_servers_refuse_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="same_bits=True with strategy='parameter_server': its updates depend on"):
        ddp.launch(partial(served, same_bits=True), workers=1, servers=1)
