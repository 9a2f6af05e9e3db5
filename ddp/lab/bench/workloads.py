"""Makes the models that the step benchmark trains, each with one worker's batch, in float32 on the CPU.

| name                | what it stresses                                                                          |
|---------------------|-------------------------------------------------------------------------------------------|
| small-mlp           | README's first program: hardly anything but the loop                                      |
| digits-cnn          | the default job: a step of a millisecond or two                                           |
| cnn-b64             | few parameters, much computing: communication should not be seen                          |
| resnet18-32px       | 11 M parameters; the stem for photographs leaves a pixel of 32, so computing is cheap     |
| resnet18-small-stem | the same parameters with the stem for small images: compute-heavy                         |
| mlp-25m             | 25 M parameters in six tensors: bandwidth                                                 |
| gpt-10m             | 11 M parameters, 4 × 128 tokens                                                           |
| gpt-10m-b1          | the same with 128 tokens: more communication for each multiplication                      |
| encoder             | 13 M parameters in torch's TransformerEncoder, 4 × 128 tokens                             |
| tiny-1000           | 1,000 parameters of 4 or 16 numbers: the interpreter's cost of each                       |
| MODULE:NAME         | your own: its method `example_batch()` returns one worker's (inputs, targets)             |
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp.errors import ConfigError
from ddp.lab.bench.command import refuse_unknown, split
from ddp.models import CNN, GPT, MLP, resnet
from ddp.process.arguments import Parser
from ddp.run.assembly.components import own_model
from ddp.run.settings.address import error_line, is_address

Batch = tuple[Tensor, Tensor]


class Workload(NamedTuple):
    """A model, and one worker's batch for it; both draw from torch's global generator."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]


class TinyLayers(nn.Module):
    """Adds layer(x) / n to x, n times over four numbers: 2n parameters, and hardly anything to compute."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Returns scores [n, 4] for x [n, 4]."""
        scale = 1 / len(self.layers)  # keeps activations finite, at any depth
        for layer in self.layers:
            x = x + scale * layer(x)
        return x


def _small_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()),
        *(nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def _gpt(width: int = 384, depth: int = 6) -> nn.Module:
    return GPT(vocab_size=256, context=128, width=width, depth=depth, heads=width // 64)


def _images(n: int, channels: int, size: int, *, num_classes: int = 10) -> Callable[[], Batch]:
    return lambda: (torch.randn(n, channels, size, size), torch.randint(0, num_classes, (n,)))


def _tokens(n: int) -> Callable[[], Batch]:
    return lambda: (torch.randint(0, 256, (n, 128)), torch.randint(0, 256, (n, 128)))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(512, nhead=8, dim_feedforward=2048, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(256, 512), encoder, nn.Linear(512, 256))


def _small_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))


WORKLOADS = {
    # the share of a worker in a global batch of 64 on two workers
    "small-mlp": Workload(_small_mlp, lambda: (torch.randn(32, 20), torch.randint(0, 2, (32,)))),
    "digits-cnn": Workload(lambda: CNN(in_channels=1, image_size=8, num_classes=10), _images(32, 1, 8)),
    "cnn-b64": Workload(_small_cnn, _images(64, 1, 28)),
    "resnet18-32px": Workload(lambda: resnet("resnet18", num_classes=10, small_images=False), _images(16, 3, 32)),
    "resnet18-small-stem": Workload(lambda: resnet("resnet18", num_classes=10, small_images=True), _images(16, 3, 32)),
    "mlp-25m": Workload(
        lambda: MLP(in_features=1024, hidden=(4096, 4096), num_classes=1000), _images(64, 1, 32, num_classes=1000)
    ),
    "gpt-10m": Workload(_gpt, _tokens(4)),
    "gpt-10m-b1": Workload(_gpt, _tokens(1)),
    "gpt-25m": Workload(partial(_gpt, 512, 8), _tokens(4)),
    "encoder": Workload(_encoder, _tokens(4)),
    "tiny-1000": Workload(lambda: TinyLayers(500), lambda: (torch.randn(8, 4), torch.randint(0, 4, (8,)))),
}


def workload(model: str) -> Workload:
    """Returns one of `WORKLOADS`; or that of a user's own model, MODULE:NAME, which is built now.

    Raises:
        ConfigError: the user's own model cannot be built.
    """
    if not is_address(model):
        return WORKLOADS[model]
    module = own_model(model, {}, key="--models", folder=Path.cwd())
    return Workload(lambda: module, partial(_own_batch, module, model))


def make(model: str, *, rank: int) -> tuple[nn.Module, Batch]:
    """Returns the same model on every rank, and a batch of the rank's own."""
    torch.manual_seed(0)
    chosen = workload(model)
    module = chosen.make()
    torch.manual_seed(1 + rank)
    return module, chosen.batch()


def _own_batch(module: nn.Module, model: str) -> Batch:
    """Returns the example batch of the user's own model."""
    give = "give it a method that returns one worker's (inputs, targets), two tensors"
    if not callable(example := getattr(module, "example_batch", None)):
        raise ConfigError(f"--models={model}: has no example_batch(); {give}")
    try:
        batch = example()
    except Exception as error:
        raise ConfigError(f"--models={model}: example_batch() failed: {error_line(error)}") from error
    if not (isinstance(batch, tuple) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch)):
        raise ConfigError(f"--models={model}: example_batch() returned {batch!r:.60}; {give}")
    return batch


def try_own(model: str) -> None:
    """Raises ConfigError unless the user's own model can be built and takes its example, before any rank starts."""
    chosen = workload(model)
    module, (inputs, targets) = chosen.make(), chosen.batch()
    try:
        outputs = module(inputs)
        if not isinstance(outputs, Tensor):
            raise TypeError(f"the model returned an object of type {type(outputs).__name__}; return a tensor")
        loss = loss_of(outputs, targets)
    except Exception as error:
        raise ConfigError(f"--models={model}: a step on its example_batch() failed: {error_line(error)}") from error
    if not loss.requires_grad:
        raise ConfigError(f"--models={model}: nothing of it is trained; give it a parameter that needs a gradient")


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy of scores [n, …, classes] and classes [n, …]; for numbers, the mean square."""
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def add_models(parser: Parser, default: str = "digits-cnn,resnet18-32px") -> None:
    """Adds which models are trained."""
    parser.add_argument(
        "--models",
        default=default,
        metavar="MODEL,MODEL,…",
        help=f"all, or some of {', '.join(WORKLOADS)}, or your own by MODULE:NAME (default: %(default)s)",
    )


def models_of(options: argparse.Namespace) -> list[str]:
    """Returns the names of the models.

    Raises:
        ConfigError: there is no such model, or one of the user's own cannot be trained.
    """
    models = list(WORKLOADS) if options.models == "all" else split("--models", options.models)
    refuse_unknown("model", [model for model in models if not is_address(model)], [*WORKLOADS, "MODULE:NAME"])
    for model in filter(is_address, models):
        try_own(model)
    return models
