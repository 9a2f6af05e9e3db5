"""Each rank chooses its device; then all decide alike what carries their tensors, or say on each why nothing can.

Tests: ddp/comm/opening.py, ddp/process/gpu.py.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed import HashStore

import ddp
from ddp.comm import checks, nccl, opening, session
from ddp.comm.host_links import CPU
from ddp.comm.opening import Capabilities, agreed_backend, capabilities_of, chosen_device, device_of
from ddp.errors import ConfigError
from ddp.process import gpu
from ddp.run.assembly import stages
from ddp.run.settings.reader import from_plain
from ddp.strategies import choice


class Gpus:
    """Stands in for `torch.cuda` of a process that sees these GPUs; `current` is None until it begins to use them."""

    def __init__(self, *uuids: str, current: int | None = None) -> None:
        self.uuids, self.current = uuids, current

    def device_count(self) -> int:
        return len(self.uuids)

    def is_initialized(self) -> bool:
        return self.current is not None

    def current_device(self) -> int:
        self.current = self.current or 0
        return self.current

    def set_device(self, device: torch.device) -> None:
        self.current = device.index

    def get_device_properties(self, device: torch.device) -> Any:
        self.current_device()
        uuid = self.uuids[device.index]
        if uuid == "broken":
            raise RuntimeError("CUDA error: unknown error\nCompile with …")
        return SimpleNamespace(uuid=uuid) if uuid else SimpleNamespace()


@pytest.mark.parametrize(
    ("devices", "before", "after"),
    [
        ([0, 1], None, "0,1"),
        ([3, 1], None, "3,1"),
        ([1, 0], "2,0,3", "0,2"),
        ([2], "GPU-a,GPU-b,GPU-c", "GPU-c"),
        ([0, 4], None, ""),
        ([0, 2], "3,1", ""),
        ([0], "", ""),
    ],
)
def test_a_worker_sees_only_the_gpus_that_are_named(
    devices: list[int], before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)

    def visible() -> int:  # of four, as CUDA and torch read the variable
        names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        return next((at for at, name in enumerate(names) if name not in {*"0123", "GPU-c"}), len(names))

    def then(_: int) -> None:  # what a worker does next
        raise InterruptedError(os.environ["CUDA_VISIBLE_DEVICES"])

    monkeypatch.setattr("torch.cuda.device_count", visible)
    monkeypatch.setattr("torch.set_num_threads", then)
    config = from_plain({"cluster": {"devices": devices}})
    refused = r"=\[.*\]: torch finds [01] of these, where CUDA_VISIBLE_DEVICES is .*; take GPUs that exist, or"
    ended = pytest.raises(InterruptedError, match=f"^{after}$") if after else pytest.raises(ConfigError, match=refused)
    with ended, stages.joined(config):
        pass


# --- one rank's choice -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "current", "bound", "expected"),
    [
        (None, None, None, "cpu"),
        (None, 0, None, "cuda:0"),  # somebody may have set it
        (None, 3, None, "cuda:3"),
        (None, None, "cuda:2", "cuda:2"),
        (None, None, "cuda", "cuda:1"),  # by local rank: NCCL's group, of no device in particular
        (None, None, "cpu", "cpu"),
        ("auto", None, None, "cuda:1"),
        ("auto", 3, "cuda:2", "cuda:2"),
        ("auto", 3, "cuda", "cuda:3"),
        ("cuda", 2, None, "cuda:2"),
        ("cuda", None, "cpu", "cuda:1"),
        (torch.device("cuda"), None, None, "cuda:1"),
        ("cuda:0", 2, "cuda:3", "cuda:0"),
        (0, 2, "cuda:3", "cuda:0"),
        ("cuda:9", None, None, "cuda:9"),  # `capabilities_of` says that it is not there
        ("cpu", 2, "cuda:3", "cpu"),
        ("cpu:0", None, None, "cpu"),
    ],
)
def test_the_device_is_what_was_asked_or_bound_or_set_or_the_rank_s_own(
    asked: Any, current: int | None, bound: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "cuda", Gpus(*"abcd", current=current))
    assert chosen_device(asked, 5, bound and torch.device(bound)) == torch.device(expected)  # type: ignore[arg-type]


def test_the_default_device_counts_though_torch_begins_to_use_a_gpu_to_tell_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(*"abcd")
    monkeypatch.setattr(gpu, "cuda", gpus)
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("cuda", gpus.current_device()))
    assert chosen_device(None, 1) == torch.device("cuda:1")


def test_without_gpus_auto_is_the_cpu_and_one_that_is_asked_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "cuda", Gpus())
    assert [chosen_device(asked, 1) for asked in ("auto", "cuda")] == [CPU, torch.device("cuda:0")]


@pytest.mark.parametrize("asked", ["gpu", "cuda:-1", "meta", True, 1.0, "1"])
def test_what_is_no_device_is_refused_with_the_names_of_some(asked: Any) -> None:
    with pytest.raises(ConfigError, match=f"^device={asked}: is not supported; use auto, cpu, cuda, or one GPU"):
        chosen_device(asked, 0)


def test_a_module_without_parameters_is_where_its_buffers_are() -> None:
    module = nn.BatchNorm1d(2, affine=False)
    assert device_of(module) == CPU
    assert device_of(nn.ReLU()) is None
    assert device_of(nn.Linear(1, 1, device="meta")) is None


# --- what a rank has -------------------------------------------------------------------------------------------------


def test_a_rank_sets_the_current_gpu_unless_somebody_may_have_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for begun, expected in ((None, 1), (0, 0), (2, 2)):
        monkeypatch.setattr(gpu, "cuda", gpus := Gpus(*"abcd", current=begun))
        assert capabilities_of(torch.device("cuda:1"), "auto").problem == ""
        assert gpus.current == expected


def test_a_gpu_is_known_by_host_and_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that see one GPU each have other ones, both called cuda:0; with NCCL_HOSTID they are two hosts."""
    taken = []
    for uuid, host in (("a", ""), ("b", ""), ("a", ""), ("a", "elsewhere")):
        monkeypatch.setattr(gpu, "cuda", Gpus(uuid))
        monkeypatch.setenv("NCCL_HOSTID", host)
        taken.append(capabilities_of(torch.device("cuda:0"), "auto").gpu)
    assert taken[0] == taken[2]
    assert len(set(taken)) == 3


