"""Servers and workers that are started by hand: what they are told, how they meet, and what is refused.

Tests: ddp/comm/meeting/role.py.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankFailed, collect, start_ranks, unfailed

import ddp
from ddp.comm.meeting import rendezvous
from ddp.comm.meeting.place import RankPlace, is_on_loopback, refuse_workers
from ddp.comm.meeting.role import RoleSettings, current_role, role_from_env, set_role
from ddp.errors import ConfigError, PeerLost
from ddp.run.launch import command_line, torchrun
from ddp.run.launch.command_line import take_role

HERE = "127.0.0.1", 4711
THERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"}


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({}, None),
        ({**THERE, "RANK": "0", "WORLD_SIZE": "2"}, None),
        ({"DDP_SERVERS": "1", "RANK": "0", "WORLD_SIZE": "2"}, RoleSettings(None, 1)),
        ({"DDP_ROLE": "worker", **THERE}, RoleSettings("worker", None, None, *HERE)),
        ({"DDP_ROLE": "worker", **THERE, "RANK": "0", "WORLD_SIZE": "1"}, RoleSettings("worker", None, None, *HERE)),
        ({"DDP_ROLE": "server", "DDP_SERVERS": "2", "DDP_WORKERS": "3", **THERE}, RoleSettings("server", 2, 3, *HERE)),
        ({"DDP_ROLE": "server", "DDP_SERVERS": "1", "DDP_PRIVATE_FOLDER": "/dev/shm/ddp-secret-1/29500"}, None),
    ],
)
def test_what_the_variables_tell(variables: Mapping[str, str], says: RoleSettings | None) -> None:
    assert role_from_env(variables) == says


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"DDP_ROLE": "ps", **THERE}, "DDP_ROLE=ps: must be server or worker"),
        ({"DDP_ROLE": "worker"}, "DDP_ROLE=worker, but MASTER_ADDR is not set: give all servers and"),
        ({"DDP_ROLE": "worker", "MASTER_ADDR": "a"}, "DDP_ROLE=worker, but MASTER_PORT is not set"),
        ({"DDP_ROLE": "server", **THERE, "MASTER_PORT": "70000"}, "MASTER_PORT=70000: must be from 1 to 65535"),
        ({"DDP_ROLE": "server", **THERE, "DDP_SERVERS": "0"}, "DDP_SERVERS=0: must be a whole number from 1 up"),
        ({"DDP_SERVERS": "one"}, "DDP_SERVERS=one: must be a whole number from 1 up"),
        (
            {"DDP_ROLE": "server", **THERE, "RANK": "1", "WORLD_SIZE": "2"},
            "DDP_ROLE=server: a launcher has placed this process already (RANK=1 and WORLD_SIZE=2): leave the role out",
        ),
        ({"DDP_ROLE": "server", **THERE, "TF_CONFIG": "{}"}, "DDP_ROLE=server: TF_CONFIG sets the task of"),
    ],
)
def test_variables_that_contradict_are_one_sentence(variables: Mapping[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        role_from_env(variables)
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    ("variables", "words", "says"),
    [
        ({}, ["cluster.role=ps"], "cluster.role=ps: must be server or worker"),
        ({"DDP_ROLE": "server"}, ["cluster.role=worker"], "cluster.role=worker: but DDP_ROLE is server: leave one out"),
        ({}, ["cluster.role=worker"], "DDP_ROLE=worker, but MASTER_ADDR is not set"),
        (THERE, ["cluster.role=worker", "cluster.task=worker:0"], "cluster.task=worker:0: this process is a worker by"),
        (THERE, ["cluster.role=server", "cluster.servers=0"], "DDP_SERVERS=0: must be a whole number from 1 up"),
    ],
)
def test_words_that_contradict_are_one_sentence(
    variables: Mapping[str, str], words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(variables))
    with pytest.raises(ConfigError) as refused:
        take_role(words)
    assert str(refused.value).startswith(says)


def test_words_are_other_names_of_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(THERE))
    assert take_role(["seed=1", "cluster.servers=2"]) is None and os.environ == THERE
    words = ["cluster.servers=2", "cluster.role=server", "cluster.workers=3"]
    assert take_role(words) == role_from_env() == RoleSettings("server", 2, 3, "127.0.0.1", 4711)
    with pytest.raises(ConfigError, match=r"^x: this process is a server already, as DDP_ROLE says: call it$"):
        refuse_workers("x", instead="call it")
    monkeypatch.setattr(sys, "argv", ["ddp train", "-m", "seed=1,2"])
    with pytest.raises(SystemExit):
        torchrun.train_by_hand(RoleSettings("worker", None))


def test_a_role_stands_in_no_file() -> None:
    config = command_line.Config()
    config.cluster.role = "worker"
    with pytest.raises(ConfigError, match=r"^cluster\.role: every process needs it on its command line, and not in"):
        command_line._trained(config, Path())


def test_addresses_of_this_host() -> None:
    assert rendezvous.is_here("127.0.0.1") and rendezvous.is_here("localhost")
    assert not rendezvous.is_here("192.0.2.1") and not rendezvous.is_here("no such host")
    assert is_on_loopback("127.0.0.1") and not is_on_loopback("10.0.0.1")


# --- processes -------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def becomes(job: str, port: int, **more: str) -> None:
    """Takes the rank out of `tests/ranks.py`'s environment, and gives this process a role."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    os.environ.update(DDP_ROLE=job, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DDP_SECRET="s" * 16, **more)


