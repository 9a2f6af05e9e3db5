"""Where another thread stands, read while that thread goes on."""

from __future__ import annotations

import subprocess
import sys
import threading

from ddp.stack import stack_of

# The garbage collector starts at each possible moment in turn; a finalizer then lets the other thread leave its calls.
LEAVE_WHILE_LOOKED_AT = """
import gc, threading
from ddp.stack import stack_of

class Garbage:
    def __init__(self):
        self.itself = self
    def __del__(self):
        may_leave.set()
        has_left.wait(10)

def deep(levels):
    return deep(levels - 1) if levels else may_leave.wait(10)

def other(levels, a=1, b=2, c=3, d=4, e=5):
    return other(levels - 1, a, b) if levels else has_left.set() or may_end.wait(10)

def be_looked_at():
    deep(30)
    other(40)

for allocations in range(1, 50):
    may_leave, has_left, may_end = threading.Event(), threading.Event(), threading.Event()
    gc.set_threshold(0)
    thread = threading.Thread(target=be_looked_at, daemon=True)
    thread.start()
    Garbage()
    gc.set_threshold(gc.get_count()[0] + allocations)
    frames = stack_of(thread.ident)
    gc.set_threshold(0)
    may_leave.set()
    may_end.set()
    thread.join()
    names = [frame.name for frame in frames]
    assert set(names) <= {"_bootstrap", "_bootstrap_inner", "run", "be_looked_at", "deep", "other", "wait"}, names
    gc.collect()
"""


def test_a_thread_may_leave_the_calls_that_are_looked_at() -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVE_WHILE_LOOKED_AT], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_a_stack_names_files_lines_and_calls() -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    assert thread.ident is not None
    *_, called, innermost = stack_of(thread.ident)
    go_on.set()
    thread.join()
    assert (called.name, innermost.name) == ("wait", "wait")
    assert called.filename == threading.__file__
    assert "waiter" in (innermost.line or "")
    assert stack_of(thread.ident) == stack_of(0) == []
