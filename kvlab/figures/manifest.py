"""Where results come from: manifest.json beside results.parquet, its checksums, and whether it still fits its configuration."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab import __version__
from kvlab.figures.points import experiment_name, hydra_points, kind_of, point_configs, read_sweep
from kvlab.figures.producing import Produced
from kvlab.figures.spec import MANIFEST, RESULTS, FigureSpec, Folder
from kvlab.trace.run_folder import environment
from kvlab.trace.store import disk_error
from kvlab.types import UserError

CHECKSUMS = "checksums"
"""The field of a manifest that holds the checksum of each other one."""
PACKAGES = ("matplotlib", "pyyaml")
"""Looked up besides those of a run's env.json."""


def config_hash(folder: Folder, spec: FigureSpec) -> str:
    """What the results follow from, in 16 hex digits: every sweep*.yaml (its content, not its comments) and the measuring code."""
    sweeps = {path.stem: read_sweep(path) for path in folder.sweeps()}
    text = json.dumps([sweeps, spec.sources()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def resolved(folder: Folder) -> dict[str, Any]:
    """The configuration of each sweep's first point, as it resolves today (of the other kinds: the file's content)."""
    out: dict[str, Any] = {}
    for path in folder.sweeps():
        content = read_sweep(path)
        if kind_of(content) == "hydra":
            out[experiment_name(folder, path)] = point_configs(hydra_points(folder, path)[:1])[0]
        else:
            out[experiment_name(folder, path)] = content
    return out


def results_bytes(frame: pd.DataFrame) -> bytes:
    """The frame as a parquet file, without pandas' metadata (which name a version)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None), buffer, compression="zstd")
    return buffer.getvalue()


def sha256(content: bytes) -> str:
    """Checksum in hex."""
    return hashlib.sha256(content).hexdigest()


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with the checksum of each of its fields: 16 hex digits over the field as JSON without spaces, keys in order.

    They tell what was edited by hand; who edits them too is not found out.
    """
    content = json.loads(json.dumps({name: value for name, value in manifest.items() if name != CHECKSUMS}))
    return {**content, CHECKSUMS: {name: _checksum(value) for name, value in content.items()}}


def edited(manifest: Mapping[str, Any]) -> list[str]:
    """Fields that are not what their checksum says: changed, gone, or added."""
    known, now = manifest.get(CHECKSUMS), sealed(manifest)[CHECKSUMS]
    if not isinstance(known, Mapping):
        return [CHECKSUMS]
    return [name for name in {**now, **known} if known.get(name) != now.get(name)]


def _checksum(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())[:16]


def make(folder: Folder, spec: FigureSpec, produced: Produced, results: bytes) -> dict[str, Any]:
    """The manifest of new results."""
    env = environment(produced.device)
    versions = dict(env["versions"])
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return sealed({
        "figure": folder.name, "number": spec.number, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(produced.seconds, 1), "points": produced.num_points, "device": produced.device, "seeds": produced.seeds,
        "results": {"sha256": sha256(results), "rows": len(produced.frame), "columns": list(produced.frame.columns)},
        "config_hash": config_hash(folder, spec), "kvlab": __version__, "git_commit": env["git_commit"], "git_dirty": env["git_dirty"],
        "python": env["python"], "platform": env["platform"], "cpu": env["cpu"], "versions": versions, "config": resolved(folder),
    })  # fmt: skip


def read(folder: Folder) -> dict[str, Any]:
    """The committed manifest. UserError where there is none, it is damaged, or a field is not what was written (edited by hand)."""
    path = folder.path / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        told = f"Restore it (git checkout {path}), or run: python -m kvlab.figures run {folder.name}"
        raise UserError(f"{path} is missing: nothing says where {RESULTS} comes from. {told}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}. Restore it (git checkout {path}).") from error
    if not isinstance(content, dict) or not isinstance(content.get("results"), dict):
        raise UserError(f"{path} is damaged: it has no 'results'. Restore it (git checkout {path}).")
    if changed := edited(content):
        told = "is not what was written there: edited by hand? Nothing was overwritten."
        raise UserError(f"{path}: {', '.join(changed)} {told} Restore it (git checkout {path}).")
    return content


def read_results(folder: Folder) -> pd.DataFrame:
    """The committed results. UserError where they are missing, damaged, or not what the manifest says (edited by hand)."""
    path = folder.path / RESULTS
    if not path.is_file():
        raise UserError(f"{path} is missing. Run: python -m kvlab.figures run {folder.name}")
    content = path.read_bytes()
    said = read(folder)["results"].get("sha256")
    if sha256(content) != said:
        sums = f"sha256 {sha256(content)[:12]}..., there {str(said)[:12]}..."
        raise UserError(
            f"{path} is not the file that {MANIFEST} names ({sums}): edited by hand? Nothing was overwritten. "
            f"Restore it (git checkout {path}), or move it away and run: python -m kvlab.figures run {folder.name}"
        )
    try:
        return pd.read_parquet(io.BytesIO(content))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}. Restore it (git checkout {path}).") from error


def differences(folder: Folder, spec: FigureSpec) -> list[str]:
    """Why the manifest does not fit the folder any more; empty: it does. Keys that are new in the configuration don't count."""
    manifest = read(folder)
    found = _foreign(manifest, folder, spec)
    if manifest.get("config_hash") != config_hash(folder, spec):
        hashes = f"hash {config_hash(folder, spec)}, manifest {manifest.get('config_hash')}"
        found.append(f"sweep.yaml or the measuring code of figure.py changed after the results were made ({hashes})")
    recorded = manifest.get("config", {})
    for name, config in resolved(folder).items():
        if name not in recorded:
            found.append(f"the manifest knows no sweep {name!r}")
        else:
            found += [f"{name}: {line}" for line in _drift(recorded[name], config, "")]
    return found


def _foreign(manifest: Mapping[str, Any], folder: Folder, spec: FigureSpec) -> list[str]:
    """What a manifest says that the figure contradicts: it is another figure's."""
    facts = {"figure": folder.name, "number": spec.number}
    wrong = {name: value for name, value in facts.items() if manifest.get(name) != value}
    return [f"the manifest says {name} = {manifest.get(name)!r}, which is {value!r}" for name, value in wrong.items()]


def _drift(recorded: Any, today: Any, where: str) -> list[str]:
    """Values that both have and that differ, as "key is 2 today, was 1"."""
    if isinstance(recorded, Mapping) and isinstance(today, Mapping):
        return [line for key in recorded if key in today for line in _drift(recorded[key], today[key], f"{where}.{key}".lstrip("."))]
    return [] if recorded == today else [f"{where} is {today!r} today, was {recorded!r} when the results were made"]


def write_all(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write several files: all are on the disk before the first takes the place of an old one.

    Raises:
        UserError: no space, no permission; the old files are as they were.
    """
    staged: list[tuple[Path, Path]] = []
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            path = folder / name
            staged.append((folder / f".{name}.new", path))
            staged[-1][0].write_bytes(content)
        for new, old in staged:
            path = old
            new.replace(old)
    except OSError as error:
        raise UserError(f"{disk_error(path, error)} Nothing was overwritten.") from error
    finally:
        for new, _ in staged:
            with suppress(OSError):
                new.unlink(missing_ok=True)
