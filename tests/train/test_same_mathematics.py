"""W workers equal one process on the whole global batch, after every step; replicas are bitwise equal.

Tests: ddp/train/steps/step.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn

import ddp
from ddp.data.orders.sampler import TrainSampler
from ddp.data.samples import TensorSet
from ddp.models import CNN, GPT, MLP
from ddp.replica.broadcast import tensor_hash
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import StepReport, TrainState
from ddp.train.steps.task import Classification, LanguageModel

NUM_STEPS, GLOBAL_BATCH, MICRO, CLIP = 100, 10, 3, 1.0
FEW_STEPS, LONG = 20, 3  # four epochs; the world size that makes all steps
NUM_SPARSE_STEPS, SPARSE_CLIP = 12, 0.2  # two epochs' ends, where one of four ranks has no sample
LEARNING_RATE = 0.02  # training amplifies rounding errors: at 0.05 plain torch, micro-batched, drifts by 1e-4 itself


def mlp() -> nn.Module:
    return MLP(in_features=36, hidden=(13, 7), num_classes=5)


def cnn() -> nn.Module:
    return CNN(in_channels=1, image_size=6, num_classes=5, width=3, dropout=0.0)


def gpt() -> nn.Module:
    return GPT(vocab_size=19, context=6, width=32, depth=1, heads=2)


def samples(kind: str) -> TensorSet:
    """43 samples: four whole batches of 10 and a partial one of 3, which four workers cannot share evenly."""
    generator = torch.Generator().manual_seed(1)
    if kind == "text":
        text = torch.randint(0, 19, (43, 7), generator=generator)
        targets = text[:, 1:].clone()
        targets[::4, 3:] = -100  # targets that do not count: the ranks' counts differ
        return TensorSet(text[:, :-1].contiguous(), targets)
    inputs = torch.randn(43, 1, 6, 6, generator=generator, dtype=torch.float64)
    return TensorSet(inputs, torch.randint(0, 5, (43,), generator=generator))


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mlp": (mlp, "images"),
    "cnn": (cnn, "images"),
    "gpt": (gpt, "text"),
}

QUIET = {"folder": None, "progress": False}


def fresh(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    module = make().double()
    return module, torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.9, nesterov=True)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).clone()


@functools.cache
def one_process(case: str) -> Tensor:
    """Parameters after each step, [NUM_STEPS, n]: plain torch, the whole batch at once, the mean loss."""
    make, kind = CASES[case]
    module, optimizer = fresh(make)
    data = samples(kind)
    sampler = TrainSampler(len(data), global_batch=GLOBAL_BATCH, rank=0, world_size=1, seed=5)
    trajectory: list[Tensor] = []
    while len(trajectory) < NUM_STEPS:
        for plan in sampler.plans():
            inputs, targets = data.batch(plan.micros[0].indices)
            optimizer.zero_grad()
            scores = module(inputs)
            F.cross_entropy(scores.flatten(0, -2), targets.flatten(), ignore_index=-100).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            trajectory.append(flat(module))
            sampler.commit(plan)
    return torch.stack(trajectory[:NUM_STEPS])


class Recorder(Callback):
    """Keeps parameters, and hashes of parameters and optimizer state, of every step."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.hashes: list[str] = []

    def step_end(self, state: TrainState, report: StepReport) -> None:
        self.parameters.append(flat(state.model))
        momenta = [entry["momentum_buffer"].reshape(-1) for entry in state.optimizer.state.values()]
        self.hashes.append(tensor_hash(torch.cat([self.parameters[-1], *momenta])))


COLLECTIVES = ("all_", "allreduce", "allgather", "alltoall", "reduce", "broadcast", "gather", "scatter", "barrier")


