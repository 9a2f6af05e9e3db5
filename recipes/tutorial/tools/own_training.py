"""The exercises of guides to strategies: a training of the reader's own, mirrored; and the same on a small cluster.

    scripts/ddp exercise mirrored my_model:train
    scripts/ddp exercise cluster my_model:train

`train()` makes a model, trains it by `ddp.fit(…, strategy="mirrored")`, for the cluster "multi_worker", and needs no
argument. It runs twice on one worker, and once on two. Its bits must follow from the program alone, and two workers
must come to where one does, because the samples of a step are the same.

The cluster is two hosts of `scripts/netbed/`, where this machine permits such. Elsewhere it is two workers which take
each other for workers of another host, and so send messages.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ddp
from ddp.comm import connect
from ddp.errors import WorkersFailed
from ddp.process.terminal import log
from ddp.run.launch.from_python import launch
from ddp.run.settings.address import from_address, is_address
from recipes.tutorial.tools.mistake import Mistake, in_words, raise_first

WORDS = {"mirrored": "mirrored", "cluster": "multi_worker"}  # exercise → strategy
NEXT = {
    "mirrored": 'solved; the same on a small cluster: exercise cluster, with strategy="multi_worker"',
    "cluster": "solved; on real hosts: the same program under torchrun, or with TF_CONFIG (docs/engines.md)",
}
BED = Path(__file__).parents[3] / "scripts" / "netbed" / "hosts.py"
NEAR = 0.02  # of the way that the weights have gone: what rounding may come to over some hundred steps
LIMIT_S, RUNS = 100, "the training runs"
CAUSES = {  # in the name of a layer's class → why two workers compute something else than one
    "BatchNorm": "BatchNorm normalises over a worker's share of the batch: ddp.SyncBatchNorm.convert(model) over all",
    "Dropout": "dropout draws for each part of the batch: ddp.Batches(num_shards=2) makes two parts also on one worker",
}


class Found(NamedTuple):
    """Tells how a training went on one rank.

    Attributes:
        mistake: arguments of `Mistake`; () for none. All else is empty then.
        word: of the strategy.
        losses: of each step.
        start, weights: of the model, flat, before and after.
        layers: names of their classes, innermost ones; the last one last.
    """

    mistake: tuple[str, ...] = ()
    word: str = ""
    losses: tuple[float, ...] = ()
    start: Tensor = torch.empty(0)
    weights: Tensor = torch.empty(0)
    layers: tuple[str, ...] = ()
    num_hosts: int = 0


class Losses(ddp.Callback):
    """Notes the loss of each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        self.found.append(report.loss)


def as_rank(name: str, code: str, scratch: str, is_host: bool = False) -> Found:
    """Runs the reader's training on one rank.

    Args:
        name: its address, MODULE:NAME.
        code: the reader's folder.
        scratch: where the training may write.
        is_host: this rank takes itself for a host of its own.
    """
    if is_host:
        connect.boot_id = lambda: f"host {os.environ.get('RANK')}"
    library, found = ddp.fit, list[Found]()

    def watched(model: nn.Module, *given: Any, callbacks: Any = (), **how: Any) -> ddp.TrainState:
        start, losses, word = flat(model), Losses(), how.get("strategy", "auto")
        state = library(model, *given, callbacks=[*callbacks, losses], **how)
        layers = tuple(type(each).__name__ for each in model.modules() if not list(each.children()))
        word, num_hosts = getattr(word, "strategy", word), len(ddp.init().hosts)
        found.append(Found((), word, tuple(losses.found), start, flat(model), layers, num_hosts))
        return state

    module = None
    try:
        ddp.fit = watched  # before the reader's file imports it
        train = from_address(name, key="train", folder=Path(code))
        module = sys.modules[name.partition(":")[0]]
        with chdir(scratch):
            train()
        if not found:
            return Found((RUNS, "it has not called ddp.fit", f"{name} calls it, on every worker"))
        ddp.shutdown()
        return found[-1]
    except Exception as error:
        return Found(in_words(RUNS, error, module))
    finally:
        ddp.fit = library


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


def training(name: str, exercise: str) -> Iterator[str]:
    """Returns a line for each thing that is right with the reader's training.

    Args:
        name: its address, MODULE:NAME.
        exercise: "mirrored" or "cluster".

    Raises:
        Mistake: something is wrong with it; while the lines are read.
        ValueError: that is no address of a function.
    """
    if not is_address(name):
        raise ValueError(f"{exercise} {name!r}: give the address of a training of yours, e.g. my_model:train")
    from_address(name, key=exercise, folder=Path.cwd())
    return _judged(name, exercise)


def _judged(name: str, exercise: str) -> Iterator[str]:
    alone = _on_workers(name, 1)[0]
    yield from judged_alone(alone, _on_workers(name, 1)[0], WORDS[exercise])
    together, where = _on_hosts(name) if exercise == "cluster" else (_on_workers(name, 2), "two workers of one host")
    yield from judged_together(alone, together, where)


