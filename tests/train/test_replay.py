"""A shard of a step that any rank computes again has the same bits, and leaves no trace; so bad steps are explained."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import ddp
from ddp.collectives.shards import shards_of_rank
from ddp.errors import Diverged
from ddp.optim import precision
from ddp.process.streams import GeneratorStates
from ddp.replica.broadcast import tensor_hash
from ddp.train import replay
from ddp.train.replay import Audit, Outcome, Replay, Turn
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import TrainState

# --- a replay is the step --------------------------------------------------------------------------------------------

NUM_SAMPLES, BATCH, NUM_SHARDS, NUM_STEPS = 35, 12, 6, 6  # the last step of an epoch has 11 samples
INPUTS = torch.randn(NUM_SAMPLES, 12, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(1))


class Augmented(Dataset[Any]):
    """Draws from three generators for each sample, each time that it is read."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(12) + random.random() + float(np.random.rand())
        return INPUTS[index] + 0.1 * noise, CLASSES[index]


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Dropout(0.3), nn.Linear(20, 3))


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 12)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(),
        nn.Linear(40, 3),
    )  # fmt: skip


MEMBERS: dict[str, dict[str, Any]] = {
    "dropout, bf16": {"precision": "bf16"},
    "batch norm, fp16, in parts": {"make": normalised, "precision": "fp16", "micro_size": 2},
    "augmented, wire, sharded": {"data": Augmented(), "wire": "bf16", "strategy": "sharded", "clip_norm": 0.5},
    "batch norm, 5 shards, noise scale": {"make": normalised, "num_shards": 5, "noise_scale_every": 1},
    "bf16_pure": {"precision": "bf16_pure"},
}


def all_again(number: int, _: int, world_size: int, num_shards: int) -> Turn:
    """Shard after shard: each is computed by every rank."""
    shard = number % num_shards
    owner = next(rank for rank in range(world_size) if shard in shards_of_rank(rank, world_size, num_shards))
    return Turn(shard, owner, [rank for rank in range(world_size) if rank != owner])


def surroundings(state: TrainState) -> dict[str, Any]:
    """Returns everything that a replay could change."""
    module = state.model.module
    gradients = {
        name: None if each.grad is None else (each.grad.data_ptr(), tensor_hash(each.grad))
        for name, each in module.named_parameters()
    }
    buffers = {name: (id(each), tensor_hash(each)) for name, each in module.named_buffers()}
    parameters = {name: (tensor_hash(each), each.requires_grad) for name, each in module.named_parameters()}
    modes = [each.training for each in state.model.modules()]
    counts = state.model.num_steps, state.step, state.sampler.state, state.sampler.seen
    switches = state.model.require_backward_grad_sync, state.model.require_forward_param_sync
    hooks = [len(each._forward_hooks) for each in module.modules()]
    scale = None if state.strategy.loss_scale is None else state.strategy.loss_scale.state_dict()
    generators = GeneratorStates.now()
    return {
        "gradients": gradients, "buffers": buffers, "parameters": parameters, "modes": modes, "counts": counts,
        "switches": switches, "hooks": hooks, "scale": scale, "generators": generators,
        "enabled": torch.is_grad_enabled(),
    }  # fmt: skip


def trained(*, audit_every: int, make: Callable[[], nn.Module] = dropout, **how: Any) -> dict[str, str]:
    """Returns the hash of everything that a run ends with."""
    torch.manual_seed(1)
    model = make()
    settings: dict[str, Any] = {
        "data": (INPUTS, CLASSES), "num_shards": NUM_SHARDS, "seed": 3, "folder": None, "progress": False,
    }  # fmt: skip
    settings |= how
    given = grouped(**{key: value for key, value in settings.items() if key != "data"})
    state = ddp.fit(
        model, settings["data"], torch.optim.AdamW(model.parameters(), lr=0.01), loss=F.cross_entropy,
        global_batch=BATCH, max_steps=NUM_STEPS, same_bits=ddp.SameBits(on=True, audit_every=audit_every), **given,
    )  # fmt: skip
    return {
        **{name: tensor_hash(each) for name, each in model.state_dict().items()},
        "loss": float(state.train_loss or 0).hex(),
    }


