"""What a signal asks for, and when it is obeyed at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from ddp.train.stopping import StopFlag


@pytest.mark.parametrize("number", StopFlag.SIGNALS)
def test_a_signal_and_its_echoes_are_one_request(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in StopFlag.SIGNALS]
    stop = StopFlag()
    with stop.listening():
        assert not stop
        for _ in range(5):
            signal.raise_signal(number)
    assert stop and stop.reason == number.name
    assert [signal.getsignal(each) for each in StopFlag.SIGNALS] == before


def test_the_first_reason_stands() -> None:
    stop = StopFlag()
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    stop.request("time is up")
    assert stop.reason == "SIGTERM"


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
