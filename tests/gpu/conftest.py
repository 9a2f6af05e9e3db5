"""Every test here runs on a GPU where there is one, and on the stand-in for one where a C++ compiler is found."""

from __future__ import annotations

import pytest
import torch
from gpu_standin.build import COMPILER, build

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=[pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU]), "standin"])
def kind(request: pytest.FixtureRequest) -> str:
    """Returns the type of device, for `begin` in every rank."""
    if request.param == "standin":
        if COMPILER is None:
            pytest.skip("no C++ compiler is found, which the stand-in for a GPU needs")
        build()
    return str(request.param)