def replays() -> dict[str, Any]:
    """Trains each member with all shards computed by all ranks, and without; what was found, by name."""
    ddp.init(abort_s=30)
    precision.FIRST = precision.LARGEST = 1 << 24  # so that steps are repeated
    precision.GROW_AFTER = 2
    result: dict[str, Any] = {}
    shard, found = Replay.shard, Audit._found
    outcomes: list[dict[int, Outcome]] = []

    def watched(self: Replay, plan: Any, number: int) -> Outcome:
        before = surroundings(self.state)
        outcome = shard(self, plan, number)
        after = surroundings(self.state)
        for name, value in before.items():
            assert after[name] == value, name
        return outcome

    def noted(self: Audit, mine: Outcome | None) -> dict[int, Outcome]:
        outcomes.append(found(self, mine))
        return outcomes[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replay, "shard", watched)
        patch.setattr(Audit, "_found", noted)
        patch.setattr(replay, "turn_of", all_again)
        for name, how in MEMBERS.items():
            try:
                outcomes.clear()
                ends = trained(audit_every=1, **how)
                kept = list(outcomes)
                result[name] = kept, ends, trained(audit_every=0, **how)
            except BaseException as error:
                error.add_note(f"in the case {name}")
                raise
    ddp.shutdown()
    return result


@cache
def replayed() -> list[dict[str, Any]]:
    return run_ranks(replays, 3)


@pytest.mark.parametrize("name", MEMBERS)
def test_every_rank_computes_what_the_owner_has_contributed(name: str) -> None:
    outcomes, *_ = replayed()[0][name]
    assert len(outcomes) == NUM_STEPS
    assert all(list(found) == [0, 1, 2] for found in outcomes)
    for found in outcomes:
        first, *others = (tuple(each) for each in found.values())
        assert others == [first, first]
        assert not Outcome(*first).difference(Outcome(*first))
    module = MEMBERS[name].get("make", dropout)()
    names = {name for name, _ in module.named_parameters()}
    assert all(set(found[0].checksums) == names for found in outcomes)
    assert len({str(found[0].checksums) for found in outcomes}) == NUM_STEPS


@pytest.mark.parametrize("name", MEMBERS)
def test_a_run_that_is_audited_in_each_step_ends_as_one_that_is_not(name: str) -> None:
    for found in replayed():
        _, audited, plain = found[name]
        assert audited == plain == replayed()[0][name][1]


def test_an_outcome_tells_in_what_it_differs() -> None:
    one = Outcome(1.0, 2.0, {"a": 1, "b": 2})
    assert one.difference(Outcome(1.0, 2.0, {"a": 1, "b": 2})) == ""
    assert one.difference(Outcome(1.0 + 2**-52, 2.0, {"a": 1, "b": 2})).startswith("the loss (1.0, 1.0000000000000002")
    assert one.difference(Outcome(1.0, 2.0, {"a": 1, "b": 3})) == "b"
    assert one.difference(Outcome(1.0, 2.0, {"a": 1})) == "b"
    assert Outcome(1.0, 2.0, {"a": 1}).difference(one) == "b"
    assert Outcome(float("nan"), 2.0, {}).difference(Outcome(float("nan"), 2.0, {})) == ""
    assert Outcome(0.0, 2.0, {}).difference(Outcome(-0.0, 2.0, {}))


# --- bad steps -------------------------------------------------------------------------------------------------------

NUM_BAD, BAD = 48, 21  # in step 2 of batches of 16, at its position 5
BAD_INPUTS = torch.randn(NUM_BAD, 4, generator=torch.Generator().manual_seed(2))
BAD_CLASSES = torch.randint(0, 3, (NUM_BAD,), generator=torch.Generator().manual_seed(3))


class Ratio(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().sum(dim=1, keepdim=True)


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs().sqrt()


class Parent(nn.Module):
    """Divides by itself, and gives that to another module, by position or by name."""

    def __init__(self, *, by_name: bool = False) -> None:
        super().__init__()
        self.inner, self._by_name = Named(), by_name

    def forward(self, x: Tensor) -> Tensor:
        x = x / x.abs().sum(dim=1, keepdim=True)
        return self.inner(x=x) if self._by_name else self.inner(x)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1e-30]))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * self.weight


