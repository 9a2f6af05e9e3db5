"""From a command line to running workers: compose, check, start, wait, explain.

    recipes/train.py, ddp train           recipes/train_torchrun.py              a script or notebook
         │ main                                │ main_under_torchrun                  │ launch(function, …)
         ▼                                     ▼                                      │
    Hydra composes, once             rank 0: Hydra composes, once                     │
    prepare: validate, run directory, data, config.yaml                               │
         │ train                               │ store: rank 0 ──config──▶ all        │
         ▼                                     ▼                                      ▼
    torchrun's engine ── ddp.worker            ddp.worker.train in this process  torchrun's engine ── ddp.worker --call

A worker that fails takes its neighbours with it; so the parent reads all their reports and prints the root cause last.

| how a run ends                         | status | where it is decided                    |
|----------------------------------------|--------|----------------------------------------|
| trained                                | 0      |                                        |
| a worker failed or was killed          | 1      | `describe_failures`                    |
| bad input                              | 2      | `prepare`, `translated`                |
| Ctrl-C, or SIGINT to any worker        | 130    | workers agree, save and exit 0;        |
| SIGTERM, to the parent or any worker   | 143    | the parent says so with its own status |
| a closed terminal; SIGUSR1; SIGUSR2    | 129; …  | the same: 128 + the signal's number    |

This module alone imports Hydra and OmegaConf, and inside functions: importing it stays light, and workers stay free of
them. Read next: ddp/engine.py, ddp/failures.py, ddp/worker.py.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import math
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_type_hints

import yaml

from ddp.config import CHOICES, Config, available_cores, from_plain, to_plain, unknown_key, wrong_type
from ddp.engine import CUBLAS_WORKSPACE, run_workers
from ddp.errors import ConfigError, PeerLost, WorkersFailed
from ddp.failures import describe_failures
from ddp.files import flush_folder, hold, json_object, write_whole
from ddp.terminal import keep_writing, tolerant
from ddp.worker import ORPHAN_GRACE_S, USER_ERRORS, Report, follow_parent, leave
from ddp.worker import train as train_in_this_process

CONF = Path(__file__).parent / "conf"

# ------------------------------------------------------------------------------------------------ the three ways in


def main(config_dir: Path | str = CONF, config_name: str = "train") -> NoReturn:
    """The command line: one run, or with `-m` a sweep of runs one after another. Ends the process with the status.

    Args:
        config_dir: a folder of settings like ddp/conf/.
        config_name: its root file, without ".yaml".
    """
    keep_writing()
    import hydra

    jobs: list[_Job] = []

    def job(composed: Any) -> None:
        """One run. Hydra has made its folder and set its interpolations."""
        from hydra.core.hydra_config import HydraConfig

        settings = HydraConfig.get()
        run_dir = Path(settings.runtime.output_dir)
        jobs.append(_Job(list(settings.overrides.task), run_dir, status=2))
        with _bad_input_to(_print_error), _only_writer(run_dir):
            config = _continued(_to_config(composed), jobs[-1].overrides, run_dir)
            prepare(config, run_dir)
            jobs[-1] = jobs[-1]._replace(status=train(config, run_dir))
        if jobs[-1].status == 2:
            _remove_if_empty(run_dir)
        if jobs[-1].status >= 128:
            sys.exit(jobs[-1].status)  # a signal ends a sweep too; Hydra passes SystemExit on

    register_schemas()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions come to us instead of being printed with a hint on this variable
    try:
        with _bad_input_to(_exit_with_error):
            hydra.main(version_base="1.3", config_path=str(Path(config_dir).resolve()), config_name=config_name)(job)()
    except OSError as error:
        if jobs:
            raise
        _exit_with_error(str(_unwritable(error.filename, error)))  # before any job Hydra makes the folder, and no more
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finally:
        if len(jobs) > 1:
            _print_sweep(jobs)
    sys.exit(next((job.status for job in jobs if job.status), 0))


def main_under_torchrun(config_dir: Path | str = CONF, config_name: str = "train") -> NoReturn:
    """The same, in processes that torchrun has started: rank 0 composes and prepares, all train. Ends the process.

    `cluster.workers` is torchrun's world size. An error at rank 0 reaches the others through the store that torchrun
    keeps, so all end at once and one message is seen. A restart by torchrun goes on with the run of the first attempt.
    """
    keep_writing()
    os.environ["MKL_CBWR"] = "AUTO"  # before torch is imported; see ddp/engine.py
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
    try:
        rank, world_size, local_workers = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    except KeyError as missing:
        _exit_with_error(
            f"{missing} is not in the environment: start this with torchrun --nproc-per-node N, or use train.py"
        )
    follow_parent(os.getppid(), grace_s=ORPHAN_GRACE_S)

    import torch
    from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    from ddp.comm.call import Call
    from ddp.comm.rendezvous import rendezvous as find_ranks
    from ddp.comm.setup import ABORT_S, WARN_S
    from ddp.comm.watchdog import Watchdog
    from ddp.rendezvous import ON_LOOPBACK

    if world_size == local_workers:  # one host: nobody outside of it has to reach the ranks
        os.environ.update({name: interface for name, interface in ON_LOOPBACK.items() if name not in os.environ})
    # As torch.distributed does it: a client of torchrun's own store, or rank 0's store where torchrun keeps none.
    job = PrefixStore("ddp.launcher", next(iter(rendezvous("env://")))[0])  # outlives an attempt, where torchrun has it
    try:
        attempt = find_ranks(job, rank, world_size, warn_s=WARN_S, abort_s=ABORT_S)
        watchdog = Watchdog(attempt, rank, world_size, generation=0, warn_s=math.inf, abort_s=ABORT_S)
        if rank == 0:
            earlier = json.loads(job.get("run")) if job.check(["run"]) else None
            sent = _prepare_under_torchrun(
                config_dir, config_name, world_size=world_size, local_workers=local_workers, earlier=earlier
            )
            if "error" not in sent:
                job.set("run", json.dumps(sent))
            watchdog.say("start", json.dumps(sent))
        else:
            importlib.import_module("ddp.build")  # which takes a second, while rank 0 prepares
            sent = json.loads(watchdog.wait_for_word("start", 0, Call(0, "rank 0 prepares the run")))
        if "error" not in sent:
            watchdog.say(f"data/{rank}", json.dumps(_prepare_host(sent)))
            for other in range(world_size):
                fetches = Call(0, f"rank {other} fetches the data of its host")
                sent.update(json.loads(watchdog.wait_for_word(f"data/{other}", other, fetches)))
        watchdog.leave()
    except (DistError, PeerLost) as error:
        print(f"rank {rank}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        leave(1)
    if "error" in sent:  # who found it has printed it
        if rank == 0:
            _wait_for_readers(attempt, num_readers=world_size - 1)
        else:
            attempt.add("readers", 1)
        _tell_torchrun(sent["error"])
        sys.exit(2)

    config, run_dir = from_plain(sent["config"]), Path(sent["run_dir"])
    assert config.cluster.threads_per_worker is not None
    torch.set_num_threads(config.cluster.threads_per_worker)  # torchrun has set OMP_NUM_THREADS=1
    terminal = tolerant(os.dup(2), like=sys.stderr)
    status = train_in_this_process(config, run_dir, rank=rank)
    report = Report.read(run_dir / "logs", rank=rank) if status else None
    if report is not None and report.is_secondary:
        print(f"rank {rank} stopped because another rank failed: {report.message}", file=terminal, flush=True)
    elif report is not None:
        print(report.block(), file=terminal, flush=True)
        _tell_torchrun(report.block())
    if status:
        leave(status)
    if rank == 0:
        from ddp.build import finish

        finish(config, run_dir)
    sys.exit(0)


def started_by_torchrun() -> bool:
    """Returns True in a process that torchrun has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _prepare_host(sent: Mapping[str, Any]) -> dict[str, str]:
    """Fetches the data for all ranks of this host, which need not share a disk with rank 0's.

    One rank of each host does it; rank 0 has done so already. Returns an `error`, if there was one.
    """
    found: dict[str, str] = {}

    def refuse(message: str) -> None:
        found["error"] = f"host {socket.gethostname()}: {message}"
        _print_error(found["error"])

    if os.environ.get("LOCAL_RANK") == "0" and os.environ.get("RANK") != "0":
        with _bad_input_to(refuse):
            from ddp.build import prepare_data

            prepare_data(from_plain(sent["config"]))
    return found


