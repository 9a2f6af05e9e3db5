"""Measures what parameter servers promise: that nobody waits for a slow worker, and that each sample counts once.

| row                      | what is measured                                                                         |
|--------------------------|------------------------------------------------------------------------------------------|
| async                    | 3 workers, of which one sleeps 4/5 of its time: samples/s ÷ without communication        |
| digits                   | accuracy with mode=async less that with mode=sync, by the same workers, points           |
| first 3 of 4             | one of four sleeps so: step ÷ that of three workers who do not                           |
| a worker is killed       | runs in which each sample counted once per epoch; modes take turns                       |
| a server is killed       | the same, where updates since the last checkpoint are made again; they are said          |

    python recipes/studies/servers.py                       some minutes
    python recipes/studies/servers.py --turns 9 --kills 0   more turns, whose medians are shown, and nobody is killed

The two rows of speed train a CNN on images of 32 × 32, a thread for each process; a worker takes some 120 ms for a
batch of 32. Without communication, each worker computes forward and backward of such batches, and nothing else.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import re
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from operator import truediv
from pathlib import Path
from typing import Any, NamedTuple

import torch
from less_traffic import JOBS, RATE
from torch import Tensor, nn

import ddp
from ddp.comm.meeting.role import current_role
from ddp.lab.bench.turns import take_turns
from ddp.models import CNN
from ddp.optim import cosine, with_warmup
from ddp.process.arguments import Parser, whole
from ddp.process.clock import now_s
from ddp.process.terminal import log
from ddp.train.steps.task import Classification

BATCH, SLEEPS = 32, 4.0  # samples; times what it computed, by the slow worker
MODES: tuple[dict[str, Any], ...] = (
    {"mode": "sync"},
    {"mode": "sync", "backup_workers": 1},
    {"mode": "async"},
    {"mode": "bounded", "staleness": 2},
)
SEEDS = (0, 1, 2)


class Sizes(NamedTuple):
    """Says how much is measured; a first look takes less."""

    num_updates: int = 120  # of a turn, of which a quarter warms up
    alone_s: float = 8.0
    digits_steps: int = 345


class Row(NamedTuple):
    """What is measured, what was found, and what it should be."""

    name: str
    found: str
    target: str


# ------------------------------------------------------------------------------------------------------ a slow worker


class Slowed(Classification):
    """Lets a worker sleep before each batch, in proportion to what it computed for the one before."""

    def __init__(self, *, is_slow: bool) -> None:
        super().__init__()
        self._slow = [is_slow]  # no plain value, which would have to be the same everywhere
        self._computed = [time.thread_time()]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """Returns what a classification does."""
        if model.training and self._slow[0]:
            time.sleep(SLEEPS * (time.thread_time() - self._computed[0]))
        self._computed[0] = time.thread_time()
        return super().loss(model, batch)


def _is_slow_one() -> bool:
    part = current_role()
    return part is not None and str(part) == "worker 0"


class Moments(ddp.Callback):
    """Notes when each step has ended."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        self.times_s.append(now_s())


def _cnn() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return CNN(in_channels=3, image_size=32, num_classes=10), (torch.randn(2048, 3, 32, 32), torch.arange(2048) % 10)


def served_s(sizes: Sizes, mode: Mapping[str, Any], *, batch: int, has_slow: bool) -> float:
    """Returns the seconds of an update, at a server."""
    model, data = _cnn()
    moments = Moments()
    ddp.fit(
        model,
        data,
        torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        loss=Slowed(is_slow=has_slow and _is_slow_one()),
        global_batch=batch,
        max_steps=sizes.num_updates,
        strategy=ddp.ParameterServer(**mode),
        folder=ddp.Folder(None, progress=False),
        callbacks=[moments],
    )
    since = sizes.num_updates // 4
    times_s = moments.times_s[since:]
    return (times_s[-1] - times_s[0]) / (len(times_s) - 1) if times_s else 0.0


def alone(sizes: Sizes) -> float:
    """Returns how many batches a worker computes in a second, without a word to the others, who do the same."""
    comm = ddp.init()
    model, (images, classes) = _cnn()
    model.train()
    task, count, begin_s = Slowed(is_slow=comm.rank == 0), 0, 0.0
    for number in range(1_000_000):
        if number == 3:
            comm.barrier()
            begin_s, count = now_s(), 0
        start = number * BATCH % len(images)
        model.zero_grad()
        loss, num_items = task.loss(model, (images[start : start + BATCH], classes[start : start + BATCH]))
        (loss / num_items).backward()
        count += 1
        if begin_s and now_s() - begin_s > sizes.alone_s:
            break
    took_s = now_s() - begin_s
    comm.barrier()
    return count / took_s


