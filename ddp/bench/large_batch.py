"""Trains one model at several batch sizes with several optimizers, to see what a large batch costs.

    tune     for each optimizer and batch: four rates, one run each, judged on the tuning samples
    test     the best rate again with three seeds, judged on the test samples, which tuning has never seen

Every run takes the same number of samples, so a batch 128 times larger makes 128 times fewer steps. Every optimizer has
the same budget for tuning, because an untuned rival proves nothing (arXiv 2102.06356). The rates are those of the
smallest batch, scaled by the optimizer's usual rule.

The model predicts a byte of Python's standard library from the eight bytes before it. Each run that has ended is a line
of results.jsonl, so a study that was stopped goes on with the next run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ddp.comm.setup import init, shutdown
from ddp.data.sets import standard_library
from ddp.errors import Diverged
from ddp.optim import LAMB, LARS, cosine, parameter_groups, scaled_rate, with_warmup
from ddp.process.clock import now_s
from ddp.process.files import json_object, to_append, write_whole
from ddp.setting import Scaling
from ddp.train.callbacks import Callback, NoiseMeter
from ddp.train.fit import fit
from ddp.train.monitor.noise_scale import Estimate
from ddp.train.state import StepReport, TrainState
from ddp.train.tasks.classification import Classification

CONTEXT = 8  # bytes before the one that is predicted
EPOCHS, BATCHES, SEEDS = 2, (64, 1024, 8192), (0, 1, 2)
NUM_TRAIN, NUM_JUDGED = 800_000, 20_000
WARMUP = 0.1  # of the run
NUM_EVALUATIONS = 16


@dataclass(frozen=True)
class Rival:
    """An optimizer with the rates that it is tried with.

    Attributes:
        rates: for a batch of `BATCHES[0]` samples.
        rule: by which they follow the batch.
    """

    make: Callable[..., Optimizer]
    rates: tuple[float, ...]
    rule: Scaling
    weight_decay: float


RIVALS = {
    "SGD": Rival(partial(SGD, momentum=0.9, nesterov=True), (0.0005, 0.004, 0.03, 0.2), "linear", 1e-4),
    "AdamW": Rival(AdamW, (3e-4, 1e-3, 3e-3, 1e-2), "sqrt", 0.01),
    "LARS": Rival(LARS, (0.1, 0.3, 1.0, 3.0), "sqrt", 1e-4),
    "LAMB": Rival(LAMB, (1e-3, 3e-3, 1e-2, 3e-2), "sqrt", 0.01),
}


@dataclass(frozen=True)
class Trial:
    """One run of the study.

    Attributes:
        rate: for a batch of `BATCHES[0]` samples.
        is_test: judged on the test samples, else on the tuning samples.
    """

    rival: str
    batch: int
    rate: float
    seed: int
    is_test: bool
    num_train: int


@dataclass(frozen=True)
class Result:
    """Holds what a run has reached.

    Attributes:
        accuracy: share of bytes predicted; None if the run diverged.
        curve: (samples, accuracy) of all evaluations.
        noise_scale: see `Estimate`.
    """

    trial: Trial
    accuracy: float | None = None
    bits_per_byte: float | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)
    noise_scale: Estimate | None = None
    seconds: float = 0.0


class NextByte(nn.Module):
    """Predicts a byte from the `CONTEXT` bytes before it, [n, CONTEXT] uint8 → [n, 256] logits."""

    def __init__(self, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width // CONTEXT)
        blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(depth)]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, 256)

    def forward(self, context: Tensor) -> Tensor:
        """Returns the logits."""
        scores: Tensor = self.head(self.blocks(self.embedding(context.int()).flatten(1)))
        return scores


# ------------------------------------------------------------------------------------------------------- on every rank


def study(folder: str, num_train: int) -> None:
    """Makes the runs that `folder` has no results of yet. Collective."""
    torch.set_num_threads(1)
    comm = init(device="cpu")
    path = Path(folder) / "results.jsonl"
    results = {result.trial: result for result in read(path)}
    comm.barrier()  # before rank 0 writes
    if comm.rank == 0:  # without a line that was cut off, which the next one would join
        write_whole(path, "".join(f"{json.dumps(asdict(result))}\n" for result in results.values()))
    train, tuning, test = samples(num_train)
    trials = list(tuning_trials(num_train))
    num_trials = len(trials) + len(RIVALS) * len(BATCHES) * len(SEEDS)
    for number, trial in enumerate(trials_in_order(trials, results), start=1):
        if trial in results:
            continue
        result = run(trial, train, test if trial.is_test else tuning)
        if result is None:  # stopped by a signal
            break
        results[trial] = result
        if comm.rank == 0:
            with to_append(path) as file:
                file.write(json.dumps(asdict(result)) + "\n")
            print(f"run {number} of {num_trials}: {in_words(result)}", flush=True)
    shutdown()


def samples(num_train: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """Returns contexts and next bytes to train on, to tune on, and to test on."""
    corpus = standard_library.corpus()
    seen, unseen = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT)
        for text in (corpus.train, corpus.held_out)
    )
    border = len(seen) * 9 // 10  # whole files are on either side, but for one

    def evenly(windows: Tensor, num: int) -> tuple[Tensor, Tensor]:
        some = windows[:: max(1, len(windows) // num)][:num]
        return some[:, :CONTEXT].contiguous(), some[:, CONTEXT].long()

    return evenly(seen[:border], num_train), evenly(seen[border:], NUM_JUDGED), evenly(unseen, NUM_JUDGED)


def tuning_trials(num_train: int) -> Iterator[Trial]:
    """Yields the runs that find the best rate of each optimizer at each batch."""
    for batch in reversed(BATCHES):  # the quick ones first
        for name, rival in RIVALS.items():
            for rate in rival.rates:
                yield Trial(name, batch, rate, SEEDS[0], is_test=False, num_train=num_train)


def trials_in_order(trials: Sequence[Trial], results: Mapping[Trial, Result]) -> Iterator[Trial]:
    """Yields the runs for tuning, and, once `results` has them, the runs with the best rates and all seeds."""
    yield from trials
    for best in best_of(trials, results):
        for seed in SEEDS:
            yield Trial(best.rival, best.batch, best.rate, seed, is_test=True, num_train=best.num_train)


def planned(results: Sequence[Result], num_train: int) -> list[Result]:
    """Returns the results of a study's own runs, without those of other rates and lengths."""
    trials, known = list(tuning_trials(num_train)), {result.trial: result for result in results}
    if not all(trial in known for trial in trials):  # then none is tested yet
        return [known[trial] for trial in trials if trial in known]
    return [known[trial] for trial in trials_in_order(trials, known) if trial in known]


