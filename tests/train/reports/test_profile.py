"""The profile of a run: its file, the parts of its steps, its clock."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp.__main__ import main
from ddp.comm.watch.call import Call, Envelope, History
from ddp.errors import ConfigError
from ddp.train.reports.profile import (
    BucketTimes,
    CallTimes,
    ClockOffset,
    Phase,
    Profile,
    RankStep,
    RawStep,
    Span,
    last_begun,
    read_profile,
    spans_of,
)
from ddp.train.reports.profiler import Profiler, Recording, later

BUCKET = BucketTimes(
    index=0,
    bytes=24,
    dtype="float32",
    parameters=["0.weight"],
    shapes=[[2, 3]],
    ready_s=0.001,
    launched_s=0.001,
    done_s=0.0015,
)
RANK_STEP = RankStep(
    step=3,
    began_s=10.0,
    num_samples=4,
    backward_began_s=0.003,
    buckets=[BUCKET],
    spans=[Span("data", 0.0, 0.001), Span("forward", 0.001, 0.003)],
)
PROFILE = Profile(
    version=1,
    model="Sequential",
    num_parameters=6,
    batch=8,
    world_size=2,
    hosts=[[0], [1]],
    threads=1,
    cores=[2, 2],
    device="cpu",
    strategy="Replicated",
    hook=None,
    wire="bf16",
    algorithm="ring",
    runs="in the background",
    clock=[ClockOffset(offset_s=0.0, error_s=0.0), ClockOffset(offset_s=-0.05, error_s=1e-4)],
    steps=[[RANK_STEP, RANK_STEP]],
)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    PROFILE.write(tmp_path)
    assert read_profile(tmp_path) == PROFILE
    assert RANK_STEP.step_s == 0.003


def lasting(seconds: float) -> RankStep:
    return replace(RANK_STEP, spans=[Span("forward", 0.0, seconds)])


def test_a_step_takes_what_all_took_over_their_samples() -> None:
    """The oracle is samples ÷ time of each rank, in the windows of NumPy's `array_split`."""
    draw = np.random.default_rng(0)
    for num in (1, 3, 5, 12):
        seconds, samples = draw.uniform(0.5, 2, (num, 2)), np.full((num, 2), 4)
        samples[-1, 1] = 4 if num == 1 else 1  # the last batch of an epoch
        steps = [
            [replace(lasting(s), num_samples=int(n)) for s, n in zip(*rows, strict=True)]
            for rows in zip(seconds, samples, strict=True)
        ]
        profile = replace(PROFILE, steps=steps)
        assert profile.step_s == pytest.approx(8 * seconds.sum(0).max() / samples.sum())
        cuts = [num * part // min(5, num) for part in range(min(5, num) + 1)]
        windows = [(seconds[begin:end], samples[begin:end]) for begin, end in pairwise(cuts)]
        assert profile.windows_s == pytest.approx([8 * each.sum(0).max() / number.sum() for each, number in windows])
    turns = [[lasting(each) for each in pair] for pair in [(1.0, 2.0), (2.0, 1.0)] * 5]
    assert replace(PROFILE, steps=turns).step_s == pytest.approx(1.5)  # jitter, which evens out


def damaged(change: Callable[[dict[str, Any]], object]) -> str:
    plain = json.loads(json.dumps(asdict(PROFILE)))
    change(plain)
    return json.dumps(plain)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "holds no profile.json: run it with profile.steps=5"),
        ("{", "is damaged (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)): profile the"),
        ("[]", "is damaged ([]: expected a mapping, as {key: value})"),
        (damaged(lambda plain: plain.update(version=2)), "is of version 2, and version 1 is read here"),
        (damaged(lambda plain: plain.pop("version")), "is of version None, and"),
        (damaged(lambda plain: plain.pop("clock")), "is damaged (it has no clock)"),
        (damaged(lambda plain: plain.update(batch="8")), "is damaged (batch='8': expected a whole number from 0 up)"),
        (damaged(lambda plain: plain.update(batch=True)), "is damaged (batch=True: expected"),
        (damaged(lambda plain: plain.update(world_size=10**30)), "is damaged (world_size=1000000"),
        (damaged(lambda plain: plain.update(threads=0)), "is damaged (batch, threads, cores: one is below 1)"),
        (damaged(lambda plain: plain["steps"][0][1].update(backward_began_s=-1)), "is damaged (a time is below 0)"),
        (damaged(lambda plain: plain["steps"][0][1].update(spans=[])), "is damaged (spans: there are none, or"),
        (damaged(lambda plain: plain["steps"][0][1]["spans"].reverse()), "or they do not stand one after another)"),
        (damaged(lambda plain: plain["steps"][0][1]["buckets"][0]["shapes"].pop()), "bytes of 0 do not fit each other"),
        (damaged(lambda plain: plain["steps"][0][1].update(began_s=float("nan"))), "(steps[0][1].began_s=None: exp"),
        (damaged(lambda plain: plain["steps"][0][1]["spans"][0].pop()), "damaged (steps[0][1].spans[0]="),
        (damaged(lambda plain: plain["steps"][0].pop()), "is damaged (steps: there are none, or some"),
        (damaged(lambda plain: plain.update(hosts=[[0, 1], [1]])), "are not the ranks 0 to 1"),
        (damaged(lambda plain: plain.update(cores=[2])), "is damaged (cores: not one number for each host)"),
    ],
)
def test_a_file_that_is_no_profile_is_told_in_a_sentence(text: str | None, expected: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "profile.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_profile(tmp_path)
    assert expected in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_a_step_of_a_run_is_drawn_from_its_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PROFILE.write(tmp_path)
    assert main(["draw", "step", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("step 3 of 2 ranks\n")
    assert main(["draw", "step", str(tmp_path), *f"--svg {tmp_path}/s.svg --png {tmp_path}/s.png".split()]) == 0
    svg, png = (tmp_path / "s.svg").read_text(), (tmp_path / "s.png").read_bytes()
    assert "Sequential, Replicated" in svg and "communication" in svg and png.startswith(b"\x89PNG")
    for words, says in (
        (["--step", "4"], "has the steps 3 to 3"),
        (["--trace", "t.json"], "holds no trace: run it with profile.steps=5"),
        (["--png", "/nowhere/s.png"], "cannot write /nowhere/s.png: No such file or directory; name another file"),
    ):
        with pytest.raises(SystemExit):
            main(["draw", "step", str(tmp_path), *words])
        assert says in capsys.readouterr().err


# --- the parts of a step ---------------------------------------------------------------------------------------------

PHASES = [Phase("step", 0, 100), Phase("data", 2, 10), Phase("forward", 10, 40), Phase("backward", 40, 80)]


def parts(*ranks: RawStep) -> list[list[tuple[str, float, float]]]:
    last_s = last_begun(ranks)
    return [[tuple(span) for span in spans_of(step, last_s)] for step in ranks]


def test_in_the_foreground_a_rank_waits_until_the_last_one_has_come() -> None:
    mine = RawStep(0, 100, PHASES, [CallTimes((1, 0), 50, 70)], [(50, 70)])
    theirs = RawStep(0, 100, PHASES, [CallTimes((1, 0), 63, 70)], [(63, 70)])
    first, second = parts(mine, theirs)
    begin = [("other", 0, 2), ("data", 2, 10), ("forward", 10, 40)]
    backward = [("backward", 40, 50), ("wait", 50, 63), ("communication", 63, 70), ("backward", 70, 80)]
    assert first == [*begin, *backward, ("other", 80, 100)]
    assert second == [*begin, ("backward", 40, 63), ("communication", 63, 70), ("backward", 70, 80), ("other", 80, 100)]


def test_in_the_background_only_the_wait_is_exposed_and_it_belongs_to_the_call_that_runs_then() -> None:
    calls = [CallTimes((1, 0), 45, 60), CallTimes((2, 0), 60, 79)]
    mine = RawStep(0, 100, PHASES, calls, [(75, 79)])
    late = RawStep(0, 100, PHASES, [CallTimes((1, 0), 45, 60), CallTimes((2, 0), 78, 79)], [(78, 79)])
    first, _ = parts(mine, late)
    assert first[3:] == [
        ("backward", 40, 75),
        ("wait", 75, 78),
        ("communication", 78, 79),
        ("backward", 79, 80),
        ("other", 80, 100),
    ]


def test_a_chain_computes_and_its_calls_may_wait() -> None:
    chain, inner = CallTimes(None, 50, 70), CallTimes((1, 1), 60, 70)
    mine = RawStep(0, 100, PHASES, [chain, inner], [(50, 70), (60, 70)])
    late = RawStep(0, 100, PHASES, [CallTimes(None, 58, 70), CallTimes((1, 1), 66, 70)], [(58, 70), (66, 70)])
    first, second = parts(mine, late)
    assert first[4:7] == [("communication", 50, 60), ("wait", 60, 66), ("communication", 66, 70)]
    assert second[4] == ("communication", 58, 70)


def test_calls_in_the_background_are_exposed_only_while_somebody_waits() -> None:
    history, background = History(), set[int | None]()
    comm: Any = SimpleNamespace(device=torch.device("cpu"), history=history, runs_in_background=background.__contains__)
    recording = Recording(comm)
    recording.begin(6)

    def run(call: Call) -> None:
        noted = history.note(call)
        assert history.recorder is not None
        history.recorder.ended(noted)

    with recording.phase("step"):
        with recording.phase("forward"):
            run(Call(1, "all_reduce"))
        thread = threading.Thread(target=run, args=(Call(2, "all_reduce"),))
        thread.start()
        background.add(thread.ident)
        with recording.waiting():
            thread.join()
        run(Call(3, "chain"))
        run(Call(3, "all_reduce"))
        run(Call(3, "send", message=Envelope("to", 1, 1, (), "float32")))
    step = recording.end()
    assert step is not None and history.recorder is None
    assert [call.key for call in step.calls] == [(1, 0), (2, 0), None, (3, 1), None]
    assert [phase.name for phase in step.phases] == ["forward", "step"]
    assert len(step.exposed) == 5 and step.calls[1][1:] not in step.exposed
    assert later(step, 5.0).calls[0].began_s == step.calls[0].began_s + 5.0
    assert (step.began_s, step.ended_s) == step.phases[-1][1:]


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "5"])
def test_a_number_of_steps_that_is_none_is_refused(steps: Any) -> None:
    with pytest.raises(ConfigError, match=r"steps=.*: must be a whole number from 1 up"):
        Profiler(steps)


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), "5"])
def test_a_time_that_is_none_is_refused(seconds: Any) -> None:
    with pytest.raises(ConfigError, match=r"seconds=.*: must be a (finite number|number above 0)"):
        Profiler(seconds=seconds)


MOMENTS = st.tuples(st.integers(-5, 105), st.integers(0, 60)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@settings(max_examples=40)
@given(st.lists(MOMENTS, max_size=6), st.lists(MOMENTS, max_size=6), st.lists(MOMENTS, max_size=4))
def test_each_instant_is_counted_once(
    phases: list[tuple[int, int]], calls: list[tuple[int, int]], exposed: list[tuple[int, int]]
) -> None:
    names = ("data", "forward", "backward", "update")
    named = [Phase(name, *times) for name, times in zip(names, phases, strict=False)]
    step = RawStep(0, 100, named, [CallTimes((number, 0), *times) for number, times in enumerate(calls)], exposed)
    spans = spans_of(step, dict.fromkeys(last_begun([step]), 50.0))
    assert (spans[0].began_s, spans[-1].ended_s) == (0, 100)
    assert all(a.ended_s == b.began_s and a.part != b.part for a, b in pairwise(spans))
    covered = {moment for began, ended in exposed for moment in range(began, ended)}
    seen = {
        moment
        for span in spans
        if span.part in ("wait", "communication")
        for moment in range(int(span.began_s), int(span.ended_s))
    }
    assert seen == covered & set(range(100))