def meet(port: int) -> Any:
    """Two servers and two workers meet; then a third server and a worker without the secret are refused."""
    number = int(os.environ["RANK"])
    becomes("server" if number in (0, 1, 4) else "worker", port, DDP_WORKERS="5")
    if number < 2:
        os.environ["DDP_SERVERS"] = "2"
    if number == 5:
        os.environ["DDP_SECRET"] = "t" * 16
    if number == 4:
        os.environ["DDP_SERVERS"] = "2"
        time.sleep(0.5)
    abort_s = 1.0 if number == 5 else 30.0
    try:
        comm = ddp.init(abort_s=abort_s)
    except (ConfigError, PeerLost) as error:
        return str(error)
    me = current_role()
    assert me is not None and (me.num_workers, me.num_servers) == (5, 2)
    total = comm.all_reduce(torch.ones(1)).item()
    if number < 4:  # the store lives until the refused ones have come
        me.store.add("met", 1)
    serves = me.served is not None
    while serves and me.store.add("met", 0) < 4:
        time.sleep(0.01)
    if serves:
        time.sleep(1.2)
    ddp.shutdown()
    return me.job, me.index, comm.rank, total, serves


def test_processes_get_their_index_by_arrival_and_strangers_none() -> None:
    found = unfailed(collect(start_ranks(meet, 6, free_port())))
    servers, workers = sorted(found[:2]), sorted(found[2:4])
    assert servers == [("server", 0, 0, 2.0, True), ("server", 1, 1, 2.0, False)]
    assert workers == [("worker", 0, 0, 1.0, False), ("worker", 1, 0, 1.0, False)]
    assert found[4].endswith(": 2 are there already; start a worker, or all again with 3 servers")
    assert "has gone, has another DDP_SECRET, or has not described the run" in found[5]


def become_the_last(_: None) -> Any:
    comm = ddp.init()
    me, total = current_role(), comm.all_reduce(torch.ones(1)).item()
    ddp.shutdown()
    return str(me), comm.rank, total


def test_a_program_below_a_launcher_has_its_last_ranks_as_servers() -> None:
    started = start_ranks(become_the_last, 3, None, environment={"DDP_SERVERS": "2"})
    assert unfailed(collect(started)) == [
        ("worker 0", 0, 1.0),
        ("server 0", 0, 2.0),
        ("server 1", 1, 2.0),
    ]


def test_servers_by_rank_need_a_launcher_and_leave_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for here, says in (
        (None, "DDP_SERVERS=2: no launcher has started other processes than this one; take one, or start each with"),
        (RankPlace("torchrun", 0, 2), "DDP_SERVERS=2: of the 2 started processes, at least one must be a worker"),
    ):
        monkeypatch.setattr(rendezvous, "place", lambda here=here: here)
        with pytest.raises(ConfigError) as refused:
            rendezvous._by_rank(RoleSettings(None, 2), warn_s=1, abort_s=1)
        assert str(refused.value).startswith(says)


