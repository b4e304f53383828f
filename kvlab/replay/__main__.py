"""python -m kvlab.replay TRACE eviction=lru,fifo capacity=1000,5000: a table of hits, one row a policy and capacity."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.doors import exit_code
from kvlab.interrupts import unwinding
from kvlab.policies.registry import list_policies
from kvlab.replay import SEMANTICS, EngineOptions, ReadOptions, ReplayResult, lru_curve
from kvlab.replay.curve import LruCurve
from kvlab.replay.job import Job
from kvlab.replay.sweeping import Failure, run_points
from kvlab.types import KvlabError, UserError, unknown_name
from kvlab.words import as_number
from kvlab.workload.public_traces import table

if TYPE_CHECKING:
    import pandas as pd

USAGE = """usage: python -m kvlab.replay TRACE [KEY=VALUE ...]
       python -m kvlab.replay --list     public traces that are fetched by name
Lower-case values are the defaults.
  TRACE                        a file, a name in the folders of KVLAB_TRACES, or a public trace
                               (Mooncake, Qwen-Bailian, ShareGPT, Azure, BurstGPT, or one id a line)
  eviction=lru                 policies, e.g. lru,fifo; all: every one that needs no parameters
  capacity=1000                one or several, e.g. 1000,5000: blocks; 40000tok: tokens; 8GiB: bytes of model; with semantics=access
                               also 0.1 or 10%: a share of the trace's distinct blocks
  capacity_unit=blocks         what plain numbers are: blocks, tokens, bytes, share
  model=NAME kv_dtype=bfloat16 whose K and V bytes are of, e.g. llama3_8b, or a model's folder
  semantics=access             access: a classic cache simulation; engine: as an engine that serves one request after the other
  warmup=0                     requests, or a share of them (0.1), that fill the cache and are in no figure
  curve=false                  true: LRU at all capacities in one pass (semantics=access)
  limit=N                      the first so many requests only
  jobs=1                       processes
  out=FILE                     also write the rows (all capacities with curve=true): .csv or .parquet
  block_size=16 tokenizer=bytes interleave=1     ShareGPT: tokens per block; bytes, smollm2 or a model's folder; conversations that
                               take turns (Azure and BurstGPT: block_size)
  trace_block_tokens=512       Mooncake: tokens an id stands for
  folder=PATH                  where the trace's name is looked for first
  block_size=16 block_tokens=16 max_num_batched_tokens=2048     semantics=engine (block_tokens: tokens that a hash id becomes)"""

READ_KEYS = ("block_size", "trace_block_tokens", "interleave")
ENGINE_KEYS = ("block_size", "block_tokens", "max_num_batched_tokens")
KEYS = ("eviction", "capacity", "capacity_unit", "model", "kv_dtype", "semantics", "warmup", "curve", "limit", "jobs", "out", "tokenizer",
        "folder", *dict.fromkeys(READ_KEYS + ENGINE_KEYS))  # fmt: skip
COLUMNS = ("policy", "capacity", "object_hits", "prefix_hits", "block/any", "block/prefix", "token/prefix", "request/prefix")
LEGEND = "hit rates: per block of any place, and in unbroken runs from a prompt's start (prefix) per block, per token, per request"
CURVE_ROWS = 16
"""Capacities of a curve that are printed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 if policies of eviction=all failed; 2 after a user's error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0 if arguments else 2
    if arguments == ["--list"]:
        print(table())
        return 0
    try:
        with unwinding():  # a trace that is fetched, processes
            return _replay(arguments)
    except KvlabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _replay(arguments: Sequence[str]) -> int:
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    for key in given:
        if key not in KEYS:
            raise unknown_name("option", key, KEYS)
    traces = [argument for argument in arguments if "=" not in argument]
    if len(traces) != 1:
        raise UserError(f"One trace is needed, {len(traces)} were given.\n{USAGE}")
    out = None if "out" not in given else Path(given["out"])
    if out is not None and out.suffix not in (".csv", ".parquet"):
        raise UserError(f"out = {str(out)!r} is not allowed: a file called .csv or .parquet.")
    return _curve(traces[0], given, out) if _truth(given, "curve") else _sweep(traces[0], given, out)


def _sweep(trace: str, given: Mapping[str, str], out: Path | None) -> int:
    """The table of all policies at all capacities."""
    semantics = given.get("semantics", "access")
    if semantics not in SEMANTICS:
        raise unknown_name("semantics", semantics, SEMANTICS)
    is_all = given.get("eviction") == "all"
    policies = _all_policies() if is_all else given.get("eviction", "lru").split(",")
    capacities = given.get("capacity", "1000").split(",")
    options = None
    if semantics == "engine":
        options = EngineOptions(**{key: _whole(given, key) for key in ENGINE_KEYS if key in given})
    elif useless := [key for key in ("block_tokens", "max_num_batched_tokens") if key in given]:
        raise UserError(f"{useless[0]} has no effect with semantics access. Leave it out.")
    job = Job.of(
        trace, semantics, _limit(given), options, _number(given, "warmup", 0), given.get("capacity_unit"), given.get("model"),
        given.get("kv_dtype", "bfloat16"), _reading(given, semantics), [(name, size) for name in policies for size in capacities],
    )  # fmt: skip
    rows: list[dict[str, object]] = []
    failures: list[Failure] = []
    for point in run_points(job, policies, capacities, _whole(given, "jobs", 1)):
        if isinstance(point, ReplayResult):
            if not rows:
                _header(point.trace, point.requests, point.accesses, semantics, point.warmup, point.notes)
            rows.append(point.row())
            print(_cells(point), flush=True)
        elif is_all:
            failures.append(point)
        else:
            raise point.error()
    for failure in failures:
        print(f"error: eviction={failure.policy} capacity={failure.capacity}: {failure.message}", file=sys.stderr)
    if out is not None:
        import pandas as pd

        _write(pd.DataFrame(rows), out)
    return 1 if failures else 0


