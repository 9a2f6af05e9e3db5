"""A supply yields steps until the run is over, and begins an epoch anew where the state was moved."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddp.data.orders.sampler import StepPlan
from ddp.train.steps.supply import EpochSupply

PER_EPOCH = 3


class Steps(EpochSupply):
    """Yields three steps an epoch, and notes which epochs were begun, and ended before their time."""

    def __init__(self, **until: Any) -> None:
        self.state = SimpleNamespace(step=0, epoch=0, stopped_by="")
        super().__init__(cast(Any, self.state), cast(Any, None), **until)
        self.heard: list[str] = []

    def _epoch(self) -> Iterator[tuple[StepPlan, str]]:
        self.heard.append(f"begun at {self.state.step}")
        epoch = self.state.epoch
        try:
            for position in range(self.state.step % PER_EPOCH, PER_EPOCH):
                yield StepPlan(epoch, position, 1, ()), f"epoch {epoch}, position {position}"
        except GeneratorExit:
            self.heard.append(f"left at {self.state.step}")

    def _made(self, plan: StepPlan, given: str) -> Any:
        assert given == f"epoch {plan.epoch}, position {plan.position}"
        self.state.step += 1
        self.state.epoch = self.state.step // PER_EPOCH
        return self.state.step

    def close(self) -> None:
        raise AssertionError("a supply is closed by the loop")


@pytest.mark.parametrize(
    ("until", "made", "begun"),
    [
        ({"epochs": None, "num_steps": 5}, 5, ["begun at 0", "begun at 3", "left at 5"]),
        ({"epochs": 2, "num_steps": 100}, 6, ["begun at 0", "begun at 3", "left at 6"]),
        ({"epochs": 1, "num_steps": 2}, 2, ["begun at 0", "left at 2"]),
        ({"epochs": 1, "num_steps": 0}, 0, []),
    ],
)
def test_it_ends_with_the_run(until: dict[str, Any], made: int, begun: list[str]) -> None:
    supply = Steps(**until)
    assert [step.make() for step in supply] == list(range(1, made + 1))
    assert supply.heard == begun


def test_it_ends_after_a_step_that_stops_the_run() -> None:
    supply = Steps(epochs=None, num_steps=100)
    for step in supply:
        if step.make() == 4:
            supply.state.stopped_by = "a callback"
    assert supply.state.step == 4 and supply.heard[-1] == "left at 4"


def test_an_epoch_begins_anew_where_the_state_was_moved() -> None:
    supply, plans, is_moved = Steps(epochs=2, num_steps=100), [], False
    for step in supply:
        plans.append(step.plan[:2])
        step.make()
        if supply.state.step == 5 and not is_moved:
            supply.state.step, supply.state.epoch, is_moved = 1, 0, True
            supply.moved()
    assert plans == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert supply.heard == ["begun at 0", "begun at 3", "left at 1", "begun at 1", "begun at 3", "left at 6"]
