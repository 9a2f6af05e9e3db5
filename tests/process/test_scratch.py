"""A folder for a while goes with its block, or with the next one's beginning if its process was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ddp.process.files import scratch_folder


def leave_one_behind(parent: Path) -> None:
    """Kills a process that has such a folder."""
    if not (pid := os.fork()):
        with scratch_folder(parent, ".mine-") as folder:
            (folder / "part").write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_what_a_killed_process_has_left_goes_and_what_others_hold_stays(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / ".mine-link").symlink_to(precious)
    leave_one_behind(tmp_path)
    assert len(list(tmp_path.glob(".mine-*/part"))) == 1
    with scratch_folder(tmp_path, ".mine-") as first, scratch_folder(tmp_path, ".mine-") as second:
        assert first.stat().st_mode & 0o777 == 0o700
        assert set(tmp_path.iterdir()) == {precious, tmp_path / ".mine-link", first, second}
    assert set(tmp_path.iterdir()) == {precious, tmp_path / ".mine-link"}
