"""The package's floors: an arrow never points up, packages of one floor do not import each other, there is no cycle."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLOORS = [
    [
        *("address", "allocator", "clock", "dense", "ending", "errors", "files", "foreign_words", "garbage", "log"),
        *("owners", "parent_death", "scratch", "stack", "svg", "terminal"),
        *("torchvision_operators", "vision", "wording"),
    ],
    ["transport", "collectives", "data", "optim", "models", "tasks"],
    ["comm"],
    ["gradients", "precision", "monitor"],
    ["replica"],
    ["drop_in"],
    ["strategies", "elastic"],
    ["train"],
    ["bench"],
    ["tutorial"],
    [
        "launcher",
        "run_folder",
        "sweep",
        "under_torchrun",
        "engine",
        "rendezvous",
        "failures",
        "function_call",
        "bootstrap",
        "worker",
        "build",
        "trained",
        "finished",
        "components",
        "dealing",
        "where",
        "optimization",
        "trust",
        "config",
        "config_checks",
        "config_reader",
        "settings_page",
        "__main__",
        "__init__",
    ],
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
TOP = len(FLOORS) - 1  # the composition root is one unit; it must still be free of cycles


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


def floor_of(module: str) -> int:
    parts = module.split(".")
    return FLOOR[parts[1]] if len(parts) > 1 else TOP


def test_no_arrow_points_up_or_sideways() -> None:
    wrong = []
    for module, path in MODULES.items():
        for imported in imports_of(path):
            same_package = module.split(".")[1:2] == imported.split(".")[1:2]
            here, there = floor_of(module), floor_of(imported)
            if there > here or (there == here and not same_package and here not in (0, TOP)):
                wrong.append(f"{module} → {imported}")
    assert not wrong


def test_there_is_no_import_cycle() -> None:
    graph = {module: {name for name in imports_of(path) if name in MODULES} for module, path in MODULES.items()}
    while graph:
        free = [module for module, imported in graph.items() if not imported & graph.keys() - {module}]
        assert free, f"a cycle among {sorted(graph)}"
        for module in free:
            del graph[module]


def test_every_module_says_what_it_is() -> None:
    assert [name for name, path in MODULES.items() if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_only_the_launcher_imports_hydra_and_few_modules_touch_the_environment() -> None:
    text = {module: path.read_text() for module, path in MODULES.items()}
    assert [m for m, code in text.items() if "import hydra" in code or "from hydra" in code] == ["ddp.launcher"]
    readers = {module for module, code in text.items() if "os.environ" in code or "os.getenv" in code}
    few = {"ddp.allocator", "ddp.launcher", "ddp.under_torchrun", "ddp.engine", "ddp.wording"}
    assert readers <= {*few, "ddp.comm.place", "ddp.comm.secret"}
