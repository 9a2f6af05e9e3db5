"""Data-parallel training, written by hand on PyTorch's point-to-point operations.

    import ddp

    comm = ddp.init()                                  # joins the other ranks (torchrun's environment)
    model = ddp.DistributedDataParallel(net)           # replicas stay bitwise equal
    sampler = ddp.DistributedSampler(dataset)          # each rank its share
    ddp.fit(net, task, dataset, optimizer, global_batch=64, epochs=3)
    ddp.launch(function, workers=2)                    # the same from a script or a notebook

Read the floors from the bottom up: collectives, transport, comm, gradients, replica, train. Names here are imported
when they are first used (PEP 562), so that `import ddp` stays light and `ddp.collectives` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp.comm.communicator import Communicator as Communicator
    from ddp.comm.setup import init as init
    from ddp.comm.setup import shutdown as shutdown
    from ddp.data.distributed_sampler import DistributedSampler as DistributedSampler
    from ddp.data.sampler import EvaluationSampler as EvaluationSampler
    from ddp.data.sampler import TrainSampler as TrainSampler
    from ddp.drop_in.data_parallel import DistributedDataParallel as DistributedDataParallel
    from ddp.errors import PeerLost as PeerLost
    from ddp.launcher import launch as launch
    from ddp.replica.bucketed import BucketedDataParallel as BucketedDataParallel
    from ddp.replica.naive import NaiveDataParallel as NaiveDataParallel
    from ddp.replica.sync_batchnorm import SyncBatchNorm as SyncBatchNorm
    from ddp.train.evaluate import evaluate as evaluate
    from ddp.train.evaluate import predict as predict
    from ddp.train.fit import continue_fit as continue_fit
    from ddp.train.fit import fit as fit

_HOMES = {
    "BucketedDataParallel": "ddp.replica.bucketed",
    "Communicator": "ddp.comm.communicator",
    "DistributedDataParallel": "ddp.drop_in.data_parallel",
    "DistributedSampler": "ddp.data.distributed_sampler",
    "EvaluationSampler": "ddp.data.sampler",
    "NaiveDataParallel": "ddp.replica.naive",
    "PeerLost": "ddp.errors",
    "SyncBatchNorm": "ddp.replica.sync_batchnorm",
    "TrainSampler": "ddp.data.sampler",
    "continue_fit": "ddp.train.fit",
    "evaluate": "ddp.train.evaluate",
    "fit": "ddp.train.fit",
    "init": "ddp.comm.setup",
    "launch": "ddp.launcher",
    "predict": "ddp.train.evaluate",
    "shutdown": "ddp.comm.setup",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddp' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
