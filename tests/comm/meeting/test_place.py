"""Which rank a process is, told by the environment of each launcher; and ranks that find each other by it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flat import grouped
from ranks import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

import ddp
from ddp.comm import session
from ddp.comm.meeting.place import (
    FIRST_PORT,
    NUM_PORTS,
    RankPlace,
    _warn_once,
    first_host,
    is_rank,
    place,
    refuse_workers,
)
from ddp.commands import train
from ddp.errors import ConfigError
from ddp.run.launch import command_line, from_python, torchrun

ALONE = {"RANK": "0", "WORLD_SIZE": "1"}
MEET = {"MASTER_ADDR": "a", "MASTER_PORT": "2000"}
FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1", **MEET}
BATCH_SCRIPT = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77"}
STEP = {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
SRUN = {**BATCH_SCRIPT, **STEP, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n[07-10],x"}


BELOW_IT = {"RANK": "1", "WORLD_SIZE": "7", **MEET}  # one rank on each node, with numbers of its own


def open_mpi(rank: int, size: int, *, local_size: int) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank % local_size, "LOCAL_SIZE": local_size}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()}


def mpich(rank: int, size: int) -> dict[str, str]:
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": str(size)}


def submitit(rank: int, size: int) -> dict[str, str]:
    numbers = {"GLOBALID": rank, "LOCALID": rank, "NTASKS": size}
    return {f"SUBMITIT_LOCAL_{name}": str(number) for name, number in numbers.items()}


def tensorflow(kind: str, index: int, **cluster: list[str]) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


WORKERS = ["h:1", "h:2", "g:3"]
TWO_HOSTS = open_mpi(3, 4, local_size=2)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (BATCH_SCRIPT, None),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "1", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", **MEET}, RankPlace("torchrun", 1, 2, None, None, "a", 2000)),
        (FLUX, RankPlace("Flux", 1, 2, 1, None, "a", 2000)),
        ({**FLUX, "MASTER_ADDR": "[::1]"}, RankPlace("Flux", 1, 2, 1, None, "::1", 2000)),
        (ALONE, RankPlace("torchrun", 0, 1)),
        ({**ALONE, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, RankPlace("torchrun", 0, 1, 1, 1)),
        ({**SRUN, "RANK": "1", "WORLD_SIZE": "2", **MEET}, RankPlace("torchrun", 1, 2, None, None, "a", 2000)),
        ({**SRUN, **BELOW_IT, "TORCHELASTIC_RUN_ID": "x"}, RankPlace("torchrun", 1, 7, None, None, "a", 2000)),
        ({**SRUN, **BELOW_IT, "RAY_JOB_ID": "x"}, RankPlace("torchrun", 1, 7, None, None, "a", 2000)),
        ({**TWO_HOSTS, **MEET}, RankPlace("Open MPI", 3, 4, 1, 2, "a", 2000)),
        ({**SRUN, **MEET, "WORLD_SIZE": "7"}, RankPlace("srun", 3, 7, 1, 2, "a", 2000)),
        ({**SRUN, **open_mpi(0, 1, local_size=1)}, RankPlace("Open MPI", 0, 1, 0, 1)),
        ({**SRUN, **mpich(1, 2), **MEET}, RankPlace("mpiexec", 1, 2, 1, 2, "a", 2000)),
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "7", **MEET}, RankPlace("srun", 3, 7, 1, 2, "a", 2000)),
    ],
)
def test_each_launcher_s_variables_are_understood(environment: dict[str, str], expected: RankPlace | None) -> None:
    assert place(environment) == expected


@pytest.mark.parametrize("environment", [SRUN, mpich(0, 2), open_mpi(1, 2, local_size=2), submitit(1, 2)])
def test_ranks_without_a_meeting_place_meet_at_a_port_of_the_job_s(environment: dict[str, str]) -> None:
    found = place(environment)
    assert found is not None
    assert found.address == ("n07" if environment is SRUN else "127.0.0.1")
    assert FIRST_PORT <= found.port < FIRST_PORT + NUM_PORTS
    assert place({**environment, "SLURM_JOB_ID": "78"}) != found or environment is not SRUN


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0"}, "RANK=0, but WORLD_SIZE is not set: start it with torchrun, or set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 shows several processes, but RANK is not set: start it with torchrun"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 shows several processes"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0, but WORLD_SIZE is not set: start it with torchrun"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2 shows several processes, but RANK is not set"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK=0, but OMPI_COMM_WORLD_SIZE is not set"),
        ({"MPI_LOCALNRANKS": "2"}, "MPI_LOCALNRANKS=2 shows several processes"),
        ({**BATCH_SCRIPT, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, "SLURM_STEP_TASKS_PER_NODE=1(x2) shows several"),
        ({**open_mpi(0, 1, local_size=1), "HOROVOD_SIZE": "2"}, "HOROVOD_SIZE=2 shows several processes"),
        ({**ALONE, "LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 contradicts RANK=0, WORLD_SIZE=1: leave"),
        ({**TWO_HOSTS, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "LOCAL_RANK=2 contradicts OMPI_COMM_WORLD_RANK=3, OMPI_"),
        ({**TWO_HOSTS, "OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "OMPI_COMM_WORLD_LOCAL_SIZE=5: leave it out, or fix it"),
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}, "HOROVOD_SIZE=2 shows several processes"),
        ({"PET_NNODES": "2"}, "PET_NNODES=2 is for torchrun, which reads it: start this with torchrun PROGRAM"),
        ({"PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE=auto is for torchrun"),
        ({"RANK": "2", "WORLD_SIZE": "2", **MEET}, "RANK=2 with WORLD_SIZE=2: ranks are 0 to WORLD_SIZE - 1"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x': must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "WORLD_SIZE=2, but MASTER_PORT is not"),
        ({"RANK": "0", "WORLD_SIZE": "4", **MEET, **TWO_HOSTS}, "RANK=0, but OMPI_COMM_WORLD_RANK=3, of WORLD_SIZE=4"),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "7", **MEET}, "leave RANK and WORLD_SIZE out, because srun says the same"),
        ({"RANK": "0", "WORLD_SIZE": "2", **MEET, "MASTER_PORT": "0"}, "MASTER_PORT=0: must be from 1 to 65535"),
        (TWO_HOSTS, "OMPI_COMM_WORLD_SIZE=4, but MASTER_ADDR is not set: give all ranks MASTER_ADDR"),
        ({**SRUN, "WORLD_SIZE": "2"}, "WORLD_SIZE=2: srun says 7; leave it out, or set RANK, too"),
        ({**SRUN, "RANK": "0"}, "RANK=0: srun says 3; leave it out, or set WORLD_SIZE, too"),
    ],
)
def test_half_a_place_is_refused_in_one_sentence(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        place(environment)
    assert words in str(refused.value) and "\n" not in str(refused.value)


LAUNCHED = [
    open_mpi(0, 2, local_size=2),
    {**mpich(0, 2), "PMIX_RANK": "0"},
    {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", **MEET},
    {**SRUN, "PMIX_RANK": "3", "PMI_RANK": "3", "PMI_SIZE": "7"},
    {**open_mpi(1, 2, local_size=2), "PMIX_RANK": "1"},
    {name.replace("OMPI", "MV2"): value for name, value in open_mpi(1, 2, local_size=2).items()},
    mpich(1, 2),
    submitit(1, 2),
    FLUX,
    {name.replace("OMPI_COMM_WORLD", "HOROVOD"): value for name, value in open_mpi(1, 2, local_size=2).items()},
    {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **MEET},
    {**tensorflow("worker", 1, worker=WORKERS), "RANK": "1", "WORLD_SIZE": "3"},
]
SHOWS_NOTHING = {"SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID", "SLURM_STEP_NODELIST", *MEET}


@pytest.mark.parametrize("variables", LAUNCHED)
def test_of_any_part_of_a_launcher_s_variables_none_makes_a_rank_train_alone(variables: dict[str, str]) -> None:
    told = sorted(variables.keys() - SHOWS_NOTHING)
    silent = {name: variables[name] for name in variables.keys() & SHOWS_NOTHING}
    for chosen in range(1, 1 << len(told)):
        environment = {**silent, **{name: variables[name] for i, name in enumerate(told) if chosen >> i & 1}}
        try:
            found = place(environment)
        except ConfigError as error:
            assert "\n" not in str(error)
        else:
            only_a_local_rank = {f"{name}=0" for name in told if "LOCAL" in name and "SIZE" not in name}
            shown = {f"{name}={environment[name]}" for name in environment.keys() - SHOWS_NOTHING}
            assert found is None if shown <= only_a_local_rank else found and found.world_size > 1, environment


@pytest.mark.parametrize(
    ("environment", "sign"),
    [
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "1"}, "SLURM_STEP_NUM_TASKS=7"),
        ({**SRUN, **open_mpi(0, 1, local_size=1)}, "SLURM_STEP_NUM_TASKS=7"),
        ({"PMIX_RANK": "1", "RANK": "0", "WORLD_SIZE": "1"}, "PMIX_RANK=1"),
        ({**ALONE, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2"),
        ({**ALONE, "LOCAL_RANK": "1"}, "LOCAL_RANK=1"),
        ({**open_mpi(0, 1, local_size=1), "PMIX_RANK": "0"}, ""),
        ({**BATCH_SCRIPT, "RANK": "0", "WORLD_SIZE": "1", "PMIX_RANK": "0"}, ""),
    ],
)
def test_one_of_several_that_is_told_to_be_alone_says_so_once(
    environment: dict[str, str], sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("ddp.comm.meeting.place.log.warning", lambda words, *given: said.append(words % given))
    _warn_once.cache_clear()
    for _ in range(2):
        found = place(environment)
        assert found is not None and found.world_size == 1
    assert len(said) == bool(sign)
    assert not sign or f"though {sign} shows other processes: if all of them are to train one model" in said[0]


def test_the_first_host_of_slurm_s_list() -> None:
    lists = {"n1": "n1", "n[3,5-7]": "n3", "gpu[007-012,15]-ib,x": "gpu007-ib", "r[1-2]n[5-6]": "r1n5", "a,b": "a"}
    assert {nodes: first_host(nodes) for nodes in lists} == lists


def test_a_task_of_a_barrier_stage_of_spark_s_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class TaskContext:
        task: Any = None

        @classmethod
        def get(cls) -> Any:
            return cls.task

    class BarrierTaskContext(TaskContext):
        def partitionId(self) -> int:
            return 1

        def stageId(self) -> int:
            return 7

        def getTaskInfos(self) -> list[Any]:
            return [SimpleNamespace(address=f"{host}:4444") for host in "abb"]

    spark = SimpleNamespace(TaskContext=TaskContext, BarrierTaskContext=BarrierTaskContext)
    monkeypatch.setitem(sys.modules, "pyspark", spark)
    assert place() is None, "the driver"
    TaskContext.task = TaskContext()
    assert place() is None, "a task by itself"
    TaskContext.task = BarrierTaskContext()
    found = place()
    assert found is not None and found[:6] == ("Spark", 1, 3, None, None, "a")
    assert FIRST_PORT <= found.port < FIRST_PORT + NUM_PORTS
    with pytest.raises(ConfigError, match="this process is rank 1 of 3 already, as Spark says: call fits"):
        ddp.launch(fits)


def test_one_task_may_start_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in open_mpi(0, 1, local_size=1).items():
        monkeypatch.setenv(name, value)
    refuse_workers("x", instead="y")
    assert not is_rank()


def fits(**_: Any) -> None:
    model, data = torch.nn.Linear(1, 1), (torch.ones(2, 1), torch.ones(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ddp.fit(model, data, optimizer, loss=torch.nn.functional.mse_loss, global_batch=2, epochs=1)


ENTRANCES = {"init": ddp.init, "fit": fits, "launch": lambda: ddp.launch(fits), "train": lambda: train.main([])}
WHOLE = [*(each for each in LAUNCHED if not {"HOROVOD_RANK", "TF_CONFIG"} & each.keys())]
WHOLE += [tensorflow("worker", 1, worker=WORKERS), {"RANK": "1", "WORLD_SIZE": "2", **MEET}]  # the last one: PyTorchJob


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("variables", [*WHOLE, {}], ids=lambda each: next(iter(each), "torch.distributed"))
def test_a_rank_joins_the_others_or_is_told_what_to_do(
    variables: dict[str, str], entrance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has started it, and whichever way it takes: it never trains beside them."""
    joined: list[tuple[int, int]] = []

    class Joins(BaseException):
        """It would meet the others now."""

    def join(here: RankPlace | None = None, **_: Any) -> None:
        here = here or place()
        assert here is not None
        joined.append((here.rank, here.world_size))
        raise Joins

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(session, "open_store", join)
    monkeypatch.setattr(session, "_own_part", lambda group, **_: join())
    monkeypatch.setattr(torchrun, "main", join)
    for module in (from_python, command_line):
        monkeypatch.setattr(module, "run_workers", lambda *_, **__: pytest.fail("it starts workers of its own"))
    with contextlib.ExitStack() as until_end:
        if not variables:
            dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
            until_end.callback(dist.destroy_process_group)
        here = place()
        assert here is not None
        refused = pytest.raises(ConfigError, match=rf"ddp.launch\(fits, …\): this process is rank {here.rank} of ")
        with refused if entrance == "launch" else pytest.raises(Joins):
            ENTRANCES[entrance]()
        assert joined == ([] if entrance == "launch" else [(here.rank, here.world_size)])
        if entrance == "launch":
            by = "RANK" if here.launcher == "torchrun" else here.launcher
            with pytest.raises(ConfigError, match=f"already, as {by} says: call fits\\(…\\) itself"):
                ddp.launch(fits, word=1)


