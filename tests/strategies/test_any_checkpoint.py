"""Any strategy resumes the run of any other one, at any number of workers; and no file says who held what."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from members import WORDS, Odd, bits_of, fitted, groups_of, odd_samples, small_blocks
from ranks import run_ranks
from torch import Tensor

import ddp
from ddp.optim import LAMB

SAVED_AT, NUM_STEPS = 3, 7  # an epoch has five steps
OPTIMIZERS = {
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.01, amsgrad=True, fused=True),
    "lamb": lambda given: LAMB(given, lr=0.01),
}


def trained(kind: str, word: str, folder: Path, num_steps: int) -> dict[str, str]:
    """Goes on in the folder up to this step; returns hashes of all that is trained."""
    torch.manual_seed(4)
    module = Odd()
    optimizer = OPTIMIZERS[kind](groups_of(module))
    how: dict[str, Any] = {"strategy": word, "folder": folder, "resume": "auto", "max_steps": num_steps}
    with small_blocks():
        fitted(module, odd_samples(), optimizer, **how, curves=False, clip_norm=0.3)
    return bits_of(module, optimizer)


def copied(here: Path, kind: str, first: str, then: str) -> Path:
    """Returns a copy of a run's folder, which rank 0 makes."""
    comm = ddp.init()
    copy = here / f"{kind} {first} {then} {comm.world_size}"
    if comm.rank == 0:
        shutil.copytree(here / f"{kind} {first}", copy)
    comm.barrier()
    return copy


def saved_and_resumed(folder: str) -> None:
    """Every word saves, and every word resumes each of these: all with the bits of a run without a stop."""
    ddp.init(abort_s=60)
    here = Path(folder)
    whole = trained("adamw", "auto", here / "whole", NUM_STEPS)
    for kind in OPTIMIZERS:
        for word in WORDS:
            trained(kind, word, here / f"{kind} {word}", SAVED_AT)
    for first in WORDS:
        for then in WORDS:
            if (first, then) != ("mirrored", "mirrored"):  # as in tests/train/checkpoints/test_checkpoint.py
                found = trained("adamw", then, copied(here, "adamw", first, then), NUM_STEPS)
                assert found == whole, (first, then)
    ddp.shutdown()


def resumed_by_three(folder: str) -> list[dict[str, str]]:
    """Every word resumes another one's run, by more workers than saved it."""
    ddp.init(abort_s=60)
    found = []
    for first, then in zip(WORDS, (*WORDS[1:], WORDS[0]), strict=True):
        found.append(trained("lamb", then, copied(Path(folder), "lamb", first, then), NUM_STEPS))
    ddp.shutdown()
    return found


@pytest.mark.slow
def test_every_strategy_resumes_every_other_one(tmp_path: Path) -> None:
    run_ranks(saved_and_resumed, 2, str(tmp_path), timeout_s=120)
    for kind, make in OPTIMIZERS.items():
        expected, *others = (stored(tmp_path / f"{kind} {word}") for word in WORDS)
        weights, state = expected
        for other in others:
            assert same(other, expected)
            assert all(value.untyped_storage().nbytes() == value.nbytes for value in tensors_of(other)), "plain"
        module = Odd()
        module.load_state_dict(weights)
        optimizer = make(groups_of(module))
        optimizer.load_state_dict(state)
        assert {int(each["step"]) for each in optimizer.state.values()} == {SAVED_AT}
    first, *others = run_ranks(resumed_by_three, 3, str(tmp_path), timeout_s=120)
    assert all(other == first for other in others)
    assert len(first) == len(WORDS) and all(bits == first[0] for bits in first)


def stored(run: Path) -> list[Any]:
    """Returns what torch alone reads of a run's one checkpoint: weights, and the optimizer's state."""
    (model,) = run.rglob("model.pt")
    return [torch.load(path, weights_only=True) for path in (model, model.with_name("optimizer.pt"))]


def same(one: Any, other: Any) -> bool:
    """Returns True for values of the same keys, types and bits; the order of keys is free."""
    if isinstance(one, Tensor):
        return torch.equal(one, other) and (one.dtype, one.stride()) == (other.dtype, other.stride())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for each in inner for tensor in tensors_of(each)]
