"""Who is to blame for a lost rank: a pure function of what the ranks publish."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from ddp.comm.watch.call import Call, Direction, Envelope
from ddp.comm.watch.status import STALE_S, Status, StatusSnapshot

MINE = Call(7, "all_reduce", "sum", name="bucket 1")


def others(*statuses: Status, silent_s: dict[int, float] | None = None, ended: Any = ()) -> StatusSnapshot:
    """Rank 1's view, in which all of them have given a sign of life just now."""
    silence = {status.rank: 0.0 for status in statuses} | (silent_s or {})
    return StatusSnapshot(status(1), MINE, {status.rank: status for status in statuses}, silence, ended)


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
    culprit = others(status(0, state="failed", reason="it shows no sign of life", blames=1), status(2)).certain()
    assert culprit == (1, "rank 0 has given this one up: it shows no sign of life")


def test_another_kind_at_the_same_place_tells_of_a_wrong_call_and_not_of_a_lost_rank() -> None:
    seen = others(status(0, run=3, kind="all_reduce max of 4"), status(2, run=3, kind="all_reduce sum of 4"))
    seen = seen._replace(mine=status(1, run=3, kind="all_reduce sum of 4"))
    culprit = seen.certain()
    assert culprit is not None
    assert culprit[0] == 0
    assert "it calls all_reduce max of 4 [bucket 1] where rank 1 calls all_reduce sum of 4 [bucket 1]" in culprit[1]
    assert seen.lost() is None
    for elsewhere in (2, 4):  # one behind, or one ahead: its call is no answer to this one
        assert seen._replace(mine=status(1, run=elsewhere, kind="barrier")).certain() is None
    assert others(status(0, run=0, kind="wait_for_rank_zero"))._replace(mine=status(1)).certain() is None


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
    assert "has not reached this collective" in why
    assert others(status(0), status(2)).likely(0, "reset by peer", 60.0)[0] == 0
    silent = Status(2, "unknown", 0, label="start-up")  # it has never published anything
    suspect, why = others(status(0), silent).likely(0, "reset by peer", 60.0)
    assert suspect == 2
    assert "it arrived, but has shown no sign of life since" in why


# --- messages: the first one from rank 2 to rank 1, after collective #7, unless told otherwise -----------------------


def envelope(direction: Direction, peer: int, number: int = 1, numel: int = 4, dtype: str = "float32") -> Envelope:
    return Envelope(direction, peer, number, [numel], dtype)


def in_message(*statuses: Status, waits: Envelope | None = None, **about: Any) -> StatusSnapshot:
    """Rank 1's view while it waits for rank 2, or in another message."""
    message = waits or envelope("from", 2)
    call = Call(7, "recv", shape=(4,), message=message)
    posted = {message.route: message.number}
    mine = status(1, state="waiting", message=message, posted=posted, in_flight=[message])
    return others(*statuses, **about)._replace(call=call, mine=mine)


def waiting(rank: int, message: Envelope, **about: Any) -> Status:
    """A rank that waits in a message."""
    posted = {message.route: message.number}
    wait = {"state": "waiting", "waiting_for": message.peer, "message": message, "in_flight": [message]}
    return status(rank, **{**wait, "label": "x", "posted": posted, **about})


def test_statuses_survive_being_published() -> None:
    before = waiting(0, envelope("to", 1))
    assert Status.read(json.dumps(asdict(before))) == before


