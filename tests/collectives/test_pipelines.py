"""Pipelines: proven for each size, as short and as small as they promise; what is wrong is refused, with its place.

Tests: ddp/collectives/pipelines.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import FunctionType
from typing import Any
from xml.etree import ElementTree

import pytest
from mutants import mutants, mutated

from ddp.__main__ import main
from ddp.collectives import pipelines
from ddp.collectives.pipelines import PIPELINES, Compute, Costs, Timeline, check, draw, gpipe, recv, send, simulate
from ddp.collectives.pipelines import one_forward_one_backward as one_by_one
from ddp.collectives.schedule import Recv, ScheduleError, Send

SIZES = [(num_stages, num_micro) for num_stages in range(1, 9) for num_micro in range(1, 17)]
SVG = "{http://www.w3.org/2000/svg}"
FORWARD, BACKWARD = Compute(0, backward=False), Compute(0, backward=True)


@pytest.mark.parametrize("algorithm", PIPELINES.values(), ids=PIPELINES)
def test_each_size_is_proven_with_the_promised_bubble_and_memory(algorithm: pipelines.Algorithm) -> None:
    for p, m in SIZES:
        proof = check(algorithm, p, m)
        assert proof.bubble == pipelines.bubble(p, m) == Fraction(p - 1, m + p - 1)
        assert proof.held == tuple(m if algorithm is gpipe else min(m, p - s) for s in range(p))
        assert proof.num_messages == 2 * m * (p - 1)
        assert len(proof.spans) == 2 * m * p


@pytest.mark.parametrize("algorithm", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("backward_s", [1, 2, 0.5])
def test_the_simulated_bubble_is_exact(algorithm: pipelines.Algorithm, backward_s: float) -> None:
    for p, m in SIZES:
        run = simulate(algorithm, p, m, Costs(1, backward_s))
        assert run.bubble == pipelines.bubble(p, m)
        assert run.makespan_s == (m + p - 1) * (1 + backward_s)


def test_messages_lengthen_the_way_down_and_up_and_wait_for_each_other_on_an_edge() -> None:
    run = simulate(gpipe, 4, 8, Costs(1, 2, 0.25))
    assert run.makespan_s == (8 + 3) * 3 + 2 * 3 * 0.25  # hidden, but on the way of the first down and the last up
    slow = simulate(gpipe, 2, 8, Costs(1, 1, 3))
    assert slow.makespan_s == 1 + 8 * 3 + 1 + 1 + 8 * 3 + 1  # an edge carries one message at a time


def test_a_schedule_is_at_most_25_lines() -> None:
    source = Path(pipelines.__file__).read_text()
    for name in PIPELINES:
        body = source.partition(f"def {name}(")[2].partition("\n\n\n")[0]
        assert len(body.splitlines()) <= 25


def forget() -> None:
    check.cache_clear()
    pipelines.rounds_of.cache_clear()


def proofs(algorithm: pipelines.Algorithm) -> list[Any]:
    forget()
    return [
        (run.held, run.bubble, run.num_messages, [len(pipelines.rounds_of(algorithm, s, p, m)) for s in range(p)])
        for p, m in SIZES
        if p <= 5 and m <= 7
        for run in [check(algorithm, p, m)]
    ]


@pytest.mark.parametrize("function", [gpipe, one_by_one], ids=PIPELINES)
def test_every_one_line_mutant_is_found_out(function: FunctionType) -> None:
    original, survivors, count = proofs(function), [], 0
    for mutant in mutants(function):
        count += 1
        with mutated(function, mutant):
            try:
                survivors += [mutant.after] if proofs(function) == original else []
            except ScheduleError:
                pass
    forget()
    assert survivors == []
    assert count >= 10


# --- what is wrong is refused ----------------------------------------------------------------------------------------


def both_send_first(stage: int, num_stages: int, num_micro: int) -> Iterator[Any]:
    """1F1B, whose transfers are a round each."""
    for step in one_by_one(stage, num_stages, num_micro):
        yield from step if isinstance(step, tuple) else (step,)


def steps(*by_stage: Any) -> Callable[..., Iterator[Any]]:
    """Returns a schedule of these steps for each stage."""

    def algorithm(stage: int, num_stages: int, num_micro: int) -> Iterator[Any]:
        yield from by_stage[stage]

    return algorithm


def endless(stage: int, num_stages: int, num_micro: int) -> Iterator[Any]:
    while True:
        yield ()


def broken(stage: int, num_stages: int, num_micro: int) -> Iterator[Any]:
    yield FORWARD
    raise KeyError("x")


GOOD = (FORWARD, (send(1, 0), recv(1, 0)), BACKWARD), (recv(0, 0), FORWARD, BACKWARD, send(0, 0))


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (both_send_first, "stage 0 in round 4: deadlock: waits until stage 1 receives micro-batch 1; stuck are"),
        (steps((FORWARD, send(1, 0), BACKWARD), GOOD[1]), "backward of micro-batch 0 before its gradient has been rec"),
        (steps(GOOD[0], GOOD[1][:-1]), "stage 0 in round 2: deadlock: waits until stage 1 sends micro-batch 0"),
        (steps(GOOD[0], GOOD[1][1:]), "stage 1 in round 1: computes the forward of micro-batch 0 before its act"),
        (steps(GOOD[0], (*GOOD[1], send(0, 0))), "stage 1 in round 5: sends micro-batch 0 to stage 0 twice"),
        (steps(GOOD[0], (*GOOD[1], BACKWARD)), "stage 1 in round 5: computes the backward of micro-batch 0 twice"),
        (steps((send(1, 0), *GOOD[0]), GOOD[1]), "sends micro-batch 0 to stage 1 before the forward of micro-batch 0"),
        (steps((BACKWARD,), GOOD[1]), "stage 0 in round 1: computes the backward of micro-batch 0 before its forward"),
        (steps((FORWARD, send(1, 0)), (recv(0, 0), FORWARD)), "ends without the backward of micro-batch 0"),
        (steps(((FORWARD, send(1, 0)),), GOOD[1]), "sends micro-batch 0 to stage 1 before the forward"),
        (steps(GOOD[0], ((recv(0, 0), FORWARD),)), "computes the forward of micro-batch 0 before its activation has"),
        (steps(GOOD[0], (recv(1, 0),)), "exchanges a message with stage 1, which is not its neighbour"),
        (steps(GOOD[0], (recv(5, 0),)), "exchanges a message with stage 5, which is not its neighbour"),
        (steps(GOOD[0], (send(0, 1),)), "not a Send, Recv or Compute of one micro-batch from 0 to m − 1"),
        (steps(GOOD[0], ("F0",)), "yields 'F0', not a Send, Recv or Compute"),
        (steps(GOOD[0], (Recv(0, range(2), add=False),)), "not a Send, Recv or Compute of one micro-batch"),
        (steps(GOOD[0], (Send("0", range(1)),)), "not a Send, Recv or Compute of one micro-batch"),
        (steps(GOOD[0], (Compute(True, backward=False),)), "not a Send, Recv or Compute of one micro-batch"),
        (steps(GOOD[0], (Compute(0, backward=[]),)), "not a Send, Recv or Compute of one micro-batch"),  # type: ignore[arg-type]
        (endless, "never ends; a schedule must end"),
        (broken, "stage 0 in round 1: raises KeyError: 'x'"),
    ],
)
def test_a_wrong_schedule_is_refused_with_its_place(algorithm: Any, says: str) -> None:
    num_micro = 4 if algorithm is both_send_first else 1
    with pytest.raises(ScheduleError, match=re.escape(says)):
        check(algorithm, 2, num_micro)
    check(steps(*GOOD), 2, 1)


def test_messages_of_an_edge_match_in_their_order() -> None:
    first = [Compute(0, backward=False), Compute(1, backward=False), send(1, 1), send(1, 0)]
    with pytest.raises(ScheduleError, match="expects micro-batch 0 of stage 0, which sends micro-batch 1"):
        check(steps(first, [recv(0, 0), recv(0, 1)]), 2, 2)


def test_a_round_computes_while_its_transfers_are_in_flight() -> None:
    """A stage's own overlap: the next forward while the last activation travels, even where a send waits."""
    first: list[Any] = [Compute(0, backward=False), (send(1, 0), Compute(1, backward=False)), send(1, 1)]
    last: list[Any] = [recv(0, 0), (Compute(0, backward=False), recv(0, 1)), Compute(1, backward=False)]
    for micro in (0, 1):
        first += [recv(1, micro), Compute(micro, backward=True)]
        last += [Compute(micro, backward=True), send(0, micro)]
    proof = check(steps(first, last), 2, 2)
    assert proof.makespan_s == 6 and proof.held == (2, 2)