def test_a_gpu_without_a_uuid_is_known_by_what_the_process_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for index, shown in ((0, "4"), (0, "5"), (1, "4,5"), (0, "4")):
        monkeypatch.setattr(gpu, "cuda", Gpus("", ""))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        taken.append(capabilities_of(torch.device("cuda", index), "auto").gpu)
    assert taken[0] == taken[3]
    assert len(set(taken)) == 3


@pytest.mark.parametrize(
    ("device", "backend", "problem"),
    [
        ("cpu", "mpi", "backend='mpi' is unknown; use auto, gloo or nccl"),
        ("cpu", "nccl", "backend=nccl needs a GPU for each rank, but tensors are on the CPU; use backend=gloo"),
        ("cuda:2", "auto", "device=cuda:2, but torch sees 2 GPUs here, counted from 0; use another one"),
        ("cuda:1", "auto", "device=cuda:1 cannot be used (CUDA error: unknown error); fix that, or use device=cpu"),
    ],
)
def test_what_is_not_possible_here_is_a_problem(
    device: str, backend: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "cuda", Gpus("a", "broken"))
    assert capabilities_of(torch.device(device), backend).problem == problem


# --- what all decide -------------------------------------------------------------------------------------------------

CPU_ONLY = Capabilities("auto", "cpu")
OWN = [Capabilities("auto", "cuda", f"host {uuid}", True) for uuid in "abc"]
SHARED = [OWN[0], OWN[1], OWN[0]]
WITHOUT = OWN[1]._replace(has_nccl=False)
NO_SUCH = OWN[1]._replace(problem="device=cuda:9, but torch sees 2 GPUs here")


