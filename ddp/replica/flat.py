"""A flat: parameters side by side in one memory, of which each rank keeps and updates a slice.

    memory    │ weight ············ │ bias │ weight ······················ │ bias │     laid out like their bucket
    slices    │ rank 0                │ rank 1                │ rank 2             │     at blocks of the norms

Gradients lie in the bucket as parameters do here, so that a slice of the one belongs to the same slice of the other.
The memory is the same for the whole training (`strategies/sharded.py`), or new for each gathering (`units.py`).

Note "absent". Without its memory a parameter keeps its shape, and every read gives NaN, because it is one number that
is expanded. Torch refuses most writes to it, and the next gathering refuses the rest. One to whole parameters, such as
a forward's, is refused when they are released, because the slice would not have it: `keep` takes it in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddp.comm.call_queue import Work
from ddp.errors import ConfigError
from ddp.gradients.bucket import Bucket, with_own_storage

if TYPE_CHECKING:
    from ddp.comm.communicator import Communicator


class Flat:
    """Parameters of a bucket, adjacent in one memory, of which this rank updates a slice. Collective to make.

    Args:
        bucket: says where in the memory each parameter lies.
        bounds: where each rank's slice begins, and where the last one ends.
        memory: in which the parameters always are; None: they can be released.

    Attributes:
        start, stop: of this rank's slice.
        whole: the memory; None while it is released.
        mine: [stop − start], the slice.
    """

    def __init__(
        self, comm: Communicator, bucket: Bucket, bounds: Sequence[int], memory: Tensor | None = None
    ) -> None:
        self._comm, self.bucket, self.bounds, self._memory = comm, bucket, bounds, memory
        number = comm.slices[comm.rank]
        self.start, self.stop = bounds[number], bounds[number + 1]
        self._gradient: Tensor | None = None
        self._work: Work[Tensor] | None = None  # a gathering in flight
        self._noted: list[tuple[int, int]] = []  # versions and addresses of parameters that nothing has written to
        like = bucket.slots[0].parameter
        self.dtype, self.device = like.dtype, like.device
        with torch.inference_mode(False):
            self._read = torch.stack([number_read(like)] * len(bucket.slots))  # from parameters that are released
        self.whole: Tensor | None = self._new() if memory is None else memory
        self.take_in()
        mine = self.whole[self.start : self.stop]
        self.mine = mine.clone() if memory is None else mine
        self._noted = self._seen()

    def _new(self) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(self.bounds[-1], dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def take_in(self) -> None:
        """Moves parameters to the memory that are elsewhere."""
        assert self.whole is not None
        for slot, view in zip(self.bucket.slots, self.bucket.views_of(self.whole), strict=True):
            if slot.parameter.data_ptr() != view.data_ptr() or slot.parameter.stride() != view.stride():
                view.copy_(slot.parameter)
                slot.parameter.data = view if self._memory is None else with_own_storage(view)

    def gather(self, label: str) -> None:
        """Makes the parameters those of all ranks' slices. Collective.

        Raises:
            ConfigError: the program has written to one while it was released.
        """
        if self._work is None:
            self._comm.all_gather_(self._taken(), self.bounds, label=label)
        else:
            self._work.wait()
            self._work = None

    def begin_gathering(self, label: str) -> None:
        """Begins what the next call of `gather` ends. Collective."""
        self._work = self._comm.all_gather_(self._taken(), self.bounds, async_op=True, label=label)

    def _taken(self) -> Tensor:
        """Returns the memory of the parameters, which they have then."""
        if self.whole is None:
            self._refuse_written()
            self.whole = self._new()
            self.whole[self.start : self.stop] = self.mine
            for slot, view in zip(self.bucket.slots, self.bucket.views_of(self.whole), strict=True):
                slot.parameter.data = view
            self._noted = self._seen()
        return self.whole

    def release(self) -> None:
        """Gives the memory back; the parameters read as NaN.

        Raises:
            ConfigError: the program has written to one since it was gathered.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self.whole is not None and self._memory is None:
            self._refuse_written()
            self.whole = None
            for slot, number in zip(self.bucket.slots, self._read, strict=True):
                slot.parameter.data = absent(slot.parameter, number)
            self._noted = self._seen()

    @property
    def is_whole(self) -> bool:
        """Returns True if the parameters can be read."""
        return self.whole is not None and self._work is None

    def _seen(self) -> list[tuple[int, int]]:
        return [(slot.parameter._version, slot.parameter.data_ptr()) for slot in self.bucket.slots]

    def _refuse_written(self) -> None:
        """Finds conversions, and writes that torch does not refuse.

        A fill of a released `parameter.data` changes no version; on a GPU, to look at the number would take a wait.
        """
        before, self._noted = self._noted, self._seen()
        can_look = self.whole is None and self.device.type == "cpu"
        filled = ~self._read.isclose(number_read(self._read), equal_nan=True) if can_look else [False] * len(before)
        for number, slot in enumerate(self.bucket.slots):
            if slot.parameter.dtype is not self.dtype:
                raise ConfigError(
                    f"{slot.name} was {self.dtype} and is {slot.parameter.dtype} since strategy='fully_sharded' was "
                    "made: convert the model first"
                )
            if before[number] != self._noted[number] or filled[number]:
                self._read.fill_(number_read(self._read))
                raise ConfigError(
                    f"{slot.name} was written to outside of `with model.whole():`, which has changed no rank's slice: "
                    "write inside, the same on all ranks (the max_norm of an embedding writes in forward)"
                )

    @property
    def version(self) -> int:
        """Returns a number that grows whenever the slice is written to."""
        return self.mine._version

    @torch.no_grad()
    def keep(self) -> None:
        """Takes this rank's slice of what the program has written to the parameters."""
        self.take_in()
        if self.whole is not None and not torch.equal(self.mine, written := self.whole[self.start : self.stop]):
            self.mine.copy_(written)
        self._noted = self._seen()

    def slice_of(self, values: Mapping[str, Tensor | None], dtype: torch.dtype, *, what: str) -> Tensor:
        """Returns this rank's slice of values that rank 0 has for the parameters, laid out as these. Collective.

        The slice is a part of memory for all of the values.

        Args:
            values: by name of the parameter; None counts as zeros.
            what: for messages.
        """
        whole = torch.zeros(self.bounds[-1], dtype=dtype, device=self.device)
        if self._comm.rank == 0:
            for slot, view in zip(self.bucket.slots, self.bucket.views_of(whole), strict=True):
                if (value := values[slot.name]) is not None:
                    view.copy_(value)
        return self._comm.broadcast(whole, label=f"{what} of {self.bucket.label}")[self.start : self.stop]

    def give_up(self) -> None:
        """Leaves each parameter in its own memory."""
        for slot in self.bucket.slots:
            slot.parameter.data = slot.parameter.detach().clone()

    @property
    def gradient(self) -> Tensor:
        """The gradient of the slice, [stop − start]; uninitialized after `drop_gradient`."""
        if self._gradient is None:
            self._gradient = torch.empty_like(self.mine)
        return self._gradient

    def drop_gradient(self) -> None:
        """Frees the gradient's memory: in the next forward, activations need it."""
        self._gradient = None
        self.bucket.give_back(self.mine[:0].clone())


def is_absent(tensor: Tensor) -> bool:
    """Returns True for a tensor of `absent` itself."""
    return getattr(tensor, "is_absent", False)


def number_read(like: Tensor) -> Tensor:
    """Returns what a released parameter like this reads as: NaN, or 1 for whole numbers, which have none."""
    return torch.full((), math.nan if like.is_floating_point() else 1, dtype=like.dtype, device=like.device)


def absent(like: Tensor, number: Tensor | None = None) -> Tensor:
    """Returns a tensor like a parameter, all of whose elements are one number (note "absent").

    Args:
        number: None: a new one of `number_read`.
    """
    with torch.inference_mode(False):
        number = number_read(like) if number is None else number
        found = number.as_strided(like.shape, (0,) * like.dim())
    found.is_absent = True  # type: ignore[attr-defined]
    return found
