"""Reads the description of a cluster: which tasks it has, at which addresses, and which of them this process is.

    TF_CONFIG='{"cluster": {"chief": ["a:4711"], "worker": ["b:4711"]}, "task": {"type": "worker", "index": 0}}'
    scripts/ddp train cluster.spec.chief=[a:4711] cluster.spec.worker=[b:4711] cluster.task=worker:0

| job       | its tasks                                                                   |
|-----------|-----------------------------------------------------------------------------|
| chief     | one, which is rank 0 where there are no servers; or `master`                |
| worker    | the ranks that follow; the first one is rank 0 where there is no chief      |
| ps        | the servers, for a strategy with parameter servers; refused in all others   |
| evaluator | no rank, and need not be listed: the side-car of what the others train      |

Kubeflow's `sparseCluster` (`enableDynamicWorker`) names only the process itself to a server, and the servers to a
worker. So these processes meet like those started by hand (`rendezvous.py`).

The tasks of a job are a list of addresses HOST:PORT, or a mapping from their indices to addresses. The ranks meet at
the address of rank 0. The other addresses say which ranks share a host, and name a missing rank.

`TF_CONFIG` is TensorFlow's (https://www.tensorflow.org/guide/distributed_training#tf_config). Its fields for platforms
and for TensorFlow's own connections are ignored. An unknown field is refused, because it may be a misspelt cluster,
without which each process would train alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddp.errors import ConfigError, did_you_mean
from ddp.process.arguments import program

TRAINS = ("chief", "worker")
JOBS = (*TRAINS, "ps", "evaluator")
FORMERLY = {"master": "chief"}
WORDS = (*FORMERLY, *JOBS)
VARIABLE, SETTING, SPARSE = "TF_CONFIG", "cluster.spec", "sparseCluster"
KEYS = {VARIABLE: (f"{VARIABLE}.cluster", f"{VARIABLE}.task"), SETTING: (SETTING, "cluster.task")}  # named in errors
IGNORED = ("environment", "rpc_layer", "job", "service", "session_master", "eval_session_master", "model_dir")
NUMBER = r"(0|[1-9][0-9]{0,8})"  # without leading zeros
ADDRESS = re.compile(rf"([^\s:/\[\]]+|\[[\w:.%]+\]):{NUMBER}")


@dataclass(frozen=True)
class ClusterTask:
    """One process of a cluster, as "worker:1"; its address is "" where the description does not list it."""

    job: str
    index: int
    address: str = ""

    def __str__(self) -> str:
        return f"{self.job}:{self.index}"

    @property
    def host(self) -> str:
        """The host of its address."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port of its address."""
        return int(self.address.rpartition(":")[2])


class Cluster(NamedTuple):
    """A cluster, as one process sees it.

    Attributes:
        source: where it is described: TF_CONFIG or cluster.spec.
        ranks: by rank, the servers, then the tasks that train.
        task: this process.
    """

    source: str
    ranks: tuple[ClusterTask, ...]
    task: ClusterTask

    @property
    def rank(self) -> int | None:
        """The rank of this process; None: it is the evaluator."""
        return self.ranks.index(self.task) if self.task in self.ranks else None

    @property
    def num_servers(self) -> int:
        """Number of its parameter servers."""
        return sum(each.job == "ps" for each in self.ranks)


# --- the description of this process ----------------------------------------------------------------------------------

_own: Cluster | None = None  # from this process's command line
_may_have_servers = False


def take_cluster(spec: Mapping[str, Any], task: str | None) -> None:
    """Makes this process the task of a cluster that its command line describes: see `from_settings`."""
    global _own
    _own = from_settings(spec, task, os.environ.get(VARIABLE, ""))


def allow_servers() -> None:
    """Allows parameter servers in the description, because this process will have a role (`role.py`)."""
    global _may_have_servers
    _may_have_servers = True


def is_on_command_line() -> bool:
    """Returns True if the command line of this process describes a cluster, which takes precedence over TF_CONFIG."""
    return _own is not None


