"""Where two runs first decided differently, and what was decided there: their recorded plans, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kvlab.results import Run
from kvlab.trace.plans import read_plans
from kvlab.types import UserError

FIELDS = (
    "step", "scheduled", "tables", "fresh_tables", "released", "swap_out", "swap_in", "copies", "admitted", "preempted", "blocked", "ended",
)  # fmt: skip
"""The order of `Plan.decisions()`."""

STATE = ("num_running_reqs", "num_waiting_reqs", "num_swapped_reqs", "kv_blocks_used", "kv_blocks_evictable", "kv_blocks_free")


@dataclass(frozen=True)
class DecisionDifference:
    """The first step at which two runs decided differently.

    Attributes:
        step: its number; None: they never did. num_steps: steps that were compared.
        lines: what each of them decided there, most telling first, and the state that they were in.
    """

    step: int | None
    num_steps: int
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.step is None:
            return f"The same decisions in all {self.num_steps} steps."
        first = f"The first different decision is in step {self.step}; the {self.num_steps} steps before it are the same."
        return "\n".join([first, *self.lines])


def first_difference(first: Run, second: Run, names: tuple[str, str]) -> DecisionDifference:
    """Compare two runs' plans. `names`: what to call them. UserError: one of them kept none (record.plans=true)."""
    number = 0
    for number, (a, b) in enumerate(zip_longest(_plans(first), _plans(second))):
        if a is None or b is None:
            longer = names[0] if b is None else names[1]
            return DecisionDifference(number, number, (f"only {longer} has a step {number}: the other has ended",))
        if a != b:
            return DecisionDifference(number, number, (*_explain(a, b, *names), *_state(first, second, number, names)))
    return DecisionDifference(None, number + 1)


def _plans(run: Run) -> Any:
    if run.folder is None:
        raise UserError(f"Run {run.name} was kept in memory, without plans.")
    return read_plans(Path(run.folder))


def _explain(a: Sequence[Any], b: Sequence[Any], name_a: str, name_b: str) -> list[str]:
    """One line a field that differs, causes before consequences."""
    of_a, of_b = dict(zip(FIELDS, a, strict=True)), dict(zip(FIELDS, b, strict=True))
    shown: tuple[tuple[str, Callable[[Any], str]], ...] = (
        ("admitted", lambda x: f"{x[1]} ({x[2]}, {x[3]} tokens, {x[4]} of them cached)"),
        ("preempted", lambda x: f"{x[1]} (by {x[2]}, {x[4]} computed tokens, {x[5]} blocks, because of {x[6]})"),
        ("blocked", lambda x: f"{x[1]} (by {x[2]})"),
        ("ended", lambda x: f"{x[1]} ({x[2]})"),
        ("scheduled", lambda x: f"sequence {x[0]} from position {x[1]}, {x[2]} tokens"),
        ("swap_out", str), ("swap_in", str), ("copies", str),
    )  # fmt: skip
    lines = []
    for field, describe in shown:
        only_a = [x for x in of_a[field] if x not in of_b[field]]
        only_b = [x for x in of_b[field] if x not in of_a[field]]
        if only_a or only_b:
            texts = [f"{name} alone: {_few(only, describe)}" for name, only in ((name_a, only_a), (name_b, only_b)) if only]
            lines.append(f"{field}: {'; '.join(texts)}")
        elif of_a[field] != of_b[field]:
            lines.append(f"{field}: the same ones in another order")
    if not lines and any(of_a[field] != of_b[field] for field in ("tables", "fresh_tables")):
        lines.append("tables: the same work in other blocks: eviction, the prefix cache or the layout chose differently")
    if not lines:
        lines.append("released: other sequences were let go")
    return lines


def _few(items: Sequence[Any], describe: Callable[[Any], str], most: int = 3) -> str:
    return ", ".join(map(describe, items[:most])) + (f" and {len(items) - most} more" if len(items) > most else "")


def _state(first: Run, second: Run, step: int, names: tuple[str, str]) -> list[str]:
    """The state before the step, that after the one before it: in words of both runs where it is the same, else of each."""
    found = []
    for run in (first, second):
        steps = run.steps(("step", *STATE))
        before = steps[steps["step"] < step].tail(1)
        if before.empty:
            return []
        found.append([int(before[name].iloc[0]) for name in STATE])
    if found[0] == found[1]:
        return ["Until then, in both: " + ", ".join(f"{name} {value}" for name, value in zip(STATE, found[0], strict=True))]
    pairs = zip(STATE, *found, strict=True)
    texts = [f"{name} {a}" if a == b else f"{name} {a} in {names[0]}, {b} in {names[1]}" for name, a, b in pairs]
    return ["Until then: " + ", ".join(texts)]
