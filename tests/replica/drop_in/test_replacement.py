"""Our class in the place of torch's, also where torch's is held already: by a library, or by a program's own import.

Tests: ddp/drop_in.py.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import distributed

import ddp

THEIRS = distributed.DistributedDataParallel
OURS = ddp.DistributedDataParallel
REPLICATE = "torch.distributed._composable.replicate"


def gradient(wrapped: nn.Module, rank: int) -> torch.Tensor:
    wrapped.zero_grad()
    wrapped(torch.full((1, 2), rank + 1.0)).sum().backward()
    weight = next(wrapped.parameters()).grad
    assert weight is not None
    return weight.clone()


def late() -> None:
    rank = ddp.init().rank
    importlib.import_module(REPLICATE)
    library = ModuleType("library_that_was_imported_before")
    vars(library).update(DDP=THEIRS, number=3)
    sys.modules[library.__name__] = library
    early = library.DDP(nn.Linear(2, 1))

    nn.parallel.DistributedDataParallel = distributed.DistributedDataParallel = OURS  # by hand: the library keeps its
    mean = torch.tensor([[1.5, 1.5]])
    assert torch.equal(gradient(library.DDP(nn.Linear(2, 1)), rank), mean)
    nn.parallel.DistributedDataParallel = distributed.DistributedDataParallel = THEIRS

    for _ in range(2):
        ddp.drop_in.take_over()
        places = nn.parallel.DistributedDataParallel, distributed.DistributedDataParallel, library.DDP
        assert set(places) == {OURS} and library.number == 3
        assert vars(sys.modules[REPLICATE])["DistributedDataParallel"] is THEIRS  # which needs it
    wrapped = library.DDP(nn.Linear(2, 1))
    again = pickle.loads(pickle.dumps(wrapped))
    for model in (wrapped, again):
        assert type(model) is OURS and isinstance(model, nn.parallel.DistributedDataParallel)
        assert isinstance(model, THEIRS)
    for model in (wrapped, again, early):
        assert torch.equal(gradient(model, rank), mean)


def test_take_over_reaches_a_module_that_holds_torch_s_class_already() -> None:
    run_ranks(late, 2)


LAZY = """import importlib.util, sys, types, torch, ddp
class Proud(types.ModuleType):
    def __eq__(self, other): raise RuntimeError("compared")
sys.modules["proud"], sys.modules["nameless"] = Proud("proud"), types.ModuleType("nameless")
del sys.modules["nameless"].__name__
spec = importlib.util.find_spec("loaded_late")
spec.loader = importlib.util.LazyLoader(spec.loader)
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
ddp.drop_in.take_over()
assert torch.nn.parallel.DistributedDataParallel is ddp.DistributedDataParallel
print(type(module) is not types.ModuleType)
"""


@pytest.mark.slow
def test_take_over_loads_no_lazy_module_and_passes_strange_ones(tmp_path: Path) -> None:
    (tmp_path / "loaded_late.py").write_text("raise RuntimeError('loaded')")
    left = subprocess.run([sys.executable, "-c", LAZY], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert left.stdout == "True\n", left.stderr


def test_our_class_has_what_torch_looks_up_at_its_own_class_s_name() -> None:
    found = set(re.findall(r"\bDistributedDataParallel\.(_\w+)", inspect.getsource(distributed)))
    for name in ("_dynamo/convert_frame.py", "distributed/_composable/replicate.py"):
        text = (Path(torch.__file__).parent / name).read_text()
        found |= set(re.findall(r"\bDistributedDataParallel\.(_\w+)", text))
    assert {"_active_ddp_module", "_get_active_ddp_module"} <= found
    assert [name for name in found if not hasattr(OURS, name)] == []
