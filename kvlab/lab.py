"""`python -m kvlab.lab`: JupyterLab with kvlab's notebooks.

From a clone they are opened where they lie. From an installed package they are copied first, into `kvlab-notebooks/` of the current folder
(or `--copy-to FOLDER`), and it says so; files that are there already stay as they are.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvlab.doors import exit_code
from kvlab.interrupts import unwinding
from kvlab.types import UserError, unknown_name

COPY = "kvlab-notebooks"

EPILOG = """NOTEBOOK: the one to open, or how its name begins (default: the first).
Everything else goes to JupyterLab: python -m kvlab.lab 02 --no-browser --port 9000"""


def notebooks_folder() -> Path:
    """Where this package's notebooks lie, links followed. UserError: it has none."""
    folder = (Path(__file__).parent / "notebooks").resolve()
    if not any(folder.glob("*.ipynb")):
        raise UserError(f"This installation of kvlab has no notebooks ({folder}). Install it from a wheel, or use a clone.")
    return folder


def notebook_names() -> list[str]:
    """Their file names, in order."""
    return sorted(path.name for path in notebooks_folder().glob("*.ipynb"))


def is_clone(folder: Path) -> bool:
    """Whether notebooks lie in a checkout, to be opened in place, and not inside an installed package."""
    return (folder.parent / "pyproject.toml").is_file()


def copy_notebooks(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """Copy what `target` lacks. (names copied, names that were there and stay). UserError: it can't be written."""
    copied, kept = [], []
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(source.glob("*.ipynb")):
            if (target / path.name).exists():
                kept.append(path.name)
            else:
                shutil.copyfile(path, target / path.name)
                copied.append(path.name)
    except OSError as error:
        raise UserError(f"The notebooks can't be copied to {target}: {error}. Name another folder: --copy-to FOLDER.") from error
    return copied, kept


def find_notebook(name: str, names: Sequence[str]) -> str:
    """The one of `names` that `name` is or begins, with or without ".ipynb". UserError: none of them, or several."""
    stem = name.removesuffix(".ipynb")
    found = [full for full in names if full == f"{stem}.ipynb"] or [full for full in names if stem and full.startswith(stem)]
    if not found:
        raise unknown_name("notebook", name, [full.removesuffix(".ipynb") for full in names])
    if len(found) > 1:
        raise UserError(f"Several notebooks begin with {name!r}: {', '.join(found)}. Write more of the name.")
    return found[0]


def take_notebook(words: Sequence[str], names: Sequence[str]) -> tuple[str, list[str]]:
    """(the notebook meant, the other words) of a command line without kvlab's own options. It is the first word; behind options, where a
    word may be the value of one ("--port 9000"), the first word that means a notebook. Without any: the first notebook.

    Raises:
        UserError: the first word means no notebook, or several.
    """
    for place, word in enumerate(words):
        if word.startswith("-"):
            continue
        try:
            return find_notebook(word, names), [*words[:place], *words[place + 1 :]]
        except UserError:
            if place == 0:
                raise
    return names[0], list(words)


def prepare(notebook: str, copy_to: str | None) -> Path:
    """The notebook to open: found by its name or how it begins ("02", "02.ipynb"), copied where that is needed or asked for.

    Raises:
        UserError: there is no such notebook, several, or nowhere to copy to.
    """
    folder = notebooks_folder()
    name = find_notebook(notebook, notebook_names())
    if copy_to is not None or not is_clone(folder):
        target = Path(copy_to or COPY).resolve()
        copied, kept = copy_notebooks(folder, target)
        print(f"Notebooks: {target} ({len(copied)} copied, {len(kept)} were there and stay as they are).")
        folder = target
    else:
        print(f"Notebooks: {folder}")
    return folder / name


def serve(command: Sequence[str], cwd: Path) -> int:
    """Run JupyterLab; returns its exit code.

    It is in a group of its own: a terminal's Ctrl-C is kvlab's to pass on, as SIGTERM, at which it ends its kernels and does not ask.
    """
    with unwinding(), subprocess.Popen(command, cwd=cwd, stdin=subprocess.DEVNULL, process_group=0) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            raise


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: JupyterLab's, or 2 for a user's error."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.lab", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="%(prog)s [-h] [NOTEBOOK] [--copy-to FOLDER] [--list] [options of JupyterLab]",
                                     epilog=EPILOG)  # fmt: skip
    parser.add_argument("--copy-to", metavar="FOLDER", help="copy the notebooks there and open them there")
    parser.add_argument("--list", action="store_true", help="list the notebooks and end")
    options, words = parser.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    try:
        if options.list:
            print("\n".join(notebook_names()))
            return 0
        if importlib.util.find_spec("jupyterlab") is None:
            raise UserError("JupyterLab is not installed: pip install jupyterlab ipywidgets anywidget.")
        notebook, others = take_notebook(words, notebook_names())
        path = prepare(notebook, options.copy_to)
    except UserError as error:
        print(f"kvlab: {error}", file=sys.stderr)
        return 2
    return serve([sys.executable, "-m", "jupyterlab", str(path), *others], path.parent)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
