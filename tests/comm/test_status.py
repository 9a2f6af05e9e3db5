"""Verdicts about lost ranks, which are pure functions of what the ranks publish."""

from __future__ import annotations

from typing import Any

from ddp.comm.call import Call
from ddp.comm.status import STALE_S, Others, Status

MINE = Call(7, "all_reduce", "sum", name="bucket 1")


def others(*statuses: Status, silent_s: dict[int, float] | None = None, ended: Any = ()) -> Others:
    """Rank 1's view, in which all of them have given a sign of life just now."""
    silence = {status.rank: 0.0 for status in statuses} | (silent_s or {})
    return Others(status(1), MINE, {status.rank: status for status in statuses}, silence, ended)


def status(rank: int, **about: Any) -> Status:
    return Status(rank, "host", 100 + rank, **({"sequence": 7, "label": MINE.label} | about))


def test_who_failed_comes_before_whom_it_blames_and_before_those_that_ended() -> None:
    seen = others(
        status(0, state="failed", blames=3), status(2, state="failed", reason="no disk"), status(3), ended=[3]
    )
    assert seen.certain() == (2, "it failed: no disk. Its own log has the traceback")
    assert others(status(0, state="failed", blames=3), status(3), ended=[0]).certain() == (
        3,
        "as rank 0 found out first",
    )


def test_a_rank_that_was_given_up_is_told_so_and_blames_nobody_else() -> None:
    verdict = others(status(0, state="failed", blames=1), status(2), ended=[0]).certain()
    assert verdict is not None
    assert verdict[0] == 1
    assert verdict[1].startswith("rank 0 has given this one up")


def test_another_label_tells_of_a_wrong_call_and_not_of_a_lost_rank() -> None:
    seen = others(status(0, label="bucket 2"), status(2))
    verdict = seen.certain()
    assert verdict is not None
    assert verdict[0] == 0
    assert "it is in another collective of that number: [bucket 2]" in verdict[1]
    assert seen.lost() is None


def test_silence_and_ends_tell_of_lost_ranks() -> None:
    assert others(status(0), status(2), silent_s={2: STALE_S}).lost() is not None
    assert others(status(0), status(2), silent_s={2: STALE_S - 0.1}).lost() is None
    ended = others(status(0), status(2), ended=[2]).lost()
    assert ended is not None
    assert ended[0] == 2
    assert others(status(0, state="left"), status(2)).lost() is None  # it has done its part of this call


def test_the_rank_that_is_furthest_behind_is_likely_to_blame() -> None:
    suspect, why = others(status(0, sequence=5), status(2, sequence=3)).likely(0, "nothing came", 60.0)
    assert suspect == 2
    assert "has not come to this collective" in why
    assert others(status(0), status(2)).likely(0, "reset by peer", 60.0)[0] == 0
