"""Evaluation and prediction: every sample once, in order, at any world size, fewer samples than ranks included."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn

import ddp
from ddp.data.samples import TensorSet
from ddp.errors import ConfigError, Diverged, UnusedParameters
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import StepReport, TrainState
from ddp.train.steps.stopping import StopFlag
from ddp.train.steps.task import Classification

SIZES = [1, 2, 3, 5, 12, 13]
WORLD_SIZES = [1, 2, 3, 4]
CUTS = [(num_samples, num_shards) for num_samples in (3, 13, 40) for num_shards in (None, 1, 2, 5, 8)]


def data(n: int) -> TensorSet:
    generator = torch.Generator().manual_seed(n)
    return TensorSet(
        torch.randn(n, 6, generator=generator, dtype=torch.float64), torch.randint(0, 4, (n,), generator=generator)
    )


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 4)).double()


class Found(NamedTuple):
    """What a rank has found, by the size of the data, or by that and the number of parts."""

    by_size: list[tuple[dict[str, float], Tensor]]
    by_cut: dict[tuple[int, int | None], tuple[dict[str, str], list[float]]]


@cache
def found_by_rank(world_size: int) -> list[Found]:
    return run_ranks(evaluate_and_predict, world_size)


def evaluate_and_predict() -> Found:
    comm = ddp.init(abort_s=20)
    replica = ddp.DistributedDataParallel(model(), buffers="none")
    replica.module[1].running_mean.fill_(float(comm.rank))  # drifted; rank 0's, zero, is what counts
    replica.module[0].eval()
    results = []
    for n in SIZES:
        means = ddp.evaluate(replica, data(n), loss=Classification(), batch_size=2)
        results.append((means, ddp.predict(replica, data(n), task=Classification(), batch_size=2)))
        assert replica.training
        assert not replica.module[0].training
    what_predict_cannot_keep()
    what_predict_keeps()
    by_cut = in_parts()
    ddp.shutdown()
    return Found(results, by_cut)


class TwoSums(Classification):
    """Rounds one sum in each batch, and another one, of float64 numbers, wherever sums are added up."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
        inputs, classes = batch
        scores = model(inputs)
        losses = [F.cross_entropy(each, classes, reduction="sum") for each in (scores, scores.double())]
        return {name: (loss, len(classes)) for name, loss in zip(("loss", "precise"), losses, strict=True)}


def in_parts() -> dict[tuple[int, int | None], tuple[dict[str, str], list[float]]]:
    """Returns the bits of metrics and outputs of a model in float32."""
    net, results = model().float(), {}
    for num_samples, num_shards in CUTS:
        samples = TensorSet(data(num_samples).inputs.float() * 10, data(num_samples).targets)
        how: Any = {"batch_size": 3, "num_shards": num_shards}
        means = ddp.evaluate(net, samples, loss=TwoSums(), **how)
        outputs = ddp.predict(net, samples, **how)
        results[num_samples, num_shards] = {name: mean.hex() for name, mean in means.items()}, outputs.tolist()
    with pytest.raises(ConfigError, match="num_shards=0: an evaluation needs at least one part; raise it to 1"):
        ddp.evaluate(net, samples, loss=Classification(), num_shards=0)
    return results


