"""Data that can only be read from front to end: their samples are shared by one rule, or share themselves out.

    sample of the stream    0  1  2   3  4  5 │ 6  7  8   9 10 11 │ 12 13 …     positions of an order without an end
    step, B = 6             rank 0  │ rank 1  │ rank 0  │ rank 1  │ rank 0      cut like any other step
    loader process, of 2    0         0         1         1         0           they take turns

Every rank, and each of its loader processes, reads the whole stream, and keeps what stands at its positions. So a step
has the same samples at any number of workers and processes, and a run resumes at a count: it reads up to there again,
or begins at the data's own `state_dict`. Reading must be the cheap part then, as decoding in `collate` makes it.

With sharding="off" the data share themselves out, by rank and by `torch.utils.data.get_worker_info()`. Each process
takes what it is given, in turn; ranks may have unequal numbers.

The end of a stream is unknown: only a schedule trusts its `__len__`. So a rank fetches its next batch before the last
backward of a step, and the totals of the step tell all ranks how many have none. Then:

    join        ranks without samples take part with none, until all streams are at their end
    stop_all    the pass ends as soon as one rank has no batch for the next step; the others' batches are dropped
    raise       it is an error if some ranks end before others
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, cast

from torch.utils.data import IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from ddp.data.loading.fetching import copies_to
from ddp.data.loading.processes import WatchedLoader, appear_as, packed
from ddp.data.loading.source import digest_of
from ddp.data.orders.order import Checksum, Fixed, Order
from ddp.data.orders.sampler import StepPlan, TrainSampler
from ddp.data.orders.sharding import OwnSharding
from ddp.data.orders.steps import SamplerState
from ddp.data.samples import Collate
from ddp.errors import ConfigError
from ddp.process.streams import preserved, seed_generators, stream_seed

_NUM_COMPARED = 4  # first samples of a stream
ENDLESS = 1 << 62  # positions of an epoch, or steps of a run, whose end is not known


class _Endless(Fixed):
    """The order of a stream."""

    def __init__(self) -> None:
        super().__init__(ENDLESS)

    def in_words(self) -> str:
        """Returns the order's name."""
        return "a stream"


class StreamPosition(NamedTuple):
    """Position of a loader process in its stream.

    Attributes:
        number: samples read.
        state: what the data's own `state_dict` returned there; None if they have none.
    """

    number: int = 0
    state: Any = None


