"""Data-parallel training, written by hand on PyTorch's point-to-point operations.

    import ddp

    comm = ddp.init()                                  # joins the other ranks (torchrun's environment)
    model = ddp.DistributedDataParallel(net)           # replicas stay bitwise equal
    sampler = ddp.DistributedSampler(dataset)          # gives each rank its share
    ddp.fit(net, dataset, optimizer, loss=F.cross_entropy, global_batch=64, epochs=3)
    ddp.launch(function, workers=2)                    # runs a function on two ranks, from a script or a notebook

Names here are imported when they are first used (PEP 562), so that `import ddp` stays light and `ddp.collectives` needs
no torch. docs/reading.md is the walk through the files, from the bottom up.

The words of this package, one meaning each:

    rank                one process of a job, and its number; world size: the number of ranks
    host                a machine; the ranks of a host can share memory
    message             what one rank sends and one other receives
    peer                the rank at the other end of a message
    rendezvous          how ranks find each other at start-up
    generation          a version of the membership: which ranks there are
    transport           moves messages between two ranks
    collective          an operation that all ranks call together: all-reduce, broadcast, barrier, …
    call                one call of a collective, with its number
    status              what a rank's watchdog publishes about it: its call, its host, its stack
    schedule            the rounds of a collective, rank by rank, as data
    round               the transfers of a rank that are in flight together; and of local SGD: the inner steps, each
                        of one rank's own, between two agreements
    chunk               one rank's share of a buffer
    segment             a piece of a chunk, so that transfer and addition overlap
    lane                one segment of all chunks on its way through the rounds of a schedule; and in `data/`: the
                        samples that one shard of every step is taken from
    canonical           added up along the one binary tree over the ranks that splits at the largest power of two
    algorithm           ring, tree, butterfly, …: what makes a schedule
    route               how an all-reduce can run here: an algorithm over the transport, shared memory, or both
    cost                what a collective takes by its formula, or by the simulator
    trial               timing the routes of an all-reduce, those first that are cheapest by their formulas
    replica             one rank's copy of the model
    strategy            says who holds parameters and optimizer state, and how often the ranks agree
    bucket              gradients that are reduced together, and their memory
    slot                a parameter and its gradient's place in a bucket
    row                 one of several memories of a bucket, where a rank has several partial sums of shards
    ready               said of a gradient: autograd has computed it
    full                said of a bucket: all the gradients that it waits for are ready
    launch              start a reduction; it is in flight until it completes, and `wait` returns then
    totals              loss, count and stop votes of a step, summed over the ranks
    step flags          what a rank found in its own gradients: unused parameters, undefined gradients
    observer            a function that autograd calls at a certain moment, such as when a gradient is ready
    hook                what averages a bucket in place of the all-reduce: one of `ddp.gradients`
    communication hook  a hook in torch's form, a user's function
    wire format         how numbers travel between hosts: in fewer bytes than they have
    parcel              a parameter's gradient on its way through a hook
    residual            what a hook has not sent yet
    error feedback      add the residual to the next gradient
    loss scale          the factor on the loss that keeps small gradients in float16's range
    master weights      float32 copies of narrow parameters, which the optimizer updates
    global batch        the samples of one optimizer step over all ranks
    shard               one of a fixed number of parts of a global batch, which random streams depend on
    node                a run of shards whose sum is a part of the tree over all of them
    order               which sample an epoch has at which position
    micro-batch         the samples of one forward and backward on one rank
    stage               a run of layers on one rank of a pipeline, or several; bubble: the time in which stages idle
    step                one optimizer step; epoch: one pass over the training samples
    learning-rate schedule    a factor on the learning rate, by samples
    noise scale         the batch up to which more samples a step pay, measured from the noise of gradients
    trust ratio         a factor on the learning rate of one tensor, by the norms of its weights and its update
"""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp.comm.communicator import Communicator as Communicator
    from ddp.comm.session import init as init
    from ddp.comm.session import shutdown as shutdown
    from ddp.data.orders.distributed_sampler import DistributedSampler as DistributedSampler
    from ddp.data.orders.distributed_sampler import EvaluationSampler as EvaluationSampler
    from ddp.data.orders.sampler import TrainSampler as TrainSampler
    from ddp.data.orders.steps import Batches as Batches
    from ddp.data.orders.steps import BatchWarmup as BatchWarmup
    from ddp.data.samples import Splits as Splits
    from ddp.errors import AuditFailed as AuditFailed
    from ddp.errors import CheckpointError as CheckpointError
    from ddp.errors import CollectiveMismatch as CollectiveMismatch
    from ddp.errors import CommunicatorBroken as CommunicatorBroken
    from ddp.errors import ConfigError as ConfigError
    from ddp.errors import Diverged as Diverged
    from ddp.errors import HookFailed as HookFailed
    from ddp.errors import LoaderLost as LoaderLost
    from ddp.errors import PeerLost as PeerLost
    from ddp.errors import ReplicaMismatch as ReplicaMismatch
    from ddp.errors import TooFewWorkers as TooFewWorkers
    from ddp.errors import UnreadableSample as UnreadableSample
    from ddp.errors import UnusedParameters as UnusedParameters
    from ddp.errors import WorkersFailed as WorkersFailed
    from ddp.gradients.totals import Totals as Totals
    from ddp.policies import Averaging as Averaging
    from ddp.policies import Evaluation as Evaluation
    from ddp.policies import Folder as Folder
    from ddp.policies import LocalSGD as LocalSGD
    from ddp.policies import ParameterServer as ParameterServer
    from ddp.policies import Reading as Reading
    from ddp.policies import SameBits as SameBits
    from ddp.replica.bucketed import BucketedDataParallel as BucketedDataParallel
    from ddp.replica.drop_in.data_parallel import DistributedDataParallel as DistributedDataParallel
    from ddp.replica.naive import NaiveDataParallel as NaiveDataParallel
    from ddp.replica.sync_batchnorm import SyncBatchNorm as SyncBatchNorm
    from ddp.run.assembly.load import load as load
    from ddp.run.launch.from_python import launch as launch
    from ddp.strategies.pipeline import Pipeline as Pipeline
    from ddp.train.evaluate import evaluate as evaluate
    from ddp.train.evaluate import predict as predict
    from ddp.train.fit import fit as fit
    from ddp.train.reports.profiler import Profiler as Profiler
    from ddp.train.steps.callbacks import EMA as EMA
    from ddp.train.steps.callbacks import Callback as Callback
    from ddp.train.steps.callbacks import EarlyStopping as EarlyStopping
    from ddp.train.steps.state import StepReport as StepReport
    from ddp.train.steps.state import TrainState as TrainState
    from ddp.train.steps.task import ByteModel as ByteModel
    from ddp.train.steps.task import Classification as Classification
    from ddp.train.steps.task import LanguageModel as LanguageModel
    from ddp.train.steps.task import LossFunction as LossFunction
    from ddp.train.steps.task import Regression as Regression
    from ddp.train.steps.task import Rows as Rows
    from ddp.train.steps.task import Task as Task
    from ddp.train.supervision import Guard as Guard
    from ddp.train.supervision import Watch as Watch

