"""`ddp.load`: the weights of a trained run, and its model, rebuilt if the run's settings say how.

    trained = ddp.load("runs/mine")             the best checkpoint; the last one if nothing was evaluated
    trained = ddp.load("runs/mine", "latest")
    trained = ddp.load(region="mine")           what a run with strategy.region=mine has at this moment
    trained.weights                             a plain state dict, on the CPU; of a run with `ddp.EMA`, the averages
    model = trained.model()                     in evaluation mode; for runs from the command line

A run from Python has only the weights, because only its program knows how to build the model:
`model.load_state_dict(ddp.load("runs/mine").weights)`.

With a region, an evaluator in another job of the host follows a run without checkpoints. Each call reads again:

    while True:
        now = ddp.load(region="mine")           CheckpointError, once the run has ended
        print(now.step, accuracy_of(now.model()))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddp.data.samples import Splits
from ddp.errors import CheckpointError, ConfigError
from ddp.process.files import at_home
from ddp.process.records import Count, Maker, damage_as_error
from ddp.run.assembly import components
from ddp.run.settings.address import check_trust, own_parts
from ddp.run.settings.config import Config
from ddp.run.settings.reader import read_config, settings_of
from ddp.strategies.region import look
from ddp.train.checkpoints import checkpoint_store as store
from ddp.train.checkpoints.checkpoint import bare, weights_of
from ddp.train.checkpoints.checkpoint_store import ANOTHER
from ddp.train.reports.results import SIDECAR


@dataclass(frozen=True)
class Trained:
    """A checkpoint of a run, or a snapshot of a running one.

    Attributes:
        path: the checkpoint's folder; of a region, that of the run, or None if the run keeps none.
        step: optimizer steps until then.
        score: the main metric on the held-out samples; None if they were not evaluated then.
        weights: the model's state dict, as the run's evaluations have used it.
        region: the name of the region.
    """

    path: Path | None
    step: int
    score: float | None
    weights: dict[str, Tensor] = field(repr=False)
    _identity: Mapping[str, Any] = field(repr=False)
    region: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return str(self.path) if self.region is None else f"region={self.region} at step {self.step:,}"

    @property
    def facts(self) -> dict[str, Any]:
        """Returns the shape of one input, and the number of classes, that the model was built for; None: unknown."""
        with damage_as_error(self, ANOTHER, CheckpointError):
            shape = Maker().made(list[Count] | None, self._identity.get("sample_shape"))
            num_classes = Maker().made(Count | None, self._identity.get("num_classes"))
        return {"sample_shape": shape and tuple(shape), "num_classes": num_classes}

    def model(self, *, trust: bool = False) -> nn.Module:
        """Returns the trained model in evaluation mode, on the CPU. The user's own class is imported for that.

        Args:
            trust: import it even if others may write the run's settings, which name it.

        Raises:
            CheckpointError: the run does not know how its model is built, or the weights are of another model.
            ConfigError: others may write the settings.
        """
        path = None if self.path is None else settings_of(self.path)
        if path is None:
            raise CheckpointError(
                f"{self} is of a run from Python, which does not know how its model is built: build it, and load "
                "the weights with model.load_state_dict(ddp.load(…).weights)"
            )
        config = read_config(path)
        check_trust(own_parts({"model": asdict(config.model)}), code=config.run.code, settings=path, trust=trust)
        return self.built(config)

    def built(self, config: Config) -> nn.Module:
        """Returns the trained model, as `model` does, from settings that have been read already."""
        splits = Splits(train=(), test=(), **self.facts)
        with torch.random.fork_rng(devices=[]):  # first on the meta device: its settings may ask for terabytes
            store.check_fits(self.weights, components.make_model_without_memory(config, splits), source=str(self))
            model = components.make_model(config, splits)
        model.load_state_dict(self.weights)
        return model.eval()


def load(
    path: str | Path | None = None,
    which: Literal["best", "latest"] = "best",
    *,
    region: str | None = None,
    averaged: bool = True,
) -> Trained:
    """Returns a verified checkpoint of a run. It is no collective: each process that needs the checkpoint calls it.

    Args:
        path: the folder of a run, or of one of its checkpoints.
        which: "best" by its main metric, or the last one if nothing was evaluated; or "latest".
        region: instead of `path`, the `strategy.region` of a run on this host. Returns its parameters and buffers as
            the optimizer has left them, at the end of the current step or of one in the last ten seconds.
        averaged: takes the averages of a run with `ddp.EMA`; False: its weights as the optimizer has left them.

    Raises:
        CheckpointError: there is none, or it is damaged; or no run of this user keeps the region.
        ConfigError: `which` is neither, or both or none of `path` and `region` are given.
    """
    if which not in ("best", "latest"):
        raise ConfigError(f'which={which!r}: take "best" or "latest"')
    if (path is None) == (region is None):
        raise ConfigError('ddp.load takes the folder of a run, or the region="NAME" of a running one: give either')
    if path is None:
        seen = look(region or "")
        run_dir = seen.about.get("run_dir")
        return Trained(run_dir and Path(run_dir), seen.step, None, seen.weights, seen.about, region)
    folder = store.checkpoints_of(at_home(Path(path)))
    best = store.best_of(folder) or store.best_of(folder.parent / SIDECAR) if which == "best" else None
    return trained_of(store.load(best or folder, names=store.Manifest.weights), averaged=averaged)


def trained_of(found: store.StoredCheckpoint, *, averaged: bool = True) -> Trained:
    """Returns a checkpoint that was read; as `load`."""
    with damage_as_error(found.path, ANOTHER, CheckpointError):
        weights = bare(weights_of(found, averaged=averaged))
        return Trained(found.path, found.step, found.score, weights, found.meta["identity"])


# --- Weights to start from -------------------------------------------------------------------------------------------
#
# A run that starts from given weights begins at step 0 with a fresh optimizer, unlike a resumed run. A file's keys may
# be renamed by their prefixes, and parts of the model may keep their fresh values. So a model can take over a trained
# body and learn a new head.


def load_initial_weights(
    path: Path, module: nn.Module, *, strict: bool, rename: Mapping[str, str], skip: list[str]
) -> None:
    """Gives a fresh module weights from a file or a checkpoint.

    Args:
        path: a checkpoint of a run, a folder of them, or a file of `torch.save(module.state_dict())`.
        strict: every tensor of the module that is not skipped must be found, and every key of the file be used.
        rename: prefix of a key in the file → prefix in the module.
        skip: prefixes (in the module) that keep their fresh values, such as a new head.

    Raises:
        CheckpointError: nothing is there, or, if strict, a tensor does not fit.
    """
    weights: dict[str, Any] = {_renamed(key, rename): value for key, value in _read_weights(path).items()}
    weights = {key: value for key, value in weights.items() if not key.startswith(tuple(skip))}
    own = {key: value for key, value in module.state_dict().items() if not key.startswith(tuple(skip))}
    if strict:
        kept = {key: value for key, value in module.state_dict().items() if key not in own}
        store.check_fits({**weights, **kept}, module, source=path)
    fitting = {
        key: value
        for key, value in weights.items()
        if key in own and (store.is_extra(key) or store.shape_or_type(value) == store.shape_or_type(own[key]))
    }
    if not any(isinstance(value, Tensor) for value in fitting.values()):
        raise CheckpointError(f"{path} has no tensor that fits the model; see init_from.rename and init_from.skip")
    module.load_state_dict(fitting, strict=False)


def _read_weights(path: Path) -> dict[str, Any]:
    """Returns plain keys and their values from a checkpoint, or from a file of a state dict."""
    if path.is_dir():
        return trained_of(store.load(path, names=["model"]), averaged=False).weights
    if not path.is_file():  # nor a pipe, which would block forever
        raise CheckpointError(f"{path} is no file; init_from.path takes a checkpoint folder or a file of weights")
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as weights ({store.cause_of(error)}); init_from.path takes a file of "
            "torch.save(model.state_dict(), PATH), or a checkpoint folder"
        ) from error
    if not isinstance(weights, Mapping) or any(
        not isinstance(value, Tensor) and not store.is_extra(name) for name, value in weights.items()
    ):
        raise CheckpointError(f"{path} holds no state dict; save it with torch.save(model.state_dict(), PATH)")
    return {bare(str(key)).removeprefix("module."): value for key, value in weights.items()}


def _renamed(key: str, rename: Mapping[str, str]) -> str:
    for old, new in rename.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key