def best_of(trials: Sequence[Trial], results: Mapping[Trial, Result]) -> list[Trial]:
    """Returns, for each optimizer and batch, the run with the best rate."""
    best: dict[tuple[str, int], Trial] = {}
    for trial in trials:
        key = trial.rival, trial.batch
        if key not in best or (results[trial].accuracy or 0) > (results[best[key]].accuracy or 0):
            best[key] = trial
    return list(best.values())


def run(trial: Trial, train: tuple[Tensor, Tensor], judged: tuple[Tensor, Tensor]) -> Result | None:
    """Returns what a run reaches; None if it was stopped. Collective."""
    rival, num_samples = RIVALS[trial.rival], EPOCHS * len(train[0])
    rate = scaled_rate(trial.rate, global_batch=trial.batch, base_batch=BATCHES[0], rule=rival.rule)
    torch.manual_seed(trial.seed)
    module, curve, noise, start_s = NextByte(), Curve(), NoiseMeter(), now_s()
    adapts = {"adapt": "never"} if trial.rival in ("LARS", "LAMB") else {}
    optimizer = rival.make(parameter_groups(module, weight_decay=rival.weight_decay, **adapts), lr=rate)
    try:
        state = fit(
            module,
            train,
            optimizer,
            loss=Classification(),
            global_batch=trial.batch,
            epochs=EPOCHS,
            test_data=judged,
            evaluate_every_epochs=None,
            evaluate_every_steps=max(1, num_samples // trial.batch // NUM_EVALUATIONS),
            evaluation_batch=4096,
            schedule=with_warmup(cosine(), fraction=WARMUP),
            seed=trial.seed,
            noise_scale_every=4,
            checkpoint_dir=None,
            progress=False,
            callbacks=[curve, noise],
        )
    except Diverged:
        return Result(trial, seconds=now_s() - start_s)
    if state.stopped_by:
        return None
    accuracy, bits = state.evaluation["test_accuracy"], state.evaluation["test_loss"] / math.log(2)
    return Result(trial, accuracy, bits, curve.points, noise.scale.estimate(), now_s() - start_s)


class Curve(Callback):
    """Notes the accuracy of each evaluation."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def step_end(self, state: TrainState, report: StepReport) -> None:
        self._samples = state.sampler.position

    def evaluated(self, state: TrainState) -> None:
        self.points.append((self._samples, state.evaluation["test_accuracy"]))


def read(path: Path) -> list[Result]:
    """Returns the results that a study has written, without a last line that was cut off."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            plain = json_object(line)
        except ValueError:
            continue
        noise = plain.pop("noise_scale")
        trial, curve = Trial(**plain.pop("trial")), [(samples, accuracy) for samples, accuracy in plain.pop("curve")]
        found.append(Result(trial, **plain, curve=curve, noise_scale=noise and Estimate(*noise)))
    return found


def in_words(result: Result) -> str:
    """Returns one run in one line."""
    trial, kind = result.trial, "test" if result.trial.is_test else "tune"
    reached = "diverged" if result.accuracy is None else f"{result.accuracy:.2%}"
    about = f"{trial.rival}, batch {trial.batch:,}, rate {trial.rate:g}, seed {trial.seed}"
    return f"{kind} {about}: {reached} in {result.seconds:.0f} s"