def forbid_torch_collectives() -> None:
    """torch.distributed's own collectives raise: what is reduced is reduced by us."""
    import torch.distributed as dist

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("torch.distributed's own collective was called")

    backend = type(dist.group.WORLD._get_backend(torch.device("cpu")))
    for home in (dist, dist.distributed_c10d, dist.ProcessGroup, *backend.__mro__[:-2]):
        for name in list(vars(home)):
            if name.lstrip("_").startswith(COLLECTIVES) and callable(getattr(home, name)):
                setattr(home, name, forbidden)
    for call in (dist.all_reduce, dist.distributed_c10d.all_reduce, dist.group.WORLD.allreduce, dist.broadcast):
        with pytest.raises(AssertionError, match="own collective was called"):
            call(torch.zeros(1))


def train(cases: list[str], kind_of_replica: str) -> dict[str, tuple[Tensor, list[str]]]:
    """Rank 0's parameters after every step, and every rank's hashes, by case."""
    comm = ddp.init(abort_s=30)
    forbid_torch_collectives()
    num_steps = NUM_STEPS if comm.world_size == LONG and kind_of_replica == "bucketed" else FEW_STEPS
    wrap = ddp.NaiveDataParallel if kind_of_replica == "naive" else SmallBuckets
    results = {}
    for case in cases:
        make, kind = CASES[case]
        module, optimizer = fresh(make)
        recorder = Recorder()
        ddp.fit(
            wrap(module),
            samples(kind),
            optimizer,
            **grouped(
                loss=LanguageModel() if kind == "text" else Classification(),
                **QUIET,
                global_batch=GLOBAL_BATCH,
                micro_size=MICRO,
                max_steps=num_steps,
                clip_norm=CLIP,
                seed=5,
                callbacks=[recorder],
            ),
        )
        results[case] = torch.stack(recorder.parameters) if comm.rank == 0 else torch.empty(0), recorder.hashes
    ddp.shutdown()
    return results


def SmallBuckets(module: nn.Module) -> nn.Module:
    return ddp.BucketedDataParallel(module, first_bucket_mb=0.0005, bucket_cap_mb=0.001)


class Sentiment(nn.Module):
    """A bag of tokens; rows of the embedding that no token names have no gradient."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(19, 4, sparse=sparse), nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).mean(dim=1))


def bags() -> TensorSet:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 19, (43, 3), generator=generator)
    return TensorSet(tokens, torch.randint(0, 5, (43,), generator=generator))


def sentiment(*, sparse: bool) -> tuple[Sentiment, torch.optim.Optimizer]:
    torch.manual_seed(3)
    module = Sentiment(sparse=sparse).double()
    return module, torch.optim.SGD(module.parameters(), lr=0.5)


def train_sparse() -> tuple[Tensor, list[float]]:
    norms: list[float] = []

    class Norms(Callback):
        def step_end(self, state: TrainState, report: StepReport) -> None:
            norms.append(report.gradient_norm)

    ddp.init(abort_s=30)
    module, optimizer = sentiment(sparse=True)
    ddp.fit(
        module,
        bags(),
        optimizer,
        **grouped(
            loss=Classification(),
            **QUIET,
            global_batch=GLOBAL_BATCH,
            micro_size=2,
            max_steps=NUM_SPARSE_STEPS,
            clip_norm=SPARSE_CLIP,
            seed=5,
            callbacks=[Norms()],
        ),
    )
    ddp.shutdown()
    return flat(module), norms


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5))


FIRST_FREEZE = 4  # the step with the partial batch, in which one of four ranks has no sample; the next one is 9


def freeze(module: nn.Module, step: int, begins_frozen: bool) -> None:
    """The two layers in the middle, of equal size, are trained in turn."""
    if begins_frozen or step >= FIRST_FREEZE:
        module[2].requires_grad_(step % 2 == 0)
        module[3].requires_grad_(step % 2 == 1)


class Alternate(Callback):
    def __init__(self, module: nn.Module, begins_frozen: bool) -> None:
        self.module, self.begins_frozen = module, begins_frozen
        self.hash_by_step: list[str] = []

    def step_start(self, state: TrainState) -> None:
        freeze(self.module, state.step, self.begins_frozen)

    def step_end(self, state: TrainState, report: StepReport) -> None:
        self.hash_by_step.append(tensor_hash(flat(self.module)))


@functools.cache
def one_process_alternately(begins_frozen: bool) -> Tensor:
    module, optimizer = fresh(two_layers)
    data = samples("images")
    sampler = TrainSampler(len(data), global_batch=GLOBAL_BATCH, rank=0, world_size=1, seed=5)
    for step in range(NUM_SPARSE_STEPS):
        plan = next(sampler.plans())
        inputs, targets = data.batch(plan.micros[0].indices)
        freeze(module, step, begins_frozen)
        optimizer.zero_grad()
        F.cross_entropy(module(inputs), targets).backward()
        optimizer.step()
        sampler.commit(plan)
    return flat(module)


def train_alternately() -> list[tuple[bool, Tensor, list[str]]]:
    """Of a bucketed replica and of a naive one, each with layers frozen from the beginning and later."""
    ddp.init(abort_s=30)
    results = []
    for wrap in (SmallBuckets, ddp.NaiveDataParallel):
        for begins_frozen in (False, True):
            module, optimizer = fresh(two_layers)
            freeze(module, 0, begins_frozen)
            alternate = Alternate(module, begins_frozen)
            ddp.fit(
                wrap(module),
                samples("images"),
                optimizer,
                **grouped(
                    loss=Classification(),
                    **QUIET,
                    global_batch=GLOBAL_BATCH,
                    micro_size=2,
                    max_steps=NUM_SPARSE_STEPS,
                    seed=5,
                    callbacks=[alternate],
                ),
            )
            results.append((begins_frozen, flat(module), alternate.hash_by_step))
    ddp.shutdown()
    return results


CLASS_WEIGHTS = torch.tensor([0.3, 1.7, 0.25, 2.9, 0.77], dtype=torch.float64)


class Weighted(ddp.Task):
    """The mean by class weights, as of torch's CrossEntropyLoss(weight=…)."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        inputs, targets = batch
        loss_sum = F.cross_entropy(model(inputs), targets, weight=CLASS_WEIGHTS, reduction="sum")
        return loss_sum, float(CLASS_WEIGHTS[targets].sum())


