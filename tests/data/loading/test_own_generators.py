"""Generators that belong to a data set draw by seed, epoch and sample, wherever a sample is read.

Tests: ddp/data/loading/source.py.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import ddp
from ddp.comm.communicator import Communicator
from ddp.data.loading.fetching import Generators
from ddp.data.loading.loader import TrainLoader
from ddp.data.loading.source import UNKEYED, fingerprint, source_of
from ddp.data.orders.sampler import TrainSampler
from ddp.data.samples import Transformed
from ddp.train.arguments import FitArguments, inputs_of, refuse_disagreement
from recipes.tutorial.simulated import SimulatedNetwork

GLOBAL = np.random.default_rng(5)


class Holds:
    """A data set of what a function draws."""

    def __init__(self, draw: Any, *others: Any) -> None:
        self.draw, self.others = draw, others

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, float(self.draw()), *(float(other()) for other in self.others)]).double()


class Compose:
    """Is seeded as albumentations is, and makes its generator anew then."""

    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.set_random_seed(3)

    def set_random_seed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self) -> float:
        return self.rng.random()


class Private:
    """Has a generator in a slot of a mangled name."""

    __slots__ = "__rng"

    def __init__(self) -> None:
        self.__rng = np.random.RandomState(5)

    def __call__(self) -> float:
        return self.__rng.rand()


def beside_an_unbound_variable() -> Any:
    def draw(rng: Any = np.random.RandomState(5)) -> float:  # noqa: B008 (where a search has to look)
        return rng.rand() if rng else later

    if not draw:
        later = 0.0
    return draw


class Inside:
    """Has a generator further in, and one in its class."""

    shared = random.Random(4)

    def __init__(self) -> None:
        self.parts = {"a": [(), (np.random.default_rng(1),)]}

    def __call__(self) -> float:
        return self.parts["a"][1][0].random() + self.shared.random()


def by_torch() -> Any:
    generator = torch.Generator().manual_seed(2)
    return lambda: torch.rand((), generator=generator)


def by_global() -> float:
    return _neighbour()


def _neighbour() -> float:
    return GLOBAL.random()


def noisy(rng: Any, samples: list[Any]) -> Any:
    return torch.stack(samples) + rng.random()


DRAWS = {
    "NumPy's": lambda: np.random.default_rng(0).random,
    "MT19937": lambda: np.random.Generator(np.random.MT19937(0)).random,
    "RandomState": lambda: np.random.RandomState(0).rand,
    "Python's": lambda: random.Random(0).random,
    "torch's": by_torch,
    "albumentations'": Compose,
    "further in": Inside,
    "in a private slot": Private,
    "beside an unbound variable": beside_an_unbound_variable,
    "of a module": lambda: by_global,
    "in a partial": lambda: partial(lambda rng: rng.random(), np.random.default_rng(0)),
}


def read(data: Any, *, world_size: int, num_workers: int, collate: Any = None, start: int = 0) -> list[Any]:
    """What two epochs give, over all ranks, sorted by epoch and sample."""
    rows = []
    for rank in range(world_size):
        sampler = TrainSampler(len(data), global_batch=4, num_shards=4, rank=rank, world_size=world_size, seed=3)
        sampler.load_state_dict({**sampler.state_dict(), "epoch": start})
        loader = TrainLoader(data, sampler, num_workers=num_workers, collate=collate)
        for epoch in range(start, 2):
            for plan, micros in loader.epoch():
                rows += [(epoch, *row) for batch in micros for row in batch.tolist()]
                sampler.commit(plan)
        loader.close()
    return sorted(rows)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.quick(2)
def test_a_sample_draws_the_same_wherever_it_is_read_and_each_another(name: str) -> None:
    rows = read(Holds(DRAWS[name]()), world_size=1, num_workers=0)
    assert len({row[2] for row in rows}) == 24
    assert read(Holds(DRAWS[name]()), world_size=2, num_workers=0) == rows
    assert read(Holds(DRAWS[name]()), world_size=1, num_workers=2) == rows
    assert read(Holds(DRAWS[name]()), world_size=1, num_workers=0, start=1) == rows[12:]  # a resumed run


def test_generators_of_one_data_set_draw_apart_and_go_on_as_if_nothing_was_read() -> None:
    one, other, third = (np.random.default_rng(0) for _ in range(3))
    data = Transformed(Holds(one.random), lambda row: row + other.random())
    rows = read(Holds(one.random, other.random), world_size=1, num_workers=0)
    assert all(row[2] != row[3] for row in rows)
    assert len({row[1] for row in read(data, world_size=1, num_workers=0)}) == 24
    assert one.random() == other.random() == third.random()


def test_a_collate_function_s_own_generator_draws_by_the_batch() -> None:
    collate = partial(noisy, np.random.default_rng(0))
    rows = [read(Holds(float), world_size=1, num_workers=each, collate=collate) for each in (0, 2)]
    assert rows[0] == rows[1] and len({row[2] for row in rows[0]}) == 24


def test_the_process_s_generators_and_long_lists_are_not_searched() -> None:
    data = Holds(random.randint, random.random, np.random.rand)
    data.files = [object() for _ in range(10_000)]  # type: ignore[attr-defined]
    assert not Generators(data, torch.rand, [random.SystemRandom()])._found


class Hidden(Holds):
    """Draws what nobody can find."""

    def __init__(self) -> None:
        super().__init__(iter(range(1000)).__next__)


def test_a_generator_that_is_not_found_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    assert fingerprint(source_of(Hidden(), what="data")) == UNKEYED
    alone = Communicator(SimulatedNetwork(1).transport(0))
    for num_workers in (0, 2):  # of which two draw the same, also on one rank
        model = torch.nn.Linear(1, 1)
        optimizer, reading = torch.optim.SGD(model.parameters(), lr=0.1), ddp.Reading(num_workers=num_workers)
        how = {"loss": torch.nn.functional.mse_loss, "global_batch": 1, "epochs": 1, "reading": reading}
        given = FitArguments(model=model, data=Hidden(), optimizer=optimizer, **how)
        refuse_disagreement(alone, given, inputs_of(given, alone), {})
        assert ("draw from a generator that was not found" in caplog.text) == bool(num_workers)
    for draw in DRAWS.values():
        first, again = (fingerprint(source_of(Holds(draw()), what="data")) for _ in range(2))
        assert first == again != UNKEYED
