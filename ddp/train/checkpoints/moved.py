"""Maps old names to new ones: keys and arguments of older versions, and words of other libraries.

Older files of a run hold the old keys; `translated` brings them up to date, wherever one is read:
`config.yaml`, `starts.jsonl`, and the identity in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import fields
from typing import Any, NamedTuple

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

_AUTO, _SHARDED = {"name": "auto"}, {"name": "sharded"}
VALUES: dict[str, dict[Any, Any]] = {
    "strategy": {True: _SHARDED, False: _AUTO, "sharded": _SHARDED, "replicated": _AUTO},
    "replica.wire": {"none": None},
}
"""New key → old value → new value."""

GONE = ("loader.cache",)
"""Keys of files that nothing reads any more; on a command line they are an error (`errors.py::CALLED_ELSEWHERE`)."""


def translated(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tree of settings, or an identity, with the keys and values of today.

    If an old key and today's are both there, the old one stays, to be refused: a file has one of the two, and a command
    line has defaults already.
    """
    tree = {key: dict(value) if isinstance(value, Mapping) else value for key, value in plain.items()}
    for old in GONE:
        holder, last = _holder(tree, old)
        if holder is not None:
            holder.pop(last, None)
    for old, new in KEYS.items():
        holder, last = _holder(tree, old)
        if holder is not None and last in holder:
            above, _, name = new.rpartition(".")
            inside = tree.setdefault(above, {}) if above else tree
            if isinstance(inside, dict) and name not in inside:
                inside[name] = holder.pop(last)
    for key, values in VALUES.items():
        holder, last = _holder(tree, key)
        if holder is not None and isinstance(value := holder.get(last), (str, bool)) and value in values:
            holder[last] = copy(values[value])
    return tree