def _launched(work: Any, *args: Any, workers: int, servers: int = 1, **how: Any) -> list[Any]:
    return ddp.launch(work, *args, workers=workers, servers=servers, threads_per_worker=1, **how)


def speeds(sizes: Sizes, num_turns: int) -> Iterator[Row]:
    """Yields the rows of speed."""
    run = partial(_launched, served_s, sizes)
    found = take_turns(
        {
            "async": lambda: 1 / run({"mode": "async"}, workers=3, batch=BATCH, has_slow=True)[0],
            "alone": lambda: sum(_launched(alone, sizes, workers=3, servers=0)),
        },
        num_turns,
    )
    asynchronous, without = (statistics.median(found[each]) for each in ("async", "alone"))
    ratio = statistics.median(map(truediv, found["async"], found["alone"]))
    in_words = f"{BATCH * asynchronous:.0f} of {BATCH * without:.0f} samples/s: {ratio:.2f}"
    yield Row("async, one of 3 workers sleeps 4/5 of its time: samples/s ÷ without communication", in_words, "≥ 0.85")
    found = take_turns(
        {
            "first": lambda: run({"backup_workers": 1}, workers=4, batch=3 * BATCH, has_slow=True)[0],
            "three": lambda: run({}, workers=3, batch=3 * BATCH, has_slow=False)[0],
        },
        num_turns,
    )
    first, three = (1e3 * statistics.median(found[each]) for each in ("first", "three"))
    ratio = statistics.median(map(truediv, found["first"], found["three"]))
    in_words = f"{first:.0f} and {three:.0f} ms: {ratio:.2f}"
    yield Row("first 3 of 4, one of them so slow: step ÷ that of three workers", in_words, "≤ 1.2")


# ------------------------------------------------------------------------------------------------------------- digits


def digits(sizes: Sizes, mode: str, seed: int) -> float:
    """Returns the accuracy on the held-out digits, %."""
    job = JOBS["digits"]
    torch.manual_seed(seed)
    module, (train, judged) = job.model(), job.data()
    state = ddp.fit(
        module,
        train,
        torch.optim.AdamW(module.parameters(), lr=RATE),
        loss=Slowed(is_slow=_is_slow_one()),
        global_batch=job.global_batch,
        max_steps=sizes.digits_steps,
        test_data=judged,
        evaluation=ddp.Evaluation(every_epochs=None),
        schedule=with_warmup(cosine(), fraction=0.05),
        batches=ddp.Batches(seed=seed),
        strategy=ddp.ParameterServer(mode=mode),  # type: ignore[arg-type]
        folder=ddp.Folder(None, progress=False),
    )
    return 100 * state.evaluation["test_accuracy"]


def accuracies(sizes: Sizes) -> Iterator[Row]:
    """Yields the row of digits."""
    means = {
        mode: statistics.fmean(_launched(digits, sizes, mode, seed, workers=3)[0] for seed in SEEDS)
        for mode in ("async", "sync")
    }
    in_words = f"{means['async']:.2f} − {means['sync']:.2f} %: {means['async'] - means['sync']:+.2f}"
    yield Row(f"digits, accuracy of async − sync, mean of {len(SEEDS)} seeds, points", in_words, "≥ −1")


# -------------------------------------------------------------------------------------------------------------- kills