def test_a_process_has_the_settings_of_server_0(monkeypatch: pytest.MonkeyPatch) -> None:
    run: dict[str, Any] = {"config": {}, "servers": 1, "typed": ["seed=1", "cluster.servers=1"]}
    monkeypatch.setattr(sys, "argv", ["ddp train", "cluster.role=worker", "cluster.servers=1"])
    torchrun._refuse_other_settings("worker 3", run)
    monkeypatch.setattr(sys, "argv", ["ddp train", "cluster.role=worker", "epochs=2", "seed=1"])
    with pytest.raises(ConfigError, match=r"^worker 3: epochs=2: a run has the settings of server 0; give them there"):
        torchrun._refuse_other_settings("worker 3", run)
    with pytest.raises(ConfigError, match=r"^worker 3: server 0 runs another program; start this process with that"):
        torchrun._refuse_other_settings("worker 3", {"servers": 1})


def test_a_worker_that_finds_no_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    me = RoleSettings("worker", None, None, "127.0.0.1", port)
    with pytest.raises(PeerLost, match=rf"nobody serves a store at 127\.0\.0\.1:{port} \(.*\): start a server"):
        rendezvous.arrive(me, dict, warn_s=0.1, abort_s=0.2)
    cannot = pytest.raises(ConfigError, match=r": server 0 cannot serve the store of the processes there .*start one")
    with socket.create_server(("127.0.0.1", port)), cannot:
        rendezvous.arrive(me._replace(job="server"), dict, warn_s=1, abort_s=1)


def fitted(loss: Any, num_steps: int, callbacks: Any = (), **more: Any) -> tuple[ddp.TrainState, list[float]]:
    """Trains a small model; the state, and its weights."""
    points = torch.randn(96, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = (points, (points.norm(dim=1) < 1).long())
    state = ddp.fit(
        *(model, data, optimizer),
        **{"loss": loss, "global_batch": 16, "max_steps": num_steps, "folder": None, "callbacks": callbacks, **more},
    )
    return state, torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


class Dies(ddp.Callback):
    def step_end(self, state: Any, report: Any) -> None:
        if state.step == 4:
            os._exit(0)


def train_by_hand(ports: list[int], folder: Path) -> Any:
    """A server; a worker that dies in a step; a worker that comes then, and is there when another server dies."""
    number, calls = int(os.environ["RANK"]), 0
    becomes("worker" if number else "server", ports[0], DDP_WORKERS="2")

    def loss(outputs: Any, targets: Any) -> Any:
        nonlocal calls
        calls += 1
        if number == 1 and calls == 5:
            (folder / "died").touch()
            os._exit(0)
        return torch.nn.functional.cross_entropy(outputs, targets)

    while number == 2 and not (folder / "died").exists():
        time.sleep(0.01)
    state, weights = fitted(loss, 30, strategy=ddp.ParameterServer())
    me = current_role()
    assert me is not None and state.step == 30 and not state.stopped_by
    if number:
        assert (me.index, me.num_workers) == (1, 2)
    ddp.shutdown()
    set_role(None)
    os.environ["MASTER_PORT"] = str(ports[1])
    with pytest.raises(PeerLost) as lost:
        fitted(loss, 30, [Dies()] if not number else [], strategy=ddp.ParameterServer(mode="async"))
    assert number == 2
    return weights, str(lost.value)


def test_programs_started_by_hand_train_while_workers_come_and_go(tmp_path: Path) -> None:
    _, alone = fitted(torch.nn.functional.cross_entropy, 29, batches=ddp.Batches(num_shards=2))
    server, worker, late = collect(start_ranks(train_by_hand, 3, [free_port(), free_port()], tmp_path))
    assert all(isinstance(each, RankFailed) and "exit code 0" in str(each) for each in (server, worker))
    assert not isinstance(late, RankFailed), late
    assert "has gone, and this run with it: start the servers again, with resume=auto, and then the workers" in late[1]
    assert late[0] == pytest.approx(alone, abs=1e-12)  # as it has pulled them for the last step