def asking(backend: str, *means: Capabilities) -> list[Capabilities]:
    return [each._replace(backend=backend) for each in means]


def decided(means: list[Capabilities], ranks: list[int]) -> list[str]:
    """What `agreed_backend` returns or raises on every rank."""
    store = HashStore()

    def one(rank: int) -> str:
        try:
            return agreed_backend(store, rank, ranks, means[rank])
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(len(means)) as threads:
        return list(threads.map(one, range(len(means))))


@pytest.mark.parametrize(
    ("means", "expected"),
    [
        ([CPU_ONLY, CPU_ONLY], "gloo"),
        (asking("gloo", CPU_ONLY, CPU_ONLY), "gloo"),
        (OWN, "nccl"),
        (asking("nccl", *OWN), "nccl"),
        ([*asking("nccl", OWN[0]), *OWN[1:]], "nccl"),
        (asking("gloo", *OWN), "gloo"),
        (SHARED, "gloo"),
        ([OWN[0], WITHOUT], "gloo"),
        ([WITHOUT], "gloo"),
        (asking("nccl", *SHARED), "backend=nccl needs a GPU for each rank, but ranks 10 and 12 share a GPU; "),
        (asking("nccl", OWN[0], WITHOUT), "the torch of rank 11 is built without NCCL; fix that, or use backend=gloo"),
        ([OWN[0], CPU_ONLY, OWN[2]], "the device is cuda on ranks 10 and 12, cpu on rank 11: put the models of all"),
        ([*asking("gloo", *OWN[:2]), *asking("nccl", OWN[2])], "backend is gloo on ranks 10 and 11, nccl on rank 12: "),
        ([OWN[0], NO_SUCH, NO_SUCH], "ranks 11 and 12: device=cuda:9, but torch sees 2 GPUs here"),
        ([CPU_ONLY, NO_SUCH], "rank 11: device=cuda:9"),
    ],
)
def test_all_ranks_decide_alike_and_an_error_names_the_ranks(means: list[Capabilities], expected: str) -> None:
    first, *others = decided(means, list(range(10, 10 + len(means))))
    assert set(others) <= {first}
    assert first == expected if expected in ("gloo", "nccl") else expected in first


def test_ranks_that_could_not_have_nccl_are_told_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ddp"):
        for means in (SHARED, OWN, asking("gloo", *SHARED), [CPU_ONLY], [WITHOUT]):
            decided(means, list(range(len(means))))
    assert [record.getMessage() for record in caplog.records] == [
        "ranks 0 and 2 share a GPU: tensors travel by Gloo, through the host, which is slower than NCCL"
    ]


def test_the_rank_that_keeps_the_store_stays_until_all_have_read_why_they_end() -> None:
    store = HashStore()
    with ThreadPoolExecutor(1) as thread:
        keeper = thread.submit(agreed_backend, store, 0, [0, 1], NO_SUCH)
        store.set("means/1", json.dumps(OWN[1]))
        store.wait(["read/0"])
        assert not keeper.done()
        store.set("read/1", "")
        assert "rank 0: device=cuda:9" in str(keeper.exception(20))


# --- the ways in -----------------------------------------------------------------------------------------------------


class Decided(ConfigError):
    """Raised in the place of opening connections, which needs real GPUs."""


def stop_at_the_decision(*given: Any) -> str:
    raise Decided(f"{agreed_backend(*given)} on {gpu.cuda.current_device()}")


