"""Folders of runs, found and read whatever became of them; what is damaged is noted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.trace.run_folder import MARK, is_alive, read_json
from kvlab.trace.store import PARTS
from kvlab.trace.summary import FIGURES

MARKS = (MARK, PARTS, "status.json", "summary.json", "steps.parquet", "requests.parquet", "steps.jsonl", "requests.jsonl")
"""A folder that holds one of these is a run's."""


def run_folders(folder: Path, depth: int = 0) -> list[Path]:
    """The runs at or under a folder in natural order. At depth 0 and 1 a folder without any stands for itself."""
    if _is_run(folder):
        return [folder]
    try:
        children = sorted((p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")), key=_natural)
    except OSError:
        children = []
    inner = [run for child in children if not child.is_symlink() for run in run_folders(child, depth + 1)]
    return inner or ([folder] if depth <= 1 else [])


def runs_inside(folder: Path) -> list[Path]:
    """The runs in a folder that is no run's itself, at most two levels down (a sweep's points, a folder of sweeps), in natural order."""
    if _is_run(folder):
        return []
    inner = [*_children(folder), *(grandchild for child in _children(folder) if not _is_run(child) for grandchild in _children(child))]
    return [run for run in inner if _is_run(run)]


def _children(folder: Path) -> list[Path]:
    """Folders in a folder; hidden ones and links left out, and all of one that can't be read."""
    try:
        return sorted((p for p in folder.iterdir() if p.is_dir() and not p.is_symlink() and not p.name.startswith(".")), key=_natural)
    except OSError:
        return []


def what_holds(folder: Path, runs: Sequence[Path]) -> str:
    """A folder of runs in words."""
    number = f"{len(runs)} run{'s' * (len(runs) != 1)}"
    return f"{folder} is a sweep's folder ({number})" if all(run.parent == folder for run in runs) else f"{folder} holds {number}"


def _is_run(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in MARKS)


def _natural(path: Path) -> list[Any]:
    """Sort key under which 10 comes after 9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", path.name) if part]


class RunFiles(NamedTuple):
    """What the small files of a run's folder say; `notes`: what is damaged in them. See the attributes of `kvlab.results.Run`."""

    config: dict[str, Any]
    summary: dict[str, Any]
    status: dict[str, Any]
    env: dict[str, Any]
    notes: list[str]


def read_run(folder: Path) -> RunFiles:
    """A folder's small files; `status["state"]` is always there."""
    notes: list[str] = []
    status = _json(folder, "status.json", notes)
    config, summary = _config(folder, notes), _summary(folder, notes)
    return RunFiles(config, summary, {**status, "state": _state(folder, status)}, _json(folder, "env.json", notes), notes)


def _state(folder: Path, status: Mapping[str, Any]) -> str:
    state = status.get("state")
    if isinstance(state, str):
        return "killed" if state == "running" and not is_alive(dict(status)) else state
    if _is_run(folder):
        return "partial"
    try:
        return "foreign" if any(folder.iterdir()) else "empty"
    except OSError:
        return "foreign"


def _json(folder: Path, name: str, notes: list[str]) -> dict[str, Any]:
    path = folder / name
    if not path.exists():
        return {}
    try:
        value = read_json(path)
        if isinstance(value, dict):
            return value
        notes.append(f"{name} is damaged: not an object")
    except (OSError, ValueError) as error:
        notes.append(f"{name} is damaged: {error}")
    return {}


def _summary(folder: Path, notes: list[str]) -> dict[str, Any]:
    """The figures of a run; those that are no numbers are left out."""
    summary = _json(folder, "summary.json", notes)
    for figure in FIGURES:
        value = summary.get(figure.key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            notes.append(f"summary.json is damaged: {figure.key} is {value!r:.40}, no number")
            del summary[figure.key]
    return summary


def _config(folder: Path, notes: list[str]) -> dict[str, Any]:
    path = folder / "config.yaml"
    if not _is_run(folder) or not path.exists():
        return {}
    try:
        value = _parse_yaml(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
        notes.append("config.yaml is damaged: not a mapping")
    except (OSError, ValueError) as error:
        notes.append(f"config.yaml is damaged: {str(error).splitlines()[0]}")
    return {}


def _parse_yaml(text: str) -> Any:
    """A value from YAML; from JSON alone (which kvlab writes then) where PyYAML is missing. Raises ValueError."""
    try:
        import yaml
    except ImportError:
        return json.loads(text)
    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # the C one is ten times as fast
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def visible_names(folder: Path) -> list[str]:
    """What a folder holds besides logs and hidden files."""
    return sorted(p.name for p in folder.iterdir() if not (p.name.startswith(".") or p.suffix == ".log")) if folder.is_dir() else []


def foreign(folder: Path, name: str) -> str:
    """What to do about a point's folder that holds something else."""
    return f"{folder} holds {name!r}, which is no run's: move it away, or choose another folder for the sweep."