def hooked(module: nn.Module) -> nn.Module:
    replica = ddp.DistributedDataParallel(module)

    def mean(state: Any, bucket: Any) -> Any:
        gradients = bucket.buffer().clone()
        replica.comm.all_reduce(gradients)
        future = torch.futures.Future[Tensor]()
        future.set_result(gradients / replica.comm.world_size)
        return future

    replica.register_comm_hook(None, mean)
    return replica


WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], dict[str, Any]]] = {
    "bucketed": (SmallBuckets, {}),
    "naive": (ddp.NaiveDataParallel, {}),
    "sharded": (nn.Sequential, {"sharded": True}),
    "hooked": (hooked, {}),
    "sparse": (nn.Sequential, {}),
}


def weighted_model(way: str) -> nn.Module:
    torch.manual_seed(3)
    return (Sentiment(sparse=way == "sparse") if way in ("sparse", "dense") else mlp()).double()


@functools.cache
def one_process_weighted(kind: str) -> tuple[Tensor, float]:
    """Parameters after each step, [NUM_SPARSE_STEPS, n], and the mean over all samples at the end."""
    module, data = weighted_model(kind), bags() if kind == "dense" else samples("images")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    sampler = TrainSampler(len(data), global_batch=GLOBAL_BATCH, rank=0, world_size=1, seed=5)
    loss, trajectory = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), []
    for _ in range(NUM_SPARSE_STEPS):
        plan = next(sampler.plans())
        inputs, targets = data.batch(plan.micros[0].indices)
        optimizer.zero_grad()
        loss(module(inputs), targets).backward()
        optimizer.step()
        trajectory.append(flat(module))
        sampler.commit(plan)
    inputs, targets = data.batch(range(len(data)))
    return torch.stack(trajectory), loss(module(inputs), targets).item()


