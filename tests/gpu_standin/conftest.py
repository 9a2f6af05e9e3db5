"""Builds the stand-in before the first test here, or skips them all where no C++ compiler is found."""

from __future__ import annotations

import pytest
from gpu_standin.build import COMPILER, build


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    if COMPILER is None:
        pytest.skip("no C++ compiler is found, which the stand-in for a GPU needs")
    build()