def _curve(trace: str, given: Mapping[str, str], out: Path | None) -> int:
    """LRU at all capacities: some of them printed, all written."""
    allowed = ("curve", "eviction", "semantics", "warmup", "limit", "out", "tokenizer", "folder", *READ_KEYS)
    for key in given:
        if key not in allowed:
            raise UserError(f"{key} has no effect with curve=true, which gives LRU at all capacities. Leave it out.")
    if given.get("eviction", "lru") != "lru" or given.get("semantics", "access") != "access":
        raise UserError("curve=true is for eviction=lru and semantics=access only: other policies don't keep what smaller caches hold.")
    curve = lru_curve(trace, _number(given, "warmup", 0), _limit(given), _reading(given, "access"))
    _header(curve.trace, curve.requests, curve.accesses, "access", curve.warmup, curve.notes)
    last = len(curve.capacities)
    for capacity in sorted({round(size) for size in np.geomspace(1, max(1, last), CURVE_ROWS)}):
        print(_curve_cells(curve, capacity))
    if out is not None:
        _write(curve.frame, out)
    return 0


# --------------------------------------------------------------------------- what is given


def _all_policies() -> list[str]:
    rows = list_policies("eviction")
    return [row.name for row in rows if all(default is not inspect.Parameter.empty for default in row.parameters.values())]


def _reading(given: Mapping[str, str], semantics: str) -> ReadOptions:
    """With semantics engine `block_size` is the engine's."""
    keys = [key for key in READ_KEYS if key in given and not (semantics == "engine" and key == "block_size")]
    numbers: dict[str, Any] = {key: _whole(given, key) for key in keys}
    return ReadOptions(**numbers, tokenizer=given.get("tokenizer"), folder=given.get("folder"))


def _limit(given: Mapping[str, str]) -> int | None:
    return _whole(given, "limit") if given.get("limit") else None


def _number(given: Mapping[str, str], key: str, default: int) -> int | float:
    text = given.get(key, str(default))
    number = as_number(text)
    if number is not None:
        return number
    if text.endswith("%"):
        return _number({key: text[:-1]}, key, default) / 100
    raise UserError(f"{key} = {text!r} is not a number.")


def _whole(given: Mapping[str, str], key: str, default: int = 0) -> int:
    value = _number(given, key, default)
    if not isinstance(value, int):
        raise UserError(f"{key} = {given[key]!r} is not a whole number.")
    return value


def _truth(given: Mapping[str, str], key: str) -> bool:
    text = given.get(key, "false").lower()
    if text not in ("true", "false"):
        raise UserError(f"{key} = {given[key]!r} is not allowed: true or false.")
    return text == "true"


# ----------------------------------------------------------------------------- what is told


def _header(trace: str, requests: int, accesses: int, semantics: str, warmup: int, notes: Sequence[str]) -> None:
    warm = f"after a warm-up of {warmup} requests" if warmup else "no warm-up left out"
    print(f"{trace}: {requests} requests, {accesses} blocks; semantics {semantics}, {warm}")
    for note in notes:
        print(f"note: {note}")
    print(LEGEND)
    print("  ".join(f"{column:>11}" for column in COLUMNS))


def _line(cells: Sequence[object]) -> str:
    texts = ["-" if cell is None else f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in cells]
    return "  ".join(f"{text:>{max(11, len(column))}}" for text, column in zip(texts, COLUMNS, strict=True))


def _cells(result: ReplayResult) -> str:
    rates = result.object_hit_rate, result.prefix_hit_rate, result.token_hit_rate, result.request_hit_rate
    return _line([result.policy, result.capacity, result.object_hits, result.prefix_hits, *rates])


def _curve_cells(curve: LruCurve, capacity: int) -> str:
    place = capacity - 1
    tokens = None if curve.token_hit_rate is None else float(curve.token_hit_rate[place])
    rates = float(curve.object_hit_rate[place]), float(curve.prefix_hit_rate[place]), tokens, float(curve.request_hit_rate[place])
    return _line(["lru", capacity, *curve.at(capacity), *rates])


def _write(frame: pd.DataFrame, out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".csv":
            frame.to_csv(out, index=False)
        else:
            frame.to_parquet(out, index=False)
    except OSError as error:
        raise UserError(f"{out} can't be written: {error.strerror or error}.") from None
    print(f"wrote {len(frame)} rows to {out}")


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
