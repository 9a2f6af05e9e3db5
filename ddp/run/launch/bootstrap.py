"""Starts a worker: runs a module of exactly the package that this file belongs to, wherever it is started.

    python -P …/ddp/run/launch/bootstrap.py ddp.run.launch.worker ARGUMENT …

`python -m ddp.run.launch.worker` would look into the current folder first: a folder `ddp` there would replace the
package, and a file `random.py` a module of Python. `-P` keeps that folder, and this file's own, off the path; so this
file loads the package by its location. A process that multiprocessing starts from a worker imports this file too, and
so finds the same package.

This file is the main program of both, where pickle looks for the classes and functions of a launched script. A worker
gets them among the names of this file (`from_python.py`); a process that it starts finds them on request.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

_spec = spec_from_file_location("ddp", Path(__file__).absolute().parents[2] / "__init__.py")
assert _spec is not None and _spec.loader is not None
sys.modules["ddp"] = module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["ddp"])


def __getattr__(name: str) -> Any:
    if __name__ == "__main__" or name.startswith("__") or "--call" not in sys.argv:
        raise AttributeError(f"{__file__} has no {name}")
    return importlib.import_module("ddp.run.launch.from_python").definition(name, sys.argv)


def _run(argv: list[str], import_module: Callable[[str], Any], leave: Callable[[int], Any]) -> None:
    """Runs the module, without this file's names, because the script's may replace them."""
    with import_module("ddp.process.terminal").ended_by_ctrl_c():
        module = import_module(argv[1])
    status = module.main(argv[2:])
    getattr(module, "leave", leave)(status) if status else leave(0)


if __name__ == "__main__":
    _run(sys.argv, importlib.import_module, sys.exit)
