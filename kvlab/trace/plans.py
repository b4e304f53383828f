"""What was decided in each step, kept to compare two runs: `plans.jsonl`, one line a step holding `Plan.decisions()`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlab.trace.outcomes import read_lines
from kvlab.types import Plan, UserError

PLANS_FILE = "plans.jsonl"


def plan_line(plan: Plan) -> str:
    """A plan's decisions as one line of JSON."""
    return json.dumps(plan.decisions(), separators=(",", ":")) + "\n"


def read_plans(path: Path) -> Iterator[tuple[Any, ...]]:
    """The decisions of each step: nested tuples, equal to what `plan.decisions()` gave. A cut-off last line is left out."""
    path = Path(path)
    path = path / PLANS_FILE if path.is_dir() else path
    if not path.exists():
        raise UserError(f"{path} does not exist: the run kept no plans. Record them with record.plans=true.")
    for _, value in read_lines(path, lambda line: _tuples(json.loads(line))):
        yield value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