def train_weighted() -> dict[str, tuple[Tensor, float | None]]:
    """Parameters after each step, and the evaluation at the end, by the way of averaging."""
    ddp.init(abort_s=30)
    found = {}
    for way, (wrap, how) in WAYS.items():
        module, data = weighted_model(way), bags() if way == "sparse" else samples("images")
        seen: list[Tensor] = []

        class Keep(Callback):
            def step_end(self, state: TrainState, report: StepReport) -> None:
                seen.append(flat(state.model))  # noqa: B023

        state = ddp.fit(
            wrap(module),
            data,
            torch.optim.SGD(module.parameters(), lr=0.05),
            **grouped(
                loss=Weighted(),
                **QUIET,
                global_batch=GLOBAL_BATCH,
                micro_size=2,
                max_steps=NUM_SPARSE_STEPS,
                seed=5,
                test_data=data,
                every_epochs=None,
                callbacks=[Keep()],
                **how,
            ),
        )
        found[way] = torch.stack(seen), state.evaluation["test_loss"]
    ddp.shutdown()
    return found


def train_bucketed() -> tuple[Any, Any, Any, Any]:
    return train(list(CASES), "bucketed"), train_sparse(), train_alternately(), train_weighted()


@functools.cache
def bucketed(world_size: int) -> list[Any]:
    """What each rank has seen; one start of the ranks serves all tests."""
    return run_ranks(train_bucketed, world_size, timeout_s=120)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.quick(1)
def test_equals_one_process_after_every_step(world_size: int) -> None:
    results = [result for result, *_ in bucketed(world_size)]
    for case in CASES:
        num_steps = NUM_STEPS if world_size == LONG else FEW_STEPS
        expected = one_process(case)[:num_steps]
        error = (results[0][case][0] - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.shape == (num_steps,)
        assert error.max() <= 1e-12, case
        for result in results:
            assert result[case][1] == results[0][case][1], case


def test_naive_equals_one_process_too() -> None:
    results = run_ranks(train, 3, ["mlp"], "naive")
    expected = one_process("mlp")[:FEW_STEPS]
    assert ((results[0]["mlp"][0] - expected).norm(dim=1) / expected.norm(dim=1)).max() <= 1e-12


@pytest.mark.slow
def test_a_sparse_embedding_is_clipped_and_trained_as_a_dense_one_in_one_process() -> None:
    module, optimizer = sentiment(sparse=False)
    sampler = TrainSampler(43, global_batch=GLOBAL_BATCH, rank=0, world_size=1, seed=5)
    norms: list[float] = []
    while len(norms) < NUM_SPARSE_STEPS:
        for plan in islice(sampler.plans(), NUM_SPARSE_STEPS - len(norms)):
            tokens, targets = bags().batch(plan.micros[0].indices)
            optimizer.zero_grad()
            F.cross_entropy(module(tokens), targets).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), SPARSE_CLIP)))
            optimizer.step()
            sampler.commit(plan)
    assert min(norms) > SPARSE_CLIP
    results = [result for _, result, *_ in bucketed(4)]
    for parameters, seen in results:
        assert torch.equal(parameters, results[0][0]) and seen == results[0][1]
        torch.testing.assert_close(parameters, flat(module), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(seen, norms, rtol=1e-12, atol=0)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.slow
def test_layers_that_are_frozen_and_unfrozen_equal_one_process(world_size: int) -> None:
    """Also where a rank has no sample in the step with the first change, and in later ones."""
    results = [result for _, _, result, _ in bucketed(world_size)]
    for index, (begins_frozen, parameters, hashes) in enumerate(results[0]):
        torch.testing.assert_close(parameters, one_process_alternately(begins_frozen), rtol=1e-11, atol=1e-13)
        for result in results:
            assert result[index][2] == hashes


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.slow
def test_a_mean_by_class_weights_equals_one_process(world_size: int) -> None:
    """Counts that are no whole numbers, also of a step in which one of four ranks has no sample."""
    results = [result for *_, result in bucketed(world_size)]
    for way, (parameters, evaluation) in results[0].items():
        expected, loss = one_process_weighted("dense" if way == "sparse" else "mlp")
        torch.testing.assert_close(parameters, expected, rtol=1e-11, atol=1e-13)
        assert evaluation == pytest.approx(loss, rel=1e-12)
        for other in results:
            assert torch.equal(other[way][0], parameters) and other[way][1] == evaluation, "bit by bit"
