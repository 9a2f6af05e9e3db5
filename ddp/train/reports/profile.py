"""The time of a step by parts, on each rank: the format of RUN_DIR/profile.json.

    data            the rank waits for samples
    forward, backward, update        it computes; backward without the exposed part of the reductions
    communication   it waits for bytes: reductions that backward has not hidden, and collectives outside of it
    wait            it waits for another rank that has not reached the collective yet
    other           Python between the parts; callbacks run between the steps, and are in none

Each instant of a step is counted once, so the parts add up to the step. Code that uses a profile (`draw step`,
`forecast`) reads it by `read_profile`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from ddp.errors import ConfigError
from ddp.process.files import read_own, write_whole
from ddp.process.records import Count, damage_as_error, json_object, made, to_json

VERSION = 1
FILE = "profile.json"
MOST_DIMENSIONS = 64
NUM_WINDOWS = 5  # of the profiled steps, whose paces show how steady they were

Part = Literal["data", "forward", "backward", "communication", "wait", "update", "other"]
PARTS: tuple[Part, ...] = get_args(Part)


class Span(NamedTuple):
    """A stretch of a step that belongs to one part; seconds since the step began."""

    part: Part
    began_s: float
    ended_s: float


@dataclass(frozen=True, kw_only=True)
class BucketTimes:
    """One bucket in one step of one rank, as `logging_data()` has it.

    Attributes:
        bytes: of its gradients.
        parameters, shapes: names and shapes of the parameters, in the bucket's order.
        ready_s, launched_s, done_s: seconds after backward began.
    """

    index: Count
    bytes: Count
    dtype: str
    parameters: list[str]
    shapes: list[list[Count]]
    ready_s: float
    launched_s: float
    done_s: float


def bucket_times(logged: Mapping[str, Any]) -> BucketTimes:
    """Returns the times of a bucket out of its `logging_data()`, which has more."""
    return BucketTimes(**{name: logged[name] for name in BucketTimes.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One step of one rank.

    Attributes:
        step: its number, from 1.
        began_s: on the clock of rank 0.
        num_samples: of this rank.
        spans: its parts, one stretch after another, without gaps.
        backward_began_s: when the backward began that sends gradients, since `began_s`.
        buckets: none where gradients are not sent in buckets.
    """

    step: Count
    began_s: float
    num_samples: Count
    backward_began_s: float
    buckets: list[BucketTimes]
    spans: list[Span]

    @property
    def step_s(self) -> float:
        """Returns the length of the step."""
        return self.spans[-1].ended_s

    @property
    def parts(self) -> dict[Part, float]:
        """Returns the seconds of each part, by its name; they add up to the step."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for part, began_s, ended_s in self.spans:
            seconds[part] += ended_s - began_s
        return seconds


@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """The offset from a rank's clock to that of rank 0, and how far off it may be."""

    offset_s: float
    error_s: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The profiled steps of a run.

    Attributes:
        model: the class of the module.
        batch: samples of a step, of all ranks.
        hosts: the ranks of each host; cores: usable cores of each; threads: of a rank.
        strategy: the class of the strategy; hook, wire: how gradients travel between hosts, if not whole.
        algorithm: how all-reduces go (`comm.plan.describe()`).
        runs: "in the background" or "in the foreground" of backward.
        clock: by rank.
        steps: by step, by rank.
    """

    version: Count
    model: str
    num_parameters: Count
    batch: Count
    world_size: Count
    hosts: list[list[Count]]
    threads: Count
    cores: list[Count]
    device: str
    strategy: str
    hook: str | None
    wire: str | None
    algorithm: str
    runs: str
    clock: list[ClockOffset]
    steps: list[list[RankStep]]

    @property
    def step_s(self) -> float:
        """Returns the time for as many samples as the first step has: ranks that wait for each other share one pace."""
        return self._pace_s(self.steps)

    @property
    def windows_s(self) -> list[float]:
        """Returns the same of each of some stretches of the profiled steps, one after another."""
        num = min(NUM_WINDOWS, len(self.steps))
        cuts = [len(self.steps) * part // num for part in range(num + 1)]
        return [self._pace_s(self.steps[begin:end]) for begin, end in pairwise(cuts)]

    def _pace_s(self, steps: Sequence[Sequence[RankStep]]) -> float:
        seconds = max(math.fsum(each.step_s for each in of_rank) for of_rank in zip(*steps, strict=True))
        first, *each = (sum(rank.num_samples for rank in step) for step in (self.steps[0], *steps))
        return seconds * first / sum(each) if sum(each) else seconds / len(steps)

    def write(self, run_dir: Path) -> None:
        """Writes RUN_DIR/profile.json, whole."""
        write_whole(run_dir / FILE, to_json(asdict(self)))


def read_profile(run_dir: Path) -> Profile:
    """Returns the profile of a run.

    Raises:
        ConfigError: there is none, or it is damaged, or of another version.
    """
    path, again = run_dir / FILE, "profile the run again, with profile.steps=5"
    if not path.exists():
        raise ConfigError(f"{run_dir} holds no {FILE}: run it with profile.steps=5")
    with damage_as_error(path, again):
        plain = json_object(read_own(path))
        if (version := plain.get("version")) != VERSION:
            raise ConfigError(f"{path} is of version {version!r:.20}, and version {VERSION} is read here: {again}")
        profile = made(Profile, plain)
        _check(profile)
    return profile


def _check(profile: Profile) -> None:
    """Raises ValueError if the parts of a profile do not fit each other."""
    ranks = sorted(rank for host in profile.hosts for rank in host)
    if len(ranks) != profile.world_size or ranks != list(range(len(ranks))) or not all(profile.hosts) or not ranks:
        raise ValueError(f"hosts: {profile.hosts!r:.40} are not the ranks 0 to {profile.world_size - 1}")
    if not profile.steps or {len(profile.clock), *map(len, profile.steps)} != {len(ranks)}:
        raise ValueError("steps: there are none, or some ranks are missing")
    if len({len(rank.buckets) for step in profile.steps for rank in step}) > 1:
        raise ValueError("buckets: not as many on all ranks")
    if len(profile.cores) != len(profile.hosts):
        raise ValueError("cores: not one number for each host")
    if min(profile.batch, profile.threads, *profile.cores) < 1:
        raise ValueError("batch, threads, cores: one is below 1")
    for rank in (rank for step in profile.steps for rank in step):
        edges = [0.0, *(each for span in rank.spans for each in (span.began_s, span.ended_s))]
        if not rank.spans or edges != sorted(edges):
            raise ValueError("spans: there are none, or they do not stand one after another")
        times = [rank.backward_began_s]
        for bucket in rank.buckets:
            times += [bucket.ready_s, bucket.launched_s, bucket.done_s]
            names, shapes = bucket.parameters, bucket.shapes
            is_sound = 0 < len(names) == len(shapes) and max(map(len, shapes)) < MOST_DIMENSIONS
            if not is_sound or bucket.bytes < sum(map(math.prod, shapes)):
                raise ValueError(f"buckets: parameters, shapes and bytes of {bucket.index} do not fit each other")
        if min(times) < 0:
            raise ValueError("a time is below 0")


# --- A step of each rank is divided into its parts, each instant counted once -----------------------------------------
#
#     exposed     the rank's own thread (on a GPU, its stream) is in a collective, or waits for one in the background
#                   wait             … and the collective has begun here, and not on all ranks yet
#                   communication    … the rest of it, also the computation of a hook
#     a phase     data, forward, backward, update: as far as it is not exposed
#     other       neither
#
# A collective in the background that is not waited for costs no extra time: backward hides it.


Key = tuple[int, int]
"""The number of a call, and how many others of that number came before it: inside of a chain all have one number."""


class Phase(NamedTuple):
    """A phase of a step on one rank."""

    name: str
    began_s: float
    ended_s: float


class CallTimes(NamedTuple):
    """A call on one rank.

    Attributes:
        key: the same on all ranks; None for one that no other rank makes: a message, or a chain, whose calls
            follow by themselves.
    """

    key: Key | None
    began_s: float
    ended_s: float


class RawStep(NamedTuple):
    """The record of one rank in one step, by one clock.

    Attributes:
        exposed: when its thread was in a collective, or waited for one.
    """

    began_s: float
    ended_s: float
    phases: Sequence[Phase]
    calls: Sequence[CallTimes]
    exposed: Sequence[tuple[float, float]]


def last_begun(ranks: Sequence[RawStep]) -> dict[Key, float]:
    """Returns when the last rank has begun each call."""
    last: dict[Key, float] = {}
    for step in ranks:
        for call in step.calls:
            if call.key is not None:
                last[call.key] = max(call.began_s, last.get(call.key, call.began_s))
    return last


def spans_of(step: RawStep, last_s: Mapping[Key, float]) -> list[Span]:
    """Returns the parts of a step, one stretch after another, without gaps.

    Args:
        last_s: when the last rank has begun each call.
    """
    stretches: list[tuple[float, float, Phase | CallTimes | None]] = [
        *((phase.began_s, phase.ended_s, phase) for phase in step.phases),
        *((call.began_s, call.ended_s, call) for call in step.calls),
        *((began_s, ended_s, None) for began_s, ended_s in step.exposed),
    ]
    stretches.sort(key=lambda each: each[0])
    moments = {moment for each in stretches for moment in each[:2]} | set(last_s.values())
    edges = [step.began_s, *sorted(each for each in moments if step.began_s < each < step.ended_s), step.ended_s]
    spans: list[Span] = []
    ahead, now = iter([*stretches, (step.ended_s, step.ended_s, None)]), []
    following = next(ahead)
    for edge_s, next_s in pairwise(edges):
        while following[0] <= edge_s:
            now.append(following)
            following = next(ahead)
        now = [each for each in now if each[1] > edge_s]
        part = _part([each[2] for each in now], edge_s, last_s)
        began_s, ended_s = edge_s - step.began_s, next_s - step.began_s
        if spans and spans[-1].part == part:
            began_s = spans.pop().began_s
        spans.append(Span(part, began_s, ended_s))
    return spans


def _part(under_way: Sequence[Phase | CallTimes | None], now_s: float, last_s: Mapping[Key, float]) -> Part:
    """Returns the part that a moment belongs to.

    Args:
        under_way: phases, calls and exposures (None), in the order in which they have begun.
    """
    if None in under_way:
        call = next((each for each in reversed(under_way) if isinstance(each, CallTimes)), None)
        return "wait" if call is not None and call.key is not None and now_s < last_s[call.key] else "communication"
    names: list[Part] = ["data", "forward", "backward", "update"]
    running = [each.name for each in under_way if isinstance(each, Phase)]
    return next((name for name in names if name in running), "other")
