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
    "03_eviction_and_prefix_caches": """
import json
print("PROBE" + json.dumps({
    "rates": {f"{r.policy} {r.capacity_blocks}": r.block_hit_rate_any for r in sweep.frame.itertuples()},
    "capacities": sorted(int(c) for c in sweep.frame["capacity_blocks"].unique()),
    "largest_gap": float(largest_gap),
    "sharing": {f"{r.prefix_cache} {r.block_size}": r.prefix_cache_hit_rate_tokens for r in runs.itertuples()},
}))
""",
    "04_scheduling_chunking_preemption": """
import json
gaps = by_batching.frame.set_index(["batching", "max_num_batched_tokens"])["p99_itl_ms"]
slowest = requests.groupby("batching")["ttft_s"].quantile([0.9, 0.95, 0.99]).unstack()
print("PROBE" + json.dumps({
    "ttft": dict(zip(by_scheduling["scheduling"], by_scheduling["mean_ttft_ms"])),
    "p99_itl": {f"{name} {budget}": value for (name, budget), value in gaps.items()},
    "slowest_ttft": {name: list(row) for name, row in slowest.iterrows()},
    "preemptions": [recompute.summary["num_preemptions"], careful.summary["num_preemptions"]],
    "swapped": [recompute.summary["swapped_out_blocks"], swap.summary["swapped_out_blocks"]],
    "limit": explanation.limit,
    "knobs": [advice.knob for advice in explanation.advice],
}))
""",
    "06_inside_the_block_pool": """
import json
import numpy as np
from kvlab.notebook.block_log import SHARED, SWAPPED
at = block_map(swapping).states(swapped_at, "cpu")
print("PROBE" + json.dumps({
    "states": [r.state for r in (paging, forks, shared, swapping)],
    "kinds": {k: int(v) for k, v in forks.blocks()["kind"].value_counts().items()},
    "shared_at_2": int((block_map(forks, step=2).states(2) == SHARED).sum()),
    "evicted": shared.summary["num_evicted_blocks"], "hits": shared.summary["prefix_cache_hit_rate_tokens"],
    "preemptions": swapping.summary["num_preemptions"], "swapped_at": int((at == SWAPPED).sum()),
    "cpu_used": int(swapping.steps()["cpu_blocks_used"][swapped_at]), "linked": block_map(shared).step == tree.step == 60,
}))
""",
    "07_kernels_and_block_size": """
import json
sizes_2048 = model[model["context"] == 2048].set_index("block_size")
print("PROBE" + json.dumps({
    "MB": decode["MB"].round(3).tolist(), "flop_per_byte": decode["FLOP per byte"].tolist(),
    "lookups": {str(b): int(n) for b, n in sizes_2048["lookups"].items()}, "table_share": sizes_2048["table_share"].tolist(),
    "us": sizes_2048["predicted us"].tolist(), "limits": prefill["limit"].to_dict(),
    "cpu": [list(cpu["block_size"]), cpu["decode steps"].tolist(), cpu["step ms"].tolist()], "states": list(runs["status"]),
    "measured": measured.query("card == 'gpucheck'")[["section", "block_size", "value", "predicted"]].values.tolist(),
}))
""",
    "08_real_to_simulated": """
import json
print("PROBE" + json.dumps({
    "states": [real.state, simulated.state, *answers["status"]],
    "tokens": [real.summary["num_output_tokens"], simulated.summary["num_output_tokens"]],
    "held_out": [fit.held_out.num_steps, fit.held_out.median],
    "source": simulated.summary["step_cost"]["name"],
    "ttft": answers["mean_ttft_ms"].tolist(),
}))
""",
    "02_block_size_and_watermark": """
import json
print("PROBE" + json.dumps({
    "states": [explorer.run.state, run.state, *sizes["status"], *marks["status"]],
    "drawn": [explorer.run.config["watermark"], len(explorer.pins), explorer.num_drawn],
    "message": explorer.message.text,
    "traces": [trace.name for trace in explorer.figure().data],
    "fragmentation": sizes["mean_internal_fragmentation_tokens"].tolist(),
    "hit_rate": sizes["prefix_cache_hit_rate_tokens"].tolist(),
    "preemptions": marks["num_preemptions"].tolist(),
    "ttft": marks["mean_ttft_ms"].tolist(),
    "steps_of_map": pool.num_steps,
    "steps": len(run.steps()),
}))
""",
    "05_write_your_own_policy": """
import json
print("PROBE" + json.dumps({
    "states": [run.state, mine.state, usual.state, *runs["status"]],
    "lab": [lab.message.text, list(lab.results["policy"])],
    "any": points.pivot(index="policy", columns="capacity_blocks", values="block_hit_rate_any").to_dict("index"),
    "same_tokens": bool(same_tokens),
    "evicted": [mine.summary["num_evicted_blocks"], usual.summary["num_evicted_blocks"]],
    "names": list(runs["eviction"]),
    "config": run.config["eviction"],
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
    assert len(probe["answers"]) == 8
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


@pytest.mark.slow
def test_block_size_and_watermark(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    outputs, probe = execute(ROOT / "notebooks" / "02_block_size_and_watermark.ipynb", tmp_path)
    assert probe["states"] == ["finished"] * 16
    assert probe["drawn"] == [0.2, 1, 2]
    assert probe["message"] == ""
    assert probe["traces"][:3] == ["used", "cached (evictable)", "watermark"]
    assert probe["traces"].count("B=16 N=192 wm=1%") == 4
    assert probe["fragmentation"][0] == 0  # blocks of one token
    assert probe["fragmentation"] == sorted(probe["fragmentation"])
    assert probe["hit_rate"][-1] < 0.75 * probe["hit_rate"][0]  # blocks of 128 tokens share no shorter prefix
    assert probe["preemptions"] == sorted(probe["preemptions"], reverse=True)
    assert probe["preemptions"][0] > 50
    assert probe["preemptions"][-1] == 0
    assert probe["ttft"][-1] > 2 * probe["ttft"][0]
    assert probe["steps_of_map"] == probe["steps"] > 100
    assert "Traceback" not in json.dumps(outputs)


@pytest.mark.slow
def test_write_your_own_policy(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    outputs, probe = execute(ROOT / "notebooks" / "05_write_your_own_policy.ipynb", tmp_path)
    assert probe["states"] == ["finished"] * 12
    assert probe["lab"][1] == ["Mine", "lru", "fifo", "lfu", "s3fifo", "sieve", "arc", "belady"]
    assert "more than none of 6 rivals" in probe["lab"][0]  # as the text says: it loses
    for size in probe["any"]["lru"]:
        rates = {name: row[size] for name, row in probe["any"].items()}
        assert max(rates.values()) == rates["belady"]
        assert rates["Tail(128)"] > rates["Tail(2)"] >= rates["lru"]
    assert probe["same_tokens"] is True
    assert min(probe["evicted"]) > 0
    assert probe["names"] == ["lru"] * 3 + ["fifo"] * 3 + ["Tail"] * 3
    assert probe["config"] == {"_target_": "__main__.Tail", "penalty": 32.0}
    assert "Traceback" not in json.dumps(outputs)


def names_of_figures(outputs: list[Any]) -> list[list[str]]:
    figures = [o["data"][PLOTLY] for o in outputs if PLOTLY in o.get("data", {})]
    return [[trace.get("name") for trace in figure["data"]] for figure in figures]


@pytest.mark.slow
def test_eviction_and_prefix_caches_without_a_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    outputs, probe = execute(ROOT / "notebooks" / "03_eviction_and_prefix_caches.ipynb", tmp_path)
    policies = ("lru", "fifo", "lfu", "sieve", "s3fifo")
    assert len(probe["capacities"]) == 5
    for capacity in probe["capacities"]:  # offline, any block, access semantics: nobody beats belady
        assert all(probe["rates"][f"{p} {capacity}"] <= probe["rates"][f"belady {capacity}"] + 1e-12 for p in policies)
    assert f"at most {100 * probe['largest_gap']:.2f} points apart" in json.dumps(outputs)
    sharing = probe["sharing"]
    assert all(sharing[f"radix {size}"] == sharing[f"hash {size}"] for size in (16, 128))  # two indexes of the same full blocks
    assert sharing["radix, partial copy 128"] > sharing["hash 128"] > 0  # the tail that fills no block
    assert names_of_figures(outputs)[0] == [*policies, "belady (offline bound)"]
    text = json.dumps(outputs)
    assert ("SYNTHETIC STAND-IN" in text) != ("Real trace: " in text)


@pytest.mark.slow
def test_scheduling_chunking_preemption(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    outputs, probe = execute(ROOT / "notebooks" / "04_scheduling_chunking_preemption.ipynb", tmp_path)
    assert probe["ttft"]["sjf_oracle"] < probe["ttft"]["fcfs"]
    gaps, slowest = probe["p99_itl"], probe["slowest_ttft"]
    assert gaps["chunked 512"] == min(gaps.values())
    for name in ("prefill_first", "chunked"):  # the trade that the text tells of
        assert gaps[f"{name} 512"] < gaps[f"{name} 4096"]
        assert all(a > b for a, b in zip(slowest[f"{name}, budget 512"], slowest[f"{name}, budget 4096"], strict=True))
    assert probe["preemptions"][0] > 10 > probe["preemptions"][1]
    assert probe["swapped"][0] == 0 < probe["swapped"][1]
    assert probe["limit"] == "blocks"
    assert any("watermark" in knob for knob in probe["knobs"])
    assert list(dict.fromkeys(names_of_figures(outputs)[0]))[:2] == ["scheduling = fcfs", "scheduling = sjf_oracle"]


@pytest.mark.slow
def test_kernels_and_block_size(tmp_path, monkeypatch):
    """With results of two block sizes beside it, as `python -m kvlab.gpucheck` writes them."""
    from kvlab.gpucheck.findings import Finding
    from kvlab.gpucheck.report import frame

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    found = [Finding("decode", "latency", 0.5, "ms", {"block_size": 1}, 0.25), Finding("decode", "latency", None, "ms", {"block_size": 2}),
             Finding("decode", "latency", 0.3, "ms", {"block_size": 16}, 0.25), Finding("swap", "errors", 0.0, "")]  # fmt: skip
    (tmp_path / "gpucheck").mkdir()
    frame(found).to_parquet(tmp_path / "gpucheck" / "findings.parquet", index=False)
    outputs, probe = execute(ROOT / "notebooks" / "07_kernels_and_block_size.ipynb", tmp_path)
    # 64 sequences of 512 tokens: K and V of 8 heads of 128 in 2 bytes, and 32 heads of queries and results
    assert probe["MB"][0] == round((64 * 512 * 2 * 8 * 128 * 2 + 64 * 2 * 32 * 128 * 2) / 1e6, 3)
    assert all(3.9 < intensity < 4 for intensity in probe["flop_per_byte"][1:])
    assert probe["lookups"] == {str(size): 64 * 2048 // size for size in (1, 2, 4, 8, 16, 32, 64, 128)}
    assert probe["table_share"][0] < 0.001
    assert probe["us"][0] / probe["us"][-1] < 1.001  # flat
    assert probe["limits"]["1"] == "memory"
    assert probe["limits"]["2048"] == "arithmetic"
    assert probe["states"] == ["finished"] * 3
    assert probe["cpu"][0] == [1, 16, 128]
    assert min(probe["cpu"][1]) >= 8
    assert all(0 < ms < 10_000 for ms in probe["cpu"][2])
    assert probe["measured"] == [["decode", 1, 0.5, 0.25], ["decode", 16, 0.3, 0.25]]
    assert ["what = gpucheck, least possible", "what = gpucheck, measured"] in names_of_figures(outputs)


@pytest.mark.slow
def test_real_to_simulated(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    outputs, probe = execute(ROOT / "notebooks" / "08_real_to_simulated.ipynb", tmp_path)
    assert probe["states"] == ["finished"] * 6
    assert probe["tokens"] == [256, 256]
    assert probe["held_out"][0] >= 10
    assert 0 < probe["held_out"][1] < 1
    assert probe["source"] == "Fitted"
    assert probe["ttft"] == sorted(probe["ttft"], reverse=True)  # the more run at once, the shorter the wait
    assert names_of_figures(outputs)[1][0] == "run = real"


@pytest.mark.slow
def test_inside_the_block_pool(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    outputs, probe = execute(ROOT / "notebooks" / "06_inside_the_block_pool.ipynb", tmp_path)
    assert probe["states"] == ["finished"] * 4
    assert probe["kinds"]["copy"] == 8  # four requests, two further samples each: a copy of the half-full block for each
    assert probe["kinds"]["share"] == 40  # and five blocks of a prompt of 72 tokens taken by each
    assert probe["shared_at_2"] > 0
    assert probe["evicted"] > 0
    assert probe["hits"] > 0.3
    assert probe["preemptions"] > 0
    assert probe["swapped_at"] == probe["cpu_used"] > 0
    assert probe["linked"] is True
    widgets = [o for o in outputs if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    assert len(widgets) == 7
    assert len([o for o in outputs if PLOTLY in o.get("data", {})]) == 2
    assert "Traceback" not in json.dumps(outputs)
    assert (tmp_path / "block_map.html").stat().st_size > 50_000