STEP, SAMPLES, EPOCHS, INTERVAL = 10, 46, 6, 4  # samples of a step; steps between checkpoints
NUM_STEPS = EPOCHS * -(-SAMPLES // STEP)


class Counts(nn.Module):
    """A weight for each sample, which by SGD with rate 1 falls by 1 ÷ batch for each time that the sample counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def forward(self, index: Tensor) -> Tensor:
        return self.weight[index]


class Counting(ddp.Task):
    """Lets each sample count; a part takes a moment."""

    main_metric = "loss"

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Returns the sum of the weights."""
        time.sleep(0.02)
        return model(batch[0]).sum(), len(batch[0])


def each_counted_once(weight: Tensor) -> bool:
    """Returns True if each sample has counted once an epoch: in steps of 10 samples, or in the last one, of 6."""
    last = SAMPLES % STEP
    may_be = {round(k / STEP + (EPOCHS - k) / last, 9) for k in range(EPOCHS + 1)}
    return {round(-each, 9) for each in weight.tolist()} <= may_be and abs(weight.sum() + NUM_STEPS) < 1e-9


class Killer(ddp.Callback):
    """Kills a process of the run once, some time after a step. At server 0.

    Attributes:
        first_step: the step after which this process began.
    """

    def __init__(self, folder: Path, who: str, seed: int) -> None:
        self._folder, self._who, choice = folder, who, random.Random(seed)
        self._step, self._after_s = choice.randint(1, NUM_STEPS - 6), choice.uniform(0, 0.03)
        self.first_step: int | None = None

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        me = current_role()
        assert me is not None
        self.first_step = state.step - 1 if self.first_step is None else self.first_step
        if not me.incarnation:
            (self._folder / "last step").write_text(str(state.step))
            if state.step == self._step:
                victim = int((self._folder / self._who).read_text())
                threading.Timer(self._after_s, os.kill, (victim, signal.SIGKILL)).start()


class Ended(NamedTuple):
    """What a server has at the end.

    Attributes:
        num_gone: updates that were made again; 0 if no server was lost.
        num_said: how many were said to be.
    """

    weight: Tensor
    num_gone: int
    num_said: int


def counted(folder: Path, mode: Mapping[str, Any], who: str, seed: int) -> Ended:
    """Trains, while one process is killed."""
    me = current_role()
    assert me is not None
    (folder / str(me)).write_text(str(os.getpid()))
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    module, killer = Counts(), Killer(folder, who, seed)
    ddp.fit(
        module,
        (torch.arange(SAMPLES), torch.zeros(SAMPLES)),
        torch.optim.SGD(module.parameters(), lr=1.0),
        loss=Counting(),
        global_batch=STEP,
        epochs=EPOCHS,
        strategy=ddp.ParameterServer(**mode),
        folder=ddp.Folder(folder / "run", every_steps=INTERVAL, progress=False, curves=False),
        callbacks=[killer],
    )
    said = re.findall(r"(\d+) updates? (?:is|are) gone", "\n".join(messages))  # again, if another worker has seen more
    num_gone = int((folder / "last step").read_text()) - (killer.first_step or 0) if me.incarnation else 0
    return Ended(module.weight.detach(), num_gone, max(map(int, said), default=0))


def kills(num_kills: int) -> Iterator[Row]:
    """Yields the rows of kills."""
    workers: list[Ended] = []
    servers: list[Ended] = []
    for number in range(num_kills):
        mode = MODES[number % len(MODES)]
        for who, ended in (("worker 1", workers), ("server 0", servers)):
            with tempfile.TemporaryDirectory(prefix="ddp-servers-") as folder:
                ended.append(_launched(counted, Path(folder), mode, who, number, workers=3)[0])
    good = sum(each_counted_once(each.weight) for each in workers)
    what = "a worker is killed: each sample counts once per epoch, runs"
    yield Row(what, f"{good} of {len(workers)}", f"{num_kills} of {num_kills}")
    good = sum(each_counted_once(each.weight) and is_said(each) for each in servers)
    most = max(each.num_gone for each in servers)
    what = "a server is killed: the same, and updates that are gone are said and at most those of a checkpoint interval"
    yield Row(what, f"{good} of {len(servers)}, at most {most} of {INTERVAL}", f"{num_kills} of {num_kills}")


def is_said(ended: Ended) -> bool:
    """Returns True if the updates that are gone are few, and were said, but for one that no worker had seen."""
    return ended.num_gone <= INTERVAL and ended.num_gone - 1 <= ended.num_said <= ended.num_gone


# ------------------------------------------------------------------------------------------------------------ the rows


def show(num_turns: int, num_kills: int, sizes: Sizes) -> None:
    """Measures everything, and prints each row as soon as it is known."""
    print(f"parameter servers: medians of {num_turns} turns, and {num_kills} kills of each kind", flush=True)
    rows = chain(speeds(sizes, num_turns), accuracies(sizes)) if num_turns else ()
    for row in chain(rows, kills(num_kills) if num_kills else ()):
        print(f"- {row.name}: {row.found} (goal {row.target})", flush=True)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, what in (("turns", 5, "turns of each measurement"), ("kills", 20, "of workers, and of servers")):
        what += " (default: %(default)s)"
        parser.add_argument(f"--{name}", type=whole(0), default=default, metavar="N", help=what)
    options = parser.parse_args()
    show(options.turns, options.kills, Sizes())


if __name__ == "__main__":
    main()
