"""The description of a cluster: as TF_CONFIG and as settings, which rank each of its tasks is, and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ranks import collect, run_ranks, start_ranks
from torch.distributed import HashStore

import ddp
from ddp.comm import session
from ddp.comm.meeting import cluster_spec
from ddp.comm.meeting.cluster_spec import (
    Cluster,
    ClusterTask,
    from_settings,
    from_variable,
    refuse_evaluator,
    take_cluster,
)
from ddp.comm.meeting.place import RankPlace, host_name, is_rank, place
from ddp.comm.meeting.rendezvous import rendezvous
from ddp.comm.meeting.role import RoleSettings, current_role, role_from_env
from ddp.commands import train
from ddp.errors import ConfigError, PeerLost
from ddp.process.terminal import add_handler, log
from ddp.run.launch.command_line import join_cluster
from ddp.run.launch.torchrun import _unlike_rank_0, typed

WORKERS = ["h:1", "h:2", "g:3"]
TASKS = tuple(ClusterTask("worker", index, address) for index, address in enumerate(WORKERS))
CHIEF = ClusterTask("chief", 0, "c:9")
IPV6 = ClusterTask("worker", 0, "[fe80::1]:80")


def tf_config(task: Mapping[str, Any] | None, cluster: Mapping[str, Any], **fields: Any) -> str:
    return json.dumps({"cluster": cluster, **({} if task is None else {"task": task}), **fields})


def worker(index: int | str) -> dict[str, Any]:
    return {"type": "worker", "index": index}


@pytest.fixture(autouse=True)
def no_cluster_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_spec, "_own", None)
    monkeypatch.setattr(cluster_spec, "_may_have_servers", False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", None),
        (tf_config(None, {}), None),
        (tf_config(worker(0), {}), None),
        (tf_config(worker(1), {"worker": WORKERS}), RankPlace("TF_CONFIG", 1, 3, 1, 2, "h", 1, TASKS)),
        (tf_config(worker("2"), {"worker": WORKERS}), RankPlace("TF_CONFIG", 2, 3, 0, 1, "h", 1, TASKS)),
        (
            tf_config(worker(1), {"worker": WORKERS, "chief": ["c:9"], "ps": [], "evaluator": ["e:1"]}),
            RankPlace("TF_CONFIG", 2, 4, 1, 2, "c", 9, (CHIEF, *TASKS)),
        ),
        (
            tf_config({"type": "chief", "index": 0, "trial": "7"}, {"worker": WORKERS, "chief": {"0": "c:9"}}),
            RankPlace("TF_CONFIG", 0, 4, 0, 1, "c", 9, (CHIEF, *TASKS)),
        ),
        (
            tf_config(worker(0), {"worker": {"1": "h:2", "0": "h:1", "2": "g:3"}}, environment="cloud", rpc_layer="x"),
            RankPlace("TF_CONFIG", 0, 3, 0, 2, "h", 1, TASKS),
        ),
        (
            tf_config(worker(0), {"chief": ["b.c-d:65535"], "worker": ["[fe80::1]:80"]}),
            RankPlace("TF_CONFIG", 1, 2, 0, 1, "b.c-d", 65535, (ClusterTask("chief", 0, "b.c-d:65535"), IPV6)),
        ),
        (tf_config(worker(0), {"worker": ["h:1"]}), None),
        (tf_config({"type": "evaluator", "index": 0}, {"worker": WORKERS}), None),
        (tf_config({"type": "evaluator", "index": 0}, {"worker": WORKERS, "ps": ["p:1"]}), None),
    ],
)
def test_each_task_of_tensorflow_s_variable_has_its_rank(text: str, expected: RankPlace | None) -> None:
    assert place({"TF_CONFIG": text}) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "TF_CONFIG={: cannot be read"),
        ("[" * 10_000, "cannot be read"),
        ("[]", "TF_CONFIG=[]: must have the fields cluster and task"),
        ('{"cluster": {"worker": ["h:1"], "worker": ["g:1"]}}', "cannot be read ('worker' is given twice)"),
        ('{"cluster": {"worker": {"0": "h:1", "0": "g:1"}}}', "cannot be read ('0' is given twice)"),
        (tf_config(None, {"worker": WORKERS}), "TF_CONFIG.task is missing: say which of worker:0 at h:1, worker:1 at "),
        (tf_config(worker(3), {"worker": WORKERS}), "TF_CONFIG.task=worker:3: is not a task of TF_CONFIG.cluster, "),
        (tf_config(worker(1), {}), "TF_CONFIG.task=worker:1: is not a task of TF_CONFIG.cluster, which has none"),
        (tf_config({"index": 0}, {"worker": WORKERS}), "TF_CONFIG.task.type=None: must be one of chief, worker, ps,"),
        (tf_config({"type": "worker"}, {}), "TF_CONFIG.task.index=None: must be a whole number from 0 up"),
        (tf_config({"type": "worker", "index": "١"}, {}), "TF_CONFIG.task.index=١: must be"),
        (tf_config({"type": "worker", "index": "01"}, {}), "TF_CONFIG.task.index=01: must be"),
        (tf_config(worker(-1), {}), "TF_CONFIG.task.index=-1: must be"),
        ('{"task": {"type": "worker", "index": Infinity}}', "TF_CONFIG.task.index=inf: must be"),
        (tf_config(worker(0), {}, clutser={}), "TF_CONFIG.clutser: unknown field. Did you mean cluster? Leave it out"),
        (tf_config(worker(0), {"wroker": WORKERS}), "TF_CONFIG.cluster.wroker: unknown job. Did you mean worker?"),
        (tf_config(worker(0), {"worker": "h:1"}), "TF_CONFIG.cluster.worker=h:1: must be a list, as [HOST:PORT, …]"),
        (tf_config(worker(0), {"worker": ["h:1", "h"]}), "TF_CONFIG.cluster.worker[1]=h: must be an address HOST:PORT"),
        *(
            (tf_config(worker(0), {"worker": [address]}), "TF_CONFIG.cluster.worker[0]=")
            for address in ("h:", ":1", "h:0", "h:65536", "::1:80", "http://h:1", "h:1/x", 7, None, "h :1", "h:-1")
        ),
        *(
            (tf_config(worker(0), {"worker": [address]}), f"worker[0]={address}: must be an address HOST:PORT")
            for address in ("h:٤٧", "h:01")
        ),
        (tf_config(worker(0), {"worker": {"0": "h:1", "2": "g:1"}}), "TF_CONFIG.cluster.worker: has the tasks 0, 2;"),
        (tf_config(worker(0), {"worker": ["H:1", "h:1"]}), "worker:1 has the address of worker:0, h:1; give it"),
        (
            tf_config(worker(0), {"worker": ["h:1", "g:1"], "chief": ["g:1"]}),
            "TF_CONFIG.cluster.worker: worker:1 has the address of chief:0, g:1; give it its own",
        ),
        (tf_config(worker(0), {"worker": ["h:1"], "chief": ["g:1", "g:2"]}), "TF_CONFIG.cluster.chief: has more than"),
        (tf_config({"type": "ps", "index": 0}, {"worker": ["h:1"], "ps": ["h:2"]}), "TF_CONFIG.cluster.ps: is for s"),
        (tf_config(worker(0), {"worker": ["h:1"], "ps": ["h:2"]}), "leave the job out, or take that"),
    ],
)
def test_a_description_that_cannot_be_right_is_refused_by_its_field(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        place({"TF_CONFIG": text})
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_settings_describe_the_same_and_what_they_leave_out_is_tensorflow_s() -> None:
    spec, variable = {"worker": WORKERS}, tf_config(worker(1), {"worker": WORKERS})
    told = from_variable(variable)
    assert told == Cluster("TF_CONFIG", TASKS, TASKS[1])
    for each in (
        from_settings(spec, "worker:1"),
        from_settings(spec, "worker:1", variable),
        from_settings(spec, None, variable),
        from_settings({}, "worker:1", tf_config(None, spec)),
    ):
        assert each == told._replace(source="cluster.spec")
    assert from_settings({}, "evaluator:0").rank is None
    assert IPV6.host == "fe80::1"


@pytest.mark.parametrize(
    ("spec", "task", "variable", "words"),
    [
        ({"worker": WORKERS}, None, "", "cluster.task is missing: say which of worker:0 at h:1, "),
        ({"worker": WORKERS}, "worker", "", "cluster.task=worker: must be JOB:INDEX, as worker:0, where JOB is one"),
        ({"worker": WORKERS}, "worker:3", "", "cluster.task=worker:3: is not a task of cluster.spec, which has"),
        ({}, "worker:0", "", "cluster.task=worker:0: there is no cluster; give cluster.spec, too, or TF_CONFIG"),
        (
            {"worker": WORKERS},
            "worker:0",
            tf_config(worker(0), {"worker": WORKERS[:2]}),
            "cluster.spec: is worker:0 at h:1, worker:1 at h:2, worker:2 at g:3, but TF_CONFIG.cluster is worker:0",
        ),
        (
            {"worker": WORKERS},
            "worker:0",
            tf_config(worker(1), {}),
            "cluster.task=worker:0: but TF_CONFIG.task is worker:1: leave one out",
        ),
    ],
)
def test_settings_that_cannot_be_right_are_refused(spec: Any, task: str | None, variable: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_settings(spec, task, variable)
    assert str(refused.value).startswith(words)


def test_the_tasks_ps_are_the_first_ranks_where_a_run_may_have_servers() -> None:
    spec, server = {"worker": WORKERS[2:], "ps": ["h:1"], "chief": ["c:9"]}, ClusterTask("ps", 0, "h:1")
    take_cluster(spec, "worker:0")
    with pytest.raises(ConfigError, match=r"^cluster\.spec\.ps: is for strategy=parameter_server; in all others"):
        place()
    cluster_spec.allow_servers()
    tasks = (server, CHIEF, ClusterTask("worker", 0, "g:3"))
    assert place() == RankPlace("cluster.spec", 2, 3, 0, 1, "h", 1, tasks)
    take_cluster(spec, "ps:0")
    assert (here := place()) is not None
    assert (here.rank, here.role) == (0, "ps:0")


def test_a_described_cluster_comes_before_a_launcher_of_one_and_is_refused_beside_another_one() -> None:
    take_cluster({"chief": ["c:9"], "worker": WORKERS}, "worker:1")
    alone = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
    expected = RankPlace("cluster.spec", 2, 4, 1, 2, "c", 9, (CHIEF, *TASKS))
    assert place() == place({}) == place(alone) == expected
    assert expected.role == "worker:1" and host_name().endswith(" as worker:1")
    for placed in ({"RANK": "0", "WORLD_SIZE": "1"}, {**alone, "SLURM_STEP_NUM_TASKS": "2"}):
        with pytest.raises(ConfigError, match=r"^cluster\.spec: .* has placed this process already .*: leave"):
            place(placed)
    with pytest.raises(ConfigError, match=r"^WORLD_SIZE=2: cluster\.spec says 4; leave it out"):
        place({"WORLD_SIZE": "2"})
    take_cluster({"worker": ["h:1"]}, "worker:0")
    assert is_rank(), "of a world of one, which starts no workers of its own"


@pytest.mark.parametrize("where", ["TF_CONFIG", "cluster.spec"])
def test_the_evaluator_is_no_rank_and_trains_nothing(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = []
    if where == "TF_CONFIG":
        monkeypatch.setenv("TF_CONFIG", tf_config({"type": "evaluator", "index": 0}, {"worker": WORKERS}))
    else:
        words = ["cluster.task=evaluator:0", "cluster.spec={worker: [h:1, g:1]}"]
    monkeypatch.setattr(sys, "argv", ["ddp"])
    with pytest.raises(SystemExit) as ended:
        train.main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    start = f"error: train: this process is evaluator:0, as {where} says, but no run is named: give all tasks"
    assert said == f"{start} run.name=NAME\n"
    with pytest.raises(ConfigError, match=r"^ddp\.fit: this process is evaluator:0"):
        ddp.fit(None, None, None)  # type: ignore[arg-type]
    assert place() is None
    monkeypatch.setenv("TF_CONFIG", "{")
    monkeypatch.setattr(cluster_spec, "_own", None)
    refuse_evaluator("whoever needs the place is told by it")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.spec.worker=h:1,g:1", "cluster.task=worker:0"], "addresses stand in brackets: cluster.spec.worker="),
        (["cluster.spec.worker=[h:1", "cluster.task=worker:0"], "cannot read 'cluster.spec.worker=[h:1'"),
        (["cluster.spec=[h:1,g:1]", "cluster.task=worker:0"], "cluster.spec=[h:1,g:1]: must be a mapping, as cluster."),
        (["cluster.spec=hello"], "cluster.spec=hello: must be a mapping, as cluster.spec.worker='[HOST:PORT,…]'"),
        (["cluster.spec.worker=[h:1]"], "cluster.task is missing: say which of worker:0 at h:1 is this process"),
        (
            ["cluster.spec.worker=[h:1,g:1]", "cluster.task=worker:1", "-m"],
            "-m is for a process that starts its own workers, and cluster.spec says that there are 2 workers: leave",
        ),
        (
            ["cluster.spec.worker=[h:1]", "cluster.task=worker:0", "cluster.workers=3"],
            "cluster.workers=3: cluster.spec says that there is 1 worker already; leave this setting out",
        ),
    ],
)
def test_a_command_line_is_refused_in_one_sentence(
    words: Sequence[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ddp"])
    with pytest.raises(SystemExit):
        train.main(words)
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_the_defaults_describe_no_cluster() -> None:
    join_cluster(["cluster.task=null", "cluster.spec={}"])
    assert cluster_spec._own is None


def test_help_needs_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ddp"])
    monkeypatch.setattr(train.launcher, "main", lambda: sys.exit("the page"))
    with pytest.raises(SystemExit, match="the page"):
        train.main(["--help", "cluster.spec.worker=[h:1]"])


# --- processes that are started by hand ------------------------------------------------------------------------------


def free_addresses(number: int) -> list[str]:
    with contextlib.ExitStack() as held:  # all at once, so that no two are the same
        taken = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [f"127.0.0.1:{server.getsockname()[1]}" for server in taken]


def as_task(cluster: Mapping[str, Sequence[str]], **deadlines: float) -> ddp.Communicator:
    """Takes the rank out of `tests/ranks.py`'s environment; the first process is the chief, the others are workers."""
    rank = int(os.environ["RANK"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    task = worker(rank - 1) if rank else {"type": "chief", "index": 0}
    os.environ.update(TF_CONFIG=tf_config(task, cluster), TORCHELASTIC_USE_AGENT_STORE="")
    return ddp.init(**deadlines)


def leave_late(cluster: Mapping[str, Sequence[str]]) -> tuple[float, str]:
    """A worker comes to its last barrier, and is slow from there on."""
    comm = as_task(cluster, abort_s=30)
    end = session._end

    def slow(*given: Any) -> None:
        time.sleep(0.5)
        end(*given)

    if comm.rank == 1:
        session._end = slow
    with io.StringIO() as said:
        handler = logging.StreamHandler(said)
        add_handler(handler)
        log.info("here")
        log.removeHandler(handler)
        written = said.getvalue()
    ddp.shutdown()
    return time.monotonic(), written


def test_the_chief_leaves_last_and_each_line_of_a_log_has_the_role() -> None:
    first, second = free_addresses(2)
    (chief_s, chief), (worker_s, late) = run_ranks(leave_late, 2, {"chief": [first], "worker": [second]})
    assert chief_s > worker_s - 0.05, "it keeps the store, which the worker needs to the end"
    assert chief.endswith(" rank 0/2 chief:0 INFO  here\n") and late.endswith(" rank 1/2 worker:0 INFO  here\n")


def die_or_wait(cluster: Mapping[str, Sequence[str]]) -> str:
    comm = as_task(cluster, abort_s=30)
    if comm.rank == 1:
        os._exit(0)
    with pytest.raises(PeerLost) as lost:
        comm.all_reduce(torch.ones(1))
    return str(lost.value)


def test_a_task_that_dies_is_named_by_its_role() -> None:
    first, second = free_addresses(2)
    said, _ = collect(start_ranks(die_or_wait, 2, {"chief": [first], "worker": [second]}))
    assert said.startswith(f"lost rank 1 on host {socket.gethostname()} as worker:0 during collective #")


def wait_in_vain(cluster: Mapping[str, Sequence[str]]) -> tuple[list[str], str]:
    warned: list[str] = []
    log.warning = lambda words, *given: warned.append(words % given)  # type: ignore[method-assign]
    with pytest.raises(PeerLost) as lost:
        as_task(cluster, warn_s=0.1, abort_s=0.6)
    return warned, str(lost.value)


def test_a_task_that_never_comes_is_named() -> None:
    first, second = free_addresses(2)
    ((warned, lost),) = run_ranks(wait_in_vain, 1, {"chief": [first], "worker": [second]})
    # A slow machine also says that it waits for its own store.
    assert warned[-1] == f"start-up has waited 0 s for rank(s) worker:0 at {second} of 2"
    assert f"of 2 ranks, worker:0 at {second} did not come within 0.6 s: start each once" in lost


def test_a_task_that_comes_twice_is_told() -> None:
    tasks = (CHIEF, *TASKS[:1])
    store = HashStore()
    with ThreadPoolExecutor(3) as threads:

        def come(rank: int, abort_s: float = 20) -> Future[Any]:
            return threads.submit(rendezvous, store, rank, 2, warn_s=20, abort_s=abort_s, tasks=tasks)

        first = come(1)
        while not store.check(["here/1"]):
            time.sleep(0.001)
        second = come(1)
        with pytest.raises(ConfigError, match=r"^two processes have started as worker:0 at h:1: start each once$"):
            first.result(20)
        come(0).result(20), second.result(20)
        with pytest.raises(PeerLost, match=r"; another process has started as worker:0 at h:1 before this one: st"):
            come(1, 0.2).result(20)


def command_line(cluster: Sequence[str], folder: Path, beside: Sequence[str] = ()) -> int:
    """Runs `scripts/ddp train` as one task, in a process of its own, as a shell does."""
    rank = int(os.environ["RANK"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = ""
    os.chdir(folder)
    sys.argv = ["ddp"]
    with (folder / f"terminal-{rank}").open("w") as terminal:
        for descriptor in (1, 2):
            os.dup2(terminal.fileno(), descriptor)
    task = "chief:0" if rank == 0 else f"worker:{rank - 1}"
    asked = ["data=synthetic", "data.num_samples=64", "model=mlp", "max_steps=2", "run.name=mine", "device=cpu"]
    with pytest.raises(SystemExit) as ended:  # the settings are rank 0's
        train.main([*cluster, f"cluster.task={task}", *(asked if rank == 0 else beside)])
    return int(ended.value.code or 0)


def test_settings_that_rank_0_lacks_are_not_dropped_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = RankPlace("cluster.spec", 0, 4, 0, 1, "c", 9, (CHIEF, *TASKS))
    own = ["max_steps=2", "run.name=mine"]
    monkeypatch.setattr(sys, "argv", ["ddp train", *own, "+cluster.spec={}", "cluster.task=chief:0"])
    assert typed() == own
    assert _unlike_rank_0(here, {1: [], 2: ["run.name=mine"], 3: own}) == {}
    error = "worker:1: max_steps=3: a run has the settings of chief:0; give them there, or nowhere"
    assert _unlike_rank_0(here, {1: [], 2: ["run.name=mine", "max_steps=3"]}) == {"error": error}
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_setting_that_only_another_task_has_leaves_no_run(tmp_path: Path) -> None:
    first, second = free_addresses(2)
    words = [f"cluster.spec.chief=[{first}]", f"cluster.spec.worker=[{second}]"]
    assert collect(start_ranks(command_line, 2, words, tmp_path, ["seed=3"])) == [2, 2]
    terminals = [(tmp_path / f"terminal-{rank}").read_text() for rank in range(2)]
    assert terminals[0] == terminals[1] and terminals[0].startswith("error: worker:0: seed=3: a run has the settings")
    assert not (tmp_path / "runs").exists()


def test_two_processes_that_are_started_by_hand_are_one_run(tmp_path: Path) -> None:
    first, second = free_addresses(2)
    words = [f"cluster.spec.chief=[{first}]", f"cluster.spec.worker=[{second}]"]
    statuses = collect(start_ranks(command_line, 2, words, tmp_path))
    terminals = [(tmp_path / f"terminal-{rank}").read_text() for rank in range(2)]
    assert statuses == [0, 0], terminals
    summary = json.loads((tmp_path / "runs/mine/summary.json").read_text())
    assert (summary["world_size"], summary["roles"], summary["steps"]) == (2, ["chief:0", "worker:0"], 2)
    assert "cluster.task" not in terminals[0] and "cluster.spec" not in terminals[0], "of the commands to try next"
    settings = yaml.safe_load((tmp_path / "runs/mine/config.yaml").read_text())["cluster"]
    assert settings["spec"] == {"chief": [first], "worker": [second]} and settings["task"] is None
    assert " rank 1/2 worker:0 " in (tmp_path / "runs/mine/logs/rank-1.log").read_text()


# --- servers ---------------------------------------------------------------------------------------------------------


def sparse(job: str, index: int, ps: Any) -> str:
    """What Kubeflow tells a task of a job with `enableDynamicWorker`: itself, and if it is a worker the servers."""
    spec = {"worker": {str(index): f"w{index}:1"} if job == "worker" else {}, "ps": ps}
    return json.dumps({"sparseCluster": spec, "task": {"type": job, "index": index}, "environment": "cloud"})


def test_the_tasks_of_a_sparse_cluster_meet_at_their_server() -> None:
    for job, index, is_told in (("ps", 0, "server"), ("worker", 3, "worker")):
        text = sparse(job, index, ["p:2222"])
        assert role_from_env({"TF_CONFIG": text, "DDP_WORKERS": "4"}) == RoleSettings(is_told, None, 4, "p", 2222)
        assert place({"TF_CONFIG": text}) is None
    assert role_from_env({"TF_CONFIG": sparse("evaluator", 0, [])}) is None
    for job, index, ps in (("worker", 0, ["p:1", "q:1"]), ("ps", 1, ["q:1"]), ("chief", 0, [])):
        with pytest.raises(ConfigError, match=rf"^TF_CONFIG\.sparseCluster: names .* to {job}:{index}, .*: take one,"):
            role_from_env({"TF_CONFIG": sparse(job, index, ps)})
    with pytest.raises(ConfigError, match=r"^TF_CONFIG\.sparseCluster=\[\]: must be a mapping"):
        role_from_env({"TF_CONFIG": '{"sparseCluster": []}'})


def test_a_master_is_the_chief() -> None:
    tasks = (CHIEF, ClusterTask("worker", 0, "g:3"))
    text = tf_config({"type": "master", "index": 0}, {"master": ["c:9"], "worker": WORKERS[2:]})
    assert place({"TF_CONFIG": text}) == RankPlace("TF_CONFIG", 0, 2, 0, 1, "c", 9, tasks)
    assert from_settings({"master": ["c:9"], "worker": WORKERS[2:]}, "master:0").rank == 0
    with pytest.raises(ConfigError, match=r"^TF_CONFIG\.cluster\.chief: has more than one address; let the oth"):
        place({"TF_CONFIG": tf_config(worker(0), {"master": ["c:9"], "chief": ["d:9"], "worker": WORKERS})})


def carried_over(texts: Sequence[str]) -> tuple[str, int]:
    """A program for ParameterServerStrategy, as one task; it makes two fits, to the second of which one comes late."""
    number = int(os.environ["RANK"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ.update(TF_CONFIG=texts[number], TORCHELASTIC_USE_AGENT_STORE="", DDP_WORKERS="2")
    steps = 0
    for fit in range(2):
        time.sleep(0.5 * fit * (number == 2))  # the others may have made all steps by then
        model = torch.nn.Linear(8, 4)
        points = torch.randn(64, 8)
        optimizer = torch.optim.Adam(model.parameters())
        how = {"loss": ddp.Classification(), "global_batch": 16, "epochs": 1, "folder": None}
        steps += ddp.fit(model, (points, points.argmax(1) % 4), optimizer, strategy=ddp.ParameterServer(), **how).step
    ddp.shutdown()
    return str(current_role()), steps


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.quick(1)
def test_a_program_for_tensorflow_s_servers_trains_as_each_of_its_tasks(is_sparse: bool) -> None:
    first, second, third = free_addresses(3)
    if is_sparse:
        texts = [sparse("ps", 0, [first]), sparse("worker", 0, [first]), sparse("worker", 1, [first])]
    else:
        cluster = {"master": [second], "worker": [third], "ps": [first]}
        tasks = [{"type": job, "index": 0} for job in ("ps", "master", "worker")]
        texts = [tf_config(task, cluster) for task in tasks]
    found = run_ranks(carried_over, 3, texts)
    assert found[0] == ("server 0", 8) and sorted(found[1:]) == [("worker 0", 8), ("worker 1", 8)]
