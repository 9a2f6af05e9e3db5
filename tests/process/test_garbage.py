"""At the end of a process nothing is searched for garbage, unless someone would take what is left for leaks."""

import subprocess
import sys

import pytest

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
