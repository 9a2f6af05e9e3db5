"""Forecasts: closed formulas without overlap, the simulator for one bucket, steps by hand, and every mutant dies.

Tests: ddp/lab/forecast/encoding.py, ddp/lab/forecast/prices.py, ddp/lab/forecast/question.py,
ddp/lab/forecast/replay.py, ddp/lab/forecast/work.py.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from mutants import mutants, mutated

from ddp.__main__ import main
from ddp.collectives.catalog import SCHEDULES
from ddp.collectives.cost import Link, Network, equal_hosts, textbook
from ddp.collectives.simulate import simulate
from ddp.errors import ConfigError
from ddp.gradients import DenseStart, ErrorFeedback, PowerSGD, RandomK, Sign, TopK
from ddp.lab.forecast import encoding, question
from ddp.lab.forecast.prices import (
    BARRIER,
    SMALL,
    Call,
    Curve,
    Dispatch,
    Measured,
    Prices,
    cores_of_a_rank,
    measured_on,
)
from ddp.lab.forecast.question import Forecaster, asked_of
from ddp.lab.forecast.replay import Setup, Step, Timed, _beside, forecast, naive_s, replay, step_of, together
from ddp.lab.forecast.work import Gradient, Work, bytes_of, work_of
from ddp.run.settings.config import Config
from ddp.train.reports.profile import PARTS, BucketTimes, ClockOffset, Profile, RankStep, Span, read_profile

LINK = Link(50e-6, 1e-9, 5e-6)
CURVE = Curve((1 << 10, 1 << 20, 1 << 24), (20e-6, 200e-6, 4e-3))
HERE = Measured(Network(((0, 1),), LINK, LINK, 1e-10), CURVE)
MIB = 1 << 20


def gradients(*megabytes: float, each_s: float = 0.01) -> tuple[tuple[Gradient, ...], ...]:
    """Returns a bucket for each size, of one matrix of 1,024 columns, ready one after another."""
    return tuple(
        (Gradient(f"{n}.weight", (round(mb * 256), 1024), torch.float32, each_s * (n + 1)),)
        for n, mb in enumerate(megabytes)
    )


WORK = Work(num_samples=8, before_s=0.02, update_s=0.004, other_s=0.001, buckets=gradients(1, 4, 2))


def prices(hosts: Any, *, curve: Curve | None = None, algorithm: str = "ring", **how: Any) -> Prices:
    return Prices(Measured(Network(hosts, LINK, LINK, 1e-10), curve), algorithm, **how)


@pytest.fixture
def in_foreground(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Setup, "overlaps", False)


def ends(step: Step, *paces: Sequence[float]) -> list[float]:
    return [float(end) for end in replay(step, np.array(paces, dtype=float))]


# --- the replay ------------------------------------------------------------------------------------------------------

BY_HAND = Step(
    before_s=2,
    backward_s=10,
    update_s=3,
    other_s=1,
    buckets=(Timed(4, 5, 2), Timed(3, 1, 0), Timed(10, 4, 1)),
    opening_s=0.5,
    closing_s=0.25,
    gathering_s=0.125,
)


def test_in_the_foreground_everything_adds_up() -> None:
    assert ends(BY_HAND, [1]) == [2 + 0.5 + 10 + 5 + 1 + 4 + 0.25 + 3 + 0.125 + 1]
    # Rank 1 computes twice as long: everyone waits for it before each collective, and rank 0 is ahead after the last.
    assert ends(BY_HAND, [1, 2]) == [4 + 0.5 + 20 + 10 + 0.25 + 6 + 0.125 + 2]
    # Rank 0 begins the second step at 38, when it is through with the first one; it is the late one then.
    alone = replace(BY_HAND, opening_s=0, closing_s=0, gathering_s=0)
    assert ends(alone, [1, 2], [2, 1]) == [4 + 20 + 10 + 6 + 2, 38 + 4 + 20 + 10 + 6 + 2]


def test_in_the_background_buckets_are_taken_one_after_another() -> None:
    step = replace(BY_HAND, in_background=True, opening_s=0, closing_s=0, gathering_s=0)
    # Bucket 0 from 2 + 4 to 11, bucket 1 is ready before it but waits, to 12; the last one from the end of backward.
    assert ends(step, [1]) == [12 + 4 + 3 + 1]
    slow = replace(step, buckets=(Timed(4, 20, 0), Timed(5, 1, 0), Timed(10, 4, 0)))
    assert ends(slow, [1]) == [6 + 20 + 1 + 4 + 3 + 1]
    assert ends(slow, [1, 3]) == [18 + 20 + 1 + 4 + 9 + 3]
    # The second step begins for each rank when it is through with the first one.
    assert ends(slow, [1, 3], [1, 1])[1] == 55 + 35
    # The last bucket is ready at 9, and waits for the end of backward; nobody waits for it after that.
    early = replace(step, buckets=(Timed(4, 5, 0), Timed(9, 4, 0)))
    assert ends(early, [1, 1, 1], [1, 1, 1]) == [12 + 4 + 3 + 1, 2 * 20]


def test_communication_takes_its_share_of_a_core_that_backward_runs_on() -> None:
    step = replace(BY_HAND, in_background=True, shares_cores=True, opening_s=0, closing_s=0, gathering_s=0)
    one = replace(step, buckets=(Timed(4, 4, 2), Timed(10, 1, 0)))
    # From 6 to 10 half of the core is left, so 2 of the 6 seconds of backward are done; it ends at 14.
    assert ends(one, [1]) == [14 + 1 + 3 + 1]
    long = replace(step, buckets=(Timed(4, 40, 20), Timed(10, 1, 0)))
    assert ends(long, [1]) == [46 + 1 + 3 + 1]
    two = replace(step, buckets=(Timed(4, 2, 1), Timed(6, 6, 1), Timed(10, 1, 0)))
    # Half a core to 8 (1 of 2 done), bucket 1 from 9 to 15, when 2 of 8 seconds are taken: 4 seconds take 16 / 3.
    assert ends(two, [1]) == [pytest.approx(15 + 1 + 3 + 1)]
    late = replace(step, buckets=(Timed(4, 2, 1), Timed(6, 3, 2), Timed(10, 1, 0)))
    # Bucket 1 from 9 to 12, 3 of 5 seconds taken: 1.2 of 4 are done by then, and backward ends at 14.8.
    assert ends(late, [1]) == [pytest.approx(14.8 + 1 + 3 + 1)]
    greedy = replace(step, buckets=(Timed(4, 2, 2), Timed(10, 1, 0)))
    assert ends(greedy, [1]) == [pytest.approx(8 + 6 - 2 * 0.05 + 1 + 3 + 1)]


def test_one_rank_sends_nothing() -> None:
    found = forecast(WORK, Setup(prices=prices(((0,),), algorithm="auto"), batch=8, cores=1))
    assert found.step_s == pytest.approx(WORK.computing_s) and found.exposed_s == 0 == found.network_s


CHECKS: list[Callable[[], None]] = [
    test_in_the_foreground_everything_adds_up,
    test_in_the_background_buckets_are_taken_one_after_another,
    test_communication_takes_its_share_of_a_core_that_backward_runs_on,
    test_one_rank_sends_nothing,
]


def survivors(function: FunctionType, checks: Sequence[Callable[[], None]]) -> list[str]:
    """Returns the changed lines of the mutants that no check finds."""
    alive = []
    for mutant in mutants(function):
        with mutated(function, mutant):
            try:
                for check in checks:
                    check()
            except Exception:
                continue
        alive.append(f"{mutant.before}  →  {mutant.after}")
    return alive


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("function", [replay, _beside, together])
def test_every_one_line_mutant_of_the_replay_is_found(function: FunctionType) -> None:
    assert survivors(function, CHECKS) == []


# --- what collectives cost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "recursive_doubling"])
@pytest.mark.usefixtures("in_foreground")
def test_without_overlap_a_step_is_the_formula(num_ranks: int, algorithm: str) -> None:
    there = prices(equal_hosts(num_ranks, 1), algorithm=algorithm)
    found = forecast(WORK, Setup(prices=there, batch=8 * num_ranks))
    network = replace(there.measured.network, inside=LINK)
    formula_s = sum(textbook(algorithm, bytes_of(bucket), network) or math.nan for bucket in WORK.buckets)
    exact = algorithm == "ring" or num_ranks in (2, 8)
    assert found.network_s == pytest.approx(formula_s, rel=0.02 if exact else 0.5)
    assert found.step_s == pytest.approx(WORK.computing_s + found.network_s)
    assert found.exposed_s == pytest.approx(found.network_s)


@pytest.mark.parametrize("per_host", [1, 2])
def test_one_bucket_is_what_the_simulator_says(per_host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work = replace(WORK, buckets=gradients(4))
    there = prices(equal_hosts(4, per_host))
    took_s = simulate(SCHEDULES["ring"], there.measured.network, MIB).makespan_s
    for in_background in (False, True):
        monkeypatch.setattr(Setup, "overlaps", in_background)
        found = forecast(work, Setup(prices=there, batch=32))
        assert found.step_s == pytest.approx(work.computing_s + took_s)
    scattered = simulate(SCHEDULES["ring_reduce_scatter"], there.measured.network, MIB).makespan_s
    assert there.of(Call("reduce_scatter", 4 * MIB)) == pytest.approx(scattered)


def test_auto_is_memory_where_all_share_it_and_else_the_cheapest() -> None:
    inside = prices(((0, 1),), curve=CURVE, algorithm="auto")
    assert inside.price(Call("all_reduce", MIB)) == (200e-6, "shared_memory")
    assert inside.of(Call("reduce_scatter", MIB)) + inside.of(Call("all_gather", MIB)) == pytest.approx(200e-6)
    assert inside.of(Call("gather_across", MIB)) == 0
    hosts = equal_hosts(4, 2)
    auto = prices(hosts, curve=CURVE, algorithm="auto").price(Call("all_reduce", MIB))
    every = {name: prices(hosts, curve=CURVE, algorithm=name).of(Call("all_reduce", MIB)) for name in ("ring", "tree")}
    assert auto[0] <= min(every.values())
    assert "shared_memory+" in auto[1]
    assert not Setup(prices=inside, batch=4, cores=3).overlaps and Setup(prices=inside, batch=4, cores=4).overlaps
    assert Setup(prices=prices(hosts), batch=4).overlaps


def test_a_narrow_format_moves_fewer_bytes_and_pays_for_each() -> None:
    call, form = Call("all_reduce", MIB), Call("all_reduce", MIB, wire="bf16")
    cheap, dear = (prices(((0,), (1,)), adding_s={"bf16": each}) for each in (1e-10, 1e-7))
    assert cheap.of(form) == pytest.approx(cheap.of(call) / 2, rel=0.1)
    assert dear.of(form) > 2 * cheap.of(call)


@pytest.mark.usefixtures("in_foreground")
def test_strategies_send_and_update_their_slices() -> None:
    there = prices(equal_hosts(4, 2), curve=CURVE, algorithm="auto")
    dispatched = {}
    for strategy in ("replicated", "sharded", "central_storage"):
        setup = Setup(prices=there, batch=32, strategy=strategy)
        sent = setup.dispatches(WORK)
        dispatched[strategy] = step_of(WORK, setup, sent)
    plain, sharded, central = dispatched.values()
    assert [each.update_s for each in dispatched.values()] == [0.004, 0.001, 0.002]
    assert (plain.opening_s, plain.closing_s, plain.gathering_s) == (0, 0, 0)
    small_s = there.of(SMALL)
    assert sharded.opening_s == small_s and sharded.closing_s == 2 * small_s
    calls = [Call("all_gather", bytes_of(bucket), bytes_of(bucket)) for bucket in WORK.buckets]
    assert sharded.gathering_s == pytest.approx(sum(map(there.of, calls)))
    assert central.gathering_s == there.of(BARRIER) < sharded.gathering_s
    assert all(one.seconds < other.seconds for one, other in zip(sharded.buckets, central.buckets, strict=True))
    hooked = step_of(WORK, Setup(prices=there, batch=32), [Dispatch(0.1, (Call("sum_in_host", 4),))] * 3)
    assert hooked.opening_s == small_s == hooked.closing_s and hooked.buckets[0].computing_s == 0.1


def test_memory_is_shared_by_more_ranks_and_links_are_those_that_are_said() -> None:
    there = measured_on(HERE, equal_hosts(8, 4), alpha_s=1e-3, rate_bit_s=1e9, num_measured=2)
    assert there.allocated is not None and there.allocated.at(MIB) == pytest.approx(400e-6)
    assert there.network.between.alpha_s == 1e-3 and there.network.inside == LINK
    assert there.network.between.beta_s == pytest.approx(8e-9 / 0.956)
    assert measured_on(HERE, equal_hosts(8, 1), alpha_s=1e-3, rate_bit_s=1e9).allocated is None
    with pytest.raises(ConfigError, match="give --alpha and --rate"):
        measured_on(HERE, equal_hosts(2, 1), alpha_s=1e-3)
    assert (cores_of_a_rank(2, 1, 1), cores_of_a_rank(2, 4, 1), cores_of_a_rank(8, 2, 4)) == (1, 0.5, 4)


def test_ranks_of_a_host_that_outnumber_its_cores_are_slower() -> None:
    of = Forecaster(profile=profile(), known=None, num_known=1, cores=2)
    assert [of.slow_down_of(per_host) for per_host in (1, 2, 4, 8)] == [1, 1, 2, 4]


# --- the work --------------------------------------------------------------------------------------------------------


def bucket_times(index: int, shapes: list[list[int]], ready_s: float, launched_s: float, done_s: float) -> BucketTimes:
    numel = sum(math.prod(shape) for shape in shapes)
    return BucketTimes(
        index=index,
        bytes=4 * numel,
        dtype="float32",
        parameters=[f"{index}.{number}" for number in range(len(shapes))],
        shapes=shapes,
        ready_s=ready_s,
        launched_s=launched_s,
        done_s=done_s,
    )


def rank_step(number: int, num_samples: int = 8, **how: Any) -> RankStep:
    buckets = [bucket_times(0, [[16, 16], [48, 16]], 0.04, 0.05, 0.07), bucket_times(1, [[64, 64]], 0.1, 0.1, 0.13)]
    seconds = {"data": 0.001, "forward": how.pop("forward_s", 0.02), "backward": 0.09, "communication": 0.05}
    seconds |= {"wait": 0.002, "update": 0.004, "other": 0.003}
    edges = pairwise(accumulate(seconds.values(), initial=0.0))
    spans = [Span(part, *edge) for part, edge in zip(PARTS, edges, strict=True)]
    given: dict[str, Any] = {"buckets": buckets, "spans": spans, "backward_began_s": 0.021} | how
    return RankStep(step=number, began_s=0.0, num_samples=num_samples, **given)


def profile(world_size: int = 1, **how: Any) -> Profile:
    given: dict[str, Any] = {
        "version": 1,
        "model": "MLP",
        "num_parameters": 5120,
        "batch": 8 * world_size,
        "world_size": world_size,
        "hosts": [list(range(world_size))],
        "threads": 1,
        "cores": [2],
        "device": "cpu",
        "strategy": "Replicated",
        "hook": None,
        "wire": None,
        "algorithm": "shared memory",
        "runs": "in the foreground",
        "clock": [ClockOffset(offset_s=0.0, error_s=0.0)] * world_size,
        "steps": [[rank_step(3)] * world_size] * 3,
    }
    return Profile(**(given | how))


def test_the_work_of_a_profile_is_what_its_reductions_did_not_take() -> None:
    work = work_of(profile())
    # In the foreground, the second bucket is ready after 0.1 s less the 0.02 s of the first one's reduction.
    assert [bucket[-1].ready_s for bucket in work.buckets] == pytest.approx([0.04, 0.08])
    assert work.buckets[0][0].ready_s == pytest.approx(0.01)  # by its share of the bytes
    assert work.before_s == pytest.approx(0.001 + 0.02 + 0.09 - 0.08)
    assert work.computing_s == pytest.approx(0.118) and work.spread == (1.0, 1.0, 1.0)
    assert work.num_samples == 8 and work.num_bytes == 4 * 5120
    background = work_of(profile(runs="in the background"))
    assert [bucket[-1].ready_s for bucket in background.buckets] == pytest.approx([0.04, 0.1])
    uneven = profile(steps=[[rank_step(1), rank_step(1, forward_s=0.138)], [rank_step(2), rank_step(2)]])
    assert work_of(replace(uneven, world_size=2)).spread == pytest.approx((1.0, 1.0, 1.0, 2.0))
    with pytest.raises(ConfigError, match=r"sent no buckets of gradients: profile one with replica\.kind=bucketed"):
        work_of(profile(steps=[[rank_step(1, buckets=[])]]))
    with pytest.raises(ConfigError, match="no samples were computed with: profile the run again"):
        work_of(profile(steps=[[rank_step(1, num_samples=0)]]))
    strange = replace(bucket_times(0, [[4]], 0.1, 0.1, 0.1), dtype="load")
    with pytest.raises(ConfigError, match="gradients of load: this version of torch has no such numbers"):
        work_of(profile(steps=[[rank_step(1, buckets=[strange])]]))


def test_samples_cores_and_buckets_change_the_work() -> None:
    half = WORK.of_samples(4)
    assert (half.before_s, half.backward_s, half.update_s, half.other_s) == pytest.approx((0.01, 0.015, 0.004, 0.001))
    slow = WORK.slower(3)
    assert slow.computing_s == pytest.approx(3 * WORK.computing_s) and slow.num_samples == 8
    assert [len(bucket) for bucket in WORK.in_buckets(25).buckets] == [1, 2]
    assert [len(bucket) for bucket in WORK.in_buckets(1).buckets] == [1, 1, 1]
    assert [len(bucket) for bucket in WORK.in_buckets(0.5).buckets] == [1, 1, 1]
    merged = WORK.in_buckets(25)
    assert merged.num_bytes == WORK.num_bytes and merged.backward_s == WORK.backward_s


@pytest.mark.usefixtures("in_foreground")
def test_stragglers_are_drawn_from_the_profile_and_more_ranks_meet_more() -> None:
    uneven = replace(WORK, spread=(1.0,) * 9 + (2.0,))
    found = {}
    for num_ranks in (2, 16, 64):
        there = prices(equal_hosts(num_ranks, 1))
        found[num_ranks] = forecast(uneven, Setup(prices=there, batch=8 * num_ranks))
        assert found[num_ranks] == forecast(uneven, Setup(prices=there, batch=8 * num_ranks))
    assert found[2].waiting_s <= found[16].waiting_s <= found[64].waiting_s
    assert found[64].waiting_s == pytest.approx(WORK.computing_s, rel=0.15)
    assert found[2].computing_s == pytest.approx(WORK.computing_s)
    with pytest.raises(ConfigError, match="a batch of 3 on 4 ranks: give at least a sample for each"):
        forecast(WORK, Setup(prices=prices(equal_hosts(4, 1)), batch=3))


def test_ten_thousand_ranks_take_seconds() -> None:
    work = replace(WORK, buckets=gradients(*(17 + n / 4 for n in range(25))))
    began_s = time.perf_counter()
    found = forecast(work, Setup(prices=prices(equal_hosts(10_000, 1)), batch=80_000))
    formula_s = sum(2 * 9999 * LINK.alpha_s + bytes_of(each) * (2 * LINK.beta_s + 1e-10) for each in work.buckets)
    assert found.network_s == pytest.approx(formula_s, rel=0.05)
    uneven = replace(work, spread=(0.9, 1.0, 1.2))
    assert forecast(uneven, Setup(prices=prices(equal_hosts(256, 1)), batch=2048)).waiting_s > 0
    assert time.perf_counter() - began_s < 60


def test_the_naive_guess_is_a_step_of_one_and_bytes_by_rate() -> None:
    across = Setup(prices=prices(equal_hosts(2, 1)), batch=16)
    assert naive_s(WORK, across) == pytest.approx(WORK.computing_s + WORK.num_bytes * LINK.beta_s)
    memory = Setup(prices=prices(((0, 1),), curve=CURVE, algorithm="auto"), batch=16)
    assert naive_s(WORK, memory) == pytest.approx(WORK.computing_s + WORK.num_bytes * 4e-3 / (1 << 24))
    assert naive_s(WORK, Setup(prices=prices(((0,),), algorithm="auto"), batch=8)) == WORK.computing_s


# --- hooks -----------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 192, 96  # whole rows and blocks, so that no padding blurs a formula
NUMEL = ROWS * COLUMNS
KEPT = math.ceil(0.05 * NUMEL)
FORMULAS: list[tuple[Any, float, str]] = [
    (ErrorFeedback(Sign()), NUMEL / 8 + 4 * ROWS, "gathered"),
    (ErrorFeedback(TopK(0.05, warmup_steps=9)), 8 * KEPT, "gathered"),
    (RandomK(0.25), 2 * 4 * NUMEL / 4, "reduced"),
    (DenseStart(ErrorFeedback(PowerSGD(4)), 5), 2 * 4 * 4 * (ROWS + COLUMNS), "reduced"),
]


@pytest.mark.parametrize(("hook", "nbytes", "kind"), FORMULAS)
@pytest.mark.parametrize("num_hosts", [2, 3])
def test_bytes_of_a_hook_are_those_of_its_formula(hook: Any, nbytes: float, kind: str, num_hosts: int) -> None:
    bucket = (Gradient("weight", (ROWS, COLUMNS), torch.float32, 0.03),)
    hosts = equal_hosts(num_hosts, 1)
    one, other = encoding.dispatches([bucket, bucket], hook, hosts, shares_memory=False)
    assert one is other and one.encoding_s > 0  # what is alike is measured once
    found = forecast(replace(WORK, buckets=(bucket, bucket)), Setup(prices=prices(hosts), batch=24), [one, other])
    # Of what is gathered, every host sends its own part to all others, or passes others' on: that is as much.
    times = (num_hosts - 1) / num_hosts if kind == "reduced" else num_hosts - 1
    assert found.link_bytes == pytest.approx(2 * times * nbytes, rel=0.01)
    assert found.encoding_s == pytest.approx(2 * one.encoding_s)


def test_the_ranks_of_a_host_share_what_is_encoded() -> None:
    bucket = (Gradient("weight", (ROWS, COLUMNS), torch.float32, 0.03),)
    of = partial(encoding.dispatches, [bucket], ErrorFeedback(Sign()), ((0, 1), (2, 3)))
    (together,), (apart,) = of(shares_memory=True), of(shares_memory=False)
    assert [call.operation for call in together.calls] == ["sum_in_host", "all_gather"]
    assert together.calls[1].nbytes == pytest.approx(apart.calls[1].nbytes / 2, rel=0.1)
    assert set(encoding.adding_s()) == {"bf16", "fp16", "int8", "int8_stochastic"}


# --- the command -----------------------------------------------------------------------------------------------------


LINKS = ("--rate", "10mbit", "--alpha", "1ms")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on two hosts; what this one has in memory is known."""
    monkeypatch.setattr(question, "measured_here", lambda num_ranks, threads: HERE)
    folder = tmp_path / "sweep" / "two"
    folder.mkdir(parents=True)
    steps = [[rank_step(1, buckets=[bucket_times(0, [[512, 512]], 0.09, 0.09, 0.15)])] * 2] * 2
    profile(2, hosts=[[0], [1]], cores=[2, 2], runs="in the background", steps=steps).write(folder)
    (folder / "config.yaml").write_text(yaml.dump(asdict(Config()), Dumper=yaml.CSafeDumper, sort_keys=False))
    told = {"steps": 1000, "world_size": 2, "global_batch": 16, "samples_per_s": 100.0, "seconds": 160.0}
    (folder / "summary.json").write_text(json.dumps(told))
    return folder


