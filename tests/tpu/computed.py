"""What the tests of this folder train on devices of JAX, and beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flat import grouped
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.models import CNN, GPT, MLP
from ddp.optim import LAMB
from ddp.strategies.strategy import Compiled

GLOBAL_BATCH, NUM_SAMPLES = 10, 26  # the last batch of an epoch has six samples: four devices have 2, 2, 1, 1

MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP(in_features=64, hidden=(12,), num_classes=5),
    "cnn": lambda: CNN(in_channels=1, image_size=8, num_classes=5, width=2, dropout=0.0),
    "gpt": lambda: GPT(vocab_size=19, context=6, width=16, depth=1, heads=2, dropout=0.0),
    "norms": lambda: nn.Sequential(
        *(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, bias=False)),
        *(nn.BatchNorm2d(6, momentum=0.3), nn.Flatten(), nn.Linear(96, 5)),
    ),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.02, momentum=0.9),
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.002),
    "lamb": lambda given: LAMB(given, lr=0.002),
}


def made(model: str, optimizer: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a model and its optimizer, the same in each process."""
    torch.manual_seed(3)
    module = MODELS[model]().to(dtype)
    return module, OPTIMIZERS[optimizer](module.parameters())


def samples(model: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets."""
    generator = torch.Generator().manual_seed(1)
    if model == "gpt":
        text = torch.randint(0, 19, (NUM_SAMPLES, 7), generator=generator)
        targets = text[:, 1:].clone()
        targets[::4, 3:] = -100  # targets that do not count: the devices' counts differ
        return text[:, :-1].contiguous(), targets
    inputs = torch.randn(NUM_SAMPLES, 1, 8, 8, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(0, 5, (NUM_SAMPLES,), generator=generator)


def flat(module: nn.Module) -> Tensor:
    """Returns all parameters, and the buffers of floating point, in one tensor."""
    tensors = [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.is_floating_point())]
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).clone()


class Watch(ddp.Callback):
    """Keeps parameters and running statistics after every step."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        with state.model.whole():
            self.seen.append(flat(state.model.module))


def fitted(module: nn.Module, data: Any, optimizer: torch.optim.Optimizer, **how: Any) -> ddp.TrainState:
    """Trains by `ddp.fit`, without a word and without a file.

    Args:
        how: arguments of `ddp.fit`, fields of its policies, and `devices`: their number, where JAX computes.
    """
    if (num_devices := how.pop("devices", None)) is not None:
        module = Compiled.replica_of(module, num_devices=num_devices)
    settings = {"global_batch": GLOBAL_BATCH, "seed": 5, "folder": None, "progress": False, "loss": F.cross_entropy}
    return ddp.fit(module, data, optimizer, **grouped(**{**settings, **how}))


def trajectory(model: str, optimizer: str, num_steps: int, **how: Any) -> Tensor:
    """Returns parameters and statistics [num_steps, n] after each step of a training by `ddp.fit`."""
    dtype = how.pop("dtype", torch.float64)
    module, update = made(model, optimizer, dtype)
    watch = Watch()
    fitted(module, samples(model, dtype), update, max_steps=num_steps, callbacks=[watch], **how)
    return torch.stack(watch.seen)


def by_hand(model: str, optimizer: str, num_steps: int) -> Tensor:
    """Returns what one process makes of whole batches, with nothing of this library but the order of samples."""
    module, update = made(model, optimizer)
    inputs, targets = samples(model)
    sampler = ddp.TrainSampler(NUM_SAMPLES, global_batch=GLOBAL_BATCH, rank=0, world_size=1, seed=5)
    seen: list[Tensor] = []
    while len(seen) < num_steps:
        for plan in sampler.plans():
            chosen = list(plan.micros[0].indices)
            update.zero_grad()
            outputs = module(inputs[chosen])
            F.cross_entropy(outputs.flatten(0, -2), targets[chosen].flatten()).backward()
            update.step()
            seen.append(flat(module))
            sampler.commit(plan)
    return torch.stack(seen[:num_steps])


def error_of(found: Tensor, expected: Tensor) -> float:
    """Returns the largest relative difference of any step."""
    assert found.shape == expected.shape and found.isfinite().all()
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())
