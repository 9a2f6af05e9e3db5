"""What the tests of this folder train, in one vocabulary: models, data, optimizers, and the words of `strategy`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from flat import grouped
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.comm.objects import broadcast_object
from ddp.gradients import reducer
from ddp.models import GPT
from ddp.optim import LAMB, LARC, LARS, layerwise, norms
from ddp.replica.broadcast import tensor_hash
from ddp.replica.units import dissolve_units
from ddp.strategies import central_storage, sharded

SLICED = ("sharded", "central_storage", "fully_sharded")
WORDS = ("mirrored", *SLICED)  # `auto`, `one_device` and `multi_worker` make what `mirrored` does
GLOBAL_BATCH, NUM_SAMPLES = 10, 46  # the last batch of an epoch has six samples: four workers have 2, 2, 1, 1

# --- models and data -------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 13), nn.Tanh(), nn.Linear(13, 7), nn.ReLU(), nn.Linear(7, 5))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)),
        *(nn.Flatten(), nn.Linear(24, 5)),
    )


def gpt() -> nn.Module:
    return GPT(vocab_size=19, context=6, width=16, depth=1, heads=2, dropout=0.2)


def samples(kind: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind == "gpt":
        text = torch.randint(0, 19, (NUM_SAMPLES, 7), generator=generator)
        targets = text[:, 1:].clone()
        targets[::4, 3:] = -100  # targets that do not count: the ranks' counts differ
        return text[:, :-1].contiguous(), targets
    inputs = torch.randn(NUM_SAMPLES, 1, 6, 6, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(0, 5, (NUM_SAMPLES,), generator=generator)


class NoGradient(torch.autograd.Function):
    """Multiplies by a weight to which it gives no gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return inputs * weight

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        (weight,) = ctx.saved_tensors
        return given[0] * weight, None


class Odd(nn.Module):
    """Has what models have now and then.

    A frozen layer, tied weights, a layout of images by channels, a scalar, tensors of several blocks, and a weight that
    gets no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(96, 12).requires_grad_(False)
        self.one, self.norm, self.two = nn.Linear(12, 37), nn.LayerNorm(37), nn.Linear(37, 12, bias=False)
        self.tied = nn.Linear(12, 37)
        self.tied.weight = self.one.weight
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.ignored = nn.Parameter(torch.full((12,), 1.1))
        self.last = nn.Linear(37, 3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.frozen(F.relu(self.conv(images)).flatten(1)))
        hidden = NoGradient.apply(hidden, self.ignored)
        hidden = self.two(self.norm(torch.tanh(self.one(hidden)))) * self.scale
        scores: Tensor = self.last(torch.tanh(self.tied(hidden)))
        return scores


def odd_samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(NUM_SAMPLES, 2, 6, 6, generator=generator)
    return images.to(memory_format=torch.channels_last), torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)


# --- optimizers ------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.05, momentum=0.9, dampening=0.3),
    "nesterov": lambda given: torch.optim.SGD(given, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda given: torch.optim.Adam(given, lr=0.01, foreach=False),
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.01),
    "fused": lambda given: torch.optim.AdamW(given, lr=0.01, fused=True),
    "amsgrad": lambda given: torch.optim.AdamW(given, lr=0.01, amsgrad=True),
    "lars": lambda given: LARS(given, lr=5.0),
    "larc": lambda given: LARC(given, lr=0.1, nesterov=True),
    "lamb": lambda given: LAMB(given, lr=0.01, decay_in_ratio=False),
}


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Returns two groups of all parameters, frozen ones too; matrices decay."""
    parameters = list(module.parameters())
    decaying = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() <= 1]
    return [{"params": decaying, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]


# --- a run -----------------------------------------------------------------------------------------------------------


@contextmanager
def small_blocks(stretch: int = 256) -> Iterator[None]:
    """Blocks of 64 elements, so that small tensors are cut as large ones are; and stretches of `stretch` elements."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (norms, layerwise, reducer, sharded, central_storage):
            assert module.BLOCK_NUMEL > 64  # type: ignore[attr-defined]
            patch.setattr(module, "BLOCK_NUMEL", 64)
        for module in (layerwise, central_storage):
            patch.setattr(module, "STRETCH_NUMEL", stretch)
        yield


def flat(module: nn.Module) -> Tensor:
    """Returns all parameters, and the buffers of floating point, in one tensor."""
    tensors = [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.is_floating_point())]
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).clone()


def fitted(module: nn.Module, data: Any, optimizer: torch.optim.Optimizer, **how: Any) -> ddp.TrainState:
    """Trains by `ddp.fit`, without a word and without a file. Afterwards all is whole, with every strategy."""
    settings = {"global_batch": GLOBAL_BATCH, "seed": 5, "folder": None, "progress": False, "loss": F.cross_entropy}
    how["callbacks"] = [*how.get("callbacks", ()), whole := Whole(how.get("max_steps"))]
    state = ddp.fit(module, data, optimizer, **grouped(**{**settings, **how}))
    if not state.model.is_whole:
        dissolve_units(module)
        optimizer.load_state_dict(whole.optimizer_state)
    return state


class Whole(ddp.Callback):
    """Keeps the optimizer's whole state at the end, if no rank has it afterwards."""

    def __init__(self, num_steps: int | None) -> None:
        self._num_steps = num_steps

    def step_end(self, state: ddp.TrainState, report: Any) -> None:
        if not state.model.is_whole and state.step == self._num_steps:
            found = state.strategy.state_dict()["optimizer"]
            self.optimizer_state = broadcast_object(state.comm, found)


def bits_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Returns hashes of parameters, buffers and the whole optimizer state, by name."""
    found = {name: tensor_hash(value.detach().reshape(-1)) for name, value in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                assert key == "step" or value.shape == parameter.shape, (name, key)
                found[f"{name}, {key}"] = tensor_hash(value.reshape(-1).float())
            else:
                found[f"{name}, {key}"] = str(value)
    return found


class Losses(ddp.Callback):
    """Keeps the loss and the gradient's norm of every step."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def step_end(self, state: ddp.TrainState, report: Any) -> None:
        self.seen.append((report.loss, report.gradient_norm))
