"""python -m kvlab.replay TRACE eviction=lru,fifo capacity=1000,5000: a table of hits, one row a policy and capacity."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvlab.policies.registry import by_name
from kvlab.replay import as_trace, check_capacity, replay
from kvlab.types import KvlabError, UserError, unknown_name

USAGE = (
    "usage: python -m kvlab.replay TRACE [eviction=lru,fifo] [capacity=1000,0.1] [semantics=access] [limit=REQUESTS]\n"
    "capacity: blocks, or a share of the trace's distinct blocks (a number below 1)."
)
DEFAULTS = {"eviction": "lru", "capacity": "1000", "semantics": "access", "limit": ""}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after a user's error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0 if arguments else 2
    try:
        _table(arguments)
    except KvlabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _table(arguments: Sequence[str]) -> None:
    options = dict(DEFAULTS)
    paths = [argument for argument in arguments if "=" not in argument]
    for key, value in (argument.split("=", 1) for argument in arguments if "=" in argument):
        if key not in options:
            raise unknown_name("option", key, options)
        options[key] = value
    if len(paths) != 1:
        raise UserError(f"One trace is needed, {len(paths)} were given.\n{USAGE}")
    policies = options["eviction"].split(",")
    for name in policies:
        by_name("eviction", name)  # a wrong name ends it before the trace is read
    capacities = [_number("capacity", text) for text in options["capacity"].split(",")]
    for capacity in capacities:
        check_capacity(capacity)
    limit = int(_number("limit", options["limit"])) if options["limit"] else None
    trace = as_trace(paths[0], limit)
    counts = f"{len(trace.blocks)} requests, {trace.num_accesses} block references, {trace.num_unique_blocks} distinct"
    print(f"{trace.name}: {counts}; semantics {options['semantics']}, no warm-up")
    header = "policy", "capacity", "object_hits", "prefix_hits", "per block, any", "per block, prefix", "per token", "per request"
    print("  ".join(f"{name:>11}" for name in header))
    for name in policies:
        for capacity in capacities:
            result = replay(trace, name, capacity, options["semantics"])
            rates = result.object_hit_rate, result.prefix_hit_rate, result.token_hit_rate, result.request_hit_rate
            cells = [name, result.capacity, result.object_hits, result.prefix_hits]
            cells += ["-" if rate is None else f"{rate:.4f}" for rate in rates]
            print("  ".join(f"{cell!s:>{max(11, len(title))}}" for cell, title in zip(cells, header, strict=True)))


def _number(name: str, text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{name} = {text!r} is not a number.") from None


if __name__ == "__main__":
    raise SystemExit(main())
