"""The points of a sweep: each a checked configuration with a label that says what is swept, and a key that says what it is."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlab.assembly import policy_objects
from kvlab.building import build
from kvlab.composition import ADDITIVE, compose
from kvlab.config import SEAMS, VALUES, check_config, check_value, to_plain
from kvlab.flat import flatten
from kvlab.identifying import experiment_facts
from kvlab.types import UserError, unknown_name
from kvlab.workload.base import Workload

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        number: its place, and the name of its folder in the sweep's. label: what is swept, as on the command line.
        config: plain configuration. policies: objects, classes or names that take the place of configured ones, by seam.
        key: 16 hex digits of configuration and foreign sources: what tells whether an earlier result is this point's.
        comparable: False where a class has no source: its earlier results can't be trusted, the point is always run.
        facts: flat configuration and sources, for naming what drifted. out: address that the run is uploaded to; "": it stays local.
    """

    number: int
    label: str
    config: Mapping[str, Any]
    policies: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""
    comparable: bool = True
    facts: Mapping[str, Any] = field(default_factory=dict)
    out: str = ""


def make_point(number: int, label: str, config: Mapping[str, Any], policies: Mapping[str, Any] | None = None) -> Point:
    """A point with its key. UserError: a policy that can't be made."""
    given = dict(policies or {})
    found = experiment_facts(config, policy_objects(given))
    kept, sources = found if found is not None else (dict(config), {})
    facts = {**flatten(kept), **{f"source of {name}": _short_digest(text) for name, text in sources.items()}, **inputs_of(config)}
    text = json.dumps([label if found is None else "", facts], sort_keys=True, default=str)
    return Point(number, label, dict(config), given, hashlib.sha256(text.encode()).hexdigest()[:16], found is not None, facts)


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def inputs_of(node: Any, name: str = "") -> dict[str, str]:
    """Files and folders that the configuration names (`path`, `run`), by size and time of change: other contents are another point."""
    found: dict[str, str] = {}
    if not isinstance(node, Mapping):
        return found
    for key, value in node.items():
        if isinstance(value, Mapping):
            found |= inputs_of(value, f"{name}{key}.")
        elif key in ("path", "run") and isinstance(value, str) and Path(value).exists():
            files = [Path(value)] if Path(value).is_file() else sorted(p for p in Path(value).iterdir() if p.is_file())
            stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
            found[f"contents of {name}{key}"] = _short_digest(json.dumps(stats))
    return found


def grid_points(grid: Mapping[str, Sequence[Any]], overrides: Sequence[str], repeats: int = 1) -> list[Point]:
    """All points of a grid, checked, the last key varying fastest; `repeats` > 1 runs each with that many seeds.

    Raises:
        UserError: a wrong key, name or value anywhere in the grid.
    """
    if not isinstance(grid, Mapping):
        raise UserError(f'grid = {grid!r} is not allowed: a dict of lists, e.g. {{"block_size": [8, 16]}}.')
    for key, values in grid.items():
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
            raise UserError(f"grid[{key!r}] = {values!r} is not allowed: a list of at least one value, e.g. [{values!r}].")
    grid = {**grid, **seeds(repeats, "seed" in grid, overrides)}
    return [make_point(number, *checked) for number, checked in enumerate(_combinations(grid, overrides))]


def seeds(repeats: int, seed_is_swept: bool, overrides: Sequence[str]) -> dict[str, list[int]]:
    """The axis that repeats add: as many seeds, counted from the configured one. UserError: no such number, or seeds are swept."""
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise UserError(f"repeats = {repeats!r} is not allowed: a positive integer (runs of each point, with different seeds).")
    if repeats == 1:
        return {}
    if seed_is_swept:
        raise UserError("repeats and a list of seeds are two ways to say the same: leave one out.")
    first = int(compose(*overrides).seed)
    return {"seed": list(range(first, first + repeats))}


def _combinations(grid: Mapping[str, Sequence[Any]], overrides: Sequence[str]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    composer, workloads = Composer(overrides), Workloads()
    for combination in itertools.product(*grid.values()):
        chosen = dict(zip(grid, combination, strict=True))
        policies = {k: v for k, v in chosen.items() if not _is_plain(v)}
        for key in policies:
            if key not in SEAMS:
                raise unknown_name("seam for a policy object", key, SEAMS)
        words = [override(k, v) for k, v in chosen.items() if k not in policies]
        config = composer.config({k: v for k, v in chosen.items() if k not in policies})
        check_config(config)
        workloads.check(config["workload"])
        label = ", ".join([*words, *(f"{k}={_class_name(v)}" for k, v in policies.items())])
        yield label, config, policies


class Composer:
    """Configurations of many points. Hydra takes a good part of a second for one: points that differ in top-level numbers share it."""

    def __init__(self, overrides: Sequence[str]) -> None:
        self._overrides = tuple(overrides)
        self._composed: dict[tuple[str, ...], Any] = {}

    def config(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """The plain configuration with these keys set, as if they stood at the end of the command line. UserError: a wrong one."""
        numbers = {k: v for k, v in chosen.items() if k in VALUES and (v is None or isinstance(v, (bool, int, float)))}
        words = tuple(override(k, v) for k, v in chosen.items() if k not in numbers)
        if words not in self._composed:
            self._composed[words] = compose(*self._overrides, *words)
        config = copy.deepcopy(self._composed[words])
        for key, value in numbers.items():
            check_value(key, value)
            config[key] = value
        return to_plain(config)


class Workloads:
    """Checks the workloads of many points, each once, by building them: nothing is read or drawn."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def check(self, node: Any) -> None:
        """UserError: a wrong value. What a class of one's own raises otherwise is left to its run, which says where."""
        text = json.dumps(node, sort_keys=True, default=str)
        if text in self._seen:
            return
        self._seen.add(text)
        try:
            workload = build(node)
            if isinstance(workload, Workload):
                workload.check()
        except UserError:
            raise
        except Exception as error:
            _log.info("workload %s: %s", text, error)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, bool, int, float, list, tuple, dict))


def _class_name(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


class Text(str):
    """A value in the command line's own syntax, to be taken as it is."""


def override(key: str, value: Any) -> str:
    """A key and a Python value in the command line's syntax."""
    return f"{'+' if key in ADDITIVE else ''}{key}={_text(value)}"


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Text):
        return str(value)
    if isinstance(value, str):
        return value if value.replace("_", "a").replace("-", "a").isalnum() else "'" + value.replace("'", "\\'") + "'"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_text(v)}" for k, v in value.items()) + "}"
    return repr(value)
