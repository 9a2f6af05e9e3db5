"""The fully sharded strategy, where ranks have different work, where one is lost, and in one run after another.

What every strategy must do is in `test_strategy_matrix.py`, `test_any_checkpoint.py`, `test_strategies.py` and others;
what programs may do around a step in `tests/replica/test_units.py`.

Tests: ddp/strategies/fully_sharded.py.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import grouped
from members import OPTIMIZERS, Losses, bits_of, cnn, fitted, flat, gpt, groups_of, mlp, samples
from ranks import collect, run_ranks, start_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.comm import connect
from ddp.errors import CollectiveMismatch, ConfigError, Diverged, PeerLost, ReplicaMismatch, UnusedParameters
from ddp.gradients import ErrorFeedback, PowerSGD, TopK
from ddp.replica.units import dissolve_units
from ddp.setting import Setup, refuse
from ddp.strategies import step
from ddp.strategies.fully_sharded import FullySharded

FULLY = "fully_sharded"

# --- different work --------------------------------------------------------------------------------------------------


def made(make: Any, kind: str = "sgd", dtype: torch.dtype = torch.float64) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    module = make().to(dtype)
    return module, OPTIMIZERS[kind](groups_of(module))


class CallsTwice(ddp.Task):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        scores, others = model(batch[0]), model(batch[0] / 2)
        return (F.cross_entropy(scores, batch[1], reduction="sum") + (scores - others).square().sum(), len(batch[1]))


def without_a_second_call() -> str:
    ddp.init(abort_s=5)
    module, optimizer = made(mlp)
    try:
        how = {"global_batch": 9, "micro_size": 1, "max_steps": 5}
        fitted(module, samples("mlp"), optimizer, strategy=FULLY, loss=CallsTwice(), **how)
    except (ReplicaMismatch, CollectiveMismatch) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


def test_a_rank_without_samples_says_that_it_follows_one_call_of_the_model() -> None:
    said = run_ranks(without_a_second_call, 2)
    assert any(each.startswith("ReplicaMismatch: this rank has no samples, and has repeated") for each in said), said


class Evaluates(ddp.Callback):
    """Keeps each evaluation's results, and the model's outputs for some samples."""

    def __init__(self, inputs: Tensor) -> None:
        self._inputs = inputs
        self.seen: list[Tensor] = []

    def evaluated(self, state: ddp.TrainState) -> None:
        self.seen.append(torch.tensor([*state.evaluation.values()]))
        self.seen.append(ddp.predict(state.model, self._inputs, batch_size=2).float())


def uneven(word: str, make: Any, **how: Any) -> tuple[Tensor, list[Tensor]]:
    """Trains and evaluates with batches that the ranks cannot share evenly."""
    module, optimizer = made(make)
    if make is gpt:
        for each in module.modules():
            if isinstance(each, nn.Dropout):
                each.p = 0.0
        how["loss"] = ddp.LanguageModel()
    inputs, targets = samples("gpt" if make is gpt else "cnn")
    evaluates, losses = Evaluates(inputs[:7]), Losses()
    how = {"max_steps": 12, "test_data": (inputs[:7], targets[:7]), **how}
    how["evaluation"] = ddp.Evaluation(every_steps=5, every_epochs=None, batch=2)
    fitted(module, (inputs, targets), optimizer, strategy=word, callbacks=[evaluates, losses], **how)
    return flat(module), [torch.tensor(losses.seen), *evaluates.seen]


UNEVEN: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "micro-batches": {"micro_size": 1, "global_batch": 10},  # the last batch of an epoch has 6 samples
    "no samples": {"micro_size": 1, "global_batch": 9},
    "accumulated": {"micro_size": 2, "global_batch": 7},
}


def with_different_work() -> None:
    comm = ddp.init(abort_s=30)
    for make in (mlp, cnn, gpt):
        for name, how in UNEVEN.items():
            expected, wanted = uneven("mirrored", make, **how)
            found, seen = uneven(FULLY, make, **how)
            error = (found - expected).norm() / expected.norm()
            assert error <= 1e-12, (make, name, error)
            for one, other in zip(seen, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    assert comm.world_size == 3


def test_ranks_with_other_numbers_of_batches_make_what_replicas_make() -> None:
    run_ranks(with_different_work, 3, timeout_s=90)


def followed() -> None:
    """A rank without samples repeats an order that was first seen where units were whole from a pass before."""
    comm = ddp.init(abort_s=20)
    module, optimizer = made(mlp, dtype=torch.float32)
    strategy = FullySharded(module, optimizer)
    inputs, classes = samples("mlp", torch.float32)
    model = strategy.model
    with torch.no_grad():  # leaves the root and the last unit whole
        model.train()
        model(inputs[:2])
    for number in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            with strategy.micro_batch(is_last=micro == 1):
                if comm.rank == 1 and number > 0:
                    model.reduce_without_backward()
                else:
                    F.cross_entropy(model(inputs[:4]), classes[:4]).backward()
        step(strategy)
    for is_training in (True, False):  # evaluations of a rank that runs out
        model.train(is_training)
        with torch.no_grad():
            model(inputs[:2])
            model.follow_evaluation() if comm.rank == 0 else model(inputs[:2])
    comm.barrier()


def test_a_rank_without_samples_follows_whatever_was_whole_before() -> None:
    run_ranks(followed, 2)


# --- a model that one rank alone has whole ---------------------------------------------------------------------------


def on_meta() -> None:
    comm, found = ddp.init(abort_s=20), list[dict[str, Tensor]]()
    for places in (("cpu", "cpu"), ("cpu", "meta")):
        with torch.device(places[comm.rank]):
            module, optimizer = made(cnn, "adamw")
        state = fitted(module, samples("cnn"), optimizer, strategy=FULLY, max_steps=2)
        found.append(state.model.state_dict())
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
    with torch.device("meta" if comm.rank == 0 else "cpu"):
        module, optimizer = made(cnn, "adamw")
    with pytest.raises(ConfigError, match=r"0.weight is on the meta device and has no values on rank 0, which "):
        fitted(module, samples("cnn"), optimizer, strategy=FULLY, max_steps=2)


def test_ranks_but_0_may_make_the_model_on_the_meta_device() -> None:
    run_ranks(on_meta, 2)


# --- parameters without a gradient -----------------------------------------------------------------------------------


class Heads(nn.Module):
    """One of its parameters is used on request only; and the ranks may differ in that."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.extra = nn.Parameter(torch.ones(4))
        self.uses = True

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks[1](torch.tanh(self.blocks[0](inputs)))
        scores: Tensor = hidden * self.extra if self.uses else hidden
        return scores


