"""Starting from given weights: at step 0, with a fresh optimizer, unlike a run that is resumed.

A file's keys may be renamed by their prefixes, and parts of the model may keep their fresh values. So a model can take
over a trained body and learn a new head.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp.errors import CheckpointError
from ddp.train.stored_checkpoint import cause_of, load


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
        CheckpointError: nothing there, or, if strict, the first tensor that does not fit.
    """
    weights: dict[str, Any] = {_renamed(key, rename): value for key, value in _read_weights(path).items()}
    weights = {key: value for key, value in weights.items() if not key.startswith(tuple(skip))}
    own = {key: value for key, value in module.state_dict().items() if not key.startswith(tuple(skip))}
    if strict:
        kept = {key: value for key, value in module.state_dict().items() if key not in own}
        check_fits({**weights, **kept}, module, source=path)
    fitting = {
        key: value
        for key, value in weights.items()
        if key in own and (is_extra(key) or _shape(value) == _shape(own[key]))
    }
    if not any(isinstance(value, Tensor) for value in fitting.values()):
        raise CheckpointError(f"{path} has no tensor that fits the model; see init_from.rename and init_from.skip")
    module.load_state_dict(fitting, strict=False)


def check_fits(weights: Mapping[str, Any], module: nn.Module, *, source: Path | str) -> None:
    """Raises CheckpointError, naming the first difference, unless `weights` has the module's keys and shapes.

    What a layer's `get_extra_state` has returned may be anything, and only the layer can judge it.
    """
    own = module.state_dict()
    for name, value in own.items():
        if name not in weights:
            raise CheckpointError(f"{source} is of another model: it has no {name} {_shape(value)}")
        if not is_extra(name) and _shape(weights[name]) != _shape(value):
            shapes = f"{name} is {_shape(weights[name])} there and {_shape(value)} here"
            raise CheckpointError(f"{source} is of another model: {shapes}")
    for name in weights:
        if name not in own:
            raise CheckpointError(f"{source} is of another model: it has {name}, which this model does not have")


def is_extra(name: str) -> bool:
    """Returns True for a name that torch gives to what a layer's `get_extra_state` returns."""
    return name.endswith("_extra_state")


def _shape(value: Any) -> list[int] | str:
    """Returns a tensor's shape, or what another value is."""
    return list(value.shape) if isinstance(value, Tensor) else f"({type(value).__name__})"


def _read_weights(path: Path) -> dict[str, Any]:
    """Returns plain keys and their values from a checkpoint, or from a file of a state dict."""
    if path.is_dir():
        return dict(load(path, names=["model"]).parts["model"])
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; init_from.path takes a checkpoint folder or a file of weights")
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as weights ({cause_of(error)}); init_from.path takes a file of "
            "torch.save(model.state_dict(), PATH), or a checkpoint folder"
        ) from error
    if not isinstance(weights, Mapping) or any(
        not isinstance(value, Tensor) and not is_extra(name) for name, value in weights.items()
    ):
        raise CheckpointError(f"{path} holds no state dict; save it with torch.save(model.state_dict(), PATH)")
    return {str(key).removeprefix("module."): value for key, value in weights.items()}


def _renamed(key: str, rename: Mapping[str, str]) -> str:
    for old, new in rename.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key
