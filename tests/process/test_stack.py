"""Where another thread stands, read while that thread goes on."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from ddp.process.stack import stack_of

# The garbage collector starts at each possible moment in turn; a finalizer then lets the other thread leave its calls.
LEAVE_WHILE_LOOKED_AT = """
import gc, threading
from ddp.process.stack import stack_of

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

CALLS = {"_bootstrap", "_bootstrap_inner", "run", "be_looked_at", "deep", "other", "wait"}
CALLS |= {"set", "notify_all", "notify", "__init__", "__enter__", "__exit__", "_is_owned"}  # inside an event

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
    assert set(names) <= CALLS, names
    gc.collect()
"""


def test_a_thread_may_leave_the_calls_that_are_looked_at() -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVE_WHILE_LOOKED_AT], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_a_stack_names_files_lines_and_calls(tmp_path: Path) -> None:
    path = tmp_path / "wörter.py"
    path.write_text("def gehört(reached, go_on):\n    reached.set()\n    go_on.wait()\n")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    reached, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=names["gehört"], args=(reached, go_on))
    thread.start()
    assert thread.ident is not None
    reached.wait()
    frame = next(frame for frame in stack_of(thread.ident) if frame.filename == str(path))
    go_on.set()
    thread.join()
    assert (frame.name, frame.line) in (("gehört", "reached.set()"), ("gehört", "go_on.wait()"))
    assert stack_of(thread.ident) == stack_of(0) == []
