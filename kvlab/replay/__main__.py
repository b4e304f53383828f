"""python -m kvlab.replay TRACE eviction=lru,fifo capacity=1000,5000: a table of hits, one row a policy and capacity."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvlab.policies.registry import by_name
from kvlab.replay import SEMANTICS, EngineOptions, ReplayResult, as_trace, check_capacity, replay
from kvlab.types import KvlabError, UserError, unknown_name

USAGE = """usage: python -m kvlab.replay TRACE [KEY=VALUE ...]
  TRACE                        a file, or a name in the folder KVLAB_TRACES
  eviction=lru,fifo            policies
  capacity=1000,5000           blocks; with semantics=access also a share of the trace's distinct blocks (0.1)
  semantics=access             access: a classic cache simulation; engine: as an engine that serves one request after the other
  limit=500                    the first so many requests
  block_size=16 block_tokens=16 max_num_batched_tokens=2048   (semantics=engine; block_tokens: tokens that a hash id becomes)"""
DEFAULTS = {"eviction": "lru", "capacity": "1000", "semantics": "access", "limit": ""}
ENGINE_KEYS = ("block_size", "block_tokens", "max_num_batched_tokens")
COLUMNS = ("policy", "capacity", "object_hits", "prefix_hits", "per block, any", "per block, prefix", "per token", "per request")


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
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    for key in given:
        if key not in (*DEFAULTS, *ENGINE_KEYS):
            raise unknown_name("option", key, (*DEFAULTS, *ENGINE_KEYS))
    settings = DEFAULTS | given
    paths = [argument for argument in arguments if "=" not in argument]
    if len(paths) != 1:
        raise UserError(f"One trace is needed, {len(paths)} were given.\n{USAGE}")
    semantics = settings["semantics"]
    if semantics not in SEMANTICS:
        raise unknown_name("semantics", semantics, SEMANTICS)
    sizes = {key: int(_number(key, given[key])) for key in ENGINE_KEYS if key in given}
    options = EngineOptions(**sizes) if sizes else None
    policies = settings["eviction"].split(",")
    capacities = [_number("capacity", text) for text in settings["capacity"].split(",")]
    for name in policies:
        by_name("eviction", name)  # wrong names and numbers end it before the trace is read
    for capacity in capacities:
        check_capacity(capacity, semantics)
    limit = int(_number("limit", settings["limit"])) if settings["limit"] else None
    trace = paths[0] if semantics == "engine" else as_trace(paths[0], limit)
    for number, (name, capacity) in enumerate((name, capacity) for name in policies for capacity in capacities):
        result = replay(trace, name, capacity, semantics, limit, options)
        if number == 0:
            print(f"{result.trace}: {result.requests} requests, {result.accesses} blocks; semantics {semantics}, no warm-up left out")
            print("  ".join(f"{column:>11}" for column in COLUMNS))
        print(_row(result), flush=True)


def _row(result: ReplayResult) -> str:
    rates = result.object_hit_rate, result.prefix_hit_rate, result.token_hit_rate, result.request_hit_rate
    cells = [result.policy, result.capacity, result.object_hits, result.prefix_hits]
    cells += ["-" if rate is None else f"{rate:.4f}" for rate in rates]
    return "  ".join(f"{cell!s:>{max(11, len(column))}}" for cell, column in zip(cells, COLUMNS, strict=True))


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
