"""Compare two runs: `python -m kvlab.compare RUN_A RUN_B` and `kvlab.compare(a, b)`.

Prints what differs in their configuration, their figures with the difference's 95 % interval and whether it is beyond noise, and the
first step at which they decided differently and why (runs recorded with record.plans=true). Two runs of a sweep: SWEEP/0 SWEEP/1, or
SWEEP/{0,1} in a shell that knows braces. Exit codes: 0 compared, 2 a user's error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from kvlab.comparing import check_no_sweep, compare
from kvlab.doors import exit_code
from kvlab.types import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if any(word in ("-h", "--help") for word in words):
        print(__doc__)
        return 0
    try:
        if len(words) == 1:
            check_no_sweep(words[0])
        if len(words) != 2:
            raise UserError(f"Two run folders are needed, {len(words)} were given: python -m kvlab.compare RUN_A RUN_B")
        print(compare(words[0], words[1]))
    except UserError as error:
        print(f"kvlab: {error}", file=sys.stderr)
        return 2
    return 0


class _CallableModule(ModuleType):
    """`kvlab.compare(...)`."""

    __call__ = staticmethod(compare)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    raise SystemExit(exit_code(main))
