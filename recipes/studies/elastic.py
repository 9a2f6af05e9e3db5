"""One small training run, by ours, torchrun or torchft, whose workers write a line at each committed step.

    python recipes/studies/elastic.py ours FOLDER '{"model": "mlp-25m", "workers": 3, …}'

`scripts/ddp chaos` starts it, injects faults, and reads FOLDER/lines/RANK.PID.jsonl (`ddp/lab/chaos.py`). Model, AdamW,
data and shares of a batch are the same for all three, and each begins with samples 0, 1, 2 …, so that step s of an
undisturbed run has samples (s - 1)·B to s·B - 1. Each is used as its own examples say:

    ours      ddp.launch with min_workers and spares, around ddp.fit
    torchrun  torch's DistributedDataParallel; rank 0 saves every K steps, K such that a save costs 3 % of the time, and
              torchrun starts all workers again from there
    torchft   its Manager, DistributedDataParallel and Optimizer over Gloo, each worker a replica group, started again;
              a new one reads on where the last line of its rank says (a loader that is saved at each step)
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import ddp
from ddp.lab.bench.workloads import WORKLOADS

SHARE = 12  # samples of a worker in a step: 2, 3 and 4 workers can share the batch of 2, 3 and 4
MOST_STEPS = {"small-mlp": 800, "digits-cnn": 400, "mlp-25m": 40}  # per second; ours plans them all when it begins
DIGEST_EVERY = 10  # steps
SAVES_COST = 0.03  # of the time
MANY = 10**6  # restarts


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of a workload's input and target; after the last one, the first comes again."""

    def __init__(self, model: str, length: int = 1) -> None:
        torch.manual_seed(1)
        self.length = length
        self.inputs, self.targets = WORKLOADS[model].batch()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index % len(self.inputs)], self.targets[index % len(self.targets)]

    def batch(self, indices: range) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices) % len(self.inputs)
        return self.inputs[chosen], self.targets[chosen]


def make(model: str, length: int = 1) -> tuple[nn.Module, Samples, torch.optim.Optimizer]:
    """Returns the same for every worker."""
    torch.manual_seed(0)
    module = WORKLOADS[model].make()
    return module, Samples(model, length), torch.optim.AdamW(module.parameters(), lr=1e-4)


class Lines:
    """The file of this worker: a line for each step that it has committed."""

    def __init__(self, folder: str, rank: int) -> None:
        self.path = Path(folder, "lines", f"{rank}.{os.getpid()}.jsonl")

    def write(self, step: int, batch: int, samples: Any, module: nn.Module, first: bool, **more: Any) -> None:
        """Writes it at once. `first`: this rank is the one that digests the parameters."""
        now = time.time()
        if first and step % DIGEST_EVERY == 0:
            digest = hashlib.sha256()
            for parameter in module.parameters():
                digest.update(parameter.detach().numpy())
            more["digest"] = digest.hexdigest()
        with self.path.open("a") as file:
            file.write(json.dumps({"t": now, "step": step, "batch": batch, "samples": [*samples], **more}) + "\n")


class Writer(ddp.Callback):
    """Writes the lines of ours."""

    def __init__(self, folder: str) -> None:
        self.folder, self.lines = folder, None

    def step_end(self, state: Any, report: Any) -> None:
        """Writes that of a step."""
        self.lines = self.lines or Lines(self.folder, state.comm.rank)
        samples = [sample for micro in report.micros for sample in micro.indices]
        self.lines.write(report.step, report.num_samples, samples, state.model.module, state.comm.rank == 0)


def train(folder: str, model: str, workers: int, steps: int, shared_memory: bool, disk: bool) -> None:
    """Trains as a worker of ours; ranks meet late, so that a spare has everything ready."""
    module, data, optimizer = make(model, SHARE * workers * steps)
    ddp.init(shared_memory=shared_memory)
    ddp.fit(
        *(module, data, optimizer),
        loss=cross_entropy,
        global_batch=SHARE * workers,
        max_steps=steps,
        batches=ddp.Batches(order=ddp.data.Fixed(len(data))),
        folder=ddp.Folder(Path(folder, "disk", "run"), every_steps=50) if disk else None,
        callbacks=[Writer(folder)],
    )


def ours(folder: str, model: str, workers: int, seconds: float, spares: int, over: str, disk: bool) -> None:
    """Launches ours."""
    ddp.launch(
        *(train, folder, model, workers, int(MOST_STEPS[model] * seconds), over == "memory", disk),
        workers=workers,
        restarts=MANY,
        threads_per_worker=1,
        min_workers=1,
        spares=spares,
    )