def described(env: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster that the command line of this process or TF_CONFIG describes; None without one."""
    text = env.get(VARIABLE, "")
    return _own or (from_variable(text) if text else None)


def described_ranks(env: Mapping[str, str]) -> Cluster | None:
    """Returns the described cluster in which this process is a rank; None without one, and in the evaluator.

    Raises:
        ConfigError: it has parameter servers, but this process will have no role.
    """
    cluster = described(env)
    if cluster is None or cluster.rank is None:
        return None
    if cluster.num_servers and not _may_have_servers:
        raise ConfigError(
            f"{KEYS[cluster.source][0]}.ps: is for strategy=parameter_server; in all others the workers keep the "
            "parameters: leave the job out, or take that strategy, with which no ddp.init may precede ddp.fit"
        )
    return cluster


def described_servers() -> int:
    """Returns the number of servers in the described cluster, if it may have any and this process is a rank."""
    cluster = described_ranks(os.environ) if _may_have_servers else None
    return 0 if cluster is None else cluster.num_servers


def evaluator() -> str:
    """Returns "evaluator:0, as TF_CONFIG says" in the evaluator of a cluster, which is no rank; "" elsewhere."""
    with contextlib.suppress(ConfigError):  # callers that need the place report it
        if (cluster := described(os.environ)) is not None and cluster.rank is None:
            return f"{cluster.task}, as {cluster.source} says"
    return ""


def refuse_evaluator(what: str) -> None:
    """Raises ConfigError in the evaluator of a cluster, because `what` trains."""
    if me := evaluator():
        raise ConfigError(
            f"{what}: this process is {me}, which trains nothing; here, run a command that follows the others: "
            f"{program()} sidecar RUN, or {program()} evaluate region=NAME"
        )


# --- how a description is read ----------------------------------------------------------------------------------------


def from_variable(text: str) -> Cluster | None:
    """Returns the cluster in `TF_CONFIG`; None if it lists no task, so that this process may be alone.

    Raises:
        ConfigError: it is malformed, or contradicts itself; the message names the field.
    """
    fields, tasks, task = _variable(text)
    is_sparse = SPARSE in fields and task is not None and task.job != "evaluator"
    if is_sparse or (not tasks and (task is None or (task.job in TRAINS and task.index == 0))):
        return None
    return _cluster(VARIABLE, tasks, task)


def server_of_sparse(text: str) -> tuple[ClusterTask, ClusterTask] | None:
    """Returns this process and its server by `TF_CONFIG.sparseCluster`; None without one, and for the evaluator.

    Raises:
        ConfigError: it is malformed, or does not name one server.
    """
    fields, _, task = _variable(text)
    if SPARSE not in fields or (task is not None and task.job == "evaluator"):
        return None
    key, spec = f"{VARIABLE}.{SPARSE}", fields[SPARSE]
    servers = _tasks(key, {"ps": spec.get("ps")} if isinstance(spec, Mapping) else spec)
    if task is None or len(servers) != 1 or (task.job, task.index > 0) == ("ps", True):
        raise ConfigError(
            f"{key}: names {_list(servers) or 'no server'} to {task}, but tasks that do not know the whole cluster "
            "have one, ps:0: take one, and no chief, or leave enableDynamicWorker out"
        )
    return task, servers[0]


def from_settings(spec: Mapping[str, Any], task: str | None, variable: str = "") -> Cluster:
    """Returns the cluster that `cluster.spec` describes, and in it the task `cluster.task`, such as "worker:1".

    Args:
        variable: `TF_CONFIG`, which supplies what the settings leave out.

    Raises:
        ConfigError: as above; or the two contradict each other.
    """
    tasks, mine, (_, theirs, their_task) = _tasks(SETTING, spec), _named(task), _variable(variable)
    if tasks and theirs and tasks != theirs:
        raise ConfigError(f"{SETTING}: is {_list(tasks)}, but {VARIABLE}.cluster is {_list(theirs)}: leave one out")
    if mine and their_task and mine != their_task:
        raise ConfigError(f"cluster.task={mine}: but {VARIABLE}.task is {their_task}: leave one out")
    if not tasks and not theirs and not (mine and mine.job == "evaluator"):
        raise ConfigError(f"cluster.task={task}: there is no cluster; give {SETTING}, too, or {VARIABLE}")
    return _cluster(SETTING, tasks or theirs, mine or their_task)


def _cluster(source: str, tasks: Sequence[ClusterTask], task: ClusterTask | None) -> Cluster:
    """Returns the cluster of these tasks, in which `task` is this process."""
    key, task_key = KEYS[source]
    if task is None:
        raise ConfigError(f"{task_key} is missing: say which of {_list(tasks)} is this process")
    ranks = tuple(sorted((each for each in tasks if each.job != "evaluator"), key=lambda each: each.job != "ps"))
    listed = {str(each): each for each in tasks}
    if task.job != "evaluator" and str(task) not in listed:
        raise ConfigError(f"{task_key}={task}: is not a task of {key}, which has {_list(tasks) or 'none'}")
    return Cluster(source, ranks, task if task.job == "evaluator" else listed[str(task)])


def _variable(text: str) -> tuple[Mapping[str, Any], list[ClusterTask], ClusterTask | None]:
    """Returns the fields in the text of `TF_CONFIG`, the tasks of its cluster, and the task of this process."""
    try:
        fields = json.loads(text or "{}", object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{VARIABLE}={text:.60}: cannot be read ({error})") from error
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{VARIABLE}={text:.60}: must have the fields cluster and task")
    known = ("cluster", SPARSE, "task", *IGNORED)
    for field in fields:
        if field not in known:
            hint = did_you_mean(field, known)
            raise ConfigError(f"{VARIABLE}.{field}: unknown field.{hint} Leave it out; known are {', '.join(known)}")
    tasks, task = _tasks(f"{VARIABLE}.cluster", fields.get("cluster") or {}), fields.get("task") or {}
    if not isinstance(task, Mapping):
        raise ConfigError(f"{VARIABLE}.task={task!r:.60}: must have the fields type and index")
    if not task:
        return fields, tasks, None
    job, index = FORMERLY.get(str(task.get("type")), task.get("type")), str(task.get("index"))
    if job not in JOBS:
        raise ConfigError(f"{VARIABLE}.task.type={job}: must be one of {', '.join(JOBS)}")
    if not re.fullmatch(NUMBER, index):
        raise ConfigError(f"{VARIABLE}.task.index={index:.20}: must be a whole number from 0 up")
    return fields, tasks, ClusterTask(job, int(index))


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object; refuses duplicate fields, of which `json` would keep the last."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is given twice")
        found[name] = value
    return found


def _named(task: str | None) -> ClusterTask | None:
    """Returns the task of the setting `cluster.task`."""
    if task is None:
        return None
    read = re.fullmatch(rf"({'|'.join(WORDS)}):{NUMBER}", task)
    if read is None:
        raise ConfigError(f"cluster.task={task}: must be JOB:INDEX, as worker:0, where JOB is one of {', '.join(JOBS)}")
    return ClusterTask(FORMERLY.get(read[1], read[1]), int(read[2]))


def _tasks(key: str, spec: Any) -> list[ClusterTask]:
    """Returns the tasks of all jobs, in the order of `JOBS`; `key` names the field in errors."""
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{key}={spec!r:.60}: must be a mapping, as {{worker: [HOST:PORT, …]}}")
    for job in spec:
        if job not in WORDS:
            hint = did_you_mean(job, JOBS)
            raise ConfigError(f"{key}.{job}: unknown job.{hint} Choose from {', '.join(JOBS)}")
    tasks = [task for job in WORDS for task in _tasks_of_job(f"{key}.{job}", FORMERLY.get(job, job), spec.get(job))]
    if len([task for task in tasks if task.job == "chief"]) > 1:
        raise ConfigError(f"{key}.chief: has more than one address; let the others be workers")
    at: dict[str, ClusterTask] = {}
    for task in tasks:
        if (other := at.setdefault(task.address, task)) is not task:
            raise ConfigError(f"{key}.{task.job}: {task} has the address of {other}, {task.address}; give it its own")
    return tasks


def _tasks_of_job(key: str, job: str, listed: Any) -> list[ClusterTask]:
    if isinstance(listed, Mapping):
        of_index = {str(index): address for index, address in listed.items()}
        indices = [str(index) for index in range(len(listed))]
        if sorted(of_index) != sorted(indices):
            raise ConfigError(f"{key}: has the tasks {', '.join(map(str, listed))}; number them from 0 without a gap")
        listed = [of_index[index] for index in indices]
    if listed is not None and not isinstance(listed, (list, tuple)):
        raise ConfigError(f"{key}={listed!s:.60}: must be a list, as [HOST:PORT, …]")
    for index, address in enumerate(listed or ()):
        read = ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if read is None or not 0 < int(read[2]) < 1 << 16:
            raise ConfigError(f"{key}[{index}]={address!s:.60}: must be an address HOST:PORT")
    # Host names are case-insensitive; the name of an interface after "%" is not.
    one_case = (address if "%" in address else address.lower() for address in listed or ())
    return [ClusterTask(job, index, address) for index, address in enumerate(one_case)]


def _list(tasks: Sequence[ClusterTask]) -> str:
    """Returns the tasks as text."""
    return ", ".join(f"{task} at {task.address}" if task.address else str(task) for task in tasks)
