"""What a signal asks for, and when it is obeyed at once."""

from __future__ import annotations

import faulthandler
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ddp.train.stopping import StopFlag

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_and_its_echoes_are_one_request(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    stop = StopFlag()
    with stop.listening():
        assert not stop
        for _ in range(5):
            signal.raise_signal(number)
    assert stop and stop.reason == number.name
    assert [signal.getsignal(each) for each in SIGNALS] == before


@contextmanager
def disposition(number: signal.Signals, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_an_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    stop = StopFlag()
    with disposition(number, signal.SIG_IGN), stop.listening():
        signal.raise_signal(number)
    assert not stop


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_the_user_s_program_handles_stays_its_own(number: signal.Signals) -> None:
    stop, got = StopFlag(), []
    with disposition(number, lambda number, frame: got.append(number)), stop.listening():
        signal.raise_signal(number)
    assert not stop and got == [number]

    with tempfile.TemporaryFile() as file:
        faulthandler.register(number, file=file, chain=False)  # in C: Python's signal module does not know of it
        try:
            with stop.listening():
                signal.raise_signal(number)
        finally:
            faulthandler.unregister(number)
        assert not stop and file.tell() > 0


def test_the_first_reason_stands() -> None:
    stop = StopFlag()
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    stop.request("time is up")
    assert stop.reason == "SIGTERM"


def test_a_signal_comes_before_a_callback_s_wish_because_it_asks_the_program_too() -> None:
    stop = StopFlag()
    stop.request("pruned")
    assert (stop.reason, stop.signal_name) == ("pruned", "")
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
    assert (stop.reason, stop.signal_name) == ("SIGTERM", "SIGTERM")


SECOND_WISH = """
import signal
from ddp.train import stopping

stop = stopping.StopFlag()
with stop.listening():
    signal.raise_signal(signal.SIGTERM)
    stopping.now_s = lambda before=stopping.now_s: before() + stopping.ECHO_S
    print("still here", flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("too far", flush=True)
"""


def test_a_second_signal_well_after_the_first_ends_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", SECOND_WISH], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGTERM, "still here\n", "")


def test_a_thread_cannot_listen_but_can_be_asked() -> None:
    stop = StopFlag()

    def listen() -> None:
        with stop.listening():
            stop.request("asked")

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert stop.reason == "asked"
