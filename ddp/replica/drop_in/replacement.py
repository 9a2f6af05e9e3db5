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
_NAMESPACE = vars(ModuleType)["__dict__"].__get__  # by any other way a lazy module would be loaded


def take_over() -> None:
    """Replaces torch's DistributedDataParallel by ours where torch has it, and in each module that has imported it.

    So it works before or after a library is imported; a second call does nothing. Models that are wrapped already, and
    classes that are derived from torch's already, stay as they are. Call it on every rank.
    """
    documented = (distributed.__name__, "torch.nn.parallel")
    for module in list(sys.modules.values()):
        namespace = _NAMESPACE(module) if issubclass(type(module), ModuleType) else {}
        module_name = str(namespace.get("__name__"))
        if module_name in documented or module_name.partition(".")[0] not in _KEEP:
            for name in [name for name, value in list(namespace.items()) if value is TORCH_CLASS]:
                namespace[name] = DistributedDataParallel