class BreaksParameter(Callback):
    def step_start(self, state: TrainState) -> None:
        if state.step == 1:
            with torch.no_grad():
                next(state.model.module.parameters()).view(-1)[0] = float("nan")


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def with_sample(value: float) -> Tensor:
    inputs = BAD_INPUTS.clone()
    inputs[BAD] = value
    return inputs


def one_nan() -> Tensor:
    inputs = BAD_INPUTS.clone()
    inputs[BAD, 2] = float("nan")
    return inputs


def large(value: float) -> Tensor:
    """From step 2 on each sample is so large."""
    inputs = BAD_INPUTS.clone().clamp(-1, 1)
    inputs[16:32] = value
    return inputs


def log_of_target(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.square().mean(dim=1) + targets.log()).mean()


def mean_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


POSITIVE = BAD_CLASSES.float() + 1
POSITIVE[BAD] = 0.0

HERE = "in shard {shard} on rank {rank}, sample 21"
AMONG = "in shard {shard} on rank {rank}, among samples {samples}"
NOBODY = "each shard is finite by itself: their sum is not"
NAN_SAMPLE = f"the samples themselves that 0 (Linear) is given are not finite, {HERE}"
LOSS_ALONE = f"the loss is not finite, while all outputs are, {AMONG}"
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a sample": ({"inputs": one_nan()}, NAN_SAMPLE),
    "a sample, in parts": ({"inputs": one_nan(), "micro_size": 1}, NAN_SAMPLE),
    "a sample, sharded, fp16": ({"inputs": one_nan(), "strategy": "sharded", "precision": "fp16"}, NAN_SAMPLE),
    "a sample, central storage": ({"inputs": one_nan(), "strategy": "central_storage"}, NAN_SAMPLE),
    "a target": (
        {"make": lambda: nn.Linear(4, 1), "targets": one_nan()[:, 2:3], "loss": F.mse_loss},
        f"the samples themselves are not finite, {HERE}",
    ),
    "a module": (
        {"inputs": with_sample(0.0), "make": lambda: nn.Sequential(Ratio(), nn.BatchNorm1d(4), nn.Linear(4, 3))},
        f"the outputs of 0 (Ratio) are not finite, {HERE}",
    ),
    "inside of a parent": (
        {"inputs": with_sample(0.0), "make": Parent},
        f"the input of inner (Named) is not finite, {HERE}",
    ),
    "the loss": ({"targets": POSITIVE, "loss": log_of_target}, LOSS_ALONE),
    "backward": (
        {
            "inputs": with_sample(0.0),
            "make": lambda: nn.Sequential(nn.Linear(4, 6, bias=False), Root(), nn.Linear(6, 3)),
        },
        f"the gradient of the outputs of 0 (Linear) is not finite, while that of 1 (Root) is, {HERE}",
    ),
    "a parameter": (
        {"callbacks": [BreaksParameter()]},
        "Computed again: the parameter 0.weight is not finite before the step",
    ),
    "the sum": ({"make": Scalar, "inputs": large(5e37), "loss": mean_of}, NOBODY),
}  # fmt: skip


BY_RANKS = ("a sample", "a sample, sharded, fp16", "a module", "the loss", "backward", "the sum")


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        outputs = checkpoint(self.layer, x, use_reentrant=False)
        assert isinstance(outputs, Tensor)
        return outputs


def bad_step(
    *,
    same_bits: bool,
    make: Callable[[], nn.Module] = linear,
    inputs: Tensor = BAD_INPUTS,
    targets: Tensor = BAD_CLASSES,
    loss: Any = F.cross_entropy,
    **how: Any,
) -> str:
    """Returns what is said of the bad step of a run; checks that it has changed no parameter and no generator."""
    torch.manual_seed(1)
    model = make()
    given = grouped(order=ddp.data.Fixed(NUM_BAD), folder=None, progress=False, **how)
    generators = GeneratorStates.now()
    with pytest.raises(Diverged) as raised:
        ddp.fit(
            model, (inputs, targets), torch.optim.SGD(model.parameters(), lr=1e-3), loss=loss, global_batch=16,
            epochs=1, same_bits=same_bits, **given,
        )  # fmt: skip
    assert "step 2" in str(raised.value) and raised.value.ddp_step == 2  # type: ignore[attr-defined]
    if "callbacks" not in how:
        assert all(each.isfinite().all() for each in model.parameters())
    assert GeneratorStates.now() == generators
    return str(raised.value)