def _prepare_under_torchrun(
    config_dir: Path | str,
    config_name: str,
    *,
    world_size: int,
    local_workers: int,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Rank 0's part. Returns what all ranks need, as JSON holds it: `config` and `run_dir`, or an `error`.

    Args:
        earlier: what this returned in the attempt that torchrun has restarted.
    """
    sent: dict[str, Any] = {}

    def refuse(message: str) -> None:
        _print_error(message)
        sent["error"] = message

    with _bad_input_to(refuse):
        if earlier is None:
            config, run_dir = _compose(config_dir, config_name, world_size=world_size, local_workers=local_workers)
        else:
            config, run_dir = _restarted(earlier, world_size=world_size)
        until_end = contextlib.ExitStack()
        try:
            until_end.enter_context(_only_writer(run_dir))
            atexit.register(until_end.close)
            prepare(config, run_dir, local_workers=local_workers, is_restart=earlier is not None)
        except USER_ERRORS:
            until_end.close()
            _remove_if_empty(run_dir)
            raise
        sent.update(config=to_plain(config), run_dir=str(run_dir))
    return sent


def _restarted(earlier: Mapping[str, Any], *, world_size: int) -> tuple[Config, Path]:
    """The run of the earlier attempt: from its own last checkpoint, or, without one, as it was asked for at first."""
    config, run_dir = from_plain(earlier["config"]), Path(earlier["run_dir"])
    run_dir.mkdir(parents=True, exist_ok=True)  # rank 0 may be on another host now
    if any((run_dir / "checkpoints").glob("*step-*")):
        config.resume = "auto"
    if config.cluster.workers != world_size:
        config.cluster.workers, config.batch.num_shards = world_size, None
    return config, run_dir


def _tell_torchrun(message: str) -> None:
    """Puts `message` into torchrun's own last block, which else says "To enable traceback see …"."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(path).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))


def launch(
    function: Callable[..., Any],
    *args: Any,
    workers: int = 2,
    threads_per_worker: int | None = None,
    timeout_s: float | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs `function(*args, **kwargs)` on `workers` new processes of this host, and returns their results by rank.

    Inside it `ddp.init()` finds its neighbours. Function, arguments and results travel by cloudpickle, so a function of
    a notebook works. Rank 0 prints to this terminal.

    Args:
        function: what every worker runs.
        workers: the world size.
        threads_per_worker: None: cores ÷ workers, at least 1.
        timeout_s: a worker that runs longer ends the launch, and says where it stood. None: no limit.

    Raises:
        ConfigError: not at least one worker.
        WorkersFailed: a worker raised or died; the message ends with the block of the one that failed first.
        KeyboardInterrupt: Ctrl-C. The workers have got it too, and are gone.
    """
    import cloudpickle

    if workers < 1:
        raise ConfigError(f"workers={workers}: must be at least 1")
    threads = threads_per_worker or max(1, available_cores() // workers)
    with tempfile.TemporaryDirectory(prefix="ddp-launch-") as folder:
        call = Path(folder) / "call.pkl"
        with call.open("wb") as stream:
            pickle.dump((workers, sys.path), stream)
            cloudpickle.dump((function, args, kwargs), stream)
        limit = [] if timeout_s is None else ["--timeout", str(timeout_s)]
        ended = run_workers(["--call", str(call), *limit], workers=workers, threads=threads)
        if ended.signal is signal.SIGINT:
            raise KeyboardInterrupt
        if ended.signal is not None:
            raise SystemExit(128 + ended.signal)
        if ended.failures:
            raise WorkersFailed(describe_failures(ended.failures, Path(folder) / "logs"))
        results = [Path(folder) / f"result-rank-{rank}.pkl" for rank in range(workers)]
        for rank, path in enumerate(results):
            if not path.exists():
                raise WorkersFailed(f"rank {rank} ended without a result: does the function call sys.exit?")
        return [pickle.loads(path.read_bytes()) for path in results]


# --------------------------------------------------------------------------------------------- compose and prepare


def register_schemas() -> None:
    """Tells Hydra the types: the root as `schema_train`, and `GROUP/schema_CHOICE` for every choice."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    root = OmegaConf.structured(Config)
    for group, choices in CHOICES.items():
        root[group] = get_type_hints(Config)[group]  # the base class: OmegaConf refuses one choice in place of another
        for name, kind in choices.items():
            ConfigStore.instance().store(group=group, name=f"schema_{name.name}", node=kind)
    OmegaConf.set_struct(root.init_from.rename, False)  # its keys are the user's, without Hydra's "+"
    ConfigStore.instance().store(name="schema_train", node=root)


def _compose(config_dir: Path | str, config_name: str, *, world_size: int, local_workers: int) -> tuple[Config, Path]:
    """What `hydra.main` does for one run, without taking over the process. Returns the config and the run directory."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf, open_dict

    overrides = sys.argv[1:]
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "cluster.workers" and value != str(world_size):
            raise ConfigError(f"{override}: torchrun has started {world_size} workers; leave this setting out")
    overrides = [*overrides, f"cluster.workers={world_size}", f"cluster.local_workers={local_workers}"]
    register_schemas()
    with initialize_config_dir(config_dir=str(Path(config_dir).resolve()), version_base="1.3", job_name=config_name):
        composed = compose(config_name, overrides=overrides, return_hydra_config=True)
        run_dir = Path(str(OmegaConf.select(composed, "hydra.run.dir"))).absolute()
        with open_dict(composed):
            del composed["hydra"]
        config = _continued(_to_config(composed), overrides, run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(run_dir, error) from error
    return config, run_dir


def _to_config(composed: Any) -> Config:
    """OmegaConf's tree as our dataclasses; this is where `Config.validate` runs."""
    from omegaconf import OmegaConf

    try:
        config = OmegaConf.to_object(composed)
    except AttributeError:  # `+key=value` slips past the schema; `from_plain` says which key it was
        plain: Any = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
        config = from_plain(plain)
    assert isinstance(config, Config)
    return config


def _continued(config: Config, overrides: Sequence[str], run_dir: Path) -> Config:
    """With resume=auto: the settings that the run in this folder began with, and this command line's on top."""
    path = run_dir / "config.yaml"
    keys = [override.partition("=")[0].lstrip("+~") for override in overrides]
    if config.resume != "auto" or not path.exists() or "recipe" in keys:
        return config
    plain, now = _read_settings(path), to_plain(config)
    derived = {"cluster": ["local_workers"], "batch": ["num_shards"]}
    if "cluster.workers" in keys:
        derived["cluster"].append("threads_per_worker")
    for group, names in derived.items():
        plain[group].update({name: now[group][name] for name in names})
    for *above, name in (key.split(".") for key in keys if not key.startswith("hydra.")):
        source, target = now, plain
        for group in above:
            source, target = source[group], target[group]
        target[name] = source[name]
    return from_plain(plain)


def prepare(config: Config, run_dir: Path, *, local_workers: int | None = None, is_restart: bool = False) -> None:
    """Everything that can be refused before a worker starts; writes RUN_DIR/config.yaml when nothing was.

    Args:
        config: gets its run directory and every derived value.
        run_dir: exists.
        local_workers: workers on this host; None: all.
        is_restart: the run in the folder is this one.

    Raises:
        ConfigError, CheckpointError, ReplicaMismatch: what cannot work, with the remedy.
    """
    from ddp.build import check

    config.run.dir, config.run.name = str(run_dir), config.run.name or run_dir.name
    if not is_restart:
        _refuse_reuse(config, run_dir)
    _try_writing(run_dir)
    config.resolve(local_workers=local_workers, num_shards=_earlier_num_shards(config, run_dir))
    check(config)
    for stale in (run_dir / "summary.json", *run_dir.glob("logs/error-rank-*.json")):
        stale.unlink(missing_ok=True)  # what the attempt that is being resumed has said about its end
    text = yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)
    path = run_dir / "config.yaml"
    if not path.is_file() or path.read_bytes() != text.encode():
        write_whole(path, text)
    for parent in run_dir.absolute().parents[:3]:  # Hydra has made the folder: runs/NAME, or runs/SWEEP/JOB
        flush_folder(parent)


@contextlib.contextmanager
def _only_writer(run_dir: Path) -> Iterator[None]:
    """Refuses a folder that another run writes: its parent, or a rank 0 that has outlived its parent."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(contextlib.closing(hold(run_dir)))
            if (run_dir / "checkpoints").is_dir():
                hold(run_dir / "checkpoints").close()
        except OSError as error:
            raise _unwritable(run_dir, error) from error
        yield


def _refuse_reuse(config: Config, run_dir: Path) -> None:
    """A folder that holds a run is continued or left alone, never mixed with another."""
    if not (run_dir / "config.yaml").exists() or config.resume == "auto":
        return
    if config.resume != "none" and Path(config.resume).resolve().is_relative_to(run_dir.resolve()):
        return
    raise ConfigError(
        f"{_setting_for(run_dir, config)}: {run_dir} holds a run; continue it with resume=auto, or take another"
    )


def _setting_for(run_dir: Path, config: Config) -> str:
    """What to write on the command line to mean this folder."""
    named = run_dir.resolve() == Path("runs", config.run.name).resolve()
    return f"run.name={config.run.name}" if named else f"hydra.run.dir={run_dir}"


def _try_writing(run_dir: Path, *, num_bytes: int = 8 << 20) -> None:
    """Writes as much as a small run will; a full disk is better met now than at the first checkpoint."""
    trial = run_dir / ".trial"
    try:
        with trial.open("wb") as stream:
            stream.write(os.urandom(num_bytes))  # random: a file system that compresses must not be fooled
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise _unwritable(run_dir, error) from error
    finally:
        with contextlib.suppress(OSError):
            trial.unlink(missing_ok=True)


def _unwritable(folder: Path | str, error: OSError) -> ConfigError:
    reason = error.strerror or str(error)
    return ConfigError(f"run directory {folder}: {reason}; make room there, or take another with hydra.run.dir=FOLDER")


def _remove_if_empty(run_dir: Path) -> None:
    """Takes a folder back that was made for a run that never was."""
    with contextlib.suppress(OSError):
        run_dir.rmdir()


def _earlier_num_shards(config: Config, run_dir: Path) -> int | None:
    """The number of shards of the run that this one resumes: random streams hang on it."""
    if config.resume == "none":
        return None
    start = run_dir if config.resume == "auto" else Path(config.resume).resolve()
    for folder in (start, *start.parents[:2]):  # RUN_DIR, RUN_DIR/checkpoints or RUN_DIR/checkpoints/ONE
        if (folder / "config.yaml").is_file():
            with contextlib.suppress(ConfigError):  # its checkpoints are as good without; `restore` says what differs
                return from_plain(_read_settings(folder / "config.yaml")).batch.num_shards
    return None


def _read_settings(path: Path) -> dict[str, Any]:
    """Returns what the config.yaml of an earlier run holds.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
        plain: dict[str, Any] = yaml.safe_load(text)
        whole = to_plain(from_plain(plain))
        last = list(whole)[-1]
        missing = [name for name in whole if name not in plain]
        if missing := missing or [f"{last}.{name}" for name in whole[last] if name not in plain[last]]:
            raise ConfigError(f"it ends before {missing[0]}")
        if not text.endswith("\n"):
            raise ConfigError("it ends in the middle of a line")
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} is damaged: {' '.join(str(error).split())}. The checkpoints do not need it: start a run "
            f"from them with resume={path.parent / 'checkpoints'} run.name=NEW, and give its settings again"
        ) from error
    return plain