def without_a_gradient() -> list[str]:
    comm, found = ddp.init(abort_s=20), []
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).double()
    for word in ("mirrored", FULLY):
        torch.manual_seed(2)
        module = Heads().double()
        kind = ddp.strategies.choice.STRATEGIES[word]
        replica = kind.replica_of(module, find_unused_parameters=True)
        strategy = kind(replica, torch.optim.AdamW(module.parameters(), lr=0.1))
        for number in range(5):
            module.uses = number in (0, 4) or (number in (1, 2) and comm.rank == number - 1)
            strategy.optimizer.zero_grad()
            replica(inputs[comm.rank :: 2]).square().mean().backward()
            step(strategy)
        with replica.whole():
            found.append(flat(module))
    assert torch.equal(*found)
    torch.manual_seed(2)
    module = Heads().double()
    strategy = FullySharded(module, torch.optim.AdamW(module.parameters(), lr=0.1))
    module.uses = False
    strategy.model(inputs).sum().backward()
    with pytest.raises(UnusedParameters, match=r"rank 0: extra \(0\)\n  rank 1: extra \(0\)"):
        step(strategy)
    return []


def test_a_parameter_without_a_gradient_is_an_error_or_allowed() -> None:
    run_ranks(without_a_gradient, 2)


# --- a rank that is lost, or alone -----------------------------------------------------------------------------------

ABORT_S = 3.0
LOST = {
    "killed in forward": (signal.SIGKILL, False),
    "killed in backward": (signal.SIGKILL, True),
    "stopped in forward": (signal.SIGSTOP, False),
    "stopped in backward": (signal.SIGSTOP, True),
}