def bad_steps(names: list[str]) -> dict[tuple[str, bool], str]:
    comm = ddp.init(abort_s=20)
    precision.FIRST = 1 << 8
    found: dict[tuple[str, bool], str] = {}
    for name in names:
        for same_bits in (True, False):
            if same_bits or (name in BY_RANKS and (comm.world_size > 1 or "strategy" not in CASES[name][0])):
                try:
                    found[name, same_bits] = bad_step(same_bits=same_bits, **CASES[name][0])
                except BaseException as error:
                    error.add_note(f"in the case {name}, same_bits={same_bits}")
                    raise
    ddp.shutdown()
    return found


@cache
def told(world_size: int) -> list[dict[tuple[str, bool], str]]:
    return run_ranks(bad_steps, world_size, list(CASES))


def place(world_size: int, *, same_bits: bool) -> dict[str, Any]:
    """Returns where the bad sample is."""
    num_shards = 8 if same_bits else world_size
    shard = next(shard for shard in range(num_shards) if (shard + 1) * 16 // num_shards > 5)
    rank = next(rank for rank in range(world_size) if shard in shards_of_rank(rank, world_size, num_shards))
    first, end = (each * 16 // num_shards for each in (shard, shard + 1))
    samples = [16 + at for at in range(first, end)]
    more = f" and {len(samples) - 8} more" if len(samples) > 8 else ""
    return {"shard": shard, "rank": rank, "samples": ", ".join(map(str, samples[:8])) + more}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("same_bits", [True, False])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick(1)
def test_a_bad_step_is_explained(name: str, same_bits: bool, world_size: int) -> None:
    messages = [found.get((name, same_bits)) for found in told(world_size)]
    if messages[0] is None:
        return
    expected = CASES[name][1].format(**place(world_size, same_bits=same_bits))
    if name == "the sum" and not same_bits and world_size == 1:
        expected = "the gradient of weight is not finite, in shard 0 on rank 0"
    assert len(set(messages)) == 1
    assert expected in messages[0] and messages[0].count("Computed again") == 1, messages[0]


def test_a_sample_that_loader_processes_have_read_is_named() -> None:
    message = bad_step(same_bits=True, inputs=one_nan(), num_workers=2)
    assert NAN_SAMPLE.format(**place(1, same_bits=True)) in message


def test_modules_that_are_checkpointed_are_no_obstacle() -> None:
    """Observers must save nothing for backward, because the repetition of the forward would save less."""
    message = bad_step(
        same_bits=True,
        inputs=with_sample(0.0),
        make=lambda: nn.Sequential(nn.Identity(), Ratio(), Checkpointed()),
    )
    assert f"the outputs of 1 (Ratio) are not finite, {HERE}".format(**place(1, same_bits=True)) in message


def test_what_a_module_is_given_by_name_is_seen() -> None:
    message = bad_step(same_bits=True, inputs=with_sample(0.0), make=lambda: Parent(by_name=True))
    assert f"the input of inner (Named) is not finite, {HERE}".format(**place(1, same_bits=True)) in message


# Observers of the layers of several ranks, of which one finds something and does not run backward.


def with_sync_batchnorm() -> nn.Module:
    return ddp.SyncBatchNorm.convert(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))


def synchronous() -> str:
    ddp.init(abort_s=3)
    return bad_step(same_bits=False, make=with_sync_batchnorm, targets=POSITIVE, loss=log_of_target)


def test_layers_that_wait_for_other_ranks_do_not_hang() -> None:
    messages = run_ranks(synchronous, 2, timeout_s=30)
    assert re.search("It is not computed again, because layers wait for other ranks", messages[0])
