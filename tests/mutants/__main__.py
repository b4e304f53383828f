"""``make mutants`` (``PYTHONPATH=tests python -m mutants``): runs the mutants, prints a table, fails where a test is missing."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

from mutants import Mutant, all_mutants
from mutants.running import GOOD, Result, run_mutants

ROOT = Path(__file__).resolve().parents[2]


def selected(mutants: list[Mutant], only: str) -> list[Mutant]:
    """Those whose name or file holds one of the comma-separated pieces, or matches it as a pattern; all for an empty string."""
    pieces = [piece.strip() for piece in only.split(",") if piece.strip()]
    return [m for m in mutants if not pieces or any(p in text or fnmatch(text, p) for p in pieces for text in (m.name, m.file))]


def main() -> int:
    """0 if every mutant was killed or is equivalent, 1 if not, 2 if none was selected."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--only", default="", help="comma-separated pieces or patterns of names or files")
    parser.add_argument("--jobs", type=int, default=2, help="test runs at a time")
    parser.add_argument("--list", action="store_true", help="names and files only")
    arguments = parser.parse_args()
    mutants = selected(all_mutants(), arguments.only)
    if not mutants:
        print(f"no mutant's name or file matches {arguments.only!r}; --list shows all", file=sys.stderr)
        return 2
    if arguments.list:
        print("\n".join(f"{mutant.name:40} {mutant.file}" for mutant in mutants))
        return 0
    print(f"{len(mutants)} mutants, {arguments.jobs} at a time; their tests without a mutant first ...", flush=True)
    results = run_mutants(ROOT, mutants, jobs=arguments.jobs, report=lambda result: print(_row(result), flush=True))
    bad = [result for result in results if result.verdict not in GOOD]
    counts = Counter(result.verdict for result in results)
    print(f"\n{len(results)} mutants: " + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    print("".join(f"{_row(result)}\n" for result in bad), end="")
    return int(bool(bad))


def _row(result: Result) -> str:
    return f"{result.verdict:14} {result.seconds:5.0f} s  {result.mutant.name:40} {result.note}"


if __name__ == "__main__":
    sys.exit(main())