def train_as(rows: list[dict[str, str]]) -> tuple[int, int, list[list[float]]]:
    """Takes the rank out of `tests/ranks.py`'s environment, and puts in its place what another launcher would have."""
    rank = int(os.environ["RANK"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ |= {**rows[rank], "TORCHELASTIC_USE_AGENT_STORE": ""}
    comm = ddp.init(abort_s=20)
    torch.manual_seed(comm.rank)
    model = torch.nn.Linear(2, 1)
    data = torch.arange(8.0).view(4, 2), torch.ones(4, 1)
    options: dict[str, Any] = {"global_batch": 2, "epochs": 1, "folder": None, "progress": False}
    ddp.fit(
        model, data, torch.optim.SGD(model.parameters(), 0.01), **grouped(loss=torch.nn.functional.mse_loss, **options)
    )
    ddp.shutdown()
    return comm.rank, comm.world_size, [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("launcher", ["Open MPI", "TensorFlow"])
def test_ranks_of_another_launcher_train_together(launcher: str) -> None:
    rows = [open_mpi(rank, 2, local_size=2) for rank in range(2)]
    if launcher == "TensorFlow":
        cluster = [f"localhost:{FIRST_PORT + (os.getpid() + i) % NUM_PORTS}" for i in range(2)]
        rows = [tensorflow("worker", rank, worker=cluster) for rank in range(2)]
    first, second = run_ranks(train_as, 2, rows)
    assert [first[:2], second[:2]] == [(0, 2), (1, 2)]
    assert first[2] == second[2], "they trained one model"
