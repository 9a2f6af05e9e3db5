"""Runs in processes that a launcher, or the user, has started: rank 0, or server 0, prepares the run, and all train.

Processes of torchrun, or of another launcher of `meeting/place.py`:

    rank 0     compose, prepare ── "start" ──▶ every rank         config and run directory, or the error
    one rank of each other host    fetch the data there
    all ranks  ◀── "data/RANK" ──▶                                the result of fetching
    all ranks  train in this process

With servers (`cluster.servers`), these are the last ranks of a launcher, and the tasks `ps` where the cluster is
described. Here they have the first numbers (`failures.Seat`), so that server 0 prepares the run, and prints.

These messages travel through torchrun's store, so that an error at one rank ends all ranks at once and is printed once.
After a restart by torchrun, rank 0 finds the run of the first attempt in the store and continues it.

Servers and workers that are started by hand, each a separate job, on any host and at any time:

    server 0        compose, prepare ── "run" ──▶ the store           config and run directory, and the settings typed
    every other     ◀── "run" ── the store                            refuses settings that server 0 does not have
    each            fetches the data of its host, takes its part, and trains in this process

In an elastic run that another host has begun (`elastic.py`), that host's launcher is in the place of server 0, and this
process becomes the launcher of one worker.

`cluster.role`, or the environment, gives a process's role (`comm/meeting/role.py::role_from_env`); the order of arrival
gives its number (`comm/meeting/rendezvous.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ddp.comm.meeting.membership import Hosts
from ddp.comm.meeting.place import RankPlace, is_on_loopback, number_of, place
from ddp.comm.meeting.role import SERVERS, RoleSettings, role_from_env, set_role
from ddp.errors import ConfigError, PeerLost, first_line
from ddp.process.arguments import relative_path
from ddp.process.memory import available_cores, collect_later
from ddp.process.terminal import keep_writing, say, tolerant
from ddp.run.launch.command_line import (
    bad_input_to,
    composed,
    exit_with_error,
    is_of_task,
    join_cluster,
    options_first,
    print_error,
    typed,
)
from ddp.run.launch.failures import Report, Seat, agreed_signal, describe_failures
from ddp.run.launch.processes import help_workers
from ddp.run.launch.run_folder import forget_trial, only_writer, prepare, settings_text
from ddp.run.launch.supervisor import CUBLAS_WORKSPACE, ON_LOOPBACK
from ddp.run.launch.worker import ORPHAN_GRACE_S, follow_parent, leave
from ddp.run.launch.worker import train as train_in_this_process
from ddp.run.settings.address import check_arrived
from ddp.run.settings.config import Config
from ddp.run.settings.reader import from_plain
from ddp.units import counted


def main() -> NoReturn:
    """Trains as one of the started ranks; ends the process. `cluster.workers` is the world size."""
    become_worker()
    with bad_input_to(exit_with_error):
        join_cluster(sys.argv[1:])
        launched = here = place()
        servers = 0
        if here is not None:
            servers = _num_servers(here)
            here = here._replace(rank=number_of(here, servers, setting="cluster.servers"))
        if here is not None and here.tasks:  # each in its own terminal, where none need wait for the others
            _refuse_of_one_process(here.world_size - servers, servers, described_by=here.launcher)
    if here is None or launched is None:
        exit_with_error("no launcher has started this process: use torchrun --nproc-per-node N, or recipes/train.py")
    if not here.tasks:  # those are started by hand, in a shell that may end before them
        follow_parent(os.getppid(), grace_s=ORPHAN_GRACE_S)
    sent, _store = _received(here, launched, servers)  # which this process may serve, as long as it lives
    if servers:
        os.environ[SERVERS] = str(servers)  # which gives each its role when it joins the others (`rendezvous.py`)
    train_as(here.rank, from_plain(sent["config"]), Path(sent["run_dir"]), role=here.role)


def become_worker() -> None:
    """Makes this process one that computes, before it imports torch."""
    collect_later()
    keep_writing()
    os.environ["MKL_CBWR"] = "AUTO"  # see ddp/run/launch/supervisor.py
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE


def train_as(
    rank: int, config: Config, run_dir: Path, *, role: str = "", take_role: Callable[[], object] = lambda: None
) -> NoReturn:
    """Trains in this process, prints how it ended, and on rank 0 completes the results; ends the process.

    Args:
        rank, role, take_role: see `worker.train`.
    """
    import torch

    seat = Seat(run_dir / "logs", rank, config.cluster.servers)
    assert config.cluster.threads_per_worker is not None
    torch.set_num_threads(config.cluster.threads_per_worker)  # torchrun has set OMP_NUM_THREADS=1
    terminal = tolerant(os.dup(2), like=sys.stderr)
    status = train_in_this_process(config, run_dir, rank=rank, role=role, take_role=take_role)
    if config.trial and rank == 0:
        forget_trial(run_dir)
    report = Report.read(seat) if status else None
    if report is not None and report.is_secondary:
        say(f"{seat} stopped because another rank failed: {report.message}", to=terminal)
    elif report is not None:
        say(report.block(), to=terminal)
        _tell_torchrun(report.block())
    if status:
        leave(status)
    if rank == 0:
        from ddp.run.assembly.stages import finish
        from ddp.train.sidecar import is_followed, wait_for

        if config.evaluate.by == "sidecar":
            wait_for(run_dir, partial(is_followed, run_dir), within_s=config.evaluate.wait_s)
        finish(config, run_dir)
    sys.exit(0)


def _num_servers(here: RankPlace) -> int:
    """Returns the number of servers among all processes.

    Raises:
        ConfigError: `cluster.servers` differs from the description of the cluster.
    """
    asked = next((each for each in reversed(sys.argv[1:]) if each.lstrip("+").startswith("cluster.servers=")), "")
    is_served = "strategy=parameter_server" in sys.argv[1:]
    number = int(value) if (value := asked.partition("=")[2]).isdigit() else int(is_served)
    if not asked and (me := role_from_env()) is not None:
        number = me.num_servers or 0
    if here.tasks:
        described = sum(task.job == "ps" for task in here.tasks)
        if asked and number != described:
            raise ConfigError(f"{asked}: {here.launcher} has {counted(described, 'task')} of the job ps; leave it out")
        number = described
    return number


def _received(here: RankPlace, launched: RankPlace, servers: int) -> tuple[dict[str, Any], Any]:
    """Returns the run that rank 0 has prepared, and the store of all; ends the process otherwise.

    Args:
        launched: the place of this process as its launcher says, which may have other numbers.
    """
    from torch.distributed import DistError

    from ddp.comm.host_links import WARN_S
    from ddp.comm.meeting.private_store import part_of
    from ddp.comm.meeting.rendezvous import on_this_host, open_store, rendezvous
    from ddp.comm.session import ABORT_S
    from ddp.comm.watch.call import Call
    from ddp.comm.watch.watchdog import Watchdog

    rank, world_size, has_said = here.rank, here.world_size, False
    try:
        opened = open_store(launched, warn_s=WARN_S, abort_s=ABORT_S)
        job = part_of(opened.store, "ddp.run.launch.command_line")
        attempt = rendezvous(job, rank, world_size, warn_s=WARN_S, abort_s=ABORT_S, tasks=here.tasks)
        local_rank, local_workers = on_this_host(here, attempt, within_s=ABORT_S)
        if world_size == local_workers:  # on one host, no process outside of it has to reach the ranks
            os.environ.update({name: interface for name, interface in ON_LOOPBACK.items() if name not in os.environ})
        watchdog = Watchdog(attempt, rank, world_size, generation=0, warn_s=math.inf, abort_s=ABORT_S)
        if here.tasks and rank:
            watchdog.publish(f"typed/{rank}", json.dumps(typed()))
        if rank == 0:
            theirs = {}
            for other in range(1, world_size if here.tasks else 1):
                says = Call(0, f"rank {other} says which settings it is given")
                theirs[other] = json.loads(watchdog.wait_for_value(f"typed/{other}", other, says))
            earlier = json.loads(job.get("run")) if job.check(["run"]) else None
            sent = _unlike_rank_0(here, theirs)  # before there is a folder
            if world_size == local_workers:
                local_workers -= servers
            sent = sent or prepared(
                workers=world_size - servers, servers=servers, local_workers=local_workers, earlier=earlier
            )
            has_said = "error" in sent
            if "error" not in sent:
                job.set("run", json.dumps(sent))
            watchdog.publish("start", json.dumps(sent))
        else:
            importlib.import_module("ddp.run.assembly.stages")  # it takes a second, while rank 0 prepares
            sent = json.loads(watchdog.wait_for_value("start", 0, Call(0, "rank 0 prepares the run")))
        if "error" not in sent:
            fetched = prepare_host(sent, fetches=not local_rank) if rank else {}
            has_said = "error" in fetched
            watchdog.publish(f"data/{rank}", json.dumps(fetched))
            for other in range(world_size):
                fetches = Call(0, f"rank {other} fetches the data of its host")
                sent.update(json.loads(watchdog.wait_for_value(f"data/{other}", other, fetches)))
        watchdog.leave()
    except (DistError, PeerLost, ConfigError) as error:
        say(f"rank {rank}: {first_line(error)}", to=sys.stderr)
        leave(2 if isinstance(error, ConfigError) else 1)
    if "error" in sent:  # the rank that found it has printed it
        if here.tasks and not has_said:  # elsewhere, because each task has its own terminal
            print_error(sent["error"])
        if rank == 0:
            _wait_for_readers(attempt, num_readers=world_size - 1)
        else:
            attempt.add("readers", 1)
        _tell_torchrun(sent["error"])
        sys.exit(2)
    return sent, opened


def prepared(
    *, workers: int | None, servers: int = 0, local_workers: int | None, earlier: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Prepares the run on rank 0. Returns for all ranks, as JSON can hold it, `config` and `run_dir`; or `error`.

    Args:
        workers: None: as the settings say. local_workers: None: all, as if this process started them.
        earlier: what this returned in the attempt that torchrun has restarted.
    """
    sent: dict[str, Any] = {}

    def refuse(message: str) -> None:
        print_error(message)
        sent["error"] = message

    with bad_input_to(refuse):
        if earlier is None:
            config, run_dir = _asked_for(workers=workers, servers=servers, local_workers=local_workers)
        else:
            config, run_dir = _restarted(earlier, workers=workers or 1)
        with contextlib.ExitStack() as until_end:
            until_end.enter_context(only_writer(run_dir))
            prepare(config, run_dir, local_workers=local_workers, is_restart=earlier is not None)
            atexit.register(until_end.pop_all().close)
        sent.update(config=asdict(config), run_dir=str(run_dir))
    return sent


