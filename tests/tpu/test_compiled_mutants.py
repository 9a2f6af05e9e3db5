"""One-line mutants of the compiled schedule and the compiled replica die."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from typing import Any

import pytest
import test_compiled_noise as noise
import test_compiled_schedules as schedules
import test_compiled_steps as steps
from computed import by_hand, error_of
from jaxed import jaxed, needs_jax

from ddp.errors import ConfigError

pytestmark = [needs_jax, pytest.mark.slow]  # because what is proven here is that other tests can fail

COLLECTIVES, REPLICA, UPDATES = (
    *("ddp.collectives.compiled", "ddp.replica.compiled:CompiledDataParallel"),
    "ddp.replica.compiled:RunningStatistics",
)
MUTANTS: dict[str, tuple[str, str, str, str]] = {  # where, a function, a line, what becomes of it
    "equal chunks": (
        *(COLLECTIVES, "all_reduce", "pairwise(offsets(len(mine), num_chunks))"),
        "((min(len(mine), n * -(-len(mine) // num_chunks)), min(len(mine), (n + 1) * -(-len(mine) // num_chunks)))"
        " for n in range(num_chunks))",
    ),
    "before is ignored": (COLLECTIVES, "rounds_of", "op.add, op.before)", "op.add)"),
    "another order of additions": (COLLECTIVES, "rounds_of", "for op in ops:\n                if isinstance(op, Recv)",
                                   "for op in reversed(ops):\n                if isinstance(op, Recv)"),
    "additions within a device are left out": (COLLECTIVES, "rounds_of", ", *added]", "]"),
    "a constant key": (REPLICA, "_loss", "jax.random.key(seed)", "jax.random.key(0)"),
    "statistics are not written": (UPDATES, "__torch_function__", "self._update(*args, **kwargs)", "pass"),
    "a variance of another divisor": (UPDATES, "_update", "inputs.var(dims)", "inputs.var(dims, correction=0)"),
    "a padded sample is counted": (REPLICA, "_loss", "next(rest)[tuple(map(slice, each))]", "next(rest)"),
    "micro-batches replace each other": (REPLICA, "_on_device", "else before + mine", "else mine"),
    "sums are means": (REPLICA, "_on_device", "total[:-3] / jnp.where", "total[:-3] / 1 + 0 * jnp.where"),
}  # fmt: skip


def patched(patch: pytest.MonkeyPatch, where: str, name: str, line: str, becomes: str) -> None:
    """Puts the mutant of a function into the place of it."""
    module, _, kind = where.partition(":")
    owner: Any = importlib.import_module(module)
    owner = getattr(owner, kind) if kind else owner
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{where}, {name} has no line {line!r} any more, or more than one"
    scope: dict[str, Any] = {}
    exec(compile(source.replace(line, becomes), name, "exec"), function.__globals__, scope)
    patch.setattr(owner, name, scope[name])


KNOWN: dict[str, Any] = {}  # what the library itself makes


def is_right(where: str) -> bool:
    """Returns True if schedules, or steps, are what they should be, as far as a mutant may change them."""
    if where == COLLECTIVES:
        return schedules.differing([("own", 5), ("ring", 8)], lengths=(17,)) == []
    if where == UPDATES:
        found = steps.with_norms(2, None, 1)
        return error_of(found, KNOWN.setdefault("norms", found)) <= steps.BOUND
    masks, _ = noise.trained(None, 1)
    are_new = len({mask.numpy().tobytes() for mask in masks.values()}) == len(masks)
    found = steps.trajectory("mlp", "sgd", 1, devices=3, micro_size=2)
    return are_new and error_of(found, by_hand("mlp", "sgd", 1)) <= steps.BOUND


def survivors() -> list[str]:
    """Returns the mutants that nobody has noticed."""
    for where in (COLLECTIVES, REPLICA, UPDATES):
        assert is_right(where), where
    found = []
    for name, mutant in MUTANTS.items():
        with pytest.MonkeyPatch.context() as patch:
            patched(patch, *mutant)
            try:
                if is_right(mutant[0]):
                    found.append(name)
            except ConfigError as error:
                assert "differs by" in str(error)
    return found


def test_mutants_die() -> None:
    assert jaxed(survivors) == []
