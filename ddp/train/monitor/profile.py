"""Says where the time of a step goes, on each rank: the form of RUN_DIR/profile.json.

    data            the rank waits for samples
    forward, backward, update        it computes; backward without what is exposed of the reductions
    communication   it waits for bytes: what backward has not hidden, and collectives outside of it
    wait            it waits for another rank that has not reached the collective yet
    other           Python between the parts; callbacks run between the steps, and are in none

Each instant of a step is counted once, so the parts add up to the step. Code that uses a profile (`draw step`,
`forecast`) reads it by `read_profile`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from ddp.collectives.cost import Link
from ddp.errors import ConfigError
from ddp.process.files import read_own, write_whole
from ddp.process.records import Count, damage_told, json_object, made, to_json

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
        bytes, numel: of its gradients; offset: bytes of the gradients in the buckets before it.
        parameters, shapes: names and shapes of the parameters, in the bucket's order.
        ready_s, launched_s, done_s: seconds after backward began.
    """

    index: Count
    bytes: Count
    offset: Count
    numel: Count
    dtype: str
    parameters: list[str]
    shapes: list[list[Count]]
    ready_s: float
    launched_s: float
    done_s: float


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One step of one rank.

    Attributes:
        step: its number, from 1.
        began_s: on the clock of rank 0.
        num_samples: of this rank.
        data_s, …, other_s: seconds of the parts; they add up to `step_s`.
        spans: the same, one stretch after another, without gaps.
        backward_began_s: when the backward began that sends gradients, since `began_s`.
        buckets: none where gradients are not sent in buckets.
    """

    step: Count
    began_s: float
    num_samples: Count
    data_s: float
    forward_s: float
    backward_s: float
    communication_s: float
    wait_s: float
    update_s: float
    other_s: float
    backward_began_s: float
    buckets: list[BucketTimes]
    spans: list[Span]

    @property
    def step_s(self) -> float:
        """Returns the length of the step."""
        return math.fsum(self.parts.values())

    @property
    def parts(self) -> dict[Part, float]:
        """Returns the seconds of each part, by its name."""
        return {part: getattr(self, f"{part}_s") for part in PARTS}


@dataclass(frozen=True, kw_only=True)
class NetworkFigures:
    """The figures of the links, and of the memory that ranks of a host share.

    Attributes:
        inside: the link between two ranks of a host; between: that between two hosts.
        gamma_s: seconds to add one byte that has arrived.
        allocated: the sum over a host's ranks of a tensor in their memory, as pairs (bytes, seconds); None where no
            ranks share memory.
    """

    inside: Link
    between: Link
    gamma_s: float
    allocated: list[tuple[Count, float]] | None


@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """Says what is added to a rank's clock to get that of rank 0, and how far off that may be."""

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
        order: names of the parameters in the order in which their gradients become ready.
        network: None for one rank.
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
    order: list[str]
    network: NetworkFigures | None
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
    with damage_told(path, again):
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
    times = [0.0]
    if (network := profile.network) is not None:
        times = [network.gamma_s, *astuple(network.inside), *astuple(network.between)]
    for rank in (rank for step in profile.steps for rank in step):
        times += [*rank.parts.values(), rank.backward_began_s]
        times += [each for bucket in rank.buckets for each in (bucket.ready_s, bucket.launched_s, bucket.done_s)]
        for bucket in rank.buckets:
            names, shapes = bucket.parameters, bucket.shapes
            is_sound = 0 < len(names) == len(shapes) and max(map(len, shapes)) < MOST_DIMENSIONS
            if not is_sound or bucket.numel != sum(map(math.prod, shapes)):
                raise ValueError(f"buckets: parameters, shapes and numel of {bucket.index} do not fit each other")
    if min(times) < 0:
        raise ValueError("a time is below 0")