class Calls(nn.Module):
    """A model that is called in a way of its own."""

    def __init__(self, call: Callable[[Any], Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, batch: Any) -> Any:
        return self.call(batch)


def what_predict_cannot_keep() -> None:
    """On all ranks alike; each of them has the four samples at most once."""
    dicts = [{"x": torch.full((3,), float(i)), "y": i} for i in range(4)]
    assert ddp.predict(Calls(lambda batch: batch["x"]), dicts).tolist() == [[float(i)] * 3 for i in range(4)]
    cases: list[tuple[Callable[[Any], Any], Any, str]] = [
        (lambda batch: batch.size(), dicts, r"the data give dicts of x, y, .* \(AttributeError: 'dict' .*give task="),
        (lambda batch: (batch["x"], "text"), dicts, "the model returned a str, not a tensor with a row for each"),
        (lambda batch: batch["x"] if batch["y"].any() else (batch["x"],), dicts, "other dicts or tuples in each batch"),
        (lambda batch: batch["x"].double() if batch["y"].any() else batch["x"], dicts, "an output is torch"),
        (lambda batch: batch["x"].sum(), dicts, "the model returned a tensor of one number, not"),
        (lambda batch: batch["x"][:1].repeat(3, 1), dicts, "the outputs have [0-9]+ rows for 4 samples"),
    ]
    for call, samples, words in cases:
        with pytest.raises(ConfigError, match=words):
            ddp.predict(Calls(call), samples, batch_size=1)


def what_predict_keeps() -> None:
    """Several outputs, and those of unequal lengths; on all ranks, also one that has had no batch."""

    def two(batch: Any) -> Any:
        inputs, numbers = batch
        length = int(numbers.max()) + 1  # as a batch that is padded to its longest sample
        return {"mask": inputs[:, None, :].repeat(1, length, 1), "more": (numbers * 2, [inputs.sum(1)])}

    inputs, numbers = torch.arange(18.0).view(6, 3), torch.arange(6)
    for num in (6, 1, 0):
        samples = TensorSet(inputs[:num], numbers[:num])
        found = ddp.predict(Calls(two), samples, task=Whole(), batch_size=2)
        if num:
            double, (sums,) = found["more"]
            assert double.tolist() == [2 * each for each in range(num)]
            torch.testing.assert_close(sums, inputs[:num].sum(1))
            masks = list(found["mask"])
            assert len(masks) == num and all(torch.equal(row, inputs[i].expand_as(row)) for i, row in enumerate(masks))
    twice = Calls(lambda batch: (batch[0], batch[0]))
    same = ddp.predict(twice, TensorSet(inputs, numbers), task=Whole(), batch_size=4)
    assert isinstance(same, tuple) and all(torch.equal(each, inputs) for each in same)


class Whole(Classification):
    """Gives the model the whole batch, and keeps what it returns."""

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        return model(batch)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.quick(1)
def test_equals_one_process_over_all_samples(world_size: int) -> None:
    by_rank = [found.by_size for found in found_by_rank(world_size)]
    net = model().eval()
    for index, n in enumerate(SIZES):
        inputs, classes = data(n).inputs, data(n).targets
        scores = net(inputs).detach()
        for results in by_rank:
            means, outputs = results[index]
            assert means["loss"] == pytest.approx(F.cross_entropy(scores, classes).item(), rel=1e-12)
            assert means["accuracy"] == pytest.approx((scores.argmax(1) == classes).double().mean().item(), rel=1e-12)
            assert len(outputs) == n
            expected = Classification().outputs(net, (inputs, classes))
            torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)


def test_in_the_same_parts_bits_are_the_same_at_any_world_size() -> None:
    by_world_size = {world_size: found_by_rank(world_size) for world_size in WORLD_SIZES}
    differ = set[str]()
    for cut in CUTS:
        by_rank = {world_size: [each.by_cut[cut] for each in found] for world_size, found in by_world_size.items()}
        assert all(found == [found[0]] * len(found) for found in by_rank.values())
        metrics, outputs = by_rank[1][0]
        if cut[1] is not None:
            assert all(found[0] == (metrics, outputs) for found in by_rank.values()), cut
        else:
            differ |= {name for found in by_rank.values() for name in metrics if found[0][0][name] != metrics[name]}
        for world_size in (1, 2):
            assert by_rank[world_size][0] == by_world_size[4][0].by_cut[cut[0], cut[1] or world_size], cut
    assert differ == {"loss", "precise"}  # without parts: so these data and this model can show a difference


def with_more_batches_on_rank_one() -> list[dict[str, float] | None]:
    comm, stop = ddp.init(abort_s=20), StopFlag()
    how: Any = {"loss": Classification(), "batch_size": 1, "num_shards": 3}
    means = [ddp.evaluate(model(), data(100), stop=stop, **how), ddp.evaluate(model(), data(100), **how)]
    if comm.rank == 1:
        stop.request("SIGTERM")
    means.append(ddp.evaluate(model(), data(100), stop=stop, **how))
    what_ranks_have_alike(comm.rank)
    ddp.shutdown()
    return means


def what_ranks_have_alike(rank: int) -> None:
    """A share on each rank would be cut once more: half of the samples would be read, and nobody told."""
    for use in (partial(ddp.evaluate, loss=Classification()), ddp.predict):
        with pytest.raises(ConfigError, match=r"data has \[10, 11\] samples by rank: give each rank all samples"):
            use(model(), data(10 + rank))
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddp").addHandler(handler)
    for samples in (data(20), TensorSet(data(20).inputs[rank::2], data(20).targets[rank::2])):
        ddp.evaluate(model(), samples, loss=Classification())
    logging.getLogger("ddp").removeHandler(handler)
    assert ["the samples of data are not the same on all ranks" in each for each in logged] == [True] * (rank == 0)


def test_evaluation_is_given_up_together_when_a_rank_wants_to_stop() -> None:
    """Rank 0 has 33 batches, and rank 1 has 67; the stop flag is polled after every 16, by both."""
    (*finished, given_up), of_rank_one = run_ranks(with_more_batches_on_rank_one, 2)
    assert finished[0] == finished[1] is not None
    assert given_up is None
    assert of_rank_one == [*finished, None]