def answered(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["forecast", *map(str, words)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit):
        main(["forecast", *map(str, words)])
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_the_answer_says_what_a_step_takes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = ("--ranks", 4, "--per-host", 1, "--batch", 32, *LINKS)
    said = answered(capsys, run, *there)
    assert "asked:    4 workers on 4 hosts, 0.00956 Gbit/s of payload and 1.00 ms between hosts" in said
    assert re.search(r"step +\d\.\d+ s \(\d\.\d+ s to \d\.\d+ s by windows of the profile\): computing 118 ms, c", said)
    assert "not checked: name runs with a profile" in said
    hooked = answered(capsys, run, *there, "--hook", "powersgd")
    assert "hook=powersgd" in hooked and re.search(r"reductions .*encoding", hooked)


def test_points_that_were_measured_stand_beside_forecast_and_guess(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = answered(capsys, run, run.parent, "--ranks", 2, "--per-host", 1, *LINKS).splitlines()
    row = next(line.split() for line in table if line.startswith("two "))
    measured, asked = read_profile(run), asked_of(read_profile(run))
    forecaster = Forecaster(profile=measured, known=HERE, num_known=2, cores=2, alpha_s=1e-3, rate_bit_s=1e7)
    expected_ms, naive_ms = 1e3 * forecaster.of(asked).step_s, 1e3 * forecaster.naive_s(asked)
    assert row[1:5] == ["2", "170", "ms", "0%"] and float(row[5]) == pytest.approx(expected_ms, rel=0.01)
    assert float(row[7]) == pytest.approx(expected_ms / 170, abs=0.01)
    assert float(row[8]) == pytest.approx(naive_ms, rel=0.01)
    assert float(row[10]) == pytest.approx(naive_ms / 170, abs=0.01)


def test_what_a_forecast_refuses(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = ("--ranks", 2, "--per-host", 1, *LINKS)
    assert "holds no profile.json: run it with profile.steps=5" in refused(capsys, run.parent, *two)
    assert "--rate: fast: give bits per second, e.g. 10gbit or 100mbit" in refused(capsys, run, *two, "--rate", "fast")
    assert "algorithm='rng' is not possible there. Did you mean ring?" in refused(
        capsys, run, *two, "--algorithm", "rng"
    )
    assert "a batch of 1 on 2 ranks: give at least a sample for each" in refused(capsys, run, *two, "--batch", 1)
    assert "--alpha and --rate are of the links between hosts" in refused(capsys, run, "--ranks", 2, "--alpha", "1ms")
    empty, other = run.parent / "empty", run.parent / "other"
    empty.mkdir()
    other.mkdir()
    assert "empty holds no runs: give the folder of a sweep" in refused(capsys, run, empty, *two)
    for name in ("config.yaml", "summary.json"):
        shutil.copy(run / name, other)
    said = answered(capsys, run, run.parent, *two)
    assert "two  " in said and "other has no profile.json: run it with profile.steps=5." in said
    profile(2, model="CNN").write(other)
    assert "other is left out: it trained CNN with 5,120 parameters" in answered(capsys, run, other, *two)
    profile(2, hook="Mine()").write(other)
    assert "other is left out: it used the hook Mine(), and forecasts know" in answered(capsys, run, other, *two)
    (other / "summary.json").write_text("{}")
    assert "other is left out: its summary.json is damaged (it has no world_size)" in answered(capsys, run, other, *two)
    assert "2 hosts: give --alpha and --rate of the links between them" in refused(capsys, run, *two[:4])
    here = answered(capsys, run, run.parent, "--ranks", 2)
    assert "two is left out: 2 hosts: give --alpha and --rate" in here
    profile(2, strategy="Region").write(other)
    assert "was made by Region, which forecasts do not know: give --strategy" in refused(capsys, other, *two)
