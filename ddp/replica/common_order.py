"""One order on all ranks: what they gather and reduce in a pass through a model whose parameters are in slices.

    forward      use root, use unit 0, use unit 1, use unit 2, end
    backward     use unit 2, reduce bucket 0, use unit 1, reduce bucket 1, …, end

Each event is a collective, so all ranks must have them in one order. In the first pass of a kind every rank announces
each of its events to all others, before it, and records it. Later passes of this kind only record. Before each update
the ranks compare a hash of their collectives, because units of one size would be exchanged silently. A rank without
samples repeats what was recorded; or, in such a first pass, what the others announce.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ddp.comm.objects import all_gather_object
from ddp.errors import CollectiveMismatch, ReplicaMismatch
from ddp.replica.autograd import uncompiled

if TYPE_CHECKING:
    from ddp.comm.communicator import Communicator


class Event(NamedTuple):
    """An event that all ranks have together in a pass: they "use" a unit, "reduce" a bucket, or "end" the pass."""

    what: str
    number: int = 0


END = Event("end")


class Pass(NamedTuple):
    """A kind of pass.

    Attributes:
        is_last: of a backward, it ends a step; of a forward, a backward follows.
    """

    is_backward: bool
    is_training: bool
    is_last: bool


class CommonOrder:
    """The events of a model's passes, by kind of pass.

    Args:
        title: returns the name of a unit, by its number.

    Attributes:
        events: those of the running pass so far, or of the last one.
    """

    def __init__(self, comm: Communicator, title: Callable[[int], str]) -> None:
        self._comm, self._title = comm, title
        self._known: dict[Pass, list[Event]] = {}
        self._kind: Pass | None = None  # of the running pass
        self._follows = False
        self.events: list[Event] = []
        self._used: set[int] = set()
        self._hash = 0  # of the collectives since the last comparison

    @property
    def what_runs(self) -> str:
        """Returns "backward" or "forward", for messages."""
        return "backward" if self._kind is not None and self._kind.is_backward else "forward"

    @property
    def used_last(self) -> list[int]:
        """Returns the numbers of the units of the pass, the one whose last use is the latest first."""
        return list(dict.fromkeys(event.number for event in reversed(self.events) if event.what == "use"))

    @property
    def coming(self) -> int | None:
        """Returns the number of the unit that the pass will use next, if that is known."""
        known = self._known.get(self._kind, ()) if self._kind is not None else ()
        return next((event.number for event in known[len(self.events) :] if event.what == "use"), None)

    def has_used(self, number: int) -> bool:
        """Returns True if the running pass has used a unit."""
        return number in self._used

    def begin(self, kind: Pass) -> None:
        """Begins a pass, and ends the one before."""
        self.end()
        self._kind, self.events, self._used = kind, [], set()

    def end(self) -> None:
        """Ends a pass, whose order is known from now on. Collective in the first pass of its kind."""
        kind, self._kind = self._kind, None
        if kind is not None and self.events and kind not in self._known:
            self._agree(END)
            self._known[kind] = self.events

    def cancel(self) -> None:
        """Ends a pass that has failed, and whose order nobody knows."""
        self._kind = None

    def note(self, event: Event) -> None:
        """Records an event of the running pass, before it. Collective in the first pass of its kind."""
        if event.what == "use":
            self._used.add(event.number)
        else:
            self.began(event)
        if self._kind is not None and not self._follows:
            self.events.append(event)
            if self._kind not in self._known:
                self._agree(event)

    def follow(self, kind: Pass, act: Callable[[Event], None]) -> None:
        """Has the events of a pass for which this rank has no samples. Collective.

        Args:
            act: takes part in an event.
        """
        self.begin(kind)
        self._follows = True
        try:
            known = self._known.get(kind)
            for event in iter(lambda: self._agree(None), END) if known is None else known:
                self.events.append(event)
                act(event)
        except CollectiveMismatch as error:
            raise ReplicaMismatch(
                f"this rank has no samples, and has repeated the {self.what_runs} that it knows, but others compute "
                "another: call the model once for each batch, and its units in one order; or give all ranks as many "
                "batches"
            ) from error
        finally:
            self._follows, self._kind = False, None
        if self.events:
            self._known.setdefault(kind, self.events)

    def began(self, event: Event) -> None:
        """Hashes the collective of an event, which this rank begins."""
        self._hash = zlib.crc32(repr(tuple(event)).encode(), self._hash) % 2**20  # float64 adds such squares exactly

    def hashed(self) -> list[float]:
        """Returns two numbers, of which all ranks take the sums to `compare`."""
        return [self._hash, self._hash**2]

    def compare(self, total: float, squares: float) -> None:
        """Compares what the ranks have begun since the last comparison.

        Args:
            total, squares: the sums of `hashed` over the ranks.

        Raises:
            ReplicaMismatch: they differ, on every rank.
        """
        self._hash = 0
        if int(squares) * self._comm.world_size != int(total) ** 2:
            raise ReplicaMismatch(
                "the ranks have used units in different orders since the last update, so that they had wrong weights: "
                "let each rank call the same parts of the model in one order, and resume from the last checkpoint"
            )

    @uncompiled
    def _agree(self, mine: Event | None) -> Event:
        """Returns the event that all ranks with samples announce.

        Raises:
            ReplicaMismatch: they announce several.
        """
        is_use = mine is not None and mine.what == "use"
        label = f"{self.what_runs} of {self._title(mine.number)}" if mine is not None and is_use else "order of units"
        found: Sequence[Event | None] = all_gather_object(self._comm, mine, label=label)
        known = {rank: Event(*each) for rank, each in enumerate(found) if each is not None}
        if len(set(known.values())) > 1:
            words = ", ".join(f"rank {rank} {self._in_words(event)}" for rank, event in known.items())
            raise ReplicaMismatch(
                f"the ranks use units in different orders: {words}. Let each rank call the same parts of the model in "
                "one order"
            )
        return next(iter(known.values()), END)

    def _in_words(self, event: Event) -> str:
        if event.what == "use":
            return f"uses {self._title(event.number)}"
        return f"reduces bucket {event.number}" if event.what == "reduce" else "has ended"
