"""How far a gradient travels: a step's calls change few files of `ddp/`, and no call stands deep below another.

A reader who follows a gradient opens another file at each change. So functions that belong to one part of a step stand
in one file, and what has nothing to do in an ordinary step is not called.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

import ddp

PACKAGE = str(Path(ddp.__file__).parent) + "/"
BELOW = ("collectives", "comm", "process")  # how bytes travel is another way


def inside(frame: FrameType | None) -> list[str]:
    """The files of `ddp/` whose functions run, the innermost first."""
    files = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename.removeprefix(PACKAGE))
        frame = frame.f_back
    return files


def the_way(kind: str) -> tuple[int, int]:
    """How often the file changes from one call to the next in a step, and the deepest stack; the least of some steps.

    A rank that waits long for the others asks who is missing, which is no part of a step.
    """
    ddp.init()
    model = getattr(ddp, kind)(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    changes, frames, base = [], [], len(inside(sys._getframe()))
    for number in range(6):
        calls: list[str] = []
        depths: list[int] = []

        def look(frame: FrameType, event: str, _: Any, calls: list[str] = calls, depths: list[int] = depths) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
                files = inside(frame)
                depths.append(len(files) - base)
                if not files[0].startswith(BELOW):
                    calls.append(files[0])

        x, y = torch.randn(4, 8), torch.randint(0, 2, (4,))
        sys.setprofile(look if number > 1 else None)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        sys.setprofile(None)
        if number > 1:
            changes.append(sum(one != other for one, other in pairwise(calls)))
            frames.append(max(depths))
    return min(changes), min(frames)


@pytest.mark.parametrize(
    ("kind", "most_changes"),
    [("NaiveDataParallel", 9), ("BucketedDataParallel", 25), ("DistributedDataParallel", 35)],
)
def test_a_gradient_travels_through_few_files_and_frames(kind: str, most_changes: int) -> None:
    changes, frames = run_ranks(the_way, 2, kind)[0]
    assert changes <= most_changes, f"the file changes {changes} times in a step"
    assert 8 <= frames <= 12, f"{frames} calls of ddp/ stand below each other"
