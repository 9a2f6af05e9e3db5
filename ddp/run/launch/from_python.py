"""`ddp.launch`: runs a function of a script or notebook on new processes of this host."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from ddp.comm.meeting.membership import elastic
from ddp.comm.meeting.place import refuse_workers
from ddp.errors import ConfigError, WorkersFailed, nearest, workers_failed
from ddp.process.memory import available_bytes, available_cores
from ddp.process.terminal import log, say
from ddp.run.launch.failures import Failure, Seat, agreed_signal, describe_failures
from ddp.run.launch.processes import run_workers
from ddp.run.settings.checks import most_workers
from ddp.setting import Natural, Positive, Whole, checked
from ddp.train.checkpoints.moved import meaning
from ddp.units import counted


def launch(
    function: Callable[..., Any],
    *args: Any,
    workers: int = 2,
    servers: int = 0,
    restarts: int = 3,
    min_workers: int | None = None,
    spares: int = 0,
    max_workers: int | None = None,
    wait_s: float = 300.0,
    silent_s: float = 30.0,
    threads_per_worker: int | None = None,
    timeout_s: float | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs `function(*args, **kwargs)` on `workers` new processes of this host, and returns their results by rank.

    Inside the function `ddp.init()` finds the other ranks. Function, arguments and results are sent by cloudpickle, so
    a function of a notebook works. Rank 0 prints to this terminal.

    `servers`, for strategy="parameter_server", are further processes, which also run the function. A lost worker is
    restarted, and so are all servers together if one is lost (`supervisor.py`). The servers' results come first, so
    `[0]` is that of server 0, which prints to this terminal. The result of a worker that was lost and not restarted is
    None.

    Args:
        workers: the world size; with servers, the number of further processes.
        servers: the number of processes that hold the parameters; 0: the workers hold them.
        restarts: most restarts of each worker, with `servers` or `min_workers`; and of the servers.
        min_workers: fewest workers that train on when others are lost or leave (docs/elastic.md); None: the loss of one
            ends the launch. The results are those of the workers that are there at the end, by rank.
        spares: further processes, which wait in `ddp.init` to take a lost worker's place.
        max_workers: most workers, up to which others may join; None: `workers`.
        wait_s: seconds that fewer than `min_workers` wait for others, before `ddp.fit` raises TooFewWorkers.
        silent_s: a worker that shows no sign of life for so many seconds is killed; only with `min_workers`.
        threads_per_worker: None: cores ÷ processes, at least 1.
        timeout_s: a worker that runs longer ends the launch, and reports its stack. None: no limit.

    Raises:
        ConfigError: an argument cannot work, or cannot be sent; or this process already is one rank of several.
        WorkersFailed: a worker raised or died; the message ends with the block of the one that failed first. The error
            also has the type of that worker's exception, so that `except ValueError` around the launch works.
        KeyboardInterrupt, SystemExit: Ctrl-C, or another signal, which has also ended the workers.
    """
    name = getattr(function, "__name__", "function")
    refuse_workers(f"ddp.launch({name}, …)", instead=f"call {name}({'…' if args or kwargs else ''}) itself")
    check_call(function, args, kwargs)
    _check_launch(workers, servers, restarts, threads_per_worker, timeout_s)
    how: dict[str, Any] = {"spares": spares, "max_workers": max_workers, "wait_s": wait_s, "silent_s": silent_s}
    limits = elastic(min_workers=min_workers, workers=workers, **how)
    if limits is not None and servers:
        raise ConfigError(f"min_workers={min_workers} with servers={servers}: with servers workers come and go already")
    if sys.stdout is not None and sys.stdout.isatty():  # a pipe gets what the function prints, and nothing else
        and_servers = f"{counted(servers, 'server')} and " if servers else ""
        say(f"starting {and_servers}{counted(workers, 'worker')} …")
    with folder_for_call(workers, function, args, kwargs) as folder:
        limit = [] if timeout_s is None else ["--timeout", str(timeout_s)]
        counts: dict[str, Any] = {"workers": workers, "servers": servers, "restarts": restarts}
        words = ["--call", str(folder / CALL), *limit]
        ended = run_workers(words, threads=threads_per_worker, logs=folder / "logs", elastic=limits, **counts)
        if (stopped_by := ended.signal or agreed_signal(ended.failures)) is signal.SIGINT:
            raise KeyboardInterrupt("it has ended the workers; if a fit was running, its last line says what is saved")
        if stopped_by is not None:
            raise SystemExit(128 + stopped_by)
        if ended.failures:
            raise _failed(folder, ended.failures, servers)
        numbers = range(servers + workers) if ended.members is None else ended.members
        results = [result_file(folder, number) for number in numbers]
        for rank, path in enumerate(results[: servers or len(results)]):
            if not path.exists():
                who = Seat(folder, rank, servers)
                raise workers_failed(f"{who} ended without a result: let the function return, not call sys.exit", rank)
        return [pickle.loads(path.read_bytes()) if path.exists() else None for path in results]


