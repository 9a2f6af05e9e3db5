"""What devices of JAX train is what torch trains: in one process of whole batches, or as workers with BatchNorm.

Tests: ddp/replica/compiled.py, ddp/strategies/strategy.py.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from computed import Watch, by_hand, error_of, fitted, made, samples, trajectory
from jaxed import jaxed, needs_jax
from ranks import run_ranks
from torch import Tensor

import ddp

pytestmark = needs_jax

NUM_STEPS, BOUND = 50, 1e-13
QUICK = [("mlp", "sgd", 8, 1), ("cnn", "adamw", 4, None), ("gpt", "lamb", 2, None)]  # of eight, some have none
GRID = [
    (model, optimizer, devices, micro_size)
    for model, optimizer, devices in product(("mlp", "cnn", "gpt"), ("sgd", "adamw", "lamb"), (1, 2, 4, 8))
    for micro_size in (None, 1 if devices == 8 else 3)
]


def compiled(model: str, optimizer: str, devices: int, micro_size: int | None) -> Tensor:
    how = {"loss": ddp.LanguageModel()} if model == "gpt" else {}
    return trajectory(model, optimizer, NUM_STEPS, devices=devices, micro_size=micro_size, **how)


def check(case: tuple[str, str, int, int | None]) -> None:
    error = error_of(jaxed(compiled, *case), by_hand(*case[:2], NUM_STEPS))
    assert error <= BOUND, error


@pytest.mark.parametrize("case", QUICK, ids=lambda case: "-".join(map(str, case)))
def test_devices_make_what_one_process_makes(case: tuple[str, str, int, int | None]) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=lambda case: "-".join(map(str, case)))
def test_devices_make_what_one_process_makes_in_every_case(case: tuple[str, str, int, int | None]) -> None:
    check(case)


# --- BatchNorm -------------------------------------------------------------------------------------------------------


def with_norms(devices: int | None, micro_size: int | None, num_steps: int) -> Tensor:
    """Returns parameters and statistics after each step, on devices; or, without a number, as ranks make them."""
    how: dict[str, Any] = {"strategy": "mirrored"} if devices is None else {"devices": devices}
    found = trajectory("norms", "sgd", num_steps, micro_size=micro_size, **how)
    ddp.shutdown()
    return found


@pytest.mark.parametrize(
    ("devices", "micro_size", "num_steps"),
    [(2, 3, 12), *(pytest.param(*case, 50, marks=pytest.mark.slow) for case in product((1, 2, 4), (None, 2)))],
)
def test_each_device_normalises_its_share_as_a_worker_does(
    devices: int, micro_size: int | None, num_steps: int
) -> None:
    expected = run_ranks(with_norms, devices, None, micro_size, num_steps)[0]
    assert error_of(jaxed(with_norms, devices, micro_size, num_steps), expected) <= BOUND


# --- the devices beside each other -----------------------------------------------------------------------------------


def means_by_device() -> list[list[bytes]]:
    """Returns by step the means that each device has, in float32."""
    from ddp.replica.compiled import CompiledDataParallel

    found = []
    original = CompiledDataParallel._program

    def watched(self: Any, forms: Any, *, is_first: bool, is_last: bool) -> Any:
        program = original(self, forms, is_first=is_first, is_last=is_last)

        def run(*given: Any) -> Any:
            results = program(*given)
            if is_last:
                found.append([np.array(shard.data).tobytes() for shard in results[0].addressable_shards])
            return results

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledDataParallel, "_program", watched)
        module, optimizer = made("mlp", "adamw", torch.float32)
        fitted(module, samples("mlp", torch.float32), optimizer, max_steps=2, strategy="tpu")
    return found


def test_all_devices_have_the_same_bits() -> None:
    found = jaxed(means_by_device)
    assert [len(each) for each in found] == [8] * 2
    assert all(len(set(each)) == 1 for each in found) and len({each[0] for each in found}) == 2


def narrow(how: dict[str, Any]) -> Tensor:
    """Returns the trajectory of parameters in bfloat16, with more samples than that can count."""
    module, optimizer = made("mlp", "sgd", torch.bfloat16)
    inputs, targets = samples("mlp", torch.bfloat16)
    data = inputs.repeat(20, 1, 1, 1), targets.repeat(20)
    fitted(module, data, optimizer, global_batch=515, max_steps=1, callbacks=[watch := Watch()], **how)
    ddp.shutdown()
    return torch.stack(watch.seen).double()


def test_parameters_may_be_narrow() -> None:
    (expected,) = run_ranks(narrow, 1, {})
    assert error_of(jaxed(narrow, {"devices": 2}), expected) <= 2e-3  # the last digit of bfloat16 is 4e-3
