"""Says where a setting has gone: keys of the command line, and arguments of `ddp.fit`, that older versions had.

Files of a run that were written before hold the old keys; `translated` brings them up to date, wherever one is read:
`config.yaml`, `starts.jsonl`, and the identity in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ddp.policies import Averaging, Evaluation, Folder, Reading

KEYS = {
    "optim.sharded": "strategy",
    "loader.evaluation_batch": "evaluate.batch",
    "data.max_unreadable": "loader.max_unreadable",
    "data.debug": "loader.debug",
    "log_every": "report.log_every",
    "noise_scale_every": "report.noise_scale_every",
    "evaluate_every_epochs": "evaluation.every_epochs",  # these three: in the identity of a run from Python
    "evaluate_every_steps": "evaluation.every_steps",
    "schedule_every": "scheduler.every",
}
"""Old key → new key."""

VALUES: dict[str, dict[Any, Any]] = {
    "strategy": {True: "sharded", False: "replicated"},
    "replica.wire": {"none": None},
}
"""New key → old value → new value."""

_ARGUMENTS = {
    "evaluate_every_epochs": "evaluation=ddp.Evaluation(every_epochs=…)",
    "evaluate_every_steps": "evaluation=ddp.Evaluation(every_steps=…)",
    "evaluation_batch": "evaluation=ddp.Evaluation(batch=…)",
    "loader_workers": "reading=ddp.Reading(num_workers=…)",
    "debug_data": "reading=ddp.Reading(debug=True)",
    "sharded": 'strategy="sharded"',
    "checkpoint_dir": 'folder="runs/mine", or None for no files',
    "checkpoint_every_steps": "folder=ddp.Folder(every_steps=…)",
    "reduction": 'loss=ddp.LossFunction(loss, reduction="sum")',
    "schedule_every": 'schedule=ddp.optim.TorchSchedule(scheduler, every="epoch")',
    "comm": "ddp.BucketedDataParallel(model, comm=…) as the model",
}
_BATCHES = ("order", "sharding", "num_shards", "micro_size", "skip_steps", "uneven", "seed", "collate")


def moved_argument(name: str) -> str:
    """Returns what is written in the place of an argument that `ddp.fit` had once; "" if it had none of this name."""
    if name in _ARGUMENTS:
        return _ARGUMENTS[name]
    if name in _BATCHES:
        return f"batches=ddp.Batches({name}=…)"
    homes = {"evaluation": Evaluation, "reading": Reading, "strategy": Averaging, "folder": Folder}
    for argument, policy in homes.items():
        if name in {item.name for item in fields(policy)}:
            return f"{argument}=ddp.{policy.__name__}({name}=…)"
    return ""


def translated(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tree of settings, or an identity, with the keys and values of today."""
    tree = {key: dict(value) if isinstance(value, Mapping) else value for key, value in plain.items()}
    for old, new in KEYS.items():
        holder, last = _holder(tree, old)
        if holder is not None and last in holder:
            value = holder.pop(last)
            above, _, name = new.rpartition(".")
            inside = tree.setdefault(above, {}) if above else tree
            if isinstance(inside, dict):
                inside.setdefault(name, value)
    for key, values in VALUES.items():
        holder, last = _holder(tree, key)
        if holder is not None and isinstance(value := holder.get(last), (str, bool)) and value in values:
            holder[last] = values[value]
    return tree


def _holder(tree: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    """Returns the mapping that a dotted key is in, and the last part of the key."""
    above, _, last = key.rpartition(".")
    holder = tree.get(above) if above else tree
    return (holder if isinstance(holder, dict) else None), last
