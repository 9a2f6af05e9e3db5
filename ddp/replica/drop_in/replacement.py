"""Puts our class in the place of torch's, for libraries that wrap models by torch's class themselves.

    ddp.drop_in.take_over()
    model = ray.train.torch.prepare_model(model)        # a ddp.DistributedDataParallel
"""

from __future__ import annotations

import sys
from types import ModuleType

from torch.nn.parallel import distributed

from ddp.replica.drop_in.data_parallel import TORCH_CLASS, DistributedDataParallel

_KEEP = {"torch", "ddp"}  # torch's `replicate` needs its own class, and so do we


def take_over() -> None:
    """Replaces torch's DistributedDataParallel by ours where torch has it, and in each module that has imported it.

    So it works before or after a library is imported; a second call does nothing. Models that are wrapped already, and
    classes that are derived from torch's already, stay as they are. Call it on every rank.
    """
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        is_documented = module in (distributed, sys.modules["torch.nn.parallel"])
        if is_documented or module.__name__.partition(".")[0] not in _KEEP:
            namespace = vars(module)
            for name in [name for name, value in list(namespace.items()) if value is TORCH_CLASS]:
                namespace[name] = DistributedDataParallel