def test_a_message_waits_for_its_peer_alone_and_for_whom_that_one_waits() -> None:
    late, rest = status(2, sequence=3), [status(0, state="left"), status(3)]
    seen = in_message(*rest, late, silent_s={3: 100.0}, ended=[3])
    assert seen.certain() is None
    assert seen.missed(2).statuses.keys() == {2}
    suspect, why = seen.likely(2, "nothing came", 60.0)
    assert suspect == 2
    assert "it is alive, but has not reached this message: rank 2 (host, pid 102) running, last seen in #3" in why

    between = waiting(2, envelope("from", 3))
    seen = in_message(between, status(3))
    assert seen.certain() is None
    suspect, why = seen.likely(2, "nothing came", 60.0)
    assert suspect == 3
    assert "it is alive, but rank 2 waits for it: rank 3 (host, pid 103) running, last seen in #7" in why
    ended = in_message(between, status(3), ended=[3]).certain()
    assert ended == (3, "it shows no sign of life: its process has ended")
    left = in_message(between, status(3, state="left")).certain()
    assert left is not None
    assert left[0] == 3
    assert "every send needs a recv" in left[1]
    collective = status(2, state="waiting", waiting_for=1, sequence=8, label="barrier")
    crossed = "rank 2 waits in collective #8 [barrier] and rank 1 in message #1 from rank 2, each for the other one"
    assert crossed in in_message(collective).likely(2, "", 60.0)[1]


def test_a_peer_that_has_done_its_part_is_not_missed() -> None:
    done = {"to rank 1": 1}
    for gone in (status(2, state="left", posted=done), status(2, posted=done)):
        seen = in_message(gone, ended=[2], silent_s={2: 100.0})
        assert seen.missed(2).statuses == {}
        assert in_message(gone).likely(2, "reset by peer", 60.0)[0] == 2
    sending = status(2, posted=done, in_flight=[envelope("to", 1)])
    assert in_message(sending, ended=[2]).missed(2).gone() is not None
    assert "the link to it is not (reset by peer)" in in_message(sending).likely(2, "reset by peer", 60.0)[1]


def test_a_circle_is_a_deadlock_only_if_nobody_in_it_has_posted_what_the_other_waits_for() -> None:
    assert in_message(waiting(2, envelope("from", 1))).certain() == (
        2,
        "ranks 1 and 2 both wait for the other one to send: let one of them send first",
    )
    posted = {"from rank 1": 1, "to rank 1": 1}
    fits = waiting(2, envelope("from", 1), posted=posted, in_flight=[envelope("from", 1), envelope("to", 1)])
    assert in_message(fits).certain() is None
    through = [waiting(2, envelope("to", 3)), waiting(3, envelope("to", 1, number=2))]
    culprit = in_message(*through).certain()
    assert culprit is not None
    assert "ranks 1, 2 and 3 wait in a circle, each for the next one to receive or send: let one of" in culprit[1]
    seen = in_message(*through)
    seen.mine.posted["from rank 3"] = 2  # rank 3 goes on: its status is old
    assert seen.stuck() is None
    assert in_message(waiting(2, envelope("to", 3)), waiting(3, envelope("to", 2))).stuck() is None  # not this rank's
    gave_up = waiting(2, envelope("from", 1))
    gave_up.state, gave_up.blames = "failed", 1
    assert in_message(gave_up).certain() == in_message(waiting(2, envelope("from", 1))).certain()


def test_two_ends_that_do_not_fit() -> None:
    for other in (envelope("to", 1, numel=8), envelope("to", 1, dtype="int64")):
        culprit = in_message(status(2, posted={"to rank 1": 1}, in_flight=[other])).certain()
        assert culprit is not None
        assert culprit[0] == 2
        assert f"rank 2 sends [{other.shape[0]}] {other.dtype} where rank 1 receives [4] float32" in culprit[1]
    reshaped = envelope("to", 1)._replace(shape=[2, 2])
    assert in_message(status(2, posted={"to rank 1": 1}, in_flight=[reshaped])).stuck() is None


def test_a_rank_in_a_message_is_behind_in_a_collective_or_past_it_but_in_no_other_one() -> None:
    behind = waiting(2, envelope("to", 0), sequence=6)
    assert others(status(0), waiting(2, envelope("to", 0))).certain() is None  # its last collective was this one
    suspect, why = others(status(0), behind).likely(0, "nothing came", 60.0)
    assert suspect == 2
    assert "rank 2 (host, pid 102) waits for rank 0 in message #1 to rank 0 [x], after #6" in why
    computes = status(3, sequence=6)
    assert others(status(0), behind, computes).likely(0, "nothing came", 60.0)[0] == 3
