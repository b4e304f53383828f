"""Source text run as a notebook's cell would run it, and the policy class it defines; faults with the line they are on."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import linecache
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvlab.notebook.lab_templates import SAID_BY
from kvlab.policies.registry import SEAMS, seam_of
from kvlab.types import KvlabError, UserError

SHOWN_LINES, SHOWN_CHARS = 100, 500
"""Of what a cell printed: so many of its first and as many of its last lines, so many characters of each."""

_NUMBERS = itertools.count(1)


class CellError(UserError):
    """What is wrong with a cell, in words. `line`: where, from 1; None where no line can be named."""

    def __init__(self, message: str, line: int | None = None) -> None:
        self.line = line
        super().__init__(f"Line {line}: {message}" if line else message)


class Cell(NamedTuple):
    """A cell that ran: its policy class and the seam of it, its name as a file, what it printed."""

    policy_class: type
    seam: str
    file: str
    source: str
    printed: str


def user_namespace() -> dict[str, Any]:
    """Where a cell's names live: the notebook's, or those of `__main__` outside of one."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    names: dict[str, Any] = vars(sys.modules["__main__"]) if shell is None else shell.user_ns
    return names


def run_cell(source: str, namespace: dict[str, Any]) -> Cell:
    """Run `source` in `namespace` and find the policy class that it defines (the last one, if there are several).

    Raises:
        CellError: a syntax error, an exception (SystemExit too), or no policy among what it defines. KeyboardInterrupt is let through.
    """
    source = textwrap.dedent(source).strip("\n") + "\n"
    file = f"<policy lab {next(_NUMBERS)}>"
    try:
        tree = ast.parse(source, file)
        code = compile(tree, file, "exec", dont_inherit=True)
    except SyntaxError as error:
        text = (error.text or "").rstrip()
        raise CellError(f"{error.msg}" + (f"\n    {text.strip()}" if text else ""), error.lineno) from None
    except ValueError as error:  # a null byte
        raise CellError(str(error)) from None
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks and inspect
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), _as_main(namespace):
            exec(code, namespace)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise CellError(raised(error), line_of(error, file)) from error
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return Cell(*_policy(names, namespace), file, source, out.getvalue())


@contextlib.contextmanager
def _as_main(namespace: dict[str, Any]) -> Iterator[None]:
    """Classes take their module's name from `__name__`: __main__, as in a notebook, so that `_target_: __main__.Mine` finds them."""
    missing = object()
    before = namespace.get("__name__", missing)
    namespace["__name__"] = "__main__"
    try:
        yield
    finally:
        if before is missing:
            del namespace["__name__"]
        else:
            namespace["__name__"] = before


def _policy(names: list[str], namespace: dict[str, Any]) -> tuple[type, str]:
    found = [namespace[name] for name in names if isinstance(namespace.get(name), type)]
    for cls in reversed(found):
        with contextlib.suppress(UserError):
            return cls, seam_of(cls)
    contracts = ", ".join(sorted(contract.__name__ for contract in SEAMS.values()))
    what = f"{', '.join(cls.__name__ for cls in found)} derives from no contract" if found else "The cell defines no class"
    raise CellError(f"{what}. A policy derives from KeyEviction or one of {contracts} (kvlab.policies.base).")


def shortened(text: str) -> str:
    """What was printed, for a page: the first and last lines of it, long ones cut, with how much is left out."""
    lines = text.splitlines()
    if len(lines) > 2 * SHOWN_LINES:
        num_left_out = len(lines) - 2 * SHOWN_LINES
        lines = [*lines[:SHOWN_LINES], f"... {num_left_out:,} lines left out ...", *lines[-SHOWN_LINES:]]
    cut = [x if len(x) <= SHOWN_CHARS else f"{x[:SHOWN_CHARS]} ... {len(x) - SHOWN_CHARS:,} characters left out" for x in lines]
    return "\n".join(cut)


def raised(error: BaseException) -> str:
    """An exception of a cell's own code in words."""
    words = f"{type(error).__name__}: {error}".removesuffix(": ")
    return words if isinstance(error, Exception) else f"{words} (it would have ended the kernel; raise an error to stop)"


def line_of(error: BaseException, file: str) -> int | None:
    """The line of the cell in which an exception, or what caused it, was raised: the innermost one."""
    seen: BaseException | None = error
    found = None
    while seen is not None:
        lines = [frame.lineno for frame in traceback.extract_tb(seen.__traceback__) if frame.filename == file]
        found = lines[-1] if lines else found
        seen = seen.__cause__ or seen.__context__
    return found


def line_of_rule(message: str, cell: Cell) -> int | None:
    """Where the method stands in which a broken rule of the contract must be mended; None if the message names none of those."""
    rule = re.search(r"breaks the rule '([^']+)'", message)
    methods = SAID_BY.get(rule.group(1), ()) if rule else ("victim", "key") if "illegal decision" in message else ()
    wanted = cell.policy_class.__name__
    classes = [n for n in ast.parse(cell.source).body if isinstance(n, ast.ClassDef) and n.name == wanted]
    defined = {node.name: node.lineno for node in (classes[-1].body if classes else []) if isinstance(node, ast.FunctionDef)}
    return next((defined[name] for name in methods if name in defined), None)


def fault(error: BaseException, cell: Cell) -> CellError:
    """Whatever came of using a cell's policy, as an error with a line where one can be told."""
    message = str(error) if isinstance(error, (AssertionError, KvlabError)) else raised(error)
    return CellError(message, line_of(error, cell.file) or line_of_rule(message, cell))
