"""Another answer to the question which parameters a backward uses.

    StaticGraph    `static_graph`: the first step shows how many gradients every later one computes

Note "static graph". Under re-entrant checkpointing a parameter that is used twice gets two gradients, in two backwards
inside the real one, and nothing in the graph announces that. If the graph is the same in every step, the first step
shows how many there are: it launches all buckets at its end, and later steps know how many gradients to wait for.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.errors import UnusedParameters
from ddp.gradients.bucket import Slot
from ddp.gradients.layout import Layout
from ddp.gradients.totals import StepFlags
from ddp.replica.settlement import Usage, Use


@dataclass
class _Graph:
    """Remembers the first step over a graph: for each set of parameters that are trained together, another one.

    Attributes:
        times: by the parameter's id, how many gradients every backward computes; None before the first one.
        never: names of the parameters that no rank has used; None as long as none was missing.
    """

    times: Counter[int] | None = None
    never: frozenset[str] | None = None


class StaticGraph(Usage):
    """Expects in every step as many gradients of each parameter as in the first one (note "static graph")."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self._graphs: dict[frozenset[int], _Graph] = {}  # by the ids of the parameters
        self.never: Set[str] = frozenset()
        self._graph, self._is_first = _Graph(), False
        self._changed: list[str] = []

    def begin(self, layout: Layout) -> StaticGraph:
        step = copy.copy(self)
        step._graph = self._graphs.setdefault(frozenset(layout.slot_of), _Graph())
        step.never, step._is_first = step._graph.never or frozenset(), False
        step._changed = []  # what is not as in the first step
        return step

    def expected(self, layout: Layout) -> Mapping[int, int]:
        times = self._graph.times
        return dict.fromkeys(layout.slot_of, sys.maxsize) if times is None else times

    def must_compare(self, layout: Layout, missing: Sequence[Slot], computed: Callable[[], Iterable[Tensor]]) -> bool:
        times = Counter(map(id, computed()))
        if self._graph.times is None:
            self._graph.times, self._is_first = times, True
        self.varies = self._is_first
        self._changed = [
            f"{slot.name} ({slot.index}) got {times[each]} gradients, and {self._graph.times[each]} in the first step"
            for each, slot in layout.slot_of.items()
            if times[each] != self._graph.times[each]
        ]
        return bool(missing if self._is_first else self._changed)  # what is missing as in the first step is known

    def used_by_none(
        self, layout: Layout, missing: Collection[Slot], undefined: Collection[Slot], verdicts: StepFlags
    ) -> list[Slot]:
        if self._graph.never is not None and not verdicts.has_undefined:
            return [slot for slot in layout.slots if slot.name in self._graph.never]
        uses = self._greatest_uses(layout.slots, missing, undefined)
        if self._graph.never is None:
            self._graph.never = frozenset(slot.name for slot in layout.slots if uses[slot.index] is Use.NONE)
        return [slot for slot in layout.slots if uses[slot.index] is not Use.GRADIENT]

    def unused_error(self, missing: Sequence[Slot] | None) -> None:
        """Raises UnusedParameters, on every rank, if the graph of any rank is another one than in the first step."""
        everyone = all_gather_object(self._comm, self._changed)
        if any(everyone):
            lines = [f"  rank {rank}: {', '.join(each) or 'none'}" for rank, each in enumerate(everyone)]
            raise UnusedParameters(
                "Your training graph has changed in this iteration. With static_graph=True every step must use the "
                "same parameters equally often:\n" + "\n".join(lines) + "\nPass find_unused_parameters=True instead"
            )
