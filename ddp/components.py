"""From settings to components: the one place that takes a `Config` apart and passes plain arguments on.

Each function below builds one component of a run. Components know nothing of `Config`.

Read before: `worker.py`, `config.py`. Read next: `build.py`.
"""

from __future__ import annotations

import math
from typing import cast

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ddp import config as settings
from ddp.comm.communicator import Communicator
from ddp.config import Config
from ddp.data import digits, image_sets, standard_library, synthetic
from ddp.data.splits import Splits
from ddp.models.cnn import CNN
from ddp.models.gpt import GPT
from ddp.models.mlp import MLP
from ddp.models.resnet import resnet
from ddp.optim import schedules
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.naive import NaiveDataParallel
from ddp.replica.replica import Replica
from ddp.tasks.classification import Classification
from ddp.tasks.language_model import LanguageModel

SMALL_IMAGE = 64  # pixels; below it a ResNet starts without striding


def load_data(config: Config, *, download: bool = False) -> Splits:
    """Returns training and held-out samples, after downloading what is missing if `download`."""
    match config.data:
        case settings.Data(name="mnist", root=root):
            return image_sets.load_mnist(root, download=download)
        case settings.Data(name="cifar10", root=root):
            return image_sets.load_cifar10(root, download=download)
        case settings.ImageFolder(path=path, image_size=image_size):
            return image_sets.load_folder(cast(str, path), image_size=image_size)
        case settings.StandardLibrary(context=context):
            return standard_library.load(context=context)
        case settings.Synthetic(num_samples=num, image_size=image_size, num_classes=num_classes):
            return synthetic.load(
                image_size=image_size, num_classes=num_classes, num_train=num, num_test=max(1, num // 8)
            )
        case _:
            return digits.load()


def make_task(config: Config) -> Classification | LanguageModel:
    """Returns the task that the model learns."""
    return LanguageModel() if isinstance(config.data, settings.StandardLibrary) else Classification()


def make_model(config: Config, splits: Splits) -> nn.Module:
    """Returns the bare model, initialised from the global generator."""
    shape = splits.sample_shape
    match config.model:
        case settings.Mlp(hidden=hidden):
            return MLP(in_features=math.prod(shape), hidden=(hidden, hidden), num_classes=splits.num_classes)
        case settings.Cnn(width=width, dropout=dropout):
            return CNN(
                in_channels=shape[0], image_size=shape[1], num_classes=splits.num_classes, width=width, dropout=dropout
            )
        case settings.Gpt(width=width, depth=depth, heads=heads, dropout=dropout):
            return GPT(
                vocab_size=splits.num_classes, context=shape[0], width=width, depth=depth, heads=heads, dropout=dropout
            )
        case _:
            small = shape[1] < SMALL_IMAGE
            return resnet(config.model.name, num_classes=splits.num_classes, small_images=small, in_channels=shape[0])


def make_replica(config: Config, module: nn.Module, comm: Communicator) -> Replica:
    """Returns the module as a replica. `evaluate` and checkpoints synchronise its buffers, and no forward does."""
    if config.replica.kind == "naive":
        replica: Replica = NaiveDataParallel(module, comm=comm, broadcast_buffers=False)
    else:
        replica = BucketedDataParallel(
            module,
            comm=comm,
            broadcast_buffers=False,
            bucket_cap_mb=config.replica.bucket_cap_mb,
            first_bucket_mb=config.replica.first_bucket_mb,
        )
    replica.verify_replicas(every=config.replica.verify_every)
    return replica


def learning_rate(config: Config) -> float:
    """Returns the configured learning rate, scaled for the global batch."""
    optim = config.optim
    return schedules.scaled_rate(
        optim.lr,
        global_batch=config.batch.global_size,
        base_batch=optim.base_batch,
        rule=optim.lr_scaling,
    )


def make_optimizer(config: Config, module: nn.Module) -> Optimizer:
    """Returns an optimizer over all parameters, without weight decay for vectors (biases, norms)."""
    matrices = [p for p in module.parameters() if p.requires_grad and p.dim() > 1]
    vectors = [p for p in module.parameters() if p.requires_grad and p.dim() <= 1]
    decay = config.optim.weight_decay
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    rate = learning_rate(config)
    match config.optim:
        case settings.Sgd(momentum=momentum, nesterov=nesterov):
            return SGD(groups, lr=rate, momentum=momentum, nesterov=nesterov and momentum > 0)
        case settings.Adam(name=name, beta1=beta1, beta2=beta2, eps=eps):
            kind = AdamW if name == "adamw" else Adam
            return kind(groups, lr=rate, betas=(beta1, beta2), eps=eps)
    raise AssertionError(config.optim)


def make_schedule(config: Config) -> schedules.RateSchedule:
    """Returns the learning-rate schedule."""
    schedule = config.schedule
    match schedule:
        case settings.Cosine(final_factor=final_factor):
            factor = schedules.cosine(final_factor=final_factor)
        case settings.Step(milestones=milestones, gamma=gamma):
            factor = schedules.step(milestones=milestones, gamma=gamma)
        case _:
            factor = schedules.constant()
    return schedules.with_warmup(factor, num_warmup_steps=schedule.warmup_steps, fraction=schedule.warmup_fraction)