def _asked_for(*, workers: int | None, servers: int, local_workers: int | None) -> tuple[Config, Path]:
    """Returns the run that the command line asks for."""
    overrides = [each for each in options_first(sys.argv[1:]) if not is_of_task(each)]  # which is rank 0's alone
    counts = [f"cluster.servers={servers}"]
    if workers is not None:
        _refuse_of_one_process(workers, servers)
        counts += [f"cluster.workers={workers}"]
    if local_workers is not None:
        counts += [f"+cluster.local_workers={local_workers}"]
    return composed([*overrides, *counts])


def _refuse_of_one_process(workers: int, servers: int, *, described_by: str = "") -> None:
    """Raises ConfigError for settings that need a process that starts its own workers.

    Args:
        described_by: the description of a cluster that says what this process is; "" where a launcher does.
    """
    already = f"{described_by or 'the launcher'} says that there {'is' if workers == 1 else 'are'} "
    already += counted(workers, "worker") + (f" and {counted(servers, 'server')}" if servers else "")
    for argument in sys.argv[1:]:
        key, _, value = argument.partition("=")
        if argument in ("-m", "--multirun", "-h", "--help"):
            remedy = f"leave {described_by} out" if described_by else "start it without a launcher"
            raise ConfigError(f"{argument} is for a process that starts its own workers, and {already}: {remedy}")
        if key == "cluster.workers" and value != str(workers):
            raise ConfigError(f"{argument}: {already} already; leave this setting out")


