"""Settings that must stand before torch is imported, and signals as a terminal has them, here and in every rank.

No test leaves a process group, a thread that watches one, or a logger's handler to the next one. What a test launches
from its own process is forked (`forked.py`), unless it is marked `engine`.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

gc.disable()  # while torch and the tests come, which stay: a fifth of that time
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["MKL_CBWR"] = "AUTO"
# torch's store asks the DNS for the name of every peer, and a DNS server that is asked often may leave some unanswered.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
sys.path.insert(0, str(Path(__file__).parent))  # for `from ranks import run_ranks`
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:  # tests in the background, or under nohup
        signal.signal(_number, signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL)

_BEGAN_S = time.monotonic()
LONG = {
    *("test_main_job", "test_command_line", "test_readme", "test_chapters", "test_package", "test_hosts"),
    *("test_like_torch", "test_same_mathematics"),
}
"""Files that take longest, one test after another. They begin first, so that no core waits for the last of them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--for", type=float, metavar="S", help="begin no test later than S seconds after the start")


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves out what is slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases after the first N of a test that has the marker `quick(N)` as slow, and puts long files first.

    With `--for`, each run has the files in another order, so that all of them come within a few runs.
    """
    cases: Counter[tuple[Path, str]] = Counter()
    for item in items:
        if (quick := item.get_closest_marker("quick")) is not None:
            cases[case := (item.path, getattr(item, "originalname", item.name))] += 1
            if cases[case] > quick.args[0]:
                item.add_marker(pytest.mark.slow)
    if config.getoption("--for") is None:
        items.sort(key=lambda item: item.path.stem not in LONG)
    else:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")  # the same for all of its processes
        items.sort(key=lambda item: zlib.crc32(f"{run} {item.path.name}".encode()))


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit_s = item.config.getoption("--for")
    if limit_s is not None and time.monotonic() - _BEGAN_S > limit_s:
        pytest.skip(f"more than {limit_s:g} s have passed")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """Ends what a test has begun in this process: a fit's group, and the watchdogs of communicators of its own.

    A watchdog tells every half second what all threads do. Those of a whole run would take a third of a core. A group
    of torch's that is none of the session's is ended, too, and told: the tests after it would find it.
    """
    earlier = set(threading.enumerate())
    yield
    if (session := sys.modules.get("ddp.comm.session")) is not None:
        session.shutdown()
        session._end_what_failed()  # else the group of a fit that has raised stays until the next `init`
    for thread in set(threading.enumerate()) - earlier:
        if thread.name == "ddp-watchdog" and (known := getattr(thread, "_args", ())):
            known[1].set()
    if (torch := sys.modules.get("torch")) is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("this test leaves a process group of torch.distributed behind")


@pytest.fixture(autouse=True)
def logging_is_as_before() -> Iterator[None]:
    """Takes back what a test has done to loggers: Hydra, for one, gives the root logger a level and a handler."""
    loggers = logging.root, logging.getLogger("ddp")
    before = [(logger, logger.level, logger.handlers.copy()) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(autouse=True)
def workers_are_forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts workers without new interpreters, in a tenth of the time."""
    if not request.node.get_closest_marker("engine"):
        import forked

        monkeypatch.setattr("ddp.run.launch.supervisor.started", forked.Started)
