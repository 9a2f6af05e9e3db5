"""Output that cannot be written: the program ends as it would have. Ctrl-C; and who gets which line of the log."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from rich.table import Table

import ddp
from ddp.errors import CheckpointError, ConfigError, printable
from ddp.process.arguments import Parser
from ddp.process.terminal import console, ended_by_ctrl_c, follow_rank, log, say

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


def test_ctrl_c_is_no_exception_where_modules_are_imported_and_handlers_of_others_stay() -> None:
    def heard() -> object:
        with ended_by_ctrl_c():
            return signal.getsignal(signal.SIGINT)

    default, own, ends = signal.default_int_handler, lambda *_: None, signal.SIG_DFL
    for handler, inside in ((default, ends), (own, own), (signal.SIG_IGN, signal.SIG_IGN), (ends, ends)):
        before = signal.signal(signal.SIGINT, handler)
        try:
            assert heard() == inside and signal.getsignal(signal.SIGINT) == handler
            with ThreadPoolExecutor(1) as thread:
                assert thread.submit(heard).result() == handler, "only the main thread may set one"
            with ended_by_ctrl_c():
                signal.signal(signal.SIGINT, own)
            assert signal.getsignal(signal.SIGINT) is own, "a module that was imported has set it"
        finally:
            signal.signal(signal.SIGINT, before)


HOSTILE = "dig\x1b]0;title\x07\x1b[2J\x9b2J\x00\r\u202eits\u2066\x7f"
SHOWN = r"dig\x1b]0;title\x07\x1b[2J\x9b2J\x00\r\u202eits\u2066\x7f"


def shown(what: str) -> None:
    if what == "table":
        table = Table("[bold]name[/bold]")
        table.add_row(HOSTILE)
        table.add_row("[link=file:///x]y[/link]")
        console(wide=200).print(table)
    elif what == "say":
        say(HOSTILE)
        say(HOSTILE, to=sys.stderr)
    elif what == "log":
        handler = logging.StreamHandler(sys.stdout)
        log.addHandler(handler)
        log.warning(f"{HOSTILE} %s %s %d", f"{HOSTILE}\nerror: all is well", Path(HOSTILE), 3)
        log.removeHandler(handler)
    elif what == "parser":
        Parser(prog=HOSTILE).error(HOSTILE)
    else:
        raise {"config": ConfigError, "checkpoint": CheckpointError}[what](HOSTILE)


@pytest.mark.parametrize("what", ["table", "say", "log", "parser", "config", "checkpoint"])
def test_control_characters_of_a_stranger_s_file_reach_no_terminal(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither C0 and C1 nor what turns the order of letters; markup of rich's is text; a value stays in its line."""
    try:
        shown(what)
    except (SystemExit, ConfigError, CheckpointError) as error:
        print(error)
    told = "".join(capsys.readouterr())
    assert what == "table" or SHOWN in told
    assert r"dig\x1b]0;title" in told and all(letter not in told for letter in HOSTILE if not letter.isprintable())
    assert what != "table" or ("[bold]name[/bold]" in told and "[link=file:///x]y[/link]" in told)
    assert what != "log" or (told.count("\n") == 1 and r"\nerror: all is well" in told)


def test_what_can_be_shown_is_shown_as_it_is() -> None:
    text = "naïve 模型 \t🙂 × \u00a0…\n"
    assert printable(text) == text and printable("a\nb", is_line=True) == r"a\nb"


# Who gets which line of the log


Told = Callable[[], list[str]]


@contextlib.contextmanager
def listening(capsys: pytest.CaptureFixture[str]) -> Iterator[Told]:
    """Yields what returns all that has reached the terminal, a file of the application's, and a handler of "ddp"."""
    file, own, level = io.StringIO(), io.StringIO(), logging.root.level
    streams = ((logging.root, sys.stderr), (logging.root, file), (log, own))
    added = [(owner, logging.StreamHandler(each)) for owner, each in streams]
    for owner, handler in added:
        owner.addHandler(handler)
    logging.root.setLevel(logging.INFO)
    try:
        yield lambda: ["".join(capsys.readouterr()), file.getvalue(), own.getvalue()]
    finally:
        logging.root.setLevel(level)
        for owner, handler in added:
            owner.removeHandler(handler)
        follow_rank(0, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_of_all_that_is_logged_a_terminal_gets_warnings_of_rank_0(
    rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(capsys) as told:
        follow_rank(rank, 2)
        log.debug("too little")
        log.info("derived")
        log.warning("late")
        assert told() == ["" if rank else "late\n", "derived\nlate\n", "derived\nlate\n"]


def test_a_fit_without_progress_is_silent_though_the_application_logs_to_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, data = torch.nn.Linear(1, 1), (torch.ones(2, 1), torch.ones(2, 1))
    optimizer, keeps = torch.optim.SGD(model.parameters(), 0.1), ddp.Folder(None, progress=False)
    loss = torch.nn.functional.mse_loss
    with listening(capsys) as told:
        ddp.fit(model, data, optimizer, loss=loss, global_batch=2, epochs=1, test_data=data, folder=keeps)
        terminal, file, own = told()
    assert terminal == ""
    assert "learning rate 0.1" in file and "step 1: test_loss" in file and own == file


def test_an_application_that_wants_none_of_it_gets_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "propagate", False)
    with listening(capsys) as told:
        log.warning("late")
        assert told() == ["", "", "late\n"]
