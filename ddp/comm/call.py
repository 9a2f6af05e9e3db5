"""A collective call: its number, and the words that messages, warnings and comparisons use for it.

The words are put together only when someone reads them. On the path of a collective that takes microseconds, a
formatted string would be a tenth of the time.

Read before: `settings.py`. Read next: `status.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Call(NamedTuple):
    """One collective call on one rank; equal on all ranks if they call the same."""

    sequence: int
    operation: str
    op: str = ""
    shape: tuple[int, ...] | None = None  # None: may differ by rank
    dtype: torch.dtype | None = None
    name: str = ""  # the caller's label
    how: tuple[object, ...] = ()  # whatever else must agree

    @property
    def label(self) -> str:
        """The caller's label; else the operation and the shape."""
        if self.name:
            return self.name
        return self.operation if self.shape is None else f"{self.operation} of {list(self.shape)}"

    @property
    def range(self) -> str:
        """The name in a profile: the label without a "step 12, " before it, so that the steps add up."""
        step, comma, what = self.label.partition(", ")
        return f"ddp: {what if comma and step.startswith('step ') else self.label}"

    def describe(self) -> str:
        """Returns all that must agree between ranks."""
        words = [self.operation, self.op]
        if self.shape is not None:
            words.append(f"of {list(self.shape)}")
        if self.dtype is not None:
            words.append(str(self.dtype).removeprefix("torch."))
        words += [str(item).removeprefix("torch.") for item in self.how if item not in ("auto", None)]
        if self.name:
            words.append(f"[{self.name}]")
        return f"#{self.sequence} " + " ".join(word for word in words if word)


def disagreement(descriptions: Sequence[bytes]) -> str:
    """Returns which rank called what, if they differ; else ""."""
    if len(set(descriptions)) <= 1:
        return ""
    lines = [f"  rank {rank}: {text.decode(errors='replace').strip()}" for rank, text in enumerate(descriptions)]
    return "the ranks called different collectives; all must call the same in the same order:\n" + "\n".join(lines)