def judged_alone(alone: Found, again: Found, word: str) -> Iterator[str]:
    """Yields what is right with two trainings on one worker; raises Mistake at what is not."""
    if alone.word != word:
        raise Mistake("the strategy", f"found {alone.word!r}, expected {word!r}", f"ddp.fit(…, strategy={word!r})")
    yield f"a model of {alone.weights.numel():,} numbers makes {len(alone.losses)} steps with strategy={word!r}"
    if not torch.equal(alone.start, again.start):
        hint = "torch.manual_seed(0) before the model is made"
        raise Mistake("a second training", "it begins with other weights", hint)
    if not torch.equal(alone.weights, again.weights):
        hint = "the data or the loss draw numbers without a seed: give them a torch.Generator with one"
        raise Mistake("a second training", "it ends with other weights", hint)
    yield "a second training has the same bits"
    tenth = max(1, len(alone.losses) // 10)
    first, last = (sum(losses) / tenth for losses in (alone.losses[:tenth], alone.losses[-tenth:]))
    if not last < first:
        softmax = "Softmax" in alone.layers[-1]
        hint = "the model ends in a softmax, which torch's cross_entropy has in it" if softmax else "try another rate"
        raise Mistake("the model learns", f"the loss went from {first:.3f} to {last:.3f}", hint)
    yield f"the model learns: the loss falls from {first:.3f} to {last:.3f}"


def judged_together(alone: Found, together: list[Found], where: str) -> Iterator[str]:
    """Yields what is right with a training on two workers beside that on one; raises Mistake at what is not."""
    if len(set(map(len, (alone.losses, *(each.losses for each in together))))) > 1:
        raise Mistake(
            f"{where}: as many steps as one worker makes",
            f"{len(together[0].losses)} steps, where one worker makes {len(alone.losses)}",
            "global_batch counts the samples of all workers, so leave it as it is; and give every worker all data, "
            "because fit deals them out",
        )
    if any(not torch.equal(each.weights, together[0].weights) for each in together):
        raise Mistake(f"{where}: equal replicas", "the weights differ", "change a model on all workers alike")
    yield f"{where}: the replicas are equal, bit by bit"
    way = (alone.weights - alone.start).norm()
    off = ((together[0].weights - alone.weights).norm() / way).item()
    if not off <= NEAR:
        hints = [why for kind, why in CAUSES.items() if any(kind in layer for layer in alone.layers)]
        otherwise = "do the data, the rate or the loss follow the rank or the world size? fit sees to all of that"
        found = f"their weights end {off:.1%} of the way from those of one worker"
        raise Mistake(f"{where}: the mathematics of one process", found, "; ".join(hints) or otherwise)
    yield f"{where}: the mathematics of one process, on the same batches: {off:.0e} of the way apart"


# --- where it runs ---------------------------------------------------------------------------------------------------


def _on_workers(name: str, workers: int, *, are_hosts: bool = False) -> list[Found]:
    with tempfile.TemporaryDirectory() as scratch:
        words = name, str(Path.cwd()), scratch, are_hosts
        try:
            return _whole(launch(as_rank, *words, workers=workers, threads_per_worker=1, timeout_s=LIMIT_S))
        except WorkersFailed as error:
            raise Mistake(RUNS, str(error)) from None


def _on_hosts(name: str) -> tuple[list[Found], str]:
    """Trains on two virtual hosts with a worker each, or on two workers that take each other for such."""
    with tempfile.TemporaryDirectory() as scratch:
        bed = [sys.executable, str(BED), "--name", f"exercise{os.getpid()}", "run", "--up", "2", "--timeout"]
        words = [str(LIMIT_S), "-m", __name__, name, str(Path.cwd()), scratch]
        paths = {"PYTHONPATH": os.pathsep.join([str(BED.parents[2]), str(Path.cwd())]), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*bed, *words], env={**os.environ, **paths}, capture_output=True, text=True)
        results = [Path(scratch) / f"found-{rank}.pkl" for rank in range(2)]
        if done.returncode == 0 and all(result.exists() for result in results):
            found = _whole([pickle.loads(result.read_bytes()) for result in results])
            return found, f"{found[0].num_hosts} virtual hosts"
    log.info("no virtual hosts here: %s", done.stderr.strip().rpartition("\n")[2])
    return _on_workers(name, 2, are_hosts=True), "two workers, each as on a host of its own"


def _whole(ranks: list[Found]) -> list[Found]:
    """Raises the mistake that a rank has found, if any."""
    raise_first(rank.mistake for rank in ranks)
    return ranks


if __name__ == "__main__":  # one rank of a virtual host
    from recipes.tutorial.tools import own_training  # whose `Found` the command knows

    name, code, scratch = sys.argv[1:]
    result = own_training.as_rank(name, code, scratch)
    (Path(scratch) / f"found-{os.environ['RANK']}.pkl").write_bytes(pickle.dumps(result))
