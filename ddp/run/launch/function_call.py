"""A function call on its way to the workers of `ddp.launch`, and its results on their way back: files of one folder.

    call.pkl               world size and `sys.path`; then function, arguments and keywords
    result-rank-R.pkl      what the function returned on rank R

What cannot be sent, or does not fit on the disk, is one sentence: on the way there before a worker starts.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ddp.errors import ConfigError, nearest
from ddp.train.foreign_words import meaning

CALL = "call.pkl"
OURS = ("workers", "threads_per_worker", "timeout_s")


def result_file(folder: Path, rank: int) -> Path:
    """Returns the file in which a rank leaves its result."""
    return folder / f"result-rank-{rank}.pkl"


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
    sent = _pickled(function, args, kwargs)
    with temporary_folder("ddp-launch-") as folder:
        try:
            (folder / CALL).write_bytes(pickle.dumps((workers, sys.path)) + sent)
        except OSError as error:
            raise _no_room(error, folder) from error
        yield folder


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Makes a folder for the duration of the block.

    Raises:
        ConfigError: no disk has room for one.
    """
    with contextlib.ExitStack() as until_end:
        try:
            folder = until_end.enter_context(tempfile.TemporaryDirectory(prefix=prefix))
        except OSError as error:
            raise ConfigError(f"{error.strerror}; make room, or set TMPDIR to another folder") from error
        yield Path(folder)


def _no_room(error: OSError, folder: Path) -> ConfigError:
    """Returns the error for a temporary folder in which nothing more can be written."""
    return ConfigError(f"{folder.parent}: {error.strerror}; make room there, or set TMPDIR to another folder")


def write_result(folder: Path, rank: int, function: Callable[..., Any], result: Any) -> None:
    """Leaves a rank's result for the launcher.

    Raises:
        ConfigError: it cannot be sent, or the disk is full.
    """
    import cloudpickle

    try:
        data = cloudpickle.dumps(result)
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
        raise _no_room(error, folder) from error


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    import cloudpickle

    with _by_value(_strange_modules(function)):
        try:
            data: bytes = cloudpickle.dumps((function, args, kwargs))
        except Exception as error:
            parts = {f"argument {i + 1}": each for i, each in enumerate(args)} | {f"{k}=": v for k, v in kwargs.items()}
            raise _not_sendable(parts, function, error) from error
    return data


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
    import cloudpickle

    try:
        cloudpickle.dumps(value)
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
    importlib.invalidate_caches()
    return any(finder.find_spec(name, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))


@contextlib.contextmanager
def _by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Sends what these modules define whole, and not as a name to be imported, for the duration of the block."""
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
