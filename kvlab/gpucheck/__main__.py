"""Command line of the GPU check; see `python -m kvlab.gpucheck --help`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kvlab.doors import exit_code
from kvlab.interrupts import unwinding


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 all goals hold, 1 some don't or a section failed, 2 it could not start."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.gpucheck", description=sys.modules["kvlab.gpucheck"].__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, epilog=main.__doc__)  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("gpucheck"), help="folder for findings.json, findings.parquet, README.md")
    parser.add_argument("--dry", action="store_true", help="small sizes on the CPU, in Triton's interpreter")
    parser.add_argument("--sections", default="", help="comma-separated; default: all. --list names them")
    parser.add_argument("--list", action="store_true", help="name the sections and end")
    parser.add_argument("--model", default="", help="folder of a Llama for the checks of tokens; random: the bundled model's shape with "
                        "random weights, for a machine without a network (default: the bundled model)")  # fmt: skip
    args = parser.parse_args(argv)
    if args.dry:  # before anything imports triton
        os.environ["TRITON_INTERPRET"] = "1"
    from kvlab.gpucheck.running import MEANING, run_sections
    from kvlab.types import UserError

    if args.list:
        print("\n".join(f"{name:12} {meaning}" for name, meaning in MEANING.items()))
        return 0
    try:
        names = [name.strip() for name in args.sections.split(",")] if args.sections else []
        with unwinding():
            return run_sections(names, args.dry, args.out, args.model)
    except UserError as error:
        print(f"gpucheck: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
