"""Your own parts, by address: `my_package.models:Net` is the object `Net` of the module `my_package.models`.

    scripts/ddp train model=my_package.models:Net data=mine:make loss=mine:my_loss comm.algorithm=mine:chain

The folder that the command was given in is searched last. So a file `random.py` there replaces no module of Python, and
a run without an address imports nothing from there. `RUN_DIR/config.yaml` keeps the folder as `run.code`, for the
workers and for a user who continues the run from elsewhere.

Every error is one sentence, which names the setting, the folder, and the line of the user's file.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.util import cache_from_source
from pathlib import Path
from types import ModuleType
from typing import Any

from ddp.comm.meeting.secret import secret
from ddp.errors import ConfigError, nearest
from ddp.process.files import why_in_other_hands
from ddp.process.stack import users_frame
from ddp.process.terminal import log

_origins: dict[str, str] = {}  # a package or module that an address has imported → its folder

_question: str | None = None  # of a user about a run, while it is answered


def is_address(name: str) -> bool:
    """Returns True if a setting names a part of the user's own, and not a shipped one."""
    return ":" in name


def own_parts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings that hold an address, in a tree of plain settings: "model" → "mine:Net"."""
    found = {}
    for group, value in settings.items():
        values = dict(enumerate(value)) if isinstance(value, list) else value
        for name, each in (values if isinstance(values, Mapping) else {"name": values}).items():
            if group != "run" and isinstance(each, str) and _is_whole(each):
                found[group if name in ("name", 0) else f"{group}.{name}"] = each
    return found


def _is_whole(address: str) -> bool:
    """Returns True for MODULE:NAME."""
    name, colon, path = address.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*name.split("."), *path.split(".")))


@contextmanager
def no_own_code(question: str) -> Iterator[None]:
    """Refuses every address inside the block, because a question about a run must not run code that its files name."""
    global _question
    _question = question
    try:
        yield
    finally:
        _question = None


def from_address(address: str, *, key: str, folder: str | Path) -> Any:
    """Imports the module before the colon, and returns its object after the colon.

    Args:
        key: the setting that holds the address, for errors.
        folder: searched after everything else on `sys.path`.

    Raises:
        ConfigError: there is no such module or object, or the module cannot be imported.
    """
    file, is_file, path = address.partition(".py:")
    if is_file:
        dotted = ".".join(part for part in Path(file).parts if part != ".")
        raise ConfigError(f"{key}={address}: give the name of the module, and not its file: {key}={dotted}:{path}")
    if not _is_whole(address):
        raise ConfigError(f"{key}={address}: is no address; write MODULE:NAME, as my_package.models:Net")
    if _question is not None:
        raise ConfigError(f"{key}={address}: {_question} imports no code of a run, so it cannot answer this")
    name, _, path = address.partition(":")
    module = _imported(name, setting=f"{key}={address}", folder=Path(folder).resolve())
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{key}={address}: {_file_of(module)} has no {path}{_nearest(part, found, name)}")
        found = getattr(found, part)
    return found


def called(found: Any, arguments: Mapping[str, Any], *, address: str, key: str) -> Any:
    """Calls what an address names.

    Args:
        arguments: the setting `key`.args.

    Raises:
        ConfigError: it cannot be called, it takes other arguments, or it raised.
    """
    check_arguments(found, arguments, address=address, key=key)
    try:
        return found(**arguments)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}={address}: calling it failed: {error_line(error)}") from error


def check_arguments(found: Any, arguments: Mapping[str, Any], *, address: str, key: str) -> None:
    """Raises ConfigError unless what an address names can be called with these arguments."""
    if not callable(found):
        raise ConfigError(f"{key}={address}: is {found!r:.60}; give the address of a class or function")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # some classes written in C have none
        signature = None
    try:
        if signature is not None:
            signature.bind(**arguments)
    except TypeError as error:
        setting = f"{key}.args={dict(arguments)}" if arguments else f"{key}={address}"
        raise ConfigError(f"{setting}: {error}; {address} takes {signature}") from error


def error_line(error: BaseException) -> str:
    """Returns, in one line, an exception from the user's code and the line of that code that raised it."""
    message = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frame = users_frame(error)
    return message if frame is None else f"{frame.filename}, line {frame.lineno}: {message}"


def origins() -> list[str]:
    """Returns a line for each folder that addresses have imported from, because a name may stand for another module."""
    names: dict[str, list[str]] = {}
    for name, folder in _origins.items():
        names.setdefault(folder, []).append(name)
    return [f"imported from {folder}: {', '.join(found)}" for folder, found in names.items()]


