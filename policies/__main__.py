"""python -m kvlab.policies [SEAM ...] [--long | --markdown]: every policy, what it does, its parameters, source and deviations."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from inspect import Parameter
from typing import Any

from kvlab.doors import exit_code
from kvlab.policies.registry import SEAMS, PolicyRow, list_policies
from kvlab.types import KvlabError, unknown_name

USAGE = f"""usage: python -m kvlab.policies [SEAM ...] [--long | --markdown]
  SEAM         {", ".join(SEAMS)} (all, if none is given)
  --long       parameters, source and deviations of each
  --markdown   the same as a table in Markdown"""
WIDTH = 140


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after a user's error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    try:
        for option in (a for a in arguments if a.startswith("-")):
            if option not in ("--long", "--markdown"):
                raise unknown_name("option", option, ("--long", "--markdown", "--help"))
        seams = [a for a in arguments if not a.startswith("-")] or list(SEAMS)
        rows = [row for seam in seams for row in list_policies(seam)]
    except KvlabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    form = _markdown if "--markdown" in arguments else _long if "--long" in arguments else _short
    print(form(rows))
    return 0


def parameters(row: PolicyRow) -> str:
    """`name=default` of each, `name` alone where one must be given."""
    return ", ".join(name if default is Parameter.empty else f"{name}={shown(default)}" for name, default in row.parameters.items())


def shown(default: Any) -> str:
    """A default as it would be written in a yaml."""
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    return default if isinstance(default, str) and default else repr(default)


def _short(rows: Sequence[PolicyRow]) -> str:
    lines = []
    for seam in dict.fromkeys(row.seam for row in rows):
        own = [row for row in rows if row.seam == seam]
        lines.append(f"{seam} ({len(own)})")
        for row in own:
            taken = parameters(row)
            lines += textwrap.wrap(row.idea, WIDTH, initial_indent=f"  {row.name:<20} ", subsequent_indent=" " * 23)
            if taken:
                lines += textwrap.wrap(f"({taken})", WIDTH, initial_indent=" " * 23, subsequent_indent=" " * 23)
    lines.append(f"{len(rows)} policies. --long adds sources and deviations. Choose with SEAM=NAME, set with SEAM.PARAMETER=VALUE.")
    return "\n".join(lines)


def _long(rows: Sequence[PolicyRow]) -> str:
    parts = []
    for row in rows:
        facts = {"": row.idea, "parameters": parameters(row) or "none", "source": row.source, "deviations": row.deviations or "none"}
        lines = [f"{row.seam}={row.name}"]
        for title, text in facts.items():
            # Addresses stay whole: they are to be copied.
            lines += textwrap.wrap(f"{title}: {text}" if title else text, WIDTH, initial_indent="  ", subsequent_indent="    ",
                                   break_long_words=False, break_on_hyphens=False)  # fmt: skip
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _markdown(rows: Sequence[PolicyRow]) -> str:
    lines = ["| seam | name | what it does | parameters and defaults | source | deviations |", "|---|---|---|---|---|---|"]
    for row in rows:
        taken = f"`{parameters(row)}`" if row.parameters else "none"
        cells = (row.seam, f"`{row.name}`", row.idea, taken, row.source, row.deviations or "none")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
