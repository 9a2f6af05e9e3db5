"""One-line mutants of central storage's update die: each leaves other bits than replicas have, or says what it may not.

All in one start of the ranks, one after the other. A mutant is the same on all ranks, so that none waits for another.
"""

from __future__ import annotations

import importlib
import inspect
import os
import textwrap
import time
from typing import Any

import pytest
import torch
from members import OPTIMIZERS, Odd, bits_of, fitted, groups_of, odd_samples, small_blocks
from ranks import run_ranks

import ddp
from ddp.errors import CommunicatorBroken
from ddp.strategies import central_storage

pytestmark = pytest.mark.slow  # because what is proven here is that other tests can fail

STORAGE, SLICES = "CentralStorage", "HostSlices"
MUTANTS: dict[str, tuple[str, str, str]] = {  # where, a line, what becomes of it
    "what has no gradient is updated": (
        f"{STORAGE}._step",
        "None if block.part.whole.grad is None else block.gradient",
        "block.gradient",
    ),
    "a block is left out": (f"{STORAGE}._step", 'group["params"] = weights', 'group["params"] = weights[1:]'),
    "gradients are not clipped": (f"{STORAGE}._step", "norm, self._clip_norm)", "norm, None)"),
    "rates stay as they were": (f"{STORAGE}._step", "self._take_settings()", "pass"),
    "new state is not shared": (f"{STORAGE}._step", "self._place(stretch.blocks)", "pass"),
    "nobody waits for the others": (f"{STORAGE}._writing", 'self._host_barrier("all parts are written")', "pass"),
    "half an update counts as whole": (f"{STORAGE}._writing", "self._written = what", "pass"),
    "state that is there is not taken over": (
        f"{STORAGE}._take_in",
        "in state[block.part.whole].items()",
        "in ()",
    ),
    "a new state stays out of the store": (f"{STORAGE}._place", "place.copy_(state[name])", "place"),
    "the user's optimizer keeps an old state": (
        f"{STORAGE}._update_user_state",
        "if block.start == block.part.start:",
        "if False:",
    ),
    "each rank keeps its parts at the end": (
        "Sharded.finish",
        "if self._slices is not None:",
        "if False:",
    ),
    "parameters stay shared at the end": (f"{STORAGE}.finish", "self._store.make_private()", "pass"),
    "what others have is not known at the end": (f"{STORAGE}._gathered", "about.update(found)", "about.update(mine)"),
    "what was moved out is forgotten": (
        f"{SLICES}.take_in",
        "part.weights.copy_(share_of(part.start, part.stop, view, parameter))",
        "pass",
    ),
    "what was moved out stays out": (f"{SLICES}.take_in", "parameter.data = view", "pass"),
    "a block has the state of another": ("blocks_of", "start = part.start + begin", "start = part.start"),
    "a block has the gradient of another": (
        "blocks_of",
        "part.gradient[begin : begin + BLOCK_NUMEL]",
        "part.gradient[: len(weights)]",
    ),
    "a block is a copy": ("blocks_of", "nn.Parameter(weights)", "nn.Parameter(weights.clone())"),
    "a share begins at the beginning": ("share_of", "[start:stop]", "[: stop - start]"),
}


class Disturbs(ddp.Callback):
    """Moves a parameter to other memory, as a user's program may, and changes which layers are trained."""

    def __init__(self, module: Odd, *, unfreezes_at: int) -> None:
        self._module, self._unfreezes_at = module, unfreezes_at

    def step_start(self, state: ddp.TrainState) -> None:
        if state.step == 1:
            self._module.two.weight.data = self._module.two.weight.data * 1.5
        if state.step == self._unfreezes_at:
            self._module.frozen.requires_grad_(True)


def trained(comm: ddp.Communicator, word: str) -> dict[str, str]:
    """Trains twice, so that the second time finds a state; returns hashes of what is this rank's own then."""
    torch.manual_seed(4)
    module = Odd()
    optimizer = OPTIMIZERS["fused"](groups_of(module))
    for unfreezes_at in (99, 1):
        how: dict[str, Any] = {"max_steps": 3, "clip_norm": 0.3, "schedule": ddp.optim.cosine()}
        disturbs = Disturbs(module, unfreezes_at=unfreezes_at)
        fitted(module, odd_samples(), optimizer, strategy=word, callbacks=[disturbs], **how)
    if comm.rank == 1:
        module.one.bias.data.add_(1.0)  # which no other rank sees
    comm.barrier()
    return bits_of(module, optimizer)


def is_noticed(comm: ddp.Communicator, expected: dict[str, str]) -> bool:
    """Returns True if some rank has other bits than replicas have, or gives out the state of half an update."""
    with small_blocks(stretch=1024):
        return comm.agree_any(trained(comm, "central_storage") != expected) or not refuses_half_an_update()


def refuses_half_an_update() -> bool:
    """Returns True if a state is refused after an update that has failed on every rank."""
    module = torch.nn.Linear(3, 3)
    strategy = ddp.strategies.CentralStorage(module, OPTIMIZERS["fused"](groups_of(module)))
    strategy.model(torch.ones(2, 3)).sum().backward()
    agreement = strategy.agree(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(central_storage, "clipped_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            strategy.update(agreement)
    try:
        strategy.state_dict()
    except CommunicatorBroken:
        return True
    return False


def late(*given: Any) -> None:
    """Takes its time on one rank."""
    if int(os.environ["RANK"]) == 1:
        time.sleep(LATE["s"])
    USUAL(*given)


USUAL, LATE = central_storage.clipped_step, {"s": 0.002}


def mutated(where: str, line: str, becomes: str) -> tuple[Any, str, Any]:
    """Returns whose attribute is the mutant, its name, and the mutant."""
    owner: Any = importlib.import_module("ddp.strategies.central_storage")
    *classes, name = where.split(".")
    for each in classes:
        owner = getattr(owner, each)
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{where} has no line {line!r} any more, or more than one"
    scope: dict[str, Any] = {"__class__": owner}
    changed = source.replace(line, becomes).replace("super()", f"super({classes[-1]}, self)" if classes else "")
    exec(compile(changed, where, "exec"), function.__globals__, scope)
    return owner, name, scope[name]


def survivors() -> list[str]:
    """Returns the mutants that nobody has noticed."""
    comm = ddp.init(abort_s=20)
    central_storage.clipped_step = late  # type: ignore[assignment]
    with small_blocks(stretch=1024):
        expected = trained(comm, "mirrored")
    found = []
    for mutant in (None, *MUTANTS, None):
        with pytest.MonkeyPatch.context() as patch:
            if mutant == "nobody waits for the others":
                patch.setitem(LATE, "s", 0.04)  # so that the other rank is ahead on a busy machine, too
            if mutant is not None:
                patch.setattr(*mutated(*MUTANTS[mutant]))
            noticed = is_noticed(comm, expected)
        if mutant is None:
            assert not noticed, "the library itself"
        elif not noticed:
            found.append(mutant)
    ddp.shutdown()
    return found


def test_mutants_of_the_update_die() -> None:
    assert run_ranks(survivors, 2) == [[], []]
