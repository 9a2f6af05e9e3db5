"""What a program on GPUs does beside its collectives keeps no host waiting, and what leaves a GPU is on the CPU."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_standin import cuda, device, nccl
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import ddp
from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object, broadcast_object
from ddp.gradients import DenseStart, PowerSGD, RandomK, Sign, TopK
from ddp.optim.layerwise import clipped_step
from ddp.optim.norms import gradient_norm
from ddp.optim.precision import MasterWeights, narrowed
from ddp.process import gpu
from ddp.run.launch.from_python import result_file, write_result
from ddp.strategies.sharded import Sharded
from ddp.train.checkpoints.checkpoint import read_checkpoint
from ddp.train.checkpoints.checkpoint_store import CheckpointStore

HOOKS = (
    *(TopK(0.1), TopK(0.05, momentum=0.9), Sign(), RandomK(0.1), RandomK(0.1, error_feedback=False)),
    *(PowerSGD(2), PowerSGD(2, warm_start=False), DenseStart(Sign(), 1)),
)
WIRES = ("bf16", "fp16", "int8", "int8_stochastic", "fp32")
X = torch.linspace(-1, 1, 64 * 40).view(64, 40)
DATA = (X, (X.sum(1) > 0).long())
Found = dict[str, Any]


def net(where: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 2000), nn.ReLU(), nn.Linear(2000, 7)).to(where)


def watched(act: Callable[[], object]) -> list[str]:
    """The host waits and the races of a second call, on a device that is late, so that every wait is one."""
    act()
    cuda.synchronize()
    device.reset()
    device.detect()
    device.late()
    act()
    device.late(False)
    found = [f"{number} × {each}" for each, number in device.host_waits().items()] + device.races()
    device.detect(False)
    return found


def in_one_process(case: Callable[[Communicator], Found]) -> Callable[[], Found]:
    def run() -> Found:
        device.install(int(os.environ["WORLD_SIZE"]))
        try:
            return case(ddp.init(device="standin", abort_s=30))
        finally:
            ddp.shutdown()

    return run


# ---- hooks and wires


def steps(comm: Communicator, **how: Any) -> list[str]:
    replica = ddp.DistributedDataParallel(net(comm.device), **how)
    optimizer, x = torch.optim.SGD(replica.parameters(), lr=1e-3), X.to(comm.device)

    def step() -> None:
        optimizer.zero_grad()
        replica(x).square().mean().backward()
        optimizer.step()

    step()
    return watched(step)


def hooks_and_wires(comm: Communicator) -> Found:
    assert comm.host_partition.num_hosts == 2  # or a hook would do nothing
    of_hooks = {f"hook {number}, {hook!r}": steps(comm, hook=hook) for number, hook in enumerate(HOOKS)}
    return of_hooks | {wire: steps(comm, wire=wire) for wire in WIRES}


def test_hooks_and_wires_keep_no_host_waiting() -> None:
    for found in run_ranks(in_one_process(hooks_and_wires), 2):
        for case, waits in found.items():
            assert all("step_finalizer.py" in each for each in waits[:1]) and not waits[1:], (case, waits)


# ---- evaluation, optimizers, averages


def evaluations(comm: Communicator) -> Found:
    model = net(comm.device)
    found: Found = {}
    for loss in (nn.functional.cross_entropy, ddp.Classification()):
        found[f"evaluate by {loss}"] = watched(partial(ddp.evaluate, model, DATA, loss=loss, batch_size=4))
    found["predict"] = watched(partial(ddp.predict, model, DATA, batch_size=4))
    of_batches = {name: [each for each in waits if "'comm/" not in each] for name, waits in found.items()}
    device.reset()
    metrics = ddp.evaluate(model, DATA, loss=ddp.Classification(), batch_size=4)
    assert device.counters()["pinned allocations"] >= 16  # of eight batches, each of two tensors
    return {"waits": of_batches, "outputs": ddp.predict(model, DATA), "metrics": metrics}


def test_evaluation_and_prediction_wait_for_no_batch() -> None:
    expected = net(torch.device("cpu"))(X).detach()
    loss = nn.functional.cross_entropy(expected, DATA[1]).item()
    for found in run_ranks(in_one_process(evaluations), 2):
        (after_the_last,) = found["waits"].pop("predict")
        assert after_the_last.startswith("1 × HostWait(kind='stream.synchronize'")
        assert not any(found["waits"].values()), found["waits"]
        assert found["outputs"].device.type == "cpu"
        torch.testing.assert_close(found["outputs"], expected)
        assert found["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)


def updates(comm: Communicator) -> Found:
    found: Found = {}
    for kind in (ddp.optim.LAMB, ddp.optim.LARS, ddp.optim.LARC):
        results = []
        for where in (comm.device, torch.device("cpu")):
            model = net(where)
            optimizer = kind(model.parameters(), lr=0.01, clip_norm=2.0)
            for parameter in model.parameters():
                parameter.grad = parameter.detach().clone()

            def update(model: nn.Module = model, optimizer: Any = optimizer) -> None:
                clipped_step(optimizer, model.parameters(), gradient_norm(model.parameters()), 1.0)
                optimizer.step()

            found[f"{kind.__name__} on {where}"] = watched(update) if where == comm.device else update() or update()
            results.append([parameter.detach().cpu() for parameter in model.parameters()])
        torch.testing.assert_close(*results)
    model = net(comm.device)
    masters = MasterWeights(model, narrowed(model))
    found["bf16_pure"] = watched(masters.take_in)
    first = model[0].weight
    with torch.no_grad():
        first[0, 0] = 3
    masters.take_in()
    assert masters.of[first][0, 0] == 3 and torch.equal(masters.of[first].bfloat16(), first)
    ema, state = ddp.EMA(0.5), Run(net(comm.device))
    ema.fit_start(state)  # type: ignore[arg-type]
    ema.step_end(state, None)  # type: ignore[arg-type]
    found["EMA"] = watched(lambda: ema.step_end(state, None))  # type: ignore[arg-type]
    return {name: waits for name, waits in found.items() if waits}


class Run:
    """As much of a run as an average asks for."""

    masters: Mapping[Tensor, nn.Parameter] = {}
    units = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def model(self) -> Run:
        return self


def test_optimizers_and_averages_keep_no_host_waiting() -> None:
    assert run_ranks(in_one_process(updates), 1) == [{}]


# ---- what leaves a GPU


def what_leaves(comm: Communicator, folder: Path) -> Found:
    model = net(comm.device)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    strategy = Sharded(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        strategy.model(X.to(comm.device)).square().mean().backward()
        ddp.strategies.step(strategy)
    state = strategy.state_dict()
    write_result(folder, comm.rank, what_leaves, (model, model[0].weight, state, X.to(comm.device)))
    if comm.rank == 0:
        CheckpointStore(folder).save(2, {"model": state["model"], "optimizer": state["optimizer"]}, meta={})
    comm.barrier()
    largest, bytes_of = [0], nccl.bytes_of

    def noted(tensor: Tensor) -> Tensor:
        largest.append(tensor.nbytes)
        return bytes_of(tensor)

    nccl.bytes_of = noted
    parts = read_checkpoint(comm, folder, model).parts
    nccl.bytes_of = bytes_of
    strategy.finish()
    steps_at = {str(each["step"].device) for each in optimizer.state.values()}
    strategy.load_state_dict({"model": parts["model"], "optimizer": parts["optimizer"], "loss_scale": None})
    strategy.model(X.to(comm.device)).square().mean().backward()
    ddp.strategies.step(strategy)  # goes on with what was loaded
    sent = all_gather_object(comm, {"x": X.to(comm.device)}), broadcast_object(comm, [X.to(comm.device)])
    raised = gpu.reduced(nn.Parameter(X.to(comm.device), requires_grad=False))
    return {
        "of the checkpoint": {str(each.device) for each in tree_leaves(parts) if isinstance(each, Tensor)},
        "of objects": {str(each.device) for each in tree_leaves(sent) if isinstance(each, Tensor)},
        "of steps": steps_at == {str(comm.device)},
        "is frozen": raised[1][1] is False,
        "bytes over NCCL": max(largest),
    }


def test_nothing_that_is_saved_or_sent_is_on_a_gpu(tmp_path: Path) -> None:
    run = in_one_process(lambda comm: what_leaves(comm, tmp_path))
    for rank, found in enumerate(run_ranks(run, 2)):
        assert found["of the checkpoint"] == found["of objects"] == {"cpu"}
        assert found["of steps"] and found["is frozen"]
        assert found["bytes over NCCL"] < 1000  # a resumed run has no second model in the GPU's memory
        result = pickle.loads(result_file(tmp_path, rank).read_bytes())
        model, weight, state, x = result  # as it is read where there is no such device
        assert weight is model[0].weight and isinstance(weight, nn.Parameter) and torch.equal(x, X)
        assert {each.device.type for each in tree_leaves(state) if isinstance(each, Tensor)} == {"cpu"}
    saved = torch.load(io.BytesIO((tmp_path / "step-00000002" / "model.pt").read_bytes()), weights_only=True)
    assert {each.device.type for each in saved.values()} == {"cpu"}
