"""Notes each start of a run, so that it can be said years later which sample was in which step (`commands/where.py`).

    starts.jsonl, a line for each start
        folder, settings     where it was started, and how, as `ddp/run/settings/config.py` has it
        position             step and sampler's state that it went on from; null for a new run
        dealt                what a sampler asks of samples that only the program has
        order                identity of the order that these must give; null: they give it by themselves

The command line writes it, which has not imported torch then, and so does `ddp.fit`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp.process.files import read_own, write_whole

STARTS = "starts.jsonl"


def note_start(run_dir: Path, start: Mapping[str, Any], *, goes_on: bool) -> None:
    """Writes a line, after those of the run that goes on."""
    path = run_dir / STARTS
    noted = read_own(path) if goes_on and path.exists() else ""
    write_whole(path, f"{noted}{json.dumps(start, default=int)}\n")  # of NumPy's
