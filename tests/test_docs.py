"""The package explains itself: docstrings open with a sentence, one walk leads through every file, and what
CONTRIBUTING.md names is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from test_floors import FLOORS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ddp"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
MODULES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}

# A docstring says "Returns what …", "Returns True if …", "Says where …": these words alone begin no sentence.
FRAGMENT = re.compile(
    r"(What|Whatever|Whether|Of|Where|How|Those|Which|Who|Whoever|Whose|When|While|Why|That|True|False|None|Same|"
    r"The same|As if|All (that|of|those|which|who)|Everything (that|which)|Everyone who|Nothing (but|to))\b"
)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the name and the docstring of a module and of everything in it that has one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            yield getattr(node, "name", "the module"), text


def test_docstrings_open_with_a_sentence() -> None:
    fragments = [
        f"{module}: {name}: {text.splitlines()[0]}"
        for module, path in MODULES.items()
        for name, text in docstrings(path)
        if FRAGMENT.match(text)
    ]
    assert fragments == []


def defined_in(path: Path) -> set[str]:
    """Returns the names that a file defines at its top: functions, classes and tables."""
    found = set[str]()
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        found |= {getattr(target, "id", getattr(target, "name", "")) for target in targets}
    return found


def test_what_contributing_names_is_there() -> None:
    names = re.findall(r"`((?:ddp|tests|scripts|recipes|docs|[.]ci)/[\w/.]+)(?:::(\w+))?`", CONTRIBUTING)
    names += [(link, "") for link in re.findall(r"\]\(([\w/.-]+)\)", CONTRIBUTING)]
    assert len(names) > 40
    for path, name in names:
        if "NN_" not in path:
            assert (ROOT / path).exists(), path
            assert not name or name in defined_in(ROOT / path), f"{path} has no {name}"


def test_contributing_draws_the_floors() -> None:
    drawing = re.findall(r"^```\n(.*?)^```", CONTRIBUTING, re.DOTALL | re.MULTILINE)[0]
    drawn = [line.split("   ")[0].split() for line in drawing.splitlines()]
    floors = [[f"{name}/" if (PACKAGE / name).is_dir() else name for name in floor] for floor in FLOORS]
    assert drawn[::-1] == [[name for name in floor if not name.startswith("__")] for floor in floors]


def test_the_walk_names_what_is_there() -> None:
    walk = (ROOT / "docs" / "reading.md").read_text()
    rows = re.findall(r"^\|.*\| `(ddp/[\w/.]+[.]py)`, `(\w+)", walk, re.MULTILINE)
    assert len(rows) > 20
    missing = [f"{path} has no {name}" for path, name in rows if name not in defined_in(ROOT / path)]
    assert missing == []


def test_the_smallest_thing_to_read_is_as_long_as_the_walk_says() -> None:
    part = (ROOT / "docs" / "reading.md").read_text().split("\n## ")[1]
    files = re.findall(r"^\| `(ddp/[\w/]+[.]py)`", part, re.MULTILINE)
    (most,) = re.findall(r"at most ([\d,]+) lines", part)
    assert len(files) == 7
    assert sum(len((ROOT / path).read_text().splitlines()) for path in files) <= int(most.replace(",", ""))
