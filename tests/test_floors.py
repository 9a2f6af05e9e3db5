"""The package's floors: an arrow never points up, packages of one floor do not import each other, there is no cycle.

Each module has a test in the same folder of `tests/`, under its name, or one whose docstring ends in a line such as
`Tests: ddp/setting.py, ddp/units.py.`
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLOORS = [
    ["errors"],
    ["process", "setting", "units", "vision"],
    ["collectives", "optim", "models", "data", "policies"],
    ["comm"],
    ["gradients"],
    ["replica"],
    ["strategies"],
    ["train"],
    ["run"],
    ["commands"],
    ["__main__", "__init__", "drop_in", "trackers"],
    ["lab"],
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def imports_of(path: Path) -> set[str]:
    """Modules of ddp that a file imports anywhere, also for type checkers alone."""
    found: set[str] = set()
    if path == ROOT / "ddp" / "__init__.py":
        return found  # names for users, imported when they are first used
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ddp":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if (ROOT / (name.replace(".", "/") + ".py")).exists() else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "ddp"}
    return found


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "ddp").rglob("*.py")
}


def room_of(module: str) -> str:
    """Returns the folder of a module, relative to the package; of a file beside the folders, its own name."""
    return module.rsplit(".", 1)[0] if module.count(".") > 1 or MODULES[module].stem == "__init__" else module


IMPORTS = {
    module: {name for name in imports_of(path) if name in MODULES and name != "ddp"}
    for module, path in MODULES.items()
    if path.stem != "__init__"  # which import names for users, and nothing that their own folder needs
}


def test_no_arrow_points_up_or_sideways() -> None:
    wrong = []
    for module, imported in IMPORTS.items():
        here = module.split(".")[1]
        there = {name.split(".")[1] for name in imported} - {here}
        wrong += [f"{module} → {name}" for name in there if FLOOR[name] >= FLOOR[here]]
    assert not wrong


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Returns what is left of a graph once everything is taken away that leads to nothing."""
    left = dict(graph)
    while free := [name for name, ahead in left.items() if not ahead & left.keys() - {name}]:
        for name in free:
            del left[name]
    return sorted(left)


def test_there_is_no_import_cycle_among_modules() -> None:
    assert circles(IMPORTS) == []


def test_there_is_no_import_cycle_among_folders_and_sub_folders() -> None:
    rooms: dict[str, set[str]] = {}
    for module, imported in IMPORTS.items():
        rooms.setdefault(room_of(module), set()).update(map(room_of, imported))
    assert circles(rooms) == []


def test_every_module_says_what_it_is() -> None:
    assert [name for name, path in MODULES.items() if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_only_the_launcher_imports_hydra_and_few_modules_touch_the_environment() -> None:
    text = {module: path.read_text() for module, path in MODULES.items()}
    assert {m for m, code in text.items() if "import hydra" in code or "from hydra" in code} == {
        *(f"ddp.run.launch.{name}" for name in ("command_line", "plugin")),
        "ddp.commands.search",
    }
    readers = {module for module, code in text.items() if "os.environ" in code or "os.getenv" in code}
    assert readers <= {
        *("ddp.process.memory", "ddp.process.arguments", "ddp.process.host"),
        *(f"ddp.comm.meeting.{name}" for name in ("cluster_spec", "membership", "place", "role", "secret")),
        "ddp.comm.opening",
        *(f"ddp.run.launch.{name}" for name in ("command_line", "torchrun", "processes", "supervisor")),
    }


NAMED = re.compile(r'^Tests: (.+?)\.\n"""$', re.MULTILINE | re.DOTALL)


def test_every_module_has_a_test_of_its_name_or_one_that_names_it() -> None:
    folder = ROOT / "tests"
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("test_*.py")}
    named = {module for text in files.values() for line in NAMED.findall(text) for module in re.split(r",\s+", line)}
    modules = {str(path.relative_to(ROOT)) for path in MODULES.values() if not path.stem.startswith("__")}
    assert named - modules == set(), "lines of tests name modules that are not there"
    assert modules - named - {f"ddp/{file.replace('test_', '')}" for file in files} == set()
