"""The work of a rank in a profiled step, and when each gradient is ready: medians, without its reductions.

Note "samples". Forward, backward and reading grow with a rank's samples; update and the rest do not. A smaller
share may cost more than in proportion; once processes of that share were measured, their profile is the work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from ddp.errors import ConfigError
from ddp.gradients.bucket import Slot, span
from ddp.gradients.layout import MIB, plan_buckets
from ddp.train.reports.profile import Profile, RankStep


class Gradient(NamedTuple):
    """A parameter's gradient; `ready_s` is seconds of computing since backward began."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ready_s: float

    @property
    def like(self) -> nn.Parameter:
        """Returns a parameter of its shape and type, without memory."""
        return nn.Parameter(torch.empty(self.shape, dtype=self.dtype, device="meta"), requires_grad=False)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one rank in a step.

    Attributes:
        num_samples: of the rank.
        before_s: until the backward begins that sends gradients.
        update_s, other_s: of the optimizer, and of the rest of the step.
        buckets: the gradients of each bucket, in the order in which they are ready.
        spread: seconds of ranks in a step ÷ the median, in the order of size.
    """

    num_samples: float
    before_s: float
    update_s: float
    other_s: float
    buckets: tuple[tuple[Gradient, ...], ...]
    spread: tuple[float, ...] = (1.0,)

    @property
    def backward_s(self) -> float:
        """Returns the length of the backward that sends gradients."""
        return max(gradient.ready_s for bucket in self.buckets for gradient in bucket)

    @property
    def computing_s(self) -> float:
        """Returns the length of a step without communication."""
        return self.before_s + self.backward_s + self.update_s + self.other_s

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all gradients."""
        return sum(map(bytes_of, self.buckets))

    def of_samples(self, num_samples: float) -> Work:
        """Returns the work of another number of samples (note "samples")."""
        ratio = num_samples / self.num_samples
        return replace(self._paced(ratio), num_samples=num_samples, before_s=self.before_s * ratio)

    def slower(self, factor: float) -> Work:
        """Returns the same work on cores that are slower by a factor."""
        parts = {name: getattr(self, name) * factor for name in ("before_s", "update_s", "other_s")}
        return replace(self._paced(factor), **parts)

    def in_buckets(self, bucket_mb: float) -> Work:
        """Returns the same work with buckets that are closed at another size; the first one, at 1 MiB at most."""
        gradients = list(chain.from_iterable(self.buckets))
        slots = [Slot(number, each.name, each.like) for number, each in enumerate(gradients)]
        limits = [int(min(bucket_mb, 1.0) * MIB), int(bucket_mb * MIB)]
        groups = plan_buckets(slots, limits=limits)
        return replace(self, buckets=tuple(tuple(gradients[slot.index] for slot in group) for group in groups))

    def _paced(self, factor: float) -> Work:
        def paced(bucket: Sequence[Gradient]) -> tuple[Gradient, ...]:
            return tuple(each._replace(ready_s=each.ready_s * factor) for each in bucket)

        return replace(self, buckets=tuple(map(paced, self.buckets)))


def bytes_of(bucket: Sequence[Gradient]) -> int:
    """Returns the bytes of a bucket, padding included."""
    return sum(span(each.like) * each.dtype.itemsize for each in bucket)


def work_of(profile: Profile) -> Work:
    """Returns the work of a rank in a profiled step; raises ConfigError as `work_in` does."""
    return work_in(list(chain.from_iterable(profile.steps)), in_foreground=profile.runs == "in the foreground")


def work_in(records: Sequence[RankStep], *, in_foreground: bool) -> Work:
    """Returns the work of a rank in a step, of which there are records of several ranks and steps.

    Raises:
        ConfigError: its gradients were not sent in buckets.
    """
    if not all(record.buckets for record in records):
        raise ConfigError("the profiled run sent no buckets of gradients: profile one with replica.kind=bucketed")
    ready = [_ready_s(record, in_foreground=in_foreground) for record in records]
    ready_s = list(map(median, zip(*ready, strict=True)))
    parts = [record.parts for record in records]
    computed = [math.fsum(each.values()) - each["communication"] - each["wait"] for each in parts]
    num_samples = median(record.num_samples for record in records)
    if min(num_samples, median(computed)) <= 0:
        raise ConfigError("in the profiled steps no samples were computed with: profile the run again")
    last_s = median(map(max, ready))
    return Work(
        num_samples=num_samples,
        before_s=max(0.0, median(each["data"] + each["forward"] + each["backward"] for each in parts) - last_s),
        update_s=median(each["update"] for each in parts),
        other_s=median(each["other"] for each in parts),
        buckets=tuple(_gradients(records[0], ready_s)),
        spread=tuple(sorted(each / median(computed) for each in computed)),
    )


def _ready_s(record: RankStep, *, in_foreground: bool) -> list[float]:
    """Returns by bucket the seconds of computing until it is full: in the foreground without earlier reductions."""
    return [
        bucket.ready_s
        - sum(each.done_s - each.launched_s for each in record.buckets if each.launched_s < bucket.ready_s)
        * in_foreground
        for bucket in record.buckets
    ]


def _gradients(record: RankStep, ready_s: Sequence[float]) -> list[tuple[Gradient, ...]]:
    """Returns the gradients of each bucket. Inside of a bucket they are ready in proportion to their bytes."""
    found, began_s = [], 0.0
    for bucket, ended_s in zip(record.buckets, accumulate(ready_s, max), strict=True):
        dtype = getattr(torch, bucket.dtype, None)
        if dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            raise ConfigError(f"gradients of {bucket.dtype:.20}: this version of torch has no such numbers")
        numels = [math.prod(shape) for shape in bucket.shapes]
        shares = [until / max(1, sum(numels)) for until in accumulate(numels)]
        found.append(
            tuple(
                Gradient(name, tuple(shape), dtype, began_s + share * (ended_s - began_s))
                for name, shape, share in zip(bucket.parameters, bucket.shapes, shares, strict=True)
            )
        )
        began_s = ended_s
    return found