def _imported(name: str, *, setting: str, folder: Path) -> ModuleType:
    top = name.partition(".")[0]
    _search_last(folder)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # it is missing inside of the user's module
            raise ConfigError(f"{setting}: importing {name} failed: {error_line(error)}") from error
        if error.name == top:
            raise ConfigError(f"{setting}: there is no module {top} in {folder}, and none is installed") from error
        raise ConfigError(f"{setting}: {_file_of(sys.modules[top])} has no module {error.name}") from error
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` may exit
        raise ConfigError(f"{setting}: importing {name} failed: {error_line(error)}") from error
    if top != "torch":
        _origins[top] = _folder_of(sys.modules[top])
    return module


def _search_last(folder: Path) -> None:
    """Searches the folder last in every process: `python -m` puts the current one first, workers begin without it."""
    if sys.path and Path(sys.path[0]).resolve() == folder:
        del sys.path[0]
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        importlib.invalidate_caches()


def _file_of(module: ModuleType) -> str:
    """Returns the module's file, or the folder of a package without `__init__.py`."""
    file = getattr(module, "__file__", None)
    return str(file or next(iter(getattr(module, "__path__", [])), module.__name__))


def _folder_of(module: ModuleType) -> str:
    """Returns the folder in which `import` has found a module or a package."""
    packages = getattr(module, "__path__", None)
    return str(Path(next(iter(packages)) if packages else _file_of(module)).parent)


def _nearest(part: str, found: Any, module: str) -> str:
    near = nearest(part, [name for name in vars(found) if not name.startswith("__")])
    return f". Did you mean {module}:{near}?" if near and isinstance(found, ModuleType) else ""


# --- Code that others could have written -----------------------------------------------------------------------------
#
#     RUN_DIR/config.yaml      model: mine:Net, run.code: /home/bob/project
#              │
#              ├──▶  resume=RUN_DIR, ddp.load(RUN_DIR).model()      import mine from there, and say so
#              └──▶  … of a folder that others may write, or inside of the run itself, or of Python's own modules, as
#                    subprocess:run                                  refuse, unless trust=true
#     settings that arrive from another process                        refuse, unless trust=true, or they are known by
#                                                                      DDP_SECRET, or this command line says the same
#
# A user who may write config.yaml decides what is imported, and one who may write the code decides what it does. So
# both must be this user's or root's, with their folders. The folder in which the user gives the command is their own
# choice, as for a new run, and so is whatever else Python searches. Files that were unpacked from an archive belong to
# this user, whichever user has written them. So code that came with the settings is not this user's, whatever its
# owner.


def check_trust(parts: Mapping[str, str], *, code: str, settings: Path, trust: bool) -> None:
    """Logs which code is about to be imported because a run's config.yaml names it.

    Args:
        parts: setting → address.
        code: the folder that the addresses are searched in.
        settings: the config.yaml.
        trust: the user accepts this, whoever wrote the files.

    Raises:
        ConfigError: others could have written the file or the code, and `trust` is False.
    """
    if not parts:
        return
    listed = ", ".join(f"{key}={address}" for key, address in parts.items())
    if not trust and (why := _why_in_other_hands(parts, code, settings)):
        raise ConfigError(
            f"{why}, and {settings} would run code of {code or 'this folder'} as you: {listed}; look at that code, "
            "then say trust=true (in Python trust=True)"
        )
    log.warning("running code of %s, as %s says: %s", code or Path.cwd(), settings, listed)


def check_arrived(settings: Mapping[str, Any], words: Sequence[str]) -> None:
    """Logs which code is about to be imported because settings from another process name it.

    Args:
        settings: the tree; they are sealed if there is a secret.
        words: this process's own command line. What it says itself is imported from the current folder alone.

    Raises:
        ConfigError: anyone who reaches the port of the run could have sent them, and `trust=true` is not given.
    """
    parts, code = own_parts(settings), Path(settings["run"]["code"])
    is_typed = set(parts.values()) <= {each for word in words for each in re.split(r"[^\w.:]+", word)}
    if not parts or secret() or (is_typed and code.resolve() == Path.cwd().resolve()):
        return
    listed = ", ".join(f"{key}={address}" for key, address in parts.items())
    if not any(word.lstrip("+").lower() == "trust=true" for word in words):
        raise ConfigError(
            f"the settings that have arrived would run code of {code} as you: {listed}; without DDP_SECRET anyone who "
            "reaches the port can have sent them: give all processes the same one, or look at that code, and say "
            "trust=true to this process"
        )
    log.warning("running code of %s, as settings say that have arrived: %s", code, listed)


def _why_in_other_hands(parts: Mapping[str, str], code: str, settings: Path) -> str:
    """Returns why others could have written the settings or the code; "" if they could not."""
    folder, run_dir = Path(code).resolve(), settings.parent.resolve()
    imported = [path for address in parts.values() for path in _imported_from(folder, address)]
    for path in imported:
        if path.resolve().is_relative_to(run_dir):
            return f"{path} lies inside of the run"
    for address in parts.values():
        if re.split("[.:]", address)[0] in sys.stdlib_module_names:
            return f"{address} is of Python itself"
    if code and not Path(code).is_absolute():
        return f"run.code={code} is not as this program writes it"
    ours = [] if folder == Path.cwd() else [path for path in imported if path.is_relative_to(folder)]
    return next(filter(None, map(why_in_other_hands, dict.fromkeys([settings.parent, settings, *ours]))), "")


def _imported_from(code: Path, address: str) -> Iterator[Path]:
    """Yields the files and folders from which an import of this address would read, and those of `code` above them."""
    importlib.invalidate_caches()
    search = [*(each for each in sys.path if Path(each).resolve() != code), str(code)]
    for part in address.partition(":")[0].split("."):
        spec = PathFinder.find_spec(part, search)  # of a whole name it would ask for the package, which is not imported
        if spec is None:
            return
        search = list(spec.submodule_search_locations or ())
        files = [spec.origin, cache_from_source(spec.origin)] if spec.has_location and spec.origin else []
        found = [*map(Path, [*search, *files])]
        ours = [path for path in found if path.is_relative_to(code)]
        above = [code, *(path.parent for path in ours)] if ours else []
        yield from (path for path in [*above, *found] if path.exists())
