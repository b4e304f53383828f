"""What was found, in files: JSON (all of it), parquet (a row a figure), Markdown (for reading)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab.gpucheck.findings import Finding

MARKS = {True: "yes", False: "**no**", None: ""}


def write_report(folder: Path, environment: Mapping[str, Any], findings: Sequence[Finding], failures: Mapping[str, str]) -> None:
    """findings.json, findings.parquet and README.md in `folder`. `failures`: section -> traceback of what ended it."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [finding.row() for finding in findings]
    content = {"environment": dict(environment), "findings": rows, "failures": dict(failures)}
    (folder / "findings.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    frame(findings).to_parquet(folder / "findings.parquet", index=False)
    (folder / "README.md").write_text(page(environment, findings, failures), encoding="utf-8")


def frame(findings: Sequence[Finding]) -> pd.DataFrame:
    """One row a figure; settings are columns `setting.NAME`."""
    rows = pd.DataFrame([finding.row() for finding in findings])
    for column in rows.columns:
        if rows[column].dtype == object and not column.startswith("setting."):
            rows[column] = rows[column].convert_dtypes()
    settings = [column for column in rows.columns if column.startswith("setting.")]
    rows[settings] = rows[settings].map(lambda value: None if pd.isna(value) else str(value))
    return rows


def page(environment: Mapping[str, Any], findings: Sequence[Finding], failures: Mapping[str, str]) -> str:
    """The report in Markdown."""
    asked = [finding for finding in findings if finding.ok is not None]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    lines = [
        f"# GPU check: {environment['card']}", "",
        f"{environment['date']}. {versions}. Driver {environment.get('driver')}, CUDA {environment.get('cuda')}. "
        f"Command: `python -m kvlab.gpucheck {' '.join(environment['argv'])}`.", "",
    ]  # fmt: skip
    if environment["dry"]:
        lines += ["**Dry run on a CPU: the script was tested, its times mean nothing.**", ""]
    lines += [f"{sum(bool(f.ok) for f in asked)} of {len(asked)} goals hold; {len(failures)} sections ended with an error.", ""]
    for section in dict.fromkeys(finding.section for finding in findings):
        lines += [f"## {section}", "", "| what | measured | predicted | goal | holds | note |", "|---|---|---|---|---|---|"]
        lines += [_table_row(finding) for finding in findings if finding.section == section]
        lines += [""]
    for section, error in failures.items():
        lines += [f"## {section} ended with an error", "", "```", error.strip(), "```", ""]
    return "\n".join(lines)


def _table_row(finding: Finding) -> str:
    value = "not measured" if finding.value is None else f"{finding.value:.4g} {finding.unit}".strip()
    predicted = "" if finding.predicted is None else f"{finding.predicted:.4g} {finding.unit}".strip()
    return f"| {finding.label} | {value} | {predicted} | {finding.goal} | {MARKS[finding.ok]} | {finding.note} |"
