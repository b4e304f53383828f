"""Every notebook runs from top to bottom in a fresh kernel, and shows what its text says. Committed without outputs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PLOTLY = "application/vnd.plotly.v1+json"

# Evaluated in the kernel after the last cell; what it prints is what the test looks at.
PROBES = {
    "01_quickstart": """
import json
print("PROBE" + json.dumps({
    "states": [run.state, roomy.state, *runs["status"]],
    "same_tokens": bool(same_tokens),
    "preemptions": [run.summary["num_preemptions"], roomy.summary["num_preemptions"]],
    "evicted": [run.summary["num_evicted_blocks"], roomy.summary["num_evicted_blocks"]],
    "answers": requests["answer"].tolist(),
    "pool": steps[["kv_blocks_used", "kv_blocks_evictable", "kv_blocks_free"]].sum(axis=1).unique().tolist(),
    "hit_rate": {f"{r.eviction} {r.block_size}": r.prefix_cache_hit_rate_tokens for r in runs.itertuples()},
}))
""",
}


def execute(path: Path, folder: Path) -> tuple[list[Any], dict[str, Any]]:
    """Run a notebook in `folder`; all outputs of its cells, and what its probe printed."""
    notebook = nbformat.read(path, as_version=4)
    num_cells = len(notebook.cells)
    notebook.cells.append(nbformat.v4.new_code_cell(PROBES[path.stem]))
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", store_widget_state=False, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    outputs = [o for cell in notebook.cells[:num_cells] for o in cell.get("outputs", [])]
    printed = "".join(o.get("text", "") for o in notebook.cells[-1].outputs)
    return outputs, json.loads(printed.split("PROBE", 1)[1])


def test_there_is_a_probe_for_every_notebook():
    assert {path.stem for path in NOTEBOOKS} == set(PROBES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert "widgets" not in notebook.metadata


@pytest.mark.slow
def test_quickstart(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    outputs, probe = execute(ROOT / "notebooks" / "01_quickstart.ipynb", tmp_path)
    assert probe["states"] == ["finished"] * 8
    assert probe["same_tokens"] is True
    assert probe["preemptions"][0] > 0
    assert probe["preemptions"][1] == 0
    assert probe["evicted"][0] > 0
    assert probe["evicted"][1] == 0
    assert len(probe["answers"]) == 12
    assert all(len(answer) > 5 for answer in probe["answers"])
    assert probe["pool"] == [28]  # the three bands add up to the pool in every step
    rates = probe["hit_rate"]
    assert rates["lru 8"] > rates["lru 64"]  # smaller blocks share shorter prefixes
    assert all(rates[f"lru {size}"] > rates[f"fifo {size}"] for size in (8, 16, 64))
    figures = [o["data"][PLOTLY] for o in outputs if PLOTLY in o.get("data", {})]
    names = [[trace.get("name") for trace in figure["data"]] for figure in figures]
    assert names[0] == ["used", "cached (evictable)", "free", "watermark"]
    assert names[1] == ["output", "prompt"]
    assert names[2] == ["queue", "prefill", "decode", "preempted"]
    assert names[3] == ["eviction = fifo", "eviction = lru"]
    text = json.dumps(outputs)
    assert "Output token throughput (tok/s)" in text
    assert "same tokens: True" in text
    assert "Traceback" not in text
    assert len(list((tmp_path / "runs").rglob("status.json"))) == 8
