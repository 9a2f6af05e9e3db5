"""Figures of a run with faults follow from its workers' lines alone; the command compares ours with a peer."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest

from ddp.__main__ import main
from ddp.lab.chaos import Figures, equal_bits, figures, table

BATCH = 6  # of three workers


def lines(at: float, step: int, *, ranks: Sequence[int] = (0, 1, 2), batch: int = BATCH, **more: Any) -> list[Any]:
    """Returns what these ranks of three write, one ms after the other, when a step is committed."""
    share = batch // len(ranks)
    first = (step - 1) * BATCH
    return [
        {"t": at + rank / 1000, "step": step, "batch": batch}
        | {"samples": [first + position * share + each for each in range(share)]}
        | (more if rank == 0 else {})
        for position, rank in enumerate(ranks)
    ]


def steps(*moments: tuple[float, int], **how: Any) -> list[Any]:
    return [line for at, step in moments for line in lines(at, step, **how)]


BEFORE = steps((0.0, 1), (0.1, 2), (0.2, 3), (0.3, 4))


def test_a_survivor_repeats_one_step_and_nothing_is_lost() -> None:
    """The lost worker had sent its part of step 5, so only step 6 waits; it died before it wrote its line of step 5."""
    after = lines(0.4, 5)[:2] + steps((1.5, 6), (1.6, 7), ranks=(0, 1)) + steps((2.0, 8), (2.1, 9))
    found = figures(BEFORE + after, begin=0.05, end=2.1025, faults=[0.35])
    assert found.step_s == pytest.approx(0.1)
    assert found.recoveries_s == [pytest.approx(1.5 - 0.35 - 2 * 0.1)] and found.later_s == pytest.approx(0.4 - 0.1)
    assert (found.batch, found.fewest) == (BATCH, BATCH)
    assert (found.lost, found.repeated, found.steps_repeated) == (0, 0, 0)


def test_a_restart_from_a_checkpoint_repeats_steps_and_samples() -> None:
    after = steps((3.35, 3), (3.45, 4), (3.55, 5), (3.65, 6))
    found = figures(BEFORE + after, begin=0.05, end=4.0, faults=[0.35])
    assert found.recoveries_s == [pytest.approx(3.0 - 0.1)]
    assert (found.lost, found.repeated, found.steps_repeated) == (0, 2 * BATCH, 2)
    assert found.rate == pytest.approx(5 * BATCH / 3.95)  # steps 2 to 6, each once


def test_a_smaller_batch_loses_samples() -> None:
    after = steps((5.35, 5), (5.45, 6), ranks=(0, 1), batch=4)
    found = figures(BEFORE + after, begin=0.05, end=6.0, faults=[0.35])
    assert found.recoveries_s == [pytest.approx(4.9)] and found.fewest == 4
    assert (found.lost, found.repeated, found.steps_repeated) == (4, 0, 0)


@pytest.mark.parametrize("after", [[], lines(0.4, 5)], ids=["no step", "one that was under way"])
def test_a_run_that_hangs_never_recovers(after: list[Any]) -> None:
    found = figures(BEFORE + after, begin=0.05, end=60.0, faults=[0.35])
    assert found.recoveries_s == [None]
    assert "never" in table({"ours": found}, {"ours": [found]})


def test_lines_of_a_run_without_a_fault_and_after_its_end() -> None:
    found = figures([*BEFORE, *lines(9.0, 5)], begin=0.05, end=0.35)
    assert (found.recoveries_s, found.later_s, found.lost, found.rate) == ([], None, 0, pytest.approx(3 * BATCH / 0.3))


def test_bits_are_compared_at_the_last_step_of_both() -> None:
    assert equal_bits({20: "a", 40: "b", 60: "c"}, {20: "x", 40: "b"})
    assert equal_bits({20: "a", 40: "b"}, {20: "a", 40: "x"}) is False
    assert equal_bits({20: "a"}, {40: "a"}) is None
    digested = [*BEFORE, *lines(0.2, 3, digest="old"), *lines(0.5, 5, digest="new")]
    assert figures(digested, begin=0.05, end=9.0, faults=[0.35]).digests == {5: "new"}


def test_a_table_has_medians_of_recoveries_and_sums_of_counts() -> None:
    def run(*recoveries_s: float | None, lost: int = 0, rate: float = 10.0) -> Figures:
        how: dict[str, Any] = {"step_s": 0.01, "batch": 6, "fewest": 4, "repeated": 0, "steps_repeated": 0}
        return Figures(**how, recoveries_s=recoveries_s, later_s=0.5, lost=lost, rate=rate, digests={20: "a"})

    runs = {"ours": [run(1.0), run(0.5), run(0.7)], "torchft": [run(5.0, lost=2), run(7.0, lost=3), run(None)]}
    _, ours, peer = table({"ours": run(rate=12.5), "torchft": run()}, runs).splitlines()
    assert " ".join(ours.split()) == "ours 10.0 0.70 1.00 1.00 0.50 6 → 4 0 0 0 0.80 3 of 3 0"
    assert " ".join(peer.split()) == "torchft 10.0 7.00 never 10.00 0.50 6 → 4 5 0 0 1.00 3 of 3 0"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--peer ray", "argument --peer: ray: give one of torchrun, torchft, torchft_quick, none"),
        ("--fault kill,burn", "argument --fault: burn: give one of kill, stop, leave, full_disk"),
        ("--rank 3", "--rank 3 with --workers 3: ranks count from 0"),
        ("--every 30", "--every 30 with --for 30: make --for longer"),
        ("--peer torchft", "torchft is not installed: pip install"),
    ],
)
def test_bad_input_gets_one_sentence(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["chaos", *words.split()])
    (line,) = capfd.readouterr().err.splitlines()
    assert ended.value.code == 2 and said in line


@pytest.mark.slow
def test_a_killed_worker_costs_ours_less_than_torchrun(capfd: pytest.CaptureFixture[str]) -> None:
    words = "--peer torchrun --workers 2 --rank 1 --for 15 --spares 1"
    assert main(["chaos", *words.split()]) == 0
    _, ours, peer = (line.split() for line in capfd.readouterr().out.splitlines())
    assert float(ours[2]) < float(peer[2].replace("never", "inf"))  # within 15 s, on a busy host
    assert [*ours[6:9], ours[9:12]] == ["24", "→", "24", ["0", "0", "0"]]
