"""`ddp.load`: the weights of a trained run, and its model, built again where the run knows how.

    trained = ddp.load("runs/mine")             the best checkpoint; the last one if nothing was evaluated
    trained = ddp.load("runs/mine", "latest")
    trained.weights                             a plain state dict, on the CPU; of a run with `ddp.EMA`, the averages
    model = trained.model()                     in evaluation mode; for runs from the command line

A run from Python has the weights alone, because only its program knows how to build the model:
`model.load_state_dict(ddp.load("runs/mine").weights)`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor, nn

from ddp.data.samples import Splits
from ddp.errors import CheckpointError, ConfigError
from ddp.run.build import components
from ddp.run.settings.address import own_parts
from ddp.run.settings.config import Config
from ddp.run.settings.reader import from_plain, settings_of
from ddp.run.settings.trust import check_trust
from ddp.train.ema import averages_in
from ddp.train.stored_checkpoint import StoredCheckpoint, best_of, checkpoints_of
from ddp.train.stored_checkpoint import load as load_checkpoint


@dataclass(frozen=True)
class Trained:
    """A checkpoint of a run.

    Attributes:
        path: the checkpoint's folder.
        step: optimizer steps until then.
        score: the main metric on the held-out samples; None if they were not evaluated then.
        weights: the model's state dict: what the evaluations of the run have used.
    """

    path: Path
    step: int
    score: float | None
    weights: dict[str, Tensor] = field(repr=False)
    _identity: dict[str, Any] = field(repr=False)

    @property
    def facts(self) -> dict[str, Any]:
        """Returns what the model was built for: shape of one input, and number of classes; None where unknown."""
        shape = self._identity.get("sample_shape")
        return {"sample_shape": shape and tuple(shape), "num_classes": self._identity.get("num_classes")}

    def model(self, *, trust: bool = False) -> nn.Module:
        """Returns the trained model in evaluation mode, on the CPU. A class of the user's own is imported for that.

        Args:
            trust: import it, also if others may write the run's settings, which name it.

        Raises:
            CheckpointError: the run does not know how its model is built.
            ConfigError: others may write the settings.
        """
        path = settings_of(self.path)
        if path is None:
            raise CheckpointError(
                f"{self.path} is of a run from Python, which does not know how its model is built: build it, and load "
                "the weights with model.load_state_dict(ddp.load(…).weights)"
            )
        config = from_plain(yaml.safe_load(path.read_text(encoding="utf-8")))
        check_trust(own_parts({"model": asdict(config.model)}), code=config.run.code, settings=path, trust=trust)
        return self.built(config)

    def built(self, config: Config) -> nn.Module:
        """Returns the trained model, as `model` does, from settings that have been read already."""
        splits = Splits(train=(), test=(), **self.facts)
        with torch.random.fork_rng(devices=[]):
            model = components.make_model(config, splits)
        model.load_state_dict(self.weights)
        return model.eval()


def load(path: str | Path, which: Literal["best", "latest"] = "best", *, averaged: bool = True) -> Trained:
    """Returns a checkpoint of a run, verified. Every process that needs it calls this; it is no collective.

    Args:
        path: the folder of a run, or of one of its checkpoints.
        which: "best" by its main metric, or the last one if nothing was evaluated; or "latest".
        averaged: takes the averages of a run with `ddp.EMA`; False: its weights as the optimizer has left them.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: `which` is neither.
    """
    if which not in ("best", "latest"):
        raise ConfigError(f'which={which!r}: take "best" or "latest"')
    folder = checkpoints_of(Path(path))
    best = best_of(folder) if which == "best" else None
    found: StoredCheckpoint = load_checkpoint(best or folder, names=["model"])
    weights = dict(found.parts["model"])
    if averaged and (name := found.meta.get("averages")) is not None:
        weights |= averages_in(load_checkpoint(found.path, names=["callbacks"]).parts["callbacks"][name])
    return Trained(found.path, found.step, found.score, weights, found.meta["identity"])
