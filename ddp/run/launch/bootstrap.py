"""Starts a worker: runs a module of exactly the package that this file belongs to, wherever it is started.

    python -P …/ddp/run/launch/bootstrap.py ddp.run.launch.worker ARGUMENT …

`python -m ddp.run.launch.worker` would look into the current folder first: a folder `ddp` there would replace the
package, and a file `random.py` a module of Python. `-P` keeps that folder, and this file's own, off the path; so this
file loads the package by its location. A process that multiprocessing starts from a worker imports this file too, and
so finds the same package.
"""

import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_spec = spec_from_file_location("ddp", Path(__file__).absolute().parents[2] / "__init__.py")
assert _spec is not None and _spec.loader is not None
sys.modules["ddp"] = module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["ddp"])

if __name__ == "__main__":
    with importlib.import_module("ddp.process.terminal").ended_by_ctrl_c():
        module = importlib.import_module(sys.argv[1])
    status = module.main(sys.argv[2:])
    getattr(module, "leave", sys.exit)(status) if status else sys.exit(0)
