"""Every strategy trains as one process does on the whole batch; those that share a host have one set of bits.

float64     W = 1…4 workers, a batch that they cannot share evenly, an MLP, a CNN with BatchNorm, a GPT with dropout
float32     every optimizer, with clipping, on a model that has all that models have now and then
a veto      leaves parameters, state and buffers as they were

Tests: ddp/strategies/central_storage.py, ddp/strategies/host_store.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from jaxed import jaxed, needs_jax
from members import (
    GLOBAL_BATCH,
    NUM_SAMPLES,
    OPTIMIZERS,
    SLICED,
    WORDS,
    Losses,
    Odd,
    bits_of,
    cnn,
    fitted,
    flat,
    gpt,
    groups_of,
    mlp,
    odd_samples,
    samples,
    small_blocks,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.errors import Diverged
from ddp.optim import LAMB
from ddp.strategies.choice import STRATEGIES

# --- beside one process ----------------------------------------------------------------------------------------------

CELLS: dict[str, tuple[Any, Any, int]] = {  # model, optimizer, number of steps
    "mlp": (mlp, lambda given: torch.optim.AdamW(given, lr=0.002), 200),
    "mlp, lamb": (mlp, lambda given: LAMB(given, lr=0.002), 10),
    "cnn": (cnn, lambda given: torch.optim.SGD(given, lr=0.02, momentum=0.9), 8),
    "gpt": (gpt, lambda given: torch.optim.SGD(given, lr=0.02, momentum=0.9, dampening=0.1), 6),
}
FEW_STEPS, CLIP = 8, 0.7
LONG = ("central_storage", 3)  # the word and the world size that make all steps
WORDS_AT = {1: ("central_storage",), 2: WORDS, 3: SLICED, 4: SLICED}
"""By world size; `tests/train/test_same_mathematics.py` has replicas at every one."""
NUM_SHARDS = 5  # of each batch of the GPT: the noise of dropout is that of a shard


def made(cell: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    make, optimizer, _ = CELLS[cell]
    torch.manual_seed(3)
    module = make().double()
    return module, optimizer(groups_of(module))


class Watch(ddp.Callback):
    """Keeps parameters and running statistics after every step."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        with state.model.whole():
            self.seen.append(flat(state.model.module))


def trajectory(cell: str, num_steps: int, word: str | None) -> Tensor:
    """Returns [num_steps, n], as `ddp.fit` trains."""
    module, optimizer = made(cell)
    if cell == "cnn":
        module = ddp.SyncBatchNorm.convert(module)
    how: dict[str, Any] = {} if word is None else {"strategy": word}
    if cell == "gpt":
        how |= {"num_shards": NUM_SHARDS, "loss": ddp.LanguageModel()}
    watch = Watch()
    data = samples(cell[:3])
    fitted(module, data, optimizer, max_steps=num_steps, clip_norm=CLIP, callbacks=[watch], **how)
    return torch.stack(watch.seen)


@functools.cache
def by_hand(cell: str) -> Tensor:
    """Returns what one process makes of whole batches, with nothing of this library but the order of samples."""
    module, optimizer = made(cell)
    inputs, targets = samples(cell[:3])
    sampler = ddp.TrainSampler(NUM_SAMPLES, global_batch=GLOBAL_BATCH, rank=0, world_size=1, seed=5)
    seen: list[Tensor] = []
    while len(seen) < CELLS[cell][2]:
        for plan in sampler.plans():
            chosen = list(plan.micros[0].indices)
            optimizer.zero_grad()
            F.cross_entropy(module(inputs[chosen]), targets[chosen]).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            seen.append(flat(module))
            sampler.commit(plan)
    return torch.stack(seen)


def alone(cell: str) -> Tensor:
    """Returns what one worker makes, whose noise of dropout is that of several."""
    return trajectory(cell, CELLS[cell][2], None)


# --- beside each other -----------------------------------------------------------------------------------------------

NUM_STEPS, UNFROZEN = 8, 4


class Unfreezes(ddp.Callback):
    """Layers that were frozen are trained from a step on, and another one is frozen."""

    def __init__(self, module: Odd) -> None:
        self._module = module

    def step_start(self, state: ddp.TrainState) -> None:
        if state.step + 1 == UNFROZEN:
            self._module.frozen.requires_grad_(True)
            self._module.two.requires_grad_(False)


def odd(kind: str, word: str, **how: Any) -> tuple[dict[str, str], list[tuple[float, float]]]:
    """Returns hashes of what is trained, and the losses."""
    torch.manual_seed(4)
    module, losses = Odd(), Losses()
    optimizer = OPTIMIZERS[kind](groups_of(module))
    callbacks = [losses, Unfreezes(module)]
    how = {"max_steps": NUM_STEPS, "schedule": ddp.optim.cosine(), "clip_norm": 0.3, **how}
    fitted(module, odd_samples(), optimizer, strategy=word, callbacks=callbacks, **how)
    assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert module.tied.weight is module.one.weight
    assert not any(state for parameter, state in optimizer.state.items() if parameter is module.ignored)
    return bits_of(module, optimizer), losses.seen


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in ("nesterov", "fused", "amsgrad", "lars", "larc", "lamb")},
    "fused, not clipped": ("fused", {"clip_norm": None}),
    "sgd, in micro-batches": ("sgd", {"micro_size": 2}),
    "adamw, autocast": ("adamw", {"precision": "bf16"}),
    "adam, small buckets": ("adam", {}),
}