# ----------------------------------------------------------------------------------------------- bad input, in words


@contextlib.contextmanager
def _bad_input_to(tell: Callable[[str], object]) -> Iterator[None]:
    """Hands the one sentence of an error of the user's input to `tell`; every other exception passes."""
    try:
        yield
    except Exception as error:
        message = translated(error)
        if message is None:
            raise
        tell(message)


def translated(error: BaseException) -> str | None:
    """The sentence for a user's error, whoever raised it; None for an error of ours."""
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException, ValidationError

    if isinstance(error, USER_ERRORS):
        return str(error)
    if isinstance(error, MissingConfigException):
        options = [option for option in error.options or () if not option.startswith("schema_")]
        asked = (error.missing_cfg_file or "").replace("/", "=")
        return str(unknown_key(asked, options, what="choice")) if options else str(error).splitlines()[0]
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}: {' '.join(error.message.split('See https')[0].split())}"
    if isinstance(error, HydraException):
        return (error.__cause__ and translated(error.__cause__)) or str(error)
    if isinstance(error, InterpolationResolutionError):
        return f"{error.full_key}: {str(error).splitlines()[0]}"
    if isinstance(error, OmegaConfBaseException):
        hints = get_type_hints(error.object_type) if error.object_type in _OUR_TYPES else {}
        if isinstance(error, ValidationError) and error.key in hints:
            value = "null" if error.value is None else error.value
            return str(wrong_type(str(error.full_key), value, hints[error.key]))
        return str(unknown_key(str(error.full_key), hints)) if hints else str(error).splitlines()[0]
    return None


