"""Judges a solution by the library's own tests, which run with the reader's file in the place of the library's.

The folder of the tests is `tests/`; each test that passes is a line, and the first one that fails is the mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from recipes.tutorial.tools.mistake import Mistake, raised

ROOT = Path(__file__).parents[3]
SHOWN = 12  # lines of what a test says
QUIET = ["-o", "addopts=", "-p", "no:terminal", "-p", "no:xdist", "-p", "no:cacheprovider"]


class Proof(NamedTuple):
    """A test, what it proves, and where to look if it fails."""

    test: str
    proves: str
    hint: str


SAMPLER = [
    Proof(
        "data/orders/test_sampler.py::test_each_sample_once_per_epoch_and_the_same_steps_at_every_world_size",
        "1 to 8 ranks: every sample of a step is on one rank, once",
        "shard i begins at i * size // num_shards, where shard i − 1 ends: nothing is padded, and nothing is dropped. "
        "Yield the positions, which are the values in `step`, not their places in it",
    ),
    Proof(
        "data/orders/test_sampler.py::test_shares_differ_by_one_sample_if_the_shards_divide",
        "shares differ by one sample at most, and shards are cut into as few parts as can be, of about one size",
        "part i of n begins at i * size // n of its shard; parts count from 0 in each shard, have at most micro_size "
        "samples, and at least one",
    ),
    Proof(
        "data/orders/test_sampler.py::test_micro_batches_are_the_same_at_every_world_size",
        "the parts of a step are the same with any number of ranks",
        "rank r has the shards from r * num_shards // world_size up to where the next rank begins, in this order",
    ),
]


class _FirstError:
    """Keeps the first error of a run of pytest, and what pytest says of it."""

    error: BaseException | None = None
    says = ""

    def pytest_exception_interact(self, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
        if self.error is None and call.excinfo is not None:
            lines = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
            self.error, self.says = call.excinfo.value, "\n  ".join(lines[:SHOWN])


def passes(module: ModuleType, proofs: Sequence[Proof]) -> Iterator[str]:
    """Yields what each test proves; the module stands in the place of the library's already.

    Raises:
        Mistake: one of them fails.
    """
    for test, proves, hint in proofs:
        first = _FirstError()
        with chdir(ROOT):
            status = pytest.main([f"tests/{test}", "--maxfail=1", *QUIET], plugins=[first])
        if first.error is not None:
            raise raised(proves, first.error, module) or Mistake(proves, first.says, hint)
        if status != pytest.ExitCode.OK:
            raise RuntimeError(f"pytest ended with {status} for tests/{test}")
        yield proves