def lose(how: str) -> str:
    comm = ddp.init(warn_s=1.0, abort_s=ABORT_S)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    strategy = FullySharded(module, torch.optim.SGD(module.parameters(), lr=0.1))
    kind, is_in_backward = LOST[how]
    for number in range(3):
        strategy.optimizer.zero_grad()
        if number == 2 and comm.rank == 1:
            end = lambda *_: os.kill(os.getpid(), kind)  # noqa: E731
            if is_in_backward:
                module[2].register_full_backward_hook(end)
            else:
                module[1].register_forward_hook(end)
        try:
            strategy.model(torch.ones(2, 8)).sum().backward()
            step(strategy)
        except PeerLost as error:
            strategy.finish(alone=True)
            assert any(each.isnan().all() for each in module.parameters())
            with pytest.raises(RuntimeError, match=r"an error has ended its training|broke off"):
                strategy.model(torch.ones(2, 8))
            ddp.shutdown(failed=str(error))
            return str(error)
    return "nothing happened"


def test_the_others_say_in_time_which_unit_they_waited_for() -> None:
    started = {how: start_ranks(lose, 3, how) for how in LOST}
    for how, ranks in started.items():
        for rank, (process, receiver) in enumerate(ranks):
            if rank != 1:
                [said] = collect([(process, receiver)], timeout_s=40)
                expected = r"backward of unit 1" if "backward" in how else "forward of unit 2"
                assert isinstance(said, str) and "lost rank 1" in said, said
                assert expected in said or "bucket" in said, (how, said)
        ranks[1][0].kill()


def alone(folder: str) -> str:
    done = Path(folder) / "done"
    comm = ddp.init(warn_s=1.0, abort_s=ABORT_S)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    strategy = FullySharded(module, torch.optim.SGD(module.parameters(), lr=0.1))
    if comm.rank == 1:
        while not done.exists():
            threading.Event().wait(0.05)
        return ""
    try:
        strategy.model(torch.ones(2, 8))
    except PeerLost as error:
        return str(error)
    finally:
        done.touch()
    return "nothing happened"


def test_a_forward_of_one_rank_alone_ends_with_the_name_of_the_unit(tmp_path: Any) -> None:
    said = run_ranks(alone, 2, str(tmp_path))[0]
    assert "lost rank 1" in said and "[forward of the root unit]" in said, said


class Turns(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, width, bias=width < 512) for _ in range(3))
        self.order = [0, 1, 2]

    def forward(self, inputs: Tensor) -> Tensor:
        for number in self.order:
            inputs = torch.tanh(self.parts[number](inputs))
        return inputs