class Watch(Callback):
    def __init__(self) -> None:
        self.moments: list[str] = []

    def fit_start(self, state: TrainState) -> None:
        self.moments.append("fit_start")

    def step_start(self, state: TrainState) -> None:
        self.moments.append("step_start")

    def step_end(self, state: TrainState, report: StepReport) -> None:
        assert report.step == state.step
        assert 0 <= report.wait_s + report.data_s <= report.step_s
        self.moments.append("step_end")

    def evaluated(self, state: TrainState) -> None:
        self.moments.append(f"evaluated {state.step}")

    def exception(self, state: TrainState, error: BaseException) -> None:
        self.moments.append(type(error).__name__)

    def fit_end(self, state: TrainState) -> None:
        self.moments.append("fit_end")


class OneUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 4).double(), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.used(x)
        return result


def fit(module: nn.Module, samples: TensorSet, **how: Any) -> None:
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    quiet: Any = {"folder": None, "progress": False}
    ddp.fit(module, samples, optimizer, **grouped(loss=Classification(), global_batch=6, **quiet, **how))


class MeanOfSteps(torch.optim.SGD):
    """Trains the last weights and evaluates the mean of all; like schedule-free optimizers, it swaps by rounding."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for each in self.param_groups[0]["params"]:
            known = self.state[each]
            known["n"] = known.get("n", 0) + 1
            known["mean"] = each.clone() if known["n"] == 1 else known["mean"].lerp(each, 1 / known["n"])

    @torch.no_grad()
    def eval(self, sign: float = 1.0) -> None:
        for each in self.param_groups[0]["params"]:
            away = self.state[each].setdefault("away", self.state[each]["mean"] - each)
            each.add_(away, alpha=sign)

    def train(self) -> None:
        self.eval(-1.0)
        for each in self.state.values():
            del each["away"]


def evaluates_the_weights_that_the_optimizer_wants() -> None:
    samples, plain = data(12), model()
    mean = torch.optim.swa_utils.AveragedModel(plain, use_buffers=True)
    sgd, expected = torch.optim.SGD(plain.parameters(), 0.1), []
    plain[2].p = 0.0
    for _ in range(3):
        sgd.zero_grad()
        F.cross_entropy(plain.train()(samples.inputs), samples.targets).backward()
        sgd.step()
        mean.update_parameters(plain)
        for into, now in zip(mean.module.buffers(), plain.buffers(), strict=True):
            into.copy_(now)
        expected.append(F.cross_entropy(mean.eval()(samples.inputs), samples.targets).item())
    found, order = [], ddp.Batches(order=ddp.data.Fixed(12))
    for kind in (MeanOfSteps, torch.optim.SGD):
        net = model()
        net[2].p = 0.0
        how: Any = {"loss": Classification(), "global_batch": 12, "epochs": 3, "folder": None, "batches": order}
        state = ddp.fit(net, samples, kind(net.parameters(), 0.1), validation_data=samples, **how)
        found.append(([each["validation_loss"] for each in state.history], [each.clone() for each in net.parameters()]))
    assert found[0][0] == pytest.approx(expected, rel=1e-12) != found[1][0]
    assert all(torch.equal(*pair) for pair in zip(found[0][1], found[1][1], strict=True)), "evaluations change nothing"


def fit_in_one_process() -> None:
    ddp.init(abort_s=20)
    evaluates_the_weights_that_the_optimizer_wants()
    net, watch = model(), Watch()
    fit(net, data(14), epochs=2, test_data=data(5), callbacks=[watch])
    step = ["step_start", "step_end"]
    assert watch.moments == [
        *("fit_start", *step, *step, *step, "evaluated 3", *step, *step, *step, "evaluated 6", "fit_end")
    ]

    broken = data(6)
    broken.inputs[3] = float("inf")
    before = [parameter.clone() for parameter in net.parameters()]
    watch = Watch()
    with pytest.raises(Diverged, match="the loss of step 1 is nan on every rank; parameters are still those of step 0"):
        fit(net, broken, max_steps=1, callbacks=[watch])
    assert watch.moments == ["fit_start", "step_start", "Diverged"]
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))

    with pytest.raises(ConfigError, match="the run would never end"):
        fit(net, data(6))
    with pytest.raises(ConfigError, match="has 0 samples"):
        ddp.evaluate(net, data(0), loss=Classification())
    with pytest.raises(UnusedParameters, match=r"rank 0: 0\.unused"):
        partly = nn.Sequential(OneUnused())
        fit(partly, data(6), max_steps=1)
    exploding = data(6)
    exploding.inputs[3] = 1e300  # a finite loss whose gradient is not
    with pytest.raises(Diverged, match="the gradient norm of step 1 is"):
        linear = nn.Sequential(nn.Linear(6, 4)).double()
        nn.init.zeros_(linear[0].weight)
        fit(linear, exploding, max_steps=1)
    ddp.shutdown()


def test_callbacks_and_divergence() -> None:
    run_ranks(fit_in_one_process, 1)
