"""What was decided in each step, kept to compare two runs: the table `plans`, one row a step holding `Plan.decisions()`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlab.trace.store import iter_rows
from kvlab.types import Plan, UserError


def plan_row(plan: Plan) -> tuple[int, str]:
    """A plan's decisions in the order of `schema.PLANS`."""
    return plan.step, json.dumps(plan.decisions(), separators=(",", ":"))


def read_plans(folder: Path | str) -> Iterator[tuple[Any, ...]]:
    """The decisions of each step of a run: nested tuples, equal to what `plan.decisions()` gave.

    Raises UserError when the run kept none, or a file of them is damaged.
    """
    empty = True
    for _, decisions in iter_rows(Path(folder), "plans"):
        empty = False
        try:
            yield _tuples(json.loads(decisions))
        except (ValueError, TypeError) as error:
            raise UserError(f"The plans of {folder} can't be read: {error}") from error
    if empty:
        raise UserError(f"{folder} holds no plans. Record the run again with record.plans=true.")


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
