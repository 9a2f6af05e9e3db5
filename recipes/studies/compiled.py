"""What a schedule of this package costs inside a compiled step, next to XLA's own sum: recipes/studies/compiled.py.

    python -m recipes.studies.compiled --devices 2,4 --turns 9

    ours        a step by strategy=tpu: a compiled program, and the optimizer's update on the host
    program     its compiled program alone, with the parameters on the devices already
    psum        as ours, with `lax.psum` in the place of the ring
    torch       the same batch in one torch process
    first_s     seconds to the end of the first step, of which the compiler takes most

Rivals take turns; a figure is the median over turns, a ratio that of the turns' ratios. The devices are of the CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import jax
import torch
from jax import lax

import ddp
from ddp.collectives.catalog import ALL_REDUCE
from ddp.collectives.compiled import AXIS
from ddp.gradients.totals import Totals
from ddp.models import CNN, GPT
from ddp.replica.compiled import CompiledDataParallel, devices_of

Case = tuple[torch.nn.Module, Any, tuple[torch.Tensor, torch.Tensor]]


def digits_cnn() -> Case:
    """Returns the model, the task and a batch of the digits recipe."""
    model = CNN(in_channels=1, image_size=8, num_classes=10)
    return model, ddp.Classification(), (torch.rand(64, 1, 8, 8), torch.randint(0, 10, (64,)))


def gpt() -> Case:
    """Returns those of the GPT recipe."""
    text = torch.randint(0, 256, (16, 129))
    model = GPT(context=128, width=96, depth=4, heads=3)
    return model, ddp.LanguageModel(), (text[:, :-1].contiguous(), text[:, 1:].contiguous())


CASES = {"digits CNN": digits_cnn, "GPT": gpt}


def stepper(case: Case, num_devices: int, *, by_psum: bool = False) -> tuple[CompiledDataParallel, Callable[[], None]]:
    """Returns a replica on so many devices, and a function that makes a step."""
    module, task, batch = case
    replica = CompiledDataParallel(
        module, schedule=ALL_REDUCE["ring"], devices=devices_of(num_devices), comm=ddp.init(device="cpu")
    )
    if by_psum:
        replica._reduce = partial(lax.psum, axis_name=AXIS)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    parts = zip(*(tensor.chunk(num_devices) for tensor in batch), strict=True)
    shares, loss = [[(part, number) for number, part in enumerate(parts)]], task.loss

    def step() -> None:
        replica.compute(loss, shares, Totals())
        optimizer.step()

    return replica, step


def program_of(replica: CompiledDataParallel) -> Callable[[], Any]:
    """Returns a call of the last program of a replica, whose arguments are on the devices."""
    ((key, program),) = replica._programs.items()
    calls: list[Any] = []
    replica._programs[key] = lambda *given: calls.append(given) or program(*given)

    def call() -> Any:
        with jax.enable_x64(True):
            return jax.block_until_ready(program(*calls[0]))

    return call


def in_torch(case: Case) -> Callable[[], None]:
    """Returns a function that makes the step in one process."""
    module, task, batch = case
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        total, count = task.loss(module, batch)
        (total / count).backward()
        optimizer.step()

    return step


def measured(name: str, num_devices: int, turns: int) -> str:
    """Returns a line of the table."""
    replica, ours = stepper(CASES[name](), num_devices)
    start_s = time.perf_counter()
    ours()
    first_s = time.perf_counter() - start_s
    program = program_of(replica)
    _, by_psum = stepper(CASES[name](), num_devices, by_psum=True)
    rivals = {"ours": ours, "program": program, "psum": by_psum, "torch": in_torch(CASES[name]())}
    ours()  # `program` finds its arguments
    times: dict[str, list[float]] = {rival: [] for rival in rivals}
    for turn in range(turns + 1):
        for rival, call in rivals.items():
            start_s = time.perf_counter()
            for _ in range(5):
                call()
            if turn:  # the first one warms up
                times[rival].append((time.perf_counter() - start_s) / 5)
    ratios = {
        rival: median(a / b for a, b in zip(times["ours"], times[rival], strict=True)) for rival in ("psum", "program")
    }
    milliseconds = "  ".join(f"{rival} {1e3 * median(each):.1f}" for rival, each in times.items())
    against = "  ".join(f"ours ÷ {rival} {ratio:.2f}" for rival, ratio in ratios.items())
    return f"{name:<10}  {num_devices} devices   ms: {milliseconds}   {against}   first_s {first_s:.1f}"


def main(words: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2,4", help="numbers of devices (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args(words)
    counts = list(map(int, options.devices.split(",")))
    devices_of(max(counts))
    torch.manual_seed(0)
    for name in CASES:
        for num_devices in counts:
            print(measured(name, num_devices, options.turns), flush=True)
    ddp.shutdown()


if __name__ == "__main__":
    main()
