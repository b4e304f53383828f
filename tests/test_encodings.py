"""Text is UTF-8 whatever the machine's locale: every place that opens text says so, and every door can print what it has to."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kvlab", "policies", "kernels", "conf", "experiments", "tests", "notebooks", ".ci")

FILE_OPENERS = {"open", "io.open", "os.fdopen", "codecs.open"}
"""Text unless the mode (2nd argument) has a b."""
PACKED_OPENERS = {"gzip.open", "bz2.open", "lzma.open"}
"""Bytes unless the mode has a t."""
TEMPORARY = {"NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile"}
"""Bytes unless the mode says something else."""
PROCESSES = {"run", "Popen", "check_output", "check_call", "call"}
HANDLERS = {"FileHandler", "RotatingFileHandler", "TimedRotatingFileHandler", "WatchedFileHandler", "TextIOWrapper"}
NEVER = {"os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "np.loadtxt", "np.savetxt", "np.genfromtxt"}
"""Have the locale's encoding (or Latin-1) built in: something else is to be used."""
NOT_FILES = {"tarfile", "zipfile", "webbrowser", "Image", "os", "fs", "self._fs", "super()"}
"""Whose `open` gives no text file (os.open a descriptor, fsspec's bytes)."""


def _mode(call: ast.Call, place: int) -> str | None:
    """The mode that is written out; None: none."""
    given = [k.value for k in call.keywords if k.arg == "mode"] or list(call.args[place : place + 1])
    return given[0].value if given and isinstance(given[0], ast.Constant) and isinstance(given[0].value, str) else None


NAMES = {name.rsplit(".", 1)[-1] for name in {*FILE_OPENERS, *PACKED_OPENERS, *NEVER}} | TEMPORARY | PROCESSES | HANDLERS | {
    "basicConfig", "read_text", "write_text"}  # fmt: skip


def _is_text(call: ast.Call) -> bool:
    """Whether a call opens text."""
    last = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if last not in NAMES:
        return False
    name = ast.unparse(call.func)
    flags = {k.arg for k in call.keywords if isinstance(k.value, ast.Constant) and k.value.value is True}
    if name in NEVER or last in HANDLERS or (last == "basicConfig" and any(k.arg == "filename" for k in call.keywords)):
        return True
    if name in FILE_OPENERS:
        return "b" not in (_mode(call, 1) or "")
    if name in PACKED_OPENERS:
        return "t" in (_mode(call, 1) or "")
    if last in TEMPORARY:
        return "b" not in (_mode(call, 0) or "b")
    if last in PROCESSES and {"text", "universal_newlines"} & flags:
        return True
    if not isinstance(call.func, ast.Attribute) or ast.unparse(call.func.value) in NOT_FILES:
        return False
    if last == "open":  # Path.open
        return "b" not in (_mode(call, 0) or "")
    return (last == "read_text" and len(call.args) == 0) or (last == "write_text" and len(call.args) == 1)


def unsaid(source: str) -> Iterator[int]:
    """The lines of calls that open text in the locale's encoding."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _is_text(node):
            said = [k.value for k in node.keywords if k.arg == "encoding"]
            if not said or (isinstance(said[0], ast.Constant) and said[0].value in (None, "locale")):
                yield node.lineno


@pytest.mark.parametrize(("call", "found"), [
    ("open(path)", True), ("open(path, 'rb')", False), ("open(path, mode='wb')", False), ("open(path, 'w', encoding='utf-8')", False),
    ("open(path, encoding=None)", True), ("path.open()", True), ("path.open('rb')", False), ("(folder / NAME).read_text()", True),
    ("path.read_text(encoding='utf-8')", False), ("path.write_text(text)", True), ("write_text(path, text)", False),
    ("subprocess.run(command, text=True)", True), ("subprocess.run(command, capture_output=True)", False),
    ("subprocess.check_output(command, universal_newlines=True)", True), ("Popen(command, text=True, encoding='utf-8')", False),
    ("logging.FileHandler(path)", True), ("gzip.open(path)", False), ("gzip.open(path, 'rt')", True), ("NamedTemporaryFile()", False),
    ("NamedTemporaryFile('w')", True), ("os.fdopen(handle, 'wb')", False), ("os.fdopen(handle)", True), ("os.open(path, flags)", False),
    ("io.TextIOWrapper(stream)", True), ("logging.basicConfig(filename='a')", True), ("os.popen('ls')", True),
])  # fmt: skip
def test_what_the_check_finds(call: str, found: bool) -> None:
    assert list(unsaid(call)) == ([1] if found else [])


def _sources() -> Iterator[tuple[str, str]]:
    """(where, Python) of every file and of every cell of a notebook."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        for path in sorted((ROOT / folder).glob("*.ipynb")):
            for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
                code = [line for line in "".join(cell["source"]).splitlines() if not line.lstrip().startswith(("%", "!"))]
                if cell["cell_type"] == "code":
                    yield f"{path.relative_to(ROOT)} cell {number}", "\n".join(code)


def test_no_place_opens_text_in_the_locales_encoding() -> None:
    sources = list(_sources())
    assert len(sources) > 400
    assert [f"{where}:{line}" for where, source in sources for line in unsaid(source)] == []