def _restarted(earlier: Mapping[str, Any], *, workers: int) -> tuple[Config, Path]:
    """Returns the run of the earlier attempt, to resume from its last checkpoint, or without one from its beginning."""
    check_arrived(earlier["config"], sys.argv[1:])
    config, run_dir = from_plain(earlier["config"]), Path(earlier["run_dir"])
    if any((run_dir / "checkpoints").glob("*step-*")):
        config.resume = "auto"
    if config.cluster.workers != workers:
        config.cluster.workers, config.batch.num_shards = workers, None
    return config, run_dir


def _unlike_rank_0(here: RankPlace, theirs: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """Returns an `error` if a task that is started by hand has settings that rank 0, which composes, does not have.

    Args:
        theirs: the settings of the other tasks, by rank.
    """
    for rank, settings in theirs.items():
        if strange := [each for each in settings if each not in typed()]:
            error = f"{here.tasks[rank]}: {' '.join(strange)}: a run has the settings of {here.tasks[0]}; give them "
            error += "there, or nowhere"
            print_error(error)
            return {"error": error}
    return {}


def prepare_host(sent: Mapping[str, Any], *, fetches: bool = True) -> dict[str, str]:
    """Checks the settings from rank 0. Returns an `error` if there was one.

    Args:
        fetches: the data for all ranks of this host, too, which need not share a disk with rank 0's. One rank of each
            host does so, except on that of rank 0, which has done so.
    """
    found: dict[str, str] = {}

    def refuse(message: str) -> None:
        found["error"] = f"host {socket.gethostname()}: {message}"
        print_error(found["error"])

    with bad_input_to(refuse):
        from ddp.run.assembly.components import load_data

        check_arrived(sent["config"], sys.argv[1:])
        if fetches:
            load_data(from_plain(sent["config"]), download=True)
    return found


def _wait_for_readers(store: Any, *, num_readers: int, limit_s: float = 10.0) -> None:
    """Keeps rank 0, whose process may serve the store, until the others have read the error from it."""
    deadline_s = time.monotonic() + limit_s
    while store.add("readers", 0) < num_readers and time.monotonic() < deadline_s:
        time.sleep(0.05)


def _tell_torchrun(message: str) -> None:
    """Puts `message` into torchrun's own last block, which otherwise says "To enable traceback see …"."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(path).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))


# --- Servers and workers that are started by hand --------------------------------------------------------------------


def train_by_hand(me: RoleSettings) -> NoReturn:
    """Trains as a server or worker that is started by hand; ends the process."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a store that has ended prints a stack of C++ first
    become_worker()
    with bad_input_to(exit_with_error):
        if several := [each for each in sys.argv[1:] if each in ("-m", "--multirun")]:
            raise ConfigError(f"{several[0]}: is for a process that starts its own workers; leave cluster.role out")

        from ddp.comm.host_links import WARN_S
        from ddp.comm.meeting.rendezvous import arrive
        from ddp.comm.session import ABORT_S

        alone = is_on_loopback(me.address)  # then no process outside of this host has to reach the others
        for name, interface in ON_LOOPBACK.items() if alone else ():
            os.environ.setdefault(name, interface)
        try:
            mine, run = arrive(me, partial(_prepared, me, on_one_host=alone), warn_s=WARN_S, abort_s=ABORT_S)
        except PeerLost as error:
            say(f"{me.job}: {first_line(error)}", to=sys.stderr)
            leave(1)
        if mine.served is None:
            _refuse_other_settings(str(mine), run)
    if mine.served is None and prepare_host(run):
        sys.exit(2)
    config, run_dir = from_plain(run["config"]), Path(run["run_dir"])
    if not mine.num_servers:
        with bad_input_to(exit_with_error):
            leave(_help(config, run_dir, Hosts(me.address, me.port, mine.store)))
    number = mine.index + (mine.num_servers if mine.job == "worker" else 0)
    if number:
        log = relative_path(Seat(run_dir / "logs", number, mine.num_servers).log)
        say(f"{mine} of {relative_path(run_dir)}/; it writes to {log}")
    train_as(number, config, run_dir, take_role=partial(set_role, mine))


def _help(config: Config, run_dir: Path, hosts: Hosts) -> int:
    """Runs one process of an elastic run that another host has begun; returns the exit status."""
    logs = run_dir / "logs"
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(
            f"cluster.role=worker: {run_dir}, the folder of the run, is not on this host, whose worker may be the one "
            "that saves into it: give all hosts one file system"
        )
    say(f"one process of this host joins {relative_path(run_dir)}/; it writes to {relative_path(logs)}/")
    how: dict[str, Any] = {"threads": config.cluster.threads_per_worker or available_cores(), "logs": logs}
    how |= {"restarts": config.cluster.restarts, "silent_s": config.cluster.silent_s}
    ended = help_workers([str(run_dir)], settings=settings_text(config), hosts=hosts, **how)
    if stopped_by := ended.signal or agreed_signal(ended.failures):
        return 128 + stopped_by
    if ended.failures:
        say(describe_failures(ended.failures, logs).text, to=sys.stderr)
    return int(bool(ended.failures) or ended.is_cut_off)


def _prepared(me: RoleSettings, *, on_one_host: bool) -> dict[str, Any]:
    """Prepares the run on server 0. Returns what the other processes have to know; ends the process after an error."""
    counts: dict[str, Any] = {"workers": me.num_workers, "local_workers": None if on_one_host else 1}
    sent = prepared(**counts, servers=me.num_servers or 1)
    if "error" in sent:
        sys.exit(2)
    return {**sent, "workers": sent["config"]["cluster"]["workers"], "typed": typed()}


def _refuse_other_settings(who: str, run: Mapping[str, Any]) -> None:
    """Raises ConfigError if this process has settings that the first one, which composes, does not have."""
    first = "server 0" if run["servers"] else "its first launcher"
    if "config" not in run:
        raise ConfigError(f"{who}: {first} runs another program; start this process with that program, too")
    if strange := [each for each in typed() if each not in run["typed"]]:
        raise ConfigError(f"{who}: {' '.join(strange)}: a run has the settings of {first}; give them there, or nowhere")
