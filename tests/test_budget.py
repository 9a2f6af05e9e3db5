"""The package stays small: what a reader has to bear is counted, and these limits may only fall."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from pathlib import Path

import ddp

PACKAGE = Path(__file__).parent.parent / "ddp"
LIMITS = {
    "code lines outside of lab/": 37_180,
    "code lines of lab/": 4_030,
    "code lines of comm/, gradients/ and replica/": 11_845,
    "modules outside of lab/": 218,
    "folders and files at the top": 20,
    "parameters of fit": 20,  # with **mistyped, which takes names that it does not have
    "lines of a function": 62,
    "lines of a class": 408,
}
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(source: str, tree: ast.Module) -> int:
    """Lines that are neither blank nor part of a comment or docstring."""
    texts = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - texts)


def length(node: ast.FunctionDef | ast.ClassDef) -> int:
    """Lines of a definition; of a function, without its docstring."""
    text = ast.get_docstring(node, clean=False) if isinstance(node, ast.FunctionDef) else None
    return (node.end_lineno or 0) - node.lineno + 1 - (len(text.splitlines()) if text else 0)


def test_the_package_keeps_to_its_budget() -> None:
    sources = {path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py")}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    lines = {path: code_lines(source, trees[path]) for path, source in sources.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    found = {
        "code lines outside of lab/": sum(count for path, count in lines.items() if path.parts[0] != "lab"),
        "code lines of lab/": sum(count for path, count in lines.items() if path.parts[0] == "lab"),
        "code lines of comm/, gradients/ and replica/": sum(
            count for path, count in lines.items() if path.parts[0] in ("comm", "gradients", "replica")
        ),
        "modules outside of lab/": sum(path.parts[0] != "lab" for path in sources),
        "folders and files at the top": sum(
            not each.name.startswith("__") and (each.is_dir() or each.suffix == ".py") for each in PACKAGE.iterdir()
        ),
        "parameters of fit": len(inspect.signature(ddp.fit).parameters),
        "lines of a function": max(length(node) for node in nodes if isinstance(node, ast.FunctionDef)),
        "lines of a class": max(length(node) for node in nodes if isinstance(node, ast.ClassDef)),
    }
    assert {name: count for name, count in found.items() if count > LIMITS[name]} == {}
    assert {name: count for name, count in found.items() if count < 0.97 * LIMITS[name]} == {}, "lower the limit"
