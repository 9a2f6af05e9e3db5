"""What a step costs on a GPU besides its work: commands, batches of NCCL's, and host waits. The table may only fall."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpu_standin import device
from ranks import run_ranks
from torch import nn

import ddp
from ddp.comm.communicator import Communicator
from ddp.gradients.hook import ErrorFeedback
from ddp.gradients.hooks import PowerSGD, TopK


class Count(NamedTuple):
    """At most as many; of the commands, those that the same step without the package has are not counted."""

    host_waits: int
    commands: int
    batches: int


AT_MOST = {
    "all-reduce of 25 MiB": Count(0, 3, 2),
    "all-reduce of 25 MiB, bf16": Count(0, 8, 2),
    "all-reduce of 25 MiB, int8": Count(0, 19, 2),
    "drop-in, 2 buckets": Count(0, 16, 4),
    "drop-in, 2 buckets, bf16": Count(0, 28, 6),
    "drop-in, 2 buckets, int8": Count(0, 59, 6),
    "hook: TopK": Count(1, 86, 8),
    "hook: PowerSGD": Count(1, 100, 14),
    "SyncBatchNorm": Count(0, 65, 10),
    "fit": Count(1, 66, 2),
    "fit, some targets are none": Count(1, 66, 2),
    "fit, clip_norm": Count(1, 71, 2),
    "fit, LAMB": Count(1, 82, 2),
    "fit, sharded": Count(1, 83, 8),
    "fit, fp16": Count(1, 89, 2),
}


def count() -> Count:
    """Returns the counts since `device.reset`."""
    commands = device.commands()
    return Count(sum(device.host_waits().values()), sum(commands.values()), commands.get("nccl batch", 0))


def counted(run: Callable[[], object]) -> Count:
    """Runs it on a device that is late, so that every wait is one."""
    device.reset()
    device.late()
    run()
    device.late(False)
    return count()


def layers(comm: Communicator, *between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, 256), *between, nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 7)
    )
    return net.to(comm.device)


def a_step(model: nn.Module, comm: Communicator, *, after: int = 3) -> Count:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(8, 64, device=comm.device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    for _ in range(after):
        step()
    return counted(step)


class CountsOne(ddp.Callback):
    """Counts one step in the middle of a run."""

    def step_start(self, state: Any) -> None:
        if state.step == 5:
            device.reset()
            device.late()

    def step_end(self, state: Any, report: Any) -> None:
        if state.step == 6:
            device.late(False)
            self.count = count()


def a_step_of_fit(
    comm: Communicator, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, *, every: int = 0, **how: Any
) -> Count:
    """Counts a step of `fit`; of its targets, each `every`th one is none, so that the device counts the others."""
    torch.manual_seed(0)
    model, one = layers(comm), CountsOne()
    how |= {"loss": nn.functional.cross_entropy, "global_batch": 64, "max_steps": 8, "callbacks": [one]}
    data = torch.randn(512, 64), torch.randint(0, 7, (512,))
    if every:
        data[1][::every] = -100
    ddp.fit(model, data, kind(model.parameters(), lr=1e-3), folder=ddp.Folder(None, progress=False), **how)
    return one.count


def counts() -> dict[str, Count]:
    device.install(int(os.environ["WORLD_SIZE"]))
    comm = ddp.init(device="standin", abort_s=30)
    flat, found = torch.ones(25 * 2**20 // 4, device=comm.device), {}
    for wire in (None, "bf16", "int8"):
        comm.all_reduce(flat, wire=wire)
        name = "all-reduce of 25 MiB" + (f", {wire}" if wire else "")
        found[name] = counted(lambda wire=wire: comm.all_reduce(flat, wire=wire))

    def step_of_replica(model: nn.Module, alone: Count, *, after: int = 3, **how: Any) -> Count:
        replica = ddp.DistributedDataParallel(model, bucket_cap_mb=0.3, first_bucket_mb=0.1, **how)
        both = a_step(replica, comm, after=after)
        return both._replace(commands=both.commands - alone.commands)

    alone = a_step(layers(comm), comm)
    for wire in (None, "bf16", "int8"):
        name = "drop-in, 2 buckets" + (f", {wire}" if wire else "")
        found[name] = step_of_replica(layers(comm), alone, wire=wire)
    for hook in (TopK(0.1), PowerSGD(2)):
        name = f"hook: {type(hook).__name__}"
        found[name] = step_of_replica(layers(comm), alone, hook=ErrorFeedback(hook))
    alone = a_step(layers(comm, nn.BatchNorm1d(256)), comm)
    found["SyncBatchNorm"] = step_of_replica(layers(comm, ddp.SyncBatchNorm(256)), alone)
    found["fit"] = a_step_of_fit(comm)
    found["fit, some targets are none"] = a_step_of_fit(comm, every=5)
    found["fit, clip_norm"] = a_step_of_fit(comm, clip_norm=1.0)
    found["fit, LAMB"] = a_step_of_fit(comm, ddp.optim.LAMB)
    found["fit, sharded"] = a_step_of_fit(comm, strategy="sharded")
    found["fit, fp16"] = a_step_of_fit(comm, precision="fp16")
    ddp.shutdown()
    return found


def test_a_step_costs_no_more_than_the_table_says() -> None:
    for each in run_ranks(counts, 2):
        assert each.keys() == AT_MOST.keys()
        more = {name: found for name, found in each.items() if any(map(operator.gt, found, AT_MOST[name]))}
        assert more == {}
