"""Local SGD: rounds of a worker's own steps, beside a slow simulation of all workers, torch's optimizer, one process.

One start of four ranks, which are two hosts of two, makes all runs; each is compared here with what is expected.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import itertools
import logging
import os
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from members import GLOBAL_BATCH, NUM_SAMPLES, bits_of, cnn, fitted, flat, gpt, mlp, samples
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.comm import connect
from ddp.data.orders.steps import RoundLength, RoundSizes
from ddp.errors import ConfigError, Diverged
from ddp.process.streams import dropout_stream
from ddp.process.terminal import log
from ddp.run.settings.reader import from_plain
from ddp.train.steps.task import Task

WORKERS, SEED = 4, 5
HOSTS = ((0, 1), (2, 3))
OWN_BUCKETS = {"bucket_cap_mb": 1e-9}  # each parameter has one


class Case(NamedTuple):
    """A run: of which model, with which policy, optimizer and clipping."""

    model: Callable[[], nn.Module]
    policy: ddp.LocalSGD
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda given: torch.optim.SGD(given, lr=0.05, momentum=0.9)
    clip_norm: float | None = None
    epochs: int = 2


def adamw(given: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(given, lr=0.01)


DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}
CASES = {
    "mlp": Case(mlp, ddp.LocalSGD(every=4), clip_norm=0.5),
    "a round is longer than an epoch": Case(mlp, ddp.LocalSGD(every=8), adamw),
    "cnn": Case(cnn, ddp.LocalSGD(every=3, outer_lr=0.5)),
    "gpt": Case(gpt, ddp.LocalSGD(every=2, **DILOCO), adamw, 0.7),
    "warm-up": Case(mlp, ddp.LocalSGD(every=3, warmup_samples=35, **DILOCO), adamw, 0.5),
    "islands": Case(gpt, ddp.LocalSGD(every=2, island="host", **DILOCO), adamw, 0.5),
    "delay": Case(cnn, ddp.LocalSGD(every=3, delay=2, outer_lr=0.8)),
    "fragments": Case(mlp, ddp.LocalSGD(every=4, delay=3, fragments=3, **DILOCO, **OWN_BUCKETS), clip_norm=0.5),
}


def schedule(done: float, of: float) -> float:
    return 1.0 - 0.8 * done / of


def made(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    module = case.model().double()
    return module, case.optimizer(module.parameters())


class Watch(ddp.Callback):
    """Keeps parameters and statistics after each round, and reports."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.reports: list[ddp.StepReport] = []

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        self.seen.append(flat(state.model.module))
        self.reports.append(report)


def kind_of(case: Case) -> str:
    return case.model.__name__


def trained(case: Case, **how: Any) -> tuple[Tensor, list[tuple[float, float]]]:
    """Returns [rounds + 1, n], as `ddp.fit` trains on this rank, its end last; and losses and counts."""
    module, optimizer = made(case)
    watch, task = Watch(), {"loss": ddp.LanguageModel()} if kind_of(case) == "gpt" else {}
    given = {"strategy": case.policy, "clip_norm": case.clip_norm, "epochs": case.epochs, "schedule": schedule, **how}
    fitted(module, samples(kind_of(case)), optimizer, callbacks=[watch], **task, **given)
    watch.seen.append(flat(module))
    return torch.stack(watch.seen), [(report.loss, report.num_items) for report in watch.reports]


# --- the slow simulation ---------------------------------------------------------------------------------------------


