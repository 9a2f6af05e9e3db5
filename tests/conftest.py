"""Settings that must stand before torch is imported, and signals as a terminal has them, here and in every rank.

The files that take minutes begin first, so that no worker of pytest-xdist is left with one of them at the end.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["MKL_CBWR"] = "AUTO"
sys.path.insert(0, str(Path(__file__).parent))  # for `from ranks import run_ranks`
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:  # tests in the background, or under nohup
        signal.signal(_number, signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL)

LONG = [
    *("test_readme.py", "test_main_job.py", "test_chapters.py"),  # one for each worker
    *("test_settings_page.py", "test_floors.py", "test_vision.py"),  # xdist gives each worker a second file at once
    *("test_launcher.py", "test_same_mathematics.py", "test_hosts.py", "test_failure.py", "test_processes.py"),
    *("test_like_torch.py", "test_join_and_hooks.py", "test_exercises.py", "test_resume.py"),
    "test_checkpoint_store.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
