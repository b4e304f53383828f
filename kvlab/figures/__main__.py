"""The door to papers' figures.

    python -m kvlab.figures list                          every figure: number, name, what it shows, results
    python -m kvlab.figures names                         the names alone, in a line
    python -m kvlab.figures draw [NAME ...] [--out DIR]   figure.pdf and figure.svg from committed results (no NAME: all)
    python -m kvlab.figures run NAME ... [--verify]       produce the results again; --verify: compare instead of writing
    python -m kvlab.figures check [NAME ...]              redraw and compare; results against manifest, manifest against config

Exit status: 0; 1 a check or a verification failed; 2 a user's error (nothing was overwritten); 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvlab.doors import exit_code
from kvlab.figures import actions, manifest
from kvlab.figures.spec import MANIFEST, Folder, load, names
from kvlab.interrupts import exit_code as interrupt_code
from kvlab.interrupts import say, unwinding
from kvlab.types import KvlabError, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    root = None if args.root is None else Path(args.root)
    try:
        if args.command == "list":
            return _list(root)
        if args.command == "names":
            print(" ".join(names(root)))
            return 0
        folders = [load(name, root) for name in (args.names or names(root))]
        with unwinding():
            if args.command == "draw":
                return _draw(folders, args.out)
            if args.command == "check":
                return _check(folders)
            if not args.names:
                raise UserError(f"run needs names: {', '.join(names(root))}.")
            return _verify(folders) if args.verify else _run(folders)
    except KvlabError as error:
        print(f"kvlab.figures: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        say("kvlab.figures: interrupted. Committed results are as they were.")
        return interrupt_code()


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m kvlab.figures", description=__doc__, formatter_class=raw)
    parser.add_argument("command", choices=("list", "names", "draw", "run", "check"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--root", help="folder that holds the figures' folders (default: experiments/ of the checkout)")
    parser.add_argument("--out", type=Path, help="draw: write into DIR/NAME instead of the figure's own folder")
    parser.add_argument("--verify", action="store_true", help="run: compare new results with the committed ones, write nothing")
    return parser


def _list(root: Path | None) -> int:
    return _each([load(name, root) for name in names(root)], _line)


def _line(folder: Folder) -> str:
    """A figure's line in the list."""
    spec = folder.spec()
    try:
        made = manifest.read(folder)
        state = f"{made['results']['rows']} rows, {made['date'][:10]}, {made['seconds']:.0f} s"
    except UserError:
        state = "its manifest is damaged: see check" if (folder.path / MANIFEST).exists() else "no results"
    return f"{spec.number:<4} {folder.name:<20} {spec.title} ({state})"


def _draw(folders: Sequence[Folder], out: Path | None) -> int:
    return _each(folders, lambda folder: f"{folder.name}: {', '.join(path.name for path in actions.draw(folder, out))}")


def _run(folders: Sequence[Folder]) -> int:
    return _each(folders, lambda folder: f"{folder.name}: {len(actions.run(folder))} rows in {manifest.read(folder)['seconds']:.0f} s")


def _each(folders: Sequence[Folder], act: Callable[[Folder], str]) -> int:
    """One after another, each with its line; a figure that can't be (a garbled file, a trace that isn't there) doesn't keep the others."""
    failed = 0
    for folder in folders:
        try:
            print(act(folder), flush=True)
        except KvlabError as error:
            failed += 1
            print(f"kvlab.figures: {folder.name}: {error}", file=sys.stderr, flush=True)
    return 2 if failed else 0


def _verify(folders: Sequence[Folder]) -> int:
    return int(_num_failed(folders, actions.verify, "the results differ", "the same results") > 0)


def _check(folders: Sequence[Folder]) -> int:
    failed = _num_failed(folders, actions.check, "FAILED", "ok")
    print(f"{len(folders) - failed} of {len(folders)} figures follow from their results")
    return int(failed > 0)


def _num_failed(folders: Sequence[Folder], look: Callable[[Folder], Sequence[str]], bad: str, good: str) -> int:
    """Folders in which `look` found something; each is said, with what was found, as soon as it is known."""
    failed = 0
    for folder in folders:
        try:
            found = look(folder)
        except KvlabError as error:
            failed += 1
            print(f"kvlab.figures: {folder.name}: {error}", file=sys.stderr, flush=True)
            continue
        failed += bool(found)
        print(f"{folder.name}: {bad if found else good}", flush=True)
        for line in found:
            print(f"  {line}")
    return failed


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