class IterableSampler(TrainSampler):
    """Plans steps over a stream, as `TrainSampler` does, without knowing where an epoch ends.

    Args:
        global_batch, rank, world_size, num_shards, micro_size, seed: as in `TrainSampler`.
        shares_itself: the data give each process its own samples.
        num_processes: that read the stream on each rank.
        stated_length: samples of a pass over all ranks, as the data say; None: they do not say, or nothing uses it.
    """

    def __init__(
        self,
        *,
        global_batch: int,
        seed: int,
        shares_itself: bool,
        num_processes: int = 1,
        stated_length: int | None = None,
        **shares: Any,
    ) -> None:
        super().__init__(_Endless(), global_batch=global_batch, seed=seed, **shares)
        self.shares_itself, self._num_processes, self.stated_length = shares_itself, num_processes, stated_length
        self.seen = None
        self.read: dict[int, StreamPosition] = {}  # by this rank's loader processes, until the last committed step
        self.read_after: dict[int, StreamPosition] = {}  # until the step that the loader has handed out
        self._before = 0  # samples of earlier passes

    @property
    def position(self) -> int:
        """Returns how many samples all ranks together have trained on in the whole run."""
        return self._before + self.state.consumed

    def position_of(self, plan: StepPlan) -> int:
        """Returns how many samples the run has trained on before a step."""
        return self._before + plan.position

    def end(self, *, epochs: int | None, num_steps: int | None) -> tuple[int, int]:
        """Returns the most steps that are left of the run, and the position after them; `ENDLESS` if unknown."""
        if num_steps is None:
            return ENDLESS, ENDLESS if epochs is None or self.stated_length is None else epochs * self.stated_length
        return num_steps, self.position + max(0, num_steps) * self.global_batch

    @property
    def num_batches(self) -> int:
        """Returns how many batches of this rank the pass has had."""
        return self.state.consumed // self.global_batch * self.num_micros(self.global_batch)

    def commit(self, plan: StepPlan) -> None:
        """Moves the state past a step that has happened."""
        super().commit(plan)
        self.read = self.read_after

    def end_pass(self, num_samples: int) -> None:
        """Moves the state to the beginning of the next pass.

        Args:
            num_samples: of all ranks, in the pass that is over.
        """
        self._before += num_samples
        self._next = (self.state.epoch + 1) * self.length
        self.read = {}

    def expected(self, epoch: int) -> Checksum | None:
        """Returns None, because the length of a stream is unknown."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns the count of samples, equal on all ranks. `places` are to be saved with it."""
        return {**super().state_dict(), "before": self._before, "num_processes": self._num_processes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state, with its seed."""
        if state.get("order") != self.order.identity:
            raise ConfigError(
                "the state belongs to data with a length, and these are a stream: give the same data, or start without"
            )
        num_processes = state.get("num_processes", self._num_processes)
        if self.shares_itself and num_processes != self._num_processes and state["consumed"]:
            raise ConfigError(
                f"the data share themselves out, and have done so among {num_processes} processes of each worker, and "
                f"now there are {self._num_processes}: resume with as many loader processes, or from the end of a pass"
            )
        self._seed, epoch, consumed = (int(state[name]) for name in SamplerState._fields)
        self._next = epoch * self.length + consumed
        self._before, self._num_steps = int(state["before"]), int(state.get("num_steps", 0))

    def places(self) -> dict[int, tuple[int, Any]]:
        """Returns how far this rank's loader processes have read."""
        return {process: tuple(place) for process, place in self.read.items()}

    def load_places(self, places: Sequence[Any]) -> None:
        """Continues from what `places` returned on each rank.

        Raises:
            ConfigError: the data share themselves out, and did so among another number of ranks.
        """
        if self.shares_itself and len(places) != self.world_size and self.state.consumed:
            raise ConfigError(
                f"the data share themselves out, and have done so among {len(places)} workers; resume with as many, or "
                "leave sharding='off' out"
            )
        mine = places[self.rank if self.shares_itself and self.rank < len(places) else 0]
        self.read = {process: StreamPosition(*place) for process, place in mine.items()}

    @property
    def num_samples(self) -> None:
        """Returns None, because it is unknown."""
        return None


def sampler_of_stream(
    sharding: str | OwnSharding,
    *,
    order: Order | None,
    max_steps: int | None,
    schedule: Any,
    stated_length: int | None,
    global_batch: Any,
    **shares: Any,
) -> IterableSampler:
    """Returns the sampler of a stream.

    Args:
        max_steps: of the run.
        schedule: a function of the samples of the whole run; None: there is none.
        stated_length: as in `IterableSampler`.

    Raises:
        ConfigError: an argument is for data that have a length.
    """
    if max_steps is None and schedule is not None and not stated_length:
        raise ConfigError(
            "schedule: goes by the samples of the whole run, and a stream has an unknown number: give the data a "
            "__len__, or max_steps, or take ddp.optim.TorchSchedule(scheduler, every='epoch'), which needs neither"
        )
    if not isinstance(global_batch, int):
        raise ConfigError(f"global_batch={global_batch!r}: for a stream, give a number of samples")
    if order is not None:
        raise ConfigError(f"order={order.in_words()}: data is a stream, which has its own order; leave it out")
    if shares.get("skip_steps") is not None:
        raise ConfigError("skip_steps: data is a stream, which is read from front to end; leave samples out there")
    if sharding not in ("auto", "sample", "off"):
        raise ConfigError(
            f"sharding={sharding!r}: data is a stream; take 'off' if it shares itself out by rank, or leave it out"
        )
    return IterableSampler(
        global_batch=global_batch, shares_itself=sharding == "off", stated_length=stated_length, **shares
    )


class IterableLoader:
    """Yields the steps of a pass over a stream, with this rank's batches.

        firsts = gather(loader.begin())
        for plan, batches in loader.steps():
            ...                     # until the totals of a step say that the streams have ended
        loader.close()

    Args:
        data: an iterable that can be read again and again.
        sampler: says which samples of the stream, in which parts; the caller commits its plans.
        collate, how: as in `TrainLoader`.

    Attributes:
        num_samples: read and handed out since `begin`.
    """

    def __init__(
        self, data: Iterable[Any], sampler: IterableSampler, *, collate: Collate | None = None, **how: Any
    ) -> None:
        self.sampler, self.num_samples = sampler, 0
        batches = _Batches(data, sampler, collate=collate or default_collate, num_processes=how.get("num_workers", 0))
        self._watched = WatchedLoader(batches, **how)
        self._copies = copies_to(self._watched.device)
        self._fetched: Iterator[_Fetched] = iter(())
        self._ahead: _Fetched | None = None

    def begin(self) -> tuple[str, ...] | None:
        """Fetches the first batch from the sampler's state on.

        Returns:
            Digests of the first samples that were read, equal where ranks read the same stream, as far as both have
            some; None: there is no batch.
        """
        self._fetched, self.num_samples = self._watched.batches(), 0
        self._ahead = self._next()
        return None if self._ahead is None else self._ahead.firsts

    def steps(self) -> Iterator[tuple[StepPlan, Iterator[Any]]]:
        """Yields plans without an end, each with an iterator over the batches that are left of this rank's stream."""
        places = dict(self.sampler.read)
        for plan in self.sampler.plans():
            mine: list[_Fetched] = []
            while self._ahead is not None and len(mine) < len(plan.micros):
                mine.append(self._ahead)
                places[self._ahead.process] = self._ahead.place
                self._ahead = self._next()
            self.num_samples += sum(each.num_samples for each in mine)
            self.sampler.read_after = dict(places)
            both = zip(plan.micros, mine, strict=False)  # the stream may end inside of a step, or of a micro-batch
            micros = tuple(micro._replace(indices=micro.indices[: each.num_samples]) for micro, each in both)
            batches = map(self._copies.finish, [each.batch for each in mine])
            yield plan._replace(micros=micros, is_last=self._ahead is None), batches

    def _next(self) -> _Fetched | None:
        """Fetches a batch, and begins to copy it to the GPU, if there is one."""
        fetched = next(self._fetched, None)
        return None if fetched is None else fetched._replace(batch=self._copies.begin(fetched.batch))

    def close(self) -> None:
        """Ends the loader processes."""
        self._fetched, self._ahead = iter(()), None
        self._watched.close()


# -------------------------------------------------------------------------------------------- in a loader process


class _Fetched(NamedTuple):
    """A batch on its way from a loader process."""

    num_samples: int
    batch: Any
    process: int
    place: StreamPosition  # after it
    firsts: tuple[str, ...]  # digests of the first samples that the process has read


class _Batches(IterableDataset[Any]):
    """The batches of one rank, of which each loader process yields every num_processes-th, packed.

    Args:
        num_processes: 0: the rank itself reads.
    """

    def __init__(self, data: Iterable[Any], sampler: IterableSampler, *, collate: Collate, num_processes: int) -> None:
        self.data, self.sampler, self.collate = data, sampler, collate
        self.num_processes = max(1, num_processes)

    def __iter__(self) -> Iterator[Any]:
        info, sampler = get_worker_info(), self.sampler
        turn = 0 if info is None else info.id
        process = (turn + sampler.num_batches) % self.num_processes if sampler.shares_itself else 0
        if info is not None and sampler.shares_itself:
            appear_as(process)
        elif info is not None:  # so that the data do not share themselves out
            torch_worker._worker_info = None
        keys = (sampler.rank, process) if sampler.shares_itself else ()
        reader = _Reader(self.data, sampler.read.get(process, StreamPosition()), state=sampler.state, keys=keys)
        micros = (micro for plan in sampler.plans() for micro in plan.micros)
        for micro in islice(micros, turn, None, self.num_processes):
            if not sampler.shares_itself:
                reader.drop(micro.indices[0] - reader.count)
            if not (samples := reader.take(len(micro.indices))):
                return
            fetch = partial(self._finished, reader, samples, process)
            yield packed(fetch, enumerate(samples, reader.count - len(samples))) if info is not None else fetch()

    def _finished(self, reader: _Reader, samples: list[Any], process: int) -> _Fetched:
        batch = reader.collated(samples, self.collate)
        return _Fetched(len(samples), batch, process, reader.place(), reader.firsts)


class _Reader:
    """Reads a stream from a place on; its random numbers depend on the sample's number and the pass.

    Args:
        place: where to begin.
        state: seed and pass.
        keys: tell streams apart that are not the same.
    """

    def __init__(self, data: Any, place: StreamPosition, *, state: SamplerState, keys: tuple[int, ...]) -> None:
        self._seed_of_run, self._epoch, self._keys = state.seed, state.epoch, keys
        self.count, self._num_compared = 0, _NUM_COMPARED
        self.firsts: tuple[str, ...] = ()
        if hasattr(data, "set_epoch"):
            data.set_epoch(state.epoch)
        with preserved():
            self._seed()
            if place.state is not None and _has_state(data):
                data.load_state_dict(place.state)
            self._iterator = iter(data)
            self._owner = next((each for each in (data, self._iterator) if _has_state(each)), None)
            if place.state is not None and self._owner is self._iterator:
                cast(Any, self._iterator).load_state_dict(place.state)
        if place.state is None:
            self.drop(place.number)
        self.count = place.number

    def _seed(self) -> None:
        keys = self._keys if self.count >= _NUM_COMPARED else ()  # equal streams must be seen to begin equally
        seed_generators(stream_seed(self._seed_of_run, "iterable", self._epoch, *keys, self.count), device="cpu")

    def take(self, number: int) -> list[Any]:
        """Returns the next samples, fewer at the end of the stream."""
        samples = []
        with preserved():
            for _ in range(number):
                self._seed()
                try:
                    sample = next(self._iterator)
                except StopIteration:
                    break
                samples.append(sample)
                self.count += 1
                if len(self.firsts) < self._num_compared:
                    self._note(sample)
        return samples

    def _note(self, sample: Any) -> None:
        digest = digest_of(sample)
        if digest is None:
            self._num_compared = 0  # of objects that cannot be compared
        else:
            self.firsts = (*self.firsts, digest)

    def collated(self, samples: list[Any], collate: Collate) -> Any:
        """Returns a batch of the samples that were taken last."""
        with preserved():
            first = self.count - len(samples)
            seed_generators(stream_seed(self._seed_of_run, "collation", self._epoch, *self._keys, first), device="cpu")
            try:
                return collate(samples)
            except RuntimeError as error:
                if collate is not default_collate or "stack expects" not in str(error):
                    raise
                raise ConfigError(
                    f"samples {first} to {self.count - 1} of the stream cannot make a batch ({error}): if it gives "
                    "whole batches, let it give single samples; else give a collate that pads them"
                ) from error

    def drop(self, number: int) -> None:
        """Reads samples of other processes, and drops them."""
        while number > 0 and self.take(1):
            number -= 1

    def place(self) -> StreamPosition:
        """Returns the position after the last sample read."""
        # A copy, because the data may change later what they have returned, and a batch is read ahead.
        return StreamPosition(self.count, None if self._owner is None else copy.deepcopy(self._owner.state_dict()))


def _has_state(each: Any) -> bool:
    return hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
