"""A pipeline gives the bits of its stages on one rank, holds what it promises, and names a stage that is lost.

Tests: ddp/strategies/pipeline.py.
"""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from ranks import RankFailed, collect, run_ranks, start_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.collectives.pipelines import gpipe
from ddp.errors import CheckpointError, ConfigError, PeerLost

SAMPLES, MICRO, RATE = 14, 3, 0.1


def makes(num_stages: int, dropout: float = 0.25) -> list[Callable[[], nn.Module]]:
    def make(number: int) -> nn.Module:
        outs = 3 if number == num_stages - 1 else 8
        return nn.Sequential(nn.Linear(4 if number == 0 else 8, outs), nn.Tanh(), nn.Dropout(dropout))

    return [lambda number=number: make(number) for number in range(num_stages)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    size = SAMPLES if step < 3 else 6  # another shape of inputs
    return torch.randn(size, 4, generator=numbers), torch.randint(0, 3, (size,), generator=numbers)


def trained(num_stages: int, schedule: str) -> tuple[dict[str, Tensor], list[float], list[float], list[int]]:
    """The state, the losses, the gradient norms and what was held, after some steps."""
    pipe = ddp.Pipeline(makes(num_stages), schedule=schedule)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE, momentum=0.9)
    losses, norms, held = [], [], []
    for step in range(5):
        inputs, targets = batch(step)
        is_first, is_last = pipe.comm.rank == 0, pipe.comm.rank == pipe.comm.world_size - 1
        given = inputs if is_first else None, targets if is_last else None
        loss = pipe.step(*given, F.cross_entropy, micro_size=MICRO)
        norms.append(float(pipe.gradient_norm()))
        losses += [] if loss is None else [float(loss)]
        held = pipe.most_held if step == 0 else held
        optimizer.step()
        optimizer.zero_grad()
    return pipe.state_dict(), losses, norms, held


def all_schedules(num_stages: int) -> dict[str, Any]:
    ddp.init()
    return {schedule: trained(num_stages, schedule) for schedule in ("gpipe", "1f1b")}