_NAMES = {  # module → what a user finds in ddp
    "ddp.comm.communicator": "Communicator",
    "ddp.comm.session": "init shutdown",
    "ddp.data.orders.distributed_sampler": "DistributedSampler EvaluationSampler",
    "ddp.data.orders.sampler": "TrainSampler",
    "ddp.data.orders.steps": "BatchWarmup Batches",
    "ddp.data.samples": "Splits",
    "ddp.errors": "AuditFailed CheckpointError CollectiveMismatch CommunicatorBroken ConfigError Diverged HookFailed "
    "LoaderLost PeerLost ReplicaMismatch UnreadableSample TooFewWorkers UnusedParameters WorkersFailed",
    "ddp.gradients.totals": "Totals",
    "ddp.policies": "Averaging Evaluation Folder LocalSGD ParameterServer Reading SameBits",
    "ddp.replica.bucketed": "BucketedDataParallel",
    "ddp.replica.drop_in.data_parallel": "DistributedDataParallel",
    "ddp.replica.naive": "NaiveDataParallel",
    "ddp.replica.sync_batchnorm": "SyncBatchNorm",
    "ddp.run.assembly.load": "load",
    "ddp.run.launch.from_python": "launch",
    "ddp.strategies.pipeline": "Pipeline",
    "ddp.train.evaluate": "evaluate predict",
    "ddp.train.fit": "fit",
    "ddp.train.reports.profiler": "Profiler",
    "ddp.train.steps.callbacks": "Callback EMA EarlyStopping",
    "ddp.train.steps.state": "StepReport TrainState",
    "ddp.train.supervision": "Guard Watch",
    "ddp.train.steps.task": "ByteModel Classification LanguageModel LossFunction Regression Rows Task",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

_NAMESPACES = ("collectives", "data", "drop_in", "errors", "gradients", "optim", "strategies", "trackers")
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        return importlib.import_module(f"ddp.{name}")
    if name not in _MODULES:
        from ddp.errors import did_you_mean
        from ddp.setting import strategy_hint  # which takes longer than all of this module

        is_class = name[:1].isupper()
        hint = strategy_hint(name, 'strategy="{}", of ddp.fit') if is_class else ""
        hint = hint or did_you_mean(name, [each for each in __dir__() if each[:1].isupper() == is_class])
        raise AttributeError(f"module 'ddp' has no attribute {name!r}.{hint}".removesuffix("."))
    drawn = random.getstate()  # importing rich draws a number, which would be missing in the user's program
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    finally:
        random.setstate(drawn)


def __dir__() -> list[str]:
    return sorted([*_MODULES, *_NAMESPACES])
