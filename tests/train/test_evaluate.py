"""Evaluation and prediction: every sample once, in order, at any world size, fewer samples than ranks included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn

import ddp
from ddp.data.samples import TensorSet
from ddp.errors import ConfigError, Diverged, UnusedParameters
from ddp.train.callbacks import Callback
from ddp.train.state import StepReport, TrainState
from ddp.train.stopping import StopFlag
from ddp.train.tasks.cross_entropy import Classification

SIZES = [1, 2, 3, 5, 12, 13]


def data(n: int) -> TensorSet:
    generator = torch.Generator().manual_seed(n)
    return TensorSet(
        torch.randn(n, 6, generator=generator, dtype=torch.float64), torch.randint(0, 4, (n,), generator=generator)
    )


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 4)).double()


def evaluate_and_predict() -> list[tuple[dict[str, float], Tensor]]:
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
    ddp.shutdown()
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
    longer = [torch.zeros(i + 1, 2) for i in range(4)]
    cases: list[tuple[Callable[[Any], Any], Any, str]] = [
        (lambda batch: batch.size(), dicts, r"the data give dicts of x, y, .* \(AttributeError: 'dict' .*give task="),
        (lambda batch: (batch["x"], batch["x"]), dicts, "the model returned a tuple, not a tensor with a row for each"),
        (lambda batch: batch["x"].sum(), dicts, "the model returned a tensor of one number, not"),
        (lambda batch: batch, longer, r"\[., 2\] of torch.float32 in one batch and \[., 2\] .* padding all samples"),
        (lambda batch: batch["x"][:1].repeat(3, 1), dicts, "the outputs have [0-9]+ rows for 4 samples"),
    ]
    for call, samples, words in cases:
        with pytest.raises(ConfigError, match=words):
            ddp.predict(Calls(call), samples, batch_size=1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_one_process_over_all_samples(world_size: int) -> None:
    by_rank = run_ranks(evaluate_and_predict, world_size)
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


def give_up() -> dict[str, float] | None:
    ddp.init(abort_s=20)
    stop = StopFlag()
    if ddp.init().rank == 1:
        stop.request("SIGTERM")
    means = ddp.evaluate(model(), data(100), loss=Classification(), batch_size=1, stop=stop)
    ddp.shutdown()
    return means


def test_evaluation_is_given_up_together_when_a_rank_wants_to_stop() -> None:
    assert run_ranks(give_up, 2) == [None, None]


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


def fit_in_one_process() -> None:
    ddp.init(abort_s=20)
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

    with pytest.raises(ConfigError, match="neither epochs nor max_steps"):
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
