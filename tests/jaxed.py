"""Runs functions in one process beside pytest's in which JAX has eight devices, all of them the CPU.

    trained = jaxed(function, *arguments)      # function(*arguments) there: of a module's top level, as its arguments

JAX warns of each fork after its start, and other tests fork. So it never runs here. The process begins with the first
call, serves all files, and ends when this process does, in whichever way.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import pytest

NUM_DEVICES = 8
HAS_JAX = all(map(find_spec, ("jax", "torchax")))
needs_jax = pytest.mark.skipif(not HAS_JAX, reason="needs the extra tpu")

Result = TypeVar("Result")


class JaxFailed(AssertionError):
    """A function raised there, or did not end."""


class _Server:
    """The process."""

    def __init__(self) -> None:
        (read, their_write), (their_read, write) = os.pipe(), os.pipe()
        self._answers, self._calls = Connection(read, writable=False), Connection(write, readable=False)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        code = f"import sys; sys.path[:] = {sys.path}; import jaxed; jaxed.serve({their_read}, {their_write})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=(their_read, their_write), stdout=self._log, stderr=self._log
        )
        os.close(their_read), os.close(their_write)

    def call(self, function: Callable[..., Result], args: Any, timeout_s: float) -> Result:
        try:
            self._calls.send_bytes(pickle.dumps((function, args)))
            if not self._answers.poll(timeout_s):
                raise JaxFailed(f"{function.__name__} did not end within {timeout_s} s{self._printed()}")
            is_result, value = self._answers.recv()
        except (EOFError, BrokenPipeError):
            self._process.wait()
            raise JaxFailed(f"the process ended with {self._process.returncode}{self._printed()}") from None
        finally:
            if sys.exc_info()[0] is not None:
                self.end()
        if is_result:
            return value  # type: ignore[no-any-return]
        raise JaxFailed(f"in the process of JAX:\n{value}")

    def end(self) -> None:
        """Ends the process, also in the midst of a function; the next call begins another one."""
        _server.cache_clear()
        atexit.unregister(self.end)
        self._process.kill()
        self._process.wait()
        for each in (self._answers, self._calls, self._log):
            each.close()

    def _printed(self) -> str:
        self._log.seek(0)
        return ":\n" + self._log.read()[-4000:]


@cache
def _server() -> _Server:
    server = _Server()
    atexit.register(server.end)
    return server


def jaxed(function: Callable[..., Result], *args: Any, timeout_s: float = 120.0) -> Result:
    """Returns what a function returns in the process of JAX; what it raises fails the test, with its traceback."""
    return _server().call(function, args, timeout_s)


def serve(calls: int, answers: int) -> None:
    """Becomes the process: calls functions until pytest's process closes its end."""
    from ddp.process.memory import ask_for_signal

    ask_for_signal(9)  # when pytest is killed
    os.chdir(tempfile.gettempdir())
    import jax
    import torch

    import ddp.replica.compiled  # noqa: F401  what it imports may warn
    from ddp.comm import session

    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    jax.config.update("jax_disable_most_optimizations", True)  # which save no time here
    assert len(jax.devices()) == NUM_DEVICES

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    given, gives = Connection(calls, writable=False), Connection(answers, readable=False)
    while True:
        try:
            payload = given.recv_bytes()
        except EOFError:
            return
        try:
            function, args = pickle.loads(payload)
            answer = pickle.dumps((True, function(*args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        session.shutdown()
        session._end_what_failed()
        gives.send_bytes(answer)