def _holder(tree: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    """Returns the mapping that a dotted key is in, and the last part of the key."""
    above, _, last = key.rpartition(".")
    holder = tree.get(above) if above else tree
    return (holder if isinstance(holder, dict) else None), last


# --- Words of other libraries, and of older versions -----------------------------------------------------------------
#
# For `ddp.fit(…, batch_size=64)`, `scripts/ddp train batch_size=64` or `ddp.launch(train, nprocs=2)` the error names
# the word that belongs there. A misspelt word needs no row, because errors name the nearest word anyway.


class Meaning(NamedTuple):
    """The name of a foreign word in three places; "" where it has none.

    Attributes:
        setting: key on the command line.
        fit: argument of `ddp.fit`, or of one of its policies; or the remedy as text.
        launch: argument of `ddp.launch`.
    """

    setting: str = ""
    fit: str = ""
    launch: str = ""


_PROCESSES = "ddp.launch has the number of processes, as ddp.launch(train, workers=2), or torchrun"
_ELASTIC = "ddp.launch has the numbers between which workers come and go: docs/elastic.md"
_ACCUMULATED = "batches are accumulated where micro_size is less than a rank's share of global_batch"
_RATE = "the optimizer has it, as torch.optim.Adam(model.parameters(), lr=0.01)"
_SHUFFLED = "samples are shuffled in each epoch; without: batches=ddp.Batches(order=ddp.data.Fixed(len(data)))"
_DRAWN = "batches=ddp.Batches(order=ddp.data.Weighted(weights)) draws samples as often as their weights say"
_WEIGHED = "the loss has it, as loss=torch.nn.CrossEntropyLoss(weight=…); or an order, ddp.data.Weighted(weights)"
_CONVERTED = "give ddp.SyncBatchNorm.convert(model) as the model"
_APPLIED = "give data that apply it, such as ddp.data.Transformed(samples, transform)"
_RANKS = (
    'say ddp.BucketedDataParallel(model, comm=…) as the model; with strategy="sharded", '
    "reducer=ddp.strategies.Sharded.reducer, too"
)
_COMPARED = (
    "say callbacks=[…] with a ddp.Callback that returns them in state_dict, and compares them in load_state_dict, "
    "which a resumed run calls"
)
_ROWS = {
    ("batch_size", "train_batch_size", "per_device_train_batch_size"): Meaning("batch.global_size", "global_batch"),
    ("validation_batch_size", "eval_batch_size", "evaluation_batch"): Meaning("evaluate.batch", "batch"),
    ("accumulate_grad_batches", "gradient_accumulation_steps"): Meaning("batch.micro_size", fit=_ACCUMULATED),
    ("num_epochs", "max_epochs", "n_epochs", "num_train_epochs"): Meaning("epochs", "epochs"),
    ("steps_per_epoch", "steps"): Meaning("max_steps", "max_steps"),
    ("loss_fn", "loss_function", "criterion", "task"): Meaning("loss", "loss"),
    ("learning_rate", "lr"): Meaning("optim.lr", fit=_RATE),
    ("grad_clip", "max_grad_norm", "max_norm", "gradient_clip_val"): Meaning("clip_norm", "clip_norm"),
    ("amp", "use_amp", "fp16", "bf16", "mixed_precision"): Meaning("precision", "precision"),
    ("random_state", "random_seed"): Meaning("seed", "seed"),
    ("dataset", "train_data", "train_dataset", "train_dataloader", "train_loader"): Meaning("data", "data"),
    ("validation_split", "val_split", "val_data"): Meaning("data.validation", "validation_data"),
    ("valid_data", "eval_data", "validation", "eval_dataset"): Meaning("data.validation", "validation_data"),
    ("validation_freq", "check_val_every_n_epoch", "evaluate_every_epochs"): Meaning(
        "evaluate.every_epochs", "every_epochs"
    ),
    ("val_check_interval", "eval_steps", "evaluate_every_steps"): Meaning("evaluate.every_steps", "every_steps"),
    ("collate_fn",): Meaning(fit="collate"),
    ("sampler",): Meaning("data.order", "order"),
    ("shuffle",): Meaning("data.order", fit=_SHUFFLED),
    ("sample_weight",): Meaning(fit=_DRAWN),
    ("class_weight",): Meaning(fit=_WEIGHED),
    ("drop_last",): Meaning(fit="give it to a DataLoader, and that as data"),
    ("metrics",): Meaning(fit="a ddp.Task has them, such as loss=ddp.Classification()"),
    ("sync_batchnorm", "sync_bn"): Meaning("replica.sync_batchnorm", fit=_CONVERTED),
    ("transform", "augment"): Meaning("data.transform", fit=_APPLIED),
    ("device",): Meaning("device", fit="the model's device is taken, or that of ddp.init(device=…)"),
    ("num_workers",): Meaning("loader.num_workers", launch="workers"),
    ("loader_workers",): Meaning("loader.num_workers", "num_workers"),
    ("debug_data",): Meaning("loader.debug", "debug"),
    ("workers", "nprocs", "num_processes", "nproc_per_node", "world_size", "np", "gpus", "devices"): Meaning(
        "cluster.workers", launch="workers", fit=_PROCESSES
    ),
    ("min_workers", "min_np", "min_nodes", "min_replicas", "min_replica_size"): Meaning(
        "cluster.min_workers", launch="min_workers", fit=_ELASTIC
    ),
    ("max_workers", "max_np", "max_nodes", "max_replicas"): Meaning(
        "cluster.max_workers", launch="max_workers", fit=_ELASTIC
    ),
    ("spares",): Meaning("cluster.spares", fit=_ELASTIC),
    ("max_restarts", "max_failures"): Meaning("cluster.restarts", launch="restarts"),
    ("logging_steps", "log_every_n_steps"): Meaning("report.log_every", "log_every"),
    ("verbose",): Meaning("report.progress", "progress"),
    ("default_root_dir", "output_dir", "save_dir", "checkpoint_dir"): Meaning("hydra.run.dir", "folder"),
    ("checkpoint_every_steps",): Meaning("checkpoint.every_steps", "say folder=ddp.Folder(every_steps=…)"),
    ("sharded",): Meaning(fit='say strategy="sharded"'),
    ("reduction",): Meaning(fit='say loss=ddp.LossFunction(loss, reduction="sum")'),
    ("schedule_every",): Meaning(fit='say schedule=ddp.optim.TorchSchedule(scheduler, every="epoch")'),
    ("comm",): Meaning(fit=_RANKS),
    ("stop",): Meaning(fit="say callbacks=[…] with a ddp.Callback that calls state.stop(reason), on any rank"),
    ("settings",): Meaning(fit=_COMPARED),
    ("restore_best_weights", "load_best_model_at_end"): Meaning(fit="say folder=ddp.Folder(restore_best=True)"),
    ("resume_from_checkpoint", "ckpt_path"): Meaning("resume", fit="say folder=ddp.Folder(path, resume=…)"),
}
MEANINGS = {word: meaning for words, meaning in _ROWS.items() for word in words}


def meaning(word: str) -> Meaning:
    """Returns the meaning of another library's word; an empty one of any other word."""
    return MEANINGS.get(word, Meaning())


_POLICIES = {"evaluation": Evaluation, "reading": Reading, "strategy": Averaging, "folder": Folder}
_BATCHES = ("order", "sharding", "num_shards", "micro_size", "skip_steps", "uneven", "seed", "collate")


def meant_for_fit(name: str) -> str:
    """Returns the argument that is meant by one that `ddp.fit` does not have, or a remedy; "" if neither is known."""
    word = meaning(name).fit or name
    if word in _BATCHES:
        return f"say batches=ddp.Batches({word}=…)"
    having = (key for key, policy in _POLICIES.items() if word in {item.name for item in fields(policy)})
    if (argument := next(having, None)) is not None:
        return f"say {argument}=ddp.{_POLICIES[argument].__name__}({word}=…)"
    return "" if word == name else word
