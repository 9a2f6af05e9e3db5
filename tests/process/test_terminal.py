"""Standard output and error that cannot be written: the program goes on, and ends as it would have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import subprocess, sys
from ddp.process.terminal import keep_writing

keep_writing()
file = open(sys.argv[1], "w")  # it must not get the number of a stream that was closed
for _ in range(3):
    print("2 workers × 1 thread", flush=True)
    print("careful ×", file=sys.stderr)
subprocess.run(["echo", "a child"])
file.write("went on")
file.close()
sys.exit(5)
"""
OUT, ERR = "2 workers × 1 thread\n" * 3 + "a child\n", "careful ×\n" * 3


@pytest.mark.parametrize(
    ("redirection", "variables", "out", "err"),
    [
        ("", {}, OUT, ERR),
        ("| head -1", {}, "2 workers × 1 thread\n", ERR),
        (">/dev/full", {}, "", ERR),
        (">/dev/full 2>&1", {"PYTHONUNBUFFERED": "1"}, "", ""),
        ("2>/dev/full", {}, OUT, ""),
        (">&-", {}, "", ERR),
        ("<&- >&- 2>&-", {}, "", ""),
        ("", {"PYTHONIOENCODING": "ascii"}, OUT.replace("×", "?"), ERR.replace("×", "\\xd7")),
    ],
)
def test_a_broken_stream_ends_nothing(
    redirection: str, variables: dict[str, str], out: str, err: str, tmp_path: Path
) -> None:
    command = ["bash", "-o", "pipefail", "-c", f'"$@" {redirection}', "bash"]
    command += [sys.executable, "-c", PROGRAM, str(tmp_path / "file")]
    ended = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (5, out, err)
    assert (tmp_path / "file").read_text() == "went on"


FULL_FOR_A_WHILE = """
import os, sys, threading
from ddp.process.terminal import tolerant

receiver, sender = os.pipe()
os.set_blocking(sender, False)
received = []

def receive():
    with open(receiver) as stream:
        received.append(stream.read())

reader = threading.Timer(0.3, receive)
reader.start()
stream = tolerant(sender, like=sys.stdout)
stream.write("x" * 300_000)
stream.flush()
os.close(sender)
reader.join()
print(len(received[0]))
"""


def test_a_stream_that_does_not_block_gets_all_once_there_is_room() -> None:
    ended = subprocess.run([sys.executable, "-c", FULL_FOR_A_WHILE], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("300000\n", "")