ONE_MICRO = WAYS.keys() - {"sgd, in micro-batches"}  # each of which fully_sharded sums over ranks by itself


def compared(way: str, words: Sequence[str]) -> None:
    """Compares strategies with `mirrored`, bit by bit, on this rank."""
    kind, how = WAYS[way]
    small = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0005} if way.endswith("small buckets") else {}
    expected, first = odd(kind, ddp.Averaging(strategy="mirrored", **small), **how)
    assert len(first) == NUM_STEPS and first[0] != first[-1]
    losses = []
    for word in words:
        bits, seen = odd(kind, ddp.Averaging(strategy=word, **small), **how)
        assert bits == expected, (way, word, [name for name in expected if bits.get(name) != expected[name]])
        assert [norm for _, norm in seen] == [norm for _, norm in first], (way, word)
        losses.append([loss for loss, _ in seen])
        # where a bucket is whole, it carries the loss, as float32
        assert losses[-1] == pytest.approx([loss for loss, _ in first], rel=3e-7), (way, word)
    assert all(each == losses[0] for each in losses)


# --- a veto ----------------------------------------------------------------------------------------------------------


def vetoed(word: str) -> None:
    """A gradient that is not finite on one rank changes nothing on any; with fp16, the step is repeated."""
    comm = ddp.init()
    module, data = mlp(), samples("mlp", torch.float32)
    kind: Any = STRATEGIES[word]
    for make in (OPTIMIZERS["fused"], OPTIMIZERS["lamb"]):
        torch.manual_seed(comm.rank)  # the strategy gives all ranks the weights of the first
        module = mlp()
        strategy = kind(module, make(groups_of(module)), clip_norm=0.5)
        for number in range(4):
            is_last = number == 3
            strategy.optimizer.zero_grad()
            inputs = data[0][comm.rank :: comm.world_size].clone()
            if is_last and comm.rank == comm.world_size - 1:
                inputs[0, 0, 0, 0] = float("nan")
            F.cross_entropy(strategy.model(inputs), data[1][comm.rank :: comm.world_size]).backward()
            strategy.state_dict()  # changes nothing
            before = {name: value.clone() for name, value in strategy.model.state_dict().items()}, state_bits(strategy)
            if is_last:
                with pytest.raises(Diverged, match="gradient norm of step 4"):
                    ddp.strategies.step(strategy)
            else:
                ddp.strategies.step(strategy)
            after = strategy.model.state_dict(), state_bits(strategy)
            is_same = all(torch.equal(after[0][name], value) for name, value in before[0].items())
            assert is_same == is_last
            assert (before[1] == after[1]) == is_last
        strategy.finish()


def state_bits(strategy: Any) -> list[Any]:
    found = []
    for each in strategy.optimizer.state.values():
        found += [value.tolist() if isinstance(value, Tensor) else value for value in each.values()]
    return found


# --- all of it, in one start of the ranks ----------------------------------------------------------------------------


def everything() -> dict[tuple[str, str], Tensor]:
    """Returns rank 0's trajectories, by cell and word."""
    comm = ddp.init(abort_s=60)
    words = WORDS_AT[comm.world_size]
    found = {}
    for cell, (_, _, num_steps) in CELLS.items():
        for word in words:
            steps = num_steps if (word, comm.world_size) == LONG else min(FEW_STEPS, num_steps)
            with small_blocks():
                found[cell, word] = trajectory(cell, steps, word)
    with small_blocks():
        if comm.world_size == 3:
            for way in WAYS:
                compared(way, ["central_storage", *(["fully_sharded"] if way in ONE_MICRO else [])])
        if comm.world_size == 2:
            for way in ("fused", "lamb"):
                compared(way, SLICED)
            for word in SLICED:
                vetoed(word)
    ddp.shutdown()
    return found if comm.rank == 0 else {}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.quick(1)
def test_every_strategy_makes_what_one_process_makes(world_size: int) -> None:
    found = run_ranks(everything, world_size, timeout_s=120)[0]
    assert len(found) == len(CELLS) * len(WORDS_AT[world_size])
    for (cell, word), seen in found.items():
        expected = (alone if cell == "gpt" else by_hand)(cell)[: len(seen)]
        error = (seen - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.max() <= 1e-12, (cell, word, error.max())


def on_devices() -> dict[str, Tensor]:
    """Returns trajectories on eight devices of JAX, by cell."""
    return {cell: trajectory(cell, FEW_STEPS, "tpu") for cell in ("mlp", "mlp, lamb")}


@needs_jax
def test_devices_of_jax_make_it_too() -> None:
    for cell, seen in jaxed(on_devices).items():
        expected = by_hand(cell)[: len(seen)]
        error = (seen - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.max() <= 1e-12, (cell, error.max())
