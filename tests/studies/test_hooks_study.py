"""The study of hooks: every method is timed, and the figures are the same on all ranks."""

from __future__ import annotations

import os

import pytest
from hooks import METHODS, ROUNDS, HookCell, TimeHooks
from ranks import run_ranks

from ddp.comm import connect

SOME_METHODS = ("plain", "int8", "sign", "powersgd1", "torch_fp16", "torch_powersgd1", "alone", *ROUNDS)


def hooked() -> list[HookCell]:
    connect.boot_id = lambda: f"host of rank {os.environ['RANK']}"
    return TimeHooks("small-mlp", SOME_METHODS, num_turns=1)()


@pytest.mark.slow
def test_methods_of_sending_less_are_timed() -> None:
    cells, same = run_ranks(hooked, 2, timeout_s=100)
    assert cells == same
    assert [cell.name for cell in cells] == list(SOME_METHODS)
    assert set(SOME_METHODS) <= {*METHODS, *ROUNDS}
    for cell in cells:
        assert cell.place.startswith("2 ranks on 2 hosts")
        assert cell.ratio is not None and cell.ratio > 0 and cell.step_s[0] > 0
        assert cell.of_alone is not None and (cell.name != "alone" or cell.of_alone == 1)
        assert cell.link_bytes is None  # the interface of this machine carries other things, too
        assert cell.columns().keys() == cell.legend.keys()
        assert (cell.encoding_s is not None) == (cell.name in ("sign", "powersgd1"))
