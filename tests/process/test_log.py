"""Who gets which line of the log: terminals and files that an engine has put onto the root logger, and our handlers."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

import ddp
from ddp.process.terminal import follow_rank, log

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
