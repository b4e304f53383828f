"""Search over policies and numbers with several objectives: `kvlab.search(...)` and `python -m kvlab.search`. Needs Optuna.

    python -m kvlab.search trials=50 study=runs/tuning objectives=output_token_throughput_per_s,p99_ttft_ms,kv_pool_tokens \\
        eviction=lru,sieve,s3fifo watermark=0..0.2 num_blocks=64..512 runner=simulated workload=synthetic

`KEY=A,B,C` is a choice, `KEY=LOW..HIGH` a range (whole numbers if both ends are), everything else is fixed for all trials; `log:LOW..HIGH`
is searched on a logarithmic scale. Settings: trials (in all, those of earlier calls included; default 30), study (its folder), objectives
(`min:`/`max:` in front turns one round), seed, prune=false. Calling it again with the same study goes on. Each trial is a run folder,
`STUDY/0`, `STUDY/1` ...; `kvlab.load_runs(STUDY)` reads them. Exit codes: 0 done, 1 no trial finished, 2 a user's error, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from kvlab.doors import exit_code
from kvlab.interrupts import exit_code as interrupt_code
from kvlab.interrupts import say, unwinding
from kvlab.searching import DEFAULT_OBJECTIVES, Range, search
from kvlab.tables import text_table
from kvlab.types import UserError
from kvlab.words import as_number

SETTINGS = ("trials", "study", "objectives", "search_seed", "prune")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    try:
        given, space, fixed = _split(words)
        with unwinding():
            found = search(
                space, *fixed, trials=_whole(given.get("trials", "30"), "trials"), folder=given.get("study"),
                objectives=given["objectives"].split(",") if "objectives" in given else DEFAULT_OBJECTIVES,
                seed=_whole(given.get("search_seed", "0"), "search_seed"), prune=_truth(given.get("prune", "true")),
            )  # fmt: skip
    except UserError as error:
        print(f"kvlab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        say("kvlab: interrupted. The same command goes on where it was.")
        return interrupt_code()
    columns = ["run", *space, *(o.figure for o in found.objectives)]
    front = found.front_table(list(space)).itertuples(index=False)
    rows = [[f"{v:.5g}" if isinstance(v, float) else str(v) for v in row] for row in front]
    print(text_table(columns, rows))
    finished = int((found.trials["state"] == "finished").sum())
    print(f"{len(rows)} of {finished} finished trials are on the Pareto front; {found.counts()}.")
    if refusing := found.front.attrs["refusing"]:
        print(f"Trials that refused requests are pruned, and not on the front: {refusing}.")
    if not finished:
        print(f"kvlab: no trial finished. {found.commonest_reason()}", file=sys.stderr)
    print(f"\nFolder: {found.folder}")
    return 0 if rows else 1


def _split(words: Sequence[str]) -> tuple[dict[str, str], dict[str, Any], list[str]]:
    """(settings, space, fixed overrides)."""
    given: dict[str, str] = {}
    space: dict[str, Any] = {}
    fixed: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"{word!r} is no KEY=VALUE. python -m kvlab.search --help")
        if key in SETTINGS:
            given[key] = text
        elif ".." in text and "/" not in text:
            space[key.removeprefix("+")] = Range.read(key, text)
        elif "," in text and text[0] not in "[{'\"":
            space[key.removeprefix("+")] = [_value(part) for part in text.split(",")]
        else:
            fixed.append(word)
    return given, space, fixed


def _value(text: str) -> Any:
    number = as_number(text)
    return text if number is None else number


def _whole(text: str, name: str) -> int:
    if not text.isdecimal():
        raise UserError(f"{name} = {text!r} is not allowed: a whole number.")
    return int(text)


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise UserError(f"prune = {text!r} is not allowed: true or false.")
    return text.lower() == "true"


class _CallableModule(ModuleType):
    """`kvlab.search(...)`."""

    __call__ = staticmethod(search)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    raise SystemExit(exit_code(main))
