"""A running program keeps its large blocks, unless the user says otherwise; and its end searches for no garbage."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ddp.process.memory import VARIABLES, variables

TAKE_AND_GIVE_BACK = """
import resource
from ddp.process.memory import keep_large_blocks
keep_large_blocks()
for _ in range(10):
    bytearray(64 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
PAGES = (64 << 20) // os.sysconf("SC_PAGESIZE")


def page_faults(**environment: str) -> int:
    plain = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", TAKE_AND_GIVE_BACK], env=plain | environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the GNU C library's allocator")
def test_a_large_block_is_taken_from_the_kernel_once() -> None:
    assert page_faults() < 3 * PAGES
    assert page_faults(MALLOC_MMAP_THRESHOLD_="131072") > 9 * PAGES, "what the user has set stays"


def test_variables_that_are_set_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert variables() == VARIABLES
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    assert "GLIBC_TUNABLES" not in variables()


# The end of a process

PROGRAM = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_freeze_count() > 0))  # called last
from ddp.process.memory import leave_out, skip_at_exit
skip_at_exit()
with leave_out():
    sys.modules.update({name: sys for name in sys.argv[1:]})
"""


@pytest.mark.parametrize(("imported", "is_left_out"), [((), "True"), (("triton",), "False")])
def test_the_end_is_short_but_not_at_the_price_of_false_leaks(imported: tuple[str, ...], is_left_out: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *imported], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == (is_left_out, "")