class Simulation:
    """All workers, one after the other, in plain sums."""

    def __init__(self, case: Case) -> None:
        self.case, self.policy = case, case.policy
        module, _ = made(case)
        self.modules = [copy.deepcopy(module) for _ in range(WORKERS)]
        self.optimizers = [case.optimizer(each.parameters()) for each in self.modules]
        self.common = [parameter.detach().clone() for parameter in module.parameters()]
        self.velocity = [torch.zeros_like(each) for each in self.common]
        backwards = list(range(len(self.common)))[::-1]
        cuts = [part * len(backwards) // self.policy.fragments for part in range(self.policy.fragments + 1)]
        self.fragments = [backwards[begin:end] for begin, end in itertools.pairwise(cuts)]
        self.launched: list[list[list[Tensor]] | None] = [None] * len(self.fragments)
        self.weights: list[list[float]] = [[] for _ in self.fragments]
        self.items = [[0.0] * WORKERS for _ in self.fragments]
        self.steps = [0] * len(self.fragments)
        self.seen: list[list[Tensor]] = []
        self.losses: list[tuple[float, float]] = []

    def run(self) -> None:
        sampler = ddp.TrainSampler(NUM_SAMPLES, global_batch=NUM_SAMPLES, rank=0, world_size=1, seed=SEED)
        position, step = 0, 0
        for _ in range(self.case.epochs):
            order = list(next(iter(sampler.plans())).micros[0].indices)
            sampler.commit(next(iter(sampler.plans())))
            start = 0
            while start < NUM_SAMPLES:
                is_round = position + start >= self.policy.warmup_samples
                size = min(GLOBAL_BATCH * (self.policy.every if is_round else 1), NUM_SAMPLES - start)
                chosen = order[start : start + size]
                if is_round:
                    self.round(chosen, step, position + start)
                else:
                    self.synchronous(chosen, step, position + start)
                self.seen.append([flat(each) for each in self.modules])
                start, step = start + size, step + 1
            position += NUM_SAMPLES
        self.settle()
        for module in self.modules:
            module.load_state_dict({**module.state_dict(), **dict(self.modules[0].named_buffers())})
        self.seen.append([flat(each) for each in self.modules])

    def gradients(self, worker: int, chosen: list[int], step: int, part: int) -> tuple[list[Tensor], float, float]:
        """Returns the gradient of the summed loss, the number of items, and that loss."""
        inputs, targets = samples(kind_of(self.case))
        module = self.modules[worker]
        dropout_stream(SEED, step, worker, part, torch.device("cpu"))
        outputs, given = module(inputs[chosen]), targets[chosen]
        loss = F.cross_entropy(outputs.flatten(0, -2), given.flatten(), reduction="sum")
        found = torch.autograd.grad(loss, list(module.parameters()))
        return list(found), float((given != -100).sum()), float(loss.detach())

    def step(self, worker: int, gradients: list[Tensor], done: float) -> None:
        norm = torch.cat([each.reshape(-1) for each in gradients]).norm()
        clip = self.case.clip_norm
        factor = 1.0 if clip is None else min(1.0, clip / (float(norm) + 1e-6))
        for parameter, gradient in zip(self.modules[worker].parameters(), gradients, strict=True):
            parameter.grad = gradient * factor
        optimizer = self.optimizers[worker]
        (rate,) = {group.setdefault("first", group["lr"]) for group in optimizer.param_groups}
        for group in optimizer.param_groups:
            group["lr"] = rate * schedule(done, self.case.epochs * NUM_SAMPLES)
        optimizer.step()

    def mean(self, found: list[tuple[list[Tensor], float, float]]) -> list[Tensor]:
        count = sum(items for _, items, _ in found)
        return [sum(each) / count for each in zip(*(gradients for gradients, _, _ in found), strict=True)]  # type: ignore[misc]

    def synchronous(self, chosen: list[int], step: int, position: int) -> None:
        found = [self.gradients(worker, self.share(chosen, worker), step, 0) for worker in range(WORKERS)]
        for worker in range(WORKERS):
            self.step(worker, self.mean(found), position + len(chosen) / 2)
        self.common = [parameter.detach().clone() for parameter in self.modules[0].parameters()]
        self.losses.append((sum(each[2] for each in found) / sum(each[1] for each in found), sum(e[1] for e in found)))

    @staticmethod
    def share(chosen: list[int], worker: int) -> list[int]:
        begin, end = (each * len(chosen) // WORKERS for each in (worker, worker + 1))
        return chosen[begin:end]

    def round(self, chosen: list[int], step: int, position: int) -> None:
        number, size = -(-len(chosen) // GLOBAL_BATCH), len(chosen)
        loss, counts = 0.0, [0.0] * WORKERS
        for inner in range(number):
            begin, end = inner * size // number, (inner + 1) * size // number
            found = [
                self.gradients(worker, self.share(chosen[begin:end], worker), step, inner) for worker in range(WORKERS)
            ]
            groups = HOSTS if self.policy.island == "host" else [(worker,) for worker in range(WORKERS)]
            for group in groups:
                for worker in group:
                    self.step(worker, self.mean([found[each] for each in group]), position + (begin + end) / 2)
            for worker in range(WORKERS):
                counts[worker] += found[worker][1]
                loss += found[worker][2]
                for fragment in self.items:
                    fragment[worker] += found[worker][1]
            for index in range(len(self.fragments)):
                self.steps[index] += 1
                if self.launched[index] is not None and self.steps[index] >= self.policy.delay:
                    self.apply(index)
            for index in range(len(self.fragments)):
                turn = (index + 1) * self.policy.every // len(self.fragments)
                if inner + 1 == turn or (inner + 1 == number < turn):
                    self.launch(index)
        if not self.policy.delay:
            self.settle()
            self.average_statistics(counts)
        self.losses.append((loss / sum(counts), sum(counts)))

    def launch(self, index: int) -> None:
        if self.launched[index] is not None:
            self.apply(index)
        parameters = [list(module.parameters()) for module in self.modules]
        self.launched[index] = [[each[k].detach().clone() for k in self.fragments[index]] for each in parameters]
        self.weights[index], self.items[index], self.steps[index] = self.items[index], [0.0] * WORKERS, 0

    @torch.no_grad()
    def apply(self, index: int) -> None:
        launched, weights, policy = self.launched[index], self.weights[index], self.policy
        assert launched is not None
        for place, k in enumerate(self.fragments[index]):
            mean = sum(w * (self.common[k] - launched[r][place]) for r, w in enumerate(weights)) / sum(weights)
            self.velocity[k] = policy.outer_momentum * self.velocity[k] + mean
            self.common[k] = self.common[k] - policy.outer_lr * (mean + policy.outer_momentum * self.velocity[k])
            for r, module in enumerate(self.modules):
                parameter = list(module.parameters())[k]
                parameter.copy_(self.common[k] + (parameter - launched[r][place]))
        self.launched[index] = None

    def settle(self) -> None:
        for index in range(len(self.fragments)):
            if self.launched[index] is not None:
                self.apply(index)
        late = [index for index in range(len(self.fragments)) if self.steps[index]]
        for index in late:
            self.launch(index)
            self.apply(index)

    def average_statistics(self, counts: list[float]) -> None:
        """Gives all modules the mean and the variance of a mixture of their distributions."""
        for layers in zip(*(module.modules() for module in self.modules), strict=True):
            if isinstance(layers[0], nn.BatchNorm2d):
                weights = torch.tensor(counts, dtype=torch.float64)[:, None] / sum(counts)
                means = torch.stack([layer.running_mean for layer in layers])
                squares = torch.stack([layer.running_var for layer in layers]) + means.square()
                mean, square = (weights * means).sum(0), (weights * squares).sum(0)
                for layer in layers:
                    layer.running_mean.copy_(mean)
                    layer.running_var.copy_(square - mean.square())


@functools.cache
def simulated(name: str) -> tuple[list[list[Tensor]], list[tuple[float, float]]]:
    simulation = Simulation(CASES[name])
    simulation.run()
    return simulation.seen, simulation.losses


# --- beside torch's own, and beside one process ----------------------------------------------------------------------

EVEN = 40  # samples, so that each inner step has ten; for torch, 32, so that an epoch is a whole round of four by eight


def of_torch(every: int) -> Tensor:
    """Returns the parameters after training with torch's optimizer for local SGD, on this rank."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # which torch's package shows itself
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

    module, optimizer = made(CASES["mlp"])
    averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)
    local = PostLocalSGDOptimizer(optimizer, averager)
    inputs, targets = samples("mlp")
    sampler = ddp.TrainSampler(32, global_batch=8, rank=dist.get_rank(), world_size=WORKERS, seed=SEED)
    for _ in range(2):
        for plan in sampler.plans():
            chosen = list(plan.micros[0].indices)
            local.zero_grad()
            F.cross_entropy(module(inputs[chosen]), targets[chosen]).backward()
            local.step()
            sampler.commit(plan)
    return flat(module)


def even(policy: ddp.Averaging, num_samples: int = EVEN, **how: Any) -> Tensor:
    module, optimizer = made(CASES["mlp"])
    inputs, targets = samples("mlp")
    fitted(module, (inputs[:num_samples], targets[:num_samples]), optimizer, strategy=policy, **{"epochs": 2, **how})
    return flat(module)


def one_process(num_epochs: int) -> Tensor:
    module, optimizer = made(CASES["mlp"])
    inputs, targets = samples("mlp")
    sampler = ddp.TrainSampler(EVEN, global_batch=GLOBAL_BATCH, rank=0, world_size=1, seed=SEED)
    for _ in range(num_epochs):
        for plan in sampler.plans():
            chosen = list(plan.micros[0].indices)
            optimizer.zero_grad()
            F.cross_entropy(module(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()
            sampler.commit(plan)
    return flat(module)


# --- what the ranks do -----------------------------------------------------------------------------------------------


class NotFinite(Task):
    """Cross entropy, whose loss, gradient or parameters are infinite on rank 2, in the second round."""

    main_metric = "loss"

    def __init__(self, what: str) -> None:
        self.what, self._calls = what, [0]

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        self._calls[0] += model.training
        inputs, targets = batch
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, targets, reduction="sum")
        if dist.get_rank() == 2 and model.training and self._calls[0] == (4 if self.what == "parameters" else 5):
            if self.what == "loss":
                return loss + torch.inf, len(targets)
            outputs.register_hook(lambda gradient: gradient * torch.inf)
            if self.what == "parameters":
                for parameter in model.parameters():
                    parameter.data.fill_(torch.inf)
        return loss, len(targets)

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        raise AssertionError


def stopped(policy: ddp.LocalSGD, what: str) -> tuple[str, bool, Tensor]:
    """Returns what is said of a round that is not finite, if parameters are as before it, and those."""
    module, optimizer = made(CASES["mlp"])
    module.empty = nn.Parameter(torch.zeros(0, dtype=torch.float64))  # the first one, and can hold no NaN
    watch = Watch()
    try:
        fitted(module, samples("mlp"), optimizer, strategy=policy, loss=NotFinite(what), callbacks=[watch], epochs=2)
    except Diverged as error:
        return str(error), bool(torch.equal(flat(module), watch.seen[-1])), flat(module)
    return "", False, flat(module)


def kept_running_mean() -> bool:
    """Returns True if a layer of BatchNorm that stays in evaluation mode keeps its statistics to the bit."""
    torch.manual_seed(3)
    layer = nn.BatchNorm1d(36, dtype=torch.float64)
    layer.train = lambda mode=True: layer  # type: ignore[assignment, misc]
    layer.training, layer.running_mean = False, torch.rand(36, dtype=torch.float64)
    module, before = nn.Sequential(nn.Flatten(), layer, nn.Linear(36, 5).double()), layer.running_mean.clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fitted(module, samples("mlp"), optimizer, strategy=ddp.LocalSGD(every=3), epochs=1)
    return torch.equal(layer.running_mean, before)


def by_hand(policy: ddp.LocalSGD) -> tuple[list[str], float]:
    """Returns what is wrong after rounds by hand, of which one is not finite, and how far gradients are off."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    kind = ddp.strategies.Streaming if policy.delay else ddp.strategies.LocalSteps
    strategy = kind(module, torch.optim.SGD(module.parameters(), lr=0.05), policy)
    generator, off, wrong = torch.Generator().manual_seed(dist.get_rank()), 0.0, []
    for number in range(4):
        before = bits_of(module, strategy.optimizer)
        for inner in range(policy.every):
            x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
            x[0, 0] *= torch.inf if (number, inner) == (2, 1) and dist.get_rank() == 1 else 1.0
            twin = copy.deepcopy(module)
            expected = torch.autograd.grad(twin(x).square().mean(), list(twin.parameters()))
            with strategy.micro_batch(is_last=inner == policy.every - 1) as scale:
                (strategy.model(x).square().mean() * scale).backward()
                found = [parameter.grad for parameter in module.parameters()]
                if x.isfinite().all():
                    off = max(off, *map(off_by, found, expected))
        try:
            ddp.strategies.step(strategy)
        except Diverged:
            if number != 2 or any(parameter.grad is not None for parameter in module.parameters()):
                wrong.append(f"round {number} diverged, or leaves gradients")
            names = [name for name, _ in module.named_buffers()] if policy.delay else module.state_dict()
            after = bits_of(module, strategy.optimizer)
            wrong += [f"{name} has changed" for name in names if after[name] != before[name]]
    strategy.finish()
    return wrong + [name for name, value in module.state_dict().items() if not value.isfinite().all()], off


class Freezes(ddp.Callback):
    """Freezes the first layer after a round."""

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        state.model.module[1].requires_grad_(False)


def closes_its_group() -> bool:
    """Returns True if no group of ranks stays open after a run with a delay, in which a layer is frozen."""
    even(ddp.LocalSGD(every=3, delay=1), max_steps=2, callbacks=[Freezes()])
    return all(group._is_closed for group in ddp.init()._groups)


def hears_a_signal() -> tuple[int, list[str]]:
    """Returns the steps of a run that gets a signal on rank 1 in its first round, and what is said."""
    comm, said, flags = ddp.init(), said_on_rank_zero(log), list[Any]()

    class Began(ddp.Callback):
        def fit_start(self, state: ddp.TrainState) -> None:
            flags.append(state.stop_flag)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if flags and comm.rank == 1:
            flags[0].request("SIGTERM")
        return F.cross_entropy(outputs, targets)

    module, optimizer = made(CASES["mlp"])
    given = {"strategy": ddp.LocalSGD(every=3), "loss": loss, "callbacks": [Began()], "epochs": 2}
    return fitted(module, samples("mlp"), optimizer, **given).step, [each for each in said if "round" in each]


# --- mutants ---------------------------------------------------------------------------------------------------------

MUTANTS: dict[str, tuple[str, str, str, str]] = {  # where, a line, what becomes of it, and the case that is to notice
    "gradients are sums": (
        "local_sgd.LocalSteps._inner_step",
        "torch._foreach_div_(gradients, float(num_items))",
        "pass",
        "warm-up",
    ),
    "inner steps are not clipped": ("local_sgd.LocalSteps._inner_step", "norm, self._clip_norm)", "norm, None)", "mlp"),
    "differences are not weighted": (
        "local_sgd.LocalSteps._stepped",
        "torch._foreach_mul_(differences, float(self._num_items))",
        "torch._foreach_mul_(differences, riding.items_on_host * 0 + 6.5)",
        "mlp",
    ),
    "the difference points the other way": ("local_sgd.LocalSteps._stepped", "start - now", "now - start", "mlp"),
    "workers keep their own": (
        "local_sgd.LocalSteps._stepped",
        "torch._foreach_copy_([*inner], common)",
        "pass",
        "mlp",
    ),
    "no outer step": ("local_sgd.LocalSteps._outer_update", "self._outer.step()", "pass", "mlp"),
    "momentum is plain": (
        "local_sgd.LocalSteps._outer_update",
        "self._outer.step()",
        "self._outer.param_groups[0]['nesterov'] = False; self._outer.step()",
        "warm-up",
    ),
    "the outer rate is 1": (
        "local_sgd.LocalSteps._outer_update",
        "self._outer.step()",
        "self._outer.param_groups[0]['lr'] = 1.0; self._outer.step()",
        "warm-up",
    ),
    "variances lack that of the means": (
        "local_sgd.LocalSteps._average_statistics",
        "(own - mean).square()",
        "0 * own",
        "cnn",
    ),
    "statistics stay": ("local_sgd.LocalSteps._outer_update", "self._average_statistics(agreement)", "pass", "cnn"),
    "own progress is lost": (
        "local_sgd.Fragment.apply",
        "torch._foreach_add_(list(self.parameters), progress)",
        "pass",
        "delay",
    ),
    "progress counts twice": ("local_sgd.Fragment.apply", "self.take_back()", "self.launched = []", "delay"),
    "applied too early": ("local_sgd.Streaming._stepped", ">= self.rounds.delay", ">= self.rounds.delay - 1", "delay"),
    "launched together": (
        "local_sgd.Streaming._due",
        "(index + 1) * every // num == number",
        "num and number == every",
        "fragments",
    ),
    "what is under way is lost at the end": (
        "local_sgd.Streaming.finish",
        "            self.settle()",
        "            self._take_back()",
        "delay",
    ),
    "what came after is lost at the end": (
        "local_sgd.Streaming.settle",
        "if fragment.num_steps",
        "if False",
        "fragments",
    ),
}


def mutated(where: str, line: str, becomes: str) -> tuple[Any, str, Any]:
    """Returns whose attribute the mutant is, its name, and the mutant."""
    module, kind, name = where.split(".")
    owner: Any = getattr(importlib.import_module(f"ddp.strategies.{module}"), kind)
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    line, becomes = (each if source.count(each) else each.removeprefix("    ") for each in (line, becomes))
    assert source.count(line) == 1, f"{where} has no line {line!r} any more, or more than one"
    scope: dict[str, Any] = {}
    changed = source.replace(line, becomes).replace("super()", f"super({kind}, self)")
    exec(compile(changed, where, "exec"), function.__globals__, scope)
    return owner, name, scope[name]


def survivors() -> list[str]:
    """Returns the mutants whose run is like the library's on every rank."""
    comm, found = ddp.init(), []
    few = {name: {"max_steps": 1} for name in ("mlp", "cnn", "fragments")}  # of the last, not all is under way then
    names = dict.fromkeys(each[3] for each in MUTANTS.values())
    expected = {name: trained(CASES[name], epochs=1, **few.get(name, {}))[0] for name in names}
    for mutant, (*change, name) in MUTANTS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*mutated(*change))
            now = trained(CASES[name], epochs=1, **few.get(name, {}))[0]
        if not comm.agree_any(off_by(now, expected[name]) > 1e-9):
            found.append(mutant)
    return found


SAVED = {
    "rounds": ddp.LocalSGD(every=2, warmup_samples=15, **DILOCO),
    "late": ddp.LocalSGD(every=2, delay=1),
}


def said_on_rank_zero(log: logging.Logger) -> list[str]:
    """Returns what this rank warns of from now on."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    return said


def saved(folder: Path, policy: ddp.Averaging, *, stops: Sequence[int], **how: Any) -> dict[str, str]:
    """Returns this rank's bits after a run that ends after each of these numbers of steps, and goes on."""
    module, optimizer = made(CASES["gpt"])
    for number, stop in enumerate(stops):
        torch.manual_seed(number)  # the model is another one each time, and becomes the checkpoint's
        module = gpt().double()
        optimizer = adamw(module.parameters())
        given = {"strategy": policy, "max_steps": stop, "resume": "auto", "checkpoint_every_steps": 2, **how}
        fitted(module, samples("gpt"), optimizer, loss=ddp.LanguageModel(), folder=folder, **given)
    return bits_of(module, optimizer)


def resumed(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, policy in SAVED.items():
        stops = [2, 4, 6] if name == "rounds" else [2, 4]
        found[name] = [saved(folder / f"{name} {len(each)}", policy, stops=each) for each in (stops, stops[-1:])]
    said = said_on_rank_zero(log)
    found["mirrored"] = saved(folder / "rounds 1", ddp.Averaging(), stops=[8])
    found["again"] = saved(folder / "rounds 1", SAVED["rounds"], stops=[10])
    found["said"] = [each for each in said if "local_sgd" in each and "differ" not in each]
    return found


def on_two(folder: Path) -> tuple[list[str], dict[str, str]]:
    ddp.init(abort_s=60)
    said = said_on_rank_zero(log)
    bits = saved(folder / "rounds 3", SAVED["rounds"], stops=[8])
    ddp.shutdown()
    return [each for each in said if "workers, and" in each], bits


def everything(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"torch": of_torch(4)}
    ddp.init(abort_s=60)
    for name in [name for name in CASES if name != "islands"]:
        found[name] = trained(CASES[name])
    found["every=4"] = even(ddp.LocalSGD(every=4), 32, global_batch=8)
    found["every=1"] = even(ddp.LocalSGD(every=1), epochs=50)
    found["all warm-up"] = even(ddp.LocalSGD(every=4, warmup_samples=10**6))
    found["mirrored"] = even(ddp.Averaging())
    found["stopped"] = [stopped(ddp.LocalSGD(every=3), what) for what in ("loss", "gradient")]
    found["stopped late"] = stopped(ddp.LocalSGD(every=3, delay=1), "loss")[0]
    found["stopped by parameters"] = stopped(ddp.LocalSGD(every=3, delay=1, fragments=3, **OWN_BUCKETS), "parameters")
    found["by hand"] = [by_hand(policy) for policy in (ddp.LocalSGD(every=2), ddp.LocalSGD(every=2, delay=1))]
    found["kept"] = kept_running_mean()
    found["closed"] = closes_its_group()
    found["resumed"] = resumed(folder)
    found["survivors"] = survivors()
    ddp.shutdown()
    connect.boot_id = lambda: f"host {int(os.environ['RANK']) // 2}"
    ddp.init(abort_s=60)
    found["islands"] = trained(CASES["islands"])
    found["int8"] = even(ddp.LocalSGD(every=4, wire="int8", verify_every=1), 32, global_batch=8)
    found["hook"] = even(ddp.LocalSGD(every=4, warmup_samples=20, hook=ddp.gradients.PowerSGD(2)))
    found["signal"] = hears_a_signal()  # last, because a signal ends the program
    ddp.shutdown()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def on_ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(everything, WORKERS, folder, timeout_s=120)


def off_by(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_a_round_is_that_of_the_slow_simulation(on_ranks: list[dict[str, Any]], name: str) -> None:
    seen, losses = simulated(name)
    for rank, found in enumerate(on_ranks):
        trajectory, reports = found[name]
        assert len(trajectory) == len(seen)
        assert off_by(trajectory, torch.stack([each[rank] for each in seen])) < 1e-12
        assert reports == [pytest.approx(each, rel=1e-11) for each in losses]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_replicas_are_bit_equal_after_every_round_but_with_a_delay(on_ranks: list[dict[str, Any]], name: str) -> None:
    first, *others = [found[name][0] for found in on_ranks]
    parameters = sum(each.numel() for each in CASES[name].model().parameters())
    begin = len(first) - 1 if CASES[name].policy.delay else 0
    assert all(torch.equal(first[begin:, :parameters], each[begin:, :parameters]) for each in others)
    if not CASES[name].policy.delay:
        rounds = len(first) if not CASES[name].policy.warmup_samples else 0
        assert all(torch.equal(first[:rounds], each[:rounds]) for each in others)  # statistics, too


@pytest.mark.slow
def test_it_is_torch_s_optimizer_for_local_sgd(on_ranks: list[dict[str, Any]]) -> None:
    for found in on_ranks:
        assert off_by(found["every=4"], found["torch"]) < 1e-12


@pytest.mark.slow
def test_rounds_of_one_step_are_one_process_on_the_whole_batch(on_ranks: list[dict[str, Any]]) -> None:
    expected = one_process(50)
    for found in on_ranks:
        assert off_by(found["every=1"], expected) < 1e-12


@pytest.mark.slow
def test_a_warm_up_is_mirrored_bit_for_bit(on_ranks: list[dict[str, Any]]) -> None:
    for found in on_ranks:
        assert torch.equal(found["all warm-up"], found["mirrored"])


@pytest.mark.slow
def test_differences_travel_by_wires_and_hooks(on_ranks: list[dict[str, Any]]) -> None:
    first = on_ranks[0]
    for name in ("int8", "hook"):
        assert all(torch.equal(found[name], first[name]) for found in on_ranks)
    assert 0 < off_by(first["int8"], first["every=4"]) < 1e-2
    assert first["hook"].isfinite().all()


@pytest.mark.slow
def test_a_round_that_is_not_finite_leaves_the_last_common_parameters(on_ranks: list[dict[str, Any]]) -> None:
    for found in on_ranks:
        for (said, is_as_before, _), what in zip(found["stopped"], ("loss", "gradient norm"), strict=True):
            assert said.startswith(f"the {what} of step 2 is ") and "on every rank; parameters are still those" in said
            assert is_as_before
        assert found["stopped late"].startswith("the loss of step 2 is inf on every rank")
        said, _, last = found["stopped by parameters"]
        assert said.startswith("the loss of step 2 is nan on every rank")
        assert last.isfinite().all() and torch.equal(last, on_ranks[0]["stopped by parameters"][2])


@pytest.mark.slow
def test_a_round_by_hand_is_taken_back_with_its_buffers_and_leaves_no_gradient(on_ranks: list[dict[str, Any]]) -> None:
    for found in on_ranks:
        for wrong, off in found["by hand"]:
            assert not wrong and off < 1e-12


@pytest.mark.slow
def test_statistics_that_are_not_trained_keep_their_bits(on_ranks: list[dict[str, Any]]) -> None:
    assert all(found["kept"] for found in on_ranks)


@pytest.mark.slow
def test_layers_are_frozen_between_late_rounds_and_nothing_stays_open(on_ranks: list[dict[str, Any]]) -> None:
    assert all(found["closed"] for found in on_ranks)


@pytest.mark.slow
def test_a_signal_ends_the_running_round_and_says_what_is_left(on_ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(on_ranks):
        told = "SIGTERM: the run ends with this round, after 1 inner step more; a second signal ends it at once, "
        assert found["signal"] == (1, [f"{told}without a checkpoint"] if rank == 1 else [])


def test_a_long_warm_up_is_counted_at_once() -> None:
    sizes = RoundSizes(46, 10, RoundLength(every=4, warmup_samples=10**12))
    assert sizes.all() == {6, 10, 40}
    sizes, position = RoundSizes(46, 10, RoundLength(every=2, warmup_samples=70)), 0
    for number in range(12):
        assert sizes.num_steps(0, position) == number and sizes.after(0, number) == position
        position += sizes.size_at(position)


def test_a_loop_by_hand_takes_another_class_for_a_delay() -> None:
    module, optimizer = made(CASES["mlp"])
    said = refused_with(ddp.strategies.LocalSteps, module, optimizer, ddp.LocalSGD(delay=1))
    assert said == "LocalSteps with delay=1: take ddp.strategies.Streaming, or delay=0"
    said = refused_with(ddp.strategies.Streaming, module, optimizer, ddp.LocalSGD())
    assert said == "Streaming with delay=0: take ddp.strategies.LocalSteps, or delay=1"


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_twice(on_ranks: list[dict[str, Any]]) -> None:
    """With rounds that are late, from checkpoints that both runs have made."""
    for found in on_ranks:
        for name in SAVED:
            first, second = found["resumed"][name]
            assert first == second
    last = [found["resumed"]["rounds"][0] for found in on_ranks]
    states = [{key: value for key, value in each.items() if ", exp_avg" in key} for each in last]
    assert states[0] != states[1]  # of which each worker has its own


@pytest.mark.slow
def test_other_strategies_and_numbers_of_workers_go_on_and_say_what_is_dropped(
    on_ranks: list[dict[str, Any]], folder: Path
) -> None:
    first = on_ranks[0]["resumed"]
    (told,) = first["said"]
    assert told.startswith(
        "the checkpoint is of strategy=local_sgd: the run continues with worker 0's optimizer state;"
    )
    assert all(found["resumed"]["mirrored"] == first["mirrored"] != first["again"] for found in on_ranks)
    assert all(not found["resumed"]["said"] for found in on_ranks[1:])
    (said, bits), (nothing, others) = run_ranks(on_two, 2, folder)
    assert said == [
        "the checkpoint is of 4 workers, and there are 2: all continue with worker 0's optimizer state and buffers, "
        "and those of the others are dropped"
    ]
    assert not nothing
    assert {key: value for key, value in bits.items() if ", " not in key} == {
        key: value for key, value in others.items() if ", " not in key
    }


@pytest.mark.slow
def test_mutants_of_the_inner_and_the_outer_step_die(on_ranks: list[dict[str, Any]]) -> None:
    assert [found["survivors"] for found in on_ranks] == [[]] * WORKERS


# --- what is refused -------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # settings of the policy, and what is said
    "no inner step": ({"every": 0}, "every=0: must be a whole number from 1 up"),
    "a whole round": ({"every": 4, "delay": 4}, "delay=4: is a whole round of every=4 inner steps or more; take less"),
    "many fragments": ({"every": 2, "fragments": 3, "delay": 1}, "fragments=3: more than the every=2 inner steps"),
    "nothing is under way": ({"fragments": 2}, "fragments=2: with delay=0 nothing would be in flight; set delay, or"),
    "negative": ({"warmup_samples": -1}, "warmup_samples=-1: must be a whole number from 0 up"),
    "momentum": ({"outer_momentum": 1.0}, "outer_momentum=1.0: must be a number from 0 up and below 1"),
    "no rate": ({"outer_lr": 0.0}, "outer_lr=0.0: must be a number above 0"),
    "an island": ({"island": "hosts"}, "island='hosts': take one of worker, host. Did you mean host?"),
}
OF_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "micro": ({"batch": {"micro_size": 4}}, "batch.micro_size=4: with strategy=local_sgd a micro-batch is an inner"),
    "tokens": ({"batch": {"tokens": 400}}, "batch.tokens=400: with strategy=local_sgd an inner step has batch."),
    "growing": ({"batch": {"warmup_size": 8, "warmup_epochs": 1.0}}, "batch.warmup_size=8: the rounds of strategy="),
    "shards": ({"batch": {"num_shards": 8}}, "batch.num_shards=8: with strategy=local_sgd each of 2 workers has one"),
    "one host": ({"strategy": {"island": "host"}}, "strategy.island=host: all workers are on one host, so that none"),
    "a hook": ({"strategy": {"delay": 1}, "hook": {"name": "sign"}}, "hook=sign: with strategy.delay=1 it keeps what"),
    "verified": ({"strategy": {"delay": 1}, "replica": {"verify_every": 9}}, "replica.verify_every=9: with strategy."),
    "averages": ({"strategy": {"delay": 1}, "ema": {"decay": 0.9}}, "ema.decay=0.9: with strategy.delay=1 workers"),
}


def refused_with(function: Callable[..., Any], *args: Any, **how: Any) -> str:
    with pytest.raises(ConfigError) as error:
        function(*args, **how)
    return str(error.value)


def test_bad_input_is_one_sentence_before_workers_start() -> None:
    for given, told in REFUSED.values():
        assert refused_with(ddp.LocalSGD, **given).startswith(told)
        if "island" not in given:  # whose word the reader looks at first
            said = refused_with(from_plain, {"strategy": {"name": "local_sgd", **given}})
            assert said.startswith(f"strategy.{told}")
    for given, told in OF_SETTINGS.values():
        strategy = {"name": "local_sgd", **given.get("strategy", {})}
        plain = {"cluster": {"workers": 2, "local_workers": 2}, **given, "strategy": strategy}
        assert refused_with(from_plain, plain).startswith(told)
    from_plain({"strategy": {"name": "local_sgd", "every": 32, "delay": 4, "fragments": 2}})
    for policy, told in (
        ({"delay": 1, "hook": ddp.gradients.Sign()}, "with delay=1 it keeps what it has not sent until an exchange"),
        ({"delay": 1, "verify_every": 3}, "verify_every=3: with delay=1 workers differ between rounds"),
        (
            {"outer_momentum": 0.9, "hook": ddp.gradients.TopK(0.1, momentum=0.9)},
            "outer_momentum=0.9: the hook has momentum, too; leave one",
        ),
        ({"strategy": "auto"}, "ddp.LocalSGD(strategy='auto'): is local_sgd; leave strategy out"),
    ):
        assert told in refused_with(ddp.LocalSGD, **policy)
    assert refused_with(ddp.Averaging, strategy="local_sgd").endswith("its own choices; give a ddp.LocalSGD")


def test_fit_refuses_what_has_no_rounds() -> None:
    def fit(data: Any = None, **how: Any) -> str:
        module, optimizer = made(CASES["mlp"])
        given = {"strategy": ddp.LocalSGD(every=4), "epochs": 1, **how}
        return refused_with(fitted, module, samples("mlp") if data is None else data, optimizer, **given)

    assert fit(micro_size=2).startswith("micro_size=2: with strategy='local_sgd' a micro-batch is an inner step")
    assert fit(num_shards=3).startswith("num_shards=3: with strategy='local_sgd' each of 1 workers has one share")
    growing = ddp.BatchWarmup(2, 10, 30)
    assert fit(global_batch=growing).startswith("a batch that grows from 2: the rounds of strategy='local_sgd' have")
    assert fit(global_batch=ddp.data.TokenBudget(9, [3] * NUM_SAMPLES)).startswith("a budget of tokens: with")
    late = ddp.LocalSGD(every=4, delay=1)
    assert fit(strategy=late, callbacks=[ddp.EMA(0.9)]).startswith("EMA: with delay=1 workers differ between rounds")
    few = ddp.LocalSGD(every=4, delay=1, fragments=2)
    assert fit(strategy=few).startswith("fragments=2: the parameters are in 1 bucket(s); lower bucket_cap_mb")
    assert fit(strategy=ddp.LocalSGD(island="host")).startswith("island='host': all workers are on one host")
    assert fit(precision="fp16").startswith("strategy='local_sgd': precision='fp16' has a loss scale")
    stream = torch.utils.data.IterableDataset
    assert fit(type("Stream", (stream,), {"__iter__": lambda _: iter([])})()).startswith("strategy='local_sgd': data")