@pytest.mark.parametrize("num_stages", [2, 4])
def test_the_bits_are_those_of_the_same_stages_on_one_rank(num_stages: int) -> None:
    [alone] = run_ranks(all_schedules, 1, num_stages)
    ranks = run_ranks(all_schedules, num_stages, num_stages)
    num_micro = -(-SAMPLES // MICRO)
    for schedule, (state, losses, norms, held) in alone.items():
        for rank, found in enumerate(ranks):
            theirs, _, their_norms, their_held = found[schedule]
            assert theirs.keys() == state.keys()
            assert all(torch.equal(theirs[key], state[key]) for key in state)
            assert their_norms == norms
            most = num_micro if schedule == "gpipe" else min(num_micro, num_stages - rank)
            assert their_held == [most] == [held[rank]]
        assert ranks[-1][schedule][1] == losses and len(losses) == 5
        assert ranks[0][schedule][1] == []
        nn.Sequential(*(make() for make in makes(num_stages))).load_state_dict(state)
    assert all(torch.equal(alone["gpipe"][0][key], alone["1f1b"][0][key]) for key in alone["gpipe"][0])


# --- the mean over the batch -----------------------------------------------------------------------------------------


def gradients(num_stages: int) -> tuple[dict[str, Tensor], float | None, int]:
    """The gradients of one step in float64, the loss, and how many graphs are left after it."""
    ddp.init()
    pipe = ddp.Pipeline([lambda make=make: make().double() for make in makes(num_stages, dropout=0)])
    inputs, targets = batch(0)
    is_first, is_last = pipe.stage == 0, pipe.stage == num_stages - 1
    chain = slice(pipe.chain, None, pipe.num_chains)
    given = inputs.double()[chain] if is_first else None, targets[chain] if is_last else None
    before = torch.get_rng_state()
    loss = pipe.step(*given, F.cross_entropy, micro_size=MICRO)
    assert torch.equal(before, torch.get_rng_state()), "the program's own random numbers go on"
    own = {f"{pipe.stage}.{name}": each.grad for name, each in pipe.module.named_parameters()}
    assert float(pipe.gradient_norm()) > 0
    return own, None if loss is None else float(loss), len(pipe._stages[pipe.stage]._held)


@pytest.mark.parametrize(("num_stages", "num_ranks"), [(3, 3), (2, 4), (1, 2)])
def test_gradients_are_those_of_the_mean_over_the_batch(num_stages: int, num_ranks: int) -> None:
    """Also if the last micro-batch is shorter, and with as many chains as ranks allow."""
    ranks = run_ranks(gradients, num_ranks, num_stages)
    whole = nn.Sequential(*(make() for make in makes(num_stages, dropout=0))).double()
    whole.load_state_dict(run_ranks(state_of, 1, num_stages)[0])
    inputs, targets = batch(0)
    F.cross_entropy(whole(inputs.double()), targets).backward()
    wanted = {name: each.grad for name, each in whole.named_parameters()}
    for own, _, num_held in ranks:
        assert num_held == 0
        for name, gradient in own.items():
            assert (gradient - wanted[name]).abs().max() < 1e-12
    losses = [loss for _, loss, _ in ranks if loss is not None]
    loss = float(F.cross_entropy(whole(inputs.double()), targets).detach())
    assert sum(losses) / len(losses) == pytest.approx(loss)
    assert len(losses) == num_ranks // num_stages


def state_of(num_stages: int) -> dict[str, Tensor]:
    return ddp.Pipeline([lambda make=make: make().double() for make in makes(num_stages, dropout=0)]).state_dict()


def tied() -> Tensor:
    """The gradient of a weight that two stages share, added up as the module's essay says."""
    comm, weight = ddp.init(), torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)

    def make() -> nn.Module:
        layer = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        layer.weight.data.copy_(weight)
        return layer

    pipe = ddp.Pipeline([make, make])
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = inputs if comm.rank == 0 else None, inputs if comm.rank == 1 else None
    pipe.step(*given, F.mse_loss, micro_size=2)
    if comm.world_size == 1:
        return pipe.module[0].weight.grad + pipe.module[1].weight.grad  # type: ignore[operator, union-attr]
    return comm.all_reduce(pipe.module.weight.grad)


def test_tied_weights_add_up() -> None:
    weight = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4).requires_grad_()
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    F.mse_loss(inputs @ weight.T @ weight.T, inputs).backward()
    for found in run_ranks(tied, 2):
        assert weight.grad is not None and (found - weight.grad).abs().max() < 1e-12


class Alive(torch.autograd.Function):
    """Counts the graphs that are alive."""

    now, most = 0, 0

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.token = type("Token", (), {})()
        weakref.finalize(ctx.token, Alive.end)
        Alive.now += 1
        Alive.most = max(Alive.most, Alive.now)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient

    @staticmethod
    def end() -> None:
        Alive.now -= 1


