"""Source that a function of a figure.py follows from: the module-level statements that it reaches, and those that they reach."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvlab.types import UserError


def reached(maker: Callable[..., Any]) -> list[str]:
    """Constants, helpers and imports of the function's own file that it uses, directly or not, in the file's order; its own source is
    not among them. Names in annotations don't count. UserError: no function that is written in a file."""
    file = inspect.getsourcefile(maker) if inspect.isfunction(maker) else None
    if file is None:
        raise UserError(f"measure, collect and compute must be functions that are written in figure.py, not {maker!r}.")
    text = Path(file).read_text(encoding="utf-8")
    statements = ast.parse(text).body
    line = maker.__code__.co_firstlineno
    own = next(s for s in statements if _first_line(s) <= line <= (s.end_lineno or s.lineno))
    start: list[ast.AST] = [node for node in ast.walk(own) if isinstance(node, ast.Lambda) and node.lineno == line]
    waiting, names, found = start or [own], set[str](), set[int]()
    while waiting:
        names |= set(_used(waiting.pop()))
        new = {i for i, s in enumerate(statements) if s is not own and i not in found and names.intersection(_bound(s))}
        waiting += [statements[i] for i in new]
        found |= new
    lines = text.splitlines()
    return ["\n".join(lines[_first_line(s) - 1 : s.end_lineno]) for i, s in enumerate(statements) if i in found]


def _first_line(statement: ast.stmt) -> int:
    """Its first line, decorators included."""
    return min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])


def _used(node: ast.AST) -> Iterator[str]:
    """Names that occur, but for those in annotations."""
    if isinstance(node, ast.Name):
        yield node.id
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _used(child)


def _bound(statement: ast.AST) -> set[str]:
    """Names that a statement may give a value, or change (`WEIGHTS["a"] = 2`, `WEIGHTS.update(a=2)`)."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return {name for target in targets for name in _used(target)}
    if isinstance(statement, ast.Expr):
        return set(_used(statement))
    if isinstance(statement, ast.Name):
        return {statement.id} if isinstance(statement.ctx, ast.Store) else set()
    return {name for child in ast.iter_child_nodes(statement) for name in _bound(child)}
