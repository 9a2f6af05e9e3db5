"""Notes the start of a run that was made from Python: what `ddp.fit` knows of who gets which sample.

An order or a sharding that is an object of the program cannot be written. Then the noted identity of the order is
another one than `where` finds, which says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ddp.data.loading.cache import cache_of
from ddp.data.loading.source import Source
from ddp.data.orders.order import Fixed, Permutation
from ddp.data.sets.validation import selection_in
from ddp.train.arguments import Given
from ddp.train.callbacks import Callback
from ddp.train.starts import note_start
from ddp.train.state import TrainState

_WORDS: dict[type, str] = {Fixed: "fixed", Permutation: "permutation"}


class StartNote(Callback):
    """Notes the start of a run that was made from Python, on rank 0.

    Args:
        goes_on: the run is one that was resumed.
    """

    def __init__(self, run_dir: Path, source: Source, given: Given, *, goes_on: bool) -> None:
        self._run_dir, self._source, self._given, self._goes_on = run_dir, source, given, goes_on
        batches, share = given.batches, given.validation_data
        self._data = {
            "name": "digits",  # any, because `dealt` stands for the samples
            "order": _WORDS.get(type(batches.order), "auto"),
            "sharding": batches.sharding if isinstance(batches.sharding, str) else "auto",
            "skip_steps": list(batches.skip_steps or ()),
            "validation": share if isinstance(share, float) else None,
        }

    def fit_start(self, state: TrainState) -> None:
        if state.comm.rank:
            return
        samples, sampler, given = _whole(self._source.samples), state.sampler, self._given
        sizes = getattr(samples, "file_sizes", None)
        settings = {
            "seed": given.batches.seed,
            "epochs": given.epochs,
            "max_steps": given.max_steps,
            "cluster": {"workers": state.comm.world_size},
            "batch": _batch(sampler.sizes.setting)
            | {"num_shards": sampler.num_shards, "micro_size": sampler.micro_size},
            "loader": {"num_workers": self._source.num_workers},
            "data": self._data,
        }
        start = {
            "folder": str(Path.cwd()),
            "position": {"step": state.step, "sampler": sampler.state_dict()} if self._goes_on else None,
            "settings": settings,
            "dealt": {"num_samples": len(samples)}
            | ({} if sizes is None else {"file_sizes": np.asarray(sizes).tolist()}),
            "order": sampler.order.identity,
        }
        note_start(self._run_dir, start, goes_on=self._goes_on)


def _whole(samples: Any) -> Any:
    """Returns the data set of which a share may have been set apart, and which may be cached."""
    kept = cache_of(samples)
    samples = samples if kept is None else kept.samples
    part = selection_in(samples)
    return samples if part is None else part.samples


def _batch(setting: Any) -> dict[str, Any]:
    """Returns the global batch, or how it grows, as `Steps.setting` has it, in the words of the settings."""
    if isinstance(setting, int):
        return {"global_size": setting}
    if isinstance(setting, list) and len(setting) == 3:
        return {"warmup_size": setting[0], "global_size": setting[1], "warmup_samples": setting[2]}
    return {}  # a budget of tokens, which has an order of its own
