"""The launcher's decisions: which processes are the ranks, after each loss, arrival and farewell."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddp.comm.meeting import membership
from ddp.comm.meeting.membership import Generation, Member, Membership, elastic
from ddp.errors import ConfigError


class Launch:
    """A launch without processes: a test says what they do."""

    def __init__(self, **numbers: int) -> None:
        self.limits = elastic(**{"min_workers": 1, **numbers})  # type: ignore[arg-type]
        assert self.limits is not None
        self.store, self.running = HashStore(), dict.fromkeys(range(self.limits.workers + self.limits.spares), "runs")
        self.membership = Membership(self.store, self.limits, self.running)
        self.store.set("open", "")  # a fit trains

    @property
    def members(self) -> list[int]:
        assert Generation.read(self.store.get("generation")) == self.membership.latest
        return self.membership.latest.members

    def ready(self, process: int) -> None:
        self.running[process] = "runs"
        self.store.set(f"ready/{process}", "")
        self.membership.look()

    def killed(self, process: int) -> bool:
        del self.running[process]
        return self.membership.lost(process, "was killed by SIGKILL")

    def leaves(self, process: int) -> None:
        self.store.set(f"leaves/{process}", "SIGTERM")
        self.membership.look()


def test_a_spare_takes_the_rank_of_the_one_that_was_lost_and_others_keep_theirs() -> None:
    launch = Launch(workers=3, spares=2)
    launch.ready(3)
    assert launch.members == [0, 1, 2]  # there is no place for it yet
    assert launch.killed(1)
    assert launch.members == [0, 3, 2]
    launch.killed(0)
    assert launch.members == [3, 2]  # the other spare is not ready yet
    launch.ready(4)
    assert launch.members == [4, 3, 2]
    latest = launch.membership.latest
    assert (latest.number, latest.num_joined, sorted(latest.ended)) == (3, 2, [0, 1])


def test_others_join_up_to_the_most() -> None:
    launch = Launch(workers=2, max_workers=3)
    launch.ready(2)
    launch.ready(3)
    assert launch.members == [0, 1, 2]
    launch.killed(0)
    assert launch.members == [3, 1, 2]


def test_one_that_leaves_is_taken_out_and_not_asked_back() -> None:
    launch = Launch(workers=3, min_workers=2)
    launch.leaves(1)
    assert launch.members == [0, 2]
    assert launch.membership.latest.num_left == 1
    launch.ready(1)
    assert launch.members == [0, 2]
    assert not launch.membership.stopped_by


def test_the_run_stops_if_too_few_would_stay() -> None:
    launch = Launch(workers=3, min_workers=2)
    launch.leaves(0)
    launch.leaves(2)
    assert launch.membership.stopped_by == "SIGTERM"
    assert launch.members == [1, 2]  # which agree to stop, and save
    launch.ready(3)
    assert launch.members == [1, 2]


def test_too_few_wait_for_others() -> None:
    launch = Launch(workers=2, min_workers=2)
    assert launch.killed(0)
    assert launch.membership.waits
    launch.ready(2)
    assert launch.members == [2, 1]
    assert not launch.membership.waits


def test_after_the_first_fit_nobody_joins_and_a_loss_ends_the_run() -> None:
    launch = Launch(workers=2, max_workers=3)
    launch.store.set("closed", "")
    launch.ready(2)
    assert launch.members == [0, 1]
    assert not launch.killed(1)


def test_one_whose_work_is_done_ends_the_joining() -> None:
    launch = Launch(workers=2, spares=1)
    assert launch.membership.lost(0, "")
    launch.ready(2)
    assert launch.membership.latest.number == 0
    assert not launch.killed(1)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_members_run_and_stay_in_order(seed: int) -> None:
    draw = random.Random(seed)
    workers = draw.randint(1, 8)
    launch = Launch(workers=workers, spares=draw.randint(0, 2), max_workers=workers + draw.randint(0, 3))
    newest, gone = len(launch.running), set[int]()
    for _ in range(40):
        before = launch.membership.latest
        match draw.choice(["kill", "start", "ready", "leave"]):
            case "kill" if launch.running:
                gone.add(killed := draw.choice(sorted(launch.running)))
                if killed in before.members:
                    assert launch.killed(killed)
                else:
                    del launch.running[killed]
            case "start":
                launch.running[newest] = "runs"
                newest += 1
            case "ready" if waiting := sorted(launch.running.keys() - {*before.members}):
                launch.ready(draw.choice(waiting))
            case "leave" if len(before.members) > 1 and not launch.membership.stopped_by:
                gone.add(leaver := draw.choice(before.members))
                launch.leaves(leaver)
        now = launch.membership.latest
        assert len(set(now.members)) == len(now.members) <= launch.limits.max_workers
        assert gone.isdisjoint(now.members) or launch.membership.stopped_by
        assert now.number >= before.number
        stayed = [each for each in before.members if each in now.members]
        assert stayed == [each for each in now.members if each in before.members]


def test_a_silent_process_is_warned_of_and_then_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launch, now, cpu = Launch(workers=2), [0.0], {0: 0, 1: 0}
    monkeypatch.setattr(membership, "now_s", lambda: now[0])

    def silent(after_s: float) -> list[int]:
        now[0] += after_s
        return launch.membership.silent(cpu.__getitem__)

    assert silent(0) == silent(2) == []
    for tick in range(5):
        launch.store.set("alive/0", str(tick))
        assert silent(2.5) == []
    assert [record.getMessage().split(" shows")[0] for record in caplog.records] == ["process 1"]
    for tick in range(5, 9):  # a long compilation: its thread does not run, but the processor does
        launch.store.set("alive/0", str(tick))
        cpu[1] += 1
        assert silent(2.5) == []
    for tick in range(9, 20):
        launch.store.set("alive/0", str(tick))
        assert silent(2.5) == []
    launch.store.set("alive/0", "20")
    assert silent(2.6) == [1]


def test_a_launcher_that_was_paused_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, now = Launch(workers=2), [0.0]
    monkeypatch.setattr(membership, "now_s", lambda: now[0])
    for after_s in (0.0, 1.0, 1000.0, 1.0):
        now[0] += after_s
        assert launch.membership.silent(lambda _: 0) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"workers": 2, "min_workers": 3}, r"min_workers=3: is more than workers=2"),
        ({"workers": 3, "min_workers": 1, "max_workers": 2}, r"max_workers=2: is less than workers=3"),
        ({"workers": 3, "min_workers": None, "spares": 1}, r"spares=1: workers come and go only with min_workers"),
        ({"workers": 3, "min_workers": None, "max_workers": 4}, r"max_workers=4: .*only with min_workers"),
    ],
)
def test_numbers_that_contradict(given: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        elastic(**given)  # type: ignore[arg-type]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_process_follows_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"):
        monkeypatch.setenv(name, "7")  # which it replaces; the test's own come back
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    launch, heard = Launch(workers=3, spares=1), list[int]()
    member = Member(launch.store, 2, os.getppid())
    member.on_news = lambda: heard.append(member.latest.number)
    assert member.enter() == launch.membership.latest
    assert (os.environ["RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("2", "3")
    until(lambda: launch.store.check(["alive/2"]))
    assert member.lost is None
    assert not member.has_news(0.0)
    launch.killed(1)
    assert member.has_news(20.0)
    assert member.lost == (1, "it was killed by SIGKILL")
    until(lambda: heard == [1])
    assert member.enter(is_later=True) is not None
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")
    assert member.lost is None
    launch.leaves(2)
    with pytest.raises(SystemExit, match="143"):
        member.enter()
