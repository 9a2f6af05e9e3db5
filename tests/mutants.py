"""Functions with one thing wrong: a constant, an operator, a comparison, a flag, a name, a missing yield or call.

A test that passes for a mutant has not looked there.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import NamedTuple


class Mutant(NamedTuple):
    """What a function becomes, and the line that was changed, before and after."""

    code: CodeType
    before: str
    after: str


def mutants(function: FunctionType) -> Iterator[Mutant]:
    """Everything that differs from this function in one spot."""
    original = ast.unparse(_parsed(function))
    for spot in range(len(changes(_parsed(function)))):
        parsed = _parsed(function)
        changes(parsed)[spot]()
        changed = ast.unparse(parsed)
        lines = zip(original.splitlines(), changed.splitlines(), strict=True)
        before, after = next((before.strip(), after.strip()) for before, after in lines if before != after)
        scope = dict(function.__globals__)
        exec(compile(changed, "mutant", "exec"), scope)
        yield Mutant(scope[function.__name__].__code__, before, after)


@contextmanager
def mutated(function: FunctionType, mutant: Mutant) -> Iterator[None]:
    """The function is the mutant, for all who hold it."""
    original = function.__code__
    function.__code__ = mutant.code
    try:
        yield
    finally:
        function.__code__ = original


def _parsed(function: FunctionType) -> ast.AST:
    """The function's source, without annotations and decorators."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns, node.decorator_list = None, []
        elif isinstance(node, ast.arg):
            node.annotation = None
    return tree


def changes(tree: ast.AST) -> list[Callable[[], object]]:
    """Everything that can be changed in a tree in one spot: each call changes it in place."""
    return [change for node in ast.walk(tree) for change in _changes_of(node)]


def _changes_of(node: ast.AST) -> list[Callable[[], object]]:
    """Functions that change this node in place, one thing each."""
    match node:
        case ast.Constant(value=bool()):
            return [lambda: setattr(node, "value", not node.value)]
        case ast.Constant(value=int()):
            return [lambda: setattr(node, "value", node.value + 1), lambda: setattr(node, "value", node.value - 1)]
        case ast.BinOp() | ast.AugAssign() if type(node.op) in OPERATORS:
            return [lambda: setattr(node, "op", OPERATORS[type(node.op)]())]
        case ast.Compare() if type(node.ops[0]) in COMPARISONS:
            return [lambda: node.ops.__setitem__(0, COMPARISONS[type(node.ops[0])]())]
        case ast.Expr(value=ast.Yield() | ast.YieldFrom() | ast.Call()):
            return [lambda: setattr(node, "value", ast.Constant(None))]
        case ast.BoolOp():
            return [lambda: setattr(node, "op", ast.And() if isinstance(node.op, ast.Or) else ast.Or())]
        case ast.Name(ctx=ast.Load()) if node.id in NAMES:
            return [lambda: setattr(node, "id", NAMES[node.id])]
    return []


OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitXor: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
COMPARISONS = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
PAIRS = {
    "right": "left",
    "outgoing": "incoming",
    "keep": "give",
    "ahead": "behind",
    "reduce_scatter": "all_gather",
    "reduce": "broadcast",
    "row": "column",
    "everything": "mine",
    "_up": "_down",
    "Send": "Recv",
    "reversed": "list",
    "min": "max",
    "first": "last",
    "halving_doubling": "doubling",
    "one_per_rank": "whole",
}
NAMES = PAIRS | {second: first for first, second in PAIRS.items()}
