"""Exercises: files of the library whose central lines are cut out, for the reader to write them again.

A hole is a comment in the library, such as `# exercise 02: …`, and all that follows it in the same block: every line
up to the first that is indented less. The comment stays in the exercise, where it says what to write. An exercise is
cut when the reader begins it, so it is the library as it is today.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import ddp
from ddp.process.arguments import relative_path

LIBRARY = Path(ddp.__file__).parent
FOLDER = Path(__file__).parent.parent / "exercises"
"""The reader's own; git ignores it."""
SOURCES = {
    "02": "collectives/ring.py",
    "03": "collectives/butterfly.py",
    "06": "replica/naive.py",
    "07": "replica/backward.py",
    "08": "data/orders/sampler.py",
}
MARK = re.compile(r"( +)# exercise (\d\d): ")


def name_of(number: str) -> str:
    """Returns the name of an exercise's file, such as 02_ring.py, or memory.py of a program."""
    return f"{number}_{Path(SOURCES[number]).name}" if number in SOURCES else f"{number}.py"


class Hole(NamedTuple):
    """A hole: the function that it is in, and its first line and the line after its last, counted from 0."""

    function: str  # with its class: "Backward.note"
    first: int
    stop: int
    yields: bool  # the lines that are cut out make the function a generator


def holes(number: str) -> list[Hole]:
    """Returns the holes of an exercise, from top to bottom."""
    return list(_holes((LIBRARY / SOURCES[number]).read_text(encoding="utf-8"), number))


def _holes(text: str, number: str) -> Iterator[Hole]:
    lines = text.splitlines()
    for mark, line in enumerate(lines):
        found = MARK.match(line)
        if found is None or found[2] != number:
            continue
        first = stop = mark + 1
        while stop < len(lines) and (not lines[stop] or lines[stop].startswith(found[1])):
            stop += 1
        while not lines[stop - 1]:
            stop -= 1
        name, function = _function_around(ast.parse(text), mark + 1)
        yields = [node.lineno for node in ast.walk(function) if isinstance(node, ast.Yield | ast.YieldFrom)]
        yield Hole(name, first, stop, yields=bool(yields) and all(first < lineno <= stop for lineno in yields))


def _function_around(node: ast.AST, lineno: int, name: str = "") -> tuple[str, ast.AST]:
    """Returns the innermost function or class around a line, with its name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.lineno <= lineno <= (child.end_lineno or 0):
            return _function_around(child, lineno, f"{name}.{child.name}".removeprefix("."))
    return name, node


def begin(number: str, text: str) -> Path:
    """Writes an exercise's file into the reader's folder, and returns its path.

    Args:
        text: of the file.

    Raises:
        ValueError: it is there already, or cannot be written.
    """
    path = FOLDER / name_of(number)
    try:
        FOLDER.mkdir(exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(
            f"{relative_path(path)} is there already, and may hold work of yours: go on with it, or move it away to "
            "begin anew"
        ) from None
    except OSError as error:
        where = relative_path(path)
        raise ValueError(f"cannot write {where}: {error.strerror}; call this in a clone of your own") from error
    return path


def cut(number: str) -> str:
    """Returns the text of an exercise's file."""
    source = (LIBRARY / SOURCES[number]).read_text(encoding="utf-8")
    lines, found = source.splitlines(), list(_holes(source, number))
    for hole in reversed(found):
        indent = lines[hole.first - 1].partition("#")[0]
        name = hole.function.rpartition(".")[2]
        lines[hole.first : hole.stop] = [f'{indent}raise NotImplementedError("{name}")']
        if hole.yields:
            lines.insert(hole.first + 1, f"{indent}yield  # keeps this a generator")
    functions = " and ".join(f"`{hole.function}`" for hole in found)
    head = f'''"""Exercise {number}: write {functions}, where it says `NotImplementedError`.

    scripts/ddp exercise {number}      says what is wrong with it

The rest of this file is a copy of ddp/{SOURCES[number]}, which is the solution. Imports say where to read on.

'''
    return head + "\n".join(lines).removeprefix('"""') + "\n"