# --- drawings and commands -------------------------------------------------------------------------------------------


def test_text_shows_each_computation_and_the_bubble() -> None:
    assert draw(one_by_one, 3, 3).splitlines() == [
        "stage 0  F0 F1 F2       B0    B1    B2",
        "stage 1     F0 F1    B0 F2 B1    B2",
        "stage 2        F0 B0 F1 B1 F2 B2",
        "",
        "bubble: 2/5 = 40.0% of the time",
        "activations held, by stage: 3, 2, 1",
    ]


def test_the_module_shows_what_draw_prints() -> None:
    shown = re.findall(r"^    (stage .*)$", pipelines.__doc__ or "", re.MULTILINE)
    assert shown[:4] == draw(one_by_one, 4, 8).splitlines()[:4]


def test_a_picture_shows_each_computation() -> None:
    picture = ElementTree.fromstring(pipelines.svg(gpipe, 3, 4, title="a < b"))
    assert picture.findtext(f"{SVG}title") == "a < b"
    assert len(picture.findall(f"{SVG}rect")) == 1 + 2 * 3 * 4


def answer(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert main(words.split()) == 0
    return capsys.readouterr().out


def test_the_commands_take_pipelines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert answer(capsys, "draw 1f1b 4 --micro 8") == draw(one_by_one, 4, 8) + "\n"
    text = answer(capsys, "check one_forward_one_backward 4")
    assert text.startswith("one_forward_one_backward, 4 stages, 8 micro-batches: proven (each micro-batch passes")
    assert "if a send waits for its receive; 48 messages\n  bubble: 3/11 = 27.3% of the time\n" in text
    assert text.endswith("activations held, by stage: 4, 3, 2, 1\n")
    text = answer(capsys, "simulate gpipe 2 --micro 1 --alpha 1ms --bytes 1MB --rate 8gbit")
    assert text.startswith("gpipe, 2 stages, 1 micro-batch, activations of 1MB: 64.1 ms\n  bubble: 53.2%")
    text = answer(capsys, "simulate gpipe 1 --forward 0s --backward 0s")  # nothing takes any time
    assert "bubble: 0 = 0.0%" in text
    assert answer(capsys, "draw gpipe 2 --svg it.svg") == "it.svg: gpipe, 2 stages, 8 micro-batches\n"
    assert (tmp_path / "it.svg").read_text().startswith("<svg")


OWN = """
from ddp.collectives.pipelines import gpipe

def mine(stage, num_stages, num_micro):
    yield from gpipe(stage, num_stages, num_micro)

def half(stage, num_stages, num_micro):
    yield from gpipe(stage, num_stages, num_micro // 2)

no_function = []
"""


def test_the_commands_take_a_pipeline_of_one_s_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_pipeline.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert answer(capsys, "draw own_pipeline:mine 3 --micro 2") == draw(gpipe, 3, 2) + "\n"
    assert "proven" in answer(capsys, "check own_pipeline:mine 3 --micro 2")
    assert "2 micro-batches, activations of 25MB" in answer(capsys, "simulate own_pipeline:mine 3 --micro 2")
    assert "'list' object is not callable" in refused(capsys, "draw own_pipeline:no_function 3 --micro 2")
    assert "ends without the forward of micro-batch 2" in refused(capsys, "check own_pipeline:half 3 --micro 4")


def refused(capsys: pytest.CaptureFixture[str], words: str) -> str:
    with pytest.raises(SystemExit):
        main(words.split())
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("check ring 4 --micro 3", "--micro 3: ring is no pipeline; leave it out, or take gpipe or one_forward_one"),
        ("check gpip 4", "Did you mean gpipe?"),
        ("draw gpipe 4 --hosts 2,2", "--hosts: a pipeline has one stage per rank, wherever that is; leave it out"),
        ("simulate gpipe 4 --per-host 2", "--per-host: a pipeline has one stage per rank, wherever that is; leave it"),
        ("simulate gpipe 4 --inside-rate 1gbit", "--inside-rate: a pipeline has one stage per rank"),
        ("check gpipe 4 --shards 4", "--shards: a pipeline has no shards; leave it out"),
        ("check ring 4 --shards 4", "--shards: ring has no shards; leave it out"),
        ("simulate ring 4 --forward 1ms", "--forward: ring is no pipeline; leave it out"),
        ("check gpipe 4 --micro 0", "--micro: 0: give a whole number from 1 to 10,000"),
        ("check gpipe 1000 --micro 1000", "a proof follows each micro-batch through each stage; take at most 50,000"),
        ("draw gpipe 64 --micro 64 --svg a.svg", "take at most 2,048 micro-batches of all stages together"),
    ],
)
def test_what_the_commands_refuse(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refused(capsys, words)


def test_the_proof_looks_only_at_stages_that_may_go_on() -> None:
    begun_s = time.process_time()
    check(gpipe, 3000, 1)
    assert time.process_time() - begun_s < 0.7  # 1.2 s if every stage is looked at in every round


def test_a_long_list_of_stages_is_cut() -> None:
    run = Timeline((), 70, 0, (1,) * 70)
    assert pipelines.summary(Timeline(check(gpipe, 1, 1).spans, 70, 0, run.held))[1].endswith("1, 1, …")