def take_gpus(hosts: str, seen: str, begun: bool) -> list[str]:
    """What is decided under a launcher that says nothing of the host, for all ranks, and for a group of them."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if len(set(hosts)) > 1:
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    socket.gethostname = lambda: hosts[rank]
    gpu.cuda = Gpus(*(f"{hosts[rank]}{number}" for number in (seen if seen != "own" else str(rank))))  # type: ignore[assignment]
    nccl.ProcessGroupNCCL = object
    opening.agreed_backend = stop_at_the_decision
    if begun:
        dist.init_process_group("gloo")
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]  # they may be nobody's, as under `torch.multiprocessing.spawn`
    found = []
    with pytest.raises(Decided) as decision:
        ddp.init(device="auto", abort_s=20)
    found.append(str(decision.value))
    some = dist.new_group(list(range(world_size)))
    with pytest.raises(Decided) as decision:
        session.communicator_of(some, torch.device("cuda"))  # type: ignore[arg-type]
    return [*found, str(decision.value)]


@pytest.mark.parametrize(
    ("hosts", "seen", "begun", "expected"),
    [
        ("aba", "01", False, ["nccl on 0", "nccl on 0", "nccl on 1"]),
        ("aba", "01", True, ["nccl on 0", "nccl on 0", "nccl on 1"]),
        ("aaa", "own", False, ["nccl on 0"] * 3),  # one visible GPU for each rank
    ],
)
def test_ranks_of_a_host_take_gpus_of_their_own(hosts: str, seen: str, begun: bool, expected: list[str]) -> None:
    assert run_ranks(take_gpus, 3, hosts, seen, begun) == [[each] * 2 for each in expected]


REFUSED: list[tuple[list[dict[str, Any]], str]] = [  # by rank, what `init` is given
    ([{"device": "cuda:0"}, {"device": "cuda:9"}], "rank 1: device=cuda:9, but torch sees 2 GPUs here"),
    ([{"device": "cuda", "backend": "nccl"}, {"device": 0, "backend": "nccl"}], "but ranks 0 and 1 share a GPU; fix"),
    ([{"device": "cuda"}, {"device": "cpu"}], "the device is cuda on rank 0, cpu on rank 1: put the models of"),
    ([{"device": "cuda", "backend": "gloo"}, {"backend": "nccl"}], "backend is gloo on rank 0, nccl on rank 1: give"),
]


def be_refused_again_and_again() -> list[str]:
    rank, said = int(os.environ["RANK"]), []
    for each, _ in REFUSED:
        gpu.cuda = Gpus("a", "b")  # type: ignore[assignment]
        nccl.ProcessGroupNCCL = object
        with pytest.raises(ConfigError) as refused:
            ddp.init(**each[rank], abort_s=20)
        said.append(str(refused.value))
    total = ddp.init(device="cpu", abort_s=20).all_reduce(torch.ones(3))
    assert total.tolist() == [2.0] * 3
    return said


def test_what_does_not_go_together_is_refused_on_every_rank_and_the_next_session_begins() -> None:
    first, second = run_ranks(be_refused_again_and_again, 2)
    assert first == second
    for said, (_, expected) in zip(first, REFUSED, strict=True):
        assert expected in said


def note_settings() -> list[tuple[str, str]]:
    """Device and backend of what is opened, for all ranks and then for tensors of the other kind."""
    found = []

    def noted(*given: Any, **_: Any) -> Any:
        found.append((str(given[3].device), given[3].backend))
        return SimpleNamespace(settings=given[3], device=given[3].device, is_broken=False)

    session.open_communicator = noted
    gpu.cuda = Gpus("a", current=0)  # type: ignore[assignment]
    for device, backend, other in (("cpu", "gloo", "cuda:0"), ("cuda", "nccl", "cpu"), ("cpu", "auto", "cuda:0")):
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        first = ddp.init(device=device, backend=backend)
        second = session.current(torch.device(other))
        assert first is ddp.init() is session.current(first.device) is ddp.init(device="auto")
        assert second is not first
        assert second is session.current(torch.device(other)) is ddp.init(device=other)
        session._session.comms.clear()
        dist.destroy_process_group()
    return found


def test_a_second_communicator_for_gpus_keeps_the_backend_that_was_asked_for() -> None:
    (found,) = run_ranks(note_settings, 1)
    assert found == [
        *(("cpu", "gloo"), ("cuda:0", "gloo")),
        *(("cuda:0", "nccl"), ("cpu", "auto")),
        *(("cpu", "auto"), ("cuda:0", "auto")),
    ]


@pytest.mark.parametrize(
    ("of_group", "bound", "expected"),
    [
        (["cuda"], None, "cuda"),
        (["cuda"], "cuda:3", "cuda:3"),
        (["cpu", "cuda"], "cuda:3", "cuda:3"),
        (["cpu", "cuda"], None, None),
        (["cpu"], None, None),
    ],
)
def test_a_group_of_the_application_s_is_for_gpus_if_nccl_s_or_bound(
    of_group: list[str], bound: str | None, expected: str | None
) -> None:
    group: Any = SimpleNamespace(
        _device_types=[torch.device(each) for each in of_group], bound_device_id=bound and torch.device(bound)
    )
    assert session._bound(group) == (expected and torch.device(expected))
    assert session._bound(None) is None


def train_beside_a_group_for_gpus(bound: bool) -> tuple[str, float, list[float]]:
    """The application's group stands in for one of NCCL's: it has no collectives for tensors on the CPU."""
    rank = int(os.environ["RANK"])
    dist.Backend.register_backend("of_gpus", dist.ProcessGroupGloo, devices=["cuda"])
    dist.init_process_group("of_gpus", timeout=timedelta(seconds=33))
    assert dist.group.WORLD is not None
    if bound:  # `device_id=`, which torch's build for CPUs refuses
        dist.group.WORLD.bound_device_id = torch.device("cuda", 1 - rank)
    gpu.cuda = Gpus("a", "b")  # type: ignore[assignment]
    decide, opening.agreed_backend = opening.agreed_backend, stop_at_the_decision
    nccl.ProcessGroupNCCL = object
    with pytest.raises(Decided) as decision:
        ddp.init()
    some: Any = dist.new_group([0, 1], backend="gloo")
    gpu.cuda = Gpus("a", "b")  # type: ignore[assignment]
    with pytest.raises(Decided, match=str(decision.value)):
        session.communicator_of(some, torch.device("cuda"))
    opening.agreed_backend = decide
    model = ddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model(torch.full((1, 1), 2.0 * rank)).sum().backward()
    (weight,) = model.parameters()
    assert weight.grad is not None
    beside = ddp.DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=some)
    return str(decision.value), model.comm.abort_s, [weight.grad.item(), beside.comm.world_size]


@pytest.mark.parametrize("bound", [False, True])
def test_a_session_needs_of_the_application_s_group_no_more_than_its_store(bound: bool) -> None:
    found = run_ranks(train_beside_a_group_for_gpus, 2, bound)
    taken = [1, 0] if bound else [0, 1]
    assert found == [(f"nccl on {index}", 33.0, [1.0, 2.0]) for index in taken]


def test_a_tensor_on_another_gpu_of_the_process_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "dense", lambda tensor: None)
    ours, other = torch.device("cuda:0"), torch.device("cuda:1")
    checks.on(ours, SimpleNamespace(device=ours, shape=[3]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        checks.on(ours, SimpleNamespace(device=other, shape=[3]))  # type: ignore[arg-type]
    assert str(refused.value).endswith("on cuda:1, and this communicator's are on cuda:0: pass its .to('cuda:0')")


def test_fit_takes_the_device_of_the_model_and_never_moves_it_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def init(device: Any) -> Any:
        given.append(device)
        return SimpleNamespace(device=torch.device("cuda:1"))

    monkeypatch.setattr(choice, "init", init)
    model = nn.Linear(1, 1)
    choice.ranks_of(model)
    for index in (1, 0):
        monkeypatch.setattr(choice, "device_of", lambda _, index=index: torch.device("cuda", index))
        elsewhere = pytest.raises(ConfigError, match="the model is on cuda:0, and this rank's tensors are on cuda:1")
        with nullcontext() if index else elsewhere:
            choice.ranks_of(model)
    assert given == ["auto", torch.device("cuda:1"), torch.device("cuda:0")]