def other_order(at: int, width: int) -> str:
    comm = ddp.init(warn_s=1.0, abort_s=ABORT_S)
    module = Turns(width)
    strategy = FullySharded(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for number in range(3):
        if number == at and comm.rank == 1:
            module.order = [0, 2, 1]
        strategy.optimizer.zero_grad()
        try:
            strategy.model(torch.ones(2, width)).sum().backward()
            step(strategy)
        except (ReplicaMismatch, CollectiveMismatch, PeerLost, Diverged) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing happened"


def test_other_orders_of_units_are_an_error_on_every_rank() -> None:
    started = [start_ranks(other_order, 2, *given) for given in ((0, 8), (2, 8), (2, 512))]
    first, later, exchanged = (collect(ranks, timeout_s=30) for ranks in started)
    expected = "ReplicaMismatch: the ranks use units in different orders: rank 0 uses unit parts.1, rank 1 uses"
    assert all(said.startswith(expected) for said in first), first
    assert all(str(said).startswith(("CollectiveMismatch", "ReplicaMismatch")) for said in later), later
    assert all("unit parts.1" in said and "unit parts.2" in said for said in later), later
    expected = "ReplicaMismatch: the ranks have used units in different orders since the last update, so that they had"
    assert all(str(said).startswith(expected) for said in exchanged), exchanged


# --- one run after another -------------------------------------------------------------------------------------------


def in_turn(words: list[str]) -> dict[str, str]:
    module, optimizer = made(cnn, "adamw", torch.float32)
    model: nn.Module = module
    for number, word in enumerate(words):
        how = {"max_steps": 3, "global_batch": 10, "seed": number, "folder": None, "progress": False}
        given = {"loss": F.cross_entropy, **how, **({} if word == "again" else {"strategy": word})}
        state = ddp.fit(model, samples("cnn", torch.float32), optimizer, **grouped(**given))
        model = state.model if words[number + 1 :][:1] == ["again"] else module
        optimizer.state.clear()  # which fully_sharded does not leave
    dissolve_units(module)
    return bits_of(module, optimizer)


def runs() -> None:
    ddp.init(abort_s=30)
    expected = in_turn(["mirrored", "mirrored", "mirrored"])
    assert in_turn([FULLY, "mirrored", FULLY]) == expected
    assert in_turn([FULLY, "again", "sharded"]) == expected
    assert in_turn([FULLY, FULLY, "central_storage"]) == expected
    module, optimizer = made(mlp, "adamw", torch.float32)
    data = samples("mlp", torch.float32)
    first = fitted(module, data, optimizer, strategy=ddp.Averaging(strategy=FULLY, units="3"), max_steps=2)
    assert [unit.name for unit in first.strategy.units.all] == ["3", ""]
    with pytest.raises(ConfigError, match=r"units='blocks.\*': no module has such a name; there are \*"):
        fitted(module, data, optimizer, strategy=ddp.Averaging(strategy=FULLY, units="blocks.*"), max_steps=2)
    average, found = ddp.EMA(0.5), []
    for word, callback in ((FULLY, average), ("mirrored", average), ("mirrored", ddp.EMA(0.5))):
        module, optimizer = made(mlp, "adamw", torch.float32)
        how = {"strategy": word, "callbacks": [callback], "test_data": data, "max_steps": 2}
        found.append(fitted(module, data, optimizer, **how).evaluation)
    assert found[0] == found[1] == found[2] and found[0]


def test_runs_of_one_program_begin_where_the_one_before_has_ended() -> None:
    run_ranks(runs, 2)


# --- wires and hooks between hosts -----------------------------------------------------------------------------------

NEAR = {"bf16": 0.02, "fp16": 0.005, "int8": 0.1}


def changed_by(**how: Any) -> Tensor:
    """Returns by how much training has changed the parameters, in one vector."""
    module, optimizer = made(mlp, dtype=torch.float32)
    first = flat(module)
    averaging = ddp.Averaging(**how)
    fitted(module, samples("mlp", torch.float32), optimizer, strategy=averaging, max_steps=8)
    return flat(module) - first


def between_hosts() -> None:
    connect.boot_id = lambda: f"host {os.environ['RANK']}"
    ddp.init(abort_s=30, algorithm="ring")
    plain = changed_by(strategy="multi_worker")
    assert torch.equal(changed_by(strategy=FULLY), plain), "two ranks: one order of addition"
    for wire, near in NEAR.items():
        found = changed_by(strategy=FULLY, wire=wire)
        assert 0 < (found - plain).norm() <= near * plain.norm(), wire
    for hook in (ErrorFeedback(PowerSGD(2)), ErrorFeedback(TopK(0.3))):
        found, expected = changed_by(strategy=FULLY, hook=hook), changed_by(strategy="sharded", hook=hook)
        assert F.cosine_similarity(found, expected, dim=0) > 0.9, hook
        assert not torch.equal(found, plain)


def test_wires_and_hooks_send_less_and_train_nearly_the_same() -> None:
    run_ranks(between_hosts, 2)


# --- an overflow -----------------------------------------------------------------------------------------------------


def overflows() -> None:
    ddp.init(abort_s=30)
    found = []
    for word in ("mirrored", FULLY):
        module, optimizer = made(cnn, "adamw", torch.float32)
        with torch.no_grad():
            module[-1].weight.mul_(300)  # too large for the first loss scales
        state = fitted(module, samples("cnn", torch.float32), optimizer, strategy=word, precision="fp16", max_steps=4)
        found.append((bits_of(module, optimizer), state.loss_scale.value))
    assert found[0] == found[1] and found[0][1] < 2**16


def test_a_step_with_another_loss_scale_is_that_of_replicas() -> None:
    run_ranks(overflows, 2)


# --- what is refused before there are workers ------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "verify_every": ({"verify_every": 3}, "compares whole parameters, which no worker has"),
    "guard": ({"guard": True}, "looks for a bad sample on one worker alone"),
    "micro_size": ({"same_bits": True, "micro_size": 2}, "all workers take part in the forward of each shard"),
    "audit_every": ({"same_bits": True, "audit_every": 3}, "computes on one worker alone"),
    "hook": ({"hook": object(), "micro_size": 2}, "each micro-batch is summed by itself"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_whole_parameters_is_refused(name: str) -> None:
    how, told = REFUSED[name]
    with pytest.raises(ConfigError, match=told) as error:
        refuse(Setup(strategy="fully_sharded", **how))
    assert "\n" not in str(error.value)
    refuse(Setup(strategy="fully_sharded"))