class Watched(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return Alive.apply(super().forward(inputs))  # type: ignore[no-untyped-call, no-any-return]


def graphs(schedule: str) -> tuple[int, int]:
    """The largest number of graphs that were alive at a time, and how many are left."""
    comm, data = ddp.init(), torch.ones(16, 8)
    pipe = ddp.Pipeline([lambda: Watched(8, 8)] * comm.world_size, schedule=schedule)
    given = data if comm.rank == 0 else None, data if comm.rank == comm.world_size - 1 else None
    for _ in range(2):
        pipe.step(*given, F.mse_loss, micro_size=2)
    return Alive.most, Alive.now


def test_a_graph_is_freed_with_its_backward() -> None:
    assert run_ranks(graphs, 3, "1f1b") == [(3, 0), (2, 0), (1, 0)]
    assert run_ranks(graphs, 3, "gpipe") == [(8, 0)] * 3


def batch_after(schedule: str) -> list[bool]:
    """Whether the batch's memory lives on after a step."""
    comm = ddp.init()
    memory = [np.zeros((8, 8), dtype=np.float32) for _ in range(2)]
    pipe, watched = ddp.Pipeline([lambda: nn.Linear(8, 8)] * 2, schedule=schedule), [*map(weakref.ref, memory)]
    first, last = (torch.from_numpy(each) for each in memory)
    given = first if pipe.stage == 0 else None, last if comm.rank == comm.world_size - 1 else None
    pipe.step(*given, F.mse_loss, micro_size=2)
    del memory, first, last, given
    gc.collect()
    return [each() is not None for each in watched]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_batch_is_freed_with_its_step(num_ranks: int) -> None:
    assert run_ranks(batch_after, num_ranks, "1f1b") == [[False, False]] * num_ranks


def untrained(kind: str) -> tuple[float, Tensor | None]:
    """The norm, and the weight's gradient, of a stage of which another one has nothing to train at first."""
    ddp.init()
    data, weight = torch.arange(32.0).reshape(8, 4) / 32, torch.linspace(-1, 1, 16).reshape(4, 4)

    def make() -> nn.Module:
        layer = nn.Linear(4, 4, bias=False)
        layer.weight.data.copy_(weight)
        return layer

    other = nn.Identity if kind == "identity" else lambda: make().requires_grad_(False)
    pipe = ddp.Pipeline([other, make])
    chain = data[pipe.chain :: 2]
    for _ in range(2):
        pipe.step(*(chain, None) if pipe.stage == 0 else (None, chain), F.mse_loss, micro_size=2)
        norm = float(pipe.gradient_norm())
        pipe.module.requires_grad_()
    return norm, next((each.grad for each in pipe.parameters()), None)


@pytest.mark.parametrize("kind", ["identity", "frozen"])
def test_replicas_of_a_stage_without_anything_to_train(kind: str) -> None:
    """They average nothing, and begin to once they have something."""
    ranks = run_ranks(untrained, 4, kind)
    data, weight = torch.arange(32.0).reshape(8, 4) / 32, torch.linspace(-1, 1, 16).reshape(4, 4)
    first, last = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    for _ in range(2):
        F.mse_loss((data if kind == "identity" else data @ first.T) @ last.T, data).backward()
    wanted: list[Tensor | None] = [last.grad, last.grad]
    wanted = ([None, None] if kind == "identity" else [first.grad / 2] * 2) + wanted  # type: ignore[operator]
    for (_, found), want in zip(ranks, wanted, strict=True):
        assert (found is None) == (want is None)
        assert found is None or torch.allclose(found, want, atol=1e-6)  # type: ignore[arg-type]


def norm_of_sparse() -> float:
    ddp.init()
    pipe = ddp.Pipeline([lambda: nn.Embedding(5, 4, sparse=True), lambda: nn.Linear(4, 4)])
    given = torch.arange(8) % 5 if pipe.stage == 0 else None, torch.ones(8, 4) if pipe.comm.rank else None
    pipe.step(*given, F.mse_loss, micro_size=2)
    own = [each.grad for each in pipe.parameters()]
    dense = [each.to_dense() if each.is_sparse else each for each in own if each is not None]
    both = pipe.comm.all_gather(torch.stack([each.norm() for each in dense]))
    norm = float(pipe.gradient_norm())
    assert norm == pytest.approx(float(torch.cat(both).norm()))
    return norm


def test_sparse_gradients_of_several_micro_batches_have_a_norm() -> None:
    first, second = run_ranks(norm_of_sparse, 2)
    assert first == second > 0


# --- a stage that is lost --------------------------------------------------------------------------------------------

ABORT_S, STAGES = 4.0, 3


class Trap(torch.autograd.Function):
    """Ends or stops the process in the second forward, or in the second backward."""

    counts: ClassVar = {"forward": 0, "backward": 0}
    trap: tuple[str, int] | None = None

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        Trap.spring("forward")
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Trap.spring("backward")
        return gradient

    @classmethod
    def spring(cls, moment: str) -> None:
        cls.counts[moment] += 1
        if cls.trap is not None and cls.trap[0] == moment and cls.counts[moment] == 2:
            os.kill(os.getpid(), cls.trap[1])


class Trapped(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return Trap.apply(super().forward(inputs))  # type: ignore[no-untyped-call, no-any-return]


def lose_a_stage(victim: int, moment: str, how: int) -> tuple[str, float]:
    comm = ddp.init(abort_s=ABORT_S, warn_s=1.0)
    pipe = ddp.Pipeline([lambda: Trapped(8, 8)] * STAGES)
    Trap.trap = (moment, how) if comm.rank == victim else None
    data = torch.ones(8, 8)  # so that no stage has ended the step when another one is at its second micro-batch
    comm.barrier()
    start_s = time.monotonic()
    try:
        given = data if comm.rank == 0 else None, data if comm.rank == STAGES - 1 else None
        pipe.step(*given, F.mse_loss, micro_size=1)
        comm.barrier()
    except PeerLost as lost:
        return str(lost), time.monotonic() - start_s
    return "nothing happened", 0.0


def survivors_of(jobs: list[tuple[int, list[Any]]]) -> Iterator[tuple[int, str, float]]:
    for victim, started in jobs:
        try:
            results = collect([each for rank, each in enumerate(started) if rank != victim], timeout_s=30)
        finally:
            started[victim][0].kill()
        for result in results:
            if isinstance(result, RankFailed):
                raise result
            yield victim, *result


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_survivors_name_the_lost_stage_and_the_micro_batch(how: signal.Signals) -> None:
    """Each stage is lost in a forward, and in a backward; all these runs go on at once."""
    victims = range(STAGES) if how == signal.SIGKILL else [1]
    cases = product(victims, ("forward", "backward"))
    jobs = [(victim, start_ranks(lose_a_stage, STAGES, victim, moment, how)) for victim, moment in cases]
    for victim, message, took_s in survivors_of(jobs):
        assert f"lost rank {victim} " in message
        assert f"[step 1, stage {victim} of {STAGES} is lost; " in message
        assert " of micro-batch " in message.partition("is lost; ")[2]
        assert took_s < 2 * ABORT_S


# --- bad input -------------------------------------------------------------------------------------------------------


def refusals() -> list[str]:
    """What one rank with all stages says to bad input, case by case."""
    inputs, targets = batch(0)
    good = partial(ddp.Pipeline, makes(2))
    two, words = good(), list[str]()
    cases: list[Callable[[], object]] = [
        lambda: two.step(None, targets, F.cross_entropy, micro_size=2),
        lambda: two.step(inputs, None, F.cross_entropy, micro_size=2),
        lambda: two.step(inputs[:0], targets, F.cross_entropy, micro_size=2),
        lambda: two.step(inputs, targets[:-1], F.cross_entropy, micro_size=2),
        lambda: two.step(inputs, targets, F.cross_entropy, micro_size=0),
        lambda: torch.no_grad()(two.step)(inputs, targets, F.cross_entropy, micro_size=2),
        lambda: two.step(inputs, targets, None, micro_size=2),  # type: ignore[arg-type]
        lambda: two.step(inputs, targets, partial(F.cross_entropy, reduction="none"), micro_size=2),
        lambda: ddp.Pipeline([]),
        lambda: ddp.Pipeline([nn.Linear(4, 3)]),  # type: ignore[list-item]
        lambda: ddp.Pipeline([lambda: 3]),  # type: ignore[list-item, return-value]
        lambda: good(schedule="1f2b"),
        lambda: good(schedule=[3]),  # type: ignore[arg-type]
        lambda: good(schedule=one_too_few).step(inputs, targets, F.mse_loss, micro_size=2),
        lambda: ddp.Pipeline([nn.Identity, lambda: Tuple()]).step(inputs, targets, F.mse_loss, micro_size=2),
        lambda: ddp.Pipeline([nn.Identity, lambda: Sparse()]).step(inputs, targets, F.mse_loss, micro_size=2),
        lambda: two.load_state_dict({"7.0.weight": inputs}),
    ]
    for case in cases:
        try:
            case()
            words.append("")
        except (ConfigError, CheckpointError) as error:
            words.append(str(error))
    return words


def one_too_few(stage: int, num_stages: int, num_micro: int) -> Iterator[Any]:
    yield from gpipe(stage, num_stages, num_micro - 1)


class Tuple(nn.Module):
    def forward(self, inputs: Tensor) -> Any:
        return inputs, inputs


class Sparse(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.to_sparse()


SAID = [
    "inputs on stage 0 of 2: it takes a tensor [num_samples, …], and got NoneType",
    "targets on stage 0 of 2: it takes a tensor [num_samples, …], and got NoneType",
    "inputs on stage 0 of 2: it takes a tensor [num_samples, …], and got a tensor [0, 4] of torch.float32",
    "13 targets for 14 inputs: give one for each",
    "micro_size=0: give the number of samples of a micro-batch, from 1 up",
    "step on stage 0 of 2 inside of torch.no_grad(): it computes gradients; call it outside",
    "loss=None on stage 0 of 2: give a function of outputs and targets",
    "loss returns a tensor [2] of torch.float32: it must return one number, the mean of a micro-batch",
    "0 stages on 1 ranks: give as many ranks as stages, a multiple of that, or one",
    "stage 0 is Linear: give a function that makes it, without arguments",
    "stage 0: its function returns int; it must return a module",
    "schedule='1f2b': take one of gpipe, one_forward_one_backward, or a generator. Did you mean 1f1b?",
    "schedule=[3]: take one of gpipe, one_forward_one_backward, or a generator.",
    "schedule: 2 stages, 7 micro-batches, stage 0 in round 24: ends without the forward of micro-batch 6",
    "stage 1 returns tuple: it must return one dense floating-point tensor",
    "stage 1 returns a sparse tensor [2, 4] of torch.float32: it must return one dense floating-point tensor",
    "the state has a stage 7: this pipeline has 0 to 1",
]


def test_bad_input_gets_one_sentence() -> None:
    assert run_ranks(refusals, 1) == [SAID]


def refused_by_a_rank(case: str) -> str:
    comm = ddp.init(abort_s=ABORT_S)
    inputs, targets = batch(0)
    pipe = None
    try:
        schedule = "gpipe" if case == "schedule" and comm.rank == 0 else "1f1b"
        pipes = [ddp.Pipeline(makes(3 if case == "stages" else 2), schedule=schedule) for _ in range(2)]
        pipe = pipes[comm.rank if case == "order" else 0]
        pipe.num_steps += comm.rank if case == "step" else 0
        inputs = inputs.view(14, *[1] * 30, 4) if case == "dimensions" else inputs
        given = inputs if comm.rank == 0 or case == "inputs" else None, None if case == "targets" else targets
        pipe.step(*given, F.cross_entropy, micro_size=2 + comm.rank if case == "micro" else 2)
    except ConfigError as error:
        ddp.shutdown(failed=str(error))
        return str(error)
    except PeerLost as lost:
        return f"lost {lost.rank}: {lost.reason}"
    return "done"


@pytest.mark.parametrize(
    ("case", "rank", "says"),
    [
        ("stages", 0, "3 stages on 2 ranks: give as many ranks as stages, a multiple of that, or one"),
        ("inputs", 1, "inputs on stage 1 of 2: only the first stage takes them; give None here"),
        ("targets", 1, "targets on stage 1 of 2: it takes a tensor [num_samples, …], and got NoneType"),
        ("schedule", 1, "stages 0 and 1 have different schedules: give all the same"),
        ("dimensions", 0, "a tensor has 35 dimensions, more than a pipeline takes: flatten some"),
        (
            "order",
            1,
            "stage 0 is in step 1 of pipeline 1, counted as they were made, and stage 1 in step 1 of pipeline 2: make "
            "and step all pipelines in one order on all ranks",
        ),
        (
            "step",
            1,
            "stage 0 is in step 1 of pipeline 1, counted as they were made, and stage 1 in step 2 of pipeline 1: make "
            "and step all pipelines in one order on all ranks",
        ),
        ("micro", 1, "micro_size=3 on stage 1, 2 on stage 0: give all the same"),
    ],
)
def test_what_one_rank_refuses_the_others_hear_of(case: str, rank: int, says: str) -> None:
    results = run_ranks(refused_by_a_rank, 2, case)
    assert results[rank] == says
    assert results[1 - rank] == says or says in results[1 - rank]


def grows() -> str:
    """A stage whose output has another shape for the same shape of inputs."""
    comm, sizes = ddp.init(abort_s=ABORT_S), iter([3, 3, 5, 5])

    class Grows(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs)[:, : next(sizes)]

    pipe = ddp.Pipeline([lambda: Grows(4, 8), nn.Identity])
    inputs = batch(0)[0][:4]
    try:
        given = inputs if comm.rank == 0 else None, inputs[:, :3] if comm.rank == 1 else None
        pipe.step(*given, F.mse_loss, micro_size=1)
    except ConfigError as error:
        ddp.shutdown(failed=str(error))
        return str(error)
    except PeerLost as lost:
        return lost.reason
    return "done"


def test_an_output_has_the_form_that_follows_from_its_inputs() -> None:
    says, heard = run_ranks(grows, 2)
    found = "stage 0 returns a tensor [1, 5] of torch.float32 for inputs [1, 4] in micro-batch 2"
    assert says == f"{found}, and before it was [1, 3] of torch.float32"
    assert says in heard


def broken_off() -> list[str]:
    """What steps say after one that broke off in the first stage's backward, when all messages are under way."""
    comm, words = ddp.init(abort_s=ABORT_S), list[str]()
    pipe, data = ddp.Pipeline([lambda: nn.Linear(4, 4)] * 2), torch.ones(8, 4)
    numbers = iter(range(8))

    def third(gradient: Tensor) -> None:
        if comm.rank == 0 and next(numbers) == 2:
            raise ValueError("not a number")

    assert isinstance(pipe.module, nn.Linear)
    pipe.module.weight.register_hook(third)
    for _ in range(2):
        try:
            pipe.step(*(data, None) if comm.rank == 0 else (None, data), F.mse_loss, micro_size=2)
            words.append("done")
        except RuntimeError as error:
            words.append(error.reason if isinstance(error, PeerLost) else str(error))
        except ValueError as error:
            words.append(str(error))
    ddp.shutdown(failed=words[-1])
    return words


def test_no_step_follows_one_that_broke_off() -> None:
    first, second = run_ranks(broken_off, 2)
    says = "the last step broke off on stage 0 of 2; the ranks are out of step: restart the program"
    assert first == ["not a number", says]
    assert says in second[-1]


def unequal_chains() -> str:
    comm = ddp.init(abort_s=ABORT_S)
    pipe = ddp.Pipeline([lambda: nn.Linear(4, 4)] * 2)
    data = torch.ones(6 + 2 * pipe.chain, 4)
    with pytest.raises(ConfigError) as refused:
        pipe.step(*(data, None) if pipe.stage == 0 else (None, data), F.mse_loss, micro_size=2)
    ddp.shutdown(failed=str(refused.value))
    assert comm.world_size == 4
    return str(refused.value)


def test_chains_have_as_many_samples() -> None:
    expected = "chains have 6, 8 samples, and would all count the same: give each as many"
    assert run_ranks(unequal_chains, 4) == [expected] * 4


def few(num_micro: int) -> list[str]:
    """What is said in two steps."""
    pipe = ddp.Pipeline(makes(4, dropout=0))
    inputs, targets = batch(0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(2):
            pipe.step(inputs[:num_micro], targets[:num_micro], F.cross_entropy, micro_size=1)
    return [f"{each.filename.rpartition('/')[2]}: {each.message}" for each in told]


def test_few_micro_batches_are_warned_of_once_where_the_step_is() -> None:
    says = "fewer micro-batches (2) than stages (4), which idle for 60% of the time; make micro_size smaller"
    assert run_ranks(few, 1, 2) == [[f"test_pipeline.py: {says}"]]
    assert run_ranks(few, 1, 4) == [[]]