@checked
def _check_launch(
    workers: Natural, servers: Whole, restarts: Whole, threads_per_worker: Natural | None, timeout_s: Positive | None
) -> None:
    """Raises ConfigError unless the arguments of `launch` are numbers that can work; warns of too many workers."""
    what = f"servers={servers} workers={workers}" if servers else f"workers={workers}"
    if servers + workers > (most := most_processes()):
        raise ConfigError(f"{what}: free memory and ulimit -u here are enough for {most:,} processes; take fewer")
    if servers + workers > most_workers():
        cores = counted(available_cores(), "core")
        log.warning("%s: they oversubscribe %s; %d or fewer train faster", what, cores, available_cores())


def most_processes() -> int:
    """Returns the number of processes above which memory, or the user's limit of processes, surely does not suffice."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    is_unlimited = limit == resource.RLIM_INFINITY or not os.geteuid()  # the kernel holds root to no limit
    return int(min(available_bytes() / LEAST_BYTES, 1 << 62 if is_unlimited else limit))


# --- The call on its way to the workers, and its results on their way back -------------------------------------------
#
#     call.pkl               world size and `sys.path`; then function, arguments, keywords, and which classes and
#                            functions of the script these use, because pickle asks a worker for them by name
#     defined.pkl            these again, for processes that multiprocessing starts from a worker
#     result-rank-R.pkl      what the function returned on rank R
#     raised-rank-R.pkl      what it raised there, if that can be sent
#
# A value that cannot be sent, or does not fit on the disk, is refused in one sentence; of a call, before workers start.


CALL, DEFINED = "call.pkl", "defined.pkl"
Definitions = dict[tuple[str, str], Any]  # by module and name
LARGEST_EXCEPTION = 1 << 26  # bytes
LEAST_BYTES = 1 << 23  # of a process with Python and little else
_SEARCH = threading.Lock()
OURS = [*inspect.signature(launch).parameters][2:-1]  # but for the function, and what it is given


def result_file(folder: Path, rank: int) -> Path:
    """Returns the file in which a rank leaves its result."""
    return folder / f"result-rank-{rank}.pkl"


def write_exception(folder: Path, rank: int, error: BaseException) -> None:
    """Leaves a rank's exception for the launcher, if it can be sent."""
    with contextlib.suppress(Exception):  # the report has its type and message
        data = _dumped(error)
        if len(data) <= LARGEST_EXCEPTION:
            _exception_file(folder, rank).write_bytes(data)


def _exception_file(folder: Path, rank: int) -> Path:
    return folder / f"raised-rank-{rank}.pkl"


def _failed(folder: Path, failures: Mapping[int, Failure], servers: int = 0) -> WorkersFailed:
    """Returns the error that carries the exception of the worker that failed first."""
    cause = describe_failures(failures, folder / "logs", servers)
    if cause.report is None:
        return workers_failed(cause.text, cause.rank)
    path = _exception_file(folder, cause.rank)
    sent = path.read_bytes() if path.exists() else b""
    return workers_failed(cause.text, cause.rank, cause.report.type, sent)


def check_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError unless `function(*args, **kwargs)` can be called."""
    if not callable(function):
        raise ConfigError(
            f"ddp.launch needs a function, and got {function!r:.60}: give it train, and not train(), which runs it here"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = _name(function)
        strange = [key for key in kwargs if key not in signature.parameters]
        meant = {key: nearest(meaning(key).launch or key, OURS) for key in strange}
        hint = next((f". Did you mean {near}={kwargs[key]!r}?" for key, near in meant.items() if near), "")
        if not hint and args and isinstance(args[-1], int):
            hint = f". Did you mean ddp.launch({name}, workers={args[-1]})?"
        raise ConfigError(f"ddp.launch calls {name}{signature} with the other arguments: {error}{hint}") from None


@contextlib.contextmanager
def folder_for_call(workers: int, function: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[Path]:
    """Makes a folder with the call in it, for the duration of the block.

    Raises:
        ConfigError: something of the call cannot be sent, or the disk is full.
    """
    sent, defined = _pickled(function, args, kwargs)
    with contextlib.ExitStack() as until_end:
        try:
            folder = Path(until_end.enter_context(tempfile.TemporaryDirectory(prefix="ddp-launch-")))
            (folder / CALL).write_bytes(pickle.dumps((workers, sys.path)) + sent)
            (folder / DEFINED).write_bytes(defined)
        except OSError as error:
            raise _no_room(error) from error
        yield folder


def _no_room(error: OSError) -> ConfigError:
    """Returns the error for a temporary folder that cannot be made, or in which nothing more can be written."""
    where = f"{Path(error.filename).parent}: " if error.filename else ""
    return ConfigError(f"{where}{error.strerror}; make room there, or set TMPDIR to another folder")


def write_result(folder: Path, rank: int, function: Callable[..., Any], result: Any) -> None:
    """Leaves a rank's result for the launcher.

    Raises:
        ConfigError: it cannot be sent, or the disk is full.
    """
    try:
        data = _dumped(result)
    except Exception as error:
        hint = ", such as state.evaluation or state.step" if type(result).__name__ == "TrainState" else ""
        raise ConfigError(
            f"{_name(function)} returned a {type(result).__name__}, which cannot be sent to another process ({error}): "
            f"return what you need of it{hint}"
        ) from error
    try:
        result_file(folder, rank).write_bytes(data)
    except OSError as error:
        result_file(folder, rank).unlink(missing_ok=True)  # makes room for the report
        raise _no_room(error) from error


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Returns the call, and what the script defines of it."""
    modules, defined = _strange_modules(function), Definitions()
    with _by_value(modules):
        try:
            data = _dumped((function, args, kwargs, defined), defined)  # which is complete once its turn has come
            return data, _dumped(defined)
        except Exception as error:
            parts = {f"argument {i + 1}": each for i, each in enumerate(args)} | {f"{k}=": v for k, v in kwargs.items()}
            raise _not_sendable(parts, function, error) from error