def torchrun(folder: str, model: str, workers: int, disk: bool, **_: Any) -> None:
    """Becomes torchrun."""
    command = [*(sys.executable, "-m", "torch.distributed.run", "--standalone"), f"--nproc-per-node={workers}"]
    command += [
        f"--max-restarts={MANY}",
        __file__,
        "torchrun_worker",
        folder,
        json.dumps({"model": model, "disk": disk}),
    ]
    # All rounds of torch 2.13 use one store, in which the workers of the second one find the addresses of the first.
    os.execve(sys.executable, command, {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def torchrun_worker(folder: str, model: str, disk: bool) -> None:
    """Trains as a worker of torchrun."""
    torch.distributed.init_process_group("gloo")
    rank, workers = torch.distributed.get_rank(), torch.distributed.get_world_size()
    module, data, optimizer = make(model)
    replica, lines = nn.parallel.DistributedDataParallel(module), Lines(folder, rank)
    path, step, every, times = Path(folder, "disk" if disk else "", "checkpoint.pt"), 0, 0, []
    if path.exists():
        saved = torch.load(path)
        step, every = saved["step"], saved["every"]
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    while True:
        begin = time.perf_counter()
        samples = range(step * workers * SHARE + rank, (step + 1) * workers * SHARE, workers)
        inputs, targets = data.batch(samples)
        optimizer.zero_grad()
        cross_entropy(replica(inputs), targets).backward()
        optimizer.step()
        step += 1
        lines.write(step, SHARE * workers, samples, module, rank == 0, every=every)
        times.append(time.perf_counter() - begin)
        if rank == 0 and (step % every == 0 if every else len(times) == 10):
            begin = time.perf_counter()
            for _ in range(1 if every else 2):  # the first one of a run measures what a save takes
                state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step, "every": every}, path.with_suffix(".part"))
                path.with_suffix(".part").rename(path)
                every = every or round(0.5 + (time.perf_counter() - begin) / (SAVES_COST * median(times)))


def torchft(folder: str, model: str, workers: int, join_ms: int = 60_000, heartbeat_ms: int = 5_000, **_: Any) -> None:
    """Serves the lighthouse, with the defaults of its program, and starts each replica group that has ended again."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer("[::]:0", 1, join_timeout_ms=join_ms, heartbeat_timeout_ms=heartbeat_ms)
    address = f"http://localhost:{lighthouse.address().rpartition(':')[2]}"
    command = [sys.executable, __file__, "torchft_worker", folder]
    given = {"model": model, "workers": workers, "lighthouse": address}

    def start(rank: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, json.dumps({**given, "rank": rank})])

    groups = [start(rank) for rank in range(workers)]

    def end(*_: Any) -> None:
        for group in groups:
            group.kill()
        os._exit(143)

    signal.signal(signal.SIGTERM, end)
    while True:
        for rank, group in enumerate(groups):
            if group.poll() is not None:
                groups[rank] = start(rank)
        time.sleep(0.05)


torchft_quick = partial(torchft, join_ms=100, heartbeat_ms=1_000)


def torchft_worker(folder: str, model: str, workers: int, lighthouse: str, rank: int) -> None:
    """Trains as a replica group of torchft."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    module, data, optimizer = make(model)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=lambda state: (
            module.load_state_dict(state["model"]),
            optimizer.load_state_dict(state["optim"]),
        ),
        state_dict=lambda: {"model": module.state_dict(), "optim": optimizer.state_dict()},
        min_replica_size=1,
        replica_id=f"group_{rank}",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        hostname="localhost",
        lighthouse_addr=lighthouse,
    )

    class Replica(DistributedDataParallel):
        @staticmethod
        def _comm_hook(state, bucket):  # torch refuses other annotations than its own
            # That of 0.2.0 fails an assertion where Gloo reports a lost peer, so that the survivor dies, too.
            state.allreduce(bucket.buffer()).wait()
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

    replica, wrapped = Replica(manager, module), Optimizer(manager, optimizer)
    position = sum(len(file.read_text().splitlines()) for file in Path(folder, "lines").glob(f"{rank}.*"))
    Path(folder, f"ready.{rank}").touch()
    while len([*Path(folder).glob("ready.*")]) < workers:
        time.sleep(0.01)
    lines = Lines(folder, rank)
    while True:
        samples = range(position * workers * SHARE + rank, (position + 1) * workers * SHARE, workers)
        inputs, targets = data.batch(samples)
        position += 1
        wrapped.zero_grad()
        step = manager.current_step()
        cross_entropy(replica(inputs), targets).backward()
        wrapped.step()
        if manager.current_step() > step:
            used, first = samples if manager.is_participating() else (), manager.participating_rank() == 0
            lines.write(manager.current_step(), SHARE * manager.num_participants(), used, module, first)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2], **json.loads(sys.argv[3]))