_OUR_TYPES = {
    Config,
    *(kind for kind in get_type_hints(Config).values() if isinstance(kind, type)),
    *(kind for choices in CHOICES.values() for kind in choices.values()),
}


def _print_error(message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)


def _exit_with_error(message: str) -> NoReturn:
    _print_error(message)
    sys.exit(2)


# ------------------------------------------------------------------------------------------------- start and wait


def train(config: Config, run_dir: Path) -> int:
    """Starts the workers of a prepared run, waits for them and says how it ended. Returns the status: see the table."""
    from ddp.build import finish

    threads = config.cluster.threads_per_worker or max(1, available_cores() // config.cluster.workers)
    ended = run_workers([str(run_dir.resolve())], workers=config.cluster.workers, threads=threads)

    if ended.failures:
        _restore_terminal()
        print(describe_failures(ended.failures, run_dir / "logs"), file=sys.stderr, flush=True)
        return 1
    if (run_dir / "summary.json").exists():  # not where a signal came before the first step
        finish(config, run_dir)
    stopped_by = ended.signal or _agreed_stop(run_dir)
    if stopped_by is None:
        return 0
    if _agreed_stop(run_dir) is not None:
        outcome = f"continue with {_setting_for(run_dir, config)} resume=auto"
    else:
        outcome = "nothing was saved at the stop"
        reports = [Report.read(run_dir / "logs", rank=rank) for rank in range(config.cluster.workers)]
        failed = [report for report in reports if report is not None]
        if failed:  # the stop itself went wrong
            print(min(failed, key=lambda r: (r.is_secondary, r.time_s)).block(), file=sys.stderr, flush=True)
    print(f"stopped by {stopped_by.name}; {outcome}", file=sys.stderr, flush=True)
    return 128 + stopped_by


def _agreed_stop(run_dir: Path) -> signal.Signals | None:
    """The signal on which the workers agreed to stop, whichever of them got it."""
    with contextlib.suppress(OSError, ValueError):
        name = json_object((run_dir / "summary.json").read_text()).get("stopped_by")
        return None if name is None else signal.Signals[name]
    return None


def _restore_terminal() -> None:
    """A killed rank 0 may have left its progress bar's hidden cursor behind."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\n")


def _wait_for_readers(store: Any, *, num_readers: int, limit_s: float = 10.0) -> None:
    """Keeps rank 0, whose process may serve the store, until the others have read from it."""
    deadline_s = time.monotonic() + limit_s
    while store.add("readers", 0) < num_readers and time.monotonic() < deadline_s:
        time.sleep(0.05)


class _Job(NamedTuple):
    """One run of a sweep."""

    overrides: list[str]
    run_dir: Path
    status: int


def _print_sweep(jobs: Sequence[_Job]) -> None:
    """The jobs of a sweep side by side: what differed, how fast, how good, how it ended."""
    from rich.console import Console
    from rich.table import Table

    shared = set.intersection(*(set(job.overrides) for job in jobs))
    table = Table("job", "samples/s", "result", "ended", "folder")
    table.title = f"sweep in {os.path.relpath(jobs[0].run_dir.parent)}"
    for job in jobs:
        summary: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            summary = json_object((job.run_dir / "summary.json").read_text())
        results = [f"{key} {value:.4g}" for key, value in summary.items() if key.startswith("test_")]
        rate = summary.get("samples_per_s")
        table.add_row(
            " ".join(override for override in job.overrides if override not in shared),
            "" if rate is None else f"{rate:,.0f}",
            ", ".join(results),
            "done" if job.status == 0 else f"status {job.status}",
            job.run_dir.name,
        )
    Console().print(table)