def adopt(defined: Definitions) -> None:
    """Lets pickle find in this process what the launched script defines."""
    for (module, name), value in defined.items():
        setattr(sys.modules.setdefault(module, ModuleType(module)), name, value)


def definition(name: str, argv: Sequence[str]) -> Any:
    """Returns the launched script's object of this name, in a process with the command line of a worker.

    Raises:
        AttributeError: the launched function uses no such object.
    """
    try:
        return _read_definitions(Path(argv[argv.index("--call") + 1]).with_name(DEFINED))["__main__", name]
    except (KeyError, OSError):
        raise AttributeError(f"the launched function uses no {name} of its script") from None


@lru_cache(maxsize=1)
def _read_definitions(file: Path) -> Definitions:
    defined: Definitions = pickle.loads(file.read_bytes())
    return defined


def _dumped(value: Any, defined: Definitions | None = None) -> bytes:
    """Returns the value, pickled for another process, where its tensors are on the CPU.

    Args:
        defined: gets the classes and functions in it that other processes cannot import.
    """
    import cloudpickle

    has_torch = "torch" in sys.modules  # else there are no tensors, and the workers need not wait for its import here
    if has_torch:
        from ddp.process import gpu
    sent_whole = {"__main__", *cloudpickle.list_registry_pickle_by_value()}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, each: Any) -> Any:
            if isinstance(each, ModuleType) and type(each) is not ModuleType and sys.modules.get(each.__name__) is each:
                return importlib.import_module, (each.__name__,)  # torch.classes is sent with any attribute `classes`
            if defined is not None and isinstance(each, (type, FunctionType)) and each.__module__ in sent_whole:
                key = each.__module__, each.__qualname__
                if getattr(sys.modules.get(key[0]), key[1], None) is each:  # as pickle looks for it
                    defined[key] = each
            found = gpu.reduced(each) if has_torch else NotImplemented
            return super().reducer_override(each) if found is NotImplemented else found

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def _not_sendable(parts: Mapping[str, Any], function: Callable[..., Any], error: Exception) -> ConfigError:
    """Returns the error that names what cannot be sent: an argument, or a variable that the function uses."""
    name = _name(function)
    with contextlib.suppress(TypeError, ValueError):
        used = inspect.getclosurevars(function)
        variables = {**used.globals, **used.nonlocals}
        parts = {**parts, **{f"{key}, which {name} uses": each for key, each in variables.items()}}
    what = next((key for key, each in parts.items() if not _can_be_sent(each)), "the function")
    return ConfigError(
        f"ddp.launch({name}, …): {what} cannot be sent to another process ({error}); make it inside of the function"
    )


def _can_be_sent(value: Any) -> bool:
    try:
        _dumped(value)
    except Exception:
        return False
    return True


def _strange_modules(function: Callable[..., Any]) -> list[ModuleType]:
    """Returns modules that are loaded here and cannot be imported in a worker: a main program that was spawned, say."""
    names = ["__mp_main__", *filter(None, [getattr(function, "__module__", None)])]
    found = [sys.modules[name] for name in dict.fromkeys(names) if name != "__main__" and name in sys.modules]
    return [module for module in found if not _is_importable(module.__name__.partition(".")[0])]


def _is_importable(name: str) -> bool:
    """Returns True if an import finds such a module, whether or not it is loaded."""
    with _SEARCH:  # two threads at once would delete the same entries
        importlib.invalidate_caches()
    return any(finder.find_spec(name, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))


@contextlib.contextmanager
def _by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Pickles what these modules define by value, and not by name, for the duration of the block."""
    import cloudpickle

    ours = [module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in ours:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in ours:
            cloudpickle.unregister_pickle_by_value(module)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
